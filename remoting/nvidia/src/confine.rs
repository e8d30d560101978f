//! What the worker may do once it listens: the device files by name, and the system calls below. Its commands to
//! devices are compared as whole words.

use std::{collections::BTreeMap, path::Path};

use base::confine::{Error, ONE_THREAD, THREADS};
use landlock::{
    ABI, Access, AccessFs, Ruleset, RulesetAttr, RulesetCreatedAttr, path_beneath_rules,
};
use libc::c_long;
use nvidia_abi::Branch;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen as Length, SeccompCmpOp as Compare,
    SeccompCondition as Condition, SeccompFilter, SeccompRule as Rule, TargetArch,
};

use crate::device::Node;

/// The Landlock rights that are denied: those of Linux 6.2. Earlier kernels enforce the ones that they know.
const RIGHTS: ABI = ABI::V3;
/// The most GPUs of a machine.
const GPUS: u8 = 32;

/// System calls beside those of a process with threads and sockets.
const FURTHER: [c_long; 8] = [
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_wait,
    libc::SYS_fallocate,
    libc::SYS_fstatfs,
    libc::SYS_getsockopt,
    libc::SYS_openat,
    libc::SYS_socketpair,
];

/// Whom a worker serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serving {
    /// Programs that connect.
    Programs,
    /// A machine, which has connected.
    Machine,
}

/// System calls by which programs are connected, and get ends of socket pairs.
const CONNECTING: [c_long; 2] = [libc::SYS_accept4, libc::SYS_socketpair];

/// Confines this thread and those that it starts to the nodes that `shows` names.
///
/// # Errors
/// The kernel has no Landlock or seccomp, or refuses.
pub fn confine(
    branch: Branch,
    serving: Serving,
    shows: impl Fn(Node) -> bool,
) -> Result<(), Error> {
    let nodes = (0..GPUS).map(Node::Gpu);
    let nodes = nodes.chain([Node::Control, Node::Uvm]);
    let nodes = nodes.filter(|node| shows(*node)).map(Node::path);
    let nodes = nodes.filter(|node| Path::new(node).exists());
    let access = AccessFs::ReadFile | AccessFs::WriteFile;
    Ruleset::default()
        .handle_access(AccessFs::from_all(RIGHTS))?
        .create()?
        .add_rules(path_beneath_rules(nodes, access))?
        .restrict_self()?;
    let target = TargetArch::try_from(std::env::consts::ARCH)?;
    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    let filter = SeccompFilter::new(
        calls(branch, serving)?,
        refuse,
        SeccompAction::Allow,
        target,
    )?;
    let program: BpfProgram = filter.try_into()?;
    Ok(seccompiler::apply_filter(&program)?)
}

/// The system calls that remain, with what must hold for their arguments.
fn calls(branch: Branch, serving: Serving) -> Result<BTreeMap<c_long, Vec<Rule>>, BackendError> {
    let always = ONE_THREAD.iter().chain(THREADS).chain(&FURTHER);
    let always = always.filter(|call| serving == Serving::Programs || !CONNECTING.contains(call));
    let mut calls: BTreeMap<_, _> = always.map(|call| (*call, Vec::new())).collect();
    let not_executable = || {
        let mask = libc::PROT_EXEC as u64;
        Rule::new(vec![Condition::new(
            2,
            Length::Dword,
            Compare::MaskedEq(mask),
            0,
        )?])
    };
    calls.insert(libc::SYS_mmap, vec![not_executable()?]);
    calls.insert(libc::SYS_mprotect, vec![not_executable()?]);
    // How much of a byte sent is unread, beside the commands.
    let commands = branch.commands().chain([libc::TIOCOUTQ as u32]);
    let command = |word: u32| {
        Rule::new(vec![Condition::new(
            1,
            Length::Dword,
            Compare::Eq,
            word.into(),
        )?])
    };
    calls.insert(
        libc::SYS_ioctl,
        commands.map(command).collect::<Result<_, _>>()?,
    );
    Ok(calls)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::fd::AsRawFd, thread};

    use super::*;

    #[test]
    fn only_listed_commands_and_no_files_remain() {
        let null = fs::File::open("/dev/null").expect("it is there");
        let command = |word: u32| {
            // SAFETY: the file knows none of these commands, so that no argument is read.
            let result = unsafe { libc::ioctl(null.as_raw_fd(), word.into(), 0) };
            assert_eq!(result, -1);
            std::io::Error::last_os_error().raw_os_error()
        };
        thread::scope(|scope| {
            let confined = scope.spawn(|| {
                confine(Branch::R580, Serving::Machine, |_| true).expect("the kernel has both");
                for word in Branch::R580.commands() {
                    assert_eq!(command(word), Some(libc::ENOTTY), "{word:x}");
                }
                for word in [0xc0b8_464a, 0xc020_462b, 0x23, libc::TCGETS as u32] {
                    assert_eq!(command(word), Some(libc::EPERM), "{word:x}");
                }
                assert!(fs::read("/etc/passwd").is_err());
                let pair = std::os::unix::net::UnixStream::pair();
                assert!(pair.is_err(), "sockets to send descriptors elsewhere");
                // SAFETY: a new mapping of no file.
                let mapped = unsafe {
                    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                    libc::mmap(
                        std::ptr::null_mut(),
                        4096,
                        libc::PROT_READ | libc::PROT_EXEC,
                        flags,
                        -1,
                        0,
                    )
                };
                assert_eq!(mapped, libc::MAP_FAILED, "memory to execute");
                thread::scope(|scope| scope.spawn(|| ()).join()).expect("threads may start");
            });
            confined.join().expect("it has not failed");
        });
    }
}
