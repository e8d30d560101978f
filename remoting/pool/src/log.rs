//! What workers write to their standard error: the pool passes it on to its own, line by line, with the process that it is
//! from, so that no worker's lines look like the pool's or another worker's. Each client's share of the log is limited, and
//! what all clients of a user have together: a client that connects often, or a user with many, silences no other.
//!
//! Workers do not get the pool's standard error. Where that is a file, a worker that was taken over could truncate and
//! overwrite it, and could make it non-blocking for the pool and all other workers, whose messages would then be lost.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::mpsc::{self, Receiver, Sender},
    thread,
    time::{Duration, Instant},
};

use remoting_transport::socket;

use super::pending::Origin;

/// The longest line in bytes. What is longer is passed on in parts.
const LONGEST: usize = 4096;
/// What a pipe holds in bytes.
const PIPE: usize = 64 << 10;
/// How many bytes a client's workers may write at once, and how many more a second from then on: those that were taken over
/// fill no disk.
const BURST: u64 = 1 << 20;
const RATE: u64 = 4 << 10;
/// How many times as much all clients of a user have together.
const GROUP: u64 = 8;
/// The most clients that are remembered.
const MOST_CLIENTS: usize = 4096;
/// What a line takes beside its text, in bytes.
const LINE: u64 = 64;
/// How long the pool waits at its end for what workers have written, in case its own standard error blocks.
const PATIENCE: Duration = Duration::from_secs(1);

/// What the log's thread is told.
enum Told {
    /// A worker has been started.
    New(Source),
    /// The worker with this process number serves a client.
    Serves(u32, Client),
    /// Reply when everything that has been written so far has been passed on.
    Flush(Sender<()>),
}

/// The log. Its thread ends with it.
#[derive(Debug)]
pub(super) struct Log {
    orders: Sender<Told>,
    /// Wakes the thread.
    wake: UnixStream,
}

impl Log {
    /// Passes lines on to this process's standard error.
    ///
    /// # Errors
    /// There are no descriptors, or no thread can be started.
    pub(super) fn start() -> io::Result<Self> {
        Self::to(|line| base::note!("{line}"))
    }

    /// Passes lines on to `out`.
    fn to(mut out: impl FnMut(&str) + Send + 'static) -> io::Result<Self> {
        let (wake, woken) = UnixStream::pair()?;
        for stream in [&wake, &woken] {
            stream.set_nonblocking(true)?;
        }
        let (orders, told) = mpsc::channel();
        thread::Builder::new()
            .name("log".to_owned())
            .spawn(move || pass_on(&woken, &told, &mut out))?;
        Ok(Self { orders, wake })
    }

    fn tell(&self, told: Told) {
        // The thread lives as long as this, and a full socket wakes it, too.
        let _ = self.orders.send(told);
        let _ = (&self.wake).write(&[0]);
    }

    /// A pipe for a worker's standard error: its end, and ours to [`add`](Self::add).
    ///
    /// # Errors
    /// There are no descriptors.
    pub(super) fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
        let mut both = [0; 2];
        // SAFETY: there is room for two descriptors.
        if unsafe { libc::pipe2(both.as_mut_ptr(), libc::O_CLOEXEC) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: they were just made and have no other owner.
        let [ours, theirs] = both.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        // SAFETY: a plain call.
        if unsafe { libc::fcntl(ours.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((theirs, ours))
    }

    /// Passes on what a new worker with this process number writes.
    pub(super) fn add(&self, ours: OwnedFd, process: u32) {
        self.tell(Told::New(Source {
            pipe: ours.into(),
            process,
            begun: Vec::new(),
            client: Client::Nobody(process),
        }));
    }

    /// What the worker with this process number writes from now on is its client's.
    pub(super) fn serves(&self, process: u32, client: Client) {
        self.tell(Told::Serves(process, client));
    }

    /// Waits until what has been written so far has been passed on.
    pub(super) fn flush(&self) {
        let (reply, replied) = mpsc::channel();
        self.tell(Told::Flush(reply));
        let _ = replied.recv_timeout(PATIENCE);
    }
}

/// Whose lines a worker writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Client {
    /// Nobody's yet: the worker's own, by its process.
    Nobody(u32),
    /// A process of this machine: an application, or a VM with all of its applications.
    Here {
        /// Its user.
        user: u32,
        /// Its process id.
        process: i32,
    },
    /// Whoever is at this address, or in this network.
    There(Origin),
    /// A client of which the system tells nothing.
    Unknown,
}

/// Who has a share together, of which each client's is a part. None can silence another by having many clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Group {
    Pool,
    User(u32),
    Origin(Origin),
    Unknown,
}

