//! Requests to the worker.

use std::{
    env, io,
    mem::{MaybeUninit, offset_of, size_of, zeroed},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::ffi::OsStrExt,
    },
    thread,
    time::{Duration, Instant},
};

use nvidia_abi::{
    Branch,
    wire::{Answer, HEADER, MOST, Operation, Request, VERSION},
};

use crate::mappings::SliceFile;

const DEFAULT_SOCKET: &[u8] = b"/run/gantry/nvidia.sock";
/// Descriptors of this library lie above those that programs expect to get.
const LOWEST: RawFd = 900;

/// For how long an answer is looked for before the thread sleeps. Most calls take a few microseconds, and in a virtual
/// machine waking a processor takes longer.
const AWAKE: Duration = Duration::from_micros(50);

/// Room for the control message with one descriptor, aligned as the kernel wants it.
#[repr(align(8))]
struct Space([u8; 32]);

/// A connection to the worker.
pub struct Connection {
    socket: OwnedFd,
    /// The program's slice.
    pub slice: OwnedFd,
    /// How mappings of it are shown.
    pub shown: SliceFile,
    /// The branch of the worker's driver.
    pub branch: Branch,
    packet: Vec<u8>,
}

/// What the worker answered.
pub struct Reply {
    /// The words.
    pub answer: Answer,
    /// The bytes.
    pub bytes: Vec<u8>,
    /// The file that came along.
    pub file: Option<OwnedFd>,
}

impl Connection {
    /// Connects.
    pub fn new() -> io::Result<Self> {
        let socket = high(connect()?)?;
        let hello = Request {
            operation: Operation::Hello,
            file: 0,
            a: VERSION.into(),
            b: 0,
            length: 0,
        };
        let mut packet = vec![0; HEADER + MOST];
        let reply = exchange(&socket, &mut packet, hello, &[], None, true)?;
        let invalid = || io::Error::from(io::ErrorKind::InvalidData);
        let version = str::from_utf8(&reply.bytes).map_err(|_| invalid())?;
        let branch = Branch::of_version(version).ok_or_else(invalid)?;
        let slice = high(reply.file.ok_or_else(invalid)?)?;
        let shown = SliceFile::new(&slice)?;
        Ok(Self {
            socket,
            slice,
            shown,
            branch,
            packet,
        })
    }

    /// Whether the worker has closed its end.
    pub fn has_ended(&self) -> bool {
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        let mut byte = 0u8;
        // SAFETY: the kernel writes at most one byte.
        let received =
            unsafe { libc::recv(self.socket.as_raw_fd(), (&raw mut byte).cast(), 1, flags) };
        received == 0 || received < 0 && last().kind() == io::ErrorKind::ConnectionReset
    }

    /// Makes a request with these words.
    pub fn ask(&mut self, operation: Operation, file: u32, a: u64, b: u64) -> io::Result<Reply> {
        self.send(
            Request {
                operation,
                file,
                a,
                b,
                length: 0,
            },
            &[],
            None,
            true,
        )
    }

    /// Makes a request with these words, bytes and descriptor. A descriptor that comes along is closed at `exec` if
    /// `cloexec`.
    pub fn send(
        &mut self,
        request: Request,
        bytes: &[u8],
        file: Option<RawFd>,
        cloexec: bool,
    ) -> io::Result<Reply> {
        let length = u32::try_from(bytes.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        exchange(
            &self.socket,
            &mut self.packet,
            Request { length, ..request },
            bytes,
            file,
            cloexec,
        )
    }
}

fn last() -> io::Error {
    io::Error::last_os_error()
}

fn connect() -> io::Result<OwnedFd> {
    let path = env::var_os("GANTRY_NVIDIA_SOCKET");
    let path = path.as_ref().map_or(DEFAULT_SOCKET, |path| path.as_bytes());
    // SAFETY: zeroes are a valid address.
    let mut address: libc::sockaddr_un = unsafe { zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    if path.len() >= address.sun_path.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (place, byte) in address.sun_path.iter_mut().zip(path) {
        *place = byte.cast_signed();
    }
    // SAFETY: a call without pointers.
    let socket =
        unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(last());
    }
    // SAFETY: a new descriptor that nothing else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    let length = (offset_of!(libc::sockaddr_un, sun_path) + path.len() + 1) as libc::socklen_t;
    // SAFETY: the address has at least this length.
    let result = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) };
    if result < 0 { Err(last()) } else { Ok(socket) }
}

