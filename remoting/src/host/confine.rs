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
//! The table of calls was made by tracing workers under PoCL 3.1 and NVIDIA's driver 580, and
//! rounded up to what other versions of the C library use for the same purpose. What only one of
//! them needs:
//!
//! | driver | what | why |
//! |---|---|---|
//! | PoCL | processes, renaming, locks on files | compiles each kernel to a file and runs `ld` |
//! | NVIDIA | `ioctl`, `socketpair`, `eventfd2`, `get_mempolicy`, `symlink` | its kernel modules, threads and device nodes |
//!
//! Refused although they try: NVIDIA's driver looks for a daemon (`socket`), and PoCL pins its
//! threads (`sched_setaffinity`, which could pin other processes' as well). Both go on without.

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
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op,
    SeccompCondition as Condition, SeccompFilter, SeccompRule as Rule, TargetArch,
};

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
        // Signals of its own alone.
        (libc::SYS_tgkill, vec![Rule::new(vec![is(0, own)?])?]),
    ])
}

/// The filters, to be installed in this order: of several that refuse a call the last one says how.
fn filters() -> Result<[BpfProgram; 4], BackendError> {
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
    let pretended = PRETENDED.iter().map(|call| (*call, Vec::new())).collect();
    let pretended = SeccompFilter::new(pretended, SeccompAction::Allow, errno(0), arch)?;
    let of_type = |kind: &u64| {
        let is = Condition::new(1, Len::Dword, Op::MaskedEq(TYPE), kind << 8)?;
        Rule::new(vec![is])
    };
    let of_types = FILE_SYSTEMS.iter().map(of_type).collect::<Result<_, _>>()?;
    let of_types = BTreeMap::from([(libc::SYS_ioctl, of_types)]);
    let refused = SeccompFilter::new(of_types, SeccompAction::Allow, errno(libc::ENOTTY), arch)?;
    Ok([
        allowed.try_into()?,
        missing.try_into()?,
        pretended.try_into()?,
        refused.try_into()?,
    ])
}

