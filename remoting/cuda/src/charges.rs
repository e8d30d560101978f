//! Charges for device memory, which last as long as the driver needs the memory.
//!
//! Memory that is freed in stream order, or that belongs to a running graph, stays in use after the client has released
//! it. The driver also caches memory that was freed to a pool, or by a graph, for later allocations. Such a charge is
//! returned once the device has finished the work and the driver has given the memory back. To find out, the driver is
//! occasionally asked how much it caches; it is told to release its caches when the quota would not suffice otherwise.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use cuda_definition::driver::types::{CUgraphMem_attribute, CUmemPool_attribute, CUmemoryPool};
use remoting_proto::apis::cuda::{Kind, codes};
use remoting_session::{backend::Fences, quota::Charge};

use super::{Server, driver::cu, fences::Fence};

/// Maximum time for which an allocation that exceeds the quota waits for memory that is about to be freed. No other
/// thread of the client is served meanwhile.
const LONGEST: Duration = Duration::from_secs(1);
/// Interval between its checks.
const NAP: Duration = Duration::from_micros(100);
/// Number of charges kept before the first check for returnable ones.
const FIRST_LOOK: usize = 64;

/// Charges for memory that the client has freed.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// Charges for memory that may still be in use.
    used: Vec<KeptCharge>,
    /// Number of entries left in `used` after the last check.
    left: usize,
    /// The charge for memory that is no longer in use, some of which pools and graphs may cache.
    unused: Option<Charge>,
}

#[derive(Debug)]
struct KeptCharge {
    until: Until,
    charge: Arc<Charge>,
}

/// When the device no longer uses the memory.
#[derive(Clone, Copy, Debug)]
enum Until {
    /// Immediately.
    Now,
    /// When this fence, to which a reference is held, is reached.
    Fence(Fence),
    /// When this context is destroyed; nothing tells earlier.
    Context(u32),
}

impl Server {
    /// Charges device memory to the quota.
    ///
    /// # Errors
    /// The client's quota is exhausted.
    pub(super) fn charge(&mut self, size: u64) -> Result<Arc<Charge>, i32> {
        let until = Instant::now() + LONGEST;
        let context = self.backend.api.current();
        loop {
            if let Ok(charge) = self.quota.charge(size) {
                return Ok(Arc::new(charge));
            }
            if self.return_charges() {
                continue;
            }
            // Never waits for client functions, because this very thread receives their completion.
            let waits = self.backend.kept.can_make_room(self.quota.left(), size);
            if !waits || Instant::now() >= until || self.backend.has_pending() {
                return Err(codes::OUT_OF_MEMORY);
            }
            self.give_way_while_waiting();
            self.backend.api.enter(context);
            thread::sleep(NAP);
        }
    }

    /// Returns a charge once the stream's work is done. Without a stream, returns it as soon as the driver has released
    /// the memory. `context` is the context of the call, which need not be the stream's.
    pub(super) fn charge_until_done(
        &mut self,
        context: u32,
        stream: Option<u32>,
        charge: Arc<Charge>,
    ) {
        if self.quota.limit() == u64::MAX {
            return;
        }
        let until = stream.map_or(Until::Now, |stream| self.behind(context, stream));
        self.backend.kept.used.push(KeptCharge { until, charge });
        if self.backend.kept.used.len() >= FIRST_LOOK.max(2 * self.backend.kept.left) {
            self.find_unused();
            let kept = self.kept_by_driver();
            if let (Some(unused), Some(kept)) = (&mut self.backend.kept.unused, kept) {
                unused.shrink(kept);
            }
        }
    }

    /// Returns when the work now in the stream is done.
    fn behind(&mut self, context: u32, stream: u32) -> Until {
        let backend = &self.backend;
        let object = backend.objects.get(Kind::Stream, stream);
        // The legacy stream belongs to the current context.
        let context = object.map_or(context, |stream| stream.context);
        let before = backend.api.current();
        let fence = self.enter(context).and_then(|own| {
            let raw = self.backend.objects.raw(Kind::Stream, stream)?;
            self.backend.api.fence(own, raw)
        });
        self.backend.api.enter(before);
        fence.map_or(Until::Context(context), Until::Fence)
    }

    /// Moves charges for memory that is no longer in use to `unused`.
    fn find_unused(&mut self) {
        let (api, objects) = (&self.session.backend.api, &self.session.backend.objects);
        let kept = &mut self.session.backend.kept;
        let is_over = |one: &mut KeptCharge| match one.until {
            Until::Now => true,
            // A failed poll says nothing about the work.
            Until::Fence(fence) => api.is_done_or_gone(fence),
            Until::Context(context) => objects.get(Kind::Context, context).is_err(),
        };
        // Polling fences makes their contexts current; the caller continues in its own.
        let before = api.current();
        let over: Vec<KeptCharge> = kept.used.extract_if(.., is_over).collect();
        api.enter(before);
        kept.left = kept.used.len();
        for KeptCharge { until, charge } in over {
            if let Until::Fence(fence) = until {
                api.release(fence);
            }
            // Otherwise an executable graph or another launch shares it.
            let Some(charge) = Arc::into_inner(charge) else {
                continue;
            };
            match &mut kept.unused {
                Some(unused) => unused.join(charge),
                none => *none = Some(charge),
            }
        }
    }

