//! How a worker comes to a connection with the arbiter: its pool makes it.
//!
//! A confined worker opens no sockets. It has one to its pool, over which it asks for a
//! connection: once at its start, and again when an arbiter has ended. With each the pool gives
//! the arbiter a handle of the worker's process, by which that can end it.

use std::{
    io::{self, ErrorKind, Read},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    process::Child,
    thread,
    time::Duration,
};

use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// How often an arbiter that is not there is looked for, in milliseconds.
const RETRY: i32 = 100;
/// The least time between two connections of one worker. It may ask as often as it likes, and is to
/// keep neither its pool nor the arbiter busy with that.
const EVERY: Duration = Duration::from_millis(250);

/// Gets a worker connections with the arbiter at `path` for as long as it lives; `control` is the
/// pool's end of the socket between them.
pub fn attend(child: &Child, control: UnixStream, path: PathBuf) -> io::Result<()> {
    // SAFETY: no pointers; the child has not been waited for, so that the number is its own.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and has no other owner.
    let process = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    thread::Builder::new()
        .name("introduce".to_owned())
        .spawn(move || {
            while introduce(&control, &process, &path).is_ok() {
                thread::sleep(EVERY);
            }
        })?;
    Ok(())
}

/// Waits until the worker asks, and gets it one connection.
fn introduce(control: &UnixStream, process: &OwnedFd, path: &Path) -> io::Result<()> {
    (&mut &*control).read_exact(&mut [0])?;
    let mut told = false;
    loop {
        let connected = UnixStream::connect(path).and_then(|stream| {
            stream.send_with_fd([0u8].as_slice(), process.as_raw_fd())?;
            Ok(stream)
        });
        match connected {
            Ok(stream) => {
                control.send_with_fd([0u8].as_slice(), stream.as_raw_fd())?;
                return Ok(());
            }
            Err(error) if !told => {
                told = true;
                crate::note!(
                    "gantry-accel: no arbiter answers at {} ({error}): applications wait; {}",
                    path.display(),
                    remedy(&error)
                );
            }
            Err(_) => {}
        }
        if ended(control) {
            return Err(ErrorKind::BrokenPipe.into());
        }
    }
}

/// What helps a pool that reaches no arbiter.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::PermissionDenied => "run the pool as the user who runs gantry-arbiter",
        _ => "start gantry-arbiter",
    }
}

/// Waits a moment for the worker's end.
fn ended(control: &UnixStream) -> bool {
    let mut polled = libc::pollfd {
        fd: control.as_raw_fd(),
        events: libc::POLLRDHUP,
        revents: 0,
    };
    // SAFETY: one entry.
    unsafe { libc::poll(&raw mut polled, 1, RETRY) > 0 }
}

/// A worker's side: asks for a connection and waits for it.
pub fn ask(control: &UnixStream) -> io::Result<UnixStream> {
    io::Write::write_all(&mut &*control, &[0])?;
    let (got, file) = control
        .recv_with_fd(&mut [0])
        .map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
    match file {
        Some(file) if got > 0 => {
            // What the driver starts (compilers, linkers) is not to inherit it.
            // SAFETY: a plain call on an open descriptor.
            unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) };
            Ok(OwnedFd::from(file).into())
        }
        _ => Err(ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn who_may_not_reach_an_arbiter_is_not_told_to_start_one() {
        assert!(remedy(&ErrorKind::PermissionDenied.into()).contains("as the user"));
        assert!(remedy(&ErrorKind::NotFound.into()).contains("start"));
        assert!(remedy(&ErrorKind::ConnectionRefused.into()).contains("start"));
    }
}
