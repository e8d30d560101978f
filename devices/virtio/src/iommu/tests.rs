use std::{ops::RangeInclusive, sync::Arc};

use device_model::thread::Unconfined;

use super::{Access, AddError, Endpoints, Error, Options, VirtioIommu};
use crate::{
    VirtioDevice,
    served::read_config_bytes,
    testing::{
        iommu::Recorder,
        simple::{Guest, GuestQueue},
    },
};

const BYPASS_CONFIG: u64 = 1 << 6;

/// Status codes (5.13.6).
pub(super) const OK: u8 = 0;
const UNSUPPORTED: u8 = 2;
const DEVICE: u8 = 3;
pub(super) const INVALID: u8 = 4;
const RANGE: u8 = 5;
const NO_ENTRY: u8 = 6;
const FAULT: u8 = 7;
const NO_MEMORY: u8 = 8;

pub(super) const READ: u32 = 1;
const WRITE: u32 = 2;

pub(super) fn iommu(endpoints: &Endpoints) -> VirtioIommu {
    let options = Options {
        thread_name: "_iommu".to_owned(),
        address_width: 48,
        reserved: Vec::new(),
    };
    VirtioIommu::new(endpoints.clone(), options, Arc::new(Unconfined)).unwrap()
}

/// A VM with an IOMMU, its driver, and devices 8, 16 and 24 behind it.
pub(super) struct Rig {
    pub endpoints: Endpoints,
    pub devices: [Arc<Recorder>; 3],
    pub guest: Guest,
    pub queue: GuestQueue,
    pub iommu: VirtioIommu,
}

impl Rig {
    pub fn new() -> Self {
        let endpoints = Endpoints::new();
        let devices: [Arc<Recorder>; 3] = Default::default();
        for (id, device) in [8, 16, 24].into_iter().zip(&devices) {
            endpoints.add(id, device.clone()).unwrap();
        }
        let guest = Guest::new();
        let queue = guest.queue(0, 64);
        let mut iommu = iommu(&endpoints);
        let activation = guest.activation_with(&[&queue], BYPASS_CONFIG);
        iommu.activate(activation).unwrap();
        Self {
            endpoints,
            devices,
            guest,
            queue,
            iommu,
        }
    }

    /// Sends a request and returns its status.
    pub fn ask(&self, request: &[u8]) -> u8 {
        let (len, answer) = self.queue.request(request, 4);
        assert_eq!((len, &answer[1..]), (4, [0; 3].as_slice()));
        answer[0]
    }

    pub fn attach(&self, domain: u32, endpoint: u32) -> u8 {
        self.ask(&attach(domain, endpoint, 0))
    }

    fn detach(&self, domain: u32, endpoint: u32) -> u8 {
        self.ask(&detach(domain, endpoint))
    }

    pub fn map(&self, domain: u32, range: RangeInclusive<u64>, guest: u64) -> u8 {
        self.ask(&map(domain, range, guest, READ | WRITE))
    }

    fn unmap(&self, domain: u32, range: RangeInclusive<u64>) -> u8 {
        self.ask(&unmap(domain, range))
    }

    /// A device's mappings, as (I/O address, length, guest-physical address).
    pub fn mapped(&self, device: usize) -> Vec<(u64, u64, u64)> {
        let recorded = self.devices[device].lock();
        let mapped = recorded.mapped.iter();
        mapped.map(|(at, (len, to, _))| (*at, *len, *to)).collect()
    }

    pub fn identity(&self, device: usize) -> bool {
        self.devices[device].lock().identity
    }
}

fn words(kind: u8, words: &[u32]) -> Vec<u8> {
    let words = words.iter().flat_map(|word| word.to_le_bytes());
    [kind, 0, 0, 0].into_iter().chain(words).collect()
}

fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

pub(super) fn attach(domain: u32, endpoint: u32, flags: u32) -> Vec<u8> {
    words(1, &[domain, endpoint, flags, 0])
}

pub(super) fn detach(domain: u32, endpoint: u32) -> Vec<u8> {
    words(2, &[domain, endpoint, 0, 0])
}

pub(super) fn map(domain: u32, range: RangeInclusive<u64>, guest: u64, flags: u32) -> Vec<u8> {
    let ([a, b], [c, d], [e, f]) = (halves(*range.start()), halves(*range.end()), halves(guest));
    words(3, &[domain, a, b, c, d, e, f, flags])
}

