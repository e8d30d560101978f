//! VMs whose memory is restored on demand from storage that does not answer.

use std::{
    ffi::CString,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use vmm_snapshot::state_file;

use super::{
    Vmm,
    hanging_flush::Storage,
    has_kvm,
    slow_disk::{said, start},
};

/// A file behind which another one is to be seen.
struct Bound(CString);

impl Bound {
    fn mount(at: &Path, file: &Path) -> Option<Self> {
        let [at, file] = [at, file].map(|path| CString::new(path.to_str().unwrap()).unwrap());
        let (kind, flags) = (std::ptr::null(), libc::MS_BIND);
        // SAFETY: the strings outlive the call.
        match unsafe { libc::mount(file.as_ptr(), at.as_ptr(), kind, flags, kind.cast()) } {
            0 => Some(Self(at)),
            _ => {
                let error = io::Error::last_os_error();
                eprintln!("not tested: nothing can be mounted here: {error}");
                None
            }
        }
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        // SAFETY: the string outlives the call.
        unsafe { libc::umount2(self.0.as_ptr(), libc::MNT_DETACH) };
    }
}

/// Where a device of the saved guest has its queues.
const QUEUES: u64 = 48 << 20;

/// Type of a balloon.
const BALLOON: u32 = 5;

/// Makes the balloon of a saved VM have a driver, whose queues are in memory that the guest does not use otherwise.
fn give_driver(snapshot: &Path) {
    let path = snapshot.join("state.json");
    let mut state: Value = state_file::decode(&fs::read(&path).unwrap()).unwrap();
    let devices = state["devices"].as_array_mut().unwrap();
    let mut transports = devices
        .iter_mut()
        .map(|device| &mut device["state"]["transport"]);
    let balloon = transports.find(|transport| transport["device_type"] == BALLOON);
    let transport = balloon.unwrap();
    transport["status"] = json!(15);
    transport["driver_features"] = json!(1_u64 << 32);
    let queues = transport["queues"].as_array_mut().unwrap();
    for (queue, at) in queues.iter_mut().zip((QUEUES..).step_by(0x4000)) {
        queue["registers"] = json!({
            "size": 32,
            "enabled": true,
            "descriptors": at,
            "driver": at + 0x1000,
            "device": at + 0x2000,
        });
    }
    let encoded = state_file::encode(&state, state_file::VERSION);
    fs::write(&path, encoded.unwrap()).unwrap();
}

/// A snapshot whose memory is on such storage.
fn saved(dir: &Path) -> Option<(Vmm, PathBuf, Bound, Storage)> {
    let mut first = Vmm::counting(dir, "size=64M", &["--balloon", "size=0"]);
    let snapshot = dir.join("snapshot");
    assert!(first.ctl(&["pause"]).status.success());
    let saved = first.ctl(&["snapshot", snapshot.to_str().unwrap()]);
    assert!(saved.status.success(), "{}{}", said(&saved), first.said());
    first.kill();
    give_driver(&snapshot);
    let memory = snapshot.join("memory-ranges");
    let at = dir.join("storage");
    let storage = Storage::of(&at, fs::read(&memory).unwrap())?;
    File::open(at.join("memory")).unwrap();
    let bound = Bound::mount(&memory, &at.join("memory"))?;
    Some((first, snapshot, bound, storage))
}

fn has_thread(vmm: &Vmm, name: &str) -> bool {
    let threads = fs::read_dir(format!("/proc/{}/task", vmm.process.id())).unwrap();
    let names =
        threads.filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("comm")).ok());
    names
        .map(|name| name.trim().to_owned())
        .any(|its| its == name)
}

fn progress(vmm: &Vmm) -> Value {
    let info: Value = serde_json::from_slice(&vmm.ctl(&["info"]).stdout).unwrap();
    info["in_progress"].clone()
}

#[test]
fn the_api_answers_while_storage_brings_no_memory_on_demand() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let Some((first, snapshot, _bound, storage)) = saved(dir.path()) else {
        return;
    };
    let printed = first.printed().len();
    let copy = format!("source_url=file://{},resume=on", snapshot.display());
    let from = format!("{copy},memory_restore_mode=OnDemand");
    let paused = from.replace(",resume=on", "");
    let mut vmm = Vmm::start(dir.path(), "second", &[]);
    vmm.serial.clone_from(&first.serial);
    // Dropped first, so that the VMM can end.
    let storage = storage;
    // As the machine is made.
    storage.hold_reads(0);
    let restoring = start(&vmm, &["restore", &from]);
    storage.flushed.recv().unwrap();
    assert!(vmm.ctl(&["ping"]).status.success());
    let answer = said(&vmm.ctl(&["info"]));
    assert!(answer.contains("and waits for its machine"), "{answer}");
    let cancelled = vmm.ctl(&["cancel-migration"]);
    assert!(cancelled.status.success(), "{}", said(&cancelled));
    let answer = said(&restoring.wait_with_output().unwrap());
    assert!(answer.contains("cancelled"), "{answer}");
    // The next one waits for the end of that machine.
    let restoring = start(&vmm, &["restore", &from]);
    vmm.until("it waits", |vmm| {
        said(&vmm.ctl(&["info"])).contains("is being restored")
    });
    storage.allow();
    let restored = restoring.wait_with_output().unwrap();
    assert!(restored.status.success(), "{}", said(&restored));
    vmm.until("it counts on", |vmm| vmm.printed().len() > printed);
    let deleted = vmm.ctl(&["delete"]);
    assert!(deleted.status.success(), "{}", said(&deleted));
    // As it runs: its balloon waits for its queues.
    for ends in [false, true] {
        storage.hold_reads(32 << 20);
        while storage.flushed.try_recv().is_ok() {}
        let restored = vmm.ctl(&["restore", &paused]);
        assert!(restored.status.success(), "{}", said(&restored));
        // What the guest uses is there by then.
        storage.flushed.recv().unwrap();
        let resumed = vmm.ctl(&["resume"]);
        assert!(resumed.status.success(), "{}", said(&resumed));
        let printed = vmm.printed().len();
        vmm.until("it counts on", |vmm| vmm.printed().len() > printed);
        if ends {
            let deleted = vmm.ctl(&["delete"]);
            assert!(deleted.status.success(), "{}", said(&deleted));
            let url = format!("unix:{}", dir.path().join("migration").display());
            let refused = said(&vmm.ctl(&["receive-migration", &url]));
            assert!(refused.contains("has not ended"), "{refused}");
            // That its memory is lost concerns nobody.
            storage.fail_reads();
            vmm.until("it is gone", |vmm| !has_thread(vmm, "_pagefault"));
            storage.allow();
            let restored = vmm.ctl(&["restore", &copy]);
            assert!(restored.status.success(), "{}", said(&restored));
        } else {
            let pausing = start(&vmm, &["pause"]);
            vmm.until("it waits", |vmm| {
                let waits_for = progress(vmm)["waits_for"].to_string();
                waits_for.contains("waits for memory that is restored on demand")
            });
            storage.allow();
            let paused = pausing.wait_with_output().unwrap();
            assert!(paused.status.success(), "{}", said(&paused));
            let deleted = vmm.ctl(&["delete"]);
            assert!(deleted.status.success(), "{}", said(&deleted));
        }
    }
    let printed = vmm.printed().len();
    vmm.until("it counts on", |vmm| vmm.printed().len() > printed);
}
