//! Whoever watches a VM leave hears how that has ended, although the VMM ends with it.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use super::{Vmm, has_kvm};

#[test]
fn who_watches_a_vm_leave_hears_that_it_has_left_whoever_else_asks() {
    if !has_kvm() {
        return;
    }
    for how in [&[][..], &["--local"]] {
        let dir = tempfile::tempdir().unwrap();
        let mut first = Vmm::counting(dir.path(), "size=32M,shared=on", &[]);
        let mut second = Vmm::start(dir.path(), "second", &[]);
        let (receiving, url) = second.receive(&first.serial);
        let over = AtomicBool::new(false);
        let sent = thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    first.ctl(&["migration"]);
                }
            });
            let sent = first.ctl(&[&["send-migration", &url, "--watch"], how].concat());
            over.store(true, Ordering::Relaxed);
            sent
        });
        let said = String::from_utf8_lossy(&sent.stdout).into_owned();
        assert!(sent.status.success(), "{said}{}", first.said());
        assert!(said.contains("Completed"), "{said}");
        assert!(receiving.wait_with_output().unwrap().status.success());
        let ended = first.process.wait().unwrap();
        assert!(ended.success(), "{ended}: {}", first.said());
        second.until("it counts on", |vmm| vmm.printed().len() > 100);
    }
}

#[test]
fn a_vmm_ends_without_whoever_has_watched_its_vm_leave() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut first = Vmm::counting(dir.path(), "size=32M", &[]);
    let mut second = Vmm::start(dir.path(), "second", &[]);
    let (receiving, url) = second.receive(&first.serial);
    // It looks at once, and is gone before the VM is.
    assert!(first.ctl(&["send-migration", &url]).status.success());
    first.ctl(&["migration"]);
    assert!(receiving.wait_with_output().unwrap().status.success());
    assert!(first.process.wait().unwrap().success());
    assert!(fs::metadata(&first.socket).is_err(), "{}", first.said());
}
