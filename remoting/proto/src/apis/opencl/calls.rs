//! Every call, once. The macro makes a struct, a number, an answer type and the decoder of each.
//!
//! Objects are named by numbers that the client chooses, a dense range per kind so that the
//! worker finds them by index. A call whose answer is `()` may be posted without waiting; its
//! error, if any, is then reported by the queue's next call that waits.

use alloc::vec::Vec;

pub use crate::wire::messages::{
    ANSWER, CALLBACK, Call, EventId, RELEASED, REPORT, StageId, WindowRange,
};
#[cfg(test)]
use crate::wire::{Malformed, Wire};
use crate::{
    apis::schema::calls,
    wire::{
        codec::{Blob, wire},
        messages::ids,
    },
};

ids! {
    /// A platform: its place in the answer to [`Platforms`].
    PlatformId
    /// A device: given by the worker, or by the client for a sub-device.
    DeviceId
    /// A context.
    ContextId
    /// A command queue.
    QueueId
    /// A buffer or image.
    MemId
    /// A sampler.
    SamplerId
    /// A program.
    ProgramId
    /// A kernel.
    KernelId
}

wire! {
    /// A device as the worker offers it.
    struct Offered {
        /// Its number.
        id: DeviceId,
        /// Its `CL_DEVICE_TYPE`.
        kind: u64,
    }

    /// What an application relies on: it was told so of a device that it was offered.
    struct Answered {
        /// Which device.
        device: DeviceId,
        /// Which `param_name` of `clGetDeviceInfo`.
        parameter: u32,
        /// The answer.
        answer: Blob,
    }

    /// What stands before and after each command in a queue.
    struct Order {
        /// The queue.
        queue: QueueId,
        /// Events that it waits for.
        wait: Vec<EventId>,
        /// The event that it becomes.
        event: Option<EventId>,
    }

    /// A file in one of the folders that a build's options have named.
    struct HeaderFile {
        /// Which folder, in their order.
        folder: u32,
        /// Its path in there, without steps up.
        name: Blob,
        /// What it contains.
        contents: Blob,
    }

    /// `cl_image_format` and `cl_image_desc`.
    struct ImageShape {
        /// `image_channel_order`.
        order: u32,
        /// `image_channel_data_type`.
        data: u32,
        /// `image_type`.
        kind: u32,
        /// Width, height and depth in pixels.
        extent: [u64; 3],
        /// `image_array_size`.
        layers: u64,
        /// `buffer` or `mem_object`.
        of: Option<MemId>,
    }
}

wire! { enum
    /// Of what information is wanted.
    Target {
        /// A platform.
        1 Platform(id: PlatformId),
        /// A device.
        2 Device(id: DeviceId),
        /// A context.
        3 Context(id: ContextId),
        /// A queue.
        4 Queue(id: QueueId),
        /// A buffer or image, by `clGetMemObjectInfo`.
        5 Mem(id: MemId),
        /// An image, by `clGetImageInfo`.
        6 Image(id: MemId),
        /// A sampler.
        7 Sampler(id: SamplerId),
        /// A program.
        8 Program(id: ProgramId),
        /// How a program was built for a device.
        9 Build(id: ProgramId, device: DeviceId),
        /// A kernel.
        10 Kernel(id: KernelId),
        /// A kernel on a device.
        11 WorkGroup(id: KernelId, device: Option<DeviceId>),
        /// An argument of a kernel.
        12 Argument(id: KernelId, index: u32),
        /// A kernel's sub-groups on a device for an input.
        13 SubGroup(id: KernelId, device: Option<DeviceId>, input: Blob),
        /// An event.
        14 Event(id: EventId),
        /// An event's times.
        15 Profiling(id: EventId),
        /// A device, for the application, which relies on the answer from then on.
        16 Relied(id: DeviceId),
    }
}

wire! { enum
    /// The value of a kernel's argument.
    Value {
        /// Plain bytes.
        1 Bytes(bytes: Blob),
        /// A buffer or image, or none.
        2 Mem(mem: Option<MemId>),
        /// A sampler.
        3 Sampler(sampler: SamplerId),
        /// So many bytes of local memory.
        4 Local(size: u64),
        /// An address in shared virtual memory, or none.
        5 Svm(address: Option<u64>),
    }
}

