//! Variables of programs, at program scope in the global address space (OpenCL C 2.0). Kernels may change them, they live
//! as long as the program, and nothing reads or writes them from outside: an application that has them cannot be moved.
//!
//! Drivers tell how many bytes a built program's variables take. Where a driver says that its device has none at all,
//! yet compiles them (PoCL), the sources are searched.

mod declarations;

use std::sync::Arc;

use object::{Endianness, Object as _, ObjectSection, SectionFlags, elf, read::elf::ElfFile64};
use remoting_proto::apis::opencl::{calls::ProgramOrigin, codes};

use super::{
    driver::{
        api::{Api, Handle},
        cl,
    },
    records::{Build, Linked, Origin, ProgramRecord},
};

/// The most devices of a program that are asked.
const MOST_DEVICES: usize = 64;

/// What is known of how a program was made.
pub(super) enum Made {
    /// Built from what the record says.
    Built(Arc<ProgramRecord>),
    /// Linked from these.
    Linked(Option<Vec<Arc<ProgramRecord>>>),
}

/// Whether kernels of a program that has been built may change variables of it.
pub(super) fn has(api: &Api, program: Handle, made: &Made) -> bool {
    let told = match devices(api, program) {
        Some(all) => all
            .into_iter()
            .map(|device| told(api, program, device))
            .collect(),
        None => vec![None],
    };
    may_have(&told, made)
}

/// The same by what the driver has told for each device.
fn may_have(told: &[Option<bool>], made: &Made) -> bool {
    if told.contains(&Some(true)) {
        return true;
    }
    // Those that do not tell.
    told.contains(&None)
        && match made {
            Made::Built(record) => declares(record),
            Made::Linked(inputs) => inputs
                .as_ref()
                .is_none_or(|inputs| inputs.iter().any(|input| declares(input))),
        }
}

/// A program's devices. None if it has more than [`MOST_DEVICES`], which may be parts of one, or the driver does not tell.
fn devices(api: &Api, program: Handle) -> Option<Vec<Handle>> {
    let (mut all, mut bytes) = ([0 as Handle; MOST_DEVICES], 0usize);
    let code = cl!(
        api,
        clGetProgramInfo(
            program,
            codes::PROGRAM_DEVICES,
            size_of_val(&all),
            all.as_mut_ptr().cast(),
            &raw mut bytes,
        )
    );
    match code {
        0 => {
            let count = (bytes / size_of::<Handle>()).min(MOST_DEVICES);
            let told = all[..count].iter().copied();
            Some(told.filter(|device| *device != 0).collect())
        }
        _ => None,
    }
}

/// Whether the program has variables on the device. None if the device says that it has none, but may.
fn told(api: &Api, program: Handle, device: Handle) -> Option<bool> {
    let (mut most, mut total) = (0usize, 0usize);
    let asked = cl!(
        api,
        clGetDeviceInfo(
            device,
            codes::DEVICE_MAX_GLOBAL_VARIABLE_SIZE,
            size_of_val(&most),
            (&raw mut most).cast(),
            std::ptr::null_mut(),
        )
    );
    if asked != 0 {
        // Of a version that has no variables.
        return Some(false);
    }
    let asked = cl!(
        api,
        clGetProgramBuildInfo(
            program,
            device,
            codes::PROGRAM_BUILD_GLOBAL_VARIABLE_TOTAL_SIZE,
            size_of_val(&total),
            (&raw mut total).cast(),
            std::ptr::null_mut(),
        )
    );
    match (asked, total, most) {
        (0, 1.., _) => Some(true),
        (0, 0, 1..) => Some(false),
        _ => None,
    }
}

