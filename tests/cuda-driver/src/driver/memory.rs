//! Device memory: one reserved address range. Allocations in it are separated by gaps, so that a
//! kernel that leaves its allocation is detected.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use cuda_definition::driver::types::CUresult;

use super::{Answer, MOST_DEVICES, Owner};
use crate::run::memory::Ranges;

/// Range in which Gantry wants device memory: a guest reserves these addresses.
const ARENA: std::ops::Range<u64> = 0x2000_0000_0000..0x3000_0000_0000;
/// Size in bytes of the reserved address range. Pages are allocated on first access.
const RESERVED: u64 = 64 << 30;
/// Step width of the search for a free range.
const STEP: u64 = 1 << 40;
/// Alignment of allocations.
const ALIGNMENT: u64 = 512;
/// Size in bytes of the unused gap between allocations.
const DISTANCE: u64 = 512;

/// The kind of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `cuMemAlloc` and pools.
    Device,
    /// A module's variables, which are freed with it.
    Module,
    /// `cuMemAllocManaged`
    Managed,
    /// `cuMemHostAlloc`
    Host,
    /// The caller's own memory, pinned by `cuMemHostRegister`.
    Registered,
}

impl Kind {
    /// Whether the host can access it directly.
    pub fn host(self) -> bool {
        matches!(self, Self::Managed | Self::Host | Self::Registered)
    }

    fn counted(self) -> bool {
        matches!(self, Self::Device | Self::Module | Self::Managed)
    }
}

/// An allocation.
#[derive(Clone, Copy, Debug)]
pub struct Allocation {
    pub start: u64,
    pub size: u64,
    pub kind: Kind,
    pub flags: u32,
    pub owner: Owner,
    /// Sequence number of the allocation.
    pub id: u64,
}

#[derive(Default)]
struct State {
    all: BTreeMap<u64, Allocation>,
    /// Bytes in use of each device.
    used: [u64; MOST_DEVICES as usize],
    made: u64,
    ranges: Ranges,
}

/// All memory of the devices.
pub struct Memory {
    base: u64,
    /// Bytes of each device.
    total: u64,
    state: Mutex<State>,
}

/// The devices' memory.
pub fn memory() -> &'static Memory {
    static MEMORY: OnceLock<Memory> = OnceLock::new();
    MEMORY.get_or_init(Memory::reserve)
}

/// Whether addresses are not checked, like in drivers whose device can access all memory of its host: set by
/// `GANTRY_STAND_IN_TRUSTS`. A wild address then crashes this process, which reveals that whatever is in front of the
/// driver has let it pass.
pub fn trusts() -> bool {
    static TRUSTS: OnceLock<bool> = OnceLock::new();
    *TRUSTS.get_or_init(|| std::env::var_os("GANTRY_STAND_IN_TRUSTS").is_some())
}

