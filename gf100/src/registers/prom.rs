//! The ROM, with the smallest VBIOS that nouveau accepts. The code below builds it; it is not taken
//! from a card. It describes no outputs and no clocks, and its initialization is empty.

/// Start of the ROM in BAR 0.
pub const START: u32 = 0x30_0000;
/// End (exclusive) of the ROM in BAR 0.
pub const END: u32 = 0x31_0000;

/// Size of the image in bytes: 16 blocks of 512.
const BYTES: usize = 16 * 512;
/// The PCI data structure (PCI firmware specification 3.0, 5.1.2).
const PCIR: usize = 0x40;
/// The table of tables.
const BIT: usize = 0x100;
const BIT_ENTRIES: usize = BIT + 12;
/// The tables that it points to.
const INFO: usize = 0x180;
const SCRIPTS: usize = 0x1a0;
/// The display outputs.
const DCB: usize = 0x200;

/// Builds the image.
pub fn image() -> Vec<u8> {
    let mut rom = vec![0; BYTES];
    let mut set = |at: usize, bytes: &[u8]| rom[at..at + bytes.len()].copy_from_slice(bytes);
    set(0x00, &[0x55, 0xaa, (BYTES / 512) as u8]);
    set(0x18, &(PCIR as u16).to_le_bytes());
    set(0x36, &(DCB as u16).to_le_bytes());
    set(PCIR, b"PCIR");
    set(PCIR + 4, &[0xde, 0x10, 0xd8, 0x06]);
    set(PCIR + 0x0a, &[0x18]);
    // Class 3, display.
    set(PCIR + 0x0f, &[0x03]);
    set(PCIR + 0x10, &[(BYTES / 512) as u8]);
    // Code type x86 PC; last image.
    set(PCIR + 0x14, &[0x00, 0x80]);
    // Version 1.0, a header of 12 bytes, two entries of six.
    set(BIT, &[0xff, 0xb8, b'B', b'I', b'T', 0, 0, 1, 12, 6, 2]);
    let entry = |id: u8, len: u16, at: usize| {
        let [l0, l1] = len.to_le_bytes();
        let [a0, a1] = (at as u16).to_le_bytes();
        [id, 1, l0, l1, a0, a1]
    };
    set(BIT_ENTRIES, &entry(b'i', 0x12, INFO));
    set(BIT_ENTRIES + 6, &entry(b'I', 0x10, SCRIPTS));
    // Version of the VBIOS.
    set(INFO + 3, &[0x70]);
    // Version 4.0, a header of 0x1b bytes, zero entries of eight bytes each, the signature.
    set(DCB, &[0x40, 0x1b, 0, 8]);
    set(DCB + 6, &0x4edc_bdcb_u32.to_le_bytes());
    let header = sum(&rom[BIT..BIT_ENTRIES]);
    rom[BIT + 11] = header.wrapping_neg();
    let all = sum(&rom);
    rom[BYTES - 1] = all.wrapping_neg();
    rom
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().copied().fold(0, u8::wrapping_add)
}

/// The word at an offset; the ROM repeats beyond its end.
pub fn word(rom: &[u8], at: u32) -> u32 {
    let byte = |n: usize| rom.get((at as usize + n) % rom.len().max(1)).copied();
    u32::from_le_bytes([0, 1, 2, 3].map(|n| byte(n).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_is_one_by_its_checksums() {
        let rom = image();
        assert_eq!(rom.len(), usize::from(rom[2]) * 512);
        assert_eq!(sum(&rom), 0);
        assert_eq!(sum(&rom[BIT..BIT_ENTRIES]), 0);
        assert_eq!(word(&rom, 0) & 0xffff, 0xaa55);
        assert_eq!(word(&rom, PCIR as u32), u32::from_le_bytes(*b"PCIR"));
    }
}
