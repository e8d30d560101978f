//! Snapshots to a disk that does not answer: fanotify holds back whoever opens a file in the directory.

use std::{
    ffi::CString,
    fs::{self, File},
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    process::{Child, Output, Stdio},
};

use serde_json::Value;

use super::{Command, GANTRY, LockGranularity, Vmm, has_kvm, lock};

/// A directory whose files can be opened only when the test allows it.
pub struct Held(File);

impl Held {
    fn new(directory: &Path) -> Option<Self> {
        Self::whoever(directory, libc::FAN_OPEN_PERM)
    }

    /// Whoever reads from a file is held back.
    pub fn reading(directory: &Path) -> Option<Self> {
        Self::whoever(directory, libc::FAN_ACCESS_PERM)
    }

    fn whoever(directory: &Path, does: u64) -> Option<Self> {
        let flags = libc::FAN_CLASS_CONTENT | libc::FAN_CLOEXEC;
        // SAFETY: a call without pointers.
        let group = unsafe { libc::fanotify_init(flags, libc::O_CLOEXEC as u32) };
        if group < 0 {
            let error = io::Error::last_os_error();
            eprintln!("not tested: this host holds back no one who opens a file: {error}");
            return None;
        }
        // SAFETY: created just now, so it has no other owner.
        let group = unsafe { OwnedFd::from_raw_fd(group) };
        let path = CString::new(directory.as_os_str().as_bytes()).unwrap();
        let events = does | libc::FAN_EVENT_ON_CHILD;
        // SAFETY: the path is a string that outlives the call.
        let marked = unsafe {
            let group = group.as_raw_fd();
            libc::fanotify_mark(
                group,
                libc::FAN_MARK_ADD,
                events,
                libc::AT_FDCWD,
                path.as_ptr(),
            )
        };
        if marked < 0 {
            let error = io::Error::last_os_error();
            eprintln!("not tested: nobody can be held back here: {error}");
            return None;
        }
        Some(Self(File::from(group)))
    }

    /// Whoever opens the directory itself is held back, too.
    fn opening(directory: &Path) -> Option<Self> {
        Self::whoever(directory, libc::FAN_OPEN_PERM | libc::FAN_ONDIR)
    }

    /// Waits for somebody who is held back, until [`Held::allow`].
    pub fn waits(&mut self) -> Waits {
        let mut event = [0; 24];
        self.0.read_exact(&mut event).unwrap();
        let file = i32::from_ne_bytes(event[16..20].try_into().unwrap());
        // SAFETY: the kernel has opened the file for this process.
        Waits(unsafe { OwnedFd::from_raw_fd(file) })
    }

    /// Lets it go on.
    pub fn allow(&mut self, waits: Waits) {
        let Waits(file) = waits;
        let answer = [
            file.as_raw_fd().to_ne_bytes(),
            libc::FAN_ALLOW.to_ne_bytes(),
        ]
        .concat();
        self.0.write_all(&answer).unwrap();
    }