/// Whether a program's sources or binaries may have variables. Intermediate language may.
fn declares(record: &ProgramRecord) -> bool {
    let source = match &*record.origin {
        Origin::Linked(Linked { inputs, .. }) => {
            return inputs
                .as_ref()
                .is_none_or(|inputs| inputs.iter().any(|input| declares(input)));
        }
        Origin::Created(call, _) => match &call.origin {
            ProgramOrigin::Source(text) => text,
            // Kernels of the device's own.
            ProgramOrigin::BuiltIn(..) => return false,
            ProgramOrigin::Binary(all) => return all.iter().any(|(_, one)| binary_has(&one.0)),
            ProgramOrigin::Il(_) => return true,
        },
    };
    let Some(built) = &record.built else {
        return false;
    };
    let (options, included) = match &built.call {
        Build::Whole(call) => (&call.options, &call.included),
        Build::Compiled(call, _) => (&call.options, &call.included),
    };
    let options = words(&String::from_utf8_lossy(&options.0));
    if !has_variables(&options) {
        return false;
    }
    let headers = match &built.call {
        Build::Compiled(_, headers) => headers.as_deref(),
        Build::Whole(_) => Some(&[][..]),
    };
    let Some(headers) = headers else {
        return true;
    };
    let headers = headers.iter().filter_map(|origin| match &**origin {
        Origin::Created(call, _) => match &call.origin {
            ProgramOrigin::Source(text) => Some(text),
            _ => None,
        },
        Origin::Linked(_) => None,
    });
    let files = included.iter().map(|file| &file.contents);
    let texts = std::iter::once(source).chain(files).chain(headers);
    let texts = texts.map(|text| String::from_utf8_lossy(&text.0).into_owned());
    let texts: Vec<_> = definitions(&options).into_iter().chain(texts).collect();
    let has_classes = languages(&options).any(|language| language.starts_with("CLC++"));
    declarations::are_in(&texts, has_classes)
}

/// How a binary of PoCL begins.
const POCL: &[u8] = b"poclbin\0";
/// Where it has the number of its kernels.
const POCL_KERNELS: std::ops::Range<usize> = 20..24;
/// The most sections of a binary's kernels that are looked at.
const MOST_SECTIONS: usize = 1 << 16;

/// Whether a binary may have variables. PoCL's has a shared object for each kernel, which keeps variables in a writable
/// section; what is not known to be one of these may have some.
fn binary_has(binary: &[u8]) -> bool {
    let Some(kernels) = binary
        .get(POCL_KERNELS)
        .filter(|_| binary.starts_with(POCL))
        .and_then(|count| Some(u32::from_le_bytes(count.try_into().ok()?)))
    else {
        return true;
    };
    let (mut rest, mut objects, mut sections) = (binary, 0, 0);
    while let Some(at) = rest
        .windows(elf::ELFMAG.len())
        .position(|one| one == elf::ELFMAG)
    {
        rest = &rest[at..];
        let Ok(object) = ElfFile64::<Endianness>::parse(rest) else {
            return true;
        };
        for section in object.sections() {
            sections += 1;
            if sections > MOST_SECTIONS || keeps_variables(&section) {
                return true;
            }
        }
        objects += 1;
        rest = &rest[elf::ELFMAG.len()..];
    }
    // A kernel may have several. PoCL compiles all kernels before it gives out a binary. One without kernels has no
    // objects, and may yet be linked with others.
    kernels == 0 || objects < kernels
}

/// Whether a section is writable, and not only for the linker.
fn keeps_variables<'data>(section: &impl ObjectSection<'data>) -> bool {
    let SectionFlags::Elf { sh_flags, .. } = section.flags() else {
        return true;
    };
    let is_writable = sh_flags.contains(elf::SHF_WRITE);
    let of_linker = |name: &str| {
        [".dynamic", ".got", ".data.rel.ro"]
            .iter()
            .any(|one| name.starts_with(one))
    };
    is_writable && section.size() > 0 && !section.name().is_ok_and(of_linker)
}

/// The words of a build's options.
fn words(options: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let (mut quote, mut is_open) = (None, false);
    for one in options.chars() {
        match (quote, one) {
            (None, '"' | '\'') => quote = Some(one),
            (Some(open), one) if open == one => quote = None,
            (None, one) if one.is_whitespace() => is_open = false,
            (_, one) => {
                if !is_open {
                    words.push(String::new());
                    is_open = true;
                }
                if let Some(word) = words.last_mut() {
                    word.push(one);
                }
            }
        }
    }
    words
}

/// The macros that these define, as lines for the preprocessor.
fn definitions(options: &[String]) -> Vec<String> {
    let mut words = options.iter();
    let mut lines = Vec::new();
    while let Some(word) = words.next() {
        let define = match word.strip_prefix("-D") {
            None => continue,
            Some("") => words.next().map_or("", |word| word),
            Some(define) => define,
        };
        let (name, body) = define.split_once('=').unwrap_or((define, "1"));
        lines.push(format!("#define {name} {body}"));
    }
    lines
}

