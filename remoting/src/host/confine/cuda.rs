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
//! socket in the file system is Landlock's matter; an abstract one is seen by others, who may
//! connect to it.

use std::{
    fs::File,
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use super::{BTreeMap, BackendError, Condition, Len, Op, Rule, SeccompAction, c_long};

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
