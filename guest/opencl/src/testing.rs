//! A worker in the tests' own process, on an OpenCL mock that answers few queries and records
//! arguments.

use std::{
    alloc::{Layout, alloc_zeroed},
    cell::Cell,
    ffi::c_void,
    fmt,
    ptr::{NonNull, null, null_mut},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use base::Unpoisoned;
use remoting_opencl::{OpenClBackend, driver::Api};
use remoting_proto::apis::opencl::codes;
use remoting_session::{
    passive::{Offer, Passive},
    quota::Quota,
};
use remoting_transport::gate::{Delegate, Failed};

use crate::{
    context,
    object::{Context, Device, Handle, Platform},
    platform,
};

thread_local! {
    /// The number of times that this thread has looked up an object by its handle.
    pub static LOOKED_UP: Cell<usize> = const { Cell::new(0) };
}

/// The last argument that the driver was told to set: its size and first word.
static SET: Mutex<Option<(usize, u64)>> = Mutex::new(None);

/// Takes what the driver was told.
pub fn take_set() -> Option<(usize, u64)> {
    SET.lock_unpoisoned().take()
}

/// Locked by each test that uses the worker: any thread that makes a call may serve another
/// thread's.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock_unpoisoned()
}

/// The window's size in bytes.
const WINDOW: usize = 4 << 20;

/// What devices return for queries of sizes and flags.
pub const LIMIT: u64 = 1 << 20;

/// A device that supports everything that can be queried.
unsafe extern "C" fn device_info(
    _: usize,
    name: u32,
    size: usize,
    value: *mut c_void,
    size_ret: *mut usize,
) -> i32 {
    let is_short = matches!(
        name,
        codes::DEVICE_QUEUE_ON_DEVICE_PREFERRED_SIZE
            | codes::DEVICE_QUEUE_ON_DEVICE_MAX_SIZE
            | codes::DEVICE_MAX_ON_DEVICE_QUEUES
            | codes::DEVICE_MAX_ON_DEVICE_EVENTS
            | codes::DEVICE_PIPE_SUPPORT
            | codes::DEVICE_MAX_PIPE_ARGS
            | codes::DEVICE_PIPE_MAX_ACTIVE_RESERVATIONS
            | codes::DEVICE_PIPE_MAX_PACKET_SIZE
            | codes::DEVICE_IMAGE_SUPPORT
    );
    let length = if is_short { 4 } else { 8 };
    // SAFETY: the worker passes `size` bytes or null, and a pointer for the length or null.
    unsafe {
        if !value.is_null() && size >= length {
            let from = LIMIT.to_le_bytes();
            value.cast::<u8>().copy_from(from.as_ptr(), length);
        }
        if !size_ret.is_null() {
            size_ret.write(length);
        }
    }
    0
}

/// A kernel has two arguments.
unsafe extern "C" fn kernel_info(
    _: usize,
    name: u32,
    _: usize,
    value: *mut c_void,
    _: *mut usize,
) -> i32 {
    if name == codes::KERNEL_NUM_ARGS {
        // SAFETY: the worker requests a 32-bit number.
        unsafe { value.cast::<u32>().write(2) };
    }
    0
}

/// The driver does not report their kinds.
unsafe extern "C" fn argument_info(
    _: usize,
    _: u32,
    _: u32,
    _: usize,
    _: *mut c_void,
    _: *mut usize,
) -> i32 {
    codes::KERNEL_ARG_INFO_NOT_AVAILABLE
}

unsafe extern "C" fn set_argument(_: usize, _: u32, size: usize, value: *const c_void) -> i32 {
    // The first eight bytes distinguish all values of the tests.
    let word = if value.is_null() || size != 8 {
        0
    } else {
        // SAFETY: the value has this many bytes.
        unsafe { value.cast::<u64>().read_unaligned() }
    };
    *SET.lock_unpoisoned() = Some((size, word));
    0
}

static REFUSES_SAMPLERS: AtomicBool = AtomicBool::new(false);

/// Makes the driver refuse all samplers from now on, or accept them.
pub fn refuse_samplers(all: bool) {
    REFUSES_SAMPLERS.store(all, Ordering::Relaxed);
}

unsafe extern "C" fn create_sampler(_: usize, _: u32, _: u32, _: u32, code: *mut i32) -> usize {
    let refuses = REFUSES_SAMPLERS.load(Ordering::Relaxed);
    // SAFETY: the worker passes a pointer for the code.
    unsafe { code.write(if refuses { codes::INVALID_VALUE } else { 0 }) };
    usize::from(!refuses)
}

/// What the process shares with itself, as if through a gate.
struct Here {
    passive: Mutex<Passive<OpenClBackend>>,
    window: NonNull<[u8]>,
}

impl fmt::Debug for Here {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Here")
    }
}

// SAFETY: the memory exists until the process ends.
unsafe impl Send for Here {}

impl Delegate for Here {
    fn delegate(&self, handler: usize, _: u64, _: u64) -> Result<u64, Failed> {
        let mut passive = self.passive.lock_unpoisoned();
        // SAFETY: the memory consists of whole pages, exists until the process ends, and is the
        // window's.
        Ok(unsafe { passive.delegated(handler, self.window) })
    }

    fn shared(&self) -> NonNull<[u8]> {
        self.window
    }
}

/// The worker that all tests of this process use.
pub fn worker() -> Box<dyn Delegate> {
    let layout = Layout::from_size_align(WINDOW, 4096).expect("whole pages");
    // SAFETY: the size is not 0.
    let memory = NonNull::new(unsafe { alloc_zeroed(layout) }).expect("there is memory");
    let api = Api::null()
        .with_devices(device_info)
        .with_kernels(kernel_info, argument_info, set_argument)
        .with_samplers(create_sampler);
    Box::new(Here {
        passive: Mutex::new(Passive::new(Offer {
            backend: OpenClBackend::new(Arc::new(api), &Default::default()),
            quota: Quota::new(1 << 30),
            own: false,
        })),
        window: NonNull::slice_from_raw_parts(memory, WINDOW),
    })
}

/// Creates a context of the worker's first device.
pub fn context() -> Handle<Context> {
    let (mut platform, mut device): (Handle<Platform>, Handle<Device>) = (null_mut(), null_mut());
    let got = platform::clGetPlatformIDs(1, &raw mut platform, null_mut());
    assert_eq!(got, 0);
    let all = u64::from(u32::MAX);
    let got = platform::clGetDeviceIDs(platform, all, 1, &raw mut device, null_mut());
    assert_eq!(got, 0);
    let mut code = 0;
    let context = context::clCreateContext(
        null(),
        1,
        &raw const device,
        None,
        null_mut(),
        &raw mut code,
    );
    assert_eq!(code, 0);
    context
}
