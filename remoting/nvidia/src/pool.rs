//! A process for each virtual machine.
//!
//! The pool's own process has one thread, opens no device and does nothing but start processes. It keeps a machine's
//! connection until the machine's process has ended, so that the machine does not take anything for free before the
//! driver does.
//!
//! A machine may have sent files that the pool does not read, and their close may hang: that of a TCP socket that lingers,
//! or of a file on a file system that another process serves. Connections are therefore closed by processes of their own,
//! and a new process has closed its copies of other connections before the pool closes any of its own.

use std::{
    io::{self, Read},
    net::Shutdown,
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

/// A process of the pool.
struct Process {
    /// Readable when the process has ended.
    handle: OwnedFd,
    /// The connection of the machine that it serves. `None`: it closes that of a machine whose process has ended.
    connection: Option<UnixStream>,
}

/// Listens at a path, and calls `serve` in a process of its own for each machine that connects. Answers why it cannot go
/// on. The calling process has no other threads.
pub fn serve(path: &Path, serve: impl Fn(UnixStream)) -> Error {
    match socket::listen(path) {
        Ok(listener) => accept(listener, serve),
        Err(error) => Error::Listen(error),
    }
}

/// What the pool's own process has.
#[derive(Default)]
struct Pool {
    /// A machine's process has none.
    listener: Option<UnixListener>,
    processes: Vec<Process>,
    /// Connections to be closed.
    leaving: Vec<UnixStream>,
}

fn accept(listener: UnixListener, serve: impl Fn(UnixStream)) -> Error {
    let mut pool = Pool {
        listener: Some(listener),
        ..Pool::default()
    };
    loop {
        let has_come = match pool.wait() {
            Ok(has_come) => has_come,
            Err(error) => return Error::Wait(error),
        };
        pool.close_connections();
        if !has_come {
            continue;
        }
        let accepted = pool.listener.as_ref().map(UnixListener::accept);
        let accepted = accepted.unwrap_or_else(|| Err(io::ErrorKind::NotConnected.into()));
        let started = accepted.and_then(|(connection, _)| pool.start(connection, &serve));
        if let Err(error) = started {
            note!("gantry-nvidia: a virtual machine is not served: {error}");
            thread::sleep(PAUSE);
        }
    }
}

impl Pool {
    /// Waits for a machine, and for the end of processes. Returns whether a machine has come.
    fn wait(&mut self) -> io::Result<bool> {
        let polled = |file: &OwnedFd| libc::pollfd {
            fd: file.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let mut files: Vec<_> = self
            .processes
            .iter()
            .map(|one| polled(&one.handle))
            .collect();
        files.push(libc::pollfd {
            // Others wait until one ends. poll ignores negative descriptors.
            fd: match &self.listener {
                Some(listener) if self.processes.len() + self.leaving.len() < MOST => {
                    listener.as_raw_fd()
                }
                _ => -1,
            },
            events: libc::POLLIN,
            revents: 0,
        });
        let patience = match self.leaving.is_empty() {
            true => -1,
            false => PAUSE.as_millis() as libc::c_int,
        };
        // SAFETY: the array has the given length.
        if unsafe { libc::poll(files.as_mut_ptr(), files.len() as libc::nfds_t, patience) } < 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::Interrupted => Ok(false),
                _ => Err(error),
            };
        }
        let mut ended = files.iter().map(|file| file.revents != 0);
        let leaving = &mut self.leaving;
        self.processes.retain_mut(|one| {
            let has_ended = ended.next() == Some(true);
            if has_ended {
                reap(&one.handle);
                leaving.extend(one.connection.take());
            }
            !has_ended
        });
        Ok(ended.next() == Some(true))
    }

    /// Starts a process for a machine.
    fn start(&mut self, connection: UnixStream, serve: &impl Fn(UnixStream)) -> io::Result<()> {
        let serve = |connection, pool: UnixStream| {
            drop(pool);
            serve(connection);
        };
        let started = self.fork(connection, serve);
        let (handle, connection, _) = started.map_err(|(error, connection)| {
            self.leaving.push(connection);
            error
        })?;
        self.processes.push(Process {
            handle,
            connection: Some(connection),
        });
        Ok(())
    }

    /// Has connections closed by processes of their own. Those for which none can be started wait.
    fn close_connections(&mut self) {
        let close = |connection, mut pool: UnixStream| {
            // Until the pool has closed its own copy, so that this one is the last.
            let _ = pool.read_to_end(&mut Vec::new());
            // A process that exits does not wait for a socket that lingers; one that closes it does.
            std::mem::forget(connection);
        };
        while let Some(connection) = self.leaving.pop() {
            match self.fork(connection, close) {
                Ok((handle, connection, process)) => {
                    drop(connection);
                    drop(process);
                    self.processes.push(Process {
                        handle,
                        connection: None,
                    });
                }
                Err((_, connection)) => return self.leaving.push(connection),
            }
        }
    }

    /// Starts a process that has nothing but a connection, and a socket whose other end the pool has. When this returns,
    /// the process has closed its copies of everything else. Returns its handle, the pool's copy of the connection, and
    /// the pool's end of the socket; if none starts, the reason and the connection.
    fn fork(
        &mut self,
        connection: UnixStream,
        run: impl FnOnce(UnixStream, UnixStream),
    ) -> Result<(OwnedFd, UnixStream, UnixStream), (io::Error, UnixStream)> {
        let (mut pool, process) = match UnixStream::pair() {
            Ok(pair) => pair,
            Err(error) => return Err((error, connection)),
        };
        // SAFETY: this process has one thread, so that no lock is held by another one.
        let id = unsafe { libc::fork() };
        if id < 0 {
            return Err((io::Error::last_os_error(), connection));
        }
        if id == 0 {
            // Another pool may listen when this one has ended.
            *self = Self::default();
            drop(pool);
            let _ = process.shutdown(Shutdown::Write);
            run(connection, process);
            std::process::exit(0);
        }
        drop(process);
        // Ends with the process, too.
        let _ = pool.read_to_end(&mut Vec::new());
        // SAFETY: a call without pointers; then a new descriptor that nothing else owns.
        unsafe {
            let handle = libc::syscall(libc::SYS_pidfd_open, id, 0);
            if handle < 0 {
                // Nobody would notice its end.
                let error = io::Error::last_os_error();
                libc::kill(id, libc::SIGKILL);
                libc::waitpid(id, std::ptr::null_mut(), 0);
                return Err((error, connection));
            }
            let handle = OwnedFd::from_raw_fd(handle as libc::c_int);
            Ok((handle, connection, pool))
        }
    }
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
        io::Write,
        net::{TcpListener, TcpStream},
        os::fd::AsFd,
        process::{Child, Command, Stdio},
        time::Instant,
    };

    use super::*;

    /// Names the socket for the process that a test starts: a pool that answers each machine with its process's number.
    const PATH: &str = "GANTRY_TEST_POOL";

    /// Another process that runs this test as a pool: a test's process has threads, this one starts with one only.
    fn pool(path: &Path, test: &str) -> Child {
        Command::new(std::env::current_exe().expect("it is known"))
            .args(["--exact", &format!("pool::tests::{test}")])
            .arg("--test-threads=1")
            .env(PATH, path)
            // The lines of this process's test stay whole.
            .stdout(Stdio::null())
            .spawn()
            .expect("it starts")
    }

    /// Serves machines if this process is such a pool.
    fn serve_if_pool() {
        if let Some(path) = std::env::var_os(PATH) {
            let error = serve(Path::new(&path), |mut connection| {
                let number = std::process::id().to_le_bytes();
                connection.write_all(&number).expect("it reads");
                // Until the machine says so.
                let _ = connection.read(&mut [0]);
            });
            panic!("{error}");
        }
    }

    fn connect(path: &Path) -> UnixStream {
        let start = Instant::now();
        loop {
            match UnixStream::connect(path) {
                Ok(connection) => return connection,
                Err(error) if start.elapsed() > Duration::from_secs(60) => panic!("{error}"),
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    fn number(mut connection: &UnixStream) -> u32 {
        let mut bytes = [0; 4];
        connection.read_exact(&mut bytes).expect("it answers");
        u32::from_le_bytes(bytes)
    }

    fn signal(process: u32, signal: libc::c_int) {
        // SAFETY: a call without pointers.
        unsafe { libc::kill(process.cast_signed(), signal) };
    }

    #[test]
    fn each_machine_has_a_process_and_sees_its_end() {
        serve_if_pool();
        let folder = tempfile::tempdir().expect("there is room");
        let path = folder.path().join("vm.sock");
        let mut pool = pool(&path, "each_machine_has_a_process_and_sees_its_end");
        let (first, second) = (connect(&path), connect(&path));
        let (one, two) = (number(&first), number(&second));
        assert_ne!(one, two);
        assert_ne!(one, pool.id());
        signal(one, libc::SIGKILL);
        assert_eq!((&first).read(&mut [0]).expect("it ends"), 0);
        (&second).write_all(&[1]).expect("it is served");
        assert_eq!((&second).read(&mut [0]).expect("it ends"), 0);
        let third = connect(&path);
        assert_ne!(number(&third), pool.id());
        pool.kill().expect("it runs");
        pool.wait().expect("it has ended");
        // Its machines go on, and another pool takes its place.
        drop(socket::listen(&path).expect("nobody listens any longer"));
        (&third).write_all(&[1]).expect("it is served");
        assert_eq!((&third).read(&mut [0]).expect("it ends"), 0);
    }

    /// A socket whose last close waits until the other end, returned as well, takes what was sent, or closes.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("there is a port");
        let socket = TcpStream::connect(listener.local_addr().expect("it is bound"));
        let mut socket = socket.expect("it listens");
        let (peer, _) = listener.accept().expect("it connects");
        let linger = libc::linger {
            l_onoff: 1,
            l_linger: 600,
        };
        // SAFETY: the kernel reads as many bytes as the length says, from a local.
        let set = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_LINGER,
                (&raw const linger).cast(),
                size_of_val(&linger) as libc::socklen_t,
            )
        };
        assert_eq!(set, 0);
        socket.set_nonblocking(true).expect("it is a socket");
        while socket.write(&[0; 1 << 16]).is_ok() {}
        socket.set_nonblocking(false).expect("it is a socket");
        (socket, peer)
    }

    #[test]
    fn files_that_do_not_close_keep_no_other_machine_waiting() {
        serve_if_pool();
        let folder = tempfile::tempdir().expect("there is room");
        let path = folder.path().join("vm.sock");
        let mut pool = pool(
            &path,
            "files_that_do_not_close_keep_no_other_machine_waiting",
        );
        let other = connect(&path);
        let other_process = number(&other);
        let peers = [0, 1].map(|_| {
            let machine = connect(&path);
            let process = number(&machine);
            signal(process, libc::SIGSTOP);
            let (file, peer) = lingering();
            socket::send(&machine, &[0], &[file.as_fd()]).expect("there is room");
            drop(file);
            signal(process, libc::SIGKILL);
            peer
        });
        // Those that were there, and those that come.
        signal(other_process, libc::SIGKILL);
        let patience = Some(Duration::from_secs(120));
        other.set_read_timeout(patience).expect("it is a socket");
        assert_eq!((&other).read(&mut [0]).expect("it ends"), 0);
        for _ in 0..2 {
            let next = connect(&path);
            next.set_read_timeout(patience).expect("it is a socket");
            assert_ne!(number(&next), pool.id());
        }
        drop(peers);
        pool.kill().expect("it runs");
        pool.wait().expect("it has ended");
    }
}
