//! What the variables of an image take on the device, which is charged like other memory: an image of a few hundred bytes
//! may declare as much as the device has.
//!
//! Machine code says so in its sections, text (PTX) in its declarations. Of a fat binary the driver chooses one part: the
//! largest counts. Whatever is not surely understood is not counted as nothing.

use object::{Endianness, Object as _, ObjectSection, SectionFlags, elf, read::elf::ElfFile64};

use super::{
    images::{self, ELF},
    ptx,
};

/// Maximum number of bytes of a fat binary's parts, decompressed, that are looked at.
const LARGEST: usize = 1 << 30;
/// How the names of sections for memory of a kernel's blocks begin, which is not the device's; and the most of it.
const SHARED: &[u8] = b".nv.shared";
const MOST_SHARED: u64 = 1 << 20;

/// The bytes that variables of an image take. `None` if that cannot be told.
pub(super) fn bytes(image: &[u8]) -> Option<u64> {
    let mut most = Some(0);
    let is_whole = images::each_part(image, LARGEST, |part| {
        let part = match part.starts_with(ELF) {
            true => of_code(part),
            false => ptx::variables(part),
        };
        most = most.and_then(|most: u64| Some(most.max(part?)));
    });
    most.filter(|_| is_whole)
}

/// The bytes of all writable sections.
fn of_code(image: &[u8]) -> Option<u64> {
    let code = ElfFile64::<Endianness>::parse(image).ok()?;
    let (mut all, mut count) = (0u64, 0);
    for section in code.sections() {
        count += 1;
        let SectionFlags::Elf { sh_type, sh_flags } = section.flags() else {
            return None;
        };
        let is_shared = section.name_bytes().ok()?.starts_with(SHARED);
        let is_writable = sh_flags.contains(elf::SHF_WRITE) || sh_type == elf::SHT_NOBITS;
        if is_writable && !(is_shared && section.size() <= MOST_SHARED) {
            all = all.saturating_add(section.size());
        }
    }
    (count > 0).then_some(all)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{super::images::testing::fat, *};

    fn code(sections: &[(&str, u64)]) -> Vec<u8> {
        let (format, machine) = (object::BinaryFormat::Elf, object::Architecture::X86_64);
        let mut object = object::write::Object::new(format, machine, object::Endianness::Little);
        for (name, size) in sections {
            let kind = object::SectionKind::UninitializedData;
            let section = object.add_section(Vec::new(), name.as_bytes().to_vec(), kind);
            object.append_section_bss(section, *size, 1);
        }
        object.write().expect("sections have names and sizes")
    }

    #[test]
    fn variables_of_machine_code_are_counted_by_sections() {
        let image = code(&[
            (".nv.global", 8 << 30),
            (".nv.global.init", 24),
            (".nv.shared.kernel", 4096),
        ]);
        assert_eq!(bytes(&image), Some((8 << 30) + 24));
        assert_eq!(bytes(&code(&[])), Some(0));
        assert_eq!(bytes(b"\x7fELF, cut off"), None);
    }

    #[test]
    fn the_largest_part_of_a_fat_binary_counts() {
        let text = ".version 8.0\n.target sm_80\n.global .b8 a[100];";
        let image = fat(&[(0, text.as_bytes()), (0, &code(&[(".nv.global", 300)]))]);
        assert_eq!(bytes(&image), Some(300));
        assert_eq!(bytes(&image[..image.len() - 1]), None);
    }
}
