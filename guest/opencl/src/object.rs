//! Objects as applications see them: a pointer to a dispatch table, and a reference count that
//! belongs to the application alone. The driver's own references are counted separately, so that
//! `CL_..._REFERENCE_COUNT` is exact.

use std::{
    collections::BTreeMap,
    ffi::c_void,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use base::Unpoisoned;
use gantry_client::progress::Progress;
use gantry_client::stage::HostRegion;
use remoting_proto::{
    apis::opencl::{
        calls::{
            ArgumentKind, ContextId, DeviceId, EventId, KernelId, MemId, PlatformId, ProgramId,
            QueueId, ReleaseContext, ReleaseDevice, ReleaseEvent, ReleaseKernel, ReleaseMem,
            ReleaseProgram, ReleaseQueue, ReleaseSampler, SamplerId, StageId, Value,
        },
        codes,
    },
    wire::Blob,
};

use crate::{
    abi::Outcome,
    link,
    table::{TABLE, Table},
};

/// A kind of object.
pub trait ObjectType: Sized {
    /// Distinguishes this kind from others.
    const TAG: u32;
    /// The error code for what is not an object of this kind.
    const INVALID: i32;
    /// Called when the last reference is gone.
    fn released(&mut self, handle: *mut c_void);
}

/// An object. The dispatch table must come first: the loader uses it.
#[repr(C)]
pub struct Object<T: ObjectType> {
    table: &'static Table,
    tag: u32,
    count: AtomicU32,
    pub it: T,
}

/// The tag of buffers and images.
pub const MEM: u32 = 0x4754_0005;
const SAMPLER: u32 = 0x4754_0006;

/// Live objects that may be arguments, by handle: for kernels whose argument types the driver does
/// not report.
static KNOWN: Mutex<BTreeMap<usize, u32>> = Mutex::new(BTreeMap::new());

fn lock_known() -> MutexGuard<'static, BTreeMap<usize, u32>> {
    KNOWN.lock_unpoisoned()
}

/// The tag of a live buffer, image or sampler with this handle.
pub fn find(handle: usize) -> Option<u32> {
    #[cfg(test)]
    crate::testing::LOOKED_UP.with(|count| count.set(count.get() + 1));
    lock_known().get(&handle).copied()
}

/// A handle.
pub type Handle<T> = *mut Object<T>;
/// One of the driver's own references.
pub type Own<T> = Arc<Object<T>>;

impl<T: ObjectType> Drop for Object<T> {
    fn drop(&mut self) {
        self.tag = 0;
        if T::TAG == MEM || T::TAG == SAMPLER {
            lock_known().remove(&(&raw const *self as usize));
        }
        let handle = (&raw mut *self).cast();
        self.it.released(handle);
    }
}

impl<T: ObjectType> Object<T> {
    /// Creates an object with one reference of the application's.
    pub fn handle(it: T) -> Handle<T> {
        Arc::into_raw(Self::own(it, 1)).cast_mut()
    }

    /// Creates an object with `count` references of the application's (which together are one of
    /// the driver's).
    pub fn own(it: T, count: u32) -> Own<T> {
        let object = Arc::new(Self {
            table: &TABLE,
            tag: T::TAG,
            count: AtomicU32::new(count),
            it,
        });
        if T::TAG == MEM || T::TAG == SAMPLER {
            lock_known().insert(Arc::as_ptr(&object) as usize, T::TAG);
        }
        object
    }

    /// The number of the application's references.
    pub fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }

    /// Another reference of the driver's.
    pub fn keep(&self) -> Own<T> {
        // SAFETY: every object was created by `Arc::new` in `own`.
        unsafe {
            Arc::increment_strong_count(self);
            Arc::from_raw(self)
        }
    }

    /// The handle of an object.
    pub fn pointer(&self) -> Handle<T> {
        (&raw const *self).cast_mut()
    }
}

/// The object behind a handle.
pub fn get<'a, T: ObjectType>(handle: Handle<T>) -> Outcome<&'a Object<T>> {
    if handle.is_null() || !handle.is_aligned() {
        return Err(T::INVALID);
    }
    // SAFETY: the specification lets applications pass only handles that they hold; the loader has
    // already dereferenced this pointer. The tag detects handles of another kind.
    let object = unsafe { &*handle };
    if object.tag == T::TAG {
        Ok(object)
    } else {
        Err(T::INVALID)
    }
}

/// The driver's own references to several objects.
pub fn keep_all<T: ObjectType>(handles: &[Handle<T>]) -> Outcome<Vec<Own<T>>> {
    handles
        .iter()
        .map(|&handle| Ok(get(handle)?.keep()))
        .collect()
}