    /// Lets everybody go on who comes until this is done.
    fn allow_until(&mut self, mut is_done: impl FnMut() -> bool) {
        while !is_done() {
            let mut entry = libc::pollfd {
                fd: self.0.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one entry, which outlives the call.
            if unsafe { libc::poll(&raw mut entry, 1, 5) } > 0 {
                let waits = self.waits();
                self.allow(waits);
            }
        }
    }
}

/// A process that is held back.
pub struct Waits(OwnedFd);

pub fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub fn start(vmm: &Vmm, arguments: &[&str]) -> Child {
    Command::new(GANTRY)
        .args(["ctl", "--socket", vmm.socket.to_str().unwrap()])
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn info(vmm: &Vmm) -> Value {
    serde_json::from_slice(&vmm.ctl(&["info"]).stdout).unwrap()
}

/// The state file of a snapshot, which changes with each.
fn state(directory: &Path) -> Vec<u8> {
    fs::read(directory.join("state.json")).unwrap()
}

/// A paused VM with a snapshot in a directory.
fn saved(dir: &Path) -> (Vmm, std::path::PathBuf) {
    let vmm = Vmm::counting(dir, "size=64M", &[]);
    let directory = dir.join("snapshot");
    assert!(vmm.ctl(&["pause"]).status.success());
    let saved = vmm.ctl(&["snapshot", directory.to_str().unwrap()]);
    assert!(saved.status.success(), "{}{}", said(&saved), vmm.said());
    (vmm, directory)
}

#[test]
fn the_api_answers_while_a_snapshot_waits_for_its_disk() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (mut vmm, directory) = saved(dir.path());
    assert!(vmm.ctl(&["resume"]).status.success());
    let printed = vmm.printed().len();
    vmm.until("it counts on", |vmm| vmm.printed().len() > printed);
    assert!(vmm.ctl(&["pause"]).status.success());
    let before = state(&directory);
    let Some(mut held) = Held::new(&directory) else {
        return;
    };
    let path = directory.to_str().unwrap();
    let saving = start(&vmm, &["snapshot", path]);
    let waits = held.waits();
    for command in ["ping", "info", "metrics", "counters"] {
        assert!(vmm.ctl(&[command]).status.success(), "{command}");
    }
    let progress = &info(&vmm)["in_progress"];
    assert_eq!(progress["operation"], "Snapshot", "{progress}");
    assert_eq!(progress["total_bytes"], 64 << 20, "{progress}");
    let core = dir.path().join("core");
    for request in [
        &["resume"][..],
        &["delete"],
        &["shutdown"],
        &["snapshot", path],
        &["coredump", core.to_str().unwrap()],
    ] {
        let refused = vmm.ctl(request);
        let why = said(&refused);
        assert!(
            why.contains("a snapshot of the VM is being written"),
            "{why}"
        );
        assert!(why.contains("405"), "{why}");
    }
    let cancelled = vmm.ctl(&["cancel-migration"]);
    assert!(cancelled.status.success(), "{}", said(&cancelled));
    held.allow(waits);
    let answer = saving.wait_with_output().unwrap();
    assert!(
        said(&answer).contains("it was cancelled"),
        "{}",
        said(&answer)
    );
    drop(held);
    assert_eq!(info(&vmm)["in_progress"], Value::Null);
    assert_eq!(state(&directory), before);
    assert!(!directory.join("memory-ranges.new").exists());
    let again = vmm.ctl(&["snapshot", path]);
    assert!(again.status.success(), "{}", said(&again));
    assert_ne!(state(&directory), before);
    // The folder itself.
    for how in [&[][..], &["--detach"], &["--accel", "save"]] {
        let mut held = Held::opening(&directory).unwrap();
        let mut saving = start(&vmm, &[&["snapshot", path], how].concat());
        let waits = held.waits();
        assert_eq!(info(&vmm)["in_progress"]["operation"], "Snapshot");
        held.allow(waits);
        held.allow_until(|| saving.try_wait().unwrap().is_some());
        let saved = saving.wait_with_output().unwrap();
        assert!(saved.status.success(), "{how:?}: {}", said(&saved));
    }
    assert!(vmm.ctl(&["resume"]).status.success());
}

#[test]
fn a_vmm_ends_although_a_snapshot_waits_for_its_disk() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (mut vmm, directory) = saved(dir.path());
    let before = state(&directory);
    let Some(mut held) = Held::new(&directory) else {
        return;
    };
    let saving = start(&vmm, &["snapshot", directory.to_str().unwrap()]);
    let _waits = held.waits();
    // SAFETY: the process is this test's child, which has not been waited for.
    unsafe { libc::kill(vmm.process.id() as i32, libc::SIGTERM) };
    let ended = vmm.process.wait().unwrap();
    assert!(ended.success(), "{ended}: {}", vmm.said());
    drop(held);
    assert!(!saving.wait_with_output().unwrap().status.success());
    assert_eq!(state(&directory), before);
}

