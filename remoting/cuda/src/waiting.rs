//! Waiting for streams, events and stages.

use cuda_definition::driver::types::CUstream;
use remoting_proto::{
    apis::cuda::{
        Kind,
        calls::{ContextSynchronize, EventSynchronize, Request, Side, StreamSynchronize},
        codes,
    },
    wire::{Flags, Header, messages::StageId},
};
use remoting_session::backend::Fences;
use remoting_transport::endpoint::Gone;
use remoting_turns::Moment;

use super::{
    Server,
    cover::Extent,
    driver::{Api, cu, outcome},
    fences::Fence,
    forwarding::waits_for_work,
    objects::Object,
    passages::Use,
};

/// Maximum number of deferred requests: each blocks a thread of the client.
const MOST_PUT_OFF: usize = 1024;
/// Maximum number of streams for whose work a deferred request waits.
const MOST_FENCES: usize = 4096;
/// How many times a request waits for newly submitted work before the driver waits instead: other threads might never
/// stop submitting.
const MOST_ROUNDS: u32 = 16;

/// Until when a request is deferred. A reference to each fence is held.
#[derive(Debug)]
pub(super) enum Until {
    /// Until no client function is pending, and this work is done.
    NoFunctions(Vec<Fence>),
    /// Until this work is done.
    Work(Vec<Fence>),
    /// Until a stream has done this work, and the driver takes more.
    Room(Fence),
}

impl Until {
    fn fences(&self) -> &[Fence] {
        match self {
            Self::NoFunctions(fences) | Self::Work(fences) => fences,
            Self::Room(fence) => std::slice::from_ref(fence),
        }
    }
}

/// How often a request has been deferred.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rounds {
    /// In total.
    all: u32,
    /// The work that may access pinned memory has been looked for: once, when the request came, as work that comes later may
    /// wait for what only comes when this has ended.
    for_access: bool,
}

/// A request that is deferred until the driver does not need to wait in it.
#[derive(Debug)]
pub(super) struct PutOff {
    header: Header,
    request: Request,
    until: Until,
    /// How often the request has been deferred before.
    rounds: Rounds,
}

impl PutOff {
    pub(super) fn until(&self) -> &Until {
        &self.until
    }

    /// Whether the work is done or has failed; the driver reports failures at once.
    pub(super) fn is_ready(&self, api: &Api) -> bool {
        let mut fences = self.until.fences().iter();
        fences.all(|fence| api.poll(*fence).is_over())
    }

    /// The request, and how often it has been deferred.
    pub(super) fn take(self, api: &Api) -> (Header, Request, Rounds) {
        let fences = self.until.fences().iter();
        fences.for_each(|fence| api.release(*fence));
        let rounds = Rounds {
            all: self.rounds.all + 1,
            ..self.rounds
        };
        (self.header, self.request, rounds)
    }

    /// The request alone.
    fn give_back(self, api: &Api) -> (Header, Request) {
        let (header, request, _) = self.take(api);
        (header, request)
    }
}

impl Server {
    pub(super) fn stream_synchronize(
        &mut self,
        header: Header,
        call: &StreamSynchronize,
    ) -> Result<(), Gone> {
        let submitted = match self.submit_to(call.context, call.stream) {
            Ok(submitted) => submitted,
            Err(code) => return self.answer(header, &Err::<(), i32>(code)),
        };
        if self.is_captured(submitted.raw) {
            // The driver decides what happens to the capture.
            let stream = submitted.raw as CUstream;
            let code = cu!(self.backend.api, cuStreamSynchronize(stream));
            return self.answer(header, &outcome(code));
        }
        self.conclude(header, call.context, None, Ok(submitted))
    }

