//! Video memory that GPUs map by a file of unified memory: the driver keeps it as long as it is mapped, even if its object
//! is freed.

use std::collections::BTreeMap;

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

/// Parts of addresses that GPUs map: the end and the memory, by GPU and start. Those of one GPU do not overlap.
#[derive(Default)]
pub struct External(BTreeMap<(Uuid, u64), (u64, Charge)>);

impl External {
    /// A GPU maps memory, in place of what it mapped there.
    fn map(&mut self, gpu: Uuid, base: u64, length: u64, charge: Option<&Charge>) {
        self.unmap(gpu, base, length);
        if let (Some(charge), 1..) = (charge, length) {
            let part = (base.saturating_add(length), charge.clone());
            self.0.insert((gpu, base), part);
        }
    }

    /// A GPU does not map these addresses any longer. What is left of a part keeps all of its memory.
    fn unmap(&mut self, gpu: Uuid, base: u64, length: u64) {
        let end = base.saturating_add(length);
        let reached = self.0.range((gpu, 0)..(gpu, end)).rev();
        let cut: Vec<u64> = reached
            .take_while(|(_, (part_end, _))| *part_end > base)
            .map(|((_, start), _)| *start)
            .collect();
        for start in cut {
            let Some((part_end, charge)) = self.0.remove(&(gpu, start)) else {
                continue;
            };
            if start < base {
                // Without room for two parts it stays one: rather too much is counted.
                let is_split = part_end <= end || self.0.len() + 1 < MOST;
                let left_end = if is_split { base } else { part_end };
                self.0.insert((gpu, start), (left_end, charge.clone()));
                if !is_split {
                    continue;
                }
            }
            if part_end > end {
                self.0.insert((gpu, end), (part_end, charge));
            }
        }
    }

    /// No GPU maps these addresses any longer.
    fn free(&mut self, base: u64, length: u64) {
        for gpu in self.gpus() {
            self.unmap(gpu, base, length);
        }
    }

    fn gpus(&self) -> Vec<Uuid> {
        let mut gpus: Vec<_> = self.0.keys().map(|(gpu, _)| *gpu).collect();
        gpus.dedup();
        gpus
    }

    /// A GPU does not map anything any longer.
    pub fn forget(&mut self, gpu: Uuid) {
        self.0.retain(|(of, _), _| *of != gpu);
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
        if charge.is_some() && made.file.left().external.0.len() + gpus.len() > MOST {
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

    /// A range of addresses was freed.
    pub fn forget_external(&self, made: &Made<'_>, base: u64, length: u64) {
        made.file.left().external.free(base, length);
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
        let parts: Vec<_> = external.0.iter().map(|(at, part)| (at.1, part.0)).collect();
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
        external.free(135, 15);
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
