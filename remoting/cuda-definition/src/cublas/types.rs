// Written by `cargo xtask cuda-definition`: change annotations.txt, not this.

//! C's types, each with the layout that the C compiler gives it.

use core::{ffi::*, mem::offset_of};

#[repr(C)]
pub struct CUstream_st {
    _opaque: [u8; 0],
}

pub type cuComplex = cuFloatComplex;

pub type cuDoubleComplex = double2;

pub type cuFloatComplex = float2;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cublasAtomicsMode_t(pub u32);
impl cublasAtomicsMode_t {
    pub const CUBLAS_ATOMICS_NOT_ALLOWED: Self = Self(0);
    pub const CUBLAS_ATOMICS_ALLOWED: Self = Self(1);
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
pub struct cublasContext {
    _opaque: [u8; 0],
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cublasDiagType_t(pub u32);
impl cublasDiagType_t {
    pub const CUBLAS_DIAG_NON_UNIT: Self = Self(0);
    pub const CUBLAS_DIAG_UNIT: Self = Self(1);
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cublasEmulationStrategy_t(pub u32);
impl cublasEmulationStrategy_t {
    pub const CUBLAS_EMULATION_STRATEGY_DEFAULT: Self = Self(0);
    pub const CUBLAS_EMULATION_STRATEGY_PERFORMANT: Self = Self(1);
    pub const CUBLAS_EMULATION_STRATEGY_EAGER: Self = Self(2);
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cublasFillMode_t(pub u32);
impl cublasFillMode_t {
    pub const CUBLAS_FILL_MODE_LOWER: Self = Self(0);
    pub const CUBLAS_FILL_MODE_UPPER: Self = Self(1);
    pub const CUBLAS_FILL_MODE_FULL: Self = Self(2);
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cublasGemmAlgo_t(pub i32);
impl cublasGemmAlgo_t {
    pub const CUBLAS_GEMM_DFALT: Self = Self(-1);
    pub const CUBLAS_GEMM_DEFAULT: Self = Self(-1);
    pub const CUBLAS_GEMM_ALGO0: Self = Self(0);
    pub const CUBLAS_GEMM_ALGO1: Self = Self(1);
    pub const CUBLAS_GEMM_ALGO2: Self = Self(2);
    pub const CUBLAS_GEMM_ALGO3: Self = Self(3);
    pub const CUBLAS_GEMM_ALGO4: Self = Self(4);
    pub const CUBLAS_GEMM_ALGO5: Self = Self(5);
    pub const CUBLAS_GEMM_ALGO6: Self = Self(6);
    pub const CUBLAS_GEMM_ALGO7: Self = Self(7);
    pub const CUBLAS_GEMM_ALGO8: Self = Self(8);
    pub const CUBLAS_GEMM_ALGO9: Self = Self(9);
    pub const CUBLAS_GEMM_ALGO10: Self = Self(10);
    pub const CUBLAS_GEMM_ALGO11: Self = Self(11);
    pub const CUBLAS_GEMM_ALGO12: Self = Self(12);
    pub const CUBLAS_GEMM_ALGO13: Self = Self(13);
    pub const CUBLAS_GEMM_ALGO14: Self = Self(14);
    pub const CUBLAS_GEMM_ALGO15: Self = Self(15);
    pub const CUBLAS_GEMM_ALGO16: Self = Self(16);
    pub const CUBLAS_GEMM_ALGO17: Self = Self(17);
    pub const CUBLAS_GEMM_ALGO18: Self = Self(18);
    pub const CUBLAS_GEMM_ALGO19: Self = Self(19);
    pub const CUBLAS_GEMM_ALGO20: Self = Self(20);
    pub const CUBLAS_GEMM_ALGO21: Self = Self(21);
    pub const CUBLAS_GEMM_ALGO22: Self = Self(22);
    pub const CUBLAS_GEMM_ALGO23: Self = Self(23);
    pub const CUBLAS_GEMM_DEFAULT_TENSOR_OP: Self = Self(99);
    pub const CUBLAS_GEMM_DFALT_TENSOR_OP: Self = Self(99);
    pub const CUBLAS_GEMM_ALGO0_TENSOR_OP: Self = Self(100);
    pub const CUBLAS_GEMM_ALGO1_TENSOR_OP: Self = Self(101);
    pub const CUBLAS_GEMM_ALGO2_TENSOR_OP: Self = Self(102);
    pub const CUBLAS_GEMM_ALGO3_TENSOR_OP: Self = Self(103);
    pub const CUBLAS_GEMM_ALGO4_TENSOR_OP: Self = Self(104);
    pub const CUBLAS_GEMM_ALGO5_TENSOR_OP: Self = Self(105);
    pub const CUBLAS_GEMM_ALGO6_TENSOR_OP: Self = Self(106);
    pub const CUBLAS_GEMM_ALGO7_TENSOR_OP: Self = Self(107);
    pub const CUBLAS_GEMM_ALGO8_TENSOR_OP: Self = Self(108);
    pub const CUBLAS_GEMM_ALGO9_TENSOR_OP: Self = Self(109);
    pub const CUBLAS_GEMM_ALGO10_TENSOR_OP: Self = Self(110);
    pub const CUBLAS_GEMM_ALGO11_TENSOR_OP: Self = Self(111);
    pub const CUBLAS_GEMM_ALGO12_TENSOR_OP: Self = Self(112);
    pub const CUBLAS_GEMM_ALGO13_TENSOR_OP: Self = Self(113);
    pub const CUBLAS_GEMM_ALGO14_TENSOR_OP: Self = Self(114);
    pub const CUBLAS_GEMM_ALGO15_TENSOR_OP: Self = Self(115);
    pub const CUBLAS_GEMM_AUTOTUNE: Self = Self(999);
}

pub type cublasHandle_t = *mut cublasContext;

pub type cublasLogCallback = Option<unsafe extern "C" fn(msg: *const c_char)>;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cublasMath_t(pub u32);
impl cublasMath_t {
    pub const CUBLAS_DEFAULT_MATH: Self = Self(0);
    pub const CUBLAS_TENSOR_OP_MATH: Self = Self(1);
    pub const CUBLAS_PEDANTIC_MATH: Self = Self(2);
    pub const CUBLAS_TF32_TENSOR_OP_MATH: Self = Self(3);
    pub const CUBLAS_FP32_EMULATED_BF16X9_MATH: Self = Self(4);
    pub const CUBLAS_FP64_EMULATED_FIXEDPOINT_MATH: Self = Self(8);
    pub const CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: Self = Self(16);
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cublasOperation_t(pub u32);
impl cublasOperation_t {
    pub const CUBLAS_OP_N: Self = Self(0);
    pub const CUBLAS_OP_T: Self = Self(1);
    pub const CUBLAS_OP_C: Self = Self(2);
    pub const CUBLAS_OP_HERMITAN: Self = Self(2);
    pub const CUBLAS_OP_CONJG: Self = Self(3);
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cublasPointerMode_t(pub u32);
impl cublasPointerMode_t {
    pub const CUBLAS_POINTER_MODE_HOST: Self = Self(0);
    pub const CUBLAS_POINTER_MODE_DEVICE: Self = Self(1);
}

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cublasSideMode_t(pub u32);
impl cublasSideMode_t {
    pub const CUBLAS_SIDE_LEFT: Self = Self(0);
    pub const CUBLAS_SIDE_RIGHT: Self = Self(1);
}

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

pub type cudaEmulationMantissaControl = cudaEmulationMantissaControl_t;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaEmulationMantissaControl_t(pub u32);
impl cudaEmulationMantissaControl_t {
    pub const CUDA_EMULATION_MANTISSA_CONTROL_DYNAMIC: Self = Self(0);
    pub const CUDA_EMULATION_MANTISSA_CONTROL_FIXED: Self = Self(1);
}

pub type cudaEmulationSpecialValuesSupport = cudaEmulationSpecialValuesSupport_t;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct cudaEmulationSpecialValuesSupport_t(pub u32);
impl cudaEmulationSpecialValuesSupport_t {
    pub const CUDA_EMULATION_SPECIAL_VALUES_SUPPORT_DEFAULT: Self = Self(65535);
    pub const CUDA_EMULATION_SPECIAL_VALUES_SUPPORT_NONE: Self = Self(0);
    pub const CUDA_EMULATION_SPECIAL_VALUES_SUPPORT_INFINITY: Self = Self(1);
    pub const CUDA_EMULATION_SPECIAL_VALUES_SUPPORT_NAN: Self = Self(2);
}

pub type cudaStream_t = *mut CUstream_st;

#[repr(C, align(16))]
#[derive(Clone, Copy)]
pub struct double2 {
    pub x: f64,
    pub y: f64,
}
const _: () = {
    assert!(size_of::<double2>() == 16 && align_of::<double2>() == 16);
    assert!(offset_of!(double2, x) == 0);
    assert!(offset_of!(double2, y) == 8);
};

#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct float2 {
    pub x: f32,
    pub y: f32,
}
const _: () = {
    assert!(size_of::<float2>() == 8 && align_of::<float2>() == 8);
    assert!(offset_of!(float2, x) == 0);
    assert!(offset_of!(float2, y) == 4);
};

pub type libraryPropertyType = libraryPropertyType_t;

#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct libraryPropertyType_t(pub u32);
impl libraryPropertyType_t {
    pub const MAJOR_VERSION: Self = Self(0);
    pub const MINOR_VERSION: Self = Self(1);
    pub const PATCH_LEVEL: Self = Self(2);
}
