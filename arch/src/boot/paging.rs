//! Descriptor tables and page tables with which a kernel is entered.

use kvm_bindings::kvm_segment;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend};

use super::{BootError, BootProtocol};
use crate::layout::{GDT_START, IDT_START, PAGE_SIZE, PD_START, PDPT_START, PML4_START};

/// Selectors: Linux requires 0x10 for code and 0x18 for data (boot.rst, "64-bit boot protocol").
const CODE_INDEX: u8 = 2;
const DATA_INDEX: u8 = 3;
/// The GDT has no room for a 16-byte TSS descriptor. Nothing reloads TR, so its hidden part, which
/// VMX checks, is enough.
const TASK_INDEX: u8 = 1;
const GDT_ENTRIES: usize = 4;

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const LARGE_PAGE: u64 = 1 << 7;
const LARGE_PAGE_SHIFT: u32 = 21;
const ENTRIES: u64 = 512;
/// Page directories, one GiB each.
const DIRECTORIES: u64 = 4;

/// Flat, readable code segment: 64-bit for the Linux protocol, 32-bit for PVH.
pub(crate) fn code_segment(protocol: BootProtocol) -> kvm_segment {
    let long = protocol == BootProtocol::Linux64;
    kvm_segment {
        type_: 0xb,
        l: long.into(),
        db: (!long).into(),
        ..flat(CODE_INDEX)
    }
}

/// Flat, writable data segment.
pub(crate) fn data_segment() -> kvm_segment {
    kvm_segment {
        type_: 0x3,
        db: 1,
        ..flat(DATA_INDEX)
    }
}

/// A busy TSS, which VMX requires.
pub(crate) fn task_segment() -> kvm_segment {
    kvm_segment {
        type_: 0xb,
        limit: 0x67,
        s: 0,
        g: 0,
        ..flat(TASK_INDEX)
    }
}

fn flat(index: u8) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector: u16::from(index) * 8,
        present: 1,
        s: 1,
        g: 1,
        ..Default::default()
    }
}

/// The descriptor of a segment with base 0 (Intel SDM 3A, 3.4.5).
fn descriptor(segment: &kvm_segment) -> u64 {
    let limit = u64::from(if segment.g == 1 {
        segment.limit >> 12
    } else {
        segment.limit
    });
    let bit = |value: u8, at: u32| u64::from(value & 1) << at;
    (limit & 0xffff)
        | u64::from(segment.type_ & 0xf) << 40
        | bit(segment.s, 44)
        | u64::from(segment.dpl & 3) << 45
        | bit(segment.present, 47)
        | (limit >> 16 & 0xf) << 48
        | bit(segment.avl, 52)
        | bit(segment.l, 53)
        | bit(segment.db, 54)
        | bit(segment.g, 55)
}

/// Size of the GDT in bytes, less one.
pub(crate) const GDT_LIMIT: u16 = (GDT_ENTRIES * 8 - 1) as u16;

/// Writes the GDT, and an IDT with one empty entry.
pub(super) fn write_gdt(
    memory: &impl GuestMemoryBackend,
    protocol: BootProtocol,
) -> Result<(), BootError> {
    let mut table = [0u64; GDT_ENTRIES];
    table[usize::from(CODE_INDEX)] = descriptor(&code_segment(protocol));
    table[usize::from(DATA_INDEX)] = descriptor(&data_segment());
    table[usize::from(TASK_INDEX)] = descriptor(&task_segment());
    write_entries(memory, GDT_START, table, "the GDT")?;
    write_entries(memory, IDT_START, [0], "the IDT")
}

/// Identity-maps the first 4 GiB in 2 MiB pages.
pub(super) fn write_identity_map(memory: &impl GuestMemoryBackend) -> Result<(), BootError> {
    let what = "the page tables";
    let directories = (0..ENTRIES).map(|n| match n {
        ..DIRECTORIES => (PD_START + n * PAGE_SIZE) | PRESENT | WRITABLE,
        _ => 0,
    });
    let top = (0..ENTRIES).map(|n| match n {
        0 => PDPT_START | PRESENT | WRITABLE,
        _ => 0,
    });
    let pages = (0..DIRECTORIES * ENTRIES)
        .map(|n| (n << LARGE_PAGE_SHIFT) | PRESENT | WRITABLE | LARGE_PAGE);
    write_entries(memory, PML4_START, top, what)?;
    write_entries(memory, PDPT_START, directories, what)?;
    write_entries(memory, PD_START, pages, what)
}

fn write_entries(
    memory: &impl GuestMemoryBackend,
    start: u64,
    entries: impl IntoIterator<Item = u64>,
    what: &'static str,
) -> Result<(), BootError> {
    let bytes: Vec<u8> = entries.into_iter().flat_map(u64::to_le_bytes).collect();
    memory
        .write_slice(&bytes, GuestAddress::new(start))
        .map_err(|source| BootError::Write { what, source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::MIB;

    #[test]
    fn descriptors_have_the_values_of_the_boot_protocols() {
        assert_eq!(
            descriptor(&code_segment(BootProtocol::Linux64)),
            0x00af_9b00_0000_ffff
        );
        assert_eq!(
            descriptor(&code_segment(BootProtocol::Pvh)),
            0x00cf_9b00_0000_ffff
        );
        assert_eq!(descriptor(&data_segment()), 0x00cf_9300_0000_ffff);
        assert_eq!(descriptor(&task_segment()), 0x0000_8b00_0000_0067);
    }

    #[test]
    fn the_identity_map_covers_four_gibibytes() {
        let memory =
            vm_memory::GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MIB as usize)])
                .unwrap();
        write_identity_map(&memory).unwrap();
        let read = |at: u64| memory.read_obj::<u64>(GuestAddress(at)).unwrap();
        for address in [0u64, 0x20_0000, 0xbfff_ffff, 0xffff_ffff] {
            assert_eq!(read(PML4_START) & !0xfff, PDPT_START);
            let directory = read(PDPT_START + (address >> 30) * 8) & !0xfff;
            let page = read(directory + (address >> 21 & 511) * 8);
            assert_eq!(page, (address & !0x1f_ffff) | 0x83);
        }
        assert_eq!(read(PDPT_START + 4 * 8), 0);
        assert_eq!(read(PML4_START + 8), 0);
    }
}
