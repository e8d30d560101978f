//! Detects the format of a kernel and loads it.

use std::io::{self, Read, Seek, SeekFrom};

use linux_loader::loader::{Elf, KernelLoader};
use vm_memory::{GuestAddress, GuestMemoryBackend};

use super::error::CMDLINE_LIMIT;
use super::{
    BootError, BootProtocol, Image, LoadedKernel, bzimage,
    segment::{check_footprint, read_at},
};
use crate::layout::{AddressMap, AddressRange};

/// Size of `Elf64_Ehdr` in bytes.
const ELF_HEADER_SIZE: usize = 64;
/// Size of `Elf64_Phdr` in bytes.
const PROGRAM_HEADER_SIZE: usize = 56;
const ELF_MAGIC: &[u8] = b"\x7fELF";
const ELF_CLASS_64: u8 = 2;
const ELF_LITTLE_ENDIAN: u8 = 1;
const ELF_MACHINE_X86_64: u16 = 62;
/// The machine type of edk2's CloudHv image, although its class is 64-bit: a PVH entry is 32-bit code.
const ELF_MACHINE_386: u16 = 3;
/// A UEFI firmware volume (UEFI PI 1.8, volume 3, 3.2.1): its signature, and where it is.
const VOLUME_SIGNATURE: &[u8] = b"_FVH";
const VOLUME_SIGNATURE_AT: usize = 40;
const SEGMENT_LOAD: u32 = 1;
/// Names the program interpreter; kernels have none.
const SEGMENT_INTERPRETER: u32 = 3;
const SEGMENT_NOTE: u32 = 4;
/// Size of `Elf64_Nhdr` in bytes.
const NOTE_HEADER_SIZE: usize = 12;
const NOTE_PHYS32_ENTRY: u64 = 18;
/// Maximum number of bytes of a note segment that are searched. Linux has 500.
const MAX_NOTES: u64 = 64 * 1024;
/// Maximum number of segments. Linux has five. A hostile file with 65,535 overlapping segments
/// would make the loader copy the same bytes over and over.
const MAX_SEGMENTS: u16 = 64;
/// Maximum length of Linux's command line on x86 (COMMAND_LINE_SIZE without the terminating zero),
/// which PVH does not report. Linux silently truncates longer ones.
const LINUX_CMDLINE_MAX: usize = 2047;

/// What a file to boot appears to be, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadKind {
    /// A bzImage, or none of the others.
    BzImage,
    /// An ELF file that can be a kernel or firmware.
    Elf,
    /// An ELF file that can only be firmware.
    Firmware,
}

impl PayloadKind {
    /// Reads the first bytes of the file.
    ///
    /// # Errors
    ///
    /// [`BootError::ReadKernel`] if the file cannot be read.
    pub fn of<F: Read + Seek>(image: &mut F) -> Result<Self, BootError> {
        let mut start = [0; 20];
        let start = first_bytes(image, &mut start)?;
        Ok(match start.get(18..20) {
            _ if !start.starts_with(ELF_MAGIC) => Self::BzImage,
            Some(machine)
                if start[4] == ELF_CLASS_64 && *machine == ELF_MACHINE_386.to_le_bytes() =>
            {
                Self::Firmware
            }
            _ => Self::Elf,
        })
    }
}

/// Loads a bzImage, or an ELF kernel or firmware with a PVH entry point, into `memory`.
///
/// # Errors
///
/// [`BootError`], which says what is wrong with the file and what to do.
pub fn load_kernel<K: Image>(
    memory: &impl GuestMemoryBackend,
    map: &AddressMap,
    image: &mut K,
) -> Result<LoadedKernel, BootError> {
    let size = size_of(image).map_err(|source| BootError::ReadKernel {
        what: "the size",
        source,
    })?;
    let mut start = [0; VOLUME_SIGNATURE_AT + VOLUME_SIGNATURE.len()];
    let start = first_bytes(image, &mut start)?;
    if start.starts_with(ELF_MAGIC) {
        load_elf(memory, map, image, size)
    } else if let Some(header) = bzimage::read_header(image, size)? {
        bzimage::load(memory, map, image, size, header)
    } else if start.ends_with(VOLUME_SIGNATURE) {
        Err(BootError::FirmwareForQemu)
    } else {
        Err(BootError::NotAKernel {
            found: describe(start),
        })
    }
}

