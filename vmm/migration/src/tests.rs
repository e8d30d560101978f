//! Both sides over a wire that fails at every step. Memory and disk locks are real; the lock shows
//! which side may run.

use std::{
    fs::File,
    io::{Read, Write},
    net::{Shutdown, TcpStream},
    os::unix::{
        fs::{FileExt, MetadataExt},
        net::UnixStream,
    },
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use base::Cancel;
use devices::{
    accel::{rounds::CopiedPort, saved::image},
    disk::{LockGranularity, Scope, lock},
};

mod applications;
mod figures;
mod postcopy;
mod slow_lanes;
mod strangers;

use super::{
    connection::{Connection, Pages},
    destination::{Destination, Ended, Host, receive},
    files::{FileUse, GivenFile},
    frame::{HEADER, Header, Kind},
    listener::Listener,
    offer::{Copy, HostId, Moment, Offer, Prepared},
    pages::{Departing, Region},
    progress::{Direction, Phase, Progress},
    source::{Outcome, Owner, Paused, Quiesced, Retaken, Source, Wishes},
    *,
};
use vmm_config::{AccelConfig, VmConfig};
use vmm_machine::moving::MovingRegion;
use vmm_memory::{Backing, Mapping, data::Pagemap};

const SIZE: usize = 4 << 20;

fn region(guest: u64) -> Region {
    let mapping = Mapping::new(SIZE as u64, &Backing::default(), 0).unwrap();
    Region {
        guest,
        mapping: Arc::new(mapping),
    }
}

#[allow(clippy::mut_from_ref, reason = "the memory is no Rust object")]
fn bytes(region: &Region) -> &mut [u8] {
    // SAFETY: the mapping has this length and lives in the test that borrows it; nothing else
    // writes it.
    unsafe { std::slice::from_raw_parts_mut(region.mapping.address(), region.mapping.size()) }
}

/// A disk's lock, held through a descriptor of its own.
struct Disk(File);

impl Disk {
    fn open(path: &std::path::Path) -> Self {
        let file = File::options().read(true).write(true).open(path);
        Self(file.unwrap())
    }

    fn lock(&self) -> bool {
        lock::lock(&self.0, 4096, false, LockGranularity::ByteRange).is_ok()
    }

    fn unlock(&self) {
        lock::unlock(&self.0, 4096, LockGranularity::ByteRange).unwrap();
    }
}

struct Here {
    memory: Option<Departing>,
    files: Vec<File>,
    throttled: u8,
    disk: Option<Disk>,
    running: Arc<AtomicBool>,
    fail: Option<&'static str>,
    /// How long workers take to stop.
    slow: Duration,
    /// How long they take to copy.
    copying: Duration,
    /// Size of the first copy in bytes.
    copy_size: usize,
    /// Throttling of the guest during each copy, in percent.
    copied: Vec<u8>,
    /// Bytes of memory that applications have allocated, by the number of copies so far.
    made: Vec<u64>,
    /// Value of `most_made` at each attempt to stop them.
    most_made: Vec<u64>,
    decision: bool,
}

/// A source without memory, files and disk.
fn here() -> Here {
    Here {
        memory: None,
        files: Vec::new(),
        throttled: 0,
        disk: None,
        running: Arc::default(),
        fail: None,
        slow: Duration::ZERO,
        copying: Duration::ZERO,
        copy_size: 0,
        copied: Vec::new(),
        made: Vec::new(),
        most_made: Vec::new(),
        decision: false,
    }
}

impl Owner for Here {
    fn ram(&mut self) -> Vec<MovingRegion> {
        Vec::new()
    }

    fn check_movable(&mut self) -> std::result::Result<(), String> {
        Ok(())
    }

    fn watch(&mut self, _pagemap: Option<Pagemap>) -> Result<Departing> {
        Ok(self.memory.take().unwrap())
    }

    fn files(&mut self) -> std::result::Result<Vec<GivenFile>, String> {
        let given = |(region, file): (usize, &File)| {
            let what = FileUse::Memory { region, offset: 0 };
            let file = file.try_clone().unwrap().into();
            GivenFile { what, file }
        };
        Ok(self.files.iter().enumerate().map(given).collect())
    }

    fn start(&mut self, body: lanes::Body) -> std::result::Result<(), String> {
        thread::spawn(body);
        Ok(())
    }

    fn quiesce(&mut self, most_made: u64) -> std::result::Result<Quiesced, String> {
        thread::sleep(self.slow);
        self.most_made.push(most_made);
        // A copy contains whatever was allocated before it.
        let made = self.made.get(self.copied.len()).copied().unwrap_or(0);
        Ok(match made > most_made {
            true => Quiesced::Made(made),
            false => Quiesced::Still,
        })
    }

    fn copy(&mut self) -> std::result::Result<Option<Copy>, String> {
        thread::sleep(self.copying);
        // Each copy is much smaller than the one before.
        let more = vec![1; self.copy_size >> (2 * self.copied.len())];
        self.copied.push(self.throttled);
        Ok(Some(Copy::new(Vec::new(), applications::copy(&more))))
    }

    fn throttle(&mut self, percent: u8) {
        self.throttled = percent;
    }

    fn pause(&mut self) -> std::result::Result<Paused, String> {
        if self.fail == Some("pause") {
            return Err("the disk is full".to_owned());
        }
        self.running.store(false, Ordering::SeqCst);
        let archive = image().unwrap();
        archive.set_len(1 << 30).unwrap();
        for (at, text) in ARCHIVE {
            archive.write_all_at(text, at).unwrap();
        }
        Ok(Paused {
            state: b"state".to_vec(),
            saved_at: Moment::now(),
            archive: Some(archive),
        })
    }

    fn resume(&mut self) {
        self.running.store(true, Ordering::SeqCst);
    }

    fn release(&mut self) -> std::result::Result<(), String> {
        if let Some(disk) = &self.disk {
            disk.unlock();
        }
        Ok(())
    }

    fn retake(&mut self, among: Scope) -> Retaken {
        match &self.disk {
            Some(disk) if Scope::of(&disk.0) < among => Retaken::Silent,
            None => Retaken::Silent,
            Some(disk) if disk.lock() => Retaken::Held,
            Some(_) => Retaken::Denied,
        }
    }

    fn ask(&mut self) -> bool {
        self.decision
    }

    fn gone(&mut self) {}
}

/// The saved state of applications, with its offsets.
const ARCHIVE: [(u64, &[u8; 3]); 3] = [
    (5, b"one"),
    ((5 << 20) - 1, b"two"),
    ((1 << 30) - 3, b"end"),
];

struct There {
    same_host: bool,
    regions: Vec<Arc<Mapping>>,
    files: Vec<GivenFile>,
    disk: Option<Disk>,
    running: Arc<AtomicBool>,
    fail: Option<&'static str>,
    /// How long workers take to restore applications.
    slow: Duration,
    state: Vec<u8>,
}

/// A destination on the source's host, without a disk.
fn there() -> There {
    There {
        same_host: true,
        regions: Vec::new(),
        files: Vec::new(),
        disk: None,
        running: Arc::default(),
        fail: None,
        slow: Duration::ZERO,
        state: Vec::new(),
    }
}

impl There {
    fn failing(&self, step: &str) -> std::result::Result<(), String> {
        match self.fail {
            Some(fail) if fail == step => Err(format!("{step} fails")),
            _ => Ok(()),
        }
    }
}

impl Host for There {
    fn examine(&mut self, _offer: &Offer, _cancel: &Cancel) -> Vec<String> {
        match self.fail {
            Some("examine") => vec!["no such CPU".to_owned(), "no such disk".to_owned()],
            _ => Vec::new(),
        }
    }

    fn is_here(&self, host: &HostId) -> bool {
        self.same_host && HostId::read().as_ref() == Some(host)
    }

    fn prepare(
        &mut self,
        offer: Offer,
        files: Vec<GivenFile>,
        _: Cancel,
    ) -> std::result::Result<Vec<Region>, String> {
        self.failing("prepare")?;
        if offer.local {
            self.files = files;
            return Ok(Vec::new());
        }
        assert_eq!(offer.regions.len(), 2);
        let regions = [region(0), region(1 << 32)];
        self.regions = regions.iter().map(|r| Arc::clone(&r.mapping)).collect();
        Ok(regions.into())
    }

    fn copy(
        &mut self,
        _: Vec<CopiedPort>,
        archive: File,
        _: Cancel,
    ) -> std::result::Result<(), String> {
        assert_eq!(archive.metadata().unwrap().len(), (5 << 20) + 4);
        self.failing("copy")
    }

    fn restore(
        &mut self,
        state: Vec<u8>,
        saved_at: Option<Moment>,
        archive: Option<File>,
        _: Cancel,
    ) -> std::result::Result<(), String> {
        self.failing("restore")?;
        assert!(saved_at.is_some());
        thread::sleep(self.slow);
        let archive = archive.unwrap();
        let metadata = archive.metadata().unwrap();
        assert_eq!(metadata.len(), 1 << 30);
        assert!(metadata.blocks() < 4096, "holes stay holes");
        for (at, text) in ARCHIVE {
            let mut read = [0; 3];
            archive.read_exact_at(&mut read, at).unwrap();
            assert_eq!(&read, text);
        }
        self.state = state;
        Ok(())
    }

    fn start(&mut self, body: lanes::Body) -> std::result::Result<(), String> {
        thread::spawn(body);
        Ok(())
    }

    fn take_locks(&mut self) -> std::result::Result<(), String> {
        self.failing("take_locks")?;
        match &self.disk {
            Some(disk) if !disk.lock() => Err("locked".to_owned()),
            _ => Ok(()),
        }
    }

    fn run(&mut self) -> std::result::Result<(), String> {
        // The machine is dropped, and its locks with it.
        self.failing("run").inspect_err(|_| self.disk = None)?;
        self.running.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn has_moved(&mut self, fixed: Duration) {
        assert!(fixed < Duration::from_secs(60));
    }
}

/// The fault that the wire injects at the first frame of a kind.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Fault {
    None,
    /// No wire in between.
    Direct,
    /// Nothing passes any more in either direction.
    Cut,
    /// Nothing passes any more, but the connection stays open.
    Stall,
    /// Another frame comes instead, byte by byte.
    Dribble,
    /// A bit of the header is flipped.
    DamagedHeader,
    /// A bit of the contents is flipped.
    DamagedContents,
}

/// Forwards frames.
fn pass(mut from: UnixStream, mut to: UnixStream, fault: Fault, at: Kind, silent: &AtomicBool) {
    let mut done = || -> std::io::Result<()> {
        let mut seen = false;
        loop {
            let mut head = [0; HEADER];
            from.read_exact(&mut head)?;
            let header = Header::decode(&head).unwrap();
            let mut contents = vec![0; header.length];
            from.read_exact(&mut contents)?;
            if header.kind == at && !seen {
                seen = true;
                match fault {
                    Fault::None | Fault::Direct => {}
                    Fault::Cut => return Ok(()),
                    Fault::Stall => silent.store(true, Ordering::SeqCst),
                    Fault::Dribble => {
                        let reasons = vec![b' '; 1 << 16];
                        let failed = Header::of(Kind::Failed, 0, &reasons, false).encode();
                        for byte in failed.into_iter().chain(reasons) {
                            to.write_all(&[byte])?;
                            thread::sleep(Duration::from_millis(50));
                        }
                    }
                    Fault::DamagedHeader => head[9] ^= 4,
                    Fault::DamagedContents => match contents.last_mut() {
                        Some(last) => *last ^= 1,
                        None => head[16] ^= 1,
                    },
                }
            }
            if !silent.load(Ordering::SeqCst) {
                to.write_all(&head)?;
                to.write_all(&contents)?;
            }
        }
    };
    let _ = done();
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

/// Distinguishable files.
fn shared_files() -> Vec<File> {
    let file = |byte| {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[byte], 0).unwrap();
        file
    };
    [11, 22].map(file).into()
}

struct Setup {
    fault: Fault,
    at: Kind,
    with_disk: bool,
    /// If false, each side has a disk of its own, as far as locks are concerned.
    same_host: bool,
    source_fails: Option<&'static str>,
    destination_fails: Option<&'static str>,
    /// How long workers of either side take; nothing else may be silent for so long.
    slow: Duration,
    /// The client's decision, if it is asked: true means that the VM runs at the destination.
    decision: bool,
    change: fn(&mut Offer),
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            fault: Fault::None,
            at: Kind::Offer,
            with_disk: true,
            same_host: true,
            source_fails: None,
            destination_fails: None,
            slow: Duration::ZERO,
            decision: false,
            change: |_| {},
        }
    }
}

