//! Kernel launches.

use std::{
    cell::Cell,
    ffi::{c_int, c_uint, c_void},
    sync::{
        Arc, PoisonError,
        atomic::{AtomicI32, Ordering},
    },
};

use cuda_definition::driver::types::*;
use remoting_proto::{
    apis::cuda::{
        Kind,
        calls::{Clusters, Examine, Launch, Shape},
        codes,
    },
    wire::Blob,
};

use crate::{
    capture::capturing,
    context,
    entry::{Outcome, connected, entry_points, offer, put},
    handles,
    link::Link,
};

/// The dynamic shared memory that every kernel may use, in bytes.
const SHARED: i32 = 48 << 10;
/// `CU_LAUNCH_PARAM_BUFFER_POINTER` and `CU_LAUNCH_PARAM_BUFFER_SIZE`
const BUFFER: u64 = 1;
const SIZE: u64 = 2;
/// The maximum size of a kernel's parameters in bytes.
const LARGEST: usize = 32_764;
/// The compute capability from which on a kernel can begin before the preceding one ends.
const OVERLAP: i32 = 9;
/// The maximum number of attributes of a launch.
const ATTRIBUTES: u32 = 64;

/// What a launch needs to know about a kernel.
#[derive(Debug)]
pub struct Kernel {
    /// The offset and size of each parameter.
    parameters: Vec<(u32, u32)>,
    /// The size of all parameters in bytes.
    size: usize,
    pub name: Vec<u8>,
    /// The maximum number of threads per block, or 0 if unknown.
    threads: i32,
    /// The dynamic shared memory that it may use.
    dynamic: AtomicI32,
    /// The same, as last set through this handle, unless another handle has set it since. [`UNSET`] if it was not.
    set: AtomicI32,
}

/// Not a size of shared memory.
const UNSET: i32 = i32::MIN;

/// Returns what is known about the kernel of a function's or kernel's handle.
pub fn kernel(link: &Link, handle: u64) -> Outcome<Arc<Kernel>> {
    let function = handles::valid(Kind::Function, handle)?;
    if function == 0 {
        return Err(codes::INVALID_HANDLE);
    }
    let kernels = link.state.kernels.read();
    let kernels = kernels.unwrap_or_else(PoisonError::into_inner);
    if let Some(kernel) = kernels.get(&function) {
        return Ok(Arc::clone(kernel));
    }
    drop(kernels);
    let info = link.ask(&Examine {
        context: context::current(),
        function,
    })?;
    let size = size_of_all(&info.parameters);
    if size > LARGEST {
        return Err(codes::INVALID_VALUE);
    }
    let kernel = Arc::new(Kernel {
        parameters: info.parameters,
        size,
        name: info.name.0,
        threads: info.threads,
        dynamic: AtomicI32::new(SHARED),
        set: AtomicI32::new(UNSET),
    });
    let kernels = link.state.kernels.write();
    let mut kernels = kernels.unwrap_or_else(PoisonError::into_inner);
    kernels.insert(function, Arc::clone(&kernel));
    Ok(kernel)
}

/// The size in bytes of parameters with these offsets and sizes.
fn size_of_all(parameters: &[(u32, u32)]) -> usize {
    let end = |(offset, size): &(u32, u32)| *offset as usize + *size as usize;
    parameters.iter().map(end).max().unwrap_or(0)
}

/// Discards what is known about all kernels: some may have been unloaded.
pub fn forget_all(link: &Link) {
    crate::answers::forget();
    let kernels = link.state.kernels.write();
    kernels.unwrap_or_else(PoisonError::into_inner).clear();
}

/// Discards what is known about a kernel.
pub fn forget(number: u32) {
    if let Some(link) = crate::link::existing() {
        crate::answers::forget();
        let kernels = link.state.kernels.write();
        kernels
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&number);
    }
}

/// Records an attribute that was set.
pub fn note_attribute(handle: u64, attribute: CUfunction_attribute, value: c_int) {
    if attribute == CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        && let Ok(link) = connected()
        && let Ok(kernel) = kernel(link, handle)
    {
        kernel.dynamic.store(value, Ordering::Relaxed);
    }
}

/// Whether a library's kernel already has an attribute: programs set it before each launch. False if there are several
/// devices, each of which has its own.
pub fn has_attribute(handle: u64, attribute: CUfunction_attribute, value: c_int) -> bool {
    attribute == CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        && value != UNSET
        && connected().is_ok_and(|link| {
            let devices = crate::link::known().map(|started| started.devices.len());
            let known = || {
                kernel(link, handle).is_ok_and(|kernel| kernel.set.load(Ordering::Relaxed) == value)
            };
            devices == Some(1) && handles::valid(Kind::Kernel, handle).is_ok() && known()
        })
}

