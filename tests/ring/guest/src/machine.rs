//! Access to the machine: ACPI tables and the guest's own page tables.

/// A number in memory, which may be unaligned.
///
/// # Safety
/// The address is mapped, and memory.
unsafe fn number<T: Copy>(address: u64) -> T {
    // SAFETY: the caller's promise.
    unsafe { (address as *const T).read_unaligned() }
}

/// The address of the first segment's PCI configuration space, found from PVH's `hvm_start_info`
/// through ACPI's RSDP, XSDT and MCFG.
pub fn ecam(start_info: u64) -> Option<u64> {
    // SAFETY: the VMM has put the tables below 4 GiB, where everything is mapped.
    unsafe {
        let rsdp: u64 = number(start_info + 32);
        let xsdt: u64 = number(rsdp + 24);
        let end = xsdt + u64::from(number::<u32>(xsdt + 4));
        let mut listed = (xsdt + 36..end).step_by(8).map(|at| number::<u64>(at));
        let mcfg = listed.find(|table| number::<[u8; 4]>(*table) == *b"MCFG")?;
        Some(number(mcfg + 44))
    }
}

/// Size of the pages.
const PAGE: u64 = 2 << 20;
/// Present, writable, accessible from ring 3.
const TABLE: u64 = 7;
/// The same for a page of 2 MiB.
const LEAF: u64 = 0x87;
/// Selects the PAT's second entry, write-combining.
const COMBINING: u64 = 8;

unsafe extern "C" {
    static mut tables: u8;
    static mut spare: u8;
    static mut spare_end: u8;
}

/// Bytes of spare tables already used.
static USED: core::sync::atomic::AtomicU64 = core::sync::atomic::AtomicU64::new(0);

/// The table that an entry points to. It is created if there is none.
///
/// # Safety
/// The entry belongs to a table that is not a leaf table.
unsafe fn below(entry: *mut u64) -> Option<*mut u64> {
    // SAFETY: tables are identity-mapped; the spare ones are zeroed and unused.
    unsafe {
        if entry.read_volatile() == 0 {
            let used = USED.fetch_add(4096, core::sync::atomic::Ordering::Relaxed);
            let table = &raw mut spare as u64 + used;
            if table >= &raw mut spare_end as u64 {
                return None;
            }
            entry.write_volatile(table | TABLE);
        }
        Some((entry.read_volatile() & !0xfff) as *mut u64)
    }
}

/// Identity-maps memory above 4 GiB.
pub fn map(address: u64, size: u64, combining: bool) -> Option<()> {
    let kind = if combining { LEAF | COMBINING } else { LEAF };
    let mut at = address;
    while at < address + size {
        let index = |shift: u32| (at >> shift & 511) as usize;
        // SAFETY: indices are below 512; nothing was mapped there, so no TLB entry is stale.
        unsafe {
            let first = (&raw mut tables).cast::<u64>().add(index(39));
            let second = below(first)?.add(index(30));
            below(second)?.add(index(21)).write_volatile(at | kind);
        }
        at += PAGE;
    }
    Some(())
}
