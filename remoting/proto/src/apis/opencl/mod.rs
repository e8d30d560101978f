//! OpenCL: its calls between a driver in a guest and a worker, and its constants.

pub mod calls;
pub mod codes;
pub mod extensions;
pub mod image;

use calls::{
    BufferRect, CreateBuffer, CreateImage, FINGERPRINT, ImageRect, ReadBuffer, ReadState, Request,
    SvmRead, SvmWrite, Target, WindowRange, WriteBuffer, WriteState,
};

use crate::wire::{
    api::{Api, ApiId, Cost, WindowUse},
    codec::Malformed,
    messages::{Call, EventId},
};

/// The API, for links and sessions.
#[derive(Debug)]
pub enum OpenCl {}

/// A transfer between the window and the device.
fn transfer(place: &WindowRange, write: bool) -> Option<WindowUse> {
    let part = (place.offset, place.length);
    if write {
        return Some(WindowUse::Read(part));
    }
    // What no stage says the end of is not known to be there.
    Some(WindowUse::Write(place.stage?, part))
}

/// What is read when an object is made.
fn contents(place: Option<&WindowRange>) -> Option<WindowUse> {
    place.map(|place| WindowUse::Read((place.offset, place.length)))
}

impl Api for OpenCl {
    type Request = Request;

    const ID: ApiId = ApiId::OpenCl;
    const FINGERPRINT: u64 = FINGERPRINT;

    fn decode(opcode: u16, bytes: &[u8]) -> Result<Request, Malformed> {
        Request::decode(opcode, bytes)
    }

    fn may_use_window(opcode: u16) -> bool {
        matches!(
            opcode,
            CreateBuffer::OPCODE
                | CreateImage::OPCODE
                | ReadBuffer::OPCODE
                | WriteBuffer::OPCODE
                | BufferRect::OPCODE
                | ImageRect::OPCODE
                | SvmRead::OPCODE
                | SvmWrite::OPCODE
                | ReadState::OPCODE
                | WriteState::OPCODE
        )
    }

    fn window_use(request: &Request) -> Option<WindowUse> {
        match request {
            Request::CreateBuffer(call) => contents(call.contents.as_ref()),
            Request::CreateImage(call) => contents(call.contents.as_ref()),
            Request::ReadBuffer(call) => transfer(&call.to, false),
            Request::WriteBuffer(call) => transfer(&call.from, true),
            Request::BufferRect(call) => transfer(&call.place, call.write),
            Request::ImageRect(call) => transfer(&call.place, call.write),
            Request::SvmRead(call) => transfer(&call.to, false),
            Request::SvmWrite(call) => transfer(&call.from, true),
            Request::ReadState(call) => transfer(&call.to, false),
            Request::WriteState(call) => transfer(&call.from, true),
            _ => None,
        }
    }

    #[deny(clippy::wildcard_enum_match_arm)]
    fn cost(opcode: u16, request: &Request) -> Cost {
        let size = |bytes: u64| Cost::bytes(opcode, bytes);
        let contents = |place: &Option<WindowRange>| match place {
            Some(place) => size(place.length),
            None => Cost::Nothing("reserves memory"),
        };
        match request {
            Request::NdRange(c) => {
                let mut words = [c.kernel.0.into(), 1, 1, 1];
                let (global, ..) = c.grid.sizes();
                words[1..=global.len()].copy_from_slice(global);
                Cost::work(opcode, &words)
            }
            Request::CreateBuffer(c) => contents(&c.contents),
            Request::CreateImage(c) => contents(&c.contents),
            Request::ReadBuffer(c) => size(c.to.length),
            Request::WriteBuffer(c) => size(c.from.length),
            Request::CopyBuffer(c) => size(c.size),
            Request::FillBuffer(c) => size(c.size),
            Request::Map(c) => size(c.size),
            Request::SvmRead(c) => size(c.to.length),
            Request::SvmWrite(c) => size(c.from.length),
            Request::SvmCopy(c) => size(c.size),
            Request::SvmFill(c) => size(c.size),
            Request::BufferRect(_)
            | Request::ImageRect(_)
            | Request::CopyBufferRect(_)
            | Request::CopyImage(_)
            | Request::CopyImageToBuffer(_)
            | Request::CopyBufferToImage(_)
            | Request::FillImage(_)
            | Request::Migrate(_)
            | Request::SvmMigrate(_)
            | Request::Unmap(_)
            // Starts what waits for the event.
            | Request::SetUserEventStatus(_) => Cost::work(opcode, &[]),
            Request::Marker(_) | Request::Barrier(_) | Request::Unstage(_) => {
                Cost::Nothing("orders what others have submitted")
            }
            Request::WaitForEvents(_)
            | Request::Flush(_)
            | Request::Finish(_)
            | Request::Await(_) => Cost::Nothing("waits for what others have submitted"),
            Request::BuildProgram(_)
            | Request::CompileProgram(_)
            | Request::LinkProgram(_)
            | Request::ProgramBinaries(_)
            | Request::Specialize(_)
            | Request::CreateProgram(_)
            | Request::ReleaseProgram(_) => Cost::Nothing("compiles on the host"),
            Request::SaveState(_)
            | Request::PrecopyState(_)
            | Request::ReadState(_)
            | Request::WriteState(_)
            | Request::PrepareState(_)
            | Request::RestoreState(_) => {
                Cost::Nothing("copies for longer than a turn may last, amid what it moves")
            }
            Request::Platforms(_)
            | Request::Info(_)
            | Request::CreateSubDevices(_)
            | Request::ReleaseDevice(_)
            | Request::Timers(_)
            | Request::CompareDevices(_)
            | Request::CreateContext(_)
            | Request::ReleaseContext(_)
            | Request::ImageFormats(_)
            | Request::CreateQueue(_)
            | Request::ReleaseQueue(_)
            | Request::CreateSubBuffer(_)
            | Request::ReleaseMem(_)
            | Request::CreateSampler(_)
            | Request::ReleaseSampler(_)
            | Request::SvmAlloc(_)
            | Request::SvmFree(_)
            | Request::CreateKernel(_)
            | Request::CloneKernel(_)
            | Request::ReleaseKernel(_)
            | Request::SetArgument(_)
            | Request::SvmPointers(_)
            | Request::CreateUserEvent(_)
            | Request::ReleaseEvent(_)
            | Request::SetEventCallback(_) => Cost::Nothing("changes or queries objects"),
        }
    }

    fn awaited(request: &Request) -> Option<&[EventId]> {
        match request {
            Request::WaitForEvents(call) => Some(&call.events),
            Request::Info(call) => match &call.of {
                Target::Event(id) | Target::Profiling(id) => Some(core::slice::from_ref(id)),
                _ => None,
            },
            _ => None,
        }
    }

    fn released(request: &Request) -> Option<EventId> {
        match request {
            Request::ReleaseEvent(call) => Some(call.id),
            _ => None,
        }
    }

    fn needs_kernel(request: &Request) -> bool {
        matches!(
            request,
            Request::BuildProgram(_)
                | Request::CompileProgram(_)
                | Request::LinkProgram(_)
                | Request::SaveState(_)
                | Request::ReadState(_)
                | Request::WriteState(_)
                | Request::RestoreState(_)
                | Request::PrecopyState(_)
                | Request::PrepareState(_)
        )
    }
}
