//! A worker process as its pool sees it: starting it, ending it, and removing what it leaves.

use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    ptr::null_mut,
    sync::{
        Arc, Mutex,
        mpsc::{self, RecvTimeoutError, Sender},
    },
    thread,
    time::Duration,
};

use base::{Unpoisoned, limits::Limit};
use remoting_transport::closer::Closer;
use remoting_turns::{introduce, weight};

use super::{
    account::{ACCOUNT, Counter},
    compiled, drivers,
    folders::Folder,
    group::{self, Group, Groups},
    listener::Listener,
    log::Log,
    options::Options,
    process::{CONTROL, LISTENER},
    standby::MOVES,
    starter::Starter,
    stream,
};

/// How long to wait before a control group whose processes have not ended is removed again.
const REMOVE_RETRY: Duration = Duration::from_secs(1);
/// Stack size in bytes of a thread that waits for the end of a worker.
const STACK: usize = 64 << 10;

/// A worker process, and what goes when it does.
#[derive(Debug)]
pub(super) struct Worker {
    /// The number of workers started up to this one.
    pub number: u64,
    child: Child,
    /// Messages from and to the worker.
    pub channel: UnixStream,
    /// By which its application is moved.
    pub control: UnixStream,
    /// Readable when the process has ended.
    pub end: OwnedFd,
    pub remains: Remains,
    /// What its application's device memory is charged to, if the pool has a total.
    pub counter: Option<Arc<Counter>>,
}

/// What a worker leaves behind.
#[derive(Debug)]
pub(super) struct Remains {
    pub folder: Folder,
    pub group: Option<Group>,
}

impl Worker {
    /// Kills the process and all that it has started: linkers, or what kernels on a CPU like. It
    /// has a process group of its own, which nothing in it can leave.
    pub fn kill(&self) {
        // SAFETY: a plain call; the process has not been waited for, so that its id is its own.
        unsafe { libc::kill(-(self.child.id() as libc::pid_t), libc::SIGKILL) };
    }

