//! What a worker may do, from before an application comes.
//!
//! A driver compiles kernels and runs linkers, and on a CPU a kernel is native code in this very
//! process: the worker is confined from outside, not by trusting what runs in it. Landlock lets it
//! write to its own cache folder and to device nodes only; seccomp lets it make the system calls
//! below, and refuses all others (`EPERM`): none reaches another process, the network or the
//! kernel's configuration. Both are inherited by what the driver starts.
//!
//! The table was made by tracing workers under PoCL 3.1 and NVIDIA's driver 580, and rounded up to
//! what other versions of the C library use for the same purpose. What only one of them needs:
//!
//! | driver | what | why |
//! |---|---|---|
//! | PoCL | processes, renaming, locks on files | compiles each kernel to a file and runs `ld` |
//! | NVIDIA | `ioctl`, `socketpair`, `eventfd2`, `get_mempolicy`, `symlink` | its kernel modules, threads and device nodes |
//!
//! Refused although they try: NVIDIA's driver looks for a daemon (`socket`), and PoCL pins its
//! threads (`sched_setaffinity`, which could pin other processes' as well). Both go on without.

use std::{collections::BTreeMap, path::Path};

use landlock::{
    ABI, Access, AccessFs, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError,
    path_beneath_rules,
};
use libc::c_long;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op,
    SeccompCondition as Condition, SeccompFilter, SeccompRule as Rule, TargetArch,
};

/// System calls that are allowed whatever their arguments.
const ALLOWED: &[&[c_long]] = &[
    // Memory of its own.
    &[
        libc::SYS_brk,
        libc::SYS_get_mempolicy,
        libc::SYS_madvise,
        libc::SYS_mbind,
        libc::SYS_membarrier,
        libc::SYS_memfd_create,
        libc::SYS_mincore,
        libc::SYS_mlock,
        libc::SYS_mlock2,
        libc::SYS_mmap,
        libc::SYS_mprotect,
        libc::SYS_mremap,
        libc::SYS_msync,
        libc::SYS_munlock,
        libc::SYS_munmap,
        libc::SYS_set_mempolicy,
    ],
    // Threads, and what starts with them.
    &[
        libc::SYS_arch_prctl,
        libc::SYS_exit,
        libc::SYS_exit_group,
        libc::SYS_futex,
        libc::SYS_get_robust_list,
        libc::SYS_getcpu,
        libc::SYS_getegid,
        libc::SYS_geteuid,
        libc::SYS_getgid,
        libc::SYS_getpid,
        libc::SYS_getppid,
        libc::SYS_getpriority,
        libc::SYS_getrandom,
        libc::SYS_getrlimit,
        libc::SYS_getrusage,
        libc::SYS_gettid,
        libc::SYS_getuid,
        libc::SYS_prctl,
        libc::SYS_restart_syscall,
        libc::SYS_rseq,
        libc::SYS_rt_sigaction,
        libc::SYS_rt_sigpending,
        libc::SYS_rt_sigprocmask,
        libc::SYS_rt_sigreturn,
        libc::SYS_rt_sigsuspend,
        libc::SYS_rt_sigtimedwait,
        libc::SYS_sched_get_priority_max,
        libc::SYS_sched_get_priority_min,
        libc::SYS_sched_getaffinity,
        libc::SYS_sched_getparam,
        libc::SYS_sched_getscheduler,
        libc::SYS_sched_yield,
        // Filters can only be added.
        libc::SYS_seccomp,
        libc::SYS_set_robust_list,
        libc::SYS_set_tid_address,
        libc::SYS_sigaltstack,
        libc::SYS_sysinfo,
        libc::SYS_uname,
    ],
    // Time.
    &[
        libc::SYS_clock_getres,
        libc::SYS_clock_gettime,
        libc::SYS_clock_nanosleep,
        libc::SYS_gettimeofday,
        libc::SYS_nanosleep,
        libc::SYS_time,
        libc::SYS_times,
    ],
    // Files, within what Landlock allows.
    &[
        libc::SYS_access,
        libc::SYS_chdir,
        libc::SYS_chmod,
        libc::SYS_close,
        libc::SYS_close_range,
        libc::SYS_copy_file_range,
        libc::SYS_creat,
        libc::SYS_faccessat,
        libc::SYS_faccessat2,
        libc::SYS_fadvise64,
        libc::SYS_fallocate,
        libc::SYS_fchmod,
        libc::SYS_fchmodat,
        libc::SYS_fdatasync,
        libc::SYS_flock,
        libc::SYS_fstat,
        libc::SYS_fstatfs,
        libc::SYS_fsync,
        libc::SYS_ftruncate,
        libc::SYS_getcwd,
        libc::SYS_getdents64,
        libc::SYS_lseek,
        libc::SYS_lstat,
        libc::SYS_mkdir,
        libc::SYS_mkdirat,
        libc::SYS_newfstatat,
        libc::SYS_open,
        libc::SYS_openat,
        libc::SYS_pread64,
        libc::SYS_preadv,
        libc::SYS_pwrite64,
        libc::SYS_pwritev,
        libc::SYS_read,
        libc::SYS_readlink,
        libc::SYS_readlinkat,
        libc::SYS_readv,
        libc::SYS_rename,
        libc::SYS_renameat,
        libc::SYS_renameat2,
        libc::SYS_rmdir,
        libc::SYS_sendfile,
        libc::SYS_stat,
        libc::SYS_statfs,
        libc::SYS_statx,
        libc::SYS_symlink,
        libc::SYS_truncate,
        libc::SYS_umask,
        libc::SYS_unlink,
        libc::SYS_unlinkat,
        libc::SYS_utimensat,
        libc::SYS_write,
        libc::SYS_writev,
    ],
    // Descriptors that it has, or makes for itself.
    &[
        libc::SYS_accept,
        libc::SYS_accept4,
        libc::SYS_dup,
        libc::SYS_dup2,
        libc::SYS_dup3,
        libc::SYS_epoll_create1,
        libc::SYS_epoll_ctl,
        libc::SYS_epoll_pwait,
        libc::SYS_epoll_wait,
        libc::SYS_eventfd2,
        libc::SYS_getpeername,
        libc::SYS_getsockname,
        libc::SYS_getsockopt,
        libc::SYS_pipe,
        libc::SYS_pipe2,
        libc::SYS_poll,
        libc::SYS_ppoll,
        libc::SYS_pselect6,
        libc::SYS_recvfrom,
        libc::SYS_recvmsg,
        libc::SYS_select,
        libc::SYS_sendmsg,
        libc::SYS_sendto,
        libc::SYS_shutdown,
        libc::SYS_socketpair,
    ],
    // Programs that it runs: linkers.
    &[
        libc::SYS_execve,
        libc::SYS_fork,
        libc::SYS_vfork,
        libc::SYS_wait4,
        libc::SYS_waitid,
    ],
];

