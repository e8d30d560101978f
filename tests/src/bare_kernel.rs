//! Kernels without an operating system, for hosts whose KVM cannot boot one.

/// Creates an ELF kernel with a PVH entry: the 32-bit `code` is loaded at `at`, and starts there.
pub fn elf(at: u32, code: &[u8]) -> Vec<u8> {
    let words = |values: &[u64]| -> Vec<u8> {
        let bytes = values.iter().map(|value| value.to_le_bytes());
        bytes.flatten().collect()
    };
    let len = code.len() as u64;
    let at = u64::from(at);
    // 64 bits, little-endian; an executable for x86-64; program headers at 64, no sections.
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    file.extend(words(&[at, 64, 0]));
    file.extend([0, 0, 0, 0, 64, 0, 56, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    file.extend(words(&[1 | 5 << 32, 200, at, at, len, len, 4]));
    file.extend(words(&[4 | 4 << 32, 176, 0, 0, 24, 24, 4]));
    // XEN_ELFNOTE_PHYS32_ENTRY, 18, of "Xen".
    for value in [4, 8, 18] {
        file.extend(u32::to_le_bytes(value));
    }
    file.extend(b"Xen\0");
    file.extend(words(&[at]));
    file.extend(code);
    file
}

/// A kernel that sleeps forever.
pub fn sleeping() -> Vec<u8> {
    // hlt; jmp to the hlt.
    elf(0x10_0000, &[0xf4, 0xeb, 0xfd])
}
