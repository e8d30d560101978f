//! Runs in the Linux guests of [`linux`](crate::linux), as their first process.
//!
//! A server's guest registers handlers and serves one client after another. A client's guest finds
//! a process that can be paired in the way it needs, and checks what handlers do. Both print to the
//! machine's debug console.

use std::{
    fs::{self, File},
    io::Write,
    os::fd::AsRawFd,
    sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use vmfunc_gate::{
    client::Failure,
    guest::{self, Client, Ended, Error, Handler, Server, slow},
    port::Reason,
    window::PAGE,
};

use crate::{
    init::{mount_all, print},
    opencl, remoting,
};

/// Printed by a guest when all of its checks are done.
pub const DONE: &str = "done";
/// Printed by a client's guest when one of its processes was killed while it was paired.
pub const KILLED: &str = "killed";
/// Printed before another process asks.
pub const ASKING: &str = "asking";
/// How long nobody asks in between.
const QUIET: Duration = Duration::from_secs(5);
/// Printed by a client's guest before it delegates work that takes long in the server's kernel.
pub const LONG: &str = "long";

fn check(name: &str, run: impl FnOnce() -> Result<()>) {
    match run() {
        Ok(()) => print(&format!("check {name} ... ok")),
        Err(error) => print(&format!("check {name} ... FAILED: {error:#}")),
    }
}

/// The guest's first process.
pub fn run() -> ! {
    allow_ports();
    // It is preceded by words of the command line that Linux does not know.
    let role = std::env::args().next_back().unwrap_or_default();
    let done = match role.as_str() {
        "server" => serve(),
        "waiter" => wait_inside(),
        "opencl-server" => opencl::run(opencl::serve),
        "opencl-client" => opencl::run(opencl::compute),
        _ => delegate(),
    };
    if let Err(error) = done {
        print(&format!(
            "check the {role} runs to its end ... FAILED: {error:#}"
        ));
    }
    print(DONE);
    loop {
        thread::park();
    }
}

/// Creates another process of this guest, for which its parent waits. Returns true in the new
/// process.
fn fork() -> Result<bool> {
    // SAFETY: this process has one thread.
    let pid = unsafe { libc::fork() };
    ensure!(pid >= 0, "no process");
    if pid == 0 {
        allow_ports();
        return Ok(true);
    }
    let mut status = 0;
    // SAFETY: waits for a child.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    ensure!(status == 0, "another process ended with {status:#x}");
    Ok(false)
}

/// Ends a process that has a parent.
fn leave() -> ! {
    // SAFETY: the kernel releases everything that the process has.
    unsafe { libc::_exit(0) }
}

fn allow_ports() {
    // SAFETY: the machine's ports have no effect on this process's memory.
    unsafe { libc::iopl(3) };
}

static WRITTEN: AtomicI32 = AtomicI32::new(-1);
static ZEROS: AtomicI32 = AtomicI32::new(-1);
static RANDOM: AtomicI32 = AtomicI32::new(-1);
static FINISHED: AtomicBool = AtomicBool::new(false);

const FILE: &str = "/tmp/written";
/// The number of the server's processes before the one that serves.
const EARLIER: u32 = 20;
const TEXT_WRITTEN: &str = "written by a client's vCPU";
/// Written by slow work.
const TEXT_SLOW: &str = ", and by the server's own";

/// The handlers, by index.
const ADD: usize = 0;
const GETPID: usize = 1;
const WRITE: usize = 2;
const ZERO: usize = 3;
const FILL: usize = 4;
const TOUCH: usize = 5;
const LENGTH: usize = 6;
const SLOW: usize = 7;
const FINISH: usize = 8;
const BUSY: usize = 9;
const WAIT: usize = 10;
const HANDLERS: [Handler; 11] = [
    add, getpid, write, zero, fill, touch, length, work, finish, busy, wait,
];

extern "C" fn add(first: u64, second: u64) -> u64 {
    first * 3 + second
}

extern "C" fn getpid(_: u64, _: u64) -> u64 {
    // SAFETY: no preconditions. The C library's function might cache the result.
    unsafe { libc::syscall(libc::SYS_getpid) as u64 }
}

extern "C" fn write(from: u64, length: u64) -> u64 {
    let file = WRITTEN.load(Ordering::Relaxed);
    // SAFETY: the kernel checks the address.
    unsafe { libc::write(file, from as *const libc::c_void, length as usize) as u64 }
}

extern "C" fn zero(to: u64, length: u64) -> u64 {
    let file = ZEROS.load(Ordering::Relaxed);
    // SAFETY: as above.
    unsafe { libc::read(file, to as *mut libc::c_void, length as usize) as u64 }
}

extern "C" fn fill(to: u64, length: u64) -> u64 {
    let file = RANDOM.load(Ordering::Relaxed);
    // SAFETY: as above.
    unsafe { libc::read(file, to as *mut libc::c_void, length as usize) as u64 }
}

/// Pages that the server's process has not used yet, and must not have locked.
static FRESH: AtomicU64 = AtomicU64::new(0);
const FRESH_PAGES: u64 = 64;
/// The destination of large reads.
static BIG: AtomicU64 = AtomicU64::new(0);
const BIG_BYTES: usize = 8 << 20;

/// Causes page faults, which the server's kernel handles.
extern "C" fn touch(value: u64, _: u64) -> u64 {
    let fresh = FRESH.load(Ordering::Relaxed);
    (0..FRESH_PAGES).fold(0, |sum, page| {
        let at = (fresh + page * PAGE) as *mut u64;
        // SAFETY: memory that this process has mapped for this purpose.
        unsafe {
            at.write_volatile(value + page);
            sum + at.read_volatile()
        }
    })
}

extern "C" fn length(_: u64, _: u64) -> u64 {
    guest::shared().len() as u64
}

extern "C" fn work(first: u64, second: u64) -> u64 {
    slow(first, second)
}

/// Stays in the kernel for hours, without blocking.
extern "C" fn busy(_: u64, _: u64) -> u64 {
    let file = ZEROS.load(Ordering::Relaxed);
    let memory = BIG.load(Ordering::Relaxed);
    let mut sum = 0;
    for _ in 0..1_000_000_000 {
        // SAFETY: the kernel checks the address.
        sum += unsafe { libc::read(file, memory as *mut libc::c_void, BIG_BYTES) as u64 };
    }
    sum
}

/// Blocks in the kernel, which no handler is allowed to do.
extern "C" fn wait(_: u64, _: u64) -> u64 {
    thread::sleep(Duration::from_millis(1));
    0
}

extern "C" fn finish(_: u64, _: u64) -> u64 {
    FINISHED.store(true, Ordering::Relaxed);
    0
}

/// Slow work: blocks, which no handler can, and uses files and the shared memory.
fn slow_work(first: u64, second: u64) -> u64 {
    if first == remoting::SLOW {
        return remoting::slow_work();
    }
    thread::sleep(Duration::from_millis(first));
    let file = File::options().append(true).open(FILE);
    let written = file.and_then(|mut file| file.write_all(TEXT_SLOW.as_bytes()));
    let memory = guest::shared();
    // SAFETY: the memory has this length; the client waits.
    let sum: u64 = unsafe {
        let bytes = std::slice::from_raw_parts_mut(memory.cast::<u8>().as_ptr(), PAGE as usize);
        bytes[0] = 7;
        bytes[1..].iter().map(|byte| u64::from(*byte)).sum()
    };
    if written.is_err() {
        return 0;
    }
    sum + second
}

fn serve() -> Result<()> {
    mount_all()?;
    // Its process number must not be one that a process of the client has, too.
    for _ in 0..EARLIER {
        if fork()? {
            leave();
        }
    }
    match fork() {
        Ok(true) => {}
        Ok(false) => return Ok(()),
        // In the end its kernel may have been left in the middle of something.
        Err(error) => {
            print(&format!("{error:#}"));
            loop {
                thread::park();
            }
        }
    }
    let written = File::create(FILE)?;
    let zeros = File::open("/dev/zero")?;
    let random = File::open("/dev/urandom")?;
    WRITTEN.store(written.as_raw_fd(), Ordering::Relaxed);
    ZEROS.store(zeros.as_raw_fd(), Ordering::Relaxed);
    RANDOM.store(random.as_raw_fd(), Ordering::Relaxed);
    let mut big = vec![1_u8; BIG_BYTES];
    BIG.store(big.as_mut_ptr() as u64, Ordering::Relaxed);
    remoting::prepare()?;
    let handlers: Vec<_> = HANDLERS.into_iter().chain(remoting::HANDLERS).collect();
    let mut server = Server::register(&handlers)?;
    // SAFETY: no preconditions. From here on, mapped memory is not populated until it is used.
    unsafe { libc::munlockall() };
    // SAFETY: a new mapping.
    let fresh = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            (FRESH_PAGES * PAGE) as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    FRESH.store(fresh as u64, Ordering::Relaxed);
    print(&format!("serving as process {}", std::process::id()));
    while !FINISHED.load(Ordering::Relaxed) {
        let ended = server.serve(slow_work)?;
        print(&format!("a client has ended: {ended:?}"));
    }
    check("the server's file has what both wrote", || {
        let text = fs::read_to_string(FILE)?;
        ensure!(text == format!("{TEXT_WRITTEN}{TEXT_SLOW}"), "{text:?}");
        Ok(())
    });
    print(DONE);
    // The next client is killed.
    check("a server whose client was killed hears of it", || {
        let ended = server.serve(slow_work)?;
        ensure!(ended == Ended::Lost, "{ended:?}");
        Ok(())
    });
    Ok(())
}

/// The maximum number of the client's processes to try.
const PROCESSES: u32 = 200;
const MANY: u64 = 10_000;

/// A process that is paired, and is killed.
fn die() -> Result<()> {
    // SAFETY: this process has one thread.
    let pid = unsafe { libc::fork() };
    ensure!(pid >= 0, "no process");
    if pid == 0 {
        allow_ports();
        match Client::pair() {
            // SAFETY: kills this process.
            Ok(_client) => unsafe { libc::kill(libc::getpid(), libc::SIGKILL) },
            Err(error) => {
                print(&format!("not paired: {error}"));
                leave()
            }
        };
    }
    let mut status = 0;
    // SAFETY: waits for a child.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    ensure!(
        libc::WIFSIGNALED(status),
        "the process ended with {status:#x}"
    );
    print(KILLED);
    thread::sleep(QUIET);
    print(ASKING);
    Ok(())
}

