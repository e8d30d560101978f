//! Signals that end the VMM, and the terminal's. A thread of their own reads them, which nothing keeps from it: the
//! control thread may be waiting for storage.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    sync::mpsc,
    thread,
};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::last_resort::{self, LastResort};

/// Signals that are handled: three that end the VMM in an orderly way, and one that reports a new terminal size.
const SIGNALS: [libc::c_int; 4] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGWINCH];

/// A signal that was received.
pub(super) enum Signal {
    /// The terminal has another size.
    Window,
    /// The VMM is to end.
    End {
        /// Number of the signal.
        number: u32,
        /// The process that sent it.
        from: u32,
    },
}

/// Passes on the signals that the process receives.
pub(super) struct Signals {
    received: mpsc::Receiver<Signal>,
    wake: EventFd,
}

impl Signals {
    /// None: those of the process are not read.
    pub(super) fn none() -> io::Result<Self> {
        Ok(Self {
            received: mpsc::channel().1,
            wake: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
        })
    }

    /// Starts the thread. The signals must be blocked on all threads ([`super::block_signals`]).
    pub(super) fn start() -> io::Result<Self> {
        let descriptor = descriptor()?;
        let wake = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let (sender, received) = mpsc::channel();
        let waker = wake.try_clone()?;
        thread::Builder::new()
            .name("_signals".to_owned())
            .spawn(move || {
                let mut end = None;
                loop {
                    let signal = match read(&descriptor) {
                        Ok(signal) => signal,
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                        Err(error) => return log::error!("cannot read signals: {error}"),
                    };
                    // From now on the process ends, even if the control thread waits for storage.
                    if matches!(signal, Signal::End { .. }) && end.is_none() {
                        end = LastResort::start(last_resort::PATIENCE, last_resort::leave)
                            .inspect_err(|error| log::warn!("the end may take long: {error}"))
                            .ok();
                    }
                    // Without a receiver, the process is ending.
                    if sender.send(signal).is_err() || waker.write(1).is_err() {
                        thread::park();
                    }
                }
            })?;
        Ok(Self { received, wake })
    }

    /// Readable when there are signals.
    pub(super) fn fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }

    /// The next signal.
    pub(super) fn next(&self) -> Option<Signal> {
        // Empty if the wake-up was for a signal that was taken before.
        let _ = self.wake.read();
        self.received.try_recv().ok()
    }
}

fn read(descriptor: &OwnedFd) -> io::Result<Signal> {
    // SAFETY: all zeroes are a valid value of this plain struct.
    let mut info: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
    let size = size_of_val(&info);
    // SAFETY: the buffer is the struct, and has its size.
    let read = unsafe { libc::read(descriptor.as_raw_fd(), (&raw mut info).cast(), size) };
    match usize::try_from(read) {
        Err(_) => Err(io::Error::last_os_error()),
        Ok(read) if read < size => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(_) if info.ssi_signo == libc::SIGWINCH as u32 => Ok(Signal::Window),
        Ok(_) => Ok(Signal::End {
            number: info.ssi_signo,
            from: info.ssi_pid,
        }),
    }
}

fn set() -> libc::sigset_t {
    // SAFETY: all zeroes are a valid value, and the calls below only fill it in.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in SIGNALS {
            libc::sigaddset(&raw mut set, signal);
        }
        set
    }
}

/// Blocks these signals in the calling thread and all threads that it starts, so that they neither end the VMM abruptly
/// nor get lost: [`super::run`] receives them. Call it first in `main`.
pub fn block_signals() -> io::Result<()> {
    let set = set();
    // SAFETY: the set outlives the call.
    let result =
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(result))
    }
}

fn descriptor() -> io::Result<OwnedFd> {
    let set = set();
    // SAFETY: the set outlives the call.
    let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: created just now, so it has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
