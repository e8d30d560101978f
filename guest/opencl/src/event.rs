//! Events, and how every command gets into a queue.

use std::ffi::c_void;

use remoting_proto::apis::opencl::{
    calls::{
        Call, CreateUserEvent, EventId, Order, SetEventCallback, SetUserEventStatus, Target,
        WaitForEvents,
    },
    codes,
};

use crate::{
    abi::{Outcome, bytes, entry_points, give, list, set},
    link,
    object::{self, Context, Event, Handle, Object, Own, Queue, get, keep_all},
    platform::ask,
};

/// The wait list and the requested event of a command, as the caller passed them.
#[derive(Clone, Copy)]
pub struct Around {
    pub count: u32,
    pub wait: *const Handle<Event>,
    pub event: *mut Handle<Event>,
}

impl Around {
    /// The numbers of the events to wait for.
    fn ids(&self, context: &Object<Context>) -> Outcome<Vec<EventId>> {
        let code = codes::INVALID_EVENT_WAIT_LIST;
        list(self.wait, self.count, code)?
            .into_iter()
            .map(|event| {
                let event = get(event).map_err(|_| code)?;
                if event.it.context.it.id != context.it.id {
                    return Err(codes::INVALID_CONTEXT);
                }
                Ok(event.it.id)
            })
            .collect()
    }
}

/// Puts a command into a queue. Does not wait for the worker unless the caller blocks.
pub fn submit<C: Call<Answer = ()>>(
    queue: &Object<Queue>,
    around: Around,
    command: u32,
    blocking: bool,
    make: impl FnOnce(Order) -> Outcome<C>,
) -> Outcome {
    let link = link::connected()?;
    let wait = around.ids(&queue.it.context)?;
    let id = (!around.event.is_null()).then(|| EventId(link.state.ids.events.take()));
    let call = make(Order {
        queue: queue.it.id,
        wait,
        event: id,
    });
    let progress = &queue.it.progress;
    let sent = call.and_then(|call| {
        if !blocking {
            let sent = link.post(&call);
            progress.sent();
            return sent;
        }
        let mark = progress.mark();
        let outcome = link.ask(&call);
        match outcome {
            // The command is done, and so is everything before it.
            Ok(()) if queue.it.in_order() => progress.done(mark),
            _ => progress.sent(),
        }
        outcome
    });
    let Some(id) = id else {
        return sent;
    };
    // Whatever the result of the command, the worker uses the number until it is released there.
    let event = Object::handle(Event {
        id,
        context: queue.it.context.keep(),
        queue: Some(queue.keep()),
        command,
    });
    match sent {
        Ok(()) => set(around.event, event),
        Err(_) => object::release(event)?,
    }
    sent
}

