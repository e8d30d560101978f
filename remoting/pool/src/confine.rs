//! What a worker may do, from before an application comes.
//!
//! A driver compiles kernels and runs linkers, and on a CPU a kernel is native code in this very
//! process: the worker is confined from outside, not by trusting what runs in it. Landlock lets it
//! write to its own cache folder and to the nodes of accelerators only, and read what drivers are
//! made of (`READABLE`) and nothing else: no disk image, no key, no memory of the machine.
//! Seccomp lets it make the system calls below, and refuses all others (`EPERM`): none reaches
//! another process, the network or the kernel's configuration. Landlock leaves to them what it does
//! not know: modes and times of files by their paths, file systems' own commands, and before Linux
//! 6.2 their lengths. A worker that root started has none of root's capabilities. A limit bounds the
//! memory that it has of its own. All are inherited by what the driver starts.
//!
//! The table of calls was made by tracing workers under PoCL 3.1 and NVIDIA's driver 580 (OpenCL and CUDA), and
//! rounded up to what other versions of the C library use for the same purpose. What only one of
//! them needs:
//!
//! | driver | what | why |
//! |---|---|---|
//! | PoCL | processes, renaming, locks on files | compiles each kernel to a file and runs `ld` |
//! | NVIDIA | `ioctl`, `socketpair`, `eventfd2`, `get_mempolicy`, `symlink` | its kernel modules, threads and device nodes |
//! | NVIDIA's for CUDA | sockets that connect to nobody, names of its own threads | [`cuda`] |
//!
//! Refused although they try: NVIDIA's driver for OpenCL looks for a daemon (`socket`), and PoCL pins
//! its threads (`sched_setaffinity`, which could pin other processes' as well). Both go on without.

mod cuda;
mod pieces;

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use landlock::{
    ABI, Access, AccessFs, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError,
    path_beneath_rules,
};
use libc::c_long;
use remoting_proto::wire::api::ApiId;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op,
    SeccompCondition as Condition, SeccompFilter, SeccompRule as Rule, TargetArch,
};

pub use cuda::has_own_network;
pub use pieces::{Piece, Pieces};

/// The Landlock rights that are used: those of Linux 6.2. Earlier kernels enforce what they know.
const RIGHTS: ABI = ABI::V3;

/// What a worker may read and run: programs, libraries, the loader's and the drivers'
/// configuration, and what the kernel tells of this machine and of the process itself.
const READABLE: &[&str] = &[
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/opt",
    "/nix/store",
    "/gnu/store",
    "/etc/OpenCL",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/ld.so.preload",
    "/etc/localtime",
    "/etc/nvidia",
    "/proc/cpuinfo",
    "/proc/devices",
    "/proc/driver",
    "/proc/filesystems",
    "/proc/meminfo",
    "/proc/modules",
    "/proc/self",
    "/proc/stat",
    "/proc/sys",
    "/proc/version",
    "/sys/bus",
    "/sys/class",
    "/sys/devices",
    "/sys/fs/cgroup",
    "/sys/kernel/mm",
    "/sys/module",
];

/// Variables that name files or folders, with colons between them, where a loader looks for
/// libraries and drivers.
const NAMING: &[&str] = &["LD_LIBRARY_PATH", "OCL_ICD_VENDORS", "OCL_ICD_FILENAMES"];

/// Nodes in `/dev` that a worker may use; those of accelerators begin with one of [`NODES`].
const PLAIN_NODES: &[&str] = &["null", "zero", "full", "random", "urandom"];
/// What the names of accelerators' nodes, or of folders with them, begin with.
const NODES: &[&str] = &["nvidia", "dri", "kfd"];

