//! A guest without an operating system that computes on its host's accelerator from ring 3.
//!
//! It does only what a stock guest's kernel, agent and driver do: it finds the accelerator port,
//! maps its BARs, writes a hello into the first slice and has the slice opened. From then on it is
//! a client like any other ([`gantry_ring_client`]). It leaves its measurements in its memory, on
//! the [desk]. So only the path to the worker is measured: there are no interrupts and no other
//! processes, and exits only where the program causes them.

#![no_std]
#![no_main]

extern crate alloc;

mod heap;
mod machine;
mod port;

use core::{
    arch::{global_asm, x86_64::_rdtsc},
    fmt::Write,
    panic::PanicInfo,
};

use gantry_ring_client::{
    Surroundings, Told, cuda,
    desk::{Desk, Orders, Pen, Rounds, State},
    opencl, rounds,
};
use remoting_proto::{
    apis::{cuda::Cuda, opencl::OpenCl},
    wire::api::ApiId,
};

use crate::port::Port;

global_asm!(include_str!("boot.s"), options(att_syntax));

/// The memory that the host looks at.
#[unsafe(link_section = ".desk")]
#[used]
static DESK: Desk = Desk::new();

/// Busy-waits without an exit.
fn until(mut is: impl FnMut() -> bool) {
    while !is() {
        core::hint::spin_loop();
    }
}

/// Publishes the guest's state, and waits for the order to continue.
fn report(state: State) {
    let before = DESK.gone();
    DESK.enter(state);
    until(|| DESK.gone() != before);
}

fn now() -> u64 {
    // SAFETY: every CPU with long mode has this instruction, and ring 0 has left it enabled.
    unsafe { _rdtsc() }
}

struct Here;

impl Surroundings for Here {
    fn now(&mut self) -> u64 {
        now()
    }

    fn note(&mut self, what: &str, is: &str) {
        let _ = writeln!(Pen(&DESK), "note\t{what}\t{is}");
    }

    fn time(&mut self, what: &str, median: u64, most: u64) {
        let _ = writeln!(Pen(&DESK), "time\t{what}\t{median}\t{most}");
    }

    fn copy(&mut self, what: &str, bytes: u64, median: u64) {
        let _ = writeln!(Pen(&DESK), "copy\t{what}\t{bytes}\t{median}");
    }

    fn counted(&mut self, begins: bool) {
        report(if begins { State::Ready } else { State::Counted });
    }
}

/// Rounds since the host last asked for them.
struct Stretch {
    rounds: Rounds,
    begun: u64,
    /// Time at which the last round ended.
    last: u64,
}

impl Told for Stretch {
    fn begins(&mut self) {
        DESK.enter(State::Ready);
        (self.begun, self.last) = (now(), now());
    }

    fn goes_on(&mut self) -> bool {
        let now = now();
        let took = now.wrapping_sub(self.last);
        self.last = now;
        let since = DESK.gone();
        if since == self.rounds.since {
            self.rounds.count += 1;
            self.rounds.counts = now.wrapping_sub(self.begun);
            self.rounds.longest = self.rounds.longest.max(took);
        } else {
            self.begun = now;
            self.rounds = Rounds {
                since,
                ..Rounds::default()
            };
        }
        DESK.say(self.rounds);
        DESK.orders() != Orders::Check
    }
}

/// Fills memory completely, with no two pages alike.
fn fill() {
    for at in DESK.filled().step_by(8) {
        // SAFETY: identity-mapped memory that nobody else uses.
        unsafe { (at as *mut u64).write_volatile(at.wrapping_mul(0x9e37_79b9_7f4a_7c15)) };
    }
}

fn work(start_info: u64) -> Result<(), alloc::string::String> {
    let ecam = machine::ecam(start_info).ok_or("ACPI names no PCI configuration space")?;
    let port = Port::find(ecam).ok_or("there is no accelerator port")?;
    DESK.enter(State::Waiting);
    until(|| DESK.orders() != Orders::None);
    let orders = DESK.orders();
    if orders == Orders::Rounds {
        fill();
    }
    let combining = orders == Orders::Combining;
    let done = match (orders, DESK.api()) {
        (Orders::Rounds, _) => {
            let (window, bell) = port.open::<OpenCl>(combining)?;
            let mut stretch = Stretch {
                rounds: Rounds::default(),
                begun: 0,
                last: 0,
            };
            rounds(&window, bell, DESK.size(), &mut stretch)
        }
        (_, ApiId::OpenCl) => {
            let (window, bell) = port.open::<OpenCl>(combining)?;
            opencl::run(&window, bell, &mut Here)
        }
        (_, ApiId::Cuda) => {
            let (window, bell) = port.open::<Cuda>(combining)?;
            cuda::run(&window, bell, &mut Here)
        }
        (_, ApiId::Nvidia) => return Err("native contexts have no pool".into()),
    };
    done.map_err(|why| alloc::format!("{why}"))
}

/// The program's entry point in ring 3.
#[unsafe(no_mangle)]
extern "C" fn main(start_info: u64) -> ! {
    match work(start_info) {
        Ok(()) => DESK.enter(State::Done),
        Err(why) => fail(&why),
    }
    loop {
        core::hint::spin_loop();
    }
}

fn fail(why: &dyn core::fmt::Display) {
    let _ = writeln!(Pen(&DESK), "failed\t{why}");
    DESK.enter(State::Failed);
}

#[panic_handler]
fn panicked(info: &PanicInfo<'_>) -> ! {
    fail(info);
    loop {
        core::hint::spin_loop();
    }
}