pub(super) fn unmap(domain: u32, range: RangeInclusive<u64>) -> Vec<u8> {
    let ([a, b], [c, d]) = (halves(*range.start()), halves(*range.end()));
    words(4, &[domain, a, b, c, d, 0])
}

fn probe(endpoint: u32) -> Vec<u8> {
    let mut request = words(5, &[endpoint]);
    request.resize(72, 0);
    request
}

#[test]
fn the_driver_is_told_of_pages_addresses_domains_and_the_size_of_probes() {
    let iommu = iommu(&Endpoints::new());
    let mut config = [0; 40];
    iommu.read_config(0, &mut config);
    let at = |at: usize| u64::from_le_bytes(config[at..at + 8].try_into().unwrap());
    assert_eq!((at(0), at(8), at(16)), (!0xfff, 0, (1 << 48) - 1));
    assert_eq!((at(24), at(32)), (0xffff << 32, 512));
    assert_eq!(iommu.features() & 0xff, 0b101_0111);
    let mut beyond = [1; 8];
    read_config_bytes(&config, 36, &mut beyond);
    assert_eq!(beyond, [0; 8]);
}

#[test]
fn addresses_have_a_width_that_makes_sense() {
    for (width, fits) in [(0, false), (31, false), (32, true), (64, true), (65, false)] {
        let options = Options {
            thread_name: String::new(),
            address_width: width,
            reserved: Vec::new(),
        };
        let made = VirtioIommu::new(Endpoints::new(), options, Arc::new(Unconfined));
        assert_eq!(made.is_ok(), fits);
        if let Some(error) = made.err() {
            assert!(matches!(error, Error::AddressWidth(_)));
            assert!(error.to_string().contains("32 to 64"), "{error}");
        }
    }
}

#[test]
fn a_domain_maps_for_all_of_its_endpoints_and_for_nobody_else() {
    let rig = Rig::new();
    assert_eq!(rig.attach(1, 8), OK);
    assert_eq!(rig.map(1, 0x1000..=0x2fff, 0xa000), OK);
    // A device that is attached later gets the existing mappings.
    assert_eq!(rig.attach(1, 16), OK);
    assert_eq!(rig.attach(2, 24), OK);
    assert_eq!(rig.map(1, 0x8000..=0x8fff, 0xa000), OK);
    let both = [(0x1000, 0x2000, 0xa000), (0x8000, 0x1000, 0xa000)];
    assert_eq!((rig.mapped(0), rig.mapped(1)), (both.into(), both.into()));
    assert_eq!(rig.mapped(2), []);
    assert_eq!(rig.unmap(1, 0..=0x2fff), OK);
    assert_eq!(rig.mapped(1), [(0x8000, 0x1000, 0xa000)]);
    // Attach to another domain without a detach before.
    assert_eq!(rig.attach(2, 16), OK);
    assert_eq!((rig.mapped(0).len(), rig.mapped(1).len()), (1, 0));
    assert_eq!(rig.detach(1, 8), OK);
    assert_eq!(rig.mapped(0), []);
    // A domain ceases to exist with its last endpoint.
    assert_eq!(rig.map(1, 0x1000..=0x1fff, 0), NO_ENTRY);
    assert_eq!(rig.unmap(1, 0x1000..=0x1fff), NO_ENTRY);
    assert_eq!(rig.attach(1, 8), OK);
    assert_eq!(rig.mapped(0), []);
}

#[test]
fn access_is_what_was_asked_for() {
    let rig = Rig::new();
    rig.attach(1, 8);
    for (at, flags) in [(0, READ), (0x1000, WRITE), (0x2000, READ | WRITE)] {
        assert_eq!(rig.ask(&map(1, at..=at + 0xfff, 0, flags)), OK);
        let (read, write) = (flags & READ != 0, flags & WRITE != 0);
        let access = rig.devices[0].lock().mapped[&at].2;
        assert_eq!(access, Access { read, write });
    }
    // No access at all; memory-mapped I/O, which is not offered; unknown flags.
    for flags in [0, READ | 4, READ | 1 << 31] {
        assert_eq!(rig.ask(&map(1, 0x8000..=0x8fff, 0, flags)), INVALID);
    }
}

