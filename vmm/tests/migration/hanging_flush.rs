//! Storage that does not answer: a file system in user space (FUSE), which this test serves, holds back flushes and writes,
//! whoever closes its file, or reads of a part of it.

use std::{
    ffi::CString,
    fs::{self, File},
    io::{self, Read, Write},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
};

use serde_json::Value;

use super::{
    Vmm, check_counting, has_kvm,
    slow_disk::{said, start},
};

const SIZE: usize = 1 << 20;

/// Operations of the protocol (`linux/fuse.h`).
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const SETATTR: u32 = 4;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const FSYNC: u32 = 20;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;

/// Length of a request's header.
const HEAD: usize = 40;

/// The only file's number; the folder has 1.
const FILE: u64 = 2;

/// A request to the file system.
struct Asked {
    operation: u32,
    unique: u64,
    node: u64,
    body: Vec<u8>,
}

impl Asked {
    fn read(mut from: &File) -> io::Result<Self> {
        let mut all = vec![0; (1 << 17) + 4096];
        let len = from.read(&mut all)?;
        let body = all[HEAD..len].to_vec();
        let head = |at: usize| u64::from_ne_bytes(all[at..at + 8].try_into().unwrap());
        Ok(Self {
            operation: (head(0) >> 32) as u32,
            unique: head(8),
            node: head(16),
            body,
        })
    }

    fn number(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.body[at..at + 8].try_into().unwrap())
    }

    /// Offset and length of a transfer.
    fn range(&self) -> (usize, usize) {
        (self.number(8) as usize, (self.number(16) as u32) as usize)
    }
}

