//! A client's process.

use std::{
    fs::File,
    hint, mem,
    ptr::{NonNull, with_exposed_provenance_mut},
    thread,
    time::{Duration, Instant},
};

use super::{
    Error, SHARED, WINDOW, failed, features,
    place::{Port, Window, open_memory},
    slow_page,
};
use crate::{
    client::{Client as Gate, Failure},
    port::{
        Command, Reason, Role, SLOW_ASKED, SLOW_BYTES, SLOW_DONE, SLOW_NOTHING, State,
        registers as at,
    },
    window::{self, PAGE},
};

/// How long a client waits for the server's machine, and for a previous client to be gone.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long to poll for an answer to slow work before sleeping.
const POLLING: Duration = Duration::from_micros(50);
/// The minimum and maximum sleep after that.
const NAPS: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(1)];
/// The interval at which the doorbell is rung while there is no answer: a busy server misses it.
const AGAIN: Duration = Duration::from_millis(50);

/// A process that is paired with a server. Threads that use it must run on the vCPU on which it was
/// paired, where VMFUNC is armed. The pairing thread is pinned to it, and so are threads that it
/// starts.
#[derive(Debug)]
pub struct Client {
    port: Port,
    gate: Gate,
    kernel: bool,
    _window: Window,
}

// SAFETY: the window belongs to the process. A delegation on a vCPU other than the window's ends
// the process with an invalid instruction, and has no other effect.
unsafe impl Send for Client {}

impl Client {
    /// Pairs this process with the server of its VM's port.
    ///
    /// # Errors
    /// See [`Error`]. If handlers cannot make system calls, it is paired nevertheless.
    pub fn pair() -> Result<Self, Error> {
        Self::pair_if(false)
    }

    /// Pairs this process only if handlers can then make system calls.
    ///
    /// # Errors
    /// See [`Error`]. With [`Reason::NoKernel`], another process may succeed: the page table of
    /// this one is where the server's kernel has memory.
    pub fn pair_with_kernel() -> Result<Self, Error> {
        Self::pair_if(true)
    }

    fn pair_if(kernel: bool) -> Result<Self, Error> {
        let port = Port::find(Role::Client)?;
        stay_here()?;
        let shared = port.read(at::SHARED);
        let window = port.map_window(u64::from(shared))?;
        let start = Instant::now();
        connect(&port, start)?;
        port.write_wide(at::WINDOW, WINDOW);
        port.write(at::FEATURES, features() as u32);
        port.write(at::NEEDS_KERNEL, u32::from(kernel));
        loop {
            port.command(Command::Pair);
            match port.state() {
                Some(State::Paired) => break,
                // The previous process is being removed in the background.
                _ if port.read(at::ERROR) == libc::EBUSY as u32 && start.elapsed() < PATIENCE => {
                    thread::sleep(NAPS[1]);
                }
                _ => return Err(port.refusal()),
            }
        }
        // SAFETY: not zero.
        let at = unsafe { NonNull::new_unchecked(with_exposed_provenance_mut(WINDOW as usize)) };
        // SAFETY: the machine has just put the pages there, where they stay until this is dropped.
        let gate = unsafe { Gate::at(at, shared as usize * PAGE as usize) };
        Ok(Self {
            kernel: port.read(at::KERNEL) != 0,
            port,
            gate,
            _window: window,
        })
    }

    /// Whether handlers can make system calls.
    #[must_use]
    pub fn has_kernel(&self) -> bool {
        self.kernel
    }