#[test]
fn the_api_answers_while_a_vm_is_restored_from_a_disk_that_does_not() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (mut first, directory) = saved(dir.path());
    let printed = first.printed().len();
    first.kill();
    let Some(mut held) = Held::reading(&directory.join("memory-ranges")) else {
        return;
    };
    let from = format!("source_url=file://{},resume=on", directory.display());
    let second = Vmm::start(dir.path(), "second", &[]);
    let restoring = start(&second, &["restore", &from]);
    let waits = held.waits();
    for command in ["ping", "info", "metrics", "counters"] {
        let answer = second.ctl(&[command]);
        assert!(answer.status.success(), "{command}: {}", said(&answer));
    }
    let progress = &info(&second)["in_progress"];
    assert_eq!(progress["operation"], "Restore", "{progress}");
    assert_eq!(progress["done_bytes"], 0, "{progress}");
    assert_eq!(progress["total_bytes"], 64 << 20, "{progress}");
    let mut resuming = start(&second, &["resume"]);
    let cancelled = second.ctl(&["cancel-migration"]);
    assert!(cancelled.status.success(), "{}", said(&cancelled));
    let answer = restoring.wait_with_output().unwrap();
    held.allow(waits);
    assert!(said(&answer).contains("cancelled"), "{}", said(&answer));
    assert!(!resuming.wait().unwrap().success(), "there is no VM");
    // One that begins with it ends, too.
    let mut third = Vmm::start(dir.path(), "third", &["--restore", &from]);
    let waits = held.waits();
    assert!(third.ctl(&["ping"]).status.success());
    // SAFETY: the process is this test's child, which has not been waited for.
    unsafe { libc::kill(third.process.id() as i32, libc::SIGTERM) };
    let ended = third.process.wait().unwrap();
    assert!(ended.success(), "{ended}: {}", third.said());
    drop((waits, held));
    // Nothing is left of that.
    let mut fourth = second;
    fourth.serial = first.serial.clone();
    let mut held = Held::reading(&directory.join("memory-ranges")).unwrap();
    let paused = format!("source_url=file://{}", directory.display());
    let restoring = start(&fourth, &["restore", &paused]);
    let waits = held.waits();
    // What needs the machine waits for it.
    let mut resuming = start(&fourth, &["resume"]);
    held.allow(waits);
    drop(held);
    let restored = restoring.wait_with_output().unwrap();
    assert!(restored.status.success(), "{}", said(&restored));
    assert!(resuming.wait().unwrap().success());
    fourth.until("it counts on", |vmm| vmm.printed().len() > printed);
}

#[test]
fn the_api_answers_while_files_of_a_vm_that_is_restored_cannot_be_opened() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [free, image] = two_images(dir.path());
    let images = image.parent().unwrap();
    let disks = [&free, &image].map(|image| format!("path={},image_type=raw", image.display()));
    let [one, other] = disks.each_ref().map(String::as_str);
    let mut first = Vmm::counting(dir.path(), "size=64M", &["--disk", one, "--disk", other]);
    let snapshot = dir.path().join("snapshot");
    assert!(first.ctl(&["pause"]).status.success());
    let saved = first.ctl(&["snapshot", snapshot.to_str().unwrap()]);
    assert!(saved.status.success(), "{}{}", said(&saved), first.said());
    first.kill();
    let from = format!("source_url=file://{}", snapshot.display());
    for (folder, what) in [
        (&*snapshot, "its configuration"),
        (images, "its state and its disks"),
    ] {
        let Some(mut held) = Held::new(folder) else {
            return;
        };
        let name = folder.file_name().unwrap().to_str().unwrap();
        let mut vmm = Vmm::start(dir.path(), &format!("of {name}"), &[]);
        let restoring = start(&vmm, &["restore", &from]);
        let waits = held.waits();
        for command in ["ping", "metrics"] {
            let answer = vmm.ctl(&[command]);
            assert!(answer.status.success(), "{command}: {}", said(&answer));
        }
        let answer = said(&vmm.ctl(&["info"]));
        let waits_for = format!("is being restored, and waits for {what}");
        assert!(answer.contains(&waits_for), "{answer}");
        let cancelled = vmm.ctl(&["cancel-migration"]);
        assert!(cancelled.status.success(), "{}", said(&cancelled));
        let answer = said(&restoring.wait_with_output().unwrap());
        assert!(answer.contains("cancelled"), "{answer}");
        vmm.until("an image that was open is free", |_| is_free(&free));
        held.allow(waits);
        drop(held);
        // The thread of the first attempt may have the image for a moment.
        vmm.until("it is restored", |vmm| {
            vmm.ctl(&["restore", &from]).status.success()
        });
        vmm.kill();
    }
}