fn answer(mut to: &File, unique: u64, error: i32, body: &[u8]) {
    let head = [(16 + body.len()) as u32, (-error).cast_unsigned()];
    let head = head.map(u32::to_ne_bytes).concat();
    let all = [&head, &unique.to_ne_bytes()[..], body].concat();
    // Nobody waits if the file system is gone.
    let _ = to.write_all(&all);
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// `struct fuse_attr`.
fn attributes(node: u64, size: usize) -> Vec<u8> {
    let (size, mode) = match node {
        FILE => (size as u64, libc::S_IFREG | 0o600),
        _ => (0, libc::S_IFDIR | 0o700),
    };
    let mut all = [node, size, size / 512, 0, 0, 0]
        .map(u64::to_ne_bytes)
        .concat();
    all.extend(words(&[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0]));
    all
}

/// The requests that are held back, with their answers; `None` if they are answered.
type Held = Arc<Mutex<Option<HeldBack>>>;

struct HeldBack {
    /// Whoever closes the file, and not flushes and writes.
    closes: bool,
    waiting: Vec<(u64, Vec<u8>)>,
}

/// The reads that are held back.
struct Reads {
    /// From this offset on.
    from: usize,
    waiting: Vec<(u64, Vec<u8>)>,
    /// They fail instead.
    fail: bool,
}

fn serve(
    fuse: &File,
    held: &Held,
    reads: &Mutex<Reads>,
    flushed: &mpsc::Sender<()>,
    mut contents: Vec<u8>,
) -> io::Result<()> {
    let size = contents.len();
    loop {
        let asked = Asked::read(fuse)?;
        let unique = asked.unique;
        let done = |body: &[u8]| answer(fuse, unique, 0, body);
        // When it may.
        let done_later =
            |body: Vec<u8>| match &mut *held.lock().unwrap_or_else(PoisonError::into_inner) {
                Some(held) if held.closes == (asked.operation == FLUSH) => {
                    held.waiting.push((unique, body));
                    let _ = flushed.send(());
                }
                _ => done(&body),
            };
        match asked.operation {
            INIT => done(&words(&[
                7,
                31,
                1 << 17,
                0,
                0,
                1 << 17,
                1,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
            ])),
            LOOKUP => {
                let entry = [FILE, 0, 0, 0, 0].map(u64::to_ne_bytes).concat();
                done(&[entry, attributes(FILE, size)].concat());
            }
            GETATTR | SETATTR => done(&[vec![0; 16], attributes(asked.node, size)].concat()),
            OPEN => done(&[0; 16]),
            READ => {
                let (at, len) = asked.range();
                let end = (at + len).min(size);
                let body = &contents[at.min(end)..end];
                let mut reads = reads.lock().unwrap_or_else(PoisonError::into_inner);
                if end > reads.from && reads.fail {
                    answer(fuse, unique, libc::EIO, &[]);
                } else if end > reads.from {
                    reads.waiting.push((unique, body.to_vec()));
                    let _ = flushed.send(());
                } else {
                    done(body);
                }
            }
            WRITE => {
                let (at, len) = asked.range();
                let data = &asked.body[40..40 + len];
                contents
                    .iter_mut()
                    .skip(at)
                    .zip(data)
                    .for_each(|(to, byte)| *to = *byte);
                done_later(words(&[len as u32, 0]));
            }
            STATFS => done(&[0; 80]),
            FSYNC | FLUSH => done_later(Vec::new()),
            RELEASE => done(&[]),
            FORGET | BATCH_FORGET | INTERRUPT => {}
            _ => answer(fuse, unique, libc::ENOSYS, &[]),
        }
    }
}

/// The file system, with one file.
pub struct Storage {
    at: PathBuf,
    fuse: Arc<File>,
    held: Held,
    reads: Arc<Mutex<Reads>>,
    /// Somebody is held back.
    pub flushed: mpsc::Receiver<()>,
}

impl Storage {
    fn mount(at: &Path) -> Option<Self> {
        Self::of(at, vec![0; SIZE])
    }

    /// With these contents of its file.
    pub fn of(at: &Path, contents: Vec<u8>) -> Option<Self> {
        fs::create_dir(at).unwrap();
        let path = CString::new(at.to_str().unwrap()).unwrap();
        let mounted = || -> io::Result<File> {
            let fuse = File::options().read(true).write(true).open("/dev/fuse")?;
            let fd = fuse.as_raw_fd();
            let options = format!("fd={fd},rootmode=40000,user_id=0,group_id=0");
            let options = CString::new(options).unwrap();
            let kind = c"fuse.hanging".as_ptr();
            // SAFETY: the strings outlive the call.
            match unsafe { libc::mount(kind, path.as_ptr(), kind, 0, options.as_ptr().cast()) } {
                0 => Ok(fuse),
                _ => Err(io::Error::last_os_error()),
            }
        };
        let fuse = match mounted() {
            Ok(fuse) => Arc::new(fuse),
            Err(error) => {
                eprintln!("not tested: no file system of this test can be mounted: {error}");
                return None;
            }
        };
        let held = Held::default();
        let (sender, flushed) = mpsc::channel();
        let reads = Arc::new(Mutex::new(Reads {
            from: usize::MAX,
            waiting: Vec::new(),
            fail: false,
        }));
        let (of_thread, held_back, held_reads) = (fuse.clone(), held.clone(), reads.clone());
        // It ends with the file system.
        thread::spawn(move || serve(&of_thread, &held_back, &held_reads, &sender, contents));
        Some(Self {
            at: at.to_owned(),
            fuse,
            held,
            reads,
            flushed,
        })
    }

    /// Flushes and writes wait from now on.
    fn hold(&self) {
        self.hold_back(false);
    }

    /// Whoever closes the file waits from now on.
    fn hold_closes(&self) {
        self.hold_back(true);
    }

    fn hold_back(&self, closes: bool) {
        *self.held.lock().unwrap() = Some(HeldBack {
            closes,
            waiting: Vec::new(),
        });
    }

    /// Reads from this offset on wait from now on.
    pub fn hold_reads(&self, from: usize) {
        let mut reads = self.reads.lock().unwrap();
        (reads.from, reads.fail) = (from, false);
    }

    /// Those fail from now on.
    pub fn fail_reads(&self) {
        let mut reads = self.reads.lock().unwrap();
        reads.fail = true;
        for (unique, _) in reads.waiting.drain(..) {
            answer(&self.fuse, unique, libc::EIO, &[]);
        }
    }

    /// Answers those that wait, and all others.
    pub fn allow(&self) {
        let mut reads = self.reads.lock().unwrap_or_else(PoisonError::into_inner);
        reads.from = usize::MAX;
        for (unique, body) in reads.waiting.drain(..) {
            answer(&self.fuse, unique, 0, &body);
        }
        drop(reads);
        let held = self
            .held
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        for (unique, body) in held.into_iter().flat_map(|held| held.waiting) {
            answer(&self.fuse, unique, 0, &body);
        }
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        // Who waits for an answer cannot be killed.
        self.allow();
        let at = CString::new(self.at.to_str().unwrap()).unwrap();
        // SAFETY: the string outlives the call.
        unsafe { libc::umount2(at.as_ptr(), libc::MNT_DETACH) };
    }
}

#[test]
fn the_api_answers_while_a_vcpu_waits_for_the_file_of_its_console() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("storage");
    let Some(storage) = Storage::mount(&at) else {
        return;
    };
    let serial = format!("file={}", at.join("serial").display());
    let mut vmm = Vmm::counting_to(dir.path(), "size=16M", &serial, &[]);
    // Dropped first, so that the VMM can end.
    let storage = storage;
    storage.hold();
    storage.flushed.recv().unwrap();
    let pausing = start(&vmm, &["pause"]);
    let progress = |vmm: &Vmm| {
        let info: Value = serde_json::from_slice(&vmm.ctl(&["info"]).stdout).unwrap();
        info["in_progress"].clone()
    };
    vmm.until("it waits", |vmm| {
        let waits_for = progress(vmm)["waits_for"].to_string();
        waits_for.contains("vCPU 0 waits for the host in an access")
    });
    assert_eq!(progress(&vmm)["operation"], "Pause");
    assert!(vmm.ctl(&["ping"]).status.success());
    let refused = vmm.ctl(&["nmi"]);
    let why = String::from_utf8_lossy(&refused.stderr);
    assert!(
        why.contains("vCPU 0 waits for the host in an access"),
        "{why}"
    );
    storage.allow();
    assert!(pausing.wait_with_output().unwrap().status.success());
    assert_eq!(progress(&vmm), Value::Null);
    assert!(vmm.ctl(&["resume"]).status.success());
    // It prints on, and may be ended meanwhile.
    storage.hold();
    storage.flushed.recv().unwrap();
    let deleting = start(&vmm, &["delete"]);
    assert!(vmm.ctl(&["ping"]).status.success());
    storage.allow();
    assert!(deleting.wait_with_output().unwrap().status.success());
}

