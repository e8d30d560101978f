//! Sends and receives memory with as few system calls as the socket allows, without a buffer in between.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use vm_memory::VolatileSlice;

/// Maximum number of vectors per system call (`UIO_MAXIOV`).
const MOST: usize = 1024;

/// Sends what follows the first `done` bytes of the concatenation of buffers and memory, which may be changing; returns
/// how much the socket accepted.
pub fn send(
    socket: BorrowedFd<'_>,
    buffers: &[&[u8]],
    memory: &[VolatileSlice<'_>],
    done: usize,
) -> io::Result<usize> {
    let buffers = buffers
        .iter()
        .map(|buffer| (buffer.as_ptr().cast_mut(), buffer.len()));
    let mut vectors = after(buffers.chain(memory.iter().map(place)), done);
    let message = message(&mut vectors);
    // SAFETY: the vectors refer to buffers and memory that are borrowed until this returns; the kernel only reads them.
    count(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) })
}

/// Fills memory after its first `done` bytes, with as much data as arrives within the socket's timeout.
pub fn receive(
    socket: BorrowedFd<'_>,
    memory: &[VolatileSlice<'_>],
    done: usize,
) -> io::Result<usize> {
    let mut vectors = after(memory.iter().map(place), done);
    let mut message = message(&mut vectors);
    // SAFETY: the vectors refer to memory that is borrowed until this returns and contains no Rust object.
    count(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_WAITALL) })
}

fn place(slice: &VolatileSlice<'_>) -> (*mut u8, usize) {
    (slice.ptr_guard_mut().as_ptr(), slice.len())
}

/// The vectors for what follows the first `done` bytes, in the form that the kernel takes.
fn after(pieces: impl Iterator<Item = (*mut u8, usize)>, mut done: usize) -> Vec<libc::iovec> {
    let mut vectors = Vec::new();
    for (address, len) in pieces {
        let skipped = done.min(len);
        done -= skipped;
        if skipped < len {
            vectors.push(libc::iovec {
                iov_base: address.wrapping_add(skipped).cast(),
                iov_len: len - skipped,
            });
        }
        if vectors.len() == MOST {
            break;
        }
    }
    vectors
}

fn message(vectors: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: all-zero is a valid value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = vectors.len();
    message
}

fn count(moved: isize) -> io::Result<usize> {
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use std::os::{fd::AsFd, unix::net::UnixStream};

    use super::*;

    #[test]
    fn pieces_arrive_in_order_wherever_a_call_ends() {
        let (here, there) = UnixStream::pair().unwrap();
        let mut source = *b"cdefg";
        let mut target = [0; 8];
        for done in 0..7 {
            let (head, tail) = source.split_at_mut(2);
            let memory = [head, tail].map(VolatileSlice::from);
            assert_eq!(
                send(here.as_fd(), &[b"", b"ab"], &memory, done).unwrap(),
                7 - done
            );
            target.fill(b'.');
            let (first, rest) = target.split_at_mut(1);
            let memory = [first, rest].map(VolatileSlice::from);
            // The timeout expires before all data has arrived.
            here.set_nonblocking(true).unwrap();
            there
                .set_read_timeout(Some(std::time::Duration::from_millis(1)))
                .unwrap();
            let got = receive(there.as_fd(), &memory, done).unwrap();
            assert_eq!(got, 7 - done);
            assert_eq!(target[done..7], b"abcdefg"[done..]);
            assert!(target[..done].iter().all(|byte| *byte == b'.'));
        }
    }

    #[test]
    fn one_call_takes_as_many_pieces_as_the_kernel_allows() {
        let (here, there) = UnixStream::pair().unwrap();
        let mut source = vec![7; MOST + 3];
        let memory: Vec<_> = source.chunks_mut(1).map(VolatileSlice::from).collect();
        assert_eq!(send(here.as_fd(), &[b"x"], &memory, 0).unwrap(), MOST);
        assert_eq!(send(here.as_fd(), &[b"x"], &memory, MOST).unwrap(), 4);
        let mut target = vec![0; MOST + 4];
        let memory = [VolatileSlice::from(&mut target[..])];
        assert_eq!(receive(there.as_fd(), &memory, 0).unwrap(), MOST + 4);
        assert!(target[0] == b'x' && target[1..].iter().all(|byte| *byte == 7));
    }
}