#[test]
fn unmapping_follows_the_examples_of_the_specification() {
    let rig = Rig::new();
    rig.attach(1, 8);
    // In pages, where the specification has bytes: mappings, the range to unmap, the status, and
    // the remaining mappings.
    type Pages = (u64, u64);
    let examples: [(&[Pages], Pages, u8, &[Pages]); 9] = [
        (&[], (0, 4), OK, &[]),
        (&[(0, 9)], (0, 9), OK, &[]),
        (&[(0, 4), (5, 9)], (0, 9), OK, &[]),
        (&[(0, 9)], (0, 4), RANGE, &[(0, 9)]),
        (&[(0, 4), (5, 9)], (0, 4), OK, &[(5, 9)]),
        (&[(0, 4)], (0, 9), OK, &[]),
        (&[(0, 4), (10, 14)], (0, 14), OK, &[]),
        // And at the other end.
        (&[(0, 9)], (5, 20), RANGE, &[(0, 9)]),
        (&[(0, 4), (5, 9)], (2, 9), RANGE, &[(0, 4), (5, 9)]),
    ];
    for (maps, (first, last), status, left) in examples {
        let range = |(first, last): Pages| first << 12..=(last << 12) + 0xfff;
        for pages in maps {
            assert_eq!(rig.map(1, range(*pages), 0), OK);
        }
        assert_eq!(rig.unmap(1, range((first, last))), status);
        let pages: Vec<_> = rig
            .mapped(0)
            .iter()
            .map(|(at, len, _)| (at >> 12, ((at + len) >> 12) - 1))
            .collect();
        assert_eq!(pages, left);
        assert_eq!(rig.unmap(1, 0..=u64::MAX), OK);
    }
    assert_eq!(rig.unmap(1, RangeInclusive::new(0x2000, 0x1fff)), INVALID);
}

#[test]
fn mappings_that_make_no_sense_are_refused_with_the_reason_that_the_specification_names() {
    let rig = Rig::new();
    assert_eq!(rig.attach(1, 8), OK);
    assert_eq!(rig.map(1, 0x4000..=0x7fff, 0x1000), OK);
    let cases = [
        (9, 0x1000..=0x1fff, 0, NO_ENTRY),
        (1, 0x1800..=0x1fff, 0, RANGE),
        (1, 0x1000..=0x17ff, 0, RANGE),
        (1, 0x1000..=0x1fff, 0x800, RANGE),
        (1, RangeInclusive::new(0x2000, 0x1fff), 0, INVALID),
        (1, 0..=u64::MAX, 0, RANGE),
        (1, 1 << 48..=(1 << 48) + 0xfff, 0, RANGE),
        (1, 0x1000..=0x2fff, 0xffff_ffff_ffff_f000, FAULT),
        // Overlaps an existing mapping: at its first page, at its last page, around it, within it.
        (1, 0x3000..=0x4fff, 0, INVALID),
        (1, 0x7000..=0x8fff, 0, INVALID),
        (1, 0x3000..=0x8fff, 0, INVALID),
        (1, 0x5000..=0x5fff, 0, INVALID),
        // Interrupt addresses.
        (1, 0xfedf_f000..=0xfee0_0fff, 0, RANGE),
        (1, 0xfeef_f000..=0xfeff_ffff, 0, RANGE),
    ];
    for (domain, range, guest, status) in cases {
        assert_eq!(rig.map(domain, range.clone(), guest), status, "{range:x?}");
    }
    assert_eq!(rig.mapped(0), [(0x4000, 0x4000, 0x1000)]);
    let counters = rig.iommu.counters();
    assert_eq!(
        counters,
        [("requests", 16), ("refused_requests", 14), ("mappings", 1)]
    );
}

#[test]
fn the_last_page_of_64_bits_can_be_mapped_and_all_of_them_together_cannot() {
    let endpoints = Endpoints::new();
    let device = Arc::new(Recorder::default());
    endpoints.add(8, device.clone()).unwrap();
    let options = Options {
        thread_name: "_iommu".to_owned(),
        address_width: 64,
        reserved: Vec::new(),
    };
    let mut iommu = VirtioIommu::new(endpoints, options, Arc::new(Unconfined)).unwrap();
    let guest = Guest::new();
    let queue = guest.queue(0, 64);
    iommu.activate(guest.activation(&[&queue])).unwrap();
    let ask = |request: &[u8]| queue.request(request, 4).1[0];
    assert_eq!(ask(&attach(1, 8, 0)), OK);
    assert_eq!(ask(&map(1, 0..=u64::MAX, 0, READ)), FAULT);
    assert_eq!(ask(&map(1, u64::MAX - 0x1fff..=u64::MAX, 0, READ)), OK);
    assert_eq!(
        ask(&map(1, u64::MAX - 0x2fff..=u64::MAX - 0x2000, 0, READ)),
        OK
    );
    assert_eq!(device.lock().mapped.len(), 2);
    assert_eq!(ask(&unmap(1, 0..=u64::MAX)), OK);
    assert_eq!(device.lock().mapped.len(), 0);
}

