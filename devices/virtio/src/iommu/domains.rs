//! Domains: address spaces that the guest creates, and the endpoints attached to them.
//!
//! An endpoint is attached to one domain or to none. Without a domain it reaches nothing, or all of
//! RAM while bypass is on. An endpoint's mappings on the host always equal those of its domain: a
//! request that the host refuses half-way is rolled back. If the host fails to remove a mapping,
//! the endpoint is unusable until it is plugged in again.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    ops::RangeInclusive,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    add_error::{AddError, MAX_RESERVED, ReservedMapping},
    endpoint::{Access, Endpoint, MapError, Reserved},
    status::Status,
};

/// The minimum page size, and the granularity of all mappings.
pub const PAGE: u64 = 4096;

/// Domain IDs are below this number.
pub const DOMAINS: u32 = 1 << 16;

/// Maximum number of mappings per domain: the same as the host's VFIO limit (`dma_entry_limit`).
pub const MAX_MAPPINGS_OF_DOMAIN: usize = 65_535;

/// Maximum number of mappings of all domains together. They take about 16 MiB.
pub const MAX_MAPPINGS: usize = 1 << 18;

/// A range of I/O addresses; its first address is the key under which it is stored.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Mapping {
    /// Last I/O address.
    pub last: u64,
    /// First guest-physical address.
    pub guest: u64,
    /// Permitted accesses.
    pub access: Access,
}

/// An address space.
#[derive(Clone, Debug, Default)]
pub struct Domain {
    /// Maps all of RAM at its own addresses; there are no mappings.
    pub bypass: bool,
    /// Mappings by first address; they do not overlap.
    pub mappings: BTreeMap<u64, Mapping>,
}

impl Domain {
    /// Whether any mapping overlaps the range.
    pub fn overlaps(&self, first: u64, last: u64) -> bool {
        self.last_within(first, last).is_some()
    }

    /// The last mapping that overlaps the range, with its first address.
    fn last_within(&self, first: u64, last: u64) -> Option<(u64, &Mapping)> {
        let (at, mapping) = self.mappings.range(..=last).next_back()?;
        (mapping.last >= first).then_some((*at, mapping))
    }
}

/// Whether another thread waits for the current request to end.
type Hurried = dyn Fn() -> bool + Send;

/// Minimum time that a request runs before it may be cut short.
const LONG: Duration = Duration::from_secs(1);

/// A device behind the IOMMU.
struct Slot {
    endpoint: Arc<dyn Endpoint>,
    reserved: Vec<Reserved>,
    /// The device reaches all of RAM.
    identity: bool,
    /// The host failed to remove a mapping.
    broken: bool,
    /// The host has refused a mapping. Logged once, or a guest could flood the log.
    complained: bool,
}

