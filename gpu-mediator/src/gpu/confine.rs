//! What the mediator's process may do once it listens: it needs memory, its sockets and the
//! descriptors that fronts send, and nothing by its name. Landlock takes all files away, and seccomp
//! all system calls but those below.

use std::collections::BTreeMap;

use landlock::{ABI, Access, AccessFs, Ruleset, RulesetAttr, RulesetError};
use libc::c_long;
use seccompiler::{BackendError, BpfProgram, SeccompAction, SeccompFilter, TargetArch};

/// The Landlock rights that are taken away: those of Linux 6.2. Earlier kernels enforce what they
/// know.
const RIGHTS: ABI = ABI::V3;

/// System calls that are allowed.
const ALLOWED: &[c_long] = &[
    // Memory of its own and of files that it has.
    libc::SYS_brk,
    libc::SYS_fstat,
    libc::SYS_ftruncate,
    libc::SYS_madvise,
    libc::SYS_memfd_create,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    // Its only thread.
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_yield,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    // Fronts, the GPU's server, and interrupts.
    libc::SYS_accept4,
    libc::SYS_close,
    libc::SYS_fcntl,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_read,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    libc::SYS_write,
    libc::SYS_writev,
    // Time, where the kernel's own page does not tell it.
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
];

/// Confinement that failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Landlock refused.
    #[error("cannot take files away (Landlock)")]
    Landlock(#[from] RulesetError),
    /// The filter cannot be made.
    #[error("cannot make the filter of system calls")]
    Filter(#[from] BackendError),
    /// Seccomp refused.
    #[error("cannot install the filter of system calls")]
    Seccomp(#[from] seccompiler::Error),
}

/// Confines this thread and those that it starts, for good.
pub fn confine() -> Result<(), Error> {
    Ruleset::default()
        .handle_access(AccessFs::from_all(RIGHTS))?
        .create()?
        .restrict_self()?;
    let target = TargetArch::try_from(std::env::consts::ARCH)?;
    let rules: BTreeMap<_, _> = ALLOWED.iter().map(|call| (*call, Vec::new())).collect();
    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    let filter = SeccompFilter::new(rules, refuse, SeccompAction::Allow, target)?;
    let program: BpfProgram = filter.try_into()?;
    Ok(seccompiler::apply_filter(&program)?)
}