struct Case {
    outcome: Outcome,
    /// Purpose and first byte of each file that arrived.
    files: Vec<(FileUse, u8)>,
    received: std::result::Result<(), Ended>,
    source_runs: bool,
    destination_runs: bool,
    phase: Phase,
    equal: bool,
}

fn offer() -> Offer {
    Offer {
        protocol: PROTOCOL,
        state_version: vmm_snapshot::state_file::VERSION,
        gantry: "test".to_owned(),
        config: Box::new(VmConfig {
            accels: Some(vec![AccelConfig::default()]),
            ..VmConfig::default()
        }),
        regions: [0, 1 << 32]
            .map(|guest| offer::OfferedRegion {
                guest,
                len: SIZE as u64,
                hotplugged: false,
            })
            .into(),
        verify: true,
        dry_run: false,
        paused: false,
        cpu: None,
        local: false,
        files: 0,
        lanes: 0,
        host: HostId::read(),
        copies: true,
        postcopy: false,
        gpu_driver: None,
        tap_descriptors: Vec::new(),
    }
}

fn wishes() -> Wishes {
    Wishes {
        downtime: Duration::from_millis(300),
        timeout: Duration::from_secs(60),
        ignore_timeout: false,
        // Long enough not to take a peer for dead on a busy machine.
        stall: Duration::from_secs(60),
        take_up: Duration::ZERO,
        bandwidth: None,
        max_throttle: 99,
        fixed: source::FIXED,
        to: (String::new(), None),
    }
}

