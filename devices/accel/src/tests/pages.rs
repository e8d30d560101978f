//! A port for native contexts, and what its worker has shown in BAR 4.

use std::{
    fs::{File, OpenOptions},
    os::fd::{AsFd, BorrowedFd},
    sync::atomic::{AtomicBool, Ordering},
    thread::JoinHandle,
};

use remoting_proto::apis::nvidia::{PAGE, PageAnswer, PageRequest};

use super::*;

const SIZE: u64 = 16 << 20;
const AT: u64 = 0x3000;

pub(super) fn rig_of_native() -> Rig {
    native_rig(None)
}

fn native_rig(saved: Option<serde_json::Value>) -> Rig {
    native_rig_with(saved, Arc::new(Unconfined))
}

fn native_rig_with(saved: Option<serde_json::Value>, spawner: Arc<dyn ThreadSpawner>) -> Rig {
    let folder = tempfile::tempdir().unwrap();
    let pool = UnixListener::bind(folder.path().join("pool")).unwrap();
    let options = Options {
        apis: Apis::one(ApiId::Nvidia),
        slices: 1,
        pages: SIZE,
        ..options(folder.path())
    };
    rig_with(folder, pool, options, saved, spawner)
}

/// Starts the threads that close files only if it may: otherwise they stay open, as files do whose
/// close takes long.
#[derive(Default)]
struct Closers(AtomicBool);

impl ThreadSpawner for Closers {
    fn spawn(
        &self,
        role: ThreadRole,
        name: &str,
        body: Box<dyn FnOnce() + Send>,
    ) -> std::io::Result<JoinHandle<()>> {
        if name.ends_with("_cl") && !self.0.load(Ordering::SeqCst) {
            return Err(std::io::ErrorKind::WouldBlock.into());
        }
        Unconfined.spawn(role, name, body)
    }
}

/// A device file with pages that read as zero.
fn device() -> File {
    let open = OpenOptions::new().read(true).write(true).open("/dev/zero");
    open.unwrap()
}

fn place(offset: u64, length: u64) -> PageRequest {
    PageRequest::Place {
        offset,
        length,
        writable: true,
    }
}

fn remove(offset: u64, length: u64) -> PageRequest {
    PageRequest::Remove { offset, length }
}

