//! What the application has been told of its devices: they answer so until it ends, whoever serves it.
//!
//! Another worker may have devices of another model. What they say of themselves is compared with what was
//! told before anything moves there: an application relies on what it has asked for, and on nothing else.

use std::{collections::BTreeMap, sync::Mutex};

use base::Unpoisoned;
use gantry_remoting::apis::opencl::{
    calls::{DeviceId, Info, Target},
    codes,
};

use crate::{abi::Outcome, object::SUB_DEVICES, platform};

/// Answers by device and parameter.
static TOLD: Mutex<BTreeMap<(u32, u32), Vec<u8>>> = Mutex::new(BTreeMap::new());

/// What a device says of itself that changes: whether it is there (`CL_DEVICE_AVAILABLE`), and how much memory is
/// free (`CL_DEVICE_GLOBAL_FREE_MEMORY_AMD`).
const CHANGES: [u32; 2] = [0x1027, 0x4039];

/// What a device says of itself that does not change while it exists.
pub fn answer(id: DeviceId, name: u32) -> Outcome<Vec<u8>> {
    let of = Target::Device(id);
    if id.0 >= SUB_DEVICES || CHANGES.contains(&name) {
        return platform::ask(of, name);
    }
    if let Some(value) = TOLD.lock_unpoisoned().get(&(id.0, name)) {
        return Ok(value.clone());
    }
    let value = platform::ask(of, name)?;
    TOLD.lock_unpoisoned().insert((id.0, name), value.clone());
    Ok(value)
}

/// How another device's answer has to compare with what was told.
#[derive(Clone, Copy)]
enum Rule {
    /// Each of its 64-bit numbers, or its only number, is as large.
    AtLeast,
    /// Its number is no larger.
    AtMost,
    /// It is equal.
    Equal,
    /// It has all of these bits.
    Bits,
    /// It has all of these words.
    Words,
}

/// What may not be less elsewhere. How much memory there is shows as buffers are made there.
const RULES: &[(u32, &str, Rule)] = &[
    (0x1003, "CL_DEVICE_MAX_WORK_ITEM_DIMENSIONS", Rule::AtLeast),
    (
        codes::DEVICE_MAX_WORK_GROUP_SIZE,
        "CL_DEVICE_MAX_WORK_GROUP_SIZE",
        Rule::AtLeast,
    ),
    (
        codes::DEVICE_MAX_WORK_ITEM_SIZES,
        "CL_DEVICE_MAX_WORK_ITEM_SIZES",
        Rule::AtLeast,
    ),
    (0x100d, "CL_DEVICE_ADDRESS_BITS", Rule::Equal),
    (0x100e, "CL_DEVICE_MAX_READ_IMAGE_ARGS", Rule::AtLeast),
    (0x100f, "CL_DEVICE_MAX_WRITE_IMAGE_ARGS", Rule::AtLeast),
    (0x1011, "CL_DEVICE_IMAGE2D_MAX_WIDTH", Rule::AtLeast),
    (0x1012, "CL_DEVICE_IMAGE2D_MAX_HEIGHT", Rule::AtLeast),
    (0x1013, "CL_DEVICE_IMAGE3D_MAX_WIDTH", Rule::AtLeast),
    (0x1014, "CL_DEVICE_IMAGE3D_MAX_HEIGHT", Rule::AtLeast),
    (0x1015, "CL_DEVICE_IMAGE3D_MAX_DEPTH", Rule::AtLeast),
    (
        codes::DEVICE_IMAGE_SUPPORT,
        "CL_DEVICE_IMAGE_SUPPORT",
        Rule::AtLeast,
    ),
    (0x1017, "CL_DEVICE_MAX_PARAMETER_SIZE", Rule::AtLeast),
    (0x1018, "CL_DEVICE_MAX_SAMPLERS", Rule::AtLeast),
    (
        codes::DEVICE_MEM_BASE_ADDR_ALIGN,
        "CL_DEVICE_MEM_BASE_ADDR_ALIGN",
        Rule::AtMost,
    ),
    (0x101b, "CL_DEVICE_SINGLE_FP_CONFIG", Rule::Bits),
    (0x1020, "CL_DEVICE_MAX_CONSTANT_BUFFER_SIZE", Rule::AtLeast),
    (0x1021, "CL_DEVICE_MAX_CONSTANT_ARGS", Rule::AtLeast),
    (
        codes::DEVICE_LOCAL_MEM_SIZE,
        "CL_DEVICE_LOCAL_MEM_SIZE",
        Rule::AtLeast,
    ),
    (0x1026, "CL_DEVICE_ENDIAN_LITTLE", Rule::Equal),
    (0x102a, "CL_DEVICE_QUEUE_PROPERTIES", Rule::Bits),
    (
        codes::DEVICE_EXTENSIONS,
        "CL_DEVICE_EXTENSIONS",
        Rule::Words,
    ),
    (0x1032, "CL_DEVICE_DOUBLE_FP_CONFIG", Rule::Bits),
    (0x1033, "CL_DEVICE_HALF_FP_CONFIG", Rule::Bits),
    (0x1040, "CL_DEVICE_IMAGE_MAX_BUFFER_SIZE", Rule::AtLeast),
    (0x1041, "CL_DEVICE_IMAGE_MAX_ARRAY_SIZE", Rule::AtLeast),
    (
        0x104b,
        "CL_DEVICE_IMAGE_BASE_ADDRESS_ALIGNMENT",
        Rule::AtMost,
    ),
    (0x104c, "CL_DEVICE_MAX_READ_WRITE_IMAGE_ARGS", Rule::AtLeast),
    (0x105c, "CL_DEVICE_MAX_NUM_SUB_GROUPS", Rule::AtLeast),
    (0x1063, "CL_DEVICE_ATOMIC_MEMORY_CAPABILITIES", Rule::Bits),
    (0x1064, "CL_DEVICE_ATOMIC_FENCE_CAPABILITIES", Rule::Bits),
    // Programs are written for one of them.
    (0x4003, "CL_DEVICE_WARP_SIZE_NV", Rule::Equal),
    (0x4043, "CL_DEVICE_WAVEFRONT_WIDTH_AMD", Rule::Equal),
];