/// `clRetain...`.
pub fn retain<T: ObjectType>(handle: Handle<T>) -> Outcome {
    get(handle)?.count.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// `clRelease...`.
pub fn release<T: ObjectType>(handle: Handle<T>) -> Outcome {
    let object = get(handle)?;
    if object.count.fetch_sub(1, Ordering::AcqRel) == 1 {
        // SAFETY: all references of the application's together are one of the driver's, which
        // `handle` or `own` created.
        drop(unsafe { Arc::from_raw(handle) });
    }
    Ok(())
}

pub struct Platform {
    pub id: PlatformId,
    pub devices: Vec<Own<Device>>,
}

// Platforms and root devices live as long as the process, and handles of all kinds may be used from
// any thread: their mutable state is protected by locks, and raw pointers in them are the
// application's, which are only returned to it.
/// Declares that objects of a kind may be used from any thread.
macro_rules! from_any_thread {
    ($($kind:ty)*) => {$(
        // SAFETY: see above.
        unsafe impl Send for $kind {}
        // SAFETY: see above.
        unsafe impl Sync for $kind {}
    )*};
}
from_any_thread!(Platform Device Context Queue Mem Sampler Program Kernel Event);

pub struct Device {
    pub id: DeviceId,
    pub platform: PlatformId,
    pub kind: u64,
    pub parent: Option<Own<Device>>,
    /// `CL_DEVICE_MAX_WORK_GROUP_SIZE`, which is checked when a kernel is enqueued.
    pub largest_group: OnceLock<u64>,
    /// Whether it supports shared virtual memory, which is checked just as often.
    pub svm: OnceLock<bool>,
}

pub type ContextDestructor = (extern "C" fn(Handle<Context>, *mut c_void), usize);

pub struct Context {
    pub id: ContextId,
    pub devices: Vec<Own<Device>>,
    pub properties: Vec<isize>,
    pub destructors: Mutex<Vec<ContextDestructor>>,
}

pub struct Queue {
    pub id: QueueId,
    pub context: Own<Context>,
    pub device: Own<Device>,
    pub properties: u64,
    pub array: Vec<u64>,
    pub progress: Progress,
}

impl Queue {
    pub fn in_order(&self) -> bool {
        self.properties & codes::QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE == 0
    }
}

/// The format and shape of an image.
#[derive(Clone, Copy)]
pub struct Image {
    pub kind: u32,
    pub extent: [u64; 3],
    pub layers: u64,
    pub pixel: u64,
}

/// A mapping.
pub struct Mapping {
    pub pointer: usize,
    /// The stage through which its contents arrive, if there is one.
    pub stage: Option<StageId>,
    /// What has to be done when it ends.
    pub kind: Mapped,
}

/// What a mapping is backed by.
pub enum Mapped {
    /// The buffer itself, from this byte on.
    Window(u64),
    /// A stretch of the window, which may have to be written back.
    Copy {
        offset: u64,
        length: u64,
        /// The application's own memory, if the data has to be taken from there.
        host: Option<HostRegion>,
        origin: [u64; 3],
        region: [u64; 3],
        write: bool,
    },
}

pub type MemDestructor = (extern "C" fn(*mut c_void, *mut c_void), usize);

pub struct Mem {
    pub id: MemId,
    pub context: Own<Context>,
    pub flags: u64,
    pub size: u64,
    pub host: *mut u8,
    /// Whether that is in shared virtual memory.
    pub svm: bool,
    pub parent: Option<Own<Mem>>,
    pub origin: u64,
    /// Its place in the window, and how much of that belongs to it.
    pub lives: Option<(u64, u64)>,
    pub image: Option<Image>,
    pub maps: Mutex<Vec<Mapping>>,
    pub destructors: Mutex<Vec<MemDestructor>>,
    pub properties: Vec<u64>,
}

pub struct Sampler {
    pub id: SamplerId,
    pub context: Own<Context>,
}

pub struct Program {
    pub id: ProgramId,
    pub context: Own<Context>,
    pub devices: Vec<Own<Device>>,
    /// Its source, if it was created from one.
    pub source: Vec<u8>,
    /// The application's options of the last build, if the worker was given different ones.
    pub options: Mutex<Option<Vec<u8>>>,
}

pub struct Kernel {
    pub id: KernelId,
    pub program: Own<Program>,
    /// The kinds of its arguments, as far as they are known.
    pub kinds: Vec<OnceLock<ArgumentKind>>,
    /// The arguments as they were last set.
    pub set: Mutex<Vec<Set>>,
}

/// What is known about an argument's value, which the driver has accepted.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Set {
    /// It has not been set.
    #[default]
    Never,
    /// Plain bytes, few enough that comparing them is cheaper than sending them.
    Bytes(Blob),
    /// This many plain bytes.
    Sized(usize),
    /// A buffer or image.
    Mem,
    /// A sampler.
    Sampler,
    /// Local memory.
    Local,
    /// A pointer into shared virtual memory, or null.
    Svm,
}