#[test]
fn the_api_answers_while_an_image_of_a_disk_cannot_be_opened() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [first, second] = two_images(dir.path());
    let folder = second.parent().unwrap();
    let disk = |path: &Path| format!("path={},image_type=raw", path.display());
    let (one, other) = (disk(&first), disk(&second));
    let Some(mut held) = Held::new(folder) else {
        return;
    };
    // As the process starts.
    let file = dir.path().join("first/serial");
    let serial = format!("file={}", file.display());
    let disks = ["--disk", &one, "--disk", &other];
    let mut vmm = Vmm::counting_to(dir.path(), "size=64M", &serial, &disks);
    let waits = held.waits();
    let progress = &info(&vmm)["in_progress"];
    assert_eq!(progress["operation"], "Boot", "{progress}");
    held.allow(waits);
    drop(held);
    vmm.until("it counts", |vmm| !vmm.printed().is_empty());
    // When it is booted again.
    let mut held = Held::new(folder).unwrap();
    let rebooting = start(&vmm, &["reboot"]);
    let waits = held.waits();
    for command in ["ping", "info", "metrics"] {
        let answer = vmm.ctl(&[command]);
        assert!(answer.status.success(), "{command}: {}", said(&answer));
    }
    let mut deleting = start(&vmm, &["delete"]);
    let cancelled = vmm.ctl(&["cancel-migration"]);
    assert!(cancelled.status.success(), "{}", said(&cancelled));
    let answer = said(&rebooting.wait_with_output().unwrap());
    assert!(answer.contains("cancelled"), "{answer}");
    assert!(deleting.wait().unwrap().success());
    vmm.until("the first image is free", |_| is_free(&first));
    held.allow(waits);
    drop(held);
    vmm.kill();
    // As one is plugged in.
    fs::remove_dir_all(dir.path().join("first")).unwrap();
    let vmm = Vmm::counting(dir.path(), "size=64M", &[]);
    let mut held = Held::new(folder).unwrap();
    let adding = start(&vmm, &["add-disk", &other]);
    let waits = held.waits();
    for command in ["ping", "info", "pause", "resume"] {
        let answer = vmm.ctl(&[command]);
        assert!(answer.status.success(), "{command}: {}", said(&answer));
    }
    held.allow(waits);
    drop(held);
    let added = adding.wait_with_output().unwrap();
    assert!(added.status.success(), "{}", said(&added));
    assert_eq!(info(&vmm)["config"]["disks"][0]["id"], "_disk0");
    assert!(!is_free(&second));
    // One request for an image at a time, which can be ended.
    let third = folder.join("third");
    File::create_new(&third).unwrap().set_len(1 << 20).unwrap();
    let third_disk = disk(&third);
    let mut held = Held::new(folder).unwrap();
    let adding = start(&vmm, &["add-disk", &third_disk]);
    let waits = held.waits();
    assert_eq!(info(&vmm)["in_progress"]["operation"], "AddDisk");
    let again = said(&vmm.ctl(&["add-disk", &third_disk]));
    assert!(
        again.contains("is being opened for an earlier request"),
        "{again}"
    );
    assert!(vmm.ctl(&["cancel-migration"]).status.success());
    let answer = said(&adding.wait_with_output().unwrap());
    assert!(answer.contains("it was cancelled"), "{answer}");
    held.allow(waits);
    drop(held);
    // The next VM does not get what was asked for this one.
    let mut held = Held::new(folder).unwrap();
    let adding = start(&vmm, &["add-disk", &third_disk]);
    let waits = held.waits();
    assert!(vmm.ctl(&["delete"]).status.success());
    let answer = said(&adding.wait_with_output().unwrap());
    assert!(answer.contains("has been switched off"), "{answer}");
    held.allow(waits);
    drop(held);
    let mut vmm = vmm;
    vmm.until("the image is free", |_| is_free(&third));
}

