//! What an application has been told about its devices. The answers stay the same until it ends, whichever worker
//! serves it.
//!
//! Another worker may have devices of another model. Their answers are compared with what was told before any of the
//! application's objects is made there. An application relies on what it has asked for, and on nothing else.

use std::{
    collections::BTreeMap,
    ffi::CStr,
    fmt,
    sync::{Arc, Mutex},
};

use base::Unpoisoned;
use remoting_proto::{
    apis::opencl::{
        calls::{Answered, DeviceId},
        codes, extensions,
    },
    wire::{Blob, Wire},
};
use remoting_session::image::Immovable;

use super::{Server, provenance::DeviceRecord};

/// Maximum bytes handed on with the description of an application; the state has all of them.
const LONGEST: usize = 32 << 10;

/// Answers that an application relies on, by device and parameter. All clones share them.
#[derive(Clone, Debug, Default)]
pub struct Told(Arc<Mutex<BTreeMap<(u32, u32), Blob>>>);

impl Told {
    /// Records an answer to the application. An earlier answer takes precedence.
    fn note(&self, device: DeviceId, parameter: u32, answer: &Blob) {
        if rule(parameter).is_some() {
            let mut all = self.0.lock_unpoisoned();
            let known = all.entry((device.0, parameter));
            known.or_insert_with(|| answer.clone());
        }
    }

    /// All recorded answers.
    pub(super) fn all(&self) -> Vec<Answered> {
        let answered = |(&(device, parameter), answer): (&(u32, u32), &Blob)| Answered {
            device: DeviceId(device),
            parameter,
            answer: answer.clone(),
        };
        self.0.lock_unpoisoned().iter().map(answered).collect()
    }

    /// All answers as bytes for [`compare_described`](Server::compare_described); empty if they exceed the maximum.
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
    /// What the application has been told about its devices.
    pub fn told(&self) -> Told {
        self.backend.told.clone()
    }

    /// Records that the application relies on this answer from now on.
    pub(super) fn relies_on(&self, device: DeviceId, parameter: u32, answer: &Blob) {
        let offered = self.backend.devices.get(device.0);
        if offered.is_ok_and(|it| matches!(&*it.record, DeviceRecord::Offered(_))) {
            self.backend.told.note(device, parameter, answer);
        }
    }

    /// Checks that the devices here provide everything that an application has been told about its own devices. It
    /// continues to rely on that.
    ///
    /// # Errors
    /// The devices lack something; the error lists all of it.
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

    /// Like `compare`, with the answers from [`described`](Told::described), if there are any.
    ///
    /// # Errors
    /// As above.
    pub fn compare_described(&self, Blob(told): &Blob) -> Result<(), Immovable> {
        match told.is_empty() {
            true => Ok(()),
            false => self.compare(&Vec::from_bytes(told)?),
        }
    }

    /// Like [`compare`](Self::compare), as the answer to a call: the reason, or nothing.
    pub(super) fn compare_devices(&mut self, told: &[Answered]) -> Result<Blob, i32> {
        let why = self.compare(told).err().map(|why| why.to_string());
        Ok(Blob(why.unwrap_or_default().into_bytes()))
    }
}

/// How another device's answer must compare with what was told. A device that does not know the parameter provides
/// nothing, which suffices where 0 was told.
#[derive(Clone, Copy)]
enum Rule {
    /// Each of its 64-bit numbers, or its only number, is at least as large.
    AtLeast,
    /// Its number, an alignment, is no larger. 0 means that there is nothing to align.
    AtMost,
    /// It is equal.
    Equal,
    /// It has all of these bits.
    Bits,
    /// It has all of these words.
    Words,
    /// It has all of these names (`cl_name_version`) in the same or a later version, as far as the application is told
    /// of them.
    Names(fn(&str) -> bool),
    /// Its text has the same or a later version.
    Version,
}

