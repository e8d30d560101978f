//! The checks.

use std::{
    os::fd::AsFd,
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use vmfunc_gate::{
    host::{Gate, Status},
    trampoline::{self, ABORTED, BUSY, DONE, NO_HANDLER},
    window,
};

use crate::{
    Check, fuzz,
    vm::{
        ADD, CLIENT_PML4, CLIENT_TICKS, ClientVm, DRIVER, FAIL, HIDDEN, HYPERCALL, KERNEL_DATA,
        MemoryLayout, OtherServer, Process, READ, SERVER_DOORBELL, SERVER_HOLE, SHARED_PAGES, SPIN,
        SYSTEM_CALL, ServerVm, Start, WINDOW, WRITE, at,
    },
};

/// The number of delegations in the check that counts exits.
const MANY: u64 = 100_000;
/// The number of pairs that are made and undone.
const PAIRS: u32 = 1000;

/// All checks, the simple ones first.
pub fn all(check: Check<'_>) {
    if !check("the module loads", &mut load) {
        return;
    }
    if let Err(error) = with_pair(check) {
        check("a pair can be made", &mut || bail!("{error:#}"));
    }
    check(
        "a pair with a server of 1 GiB takes at most 64 KiB",
        &mut large,
    );
    check(
        "a client and a server at the same guest-physical addresses",
        &mut same_place,
    );
    check(
        "a server whose process needs the page of the client's page table is refused",
        &mut needed,
    );
    check("two clients of a VM come and go", &mut siblings);
    check(
        "a server is given up whose kernel was ended in a system call",
        &mut broken,
    );
    check(
        "a server is given up whose client is unpaired in a system call",
        &mut unpaired_in_kernel,
    );
    check(
        "a server is woken when nobody is inside, and clients come back when it sleeps",
        &mut woken,
    );
    check(
        "handlers are called with anything by a hostile client",
        &mut fuzz::delegations,
    );
    check("the module takes calls with anything", &mut fuzz::run);
    check("nothing is left when all is closed", &mut || {
        let empty = wait(|status| status.clients == 0 && status.servers == 0);
        let status = empty?;
        // The trampoline, and the server's side page.
        ensure!(status.pages == 2 && status.pinned == 0, "{status:?}");
        Ok(())
    });
    check("the module unloads, and loads again", &mut || {
        command("rmmod", "gantry_gate")?;
        load()
    });
}

fn with_pair(check: Check<'_>) -> Result<()> {
    let mut server = OtherServer::start()?;
    let mut client = ClientVm::new()?;
    client.client.pair(server.as_fd())?;
    let paired = check(
        "a client delegates to a server of another process",
        &mut || expect(&mut client, ADD, 7, 8, (29, DONE)),
    );
    if !paired {
        return Ok(());
    }
    check("100000 delegations, no exit", &mut || many(&mut client));
    check(
        "1 MiB each way through shared memory is what it was",
        &mut || {
            for bytes in [8, 64, 4096, 65536, 1 << 20] {
                let start = Start::new(at::rig_transfer(), [bytes, bytes + 1, 0]);
                let found = client.run(&start.interrupted())?;
                ensure!(found == (0, 0), "{bytes} bytes: {found:x?}");
            }
            Ok(())
        },
    );
    check(
        "a 1 kHz timer of the client's kernel ticks during delegations",
        &mut || timer(&mut client, at::rig_timer(), 20_000),
    );
    check("a handler's system call is its kernel's", &mut || {
        expect(&mut client, SYSTEM_CALL, 0, 5, (KERNEL_DATA, DONE))
    });
    check(
        "a 1 kHz timer of the client's kernel ticks during system calls of handlers",
        &mut || timer(&mut client, at::rig_timer_kernel(), 200_000),
    );
    check(
        "what was missing in the server view is found in the server's memory",
        &mut || missing(&mut client, &server),
    );
    check(
        "what the server's process maps where it had memory of its VM is not reached",
        &mut || reused(&mut client, &server),
    );
    check(
        "a handler drives an accelerator, and only its doorbell exits",
        &mut || accelerator(&mut client),
    );
    faults(check, &mut client);
    check(
        "a delegation while another one goes on is refused",
        &mut || {
            client.set_busy(true);
            expect(&mut client, ADD, 3, 4, (0, BUSY))?;
            client.set_busy(false);
            expect(&mut client, ADD, 3, 4, (13, DONE))
        },
    );
    check(
        "a client that resumes what was not parked harms itself only",
        &mut || {
            let parked = WINDOW + trampoline::parked_offset();
            let start = Start::new(at::rig_false_resume(), [parked, 0, 0]).interrupted();
            // It continues with what the last delegation left on its stack, and is told so.
            let end = client.run(&start)?;
            ensure!(end == (trampoline::LOST, ABORTED), "{end:x?}");
            expect(&mut client, ADD, 3, 4, (13, DONE))
        },
    );
    ends(check, &mut client, &mut server);
    // A client that outlives its server keeps the pair's memory until its own end, which the kernel
    // completes later: the next check counts what is in use.
    drop(client);
    drop(server);
    Ok(())
}

/// How pairs end, and what remains of them.
fn ends(check: Check<'_>, client: &mut ClientVm, server: &mut OtherServer) {
    check(
        "a pair that is undone while the client's kernel has an interrupt of a delegation ends it",
        &mut || {
            undone_while_parked(client)?;
            client.client.pair(server.as_fd())?;
            expect(client, ADD, 3, 4, (13, DONE))
        },
    );
    check(
        "a pair that is undone during a delegation ends it",
        &mut || {
            let gate = Arc::clone(&client.client);
            gone(while_inside(client, || Ok(gate.unpair()?))?)
        },
    );
    check("a delegation without a server is answered", &mut || {
        gone(client.run(&Start::call(ADD, 1, 2).interrupted())?)
    });
    check("the client pairs again and delegates", &mut || {
        client.client.pair(server.as_fd())?;
        expect(client, ADD, 1, 2, (5, DONE))
    });
    check(
        "1000 pairs made and undone leave nothing behind",
        &mut || pairs(client, server),
    );
    check("the module stays while it is in use", &mut || {
        let refused = command("rmmod", "gantry_gate")
            .err()
            .context("it was unloaded")?;
        ensure!(
            format!("{refused:#}").contains("temporarily unavailable"),
            "{refused:#}"
        );
        expect(client, ADD, 1, 1, (4, DONE))
    });
    check(
        "a client that is killed during a delegation leaves the server to others",
        &mut || kill_client(client, server),
    );
    check(
        "a server that is killed during a delegation ends it",
        &mut || {
            gone(while_inside(client, || {
                server.kill();
                Ok(())
            })?)
        },
    );
    check("a server that is gone is not paired with", &mut || {
        client.client.unpair()?;
        let refused = client.client.pair(server.as_fd()).err().context("paired")?;
        ensure!(refused.to_string().contains("process is gone"), "{refused}");
        Ok(())
    });
}

/// Loads the module.
pub fn load() -> Result<()> {
    command("insmod", "/modules/gantry_gate.ko")?;
    ensure!(
        Path::new("/dev/gantry-gate").exists(),
        "there is no /dev/gantry-gate"
    );
    Ok(())
}

fn command(program: &str, argument: &str) -> Result<()> {
    let output = Command::new(program)
        .arg(argument)
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}", text.trim());
    Ok(())
}

