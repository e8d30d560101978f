//! Starts processes that inherit nothing from others, not even for the moment between fork and exec.
//!
//! A process has at first all that the one has open which forks it. In a pool that is also what applications, machines and
//! other workers have sent, or may have sent. It would be closed when the new process executes its program, and that close may
//! wait for ever for whoever serves the file's system. So a thread with a descriptor table of its own forks: it is started
//! before there is anything of others, and gets copies of what a new process needs.

use std::{
    fmt, io,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    process::Child,
    sync::mpsc::{self, Sender},
    thread,
};

use remoting_transport::socket;

/// What the thread is to do.
struct Order {
    /// The numbers that the files have in all other threads.
    files: Vec<RawFd>,
    work: Box<dyn FnOnce(Vec<OwnedFd>) -> io::Result<Child> + Send>,
    reply: Sender<io::Result<Child>>,
}

/// The thread. Processes that end with the thread that has forked them end when this is dropped.
pub(super) struct Starter {
    orders: Sender<Order>,
    /// By which files are sent, if the thread may not take them.
    sends: Option<UnixStream>,
}

impl fmt::Debug for Starter {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.debug_struct("Starter").finish_non_exhaustive()
    }
}

/// How the thread gets files of the other threads.
enum Way {
    /// It takes copies by their numbers, which fails for no other process's sake.
    Taken(OwnedFd),
    /// They are sent, as system calls are filtered (in containers).
    Sent(UnixStream),
}

impl Way {
    /// Gives this thread a descriptor table of its own, with the standard streams alone. `end` is the number of its end of a
    /// pair of sockets.
    fn part(end: RawFd, may_take: bool) -> io::Result<Self> {
        const FIRST: RawFd = libc::STDERR_FILENO + 1;
        let done = |result: i64| match result {
            0.. => Ok(result as RawFd),
            _ => Err(io::Error::last_os_error()),
        };
        // SAFETY: calls without pointers. The table is this thread's, of which nothing owns what is closed; the two files were
        // just made, and have no other owner there.
        unsafe {
            // Containers may have one of the two filtered.
            let (last, unshare) = (u32::MAX, libc::CLOSE_RANGE_UNSHARE as i32);
            if libc::close_range(end as u32 + 1, last, unshare) < 0 {
                done(libc::unshare(libc::CLONE_FILES).into()).map_err(|error| {
                    let text = format!(
                        "close_range and unshare(CLONE_FILES) are refused ({error}): allow one of them"
                    );
                    io::Error::new(error.kind(), text)
                })?;
            }
            if end != FIRST {
                done(libc::dup3(end, FIRST, libc::O_CLOEXEC).into())?;
            }
            // If this fails, it keeps what was open before anybody could connect.
            libc::close_range(FIRST as u32 + 1, last, 0);
            let end = UnixStream::from_raw_fd(FIRST);
            // That of the first thread, which shares its table with all others.
            let process = done(libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0));
            let process = process.map(|file| OwnedFd::from_raw_fd(file)).ok();
            let is_taken = |process: &OwnedFd| match take(process, libc::STDERR_FILENO) {
                Err(error) => error.raw_os_error() == Some(libc::EBADF),
                Ok(_) => true,
            };
            Ok(
                match process.filter(|process| may_take && is_taken(process)) {
                    Some(process) => Self::Taken(process),
                    None => Self::Sent(end),
                },
            )
        }
    }

    fn get(&self, files: &[RawFd]) -> io::Result<Vec<OwnedFd>> {
        match self {
            Self::Taken(process) => files.iter().map(|file| take(process, *file)).collect(),
            Self::Sent(end) => {
                let (_, got) = socket::receive(end, &mut [0])?;
                match got.len() == files.len() {
                    true => Ok(got),
                    false => Err(io::ErrorKind::InvalidData.into()),
                }
            }
        }
    }
}

/// Takes a copy of a file that a process has open. It is closed when a program is executed.
fn take(process: &OwnedFd, file: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: a call without pointers.
    let taken = unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), file, 0) };
    if taken < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was just made and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(taken as RawFd) })
}

