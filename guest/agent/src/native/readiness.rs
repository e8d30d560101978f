//! Waiting for many descriptors (`epoll(7)`).

use std::{
    io,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    time::Duration,
};

/// What a descriptor is waited for as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The socket that programs connect to.
    Listener,
    /// Another thread of this process.
    Wake,
    /// The port's interrupt.
    Interrupt,
    /// The kernel's events of devices.
    Removals,
    /// A program's connection.
    Program(u32),
    /// The last copy of a program's device file.
    File(u32),
    /// The end of a program's process.
    Process(u32),
    /// The end of the program that suspends and resumes others.
    Checkpointer,
}

impl Source {
    fn to_word(self) -> u64 {
        let (kind, number) = match self {
            Self::Listener => (0, 0),
            Self::Wake => (1, 0),
            Self::Interrupt => (2, 0),
            Self::Removals => (3, 0),
            Self::Program(number) => (4, number),
            Self::File(number) => (5, number),
            Self::Process(number) => (6, number),
            Self::Checkpointer => (7, 0),
        };
        u64::from(number) | kind << 32
    }

    fn from_word(word: u64) -> Self {
        // The number was put into the low half.
        let number = word as u32;
        match word >> 32 {
            0 => Self::Listener,
            1 => Self::Wake,
            2 => Self::Interrupt,
            3 => Self::Removals,
            4 => Self::Program(number),
            5 => Self::File(number),
            6 => Self::Process(number),
            _ => Self::Checkpointer,
        }
    }
}

/// What to wait for besides hang-ups, which are always reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interest {
    /// Something to read.
    pub read: bool,
    /// Room to write.
    pub write: bool,
}

/// Something to read.
pub const READ: Interest = Interest {
    read: true,
    write: false,
};

/// The descriptors to wait for.
pub struct Readiness(OwnedFd);

/// Descriptors reported at a time.
const MOST: usize = 64;

impl Readiness {
    /// Nothing to wait for.
    pub fn new() -> io::Result<Self> {
        // SAFETY: a call without pointers.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor without another owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    fn control(
        &self,
        what: libc::c_int,
        file: impl AsFd,
        interest: Interest,
        source: Source,
    ) -> io::Result<()> {
        let mut events = 0;
        if interest.read {
            events |= libc::EPOLLIN;
        }
        if interest.write {
            events |= libc::EPOLLOUT;
        }
        let mut event = libc::epoll_event {
            events: events.cast_unsigned(),
            u64: source.to_word(),
        };
        let file = file.as_fd().as_raw_fd();
        // SAFETY: the kernel reads one entry, which outlives the call.
        match unsafe { libc::epoll_ctl(self.0.as_raw_fd(), what, file, &raw mut event) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Waits for a descriptor from now on.
    pub fn add(&self, file: impl AsFd, interest: Interest, source: Source) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, file, interest, source)
    }

    /// Changes what a descriptor is waited for.
    pub fn change(&self, file: impl AsFd, interest: Interest, source: Source) {
        // It was added, and no memory is needed.
        let _ = self.control(libc::EPOLL_CTL_MOD, file, interest, source);
    }

    /// Does not wait for a descriptor any longer.
    pub fn remove(&self, file: impl AsFd) {
        // One that was never added is not there.
        let _ = self.control(libc::EPOLL_CTL_DEL, file, Interest::default(), Source::Wake);
    }

    /// Waits until some are ready, or until the time is over.
    pub fn wait(&self, patience: Option<Duration>) -> io::Result<Vec<Source>> {
        let milliseconds = patience.map_or(-1, |patience| {
            libc::c_int::try_from(patience.as_micros().div_ceil(1000)).unwrap_or(libc::c_int::MAX)
        });
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; MOST];
        // SAFETY: the kernel fills at most as many entries as there are.
        let count = unsafe {
            libc::epoll_wait(
                self.0.as_raw_fd(),
                events.as_mut_ptr(),
                MOST as libc::c_int,
                milliseconds,
            )
        };
        let Ok(count) = usize::try_from(count) else {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::Interrupted => Ok(Vec::new()),
                _ => Err(error),
            };
        };
        let ready = events[..count].iter();
        Ok(ready.map(|event| Source::from_word(event.u64)).collect())
    }
}
