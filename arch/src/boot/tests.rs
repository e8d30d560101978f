use std::io::Cursor;

use proptest::prelude::*;
use vm_memory::ByteValued;

use super::*;
use crate::layout::{CMDLINE_START, GIB, MIB, PVH_INFO_START, PVH_MODLIST_START, ZERO_PAGE_START};

type Memory = vm_memory::GuestMemoryMmap<()>;
const NO_INITRAMFS: Option<&mut Cursor<Vec<u8>>> = None;
const RSDP: GuestAddress = GuestAddress(0xe_0000);
const ELF_CODE: &[u8] = b"kernel text";

/// A machine with this much RAM, of which only the first `backed` bytes exist.
fn machine(ram: u64, backed: u64) -> (AddressMap, Memory) {
    let map = AddressMap::new(ram, 0, 40, 1).unwrap();
    let memory = Memory::from_ranges(&[(GuestAddress(0), backed as usize)]).unwrap();
    (map, memory)
}

fn small() -> (AddressMap, Memory) {
    machine(32 * MIB, 32 * MIB)
}

/// An ELF kernel at 16 MiB with a PVH note, one page of code and one zeroed page.
fn elf() -> Vec<u8> {
    let mut file = vec![0; 0x2000];
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"\x7fELF\x02\x01\x01");
    put(16, &2u16.to_le_bytes());
    put(18, &62u16.to_le_bytes());
    put(24, &0x100_0000u64.to_le_bytes());
    put(32, &64u64.to_le_bytes());
    put(54, &56u16.to_le_bytes());
    put(56, &2u16.to_le_bytes());
    let mut segment = |n: usize, kind: u32, offset: u64, address: u64, file: u64, memory: u64| {
        let at = 64 + n * 56;
        put(at, &kind.to_le_bytes());
        put(at + 8, &offset.to_le_bytes());
        put(at + 24, &address.to_le_bytes());
        put(at + 32, &file.to_le_bytes());
        put(at + 40, &memory.to_le_bytes());
        put(at + 48, &4u64.to_le_bytes());
    };
    segment(0, 1, 0x1000, 0x100_0000, 0x1000, 0x2000);
    segment(1, 4, 0x200, 0, 20, 20);
    put(0x200, &4u32.to_le_bytes());
    put(0x204, &4u32.to_le_bytes());
    put(0x208, &18u32.to_le_bytes());
    put(0x20c, b"Xen\0");
    put(0x210, &0x100_0040u32.to_le_bytes());
    put(0x1000, ELF_CODE);
    file
}

/// Firmware with the header of edk2's CloudHv image: machine 3, one segment from 1 MiB on, which
/// includes the headers and the note, and the entry point at its end.
fn cloudhv() -> Vec<u8> {
    let mut file = vec![0; 0x1000];
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"\x7fELF\x02\x01\x01\x03");
    for (at, value) in [(16, 2u16), (18, 3), (20, 1), (54, 56), (56, 2)] {
        put(at, &value.to_le_bytes());
    }
    put(32, &64u64.to_le_bytes());
    let load = [1 | 7 << 32, 0, 0x10_0000, 0x10_0000, 0x1000, 0x1000, 4u64];
    let note = [4 | 4 << 32, 0xb0, 0x10_00b0, 0x10_00b0, 20, 20, 4];
    for (at, value) in (64..).step_by(8).zip(load.into_iter().chain(note)) {
        put(at, &value.to_le_bytes());
    }
    put(0xb0, b"\x04\0\0\0\x04\0\0\0\x12\0\0\0Xen\0");
    put(0xc0, &0x10_0fd0u32.to_le_bytes());
    file
}

/// A relocatable 64-bit bzImage of boot protocol 2.15 that unpacks to 16 MiB.
fn bz_image() -> Vec<u8> {
    let header = setup_header {
        setup_sects: 3,
        syssize: 0x1000 / 16,
        boot_flag: 0xaa55,
        header: 0x5372_6448,
        version: 0x20f,
        loadflags: 1,
        code32_start: 0x10_0000,
        initrd_addr_max: 0x7fff_ffff,
        kernel_alignment: 0x20_0000,
        relocatable_kernel: 1,
        xloadflags: 1,
        cmdline_size: 2047,
        setup_data: 0xdead_0000,
        pref_address: 0x100_0000,
        init_size: 0x40_0000,
        ..Default::default()
    };
    with_header(header)
}

