// Written by `cargo xtask cuda-definition`: change annotations.txt, not this.

//! C's types, each with the layout that the C compiler gives it.

use core::{ffi::*, mem::offset_of};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CUDAlogLevel_enum(pub u32);
impl CUDAlogLevel_enum {
    pub const cudaLogLevelError: Self = Self(0);
    pub const cudaLogLevelWarning: Self = Self(1);
}

#[repr(C)]
pub struct CUevent_st {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct CUexternalMemory_st {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct CUexternalSemaphore_st {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct CUfunc_st {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct CUgraphDeviceUpdatableNode_st {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct CUgraphExec_st {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct CUgraphNode_st {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct CUgraph_st {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct CUkern_st {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct CUlib_st {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct CUlogsCallbackEntry_st {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct CUmemPoolHandle_st {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct CUstream_st {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct CUuserObject_st {
    _opaque: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUuuid_st {
    pub bytes: [c_char; 16],
}
const _: () = {
    assert!(size_of::<CUuuid_st>() == 16 && align_of::<CUuuid_st>() == 1);
    assert!(offset_of!(CUuuid_st, bytes) == 0);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaAccessPolicyWindow {
    pub base_ptr: *mut c_void,
    pub num_bytes: usize,
    pub hitRatio: f32,
    pub hitProp: cudaAccessProperty,
    pub missProp: cudaAccessProperty,
}
const _: () = {
    assert!(size_of::<cudaAccessPolicyWindow>() == 32 && align_of::<cudaAccessPolicyWindow>() == 8);
    assert!(offset_of!(cudaAccessPolicyWindow, base_ptr) == 0);
    assert!(offset_of!(cudaAccessPolicyWindow, num_bytes) == 8);
    assert!(offset_of!(cudaAccessPolicyWindow, hitRatio) == 16);
    assert!(offset_of!(cudaAccessPolicyWindow, hitProp) == 20);
    assert!(offset_of!(cudaAccessPolicyWindow, missProp) == 24);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaAccessProperty(pub u32);
impl cudaAccessProperty {
    pub const cudaAccessPropertyNormal: Self = Self(0);
    pub const cudaAccessPropertyStreaming: Self = Self(1);
    pub const cudaAccessPropertyPersisting: Self = Self(2);
}

#[repr(C)]
pub struct cudaArray {
    _opaque: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaArrayMemoryRequirements {
    pub size: usize,
    pub alignment: usize,
    pub reserved: [c_uint; 4],
}
const _: () = {
    assert!(size_of::<cudaArrayMemoryRequirements>() == 32 && align_of::<cudaArrayMemoryRequirements>() == 8);
    assert!(offset_of!(cudaArrayMemoryRequirements, size) == 0);
    assert!(offset_of!(cudaArrayMemoryRequirements, alignment) == 8);
    assert!(offset_of!(cudaArrayMemoryRequirements, reserved) == 16);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaArraySparseProperties {
    pub tileExtent: cudaArraySparseProperties_unnamed1,
    pub miptailFirstLevel: c_uint,
    pub miptailSize: c_ulonglong,
    pub flags: c_uint,
    pub reserved: [c_uint; 4],
}
const _: () = {
    assert!(size_of::<cudaArraySparseProperties>() == 48 && align_of::<cudaArraySparseProperties>() == 8);
    assert!(offset_of!(cudaArraySparseProperties, tileExtent) == 0);
    assert!(offset_of!(cudaArraySparseProperties, miptailFirstLevel) == 12);
    assert!(offset_of!(cudaArraySparseProperties, miptailSize) == 16);
    assert!(offset_of!(cudaArraySparseProperties, flags) == 24);
    assert!(offset_of!(cudaArraySparseProperties, reserved) == 28);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaArraySparseProperties_unnamed1 {
    pub width: c_uint,
    pub height: c_uint,
    pub depth: c_uint,
}

pub type cudaArray_const_t = *const cudaArray;

pub type cudaArray_t = *mut cudaArray;

pub type cudaAsyncCallback = Option<unsafe extern "C" fn(argument0: *mut cudaAsyncNotificationInfo_t, argument1: *mut c_void, argument2: cudaAsyncCallbackHandle_t)>;

#[repr(C)]
pub struct cudaAsyncCallbackEntry {
    _opaque: [u8; 0],
}

pub type cudaAsyncCallbackHandle_t = *mut cudaAsyncCallbackEntry;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaAsyncNotificationInfo {
    pub r#type: cudaAsyncNotificationType,
    pub info: cudaAsyncNotificationInfo_unnamed1,
}
const _: () = {
    assert!(size_of::<cudaAsyncNotificationInfo>() == 16 && align_of::<cudaAsyncNotificationInfo>() == 8);
    assert!(offset_of!(cudaAsyncNotificationInfo, r#type) == 0);
    assert!(offset_of!(cudaAsyncNotificationInfo, info) == 8);
};

pub type cudaAsyncNotificationInfo_t = cudaAsyncNotificationInfo;

#[repr(C)]
#[derive(Clone, Copy)]
pub union cudaAsyncNotificationInfo_unnamed1 {
    pub overBudget: cudaAsyncNotificationInfo_unnamed1_unnamed1,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaAsyncNotificationInfo_unnamed1_unnamed1 {
    pub bytesOverBudget: c_ulonglong,
}

pub type cudaAsyncNotificationType = cudaAsyncNotificationType_enum;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaAsyncNotificationType_enum(pub u32);
impl cudaAsyncNotificationType_enum {
    pub const cudaAsyncNotificationTypeOverBudget: Self = Self(1);
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaAtomicOperation(pub u32);
impl cudaAtomicOperation {
    pub const cudaAtomicOperationIntegerAdd: Self = Self(0);
    pub const cudaAtomicOperationIntegerMin: Self = Self(1);
    pub const cudaAtomicOperationIntegerMax: Self = Self(2);
    pub const cudaAtomicOperationIntegerIncrement: Self = Self(3);
    pub const cudaAtomicOperationIntegerDecrement: Self = Self(4);
    pub const cudaAtomicOperationAnd: Self = Self(5);
    pub const cudaAtomicOperationOr: Self = Self(6);
    pub const cudaAtomicOperationXOR: Self = Self(7);
    pub const cudaAtomicOperationExchange: Self = Self(8);
    pub const cudaAtomicOperationCAS: Self = Self(9);
    pub const cudaAtomicOperationFloatAdd: Self = Self(10);
    pub const cudaAtomicOperationFloatMin: Self = Self(11);
    pub const cudaAtomicOperationFloatMax: Self = Self(12);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaChannelFormatDesc {
    pub x: c_int,
    pub y: c_int,
    pub z: c_int,
    pub w: c_int,
    pub f: cudaChannelFormatKind,
}
const _: () = {
    assert!(size_of::<cudaChannelFormatDesc>() == 20 && align_of::<cudaChannelFormatDesc>() == 4);
    assert!(offset_of!(cudaChannelFormatDesc, x) == 0);
    assert!(offset_of!(cudaChannelFormatDesc, y) == 4);
    assert!(offset_of!(cudaChannelFormatDesc, z) == 8);
    assert!(offset_of!(cudaChannelFormatDesc, w) == 12);
    assert!(offset_of!(cudaChannelFormatDesc, f) == 16);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaChannelFormatKind(pub u32);
impl cudaChannelFormatKind {
    pub const cudaChannelFormatKindSigned: Self = Self(0);
    pub const cudaChannelFormatKindUnsigned: Self = Self(1);
    pub const cudaChannelFormatKindFloat: Self = Self(2);
    pub const cudaChannelFormatKindNone: Self = Self(3);
    pub const cudaChannelFormatKindNV12: Self = Self(4);
    pub const cudaChannelFormatKindUnsignedNormalized8X1: Self = Self(5);
    pub const cudaChannelFormatKindUnsignedNormalized8X2: Self = Self(6);
    pub const cudaChannelFormatKindUnsignedNormalized8X4: Self = Self(7);
    pub const cudaChannelFormatKindUnsignedNormalized16X1: Self = Self(8);
    pub const cudaChannelFormatKindUnsignedNormalized16X2: Self = Self(9);
    pub const cudaChannelFormatKindUnsignedNormalized16X4: Self = Self(10);
    pub const cudaChannelFormatKindSignedNormalized8X1: Self = Self(11);
    pub const cudaChannelFormatKindSignedNormalized8X2: Self = Self(12);
    pub const cudaChannelFormatKindSignedNormalized8X4: Self = Self(13);
    pub const cudaChannelFormatKindSignedNormalized16X1: Self = Self(14);
    pub const cudaChannelFormatKindSignedNormalized16X2: Self = Self(15);
    pub const cudaChannelFormatKindSignedNormalized16X4: Self = Self(16);
    pub const cudaChannelFormatKindUnsignedBlockCompressed1: Self = Self(17);
    pub const cudaChannelFormatKindUnsignedBlockCompressed1SRGB: Self = Self(18);
    pub const cudaChannelFormatKindUnsignedBlockCompressed2: Self = Self(19);
    pub const cudaChannelFormatKindUnsignedBlockCompressed2SRGB: Self = Self(20);
    pub const cudaChannelFormatKindUnsignedBlockCompressed3: Self = Self(21);
    pub const cudaChannelFormatKindUnsignedBlockCompressed3SRGB: Self = Self(22);
    pub const cudaChannelFormatKindUnsignedBlockCompressed4: Self = Self(23);
    pub const cudaChannelFormatKindSignedBlockCompressed4: Self = Self(24);
    pub const cudaChannelFormatKindUnsignedBlockCompressed5: Self = Self(25);
    pub const cudaChannelFormatKindSignedBlockCompressed5: Self = Self(26);
    pub const cudaChannelFormatKindUnsignedBlockCompressed6H: Self = Self(27);
    pub const cudaChannelFormatKindSignedBlockCompressed6H: Self = Self(28);
    pub const cudaChannelFormatKindUnsignedBlockCompressed7: Self = Self(29);
    pub const cudaChannelFormatKindUnsignedBlockCompressed7SRGB: Self = Self(30);
    pub const cudaChannelFormatKindUnsignedNormalized1010102: Self = Self(31);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaChildGraphNodeParams {
    pub graph: cudaGraph_t,
    pub ownership: cudaGraphChildGraphNodeOwnership,
}
const _: () = {
    assert!(size_of::<cudaChildGraphNodeParams>() == 16 && align_of::<cudaChildGraphNodeParams>() == 8);
    assert!(offset_of!(cudaChildGraphNodeParams, graph) == 0);
    assert!(offset_of!(cudaChildGraphNodeParams, ownership) == 8);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaClusterSchedulingPolicy(pub u32);
impl cudaClusterSchedulingPolicy {
    pub const cudaClusterSchedulingPolicyDefault: Self = Self(0);
    pub const cudaClusterSchedulingPolicySpread: Self = Self(1);
    pub const cudaClusterSchedulingPolicyLoadBalancing: Self = Self(2);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaConditionalNodeParams {
    pub handle: cudaGraphConditionalHandle,
    pub r#type: cudaGraphConditionalNodeType,
    pub size: c_uint,
    pub phGraph_out: *mut cudaGraph_t,
}
const _: () = {
    assert!(size_of::<cudaConditionalNodeParams>() == 24 && align_of::<cudaConditionalNodeParams>() == 8);
    assert!(offset_of!(cudaConditionalNodeParams, handle) == 0);
    assert!(offset_of!(cudaConditionalNodeParams, r#type) == 8);
    assert!(offset_of!(cudaConditionalNodeParams, size) == 12);
    assert!(offset_of!(cudaConditionalNodeParams, phGraph_out) == 16);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaDeviceAttr(pub u32);
impl cudaDeviceAttr {
    pub const cudaDevAttrMaxThreadsPerBlock: Self = Self(1);
    pub const cudaDevAttrMaxBlockDimX: Self = Self(2);
    pub const cudaDevAttrMaxBlockDimY: Self = Self(3);
    pub const cudaDevAttrMaxBlockDimZ: Self = Self(4);
    pub const cudaDevAttrMaxGridDimX: Self = Self(5);
    pub const cudaDevAttrMaxGridDimY: Self = Self(6);
    pub const cudaDevAttrMaxGridDimZ: Self = Self(7);
    pub const cudaDevAttrMaxSharedMemoryPerBlock: Self = Self(8);
    pub const cudaDevAttrTotalConstantMemory: Self = Self(9);
    pub const cudaDevAttrWarpSize: Self = Self(10);
    pub const cudaDevAttrMaxPitch: Self = Self(11);
    pub const cudaDevAttrMaxRegistersPerBlock: Self = Self(12);
    pub const cudaDevAttrClockRate: Self = Self(13);
    pub const cudaDevAttrTextureAlignment: Self = Self(14);
    pub const cudaDevAttrGpuOverlap: Self = Self(15);
    pub const cudaDevAttrMultiProcessorCount: Self = Self(16);
    pub const cudaDevAttrKernelExecTimeout: Self = Self(17);
    pub const cudaDevAttrIntegrated: Self = Self(18);
    pub const cudaDevAttrCanMapHostMemory: Self = Self(19);
    pub const cudaDevAttrComputeMode: Self = Self(20);
    pub const cudaDevAttrMaxTexture1DWidth: Self = Self(21);
    pub const cudaDevAttrMaxTexture2DWidth: Self = Self(22);
    pub const cudaDevAttrMaxTexture2DHeight: Self = Self(23);
    pub const cudaDevAttrMaxTexture3DWidth: Self = Self(24);
    pub const cudaDevAttrMaxTexture3DHeight: Self = Self(25);
    pub const cudaDevAttrMaxTexture3DDepth: Self = Self(26);
    pub const cudaDevAttrMaxTexture2DLayeredWidth: Self = Self(27);
    pub const cudaDevAttrMaxTexture2DLayeredHeight: Self = Self(28);
    pub const cudaDevAttrMaxTexture2DLayeredLayers: Self = Self(29);
    pub const cudaDevAttrSurfaceAlignment: Self = Self(30);
    pub const cudaDevAttrConcurrentKernels: Self = Self(31);
    pub const cudaDevAttrEccEnabled: Self = Self(32);
    pub const cudaDevAttrPciBusId: Self = Self(33);
    pub const cudaDevAttrPciDeviceId: Self = Self(34);
    pub const cudaDevAttrTccDriver: Self = Self(35);
    pub const cudaDevAttrMemoryClockRate: Self = Self(36);
    pub const cudaDevAttrGlobalMemoryBusWidth: Self = Self(37);
    pub const cudaDevAttrL2CacheSize: Self = Self(38);
    pub const cudaDevAttrMaxThreadsPerMultiProcessor: Self = Self(39);
    pub const cudaDevAttrAsyncEngineCount: Self = Self(40);
    pub const cudaDevAttrUnifiedAddressing: Self = Self(41);
    pub const cudaDevAttrMaxTexture1DLayeredWidth: Self = Self(42);
    pub const cudaDevAttrMaxTexture1DLayeredLayers: Self = Self(43);
    pub const cudaDevAttrMaxTexture2DGatherWidth: Self = Self(45);
    pub const cudaDevAttrMaxTexture2DGatherHeight: Self = Self(46);
    pub const cudaDevAttrMaxTexture3DWidthAlt: Self = Self(47);
    pub const cudaDevAttrMaxTexture3DHeightAlt: Self = Self(48);
    pub const cudaDevAttrMaxTexture3DDepthAlt: Self = Self(49);
    pub const cudaDevAttrPciDomainId: Self = Self(50);
    pub const cudaDevAttrTexturePitchAlignment: Self = Self(51);
    pub const cudaDevAttrMaxTextureCubemapWidth: Self = Self(52);
    pub const cudaDevAttrMaxTextureCubemapLayeredWidth: Self = Self(53);
    pub const cudaDevAttrMaxTextureCubemapLayeredLayers: Self = Self(54);
    pub const cudaDevAttrMaxSurface1DWidth: Self = Self(55);
    pub const cudaDevAttrMaxSurface2DWidth: Self = Self(56);
    pub const cudaDevAttrMaxSurface2DHeight: Self = Self(57);
    pub const cudaDevAttrMaxSurface3DWidth: Self = Self(58);
    pub const cudaDevAttrMaxSurface3DHeight: Self = Self(59);
    pub const cudaDevAttrMaxSurface3DDepth: Self = Self(60);
    pub const cudaDevAttrMaxSurface1DLayeredWidth: Self = Self(61);
    pub const cudaDevAttrMaxSurface1DLayeredLayers: Self = Self(62);
    pub const cudaDevAttrMaxSurface2DLayeredWidth: Self = Self(63);
    pub const cudaDevAttrMaxSurface2DLayeredHeight: Self = Self(64);
    pub const cudaDevAttrMaxSurface2DLayeredLayers: Self = Self(65);
    pub const cudaDevAttrMaxSurfaceCubemapWidth: Self = Self(66);
    pub const cudaDevAttrMaxSurfaceCubemapLayeredWidth: Self = Self(67);
    pub const cudaDevAttrMaxSurfaceCubemapLayeredLayers: Self = Self(68);
    pub const cudaDevAttrMaxTexture1DLinearWidth: Self = Self(69);
    pub const cudaDevAttrMaxTexture2DLinearWidth: Self = Self(70);
    pub const cudaDevAttrMaxTexture2DLinearHeight: Self = Self(71);
    pub const cudaDevAttrMaxTexture2DLinearPitch: Self = Self(72);
    pub const cudaDevAttrMaxTexture2DMipmappedWidth: Self = Self(73);
    pub const cudaDevAttrMaxTexture2DMipmappedHeight: Self = Self(74);
    pub const cudaDevAttrComputeCapabilityMajor: Self = Self(75);
    pub const cudaDevAttrComputeCapabilityMinor: Self = Self(76);
    pub const cudaDevAttrMaxTexture1DMipmappedWidth: Self = Self(77);
    pub const cudaDevAttrStreamPrioritiesSupported: Self = Self(78);
    pub const cudaDevAttrGlobalL1CacheSupported: Self = Self(79);
    pub const cudaDevAttrLocalL1CacheSupported: Self = Self(80);
    pub const cudaDevAttrMaxSharedMemoryPerMultiprocessor: Self = Self(81);
    pub const cudaDevAttrMaxRegistersPerMultiprocessor: Self = Self(82);
    pub const cudaDevAttrManagedMemory: Self = Self(83);
    pub const cudaDevAttrIsMultiGpuBoard: Self = Self(84);
    pub const cudaDevAttrMultiGpuBoardGroupID: Self = Self(85);
    pub const cudaDevAttrHostNativeAtomicSupported: Self = Self(86);
    pub const cudaDevAttrSingleToDoublePrecisionPerfRatio: Self = Self(87);
    pub const cudaDevAttrPageableMemoryAccess: Self = Self(88);
    pub const cudaDevAttrConcurrentManagedAccess: Self = Self(89);
    pub const cudaDevAttrComputePreemptionSupported: Self = Self(90);
    pub const cudaDevAttrCanUseHostPointerForRegisteredMem: Self = Self(91);
    pub const cudaDevAttrReserved92: Self = Self(92);
    pub const cudaDevAttrReserved93: Self = Self(93);
    pub const cudaDevAttrReserved94: Self = Self(94);
    pub const cudaDevAttrCooperativeLaunch: Self = Self(95);
    pub const cudaDevAttrReserved96: Self = Self(96);
    pub const cudaDevAttrMaxSharedMemoryPerBlockOptin: Self = Self(97);
    pub const cudaDevAttrCanFlushRemoteWrites: Self = Self(98);
    pub const cudaDevAttrHostRegisterSupported: Self = Self(99);
    pub const cudaDevAttrPageableMemoryAccessUsesHostPageTables: Self = Self(100);
    pub const cudaDevAttrDirectManagedMemAccessFromHost: Self = Self(101);
    pub const cudaDevAttrMaxBlocksPerMultiprocessor: Self = Self(106);
    pub const cudaDevAttrMaxPersistingL2CacheSize: Self = Self(108);
    pub const cudaDevAttrMaxAccessPolicyWindowSize: Self = Self(109);
    pub const cudaDevAttrReservedSharedMemoryPerBlock: Self = Self(111);
    pub const cudaDevAttrSparseCudaArraySupported: Self = Self(112);
    pub const cudaDevAttrHostRegisterReadOnlySupported: Self = Self(113);
    pub const cudaDevAttrTimelineSemaphoreInteropSupported: Self = Self(114);
    pub const cudaDevAttrMemoryPoolsSupported: Self = Self(115);
    pub const cudaDevAttrGPUDirectRDMASupported: Self = Self(116);
    pub const cudaDevAttrGPUDirectRDMAFlushWritesOptions: Self = Self(117);
    pub const cudaDevAttrGPUDirectRDMAWritesOrdering: Self = Self(118);
    pub const cudaDevAttrMemoryPoolSupportedHandleTypes: Self = Self(119);
    pub const cudaDevAttrClusterLaunch: Self = Self(120);
    pub const cudaDevAttrDeferredMappingCudaArraySupported: Self = Self(121);
    pub const cudaDevAttrReserved122: Self = Self(122);
    pub const cudaDevAttrReserved123: Self = Self(123);
    pub const cudaDevAttrReserved124: Self = Self(124);
    pub const cudaDevAttrIpcEventSupport: Self = Self(125);
    pub const cudaDevAttrMemSyncDomainCount: Self = Self(126);
    pub const cudaDevAttrReserved127: Self = Self(127);
    pub const cudaDevAttrReserved128: Self = Self(128);
    pub const cudaDevAttrReserved129: Self = Self(129);
    pub const cudaDevAttrNumaConfig: Self = Self(130);
    pub const cudaDevAttrNumaId: Self = Self(131);
    pub const cudaDevAttrReserved132: Self = Self(132);
    pub const cudaDevAttrMpsEnabled: Self = Self(133);
    pub const cudaDevAttrHostNumaId: Self = Self(134);
    pub const cudaDevAttrD3D12CigSupported: Self = Self(135);
    pub const cudaDevAttrVulkanCigSupported: Self = Self(138);
    pub const cudaDevAttrGpuPciDeviceId: Self = Self(139);
    pub const cudaDevAttrGpuPciSubsystemId: Self = Self(140);
    pub const cudaDevAttrReserved141: Self = Self(141);
    pub const cudaDevAttrHostNumaMemoryPoolsSupported: Self = Self(142);
    pub const cudaDevAttrHostNumaMultinodeIpcSupported: Self = Self(143);
    pub const cudaDevAttrHostMemoryPoolsSupported: Self = Self(144);
    pub const cudaDevAttrReserved145: Self = Self(145);
    pub const cudaDevAttrOnlyPartialHostNativeAtomicSupported: Self = Self(147);
    pub const cudaDevAttrMax: Self = Self(148);
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaDeviceP2PAttr(pub u32);
impl cudaDeviceP2PAttr {
    pub const cudaDevP2PAttrPerformanceRank: Self = Self(1);
    pub const cudaDevP2PAttrAccessSupported: Self = Self(2);
    pub const cudaDevP2PAttrNativeAtomicSupported: Self = Self(3);
    pub const cudaDevP2PAttrCudaArrayAccessSupported: Self = Self(4);
    pub const cudaDevP2PAttrOnlyPartialNativeAtomicSupported: Self = Self(5);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaDeviceProp {
    pub name: [c_char; 256],
    pub uuid: cudaUUID_t,
    pub luid: [c_char; 8],
    pub luidDeviceNodeMask: c_uint,
    pub totalGlobalMem: usize,
    pub sharedMemPerBlock: usize,
    pub regsPerBlock: c_int,
    pub warpSize: c_int,
    pub memPitch: usize,
    pub maxThreadsPerBlock: c_int,
    pub maxThreadsDim: [c_int; 3],
    pub maxGridSize: [c_int; 3],
    pub totalConstMem: usize,
    pub major: c_int,
    pub minor: c_int,
    pub textureAlignment: usize,
    pub texturePitchAlignment: usize,
    pub multiProcessorCount: c_int,
    pub integrated: c_int,
    pub canMapHostMemory: c_int,
    pub maxTexture1D: c_int,
    pub maxTexture1DMipmap: c_int,
    pub maxTexture2D: [c_int; 2],
    pub maxTexture2DMipmap: [c_int; 2],
    pub maxTexture2DLinear: [c_int; 3],
    pub maxTexture2DGather: [c_int; 2],
    pub maxTexture3D: [c_int; 3],
    pub maxTexture3DAlt: [c_int; 3],
    pub maxTextureCubemap: c_int,
    pub maxTexture1DLayered: [c_int; 2],
    pub maxTexture2DLayered: [c_int; 3],
    pub maxTextureCubemapLayered: [c_int; 2],
    pub maxSurface1D: c_int,
    pub maxSurface2D: [c_int; 2],
    pub maxSurface3D: [c_int; 3],
    pub maxSurface1DLayered: [c_int; 2],
    pub maxSurface2DLayered: [c_int; 3],
    pub maxSurfaceCubemap: c_int,
    pub maxSurfaceCubemapLayered: [c_int; 2],
    pub surfaceAlignment: usize,
    pub concurrentKernels: c_int,
    pub ECCEnabled: c_int,
    pub pciBusID: c_int,
    pub pciDeviceID: c_int,
    pub pciDomainID: c_int,
    pub tccDriver: c_int,
    pub asyncEngineCount: c_int,
    pub unifiedAddressing: c_int,
    pub memoryBusWidth: c_int,
    pub l2CacheSize: c_int,
    pub persistingL2CacheMaxSize: c_int,
    pub maxThreadsPerMultiProcessor: c_int,
    pub streamPrioritiesSupported: c_int,
    pub globalL1CacheSupported: c_int,
    pub localL1CacheSupported: c_int,
    pub sharedMemPerMultiprocessor: usize,
    pub regsPerMultiprocessor: c_int,
    pub managedMemory: c_int,
    pub isMultiGpuBoard: c_int,
    pub multiGpuBoardGroupID: c_int,
    pub hostNativeAtomicSupported: c_int,
    pub pageableMemoryAccess: c_int,
    pub concurrentManagedAccess: c_int,
    pub computePreemptionSupported: c_int,
    pub canUseHostPointerForRegisteredMem: c_int,
    pub cooperativeLaunch: c_int,
    pub sharedMemPerBlockOptin: usize,
    pub pageableMemoryAccessUsesHostPageTables: c_int,
    pub directManagedMemAccessFromHost: c_int,
    pub maxBlocksPerMultiProcessor: c_int,
    pub accessPolicyMaxWindowSize: c_int,
    pub reservedSharedMemPerBlock: usize,
    pub hostRegisterSupported: c_int,
    pub sparseCudaArraySupported: c_int,
    pub hostRegisterReadOnlySupported: c_int,
    pub timelineSemaphoreInteropSupported: c_int,
    pub memoryPoolsSupported: c_int,
    pub gpuDirectRDMASupported: c_int,
    pub gpuDirectRDMAFlushWritesOptions: c_uint,
    pub gpuDirectRDMAWritesOrdering: c_int,
    pub memoryPoolSupportedHandleTypes: c_uint,
    pub deferredMappingCudaArraySupported: c_int,
    pub ipcEventSupported: c_int,
    pub clusterLaunch: c_int,
    pub unifiedFunctionPointers: c_int,
    pub deviceNumaConfig: c_int,
    pub deviceNumaId: c_int,
    pub mpsEnabled: c_int,
    pub hostNumaId: c_int,
    pub gpuPciDeviceID: c_uint,
    pub gpuPciSubsystemID: c_uint,
    pub hostNumaMultinodeIpcSupported: c_int,
    pub reserved: [c_int; 56],
}
const _: () = {
    assert!(size_of::<cudaDeviceProp>() == 1008 && align_of::<cudaDeviceProp>() == 8);
    assert!(offset_of!(cudaDeviceProp, name) == 0);
    assert!(offset_of!(cudaDeviceProp, uuid) == 256);
    assert!(offset_of!(cudaDeviceProp, luid) == 272);
    assert!(offset_of!(cudaDeviceProp, luidDeviceNodeMask) == 280);
    assert!(offset_of!(cudaDeviceProp, totalGlobalMem) == 288);
    assert!(offset_of!(cudaDeviceProp, sharedMemPerBlock) == 296);
    assert!(offset_of!(cudaDeviceProp, regsPerBlock) == 304);
    assert!(offset_of!(cudaDeviceProp, warpSize) == 308);
    assert!(offset_of!(cudaDeviceProp, memPitch) == 312);
    assert!(offset_of!(cudaDeviceProp, maxThreadsPerBlock) == 320);
    assert!(offset_of!(cudaDeviceProp, maxThreadsDim) == 324);
    assert!(offset_of!(cudaDeviceProp, maxGridSize) == 336);
    assert!(offset_of!(cudaDeviceProp, totalConstMem) == 352);
    assert!(offset_of!(cudaDeviceProp, major) == 360);
    assert!(offset_of!(cudaDeviceProp, minor) == 364);
    assert!(offset_of!(cudaDeviceProp, textureAlignment) == 368);
    assert!(offset_of!(cudaDeviceProp, texturePitchAlignment) == 376);
    assert!(offset_of!(cudaDeviceProp, multiProcessorCount) == 384);
    assert!(offset_of!(cudaDeviceProp, integrated) == 388);
    assert!(offset_of!(cudaDeviceProp, canMapHostMemory) == 392);
    assert!(offset_of!(cudaDeviceProp, maxTexture1D) == 396);
    assert!(offset_of!(cudaDeviceProp, maxTexture1DMipmap) == 400);
    assert!(offset_of!(cudaDeviceProp, maxTexture2D) == 404);
    assert!(offset_of!(cudaDeviceProp, maxTexture2DMipmap) == 412);
    assert!(offset_of!(cudaDeviceProp, maxTexture2DLinear) == 420);
    assert!(offset_of!(cudaDeviceProp, maxTexture2DGather) == 432);
    assert!(offset_of!(cudaDeviceProp, maxTexture3D) == 440);
    assert!(offset_of!(cudaDeviceProp, maxTexture3DAlt) == 452);
    assert!(offset_of!(cudaDeviceProp, maxTextureCubemap) == 464);
    assert!(offset_of!(cudaDeviceProp, maxTexture1DLayered) == 468);
    assert!(offset_of!(cudaDeviceProp, maxTexture2DLayered) == 476);
    assert!(offset_of!(cudaDeviceProp, maxTextureCubemapLayered) == 488);
    assert!(offset_of!(cudaDeviceProp, maxSurface1D) == 496);
    assert!(offset_of!(cudaDeviceProp, maxSurface2D) == 500);
    assert!(offset_of!(cudaDeviceProp, maxSurface3D) == 508);
    assert!(offset_of!(cudaDeviceProp, maxSurface1DLayered) == 520);
    assert!(offset_of!(cudaDeviceProp, maxSurface2DLayered) == 528);
    assert!(offset_of!(cudaDeviceProp, maxSurfaceCubemap) == 540);
    assert!(offset_of!(cudaDeviceProp, maxSurfaceCubemapLayered) == 544);
    assert!(offset_of!(cudaDeviceProp, surfaceAlignment) == 552);
    assert!(offset_of!(cudaDeviceProp, concurrentKernels) == 560);
    assert!(offset_of!(cudaDeviceProp, ECCEnabled) == 564);
    assert!(offset_of!(cudaDeviceProp, pciBusID) == 568);
    assert!(offset_of!(cudaDeviceProp, pciDeviceID) == 572);
    assert!(offset_of!(cudaDeviceProp, pciDomainID) == 576);
    assert!(offset_of!(cudaDeviceProp, tccDriver) == 580);
    assert!(offset_of!(cudaDeviceProp, asyncEngineCount) == 584);
    assert!(offset_of!(cudaDeviceProp, unifiedAddressing) == 588);
    assert!(offset_of!(cudaDeviceProp, memoryBusWidth) == 592);
    assert!(offset_of!(cudaDeviceProp, l2CacheSize) == 596);
    assert!(offset_of!(cudaDeviceProp, persistingL2CacheMaxSize) == 600);
    assert!(offset_of!(cudaDeviceProp, maxThreadsPerMultiProcessor) == 604);
    assert!(offset_of!(cudaDeviceProp, streamPrioritiesSupported) == 608);
    assert!(offset_of!(cudaDeviceProp, globalL1CacheSupported) == 612);
    assert!(offset_of!(cudaDeviceProp, localL1CacheSupported) == 616);
    assert!(offset_of!(cudaDeviceProp, sharedMemPerMultiprocessor) == 624);
    assert!(offset_of!(cudaDeviceProp, regsPerMultiprocessor) == 632);
    assert!(offset_of!(cudaDeviceProp, managedMemory) == 636);
    assert!(offset_of!(cudaDeviceProp, isMultiGpuBoard) == 640);
    assert!(offset_of!(cudaDeviceProp, multiGpuBoardGroupID) == 644);
    assert!(offset_of!(cudaDeviceProp, hostNativeAtomicSupported) == 648);
    assert!(offset_of!(cudaDeviceProp, pageableMemoryAccess) == 652);
    assert!(offset_of!(cudaDeviceProp, concurrentManagedAccess) == 656);
    assert!(offset_of!(cudaDeviceProp, computePreemptionSupported) == 660);
    assert!(offset_of!(cudaDeviceProp, canUseHostPointerForRegisteredMem) == 664);
    assert!(offset_of!(cudaDeviceProp, cooperativeLaunch) == 668);
    assert!(offset_of!(cudaDeviceProp, sharedMemPerBlockOptin) == 672);
    assert!(offset_of!(cudaDeviceProp, pageableMemoryAccessUsesHostPageTables) == 680);
    assert!(offset_of!(cudaDeviceProp, directManagedMemAccessFromHost) == 684);
    assert!(offset_of!(cudaDeviceProp, maxBlocksPerMultiProcessor) == 688);
    assert!(offset_of!(cudaDeviceProp, accessPolicyMaxWindowSize) == 692);
    assert!(offset_of!(cudaDeviceProp, reservedSharedMemPerBlock) == 696);
    assert!(offset_of!(cudaDeviceProp, hostRegisterSupported) == 704);
    assert!(offset_of!(cudaDeviceProp, sparseCudaArraySupported) == 708);
    assert!(offset_of!(cudaDeviceProp, hostRegisterReadOnlySupported) == 712);
    assert!(offset_of!(cudaDeviceProp, timelineSemaphoreInteropSupported) == 716);
    assert!(offset_of!(cudaDeviceProp, memoryPoolsSupported) == 720);
    assert!(offset_of!(cudaDeviceProp, gpuDirectRDMASupported) == 724);
    assert!(offset_of!(cudaDeviceProp, gpuDirectRDMAFlushWritesOptions) == 728);
    assert!(offset_of!(cudaDeviceProp, gpuDirectRDMAWritesOrdering) == 732);
    assert!(offset_of!(cudaDeviceProp, memoryPoolSupportedHandleTypes) == 736);
    assert!(offset_of!(cudaDeviceProp, deferredMappingCudaArraySupported) == 740);
    assert!(offset_of!(cudaDeviceProp, ipcEventSupported) == 744);
    assert!(offset_of!(cudaDeviceProp, clusterLaunch) == 748);
    assert!(offset_of!(cudaDeviceProp, unifiedFunctionPointers) == 752);
    assert!(offset_of!(cudaDeviceProp, deviceNumaConfig) == 756);
    assert!(offset_of!(cudaDeviceProp, deviceNumaId) == 760);
    assert!(offset_of!(cudaDeviceProp, mpsEnabled) == 764);
    assert!(offset_of!(cudaDeviceProp, hostNumaId) == 768);
    assert!(offset_of!(cudaDeviceProp, gpuPciDeviceID) == 772);
    assert!(offset_of!(cudaDeviceProp, gpuPciSubsystemID) == 776);
    assert!(offset_of!(cudaDeviceProp, hostNumaMultinodeIpcSupported) == 780);
    assert!(offset_of!(cudaDeviceProp, reserved) == 784);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaDriverEntryPointQueryResult(pub u32);
impl cudaDriverEntryPointQueryResult {
    pub const cudaDriverEntryPointSuccess: Self = Self(0);
    pub const cudaDriverEntryPointSymbolNotFound: Self = Self(1);
    pub const cudaDriverEntryPointVersionNotSufficent: Self = Self(2);
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaError(pub u32);
impl cudaError {
    pub const cudaSuccess: Self = Self(0);
    pub const cudaErrorInvalidValue: Self = Self(1);
    pub const cudaErrorMemoryAllocation: Self = Self(2);
    pub const cudaErrorInitializationError: Self = Self(3);
    pub const cudaErrorCudartUnloading: Self = Self(4);
    pub const cudaErrorProfilerDisabled: Self = Self(5);
    pub const cudaErrorProfilerNotInitialized: Self = Self(6);
    pub const cudaErrorProfilerAlreadyStarted: Self = Self(7);
    pub const cudaErrorProfilerAlreadyStopped: Self = Self(8);
    pub const cudaErrorInvalidConfiguration: Self = Self(9);
    pub const cudaErrorInvalidPitchValue: Self = Self(12);
    pub const cudaErrorInvalidSymbol: Self = Self(13);
    pub const cudaErrorInvalidHostPointer: Self = Self(16);
    pub const cudaErrorInvalidDevicePointer: Self = Self(17);
    pub const cudaErrorInvalidTexture: Self = Self(18);
    pub const cudaErrorInvalidTextureBinding: Self = Self(19);
    pub const cudaErrorInvalidChannelDescriptor: Self = Self(20);
    pub const cudaErrorInvalidMemcpyDirection: Self = Self(21);
    pub const cudaErrorAddressOfConstant: Self = Self(22);
    pub const cudaErrorTextureFetchFailed: Self = Self(23);
    pub const cudaErrorTextureNotBound: Self = Self(24);
    pub const cudaErrorSynchronizationError: Self = Self(25);
    pub const cudaErrorInvalidFilterSetting: Self = Self(26);
    pub const cudaErrorInvalidNormSetting: Self = Self(27);
    pub const cudaErrorMixedDeviceExecution: Self = Self(28);
    pub const cudaErrorNotYetImplemented: Self = Self(31);
    pub const cudaErrorMemoryValueTooLarge: Self = Self(32);
    pub const cudaErrorStubLibrary: Self = Self(34);
    pub const cudaErrorInsufficientDriver: Self = Self(35);
    pub const cudaErrorCallRequiresNewerDriver: Self = Self(36);
    pub const cudaErrorInvalidSurface: Self = Self(37);
    pub const cudaErrorDuplicateVariableName: Self = Self(43);
    pub const cudaErrorDuplicateTextureName: Self = Self(44);
    pub const cudaErrorDuplicateSurfaceName: Self = Self(45);
    pub const cudaErrorDevicesUnavailable: Self = Self(46);
    pub const cudaErrorIncompatibleDriverContext: Self = Self(49);
    pub const cudaErrorMissingConfiguration: Self = Self(52);
    pub const cudaErrorPriorLaunchFailure: Self = Self(53);
    pub const cudaErrorLaunchMaxDepthExceeded: Self = Self(65);
    pub const cudaErrorLaunchFileScopedTex: Self = Self(66);
    pub const cudaErrorLaunchFileScopedSurf: Self = Self(67);
    pub const cudaErrorSyncDepthExceeded: Self = Self(68);
    pub const cudaErrorLaunchPendingCountExceeded: Self = Self(69);
    pub const cudaErrorInvalidDeviceFunction: Self = Self(98);
    pub const cudaErrorNoDevice: Self = Self(100);
    pub const cudaErrorInvalidDevice: Self = Self(101);
    pub const cudaErrorDeviceNotLicensed: Self = Self(102);
    pub const cudaErrorSoftwareValidityNotEstablished: Self = Self(103);
    pub const cudaErrorStartupFailure: Self = Self(127);
    pub const cudaErrorInvalidKernelImage: Self = Self(200);
    pub const cudaErrorDeviceUninitialized: Self = Self(201);
    pub const cudaErrorMapBufferObjectFailed: Self = Self(205);
    pub const cudaErrorUnmapBufferObjectFailed: Self = Self(206);
    pub const cudaErrorArrayIsMapped: Self = Self(207);
    pub const cudaErrorAlreadyMapped: Self = Self(208);
    pub const cudaErrorNoKernelImageForDevice: Self = Self(209);
    pub const cudaErrorAlreadyAcquired: Self = Self(210);
    pub const cudaErrorNotMapped: Self = Self(211);
    pub const cudaErrorNotMappedAsArray: Self = Self(212);
    pub const cudaErrorNotMappedAsPointer: Self = Self(213);
    pub const cudaErrorECCUncorrectable: Self = Self(214);
    pub const cudaErrorUnsupportedLimit: Self = Self(215);
    pub const cudaErrorDeviceAlreadyInUse: Self = Self(216);
    pub const cudaErrorPeerAccessUnsupported: Self = Self(217);
    pub const cudaErrorInvalidPtx: Self = Self(218);
    pub const cudaErrorInvalidGraphicsContext: Self = Self(219);
    pub const cudaErrorNvlinkUncorrectable: Self = Self(220);
    pub const cudaErrorJitCompilerNotFound: Self = Self(221);
    pub const cudaErrorUnsupportedPtxVersion: Self = Self(222);
    pub const cudaErrorJitCompilationDisabled: Self = Self(223);
    pub const cudaErrorUnsupportedExecAffinity: Self = Self(224);
    pub const cudaErrorUnsupportedDevSideSync: Self = Self(225);
    pub const cudaErrorContained: Self = Self(226);
    pub const cudaErrorInvalidSource: Self = Self(300);
    pub const cudaErrorFileNotFound: Self = Self(301);
    pub const cudaErrorSharedObjectSymbolNotFound: Self = Self(302);
    pub const cudaErrorSharedObjectInitFailed: Self = Self(303);
    pub const cudaErrorOperatingSystem: Self = Self(304);
    pub const cudaErrorInvalidResourceHandle: Self = Self(400);
    pub const cudaErrorIllegalState: Self = Self(401);
    pub const cudaErrorLossyQuery: Self = Self(402);
    pub const cudaErrorSymbolNotFound: Self = Self(500);
    pub const cudaErrorNotReady: Self = Self(600);
    pub const cudaErrorIllegalAddress: Self = Self(700);
    pub const cudaErrorLaunchOutOfResources: Self = Self(701);
    pub const cudaErrorLaunchTimeout: Self = Self(702);
    pub const cudaErrorLaunchIncompatibleTexturing: Self = Self(703);
    pub const cudaErrorPeerAccessAlreadyEnabled: Self = Self(704);
    pub const cudaErrorPeerAccessNotEnabled: Self = Self(705);
    pub const cudaErrorSetOnActiveProcess: Self = Self(708);
    pub const cudaErrorContextIsDestroyed: Self = Self(709);
    pub const cudaErrorAssert: Self = Self(710);
    pub const cudaErrorTooManyPeers: Self = Self(711);
    pub const cudaErrorHostMemoryAlreadyRegistered: Self = Self(712);
    pub const cudaErrorHostMemoryNotRegistered: Self = Self(713);
    pub const cudaErrorHardwareStackError: Self = Self(714);
    pub const cudaErrorIllegalInstruction: Self = Self(715);
    pub const cudaErrorMisalignedAddress: Self = Self(716);
    pub const cudaErrorInvalidAddressSpace: Self = Self(717);
    pub const cudaErrorInvalidPc: Self = Self(718);
    pub const cudaErrorLaunchFailure: Self = Self(719);
    pub const cudaErrorCooperativeLaunchTooLarge: Self = Self(720);
    pub const cudaErrorTensorMemoryLeak: Self = Self(721);
    pub const cudaErrorNotPermitted: Self = Self(800);
    pub const cudaErrorNotSupported: Self = Self(801);
    pub const cudaErrorSystemNotReady: Self = Self(802);
    pub const cudaErrorSystemDriverMismatch: Self = Self(803);
    pub const cudaErrorCompatNotSupportedOnDevice: Self = Self(804);
    pub const cudaErrorMpsConnectionFailed: Self = Self(805);
    pub const cudaErrorMpsRpcFailure: Self = Self(806);
    pub const cudaErrorMpsServerNotReady: Self = Self(807);
    pub const cudaErrorMpsMaxClientsReached: Self = Self(808);
    pub const cudaErrorMpsMaxConnectionsReached: Self = Self(809);
    pub const cudaErrorMpsClientTerminated: Self = Self(810);
    pub const cudaErrorCdpNotSupported: Self = Self(811);
    pub const cudaErrorCdpVersionMismatch: Self = Self(812);
    pub const cudaErrorStreamCaptureUnsupported: Self = Self(900);
    pub const cudaErrorStreamCaptureInvalidated: Self = Self(901);
    pub const cudaErrorStreamCaptureMerge: Self = Self(902);
    pub const cudaErrorStreamCaptureUnmatched: Self = Self(903);
    pub const cudaErrorStreamCaptureUnjoined: Self = Self(904);
    pub const cudaErrorStreamCaptureIsolation: Self = Self(905);
    pub const cudaErrorStreamCaptureImplicit: Self = Self(906);
    pub const cudaErrorCapturedEvent: Self = Self(907);
    pub const cudaErrorStreamCaptureWrongThread: Self = Self(908);
    pub const cudaErrorTimeout: Self = Self(909);
    pub const cudaErrorGraphExecUpdateFailure: Self = Self(910);
    pub const cudaErrorExternalDevice: Self = Self(911);
    pub const cudaErrorInvalidClusterSize: Self = Self(912);
    pub const cudaErrorFunctionNotLoaded: Self = Self(913);
    pub const cudaErrorInvalidResourceType: Self = Self(914);
    pub const cudaErrorInvalidResourceConfiguration: Self = Self(915);
    pub const cudaErrorUnknown: Self = Self(999);
    pub const cudaErrorApiFailureBase: Self = Self(10000);
    /// Names with their values.
    pub const NAMES: &'static [(&'static str, Self)] = &[
        ("cudaSuccess", Self::cudaSuccess),
        ("cudaErrorInvalidValue", Self::cudaErrorInvalidValue),
        ("cudaErrorMemoryAllocation", Self::cudaErrorMemoryAllocation),
        ("cudaErrorInitializationError", Self::cudaErrorInitializationError),
        ("cudaErrorCudartUnloading", Self::cudaErrorCudartUnloading),
        ("cudaErrorProfilerDisabled", Self::cudaErrorProfilerDisabled),
        ("cudaErrorProfilerNotInitialized", Self::cudaErrorProfilerNotInitialized),
        ("cudaErrorProfilerAlreadyStarted", Self::cudaErrorProfilerAlreadyStarted),
        ("cudaErrorProfilerAlreadyStopped", Self::cudaErrorProfilerAlreadyStopped),
        ("cudaErrorInvalidConfiguration", Self::cudaErrorInvalidConfiguration),
        ("cudaErrorInvalidPitchValue", Self::cudaErrorInvalidPitchValue),
        ("cudaErrorInvalidSymbol", Self::cudaErrorInvalidSymbol),
        ("cudaErrorInvalidHostPointer", Self::cudaErrorInvalidHostPointer),
        ("cudaErrorInvalidDevicePointer", Self::cudaErrorInvalidDevicePointer),
        ("cudaErrorInvalidTexture", Self::cudaErrorInvalidTexture),
        ("cudaErrorInvalidTextureBinding", Self::cudaErrorInvalidTextureBinding),
        ("cudaErrorInvalidChannelDescriptor", Self::cudaErrorInvalidChannelDescriptor),
        ("cudaErrorInvalidMemcpyDirection", Self::cudaErrorInvalidMemcpyDirection),
        ("cudaErrorAddressOfConstant", Self::cudaErrorAddressOfConstant),
        ("cudaErrorTextureFetchFailed", Self::cudaErrorTextureFetchFailed),
        ("cudaErrorTextureNotBound", Self::cudaErrorTextureNotBound),
        ("cudaErrorSynchronizationError", Self::cudaErrorSynchronizationError),
        ("cudaErrorInvalidFilterSetting", Self::cudaErrorInvalidFilterSetting),
        ("cudaErrorInvalidNormSetting", Self::cudaErrorInvalidNormSetting),
        ("cudaErrorMixedDeviceExecution", Self::cudaErrorMixedDeviceExecution),
        ("cudaErrorNotYetImplemented", Self::cudaErrorNotYetImplemented),
        ("cudaErrorMemoryValueTooLarge", Self::cudaErrorMemoryValueTooLarge),
        ("cudaErrorStubLibrary", Self::cudaErrorStubLibrary),
        ("cudaErrorInsufficientDriver", Self::cudaErrorInsufficientDriver),
        ("cudaErrorCallRequiresNewerDriver", Self::cudaErrorCallRequiresNewerDriver),
        ("cudaErrorInvalidSurface", Self::cudaErrorInvalidSurface),
        ("cudaErrorDuplicateVariableName", Self::cudaErrorDuplicateVariableName),
        ("cudaErrorDuplicateTextureName", Self::cudaErrorDuplicateTextureName),
        ("cudaErrorDuplicateSurfaceName", Self::cudaErrorDuplicateSurfaceName),
        ("cudaErrorDevicesUnavailable", Self::cudaErrorDevicesUnavailable),
        ("cudaErrorIncompatibleDriverContext", Self::cudaErrorIncompatibleDriverContext),
        ("cudaErrorMissingConfiguration", Self::cudaErrorMissingConfiguration),
        ("cudaErrorPriorLaunchFailure", Self::cudaErrorPriorLaunchFailure),
        ("cudaErrorLaunchMaxDepthExceeded", Self::cudaErrorLaunchMaxDepthExceeded),
        ("cudaErrorLaunchFileScopedTex", Self::cudaErrorLaunchFileScopedTex),
        ("cudaErrorLaunchFileScopedSurf", Self::cudaErrorLaunchFileScopedSurf),
        ("cudaErrorSyncDepthExceeded", Self::cudaErrorSyncDepthExceeded),
        ("cudaErrorLaunchPendingCountExceeded", Self::cudaErrorLaunchPendingCountExceeded),
        ("cudaErrorInvalidDeviceFunction", Self::cudaErrorInvalidDeviceFunction),
        ("cudaErrorNoDevice", Self::cudaErrorNoDevice),
        ("cudaErrorInvalidDevice", Self::cudaErrorInvalidDevice),
        ("cudaErrorDeviceNotLicensed", Self::cudaErrorDeviceNotLicensed),
        ("cudaErrorSoftwareValidityNotEstablished", Self::cudaErrorSoftwareValidityNotEstablished),
        ("cudaErrorStartupFailure", Self::cudaErrorStartupFailure),
        ("cudaErrorInvalidKernelImage", Self::cudaErrorInvalidKernelImage),
        ("cudaErrorDeviceUninitialized", Self::cudaErrorDeviceUninitialized),
        ("cudaErrorMapBufferObjectFailed", Self::cudaErrorMapBufferObjectFailed),
        ("cudaErrorUnmapBufferObjectFailed", Self::cudaErrorUnmapBufferObjectFailed),
        ("cudaErrorArrayIsMapped", Self::cudaErrorArrayIsMapped),
        ("cudaErrorAlreadyMapped", Self::cudaErrorAlreadyMapped),
        ("cudaErrorNoKernelImageForDevice", Self::cudaErrorNoKernelImageForDevice),
        ("cudaErrorAlreadyAcquired", Self::cudaErrorAlreadyAcquired),
        ("cudaErrorNotMapped", Self::cudaErrorNotMapped),
        ("cudaErrorNotMappedAsArray", Self::cudaErrorNotMappedAsArray),
        ("cudaErrorNotMappedAsPointer", Self::cudaErrorNotMappedAsPointer),
        ("cudaErrorECCUncorrectable", Self::cudaErrorECCUncorrectable),
        ("cudaErrorUnsupportedLimit", Self::cudaErrorUnsupportedLimit),
        ("cudaErrorDeviceAlreadyInUse", Self::cudaErrorDeviceAlreadyInUse),
        ("cudaErrorPeerAccessUnsupported", Self::cudaErrorPeerAccessUnsupported),
        ("cudaErrorInvalidPtx", Self::cudaErrorInvalidPtx),
        ("cudaErrorInvalidGraphicsContext", Self::cudaErrorInvalidGraphicsContext),
        ("cudaErrorNvlinkUncorrectable", Self::cudaErrorNvlinkUncorrectable),
        ("cudaErrorJitCompilerNotFound", Self::cudaErrorJitCompilerNotFound),
        ("cudaErrorUnsupportedPtxVersion", Self::cudaErrorUnsupportedPtxVersion),
        ("cudaErrorJitCompilationDisabled", Self::cudaErrorJitCompilationDisabled),
        ("cudaErrorUnsupportedExecAffinity", Self::cudaErrorUnsupportedExecAffinity),
        ("cudaErrorUnsupportedDevSideSync", Self::cudaErrorUnsupportedDevSideSync),
        ("cudaErrorContained", Self::cudaErrorContained),
        ("cudaErrorInvalidSource", Self::cudaErrorInvalidSource),
        ("cudaErrorFileNotFound", Self::cudaErrorFileNotFound),
        ("cudaErrorSharedObjectSymbolNotFound", Self::cudaErrorSharedObjectSymbolNotFound),
        ("cudaErrorSharedObjectInitFailed", Self::cudaErrorSharedObjectInitFailed),
        ("cudaErrorOperatingSystem", Self::cudaErrorOperatingSystem),
        ("cudaErrorInvalidResourceHandle", Self::cudaErrorInvalidResourceHandle),
        ("cudaErrorIllegalState", Self::cudaErrorIllegalState),
        ("cudaErrorLossyQuery", Self::cudaErrorLossyQuery),
        ("cudaErrorSymbolNotFound", Self::cudaErrorSymbolNotFound),
        ("cudaErrorNotReady", Self::cudaErrorNotReady),
        ("cudaErrorIllegalAddress", Self::cudaErrorIllegalAddress),
        ("cudaErrorLaunchOutOfResources", Self::cudaErrorLaunchOutOfResources),
        ("cudaErrorLaunchTimeout", Self::cudaErrorLaunchTimeout),
        ("cudaErrorLaunchIncompatibleTexturing", Self::cudaErrorLaunchIncompatibleTexturing),
        ("cudaErrorPeerAccessAlreadyEnabled", Self::cudaErrorPeerAccessAlreadyEnabled),
        ("cudaErrorPeerAccessNotEnabled", Self::cudaErrorPeerAccessNotEnabled),
        ("cudaErrorSetOnActiveProcess", Self::cudaErrorSetOnActiveProcess),
        ("cudaErrorContextIsDestroyed", Self::cudaErrorContextIsDestroyed),
        ("cudaErrorAssert", Self::cudaErrorAssert),
        ("cudaErrorTooManyPeers", Self::cudaErrorTooManyPeers),
        ("cudaErrorHostMemoryAlreadyRegistered", Self::cudaErrorHostMemoryAlreadyRegistered),
        ("cudaErrorHostMemoryNotRegistered", Self::cudaErrorHostMemoryNotRegistered),
        ("cudaErrorHardwareStackError", Self::cudaErrorHardwareStackError),
        ("cudaErrorIllegalInstruction", Self::cudaErrorIllegalInstruction),
        ("cudaErrorMisalignedAddress", Self::cudaErrorMisalignedAddress),
        ("cudaErrorInvalidAddressSpace", Self::cudaErrorInvalidAddressSpace),
        ("cudaErrorInvalidPc", Self::cudaErrorInvalidPc),
        ("cudaErrorLaunchFailure", Self::cudaErrorLaunchFailure),
        ("cudaErrorCooperativeLaunchTooLarge", Self::cudaErrorCooperativeLaunchTooLarge),
        ("cudaErrorTensorMemoryLeak", Self::cudaErrorTensorMemoryLeak),
        ("cudaErrorNotPermitted", Self::cudaErrorNotPermitted),
        ("cudaErrorNotSupported", Self::cudaErrorNotSupported),
        ("cudaErrorSystemNotReady", Self::cudaErrorSystemNotReady),
        ("cudaErrorSystemDriverMismatch", Self::cudaErrorSystemDriverMismatch),
        ("cudaErrorCompatNotSupportedOnDevice", Self::cudaErrorCompatNotSupportedOnDevice),
        ("cudaErrorMpsConnectionFailed", Self::cudaErrorMpsConnectionFailed),
        ("cudaErrorMpsRpcFailure", Self::cudaErrorMpsRpcFailure),
        ("cudaErrorMpsServerNotReady", Self::cudaErrorMpsServerNotReady),
        ("cudaErrorMpsMaxClientsReached", Self::cudaErrorMpsMaxClientsReached),
        ("cudaErrorMpsMaxConnectionsReached", Self::cudaErrorMpsMaxConnectionsReached),
        ("cudaErrorMpsClientTerminated", Self::cudaErrorMpsClientTerminated),
        ("cudaErrorCdpNotSupported", Self::cudaErrorCdpNotSupported),
        ("cudaErrorCdpVersionMismatch", Self::cudaErrorCdpVersionMismatch),
        ("cudaErrorStreamCaptureUnsupported", Self::cudaErrorStreamCaptureUnsupported),
        ("cudaErrorStreamCaptureInvalidated", Self::cudaErrorStreamCaptureInvalidated),
        ("cudaErrorStreamCaptureMerge", Self::cudaErrorStreamCaptureMerge),
        ("cudaErrorStreamCaptureUnmatched", Self::cudaErrorStreamCaptureUnmatched),
        ("cudaErrorStreamCaptureUnjoined", Self::cudaErrorStreamCaptureUnjoined),
        ("cudaErrorStreamCaptureIsolation", Self::cudaErrorStreamCaptureIsolation),
        ("cudaErrorStreamCaptureImplicit", Self::cudaErrorStreamCaptureImplicit),
        ("cudaErrorCapturedEvent", Self::cudaErrorCapturedEvent),
        ("cudaErrorStreamCaptureWrongThread", Self::cudaErrorStreamCaptureWrongThread),
        ("cudaErrorTimeout", Self::cudaErrorTimeout),
        ("cudaErrorGraphExecUpdateFailure", Self::cudaErrorGraphExecUpdateFailure),
        ("cudaErrorExternalDevice", Self::cudaErrorExternalDevice),
        ("cudaErrorInvalidClusterSize", Self::cudaErrorInvalidClusterSize),
        ("cudaErrorFunctionNotLoaded", Self::cudaErrorFunctionNotLoaded),
        ("cudaErrorInvalidResourceType", Self::cudaErrorInvalidResourceType),
        ("cudaErrorInvalidResourceConfiguration", Self::cudaErrorInvalidResourceConfiguration),
        ("cudaErrorUnknown", Self::cudaErrorUnknown),
        ("cudaErrorApiFailureBase", Self::cudaErrorApiFailureBase),
    ];
}

pub type cudaError_t = cudaError;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaEventRecordNodeParams {
    pub event: cudaEvent_t,
}
const _: () = {
    assert!(size_of::<cudaEventRecordNodeParams>() == 8 && align_of::<cudaEventRecordNodeParams>() == 8);
    assert!(offset_of!(cudaEventRecordNodeParams, event) == 0);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaEventWaitNodeParams {
    pub event: cudaEvent_t,
}
const _: () = {
    assert!(size_of::<cudaEventWaitNodeParams>() == 8 && align_of::<cudaEventWaitNodeParams>() == 8);
    assert!(offset_of!(cudaEventWaitNodeParams, event) == 0);
};

pub type cudaEvent_t = *mut CUevent_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaExtent {
    pub width: usize,
    pub height: usize,
    pub depth: usize,
}
const _: () = {
    assert!(size_of::<cudaExtent>() == 24 && align_of::<cudaExtent>() == 8);
    assert!(offset_of!(cudaExtent, width) == 0);
    assert!(offset_of!(cudaExtent, height) == 8);
    assert!(offset_of!(cudaExtent, depth) == 16);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaExternalMemoryBufferDesc {
    pub offset: c_ulonglong,
    pub size: c_ulonglong,
    pub flags: c_uint,
    pub reserved: [c_uint; 16],
}
const _: () = {
    assert!(size_of::<cudaExternalMemoryBufferDesc>() == 88 && align_of::<cudaExternalMemoryBufferDesc>() == 8);
    assert!(offset_of!(cudaExternalMemoryBufferDesc, offset) == 0);
    assert!(offset_of!(cudaExternalMemoryBufferDesc, size) == 8);
    assert!(offset_of!(cudaExternalMemoryBufferDesc, flags) == 16);
    assert!(offset_of!(cudaExternalMemoryBufferDesc, reserved) == 20);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaExternalMemoryHandleDesc {
    pub r#type: cudaExternalMemoryHandleType,
    pub handle: cudaExternalMemoryHandleDesc_unnamed1,
    pub size: c_ulonglong,
    pub flags: c_uint,
    pub reserved: [c_uint; 16],
}
const _: () = {
    assert!(size_of::<cudaExternalMemoryHandleDesc>() == 104 && align_of::<cudaExternalMemoryHandleDesc>() == 8);
    assert!(offset_of!(cudaExternalMemoryHandleDesc, r#type) == 0);
    assert!(offset_of!(cudaExternalMemoryHandleDesc, handle) == 8);
    assert!(offset_of!(cudaExternalMemoryHandleDesc, size) == 24);
    assert!(offset_of!(cudaExternalMemoryHandleDesc, flags) == 32);
    assert!(offset_of!(cudaExternalMemoryHandleDesc, reserved) == 36);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub union cudaExternalMemoryHandleDesc_unnamed1 {
    pub fd: c_int,
    pub win32: cudaExternalMemoryHandleDesc_unnamed1_unnamed1,
    pub nvSciBufObject: *const c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaExternalMemoryHandleDesc_unnamed1_unnamed1 {
    pub handle: *mut c_void,
    pub name: *const c_void,
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaExternalMemoryHandleType(pub u32);
impl cudaExternalMemoryHandleType {
    pub const cudaExternalMemoryHandleTypeOpaqueFd: Self = Self(1);
    pub const cudaExternalMemoryHandleTypeOpaqueWin32: Self = Self(2);
    pub const cudaExternalMemoryHandleTypeOpaqueWin32Kmt: Self = Self(3);
    pub const cudaExternalMemoryHandleTypeD3D12Heap: Self = Self(4);
    pub const cudaExternalMemoryHandleTypeD3D12Resource: Self = Self(5);
    pub const cudaExternalMemoryHandleTypeD3D11Resource: Self = Self(6);
    pub const cudaExternalMemoryHandleTypeD3D11ResourceKmt: Self = Self(7);
    pub const cudaExternalMemoryHandleTypeNvSciBuf: Self = Self(8);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaExternalMemoryMipmappedArrayDesc {
    pub offset: c_ulonglong,
    pub formatDesc: cudaChannelFormatDesc,
    pub extent: cudaExtent,
    pub flags: c_uint,
    pub numLevels: c_uint,
    pub reserved: [c_uint; 16],
}
const _: () = {
    assert!(size_of::<cudaExternalMemoryMipmappedArrayDesc>() == 128 && align_of::<cudaExternalMemoryMipmappedArrayDesc>() == 8);
    assert!(offset_of!(cudaExternalMemoryMipmappedArrayDesc, offset) == 0);
    assert!(offset_of!(cudaExternalMemoryMipmappedArrayDesc, formatDesc) == 8);
    assert!(offset_of!(cudaExternalMemoryMipmappedArrayDesc, extent) == 32);
    assert!(offset_of!(cudaExternalMemoryMipmappedArrayDesc, flags) == 56);
    assert!(offset_of!(cudaExternalMemoryMipmappedArrayDesc, numLevels) == 60);
    assert!(offset_of!(cudaExternalMemoryMipmappedArrayDesc, reserved) == 64);
};

pub type cudaExternalMemory_t = *mut CUexternalMemory_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaExternalSemaphoreHandleDesc {
    pub r#type: cudaExternalSemaphoreHandleType,
    pub handle: cudaExternalSemaphoreHandleDesc_unnamed1,
    pub flags: c_uint,
    pub reserved: [c_uint; 16],
}
const _: () = {
    assert!(size_of::<cudaExternalSemaphoreHandleDesc>() == 96 && align_of::<cudaExternalSemaphoreHandleDesc>() == 8);
    assert!(offset_of!(cudaExternalSemaphoreHandleDesc, r#type) == 0);
    assert!(offset_of!(cudaExternalSemaphoreHandleDesc, handle) == 8);
    assert!(offset_of!(cudaExternalSemaphoreHandleDesc, flags) == 24);
    assert!(offset_of!(cudaExternalSemaphoreHandleDesc, reserved) == 28);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub union cudaExternalSemaphoreHandleDesc_unnamed1 {
    pub fd: c_int,
    pub win32: cudaExternalSemaphoreHandleDesc_unnamed1_unnamed1,
    pub nvSciSyncObj: *const c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaExternalSemaphoreHandleDesc_unnamed1_unnamed1 {
    pub handle: *mut c_void,
    pub name: *const c_void,
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaExternalSemaphoreHandleType(pub u32);
impl cudaExternalSemaphoreHandleType {
    pub const cudaExternalSemaphoreHandleTypeOpaqueFd: Self = Self(1);
    pub const cudaExternalSemaphoreHandleTypeOpaqueWin32: Self = Self(2);
    pub const cudaExternalSemaphoreHandleTypeOpaqueWin32Kmt: Self = Self(3);
    pub const cudaExternalSemaphoreHandleTypeD3D12Fence: Self = Self(4);
    pub const cudaExternalSemaphoreHandleTypeD3D11Fence: Self = Self(5);
    pub const cudaExternalSemaphoreHandleTypeNvSciSync: Self = Self(6);
    pub const cudaExternalSemaphoreHandleTypeKeyedMutex: Self = Self(7);
    pub const cudaExternalSemaphoreHandleTypeKeyedMutexKmt: Self = Self(8);
    pub const cudaExternalSemaphoreHandleTypeTimelineSemaphoreFd: Self = Self(9);
    pub const cudaExternalSemaphoreHandleTypeTimelineSemaphoreWin32: Self = Self(10);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaExternalSemaphoreSignalNodeParams {
    pub extSemArray: *mut cudaExternalSemaphore_t,
    pub paramsArray: *const cudaExternalSemaphoreSignalParams,
    pub numExtSems: c_uint,
}
const _: () = {
    assert!(size_of::<cudaExternalSemaphoreSignalNodeParams>() == 24 && align_of::<cudaExternalSemaphoreSignalNodeParams>() == 8);
    assert!(offset_of!(cudaExternalSemaphoreSignalNodeParams, extSemArray) == 0);
    assert!(offset_of!(cudaExternalSemaphoreSignalNodeParams, paramsArray) == 8);
    assert!(offset_of!(cudaExternalSemaphoreSignalNodeParams, numExtSems) == 16);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaExternalSemaphoreSignalNodeParamsV2 {
    pub extSemArray: *mut cudaExternalSemaphore_t,
    pub paramsArray: *const cudaExternalSemaphoreSignalParams,
    pub numExtSems: c_uint,
}
const _: () = {
    assert!(size_of::<cudaExternalSemaphoreSignalNodeParamsV2>() == 24 && align_of::<cudaExternalSemaphoreSignalNodeParamsV2>() == 8);
    assert!(offset_of!(cudaExternalSemaphoreSignalNodeParamsV2, extSemArray) == 0);
    assert!(offset_of!(cudaExternalSemaphoreSignalNodeParamsV2, paramsArray) == 8);
    assert!(offset_of!(cudaExternalSemaphoreSignalNodeParamsV2, numExtSems) == 16);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaExternalSemaphoreSignalParams {
    pub params: cudaExternalSemaphoreSignalParams_unnamed1,
    pub flags: c_uint,
    pub reserved: [c_uint; 16],
}
const _: () = {
    assert!(size_of::<cudaExternalSemaphoreSignalParams>() == 144 && align_of::<cudaExternalSemaphoreSignalParams>() == 8);
    assert!(offset_of!(cudaExternalSemaphoreSignalParams, params) == 0);
    assert!(offset_of!(cudaExternalSemaphoreSignalParams, flags) == 72);
    assert!(offset_of!(cudaExternalSemaphoreSignalParams, reserved) == 76);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaExternalSemaphoreSignalParams_unnamed1 {
    pub fence: cudaExternalSemaphoreSignalParams_unnamed1_unnamed1,
    pub nvSciSync: cudaExternalSemaphoreSignalParams_unnamed1_unnamed2,
    pub keyedMutex: cudaExternalSemaphoreSignalParams_unnamed1_unnamed3,
    pub reserved: [c_uint; 12],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaExternalSemaphoreSignalParams_unnamed1_unnamed1 {
    pub value: c_ulonglong,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union cudaExternalSemaphoreSignalParams_unnamed1_unnamed2 {
    pub fence: *mut c_void,
    pub reserved: c_ulonglong,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaExternalSemaphoreSignalParams_unnamed1_unnamed3 {
    pub key: c_ulonglong,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaExternalSemaphoreWaitNodeParams {
    pub extSemArray: *mut cudaExternalSemaphore_t,
    pub paramsArray: *const cudaExternalSemaphoreWaitParams,
    pub numExtSems: c_uint,
}
const _: () = {
    assert!(size_of::<cudaExternalSemaphoreWaitNodeParams>() == 24 && align_of::<cudaExternalSemaphoreWaitNodeParams>() == 8);
    assert!(offset_of!(cudaExternalSemaphoreWaitNodeParams, extSemArray) == 0);
    assert!(offset_of!(cudaExternalSemaphoreWaitNodeParams, paramsArray) == 8);
    assert!(offset_of!(cudaExternalSemaphoreWaitNodeParams, numExtSems) == 16);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaExternalSemaphoreWaitNodeParamsV2 {
    pub extSemArray: *mut cudaExternalSemaphore_t,
    pub paramsArray: *const cudaExternalSemaphoreWaitParams,
    pub numExtSems: c_uint,
}
const _: () = {
    assert!(size_of::<cudaExternalSemaphoreWaitNodeParamsV2>() == 24 && align_of::<cudaExternalSemaphoreWaitNodeParamsV2>() == 8);
    assert!(offset_of!(cudaExternalSemaphoreWaitNodeParamsV2, extSemArray) == 0);
    assert!(offset_of!(cudaExternalSemaphoreWaitNodeParamsV2, paramsArray) == 8);
    assert!(offset_of!(cudaExternalSemaphoreWaitNodeParamsV2, numExtSems) == 16);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaExternalSemaphoreWaitParams {
    pub params: cudaExternalSemaphoreWaitParams_unnamed1,
    pub flags: c_uint,
    pub reserved: [c_uint; 16],
}
const _: () = {
    assert!(size_of::<cudaExternalSemaphoreWaitParams>() == 144 && align_of::<cudaExternalSemaphoreWaitParams>() == 8);
    assert!(offset_of!(cudaExternalSemaphoreWaitParams, params) == 0);
    assert!(offset_of!(cudaExternalSemaphoreWaitParams, flags) == 72);
    assert!(offset_of!(cudaExternalSemaphoreWaitParams, reserved) == 76);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaExternalSemaphoreWaitParams_unnamed1 {
    pub fence: cudaExternalSemaphoreWaitParams_unnamed1_unnamed1,
    pub nvSciSync: cudaExternalSemaphoreWaitParams_unnamed1_unnamed2,
    pub keyedMutex: cudaExternalSemaphoreWaitParams_unnamed1_unnamed3,
    pub reserved: [c_uint; 10],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaExternalSemaphoreWaitParams_unnamed1_unnamed1 {
    pub value: c_ulonglong,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union cudaExternalSemaphoreWaitParams_unnamed1_unnamed2 {
    pub fence: *mut c_void,
    pub reserved: c_ulonglong,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaExternalSemaphoreWaitParams_unnamed1_unnamed3 {
    pub key: c_ulonglong,
    pub timeoutMs: c_uint,
}

pub type cudaExternalSemaphore_t = *mut CUexternalSemaphore_st;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaFlushGPUDirectRDMAWritesScope(pub u32);
impl cudaFlushGPUDirectRDMAWritesScope {
    pub const cudaFlushGPUDirectRDMAWritesToOwner: Self = Self(100);
    pub const cudaFlushGPUDirectRDMAWritesToAllDevices: Self = Self(200);
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaFlushGPUDirectRDMAWritesTarget(pub u32);
impl cudaFlushGPUDirectRDMAWritesTarget {
    pub const cudaFlushGPUDirectRDMAWritesTargetCurrentDevice: Self = Self(0);
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaFuncAttribute(pub u32);
impl cudaFuncAttribute {
    pub const cudaFuncAttributeMaxDynamicSharedMemorySize: Self = Self(8);
    pub const cudaFuncAttributePreferredSharedMemoryCarveout: Self = Self(9);
    pub const cudaFuncAttributeClusterDimMustBeSet: Self = Self(10);
    pub const cudaFuncAttributeRequiredClusterWidth: Self = Self(11);
    pub const cudaFuncAttributeRequiredClusterHeight: Self = Self(12);
    pub const cudaFuncAttributeRequiredClusterDepth: Self = Self(13);
    pub const cudaFuncAttributeNonPortableClusterSizeAllowed: Self = Self(14);
    pub const cudaFuncAttributeClusterSchedulingPolicyPreference: Self = Self(15);
    pub const cudaFuncAttributeMax: Self = Self(16);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaFuncAttributes {
    pub sharedSizeBytes: usize,
    pub constSizeBytes: usize,
    pub localSizeBytes: usize,
    pub maxThreadsPerBlock: c_int,
    pub numRegs: c_int,
    pub ptxVersion: c_int,
    pub binaryVersion: c_int,
    pub cacheModeCA: c_int,
    pub maxDynamicSharedSizeBytes: c_int,
    pub preferredShmemCarveout: c_int,
    pub clusterDimMustBeSet: c_int,
    pub requiredClusterWidth: c_int,
    pub requiredClusterHeight: c_int,
    pub requiredClusterDepth: c_int,
    pub clusterSchedulingPolicyPreference: c_int,
    pub nonPortableClusterSizeAllowed: c_int,
    pub reserved: [c_int; 16],
}
const _: () = {
    assert!(size_of::<cudaFuncAttributes>() == 144 && align_of::<cudaFuncAttributes>() == 8);
    assert!(offset_of!(cudaFuncAttributes, sharedSizeBytes) == 0);
    assert!(offset_of!(cudaFuncAttributes, constSizeBytes) == 8);
    assert!(offset_of!(cudaFuncAttributes, localSizeBytes) == 16);
    assert!(offset_of!(cudaFuncAttributes, maxThreadsPerBlock) == 24);
    assert!(offset_of!(cudaFuncAttributes, numRegs) == 28);
    assert!(offset_of!(cudaFuncAttributes, ptxVersion) == 32);
    assert!(offset_of!(cudaFuncAttributes, binaryVersion) == 36);
    assert!(offset_of!(cudaFuncAttributes, cacheModeCA) == 40);
    assert!(offset_of!(cudaFuncAttributes, maxDynamicSharedSizeBytes) == 44);
    assert!(offset_of!(cudaFuncAttributes, preferredShmemCarveout) == 48);
    assert!(offset_of!(cudaFuncAttributes, clusterDimMustBeSet) == 52);
    assert!(offset_of!(cudaFuncAttributes, requiredClusterWidth) == 56);
    assert!(offset_of!(cudaFuncAttributes, requiredClusterHeight) == 60);
    assert!(offset_of!(cudaFuncAttributes, requiredClusterDepth) == 64);
    assert!(offset_of!(cudaFuncAttributes, clusterSchedulingPolicyPreference) == 68);
    assert!(offset_of!(cudaFuncAttributes, nonPortableClusterSizeAllowed) == 72);
    assert!(offset_of!(cudaFuncAttributes, reserved) == 76);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaFuncCache(pub u32);
impl cudaFuncCache {
    pub const cudaFuncCachePreferNone: Self = Self(0);
    pub const cudaFuncCachePreferShared: Self = Self(1);
    pub const cudaFuncCachePreferL1: Self = Self(2);
    pub const cudaFuncCachePreferEqual: Self = Self(3);
}

pub type cudaFunction_t = *mut CUfunc_st;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaGraphChildGraphNodeOwnership(pub u32);
impl cudaGraphChildGraphNodeOwnership {
    pub const cudaGraphChildGraphOwnershipClone: Self = Self(0);
    pub const cudaGraphChildGraphOwnershipMove: Self = Self(1);
}

pub type cudaGraphConditionalHandle = c_ulonglong;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaGraphConditionalNodeType(pub u32);
impl cudaGraphConditionalNodeType {
    pub const cudaGraphCondTypeIf: Self = Self(0);
    pub const cudaGraphCondTypeWhile: Self = Self(1);
    pub const cudaGraphCondTypeSwitch: Self = Self(2);
}

pub type cudaGraphDeviceNode_t = *mut CUgraphDeviceUpdatableNode_st;

pub type cudaGraphEdgeData = cudaGraphEdgeData_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaGraphEdgeData_st {
    pub from_port: c_uchar,
    pub to_port: c_uchar,
    pub r#type: c_uchar,
    pub reserved: [c_uchar; 5],
}
const _: () = {
    assert!(size_of::<cudaGraphEdgeData_st>() == 8 && align_of::<cudaGraphEdgeData_st>() == 1);
    assert!(offset_of!(cudaGraphEdgeData_st, from_port) == 0);
    assert!(offset_of!(cudaGraphEdgeData_st, to_port) == 1);
    assert!(offset_of!(cudaGraphEdgeData_st, r#type) == 2);
    assert!(offset_of!(cudaGraphEdgeData_st, reserved) == 3);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaGraphExecUpdateResult(pub u32);
impl cudaGraphExecUpdateResult {
    pub const cudaGraphExecUpdateSuccess: Self = Self(0);
    pub const cudaGraphExecUpdateError: Self = Self(1);
    pub const cudaGraphExecUpdateErrorTopologyChanged: Self = Self(2);
    pub const cudaGraphExecUpdateErrorNodeTypeChanged: Self = Self(3);
    pub const cudaGraphExecUpdateErrorFunctionChanged: Self = Self(4);
    pub const cudaGraphExecUpdateErrorParametersChanged: Self = Self(5);
    pub const cudaGraphExecUpdateErrorNotSupported: Self = Self(6);
    pub const cudaGraphExecUpdateErrorUnsupportedFunctionChange: Self = Self(7);
    pub const cudaGraphExecUpdateErrorAttributesChanged: Self = Self(8);
}

pub type cudaGraphExecUpdateResultInfo = cudaGraphExecUpdateResultInfo_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaGraphExecUpdateResultInfo_st {
    pub result: cudaGraphExecUpdateResult,
    pub errorNode: cudaGraphNode_t,
    pub errorFromNode: cudaGraphNode_t,
}
const _: () = {
    assert!(size_of::<cudaGraphExecUpdateResultInfo_st>() == 24 && align_of::<cudaGraphExecUpdateResultInfo_st>() == 8);
    assert!(offset_of!(cudaGraphExecUpdateResultInfo_st, result) == 0);
    assert!(offset_of!(cudaGraphExecUpdateResultInfo_st, errorNode) == 8);
    assert!(offset_of!(cudaGraphExecUpdateResultInfo_st, errorFromNode) == 16);
};

pub type cudaGraphExec_t = *mut CUgraphExec_st;

pub type cudaGraphInstantiateParams = cudaGraphInstantiateParams_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaGraphInstantiateParams_st {
    pub flags: c_ulonglong,
    pub uploadStream: cudaStream_t,
    pub errNode_out: cudaGraphNode_t,
    pub result_out: cudaGraphInstantiateResult,
}
const _: () = {
    assert!(size_of::<cudaGraphInstantiateParams_st>() == 32 && align_of::<cudaGraphInstantiateParams_st>() == 8);
    assert!(offset_of!(cudaGraphInstantiateParams_st, flags) == 0);
    assert!(offset_of!(cudaGraphInstantiateParams_st, uploadStream) == 8);
    assert!(offset_of!(cudaGraphInstantiateParams_st, errNode_out) == 16);
    assert!(offset_of!(cudaGraphInstantiateParams_st, result_out) == 24);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaGraphInstantiateResult(pub u32);
impl cudaGraphInstantiateResult {
    pub const cudaGraphInstantiateSuccess: Self = Self(0);
    pub const cudaGraphInstantiateError: Self = Self(1);
    pub const cudaGraphInstantiateInvalidStructure: Self = Self(2);
    pub const cudaGraphInstantiateNodeOperationNotSupported: Self = Self(3);
    pub const cudaGraphInstantiateMultipleDevicesNotSupported: Self = Self(4);
    pub const cudaGraphInstantiateConditionalHandleUnused: Self = Self(5);
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaGraphMemAttributeType(pub u32);
impl cudaGraphMemAttributeType {
    pub const cudaGraphMemAttrUsedMemCurrent: Self = Self(0);
    pub const cudaGraphMemAttrUsedMemHigh: Self = Self(1);
    pub const cudaGraphMemAttrReservedMemCurrent: Self = Self(2);
    pub const cudaGraphMemAttrReservedMemHigh: Self = Self(3);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaGraphNodeParams {
    pub r#type: cudaGraphNodeType,
    pub reserved0: [c_int; 3],
    pub anonymous2: cudaGraphNodeParams_unnamed1,
    pub reserved2: c_longlong,
}
const _: () = {
    assert!(size_of::<cudaGraphNodeParams>() == 256 && align_of::<cudaGraphNodeParams>() == 8);
    assert!(offset_of!(cudaGraphNodeParams, r#type) == 0);
    assert!(offset_of!(cudaGraphNodeParams, reserved0) == 4);
    assert!(offset_of!(cudaGraphNodeParams, reserved2) == 248);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub union cudaGraphNodeParams_unnamed1 {
    pub reserved1: [c_longlong; 29],
    pub kernel: cudaKernelNodeParamsV2,
    pub memcpy: cudaMemcpyNodeParams,
    pub memset: cudaMemsetParamsV2,
    pub host: cudaHostNodeParamsV2,
    pub graph: cudaChildGraphNodeParams,
    pub eventWait: cudaEventWaitNodeParams,
    pub eventRecord: cudaEventRecordNodeParams,
    pub extSemSignal: cudaExternalSemaphoreSignalNodeParamsV2,
    pub extSemWait: cudaExternalSemaphoreWaitNodeParamsV2,
    pub alloc: cudaMemAllocNodeParamsV2,
    pub free: cudaMemFreeNodeParams,
    pub conditional: cudaConditionalNodeParams,
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaGraphNodeType(pub u32);
impl cudaGraphNodeType {
    pub const cudaGraphNodeTypeKernel: Self = Self(0);
    pub const cudaGraphNodeTypeMemcpy: Self = Self(1);
    pub const cudaGraphNodeTypeMemset: Self = Self(2);
    pub const cudaGraphNodeTypeHost: Self = Self(3);
    pub const cudaGraphNodeTypeGraph: Self = Self(4);
    pub const cudaGraphNodeTypeEmpty: Self = Self(5);
    pub const cudaGraphNodeTypeWaitEvent: Self = Self(6);
    pub const cudaGraphNodeTypeEventRecord: Self = Self(7);
    pub const cudaGraphNodeTypeExtSemaphoreSignal: Self = Self(8);
    pub const cudaGraphNodeTypeExtSemaphoreWait: Self = Self(9);
    pub const cudaGraphNodeTypeMemAlloc: Self = Self(10);
    pub const cudaGraphNodeTypeMemFree: Self = Self(11);
    pub const cudaGraphNodeTypeConditional: Self = Self(13);
    pub const cudaGraphNodeTypeCount: Self = Self(14);
}

pub type cudaGraphNode_t = *mut CUgraphNode_st;

pub type cudaGraph_t = *mut CUgraph_st;

#[repr(C)]
pub struct cudaGraphicsResource {
    _opaque: [u8; 0],
}

pub type cudaGraphicsResource_t = *mut cudaGraphicsResource;

pub type cudaHostFn_t = Option<unsafe extern "C" fn(userData: *mut c_void)>;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaHostNodeParams {
    pub r#fn: cudaHostFn_t,
    pub userData: *mut c_void,
}
const _: () = {
    assert!(size_of::<cudaHostNodeParams>() == 16 && align_of::<cudaHostNodeParams>() == 8);
    assert!(offset_of!(cudaHostNodeParams, r#fn) == 0);
    assert!(offset_of!(cudaHostNodeParams, userData) == 8);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaHostNodeParamsV2 {
    pub r#fn: cudaHostFn_t,
    pub userData: *mut c_void,
}
const _: () = {
    assert!(size_of::<cudaHostNodeParamsV2>() == 16 && align_of::<cudaHostNodeParamsV2>() == 8);
    assert!(offset_of!(cudaHostNodeParamsV2, r#fn) == 0);
    assert!(offset_of!(cudaHostNodeParamsV2, userData) == 8);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaIpcEventHandle_st {
    pub reserved: [c_char; 64],
}
const _: () = {
    assert!(size_of::<cudaIpcEventHandle_st>() == 64 && align_of::<cudaIpcEventHandle_st>() == 1);
    assert!(offset_of!(cudaIpcEventHandle_st, reserved) == 0);
};

pub type cudaIpcEventHandle_t = cudaIpcEventHandle_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaIpcMemHandle_st {
    pub reserved: [c_char; 64],
}
const _: () = {
    assert!(size_of::<cudaIpcMemHandle_st>() == 64 && align_of::<cudaIpcMemHandle_st>() == 1);
    assert!(offset_of!(cudaIpcMemHandle_st, reserved) == 0);
};

pub type cudaIpcMemHandle_t = cudaIpcMemHandle_st;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaJitOption(pub u32);
impl cudaJitOption {
    pub const cudaJitMaxRegisters: Self = Self(0);
    pub const cudaJitThreadsPerBlock: Self = Self(1);
    pub const cudaJitWallTime: Self = Self(2);
    pub const cudaJitInfoLogBuffer: Self = Self(3);
    pub const cudaJitInfoLogBufferSizeBytes: Self = Self(4);
    pub const cudaJitErrorLogBuffer: Self = Self(5);
    pub const cudaJitErrorLogBufferSizeBytes: Self = Self(6);
    pub const cudaJitOptimizationLevel: Self = Self(7);
    pub const cudaJitFallbackStrategy: Self = Self(10);
    pub const cudaJitGenerateDebugInfo: Self = Self(11);
    pub const cudaJitLogVerbose: Self = Self(12);
    pub const cudaJitGenerateLineInfo: Self = Self(13);
    pub const cudaJitCacheMode: Self = Self(14);
    pub const cudaJitPositionIndependentCode: Self = Self(30);
    pub const cudaJitMinCtaPerSm: Self = Self(31);
    pub const cudaJitMaxThreadsPerBlock: Self = Self(32);
    pub const cudaJitOverrideDirectiveValues: Self = Self(33);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaKernelNodeParams {
    pub func: *mut c_void,
    pub gridDim: dim3,
    pub blockDim: dim3,
    pub sharedMemBytes: c_uint,
    pub kernelParams: *mut *mut c_void,
    pub extra: *mut *mut c_void,
}
const _: () = {
    assert!(size_of::<cudaKernelNodeParams>() == 56 && align_of::<cudaKernelNodeParams>() == 8);
    assert!(offset_of!(cudaKernelNodeParams, func) == 0);
    assert!(offset_of!(cudaKernelNodeParams, gridDim) == 8);
    assert!(offset_of!(cudaKernelNodeParams, blockDim) == 20);
    assert!(offset_of!(cudaKernelNodeParams, sharedMemBytes) == 32);
    assert!(offset_of!(cudaKernelNodeParams, kernelParams) == 40);
    assert!(offset_of!(cudaKernelNodeParams, extra) == 48);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaKernelNodeParamsV2 {
    pub func: *mut c_void,
    pub gridDim: dim3,
    pub blockDim: dim3,
    pub sharedMemBytes: c_uint,
    pub kernelParams: *mut *mut c_void,
    pub extra: *mut *mut c_void,
}
const _: () = {
    assert!(size_of::<cudaKernelNodeParamsV2>() == 56 && align_of::<cudaKernelNodeParamsV2>() == 8);
    assert!(offset_of!(cudaKernelNodeParamsV2, func) == 0);
    assert!(offset_of!(cudaKernelNodeParamsV2, gridDim) == 8);
    assert!(offset_of!(cudaKernelNodeParamsV2, blockDim) == 20);
    assert!(offset_of!(cudaKernelNodeParamsV2, sharedMemBytes) == 32);
    assert!(offset_of!(cudaKernelNodeParamsV2, kernelParams) == 40);
    assert!(offset_of!(cudaKernelNodeParamsV2, extra) == 48);
};

pub type cudaKernel_t = *mut CUkern_st;

pub type cudaLaunchAttribute = cudaLaunchAttribute_st;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaLaunchAttributeID(pub u32);
impl cudaLaunchAttributeID {
    pub const cudaLaunchAttributeIgnore: Self = Self(0);
    pub const cudaLaunchAttributeAccessPolicyWindow: Self = Self(1);
    pub const cudaLaunchAttributeCooperative: Self = Self(2);
    pub const cudaLaunchAttributeSynchronizationPolicy: Self = Self(3);
    pub const cudaLaunchAttributeClusterDimension: Self = Self(4);
    pub const cudaLaunchAttributeClusterSchedulingPolicyPreference: Self = Self(5);
    pub const cudaLaunchAttributeProgrammaticStreamSerialization: Self = Self(6);
    pub const cudaLaunchAttributeProgrammaticEvent: Self = Self(7);
    pub const cudaLaunchAttributePriority: Self = Self(8);
    pub const cudaLaunchAttributeMemSyncDomainMap: Self = Self(9);
    pub const cudaLaunchAttributeMemSyncDomain: Self = Self(10);
    pub const cudaLaunchAttributePreferredClusterDimension: Self = Self(11);
    pub const cudaLaunchAttributeLaunchCompletionEvent: Self = Self(12);
    pub const cudaLaunchAttributeDeviceUpdatableKernelNode: Self = Self(13);
    pub const cudaLaunchAttributePreferredSharedMemoryCarveout: Self = Self(14);
    pub const cudaLaunchAttributeNvlinkUtilCentricScheduling: Self = Self(16);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union cudaLaunchAttributeValue {
    pub pad: [c_char; 64],
    pub accessPolicyWindow: cudaAccessPolicyWindow,
    pub cooperative: c_int,
    pub syncPolicy: cudaSynchronizationPolicy,
    pub clusterDim: cudaLaunchAttributeValue_unnamed1,
    pub clusterSchedulingPolicyPreference: cudaClusterSchedulingPolicy,
    pub programmaticStreamSerializationAllowed: c_int,
    pub programmaticEvent: cudaLaunchAttributeValue_unnamed2,
    pub priority: c_int,
    pub memSyncDomainMap: cudaLaunchMemSyncDomainMap,
    pub memSyncDomain: cudaLaunchMemSyncDomain,
    pub preferredClusterDim: cudaLaunchAttributeValue_unnamed3,
    pub launchCompletionEvent: cudaLaunchAttributeValue_unnamed4,
    pub deviceUpdatableKernelNode: cudaLaunchAttributeValue_unnamed5,
    pub sharedMemCarveout: c_uint,
    pub nvlinkUtilCentricScheduling: c_uint,
}
const _: () = {
    assert!(size_of::<cudaLaunchAttributeValue>() == 64 && align_of::<cudaLaunchAttributeValue>() == 8);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaLaunchAttributeValue_unnamed1 {
    pub x: c_uint,
    pub y: c_uint,
    pub z: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaLaunchAttributeValue_unnamed2 {
    pub event: cudaEvent_t,
    pub flags: c_int,
    pub triggerAtBlockStart: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaLaunchAttributeValue_unnamed3 {
    pub x: c_uint,
    pub y: c_uint,
    pub z: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaLaunchAttributeValue_unnamed4 {
    pub event: cudaEvent_t,
    pub flags: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaLaunchAttributeValue_unnamed5 {
    pub deviceUpdatable: c_int,
    pub devNode: cudaGraphDeviceNode_t,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaLaunchAttribute_st {
    pub id: cudaLaunchAttributeID,
    pub pad: [c_char; 4],
    pub val: cudaLaunchAttributeValue,
}
const _: () = {
    assert!(size_of::<cudaLaunchAttribute_st>() == 72 && align_of::<cudaLaunchAttribute_st>() == 8);
    assert!(offset_of!(cudaLaunchAttribute_st, id) == 0);
    assert!(offset_of!(cudaLaunchAttribute_st, pad) == 4);
    assert!(offset_of!(cudaLaunchAttribute_st, val) == 8);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaLaunchConfig_st {
    pub gridDim: dim3,
    pub blockDim: dim3,
    pub dynamicSmemBytes: usize,
    pub stream: cudaStream_t,
    pub attrs: *mut cudaLaunchAttribute,
    pub numAttrs: c_uint,
}
const _: () = {
    assert!(size_of::<cudaLaunchConfig_st>() == 56 && align_of::<cudaLaunchConfig_st>() == 8);
    assert!(offset_of!(cudaLaunchConfig_st, gridDim) == 0);
    assert!(offset_of!(cudaLaunchConfig_st, blockDim) == 12);
    assert!(offset_of!(cudaLaunchConfig_st, dynamicSmemBytes) == 24);
    assert!(offset_of!(cudaLaunchConfig_st, stream) == 32);
    assert!(offset_of!(cudaLaunchConfig_st, attrs) == 40);
    assert!(offset_of!(cudaLaunchConfig_st, numAttrs) == 48);
};

pub type cudaLaunchConfig_t = cudaLaunchConfig_st;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaLaunchMemSyncDomain(pub u32);
impl cudaLaunchMemSyncDomain {
    pub const cudaLaunchMemSyncDomainDefault: Self = Self(0);
    pub const cudaLaunchMemSyncDomainRemote: Self = Self(1);
}

pub type cudaLaunchMemSyncDomainMap = cudaLaunchMemSyncDomainMap_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaLaunchMemSyncDomainMap_st {
    pub default_: c_uchar,
    pub remote: c_uchar,
}
const _: () = {
    assert!(size_of::<cudaLaunchMemSyncDomainMap_st>() == 2 && align_of::<cudaLaunchMemSyncDomainMap_st>() == 1);
    assert!(offset_of!(cudaLaunchMemSyncDomainMap_st, default_) == 0);
    assert!(offset_of!(cudaLaunchMemSyncDomainMap_st, remote) == 1);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaLibraryOption(pub u32);
impl cudaLibraryOption {
    pub const cudaLibraryHostUniversalFunctionAndDataTable: Self = Self(0);
    pub const cudaLibraryBinaryIsPreserved: Self = Self(1);
}

pub type cudaLibrary_t = *mut CUlib_st;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaLimit(pub u32);
impl cudaLimit {
    pub const cudaLimitStackSize: Self = Self(0);
    pub const cudaLimitPrintfFifoSize: Self = Self(1);
    pub const cudaLimitMallocHeapSize: Self = Self(2);
    pub const cudaLimitDevRuntimeSyncDepth: Self = Self(3);
    pub const cudaLimitDevRuntimePendingLaunchCount: Self = Self(4);
    pub const cudaLimitMaxL2FetchGranularity: Self = Self(5);
    pub const cudaLimitPersistingL2CacheSize: Self = Self(6);
}

pub type cudaLogIterator = c_uint;

pub type cudaLogLevel = CUDAlogLevel_enum;

pub type cudaLogsCallbackHandle = *mut CUlogsCallbackEntry_st;

pub type cudaLogsCallback_t = Option<unsafe extern "C" fn(data: *mut c_void, logLevel: cudaLogLevel, message: *mut c_char, length: usize)>;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaMemAccessDesc {
    pub location: cudaMemLocation,
    pub flags: cudaMemAccessFlags,
}
const _: () = {
    assert!(size_of::<cudaMemAccessDesc>() == 12 && align_of::<cudaMemAccessDesc>() == 4);
    assert!(offset_of!(cudaMemAccessDesc, location) == 0);
    assert!(offset_of!(cudaMemAccessDesc, flags) == 8);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaMemAccessFlags(pub u32);
impl cudaMemAccessFlags {
    pub const cudaMemAccessFlagsProtNone: Self = Self(0);
    pub const cudaMemAccessFlagsProtRead: Self = Self(1);
    pub const cudaMemAccessFlagsProtReadWrite: Self = Self(3);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaMemAllocNodeParams {
    pub poolProps: cudaMemPoolProps,
    pub accessDescs: *const cudaMemAccessDesc,
    pub accessDescCount: usize,
    pub bytesize: usize,
    pub dptr: *mut c_void,
}
const _: () = {
    assert!(size_of::<cudaMemAllocNodeParams>() == 120 && align_of::<cudaMemAllocNodeParams>() == 8);
    assert!(offset_of!(cudaMemAllocNodeParams, poolProps) == 0);
    assert!(offset_of!(cudaMemAllocNodeParams, accessDescs) == 88);
    assert!(offset_of!(cudaMemAllocNodeParams, accessDescCount) == 96);
    assert!(offset_of!(cudaMemAllocNodeParams, bytesize) == 104);
    assert!(offset_of!(cudaMemAllocNodeParams, dptr) == 112);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaMemAllocNodeParamsV2 {
    pub poolProps: cudaMemPoolProps,
    pub accessDescs: *const cudaMemAccessDesc,
    pub accessDescCount: usize,
    pub bytesize: usize,
    pub dptr: *mut c_void,
}
const _: () = {
    assert!(size_of::<cudaMemAllocNodeParamsV2>() == 120 && align_of::<cudaMemAllocNodeParamsV2>() == 8);
    assert!(offset_of!(cudaMemAllocNodeParamsV2, poolProps) == 0);
    assert!(offset_of!(cudaMemAllocNodeParamsV2, accessDescs) == 88);
    assert!(offset_of!(cudaMemAllocNodeParamsV2, accessDescCount) == 96);
    assert!(offset_of!(cudaMemAllocNodeParamsV2, bytesize) == 104);
    assert!(offset_of!(cudaMemAllocNodeParamsV2, dptr) == 112);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaMemAllocationHandleType(pub u32);
impl cudaMemAllocationHandleType {
    pub const cudaMemHandleTypeNone: Self = Self(0);
    pub const cudaMemHandleTypePosixFileDescriptor: Self = Self(1);
    pub const cudaMemHandleTypeWin32: Self = Self(2);
    pub const cudaMemHandleTypeWin32Kmt: Self = Self(4);
    pub const cudaMemHandleTypeFabric: Self = Self(8);
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaMemAllocationType(pub u32);
impl cudaMemAllocationType {
    pub const cudaMemAllocationTypeInvalid: Self = Self(0);
    pub const cudaMemAllocationTypePinned: Self = Self(1);
    pub const cudaMemAllocationTypeManaged: Self = Self(2);
    pub const cudaMemAllocationTypeMax: Self = Self(2147483647);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaMemFreeNodeParams {
    pub dptr: *mut c_void,
}
const _: () = {
    assert!(size_of::<cudaMemFreeNodeParams>() == 8 && align_of::<cudaMemFreeNodeParams>() == 8);
    assert!(offset_of!(cudaMemFreeNodeParams, dptr) == 0);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaMemLocation {
    pub r#type: cudaMemLocationType,
    pub id: c_int,
}
const _: () = {
    assert!(size_of::<cudaMemLocation>() == 8 && align_of::<cudaMemLocation>() == 4);
    assert!(offset_of!(cudaMemLocation, r#type) == 0);
    assert!(offset_of!(cudaMemLocation, id) == 4);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaMemLocationType(pub u32);
impl cudaMemLocationType {
    pub const cudaMemLocationTypeInvalid: Self = Self(0);
    pub const cudaMemLocationTypeNone: Self = Self(0);
    pub const cudaMemLocationTypeDevice: Self = Self(1);
    pub const cudaMemLocationTypeHost: Self = Self(2);
    pub const cudaMemLocationTypeHostNuma: Self = Self(3);
    pub const cudaMemLocationTypeHostNumaCurrent: Self = Self(4);
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaMemPoolAttr(pub u32);
impl cudaMemPoolAttr {
    pub const cudaMemPoolReuseFollowEventDependencies: Self = Self(1);
    pub const cudaMemPoolReuseAllowOpportunistic: Self = Self(2);
    pub const cudaMemPoolReuseAllowInternalDependencies: Self = Self(3);
    pub const cudaMemPoolAttrReleaseThreshold: Self = Self(4);
    pub const cudaMemPoolAttrReservedMemCurrent: Self = Self(5);
    pub const cudaMemPoolAttrReservedMemHigh: Self = Self(6);
    pub const cudaMemPoolAttrUsedMemCurrent: Self = Self(7);
    pub const cudaMemPoolAttrUsedMemHigh: Self = Self(8);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaMemPoolProps {
    pub allocType: cudaMemAllocationType,
    pub handleTypes: cudaMemAllocationHandleType,
    pub location: cudaMemLocation,
    pub win32SecurityAttributes: *mut c_void,
    pub maxSize: usize,
    pub usage: c_ushort,
    pub reserved: [c_uchar; 54],
}
const _: () = {
    assert!(size_of::<cudaMemPoolProps>() == 88 && align_of::<cudaMemPoolProps>() == 8);
    assert!(offset_of!(cudaMemPoolProps, allocType) == 0);
    assert!(offset_of!(cudaMemPoolProps, handleTypes) == 4);
    assert!(offset_of!(cudaMemPoolProps, location) == 8);
    assert!(offset_of!(cudaMemPoolProps, win32SecurityAttributes) == 16);
    assert!(offset_of!(cudaMemPoolProps, maxSize) == 24);
    assert!(offset_of!(cudaMemPoolProps, usage) == 32);
    assert!(offset_of!(cudaMemPoolProps, reserved) == 34);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaMemPoolPtrExportData {
    pub reserved: [c_uchar; 64],
}
const _: () = {
    assert!(size_of::<cudaMemPoolPtrExportData>() == 64 && align_of::<cudaMemPoolPtrExportData>() == 1);
    assert!(offset_of!(cudaMemPoolPtrExportData, reserved) == 0);
};

pub type cudaMemPool_t = *mut CUmemPoolHandle_st;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaMemRangeAttribute(pub u32);
impl cudaMemRangeAttribute {
    pub const cudaMemRangeAttributeReadMostly: Self = Self(1);
    pub const cudaMemRangeAttributePreferredLocation: Self = Self(2);
    pub const cudaMemRangeAttributeAccessedBy: Self = Self(3);
    pub const cudaMemRangeAttributeLastPrefetchLocation: Self = Self(4);
    pub const cudaMemRangeAttributePreferredLocationType: Self = Self(5);
    pub const cudaMemRangeAttributePreferredLocationId: Self = Self(6);
    pub const cudaMemRangeAttributeLastPrefetchLocationType: Self = Self(7);
    pub const cudaMemRangeAttributeLastPrefetchLocationId: Self = Self(8);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaMemcpy3DBatchOp {
    pub src: cudaMemcpy3DOperand,
    pub dst: cudaMemcpy3DOperand,
    pub extent: cudaExtent,
    pub srcAccessOrder: cudaMemcpySrcAccessOrder,
    pub flags: c_uint,
}
const _: () = {
    assert!(size_of::<cudaMemcpy3DBatchOp>() == 112 && align_of::<cudaMemcpy3DBatchOp>() == 8);
    assert!(offset_of!(cudaMemcpy3DBatchOp, src) == 0);
    assert!(offset_of!(cudaMemcpy3DBatchOp, dst) == 40);
    assert!(offset_of!(cudaMemcpy3DBatchOp, extent) == 80);
    assert!(offset_of!(cudaMemcpy3DBatchOp, srcAccessOrder) == 104);
    assert!(offset_of!(cudaMemcpy3DBatchOp, flags) == 108);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaMemcpy3DOperand {
    pub r#type: cudaMemcpy3DOperandType,
    pub op: cudaMemcpy3DOperand_unnamed1,
}
const _: () = {
    assert!(size_of::<cudaMemcpy3DOperand>() == 40 && align_of::<cudaMemcpy3DOperand>() == 8);
    assert!(offset_of!(cudaMemcpy3DOperand, r#type) == 0);
    assert!(offset_of!(cudaMemcpy3DOperand, op) == 8);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaMemcpy3DOperandType(pub u32);
impl cudaMemcpy3DOperandType {
    pub const cudaMemcpyOperandTypePointer: Self = Self(1);
    pub const cudaMemcpyOperandTypeArray: Self = Self(2);
    pub const cudaMemcpyOperandTypeMax: Self = Self(2147483647);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union cudaMemcpy3DOperand_unnamed1 {
    pub ptr: cudaMemcpy3DOperand_unnamed1_unnamed1,
    pub array: cudaMemcpy3DOperand_unnamed1_unnamed2,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaMemcpy3DOperand_unnamed1_unnamed1 {
    pub ptr: *mut c_void,
    pub rowLength: usize,
    pub layerHeight: usize,
    pub locHint: cudaMemLocation,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaMemcpy3DOperand_unnamed1_unnamed2 {
    pub array: cudaArray_t,
    pub offset: cudaOffset3D,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaMemcpy3DParms {
    pub srcArray: cudaArray_t,
    pub srcPos: cudaPos,
    pub srcPtr: cudaPitchedPtr,
    pub dstArray: cudaArray_t,
    pub dstPos: cudaPos,
    pub dstPtr: cudaPitchedPtr,
    pub extent: cudaExtent,
    pub kind: cudaMemcpyKind,
}
const _: () = {
    assert!(size_of::<cudaMemcpy3DParms>() == 160 && align_of::<cudaMemcpy3DParms>() == 8);
    assert!(offset_of!(cudaMemcpy3DParms, srcArray) == 0);
    assert!(offset_of!(cudaMemcpy3DParms, srcPos) == 8);
    assert!(offset_of!(cudaMemcpy3DParms, srcPtr) == 32);
    assert!(offset_of!(cudaMemcpy3DParms, dstArray) == 64);
    assert!(offset_of!(cudaMemcpy3DParms, dstPos) == 72);
    assert!(offset_of!(cudaMemcpy3DParms, dstPtr) == 96);
    assert!(offset_of!(cudaMemcpy3DParms, extent) == 128);
    assert!(offset_of!(cudaMemcpy3DParms, kind) == 152);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaMemcpy3DPeerParms {
    pub srcArray: cudaArray_t,
    pub srcPos: cudaPos,
    pub srcPtr: cudaPitchedPtr,
    pub srcDevice: c_int,
    pub dstArray: cudaArray_t,
    pub dstPos: cudaPos,
    pub dstPtr: cudaPitchedPtr,
    pub dstDevice: c_int,
    pub extent: cudaExtent,
}
const _: () = {
    assert!(size_of::<cudaMemcpy3DPeerParms>() == 168 && align_of::<cudaMemcpy3DPeerParms>() == 8);
    assert!(offset_of!(cudaMemcpy3DPeerParms, srcArray) == 0);
    assert!(offset_of!(cudaMemcpy3DPeerParms, srcPos) == 8);
    assert!(offset_of!(cudaMemcpy3DPeerParms, srcPtr) == 32);
    assert!(offset_of!(cudaMemcpy3DPeerParms, srcDevice) == 64);
    assert!(offset_of!(cudaMemcpy3DPeerParms, dstArray) == 72);
    assert!(offset_of!(cudaMemcpy3DPeerParms, dstPos) == 80);
    assert!(offset_of!(cudaMemcpy3DPeerParms, dstPtr) == 104);
    assert!(offset_of!(cudaMemcpy3DPeerParms, dstDevice) == 136);
    assert!(offset_of!(cudaMemcpy3DPeerParms, extent) == 144);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaMemcpyAttributes {
    pub srcAccessOrder: cudaMemcpySrcAccessOrder,
    pub srcLocHint: cudaMemLocation,
    pub dstLocHint: cudaMemLocation,
    pub flags: c_uint,
}
const _: () = {
    assert!(size_of::<cudaMemcpyAttributes>() == 24 && align_of::<cudaMemcpyAttributes>() == 4);
    assert!(offset_of!(cudaMemcpyAttributes, srcAccessOrder) == 0);
    assert!(offset_of!(cudaMemcpyAttributes, srcLocHint) == 4);
    assert!(offset_of!(cudaMemcpyAttributes, dstLocHint) == 12);
    assert!(offset_of!(cudaMemcpyAttributes, flags) == 20);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaMemcpyKind(pub u32);
impl cudaMemcpyKind {
    pub const cudaMemcpyHostToHost: Self = Self(0);
    pub const cudaMemcpyHostToDevice: Self = Self(1);
    pub const cudaMemcpyDeviceToHost: Self = Self(2);
    pub const cudaMemcpyDeviceToDevice: Self = Self(3);
    pub const cudaMemcpyDefault: Self = Self(4);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaMemcpyNodeParams {
    pub flags: c_int,
    pub reserved: [c_int; 3],
    pub copyParams: cudaMemcpy3DParms,
}
const _: () = {
    assert!(size_of::<cudaMemcpyNodeParams>() == 176 && align_of::<cudaMemcpyNodeParams>() == 8);
    assert!(offset_of!(cudaMemcpyNodeParams, flags) == 0);
    assert!(offset_of!(cudaMemcpyNodeParams, reserved) == 4);
    assert!(offset_of!(cudaMemcpyNodeParams, copyParams) == 16);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaMemcpySrcAccessOrder(pub u32);
impl cudaMemcpySrcAccessOrder {
    pub const cudaMemcpySrcAccessOrderInvalid: Self = Self(0);
    pub const cudaMemcpySrcAccessOrderStream: Self = Self(1);
    pub const cudaMemcpySrcAccessOrderDuringApiCall: Self = Self(2);
    pub const cudaMemcpySrcAccessOrderAny: Self = Self(3);
    pub const cudaMemcpySrcAccessOrderMax: Self = Self(2147483647);
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaMemoryAdvise(pub u32);
impl cudaMemoryAdvise {
    pub const cudaMemAdviseSetReadMostly: Self = Self(1);
    pub const cudaMemAdviseUnsetReadMostly: Self = Self(2);
    pub const cudaMemAdviseSetPreferredLocation: Self = Self(3);
    pub const cudaMemAdviseUnsetPreferredLocation: Self = Self(4);
    pub const cudaMemAdviseSetAccessedBy: Self = Self(5);
    pub const cudaMemAdviseUnsetAccessedBy: Self = Self(6);
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaMemoryType(pub u32);
impl cudaMemoryType {
    pub const cudaMemoryTypeUnregistered: Self = Self(0);
    pub const cudaMemoryTypeHost: Self = Self(1);
    pub const cudaMemoryTypeDevice: Self = Self(2);
    pub const cudaMemoryTypeManaged: Self = Self(3);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaMemsetParams {
    pub dst: *mut c_void,
    pub pitch: usize,
    pub value: c_uint,
    pub elementSize: c_uint,
    pub width: usize,
    pub height: usize,
}
const _: () = {
    assert!(size_of::<cudaMemsetParams>() == 40 && align_of::<cudaMemsetParams>() == 8);
    assert!(offset_of!(cudaMemsetParams, dst) == 0);
    assert!(offset_of!(cudaMemsetParams, pitch) == 8);
    assert!(offset_of!(cudaMemsetParams, value) == 16);
    assert!(offset_of!(cudaMemsetParams, elementSize) == 20);
    assert!(offset_of!(cudaMemsetParams, width) == 24);
    assert!(offset_of!(cudaMemsetParams, height) == 32);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaMemsetParamsV2 {
    pub dst: *mut c_void,
    pub pitch: usize,
    pub value: c_uint,
    pub elementSize: c_uint,
    pub width: usize,
    pub height: usize,
}
const _: () = {
    assert!(size_of::<cudaMemsetParamsV2>() == 40 && align_of::<cudaMemsetParamsV2>() == 8);
    assert!(offset_of!(cudaMemsetParamsV2, dst) == 0);
    assert!(offset_of!(cudaMemsetParamsV2, pitch) == 8);
    assert!(offset_of!(cudaMemsetParamsV2, value) == 16);
    assert!(offset_of!(cudaMemsetParamsV2, elementSize) == 20);
    assert!(offset_of!(cudaMemsetParamsV2, width) == 24);
    assert!(offset_of!(cudaMemsetParamsV2, height) == 32);
};

#[repr(C)]
pub struct cudaMipmappedArray {
    _opaque: [u8; 0],
}

pub type cudaMipmappedArray_const_t = *const cudaMipmappedArray;

pub type cudaMipmappedArray_t = *mut cudaMipmappedArray;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaOffset3D {
    pub x: usize,
    pub y: usize,
    pub z: usize,
}
const _: () = {
    assert!(size_of::<cudaOffset3D>() == 24 && align_of::<cudaOffset3D>() == 8);
    assert!(offset_of!(cudaOffset3D, x) == 0);
    assert!(offset_of!(cudaOffset3D, y) == 8);
    assert!(offset_of!(cudaOffset3D, z) == 16);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaPitchedPtr {
    pub ptr: *mut c_void,
    pub pitch: usize,
    pub xsize: usize,
    pub ysize: usize,
}
const _: () = {
    assert!(size_of::<cudaPitchedPtr>() == 32 && align_of::<cudaPitchedPtr>() == 8);
    assert!(offset_of!(cudaPitchedPtr, ptr) == 0);
    assert!(offset_of!(cudaPitchedPtr, pitch) == 8);
    assert!(offset_of!(cudaPitchedPtr, xsize) == 16);
    assert!(offset_of!(cudaPitchedPtr, ysize) == 24);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaPointerAttributes {
    pub r#type: cudaMemoryType,
    pub device: c_int,
    pub devicePointer: *mut c_void,
    pub hostPointer: *mut c_void,
    pub reserved: [c_long; 8],
}
const _: () = {
    assert!(size_of::<cudaPointerAttributes>() == 88 && align_of::<cudaPointerAttributes>() == 8);
    assert!(offset_of!(cudaPointerAttributes, r#type) == 0);
    assert!(offset_of!(cudaPointerAttributes, device) == 4);
    assert!(offset_of!(cudaPointerAttributes, devicePointer) == 8);
    assert!(offset_of!(cudaPointerAttributes, hostPointer) == 16);
    assert!(offset_of!(cudaPointerAttributes, reserved) == 24);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaPos {
    pub x: usize,
    pub y: usize,
    pub z: usize,
}
const _: () = {
    assert!(size_of::<cudaPos>() == 24 && align_of::<cudaPos>() == 8);
    assert!(offset_of!(cudaPos, x) == 0);
    assert!(offset_of!(cudaPos, y) == 8);
    assert!(offset_of!(cudaPos, z) == 16);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaResourceDesc {
    pub resType: cudaResourceType,
    pub res: cudaResourceDesc_unnamed1,
    pub flags: c_uint,
}
const _: () = {
    assert!(size_of::<cudaResourceDesc>() == 144 && align_of::<cudaResourceDesc>() == 8);
    assert!(offset_of!(cudaResourceDesc, resType) == 0);
    assert!(offset_of!(cudaResourceDesc, res) == 8);
    assert!(offset_of!(cudaResourceDesc, flags) == 136);
};

#[repr(C)]
#[derive(Clone, Copy)]
pub union cudaResourceDesc_unnamed1 {
    pub array: cudaResourceDesc_unnamed1_unnamed1,
    pub mipmap: cudaResourceDesc_unnamed1_unnamed2,
    pub linear: cudaResourceDesc_unnamed1_unnamed3,
    pub pitch2D: cudaResourceDesc_unnamed1_unnamed4,
    pub reserved: cudaResourceDesc_unnamed1_unnamed5,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaResourceDesc_unnamed1_unnamed1 {
    pub array: cudaArray_t,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaResourceDesc_unnamed1_unnamed2 {
    pub mipmap: cudaMipmappedArray_t,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaResourceDesc_unnamed1_unnamed3 {
    pub devPtr: *mut c_void,
    pub desc: cudaChannelFormatDesc,
    pub sizeInBytes: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaResourceDesc_unnamed1_unnamed4 {
    pub devPtr: *mut c_void,
    pub desc: cudaChannelFormatDesc,
    pub width: usize,
    pub height: usize,
    pub pitchInBytes: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaResourceDesc_unnamed1_unnamed5 {
    pub reserved: [c_int; 32],
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaResourceType(pub u32);
impl cudaResourceType {
    pub const cudaResourceTypeArray: Self = Self(0);
    pub const cudaResourceTypeMipmappedArray: Self = Self(1);
    pub const cudaResourceTypeLinear: Self = Self(2);
    pub const cudaResourceTypePitch2D: Self = Self(3);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaResourceViewDesc {
    pub format: cudaResourceViewFormat,
    pub width: usize,
    pub height: usize,
    pub depth: usize,
    pub firstMipmapLevel: c_uint,
    pub lastMipmapLevel: c_uint,
    pub firstLayer: c_uint,
    pub lastLayer: c_uint,
    pub reserved: [c_uint; 16],
}
const _: () = {
    assert!(size_of::<cudaResourceViewDesc>() == 112 && align_of::<cudaResourceViewDesc>() == 8);
    assert!(offset_of!(cudaResourceViewDesc, format) == 0);
    assert!(offset_of!(cudaResourceViewDesc, width) == 8);
    assert!(offset_of!(cudaResourceViewDesc, height) == 16);
    assert!(offset_of!(cudaResourceViewDesc, depth) == 24);
    assert!(offset_of!(cudaResourceViewDesc, firstMipmapLevel) == 32);
    assert!(offset_of!(cudaResourceViewDesc, lastMipmapLevel) == 36);
    assert!(offset_of!(cudaResourceViewDesc, firstLayer) == 40);
    assert!(offset_of!(cudaResourceViewDesc, lastLayer) == 44);
    assert!(offset_of!(cudaResourceViewDesc, reserved) == 48);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaResourceViewFormat(pub u32);
impl cudaResourceViewFormat {
    pub const cudaResViewFormatNone: Self = Self(0);
    pub const cudaResViewFormatUnsignedChar1: Self = Self(1);
    pub const cudaResViewFormatUnsignedChar2: Self = Self(2);
    pub const cudaResViewFormatUnsignedChar4: Self = Self(3);
    pub const cudaResViewFormatSignedChar1: Self = Self(4);
    pub const cudaResViewFormatSignedChar2: Self = Self(5);
    pub const cudaResViewFormatSignedChar4: Self = Self(6);
    pub const cudaResViewFormatUnsignedShort1: Self = Self(7);
    pub const cudaResViewFormatUnsignedShort2: Self = Self(8);
    pub const cudaResViewFormatUnsignedShort4: Self = Self(9);
    pub const cudaResViewFormatSignedShort1: Self = Self(10);
    pub const cudaResViewFormatSignedShort2: Self = Self(11);
    pub const cudaResViewFormatSignedShort4: Self = Self(12);
    pub const cudaResViewFormatUnsignedInt1: Self = Self(13);
    pub const cudaResViewFormatUnsignedInt2: Self = Self(14);
    pub const cudaResViewFormatUnsignedInt4: Self = Self(15);
    pub const cudaResViewFormatSignedInt1: Self = Self(16);
    pub const cudaResViewFormatSignedInt2: Self = Self(17);
    pub const cudaResViewFormatSignedInt4: Self = Self(18);
    pub const cudaResViewFormatHalf1: Self = Self(19);
    pub const cudaResViewFormatHalf2: Self = Self(20);
    pub const cudaResViewFormatHalf4: Self = Self(21);
    pub const cudaResViewFormatFloat1: Self = Self(22);
    pub const cudaResViewFormatFloat2: Self = Self(23);
    pub const cudaResViewFormatFloat4: Self = Self(24);
    pub const cudaResViewFormatUnsignedBlockCompressed1: Self = Self(25);
    pub const cudaResViewFormatUnsignedBlockCompressed2: Self = Self(26);
    pub const cudaResViewFormatUnsignedBlockCompressed3: Self = Self(27);
    pub const cudaResViewFormatUnsignedBlockCompressed4: Self = Self(28);
    pub const cudaResViewFormatSignedBlockCompressed4: Self = Self(29);
    pub const cudaResViewFormatUnsignedBlockCompressed5: Self = Self(30);
    pub const cudaResViewFormatSignedBlockCompressed5: Self = Self(31);
    pub const cudaResViewFormatUnsignedBlockCompressed6H: Self = Self(32);
    pub const cudaResViewFormatSignedBlockCompressed6H: Self = Self(33);
    pub const cudaResViewFormatUnsignedBlockCompressed7: Self = Self(34);
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaSharedMemConfig(pub u32);
impl cudaSharedMemConfig {
    pub const cudaSharedMemBankSizeDefault: Self = Self(0);
    pub const cudaSharedMemBankSizeFourByte: Self = Self(1);
    pub const cudaSharedMemBankSizeEightByte: Self = Self(2);
}

pub type cudaStreamCallback_t = Option<unsafe extern "C" fn(stream: cudaStream_t, status: cudaError_t, userData: *mut c_void)>;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaStreamCaptureMode(pub u32);
impl cudaStreamCaptureMode {
    pub const cudaStreamCaptureModeGlobal: Self = Self(0);
    pub const cudaStreamCaptureModeThreadLocal: Self = Self(1);
    pub const cudaStreamCaptureModeRelaxed: Self = Self(2);
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaStreamCaptureStatus(pub u32);
impl cudaStreamCaptureStatus {
    pub const cudaStreamCaptureStatusNone: Self = Self(0);
    pub const cudaStreamCaptureStatusActive: Self = Self(1);
    pub const cudaStreamCaptureStatusInvalidated: Self = Self(2);
}

pub type cudaStream_t = *mut CUstream_st;

pub type cudaSurfaceObject_t = c_ulonglong;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaSynchronizationPolicy(pub u32);
impl cudaSynchronizationPolicy {
    pub const cudaSyncPolicyAuto: Self = Self(1);
    pub const cudaSyncPolicySpin: Self = Self(2);
    pub const cudaSyncPolicyYield: Self = Self(3);
    pub const cudaSyncPolicyBlockingSync: Self = Self(4);
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaTextureAddressMode(pub u32);
impl cudaTextureAddressMode {
    pub const cudaAddressModeWrap: Self = Self(0);
    pub const cudaAddressModeClamp: Self = Self(1);
    pub const cudaAddressModeMirror: Self = Self(2);
    pub const cudaAddressModeBorder: Self = Self(3);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cudaTextureDesc {
    pub addressMode: [cudaTextureAddressMode; 3],
    pub filterMode: cudaTextureFilterMode,
    pub readMode: cudaTextureReadMode,
    pub sRGB: c_int,
    pub borderColor: [f32; 4],
    pub normalizedCoords: c_int,
    pub maxAnisotropy: c_uint,
    pub mipmapFilterMode: cudaTextureFilterMode,
    pub mipmapLevelBias: f32,
    pub minMipmapLevelClamp: f32,
    pub maxMipmapLevelClamp: f32,
    pub disableTrilinearOptimization: c_int,
    pub seamlessCubemap: c_int,
}
const _: () = {
    assert!(size_of::<cudaTextureDesc>() == 72 && align_of::<cudaTextureDesc>() == 4);
    assert!(offset_of!(cudaTextureDesc, addressMode) == 0);
    assert!(offset_of!(cudaTextureDesc, filterMode) == 12);
    assert!(offset_of!(cudaTextureDesc, readMode) == 16);
    assert!(offset_of!(cudaTextureDesc, sRGB) == 20);
    assert!(offset_of!(cudaTextureDesc, borderColor) == 24);
    assert!(offset_of!(cudaTextureDesc, normalizedCoords) == 40);
    assert!(offset_of!(cudaTextureDesc, maxAnisotropy) == 44);
    assert!(offset_of!(cudaTextureDesc, mipmapFilterMode) == 48);
    assert!(offset_of!(cudaTextureDesc, mipmapLevelBias) == 52);
    assert!(offset_of!(cudaTextureDesc, minMipmapLevelClamp) == 56);
    assert!(offset_of!(cudaTextureDesc, maxMipmapLevelClamp) == 60);
    assert!(offset_of!(cudaTextureDesc, disableTrilinearOptimization) == 64);
    assert!(offset_of!(cudaTextureDesc, seamlessCubemap) == 68);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaTextureFilterMode(pub u32);
impl cudaTextureFilterMode {
    pub const cudaFilterModePoint: Self = Self(0);
    pub const cudaFilterModeLinear: Self = Self(1);
}

pub type cudaTextureObject_t = c_ulonglong;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaTextureReadMode(pub u32);
impl cudaTextureReadMode {
    pub const cudaReadModeElementType: Self = Self(0);
    pub const cudaReadModeNormalizedFloat: Self = Self(1);
}

pub type cudaUUID_t = CUuuid_st;

pub type cudaUserObject_t = *mut CUuserObject_st;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct dim3 {
    pub x: c_uint,
    pub y: c_uint,
    pub z: c_uint,
}
const _: () = {
    assert!(size_of::<dim3>() == 12 && align_of::<dim3>() == 4);
    assert!(offset_of!(dim3, x) == 0);
    assert!(offset_of!(dim3, y) == 4);
    assert!(offset_of!(dim3, z) == 8);
};

#[repr(C)]
pub struct surfaceReference {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct textureReference {
    _opaque: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct uint3 {
    pub x: c_uint,
    pub y: c_uint,
    pub z: c_uint,
}
const _: () = {
    assert!(size_of::<uint3>() == 12 && align_of::<uint3>() == 4);
    assert!(offset_of!(uint3, x) == 0);
    assert!(offset_of!(uint3, y) == 4);
    assert!(offset_of!(uint3, z) == 8);
};
