//! One OpenCL program in a guest, started once, that is served through rings, behind the gate, and
//! through rings again, while it computes. [`opencl`] runs in the guests: the program and a pool in
//! one, and a server behind the gate in the other.

use anyhow::{Context, Result, ensure};

use crate::{Check, checks, machine::Machine, opencl};

/// The address space of both guests. The server uses 592 MiB of it: PoCL, locked. In the range of
/// its hole, the page table of the client's program hides nothing.
const MEMORY: &str = "1280M";
/// Leaves the client's kernel little memory for page tables other than that hole: what is below it
/// and above the kernel is reserved, and what was loaded at the end of RAM is not freed.
const IN_HOLE: &str = "memmap=512M$64M retain_initrd";
const SERVER: &str = "socket=/tmp/gate,hole_start=576M,hole_end=1264M,id=gate";
/// The disk with PoCL.
const DISK: &str = "path=/dev/sdb,readonly=on,image_type=raw";

/// All checks.
pub fn all(check: Check<'_>) {
    if !check("the module loads", &mut checks::load) {
        return;
    }
    let mut machines = Vec::new();
    let serves = check("an OpenCL driver is ready behind a gate", &mut || {
        let options = ["--disk", DISK, "--accel-server", SERVER];
        machines.push(Machine::start("opencl-server", MEMORY, &options)?);
        machines[0].event("frozen")
    });
    let Some(server) = machines.first_mut().filter(|_| serves) else {
        return;
    };
    check(
        "one OpenCL program, started once, is served by rings, behind the gate, and by rings again",
        &mut || every_seat(server),
    );
}

fn every_seat(server: &mut Machine) -> Result<()> {
    let unused = wakes(server)?;
    let gate = "transport=gate,server=/tmp/gate,shared=16M,id=gate";
    let options = ["--disk", DISK, "--accel", gate];
    let mut client = Machine::start_with("opencl-client", MEMORY, IN_HOLE, &options)?;
    client.wait_for(opencl::BY_RINGS)?;
    let before = wakes(server)?;
    ensure!(before == unused, "{before} calls came through the gate");
    client.wait_for(opencl::BEHIND)?;
    client.wait_for(opencl::AGAIN)?;
    let behind = wakes(server)?;
    ensure!(behind > unused, "no call came through the gate");
    println!(
        "figure calls of an OpenCL program through the gate: {}",
        behind - unused
    );
    client.wait_for(opencl::ON)?;
    let after = wakes(server)?;
    ensure!(after == behind, "{} calls came later", after - behind);
    client.wait_for(opencl::RIGHT)?;
    // For the next client.
    server.event("frozen")
}

/// How often a program's calls have woken the server.
fn wakes(server: &Machine) -> Result<u64> {
    let text = server.ctl(&["counters"])?;
    let (_, rest) = text.split_once("\"wakes\":").context("no counter")?;
    let digits: String = (rest.trim_start().chars())
        .take_while(char::is_ascii_digit)
        .collect();
    Ok(digits.parse()?)
}
