//! What runs in the Linux guests of [`linux`](crate::linux), as their first process.
//!
//! A guest talks to its VMM through a port: it writes what it wants, with arguments in registers,
//! and reads the answer. The VMM sees the process's page table and segment bases meanwhile.

use std::{
    arch::asm,
    fs::{self, File},
    os::fd::AsRawFd,
    ptr::NonNull,
    sync::atomic::{AtomicI32, Ordering},
};

use anyhow::{Context, Result, ensure};
use vmfunc_gate::{
    client::{Client, Failure},
    window::{self, PAGE},
};

use crate::vm::WINDOW;

/// For calls, and their answers.
pub const PORT: u16 = 0x510;
/// For text.
pub const TEXT: u16 = 0x511;
/// Where both guests have the window's pages.
pub const WINDOW_GPA: u64 = 0x8000_0000;
/// Pages of shared memory.
pub const SHARED_PAGES: u32 = 16;

/// What a guest wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// To be the server of an array of handlers: its address, and how many; above those 32 bits,
    /// the process's number.
    Serve,
    /// To be a client: the number of the server's process if it is paired, else 0. The server is
    /// one with memory everywhere.
    Pair,
    /// To be a client of the server that its kernel has been told of.
    Again,
    /// Exits in the server that were no interrupts.
    Exits,
    /// Nothing more; how many checks failed.
    Done,
}

impl Call {
    /// By its number.
    pub fn of(number: u8) -> Option<Self> {
        [
            Self::Serve,
            Self::Pair,
            Self::Again,
            Self::Exits,
            Self::Done,
        ]
        .into_iter()
        .find(|call| *call as u8 == number)
    }

    fn make(self, first: u64, second: u64) -> u32 {
        let answer;
        // SAFETY: the VMM's port; it reads memory at most.
        unsafe {
            asm!(
                "out dx, eax",
                in("dx") PORT,
                in("eax") self as u32,
                in("rdi") first,
                in("rsi") second,
            );
            asm!("in eax, dx", in("dx") PORT, out("eax") answer);
        }
        answer
    }
}

fn print(text: &str) {
    for byte in text.bytes().chain([b'\n']) {
        // SAFETY: the VMM's port.
        unsafe { asm!("out dx, al", in("dx") TEXT, in("al") byte) };
    }
}

fn check(failed: &mut u64, name: &str, run: impl FnOnce() -> Result<()>) {
    match run() {
        Ok(()) => print(&format!("check {name} ... ok")),
        Err(error) => {
            *failed += 1;
            print(&format!("check {name} ... FAILED: {error:#}"));
        }
    }
}

/// Is the guest's first process.
pub fn run() -> ! {
    allow_ports();
    // Before it are words of the command line that Linux does not know.
    let role = std::env::args().next_back().unwrap_or_default();
    let done = match role.as_str() {
        "server" => serve(),
        _ => delegate(),
    };
    if let Err(error) = done {
        print(&format!(
            "check the {role} runs to its end ... FAILED: {error:#}"
        ));
    }
    Call::Done.make(1, 0);
    loop {
        std::thread::park();
    }
}

fn mount(kind: &std::ffi::CStr, to: &std::ffi::CStr) -> Result<()> {
    // SAFETY: strings that end with zeros.
    let done = unsafe {
        libc::mkdir(to.as_ptr(), 0o755);
        libc::mount(
            kind.as_ptr(),
            to.as_ptr(),
            kind.as_ptr(),
            0,
            std::ptr::null(),
        )
    };
    ensure!(
        done == 0,
        "cannot mount {kind:?}: {}",
        std::io::Error::last_os_error()
    );
    Ok(())
}

/// Puts the window's pages, which the guest has no driver for, where the trampoline expects them.
fn map_window() -> Result<()> {
    let memory = File::options()
        .read(true)
        .write(true)
        .open("/dev/mem")
        .context("/dev/mem")?;
    let length = window::SHARED + u64::from(SHARED_PAGES) * PAGE;
    // SAFETY: nothing of this process is at that address.
    let at = unsafe {
        libc::mmap(
            WINDOW as *mut libc::c_void,
            length as usize,
            libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC,
            libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE,
            memory.as_raw_fd(),
            WINDOW_GPA as libc::off_t,
        )
    };
    let failed = std::io::Error::last_os_error();
    ensure!(at as u64 == WINDOW, "cannot map the window: {failed}");
    Ok(())
}

/// Another process of this guest, which its parent waits for; whether it is that one.
fn fork() -> Result<bool> {
    // SAFETY: this process has one thread.
    let pid = unsafe { libc::fork() };
    ensure!(pid >= 0, "no process");
    if pid == 0 {
        allow_ports();
        return Ok(true);
    }
    let mut status = 0;
    // SAFETY: of a child.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    ensure!(status == 0, "another process ended with {status:#x}");
    Ok(false)
}

fn allow_ports() {
    // SAFETY: the ports of the VMM have no effect on memory of this process.
    unsafe { libc::iopl(3) };
}

static WRITTEN: AtomicI32 = AtomicI32::new(-1);
static ZEROS: AtomicI32 = AtomicI32::new(-1);
static RANDOM: AtomicI32 = AtomicI32::new(-1);

const FILE: &str = "/tmp/written";
/// Processes of the server before the one that serves.
const EARLIER: u32 = 20;
const TEXT_WRITTEN: &str = "written by a client's vCPU";

/// Handlers by index.
const ADD: u64 = 0;
const GETPID: u64 = 1;
const WRITE: u64 = 2;
const ZERO: u64 = 3;
const FILL: u64 = 4;
const TOUCH: u64 = 5;

