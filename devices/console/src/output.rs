//! The guest side of a console's output.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, ErrorKind, Write},
    os::fd::{AsRawFd, RawFd},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
};

use base::Unpoisoned;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Maximum number of output bytes per console that wait for a slow or absent reader. Allocated as
/// needed.
pub const OUTPUT_BACKLOG: usize = 256 * 1024;

/// Maximum size of one write to a target that may block: POSIX guarantees that a pipe accepts this
/// much once it polls as writable, and in practice a terminal does, too.
const CAUTIOUS_WRITE: usize = 256;

/// Destination of the output.
#[derive(Debug)]
pub(super) enum Target {
    /// Output is dropped and not counted.
    Discard,
    /// There is no reader at present; the backlog waits for one.
    Absent,
    /// The reader has closed. Its descriptor stays open until the console thread, which may be
    /// watching it, replaces it.
    Left { _file: File },
    /// A regular file: it takes everything, however long that takes.
    Regular(File),
    /// A descriptor that was made non-blocking.
    Direct(File),
    /// A descriptor that could not be made non-blocking: it is polled before each write.
    Cautious(File),
}

/// Result of a flush.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Flushed {
    /// Nothing is left.
    All,
    /// The target accepts no more at present; its descriptor indicates when it does.
    Blocked(RawFd),
    /// There is no target.
    Absent,
}

struct State {
    target: Target,
    backlog: VecDeque<u8>,
}

struct Shared {
    /// Held by a thread that writes to a regular file, whose storage may not answer: others must not wait for it then.
    state: Mutex<State>,
    /// There may be a backlog, whatever the target is.
    may_wait: bool,
    dropped: AtomicU64,
    /// Written when the backlog becomes non-empty.
    pending: EventFd,
}

/// Writes a console's output without ever blocking. Clones write to the same console.
///
/// `write` accepts all bytes and never fails; the crate's documentation describes what happens to
/// bytes that the host does not accept. Cost per call: one lock and, as long as the host keeps up,
/// one `write` system call.
#[derive(Clone)]
pub struct ConsoleOutput(Arc<Shared>);

impl ConsoleOutput {
    pub(super) fn new(target: Target) -> io::Result<Self> {
        Ok(Self(Arc::new(Shared {
            may_wait: !matches!(target, Target::Discard | Target::Regular(_)),
            state: Mutex::new(State {
                target,
                backlog: VecDeque::new(),
            }),
            dropped: AtomicU64::new(0),
            pending: EventFd::new(EFD_NONBLOCK)?,
        })))
    }

    /// Number of bytes lost so far: evicted from the backlog, or refused by the host (a full disk).
    pub fn dropped(&self) -> u64 {
        self.0.dropped.load(Ordering::Relaxed)
    }

    /// Whether output may have to wait for the host, so that `flush_backlog` must be called.
    pub(super) fn may_wait(&self) -> bool {
        self.0.may_wait
    }

    /// Becomes readable when there is a backlog to flush.
    pub(super) fn pending(&self) -> &EventFd {
        &self.0.pending
    }

    /// Redirects the output; the backlog is written first.
    pub(super) fn set_target(&self, target: Target) {
        self.lock().target = target;
    }

    /// Writes as much of the backlog as the host accepts.
    pub(super) fn flush_backlog(&self) -> Flushed {
        if !self.0.may_wait {
            return Flushed::All;
        }
        let state = &mut *self.lock();
        while !state.backlog.is_empty() {
            match state.target.write(state.backlog.as_slices().0) {
                Outcome::Took(count) => {
                    state.backlog.drain(..count);
                }
                Outcome::Blocked(fd) => return Flushed::Blocked(fd),
                Outcome::Absent => return Flushed::Absent,
                Outcome::Refused => {
                    self.count_dropped(state.backlog.len());
                    state.backlog.clear();
                }
            }
        }
        // A console that has caught up frees the memory.
        state.backlog = VecDeque::new();
        Flushed::All
    }

    fn count_dropped(&self, count: usize) {
        self.0.dropped.fetch_add(count as u64, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock_unpoisoned()
    }
}

impl Write for ConsoleOutput {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let state = &mut *self.lock();
        let mut rest = data;
        // Bytes in the backlog go first.
        while state.backlog.is_empty() && !rest.is_empty() {
            match state.target.write(rest) {
                Outcome::Took(count) => rest = rest.get(count..).unwrap_or_default(),
                Outcome::Blocked(_) | Outcome::Absent if self.0.may_wait => break,
                // Nobody would write it later.
                Outcome::Blocked(_) | Outcome::Absent | Outcome::Refused => {
                    self.count_dropped(rest.len());
                    return Ok(data.len());
                }
            }
        }
        if rest.is_empty() {
            return Ok(data.len());
        }
        if state.backlog.is_empty() {
            // Fails only if the counter is full, in which case it is readable anyway.
            let _ = self.0.pending.write(1);
        }
        let (skip, evict) = overflow(state.backlog.len(), rest.len());
        state.backlog.drain(..evict);
        state.backlog.extend(rest.get(skip..).unwrap_or_default());
        self.count_dropped(skip + evict);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Number of bytes to drop so that a backlog of `len` bytes accepts `new` more, as (new bytes, old
/// bytes).
fn overflow(len: usize, new: usize) -> (usize, usize) {
    let skip = new.saturating_sub(OUTPUT_BACKLOG);
    let evict = (len + new - skip).saturating_sub(OUTPUT_BACKLOG);
    (skip, evict)
}

enum Outcome {
    Took(usize),
    Blocked(RawFd),
    Absent,
    Refused,
}

impl Target {
    fn write(&mut self, data: &[u8]) -> Outcome {
        let (file, data) = match self {
            Self::Discard => return Outcome::Took(data.len()),
            Self::Absent | Self::Left { .. } => return Outcome::Absent,
            Self::Regular(file) | Self::Direct(file) => (file, data),
            Self::Cautious(file) => {
                if !writable(file.as_raw_fd(), 0) {
                    return Outcome::Blocked(file.as_raw_fd());
                }
                (file, &data[..data.len().min(CAUTIOUS_WRITE)])
            }
        };
        loop {
            match file.write(data) {
                Ok(0) => return Outcome::Refused,
                Ok(count) => return Outcome::Took(count),
                Err(error) => match error.kind() {
                    ErrorKind::Interrupted => {}
                    ErrorKind::WouldBlock => return Outcome::Blocked(file.as_raw_fd()),
                    ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
                        self.leave();
                        return Outcome::Absent;
                    }
                    _ => return Outcome::Refused,
                },
            }
        }
    }
}

impl Target {
    fn leave(&mut self) {
        *self = match std::mem::replace(self, Self::Absent) {
            Self::Direct(file) | Self::Cautious(file) => Self::Left { _file: file },
            other => other,
        };
    }
}

/// Waits up to `timeout_ms` until `fd` accepts output. Also true if it has an error, which the next
/// write will report.
pub(super) fn writable(fd: RawFd, timeout_ms: i32) -> bool {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLOUT,
        revents: 0,
    };
    // SAFETY: `poll` is one valid pollfd for the duration of the call.
    (unsafe { libc::poll(&mut poll, 1, timeout_ms) }) > 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::{
        io::Read,
        os::{fd::OwnedFd, unix::net::UnixStream},
    };