fn rule(name: u32) -> Option<(&'static str, Rule)> {
    let found = RULES.iter().find(|(parameter, ..)| *parameter == name);
    found.map(|(_, text, rule)| (*text, *rule))
}

/// What another worker is to be asked before it serves this application.
pub fn questions() -> Vec<Info> {
    let told = TOLD.lock_unpoisoned();
    let relied_on = told.keys().filter(|(_, name)| rule(*name).is_some());
    let question = |&(device, parameter): &(u32, u32)| Info {
        of: Target::Device(DeviceId(device)),
        parameter,
    };
    relied_on.map(question).collect()
}

/// What its device lacks, if its answer is less than what was told; none if it has not answered.
pub fn lacking(question: &Info, there: Option<&[u8]>) -> Option<String> {
    let Target::Device(DeviceId(device)) = question.of else {
        return None;
    };
    let told = TOLD.lock_unpoisoned();
    let here = told.get(&(device, question.parameter))?;
    let (name, rule) = rule(question.parameter)?;
    less(rule, here, there.unwrap_or_default()).map(|why| format!("{name} {why}"))
}

fn less(rule: Rule, here: &[u8], there: &[u8]) -> Option<String> {
    if let Rule::Words = rule {
        let (here, there) = (words(here), words(there));
        let missing: Vec<_> = here.iter().filter(|it| !there.contains(it)).collect();
        let missing: Vec<_> = missing.into_iter().map(String::as_str).collect();
        return (!missing.is_empty()).then(|| format!("is without {} there", missing.join(", ")));
    }
    let (here, there) = (numbers(here), numbers(there));
    let good = |(here, there): (&u64, &u64)| match rule {
        Rule::AtLeast => there >= here,
        Rule::AtMost => there <= here,
        Rule::Equal => there == here,
        Rule::Bits | Rule::Words => there & here == *here,
    };
    let enough = there.len() >= here.len() && here.iter().zip(&there).all(good);
    (!enough).then(|| format!("is {there:?} there, and was {here:?}"))
}

/// Numbers of 64 bits, or one that is shorter.
fn numbers(bytes: &[u8]) -> Vec<u64> {
    let number = |bytes: &[u8]| {
        let mut all = [0; 8];
        all[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(all)
    };
    bytes.chunks(8).map(number).collect()
}

fn words(bytes: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(bytes);
    let text = text.trim_end_matches('\0');
    // The application is told of no others.
    let told = text
        .split_whitespace()
        .filter(|word| platform::passes(word));
    told.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_lacks_what_is_less_than_what_was_told_and_nothing_else() {
        let eight = |numbers: &[u64]| -> Vec<u8> {
            numbers.iter().flat_map(|it| it.to_le_bytes()).collect()
        };
        let both = b"cl_khr_fp16 cl_khr_fp64\0";
        let four = |number: u32| number.to_le_bytes().to_vec();
        for (rule, here, there, lacks) in [
            (Rule::AtLeast, eight(&[64]), eight(&[64]), false),
            (Rule::AtLeast, eight(&[64]), eight(&[32]), true),
            (
                Rule::AtLeast,
                eight(&[1024, 64, 64]),
                eight(&[1024, 1024, 64]),
                false,
            ),
            (
                Rule::AtLeast,
                eight(&[1024, 64, 64]),
                eight(&[1024, 1024, 32]),
                true,
            ),
            (
                Rule::AtLeast,
                eight(&[1024, 64, 64]),
                eight(&[1024, 1024]),
                true,
            ),
            (Rule::AtLeast, four(1), Vec::new(), true),
            (Rule::AtMost, four(1024), four(128), false),
            (Rule::AtMost, four(128), four(1024), true),
            (Rule::Equal, four(64), four(32), true),
            (Rule::Bits, eight(&[0b101]), eight(&[0b1101]), false),
            (Rule::Bits, eight(&[0b101]), eight(&[0b1100]), true),
            (
                Rule::Words,
                both.to_vec(),
                b"more cl_khr_fp64 cl_khr_fp16\0".to_vec(),
                false,
            ),
            (
                Rule::Words,
                both.to_vec(),
                b"cl_khr_fp16 more\0".to_vec(),
                true,
            ),
            // Of one that the application does not see.
            (
                Rule::Words,
                b"cl_khr_gl_sharing\0".to_vec(),
                Vec::new(),
                false,
            ),
        ] {
            let said = less(rule, &here, &there);
            assert_eq!(said.is_some(), lacks, "{said:?}");
        }
        let said = less(Rule::Words, both, b"cl_khr_fp16\0").unwrap();
        assert_eq!(said, "is without cl_khr_fp64 there");
        let said = less(Rule::AtLeast, &eight(&[256]), &eight(&[64])).unwrap();
        assert_eq!(said, "is [64] there, and was [256]");
    }
}
