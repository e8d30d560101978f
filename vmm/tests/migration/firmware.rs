//! What firmware needs of the machine, by a payload that looks like edk2's: the host bridge, a disk
//! below 4 GiB, the clock, and its way to power off.

use std::{fs, path::Path, process::Command};

use serde_json::Value;

use super::{AT, GANTRY, Vmm, bare_kernel, has_kvm};

/// Prints five numbers of eight hexadecimal digits: the host bridge's identity, the disk's BAR and number of queues, the
/// BAR of the source of randomness, and the date as century, year, month and day.
const CODE: [u8; 0x5a] = [
    0xbc, 0, 0, 9, 0, // mov esp, 0x90000
    // again:
    0xbb, 0, 0, 0, 0x80, // mov ebx, 0x80000000
    0xe8, 0x7b, 0, 0, 0, // call config
    0xe8, 0x82, 0, 0, 0, // call print
    0xbd, 0xf4, 0x1a, 0x42, 0x10, // mov ebp, 0x10421af4
    0xe8, 0x3f, 0, 0, 0, // call find
    0x0f, 0xb7, 0x46, 0x12, // movzx eax, word [esi + 18]
    0xe8, 0x6f, 0, 0, 0, // call print
    0xbd, 0xf4, 0x1a, 0x44, 0x10, // mov ebp, 0x10441af4
    0xe8, 0x2c, 0, 0, 0, // call find
    0xbe, 0xbb, 0, 0x10, 0, // mov esi, registers
    0x31, 0xed, // xor ebp, ebp
    // date:
    0xac, // lodsb
    0xe6, 0x70, // out 0x70, al
    0xe4, 0x71, // in al, 0x71
    0xc1, 0xe5, 8, // shl ebp, 8
    0x0f, 0xb6, 0xc0, // movzx eax, al
    9, 0xc5, // or ebp, eax
    0x81, 0xfe, 0xbf, 0, 0x10, 0, // cmp esi, registers + 4
    0x72, 0xeb, // jb date
    0x89, 0xe8, // mov eax, ebp
    0xe8, 0x42, 0, 0, 0, // call print
    0x66, 0xba, 0, 6, // mov dx, 0x600
    0xb0, 0x34, // mov al, 0x34
];

/// `out dx, al`, and no further.
const POWER_OFF: [u8; 3] = [0xee, 0xeb, 0xfe];
/// A nop, and `jmp again`.
const AGAIN: [u8; 3] = [0x90, 0xeb, 0xa8];

/// Functions and data that follow.
const REST: [u8; 0x62] = [
    // find:
    0xbb, 0, 0, 0, 0x80, // mov ebx, 0x80000000
    // next:
    0x81, 0xc3, 0, 8, 0, 0, // add ebx, 0x800
    0xe8, 0x1d, 0, 0, 0, // call config
    0x39, 0xe8, // cmp eax, ebp
    0x75, 0xf1, // jne next
    0xb3, 0x10, // mov bl, 0x10
    0xe8, 0x12, 0, 0, 0, // call config
    0xe8, 0x19, 0, 0, 0, // call print
    0x89, 0xc6, // mov esi, eax
    0xb3, 4, // mov bl, 4
    0xe8, 4, 0, 0, 0, // call config
    0xb0, 2,    // mov al, 2
    0xef, // out dx, eax
    0xc3, // ret
    // config:
    0x89, 0xd8, // mov eax, ebx
    0xba, 0xf8, 0x0c, 0, 0,    // mov edx, 0xcf8
    0xef, // out dx, eax
    0xb2, 0xfc, // mov dl, 0xfc
    0xed, // in eax, dx
    0xc3, // ret
    // print:
    0xb9, 8, 0, 0, 0, // mov ecx, 8
    0x89, 0xc7, // mov edi, eax
    // digit:
    0xc1, 0xc7, 4, // rol edi, 4
    0x89, 0xf8, // mov eax, edi
    0x83, 0xe0, 0x0f, // and eax, 15
    0x3c, 0x0a, // cmp al, 10
    0x72, 2, // jb low
    4, 0x27, // add al, 39
    // low:
    4, 0x30, // add al, 48
    0xba, 0xf8, 3, 0, 0,    // mov edx, 0x3f8
    0xee, // out dx, al
    0xe2, 0xe8, // loop digit
    0xb0, 0x0a, // mov al, 10
    0xee, // out dx, al
    0x89, 0xf8, // mov eax, edi
    0xc3, // ret
    // registers: century, year, month, day
    0x32, 9, 8, 7,
];

