//! How a worker gets a connection to the arbiter: its pool makes it.
//!
//! A confined worker opens no sockets. It has one to its pool. Over it, the worker first names its client, before any
//! of its application's code runs, and then asks for a connection: once at its start, and again when an arbiter has
//! ended. With each connection the pool sends the arbiter what it was told first, whatever has become of the worker
//! since, and a pidfd of the worker, by which the arbiter can kill it.

use std::{
    io::{self, ErrorKind, Read, Write},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    process::Child,
    thread,
    time::Duration,
};

use base::socket::has_unread;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::message::{First, JOIN, Join};

/// How often to retry while there is no arbiter, in milliseconds.
const RETRY: i32 = 100;
/// Minimum interval between two connections of one worker. A worker may ask as often as it likes, but must not keep its
/// pool or the arbiter busy with that.
const EVERY: Duration = Duration::from_millis(250);

/// Provides a worker with connections to the arbiter at `path` for as long as it lives. `control` is the pool's end of
/// the socket between them.
///
/// # Errors
/// The pidfd cannot be opened, or the thread cannot be started.
pub fn attend(child: &Child, control: UnixStream, path: PathBuf) -> io::Result<()> {
    // The child has not been waited for, so its process id is still its own.
    serve("gantry-accel", child.id(), control, path)
}

/// Provides the process of this handle with connections in the same way, in this thread, until it ends. Its applications do
/// not wait while there is no arbiter.
pub fn attend_process(program: &str, process: &OwnedFd, control: &UnixStream, path: &Path) {
    let without = "programs are not shared by weight";
    attend_until_end(program, without, process, control, path);
}

/// Introduces this process itself, which has no pool, and returns its socket to the thread that does so. The process
/// takes part as `join` says from its first [`ask`] to its end: an arbiter kills a process that hangs up. `program`
/// begins the line that reports a missing arbiter.
///
/// Name and weight are then this process's own claim. That gives nobody an advantage: an arbiter's socket admits only
/// its own user, who could start a pool that claims the same, or another arbiter. A program that must not choose them
/// runs like a worker: as a user who cannot reach the socket, introduced over a socket that it gets from its parent
/// ([`attend`]).
///
/// # Errors
/// There are no descriptors, or the thread cannot be started.
pub fn introduce_self(program: &'static str, join: &Join, path: PathBuf) -> io::Result<UnixStream> {
    let (ours, control) = UnixStream::pair()?;
    belong(&ours, join)?;
    serve(program, std::process::id(), control, path)?;
    Ok(ours)
}

/// Connects this process to the arbiter, with a first message other than a worker's.
pub(super) fn connect_self(path: &Path, first: &First) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(path)?;
    let this = handle_of(std::process::id())?;
    stream.send_with_fd([0u8].as_slice(), this.as_raw_fd())?;
    stream.write_all(&first.to_bytes())?;
    Ok(stream)
}