#[test]
fn endpoints_and_domains_that_do_not_fit_are_refused() {
    let rig = Rig::new();
    assert_eq!(rig.attach(1, 9), NO_ENTRY);
    assert_eq!(rig.attach(1 << 16, 8), RANGE);
    assert_eq!(rig.attach(0xffff, 8), OK);
    assert_eq!(rig.detach(0xffff, 9), NO_ENTRY);
    assert_eq!(rig.detach(1, 8), INVALID);
    assert_eq!(rig.detach(0xffff, 16), INVALID);
    // Reserved bytes that are not zero, and unknown flags.
    assert_eq!(rig.ask(&words(1, &[1, 8, 0, 1])), INVALID);
    assert_eq!(rig.ask(&attach(1, 8, 2)), INVALID);
    // To attach again is valid.
    assert_eq!(rig.attach(0xffff, 8), OK);
}

#[test]
fn a_bypass_domain_reaches_all_of_ram_and_maps_nothing() {
    let rig = Rig::new();
    assert_eq!(rig.ask(&attach(1, 8, 1)), OK);
    assert!(rig.identity(0));
    assert_eq!(rig.map(1, 0x1000..=0x1fff, 0), INVALID);
    assert_eq!(rig.unmap(1, 0x1000..=0x1fff), INVALID);
    // All endpoints of a domain use bypass, or none.
    assert_eq!(rig.attach(1, 16), INVALID);
    assert_eq!(rig.attach(2, 16), OK);
    assert_eq!(rig.ask(&attach(2, 24, 1)), INVALID);
    assert_eq!(rig.attach(2, 8), OK);
    assert!(!rig.identity(0));
}

#[test]
fn a_driver_that_does_not_know_bypass_domains_gets_none() {
    let mut rig = Rig::new();
    rig.iommu.deactivate();
    rig.iommu.reset();
    let queue = rig.guest.queue(0, 64);
    let activation = rig.guest.activation(&[&queue]);
    rig.iommu.activate(activation).unwrap();
    assert_eq!(queue.request(&attach(1, 8, 1), 4).1, [INVALID, 0, 0, 0]);
}

#[test]
fn endpoints_without_a_domain_reach_nothing_unless_the_driver_says_so() {
    let mut rig = Rig::new();
    assert_eq!(rig.attach(1, 8), OK);
    assert_eq!(rig.map(1, 0..=0xfff, 0), OK);
    for at in 0..3 {
        assert!(!rig.identity(at));
    }
    rig.iommu.write_config(36, &[1]);
    // A reply shows that the worker has applied the setting.
    assert_eq!(rig.attach(1, 8), OK);
    assert_eq!([0, 1, 2].map(|at| rig.identity(at)), [false, true, true]);
    assert_eq!(rig.detach(1, 8), OK);
    assert!(rig.identity(0));
    assert_eq!(rig.attach(1, 8), OK);
    assert!(!rig.identity(0));
    // A device that is added later, and one that is removed.
    let late = Arc::new(Recorder::default());
    rig.endpoints.add(32, late.clone()).unwrap();
    assert!(late.lock().identity);
    rig.endpoints.remove(32);
    assert!(!late.lock().identity);
    // A value other than 0 and 1, another field, another size: all ignored.
    rig.iommu.write_config(36, &[2]);
    rig.iommu.write_config(0, &[0]);
    rig.iommu.write_config(36, &[0, 0]);
    let mut bypass = [0];
    rig.iommu.read_config(36, &mut bypass);
    assert_eq!(bypass, [1]);
    rig.iommu.write_config(36, &[0]);
    assert_eq!(rig.detach(1, 8), OK);
    assert_eq!([0, 1, 2].map(|at| rig.identity(at)), [false; 3]);
}

