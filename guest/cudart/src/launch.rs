//! Launches, attributes of kernels, and occupancy.

use std::ffi::{c_char, c_int, c_uint, c_void};

use cuda_definition::{
    driver::types::*,
    runtime::types::{dim3, *},
};

use crate::{
    api::{Base, entry_points, get, put, streamed},
    context,
    driver::driver,
    error::{Answer, Error},
    registry,
};

/// The kernel that a program refers to, for calls that need a context.
///
/// # Errors
/// The kernel is not registered, or there is no device.
pub fn kernel(host: *const c_void) -> Answer<CUkernel> {
    context::ready()?;
    registry::kernel(host)
}

/// Launches a kernel on a grid of blocks.
///
/// # Safety
/// The arguments are addresses of values that the kernel expects.
unsafe fn launch(
    kernel: CUkernel,
    (grid, block): (dim3, dim3),
    shared: usize,
    stream: CUstream,
    cooperative: bool,
    arguments: *mut *mut c_void,
) -> Answer {
    let shared = c_uint::try_from(shared).map_err(|_| Error::cudaErrorInvalidValue)?;
    // The driver accepts a kernel as a function of the current context.
    let function: CUfunction = kernel.cast();
    macro_rules! with {
        ($name:ident $($more:expr)?) => {
            driver!($name(
                function,
                grid.x,
                grid.y,
                grid.z,
                block.x,
                block.y,
                block.z,
                shared,
                stream,
                arguments
                $(, $more)?
            ))
        };
    }
    // SAFETY: the caller's promise.
    let answer = unsafe {
        match cooperative {
            true => with!(cuLaunchCooperativeKernel),
            false => with!(cuLaunchKernel std::ptr::null_mut()),
        }
    };
    answer.map_err(|error| explained(error, grid, block))
}

/// Converts the driver's error for wrong dimensions (an invalid value) to the runtime's (an invalid configuration).
fn explained(error: Error, grid: dim3, block: dim3) -> Error {
    if error == Error::cudaErrorInvalidValue && !possible(grid, block).unwrap_or(true) {
        return Error::cudaErrorInvalidConfiguration;
    }
    error
}

