//! Requests that both sides treat by themselves. Whose answer is `()` may be posted; its error is then
//! told by the context's next call that waits.
//!
//! Objects are named by the numbers that the worker has given them, in a [`u32`]: 0 is none, and
//! [`LEGACY`](super::LEGACY) the legacy stream. Addresses are the device's. Sizes are bytes.

use alloc::vec::Vec;

use crate::{
    apis::schema::calls,
    wire::{
        codec::{Blob, wire},
        messages::{StageId, WindowRange},
    },
};

wire! {
    /// A device.
    struct DeviceInfo {
        /// `cuDeviceGetName`, without a zero.
        name: Blob,
        /// `cuDeviceGetUuid`.
        uuid: [u8; 16],
        /// `cuDeviceTotalMem`, or the quota if that is less.
        memory: u64,
        /// `cuDeviceGetPCIBusId`, without a zero.
        bus: Blob,
        /// `cuDeviceGetAttribute`, by number; those that the driver does not know are `i32::MIN`.
        attributes: Vec<i32>,
    }

    /// What the worker has.
    struct Started {
        /// `cuDriverGetVersion`.
        version: u32,
        /// Where the worker has the window, which is where the device has it.
        window: u64,
        /// All devices, in order.
        devices: Vec<DeviceInfo>,
    }

    /// What became of an image.
    struct Loaded {
        /// A `CUresult`.
        code: i32,
        /// The module's or library's number.
        id: u32,
        /// What the compiler says.
        information: Blob,
        /// What it says of errors.
        errors: Blob,
    }

    /// What a launch has to know of a kernel.
    struct KernelInfo {
        /// Offset and size of each parameter.
        parameters: Vec<(u32, u32)>,
        /// Its name, without a zero.
        name: Blob,
        /// The most threads of a block.
        threads: i32,
    }

    /// A stream's capture.
    struct Captured {
        /// A `CUstreamCaptureStatus`: what follows is of an active one alone.
        status: u32,
        /// Its number.
        id: u64,
        /// The graph that it makes.
        graph: u32,
        /// The nodes that come before what is captured next.
        after: Vec<u32>,
        /// A `CUgraphEdgeData` of 8 bytes for each.
        edges: Blob,
    }

    /// How many threads.
    struct Shape {
        /// Blocks.
        grid: [u32; 3],
        /// Threads of a block.
        block: [u32; 3],
        /// Dynamic shared memory of a block.
        shared: u32,
    }
}

wire! { enum
    /// From where memory comes.
    Source {
        /// `cuMemAlloc`.
        0 Device(),
        /// `cuMemAllocAsync`, in the order of a stream.
        1 Stream(stream: u32),
        /// `cuMemAllocFromPoolAsync`: stream and pool.
        2 Pool(stream: u32, pool: u32),
    }
}

wire! { enum
    /// When a function of the client is called.
    FunctionTurn {
        /// As by `cuLaunchHostFunc`: only where no work has failed.
        0 Intact(),
        /// As by `cuStreamAddCallback`: in any case, with the result.
        1 Always(),
        /// It copies the client's memory and waits for nothing: in any case, with the result, and whatever other functions
        /// wait for.
        2 Copy(),
    }
}

wire! { enum
    /// One side of a copy of rows and planes.
    Side {
        /// Memory of the device: where, bytes from one row to the next, rows from one plane to the next.
        0 Memory(at: u64, pitch: u64, height: u64),
        /// An array: which, and where the part begins: bytes in a row, row, plane.
        1 Array(array: u32, x: u64, y: u64, z: u64),
        /// A stretch of the window, without gaps.
        2 Window(place: WindowRange),
    }
}

