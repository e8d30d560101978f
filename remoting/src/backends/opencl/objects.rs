//! Shadow objects: what the driver made, and the call by which it can be made again.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    freed::End,
    kernels::Parameter,
    provenance::{ContextRecord, DeviceRecord, MemRecord},
    records::{Arguments, ProgramRecord},
    svm::Addresses,
};
use crate::{
    apis::opencl::{
        calls::{
            CreateBuffer, CreateImage, CreateQueue, CreateSampler, CreateSubBuffer, ImageShape,
            QueueId, SvmAlloc,
        },
        codes,
    },
    backends::opencl::driver::{
        api::{Api, Handle},
        cl,
    },
    wire::Blob,
};

/// A device.
#[derive(Debug)]
pub struct Device {
    /// The driver's handle.
    pub raw: Handle,
    /// Its platform's place in the list.
    pub platform: usize,
    /// Whether it has buffers in shared virtual memory.
    pub svm: bool,
    /// How it came to be.
    pub record: Arc<DeviceRecord>,
    /// Whether it stays with the driver for good.
    pub pinned: bool,
}

impl Device {
    /// A context is made on it: it stays with the driver for as long as this process. Contexts, queues
    /// and events of a part of a device use it to their end, and that is up to the driver, which may
    /// have them long after the application has released them and the part; PoCL 3.1 has no
    /// reference to it meanwhile, and crashes as it gives such a queue up. A part that no context was
    /// made on costs nothing once it is released; another one about 1 KiB.
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
    /// How it came to be.
    pub record: Arc<ContextRecord>,
    /// Its platform's place in the list.
    pub platform: usize,
    /// Whether one of its devices has buffers in shared virtual memory.
    pub svm: bool,
}

/// The context that an object was made in, which the driver keeps for as long as the object, as
/// calls about the object need it.
#[derive(Clone, Copy, Debug)]
pub struct Home {
    /// The driver's handle.
    pub raw: Handle,
    /// Its platform's place in the list.
    pub platform: usize,
    /// Whether one of its devices has buffers in shared virtual memory. Where none has, the
    /// functions for it may be missing: drivers from before OpenCL 2.0 have none.
    pub svm: bool,
}

impl Context {
    /// As its objects keep it.
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
    /// Whether its device has buffers in shared virtual memory.
    pub svm: bool,
    /// How it was made.
    pub made: CreateQueue,
    /// How its context came to be.
    pub context: Arc<ContextRecord>,
    /// How its device came to be.
    pub device: Arc<DeviceRecord>,
    /// What is known of the end of its commands.
    pub end: End,
    /// The first error of a command that nobody waited for, to be reported by who waits next.
    pub deferred: Option<i32>,
}

impl Queue {
    /// Whether it carries out its commands one after the other.
    pub fn in_order(&self) -> bool {
        self.made.properties & codes::QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE == 0
    }

    /// Whether it measures its commands.
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
    /// How it came to be.
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
    /// Bytes.
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
    /// How its context came to be.
    pub context: Arc<ContextRecord>,
}

/// A sampler.
#[derive(Debug)]
pub struct Sampler {
    /// The driver's handle.
    pub raw: Handle,
    /// How it was made.
    pub made: CreateSampler,
    /// How its context came to be.
    pub context: Arc<ContextRecord>,
}

/// A program.
#[derive(Debug)]
pub struct Program {
    /// The driver's handle.
    pub raw: Handle,
    /// Its context.
    pub home: Home,
    /// How it came to be.
    pub record: Arc<ProgramRecord>,
    /// Those that are under way.
    pub builds: Builds,
}

/// The builds of a program that are under way: each has a clone of this.
#[derive(Clone, Debug, Default)]
pub struct Builds(Arc<()>);

impl Builds {
    /// Whether there is one.
    pub fn any(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

/// A kernel.
#[derive(Debug)]
pub struct Kernel {
    /// The driver's handle.
    pub raw: Handle,
    /// Its program, as it was when the kernel was made, or the one that this is a clone of.
    pub program: Arc<ProgramRecord>,
    /// Its name there.
    pub name: Blob,
    /// The values of its arguments.
    pub arguments: Arguments,
    /// Its context.
    pub home: Home,
    /// Arguments whose last values the driver has refused, when nobody waited for that.
    pub refused: BTreeMap<u32, i32>,
    /// Arguments that are addresses in shared virtual memory.
    pub addresses: Addresses,
    /// What its arguments are, as far as the driver says.
    pub parameters: Arc<[Parameter]>,
}

/// An event.
#[derive(Debug)]
pub struct Event {
    /// The driver's handle.
    pub raw: Handle,
    /// Its command's queue; none for a user event.
    pub queue: Option<QueueId>,
    /// How its context came to be.
    pub context: Arc<ContextRecord>,
    /// The status that a user event has got.
    pub decided: Option<i32>,
    /// Callbacks that a user event waits for to call: at which status, and their numbers.
    pub callbacks: Vec<(i32, u64)>,
    /// The times of a command that has ended in another process, by the names that OpenCL has for
    /// them.
    pub times: Option<Vec<(u32, u64)>>,
}

impl Event {
    /// Whether the client decides it, and has not yet.
    pub fn is_undecided(&self) -> bool {
        self.queue.is_none() && self.decided.is_none()
    }
}

/// Puts what a creation made into its table.
macro_rules! keep {
    ($table:expr, $id:expr, $made:expr) => {{
        let made = $made;
        let outcome = made.as_ref().map(|_| ()).map_err(|code| *code);
        $table.put($id.0, made);
        outcome
    }};
}
pub(crate) use keep;

/// The object if the code is success.
pub(crate) fn made(raw: Handle, code: i32) -> Result<Handle, i32> {
    match (raw, code) {
        (0, 0) => Err(codes::OUT_OF_RESOURCES),
        (raw, 0) => Ok(raw),
        (_, code) => Err(code),
    }
}
