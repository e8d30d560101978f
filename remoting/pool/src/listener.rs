//! The socket at which a pool listens.

use std::{
    io,
    net::TcpListener,
    os::{fd::OwnedFd, unix::net::UnixListener},
    path::PathBuf,
    sync::Arc,
};

use base::tcp;
use remoting_stream::{
    address::Listen,
    tls::{self, Keeper},
};
use remoting_transport::socket;

use super::{options::Options, pool::Error, stream::StreamProtocol};

/// Where a pool listens, and for what.
#[derive(Clone, Debug)]
pub enum ListenConfig {
    /// At a Unix socket, for applications and machines that share memory with workers.
    Rings {
        /// Where.
        path: PathBuf,
        /// How many of one user have a worker at a time.
        per_user: usize,
        /// Where the pool's own user asks for applications to be moved.
        control: Option<PathBuf>,
    },
    /// For applications elsewhere, so many at a time.
    Streams {
        /// Where.
        listen: Listen,
        /// The private key of the certificate, if there is TLS.
        key: Option<PathBuf>,
        /// Whether a port is served without TLS, to this machine.
        plain: bool,
        /// How many applications at a time.
        most: usize,
    },
}

impl ListenConfig {
    /// Where it is, for messages.
    pub(super) fn place(&self) -> String {
        match self {
            Self::Rings { path, .. } => path.display().to_string(),
            Self::Streams { listen, .. } => match listen {
                Listen::Unix(path) => path.display().to_string(),
                Listen::Tcp(host) => host.to_string(),
            },
        }
    }
}

/// A listening socket, and the limits of what it serves.
pub(super) struct Listener {
    pub socket: OwnedFd,
    /// The protocol, if streams are served.
    pub protocol: Option<StreamProtocol>,
    /// Maximum number of applications at a time.
    pub most: usize,
    /// The same for one user.
    pub per_user: usize,
    /// Signs for workers, so that they do not have the private key.
    pub keeper: Option<Keeper>,
}

impl Listener {
    /// Whether clients are processes of this machine.
    pub(super) fn is_of_this_machine(&self) -> bool {
        matches!(self.protocol, None | Some(StreamProtocol::Unix))
    }

    pub fn open(config: ListenConfig, options: &Options) -> Result<Self, Error> {
        if let Some(option) = unused(&config, options) {
            return Err(Error::ForPorts(option));
        }
        let (listen, key, plain, most) = match config {
            ListenConfig::Rings { path, per_user, .. } => {
                return Ok(Self {
                    socket: bind(path)?.into(),
                    protocol: None,
                    most: usize::MAX,
                    per_user,
                    keeper: None,
                });
            }
            ListenConfig::Streams {
                listen,
                key,
                plain,
                most,
            } => (listen, key, plain, most),
        };
        let (socket, protocol, keeper) = match listen {
            Listen::Unix(path) => {
                let listener = bind(path)?;
                // Streams bring bytes alone. By rings' sockets slices of machines come, with files.
                socket::refuse_files(&listener);
                (listener.into(), StreamProtocol::Unix, None)
            }
            Listen::Tcp(host) => {
                let failed = |source| Error::Port {
                    host: host.clone(),
                    source,
                };
                let port = (host.name.as_str(), host.port);
                let listener = TcpListener::bind(port).map_err(failed)?;
                tcp::tune(&listener, tcp::SILENCE).map_err(failed)?;
                let here = listener.local_addr().map_err(failed)?.ip().is_loopback();
                let files = (
                    &options.stream.tls_cert,
                    &options.stream.tls_client_ca,
                    &key,
                );
                let (protocol, keeper) = match files {
                    (Some(certificate), Some(authority), Some(key)) if !plain => {
                        let keeper = Keeper::open(key, certificate)?;
                        // What workers will do, tried here where it is said at once.
                        let none = Arc::new(|_: u16, _: &[u8]| Err(io::ErrorKind::Other.into()));
                        tls::Server::open(certificate, authority, &keeper.schemes(), none)?;
                        (StreamProtocol::Tls, Some(keeper))
                    }
                    (None, None, None) if plain && here => (StreamProtocol::Tcp, None),
                    _ => return Err(Error::Plain(host)),
                };
                (listener.into(), protocol, keeper)
            }
        };
        Ok(Self {
            socket,
            protocol: Some(protocol),
            most,
            per_user: usize::MAX,
            keeper,
        })
    }
}

/// The first option that applies to TCP ports only but was given for a Unix socket: whoever gives one
/// expects TLS.
fn unused(config: &ListenConfig, options: &Options) -> Option<&'static str> {
    let (key, plain) = match config {
        ListenConfig::Rings { .. } => (false, false),
        ListenConfig::Streams {
            listen: Listen::Tcp(_),
            ..
        } => return None,
        ListenConfig::Streams { key, plain, .. } => (key.is_some(), *plain),
    };
    let given = [
        (options.stream.tls_cert.is_some(), "--tls-cert"),
        (options.stream.tls_client_ca.is_some(), "--tls-client-ca"),
        (key, "--tls-key"),
        (plain, "--plain"),
    ];
    given
        .iter()
        .find_map(|(given, option)| given.then_some(*option))
}

fn bind(path: PathBuf) -> Result<UnixListener, Error> {
    socket::listen(&path).map_err(|source| Error::Listen { path, source })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    /// Options of workers, as they are without any.
    #[derive(clap::Parser)]
    struct Given {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn a_socket_is_not_served_without_the_tls_that_was_asked_for() {
        let stream = |listen: &str, key: Option<&str>, plain| ListenConfig::Streams {
            listen: listen.parse().unwrap(),
            key: key.map(PathBuf::from),
            plain,
            most: 1,
        };
        let rings = || ListenConfig::Rings {
            path: "/s".into(),
            per_user: 1,
            control: None,
        };
        let refused = |place, given: &[&str]| {
            let words = ["gantry-accel"].iter().chain(given);
            let options = Given::try_parse_from(words).unwrap().options;
            unused(&place, &options)
        };
        let all = ["--tls-cert", "c", "--tls-client-ca", "a"];
        assert_eq!(refused(rings(), &all), Some("--tls-cert"));
        assert_eq!(refused(rings(), &all[2..]), Some("--tls-client-ca"));
        let key = stream("unix:/s", Some("k"), false);
        assert_eq!(refused(key, &[]), Some("--tls-key"));
        assert_eq!(refused(stream("unix:/s", None, true), &[]), Some("--plain"));
        assert_eq!(refused(stream("unix:/s", None, false), &[]), None);
        assert_eq!(refused(rings(), &[]), None);
        let port = stream("tcp:127.0.0.1:1", Some("k"), false);
        assert_eq!(refused(port, &all), None);
    }
}