/// The languages that these choose, in capitals: the compiler takes both.
fn languages(options: &[String]) -> impl Iterator<Item = String> {
    let languages = options
        .iter()
        .filter_map(|word| word.strip_prefix("-cl-std="));
    languages.map(str::to_ascii_uppercase)
}

/// Whether they choose a language that has variables at program scope.
fn has_variables(options: &[String]) -> bool {
    languages(options).any(|language| {
        ["CL2", "CL3", "CLC++"]
            .iter()
            .any(|one| language.starts_with(one))
    })
}

#[cfg(test)]
mod tests {
    use std::{
        ffi::{CStr, c_char, c_void},
        sync::atomic::Ordering,
    };

    use remoting_proto::{
        apis::opencl::calls::{
            BuildProgram, ContextId, CreateContext, CreateProgram, DeviceId, ProgramId, Request,
        },
        wire::Blob,
    };

    use super::*;
    use crate::{Server, driver::api::ProgramCallback, testing};

    const VARIABLE: &str = "global int n = 40; kernel void k(global int *o) { *o = ++n; }";

    /// A request to build the first program with these options.
    fn builds(options: &str) -> Request {
        Request::BuildProgram(BuildProgram {
            id: ProgramId(0),
            devices: Vec::new(),
            options: Blob(options.as_bytes().to_vec()),
            folders: 0,
            included: Vec::new(),
        })
    }

    /// Has a program made of this, and built with these options.
    fn build(server: &mut Server, origin: ProgramOrigin, options: &str) {
        let (id, context) = (ProgramId(0), ContextId(0));
        let requests = [
            Request::CreateContext(CreateContext {
                id: context,
                devices: vec![DeviceId(0)],
                platform: None,
            }),
            Request::CreateProgram(CreateProgram {
                id,
                context,
                origin,
            }),
            builds(options),
        ];
        for request in requests {
            testing::carry_out(server, request);
        }
        while server.backend.building > 0 {
            server.notices().unwrap();
        }
    }

    /// A program that was made of this, and built with these options.
    fn built(origin: ProgramOrigin, options: &str) -> Arc<ProgramRecord> {
        let (mut server, ..) = testing::server();
        build(&mut server, origin, options);
        Arc::clone(&server.backend.programs.get(0).unwrap().record)
    }

    fn source(text: &str) -> ProgramOrigin {
        ProgramOrigin::Source(Blob(text.as_bytes().to_vec()))
    }

    /// Refuses builds with an option.
    unsafe extern "C" fn refuse(
        _: Handle,
        _: u32,
        _: *const Handle,
        options: *const c_char,
        _: Option<ProgramCallback>,
        _: *mut c_void,
    ) -> i32 {
        // SAFETY: a string, as drivers get it.
        let options = unsafe { CStr::from_ptr(options) };
        match options.to_bytes().ends_with(b"-DREFUSED") {
            true => codes::INVALID_OPERATION,
            false => 0,
        }
    }

    #[test]
    fn a_refused_build_leaves_a_program_as_it_was() {
        let (mut server, ..) = testing::server_before(Api::null().with_builds(refuse));
        build(&mut server, source(VARIABLE), "");
        let record = Arc::clone(&server.backend.programs.get(0).unwrap().record);
        for (options, expected) in [("-DREFUSED", true), ("-DTAKEN", false)] {
            record.has_variables.store(true, Ordering::Release);
            testing::carry_out(&mut server, builds(options));
            while server.backend.building > 0 {
                server.notices().unwrap();
            }
            let has = record.has_variables.load(Ordering::Acquire);
            assert_eq!(has, expected, "{options}");
            // And it is rebuilt elsewhere as it is here.
            let now = &server.backend.programs.get(0).unwrap().record;
            let recorded = now.built.as_deref().unwrap();
            let recorded = matches!(&recorded.call, Build::Whole(call) if call.options.0 == options.as_bytes());
            assert_eq!(recorded, !expected, "{options}");
        }
    }

    /// Tells of more devices than there is room for.
    unsafe extern "C" fn many(
        _: Handle,
        _: u32,
        room: usize,
        _: *mut c_void,
        bytes: *mut usize,
    ) -> i32 {
        let size = (MOST_DEVICES + 1) * size_of::<Handle>();
        // SAFETY: the worker asks for the size.
        unsafe { bytes.write(size) };
        match room < size {
            true => codes::INVALID_VALUE,
            false => 0,
        }
    }

