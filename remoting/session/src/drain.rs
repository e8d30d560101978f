//! Passive mode: serving the ring on the caller's vCPU, without blocking.
//!
//! Answers that do not fit into their ring are kept until the application has read some and calls again. Calls for
//! which the driver may need its kernel or much time are left to the server's own CPU.

use std::collections::VecDeque;

use remoting_proto::wire::{Api, Header};
use remoting_transport::{
    bell::Bell,
    endpoint::{Gone, Receiver, Sender},
    port_bell::Waker,
    ring::Lines,
    window::Slice,
};

use super::{
    backend::Backend,
    server::{Error, Session},
};

/// The CPU that executes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cpu {
    /// The application's vCPU.
    Caller,
    /// The server process's own.
    Own,
}

/// The outcome of a delegation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// The ring of calls is empty, or its calls must wait until answers have been read.
    Empty,
    /// A ring's worth of calls has been served, and there are more.
    More,
    /// The next call must run on the process's own CPU.
    Own,
}

/// State of a session in passive mode.
#[derive(Debug)]
pub struct PassiveState<R> {
    pub(crate) unsent: Unsent,
    /// A call taken from the ring that must run on the server's own CPU.
    kept: Option<(Header, R)>,
}

impl<R> Default for PassiveState<R> {
    fn default() -> Self {
        Self {
            unsent: Unsent::default(),
            kept: None,
        }
    }
}

/// Unsent messages, the first of which may have been sent in part. While there are any, no call is taken: they are what
/// one call has caused, and what the application waited for that had become due by then.
#[derive(Debug, Default)]
pub struct Unsent(VecDeque<(Header, Vec<u8>)>);

impl Unsent {
    /// Sends a message after the waiting ones, or keeps the part that does not fit.
    pub fn add<R: Lines, L: Bell>(
        &mut self,
        sender: &mut Sender<R, L>,
        header: Header,
        body: &[u8],
    ) -> Result<(), Gone> {
        let mut rest = body;
        if !self.0.is_empty() || !sender.offer(header, &mut rest)? {
            self.0.push_back((header, rest.to_vec()));
        }
        Ok(())
    }

    /// Sends as much as fits now. Returns whether nothing is left.
    pub fn send<R: Lines, L: Bell>(&mut self, sender: &mut Sender<R, L>) -> Result<bool, Gone> {
        while let Some((header, body)) = self.0.front_mut() {
            let mut rest = &body[..];
            let whole = sender.offer(*header, &mut rest)?;
            let sent = body.len() - rest.len();
            if !whole {
                body.drain(..sent);
                return Ok(false);
            }
            self.0.pop_front();
        }
        Ok(true)
    }
}

impl<B: Backend> Session<B> {
    /// Serves the calls in the ring, then returns. The work is bounded by the number of calls that fit into the ring.
    /// Only for a server whose bell is [`Waker::Passive`]; others have threads.
    pub fn drain(
        &mut self,
        calls: &mut Receiver<Slice, Waker>,
        body: &mut Vec<u8>,
        cpu: Cpu,
    ) -> Result<Drained, Error> {
        let most = self.window.calls().count();
        for _ in 0..most {
            let Some(passive) = &mut self.passive else {
                break;
            };
            if !passive.unsent.send(&mut self.sender)? {
                // The application must read first, then call again.
                calls.leave();
                return Ok(Drained::Empty);
            }
            let serves = self.phase.serves();
            let next = match passive.kept.take() {
                None if !serves => None,
                None => match calls.poll(body)? {
                    Some(header) => Some((header, B::Api::decode(header.opcode, body)?)),
                    None => None,
                },
                kept => kept,
            };
            // This waits until all outstanding work has ended; then the state is saved.
            let idle = match next {
                Some((_, ref request)) if cpu == Cpu::Caller && B::Api::needs_kernel(request) => {
                    passive.kept = next;
                    return Ok(Drained::Own);
                }
                None if !serves && cpu == Cpu::Caller => return Ok(Drained::Own),
                None if !serves => {
                    self.obey(calls)?;
                    true
                }
                Some((header, request)) => {
                    self.serve(header, request)?;
                    false
                }
                None => true,
            };
            let noticed = self.notices()?;
            let waited = self.poll_waits()?;
            let passed = self.pass_on()?;
            if idle && self.phase.serves() && !(noticed || waited || passed) && calls.leave() {
                return Ok(Drained::Empty);
            }
        }
        Ok(Drained::More)
    }
}
