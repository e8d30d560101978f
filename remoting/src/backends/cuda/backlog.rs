//! How much work the driver has while the client is still to be told that a function or a copy of its is due.
//!
//! The driver's queues take about a thousand entries, and whoever submits more waits. The serving thread must not wait so:
//! it tells the client what is due, without which the queue may never move on. It therefore takes no more calls while it
//! has something left to tell and the driver has half a queue of work. Work that precedes it, and that of other streams,
//! gets done by itself: what counts is what has been submitted since and is not done.

use std::collections::HashMap;

use remoting_proto::apis::cuda::calls::Request;

use super::{Server, driver::Api, fences::Fence};
use crate::session::backend::Fences;

/// How many entries of a stream have a fence behind them.
const STEP: u32 = 32;
/// How many fences are not reached when no more calls are taken.
const MOST: usize = 16;
/// The most streams whose entries are counted.
const MOST_STREAMS: usize = 4096;
/// The largest number of rows that a request may copy one by one while something is left to tell.
pub(super) const MOST_ROWS: u64 = 64;

/// A stream: the driver's context, and its handle in that context.
type Place = (usize, usize);

/// What has been submitted since there is something to tell.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    /// The number of entries since the last fence.
    streams: HashMap<Place, u32>,
    /// The fences that have not been seen to be reached.
    marks: Vec<Fence>,
    /// Where the current request submits.
    at: Option<Place>,
    is_full: bool,
}

impl Backlog {
    /// Records that the current request submits to a stream.
    pub(super) fn submits(&mut self, context: usize, stream: usize) {
        self.at = Some((context, stream));
    }

    /// The driver's context and stream to which the current request submits, if it does.
    pub(super) fn place(&self) -> Option<Place> {
        self.at
    }

    /// Whether no call is to be taken for now.
    pub(super) fn is_full(&self) -> bool {
        self.is_full
    }

    fn clear(&mut self, api: &Api) {
        self.streams.clear();
        self.marks.drain(..).for_each(|mark| api.release(mark));
        self.is_full = false;
    }
}

/// The number of entries that a request takes in a queue, or a guess that is not too low. Fences behind it count.
pub(super) fn entries(request: &Request) -> u32 {
    match request {
        Request::LaunchGraph(_) => 8,
        Request::Library(_) | Request::PostLibrary(_) => 4,
        Request::HostFunction(_) => 3,
        Request::Write(_) | Request::Read(_) | Request::CopyVolume(_) => 2,
        _ => 1,
    }
}

impl Server {
    /// Counts what a request has submitted.
    pub(super) fn count_submitted(&mut self, entries: u32) {
        let Some((context, stream)) = self.backend.backlog.at.take() else {
            return;
        };
        if !self.has_untold() {
            return self.backend.backlog.clear(&self.backend.api);
        }
        // The time of work is measured with fences.
        let fences = u32::from(self.limit.is_some() || self.is_shared());
        let backlog = &mut self.backend.backlog;
        if backlog.streams.len() >= MOST_STREAMS {
            backlog.streams.clear();
        }
        let count = backlog.streams.entry((context, stream)).or_default();
        *count += entries + fences;
        if *count < STEP {
            return;
        }
        *count = 0;
        // A fence would become part of a capture, and one in a default stream might invalidate others.
        if self.backend.captures.is_any() && (stream <= 2 || self.is_captured(stream)) {
            return;
        }
        self.backend.api.enter(context);
        if let Ok(mark) = self.backend.api.fence(context, stream) {
            self.backend.backlog.marks.push(mark);
            self.look_at_backlog();
        }
    }

    /// Whether the client has yet to be told that something of its is due.
    fn has_untold(&self) -> bool {
        self.expected > 0 || !self.backend.calling.is_empty()
    }

    /// Finds out whether calls can be taken. If not, this thread is woken when that may have changed.
    pub(super) fn look_at_backlog(&mut self) {
        if self.backend.backlog.marks.len() < MOST {
            return;
        }
        let before = self.backend.api.current();
        self.backend.forget_called();
        let (api, backlog) = (&self.backend.api, &mut self.backend.backlog);
        let reached = |mark: &mut Fence| api.poll(*mark).is_over();
        for mark in backlog.marks.extract_if(.., reached) {
            api.release(mark);
        }
        api.enter(before);
        let was_full = std::mem::replace(&mut backlog.is_full, backlog.marks.len() >= MOST);
        if !self.has_untold() {
            self.backend.backlog.clear(&self.backend.api);
        } else if self.backend.backlog.is_full && !was_full {
            for mark in self.backend.backlog.marks.clone() {
                self.watch(mark, None);
            }
        }
    }
}
