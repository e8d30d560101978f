//! `boot_params`, the "zero page" of the Linux boot protocol.

use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::{BootError, LoadedGuest};
use crate::layout::{AddressMap, CMDLINE_START, ZERO_PAGE_START};

/// "Undefined" boot loader: no registered identifier is claimed.
const LOADER_UNDEFINED: u8 = 0xff;
/// `loadflags` bit: the kernel is loaded at 1 MiB or above.
const LOADED_HIGH: u8 = 1;

/// Writes the zero page and returns its address.
pub(super) fn write(
    memory: &impl GuestMemoryBackend,
    map: &AddressMap,
    guest: &LoadedGuest,
    rsdp: GuestAddress,
) -> Result<GuestAddress, BootError> {
    let mut params = boot_params {
        hdr: guest.kernel.header.unwrap_or_default(),
        acpi_rsdp_addr: rsdp.0,
        ..Default::default()
    };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.loadflags = LOADED_HIGH;
    // Below 4 GiB, like all of low RAM.
    params.hdr.cmd_line_ptr = CMDLINE_START as u32;
    // The field comes from the file, which must not choose guest addresses.
    params.hdr.setup_data = 0;
    params.hdr.ramdisk_image = guest.initramfs.map_or(0, |range| range.start as u32);
    params.hdr.ramdisk_size = guest.initramfs.map_or(0, |range| range.size as u32);
    let memory_map = map.memory_map();
    let mut table = params.e820_table;
    for (slot, entry) in table.iter_mut().zip(&memory_map) {
        *slot = boot_e820_entry {
            addr: entry.range.start,
            size: entry.range.size,
            r#type: entry.kind as u32,
        };
    }
    params.e820_table = table;
    // At most eight entries of the table's 128.
    params.e820_entries = memory_map.len() as u8;
    memory
        .write_obj(params, GuestAddress(ZERO_PAGE_START))
        .map_err(|source| BootError::Write {
            what: "the zero page",
            source,
        })?;
    Ok(GuestAddress(ZERO_PAGE_START))
}