/// Records that a library's kernel was given an attribute through its own handle.
pub fn has_got_attribute(handle: u64, attribute: CUfunction_attribute, value: c_int) {
    if attribute == CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        && let Ok(link) = connected()
        && let Ok(kernel) = kernel(link, handle)
    {
        kernel.set.store(value, Ordering::Relaxed);
    }
}

/// Called when any kernel may have been given another attribute through a function's handle.
pub fn forget_attributes() {
    if let Ok(link) = connected() {
        let kernels = link.state.kernels.read();
        for kernel in kernels.unwrap_or_else(PoisonError::into_inner).values() {
            kernel.set.store(UNSET, Ordering::Relaxed);
        }
    }
}

/// `cuFuncGetParamInfo`.
///
/// # Safety
/// Pointers are null or valid for writing numbers.
pub unsafe fn parameter(
    handle: u64,
    index: usize,
    offset: *mut usize,
    size: *mut usize,
) -> Outcome {
    let kernel = kernel(connected()?, handle)?;
    let (at, bytes) = kernel.parameters.get(index).ok_or(codes::INVALID_VALUE)?;
    // SAFETY: the caller's promise.
    unsafe {
        put(offset, *at as usize)?;
        offer(size, *bytes as usize);
    }
    Ok(())
}

/// Collects the bytes of a kernel's parameters into `bytes`, whatever these are before.
///
/// # Safety
/// As the API requires of `kernelParams` and `extra`.
pub unsafe fn gather(
    kernel: &Kernel,
    each: *mut *mut c_void,
    extra: *mut *mut c_void,
    bytes: &mut Vec<u8>,
) -> Outcome {
    bytes.clear();
    bytes.resize(kernel.size, 0);
    if extra.is_null() {
        for (index, (at, size)) in kernel.parameters.iter().enumerate() {
            if each.is_null() {
                return Err(codes::INVALID_VALUE);
            }
            let (at, size) = (*at as usize, *size as usize);
            // SAFETY: the caller's promise: an address for each parameter.
            unsafe {
                let from = each.add(index).read().cast::<u8>();
                if from.is_null() {
                    return Err(codes::INVALID_VALUE);
                }
                from.copy_to_nonoverlapping(bytes[at..at + size].as_mut_ptr(), size);
            }
        }
        return Ok(());
    }
    let (mut buffer, mut size) = (std::ptr::null::<u8>(), 0usize);
    for pair in 0..8 {
        // SAFETY: the caller's promise: pairs up to the terminating one.
        let key = unsafe { extra.add(2 * pair).read() } as u64;
        // SAFETY: as above; only read if this is not the terminating pair.
        let value = || unsafe { extra.add(2 * pair + 1).read() };
        match key {
            0 => break,
            BUFFER => buffer = value().cast(),
            // SAFETY: it points to the size.
            SIZE => size = unsafe { value().cast::<usize>().read() },
            _ => return Err(codes::INVALID_VALUE),
        }
    }
    if size < bytes.len() || buffer.is_null() && !bytes.is_empty() {
        return Err(codes::INVALID_VALUE);
    }
    // SAFETY: the caller promises this many bytes.
    unsafe { buffer.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
    Ok(())
}

/// A launch's attributes as bytes.
///
/// # Safety
/// The configuration is valid as the API requires.
unsafe fn attributes(config: &CUlaunchConfig) -> Outcome<&[u8]> {
    if config.numAttrs > ATTRIBUTES {
        return Err(codes::INVALID_VALUE);
    }
    if config.numAttrs == 0 {
        return Ok(&[]);
    }
    if config.attrs.is_null() {
        return Err(codes::INVALID_VALUE);
    }
    let size = config.numAttrs as usize * size_of::<CUlaunchAttribute>();
    // SAFETY: there are this many attributes.
    Ok(unsafe { std::slice::from_raw_parts(config.attrs.cast::<u8>(), size) })
}

/// Whether no driver refuses a launch because of its attributes: they only allow a kernel to begin before the preceding
/// one ends, on devices that can do that.
fn are_harmless(attributes: &[u8]) -> bool {
    use CUlaunchAttributeID as Id;
    let harmless = [
        Id::CU_LAUNCH_ATTRIBUTE_IGNORE,
        Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
    ];
    // The ID comes first.
    let mut each = attributes.chunks(size_of::<CUlaunchAttribute>());
    let all = each.all(|one| {
        let id = one.first_chunk().map(|id| u32::from_ne_bytes(*id));
        id.is_some_and(|id| harmless.iter().any(|harmless| harmless.0 == id))
    });
    let major = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR.0;
    let has_overlap = || {
        let device = context::device().ok();
        device.and_then(|device| crate::device::attribute(device, major).ok())
    };
    all && has_overlap().is_some_and(|major| major >= OVERLAP)
}

/// A launch that a program has requested.
struct Wanted<'a> {
    function: CUfunction,
    shape: Shape,
    stream: CUstream,
    cooperative: bool,
    attributes: &'a [u8],
}

