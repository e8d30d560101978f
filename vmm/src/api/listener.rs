//! The socket that clients connect to.

use std::{
    fs, io,
    os::{
        fd::{FromRawFd, OwnedFd, RawFd},
        unix::{
            fs::{FileTypeExt, MetadataExt, PermissionsExt},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    str::FromStr,
};

/// Where the API is served: `PATH`, `path=PATH` or `fd=N`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum ApiSocket {
    /// A Unix socket to be made.
    Path(PathBuf),
    /// A listening socket that was inherited.
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

/// The API cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another process serves it there.
    #[error("the API socket {0} is in use by another process")]
    InUse(PathBuf),
    /// A file of another kind is in the way.
    #[error("{0} exists and is no socket; remove it or choose another API socket")]
    NotASocket(PathBuf),
    /// The socket cannot be made.
    #[error("cannot listen on the API socket {path}")]
    Bind {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// What was inherited is no listening socket.
    #[error("descriptor {fd} is no listening Unix socket")]
    Inherited {
        /// Its number.
        fd: RawFd,
        /// Why.
        source: io::Error,
    },
}

/// A listening socket; its file is removed when it is dropped.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    file: Option<SocketFile>,
}

#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// Device and inode, so that a successor's file is left alone.
    identity: (u64, u64),
}

impl Listener {
    /// Listens. The file of a socket that nobody listens on any more is replaced. Only the own
    /// user may connect: who can may read and write the host's files.
    pub fn open(socket: &ApiSocket) -> Result<Self, ListenError> {
        match socket {
            ApiSocket::Path(path) => Self::bind(path),
            ApiSocket::Fd(fd) => Self::inherit(*fd),
        }
    }

    fn bind(path: &Path) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Bind {
            path: path.to_owned(),
            source,
        };
        match fs::symlink_metadata(path) {
            Ok(file) if !file.file_type().is_socket() => {
                return Err(ListenError::NotASocket(path.to_owned()));
            }
            Ok(_) => match UnixStream::connect(path) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    fs::remove_file(path).map_err(failed)?;
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    return Err(failed(error));
                }
                // Connected, or a backlog that is full: somebody listens.
                _ => return Err(ListenError::InUse(path.to_owned())),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        let socket = UnixListener::bind(path).map_err(failed)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        let file = fs::symlink_metadata(path).map_err(failed)?;
        Ok(Self {
            socket,
            file: Some(SocketFile {
                path: path.to_owned(),
                identity: (file.dev(), file.ino()),
            }),
        })
    }

    fn inherit(fd: RawFd) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Inherited { fd, source };
        let mut listening: libc::c_int = 0;
        let mut len = 4;
        // SAFETY: `listening` has the length that `len` says.
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
        // process has given it to the API.
        let socket = UnixListener::from(unsafe { OwnedFd::from_raw_fd(fd) });
        socket.set_nonblocking(true).map_err(failed)?;
        Ok(Self { socket, file: None })
    }

    /// The socket, non-blocking.
    pub(super) fn socket(&self) -> &UnixListener {
        &self.socket
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let Some(file) = &self.file else { return };
        let same = |found: fs::Metadata| (found.dev(), found.ino()) == file.identity;
        if fs::symlink_metadata(&file.path).is_ok_and(same)
            && let Err(error) = fs::remove_file(&file.path)
        {
            log::warn!(
                "cannot remove the API socket {}: {error}",
                file.path.display()
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::IntoRawFd;

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
    fn a_stale_socket_is_replaced_and_one_in_use_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let listener = Listener::bind(&path).unwrap();
        assert!(matches!(Listener::bind(&path), Err(ListenError::InUse(_))));
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn the_socket_of_a_successor_survives() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let listener = Listener::bind(&path).unwrap();
        fs::rename(&path, dir.path().join("old")).unwrap();
        let _successor = UnixListener::bind(&path).unwrap();
        drop(listener);
        assert!(path.exists());
    }

    #[test]
    fn a_file_in_the_way_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "precious").unwrap();
        assert!(matches!(
            Listener::bind(&path),
            Err(ListenError::NotASocket(_))
        ));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
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
