//! What workers write to their standard error: the pool passes it on to its own, line by line, with the process that it is
//! from, so that no worker's lines look like the pool's or another worker's. Each worker's share of the log is limited.
//!
//! Workers do not get the pool's standard error. Where that is a file, a worker that was taken over could truncate and
//! overwrite it, and could make it non-blocking for the pool and all other workers, whose messages would then be lost.

use std::{
    fs::File,
    io::{self, ErrorKind, Read, Write},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::mpsc::{self, Receiver, Sender},
    thread,
    time::{Duration, Instant},
};

/// The longest line in bytes. What is longer is passed on in parts.
const LONGEST: usize = 4096;
/// What a pipe holds in bytes.
const PIPE: usize = 64 << 10;
/// How many bytes a worker may write at once, and how many more a second from then on: a worker that was taken over fills
/// no disk.
const BURST: u64 = 1 << 20;
const RATE: u64 = 4 << 10;
/// What a line takes beside its text, in bytes.
const LINE: u64 = 64;
/// How long the pool waits at its end for what workers have written, in case its own standard error blocks.
const PATIENCE: Duration = Duration::from_secs(1);

/// What the log's thread is told.
enum Told {
    /// A worker has been started.
    New(Source),
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
            share: Share::new(Instant::now()),
        }));
    }

    /// Waits until what has been written so far has been passed on.
    pub(super) fn flush(&self) {
        let (reply, replied) = mpsc::channel();
        self.tell(Told::Flush(reply));
        let _ = replied.recv_timeout(PATIENCE);
    }
}

/// How much a worker may still write.
struct Share {
    left: u64,
    since: Instant,
    /// How many lines have been left out since the last one that was not.
    left_out: u64,
}

impl Share {
    fn new(now: Instant) -> Self {
        Self {
            left: BURST,
            since: now,
            left_out: 0,
        }
    }

    /// Whether a line of so many bytes is passed on, and how many lines before it were not.
    fn takes(&mut self, length: usize, now: Instant) -> Option<u64> {
        let seconds = now.saturating_duration_since(self.since).as_secs();
        if seconds > 0 {
            self.since += Duration::from_secs(seconds);
            let more = seconds.saturating_mul(RATE);
            self.left = self.left.saturating_add(more).min(BURST);
        }
        match self.left.checked_sub(length as u64 + LINE) {
            Some(left) => {
                self.left = left;
                Some(std::mem::take(&mut self.left_out))
            }
            None => {
                self.left_out += 1;
                None
            }
        }
    }
}

/// The read end of a worker's standard error.
struct Source {
    pipe: File,
    process: u32,
    share: Share,
    /// The beginning of a line.
    begun: Vec<u8>,
}

impl Source {
    /// Passes on what there is, up to a bound. Whether there may be more later.
    fn pass_on(&mut self, out: &mut impl FnMut(&str)) -> bool {
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
                self.end_line(out);
            } else if self.begun.len() >= LONGEST {
                self.end_line(out);
            }
        }
        if !goes_on && !self.begun.is_empty() {
            self.end_line(out);
        }
        goes_on
    }

    fn end_line(&mut self, out: &mut impl FnMut(&str)) {
        let process = self.process;
        match self.share.takes(self.begun.len(), Instant::now()) {
            Some(left_out) => {
                if left_out > 0 {
                    out(&format!("worker {process}: {left_out} lines left out"));
                }
                // A terminal obeys control characters.
                let text = String::from_utf8_lossy(&self.begun);
                let controls = |one: char| one != '\t' && one.is_control();
                let text = text.replace(controls, "\u{fffd}");
                out(&format!("worker {process}: {text}"));
            }
            None if self.share.left_out == 1 => out(&format!(
                "worker {process}: writes too much: lines are left out from here on"
            )),
            None => {}
        }
        self.begun.clear();
    }
}

/// The log's thread: one bounded read of each worker at a time, so that none keeps others waiting.
fn pass_on(woken: &UnixStream, told: &Receiver<Told>, out: &mut impl FnMut(&str)) {
    let mut sources: Vec<Source> = Vec::new();
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
            !is_ready || source.pass_on(out)
        });
        // 0 is the end of the pool's side.
        let is_over = matches!((&*woken).read(&mut [0; 64]), Ok(0));
        for order in told.try_iter() {
            match order {
                Told::New(source) => sources.push(source),
                Told::Flush(reply) => {
                    for source in &mut sources {
                        for _ in 0..=PIPE / LONGEST {
                            source.pass_on(out);
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

    #[test]
    fn a_worker_that_writes_without_end_has_a_share_of_the_log() {
        let start = Instant::now();
        let mut share = Share::new(start);
        let length = 1000;
        let mut count = 0;
        while share.takes(length, start).is_some() {
            count += length as u64 + LINE;
        }
        assert!(count <= BURST && count > BURST - 2 * LONGEST as u64);
        assert_eq!(share.takes(length, start), None);
        // Later, a little, after the number of what was left out.
        let later = start + Duration::from_secs(1);
        assert_eq!(share.takes(length, later), Some(2));
        assert_eq!(share.takes(length, later), Some(0));
        let (mut more, later) = (0, start + Duration::from_secs(10_000));
        while share.takes(length, later).is_some() {
            more += length as u64 + LINE;
        }
        assert!(more <= BURST, "{more}");
    }
}
