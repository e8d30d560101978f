//! The accelerator port, used like by a stock guest's agent and driver.

use alloc::{format, string::String, sync::Arc};
use core::time::Duration;

use remoting_proto::{
    port::{self, Command, State, registers},
    wire::{
        Api,
        hello::{self, Hello},
    },
};
use remoting_transport::{
    bell::Bell,
    sync::{AtomicU32, Ordering},
    window::{CLIENT_HELLO, REPLY, Window},
};

use crate::{machine, until};

/// Number of devices on a bus.
const DEVICES: u64 = 32;

/// An accelerator port.
pub struct Port {
    registers: u64,
    doorbells: u64,
    window: u64,
}

/// Wakes the worker; the client itself never sleeps.
#[derive(Clone)]
pub struct Doorbell(u64);

impl Bell for Doorbell {
    fn ring(&self, word: &AtomicU32) {
        word.fetch_add(1, Ordering::Release);
        write(self.0, 1);
    }

    fn wait(&self, word: &AtomicU32, seen: u32, _: Duration) {
        until(|| word.load(Ordering::Acquire) != seen);
    }
}

fn read(at: u64) -> u32 {
    // SAFETY: the configuration space and the BARs are mapped, and tolerate any access.
    unsafe { (at as *const u32).read_volatile() }
}

fn write(at: u64, value: u32) {
    // SAFETY: as above.
    unsafe { (at as *mut u32).write_volatile(value) };
}

impl Port {
    /// Finds the first port on the first bus.
    pub fn find(ecam: u64) -> Option<Self> {
        let wanted = u32::from(port::VENDOR) | u32::from(port::DEVICE) << 16;
        let mut functions = (0..DEVICES).map(|device| ecam + (device << 15));
        let function = functions.find(|function| read(*function) == wanted)?;
        let bar = |index: u64| u64::from(read(function + 0x10 + 4 * index) & !15);
        // Enables memory decoding.
        write(function + 4, 2);
        Some(Self {
            registers: bar(0),
            doorbells: bar(1),
            window: bar(2) | u64::from(read(function + 0x1c)) << 32,
        })
    }

    fn slice(&self) -> State {
        let number = read(self.registers + registers::SLICE);
        State::from_number(number).unwrap_or(State::Ended)
    }

    /// Opens the first slice for an API, and returns its window and the doorbell that wakes its
    /// worker.
    pub fn open<A: Api>(&self, combining: bool) -> Result<(Arc<Window>, Doorbell), String> {
        let version = read(self.registers + registers::VERSION);
        if version != registers::INTERFACE {
            return Err(format!("the port's registers are of version {version}"));
        }
        let low = read(self.registers + registers::SLICE_SIZE_LOW);
        let high = read(self.registers + registers::SLICE_SIZE_HIGH);
        let size = u64::from(low) | u64::from(high) << 32;
        machine::map(self.window, size, combining).ok_or("there are not enough page tables")?;
        let start = self.window as *mut u8;
        for (at, byte) in (CLIENT_HELLO as usize..).zip(Hello::client::<A>().to_bytes()) {
            // SAFETY: within the slice's first page.
            unsafe { start.add(at).write_volatile(byte) };
        }
        write(self.registers + registers::SLICE, Command::Open as u32);
        until(|| self.slice() != State::Opening);
        let mut reply = [0; hello::SIZE];
        for (at, byte) in (REPLY as usize..).zip(&mut reply) {
            // SAFETY: as above.
            *byte = unsafe { start.add(at).read_volatile() };
        }
        let theirs = Hello::check_for::<A>(&reply).map_err(|why| format!("{why}"))?;
        if self.slice() != State::Open {
            return Err(format!("the slice is {:?}", self.slice()));
        }
        // SAFETY: the slice is mapped permanently, and nothing else here accesses it. Fences are
        // needed as in the driver, which cannot know how its kernel maps the window.
        let window = unsafe { Window::over(start, size, theirs.ring, true) };
        let window = window.map_err(|why| format!("{why}"))?;
        Ok((window, Doorbell(self.doorbells)))
    }
}
