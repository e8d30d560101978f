//! `hvm_start_info` and the structures that it points to (Xen's x86/HVM direct boot ABI, version
//! 1).

use linux_loader::loader::start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info};
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryBackend};

use super::{BootError, LoadedGuest};
use crate::layout::{
    AddressMap, CMDLINE_START, PVH_INFO_START, PVH_MEMMAP_START, PVH_MODLIST_START,
};

/// "xEn3" with its high bit set, as the ABI defines it.
const START_MAGIC: u32 = 0x336e_c578;

/// Writes the start info and returns its address.
pub(super) fn write_start_info(
    memory: &impl GuestMemoryBackend,
    map: &AddressMap,
    guest: &LoadedGuest,
    rsdp: GuestAddress,
) -> Result<GuestAddress, BootError> {
    let memory_map = map.memory_map();
    for (at, entry) in (PVH_MEMMAP_START..)
        .step_by(size_of::<hvm_memmap_table_entry>())
        .zip(&memory_map)
    {
        let entry = hvm_memmap_table_entry {
            addr: entry.range.start,
            size: entry.range.size,
            type_: entry.kind as u32,
            reserved: 0,
        };
        write(memory, entry, at, "the PVH memory map")?;
    }
    let mut info = hvm_start_info {
        magic: START_MAGIC,
        version: 1,
        cmdline_paddr: CMDLINE_START,
        rsdp_paddr: rsdp.0,
        memmap_paddr: PVH_MEMMAP_START,
        // At most eight entries.
        memmap_entries: memory_map.len() as u32,
        ..Default::default()
    };
    if let Some(initramfs) = guest.initramfs {
        let module = hvm_modlist_entry {
            paddr: initramfs.start,
            size: initramfs.size,
            ..Default::default()
        };
        write(memory, module, PVH_MODLIST_START, "the PVH module list")?;
        info.nr_modules = 1;
        info.modlist_paddr = PVH_MODLIST_START;
    }
    write(memory, info, PVH_INFO_START, "the PVH start info")?;
    Ok(GuestAddress(PVH_INFO_START))
}

fn write<T: ByteValued>(
    memory: &impl GuestMemoryBackend,
    value: T,
    at: u64,
    what: &'static str,
) -> Result<(), BootError> {
    memory
        .write_obj(value, GuestAddress(at))
        .map_err(|source| BootError::Write { what, source })
}