fn with_header(header: setup_header) -> Vec<u8> {
    let mut file = vec![0; 4 * 512 + 0x1000];
    file[0x1f1..][..size_of::<setup_header>()].copy_from_slice(header.as_slice());
    file[4 * 512..][..4].copy_from_slice(b"code");
    file
}

fn changed(change: impl FnOnce(&mut setup_header)) -> Vec<u8> {
    let file = bz_image();
    let mut header = setup_header::default();
    let bytes = header.as_mut_slice();
    let len = bytes.len();
    bytes.copy_from_slice(&file[0x1f1..][..len]);
    change(&mut header);
    with_header(header)
}

fn patched(mut file: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
    file[at..at + bytes.len()].copy_from_slice(bytes);
    file
}

fn error_of(kernel: Vec<u8>) -> BootError {
    let (map, memory) = small();
    load_kernel(&memory, &map, &mut Cursor::new(kernel)).unwrap_err()
}

#[test]
fn a_program_is_no_kernel_and_is_called_one() {
    for path in ["/bin/true", "/bin/sh"] {
        let Ok(program) = std::fs::read(path) else {
            continue;
        };
        let error = error_of(program).to_string();
        assert!(
            error.contains("is a program of Linux, not a kernel"),
            "{path}: {error}"
        );
    }
    // The second segment is the one with the note.
    let error = error_of(patched(elf(), 64 + 56, &3_u32.to_le_bytes())).to_string();
    assert!(error.contains("a program of Linux"), "{error}");
    let error = error_of(b"#!/bin/sh\n".to_vec()).to_string();
    assert!(error.contains("a script"), "{error}");
}

fn read<T: ByteValued>(memory: &Memory, at: u64) -> T {
    memory.read_obj(GuestAddress(at)).unwrap()
}

#[test]
fn an_elf_kernel_is_entered_at_its_pvh_note_and_told_of_the_machine() {
    let (map, memory) = small();
    let initramfs = vec![7; 5000];
    let guest = load(
        &memory,
        &map,
        &mut Cursor::new(elf()),
        Some(&mut Cursor::new(initramfs.clone())),
        "console=hvc0",
    )
    .unwrap();
    let entry = write_boot_data(&memory, &map, &guest, RSDP).unwrap();
    assert_eq!(
        entry,
        EntryPoint {
            protocol: BootProtocol::Pvh,
            rip: GuestAddress(0x100_0040),
            info: GuestAddress(PVH_INFO_START),
        }
    );
    let code: [u8; 11] = read(&memory, 0x100_0000);
    assert_eq!(code, ELF_CODE);
    let cmdline: [u8; 13] = read(&memory, CMDLINE_START);
    assert_eq!(&cmdline, b"console=hvc0\0");

    // magic, version, flags, modules; the addresses follow.
    let numbers: [u32; 4] = read(&memory, PVH_INFO_START);
    assert_eq!(numbers, [0x336e_c578, 1, 0, 1]);
    let addresses: [u64; 4] = read(&memory, PVH_INFO_START + 16);
    assert_eq!(addresses[..3], [PVH_MODLIST_START, CMDLINE_START, RSDP.0]);
    let first: [u64; 2] = read(&memory, addresses[3]);
    assert_eq!(first, [0, 0x9_fc00]);

    let [start, size]: [u64; 2] = read(&memory, PVH_MODLIST_START);
    assert_eq!((start % 4096, size), (0, 5000));
    assert!(start + size <= 32 * MIB && start + 8192 >= 32 * MIB);
    let mut copy = vec![0; 5000];
    memory.read_slice(&mut copy, GuestAddress(start)).unwrap();
    assert_eq!(copy, initramfs);
}

