//! Addresses of workers: `unix:PATH`, `tls://HOST:PORT`, or `tcp://HOST:PORT` on the same machine.

use std::{fmt, path::PathBuf, str::FromStr};

/// Where a stream reaches a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// A port of this machine, without TLS.
    Tcp(Host),
    /// A port of a host, with TLS.
    Tls(Host),
}

/// A port of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its name or IP address.
    pub name: String,
    /// The port.
    pub port: u16,
}

/// A text that is not an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no address: write unix:PATH, tls://HOST:PORT or tcp://HOST:PORT")]
pub struct NoAddress(String);

impl FromStr for Host {
    type Err = NoAddress;

    fn from_str(text: &str) -> Result<Self, NoAddress> {
        let none = || NoAddress(text.to_owned());
        let (name, port) = text.rsplit_once(':').ok_or_else(none)?;
        // IPv6 addresses contain colons and are enclosed in brackets.
        let name = match name.strip_prefix('[') {
            Some(rest) => rest.strip_suffix(']').ok_or_else(none)?,
            None if name.contains(':') => return Err(none()),
            None => name,
        };
        let port = port.parse().map_err(|_| none())?;
        if name.is_empty() || port == 0 {
            return Err(none());
        }
        let name = name.to_owned();
        Ok(Self { name, port })
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name.contains(':') {
            write!(f, "[{}]:{}", self.name, self.port)
        } else {
            write!(f, "{}:{}", self.name, self.port)
        }
    }
}

impl FromStr for Address {
    type Err = NoAddress;

    fn from_str(text: &str) -> Result<Self, NoAddress> {
        let whole = |_| NoAddress(text.to_owned());
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            Ok(Self::Unix(path.into()))
        } else if let Some(host) = text.strip_prefix("tls://") {
            Ok(Self::Tls(host.parse().map_err(whole)?))
        } else if let Some(host) = text.strip_prefix("tcp://") {
            Ok(Self::Tcp(host.parse().map_err(whole)?))
        } else {
            Err(NoAddress(text.to_owned()))
        }
    }
}

impl Address {
    /// Whether a text is intended as an address, rather than as the path of a socket that passes
    /// files.
    pub fn is_meant(text: &str) -> bool {
        text.contains("://") || text.starts_with("unix:")
    }
}

/// Where a pool listens for streams.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// On a Unix socket.
    Unix(PathBuf),
    /// On a port of one of this machine's addresses.
    Tcp(Host),
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Self::Unix(path.into()));
        }
        text.strip_prefix("tcp:")
            .and_then(|host| host.parse().ok())
            .map(Self::Tcp)
            .ok_or_else(|| format!("{text:?}: write unix:PATH or tcp:ADDRESS:PORT"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str, port: u16) -> Host {
        let name = name.to_owned();
        Host { name, port }
    }

    #[test]
    fn addresses_are_read_and_others_refused() {
        let read = |text: &str| text.parse::<Address>().ok();
        assert_eq!(
            read("tls://gpu.example:7070"),
            Some(Address::Tls(host("gpu.example", 7070)))
        );
        assert_eq!(
            read("tcp://[::1]:7070"),
            Some(Address::Tcp(host("::1", 7070)))
        );
        assert_eq!(read("unix:/run/s"), Some(Address::Unix("/run/s".into())));
        for wrong in [
            "tls://gpu.example",
            "tls://:7070",
            "tls://::1:7070",
            "tls://gpu:0",
            "tls://gpu:70000",
            "unix:",
            "http://gpu:80",
            "/run/s",
        ] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_place_to_listen_is_a_path_or_a_port() {
        let read = |text: &str| text.parse::<Listen>().ok();
        assert_eq!(read("tcp:[::]:7070"), Some(Listen::Tcp(host("::", 7070))));
        assert_eq!(read("unix:/run/s"), Some(Listen::Unix("/run/s".into())));
        assert_eq!(read("tcp:7070"), None);
    }

    #[test]
    fn the_path_of_a_socket_is_not_meant_as_an_address() {
        assert!(Address::is_meant("tls://gpu"));
        assert!(Address::is_meant("unix:/run/s"));
        assert!(!Address::is_meant("/run/gantry/opencl.sock"));
    }
}
