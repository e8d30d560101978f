//! A guest that powers itself off, or resets itself.

use std::{fs, path::Path};

use serde_json::Value;

use super::{Vmm, has_kvm};

/// Prints a letter, and powers off by ACPI's sleep register.
const CODE: [u8; 15] = [
    0xb0, b'A', 0xba, 0xf8, 3, 0, 0, 0xee, // mov al, 'A'; mov edx, 0x3f8; out
    0xb0, 0x34, 0x66, 0xba, 1, 6, 0xee, // mov al, S5 and enable; mov dx, 0x601; out
];

/// The same, and goes no further.
fn code() -> Vec<u8> {
    [&CODE[..], &[0xeb, 0xfe]].concat()
}

fn start(dir: &Path, more: &[&str]) -> Vmm {
    let serial = format!("file={}", dir.join("first/serial").display());
    Vmm::running(dir, &code(), "size=64M", &serial, more)
}

#[test]
fn a_guest_that_powers_off_can_be_booted_again() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut vmm = start(dir.path(), &["--no-shutdown"]);
    let is_off = |vmm: &Vmm| {
        let info: Value = serde_json::from_slice(&vmm.ctl(&["info"]).stdout).unwrap_or_default();
        info["state"] == "Shutdown"
    };
    for boots in 1..=3 {
        vmm.until("it is off", is_off);
        assert_eq!(vmm.printed(), "A".repeat(boots));
        assert!(vmm.ctl(&["boot"]).status.success(), "{}", vmm.said());
    }
    vmm.until("it is off", is_off);
    assert!(vmm.ctl(&["delete"]).status.success());
    assert!(vmm.ctl(&["shutdown-vmm"]).status.success());
    assert!(vmm.process.wait().unwrap().success());
}

#[test]
fn without_the_option_the_process_ends_with_its_guest() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kernel");
    fs::write(&path, super::kernel(&code())).unwrap();
    let run = std::process::Command::new(super::GANTRY)
        .args(["--kernel", path.to_str().unwrap(), "--memory", "size=64M"])
        .args(["--serial", "off", "--console", "off"])
        .output()
        .unwrap();
    assert!(run.status.success(), "{run:?}");
}

#[test]
fn a_paused_vm_is_not_reset_by_what_its_guest_asked_before() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // It resets itself as soon as it runs: mov al, 1; mov dx, 0x600; out; jmp $
    let code = [0xb0, 1, 0x66, 0xba, 0, 6, 0xee, 0xeb, 0xfe];
    let mut vmm = Vmm::running(dir.path(), &code, "size=64M", "off", &[]);
    let state = |vmm: &Vmm| {
        let info: Value = serde_json::from_slice(&vmm.ctl(&["info"]).stdout).unwrap();
        info["state"].clone()
    };
    for _ in 0..100 {
        // It is refused if the guest has asked for a reset meanwhile.
        if vmm.ctl(&["pause"]).status.success() {
            assert_eq!(state(&vmm), "Paused", "{}", vmm.said());
            assert!(vmm.ctl(&["resume"]).status.success());
        }
    }
    vmm.until("it is reset", |vmm| vmm.said().contains("reset"));
}
