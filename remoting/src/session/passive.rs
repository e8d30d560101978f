//! A worker without a thread of its own: it does something while an application lends its CPU
//! ([`gate`](crate::link::gate)), and nothing otherwise.
//!
//! # Which drivers can work so
//!
//! Behind a real gate the process stands still, with the whole virtual machine that it is in: no
//! other thread of it runs, and no timer. What the driver does has to be done when its function
//! returns, or has to be done by the device.
//!
//! | what a driver does | on the application's CPU |
//! |---|---|
//! | writes registers and rings of its device, reads what the device has written | works |
//! | system calls that return at once | work where the gate has the server's kernel in view |
//! | system calls that wait, locks that another thread holds | end the server |
//! | threads of its own that do the work (PoCL and other drivers for CPUs) | never come to an end |
//!
//! For the last two there is the process's own CPU, which the gate wakes on request (its slow
//! path): always for compiling and linking programs, and for everything if [`Passive::new`] is told
//! so. That is as slow as any worker that sleeps, and such a driver is better served by the ring.
//!
//! The worker itself needs no thread and waits for nothing: commands are polled for whenever the
//! application comes by; calls of the driver that wait (`clFinish`, blocking copies) are not used.
//! There is no arbiter on this path: a server belongs to one application.
//!
//! # Who trusts whom
//!
//! Everything in the shared memory is the application's and is treated as by any worker. Besides,
//! an application chooses when and how often handlers run, in which order, and with which
//! arguments: there are none that matter. A call before the hello, a second hello, or a handler in
//! another one's place end the server, which is this one application's.

use std::{ptr::NonNull, sync::Arc, time::Duration};

use super::{
    backend::Backend,
    drain::{Cpu, Drained},
    quota::Quota,
    server::{Nudge, Session, Tuning},
};
use crate::{
    link::{
        endpoint::Receiver,
        gate,
        port_bell::Waker,
        window::{Slice, Window},
    },
    wire::{
        api::Spoken,
        hello::{Form, Hello},
    },
};

/// What a worker for an application that has not come yet is made of.
#[derive(Debug)]
pub struct Offer<B> {
    /// What carries the application's requests out.
    pub backend: B,
    /// How much device memory the application may have.
    pub quota: Arc<Quota>,
    /// Whether the process's own CPU does everything.
    pub own: bool,
}

#[derive(Debug)]
struct Serving<B: Backend> {
    session: Session<B>,
    calls: Receiver<Slice, Waker>,
    body: Vec<u8>,
    /// Whether the process's own CPU does everything.
    own: bool,
}

#[derive(Debug)]
enum State<B: Backend> {
    /// The application has not come yet.
    Waiting(Offer<B>),
    Serving(Box<Serving<B>>),
    /// Nobody is served any more.
    Ended,
}

/// A worker for one application.
#[derive(Debug)]
pub struct Passive<B: Backend>(State<B>);

impl<B: Backend> Passive<B> {
    /// A worker whose application has not come yet.
    pub fn new(offer: Offer<B>) -> Self {
        Self(State::Waiting(offer))
    }

    /// Answers the application's hello. Whether the worker serves it.
    ///
    /// # Safety
    /// The memory begins at a page's start, is there as long as this value is used, and nobody in
    /// this program uses it otherwise.
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
        // Also for an application of another build, so that it can name both versions.
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
        // Nobody listens: who expects something comes by.
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

    /// Serves what the ring of calls holds. None if the application is not served (any more).
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

    /// Does what a caller has delegated to a handler, all on one CPU, which both have; what the
    /// handler returns. A real gate wakes the process for slow work.
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
                    // Nothing is left to the own CPU there.
                    Some(Drained::More | Drained::Own) => gate::MORE,
                    None => gate::ENDED,
                }
            }
            _ => gate::ENDED,
        }
    }
}

/// Says once why the application is not served from now on.
fn not_served(why: &dyn std::fmt::Display) {
    crate::note!("gantry-accel: the application behind the gate is not served: {why}");
}

#[cfg(test)]
#[cfg(not(loom))]
#[path = "passive_tests.rs"]
mod tests;
