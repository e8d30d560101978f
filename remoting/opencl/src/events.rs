//! User events, and callbacks for any event.

use std::sync::Arc;

use remoting_proto::apis::opencl::calls::{
    CreateUserEvent, EventId, SetEventCallback, SetUserEventStatus,
};
use remoting_session::notice::Notice;

use super::{
    Server,
    callbacks::{self, Leaf},
    driver::{cl, outcome},
    objects::{Event, keep, made},
};

impl Server {
    pub(crate) fn create_user_event(&mut self, call: &CreateUserEvent) -> Result<(), i32> {
        self.backend.events.check(call.id.0)?;
        let event = self
            .backend
            .contexts
            .get(call.context.0)
            .and_then(|context| {
                let mut code = 0;
                let raw = cl!(
                    self.backend.api,
                    clCreateUserEvent(context.raw, &raw mut code)
                );
                Ok(Event {
                    raw: made(raw, code)?,
                    queue: None,
                    context: Arc::clone(&context.record),
                    decided: None,
                    callbacks: Vec::new(),
                    times: None,
                })
            });
        self.undecided += usize::from(event.is_ok());
        keep!(self.backend.events, call.id, event)
    }

    pub(crate) fn set_user_event_status(&mut self, call: &SetUserEventStatus) -> Result<(), i32> {
        let event = self.session.backend.events.get_mut(call.id.0)?;
        outcome(cl!(
            self.session.backend.api,
            clSetUserEventStatus(event.raw, call.status)
        ))?;
        event.decided = Some(call.status);
        event.callbacks = Vec::new();
        // The driver accepts one status for each user event.
        self.undecided = self.undecided.saturating_sub(1);
        Ok(())
    }

    pub(crate) fn release_event(&mut self, id: EventId) -> Result<(), i32> {
        match self.backend.events.take(id.0) {
            Some(event) => outcome(cl!(self.backend.api, clReleaseEvent(event.raw))),
            None => Ok(()),
        }
    }

    pub(crate) fn set_event_callback(&mut self, call: &SetEventCallback) -> Result<(), i32> {
        let raw = match self.backend.events.get(call.id.0) {
            Ok(event) => event.raw,
            Err(code) => {
                // The command never reached the driver: it has ended with an error.
                self.expected += 1;
                self.board.leave(Notice::Callback(call.callback, code));
                return Ok(());
            }
        };
        self.expected += 1;
        let leaf = Leaf::into_raw(&self.board, call.callback);
        let code = cl!(
            self.backend.api,
            clSetEventCallback(raw, call.at, Some(callbacks::event), leaf)
        );
        if code != 0 {
            // SAFETY: the driver refused it.
            unsafe { Leaf::drop_raw(leaf) };
            self.expected -= 1;
        } else if let Ok(event) = self.backend.events.get_mut(call.id.0)
            && event.is_undecided()
        {
            event.callbacks.push((call.at, call.callback));
        }
        outcome(code)
    }
}