#[test]
fn the_api_answers_while_other_files_of_a_vm_cannot_be_opened() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = |(name, mib): (&str, u64)| {
        let folder = dir.path().join(name);
        fs::create_dir(&folder).unwrap();
        let file = folder.join("file");
        let made = File::create_new(&file).unwrap();
        made.set_len(mib << 20).unwrap();
        file
    };
    let [memory, pmem, initramfs] = [("memory", 64), ("pmem", 2), ("initramfs", 1)].map(file);
    let zone = format!("id=a,size=64M,shared=on,file={}", memory.display());
    let persistent = format!("file={}", pmem.display());
    let devices = ["--memory-zone", &zone, "--pmem", &persistent];
    let more = ["--initramfs", initramfs.to_str().unwrap()];
    let mut vmm = Vmm::counting(dir.path(), "size=0", &[&devices[..], &more].concat());
    let Some(mut held) = Held::reading(dir.path()) else {
        return;
    };
    // The kernel: its folder is that of the test.
    let rebooting = start(&vmm, &["reboot"]);
    let old = held.waits();
    for command in ["ping", "metrics"] {
        let answer = vmm.ctl(&[command]);
        assert!(answer.status.success(), "{command}: {}", said(&answer));
    }
    let progress = &info(&vmm)["in_progress"];
    assert_eq!(progress["operation"], "Boot", "{progress}");
    assert_eq!(progress["waits_for"], "its kernel and other files");
    let cancelled = vmm.ctl(&["cancel-migration"]);
    assert!(cancelled.status.success(), "{}", said(&cancelled));
    let answer = said(&rebooting.wait_with_output().unwrap());
    assert!(answer.contains("cancelled"), "{answer}");
    assert_eq!(info(&vmm)["state"], "Shutdown");
    // The next one waits until that is over.
    let mut booting = start(&vmm, &["boot"]);
    vmm.until("it is booted", |vmm| {
        info(vmm)["in_progress"]["operation"] == "Boot"
    });
    held.allow(old);
    held.allow_until(|| booting.try_wait().unwrap().is_some());
    let booted = booting.wait_with_output().unwrap();
    assert!(booted.status.success(), "{}{}", said(&booted), vmm.said());
    drop(held);
    for folder in ["first", "memory", "pmem", "initramfs"] {
        let mut held = Held::new(&dir.path().join(folder)).unwrap();
        let mut rebooting = start(&vmm, &["reboot"]);
        let waits = held.waits();
        assert!(vmm.ctl(&["ping"]).status.success(), "{folder}");
        held.allow(waits);
        held.allow_until(|| rebooting.try_wait().unwrap().is_some());
        let rebooted = rebooting.wait_with_output().unwrap();
        assert!(rebooted.status.success(), "{}", said(&rebooted));
        drop(held);
    }
    let printed = vmm.printed().len();
    vmm.until("it counts", |vmm| vmm.printed().len() > printed);
    // Persistent memory that is plugged in.
    let folder = pmem.parent().unwrap();
    let other = folder.join("other");
    File::create_new(&other).unwrap().set_len(2 << 20).unwrap();
    let persistent = format!("file={},id=other", other.display());
    let mut held = Held::new(folder).unwrap();
    let mut adding = start(&vmm, &["add-pmem", &persistent]);
    let waits = held.waits();
    assert_eq!(info(&vmm)["in_progress"]["operation"], "AddDevice");
    held.allow(waits);
    held.allow_until(|| adding.try_wait().unwrap().is_some());
    let added = adding.wait_with_output().unwrap();
    drop(held);
    assert!(added.status.success(), "{}", said(&added));
    assert_eq!(info(&vmm)["config"]["pmem"][1]["id"], "other");
    assert!(!is_free(&other));
}

#[test]
fn a_boot_that_was_cancelled_keeps_no_image_from_the_next_one() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [first, second] = two_images(dir.path());
    let folder = second.parent().unwrap();
    // Its format is looked for behind its lock.
    let (one, other) = (
        format!("path={},image_type=raw", first.display()),
        format!("path={}", second.display()),
    );
    let disks = ["--disk", &one, "--disk", &other];
    let mut vmm = Vmm::counting(dir.path(), "size=64M", &disks);
    let mut held = Held::reading(folder).unwrap();
    let rebooting = start(&vmm, &["reboot"]);
    let old = held.waits();
    assert!(!is_free(&second), "it is locked before it is read");
    // A boot that has been asked for meanwhile, too.
    let mut booting = start(&vmm, &["boot"]);
    let cancelled = vmm.ctl(&["cancel-migration"]);
    assert!(cancelled.status.success(), "{}", said(&cancelled));
    let answer = said(&rebooting.wait_with_output().unwrap());
    assert!(answer.contains("cancelled"), "{answer}");
    // The first one waits for its disk all the time.
    held.allow_until(|| booting.try_wait().unwrap().is_some());
    let booted = booting.wait_with_output().unwrap();
    assert!(booted.status.success(), "{}{}", said(&booted), vmm.said());
    held.allow(old);
    drop(held);
    assert!(!is_free(&first) && !is_free(&second), "the VM has them");
    let printed = vmm.printed().len();
    vmm.until("it counts", |vmm| vmm.printed().len() > printed);
}

