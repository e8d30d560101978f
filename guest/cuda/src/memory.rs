//! The kinds of addresses, as far as this process has allocated them.

use std::collections::BTreeMap;

use base::Unpoisoned;
use cuda_definition::driver::types::*;
use remoting_proto::apis::cuda::{
    Kind,
    calls::{Allocate, AllocatePitch, Free, MemoryInfo, PointerDevice, Source},
    codes,
};

use crate::{
    capture::capturing,
    context,
    entry::{Outcome, connected, entry_points, offer, put},
    handles, host_memory,
    link::{self, Link},
};

/// The kind of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Device memory.
    Device,
    /// Device memory from a pool.
    Pooled,
    /// Device memory that was mapped by `cuMemMap`.
    Mapped,
    /// Device memory that a graph allocates with each launch.
    OfGraph,
    /// A module's variable.
    Variable,
    /// Pinned host memory: in the window or, without a shared window, ordinary memory.
    Host,
    /// The same, allocated by `cuMemAllocManaged`.
    Managed,
    /// The program's own memory, registered.
    Registered,
}

impl What {
    /// Whether it is device memory.
    pub fn is_device(self) -> bool {
        matches!(
            self,
            Self::Device | Self::Pooled | Self::Mapped | Self::OfGraph | Self::Variable
        )
    }
}

/// An allocation.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    pub start: u64,
    pub size: u64,
    pub what: What,
    /// The context in which it was created.
    pub context: u64,
    /// The flags with which it was created.
    pub flags: u32,
    /// Its address on the device.
    pub device: u64,
    /// The ordinal of its device, if known.
    ordinal: Option<CUdevice>,
    /// The handle of a variable's module or library.
    owner: u64,
    /// Distinguishes it from other allocations.
    pub id: u64,
}

/// All allocations, by address.
#[derive(Debug, Default)]
pub struct Memory {
    all: BTreeMap<u64, Known>,
    made: u64,
}

impl Memory {
    /// Adds an allocation, in the place of those whose addresses it has been given: the driver has ended them. Graphs' memory
    /// may have addresses in common, where it does not exist at the same time.
    pub fn insert(&mut self, start: u64, size: u64, what: What, flags: u32, device: u64) {
        self.made += 1;
        let last = start.saturating_add(size.max(1) - 1);
        let is_graphs = |known: &Known| (what, known.what) == (What::OfGraph, What::OfGraph);
        let next = |memory: &Self| memory.between(start, last).find(|known| !is_graphs(known));
        while let Some(ended) = next(self) {
            self.all.remove(&ended.start);
        }
        let known = self.all.get(&start);
        let size = known.map_or(size, |known| size.max(known.size));
        // The driver knows that of memory that is not necessarily the current context's.
        let ordinal = match what {
            What::Device | What::Host | What::Managed | What::Registered => context::device().ok(),
            What::Pooled | What::Mapped | What::OfGraph | What::Variable => None,
        };
        let known = Known {
            start,
            size,
            what,
            context: context::top().unwrap_or(0),
            flags,
            device,
            ordinal,
            owner: 0,
            id: self.made,
        };
        self.all.insert(start, known);
    }

    /// Adds a variable of a module or library, unless it is known.
    fn insert_variable(&mut self, at: u64, size: u64, owner: u64) {
        let known = self.all.get(&at);
        if known.is_none_or(|one| (one.what, one.size, one.owner) != (What::Variable, size, owner))
        {
            self.insert(at, size, What::Variable, 0, at);
            self.all.entry(at).and_modify(|one| one.owner = owner);
        }
    }

    /// Removes the variables of a module or library.
    fn unload(&mut self, owner: u64) {
        self.all
            .retain(|_, one| one.what != What::Variable || one.owner != owner);
    }

    /// The allocation that contains an address.
    pub fn find(&self, at: u64) -> Option<Known> {
        self.between(at, at).next()
    }

