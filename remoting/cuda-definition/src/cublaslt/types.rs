// Written by `cargo xtask cuda-definition`: change annotations.txt, not this.

//! C's types, each with the layout that the C compiler gives it.

use core::{ffi::*, mem::offset_of};

#[repr(C)]
pub struct CUstream_st {
    _opaque: [u8; 0],
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cublasComputeType_t(pub u32);
impl cublasComputeType_t {
    pub const CUBLAS_COMPUTE_16F: Self = Self(64);
    pub const CUBLAS_COMPUTE_16F_PEDANTIC: Self = Self(65);
    pub const CUBLAS_COMPUTE_32F: Self = Self(68);
    pub const CUBLAS_COMPUTE_32F_PEDANTIC: Self = Self(69);
    pub const CUBLAS_COMPUTE_32F_FAST_16F: Self = Self(74);
    pub const CUBLAS_COMPUTE_32F_FAST_16BF: Self = Self(75);
    pub const CUBLAS_COMPUTE_32F_FAST_TF32: Self = Self(77);
    pub const CUBLAS_COMPUTE_32F_EMULATED_16BFX9: Self = Self(78);
    pub const CUBLAS_COMPUTE_64F: Self = Self(70);
    pub const CUBLAS_COMPUTE_64F_PEDANTIC: Self = Self(71);
    pub const CUBLAS_COMPUTE_64F_EMULATED_FIXEDPOINT: Self = Self(79);
    pub const CUBLAS_COMPUTE_32I: Self = Self(72);
    pub const CUBLAS_COMPUTE_32I_PEDANTIC: Self = Self(73);
}

#[repr(C)]
pub struct cublasLtContext {
    _opaque: [u8; 0],
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cublasLtEmulationDescAttributes_t(pub u32);
impl cublasLtEmulationDescAttributes_t {
    pub const CUBLASLT_EMULATION_DESC_STRATEGY: Self = Self(0);
    pub const CUBLASLT_EMULATION_DESC_SPECIAL_VALUES_SUPPORT: Self = Self(1);
    pub const CUBLASLT_EMULATION_DESC_FIXEDPOINT_MANTISSA_CONTROL: Self = Self(2);
    pub const CUBLASLT_EMULATION_DESC_FIXEDPOINT_MAX_MANTISSA_BIT_COUNT: Self = Self(3);
    pub const CUBLASLT_EMULATION_DESC_FIXEDPOINT_MANTISSA_BIT_OFFSET: Self = Self(4);
    pub const CUBLASLT_EMULATION_DESC_FIXEDPOINT_MANTISSA_BIT_COUNT_POINTER: Self = Self(5);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cublasLtEmulationDescOpaque_t {
    pub data: [u64; 8],
}
const _: () = {
    assert!(size_of::<cublasLtEmulationDescOpaque_t>() == 64 && align_of::<cublasLtEmulationDescOpaque_t>() == 8);
    assert!(offset_of!(cublasLtEmulationDescOpaque_t, data) == 0);
};

pub type cublasLtEmulationDesc_t = *mut cublasLtEmulationDescOpaque_t;

pub type cublasLtHandle_t = *mut cublasLtContext;

pub type cublasLtLoggerCallback_t = Option<unsafe extern "C" fn(logLevel: c_int, functionName: *const c_char, message: *const c_char)>;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cublasLtMatmulAlgoCapAttributes_t(pub u32);
impl cublasLtMatmulAlgoCapAttributes_t {
    pub const CUBLASLT_ALGO_CAP_SPLITK_SUPPORT: Self = Self(0);
    pub const CUBLASLT_ALGO_CAP_REDUCTION_SCHEME_MASK: Self = Self(1);
    pub const CUBLASLT_ALGO_CAP_CTA_SWIZZLING_SUPPORT: Self = Self(2);
    pub const CUBLASLT_ALGO_CAP_STRIDED_BATCH_SUPPORT: Self = Self(3);
    pub const CUBLASLT_ALGO_CAP_OUT_OF_PLACE_RESULT_SUPPORT: Self = Self(4);
    pub const CUBLASLT_ALGO_CAP_UPLO_SUPPORT: Self = Self(5);
    pub const CUBLASLT_ALGO_CAP_TILE_IDS: Self = Self(6);
    pub const CUBLASLT_ALGO_CAP_CUSTOM_OPTION_MAX: Self = Self(7);
    pub const CUBLASLT_ALGO_CAP_CUSTOM_MEMORY_ORDER: Self = Self(10);
    pub const CUBLASLT_ALGO_CAP_POINTER_MODE_MASK: Self = Self(11);
    pub const CUBLASLT_ALGO_CAP_EPILOGUE_MASK: Self = Self(12);
    pub const CUBLASLT_ALGO_CAP_STAGES_IDS: Self = Self(13);
    pub const CUBLASLT_ALGO_CAP_LD_NEGATIVE: Self = Self(14);
    pub const CUBLASLT_ALGO_CAP_NUMERICAL_IMPL_FLAGS: Self = Self(15);
    pub const CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_A_BYTES: Self = Self(16);
    pub const CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_B_BYTES: Self = Self(17);
    pub const CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_C_BYTES: Self = Self(18);
    pub const CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_D_BYTES: Self = Self(19);
    pub const CUBLASLT_ALGO_CAP_POINTER_ARRAY_BATCH_SUPPORT: Self = Self(21);
    pub const CUBLASLT_ALGO_CAP_FLOATING_POINT_EMULATION_SUPPORT: Self = Self(22);
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cublasLtMatmulAlgoConfigAttributes_t(pub u32);
impl cublasLtMatmulAlgoConfigAttributes_t {
    pub const CUBLASLT_ALGO_CONFIG_ID: Self = Self(0);
    pub const CUBLASLT_ALGO_CONFIG_TILE_ID: Self = Self(1);
    pub const CUBLASLT_ALGO_CONFIG_SPLITK_NUM: Self = Self(2);
    pub const CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME: Self = Self(3);
    pub const CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING: Self = Self(4);
    pub const CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION: Self = Self(5);
    pub const CUBLASLT_ALGO_CONFIG_STAGES_ID: Self = Self(6);
    pub const CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID: Self = Self(7);
    pub const CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID: Self = Self(8);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cublasLtMatmulAlgo_t {
    pub data: [u64; 8],
}
const _: () = {
    assert!(size_of::<cublasLtMatmulAlgo_t>() == 64 && align_of::<cublasLtMatmulAlgo_t>() == 8);
    assert!(offset_of!(cublasLtMatmulAlgo_t, data) == 0);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cublasLtMatmulDescAttributes_t(pub u32);
impl cublasLtMatmulDescAttributes_t {
    pub const CUBLASLT_MATMUL_DESC_COMPUTE_TYPE: Self = Self(0);
    pub const CUBLASLT_MATMUL_DESC_SCALE_TYPE: Self = Self(1);
    pub const CUBLASLT_MATMUL_DESC_POINTER_MODE: Self = Self(2);
    pub const CUBLASLT_MATMUL_DESC_TRANSA: Self = Self(3);
    pub const CUBLASLT_MATMUL_DESC_TRANSB: Self = Self(4);
    pub const CUBLASLT_MATMUL_DESC_TRANSC: Self = Self(5);
    pub const CUBLASLT_MATMUL_DESC_FILL_MODE: Self = Self(6);
    pub const CUBLASLT_MATMUL_DESC_EPILOGUE: Self = Self(7);
    pub const CUBLASLT_MATMUL_DESC_BIAS_POINTER: Self = Self(8);
    pub const CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE: Self = Self(10);
    pub const CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: Self = Self(11);
    pub const CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: Self = Self(12);
    pub const CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE: Self = Self(13);
    pub const CUBLASLT_MATMUL_DESC_ALPHA_VECTOR_BATCH_STRIDE: Self = Self(14);
    pub const CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET: Self = Self(15);
    pub const CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: Self = Self(17);
    pub const CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: Self = Self(18);
    pub const CUBLASLT_MATMUL_DESC_C_SCALE_POINTER: Self = Self(19);
    pub const CUBLASLT_MATMUL_DESC_D_SCALE_POINTER: Self = Self(20);
    pub const CUBLASLT_MATMUL_DESC_AMAX_D_POINTER: Self = Self(21);
    pub const CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE: Self = Self(22);
    pub const CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_SCALE_POINTER: Self = Self(23);
    pub const CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_AMAX_POINTER: Self = Self(24);
    pub const CUBLASLT_MATMUL_DESC_FAST_ACCUM: Self = Self(25);
    pub const CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: Self = Self(26);
    pub const CUBLASLT_MATMUL_DESC_A_SCALE_MODE: Self = Self(31);
    pub const CUBLASLT_MATMUL_DESC_B_SCALE_MODE: Self = Self(32);
    pub const CUBLASLT_MATMUL_DESC_C_SCALE_MODE: Self = Self(33);
    pub const CUBLASLT_MATMUL_DESC_D_SCALE_MODE: Self = Self(34);
    pub const CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_SCALE_MODE: Self = Self(35);
    pub const CUBLASLT_MATMUL_DESC_D_OUT_SCALE_POINTER: Self = Self(36);
    pub const CUBLASLT_MATMUL_DESC_D_OUT_SCALE_MODE: Self = Self(37);
    pub const CUBLASLT_MATMUL_DESC_EMULATION_DESCRIPTOR: Self = Self(38);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cublasLtMatmulDescOpaque_t {
    pub data: [u64; 32],
}
const _: () = {
    assert!(size_of::<cublasLtMatmulDescOpaque_t>() == 256 && align_of::<cublasLtMatmulDescOpaque_t>() == 8);
    assert!(offset_of!(cublasLtMatmulDescOpaque_t, data) == 0);
};

pub type cublasLtMatmulDesc_t = *mut cublasLtMatmulDescOpaque_t;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cublasLtMatmulHeuristicResult_t {
    pub algo: cublasLtMatmulAlgo_t,
    pub workspaceSize: usize,
    pub state: cublasStatus_t,
    pub wavesCount: f32,
    pub reserved: [c_int; 4],
}
const _: () = {
    assert!(size_of::<cublasLtMatmulHeuristicResult_t>() == 96 && align_of::<cublasLtMatmulHeuristicResult_t>() == 8);
    assert!(offset_of!(cublasLtMatmulHeuristicResult_t, algo) == 0);
    assert!(offset_of!(cublasLtMatmulHeuristicResult_t, workspaceSize) == 64);
    assert!(offset_of!(cublasLtMatmulHeuristicResult_t, state) == 72);
    assert!(offset_of!(cublasLtMatmulHeuristicResult_t, wavesCount) == 76);
    assert!(offset_of!(cublasLtMatmulHeuristicResult_t, reserved) == 80);
};

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cublasLtMatmulPreferenceAttributes_t(pub u32);
impl cublasLtMatmulPreferenceAttributes_t {
    pub const CUBLASLT_MATMUL_PREF_SEARCH_MODE: Self = Self(0);
    pub const CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: Self = Self(1);
    pub const CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: Self = Self(3);
    pub const CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: Self = Self(5);
    pub const CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: Self = Self(6);
    pub const CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: Self = Self(7);
    pub const CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: Self = Self(8);
    pub const CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT: Self = Self(9);
    pub const CUBLASLT_MATMUL_PREF_IMPL_MASK: Self = Self(12);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cublasLtMatmulPreferenceOpaque_t {
    pub data: [u64; 8],
}
const _: () = {
    assert!(size_of::<cublasLtMatmulPreferenceOpaque_t>() == 64 && align_of::<cublasLtMatmulPreferenceOpaque_t>() == 8);
    assert!(offset_of!(cublasLtMatmulPreferenceOpaque_t, data) == 0);
};

pub type cublasLtMatmulPreference_t = *mut cublasLtMatmulPreferenceOpaque_t;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cublasLtMatrixLayoutAttribute_t(pub u32);
impl cublasLtMatrixLayoutAttribute_t {
    pub const CUBLASLT_MATRIX_LAYOUT_TYPE: Self = Self(0);
    pub const CUBLASLT_MATRIX_LAYOUT_ORDER: Self = Self(1);
    pub const CUBLASLT_MATRIX_LAYOUT_ROWS: Self = Self(2);
    pub const CUBLASLT_MATRIX_LAYOUT_COLS: Self = Self(3);
    pub const CUBLASLT_MATRIX_LAYOUT_LD: Self = Self(4);
    pub const CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: Self = Self(5);
    pub const CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: Self = Self(6);
    pub const CUBLASLT_MATRIX_LAYOUT_PLANE_OFFSET: Self = Self(7);
    pub const CUBLASLT_MATRIX_LAYOUT_BATCH_MODE: Self = Self(8);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cublasLtMatrixLayoutOpaque_t {
    pub data: [u64; 8],
}
const _: () = {
    assert!(size_of::<cublasLtMatrixLayoutOpaque_t>() == 64 && align_of::<cublasLtMatrixLayoutOpaque_t>() == 8);
    assert!(offset_of!(cublasLtMatrixLayoutOpaque_t, data) == 0);
};

pub type cublasLtMatrixLayout_t = *mut cublasLtMatrixLayoutOpaque_t;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cublasLtMatrixTransformDescAttributes_t(pub u32);
impl cublasLtMatrixTransformDescAttributes_t {
    pub const CUBLASLT_MATRIX_TRANSFORM_DESC_SCALE_TYPE: Self = Self(0);
    pub const CUBLASLT_MATRIX_TRANSFORM_DESC_POINTER_MODE: Self = Self(1);
    pub const CUBLASLT_MATRIX_TRANSFORM_DESC_TRANSA: Self = Self(2);
    pub const CUBLASLT_MATRIX_TRANSFORM_DESC_TRANSB: Self = Self(3);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct cublasLtMatrixTransformDescOpaque_t {
    pub data: [u64; 8],
}
const _: () = {
    assert!(size_of::<cublasLtMatrixTransformDescOpaque_t>() == 64 && align_of::<cublasLtMatrixTransformDescOpaque_t>() == 8);
    assert!(offset_of!(cublasLtMatrixTransformDescOpaque_t, data) == 0);
};

pub type cublasLtMatrixTransformDesc_t = *mut cublasLtMatrixTransformDescOpaque_t;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cublasStatus_t(pub u32);
impl cublasStatus_t {
    pub const CUBLAS_STATUS_SUCCESS: Self = Self(0);
    pub const CUBLAS_STATUS_NOT_INITIALIZED: Self = Self(1);
    pub const CUBLAS_STATUS_ALLOC_FAILED: Self = Self(3);
    pub const CUBLAS_STATUS_INVALID_VALUE: Self = Self(7);
    pub const CUBLAS_STATUS_ARCH_MISMATCH: Self = Self(8);
    pub const CUBLAS_STATUS_MAPPING_ERROR: Self = Self(11);
    pub const CUBLAS_STATUS_EXECUTION_FAILED: Self = Self(13);
    pub const CUBLAS_STATUS_INTERNAL_ERROR: Self = Self(14);
    pub const CUBLAS_STATUS_NOT_SUPPORTED: Self = Self(15);
    pub const CUBLAS_STATUS_LICENSE_ERROR: Self = Self(16);
}

pub type cudaDataType = cudaDataType_t;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaDataType_t(pub u32);
impl cudaDataType_t {
    pub const CUDA_R_16F: Self = Self(2);
    pub const CUDA_C_16F: Self = Self(6);
    pub const CUDA_R_16BF: Self = Self(14);
    pub const CUDA_C_16BF: Self = Self(15);
    pub const CUDA_R_32F: Self = Self(0);
    pub const CUDA_C_32F: Self = Self(4);
    pub const CUDA_R_64F: Self = Self(1);
    pub const CUDA_C_64F: Self = Self(5);
    pub const CUDA_R_4I: Self = Self(16);
    pub const CUDA_C_4I: Self = Self(17);
    pub const CUDA_R_4U: Self = Self(18);
    pub const CUDA_C_4U: Self = Self(19);
    pub const CUDA_R_8I: Self = Self(3);
    pub const CUDA_C_8I: Self = Self(7);
    pub const CUDA_R_8U: Self = Self(8);
    pub const CUDA_C_8U: Self = Self(9);
    pub const CUDA_R_16I: Self = Self(20);
    pub const CUDA_C_16I: Self = Self(21);
    pub const CUDA_R_16U: Self = Self(22);
    pub const CUDA_C_16U: Self = Self(23);
    pub const CUDA_R_32I: Self = Self(10);
    pub const CUDA_C_32I: Self = Self(11);
    pub const CUDA_R_32U: Self = Self(12);
    pub const CUDA_C_32U: Self = Self(13);
    pub const CUDA_R_64I: Self = Self(24);
    pub const CUDA_C_64I: Self = Self(25);
    pub const CUDA_R_64U: Self = Self(26);
    pub const CUDA_C_64U: Self = Self(27);
    pub const CUDA_R_8F_E4M3: Self = Self(28);
    pub const CUDA_R_8F_UE4M3: Self = Self(28);
    pub const CUDA_R_8F_E5M2: Self = Self(29);
    pub const CUDA_R_8F_UE8M0: Self = Self(30);
    pub const CUDA_R_6F_E2M3: Self = Self(31);
    pub const CUDA_R_6F_E3M2: Self = Self(32);
    pub const CUDA_R_4F_E2M1: Self = Self(33);
}

pub type cudaStream_t = *mut CUstream_st;

pub type libraryPropertyType = libraryPropertyType_t;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct libraryPropertyType_t(pub u32);
impl libraryPropertyType_t {
    pub const MAJOR_VERSION: Self = Self(0);
    pub const MINOR_VERSION: Self = Self(1);
    pub const PATCH_LEVEL: Self = Self(2);
}
