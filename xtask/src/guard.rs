//! Ends what a command has started, however the command itself ends.
//!
//! Two guards are above the process that does the work. Each has started the next process, and gets those whose parents
//! have ended. When the next process has ended, or a signal asks a guard to end, it kills all that is left. There are
//! two, since a guard can be killed, too: the outer one then kills what the inner one has left, and the inner one ends
//! with the outer one.

use std::{
    env, mem,
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{self, Command, ExitStatus},
    ptr::null_mut,
};

use anyhow::{Context, Result};
use base::child;
use gantry_tests::processes;

/// Environment variable of a process that a guard has started: the number of guards above it, and the process ID of
/// the last one, since processes that it starts have the variable, too.
const GUARDS: &str = "GANTRY_GUARDS";

/// Number of guards.
const ENOUGH: u32 = 2;

/// Signals that ask a guard to end. The inner guard gets the last one when the outer one has ended.
const ENDINGS: [i32; 3] = [libc::SIGHUP, libc::SIGINT, libc::SIGTERM];

/// Starts this program anew below guards. Returns in the process that is to do the work; the guards end as that one
/// does.
///
/// # Errors
/// This program cannot be started anew.
pub fn keep() -> Result<()> {
    let above = above(env::var(GUARDS).ok().as_deref());
    if above == ENOUGH {
        return Ok(());
    }
    let status = guard(above).context("cannot guard the processes that this command starts")?;
    process::exit(
        status
            .code()
            .unwrap_or_else(|| 128 + status.signal().unwrap_or_default()),
    )
}

/// Number of guards above this process, as the variable says.
fn above(variable: Option<&str>) -> u32 {
    let Some((guards, parent)) = variable.and_then(|text| text.split_once(' ')) else {
        return 0;
    };
    match parent.parse() == Ok(std::os::unix::process::parent_id()) {
        true => guards.parse().unwrap_or(0),
        false => 0,
    }
}

/// Starts the next process, waits for it, and kills everything that is left.
fn guard(above: u32) -> Result<ExitStatus> {
    let this = process::id();
    // SAFETY: plain calls; the set is a local, which sigemptyset initializes.
    let wanted = unsafe {
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1);
        // Where it is ignored, there is neither a signal nor a status of a child that ends.
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        let mut wanted: libc::sigset_t = mem::zeroed();
        libc::sigemptyset(&raw mut wanted);
        for signal in ENDINGS.into_iter().filter(|signal| !is_ignored(*signal)) {
            libc::sigaddset(&raw mut wanted, signal);
        }
        libc::sigaddset(&raw mut wanted, libc::SIGTERM);
        libc::sigaddset(&raw mut wanted, libc::SIGCHLD);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const wanted, null_mut());
        if above > 0 {
            // Instead of SIGKILL, which the other guard has chosen until this one can do its work.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
        }
        wanted
    };
    let mut next = Command::new(env::current_exe()?);
    next.args(env::args_os().skip(1))
        .env(GUARDS, format!("{} {this}", above + 1));
    // SAFETY: async-signal-safe calls between fork and exec.
    unsafe {
        next.pre_exec(move || {
            libc::sigprocmask(libc::SIG_UNBLOCK, &raw const wanted, null_mut());
            child::end_with(this)
        });
    }
    let next = next.spawn()?.id().cast_signed();
    let status = loop {
        if let Some(status) = ended(next) {
            break status;
        }
        // SAFETY: the set is initialized; no information is asked for.
        let signal = unsafe { libc::sigwaitinfo(&raw const wanted, null_mut()) };
        if ENDINGS.contains(&signal) {
            break ExitStatus::from_raw(signal);
        }
    };
    kill_all(this)?;
    Ok(status)
}

/// Whether whoever has started this process wants it to ignore a signal, as `nohup` does.
fn is_ignored(signal: i32) -> bool {
    // SAFETY: all zeroes are a valid value; the call changes nothing but this local.
    let now = unsafe {
        let mut now: libc::sigaction = mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut now);
        now
    };
    now.sa_sigaction == libc::SIG_IGN
}

/// Waits for all processes that have ended. Returns the status of this one if it is among them.
fn ended(wanted: i32) -> Option<ExitStatus> {
    let mut of_wanted = None;
    loop {
        let mut status = 0;
        // SAFETY: the status is a local.
        let process = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
        if process <= 0 {
            return of_wanted;
        }
        if process == wanted {
            of_wanted = Some(ExitStatus::from_raw(status));
        }
    }
}

/// Kills the children of this process, and theirs as these become its own, until there are none.
fn kill_all(this: u32) -> Result<()> {
    loop {
        for child in processes::children(this)? {
            // SAFETY: plain call. The process is a child that nobody has waited for, so the number is still its own.
            unsafe { libc::kill(child.cast_signed(), libc::SIGKILL) };
        }
        // SAFETY: plain call; no status is asked for.
        if unsafe { libc::waitpid(-1, null_mut(), 0) } < 0 {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_counts_only_for_a_child_of_the_guard() {
        let parent = std::os::unix::process::parent_id();
        assert_eq!(above(Some(&format!("1 {parent}"))), 1);
        assert_eq!(above(Some(&format!("1 {}", process::id()))), 0);
        assert_eq!(above(None), 0);
    }
}
