//! What the guest knows of its machine: ACPI's tables, and its own page tables.

/// A number in memory, which may be unaligned.
///
/// # Safety
/// The address is mapped, and memory.
unsafe fn number<T: Copy>(address: u64) -> T {
    // SAFETY: the caller's promise.
    unsafe { (address as *const T).read_unaligned() }
}

/// The address of the first segment's PCI configuration space, from PVH's `hvm_start_info` by
/// way of ACPI's RSDP, XSDT and MCFG.
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
/// Present, writable, for ring 3.
const TABLE: u64 = 7;
/// And a page of 2 MiB.
const LEAF: u64 = 0x87;
/// The second entry of the page attributes: write-combining.
const COMBINING: u64 = 8;

unsafe extern "C" {
    static mut tables: u8;
    static mut spare: u8;
    static mut spare_end: u8;
}

/// Tables that are used already.
static USED: core::sync::atomic::AtomicU64 = core::sync::atomic::AtomicU64::new(0);

/// The table behind an entry, which is made if there is none.
///
/// # Safety
/// The entry is one of a table that is not a leaf's.
unsafe fn below(entry: *mut u64) -> Option<*mut u64> {
    // SAFETY: tables are mapped one to one; the spare ones are zeroes and nobody else's.
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

/// Maps memory above 4 GiB one to one.
pub fn map(address: u64, size: u64, combining: bool) -> Option<()> {
    let kind = if combining { LEAF | COMBINING } else { LEAF };
    let mut at = address;
    while at < address + size {
        let index = |shift: u32| (at >> shift & 511) as usize;
        // SAFETY: indices are below 512; nothing was mapped there, so that nothing is stale.
        unsafe {
            let first = (&raw mut tables).cast::<u64>().add(index(39));
            let second = below(first)?.add(index(30));
            below(second)?.add(index(21)).write_volatile(at | kind);
        }
        at += PAGE;
    }
    Some(())
}