wire! { enum
    /// The work-items of a kernel, by dimension: how many, how many make a group if the caller has
    /// chosen that, and the first one's number if that is not zero.
    Grid {
        /// One dimension.
        1 Line(global: [u64; 1], local: Option<[u64; 1]>, offset: Option<[u64; 1]>),
        /// Two dimensions.
        2 Plane(global: [u64; 2], local: Option<[u64; 2]>, offset: Option<[u64; 2]>),
        /// Three dimensions.
        3 Space(global: [u64; 3], local: Option<[u64; 3]>, offset: Option<[u64; 3]>),
    }
}

impl Grid {
    /// So many work-items in one dimension, in groups of the driver's choice.
    pub fn line(size: u64) -> Self {
        Self::Line([size], None, None)
    }

    /// How many work-items, how many of them make a group, and the first one's number, by dimension.
    pub fn sizes(&self) -> (&[u64], Option<&[u64]>, Option<&[u64]>) {
        fn all<'a, const N: usize>(
            global: &'a [u64; N],
            local: &'a Option<[u64; N]>,
            offset: &'a Option<[u64; N]>,
        ) -> (&'a [u64], Option<&'a [u64]>, Option<&'a [u64]>) {
            let slice = |sizes: &'a Option<[u64; N]>| sizes.as_ref().map(|sizes| &sizes[..]);
            (global, slice(local), slice(offset))
        }
        match self {
            Self::Line(global, local, offset) => all(global, local, offset),
            Self::Plane(global, local, offset) => all(global, local, offset),
            Self::Space(global, local, offset) => all(global, local, offset),
        }
    }
}

wire! { enum
    /// What a kernel's argument is, found out once when the kernel is created.
    ArgumentKind {
        /// The driver does not say: the client decides by the value.
        0 Unknown(),
        /// Plain bytes.
        1 Bytes(),
        /// A buffer or image.
        2 Mem(),
        /// A sampler.
        3 Sampler(),
        /// Local memory.
        4 Local(),
    }
}

wire! { enum
    /// Where a program comes from.
    ProgramOrigin {
        /// Source text.
        1 Source(text: Blob),
        /// A binary for each device.
        2 Binary(binaries: Vec<(DeviceId, Blob)>),
        /// SPIR-V or the like.
        3 Il(il: Blob),
        /// Names of built-in kernels.
        4 BuiltIn(devices: Vec<DeviceId>, names: Blob),
    }
}