#[test]
fn a_bzimage_is_entered_in_64_bit_mode_with_its_header_in_the_zero_page() {
    let (map, memory) = small();
    let guest = load(
        &memory,
        &map,
        &mut Cursor::new(bz_image()),
        Some(&mut Cursor::new(vec![7; 5000])),
        "quiet",
    )
    .unwrap();
    let entry = write_boot_data(&memory, &map, &guest, RSDP).unwrap();
    assert_eq!(entry.protocol, BootProtocol::Linux64);
    assert_eq!(entry.rip.0, 0x10_0200);
    assert_eq!(entry.info.0, ZERO_PAGE_START);
    assert_eq!(&read::<[u8; 4]>(&memory, 0x10_0000), b"code");
    let at = |offset: u64| read::<u32>(&memory, ZERO_PAGE_START + offset);
    assert_eq!(at(0x202), 0x5372_6448);
    assert_eq!(at(0x228), 0x2_0000, "cmd_line_ptr");
    assert_eq!(at(0x21c), 5000, "ramdisk_size");
    assert_eq!(at(0x070), 0xe_0000, "acpi_rsdp_addr");
    assert_eq!(at(0x250), 0, "setup_data");
    assert_eq!(read::<u8>(&memory, ZERO_PAGE_START + 0x210), 0xff);
    let entries = read::<u8>(&memory, ZERO_PAGE_START + 0x1e8);
    assert_eq!(usize::from(entries), map.memory_map().len());
}

#[test]
fn the_initramfs_stays_where_the_kernel_can_reach_it() {
    let (map, memory) = small();
    let kernel = changed(|header| header.initrd_addr_max = 0x17f_ffff);
    let guest = load(
        &memory,
        &map,
        &mut Cursor::new(kernel),
        Some(&mut Cursor::new(vec![7; 4096])),
        "",
    )
    .unwrap();
    assert_eq!(guest.initramfs.unwrap().start, 0x17f_f000);
}

