//! What native code does that has taken a worker over: with `GANTRY_STAND_IN_FLOODS`, it puts as many descriptors in flight
//! as the kernel lets it, which are never received.

use std::{
    mem,
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixStream,
    },
};

/// The most descriptors of a message.
const MOST: usize = 253;

/// Puts descriptors in flight until that is refused, if this is wanted.
pub fn flood() {
    if std::env::var_os("GANTRY_STAND_IN_FLOODS").is_none() {
        return;
    }
    raise_limit();
    loop {
        let Ok((here, there)) = UnixStream::pair() else {
            return;
        };
        let mut sent = 0;
        let code = loop {
            match send(&here, there.as_raw_fd()) {
                0 => sent += 1,
                code => break code,
            }
        };
        // They stay in flight as long as this process lives.
        mem::forget((here, there));
        // This socket is full: another one may take more.
        if code != libc::EAGAIN || sent == 0 {
            return;
        }
    }
}

/// The kernel compares what is in flight with the sender's own limit.
fn raise_limit() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the limit outlives both calls.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
    }
}

/// Sends a message that is full of this descriptor: 0, or the error.
fn send(socket: &UnixStream, fd: RawFd) -> i32 {
    let fds = [fd; MOST];
    let size = size_of_val(&fds);
    let mut space = [0u64; 130];
    let mut byte = 0u8;
    let mut vector = libc::iovec {
        iov_base: (&raw mut byte).cast(),
        iov_len: 1,
    };
    // SAFETY: all pointers are to locals that outlive the call, and `space`, aligned for a `cmsghdr`, has room for its 16
    // bytes and all descriptors.
    let sent = unsafe {
        let mut message: libc::msghdr = mem::zeroed();
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        message.msg_control = space.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(size as u32) as usize;
        let control = libc::CMSG_FIRSTHDR(&raw const message);
        (*control).cmsg_level = libc::SOL_SOCKET;
        (*control).cmsg_type = libc::SCM_RIGHTS;
        (*control).cmsg_len = libc::CMSG_LEN(size as u32) as usize;
        libc::CMSG_DATA(control).copy_from_nonoverlapping(fds.as_ptr().cast(), size);
        libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_DONTWAIT)
    };
    match sent {
        0.. => 0,
        _ => std::io::Error::last_os_error().raw_os_error().unwrap_or(-1),
    }
}