/// Whether the device supports such a grid of such blocks.
fn possible(grid: dim3, block: dim3) -> Answer<bool> {
    use CUdevice_attribute as A;
    let device = context::device(context::chosen()?)?;
    let within = |value: c_uint, attribute: CUdevice_attribute| -> Answer<bool> {
        let mut limit = 0;
        // SAFETY: valid for writing the answer.
        unsafe { driver!(cuDeviceGetAttribute(&raw mut limit, attribute, device))? };
        Ok(value != 0 && i64::from(value) <= i64::from(limit))
    };
    let threads = u64::from(block.x) * u64::from(block.y) * u64::from(block.z);
    let threads = c_uint::try_from(threads).unwrap_or(c_uint::MAX);
    Ok(
        within(threads, A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?
            && within(block.x, A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X)?
            && within(block.y, A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y)?
            && within(block.z, A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z)?
            && within(grid.x, A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X)?
            && within(grid.y, A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y)?
            && within(grid.z, A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z)?,
    )
}

/// Converts a launch's configuration for the driver. Attributes are the same.
fn config(config: &cudaLaunchConfig_t, base: Base) -> Answer<CUlaunchConfig> {
    Ok(CUlaunchConfig {
        gridDimX: config.gridDim.x,
        gridDimY: config.gridDim.y,
        gridDimZ: config.gridDim.z,
        blockDimX: config.blockDim.x,
        blockDimY: config.blockDim.y,
        blockDimZ: config.blockDim.z,
        sharedMemBytes: c_uint::try_from(config.dynamicSmemBytes)
            .map_err(|_| Error::cudaErrorInvalidValue)?,
        hStream: base.stream(config.stream),
        attrs: config.attrs.cast(),
        numAttrs: config.numAttrs,
    })
}
const _: () = {
    assert!(size_of::<cudaLaunchAttribute>() == size_of::<CUlaunchAttribute>());
    assert!(
        std::mem::offset_of!(cudaLaunchAttribute, val)
            == std::mem::offset_of!(CUlaunchAttribute, value)
    );
};

fn attribute(kernel: CUkernel, attribute: CUfunction_attribute) -> Answer<c_int> {
    let device = context::device(context::chosen()?)?;
    let mut value = 0;
    // SAFETY: a kernel of the driver's, and valid for writing the answer.
    unsafe {
        driver!(cuKernelGetAttribute(
            &raw mut value,
            attribute,
            kernel,
            device
        ))?
    };
    Ok(value)
}

fn attributes(kernel: CUkernel) -> Answer<cudaFuncAttributes> {
    use CUfunction_attribute as A;
    let bytes = |of| attribute(kernel, of).map(|bytes| usize::try_from(bytes).unwrap_or(0));
    Ok(cudaFuncAttributes {
        sharedSizeBytes: bytes(A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
        constSizeBytes: bytes(A::CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES)?,
        localSizeBytes: bytes(A::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
        maxThreadsPerBlock: attribute(kernel, A::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        numRegs: attribute(kernel, A::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
        ptxVersion: attribute(kernel, A::CU_FUNC_ATTRIBUTE_PTX_VERSION)?,
        binaryVersion: attribute(kernel, A::CU_FUNC_ATTRIBUTE_BINARY_VERSION)?,
        cacheModeCA: attribute(kernel, A::CU_FUNC_ATTRIBUTE_CACHE_MODE_CA)?,
        maxDynamicSharedSizeBytes: attribute(
            kernel,
            A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        )?,
        preferredShmemCarveout: attribute(
            kernel,
            A::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
        )?,
        // These were added with clusters. An older driver does not have them.
        clusterDimMustBeSet: attribute(kernel, A::CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET)
            .unwrap_or(0),
        requiredClusterWidth: attribute(kernel, A::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH)
            .unwrap_or(0),
        requiredClusterHeight: attribute(kernel, A::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT)
            .unwrap_or(0),
        requiredClusterDepth: attribute(kernel, A::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH)
            .unwrap_or(0),
        clusterSchedulingPolicyPreference: attribute(
            kernel,
            A::CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE,
        )
        .unwrap_or(0),
        nonPortableClusterSizeAllowed: attribute(
            kernel,
            A::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
        )
        .unwrap_or(0),
        reserved: [0; 16],
    })
}

streamed! {
    fn cudaLaunchKernel / cudaLaunchKernel_ptsz [base] (
        func: *const c_void,
        gridDim: dim3,
        blockDim: dim3,
        args: *mut *mut c_void,
        sharedMem: usize,
        stream: cudaStream_t,
    ) {
        launch(kernel(func)?, (gridDim, blockDim), sharedMem, base.stream(stream), false, args)
    }

    fn __cudaLaunchKernel / __cudaLaunchKernel_ptsz [base] (
        kernel: cudaKernel_t,
        gridDim: dim3,
        blockDim: dim3,
        args: *mut *mut c_void,
        sharedMem: usize,
        stream: cudaStream_t,
    ) {
        if kernel.is_null() {
            // `__cudaGetKernel` has set the error.
            return Err(match crate::error::last() {
                Error::cudaSuccess => Error::cudaErrorInvalidDeviceFunction,
                error => error,
            });
        }
        context::ready()?;
        launch(kernel.cast(), (gridDim, blockDim), sharedMem, base.stream(stream), false, args)
    }

    fn cudaLaunchCooperativeKernel / cudaLaunchCooperativeKernel_ptsz [base] (
        func: *const c_void,
        gridDim: dim3,
        blockDim: dim3,
        args: *mut *mut c_void,
        sharedMem: usize,
        stream: cudaStream_t,
    ) {
        launch(kernel(func)?, (gridDim, blockDim), sharedMem, base.stream(stream), true, args)
    }

    fn cudaLaunchKernelExC / cudaLaunchKernelExC_ptsz [base] (
        config: *const cudaLaunchConfig_t,
        func: *const c_void,
        args: *mut *mut c_void,
    ) {
        let asked = get(config)?;
        let function: CUfunction = kernel(func)?.cast();
        let config = self::config(&asked, base)?;
        let answer = driver!(cuLaunchKernelEx(&raw const config, function, args, std::ptr::null_mut()));
        answer.map_err(|error| explained(error, asked.gridDim, asked.blockDim))
    }

    fn cudaLaunchHostFunc / cudaLaunchHostFunc_ptsz [base] (
        stream: cudaStream_t,
        r#fn: cudaHostFn_t,
        userData: *mut c_void,
    ) {
        context::ready()?;
        driver!(cuLaunchHostFunc(base.stream(stream), r#fn, userData))
    }
}

entry_points! {
    fn cudaFuncGetAttributes(attr: *mut cudaFuncAttributes, func: *const c_void) {
        put(attr, attributes(kernel(func)?)?)
    }

    fn cudaFuncSetAttribute(func: *const c_void, attr: cudaFuncAttribute, value: c_int) {
        let kernel = kernel(func)?;
        let device = context::device(context::chosen()?)?;
        driver!(cuKernelSetAttribute(CUfunction_attribute_enum(attr.0), value, kernel, device))
    }

    fn cudaKernelSetAttributeForDevice(kernel: cudaKernel_t, attr: cudaFuncAttribute, value: c_int, device: c_int) {
        let device = context::device(device)?;
        driver!(cuKernelSetAttribute(CUfunction_attribute_enum(attr.0), value, kernel.cast(), device))
    }

    fn cudaFuncSetCacheConfig(func: *const c_void, cacheConfig: cudaFuncCache) {
        let kernel = kernel(func)?;
        let device = context::device(context::chosen()?)?;
        driver!(cuKernelSetCacheConfig(kernel, CUfunc_cache_enum(cacheConfig.0), device))
    }

    // Shared memory banks have had a single width for many generations.
    fn cudaFuncSetSharedMemConfig(func: *const c_void, _config: cudaSharedMemConfig) {
        kernel(func).map(|_| ())
    }

    fn cudaFuncGetName(name: *mut *const c_char, func: *const c_void) {
        driver!(cuKernelGetName(name, kernel(func)?))
    }

    fn cudaFuncGetParamInfo(
        func: *const c_void,
        paramIndex: usize,
        paramOffset: *mut usize,
        paramSize: *mut usize,
    ) {
        driver!(cuKernelGetParamInfo(kernel(func)?, paramIndex, paramOffset, paramSize))
    }

    fn cudaGetFuncBySymbol(functionPtr: *mut cudaFunction_t, symbolPtr: *const c_void) {
        let kernel = kernel(symbolPtr)?;
        driver!(cuKernelGetFunction(functionPtr.cast(), kernel))
    }

    fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        numBlocks: *mut c_int,
        func: *const c_void,
        blockSize: c_int,
        dynamicSMemSize: usize,
    ) {
        let function: CUfunction = kernel(func)?.cast();
        driver!(cuOccupancyMaxActiveBlocksPerMultiprocessor(numBlocks, function, blockSize, dynamicSMemSize))
    }

    fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        numBlocks: *mut c_int,
        func: *const c_void,
        blockSize: c_int,
        dynamicSMemSize: usize,
        flags: c_uint,
    ) {
        let function: CUfunction = kernel(func)?.cast();
        driver!(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
            numBlocks, function, blockSize, dynamicSMemSize, flags
        ))
    }

    fn cudaOccupancyAvailableDynamicSMemPerBlock(
        dynamicSmemSize: *mut usize,
        func: *const c_void,
        numBlocks: c_int,
        blockSize: c_int,
    ) {
        let function: CUfunction = kernel(func)?.cast();
        driver!(cuOccupancyAvailableDynamicSMemPerBlock(dynamicSmemSize, function, numBlocks, blockSize))
    }

    fn cudaOccupancyMaxPotentialClusterSize(
        clusterSize: *mut c_int,
        func: *const c_void,
        launchConfig: *const cudaLaunchConfig_t,
    ) {
        let function: CUfunction = kernel(func)?.cast();
        let config = config(&get(launchConfig)?, Base::Legacy)?;
        driver!(cuOccupancyMaxPotentialClusterSize(clusterSize, function, &raw const config))
    }

    fn cudaOccupancyMaxActiveClusters(
        numClusters: *mut c_int,
        func: *const c_void,
        launchConfig: *const cudaLaunchConfig_t,
    ) {
        let function: CUfunction = kernel(func)?.cast();
        let config = config(&get(launchConfig)?, Base::Legacy)?;
        driver!(cuOccupancyMaxActiveClusters(numClusters, function, &raw const config))
    }
}
