//! Confinement of a process that serves others, once it listens. From then on it uses only its memory and its open
//! descriptors and needs nothing by name, or only some files for reading. Landlock denies access to all others, and
//! seccomp denies every system call that is not listed. Threads that start later inherit both.

use std::{collections::BTreeMap, path::Path};

use landlock::{
    ABI, Access, AccessFs, BitFlags, PathBeneath, PathFd, PathFdError, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError,
};
use libc::c_long;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

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
    /// A file that is to be read cannot be opened.
    #[error("cannot keep files (Landlock)")]
    File(#[from] PathFdError),
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

/// What may be done with files by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Files {
    /// What a folder contains may be listed, and what these contain.
    List,
    /// The same, and files in them may be read.
    Read,
}

impl Files {
    fn rights(self) -> BitFlags<AccessFs> {
        match self {
            Self::List => AccessFs::ReadDir.into(),
            Self::Read => AccessFs::ReadDir | AccessFs::ReadFile,
        }
    }
}

/// Permanently confines this thread, and the threads that it starts, to the system calls in these lists. Other calls
/// fail with `EPERM`, and no file can be opened by name. Sockets may be created, if at all, of the family `AF_UNIX`.
pub fn confine(allowed: &[&[c_long]]) -> Result<(), Error> {
    confine_except(&[], allowed)
}

/// As [`confine`], but for what is in these folders.
pub fn confine_except(folders: &[(&Path, Files)], allowed: &[&[c_long]]) -> Result<(), Error> {
    let mut ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(RIGHTS))?
        .create()?;
    for (folder, files) in folders {
        let rule = PathBeneath::new(PathFd::new(folder)?, files.rights());
        ruleset = ruleset.add_rule(rule)?;
    }
    ruleset.restrict_self()?;
    let target = TargetArch::try_from(std::env::consts::ARCH)?;
    let calls = allowed.iter().copied().flatten();
    let mut rules: BTreeMap<_, _> = calls.map(|call| (*call, Vec::new())).collect();
    if let Some(rules) = rules.get_mut(&libc::SYS_socket) {
        let family = SeccompCondition::new(
            0,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::Eq,
            libc::AF_UNIX as u64,
        )?;
        rules.push(SeccompRule::new(vec![family])?);
    }
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
    fn a_confined_thread_reads_what_it_may_and_has_sockets_of_this_machine_alone() {
        let folders = [(); 2].map(|()| tempfile::tempdir().expect("there is room"));
        let [one, other] = folders.each_ref().map(|folder| folder.path().to_owned());
        for folder in [&one, &other] {
            fs::write(folder.join("file"), "text").expect("there is room");
        }
        let confined = thread::spawn(move || {
            let calls = [libc::SYS_openat, libc::SYS_socket, libc::SYS_getdents64];
            let folders = [(Path::new("/"), Files::List), (&*one, Files::Read)];
            confine_except(&folders, &[ONE_THREAD, &calls]).expect("the kernel has both");
            assert!(fs::read(one.join("file")).is_ok());
            assert!(fs::read(other.join("file")).is_err(), "another's");
            assert!(fs::read_dir(&other).is_ok(), "its name");
            assert!(fs::write(one.join("file"), "").is_err(), "a change");
            // SAFETY: calls without pointers.
            let has = |family| unsafe { libc::socket(family, libc::SOCK_STREAM, 0) } >= 0;
            assert!(has(libc::AF_UNIX) && !has(libc::AF_INET));
        });
        confined.join().expect("it has not failed");
    }

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