#[test]
fn what_the_host_refuses_half_way_is_undone() {
    let rig = Rig::new();
    for endpoint in [8, 16, 24] {
        assert_eq!(rig.attach(1, endpoint), OK);
    }
    rig.devices[2].lock().patience = Some(0);
    assert_eq!(rig.map(1, 0x1000..=0x1fff, 0), NO_MEMORY);
    assert_eq!([0, 1, 2].map(|at| rig.mapped(at).len()), [0; 3]);
    assert_eq!(rig.map(1, 0x1000..=0x1fff, 0), OK);
    assert_eq!(rig.map(1, 0x4000..=0x4fff, 0), OK);
    // An endpoint whose mappings fail is attached to no domain.
    assert_eq!(rig.detach(1, 8), OK);
    rig.devices[0].lock().patience = Some(1);
    assert_eq!(rig.attach(1, 8), NO_MEMORY);
    assert_eq!(rig.mapped(0), []);
    assert_eq!(rig.detach(1, 8), INVALID);
    rig.devices[0].lock().patience = Some(0);
    assert_eq!(rig.ask(&attach(2, 8, 1)), NO_MEMORY);
    assert_eq!(rig.map(2, 0..=0xfff, 0), NO_ENTRY);
    assert_eq!(rig.attach(1, 8), OK);
    assert_eq!(rig.mapped(0).len(), 2);
}

#[test]
fn an_endpoint_that_the_host_does_not_let_go_of_is_out_of_use() {
    let rig = Rig::new();
    rig.attach(1, 8);
    rig.attach(1, 16);
    rig.map(1, 0x1000..=0x1fff, 0);
    rig.map(1, 0x4000..=0x4fff, 0);
    rig.devices[0].lock().stuck = true;
    assert_eq!(rig.unmap(1, 0x1000..=0x1fff), DEVICE);
    // The other endpoints keep the domain's mappings.
    assert_eq!(rig.mapped(1), [(0x4000, 0x1000, 0)]);
    assert_eq!(rig.map(1, 0x1000..=0x1fff, 0), OK);
    assert_eq!(rig.detach(1, 8), INVALID);
    assert_eq!(rig.attach(1, 8), DEVICE);
    // Until another device is plugged in in its place.
    rig.endpoints.remove(8);
    rig.endpoints.add(8, Arc::new(Recorder::default())).unwrap();
    assert_eq!(rig.attach(1, 8), OK);
}

#[test]
fn a_device_that_is_plugged_in_anew_is_in_no_domain() {
    let rig = Rig::new();
    rig.attach(1, 8);
    rig.map(1, 0x1000..=0x1fff, 0);
    rig.endpoints.remove(8);
    assert_eq!(rig.mapped(0), []);
    assert_eq!(rig.detach(1, 8), NO_ENTRY);
    // No endpoint was left in the domain.
    assert_eq!(rig.map(1, 0x1000..=0x1fff, 0), NO_ENTRY);
    rig.endpoints.add(8, rig.devices[0].clone()).unwrap();
    assert_eq!(rig.mapped(0), []);
    assert_eq!(rig.detach(1, 8), INVALID);
    rig.endpoints.remove(99);
}

#[test]
fn a_device_in_anothers_place_is_refused() {
    let rig = Rig::new();
    let device = Arc::new(Recorder::default());
    let taken = rig.endpoints.add(8, device).unwrap_err();
    assert!(matches!(taken, AddError::Taken(8)), "{taken}");
    assert_eq!(rig.attach(1, 8), OK);
}

#[test]
fn a_probe_tells_what_is_reserved() {
    let rig = Rig::new();
    let (len, answer) = rig.queue.request(&probe(8), 516);
    assert_eq!(len, 516);
    let mut expected = vec![0; 516];
    expected[..8].copy_from_slice(&[1, 0, 20, 0, 1, 0, 0, 0]);
    expected[8..16].copy_from_slice(&0xfee0_0000_u64.to_le_bytes());
    expected[16..24].copy_from_slice(&0xfeef_ffff_u64.to_le_bytes());
    assert_eq!(answer, expected);
    let (len, answer) = rig.queue.request(&probe(9), 516);
    assert_eq!((len, answer[512]), (516, NO_ENTRY));
    // Not enough room for the properties: only the status fits.
    let (len, answer) = rig.queue.request(&probe(8), 104);
    assert_eq!(
        (len, answer[100], &answer[..100]),
        (104, INVALID, [0; 100].as_slice())
    );
}

