//! A guest with a request in flight to storage that does not answer: fanotify holds back whoever reads from the file.
//! The storage is a source of random numbers, or a disk, which can be removed.

use std::{
    fs,
    io::Write,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
};

use serde_json::Value;

use super::{Vmm, has_kvm, slow_disk::Held};

/// Where the guest has its queue, and the registers of its device.
const RING: u32 = 0x50_0000;
const BAR: u32 = 0xc800_0000;
/// Number of the device.
const DEVICE: u32 = 5;

fn store8(to: u32, value: u8) -> Vec<u8> {
    [&[0xc6, 0x05][..], &to.to_le_bytes(), &[value]].concat()
}

fn store16(to: u32, value: u16) -> Vec<u8> {
    [
        &[0x66, 0xc7, 0x05][..],
        &to.to_le_bytes(),
        &value.to_le_bytes(),
    ]
    .concat()
}

fn store32(to: u32, value: u32) -> Vec<u8> {
    [&[0xc7, 0x05][..], &to.to_le_bytes(), &value.to_le_bytes()].concat()
}

/// Writes to a register of the device's configuration space.
fn configure(register: u32, value: u32) -> Vec<u8> {
    let out32 = |port: u32, value: u32| {
        let load = [
            &[0xb8][..],
            &value.to_le_bytes(),
            &[0xba],
            &port.to_le_bytes(),
        ]
        .concat();
        [load, vec![0xef]].concat()
    };
    let address = 0x8000_0000 | DEVICE << 11 | register;
    [out32(0xcf8, address), out32(0xcfc, value)].concat()
}

/// A descriptor of the guest's only request: address, length, flags and the next one.
type Descriptor = (u32, u32, u16, u16);

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const DATA: u32 = RING + 0x3000;

/// The device writes 64 bytes.
const RANDOM: [Descriptor; 1] = [(DATA, 64, WRITE, 0)];

/// The device reads a header of zeroes: it is to read the first sector. It writes that, and a status.
const SECTOR: [Descriptor; 3] = [
    (DATA, 16, NEXT, 1),
    (DATA + 0x1000, 512, NEXT | WRITE, 2),
    (DATA + 0x2000, 1, WRITE, 0),
];

/// Until a byte has come from the serial port.
const AWAIT: [u8; 16] = [
    0xba, 0xfd, 3, 0, 0, 0xec, 0xa8, 1, 0x74, 0xfb, // mov edx, 0x3fd; in; test al, 1; jz
    0xba, 0xf8, 3, 0, 0, 0xec, // mov edx, 0x3f8; in
];

/// A guest that says so when it is ready, waits for a byte, makes a request, waits for another byte, and resets itself.
fn code(request: &[Descriptor]) -> Vec<u8> {
    let [descriptors, available, used] = [0, 0x1000, 0x2000].map(|at| RING + at);
    let describe = |(index, &(address, len, flags, next)): (usize, &Descriptor)| {
        let at = descriptors + 16 * index as u32;
        let place = [store32(at, address), store32(at + 8, len)];
        let link = [store16(at + 12, flags), store16(at + 14, next)];
        [place, link].concat().concat()
    };
    // The upper half of the address is zero.
    let queue = |register, value| {
        [
            store32(BAR + register, value),
            store32(BAR + register + 4, 0),
        ]
        .concat()
    };
    [
        vec![0xfa], // cli
        configure(0x10, BAR),
        configure(0x14, 0),
        configure(0x04, 6), // memory, bus master
        store8(BAR + 20, 1),
        store8(BAR + 20, 3),
        store32(BAR + 8, 1),
        store32(BAR + 12, 1), // VIRTIO_F_VERSION_1
        store8(BAR + 20, 11),
        store16(BAR + 22, 0),
        queue(32, descriptors),
        queue(40, available),
        queue(48, used),
        store16(BAR + 28, 1),
        store8(BAR + 20, 15),
        request.iter().enumerate().flat_map(describe).collect(),
        store16(available + 2, 1),
        vec![0xb0, b'R', 0xba, 0xf8, 3, 0, 0, 0xee], // mov al, 'R'; mov edx, 0x3f8; out
        AWAIT.to_vec(),
        store16(BAR + 0x3000, 0), // the queue's notification
        AWAIT.to_vec(),
        vec![0xb0, 1, 0xba, 0, 6, 0, 0, 0xee, 0xeb, 0xfe], // reset by ACPI's register
    ]
    .concat()
}

