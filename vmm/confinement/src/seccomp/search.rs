//! Filters that find a system call by bisection.
//!
//! `seccompiler` compares the call's number with each that it knows, one after the other. As a filter is installed, the
//! kernel evaluates it for all numbers there are, to know those that are always allowed (`seccomp_cache_prepare()`), and
//! translates it: for a long list that is the larger part of what starting a thread costs. Here a tree of comparisons
//! leads to ranges of numbers of which the same is true.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompFilter, SeccompRule, TargetArch, sock_filter,
};

/// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
/// `AUDIT_ARCH_X86_64`.
const X86_64: u32 = 0xc000_003e;

/// `BPF_LD | BPF_W | BPF_ABS`.
fn load(offset: u32) -> sock_filter {
    instruction(0x20, 0, 0, offset)
}

/// `BPF_RET | BPF_K`.
fn end(action: SeccompAction) -> sock_filter {
    instruction(0x06, 0, 0, action.into())
}

/// `BPF_JMP | BPF_JEQ | BPF_K`: the next instruction is left out if it is equal.
fn unless(value: u32) -> sock_filter {
    instruction(0x15, 1, 0, value)
}

fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

/// What is done about calls.
enum Verdict {
    Allowed,
    Refused,
    /// Their arguments decide.
    Ruled(Vec<SeccompRule>),
}

/// Numbers from the first one up to the next range's.
struct Range {
    first: i64,
    verdict: Verdict,
}

/// Compiles rules; any other call ends in `action`.
///
/// # Errors
/// A rule cannot be compiled.
pub fn compile(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    action: &SeccompAction,
) -> Result<BpfProgram, BackendError> {
    let mut program = vec![
        load(ARCHITECTURE),
        unless(X86_64),
        end(SeccompAction::KillProcess),
        load(NUMBER),
    ];
    program.extend(branch(&ranges(rules), action)?);
    Ok(program)
}

/// All numbers, in order: there is at least one range.
fn ranges(rules: BTreeMap<i64, Vec<SeccompRule>>) -> Vec<Range> {
    let mut all: Vec<Range> = Vec::new();
    let mut next = 0;
    for (number, rules) in rules {
        if number > next {
            all.push(Range {
                first: next,
                verdict: Verdict::Refused,
            });
        }
        // No rule is no condition.
        let verdict = match rules.is_empty() {
            true => Verdict::Allowed,
            false => Verdict::Ruled(rules),
        };
        let goes_on = all.last().is_some_and(|last| {
            matches!(
                (&last.verdict, &verdict),
                (Verdict::Allowed, Verdict::Allowed)
            )
        });
        if !goes_on {
            all.push(Range {
                first: number,
                verdict,
            });
        }
        next = number + 1;
    }
    all.push(Range {
        first: next,
        verdict: Verdict::Refused,
    });
    all
}

/// The part for some ranges. The number is loaded, and is in one of them.
fn branch(ranges: &[Range], action: &SeccompAction) -> Result<BpfProgram, BackendError> {
    if let [Range { first, verdict }] = ranges {
        return match verdict {
            Verdict::Allowed => Ok(vec![end(SeccompAction::Allow)]),
            Verdict::Refused => Ok(vec![end(action.clone())]),
            Verdict::Ruled(rules) => SeccompFilter::new(
                BTreeMap::from([(*first, rules.clone())]),
                action.clone(),
                SeccompAction::Allow,
                TargetArch::x86_64,
            )?
            .try_into(),
        };
    }
    let (lower, upper) = ranges.split_at(ranges.len() / 2);
    let first = upper.first().map_or(0, |range| range.first as u32);
    let (lower, upper) = (branch(lower, action)?, branch(upper, action)?);
    // `BPF_JMP | BPF_JGE | BPF_K` reaches 255 instructions at most, and `BPF_JMP | BPF_JA` all.
    let mut program = match u8::try_from(lower.len()) {
        Ok(over) => vec![instruction(0x35, over, 0, first)],
        Err(_) => vec![
            instruction(0x35, 0, 1, first),
            instruction(0x05, 0, 0, lower.len() as u32),
        ],
    };
    program.extend(lower);
    program.extend(upper);
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seccomp::table;

    const ALLOW: u32 = 0x7fff_0000;

    /// Executes a filter on a call whose first two arguments are this one; the action, and the instructions that it took.
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
                        16 | 24 => argument as u32,
                        20 | 28 => (argument >> 32) as u32,
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
                for argument in [
                    0,
                    0x1025,
                    0x5412,
                    0x5421,
                    0xae80,
                    0x4010_ae42,
                    0x3b64,
                    1 << 32,
                ] {
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
            assert!(allowed > 0 && fast * 3 < slow, "{role:?}: {fast} of {slow}");
        }
    }
}
