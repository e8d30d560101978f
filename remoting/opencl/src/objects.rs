//! Shadow objects: what the driver made, and the call that recreates it.

use std::{collections::BTreeMap, sync::Arc};

use remoting_proto::{
    apis::opencl::{
        calls::{
            CreateBuffer, CreateImage, CreateQueue, CreateSampler, CreateSubBuffer, ImageShape,
            QueueId, SvmAlloc,
        },
        codes,
    },
    wire::Blob,
};

use super::{
    freed::End,
    kernels::Parameter,
    provenance::{ContextRecord, DeviceRecord, MemRecord},
    records::{Arguments, Builds, ProgramRecord},
    svm::Addresses,
};
use crate::driver::{
    api::{Api, Handle},
    cl,
};

/// A device.
#[derive(Debug)]
pub struct Device {
    /// The driver's handle.
    pub raw: Handle,
    /// Index of its platform in the list.
    pub platform: usize,
    /// Whether it supports buffers in shared virtual memory.
    pub svm: bool,
    /// How it was made.
    pub record: Arc<DeviceRecord>,
    /// Whether it stays allocated in the driver permanently.
    pub pinned: bool,
}

impl Device {
    /// Pins a device on which a context is created, for the lifetime of this process. Contexts, queues and events of a
    /// sub-device use it to their end, and only the driver knows when that is: it may hold them long after the
    /// application has released them and the sub-device. PoCL 3.1 holds no reference to the device meanwhile, and
    /// crashes when it releases such a queue. A sub-device without contexts costs nothing after its release; a pinned
    /// one costs about 1 KiB.
    pub fn pin(&mut self, api: &Api) {
        let is_part = matches!(*self.record, DeviceRecord::Part(_));
        if is_part && !std::mem::replace(&mut self.pinned, true) {
            cl!(api, clRetainDevice(self.raw));
        }
    }
}

/// A context.
#[derive(Debug)]
pub struct Context {
    /// The driver's handle.
    pub raw: Handle,
    /// How it was made.
    pub record: Arc<ContextRecord>,
    /// Index of its platform in the list.
    pub platform: usize,
    /// Whether one of its devices supports buffers in shared virtual memory.
    pub svm: bool,
}

/// The context in which an object was made. The driver keeps it as long as the object, because calls on the object need
/// it.
#[derive(Clone, Copy, Debug)]
pub struct Home {
    /// The driver's handle.
    pub raw: Handle,
    /// Index of its platform in the list.
    pub platform: usize,
    /// Whether one of its devices supports buffers in shared virtual memory. If none does, the functions for it may be
    /// missing: drivers before OpenCL 2.0 have none.
    pub svm: bool,
}

impl Context {
    /// The context as its objects refer to it.
    pub fn home(&self) -> Home {
        Home {
            raw: self.raw,
            platform: self.platform,
            svm: self.svm,
        }
    }
}

/// A queue.
#[derive(Debug)]
pub struct Queue {
    /// The driver's handle.
    pub raw: Handle,
    /// Its context.
    pub home: Home,
    /// Whether its device supports buffers in shared virtual memory.
    pub svm: bool,
    /// How it was made.
    pub made: CreateQueue,
    /// How its context was made.
    pub context: Arc<ContextRecord>,
    /// How its device was made.
    pub device: Arc<DeviceRecord>,
    /// What is known about the end of its commands.
    pub end: End,
    /// The first error of a command that nobody waited for; reported to the next call that waits.
    pub deferred: Option<i32>,
}

impl Queue {
    /// Whether it executes its commands in order.
    pub fn in_order(&self) -> bool {
        self.made.properties & codes::QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE == 0
    }

    /// Whether it profiles its commands.
    pub fn profiles(&self) -> bool {
        self.made.properties & codes::QUEUE_PROFILING_ENABLE != 0
    }
}

/// How a buffer or image was made.
#[derive(Debug)]
pub enum MadeMem {
    /// A buffer.
    Buffer(CreateBuffer),
    /// A part of a buffer.
    Sub(CreateSubBuffer),
    /// An image.
    Image(CreateImage),
}

