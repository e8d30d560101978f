//! Bytes in both directions, until one side has ended.

use std::{
    io::{self, Read, Write},
    net::Shutdown,
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixStream,
    },
};

use rustls::Connection;

use crate::door::Known;

/// Bytes that are moved at once, and that wait in either direction.
const CHUNK: usize = 64 << 10;

/// One direction's bytes that the VMM has not taken yet.
#[derive(Default)]
struct Waiting {
    bytes: Vec<u8>,
    from: usize,
}

impl Waiting {
    fn is_empty(&self) -> bool {
        self.from == self.bytes.len()
    }
}

/// Relays until both directions have ended, or the connection breaks. An end of the network's side
/// that TLS does not confirm is an error: somebody may have cut it.
pub fn run(vmm: &UnixStream, known: Known) -> io::Result<()> {
    let Known {
        mut socket,
        mut tls,
    } = known;
    socket.set_nonblocking(true)?;
    vmm.set_nonblocking(true)?;
    tls.set_buffer_limit(Some(4 * CHUNK));
    let mut chunk = vec![0; CHUNK];
    let mut waiting = Waiting::default();
    let (mut vmm_ended, mut network_ended, mut told) = (false, false, false);
    loop {
        // From the VMM, as long as the network takes it.
        while !vmm_ended && !tls.wants_write() {
            match again((&mut &*vmm).read(&mut chunk))? {
                None => break,
                Some(0) => {
                    vmm_ended = true;
                    tls.send_close_notify();
                }
                Some(count) => tls.writer().write_all(&chunk[..count])?,
            }
            flush(&mut tls, &mut socket)?;
        }
        flush(&mut tls, &mut socket)?;
        // To the VMM, which has to take all before more is decrypted.
        if waiting.is_empty() && !network_ended {
            network_ended = !take(&mut tls, &mut socket, &mut waiting)?;
        }
        while !waiting.is_empty() {
            match again((&mut &*vmm).write(&waiting.bytes[waiting.from..]))? {
                None => break,
                Some(count) => waiting.from += count,
            }
        }
        if network_ended && waiting.is_empty() && !told {
            told = true;
            // It may have ended as well.
            let _ = vmm.shutdown(Shutdown::Write);
        }
        if told && vmm_ended && !tls.wants_write() {
            return Ok(());
        }
        let mut from_vmm = 0;
        if !vmm_ended && !tls.wants_write() {
            from_vmm |= libc::POLLIN;
        }
        if !waiting.is_empty() {
            from_vmm |= libc::POLLOUT;
        }
        let mut from_network = 0;
        if waiting.is_empty() && !network_ended {
            from_network |= libc::POLLIN;
        }
        if tls.wants_write() {
            from_network |= libc::POLLOUT;
        }
        poll([
            (vmm.as_raw_fd(), from_vmm),
            (socket.as_raw_fd(), from_network),
        ])?;
    }
}

/// Sends what is encrypted, as far as the network takes it.
fn flush(tls: &mut Connection, socket: &mut impl Write) -> io::Result<()> {
    while tls.wants_write() && again(tls.write_tls(socket))?.is_some() {}
    Ok(())
}

/// Decrypts what has arrived; false at its end.
fn take(tls: &mut Connection, socket: &mut impl Read, waiting: &mut Waiting) -> io::Result<bool> {
    waiting.bytes.clear();
    waiting.from = 0;
    let ended = match again(tls.read_tls(socket))? {
        None => return Ok(true),
        Some(count) => count == 0,
    };
    let state = tls.process_new_packets().map_err(io::Error::other)?;
    // Bounded by what was read: at most a record more.
    waiting.bytes.resize(state.plaintext_bytes_to_read(), 0);
    tls.reader().read_exact(&mut waiting.bytes)?;
    if state.peer_has_closed() {
        return Ok(false);
    }
    match ended {
        true => Err(io::ErrorKind::UnexpectedEof.into()),
        false => Ok(true),
    }
}

/// `None` if it would have to wait.
fn again(moved: io::Result<usize>) -> io::Result<Option<usize>> {
    match moved {
        Ok(count) => Ok(Some(count)),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn poll<const N: usize>(wanted: [(RawFd, libc::c_short); N]) -> io::Result<()> {
    // One that is not waited for is left out: an end that is known would be reported for ever.
    let mut fds = wanted.map(|(fd, events)| libc::pollfd {
        fd: if events == 0 { -1 } else { fd },
        events,
        revents: 0,
    });
    // SAFETY: as many descriptors as the array has, which outlives the call.
    let result = unsafe { libc::poll(fds.as_mut_ptr(), N as libc::nfds_t, -1) };
    again(usize::try_from(result).map_err(|_| io::Error::last_os_error())).map(drop)
}
