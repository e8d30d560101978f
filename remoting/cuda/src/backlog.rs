//! How much work each stream has that is not done.
//!
//! The driver's queues take about a thousand entries, and whoever submits more waits. The serving thread must not wait so
//! while it has something to tell the client: without that, the queue may never move on. A request for a stream that has
//! almost as much work as the driver takes then waits here. Requests for other streams do not.

use std::collections::{HashMap, VecDeque};

use remoting_proto::{
    apis::cuda::{
        Kind, LEGACY,
        calls::{Request, Side, Source},
    },
    wire::messages::WindowRange,
};
use remoting_session::backend::Fences;

use super::{
    Server,
    driver::Api,
    fences::Fence,
    forwarding::{stream_of_call, waits_for_work},
};

/// How many entries of a stream have a fence behind them. It is one of them.
const STEP: u32 = 64;
/// How many entries a stream has before requests for it wait. Measured with driver 580, its queues take about 1,020; the rest
/// is for fences that are not counted, behind which requests that wait for a whole context go on.
const MOST: u32 = 896;
/// The largest number of rows that a request may copy one by one while something is left to tell.
pub(super) const MOST_ROWS: u64 = 64;

/// A stream: the driver's context, and its handle in that context.
type Place = (usize, usize);

/// The work of a stream.
#[derive(Debug, Default)]
struct Queue {
    /// The number of entries since the last mark.
    since: u32,
    /// Fences that have not been seen to be reached, oldest first; each with the number of entries up to it.
    marks: VecDeque<(Fence, u32)>,
}

impl Queue {
    /// The number of entries that are not known to be done.
    fn entries(&self) -> u32 {
        let marked = self.marks.iter().map(|(_, entries)| entries);
        marked.fold(self.since, |all, entries| all.saturating_add(*entries))
    }

    /// Forgets what has been reached. Makes the stream's context current.
    fn forget_reached(&mut self, api: &Api) {
        while let Some((mark, _)) = self.marks.front()
            && api.poll(*mark).is_over()
        {
            api.release(*mark);
            self.marks.pop_front();
        }
    }

    fn end(self, api: &Api) {
        self.marks.iter().for_each(|(mark, _)| api.release(*mark));
    }
}

/// The work of all streams.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    queues: HashMap<Place, Queue>,
    /// Where the current request submits.
    at: Option<Place>,
}

impl Backlog {
    /// Records that the current request submits to a stream.
    pub(super) fn submits(&mut self, context: usize, stream: usize) {
        self.at = Some(place(context, stream));
    }

    /// The driver's context and stream to which the current request submits, if it does.
    pub(super) fn place(&self) -> Option<Place> {
        self.at
    }

    /// Forgets a stream that has been destroyed.
    pub(super) fn forget_stream(&mut self, api: &Api, stream: usize) {
        self.forget(api, |(_, one)| *one == stream);
    }

    /// Forgets the streams of a context that has been destroyed.
    pub(super) fn forget_context(&mut self, api: &Api, context: usize) {
        self.forget(api, |(one, _)| *one == context);
    }

    fn forget(&mut self, api: &Api, is_gone: impl Fn(&Place) -> bool) {
        let gone = self.queues.extract_if(|place, _| is_gone(place));
        gone.for_each(|(_, queue)| queue.end(api));
    }
}

/// The legacy stream has two handles.
fn place(context: usize, stream: usize) -> Place {
    match stream == LEGACY as usize {
        true => (context, 0),
        false => (context, stream),
    }
}

impl Server {
    /// The number of entries that a request takes in a queue, or a guess that is not too low. Fences behind it count. What
    /// the request copies through of the window is registered by now, if it will be.
    pub(super) fn entries(&self, request: &Request) -> u32 {
        match request {
            Request::LaunchGraph(_) => 8,
            Request::Library(_) | Request::PostLibrary(_) => 4,
            Request::HostFunction(_) => 3,
            Request::Write(call) => 1 + self.pieces(&call.from),
            Request::Read(call) => 1 + self.pieces(&call.to),
            Request::CopyVolume(call) => match (&call.to, &call.from) {
                (Side::Window(place), _) | (_, Side::Window(place)) => {
                    let pieces = self.pieces(place);
                    let [_, rows, planes] = call.size;
                    let rows = u32::try_from(rows.saturating_mul(planes)).unwrap_or(u32::MAX);
                    // One by one where two registrations meet.
                    1 + match pieces {
                        1 => 1,
                        pieces => rows.saturating_add(pieces).min(u32::MAX / 2),
                    }
                }
                _ => 2,
            },
            _ => 1,
        }
    }

    /// The number of registrations that a range of the window lies in.
    fn pieces(&self, place: &WindowRange) -> u32 {
        let (offset, length) = (place.offset, place.length);
        match self.window.at(offset, length) {
            Some(_) => {
                let pieces = self.backend.cover.parts(&self.window, offset, length);
                // The window has far fewer.
                pieces.count() as u32
            }
            None => 1,
        }
    }

