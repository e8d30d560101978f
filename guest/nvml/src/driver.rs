//! The CUDA driver: `libcuda.so.1`, opened when the library is initialized.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_uint},
    ptr::null_mut,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use cuda_definition::driver::{signatures, types::*};

use crate::{
    DRIVER_NOT_LOADED, INVALID_ARGUMENT, NOT_SUPPORTED, UNINITIALIZED, UNKNOWN, nvmlReturn_t,
};

/// The number of times that the library has been initialized and not shut down.
static STARTED: AtomicUsize = AtomicUsize::new(0);

/// The driver, open.
pub struct Driver(libloading::Library);

/// What Gantry's driver has for this library alone: queries of devices on this thread succeed, or no
/// longer, without `cuInit`.
type Describes = extern "C" fn(bool) -> bool;
/// Its name.
const DESCRIBES: &[u8] = b"gantry_cuda_describes";
/// The same: bytes of a device's memory that this process has allocated.
type Allocated = extern "C" fn(CUdevice) -> u64;
const ALLOCATED: &[u8] = b"gantry_cuda_allocated";

/// What the driver reports about a device.
pub struct Device {
    ordinal: c_int,
    pub name: String,
    pub uuid: String,
    /// Its PCI address.
    pub bus: String,
    pub capability: (c_int, c_int),
}

/// Calls an entry point of the driver. Any error of the driver is an unknown error here.
macro_rules! cu {
    ($driver:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the function of this name has the signature of the API's definition; pointers are
        // to memory of the size that it specifies, valid for the call.
        let result = unsafe {
            match $driver.0.get::<signatures::$name>(stringify!($name).as_bytes()) {
                Ok(function) => function($($argument),*),
                Err(_) => CUresult::CUDA_ERROR_NOT_FOUND,
            }
        };
        match result {
            CUresult::CUDA_SUCCESS => Ok(()),
            _ => Err(UNKNOWN),
        }
    }};
}

