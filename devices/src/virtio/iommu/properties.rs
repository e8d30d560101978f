//! Whatever requests come: each endpoint has what its domain maps, and nothing else.

use std::{collections::BTreeMap, sync::Arc};

use proptest::prelude::*;

use super::{domains::Domains, endpoint::Endpoint, request::Request};
use crate::testing::iommu::{Mapped, Recorder};

/// What happens.
#[derive(Clone, Debug)]
enum Step {
    /// The guest asks for something.
    Ask(Request),
    /// A device comes.
    Add(u32),
    /// A device goes.
    Remove(u32),
    /// The driver changes bypass.
    Bypass(bool),
    /// The driver resets the IOMMU.
    Reset,
    /// The host refuses something for a device soon.
    Refuse(u32, u32),
    /// The host keeps what is mapped for a device.
    Stick(u32),
}

fn id() -> impl Strategy<Value = u32> {
    0..5_u32
}

/// A few pages, some of them reserved, some impossible.
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

fn step() -> impl Strategy<Value = Step> {
    let request = prop_oneof![
        4 => (id(), id(), 0..3_u32, any::<bool>()).prop_map(|(domain, endpoint, flags, odd)| {
            Request::Attach { domain, endpoint, flags: flags / 2, clean: !odd || flags > 0 }
        }),
        2 => (id(), id()).prop_map(|(domain, endpoint)| Request::Detach { domain, endpoint }),
        8 => (id(), range(), 0..64_u64, 0..5_u32).prop_map(|(domain, range, guest, flags)| {
            Request::Map { domain, range, guest: guest * 0x1000, flags }
        }),
        4 => (id(), range()).prop_map(|(domain, range)| Request::Unmap { domain, range }),
    ];
    prop_oneof![
        40 => request.prop_map(Step::Ask),
        4 => id().prop_map(Step::Add),
        2 => id().prop_map(Step::Remove),
        1 => any::<bool>().prop_map(Step::Bypass),
        1 => Just(Step::Reset),
        2 => (id(), 0..4_u32).prop_map(|(id, after)| Step::Refuse(id, after)),
        1 => id().prop_map(Step::Stick),
    ]
}

/// The mappings of a domain, as a recorder has them.
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
    fn each_endpoint_has_what_its_domain_maps(steps in prop::collection::vec(step(), 1..120)) {
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
                // One that is stuck may be out of use, and then reaches what it did.
                if !recorded.stuck || is_attached {
                    prop_assert_eq!(&recorded.mapped, &mapped);
                }
                // All of RAM may have been refused to one that is in no domain.
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
