//! `cudaDeviceProp`, assembled from a device's attributes.

use std::ffi::{c_char, c_int};

use cuda_definition::{driver::types::*, runtime::types::*};

use crate::{context::device, driver::driver, error::Answer};

/// All properties of a device. Those that an older driver does not know are zero.
///
/// # Errors
/// There is no such device.
pub fn of(number: c_int) -> Answer<cudaDeviceProp> {
    let device = device(number)?;
    // SAFETY: numbers and arrays of numbers, for which zero is a valid value.
    let mut all: cudaDeviceProp = unsafe { std::mem::zeroed() };
    let mut uuid = CUuuid { bytes: [0; 16] };
    // SAFETY: valid for writing the answers, with their sizes.
    unsafe {
        let room = c_int::try_from(all.name.len()).unwrap_or(0);
        driver!(cuDeviceGetName(all.name.as_mut_ptr(), room, device))?;
        driver!(cuDeviceTotalMem_v2(&raw mut all.totalGlobalMem, device))?;
        if driver!(cuDeviceGetUuid_v2(&raw mut uuid, device)).is_ok() {
            all.uuid.bytes = uuid.bytes.map(|byte| byte as c_char);
        }
    }
    let number = |attribute: CUdevice_attribute| self::attribute(device, attribute).unwrap_or(0);
    let bytes = |attribute| usize::try_from(number(attribute)).unwrap_or(0);
    limits(&mut all, number, bytes);
    images(&mut all, number, bytes);
    abilities(&mut all, number);
    Ok(all)
}

use CUdevice_attribute as A;

fn limits(all: &mut cudaDeviceProp, number: impl Fn(A) -> c_int, bytes: impl Fn(A) -> usize) {
    all.major = number(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    all.minor = number(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    all.sharedMemPerBlock = bytes(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
    all.sharedMemPerBlockOptin = bytes(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    all.sharedMemPerMultiprocessor =
        bytes(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
    all.reservedSharedMemPerBlock = bytes(A::CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK);
    all.regsPerBlock = number(A::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK);
    all.regsPerMultiprocessor = number(A::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR);
    all.warpSize = number(A::CU_DEVICE_ATTRIBUTE_WARP_SIZE);
    all.memPitch = bytes(A::CU_DEVICE_ATTRIBUTE_MAX_PITCH);
    all.maxThreadsPerBlock = number(A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
    all.maxThreadsPerMultiProcessor = number(A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
    all.maxBlocksPerMultiProcessor = number(A::CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR);
    all.maxThreadsDim = [
        number(A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X),
        number(A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y),
        number(A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z),
    ];
    all.maxGridSize = [
        number(A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X),
        number(A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y),
        number(A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z),
    ];
    all.totalConstMem = bytes(A::CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY);
    all.multiProcessorCount = number(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    all.memoryBusWidth = number(A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
    all.l2CacheSize = number(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
    all.persistingL2CacheMaxSize = number(A::CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE);
    all.accessPolicyMaxWindowSize = number(A::CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE);
    all.asyncEngineCount = number(A::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
    all.pciBusID = number(A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
    all.pciDeviceID = number(A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID);
    all.pciDomainID = number(A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID);
    all.gpuPciDeviceID = number(A::CU_DEVICE_ATTRIBUTE_GPU_PCI_DEVICE_ID).cast_unsigned();
    all.gpuPciSubsystemID = number(A::CU_DEVICE_ATTRIBUTE_GPU_PCI_SUBSYSTEM_ID).cast_unsigned();
    all.deviceNumaConfig = number(A::CU_DEVICE_ATTRIBUTE_NUMA_CONFIG);
    all.deviceNumaId = number(A::CU_DEVICE_ATTRIBUTE_NUMA_ID);
    all.hostNumaId = number(A::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID);
    all.multiGpuBoardGroupID = number(A::CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD_GROUP_ID);
}

fn images(all: &mut cudaDeviceProp, number: impl Fn(A) -> c_int, bytes: impl Fn(A) -> usize) {
    all.textureAlignment = bytes(A::CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT);
    all.texturePitchAlignment = bytes(A::CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT);
    all.surfaceAlignment = bytes(A::CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT);
    all.maxTexture1D = number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH);
    all.maxTexture1DMipmap = number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH);
    all.maxTexture2D = [
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH),
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT),
    ];
    all.maxTexture2DMipmap = [
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_WIDTH),
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT),
    ];
    all.maxTexture2DLinear = [
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_WIDTH),
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_HEIGHT),
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_PITCH),
    ];
    all.maxTexture2DGather = [
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_WIDTH),
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_HEIGHT),
    ];
    all.maxTexture3D = [
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH),
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT),
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH),
    ];
    all.maxTexture3DAlt = [
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH_ALTERNATE),
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT_ALTERNATE),
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH_ALTERNATE),
    ];
    all.maxTextureCubemap = number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_WIDTH);
    all.maxTexture1DLayered = [
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_WIDTH),
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_LAYERS),
    ];
    all.maxTexture2DLayered = [
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_WIDTH),
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_HEIGHT),
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_LAYERS),
    ];
    all.maxTextureCubemapLayered = [
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_WIDTH),
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_LAYERS),
    ];
    all.maxSurface1D = number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_WIDTH);
    all.maxSurface2D = [
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_WIDTH),
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_HEIGHT),
    ];
    all.maxSurface3D = [
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_WIDTH),
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_HEIGHT),
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_DEPTH),
    ];
    all.maxSurface1DLayered = [
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_WIDTH),
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_LAYERS),
    ];
    all.maxSurface2DLayered = [
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_WIDTH),
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_HEIGHT),
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_LAYERS),
    ];
    all.maxSurfaceCubemap = number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_WIDTH);
    all.maxSurfaceCubemapLayered = [
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_WIDTH),
        number(A::CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_LAYERS),
    ];
}

