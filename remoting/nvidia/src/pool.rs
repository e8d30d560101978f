//! A process for each virtual machine.
//!
//! The pool's own process has one thread, opens no device and does nothing but start processes. It keeps a machine's
//! connection until the machine's process has ended, so that the machine does not take anything for free before the
//! driver does.

use std::{
    io,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    thread,
    time::Duration,
};

use base::{note, socket};

/// The most machines at a time.
const MOST: usize = 64;
/// How long to wait for what is used up: descriptors, memory, processes.
const PAUSE: Duration = Duration::from_millis(100);

/// The pool cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket.
    #[error("cannot listen for virtual machines")]
    Listen(#[source] io::Error),
    /// Waiting failed.
    #[error("cannot wait for virtual machines")]
    Wait(#[source] io::Error),
}

/// A machine's process.
struct Served {
    /// Readable when the process has ended.
    process: OwnedFd,
    /// Closed with this value.
    _connection: UnixStream,
}

/// Listens at a path, and calls `serve` in a process of its own for each machine that connects. Answers why it cannot go
/// on. The calling process has no other threads.
pub fn serve(path: &Path, serve: impl Fn(UnixStream)) -> Error {
    match socket::listen(path) {
        Ok(listener) => accept(listener, serve),
        Err(error) => Error::Listen(error),
    }
}

fn accept(listener: UnixListener, serve: impl Fn(UnixStream)) -> Error {
    // A machine's process has none.
    let mut listener = Some(listener);
    let mut served: Vec<Served> = Vec::new();
    loop {
        let polled = |file: &OwnedFd| libc::pollfd {
            fd: file.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let mut files: Vec<_> = served.iter().map(|one| polled(&one.process)).collect();
        files.push(libc::pollfd {
            // Others wait until one ends. poll ignores negative descriptors.
            fd: match &listener {
                Some(listener) if served.len() < MOST => listener.as_raw_fd(),
                _ => -1,
            },
            events: libc::POLLIN,
            revents: 0,
        });
        // SAFETY: the array has the given length.
        if unsafe { libc::poll(files.as_mut_ptr(), files.len() as libc::nfds_t, -1) } < 0 {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            return Error::Wait(error);
        }
        let mut ended = files.iter().map(|file| file.revents != 0);
        served.retain(|one| {
            let has_ended = ended.next() == Some(true);
            if has_ended {
                reap(&one.process);
            }
            !has_ended
        });
        if ended.next() != Some(true) {
            continue;
        }
        let accepted = listener.as_ref().map(UnixListener::accept);
        let accepted = accepted.unwrap_or_else(|| Err(io::ErrorKind::NotConnected.into()));
        let started = accepted
            .and_then(|(connection, _)| start(connection, &mut served, &mut listener, &serve));
        if let Err(error) = started {
            note!("gantry-nvidia: a virtual machine is not served: {error}");
            thread::sleep(PAUSE);
        }
    }
}

/// Starts a process for a machine.
fn start(
    connection: UnixStream,
    served: &mut Vec<Served>,
    listener: &mut Option<UnixListener>,
    serve: &impl Fn(UnixStream),
) -> io::Result<()> {
    // SAFETY: this process has one thread, so that no lock is held by another one.
    let process = unsafe { libc::fork() };
    if process < 0 {
        return Err(io::Error::last_os_error());
    }
    if process == 0 {
        // The other machines' connections end when their own processes do, and another pool may listen when this one
        // has ended.
        served.clear();
        drop(listener.take());
        serve(connection);
        std::process::exit(0);
    }
    // SAFETY: a call without pointers; then a new descriptor that nothing else owns.
    let process = unsafe {
        let file = libc::syscall(libc::SYS_pidfd_open, process, 0);
        if file < 0 {
            // Nobody would notice its end.
            let error = io::Error::last_os_error();
            libc::kill(process, libc::SIGKILL);
            libc::waitpid(process, std::ptr::null_mut(), 0);
            return Err(error);
        }
        OwnedFd::from_raw_fd(file as libc::c_int)
    };
    served.push(Served {
        process,
        _connection: connection,
    });
    Ok(())
}

/// Frees what the kernel keeps of a process that has ended.
fn reap(process: &OwnedFd) {
    let id = process.as_raw_fd().cast_unsigned();
    // SAFETY: an all-zero value is valid, and is written to.
    unsafe {
        let mut status: libc::siginfo_t = std::mem::zeroed();
        libc::waitid(libc::P_PIDFD, id, &raw mut status, libc::WEXITED);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        process::{Command, Stdio},
        time::Instant,
    };

    use super::*;

    /// Named by the test below for the process that it starts: a pool that answers each machine with its process's number.
    const PATH: &str = "GANTRY_TEST_POOL";

    #[test]
    fn each_machine_has_a_process_and_sees_its_end() {
        if let Some(path) = std::env::var_os(PATH) {
            let error = serve(Path::new(&path), |mut connection| {
                let number = std::process::id().to_le_bytes();
                connection.write_all(&number).expect("it reads");
                // Until the machine says so.
                let _ = connection.read(&mut [0]);
            });
            panic!("{error}");
        }
        let folder = tempfile::tempdir().expect("there is room");
        let path = folder.path().join("vm.sock");
        // A test's process has threads; this one starts with one only.
        let mut pool = Command::new(std::env::current_exe().expect("it is known"))
            .args([
                "--exact",
                "pool::tests::each_machine_has_a_process_and_sees_its_end",
            ])
            .arg("--test-threads=1")
            .env(PATH, &path)
            // The lines of this process's test stay whole.
            .stdout(Stdio::null())
            .spawn()
            .expect("it starts");
        let start = Instant::now();
        let connect = || {
            loop {
                match UnixStream::connect(&path) {
                    Ok(connection) => return connection,
                    Err(error) if start.elapsed() > Duration::from_secs(60) => panic!("{error}"),
                    Err(_) => thread::sleep(Duration::from_millis(10)),
                }
            }
        };
        let number = |mut connection: &UnixStream| {
            let mut bytes = [0; 4];
            connection.read_exact(&mut bytes).expect("it answers");
            u32::from_le_bytes(bytes)
        };
        let (first, second) = (connect(), connect());
        let (one, two) = (number(&first), number(&second));
        assert_ne!(one, two);
        assert_ne!(one, pool.id());
        // SAFETY: a call without pointers.
        unsafe { libc::kill(one.cast_signed(), libc::SIGKILL) };
        assert_eq!((&first).read(&mut [0]).expect("it ends"), 0);
        (&second).write_all(&[1]).expect("it is served");
        assert_eq!((&second).read(&mut [0]).expect("it ends"), 0);
        let third = connect();
        assert_ne!(number(&third), pool.id());
        pool.kill().expect("it runs");
        pool.wait().expect("it has ended");
        // Its machines go on, and another pool takes its place.
        drop(socket::listen(&path).expect("nobody listens any longer"));
        (&third).write_all(&[1]).expect("it is served");
        assert_eq!((&third).read(&mut [0]).expect("it ends"), 0);
    }
}
