//! The device and contexts.

use std::{
    collections::BTreeSet,
    ffi::{c_char, c_int, c_uint},
    ptr::null_mut,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
};

use cuda_definition::driver::types::*;

use super::{device, entry_points, flood, offer, put, text};
use crate::driver::{
    ARCHITECTURE, Answer, MOST_DEVICES, MULTIPROCESSORS, SHARED, SHARED_OPT_IN, THREADS,
    context::{self, Context},
    devices,
    memory::memory,
    objects,
};

const NAME: &[u8] = b"Gantry stand-in (PTX on the CPU)\0";
/// CUDA 13.0.
const VERSION: c_int = 13000;

/// A device's primary context, its reference count and its flags.
type Primary = (Option<Arc<Context>>, u32, c_uint);

fn primary(device: CUdevice) -> MutexGuard<'static, Primary> {
    static ALL: [Mutex<Primary>; MOST_DEVICES as usize] =
        [const { Mutex::new((None, 0, 0)) }; MOST_DEVICES as usize];
    ALL[device as usize]
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

/// Unlike the devices, their addresses are in descending order.
fn bus(device: CUdevice) -> String {
    format!("0000:{:02x}:00.0\0", devices() - 1 - device)
}

/// All begin with `47`, and differ in what follows.
fn uuid(device: CUdevice) -> CUuuid {
    let mut bytes = [0x47; 16];
    bytes[1] += device as c_char;
    CUuuid { bytes }
}

fn peers(context: &Context) -> MutexGuard<'_, BTreeSet<i32>> {
    context.peers.lock().unwrap_or_else(PoisonError::into_inner)
}

fn handle(context: Option<&Arc<Context>>) -> CUcontext {
    context.map_or(null_mut(), |context| context.handle as CUcontext)
}

fn attribute(attribute: CUdevice_attribute) -> Answer<c_int> {
    use CUdevice_attribute as A;
    let small = |value: u64| c_int::try_from(value).unwrap_or(c_int::MAX);
    Ok(match attribute {
        A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        | A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X
        | A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y => 1024,
        A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z => 64,
        A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X => c_int::MAX,
        A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y | A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z => 65535,
        A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK => small(SHARED),
        A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        | A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR => small(SHARED_OPT_IN),
        A::CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY => 65536,
        A::CU_DEVICE_ATTRIBUTE_WARP_SIZE => 32,
        A::CU_DEVICE_ATTRIBUTE_MAX_PITCH => c_int::MAX,
        A::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK
        | A::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR => 65536,
        A::CU_DEVICE_ATTRIBUTE_CLOCK_RATE | A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE => 1_000_000,
        A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH => 64,
        A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE => 1 << 20,
        A::CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT | A::CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT => 512,
        A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => small(u64::from(MULTIPROCESSORS)),
        A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR => small(u64::from(THREADS)),
        A::CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR => 32,
        A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => small(u64::from(ARCHITECTURE / 10)),
        A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => small(u64::from(ARCHITECTURE % 10)),
        A::CU_DEVICE_ATTRIBUTE_GPU_OVERLAP
        | A::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT
        | A::CU_DEVICE_ATTRIBUTE_INTEGRATED
        | A::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
        | A::CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS
        | A::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
        | A::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY
        | A::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS
        | A::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH
        | A::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        | A::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED
        | A::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
        | A::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR
        | A::CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED => 1,
        // The device supports none of the other attributes.
        CUdevice_attribute_enum(number) if (1..=200).contains(&number) => 0,
        _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    })
}