/// A handle of the process with this number.
///
/// # Errors
/// There is no such process, or there are no descriptors.
pub fn handle_of(process: u32) -> io::Result<OwnedFd> {
    // SAFETY: no pointers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Starts a thread that introduces this process whenever it asks.
fn serve(
    program: &'static str,
    process: u32,
    control: UnixStream,
    path: PathBuf,
) -> io::Result<()> {
    let process = handle_of(process)?;
    thread::Builder::new()
        .name("introduce".to_owned())
        .spawn(move || {
            attend_until_end(program, "applications wait", &process, &control, &path);
        })?;
    Ok(())
}

/// Introduces the process of this handle whenever it asks. `without` says what its applications do as long as there is no
/// arbiter.
fn attend_until_end(
    program: &str,
    without: &str,
    process: &OwnedFd,
    mut control: &UnixStream,
    path: &Path,
) {
    let mut join = [0; JOIN];
    if control.read_exact(&mut join).is_err() {
        return;
    }
    while introduce((program, without), control, process, &join, path).is_ok() {
        thread::sleep(EVERY);
        // One that is sent and not received holds a connection to the arbiter.
        while has_unread(control) {
            if ended(control) {
                return;
            }
        }
    }
}

/// Waits until the worker asks, and gets it one connection.
fn introduce(
    (program, without): (&str, &str),
    control: &UnixStream,
    process: &OwnedFd,
    join: &[u8; JOIN],
    path: &Path,
) -> io::Result<()> {
    (&mut &*control).read_exact(&mut [0])?;
    let mut told = false;
    loop {
        let connected = UnixStream::connect(path).and_then(|stream| {
            stream.send_with_fd([0u8].as_slice(), process.as_raw_fd())?;
            // It fits: nothing was written before.
            match (&stream).write_all(join) {
                // The arbiter is just ending; or it refuses the worker, which then reads why.
                Err(error) if !is_hung_up(&error) => Err(error),
                _ => Ok(stream),
            }
        });
        match connected {
            Ok(stream) => {
                control.send_with_fd([0u8].as_slice(), stream.as_raw_fd())?;
                return Ok(());
            }
            Err(error) if !told => {
                told = true;
                base::note!(
                    "{program}: no arbiter answers at {} ({error}): {without}; {}",
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

/// Whether an error says that the other side has hung up.
fn is_hung_up(error: &io::Error) -> bool {
    let kind = error.kind();
    kind == ErrorKind::BrokenPipe || kind == ErrorKind::ConnectionReset
}

/// A remedy for a pool that reaches no arbiter.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::PermissionDenied => "run it as the user who runs gantry-arbiter",
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

/// The worker's side: names its client. To be called once.
pub fn belong(mut control: &UnixStream, join: &Join) -> io::Result<()> {
    control.write_all(&join.to_bytes())
}

/// The worker's side: asks for a connection and waits for it.
pub fn ask(mut control: &UnixStream) -> io::Result<UnixStream> {
    control.write_all(&[0])?;
    let (got, file) = control
        .recv_with_fd(&mut [0])
        .map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
    match file {
        Some(file) if got > 0 => {
            // Programs that the driver starts (compilers, linkers) must not inherit it.
            // SAFETY: a plain call on an open descriptor.
            unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) };
            Ok(OwnedFd::from(file).into())
        }
        _ => Err(ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, process::Command};

    use super::*;

    #[test]
    fn an_arbiter_hears_for_whom_a_worker_works_from_its_pool_and_always_the_same() {
        let folder = std::env::temp_dir().join(format!("gantry-belong-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("arbiter");
        let arbiter = UnixListener::bind(&path).unwrap();
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let (worker, control) = UnixStream::pair().unwrap();
        attend(&child, control, path).unwrap();
        let join = |name: &str, weight| Join {
            name: name.to_owned(),
            weight,
            latency: 0,
            sliced: false,
        };
        belong(&worker, &join("honest", 1)).unwrap();
        for _ in 0..2 {
            let mut connection = ask(&worker).unwrap();
            let (mut stream, _) = arbiter.accept().unwrap();
            let (_, process) = stream.recv_with_fd(&mut [0]).unwrap();
            assert!(process.is_some());
            // Later claims of a worker come after that.
            connection
                .write_all(&join("another", 10_000).to_bytes())
                .unwrap();
            let mut heard = [0; JOIN];
            stream.read_exact(&mut heard).unwrap();
            assert_eq!(Join::from_bytes(&heard), Ok(join("honest", 1)));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_process_without_a_pool_introduces_itself_by_its_own_handle() {
        let folder = std::env::temp_dir().join(format!("gantry-self-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("arbiter");
        let arbiter = UnixListener::bind(&path).unwrap();
        let join = Join {
            name: "eater".to_owned(),
            weight: 3,
            latency: 0,
            sliced: false,
        };
        let control = introduce_self("test", &join, path).unwrap();
        let _connection = ask(&control).unwrap();
        let (mut stream, _) = arbiter.accept().unwrap();
        let (_, process) = stream.recv_with_fd(&mut [0]).unwrap();
        let process = process.unwrap();
        let handle = format!("/proc/self/fdinfo/{}", process.as_raw_fd());
        let own = format!("Pid:\t{}\n", std::process::id());
        assert!(std::fs::read_to_string(handle).unwrap().contains(&own));
        let mut heard = [0; JOIN];
        stream.read_exact(&mut heard).unwrap();
        assert_eq!(Join::from_bytes(&heard), Ok(join));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn who_may_not_reach_an_arbiter_is_not_told_to_start_one() {
        assert!(remedy(&ErrorKind::PermissionDenied.into()).contains("as the user"));
        assert!(remedy(&ErrorKind::NotFound.into()).contains("start"));
        assert!(remedy(&ErrorKind::ConnectionRefused.into()).contains("start"));
    }
}