    /// Executes a handler in the server, on this vCPU, without an exit. Also executes slow work, if
    /// the handler asks for it.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn delegate(&self, handler: usize, first: u64, second: u64) -> Result<u64, Failure> {
        let value = match self.gate.delegate(handler as u64, first, second) {
            Err(Failure::Awake) => self.delegate_later(handler as u64, first, second)?,
            other => other?,
        };
        if self.slow_state() == SLOW_ASKED {
            return self.wait_for_slow();
        }
        Ok(value)
    }

    /// The memory that both sides read and write, at the same address. The server may change it at
    /// any time: read each value once, then check it.
    #[must_use]
    pub fn shared(&self) -> NonNull<[u8]> {
        let bytes = self.gate.shared().len() - SLOW_BYTES as usize;
        // SAFETY: not zero.
        let start = unsafe { NonNull::new_unchecked(with_exposed_provenance_mut(SHARED as usize)) };
        NonNull::slice_from_raw_parts(start, bytes)
    }

    /// The file that contains the [shared](Self::shared) memory, and the offset at which it begins,
    /// for another mapping of it.
    ///
    /// # Errors
    /// See [`Error::Guest`] and [`Error::Sysfs`].
    pub fn memory(&self) -> Result<(File, u64), Error> {
        let start = self.port.window_address()? + window::SHARED + SLOW_BYTES;
        Ok((open_memory()?, start))
    }

    /// The number of VM exits of this vCPU in the server so far, modulo 2^32. The host's interrupts
    /// are not counted.
    #[must_use]
    pub fn exits(&self) -> u32 {
        self.port.read(at::EXITS)
    }

    /// Delegates while the server's vCPU still runs, after slow work for another thread.
    #[cold]
    fn delegate_later(&self, handler: u64, first: u64, second: u64) -> Result<u64, Failure> {
        let start = Instant::now();
        loop {
            nap(start);
            match self.gate.delegate(handler, first, second) {
                Err(Failure::Awake) if start.elapsed() < PATIENCE => {}
                other => return other,
            }
        }
    }

    /// Wakes the server and waits until it has done the work.
    #[cold]
    fn wait_for_slow(&self) -> Result<u64, Failure> {
        let start = Instant::now();
        let mut rung: Option<Instant> = None;
        loop {
            match self.slow_state() {
                SLOW_DONE => {
                    let page = slow_page();
                    // SAFETY: the pair's shared memory, accessed by single words.
                    unsafe {
                        let answer = (&raw const (*page).answer).read_volatile();
                        (&raw mut (*page).state).write_volatile(SLOW_NOTHING);
                        return Ok(answer);
                    }
                }
                SLOW_ASKED if rung.is_none_or(|rung| rung.elapsed() > AGAIN) => {
                    if rung.is_some() && self.port.state() != Some(State::Paired) {
                        return Err(Failure::ServerGone);
                    }
                    rung = Some(Instant::now());
                    self.port.write(at::DOORBELL, 1);
                }
                _ => {}
            }
            if rung.is_some_and(|rung| rung.elapsed() > AGAIN) {
                if self.port.state() != Some(State::Paired) {
                    return Err(Failure::ServerGone);
                }
                // It is working. Checks again later that it still exists.
                rung = Some(Instant::now());
            }
            nap(start);
        }
    }

    fn slow_state(&self) -> u64 {
        // SAFETY: the pair's shared memory.
        unsafe { (&raw const (*slow_page()).state).read_volatile() }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.port.command(Command::Unpair);
    }
}

/// Polls at first, then sleeps for longer and longer.
fn nap(start: Instant) {
    let waited = start.elapsed();
    if waited < POLLING {
        hint::spin_loop();
    } else {
        thread::sleep((waited / 16).clamp(NAPS[0], NAPS[1]));
    }
}

/// Waits until the server's machine has accepted this one.
fn connect(port: &Port, start: Instant) -> Result<(), Error> {
    if port.state() == Some(State::Connected) {
        return Ok(());
    }
    port.command(Command::Connect);
    loop {
        match port.state() {
            Some(State::Connected) => return Ok(()),
            Some(State::Connecting) if start.elapsed() < PATIENCE => thread::sleep(NAPS[1]),
            // The previous client is just leaving, or the server is about to serve.
            Some(State::Failed)
                if matches!(port.reason(), Reason::Taken | Reason::NotServing)
                    && start.elapsed() < PATIENCE =>
            {
                thread::sleep(10 * NAPS[1]);
                port.command(Command::Connect);
            }
            _ => return Err(port.refusal()),
        }
    }
}

/// Pins the calling thread to its current vCPU.
fn stay_here() -> Result<(), Error> {
    // SAFETY: the first call has no arguments; then all zeroes are a valid set, which is filled in
    // within its size and outlives the call.
    unsafe {
        let cpu = libc::sched_getcpu();
        let mut set: libc::cpu_set_t = mem::zeroed();
        libc::CPU_SET(usize::try_from(cpu).unwrap_or(0), &mut set);
        if libc::sched_setaffinity(0, size_of_val(&set), &raw const set) != 0 {
            return Err(failed("stay on one vCPU"));
        }
    }
    Ok(())
}

const _: () = assert!(SHARED.is_multiple_of(window::PAGE));
