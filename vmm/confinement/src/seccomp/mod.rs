//! Which system calls each kind of thread may make.
//!
//! - [`table`]: the calls, per [`ThreadRole`].
//! - [`search`]: compiling them to filters.
//! - here: starting threads under them.
//!
//! A thread inherits the filter of the thread that starts it, and both have to allow a call. So
//! one thread, which may do what any of them may do, starts all others; the protection lies in
//! the filters of the threads that face the guest.

mod search;
pub mod table;

use std::{io, str::FromStr, sync::mpsc, thread};

use devices::thread::{ThreadRole, ThreadSpawner};
use seccompiler::SeccompAction;

/// What happens on a call that is not in the table.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Enforcement {
    /// The whole process is killed.
    #[default]
    Kill,
    /// The kernel's audit log names the call, and it is carried out.
    Log,
    /// No filter at all.
    Off,
}

impl FromStr for Enforcement {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "true" => Ok(Self::Kill),
            "log" => Ok(Self::Log),
            "false" => Ok(Self::Off),
            _ => Err(format!("'{text}' is none of true, false, log")),
        }
    }
}

/// A filter could not be made or installed.
#[derive(Debug, thiserror::Error)]
#[error("cannot confine the {role:?} thread; start with --seccomp false to go without")]
pub struct Error {
    role: ThreadRole,
    source: seccompiler::Error,
}

/// The filters.
#[derive(Clone)]
pub struct Filters(Option<SeccompAction>);

impl Filters {
    /// Those that do this to a thread with a call that is not in the table.
    pub fn new(enforcement: Enforcement) -> Self {
        Self(match enforcement {
            Enforcement::Kill => Some(SeccompAction::KillProcess),
            Enforcement::Log => Some(SeccompAction::Log),
            Enforcement::Off => None,
        })
    }

    /// Confines the calling thread, and all that it starts from now on, to what any thread may do.
    pub fn confine(&self) -> Result<(), Error> {
        self.apply(ThreadRole::Vmm)
    }

    /// Confines the calling thread, for good.
    fn apply(&self, role: ThreadRole) -> Result<(), Error> {
        let Some(action) = &self.0 else {
            return Ok(());
        };
        // Compiled for each thread: of most roles there is none, or one.
        table::rules(role)
            .and_then(|rules| search::compile(rules, action))
            .map_err(seccompiler::Error::from)
            .and_then(|program| seccompiler::apply_filter(&program))
            .map_err(|source| Error { role, source })
    }

    /// Confines the calling thread. Going on without confinement would be worse than going down.
    fn apply_or_abort(&self, role: ThreadRole) {
        if let Err(error) = self.apply(role) {
            log::error!("{error}: {}", error.source);
            std::process::abort();
        }
    }
}

enum Order {
    /// A thread to start.
    Start {
        role: ThreadRole,
        name: String,
        body: Box<dyn FnOnce() + Send>,
        reply: mpsc::SyncSender<io::Result<thread::JoinHandle<()>>>,
    },
    /// What is to be done before others start.
    Prepare(Box<dyn FnOnce() + Send>, mpsc::SyncSender<()>),
}

/// Starts threads, each under the filter of its role.
///
/// A device's worker is started when the guest's driver is ready, that is on a vCPU's thread. It
/// must not inherit the vCPU's filter, so a thread of its own, `_spawner`, starts all others. Its filter is that
/// of the thread that makes it.
#[derive(Clone)]
pub struct Spawner(mpsc::Sender<Order>);

impl Spawner {
    /// Starts the `_spawner` thread, which ends with the last clone of the result.
    pub fn new(filters: Filters) -> io::Result<Self> {
        let (sender, orders) = mpsc::channel::<Order>();
        thread::Builder::new()
            .name("_spawner".to_owned())
            .spawn(move || {
                for order in orders {
                    let (role, name, body, reply) = match order {
                        Order::Start {
                            role,
                            name,
                            body,
                            reply,
                        } => (role, name, body, reply),
                        Order::Prepare(work, done) => {
                            work();
                            let _ = done.send(());
                            continue;
                        }
                    };
                    let filters = filters.clone();
                    let (named, has_name) = mpsc::sync_channel(1);
                    let mut thread = thread::Builder::new().name(name);
                    if let Some(bytes) = stack(role) {
                        thread = thread.stack_size(bytes);
                    }
                    let thread = thread.spawn(move || {
                        // The other end waits for it.
                        let _ = named.send(());
                        filters.apply_or_abort(role);
                        body();
                    });
                    // A thread gives itself its name. Management tools look for those of vCPUs as
                    // soon as they hear that the VM has booted. If there is no thread, the other
                    // end is gone.
                    let _ = has_name.recv();
                    // Whoever ordered the thread waits for it.
                    let _ = reply.send(thread);
                }
            })?;
        Ok(Self(sender))
    }
}

