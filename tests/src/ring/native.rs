//! The same CUDA calls without a worker: this process opens the host's driver itself.

use std::{
    ffi::{CStr, CString, c_int, c_void},
    path::Path,
    ptr::null_mut,
};

use anyhow::{Context, Result, ensure};
use cuda_definition::driver::{signatures, types::*};
use gantry_ring_client::{
    Direction,
    cuda::{BUFFER, COPIES, Calls, DISABLE_TIMING, NON_BLOCKING, NOTHING, NOTHING_NAME, measure},
};

use super::Report;

/// Converts a result code to an error with its name.
fn succeeds(symbol: &str, result: CUresult) -> Result<()> {
    let name = || {
        let known = CUresult::NAMES.iter().find(|(_, known)| *known == result);
        known.map_or("an unknown error", |(name, _)| *name)
    };
    ensure!(
        result == CUresult::CUDA_SUCCESS,
        "{symbol} answers {}",
        name()
    );
    Ok(())
}

macro_rules! functions {
    ($($name:ident)*) => {
        /// The driver's functions.
        #[allow(non_snake_case)]
        struct Functions { $($name: signatures::$name,)* }

        impl Functions {
            fn of(library: &libloading::Library) -> Result<Self> {
                Ok(Self {
                    // SAFETY: a symbol with this name has the signature of the API's definition.
                    $($name: unsafe {
                        let symbol = concat!(stringify!($name), "\0");
                        *library.get(symbol.as_bytes()).context(stringify!($name))?
                    },)*
                })
            }
        }
    };
}

functions! {
    cuInit cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuCtxSetCurrent cuDeviceGetName
    cuStreamCreate cuStreamQuery cuStreamSynchronize cuEventCreate cuEventRecord cuEventQuery cuEventSynchronize
    cuModuleLoadData cuModuleGetFunction cuLaunchKernel cuMemAlloc_v2 cuMemHostAlloc cuMemGetInfo_v2
    cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2
}

/// Calls a function, which must succeed.
macro_rules! cu {
    ($driver:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: handles are the driver's own, and pointers refer to locals or to memory of the
        // size that the call requires.
        let result = unsafe { ($driver.functions.$name)($($argument),*) };
        succeeds(stringify!($name), result)
    }};
}

struct Driver {
    functions: Functions,
    stream: CUstream,
    event: CUevent,
    nothing: CUfunction,
    memory: CUdeviceptr,
    pinned: *mut c_void,
    _library: libloading::Library,
}

impl Driver {
    fn open(library: &Path, report: &mut Report) -> Result<Self> {
        // SAFETY: opens the driver like any CUDA program does.
        let library = unsafe { libloading::Library::new(library) }
            .with_context(|| format!("cannot open {}", library.display()))?;
        let mut driver = Self {
            functions: Functions::of(&library)?,
            stream: null_mut(),
            event: null_mut(),
            nothing: null_mut(),
            memory: 0,
            pinned: null_mut(),
            _library: library,
        };
        cu!(driver, cuInit(0))?;
        let mut name = [0; 256];
        let length = name.len() as c_int;
        cu!(driver, cuDeviceGetName(name.as_mut_ptr(), length, 0))?;
        // SAFETY: it ends with a zero byte.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) };
        let name = name.to_string_lossy().into_owned();
        report.notes.push(("device".to_owned(), name));
        let mut context = null_mut();
        cu!(driver, cuDevicePrimaryCtxRetain(&raw mut context, 0))?;
        cu!(driver, cuCtxSetCurrent(context))?;
        let (mut stream, mut event, mut module) = (null_mut(), null_mut(), null_mut());
        cu!(driver, cuStreamCreate(&raw mut stream, NON_BLOCKING))?;
        cu!(driver, cuEventCreate(&raw mut event, DISABLE_TIMING))?;
        let ptx = CString::new(NOTHING)?;
        cu!(
            driver,
            cuModuleLoadData(&raw mut module, ptx.as_ptr().cast())
        )?;
        let (mut nothing, name) = (null_mut(), CString::new(NOTHING_NAME)?);
        cu!(
            driver,
            cuModuleGetFunction(&raw mut nothing, module, name.as_ptr())
        )?;
        let (mut memory, mut pinned, size) = (0, null_mut(), BUFFER as usize);
        cu!(driver, cuMemAlloc_v2(&raw mut memory, size))?;
        cu!(driver, cuMemHostAlloc(&raw mut pinned, size, 0))?;
        (driver.stream, driver.event, driver.nothing) = (stream, event, nothing);
        (driver.memory, driver.pinned) = (memory, pinned);
        Ok(driver)
    }
}

impl Drop for Driver {
    /// This also releases what the context owns.
    fn drop(&mut self) {
        let _ = cu!(self, cuDevicePrimaryCtxRelease_v2(0));
    }
}

/// Accepts "not ready" like any other answer.
fn ready(symbol: &str, result: CUresult) -> Result<()> {
    match result {
        CUresult::CUDA_ERROR_NOT_READY => Ok(()),
        result => succeeds(symbol, result),
    }
}

impl Calls for Driver {
    type Error = anyhow::Error;

    fn query(&mut self) -> Result<()> {
        // SAFETY: the stream is the driver's own.
        let result = unsafe { (self.functions.cuStreamQuery)(self.stream) };
        ready("cuStreamQuery", result)
    }

    fn memory(&mut self) -> Result<()> {
        let (mut free, mut all) = (0, 0);
        cu!(self, cuMemGetInfo_v2(&raw mut free, &raw mut all))
    }

    fn launch(&mut self) -> Result<()> {
        let (pointer, number) = (self.memory, 1u32);
        let number = (&raw const number).cast_mut().cast::<c_void>();
        let pointer = (&raw const pointer).cast_mut().cast::<c_void>();
        let mut parameters = [pointer, number, number, number];
        let (function, stream) = (self.nothing, self.stream);
        let parameters = parameters.as_mut_ptr();
        cu!(
            self,
            cuLaunchKernel(
                function,
                1,
                1,
                1,
                32,
                1,
                1,
                0,
                stream,
                parameters,
                null_mut()
            )
        )
    }

    fn synchronize(&mut self) -> Result<()> {
        cu!(self, cuStreamSynchronize(self.stream))
    }

    fn record(&mut self) -> Result<()> {
        cu!(self, cuEventRecord(self.event, self.stream))
    }

    fn query_event(&mut self) -> Result<()> {
        // SAFETY: the event is the driver's own.
        let result = unsafe { (self.functions.cuEventQuery)(self.event) };
        ready("cuEventQuery", result)
    }

    fn synchronize_event(&mut self) -> Result<()> {
        cu!(self, cuEventSynchronize(self.event))
    }

    fn copy(&mut self, direction: Direction, size: u64) -> Result<()> {
        let (size, stream) = (size as usize, self.stream);
        match direction {
            Direction::Write => cu!(
                self,
                cuMemcpyHtoDAsync_v2(self.memory, self.pinned.cast_const(), size, stream)
            ),
            Direction::Read => cu!(
                self,
                cuMemcpyDtoHAsync_v2(self.pinned, self.memory, size, stream)
            ),
        }
    }
}

/// Opens the driver with this name or path, and measures.
pub fn run(library: &Path) -> Result<Report> {
    let mut report = Report::default();
    let mut driver = Driver::open(library, &mut report)?;
    measure(&mut driver, &mut report, &COPIES)?;
    Ok(report)
}
