// Written by `cargo xtask cuda-definition`: change annotations.txt, not this.

//! The type of a pointer to each symbol.

use core::ffi::*;

use super::types::*;

pub type cublasLtCreate = unsafe extern "C" fn(lightHandle: *mut cublasLtHandle_t) -> cublasStatus_t;
pub type cublasLtDestroy = unsafe extern "C" fn(lightHandle: cublasLtHandle_t) -> cublasStatus_t;
pub type cublasLtGetStatusName = unsafe extern "C" fn(status: cublasStatus_t) -> *const c_char;
pub type cublasLtGetStatusString = unsafe extern "C" fn(status: cublasStatus_t) -> *const c_char;
pub type cublasLtGetVersion = unsafe extern "C" fn() -> usize;
pub type cublasLtGetCudartVersion = unsafe extern "C" fn() -> usize;
pub type cublasLtGetProperty = unsafe extern "C" fn(r#type: libraryPropertyType, value: *mut c_int) -> cublasStatus_t;
pub type cublasLtHeuristicsCacheGetCapacity = unsafe extern "C" fn(capacity: *mut usize) -> cublasStatus_t;
pub type cublasLtHeuristicsCacheSetCapacity = unsafe extern "C" fn(capacity: usize) -> cublasStatus_t;
pub type cublasLtDisableCpuInstructionsSetMask = unsafe extern "C" fn(mask: c_uint) -> c_uint;
pub type cublasLtMatmul = unsafe extern "C" fn(lightHandle: cublasLtHandle_t, computeDesc: cublasLtMatmulDesc_t, alpha: *const c_void, A: *const c_void, Adesc: cublasLtMatrixLayout_t, B: *const c_void, Bdesc: cublasLtMatrixLayout_t, beta: *const c_void, C: *const c_void, Cdesc: cublasLtMatrixLayout_t, D: *mut c_void, Ddesc: cublasLtMatrixLayout_t, algo: *const cublasLtMatmulAlgo_t, workspace: *mut c_void, workspaceSizeInBytes: usize, stream: cudaStream_t) -> cublasStatus_t;
pub type cublasLtMatrixTransform = unsafe extern "C" fn(lightHandle: cublasLtHandle_t, transformDesc: cublasLtMatrixTransformDesc_t, alpha: *const c_void, A: *const c_void, Adesc: cublasLtMatrixLayout_t, beta: *const c_void, B: *const c_void, Bdesc: cublasLtMatrixLayout_t, C: *mut c_void, Cdesc: cublasLtMatrixLayout_t, stream: cudaStream_t) -> cublasStatus_t;
pub type cublasLtMatrixLayoutInit_internal = unsafe extern "C" fn(matLayout: cublasLtMatrixLayout_t, size: usize, r#type: cudaDataType, rows: u64, cols: u64, ld: i64) -> cublasStatus_t;
pub type cublasLtMatrixLayoutInit = unsafe extern "C" fn(matLayout: cublasLtMatrixLayout_t, r#type: cudaDataType, rows: u64, cols: u64, ld: i64) -> cublasStatus_t;
pub type cublasLtMatrixLayoutCreate = unsafe extern "C" fn(matLayout: *mut cublasLtMatrixLayout_t, r#type: cudaDataType, rows: u64, cols: u64, ld: i64) -> cublasStatus_t;
pub type cublasLtMatrixLayoutDestroy = unsafe extern "C" fn(matLayout: cublasLtMatrixLayout_t) -> cublasStatus_t;
pub type cublasLtMatrixLayoutSetAttribute = unsafe extern "C" fn(matLayout: cublasLtMatrixLayout_t, attr: cublasLtMatrixLayoutAttribute_t, buf: *const c_void, sizeInBytes: usize) -> cublasStatus_t;
pub type cublasLtMatrixLayoutGetAttribute = unsafe extern "C" fn(matLayout: cublasLtMatrixLayout_t, attr: cublasLtMatrixLayoutAttribute_t, buf: *mut c_void, sizeInBytes: usize, sizeWritten: *mut usize) -> cublasStatus_t;
pub type cublasLtMatmulDescInit_internal = unsafe extern "C" fn(matmulDesc: cublasLtMatmulDesc_t, size: usize, computeType: cublasComputeType_t, scaleType: cudaDataType_t) -> cublasStatus_t;
pub type cublasLtMatmulDescInit = unsafe extern "C" fn(matmulDesc: cublasLtMatmulDesc_t, computeType: cublasComputeType_t, scaleType: cudaDataType_t) -> cublasStatus_t;
pub type cublasLtMatmulDescCreate = unsafe extern "C" fn(matmulDesc: *mut cublasLtMatmulDesc_t, computeType: cublasComputeType_t, scaleType: cudaDataType_t) -> cublasStatus_t;
pub type cublasLtMatmulDescDestroy = unsafe extern "C" fn(matmulDesc: cublasLtMatmulDesc_t) -> cublasStatus_t;
pub type cublasLtMatmulDescSetAttribute = unsafe extern "C" fn(matmulDesc: cublasLtMatmulDesc_t, attr: cublasLtMatmulDescAttributes_t, buf: *const c_void, sizeInBytes: usize) -> cublasStatus_t;
pub type cublasLtMatmulDescGetAttribute = unsafe extern "C" fn(matmulDesc: cublasLtMatmulDesc_t, attr: cublasLtMatmulDescAttributes_t, buf: *mut c_void, sizeInBytes: usize, sizeWritten: *mut usize) -> cublasStatus_t;
pub type cublasLtMatrixTransformDescInit_internal = unsafe extern "C" fn(transformDesc: cublasLtMatrixTransformDesc_t, size: usize, scaleType: cudaDataType) -> cublasStatus_t;
pub type cublasLtMatrixTransformDescInit = unsafe extern "C" fn(transformDesc: cublasLtMatrixTransformDesc_t, scaleType: cudaDataType) -> cublasStatus_t;
pub type cublasLtMatrixTransformDescCreate = unsafe extern "C" fn(transformDesc: *mut cublasLtMatrixTransformDesc_t, scaleType: cudaDataType) -> cublasStatus_t;
pub type cublasLtMatrixTransformDescDestroy = unsafe extern "C" fn(transformDesc: cublasLtMatrixTransformDesc_t) -> cublasStatus_t;
pub type cublasLtMatrixTransformDescSetAttribute = unsafe extern "C" fn(transformDesc: cublasLtMatrixTransformDesc_t, attr: cublasLtMatrixTransformDescAttributes_t, buf: *const c_void, sizeInBytes: usize) -> cublasStatus_t;
pub type cublasLtMatrixTransformDescGetAttribute = unsafe extern "C" fn(transformDesc: cublasLtMatrixTransformDesc_t, attr: cublasLtMatrixTransformDescAttributes_t, buf: *mut c_void, sizeInBytes: usize, sizeWritten: *mut usize) -> cublasStatus_t;
pub type cublasLtEmulationDescInit_internal = unsafe extern "C" fn(emulationDesc: cublasLtEmulationDesc_t, size: usize) -> cublasStatus_t;
pub type cublasLtEmulationDescInit = unsafe extern "C" fn(emulationDesc: cublasLtEmulationDesc_t) -> cublasStatus_t;
pub type cublasLtEmulationDescCreate = unsafe extern "C" fn(emulationDesc: *mut cublasLtEmulationDesc_t) -> cublasStatus_t;
pub type cublasLtEmulationDescDestroy = unsafe extern "C" fn(emulationDesc: cublasLtEmulationDesc_t) -> cublasStatus_t;
pub type cublasLtEmulationDescSetAttribute = unsafe extern "C" fn(emulationDesc: cublasLtEmulationDesc_t, attr: cublasLtEmulationDescAttributes_t, buf: *const c_void, sizeInBytes: usize) -> cublasStatus_t;
pub type cublasLtEmulationDescGetAttribute = unsafe extern "C" fn(emulationDesc: cublasLtEmulationDesc_t, attr: cublasLtEmulationDescAttributes_t, buf: *mut c_void, sizeInBytes: usize, sizeWritten: *mut usize) -> cublasStatus_t;
pub type cublasLtMatmulPreferenceInit_internal = unsafe extern "C" fn(pref: cublasLtMatmulPreference_t, size: usize) -> cublasStatus_t;
pub type cublasLtMatmulPreferenceInit = unsafe extern "C" fn(pref: cublasLtMatmulPreference_t) -> cublasStatus_t;
pub type cublasLtMatmulPreferenceCreate = unsafe extern "C" fn(pref: *mut cublasLtMatmulPreference_t) -> cublasStatus_t;
pub type cublasLtMatmulPreferenceDestroy = unsafe extern "C" fn(pref: cublasLtMatmulPreference_t) -> cublasStatus_t;
pub type cublasLtMatmulPreferenceSetAttribute = unsafe extern "C" fn(pref: cublasLtMatmulPreference_t, attr: cublasLtMatmulPreferenceAttributes_t, buf: *const c_void, sizeInBytes: usize) -> cublasStatus_t;
pub type cublasLtMatmulPreferenceGetAttribute = unsafe extern "C" fn(pref: cublasLtMatmulPreference_t, attr: cublasLtMatmulPreferenceAttributes_t, buf: *mut c_void, sizeInBytes: usize, sizeWritten: *mut usize) -> cublasStatus_t;
pub type cublasLtMatmulAlgoGetHeuristic = unsafe extern "C" fn(lightHandle: cublasLtHandle_t, operationDesc: cublasLtMatmulDesc_t, Adesc: cublasLtMatrixLayout_t, Bdesc: cublasLtMatrixLayout_t, Cdesc: cublasLtMatrixLayout_t, Ddesc: cublasLtMatrixLayout_t, preference: cublasLtMatmulPreference_t, requestedAlgoCount: c_int, heuristicResultsArray: *mut cublasLtMatmulHeuristicResult_t, returnAlgoCount: *mut c_int) -> cublasStatus_t;
pub type cublasLtMatmulAlgoGetIds = unsafe extern "C" fn(lightHandle: cublasLtHandle_t, computeType: cublasComputeType_t, scaleType: cudaDataType_t, Atype: cudaDataType_t, Btype: cudaDataType_t, Ctype: cudaDataType_t, Dtype: cudaDataType_t, requestedAlgoCount: c_int, algoIdsArray: *mut c_int, returnAlgoCount: *mut c_int) -> cublasStatus_t;
pub type cublasLtMatmulAlgoInit = unsafe extern "C" fn(lightHandle: cublasLtHandle_t, computeType: cublasComputeType_t, scaleType: cudaDataType_t, Atype: cudaDataType_t, Btype: cudaDataType_t, Ctype: cudaDataType_t, Dtype: cudaDataType_t, algoId: c_int, algo: *mut cublasLtMatmulAlgo_t) -> cublasStatus_t;
pub type cublasLtMatmulAlgoCheck = unsafe extern "C" fn(lightHandle: cublasLtHandle_t, operationDesc: cublasLtMatmulDesc_t, Adesc: cublasLtMatrixLayout_t, Bdesc: cublasLtMatrixLayout_t, Cdesc: cublasLtMatrixLayout_t, Ddesc: cublasLtMatrixLayout_t, algo: *const cublasLtMatmulAlgo_t, result: *mut cublasLtMatmulHeuristicResult_t) -> cublasStatus_t;
pub type cublasLtMatmulAlgoCapGetAttribute = unsafe extern "C" fn(algo: *const cublasLtMatmulAlgo_t, attr: cublasLtMatmulAlgoCapAttributes_t, buf: *mut c_void, sizeInBytes: usize, sizeWritten: *mut usize) -> cublasStatus_t;
pub type cublasLtMatmulAlgoConfigSetAttribute = unsafe extern "C" fn(algo: *mut cublasLtMatmulAlgo_t, attr: cublasLtMatmulAlgoConfigAttributes_t, buf: *const c_void, sizeInBytes: usize) -> cublasStatus_t;
pub type cublasLtMatmulAlgoConfigGetAttribute = unsafe extern "C" fn(algo: *const cublasLtMatmulAlgo_t, attr: cublasLtMatmulAlgoConfigAttributes_t, buf: *mut c_void, sizeInBytes: usize, sizeWritten: *mut usize) -> cublasStatus_t;
pub type cublasLtLoggerSetCallback = unsafe extern "C" fn(callback: cublasLtLoggerCallback_t) -> cublasStatus_t;
pub type cublasLtLoggerSetFile = unsafe extern "C" fn(file: *mut c_void) -> cublasStatus_t;
pub type cublasLtLoggerOpenFile = unsafe extern "C" fn(logFile: *const c_char) -> cublasStatus_t;
pub type cublasLtLoggerSetLevel = unsafe extern "C" fn(level: c_int) -> cublasStatus_t;
pub type cublasLtLoggerSetMask = unsafe extern "C" fn(mask: c_int) -> cublasStatus_t;
pub type cublasLtLoggerForceDisable = unsafe extern "C" fn() -> cublasStatus_t;