/// A buffer or image.
#[derive(Debug)]
pub struct Mem {
    /// The driver's handle.
    pub raw: Handle,
    /// How it was made.
    pub record: Arc<MemRecord>,
    /// Its context.
    pub home: Home,
    /// Current mappings.
    pub maps: Vec<Map>,
}

/// A mapping of a buffer.
#[derive(Clone, Copy, Debug)]
pub struct Map {
    /// First byte.
    pub offset: u64,
    /// Size in bytes.
    pub size: u64,
    /// The driver's pointer.
    pub pointer: usize,
}

impl Mem {
    /// Format and shape, if it is an image.
    pub fn image(&self) -> Option<&ImageShape> {
        match &self.record.call {
            MadeMem::Image(image) => Some(&image.shape),
            _ => None,
        }
    }
}

/// How shared virtual memory was made.
#[derive(Debug)]
pub struct MadeSvm {
    /// The call.
    pub call: SvmAlloc,
    /// How its context was made.
    pub context: Arc<ContextRecord>,
}

/// A sampler.
#[derive(Debug)]
pub struct Sampler {
    /// The driver's handle.
    pub raw: Handle,
    /// How it was made.
    pub made: CreateSampler,
    /// How its context was made.
    pub context: Arc<ContextRecord>,
}

/// A program.
#[derive(Debug)]
pub struct Program {
    /// The driver's handle.
    pub raw: Handle,
    /// Its context.
    pub home: Home,
    /// How it was made.
    pub record: Arc<ProgramRecord>,
    /// Its builds in progress.
    pub builds: Builds,
    /// Those whose outcome its record does not have yet: the driver may have ended them.
    pub untold: Builds,
}

/// A kernel.
#[derive(Debug)]
pub struct Kernel {
    /// The driver's handle.
    pub raw: Handle,
    /// Its program as it was when the kernel, or the kernel that this one was cloned from, was made.
    pub program: Arc<ProgramRecord>,
    /// Whether a build of the program was untold then: if the driver has accepted that, the kernel is of that build, since
    /// no program is built again while it has kernels.
    pub is_untold: bool,
    /// Its name in the program.
    pub name: Blob,
    /// The values of its arguments.
    pub arguments: Arguments,
    /// Its context.
    pub home: Home,
    /// Arguments whose last values the driver has refused while nobody waited for the result.
    pub refused: BTreeMap<u32, i32>,
    /// Arguments that are addresses in shared virtual memory.
    pub addresses: Addresses,
    /// The kinds of its arguments, as far as the driver tells.
    pub parameters: Arc<[Parameter]>,
}

/// An event.
#[derive(Debug)]
pub struct Event {
    /// The driver's handle.
    pub raw: Handle,
    /// Its command's queue; `None` for a user event.
    pub queue: Option<QueueId>,
    /// How its context was made.
    pub context: Arc<ContextRecord>,
    /// The status that has been set on a user event.
    pub decided: Option<i32>,
    /// Callbacks on a user event that have not been called: status and number of each.
    pub callbacks: Vec<(i32, u64)>,
    /// The profiling times of a command that completed in another process, by OpenCL's parameter names.
    pub times: Option<Vec<(u32, u64)>>,
}

impl Event {
    /// Whether the client decides it, and has not done so yet.
    pub fn is_undecided(&self) -> bool {
        self.queue.is_none() && self.decided.is_none()
    }
}

/// Stores the result of a creation in its table.
macro_rules! keep {
    ($table:expr, $id:expr, $made:expr) => {{
        let made = $made;
        let outcome = made.as_ref().map(|_| ()).map_err(|code| *code);
        $table.put($id.0, made);
        outcome
    }};
}
pub(crate) use keep;

/// Returns the object if the code is success.
pub(crate) fn made(raw: Handle, code: i32) -> Result<Handle, i32> {
    match (raw, code) {
        (0, 0) => Err(codes::OUT_OF_RESOURCES),
        (raw, 0) => Ok(raw),
        (_, code) => Err(code),
    }
}
