//! What is known about devices.

use base::{
    gpus::{Address, Gpu, List, Name, Selection, Unmatched},
    note::printable,
};
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
    /// The facts of all wanted devices, in the driver's order. Free memory is queried only with `memory`.
    pub fn all(driver: &Driver, wanted: &[Name], memory: bool) -> Result<Vec<Self>, Error> {
        let count = driver.count().map_err(Error::Driver)?;
        let all = (0..count).map(|index| Self::of(driver, index, count));
        let all = all.collect::<Result<Vec<_>, _>>().map_err(Error::Driver)?;
        let chosen = Self::chosen(&all, wanted).map_err(Error::NoDevice)?;
        let is_wanted = |facts: &Self| wanted.is_empty() || chosen.contains(&facts.index);
        let mut all: Vec<_> = all.into_iter().filter(is_wanted).collect();
        for facts in all.iter_mut().filter(|_| memory) {
            // There may be no memory for the context that this needs.
            let asked = driver.device(facts.index);
            let asked = asked.and_then(|device| device.memory_of_context());
            facts.free = asked.ok().map(|(free, _)| free);
        }
        Ok(all)
    }

    /// The indices of wanted devices. An index is the one that is printed: the driver's, as for nvidia-smi.
    fn chosen(all: &[Self], wanted: &[Name]) -> Result<Vec<usize>, Unmatched> {
        let gpus: Vec<_> = all.iter().map(Self::gpu).collect();
        let mut chosen = Vec::new();
        for name in wanted {
            match name {
                Name::Index(index) if *index < all.len() => chosen.push(*index),
                Name::Index(_) => {
                    let (name, all) = (name.clone(), List(gpus));
                    return Err(Unmatched::None { name, all });
                }
                _ => chosen.extend(Selection::from_iter([name.clone()]).of(&gpus)?),
            }
        }
        Ok(chosen)
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

    /// What a device is selected by.
    fn gpu(&self) -> Gpu {
        let address = self.address.and_then(|(domain, bus, device)| {
            Some(Address {
                domain,
                bus: bus.try_into().ok()?,
                device: device.try_into().ok()?,
            })
        });
        Gpu {
            name: self.name.clone(),
            uuid: Some(self.uuid.clone()),
            address,
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_selected_by_the_index_that_is_printed() {
        let mut all = [Facts::example(0), Facts::example(1)];
        // The driver's order is not that of addresses.
        (all[0].address, all[1].address) = (all[1].address, all[0].address);
        for (text, index) in [
            ("0", 0),
            ("1", 1),
            ("GPU-01020304-0506-0708-090A-0B0C0D0E0F01", 1),
            ("0c:00.0", 0),
        ] {
            let wanted: Name = text.parse().unwrap();
            assert_eq!(Facts::chosen(&all, &[wanted]), Ok(vec![index]), "{text}");
        }
        let refused = Facts::chosen(&all, &[Name::Index(2)]).unwrap_err();
        assert!(refused.to_string().starts_with("no GPU matches '2'"));
    }
}