entry_points! {
    fn cuInit(Flags: c_uint) {
        if Flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        context::initialise();
        Ok(())
    }

    fn cuDriverGetVersion(driverVersion: *mut c_int) {
        put(driverVersion, VERSION)
    }

    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) {
        super::device(ordinal)?;
        put(device, ordinal)
    }

    fn cuDeviceGetCount(count: *mut c_int) {
        context::initialised()?;
        put(count, devices())
    }

    fn cuDeviceGetName(name: *mut c_char, len: c_int, dev: CUdevice) {
        device(dev)?;
        string(name, len, NAME)
    }

    fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, dev: CUdevice) {
        device(dev)?;
        put(uuid, self::uuid(dev))
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, dev: CUdevice) {
        device(dev)?;
        put(bytes, usize::try_from(memory().info(dev).1).unwrap_or(usize::MAX))
    }

    fn cuDeviceGetAttribute(pi: *mut c_int, attrib: CUdevice_attribute, dev: CUdevice) {
        device(dev)?;
        put(pi, attribute(attrib)?)
    }

    fn cuDeviceComputeCapability(major: *mut c_int, minor: *mut c_int, dev: CUdevice) {
        device(dev)?;
        put(major, (ARCHITECTURE / 10).cast_signed())?;
        put(minor, (ARCHITECTURE % 10).cast_signed())
    }

    fn cuDeviceGetPCIBusId(pciBusId: *mut c_char, len: c_int, dev: CUdevice) {
        device(dev)?;
        string(pciBusId, len, bus(dev).as_bytes())
    }

    fn cuDeviceGetByPCIBusId(dev: *mut CUdevice, pciBusId: *const c_char) {
        context::initialised()?;
        let wanted = text(pciBusId)?;
        let found = (0..devices()).find(|device| bus(*device).trim_end_matches('\0') == wanted);
        put(dev, found.ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)?)
    }

    fn cuDeviceCanAccessPeer(canAccessPeer: *mut c_int, dev: CUdevice, peerDev: CUdevice) {
        device(dev)?;
        device(peerDev)?;
        put(canAccessPeer, c_int::from(dev != peerDev))
    }

    fn cuDevicePrimaryCtxRetain(pctx: *mut CUcontext, dev: CUdevice) {
        device(dev)?;
        let mut primary = primary(dev);
        let context = match &primary.0 {
            Some(context) => Arc::clone(context),
            None => Context::create(dev, primary.2)?,
        };
        put(pctx, context.handle as CUcontext)?;
        primary.0 = Some(context);
        primary.1 += 1;
        Ok(())
    }

    fn cuDevicePrimaryCtxRelease_v2(dev: CUdevice) {
        device(dev)?;
        let mut primary = primary(dev);
        primary.1 = primary.1.checked_sub(1).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        if primary.1 == 0
            && let Some(context) = primary.0.take()
        {
            context.destroy();
            objects::remove(context.handle);
        }
        Ok(())
    }

    fn cuDevicePrimaryCtxReset_v2(dev: CUdevice) {
        device(dev)?;
        if let Some(context) = primary(dev).0.take() {
            context.destroy();
            objects::remove(context.handle);
        }
        Ok(())
    }

    fn cuDevicePrimaryCtxSetFlags_v2(dev: CUdevice, flags: c_uint) {
        device(dev)?;
        primary(dev).2 = flags;
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState(dev: CUdevice, flags: *mut c_uint, active: *mut c_int) {
        device(dev)?;
        let primary = primary(dev);
        offer(flags, primary.2);
        put(active, c_int::from(primary.0.is_some()))
    }

    fn cuCtxCreate_v2(pctx: *mut CUcontext, flags: c_uint, dev: CUdevice) {
        device(dev)?;
        flood::flood();
        let context = Context::create(dev, flags)?;
        put(pctx, context.handle as CUcontext)?;
        context::push(context);
        Ok(())
    }

    fn cuCtxCreate_v4(pctx: *mut CUcontext, ctxCreateParams: *mut CUctxCreateParams, flags: c_uint, dev: CUdevice) {
        if !ctxCreateParams.is_null() {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        device(dev)?;
        let context = Context::create(dev, flags)?;
        put(pctx, context.handle as CUcontext)?;
        context::push(context);
        Ok(())
    }

    fn cuCtxDestroy_v2(ctx: CUcontext) {
        let context = objects::context(ctx)?;
        if primary(context.device).0.as_ref().is_some_and(|primary| Arc::ptr_eq(primary, &context)) {
            return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
        }
        context.destroy();
        objects::remove(context.handle);
        if context::peek().is_some_and(|current| Arc::ptr_eq(&current, &context)) {
            context::pop();
        }
        Ok(())
    }

    fn cuCtxPushCurrent_v2(ctx: CUcontext) {
        context::initialised()?;
        context::push(objects::context(ctx)?);
        Ok(())
    }

    fn cuCtxPopCurrent_v2(pctx: *mut CUcontext) {
        context::initialised()?;
        let context = context::pop().ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        offer(pctx, context.handle as CUcontext);
        Ok(())
    }

    fn cuCtxSetCurrent(ctx: CUcontext) {
        context::initialised()?;
        let new = if ctx.is_null() { None } else { Some(objects::context(ctx)?) };
        context::pop();
        if let Some(new) = new {
            context::push(new);
        }
        Ok(())
    }

    fn cuCtxGetCurrent(pctx: *mut CUcontext) {
        context::initialised()?;
        put(pctx, handle(context::peek().as_ref()))
    }

    fn cuCtxGetDevice(device: *mut CUdevice) {
        put(device, context::current()?.device)
    }

    fn cuCtxEnablePeerAccess(peerContext: CUcontext, Flags: c_uint) {
        let (own, peer) = (context::current()?, objects::context(peerContext)?);
        if Flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if peer.device == own.device {
            return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
        }
        match peers(&own).insert(peer.device) {
            true => Ok(()),
            false => Err(CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED),
        }
    }

    fn cuCtxDisablePeerAccess(peerContext: CUcontext) {
        let (own, peer) = (context::current()?, objects::context(peerContext)?);
        match peers(&own).remove(&peer.device) {
            true => Ok(()),
            false => Err(CUresult::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED),
        }
    }

    fn cuCtxGetFlags(flags: *mut c_uint) {
        put(flags, context::current()?.flags.load(Ordering::Relaxed))
    }

    fn cuCtxGetApiVersion(ctx: CUcontext, version: *mut c_uint) {
        if !ctx.is_null() {
            objects::context(ctx)?;
        }
        put(version, 3020)
    }

    fn cuCtxSynchronize() {
        context::current()?.wait_for_all()
    }

    // The caches are the CPU's, so the setting has no effect.
    fn cuCtxGetCacheConfig(pconfig: *mut CUfunc_cache) {
        context::current()?;
        put(pconfig, CUfunc_cache::CU_FUNC_CACHE_PREFER_NONE)
    }

    fn cuCtxSetCacheConfig(_config: CUfunc_cache) {
        context::current().map(|_| ())
    }

    fn cuCtxResetPersistingL2Cache() {
        context::current().map(|_| ())
    }

    fn cuProfilerStart() {
        context::current().map(|_| ())
    }

    fn cuProfilerStop() {
        context::current().map(|_| ())
    }

    fn cuCtxGetStreamPriorityRange(leastPriority: *mut c_int, greatestPriority: *mut c_int) {
        context::current()?;
        offer(leastPriority, 0);
        offer(greatestPriority, -5);
        Ok(())
    }

    fn cuCtxGetLimit(pvalue: *mut usize, limit: CUlimit) {
        context::current()?;
        put(pvalue, match limit {
            CUlimit::CU_LIMIT_STACK_SIZE => 512 << 10,
            CUlimit::CU_LIMIT_PRINTF_FIFO_SIZE => 1 << 20,
            CUlimit::CU_LIMIT_MALLOC_HEAP_SIZE => 0,
            _ => return Err(CUresult::CUDA_ERROR_UNSUPPORTED_LIMIT),
        })
    }

    fn cuCtxSetLimit(limit: CUlimit, _value: usize) {
        context::current()?;
        match limit {
            // Any value fits in what there is.
            CUlimit::CU_LIMIT_STACK_SIZE | CUlimit::CU_LIMIT_PRINTF_FIFO_SIZE => Ok(()),
            _ => Err(CUresult::CUDA_ERROR_UNSUPPORTED_LIMIT),
        }
    }
}

/// # Safety
/// There is room for `len` bytes.
unsafe fn string(to: *mut c_char, len: c_int, text: &[u8]) -> Answer {
    let room = usize::try_from(len).unwrap_or(0);
    if to.is_null() || room == 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let bytes = text.len().min(room);
    // SAFETY: the caller's promise; the last byte terminates the text.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, bytes);
        to.add(bytes - 1).write(0);
    }
    Ok(())
}
