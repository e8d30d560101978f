//! Entry points whose parameters are marshalled by the API's definition: translates, checks and calls them.

use std::sync::Arc;

use cuda_definition::driver::types::{
    CUDA_MEMSET_NODE_PARAMS, CUgraphExecUpdateResultInfo, CUmemAccessDesc,
    CUmemAllocationHandleType_enum, CUmemAllocationProp, CUmemAllocationType, CUmemLocation,
    CUmemLocationType, CUmemPoolProps,
};
use remoting_proto::{
    apis::cuda::{
        Kind, codes,
        forwarded::{ALL, number},
        plan::{Argument, Element, Parameter, Plan},
    },
    wire::{Blob, Wire},
};
use remoting_session::{backend::Fences, quota::Charge};

use super::{
    Server, backend::is_legacy, driver::outcome, effects::Call, instances::Cost,
    launches::is_plain, textures::Texture,
};

/// Maximum number of contexts at a time: each takes some hundred MiB of the device's memory, which no quota accounts
/// for.
const MOST_CONTEXTS: usize = 16;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`
const RELAXED: u64 = 2;

/// Maximum number of graphs' handles for conditional nodes.
const MOST_CONDITIONALS: usize = 1 << 16;

macro_rules! numbers {
    ($($name:ident = $symbol:literal;)*) => { $(pub(super) const $name: u16 = number($symbol);)* };
}
numbers! {
    RETAIN = "cuDevicePrimaryCtxRetain";
    RELEASE = "cuDevicePrimaryCtxRelease_v2";
    RESET = "cuDevicePrimaryCtxReset_v2";
    CREATE = "cuCtxCreate_v2";
    DESTROY = "cuCtxDestroy_v2";
    SET_LIMIT = "cuCtxSetLimit";
    MODULE_UNLOAD = "cuModuleUnload";
    LIBRARY_UNLOAD = "cuLibraryUnload";
    MODULE_GLOBAL = "cuModuleGetGlobal_v2";
    LIBRARY_GLOBAL = "cuLibraryGetGlobal";
    LIBRARY_MANAGED = "cuLibraryGetManaged";
    STREAM_DESTROY = "cuStreamDestroy_v2";
    EVENT_DESTROY = "cuEventDestroy_v2";
    GRAPH_DESTROY = "cuGraphDestroy";
    NODE_DESTROY = "cuGraphDestroyNode";
    EXECUTABLE_DESTROY = "cuGraphExecDestroy";
    INSTANTIATE = "cuGraphInstantiateWithFlags";
    CONDITIONAL_CREATE = "cuGraphConditionalHandleCreate";
    POOL_DESTROY = "cuMemPoolDestroy";
    MEMORY_CREATE = "cuMemCreate";
    MEMORY_RETAIN = "cuMemRetainAllocationHandle";
    MEMORY_RELEASE = "cuMemRelease";
    MAP = "cuMemMap";
    UNMAP = "cuMemUnmap";
    BEGIN_CAPTURE = "cuStreamBeginCapture_v2";
    BEGIN_CAPTURE_TO = "cuStreamBeginCaptureToGraph";
    END_CAPTURE = "cuStreamEndCapture";
    WRITE_32 = "cuStreamWriteValue32_v2";
    WRITE_64 = "cuStreamWriteValue64_v2";
    WAIT_32 = "cuStreamWaitValue32_v2";
    WAIT_64 = "cuStreamWaitValue64_v2";
    STREAM_ATTRIBUTE = "cuStreamSetAttribute";
    NODE_ATTRIBUTE = "cuGraphKernelNodeSetAttribute";
    RECORD = "cuEventRecord";
    RECORD_FLAGS = "cuEventRecordWithFlags";
    WAIT_EVENT = "cuStreamWaitEvent";
    EVENT_QUERY = "cuEventQuery";
    STREAM_QUERY = "cuStreamQuery";
    EVENT_CREATE = "cuEventCreate";
    STREAM_CONTEXT = "cuStreamGetCtx";
    ARRAY_CREATE = "cuArrayCreate_v2";
    ARRAY_CREATE_3D = "cuArray3DCreate_v2";
    ARRAY_DESTROY = "cuArrayDestroy";
    MIPMAP_CREATE = "cuMipmappedArrayCreate";
    MIPMAP_DESTROY = "cuMipmappedArrayDestroy";
    TEXTURE_CREATE = "cuTexObjectCreate";
    TEXTURE_DESTROY = "cuTexObjectDestroy";
    SURFACE_CREATE = "cuSurfObjectCreate";
    SURFACE_DESTROY = "cuSurfObjectDestroy";
}

/// Whether the driver never waits for work in this entry point.
pub(super) fn returns_at_once(function: u16) -> bool {
    matches!(
        function,
        RECORD
            | RECORD_FLAGS
            | WAIT_EVENT
            | EVENT_QUERY
            | STREAM_QUERY
            | EVENT_CREATE
            | EVENT_DESTROY
            | STREAM_CONTEXT
            | WRITE_32
            | WRITE_64
            | WAIT_32
            | WAIT_64
    )
}

/// Whether an entry point submits something to the stream that is among its parameters.
fn submits(function: u16) -> bool {
    matches!(
        function,
        RECORD | RECORD_FLAGS | WAIT_EVENT | WRITE_32 | WRITE_64 | WAIT_32 | WAIT_64
    ) || ALL
        .get(usize::from(function))
        .is_some_and(|entry| entry.works)
}

/// The client's number of the stream that a call of an entry point submits something to, if it does.
pub(super) fn stream_of_call(function: u16, bytes: &[u8]) -> Option<u32> {
    let plan = Plan::of(function).filter(|_| submits(function))?;
    let arguments = plan.decode(bytes).ok()?;
    arguments.iter().find_map(|argument| match argument {
        Argument::Object(Kind::Stream, id) => Some(*id),
        _ => None,
    })
}

/// Whether the driver waits in this entry point for all of a context's work before it destroys something.
pub(super) fn waits_for_work(function: u16) -> bool {
    matches!(
        function,
        MODULE_UNLOAD | LIBRARY_UNLOAD | ARRAY_DESTROY | MIPMAP_DESTROY
    )
}

/// The kinds of objects that are destroyed with a context.
fn goes_with_context(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Stream
            | Kind::Event
            | Kind::Module
            | Kind::Function
            | Kind::Array
            | Kind::Mipmap
            | Kind::Blas
            | Kind::BlasLt
    )
}

pub(super) fn word(arguments: &[Argument], place: usize) -> u64 {
    match arguments.get(place) {
        Some(Argument::Word(word)) => *word,
        Some(Argument::Object(_, id)) => u64::from(*id),
        Some(Argument::Memory { words, .. }) => words.first().copied().unwrap_or(0),
        None => 0,
    }
}

/// The stream among an entry point's parameters: its number and the driver's handle.
fn stream_of(arguments: &[Argument], words: &[u64]) -> Option<(u32, usize)> {
    arguments.iter().zip(words).find_map(|both| match both {
        (Argument::Object(Kind::Stream, id), raw) => Some((*id, *raw as usize)),
        _ => None,
    })
}

impl Server {
    pub(super) fn forward(
        &mut self,
        context: u32,
        function: u16,
        bytes: &[u8],
    ) -> Result<Blob, i32> {
        let plan = Plan::of(function).ok_or(codes::NOT_SUPPORTED)?;
        let mut arguments = plan.decode(bytes).map_err(|_| codes::INVALID_VALUE)?;
        let raw_context = self.enter(context)?;
        let in_legacy = |argument: &Argument| matches!(argument, Argument::Object(Kind::Stream, stream) if is_legacy(*stream));
        if arguments.iter().any(in_legacy) {
            self.backend.legacy.given(raw_context);
        }
        let charge = self.before(function, &arguments, context)?;
        let made = self.before_context(function, &arguments)?;
        let words = self.words(plan, &mut arguments)?;
        let place = stream_of(&arguments, &words);
        if let Some((_, raw)) = place.filter(|_| submits(function)) {
            self.backend.backlog.submits(raw_context, raw);
        }
        if function == DESTROY
            && let Some(raw) = words.first()
        {
            self.backend.api.fences_lock().forget(*raw as usize);
        }
        if function == EVENT_DESTROY
            && let Some(raw) = words.first()
        {
            self.backend.api.fences_lock().forget_event(*raw as usize);
        }
        if function == STREAM_DESTROY {
            let stream = word(&arguments, 0) as u32;
            self.leave_stream(stream);
            self.leave_work(stream);
        }
        if matches!(function, RELEASE | RESET) {
            self.before_primary(function, word(&arguments, 0));
        }
        // SAFETY: numbers may have any value; handles are the driver's own; device addresses are checked where they are
        // used immediately; arrays have the size that the definition gives.
        let called = outcome(unsafe { self.backend.api.call(function, &words) });
        if called.is_err()
            && function == END_CAPTURE
            && let Some(&stream) = words.first()
            && !self.is_captured(stream as usize)
        {
            self.capture_failed(stream as usize);
        }
        called?;
        if let Some((_, raw)) = place.filter(|_| submits(function)) {
            self.note_access(context, (raw_context, raw));
        }
        self.meter_forwarded(raw_context, place);
        let answer = self.results(plan, &mut arguments, context)?;
        self.after(Call {
            function,
            arguments: &arguments,
            words: &words,
            context,
            charge,
            made,
        });
        Ok(Blob(answer))
    }

    /// Meters what an entry point has given the device to do in its stream, if it is to be measured.
    fn meter_forwarded(&mut self, context: usize, stream: Option<(u32, usize)>) {
        let Some(kind) = self.sharing.metered.take() else {
            return;
        };
        if let Some((id, raw)) = stream
            && let Ok(fence) = self.backend.api.fence(context, raw)
        {
            self.meter(kind, id, fence);
            self.backend.api.release(fence);
        }
    }

    /// Checks that some entry points need before the call. Returns the charge for memory that the call allocates.
    fn before(
        &mut self,
        function: u16,
        arguments: &[Argument],
        context: u32,
    ) -> Result<Option<Arc<Charge>>, i32> {
        let number = |place| word(arguments, place);
        let own = |place, size| match self.is_clients(number(place), size) {
            true => Ok(None),
            false => Err(codes::INVALID_VALUE),
        };
        match function {
            WRITE_32 | WAIT_32 => own(1, 4),
            WRITE_64 | WAIT_64 => own(1, 8),
            STREAM_ATTRIBUTE | NODE_ATTRIBUTE if !is_plain(number(1) as u32) => {
                Err(codes::NOT_SUPPORTED)
            }
            MEMORY_CREATE => self.charge(number(1)).map(Some),
            SET_LIMIT => self.charge_limit(context, number(0), number(1)),
            ARRAY_CREATE | ARRAY_CREATE_3D | MIPMAP_CREATE => self.charge_array(
                arguments,
                function == ARRAY_CREATE,
                function == MIPMAP_CREATE,
            ),
            TEXTURE_DESTROY | SURFACE_DESTROY => self.check_texture(Texture {
                context,
                is_surface: function == SURFACE_DESTROY,
                handle: number(0),
            }),
            INSTANTIATE => match self.backend.memory.of_graph(number(1) as u32) {
                0 => Ok(None),
                size => self.charge(size).map(Some),
            },
            GRAPH_DESTROY => {
                let graph = number(0) as u32;
                // A body graph is destroyed with its node.
                match self.backend.objects.get(Kind::Graph, graph)?.owner {
                    0 => self.may_destroy(Kind::Graph, graph).map(|()| None),
                    _ => Err(codes::INVALID_VALUE),
                }
            }
            NODE_DESTROY => self
                .may_destroy(Kind::Node, number(0) as u32)
                .map(|()| None),
            CONDITIONAL_CREATE if self.backend.conditionals.len() >= MOST_CONDITIONALS => {
                Err(codes::OUT_OF_MEMORY)
            }
            TEXTURE_CREATE | SURFACE_CREATE => self.check_textures(),
            // The driver refuses that, and then nothing has been destroyed.
            DESTROY if self.is_primary(number(0) as u32) => Err(codes::INVALID_CONTEXT),
            // In other modes the driver refuses fence queries from this thread during the capture.
            BEGIN_CAPTURE if number(1) != RELAXED => Err(codes::NOT_SUPPORTED),
            BEGIN_CAPTURE_TO if number(5) != RELAXED => Err(codes::NOT_SUPPORTED),
            _ => Ok(None),
        }
    }

    /// The cost of the context that an entry point makes, if it makes one.
    fn before_context(&mut self, function: u16, arguments: &[Argument]) -> Result<Cost, i32> {
        match function {
            CREATE => {
                let contexts = self.backend.objects.iter();
                let contexts = contexts.filter(|(_, object)| object.kind == Kind::Context);
                match contexts.count() < MOST_CONTEXTS {
                    true => self.charge_context(),
                    false => Err(codes::OUT_OF_MEMORY),
                }
            }
            RETAIN if self.primary(self.device(word(arguments, 1))?).is_none() => {
                self.charge_context()
            }
            _ => Ok(Cost::default()),
        }
    }

    /// The context that a call of an entry point ends, if it ends one.
    pub(super) fn ended_context(&self, function: u16, bytes: &[u8]) -> Option<u32> {
        if !matches!(function, DESTROY | RELEASE | RESET) {
            return None;
        }
        let arguments = Plan::of(function)?.decode(bytes).ok()?;
        let number = word(&arguments, 0);
        match function {
            DESTROY => Some(number as u32),
            _ => self.ended_primary(function, number).map(|(id, _)| id),
        }
    }

    /// The driver's device for a client's ordinal.
    pub(super) fn device(&self, ordinal: u64) -> Result<i32, i32> {
        let devices = &self.backend.devices;
        let device = devices.get(ordinal as u32 as usize);
        device.copied().ok_or(codes::INVALID_DEVICE)
    }

    /// The client's ordinal of the driver's device.
    pub(super) fn ordinal(&self, device: i32) -> Result<i32, i32> {
        let mut devices = self.backend.devices.iter();
        let ordinal = devices.position(|one| *one == device);
        let ordinal = ordinal.and_then(|ordinal| i32::try_from(ordinal).ok());
        ordinal.ok_or(codes::INVALID_DEVICE)
    }

    /// The parameters as passed to the driver.
    pub(super) fn words(
        &mut self,
        plan: &Plan,
        arguments: &mut [Argument],
    ) -> Result<Vec<u64>, i32> {
        let mut words = Vec::with_capacity(arguments.len());
        for (parameter, argument) in plan.parameters.iter().zip(arguments) {
            words.push(match (parameter, &mut *argument) {
                (Parameter::Device, Argument::Word(ordinal)) => {
                    u64::from(self.device(*ordinal)?.cast_unsigned())
                }
                (_, Argument::Word(word)) => *word,
                (_, Argument::Object(kind, id)) => self.backend.objects.raw(*kind, *id)? as u64,
                (
                    Parameter::Array {
                        element,
                        input,
                        output,
                        ..
                    },
                    Argument::Memory { .. },
                ) => {
                    let Argument::Memory { words, elements } = argument else {
                        return Err(codes::INVALID_VALUE);
                    };
                    if *output && element.handle.is_some() {
                        self.backend.objects.check_room()?;
                    }
                    if let (Some(kind), true) = (element.handle, *input) {
                        for word in words.iter_mut().take(*elements) {
                            *word = self.backend.objects.raw(kind, *word as u32)? as u64;
                        }
                    }
                    let (count, start) = (*elements, words.as_mut_ptr() as u64);
                    if *input {
                        self.sanitize(element, argument, count)?;
                    }
                    start
                }
                (_, Argument::Memory { words, .. }) => words.as_mut_ptr() as u64,
            });
        }
        Ok(words)
    }

    /// Checks a structure from the client, and clears the parts that the client must not set.
    fn sanitize(
        &self,
        element: &Element,
        argument: &mut Argument,
        count: usize,
    ) -> Result<(), i32> {
        let Argument::Memory { words, .. } = argument else {
            return Ok(());
        };
        let start = words.as_mut_ptr().cast::<u8>();
        for index in 0..count {
            let at = start.wrapping_add(index * element.size);
            // Memory of the host that the driver allocates counts in no limit of this process.
            let on_device = |kind: CUmemAllocationType, location: CUmemLocation| match (
                kind,
                location.r#type,
            ) {
                (
                    CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
                    CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                ) => Ok(()),
                _ => Err(codes::NOT_SUPPORTED),
            };
            let location = |location: &mut CUmemLocation| {
                if location.r#type == CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE {
                    location.id = self.device(u64::from(location.id.cast_unsigned()))?;
                }
                Ok::<(), i32>(())
            };
            // SAFETY: the buffer holds that many elements of this type; they are plain numbers, and the buffer is
            // aligned for any of them.
            unsafe {
                match element.of {
                    "CUmemLocation" => location(&mut *at.cast::<CUmemLocation>())?,
                    "CUmemAccessDesc" => {
                        location(&mut (*at.cast::<CUmemAccessDesc>()).location)?;
                    }
                    "CUmemAllocationProp" => {
                        let properties = &mut *at.cast::<CUmemAllocationProp>();
                        // Programs that could share memory with others request this whether or not they share
                        // (PyTorch's expandable segments). It is exporting that is refused.
                        let file =
                            CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
                        if properties.requestedHandleTypes.0 & !file.0 != 0 {
                            return Err(codes::NOT_SUPPORTED);
                        }
                        properties.requestedHandleTypes = CUmemAllocationHandleType_enum(0);
                        properties.win32HandleMetaData = std::ptr::null_mut();
                        on_device(properties.r#type, properties.location)?;
                        location(&mut properties.location)?;
                    }
                    "CUmemPoolProps" => {
                        let properties = &mut *at.cast::<CUmemPoolProps>();
                        if properties.handleTypes.0 != 0 {
                            return Err(codes::NOT_SUPPORTED);
                        }
                        properties.win32SecurityAttributes = std::ptr::null_mut();
                        on_device(properties.allocType, properties.location)?;
                        location(&mut properties.location)?;
                    }
                    "CUDA_RESOURCE_DESC" => self.resource(&mut *at.cast())?,
                    "CUDA_MEMSET_NODE_PARAMS" => {
                        let node = &*at.cast::<CUDA_MEMSET_NODE_PARAMS>();
                        let width = node.width.checked_mul(node.elementSize as usize);
                        let rows = node.height.saturating_sub(1).checked_mul(node.pitch);
                        let size = width.and_then(|width| width.checked_add(rows?));
                        let size = size.ok_or(codes::INVALID_VALUE)? as u64;
                        if !self.is_clients(node.dst, size) {
                            return Err(codes::INVALID_VALUE);
                        }
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// The object number for a handle that the driver returned.
    fn number(&mut self, kind: Kind, raw: usize, arguments: &[Argument], context: u32) -> u32 {
        let mut owners = arguments.iter().filter_map(|argument| match argument {
            Argument::Object(
                Kind::Module | Kind::Library | Kind::Kernel | Kind::Graph | Kind::Mipmap,
                id,
            ) => Some(*id),
            _ => None,
        });
        let owner = match kind {
            // A node found in a clone belongs to that graph, which is the last argument.
            Kind::Function | Kind::Kernel | Kind::Module | Kind::Array => owners.next_back(),
            // A node found by its neighbour belongs to the same graph.
            Kind::Node => owners.next_back().or_else(|| {
                let node = arguments.iter().find_map(|argument| match argument {
                    Argument::Object(Kind::Node, id) => Some(*id),
                    _ => None,
                });
                let node = self.backend.objects.get(Kind::Node, node?).ok()?;
                Some(node.owner)
            }),
            // A child graph belongs to its node.
            Kind::Graph => arguments.iter().find_map(|argument| match argument {
                Argument::Object(Kind::Node, id) => Some(*id),
                _ => None,
            }),
            _ => None,
        };
        let context = if goes_with_context(kind) { context } else { 0 };
        let objects = &mut self.backend.objects;
        objects.number(kind, raw, context, owner.unwrap_or(0))
    }

    /// The written results, for the client. Handles become object numbers, which stay in the arguments.
    pub(super) fn results(
        &mut self,
        plan: &Plan,
        arguments: &mut [Argument],
        context: u32,
    ) -> Result<Vec<u8>, i32> {
        let mut answer = Vec::new();
        for place in 0..arguments.len() {
            if let Some(Parameter::Scalar { written: true, .. }) = plan.parameters.get(place)
                && let Argument::Memory { elements, .. } = arguments[place]
            {
                let bytes = arguments[place].bytes(elements).ok_or(codes::UNKNOWN)?;
                answer.extend_from_slice(bytes);
            }
            let Some(Parameter::Array {
                element,
                output: true,
                ..
            }) = plan.parameters.get(place).copied()
            else {
                continue;
            };
            let Argument::Memory { words, elements } = &mut arguments[place] else {
                continue;
            };
            if element.of == "CUmemAllocationProp" {
                // SAFETY: the plan has one of these, in memory that is aligned for any type.
                let properties = unsafe { &mut *words.as_mut_ptr().cast::<CUmemAllocationProp>() };
                let location = &mut properties.location;
                if location.r#type == CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE {
                    location.id = self.ordinal(location.id)?;
                }
            }
            (*elements as u32).put(&mut answer);
            match element.handle {
                Some(kind) => {
                    let raw: Vec<u64> = words.iter().take(*elements).copied().collect();
                    let mut numbers = Vec::with_capacity(raw.len());
                    for raw in raw {
                        self.backend.objects.check_room()?;
                        let id = self.number(kind, raw as usize, arguments, context);
                        id.put(&mut answer);
                        numbers.push(u64::from(id));
                    }
                    if let Argument::Memory { words, .. } = &mut arguments[place] {
                        words[..numbers.len()].copy_from_slice(&numbers);
                    }
                }
                None => {
                    if element.of == "CUgraphExecUpdateResultInfo" {
                        // SAFETY: there is one of these; its handles mean nothing to the client.
                        let result = unsafe {
                            &mut *words.as_mut_ptr().cast::<CUgraphExecUpdateResultInfo>()
                        };
                        result.errorNode = std::ptr::null_mut();
                        result.errorFromNode = std::ptr::null_mut();
                    }
                    let size = *elements * element.size;
                    let bytes = arguments[place].bytes(size).ok_or(codes::UNKNOWN)?;
                    answer.extend_from_slice(bytes);
                }
            }
        }
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use cuda_definition::driver::types::CUmemLocationType_enum;

    use super::{super::testing, *};

    #[test]
    fn physical_memory_and_pools_are_the_devices_alone() {
        let (mut server, ..) = testing::server();
        // SAFETY: numbers and pointers, for which zero is a valid value.
        let mut memory: CUmemAllocationProp = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut pool: CUmemPoolProps = unsafe { std::mem::zeroed() };
        let mut made = 0u64;
        for kind in 0..=5 {
            let location = CUmemLocation {
                r#type: CUmemLocationType_enum(kind),
                id: 0,
            };
            (memory.location, pool.location) = (location, location);
            let pinned = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
            (memory.r#type, pool.allocType) = (pinned, pinned);
            let (at, memory, pool) = (
                &raw mut made as u64,
                &raw const memory as u64,
                &raw const pool as u64,
            );
            for (symbol, words) in [
                ("cuMemCreate", &[at, 4096, memory, 0][..]),
                ("cuMemGetAllocationGranularity", &[at, memory, 0]),
                ("cuMemPoolCreate", &[at, pool]),
            ] {
                let (function, bytes) = testing::arguments(symbol, words);
                let plan = Plan::of(function).unwrap();
                let mut arguments = plan.decode(&bytes.0).unwrap();
                let passed = server.words(plan, &mut arguments).map(drop);
                let expected = match location.r#type {
                    CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE => Ok(()),
                    _ => Err(codes::NOT_SUPPORTED),
                };
                assert_eq!(passed, expected, "{symbol} {kind}");
            }
        }
    }
}