/// Flags of `clone` that make namespaces.
const NAMESPACES: u64 = (libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWUTS) as u64;

/// Commands of `ioctl` that put keys into a terminal, or name who gets a descriptor's signals.
const REFUSED_IOCTLS: &[u64] = &[0x5412, 0x8901, 0x8902];
/// Commands of `fcntl` that name who gets a descriptor's signals, and which.
const REFUSED_FCNTLS: &[u64] = &[8, 10, 15];

/// The calls that are allowed with some arguments only.
fn conditional() -> Result<Vec<(c_long, Vec<Rule>)>, BackendError> {
    let is = |argument, value| Condition::new(argument, Len::Dword, Op::Eq, value);
    let none_of = |argument, values: &[u64]| {
        let conditions = values
            .iter()
            .map(|value| Condition::new(argument, Len::Dword, Op::Ne, *value));
        Rule::new(conditions.collect::<Result<_, _>>()?)
    };
    let own = u64::from(std::process::id());
    let no_namespace = Condition::new(0, Len::Qword, Op::MaskedEq(NAMESPACES), 0)?;
    Ok(vec![
        (libc::SYS_clone, vec![Rule::new(vec![no_namespace])?]),
        (libc::SYS_ioctl, vec![none_of(1, REFUSED_IOCTLS)?]),
        (libc::SYS_fcntl, vec![none_of(1, REFUSED_FCNTLS)?]),
        // Limits and signals of its own alone.
        (libc::SYS_prlimit64, vec![Rule::new(vec![is(0, 0)?])?]),
        (libc::SYS_tgkill, vec![Rule::new(vec![is(0, own)?])?]),
    ])
}

