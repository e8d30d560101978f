//! What the server's process may do once it listens: it needs memory, its socket and the descriptors
//! that clients send, and nothing by its name. Landlock takes all files away but the socket's folder
//! (to remove the socket), and seccomp all system calls but those below. Both are inherited by
//! threads that start later, so this comes before the worker.

use std::{collections::BTreeMap, path::Path};

use landlock::{
    ABI, Access, AccessFs, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError,
    path_beneath_rules,
};
use libc::c_long;
use seccompiler::{BackendError, BpfProgram, SeccompAction, SeccompFilter, TargetArch};

/// The Landlock rights that are used: those of Linux 6.2. Earlier kernels enforce what they know.
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
    // Threads.
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_get_robust_list,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_prctl,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    // Clients and eventfds.
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_fcntl,
    libc::SYS_lseek,
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

/// Confines this thread and those that it starts. `folder` is the socket's.
pub fn confine(folder: &Path) -> Result<(), Error> {
    Ruleset::default()
        .handle_access(AccessFs::from_all(RIGHTS))?
        .create()?
        .add_rules(path_beneath_rules([folder], AccessFs::RemoveFile))?
        .restrict_self()?;
    let target = TargetArch::try_from(std::env::consts::ARCH)?;
    let rules: BTreeMap<_, _> = ALLOWED.iter().map(|call| (*call, Vec::new())).collect();
    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    let filter = SeccompFilter::new(rules, refuse, SeccompAction::Allow, target)?;
    let program: BpfProgram = filter.try_into()?;
    Ok(seccompiler::apply_filter(&program)?)
}