impl Starter {
    /// Starts the thread; before anything of others is open.
    ///
    /// # Errors
    /// There is no thread, or no descriptor, or system calls are filtered.
    pub(super) fn new() -> io::Result<Self> {
        Self::with(true)
    }

    fn with(may_take: bool) -> io::Result<Self> {
        let (orders, told) = mpsc::channel::<Order>();
        let (ready, is_ready) = mpsc::channel();
        let (ours, theirs) = UnixStream::pair()?;
        let end = theirs.as_raw_fd();
        thread::Builder::new()
            .name("start".to_owned())
            .spawn(move || {
                let way = match Way::part(end, may_take) {
                    Ok(way) => way,
                    Err(error) => return drop(ready.send(Err(error))),
                };
                let _ = ready.send(Ok(matches!(way, Way::Sent(_))));
                for order in told {
                    let _ = order.reply.send(way.get(&order.files).and_then(order.work));
                }
            })?;
        let is_sent = is_ready.recv().unwrap_or_else(|_| Err(lost()))?;
        // Not before the thread has its own.
        drop(theirs);
        Ok(Self {
            orders,
            sends: is_sent.then_some(ours),
        })
    }

    /// Has `work` start a process, in the thread, with copies of these files. It must neither use nor own any other descriptor
    /// of this thread.
    ///
    /// # Errors
    /// Those of `work`, or there are no descriptors.
    pub(super) fn start(
        &self,
        files: &[BorrowedFd<'_>],
        work: impl FnOnce(Vec<OwnedFd>) -> io::Result<Child> + Send + 'static,
    ) -> io::Result<Child> {
        let (reply, replied) = mpsc::channel();
        if let Some(sends) = &self.sends {
            socket::send(sends, &[0], files)?;
        }
        let order = Order {
            files: files.iter().map(AsRawFd::as_raw_fd).collect(),
            work: Box::new(work),
            reply,
        };
        self.orders.send(order).map_err(|_| lost())?;
        replied.recv().unwrap_or_else(|_| Err(lost()))
    }
}

fn lost() -> io::Error {
    io::Error::other("the thread that starts processes has ended")
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::{Read, Seek},
        os::{fd::AsFd, unix::process::CommandExt},
        process::Command,
    };

    use super::*;

    #[test]
    fn a_new_process_has_nothing_of_others_and_what_it_is_given() {
        for may_take in [true, false] {
            let starter = Starter::with(may_take).unwrap();
            assert_eq!(starter.sends.is_none(), may_take);
            let others = File::open("/dev/null").unwrap();
            // A number that nothing else has.
            // SAFETY: a call without pointers, and a new descriptor, which nothing else owns.
            let others = unsafe {
                let file = libc::fcntl(others.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 700);
                assert!(file >= 700);
                OwnedFd::from_raw_fd(file)
            };
            let number = others.as_raw_fd();
            let mut given = tempfile::tempfile().unwrap();
            let echo = move |files: Vec<OwnedFd>| {
                let [file] = <[OwnedFd; 1]>::try_from(files).expect("it is one");
                let mut command = Command::new("echo");
                command.arg("given").stdout(file);
                // SAFETY: async-signal-safe calls between fork and exec.
                unsafe {
                    command.pre_exec(move || match libc::fcntl(number, libc::F_GETFD) {
                        -1 => Ok(()),
                        _ => Err(io::Error::from_raw_os_error(libc::EEXIST)),
                    });
                }
                command.spawn()
            };
            for _ in 0..2 {
                let mut child = starter.start(&[given.as_fd()], echo).unwrap();
                assert!(child.wait().unwrap().success());
            }
            let mut said = String::new();
            given.rewind().unwrap();
            given.read_to_string(&mut said).unwrap();
            assert_eq!(said, "given\ngiven\n");
            let failed = starter.start(&[], |_| Command::new("/nowhere").spawn());
            assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::NotFound);
            let child = starter.start(&[], |_| Command::new("true").spawn());
            assert!(child.unwrap().wait().unwrap().success());
        }
    }
}
