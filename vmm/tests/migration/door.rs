//! What a VM that arrives may use.

use std::{
    fs,
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    thread,
};

use serde_json::Value;

use super::{HEADER, Header, Kind, Vmm, check_counting, check_moved, has_kvm};

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

/// Passes one connection on, with an offer whose first region is elsewhere.
fn with_another_region(path: &Path, to: &Path) {
    let listener = UnixListener::bind(path).unwrap();
    let to = to.to_owned();
    thread::spawn(move || {
        let (mut source, _) = listener.accept().unwrap();
        let mut destination = UnixStream::connect(to).unwrap();
        let mut back = (
            destination.try_clone().unwrap(),
            source.try_clone().unwrap(),
        );
        thread::spawn(move || std::io::copy(&mut back.0, &mut back.1));
        let mut head = [0; HEADER];
        source.read_exact(&mut head).unwrap();
        let header = Header::decode(&head).unwrap();
        assert_eq!(header.kind, Kind::Offer);
        let mut contents = vec![0; header.length];
        source.read_exact(&mut contents).unwrap();
        let mut offer: Value = serde_json::from_slice(&contents).unwrap();
        offer["regions"][0]["guest"] = (2 << 20).into();
        let contents = serde_json::to_vec(&offer).unwrap();
        let head = Header::of(Kind::Offer, 0, &contents, true).encode();
        destination.write_all(&head).unwrap();
        destination.write_all(&contents).unwrap();
        let _ = std::io::copy(&mut source, &mut destination);
    });
}

#[test]
fn a_vm_that_is_refused_has_cleared_no_memory_file() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [ram, there] = ["ram", "there"].map(|name| dir.path().join(name));
    let contents = vec![9; 16 << 20];
    fs::write(&there, &contents).unwrap();
    let zone = format!("id=z,size=16M,shared=on,file={}", ram.display());
    let first = Vmm::counting(dir.path(), "size=0", &["--memory-zone", &zone]);
    let mut second = Vmm::start(dir.path(), "second", &[]);
    let path = second.socket.with_file_name("migration");
    let url = format!("unix:{}", path.display());
    let rename = format!("{}={}", ram.display(), there.display());
    let receiving = second.receive_at(&url, &first.serial, &["--rename", &rename]);
    second.until("it listens", |_| path.exists());
    let wire = dir.path().join("wire");
    with_another_region(&wire, &path);
    let sent = first.send(&format!("unix:{}", wire.display()), &[]);
    let said = String::from_utf8_lossy(&sent.stderr).into_owned();
    assert!(said.contains("its memory elsewhere"), "{said}");
    assert!(!receiving.wait_with_output().unwrap().status.success());
    assert!(fs::read(&there).unwrap() == contents, "it has been cleared");
}
