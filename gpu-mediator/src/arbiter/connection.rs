//! A connection of a worker: from the pool that introduces it to its last word.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use gantry_remoting::{
    link::{
        closer::{Closer, Connection},
        socket,
    },
    turns::{
        message::{self, JOIN, Join, Refused, Word},
        page::{Account, Grant, Page, claim},
    },
};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::{Expected, Moment, Slice, scheduler};

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The other side has ended.
    #[error("the worker has ended")]
    Ended,
    /// The first message is none.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// No process came with it.
    #[error("the pool sent no handle of the worker's process")]
    Process,
    /// A byte that means nothing.
    #[error("the worker said {0:#04x}, which means nothing")]
    Word(u8),
    /// The system.
    #[error("the connection failed")]
    System(#[from] io::Error),
}

/// A worker's process: the pool's word, and not the worker's.
#[derive(Debug)]
pub struct Process {
    handle: OwnedFd,
    /// Its number when it was introduced; 0 for one of a namespace that is not seen from here.
    pid: u32,
}

impl Process {
    fn new(handle: OwnedFd) -> Result<Self, Error> {
        let pid = Self::pid(&handle).ok_or(Error::Process)?;
        Ok(Self { handle, pid })
    }

    /// The number of the process, as long as it has one; only a process's handle does.
    fn pid(handle: &OwnedFd) -> Option<u32> {
        let path = format!("/proc/self/fdinfo/{}", handle.as_raw_fd());
        let info = fs::read_to_string(path).ok()?;
        let pid = info.lines().find_map(|line| line.strip_prefix("Pid:"))?;
        pid.trim().parse().ok()
    }

    /// Whether both are one process. The number of one that has ended may be another's by now,
    /// which is why it is looked up again.
    pub fn is(&self, other: &Self) -> bool {
        self.pid != 0 && self.pid == other.pid && Self::pid(&self.handle) == Some(self.pid)
    }
}

/// A connection whose first message is not complete.
#[derive(Debug)]
pub struct Newcomer {
    stream: Connection,
    since: Moment,
    process: Option<Process>,
    bytes: Vec<u8>,
}

impl Newcomer {
    /// A fresh connection. What a worker has sent to it may hang as it closes.
    pub fn new(stream: UnixStream, closer: &Closer) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream: Connection::new(stream, closer),
            since: Moment::now(),
            process: None,
            bytes: Vec::new(),
        })
    }

    /// What to poll for input.
    pub fn fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    /// When it was accepted.
    pub fn since(&self) -> Moment {
        self.since
    }

    /// Its process, once the pool has introduced it.
    pub fn process(&self) -> Option<&Process> {
        self.process.as_ref()
    }

    /// Whose it is, for people: a pool's user, before it has said a client's name.
    pub fn whose(&self) -> String {
        let name = self.bytes.as_slice().try_into().ok();
        let name = name.and_then(|bytes| Join::from_bytes(bytes).ok());
        match (name, socket::user(&*self.stream)) {
            (Some(join), _) => join.name,
            (None, Ok(user)) => format!("user {user}"),
            (None, Err(_)) => "an unknown user".to_owned(),
        }
    }

    /// Takes what has come; whether the message is complete.
    pub fn read(&mut self) -> Result<bool, Error> {
        if self.process.is_none() {
            let (got, file) = self
                .stream
                .recv_with_fd(&mut [0])
                .map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
            if got == 0 {
                return Err(Error::Ended);
            }
            // From here on a worker speaks.
            socket::refuse_files(&*self.stream);
            self.process = Some(Process::new(file.ok_or(Error::Process)?.into())?);
            return Ok(false);
        }
        let mut bytes = [0; JOIN];
        let room = JOIN - self.bytes.len();
        match self.stream.receive(&mut bytes[..room])? {
            0 => Err(Error::Ended),
            got => {
                self.bytes.extend_from_slice(&bytes[..got]);
                Join::check(&self.bytes).inspect_err(|_| {
                    // So that it can name both versions, too. There is room for all of it, since
                    // nothing was written before.
                    let _ = (&*self.stream).write_all(&message::hello());
                })?;
                Ok(got == room)
            }
        }
    }

    /// The worker and what it has said, once the message is complete.
    pub fn join(self) -> Result<(Worker, Join), Error> {
        let bytes: [u8; JOIN] = self.bytes.try_into().map_err(|_| Error::Ended)?;
        let join = Join::from_bytes(&bytes)?;
        let (grant, grant_file) = Page::<Grant>::create()?;
        let (account, account_file) = Page::<Account>::create()?;
        // The worker gets its grants to read only.
        let readable = File::open(format!("/proc/self/fd/{}", grant_file.as_raw_fd()))?;
        for file in [&readable, &account_file] {
            self.stream
                .send_with_fd([0u8].as_slice(), file.as_raw_fd())
                .map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
        }
        let worker = Worker {
            stream: self.stream,
            process: self.process.ok_or(Error::Process)?,
            grant,
            account,
        };
        Ok((worker, join))
    }
}

