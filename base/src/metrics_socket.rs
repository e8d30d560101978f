//! A socket at which each client is told a document, and can do nothing else.
//!
//! Clients are strangers: the group of the socket's file may connect. A thread of its own serves them, so that they
//! delay nothing else. None of them delays another, and what they do not read is bounded. On kernels before 6.16, a
//! client can stop the thread for a while by a descriptor whose close hangs; nobody is told anything then.

use std::{
    io,
    net::Shutdown,
    os::{
        fd::AsRawFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    thread,
    time::{Duration, Instant},
};

use crate::socket;

/// For how long a document is told again.
const FRESH: Duration = Duration::from_millis(200);
/// Pause after a connection could not be accepted, since the next attempt would fail at once.
const PAUSE: Duration = Duration::from_millis(100);
/// Number of documents that clients have not read beyond which a user has one at most, and maximum number of each user.
const UNREAD: usize = 64;
const UNREAD_OF_USER: usize = 4;
/// Size in bytes that the buffer of a connection is given, if the machine permits it (`net.core.wmem_max`). What does not
/// fit is cut off.
const BUFFER: libc::c_int = 1 << 20;

/// Tells clients at this path a document, for as long as the process lives. A stale
/// socket file is replaced. The file stays when the process ends.
///
/// # Errors
/// It cannot listen there, or cannot start a thread.
pub fn serve(
    path: &Path,
    document: impl Fn() -> io::Result<Vec<u8>> + Send + 'static,
) -> io::Result<()> {
    let listener = socket::listen_for_group(path)?;
    socket::refuse_files(&listener);
    let teller = Teller {
        document,
        last: None,
        unread: Vec::new(),
    };
    let thread = thread::Builder::new().name("metrics".to_owned());
    thread.spawn(move || teller.serve(&listener)).map(drop)
}

struct Teller<F> {
    document: F,
    last: Option<(Instant, Vec<u8>)>,
    /// Clients that may not have read their document, by user. Each keeps memory of this process until it has.
    unread: Vec<(u32, UnixStream)>,
}

impl<F: Fn() -> io::Result<Vec<u8>>> Teller<F> {
    fn serve(mut self, listener: &UnixListener) {
        loop {
            match listener.accept() {
                // One that has gone, or is told nothing, sees the end.
                Ok((stream, _)) => drop(self.tell(stream)),
                Err(_) => thread::sleep(PAUSE),
            }
        }
    }

    fn tell(&mut self, stream: UnixStream) -> io::Result<()> {
        let user = socket::counted_as(socket::user(&stream)?);
        self.unread.retain(|(_, stream)| socket::has_unread(stream));
        let same = self.unread.iter().filter(|(other, _)| *other == user);
        // Others keep nobody from a first one.
        let most = match self.unread.len() < UNREAD {
            true => UNREAD_OF_USER,
            false => 1,
        };
        if same.count() >= most {
            return Ok(());
        }
        let is_old = |(time, _): &(Instant, _)| time.elapsed() >= FRESH;
        if self.last.as_ref().is_none_or(is_old) {
            self.last = Some((Instant::now(), (self.document)()?));
        }
        let text = self.last.as_ref().map_or(&[][..], |(_, text)| text);
        send_at_once(&stream, text)?;
        stream.shutdown(Shutdown::Write)?;
        self.unread.push((user, stream));
        Ok(())
    }
}

/// Sends as much as fits into the connection's buffer.
fn send_at_once(stream: &UnixStream, bytes: &[u8]) -> io::Result<()> {
    let size = BUFFER;
    let (fd, flags) = (stream.as_raw_fd(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
    // SAFETY: the kernel reads as many bytes as the lengths say, from a local and from `bytes`.
    let sent = unsafe {
        libc::setsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_SNDBUF,
            (&raw const size).cast(),
            size_of_val(&size) as libc::socklen_t,
        );
        libc::send(fd, bytes.as_ptr().cast(), bytes.len(), flags)
    };
    match sent {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering::Relaxed},
        },
    };

    use super::*;

    fn told(path: &Path) -> Vec<u8> {
        let mut text = Vec::new();
        let mut stream = UnixStream::connect(path).unwrap();
        stream.read_to_end(&mut text).unwrap();
        text
    }

    #[test]
    fn each_client_is_told_and_those_that_do_not_read_delay_nobody_and_cost_little() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.pool");
        serve(&path, || Ok(vec![b'x'; 300_000])).unwrap();
        assert!(told(&path).len() > 100_000);
        let mut silent: Vec<_> = (0..UNREAD_OF_USER + 2)
            .map(|_| UnixStream::connect(&path).unwrap())
            .collect();
        // They are served in turn: the last one has found that its user reads nothing.
        let mut byte = [0];
        assert_eq!(silent.pop().unwrap().read(&mut byte).unwrap(), 0);
        silent.pop();
        // One of them reads: there is room again.
        let mut text = Vec::new();
        silent.pop().unwrap().read_to_end(&mut text).unwrap();
        assert!(text.len() > 100_000);
        assert!(told(&path).len() > 100_000);
    }

    #[test]
    fn however_often_it_is_read_a_document_is_made_seldom() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.arbiter");
        let made = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&made);
        let start = Instant::now();
        serve(&path, move || {
            Ok(count.fetch_add(1, Relaxed).to_string().into())
        })
        .unwrap();
        for _ in 0..200 {
            assert!(!told(&path).is_empty());
        }
        let most = start.elapsed().as_millis() / FRESH.as_millis() + 1;
        assert!(made.load(Relaxed) as u128 <= most);
    }

    #[test]
    fn a_document_that_cannot_be_made_is_the_end_of_a_connection_and_not_of_the_thread() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.arbiter");
        let made = AtomicUsize::new(0);
        serve(&path, move || match made.fetch_add(1, Relaxed) {
            0 => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(b"text".to_vec()),
        })
        .unwrap();
        assert_eq!(told(&path), b"");
        assert_eq!(told(&path), b"text");
    }
}
