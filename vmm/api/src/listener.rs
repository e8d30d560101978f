//! The API's listening sockets.

use std::{
    io,
    os::{
        fd::{FromRawFd, OwnedFd, RawFd},
        unix::net::UnixListener,
    },
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
};

use devices::named_socket::{NameError, NamedSocket, SocketFile};

/// Where the API is served: `PATH`, `path=PATH` or `fd=N`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum ApiSocket {
    /// A Unix socket to create.
    Path(PathBuf),
    /// An inherited listening socket.
    Fd(RawFd),
}

impl FromStr for ApiSocket {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(fd) = text.strip_prefix("fd=") {
            return match fd.parse() {
                Ok(fd) if fd > 2 => Ok(Self::Fd(fd)),
                _ => Err(format!("'{fd}' is no number of an inherited descriptor")),
            };
        }
        let path = text.strip_prefix("path=").unwrap_or(text);
        if path.is_empty() {
            return Err("the path is empty".to_owned());
        }
        Ok(Self::Path(PathBuf::from(path)))
    }
}

/// What the clients of a socket may ask for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Access {
    /// Everything.
    Full,
    /// Metrics: requests that are answered with figures and change nothing.
    Metrics,
}

/// The API cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The socket cannot be created at this path.
    #[error("cannot serve the API")]
    Name(#[from] NameError),
    /// The inherited descriptor is not a listening socket.
    #[error("descriptor {fd} is no listening Unix socket")]
    Inherited {
        /// Its number.
        fd: RawFd,
        /// The cause.
        source: io::Error,
    },
}

/// A listening socket; its file is removed when it is dropped.
#[derive(Debug)]
pub struct Listener {
    socket: Arc<UnixListener>,
    #[expect(dead_code, reason = "removes the file")]
    file: Option<SocketFile>,
    access: Access,
}

impl Listener {
    /// Starts listening. A stale socket file, which nobody listens on, is replaced. Only the
    /// process's own user may connect, because clients can make Gantry read and write host files.
    pub fn open(socket: &ApiSocket) -> Result<Self, ListenError> {
        match socket {
            ApiSocket::Path(path) => Self::bind(path),
            ApiSocket::Fd(fd) => Self::inherit(*fd),
        }
    }

    fn bind(path: &Path) -> Result<Self, ListenError> {
        let NamedSocket { listener, file } = NamedSocket::listen_privately(path)?;
        Ok(Self {
            socket: listener,
            file: Some(file),
            access: Access::Full,
        })
    }

    /// Starts listening for clients that may read metrics and do nothing else. The group of the socket's file may
    /// connect, too. A stale socket file is replaced.
    pub fn open_for_metrics(path: &Path) -> Result<Self, NameError> {
        let NamedSocket { listener, file } = NamedSocket::listen_for_group(path)?;
        base::socket::refuse_files(&*listener);
        Ok(Self {
            socket: listener,
            file: Some(file),
            access: Access::Metrics,
        })
    }

    fn inherit(fd: RawFd) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Inherited { fd, source };
        let mut listening: libc::c_int = 0;
        let mut len = 4;
        // SAFETY: `listening` has the length stated in `len`.
        let result = unsafe {
            libc::getsockopt(
                fd,
                libc::SOL_SOCKET,
                libc::SO_ACCEPTCONN,
                (&raw mut listening).cast(),
                &raw mut len,
            )
        };
        if result != 0 {
            return Err(failed(io::Error::last_os_error()));
        }
        if listening == 0 {
            let message = "nobody has called listen on it";
            return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, message)));
        }
        // SAFETY: the descriptor is open, as the call above has shown, and whoever started this
        // process has handed it over to the API.
        let socket = UnixListener::from(unsafe { OwnedFd::from_raw_fd(fd) });
        socket.set_nonblocking(true).map_err(failed)?;
        Ok(Self {
            socket: Arc::new(socket),
            file: None,
            access: Access::Full,
        })
    }

    /// What its clients may ask for.
    pub(super) fn access(&self) -> Access {
        self.access
    }

    /// The socket, non-blocking.
    pub(super) fn socket(&self) -> &UnixListener {
        &self.socket
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::{fd::IntoRawFd, unix::fs::PermissionsExt},
    };

    use super::*;

    #[test]
    fn a_socket_is_named_in_three_ways() {
        let path = ApiSocket::Path(PathBuf::from("/s"));
        assert_eq!("/s".parse(), Ok(path.clone()));
        assert_eq!("path=/s".parse(), Ok(path));
        assert_eq!("fd=7".parse(), Ok(ApiSocket::Fd(7)));
        for bad in ["", "path=", "fd=", "fd=x", "fd=-1", "fd=1"] {
            assert!(bad.parse::<ApiSocket>().is_err(), "{bad}");
        }
    }

    #[test]
    fn only_the_own_user_may_connect_and_the_file_goes_with_the_listener() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let listener = Listener::bind(&path).unwrap();
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert!(matches!(
            Listener::bind(&path),
            Err(ListenError::Name(NameError::InUse(_)))
        ));
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn the_group_of_its_file_may_connect_to_a_socket_for_metrics() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics");
        let listener = Listener::open_for_metrics(&path).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o660);
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn an_inherited_descriptor_has_to_be_a_listening_socket() {
        let file = fs::File::open("/dev/null").unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        assert!(matches!(
            Listener::inherit(fd),
            Err(ListenError::Inherited { .. })
        ));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let fd = UnixListener::bind(&path).unwrap().into_raw_fd();
        assert!(Listener::inherit(fd).is_ok());
    }
}
