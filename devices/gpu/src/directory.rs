//! Entries of page directories, and which of their tables are in VRAM.

use gf100::format::{
    Aperture, LARGE, PAGE,
    directory::{Pde, SMALL_ENTRIES, Table},
};

use super::memory::Vram;

/// Number of 4 KiB pages per large page.
pub const PER_LARGE: u32 = (LARGE / PAGE) as u32;

/// First page of a table with `entries` entries, if it is completely within VRAM.
fn place(table: Option<Table>, entries: usize, vram: &Vram) -> Option<u32> {
    let table = table.filter(|table| table.aperture == Aperture::Vram)?;
    let end = u64::from(table.number) * PAGE + entries as u64 * 8;
    (end <= vram.len()).then_some(table.number)
}

/// A directory entry without those tables that cannot be shadowed.
pub fn usable(entry: Pde, vram: &Vram) -> Pde {
    let large = place(entry.large, entry.large_entries(), vram).and(entry.large);
    Pde {
        small: place(entry.small, SMALL_ENTRIES, vram).and(entry.small),
        large,
        large_shift: large.map_or(0, |_| entry.large_shift),
    }
}
