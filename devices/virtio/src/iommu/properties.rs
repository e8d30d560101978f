//! Properties that hold for any sequence of requests: each endpoint reaches what the specification
//! says. Whatever the host does, it reaches what its domain maps and nothing else.

use std::{collections::BTreeMap, sync::Arc};

use proptest::prelude::*;

use super::{
    domains::Domains,
    endpoint::Endpoint,
    oracle::{Found, Oracle},
    request::Request,
    status::Status,
};
use crate::testing::iommu::{Mapped, Recorder};

/// One step of a test sequence.
#[derive(Clone, Debug)]
enum Step {
    /// The guest sends a request.
    Ask(Request),
    /// A device is added.
    Add(u32),
    /// A device is removed.
    Remove(u32),
    /// The driver changes bypass.
    Bypass(bool),
    /// The driver resets the IOMMU.
    Reset,
    /// The host will soon refuse a mapping for a device.
    Refuse(u32, u32),
    /// The host fails to remove the mappings of a device.
    Stick(u32),
}

fn id() -> impl Strategy<Value = u32> {
    0..5_u32
}

/// A few pages, some of them reserved, some invalid.
fn range() -> impl Strategy<Value = (u64, u64)> {
    let first = prop_oneof![8 => 0..12_u64, 1 => 0xfedfe..0xfef01_u64, 1 => any::<u64>()];
    (
        first,
        0..5_u64,
        prop_oneof![9 => Just(0xfff_u64), 1 => any::<u64>()],
    )
        .prop_map(|(first, pages, end)| {
            let first = first.wrapping_mul(0x1000);
            (first, first.wrapping_add(pages * 0x1000).wrapping_add(end))
        })
}

fn request() -> impl Strategy<Value = Request> {
    prop_oneof![
        4 => (id(), id(), 0..3_u32, any::<bool>()).prop_map(|(domain, endpoint, flags, odd)| {
            Request::Attach { domain, endpoint, flags: flags / 2, clean: !odd || flags > 0 }
        }),
        2 => (id(), id()).prop_map(|(domain, endpoint)| Request::Detach { domain, endpoint }),
        8 => (id(), range(), 0..64_u64, 0..5_u32).prop_map(|(domain, range, guest, flags)| {
            Request::Map { domain, range, guest: guest * 0x1000, flags }
        }),
        4 => (id(), range()).prop_map(|(domain, range)| Request::Unmap { domain, range }),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        40 => request().prop_map(Step::Ask),
        4 => id().prop_map(Step::Add),
        2 => id().prop_map(Step::Remove),
        1 => any::<bool>().prop_map(Step::Bypass),
        1 => Just(Step::Reset),
        2 => (id(), 0..4_u32).prop_map(|(id, after)| Step::Refuse(id, after)),
        1 => id().prop_map(Step::Stick),
    ]
}

/// Width of I/O addresses in bits.
const WIDTH: u32 = 39;

/// IDs of domains and endpoints, a few of which do not exist.
fn few() -> impl Strategy<Value = u32> {
    prop_oneof![12 => 0..3_u32, 1 => 3..5_u32, 1 => 0xffff..0x1_0001_u32]
}

/// First and last byte of a range: mostly of a few adjacent pages; occasionally around doorbells,
/// at the end of the mappable range or of 64 bits, the whole range, an empty one, or parts of
/// pages.
fn pages() -> impl Strategy<Value = (u64, u64)> {
    let end = 1_u64 << (WIDTH - 12);
    let first = prop_oneof![
        20 => 0..16_u64,
        1 => 0xfedfe..0xfee02_u64,
        1 => 0xfeefd..0xfef02_u64,
        1 => end - 4..end + 1,
        1 => (1_u64 << 52) - 3..1_u64 << 52,
    ];
    let odd = prop_oneof![
        24 => Just((0_u64, 0_u64)),
        1 => (0..3_u64, 0..3_u64).prop_map(|(first, last)| (first * 0x7ff, last * 0x7ff)),
    ];
    let some = (first, 0..5_u64, odd).prop_map(|(first, more, (late, early))| {
        let (first, last) = (first << 12, ((first + more) << 12).wrapping_add(0xfff));
        (first + late, last.wrapping_sub(early))
    });
    prop_oneof![60 => some, 1 => Just((0, u64::MAX)), 1 => Just((0x3000, 0x2fff))]
}