/// The properties that must not be less elsewhere. Insufficient memory shows when buffers are made there.
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
    (0x102f, "CL_DEVICE_VERSION", Rule::Version),
    (
        codes::DEVICE_EXTENSIONS,
        "CL_DEVICE_EXTENSIONS",
        Rule::Words,
    ),
    (0x1032, "CL_DEVICE_DOUBLE_FP_CONFIG", Rule::Bits),
    (0x1033, "CL_DEVICE_HALF_FP_CONFIG", Rule::Bits),
    (0x103d, "CL_DEVICE_OPENCL_C_VERSION", Rule::Version),
    (0x1040, "CL_DEVICE_IMAGE_MAX_BUFFER_SIZE", Rule::AtLeast),
    (0x1041, "CL_DEVICE_IMAGE_MAX_ARRAY_SIZE", Rule::AtLeast),
    (0x104a, "CL_DEVICE_IMAGE_PITCH_ALIGNMENT", Rule::AtMost),
    (
        0x104b,
        "CL_DEVICE_IMAGE_BASE_ADDRESS_ALIGNMENT",
        Rule::AtMost,
    ),
    (0x104c, "CL_DEVICE_MAX_READ_WRITE_IMAGE_ARGS", Rule::AtLeast),
    (0x105c, "CL_DEVICE_MAX_NUM_SUB_GROUPS", Rule::AtLeast),
    // The major version is in its highest bits.
    (0x105e, "CL_DEVICE_NUMERIC_VERSION", Rule::AtLeast),
    (
        codes::DEVICE_EXTENSIONS_WITH_VERSION,
        "CL_DEVICE_EXTENSIONS_WITH_VERSION",
        Rule::Names(extensions::passes),
    ),
    (0x1063, "CL_DEVICE_ATOMIC_MEMORY_CAPABILITIES", Rule::Bits),
    (0x1064, "CL_DEVICE_ATOMIC_FENCE_CAPABILITIES", Rule::Bits),
    (
        0x1066,
        "CL_DEVICE_OPENCL_C_ALL_VERSIONS",
        Rule::Names(|_| true),
    ),
    (0x106f, "CL_DEVICE_OPENCL_C_FEATURES", Rule::Names(|_| true)),
    // Programs are written for a specific value.
    (0x4003, "CL_DEVICE_WARP_SIZE_NV", Rule::Equal),
    (0x4043, "CL_DEVICE_WAVEFRONT_WIDTH_AMD", Rule::Equal),
];

fn rule(name: u32) -> Option<(&'static str, Rule)> {
    let found = RULES.iter().find(|(parameter, ..)| *parameter == name);
    found.map(|(_, text, rule)| (*text, *rule))
}

fn less(rule: Rule, here: &[u8], there: &[u8]) -> Option<String> {
    let numbers_less = |good: fn(u64, Option<u64>) -> bool| {
        let (here, there) = (numbers(here), numbers(there));
        let of = |at: usize| there.get(at).copied();
        let enough = here.iter().enumerate().all(|(at, it)| good(*it, of(at)));
        (!enough).then(|| format!("is {there:?} there, and was {here:?}"))
    };
    match rule {
        Rule::AtLeast => numbers_less(|here, there| there.unwrap_or(0) >= here),
        Rule::AtMost => numbers_less(|here, there| {
            here == 0 || there.is_some_and(|there| (1..=here).contains(&there))
        }),
        Rule::Equal => numbers_less(|here, there| there == Some(here)),
        Rule::Bits => numbers_less(|here, there| there.unwrap_or(0) & here == here),
        Rule::Words => {
            let there = words(there);
            without(words(here).into_iter().filter(|it| !there.contains(it)))
        }
        Rule::Names(is_told) => {
            let there = names(there);
            let has = |it: &Named| {
                let same = |other: &&Named| other.name == it.name;
                there
                    .iter()
                    .filter(same)
                    .any(|other| other.version >= it.version)
            };
            let told = names(here).into_iter().filter(|it| is_told(&it.name));
            without(told.filter(|it| !has(it)))
        }
        Rule::Version => {
            let (here, there) = (text(here), text(there));
            let older = version(&there) < version(&here);
            older.then(|| format!("is {there:?} there, and was {here:?}"))
        }
    }
}

fn without(missing: impl Iterator<Item = impl fmt::Display>) -> Option<String> {
    let missing: Vec<_> = missing.map(|it| it.to_string()).collect();
    (!missing.is_empty()).then(|| format!("is without {} there", missing.join(", ")))
}

/// 64-bit numbers, or a single shorter one.
fn numbers(bytes: &[u8]) -> Vec<u64> {
    let number = |bytes: &[u8]| {
        let mut all = [0; 8];
        all[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(all)
    };
    bytes.chunks(8).map(number).collect()
}

fn text(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.trim_end_matches('\0').to_owned()
}

fn words(bytes: &[u8]) -> Vec<String> {
    let text = text(bytes);
    // Only these are reported to the application.
    let told = text
        .split_whitespace()
        .filter(|word| extensions::passes(word));
    told.map(str::to_owned).collect()
}

/// The version in a text such as `OpenCL 3.0 ...` or `OpenCL C 1.2 ...`; `None` if it has none.
fn version(text: &str) -> Option<(u32, u32)> {
    text.split_whitespace().find_map(|word| {
        let (major, minor) = word.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    })
}

/// A name with a version, as in `cl_name_version`.
struct Named {
    name: String,
    /// 10 bits of major version, 10 of minor, 12 of patch.
    version: u32,
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, version } = self;
        let (major, minor, patch) = (version >> 22, version >> 12 & 0x3ff, version & 0xfff);
        write!(f, "{name} {major}.{minor}.{patch}")
    }
}