    fn socket() -> (ConsoleOutput, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let target = Target::Direct(File::from(OwnedFd::from(ours)));
        (ConsoleOutput::new(target).unwrap(), theirs)
    }

    #[test]
    fn nobody_waits_for_a_write_to_a_file() {
        let file = tempfile::tempfile().unwrap();
        let output = ConsoleOutput::new(Target::Regular(file)).unwrap();
        let others = output.clone();
        let (sender, done) = std::sync::mpsc::channel();
        // As a thread does whose write the file's storage does not answer.
        let _writes = output.lock();
        std::thread::spawn(move || sender.send((others.may_wait(), others.flush_backlog())));
        let done = done.recv_timeout(std::time::Duration::from_secs(20));
        assert_eq!(done, Ok((false, Flushed::All)));
    }

    #[test]
    fn a_stalled_reader_blocks_nobody_and_gets_the_newest_bytes_later() {
        let (mut output, mut reader) = socket();
        let total = 4 * OUTPUT_BACKLOG;
        let bytes: Vec<u8> = (0..total).map(|n| (n / 7) as u8).collect();
        for chunk in bytes.chunks(1000) {
            output.write_all(chunk).unwrap();
        }
        assert!(output.pending().read().is_ok());
        assert!(matches!(output.flush_backlog(), Flushed::Blocked(_)));

        let mut seen = Vec::new();
        let mut buffer = [0; 65536];
        while output.flush_backlog() != Flushed::All {
            let count = reader.read(&mut buffer).unwrap();
            seen.extend_from_slice(&buffer[..count]);
        }
        let dropped = usize::try_from(output.dropped()).unwrap();
        assert!(dropped > 0);
        while seen.len() < total - dropped {
            let count = reader.read(&mut buffer).unwrap();
            seen.extend_from_slice(&buffer[..count]);
        }
        assert_eq!(
            seen[seen.len() - OUTPUT_BACKLOG..],
            bytes[total - OUTPUT_BACKLOG..]
        );
    }

    #[test]
    fn a_reader_that_left_is_forgotten_and_the_next_one_gets_what_was_not_sent() {
        let (mut output, reader) = socket();
        drop(reader);
        output.write_all(b"hello").unwrap();
        assert_eq!(output.flush_backlog(), Flushed::Absent);
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        output.set_target(Target::Direct(File::from(OwnedFd::from(ours))));
        assert_eq!(output.flush_backlog(), Flushed::All);
        let mut seen = [0; 5];
        theirs.read_exact(&mut seen).unwrap();
        assert_eq!(&seen, b"hello");
        assert_eq!(output.dropped(), 0);
    }

    #[test]
    fn a_full_disk_counts_and_does_not_fail() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut output = ConsoleOutput::new(Target::Direct(full)).unwrap();
        output.write_all(b"hello").unwrap();
        assert_eq!(output.dropped(), 5);
        assert!(output.pending().read().is_err());
    }

    #[test]
    fn a_cautious_target_is_not_written_while_it_is_full() {
        let (mut output, mut reader) = {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let target = Target::Cautious(File::from(OwnedFd::from(ours)));
            (ConsoleOutput::new(target).unwrap(), theirs)
        };
        output.write_all(&[1; 1000]).unwrap();
        let mut seen = [0; 1000];
        reader.read_exact(&mut seen).unwrap();
        assert_eq!(seen, [1; 1000]);
        // Would hang here if it blocked.
        output.write_all(&[2; OUTPUT_BACKLOG]).unwrap();
        output.write_all(&[2; OUTPUT_BACKLOG]).unwrap();
        assert!(output.dropped() > 0 || output.flush_backlog() == Flushed::All);
    }

    proptest! {
        #[test]
        fn the_backlog_never_exceeds_its_bound_and_loses_no_more_than_it_must(
            len in 0..=OUTPUT_BACKLOG, new in 0..3 * OUTPUT_BACKLOG
        ) {
            let (skip, evict) = overflow(len, new);
            prop_assert!(skip <= new && evict <= len);
            let kept = len - evict + new - skip;
            prop_assert_eq!(kept, (len + new).min(OUTPUT_BACKLOG));
        }
    }
}
