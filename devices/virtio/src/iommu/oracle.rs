//! An oracle that computes, page by page and directly from the specification (virtio 1.2, 5.13.6),
//! what each endpoint reaches. It shares no code with [`super::domains`], so that each reveals the
//! other's errors.

use std::collections::{BTreeMap, BTreeSet};

use super::{request::Request, status::Status};

const PAGE: u64 = 4096;

/// Interrupt addresses, which no endpoint of these tests may map.
const DOORBELLS: std::ops::RangeInclusive<u64> = 0xfee0_0000..=0xfeef_ffff;

/// What an endpoint reaches at a page: the guest's page, and whether it may read and write.
pub type Found = (u64, bool, bool);

/// A mapped page.
#[derive(Clone, Copy, Debug)]
struct Page {
    found: Found,
    /// The request that mapped it: its pages can only be unmapped together.
    mapping: u64,
}

/// A domain.
#[derive(Clone, Debug, Default)]
struct Domain {
    bypass: bool,
    pages: BTreeMap<u64, Page>,
    endpoints: BTreeSet<u32>,
}

/// The whole state.
#[derive(Debug)]
pub struct Oracle {
    /// One more than the last mappable address.
    end: u64,
    endpoints: BTreeSet<u32>,
    domains: BTreeMap<u32, Domain>,
    bypass: bool,
    mappings: u64,
}

impl Oracle {
    /// Creates an oracle for addresses of `width` bits, fewer than 64.
    pub fn new(width: u32) -> Self {
        Self {
            end: 1 << width,
            endpoints: BTreeSet::new(),
            domains: BTreeMap::new(),
            bypass: false,
            mappings: 0,
        }
    }

    /// Adds an endpoint; false if its ID is taken.
    pub fn add(&mut self, endpoint: u32) -> bool {
        self.endpoints.insert(endpoint)
    }

    /// Removes an endpoint.
    pub fn remove(&mut self, endpoint: u32) {
        self.endpoints.remove(&endpoint);
        self.take_out(endpoint);
    }

    /// The driver sets `bypass` in the configuration.
    pub fn set_bypass(&mut self, bypass: bool) {
        self.bypass = bypass;
    }

    /// The driver's setting of bypass.
    pub fn bypass(&self) -> bool {
        self.bypass
    }

    /// The driver resets the device.
    pub fn reset(&mut self) {
        self.domains.clear();
    }

    /// Detaches the endpoint. Domains without endpoints do not exist (5.13.6.4).
    pub fn take_out(&mut self, endpoint: u32) {
        for domain in self.domains.values_mut() {
            domain.endpoints.remove(&endpoint);
        }
        self.domains
            .retain(|_, domain| !domain.endpoints.is_empty());
    }

    /// Whether the endpoint is attached to a domain.
    pub fn is_in_domain(&self, endpoint: u32) -> bool {
        self.of(endpoint).is_some()
    }

    fn of(&self, endpoint: u32) -> Option<&Domain> {
        let mut domains = self.domains.values();
        domains.find(|domain| domain.endpoints.contains(&endpoint))
    }

    /// Whether an endpoint reaches all of RAM at its own addresses, and which other pages it
    /// reaches.
    pub fn reach(&self, endpoint: u32) -> (bool, BTreeMap<u64, Found>) {
        match self.of(endpoint) {
            None => (self.bypass, BTreeMap::new()),
            Some(domain) => {
                let pages = domain.pages.iter().map(|(at, page)| (*at, page.found));
                (domain.bypass, pages.collect())
            }
        }
    }

    /// Number of mappings of all domains.
    pub fn mappings(&self) -> usize {
        let pages = self
            .domains
            .values()
            .flat_map(|domain| domain.pages.values());
        pages
            .map(|page| page.mapping)
            .collect::<BTreeSet<_>>()
            .len()
    }