/// Each has 4 bytes of version and 64 of name.
fn names(bytes: &[u8]) -> Vec<Named> {
    let named = |entry: &[u8; 68]| {
        let [a, b, c, d, name @ ..] = entry;
        let name = CStr::from_bytes_until_nul(name).unwrap_or_default();
        Named {
            name: name.to_string_lossy().into_owned(),
            version: u32::from_le_bytes([*a, *b, *c, *d]),
        }
    };
    bytes.as_chunks().0.iter().map(named).collect()
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;

    use remoting_proto::apis::opencl::calls::{Info, Target};

    use super::*;
    use crate::{
        driver::{Api, api::Handle, null},
        testing,
    };

    /// A device with this maximum work-group size.
    unsafe extern "C" fn groups_of<const SIZE: u64>(
        device: Handle,
        name: u32,
        size: usize,
        value: *mut c_void,
        size_ret: *mut usize,
    ) -> i32 {
        // SAFETY: the caller guarantees `size` bytes, and a number, or null.
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
        // A query by its driver.
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
        // It relies on the same answer wherever it runs.
        let mut large = server::<1024>();
        large.compare_described(&described).unwrap();
        ask(&mut large, Target::Relied(DeviceId(0)));
        assert_eq!(large.told().all(), told);
        assert!(server::<512>().compare(&large.told().all()).is_ok());
        // Answers of other devices do not change it.
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
            (Rule::AtLeast, four(0), Vec::new(), false),
            (Rule::AtMost, four(1024), four(128), false),
            (Rule::AtMost, four(128), four(1024), true),
            (Rule::AtMost, four(0), four(64), false),
            (Rule::AtMost, four(0), Vec::new(), false),
            (Rule::AtMost, four(64), four(0), true),
            (Rule::AtMost, four(64), Vec::new(), true),
            (Rule::Equal, four(64), four(32), true),
            (Rule::Equal, four(64), four(64), false),
            (Rule::Equal, four(0), Vec::new(), true),
            (Rule::Bits, eight(&[0b101]), eight(&[0b1101]), false),
            (Rule::Bits, eight(&[0b101]), eight(&[0b1100]), true),
            (Rule::Bits, eight(&[0]), Vec::new(), false),
            (Rule::Bits, eight(&[0b101]), Vec::new(), true),
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
            // An extension that the application does not see.
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

    #[test]
    fn a_device_of_an_earlier_version_lacks_that() {
        for (here, there, lacks) in [
            ("OpenCL 3.0 CUDA\0", "OpenCL 3.0 PoCL HSTR: x\0", false),
            ("OpenCL 1.2 CUDA\0", "OpenCL 3.0 PoCL\0", false),
            ("OpenCL 3.0 CUDA\0", "OpenCL 1.2 PoCL 6.0\0", true),
            ("OpenCL C 1.2 \0", "OpenCL C 1.1\0", true),
            ("OpenCL C 1.2 \0", "OpenCL C 1.2\0", false),
            ("OpenCL C 1.2 \0", "", true),
            ("no version\0", "", false),
        ] {
            let said = less(Rule::Version, here.as_bytes(), there.as_bytes());
            assert_eq!(said.is_some(), lacks, "{here} {there} {said:?}");
        }
        let said = less(Rule::Version, b"OpenCL 3.0\0", b"OpenCL 1.2\0").unwrap();
        assert_eq!(said, "is \"OpenCL 1.2\" there, and was \"OpenCL 3.0\"");
    }

    #[test]
    fn a_device_has_all_names_with_versions_that_were_told_or_later_versions() {
        let list = |entries: &[(&str, u32)]| {
            let mut bytes = Vec::new();
            for (name, version) in entries {
                let mut entry = [0; 68];
                entry[..4].copy_from_slice(&version.to_le_bytes());
                entry[4..][..name.len()].copy_from_slice(name.as_bytes());
                bytes.extend(entry);
            }
            bytes
        };
        const ONE: u32 = 1 << 22;
        let rule = |parameter| rule(parameter).unwrap().1;
        let of_extensions = rule(codes::DEVICE_EXTENSIONS_WITH_VERSION);
        let of_features = rule(0x106f);
        let fp16 = list(&[("cl_khr_fp16", ONE)]);
        let newer = list(&[("other", 0), ("cl_khr_fp16", ONE | 1 << 12)]);
        assert_eq!(less(of_extensions, &fp16, &newer), None);
        let said = less(of_extensions, &newer, &fp16).unwrap();
        assert_eq!(said, "is without cl_khr_fp16 1.1.0 there");
        assert!(less(of_extensions, &fp16, &[]).is_some());
        // An extension that the application does not see.
        let sharing = list(&[("cl_khr_gl_sharing", ONE)]);
        assert_eq!(less(of_extensions, &sharing, &[]), None);
        let feature = list(&[("__opencl_c_fp64", 3 * ONE)]);
        assert_eq!(less(of_features, &feature, &feature), None);
        let said = less(of_features, &feature, &newer).unwrap();
        assert_eq!(said, "is without __opencl_c_fp64 3.0.0 there");
        // Each version that was told, or a later one.
        let of_languages = rule(0x1066);
        let both = list(&[("OpenCL C", ONE), ("OpenCL C", 3 * ONE)]);
        let first = list(&[("OpenCL C", ONE)]);
        assert_eq!(less(of_languages, &first, &both), None);
        assert!(less(of_languages, &both, &first).is_some());
        // Malformed input from a client.
        assert_eq!(less(of_features, &[7; 67], &[]), None);
        assert!(less(of_features, &[7; 68], &[]).is_some());
    }
}
