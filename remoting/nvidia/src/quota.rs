//! How much video memory programs may have, all together, and how much they have.
//!
//! What is counted: video memory that programs allocate, for as long as any object keeps it (a duplicate, an object that
//! was made of it, a file that it was exported to), and a constant for the driver's own buffers of each channel group
//! and channel. A GPU's mapping by unified memory keeps it as well. Not counted: page tables, and what is in slices.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use nvidia_abi::Call;
use remoting_transport::account as port;

use crate::{
    call::VIDEO,
    check::{long, put, word},
};

/// A channel group, and the bytes of the driver's buffers for it: about 9 MiB for the four of a context (H200).
const GROUP: u32 = 0xa06c;
const GROUP_BYTES: u64 = 9 << 18;
/// Channels of all generations end with this byte. The driver's buffers for one.
const CHANNEL: u32 = 0x6f;
const CHANNEL_BYTES: u64 = 1 << 16;
/// Where the block of video memory has its size.
const SIZE_AT: usize = 64;
/// What a GPU's memory has: pairs of an index and a value.
pub const MEMORY_INFO: u32 = 0x2080_1303;
const MOST_PAIRS: usize = 128;
/// Indices of sizes in KiB (NV2080_CTRL_FB_INFO_INDEX in the vendor's ctrl2080fb.h; those that libcuda and NVML ask for): of
/// memory, of all memory, of the heap, of usable memory; of free memory.
const TOTALS: [u32; 4] = [7, 8, 9, 0x20];
const FREE: u32 = 0x16;
/// The most that an object keeps of other objects' video memory, by way of others, too. Programs name an object in another
/// one, free it, name that one in a third: without a bound this would go on for ever.
const MOST_KEPT: usize = 1024;

/// The video memory of all programs.
#[derive(Debug)]
pub struct Account {
    limit: Option<u64>,
    used: AtomicU64,
    /// What a machine sees of it.
    port: Option<port::Account>,
}

/// A port of this worker's has one slice.
const SLICE: u32 = 0;

/// Video memory that is counted until the last copy of this is gone.
#[derive(Clone)]
pub struct Charge {
    counted: Arc<Counted>,
}

struct Counted {
    account: Arc<Account>,
    bytes: AtomicU64,
    /// What else is kept.
    _kept: Vec<Charge>,
    /// How many of these are kept by way of this one, with itself.
    count: usize,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let bytes = self.bytes.load(Ordering::Relaxed);
        self.account.used.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(port) = &self.account.port {
            port.remove(SLICE, bytes);
        }
    }
}

impl Account {
    /// Nothing is used. `limit`: bytes; `None`: what the devices have.
    pub fn new(limit: Option<u64>) -> Arc<Self> {
        Arc::new(Self {
            limit,
            used: AtomicU64::new(0),
            port: None,
        })
    }

    /// Nothing is used. A machine sees what is.
    pub fn of_port(limit: Option<u64>, port: port::Account) -> Arc<Self> {
        Arc::new(Self {
            limit,
            used: AtomicU64::new(0),
            port: Some(port),
        })
    }

    /// Bytes that are in use.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Counts bytes, and keeps what else is counted. `None`: the limit does not allow it, or it would keep too much.
    pub fn charge(self: &Arc<Self>, bytes: u64, kept: Vec<Charge>) -> Option<Charge> {
        let counts = kept.iter().map(|charge| charge.counted.count);
        let count = counts.fold(1, usize::saturating_add);
        if count > MOST_KEPT {
            return None;
        }
        let limit = self.limit.unwrap_or(u64::MAX);
        let fits = |used: &u64| bytes == 0 || *used <= limit;
        let more = |used: u64| used.checked_add(bytes).filter(fits);
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .ok()?;
        self.publish(bytes);
        Some(Charge {
            counted: Arc::new(Counted {
                account: self.clone(),
                bytes: AtomicU64::new(bytes),
                _kept: kept,
                count,
            }),
        })
    }

    /// Shows the machine that there are so many bytes more.
    fn publish(&self, bytes: u64) {
        if let Some(port) = &self.port {
            port.add(SLICE, bytes, u64::MAX);
        }
    }

