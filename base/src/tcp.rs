//! TCP connections that notice that the other machine is gone. Without power or a network it sends no end, and
//! who waits for its bytes would wait for ever.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
    time::Duration,
};

/// When a silent machine counts as gone.
#[derive(Clone, Copy, Debug)]
pub struct Silence {
    /// After so much silence, and then as often, its kernel is asked whether it is there.
    pub asked_after: Duration,
    /// So long it may leave that, or bytes that were sent, unacknowledged, or not take any.
    pub gone_after: Duration,
}

/// Within about a minute.
pub const SILENCE: Silence = Silence {
    asked_after: Duration::from_secs(10),
    gone_after: Duration::from_secs(60),
};

/// Has a TCP socket send at once, and fail ([`is_gone`]) when the other machine is gone. What a listening socket is
/// set to, its connections are.
///
/// # Errors
/// It is no TCP socket.
pub fn tune(socket: impl AsFd, silence: Silence) -> io::Result<()> {
    let asked_after = silence.asked_after.as_secs() as libc::c_int;
    let gone_after = silence.gone_after.as_millis() as libc::c_int;
    let options = [
        (libc::IPPROTO_TCP, libc::TCP_NODELAY, 1),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, asked_after),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, asked_after),
        // Also says how long unanswered questions count, in place of their number (tcp(7)).
        (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, gone_after),
    ];
    for (level, name, value) in options {
        // SAFETY: an integer that outlives the call, of the size that is passed beside it.
        let set = unsafe {
            libc::setsockopt(
                socket.as_fd().as_raw_fd(),
                level,
                name,
                (&raw const value).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        if set < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Whether a connection that there was has failed as the other machine does not answer any more, or somebody on the way
/// refuses what is sent to it. A timeout of a read or a write is `EAGAIN`, and none of these.
pub fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::ETIMEDOUT
                | libc::EHOSTUNREACH
                | libc::ENETUNREACH
                | libc::EHOSTDOWN
                | libc::ECONNREFUSED
                | libc::EACCES
                | libc::ENONET
        )
    )
}