/// Firmware, by the machine type of its file; it must not be needed for anything else.
fn firmware(end: [u8; 3]) -> Vec<u8> {
    let mut file = bare_kernel::elf(AT, &[&CODE[..], &end, &REST].concat());
    file[18] = 3;
    file
}

/// The date by the host's clock, as the guest prints it.
fn today() -> String {
    let date = Command::new("date").args(["-u", "+%Y%m%d"]).output();
    String::from_utf8(date.unwrap().stdout)
        .unwrap()
        .trim()
        .to_owned()
}

/// Checks complete groups of numbers, of which there has to be one.
fn check(printed: &str, dates: &[String]) {
    // It may be printing a line.
    let (complete, _) = printed.rsplit_once('\n').unwrap_or_default();
    let lines: Vec<_> = complete.lines().collect();
    assert!(lines.len() >= 5, "{printed}");
    for group in lines.chunks_exact(5) {
        assert_eq!(group[0], "0d578086", "the host bridge");
        for bar in [group[1], group[3]] {
            let bar = u32::from_str_radix(bar, 16).unwrap();
            assert!((0xc000_0000..0xe800_0000).contains(&bar), "{bar:#x}");
            assert_eq!(bar & 0xffff, 0, "32 bits: {bar:#x}");
        }
        assert_eq!(group[2], "00000001", "queues");
        assert!(dates.iter().any(|date| date == group[4]), "{group:?}");
    }
}

fn disk(dir: &Path) -> String {
    let path = dir.join("disk");
    fs::write(&path, [0; 4096]).unwrap();
    format!("path={},image_type=raw", path.display())
}

#[test]
fn firmware_finds_its_machine_and_powers_it_off() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("fw");
    fs::write(&path, firmware(POWER_OFF)).unwrap();
    let disk = disk(dir.path());
    for option in ["--firmware", "--kernel"] {
        let serial = dir.path().join(option);
        let mut dates = vec![today()];
        let run = Command::new(GANTRY)
            .args([option, path.to_str().unwrap(), "--cmdline", "quiet"])
            .args(["--disk", &disk, "--memory", "size=64M", "-v"])
            .args(["--serial", &format!("file={}", serial.display())])
            .args(["--console", "off"])
            .output()
            .unwrap();
        dates.push(today());
        assert!(run.status.success(), "{run:?}");
        let said = String::from_utf8_lossy(&run.stderr);
        assert!(said.contains("the command line is ignored"), "{said}");
        check(&fs::read_to_string(serial).unwrap(), &dates);
    }
}

#[test]
fn firmware_that_moves_keeps_its_machine() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("fw");
    fs::write(&path, firmware(AGAIN)).unwrap();
    let serial = format!("file={}", dir.path().join("first/serial").display());
    let disk = disk(dir.path());
    let mut dates = vec![today()];
    let mut first = Vmm::start(
        dir.path(),
        "first",
        &[
            "--firmware",
            path.to_str().unwrap(),
            "--memory",
            "size=64M",
            "--disk",
            &disk,
            "--serial",
            &serial,
            "--console",
            "off",
        ],
    );
    first.until("it prints", |vmm| vmm.printed().lines().count() > 10);
    let (mut second, _) = first.move_to(dir.path(), "second", &[]);
    let before = first.printed().lines().count();
    second.until("it goes on", |vmm| vmm.printed().lines().count() > 10);
    // And again, from what the second one has saved.
    let (mut third, _) = second.move_to(dir.path(), "third", &[]);
    third.until("it goes on", |vmm| vmm.printed().lines().count() > 10);
    dates.push(today());
    assert!(before > 10);
    let everywhere = [&first, &second, &third].map(Vmm::printed).concat();
    check(&everywhere, &dates);
    // Older programs do not know what this guest has found.
    assert_eq!(saved_version(&third, dir.path()), 6);
}

#[test]
fn a_state_without_firmware_is_for_older_programs_too() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let vmm = Vmm::counting(dir.path(), "size=64M", &[]);
    assert_eq!(saved_version(&vmm, dir.path()), 5);
}

/// The version of the state in a snapshot.
fn saved_version(vmm: &Vmm, dir: &Path) -> u64 {
    let saved = dir.join("saved");
    let url = format!("file://{}", saved.display());
    for order in [&["pause"][..], &["snapshot", &url]] {
        let done = vmm.ctl(order);
        assert!(done.status.success(), "{done:?}");
    }
    let state = fs::read_to_string(saved.join(vmm_snapshot::STATE)).unwrap();
    let header: Value = serde_json::from_str(state.lines().next().unwrap()).unwrap();
    header["version"].as_u64().unwrap()
}
