//! What an image takes on the device, which is charged like other memory: an image of a few hundred bytes may declare
//! variables of as many bytes as the device has, and code can be loaded again and again.
//!
//! Machine code says so in its sections. Text (PTX) does in its declarations; its code is taken to be as long as the text.
//! Of a fat binary the driver chooses one part: the largest counts. Whatever is not surely understood is not counted as
//! nothing.

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

/// How many bytes an image takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) variables: u64,
    pub(super) code: u64,
}

/// What an image takes. `None` if that cannot be told.
pub(super) fn size(image: &[u8]) -> Option<Size> {
    let mut most = Some(Size::default());
    let is_whole = images::each_part(image, LARGEST, |part| {
        let part = match part.starts_with(ELF) {
            true => of_code(part),
            false => ptx::variables(part).map(|variables| Size {
                variables,
                code: part.len() as u64,
            }),
        };
        most = most.zip(part).map(|(most, part)| Size {
            variables: most.variables.max(part.variables),
            code: most.code.max(part.code),
        });
    });
    most.filter(|_| is_whole)
}

/// What machine code takes: its writable sections, and the others that are loaded.
pub(super) fn of_code(image: &[u8]) -> Option<Size> {
    let code = ElfFile64::<Endianness>::parse(image).ok()?;
    let (mut all, mut count) = (Size::default(), 0);
    for section in code.sections() {
        count += 1;
        let SectionFlags::Elf { sh_type, sh_flags } = section.flags() else {
            return None;
        };
        let is_shared = section.name_bytes().ok()?.starts_with(SHARED);
        let is_writable = sh_flags.contains(elf::SHF_WRITE) || sh_type == elf::SHT_NOBITS;
        if is_writable && !(is_shared && section.size() <= MOST_SHARED) {
            all.variables = all.variables.saturating_add(section.size());
        } else if !is_shared && sh_flags.contains(elf::SHF_ALLOC) {
            all.code = all.code.saturating_add(section.size());
        }
    }
    (count > 0).then_some(all)
}

#[cfg(test)]
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
        let variables = |image: &[u8]| size(image).map(|size| size.variables);
        assert_eq!(variables(&image), Some((8 << 30) + 24));
        assert_eq!(variables(&code(&[])), Some(0));
        assert_eq!(size(b"\x7fELF, cut off"), None);
    }

    #[test]
    fn instructions_count_by_sections_or_as_long_as_their_text() {
        let (format, machine) = (object::BinaryFormat::Elf, object::Architecture::X86_64);
        let mut object = object::write::Object::new(format, machine, object::Endianness::Little);
        for (name, kind) in [
            (".text.kernel", object::SectionKind::Text),
            (".nv.constant0", object::SectionKind::ReadOnlyData),
            (".debug_line", object::SectionKind::Debug),
        ] {
            let section = object.add_section(Vec::new(), name.as_bytes().to_vec(), kind);
            object.append_section_data(section, &[0; 100], 1);
        }
        let image = object.write().expect("sections have names and sizes");
        let (variables, code) = (0, 200);
        assert_eq!(size(&image), Some(Size { variables, code }));
        let text = b".version 8.0\n.target sm_80\n.global .b8 a[9];";
        let (variables, code) = (9, text.len() as u64);
        assert_eq!(size(text), Some(Size { variables, code }));
    }

    #[test]
    fn the_largest_part_of_a_fat_binary_counts() {
        let text = ".version 8.0\n.target sm_80\n.global .b8 a[100];";
        let image = fat(&[(0, text.as_bytes()), (0, &code(&[(".nv.global", 300)]))]);
        assert_eq!(size(&image).map(|size| size.variables), Some(300));
        assert_eq!(size(&image[..image.len() - 1]), None);
    }
}
