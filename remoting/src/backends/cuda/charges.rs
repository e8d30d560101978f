//! Charges for device memory, which last as long as the driver needs the memory.
//!
//! Memory that is freed in the order of a stream, or that belongs to a graph that is running, is in use after
//! the client has let go of it; and the driver keeps what is freed to a pool, or by a graph, to give it out
//! again. Such a charge is returned once the device has done the work and the driver has given the memory
//! back, which it is asked to do when the quota would not suffice otherwise.

use std::{
    collections::BTreeSet,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use cuda_definition::driver::types::CUmemoryPool;

use super::{Server, driver::cu, fences::Fence};
use crate::{
    apis::cuda::{Kind, codes},
    session::{backend::Fences, quota::Charge},
};

/// How long an allocation that does not fit waits for memory that is about to be freed: no other thread of
/// the client is served meanwhile.
const LONGEST: Duration = Duration::from_secs(1);
/// How often it looks.
const NAP: Duration = Duration::from_micros(100);
/// So many charges are kept before the first look at which of them can be returned.
const FIRST_LOOK: usize = 64;

/// Charges for memory that the client has let go of.
#[derive(Debug, Default)]
pub(super) struct Kept {
    all: Vec<KeptCharge>,
    /// How many there were after the last look.
    left: usize,
}

#[derive(Debug)]
struct KeptCharge {
    until: Until,
    charge: Arc<Charge>,
}

/// When the device does not use memory any more.
#[derive(Clone, Copy, Debug)]
enum Until {
    /// Now.
    Now,
    /// When it has come to this fence, to which there is a reference.
    Fence(Fence),
    /// When this context is gone: nothing tells earlier.
    Context(u32),
}

impl Server {
    /// Charges device memory.
    ///
    /// # Errors
    /// The client has as much as it may have.
    pub(super) fn charge(&mut self, size: u64) -> Result<Arc<Charge>, i32> {
        let until = Instant::now() + LONGEST;
        loop {
            if let Ok(charge) = self.quota.charge(size) {
                return Ok(Arc::new(charge));
            }
            if self.return_charges() {
                continue;
            }
            // Not for functions of the client, of whose end this very thread hears.
            let kept = self.backend.kept.bytes();
            let waits = kept > 0 && self.quota.left().saturating_add(kept) >= size;
            if !waits || Instant::now() >= until || self.backend.has_pending() {
                return Err(codes::OUT_OF_MEMORY);
            }
            thread::sleep(NAP);
        }
    }

    /// Returns a charge once a stream's work is done, or as soon as the driver has given the memory back if no
    /// stream is named. `context` is the call's, which need not be the stream's.
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
        self.backend.kept.all.push(KeptCharge { until, charge });
        if self.backend.kept.all.len() >= FIRST_LOOK.max(2 * self.backend.kept.left) {
            self.return_charges();
        }
    }

    /// When a stream's work is done.
    fn behind(&mut self, context: u32, stream: u32) -> Until {
        let backend = &self.backend;
        let object = backend.objects.get(Kind::Stream, stream);
        // The legacy stream is the current context's.
        let context = object.map_or(context, |stream| stream.context);
        let before = backend.api.current();
        let fence = self.enter(context).and_then(|own| {
            let raw = self.backend.objects.raw(Kind::Stream, stream)?;
            self.backend.api.fence(own, raw)
        });
        self.backend.api.enter(before);
        fence.map_or(Until::Context(context), Until::Fence)
    }

    /// Returns charges of what the device does not use any more. Whether there were any.
    pub(super) fn return_charges(&mut self) -> bool {
        let (api, objects) = (&self.backend.api, &self.backend.objects);
        let all = &mut self.backend.kept.all;
        let is_over = |kept: &mut KeptCharge| match kept.until {
            Until::Now => true,
            // A look that fails says nothing of the work.
            Until::Fence(fence) => api.is_done_or_gone(fence),
            Until::Context(context) => objects.get(Kind::Context, context).is_err(),
        };
        // Looks at fences make their contexts current; the caller goes on in its own.
        let before = api.current();
        let over: Vec<KeptCharge> = all.extract_if(.., is_over).collect();
        api.enter(before);
        self.backend.kept.left = all.len();
        for kept in &over {
            if let Until::Fence(fence) = kept.until {
                api.release(fence);
            }
        }
        if over.is_empty() {
            return false;
        }
        // Before what it costs counts as free.
        self.trim();
        true
    }

    /// Has the driver give back what pools and graphs do not use, of which it keeps some.
    pub(super) fn trim(&self) {
        let (api, objects) = (&self.backend.api, &self.backend.objects);
        let of = |kind| {
            objects
                .iter()
                .filter(move |(_, object)| object.kind == kind)
        };
        let devices: BTreeSet<i32> = of(Kind::Context).map(|(_, own)| own.device).collect();
        let mut pools: BTreeSet<usize> = of(Kind::Pool).map(|(_, pool)| pool.raw).collect();
        for device in devices {
            cu!(api, cuDeviceGraphMemTrim(device));
            let mut pool: CUmemoryPool = std::ptr::null_mut();
            if cu!(api, cuDeviceGetDefaultMemPool(&raw mut pool, device)) == 0 {
                pools.insert(pool as usize);
            }
        }
        for pool in pools {
            cu!(api, cuMemPoolTrimTo(pool as CUmemoryPool, 0));
        }
    }
}

impl Kept {
    fn bytes(&self) -> u64 {
        self.all.iter().map(|kept| kept.charge.bytes()).sum()
    }
}