fn are_equal(some: &[Arc<Mapping>], others: &[Arc<Mapping>]) -> bool {
    let whole = |mapping: &Arc<Mapping>| {
        let region = Region {
            guest: 0,
            mapping: Arc::clone(mapping),
        };
        bytes(&region).to_vec()
    };
    some.iter().map(whole).eq(others.iter().map(whole))
}

fn migrate(setup: &Setup) -> Case {
    let (source_end, source_wire) = UnixStream::pair().unwrap();
    let (destination_end, destination_wire) = UnixStream::pair().unwrap();
    let silent = AtomicBool::new(false);
    let files = [(); 2].map(|()| tempfile::NamedTempFile::new().unwrap());
    let disk = |host: usize| setup.with_disk.then(|| Disk::open(files[host].path()));
    let held = disk(0);
    assert!(held.as_ref().is_none_or(Disk::lock));

    let regions = [region(0), region(1 << 32)];
    for (number, region) in regions.iter().enumerate() {
        for page in [0, 3, 511, 1023] {
            bytes(region)[page * 4096 + number] = 1 + (page % 200) as u8;
        }
    }
    let originals: Vec<_> = regions.iter().map(|r| Arc::clone(&r.mapping)).collect();
    let mut memory = Departing::unwatched(regions.into());
    // Sent twice: in the first round, and because it was written meanwhile.
    memory.mark(1, 511);
    let mut offer = offer();
    (setup.change)(&mut offer);
    let source_runs = Arc::new(AtomicBool::new(true));
    let destination_runs = Arc::new(AtomicBool::new(false));
    let mut here = Here {
        memory: Some(memory),
        files: shared_files(),
        disk: held,
        running: Arc::clone(&source_runs),
        fail: setup.source_fails,
        slow: setup.slow,
        decision: setup.decision,
        ..here()
    };
    let mut there = There {
        same_host: setup.same_host,
        disk: disk(usize::from(!setup.same_host)),
        running: Arc::clone(&destination_runs),
        fail: setup.destination_fails,
        slow: setup.slow,
        ..there()
    };
    let progress = Progress::new(Direction::Outgoing, "test");
    let (outcome, received) = thread::scope(|scope| {
        let clone = |stream: &UnixStream| stream.try_clone().unwrap();
        let forward = (clone(&source_wire), clone(&destination_wire));
        let back = (destination_wire, source_wire);
        let silent = &silent;
        let (fault, at) = (setup.fault, setup.at);
        let (mut source_end, destination_end) = (source_end, destination_end);
        if fault == Fault::Direct {
            source_end = back.0;
            drop(back.1);
        } else {
            scope.spawn(move || pass(forward.0, forward.1, fault, at, silent));
            scope.spawn(move || pass(back.0, back.1, fault, at, silent));
        }
        let there = &mut there;
        let received = scope.spawn(move || {
            let progress = Progress::new(Direction::Incoming, "test");
            let mut connection = Connection::of_unix(destination_end, progress.clone()).unwrap();
            if !setup.slow.is_zero() {
                connection.stall = setup.slow / 2;
            }
            Destination::new(connection, there, progress).run()
        });
        let connection = Connection::of_unix(source_end, progress.clone()).unwrap();
        let shown = progress.clone();
        let mut wishes = wishes();
        if !matches!(fault, Fault::None | Fault::Direct) {
            wishes.stall = Duration::from_millis(400);
        }
        if !setup.slow.is_zero() {
            wishes.stall = setup.slow / 2;
            wishes.take_up = Duration::from_secs(60);
        }
        let outcome = Source::new(connection, &mut here, offer, wishes, shown, None).run();
        (outcome, received.join().unwrap())
    });
    let equal = are_equal(&originals, &there.regions);
    assert!(there.state.is_empty() || there.state == b"state");
    let first_byte = |GivenFile { what, file }: GivenFile| {
        let mut byte = [0];
        File::from(file).read_exact_at(&mut byte, 0).unwrap();
        (what, byte[0])
    };
    Case {
        outcome,
        files: there.files.into_iter().map(first_byte).collect(),
        received,
        source_runs: source_runs.load(Ordering::SeqCst),
        destination_runs: destination_runs.load(Ordering::SeqCst),
        phase: progress.phase(),
        equal,
    }
}

