//! The host's driver, opened at run time.

use std::{
    cell::Cell,
    ffi::c_int,
    path::Path,
    ptr::null_mut,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use cuda_definition::driver::{signatures, types::*};
use remoting_proto::apis::cuda::{codes, forwarded::ALL};

use super::{fences::Pool, libraries::Libraries};

/// Why the driver is not available.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The library cannot be opened.
    #[error(
        "cannot open the CUDA driver {library}: install NVIDIA's driver, or name the file by --library"
    )]
    Open {
        /// The library's name.
        library: String,
        /// The cause.
        source: libloading::Error,
    },
    /// The driver does not start.
    #[error(
        "the CUDA driver does not start: cuInit answers {}; `gantry-accel probe --api cuda` says \
         whether that is for the confinement, and for which part of it",
        result(*code)
    )]
    Start {
        /// The result of `cuInit`.
        code: i32,
    },
    /// The address space for device memory cannot be reserved.
    #[error("cannot keep addresses for device memory")]
    Arena(#[source] std::io::Error),
}

macro_rules! functions {
    ($($name:ident)*) => {
        /// Entry points with signatures; `None` for those that the driver lacks.
        #[allow(non_snake_case, missing_docs)]
        pub struct Functions { $(pub $name: Option<signatures::$name>,)* }

        impl Functions {
            fn of(library: &libloading::Library) -> Self {
                Self {
                    // SAFETY: a symbol of this name has the signature given in the API's definition.
                    $($name: unsafe {
                        library.get(concat!(stringify!($name), "\0").as_bytes()).ok().map(|symbol| *symbol)
                    },)*
                }
            }
        }
    };
}

functions! {
    cuInit cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuDriverGetVersion cuGetErrorString cuDeviceGet cuDeviceGetCount cuDeviceGetName
    cuDeviceGetUuid_v2 cuDeviceTotalMem_v2 cuDeviceGetAttribute cuDeviceGetPCIBusId
    cuCtxSetCurrent cuCtxSynchronize cuCtxGetCurrent cuCtxGetLimit
    cuMemAlloc_v2 cuMemAllocPitch_v2 cuMemFree_v2 cuMemAllocAsync cuMemAllocFromPoolAsync
    cuMemFreeAsync cuMemGetInfo_v2 cuPointerGetAttribute cuMemHostRegister_v2 cuMemHostGetDevicePointer_v2
    cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoDAsync_v2 cuMemcpy2DAsync_v2
    cuMemsetD8Async cuMemsetD16Async cuMemsetD32Async
    cuMemsetD2D8Async cuMemsetD2D16Async cuMemsetD2D32Async
    cuModuleLoadDataEx cuModuleGetFunction cuLibraryLoadData
    cuModuleGetFunctionCount cuModuleEnumerateFunctions cuLibraryGetKernelCount
    cuLibraryEnumerateKernels
    cuLinkCreate_v2 cuLinkAddData_v2 cuLinkComplete cuLinkDestroy cuModuleUnload cuLibraryUnload
    cuKernelGetParamInfo cuFuncGetParamInfo cuKernelGetName cuFuncGetName cuFuncGetAttribute
    cuKernelGetAttribute cuKernelGetFunction
    cuLaunchKernel cuLaunchKernelEx cuLaunchCooperativeKernel cuLaunchHostFunc cuStreamAddCallback
    cuOccupancyMaxActiveClusters cuOccupancyMaxPotentialClusterSize
    cuStreamSynchronize cuStreamIsCapturing cuStreamGetCtx cuStreamQuery cuStreamWaitValue32_v2 cuStreamWriteValue32_v2
    cuEventCreate cuEventDestroy_v2 cuEventElapsedTime cuEventRecord cuEventQuery cuEventSynchronize
    cuMemcpy3DAsync_v2 cuGraphAddMemcpyNode cuGraphMemcpyNodeSetParams cuGraphExecMemcpyNodeSetParams
    cuGraphAddHostNode cuGraphHostNodeSetParams cuGraphExecHostNodeSetParams
    cuUserObjectCreate cuUserObjectRelease cuGraphRetainUserObject cuGraphReleaseUserObject
    cuStreamGetCaptureInfo_v2 cuStreamGetCaptureInfo_v3 cuGraphAddMemAllocNode cuGraphAddMemFreeNode cuGraphAddNode_v2
    cuGraphLaunch cuGraphAddKernelNode_v2 cuGraphKernelNodeSetParams_v2
    cuGraphExecKernelNodeSetParams_v2 cuDeviceGraphMemTrim
    cuDeviceGetDefaultMemPool cuMemPoolTrimTo cuMemPoolGetAttribute cuDeviceGetGraphMemAttribute
}

/// The driver.
pub struct Api {
    /// Entry points with signatures.
    pub functions: Functions,
    /// Addresses of the forwarded entry points, by number; 0 if missing.
    forwarded: Vec<usize>,
    pub(super) fences: Mutex<Pool>,
    /// Libraries built on the driver.
    pub(super) libraries: Libraries,
    _library: libloading::Library,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Api")
    }
}