#[test]
fn an_initramfs_that_would_be_overwritten_is_refused() {
    // The kernel uses 16 to 20 MiB of 32.
    for (size, fits) in [(12 * MIB, true), (12 * MIB + 1, false), (40 * MIB, false)] {
        let (map, memory) = small();
        let result = load(
            &memory,
            &map,
            &mut Cursor::new(bz_image()),
            Some(&mut Cursor::new(vec![7; size as usize])),
            "",
        );
        match result {
            Ok(guest) => {
                assert!(fits);
                assert_eq!(guest.initramfs.unwrap().start, 20 * MIB);
            }
            Err(BootError::InitramfsDoesNotFit { .. }) => assert!(!fits),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn an_empty_initramfs_is_refused() {
    let (map, memory) = small();
    let result = load(
        &memory,
        &map,
        &mut Cursor::new(elf()),
        Some(&mut Cursor::new(Vec::new())),
        "",
    );
    assert!(matches!(result, Err(BootError::EmptyInitramfs)));
}

#[test]
fn a_command_line_is_as_long_as_the_kernel_allows() {
    let kernel = || Cursor::new(changed(|header| header.cmdline_size = 10));
    let (map, memory) = small();
    load(&memory, &map, &mut kernel(), NO_INITRAMFS, &"x".repeat(10)).unwrap();
    let result = load(&memory, &map, &mut kernel(), NO_INITRAMFS, &"x".repeat(11));
    assert!(matches!(
        result,
        Err(BootError::CmdlineTooLong { len: 11, max: 10 })
    ));
    let result = load(&memory, &map, &mut kernel(), NO_INITRAMFS, "a\0b");
    assert!(matches!(result, Err(BootError::CmdlineZeroByte { at: 1 })));
}

#[test]
fn an_endless_command_line_size_stops_at_the_room_that_there_is() {
    let (map, memory) = small();
    let kernel = || Cursor::new(changed(|header| header.cmdline_size = u32::MAX));
    load(
        &memory,
        &map,
        &mut kernel(),
        NO_INITRAMFS,
        &"x".repeat(65_535),
    )
    .unwrap();
    let result = load(
        &memory,
        &map,
        &mut kernel(),
        NO_INITRAMFS,
        &"x".repeat(65_536),
    );
    assert!(matches!(result, Err(BootError::CmdlineTooLong { .. })));
}

#[test]
fn firmware_is_entered_at_its_pvh_note_without_a_command_line() {
    let (map, memory) = machine(64 * MIB, 64 * MIB);
    memory
        .write_slice(b"x", GuestAddress(CMDLINE_START))
        .unwrap();
    // Also a file that could be a kernel.
    for (file, rip) in [(cloudhv(), 0x10_0fd0), (elf(), 0x100_0040)] {
        let guest = load_firmware(&memory, &map, &mut Cursor::new(file)).unwrap();
        let entry = write_boot_data(&memory, &map, &guest, RSDP).unwrap();
        assert_eq!(entry.protocol, BootProtocol::Pvh);
        assert_eq!((entry.rip.0, entry.info.0), (rip, PVH_INFO_START));
        assert_eq!(read::<u8>(&memory, CMDLINE_START), 0);
        // No modules, and the way to the ACPI tables.
        assert_eq!(read::<u32>(&memory, PVH_INFO_START + 12), 0);
        assert_eq!(read::<u64>(&memory, PVH_INFO_START + 32), RSDP.0);
    }
    // As --kernel.
    let kernel = load_kernel(&memory, &map, &mut Cursor::new(cloudhv())).unwrap();
    assert_eq!(kernel.entry.0, 0x10_0fd0);
}

#[test]
fn what_cannot_boot_as_firmware_says_what_can() {
    let error = |ram: u64, file: Vec<u8>| {
        let (map, memory) = machine(ram, ram);
        load_firmware(&memory, &map, &mut Cursor::new(file)).unwrap_err()
    };
    let bzimage = error(64 * MIB, bz_image()).to_string();
    assert!(bzimage.contains("--kernel"), "{bzimage}");
    let mut ovmf = vec![0; 4096];
    ovmf[40..44].copy_from_slice(b"_FVH");
    for ovmf in [error(64 * MIB, ovmf.clone()), error_of(ovmf)] {
        let text = ovmf.to_string();
        assert!(
            text.contains("QEMU") && text.contains("CLOUDHV.fd"),
            "{text}"
        );
    }
    let small = error(63 * MIB, cloudhv()).to_string();
    assert!(
        small.contains("has 63 MiB") && small.contains("least 64 MiB"),
        "{small}"
    );
    let (map, memory) = machine(128 * MIB, 128 * MIB);
    let hole = AddressRange::from_bounds(32 * MIB, 64 * MIB);
    let result = load_firmware(
        &memory,
        &map.with_hole(hole).unwrap(),
        &mut Cursor::new(cloudhv()),
    );
    assert!(matches!(result, Err(BootError::FirmwareWithHole)));
    // A program for 32-bit processors is not firmware: it has no PVH entry.
    let no_note = patched(cloudhv(), 0xb8, &[17]);
    assert!(matches!(
        error(64 * MIB, no_note),
        BootError::ElfMachine { machine: 3 }
    ));
}

#[test]
fn the_kind_of_a_payload_is_told_by_its_first_bytes() {
    let kind = |file: Vec<u8>| PayloadKind::of(&mut Cursor::new(file)).unwrap();
    assert_eq!(kind(cloudhv()), PayloadKind::Firmware);
    assert_eq!(kind(elf()), PayloadKind::Elf);
    assert_eq!(kind(bz_image()), PayloadKind::BzImage);
    assert_eq!(kind(Vec::new()), PayloadKind::BzImage);
    assert_eq!(kind(elf()[..19].to_vec()), PayloadKind::Elf);
    // A kernel for 32-bit processors.
    let small = patched(cloudhv(), 4, &[1]);
    assert_eq!(kind(small.clone()), PayloadKind::Elf);
    assert!(matches!(error_of(small), BootError::Elf32));
}

#[test]
fn files_that_are_no_kernels_are_named() {
    for (content, name) in [
        (&b""[..], "empty"),
        (b"\x1f\x8b\x08\0", "compressed with gzip"),
        (b"070701", "a cpio archive (an initramfs?)"),
        (b"#!/bin/sh\n", "a script"),
        (b"something else", "in an unknown format"),
    ] {
        let BootError::NotAKernel { found } = error_of(content.to_vec()) else {
            panic!("{name}");
        };
        assert_eq!(found, name);
    }
}

#[test]
fn elf_files_that_cannot_boot_say_why() {
    assert!(matches!(
        error_of(patched(elf(), 4, &[1])),
        BootError::Elf32
    ));
    assert!(matches!(
        error_of(patched(elf(), 18, &[183])),
        BootError::ElfMachine { machine: 183 }
    ));
    assert!(matches!(
        error_of(patched(elf(), 0x208, &[17])),
        BootError::NoPvhNote
    ));
    assert!(matches!(
        error_of(patched(elf(), 56, &[0xff, 0xff])),
        BootError::BadHeader { .. }
    ));
    // A segment over the boot data, one beyond RAM, and an entry point outside the kernel.
    assert!(matches!(
        error_of(patched(elf(), 64 + 24, &0x7000u64.to_le_bytes())),
        BootError::BadHeader { .. }
    ));
    assert!(matches!(
        error_of(patched(elf(), 64 + 40, &GIB.to_le_bytes())),
        BootError::KernelDoesNotFit { .. }
    ));
    assert!(matches!(
        error_of(patched(elf(), 0x210, &0x7000u32.to_le_bytes())),
        BootError::BadHeader { .. }
    ));
}

#[test]
fn the_pvh_entry_point_is_found_behind_and_before_other_notes() {
    // A second note segment with a note of another kind, whose name and value have padding.
    let mut file = patched(elf(), 56, &3u16.to_le_bytes());
    let notes = 64 + 56;
    file.copy_within(notes..notes + 56, notes + 56);
    let second = patched(file, notes + 56 + 8, &0x300u64.to_le_bytes());
    let other = b"\x05\0\0\0\x02\0\0\0\x12\0\0\0Xena\0\0\0\0xy\0\0";
    let after = patched(second.clone(), 0x300, other);
    let after = patched(after, notes + 56 + 32, &(other.len() as u64).to_le_bytes());
    // The same note in front of the right one, in one segment.
    let mut before = patched(elf(), 0x200, other);
    before[0x200 + other.len()..][..20].copy_from_slice(&elf()[0x200..0x214]);
    let before = patched(before, notes + 32, &(other.len() as u64 + 20).to_le_bytes());
    for kernel in [after, before] {
        let (map, memory) = small();
        let kernel = load_kernel(&memory, &map, &mut Cursor::new(kernel)).unwrap();
        assert_eq!(kernel.entry, GuestAddress(0x100_0040));
    }
}

#[test]
fn bzimages_that_cannot_boot_say_why() {
    let error = |change: fn(&mut setup_header)| error_of(changed(change));
    assert!(matches!(
        error(|header| header.version = 0x20b),
        BootError::No64BitEntry { version: 0x20b }
    ));
    assert!(matches!(
        error(|header| header.xloadflags = 0),
        BootError::No64BitEntry { .. }
    ));
    assert!(matches!(
        error(|header| header.init_size = 0x1000_0000),
        BootError::KernelDoesNotFit { ram: 32, .. }
    ));
    assert!(matches!(
        error(|header| header.pref_address = u64::MAX),
        BootError::BadHeader { .. }
    ));
    assert!(matches!(
        error(|header| header.kernel_alignment = 0),
        BootError::BadHeader { .. }
    ));
    assert!(matches!(
        error(|header| header.syssize = u32::MAX),
        BootError::Truncated { .. }
    ));
}

#[test]
fn a_truncated_kernel_is_refused_wherever_it_ends() {
    for whole in [elf(), bz_image(), cloudhv()] {
        for len in (0..whole.len()).step_by(37) {
            let error = error_of(whole[..len].to_vec());
            assert!(
                matches!(
                    error,
                    BootError::Truncated { .. } | BootError::NotAKernel { .. }
                ),
                "{len}: {error}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn damaged_kernels_give_an_error_or_a_kernel_within_ram(
        whole in prop::sample::select(vec![elf(), bz_image(), cloudhv()]),
        damage in prop::collection::vec((0usize..0x280, any::<u8>()), 1..8),
        wide in prop::collection::vec((0usize..0x278, any::<u64>()), 0..3),
    ) {
        let mut file = whole;
        for (at, byte) in damage {
            file[at] = byte;
        }
        for (at, value) in wide {
            file[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        let (map, memory) = machine(64 * MIB, 64 * MIB);
        if let Ok(guest) = load_firmware(&memory, &map, &mut Cursor::new(file.clone())) {
            let firmware = guest.kernel.footprint;
            prop_assert!(firmware.start >= MIB && firmware.end() <= 64 * MIB);
            prop_assert!(write_boot_data(&memory, &map, &guest, RSDP).is_ok());
        }
        let (map, memory) = small();
        let guest = load(
            &memory,
            &map,
            &mut Cursor::new(file),
            Some(&mut Cursor::new(vec![1; 100])),
            "",
        );
        if let Ok(guest) = guest {
            let kernel = guest.kernel.footprint;
            prop_assert!(kernel.start >= MIB && kernel.end() <= 32 * MIB);
            prop_assert!(!kernel.overlaps(&guest.initramfs.unwrap()));
            prop_assert!(write_boot_data(&memory, &map, &guest, RSDP).is_ok());
        }
    }
}
