//! Saved state of the IOMMU.

use std::{collections::BTreeMap, ops::RangeInclusive};

use device_model::lifecycle::StateError;
use serde::{Deserialize, Serialize};

use super::{
    add_error::{AddError, ReservedMapping},
    domains::{
        DOMAINS, Domain, Domains, MAX_MAPPINGS, MAX_MAPPINGS_OF_DOMAIN, Mapping, PAGE, fits,
    },
    endpoint::Access,
};

/// A saved mapping: first and last I/O address, first guest-physical address, read, write.
type SavedMapping = (u64, u64, u64, bool, bool);

/// A saved domain.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedDomain {
    id: u32,
    bypass: bool,
    endpoints: Vec<u32>,
    mappings: Vec<SavedMapping>,
}

/// The complete saved state.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Endpoints without a domain reach all of RAM.
    pub bypass: bool,
    /// All domains; each has at least one endpoint.
    pub domains: Vec<SavedDomain>,
}

impl State {
    /// Saves the current domains, with the driver's setting of `bypass`.
    pub fn save(domains: &Domains, bypass: bool) -> Self {
        let saved = |(id, domain): (&u32, &Domain)| SavedDomain {
            id: *id,
            bypass: domain.bypass,
            endpoints: domains
                .attached()
                .iter()
                .filter(|(_, of)| *of == id)
                .map(|(endpoint, _)| *endpoint)
                .collect(),
            mappings: domain
                .mappings
                .iter()
                .map(|(first, mapping)| {
                    let Access { read, write } = mapping.access;
                    (*first, mapping.last, mapping.guest, read, write)
                })
                .collect(),
        };
        Self {
            bypass,
            domains: domains.all().iter().map(saved).collect(),
        }
    }

    /// Restores these domains. `last_address` is the IOMMU's last I/O address. `reserved` ranges
    /// cannot be mapped for any device, present or added later.
    pub fn restore(
        self,
        domains: &mut Domains,
        last_address: u64,
        reserved: &[RangeInclusive<u64>],
    ) -> Result<(), StateError> {
        let mut all = BTreeMap::new();
        let mut attached = BTreeMap::new();
        let mut count = 0;
        for saved in self.domains {
            let id = saved.id;
            let wrong = |what: &str| StateError::Mismatch(format!("domain {id} has {what}"));
            if id >= DOMAINS {
                return Err(wrong("too large a number"));
            }
            if saved.endpoints.is_empty() {
                return Err(wrong("no endpoint"));
            }
            for endpoint in &saved.endpoints {
                if attached.insert(*endpoint, id).is_some() {
                    return Err(wrong("an endpoint of another domain"));
                }
            }
            count += saved.mappings.len();
            if saved.mappings.len() > MAX_MAPPINGS_OF_DOMAIN
                || count > MAX_MAPPINGS
                || (saved.bypass && !saved.mappings.is_empty())
            {
                return Err(wrong("too many mappings"));
            }
            let mut domain = Domain {
                bypass: saved.bypass,
                mappings: BTreeMap::new(),
            };
            for (first, last, guest, read, write) in saved.mappings {
                let aligned = [first, guest, last.wrapping_add(1)];
                let possible = first <= last
                    && last <= last_address
                    && aligned.iter().all(|at| at.is_multiple_of(PAGE))
                    && fits(first, last, guest)
                    && (read || write);
                if !possible || domain.overlaps(first, last) {
                    return Err(wrong(&format!("an impossible mapping at {first:#x}")));
                }
                let meets =
                    |range: &&RangeInclusive<u64>| first <= *range.end() && *range.start() <= last;
                if let Some(range) = reserved.iter().find(meets) {
                    let reserved = ReservedMapping {
                        // Not empty: checked above.
                        endpoint: saved.endpoints[0],
                        domain: id,
                        mapping: first..=last,
                        reserved: range.clone(),
                    };
                    return Err(StateError::Mismatch(reserved.to_string()));
                }
                let mapping = Mapping {
                    last,
                    guest,
                    access: Access { read, write },
                };
                domain.mappings.insert(first, mapping);
            }
            if all.insert(id, domain).is_some() {
                return Err(wrong("another one of its number"));
            }
        }
        domains
            .restore(self.bypass, all, attached)
            .map_err(|error| match error {
                AddError::Reserved(mapping) => StateError::Mismatch(mapping.to_string()),
                error => StateError::Host {
                    action: "map what devices reached behind the virtual IOMMU",
                    source: std::io::Error::other(error),
                },
            })
    }
}
