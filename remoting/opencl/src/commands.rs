//! Commands in queues, and waiting for them.

use std::{
    cell::Cell,
    ptr::{null, null_mut},
    sync::Arc,
    time::Instant,
};

use remoting_proto::{
    apis::opencl::{
        calls::{self, EventId, Order, QueueId, Request, StageId, WindowRange},
        codes,
    },
    wire::{Flags, Header},
};
use remoting_session::{
    backend::QueueKey,
    limit::{self, Limit},
};
use remoting_transport::endpoint::Gone;
use remoting_turns::Moment;

use super::{
    Server,
    driver::{
        api::{Api, Handle},
        cl, outcome,
    },
    freed,
    objects::Event,
    transfers::There,
};

/// How a command's completion is detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// By its event, if at all.
    Answered,
    /// In the driver call that enqueues it.
    Done,
}

/// The parameters that a command passes on to the driver.
pub(crate) struct Slot<'a> {
    pub queue: Handle,
    pub count: u32,
    pub wait: *const Handle,
    pub event: *mut Handle,
    /// Set once the driver has accepted a part of the command, which may then be in progress although the
    /// command fails.
    pub accepted: &'a Cell<bool>,
}

pub(crate) fn sizes(numbers: [u64; 3]) -> [usize; 3] {
    numbers.map(|number| number as usize)
}

