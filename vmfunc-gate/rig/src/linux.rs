//! Two Gantry VMs with Linux guests of one stock kernel: a process of the server's guest registers
//! handlers that make system calls, and a process of the client's guest delegates to them.
//! [`guest`] runs in both; this program starts, controls and kills the VMs.
//!
//! The server's kernel runs on the client's vCPU, and finds its own data there if both kernels use
//! the same virtual addresses for what the CPU leads them to: system calls, exceptions, per-CPU
//! data. This is the case for guests with one kernel and one memory size, without address
//! randomization. The page table of the client's process must not hide memory of the server that
//! its kernel might need: the server's RAM has a hole where much of the client's free memory is,
//! and the client forks until the page table of a child is there.

use std::{thread, time::Duration};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    Check, checks, guest,
    machine::{Machine, SOON, compact},
};

/// The memory of each VM.
const MEMORY: &str = "256M";

/// All checks.
pub fn all(check: Check<'_>) {
    if !check("the module loads", &mut checks::load) {
        return;
    }
    let mut machines = Vec::new();
    let frozen = check(
        "a VM stands still when a process of it has registered handlers",
        &mut || {
            let options = "socket=/tmp/gate,hole_start=64M,hole_end=192M,id=gate";
            let mut server = Machine::start("server", MEMORY, &["--accel-server", options])?;
            let found = server.event("frozen");
            machines.push(server);
            found
        },
    );
    let Some(server) = machines.first_mut().filter(|_| frozen) else {
        return;
    };
    check(
        "its vCPU gives up the CPU, and its state says so",
        &mut || stands_still(server),
    );
    check("what a frozen VM cannot do is refused", &mut || {
        refusals(server)
    });
    check(
        "a frozen VM goes on when it is resumed, and serves again",
        &mut || {
            server.ctl(&["resume"])?;
            server.wait_for("a client has ended: Resumed")?;
            server.event("frozen")
        },
    );
    check("a frozen VM is booted again, and serves again", &mut || {
        server.ctl(&["reboot"])?;
        server.event("rebooted")?;
        server.event("frozen")
    });
    let options = "transport=gate,server=/tmp/gate,shared=1M,id=gate";
    let mut client = match Machine::start("client", MEMORY, &["--accel", options]) {
        Ok(client) => client,
        Err(error) => {
            check("a client's VM starts", &mut || bail!("{error:#}"));
            return;
        }
    };
    with_client(check, server, &mut client, options);
}

/// What a client's VM and its server do together, and how that ends.
fn with_client(check: Check<'_>, server: &mut Machine, client: &mut Machine, options: &str) {
    check(
        "the server of a process that was killed is free before anybody asks",
        &mut || {
            client.wait_for(guest::KILLED)?;
            server.event("thawed")?;
            client.listen()?;
            let asked = client.lines.iter().any(|line| line == guest::ASKING);
            ensure!(!asked, "another process has asked");
            server.wait_for("a client has ended: ClientGone")?;
            server.event("frozen")
        },
    );
    // The guests' own checks are printed while they run.
    if !check("a process of another VM delegates to it", &mut || {
        client.wait_for(guest::DONE)
    }) {
        return;
    }
    check(
        "the server's VM goes on when its client has left",
        &mut || {
            server.wait_for(guest::DONE)?;
            server.event("frozen")?;
            let counters = server.ctl(&["counters"])?;
            println!("figure counters of the server: {}", compact(&counters));
            Ok(())
        },
    );
    check(
        "a VM whose process is in another VM is not saved",
        &mut || {
            client.wait_for(guest::LONG)?;
            thread::sleep(Duration::from_secs(2));
            client.ctl(&["pause"])?;
            let saved = client.ctl(&["snapshot", "/tmp/snapshot"]);
            client.ctl(&["resume"])?;
            let refused = format!("{:#}", saved.err().context("it was saved")?);
            ensure!(refused.contains("uses the gate"), "{refused}");
            Ok(())
        },
    );
    check(
        "a server is given up whose client is killed in a system call",
        &mut || {
            let counters = client.ctl(&["counters"])?;
            println!("figure counters of the client: {}", compact(&counters));
            server.seen = server.events()?.len();
            client.kill()?;
            lost(server)
        },
    );
    check("a server is given up whose handler waits", &mut || {
        server.ctl(&["reboot"])?;
        server.event("rebooted")?;
        server.event("frozen")?;
        let mut waiter = Machine::start("waiter", MEMORY, &["--accel", options])?;
        waiter.wait_for(guest::DONE)?;
        lost(server)
    });
}

/// Checks that the server's machine reports that the server is lost.
fn lost(server: &mut Machine) -> Result<()> {
    server.event("thawed")?;
    // Waits for the rest of the event.
    thread::sleep(SOON);
    let events = server.events()?;
    let last = events.get(server.seen..).map(compact).unwrap_or_default();
    let reason = last.split('}').next().unwrap_or_default();
    ensure!(reason.contains("lost"), "{last}");
    Ok(())
}

/// Checks that the vCPU's thread consumes no time, and that the API says why.
fn stands_still(server: &Machine) -> Result<()> {
    let info = server.ctl(&["info"])?;
    ensure!(info.contains("\"Frozen\""), "{info}");
    let before = server.ticks()?;
    thread::sleep(Duration::from_secs(1));
    let after = server.ticks()?;
    ensure!(before == after, "{} ticks", after - before);
    Ok(())
}

fn refusals(server: &Machine) -> Result<()> {
    for request in [
        &["pause"][..],
        &["snapshot", "/tmp/snapshot"],
        &["resize", "--memory", "512M"],
        &["power-button"],
    ] {
        match server.ctl(request) {
            Ok(answer) => bail!("{request:?}: {answer}"),
            Err(error) if format!("{error:#}").contains("frozen") => {}
            Err(error) => return Err(error.context(format!("{request:?}"))),
        }
    }
    Ok(())
}
