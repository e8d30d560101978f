//! The channel between API clients and the thread that owns the machine.

use std::{io, sync::mpsc};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::{ApiError, Handler, MAX_CONNECTIONS, Request, Response, Status};

/// Where to send the reply to a request. Each request gets exactly one reply: if this is dropped
/// unused, because the thread that owns the machine is gone, the client gets an error.
pub struct Reply(Option<Box<Deliver>>);

type Deliver = dyn FnOnce(Result<Response, ApiError>) + Send;

impl Reply {
    /// `deliver` runs on the replying thread and must not block.
    pub fn new(deliver: impl FnOnce(Result<Response, ApiError>) + Send + 'static) -> Self {
        Self(Some(Box::new(deliver)))
    }

    /// Sends the reply.
    pub fn send(mut self, answer: Result<Response, ApiError>) {
        if let Some(deliver) = self.0.take() {
            deliver(answer);
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(deliver) = self.0.take() {
            deliver(Err(gone()));
        }
    }
}

fn gone() -> ApiError {
    ApiError::message(Status::Internal, "the VMM is shutting down")
}

struct Call {
    request: Request,
    reply: Reply,
}

/// Sends requests to the machine; each requesting thread has its own.
pub struct ApiSender {
    calls: mpsc::Sender<Call>,
    event: EventFd,
}

/// Receives requests on the thread that owns the machine.
pub struct ApiReceiver {
    calls: mpsc::Receiver<Call>,
    event: EventFd,
}

/// Creates a channel for requests.
pub fn channel() -> io::Result<(ApiSender, ApiReceiver)> {
    let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
    let (sender, calls) = mpsc::channel();
    let sender = ApiSender {
        calls: sender,
        event: event.try_clone()?,
    };
    Ok((sender, ApiReceiver { calls, event }))
}

impl ApiSender {
    /// Creates another sender for the same machine.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            calls: self.calls.clone(),
            event: self.event.try_clone()?,
        })
    }

    /// Queues a request and returns immediately.
    pub fn send(&self, request: Request, reply: Reply) {
        // If the receiver is gone, the call is returned and its reply dropped, which sends an error
        // to the client.
        if self.calls.send(Call { request, reply }).is_ok()
            && let Err(error) = self.event.write(1)
        {
            log::error!("cannot wake the VMM thread: {error}");
        }
    }

    /// Sends a request and waits for the reply. Must not be called by the thread that owns the
    /// machine.
    pub fn call(&self, request: Request) -> Result<Response, ApiError> {
        let (sender, answer) = mpsc::sync_channel(1);
        // Delivery fails only after this function has returned, which it does not do before.
        let reply = Reply::new(move |result| drop(sender.send(result)));
        self.send(request, reply);
        answer.recv().unwrap_or_else(|_| Err(gone()))
    }
}

impl ApiReceiver {
    /// Readable when requests are waiting. Non-blocking.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// Carries out waiting requests in order; to be called when the event is readable. Handles at
    /// most as many as there can be clients with a pending request, so that clients which never
    /// stop sending do not starve everything else; the event then stays readable. Returns after a
    /// `vmm.shutdown` even if more requests wait; those get an error when the receiver is dropped.
    pub fn serve(&self, handler: &mut dyn Handler) {
        // If there is nothing to read, an earlier call has already served everything.
        let _ = self.event.read();
        for _ in 0..MAX_CONNECTIONS {
            let Ok(Call { request, reply }) = self.calls.try_recv() else {
                return;
            };
            let last = matches!(request, Request::VmmShutdown);
            handler.take(request, reply);
            if last {
                return;
            }
        }
        // There may be more requests. The write fails only if the counter is full, which keeps the
        // event readable, too.
        let _ = self.event.write(1);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::VmmPingResponse;

    struct Ping(u32);

    impl Handler for Ping {
        fn handle(&mut self, _request: Request) -> Result<Response, ApiError> {
            self.0 += 1;
            Ok(Response::Ping(VmmPingResponse::current()))
        }
    }

    #[test]
    fn a_call_is_carried_out_by_the_receiving_thread() {
        let (sender, receiver) = channel().unwrap();
        let asker = thread::spawn(move || sender.call(Request::VmmPing));
        let mut handler = Ping(0);
        while handler.0 == 0 {
            receiver.serve(&mut handler);
            thread::yield_now();
        }
        assert!(matches!(asker.join().unwrap(), Ok(Response::Ping(_))));
    }

    /// Sends another request while one is being handled.
    struct Endless(ApiSender, usize);

    impl Handler for Endless {
        fn handle(&mut self, _request: Request) -> Result<Response, ApiError> {
            self.1 += 1;
            assert!(self.1 < 1000, "nothing else gets its turn");
            self.0.send(Request::VmmPing, Reply::new(drop));
            Ok(Response::Empty)
        }
    }

    #[test]
    fn clients_that_never_stop_asking_let_others_have_their_turn() {
        let (sender, receiver) = channel().unwrap();
        sender.send(Request::VmmPing, Reply::new(drop));
        let mut handler = Endless(sender, 0);
        receiver.serve(&mut handler);
        assert_eq!(handler.1, MAX_CONNECTIONS);
        assert!(receiver.event().read().is_ok(), "the rest is served later");
    }

    #[test]
    fn a_call_to_a_machine_that_is_gone_fails_instead_of_hanging() {
        let (sender, receiver) = channel().unwrap();
        let (answered, answer) = mpsc::channel();
        let reply = Reply::new(move |result| answered.send(result).unwrap());
        sender.send(Request::VmmPing, reply);
        drop(receiver);
        assert_eq!(
            answer.recv().unwrap().unwrap_err().status(),
            Status::Internal
        );
        assert_eq!(
            sender.call(Request::VmmPing).unwrap_err().status(),
            Status::Internal
        );
    }
}