#[test]
fn the_api_answers_while_an_image_cannot_be_opened_for_a_guest_that_resets_itself() {
    if !has_kvm() {
        return;
    }
    // mov dx, 0x64; mov al, 0xfe; out dx, al; hlt; jmp: a reset by the keyboard's controller.
    let reset = [0x66, 0xba, 0x64, 0, 0xb0, 0xfe, 0xee, 0xf4, 0xeb, 0xfd];
    let dir = tempfile::tempdir().unwrap();
    let [_, image] = two_images(dir.path());
    let Some(mut held) = Held::new(image.parent().unwrap()) else {
        return;
    };
    let disk = format!("path={},image_type=raw", image.display());
    let vmm = Vmm::running(dir.path(), &reset, "size=64M", "null", &["--disk", &disk]);
    // The lock and the image, for the first boot.
    let locks = held.waits();
    held.allow(locks);
    let opens = held.waits();
    held.allow(opens);
    let waits = held.waits();
    assert!(vmm.ctl(&["ping"]).status.success());
    let progress = &info(&vmm)["in_progress"];
    assert_eq!(progress["operation"], "Boot", "{progress}");
    let cancelled = vmm.ctl(&["cancel-migration"]);
    assert!(cancelled.status.success(), "{}", said(&cancelled));
    assert_eq!(info(&vmm)["state"], "Shutdown");
    held.allow(waits);
}

#[test]
fn the_api_answers_while_an_image_cannot_be_opened_for_a_vm_that_arrives() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [_, image] = two_images(dir.path());
    let disk = format!("path={},image_type=raw", image.display());
    let mut first = Vmm::counting(dir.path(), "size=64M", &["--disk", &disk]);
    let mut second = Vmm::start(dir.path(), "second", &[]);
    let (mut receiving, url) = second.receive(&first.serial);
    let Some(mut held) = Held::new(image.parent().unwrap()) else {
        return;
    };
    let sending = start(
        &first,
        &["send-migration", &url, "--watch", "--preserve-source"],
    );
    let waits = held.waits();
    for vmm in [&first, &second] {
        for command in ["ping", "migration"] {
            let answer = vmm.ctl(&[command]);
            assert!(answer.status.success(), "{command}: {}", said(&answer));
        }
    }
    let cancelled = second.ctl(&["cancel-migration"]);
    assert!(cancelled.status.success(), "{}", said(&cancelled));
    assert!(!receiving.wait().unwrap().success());
    let sent = sending.wait_with_output().unwrap();
    assert!(said(&sent).contains("cancelled"), "{}", said(&sent));
    held.allow(waits);
    drop(held);
    let printed = first.printed().len();
    first.until("it counts on", |vmm| vmm.printed().len() > printed);
}

#[test]
fn the_api_answers_while_a_console_cannot_be_opened_for_a_vm_that_arrives() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut first = Vmm::counting(dir.path(), "size=64M", &[]);
    let mut second = Vmm::start(dir.path(), "second", &[]);
    let folder = dir.path().join("consoles");
    fs::create_dir(&folder).unwrap();
    second.serial = folder.join("serial");
    let (mut receiving, url) = second.receive(&first.serial);
    let Some(mut held) = Held::new(&folder) else {
        return;
    };
    let how = ["send-migration", &url, "--watch", "--preserve-source"];
    let sending = start(&first, &how);
    let waits = held.waits();
    for command in ["ping", "migration"] {
        let answer = second.ctl(&[command]);
        assert!(answer.status.success(), "{command}: {}", said(&answer));
    }
    let cancelled = second.ctl(&["cancel-migration"]);
    assert!(cancelled.status.success(), "{}", said(&cancelled));
    assert!(!receiving.wait().unwrap().success());
    let sent = sending.wait_with_output().unwrap();
    assert!(said(&sent).contains("cancelled"), "{}", said(&sent));
    // Another one waits until that machine is gone.
    let refused = second.ctl(&["receive-migration", &url]);
    assert!(
        said(&refused).contains("has not ended"),
        "{}",
        said(&refused)
    );
    held.allow(waits);
    drop(held);
    let (mut third, _) = first.move_to(dir.path(), "third", &[]);
    third.until("it counts on", |vmm| vmm.printed().len() > 9);
}

/// Images in folders of their own, the second of which is to be held back.
fn two_images(dir: &Path) -> [std::path::PathBuf; 2] {
    ["free", "images"].map(|name| {
        let folder = dir.join(name);
        fs::create_dir(&folder).unwrap();
        let image = folder.join("disk");
        File::create_new(&image).unwrap().set_len(1 << 20).unwrap();
        image
    })
}