/// Describes what a file that is not a kernel appears to be.
fn describe(start: &[u8]) -> &'static str {
    match start {
        [] => "empty",
        [0x1f, 0x8b, ..] => "compressed with gzip",
        [0xfd, b'7', b'z', b'X', b'Z', ..] => "compressed with xz",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "compressed with zstd",
        [b'B', b'Z', b'h', ..] => "compressed with bzip2",
        [b'0', b'7', b'0', b'7', b'0', ..] => "a cpio archive (an initramfs?)",
        [b'M', b'Z', ..] => "an EFI program without a Linux setup header",
        [b'#', b'!', ..] => "a script",
        [b'Q', b'F', b'I', 0xfb, ..] => "a qcow2 disk image",
        _ => "in an unknown format",
    }
}

/// Returns the size of the file and rewinds it.
pub(super) fn size_of<F: Seek>(file: &mut F) -> io::Result<u64> {
    let size = file.seek(SeekFrom::End(0))?;
    file.rewind()?;
    Ok(size)
}

/// Fills `buf` from the start of the file, and returns as much of it as the file has.
fn first_bytes<'a, F: Read + Seek>(file: &mut F, buf: &'a mut [u8]) -> Result<&'a [u8], BootError> {
    let len = read_start(file, buf).map_err(|source| BootError::ReadKernel {
        what: "the first bytes",
        source,
    })?;
    Ok(&buf[..len])
}