calls! {
    /// All platforms and their devices.
    10 Platforms {} -> Vec<Vec<Offered>>;
    /// What a `clGet...Info` returns.
    11 Info {
        /// Of what.
        of: Target,
        /// Which `param_name`.
        parameter: u32,
    } -> Blob;
    /// `clCreateSubDevices`; the answer says how many there are, the first of which got the ids.
    12 CreateSubDevices {
        /// Of which device.
        device: DeviceId,
        /// The properties, without the closing zero.
        properties: Vec<u64>,
        /// Ids for the sub-devices; empty to ask how many there would be.
        ids: Vec<DeviceId>,
    } -> u32;
    /// `clReleaseDevice` of a sub-device.
    13 ReleaseDevice { /** Which. */ id: DeviceId, } -> ();
    /// Device and host time in nanoseconds.
    14 Timers { /** Of which device. */ device: DeviceId, } -> (u64, u64);
    /// Whether the worker's devices have all that an application relies on which another one serves. What
    /// they lack, if not.
    15 CompareDevices { /** What it relies on. */ told: Vec<Answered>, } -> Blob;

    /// `clCreateContext`.
    20 CreateContext {
        /// Its id.
        id: ContextId,
        /// Its devices.
        devices: Vec<DeviceId>,
        /// Its platform, if a property names it.
        platform: Option<PlatformId>,
    } -> ();
    /// Releases a context.
    21 ReleaseContext { /** Which. */ id: ContextId, } -> ();
    /// `clGetSupportedImageFormats`: pairs of channel order and data type.
    22 ImageFormats {
        /// In which context.
        context: ContextId,
        /// `cl_mem_flags`.
        flags: u64,
        /// `cl_mem_object_type`.
        kind: u32,
    } -> Vec<(u32, u32)>;
    /// `clCreateCommandQueueWithProperties`, or `clCreateCommandQueue` if there are none but
    /// `CL_QUEUE_PROPERTIES`.
    23 CreateQueue {
        /// Its id.
        id: QueueId,
        /// In which context.
        context: ContextId,
        /// On which device.
        device: DeviceId,
        /// `CL_QUEUE_PROPERTIES`.
        properties: u64,
        /// Further properties, without the closing zero.
        further: Vec<u64>,
    } -> ();
    /// Releases a queue.
    24 ReleaseQueue { /** Which. */ id: QueueId, } -> ();

    /// `clCreateBuffer`.
    30 CreateBuffer {
        /// Its id.
        id: MemId,
        /// In which context.
        context: ContextId,
        /// `cl_mem_flags`, without those about host pointers.
        flags: u64,
        /// Size in bytes.
        size: u64,
        /// Its initial contents.
        contents: Option<WindowRange>,
        /// Where in the window it lives for good, in bytes from its start.
        lives: Option<u64>,
        /// Where in shared virtual memory it lives.
        svm: Option<u64>,
    } -> ();
    /// `clCreateSubBuffer`.
    31 CreateSubBuffer {
        /// Its id.
        id: MemId,
        /// Of which buffer.
        of: MemId,
        /// `cl_mem_flags`.
        flags: u64,
        /// Its first byte in the buffer.
        origin: u64,
        /// Size in bytes.
        size: u64,
    } -> ();
    /// `clCreateImage`.
    32 CreateImage {
        /// Its id.
        id: MemId,
        /// In which context.
        context: ContextId,
        /// `cl_mem_flags`, without those about host pointers.
        flags: u64,
        /// Format and shape.
        shape: ImageShape,
        /// Its initial contents.
        contents: Option<WindowRange>,
    } -> ();
    /// Releases a buffer or image. Its callback, if it has a number, is asked for when the
    /// object is gone.
    33 ReleaseMem { /** Which. */ id: MemId, /** Callback. */ callback: Option<u64>, } -> ();
    /// `clCreateSampler`.
    34 CreateSampler {
        /// Its id.
        id: SamplerId,
        /// In which context.
        context: ContextId,
        /// Whether coordinates are normalized.
        normalized: bool,
        /// `cl_addressing_mode`.
        addressing: u32,
        /// `cl_filter_mode`.
        filter: u32,
    } -> ();
    /// Releases a sampler.
    35 ReleaseSampler { /** Which. */ id: SamplerId, } -> ();
    /// `clSVMAlloc`: where it is. It begins where a page does, and has its pages for itself.
    36 SvmAlloc {
        /// In which context.
        context: ContextId,
        /// `cl_svm_mem_flags`.
        flags: u64,
        /// Size in bytes.
        size: u64,
        /// How many addresses before conflicted with mappings of the client, which still holds them.
        retries: u32,
    } -> u64;
    /// `clSVMFree`.
    37 SvmFree { /** Where it begins. */ address: u64, } -> ();

    /// `clCreateProgramWith...`: the status of each binary.
    40 CreateProgram {
        /// Its id.
        id: ProgramId,
        /// In which context.
        context: ContextId,
        /// What it is made from.
        origin: ProgramOrigin,
    } -> Vec<i32>;
    /// Releases a program.
    41 ReleaseProgram { /** Which. */ id: ProgramId, } -> ();
    /// `clBuildProgram`.
    42 BuildProgram {
        /// Which.
        id: ProgramId,
        /// For which devices; empty: all.
        devices: Vec<DeviceId>,
        /// Options, without folders of headers.
        options: Blob,
        /// How many such folders there are.
        folders: u32,
        /// What is in them.
        included: Vec<HeaderFile>,
    } -> ();
    /// `clCompileProgram`.
    43 CompileProgram {
        /// Which.
        id: ProgramId,
        /// For which devices; empty: all.
        devices: Vec<DeviceId>,
        /// Options, without folders of headers.
        options: Blob,
        /// How many such folders there are.
        folders: u32,
        /// What is in them.
        included: Vec<HeaderFile>,
        /// Headers and the names under which they are included.
        headers: Vec<(ProgramId, Blob)>,
    } -> ();
    /// `clLinkProgram`: its code, and whether there is a program all the same.
    44 LinkProgram {
        /// The id of the program that it makes.
        id: ProgramId,
        /// In which context.
        context: ContextId,
        /// For which devices; empty: all.
        devices: Vec<DeviceId>,
        /// Options.
        options: Blob,
        /// What is linked.
        inputs: Vec<ProgramId>,
    } -> (i32, bool);
    /// `CL_PROGRAM_BINARIES`.
    45 ProgramBinaries { /** Which. */ id: ProgramId, } -> Vec<Blob>;
    /// `clSetProgramSpecializationConstant`.
    46 Specialize {
        /// Which program.
        id: ProgramId,
        /// The constant.
        constant: u32,
        /// Its value.
        value: Blob,
    } -> ();
    /// `clCreateKernel`: what its arguments are.
    47 CreateKernel {
        /// Its id.
        id: KernelId,
        /// In which program.
        program: ProgramId,
        /// Its name.
        name: Blob,
    } -> Vec<ArgumentKind>;
    /// `clCloneKernel`.
    48 CloneKernel { /** The clone's id. */ id: KernelId, /** Of which. */ of: KernelId, } -> ();
    /// Releases a kernel.
    49 ReleaseKernel { /** Which. */ id: KernelId, } -> ();
    /// `clSetKernelArg`.
    50 SetArgument {
        /// Of which kernel.
        kernel: KernelId,
        /// Which.
        index: u32,
        /// Its value.
        value: Value,
    } -> ();
    /// `clSetKernelExecInfo` with `CL_KERNEL_EXEC_INFO_SVM_PTRS`.
    51 SvmPointers {
        /// Of which kernel.
        kernel: KernelId,
        /// What it uses beside its arguments.
        addresses: Vec<u64>,
    } -> ();

    /// `clCreateUserEvent`.
    60 CreateUserEvent { /** Its id. */ id: EventId, /** Where. */ context: ContextId, } -> ();
    /// `clSetUserEventStatus`.
    61 SetUserEventStatus { /** Which. */ id: EventId, /** To what. */ status: i32, } -> ();
    /// Releases an event.
    62 ReleaseEvent { /** Which. */ id: EventId, } -> ();
    /// `clWaitForEvents`.
    63 WaitForEvents { /** Which. */ events: Vec<EventId>, } -> ();
    /// `clSetEventCallback`: asks for the callback of this number.
    64 SetEventCallback {
        /// Of which event.
        id: EventId,
        /// At which status.
        at: i32,
        /// The callback's number.
        callback: u64,
    } -> ();
    /// `clFlush`.
    65 Flush { /** Which. */ queue: QueueId, } -> ();
    /// `clFinish`.
    66 Finish { /** Which. */ queue: QueueId, } -> ();
    /// Waits until the command that uses a stage has completed.
    67 Await { /** Which. */ stage: StageId, } -> ();

    /// `clEnqueueNDRangeKernel`.
    70 NdRange {
        /// Order.
        order: Order,
        /// Which kernel.
        kernel: KernelId,
        /// Which work-items.
        grid: Grid,
    } -> ();
    /// `clEnqueueReadBuffer` into the window.
    71 ReadBuffer {
        /// Order.
        order: Order,
        /// From which buffer.
        mem: MemId,
        /// From which byte on.
        offset: u64,
        /// To where.
        to: WindowRange,
    } -> ();
    /// `clEnqueueWriteBuffer` from the window.
    72 WriteBuffer {
        /// Order.
        order: Order,
        /// To which buffer.
        mem: MemId,
        /// From which byte on.
        offset: u64,
        /// From where.
        from: WindowRange,
    } -> ();
    /// `clEnqueueReadBufferRect` or `clEnqueueWriteBufferRect`; the window's side is tight.
    73 BufferRect {
        /// Order.
        order: Order,
        /// Which buffer.
        mem: MemId,
        /// Whether it is written (or else read).
        write: bool,
        /// Origin in the buffer.
        origin: [u64; 3],
        /// Extent: bytes, rows, slices.
        region: [u64; 3],
        /// Row and slice pitch of the buffer.
        pitches: [u64; 2],
        /// The window's side.
        place: WindowRange,
    } -> ();
    /// `clEnqueueReadImage` or `clEnqueueWriteImage`; the window's side is tight.
    74 ImageRect {
        /// Order.
        order: Order,
        /// Which image.
        mem: MemId,
        /// Whether it is written (or else read).
        write: bool,
        /// Origin in the image.
        origin: [u64; 3],
        /// Extent.
        region: [u64; 3],
        /// The window's side.
        place: WindowRange,
    } -> ();
    /// `clEnqueueCopyBuffer`.
    75 CopyBuffer {
        /// Order.
        order: Order,
        /// From.
        from: MemId,
        /// To.
        to: MemId,
        /// Offsets of both.
        offsets: [u64; 2],
        /// Bytes.
        size: u64,
    } -> ();
    /// `clEnqueueCopyBufferRect`.
    76 CopyBufferRect {
        /// Order.
        order: Order,
        /// From.
        from: MemId,
        /// To.
        to: MemId,
        /// Origins of both.
        origins: [[u64; 3]; 2],
        /// Extent.
        region: [u64; 3],
        /// Row and slice pitches of both.
        pitches: [[u64; 2]; 2],
    } -> ();
    /// `clEnqueueCopyImage`.
    77 CopyImage {
        /// Order.
        order: Order,
        /// From.
        from: MemId,
        /// To.
        to: MemId,
        /// Origins of both.
        origins: [[u64; 3]; 2],
        /// Extent.
        region: [u64; 3],
    } -> ();
    /// `clEnqueueCopyImageToBuffer`.
    78 CopyImageToBuffer {
        /// Order.
        order: Order,
        /// From.
        image: MemId,
        /// To.
        buffer: MemId,
        /// Origin in the image.
        origin: [u64; 3],
        /// Extent.
        region: [u64; 3],
        /// Offset in the buffer.
        offset: u64,
    } -> ();
    /// `clEnqueueCopyBufferToImage`.
    79 CopyBufferToImage {
        /// Order.
        order: Order,
        /// From.
        buffer: MemId,
        /// To.
        image: MemId,
        /// Offset in the buffer.
        offset: u64,
        /// Origin in the image.
        origin: [u64; 3],
        /// Extent.
        region: [u64; 3],
    } -> ();
    /// `clEnqueueFillBuffer`.
    80 FillBuffer {
        /// Order.
        order: Order,
        /// Which buffer.
        mem: MemId,
        /// The pattern.
        pattern: Blob,
        /// First byte.
        offset: u64,
        /// Bytes.
        size: u64,
    } -> ();
    /// `clEnqueueFillImage`.
    81 FillImage {
        /// Order.
        order: Order,
        /// Which image.
        mem: MemId,
        /// The colour: four times 32 bits.
        colour: [u32; 4],
        /// Origin.
        origin: [u64; 3],
        /// Extent.
        region: [u64; 3],
    } -> ();
    /// `clEnqueueMigrateMemObjects`.
    82 Migrate {
        /// Order.
        order: Order,
        /// Which.
        mems: Vec<MemId>,
        /// `cl_mem_migration_flags`.
        flags: u64,
    } -> ();
    /// `clEnqueueMarkerWithWaitList`.
    83 Marker { /** Order. */ order: Order, } -> ();
    /// `clEnqueueBarrierWithWaitList`.
    84 Barrier { /** Order. */ order: Order, } -> ();
    /// `clEnqueueMapBuffer` of a buffer that lives in the window.
    85 Map {
        /// Order.
        order: Order,
        /// Which.
        mem: MemId,
        /// `cl_map_flags`.
        flags: u64,
        /// First byte.
        offset: u64,
        /// Bytes.
        size: u64,
    } -> ();
    /// `clEnqueueUnmapMemObject` of the oldest mapping that begins at this byte.
    86 Unmap { /** Order. */ order: Order, /** Which. */ mem: MemId, /** Where. */ offset: u64, } -> ();
    /// A marker that frees a stage when all before it is over.
    87 Unstage { /** Order. */ order: Order, /** The stage. */ place: WindowRange, } -> ();
    /// Reads shared virtual memory into the window.
    88 SvmRead {
        /// Order.
        order: Order,
        /// From where.
        address: u64,
        /// To where.
        to: WindowRange,
    } -> ();
    /// Writes shared virtual memory from the window.
    89 SvmWrite {
        /// Order.
        order: Order,
        /// To where.
        address: u64,
        /// From where.
        from: WindowRange,
    } -> ();
    /// `clEnqueueSVMMemcpy` within shared virtual memory.
    90 SvmCopy {
        /// Order.
        order: Order,
        /// From.
        from: u64,
        /// To.
        to: u64,
        /// Bytes.
        size: u64,
    } -> ();
    /// `clEnqueueSVMMemFill`.
    91 SvmFill {
        /// Order.
        order: Order,
        /// From where on.
        address: u64,
        /// The pattern.
        pattern: Blob,
        /// Bytes.
        size: u64,
    } -> ();
    /// `clEnqueueSVMMigrateMem`.
    92 SvmMigrate {
        /// Order.
        order: Order,
        /// Addresses and bytes; none: all of what lies there.
        ranges: Vec<(u64, u64)>,
        /// `cl_mem_migration_flags`.
        flags: u64,
    } -> ();

    /// Waits until nothing is under way, and saves the application's state: how many bytes the
    /// image has; or none, and why it cannot be saved. Where more than `most` bytes of memory objects were
    /// made since the last round, it is not saved: the answer is how many, and that they are too many.
    93 SaveState {
        /// Milliseconds to wait at most.
        patience: u64,
        /// How many rounds of it have been copied: the image has what is new since.
        rounds: u32,
        /// How many bytes of memory objects may have been made since.
        most: u64,
    } -> (u64, Blob);
    /// Reads a part of the saved image into the window. Why not, if not.
    94 ReadState { /** First byte. */ at: u64, /** To where. */ to: WindowRange, } -> Blob;
    /// Writes a part of the image that is to be restored from the window. Why not, if not.
    95 WriteState { /** First byte. */ at: u64, /** From where. */ from: WindowRange, } -> Blob;
    /// Makes the state again that the written image has, in place of an application that has no
    /// objects but those of rounds. Why not, if not; the worker ends then.
    96 RestoreState {} -> Blob;
    /// Saves what of the state is new since the last round, while other calls are carried out. The
    /// answer as that of `SaveState`.
    97 PrecopyState { /** The round's number; the first, 0, begins anew. */ round: u32, } -> (u64, Blob);
    /// Makes what the written image has, which is a round: more is to come, and no other call before
    /// the whole is restored. Why not, if not; the worker ends then.
    98 PrepareState {} -> Blob;
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_unknown_number_is_refused() {
        assert!(matches!(
            Request::decode(0xffff, &[]),
            Err(Malformed::Tag { tag: 0xffff, .. })
        ));
    }

    #[test]
    fn a_call_is_decoded_as_it_was_encoded() {
        let call = NdRange {
            order: Order {
                queue: QueueId(3),
                wait: vec![EventId(1), EventId(9)],
                event: Some(EventId(10)),
            },
            kernel: KernelId(4),
            grid: Grid::Plane([64, 32], Some([8, 8]), None),
        };
        let mut bytes = Vec::new();
        call.put(&mut bytes);
        assert_eq!(
            Request::decode(NdRange::OPCODE, &bytes),
            Ok(Request::NdRange(call))
        );
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_call_or_malformed(
            opcode in 0u16..100,
            bytes in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            // What is decoded has exactly one form: it is what the bytes were, up to booleans.
            if let Ok(request) = Request::decode(opcode, &bytes) {
                let text = format!("{request:?}");
                prop_assert!(!text.is_empty());
            }
        }
    }
}