    /// Counts what the current request has submitted.
    pub(super) fn count_submitted(&mut self, entries: u32) {
        let Some((context, stream)) = self.backend.backlog.at.take() else {
            return;
        };
        // Of what is captured, the queue gets nothing.
        if self.is_captured(stream) {
            return;
        }
        // The time of work is measured with fences.
        let fences = u32::from(self.limit.is_some() || self.is_shared());
        let backend = &mut self.backend;
        let queue = backend.backlog.queues.entry((context, stream)).or_default();
        queue.since = queue.since.saturating_add(entries + fences);
        // A fence in a default stream might invalidate captures of others.
        if queue.since < STEP - 1 || backend.captures.is_any() && stream <= 2 {
            return;
        }
        queue.forget_reached(&backend.api);
        backend.api.enter(context);
        let entries = std::mem::take(&mut queue.since).saturating_add(1);
        // If something has failed, the context runs nothing any more.
        if let Ok(mark) = backend.api.fence(context, stream) {
            queue.marks.push_back((mark, entries));
        }
    }

    /// Whether the client has yet to be told that something of its is due.
    pub(super) fn has_untold(&self) -> bool {
        self.expected > 0 || !self.backend.calling.is_empty()
    }

    /// A fence that a request has to wait for, because a stream that it would add to has no room before, and the client is
    /// still to be told of something. With a reference. May change the current context.
    pub(super) fn awaits_room(&mut self, request: &Request) -> Option<Fence> {
        if !self.has_untold() {
            return None;
        }
        let found = self.full(request)?;
        self.backend.forget_called();
        if !self.has_untold() {
            return None;
        }
        self.backend.api.retain(found);
        Some(found)
    }

    /// The oldest mark of a stream without room for the request.
    fn full(&mut self, request: &Request) -> Option<Fence> {
        let room = match self.aim(request)? {
            Aim::Stream(context, stream) => {
                let objects = &self.backend.objects;
                let context = objects.raw(Kind::Context, context).ok()?;
                let stream = objects.raw(Kind::Stream, stream).ok()?;
                if self.is_captured(stream) {
                    return None;
                }
                let entries = self.entries(request);
                let backend = &mut self.backend;
                let queue = backend.backlog.queues.get_mut(&place(context, stream))?;
                if queue.entries().saturating_add(entries) > MOST {
                    queue.forget_reached(&backend.api);
                }
                (queue.entries().saturating_add(entries) > MOST)
                    .then(|| queue.marks.front())
                    .flatten()
            }
            Aim::Context(context) => {
                let backend = &mut self.backend;
                let context = backend.objects.raw(Kind::Context, context).ok()?;
                let queues = backend.backlog.queues.iter_mut();
                let mut own = queues.filter(|((one, _), _)| *one == context);
                own.find_map(|(_, queue)| {
                    if queue.entries() < MOST {
                        return None;
                    }
                    queue.forget_reached(&backend.api);
                    queue.marks.front().filter(|_| queue.entries() >= MOST)
                })
            }
        };
        room.map(|(mark, _)| *mark)
    }

    /// Where a request will submit, if it may.
    fn aim(&self, request: &Request) -> Option<Aim> {
        let (context, stream) = match request {
            Request::Write(call) => (call.context, call.stream),
            Request::Read(call) => (call.context, call.stream),
            Request::Copy(call) => (call.context, call.stream),
            Request::CopyRows(call) => (call.context, call.stream),
            Request::CopyVolume(call) => (call.context, call.stream),
            Request::Fill(call) => (call.context, call.stream),
            Request::Launch(call) => (call.context, call.stream),
            Request::LaunchGraph(call) => (call.context, call.stream),
            Request::HostFunction(call) => (call.context, call.stream),
            Request::StreamSynchronize(call) => (call.context, call.stream),
            Request::Signal(call) => (call.context, call.stream.unwrap_or(LEGACY)),
            Request::Free(call) => match call.stream {
                Some(stream) => (call.context, stream),
                None => return Some(Aim::Context(call.context)),
            },
            Request::Allocate(call) => match call.source {
                Source::Stream(stream) | Source::Pool(stream, _) => (call.context, stream),
                Source::Device() => return None,
            },
            Request::ContextSynchronize(call) => return Some(Aim::Context(call.context)),
            Request::Forward(call) if waits_for_work(call.function) => {
                return Some(Aim::Context(call.context));
            }
            Request::Forward(call) => (
                call.context,
                stream_of_call(call.function, &call.arguments.0)?,
            ),
            Request::Post(call) => (
                call.context,
                stream_of_call(call.function, &call.arguments.0)?,
            ),
            Request::Library(call) => {
                self.library_stream(call.library, call.function, &call.arguments.0)?
            }
            Request::PostLibrary(call) => {
                self.library_stream(call.library, call.function, &call.arguments.0)?
            }
            _ => return None,
        };
        Some(Aim::Stream(context, stream))
    }
}

/// Where a request submits, by the client's numbers.
#[derive(Debug)]
enum Aim {
    /// Context and stream.
    Stream(u32, u32),
    /// A fence to each of its streams.
    Context(u32),
}