/// Whether nobody has locked an image.
fn is_free(image: &Path) -> bool {
    let file = File::options().read(true).write(true).open(image).unwrap();
    lock::lock(&file, 1 << 20, false, LockGranularity::ByteRange).is_ok()
}

#[test]
fn a_core_dump_that_is_cancelled_leaves_no_file() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let vmm = Vmm::counting(dir.path(), "size=64M", &[]);
    assert!(vmm.ctl(&["pause"]).status.success());
    let folder = dir.path().join("cores");
    fs::create_dir(&folder).unwrap();
    let core = folder.join("core");
    let Some(mut held) = Held::new(&folder) else {
        return;
    };
    let dumping = start(&vmm, &["coredump", core.to_str().unwrap()]);
    let waits = held.waits();
    assert_eq!(info(&vmm)["in_progress"]["operation"], "Coredump");
    assert!(vmm.ctl(&["cancel-migration"]).status.success());
    held.allow(waits);
    assert!(!dumping.wait_with_output().unwrap().status.success());
    drop(held);
    assert!(!core.exists());
    let dumped = vmm.ctl(&["coredump", core.to_str().unwrap()]);
    assert!(dumped.status.success(), "{}", said(&dumped));
    assert!(fs::read(&core).unwrap().starts_with(b"\x7fELF"));
}

#[test]
fn a_snapshot_that_is_too_large_for_a_file_is_an_error() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (vmm, directory) = saved(dir.path());
    let before = state(&directory);
    let limit = libc::rlimit {
        rlim_cur: 4096,
        rlim_max: 4096,
    };
    let process = vmm.process.id() as i32;
    // SAFETY: sets a limit of the child from a structure that outlives the call.
    let set = unsafe {
        libc::prlimit(
            process,
            libc::RLIMIT_FSIZE,
            &raw const limit,
            std::ptr::null_mut(),
        )
    };
    assert_eq!(set, 0);
    let saved = vmm.ctl(&["snapshot", directory.to_str().unwrap()]);
    assert!(said(&saved).contains("File too large"), "{}", said(&saved));
    assert_eq!(state(&directory), before);
    assert!(vmm.ctl(&["resume"]).status.success());
}

/// A file system of 8 MiB.
struct Small(CString);

impl Small {
    fn mount(at: &Path) -> Option<Self> {
        fs::create_dir(at).unwrap();
        let path = CString::new(at.as_os_str().as_bytes()).unwrap();
        let (kind, options) = (c"tmpfs".as_ptr(), c"size=8m".as_ptr());
        // SAFETY: the strings outlive the call.
        match unsafe { libc::mount(kind, path.as_ptr(), kind, 0, options.cast()) } {
            0 => Some(Self(path)),
            _ => {
                let error = io::Error::last_os_error();
                eprintln!("not tested: nothing can be mounted here: {error}");
                None
            }
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // SAFETY: the string outlives the call.
        unsafe { libc::umount2(self.0.as_ptr(), libc::MNT_DETACH) };
    }
}

#[test]
fn what_finds_no_room_on_its_disk_leaves_the_old_snapshot_whole() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("small");
    let Some(_small) = Small::mount(&at) else {
        return;
    };
    let vmm = Vmm::counting(dir.path(), "size=64M", &[]);
    assert!(vmm.ctl(&["pause"]).status.success());
    let [directory, core, full] = ["snapshot", "core", "full"].map(|name| at.join(name));
    let snapshot = ["snapshot", directory.to_str().unwrap()];
    let saved = vmm.ctl(&snapshot);
    assert!(saved.status.success(), "{}{}", said(&saved), vmm.said());
    let before = state(&directory);
    let mut full = File::create(full).unwrap();
    assert!(io::copy(&mut io::repeat(7), &mut full).is_err());
    for request in [snapshot, ["coredump", core.to_str().unwrap()]] {
        let refused = vmm.ctl(&request);
        let why = said(&refused);
        assert!(why.contains("No space left on device"), "{why}");
    }
    assert_eq!(state(&directory), before);
    let left = |path: &Path| fs::read_dir(path).unwrap().count();
    assert_eq!((left(&directory), left(&at)), (3, 2));
    assert!(vmm.ctl(&["resume"]).status.success());
}
