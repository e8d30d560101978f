//! The connection beside the rings: the hello with the window's file, wake-ups of a client's
//! listener, and the news that the other side has ended.

use std::{
    io::{self, Read, Write},
    mem,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use crate::protocol::hello::{self, Hello};

/// Sends a hello, with a file if there is one.
pub fn send_hello(stream: &UnixStream, hello: Hello, file: Option<&OwnedFd>) -> io::Result<()> {
    let bytes = hello.to_bytes();
    let Some(file) = file else {
        return (&mut &*stream).write_all(&bytes);
    };
    let mut vector = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut space = [0u64; 4];
    // SAFETY: all pointers are to locals that outlive the call, and `space` (aligned for a
    // `cmsghdr`) has room for one descriptor.
    let sent = unsafe {
        let mut message: libc::msghdr = mem::zeroed();
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        message.msg_control = space.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(4) as usize;
        let control = libc::CMSG_FIRSTHDR(&raw const message);
        (*control).cmsg_level = libc::SOL_SOCKET;
        (*control).cmsg_type = libc::SCM_RIGHTS;
        (*control).cmsg_len = libc::CMSG_LEN(4) as usize;
        libc::CMSG_DATA(control)
            .cast::<libc::c_int>()
            .write_unaligned(file.as_raw_fd());
        libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    };
    match sent {
        sent if sent == bytes.len() as isize => Ok(()),
        sent if sent >= 0 => Err(io::ErrorKind::WriteZero.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Receives a hello, and the file that came with it.
pub fn receive_hello(stream: &UnixStream) -> io::Result<([u8; hello::SIZE], Option<OwnedFd>)> {
    let mut bytes = [0; hello::SIZE];
    let mut vector = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    let mut space = [0u64; 4];
    let mut file = None;
    // SAFETY: all pointers are to locals that outlive the call; the kernel says in the message
    // which part of `space` it filled, and the macros stay within it.
    let got = unsafe {
        let mut message: libc::msghdr = mem::zeroed();
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        message.msg_control = space.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(4) as usize;
        let got = libc::recvmsg(stream.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC);
        let control = libc::CMSG_FIRSTHDR(&raw const message);
        if got > 0
            && !control.is_null()
            && (*control).cmsg_level == libc::SOL_SOCKET
            && (*control).cmsg_type == libc::SCM_RIGHTS
            && (*control).cmsg_len == libc::CMSG_LEN(4) as usize
        {
            let fd = libc::CMSG_DATA(control)
                .cast::<libc::c_int>()
                .read_unaligned();
            // The kernel has just made this descriptor for us.
            file = Some(OwnedFd::from_raw_fd(fd));
        }
        got
    };
    let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
    // A hello may come in pieces.
    (&mut &*stream).read_exact(&mut bytes[got..])?;
    Ok((bytes, file))
}

/// Tells the client's listener that there is something for it among the answers. Never blocks: a
/// socket that is full already says so.
pub fn nudge(stream: &UnixStream) {
    // SAFETY: one byte from a constant.
    unsafe {
        libc::send(
            stream.as_raw_fd(),
            [0u8].as_ptr().cast(),
            1,
            libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
        );
    }
}
