//! TLS 1.3 with certificates on both sides.
//!
//! A worker never has its machine's private key: what an application gives it to execute may be native code in the
//! worker's process, and would read the key. The key stays with the pool, which signs for a worker only while that
//! serves nobody ([`Keeper`]), and signs only what a server signs in a handshake.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection,
    SignatureAlgorithm, SignatureScheme,
    client::Resumption,
    crypto::{CryptoProvider, ring},
    pki_types::{
        CertificateDer, PrivateKeyDer, ServerName, UnixTime,
        pem::{self, PemObject},
    },
    server::{
        ClientHello, NoServerSessionStorage, ResolvesServerCert, VerifierBuilderError,
        WebPkiClientVerifier,
    },
    sign::{CertifiedKey, Signer, SigningKey},
    version::TLS13,
};

use webpki::{EndEntityCert, KeyUsage};

use super::address::Host;

/// What a server signs in a handshake begins with 64 spaces and this text (RFC 8446, 4.4.3).
const CONTEXT: &[u8] = b"TLS 1.3, server CertificateVerify\0";
/// The number of spaces before it.
const SPACES: usize = 64;
/// Maximum size of the hash that follows it.
const LONGEST_HASH: usize = 64;

/// Why TLS cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file that cannot be read, or that does not hold what it should.
    #[error("cannot read {what} from {path}", path = path.display())]
    File {
        /// What it should hold.
        what: &'static str,
        /// The file's path.
        path: PathBuf,
        /// The cause.
        source: pem::Error,
    },
    /// A file without a certificate.
    #[error("{0} has no certificate: it is to begin with -----BEGIN CERTIFICATE-----")]
    Empty(PathBuf),
    /// A file whose key or certificate is unusable.
    #[error("{what} of {path} does not serve", path = path.display())]
    Unfit {
        /// What the file holds.
        what: &'static str,
        /// The file's path.
        path: PathBuf,
        /// The cause.
        source: rustls::Error,
    },
    /// A key that belongs to another certificate.
    #[error(
        "the key of {key} and the certificate of {certificate} do not serve together",
        key = key.display(), certificate = certificate.display()
    )]
    Pair {
        /// The key's path.
        key: PathBuf,
        /// The certificate's path.
        certificate: PathBuf,
        /// The cause.
        source: rustls::Error,
    },
    /// Any other error.
    #[error("TLS cannot begin")]
    Begin(#[from] rustls::Error),
    /// An authority's certificates that are unusable.
    #[error("the certificates of {path} do not serve as those of an authority", path = path.display())]
    Authority {
        /// Their path.
        path: PathBuf,
        /// The cause.
        source: VerifierBuilderError,
    },
    /// An invalid name.
    #[error("{0:?} is no name that a certificate could have")]
    Name(String),
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let failed = |source| Error::File {
        what: "certificates",
        path: path.to_owned(),
        source,
    };
    let read: Vec<_> = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(failed)?;
    if read.is_empty() {
        return Err(Error::Empty(path.to_owned()));
    }
    Ok(read)
}

fn authorities(path: &Path) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|source| Error::Unfit {
            what: "a certificate",
            path: path.to_owned(),
            source,
        })?;
    }
    Ok(roots)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, Error> {
    PrivateKeyDer::from_pem_file(path).map_err(|source| Error::File {
        what: "a private key",
        path: path.to_owned(),
        source,
    })
}

fn no_pair(key: &Path, certificate: &Path) -> impl FnOnce(rustls::Error) -> Error {
    |source| Error::Pair {
        key: key.to_owned(),
        certificate: certificate.to_owned(),
        source,
    }
}

