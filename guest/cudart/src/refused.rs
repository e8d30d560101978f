//! Entry points that are refused: they return `cudaErrorNotSupported`, and the first call is
//! reported.

use std::sync::atomic::{AtomicBool, Ordering};

use cuda_definition::runtime::types::cudaError_t;

use crate::error::{Error, result};

fn refuse(name: &str, told: &AtomicBool) -> cudaError_t {
    if !told.swap(true, Ordering::Relaxed) {
        eprintln!("gantry: {name} is not supported by this CUDA runtime");
    }
    result(Err(Error::cudaErrorNotSupported))
}

/// The functions are defined without parameters: nothing reads them, and removing those that are
/// passed in registers or on the stack is up to the caller.
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

// Memory of other processes, resources of other devices and APIs, logs, and what no examined
// program calls.
refused! {
    __cudaGetProcAddress, __cudaRegisterHostVar, __cudaRegisterUnifiedTable, __cudaRegisterSurface,
    __cudaRegisterTexture, cudaArrayGetMemoryRequirements, cudaArrayGetPlane,
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
    cudaGraphExecExternalSemaphoresWaitNodeSetParams,
    cudaGraphExternalSemaphoresSignalNodeGetParams, cudaGraphExternalSemaphoresSignalNodeSetParams,
    cudaGraphExternalSemaphoresWaitNodeGetParams, cudaGraphExternalSemaphoresWaitNodeSetParams,
    cudaGraphKernelNodeGetParams, cudaGraphMemcpyNodeGetParams, cudaGraphicsEGLRegisterImage,
    cudaGraphicsGLRegisterBuffer, cudaGraphicsGLRegisterImage, cudaGraphicsMapResources,
    cudaGraphicsResourceGetMappedEglFrame, cudaGraphicsResourceGetMappedMipmappedArray,
    cudaGraphicsResourceGetMappedPointer, cudaGraphicsResourceSetMapFlags,
    cudaGraphicsSubResourceGetMappedArray, cudaGraphicsUnmapResources,
    cudaGraphicsUnregisterResource, cudaGraphicsVDPAURegisterOutputSurface,
    cudaGraphicsVDPAURegisterVideoSurface, cudaImportExternalMemory, cudaImportExternalSemaphore,
    cudaIpcCloseMemHandle, cudaIpcGetEventHandle, cudaIpcGetMemHandle, cudaIpcOpenEventHandle,
    cudaIpcOpenMemHandle, cudaLogsCurrent, cudaLogsDumpToFile, cudaLogsDumpToMemory,
    cudaLogsRegisterCallback, cudaLogsUnregisterCallback, cudaMemPoolExportPointer,
    cudaMemPoolExportToShareableHandle, cudaMemPoolImportFromShareableHandle,
    cudaMemPoolImportPointer, cudaMemcpy3DBatchAsync, cudaMemcpy3DBatchAsync_ptsz,
    cudaMemcpyArrayToArray, cudaMemcpyArrayToArray_ptds, cudaMemcpyFromArrayAsync,
    cudaMemcpyFromArrayAsync_ptsz, cudaMemcpyToArrayAsync, cudaMemcpyToArrayAsync_ptsz,
    cudaMipmappedArrayGetMemoryRequirements, cudaMipmappedArrayGetSparseProperties,
    cudaSignalExternalSemaphoresAsync, cudaSignalExternalSemaphoresAsync_ptsz, cudaVDPAUGetDevice,
    cudaVDPAUSetVDPAUDevice, cudaWaitExternalSemaphoresAsync, cudaWaitExternalSemaphoresAsync_ptsz,
}
