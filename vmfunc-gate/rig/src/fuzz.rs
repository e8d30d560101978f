//! Calls the module with random arguments, as root and as a user who was given access to the
//! device.

use std::{
    fs,
    os::fd::{AsFd, AsRawFd},
    os::unix::fs::PermissionsExt,
};

use anyhow::{Context, Result, ensure};
use vmfunc_gate::host::{CALLS, DEVICE, Gate};

use crate::vm::{
    ADD, COMPUTE, ClientVm, MemoryLayout, OtherServer, Process, READ, SERVER_BYTES, SPIN, Start,
    WINDOW,
};

/// The number of calls of each of the two users.
const CALLS_EACH: u64 = 4000;
const NOBODY: u32 = 65534;

/// The number of delegations of the hostile client.
const DELEGATIONS: u64 = 300;

/// Calls handlers with random arguments. This destroys the server, but nothing else.
pub fn delegations() -> Result<()> {
    let mut random = Random(0x0dd_ba11);
    let server = OtherServer::start()?;
    let mut client = ClientVm::new()?;
    client.client.pair(server.as_fd())?;
    let mut ends = [0_u64; 4];
    for _ in 0..DELEGATIONS {
        let handler = match random.next() % 8 {
            // Except for those that run forever with any argument.
            SPIN | COMPUTE => READ,
            handler => handler,
        };
        let handler = match random.next() % 4 {
            0 => random.next(),
            _ => handler,
        };
        let [first, second] = [(); 2].map(|()| match random.next() % 4 {
            0 => WINDOW + random.next() % 0x2_0000,
            1 => MemoryLayout::Apart.gpa() + random.next() % SERVER_BYTES as u64,
            2 => random.next() % 0x1000,
            _ => random.next(),
        });
        let start = Start::call(handler, first, second).interrupted();
        let (value, status) = client.run(&start)?;
        ensure!(status < 4, "handler {handler:#x}: {value:#x}, {status:#x}");
        ends[status as usize] += 1;
        client.set_busy(false);
    }
    println!(
        "figure {DELEGATIONS} hostile delegations: {} done, {} without a handler, {} ended",
        ends[0], ends[1], ends[2]
    );
    // Another server serves the client as before.
    let other = OtherServer::start()?;
    client.client.unpair()?;
    client.client.pair(other.as_fd())?;
    let found = client.run(&Start::call(ADD, 7, 8).interrupted())?;
    ensure!(found == (29, 0), "{found:x?}");
    quiet()
}

pub fn run() -> Result<()> {
    fs::set_permissions(DEVICE, fs::Permissions::from_mode(0o666))?;
    fs::set_permissions("/dev/kvm", fs::Permissions::from_mode(0o666))?;
    for (user, seed) in [(0, 1), (NOBODY, 2)] {
        // A process of its own, so that what it left behind is gone with it.
        Process::start(|ready| {
            // The server's memory is locked on this user's account.
            let limit = libc::rlimit {
                rlim_cur: 256 << 20,
                rlim_max: 256 << 20,
            };
            // SAFETY: only reads the limit.
            unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) };
            // SAFETY: no preconditions; the process has one thread.
            let done = unsafe { libc::setresuid(user, user, user) };
            ensure!(done == 0, "cannot become user {user}");
            calls(seed)?;
            ready();
            Ok(())
        })
        .with_context(|| format!("as user {user}"))?;
    }
    quiet()
}

/// Checks that the kernel has not complained since the module was loaded.
fn quiet() -> Result<()> {
    let log = kernel_log()?;
    let (_, log) = log
        .split_once("gantry_gate: loading")
        .context("the kernel's log does not have the start of the module")?;
    let bad = log.lines().find(|line| {
        ["BUG:", "WARNING:", "Oops", "general protection"]
            .iter()
            .any(|word| line.contains(word))
    });
    ensure!(
        bad.is_none(),
        "the kernel's log says: {}",
        bad.unwrap_or_default()
    );
    Ok(())
}

/// A generator that returns the same numbers each time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

fn calls(seed: u64) -> Result<()> {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let server = OtherServer::start()?;
    let client = ClientVm::new()?;
    let vcpu = client.vcpu.as_raw_fd();
    let mut accepted = 0;
    let mut fresh = Gate::open()?;
    for turn in 0..CALLS_EACH {
        if turn % 16 == 0 {
            fresh = Gate::open()?;
        }
        let file = match random.next() % 4 {
            0 => server.as_fd().as_raw_fd(),
            1 => client.client.as_fd().as_raw_fd(),
            _ => fresh.as_fd().as_raw_fd(),
        };
        let mut argument = [0_u64; 16];
        for word in &mut argument {
            // Small numbers, page addresses, plausible pointers, and arbitrary values.
            *word = match random.next() % 8 {
                0 => random.next() % 8,
                1 => (random.next() % (1 << 48)) & !0xfff,
                2 => (random.next() % (1 << 30)) & !0xfff,
                3 => (&raw const random) as u64,
                4 => 0,
                5 => random.next() % 600,
                _ => random.next(),
            };
        }
        // In many cases, valid descriptors.
        match random.next() % 4 {
            0 => argument[0] = (argument[0] & !0xffff_ffff) | vcpu as u64,
            1 => argument[0] = (argument[0] & !0xffff_ffff) | (random.next() % 12),
            2 => argument[0] = server.as_fd().as_raw_fd() as u64,
            _ => {}
        }
        let call = match random.next() % 8 {
            0 => random.next() & 0xffff_ffff,
            1 => 0xb700 | (random.next() % 16) | ((random.next() % 4) << 30),
            _ => CALLS[(random.next() % CALLS.len() as u64) as usize],
        };
        let pointer = match random.next() % 16 {
            0 => random.next() as *mut u64,
            1 => std::ptr::null_mut(),
            _ => argument.as_mut_ptr(),
        };
        // SAFETY: the module writes at most its counters, which the argument has room for, or to an
        // address where this process has nothing mapped: a pointer of 64 random bits.
        let result = unsafe { libc::ioctl(file, call, pointer) };
        accepted += u64::from(result == 0);
    }
    ensure!(
        accepted > CALLS_EACH / 20,
        "only {accepted} calls were accepted"
    );
    Ok(())
}

/// The kernel's log since it started.
pub fn kernel_log() -> Result<String> {
    const READ_ALL: libc::c_int = 3;
    let mut buffer = vec![0_u8; 1 << 20];
    // SAFETY: writes no more than there is room for.
    let length = unsafe {
        libc::klogctl(
            READ_ALL,
            buffer.as_mut_ptr().cast(),
            buffer.len() as libc::c_int,
        )
    };
    ensure!(length >= 0, "cannot read the kernel's log");
    buffer.truncate(length as usize);
    Ok(String::from_utf8_lossy(&buffer).into_owned())
}
