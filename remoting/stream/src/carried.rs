//! Which range of the window travels with a message.

use std::{
    collections::HashMap,
    marker::PhantomData,
    sync::{Mutex, PoisonError},
};

use remoting_proto::wire::{
    Flags, Header, Wire,
    api::{Api, Part, WindowUse},
    messages::{RELEASED, StageId},
};
use remoting_transport::endpoint::Gone;

/// Maximum size, in bytes, of a call that names a range of the window. Longer ones would wait for more events than a
/// queue has room for.
const LONGEST: usize = 1 << 20;
/// Minimum alignment of ranges of the window: a page.
const GRAIN: u64 = 4096;

/// Decodes requests of an API as they pass, fragment by fragment.
#[derive(Debug)]
pub struct Reading<A> {
    partial: Vec<u8>,
    api: PhantomData<A>,
}

impl<A> Default for Reading<A> {
    fn default() -> Self {
        Self {
            partial: Vec::new(),
            api: PhantomData,
        }
    }
}

impl<A: Api> Reading<A> {
    /// How the request that ends with this frame uses the window.
    pub fn frame(&mut self, header: Header, body: &[u8]) -> Result<Option<WindowUse>, Gone> {
        if !A::may_use_window(header.opcode) {
            return Ok(None);
        }
        let whole = self.partial.is_empty();
        if !whole || header.flags.has(Flags::MORE) {
            if self.partial.len() + body.len() > LONGEST {
                return Err(Gone::Length(self.partial.len() + body.len()));
            }
            self.partial.extend_from_slice(body);
        }
        if header.flags.has(Flags::MORE) {
            return Ok(None);
        }
        let body = if whole { body } else { &self.partial };
        // A malformed call is for the worker to refuse.
        let request = A::decode(header.opcode, body).ok();
        self.partial.clear();
        Ok(request.as_ref().and_then(A::window_use))
    }
}

/// The ranges to send to a worker's client when their stages are released.
#[derive(Debug)]
pub struct Owed {
    parts: Mutex<HashMap<StageId, Part>>,
    most: usize,
}

impl Owed {
    /// For a window of this many bytes: keeps at most one range per page of it. They take at most 26 MiB for the usual
    /// window of 2 GiB (2^20 entries of 25 bytes).
    pub fn new(window: u64) -> Self {
        Self {
            parts: Mutex::default(),
            most: (window / GRAIN) as usize,
        }
    }

    /// Records that the client is to get this range when the stage is released.
    pub fn owe(&self, stage: StageId, part: Part) -> Result<(), Gone> {
        let mut owed = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        if owed.len() >= self.most {
            return Err(Gone::Length(owed.len()));
        }
        owed.insert(stage, part);
        Ok(())
    }

    /// Takes the range that must be sent before this message, if there is one.
    pub fn due(&self, header: Header, body: &[u8]) -> Option<Part> {
        if header.opcode != RELEASED {
            return None;
        }
        let (stage, good): (StageId, bool) = Wire::from_bytes(body).ok()?;
        let mut owed = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        // Commands that failed have written nothing.
        owed.remove(&stage).filter(|_| good)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoting_proto::apis::opencl::{
        OpenCl,
        calls::{self, Call, MemId, Order, QueueId, ReadBuffer, WindowRange, WriteBuffer},
    };

    const PLACE: WindowRange = WindowRange {
        offset: 4096,
        length: 100,
        stage: Some(StageId(9)),
    };

    fn order(events: usize) -> Order {
        Order {
            queue: QueueId(0),
            wait: vec![calls::EventId(1); events],
            event: None,
        }
    }

    fn encoded<C: Call>(call: &C) -> (Header, Vec<u8>) {
        let mut body = Vec::new();
        call.put(&mut body);
        let header = Header {
            length: body.len() as u32,
            opcode: C::OPCODE,
            flags: Flags::default(),
            sequence: 1,
        };
        (header, body)
    }

    fn read(events: usize) -> (Header, Vec<u8>) {
        encoded(&ReadBuffer {
            order: order(events),
            mem: MemId(0),
            offset: 0,
            to: PLACE,
        })
    }

    #[test]
    fn data_goes_there_with_writes_and_comes_back_with_the_release_of_reads() {
        let write = encoded(&WriteBuffer {
            order: order(0),
            mem: MemId(0),
            offset: 0,
            from: PLACE,
        });
        let mut reading = Reading::<OpenCl>::default();
        let part = (4096, 100);
        assert_eq!(
            reading.frame(write.0, &write.1),
            Ok(Some(WindowUse::Read(part)))
        );
        let (header, body) = read(0);
        let back = WindowUse::Write(StageId(9), part);
        assert_eq!(reading.frame(header, &body), Ok(Some(back)));
        let unstage = encoded(&calls::Unstage {
            order: order(0),
            place: PLACE,
        });
        assert_eq!(reading.frame(unstage.0, &unstage.1), Ok(None));
    }

    #[test]
    fn a_call_in_fragments_counts_with_its_last() {
        let (header, body) = read(40);
        let (first, last) = body.split_at(50);
        let more = Header {
            flags: Flags::MORE,
            ..header
        };
        let mut reading = Reading::<OpenCl>::default();
        assert_eq!(reading.frame(more, first), Ok(None));
        assert!(matches!(
            reading.frame(header, last),
            Ok(Some(WindowUse::Write(StageId(9), _)))
        ));
        // And the next begins anew.
        let (header, body) = read(0);
        assert!(matches!(reading.frame(header, &body), Ok(Some(_))));
    }

    #[test]
    fn fragments_without_an_end_are_not_kept() {
        let mut reading = Reading::<OpenCl>::default();
        let (header, _) = read(0);
        let more = Header {
            flags: Flags::MORE,
            ..header
        };
        let body = vec![0; LONGEST / 4];
        let outcomes: Vec<_> = (0..5).map(|_| reading.frame(more, &body)).collect();
        assert!(outcomes[..4].iter().all(Result::is_ok));
        assert!(outcomes[4].is_err());
    }

    #[test]
    fn what_has_failed_owes_nothing_and_no_more_is_owed_than_a_window_holds() {
        let owed = Owed::new(2 * GRAIN);
        let header = Header {
            opcode: RELEASED,
            ..read(0).0
        };
        let release = |good: bool| {
            let mut body = Vec::new();
            (StageId(9), u8::from(good)).put(&mut body);
            owed.due(header, &body)
        };
        owed.owe(StageId(9), (4096, 100)).unwrap();
        assert_eq!(release(false), None);
        owed.owe(StageId(9), (4096, 100)).unwrap();
        assert_eq!(release(true), Some((4096, 100)));
        assert_eq!(release(true), None);
        let more = (0..3).map(|stage| owed.owe(StageId(stage), (4096, 100)).is_ok());
        assert_eq!(more.collect::<Vec<_>>(), [true, true, false]);
    }
}
