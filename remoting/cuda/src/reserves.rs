//! Device memory that contexts reserve for their kernels, as limits say: heaps, stacks, and what `printf` writes to.

use std::sync::Arc;

use cuda_definition::driver::types::{CUdevice_attribute_enum as Attribute, CUlimit_enum as Limit};
use remoting_proto::apis::cuda::{Kind, codes};
use remoting_session::quota::Charge;

use super::{
    Server,
    driver::{cu, outcome},
    effects::Call,
    forwarding::word,
};

/// What a context reserves for a limit.
#[derive(Debug)]
pub(super) struct Reserve {
    /// The limit that it had from the start: that much belongs to the context.
    from: u64,
    /// The charge for the most that the client has asked for since.
    charge: Charge,
}

impl Server {
    /// Charges what a limit reserves beyond what the client has been charged for it before. Nothing is given back when
    /// it is lowered: the driver may keep it.
    ///
    /// # Errors
    /// The client's quota is exhausted, or it is not known what the limit reserves.
    pub(super) fn charge_limit(
        &mut self,
        context: u32,
        limit: u64,
        value: u64,
    ) -> Result<Option<Arc<Charge>>, i32> {
        if self.quota.limit() == u64::MAX {
            return Ok(None);
        }
        let known = Limit(limit as u32);
        let mut now = 0usize;
        outcome(cu!(self.backend.api, cuCtxGetLimit(&raw mut now, known)))?;
        let none = self.quota.charge(0).map_err(|_| codes::OUT_OF_MEMORY)?;
        let reserve = self.backend.limits.entry((context, limit));
        let reserve = reserve.or_insert_with(|| Reserve {
            from: now as u64,
            charge: none,
        });
        let (rise, charged) = (value.saturating_sub(reserve.from), reserve.charge.bytes());
        let size = match known {
            _ if rise == 0 => return Ok(None),
            Limit::CU_LIMIT_STACK_SIZE => rise.saturating_mul(self.threads(context)?),
            Limit::CU_LIMIT_PRINTF_FIFO_SIZE | Limit::CU_LIMIT_MALLOC_HEAP_SIZE => rise,
            // Depth of synchronization and pending launches of kernels by kernels: how much a level takes, only the
            // driver knows.
            Limit::CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH
            | Limit::CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT => {
                return Err(codes::OUT_OF_MEMORY);
            }
            // Caches.
            _ => return Ok(None),
        };
        self.charge(size.saturating_sub(charged)).map(Some)
    }

    /// Keeps the charge for a limit as long as the context lives.
    pub(super) fn limit_set(&mut self, call: Call<'_>) {
        let Some(charge) = call.charge.and_then(Arc::into_inner) else {
            return;
        };
        let key = (call.context, word(call.arguments, 0));
        if let Some(reserve) = self.backend.limits.get_mut(&key) {
            reserve.charge.join(charge);
        }
    }

    /// The most threads that a context's device runs at a time, each with a stack.
    fn threads(&self, context: u32) -> Result<u64, i32> {
        let device = self.backend.objects.get(Kind::Context, context)?.device;
        let attribute = |attribute| {
            let mut value = 0;
            let code = cu!(
                self.backend.api,
                cuDeviceGetAttribute(&raw mut value, attribute, device)
            );
            outcome(code).map(|()| u64::from(value.unsigned_abs()))
        };
        let each = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?;
        let all = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(each.saturating_mul(all))
    }
}
