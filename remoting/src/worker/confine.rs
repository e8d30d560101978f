//! What a worker may do, from before an application comes.
//!
//! A driver compiles kernels and runs linkers, and on a CPU a kernel is native code in this very
//! process: the worker is confined from outside, not by trusting what runs in it. Landlock lets it
//! write to its own cache folder and to device nodes only; seccomp takes away what reaches other
//! processes, the network and the kernel's configuration. Both are inherited by what the driver
//! starts.

use std::{collections::BTreeMap, path::Path};

use landlock::{
    ABI, Access, AccessFs, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError,
    path_beneath_rules,
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

/// System calls that no driver needs, and that reach beyond the worker.
const REFUSED: &[libc::c_long] = &[
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_kcmp,
    libc::SYS_pidfd_getfd,
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_open_tree,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_sethostname,
];

/// Why a worker is not confined.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Landlock.
    #[error("cannot confine the worker's file access")]
    Landlock(#[from] RulesetError),
    /// Making the filter.
    #[error("cannot make the worker's system call filter")]
    Filter(#[from] seccompiler::BackendError),
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
    let refused = SeccompAction::Errno(libc::EPERM as u32);
    let rules: BTreeMap<_, _> = REFUSED.iter().map(|call| (*call, Vec::new())).collect();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refused, TargetArch::x86_64)?;
    let program: BpfProgram = filter.try_into()?;
    Ok(seccompiler::apply_filter_all_threads(&program)?)
}
