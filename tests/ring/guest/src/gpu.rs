//! A guest without an operating system that repeats a recording on its GPU, from ring 3: only the
//! accesses that a driver made. Interrupts arrive as messages, which nobody handles.

#![no_std]
#![no_main]

mod machine;

use core::{
    arch::{global_asm, x86_64::_rdtsc},
    panic::PanicInfo,
};

use gantry_gpu_replay::{
    BARS, CLASS_BITS, Desk, LOG, MOST_LOGGED, STEPS, State, Step,
    kind::{END, PART, RAM, READ, WAIT, WRITE},
};

global_asm!(include_str!("boot.s"), options(att_syntax));

/// The memory that the host looks at.
#[unsafe(link_section = ".desk")]
#[used]
static DESK: Desk = Desk::new();

const VENDOR: u32 = 0x10de;
/// Number of devices on a bus.
const DEVICES: u64 = 32;
/// Offset of the GPU's MSI capability.
const MSI: u64 = 0x68;
/// Address of the CPU's interrupt controller, and a vector.
const MESSAGE: u32 = 0xfee0_0000;
const VECTOR: u32 = 0x41;
/// Sizes of BAR 1 and BAR 3 in bytes.
const WIDE: [u64; 2] = [128 << 20, 64 << 20];
/// Enables memory decoding and bus mastering.
const COMMAND: u32 = 6;
/// Counts of the time-stamp counter between two looks at a ring, and until a submission is given
/// up: minutes on any CPU.
const PAUSE: u64 = 50_000;
const PATIENCE: u64 = 1 << 38;

fn now() -> u64 {
    // SAFETY: every CPU with long mode has this instruction, and ring 0 has left it enabled.
    unsafe { _rdtsc() }
}

fn read(at: u64) -> u32 {
    // SAFETY: the configuration space and the BARs are mapped, and tolerate any access.
    unsafe { (at as *const u32).read_volatile() }
}

fn write(at: u64, value: u32) {
    // SAFETY: as above.
    unsafe { (at as *mut u32).write_volatile(value) };
}

/// Finds and enables the GPU, and returns the addresses of its BARs.
fn gpu(start_info: u64) -> Option<[u64; BARS]> {
    let ecam = machine::ecam(start_info)?;
    let mut functions = (0..DEVICES).map(|device| ecam + (device << 15));
    let function = functions.find(|function| read(*function) & 0xffff == VENDOR)?;
    let low = |bar: u64| u64::from(read(function + 0x10 + 4 * bar) & !15);
    let wide = |bar: u64| low(bar) | u64::from(read(function + 0x14 + 4 * bar)) << 32;
    let bars = [low(0), wide(1), wide(3)];
    for (at, size) in bars[1..].iter().zip(WIDE) {
        if *at >= 1 << 32 {
            machine::map(*at, size, false)?;
        }
    }
    write(function + MSI + 4, MESSAGE);
    write(function + MSI + 8, 0);
    write(function + MSI + 12, VECTOR);
    write(function + MSI, read(function + MSI) | 1 << 16);
    write(function + 4, COMMAND);
    Some(bars)
}

/// Makes one access, and returns the value read.
///
/// # Safety
/// The address is mapped, and is either not memory or memory that the host allows to be written.
unsafe fn access(step: &Step, at: u64, value: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        match (step.kind, step.size) {
            (WRITE, 0) => (at as *mut u8).write_volatile(value as u8),
            (WRITE, 1) => (at as *mut u16).write_volatile(value as u16),
            (WRITE, 2) => (at as *mut u32).write_volatile(value as u32),
            (WRITE, _) => (at as *mut u64).write_volatile(value),
            (_, 0) => {
                (at as *const u8).read_volatile();
            }
            (_, 1) => {
                (at as *const u16).read_volatile();
            }
            (_, 2) => {
                (at as *const u32).read_volatile();
            }
            _ => {
                (at as *const u64).read_volatile();
            }
        }
    }
}

/// What has been done since the host's last order to continue.
#[derive(Default)]
struct Done {
    logged: u64,
    polls: u64,
}

impl Done {
    fn log(&mut self, class: u32, time: u64) {
        if self.logged < MOST_LOGGED {
            let word = time << CLASS_BITS | u64::from(class);
            // SAFETY: within the log, which only the guest uses while it works.
            unsafe { ((LOG + self.logged * 8) as *mut u64).write_volatile(word) };
            self.logged += 1;
        }
    }

    fn accesses(&mut self, step: &Step, bar: u64) {
        let (mut at, mut value) = (bar.wrapping_add(step.offset), step.value);
        for _ in 0..step.count {
            let before = now();
            // SAFETY: the host has checked that it lies in the BAR, which is mapped.
            unsafe { access(step, at, value) };
            self.log(step.class, now() - before);
            at = at.wrapping_add(step.stride);
            value = value.wrapping_add(step.step);
        }
    }

    /// Waits until a ring has been fetched up to an entry.
    fn wait(&mut self, step: &Step, bar: u64) -> bool {
        let start = now();
        loop {
            self.polls += 1;
            let get = read(bar.wrapping_add(step.offset));
            let ahead = get.wrapping_sub(step.value as u32) & (step.count as u32).wrapping_sub(1);
            if ahead < step.count as u32 / 2 {
                return true;
            }
            let seen = now();
            if seen - start > PATIENCE {
                return false;
            }
            while now() - seen < PAUSE {
                core::hint::spin_loop();
            }
        }
    }
}

/// Publishes the guest's state, and waits for the order to continue.
fn pause(state: State) {
    let before = DESK.gone();
    DESK.wait(state);
    while DESK.gone() == before {
        core::hint::spin_loop();
    }
    DESK.enter(State::Working);
}

fn work(bars: [u64; BARS]) -> State {
    pause(State::Ready);
    let mut done = Done::default();
    for nth in 0.. {
        // SAFETY: the host has written steps there, the last of which is the end.
        let step = unsafe { (STEPS as *const Step).add(nth).read_volatile() };
        let Some(bar) = bars.get(step.bar as usize).copied() else {
            return State::Nonsense;
        };
        match step.kind {
            READ | WRITE => done.accesses(&step, bar),
            RAM => {
                let (from, to) = (step.value as *const u8, step.offset as *mut u8);
                // SAFETY: the host has checked that both are RAM outside the program.
                unsafe { to.copy_from(from, step.count as usize) };
            }
            WAIT => {
                if !done.wait(&step, bar) {
                    DESK.note(done.logged, done.polls, nth as u64);
                    return State::Stuck;
                }
            }
            PART => {
                DESK.note(done.logged, done.polls, nth as u64);
                pause(State::Paused);
                done = Done::default();
            }
            END => return State::Done,
            _ => return State::Nonsense,
        }
    }
    State::Nonsense
}

/// The program's entry point in ring 3.
#[unsafe(no_mangle)]
extern "C" fn main(start_info: u64) -> ! {
    let state = gpu(start_info).map_or(State::NoGpu, work);
    DESK.enter(state);
    loop {
        core::hint::spin_loop();
    }
}

#[panic_handler]
fn panicked(_: &PanicInfo<'_>) -> ! {
    DESK.enter(State::Nonsense);
    loop {
        core::hint::spin_loop();
    }
}
