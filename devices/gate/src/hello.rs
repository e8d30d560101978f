//! The messages between the VMs of a server and of a client. Each side sends one: the server
//! replies to a connection with the server's descriptor and its wake-up eventfd; the client, when
//! it is paired, sends the descriptor of the shared memory. After that, the open connection only
//! indicates that the other side is alive.

use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use remoting_transport::socket;
use vmfunc_gate::port::Reason;

use super::KERNEL;

const SERVER: [u8; 8] = *b"GATESRV1";
const CLIENT: [u8; 8] = *b"GATECLI1";

/// The reply of a server's VM.
#[derive(Debug)]
pub enum Answer {
    /// A server to pair with.
    Server(Offer),
    /// There is no server, for this reason.
    No(Reason),
}

/// A server to pair with.
#[derive(Debug)]
pub struct Offer {
    /// Address of its window.
    pub window: u64,
    /// As in [`super::Caller::kernel`].
    pub kernel: [u64; KERNEL],
    /// Its descriptor.
    pub server: OwnedFd,
    /// An eventfd that wakes it.
    pub wake: OwnedFd,
}

/// Size of a reply in bytes: magic, reason, window, kernel.
const ANSWER: usize = 8 + 8 + 8 + 8 * KERNEL;
/// Size of a client's message in bytes: magic, pages.
const SHARED: usize = 8 + 8;

/// Sends the descriptors of a server.
pub fn offer(
    stream: &UnixStream,
    window: u64,
    kernel: &[u64; KERNEL],
    server: BorrowedFd<'_>,
    wake: BorrowedFd<'_>,
) -> io::Result<()> {
    socket::send(
        stream,
        &answer(Reason::None, window, kernel),
        &[server, wake],
    )
}

/// Replies that there is no server.
pub fn refuse(stream: &UnixStream, why: Reason) -> io::Result<()> {
    socket::send(stream, &answer(why, 0, &[0; KERNEL]), &[])
}

fn answer(reason: Reason, window: u64, kernel: &[u64; KERNEL]) -> Vec<u8> {
    let mut bytes = SERVER.to_vec();
    bytes.extend((reason as u64).to_le_bytes());
    bytes.extend(window.to_le_bytes());
    bytes.extend(kernel.iter().flat_map(|number| number.to_le_bytes()));
    bytes
}

/// Receives a server's reply, which must already be readable. Messages this short arrive whole.
pub fn receive_answer(stream: &UnixStream) -> io::Result<Answer> {
    let mut bytes = [0; ANSWER];
    let (got, files) = socket::receive(stream, &mut bytes)?;
    let numbers = numbers::<{ KERNEL + 2 }>(&bytes, SERVER);
    let Some([reason, window, kernel @ ..]) = numbers.filter(|_| got == ANSWER) else {
        return Err(io::Error::other("it is no server of the gate"));
    };
    match <[OwnedFd; 2]>::try_from(files) {
        Ok([server, wake]) => Ok(Answer::Server(Offer {
            window,
            kernel,
            server,
            wake,
        })),
        Err(_) => {
            let reason = u32::try_from(reason).ok().and_then(Reason::from_number);
            Ok(Answer::No(reason.unwrap_or(Reason::Unreachable)))
        }
    }
}

/// Sends the shared memory to the server's VM.
pub fn share(stream: &UnixStream, pages: u32, memory: BorrowedFd<'_>) -> io::Result<()> {
    let mut bytes = CLIENT.to_vec();
    bytes.extend(u64::from(pages).to_le_bytes());
    socket::send(stream, &bytes, &[memory.as_fd()])
}

/// Receives a client's message, which must already be readable; `None` at the end of the
/// connection.
pub fn receive_shared(stream: &UnixStream) -> io::Result<Option<(u32, OwnedFd)>> {
    let mut bytes = [0; SHARED];
    let (got, files) = socket::receive(stream, &mut bytes)?;
    if got == 0 {
        return Ok(None);
    }
    let pages = numbers::<1>(&bytes, CLIENT).and_then(|[pages]| u32::try_from(pages).ok());
    match (pages, <[OwnedFd; 1]>::try_from(files)) {
        (Some(pages), Ok([memory])) if got == SHARED => Ok(Some((pages, memory))),
        _ => Err(io::Error::other("it is no client of the gate")),
    }
}

/// Parses the numbers after a magic; `None` if the magic differs.
fn numbers<const N: usize>(bytes: &[u8], magic: [u8; 8]) -> Option<[u64; N]> {
    let rest = bytes.strip_prefix(&magic)?;
    let mut numbers = [0; N];
    for (number, bytes) in numbers.iter_mut().zip(rest.chunks_exact(8)) {
        *number = u64::from_le_bytes(bytes.try_into().ok()?);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn file() -> OwnedFd {
        File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn an_offer_and_a_refusal_arrive() {
        let (here, there) = UnixStream::pair().unwrap();
        let mut kernel = [0; KERNEL];
        kernel[3] = 7;
        offer(&here, 1 << 38, &kernel, file().as_fd(), file().as_fd()).unwrap();
        let Answer::Server(offer) = receive_answer(&there).unwrap() else {
            panic!("no offer");
        };
        assert_eq!((offer.window, offer.kernel), (1 << 38, kernel));
        refuse(&here, Reason::Taken).unwrap();
        assert!(matches!(
            receive_answer(&there).unwrap(),
            Answer::No(Reason::Taken)
        ));
    }

    #[test]
    fn what_is_no_message_of_the_gate_is_refused() {
        let (here, there) = UnixStream::pair().unwrap();
        for bytes in [&b"GATESRV"[..], &[1; ANSWER]] {
            socket::send(&here, bytes, &[]).unwrap();
            assert!(receive_answer(&there).is_err());
        }
        // Without its descriptor.
        socket::send(&here, &[&CLIENT[..], &[0; 8]].concat(), &[]).unwrap();
        assert!(receive_shared(&there).is_err());
        share(&here, 3, file().as_fd()).unwrap();
        assert_eq!(receive_shared(&there).unwrap().unwrap().0, 3);
        drop(here);
        assert!(receive_shared(&there).unwrap().is_none());
    }
}
