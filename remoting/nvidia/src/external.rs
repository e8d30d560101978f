//! Video memory that GPUs map by a file of unified memory: the driver keeps it as long as it is mapped, even if its object
//! is freed. So it keeps the buffers of channels that are registered with the file.

use std::collections::{BTreeMap, HashMap};

use base::Unpoisoned;
use nvidia_abi::status;

use crate::{
    call::Made,
    check::{Denied, long, word},
    files::{Attributes, Uuid},
    quota::Charge,
    session::Session,
};

/// Where a mapping has its GPUs, their number, and the memory: client and object.
const ATTRIBUTES: usize = 24;
const ATTRIBUTES_COUNT: usize = 9240;
const MEMORY: [usize; 2] = [9252, 9256];
/// Where an unmapping has its GPU.
const GPU_AT: usize = 16;
/// The most parts of a file.
const MOST: usize = 1 << 16;

/// The most ranges of a file.
const MOST_RANGES: usize = 1 << 20;

/// What GPUs map.
#[derive(Default)]
pub struct External {
    /// Parts of addresses: the end and the memory, by GPU and start. Those of one GPU do not overlap.
    parts: BTreeMap<(Uuid, u64), (u64, Charge)>,
    /// Ranges of addresses, which parts lie in: the length by the start. Who frees one names its start: the driver need not
    /// look at a length.
    ranges: BTreeMap<u64, u64>,
    /// Buffers of registered channels, by GPU, client and handle. A channel that was freed may have had the same handle.
    channels: HashMap<(Uuid, [u32; 2]), Vec<Charge>>,
    /// How many registrations these are.
    registrations: usize,
}

impl External {
    /// A GPU maps memory, in place of what it mapped there.
    fn map(&mut self, gpu: Uuid, base: u64, length: u64, charge: Option<&Charge>) {
        self.unmap(gpu, base, length);
        if let (Some(charge), 1..) = (charge, length) {
            let part = (base.saturating_add(length), charge.clone());
            self.parts.insert((gpu, base), part);
        }
    }

    /// A GPU does not map these addresses any longer. What is left of a part keeps all of its memory.
    fn unmap(&mut self, gpu: Uuid, base: u64, length: u64) {
        let end = base.saturating_add(length);
        let reached = self.parts.range((gpu, 0)..(gpu, end)).rev();
        let cut: Vec<u64> = reached
            .take_while(|(_, (part_end, _))| *part_end > base)
            .map(|((_, start), _)| *start)
            .collect();
        for start in cut {
            let Some((part_end, charge)) = self.parts.remove(&(gpu, start)) else {
                continue;
            };
            if start < base {
                // Without room for two parts it stays one: rather too much is counted.
                let is_split = part_end <= end || self.parts.len() + 1 < MOST;
                let left_end = if is_split { base } else { part_end };
                self.parts.insert((gpu, start), (left_end, charge.clone()));
                if !is_split {
                    continue;
                }
            }
            if part_end > end {
                self.parts.insert((gpu, end), (part_end, charge));
            }
        }
    }

    /// No GPU maps a range any longer.
    pub fn free(&mut self, base: u64) {
        let Some(length) = self.ranges.remove(&base) else {
            return;
        };
        for gpu in self.gpus() {
            self.unmap(gpu, base, length);
        }
    }

    fn gpus(&self) -> Vec<Uuid> {
        let mut gpus: Vec<_> = self.parts.keys().map(|(gpu, _)| *gpu).collect();
        gpus.dedup();
        gpus
    }

    /// A GPU does not map anything any longer.
    pub fn forget(&mut self, gpu: Uuid) {
        self.parts.retain(|(of, _), _| *of != gpu);
        self.channels.retain(|(of, _), _| *of != gpu);
        self.registrations = self.channels.values().map(Vec::len).sum();
    }
}

impl Session {
    /// Has GPUs map memory, which counts as long as they do.
    pub fn map_external(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let (base, length) = (long(bytes, 0), long(bytes, 8));
        let [client, handle] = MEMORY.map(|at| word(bytes, at));
        let listed = bytes[ATTRIBUTES..ATTRIBUTES_COUNT].chunks_exact(size_of::<Attributes>());
        let gpus = listed.filter_map(|listed| listed.first_chunk().copied());
        // The driver refuses more than there can be.
        let gpus: Vec<Uuid> = gpus.take(long(bytes, ATTRIBUTES_COUNT) as usize).collect();
        let mut objects = self.worker().objects.lock_unpoisoned();
        let object = objects
            .client(client)
            .and_then(|client| client.object(handle));
        let charge = object.and_then(|object| object.charge.clone());
        drop(objects);
        if charge.is_some() && made.file.left().external.parts.len() + gpus.len() > MOST {
            return Err(Denied::Status(status::INSUFFICIENT_RESOURCES));
        }
        let result = self.issue(made, bytes)?;
        if Self::is_done(made, result, bytes) {
            let mut left = made.file.left();
            for gpu in gpus {
                left.external.map(gpu, base, length, charge.as_ref());
            }
        }
        Ok(result)
    }