extern "C" fn add(first: u64, second: u64) -> u64 {
    first * 3 + second
}

extern "C" fn getpid(_: u64, _: u64) -> u64 {
    // SAFETY: no preconditions. The C library's function may remember it.
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

/// Pages that the server's process has not used yet.
static FRESH: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
const FRESH_PAGES: u64 = 64;

/// Page faults, which the server's kernel serves.
extern "C" fn touch(value: u64, _: u64) -> u64 {
    let fresh = FRESH.load(Ordering::Relaxed);
    (0..FRESH_PAGES).fold(0, |sum, page| {
        let at = (fresh + page * PAGE) as *mut u64;
        // SAFETY: memory that this process has mapped for that.
        unsafe {
            at.write_volatile(value + page);
            sum + at.read_volatile()
        }
    })
}

fn serve() -> Result<()> {
    mount(c"devtmpfs", c"/dev")?;
    mount(c"tmpfs", c"/tmp")?;
    // Its number is not one that a process of the client has, too.
    for _ in 0..EARLIER {
        if fork()? {
            // SAFETY: ends a child, which has nothing to clean up.
            unsafe { libc::_exit(0) };
        }
    }
    if !fork()? {
        return Ok(());
    }
    map_window()?;
    let written = File::create(FILE)?;
    let zeros = File::open("/dev/zero")?;
    let random = File::open("/dev/urandom")?;
    WRITTEN.store(written.as_raw_fd(), Ordering::Relaxed);
    ZEROS.store(zeros.as_raw_fd(), Ordering::Relaxed);
    RANDOM.store(random.as_raw_fd(), Ordering::Relaxed);
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
    let handlers = [add, getpid, write, zero, fill, touch]
        .map(|handler: vmfunc_gate::trampoline::Handler| handler as usize as u64);
    let pid = u64::from(std::process::id());
    Call::Serve.make(handlers.as_ptr() as u64, pid << 32 | handlers.len() as u64);
    // Afterwards.
    let mut failed = 0;
    check(
        &mut failed,
        "the server's file has what the client wrote",
        || {
            let text = fs::read_to_string(FILE)?;
            ensure!(text == TEXT_WRITTEN, "{text:?}");
            Ok(())
        },
    );
    Call::Done.make(failed, 0);
    Ok(())
}

/// Tries of the client's processes.
const PROCESSES: u32 = 200;
const MANY: u64 = 10_000;

fn delegate() -> Result<()> {
    mount(c"devtmpfs", c"/dev")?;
    for _ in 0..PROCESSES {
        let pid = Call::Pair.make(0, 0);
        if pid != 0 {
            return paired(u64::from(pid));
        }
        // Its parent waits, and keeps its page table.
        if !fork()? {
            return Ok(());
        }
    }
    Ok(())
}

fn paired(pid: u64) -> Result<()> {
    map_window()?;
    let at = NonNull::new(WINDOW as *mut u8).context("no window")?;
    let shared = (u64::from(SHARED_PAGES) * PAGE) as usize;
    // SAFETY: the VMM has just put the pages there, and the guest has one vCPU.
    let client = unsafe { Client::at(at, shared) };
    let memory = client.shared().cast::<u8>().as_ptr();
    let mut failed = 0;
    check(
        &mut failed,
        "a handler of a Linux process computes where both guests have memory everywhere",
        || {
            let found = client.delegate(ADD, 7, 8)?;
            ensure!(found == 29, "{found}");
            let refused = client.delegate(GETPID, 0, 0);
            ensure!(refused == Err(Failure::Exception), "{refused:?}");
            let found = client.delegate(ADD, 1, 2)?;
            ensure!(found == 5, "{found}");
            Ok(())
        },
    );
    ensure!(Call::Again.make(0, 0) != 0, "not paired again");
    check(&mut failed, "a handler of a Linux process computes", || {
        let found = client.delegate(ADD, 7, 8)?;
        ensure!(found == 29, "{found}");
        Ok(())
    });
    check(
        &mut failed,
        "a handler's system call reaches the server's kernel",
        || {
            let found = client.delegate(GETPID, 0, 0)?;
            ensure!(found == pid, "process {found}");
            Ok(())
        },
    );
    check(
        &mut failed,
        "a handler writes to a file of the server",
        || {
            // SAFETY: the shared memory is longer.
            unsafe { memory.copy_from(TEXT_WRITTEN.as_ptr(), TEXT_WRITTEN.len()) };
            let length = TEXT_WRITTEN.len() as u64;
            let found = client.delegate(WRITE, memory as u64, length)?;
            ensure!(found == length, "{found:#x}");
            Ok(())
        },
    );
    check(&mut failed, "a handler reads a character device", || {
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
    check(
        &mut failed,
        "a handler's page faults are served by its kernel",
        || {
            let found = client.delegate(TOUCH, 100, 0)?;
            ensure!(
                found == (0..FRESH_PAGES).map(|page| 100 + page).sum::<u64>(),
                "{found}"
            );
            Ok(())
        },
    );
    check(
        &mut failed,
        "many system calls while the client's kernel has its timer",
        || {
            let before = Call::Exits.make(0, 0);
            for _ in 0..MANY {
                let found = client.delegate(GETPID, 0, 0)?;
                ensure!(found == pid, "process {found}");
            }
            let exits = Call::Exits.make(0, 0) - before;
            print(&format!(
                "figure exits in the server of {MANY} system calls, interrupts not counted: {exits}"
            ));
            Ok(())
        },
    );
    Call::Done.make(failed, 0);
    Ok(())
}