    /// Returns charges for memory that the device no longer uses. Returns whether there were any.
    pub(super) fn return_charges(&mut self) -> bool {
        self.find_unused();
        let unused = self.backend.kept.unused.take();
        if unused.is_some() {
            // The caches must be released before their memory counts as free.
            self.trim();
        }
        unused.is_some()
    }

    /// The client's devices and memory pools.
    fn pools(&self) -> (BTreeSet<i32>, BTreeSet<usize>) {
        let (api, objects) = (&self.backend.api, &self.backend.objects);
        let of = |kind| {
            objects
                .iter()
                .filter(move |(_, object)| object.kind == kind)
        };
        let devices: BTreeSet<i32> = of(Kind::Context).map(|(_, own)| own.device).collect();
        let mut pools: BTreeSet<usize> = of(Kind::Pool).map(|(_, pool)| pool.raw).collect();
        for &device in &devices {
            let mut pool: CUmemoryPool = std::ptr::null_mut();
            if cu!(api, cuDeviceGetDefaultMemPool(&raw mut pool, device)) == 0 {
                pools.insert(pool as usize);
            }
        }
        (devices, pools)
    }

    /// The number of bytes that pools and graphs have reserved, if the driver reports it. Cached memory is part of
    /// that. How much of it is allocated only the driver knows, because a pool that the client has destroyed may still
    /// hold some.
    fn kept_by_driver(&self) -> Option<u64> {
        let api = &self.backend.api;
        let (devices, pools) = self.pools();
        let of_pool = |pool: usize| {
            let (pool, mut bytes) = (pool as CUmemoryPool, 0u64);
            let reserved = CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
            let to = (&raw mut bytes).cast();
            let code = cu!(api, cuMemPoolGetAttribute(pool, reserved, to));
            (code == 0).then_some(bytes)
        };
        let of_graphs = |device: i32| {
            let mut bytes = 0u64;
            let reserved = CUgraphMem_attribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT;
            let to = (&raw mut bytes).cast();
            let code = cu!(api, cuDeviceGetGraphMemAttribute(device, reserved, to));
            (code == 0).then_some(bytes)
        };
        let pools: u64 = pools.into_iter().map(of_pool).sum::<Option<_>>()?;
        let graphs: u64 = devices.into_iter().map(of_graphs).sum::<Option<_>>()?;
        Some(pools.saturating_add(graphs))
    }

    /// Makes the driver release memory that pools and graphs cache but do not use.
    fn trim(&self) {
        let api = &self.backend.api;
        let (devices, pools) = self.pools();
        for device in devices {
            cu!(api, cuDeviceGraphMemTrim(device));
        }
        for pool in pools {
            cu!(api, cuMemPoolTrimTo(pool as CUmemoryPool, 0));
        }
    }
}

impl Kept {
    /// Whether an allocation that exceeds the quota, of which so much is left, may succeed once the device has finished
    /// its work.
    fn can_make_room(&self, left: u64, size: u64) -> bool {
        let kept = self.bytes();
        kept > 0 && left.saturating_add(kept) >= size
    }

    /// The number of bytes that become free as soon as the device has finished its work, without those of charges that
    /// are also held elsewhere.
    fn bytes(&self) -> u64 {
        let mut all: HashMap<*const Charge, (&Arc<Charge>, usize)> = HashMap::new();
        for KeptCharge { charge, .. } in &self.used {
            all.entry(Arc::as_ptr(charge)).or_insert((charge, 0)).1 += 1;
        }
        let own = all.into_values();
        let own = own.filter(|(charge, count)| Arc::strong_count(charge) == *count);
        own.map(|(charge, _)| charge.bytes()).sum()
    }
}

#[cfg(test)]
mod tests {
    use remoting_session::quota::Quota;

    use super::*;

    #[test]
    fn a_charge_of_several_launches_counts_once_and_not_while_its_graph_has_it() {
        let charge = Arc::new(Quota::new(100).charge(40).unwrap());
        let mut kept = Kept::default();
        for _ in 0..3 {
            kept.used.push(KeptCharge {
                until: Until::Context(16),
                charge: Arc::clone(&charge),
            });
        }
        assert!(!kept.can_make_room(60, 61));
        drop(charge);
        assert_eq!(kept.bytes(), 40);
        assert!(kept.can_make_room(60, 100) && !kept.can_make_room(60, 101));
    }
}
