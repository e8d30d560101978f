//! Checks the gate's kernel module on a host with KVM on VMX: one line per check.

use std::process::Command;

use anyhow::{Context, Result, ensure};

fn main() {
    check("the module loads", load);
    println!("end");
    shut_down();
}

/// Runs a check and says how it ended.
fn check(name: &str, run: impl FnOnce() -> Result<()>) {
    match run() {
        Ok(()) => println!("check {name} ... ok"),
        Err(error) => println!("check {name} ... FAILED: {error:#}"),
    }
}

fn load() -> Result<()> {
    let output = Command::new("insmod")
        .arg("/modules/gantry_gate.ko")
        .output()
        .context("cannot run insmod")?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}", text.trim());
    ensure!(
        std::path::Path::new("/dev/gantry-gate").exists(),
        "there is no /dev/gantry-gate"
    );
    Ok(())
}

/// Ends the emulator, if this is one.
fn shut_down() {
    // SAFETY: waits until all that was printed is sent.
    unsafe { libc::tcdrain(1) };
    // SAFETY: asks for the ports below.
    if unsafe { libc::iopl(3) } != 0 {
        return;
    }
    for byte in *b"Shutdown" {
        // SAFETY: the emulator's port; nothing listens there on other machines.
        unsafe { std::arch::asm!("out dx, al", in("dx") 0x8900_u16, in("al") byte) };
    }
}
