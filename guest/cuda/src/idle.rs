//! Streams that are known to be idle. Programs wait for a stream before each copy, whether or not anything was sent to it
//! since they waited for it last; if nothing was, there is nothing to ask.

use std::{
    cell::Cell,
    sync::atomic::{AtomicU64, Ordering},
};

use gantry_remoting::{
    apis::cuda::{
        FIRST,
        calls::{
            Await, CaptureInfo, ContextSynchronize, Copy, CopyRows, CopyVolume, EventSynchronize,
            Fill, Launch, LaunchGraph, MemoryInfo, Read, Signal, StreamSynchronize, Write,
        },
    },
    wire::messages::Call,
};

/// Streams share so many counts: what is sent to one makes those that have its count unknown, and no more.
const COUNTS: usize = 64;
/// How many streams a thread knows to be idle at most.
const KNOWN: usize = 8;

/// How many calls have been sent that give work to one of a count's streams and to no other.
static TO: [AtomicU64; COUNTS] = [const { AtomicU64::new(0) }; COUNTS];
/// How many have been sent of which that is not known.
static TO_ANY: AtomicU64 = AtomicU64::new(0);
/// How many calls of the program have failed: each wait is to tell of an error that lasts.
static FAILED: AtomicU64 = AtomicU64::new(0);

/// What had been sent to a stream at some time.
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

/// The stream of a call that gives it work, and none to others.
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
    // The context comes first in each of these, and then the stream.
    let stream = body.get(4..8).filter(|_| is_of_one)?;
    let stream = u32::from_le_bytes(stream.try_into().ok()?);
    // Other streams wait for the legacy one.
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
    )
}

/// A call has been sent: it is counted behind that, so that no wait which was sent before counts as one for it. Calls
/// are sent, and this is called, one at a time.
pub fn note(opcode: u16, body: &[u8]) {
    let count = match stream_of(opcode, body) {
        Some(stream) => count_of(stream),
        None if only_waits(opcode) => return,
        None => &TO_ANY,
    };
    count.store(count.load(Ordering::Relaxed) + 1, Ordering::Release);
}

/// A call of the program has failed.
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

    /// This thread has waited for all of it, and nothing was wrong.
    pub fn was_waited_for(self) {
        let mut known = KNOWN_IDLE.get();
        known[self.place()] = Some(self);
        KNOWN_IDLE.set(known);
    }
}

#[cfg(test)]
mod tests {
    use gantry_remoting::{
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
        // What waits, and what is sent to another stream, is no work of this one's.
        let (context, stream) = (7, own);
        sent(&StreamSynchronize { context, stream });
        launch(other);
        assert!(now().is_done());
        assert!(!Sent::now(8, own).is_done() && !Sent::now(7, other).is_done());
        launch(own);
        assert!(!now().is_done());
        now().was_waited_for();
        // Nobody knows what this does.
        sent(&Forward {
            context,
            function: 1,
            arguments: Blob(Vec::new()),
        });
        assert!(!now().is_done());
        now().was_waited_for();
        // Others wait for the legacy stream's work.
        launch(0);
        assert!(!now().is_done());
        now().was_waited_for();
        note_failure();
        assert!(!now().is_done());
        // Work that is sent after a wait has begun is not waited for by it.
        let begun = now();
        launch(own);
        begun.was_waited_for();
        assert!(!now().is_done());
        // Nor is any stream by its number's chance.
        let legacy = Sent::now(7, 0);
        legacy.was_waited_for();
        assert!(!legacy.is_done());
    }
}
