//! Takes over a thread of another process, like an attacker who has compromised it.

use std::io;

use anyhow::{Context, Result, ensure};

/// The instruction `syscall`.
const SYSCALL: libc::c_long = 0x050f;

/// Makes a thread call `execve`, wherever it is, and lets it continue.
pub fn execve(thread: libc::pid_t) -> Result<()> {
    ptrace(libc::PTRACE_SEIZE, thread, 0, 0).context("cannot seize the thread")?;
    ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0).context("cannot stop the thread")?;
    let mut status = 0;
    // SAFETY: writes one status.
    let stopped = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) };
    ensure!(
        stopped == thread && libc::WIFSTOPPED(status),
        "the thread did not stop: {}",
        io::Error::last_os_error()
    );
    // SAFETY: plain numbers.
    let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    ptrace(libc::PTRACE_GETREGS, thread, 0, &raw mut registers as usize)?;
    // Writes through ptrace also reach pages without write permission.
    ptrace(
        libc::PTRACE_POKETEXT,
        thread,
        usize::try_from(registers.rip)?,
        usize::try_from(SYSCALL)?,
    )
    .context("cannot change the thread's code")?;
    registers.rax = libc::SYS_execve.unsigned_abs();
    (registers.rdi, registers.rsi, registers.rdx) = (0, 0, 0);
    // The interrupted call must not be restarted.
    registers.orig_rax = u64::MAX;
    ptrace(libc::PTRACE_SETREGS, thread, 0, &raw mut registers as usize)?;
    ptrace(libc::PTRACE_DETACH, thread, 0, 0).context("cannot let the thread go")
}

fn ptrace(request: libc::c_uint, thread: libc::pid_t, address: usize, data: usize) -> Result<()> {
    // SAFETY: requests that read or write this process's memory get a pointer to a
    // `user_regs_struct` of the caller.
    if unsafe { libc::ptrace(request, thread, address, data) } < 0 {
        return Err(io::Error::last_os_error().into());
    }
    Ok(())
}
