//! The handlers that a passive worker's process registers with an exitless gate.
//!
//! A handler runs on the gate's stack of a few pages, with the segment bases of the thread that
//! registered it. It switches to a stack of this process, because drivers need more. Everything
//! that it uses is resident beforehand: if a gate does not have the server's kernel in view, nobody
//! serves a page fault or a system call, and either ends the delegation and with it the worker.

use std::{
    arch::asm,
    collections::HashMap,
    io,
    ptr::{self, NonNull},
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use remoting_session::{
    drain::{Cpu, Drained},
    passive,
};
use remoting_transport::gate;

use super::OpenClBackend;

/// The type that the handlers serve with.
type Passive = passive::Passive<OpenClBackend>;

/// Size in bytes of the stack that handlers run on; locked in memory.
const STACK: usize = 1 << 20;

/// A handler, as called by gates.
pub type Handler = extern "C" fn(u64, u64) -> u64;

/// All handlers, by index.
pub const HANDLERS: [Handler; 2] = {
    let mut handlers: [Handler; 2] = [drain; 2];
    handlers[gate::HANDSHAKE] = handshake;
    handlers[gate::DRAIN] = drain;
    handlers
};

/// What a gate provides to handlers.
#[derive(Clone, Copy, Debug)]
pub struct Surroundings {
    /// The memory shared with the application, while in a handler or in slow work.
    pub shared: fn() -> NonNull<[u8]>,
    /// Requests slow work: the process is woken and calls [`own`]. A handler returns this
    /// function's result.
    pub slow: fn(u64, u64) -> u64,
}

static SURROUNDINGS: OnceLock<Surroundings> = OnceLock::new();
/// The upper end of the handlers' stack.
static STACK_END: AtomicUsize = AtomicUsize::new(0);
/// Locked while work is in progress. A delegation that was ended in the middle leaves it locked,
/// together with a worker in an unknown state.
static PASSIVE: Mutex<Option<Passive>> = Mutex::new(None);

/// Makes the handlers serve one application, and keeps `heap` bytes of memory ready for it. When
/// called again, they serve the next application. Until the first call, none is served.
///
/// # Errors
/// There is not enough memory, or it may not be locked (`ulimit -l`).
pub fn install(passive: Passive, surroundings: Surroundings, heap: usize) -> io::Result<()> {
    SURROUNDINGS.get_or_init(|| surroundings);
    if STACK_END.load(Ordering::Relaxed) == 0 {
        let stack = map(STACK)?;
        STACK_END.store(stack as usize + STACK, Ordering::Relaxed);
        keep_ready(heap);
        // The first hash map of a thread asks the kernel for random numbers.
        std::hint::black_box(HashMap::<u8, u8>::new());
    }
    // SAFETY: no preconditions.
    if unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) } != 0 {
        return Err(io::Error::last_os_error());
    }
    match PASSIVE.try_lock() {
        Ok(mut place) => *place = Some(passive),
        // A delegation was ended in the middle of work, and the state is as it was then.
        Err(_) => return Err(io::ErrorKind::ResourceBusy.into()),
    }
    Ok(())
}

/// Maps new writable memory, with an inaccessible guard page below it.
fn map(size: usize) -> io::Result<*mut u8> {
    const PAGE: usize = 4096;
    // SAFETY: a fresh mapping at an address chosen by the kernel, then its first page.
    unsafe {
        let start = libc::mmap(
            ptr::null_mut(),
            size + PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        if start == libc::MAP_FAILED || libc::mprotect(start, PAGE, libc::PROT_NONE) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(start.cast::<u8>().add(PAGE))
    }
}

/// Makes the allocator request this much from the kernel at once, and return nothing.
fn keep_ready(heap: usize) {
    #[cfg(target_env = "gnu")]
    // SAFETY: plain settings of the allocator.
    unsafe {
        libc::mallopt(libc::M_MMAP_MAX, 0);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
        libc::mallopt(libc::M_TOP_PAD, 1 << 20);
    }
    let mut ready: Vec<u8> = Vec::with_capacity(heap);
    for page in ready.spare_capacity_mut().chunks_mut(4096) {
        page[0].write(1);
    }
    // Keeps the compiler from removing the loop above.
    std::hint::black_box(&mut ready);
}

/// Calls a function on the handlers' own stack.
fn on_own_stack(work: extern "C" fn() -> u64) -> u64 {
    let result;
    // SAFETY: the stack is mapped permanently, nobody else uses it (a gate has one delegation at a
    // time, and calls come only from there), and its end is aligned. The old stack pointer is kept
    // in a register that survives the call.
    unsafe {
        asm!(
            "mov r12, rsp",
            "mov rsp, {stack}",
            "call {work}",
            "mov rsp, r12",
            stack = in(reg) STACK_END.load(Ordering::Relaxed),
            work = in(reg) work,
            out("r12") _,
            lateout("rax") result,
            clobber_abi("C"),
        );
    }
    result
}

/// Lets the worker do something, if it exists and is intact.
fn with(work: impl FnOnce(&mut Passive, &Surroundings) -> u64) -> u64 {
    let (Ok(mut place), Some(surroundings)) = (PASSIVE.try_lock(), SURROUNDINGS.get()) else {
        return gate::ENDED;
    };
    match &mut *place {
        Some(passive) => work(passive, surroundings),
        None => gate::ENDED,
    }
}

extern "C" fn handshake_here() -> u64 {
    with(|passive, surroundings| {
        // SAFETY: the gate keeps the memory mapped while it has the application that this worker
        // serves.
        let served = unsafe { passive.handshake((surroundings.shared)()) };
        if served { gate::EMPTY } else { gate::ENDED }
    })
}

extern "C" fn drain_here() -> u64 {
    with(|passive, surroundings| match passive.drain(Cpu::Caller) {
        Some(Drained::Empty) => gate::EMPTY,
        Some(Drained::More) => gate::MORE,
        Some(Drained::Own) => (surroundings.slow)(0, 0),
        None => gate::ENDED,
    })
}

extern "C" fn handshake(_: u64, _: u64) -> u64 {
    on_own_stack(handshake_here)
}

extern "C" fn drain(_: u64, _: u64) -> u64 {
    on_own_stack(drain_here)
}

/// Slow work, on the process's own CPU and stack: drains the ring of calls. The arguments come from
/// the application and are ignored.
pub fn own(_: u64, _: u64) -> u64 {
    with(|passive, _| match passive.drain(Cpu::Own) {
        Some(Drained::Empty) => gate::EMPTY,
        // `Own` does not occur here: nothing is left to the own CPU.
        Some(Drained::More | Drained::Own) => gate::MORE,
        None => gate::ENDED,
    })
}
