//! A server's process.

use std::{
    ptr::{NonNull, with_exposed_provenance_mut},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

use super::{
    Error, Handler, SHARED, WINDOW,
    place::{Port, Window},
    slow_page,
};
use crate::{
    port::{
        Command, Reason, Role, SLOW_ASKED, SLOW_BEGUN, SLOW_BYTES, SLOW_DONE, State,
        registers as at,
    },
    window::{self, PAGE, Table},
};

/// The maximum number of retries with a machine that is not ready, and the interval between them.
const TRIES: u32 = 2000;
const NAP: Duration = Duration::from_millis(1);

/// Why a server no longer serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The client has left, or has ended.
    ClientGone,
    /// The VM was resumed by its owner.
    Resumed,
    /// A client did something irreversible in the server's kernel: the VM should be rebooted.
    Lost,
}

/// The size of shared memory in bytes while the server's own vCPU runs, which does not see the
/// table.
static AWAKE_SHARED: AtomicU64 = AtomicU64::new(0);

/// A process that serves one client at a time. Its VM is frozen while it does.
#[derive(Debug)]
pub struct Server {
    port: Port,
    _window: Window,
}

impl Server {
    /// Registers handlers. A handler's index is its position. Locks all memory of the process,
    /// since nobody handles page faults of handlers if the server's kernel is not in the view.
    ///
    /// # Errors
    /// This VM has no port for a server, its host lacks something, `/dev/mem` cannot be mapped, or
    /// there are no handlers or more than [`window::HANDLERS`].
    pub fn register(handlers: &[Handler]) -> Result<Self, Error> {
        if handlers.is_empty() || handlers.len() > window::HANDLERS {
            return Err(Error::Refused {
                reason: Reason::Invalid,
                number: 0,
            });
        }
        let port = Port::find(Role::Server)?;
        let window = port.map_window(window::SHARED_PAGES)?;
        // SAFETY: no preconditions. Memory that cannot be locked is found when it is used.
        unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) };
        port.write_wide(at::WINDOW, WINDOW);
        port.write(at::COUNT, handlers.len() as u32);
        for (offset, handler) in (at::HANDLERS..).step_by(8).zip(handlers) {
            port.write_wide(offset, *handler as usize as u64);
        }
        Ok(Self {
            port,
            _window: window,
        })
    }

    /// Serves a client until it ends. The VM is frozen, except during `slow`, which is called for a
    /// handler that returned [`slow`](super::slow), with the same arguments, or with others if the
    /// client is hostile.
    ///
    /// # Errors
    /// The module refused.
    pub fn serve(&mut self, mut slow: impl FnMut(u64, u64) -> u64) -> Result<Ended, Error> {
        let mut tries = 0;
        loop {
            // The vCPU stops here.
            self.port.command(Command::Freeze);
            match self.port.state() {
                Some(State::Awake) => {
                    tries = 0;
                    self.work(&mut slow);
                }
                // The machine is about to reopen the module's device.
                Some(State::Failed)
                    if tries < TRIES && self.port.read(at::ERROR) == libc::EAGAIN as u32 =>
                {
                    tries += 1;
                    thread::sleep(NAP);
                }
                Some(State::Ended) => {
                    return Ok(match self.port.reason() {
                        Reason::Resumed => Ended::Resumed,
                        Reason::Lost => Ended::Lost,
                        _ => Ended::ClientGone,
                    });
                }
                _ => return Err(self.port.refusal()),
            }
        }
    }

    fn work(&self, slow: &mut impl FnMut(u64, u64) -> u64) {
        let pages = u64::from(self.port.read(at::SHARED));
        // The client has just gone.
        if pages == 0 {
            return;
        }
        AWAKE_SHARED.store(pages * PAGE, Ordering::Relaxed);
        let page = slow_page();
        // SAFETY: the machine has put the client's memory there. It may change at any time, and is
        // accessed by single words.
        unsafe {
            if (&raw const (*page).state).read_volatile() == SLOW_ASKED {
                (&raw mut (*page).state).write_volatile(SLOW_BEGUN);
                let first = (&raw const (*page).first).read_volatile();
                let second = (&raw const (*page).second).read_volatile();
                let answer = slow(first, second);
                (&raw mut (*page).answer).write_volatile(answer);
                (&raw mut (*page).state).write_volatile(SLOW_DONE);
            }
        }
        AWAKE_SHARED.store(0, Ordering::Relaxed);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.port.command(Command::Stop);
    }
}

/// In a handler: `return slow(first, second)` has the closure of [`Server::serve`] called on the
/// server's own vCPU. The client gets its result.
pub fn slow(first: u64, second: u64) -> u64 {
    let page = slow_page();
    // SAFETY: memory of the view in which this handler runs, accessed by single words.
    unsafe {
        (&raw mut (*page).first).write_volatile(first);
        (&raw mut (*page).second).write_volatile(second);
        (&raw mut (*page).state).write_volatile(SLOW_ASKED);
    }
    0
}

pub fn shared() -> NonNull<[u8]> {
    let bytes = match AWAKE_SHARED.load(Ordering::Relaxed) {
        0 => {
            let table = (WINDOW + window::TABLE) as *const Table;
            // SAFETY: the table is in the view in which the caller, a handler, runs.
            unsafe { (&raw const (*table).shared).read_volatile() }
        }
        bytes => bytes,
    };
    let bytes = bytes.saturating_sub(SLOW_BYTES) as usize;
    let start: *mut u8 = with_exposed_provenance_mut(SHARED as usize);
    // SAFETY: not zero.
    NonNull::slice_from_raw_parts(unsafe { NonNull::new_unchecked(start) }, bytes)
}