entry_points! {
    fn clWaitForEvents(count: u32, events: *const Handle<Event>) {
        if count == 0 || events.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        let events = keep_all(&list(events, count, codes::INVALID_VALUE)?)?;
        let first = events[0].it.context.it.id;
        if events.iter().any(|event| event.it.context.it.id != first) {
            return Err(codes::INVALID_CONTEXT);
        }
        link::connected()?.ask(&WaitForEvents {
            events: events.iter().map(|event| event.it.id).collect(),
        })
    }

    fn clGetEventInfo(
        event: Handle<Event>, name: u32, size: usize, value: *mut c_void, size_ret: *mut usize
    ) {
        let event = get(event)?;
        let queue = event.it.queue.as_ref();
        let answer = match name {
            codes::EVENT_COMMAND_QUEUE => {
                bytes(&[queue.map_or(std::ptr::null_mut(), |queue| queue.pointer())])
            }
            codes::EVENT_CONTEXT => bytes(&[event.it.context.pointer()]),
            codes::EVENT_REFERENCE_COUNT => bytes(&[event.count()]),
            codes::EVENT_COMMAND_TYPE => bytes(&[event.it.command]),
            _ => ask(Target::Event(event.it.id), name)?,
        };
        give(&answer, size, value, size_ret)
    }

    fn clGetEventProfilingInfo(
        event: Handle<Event>, name: u32, size: usize, value: *mut c_void, size_ret: *mut usize
    ) {
        let event = get(event)?;
        let profiled = event
            .it
            .queue
            .as_ref()
            .is_some_and(|queue| queue.it.properties & codes::QUEUE_PROFILING_ENABLE != 0);
        if !profiled {
            return Err(codes::PROFILING_INFO_NOT_AVAILABLE);
        }
        let answer = ask(Target::Profiling(event.it.id), name)?;
        give(&answer, size, value, size_ret)
    }

    fn clRetainEvent(event: Handle<Event>) {
        object::retain(event)
    }

    fn clReleaseEvent(event: Handle<Event>) {
        object::release(event)
    }

    fn clCreateUserEvent(context: Handle<Context>) -> Handle<Event> {
        let context = get(context)?;
        let link = link::connected()?;
        let id = EventId(link.state.ids.events.take());
        link.post(&CreateUserEvent {
            id,
            context: context.it.id,
        })?;
        Ok(Object::handle(Event {
            id,
            context: context.keep(),
            queue: None,
            command: codes::COMMAND_USER,
        }))
    }

    fn clSetUserEventStatus(event: Handle<Event>, status: i32) {
        let event = get(event)?;
        if event.it.command != codes::COMMAND_USER {
            return Err(codes::INVALID_EVENT);
        }
        if status > 0 {
            return Err(codes::INVALID_VALUE);
        }
        // Setting it twice is an error that the driver reports.
        link::connected()?.ask(&SetUserEventStatus {
            id: event.it.id,
            status,
        })
    }

    fn clSetEventCallback(
        event: Handle<Event>, at: i32, notify: Option<extern "C" fn(Handle<Event>, i32, *mut c_void)>,
        data: *mut c_void
    ) {
        let object = get(event)?;
        let notify = notify.ok_or(codes::INVALID_VALUE)?;
        if !(codes::COMPLETE as i32..=codes::SUBMITTED as i32).contains(&at) {
            return Err(codes::INVALID_VALUE);
        }
        // The event lives until its callback has been called.
        let (kept, data) = (object.keep(), data as usize);
        when(object, at, move |status| {
            notify(kept.pointer(), status.min(at), data as *mut c_void);
        })
    }
}

/// A new event that this driver must complete with [`decide`] in any case, since commands may wait
/// for it.
pub fn undecided(context: &Object<Context>) -> Outcome<Own<Event>> {
    let link = link::connected()?;
    let id = EventId(link.state.ids.events.take());
    // Whether or not this can be sent, the number is returned together with the object.
    let event = Object::own(
        Event {
            id,
            context: context.keep(),
            queue: None,
            command: codes::COMMAND_USER,
        },
        0,
    );
    link.post(&CreateUserEvent {
        id,
        context: context.it.id,
    })?;
    Ok(event)
}

/// Sets the status of such an event: 0, or an error.
pub fn decide(event: &Object<Event>, status: i32) {
    if let Some(link) = link::get() {
        // If this cannot be sent, nobody is left who could wait for it.
        let _ = link.post(&SetUserEventStatus {
            id: event.it.id,
            status,
        });
    }
}

/// Registers a callback for when an event has this status, or an error.
fn when(event: &Object<Event>, at: i32, call: impl FnOnce(i32) + Send + 'static) -> Outcome {
    let link = link::connected()?;
    let number = link.register_callback(Box::new(call));
    link.ask(&SetEventCallback {
        id: event.it.id,
        at,
        callback: number,
    })
    .inspect_err(|_| link.cancel_callback(number))
}

/// Registers a callback for when the command of an event is over. It is called on the callback
/// thread.
pub fn when_complete(event: Handle<Event>, call: impl FnOnce(i32) + Send + 'static) -> Outcome {
    let event = get(event)?;
    let kept = event.keep();
    when(event, codes::COMPLETE as i32, move |status| {
        call(status);
        drop(kept);
    })
}