/// Calls a handler, and compares value and status.
fn expect(
    client: &mut ClientVm,
    handler: u64,
    first: u64,
    second: u64,
    reply: (u64, u64),
) -> Result<()> {
    let found = client.run(&Start::call(handler, first, second).interrupted())?;
    ensure!(
        found == reply,
        "handler {handler}: {found:x?} instead of {reply:x?}"
    );
    Ok(())
}

/// Waits until the module's counters are as wanted.
fn wait(wanted: impl Fn(&Status) -> bool) -> Result<Status> {
    let gate = Gate::open()?;
    let start = Instant::now();
    loop {
        let status = gate.status()?;
        if wanted(&status) {
            return Ok(status);
        }
        ensure!(start.elapsed() < Duration::from_secs(20), "{status:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn accelerator(client: &mut ClientVm) -> Result<()> {
    const CALLS: u64 = 100;
    let registers = MemoryLayout::Apart.registers();
    // Pages that are only mapped on first use are mapped now.
    expect(client, DRIVER, 1, registers, (1, DONE))?;
    let before = client.client.status()?;
    for number in 1..=CALLS {
        let number = number % 20;
        let factorial = (1..=number).product();
        expect(client, DRIVER, number, registers, (factorial, DONE))?;
    }
    let after = client.client.status()?;
    let exits = after.exits_inside - before.exits_inside;
    let interrupts = after.interrupts_inside - before.interrupts_inside;
    println!(
        "figure exits in the server of {CALLS} uses of an accelerator: doorbells {}, interrupts of \
         the host {interrupts}, others {}",
        after.doorbells - before.doorbells,
        exits - interrupts - (after.doorbells - before.doorbells)
    );
    ensure!(after.doorbells - before.doorbells == CALLS, "{after:?}");
    ensure!(exits - interrupts == CALLS, "{before:?}, then {after:?}");
    Ok(())
}

/// The server's memory consists of 2 MiB pages. What is counted is what the module has allocated.
fn large() -> Result<()> {
    let gate = Gate::open()?;
    let before = gate.status()?;
    let server = OtherServer::at(MemoryLayout::Large)?;
    let mut client = ClientVm::new()?;
    client.client.pair(server.as_fd())?;
    expect(
        &mut client,
        READ,
        MemoryLayout::Large.data(),
        0,
        (0x5e7, DONE),
    )?;
    let after = gate.status()?;
    let pinned = (after.pinned - before.pinned) * window::PAGE;
    let shared = u64::from(SHARED_PAGES);
    let bytes = (after.pages - before.pages - shared) * window::PAGE;
    println!(
        "figure bytes of a pair besides {} MiB of the server's memory and {} KiB shared: {bytes}",
        pinned >> 20,
        shared * 4
    );
    ensure!(pinned == 1 << 30, "{pinned} bytes are pinned");
    ensure!(bytes <= 64 << 10, "{bytes} bytes");
    Ok(())
}

/// The layout of two guests of one kind.
fn same_place() -> Result<()> {
    let server = ServerVm::new(Gate::open()?, MemoryLayout::Same)?;
    let mut client = ClientVm::new()?;
    client.client.pair(server.as_fd())?;
    let ended = (trampoline::EXCEPTION, ABORTED);
    for (handler, first, reply) in [
        (ADD, 7, (29, DONE)),
        (READ, MemoryLayout::Same.data(), (0x5e7, DONE)),
        // The hidden memory is in the server's page table, for its kernel.
        (READ, CLIENT_PML4, ended),
        (WRITE, CLIENT_PML4, ended),
        (SYSTEM_CALL, 0, ended),
        (READ, MemoryLayout::Same.data(), (0x5e7, DONE)),
    ] {
        expect(&mut client, handler, first, 8, reply)?;
    }
    ensure!(client.client.status()?.user_only == 1, "with its kernel");
    let hidden = server.memory.read(CLIENT_PML4);
    ensure!(hidden == HIDDEN, "the server's page became {hidden:#x}");
    // What is mapped later is not reached either, and does no harm.
    server.expose();
    client.client.unpair()?;
    let refused = client.client.pair(server.as_fd()).err().context("paired")?;
    ensure!(refused.to_string().contains("another process"), "{refused}");
    Ok(())
}

fn needed() -> Result<()> {
    let server = ServerVm::new(Gate::open()?, MemoryLayout::Needed)?;
    let client = ClientVm::new()?;
    let refused = client.client.pair(server.as_fd()).err().context("paired")?;
    ensure!(refused.to_string().contains("another process"), "{refused}");
    Ok(())
}

/// Nobody releases what that kernel holds.
fn broken() -> Result<()> {
    // The kernel halts, or switches to another process.
    for call in [(1, 0), (2, MemoryLayout::Apart.tables())] {
        let server = OtherServer::start()?;
        let mut client = ClientVm::new()?;
        client.client.pair(server.as_fd())?;
        let ended = (trampoline::EXIT, ABORTED);
        expect(&mut client, SYSTEM_CALL, call.0, call.1, ended)?;
        // The server is given up in the background.
        wait(|status| status.pinned == 0)?;
        gone(client.run(&Start::call(ADD, 7, 8).interrupted())?)?;
        client.client.unpair()?;
        let refused = client.client.pair(server.as_fd()).err().context("paired")?;
        ensure!(refused.to_string().contains("given up"), "{refused}");
    }
    Ok(())
}

/// As above, and also for a pair that is undone.
fn unpaired_in_kernel() -> Result<()> {
    let server = OtherServer::start()?;
    let mut client = ClientVm::new()?;
    client.client.pair(server.as_fd())?;
    expect(&mut client, ADD, 7, 8, (29, DONE))?;
    let gate = Arc::clone(&client.client);
    // Longer than anybody waits, with interrupts.
    let call = Start::call(SYSTEM_CALL, 0, 1 << 50).interrupted();
    let before = gate.status()?.exits_inside;
    let reply = thread::scope(|scope| {
        let running = scope.spawn(|| client.run(&call));
        let start = Instant::now();
        let is_inside = || gate.status().is_ok_and(|it| it.exits_inside > before + 2);
        while !is_inside() && start.elapsed() < Duration::from_secs(20) {
            thread::sleep(Duration::from_millis(5));
        }
        let unpaired = gate.unpair();
        let reply = running.join().ok().context("the vCPU's thread panicked")?;
        unpaired?;
        reply
    })?;
    gone(reply)?;
    let refused = gate.pair(server.as_fd()).err().context("paired")?;
    ensure!(refused.to_string().contains("given up"), "{refused}");
    Ok(())
}

fn woken() -> Result<()> {
    let server = ServerVm::new(Gate::open()?, MemoryLayout::Apart)?;
    let mut client = ClientVm::new()?;
    client.client.pair(server.as_fd())?;
    expect(&mut client, ADD, 7, 8, (29, DONE))?;
    // A client is inside, and stays.
    let reply = while_inside(&mut client, || {
        let busy = server.server.wake().err().context("woken")?;
        ensure!(busy.number() == Some(libc::EBUSY), "{busy}");
        Ok(())
    })?;
    // It was told to end.
    ensure!(reply.1 == DONE, "{reply:x?}");
    expect(&mut client, ADD, 7, 8, (29, DONE))?;
    server.server.wake()?;
    let awake = (trampoline::AWAKE, ABORTED);
    expect(&mut client, ADD, 7, 8, awake)?;
    // A client that is paired meanwhile waits, too.
    client.client.unpair()?;
    client.client.pair(server.as_fd())?;
    expect(&mut client, ADD, 7, 8, awake)?;
    server.server.sleep()?;
    expect(&mut client, ADD, 7, 8, (29, DONE))?;
    // Other processes must not do this.
    let other = OtherServer::start()?;
    client.client.unpair()?;
    client.client.pair(other.as_fd())?;
    for refused in [other.gate.wake(), other.gate.sleep(), other.gate.retire()] {
        let refused = refused.err().context("taken from another process")?;
        ensure!(refused.number() == Some(libc::EPERM), "{refused}");
    }
    client.client.unpair()?;
    client.client.pair(server.as_fd())?;
    server.server.retire()?;
    gone(client.run(&Start::call(ADD, 7, 8).interrupted())?)
}

/// Each is counted, and what one leaves behind does not affect the other.
fn siblings() -> Result<()> {
    let server = OtherServer::start()?;
    let mut client = ClientVm::new()?;
    client.client.pair(server.as_fd())?;
    ensure!(client.client.status()?.user_only == 0, "without its kernel");
    let sibling = client.sibling()?;
    ensure!(Gate::open()?.status()?.clients == 2, "not two clients");
    sibling.0.pair(server.as_fd())?;
    ensure!(
        sibling.0.status()?.user_only == 1,
        "with a kernel that has PCIDs"
    );
    drop(sibling);
    wait(|status| status.clients == 1)?;
    expect(&mut client, ADD, 7, 8, (29, DONE))?;
    let start = Start {
        kernel: true,
        ..Start::new(at::rig_timer(), [1_000_000, 2_000, 20])
    };
    let wrong = client.run(&start)?;
    ensure!(wrong == (0, 0), "{wrong:x?}");
    Ok(())
}

fn many(client: &mut ClientVm) -> Result<()> {
    // Pages that are only mapped on first use are mapped now.
    client.run(&Start::new(at::rig_many(), [10, 0, 0]))?;
    let before = client.client.status()?;
    let wrong = client.run(&Start::new(at::rig_many(), [MANY, 0, 0]))?;
    let after = client.client.status()?;
    ensure!(wrong == (0, 0), "{} of {MANY} replies are wrong", wrong.0);
    let (all, inside) = (
        after.exits - before.exits,
        after.exits_inside - before.exits_inside,
    );
    println!(
        "figure exits from the first to the last of {MANY} delegations: {}",
        all - 1
    );
    // The single exit is the end of the run.
    ensure!(all == 1 && inside == 0, "{all} exits, {inside} inside");
    println!(
        "figure bytes of page tables of a server view: {}",
        after.tables
    );
    ensure!(
        after.tables <= 64 << 10,
        "{} bytes of page tables",
        after.tables
    );
    Ok(())
}

fn timer(client: &mut ClientVm, code: u64, steps: u64) -> Result<()> {
    let before = client.client.status()?;
    let start = Start {
        kernel: true,
        ..Start::new(code, [1_000_000, steps, 200])
    };
    let wrong = client.run(&start)?;
    let after = client.client.status()?;
    let ticks = client.memory.read(CLIENT_TICKS);
    let (parked, resumed) = (after.parked - before.parked, after.resumed - before.resumed);
    println!(
        "figure ticks of a 1 kHz timer during 200 delegations: {ticks}, in the server: {parked}"
    );
    ensure!(wrong == (0, 0), "{wrong:x?}");
    ensure!(parked == resumed, "{parked} parked, {resumed} resumed");
    ensure!(parked >= 50, "{parked} of {ticks} ticks came in the server");
    ensure!(after.aborted == before.aborted, "a delegation was ended");
    Ok(())
}

/// The thread asks for the rest of its delegation, and is told why there is none.
fn undone_while_parked(client: &mut ClientVm) -> Result<()> {
    // The host's tick comes at any time, and outside of the handler it parks nothing. A handler
    // that was missed is released, and the next one stays longer.
    for stay in [1_000_000, 4_000_000, 16_000_000] {
        // SAFETY: a word of shared memory, which stays mapped: the handler continues until it is
        // not 0.
        unsafe { client.shared().write_volatile(0) };
        let before = client.client.status()?.parked;
        client.stop_at_tick();
        client.run(&Start {
            kernel: true,
            ..Start::new(at::rig_timer_spin(), [stay, 0, 0])
        })?;
        let parked = client.client.status()?.parked - before;
        ensure!(parked <= 1, "{parked} parked");
        if parked == 1 {
            client.client.unpair()?;
            return gone(client.go_on()?);
        }
        // SAFETY: as above.
        unsafe { client.shared().write_volatile(1) };
        client.go_on()?;
    }
    bail!("no tick came while the handler ran")
}

fn missing(client: &mut ClientVm, server: &OtherServer) -> Result<()> {
    expect(client, READ, MemoryLayout::Apart.data(), 0, (0x5e7, DONE))?;
    let before = client.client.status()?;
    server.discard();
    expect(client, READ, MemoryLayout::Apart.data(), 0, (0xbeef, DONE))?;
    let after = client.client.status()?;
    ensure!(
        after.violations > before.violations,
        "the old page was still there"
    );
    // What a handler writes is there afterwards. The writer returns nothing in particular.
    client.run(&Start::call(WRITE, MemoryLayout::Apart.data(), 0x77).interrupted())?;
    expect(client, READ, MemoryLayout::Apart.data(), 0, (0x77, DONE))
}

fn reused(client: &mut ClientVm, server: &OtherServer) -> Result<()> {
    let page = MemoryLayout::Apart.unmapped();
    expect(client, READ, page, 0, (0x5e8, DONE))?;
    server.unmap();
    let ended = (trampoline::VIOLATION, ABORTED);
    expect(client, READ, page, 0, ended)?;
    expect(client, WRITE, page, 0x77, ended)?;
    expect(client, ADD, 7, 8, (29, DONE))
}

fn faults(check: Check<'_>, client: &mut ClientVm) {
    let table = WINDOW + window::TABLE + 64;
    let ended = |reason| (reason, ABORTED);
    for (name, handler, first, reply) in [
        (
            "a handler without memory behind its address is ended",
            READ,
            SERVER_HOLE,
            ended(trampoline::VIOLATION),
        ),
        (
            "a handler cannot write the handler table",
            WRITE,
            table,
            ended(trampoline::VIOLATION),
        ),
        (
            "a handler cannot read the trampoline",
            READ,
            WINDOW,
            ended(trampoline::VIOLATION),
        ),
        (
            "a handler cannot write its side's page",
            WRITE,
            WINDOW + window::PRIVATE,
            ended(trampoline::VIOLATION),
        ),
        (
            "a handler that writes where a doorbell is, but something else, is ended",
            WRITE,
            SERVER_DOORBELL,
            ended(trampoline::VIOLATION),
        ),
        (
            "an exception in a handler ends it",
            FAIL,
            0,
            ended(trampoline::EXCEPTION),
        ),
        (
            "a page fault in a handler ends it",
            READ,
            0x123_4567_8000,
            ended(trampoline::EXCEPTION),
        ),
        (
            "a hypercall in a handler ends it",
            HYPERCALL,
            0,
            ended(trampoline::EXIT),
        ),
        (
            "a handler that does not exist is refused",
            1000,
            0,
            (0, NO_HANDLER),
        ),
    ] {
        check(name, &mut || {
            expect(client, handler, first, 0, reply)?;
            expect(client, ADD, 3, 4, (13, DONE))
        });
    }
    const UNDEFINED: u64 = 0x1006;
    const PROTECTION: u64 = 0x100d;
    for (name, code, vector) in [
        (
            "the client gets a fault for an index above 1",
            at::rig_wrong_index(),
            UNDEFINED,
        ),
        (
            "the client gets a fault for entering elsewhere",
            at::rig_wrong_entry(),
            PROTECTION,
        ),
        (
            "the client gets a fault for writing the handler table",
            at::rig_write_table(),
            PROTECTION,
        ),
        (
            "the client gets a fault for writing the trampoline",
            at::rig_write_trampoline(),
            PROTECTION,
        ),
    ] {
        check(name, &mut || {
            let before = client.client.status()?.refused;
            let (found, at) = client.run(&Start::new(code, [0; 3]).interrupted())?;
            ensure!(found == vector, "{found:#x} at {at:#x}");
            ensure!(
                client.client.status()?.refused > before,
                "it was not counted"
            );
            expect(client, ADD, 3, 4, (13, DONE))
        });
    }
}

/// Calls `act` while the client's vCPU is in the server. Returns the delegation's reply.
fn while_inside(client: &mut ClientVm, act: impl FnOnce() -> Result<()>) -> Result<(u64, u64)> {
    // SAFETY: two words of shared memory, which stays mapped as long as the client exists.
    let [stop, inside] = unsafe {
        let words = client.shared().cast::<AtomicU64>();
        [&*words, &*words.add(1)]
    };
    stop.store(0, Ordering::SeqCst);
    inside.store(0, Ordering::SeqCst);
    thread::scope(|scope| {
        let running = scope.spawn(|| client.run(&Start::call(SPIN, 0, 0).interrupted()));
        let start = Instant::now();
        while inside.load(Ordering::SeqCst) == 0 && start.elapsed() < Duration::from_secs(10) {
            thread::sleep(Duration::from_millis(5));
        }
        let acted = act();
        // If nothing has ended the delegation within two seconds, it is ended in a way that fails
        // the check.
        let start = Instant::now();
        while !running.is_finished() && start.elapsed() < Duration::from_secs(2) {
            thread::sleep(Duration::from_millis(5));
        }
        stop.store(1, Ordering::SeqCst);
        let reply = running
            .join()
            .ok()
            .context("the vCPU's thread panicked")??;
        acted?;
        ensure!(
            inside.load(Ordering::SeqCst) == 1,
            "it never came to the server"
        );
        Ok(reply)
    })
}

fn gone(reply: (u64, u64)) -> Result<()> {
    let wanted = (trampoline::SERVER_GONE, ABORTED);
    ensure!(reply == wanted, "{reply:x?}");
    Ok(())
}

fn kill_client(client: &mut ClientVm, server: &OtherServer) -> Result<()> {
    let clients = client.client.status()?.clients;
    let other = Process::start(|ready| {
        let mut client = ClientVm::new()?;
        client.client.pair(server.as_fd())?;
        // SAFETY: a word of shared memory, which stays mapped.
        let inside = unsafe { &*client.shared().cast::<AtomicU64>().add(1) };
        thread::scope(|scope| {
            scope.spawn(|| client.run(&Start::call(SPIN, 0, 0).interrupted()));
            while inside.load(Ordering::SeqCst) == 0 {
                thread::sleep(Duration::from_millis(5));
            }
            ready();
        });
        Ok(())
    })?;
    ensure!(client.client.status()?.clients == clients + 1, "no client");
    drop(other);
    wait(|status| status.clients == clients)?;
    expect(client, ADD, 10, 1, (31, DONE))
}

fn pairs(client: &mut ClientVm, server: &OtherServer) -> Result<()> {
    client.client.unpair()?;
    let before = client.client.status()?;
    for _ in 0..PAIRS {
        client.client.pair(server.as_fd())?;
        client.client.unpair()?;
    }
    let after = client.client.status()?;
    ensure!(
        [before.pages, before.pinned, before.servers, before.clients]
            == [after.pages, after.pinned, after.servers, after.clients],
        "{before:?}, then {after:?}"
    );
    client.client.pair(server.as_fd())?;
    Ok(())
}
