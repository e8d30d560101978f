//! The pool of a lease: a process that outlives the service, and that the next service finds again.

use std::{
    collections::BTreeSet,
    fs, io,
    io::Write,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::{
            fs::{DirBuilderExt, MetadataExt, PermissionsExt},
            process::CommandExt,
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use base::{poll::poll, socket};
use serde::{Deserialize, Serialize};

use super::{
    super::{compiled::tree, worker},
    request::{Lease, Name},
};

/// How long a pool may take until it listens.
const STARTS: Duration = Duration::from_secs(30);
/// How often a thread looks up that waits for the end of something.
pub(super) const FOREVER: Duration = Duration::from_hours(1);
/// How often is looked whether a pool listens.
const LOOK: Duration = Duration::from_millis(10);
/// How often a session is searched in which nobody is found while others of this machine come and go.
const MOST_SEARCHES: u32 = 100;
/// How names of records begin that are being written; no name of a lease does.
const UNFINISHED: &str = ".";

/// What is written down about a lease, for a service that is started later.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub lease: Lease,
    pub process: i32,
    /// When the process was started, in the kernel's ticks since boot: its number may be another one's by now.
    pub started: u64,
}

/// Where the files of leases are.
#[derive(Clone, Debug)]
pub(super) struct Places {
    /// One file for each lease.
    pub records: PathBuf,
    /// One folder for each lease, with its socket.
    pub sockets: PathBuf,
    /// One folder for each lease, for its pool.
    pub cache: PathBuf,
}

impl Places {
    pub fn record(&self, name: &Name) -> PathBuf {
        self.records.join(name.to_string())
    }

    pub fn folder(&self, name: &Name) -> PathBuf {
        self.sockets.join(name.to_string())
    }

    pub fn cache(&self, name: &Name) -> PathBuf {
        self.cache.join(name.to_string())
    }

    /// The file that says that a lease ends.
    fn mark(&self, name: &Name) -> PathBuf {
        // No name of a lease begins so.
        self.records.join(format!("~{name}"))
    }

    /// Writes down that a lease ends, for a service that is started before it has.
    pub fn ends(&self, name: &Name) {
        // Without room for it, a later service starts the pool again.
        let _ = fs::write(self.mark(name), "");
    }

    /// Whether that is written down.
    pub fn is_ending(&self, name: &Name) -> bool {
        self.mark(name).exists()
    }

    /// Removes everything of a lease whose pool has ended. Folders that stay, a later service removes.
    pub fn remove(&self, name: &Name) {
        let _ = fs::remove_file(self.record(name));
        let _ = fs::remove_file(self.mark(name));
        let _ = tree::remove(&self.folder(name));
        let _ = tree::remove(&self.cache(name));
    }

    /// Writes a record down, so that a reader sees all of it or nothing.
    fn write(&self, record: &Record) -> io::Result<()> {
        let path = self.record(&record.lease.grant.name);
        let new = self
            .records
            .join(format!("{UNFINISHED}{}", record.lease.grant.name));
        fs::write(&new, serde_json::to_vec(record)?)?;
        fs::rename(new, path)
    }
}

/// A pool that runs.
#[derive(Debug)]
pub(super) struct Running {
    /// Readable when it has ended.
    handle: OwnedFd,
    process: i32,
    started: u64,
    /// Only of the service that has started it.
    child: Option<Child>,
}

/// Why a pool does not run.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("cannot create {}", .0.display())]
    Folder(PathBuf, #[source] io::Error),
    #[error("cannot start a pool")]
    Start(#[source] io::Error),
    #[error("cannot write down which process the pool is")]
    Record(#[source] io::Error),
    #[error("the pool has ended before it listened: the service's log says why")]
    Ended,
    #[error("the pool does not listen after {} s", STARTS.as_secs())]
    Silent,
}

impl Running {
    /// Starts the pool of a lease, and waits until it listens.
    pub fn start(lease: &Lease, mut command: Command, places: &Places) -> Result<Self, Error> {
        let folder = places.folder(&lease.grant.name);
        let mut builder = fs::DirBuilder::new();
        // The umask may take what programs of all users need.
        let made = builder.recursive(true).mode(0o755).create(&folder);
        made.and_then(|()| fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)))
            .map_err(|error| Error::Folder(folder, error))?;
        let _ = fs::remove_file(&lease.socket);
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        // A session of its own, which nothing that its workers start can leave: neither call is allowed to them.
        // SAFETY: an async-signal-safe call between fork and exec.
        unsafe {
            command.pre_exec(|| {
                if libc::setsid() < 0 {
                    return Err(io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let mut child = command.spawn().map_err(Error::Start)?;
        let mut running = match worker::handle(&child) {
            Ok(handle) => Self {
                handle,
                process: child.id().cast_signed(),
                started: 0,
                child: None,
            },
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(Error::Start(error));
            }
        };
        let begins = child.stdin.take();
        running.child = Some(child);
        let started = (|| {
            let started = start_time(running.process).ok_or(Error::Ended)?;
            running.started = started;
            let record = Record {
                lease: lease.clone(),
                process: running.process,
                started,
            };
            places.write(&record).map_err(Error::Record)?;
            // It has waited for this byte: if this process is killed before there is a record, it ends.
            let told = begins.map(|mut begins| begins.write_all(b"s"));
            told.transpose().map_err(Error::Start)?;
            running.listens(&lease.socket)
        })();
        match started {
            Ok(()) => Ok(running),
            Err(error) => {
                running.end();
                Err(error)
            }
        }
    }

    /// Takes up the pool that another service has started, if it still runs.
    pub fn found(record: &Record) -> Option<Self> {
        // SAFETY: a plain call.
        let handle = unsafe { libc::syscall(libc::SYS_pidfd_open, record.process, 0) };
        if handle < 0 {
            return None;
        }
        // SAFETY: the descriptor was just made and has no other owner.
        let handle = unsafe { OwnedFd::from_raw_fd(handle as i32) };
        // After the handle was made: it is that process's, if this is.
        let is_same = start_time(record.process) == Some(record.started);
        let running = Self {
            handle,
            process: record.process,
            started: record.started,
            child: None,
        };
        (is_same && !running.has_ended(Duration::ZERO)).then_some(running)
    }

    /// Waits until it listens, and lets all users connect: only who is given the folder can reach the socket.
    pub fn listens(&self, path: &Path) -> Result<(), Error> {
        let until = Instant::now() + STARTS;
        while socket::is_served(path).is_err() {
            if self.has_ended(LOOK) {
                return Err(Error::Ended);
            }
            if Instant::now() >= until {
                return Err(Error::Silent);
            }
        }
        fs::set_permissions(path, fs::Permissions::from_mode(0o666))
            .map_err(|error| Error::Folder(path.to_owned(), error))
    }

    /// Whether it ends within this time.
    fn has_ended(&self, within: Duration) -> bool {
        wait(&[self.handle.as_fd()], within)
    }

    /// Readable when it has ended.
    pub fn handle(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }

    /// Kills it, and waits until it and all that its workers have started have ended: what they have of the device is free
    /// then. Drivers may take long for that.
    pub fn end(self) {
        // While it stands still, it starts no further worker.
        signal(&self.handle, libc::SIGSTOP);
        kill_session(self.process, self.started);
        self.clear();
    }

    /// The same for one that has ended, or is about to.
    pub fn clear(mut self) {
        signal(&self.handle, libc::SIGKILL);
        while !wait(&[self.handle.as_fd()], FOREVER) {}
        kill_session(self.process, self.started);
        if let Some(child) = &mut self.child {
            // It has ended.
            let _ = child.wait();
        }
    }
}

/// Kills all processes of the session that a process had begun, and waits until they have ended.
///
/// Each of them may start another one and end, faster than they can be looked up. So their groups are killed, which they
/// cannot leave and the kernel does for all of a group at once; one of a group has to be seen for that. While the pool
/// stands still, its workers stay to be seen, ended or not. Behind its back one that is gone before it has been looked at
/// may have been of the session.
pub(super) fn kill_session(leader: i32, started: u64) {
    let (mut killed, mut vain) = (BTreeSet::new(), 0);
    while vain < MOST_SEARCHES {
        // The number is another process's only if there is nobody in the session any more.
        if start_time(leader).is_some_and(|other| other != started) {
            return;
        }
        let found = Session::search(leader);
        for group in &found.groups {
            // SAFETY: a plain call. The group's number is another's only if all of it have ended just now.
            unsafe { libc::kill(-group, libc::SIGKILL) };
        }
        for member in &found.members {
            while !wait(&[member.as_fd()], FOREVER) {}
        }
        let is_known = found.groups.is_subset(&killed);
        killed.extend(found.groups);
        match found.members.is_empty() && is_known {
            true if found.is_all => return,
            true => vain += 1,
            false => vain = 0,
        }
    }
}

/// Those of a session that are this user's.
#[derive(Default)]
struct Session {
    /// Handles of those that have not ended.
    members: Vec<OwnedFd>,
    /// The groups of all.
    groups: BTreeSet<i32>,
    /// Whether all processes have been looked at.
    is_all: bool,
}

impl Session {
    fn search(session: i32) -> Self {
        let mut found = Self::default();
        let Ok(all) = fs::read_dir("/proc").and_then(Iterator::collect::<io::Result<Vec<_>>>)
        else {
            return found;
        };
        let number = |entry: &fs::DirEntry| entry.file_name().to_str()?.parse().ok();
        found.is_all = true;
        // The newest first: they may end soon.
        for process in all.iter().rev().filter_map(number) {
            found.is_all &= found.look_at(process, session).is_some();
        }
        found
    }

    /// None if it was gone, or cannot be looked at.
    fn look_at(&mut self, process: i32, session: i32) -> Option<()> {
        // SAFETY: a plain call.
        let user = unsafe { libc::geteuid() };
        let group = || -> Option<(Option<i32>, bool)> {
            let fields = fields(process)?;
            let is_of = fields.get(3)?.parse() == Ok(session)
                && fs::metadata(format!("/proc/{process}")).ok()?.uid() == user;
            let has_ended = matches!(&*fields[0], "Z" | "X");
            let group = fields.get(2)?.parse().ok()?;
            Some((is_of.then_some(group), has_ended))
        };
        let (Some(of), has_ended) = group()? else {
            return Some(());
        };
        // Neither all processes nor the own group.
        self.groups.extend(Some(of).filter(|of| *of > 1));
        if has_ended {
            return Some(());
        }
        // SAFETY: a plain call.
        let handle = unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) };
        if handle < 0 {
            return None;
        }
        // SAFETY: the descriptor was just made and has no other owner.
        let handle = unsafe { OwnedFd::from_raw_fd(handle as i32) };
        // It is that one's, if this is so still.
        if let (Some(_), false) = group()? {
            self.members.push(handle);
        }
        Some(())
    }
}

/// Waits until one of these is readable, or its other end is closed.
pub(super) fn wait(files: &[BorrowedFd<'_>], within: Duration) -> bool {
    let mut entries: Vec<_> = files
        .iter()
        .map(|file| libc::pollfd {
            fd: file.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        })
        .collect();
    poll(&mut entries, Some(within)).is_ok_and(|ready| ready > 0)
}

fn signal(process: &OwnedFd, signal: i32) {
    let none = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: no information comes along.
    unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            process.as_raw_fd(),
            signal,
            none,
            0,
        )
    };
}

/// When a process was started.
fn start_time(process: i32) -> Option<u64> {
    fields(process)?.get(19)?.parse().ok()
}

/// The fields of a process's line that follow its name, which is in parentheses: the third one and all others.
fn fields(process: i32) -> Option<Vec<String>> {
    let line = base::proc::read(format!("/proc/{process}/stat")).ok()?;
    let (_, rest) = line.rsplit_once(')')?;
    Some(rest.split_whitespace().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_found_again_unless_it_is_another_one_of_that_number() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let process = child.id().cast_signed();
        let text = r#"{"name":"a","device":"0","memory":1,"user":0,"socket":"/s"}"#;
        let record = Record {
            lease: serde_json::from_str(text).unwrap(),
            process,
            started: start_time(process).unwrap(),
        };
        let found = Running::found(&record).unwrap();
        assert!(!found.has_ended(Duration::ZERO));
        let other = Record {
            started: record.started + 1,
            ..record.clone()
        };
        assert!(Running::found(&other).is_none());
        found.end();
        // Not waited for: a zombie, which has ended.
        assert!(Running::found(&record).is_none());
        child.wait().unwrap();
        assert!(Running::found(&record).is_none());
    }

    #[test]
    fn what_a_pool_has_started_ends_with_it() {
        let mut command = Command::new("sh");
        // In place of what a worker's kernel has forked.
        command
            .args(["-c", "sleep 600 & echo; exec sleep 600"])
            .stdout(Stdio::piped());
        // SAFETY: an async-signal-safe call between fork and exec.
        unsafe {
            command.pre_exec(|| {
                libc::setsid();
                Ok(())
            })
        };
        let mut child = command.spawn().unwrap();
        io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        let process = child.id().cast_signed();
        assert_eq!(Session::search(process).members.len(), 2);
        let running = Running {
            handle: worker::handle(&child).unwrap(),
            process,
            started: start_time(process).unwrap(),
            child: Some(child),
        };
        running.end();
        assert!(Session::search(process).members.is_empty());
    }

    /// Begins a session in which each process starts the next one and ends, until there were many: the last one says
    /// so. For a process that was forked.
    unsafe fn begin_chain(says: i32) -> io::Result<()> {
        const MANY: u32 = 30_000;
        // SAFETY: async-signal-safe calls.
        unsafe {
            libc::setsid();
            if libc::fork() != 0 {
                return Ok(());
            }
            libc::setpgid(0, 0);
            libc::dup2(says, 3);
            libc::close_range(4, u32::MAX, 0);
            for _ in 0..MANY {
                match libc::fork() {
                    0 => {}
                    child => libc::_exit(i32::from(child < 0)),
                }
            }
            libc::write(3, c"!".as_ptr().cast(), 1);
            libc::_exit(0);
        }
    }

    #[test]
    fn a_session_ends_whose_processes_start_others_and_end() {
        for _ in 0..10 {
            let (mut read, write) = io::pipe().unwrap();
            let mut command = Command::new("sleep");
            command.arg("600");
            let says = write.as_raw_fd();
            // SAFETY: async-signal-safe calls between fork and exec.
            unsafe { command.pre_exec(move || begin_chain(says)) };
            let child = command.spawn().unwrap();
            drop(write);
            let process = child.id().cast_signed();
            let running = Running {
                handle: worker::handle(&child).unwrap(),
                process,
                started: start_time(process).unwrap(),
                child: Some(child),
            };
            running.end();
            let mut said = Vec::new();
            io::Read::read_to_end(&mut read, &mut said).unwrap();
            assert_eq!(said, b"", "they went on");
        }
    }
}