/// Calls an entry point and returns its result as a number.
macro_rules! cu {
    ($api:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        match $api.functions.$name {
            // SAFETY: handles are the driver's own; pointers refer to memory of the size given in the definition, valid
            // for the call.
            #[allow(unused_unsafe)]
            Some(function) => unsafe { function($($argument),*) }.0.cast_signed(),
            None => remoting_proto::apis::cuda::codes::NOT_SUPPORTED,
        }
    }};
}
pub(crate) use cu;

/// Describes a result by its name.
pub(super) fn result(code: c_int) -> String {
    let name = match code {
        1 => "INVALID_VALUE",
        2 => "OUT_OF_MEMORY",
        3 => "NOT_INITIALIZED",
        34 => "STUB_LIBRARY",
        100 => "NO_DEVICE",
        304 => "OPERATING_SYSTEM: a system call of the driver's failed",
        802 => "SYSTEM_NOT_READY",
        803 => "SYSTEM_DRIVER_MISMATCH",
        999 => "UNKNOWN",
        _ => return code.to_string(),
    };
    format!("{code} ({name})")
}

/// Converts a result code.
pub(super) fn outcome(code: c_int) -> Result<(), i32> {
    if code == 0 { Ok(()) } else { Err(code) }
}

thread_local! {
    /// The context that is current in this thread.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    /// [`ENDED`] when that was known.
    static KNOWN: Cell<usize> = const { Cell::new(0) };
}

/// How many contexts have ended. A later one may have the handle of one that was current in some thread.
static ENDED: AtomicUsize = AtomicUsize::new(0);

impl Api {
    /// Opens a driver and initializes it. Libraries built on it are opened when they are first needed, from the given
    /// folder or from their usual location.
    ///
    /// # Errors
    /// There is no driver of this name, or it does not start.
    pub fn open(name: &str, libraries: Option<&Path>) -> Result<Self, Error> {
        // SAFETY: the operator named the library and trusts its constructors.
        let library = unsafe { libloading::Library::new(name) };
        let library = library.map_err(|source| Error::Open {
            library: name.to_owned(),
            source,
        })?;
        let address = |symbol: &str| {
            let symbol = format!("{symbol}\0");
            // SAFETY: only the address is taken, nothing is dereferenced.
            unsafe { library.get::<*const ()>(symbol.as_bytes()) }
                .map_or(0, |symbol| *symbol as usize)
        };
        let api = Self {
            functions: Functions::of(&library),
            forwarded: ALL.iter().map(|entry| address(entry.symbol)).collect(),
            fences: Mutex::default(),
            libraries: Libraries::new(libraries),
            _library: library,
        };
        match cu!(api, cuInit(0)) {
            0 => Ok(api),
            code => Err(Error::Start { code }),
        }
    }

    /// Makes a context current in this thread, unless it already is.
    pub(super) fn enter(&self, context: usize) {
        let ended = ENDED.load(Ordering::Acquire);
        if CURRENT.get() != context || KNOWN.get() != ended {
            cu!(self, cuCtxSetCurrent(context as CUcontext));
            CURRENT.set(context);
            KNOWN.set(ended);
        }
    }

    /// A context has ended, in whatever thread it was current.
    pub(super) fn context_ended(&self) {
        ENDED.fetch_add(1, Ordering::AcqRel);
        self.look();
    }

    /// The context that is known to be current in this thread.
    pub(super) fn current(&self) -> usize {
        CURRENT.get()
    }

    /// Asks the driver which context is current. Needed after calls that change it.
    pub(super) fn look(&self) {
        let ended = ENDED.load(Ordering::Acquire);
        let mut current = null_mut();
        cu!(self, cuCtxGetCurrent(&raw mut current));
        CURRENT.set(current as usize);
        KNOWN.set(ended);
    }

    /// Calls a forwarded entry point. All of its parameters are passed as words.
    ///
    /// # Safety
    /// The words are valid arguments of that entry point.
    pub(super) unsafe fn call(&self, number: u16, words: &[u64]) -> i32 {
        let Some(&address) = self.forwarded.get(usize::from(number)) else {
            return codes::NOT_FOUND;
        };
        if address == 0 {
            return codes::NOT_SUPPORTED;
        }
        macro_rules! by_count {
            ($($count:literal: $($index:literal)*;)*) => {
                match words.len() {
                    $($count => {
                        // SAFETY: the symbol is a function of the API whose parameters are numbers, enumerations and
                        // pointers, each in a register or a stack word.
                        let function = unsafe {
                            std::mem::transmute::<usize, unsafe extern "C" fn($(by_count!(@word $index)),*) -> c_int>(address)
                        };
                        // SAFETY: the caller's promise.
                        unsafe { function($(words[$index]),*) }
                    })*
                    _ => codes::NOT_SUPPORTED,
                }
            };
            (@word $index:literal) => { u64 };
        }
        by_count! {
            0: ;
            1: 0;
            2: 0 1;
            3: 0 1 2;
            4: 0 1 2 3;
            5: 0 1 2 3 4;
            6: 0 1 2 3 4 5;
            7: 0 1 2 3 4 5 6;
            8: 0 1 2 3 4 5 6 7;
            12: 0 1 2 3 4 5 6 7 8 9 10 11;
            15: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14;
        }
    }
}