/// What the port answers: 0, or an error number.
fn ask(worker: &UnixStream, request: PageRequest, files: &[BorrowedFd<'_>]) -> i32 {
    socket::send(worker, &request.to_bytes(), files).unwrap();
    answer(worker).cast_signed()
}

fn answer(mut worker: &UnixStream) -> u32 {
    let mut answer = [0; PageAnswer::SIZE];
    worker.read_exact(&mut answer).unwrap();
    PageAnswer::from_bytes(answer).0
}

impl Rig {
    /// The byte that the guest sees at an offset of BAR 4.
    fn byte(&self, offset: u64) -> *mut u8 {
        let (base, len) = self.space.0.lock().unwrap()[&self.bar(4)];
        assert!(offset < len);
        (base as u64 + offset) as *mut u8
    }

    fn sees(&self, offset: u64) -> u8 {
        // SAFETY: within the BAR's memory, which lives as long as the rig.
        unsafe { self.byte(offset).read_volatile() }
    }

    fn writes(&self, offset: u64, byte: u8) {
        // SAFETY: as above, and no test has it show what cannot be written.
        unsafe { self.byte(offset).write_volatile(byte) };
    }
}

#[test]
fn the_space_for_device_pages_is_a_bar_that_is_not_prefetchable() {
    let rig = rig_of_native();
    assert_eq!(rig.read(registers::API), ApiId::Nvidia.number());
    let low = rig.config(0x20) & 0xf;
    assert_eq!(low, 4, "64 bits, not prefetchable");
    let mapped = rig.space.0.lock().unwrap().clone();
    assert_eq!(mapped[&rig.bar(4)].1, SIZE);
    assert_eq!(mapped.len(), 2);
    // Nothing is shown: it is memory that does no harm.
    for at in [0, SIZE - 1] {
        assert_eq!(rig.sees(at), 0);
        rig.writes(at, 9);
        assert_eq!(rig.sees(at), 9);
    }
    // Other ports have no such space.
    assert_eq!(self::rig().space.0.lock().unwrap().len(), 1);
}

#[test]
fn a_worker_shows_the_guest_pages_of_a_device_and_removes_them() {
    let rig = rig_of_native();
    let worker = rig.open(0);
    let near = [AT - 1, AT, AT + PAGE, AT + 2 * PAGE];
    near.iter().for_each(|at| rig.writes(*at, 7));
    let zero = device();
    assert_eq!(ask(&worker, place(AT, 2 * PAGE), &[zero.as_fd()]), 0);
    assert_eq!(near.map(|at| rig.sees(at)), [7, 0, 0, 7]);
    rig.writes(AT, 8);
    assert_eq!(rig.sees(AT), 8);
    assert_eq!(ask(&worker, remove(AT, 2 * PAGE), &[]), 0);
    assert_eq!(near.map(|at| rig.sees(at)), [7, 0, 0, 7]);
    // The place is free again, also for pages that are only read.
    let read = PageRequest::Place {
        offset: AT,
        length: PAGE,
        writable: false,
    };
    assert_eq!(ask(&worker, read, &[zero.as_fd()]), 0);
    assert_eq!(rig.sees(AT), 0);
}

#[test]
fn requests_may_follow_the_message_that_a_worker_serves_at_once() {
    let rig = rig_of_native();
    rig.command(0, Command::Open);
    let (mut worker, ..) = rig.attached();
    let zero = device();
    worker.write_all(&[READY]).unwrap();
    assert_eq!(ask(&worker, place(0, PAGE), &[zero.as_fd()]), 0);
    rig.becomes(0, State::Open);
    // A request may arrive in pieces.
    let bytes = place(PAGE, PAGE).to_bytes();
    socket::send(&worker, &bytes[..5], &[zero.as_fd()]).unwrap();
    rig.wait_until_heard(&worker);
    worker.write_all(&bytes[5..]).unwrap();
    assert_eq!(answer(&worker), 0);
}

impl Rig {
    /// Waits until the port has received everything that a worker has sent.
    fn wait_until_heard(&self, worker: &UnixStream) {
        let start = Instant::now();
        let unread = || {
            let mut unread: libc::c_int = 0;
            // SAFETY: the kernel writes a number to a local.
            let asked = unsafe { libc::ioctl(worker.as_raw_fd(), libc::TIOCOUTQ, &raw mut unread) };
            assert_eq!(asked, 0);
            unread
        };
        while unread() > 0 {
            assert!(start.elapsed() < Duration::from_secs(20));
            std::thread::yield_now();
        }
    }
}

#[test]
fn what_is_no_device_or_no_free_place_is_refused_and_changes_nothing() {
    let rig = rig_of_native();
    let worker = rig.open(0);
    let zero = device();
    assert_eq!(ask(&worker, place(AT, 2 * PAGE), &[zero.as_fd()]), 0);
    rig.writes(AT, 3);
    rig.writes(0, 4);
    for (offset, length, refused) in [
        (SIZE, PAGE, libc::EINVAL),
        (SIZE - PAGE, 2 * PAGE, libc::EINVAL),
        (0, u64::MAX - PAGE + 1, libc::EINVAL),
        (u64::MAX - 2 * PAGE + 1, PAGE, libc::EINVAL),
        (AT, 2 * PAGE, libc::EEXIST),
        (AT + PAGE, PAGE, libc::EEXIST),
        (AT - PAGE, 2 * PAGE, libc::EEXIST),
        (0, SIZE, libc::EEXIST),
    ] {
        let answer = ask(&worker, place(offset, length), &[zero.as_fd()]);
        assert_eq!(answer, refused, "{offset:#x} {length:#x}");
    }
    for (offset, length) in [(AT, PAGE), (AT + PAGE, PAGE), (0, PAGE), (SIZE, PAGE)] {
        assert_eq!(ask(&worker, remove(offset, length), &[]), libc::EINVAL);
    }
    // A device whose pages cannot be mapped.
    let null = OpenOptions::new().read(true).write(true).open("/dev/null");
    let null = null.unwrap();
    assert_eq!(ask(&worker, place(0, PAGE), &[null.as_fd()]), libc::ENODEV);
    assert_eq!((rig.sees(0), rig.sees(AT)), (4, 3));
    assert_eq!(rig.state(0), State::Open);
}

#[test]
fn a_worker_that_sends_a_file_of_no_device_is_ended() {
    let zero = device();
    let memory = base::memfd::sealed(c"memory", PAGE).unwrap();
    let folder = File::open("/proc").unwrap();
    for other in [memory.as_fd(), folder.as_fd()] {
        // The file beside it is held to the same.
        for files in [&[other][..], &[zero.as_fd(), other][..]] {
            let rig = rig_of_native();
            let mut worker = rig.open(0);
            assert_eq!(ask(&worker, place(AT, PAGE), &[zero.as_fd()]), 0);
            rig.writes(0, 4);
            socket::send(&worker, &place(0, PAGE).to_bytes(), files).unwrap();
            rig.becomes(0, State::Ended);
            assert_eq!(worker.read(&mut [0]).unwrap(), 0);
        }
    }
}

#[test]
fn only_pages_of_nvidias_devices_are_shown() {
    let slices = Arc::new(crate::slices::Slices::new(1).unwrap());
    let pages = Pages::new(SIZE, crate::pages::MAJOR, slices).unwrap();
    let refused = pages.carry_out(place(0, PAGE), &mut vec![device().into()]);
    assert!(matches!(refused, Err(crate::pages::Refused::NoDevice)));
}

#[test]
fn a_worker_has_a_limited_number_of_places() {
    let rig = rig_of_native();
    let worker = rig.open(0);
    let zero = device();
    let mut shown = 0;
    let refused = (0..SIZE / PAGE / 2).find_map(|page| {
        let answer = ask(&worker, place(2 * page * PAGE, PAGE), &[zero.as_fd()]);
        shown += 1;
        (answer != 0).then_some(answer)
    });
    assert_eq!((refused, shown), (Some(libc::ENOSPC), 257));
    assert_eq!(ask(&worker, remove(0, PAGE), &[]), 0);
    assert_eq!(ask(&worker, place(PAGE, PAGE), &[zero.as_fd()]), 0);
    for page in 0..256 {
        rig.writes(2 * page * PAGE, 1);
    }
    drop(worker);
    rig.becomes(0, State::Ended);
    assert!((0..256).all(|page| rig.sees(2 * page * PAGE) == 0));
}

#[test]
fn whoever_sees_that_a_worker_has_ended_sees_nothing_of_its_devices() {
    let rig = rig_of_native();
    for _ in 0..20 {
        let worker = rig.open(0);
        assert_eq!(ask(&worker, place(AT, PAGE), &[device().as_fd()]), 0);
        rig.writes(AT, 5);
        drop(worker);
        rig.becomes(0, State::Ended);
        assert_eq!(rig.sees(AT), 0);
        rig.command(0, Command::Close);
        rig.becomes(0, State::Free);
    }
}

#[test]
fn a_worker_is_told_to_end_when_its_pages_are_gone() {
    let tell: [fn(&Rig); 4] = [
        |rig| rig.command(0, Command::Close),
        |rig| rig.write(registers::RESET, 1),
        |rig| rig.segment.reset(rig.bdf).unwrap(),
        |rig| drop(rig.segment.unplug(rig.bdf).unwrap()),
    ];
    for tell in tell {
        let rig = rig_of_native();
        let mut worker = rig.open(0);
        assert_eq!(ask(&worker, place(AT, PAGE), &[device().as_fd()]), 0);
        let byte = rig.byte(AT);
        rig.writes(AT, 5);
        tell(&rig);
        assert_eq!(worker.read(&mut [0]).unwrap(), 0);
        // SAFETY: the rig has the memory, wherever the guest has it.
        assert_eq!(unsafe { byte.read_volatile() }, 0);
    }
}

#[test]
fn a_worker_that_sends_no_requests_for_pages_is_ended() {
    let zero = device();
    let one = [zero.as_fd()];
    let three = [zero.as_fd(), zero.as_fd(), zero.as_fd()];
    let good = place(PAGE, PAGE).to_bytes();
    for (bytes, files) in [
        ([0xff; PageRequest::SIZE], &one[..]),
        (good, &[][..]),
        (good, &three[..]),
        (remove(AT, PAGE).to_bytes(), &one[..]),
    ] {
        let rig = rig_of_native();
        let mut worker = rig.open(0);
        assert_eq!(ask(&worker, place(AT, PAGE), &one), 0);
        rig.writes(AT, 5);
        socket::send(&worker, &bytes, files).unwrap();
        rig.becomes(0, State::Ended);
        assert_eq!(rig.sees(AT), 0);
        assert_eq!(worker.read(&mut [0]).unwrap(), 0);
    }
}

#[test]
fn a_worker_that_does_not_read_its_answers_is_ended() {
    let rig = rig_of_native();
    let mut worker = rig.open(0);
    // More than the answers that a connection holds.
    for _ in 0..4096 {
        worker.write_all(&remove(0, PAGE).to_bytes()).unwrap();
    }
    rig.becomes(0, State::Ended);
}

/// Number of files of this process that are this one.
fn open_files(file: &File) -> usize {
    use std::os::unix::fs::MetadataExt;
    let id = |found: std::fs::Metadata| (found.dev(), found.ino());
    let ours = id(file.metadata().unwrap());
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    let all = all.filter_map(|entry| std::fs::metadata(entry.ok()?.path()).ok());
    all.filter(|found| id(found.clone()) == ours).count()
}

#[test]
fn a_file_beside_the_one_that_is_shown_is_kept_until_it_is_removed() {
    // Other tests open and close other devices.
    let beside = File::open("/dev/full").unwrap();
    let rig = rig_of_native();
    let worker = rig.open(0);
    let zero = device();
    let becomes = |count: usize| {
        let start = Instant::now();
        while open_files(&beside) != count {
            assert!(start.elapsed() < Duration::from_secs(20));
            std::thread::yield_now();
        }
    };
    let files = [zero.as_fd(), beside.as_fd()];
    assert_eq!(ask(&worker, place(AT, PAGE), &files), 0);
    becomes(2);
    assert_eq!(ask(&worker, remove(AT, PAGE), &[]), 0);
    becomes(1);
    assert_eq!(ask(&worker, place(AT, PAGE), &files), 0);
    becomes(2);
    drop(worker);
    becomes(1);
}

#[test]
fn whoever_removes_pages_closes_none_of_their_files() {
    let slices = Arc::new(crate::slices::Slices::new(1).unwrap());
    let pages = Pages::new(SIZE, MEMORY_DEVICES, slices).unwrap();
    let removals: [fn(&Pages); 3] = [
        |pages| pages.carry_out(remove(AT, PAGE), &mut Vec::new()).unwrap(),
        |pages| pages.clear().unwrap(),
        |pages| assert!(pages.revoke()),
    ];
    for removes in removals {
        let mut files = vec![device().into(), device().into()];
        pages.carry_out(place(AT, PAGE), &mut files).unwrap();
        assert!(files.is_empty() && pages.take_done().is_empty());
        removes(&pages);
        assert_eq!(pages.take_done().len(), 2);
    }
}

#[test]
fn the_port_closes_no_file_that_a_worker_sends_at_its_end() {
    let sent = base::memfd::sealed(c"sent", PAGE).unwrap();
    let rig = native_rig_with(None, Arc::<Closers>::default());
    // A refusal.
    rig.command(0, Command::Open);
    let (worker, ..) = rig.attached();
    socket::send(&worker, &[REFUSED], &[sent.as_fd()]).unwrap();
    rig.becomes(0, State::Ended);
    assert_eq!(open_files(&sent), 2);
    // It was told to end.
    socket::send(&worker, &[0], &[sent.as_fd()]).unwrap();
    drop(worker);
    rig.command(0, Command::Close);
    rig.becomes(0, State::Free);
    assert_eq!(open_files(&sent), 3);
    // The connection may have more of them.
    let mut worker = rig.open(0);
    drop(rig.segment.unplug(rig.bdf).unwrap());
    assert_eq!(worker.read(&mut [0]).unwrap(), 0);
    socket::send(&worker, &[0], &[sent.as_fd()]).unwrap();
}

#[test]
fn a_worker_that_sends_files_faster_than_they_close_is_ended() {
    let closers = Arc::<Closers>::default();
    let rig = native_rig_with(None, Arc::clone(&closers) as Arc<_>);
    let mut worker = rig.open(0);
    let zero = device();
    let request = place(SIZE, PAGE).to_bytes();
    let answered = (0..2000).take_while(|_| {
        let sent = socket::send(&worker, &request, &[zero.as_fd()]);
        let mut answer = [0; PageAnswer::SIZE];
        sent.is_ok() && (&worker).read_exact(&mut answer).is_ok()
    });
    assert_eq!(answered.count(), 513);
    rig.becomes(0, State::Ended);
    assert_eq!(worker.read(&mut [0]).unwrap(), 0);
    drop(worker);
    rig.command(0, Command::Close);
    // The next worker comes when they have been closed.
    closers.0.store(true, Ordering::SeqCst);
    rig.becomes(0, State::Free);
    rig.open(0);
}

#[test]
fn pages_behind_which_is_nothing_any_longer_end_their_worker_alone() {
    let rig = rig_of_native();
    let pages = Arc::clone(rig.function.lock().unwrap().pages().unwrap());
    assert!(!pages.revoke(), "nothing is shown");
    let mut worker = rig.open(0);
    assert_eq!(ask(&worker, place(AT, PAGE), &[device().as_fd()]), 0);
    rig.writes(AT, 5);
    assert!(pages.revoke());
    assert_eq!(rig.sees(AT), 0);
    rig.becomes(0, State::Ended);
    assert_eq!(worker.read(&mut [0]).unwrap(), 0);
    drop(worker);
    rig.command(0, Command::Close);
    rig.becomes(0, State::Free);
    // The next worker has its own.
    let worker = rig.open(0);
    assert_eq!(ask(&worker, place(AT, PAGE), &[device().as_fd()]), 0);
}

#[test]
fn a_port_that_no_program_uses_comes_back_without_pages() {
    let rig = rig_of_native();
    let worker = rig.open(0);
    assert_eq!(ask(&worker, place(AT, PAGE), &[device().as_fd()]), 0);
    rig.writes(AT, 5);
    let detaching = Arc::clone(&rig.function);
    let detached = std::thread::spawn(move || detaching.lock().unwrap().detach());
    // The worker ends when it is told to.
    assert_eq!((&worker).read(&mut [0]).unwrap(), 0);
    drop(worker);
    detached.join().unwrap().unwrap();
    assert_eq!(rig.sees(AT), 0);
    let state = rig.function.lock().unwrap().save().unwrap();
    let later = native_rig(Some(state));
    assert_eq!((later.bar(4), later.sees(AT)), (rig.bar(4), 0));
    let worker = later.open(0);
    assert_eq!(ask(&worker, place(AT, PAGE), &[device().as_fd()]), 0);
}
