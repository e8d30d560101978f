//! A host's certificates and keys, in a directory, with the file names that Cloud Hypervisor uses.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    client::Resumption,
    crypto::{CryptoProvider, ring},
    pki_types::{
        CertificateDer, PrivateKeyDer,
        pem::{self, PemObject},
    },
    server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier},
    version::TLS13,
};

/// Why a directory is unusable.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("cannot read {what} from {}", path.display())]
    File {
        /// What the file should contain.
        what: &'static str,
        /// The file's path.
        path: PathBuf,
        /// The cause.
        source: pem::Error,
    },
    /// The files do not match.
    #[error("the certificates of {} do not serve", directory.display())]
    Unfit {
        /// The directory.
        directory: PathBuf,
        /// The cause.
        source: rustls::Error,
    },
    /// The authority's certificates are unusable.
    #[error("{} has no certificates of an authority", path.display())]
    Authority {
        /// The file's path.
        path: PathBuf,
        /// The cause.
        source: VerifierBuilderError,
    },
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    read.map_err(|source| Error::File {
        what: "certificates",
        path: path.to_owned(),
        source,
    })
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, Error> {
    PrivateKeyDer::from_pem_file(path).map_err(|source| Error::File {
        what: "a private key",
        path: path.to_owned(),
        source,
    })
}

fn authority(directory: &Path) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(&directory.join("ca-cert.pem"))? {
        roots.add(certificate).map_err(unfit(directory))?;
    }
    Ok(roots)
}

fn unfit(directory: &Path) -> impl Fn(rustls::Error) -> Error {
    |source| Error::Unfit {
        directory: directory.to_owned(),
        source,
    }
}

/// The TLS configuration of a source.
pub fn client(directory: &Path) -> Result<Arc<ClientConfig>, Error> {
    let certificate = certificates(&directory.join("client-cert.pem"))?;
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(unfit(directory))?
        .with_root_certificates(authority(directory)?)
        .with_client_auth_cert(certificate, key(&directory.join("client-key.pem"))?)
        .map_err(unfit(directory))?;
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// The TLS configuration of a destination, which requires a certificate from the client, too.
pub fn server(directory: &Path) -> Result<Arc<ServerConfig>, Error> {
    let roots = Arc::new(authority(directory)?);
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider())
        .build()
        .map_err(|source| Error::Authority {
            path: directory.join("ca-cert.pem"),
            source,
        })?;
    let certificate = certificates(&directory.join("server-cert.pem"))?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(unfit(directory))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(certificate, key(&directory.join("server-key.pem"))?)
        .map_err(unfit(directory))?;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}