    pub(super) fn context_synchronize(
        &mut self,
        header: Header,
        call: &ContextSynchronize,
    ) -> Result<(), Gone> {
        let context = call.context;
        let raw = match self.enter(context) {
            Ok(0) => return self.answer(header, &Err::<(), i32>(codes::INVALID_CONTEXT)),
            Ok(raw) => raw,
            Err(code) => return self.answer(header, &Err::<(), i32>(code)),
        };
        if call.spares_captures && self.backend.captures.is_any() {
            return match self.work_beside_captures(context, raw) {
                Ok(fences) => {
                    self.answer_later(header, fences, false, codes::NOT_READY);
                    Ok(())
                }
                // The work is not waited for, whatever the reason.
                Err(_) => self.answer(header, &Err::<(), i32>(codes::NOT_READY)),
            };
        }
        if self.is_left_to_driver(context) {
            let waited = self.synchronize_here();
            if waited.is_ok() {
                self.backend.left.remove(&context);
                self.backend.legacy.done(raw);
            }
            let deferred = self.deferred_for(call);
            return self.answer(header, &deferred.map_or(waited, Err));
        }
        let stays = self.stays(header);
        match self.all_work(context, raw) {
            Ok(fences) => {
                let deferred = self.deferred_for(call);
                self.answer_later(header, fences, true, deferred.unwrap_or(0));
                if stays && self.stay()? {
                    self.backend.legacy.done(raw);
                }
                Ok(())
            }
            // Memory is given up when this is answered with anything else, and work may still use it.
            Err(_) if call.spares_captures && !self.has_failed() => {
                self.answer(header, &Err::<(), i32>(codes::NOT_READY))
            }
            Err(code) => self.answer(header, &Err::<(), i32>(code)),
        }
    }

    /// Takes the deferred error that a wait for a context reports. One that spares captures is no wait of the program's for
    /// that context, whose next wait reports it.
    fn deferred_for(&mut self, call: &ContextSynchronize) -> Option<i32> {
        let reports = !call.spares_captures;
        reports.then(|| self.take_deferred(call.context))?
    }

    /// Waits in the driver for the current context, and signals this to a client that polls meanwhile.
    fn synchronize_here(&mut self) -> Result<(), i32> {
        let start = Moment::now();
        self.sender.attend(true);
        let code = cu!(self.backend.api, cuCtxSynchronize());
        self.sender.attend(false);
        self.last_wait = Moment::now().since(start);
        outcome(code)
    }

    /// Whether the current context has an error that has ended its work.
    fn has_failed(&self) -> bool {
        let code = cu!(self.backend.api, cuStreamQuery(std::ptr::null_mut()));
        !matches!(code, 0 | codes::NOT_READY)
    }

    /// Whether only the driver can wait for all work of a context: of destroyed streams, or beside captures, which
    /// fences might invalidate.
    fn is_left_to_driver(&self, context: u32) -> bool {
        self.backend.left.contains(&context) || self.backend.captures.is_any()
    }

    /// Whether the driver waits in this request for a context, with this thread.
    pub(super) fn synchronizes_here(&self, request: &Request) -> bool {
        let Request::ContextSynchronize(call) = request else {
            return false;
        };
        let spares = call.spares_captures && self.backend.captures.is_any();
        !spares && self.is_left_to_driver(call.context)
    }

    /// Records that a stream is about to be destroyed while its work continues.
    pub(super) fn leave_work(&mut self, stream: u32) {
        let Ok(object) = self.backend.objects.get(Kind::Stream, stream) else {
            return;
        };
        let (context, raw) = (object.context, object.raw as CUstream);
        // A query would invalidate a capture.
        let is_captured = self.is_captured(raw as usize);
        let is_running =
            !is_captured && cu!(self.backend.api, cuStreamQuery(raw)) == codes::NOT_READY;
        let keeps = self.leave_unfenced(stream, !is_running && !is_captured);
        if is_running || keeps {
            self.backend.left.insert(context);
        }
    }

    /// The streams of a context that the client has made.
    fn streams_of(&self, context: u32) -> impl Iterator<Item = usize> {
        let of_context =
            move |object: &&Object| object.kind == Kind::Stream && object.context == context;
        let objects = self.backend.objects.iter().map(|(_, object)| object);
        objects.filter(of_context).map(|object| object.raw)
    }

    /// Whether the streams of the current context, which has this number, have no work.
    fn is_idle(&self, context: u32) -> bool {
        let mut streams = self.streams_of(context).chain([0]);
        streams.all(|stream| cu!(self.backend.api, cuStreamQuery(stream as CUstream)) == 0)
    }

    /// Fences behind all submitted work of a context, each with a reference.
    fn all_work(&self, context: u32, raw: usize) -> Result<Vec<Fence>, i32> {
        // The legacy stream, for work that was submitted to no stream.
        self.work_in(raw, self.streams_of(context).chain([0]))
    }

    /// The same, without what fences might invalidate captures of: streams that are captured, and default streams.
    fn work_beside_captures(&self, context: u32, raw: usize) -> Result<Vec<Fence>, i32> {
        let streams = self.streams_of(context);
        self.work_in(
            raw,
            streams.filter(|stream| *stream > 2 && !self.is_captured(*stream)),
        )
    }