    /// Has a GPU map some addresses no longer.
    pub fn unmap_external(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let (base, length) = (long(bytes, 0), long(bytes, 8));
        let gpu = bytes[GPU_AT..].first_chunk().copied().unwrap_or_default();
        let result = self.issue(made, bytes)?;
        if Self::is_done(made, result, bytes) {
            made.file.left().external.unmap(gpu, base, length);
        }
        Ok(result)
    }

    /// Registers a channel: its buffers, and those of its group, stay.
    pub fn register_channel(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let gpu = bytes.first_chunk().copied().unwrap_or_default();
        let [client, channel] = [20, 24].map(|at| word(bytes, at));
        let mut objects = self.worker().objects.lock_unpoisoned();
        let kept = objects.client(client).and_then(|client| {
            let channel = client.object(channel)?;
            let (parent, charge) = (channel.parent, channel.charge.clone());
            let group = client.object(parent).and_then(|group| group.charge.clone());
            Some(charge.into_iter().chain(group).collect::<Vec<_>>())
        });
        drop(objects);
        if made.file.left().external.registrations >= MOST {
            return Err(Denied::Status(status::INSUFFICIENT_RESOURCES));
        }
        let result = self.issue(made, bytes)?;
        if Self::is_done(made, result, bytes) {
            let mut left = made.file.left();
            let external = &mut left.external;
            let known = external
                .channels
                .entry((gpu, [client, channel]))
                .or_default();
            let before = known.len();
            known.extend(kept.into_iter().flatten());
            external.registrations += known.len() - before;
        }
        Ok(result)
    }

    /// Unregisters a channel.
    pub fn unregister_channel(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let gpu = bytes.first_chunk().copied().unwrap_or_default();
        let channel = [16, 20].map(|at| word(bytes, at));
        let result = self.issue(made, bytes)?;
        if Self::is_done(made, result, bytes) {
            let mut left = made.file.left();
            let gone = left.external.channels.remove(&(gpu, channel));
            left.external.registrations -= gone.map_or(0, |gone| gone.len());
        }
        Ok(result)
    }

    /// Makes a range of addresses in which GPUs may map memory.
    pub fn create_range(&mut self, made: &Made<'_>, bytes: &mut [u8]) -> Result<i32, Denied> {
        let (base, length) = (long(bytes, 0), long(bytes, 8));
        if made.file.left().external.ranges.len() >= MOST_RANGES {
            return Err(Denied::Status(status::INSUFFICIENT_RESOURCES));
        }
        let result = self.issue(made, bytes)?;
        if Self::is_done(made, result, bytes) {
            made.file.left().external.ranges.insert(base, length);
        }
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::Account;

    const ONE: Uuid = [1; 16];
    const TWO: Uuid = [2; 16];

    #[test]
    fn memory_counts_while_a_part_of_it_is_mapped() {
        let account = Account::new(None);
        let mut external = External::default();
        let memory = || account.charge(10, Vec::new()).expect("there is no limit");
        let charge = memory();
        external.map(ONE, 100, 50, Some(&charge));
        external.map(TWO, 100, 50, Some(&charge));
        drop(charge);
        external.unmap(ONE, 0, 1000);
        external.unmap(TWO, 110, 20);
        let parts: Vec<_> = external
            .parts
            .iter()
            .map(|(at, part)| (at.1, part.0))
            .collect();
        assert_eq!(parts, [(100, 110), (130, 150)]);
        external.unmap(TWO, 100, 10);
        external.unmap(TWO, 140, 100);
        external.unmap(TWO, 150, u64::MAX);
        assert_eq!(account.used(), 10, "130 to 140 is mapped");
        let other = memory();
        external.map(TWO, 120, 30, Some(&other));
        drop(other);
        assert_eq!(account.used(), 10, "the other memory took its place");
        external.map(TWO, 120, 15, None);
        external.free(135);
        assert_eq!(account.used(), 10, "the address is not that of a range");
        external.ranges.insert(100, 50);
        external.free(100);
        assert_eq!(account.used(), 0);
        let charge = memory();
        external.map(ONE, u64::MAX - 1, 5, Some(&charge));
        external.map(TWO, 0, 1, Some(&charge));
        drop(charge);
        external.forget(TWO);
        assert_eq!(account.used(), 10);
        external.forget(ONE);
        assert_eq!(account.used(), 0);
    }
}