    /// The allocations that have a part from one address to another, the last one first.
    fn between(&self, start: u64, last: u64) -> impl Iterator<Item = Known> {
        let end = |known: &Known| known.start.saturating_add(known.size.max(1) - 1);
        let ends_before = move |known: &Known| end(known) < start;
        let before = self.all.range(..=last).rev().map(|(_, known)| *known);
        // What begins before anything else than graphs' memory ends before it.
        let near =
            before.take_while(move |known| known.what == What::OfGraph || !ends_before(known));
        near.filter(move |known| !ends_before(known))
    }

    /// Whether any allocation has a part between two addresses.
    pub fn overlaps(&self, start: u64, end: u64) -> bool {
        self.between(start, end.saturating_sub(1)).next().is_some()
    }

    /// Bytes of device memory that the program has allocated in contexts that are `wanted`.
    pub fn allocated(&self, wanted: impl Fn(u64) -> bool) -> u64 {
        let all = self.all.values();
        let counts = |one: &&Known| {
            one.what.is_device() && one.what != What::Variable && wanted(one.context)
        };
        all.filter(counts).map(|one| one.size).sum()
    }

    /// Removes the allocation that begins at this address.
    pub fn remove(&mut self, at: u64) -> Option<Known> {
        self.all.remove(&at)
    }
}

/// The allocation that contains an address.
pub fn find(link: &Link, at: u64) -> Option<Known> {
    link.state.memory.lock_unpoisoned().find(at)
}

/// The device of the allocation that contains an address.
///
/// # Errors
/// The memory is not known, or the driver does not know its device.
pub fn device_of(link: &Link, at: u64) -> Outcome<CUdevice> {
    let known = find(link, at).ok_or(codes::INVALID_VALUE)?;
    if let Some(ordinal) = known.ordinal {
        return Ok(ordinal);
    }
    let ordinal = link.ask(&PointerDevice { address: at })?;
    let mut memory = link.state.memory.lock_unpoisoned();
    if let Some(one) = memory.all.get_mut(&known.start)
        && one.id == known.id
    {
        one.ordinal = Some(ordinal);
    }
    Ok(ordinal)
}

/// Frees memory, and forgets it before that: as soon as it is free, another thread may be given its
/// address.
fn freed(link: &Link, known: &Known, free: impl FnOnce() -> Outcome) -> Outcome {
    // The graph will allocate its memory again.
    if known.what == What::OfGraph {
        return free();
    }
    let taken = link.state.memory.lock_unpoisoned().remove(known.start);
    let freed = free();
    if let (Some(known), Err(_)) = (taken, &freed) {
        let mut memory = link.state.memory.lock_unpoisoned();
        memory.all.entry(known.start).or_insert(known);
    }
    freed
}

/// Forgets what ends with a context: allocations of device memory, and registrations.
pub fn forget_context(context: u64) {
    if let Some(link) = link::get() {
        let mut memory = link.state.memory.lock_unpoisoned();
        memory.all.retain(|_, known| {
            let ends = matches!(
                known.what,
                What::Device | What::OfGraph | What::Variable | What::Registered
            );
            !(ends && known.context == context)
        });
    }
}

/// Records what a forwarded entry point has created or destroyed.
///
/// # Safety
/// `words` are its parameters, and it has succeeded.
pub unsafe fn note(symbol: &str, words: &[u64]) {
    let Some(link) = link::get() else {
        return;
    };
    let read = |place: usize| {
        let at = words.get(place).copied().unwrap_or(0) as *const u64;
        if at.is_null() {
            0
        } else {
            // SAFETY: the caller's promise: the word was written.
            unsafe { at.read_unaligned() }
        }
    };
    let mut memory = link.state.memory.lock_unpoisoned();
    match symbol {
        "cuModuleGetGlobal_v2" | "cuLibraryGetGlobal" | "cuLibraryGetManaged" => {
            let (at, size) = (read(0), read(1));
            if at != 0 && size != 0 {
                memory.insert_variable(at, size, words[2]);
            }
        }
        "cuModuleUnload" | "cuLibraryUnload" => memory.unload(words[0]),
        "cuMemMap" => {
            let (at, size) = (words[0], words[1]);
            memory.insert(at, size, What::Mapped, 0, at);
        }
        "cuMemUnmap" => {
            let (at, end) = (words[0], words[0].saturating_add(words[1]));
            memory
                .all
                .retain(|start, known| known.what != What::Mapped || *start < at || *start >= end);
        }
        _ => {}
    }
}