fn delegate() -> Result<()> {
    mount_all()?;
    die()?;
    let start = Instant::now();
    // Processes that are paired first without and then with the server's kernel. Their parents
    // wait, and keep their page tables.
    for tried in 1..=PROCESSES {
        let client = match Client::pair() {
            Ok(client) if !client.has_kernel() => client,
            // Or its page table is where the server's process has memory.
            Ok(_)
            | Err(Error::Refused {
                reason: Reason::NoKernel,
                ..
            }) => {
                if !fork()? {
                    return Ok(());
                }
                continue;
            }
            Err(error) => return Err(error).context("at first"),
        };
        print(&format!(
            "paired after {:?}, process {tried}",
            start.elapsed()
        ));
        check(
            "a handler of a Linux process computes where both guests have memory",
            || user_only(&client),
        );
        check(
            "a worker of a Linux process carries out an application's calls, by delegation",
            || {
                for figure in remoting::compute(client, HANDLERS.len())? {
                    print(&format!("figure {figure}"));
                }
                Ok(())
            },
        );
        return with_kernel(start);
    }
    bail!("{PROCESSES} processes were paired with the server's kernel")
}

fn user_only(client: &Client) -> Result<()> {
    let found = client.delegate(ADD, 7, 8)?;
    ensure!(found == 29, "{found}");
    let refused = client.delegate(GETPID, 0, 0);
    ensure!(refused == Err(Failure::Exception), "{refused:?}");
    let found = client.delegate(ADD, 1, 2)?;
    ensure!(found == 5, "{found}");
    Ok(())
}

