//! Address spaces on fake tables, which enforce the kernel's rules.

use std::{
    ops::Range,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use device_model::memory::{GuestRam, HostMemory};
use proptest::prelude::*;
use virtio::{
    discard::Discards,
    iommu::{AddError, Endpoints},
    plugged::Follower,
};
use vm_memory::GuestMemoryAtomic;

use super::*;

/// Mappings by I/O address, as (length, address in this process, access).
type Table = BTreeMap<u64, (u64, usize, Access)>;

#[derive(Clone, Default)]
struct Kernel {
    table: Arc<Mutex<Table>>,
    /// Maximum number of mappings; 0: no limit.
    most: usize,
    /// If set, everything can be unmapped with one call; counts these calls.
    clears: Option<Arc<AtomicUsize>>,
    /// Number of calls that unmap one run.
    unmappings: Arc<AtomicUsize>,
}

/// Translates less than 64 bits, and no interrupt addresses.
const REACH: [std::ops::RangeInclusive<u64>; 2] = [0..=0xfedf_ffff, 0xfef0_0000..=(1 << 48) - 1];

impl Tables for Kernel {
    fn open_device(&self, _: &HostDevice) -> Result<VfioDevice, Error> {
        panic!("there are no devices")
    }

    fn reach(&self) -> io::Result<Reach> {
        Ok(REACH.into_iter().collect())
    }

    unsafe fn map(&self, at: u64, len: u64, host: *mut u8, access: Access) -> io::Result<()> {
        let mut table = self.table.lock().unwrap();
        if self.most > 0 && table.len() == self.most {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let below = table.range(..at + len).next_back();
        if below.is_some_and(|(start, (len, ..))| start + len > at) {
            return Err(io::Error::from_raw_os_error(libc::EEXIST));
        }
        assert!(len > 0 && (access.read || access.write));
        table.insert(at, (len, host as usize, access));
        Ok(())
    }

    fn clear(&self) -> io::Result<()> {
        let Some(clears) = &self.clears else {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        };
        clears.fetch_add(1, Ordering::SeqCst);
        self.table.lock().unwrap().clear();
        Ok(())
    }

    fn unmap(&self, at: u64, len: u64) -> io::Result<()> {
        self.unmappings.fetch_add(1, Ordering::SeqCst);
        let mut table = self.table.lock().unwrap();
        let inside: Vec<_> = table
            .range(at..at + len)
            .map(|(at, (len, ..))| (*at, *len))
            .collect();
        let unmapped: u64 = inside.iter().map(|(_, len)| len).sum();
        // No gaps, and no mapping that begins or ends elsewhere.
        assert_eq!(unmapped, len, "{inside:x?} at {at:#x}");
        table.retain(|start, _| !(at..at + len).contains(start));
        Ok(())
    }
}

const PAGE: u64 = 4096;
const BLOCK: u64 = 16 * PAGE;
const BLOCKS: Range<u64> = 4 * BLOCK..8 * BLOCK;
const BAR: u64 = 0x8000_0000;

struct Rig {
    space: Arc<Space>,
    table: Arc<Mutex<Table>>,
    reachable: Arc<Reachable>,
    /// Keeps the follower alive: the blocks refer to it weakly.
    _follower: Arc<dyn Follower>,
}

impl Rig {
    fn new(most: usize) -> Self {
        Self::with(Kernel {
            most,
            ..Kernel::default()
        })
    }

    fn with(kernel: Kernel) -> Self {
        // Two adjacent regions, and one of blocks.
        let regions = [
            (0, 2 * BLOCK),
            (2 * BLOCK, 2 * BLOCK),
            (BLOCKS.start, 4 * BLOCK),
        ];
        let regions = regions.map(|(at, len)| (GuestAddress(at), len as usize));
        let ram = GuestMemoryAtomic::new(GuestRam::from_ranges(&regions).unwrap());
        let discards = Arc::new(Discards::default());
        discards
            .blocks()
            .manage(BLOCKS.start, BLOCKS.end - BLOCKS.start);
        let reachable = Arc::new(Reachable::new(ram, discards));
        let table = Arc::clone(&kernel.table);
        let space = Space::new(
            Box::new(kernel),
            "a test",
            Arc::clone(&reachable),
            Arc::new(|| ()),
        );
        space.lock().reach = REACH.into_iter().collect();
        let space = Arc::new(space);
        let follower: Arc<dyn Follower> = Arc::new(Following(Arc::clone(&space)));
        reachable
            .discards()
            .blocks()
            .follow(Arc::downgrade(&follower));
        Self {
            space,
            table,
            reachable,
            _follower: follower,
        }
    }

    fn offer_peer(&self) {
        let memory = HostMemory {
            address: std::ptr::without_provenance_mut(BAR as usize),
            len: BLOCK,
            read_only: false,
        };
        self.reachable.peers().insert(BAR, memory);
    }

    fn withdraw_peer(&self) {
        self.reachable.peers().remove(&BAR);
        self.space.withdraw(BAR, BLOCK).unwrap();
    }

    fn map(&self, iova: u64, guest: u64, len: u64) -> Result<(), MapError> {
        self.space.map(iova, guest, len, BOTH)
    }

    /// The mapped pages, with the guest-physical address of each.
    fn pages(&self) -> BTreeMap<u64, u64> {
        let table = self.table.lock().unwrap();
        let ram = self.reachable.ram();
        let guest = |host: usize| {
            if host as u64 & !(BLOCK - 1) == BAR {
                return host as u64;
            }
            let host_of = |at| {
                let address =
                    vm_memory::GuestMemoryBackend::get_host_address(&*ram, GuestAddress(at));
                address.map(|host| host as usize)
            };
            let mut pages = (0..BLOCKS.end).step_by(PAGE as usize);
            pages
                .find(|at| host_of(*at).is_ok_and(|at| at == host))
                .unwrap()
        };
        let mut pages = BTreeMap::new();
        for (at, (len, host, _)) in &*table {
            for offset in (0..*len).step_by(PAGE as usize) {
                pages.insert(at + offset, guest(*host + offset as usize));
            }
        }
        pages
    }

    fn mappings(&self) -> usize {
        self.table.lock().unwrap().len()
    }
}

struct Following(Arc<Space>);

impl Follower for Following {
    fn plugged(&self, address: u64, len: u64) -> io::Result<()> {
        self.0.plugged(address, len).map_err(io::Error::other)
    }

    fn unplugged(&self, address: u64, len: u64) -> io::Result<()> {
        self.0.withdraw(address, len)
    }
}

#[test]
fn a_guest_maps_its_memory_so_often_and_no_more() {
    let rig = Rig::new(0);
    let (all, half) = (8 * BLOCK * MAX_TIMES, 2 * BLOCK);
    for at in (0..all).step_by(half as usize) {
        rig.map(at, 0, half).unwrap();
    }
    let error = rig.map(all, 0, PAGE).unwrap_err();
    assert!(error.to_string().contains("16 times its memory"), "{error}");
    // Unmapped memory may be mapped again.
    rig.space.unmap(0, half).unwrap();
    rig.map(all, 0, half).unwrap();
    assert!(matches!(rig.map(0, 0, PAGE), Err(MapError::NoMemory(_))));
}

#[test]
fn other_devices_memory_is_mapped_in_so_many_pieces_and_ram_in_more() {
    let rig = Rig::new(0);
    rig.offer_peer();
    let at = |number: usize| number as u64 * 2 * PAGE;
    for number in 0..MAX_PEER_PIECES {
        rig.map(at(number), BAR, PAGE).unwrap();
    }
    let error = rig.map(at(MAX_PEER_PIECES), BAR, PAGE).unwrap_err();
    assert!(error.to_string().contains("1024 pieces"), "{error}");
    rig.map(at(MAX_PEER_PIECES), 0, PAGE).unwrap();
    // Removing one makes room for one, and removing all for all, in any way.
    rig.space.unmap(at(0), PAGE).unwrap();
    rig.map(at(0), BAR, PAGE).unwrap();
    assert!(rig.map(1 << 40, BAR, PAGE).is_err());
    rig.withdraw_peer();
    rig.offer_peer();
    rig.map(1 << 40, BAR, PAGE).unwrap();
    Endpoint::clear(&*rig.space).unwrap();
    for number in 0..MAX_PEER_PIECES {
        rig.map(at(number), BAR, PAGE).unwrap();
    }
}

#[test]
fn a_mapping_may_span_regions_and_is_taken_back_as_a_whole() {
    let rig = Rig::new(0);
    rig.map(0x10_0000, BLOCK, 2 * BLOCK).unwrap();
    rig.map(0x10_0000 + 2 * BLOCK, 0, PAGE).unwrap();
    assert_eq!(rig.mappings(), 3);
    let pages = rig.pages();
    assert_eq!(pages[&0x10_0000], BLOCK);
    assert_eq!(pages[&(0x10_0000 + BLOCK)], 2 * BLOCK);
    assert_eq!(pages[&(0x10_0000 + 2 * BLOCK)], 0);
    rig.space.unmap(0x10_0000, 2 * BLOCK + PAGE).unwrap();
    assert_eq!(rig.mappings(), 0);
}

#[test]
fn a_mapping_has_the_access_that_the_guest_gave_it() {
    let rig = Rig::new(0);
    let accesses = [(true, false), (false, true), (true, true)];
    for (at, (read, write)) in (0..).zip(accesses) {
        let access = Access { read, write };
        rig.space.map(at * PAGE, at * PAGE, PAGE, access).unwrap();
        assert_eq!(rig.table.lock().unwrap()[&(at * PAGE)].2, access);
    }
}

#[test]
fn a_mapping_that_fails_leaves_nothing() {
    let rig = Rig::new(2);
    // The third piece is one too many.
    rig.reachable
        .discards()
        .blocks()
        .plug(BLOCKS, BLOCK)
        .unwrap();
    let refused = rig.map(0, 3 * BLOCK, 3 * BLOCK);
    assert!(matches!(&refused, Err(MapError::NoMemory(text)) if text.contains("dma_entry_limit")));
    assert_eq!(rig.mappings(), 0);
    rig.map(0, 3 * BLOCK, 2 * BLOCK).unwrap();
    for (iova, guest, len) in [
        (0xfedf_f000, 0, 2 * PAGE),
        (0xfee0_0000, 0, PAGE),
        (1 << 48, 0, PAGE),
    ] {
        let refused = rig.map(iova, guest, len);
        assert!(
            matches!(refused, Err(MapError::OutOfRange { .. })),
            "{refused:?}"
        );
    }
    let refused = rig.map(0x10_0000, BLOCKS.end - PAGE, 2 * PAGE);
    assert!(matches!(refused, Err(MapError::NotMemory { guest }) if guest == BLOCKS.end));
    assert_eq!(rig.mappings(), 2);
}

#[test]
fn what_the_guest_loses_is_lost_wherever_it_is_mapped() {
    let rig = Rig::new(0);
    let blocks = rig.reachable.discards().blocks();
    blocks.plug(BLOCKS, BLOCK).unwrap();
    rig.offer_peer();
    rig.map(0x10_0000, BLOCKS.start, 2 * BLOCK).unwrap();
    rig.map(0x20_0000, BLOCKS.start + PAGE, PAGE).unwrap();
    rig.map(0x30_0000, BAR + PAGE, 2 * PAGE).unwrap();
    blocks
        .unplug(BLOCKS.start..BLOCKS.start + BLOCK, BLOCK)
        .unwrap();
    assert_eq!(rig.mappings(), 2, "the other block, and the peer");
    assert!(!rig.pages().contains_key(&0x20_0000));
    rig.withdraw_peer();
    assert_eq!(rig.mappings(), 1);
    assert!(matches!(
        rig.map(0x30_0000, BAR, PAGE),
        Err(MapError::NotMemory { .. })
    ));
    // It is valid for the guest that a part has gone already.
    rig.space.unmap(0x10_0000, 2 * BLOCK).unwrap();
    rig.space.unmap(0x30_0000, 2 * PAGE).unwrap();
    assert_eq!(rig.mappings(), 0);
}

#[test]
fn identity_follows_the_guests_memory_and_ends_with_nothing() {
    let rig = Rig::new(0);
    rig.offer_peer();
    let own = |rig: &Rig| rig.pages().iter().all(|(at, guest)| at == guest);
    rig.space.identity(true).unwrap();
    assert!(own(&rig));
    assert_eq!(rig.mappings(), 2);
    let blocks = rig.reachable.discards().blocks();
    blocks.plug(BLOCKS, BLOCK).unwrap();
    rig.space.map_peers();
    assert!(own(&rig));
    assert_eq!(rig.mappings(), 2 + 4 + 1);
    blocks
        .unplug(BLOCKS.start..BLOCKS.start + BLOCK, BLOCK)
        .unwrap();
    rig.withdraw_peer();
    assert_eq!(rig.mappings(), 2 + 3);
    rig.space.identity(false).unwrap();
    assert_eq!(rig.mappings(), 0);
    // From now on the guest decides.
    blocks
        .plug(BLOCKS.start..BLOCKS.start + BLOCK, BLOCK)
        .unwrap();
    rig.offer_peer();
    rig.space.map_peers();
    assert_eq!(rig.mappings(), 0);
}

#[test]
fn identity_that_cannot_be_leaves_nothing() {
    let rig = Rig::new(1);
    let refused = rig.space.identity(true);
    assert!(matches!(refused, Err(MapError::NoMemory(_))), "{refused:?}");
    assert_eq!(rig.mappings(), 0);
    let reach = std::iter::once(0..=BLOCK - 1);
    rig.space.lock().reach = reach.collect();
    let refused = rig.space.identity(true);
    assert!(
        matches!(refused, Err(MapError::OutOfRange { .. })),
        "{refused:?}"
    );
}

#[test]
fn everything_goes_at_once_if_the_kernel_can_and_run_by_run_otherwise() {
    for at_once in [true, false] {
        let kernel = Kernel {
            clears: at_once.then(Arc::default),
            ..Kernel::default()
        };
        let calls = (kernel.clears.clone(), Arc::clone(&kernel.unmappings));
        let calls = || {
            let clears = calls.0.as_ref();
            let clears = clears.map_or(0, |clears| clears.load(Ordering::SeqCst));
            (clears, calls.1.load(Ordering::SeqCst))
        };
        let rig = Rig::with(kernel);
        for at in 0..100 {
            rig.map(at * 2 * PAGE, 0, PAGE).unwrap();
        }
        Endpoint::clear(&*rig.space).unwrap();
        assert_eq!(rig.mappings(), 0);
        assert_eq!(calls(), if at_once { (1, 0) } else { (0, 100) });
        // The full allowance can be mapped again.
        for at in 0..8 * MAX_TIMES {
            rig.map(at * BLOCK, 0, BLOCK).unwrap();
        }
        assert!(matches!(
            rig.map(1 << 40, 0, PAGE),
            Err(MapError::NoMemory(_))
        ));
        Endpoint::clear(&*rig.space).unwrap();
        rig.space.identity(true).unwrap();
        let before = calls();
        rig.space.identity(false).unwrap();
        assert_eq!(rig.mappings(), 0);
        let run_by_run = (before.0, before.1 + 1);
        assert_eq!(
            calls(),
            if at_once {
                (before.0 + 1, before.1)
            } else {
                run_by_run
            }
        );
    }
}

#[test]
fn what_the_virtual_iommu_cannot_tell_a_guest_of_is_refused_when_the_device_comes() {
    let add = |reach: Reach| {
        let rig = Rig::new(0);
        rig.space.lock().reach = reach;
        Endpoints::new().add(8, rig.space)
    };
    let all = || std::iter::once(0..=u64::MAX).collect::<Reach>();
    add(all()).unwrap();
    add(all().with_page(1)).unwrap();
    let pages = add(all().with_page(0x1_0000)).unwrap_err();
    assert!(matches!(pages, AddError::PageSize(0x1_0000)), "{pages}");
    assert!(pages.to_string().contains("0x10000"), "{pages}");
    // This number of gaps; the interrupt addresses are one more.
    let gaps = |count: u64| -> Reach {
        let ranges = (0..count).map(|at| at * 0x2000..=at * 0x2000 + 0xfff);
        let rest = std::iter::once(count * 0x2000..=u64::MAX);
        ranges.chain(rest).collect()
    };
    add(gaps(20)).unwrap();
    let many = add(gaps(21)).unwrap_err();
    assert!(many.to_string().contains("22 ranges"), "{many}");
}

#[test]
fn who_offers_a_peer_waits_for_one_request_however_many_there_are() {
    let rig = Rig::new(0);
    rig.space.identity(true).unwrap();
    for _ in 0..100 {
        rig.offer_peer();
        let request = rig.space.lock();
        thread::scope(|scope| {
            let mapping = scope.spawn(|| rig.space.map_peers());
            while !rig.space.contents.is_awaited() {
                thread::yield_now();
            }
            // The next request follows immediately.
            drop(request);
            assert!(rig.space.lock().pieces.contains_key(&BAR), "the peer waits");
            mapping.join().unwrap();
        });
        rig.withdraw_peer();
    }
}

#[derive(Clone, Debug)]
enum Step {
    Map { iova: u64, guest: u64, len: u64 },
    Unmap(usize),
    Plug(u64, bool),
    Peer(bool),
}

fn step() -> impl Strategy<Value = Step> {
    let guest = prop_oneof![0..8 * 16_u64, (BAR / PAGE)..(BAR / PAGE + 18)];
    prop_oneof![
        4 => (0..64_u64, guest, 1..40_u64).prop_map(|(iova, guest, len)| Step::Map {
            iova: iova * PAGE,
            guest: guest * PAGE,
            len: len * PAGE,
        }),
        2 => any::<usize>().prop_map(Step::Unmap),
        1 => (0..4_u64, any::<bool>()).prop_map(|(block, plug)| Step::Plug(block, plug)),
        1 => any::<bool>().prop_map(Step::Peer),
    ]
}

proptest! {
    /// Whatever happens, a device reaches the pages that the guest has mapped for it, except those
    /// that the guest has lost since.
    #[test]
    fn a_device_reaches_what_is_mapped_and_still_there(steps in prop::collection::vec(step(), 1..60)) {
        let rig = Rig::new(0);
        let blocks = rig.reachable.discards().blocks();
        let mut mappings: BTreeMap<u64, u64> = BTreeMap::new();
        let mut pages: BTreeMap<u64, u64> = BTreeMap::new();
        let mut plugged = [false; 4];
        let mut peer = false;
        for step in steps {
            match step {
                Step::Map { iova, guest, len } => {
                    let below = mappings.range(..iova + len).next_back();
                    if below.is_some_and(|(start, len)| start + len > iova) {
                        // The model does not generate this.
                        continue;
                    }
                    let is_there = |at: u64| match at {
                        BAR.. => peer && at < BAR + BLOCK,
                        at if BLOCKS.contains(&at) => plugged[((at - BLOCKS.start) / BLOCK) as usize],
                        at => at < BLOCKS.start,
                    };
                    let wanted: Vec<_> = (0..len).step_by(PAGE as usize).collect();
                    let all = wanted.iter().all(|offset| is_there(guest + offset));
                    prop_assert_eq!(rig.map(iova, guest, len).is_ok(), all);
                    if all {
                        mappings.insert(iova, len);
                        pages.extend(wanted.iter().map(|offset| (iova + offset, guest + offset)));
                    }
                }
                Step::Unmap(which) => {
                    let Some((&at, &len)) = mappings.iter().nth(which % mappings.len().max(1)) else {
                        continue;
                    };
                    mappings.remove(&at);
                    pages.retain(|page, _| !(at..at + len).contains(page));
                    rig.space.unmap(at, len).unwrap();
                }
                Step::Plug(block, plug) => {
                    let at = BLOCKS.start + block * BLOCK;
                    if plugged[block as usize] == plug {
                        continue;
                    }
                    plugged[block as usize] = plug;
                    if plug {
                        blocks.plug(at..at + BLOCK, BLOCK).unwrap();
                    } else {
                        blocks.unplug(at..at + BLOCK, BLOCK).unwrap();
                        pages.retain(|_, guest| !(at..at + BLOCK).contains(guest));
                    }
                }
                Step::Peer(offered) => {
                    if std::mem::replace(&mut peer, offered) == offered {
                        continue;
                    }
                    if offered {
                        rig.offer_peer();
                    } else {
                        rig.withdraw_peer();
                        pages.retain(|_, guest| *guest < BAR);
                    }
                }
            }
            prop_assert_eq!(&rig.pages(), &pages);
        }
    }
}
