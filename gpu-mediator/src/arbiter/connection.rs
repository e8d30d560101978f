//! A worker's connection, from its introduction by the pool to its last word.

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

use remoting_transport::{
    closer::{Closer, Connection},
    socket,
};
use remoting_turns::{
    message::{self, First, JOIN, Join, Refused, Word},
    page::{Account, Grant, Mode, Page, claim, sight},
    presence::Presence,
};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::{Expected, Moment, Slice, scheduler};

/// Why a connection is closed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The peer has closed the connection.
    #[error("the worker has ended")]
    Ended,
    /// The first message is invalid.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// No process handle came with it.
    #[error("the pool sent no handle of the worker's process")]
    Process,
    /// An unknown byte.
    #[error("the worker said {0:#04x}, which means nothing")]
    Word(u8),
    /// A system call failed.
    #[error("the connection failed")]
    System(#[from] io::Error),
}

/// A worker's process, as introduced by the pool and not by the worker.
#[derive(Debug)]
pub struct Process {
    handle: OwnedFd,
    /// Its PID when it was introduced; 0 if it is in a namespace that is not visible here.
    pid: u32,
}

impl Process {
    fn new(handle: OwnedFd) -> Result<Self, Error> {
        let pid = Self::pid(&handle).ok_or(Error::Process)?;
        Ok(Self { handle, pid })
    }

    /// The PID of the process while it exists; `None` also if the descriptor is not a process
    /// handle.
    fn pid(handle: &OwnedFd) -> Option<u32> {
        let path = format!("/proc/self/fdinfo/{}", handle.as_raw_fd());
        let info = fs::read_to_string(path).ok()?;
        let pid = info.lines().find_map(|line| line.strip_prefix("Pid:"))?;
        pid.trim().parse().ok()
    }

    /// Whether both are the same process. The PID of a process that has ended may have been reused,
    /// so it is looked up again.
    pub fn is(&self, other: &Self) -> bool {
        self.pid != 0 && self.pid == other.pid && Self::pid(&self.handle) == Some(self.pid)
    }
}

/// A connection whose first message is incomplete.
#[derive(Debug)]
pub struct Newcomer {
    stream: Connection,
    since: Moment,
    process: Option<Process>,
    bytes: Vec<u8>,
}

