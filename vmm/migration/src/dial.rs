//! Connecting to a peer that may never answer: the kernel retries a TCP connection for two minutes, and blocks
//! indefinitely on a Unix socket whose queue is full. These functions check for cancellation meanwhile.

use std::{
    io,
    net::{SocketAddr, TcpStream, ToSocketAddrs},
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    net::{self, AddressFamily, SocketFlags, SocketType, sockopt},
};

use super::{
    connection::{STALL, TICK},
    progress::Progress,
};

/// Retry interval for a Unix socket whose listener has a full queue: there is no notification when it has room.
const AGAIN: Duration = Duration::from_millis(20);

/// Connects to a path; `None` if cancelled.
pub fn unix(path: &Path, progress: &Progress) -> io::Result<Option<UnixStream>> {
    let began = Instant::now();
    loop {
        match base::socket::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            connected => return connected.map(Some),
        }
        if progress.is_cancelled() {
            return Ok(None);
        }
        if began.elapsed() >= STALL {
            return Err(io::ErrorKind::TimedOut.into());
        }
        thread::sleep(AGAIN);
    }
}

/// Connects to `HOST:PORT`, using the first of its addresses that answers; `None` if cancelled.
pub fn tcp(host: &str, progress: &Progress) -> io::Result<Option<TcpStream>> {
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in host.to_socket_addrs()? {
        match one(address, progress) {
            Err(error) => last = error,
            connected => return connected,
        }
    }
    Err(last)
}

fn one(address: SocketAddr, progress: &Progress) -> io::Result<Option<TcpStream>> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(family, SocketType::STREAM, flags, None)?;
    match net::connect(&socket, &address) {
        Ok(()) => return Ok(Some(socket.into())),
        Err(Errno::INPROGRESS | Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let began = Instant::now();
    loop {
        if progress.is_cancelled() {
            return Ok(None);
        }
        let mut entry = [libc::pollfd {
            fd: socket.as_raw_fd(),
            events: libc::POLLOUT,
            revents: 0,
        }];
        base::poll::poll(&mut entry, Some(TICK))?;
        if entry[0].revents != 0 {
            sockopt::socket_error(&socket)??;
            return Ok(Some(socket.into()));
        }
        if began.elapsed() >= STALL {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::{TcpListener, UdpSocket},
        os::{fd::FromRawFd, unix::net::UnixListener},
        thread,
    };

    use base::tcp::{Silence, tune};

    use super::*;
    use crate::{
        Error,
        connection::{Connection, Stream},
        frame::Kind,
        progress::Direction,
    };

    #[test]
    fn a_host_that_does_not_answer_does_not_hold_up_who_cancels() {
        let progress = Progress::new(Direction::Outgoing, "test");
        // Fills the queue of a listener that nobody accepts from; further connections are not answered.
        // SAFETY: creates a socket, which the listener then owns.
        let listener = unsafe {
            let socket = libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
            assert!(socket >= 0 && libc::listen(socket, 0) == 0);
            TcpListener::from_raw_fd(socket)
        };
        let at = format!("127.0.0.1:{}", listener.local_addr().unwrap().port());
        let mut taken = Vec::new();
        let (sender, connected) = std::sync::mpsc::channel();
        let connecting = {
            let progress = progress.clone();
            thread::spawn(move || {
                loop {
                    match tcp(&at, &progress) {
                        Ok(Some(stream)) => sender.send(stream).unwrap(),
                        other => return other.map(|stream| stream.is_some()),
                    }
                }
            })
        };
        while let Ok(stream) = connected.recv_timeout(10 * TICK) {
            taken.push(stream);
        }
        progress.cancel();
        assert!(!connecting.join().unwrap().unwrap());
        drop(listener);
    }

    #[test]
    fn a_path_whose_queue_is_full_does_not_hold_up_who_cancels() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let progress = Progress::new(Direction::Outgoing, "test");
        assert!(unix(&path, &progress).is_err());
        let listener = UnixListener::bind(&path).unwrap();
        // SAFETY: no pointers; from here on the listener queues at most one connection.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
        let mut taken = Vec::new();
        while let Ok(stream) = base::socket::connect(&path) {
            taken.push(stream);
        }
        let waits = {
            let (path, progress) = (path.clone(), progress.clone());
            thread::spawn(move || unix(&path, &progress))
        };
        thread::sleep(2 * AGAIN);
        assert!(!waits.is_finished());
        // One connection is taken from the queue, and the next one takes its place.
        drop(listener.accept().unwrap());
        assert!(waits.join().unwrap().unwrap().is_some());
        progress.cancel();
        assert!(unix(&path, &progress).unwrap().is_none());
    }

    /// A network namespace of this thread, whose loopback interface can be switched on and off. `None` where this user
    /// may not create one.
    struct Network(UdpSocket);

    impl Network {
        fn own() -> Option<Self> {
            // SAFETY: no pointers; affects only this thread.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } < 0 {
                eprintln!("not tested: a network needs root");
                return None;
            }
            let network = Self(UdpSocket::bind("0.0.0.0:0").unwrap());
            network.be_up(true);
            Some(network)
        }

        /// As `ip link set lo up`, or down: the peers are not notified.
        fn be_up(&self, up: bool) {
            // SAFETY: all zeroes are a valid request, which outlives the call.
            let set = unsafe {
                let mut request: libc::ifreq = std::mem::zeroed();
                request.ifr_name[0] = b'l' as libc::c_char;
                request.ifr_name[1] = b'o' as libc::c_char;
                request.ifr_ifru.ifru_flags = if up { libc::IFF_UP as i16 } else { 0 };
                libc::ioctl(self.0.as_raw_fd(), libc::SIOCSIFFLAGS, &raw mut request)
            };
            assert_eq!(set, 0);
        }
    }

    #[test]
    fn a_host_that_has_lost_its_network_is_noticed_and_named_though_nobody_ends_the_connection() {
        let cut = thread::spawn(|| {
            let network = Network::own()?;
            let progress = Progress::new(Direction::Incoming, "test");
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let at = listener.local_addr().unwrap().to_string();
            let pair = || {
                let source = tcp(&at, &progress).unwrap().unwrap();
                let (here, _) = listener.accept().unwrap();
                let stream = Stream::Tcp(here.try_clone().unwrap());
                let mut connection = Connection::new(stream, progress.clone()).unwrap();
                // Longer than any other timeout, so that it does not matter here.
                connection.stall = Duration::from_secs(3600);
                // As for all connections, but with shorter times.
                let soon = Silence {
                    asked_after: Duration::from_secs(1),
                    gone_after: Duration::from_secs(2),
                };
                tune(&here, soon).unwrap();
                (source, connection)
            };
            let ((_source, mut waits), (_other, works)) = (pair(), pair());
            let source = works.other_side().unwrap();
            assert!(!source.has_ended(Duration::ZERO));
            network.be_up(false);
            // A thread that receives, and one that only polls.
            let received = waits.receive(&[Kind::Offer], &mut Vec::new());
            assert!(source.has_ended(Duration::from_secs(60)));
            Some([received.unwrap_err(), source.broken()])
        });
        for error in cut.join().unwrap().into_iter().flatten() {
            let said = error.to_string();
            assert!(matches!(error, Error::HostGone { .. }), "{error:?}");
            assert!(said.contains("its power or its network"), "{said}");
        }
    }

    #[test]
    fn nobody_at_a_port_is_said_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap().to_string();
        let progress = Progress::new(Direction::Outgoing, "test");
        assert!(tcp(&at, &progress).unwrap().is_some());
        drop(listener);
        let error = tcp(&at, &progress).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