impl Driver {
    fn opened() -> Option<&'static Self> {
        static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
        DRIVER
            .get_or_init(|| {
                // SAFETY: opening a driver runs its constructors, which are its own.
                let library = unsafe { libloading::Library::new("libcuda.so.1") };
                library.ok().map(Self)
            })
            .as_ref()
    }

    /// Initializes the library once more. Does not initialize CUDA: a process that only asks about
    /// devices may fork, and its children compute.
    ///
    /// # Errors
    /// There is no driver, or no device.
    pub fn start() -> Result<(), nvmlReturn_t> {
        let driver = Self::opened().ok_or(DRIVER_NOT_LOADED)?;
        match driver.count() {
            Ok(1..) => {}
            _ => return Err(DRIVER_NOT_LOADED),
        }
        STARTED.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// Asks the driver about devices, for which CUDA need not be initialized. It is if the driver is
    /// another one than Gantry's.
    fn describing<T>(
        &self,
        ask: impl FnOnce() -> Result<T, nvmlReturn_t>,
    ) -> Result<T, nvmlReturn_t> {
        // SAFETY: the symbol is Gantry's own and has this type.
        let Ok(describes) = (unsafe { self.0.get::<Describes>(DESCRIBES) }) else {
            cu!(self, cuInit(0))?;
            return ask();
        };
        let before = describes(true);
        let told = ask();
        describes(before);
        told
    }

    /// Shuts the library down once.
    ///
    /// # Errors
    /// It is not initialized.
    pub fn end() -> Result<(), nvmlReturn_t> {
        let less = |count: usize| count.checked_sub(1);
        STARTED
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, less)
            .map(drop)
            .map_err(|_| UNINITIALIZED)
    }

    /// The driver, if the library is initialized.
    ///
    /// # Errors
    /// The library is not initialized.
    pub fn get() -> Result<&'static Self, nvmlReturn_t> {
        if STARTED.load(Ordering::Acquire) == 0 {
            return Err(UNINITIALIZED);
        }
        Self::opened().ok_or(UNINITIALIZED)
    }

    /// `cuDriverGetVersion`
    ///
    /// # Errors
    /// The driver has failed.
    pub fn version(&self) -> Result<c_int, nvmlReturn_t> {
        let mut version = 0;
        cu!(self, cuDriverGetVersion(&raw mut version))?;
        Ok(version)
    }

    /// The number of devices.
    ///
    /// # Errors
    /// The driver has failed.
    pub fn count(&self) -> Result<usize, nvmlReturn_t> {
        let mut count = 0;
        self.describing(|| cu!(self, cuDeviceGetCount(&raw mut count)))?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    fn attribute(&self, ordinal: c_int, which: CUdevice_attribute) -> Result<c_int, nvmlReturn_t> {
        let mut value = 0;
        self.describing(|| cu!(self, cuDeviceGetAttribute(&raw mut value, which, ordinal)))?;
        Ok(value)
    }

    /// A device.
    ///
    /// # Errors
    /// There is no device with this ordinal, or the driver has failed.
    pub fn device(&self, ordinal: usize) -> Result<Device, nvmlReturn_t> {
        if ordinal >= self.count()? {
            return Err(INVALID_ARGUMENT);
        }
        self.describing(|| self.described(ordinal))
    }

    fn described(&self, ordinal: usize) -> Result<Device, nvmlReturn_t> {
        let ordinal = ordinal as c_int;
        let text = |ask: &dyn Fn(*mut c_char, c_int) -> Result<(), nvmlReturn_t>| {
            let mut room = [0 as c_char; 256];
            ask(room.as_mut_ptr(), room.len() as c_int - 1)?;
            // SAFETY: the last character is zero.
            let text = unsafe { CStr::from_ptr(room.as_ptr()) };
            Ok::<_, nvmlReturn_t>(text.to_string_lossy().into_owned())
        };
        let name = text(&|to, length| cu!(self, cuDeviceGetName(to, length, ordinal)))?;
        let bus = text(&|to, length| cu!(self, cuDeviceGetPCIBusId(to, length, ordinal)))?;
        let mut uuid = CUuuid { bytes: [0; 16] };
        cu!(self, cuDeviceGetUuid_v2(&raw mut uuid, ordinal))?;
        let digits: String = uuid
            .bytes
            .iter()
            .map(|byte| format!("{:02x}", byte.cast_unsigned()))
            .collect();
        let uuid = format!(
            "GPU-{}-{}-{}-{}-{}",
            &digits[..8],
            &digits[8..12],
            &digits[12..16],
            &digits[16..20],
            &digits[20..]
        );
        let attribute = |which| self.attribute(ordinal, which);
        use CUdevice_attribute as A;
        let capability = (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        Ok(Device {
            ordinal,
            name,
            uuid,
            bus,
            capability,
        })
    }
}

impl Device {
    /// An attribute of the device.
    ///
    /// # Errors
    /// The driver has failed.
    pub fn attribute(&self, which: CUdevice_attribute) -> Result<c_uint, nvmlReturn_t> {
        let value = Driver::get()?.attribute(self.ordinal, which)?;
        c_uint::try_from(value).map_err(|_| NOT_SUPPORTED)
    }

    /// The total memory of the device.
    ///
    /// # Errors
    /// The driver has failed.
    pub fn total(&self) -> Result<u64, nvmlReturn_t> {
        let mut total = 0usize;
        let driver = Driver::get()?;
        driver.describing(|| cu!(driver, cuDeviceTotalMem_v2(&raw mut total, self.ordinal)))?;
        Ok(total as u64)
    }

    /// The device's free and total memory. If this process has no context on it, all memory counts as
    /// free: a query would create a context, which takes memory.
    ///
    /// # Errors
    /// The driver has failed.
    pub fn memory(&self) -> Result<(u64, u64), nvmlReturn_t> {
        match self.memory_in_use()? {
            Some(known) => Ok(known),
            None => self.total().map(|total| (total, total)),
        }
    }

    /// Bytes that this process has allocated, or that are in use if the driver is another one than
    /// Gantry's. None if this process has no context on the device: its primary context is not
    /// active, and the current context, if there is one, is another device's.
    ///
    /// # Errors
    /// The driver has failed.
    pub fn used(&self) -> Result<Option<u64>, nvmlReturn_t> {
        let driver = Driver::get()?;
        let used = |(free, total): (u64, u64)| {
            // SAFETY: the symbol is Gantry's own and has this type.
            let allocated = unsafe { driver.0.get::<Allocated>(ALLOCATED) };
            let (Ok(allocated), Some(ordinal)) = (allocated, self.visible(driver)) else {
                return total - free;
            };
            allocated(ordinal)
        };
        Ok(self.memory_in_use()?.map(used))
    }

    /// The device's ordinal in this process, which `CUDA_VISIBLE_DEVICES` does not affect here. None if
    /// the program does not see it, or has not called `cuInit`.
    fn visible(&self, driver: &Driver) -> Option<c_int> {
        let bus = CString::new(self.bus.as_str()).ok()?;
        let mut ordinal = 0;
        cu!(
            driver,
            cuDeviceGetByPCIBusId(&raw mut ordinal, bus.as_ptr())
        )
        .ok()?;
        Some(ordinal)
    }

    /// Free and total memory, if this process has a context.
    fn memory_in_use(&self) -> Result<Option<(u64, u64)>, nvmlReturn_t> {
        let driver = Driver::get()?;
        let Some(ordinal) = self.visible(driver) else {
            return Ok(None);
        };
        let (mut flags, mut active): (c_uint, c_int) = (0, 0);
        cu!(
            driver,
            cuDevicePrimaryCtxGetState(ordinal, &raw mut flags, &raw mut active)
        )?;
        if active != 0 {
            return self.memory_of_context().map(Some);
        }
        let (mut current, mut of) = (null_mut(), -1);
        cu!(driver, cuCtxGetCurrent(&raw mut current))?;
        if !current.is_null() {
            cu!(driver, cuCtxGetDevice(&raw mut of))?;
        }
        if of != ordinal {
            return Ok(None);
        }
        let (mut free, mut all) = (0usize, 0usize);
        cu!(driver, cuMemGetInfo_v2(&raw mut free, &raw mut all))?;
        Ok(Some((free.min(all) as u64, all as u64)))
    }

    /// The device's free and total memory, as its primary context reports it. Initializes CUDA, and
    /// creates the context if it is not active.
    ///
    /// # Errors
    /// The driver has failed, or has no memory for a context.
    pub fn memory_of_context(&self) -> Result<(u64, u64), nvmlReturn_t> {
        let driver = Driver::get()?;
        let (mut free, mut all) = (0usize, 0usize);
        let (mut primary, mut current) = (null_mut(), null_mut());
        cu!(driver, cuInit(0))?;
        let ordinal = self.visible(driver).ok_or(NOT_SUPPORTED)?;
        cu!(driver, cuDevicePrimaryCtxRetain(&raw mut primary, ordinal))?;
        let asked = cu!(driver, cuCtxPushCurrent_v2(primary)).and_then(|()| {
            let asked = cu!(driver, cuMemGetInfo_v2(&raw mut free, &raw mut all));
            let popped = cu!(driver, cuCtxPopCurrent_v2(&raw mut current));
            asked.and(popped)
        });
        cu!(driver, cuDevicePrimaryCtxRelease_v2(ordinal))?;
        asked?;
        Ok((free.min(all) as u64, all as u64))
    }
}