impl Newcomer {
    /// Creates a new connection. Closing descriptors that a worker has sent may hang, so `closer`
    /// closes the connection.
    pub fn new(stream: UnixStream, closer: &Closer) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream: Connection::new(stream, closer),
            since: Moment::now(),
            process: None,
            bytes: Vec::new(),
        })
    }

    /// The descriptor to poll for input.
    pub fn fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    /// When the connection was accepted.
    pub fn since(&self) -> Moment {
        self.since
    }

    /// The worker's process, once the pool has introduced it.
    pub fn process(&self) -> Option<&Process> {
        self.process.as_ref()
    }

    /// Describes whose connection this is, for log messages: the pool's user until it has sent a
    /// client name.
    pub fn whose(&self) -> String {
        let name = self.bytes.as_slice().try_into().ok();
        let name = name.and_then(|bytes| Join::from_bytes(bytes).ok());
        match (name, socket::user(&*self.stream)) {
            (Some(join), _) => join.name,
            (None, Ok(user)) => format!("user {user}"),
            (None, Err(_)) => "an unknown user".to_owned(),
        }
    }

    /// Reads what has arrived. Returns whether the message is complete.
    pub fn read(&mut self) -> Result<bool, Error> {
        if self.process.is_none() {
            let (got, file) = self
                .stream
                .recv_with_fd(&mut [0])
                .map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
            if got == 0 {
                return Err(Error::Ended);
            }
            // From here on, the worker is the sender.
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
                    // This lets it report both versions. There is room for all of it, since nothing
                    // has been written before.
                    let _ = (&*self.stream).write_all(&message::hello());
                })?;
                Ok(got == room)
            }
        }
    }

    /// Its message, once that is complete.
    ///
    /// # Errors
    /// It is not complete, or invalid.
    pub fn first(&self) -> Result<First, Error> {
        let bytes: &[u8; JOIN] = self.bytes.as_slice().try_into().map_err(|_| Error::Ended)?;
        Ok(First::from_bytes(bytes)?)
    }

    /// The connection, for a peer other than a worker.
    pub fn into_stream(self) -> Connection {
        self.stream
    }

    /// Makes a worker of it, and sends it its pages.
    ///
    /// # Errors
    /// Nobody has introduced its process, or the pages cannot be made or sent.
    pub fn into_worker(self) -> Result<Worker, Error> {
        let (grant, grant_file) = Page::<Grant>::create()?;
        let (account, account_file) = Page::<Account>::create()?;
        // The worker may only read its grants.
        let readable = File::open(format!("/proc/self/fd/{}", grant_file.as_raw_fd()))?;
        for file in [&readable, &account_file] {
            self.stream
                .send_with_fd([0u8].as_slice(), file.as_raw_fd())
                .map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
        }
        Ok(Worker {
            stream: self.stream,
            process: self.process.ok_or(Error::Process)?,
            grant,
            account,
        })
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
    /// The descriptor to poll for words.
    pub fn fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    /// Its process.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// The descriptor to poll for the end of the process.
    pub fn end(&self) -> RawFd {
        self.process.handle.as_raw_fd()
    }

    /// Returns the next word, if one has arrived.
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

    /// Gives the device to the worker.
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
        // If a worker does not read, its buffer is full, and it need not be woken.
        let _ = Word::say(Word::Want, &*self.stream);
    }

    /// Extends the worker's turn.
    pub fn prolong(&self, by: Duration) {
        let by = u64::try_from(by.as_nanos()).unwrap_or(u64::MAX);
        self.grant.slice.fetch_add(by, Ordering::Relaxed);
    }

    /// Tells the worker that its turn is over: by a word that a GPU may read by itself, and by a
    /// byte that wakes the worker.
    pub fn stop(&self) {
        let turn = self.grant.turn.load(Ordering::Relaxed);
        // The lower half of the turn number.
        self.grant.stop.store(turn as u32, Ordering::Release);
        // As in `give`.
        let _ = Word::say(Word::Again, &*self.stream);
    }

    /// Tells the worker whether others wait.
    pub fn set_contended(&self, contended: bool) {
        self.grant
            .contended
            .store(contended.into(), Ordering::SeqCst);
    }

    /// Whether the worker has the device but does not use it.
    pub fn is_idle(&self) -> bool {
        // As in `take`. What was written before the claim is visible, too.
        std::sync::atomic::fence(Ordering::SeqCst);
        self.account.claim.load(Ordering::Acquire) == claim::IDLE
    }

    /// Takes the device away if the worker does not use it.
    pub fn take(&self) -> bool {
        // See `Turns::idle`: either this side sees the other's write, or the other side sees this
        // one's.
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

    /// The account that the worker reports.
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Since when its oldest request has been with the driver, as reported by the worker; `None` if
    /// it has none.
    pub fn running_since(&self) -> Option<Moment> {
        let nanos = self.account.running_since.load(Ordering::Relaxed);
        (nanos != 0).then(|| Moment::from_nanos(nanos))
    }

    /// When the last batch of a worker that does not use the device ended, and when its client is
    /// expected back, as reported by the worker. If the batch claims to end in the future, the
    /// client is not expected at all; otherwise such a pause would never end.
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

    /// Tells the worker how the device is shared from now on. It has no turn then.
    pub fn share(&self, mode: Mode) {
        let grant = &self.grant;
        self.account.claim.store(claim::NONE, Ordering::SeqCst);
        grant.contended.store(0, Ordering::Relaxed);
        grant.stopped_until.store(0, Ordering::Relaxed);
        grant.mode.store(mode.0, Ordering::Release);
        self.wake();
    }

    /// How the worker was told that the device is shared.
    pub fn mode(&self) -> Mode {
        self.grant.mode()
    }

    /// The length of its time slices that it was told; `None` before the first time.
    pub fn time_slice(&self) -> Option<Duration> {
        let micros = self.grant.time_slice.load(Ordering::Relaxed);
        (micros != 0).then(|| Duration::from_micros(micros.into()))
    }

    /// Tells the worker how long its time slices are.
    pub fn set_time_slice(&self, slice: Duration) {
        let micros = u32::try_from(slice.as_micros()).unwrap_or(u32::MAX);
        self.grant.time_slice.store(micros, Ordering::Relaxed);
        self.wake();
    }

    /// Tells the worker the sum of the time slices of the other clients that have work where it has contexts. It is read when
    /// the worker looks for something else.
    pub fn set_round(&self, round: Duration) {
        let micros = u32::try_from(round.as_micros()).unwrap_or(u32::MAX);
        self.grant.round.store(micros, Ordering::Relaxed);
    }

    /// Whether the worker submits its client's requests itself, so that it can take turns.
    pub fn sees_requests(&self) -> bool {
        self.account.sight.load(Ordering::Relaxed) == sight::REQUESTS
    }

    /// Whether the worker takes part in sharing by time slices, as far as it knows.
    pub fn takes_part(&self) -> bool {
        self.account.sight.load(Ordering::Relaxed) != sight::NOTHING
    }

    /// Tells the worker to keep off the device until then, or to go on.
    pub fn stop_until(&self, until: Option<Moment>) {
        let nanos = until.map_or(0, Moment::nanos);
        let before = self.grant.stopped_until.swap(nanos, Ordering::Release);
        if (before == 0) != (nanos == 0) {
            self.wake();
        }
    }

    /// Whether the worker was told to keep off the device.
    pub fn is_told_to_stop(&self) -> bool {
        self.grant.stopped_until.load(Ordering::Relaxed) != 0
    }

    /// Has the worker look at its grant.
    fn wake(&self) {
        // As in `give`.
        let _ = Word::say(Word::Pause, &*self.stream);
    }

    /// For how long it has had work, as reported by the worker.
    pub fn presence(&self) -> Presence {
        let nanos = |value: &AtomicU64| value.load(Ordering::Relaxed);
        let account = &self.account;
        Presence {
            before: Duration::from_nanos(nanos(&account.present)),
            since: Moment::from_nanos(nanos(&account.present_since)),
            until: Moment::from_nanos(nanos(&account.present_until)),
        }
    }

    /// Kills the process.
    pub fn kill(&self) {
        // SAFETY: the only pointer is that to the `siginfo_t`, which is null.
        unsafe {
            libc::syscall(libc::SYS_pidfd_send_signal, self.end(), libc::SIGKILL, 0, 0);
        }
    }
}
