//! Guests that make the front work as much as they can.

use std::sync::{atomic::AtomicBool, mpsc};

use super::*;
use crate::{
    aperture::{Aperture as Range, Pieces},
    deadline::Deadline,
    memory::Vram,
    views::Views,
};

impl Guest {
    /// A guest each of whose accesses does the least possible, and leaves the rest.
    fn hurried(socket: &Path) -> Self {
        Self::made(socket, |_| {}, |front| front.set_step(Duration::ZERO))
    }

    /// Fills the directory with tables that overlap: one begins at each page from `first` on, all
    /// of which are zeroes.
    fn overlap(&self, first: u32, count: u32) {
        for index in 1..count {
            let table = Table {
                aperture: Aperture::Vram,
                number: first + index,
            };
            let entry = Pde {
                small: Some(table),
                ..Pde::default()
            };
            let at = u64::from(DIRECTORY) * PAGE + u64::from(index) * 8;
            self.poke64(at, entry.encode());
        }
    }
}

/// Private memory of this process in bytes.
fn private() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:"));
    let kib = line.unwrap().split_whitespace().nth(1).unwrap();
    kib.parse::<u64>().unwrap() << 10
}

/// Whether this process runs one test only. If not, runs the test with this name in another
/// process: the memory and the mappings of this one are those of all tests.
fn is_alone(test: &str) -> bool {
    const ALONE: &str = "GANTRY_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let program = std::env::current_exe().unwrap();
    let mut other = std::process::Command::new(program);
    let name = format!("{}::{test}", module_path!().split_once("::").unwrap().1);
    other.args(["--exact", &name, "--nocapture"]).env(ALONE, "");
    let output = other.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(said.contains("1 passed"), "{said}");
    false
}

#[test]
fn tables_that_overlap_cost_no_more_memory_than_vram() {
    if !is_alone("tables_that_overlap_cost_no_more_memory_than_vram") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest::new(&mediator(folder.path()));
    guest.works(1);
    guest.overlap(0x2000, 8128);
    let before = private();
    guest.flush();
    guest.release(RAM_VA, 2);
    wait("the rest", || guest.counter("tables_refused") > 7000);
    let after = private();
    let mib = after.saturating_sub(before) >> 20;
    assert!(mib < (2 * VRAM) >> 20, "{mib} MiB for 64 MiB of VRAM");
    // They also exceed what the mediator has for this VM, so the channel has ended.
    wait("a fault", || guest.faults() != 0);
    // What is forgotten makes room again.
    guest.front.reset();
    for index in 1..8128 {
        guest.poke64(u64::from(DIRECTORY) * PAGE + index * 8, 0);
    }
    guest.start();
    let refused = guest.counter("tables_refused");
    guest.works(3);
    assert_eq!(guest.counter("tables_refused"), refused);
}

#[test]
fn counters_are_to_be_had_while_an_access_is_in_progress() {
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest::new(&mediator(folder.path()));
    guest.works(1);
    let (done, is_done) = mpsc::channel();
    let front = Arc::clone(&guest.front);
    guest.front.locked(|| {
        std::thread::spawn(move || done.send(front.counters()));
        let counters = is_done.recv_timeout(Duration::from_secs(20)).unwrap();
        assert!(counters.contains(&("doorbells", 1)), "{counters:?}");
    });
}

#[test]
fn a_flush_that_takes_long_is_shown_as_such_and_goes_on_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest::hurried(&mediator(folder.path()));
    guest.front.place(0, Some(BAR0)).unwrap();
    let shown = |at: u32| guest.space.read(BAR0 + u64::from(at)).unwrap();
    for page in [1024, 2048] {
        let table = Target::Vram(VramPage(SMALL));
        guest.map(BAR_SMALL, page, std::iter::once(table));
    }
    guest.begin_to_flush_bar();
    assert!(!guest.is_flushed() && !guest.is_shown());
    assert_eq!(shown(TRANSLATIONS) & TRANSLATED, 0);
    assert_eq!(shown(BAR_FLUSH), BAR_FLUSHING);
    guest.listen();
    wait("the flush", || guest.is_flushed());
    assert!(guest.is_shown());
    assert_ne!(shown(TRANSLATIONS) & TRANSLATED, 0);
    assert_eq!(shown(BAR_FLUSH), 0);
    // Work in progress sees new tables as soon as the flush is done.
    guest.works(1);
    for (word, page) in [(2, 9), (3, 11)] {
        guest.map(
            SMALL,
            RAM_VA / PAGE,
            std::iter::once(Target::Ram(Gfn(page))),
        );
        guest.flush();
        guest.lands(word, page);
    }
    assert_eq!(guest.counter("entries_told"), 2048 + 256 + 2);
    // A mediator that is lost amid the work, and a reset, lose nothing that is needed. The mediator
    // has memory for 36 tables of this VM.
    guest.overlap(0x2000, 16);
    guest.flush();
    guest.release(RAM_VA, 4);
    guest.front.cut();
    wait("the mediator", || guest.counter("reconnections") == 1);
    guest.set(0x00_259c, u32::MAX);
    guest.channel();
    guest.lands(5, 11);
    guest.overlap(0x2100, 16);
    guest.flush();
    guest.release(RAM_VA, 6);
    guest.front.reset();
    guest.start();
    guest.works(7);
    assert_eq!(guest.faults(), 0);
}

