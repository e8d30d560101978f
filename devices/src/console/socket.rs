//! A console on a Unix socket.

use std::{
    fs, io,
    os::unix::{
        fs::{FileTypeExt, MetadataExt},
        net::{UnixDatagram, UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
};

/// A listening socket that removes its file when it is dropped.
#[derive(Debug)]
pub(super) struct ConsoleSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode: the file is removed only while it is this socket's.
    file: (u64, u64),
}

impl ConsoleSocket {
    /// Listens at `path`. A socket file that a dead process left there is replaced.
    pub(super) fn bind(path: &Path) -> io::Result<Self> {
        remove_stale(path)?;
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        let metadata = fs::symlink_metadata(path)?;
        Ok(Self {
            listener,
            path: path.to_owned(),
            file: (metadata.dev(), metadata.ino()),
        })
    }

    pub(super) fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// A client that is waiting, non-blocking.
    pub(super) fn accept(&self) -> io::Result<UnixStream> {
        let (stream, _) = self.listener.accept()?;
        stream.set_nonblocking(true)?;
        Ok(stream)
    }
}

impl Drop for ConsoleSocket {
    fn drop(&mut self) {
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.file);
        if ours {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes a socket file at `path` that no process listens on.
fn remove_stale(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.file_type().is_socket() => {}
        Ok(_) => return Err(io::ErrorKind::AlreadyExists.into()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    }
    // Connecting with the wrong socket type tells a dead socket (refused) from a live one (wrong
    // type) without becoming the live one's client.
    match UnixDatagram::unbound()?.connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        _ => Err(io::ErrorKind::AddrInUse.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not_disturbed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let socket = ConsoleSocket::bind(&path).unwrap();
        let error = ConsoleSocket::bind(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        let error = socket.accept().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_is_no_socket_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console");
        fs::write(&path, "data").unwrap();
        let error = ConsoleSocket::bind(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"data");
    }

    #[test]
    fn a_socket_leaves_its_successors_file_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console");
        let first = ConsoleSocket::bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let _second = ConsoleSocket::bind(&path).unwrap();
        drop(first);
        assert!(path.exists());
    }
}