#[test]
fn the_api_answers_while_storage_keeps_a_disk_from_being_closed() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("storage");
    let Some(storage) = Storage::mount(&at) else {
        return;
    };
    let disk = format!("id=disk,path={},image_type=raw", at.join("disk").display());
    let mut vmm = Vmm::counting(dir.path(), "size=16M", &["--disk", &disk]);
    // Dropped first, so that the VMM can end.
    let storage = storage;
    storage.hold_closes();
    let removing = start(&vmm, &["remove-device", "disk", "--force"]);
    storage.flushed.recv().unwrap();
    assert!(vmm.ctl(&["ping"]).status.success());
    // The image is given up later.
    let removed = removing.wait_with_output().unwrap();
    assert!(removed.status.success(), "{}", said(&removed));
    storage.allow();
    vmm.until("the image is given up", |vmm| {
        vmm.ctl(&["add-disk", &disk]).status.success()
    });
    // Those of the removal and of looking at the image.
    while storage.flushed.try_recv().is_ok() {}
    storage.hold_closes();
    let mut deleting = start(&vmm, &["delete"]);
    storage.flushed.recv().unwrap();
    for command in ["ping", "metrics"] {
        let answer = vmm.ctl(&[command]);
        assert!(answer.status.success(), "{command}: {}", said(&answer));
    }
    let answer = deleting.try_wait().unwrap();
    assert_eq!(answer, None, "others cannot have the disk yet");
    storage.allow();
    assert!(deleting.wait().unwrap().success());
}

#[test]
fn a_migration_that_waits_for_a_flush_is_cancelled() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("storage");
    let Some(storage) = Storage::mount(&at) else {
        return;
    };
    let disk = format!("path={},image_type=raw", at.join("disk").display());
    let mut vmm = Vmm::counting(dir.path(), "size=16M", &["--disk", &disk]);
    // Dropped first, so that the VMM can end.
    let storage = storage;
    let mut second = Vmm::start(dir.path(), "second", &[]);
    let (mut receiving, url) = second.receive(&vmm.serial);
    storage.hold();
    let sending = start(&vmm, &["send-migration", &url, "--watch"]);
    storage.flushed.recv().unwrap();
    assert!(vmm.ctl(&["ping"]).status.success());
    assert!(vmm.ctl(&["cancel-migration"]).status.success());
    vmm.until("it is cancelled", |vmm| {
        vmm.migration()["phase"] == "Failed"
    });
    let answer = sending.wait_with_output().unwrap();
    let why = String::from_utf8_lossy(&answer.stderr).into_owned();
    assert!(why.contains("cancelled"), "{why}");
    // The guest goes on, and its disk is in use, although the flush still waits.
    let printed = vmm.printed().len();
    vmm.until("it counts on", |vmm| vmm.printed().len() > printed + 9);
    assert!(vmm.ctl(&["pause"]).status.success());
    assert!(vmm.ctl(&["resume"]).status.success());
    receiving.kill().unwrap();
    receiving.wait().unwrap();
    storage.allow();
    drop(second);
    // It moves when the storage answers.
    let (mut third, _) = vmm.move_to(dir.path(), "third", &[]);
    third.until("it counts on", |vmm| vmm.printed().len() > 9);
    check_counting(&[&vmm, &third]);
}