fn abilities(all: &mut cudaDeviceProp, number: impl Fn(A) -> c_int) {
    all.integrated = number(A::CU_DEVICE_ATTRIBUTE_INTEGRATED);
    all.canMapHostMemory = number(A::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY);
    all.concurrentKernels = number(A::CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS);
    all.ECCEnabled = number(A::CU_DEVICE_ATTRIBUTE_ECC_ENABLED);
    all.tccDriver = number(A::CU_DEVICE_ATTRIBUTE_TCC_DRIVER);
    all.unifiedAddressing = number(A::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
    all.streamPrioritiesSupported = number(A::CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED);
    all.globalL1CacheSupported = number(A::CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED);
    all.localL1CacheSupported = number(A::CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED);
    all.managedMemory = number(A::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY);
    all.isMultiGpuBoard = number(A::CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD);
    all.hostNativeAtomicSupported = number(A::CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED);
    all.pageableMemoryAccess = number(A::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS);
    all.concurrentManagedAccess = number(A::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS);
    all.computePreemptionSupported = number(A::CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED);
    all.canUseHostPointerForRegisteredMem =
        number(A::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
    all.cooperativeLaunch = number(A::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH);
    all.pageableMemoryAccessUsesHostPageTables =
        number(A::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES);
    all.directManagedMemAccessFromHost =
        number(A::CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST);
    all.hostRegisterSupported = number(A::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED);
    all.sparseCudaArraySupported = number(A::CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED);
    all.hostRegisterReadOnlySupported =
        number(A::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED);
    all.timelineSemaphoreInteropSupported =
        number(A::CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED);
    all.memoryPoolsSupported = number(A::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);
    all.gpuDirectRDMASupported = number(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED);
    all.gpuDirectRDMAFlushWritesOptions =
        number(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS).cast_unsigned();
    all.gpuDirectRDMAWritesOrdering =
        number(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING);
    all.memoryPoolSupportedHandleTypes =
        number(A::CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES).cast_unsigned();
    all.deferredMappingCudaArraySupported =
        number(A::CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED);
    all.ipcEventSupported = number(A::CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED);
    all.clusterLaunch = number(A::CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH);
    all.unifiedFunctionPointers = number(A::CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS);
    all.mpsEnabled = number(A::CU_DEVICE_ATTRIBUTE_MPS_ENABLED);
}

/// An attribute of a device.
///
/// # Errors
/// The driver's.
pub fn attribute(device: CUdevice, attribute: CUdevice_attribute) -> Answer<c_int> {
    let mut value = 0;
    // SAFETY: valid for writing the answer.
    unsafe { driver!(cuDeviceGetAttribute(&raw mut value, attribute, device))? };
    Ok(value)
}