/// Why a worker is not confined.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Memory.
    #[error("cannot limit the worker's memory")]
    Limit(#[source] io::Error),
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
    if let Some(memory) = confinement.memory {
        limit(memory).map_err(Error::Limit)?;
    }
    rules(confinement)?.restrict_self()?;
    give_up_capabilities().map_err(Error::Capabilities)?;
    for filter in filters()? {
        seccompiler::apply_filter_all_threads(&filter)?;
    }
    Ok(())
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

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    /// What a call gives in a child process under the filters: 0 or its error.
    fn under_filters(call: impl FnOnce() -> c_long) -> i32 {
        let filters = filters().expect("the table is sound");
        let apply = || {
            filters
                .iter()
                .all(|filter| seccompiler::apply_filter(filter).is_ok())
        };
        in_child(apply, call)
    }

    /// What a call gives in a child process after `prepare`: 0 or its error.
    fn in_child(prepare: impl FnOnce() -> bool, call: impl FnOnce() -> c_long) -> i32 {
        // SAFETY: the child has this thread only, which makes system calls and ends.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                if !prepare() {
                    libc::_exit(255);
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

    fn writing(writable: &[&Path]) -> Result<RulesetCreated, RulesetError> {
        rules(Confinement {
            writable,
            readable: &[],
            memory: None,
        })
    }

    fn restrict(writable: &[&Path]) -> bool {
        writing(writable).is_ok_and(|rules| rules.restrict_self().is_ok())
    }

    #[test]
    fn of_all_owners_folders_one_is_left_when_it_is_known_whose_a_worker_is() {
        if !has_landlock() {
            eprintln!("not tested: this kernel has no Landlock");
            return;
        }
        let all = std::env::temp_dir().join(format!("gantry-owners-{}", std::process::id()));
        let (own, mine, theirs) = (all.join("own"), all.join("mine"), all.join("theirs"));
        for folder in [&own, &mine, &theirs] {
            std::fs::create_dir_all(folder).unwrap();
        }
        let open = |path: &Path, owner: Option<&Path>| {
            let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
            let prepare = || {
                let later = Later(writing(&[&own]).unwrap());
                let confine = restrict(&[&own, &all])
                    && filters()
                        .unwrap()
                        .iter()
                        .all(|filter| seccompiler::apply_filter(filter).is_ok());
                confine && later.enter(owner).is_ok()
            };
            let flags = libc::O_RDWR | libc::O_CREAT;
            in_child(
                prepare,
                // SAFETY: a C string.
                || i64::from(unsafe { libc::open(path.as_ptr(), flags, 0o600) }),
            )
        };
        assert_eq!(open(&mine.join("1"), Some(&mine)), 0);
        assert_eq!(open(&own.join("1"), Some(&mine)), 0);
        assert_eq!(open(&theirs.join("1"), Some(&mine)), libc::EACCES);
        assert_eq!(open(&all.join("1"), Some(&mine)), libc::EACCES);
        assert_eq!(open(&mine.join("1"), None), libc::EACCES);
        assert_eq!(open(&own.join("1"), None), 0);
        std::fs::remove_dir_all(&all).unwrap();
    }

    #[test]
    fn what_reaches_beyond_the_worker_is_refused() {
        let parent = std::process::id() as libc::pid_t;
        let program = std::fs::File::open("/proc/self/exe").unwrap();
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
            let lease = || {
                i64::from(libc::fcntl(
                    program.as_raw_fd(),
                    libc::F_SETLEASE,
                    libc::F_RDLCK,
                ))
            };
            assert_eq!(under_filters(lease), libc::EPERM);
            let trace = || libc::syscall(libc::SYS_ptrace, libc::PTRACE_ATTACH, parent, 0, 0);
            assert_eq!(under_filters(trace), libc::EPERM);
        }
    }

    #[test]
    fn files_of_the_machine_and_of_others_cannot_be_read_or_written() {
        if !has_landlock() {
            eprintln!("not tested: this kernel has no Landlock");
            return;
        }
        let cache = std::env::temp_dir().join(format!("gantry-confine-{}", std::process::id()));
        std::fs::create_dir_all(&cache).unwrap();
        let other = cache.with_extension("other");
        std::fs::write(&other, "a disk image").unwrap();
        let open = |path: &Path, flags| {
            let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
            in_child(
                || restrict(&[&cache]),
                // SAFETY: a C string.
                || i64::from(unsafe { libc::open(path.as_ptr(), flags, 0o600) }),
            )
        };
        let (read, write) = (libc::O_RDONLY, libc::O_RDWR | libc::O_CREAT);
        for secret in [
            "/etc/passwd",
            "/dev/mem",
            "/dev/kmsg",
            "/root",
            "/proc/1/stat",
        ] {
            let secret = Path::new(secret);
            if secret.exists() {
                assert_eq!(open(secret, read), libc::EACCES, "{}", secret.display());
            }
        }
        assert_eq!(open(&other, read), libc::EACCES);
        assert_eq!(open(&other, write), libc::EACCES);
        assert_eq!(open(Path::new("/usr/new"), write), libc::EACCES);
        assert_eq!(open(&cache.join("kernel.so"), write), 0);
        for needed in ["/dev/null", "/proc/self/maps", "/proc/cpuinfo", "/usr/bin"] {
            assert_eq!(open(Path::new(needed), read), 0, "{needed}");
        }
        assert_eq!(open(Path::new("/dev/null"), libc::O_RDWR), 0);
        std::fs::remove_dir_all(&cache).unwrap();
        std::fs::remove_file(&other).unwrap();
    }

    #[test]
    fn modes_times_and_lengths_of_others_files_stay_whatever_their_paths() {
        let path = std::env::temp_dir().join(format!("gantry-modes-{}", std::process::id()));
        std::fs::write(&path, "compiled").unwrap();
        let before = std::fs::metadata(&path).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        let (name, fd) = (name.as_ptr(), i64::from(file.as_raw_fd()));
        let here = libc::AT_FDCWD;
        // SAFETY: a C string, and times where they are said to be.
        unsafe {
            let call = |number, one: c_long, two: c_long, three: c_long| {
                under_filters(|| libc::syscall(number, one, two, three, 0))
            };
            let (path, here) = (name as c_long, c_long::from(here));
            assert_eq!(call(libc::SYS_chmod, path, 0o777, 0), 0);
            assert_eq!(call(libc::SYS_fchmod, fd, 0o777, 0), 0);
            assert_eq!(call(libc::SYS_fchmodat, here, path, 0o777), 0);
            assert_eq!(call(libc::SYS_fchmodat2, here, path, 0o777), 0);
            let times = [7 as libc::time_t; 4];
            let times = times.as_ptr() as c_long;
            assert_eq!(call(libc::SYS_utimensat, here, path, times), 0);
            assert_eq!(call(libc::SYS_utime, path, times, 0), 0);
            assert_eq!(call(libc::SYS_truncate, path, 0, 0), libc::EPERM);
            // FS_IOC_GETFLAGS, and clones of what is open.
            assert_eq!(call(libc::SYS_ioctl, fd, 0x8008_6601, times), libc::ENOTTY);
            assert_eq!(call(libc::SYS_ioctl, fd, 0x4004_9409, fd), libc::ENOTTY);
        }
        let after = std::fs::metadata(&path).unwrap();
        assert_eq!(after.permissions(), before.permissions());
        assert_eq!(after.modified().unwrap(), before.modified().unwrap());
        assert_eq!(after.len(), before.len());
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn root_is_a_user_like_any_other() {
        let given_up = || {
            let done = give_up_capabilities();
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let none = |kind: &str| status.contains(&format!("{kind}:\t0000000000000000\n"));
            done.is_ok() && none("CapEff") && none("CapPrm") && none("CapInh")
        };
        assert_eq!(in_child(given_up, || 0), 0);
    }

    #[test]
    fn memory_of_its_own_is_limited_for_good() {
        let map = |length: usize| {
            let (access, flags) = (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            );
            // SAFETY: a fresh mapping at an address of the kernel's choice.
            let mapped = unsafe { libc::mmap(std::ptr::null_mut(), length, access, flags, -1, 0) };
            mapped as c_long
        };
        let limited = || limit(1 << 30).is_ok();
        assert_eq!(in_child(limited, || map(64 << 20)), 0);
        assert_eq!(in_child(limited, || map(2 << 30)), libc::ENOMEM);
        let raise = |resource: libc::__rlimit_resource_t| {
            let more = [libc::RLIM_INFINITY; 2];
            // SAFETY: two numbers, as the call reads.
            unsafe { libc::syscall(libc::SYS_prlimit64, 0, resource, &raw const more, 0) }
        };
        assert_eq!(under_filters(|| raise(libc::RLIMIT_DATA)), libc::EPERM);
        assert_eq!(under_filters(|| raise(libc::RLIMIT_CORE)), 0);
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

    #[test]
    fn a_descriptor_that_others_share_stays_non_blocking() {
        // SAFETY: plain calls, and a number where one is read.
        unsafe {
            let fd = libc::eventfd(0, libc::EFD_NONBLOCK);
            let set =
                |flags: i32| under_filters(|| i64::from(libc::fcntl(fd, libc::F_SETFL, flags)));
            assert_eq!(set(0), libc::EPERM);
            assert_eq!(set(libc::O_RDWR | libc::O_APPEND), libc::EPERM);
            assert_eq!(set(libc::O_NONBLOCK | libc::O_ASYNC), libc::EPERM);
            let off = 0;
            let fionbio = || i64::from(libc::ioctl(fd, libc::FIONBIO, &raw const off));
            assert_eq!(under_filters(fionbio), libc::EPERM);
            let flags = libc::fcntl(fd, libc::F_GETFL);
            assert_ne!(flags & libc::O_NONBLOCK, 0);
            // Drivers do this to pipes of their own.
            assert_eq!(set(libc::O_RDWR | libc::O_NONBLOCK), 0);
            libc::close(fd);
        }
    }

    #[test]
    fn a_worker_leaves_its_pool_no_processes() {
        // SAFETY: the new process has a copy of everything and ends at once.
        let clone = |flags: i32| unsafe {
            let child = libc::syscall(libc::SYS_clone, flags | libc::SIGCHLD, 0, 0, 0, 0);
            if child == 0 {
                libc::_exit(0);
            }
            child
        };
        assert_eq!(
            under_filters(|| clone(libc::CLONE_PARENT)),
            libc::EPERM,
            "it would be the pool's child, which knows nothing of it"
        );
        assert_eq!(under_filters(|| clone(0)), 0, "linkers");
    }

    #[test]
    fn nothing_is_typed_or_pasted_into_a_terminal() {
        let file = std::fs::File::open("/dev/null").unwrap();
        for command in [TIOCSTI, TIOCLINUX] {
            let mut argument = 3u8;
            let done = under_filters(|| {
                // SAFETY: a byte where one is read.
                let done =
                    unsafe { libc::ioctl(file.as_raw_fd(), command as _, &raw mut argument) };
                done.into()
            });
            assert_eq!(done, libc::EPERM, "{command:#x}");
        }
    }
}
