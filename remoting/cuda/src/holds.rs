//! Streams that wait while the client copies its own memory.
//!
//! The driver calls all functions of a context in one thread, and a client's function may wait there for another stream's
//! work. Copies of the client must therefore not be such functions: the device itself waits for the word, behind a fence
//! that tells this process when the copy is due.

use std::{collections::VecDeque, sync::atomic::Ordering};

use cuda_definition::driver::types::{CUdeviceptr, CUstream};
use remoting_proto::apis::cuda::{calls::HostFunction, codes};
use remoting_session::backend::{Fences, Progress};
use remoting_transport::endpoint::Gone;

use super::{
    Server,
    backend::Submitted,
    cover::Extent,
    driver::{Api, cu, outcome},
    fences::Fence,
    host_functions::{IDLE, RETURNED, SEEN},
};

/// The maximum number of holds of a client. The driver's thread for functions serves those beyond.
const MOST: usize = 4096;

/// A copy of the client that is not due yet.
#[derive(Debug)]
struct Hold {
    /// The work that precedes it. A reference is held.
    fence: Fence,
    /// The client's number of the function that copies.
    number: u64,
}

/// The holds of a stream, in order. The first one's fence is watched.
#[derive(Debug)]
struct Queue {
    /// The driver's context and stream: the default stream has the same number in each context. The stream is not
    /// destroyed while there are holds: the driver might wait.
    stream: (usize, usize),
    holds: VecDeque<Hold>,
}

/// The client's copies that are not due yet.
#[derive(Debug, Default)]
pub(super) struct Holds {
    queues: Vec<Queue>,
    count: usize,
    /// The device cannot wait for words.
    unsupported: bool,
}

impl Holds {
    /// Whether the client has yet to be told of any.
    pub(super) fn is_any(&self) -> bool {
        self.count > 0
    }

    fn has_room(&self) -> bool {
        self.count < MOST && !self.unsupported
    }

    /// Adds the newest hold of a stream. Returns whether its fence has to be watched.
    fn add(&mut self, stream: (usize, usize), hold: Hold) -> bool {
        self.count += 1;
        let own = self.queues.iter_mut().find(|queue| queue.stream == stream);
        if let Some(queue) = own {
            queue.holds.push_back(hold);
            return false;
        }
        self.queues.push(Queue {
            stream,
            holds: VecDeque::from([hold]),
        });
        true
    }

    /// Removes the holds that are due, and returns their numbers and whether the work before them has succeeded, and
    /// the fences to watch next. Makes some context current.
    fn take_due(&mut self, api: &Api) -> (Vec<(u64, bool)>, Vec<Fence>) {
        let (mut due, mut next) = (Vec::new(), Vec::new());
        for queue in &mut self.queues {
            let before = due.len();
            while let Some(first) = queue.holds.front() {
                let progress = api.poll(first.fence);
                if !progress.is_over() {
                    break;
                }
                api.release(first.fence);
                due.push((first.number, progress == Progress::Complete));
                queue.holds.pop_front();
            }
            if due.len() > before {
                next.extend(queue.holds.front().map(|first| first.fence));
            }
        }
        self.queues.retain(|queue| !queue.holds.is_empty());
        self.count -= due.len();
        (due, next)
    }
}

impl Server {
    /// Has a stream wait until the client has set the word, and the client told when its copy is due; or lets the client
    /// copy at once, if the stream has no work. Returns false if the driver has to call the function.
    pub(super) fn hold(&mut self, submitted: Submitted, call: &HostFunction) -> Result<bool, i32> {
        let (context, stream) = (call.context, submitted.stream);
        let (raw, backend) = (submitted.raw as CUstream, &mut self.backend);
        // A stream in which only a wait is pending is not ready. A query of a blocking stream does not tell of the legacy
        // stream's work, for which what is enqueued now will wait (both seen with driver 580).
        if !backend.captures.is_any()
            && !self.waits_for_others(context, stream)
            && cu!(self.backend.api, cuStreamQuery(raw)) == 0
        {
            // SAFETY: an aligned word of the window, which stays mapped as long as the session and which both sides access
            // only atomically.
            unsafe { &*self.word(call.done)? }.store(IDLE, Ordering::Release);
            return Ok(true);
        }
        if !self.has_threads() || !self.backend.holds.has_room() {
            return Ok(false);
        }
        let word = self.word(call.done)? as CUdeviceptr;
        let backend = &mut self.session.backend;
        let range = (call.done, 4);
        let (window, api) = (&self.session.window, &backend.api);
        let known = backend
            .cover
            .reach(api, window, context, range, Extent::Ahead);
        if known.is_err() {
            return Ok(false);
        }
        let fence = api.fence(submitted.context, submitted.raw)?;
        // From this value on.
        let held = cu!(api, cuStreamWaitValue32_v2(raw, word, RETURNED, 0));
        if held != 0 {
            api.release(fence);
        }
        if held == codes::NOT_SUPPORTED || held == codes::INVALID_VALUE {
            // The driver knows nothing of the word: its part of the window was a destroyed context's.
            backend.holds.unsupported |= held == codes::NOT_SUPPORTED;
            return Ok(false);
        }
        outcome(held)?;
        // The client may reuse the word then. If this fails, it never does.
        cu!(api, cuStreamWriteValue32_v2(raw, word, SEEN, 0));
        self.passes_through(context, range);
        self.note_passage((submitted.context, submitted.raw));
        self.expected += 1;
        let hold = Hold {
            fence,
            number: call.number,
        };
        if self
            .backend
            .holds
            .add((submitted.context, submitted.raw), hold)
        {
            self.watch(fence, None);
        }
        Ok(true)
    }

    /// Tells the client which of its copies are due. Returns whether there were any.
    pub(super) fn tell_due_holds(&mut self) -> Result<bool, Gone> {
        if !self.backend.holds.is_any() {
            return Ok(false);
        }
        let (due, next) = self
            .session
            .backend
            .holds
            .take_due(&self.session.backend.api);
        next.into_iter().for_each(|fence| self.watch(fence, None));
        for (number, is_good) in &due {
            self.expected -= 1;
            let status = if *is_good { 0 } else { codes::UNKNOWN };
            self.call_back(*number, status)?;
        }
        Ok(!due.is_empty())
    }
}
