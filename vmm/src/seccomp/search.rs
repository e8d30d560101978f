//! Filters that find a system call by bisection.
//!
//! A filter compares the call's number with each that it knows, one after the other. As it is installed, the kernel
//! evaluates it for all numbers there are, to know those that are always allowed (`seccomp_cache_prepare()`): for a long
//! list that is the larger part of what starting a thread costs. Here a tree of comparisons leads to filters of a
//! few numbers each.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompFilter, SeccompRule, TargetArch, sock_filter,
};

/// System calls of a filter at the end of a branch.
const LEAF: usize = 4;

/// `BPF_LD | BPF_W | BPF_ABS`, of the call's number, which is first in `struct seccomp_data`.
const LOAD_NUMBER: sock_filter = sock_filter {
    code: 0x20,
    jt: 0,
    jf: 0,
    k: 0,
};

/// The rules of some system calls, by number.
type Rules = [(i64, Vec<SeccompRule>)];

/// Compiles rules; any other call ends in `action`.
///
/// # Errors
/// A rule cannot be compiled.
pub fn compile(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    action: &SeccompAction,
) -> Result<BpfProgram, BackendError> {
    let rules: Vec<_> = rules.into_iter().collect();
    let mut program = vec![LOAD_NUMBER];
    program.extend(branch(&rules, action)?);
    Ok(program)
}

/// The part for some of the rules. The number is loaded.
fn branch(rules: &Rules, action: &SeccompAction) -> Result<BpfProgram, BackendError> {
    if rules.len() <= LEAF {
        // It ends by an action, whatever the number is, and looks at the architecture first.
        let rules = rules.iter().cloned().collect();
        let filter = SeccompFilter::new(
            rules,
            action.clone(),
            SeccompAction::Allow,
            TargetArch::x86_64,
        )?;
        return filter.try_into();
    }
    let (lower, upper) = rules.split_at(rules.len() / 2);
    let first = upper.first().map_or(0, |(number, _)| *number);
    let (lower, upper) = (branch(lower, action)?, branch(upper, action)?);
    let mut program = vec![
        // `BPF_JMP | BPF_JGE | BPF_K`: a conditional jump reaches 255 instructions at most, others all.
        sock_filter {
            code: 0x35,
            jt: 0,
            jf: 1,
            k: first as u32,
        },
        // `BPF_JMP | BPF_JA`.
        sock_filter {
            code: 0x05,
            jt: 0,
            jf: 0,
            k: lower.len() as u32,
        },
    ];
    program.extend(lower);
    program.extend(upper);
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seccomp::table;

    const X86_64: u32 = 0xc000_003e;
    const ALLOW: u32 = 0x7fff_0000;

    /// Executes a filter on a call with its second argument; the action, and the instructions that it took.
    fn execute(program: &[sock_filter], arch: u32, number: u32, argument: u64) -> (u32, usize) {
        let (mut at, mut a, mut steps) = (0, 0, 0);
        loop {
            let sock_filter { code, jt, jf, k } = program[at];
            let jump = |taken: bool| usize::from(if taken { jt } else { jf });
            steps += 1;
            at += 1;
            match code {
                0x20 => {
                    a = match k {
                        0 => number,
                        4 => arch,
                        24 => argument as u32,
                        28 => (argument >> 32) as u32,
                        other => panic!("loads {other}"),
                    }
                }
                0x05 => at += k as usize,
                0x15 => at += jump(a == k),
                0x25 => at += jump(a > k),
                0x35 => at += jump(a >= k),
                0x54 => a &= k,
                0x06 => return (k, steps),
                other => panic!("instruction {other:#x}"),
            }
        }
    }

    #[test]
    fn filters_decide_as_those_that_try_number_after_number_and_in_fewer_steps() {
        let kill = SeccompAction::KillProcess;
        for role in table::ROLES {
            let rules = table::rules(role).unwrap();
            let linear = SeccompFilter::new(
                rules.clone(),
                kill.clone(),
                SeccompAction::Allow,
                TargetArch::x86_64,
            )
            .unwrap();
            let linear: BpfProgram = linear.try_into().unwrap();
            let bisected = compile(rules, &kill).unwrap();
            let numbers = (0..600).chain([0x4000_0000, 0x4000_0001, u32::MAX]);
            let (mut slow, mut fast, mut allowed) = (0, 0, 0);
            for number in numbers {
                for argument in [0, 0x5412, 0x5421, 0xae80, 0x4010_ae42, 0x3b64, 1 << 32] {
                    for arch in [X86_64, 0x4000_0003] {
                        let (expected, steps) = execute(&linear, arch, number, argument);
                        slow += steps;
                        let (action, steps) = execute(&bisected, arch, number, argument);
                        fast += steps;
                        assert_eq!(action, expected, "{role:?}: {number} ({argument:#x})");
                        allowed += usize::from(action == ALLOW);
                    }
                }
            }
            assert!(allowed > 0 && fast * 2 < slow, "{role:?}: {fast} of {slow}");
        }
    }
}
