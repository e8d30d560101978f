//! What an application has been told of its devices: they answer so until it ends, whoever serves it.
//!
//! Another worker may have devices of another model. What they say of themselves is compared with what was
//! told before anything of the application is made there: an application relies on what it has asked for, and on
//! nothing else.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use base::Unpoisoned;

use super::{Server, provenance::DeviceRecord};
use crate::{
    apis::opencl::{
        calls::{Answered, DeviceId},
        codes, extensions,
    },
    session::image::Immovable,
    wire::{Blob, Wire},
};

/// The most bytes that are handed on with the description of an application: the state has all.
const LONGEST: usize = 32 << 10;

/// Answers that an application relies on, by device and parameter; all clones have the same.
#[derive(Clone, Debug, Default)]
pub struct Told(Arc<Mutex<BTreeMap<(u32, u32), Blob>>>);

impl Told {
    /// The application has been told this. Where it has been told something before, that counts.
    fn note(&self, device: DeviceId, parameter: u32, answer: &Blob) {
        if rule(parameter).is_some() {
            let mut all = self.0.lock_unpoisoned();
            let known = all.entry((device.0, parameter));
            known.or_insert_with(|| answer.clone());
        }
    }

    /// All of it.
    pub(super) fn all(&self) -> Vec<Answered> {
        let answered = |(&(device, parameter), answer): (&(u32, u32), &Blob)| Answered {
            device: DeviceId(device),
            parameter,
            answer: answer.clone(),
        };
        self.0.lock_unpoisoned().iter().map(answered).collect()
    }

    /// The same as bytes for [`compare_described`](Server::compare_described); none if they are many.
    pub fn described(&self) -> Blob {
        let mut bytes = Vec::new();
        self.all().put(&mut bytes);
        match bytes.len() > LONGEST {
            true => Blob::default(),
            false => Blob(bytes),
        }
    }
}

impl Server {
    /// What the application is told of its devices.
    pub fn told(&self) -> Told {
        self.backend.told.clone()
    }

    /// The application relies on this answer from now on.
    pub(super) fn relies_on(&self, device: DeviceId, parameter: u32, answer: &Blob) {
        let offered = self.backend.devices.get(device.0);
        if offered.is_ok_and(|it| matches!(&*it.record, DeviceRecord::Offered(_))) {
            self.backend.told.note(device, parameter, answer);
        }
    }

    /// Whether the devices here have all that an application has been told of its own, which it goes on to rely on.
    ///
    /// # Errors
    /// They lack something: all of it.
    pub(super) fn compare(&self, told: &[Answered]) -> Result<(), Immovable> {
        let mut lacking = BTreeMap::new();
        for one in told {
            let (id, parameter) = (one.device, one.parameter);
            let Some((name, rule)) = rule(parameter) else {
                continue;
            };
            let here = self.device_info(id, parameter).unwrap_or_default();
            if let Some(why) = less(rule, &one.answer.0, &here.0) {
                lacking.insert((id.0, parameter), format!("{name} {why}"));
            }
        }
        if !lacking.is_empty() {
            let all: Vec<_> = lacking.into_values().collect();
            return Err(Immovable::Has(format!(
                "the device there is another one: {}",
                all.join("; ")
            )));
        }
        for one in told {
            self.relies_on(one.device, one.parameter, &one.answer);
        }
        Ok(())
    }

    /// The same with what [`described`](Told::described) has said of it, if anything.
    ///
    /// # Errors
    /// As above.
    pub fn compare_described(&self, Blob(told): &Blob) -> Result<(), Immovable> {
        match told.is_empty() {
            true => Ok(()),
            false => self.compare(&Vec::from_bytes(told)?),
        }
    }

    /// The same as a call's answer: why not.
    pub(super) fn compare_devices(&mut self, told: &[Answered]) -> Result<Blob, i32> {
        let why = self.compare(told).err().map(|why| why.to_string());
        Ok(Blob(why.unwrap_or_default().into_bytes()))
    }
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
        .filter(|word| extensions::passes(word));
    told.map(str::to_owned).collect()
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::ffi::c_void;

    use super::*;
    use crate::{
        apis::opencl::calls::{Info, Target},
        backends::opencl::{
            driver::{Api, api::Handle, null},
            testing,
        },
    };

    /// A device whose work-groups have so many work-items at most.
    unsafe extern "C" fn groups_of<const SIZE: u64>(
        device: Handle,
        name: u32,
        size: usize,
        value: *mut c_void,
        size_ret: *mut usize,
    ) -> i32 {
        // SAFETY: the caller's promise: there are `size` bytes, and a number, or null.
        unsafe {
            if name != codes::DEVICE_MAX_WORK_GROUP_SIZE {
                return null::device_info(device, name, size, value, size_ret);
            }
            if size >= size_of::<u64>() && !value.is_null() {
                value.cast::<u64>().write_unaligned(SIZE);
            }
            if !size_ret.is_null() {
                size_ret.write(size_of::<u64>());
            }
        }
        0
    }

    /// A server with such a device.
    fn server<const SIZE: u64>() -> Server {
        testing::server_before(Api::null().with_devices(groups_of::<SIZE>)).0
    }

    fn ask(server: &mut Server, of: Target) {
        let parameter = codes::DEVICE_MAX_WORK_GROUP_SIZE;
        server.info(&Info { of, parameter }).unwrap();
    }

    #[test]
    fn an_application_goes_to_no_device_that_lacks_what_it_was_told_itself() {
        let mut first = server::<256>();
        // Its driver has asked.
        ask(&mut first, Target::Device(DeviceId(0)));
        assert_eq!(first.told().all(), []);
        ask(&mut first, Target::Relied(DeviceId(0)));
        let told = first.told().all();
        let [one] = &told[..] else {
            panic!("{told:?}");
        };
        assert_eq!(one.answer.0, 256u64.to_le_bytes());
        let described = first.told().described();
        let small = server::<64>();
        for refused in [small.compare(&told), small.compare_described(&described)] {
            let why = refused.unwrap_err().to_string();
            let named = "CL_DEVICE_MAX_WORK_GROUP_SIZE is [64] there, and was [256]";
            assert!(why.contains(named), "{why}");
        }
        assert_eq!(small.told().all(), []);
        // It relies on the same wherever it is.
        let mut large = server::<1024>();
        large.compare_described(&described).unwrap();
        ask(&mut large, Target::Relied(DeviceId(0)));
        assert_eq!(large.told().all(), told);
        assert!(server::<512>().compare(&large.told().all()).is_ok());
        // What others say is no more than that.
        let nowhere = Answered {
            device: DeviceId(9),
            ..one.clone()
        };
        assert!(large.compare(&[nowhere]).is_err());
        let nothing = Answered {
            parameter: u32::MAX,
            ..one.clone()
        };
        large.compare(&vec![nothing; 1000]).unwrap();
        assert_eq!(large.told().all(), told);
        assert!(large.compare_described(&Blob(vec![1])).is_err());
    }

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