impl Server {
    /// Enqueues a command: looks up its queue and events, lets `enqueue` call the driver, and
    /// handles the event, the stage and the answer.
    pub(crate) fn enqueue(
        &mut self,
        header: Header,
        order: &Order,
        stage: Option<StageId>,
        enqueue: impl FnOnce(&mut Self, &Api, &Slot<'_>) -> Result<i32, i32>,
    ) -> Result<(), Gone> {
        self.enqueue_as(Way::Answered, header, order, stage, enqueue)
    }

    /// Enqueues a command. With [`Way::Done`], it has completed when `enqueue` returns.
    pub(crate) fn enqueue_as(
        &mut self,
        way: Way,
        header: Header,
        order: &Order,
        stage: Option<StageId>,
        enqueue: impl FnOnce(&mut Self, &Api, &Slot<'_>) -> Result<i32, i32>,
    ) -> Result<(), Gone> {
        let start = (way == Way::Done).then(Moment::now);
        let waits = header.flags.has(Flags::ANSWER);
        let polled = waits && way == Way::Answered;
        let mut event: Handle = 0;
        let accepted = Cell::new(false);
        let metered = self.sharing.metered.take();
        let outcome = (|| {
            let queue = self.session.backend.queues.get_mut(order.queue.0)?;
            if self.session.limit.as_ref().is_some_and(Limit::is_full) {
                return Err(codes::OUT_OF_RESOURCES);
            }
            if let Some(id) = order.event {
                self.session.backend.events.check(id.0)?;
            }
            let mut wait = Vec::with_capacity(order.wait.len());
            for id in &order.wait {
                wait.push(match self.session.backend.events.get(id.0) {
                    Ok(event) => event.raw,
                    // A command that this one waits for failed before it reached the driver.
                    Err(_) => return Err(codes::EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST),
                });
            }
            // Even if the command fails, the driver may have accepted a part of it.
            queue.end.open(&self.session.backend.api);
            let slot = Slot {
                queue: queue.raw,
                count: wait.len() as u32,
                wait: if wait.is_empty() {
                    null()
                } else {
                    wait.as_ptr()
                },
                event: if order.event.is_some()
                    || way == Way::Answered
                        && (stage.is_some() || waits || metered.is_some() || self.limit.is_some())
                {
                    &raw mut event
                } else {
                    null_mut()
                },
                accepted: &accepted,
            };
            let api = Arc::clone(&self.backend.api);
            if way == Way::Done {
                self.sender.attend(true);
            }
            outcome(enqueue(self, &api, &slot)?)
        })();
        if way == Way::Done {
            self.sender.attend(false);
        }
        if let Err(code) = outcome {
            match stage {
                Some(stage) if accepted.get() => self.stage_behind(stage, order.queue),
                Some(stage) => self.stage_free(stage, false),
                None => {}
            }
            if let Some(id) = order.event
                && self.backend.events.check(id.0).is_ok()
            {
                self.backend.events.put(id.0, Err(code));
            }
            if waits {
                return self.answer(header, &Err::<(), i32>(code));
            }
            return self.defer(header, order.queue, code);
        }
        if let Some(missing) = &mut self.backend.missing {
            missing.overwritten();
        }
        if let Some(kind) = metered {
            match start {
                Some(start) => self.meter_done(kind, start),
                None => self.meter(kind, order.queue.0, event),
            }
        }
        if let Some(start) = start {
            if let Some(stage) = stage {
                self.stage_free(stage, true);
            }
            if let Ok(queue) = self.session.backend.queues.get_mut(order.queue.0)
                && queue.in_order()
            {
                // Everything before it has ended, too.
                queue.end.close(&self.session.backend.api);
            }
            if let Some(id) = order.event {
                self.keep_event(id, event, order.queue);
            }
            let deferred = self.take_deferred(order.queue);
            self.answer(header, &deferred.map_or(Ok(()), Err))?;
            self.last_wait = Moment::now().since(start);
            return Ok(());
        }
        self.pass_event(header, order, stage, event, polled);
        Ok(())
    }

    /// Releases the stage of a command that has failed when the part that the driver has accepted ends. The
    /// command's queue is in order.
    pub(super) fn stage_behind(&mut self, stage: StageId, id: QueueId) {
        let Ok(queue) = self.session.backend.queues.get_mut(id.0) else {
            return self.stage_free(stage, false);
        };
        match freed::end(&self.session.backend.api, queue) {
            Ok(Some(event)) => self.stage_until(stage, event, false),
            Ok(None) => self.stage_free(stage, false),
            // Nothing but a wait tells when it ends. If that might wait for the client, this is tried again later.
            Err(_) if self.session.undecided == 0 && self.session.expected == 0 => {
                cl!(self.session.backend.api, clFinish(queue.raw));
                self.stage_free(stage, false);
            }
            Err(_) => self.backend.unmarked.push((stage, id)),
        }
    }

    /// Passes a driver's event on to everything that waits for the command or monitors it.
    fn pass_event(
        &mut self,
        header: Header,
        order: &Order,
        stage: Option<StageId>,
        event: Handle,
        polled: bool,
    ) {
        if event == 0 {
            return;
        }
        // One reference came from the driver; each further use takes its own.
        if let Some(limit) = &self.limit
            && let Ok(queue) = self.backend.queues.get(order.queue.0)
        {
            cl!(self.backend.api, clRetainEvent(event));
            limit.order(limit::Order {
                fence: event,
                queue: QueueKey {
                    raw: queue.raw,
                    in_order: queue.in_order(),
                },
            });
        }
        if let Some(stage) = stage {
            cl!(self.backend.api, clRetainEvent(event));
            self.stage_until(stage, event, true);
        }
        if let Some(id) = order.event {
            cl!(self.backend.api, clRetainEvent(event));
            self.keep_event(id, event, order.queue);
        }
        if polled {
            if let Ok(queue) = self.backend.queues.get(order.queue.0) {
                cl!(self.backend.api, clFlush(queue.raw));
            }
            let deferred = self.take_deferred(order.queue);
            self.answer_later(header, vec![event], true, deferred.unwrap_or(0));
        } else {
            cl!(self.backend.api, clReleaseEvent(event));
        }
    }

    /// Stores a command's event, and takes over a reference to it.
    fn keep_event(&mut self, id: EventId, raw: Handle, queue: QueueId) {
        let of = self.backend.queues.get(queue.0);
        let event = of.map(|of| Event {
            raw,
            queue: Some(queue),
            context: Arc::clone(&of.context),
            decided: None,
            callbacks: Vec::new(),
            times: None,
        });
        self.backend.events.put(id.0, event);
    }

    /// Stores the error of a command that nobody waits for, until somebody waits for its queue. The
    /// first such error is reported to the context's callback immediately.
    fn defer(&mut self, header: Header, queue: QueueId, code: i32) -> Result<(), Gone> {
        let Ok(queue) = self.backend.queues.get_mut(queue.0) else {
            return Ok(());
        };
        if queue.deferred.is_some() {
            return Ok(());
        }
        queue.deferred = Some(code);
        let context = queue.made.context;
        let name = Request::name(header.opcode);
        let text = format!("Gantry: {name} failed with code {code} after it had been enqueued");
        self.report(context.0, text.into_bytes())
    }

    /// Takes the error of a command that nobody waited for, to report it now. Returns a code that
    /// waiting calls may return.
    fn take_deferred(&mut self, queue: QueueId) -> Option<i32> {
        let queue = self.backend.queues.get_mut(queue.0).ok()?;
        Some(match queue.deferred.take()? {
            code @ (codes::OUT_OF_HOST_MEMORY
            | codes::MEM_OBJECT_ALLOCATION_FAILURE
            | codes::EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST) => code,
            _ => codes::OUT_OF_RESOURCES,
        })
    }

    /// Locates a range of the window, if it has the `needed` bytes for a command.
    pub(crate) fn place(&self, place: &WindowRange, needed: Option<u64>) -> Result<*mut u8, i32> {
        if needed.is_none_or(|needed| needed > place.length) {
            return Err(codes::INVALID_VALUE);
        }
        self.window
            .at(place.offset, place.length)
            .ok_or(codes::INVALID_VALUE)
    }

    /// Executes a command.
    pub(crate) fn command(&mut self, header: Header, request: Request) -> Result<(), Gone> {
        self.touch(&request);
        self.note_command(&request);
        match request {
            Request::NdRange(c) => self.nd_range(header, &c),
            Request::ReadBuffer(c) => {
                let there = There::Buffer(c.mem, c.offset);
                self.transfer(header, &c.order, &there, &c.to, false)
            }
            Request::WriteBuffer(c) => {
                let there = There::Buffer(c.mem, c.offset);
                self.transfer(header, &c.order, &there, &c.from, true)
            }
            Request::SvmRead(c) => {
                self.transfer(header, &c.order, &There::Svm(c.address), &c.to, false)
            }
            Request::SvmWrite(c) => {
                self.transfer(header, &c.order, &There::Svm(c.address), &c.from, true)
            }
            Request::SvmCopy(c) => self.svm_copy(header, &c),
            Request::SvmFill(c) => self.svm_fill(header, &c),
            Request::SvmMigrate(c) => self.svm_migrate(header, &c),
            Request::BufferRect(c) => self.buffer_rect(header, &c),
            Request::ImageRect(c) => self.image_rect(header, &c),
            Request::CopyBuffer(c) => self.copy_buffer(header, &c),
            Request::CopyBufferRect(c) => self.copy_buffer_rect(header, &c),
            Request::CopyImage(c) => self.copy_image(header, &c),
            Request::CopyImageToBuffer(c) => self.copy_image_to_buffer(header, &c),
            Request::CopyBufferToImage(c) => self.copy_buffer_to_image(header, &c),
            Request::FillBuffer(c) => self.fill_buffer(header, &c),
            Request::FillImage(c) => self.fill_image(header, &c),
            Request::Migrate(c) => self.migrate(header, &c),
            Request::Marker(c) => self.marker(header, &c.order, None),
            Request::Unstage(c) => self.marker(header, &c.order, c.place.stage),
            Request::Barrier(c) => self.barrier(header, &c.order),
            Request::Map(c) => self.map(header, &c),
            Request::Unmap(c) => self.unmap(header, &c),
            // All other calls are served elsewhere.
            _ => self.answer(header, &Err::<(), i32>(codes::INVALID_OPERATION)),
        }
    }

    /// `clFinish`. A marker's event completes when everything before it has. The driver's own wait
    /// is faster and is used if this thread may block.
    pub(crate) fn finish(&mut self, header: Header, queue: QueueId) -> Result<(), Gone> {
        if self.may_stay(header) {
            let start = Instant::now();
            let code = match self.session.backend.queues.get_mut(queue.0) {
                Ok(queue) => {
                    self.session.sender.attend(true);
                    let code = cl!(self.session.backend.api, clFinish(queue.raw));
                    self.session.sender.attend(false);
                    if code == 0 {
                        queue.end.close(&self.session.backend.api);
                    }
                    code
                }
                Err(code) => code,
            };
            let deferred = self.take_deferred(queue);
            self.answer(header, &outcome(deferred.unwrap_or(code)))?;
            self.last_wait = start.elapsed();
            return Ok(());
        }
        let order = Order {
            queue,
            wait: Vec::new(),
            event: None,
        };
        let header = Header {
            flags: header.flags.with(Flags::ANSWER),
            ..header
        };
        self.marker(header, &order, None)
    }

    pub(crate) fn flush(&mut self, queue: QueueId) -> Result<(), i32> {
        let raw = self.backend.queues.get(queue.0)?.raw;
        outcome(cl!(self.backend.api, clFlush(raw)))
    }

    pub(crate) fn await_stage(&mut self, header: Header, stage: StageId) -> Result<(), Gone> {
        let Some(event) = self.stage_fence(stage) else {
            return self.answer(header, &Ok(()));
        };
        cl!(self.backend.api, clRetainEvent(event));
        self.answer_later(header, vec![event], false, 0);
        Ok(())
    }

    pub(crate) fn wait_for_events(
        &mut self,
        header: Header,
        call: &calls::WaitForEvents,
    ) -> Result<(), Gone> {
        let mut events = Vec::with_capacity(call.events.len());
        let mut code = 0;
        for id in &call.events {
            let Ok(event) = self.backend.events.get(id.0) else {
                code = codes::EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST;
                continue;
            };
            let (raw, queue) = (event.raw, event.queue);
            cl!(self.backend.api, clRetainEvent(raw));
            events.push(raw);
            if let Some(id) = queue
                && let Ok(queue) = self.backend.queues.get(id.0)
            {
                cl!(self.backend.api, clFlush(queue.raw));
                if let (0, Some(late)) = (code, self.take_deferred(id)) {
                    code = late;
                }
            }
        }
        self.answer_later(header, events, true, code);
        Ok(())
    }
}
