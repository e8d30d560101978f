//! The bzImage format (Documentation/arch/x86/boot.rst).

use std::io::{Read, Seek};

use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::{BzImage, KernelLoader};
use vm_memory::{ByteValued, GuestAddress, GuestMemoryBackend};

use super::error::CMDLINE_LIMIT;
use super::segment::{check_footprint, read_at};
use super::{BootError, BootProtocol, Image, LoadedKernel};
use crate::layout::{self, AddressMap, AddressRange, HIGH_RAM_START};

/// Offset of the setup header in the file.
const HEADER_OFFSET: u64 = 0x1f1;
/// "HdrS".
const HEADER_MAGIC: u32 = 0x5372_6448;
/// First boot protocol with `xloadflags`, and thus a documented 64-bit entry point.
const VERSION_2_12: u16 = 0x20c;
/// `loadflags` bit: protected-mode code is loaded at 1 MiB, as in any bzImage.
const LOADED_HIGH: u8 = 1;
/// `xloadflags` bit: the kernel has a 64-bit entry point at 0x200.
const KERNEL_64: u16 = 1;
/// Offset of the 64-bit entry point in the protected-mode code.
const ENTRY_64: u64 = 0x200;
const SECTOR: u64 = 512;
/// Meaning of a `setup_sects` of zero.
const DEFAULT_SETUP_SECTORS: u64 = 4;

/// Reads the setup header; `None` if the file has none.
pub(super) fn read_header<K: Read + Seek>(
    image: &mut K,
    size: u64,
) -> Result<Option<setup_header>, BootError> {
    // The magic number decides: a file that is too short to contain it is not a bzImage.
    let magic_end = HEADER_OFFSET + core::mem::offset_of!(setup_header, header) as u64 + 4;
    if size < magic_end {
        return Ok(None);
    }
    let what = "the setup header";
    let mut magic = [0; 4];
    read_at(image, magic_end - 4, &mut magic, size, what)?;
    if u32::from_le_bytes(magic) != HEADER_MAGIC {
        return Ok(None);
    }
    let mut header = setup_header::default();
    read_at(image, HEADER_OFFSET, header.as_mut_slice(), size, what)?;
    Ok(Some(header))
}

/// Size of the real-mode code, which precedes the protected-mode code.
fn setup_size(header: &setup_header) -> u64 {
    let sectors = match header.setup_sects {
        0 => DEFAULT_SETUP_SECTORS,
        n => u64::from(n),
    };
    (sectors + 1) * SECTOR
}

/// Loads the protected-mode code of the bzImage with this `header`.
pub(super) fn load<K: Image>(
    memory: &impl GuestMemoryBackend,
    map: &AddressMap,
    image: &mut K,
    size: u64,
    header: setup_header,
) -> Result<LoadedKernel, BootError> {
    let version = header.version;
    if version < VERSION_2_12
        || header.xloadflags & KERNEL_64 == 0
        || header.loadflags & LOADED_HIGH == 0
    {
        return Err(BootError::No64BitEntry { version });
    }
    let start = setup_size(&header);
    // `syssize` counts 16-byte paragraphs. What follows them (a signature, padding) is not part of
    // the kernel, but harmless.
    let needed = start + u64::from(header.syssize) * 16;
    if needed > size || start + ENTRY_64 >= size {
        return Err(BootError::Truncated {
            what: "the protected-mode code",
            needed: needed.max(start + ENTRY_64 + 1),
            size,
        });
    }
    let load = load_address(&header)?;
    check_footprint(
        map,
        AddressRange {
            start: load,
            size: size - start,
        },
    )?;
    let footprint = footprint(&header, load, size - start)?;
    check_footprint(map, footprint)?;
    BzImage::load(memory, Some(GuestAddress(load)), image, None)?;
    Ok(LoadedKernel {
        protocol: BootProtocol::Linux64,
        // Cannot overflow: the load address is in low RAM.
        entry: GuestAddress(load + ENTRY_64),
        footprint,
        cmdline_max: (header.cmdline_size as usize).min(CMDLINE_LIMIT),
        initramfs_last: u64::from(header.initrd_addr_max),
        header: Some(header),
    })
}

/// Where to load the protected-mode code: at 1 MiB if the kernel is relocatable, else at its fixed
/// address.
fn load_address(header: &setup_header) -> Result<u64, BootError> {
    let preferred = header.pref_address;
    if preferred > layout::HOLE_START {
        return Err(BootError::BadHeader {
            what: "its preferred load address",
            value: preferred,
        });
    }
    Ok(if header.relocatable_kernel != 0 {
        HIGH_RAM_START
    } else {
        preferred.max(HIGH_RAM_START)
    })
}

/// Memory that the kernel overwrites while it decompresses itself: `init_size` bytes from its
/// runtime start address (boot.rst, "init_size").
fn footprint(header: &setup_header, load: u64, len: u64) -> Result<AddressRange, BootError> {
    let alignment = u64::from(header.kernel_alignment);
    if header.relocatable_kernel != 0 && !alignment.is_power_of_two() {
        return Err(BootError::BadHeader {
            what: "its alignment",
            value: alignment,
        });
    }
    let runtime = if header.relocatable_kernel != 0 {
        // Cannot overflow: 1 MiB, aligned to at most 2 GiB.
        ((load + alignment - 1) & !(alignment - 1)).max(header.pref_address)
    } else {
        load
    };
    // Neither sum can overflow: each adds at most 4 GiB to an address of at most 3 GiB. The length
    // was checked to fit in RAM.
    let end = (runtime + u64::from(header.init_size)).max(load + len);
    Ok(AddressRange::from_bounds(load, end))
}
