//! Which parts of a buffer anything may have written since it was made.
//!
//! What a new buffer has is undefined (OpenCL 3.0, 5.2.1), and need not be copied when its application moves: one
//! that makes large buffers only to see how much memory there is hardly writes to them. Parts are kept for writes,
//! fills and copies, which say what they write. All that can write elsewhere makes it all of the buffer for good:
//! from when a kernel has it for an argument, it is mapped, or a part or an image of it is made, no command has to be
//! looked at any more.
//!
//! A command costs a load of what is set once, or an uncontended lock.

use std::{
    ops::Range,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use base::Unpoisoned;

use super::{Server, objects::MadeMem, written::root};
use crate::apis::opencl::calls::{CreateBuffer, MemId, Request};

/// Parts begin and end where blocks of so many bytes do: contents are compared by these.
pub const BLOCK: u64 = 64 << 10;
/// A buffer with more parts counts as a whole.
const MOST: usize = 16;

/// Parts of a buffer: of the bytes of what it is a part of.
#[derive(Debug)]
pub struct Touched {
    /// All may have been written.
    all: AtomicBool,
    /// In their order, with others between them.
    parts: Mutex<Vec<Range<u64>>>,
}

impl Touched {
    /// Of what has just been made.
    pub fn of(made: &MadeMem) -> Self {
        let is_undefined = matches!(
            made,
            MadeMem::Buffer(CreateBuffer {
                contents: None,
                lives: None,
                svm: None,
                ..
            })
        );
        Self {
            all: AtomicBool::new(!is_undefined),
            parts: Mutex::default(),
        }
    }

    /// Anything may be written from now on.
    pub fn all(&self) {
        // Relaxed: what is copied is chosen by the thread that carries out calls, and after contents have come that another
        // one writes.
        self.all.store(true, Ordering::Relaxed);
    }

    /// So many bytes may be written, from this one on, whether there are so many or not.
    pub fn part(&self, start: u64, length: u64) {
        if length == 0 || self.all.load(Ordering::Relaxed) {
            return;
        }
        let end = start.saturating_add(length);
        let end = end.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX);
        let start = start / BLOCK * BLOCK;
        let mut parts = self.parts.lock_unpoisoned();
        if parts
            .iter()
            .any(|part| part.start <= start && end <= part.end)
        {
            return;
        }
        parts.push(start..end);
        parts.sort_unstable_by_key(|part| part.start);
        parts.dedup_by(|next, part| {
            let joins = next.start <= part.end;
            if joins {
                part.end = part.end.max(next.end);
            }
            joins
        });
        if parts.len() > MOST {
            self.all();
        }
    }

    /// The parts of a buffer of so many bytes.
    pub fn parts(&self, length: u64) -> Vec<Range<u64>> {
        let cut = |part: &Range<u64>| part.start..part.end.min(length);
        let is_some = |part: &Range<u64>| !part.is_empty();
        if self.all.load(Ordering::Relaxed) {
            return Some(0..length).into_iter().filter(is_some).collect();
        }
        let parts = self.parts.lock_unpoisoned();
        parts.iter().map(cut).filter(is_some).collect()
    }
}

impl Server {
    /// Keeps what a command may write.
    pub(super) fn touch(&self, request: &Request) {
        match request {
            Request::WriteBuffer(call) => self.touch_part(call.mem, call.offset, call.from.length),
            Request::FillBuffer(call) => self.touch_part(call.mem, call.offset, call.size),
            Request::CopyBuffer(call) => self.touch_part(call.to, call.offsets[1], call.size),
            Request::BufferRect(call) if call.write => self.touch_all(call.mem),
            Request::CopyBufferRect(call) => self.touch_all(call.to),
            Request::CopyImageToBuffer(call) => self.touch_all(call.buffer),
            Request::Map(call) => self.touch_all(call.mem),
            // Images are wholes from the first. Whether these are images a driver may not look.
            Request::ImageRect(call) if call.write => self.touch_all(call.mem),
            Request::CopyImage(call) => self.touch_all(call.to),
            Request::CopyBufferToImage(call) => self.touch_all(call.image),
            Request::FillImage(call) => self.touch_all(call.mem),
            // A kernel has what it writes for an argument, or by an address in shared virtual memory.
            Request::NdRange(_)
            // Those of buffers in it count as wholes.
            | Request::SvmWrite(_)
            | Request::SvmCopy(_)
            | Request::SvmFill(_)
            | Request::SvmMigrate(_)
            // What was mapped.
            | Request::Unmap(_)
            // These write to no buffer.
            | Request::ReadBuffer(_)
            | Request::BufferRect(_)
            | Request::ImageRect(_)
            | Request::SvmRead(_)
            | Request::Migrate(_)
            | Request::Marker(_)
            | Request::Barrier(_)
            | Request::Unstage(_)
            // No commands. What they make and set says itself what is written by it.
            | Request::Platforms(_)
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
            | Request::CreateBuffer(_)
            | Request::CreateSubBuffer(_)
            | Request::CreateImage(_)
            | Request::ReleaseMem(_)
            | Request::CreateSampler(_)
            | Request::ReleaseSampler(_)
            | Request::SvmAlloc(_)
            | Request::SvmFree(_)
            | Request::CreateProgram(_)
            | Request::ReleaseProgram(_)
            | Request::BuildProgram(_)
            | Request::CompileProgram(_)
            | Request::LinkProgram(_)
            | Request::ProgramBinaries(_)
            | Request::Specialize(_)
            | Request::CreateKernel(_)
            | Request::CloneKernel(_)
            | Request::ReleaseKernel(_)
            | Request::SetArgument(_)
            | Request::SvmPointers(_)
            | Request::CreateUserEvent(_)
            | Request::SetUserEventStatus(_)
            | Request::ReleaseEvent(_)
            | Request::WaitForEvents(_)
            | Request::SetEventCallback(_)
            | Request::Flush(_)
            | Request::Finish(_)
            | Request::Await(_)
            | Request::SaveState(_)
            | Request::ReadState(_)
            | Request::WriteState(_)
            | Request::RestoreState(_)
            | Request::PrecopyState(_)
            | Request::PrepareState(_) => {}
        }
    }

    fn touch_part(&self, id: MemId, start: u64, length: u64) {
        // Of none the driver gets no command. One that is a part of another one counts as a whole.
        if let Ok(mem) = self.backend.mems.get(id.0) {
            root(&mem.record).touched.part(start, length);
        }
    }

    fn touch_all(&self, id: MemId) {
        if let Ok(mem) = self.backend.mems.get(id.0) {
            root(&mem.record).touched.all();
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
#[path = "touched_tests.rs"]
mod tests;