calls! {
    /// The first request.
    16 Start {} -> Started;
    /// `cuGetErrorString`.
    17 Describe { /** The error. */ error: i32, } -> Blob;
    /// An entry point of [`forwarded`](super::forwarded), whose answer holds what it has written.
    18 Forward {
        /// The current context.
        context: u32,
        /// Its number in the list.
        function: u16,
        /// As `plan` encodes them.
        arguments: Blob,
    } -> Blob;
    /// The same of one that writes nothing.
    19 Post {
        /// The current context.
        context: u32,
        /// Its number in the list.
        function: u16,
        /// As `plan` encodes them.
        arguments: Blob,
    } -> ();
    /// Device memory: its address.
    20 Allocate {
        /// The current context.
        context: u32,
        /// Bytes.
        size: u64,
        /// From where.
        source: Source,
    } -> u64;
    /// `cuMemAllocPitch`: address and pitch.
    21 AllocatePitch {
        /// The current context.
        context: u32,
        /// Bytes of a row.
        width: u64,
        /// Rows.
        height: u64,
        /// Bytes of the largest element.
        element: u32,
    } -> (u64, u64);
    /// `cuMemFree`, or `cuMemFreeAsync` in the order of a stream.
    22 Free {
        /// The current context.
        context: u32,
        /// Where.
        address: u64,
        /// In which stream.
        stream: Option<u32>,
    } -> ();
    /// `cuMemGetInfo`: free and all, as far as the quota lets it.
    23 MemoryInfo { /** The current context. */ context: u32, } -> (u64, u64);
    /// Has the device know a stretch of the window; its address on the device.
    24 Pin {
        /// The current context.
        context: u32,
        /// Bytes from the start of the window.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Refused (`CUDA_ERROR_NOT_SUPPORTED`) where the driver would know it in parts only: nodes of graphs can
        /// copy to and from no such memory.
        whole: bool,
    } -> u64;
    /// Copies from the window to the device.
    25 Write {
        /// The current context.
        context: u32,
        /// In which stream.
        stream: u32,
        /// To where.
        to: u64,
        /// From where.
        from: WindowRange,
    } -> ();
    /// Copies from the device to the window.
    26 Read {
        /// The current context.
        context: u32,
        /// In which stream.
        stream: u32,
        /// From where.
        from: u64,
        /// To where.
        to: WindowRange,
    } -> ();
    /// Copies on the device.
    27 Copy {
        /// The current context.
        context: u32,
        /// In which stream.
        stream: u32,
        /// To where.
        to: u64,
        /// From where.
        from: u64,
        /// Bytes.
        size: u64,
    } -> ();
    /// Fills rows of memory.
    28 Fill {
        /// The current context.
        context: u32,
        /// In which stream.
        stream: u32,
        /// Where.
        at: u64,
        /// With what, in its low bits.
        value: u32,
        /// Bytes of the value: 1, 2 or 4.
        width: u8,
        /// Values of a row.
        count: u64,
        /// Bytes from one row's start to the next one's.
        pitch: u64,
        /// Rows.
        rows: u64,
    } -> ();
    /// Copies a rectangle on the device, row by row.
    29 CopyRows {
        /// The current context.
        context: u32,
        /// In which stream.
        stream: u32,
        /// To where, and bytes from one row's start to the next one's.
        to: (u64, u64),
        /// The same of where it comes from.
        from: (u64, u64),
        /// Bytes of a row.
        width: u64,
        /// Rows.
        rows: u64,
    } -> ();
    /// Loads an image: what became of it.
    30 Load {
        /// The current context.
        context: u32,
        /// The image, as it was given; PTX with its zero.
        image: Blob,
        /// A library, which belongs to no context, and not a module.
        library: bool,
        /// Options of the compiler that are numbers.
        options: Vec<(u32, u64)>,
        /// How long the two texts may be.
        room: (u32, u32),
    } -> Loaded;
    /// What a launch has to know of a function or kernel.
    31 Examine { /** The current context. */ context: u32, /** Which. */ function: u32, } -> KernelInfo;
    /// Launches a kernel.
    32 Launch {
        /// The current context.
        context: u32,
        /// In which stream.
        stream: u32,
        /// Function or kernel.
        function: u32,
        /// How many threads.
        shape: Shape,
        /// All threads run at the same time.
        cooperative: bool,
        /// `CUlaunchAttribute`s, 72 bytes each, with events by their numbers.
        attributes: Blob,
        /// The parameters' bytes.
        parameters: Blob,
    } -> ();
    /// Waits for a stream.
    33 StreamSynchronize { /** The current context. */ context: u32, /** Which. */ stream: u32, } -> ();
    /// Waits for all streams of a context.
    34 ContextSynchronize {
        /// The current context.
        context: u32,
        /// Beside captures, waits for streams that are not captured, as far as this leaves the captures valid, and
        /// answers `NOT_READY`, and leaves the error of a refused call to the next wait of the context. Otherwise the driver
        /// decides what happens to the captures.
        spares_captures: bool,
    } -> ();
    /// Waits for an event.
    35 EventSynchronize { /** The current context. */ context: u32, /** Which. */ event: u32, } -> ();
    /// Has the client call a function of its own in the order of a stream, which goes on when the
    /// client has set the word.
    36 HostFunction {
        /// The current context.
        context: u32,
        /// In which stream.
        stream: u32,
        /// The client's number of it.
        number: u64,
        /// A word of 32 bits, from the start of the window: 1 when the function has returned, then 2 when the client may
        /// use it again; 3 if the client is to copy at once.
        done: u64,
        /// The stream is being captured: each launch of the graph calls it. As of [`AddHostNode`].
        lasting: bool,
        /// When it is called.
        turn: FunctionTurn,
    } -> ();
    /// Launches a graph.
    37 LaunchGraph {
        /// The current context.
        context: u32,
        /// In which stream.
        stream: u32,
        /// Which.
        graph: u32,
    } -> ();
    /// Waits until a stage is released.
    38 Await { /** Which. */ stage: StageId, } -> ();
    /// Adds a kernel to a graph: the node's number.
    39 AddKernelNode {
        /// The current context.
        context: u32,
        /// To which graph.
        graph: u32,
        /// After which nodes.
        after: Vec<u32>,
        /// Function or kernel.
        function: u32,
        /// How many threads.
        shape: Shape,
        /// The parameters' bytes.
        parameters: Blob,
    } -> u32;
    /// Changes the kernel of a node, in an executable graph or in the graph itself (0).
    40 SetKernelNode {
        /// The current context.
        context: u32,
        /// The executable graph, if any.
        executable: u32,
        /// Which node.
        node: u32,
        /// Function or kernel.
        function: u32,
        /// How many threads.
        shape: Shape,
        /// The parameters' bytes.
        parameters: Blob,
    } -> ();
    /// `cuOccupancyMaxActiveClusters`, or, if it is asked for, `cuOccupancyMaxPotentialClusterSize`.
    41 Clusters {
        /// The current context.
        context: u32,
        /// Function or kernel.
        function: u32,
        /// How many threads.
        shape: Shape,
        /// As for a launch.
        attributes: Blob,
        /// The size, and not the count.
        potential: bool,
    } -> i32;
    /// Enumerates functions of a module or kernels of a library: their numbers.
    42 Enumerate {
        /// The current context.
        context: u32,
        /// Which module or library.
        of: u32,
        /// How many at most.
        most: u32,
    } -> Vec<u32>;
    /// Links images, each with its `CUjitInputType` and name: the linked one, or what became of it.
    43 Link {
        /// The current context.
        context: u32,
        /// The images.
        inputs: Vec<Input>,
        /// Options of the linker that are numbers.
        options: Vec<(u32, u64)>,
        /// How long the two texts may be.
        room: (u32, u32),
    } -> Linked;
    /// A function of a library above the driver: what it has written. See
    /// [`libraries`](super::libraries).
    44 Library {
        /// The current context.
        context: u32,
        /// Which library.
        library: u8,
        /// Its number among those that are served.
        function: u16,
        /// As `plan` encodes them.
        arguments: Blob,
    } -> Blob;
    /// The same of one that writes nothing.
    45 PostLibrary {
        /// The current context.
        context: u32,
        /// Which library.
        library: u8,
        /// Its number among those that are served.
        function: u16,
        /// As `plan` encodes them.
        arguments: Blob,
    } -> ();
    /// Copies rows and planes between arrays, memory and the window, of which one side is at most.
    46 CopyVolume {
        /// The current context.
        context: u32,
        /// In which stream.
        stream: u32,
        /// To where.
        to: Side,
        /// From where.
        from: Side,
        /// Bytes of a row, rows, planes: none is zero.
        size: [u64; 3],
    } -> ();
    /// Adds such a copy to a graph: the node's number.
    47 AddCopyNode {
        /// The current context.
        context: u32,
        /// To which graph.
        graph: u32,
        /// After which nodes.
        after: Vec<u32>,
        /// To where.
        to: Side,
        /// From where.
        from: Side,
        /// As of [`CopyVolume`].
        size: [u64; 3],
    } -> u32;
    /// Changes the copy of a node, in an executable graph or in the graph itself (0).
    48 SetCopyNode {
        /// The current context.
        context: u32,
        /// The executable graph, if any.
        executable: u32,
        /// Which node.
        node: u32,
        /// To where.
        to: Side,
        /// From where.
        from: Side,
        /// As of [`CopyVolume`].
        size: [u64; 3],
    } -> ();
    /// Has the device write a value to a word of the window when it has done what a stream has so far.
    /// Where that would not say all that a wait says, the worker writes the value, or
    /// [`NEVER`](super::NEVER), to the word behind it, and the client waits by a request.
    49 Signal {
        /// The current context.
        context: u32,
        /// Which stream; none for all of the context.
        stream: Option<u32>,
        /// Two words of 32 bits, from the start of the window; a multiple of 8.
        words: u64,
        /// Neither 0 nor [`NEVER`](super::NEVER).
        value: u32,
    } -> ();
    /// Adds a function of the client's to a graph: the node's number. It is called with each launch, as
    /// of [`HostFunction`], and once with [`FUNCTION_GONE`](super::codes::FUNCTION_GONE) when no graph
    /// has it any more.
    50 AddHostNode {
        /// The current context.
        context: u32,
        /// To which graph.
        graph: u32,
        /// After which nodes.
        after: Vec<u32>,
        /// The client's number of it.
        number: u64,
        /// As of [`HostFunction`].
        done: u64,
    } -> u32;
    /// Changes the function of a node, in an executable graph or in the graph itself (0).
    51 SetHostNode {
        /// The current context.
        context: u32,
        /// The executable graph, if any.
        executable: u32,
        /// Which node.
        node: u32,
        /// The client's number of it.
        number: u64,
        /// As of [`HostFunction`].
        done: u64,
    } -> ();
    /// Adds an allocation of the context's device to a graph: the node's number, and the address.
    52 AddAllocNode {
        /// The current context.
        context: u32,
        /// To which graph.
        graph: u32,
        /// After which nodes.
        after: Vec<u32>,
        /// Bytes.
        size: u64,
    } -> (u32, u64);
    /// Adds the end of an allocation to a graph: the node's number.
    53 AddFreeNode {
        /// The current context.
        context: u32,
        /// To which graph.
        graph: u32,
        /// After which nodes.
        after: Vec<u32>,
        /// Where.
        address: u64,
    } -> u32;
    /// Adds a conditional node to a graph: its number, and those of its own graphs.
    54 AddConditionalNode {
        /// The current context.
        context: u32,
        /// To which graph.
        graph: u32,
        /// After which nodes.
        after: Vec<u32>,
        /// The graph's `CUgraphConditionalHandle`.
        handle: u64,
        /// A `CUgraphConditionalNodeType`.
        kind: u32,
        /// How many graphs of its own.
        size: u32,
    } -> (u32, Vec<u32>);
    /// `cuStreamGetCaptureInfo`.
    55 CaptureInfo { /** The current context. */ context: u32, /** Which. */ stream: u32, } -> Captured;
    /// `cuUserObjectCreate`: the client is called back, once and with
    /// [`FUNCTION_GONE`](super::codes::FUNCTION_GONE), when neither it nor a graph has a reference any more.
    56 CreateUserObject {
        /// The client's number of it, and of the callback.
        number: u64,
        /// How many references the client has.
        count: u32,
    } -> ();
    /// Has the client (0) or a graph have more references to a user object.
    57 RetainUserObject {
        /// Which graph, if any.
        graph: u32,
        /// The client's number of the object.
        number: u64,
        /// How many more.
        count: u32,
        /// Whether the graph's are the client's from before.
        moves: bool,
    } -> ();
    /// Has the client (0) or a graph have fewer references to a user object.
    58 ReleaseUserObject {
        /// Which graph, if any.
        graph: u32,
        /// The client's number of the object.
        number: u64,
        /// How many fewer.
        count: u32,
    } -> ();
    /// The device of memory of the client's: its ordinal.
    59 PointerDevice { /** Where. */ address: u64, } -> i32;
    /// Before the first context: the client's devices are these of the devices that the worker has offered, in this
    /// order.
    60 Select { /** Places in the list, each at most once. */ devices: Vec<u32>, } -> ();
}