/// The filters, to be installed in this order.
fn filters() -> Result<[BpfProgram; 2], BackendError> {
    let errno = |code: i32| SeccompAction::Errno(code as u32);
    let mut rules: BTreeMap<_, _> = ALLOWED
        .iter()
        .flat_map(|calls| calls.iter().map(|call| (*call, Vec::new())))
        .collect();
    rules.extend(conditional()?);
    let arch = TargetArch::x86_64;
    let allowed = SeccompFilter::new(rules, errno(libc::EPERM), SeccompAction::Allow, arch)?;
    // Its flags lie in memory, where no filter sees them: the C library then uses `clone`.
    let unseen = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let missing = SeccompFilter::new(unseen, SeccompAction::Allow, errno(libc::ENOSYS), arch)?;
    Ok([allowed.try_into()?, missing.try_into()?])
}

/// Why a worker is not confined.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Landlock.
    #[error("cannot confine the worker's file access")]
    Landlock(#[from] RulesetError),
    /// Making the filter.
    #[error("cannot make the worker's system call filter")]
    Filter(#[from] BackendError),
    /// Installing it.
    #[error("cannot install the worker's system call filter")]
    Install(#[from] seccompiler::Error),
}

/// Confines this process for good; `cache` is the folder that it may write to. A kernel without
/// Landlock confines by seccomp alone.
pub fn confine(cache: &Path) -> Result<(), Error> {
    let abi = ABI::V3;
    Ruleset::default()
        .handle_access(AccessFs::from_all(abi))?
        .create()?
        .add_rules(path_beneath_rules(["/"], AccessFs::from_read(abi)))?
        .add_rules(path_beneath_rules(
            [cache, Path::new("/dev")],
            AccessFs::from_all(abi),
        ))?
        .restrict_self()?;
    for filter in filters()? {
        seccompiler::apply_filter_all_threads(&filter)?;
    }
    Ok(())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::io;

    use super::*;

    /// What a call gives in a child process under the filters: 0 or its error.
    fn under_filters(call: impl FnOnce() -> c_long) -> i32 {
        let filters = filters().expect("the table is sound");
        // SAFETY: the child makes system calls only, and ends.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                for filter in &filters {
                    if seccompiler::apply_filter(filter).is_err() {
                        libc::_exit(255);
                    }
                }
                let failed = call() < 0;
                let code = io::Error::last_os_error().raw_os_error();
                libc::_exit(if failed { code.unwrap_or(254) } else { 0 });
            }
            let mut status = 0;
            libc::waitpid(child, &raw mut status, 0);
            libc::WEXITSTATUS(status)
        }
    }

    #[test]
    fn what_reaches_beyond_the_worker_is_refused() {
        let parent = std::process::id() as libc::pid_t;
        // SAFETY: the calls are refused, or change the child alone.
        unsafe {
            let socket = || i64::from(libc::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0));
            assert_eq!(under_filters(socket), libc::EPERM);
            let kill = || i64::from(libc::kill(parent, 0));
            assert_eq!(under_filters(kill), libc::EPERM);
            let signal = || libc::syscall(libc::SYS_tgkill, parent + 1, parent + 1, 0);
            assert_eq!(under_filters(signal), libc::EPERM);
            let namespace = || {
                let flags = libc::CLONE_NEWUSER | libc::SIGCHLD;
                libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0)
            };
            assert_eq!(under_filters(namespace), libc::EPERM);
            let clone3 = || libc::syscall(libc::SYS_clone3, 0, 0);
            assert_eq!(under_filters(clone3), libc::ENOSYS);
            let trace = || libc::syscall(libc::SYS_ptrace, libc::PTRACE_ATTACH, parent, 0, 0);
            assert_eq!(under_filters(trace), libc::EPERM);
        }
    }

    #[test]
    fn what_a_driver_needs_is_allowed() {
        // SAFETY: plain calls.
        unsafe {
            assert_eq!(under_filters(|| i64::from(libc::getppid())), 0);
            let limit = || {
                let mut limit: libc::rlimit64 = std::mem::zeroed();
                i64::from(libc::getrlimit64(libc::RLIMIT_NOFILE, &raw mut limit))
            };
            assert_eq!(under_filters(limit), 0);
            let pair = || {
                let mut pair = [0; 2];
                let (family, kind) = (libc::AF_UNIX, libc::SOCK_SEQPACKET);
                i64::from(libc::socketpair(family, kind, 0, pair.as_mut_ptr()))
            };
            assert_eq!(under_filters(pair), 0);
            assert_eq!(
                under_filters(|| i64::from(libc::fcntl(0, libc::F_GETFD))),
                0
            );
        }
    }
}