    /// Fences behind the submitted work of streams of a context, each with a reference.
    fn work_in(&self, raw: usize, streams: impl Iterator<Item = usize>) -> Result<Vec<Fence>, i32> {
        let api = &self.backend.api;
        let mut fences = Vec::new();
        for stream in streams {
            match api.fence(raw, stream) {
                Ok(fence) => fences.push(fence),
                Err(code) => {
                    fences.into_iter().for_each(|fence| api.release(fence));
                    return Err(code);
                }
            }
        }
        Ok(fences)
    }

    /// Defers a request in which the driver might wait for a client function until none is pending. Client functions
    /// are reported by this very thread, which therefore must not block.
    pub(super) fn wait_for_functions(&mut self, header: Header, request: Request, rounds: Rounds) {
        let backend = &self.backend;
        let ended = self.ended_by(&request).filter(|_| !rounds.for_access);
        let may_access = &[Use::MayAccess];
        let fences = ended.map(|ended| backend.passages.through(&backend.api, ended, may_access));
        let fences = fences.unwrap_or_default();
        for fence in [&self.backend.calling[..], &fences].concat() {
            self.watch(fence, None);
        }
        self.defer(PutOff {
            header,
            request,
            until: Until::NoFunctions(fences),
            rounds: Rounds {
                for_access: rounds.for_access || ended.is_some(),
                ..rounds
            },
        });
    }

    /// Defers a request until a stream has come to a mark, a reference to which this takes over.
    pub(super) fn wait_for_room(&mut self, header: Header, request: Request, mark: Fence) {
        self.watch(mark, None);
        self.defer(PutOff {
            header,
            request,
            until: Until::Room(mark),
            rounds: Rounds::default(),
        });
    }

    /// Keeps a deferred request, and those that follow if they must be ordered behind it.
    fn defer(&mut self, off: PutOff) {
        // A client that waits for the answer sends nothing that must be ordered behind it.
        if off.header.flags.has(Flags::ANSWER) && self.backend.put_off.len() < MOST_PUT_OFF {
            self.backend.put_off.push(off);
        } else {
            self.backend.parked = Some(off);
        }
    }

    /// Keeps a copy through a part of the window that the driver does not know as registered, and all requests that follow,
    /// until the work before it is done: the driver would read that memory at once, or wait. Returns the request if there
    /// is nothing to wait for.
    pub(super) fn park_unregistered(
        &mut self,
        header: Header,
        request: Request,
    ) -> Option<(Header, Request)> {
        let Some((context, stream)) = self.copies_unregistered(&request) else {
            return Some((header, request));
        };
        // Nothing that the program has enqueued before it is left.
        if self.backend.parked_copy == Some(header.sequence) {
            self.backend.parked_copy = None;
            return Some((header, request));
        }
        let fence = match (
            self.enter(context),
            self.backend.objects.raw(Kind::Stream, stream),
        ) {
            // A fence would become part of a capture, and one in a default stream might invalidate others.
            (Ok(_), Ok(raw))
                if self.backend.captures.is_any() && (raw <= 2 || self.is_captured(raw)) =>
            {
                None
            }
            (Ok(own), Ok(raw)) => self.backend.api.fence(own, raw).ok(),
            _ => None,
        };
        // The request itself reports what is wrong.
        let Some(fence) = fence else {
            return Some((header, request));
        };
        let off = PutOff {
            header,
            request,
            until: Until::Work(vec![fence]),
            rounds: Rounds::default(),
        };
        if off.is_ready(&self.backend.api) {
            return Some(off.give_back(&self.backend.api));
        }
        self.watch(fence, None);
        self.backend.parked_copy = Some(off.header.sequence);
        self.backend.parked = Some(off);
        None
    }

    /// The context and the stream of a copy through a part of the window that the driver does not know, if it is one.
    fn copies_unregistered(&mut self, request: &Request) -> Option<(u32, u32)> {
        let (context, stream, places) = match request {
            Request::Write(call) => (call.context, call.stream, [Some(&call.from), None]),
            Request::Read(call) => (call.context, call.stream, [Some(&call.to), None]),
            Request::CopyVolume(call) => {
                let places = [&call.to, &call.from].map(|side| match side {
                    Side::Window(place) => Some(place),
                    _ => None,
                });
                (call.context, call.stream, places)
            }
            _ => return None,
        };
        self.enter(context).ok()?;
        let backend = &mut self.session.backend;
        let is_unknown = places.into_iter().flatten().any(|place| {
            let range = (place.offset, place.length);
            self.session.window.at(range.0, range.1).is_some()
                && backend
                    .cover
                    .reach(
                        &backend.api,
                        &self.session.window,
                        context,
                        range,
                        Extent::Ahead,
                    )
                    .is_err()
        });
        is_unknown.then_some((context, stream))
    }