/// Pairs a process with the server's kernel: this one or another one, for which this one waits.
/// Returns the number of tries in the process that is paired, and None in the others.
fn pair_somebody() -> Result<Option<(Client, u32)>> {
    for tried in 1..=PROCESSES {
        match Client::pair_with_kernel() {
            Ok(client) => return Ok(Some((client, tried))),
            Err(Error::Refused {
                reason: Reason::NoKernel,
                ..
            }) => {
                if !fork()? {
                    return Ok(None);
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    bail!("none of {PROCESSES} processes could be paired")
}

fn with_kernel(start: Instant) -> Result<()> {
    let Some((client, tried)) = pair_somebody()? else {
        return Ok(());
    };
    print(&format!(
        "figure processes of the client until one was paired with the server's kernel: {tried}, {:?}",
        start.elapsed()
    ));
    paired(&client);
    drop(client);
    print(DONE);
    killed()
}

fn paired(client: &Client) {
    let memory = client.shared().cast::<u8>().as_ptr();
    let mut pid = 0;
    check("a handler of a Linux process computes", || {
        let found = client.delegate(ADD, 7, 8)?;
        ensure!(found == 29, "{found}");
        let none = HANDLERS.len() + remoting::HANDLERS.len();
        let refused = client.delegate(none, 0, 0);
        ensure!(
            refused == Err(Failure::NoHandler(none as u64)),
            "{refused:?}"
        );
        let found = client.delegate(LENGTH, 0, 0)?;
        ensure!(found == client.shared().len() as u64, "{found}");
        Ok(())
    });
    check(
        "a handler's system call reaches the server's kernel",
        || {
            pid = client.delegate(GETPID, 0, 0)?;
            // The server's process number is one that this guest has not reached, and not its own.
            ensure!(
                pid > u64::from(EARLIER) && pid < 1000,
                "process {pid}, this is {}",
                std::process::id()
            );
            Ok(())
        },
    );
    check("a handler writes to a file of the server", || {
        // SAFETY: the shared memory is longer.
        unsafe { memory.copy_from(TEXT_WRITTEN.as_ptr(), TEXT_WRITTEN.len()) };
        let length = TEXT_WRITTEN.len() as u64;
        let found = client.delegate(WRITE, memory as u64, length)?;
        ensure!(found == length, "{found:#x}");
        Ok(())
    });
    check("a handler reads a character device", || {
        for (handler, zeros) in [(ZERO, true), (FILL, false)] {
            let found = client.delegate(handler, memory as u64, PAGE)?;
            ensure!(found == PAGE, "{found:#x}");
            // SAFETY: a page of the shared memory, which nobody writes meanwhile.
            let page = unsafe { std::slice::from_raw_parts(memory, PAGE as usize) };
            let sum: u64 = page.iter().map(|byte| u64::from(*byte)).sum();
            ensure!((sum == 0) == zeros, "sum {sum} of handler {handler}");
        }
        Ok(())
    });
    check("a handler's page faults are served by its kernel", || {
        let found = client.delegate(TOUCH, 100, 0)?;
        ensure!(
            found == (0..FRESH_PAGES).map(|page| 100 + page).sum::<u64>(),
            "{found}"
        );
        Ok(())
    });
    check(
        "many system calls while the client's kernel has its timer",
        || {
            let before = client.exits();
            for _ in 0..MANY {
                let found = client.delegate(GETPID, 0, 0)?;
                ensure!(found == pid, "process {found}");
            }
            let exits = client.exits().wrapping_sub(before);
            print(&format!(
                "figure exits in the server of {MANY} system calls, interrupts not counted: {exits}"
            ));
            Ok(())
        },
    );
    check(
        "a handler has its kernel work for long, and the server stands still again",
        || slow_checks(client, memory),
    );
    check("the server is told to finish", || {
        ensure!(client.delegate(FINISH, 0, 0)? == 0, "not told");
        Ok(())
    });
}

/// A process that is killed in a system call of a handler.
fn killed() -> Result<()> {
    let Some((client, _)) = pair_somebody()? else {
        return Ok(());
    };
    let memory = client.shared();
    print(LONG);
    loop {
        let found = client.delegate(BUSY, 0, memory.len() as u64)?;
        ensure!(found > 0, "{found}");
    }
}

/// A process whose handler blocks, which the server does not survive.
fn wait_inside() -> Result<()> {
    mount_all()?;
    let Some((client, _)) = pair_somebody()? else {
        return Ok(());
    };
    check("a handler that waits in its kernel is ended", || {
        let found = client.delegate(ADD, 1, 2)?;
        ensure!(found == 5, "{found}");
        let ended = client.delegate(WAIT, 0, 0);
        ensure!(ended == Err(Failure::Exit), "{ended:?}");
        let gone = client.delegate(ADD, 1, 2);
        ensure!(gone == Err(Failure::ServerGone), "{gone:?}");
        Ok(())
    });
    print(DONE);
    Ok(())
}

fn slow_checks(client: &Client, memory: *mut u8) -> Result<()> {
    const MILLISECONDS: u64 = 20;
    for page in 0..PAGE as usize {
        // SAFETY: the shared memory is longer.
        unsafe { memory.add(page).write_volatile(1) };
    }
    let start = Instant::now();
    let found = client.delegate(SLOW, MILLISECONDS, 5)?;
    let took = start.elapsed();
    print(&format!(
        "figure slow work of {MILLISECONDS} ms takes {took:?} of the client's time"
    ));
    // All but the first byte, plus the argument.
    ensure!(found == PAGE - 1 + 5, "{found}");
    ensure!(took >= Duration::from_millis(MILLISECONDS), "{took:?}");
    // SAFETY: as above.
    let first = unsafe { memory.read_volatile() };
    ensure!(first == 7, "the server wrote {first}");
    let found = client.delegate(ADD, 1, 1)?;
    ensure!(found == 4, "{found}");
    Ok(())
}