#[test]
fn a_machine_moves_with_all_of_its_memory() {
    let moved = migrate(&Setup::default());
    assert!(
        matches!(moved.outcome, Outcome::Moved),
        "{:?}",
        moved.outcome
    );
    moved.received.unwrap();
    assert!(moved.destination_runs && !moved.source_runs && moved.equal);
}

#[test]
fn on_one_host_memory_is_handed_over_and_nothing_of_it_sent() {
    let moved = local(None);
    assert!(matches!(moved.outcome, Outcome::Moved));
    assert!(moved.destination_runs && !moved.source_runs);
    let memory = |region| FileUse::Memory { region, offset: 0 };
    assert_eq!(moved.files, [(memory(0), 11), (memory(1), 22)]);
    for step in ["examine", "prepare", "restore", "take_locks", "run"] {
        let stayed = local(Some(step));
        assert!(matches!(stayed.outcome, Outcome::Stayed(_)), "{step}");
        assert!(stayed.source_runs && !stayed.destination_runs, "{step}");
    }
}

/// A migration without a wire in between, because a wire would not pass files.
fn local(destination_fails: Option<&'static str>) -> Case {
    migrate(&Setup {
        fault: Fault::Direct,
        destination_fails,
        change: |offer| offer.local = true,
        ..Setup::default()
    })
}