    #[test]
    fn sources_of_programs_for_very_many_devices_are_searched() {
        let api = Api::null().with_programs(many);
        let newer = "-cl-std=CL2.0";
        for (text, expected) in [(VARIABLE, true), ("kernel void k(void) {}", false)] {
            let made = Made::Built(built(source(text), newer));
            assert_eq!(has(&api, 1, &made), expected, "{text}");
        }
    }

    #[test]
    fn drivers_are_believed_and_sources_searched_where_they_do_not_tell() {
        let newer = "-cl-std=CL2.0";
        let with = Made::Built(built(source(VARIABLE), newer));
        let without = Made::Built(built(source("kernel void k(void) {}"), newer));
        assert!(may_have(&[Some(false), Some(true)], &without));
        assert!(!may_have(&[Some(false)], &with));
        assert!(!may_have(&[], &with));
        assert!(may_have(&[Some(false), None], &with));
        assert!(!may_have(&[None], &without));
        for (options, expected) in [
            ("-D \"V=global int n = 40;\"", true),
            ("'-DV=static global int n = 40;' -DW", true),
            ("-DV= -D W=4 -I global", false),
            ("-DV=static -D", false),
        ] {
            let text = "V kernel void k(global int *o) { *o = 1; }";
            let made = Made::Built(built(source(text), &format!("{newer} {options}")));
            assert_eq!(may_have(&[None], &made), expected, "{options}");
        }
        let older = Made::Built(built(source(VARIABLE), "-cl-std=CL1.2"));
        assert!(!may_have(&[None], &older));
        let binary = built(ProgramOrigin::Il(Blob(vec![3, 2, 35, 7])), "");
        assert!(may_have(&[None], &Made::Built(Arc::clone(&binary))));
        assert!(!may_have(&[Some(false)], &Made::Built(binary)));
        let Made::Built(input) = with else {
            unreachable!();
        };
        assert!(may_have(&[None], &Made::Linked(Some(vec![input]))));
        assert!(may_have(&[None], &Made::Linked(None)));
    }

    /// An object with an empty section of this name, flags and size.
    fn object(name: &[u8], sh_flags: elf::SectionFlags, size: u64) -> Vec<u8> {
        let (format, machine) = (object::BinaryFormat::Elf, object::Architecture::X86_64);
        let mut object = object::write::Object::new(format, machine, object::Endianness::Little);
        let kind = object::SectionKind::UninitializedData;
        let section = object.add_section(Vec::new(), name.to_vec(), kind);
        object.append_section_bss(section, size, 1);
        let sh_type = elf::SHT_NOBITS;
        object.section_mut(section).flags = SectionFlags::Elf { sh_type, sh_flags };
        object.write().expect("sections have names and sizes")
    }

    #[test]
    fn binaries_of_pocl_tell_by_sections_of_their_kernels() {
        let writable = elf::SHF_WRITE | elf::SHF_ALLOC;
        let binary = |kernels: u32, objects: &[Vec<u8>]| {
            let mut binary = b"poclbin\0--------".to_vec();
            binary.extend(9u32.to_le_bytes());
            binary.extend(kernels.to_le_bytes());
            binary.extend(objects.concat());
            binary
        };
        let without = object(b".got.plt", writable, 24);
        let with = object(b".bss", writable, 4);
        assert!(!binary_has(&binary(1, std::slice::from_ref(&without))));
        assert!(!binary_has(&binary(1, &[object(b".bss", writable, 0)])));
        assert!(!binary_has(&binary(
            1,
            &[object(b".rodata", elf::SHF_ALLOC, 8)]
        )));
        assert!(binary_has(&binary(2, &[without.clone(), with])));
        // A kernel that has not been compiled yet.
        assert!(binary_has(&binary(2, std::slice::from_ref(&without))));
        assert!(binary_has(&binary(1, &[b"\x7fELF, cut off".to_vec()])));
        // A library.
        assert!(binary_has(&binary(0, &[])));
        assert!(binary_has(&without));
        assert!(binary_has(b""));
    }

    #[test]
    fn only_newer_languages_have_variables() {
        for (options, expected) in [
            ("-I a -cl-std=CL2.0", true),
            ("-cl-std=CLC++2021", true),
            ("\"-cl-std=cl2.0\"", true),
            ("-cl-std=CL1.2 -DCL2", false),
            ("", false),
        ] {
            assert_eq!(has_variables(&words(options)), expected, "{options}");
        }
    }
}