thread_local! {
    /// The memory that held the attributes and parameters of this thread's last launch, for those of the next one.
    static SPARE: Cell<(Vec<u8>, Vec<u8>)> = const { Cell::new((Vec::new(), Vec::new())) };
}

/// Launches a kernel. Allocates no memory, apart from a thread's first launches.
///
/// # Safety
/// As the API requires of `kernelParams` and `extra`.
unsafe fn launch(wanted: Wanted<'_>, each: *mut *mut c_void, extra: *mut *mut c_void) -> Outcome {
    let link = connected()?;
    let context = context::need()?;
    let kernel = kernel(link, wanted.function as u64)?;
    let function = handles::valid(Kind::Function, wanted.function as u64)?;
    let stream = handles::valid(Kind::Stream, wanted.stream as u64)?;
    let Shape {
        grid,
        block,
        shared,
    } = &wanted.shape;
    let threads = block
        .iter()
        .try_fold(1u32, |all, one| all.checked_mul(*one));
    let threads = threads.ok_or(codes::INVALID_VALUE)?;
    if grid.contains(&0) || threads == 0 {
        return Err(codes::INVALID_VALUE);
    }
    // A launch that the driver might refuse is waited for until it is accepted, not until it is done.
    let plain = threads.cast_signed() <= kernel.threads
        && shared.cast_signed() <= kernel.dynamic.load(Ordering::Relaxed)
        && block[2] <= 64
        && grid[1] <= 65535
        && grid[2] <= 65535
        && !wanted.cooperative
        && (wanted.attributes.is_empty() || are_harmless(wanted.attributes))
        && !capturing(link, context, stream);
    // A thread that is ending has none any more.
    let (mut attributes, mut parameters) = SPARE.try_with(Cell::take).unwrap_or_default();
    attributes.clear();
    attributes.extend_from_slice(wanted.attributes);
    // SAFETY: the caller's promise.
    unsafe { gather(&kernel, each, extra, &mut parameters)? };
    let call = Launch {
        context,
        stream,
        function,
        shape: wanted.shape,
        cooperative: wanted.cooperative,
        attributes: Blob(attributes),
        parameters: Blob(parameters),
    };
    let launched = if plain {
        link.post(&call)
    } else {
        link.ask(&call)
    };
    let _ = SPARE.try_with(|spare| spare.set((call.attributes.0, call.parameters.0)));
    launched
}

unsafe fn clusters(
    count: *mut c_int,
    func: CUfunction,
    config: *const CUlaunchConfig,
    potential: bool,
) -> Outcome {
    let link = connected()?;
    // SAFETY: the caller's promise.
    let config = unsafe { config.as_ref() }.ok_or(codes::INVALID_VALUE)?;
    let found = link.ask(&Clusters {
        context: context::need()?,
        function: handles::valid(Kind::Function, func as u64)?,
        shape: shape(config),
        // SAFETY: as above.
        attributes: Blob(unsafe { attributes(config)? }.to_vec()),
        potential,
    })?;
    // SAFETY: as above.
    unsafe { put(count, found) }
}

fn shape(config: &CUlaunchConfig) -> Shape {
    Shape {
        grid: [config.gridDimX, config.gridDimY, config.gridDimZ],
        block: [config.blockDimX, config.blockDimY, config.blockDimZ],
        shared: config.sharedMemBytes,
    }
}