#[test]
fn whatever_breaks_exactly_one_machine_runs() {
    let kinds = [
        Kind::Offer,
        Kind::Prepared,
        Kind::Pages,
        Kind::Barrier,
        Kind::Archive,
        Kind::Copy,
        Kind::State,
        Kind::Ready,
        Kind::Go,
        Kind::Running,
    ];
    let faults = [
        Fault::Cut,
        Fault::Stall,
        Fault::DamagedHeader,
        Fault::DamagedContents,
    ];
    for at in kinds {
        for fault in faults {
            // Pages have no checksum on a connection within the host, so the hash detects the
            // damage.
            let case = migrate(&Setup {
                fault,
                at,
                ..Setup::default()
            });
            let what = format!(
                "{fault:?} at {at:?}: {:?} {:?}",
                case.outcome, case.received
            );
            assert_ne!(case.source_runs, case.destination_runs, "{what}");
            assert_eq!(case.destination_runs, case.received.is_ok(), "{what}");
            let moved = matches!(case.outcome, Outcome::Moved);
            assert_eq!(case.destination_runs, moved, "{what}");
            // Only the reply to GO can be lost without harm.
            assert_eq!(moved, at == Kind::Running, "{what}");
        }
    }
}

#[test]
fn an_answer_to_go_that_never_comes_to_its_end_is_not_waited_for() {
    let case = migrate(&Setup {
        fault: Fault::Dribble,
        at: Kind::Running,
        ..Setup::default()
    });
    // The locks say where the machine runs.
    assert!(matches!(case.outcome, Outcome::Moved), "{:?}", case.outcome);
    assert!(case.destination_runs && !case.source_runs);
}

