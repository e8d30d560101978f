//! Unix sockets that clients find by a file name.
//!
//! The file outlives a process that is killed. A process that wants the name therefore checks
//! whether the socket is in use, and otherwise removes the file. A lock on the folder prevents
//! another process from doing the same in between, and from removing a new socket.

use std::{
    fs::{self, File, Metadata},
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{
            fs::{FileTypeExt, MetadataExt},
            net::{UnixDatagram, UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Maximum time to wait for another process that checks a socket in the same folder. Any process
/// that can read the folder can hold the lock, so nothing may depend on getting it.
const PATIENCE: Duration = Duration::from_secs(1);

/// Why a socket of this name is not possible.
#[derive(Debug, thiserror::Error)]
pub enum NameError {
    /// Another process listens on it.
    #[error("another process listens on {}: stop it, or use another socket", .0.display())]
    InUse(PathBuf),
    /// A socket received from another process is not the one that clients find.
    #[error("the socket that came for {} is another one", .0.display())]
    NotThatSocket(PathBuf),
    /// The name belongs to a file that is not a socket.
    #[error("{} is no socket: move it away, or use another path", .0.display())]
    NotASocket(PathBuf),
    /// The socket cannot be created.
    #[error(
        "cannot listen on {}: it needs a writable folder and a path of at most 107 bytes",
        path.display()
    )]
    Bind {
        /// Its path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// The file of a socket. It is removed on drop, if it still belongs to the socket.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// File system and inode. They stay unique while the listener is open.
    identity: Option<(u64, u64)>,
    /// Another process owns the socket, so the file stays.
    stays: Arc<AtomicBool>,
}

/// A socket that is handed over to another process, which continues to listen.
#[derive(Clone, Debug)]
pub struct SharedSocket {
    path: PathBuf,
    listener: Weak<UnixListener>,
    stays: Arc<AtomicBool>,
}

impl SharedSocket {
    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A descriptor of it; `None` if it is closed.
    ///
    /// # Errors
    ///
    /// If there are too many open descriptors.
    pub fn descriptor(&self) -> io::Result<Option<OwnedFd>> {
        let listener = self.listener.upgrade();
        let copy = listener.map(|listener| listener.try_clone());
        Ok(copy.transpose()?.map(OwnedFd::from))
    }

    /// Sets whether its file is removed together with it. It must not be once another process has
    /// the socket, and not before this process has taken it over from another.
    pub fn set_own(&self, own: bool) {
        self.stays.store(!own, Ordering::SeqCst);
    }
}

/// A socket that clients can connect to.
#[derive(Debug)]
pub struct NamedSocket {
    /// Its file. It is dropped before the listener is closed, because afterwards another file may
    /// have the same identity.
    pub file: SocketFile,
    /// Non-blocking.
    pub listener: Arc<UnixListener>,
}

impl NamedSocket {
    /// Listens at `path`. A stale socket file, on which no process listens, is replaced. The umask decides who may
    /// connect.
    ///
    /// # Errors
    ///
    /// If another process listens there, if the file is not a socket, or if it cannot be created.
    pub fn listen(path: &Path) -> Result<Self, NameError> {
        Self::bind(path, |path| UnixListener::bind(path))
    }

    /// The same for a socket to which no user but the own one, and root, may connect.
    ///
    /// # Errors
    ///
    /// As [`Self::listen`].
    pub fn listen_privately(path: &Path) -> Result<Self, NameError> {
        Self::bind(path, base::socket::bind_privately)
    }

    /// The same for a socket to which only the own user, the group of the file, and root may connect.
    ///
    /// # Errors
    ///
    /// As [`Self::listen`].
    pub fn listen_for_group(path: &Path) -> Result<Self, NameError> {
        Self::bind(path, base::socket::bind_for_group)
    }

    fn bind(
        path: &Path,
        bind: impl FnOnce(&Path) -> io::Result<UnixListener>,
    ) -> Result<Self, NameError> {
        let failed = |source| NameError::Bind {
            path: path.to_owned(),
            source,
        };
        let _lock = lock_folder(path);
        make_way(path)?;
        let listener = bind(path).map_err(failed)?;
        let file = SocketFile {
            path: path.to_owned(),
            identity: fs::symlink_metadata(path).ok().map(|file| identity(&file)),
            stays: Arc::default(),
        };
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self {
            listener: Arc::new(listener),
            file,
        })
    }

    /// Listens on a socket that another process has created at `path`; the descriptor is untrusted.
    /// The file belongs to that process until [`SharedSocket::set_own`].
    ///
    /// # Errors
    ///
    /// If it is another socket, or not a socket.
    pub fn adopt(path: &Path, descriptor: OwnedFd) -> Result<Self, NameError> {
        let listener = UnixListener::from(descriptor);
        let address = listener.local_addr().ok();
        let at = address.as_ref().and_then(|address| address.as_pathname());
        if at != Some(path) {
            return Err(NameError::NotThatSocket(path.to_owned()));
        }
        listener
            .set_nonblocking(true)
            .map_err(|source| NameError::Bind {
                path: path.to_owned(),
                source,
            })?;
        let file = SocketFile {
            path: path.to_owned(),
            identity: fs::symlink_metadata(path).ok().map(|file| identity(&file)),
            stays: Arc::new(AtomicBool::new(true)),
        };
        Ok(Self {
            listener: Arc::new(listener),
            file,
        })
    }

    /// A handle for another process that will continue to listen.
    pub fn share(&self) -> SharedSocket {
        SharedSocket {
            path: self.file.path.clone(),
            listener: Arc::downgrade(&self.listener),
            stays: Arc::clone(&self.file.stays),
        }
    }

    /// Accepts a waiting client, non-blocking.
    ///
    /// # Errors
    ///
    /// As accept(2); `WouldBlock` if there is none.
    pub fn accept(&self) -> io::Result<UnixStream> {
        let (stream, _) = self.listener.accept()?;
        stream.set_nonblocking(true)?;
        Ok(stream)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let found = fs::symlink_metadata(&self.path).ok();
        // Another process may have removed it, or replaced it by another file.
        if !self.stays.load(Ordering::SeqCst)
            && self.identity.is_some()
            && found.map(|file| identity(&file)) == self.identity
            && let Err(error) = fs::remove_file(&self.path)
        {
            log::warn!("cannot remove the socket {}: {error}", self.path.display());
        }
    }
}

fn identity(file: &Metadata) -> (u64, u64) {
    (file.dev(), file.ino())
}

/// Prevents other processes from taking a name in this folder until the returned file is closed.
/// `None` if the lock is unavailable: the folder cannot be read, or another process keeps the lock.
fn lock_folder(path: &Path) -> Option<File> {
    let folder = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let folder = File::open(folder).ok()?;
    let deadline = Instant::now() + PATIENCE;
    // SAFETY: a call without pointers, on an open descriptor.
    while unsafe { libc::flock(folder.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
        if Instant::now() >= deadline {
            log::debug!("the folder of {} stays locked", path.display());
            return None;
        }
        thread::sleep(Duration::from_millis(1));
    }
    Some(folder)
}

/// Removes a stale socket file at `path`, on which no process listens.
fn make_way(path: &Path) -> Result<(), NameError> {
    let failed = |source| NameError::Bind {
        path: path.to_owned(),
        source,
    };
    match fs::symlink_metadata(path) {
        Ok(file) if file.file_type().is_socket() => {}
        Ok(_) => return Err(NameError::NotASocket(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
    }
    // Connecting with the wrong socket type distinguishes a dead socket (refused) from a live one
    // (wrong type) without becoming a client of the live one.
    let connected = UnixDatagram::unbound().and_then(|socket| socket.connect(path));
    match connected.map_err(|error| error.kind()) {
        Err(io::ErrorKind::ConnectionRefused) => fs::remove_file(path).map_err(failed),
        Err(io::ErrorKind::NotFound) => Ok(()),
        Err(io::ErrorKind::PermissionDenied) => {
            Err(failed(io::Error::from(io::ErrorKind::PermissionDenied)))
        }
        _ => Err(NameError::InUse(path.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not_disturbed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let socket = NamedSocket::listen(&path).unwrap();
        assert!(matches!(
            NamedSocket::listen(&path),
            Err(NameError::InUse(_))
        ));
        let error = socket.accept().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "nobody connected");
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_is_handed_over_with_the_clients_that_wait() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let first = NamedSocket::listen(&path).unwrap();
        let shared = first.share();
        let copy = || shared.descriptor().unwrap().unwrap();
        let elsewhere = dir.path().join("elsewhere");
        assert!(matches!(
            NamedSocket::adopt(&elsewhere, copy()),
            Err(NameError::NotThatSocket(_))
        ));
        // An adopted socket that is never used leaves the file to the first process.
        drop(NamedSocket::adopt(&path, copy()).unwrap());
        assert!(path.exists());
        let _client = UnixStream::connect(&path).unwrap();
        let second = NamedSocket::adopt(&path, copy()).unwrap();
        shared.set_own(false);
        second.share().set_own(true);
        drop(first);
        assert!(path.exists() && shared.descriptor().unwrap().is_none());
        second.accept().unwrap();
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_is_no_socket_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "precious").unwrap();
        assert!(matches!(
            NamedSocket::listen(&path),
            Err(NameError::NotASocket(_))
        ));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn the_socket_of_a_successor_survives() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let socket = NamedSocket::listen(&path).unwrap();
        fs::rename(&path, dir.path().join("old")).unwrap();
        let _successor = UnixListener::bind(&path).unwrap();
        drop(socket);
        assert!(path.exists());
    }

    #[test]
    fn of_those_that_find_a_stale_socket_at_once_one_gets_the_name() {
        const ALL: usize = 4;
        let dir = tempfile::tempdir().unwrap();
        for round in 0..200 {
            let path = dir.path().join(round.to_string());
            drop(UnixListener::bind(&path).unwrap());
            let start = Barrier::new(ALL);
            let sockets: Vec<_> = thread::scope(|scope| {
                let contender = || {
                    start.wait();
                    NamedSocket::listen(&path)
                };
                let threads: Vec<_> = (0..ALL).map(|_| scope.spawn(contender)).collect();
                let results = threads.into_iter().map(|thread| thread.join().unwrap());
                results.filter_map(Result::ok).collect()
            });
            assert_eq!(sockets.len(), 1);
            assert_eq!(
                sockets[0].file.identity,
                fs::symlink_metadata(&path).ok().map(|f| identity(&f))
            );
        }
    }

    #[test]
    fn a_folder_that_somebody_keeps_locked_stops_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let _kept = lock_folder(&path).unwrap();
        assert!(NamedSocket::listen(&path).is_ok());
    }
}
