//! What is known about devices, and selectors of devices.

use std::{fmt, str::FromStr};

use base::note::printable;
use gantry_nvml::{address, driver::Driver, nvmlReturn_t};

use crate::Error;

/// What is known about a device.
#[derive(Clone, Debug)]
pub struct Facts {
    pub index: usize,
    /// The number of devices.
    pub count: usize,
    pub name: String,
    pub uuid: String,
    /// The domain, bus and device.
    pub address: Option<(u32, u32, u32)>,
    pub capability: (i32, i32),
    /// The total memory in bytes.
    pub total: u64,
    /// The free memory in bytes, if it was requested and is known.
    pub free: Option<u64>,
}

impl Facts {
    /// The facts of all wanted devices. Free memory is queried only with `memory`.
    pub fn all(driver: &Driver, wanted: &[Selector], memory: bool) -> Result<Vec<Self>, Error> {
        let count = driver.count().map_err(Error::Driver)?;
        let all = (0..count).map(|index| Self::of(driver, index, count));
        let all = all.collect::<Result<Vec<_>, _>>().map_err(Error::Driver)?;
        if let Some(none) = (wanted.iter()).find(|one| !all.iter().any(|facts| one.names(facts))) {
            return Err(Error::NoDevice(none.clone()));
        }
        let is_wanted =
            |facts: &Self| wanted.is_empty() || wanted.iter().any(|one| one.names(facts));
        let mut all: Vec<_> = all.into_iter().filter(is_wanted).collect();
        for facts in all.iter_mut().filter(|_| memory) {
            // There may be no memory for the context that this needs.
            let asked = driver.device(facts.index);
            let asked = asked.and_then(|device| device.memory_of_context());
            facts.free = asked.ok().map(|(free, _)| free);
        }
        Ok(all)
    }

    fn of(driver: &Driver, index: usize, count: usize) -> Result<Self, nvmlReturn_t> {
        let device = driver.device(index)?;
        Ok(Self {
            index,
            count,
            address: address(&device.bus),
            capability: device.capability,
            total: device.total()?,
            free: None,
            // The name as sent by the other side.
            name: printable(device.name),
            uuid: device.uuid,
        })
    }

    /// The used memory in bytes.
    pub fn used(&self) -> Option<u64> {
        Some(self.total.saturating_sub(self.free?))
    }

    #[cfg(test)]
    pub fn example(index: usize) -> Self {
        Self {
            index,
            count: 2,
            name: "NVIDIA H100 80GB HBM3".to_owned(),
            uuid: format!("GPU-01020304-0506-0708-090a-0b0c0d0e0f0{index}"),
            address: Some((0, 0xb + index as u32, 0)),
            capability: (9, 0),
            total: 81_559 << 20,
            free: (index == 0).then_some(81_000 << 20),
        }
    }
}

/// Identifies a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    Index(usize),
    /// A UUID or a prefix of one.
    Uuid(String),
    Address((u32, u32, u32)),
}

impl Selector {
    /// The prefix of UUIDs and eight digits: less would hardly distinguish devices.
    const LEAST: usize = "GPU-".len() + 8;

    fn names(&self, facts: &Facts) -> bool {
        match self {
            Self::Index(index) => facts.index == *index,
            Self::Uuid(start) => facts.uuid.starts_with(start.as_str()),
            Self::Address(address) => facts.address == Some(*address),
        }
    }
}

impl FromStr for Selector {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let index = text.parse().map(Self::Index).ok();
        let uuid = || text.starts_with("GPU-") && text.len() >= Self::LEAST;
        let uuid =
            || uuid().then(|| Self::Uuid(text.to_ascii_lowercase().replacen("gpu", "GPU", 1)));
        let named = index.or_else(uuid);
        let named = named.or_else(|| address(text).map(Self::Address));
        named.ok_or(
            "neither an index (0), nor a UUID (GPU- and eight digits at least), nor a PCI address (0000:01:00.0)",
        )
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => write!(to, "{index}"),
            Self::Uuid(start) => to.write_str(start),
            Self::Address((domain, bus, slot)) => write!(to, "{domain:04x}:{bus:02x}:{slot:02x}.0"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_by_index_uuid_and_address() {
        let devices = [Facts::example(0), Facts::example(1)];
        let named = |text: &str| {
            let selector: Selector = text.parse().unwrap();
            devices.each_ref().map(|facts| selector.names(facts))
        };
        assert_eq!(named("1"), [false, true]);
        assert_eq!(named("2"), [false, false]);
        assert_eq!(named("GPU-01020304"), [true, true]);
        assert_eq!(
            named("GPU-01020304-0506-0708-090A-0B0C0D0E0F01"),
            [false, true]
        );
        assert_eq!(named("0000:0b:00.0"), [true, false]);
        assert_eq!(named("00000000:0C:00.0"), [false, true]);
        for wrong in ["", "-1", "GPU-", "GPU-0102030", "0b:00.0", "all"] {
            assert!(wrong.parse::<Selector>().is_err(), "{wrong}");
        }
    }
}
