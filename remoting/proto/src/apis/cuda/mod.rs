//! CUDA's driver API: its requests between `libcuda.so.1` in a guest and a worker.
//!
//! - [`calls`]: requests that both sides treat by themselves: memory, copies, images, launches,
//!   waiting.
//! - [`forwarded`]: entry points whose parameters travel by the rules of the API's definition, with
//!   one kind of request for all of them; `plan`: how.
//! - [`libraries`]: the same for libraries above the driver; [`attributes`]: their descriptors;
//!   [`interface`]: how they reach the driver's connection.
//! - [`Kind`]: objects by numbers that the worker gives.

pub mod attributes;
pub mod calls;
pub mod codes;
pub mod forwarded;
pub mod interface;
mod kind;
pub mod libraries;
#[cfg(feature = "std")]
pub mod plan;

pub use kind::{FIRST, Kind, LEGACY, NO_HANDLE};

use calls::{CopyVolume, FINGERPRINT, Read, Request, Side, Write};

use crate::wire::{
    api::{Api, ApiId, Cost, WindowUse},
    codec::{Malformed, with},
    messages::{Call, EventId, WindowRange},
};

/// Where guest and worker have the window if they can: device memory is near it, and an address in
/// it means the same to the application and to the device. No window is larger than 1 TiB.
pub const WINDOW: u64 = 0x2000_0000_0000;

/// The API, for links and sessions.
#[derive(Debug)]
pub enum Cuda {}

/// What a worker says of a [`Signal`](calls::Signal) for whose like there is no word from now on.
pub const NEVER: u32 = u32::MAX;

fn part(place: &WindowRange) -> (u64, u64) {
    (place.offset, place.length)
}

impl Api for Cuda {
    type Request = Request;

    const ID: ApiId = ApiId::Cuda;
    const FINGERPRINT: u64 = with(
        with(FINGERPRINT, forwarded::FINGERPRINT),
        libraries::FINGERPRINT,
    );

    fn decode(opcode: u16, bytes: &[u8]) -> Result<Request, Malformed> {
        Request::decode(opcode, bytes)
    }

    fn may_use_window(opcode: u16) -> bool {
        matches!(opcode, Write::OPCODE | Read::OPCODE | CopyVolume::OPCODE)
    }

    fn window_use(request: &Request) -> Option<WindowUse> {
        match request {
            Request::Write(call) => Some(WindowUse::Read(part(&call.from))),
            // What no stage says the end of is not known to be there.
            Request::Read(call) => Some(WindowUse::Write(call.to.stage?, part(&call.to))),
            Request::CopyVolume(call) => match (&call.to, &call.from) {
                (Side::Window(to), _) => Some(WindowUse::Write(to.stage?, part(to))),
                (_, Side::Window(from)) => Some(WindowUse::Read(part(from))),
                _ => None,
            },
            _ => None,
        }
    }

    #[deny(clippy::wildcard_enum_match_arm)]
    fn cost(opcode: u16, request: &Request) -> Cost {
        let size = |bytes: u64| Cost::bytes(opcode, bytes);
        let library = |library: u8, function: u16, arguments: &[u8]| {
            #[cfg(feature = "std")]
            if let Some(likeness) = plan::likeness(library, function, arguments) {
                return Cost::work(opcode, &[library.into(), function.into(), likeness]);
            }
            let _ = (library, function, arguments);
            Cost::Nothing("changes or queries a handle, or is malformed")
        };
        let forwarded = |function: u16| match forwarded::ALL.get(usize::from(function)) {
            Some(entry) if entry.works => Cost::work(opcode, &[function.into()]),
            _ => Cost::Nothing("its entry point gives the device no work"),
        };
        match request {
            Request::Launch(call) => {
                let [x, y, z] = call.shape.grid.map(u64::from);
                Cost::work(opcode, &[call.function.into(), x, y, z])
            }
            Request::LaunchGraph(call) => Cost::work(opcode, &[call.graph.into()]),
            Request::Write(call) => size(call.from.length),
            Request::Read(call) => size(call.to.length),
            Request::Copy(call) => size(call.size),
            Request::CopyRows(call) => size(call.width.saturating_mul(call.rows)),
            Request::CopyVolume(call) => {
                let [width, rows, planes] = call.size;
                size(width.saturating_mul(rows).saturating_mul(planes))
            }
            Request::Fill(call) => size(call.count.saturating_mul(call.rows)),
            // Whoever waits for the call gives the device work, too.
            Request::Library(call) => library(call.library, call.function, &call.arguments.0),
            Request::PostLibrary(call) => library(call.library, call.function, &call.arguments.0),
            Request::Forward(call) => forwarded(call.function),
            Request::Post(call) => forwarded(call.function),
            Request::HostFunction(_) | Request::Signal(_) => {
                Cost::Nothing("orders what others have submitted")
            }
            Request::StreamSynchronize(_)
            | Request::ContextSynchronize(_)
            | Request::EventSynchronize(_)
            | Request::Await(_) => Cost::Nothing("waits for what others have submitted"),
            // Of a load, the device sees a copy of the image and of its variables, which the quota counts.
            Request::Load(_) | Request::Link(_) => {
                Cost::Nothing("compiles on the host, for longer than a turn may last")
            }
            Request::Allocate(_) | Request::AllocatePitch(_) | Request::Free(_) => {
                Cost::Nothing("maps and unmaps memory")
            }
            Request::Pin(_) => Cost::Nothing("maps the window"),
            Request::AddKernelNode(_)
            | Request::SetKernelNode(_)
            | Request::AddCopyNode(_)
            | Request::SetCopyNode(_)
            | Request::AddHostNode(_)
            | Request::SetHostNode(_)
            | Request::AddAllocNode(_)
            | Request::AddFreeNode(_)
            | Request::AddConditionalNode(_) => Cost::Nothing("works when its graph is launched"),
            Request::Start(_)
            | Request::Describe(_)
            | Request::MemoryInfo(_)
            | Request::Examine(_)
            | Request::Enumerate(_)
            | Request::Clusters(_)
            | Request::CaptureInfo(_)
            | Request::CreateUserObject(_)
            | Request::RetainUserObject(_)
            | Request::ReleaseUserObject(_)
            | Request::PointerDevice(_)
            | Request::Select(_) => Cost::Nothing("changes or queries objects"),
        }
    }

    fn awaited(_: &Request) -> Option<&[EventId]> {
        // An event exists before it is recorded: what waits for it may not overtake that.
        None
    }

    fn released(_: &Request) -> Option<EventId> {
        None
    }

    fn needs_kernel(request: &Request) -> bool {
        matches!(request, Request::Load(_))
    }
}
