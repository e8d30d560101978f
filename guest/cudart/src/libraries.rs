//! Libraries that a program loads itself, and the driver's functions by name.

use std::{
    ffi::{c_char, c_int, c_uint, c_ulonglong, c_void},
    ptr::null_mut,
};

use cuda_definition::{driver::types::*, runtime::types::*};

use crate::{
    api::{Base, entry_points, put, some_text, streamed},
    context::ready,
    device::VERSION,
    driver::{driver, init},
    error::{Answer, Error},
    registry,
};

/// `cudaEnablePerThreadDefaultStream`
const PER_THREAD: c_ulonglong = 2;

/// Looks up one of the driver's functions for a program that was built for `version`.
///
/// # Safety
/// A string, and pointers valid for writing the answers; the one for the status may be null.
unsafe fn function(
    symbol: *const c_char,
    to: *mut *mut c_void,
    version: c_int,
    flags: c_ulonglong,
    base: Base,
    status: *mut cudaDriverEntryPointQueryResult,
) -> Answer {
    use cudaDriverEntryPointQueryResult as Q;
    init()?;
    let symbol = some_text(symbol)?;
    if to.is_null() {
        return Err(Error::cudaErrorInvalidValue);
    }
    let flags = match (flags, base) {
        (0, Base::PerThread) => PER_THREAD,
        _ => flags,
    };
    let mut found = CUdriverProcAddressQueryResult_enum(0);
    // SAFETY: the caller's promise.
    let answer = unsafe {
        driver!(cuGetProcAddress_v2(
            symbol,
            to,
            version,
            flags,
            &raw mut found
        ))
    };
    let result = match answer {
        Ok(()) => Q(found.0),
        Err(Error::cudaErrorSymbolNotFound) if found.0 == 0 => {
            Q::cudaDriverEntryPointSymbolNotFound
        }
        Err(Error::cudaErrorSymbolNotFound) => Q(found.0),
        Err(error) => return Err(error),
    };
    if result != Q::cudaDriverEntryPointSuccess {
        // SAFETY: not null.
        unsafe { to.write(null_mut()) };
    }
    if !status.is_null() {
        // SAFETY: the caller's promise.
        unsafe { status.write(result) };
        return Ok(());
    }
    match result {
        Q::cudaDriverEntryPointSuccess => Ok(()),
        _ => Err(Error::cudaErrorSymbolNotFound),
    }
}

streamed! {
    fn cudaGetDriverEntryPoint / cudaGetDriverEntryPoint_ptsz [base] (
        symbol: *const c_char,
        funcPtr: *mut *mut c_void,
        flags: c_ulonglong,
        driverStatus: *mut cudaDriverEntryPointQueryResult,
    ) {
        function(symbol, funcPtr, VERSION, flags, base, driverStatus)
    }

    fn cudaGetDriverEntryPointByVersion / cudaGetDriverEntryPointByVersion_ptsz [base] (
        symbol: *const c_char,
        funcPtr: *mut *mut c_void,
        cudaVersion: c_uint,
        flags: c_ulonglong,
        driverStatus: *mut cudaDriverEntryPointQueryResult,
    ) {
        let version = c_int::try_from(cudaVersion).map_err(|_| Error::cudaErrorInvalidValue)?;
        function(symbol, funcPtr, version, flags, base, driverStatus)
    }
}

entry_points! {
    fn cudaLibraryLoadData(
        library: *mut cudaLibrary_t,
        code: *const c_void,
        jitOptions: *mut cudaJitOption,
        jitOptionsValues: *mut *mut c_void,
        numJitOptions: c_uint,
        libraryOptions: *mut cudaLibraryOption,
        libraryOptionValues: *mut *mut c_void,
        numLibraryOptions: c_uint,
    ) {
        ready()?;
        // The numbers of the options are the same.
        driver!(cuLibraryLoadData(
            library.cast(),
            code,
            jitOptions.cast(),
            jitOptionsValues,
            numJitOptions,
            libraryOptions.cast(),
            libraryOptionValues,
            numLibraryOptions
        ))
    }

    fn cudaLibraryLoadFromFile(
        library: *mut cudaLibrary_t,
        fileName: *const c_char,
        jitOptions: *mut cudaJitOption,
        jitOptionsValues: *mut *mut c_void,
        numJitOptions: c_uint,
        libraryOptions: *mut cudaLibraryOption,
        libraryOptionValues: *mut *mut c_void,
        numLibraryOptions: c_uint,
    ) {
        ready()?;
        driver!(cuLibraryLoadFromFile(
            library.cast(),
            some_text(fileName)?,
            jitOptions.cast(),
            jitOptionsValues,
            numJitOptions,
            libraryOptions.cast(),
            libraryOptionValues,
            numLibraryOptions
        ))
    }

    fn cudaLibraryUnload(library: cudaLibrary_t) {
        ready()?;
        driver!(cuLibraryUnload(library.cast()))
    }

    fn cudaLibraryGetKernel(pKernel: *mut cudaKernel_t, library: cudaLibrary_t, name: *const c_char) {
        ready()?;
        let mut kernel = null_mut();
        driver!(cuLibraryGetKernel(&raw mut kernel, library.cast(), some_text(name)?))?;
        registry::add_kernel(kernel);
        put(pKernel, kernel.cast())
    }

    fn cudaLibraryGetGlobal(
        dptr: *mut *mut c_void,
        bytes: *mut usize,
        library: cudaLibrary_t,
        name: *const c_char,
    ) {
        ready()?;
        driver!(cuLibraryGetGlobal(dptr.cast(), bytes, library.cast(), some_text(name)?))
    }

    fn cudaLibraryGetManaged(
        dptr: *mut *mut c_void,
        bytes: *mut usize,
        library: cudaLibrary_t,
        name: *const c_char,
    ) {
        ready()?;
        driver!(cuLibraryGetManaged(dptr.cast(), bytes, library.cast(), some_text(name)?))
    }

    fn cudaLibraryGetUnifiedFunction(fptr: *mut *mut c_void, library: cudaLibrary_t, symbol: *const c_char) {
        ready()?;
        driver!(cuLibraryGetUnifiedFunction(fptr, library.cast(), some_text(symbol)?))
    }

    fn cudaLibraryGetKernelCount(count: *mut c_uint, lib: cudaLibrary_t) {
        ready()?;
        driver!(cuLibraryGetKernelCount(count, lib.cast()))
    }

    fn cudaLibraryEnumerateKernels(kernels: *mut cudaKernel_t, numKernels: c_uint, lib: cudaLibrary_t) {
        ready()?;
        driver!(cuLibraryEnumerateKernels(kernels.cast(), numKernels, lib.cast()))?;
        for number in 0..numKernels as usize {
            let kernel = kernels.add(number).read();
            if !kernel.is_null() {
                registry::add_kernel(kernel.cast());
            }
        }
        Ok(())
    }
}
