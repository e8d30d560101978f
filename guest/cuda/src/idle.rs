//! Streams that are known to be idle. Programs wait for a stream before each copy, whether or not
//! anything was sent to it since the last wait. If nothing was, the worker need not be asked.

use std::{
    cell::Cell,
    sync::atomic::{AtomicU64, Ordering},
};

use remoting_proto::{
    apis::cuda::{
        FIRST,
        calls::{
            Await, CaptureInfo, ContextSynchronize, Copy, CopyRows, CopyVolume, EventSynchronize,
            Fill, Launch, LaunchGraph, MemoryInfo, PointerDevice, Read, Signal, StreamSynchronize,
            Write,
        },
    },
    wire::messages::Call,
};

/// The number of counters that streams share. Work for one stream makes those with the same counter
/// unknown, but no others.
const COUNTS: usize = 64;
/// The maximum number of streams that a thread knows to be idle.
const KNOWN: usize = 8;

/// The number of calls sent that give work to one of a counter's streams and to no other.
static TO: [AtomicU64; COUNTS] = [const { AtomicU64::new(0) }; COUNTS];
/// The number of calls sent that may give work to any stream.
static TO_ANY: AtomicU64 = AtomicU64::new(0);
/// The number of the program's calls that have failed: each later wait has to report a persistent
/// error.
static FAILED: AtomicU64 = AtomicU64::new(0);

/// What had been sent to a stream at some point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    context: u32,
    stream: u32,
    to: u64,
    to_any: u64,
    failed: u64,
}

thread_local! {
    /// What had been sent to streams when this thread last began a wait for all of that.
    static KNOWN_IDLE: Cell<[Option<Sent>; KNOWN]> = const { Cell::new([None; KNOWN]) };
}

fn count_of(stream: u32) -> &'static AtomicU64 {
    &TO[stream as usize % COUNTS]
}

/// The stream of a call that gives work to this stream only.
fn stream_of(opcode: u16, body: &[u8]) -> Option<u32> {
    let is_of_one = matches!(
        opcode,
        Write::OPCODE
            | Read::OPCODE
            | Copy::OPCODE
            | Fill::OPCODE
            | CopyRows::OPCODE
            | CopyVolume::OPCODE
            | Launch::OPCODE
            | LaunchGraph::OPCODE
    );
    // Each of these begins with the context, followed by the stream.
    let stream = body.get(4..8).filter(|_| is_of_one)?;
    let stream = u32::from_le_bytes(stream.try_into().ok()?);
    // Other streams wait for the legacy stream.
    (stream >= FIRST).then_some(stream)
}

/// Whether a call gives no stream work.
fn only_waits(opcode: u16) -> bool {
    matches!(
        opcode,
        Signal::OPCODE
            | StreamSynchronize::OPCODE
            | ContextSynchronize::OPCODE
            | EventSynchronize::OPCODE
            | Await::OPCODE
            | CaptureInfo::OPCODE
            | MemoryInfo::OPCODE
            | PointerDevice::OPCODE
    )
}

/// Counts a call after it was sent, so that a wait which was sent earlier is not mistaken for one
/// that covers the call. Calls are sent, and this function is called, one at a time.
pub fn note(opcode: u16, body: &[u8]) {
    let count = match stream_of(opcode, body) {
        Some(stream) => count_of(stream),
        None if only_waits(opcode) => return,
        None => &TO_ANY,
    };
    count.store(count.load(Ordering::Relaxed) + 1, Ordering::Release);
}

/// Counts a failed call of the program.
pub fn note_failure() {
    FAILED.fetch_add(1, Ordering::Release);
}

impl Sent {
    /// What has been sent to a stream so far.
    pub fn now(context: u32, stream: u32) -> Self {
        Self {
            context,
            stream,
            to: count_of(stream).load(Ordering::Acquire),
            to_any: TO_ANY.load(Ordering::Acquire),
            failed: FAILED.load(Ordering::Acquire),
        }
    }

    fn place(self) -> usize {
        self.stream as usize % KNOWN
    }

    /// Whether this thread has waited for all of it.
    pub fn is_done(self) -> bool {
        self.stream >= FIRST && KNOWN_IDLE.get()[self.place()] == Some(self)
    }

    /// Records that this thread has waited for all of it, without an error.
    pub fn was_waited_for(self) {
        let mut known = KNOWN_IDLE.get();
        known[self.place()] = Some(self);
        KNOWN_IDLE.set(known);
    }
}

#[cfg(test)]
mod tests {
    use remoting_proto::{
        apis::cuda::calls::{Forward, Shape},
        wire::Blob,
    };

    use super::*;

    fn sent<C: Call>(call: &C) {
        let mut body = Vec::new();
        call.put(&mut body);
        note(C::OPCODE, &body);
    }

    fn launch(stream: u32) {
        sent(&Launch {
            context: 7,
            stream,
            function: 20,
            shape: Shape {
                grid: [1; 3],
                block: [1; 3],
                shared: 0,
            },
            cooperative: false,
            attributes: Blob(Vec::new()),
            parameters: Blob(Vec::new()),
        });
    }

    #[test]
    fn a_stream_is_idle_from_a_wait_until_it_may_have_work_again() {
        let (own, other) = (FIRST + 1, FIRST + 2);
        let now = || Sent::now(7, own);
        assert!(!now().is_done());
        now().was_waited_for();
        assert!(now().is_done());
        // Waits, and work for another stream, are not work for this stream.
        let (context, stream) = (7, own);
        sent(&StreamSynchronize { context, stream });
        launch(other);
        assert!(now().is_done());
        assert!(!Sent::now(8, own).is_done() && !Sent::now(7, other).is_done());
        launch(own);
        assert!(!now().is_done());
        now().was_waited_for();
        // The effect of this call is unknown.
        sent(&Forward {
            context,
            function: 1,
            arguments: Blob(Vec::new()),
        });
        assert!(!now().is_done());
        now().was_waited_for();
        // Other streams wait for the legacy stream's work.
        launch(0);
        assert!(!now().is_done());
        now().was_waited_for();
        note_failure();
        assert!(!now().is_done());
        // Work that is sent after a wait has begun is not covered by it.
        let begun = now();
        launch(own);
        begun.was_waited_for();
        assert!(!now().is_done());
        // Nor is any stream matched by its number by coincidence.
        let legacy = Sent::now(7, 0);
        legacy.was_waited_for();
        assert!(!legacy.is_done());
    }
}
