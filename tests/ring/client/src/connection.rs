//! Calls and their answers.

use alloc::{sync::Arc, vec::Vec};
use core::{fmt, time::Duration};

use remoting_proto::wire::{
    Flags, Header, Malformed, Wire,
    messages::{ANSWER, Call, WindowRange},
};
use remoting_transport::{
    bell::Bell,
    endpoint::{Gone, Receiver, Sender, Spin},
    ring::{Consumer, Producer},
    window::{Slice, Window},
};

/// Polling time before sleeping: longer than anything here takes except for building a program.
const SPIN: Duration = Duration::from_millis(100);

/// Why there are no figures.
#[derive(Clone, Debug)]
pub enum Failure {
    /// The rings failed.
    Gone(Gone),
    /// An answer is malformed.
    Malformed(Malformed),
    /// A call failed.
    Code {
        /// Name of the call.
        call: &'static str,
        /// The API's code.
        code: i32,
    },
    /// There is no device.
    NoDevice,
    /// The device has computed a wrong result.
    Wrong {
        /// Index of the wrong value.
        at: usize,
    },
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gone(why) => write!(f, "the rings cannot be used: {why}"),
            Self::Malformed(why) => write!(f, "an answer is malformed: {why}"),
            Self::Code { call, code } => write!(f, "{call} failed with the code {code}"),
            Self::NoDevice => f.write_str("the worker offers no device"),
            Self::Wrong { at } => write!(f, "the sum at {at} is wrong"),
        }
    }
}

impl core::error::Error for Failure {}

impl From<Gone> for Failure {
    fn from(why: Gone) -> Self {
        Self::Gone(why)
    }
}

impl From<Malformed> for Failure {
    fn from(why: Malformed) -> Self {
        Self::Malformed(why)
    }
}

/// A connection to a worker.
pub struct Connection<B> {
    calls: Sender<Slice, B>,
    answers: Receiver<Slice, B>,
    sequence: u64,
    scratch: Vec<u8>,
    body: Vec<u8>,
}

impl<B: Bell + Clone> Connection<B> {
    /// Opens a connection over a window whose worker has answered the hello.
    pub fn new(window: &Arc<Window>, bell: B) -> Self {
        Self {
            calls: Sender::new(Producer::new(window.calls(), bell.clone()), SPIN),
            answers: Receiver::new(Consumer::new(window.answers(), bell)),
            sequence: 0,
            scratch: Vec::new(),
            body: Vec::new(),
        }
    }

    fn send<C: Call>(&mut self, call: &C, flags: Flags, later: bool) -> Result<u64, Failure> {
        self.sequence += 1;
        self.scratch.clear();
        call.put(&mut self.scratch);
        let header = Header {
            length: 0,
            opcode: C::OPCODE,
            flags: flags.with(Flags::ALONE),
            sequence: self.sequence,
        };
        if later {
            self.calls.write(header, &self.scratch, || true)?;
        } else {
            self.calls.send(header, &self.scratch, || true)?;
        }
        Ok(self.sequence)
    }

    /// Sends a call without waiting.
    pub fn post<C: Call>(&mut self, call: &C) -> Result<(), Failure> {
        self.send(call, Flags::default(), false).map(drop)
    }

    /// Queues a call that is sent together with the next one.
    pub fn post_with_next<C: Call>(&mut self, call: &C) -> Result<(), Failure> {
        self.send(call, Flags::default(), true).map(drop)
    }

    /// Sends a call and waits for its answer.
    pub fn ask<C: Call>(&mut self, call: &C) -> Result<C::Answer, Failure> {
        let sequence = self.send(call, Flags::ANSWER, false)?;
        let mut spin = Spin::new(SPIN);
        loop {
            let Some(header) = self.answers.poll(&mut self.body)? else {
                self.answers.wait(&mut spin, || false);
                continue;
            };
            // There is only one thread, and there are no stages or callbacks, so the next answer is
            // the right one.
            if header.opcode == ANSWER && header.sequence == sequence {
                break;
            }
        }
        let answer = Result::<C::Answer, i32>::from_bytes(&self.body)?;
        answer.map_err(|code| Failure::Code {
            call: C::NAME,
            code,
        })
    }
}

/// A range of `length` bytes in the window's data, starting at `offset` of the data.
pub fn place(window: &Window, offset: u64, length: u64) -> WindowRange {
    WindowRange {
        offset: window.data() + offset,
        length,
        stage: None,
    }
}
