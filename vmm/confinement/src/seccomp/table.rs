//! The table of allowed system calls.

use std::collections::BTreeMap;

use devices::thread::ThreadRole;
use seccompiler::{
    BackendError, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition, SeccompRule,
};

/// All roles.
pub const ROLES: [ThreadRole; 22] = [
    ThreadRole::Vmm,
    ThreadRole::Api,
    ThreadRole::Vcpu,
    ThreadRole::Console,
    ThreadRole::Disk,
    ThreadRole::Net,
    ThreadRole::Rng,
    ThreadRole::Vsock,
    ThreadRole::Memory,
    ThreadRole::Pmem,
    ThreadRole::Accel,
    ThreadRole::Gate,
    ThreadRole::Gpu,
    ThreadRole::PageFault,
    ThreadRole::UserDevice,
    ThreadRole::VhostUser,
    ThreadRole::Iommu,
    ThreadRole::Reset,
    ThreadRole::Migration,
    ThreadRole::Lane,
    ThreadRole::Snapshot,
    ThreadRole::Restore,
];

/// Rust's and libc's own needs on any thread: memory, locks, time, logging, leaving.
const EVERY_THREAD: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_wait,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_madvise,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_preadv2,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_statx,
    libc::SYS_tgkill,
    libc::SYS_timerfd_settime,
    libc::SYS_write,
    libc::SYS_writev,
];

/// A vCPU activates devices (epoll and event file descriptors) when the guest's driver is ready,
/// and reads and writes registers of physical devices, or of another process's device by messages.
/// It uses rings of io_uring, but creates none: operations of a new one would bypass this table.
const VCPU: &[i64] = &[
    libc::SYS_dup,
    libc::SYS_epoll_create1,
    libc::SYS_eventfd2,
    libc::SYS_fcntl,
    libc::SYS_io_uring_enter,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_timerfd_create,
];

const API: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_fcntl,
    libc::SYS_getsockopt,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    libc::SYS_unlink,
];

const CONSOLE: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_fcntl,
    libc::SYS_getsockopt,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_shutdown,
];

const DISK: &[i64] = &[
    libc::SYS_eventfd2,
    libc::SYS_fallocate,
    libc::SYS_fcntl,
    libc::SYS_fdatasync,
    libc::SYS_fsync,
    libc::SYS_fstat,
    libc::SYS_ftruncate,
    libc::SYS_io_uring_enter,
    libc::SYS_lseek,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
];

const VSOCK: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_dup,
    libc::SYS_fcntl,
    libc::SYS_getsockopt,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    libc::SYS_socket,
    libc::SYS_timerfd_create,
];

/// Gives memory back. A build with assertions looks at a descriptor before it is closed.
const MEMORY: &[i64] = &[libc::SYS_fallocate, libc::SYS_fcntl];

const PMEM: &[i64] = &[
    libc::SYS_fdatasync,
    libc::SYS_fsync,
    libc::SYS_msync,
    libc::SYS_sync_file_range,
];

/// Memory and an interrupt for the next application, and a connection to its worker, which may be
/// replaced while it serves.
const ACCEL: &[i64] = &[
    libc::SYS_connect,
    libc::SYS_eventfd2,
    libc::SYS_fcntl,
    libc::SYS_ftruncate,
    libc::SYS_memfd_create,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_socket,
    libc::SYS_socketpair,
];

/// Opens the gate's device anew for each pair, and speaks to another machine. Its own calls of KVM
/// and of the gate are in [`ioctl_types`].
const GATE: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_fcntl,
    libc::SYS_openat,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_socket,
];

/// Hears what a mediator of a GPU says, answers it, and connects to it again when it was lost.
const GPU: &[i64] = &[
    libc::SYS_connect,
    libc::SYS_fcntl,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_socket,
];

/// Looks for holes in the snapshot's memory. A build with assertions looks at a descriptor before it is closed.
const PAGE_FAULT: &[i64] = &[libc::SYS_fcntl, libc::SYS_lseek];

/// A build with assertions looks at a descriptor before it is closed.
const CLOSES: &[i64] = &[libc::SYS_fcntl];

const USER_DEVICE: &[i64] = &[libc::SYS_shutdown];

