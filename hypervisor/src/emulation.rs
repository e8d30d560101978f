//! Instructions of a guest's kernel that KVM cannot emulate.
//!
//! A KVM without hardware virtualization runs only a guest's programs on the processor. It emulates the kernel, without
//! some instructions, and shows the guest all features of the processor. Only the kernel can be told not to use them.

use std::fmt::{self, Write};

use kvm_bindings::{
    KVM_INTERNAL_ERROR_EMULATION, KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES,
};

/// The longest instruction in bytes.
const LONGEST: usize = 15;

/// An instruction that was not emulated.
pub(crate) struct Instruction {
    bytes: Vec<u8>,
}

impl Instruction {
    /// The instruction that an internal error of KVM is about, from the error's number and its data. `None` if KVM does
    /// not say.
    pub(crate) fn of_error(suberror: u32, data: &[u64]) -> Option<Self> {
        let &[flags, first, second, ..] = data else {
            return None;
        };
        let has_bytes = u64::from(KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES);
        if suberror != KVM_INTERNAL_ERROR_EMULATION || flags & has_bytes == 0 {
            return None;
        }
        let [size, bytes @ ..] = first.to_le_bytes();
        let mut bytes = [&bytes[..], &second.to_le_bytes()].concat();
        bytes.truncate(usize::from(size).min(LONGEST));
        (!bytes.is_empty()).then_some(Self { bytes })
    }

    /// Its name, and the option on the Linux command line that has the kernel do without it.
    fn known(&self) -> Option<(&'static str, Option<&'static str>)> {
        let is_prefix = |byte: &u8| {
            matches!(
                byte,
                0x26 | 0x2e | 0x36 | 0x3e | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3
            )
        };
        let end = self.bytes.iter().position(|byte| !is_prefix(byte))?;
        let (prefixes, rest) = self.bytes.split_at(end);
        let has = |prefix: u8| prefixes.contains(&prefix);
        let (is_wide, rest) = match rest {
            [rex @ 0x40..=0x4f, rest @ ..] => (rex & 8 != 0, rest),
            rest => (false, rest),
        };
        let found = match *rest {
            [0xcc, ..] => ("int3", None),
            [0x9b, ..] => ("fwait", None),
            [0x0f, 0x01, 0xca | 0xcb, ..] => ("clac or stac", Some("clearcpuid=smap")),
            [0x0f, 0x01, 0xd0 | 0xd1, ..] => ("xgetbv or xsetbv", Some("noxsave")),
            [0x0f, 0x01, 0xf9, ..] => ("rdtscp", Some("clearcpuid=rdtscp")),
            [0x0f, 0x38, 0x82, ..] if has(0x66) => ("invpcid", Some("clearcpuid=invpcid")),
            [0x0f, 0xb8, ..] if has(0xf3) => ("popcnt", Some("clearcpuid=popcnt")),
            [0x0f, 0x00, operand, ..] if matches!(operand >> 3 & 7, 4 | 5) => {
                ("verr or verw", Some("mitigations=off"))
            }
            [0x0f, group @ (0xae | 0xc7), operand, ..] => {
                match (group, operand >> 3 & 7, operand >> 6 == 3) {
                    (0xae, 0..=3, true) if has(0xf3) => {
                        ("rdfsbase or the like", Some("clearcpuid=fsgsbase"))
                    }
                    (0xae, 6, false) if has(0x66) => ("clwb", Some("clearcpuid=clwb")),
                    (0xae, 7, false) if has(0x66) => ("clflushopt", Some("clearcpuid=clflushopt")),
                    (0xae, 4..=6, false) | (0xc7, 3..=5, false) => {
                        ("xsave or xrstor", Some("noxsave"))
                    }
                    (0xc7, 1, false) if is_wide => ("cmpxchg16b", Some("clearcpuid=cx16")),
                    _ => return None,
                }
            }
            _ => return None,
        };
        Some(found)
    }
}

