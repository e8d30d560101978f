//! Keeps the agent alive when a device is removed under a mapping, and when a file becomes too large.
//!
//! When a PCI function is removed, the kernel revokes its mappings, and an access raises SIGBUS.
//! The handler replaces the page by an empty one: a read from it does not return what a port's
//! register would, which the caller notices.

const PAGE: usize = 4096;

/// Replaces the page of a failed access.
extern "C" fn replace(
    _signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes the signal's information; mmap is a plain system call, and accesses
    // to the page that it replaces can only fail.
    unsafe {
        let page = (*info).si_addr() as usize & !(PAGE - 1);
        let made = libc::mmap(
            page as *mut libc::c_void,
            PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
            -1,
            0,
        );
        if made == libc::MAP_FAILED {
            libc::_exit(1);
        }
    }
}

/// Installs the handler.
pub fn install() {
    handle(libc::SIGBUS, replace);
}

type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

fn handle(signal: libc::c_int, handler: Handler) {
    // SAFETY: all zeroes are a valid action; the handler has the signature that SA_SIGINFO
    // requires.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut());
    }
}

extern "C" fn go_on(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Makes it an error, not the end of this process, that a file becomes larger than the process's limit
/// (`RLIMIT_FSIZE`). Programs that the agent starts have the usual action: they would inherit a signal that is ignored,
/// but inherit no handler.
pub fn file_size() {
    handle(libc::SIGXFSZ, go_on);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{fs, process::Command};

    #[test]
    fn a_program_that_the_agent_starts_ignores_no_signal_for_it() {
        super::file_size();
        let ignored = |status: &str| {
            let line = status.lines().find(|line| line.starts_with("SigIgn:"));
            let mask = line.unwrap().split_whitespace().nth(1).unwrap();
            u64::from_str_radix(mask, 16).unwrap() >> (libc::SIGXFSZ - 1) & 1 != 0
        };
        let started = Command::new("cat").arg("/proc/self/status").output();
        let started = String::from_utf8(started.unwrap().stdout).unwrap();
        assert!(!ignored(&started));
        // SAFETY: the signal is this thread's own.
        assert_eq!(unsafe { libc::raise(libc::SIGXFSZ) }, 0);
        assert!(!ignored(&fs::read_to_string("/proc/self/status").unwrap()));
    }
}
