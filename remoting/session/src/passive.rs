//! A worker without a thread of its own: it runs only while an application lends its CPU
//! ([`gate`](remoting_transport::gate)).
//!
//! # Which drivers work in passive mode
//!
//! Behind a real gate the process is stopped, together with the whole virtual machine that it is
//! in: no other thread of it runs, and no timer. Work of the driver must be done when its function
//! returns, or must be done by the device.
//!
//! | what a driver does | on the application's CPU |
//! |---|---|
//! | writes registers and rings of its device, reads what the device has written | works |
//! | system calls that return at once | work where the gate has the server's kernel in view |
//! | system calls that wait, locks that another thread holds | end the server |
//! | threads of its own that do the work (PoCL and other drivers for CPUs) | never come to an end |
//!
//! For the last two there is the process's own CPU, which the gate wakes on request (its slow
//! path). It is always used for compiling and linking programs, and for everything if
//! [`Offer::own`] is set. That is as slow as any worker that sleeps, and such a driver is better
//! served by the ring.
//!
//! The worker itself needs no thread and waits for nothing: it polls commands whenever the
//! application calls, and does not use blocking driver calls (`clFinish`, blocking copies). There
//! is no arbiter on this path: a server belongs to one application.
//!
//! # Trust
//!
//! Everything in the shared memory belongs to the application, and is treated as by any worker. In
//! addition, an application chooses when, how often and in which order handlers run, and their
//! arguments, none of which matter. A call before the hello, a second hello, or an invalid handler
//! ends the server, which serves only this application.

use std::{ptr::NonNull, sync::Arc, time::Duration};

use remoting_proto::wire::{
    api::Spoken,
    hello::{Form, Hello},
};
use remoting_transport::{
    endpoint::Receiver,
    gate,
    port_bell::Waker,
    window::{Slice, Window},
};

use super::{
    backend::Backend,
    drain::{Cpu, Drained},
    quota::Quota,
    server::{Nudge, Session, Tuning},
};

/// The parts of a worker for an application that has not connected yet.
#[derive(Debug)]
pub struct Offer<B> {
    /// Executes the application's requests.
    pub backend: B,
    /// The device memory that the application may have.
    pub quota: Arc<Quota>,
    /// Whether the process's own CPU executes everything.
    pub own: bool,
}

#[derive(Debug)]
struct Serving<B: Backend> {
    session: Session<B>,
    calls: Receiver<Slice, Waker>,
    body: Vec<u8>,
    /// Whether the process's own CPU executes everything.
    own: bool,
}

#[derive(Debug)]
enum State<B: Backend> {
    /// The application has not connected yet.
    Waiting(Offer<B>),
    Serving(Box<Serving<B>>),
    /// Nobody is served any more.
    Ended,
}

/// A worker for one application.
#[derive(Debug)]
pub struct Passive<B: Backend>(State<B>);

impl<B: Backend> Passive<B> {
    /// A worker whose application has not connected yet.
    pub fn new(offer: Offer<B>) -> Self {
        Self(State::Waiting(offer))
    }

    /// Answers the application's hello. Returns whether its own hello is in the window now; also if it refuses an
    /// application of another version, which needs the hello to report both.
    ///
    /// # Safety
    /// The memory begins at a page boundary, lives as long as this value is used, and nothing else
    /// in this program uses it.
    pub unsafe fn handshake(&mut self, shared: NonNull<[u8]>) -> bool {
        let offer = match std::mem::replace(&mut self.0, State::Ended) {
            State::Waiting(offer) => offer,
            State::Ended => return false,
            State::Serving(_) => {
                not_served(&"it sent a second hello");
                return false;
            }
        };
        let length = shared.len() as u64;
        let ring = gate::ring(length);
        // SAFETY: the caller's promise.
        let window = match unsafe { Window::over(shared.as_ptr().cast(), length, ring, false) } {
            Ok(window) => window,
            Err(error) => {
                not_served(&error);
                return false;
            }
        };
        let ours = Hello::answer(Spoken::of::<B::Api>(), Form::File, (length, ring));
        let hello = window.client_hello();
        // Also for an application of another build, so that it can report both versions.
        window.reply(&ours.to_bytes());
        if let Err(refused) = Hello::check_for::<B::Api>(&hello) {
            not_served(&refused);
            return true;
        }
        let tuning = Tuning {
            spin: Duration::ZERO,
            waker: Waker::Passive,
            quota: offer.quota,
        };
        // There is no listener: an application that expects something calls.
        let nudge = Nudge(Box::new(|| {}));
        let (session, calls) = Session::new(offer.backend, window, tuning, nudge);
        calls.leave();
        self.0 = State::Serving(Box::new(Serving {
            session,
            calls,
            body: Vec::new(),
            own: offer.own,
        }));
        true
    }

    /// Serves the contents of the ring of calls. None if the application is not served (any more).
    pub fn drain(&mut self, cpu: Cpu) -> Option<Drained> {
        let serving = match &mut self.0 {
            State::Serving(serving) => &mut **serving,
            State::Ended => return None,
            State::Waiting(_) => {
                not_served(&"it called before its hello");
                self.0 = State::Ended;
                return None;
            }
        };
        if serving.own && cpu == Cpu::Caller {
            return Some(Drained::Own);
        }
        let Serving {
            session,
            calls,
            body,
            ..
        } = serving;
        match session.drain(calls, body, cpu) {
            Ok(drained) => Some(drained),
            Err(error) => {
                not_served(&error);
                self.0 = State::Ended;
                None
            }
        }
    }

    /// Executes a delegated handler entirely on one CPU, which caller and worker share, and returns
    /// the handler's result. A real gate wakes the process for slow work.
    ///
    /// # Safety
    /// As for [`handshake`](Self::handshake).
    pub unsafe fn delegated(&mut self, handler: usize, shared: NonNull<[u8]>) -> u64 {
        match handler {
            // SAFETY: the caller's promise.
            gate::HANDSHAKE => match unsafe { self.handshake(shared) } {
                true => gate::EMPTY,
                false => gate::ENDED,
            },
            gate::DRAIN => {
                let drained = match self.drain(Cpu::Caller) {
                    Some(Drained::Own) => self.drain(Cpu::Own),
                    drained => drained,
                };
                match drained {
                    Some(Drained::Empty) => gate::EMPTY,
                    // The own CPU leaves nothing for itself.
                    Some(Drained::More | Drained::Own) => gate::MORE,
                    None => gate::ENDED,
                }
            }
            _ => gate::ENDED,
        }
    }
}

/// Logs once why the application is not served from now on.
fn not_served(why: &dyn std::fmt::Display) {
    base::note!("gantry-accel: the application behind the gate is not served: {why}");
}
