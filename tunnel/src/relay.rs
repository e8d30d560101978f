//! Relays bytes in both directions, until one side has ended.

use std::{
    io::{self, Read, Write},
    net::Shutdown,
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixStream,
    },
    time::{Duration, Instant},
};

use rustls::Connection;

use crate::door::Known;

/// Bytes moved at a time, which is also the maximum that waits in each direction.
const CHUNK: usize = 64 << 10;

/// How long the other side, and its tunnel, may stay silent after one side has ended.
pub const LINGER: Duration = Duration::from_secs(30);

/// Decrypted bytes that the VMM has not taken yet.
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

/// Relays until both directions have ended, or the connection breaks. If the network's side ends
/// without TLS confirming it, that is an error: somebody may have cut the connection. Once one side
/// has ended, the other may stay silent for `linger`.
pub fn run(vmm: &UnixStream, known: Known, linger: Duration) -> io::Result<()> {
    let Known {
        mut socket,
        mut tls,
    } = known;
    socket.set_nonblocking(true)?;
    vmm.set_nonblocking(true)?;
    tls.set_buffer_limit(Some(4 * CHUNK));
    let mut chunk = vec![0; CHUNK];
    let mut waiting = Waiting::default();
    // The first bytes may have arrived with the end of the handshake, with nothing after them.
    let mut network_ended = !decrypt(&mut tls, &mut waiting)?;
    let (mut vmm_ended, mut told) = (false, false);
    let mut moved = Instant::now();
    loop {
        // From the VMM, as long as the network accepts data.
        while !vmm_ended && !tls.wants_write() {
            match again((&mut &*vmm).read(&mut chunk))? {
                None => break,
                Some(0) => {
                    vmm_ended = true;
                    tls.send_close_notify();
                }
                Some(count) => tls.writer().write_all(&chunk[..count])?,
            }
            moved = Instant::now();
            flush(&mut tls, &mut socket)?;
        }
        if flush(&mut tls, &mut socket)? {
            moved = Instant::now();
        }
        // To the VMM, which must take everything before more is decrypted.
        if waiting.is_empty() && !network_ended {
            network_ended = !take(&mut tls, &mut socket, &mut waiting)?;
        }
        while !waiting.is_empty() {
            match again((&mut &*vmm).write(&waiting.bytes[waiting.from..]))? {
                None => break,
                Some(count) => {
                    waiting.from += count;
                    moved = Instant::now();
                }
            }
        }
        if network_ended && waiting.is_empty() && !told {
            told = true;
            moved = Instant::now();
            // The VMM may have ended as well.
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
        // Both sides may be silent for as long as both are present.
        let left = match vmm_ended || network_ended {
            true => Some(linger.saturating_sub(moved.elapsed())),
            false => None,
        };
        if left.is_some_and(|left| left.is_zero()) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        poll(
            [
                (vmm.as_raw_fd(), from_vmm),
                (socket.as_raw_fd(), from_network),
            ],
            left,
        )?;
    }
}

/// Sends encrypted data as far as the network accepts it. Returns whether it accepted any.
fn flush(tls: &mut Connection, socket: &mut impl Write) -> io::Result<bool> {
    let mut taken = false;
    while tls.wants_write() && again(tls.write_tls(socket))?.is_some() {
        taken = true;
    }
    Ok(taken)
}

/// Reads and decrypts what has arrived; false at its end.
fn take(tls: &mut Connection, socket: &mut impl Read, waiting: &mut Waiting) -> io::Result<bool> {
    waiting.bytes.clear();
    waiting.from = 0;
    let ended = match again(tls.read_tls(socket))? {
        None => return Ok(true),
        Some(count) => count == 0,
    };
    match (decrypt(tls, waiting)?, ended) {
        (true, true) => Err(io::ErrorKind::UnexpectedEof.into()),
        (open, _) => Ok(open),
    }
}

/// Decrypts what has been read; false at its end.
fn decrypt(tls: &mut Connection, waiting: &mut Waiting) -> io::Result<bool> {
    let state = tls.process_new_packets().map_err(io::Error::other)?;
    // Bounded by what was read, plus at most one record.
    waiting.bytes.resize(state.plaintext_bytes_to_read(), 0);
    tls.reader().read_exact(&mut waiting.bytes)?;
    Ok(!state.peer_has_closed())
}

/// `None` if the operation would block.
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

/// Waits for one of the descriptors, with a maximum time.
fn poll<const N: usize>(
    wanted: [(RawFd, libc::c_short); N],
    most: Option<Duration>,
) -> io::Result<()> {
    // Rounded up, so that the remaining time is over afterwards; -1 waits forever.
    let most = most.map_or(-1, |most| {
        libc::c_int::try_from(most.as_millis() + 1).unwrap_or(libc::c_int::MAX)
    });
    // A descriptor without wanted events is left out: a known hangup would be reported forever.
    let mut fds = wanted.map(|(fd, events)| libc::pollfd {
        fd: if events == 0 { -1 } else { fd },
        events,
        revents: 0,
    });
    // SAFETY: `N` descriptors in an array that outlives the call.
    let result = unsafe { libc::poll(fds.as_mut_ptr(), N as libc::nfds_t, most) };
    again(usize::try_from(result).map_err(|_| io::Error::last_os_error())).map(drop)
}