wire! {
    /// An image to link.
    struct Input {
        /// Its `CUjitInputType`.
        kind: u32,
        /// Its name, without a zero.
        name: Blob,
        /// The image.
        data: Blob,
    }

    /// What became of images that were to be linked.
    struct Linked {
        /// A `CUresult`.
        code: i32,
        /// The image.
        image: Blob,
        /// What the linker says.
        information: Blob,
        /// What it says of errors.
        errors: Blob,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::{Wire, messages::Call};

    #[test]
    fn a_launch_is_decoded_as_it_was_encoded() {
        let call = Launch {
            context: 16,
            stream: 1,
            function: 20,
            shape: Shape {
                grid: [4, 1, 1],
                block: [256, 1, 1],
                shared: 0,
            },
            cooperative: false,
            attributes: Blob::default(),
            parameters: Blob(vec![1, 2, 3, 4]),
        };
        let mut bytes = Vec::new();
        call.put(&mut bytes);
        assert_eq!(
            Request::decode(Launch::OPCODE, &bytes),
            Ok(Request::Launch(call))
        );
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_call_or_malformed(
            opcode in 0u16..62,
            bytes in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            if let Ok(request) = Request::decode(opcode, &bytes) {
                let text = format!("{request:?}");
                prop_assert!(!text.is_empty());
            }
        }
    }
}
