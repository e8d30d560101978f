//! Which buffers and images commands may have written, according to the API.
//!
//! Nothing is recorded before somebody moves the application (see [`Precopied`]), except which parts of buffers were
//! [touched](super::touched) at all. From the first round on, each command that may write is recorded before the driver
//! gets it. The next round, or the final copy, looks for changes only in what was recorded since.
//!
//! A kernel may write to all of its arguments, except memory in the `__constant` address space, images that it declares
//! `read_only`, and objects that were made with `CL_MEM_READ_ONLY`. If the driver does not tell the kinds of arguments,
//! only the last of these exceptions applies.
//!
//! [`Precopied`]: super::state::Precopied

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, Weak},
};

use base::Unpoisoned;
use remoting_proto::apis::opencl::{
    calls::{MemId, Request},
    codes,
};

use super::{
    Server,
    objects::{Kernel, MadeMem},
    provenance::MemRecord,
    records::{Argument, MOST_ARGUMENTS},
};

/// Objects that may have been written.
#[derive(Debug, Default)]
pub struct Written {
    /// Any object may have been written.
    all: bool,
    /// The addresses of the records of the roots that may have been written.
    roots: HashSet<usize>,
}

/// Shared with the one who moves the application; recording stops once that is gone.
pub type Noted = Arc<Mutex<Written>>;

/// The root whose bytes an object shares.
pub fn root(record: &Arc<MemRecord>) -> &Arc<MemRecord> {
    match &record.of {
        Some(of) => root(of),
        None => record,
    }
}

pub fn place(record: &Arc<MemRecord>) -> usize {
    Arc::as_ptr(root(record)).addr()
}

impl Written {
    /// All objects.
    pub fn all() -> Self {
        Self {
            all: true,
            roots: HashSet::new(),
        }
    }

    fn note(&mut self, record: &Arc<MemRecord>) {
        if !self.all {
            self.roots.insert(place(record));
        }
    }

    /// Adds another record.
    pub fn join(&mut self, other: Self) {
        self.all |= other.all;
        self.roots.extend(other.roots);
    }

    /// Whether an object's bytes may have been written.
    pub fn has(&self, record: &Arc<MemRecord>) -> bool {
        self.all || self.roots.contains(&place(record))
    }
}

/// Whether a kernel may write to an object: not if the application has declared that none does. A part of a buffer
/// inherits the buffer's flag if none was given.
fn may_be_written(record: &MemRecord) -> bool {
    let flags = match &record.call {
        MadeMem::Buffer(call) => call.flags,
        MadeMem::Sub(call) => call.flags,
        MadeMem::Image(call) => call.flags,
    };
    if flags & codes::MEM_READ_ONLY != 0 {
        return false;
    }
    let is_said = flags & (codes::MEM_READ_WRITE | codes::MEM_WRITE_ONLY) != 0;
    is_said || record.of.as_ref().is_none_or(|of| may_be_written(of))
}

impl Server {
    /// Starts to record what is written, for as long as the returned value is kept.
    pub(super) fn note_written(&mut self) -> Noted {
        let noted = Noted::default();
        self.backend.written = Arc::downgrade(&noted);
        noted
    }

    /// Records what a command may write, if anybody needs to know; otherwise this costs a comparison.
    pub(super) fn note_command(&self, request: &Request) {
        if let Some(noted) = Weak::upgrade(&self.backend.written) {
            self.note_in(&mut noted.lock_unpoisoned(), request);
        }
    }

    fn note_in(&self, written: &mut Written, request: &Request) {
        let id = match request {
            Request::NdRange(call) => {
                if let Ok(kernel) = self.backend.kernels.get(call.kernel.0) {
                    self.note_kernel(written, kernel);
                }
                return;
            }
            Request::ReadBuffer(_)
            | Request::SvmRead(_)
            | Request::Migrate(_)
            | Request::Marker(_)
            | Request::Barrier(_)
            | Request::Unstage(_) => return,
            Request::WriteBuffer(call) => call.mem,
            Request::BufferRect(call) => call.mem,
            Request::ImageRect(call) => call.mem,
            Request::CopyBuffer(call) => call.to,
            Request::CopyBufferRect(call) => call.to,
            Request::CopyImage(call) => call.to,
            Request::CopyImageToBuffer(call) => call.buffer,
            Request::CopyBufferToImage(call) => call.image,
            Request::FillBuffer(call) => call.mem,
            Request::FillImage(call) => call.mem,
            Request::Map(call) => call.mem,
            Request::Unmap(call) => call.mem,
            // All other requests may write anything.
            _ => {
                written.all = true;
                return;
            }
        };
        self.note_mem(written, id);
    }

    fn note_mem(&self, written: &mut Written, id: MemId) {
        // For a nonexistent object the driver gets no command.
        if let Ok(mem) = self.backend.mems.get(id.0) {
            written.note(&mem.record);
        }
    }

    fn note_kernel(&self, written: &mut Written, kernel: &Kernel) {
        // Arguments beyond the maximum are not recorded.
        if kernel.parameters.len() > MOST_ARGUMENTS {
            written.all = true;
        }
        for (index, argument) in kernel.arguments.all() {
            match argument {
                Argument::Mem(Some(named)) => {
                    let parameter = kernel.parameters.get(index as usize);
                    if parameter.is_some_and(|parameter| !parameter.may_be_written()) {
                        continue;
                    }
                    let lives = self.backend.mems.birth(named.id.0) == named.birth;
                    match self.backend.mems.get(named.id.0) {
                        Ok(mem) if lives => {
                            if may_be_written(&mem.record) {
                                written.note(&mem.record);
                            }
                        }
                        // A released object, possibly part of one that was not released.
                        _ => written.all = true,
                    }
                }
                Argument::Lost | Argument::Svm(Some(_)) => written.all = true,
                Argument::Mem(None)
                | Argument::Bytes(_)
                | Argument::Sampler(_)
                | Argument::Local(_)
                | Argument::Svm(None) => {}
            }
        }
    }
}

#[cfg(test)]
#[path = "written_tests.rs"]
mod tests;
