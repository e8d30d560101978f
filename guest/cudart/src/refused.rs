//! Entry points that are refused: they return `cudaErrorNotSupported`, and the first call says so.

use std::sync::atomic::{AtomicBool, Ordering};

use cuda_definition::runtime::types::cudaError_t;

use crate::error::{Error, result};

fn refuse(name: &str, told: &AtomicBool) -> cudaError_t {
    if !told.swap(true, Ordering::Relaxed) {
        eprintln!("gantry: {name} is not supported by this CUDA runtime");
    }
    result(Err(Error::cudaErrorNotSupported))
}

/// Parameters are left out: those that a caller passes in registers or on its stack are its own to
/// remove, and nothing reads them.
macro_rules! refused {
    ($($name:ident,)*) => {
        $(
            #[doc = "Refused."]
            #[unsafe(no_mangle)]
            #[allow(non_snake_case)]
            pub extern "C" fn $name() -> cudaError_t {
                static TOLD: AtomicBool = AtomicBool::new(false);
                refuse(stringify!($name), &TOLD)
            }
        )*
    };
}

// Other processes' memory, other devices' and APIs' resources, logs, what no examined program calls.
refused! {
    __cudaGetProcAddress, __cudaRegisterHostVar, __cudaRegisterUnifiedTable,
    __cudaRegisterSurface, __cudaRegisterTexture, cudaArrayGetMemoryRequirements, cudaArrayGetPlane,
    cudaArrayGetSparseProperties, cudaDestroyExternalMemory, cudaDestroyExternalSemaphore,
    cudaDeviceGetHostAtomicCapabilities, cudaDeviceGetNvSciSyncAttributes,
    cudaDeviceGetP2PAtomicCapabilities, cudaDeviceGetTexture1DLinearMaxWidth,
    cudaDeviceRegisterAsyncNotification, cudaDeviceUnregisterAsyncNotification,
    cudaEGLStreamConsumerAcquireFrame, cudaEGLStreamConsumerConnect,
    cudaEGLStreamConsumerConnectWithFlags, cudaEGLStreamConsumerDisconnect,
    cudaEGLStreamConsumerReleaseFrame, cudaEGLStreamProducerConnect,
    cudaEGLStreamProducerDisconnect, cudaEGLStreamProducerPresentFrame,
    cudaEGLStreamProducerReturnFrame, cudaEventCreateFromEGLSync, cudaExternalMemoryGetMappedBuffer,
    cudaExternalMemoryGetMappedMipmappedArray, cudaGLGetDevices, cudaGLMapBufferObject,
    cudaGLMapBufferObjectAsync, cudaGLRegisterBufferObject, cudaGLSetBufferObjectMapFlags,
    cudaGLSetGLDevice, cudaGLUnmapBufferObject, cudaGLUnmapBufferObjectAsync,
    cudaGLUnregisterBufferObject, cudaGetSurfaceObjectResourceDesc,
    cudaGetTextureObjectResourceDesc, cudaGetTextureObjectResourceViewDesc,
    cudaGetTextureObjectTextureDesc, cudaGraphAddExternalSemaphoresSignalNode,
    cudaGraphAddExternalSemaphoresWaitNode, cudaGraphExecExternalSemaphoresSignalNodeSetParams,
    cudaGraphExecExternalSemaphoresWaitNodeSetParams, cudaGraphExecMemcpyNodeSetParamsFromSymbol,
    cudaGraphExecMemcpyNodeSetParamsToSymbol, cudaGraphExternalSemaphoresSignalNodeGetParams,
    cudaGraphExternalSemaphoresSignalNodeSetParams, cudaGraphExternalSemaphoresWaitNodeGetParams,
    cudaGraphExternalSemaphoresWaitNodeSetParams, cudaGraphKernelNodeGetParams,
    cudaGraphMemcpyNodeGetParams, cudaGraphMemcpyNodeSetParamsFromSymbol,
    cudaGraphMemcpyNodeSetParamsToSymbol, cudaGraphicsEGLRegisterImage,
    cudaGraphicsGLRegisterBuffer, cudaGraphicsGLRegisterImage, cudaGraphicsMapResources,
    cudaGraphicsResourceGetMappedEglFrame, cudaGraphicsResourceGetMappedMipmappedArray,
    cudaGraphicsResourceGetMappedPointer, cudaGraphicsResourceSetMapFlags,
    cudaGraphicsSubResourceGetMappedArray, cudaGraphicsUnmapResources,
    cudaGraphicsUnregisterResource, cudaGraphicsVDPAURegisterOutputSurface,
    cudaGraphicsVDPAURegisterVideoSurface, cudaImportExternalMemory, cudaImportExternalSemaphore,
    cudaIpcCloseMemHandle, cudaIpcGetEventHandle, cudaIpcGetMemHandle, cudaIpcOpenEventHandle,
    cudaIpcOpenMemHandle, cudaLogsCurrent, cudaLogsDumpToFile, cudaLogsDumpToMemory,
    cudaLogsRegisterCallback, cudaLogsUnregisterCallback, cudaMemDiscardAndPrefetchBatchAsync,
    cudaMemDiscardAndPrefetchBatchAsync_ptsz, cudaMemDiscardBatchAsync,
    cudaMemDiscardBatchAsync_ptsz, cudaMemPoolExportPointer, cudaMemPoolExportToShareableHandle,
    cudaMemPoolImportFromShareableHandle, cudaMemPoolImportPointer, cudaMemPrefetchBatchAsync,
    cudaMemPrefetchBatchAsync_ptsz, cudaMemcpy3DBatchAsync, cudaMemcpy3DBatchAsync_ptsz,
    cudaMemcpyArrayToArray, cudaMemcpyArrayToArray_ptds, cudaMemcpyBatchAsync,
    cudaMemcpyBatchAsync_ptsz, cudaMemcpyFromArrayAsync, cudaMemcpyFromArrayAsync_ptsz,
    cudaMemcpyToArrayAsync, cudaMemcpyToArrayAsync_ptsz, cudaMipmappedArrayGetMemoryRequirements,
    cudaMipmappedArrayGetSparseProperties, cudaSignalExternalSemaphoresAsync,
    cudaSignalExternalSemaphoresAsync_ptsz, cudaVDPAUGetDevice, cudaVDPAUSetVDPAUDevice,
    cudaWaitExternalSemaphoresAsync, cudaWaitExternalSemaphoresAsync_ptsz,
}