/// System calls that are allowed whatever their arguments.
const ALLOWED: &[&[c_long]] = &[
    // Memory of its own.
    &[
        libc::SYS_brk,
        libc::SYS_get_mempolicy,
        libc::SYS_madvise,
        libc::SYS_mbind,
        libc::SYS_membarrier,
        libc::SYS_mincore,
        libc::SYS_mlock,
        libc::SYS_mlock2,
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
        // Filters and restrictions can only be added.
        libc::SYS_landlock_add_rule,
        libc::SYS_landlock_restrict_self,
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
        libc::SYS_close,
        libc::SYS_close_range,
        libc::SYS_copy_file_range,
        libc::SYS_creat,
        libc::SYS_faccessat,
        libc::SYS_faccessat2,
        libc::SYS_fadvise64,
        libc::SYS_fallocate,
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
        libc::SYS_umask,
        libc::SYS_unlink,
        libc::SYS_unlinkat,
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

/// Flags of `clone` that make namespaces, and the one that makes the pool the parent of the new
/// process: the pool waits for its workers alone, so that such a process would stay a zombie, and
/// count towards the limits of the pool's user and service, when the worker is gone.
const REFUSED_CLONES: u64 = (libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWUTS
    | libc::CLONE_PARENT) as u64;

/// Calls that do nothing and say that they have: linkers give what they write a mode, and nobody
/// minds which. Landlock looks at no call of these kinds, so that they would reach any file of the
/// pool's user, other owners' compiled programs among them.
const PRETENDED: &[c_long] = &[
    libc::SYS_chmod,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchmodat2,
    libc::SYS_futimesat,
    libc::SYS_utime,
    libc::SYS_utimensat,
    libc::SYS_utimes,
];

/// Types of commands of `ioctl` that are for file systems: they would change files that may only be
/// read, or keep others from being removed. Those of XFS, Btrfs (and clones of files) and of all.
const FILE_SYSTEMS: &[u64] = &[0x58, 0x94, 0x66];
/// Where the type is in a command.
const TYPE: u64 = 0xff00;

/// Commands of `ioctl` that put keys into a terminal.
const TIOCSTI: u64 = 0x5412;
const TIOCLINUX: u64 = 0x541c;
/// Commands of `ioctl` that put keys into a terminal, name who gets a descriptor's signals, or change
/// the state of a file that others may share (`FIONBIO`, `FIOASYNC`).
const REFUSED_IOCTLS: &[u64] = &[TIOCSTI, TIOCLINUX, 0x5421, 0x5452, 0x8901, 0x8902];
/// Commands of `fcntl` that name who gets a descriptor's signals, and which; and the one that keeps
/// others waiting who open a file (`F_SETLEASE`).
const REFUSED_FCNTLS: &[u64] = &[8, 10, 15, 1024];
/// `F_SETFL` changes the state of an open file, which a worker shares with the virtual machine whose
/// eventfds it was given: it may make one non-blocking, as those are, and nothing else.
const SET_STATE: u64 = libc::F_SETFL as u64;
/// The bits that `F_SETFL` leaves alone: the access mode, and `O_LARGEFILE`, which `F_GETFL` gives.
const NO_STATE: u64 = 0o100_003;

/// The calls that are allowed with some arguments only.
fn conditional() -> Result<Vec<(c_long, Vec<Rule>)>, BackendError> {
    let is = |argument, value| Condition::new(argument, Len::Dword, Op::Eq, value);
    let none_of = |argument, values: &[u64]| {
        let conditions = values
            .iter()
            .map(|value| Condition::new(argument, Len::Dword, Op::Ne, *value));
        Rule::new(conditions.collect::<Result<_, _>>()?)
    };
    let without = |argument, flag| {
        Rule::new(vec![Condition::new(
            argument,
            Len::Dword,
            Op::MaskedEq(flag),
            0,
        )?])
    };
    let own = u64::from(std::process::id());
    let data = u64::from(libc::RLIMIT_DATA);
    let data_is_apart = Condition::new(1, Len::Dword, Op::Ne, data)?;
    let looks = Condition::new(2, Len::Qword, Op::Eq, 0)?;
    let own_child = Condition::new(0, Len::Qword, Op::MaskedEq(REFUSED_CLONES), 0)?;
    let state = u64::from(u32::MAX) & !NO_STATE;
    let non_blocking = Condition::new(2, Len::Dword, Op::MaskedEq(state), libc::O_NONBLOCK as u64)?;
    let mut fcntls = REFUSED_FCNTLS.to_vec();
    fcntls.push(SET_STATE);
    Ok(vec![
        (libc::SYS_clone, vec![Rule::new(vec![own_child])?]),
        // The machine's huge pages are its virtual machines': no control group and no limit counts them.
        (libc::SYS_mmap, vec![without(3, libc::MAP_HUGETLB as u64)?]),
        (
            libc::SYS_memfd_create,
            vec![without(1, libc::MFD_HUGETLB.into())?],
        ),
        // It ends with its pool.
        (
            libc::SYS_prctl,
            vec![none_of(0, &[libc::PR_SET_PDEATHSIG as u64])?],
        ),
        (libc::SYS_ioctl, vec![none_of(1, REFUSED_IOCTLS)?]),
        (
            libc::SYS_fcntl,
            vec![
                none_of(1, &fcntls)?,
                Rule::new(vec![is(1, SET_STATE)?, non_blocking])?,
            ],
        ),
        // Limits of its own alone, and that of memory only to be looked at.
        (
            libc::SYS_prlimit64,
            vec![
                Rule::new(vec![is(0, 0)?, data_is_apart])?,
                Rule::new(vec![is(0, 0)?, looks])?,
            ],
        ),
        // Not datagrams: those go to whatever socket a call names, connected or not.
        (
            libc::SYS_socketpair,
            cuda::streams_and_packets()
                .into_iter()
                .collect::<Result<_, _>>()?,
        ),
        // Signals of its own alone.
        (libc::SYS_tgkill, vec![Rule::new(vec![is(0, own)?])?]),
    ])
}

/// The filters, to be installed in this order: of several that refuse a call the last one says how.
fn filters(api: ApiId) -> Result<Vec<BpfProgram>, BackendError> {
    let errno = |code: i32| SeccompAction::Errno(code as u32);
    let mut rules: BTreeMap<_, _> = ALLOWED
        .iter()
        .flat_map(|calls| calls.iter().map(|call| (*call, Vec::new())))
        .collect();
    rules.extend(conditional()?);
    if api == ApiId::Cuda {
        rules.extend(cuda::allowed()?);
    }
    let arch = TargetArch::x86_64;
    let allowed = SeccompFilter::new(rules, errno(libc::EPERM), SeccompAction::Allow, arch)?;
    // Its flags lie in memory, where no filter sees them: the C library then uses `clone`.
    let unseen = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let missing = SeccompFilter::new(unseen, SeccompAction::Allow, errno(libc::ENOSYS), arch)?;
    let pretended = PRETENDED.iter().map(|call| (*call, Vec::new())).collect();
    let pretended = SeccompFilter::new(pretended, SeccompAction::Allow, errno(0), arch)?;
    let of_type = |kind: &u64| {
        let is = Condition::new(1, Len::Dword, Op::MaskedEq(TYPE), kind << 8)?;
        Rule::new(vec![is])
    };
    let of_types = FILE_SYSTEMS.iter().map(of_type).collect::<Result<_, _>>()?;
    let of_types = BTreeMap::from([(libc::SYS_ioctl, of_types)]);
    let refused = SeccompFilter::new(of_types, SeccompAction::Allow, errno(libc::ENOTTY), arch)?;
    let mut filters = vec![allowed, missing, pretended, refused];
    if api == ApiId::Cuda {
        let (calls, error) = cuda::refused();
        let allow = SeccompAction::Allow;
        filters.push(SeccompFilter::new(calls, allow, error, arch)?);
    }
    filters.into_iter().map(TryInto::try_into).collect()
}

/// Why a worker is not confined.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Memory.
    #[error("cannot limit the worker's memory")]
    Limit(#[source] io::Error),
    /// The network namespace.
    #[error("cannot name the worker's user in its user namespace")]
    Network(#[source] io::Error),
    /// Capabilities.
    #[error("cannot give the worker's capabilities up")]
    Capabilities(#[source] io::Error),
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

/// What a worker may have.
#[derive(Clone, Copy, Debug)]
pub struct Confinement<'a> {
    /// The folders that it may write to.
    pub writable: &'a [&'a Path],
    /// Folders and files that it may read beside the usual ones.
    pub readable: &'a [PathBuf],
    /// Bytes of memory of its own, without the window; the driver's share is included. As much as
    /// this process may have already without it.
    pub memory: Option<u64>,
    /// Whose driver is going to be opened.
    pub api: ApiId,
    /// What is left out.
    pub without: &'a Pieces,
}

/// Whether this kernel has Landlock. One without it confines by seccomp alone.
pub fn has_landlock() -> bool {
    const VERSION: u32 = 1;
    let nothing = std::ptr::null::<libc::c_void>();
    // SAFETY: asks for the version; no memory is touched.
    unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, nothing, 0usize, VERSION) > 0 }
}

/// Confines this process, which has one thread, for good.
pub fn confine(confinement: Confinement) -> Result<(), Error> {
    let without = confinement.without;
    if let Some(memory) = confinement.memory
        && !without.has(Piece::Memory)
    {
        limit(memory).map_err(Error::Limit)?;
    }
    if confinement.api == ApiId::Cuda && !without.has(Piece::Network) {
        // Said once, by the pool, where there can be none.
        cuda::own_network().map_err(Error::Network)?;
    }
    if !without.has(Piece::Landlock) {
        rules(confinement)?.restrict_self()?;
    }
    if !without.has(Piece::Capabilities) {
        give_up_capabilities().map_err(Error::Capabilities)?;
    }
    if !without.has(Piece::Seccomp) {
        for filter in filters(confinement.api)? {
            seccompiler::apply_filter_all_threads(&filter)?;
        }
    }
    Ok(())
}

/// Takes from this process, and from what it starts, the right to send files over sockets, for good. Files in flight
/// count for all processes of a user, and beyond a limit none of these can send any: not the pool, nor the workers that
/// wait. No filter sees whether a message has files: what is sent without goes by `sendto` and `write`.
///
/// # Errors
/// The filter cannot be installed in all threads.
pub fn send_no_files(without: &Pieces) -> Result<(), Error> {
    if !without.has(Piece::Seccomp) {
        seccompiler::apply_filter_all_threads(&no_files()?)?;
    }
    Ok(())
}

fn no_files() -> Result<BpfProgram, BackendError> {
    let sends = BTreeMap::from([(libc::SYS_sendmsg, Vec::new())]);
    let refused = SeccompAction::Errno(libc::EPERM as u32);
    let filter = SeccompFilter::new(sends, SeccompAction::Allow, refused, TargetArch::x86_64)?;
    filter.try_into()
}

/// Gives up what root may do beside what any user may with files of its own, for this thread and
/// those that it starts. No program that it starts gets it back: Landlock has seen to
/// `no_new_privs`.
pub(super) fn give_up_capabilities() -> io::Result<()> {
    /// `_LINUX_CAPABILITY_VERSION_3`, and this thread.
    const HEADER: [u32; 2] = [0x2008_0522, 0];
    // Effective, permitted and inheritable ones: the lower halves, then the upper ones.
    let none = [0u32; 6];
    // SAFETY: a header and two triples, as this version of the call reads; both outlive it.
    match unsafe { libc::syscall(libc::SYS_capset, HEADER.as_ptr(), none.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Limits what can be written in this process and shared with no other one.
fn limit(memory: u64) -> io::Result<()> {
    let limit = libc::rlimit64 {
        rlim_cur: memory,
        rlim_max: memory,
    };
    // SAFETY: `limit` outlives the call.
    match unsafe { libc::setrlimit64(libc::RLIMIT_DATA, &raw const limit) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// What is to be taken from this process when it is known whose application it serves: made before
/// it is confined, so that little is left to do then.
#[derive(Debug)]
pub struct Later(RulesetCreated);

impl Later {
    /// Of a process that is going to be confined so, but for its folders.
    pub fn prepare(confinement: Confinement) -> Result<Self, Error> {
        Ok(Self(rules(confinement)?))
    }

    /// Leaves this thread, and those that it starts, one more folder to write to of those that it
    /// may.
    pub fn enter(self, folder: Option<&Path>) -> Result<(), Error> {
        let all = AccessFs::from_all(RIGHTS);
        self.0
            .add_rules(path_beneath_rules(folder, all))?
            .restrict_self()?;
        Ok(())
    }
}

/// The files that a process may have.
fn rules(confinement: Confinement) -> Result<RulesetCreated, RulesetError> {
    let named = NAMING.iter().filter_map(std::env::var_os);
    let named: Vec<PathBuf> = named
        .flat_map(|list| std::env::split_paths(&list).collect::<Vec<_>>())
        .filter(|path| !path.as_os_str().is_empty())
        .collect();
    let readable = READABLE.iter().map(Path::new);
    let more = confinement.readable.iter();
    let readable = readable.chain(named.iter().chain(more).map(PathBuf::as_path));
    let threads = match confinement.api {
        ApiId::Cuda => cuda::threads().ok(),
        ApiId::OpenCl | ApiId::Nvidia => None,
    };
    Ruleset::default()
        .handle_access(AccessFs::from_all(RIGHTS))?
        .create()?
        // What is not there gets no rule.
        .add_rules(path_beneath_rules(readable, AccessFs::from_read(RIGHTS)))?
        .add_rules(path_beneath_rules(
            confinement.writable,
            AccessFs::from_all(RIGHTS),
        ))?
        .add_rules(path_beneath_rules(
            nodes(),
            AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::ReadDir,
        ))?
        .add_rules(path_beneath_rules(
            threads,
            AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::ReadDir,
        ))
}

/// The nodes of accelerators, and those that every program expects.
fn nodes() -> Vec<PathBuf> {
    let devices = Path::new("/dev");
    let listed = std::fs::read_dir(devices).into_iter().flatten();
    let accelerators = listed.filter_map(Result::ok).filter_map(|entry| {
        let name = entry.file_name();
        let name = name.to_str()?;
        NODES
            .iter()
            .any(|start| name.starts_with(start))
            .then(|| entry.path())
    });
    let plain = PLAIN_NODES.iter().map(|name| devices.join(name));
    plain.chain(accelerators).collect()
}

#[cfg(test)]
mod tests;