#[test]
fn an_endpoint_does_not_join_a_domain_that_maps_what_it_reserves() {
    let rig = Rig::new();
    let device = Arc::new(Recorder::default());
    device.lock().reserved = Some(0x8000..=0x8fff);
    rig.endpoints.add(32, device.clone()).unwrap();
    assert_eq!(rig.attach(2, 32), OK);
    assert_eq!(rig.attach(1, 8), OK);
    assert_eq!(rig.map(1, 0x7000..=0x9fff, 0), OK);
    assert_eq!(rig.attach(1, 32), UNSUPPORTED);
    // The reserved range stays in place, and prevents mappings there.
    assert_eq!(rig.attach(2, 16), OK);
    assert_eq!(rig.map(2, 0x8000..=0x8fff, 0), RANGE);
    assert_eq!(rig.map(2, 0x7000..=0x7fff, 0), OK);
    assert_eq!(device.lock().mapped.len(), 1);
}

#[test]
fn what_cannot_be_read_or_answered_gets_no_answer() {
    let rig = Rig::new();
    let at = rig.queue.buffers();
    for request in [
        &[][..],
        &[1, 0, 0],
        &[0; 64],
        &words(6, &[0; 64]),
        &attach(1, 8, 0)[..19],
        &detach(1, 8)[..19],
        &map(1, 0..=0xfff, 0, 1)[..35],
        &unmap(1, 0..=0xfff)[..27],
        &probe(8)[..71],
    ] {
        assert_eq!(rig.queue.request(request, 516).0, 0, "{request:x?}");
    }
    for writable in 0..4 {
        assert_eq!(rig.queue.request(&attach(1, 8, 0), writable).0, 0);
    }
    assert_eq!(rig.detach(1, 8), INVALID, "it was not attached");
    assert_eq!(
        rig.queue.raw(&[(u64::MAX - 8, 20, false), (at, 4, true)]),
        0
    );
    // Longer than necessary, in pieces, and with more room than necessary.
    let mut long = attach(1, 8, 0);
    long.resize(200, 0xff);
    assert_eq!(rig.queue.request(&long, 99).0, 4);
    assert_eq!(rig.detach(1, 8), OK);
}

#[test]
fn there_are_no_more_mappings_than_the_limits_allow() {
    let rig = Rig::new();
    let mut domains = rig.endpoints.lock();
    let page = |at: u64| super::domains::Mapping {
        last: at * 0x2000 + 0xfff,
        guest: 0,
        access: Access {
            read: true,
            write: false,
        },
    };
    // Five full domains would exceed the limit for all domains together.
    for (id, endpoint) in (0..5).zip(40..) {
        domains
            .add(endpoint, Arc::new(Recorder::default()))
            .unwrap();
        domains.attach(endpoint, id, false).unwrap();
    }
    let mut taken = 0;
    for id in 0..5 {
        let mut at = 0;
        while domains.map(id, at * 0x2000, page(at)).is_ok() {
            at += 1;
        }
        assert!(at <= 65_535);
        taken += at;
    }
    assert_eq!(taken, 1 << 18);
    domains.unmap(0, 0, u64::MAX).unwrap();
    domains
        .map(
            4,
            0xffff_0000_0000,
            super::domains::Mapping {
                last: 0xffff_0000_0fff,
                ..page(0)
            },
        )
        .unwrap();
}

#[test]
fn both_queues_come_back_and_the_first_is_needed() {
    let mut rig = Rig::new();
    rig.iommu.deactivate();
    let queues = [rig.guest.queue(0, 64), rig.guest.queue(1, 64)];
    let activation = rig.guest.activation(&[&queues[0], &queues[1]]);
    rig.iommu.activate(activation).unwrap();
    // Buffers in the event queue stay there.
    queues[1].submit(&[(queues[1].buffers(), 24, true)]);
    assert_eq!(queues[0].request(&attach(1, 8, 0), 4).1[0], OK);
    let back: Vec<_> = rig
        .iommu
        .deactivate()
        .iter()
        .map(|queue| queue.index)
        .collect();
    assert_eq!((back, queues[1].poll_used()), (vec![0, 1], None));
    let only_events = rig.guest.activation(&[&queues[1]]);
    assert!(rig.iommu.activate(only_events).is_err());
}