fn allocate(size: usize, source: Source, what: What) -> Outcome<u64> {
    let link = connected()?;
    let context = context::need()?;
    if size == 0 {
        return Err(codes::INVALID_VALUE);
    }
    let size = size as u64;
    let at = link.ask(&Allocate {
        context,
        size,
        source,
    })?;
    let mut memory = link.state.memory.lock_unpoisoned();
    memory.insert(at, size, what, 0, at);
    Ok(at)
}

/// The kind of memory that a stream-ordered allocation in this stream returns.
fn ordered(stream: u32) -> Outcome<What> {
    let (link, context) = (connected()?, context::need()?);
    Ok(match capturing(link, context, stream) {
        true => What::OfGraph,
        false => What::Pooled,
    })
}

entry_points! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let link = connected()?;
        let (unused, all) = link.ask(&MemoryInfo { context: context::need()? })?;
        offer(free, unused as usize);
        offer(total, all as usize);
        Ok(())
    }

    fn cuMemAlloc_v2(dptr: *mut CUdeviceptr, bytesize: usize) {
        put(dptr, allocate(bytesize, Source::Device(), What::Device)?)
    }

    fn cuMemAllocPitch_v2(
        dptr: *mut CUdeviceptr,
        pPitch: *mut usize,
        WidthInBytes: usize,
        Height: usize,
        ElementSizeBytes: std::ffi::c_uint,
    ) {
        let link = connected()?;
        let (at, pitch) = link.ask(&AllocatePitch {
            context: context::need()?,
            width: WidthInBytes as u64,
            height: Height as u64,
            element: ElementSizeBytes,
        })?;
        let size = pitch.saturating_mul(Height as u64);
        link.state.memory.lock_unpoisoned().insert(at, size, What::Device, 0, at);
        put(dptr, at)?;
        put(pPitch, pitch as usize)
    }

    fn cuMemAllocAsync(dptr: *mut CUdeviceptr, bytesize: usize, hStream: CUstream) {
        let stream = handles::valid(Kind::Stream, hStream as u64)?;
        put(dptr, allocate(bytesize, Source::Stream(stream), ordered(stream)?)?)
    }

    fn cuMemAllocFromPoolAsync(
        dptr: *mut CUdeviceptr,
        bytesize: usize,
        pool: CUmemoryPool,
        hStream: CUstream,
    ) {
        let stream = handles::valid(Kind::Stream, hStream as u64)?;
        let pool = handles::valid(Kind::Pool, pool as u64)?;
        put(dptr, allocate(bytesize, Source::Pool(stream, pool), ordered(stream)?)?)
    }

    fn cuMemFree_v2(dptr: CUdeviceptr) {
        let link = connected()?;
        if dptr == 0 {
            return Ok(());
        }
        let context = context::need()?;
        let known = find(link, dptr).filter(|known| known.start == dptr).ok_or(codes::INVALID_VALUE)?;
        if known.what == What::Managed {
            return host_memory::give_up(link, context, known.start);
        }
        freed(link, &known, || link.ask(&Free { context, address: dptr, stream: None }))
    }

    fn cuMemFreeAsync(dptr: CUdeviceptr, hStream: CUstream) {
        let link = connected()?;
        let context = context::need()?;
        let stream = handles::valid(Kind::Stream, hStream as u64)?;
        if dptr == 0 {
            return Ok(());
        }
        let known = find(link, dptr).filter(|known| known.start == dptr && known.what.is_device());
        let known = known.ok_or(codes::INVALID_VALUE)?;
        let free = Free { context, address: dptr, stream: Some(stream) };
        if capturing(link, context, stream) {
            // A launch of the graph frees it, and another one allocates it again.
            return link.ask(&free);
        }
        freed(link, &known, || link.post(&free))
    }

    fn cuMemGetAddressRange_v2(pbase: *mut CUdeviceptr, psize: *mut usize, dptr: CUdeviceptr) {
        if pbase.is_null() && psize.is_null() {
            return Ok(());
        }
        let link = connected()?;
        let known = find(link, dptr).ok_or(codes::NOT_FOUND)?;
        offer(pbase, known.start);
        offer(psize, known.size as usize);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn found(memory: &Memory, at: u64) -> Option<(u64, u64, What)> {
        let known = memory.find(at)?;
        Some((known.start, known.size, known.what))
    }

    #[test]
    fn a_variable_at_an_unloaded_ones_address_has_its_own_size() {
        let mut memory = Memory::default();
        memory.insert_variable(MIB, 4, 1);
        memory.insert_variable(MIB, 4096, 2);
        let larger = Some((MIB, 4096, What::Variable));
        assert_eq!(found(&memory, MIB + 4095), larger);
        // The same again is the same allocation.
        let id = memory.find(MIB).map(|known| known.id);
        memory.insert_variable(MIB, 4096, 2);
        assert_eq!(memory.find(MIB).map(|known| known.id), id);
        memory.unload(1);
        assert_eq!(found(&memory, MIB), larger);
        memory.unload(2);
        assert_eq!(found(&memory, MIB), None);
    }

    #[test]
    fn an_allocation_takes_the_place_of_all_that_its_addresses_had() {
        let mut memory = Memory::default();
        memory.insert(MIB, MIB, What::Device, 0, MIB);
        memory.insert_variable(3 * MIB, 4, 1);
        memory.insert(4 * MIB, MIB, What::OfGraph, 0, 4 * MIB);
        memory.insert(12 * MIB, MIB, What::Device, 0, 12 * MIB);
        memory.insert(2 * MIB, 8 * MIB, What::Device, 0, 2 * MIB);
        for at in [2 * MIB, 3 * MIB, 5 * MIB, 10 * MIB - 1] {
            let whole = Some((2 * MIB, 8 * MIB, What::Device));
            assert_eq!(found(&memory, at), whole, "{at}");
        }
        let neighbours = [2 * MIB - 1, 12 * MIB].map(|at| found(&memory, at));
        assert!(neighbours.iter().all(Option::is_some), "{neighbours:?}");
    }

    #[test]
    fn memory_of_graphs_stays_known_where_they_have_addresses_in_common() {
        let mut memory = Memory::default();
        memory.insert(MIB, MIB, What::Device, 0, MIB);
        memory.insert(2 * MIB, 8 * MIB, What::OfGraph, 0, 2 * MIB);
        memory.insert(4 * MIB, MIB, What::OfGraph, 0, 4 * MIB);
        memory.insert(2 * MIB, MIB, What::OfGraph, 0, 2 * MIB);
        let first = Some((2 * MIB, 8 * MIB, What::OfGraph));
        for (at, wanted) in [
            (MIB, Some((MIB, MIB, What::Device))),
            (2 * MIB, first),
            (4 * MIB, Some((4 * MIB, MIB, What::OfGraph))),
            (9 * MIB, first),
            (10 * MIB, None),
        ] {
            assert_eq!(found(&memory, at), wanted, "{at}");
        }
        // It is gone where the addresses are given to something else.
        memory.insert(8 * MIB, MIB, What::Device, 0, 8 * MIB);
        assert_eq!(found(&memory, 2 * MIB), None);
        assert!(found(&memory, 4 * MIB).is_some());
    }
}