impl Client {
    /// The client at the other end of a connection, which is a socket of this machine or a stream.
    pub(super) fn of(connection: &impl AsFd, is_local: bool) -> Self {
        let known = match is_local {
            true => socket::user(connection).and_then(|user| {
                let process = socket::process(connection)?;
                Ok(Self::Here { user, process })
            }),
            false => connection
                .as_fd()
                .try_clone_to_owned()
                .and_then(|connection| TcpStream::from(connection).peer_addr())
                .map(|address| Self::There(Origin::of(address.ip()))),
        };
        known.unwrap_or(Self::Unknown)
    }

    fn group(self) -> Group {
        match self {
            Self::Nobody(_) => Group::Pool,
            Self::Here { user, .. } => Group::User(user),
            Self::There(origin) => Group::Origin(origin),
            Self::Unknown => Group::Unknown,
        }
    }
}

/// How much somebody may still write.
#[derive(Debug)]
struct Share {
    left: u64,
    since: Instant,
    /// How many times as much as a client's it is.
    times: u64,
    /// How many lines have been left out since the last one that was not.
    left_out: u64,
}

impl Share {
    fn new(now: Instant, times: u64) -> Self {
        Self {
            left: times * BURST,
            since: now,
            times,
            left_out: 0,
        }
    }

    fn refill(&mut self, now: Instant) {
        let seconds = now.saturating_duration_since(self.since).as_secs();
        if seconds > 0 {
            self.since += Duration::from_secs(seconds);
            let more = seconds.saturating_mul(self.times * RATE);
            self.left = self.left.saturating_add(more).min(self.times * BURST);
        }
    }

    fn is_whole(&self) -> bool {
        self.left == self.times * BURST && self.left_out == 0
    }
}

/// All shares. They outlive workers: who connects again has no new one.
#[derive(Debug, Default)]
struct Shares {
    clients: HashMap<Client, Share>,
    groups: HashMap<Group, Share>,
}

/// What becomes of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// It is passed on, and so many lines of its client before it were not.
    Passed(u64),
    /// It is left out, as the first one.
    LeftOutFirst,
    /// It is left out, as others before it.
    LeftOut,
}

impl Shares {
    /// Decides about a line of so many bytes.
    fn takes(&mut self, client: Client, length: usize, now: Instant) -> Verdict {
        if self.clients.len() >= MOST_CLIENTS && !self.clients.contains_key(&client) {
            self.forget(now);
        }
        let group = client.group();
        let group = (self.groups.entry(group)).or_insert_with(|| Share::new(now, GROUP));
        let own = (self.clients.entry(client)).or_insert_with(|| Share::new(now, 1));
        for share in [&mut *group, &mut *own] {
            share.refill(now);
        }
        let cost = length as u64 + LINE;
        if own.left < cost || group.left < cost {
            own.left_out += 1;
            return match own.left_out {
                // All that a group is told of, it pays.
                1 if group.left >= LINE => {
                    group.left -= LINE;
                    Verdict::LeftOutFirst
                }
                _ => Verdict::LeftOut,
            };
        }
        own.left -= cost;
        group.left -= cost;
        Verdict::Passed(std::mem::take(&mut own.left_out))
    }

    /// Forgets shares that are whole; all if none is, as their groups' remain.
    fn forget(&mut self, now: Instant) {
        let before = self.clients.len();
        self.clients.retain(|_, share| {
            share.refill(now);
            !share.is_whole()
        });
        if self.clients.len() == before {
            self.clients.clear();
        }
    }
}

/// The read end of a worker's standard error.
struct Source {
    pipe: File,
    process: u32,
    client: Client,
    /// The beginning of a line.
    begun: Vec<u8>,
}

impl Source {
    /// Passes on what there is, up to a bound. Whether there may be more later.
    fn pass_on(&mut self, shares: &mut Shares, out: &mut impl FnMut(&str)) -> bool {
        let mut bytes = [0; LONGEST];
        let (count, goes_on) = match self.pipe.read(&mut bytes) {
            Ok(count) => (count, count > 0),
            Err(error) => {
                let temporary = [ErrorKind::WouldBlock, ErrorKind::Interrupted];
                (0, temporary.contains(&error.kind()))
            }
        };
        for piece in bytes[..count].split_inclusive(|byte| *byte == b'\n') {
            self.begun.extend_from_slice(piece);
            if piece.ends_with(b"\n") {
                self.begun.pop();
                self.end_line(shares, out);
            } else if self.begun.len() >= LONGEST {
                self.end_line(shares, out);
            }
        }
        if !goes_on && !self.begun.is_empty() {
            self.end_line(shares, out);
        }
        goes_on
    }

