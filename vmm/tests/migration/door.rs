//! What a VM that arrives may use.

use std::fs;

use super::{Vmm, check_counting, check_moved, has_kvm};

#[test]
fn a_vm_that_names_other_files_than_allowed_is_refused() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let first = Vmm::counting(dir.path(), "size=64M", &[]);
    let mut second = Vmm::start(dir.path(), "second", &[]);
    let url = format!("unix:{}", dir.path().join("second/migration").display());
    let elsewhere = dir.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let how = ["--paths", elsewhere.to_str().unwrap()];
    let mut receiving = second.receive_at(&url, &first.serial, &how);
    let path = dir.path().join("second/migration");
    second.until("it listens", |_| path.exists());
    let sent = first.send(&url, &[]);
    let said = String::from_utf8_lossy(&sent.stderr).into_owned();
    assert!(!sent.status.success(), "{said}");
    let kernel = dir.path().join("kernel");
    assert!(said.contains(kernel.to_str().unwrap()), "{said}");
    assert!(said.contains("--paths"), "{said}");
    receiving.kill().unwrap();
    receiving.wait().unwrap();
    // The guest stays, and goes where its files are allowed.
    let mut third = Vmm::start(dir.path(), "third", &[]);
    let url = format!("unix:{}", dir.path().join("third/migration").display());
    let how = ["--paths", dir.path().to_str().unwrap()];
    let receiving = third.receive_at(&url, &first.serial, &how);
    let path = dir.path().join("third/migration");
    third.until("it listens", |_| path.exists());
    let sent = first.send(&url, &[]);
    check_moved(&sent, receiving, &first, &third);
    third.until("it counts on", |vmm| vmm.printed().len() > 9);
    assert!(third.said().contains("Landlock"), "{}", third.said());
    check_counting(&[&first, &third]);
}
