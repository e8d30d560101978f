//! Devices.

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    ptr::null_mut,
};

use cuda_definition::{driver::types::*, runtime::types::*};

use crate::{
    api::{entry_points, put, some_text},
    context::{choose, chosen, count, device, primary, ready, reset},
    driver::{driver, init, is_forked, known_devices},
    error::{Answer, Error},
    properties::{self, attribute},
};

/// The version of the runtime API, 13.0, as `cudaRuntimeGetVersion` returns it.
pub const VERSION: c_int = 13000;

/// A device flag that the driver does not have: mapping of host memory is always on.
const MAP_HOST: c_uint = 8;

fn version() -> Answer<c_int> {
    let mut version = 0;
    // SAFETY: valid for writing the answer.
    unsafe { driver!(cuDriverGetVersion(&raw mut version))? };
    Ok(version)
}

entry_points! {
    everywhere:
    // As natively, a forked child is told how many devices its parent had.
    fn cudaGetDeviceCount(count: *mut c_int) {
        let number = match is_forked() {
            true => known_devices().ok_or(Error::cudaErrorInitializationError),
            false => self::count(),
        };
        put(count, number.unwrap_or(0))?;
        number.map(|_| ())
    }
}

entry_points! {
    fn cudaGetDevice(device: *mut c_int) {
        put(device, chosen()?)
    }

    fn cudaSetDevice(device: c_int) {
        choose(device)
    }

    fn cudaInitDevice(device: c_int, deviceFlags: c_uint, flags: c_uint) {
        // cudaInitDeviceFlagsAreValid
        if flags & 1 != 0 {
            set_flags(device, deviceFlags)?;
        }
        primary(device).map(|_| ())
    }

    fn cudaSetValidDevices(device_arr: *mut c_int, len: c_int) {
        let all = count()?;
        for number in 0..usize::try_from(len).map_err(|_| Error::cudaErrorInvalidValue)? {
            if device_arr.is_null() {
                return Err(Error::cudaErrorInvalidValue);
            }
            if !(0..all).contains(&device_arr.add(number).read()) {
                return Err(Error::cudaErrorInvalidDevice);
            }
        }
        // The first device is always usable.
        if len > 0 { choose(device_arr.read()) } else { Ok(()) }
    }

    fn cudaChooseDevice(device: *mut c_int, prop: *const cudaDeviceProp) {
        if prop.is_null() {
            return Err(Error::cudaErrorInvalidValue);
        }
        let wanted = ((*prop).major, (*prop).minor, (*prop).totalGlobalMem);
        let mut best = 0;
        for number in 0..count()? {
            let one = properties::of(number)?;
            if (one.major, one.minor) >= (wanted.0, wanted.1) && one.totalGlobalMem >= wanted.2 {
                best = number;
                break;
            }
        }
        put(device, best)
    }

    fn cudaGetDeviceProperties(prop: *mut cudaDeviceProp, device: c_int) {
        put(prop, properties::of(device)?)
    }

    fn cudaDeviceGetAttribute(value: *mut c_int, attr: cudaDeviceAttr, device: c_int) {
        put(value, attribute(self::device(device)?, CUdevice_attribute_enum(attr.0))?)
    }

    fn cudaDeviceReset() {
        reset()
    }

    fn cudaDeviceSynchronize() {
        ready()?;
        driver!(cuCtxSynchronize())
    }

    fn cudaDeviceSetLimit(limit: cudaLimit, value: usize) {
        ready()?;
        driver!(cuCtxSetLimit(CUlimit_enum(limit.0), value))
    }

    fn cudaDeviceGetLimit(pValue: *mut usize, limit: cudaLimit) {
        ready()?;
        driver!(cuCtxGetLimit(pValue, CUlimit_enum(limit.0)))
    }

    fn cudaDeviceGetCacheConfig(pCacheConfig: *mut cudaFuncCache) {
        ready()?;
        driver!(cuCtxGetCacheConfig(pCacheConfig.cast()))
    }

    fn cudaDeviceSetCacheConfig(cacheConfig: cudaFuncCache) {
        ready()?;
        driver!(cuCtxSetCacheConfig(CUfunc_cache_enum(cacheConfig.0)))
    }

    // Shared memory banks have had a single width for many generations.
    fn cudaDeviceGetSharedMemConfig(pConfig: *mut cudaSharedMemConfig) {
        ready()?;
        put(pConfig, cudaSharedMemConfig::cudaSharedMemBankSizeFourByte)
    }

    fn cudaDeviceSetSharedMemConfig(_config: cudaSharedMemConfig) {
        ready()
    }

    fn cudaCtxResetPersistingL2Cache() {
        ready()?;
        driver!(cuCtxResetPersistingL2Cache())
    }

    fn cudaDeviceGetStreamPriorityRange(leastPriority: *mut c_int, greatestPriority: *mut c_int) {
        ready()?;
        driver!(cuCtxGetStreamPriorityRange(leastPriority, greatestPriority))
    }

    fn cudaDeviceGetByPCIBusId(device: *mut c_int, pciBusId: *const c_char) {
        init()?;
        driver!(cuDeviceGetByPCIBusId(device, some_text(pciBusId)?))
    }

    fn cudaDeviceGetPCIBusId(pciBusId: *mut c_char, len: c_int, device: c_int) {
        driver!(cuDeviceGetPCIBusId(pciBusId, len, self::device(device)?))
    }

    fn cudaDeviceFlushGPUDirectRDMAWrites(
        target: cudaFlushGPUDirectRDMAWritesTarget,
        scope: cudaFlushGPUDirectRDMAWritesScope,
    ) {
        ready()?;
        driver!(cuFlushGPUDirectRDMAWrites(
            CUflushGPUDirectRDMAWritesTarget_enum(target.0),
            CUflushGPUDirectRDMAWritesScope_enum(scope.0)
        ))
    }

    fn cudaSetDeviceFlags(flags: c_uint) {
        set_flags(chosen()?, flags)
    }

    fn cudaGetDeviceFlags(flags: *mut c_uint) {
        let device = device(chosen()?)?;
        let (mut set, mut active) = (0, 0);
        driver!(cuDevicePrimaryCtxGetState(device, &raw mut set, &raw mut active))?;
        put(flags, set | MAP_HOST)
    }

    fn cudaDeviceCanAccessPeer(canAccessPeer: *mut c_int, device: c_int, peerDevice: c_int) {
        driver!(cuDeviceCanAccessPeer(canAccessPeer, self::device(device)?, self::device(peerDevice)?))
    }

    fn cudaDeviceEnablePeerAccess(peerDevice: c_int, flags: c_uint) {
        ready()?;
        driver!(cuCtxEnablePeerAccess(primary(peerDevice)?, flags))
    }

    fn cudaDeviceDisablePeerAccess(peerDevice: c_int) {
        ready()?;
        driver!(cuCtxDisablePeerAccess(primary(peerDevice)?))
    }

    fn cudaDeviceGetP2PAttribute(
        value: *mut c_int,
        attr: cudaDeviceP2PAttr,
        srcDevice: c_int,
        dstDevice: c_int,
    ) {
        let (from, to) = (device(srcDevice)?, device(dstDevice)?);
        driver!(cuDeviceGetP2PAttribute(value, CUdevice_P2PAttribute_enum(attr.0), from, to))
    }

    fn cudaDriverGetVersion(driverVersion: *mut c_int) {
        // Zero means that there is no driver, which is not an error.
        put(driverVersion, version().unwrap_or(0))
    }

    fn cudaRuntimeGetVersion(runtimeVersion: *mut c_int) {
        put(runtimeVersion, VERSION)
    }

    fn cudaProfilerStart() {
        ready()?;
        driver!(cuProfilerStart())
    }

    fn cudaProfilerStop() {
        ready()?;
        driver!(cuProfilerStop())
    }

    fn cudaDeviceGraphMemTrim(device: c_int) {
        driver!(cuDeviceGraphMemTrim(self::device(device)?))
    }

    fn cudaDeviceGetGraphMemAttribute(device: c_int, attr: cudaGraphMemAttributeType, value: *mut c_void) {
        let device = self::device(device)?;
        driver!(cuDeviceGetGraphMemAttribute(device, CUgraphMem_attribute_enum(attr.0), value))
    }

    fn cudaDeviceSetGraphMemAttribute(device: c_int, attr: cudaGraphMemAttributeType, value: *mut c_void) {
        let device = self::device(device)?;
        driver!(cuDeviceSetGraphMemAttribute(device, CUgraphMem_attribute_enum(attr.0), value))
    }

    // There are no private tables.
    fn cudaGetExportTable(ppExportTable: *mut *const c_void, _table: *const cudaUUID_t) {
        put(ppExportTable, null_mut::<c_void>().cast_const())?;
        Err(Error::cudaErrorNotSupported)
    }
}

fn set_flags(number: c_int, flags: c_uint) -> Answer {
    let device = device(number)?;
    // SAFETY: numbers only.
    unsafe { driver!(cuDevicePrimaryCtxSetFlags_v2(device, flags & !MAP_HOST)) }
}
