//! Which parts of a buffer may have been written since it was made.
//!
//! The contents of a new buffer are undefined (OpenCL 3.0, 5.2.1), and need not be copied when its application moves.
//! An application that makes large buffers only to find out how much memory there is hardly writes to them. Parts are
//! recorded for writes, fills and copies, which tell what they write. Anything that can write elsewhere marks the whole
//! buffer permanently: once a kernel has it as an argument, or it is mapped, or a part or an image of it is made, its
//! commands need no further tracking.
//!
//! A command costs a load of a flag that is set once, or an uncontended lock.

use std::{
    ops::Range,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use base::Unpoisoned;
use remoting_proto::apis::opencl::calls::{CreateBuffer, MemId, Request};

use super::{Server, objects::MadeMem, written::root};

/// Parts are aligned to blocks of this many bytes, by which contents are compared.
pub const BLOCK: u64 = 64 << 10;
/// A buffer with more parts than this counts as a whole.
const MOST: usize = 16;

/// The touched parts of a buffer, in bytes of its root.
#[derive(Debug)]
pub struct Touched {
    /// Everything may have been written.
    all: AtomicBool,
    /// Sorted, with gaps between them.
    parts: Mutex<Vec<Range<u64>>>,
}

impl Touched {
    /// The initial state of an object that has just been made.
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

    /// Records that anything may be written from now on.
    pub fn all(&self) {
        // Relaxed: the thread that executes calls also chooses what to copy, and does so only after contents that
        // another thread writes have arrived.
        self.all.store(true, Ordering::Relaxed);
    }

    /// Records that this range may be written, whether or not it lies in the buffer.
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

    /// The touched parts of a buffer of this length.
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
    /// Records what a command may write.
    pub(super) fn touch(&self, request: &Request) {
        match request {
            Request::WriteBuffer(call) => self.touch_part(call.mem, call.offset, call.from.length),
            Request::FillBuffer(call) => self.touch_part(call.mem, call.offset, call.size),
            Request::CopyBuffer(call) => self.touch_part(call.to, call.offsets[1], call.size),
            Request::BufferRect(call) if call.write => self.touch_all(call.mem),
            Request::CopyBufferRect(call) => self.touch_all(call.to),
            Request::CopyImageToBuffer(call) => self.touch_all(call.buffer),
            Request::Map(call) => self.touch_all(call.mem),
            // Images count as wholes from the start. A driver may not check whether these are images.
            Request::ImageRect(call) if call.write => self.touch_all(call.mem),
            Request::CopyImage(call) => self.touch_all(call.to),
            Request::CopyBufferToImage(call) => self.touch_all(call.image),
            Request::FillImage(call) => self.touch_all(call.mem),
            // A kernel writes to its arguments, or through an address in shared virtual memory.
            Request::NdRange(_)
            // Buffers in shared virtual memory count as wholes.
            | Request::SvmWrite(_)
            | Request::SvmCopy(_)
            | Request::SvmFill(_)
            | Request::SvmMigrate(_)
            // Recorded when it was mapped.
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
            // These are not commands. The objects that they make or set record by themselves what is written.
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
        // For a nonexistent object the driver gets no command. A part of another object counts as a whole.
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
#[path = "touched_tests.rs"]
mod tests;
