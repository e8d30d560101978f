//! Checks the gate's kernel module on a host with KVM on VMX: one line per check.
//!
//! - [`vm`]: a client's and a server's VM.
//! - [`checks`]: the checks.
//! - [`fuzz`]: calls with random arguments.
//! - [`linux`]: checks with Linux guests, selected by the argument `linux`.
//! - [`seats`]: an OpenCL program that is moved between workers, in such guests, selected by the
//!   argument `seats`.
//! - [`machine`]: the gantry processes that run them.
//! - [`remoting`], [`opencl`]: an accelerator's calls by delegation, and through a driver, in such
//!   guests.
//! - [`guest`]: what this program does as the first process of such a guest.

mod checks;
mod fuzz;
mod guest;
mod init;
mod linux;
mod machine;
mod opencl;
mod remoting;
mod seats;
mod vm;

use anyhow::Result;

fn main() {
    if std::process::id() == 1 {
        guest::run();
    }
    let all = match std::env::args().nth(1).as_deref() {
        Some("linux") => linux::all,
        Some("seats") => seats::all,
        _ => checks::all,
    };
    all(&mut |name, run| {
        let result = run();
        match &result {
            Ok(()) => println!("check {name} ... ok"),
            Err(error) => {
                println!("check {name} ... FAILED: {error:#}");
                // The module's last messages.
                let log = fuzz::kernel_log().unwrap_or_default();
                let lines = log.lines().filter(|line| line.contains("gantry_gate"));
                for line in lines.rev().take(10) {
                    println!("{line}");
                }
            }
        }
        result.is_ok()
    });
    println!("end");
    shut_down();
}

/// Runs a check and prints its result. Returns whether it passed.
type Check<'c> = &'c mut dyn FnMut(&str, &mut dyn FnMut() -> Result<()>) -> bool;

/// Ends the emulator, if this is one.
fn shut_down() {
    // SAFETY: waits until all output is sent.
    unsafe { libc::tcdrain(1) };
    // SAFETY: requests access to the port below.
    if unsafe { libc::iopl(3) } != 0 {
        return;
    }
    for byte in *b"Shutdown" {
        // SAFETY: the emulator's port; nothing listens there on other machines.
        unsafe { std::arch::asm!("out dx, al", in("dx") 0x8900_u16, in("al") byte) };
    }
}