entry_points! {
    fn cuLaunchKernel(
        f: CUfunction,
        gridDimX: c_uint,
        gridDimY: c_uint,
        gridDimZ: c_uint,
        blockDimX: c_uint,
        blockDimY: c_uint,
        blockDimZ: c_uint,
        sharedMemBytes: c_uint,
        hStream: CUstream,
        kernelParams: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) {
        let grid = [gridDimX, gridDimY, gridDimZ];
        let shape = Shape { grid, block: [blockDimX, blockDimY, blockDimZ], shared: sharedMemBytes };
        let wanted = Wanted { function: f, shape, stream: hStream, cooperative: false, attributes: &[] };
        launch(wanted, kernelParams, extra)
    }

    fn cuLaunchCooperativeKernel(
        f: CUfunction,
        gridDimX: c_uint,
        gridDimY: c_uint,
        gridDimZ: c_uint,
        blockDimX: c_uint,
        blockDimY: c_uint,
        blockDimZ: c_uint,
        sharedMemBytes: c_uint,
        hStream: CUstream,
        kernelParams: *mut *mut c_void,
    ) {
        let grid = [gridDimX, gridDimY, gridDimZ];
        let shape = Shape { grid, block: [blockDimX, blockDimY, blockDimZ], shared: sharedMemBytes };
        let wanted = Wanted { function: f, shape, stream: hStream, cooperative: true, attributes: &[] };
        launch(wanted, kernelParams, std::ptr::null_mut())
    }

    fn cuLaunchKernelEx(
        config: *const CUlaunchConfig,
        f: CUfunction,
        kernelParams: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) {
        let config = config.as_ref().ok_or(codes::INVALID_VALUE)?;
        let wanted = Wanted {
            function: f,
            shape: shape(config),
            stream: config.hStream,
            cooperative: false,
            attributes: attributes(config)?,
        };
        launch(wanted, kernelParams, extra)
    }

    fn cuOccupancyMaxActiveClusters(numClusters: *mut c_int, func: CUfunction, config: *const CUlaunchConfig) {
        clusters(numClusters, func, config, false)
    }

    fn cuOccupancyMaxPotentialClusterSize(clusterSize: *mut c_int, func: CUfunction, config: *const CUlaunchConfig) {
        clusters(clusterSize, func, config, true)
    }

    fn cuOccupancyMaxPotentialBlockSize(
        minGridSize: *mut c_int,
        blockSize: *mut c_int,
        func: CUfunction,
        blockSizeToDynamicSMemSize: CUoccupancyB2DSize,
        dynamicSMemSize: usize,
        blockSizeLimit: c_int,
    ) {
        best(minGridSize, blockSize, func, blockSizeToDynamicSMemSize, dynamicSMemSize, blockSizeLimit)
    }

    fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        minGridSize: *mut c_int,
        blockSize: *mut c_int,
        func: CUfunction,
        blockSizeToDynamicSMemSize: CUoccupancyB2DSize,
        dynamicSMemSize: usize,
        blockSizeLimit: c_int,
        _flags: c_uint,
    ) {
        best(minGridSize, blockSize, func, blockSizeToDynamicSMemSize, dynamicSMemSize, blockSizeLimit)
    }
}

/// Finds the block size with which the most threads run at the same time.
unsafe fn best(
    minimum: *mut c_int,
    to: *mut c_int,
    func: CUfunction,
    shared: CUoccupancyB2DSize,
    dynamic: usize,
    limit: c_int,
) -> Outcome {
    let kernel = kernel(connected()?, func as u64)?;
    let device = context::device()?;
    let attribute = |one: CUdevice_attribute| crate::device::attribute(device, one.0);
    let warp = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE)?.max(1);
    let processors = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let threads =
        attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?;
    let most = if kernel.threads > 0 {
        kernel.threads
    } else {
        1024
    };
    let most = if limit > 0 { most.min(limit) } else { most };
    let (mut best, mut blocks_of_best, mut active) = (0, 0, 0);
    let mut size = (most + warp - 1) / warp * warp;
    while size > 0 && active < threads {
        let tried = size.min(most);
        let dynamic = match shared {
            // SAFETY: the program's function.
            Some(shared) => unsafe { shared(tried) },
            None => dynamic,
        };
        let blocks = crate::answers::blocks(func, tried, dynamic)?;
        if blocks * tried > active {
            (active, best, blocks_of_best) = (blocks * tried, tried, blocks);
        }
        size -= warp;
    }
    // SAFETY: the caller's promise.
    unsafe {
        put(minimum, blocks_of_best * processors)?;
        put(to, best)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_parameters_that_a_worker_tells_of_are_smaller_than_their_parts() {
        assert_eq!(size_of_all(&[]), 0);
        assert_eq!(size_of_all(&[(0, 8), (8, 4)]), 12);
        assert!(size_of_all(&[(0, 8), (u32::MAX, 8)]) > LARGEST);
    }
}