impl Slot {
    /// Maps everything that a domain maps, or nothing. A guest can make this take long: after
    /// [`LONG`] it is aborted if `hurried` returns true.
    fn enter(&mut self, id: u32, domain: &Domain, hurried: &Hurried) -> Result<(), MapError> {
        self.reach_all(id, domain.bypass)?;
        let start = Instant::now();
        for (done, (&first, mapping)) in domain.mappings.iter().enumerate() {
            let mapped = match start.elapsed() > LONG && hurried() {
                true => Err(MapError::NoMemory(
                    "the machine waits for the virtual IOMMU".to_owned(),
                )),
                false => self.map(id, first, mapping),
            };
            if let Err(error) = mapped {
                if done > 0 {
                    self.clear(id);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// The first mapping of a domain that overlaps a reserved range of this endpoint, and that
    /// range.
    fn reserved_in(&self, domain: &Domain) -> Option<(RangeInclusive<u64>, RangeInclusive<u64>)> {
        let mut ranges = self.reserved.iter().map(|reserved| reserved.range.clone());
        ranges.find_map(|range| {
            let (first, mapping) = domain.last_within(*range.start(), *range.end())?;
            Some((first..=mapping.last, range))
        })
    }

    /// Checks that a saved domain can be mapped for this endpoint.
    fn check(&self, endpoint: u32, id: u32, domain: &Domain) -> Result<(), ReservedMapping> {
        match self.reserved_in(domain) {
            None => Ok(()),
            Some((mapping, reserved)) => Err(ReservedMapping {
                endpoint,
                domain: id,
                mapping,
                reserved,
            }),
        }
    }

    /// Removes everything that its domain maps.
    fn leave(&mut self, id: u32, domain: &Domain) {
        if !domain.mappings.is_empty() {
            self.clear(id);
        }
    }

    fn clear(&mut self, id: u32) {
        if let Err(error) = self.endpoint.clear() {
            self.give_up(id, "memory", &error);
        }
    }

    /// Removes some of the mappings of its domain.
    fn lose(&mut self, id: u32, gone: &BTreeMap<u64, Mapping>) {
        for (first, len) in runs(gone) {
            self.unmap(id, first, len);
        }
    }

    fn map(&mut self, id: u32, first: u64, mapping: &Mapping) -> Result<(), MapError> {
        // Cannot overflow: see `fits`.
        let len = mapping.last - first + 1;
        let mapped = self.endpoint.map(first, mapping.guest, len, mapping.access);
        mapped.inspect_err(|error| {
                if let MapError::Stuck(source) = error {
                    self.give_up(id, &format!("part of {len:#x} bytes at {first:#x}"), source);
                }
                if !std::mem::replace(&mut self.complained, true) {
                    let to = mapping.guest;
                    log::warn!("{len:#x} bytes of endpoint {id:#x} at {first:#x} are not mapped to {to:#x}: {error}");
                }
            })
    }

    fn unmap(&mut self, id: u32, first: u64, len: u64) {
        if let Err(error) = self.endpoint.unmap(first, len) {
            self.give_up(id, &format!("{len:#x} bytes at {first:#x}"), &error);
        }
    }

    /// Switches between reaching all of RAM and nothing; nothing else may be mapped.
    fn reach_all(&mut self, id: u32, all: bool) -> Result<(), MapError> {
        if self.identity == all {
            return Ok(());
        }
        match self.endpoint.identity(all) {
            Ok(()) => {
                self.identity = all;
                Ok(())
            }
            Err(error) => {
                if !all {
                    self.give_up(id, "RAM", &error);
                }
                Err(error)
            }
        }
    }

    fn give_up(&mut self, id: u32, what: &str, error: &dyn std::error::Error) {
        if !std::mem::replace(&mut self.broken, true) {
            log::error!(
                "the host does not let go of {what}, which is mapped for endpoint {id:#x} of the \
                 virtual IOMMU: unplug the device: {error}"
            );
        }
    }
}

/// All domains and endpoints.
pub struct Domains {
    hurried: Box<Hurried>,
    /// The last I/O address that can be mapped.
    last_address: u64,
    slots: BTreeMap<u32, Slot>,
    /// Domain by endpoint. After a restore it includes endpoints that have not been added yet.
    attached: BTreeMap<u32, u32>,
    domains: BTreeMap<u32, Domain>,
    /// Endpoints without a domain reach all of RAM.
    bypass: bool,
    /// Number of mappings of all domains.
    count: usize,
}

impl Default for Domains {
    fn default() -> Self {
        Self {
            hurried: Box::new(|| false),
            last_address: 0,
            slots: BTreeMap::new(),
            attached: BTreeMap::new(),
            domains: BTreeMap::new(),
            bypass: false,
            count: 0,
        }
    }
}

impl Domains {
    /// Sets the check by which long requests are cut short.
    pub fn set_hurried(&mut self, hurried: Box<Hurried>) {
        self.hurried = hurried;
    }

    /// Sets the last valid I/O address.
    pub fn set_last_address(&mut self, last: u64) {
        self.last_address = last;
    }

    /// Number of mappings.
    pub fn mappings(&self) -> usize {
        self.count
    }

    /// All domains.
    pub fn all(&self) -> &BTreeMap<u32, Domain> {
        &self.domains
    }

    /// Domain by endpoint.
    pub fn attached(&self) -> &BTreeMap<u32, u32> {
        &self.attached
    }

    /// Adds an endpoint; see [`super::Endpoints::add`].
    pub fn add(&mut self, id: u32, endpoint: Arc<dyn Endpoint>) -> Result<(), AddError> {
        let Entry::Vacant(vacant) = self.slots.entry(id) else {
            return Err(AddError::Taken(id));
        };
        let page = endpoint.page_size();
        if page > PAGE {
            return Err(AddError::PageSize(page));
        }
        let reserved = endpoint.reserved();
        if reserved.len() > MAX_RESERVED {
            return Err(AddError::TooFragmented(reserved.len()));
        }
        let mut slot = Slot {
            endpoint,
            reserved,
            identity: false,
            broken: false,
            complained: false,
        };
        let domain = self.attached.get(&id);
        match domain.and_then(|domain| Some((*domain, self.domains.get(domain)?))) {
            Some((number, domain)) => {
                slot.check(id, number, domain)?;
                slot.enter(id, domain, &self.hurried)?;
            }
            None => slot.reach_all(id, self.bypass)?,
        }
        vacant.insert(slot);
        Ok(())
    }

    /// Removes an endpoint.
    pub fn remove(&mut self, id: u32) {
        let domain = self.attached.remove(&id);
        if let Some(mut slot) = self.slots.remove(&id) {
            if let Some(domain) = domain.and_then(|domain| self.domains.get(&domain)) {
                slot.leave(id, domain);
            }
            // Errors are logged there.
            let _ = slot.reach_all(id, false);
        }
        self.forget_unused();
    }

    /// Sets whether endpoints without a domain reach all of RAM.
    pub fn set_bypass(&mut self, bypass: bool) {
        self.bypass = bypass;
        let slots = self.slots.keys().copied();
        let alone = slots.filter(|id| !self.attached.contains_key(id));
        for id in alone.collect::<Vec<_>>() {
            self.rest(id);
        }
    }

    /// Detaches all endpoints. Bypass is not applied to them until the next
    /// [`Domains::set_bypass`], because that may take long.
    pub fn reset(&mut self) {
        for (id, domain) in std::mem::take(&mut self.attached) {
            self.leave(id, domain);
        }
        self.domains.clear();
        self.count = 0;
    }

    /// The reserved ranges of an endpoint.
    pub fn reserved(&self, id: u32) -> Result<&[Reserved], Status> {
        let slot = self.slots.get(&id).ok_or(Status::NoEntry)?;
        Ok(&slot.reserved)
    }

    /// Attaches an endpoint to a domain, which is created if it does not exist (5.13.6.3).
    pub fn attach(&mut self, id: u32, to: u32, bypass: bool) -> Result<(), Status> {
        let slot = self.slots.get(&id).ok_or(Status::NoEntry)?;
        if to >= DOMAINS {
            return Err(Status::Range);
        }
        if slot.broken {
            return Err(Status::Device);
        }
        if let Some(domain) = self.domains.get(&to) {
            if domain.bypass != bypass {
                return Err(Status::Invalid);
            }
            if slot.reserved_in(domain).is_some() {
                return Err(Status::Unsupported);
            }
        }
        match self.attached.get(&id) {
            Some(from) if *from == to => return Ok(()),
            Some(from) => {
                let from = *from;
                self.leave(id, from);
                self.attached.remove(&id);
                self.forget_unused();
            }
            None => {}
        }
        let Some(slot) = self.slots.get_mut(&id).filter(|slot| !slot.broken) else {
            return Err(Status::Device);
        };
        let domain = self.domains.entry(to).or_insert_with(|| Domain {
            bypass,
            ..Domain::default()
        });
        let entered = slot.enter(id, domain, &self.hurried);
        if entered.is_ok() {
            self.attached.insert(id, to);
        } else {
            self.forget_unused();
            self.rest(id);
        }
        Ok(entered?)
    }

    /// Detaches an endpoint from a domain. The domain ceases to exist with its last endpoint.
    pub fn detach(&mut self, id: u32, from: u32) -> Result<(), Status> {
        if !self.slots.contains_key(&id) {
            return Err(Status::NoEntry);
        }
        if self.attached.get(&id) != Some(&from) {
            return Err(Status::Invalid);
        }
        self.leave(id, from);
        self.attached.remove(&id);
        self.forget_unused();
        self.rest(id);
        self.sound(id)
    }

    /// Maps a range for all endpoints of a domain, or for none (5.13.6.5).
    pub fn map(&mut self, to: u32, first: u64, mapping: Mapping) -> Result<(), Status> {
        let domain = self.domains.get_mut(&to).ok_or(Status::NoEntry)?;
        let Mapping {
            last,
            guest,
            access,
        } = mapping;
        if domain.bypass || last < first || !(access.read || access.write) {
            return Err(Status::Invalid);
        }
        let aligned = [first, guest, last.wrapping_add(1)];
        if aligned.iter().any(|at| !at.is_multiple_of(PAGE)) || last > self.last_address {
            return Err(Status::Range);
        }
        if !fits(first, last, guest) {
            return Err(Status::Fault);
        }
        if domain.overlaps(first, last) {
            return Err(Status::Invalid);
        }
        let within: Vec<_> = members(&self.attached, to)
            .filter(|id| self.slots.contains_key(id))
            .collect();
        let reserved =
            |other: &Reserved| *other.range.start() <= last && first <= *other.range.end();
        let mut slots = within.iter().filter_map(|id| self.slots.get(id));
        if slots.any(|slot| slot.reserved.iter().any(reserved)) {
            return Err(Status::Range);
        }
        if domain.mappings.len() >= MAX_MAPPINGS_OF_DOMAIN || self.count >= MAX_MAPPINGS {
            return Err(Status::NoMemory);
        }
        for (done, id) in within.iter().enumerate() {
            let Some(slot) = self.slots.get_mut(id) else {
                continue;
            };
            if let Err(error) = slot.map(*id, first, &mapping) {
                for id in &within[..done] {
                    if let Some(slot) = self.slots.get_mut(id) {
                        slot.unmap(*id, first, last - first + 1);
                    }
                }
                self.expel_broken();
                return Err(error.into());
            }
        }
        domain.mappings.insert(first, mapping);
        self.count += 1;
        Ok(())
    }

    /// Removes all mappings within a range; none, if one of them is only partly in it (5.13.6.6).
    pub fn unmap(&mut self, from: u32, first: u64, last: u64) -> Result<(), Status> {
        let domain = self.domains.get_mut(&from).ok_or(Status::NoEntry)?;
        if domain.bypass || last < first {
            return Err(Status::Invalid);
        }
        let before = domain.mappings.range(..first).next_back();
        let within = || domain.mappings.range(first..=last);
        let ends_in = |mapping: &Mapping| mapping.last <= last;
        if before.is_some_and(|(_, before)| before.last >= first)
            || within()
                .next_back()
                .is_some_and(|(_, mapping)| !ends_in(mapping))
        {
            return Err(Status::Range);
        }
        let gone: BTreeMap<u64, Mapping> = within().map(|(at, mapping)| (*at, *mapping)).collect();
        for at in gone.keys() {
            domain.mappings.remove(at);
        }
        self.count -= gone.len();
        for id in members(&self.attached, from) {
            if let Some(slot) = self.slots.get_mut(&id) {
                slot.lose(id, &gone);
            }
        }
        if self.expel_broken() {
            return Err(Status::Device);
        }
        Ok(())
    }

    /// Replaces the domains by saved ones. Present endpoints get their mappings now, others when
    /// they are added.
    pub fn restore(
        &mut self,
        bypass: bool,
        domains: BTreeMap<u32, Domain>,
        attached: BTreeMap<u32, u32>,
    ) -> Result<(), AddError> {
        for (id, number) in &attached {
            if let (Some(slot), Some(domain)) = (self.slots.get(id), domains.get(number)) {
                slot.check(*id, *number, domain)?;
            }
        }
        self.reset();
        self.count = domains.values().map(|domain| domain.mappings.len()).sum();
        self.domains = domains;
        self.attached = attached;
        for (id, slot) in &mut self.slots {
            let domain = self.attached.get(id);
            if let Some(domain) = domain.and_then(|domain| self.domains.get(domain)) {
                slot.enter(*id, domain, &self.hurried)?;
            }
        }
        self.set_bypass(bypass);
        Ok(())
    }

    /// Removes an endpoint's mappings of its domain.
    fn leave(&mut self, id: u32, domain: u32) {
        if let (Some(slot), Some(domain)) = (self.slots.get_mut(&id), self.domains.get(&domain)) {
            slot.leave(id, domain);
            if domain.bypass && !self.bypass {
                // Errors are logged there.
                let _ = slot.reach_all(id, false);
            }
        }
    }

    /// Applies bypass to an endpoint without a domain: it reaches all of RAM or nothing.
    fn rest(&mut self, id: u32) {
        let bypass = self.bypass;
        if let Some(slot) = self.slots.get_mut(&id).filter(|slot| !slot.broken)
            && let Err(error) = slot.reach_all(id, bypass)
            && !std::mem::replace(&mut slot.complained, true)
        {
            log::warn!("endpoint {id:#x} does not reach RAM: {error}");
        }
    }

    fn sound(&self, id: u32) -> Result<(), Status> {
        match self.slots.get(&id) {
            Some(slot) if slot.broken => Err(Status::Device),
            _ => Ok(()),
        }
    }

    /// Detaches the endpoints whose mappings the host failed to remove. Returns whether there were
    /// any.
    fn expel_broken(&mut self) -> bool {
        let broken = self.slots.iter().filter(|(_, slot)| slot.broken);
        let ids: Vec<_> = broken.map(|(id, _)| *id).collect();
        let mut any = false;
        for id in ids {
            if let Some(domain) = self.attached.get(&id) {
                self.leave(id, *domain);
                self.attached.remove(&id);
                any = true;
            }
        }
        self.forget_unused();
        any
    }

    /// Removes domains without endpoints: they cease to exist.
    fn forget_unused(&mut self) {
        let Self {
            attached,
            domains,
            count,
            ..
        } = self;
        domains.retain(|id, domain| {
            let used = members(attached, *id).next().is_some();
            if !used {
                *count -= domain.mappings.len();
            }
            used
        });
    }
}

/// Whether the mapping's length, and its last guest-physical address, fit 64 bits.
pub fn fits(first: u64, last: u64, guest: u64) -> bool {
    last - first < u64::MAX && guest.checked_add(last - first).is_some()
}

/// The endpoints of a domain.
fn members(attached: &BTreeMap<u32, u32>, domain: u32) -> impl Iterator<Item = u32> {
    let of_domain = attached.iter().filter(move |(_, of)| **of == domain);
    of_domain.map(|(id, _)| *id)
}

/// Merges adjacent mappings into runs, as (first address, length). An endpoint unmaps each run with
/// one call.
fn runs(mappings: &BTreeMap<u64, Mapping>) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (&first, mapping) in mappings {
        let len = mapping.last - first + 1;
        match runs.last_mut() {
            Some((start, run))
                if start.checked_add(*run) == Some(first) && run.checked_add(len).is_some() =>
            {
                *run += len;
            }
            _ => runs.push((first, len)),
        }
    }
    runs
}
