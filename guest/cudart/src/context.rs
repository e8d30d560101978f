//! Devices and their primary contexts: which one a thread uses.
//!
//! The runtime uses whatever context is current. If there is none, it makes the primary context of
//! the thread's device current.

use std::{
    cell::Cell,
    collections::BTreeMap,
    ffi::c_int,
    ptr::null_mut,
    sync::{Mutex, MutexGuard, PoisonError},
};

use cuda_definition::driver::types::{CUcontext, CUdevice};

use crate::{
    driver::{driver, init},
    error::{Answer, Error},
};

thread_local! {
    /// The device that `cudaSetDevice` selected.
    static DEVICE: Cell<c_int> = const { Cell::new(0) };
}

/// The primary contexts that are retained, by device.
static PRIMARY: Mutex<BTreeMap<CUdevice, usize>> = Mutex::new(BTreeMap::new());

fn primaries() -> MutexGuard<'static, BTreeMap<CUdevice, usize>> {
    PRIMARY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of devices.
///
/// # Errors
/// There is no driver, or no device.
pub fn count() -> Answer<c_int> {
    init()?;
    let mut count = 0;
    // SAFETY: valid for writing the answer.
    unsafe { driver!(cuDeviceGetCount(&raw mut count))? };
    match count {
        0 => Err(Error::cudaErrorNoDevice),
        _ => Ok(count),
    }
}

/// The driver's device with this number.
///
/// # Errors
/// There is no device with this number.
pub fn device(number: c_int) -> Answer<CUdevice> {
    init()?;
    let mut device = 0;
    // SAFETY: valid for writing the answer.
    unsafe { driver!(cuDeviceGet(&raw mut device, number))? };
    Ok(device)
}

/// A device's primary context, retained once.
///
/// # Errors
/// The driver's.
pub fn primary(number: c_int) -> Answer<CUcontext> {
    let device = device(number)?;
    let mut all = primaries();
    if let Some(context) = all.get(&device) {
        return Ok(*context as CUcontext);
    }
    let mut context = null_mut();
    // SAFETY: valid for writing the answer.
    unsafe { driver!(cuDevicePrimaryCtxRetain(&raw mut context, device))? };
    all.insert(device, context as usize);
    Ok(context)
}

/// The thread's context, or null if it has none.
fn current() -> Answer<CUcontext> {
    let mut context = null_mut();
    // SAFETY: valid for writing the answer.
    unsafe { driver!(cuCtxGetCurrent(&raw mut context))? };
    Ok(context)
}

fn use_context(context: CUcontext) -> Answer {
    // SAFETY: a context of the driver's, or null.
    unsafe { driver!(cuCtxSetCurrent(context)) }
}

/// Makes sure that the thread has a context. Costs one call of the driver, which is local.
///
/// # Errors
/// The driver's.
pub fn ready() -> Answer {
    init()?;
    if current()?.is_null() {
        use_context(primary(DEVICE.get())?)?;
    }
    Ok(())
}

/// The thread's device: that of its context, or the one that it has selected.
///
/// # Errors
/// There is no driver, or no device.
pub fn chosen() -> Answer<c_int> {
    init()?;
    if current()?.is_null() {
        return Ok(DEVICE.get());
    }
    let mut device = 0;
    // SAFETY: valid for writing the answer.
    unsafe { driver!(cuCtxGetDevice(&raw mut device))? };
    Ok(device)
}

/// Selects the thread's device, and initializes it.
///
/// # Errors
/// There is no device with this number.
pub fn choose(number: c_int) -> Answer {
    if !(0..count()?).contains(&number) {
        return Err(Error::cudaErrorInvalidDevice);
    }
    let context = primary(number)?;
    DEVICE.set(number);
    if current()? == context {
        return Ok(());
    }
    use_context(context)
}

/// Destroys everything on a device. The next call starts anew.
///
/// # Errors
/// The driver's.
pub fn reset() -> Answer {
    let number = chosen()?;
    let device = device(number)?;
    let had = primaries().remove(&device);
    // SAFETY: a device of the driver's.
    unsafe { driver!(cuDevicePrimaryCtxReset_v2(device))? };
    if had.is_some() {
        // SAFETY: it was retained once.
        let _already_gone: Answer = unsafe { driver!(cuDevicePrimaryCtxRelease_v2(device)) };
    }
    use_context(null_mut())
}
