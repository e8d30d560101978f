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
    api::{Api, ApiId, WindowUse},
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

    fn cost(opcode: u16, request: &Request) -> Option<u64> {
        // FNV-1a by words. Two kinds that fall together are measured as one, no more.
        let mix = |words: &[u64]| {
            let start = 0xcbf2_9ce4_8422_2325 ^ u64::from(opcode);
            let step = |hash: u64, word: &u64| (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
            Some(words.iter().fold(start, step))
        };
        // Sizes within a factor of two are one kind.
        let size = |bytes: u64| mix(&[u64::from(bytes.checked_ilog2().unwrap_or(0))]);
        match request {
            Request::Launch(call) => {
                let [x, y, z] = call.shape.grid.map(u64::from);
                mix(&[call.function.into(), x, y, z])
            }
            Request::LaunchGraph(call) => mix(&[call.graph.into()]),
            Request::Write(call) => size(call.from.length),
            Request::Read(call) => size(call.to.length),
            Request::Copy(call) => size(call.size),
            Request::CopyVolume(call) => {
                let [width, rows, planes] = call.size;
                size(width.saturating_mul(rows).saturating_mul(planes))
            }
            #[cfg(feature = "std")]
            Request::PostLibrary(call) => {
                let likeness = plan::likeness(call.library, call.function, &call.arguments.0)?;
                mix(&[call.library.into(), call.function.into(), likeness])
            }
            // Who waits for the call gives the device work, too.
            #[cfg(feature = "std")]
            Request::Library(call) => {
                let likeness = plan::likeness(call.library, call.function, &call.arguments.0)?;
                mix(&[call.library.into(), call.function.into(), likeness])
            }
            Request::Fill(call) => size(call.count.saturating_mul(call.rows)),
            _ => None,
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
