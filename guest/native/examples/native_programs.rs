//! What a CUDA library does with device files, by hand, in a guest of the nested scenarios: with
//! `LD_PRELOAD=libgantry_nvidia_preload.so`. The device is QEMU's `edu`, whose registers are the doorbells, and what the
//! driver pins is looked at by a stand-in.
//!
//! - `native_programs`: once, with all that must hold.
//! - `native_programs endless`: a line for each round, until it loses its device, and what it sees then.
//! - `native_programs computes`: a line for each round, whose contents are on the device, of a program that can be
//!   suspended. `native_programs expected ROUND`: that line, without a device.

#[path = "../tests/preloaded/program.rs"]
#[allow(dead_code, reason = "the tests call the rest")]
mod program;
#[path = "suspendable/mod.rs"]
mod suspendable;

use std::{env, io, process::ExitCode, thread, time::Duration};

use program::{DEVICE, Opened, close, mmap};

/// Handles of the program's objects.
const DOORBELLS: u32 = 0x5c00_0019;
const PINNED: u32 = 0x5c00_001a;
const SYSTEM: u32 = 0x5c00_001b;
/// Bytes of the doorbells.
const LENGTH: usize = 0x1_0000;
/// Bytes that the driver pins in a round.
const ROUND: usize = 1 << 18;
/// What the first register of the device is, whatever is written there (QEMU, docs/specs/edu).
const IDENTIFICATION: u32 = 0x0100_00ed;
/// The register that is the inverse of what was written last.
const LIVENESS: usize = 4;
/// Contents of ordinary memory, as opposed to a device's.
const WRITTEN: u32 = 0x1234_5678;
const PAUSE: Duration = Duration::from_millis(20);

/// The program's doorbells.
struct Doorbells(*mut u8);

impl Doorbells {
    fn map(opened: &Opened) -> Self {
        assert_eq!(opened.allocate(DEVICE, DOORBELLS, 0xc661, &mut [0; 2]), 0);
        let (status, _, file) = opened.map(DOORBELLS, LENGTH as u64);
        assert_eq!(status, 0, "the doorbells");
        let memory = mmap(file, LENGTH, libc::MAP_SHARED, 0).expect("the doorbells map");
        close(file);
        Self(memory.cast())
    }

    /// What a register is after something was written to it.
    fn after(&self, register: usize, value: u32) -> u32 {
        // SAFETY: the mapping has the register, and stays as long as this process.
        unsafe {
            let register = self.0.add(register).cast::<u32>();
            register.write_volatile(value);
            register.read_volatile()
        }
    }

    /// Gives them back.
    fn unmap(self, opened: &Opened) {
        assert_eq!(opened.free(DOORBELLS), 0);
        // SAFETY: the mapping was made with this length, and is not used any longer.
        unsafe { libc::munmap(self.0.cast(), LENGTH) };
    }

    fn are_the_devices(&self) -> bool {
        self.after(0, WRITTEN) == IDENTIFICATION
    }

    fn are_blank(&self) -> bool {
        self.after(0, WRITTEN) == WRITTEN
    }
}

/// Hands memory to the driver, which changes it, and takes it back.
fn pin(opened: &Opened, memory: *mut u64, value: u64) -> io::Result<()> {
    // SAFETY: the mapping has both words.
    unsafe { memory.write_volatile(value) };
    let pinned = opened.try_describe(PINNED, memory, ROUND as u64)?;
    assert_eq!(pinned, 0, "memory is pinned");
    // SAFETY: as above.
    let words = unsafe { [memory.read_volatile(), memory.add(1).read_volatile()] };
    assert_eq!(
        words,
        [value, value + 1],
        "the driver has seen and changed it"
    );
    assert_eq!(opened.try_free(PINNED)?, 0, "memory is given back");
    Ok(())
}

fn memory() -> *mut u64 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    mmap(-1, ROUND, flags, 0).expect("there is memory")
}

fn once() {
    let opened = Opened::new();
    // Memory of the driver's, in the window.
    assert_eq!(opened.memory(SYSTEM, 0x3e, 0x21000), 0, "system memory");
    let (status, _, file) = opened.map(SYSTEM, 0x21000);
    assert_eq!(status, 0, "system memory is mapped");
    let system = mmap(file, 0x21000, libc::MAP_SHARED, 0).expect("system memory maps");
    close(file);
    // SAFETY: the mapping has the word. The driver has written to it before the program.
    assert_eq!(unsafe { system.add(1).read_volatile() }, 1);
    pin(&opened, memory(), 41).expect("the worker answers");
    let doorbells = Doorbells::map(&opened);
    assert!(
        doorbells.are_the_devices(),
        "the device's registers are seen"
    );
    let answered = doorbells.after(LIVENESS, WRITTEN);
    assert_eq!(answered, !WRITTEN, "the device sees what is written");
    // First freed, then written to.
    assert_eq!(opened.free(DOORBELLS), 0);
    assert!(doorbells.are_blank(), "nothing of the device is left");
    println!("device pages and window memory are right");
}

fn endless() {
    let opened = Opened::new();
    let doorbells = Doorbells::map(&opened);
    let memory = memory();
    for round in 0.. {
        // When a worker ends, its pages are blank before the program sees an error.
        let are_there = doorbells.are_the_devices();
        if let Err(error) = pin(&opened, memory, round) {
            let left = if doorbells.are_blank() {
                "blank"
            } else {
                "a device's"
            };
            println!("ended: {error}; the pages are {left}");
            return;
        }
        assert!(are_there, "the device's registers are seen");
        println!("round {round}");
        thread::sleep(PAUSE);
    }
}

fn main() -> ExitCode {
    match env::args().nth(1).as_deref() {
        None => once(),
        Some("endless") => endless(),
        Some("computes") => suspendable::computes(),
        Some("expected") => {
            let round = env::args().nth(2).and_then(|text| text.parse().ok());
            suspendable::expected(round.expect("the number of a round"));
        }
        Some(other) => {
            eprintln!("native_programs: unknown: {other}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
