//! TCP connections that detect that the peer machine is gone. A machine without power or network does not close its
//! connections, so a reader would wait forever.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
    time::Duration,
};

/// When a silent peer counts as gone.
#[derive(Clone, Copy, Debug)]
pub struct Silence {
    /// Keepalive probes to the peer's kernel start after this much silence, and repeat at this interval.
    pub asked_after: Duration,
    /// Maximum time for which the peer may leave probes or sent bytes unacknowledged, or not accept any.
    pub gone_after: Duration,
}

/// Detects a dead peer within about one minute.
pub const SILENCE: Silence = Silence {
    asked_after: Duration::from_secs(10),
    gone_after: Duration::from_secs(60),
};

/// Sets a TCP socket to send without delay, and to fail ([`is_gone`]) when the peer machine is gone. Accepted
/// connections inherit the settings of a listening socket.
///
/// # Errors
/// The socket is not a TCP socket.
pub fn tune(socket: impl AsFd, silence: Silence) -> io::Result<()> {
    let asked_after = silence.asked_after.as_secs() as libc::c_int;
    let gone_after = silence.gone_after.as_millis() as libc::c_int;
    let options = [
        (libc::IPPROTO_TCP, libc::TCP_NODELAY, 1),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, asked_after),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, asked_after),
        // Also limits how long probes may stay unanswered, instead of their number (tcp(7)).
        (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, gone_after),
    ];
    for (level, name, value) in options {
        // SAFETY: an integer that outlives the call, whose size is passed with it.
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

/// Whether an established connection failed because the peer machine no longer answers, or because a host on the way
/// rejects packets. A timeout of a read or a write is `EAGAIN`, which does not count.
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
