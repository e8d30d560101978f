//! Confinement of a process that serves others, once it listens. From then on it uses only its memory and its open
//! descriptors and needs nothing by name. Landlock denies access to all files, and seccomp denies every system call
//! that is not listed. Threads that start later inherit both.

use std::collections::BTreeMap;

use landlock::{ABI, Access, AccessFs, Ruleset, RulesetAttr, RulesetError};
use libc::c_long;
use seccompiler::{BackendError, BpfProgram, SeccompAction, SeccompFilter, TargetArch};

/// The Landlock rights that are denied: those of Linux 6.2. Earlier kernels enforce the ones that they know.
const RIGHTS: ABI = ABI::V3;

/// System calls of a process that has one thread, sockets, eventfds and in-memory files.
pub const ONE_THREAD: &[c_long] = &[
    // Its own memory, and files that it has open.
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
    // Its thread.
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
    // Clients and interrupts.
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
    // Time, where the vDSO does not provide it.
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
];

/// What starting threads needs in addition to [`ONE_THREAD`].
pub const THREADS: &[c_long] = &[
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_get_robust_list,
    libc::SYS_prctl,
    libc::SYS_rseq,
    libc::SYS_sched_getaffinity,
    libc::SYS_set_robust_list,
];

/// Confinement failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Landlock refused.
    #[error("cannot take files away (Landlock)")]
    Landlock(#[from] RulesetError),
    /// The seccomp filter cannot be built.
    #[error("cannot make the filter of system calls")]
    Filter(#[from] BackendError),
    /// Seccomp refused.
    #[error("cannot install the filter of system calls")]
    Seccomp(#[from] seccompiler::Error),
}

/// Permanently confines this thread, and the threads that it starts, to the system calls in these lists. Other calls
/// fail with `EPERM`, and no file can be opened by name.
pub fn confine(allowed: &[&[c_long]]) -> Result<(), Error> {
    Ruleset::default()
        .handle_access(AccessFs::from_all(RIGHTS))?
        .create()?
        .restrict_self()?;
    let target = TargetArch::try_from(std::env::consts::ARCH)?;
    let calls = allowed.iter().copied().flatten();
    let rules: BTreeMap<_, _> = calls.map(|call| (*call, Vec::new())).collect();
    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    let filter = SeccompFilter::new(rules, refuse, SeccompAction::Allow, target)?;
    let program: BpfProgram = filter.try_into()?;
    Ok(seccompiler::apply_filter(&program)?)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::{Read, Write},
        os::unix::net::UnixStream,
        thread,
    };

    use super::*;

    #[test]
    fn a_confined_thread_has_its_descriptors_and_nothing_by_name() {
        let file = tempfile::NamedTempFile::new().expect("there is room");
        let path = file.path().to_owned();
        assert!(fs::read(&path).is_ok());
        let confined = thread::spawn(move || {
            let (mut one, mut two) = UnixStream::pair().expect("there are descriptors");
            // `openat` is allowed by the filter here, so that Landlock has to refuse it.
            confine(&[ONE_THREAD, &[libc::SYS_openat]]).expect("the kernel has both");
            one.write_all(b"y").expect("it is open");
            let mut byte = [0];
            two.read_exact(&mut byte).expect("it is open");
            assert!(fs::read(&path).is_err(), "a file by its name");
            assert!(
                UnixStream::pair().is_err(),
                "a call that is not in the lists"
            );
            assert!(thread::Builder::new().spawn(|| ()).is_err(), "a thread");
        });
        confined.join().expect("it has not failed");
        assert!(fs::read(file.path()).is_ok(), "others may");
    }
}
