//! What is known about devices.

use base::{
    gpus::{Address, Gpu, Selection},
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
    pub fn all(driver: &Driver, wanted: &Selection, memory: bool) -> Result<Vec<Self>, Error> {
        let count = driver.count().map_err(Error::Driver)?;
        let all = (0..count).map(|index| Self::of(driver, index, count));
        let all = all.collect::<Result<Vec<_>, _>>().map_err(Error::Driver)?;
        let gpus: Vec<_> = all.iter().map(Self::gpu).collect();
        let chosen = wanted.of(&gpus).map_err(Error::NoDevice)?;
        let is_wanted = |facts: &Self| chosen.contains(&facts.index);
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
    fn a_device_has_what_it_is_selected_by() {
        let gpus = [Facts::example(0).gpu(), Facts::example(1).gpu()];
        for text in ["1", "GPU-01020304-0506-0708-090A-0B0C0D0E0F01", "0c:00.0"] {
            let selection: Selection = text.parse().unwrap();
            assert_eq!(selection.of(&gpus), Ok(vec![1]), "{text}");
        }
    }
}