/// Bytes of a thread's stack, if they are to be fewer than others have: there may be many of these threads, and a stack of 2 MiB
/// may become a huge page.
fn stack(role: ThreadRole) -> Option<usize> {
    const FEW: usize = 256 << 10;
    (role == ThreadRole::Lane).then_some(FEW)
}

fn gone() -> io::Error {
    io::Error::other("the thread that starts threads is gone")
}

impl ThreadSpawner for Spawner {
    fn spawn(
        &self,
        role: ThreadRole,
        name: &str,
        body: Box<dyn FnOnce() + Send>,
    ) -> io::Result<thread::JoinHandle<()>> {
        let (reply, thread) = mpsc::sync_channel(1);
        let order = Order::Start {
            role,
            name: name.to_owned(),
            body,
            reply,
        };
        self.0.send(order).map_err(|_| gone())?;
        thread.recv().map_err(|_| gone())?
    }

    fn prepare(&self, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        let (done, is_done) = mpsc::sync_channel(1);
        let order = Order::Prepare(work, done);
        self.0.send(order).map_err(|_| gone())?;
        is_done.recv().map_err(|_| gone())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use base::{Access, Mapping};

    use super::*;

    /// Runs `body` in a child process and returns its wait status.
    fn in_child(body: impl FnOnce()) -> libc::c_int {
        // SAFETY: the child only runs `body` and leaves without returning to the test harness.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            body();
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) };
        }
        let mut status = 0;
        // SAFETY: waits for the child that was just made.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        status
    }

    #[test]
    fn a_forbidden_call_on_any_thread_kills_the_process() {
        for role in table::ROLES {
            if role == ThreadRole::Vmm {
                continue;
            }
            let filters = Filters::new(Enforcement::Kill);
            let status = in_child(|| {
                if filters.apply(role).is_ok() {
                    // SAFETY: a call that no device needs.
                    unsafe { libc::syscall(libc::SYS_execve, 0, 0, 0) };
                }
            });
            assert!(libc::WIFSIGNALED(status), "{role:?}: status {status:#x}");
            assert_eq!(libc::WTERMSIG(status), libc::SIGSYS, "{role:?}");
        }
    }

    #[test]
    fn only_the_control_thread_creates_rings_of_io_uring() {
        for role in table::ROLES {
            let filters = Filters::new(Enforcement::Kill);
            let status = in_child(|| {
                if filters.apply(role).is_ok() {
                    let mut parameters = [0u8; 120];
                    let parameters = parameters.as_mut_ptr();
                    // SAFETY: the kernel writes a structure of this size.
                    unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, parameters) };
                }
            });
            let is_killed = libc::WIFSIGNALED(status);
            assert_eq!(is_killed, role != ThreadRole::Vmm, "{role:?}");
        }
    }

    /// Wait status of a child that makes a request of a file that has none.
    fn after_ioctl(role: ThreadRole, request: u64) -> libc::c_int {
        let filters = Filters::new(Enforcement::Kill);
        let file = std::fs::File::open("/dev/null").unwrap();
        in_child(|| {
            if filters.apply(role).is_ok() {
                let mut argument = 0u64;
                // SAFETY: at most a number is read or written.
                unsafe { libc::ioctl(file.as_raw_fd(), request as libc::Ioctl, &raw mut argument) };
            }
        })
    }

    #[test]
    fn no_device_types_or_pastes_into_a_terminal() {
        const TIOCLINUX: u64 = 0x541c;
        for role in [
            ThreadRole::Vcpu,
            ThreadRole::Console,
            ThreadRole::Net,
            ThreadRole::Vsock,
        ] {
            for request in [libc::TIOCSTI, TIOCLINUX] {
                let status = after_ioctl(role, request);
                assert!(libc::WIFSIGNALED(status), "{role:?}: {request:#x}");
            }
        }
        assert_eq!(after_ioctl(ThreadRole::Console, libc::TIOCGWINSZ), 0);
        assert_eq!(after_ioctl(ThreadRole::Vsock, libc::FIONBIO), 0);
        assert_eq!(after_ioctl(ThreadRole::Vcpu, libc::TUNSETOFFLOAD), 0);
    }

    #[test]
    fn allowed_calls_go_through() {
        let filters = Filters::new(Enforcement::Kill);
        let status = in_child(|| {
            if filters.apply(ThreadRole::Disk).is_ok() {
                // SAFETY: no preconditions.
                unsafe { libc::syscall(libc::SYS_gettid) };
            }
        });
        assert_eq!(status, 0);
    }

    #[test]
    fn who_shows_the_guest_pages_of_a_device_and_takes_them_away_may_do_so() {
        const PAGE: usize = 4096;
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/zero");
        let file = file.unwrap();
        let whole = Mapping::anonymous(2 * PAGE, Access::ReadWrite).unwrap();
        // A vCPU takes them away when nothing is behind them any longer.
        for role in [ThreadRole::Accel, ThreadRole::Vcpu] {
            let status = in_child(|| {
                let filters = Filters::new(Enforcement::Kill);
                let done = filters.apply(role).is_ok() && file.metadata().is_ok() && {
                    let shown = Mapping::shared(&file, 0, PAGE, Access::ReadWrite);
                    let blank = Mapping::anonymous(2 * PAGE, Access::ReadWrite);
                    shown
                        .and_then(|shown| whole.replace_part_by(PAGE, shown))
                        .is_ok()
                        && blank.and_then(|blank| whole.replace_by(blank)).is_ok()
                };
                // SAFETY: ends the child.
                unsafe { libc::_exit(libc::c_int::from(!done)) };
            });
            assert_eq!(status, 0, "{role:?}");
        }
    }

    #[test]
    fn without_enforcement_nothing_is_filtered() {
        let filters = Filters::new(Enforcement::Off);
        let status = in_child(|| {
            if filters.apply(ThreadRole::Rng).is_ok() {
                // SAFETY: fails with EFAULT.
                unsafe { libc::syscall(libc::SYS_execve, 0, 0, 0) };
            }
        });
        assert_eq!(status, 0);
    }

    #[test]
    fn threads_inherit_what_is_prepared() {
        let spawner = Spawner::new(Filters::new(Enforcement::Off)).unwrap();
        let slack = |thread: &Spawner| {
            let (tell, told) = mpsc::channel();
            let body = Box::new(move || {
                // SAFETY: a call without pointers.
                tell.send(unsafe { libc::prctl(libc::PR_GET_TIMERSLACK) })
                    .unwrap();
            });
            let thread = thread.spawn(ThreadRole::Vcpu, "inherits", body).unwrap();
            let slack = told.recv().unwrap();
            thread.join().unwrap();
            slack
        };
        let before = slack(&spawner);
        spawner
            .prepare(Box::new(move || {
                let changed = libc::c_ulong::try_from(before + 1).unwrap();
                // SAFETY: a call without pointers.
                unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, changed) };
            }))
            .unwrap();
        assert_eq!(slack(&spawner), before + 1);
    }

    #[test]
    fn a_thread_has_its_name_as_soon_as_it_is_there() {
        let spawner = Spawner::new(Filters::new(Enforcement::Off)).unwrap();
        for number in 0..20 {
            let name = format!("named{number}");
            let (go, wait) = mpsc::channel::<()>();
            let body = Box::new(move || {
                let _ = wait.recv();
            });
            let thread = spawner.spawn(ThreadRole::Vcpu, &name, body).unwrap();
            let tasks = std::fs::read_dir("/proc/self/task").unwrap();
            let names: Vec<_> = tasks
                .filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok())
                .collect();
            assert!(names.contains(&format!("{name}\n")), "{names:?}");
            drop(go);
            thread.join().unwrap();
        }
    }
}