/// The identity that a client's certificate was issued for: a hash of its subject and of the authority that makes it
/// trusted, since two authorities may issue certificates for the same name. For a certificate without a subject, a hash
/// of the whole certificate.
fn subject(chain: &[CertificateDer<'_>], authorities: &RootCertStore) -> Option<[u8; 32]> {
    let (certificate, others) = chain.split_first()?;
    let parsed = EndEntityCert::try_from(certificate).ok()?;
    let path = parsed
        .verify_for_usage(
            provider().signature_verification_algorithms.all,
            &authorities.roots,
            others,
            UnixTime::now(),
            KeyUsage::client_auth(),
            None,
            None,
        )
        .ok()?;
    let subject = match parsed.subject() {
        [] => certificate.as_ref(),
        subject => subject,
    };
    let authority = path.anchor();
    let parts = [
        authority.subject.as_ref(),
        authority.subject_public_key_info.as_ref(),
        subject,
    ];
    let suite = ring::cipher_suite::TLS13_AES_128_GCM_SHA256.tls13()?;
    let mut hash = suite.common.hash_provider.start();
    for part in parts {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finish().as_ref().try_into().ok()
}

/// The application's credentials, and the authority that it trusts, as PEM files.
#[derive(Clone, Debug)]
pub struct Client {
    /// The certificates of the authority that has signed the server's.
    pub authority: PathBuf,
    /// The application's certificate, and the intermediate ones up to the authority's.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

impl Client {
    /// Starts a connection to a host, whose certificate must have its name.
    pub fn connect(&self, host: &Host) -> Result<Connection, Error> {
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])?
            .with_root_certificates(authorities(&self.authority)?)
            .with_client_auth_cert(certificates(&self.certificate)?, private_key(&self.key)?)
            .map_err(no_pair(&self.key, &self.certificate))?;
        config.resumption = Resumption::disabled();
        let name =
            ServerName::try_from(host.name.clone()).map_err(|_| Error::Name(host.name.clone()))?;
        Ok(ClientConnection::new(Arc::new(config), name)?.into())
    }
}

/// Signs for workers in the pool's process.
#[derive(Debug)]
pub struct Keeper(Arc<dyn SigningKey>);

impl Keeper {
    /// Loads the private key from this file, which must belong to the certificate.
    pub fn open(key: &Path, certificate: &Path) -> Result<Self, Error> {
        let loaded = provider()
            .key_provider
            .load_private_key(private_key(key)?)
            .map_err(|source| Error::Unfit {
                what: "the private key",
                path: key.to_owned(),
                source,
            })?;
        let pair = CertifiedKey::new(certificates(certificate)?, loaded);
        match pair.keys_match() {
            // Some keys cannot be checked.
            Ok(()) | Err(rustls::Error::InconsistentKeys(rustls::InconsistentKeys::Unknown)) => {}
            Err(error) => return Err(no_pair(key, certificate)(error)),
        }
        Ok(Self(pair.key))
    }

    /// The numbers of the signature schemes that it supports, in order of preference.
    pub fn schemes(&self) -> Vec<u16> {
        let known = [
            SignatureScheme::ED25519,
            SignatureScheme::ECDSA_NISTP256_SHA256,
            SignatureScheme::ECDSA_NISTP384_SHA384,
            SignatureScheme::RSA_PSS_SHA256,
            SignatureScheme::RSA_PSS_SHA384,
            SignatureScheme::RSA_PSS_SHA512,
        ];
        let signs = |scheme: &SignatureScheme| self.0.choose_scheme(&[*scheme]).is_some();
        known.into_iter().filter(signs).map(u16::from).collect()
    }

    /// Signs what a server signs in a handshake, and nothing else.
    pub fn sign(&self, scheme: u16, message: &[u8]) -> Option<Vec<u8>> {
        let (spaces, rest) = message.split_at_checked(SPACES)?;
        let hash = rest.strip_prefix(CONTEXT)?;
        if spaces.iter().any(|byte| *byte != b' ') || hash.len() > LONGEST_HASH {
            return None;
        }
        let signer = self.0.choose_scheme(&[SignatureScheme::from(scheme)])?;
        signer.sign(message).ok()
    }
}

/// Asks the keeper of the key to sign a message with a scheme.
pub type Ask = dyn Fn(u16, &[u8]) -> io::Result<Vec<u8>> + Send + Sync;

/// A key that the keeper holds.
struct Remote {
    schemes: Vec<SignatureScheme>,
    ask: Arc<Ask>,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Remote({:?})", self.schemes)
    }
}

impl SigningKey for Remote {
    fn choose_scheme(&self, offered: &[SignatureScheme]) -> Option<Box<dyn Signer>> {
        let wanted = |scheme: &&SignatureScheme| offered.contains(scheme);
        let scheme = *self.schemes.iter().find(wanted)?;
        let ask = Arc::clone(&self.ask);
        Some(Box::new(RemoteSigner { scheme, ask }))
    }

    fn algorithm(&self) -> SignatureAlgorithm {
        match self.schemes.first() {
            Some(&SignatureScheme::ED25519) => SignatureAlgorithm::ED25519,
            Some(
                &(SignatureScheme::ECDSA_NISTP256_SHA256 | SignatureScheme::ECDSA_NISTP384_SHA384),
            ) => SignatureAlgorithm::ECDSA,
            _ => SignatureAlgorithm::RSA,
        }
    }
}

struct RemoteSigner {
    scheme: SignatureScheme,
    ask: Arc<Ask>,
}

impl std::fmt::Debug for RemoteSigner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RemoteSigner({:?})", self.scheme)
    }
}

impl Signer for RemoteSigner {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rustls::Error> {
        (self.ask)(self.scheme.into(), message)
            .map_err(|error| rustls::Error::General(format!("the pool does not sign: {error}")))
    }

    fn scheme(&self) -> SignatureScheme {
        self.scheme
    }
}

/// A server's only certificate.
#[derive(Debug)]
struct One(Arc<CertifiedKey>);

impl ResolvesServerCert for One {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }
}

/// A worker's end.
#[derive(Clone, Debug)]
pub struct Server {
    config: Arc<ServerConfig>,
    /// The authorities that sign applications' certificates.
    authorities: Arc<RootCertStore>,
}