/// Requests of a mostly sensible driver.
fn sensible() -> impl Strategy<Value = Request> {
    let flags = prop_oneof![12 => 1..4_u32, 1 => Just(0), 1 => Just(7), 1 => Just(1 << 31)];
    let guest = prop_oneof![
        20 => (0..64_u64).prop_map(|page| page << 12),
        1 => Just(0x1234),
        1 => Just(u64::MAX - 0x1fff),
    ];
    prop_oneof![
        4 => (few(), few(), any::<bool>(), 0..20_u32).prop_map(|(domain, endpoint, bypass, odd)| {
            // Mostly to a domain with mappings.
            let flags = u32::from(bypass && odd < 8) | u32::from(odd == 9) << 1;
            Request::Attach { domain, endpoint, flags, clean: odd != 10 }
        }),
        1 => (few(), few()).prop_map(|(domain, endpoint)| Request::Detach { domain, endpoint }),
        12 => (few(), pages(), guest, flags).prop_map(|(domain, range, guest, flags)| {
            Request::Map { domain, range, guest, flags }
        }),
        5 => (few(), pages()).prop_map(|(domain, range)| Request::Unmap { domain, range }),
    ]
}

fn plain_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        50 => sensible().prop_map(Step::Ask),
        6 => (0..3_u32).prop_map(Step::Add),
        1 => (0..3_u32).prop_map(Step::Remove),
        1 => any::<bool>().prop_map(Step::Bypass),
        1 => Just(Step::Reset),
        2 => (0..3_u32, 0..4_u32).prop_map(|(id, after)| Step::Refuse(id, after)),
    ]
}

/// The pages that a device reaches.
fn found(mapped: &Mapped) -> BTreeMap<u64, Found> {
    let pages = mapped.iter().flat_map(|(at, (len, guest, access))| {
        let offsets = (0..*len).step_by(0x1000);
        offsets.map(move |offset| (at + offset, (guest + offset, access.read, access.write)))
    });
    pages.collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn each_endpoint_reaches_what_the_specification_says(
        steps in prop::collection::vec(plain_step(), 1..150),
    ) {
        let mut domains = Domains::default();
        domains.set_last_address((1 << WIDTH) - 1);
        let mut oracle = Oracle::new(WIDTH);
        let mut devices: BTreeMap<u32, Arc<Recorder>> = BTreeMap::new();
        for step in steps {
            // The host refuses only where it was told to, and only once.
            let pending = |devices: &BTreeMap<u32, Arc<Recorder>>| {
                devices.values().filter(|device| device.lock().patience.is_some()).count()
            };
            let before = pending(&devices);
            match step {
                Step::Ask(request) => {
                    let answer = request.carry_out(&mut domains, true, &mut []);
                    let objections = oracle.objections(&request);
                    let refused = pending(&devices) < before;
                    match (answer, request) {
                        (Ok(()), _) => {
                            prop_assert_eq!(&objections, &[], "{:x?} was done", request);
                            oracle.carry_out(&request);
                        }
                        (Err(Status::NoMemory), Request::Map { .. }) if refused => {}
                        (Err(Status::NoMemory), Request::Attach { endpoint, .. }) if refused => {
                            oracle.take_out(endpoint);
                        }
                        (Err(status), _) => prop_assert!(
                            objections.contains(&status),
                            "{:x?} got {:?}, not one of {:?}", request, status, objections
                        ),
                    }
                }
                Step::Add(id) => {
                    let device = Arc::new(Recorder::default());
                    let added = domains.add(id, device.clone() as Arc<dyn Endpoint>);
                    prop_assert_eq!(added.is_ok(), oracle.add(id));
                    devices.entry(id).or_insert(device);
                }
                Step::Remove(id) => {
                    domains.remove(id);
                    oracle.remove(id);
                    if let Some(device) = devices.remove(&id) {
                        let recorded = device.lock();
                        prop_assert!(recorded.mapped.is_empty() && !recorded.identity);
                    }
                }
                Step::Bypass(on) => {
                    domains.set_bypass(on);
                    oracle.set_bypass(on);
                }
                Step::Reset => {
                    domains.reset();
                    domains.set_bypass(oracle.bypass());
                    oracle.reset();
                }
                Step::Refuse(id, after) => {
                    if let Some(device) = devices.get(&id) {
                        device.lock().patience = Some(after);
                    }
                }
                Step::Stick(_) => {}
            }
            for (id, device) in &devices {
                let recorded = device.lock();
                let (identity, pages) = oracle.reach(*id);
                prop_assert_eq!(found(&recorded.mapped), pages, "of endpoint {}", id);
                // The host may have refused all of RAM to an endpoint without a domain.
                if oracle.is_in_domain(*id) || !identity {
                    prop_assert_eq!(recorded.identity, identity, "endpoint {}", id);
                }
            }
            prop_assert_eq!(domains.mappings(), oracle.mappings());
        }
    }
}

