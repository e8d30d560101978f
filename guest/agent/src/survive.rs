//! Keeps the agent alive when a device is removed under a mapping.
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
    // SAFETY: all zeroes are a valid action; the handler has the signature that SA_SIGINFO
    // requires.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = replace as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
    }
}
