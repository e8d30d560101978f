//! What workers write to their standard error: the pool passes it on to its own, line by line.
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
    time::Duration,
};

/// The longest line in bytes. What is longer is passed on in parts.
const LONGEST: usize = 4096;
/// What a pipe holds in bytes.
const PIPE: usize = 64 << 10;
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
        Self::to(|line| crate::note!("{line}"))
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

    /// The standard error of a new worker.
    ///
    /// # Errors
    /// There are no descriptors.
    pub(super) fn add(&self) -> io::Result<OwnedFd> {
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
        self.tell(Told::New(Source {
            pipe: ours.into(),
            begun: Vec::new(),
        }));
        Ok(theirs)
    }

    /// Waits until what has been written so far has been passed on.
    pub(super) fn flush(&self) {
        let (reply, replied) = mpsc::channel();
        self.tell(Told::Flush(reply));
        let _ = replied.recv_timeout(PATIENCE);
    }
}

/// The read end of a worker's standard error.
struct Source {
    pipe: File,
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
        out(&String::from_utf8_lossy(&self.begun));
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A log, and the lines that it passes on.
    fn log() -> (Log, Receiver<String>) {
        let (to, lines) = mpsc::channel();
        let log = Log::to(move |line| to.send(line.to_owned()).expect("the test listens"));
        (log.expect("there are threads and descriptors"), lines)
    }

    #[test]
    fn lines_of_workers_are_passed_on_whole() {
        let (log, lines) = log();
        let [mut one, mut other] = [(); 2].map(|()| File::from(log.add().unwrap()));
        one.write_all(b"begun, ").unwrap();
        other.write_all(b"first\nsecond\n").unwrap();
        log.flush();
        one.write_all(b"ended\nthe last").unwrap();
        log.flush();
        drop(one);
        log.flush();
        let said: Vec<_> = lines.try_iter().collect();
        assert_eq!(said, ["first", "second", "begun, ended", "the last"]);
        // A long line does not take memory without end.
        let long = vec![b'x'; 3 * LONGEST];
        other.write_all(&long).unwrap();
        drop(other);
        log.flush();
        let said: Vec<_> = lines.try_iter().collect();
        assert_eq!(said.concat().as_bytes(), long);
        assert!(said.iter().all(|line| line.len() < 2 * LONGEST));
    }

    #[test]
    fn what_a_worker_does_to_its_standard_error_concerns_nobody_else() {
        let (log, lines) = log();
        let [mut one, mut other] = [(); 2].map(|()| File::from(log.add().unwrap()));
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
        let whole = lines.try_iter().filter(|said| said.starts_with('y'));
        assert_eq!(whole.filter(|said| said.len() == LONGEST - 1).count(), 32);
    }
}