/// Fills `buf` from the start of the file, as far as the file reaches.
fn read_start<F: Read + Seek>(file: &mut F, buf: &mut [u8]) -> io::Result<usize> {
    file.rewind()?;
    let mut len = 0;
    while len < buf.len() {
        match file.read(&mut buf[len..]) {
            Ok(0) => break,
            Ok(n) => len += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(len)
}

/// Reads the little-endian number of at most eight bytes at `at`, which must be within `bytes`.
fn field<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    let mut value = [0; 8];
    value[..N].copy_from_slice(&bytes[at..at + N]);
    u64::from_le_bytes(value)
}

/// Loads an ELF kernel. Everything that the loader library assumes is checked first.
fn load_elf<K: Image>(
    memory: &impl GuestMemoryBackend,
    map: &AddressMap,
    image: &mut K,
    size: u64,
) -> Result<LoadedKernel, BootError> {
    let (footprint, entry) = check_elf(map, image, size)?;
    let in_kernel = AddressRange {
        start: entry,
        size: 1,
    };
    if !footprint.contains(&in_kernel) {
        return Err(BootError::BadHeader {
            what: "its PVH entry point",
            value: entry,
        });
    }
    // The library also searches for the note, but loses it if another note segment follows.
    Elf::load(memory, None, image, None)?;
    Ok(LoadedKernel {
        protocol: BootProtocol::Pvh,
        entry: GuestAddress(entry),
        footprint,
        cmdline_max: LINUX_CMDLINE_MAX.min(CMDLINE_LIMIT),
        initramfs_last: u64::from(u32::MAX),
        header: None,
    })
}

/// Returns the memory that the segments of an ELF kernel occupy, all of it guest RAM, and the PVH
/// entry point.
fn check_elf<K: Image>(
    map: &AddressMap,
    image: &mut K,
    size: u64,
) -> Result<(AddressRange, u64), BootError> {
    // The class is checked first, since the header of a 32-bit file is shorter.
    let mut ident = [0; 20];
    read_at(image, 0, &mut ident, size, "the ELF header")?;
    if ident[4] != ELF_CLASS_64 {
        return Err(BootError::Elf32);
    }
    let machine = u16::from_le_bytes([ident[18], ident[19]]);
    if !matches!(machine, ELF_MACHINE_X86_64 | ELF_MACHINE_386) || ident[5] != ELF_LITTLE_ENDIAN {
        return Err(BootError::ElfMachine { machine });
    }
    let mut header = [0; ELF_HEADER_SIZE];
    read_at(image, 0, &mut header, size, "the ELF header")?;
    let table = field::<8>(&header, 32);
    let entry_size = field::<2>(&header, 54) as usize;
    let count = field::<2>(&header, 56) as u16;
    if entry_size != PROGRAM_HEADER_SIZE {
        return Err(BootError::BadHeader {
            what: "the size of its program headers",
            value: entry_size as u64,
        });
    }
    if table < ELF_HEADER_SIZE as u64 {
        return Err(BootError::BadHeader {
            what: "the offset of its program headers",
            value: table,
        });
    }
    if !(1..=MAX_SEGMENTS).contains(&count) {
        return Err(BootError::BadHeader {
            what: "the number of its segments",
            value: u64::from(count),
        });
    }
    let mut headers = vec![0; usize::from(count) * PROGRAM_HEADER_SIZE];
    read_at(image, table, &mut headers, size, "the program headers")?;
    let kinds = headers.chunks_exact(PROGRAM_HEADER_SIZE);
    if kinds
        .map(|segment| field::<4>(segment, 0) as u32)
        .any(|kind| kind == SEGMENT_INTERPRETER)
    {
        return Err(BootError::NotAKernel {
            found: "a program of Linux",
        });
    }
    let mut bounds: Option<(u64, u64)> = None;
    let mut entry = None;
    for segment in headers.chunks_exact(PROGRAM_HEADER_SIZE) {
        if let Some(range) = check_segment(segment, size)? {
            check_footprint(map, range)?;
            let (start, end) = bounds.unwrap_or((range.start, range.end()));
            bounds = Some((start.min(range.start), end.max(range.end())));
        }
        if entry.is_none() && field::<4>(segment, 0) as u32 == SEGMENT_NOTE {
            // `check_segment` has checked that the file contains all of it.
            let len = field::<8>(segment, 32).min(MAX_NOTES);
            let mut notes = vec![0; len as usize];
            read_at(image, field::<8>(segment, 8), &mut notes, size, "its notes")?;
            entry = pvh_entry(&notes);
        }
    }
    let (start, end) = bounds.ok_or(BootError::BadHeader {
        what: "the number of segments to load",
        value: 0,
    })?;
    let entry = entry.ok_or(match machine {
        // Only firmware has this type.
        ELF_MACHINE_386 => BootError::ElfMachine { machine },
        _ => BootError::NoPvhNote,
    })?;
    Ok((AddressRange::from_bounds(start, end), entry))
}

/// Finds the PVH entry point among these ELF notes: name "Xen", type `XEN_ELFNOTE_PHYS32_ENTRY`,
/// and a value of at least 32 bits.
fn pvh_entry(mut notes: &[u8]) -> Option<u64> {
    loop {
        let (header, rest) = notes.split_at_checked(NOTE_HEADER_SIZE)?;
        let name_len = field::<4>(header, 0) as usize;
        let len = field::<4>(header, 4) as usize;
        let (name, rest) = split_padded(rest, name_len)?;
        let (value, rest) = split_padded(rest, len)?;
        if name == b"Xen\0" && field::<4>(header, 8) == NOTE_PHYS32_ENTRY {
            return value.get(..4).map(|value| field::<4>(value, 0));
        }
        notes = rest;
    }
}

/// Returns the first `len` bytes, and what follows them after padding to a multiple of four.
fn split_padded(bytes: &[u8], len: usize) -> Option<(&[u8], &[u8])> {
    let padded = len.checked_next_multiple_of(4)?.min(bytes.len());
    Some((bytes.get(..len)?, &bytes[padded..]))
}

/// Returns the memory of the segment with this header of `PROGRAM_HEADER_SIZE` bytes; `None` if it
/// occupies none.
fn check_segment(header: &[u8], size: u64) -> Result<Option<AddressRange>, BootError> {
    let kind = field::<4>(header, 0) as u32;
    let offset = field::<8>(header, 8);
    let address = field::<8>(header, 24);
    let in_file = field::<8>(header, 32);
    let in_memory = field::<8>(header, 40);
    let needed = offset.saturating_add(in_file);
    if needed > size {
        return Err(BootError::Truncated {
            what: "a segment",
            needed,
            size,
        });
    }
    if kind != SEGMENT_LOAD || in_memory == 0 && in_file == 0 {
        return Ok(None);
    }
    if in_memory < in_file || address.checked_add(in_memory).is_none() {
        return Err(BootError::BadHeader {
            what: "the size of a segment in memory",
            value: in_memory,
        });
    }
    Ok(Some(AddressRange {
        start: address,
        size: in_memory,
    }))
}