impl Memory {
    fn reserve() -> Self {
        let mebibytes = std::env::var("GANTRY_CUDA_MEMORY")
            .ok()
            .and_then(|text| text.parse().ok());
        let total = mebibytes
            .unwrap_or(4096u64)
            .saturating_mul(1 << 20)
            .min(RESERVED / 2);
        let map = |at: u64, fixed: i32| {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: maps only unused addresses; no existing mapping is replaced.
            let place =
                unsafe { libc::mmap(at as *mut _, RESERVED as usize, protection, flags, -1, 0) };
            (place != libc::MAP_FAILED).then_some(place as u64)
        };
        let places = ARENA.step_by(STEP as usize);
        let base = places
            .into_iter()
            .find_map(|at| map(at, libc::MAP_FIXED_NOREPLACE).filter(|place| *place == at))
            .or_else(|| map(0, 0))
            .unwrap_or(0);
        Self {
            base,
            total: if base == 0 { 0 } else { total },
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Free bytes and total bytes of a device.
    pub fn info(&self, device: i32) -> (u64, u64) {
        (self.total - self.state().used[device as usize], self.total)
    }

    /// Bytes of a device allocated from its pool or by graphs.
    pub fn pooled(&self, device: i32) -> u64 {
        let state = self.state();
        let all = state.all.values().map(|one| (one.owner, one));
        let pooled = all.filter(|(owner, _)| owner.context == 0 && owner.device == device);
        let pooled = pooled.map(|(_, one)| one);
        pooled.map(|one| one.size).sum()
    }

    /// Ranges that a kernel may access now.
    pub fn ranges(&self) -> Ranges {
        Arc::clone(&self.state().ranges)
    }

    /// Allocates memory.
    pub fn allocate(&self, size: u64, kind: Kind, flags: u32, owner: Owner) -> Answer<u64> {
        if size == 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let mut state = self.state();
        if kind.counted() && size > self.total - state.used[owner.device as usize] {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        // First fit.
        let mut at = self.base;
        for (start, allocation) in state.all.range(self.base..self.base + RESERVED) {
            if start.saturating_sub(at) >= size.saturating_add(DISTANCE) {
                break;
            }
            at = (start + allocation.size + DISTANCE).next_multiple_of(ALIGNMENT);
        }
        let end = at
            .checked_add(size)
            .filter(|end| *end <= self.base + RESERVED);
        if self.base == 0 || end.is_none() {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        state.add(Allocation {
            start: at,
            size,
            kind,
            flags,
            owner,
            id: 0,
        });
        Ok(at)
    }

    /// Pins memory of the caller.
    pub fn register(&self, start: u64, size: u64, flags: u32, owner: Owner) -> Answer {
        let end = start.checked_add(size).filter(|_| start != 0 && size != 0);
        let end = end.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let mut state = self.state();
        let before = state.all.range(..end).next_back();
        if before.is_some_and(|(from, allocation)| from + allocation.size > start) {
            return Err(CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        }
        state.add(Allocation {
            start,
            size,
            kind: Kind::Registered,
            flags,
            owner,
            id: 0,
        });
        Ok(())
    }

    /// Frees an allocation that has one of these kinds.
    pub fn free(&self, start: u64, kinds: &[Kind]) -> Answer {
        let mut state = self.state();
        let found = state
            .all
            .get(&start)
            .copied()
            .filter(|allocation| kinds.contains(&allocation.kind));
        state.end(found.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?);
        Ok(())
    }

    /// Frees all allocations of a context that has no more work.
    pub fn end_context(&self, context: u64) {
        let mut state = self.state();
        let all = state.all.values().copied();
        let own: Vec<_> = all.filter(|one| one.owner.context == context).collect();
        for allocation in own {
            state.end(allocation);
        }
    }

    /// The allocation that contains an address.
    pub fn find(&self, at: u64) -> Option<Allocation> {
        let state = self.state();
        let (_, allocation) = state.all.range(..=at).next_back()?;
        (at - allocation.start < allocation.size).then_some(*allocation)
    }

    /// Whether all bytes lie in a single allocation.
    pub fn holds(&self, at: u64, size: u64) -> bool {
        self.find(at)
            .is_some_and(|allocation| allocation.start + allocation.size - at >= size)
    }
}

impl State {
    fn add(&mut self, mut allocation: Allocation) {
        self.made += 1;
        allocation.id = self.made;
        if allocation.kind.counted() {
            self.used[allocation.owner.device as usize] += allocation.size;
        }
        self.all.insert(allocation.start, allocation);
        self.publish();
    }

    fn end(&mut self, allocation: Allocation) {
        let start = allocation.start;
        self.all.remove(&start);
        if allocation.kind.counted() {
            self.used[allocation.owner.device as usize] -= allocation.size;
        }
        self.publish();
        if allocation.kind == Kind::Registered {
            return;
        }
        // Only whole pages are given back; the gap keeps neighbors off them unless they share
        // pages.
        let (first, last) = (
            start.next_multiple_of(4096),
            (start + allocation.size) & !4095,
        );
        if last > first {
            // SAFETY: pages of the arena that are no longer used.
            unsafe {
                libc::madvise(
                    first as *mut _,
                    (last - first) as usize,
                    libc::MADV_DONTNEED,
                )
            };
        }
    }

    fn publish(&mut self) {
        let ranges = self
            .all
            .values()
            .map(|allocation| (allocation.start, allocation.start + allocation.size));
        self.ranges = Arc::new(ranges.collect());
    }
}