/// Speaks to a back end, and connects to it again when it was lost. A build with assertions looks at a descriptor before
/// it is closed.
const VHOST_USER: &[i64] = &[
    libc::SYS_connect,
    libc::SYS_fcntl,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_socket,
];

/// Finds the descriptors of groups that a reset of a bus needs, or sends another process a message.
const RESET: &[i64] = &[
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
];

/// Speaks to another host, whose name it may have to find out, looks for holes in memory files, and flushes disks.
const MIGRATION: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_eventfd2,
    libc::SYS_fallocate,
    libc::SYS_fcntl,
    libc::SYS_fdatasync,
    libc::SYS_fstat,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_lseek,
    libc::SYS_membarrier,
    libc::SYS_memfd_create,
    libc::SYS_mincore,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_socket,
    libc::SYS_uname,
    libc::SYS_unlink,
];

/// Memory goes by an open socket. A build with assertions looks at a descriptor before it is closed.
const LANE: &[i64] = &[
    libc::SYS_fcntl,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
];

/// Looks for memory that was never touched, writes new files and gives them their final names.
const SNAPSHOT: &[i64] = &[
    libc::SYS_fallocate,
    libc::SYS_fcntl,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_linkat,
    libc::SYS_lseek,
    libc::SYS_mincore,
    libc::SYS_mkdir,
    libc::SYS_openat,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_rename,
    libc::SYS_sync_file_range,
    libc::SYS_unlink,
];

/// Reads the files of a snapshot, opens, locks and mends disk images, and connects to the back ends of devices.
const RESTORE: &[i64] = &[
    libc::SYS_connect,
    libc::SYS_fallocate,
    libc::SYS_fcntl,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_lseek,
    libc::SYS_mincore,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_socket,
];

/// The control thread opens, places and removes what the others use.
const VMM: &[i64] = &[
    libc::SYS_access,
    libc::SYS_bind,
    libc::SYS_chmod,
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_dup,
    libc::SYS_dup2,
    libc::SYS_epoll_create1,
    libc::SYS_eventfd2,
    libc::SYS_faccessat2,
    libc::SYS_fallocate,
    libc::SYS_fchmod,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_geteuid,
    libc::SYS_getpgid,
    libc::SYS_getrlimit,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_ioctl,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_kill,
    libc::SYS_landlock_add_rule,
    libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_restrict_self,
    libc::SYS_listen,
    libc::SYS_lseek,
    libc::SYS_mbind,
    libc::SYS_memfd_create,
    libc::SYS_mkdir,
    libc::SYS_mlock,
    libc::SYS_msync,
    libc::SYS_newfstatat,
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_pipe2,
    libc::SYS_prctl,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_prlimit64,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_rmdir,
    libc::SYS_seccomp,
    libc::SYS_setsockopt,
    libc::SYS_signalfd4,
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_stat,
    libc::SYS_sysinfo,
    libc::SYS_timerfd_create,
    libc::SYS_tkill,
    libc::SYS_umask,
    libc::SYS_uname,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    libc::SYS_userfaultfd,
    libc::SYS_wait4,
];

/// `ioctl` request types (bits 8 to 15 of the request) that a role may use.
fn ioctl_types(role: ThreadRole) -> &'static [u8] {
    /// `KVMIO`.
    const KVM: u8 = 0xae;
    /// `VFIO_*`, and `IOMMU_*` of iommufd.
    const VFIO: u8 = b';';
    /// `UFFDIO_*`.
    const UFFD: u8 = 0xaa;
    /// `GATE_*` (vmfunc-gate/module/gate.h).
    const GATE: u8 = 0xb7;
    /// `BLK*`: sizes of a block device.
    const BLOCK: u8 = 0x12;
    match role {
        // What a guest's process asks of the gate is about the vCPU that executes it.
        ThreadRole::Vcpu => &[KVM, VFIO, GATE],
        // Memory and doorbells of a pair.
        ThreadRole::Gate => &[KVM, GATE],
        // The log of written pages.
        ThreadRole::Migration => &[KVM],
        // Memory is mapped for physical devices: what is plugged, and what the guest's IOMMU says.
        ThreadRole::Memory | ThreadRole::Iommu | ThreadRole::Reset => &[VFIO],
        ThreadRole::PageFault => &[UFFD],
        ThreadRole::Restore => &[BLOCK],
        _ => &[],
    }
}