    /// Its process id.
    pub fn id(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// Kills it, waits for it, and has what it leaves removed. `connection` is closed afterwards: the
    /// other side sees the connection end when the worker has ended, and not before.
    pub fn end(
        mut self,
        connection: Option<Arc<OwnedFd>>,
        remover: &Sender<Remains>,
        closer: &Closer,
    ) {
        self.kill();
        let _ = self.child.wait();
        reap(self.child.id());
        let group = self.remains.group.as_ref();
        if group.is_some_and(Group::was_short) {
            base::note!(
                "gantry-accel: a worker has ended, as it had no more memory with all that it has \
                 started: --heap and --window say how much"
            );
        }
        if let Some(connection) = &connection {
            // The other side sees the end now, even if no close ends.
            // SAFETY: a plain call.
            unsafe { libc::shutdown(connection.as_raw_fd(), libc::SHUT_RDWR) };
        }
        // The worker may have sent its application's files by any of them.
        closer.close((connection, self.channel, self.control));
        let _ = remover.send(self.remains);
    }

    /// Kills it, and leaves the rest to a thread: a driver may take long to end, and nobody waits for that.
    pub fn end_aside(self, remover: &Sender<Remains>, closer: &Closer) {
        self.kill();
        let killed = Killed {
            worker: Some(self),
            remover: remover.clone(),
            closer: closer.clone(),
        };
        // Not behind files that others have sent, which may never close.
        let killed = Arc::new(Mutex::new(Some(killed)));
        let of_thread = Arc::clone(&killed);
        let thread = thread::Builder::new().name("end".to_owned());
        let started = thread
            .stack_size(STACK)
            .spawn(move || drop(of_thread.lock_unpoisoned().take()));
        if started.is_err()
            && let Some(killed) = killed.lock_unpoisoned().take()
        {
            closer.close(killed);
        }
    }
}

/// A worker that was killed: it is waited for as this is dropped.
struct Killed {
    worker: Option<Worker>,
    remover: Sender<Remains>,
    closer: Closer,
}

impl Drop for Killed {
    fn drop(&mut self) {
        if let Some(worker) = self.worker.take() {
            worker.end(None, &self.remover, &self.closer);
        }
    }
}

/// Waits for processes of a worker that has ended, as far as they are this process's own children and
/// have ended too: a pool that is the first process of a container, or a subreaper, gets those whose
/// parents have ended, and nobody else would ever wait for them. Before the group's number, which is
/// that of the worker, can belong to another.
fn reap(group: u32) {
    // SAFETY: a plain call; no status is asked for.
    while unsafe { libc::waitpid(-(group as libc::pid_t), null_mut(), libc::WNOHANG) } > 0 {}
}

/// A thread that removes what workers leave, one after the other: a folder with millions of files
/// takes long, as do processes to end, and others are to be served meanwhile.
pub(super) fn remover() -> io::Result<Sender<Remains>> {
    let (to, remains) = mpsc::channel::<Remains>();
    thread::Builder::new()
        .name("remove".to_owned())
        .spawn(move || {
            // Groups whose processes have not all ended.
            let mut left: Vec<Group> = Vec::new();
            loop {
                left.retain(|group| group.remove().is_err());
                let next = match left.is_empty() {
                    true => remains.recv().map_err(|_| RecvTimeoutError::Disconnected),
                    false => remains.recv_timeout(REMOVE_RETRY),
                };
                match next {
                    Ok(Remains { folder, group }) => {
                        drop(folder);
                        left.extend(group);
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        })?;
    Ok(to)
}

/// A worker to start.
pub(super) struct New<'a> {
    pub number: u64,
    pub folder: PathBuf,
    pub groups: Option<&'a Groups>,
    pub log: &'a Log,
    pub starter: &'a Starter,
    pub counter: Option<Arc<Counter>>,
    /// Whether it takes up another worker's application.
    pub standby: bool,
}

pub(super) fn start(
    listener: &Listener,
    program: &Path,
    options: &Options,
    files: Limit,
    new: New<'_>,
) -> io::Result<Worker> {
    let cache = Folder::create(new.folder.clone())?;
    let group = new.groups.map(|groups| groups.create(new.number));
    let remains = Remains {
        folder: cache,
        group: group.transpose()?,
    };
    let cache = &remains.folder.0;
    let entrance = remains.group.as_ref().map(Group::entrance).transpose()?;
    let mut command = Command::new(program);
    let (channel, theirs) = UnixStream::pair()?;
    let (moves, worker_moves) = UnixStream::pair()?;
    let mut places = vec![LISTENER, MOVES];
    let control = match &options.arbiter {
        Some(path) => {
            let (ours, theirs) = UnixStream::pair()?;
            places.push(CONTROL);
            command.arg("worker").arg("--arbiter").arg(path);
            Some((ours, theirs, path))
        }
        None => {
            command.arg("worker");
            None
        }
    };
    describe(&mut command, listener, options, &new, cache);
    if new.counter.is_some() {
        places.push(ACCOUNT);
    }
    let (their_errors, errors) = Log::pipe()?;
    command.process_group(0).stdin(Stdio::null());
    let mut given = vec![
        theirs.as_fd(),
        their_errors.as_fd(),
        listener.socket.as_fd(),
        worker_moves.as_fd(),
    ];
    given.extend(control.as_ref().map(|(_, theirs, _)| theirs.as_fd()));
    given.extend(new.counter.iter().map(|counter| counter.file().as_fd()));
    given.extend(entrance.as_ref().map(AsFd::as_fd));
    let mut child = new.starter.start(&given, move |given| {
        let mut given = given.into_iter();
        let mut next = || given.next().ok_or(io::ErrorKind::InvalidData);
        command.stdout(next()?).stderr(next()?);
        let placed = places.into_iter().map(|place| Ok((next()?, place)));
        let placed = placed.collect::<io::Result<Vec<_>>>()?;
        let door = given.next();
        let pool = std::process::id();
        // SAFETY: only async-signal-safe calls between fork and exec.
        unsafe {
            command.pre_exec(move || {
                // First of all, so that nothing of it is in the pool's.
                if let Some(door) = &door {
                    group::enter(door.as_fd())?;
                }
                base::child::end_with(pool)?;
                // Drivers may use `select`. Somebody may have lowered the limit meanwhile.
                let _ = files.set();
                put(&placed)
            });
        }
        command.spawn()
    })?;
    new.log.add(errors, child.id());
    let attended = match control {
        Some((ours, _, path)) => introduce::attend(&child, ours, path.clone()),
        None => Ok(()),
    };
    let end = attended.and_then(|()| handle(&child)).inspect_err(|_| {
        let _ = child.kill();
        let _ = child.wait();
    })?;
    Ok(Worker {
        number: new.number,
        child,
        channel,
        control: moves,
        end,
        remains,
        counter: new.counter,
    })
}

/// Puts files at their places in a process that has just been forked, where they stay open. Async-signal-safe.
fn put(given: &[(OwnedFd, i32)]) -> io::Result<()> {
    const MOST: usize = 4;
    const LAST: i32 = if MOVES > ACCOUNT { MOVES } else { ACCOUNT };
    // First out of each other's way.
    let mut aside = [0; MOST];
    for (aside, (file, _)) in aside.iter_mut().zip(given) {
        // SAFETY: a call without pointers.
        *aside = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, LAST + 1) };
    }
    for (aside, (_, place)) in aside.iter().zip(given) {
        // SAFETY: as above. What was at the place is not used: this process executes another program.
        if *aside < 0 || unsafe { libc::dup2(*aside, *place) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Says by arguments and environment what a worker is to be.
fn describe(
    command: &mut Command,
    listener: &Listener,
    options: &Options,
    new: &New<'_>,
    cache: &Path,
) {
    if let Some(name) = &options.name {
        command.args(["--name", name]);
    }
    if let Some(protocol) = listener.protocol {
        stream::pass_on(command, protocol, listener.keeper.as_ref(), &options.stream);
    }
    for path in &options.readable {
        command.arg("--readable").arg(path);
    }
    if let Some(folder) = &options.cuda_libraries {
        command.arg("--cuda-libraries").arg(folder);
    }
    if let Some(folder) = &options.compiled {
        command.arg("--compiled").arg(folder);
    }
    if let Some(without) = &options.without {
        command.arg("--without").arg(without.to_string());
    }
    for library in &options.library {
        command.arg("--library").arg(library.to_string());
    }
    if options.late {
        command.arg("--late");
    }
    if options.sliced {
        command.arg("--sliced");
    }
    if let Some(latency) = options.latency {
        command.args(["--latency", &latency.to_string()]);
    }
    if new.standby {
        command.arg("--standby");
    }
    match options.memory_total.zip(new.counter.as_deref()) {
        Some((total, counter)) => command
            .args(["--memory-total", &total.to_string()])
            .args(["--counter", &counter.index().to_string()]),
        None => command.args(["--memory", &options.memory.to_string()]),
    };
    command
        .args(["--api", &options.named_apis(",")])
        .args(["--devices", &options.devices.to_string()])
        .args(["--weight", &weight::text(options.weight)])
        .args(["--window", &options.window.to_string()])
        .args(["--spin", &options.spin.to_string()])
        .args(["--kernel-limit", &options.kernel_limit.to_string()])
        .args(["--heap", &(options.heap() >> 20).to_string()])
        .arg("--cache")
        .arg(cache)
        .envs(compiled::variables(cache))
        .env("TMPDIR", cache)
        .envs(drivers::environment());
}

/// A descriptor that is readable when a process has ended, which has not been waited for.
pub(super) fn handle(child: &Child) -> io::Result<OwnedFd> {
    // SAFETY: a plain call; the child has not been waited for, so that its id is its own.
    let handle = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) };
    if handle < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(handle as i32) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workers_orphans_do_not_stay_zombies_of_its_pool() {
        // SAFETY: plain calls; the child makes system calls and ends. A process of its own, as
        // orphans of other tests would become this one's children too.
        let status = unsafe {
            let pool = libc::fork();
            if pool == 0 {
                libc::_exit(i32::from(!leaves_none()));
            }
            let mut status = -1;
            libc::waitpid(pool, &raw mut status, 0);
            status
        };
        assert_eq!(status, 0);
    }

    /// Whether a process that gets orphans has no children when a worker and its group have ended.
    /// System calls alone: for a process that was forked.
    fn leaves_none() -> bool {
        // SAFETY: as above; information that nobody reads otherwise.
        unsafe {
            libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1);
            let worker = libc::fork();
            if worker == 0 {
                libc::setpgid(0, 0);
                for _ in 0..3 {
                    let linker = libc::fork();
                    if linker == 0 {
                        libc::_exit(0);
                    }
                    // Ended, and not waited for.
                    let mut info = std::mem::zeroed();
                    let how = libc::WEXITED | libc::WNOWAIT;
                    libc::waitid(libc::P_PID, linker as libc::id_t, &raw mut info, how);
                }
                libc::_exit(0);
            }
            libc::waitpid(worker, null_mut(), 0);
            reap(worker as u32);
            libc::waitpid(-1, null_mut(), libc::WNOHANG) < 0
        }
    }
}