/// The same file with a number that programs do not expect.
fn high(file: OwnedFd) -> io::Result<OwnedFd> {
    // SAFETY: a call without pointers.
    let high = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, LOWEST) };
    if high < 0 {
        // The program has few descriptors.
        return Ok(file);
    }
    // SAFETY: a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(high) })
}

fn exchange(
    socket: &OwnedFd,
    packet: &mut [u8],
    request: Request,
    bytes: &[u8],
    file: Option<RawFd>,
    cloexec: bool,
) -> io::Result<Reply> {
    send(socket, &request.to_bytes(), bytes, file)?;
    let (length, file) = receive(socket, packet, cloexec)?;
    let (answer, bytes) = packet
        .get(..length)
        .and_then(Answer::from_packet)
        .ok_or(io::ErrorKind::InvalidData)?;
    if answer.result < 0 {
        return Err(io::Error::from_raw_os_error(answer.result.wrapping_neg()));
    }
    Ok(Reply {
        answer,
        bytes: bytes.to_vec(),
        file,
    })
}

fn send(socket: &OwnedFd, header: &[u8], bytes: &[u8], file: Option<RawFd>) -> io::Result<()> {
    let vector = |bytes: &[u8]| libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut vectors = [vector(header), vector(bytes)];
    let mut space = Space([0; 32]);
    // SAFETY: zeroes are a valid message.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = vectors.len();
    if let Some(file) = file {
        message.msg_control = space.0.as_mut_ptr().cast();
        // SAFETY: it computes a size, which is at most that of the space.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(size_of::<RawFd>() as u32) } as usize;
        // SAFETY: the space is aligned and as long as the message says; the first header lies in it.
        unsafe {
            let control = libc::CMSG_FIRSTHDR(&message);
            (*control).cmsg_level = libc::SOL_SOCKET;
            (*control).cmsg_type = libc::SCM_RIGHTS;
            (*control).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize;
            libc::CMSG_DATA(control)
                .cast::<RawFd>()
                .write_unaligned(file);
        }
    }
    loop {
        // SAFETY: the message refers to the arrays above.
        let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
        if sent >= 0 {
            return Ok(());
        }
        let error = last();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

fn receive(
    socket: &OwnedFd,
    packet: &mut [u8],
    cloexec: bool,
) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut vector = libc::iovec {
        iov_base: packet.as_mut_ptr().cast(),
        iov_len: packet.len(),
    };
    let mut space = MaybeUninit::<Space>::zeroed();
    // SAFETY: zeroes are a valid message.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = &raw mut vector;
    message.msg_iovlen = 1;
    message.msg_control = space.as_mut_ptr().cast();
    // SAFETY: it computes a size, which is at most that of the space.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(size_of::<RawFd>() as u32) } as usize;
    let kept = if cloexec { libc::MSG_CMSG_CLOEXEC } else { 0 };
    let asleep = Instant::now() + AWAKE;
    let mut flags = kept | libc::MSG_DONTWAIT;
    let received = loop {
        // SAFETY: the message refers to the packet and the space.
        let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, flags) };
        if received >= 0 {
            break received.cast_unsigned();
        }
        let error = last();
        match error.kind() {
            io::ErrorKind::Interrupted => {}
            io::ErrorKind::WouldBlock if flags != kept => {
                if Instant::now() < asleep {
                    // Perhaps the worker waits for this processor.
                    thread::yield_now();
                } else {
                    flags = kept;
                }
            }
            _ => return Err(error),
        }
    };
    // SAFETY: the kernel has filled the space as the message says.
    let file = unsafe {
        let control = libc::CMSG_FIRSTHDR(&message);
        let is_file = !control.is_null()
            && (*control).cmsg_level == libc::SOL_SOCKET
            && (*control).cmsg_type == libc::SCM_RIGHTS;
        is_file.then(|| libc::CMSG_DATA(control).cast::<RawFd>().read_unaligned())
    };
    // SAFETY: the kernel has made the descriptor for this process.
    let file = file.map(|file| unsafe { OwnedFd::from_raw_fd(file) });
    if received == 0 {
        return Err(io::ErrorKind::ConnectionReset.into());
    }
    Ok((received, file))
}
