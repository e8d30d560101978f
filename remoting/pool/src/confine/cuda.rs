//! What NVIDIA's driver needs for CUDA beside what it needs for OpenCL.
//!
//! `cuInit` answers 304 (`CUDA_ERROR_OPERATING_SYSTEM`) unless
//!
//! - it can make a Unix socket, give it the abstract name `cuda-uvmfd-NAMESPACE-PROCESS` and listen
//!   on it (by which processes that share memory ask each other for descriptors), and
//! - since driver 570, it can name its threads, by files in `/proc/self/task`.
//!
//! So it may make sockets of this one family that connect to nobody: `connect` says that nobody is
//! there, which is what the driver hears of the daemon of MPS that it looks for where there is none.
//! A socket for datagrams would need no connection to reach others, and is refused. The name of a
//! socket in the file system is Landlock's matter. An abstract one is its network namespace's: a worker
//! has [one of its own](own_network), where the kernel lets it, so that it takes no names from the
//! machine's other programs and nobody connects to it.

use std::{
    fs::File,
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use super::{BTreeMap, BackendError, Condition, Len, Op, Rule, SeccompAction, c_long};

/// Puts this process, which has one thread, into a network namespace of its own, for good. Who may not
/// make one gets it together with a user namespace, in which it is who it was.
///
/// Returns whether there is one: the kernel may let this user make neither.
///
/// # Errors
/// There is a user namespace, in which this process is nobody.
pub(crate) fn own_network() -> io::Result<bool> {
    // SAFETY: a plain call.
    let unshare = |flags| unsafe { libc::unshare(flags) } == 0;
    if unshare(libc::CLONE_NEWNET) {
        return Ok(true);
    }
    // SAFETY: plain calls.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    if !unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNET) {
        return Ok(false);
    }
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
    std::fs::write("/proc/self/gid_map", format!("{group} {group} 1"))?;
    Ok(true)
}

/// Whether [`own_network`] works here: tried in a process that ends at once.
pub fn has_own_network() -> bool {
    // SAFETY: the child makes system calls and ends; what it allocates is its own.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            let made = own_network().is_ok_and(|made| made);
            libc::_exit(i32::from(!made));
        }
        let mut status = -1;
        child > 0 && libc::waitpid(child, &raw mut status, 0) == child && status == 0
    }
}

/// Where the kernel keeps the names of this process's threads, beside other files about them. All are
/// this process's own.
const THREADS: &str = "/proc/self/task";

/// Options of sockets that may be set: addresses, sizes, times and what is told of the peer.
const OPTIONS: [i32; 6] = [
    libc::SO_REUSEADDR,
    libc::SO_SNDBUF,
    libc::SO_RCVBUF,
    libc::SO_PASSCRED,
    libc::SO_RCVTIMEO,
    libc::SO_SNDTIMEO,
];

/// Rules for calls whose first two arguments are a socket's family and its type.
pub(super) fn streams_and_packets() -> Vec<Result<Rule, BackendError>> {
    /// The bits of a type that are none of its flags.
    const KIND: u64 = 0xf;
    let rule = |kind: i32| {
        Rule::new(vec![
            Condition::new(0, Len::Dword, Op::Eq, libc::AF_UNIX as u64)?,
            Condition::new(1, Len::Dword, Op::MaskedEq(KIND), kind as u64)?,
        ])
    };
    [libc::SOCK_STREAM, libc::SOCK_SEQPACKET]
        .map(rule)
        .into_iter()
        .collect()
}

/// Calls that are allowed beside the usual ones.
pub(super) fn allowed() -> Result<Vec<(c_long, Vec<Rule>)>, BackendError> {
    let option = |name: &i32| {
        Rule::new(vec![
            Condition::new(1, Len::Dword, Op::Eq, libc::SOL_SOCKET as u64)?,
            Condition::new(2, Len::Dword, Op::Eq, *name as u64)?,
        ])
    };
    Ok(vec![
        (libc::SYS_bind, Vec::new()),
        (libc::SYS_listen, Vec::new()),
        (
            libc::SYS_setsockopt,
            OPTIONS.iter().map(option).collect::<Result<_, _>>()?,
        ),
        (
            libc::SYS_socket,
            streams_and_packets()
                .into_iter()
                .collect::<Result<_, _>>()?,
        ),
    ])
}

/// Calls that are refused with another error than `EPERM`.
pub(super) fn refused() -> (BTreeMap<c_long, Vec<Rule>>, SeccompAction) {
    let nobody = BTreeMap::from([(libc::SYS_connect, Vec::new())]);
    (nobody, SeccompAction::Errno(libc::ENOENT as u32))
}

/// The folder of this process's threads, for a rule that lasts.
///
/// The kernel makes a folder of `/proc` anew when it has forgotten it, and a rule would be of the
/// one before: so it is held open as long as the process lives. Programs that this one starts do not
/// have it.
///
/// # Errors
/// There is no `/proc`.
pub(super) fn threads() -> io::Result<PathBuf> {
    let held = File::options()
        .read(true)
        .custom_flags(libc::O_PATH | libc::O_CLOEXEC)
        .open(THREADS)?;
    std::mem::forget(held);
    Ok(Path::new(THREADS).to_owned())
}