impl Set {
    /// What is known about a value.
    pub fn of(value: &Value) -> Self {
        match value {
            Value::Bytes(bytes) if bytes.0.len() <= 16 => Self::Bytes(bytes.clone()),
            Value::Bytes(bytes) => Self::Sized(bytes.0.len()),
            Value::Mem(_) => Self::Mem,
            Value::Sampler(_) => Self::Sampler,
            Value::Local(_) => Self::Local,
            Value::Svm(_) => Self::Svm,
        }
    }

    /// Whether a driver that has accepted this will accept the other value, which is of the same
    /// kind and size.
    pub fn vouches_for(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Bytes(this), Self::Bytes(other)) => this.0.len() == other.0.len(),
            (Self::Never, _) => false,
            _ => self == other,
        }
    }
}

pub struct Event {
    pub id: EventId,
    pub context: Own<Context>,
    pub queue: Option<Own<Queue>>,
    pub command: u32,
}

/// Implements what all kinds do at their end: tell the worker, and return the number.
macro_rules! kinds {
    ($($kind:ident $tag:expr, $invalid:ident $call:ident $numbers:ident;)*) => {$(
        impl ObjectType for $kind {
            const TAG: u32 = $tag;
            const INVALID: i32 = codes::$invalid;

            fn released(&mut self, _: *mut c_void) {
                if let Some(link) = link::get() {
                    let _ = link.post(&$call { id: self.id });
                    link.state.ids.$numbers.give(self.id.0);
                }
            }
        }
    )*};
}

kinds! {
    Queue 0x4754_0004, INVALID_COMMAND_QUEUE ReleaseQueue queues;
    Sampler SAMPLER, INVALID_SAMPLER ReleaseSampler samplers;
    Program 0x4754_0007, INVALID_PROGRAM ReleaseProgram programs;
    Kernel 0x4754_0008, INVALID_KERNEL ReleaseKernel kernels;
    Event 0x4754_0009, INVALID_EVENT ReleaseEvent events;
}

impl ObjectType for Platform {
    const TAG: u32 = 0x4754_0001;
    const INVALID: i32 = codes::INVALID_PLATFORM;

    fn released(&mut self, _: *mut c_void) {}
}

impl ObjectType for Device {
    const TAG: u32 = 0x4754_0002;
    const INVALID: i32 = codes::INVALID_DEVICE;

    fn released(&mut self, _: *mut c_void) {
        if self.parent.is_some()
            && let Some(link) = link::get()
        {
            let _ = link.post(&ReleaseDevice { id: self.id });
            link.state.ids.sub_devices.give(self.id.0 - SUB_DEVICES);
        }
    }
}

/// The first number of sub-devices. Root devices have the worker's numbers.
pub const SUB_DEVICES: u32 = 4096;

impl ObjectType for Context {
    const TAG: u32 = 0x4754_0003;
    const INVALID: i32 = codes::INVALID_CONTEXT;

    fn released(&mut self, handle: *mut c_void) {
        let destructors = self
            .destructors
            .get_mut()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        for (call, data) in destructors.drain(..).rev() {
            call(handle.cast(), data as *mut c_void);
        }
        if let Some(link) = link::get() {
            link::notify(link, self.id, None);
            let _ = link.post(&ReleaseContext { id: self.id });
            link.state.ids.contexts.give(self.id.0);
        }
    }
}

impl ObjectType for Mem {
    const TAG: u32 = MEM;
    const INVALID: i32 = codes::INVALID_MEM_OBJECT;

    fn released(&mut self, handle: *mut c_void) {
        let Some(link) = link::get() else {
            return;
        };
        let destructors = std::mem::take(
            self.destructors
                .get_mut()
                .unwrap_or_else(std::sync::PoisonError::into_inner),
        );
        let maps = self.maps.get_mut();
        let maps = maps.unwrap_or_else(std::sync::PoisonError::into_inner);
        link.state.mapped.fetch_sub(maps.len(), Ordering::SeqCst);
        let own = self.lives.filter(|(_, length)| *length > 0);
        // Both must wait until no command uses the memory any more, which only the host's driver
        // knows.
        let callback = (own.is_some() || !destructors.is_empty()).then(|| {
            let handle = handle as usize;
            link.register_callback(Box::new(move |_| {
                for (call, data) in destructors.into_iter().rev() {
                    call(handle as *mut c_void, data as *mut c_void);
                }
                if let (Some((offset, length)), Some(link)) = (own, link::get()) {
                    link.free(offset, length);
                }
            }))
        });
        let posted = link.post(&ReleaseMem {
            id: self.id,
            callback,
        });
        if let (Err(_), Some(number)) = (posted, callback) {
            link.run_callback(number, 0);
        }
        link.state.ids.mems.give(self.id.0);
    }
}