/// Single `ioctl` requests that a role may use beside [`ioctl_types`]: their type has others, which
/// type into a terminal (`TIOCSTI`, `TIOCLINUX`).
fn ioctl_requests(role: ThreadRole) -> &'static [u32] {
    const FIONBIO: u32 = libc::FIONBIO as u32;
    /// What queues of a network interface, and which offloads, its driver has chosen.
    const TUN: &[u32] = &[libc::TUNSETQUEUE as u32, libc::TUNSETOFFLOAD as u32];
    /// Sockets, and the settings and the size of a terminal.
    const CONSOLE: &[u32] = &[
        FIONBIO,
        libc::TCGETS as u32,
        libc::TCSETS as u32,
        libc::TCGETS2 as u32,
        libc::TCSETS2 as u32,
        libc::TIOCGWINSZ as u32,
    ];
    /// `KVM_GET_DIRTY_LOG` and `KVM_CLEAR_DIRTY_LOG`: which page tables of a virtual GPU were written.
    const WRITES: &[u32] = &[0x4010_ae42, 0xc018_aec0];
    match role {
        ThreadRole::Gpu => WRITES,
        ThreadRole::Vcpu | ThreadRole::Net => TUN,
        ThreadRole::Console => CONSOLE,
        // It may have to end the process, and leaves the terminal as it was.
        ThreadRole::PageFault => &[libc::TCSETS as u32, libc::TCSETS2 as u32],
        ThreadRole::Vsock | ThreadRole::Migration => &[FIONBIO],
        _ => &[],
    }
}

/// Calls by number, beyond [`EVERY_THREAD`].
fn calls(role: ThreadRole) -> &'static [i64] {
    match role {
        ThreadRole::Vmm => VMM,
        ThreadRole::Api => API,
        ThreadRole::Vcpu => VCPU,
        ThreadRole::Console => CONSOLE,
        ThreadRole::Disk => DISK,
        ThreadRole::Vsock => VSOCK,
        ThreadRole::Memory => MEMORY,
        ThreadRole::Pmem => PMEM,
        ThreadRole::Accel => ACCEL,
        ThreadRole::Gate => GATE,
        ThreadRole::Gpu => GPU,
        ThreadRole::PageFault => PAGE_FAULT,
        ThreadRole::UserDevice => USER_DEVICE,
        ThreadRole::VhostUser => VHOST_USER,
        ThreadRole::Reset => RESET,
        ThreadRole::Migration => MIGRATION,
        ThreadRole::Lane => LANE,
        ThreadRole::Snapshot => SNAPSHOT,
        ThreadRole::Restore => RESTORE,
        ThreadRole::Net | ThreadRole::Rng | ThreadRole::Iommu => CLOSES,
    }
}

/// The rules of one role, by system call; an empty list allows any arguments.
pub fn rules(role: ThreadRole) -> Result<BTreeMap<i64, Vec<SeccompRule>>, BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    let mut allow = |role| {
        for call in EVERY_THREAD.iter().chain(calls(role)) {
            rules.insert(*call, Vec::new());
        }
    };
    if role == ThreadRole::Vmm {
        // Also the filter of the thread that starts all others, which they inherit.
        ROLES.into_iter().for_each(&mut allow);
    } else {
        allow(role);
    }
    if role == ThreadRole::Vmm {
        /// `ARCH_REQ_XCOMP_GUEST_PERM`: vCPUs may have AMX.
        const REQUEST_FOR_GUESTS: u64 = 0x1025;
        let request = SeccompCondition::new(0, Len::Dword, Op::Eq, REQUEST_FOR_GUESTS)?;
        let rule = SeccompRule::new(vec![request])?;
        rules.insert(libc::SYS_arch_prctl, vec![rule]);
    }
    for kind in ioctl_types(role) {
        let request =
            SeccompCondition::new(1, Len::Dword, Op::MaskedEq(0xff00), u64::from(*kind) << 8)?;
        rules
            .entry(libc::SYS_ioctl)
            .or_default()
            .push(SeccompRule::new(vec![request])?);
    }
    for request in ioctl_requests(role) {
        let request = SeccompCondition::new(1, Len::Dword, Op::Eq, u64::from(*request))?;
        rules
            .entry(libc::SYS_ioctl)
            .or_default()
            .push(SeccompRule::new(vec![request])?);
    }
    Ok(rules)
}
