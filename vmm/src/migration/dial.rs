//! Connecting to another host, which may never answer: the kernel tries for two minutes, and a wish to cancel is
//! looked at meanwhile.

use std::{
    io,
    net::{SocketAddr, TcpStream, ToSocketAddrs},
    os::fd::AsRawFd,
    time::Instant,
};

use rustix::{
    io::Errno,
    net::{self, AddressFamily, SocketFlags, SocketType, sockopt},
};

use super::{
    connection::{STALL, TICK},
    progress::Progress,
};

/// Connects to `HOST:PORT`, of whose addresses the first counts that answers; none if that was cancelled.
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
    use std::{net::TcpListener, os::fd::FromRawFd, thread};

    use super::*;
    use crate::migration::progress::Direction;

    #[test]
    fn a_host_that_does_not_answer_does_not_hold_up_who_cancels() {
        let progress = Progress::new(Direction::Outgoing, "test");
        // As many as a socket takes that nobody accepts from; what comes after is not answered.
        // SAFETY: makes a socket, which is owned by the listener then.
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