    /// Puts the limit into what a GPU says of its memory: `block` is that of [`MEMORY_INFO`].
    pub fn show(&self, block: &mut [u8]) {
        let Some(limit) = self.limit else { return };
        let kib = |bytes: u64| u32::try_from(bytes >> 10).unwrap_or(u32::MAX);
        let (total, free) = (kib(limit), kib(limit.saturating_sub(self.used())));
        for pair in 0..MOST_PAIRS.min(word(block, 0) as usize) {
            let at = 4 + 8 * pair;
            let most = match word(block, at) {
                index if TOTALS.contains(&index) => total,
                FREE => free,
                _ => continue,
            };
            let value = word(block, at + 4).min(most);
            put(block, at + 4, value.to_le_bytes());
        }
    }
}

impl Charge {
    /// The driver has given more than was asked for. Answers whether the limit allows it.
    pub fn raise_to(&self, bytes: u64) -> bool {
        let counted = &self.counted;
        let before = counted.bytes.fetch_max(bytes, Ordering::Relaxed);
        let more = bytes.saturating_sub(before);
        let used = counted.account.used.fetch_add(more, Ordering::Relaxed);
        counted.account.publish(more);
        let limit = counted.account.limit.unwrap_or(u64::MAX);
        more == 0 || used.saturating_add(more) <= limit
    }
}

/// The bytes that an object of a class takes, by the block that asks for it.
pub fn bytes_of(class: u32, call: &Call, bytes: &[u8]) -> u64 {
    match class {
        VIDEO => call
            .inner_block()
            .map_or(0, |block| long(bytes, block.start + SIZE_AT)),
        GROUP => GROUP_BYTES,
        class if class & 0xff == CHANNEL => CHANNEL_BYTES,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_counts_until_nothing_keeps_it() {
        let account = Account::new(Some(100));
        let first = account.charge(60, Vec::new()).expect("there is room");
        assert!(account.charge(41, Vec::new()).is_none());
        let second = account
            .charge(40, vec![first.clone()])
            .expect("there is room");
        drop(first);
        assert_eq!(account.used(), 100);
        assert!(!second.raise_to(50));
        assert!(second.raise_to(45), "it is no more");
        assert_eq!(account.used(), 110);
        assert!(account.charge(1, Vec::new()).is_none());
        drop(account.charge(0, Vec::new()).expect("it takes nothing"));
        drop(second);
        assert_eq!(account.used(), 0);
        assert!(account.charge(u64::MAX, Vec::new()).is_none());
        let all = Account::new(None);
        let _all = all.charge(u64::MAX, Vec::new()).expect("there is no limit");
        assert!(all.charge(1, Vec::new()).is_none());
    }

    #[test]
    fn what_is_kept_by_way_of_others_has_a_bound() {
        let account = Account::new(None);
        let mut last = account.charge(1, Vec::new()).expect("there is room");
        for _ in 1..MOST_KEPT {
            last = account.charge(1, vec![last]).expect("it is not too much");
        }
        assert!(account.charge(0, vec![last.clone()]).is_none());
        assert_eq!(account.used(), MOST_KEPT as u64);
        drop(last);
        assert_eq!(account.used(), 0);
    }

    #[test]
    fn a_gpu_shows_at_most_the_limit() {
        let block = |pairs: &[(u32, u32)]| {
            let mut block = vec![0; 4 + 8 * MOST_PAIRS];
            put(&mut block, 0, (pairs.len() as u32).to_le_bytes());
            for (at, (index, value)) in pairs.iter().enumerate() {
                put(&mut block, 4 + 8 * at, index.to_le_bytes());
                put(&mut block, 8 + 8 * at, value.to_le_bytes());
            }
            block
        };
        let account = Account::new(Some(8 << 20));
        let _used = account.charge(1 << 20, Vec::new()).expect("there is room");
        let mut shown = block(&[(8, 140_000), (0x16, 139_000), (9, 4_000), (5, 99_000)]);
        account.show(&mut shown);
        assert_eq!(
            shown,
            block(&[(8, 8192), (0x16, 7168), (9, 4_000), (5, 99_000)])
        );
        // More pairs than there are.
        put(&mut shown, 0, u32::MAX.to_le_bytes());
        account.show(&mut shown);
        let mut as_it_was = shown.clone();
        Account::new(None).show(&mut as_it_was);
        assert_eq!(shown, as_it_was);
    }
}