    fn end_line(&mut self, shares: &mut Shares, out: &mut impl FnMut(&str)) {
        let process = self.process;
        match shares.takes(self.client, self.begun.len(), Instant::now()) {
            Verdict::Passed(left_out) => {
                if left_out > 0 {
                    out(&format!("worker {process}: {left_out} lines left out"));
                }
                // A terminal obeys control characters.
                let text = String::from_utf8_lossy(&self.begun);
                let controls = |one: char| one != '\t' && one.is_control();
                let text = text.replace(controls, "\u{fffd}");
                out(&format!("worker {process}: {text}"));
            }
            Verdict::LeftOutFirst => out(&format!(
                "worker {process}: its client's workers write too much: lines are left out from here on"
            )),
            Verdict::LeftOut => {}
        }
        self.begun.clear();
    }
}

/// The log's thread: one bounded read of each worker at a time, so that none keeps others waiting.
fn pass_on(woken: &UnixStream, told: &Receiver<Told>, out: &mut impl FnMut(&str)) {
    let mut sources: Vec<Source> = Vec::new();
    let mut shares = Shares::default();
    loop {
        let pipes = sources.iter().map(|source| source.pipe.as_raw_fd());
        let mut polled: Vec<_> = std::iter::once(woken.as_raw_fd())
            .chain(pipes)
            .map(|fd| libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            })
            .collect();
        if base::poll::poll(&mut polled, None).is_err() {
            // No memory at the moment.
            thread::sleep(PATIENCE);
        }
        let mut entries = polled[1..].iter();
        sources.retain_mut(|source| {
            let is_ready = entries.next().is_some_and(|entry| entry.revents != 0);
            !is_ready || source.pass_on(&mut shares, out)
        });
        // 0 is the end of the pool's side.
        let is_over = matches!((&*woken).read(&mut [0; 64]), Ok(0));
        for order in told.try_iter() {
            match order {
                Told::New(source) => sources.push(source),
                Told::Serves(process, client) => {
                    // The last one, as an earlier process may have had the number.
                    let found = sources.iter_mut().rfind(|one| one.process == process);
                    if let Some(source) = found {
                        source.client = client;
                    }
                }
                Told::Flush(reply) => {
                    for source in &mut sources {
                        for _ in 0..=PIPE / LONGEST {
                            source.pass_on(&mut shares, out);
                        }
                    }
                    let _ = reply.send(());
                }
            }
        }
        if is_over {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A log, and the lines that it passes on.
    fn log() -> (Log, Receiver<String>) {
        let (to, lines) = mpsc::channel();
        let log = Log::to(move |line| to.send(line.to_owned()).expect("the test listens"));
        (log.expect("there are threads and descriptors"), lines)
    }

    /// The standard error of a worker.
    fn worker(log: &Log, process: u32) -> File {
        let (theirs, ours) = Log::pipe().expect("there are descriptors");
        log.add(ours, process);
        theirs.into()
    }

    #[test]
    fn lines_of_workers_are_passed_on_whole() {
        let (log, lines) = log();
        let [mut one, mut other] = [1, 2].map(|process| worker(&log, process));
        one.write_all(b"begun, ").unwrap();
        other.write_all(b"first\nsecond\n").unwrap();
        log.flush();
        one.write_all(b"ended\nthe last").unwrap();
        log.flush();
        drop(one);
        log.flush();
        let said: Vec<_> = lines.try_iter().collect();
        let (first, second) = ("worker 2: first", "worker 2: second");
        let (third, last) = ("worker 1: begun, ended", "worker 1: the last");
        assert_eq!(said, [first, second, third, last]);
        // A long line does not take memory without end.
        let long = vec![b'x'; 3 * LONGEST];
        other.write_all(&long).unwrap();
        drop(other);
        log.flush();
        let said: Vec<_> = lines.try_iter().collect();
        assert_eq!(said.concat().replace("worker 2: ", "").as_bytes(), long);
        assert!(said.iter().all(|line| line.len() < 2 * LONGEST));
    }

    #[test]
    fn what_a_worker_does_to_its_standard_error_concerns_nobody_else() {
        let (log, lines) = log();
        let [mut one, mut other] = [1, 2].map(|process| worker(&log, process));
        assert!(one.set_len(0).is_err());
        // SAFETY: a plain call.
        let set = unsafe { libc::fcntl(one.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        assert_eq!(set, 0);
        // It fills its own, and writes lines without end.
        let writes = thread::spawn(move || {
            for _ in 0..10_000 {
                let _ = one.write(b"again\n");
            }
        });
        // More than a pipe holds.
        let line = [vec![b'y'; LONGEST - 1], vec![b'\n']].concat();
        for _ in 0..32 {
            other.write_all(&line).unwrap();
        }
        writes.join().unwrap();
        drop(other);
        log.flush();
        let is_whole = |said: &String| said.trim_start_matches("worker 2: ").len() == LONGEST - 1;
        assert_eq!(lines.try_iter().filter(is_whole).count(), 32);
    }

    #[test]
    fn no_worker_writes_in_anothers_name_or_to_the_terminal() {
        let (log, lines) = log();
        let mut one = worker(&log, 7);
        one.write_all(b"\x1b[2J\rgantry-accel: all is well\tnow\n")
            .unwrap();
        log.flush();
        let said: Vec<_> = lines.try_iter().collect();
        let plain = "worker 7: \u{fffd}[2J\u{fffd}gantry-accel: all is well\tnow";
        assert_eq!(said, [plain]);
    }

    /// Has a client write lines until one is left out; how many bytes they count.
    fn written(shares: &mut Shares, client: Client, now: Instant) -> u64 {
        let (length, mut count) = (1000, 0);
        while let Verdict::Passed(_) = shares.takes(client, length, now) {
            count += length as u64 + LINE;
        }
        count
    }

    #[test]
    fn a_client_that_writes_without_end_has_a_share_of_the_log() {
        let (start, mut shares) = (Instant::now(), Shares::default());
        let client = Client::Unknown;
        let count = written(&mut shares, client, start);
        assert!(count <= BURST && count > BURST - 2 * LONGEST as u64);
        assert_eq!(shares.takes(client, 1000, start), Verdict::LeftOut);
        // Later, a little, after the number of what was left out.
        let later = start + Duration::from_secs(1);
        assert_eq!(shares.takes(client, 1000, later), Verdict::Passed(2));
        assert_eq!(shares.takes(client, 1000, later), Verdict::Passed(0));
        let later = start + Duration::from_secs(10_000);
        let more = written(&mut shares, client, later);
        assert!(more <= BURST, "{more}");
    }

    #[test]
    fn many_clients_of_a_user_have_no_more_than_its_share_and_silence_nobody_else() {
        let (start, mut shares) = (Instant::now(), Shares::default());
        let of = |user, process| Client::Here { user, process };
        let mut all = 0;
        for process in 0..100 {
            all += written(&mut shares, of(1000, process), start);
        }
        assert!(all <= GROUP * BURST, "{all}");
        // A process that ended and began again is another one.
        assert_eq!(shares.takes(of(1000, 100), 0, start), Verdict::LeftOut);
        for other in [of(0, 1), Client::Nobody(7), Client::Unknown] {
            assert!(written(&mut shares, other, start) > BURST / 2);
        }
        // One of a user's does not silence the user's others.
        let mut shares = Shares::default();
        written(&mut shares, of(0, 1), start);
        assert!(written(&mut shares, of(0, 2), start) > BURST / 2);
    }

    #[test]
    fn clients_that_are_forgotten_have_their_groups_share() {
        let (start, mut shares) = (Instant::now(), Shares::default());
        let here = |process: u32| Client::Here {
            user: 7,
            process: process.cast_signed(),
        };
        let mut all = 0;
        for number in 0..3 * MOST_CLIENTS as u32 {
            if let Verdict::Passed(_) = shares.takes(here(number), 4000, start) {
                all += 4000 + LINE;
            }
            assert!(shares.clients.len() <= MOST_CLIENTS);
        }
        assert!(all <= GROUP * BURST, "{all}");
    }

    #[test]
    fn a_client_is_known_by_its_process_or_its_address() {
        let (unix, _peer) = UnixStream::pair().unwrap();
        let known = Client::of(&unix, true);
        assert!(
            matches!(known, Client::Here { process, .. } if process > 0),
            "{known:?}"
        );
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let known = Client::of(&tcp, false);
        assert_eq!(known, Client::There(Origin::of([127, 0, 0, 1].into())));
        let site = |last: u16| Origin::of([0x2001, 0xdb8, 0, 1, 0, 0, 0, last].into());
        assert_eq!(site(1), site(2));
    }

    #[test]
    fn workers_of_one_client_share_what_it_may_write() {
        let (log, lines) = log();
        let client = Client::Here {
            user: 1000,
            process: 1,
        };
        let line = [vec![b'y'; LONGEST - 1], vec![b'\n']].concat();
        for process in 0..4 {
            let mut one = worker(&log, process);
            log.serves(process, client);
            for _ in 0..128 {
                one.write_all(&line).unwrap();
            }
            drop(one);
            log.flush();
        }
        let said: Vec<_> = lines.try_iter().collect();
        let whole = said.iter().filter(|line| line.len() > LONGEST - 1).count();
        assert!((200..=256).contains(&whole), "{whole}");
        let left_out = said.iter().filter(|line| line.contains("too much")).count();
        assert_eq!(left_out, 1);
    }
}