/// A VM whose guest has made a request, and what holds that back.
struct Waiting {
    vmm: Vmm,
    serial: UnixStream,
    events: PathBuf,
    held: Held,
}

impl Waiting {
    fn start(dir: &Path) -> Option<Self> {
        Self::with(dir, &RANDOM, |source| {
            let rng = format!("src={source},pci_device_id={DEVICE}");
            ["--rng".to_owned(), rng]
        })
    }

    fn with(
        dir: &Path,
        request: &[Descriptor],
        device: impl FnOnce(&str) -> [String; 2],
    ) -> Option<Self> {
        let folder = dir.join("storage");
        fs::create_dir(&folder).unwrap();
        let source = folder.join("source");
        fs::write(&source, [7; 4096]).unwrap();
        // Whoever opens a file before this is never held back.
        let held = Held::reading(&folder)?;
        let [option, device] = device(source.to_str().unwrap());
        let events = dir.join("events");
        let socket = dir.join("serial");
        let vmm = Vmm::running(
            dir,
            &code(request),
            "size=64M",
            &format!("socket={}", socket.display()),
            &[
                &option,
                &device,
                "--event-monitor",
                &format!("path={}", events.display()),
            ],
        );
        let mut serial = UnixStream::connect(&socket).unwrap();
        serial.write_all(b"x").unwrap();
        Some(Self {
            vmm,
            serial,
            events,
            held,
        })
    }

    fn in_progress(&self) -> Value {
        let info: Value = serde_json::from_slice(&self.vmm.ctl(&["info"]).stdout).unwrap();
        info["in_progress"].clone()
    }

    /// Waits until `vm.info` says that an operation waits for the source.
    fn until(&mut self, operation: &str) {
        let is_waiting = |vmm: &Vmm| {
            let info: Value = serde_json::from_slice(&vmm.ctl(&["info"]).stdout).unwrap();
            let waits_for = &info["in_progress"]["waits_for"];
            info["in_progress"]["operation"] == operation
                && waits_for
                    .as_str()
                    .is_some_and(|text| text.contains("1 requests"))
        };
        self.vmm.until(operation, is_waiting);
    }

    /// What the vCPU has done; it looks at its serial port all the time.
    fn vcpu(&self) -> Value {
        vcpu(&self.vmm)
    }

    /// Waits until the vCPU does something: its thread may wait for a processor.
    fn goes_on(&mut self) {
        let before = self.vcpu();
        self.vmm.until("the guest", |vmm| vcpu(vmm) != before);
    }

    fn until_event(&mut self, event: &str) {
        let (events, text) = (self.events.clone(), format!("\"event\": \"{event}\""));
        self.vmm.until(event, |_| {
            fs::read_to_string(&events).is_ok_and(|all| all.contains(&text))
        });
    }
}

fn vcpu(vmm: &Vmm) -> Value {
    let counters: Value = serde_json::from_slice(&vmm.ctl(&["counters"]).stdout).unwrap();
    assert!(counters["_cpu0"].is_object(), "{counters}");
    counters["_cpu0"].clone()
}

#[test]
fn a_reset_takes_effect_when_storage_answers() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let Some(mut waiting) = Waiting::start(dir.path()) else {
        return;
    };
    let read = waiting.held.waits();
    waiting.serial.write_all(b"x").unwrap();
    waiting.until("Reset");
    let refused = waiting.vmm.ctl(&["pause"]);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        why.contains("waits for storage") && why.contains("405"),
        "{why}"
    );
    assert!(waiting.vmm.ctl(&["counters"]).status.success());
    waiting.held.allow(read);
    waiting.until_event("rebooted");
    assert_eq!(waiting.in_progress(), Value::Null);
    // The guest has been reset, and waits again; a client may power it off.
    let mut serial = UnixStream::connect(dir.path().join("serial")).unwrap();
    serial.write_all(b"x").unwrap();
    let read = waiting.held.waits();
    let shutting_down = super::slow_disk::start(&waiting.vmm, &["shutdown"]);
    waiting.until("Shutdown");
    waiting.held.allow(read);
    let answer = shutting_down.wait_with_output().unwrap();
    assert!(answer.status.success(), "{}", waiting.vmm.said());
    let info: Value = serde_json::from_slice(&waiting.vmm.ctl(&["info"]).stdout).unwrap();
    assert_eq!(info["state"], "Shutdown");
}