impl fmt::Display for Instruction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.bytes.iter().enumerate() {
            if index > 0 {
                f.write_char(' ')?;
            }
            write!(f, "{byte:02x}")?;
        }
        let known = self.known();
        if let Some((name, _)) = known {
            write!(f, " ({name})")?;
        }
        match known.and_then(|(_, option)| option) {
            Some(option) => {
                write!(f, ": add {option} to the guest kernel's command line")?;
                // Linux obeys the last one only.
                match option.split_once('=') {
                    Some((list @ "clearcpuid", name)) => {
                        write!(
                            f,
                            ", or {name} to the {list}= that is there, behind a comma"
                        )
                    }
                    _ => Ok(()),
                }
            }
            None => f.write_str(": use a guest kernel that does without it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What KVM says of an instruction.
    fn data(instruction: &[u8]) -> [u64; 3] {
        let mut bytes = [0; 16];
        bytes[0] = instruction.len() as u8;
        bytes[1..=instruction.len()].copy_from_slice(instruction);
        let (first, second) = bytes.split_at(8);
        [
            1,
            u64::from_le_bytes(first.try_into().unwrap()),
            u64::from_le_bytes(second.try_into().unwrap()),
        ]
    }

    fn described(instruction: &[u8]) -> String {
        let found = Instruction::of_error(KVM_INTERNAL_ERROR_EMULATION, &data(instruction));
        found.unwrap().to_string()
    }

    #[test]
    fn an_instruction_is_named_with_the_option_that_avoids_it() {
        let known: &[(&[u8], &str)] = &[
            (&[0xf0, 0x48, 0x0f, 0xc7, 0x4d, 0x00], "clearcpuid=cx16"),
            (&[0x48, 0x0f, 0xc7, 0x0f], "clearcpuid=cx16"),
            (&[0xf3, 0x48, 0x0f, 0xb8, 0xc7], "clearcpuid=popcnt"),
            (&[0x0f, 0x01, 0xca], "clearcpuid=smap"),
            (&[0x0f, 0x01, 0xd0], "noxsave"),
            (&[0x48, 0x0f, 0xae, 0x21], "noxsave"),
            (&[0x48, 0x0f, 0xc7, 0x21], "noxsave"),
            (&[0x66, 0x0f, 0x38, 0x82, 0x01], "clearcpuid=invpcid"),
            (&[0x66, 0x0f, 0xae, 0x30], "clearcpuid=clwb"),
            (&[0xf3, 0x48, 0x0f, 0xae, 0xd8], "clearcpuid=fsgsbase"),
            (&[0x0f, 0x00, 0x2d, 0, 0, 0, 0], "mitigations=off"),
        ];
        for (instruction, option) in known {
            let text = described(instruction);
            let end = format!(": add {option} to the guest kernel's command line");
            assert!(text.contains(&end), "{text}");
            let list = text.ends_with(" to the clearcpuid= that is there, behind a comma");
            assert_eq!(list, option.contains("cpuid"), "{text}");
        }
        assert_eq!(
            described(&[0x9b, 0x48, 0xc7]),
            "9b 48 c7 (fwait): use a guest kernel that does without it"
        );
        // cmpxchg8b, and addss.
        for other in [&[0x0f, 0xc7, 0x0f][..], &[0xf3, 0x0f, 0x58, 0xc1]] {
            let text = described(other);
            assert!(!text.contains('('), "{text}");
            assert!(text.ends_with(": use a guest kernel that does without it"));
        }
    }

    #[test]
    fn what_kvm_does_not_say_is_not_made_up() {
        let [_, first, second] = data(&[0xcc]);
        let emulation = KVM_INTERNAL_ERROR_EMULATION;
        assert!(Instruction::of_error(emulation, &[0, first, second]).is_none());
        assert!(Instruction::of_error(emulation, &[1, first]).is_none());
        assert!(Instruction::of_error(emulation, &[1, 0, 0]).is_none());
        assert!(Instruction::of_error(emulation + 1, &[1, first, second]).is_none());
        // A size that no instruction has.
        let long = Instruction::of_error(emulation, &[1, u64::MAX, u64::MAX]);
        assert_eq!(long.unwrap().bytes.len(), LONGEST);
    }
}