#[test]
fn a_step_reads_a_page_of_a_bar_table_at_most() {
    let vram = Vram::new(sealed(VRAM), VRAM).unwrap();
    let space: Arc<dyn AddressSpace> = Arc::new(FakeSpace::default());
    let mut views = Views::new(VRAM, &space, true, false).unwrap();
    let put = |page: u32, index: u64, raw: u64| {
        vram.write(u64::from(page) * PAGE + index * 8, &raw.to_le_bytes());
    };
    let small = Pde {
        small: Some(Table {
            aperture: Aperture::Vram,
            number: BAR_SMALL,
        }),
        ..Pde::default()
    };
    put(BAR_DIRECTORY, 0, small.encode());
    // The first is shown at the very end.
    let last = views.bar(0).pages() as u64 - 1;
    let target = Target::Vram(VramPage(7));
    put(BAR_SMALL, last, Pte::linear(target).encode());
    let root = Space {
        aperture: Aperture::Vram,
        number: BAR_DIRECTORY,
        limit: (1 << 40) - 1,
    };
    views.set_root(0, Some(root), &vram);
    let mut steps = 1;
    while !views.advance(&vram, Deadline::after(Duration::ZERO)) {
        steps += 1;
    }
    assert_eq!(views.at(0, last * PAGE), Some(7));
    assert_eq!(steps, (last + 1) / 512);
}

#[test]
fn several_virtual_gpus_together_leave_the_process_mappings() {
    if !is_alone("several_virtual_gpus_together_leave_the_process_mappings") {
        return;
    }
    static BUDGET: Pieces = Pieces::new();
    let vram = Vram::new(sealed(VRAM), VRAM).unwrap();
    let space: Arc<dyn AddressSpace> = Arc::new(FakeSpace::default());
    let mappings = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().count()
    };
    // Every other page, so that no two of them are one mapping.
    let wanted: Vec<_> = (0..32_768_u32)
        .map(|page| (page % 2 == 0).then_some(page / 2))
        .collect();
    let show = || {
        let made = Range::new(128 << 20, Arc::clone(&space), true, &BUDGET);
        let mut aperture = made.unwrap();
        let shown = aperture.show(0, &wanted, &vram, |_| false, || false);
        assert_eq!(shown.unwrap(), wanted.len());
        aperture
    };
    let before = mappings();
    let first = show();
    assert_eq!(first.at(0), Some(0));
    let second = show();
    let count = mappings() - before;
    assert!(count < 40_000, "{count}");
    assert_eq!(second.at(0), None);
    drop((first, second));
    assert_eq!(show().at(0), Some(0));
}

/// Run it with `--ignored --nocapture`, in a release build.
#[test]
#[ignore = "it measures"]
fn cost_of_a_register_write_of_a_guest_that_floods() {
    let folder = tempfile::tempdir().unwrap();
    // Each flush compares the tables, though the channel ends for want of the mediator's memory.
    let guest = Guest::with(&mediator(folder.path()), |options| options.lazy = false);
    guest.works(1);
    // The GPU may write all of VRAM, so all tables must be compared each time.
    let all = (0..(VRAM / PAGE) as u32).map(|page| Target::Vram(VramPage(page)));
    guest.map(SMALL, 0x1000, all.take(0x3000));
    guest.overlap(0x2000, 8128);
    let before = private();
    let stop = AtomicBool::new(false);
    let (writes, counters) = std::thread::scope(|scope| {
        let floods = [0, 1].map(|_| {
            let vcpu = Bar0(Arc::clone(&guest.front));
            let stop = &stop;
            scope.spawn(move || {
                let mut worst = Duration::ZERO;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let start = Instant::now();
                    vcpu.write(0x10_0cbc, &(1_u32 << 31 | 3).to_le_bytes());
                    worst = worst.max(start.elapsed());
                }
                worst
            })
        });
        let mut counters = Duration::ZERO;
        for word in 2..12 {
            let start = Instant::now();
            guest.front.counters();
            counters = counters.max(start.elapsed());
            guest.release(RAM_VA, word);
            std::thread::sleep(Duration::from_millis(200));
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let writes = floods.map(|flood| flood.join().unwrap());
        (writes.into_iter().max().unwrap_or_default(), counters)
    });
    let mib = private().saturating_sub(before) >> 20;
    println!("longest write {writes:?}, longest counters {counters:?}, {mib} MiB of memory");
}