    /// The reasons for which the specification requires that a request be refused; empty if it must
    /// succeed. If there are several, the device may report any of them.
    pub fn objections(&self, request: &Request) -> Vec<Status> {
        let mut objections = Vec::new();
        let mut object = |if_so: bool, status| {
            if if_so {
                objections.push(status);
            }
        };
        match *request {
            Request::Attach {
                domain,
                endpoint,
                flags,
                clean,
            } => {
                object(!clean || flags > 1, Status::Invalid);
                object(!self.endpoints.contains(&endpoint), Status::NoEntry);
                object(domain > 0xffff, Status::Range);
                let other = self.domains.get(&domain);
                let differs = other.is_some_and(|other| other.bypass != (flags & 1 == 1));
                object(differs, Status::Invalid);
            }
            Request::Detach { domain, endpoint } => {
                object(!self.endpoints.contains(&endpoint), Status::NoEntry);
                let domain = self.domains.get(&domain);
                let within = domain.is_some_and(|domain| domain.endpoints.contains(&endpoint));
                object(!within, Status::Invalid);
            }
            Request::Map {
                domain,
                range: (first, last),
                guest,
                flags,
            } => {
                object(flags == 0 || flags > 3, Status::Invalid);
                object(last < first, Status::Invalid);
                let aligned = |at: u64| at.is_multiple_of(PAGE);
                object(!aligned(first) || !aligned(guest), Status::Range);
                object(last % PAGE != PAGE - 1 || last >= self.end, Status::Range);
                let beyond = u128::from(guest) + u128::from(last.saturating_sub(first));
                object(beyond >= 1 << 64, Status::Fault);
                let meets = |from: u64, to: u64| from <= last && first <= to;
                object(meets(*DOORBELLS.start(), *DOORBELLS.end()), Status::Range);
                match self.domains.get(&domain) {
                    None => object(true, Status::NoEntry),
                    Some(domain) => {
                        object(domain.bypass, Status::Invalid);
                        let mut taken = domain.pages.keys();
                        let taken = taken.any(|page| meets(*page, *page + (PAGE - 1)));
                        object(taken, Status::Invalid);
                    }
                }
            }
            Request::Unmap {
                domain,
                range: (first, last),
            } => {
                object(last < first, Status::Invalid);
                match self.domains.get(&domain) {
                    None => object(true, Status::NoEntry),
                    Some(domain) => {
                        object(domain.bypass, Status::Invalid);
                        object(splits(domain, first, last), Status::Range);
                    }
                }
            }
            Request::Probe { endpoint } => {
                object(!self.endpoints.contains(&endpoint), Status::NoEntry);
            }
        }
        objections
    }

    /// Executes a request without objections.
    pub fn carry_out(&mut self, request: &Request) {
        match *request {
            Request::Attach {
                domain,
                endpoint,
                flags,
                ..
            } => {
                let here = self.domains.get(&domain);
                if here.is_some_and(|domain| domain.endpoints.contains(&endpoint)) {
                    return;
                }
                self.take_out(endpoint);
                let domain = self.domains.entry(domain).or_default();
                domain.bypass = flags & 1 == 1;
                domain.endpoints.insert(endpoint);
            }
            Request::Detach { endpoint, .. } => self.take_out(endpoint),
            Request::Map {
                domain,
                range: (first, last),
                guest,
                flags,
            } => {
                self.mappings += 1;
                let Some(domain) = self.domains.get_mut(&domain) else {
                    return;
                };
                for at in (first..=last).step_by(PAGE as usize) {
                    let page = Page {
                        found: (guest + (at - first), flags & 1 != 0, flags & 2 != 0),
                        mapping: self.mappings,
                    };
                    domain.pages.insert(at, page);
                }
            }
            Request::Unmap {
                domain,
                range: (first, last),
            } => {
                if let Some(domain) = self.domains.get_mut(&domain) {
                    domain.pages.retain(|at, _| !(first..=last).contains(at));
                }
            }
            Request::Probe { .. } => {}
        }
    }
}

/// Whether part of a mapping is in the range, and part of it is not (5.13.6.6).
fn splits(domain: &Domain, first: u64, last: u64) -> bool {
    // Of each mapping: whether a byte of it is in the range, and whether one is not.
    let mut mappings: BTreeMap<u64, (bool, bool)> = BTreeMap::new();
    for (at, page) in &domain.pages {
        let end = at + (PAGE - 1);
        let (inside, outside) = mappings.entry(page.mapping).or_default();
        *inside |= *at <= last && first <= end;
        *outside |= *at < first || last < end;
    }
    mappings
        .values()
        .any(|(inside, outside)| *inside && *outside)
}