#[test]
fn a_side_that_cannot_go_on_leaves_the_machine_at_the_source() {
    let sides = [
        (None, Some("examine")),
        (None, Some("prepare")),
        (None, Some("copy")),
        (None, Some("restore")),
        (None, Some("take_locks")),
        (None, Some("run")),
        (Some("pause"), None),
    ];
    for (source_fails, destination_fails) in sides {
        let case = migrate(&Setup {
            source_fails,
            destination_fails,
            ..Setup::default()
        });
        let what = format!("{source_fails:?} {destination_fails:?}: {:?}", case.outcome);
        assert!(case.source_runs && !case.destination_runs, "{what}");
        assert!(matches!(case.outcome, Outcome::Stayed(_)), "{what}");
    }
}

#[test]
fn all_reasons_are_told_at_once() {
    let case = migrate(&Setup {
        destination_fails: Some("examine"),
        change: |offer| {
            offer.protocol = 99;
            offer.state_version = 1;
        },
        ..Setup::default()
    });
    let Outcome::Stayed(error) = case.outcome else {
        panic!("it moved");
    };
    let text = error.to_string();
    for reason in ["version 99", "version 1", "no such CPU", "no such disk"] {
        assert!(text.contains(reason), "{text}");
    }
}

#[test]
fn a_question_moves_nothing() {
    let case = migrate(&Setup {
        change: |offer| offer.dry_run = true,
        ..Setup::default()
    });
    assert!(matches!(case.outcome, Outcome::Acceptable));
    assert!(matches!(case.received, Err(Ended::Asked)));
    assert!(case.source_runs);
}

#[test]
fn without_a_lock_a_client_decides_who_runs() {
    for decision in [false, true] {
        let case = migrate(&Setup {
            fault: Fault::Cut,
            at: Kind::Running,
            with_disk: false,
            decision,
            ..Setup::default()
        });
        assert_eq!(case.phase, Phase::Undecided);
        assert_eq!(case.source_runs, !decision);
        assert_eq!(matches!(case.outcome, Outcome::Moved), decision);
    }
}