#[test]
fn a_guest_stands_still_while_its_end_waits_for_storage() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let Some(mut waiting) = Waiting::start(dir.path()) else {
        return;
    };
    let read = waiting.held.waits();
    let shutting_down = super::slow_disk::start(&waiting.vmm, &["shutdown"]);
    waiting.until("Shutdown");
    assert_eq!(waiting.vcpu(), waiting.vcpu());
    // It is refused, and the guest goes on.
    let answer = shutting_down.wait_with_output().unwrap();
    assert!(!answer.status.success());
    waiting.goes_on();
    waiting.held.allow(read);
    let answer = waiting.vmm.ctl(&["shutdown"]);
    assert!(answer.status.success(), "{}", waiting.vmm.said());
}

#[test]
fn a_forced_removal_waits_for_storage_and_the_guest_goes_on() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = |image: &str| {
        let disk = format!("id=d,path={image},image_type=raw,readonly=on,pci_device_id={DEVICE}");
        ["--disk".to_owned(), disk]
    };
    let Some(mut waiting) = Waiting::with(dir.path(), &SECTOR, disk) else {
        return;
    };
    let read = waiting.held.waits();
    let removing = super::slow_disk::start(&waiting.vmm, &["remove-device", "d", "--force"]);
    waiting.until("RemoveDevice");
    waiting.goes_on();
    let refused = waiting.vmm.ctl(&["pause"]);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(why.contains("a device that is being removed"), "{why}");
    waiting.held.allow(read);
    let answer = removing.wait_with_output().unwrap();
    assert!(answer.status.success(), "{}", waiting.vmm.said());
    assert_eq!(waiting.in_progress(), Value::Null);
    let info: Value = serde_json::from_slice(&waiting.vmm.ctl(&["info"]).stdout).unwrap();
    assert!(info["device_tree"]["d"].is_null(), "{info}");
    waiting.goes_on();
}

#[test]
fn a_migration_that_waits_for_storage_is_cancelled_at_once() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let Some(mut waiting) = Waiting::start(dir.path()) else {
        return;
    };
    let read = waiting.held.waits();
    let mut second = Vmm::start(dir.path(), "second", &[]);
    let (mut receiving, url) = second.receive(&dir.path().join("serial"));
    let sending = super::slow_disk::start(&waiting.vmm, &["send-migration", &url, "--watch"]);
    waiting.vmm.until("it waits for storage", |vmm| {
        vmm.migration()["phase"] == "Final"
    });
    assert_eq!(waiting.vcpu(), waiting.vcpu());
    assert!(waiting.vmm.ctl(&["cancel-migration"]).status.success());
    let answer = sending.wait_with_output().unwrap();
    let why = String::from_utf8_lossy(&answer.stderr).into_owned();
    assert!(why.contains("cancelled"), "{why}");
    // Storage has still not answered, and the limit for that has not passed.
    let said = waiting.vmm.said();
    assert!(said.contains("not waited for any longer"), "{said}");
    waiting.goes_on();
    waiting.held.allow(read);
    receiving.kill().unwrap();
    receiving.wait().unwrap();
}

#[test]
fn the_api_answers_while_a_pause_waits_for_storage() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let Some(mut waiting) = Waiting::start(dir.path()) else {
        return;
    };
    let read = waiting.held.waits();
    let pausing = super::slow_disk::start(&waiting.vmm, &["pause"]);
    waiting.until("Pause");
    assert!(waiting.vmm.ctl(&["ping"]).status.success());
    waiting.held.allow(read);
    assert!(pausing.wait_with_output().unwrap().status.success());
    assert!(waiting.vmm.ctl(&["resume"]).status.success());
}