/// A worker.
#[derive(Debug)]
pub struct Worker {
    stream: Connection,
    process: Process,
    grant: Page<Grant>,
    account: Page<Account>,
}

impl Worker {
    /// What to poll for words.
    pub fn fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    /// Its process.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// What to poll for the process's end.
    pub fn end(&self) -> RawFd {
        self.process.handle.as_raw_fd()
    }

    /// The next word, if one has come.
    pub fn word(&self) -> Result<Option<Word>, Error> {
        let mut byte = [0];
        match self.stream.receive(&mut byte) {
            Ok(0) => Err(Error::Ended),
            Ok(_) => match Word::from_byte(byte[0]) {
                Some(word) => Ok(Some(word)),
                None => Err(Error::Word(byte[0])),
            },
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Gives the worker the device.
    pub fn give(&self, turn: scheduler::Grant, contended: bool) {
        let slice = match turn.slice {
            Slice::Request => 0,
            Slice::Time(length) => length.as_nanos() as u64,
        };
        let grant = &self.grant;
        grant.slice.store(slice, Ordering::Relaxed);
        grant
            .coschedule
            .store(turn.coschedule.into(), Ordering::Relaxed);
        grant.contended.store(contended.into(), Ordering::Relaxed);
        self.account.claim.store(claim::BUSY, Ordering::Relaxed);
        grant.turn.fetch_add(1, Ordering::Release);
        // A worker that reads nothing has a full buffer, and need not be woken.
        let _ = Word::say(Word::Want, &*self.stream);
    }

    /// Makes the worker's turn longer.
    pub fn prolong(&self, by: Duration) {
        let by = u64::try_from(by.as_nanos()).unwrap_or(u64::MAX);
        self.grant.slice.fetch_add(by, Ordering::Relaxed);
    }

    /// Tells the worker that its turn is over: a word that a GPU may read by itself, and a byte that
    /// wakes the worker.
    pub fn stop(&self) {
        let turn = self.grant.turn.load(Ordering::Relaxed);
        // The lower half.
        self.grant.stop.store(turn as u32, Ordering::Release);
        // As in `give`.
        let _ = Word::say(Word::Again, &*self.stream);
    }

    /// Tells the worker whether somebody else waits.
    pub fn set_contended(&self, contended: bool) {
        self.grant
            .contended
            .store(contended.into(), Ordering::SeqCst);
    }

    /// Whether the worker has the device and does not use it.
    pub fn is_idle(&self) -> bool {
        // As in `take`. What was written before the claim is seen, too.
        std::sync::atomic::fence(Ordering::SeqCst);
        self.account.claim.load(Ordering::Acquire) == claim::IDLE
    }

    /// Takes the device away if the worker does not use it.
    pub fn take(&self) -> bool {
        // See `Turns::idle`: of both sides' writes, each side sees the other's or is seen.
        std::sync::atomic::fence(Ordering::SeqCst);
        self.account
            .claim
            .compare_exchange(
                claim::IDLE,
                claim::NONE,
                Ordering::AcqRel,
                Ordering::Relaxed,
            )
            .is_ok()
    }

    /// What the worker says of itself.
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Since when its oldest request has been with the driver, as it says; none if it has none.
    pub fn running_since(&self) -> Option<Moment> {
        let nanos = self.account.running_since.load(Ordering::Relaxed);
        (nanos != 0).then(|| Moment::from_nanos(nanos))
    }

    /// When the last batch of a worker that does not use the device has ended, and when its client is
    /// expected back, as it says: not at all if the batch is to end in the future, by which a pause
    /// would never be over.
    pub fn expected(&self, now: Moment) -> (Moment, Expected) {
        let nanos = |value: &AtomicU64| value.load(Ordering::Relaxed);
        let account = &self.account;
        let time = |value| Duration::from_nanos(nanos(value));
        let expected = Expected {
            within: time(&account.away_within),
            usual: time(&account.away_usual),
            batch: time(&account.batch),
        };
        match Moment::from_nanos(nanos(&account.away_since)) {
            since if since > now => (now, Expected::default()),
            since => (since, expected),
        }
    }

    /// Ends the process.
    pub fn kill(&self) {
        // SAFETY: no pointers but the empty `siginfo_t`.
        unsafe {
            libc::syscall(libc::SYS_pidfd_send_signal, self.end(), libc::SIGKILL, 0, 0);
        }
    }
}