#[test]
fn a_lock_that_the_other_host_does_not_hear_of_lets_neither_run_beside_the_other() {
    for at in [Kind::Go, Kind::Running] {
        for decision in [false, true] {
            let case = migrate(&Setup {
                fault: Fault::Cut,
                at,
                same_host: false,
                decision,
                ..Setup::default()
            });
            let what = format!("{decision} at {at:?}: {:?}", case.outcome);
            assert_eq!(case.phase, Phase::Undecided, "{what}");
            assert_eq!(case.source_runs, !decision, "{what}");
            assert_eq!(case.destination_runs, at == Kind::Running, "{what}");
        }
    }
    // What the destination itself reports needs no lock as evidence.
    let case = migrate(&Setup {
        same_host: false,
        destination_fails: Some("take_locks"),
        ..Setup::default()
    });
    assert!(
        case.source_runs && !case.destination_runs,
        "{:?}",
        case.outcome
    );
}

#[test]
fn an_older_side_is_taken_for_one_on_another_host() {
    let token = Some([7; lanes::TOKEN]);
    for (token, lanes) in [(None, 0), (token, 2)] {
        for same_host in [false, true] {
            let prepared = Prepared {
                token,
                same_host,
                copies: same_host,
            };
            let contents = prepared.encode();
            assert_eq!(Prepared::decode(&contents, lanes).unwrap(), prepared);
        }
        // Only the token, without flags.
        let older: Vec<u8> = token.iter().flatten().copied().collect();
        let decoded = Prepared::decode(&older, lanes).unwrap();
        assert!(!decoded.same_host && decoded.token == token);
    }
    assert!(Prepared::decode(&[7; lanes::TOKEN - 1], 2).is_err());
    // An older source does not name its host and gets no reply that it does not know.
    let moved = migrate(&Setup {
        change: |offer| offer.host = None,
        ..Setup::default()
    });
    assert!(matches!(moved.outcome, Outcome::Moved));
}

#[test]
fn a_migration_that_is_cancelled_ends_soon() {
    let (end, _other) = UnixStream::pair().unwrap();
    let progress = Progress::new(Direction::Incoming, "test");
    let mut connection = Connection::of_unix(end, progress.clone()).unwrap();
    progress.cancel();
    let received = connection.receive(&[Kind::Offer], &mut Vec::new());
    assert!(matches!(received, Err(Error::Cancelled)));
}

#[test]
fn pages_outside_of_ram_are_refused() {
    let take = |memory: Region, guest, pages, zero| {
        let run = frame::Run { guest, pages, zero };
        let mut list = Vec::new();
        frame::encode_runs(&[run], &mut list);
        let bytes = match zero {
            true => 0,
            false => pages as usize * 4096,
        };
        let (here, there) = UnixStream::pair().unwrap();
        let end = |stream| {
            let progress = Progress::new(Direction::Incoming, "test");
            Connection::of_unix(stream, progress).unwrap()
        };
        let (mut here, mut there) = (end(here), end(there));
        let sent = vec![7; bytes.min(1 << 16)];
        here.send_pages(0, &list, Pages::Copied(&sent)).unwrap();
        let header = there.receive_header(&[Kind::Pages]).unwrap();
        pages::Arriving::new(vec![memory]).receive(header, &mut there)
    };
    let past = (1 << 20) + SIZE as u64 - 4096;
    for zero in [true, false] {
        let high = |guest, pages| take(region(1 << 20), guest, pages, zero);
        assert_eq!(high(past, 1).unwrap(), if zero { 0 } else { 4096 });
        for (guest, pages) in [(0, 1), (past, 2), (u64::MAX - 4095, 1)] {
            assert!(high(guest, pages).is_err(), "{guest:#x}");
        }
        // Their end address would wrap around into RAM.
        assert!(take(region(0), u64::MAX - 4095, 2, zero).is_err());
    }
    assert!(take(region(1 << 20), past, u32::MAX, true).is_err());
}