impl Server {
    /// Loads the server's certificates, and those of the authority that signs applications'. `ask` signs with
    /// `schemes`. No file is read afterwards.
    pub fn open(
        certificate: &Path,
        client_authority: &Path,
        schemes: &[u16],
        ask: Arc<Ask>,
    ) -> Result<Self, Error> {
        let authorities = Arc::new(authorities(client_authority)?);
        let roots = Arc::clone(&authorities);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider())
            .build()
            .map_err(|source| Error::Authority {
                path: client_authority.to_owned(),
                source,
            })?;
        let schemes = schemes.iter().copied().map(SignatureScheme::from).collect();
        let key = Arc::new(Remote { schemes, ask });
        let pair = CertifiedKey::new(certificates(certificate)?, key);
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::new(One(Arc::new(pair))));
        // A worker serves one connection and resumes none.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Self {
            config: Arc::new(config),
            authorities,
        })
    }

    /// Starts a connection from a client.
    pub fn accept(&self) -> Result<Connection, Error> {
        Ok(ServerConnection::new(Arc::clone(&self.config))?.into())
    }

    /// The identity of a connection's peer, after the handshake.
    pub fn subject(&self, connection: &Connection) -> Option<[u8; 32]> {
        subject(connection.peer_certificates()?, &self.authorities)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rcgen::{
        BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa,
        KeyPair,
    };

    use super::*;

    type Authority = CertifiedIssuer<'static, KeyPair>;

    /// Parameters for a subject with this name, or without one.
    fn named(name: Option<&str>) -> CertificateParams {
        let mut params = CertificateParams::new(vec!["guest".to_owned()]).unwrap();
        params.distinguished_name = DistinguishedName::new();
        if let Some(name) = name {
            params.distinguished_name.push(DnType::CommonName, name);
        }
        params
    }

    fn authority(name: &str, by: Option<&Authority>) -> Authority {
        let mut params = named(Some(name));
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        match by {
            None => CertifiedIssuer::self_signed(params, key).unwrap(),
            Some(by) => CertifiedIssuer::signed_by(params, key, by).unwrap(),
        }
    }

    /// A certificate with a key of its own.
    fn certificate(name: Option<&str>, by: &Authority) -> CertificateDer<'static> {
        let key = KeyPair::generate().unwrap();
        named(name).signed_by(&key, by).unwrap().into()
    }

    fn trusting(authorities: &[&Authority]) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        for authority in authorities {
            roots.add(authority.der().clone()).unwrap();
        }
        roots
    }

    #[test]
    fn files_that_do_not_serve_are_named() {
        let folder = std::env::temp_dir().join(format!("gantry-tls-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let by = authority("authority", None);
        let (own, other) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
        let signed = named(Some("web")).signed_by(&own, &by).unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let certificate = write("web.pem", &signed.pem());
        let own = write("web.key", &own.serialize_pem());
        let other = write("other.key", &other.serialize_pem());
        let head = |what| format!("-----BEGIN {what}-----\nAAAA\n-----END {what}-----\n");
        let no_key = write("bad.key", &head("PRIVATE KEY"));
        let no_certificate = write("bad.pem", &head("CERTIFICATE"));
        assert!(Keeper::open(&own, &certificate).is_ok());
        let said = |key| Keeper::open(key, &certificate).unwrap_err().to_string();
        for name in ["other.key", "web.pem"] {
            assert!(said(&other).contains(name), "{}", said(&other));
        }
        assert!(said(&no_key).contains("bad.key"), "{}", said(&no_key));
        let said = authorities(&no_certificate).unwrap_err().to_string();
        assert!(said.contains("bad.pem"), "{said}");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn certificates_of_one_subject_are_one_owners_and_others_are_not() {
        let by = authority("authority", None);
        let roots = trusting(&[&by]);
        let of = |name| subject(&[certificate(name, &by)], &roots).unwrap();
        assert_eq!(of(Some("web")), of(Some("web")));
        assert_ne!(of(Some("web")), of(Some("mail")));
        // A certificate without a name identifies its owner by itself.
        assert_ne!(of(None), of(None));
        let nameless = [certificate(None, &by)];
        assert_eq!(subject(&nameless, &roots), subject(&nameless, &roots));
        assert_eq!(
            subject(&[CertificateDer::from(vec![1, 2, 3])], &roots),
            None
        );
    }

    #[test]
    fn whom_two_authorities_name_alike_are_two_owners() {
        let (one, two) = (authority("one", None), authority("two", None));
        let roots = trusting(&[&one, &two]);
        let of = |by| subject(&[certificate(Some("web"), by)], &roots).unwrap();
        assert_ne!(of(&one), of(&two));
        // An authority that gives another one's name to whom it has sign in its place.
        let posing = authority("one", Some(&two));
        let chain = [certificate(Some("web"), &posing), posing.der().clone()];
        assert_eq!(subject(&chain, &roots), Some(of(&two)));
    }
}