    /// The context that a request ends.
    fn ended_by(&self, request: &Request) -> Option<u32> {
        match request {
            Request::Forward(call) => self.ended_context(call.function, &call.arguments.0),
            Request::Post(call) => self.ended_context(call.function, &call.arguments.0),
            _ => None,
        }
    }

    /// Defers a request that ends a context until the work of other contexts is over that passes through parts of the window
    /// which that context has registered. Returns the request if there is none.
    pub(super) fn wait_for_passages(
        &mut self,
        header: Header,
        request: Request,
        rounds: Rounds,
    ) -> Option<(Header, Request)> {
        let ended = self.ended_by(&request);
        let backend = &self.backend;
        let used = match rounds.for_access {
            false => &[Use::Passes, Use::MayAccess][..],
            true => &[Use::Passes],
        };
        let fences = ended.map(|ended| backend.passages.through(&backend.api, ended, used));
        let Some(fences) = fences.filter(|fences| !fences.is_empty()) else {
            return Some((header, request));
        };
        for fence in fences.clone() {
            self.watch(fence, None);
        }
        let off = PutOff {
            header,
            request,
            until: Until::Work(fences),
            rounds: Rounds {
                for_access: true,
                ..rounds
            },
        };
        // Other threads might never stop copying.
        match rounds.all < MOST_ROUNDS {
            true => self.defer(off),
            false => self.backend.parked = Some(off),
        }
        None
    }

    /// Defers a request in which the driver would wait for a context's work: that work may depend on what other threads of
    /// the client do next, be it with their first call. Returns the request if it need not be deferred.
    pub(super) fn put_off(
        &mut self,
        header: Header,
        request: Request,
        rounds: Rounds,
    ) -> Option<(Header, Request)> {
        let context = match &request {
            Request::Free(call) if call.stream.is_none() => call.context,
            Request::Forward(call) if waits_for_work(call.function) => call.context,
            _ => return Some((header, request)),
        };
        if self.backend.captures.is_any() || rounds.all >= MOST_ROUNDS {
            return Some((header, request));
        }
        let fences = match self.enter(context) {
            Ok(raw) if raw != 0 && !self.is_idle(context) => self.all_work(context, raw),
            _ => return Some((header, request)),
        };
        // The request itself reports what is wrong.
        let Ok(fences) = fences else {
            return Some((header, request));
        };
        let off = PutOff {
            header,
            request,
            until: Until::Work(fences),
            rounds,
        };
        if off.is_ready(&self.backend.api) {
            return Some(off.give_back(&self.backend.api));
        }
        // A client that exceeds the limits only blocks itself.
        if self.backend.put_off.len() >= MOST_PUT_OFF || off.until.fences().len() > MOST_FENCES {
            return Some(off.give_back(&self.backend.api));
        }
        let fences = off.until.fences().to_vec();
        self.backend.put_off.push(off);
        for fence in fences {
            self.watch(fence, None);
        }
        None
    }

    pub(super) fn event_synchronize(
        &mut self,
        header: Header,
        call: &EventSynchronize,
    ) -> Result<(), Gone> {
        let found = (|| {
            let context = self.enter(call.context)?;
            let event = self.backend.objects.get(Kind::Event, call.event)?;
            Ok((context, event.raw))
        })();
        let (context, event) = match found {
            Ok(found) => found,
            Err(code) => return self.answer(header, &Err::<(), i32>(code)),
        };
        if context == 0 {
            return self.answer(header, &Err::<(), i32>(codes::INVALID_CONTEXT));
        }
        let stays = self.stays(header);
        let fence = self.backend.api.event_fence(context, event);
        let deferred = self.take_deferred(call.context);
        self.answer_later(header, vec![fence], true, deferred.unwrap_or(0));
        if stays {
            self.stay()?;
        }
        Ok(())
    }

    pub(super) fn await_stage(&mut self, header: Header, stage: StageId) -> Result<(), Gone> {
        let Some(fence) = self.stage_fence(stage) else {
            return self.answer(header, &Ok(()));
        };
        self.backend.api.retain(fence);
        self.answer_later(header, vec![fence], false, 0);
        Ok(())
    }
}