/// The mappings of an endpoint's domain, in a recorder's format.
fn expected(domains: &Domains, bypass: bool, endpoint: u32) -> (bool, Mapped) {
    let Some(domain) = domains.attached().get(&endpoint) else {
        return (bypass, Mapped::new());
    };
    let domain = &domains.all()[domain];
    let mappings = domain.mappings.iter();
    let mapped = mappings.map(|(first, mapping)| {
        let len = mapping.last - first + 1;
        (*first, (len, mapping.guest, mapping.access))
    });
    (domain.bypass, mapped.collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn each_endpoint_has_what_its_domain_maps_whatever_the_host_refuses_or_keeps(
        steps in prop::collection::vec(step(), 1..120)) {
        let mut domains = Domains::default();
        domains.set_last_address((1 << 39) - 1);
        let mut bypass = false;
        let mut devices: BTreeMap<u32, Arc<Recorder>> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Ask(request) => {
                    let before: usize = domains.mappings();
                    if request.carry_out(&mut domains, true, &mut []).is_err()
                        && let Request::Map { .. } = request
                        && devices.values().all(|device| !device.lock().stuck)
                    {
                        prop_assert_eq!(domains.mappings(), before);
                    }
                }
                Step::Add(id) => {
                    let device = Arc::new(Recorder::default());
                    let added = domains.add(id, device.clone() as Arc<dyn Endpoint>);
                    prop_assert_eq!(added.is_ok(), !devices.contains_key(&id));
                    devices.entry(id).or_insert(device);
                }
                Step::Remove(id) => {
                    domains.remove(id);
                    if let Some(device) = devices.remove(&id) {
                        let recorded = device.lock();
                        prop_assert!(recorded.stuck || recorded.mapped.is_empty());
                        prop_assert!(recorded.stuck || !recorded.identity);
                    }
                }
                Step::Bypass(on) => {
                    bypass = on;
                    domains.set_bypass(on);
                }
                Step::Reset => {
                    domains.reset();
                    domains.set_bypass(bypass);
                }
                Step::Refuse(id, after) => {
                    if let Some(device) = devices.get(&id) {
                        device.lock().patience = Some(after);
                    }
                }
                Step::Stick(id) => {
                    if let Some(device) = devices.get(&id) {
                        device.lock().stuck = true;
                    }
                }
            }
            for (id, device) in &devices {
                let recorded = device.lock();
                let (identity, mapped) = expected(&domains, bypass, *id);
                let is_attached = domains.attached().contains_key(id);
                // A stuck endpoint may be unusable, and then still reaches what it did before.
                if !recorded.stuck || is_attached {
                    prop_assert_eq!(&recorded.mapped, &mapped);
                }
                // The host may have refused all of RAM to an endpoint without a domain.
                if is_attached {
                    prop_assert_eq!(recorded.identity, identity);
                } else if !recorded.stuck {
                    prop_assert!(identity || !recorded.identity);
                }
            }
            let count: usize = domains.all().values().map(|domain| domain.mappings.len()).sum();
            prop_assert_eq!(domains.mappings(), count);
            for id in domains.all().keys() {
                prop_assert!(domains.attached().values().any(|domain| domain == id));
            }
        }
    }
}
