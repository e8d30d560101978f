//! The ring under a hostile peer, under random use, and under every interleaving (loom).

#[cfg(not(loom))]
use std::{cell::RefCell, rc::Rc};

use super::*;

/// A ring in private memory.
#[cfg(not(loom))]
#[derive(Clone)]
struct Private(Rc<(Control, RefCell<Vec<u8>>)>);

#[cfg(not(loom))]
impl Private {
    fn new(size: usize) -> Self {
        Self(Rc::new((Control::default(), RefCell::new(vec![0; size]))))
    }
}

#[cfg(not(loom))]
impl Bytes for Private {
    fn size(&self) -> u32 {
        self.0.1.borrow().len() as u32
    }

    fn control(&self) -> &Control {
        &self.0.0
    }

    unsafe fn read(&self, at: u32, into: &mut [u8]) {
        into.copy_from_slice(&self.0.1.borrow()[at as usize..][..into.len()]);
    }

    unsafe fn write(&self, at: u32, from: &[u8]) {
        self.0.1.borrow_mut()[at as usize..][..from.len()].copy_from_slice(from);
    }
}

/// A bell that counts.
#[cfg(not(loom))]
#[derive(Clone, Default)]
struct Counter(Rc<RefCell<usize>>);

#[cfg(not(loom))]
impl Bell for Counter {
    fn ring(&self, word: &AtomicU32) {
        word.fetch_add(1, Ordering::Release);
        *self.0.borrow_mut() += 1;
    }

    fn wait(&self, _: &AtomicU32, _: u32) {}
}

#[cfg(not(loom))]
mod plain {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        protocol::frame::{Flags, Header},
        transport::link::{Gone, Receiver, Sender},
    };

    #[test]
    fn a_busy_pair_rings_no_bell() {
        let (ring, bell) = (Private::new(256), Counter::default());
        let mut producer = Producer::new(ring.clone(), bell.clone());
        let mut consumer = Consumer::new(ring, bell.clone());
        for _ in 0..100 {
            assert!(producer.push(&[1; 16], &[2; 20]).unwrap());
            let mut out = [0; 36];
            consumer.take(0, &mut out);
        }
        assert_eq!(*bell.0.borrow(), 0);
    }

    #[test]
    fn an_index_that_jumps_ahead_is_noticed() {
        let ring = Private::new(256);
        let mut consumer = Consumer::new(ring.clone(), Counter::default());
        ring.control().tail.0.store(257, Ordering::Relaxed);
        assert_eq!(
            consumer.held(),
            Err(Broken {
                claimed: 257,
                size: 256
            })
        );
    }

    #[test]
    fn a_consumer_that_claims_to_have_read_the_future_is_noticed() {
        let ring = Private::new(256);
        let mut producer = Producer::new(ring.clone(), Counter::default());
        ring.control().head.0.store(1, Ordering::Relaxed);
        // When it is asked, and when the room that is known of is used up.
        assert!(producer.room().is_err());
        assert_eq!(producer.push(&[0; 16], &[0; 240]), Ok(true));
        ring.control().head.0.store(257, Ordering::Relaxed);
        assert!(producer.push(&[0; 16], &[]).is_err());
    }

    #[test]
    fn a_frame_that_claims_more_than_was_written_is_refused() {
        let ring = Private::new(256);
        let mut producer = Producer::new(ring.clone(), Counter::default());
        let header = Header {
            length: 113,
            opcode: 1,
            flags: Flags(0),
            sequence: 0,
        };
        producer.push(&header.to_bytes(), &[0; 99]).unwrap();
        let mut receiver = Receiver::new(Consumer::new(ring, Counter::default()));
        assert_eq!(receiver.poll(&mut Vec::new()), Err(Gone::Length(113)));
    }

    #[test]
    fn a_frame_is_taken_with_all_of_its_lines_or_refused() {
        let ring = Private::new(256);
        let header = Header {
            length: 49,
            opcode: 1,
            flags: Flags(0),
            sequence: 0,
        };
        ring.0.1.borrow_mut()[..16].copy_from_slice(&header.to_bytes());
        let poll = |tail| {
            ring.control().tail.0.store(tail, Ordering::Relaxed);
            let mut consumer = Consumer::new(ring.clone(), Counter::default());
            let _ = consumer.held();
            Receiver::new(consumer).poll(&mut Vec::new())
        };
        // All of the frame's bytes are there, but not of its last line.
        assert_eq!(poll(65), Err(Gone::Length(49)));
        assert_eq!(poll(127), Err(Gone::Length(49)));
        assert_eq!(poll(128), Ok(Some(header)));
    }

    #[test]
    fn what_is_kept_back_arrives_with_what_follows() {
        let ring = Private::new(256);
        let mut producer = Producer::new(ring.clone(), Counter::default());
        let mut consumer = Consumer::new(ring, Counter::default());
        assert!(producer.keep_back(&[1; 16], &[2; 4]).unwrap());
        assert_eq!(consumer.held(), Ok(0));
        assert!(producer.push(&[3; 16], &[]).unwrap());
        assert_eq!(consumer.held(), Ok(128));
        let (mut one, mut other) = ([0; 20], [0; 16]);
        consumer.take(0, &mut one);
        consumer.take(0, &mut other);
        assert_eq!((one[0], one[16], other[0]), (1, 2, 3));
    }

    #[test]
    fn a_producer_that_is_out_of_room_publishes_what_it_kept_back() {
        let ring = Private::new(64);
        let mut producer = Producer::new(ring.clone(), Counter::default());
        let mut consumer = Consumer::new(ring, Counter::default());
        assert!(producer.keep_back(&[1; 16], &[2; 40]).unwrap());
        assert!(!producer.keep_back(&[1; 16], &[2; 40]).unwrap());
        producer.wait_for_room(56).unwrap();
        assert_eq!(consumer.held(), Ok(64));
    }

    #[test]
    fn room_is_given_back_when_the_ring_is_empty() {
        let ring = Private::new(512);
        let mut producer = Producer::new(ring.clone(), Counter::default());
        let mut consumer = Consumer::new(ring, Counter::default());
        assert!(producer.push(&[1; 16], &[]).unwrap());
        consumer.held().unwrap();
        consumer.take(0, &mut [0; 16]);
        assert_eq!(producer.room(), Ok(448));
        assert_eq!(consumer.held(), Ok(0));
        assert_eq!(producer.room(), Ok(512));
    }

    proptest! {
        #[test]
        fn messages_arrive_whole_and_in_order(
            bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..90), 1..60),
        ) {
            let ring = Private::new(512);
            let mut sender = Sender::new(
                Producer::new(ring.clone(), Counter::default()),
                512,
                std::time::Duration::ZERO,
            );
            let mut receiver = Receiver::new(Consumer::new(ring, Counter::default()));
            let mut out = Vec::new();
            for (sequence, body) in bodies.iter().enumerate() {
                let header = Header {
                    length: 0,
                    opcode: 7,
                    flags: Flags(0),
                    sequence: sequence as u64,
                };
                sender.send(header, body, || false).unwrap();
                let got = receiver.poll(&mut out).unwrap().unwrap();
                prop_assert_eq!(got.sequence, sequence as u64);
                prop_assert_eq!(&out, body);
            }
            prop_assert_eq!(receiver.poll(&mut out), Ok(None));
        }

        #[test]
        fn any_bytes_and_indices_end_in_messages_or_an_error(
            bytes in prop::collection::vec(any::<u8>(), 256),
            tail: u32,
        ) {
            let ring = Private::new(256);
            ring.0.1.borrow_mut().copy_from_slice(&bytes);
            ring.control().tail.0.store(tail, Ordering::Relaxed);
            let mut receiver = Receiver::new(Consumer::new(ring, Counter::default()));
            let mut out = Vec::new();
            // Each message takes at least a header's bytes: the loop ends.
            while let Ok(Some(_)) = receiver.poll(&mut out) {}
            prop_assert!(out.len() <= 256);
        }
    }
}

/// `RUSTFLAGS="--cfg loom" cargo test -p gantry-remoting --lib --release ring`
#[cfg(loom)]
mod model {
    use loom::{cell::UnsafeCell, sync::Arc, thread};

    use super::*;

    /// A ring whose bytes loom watches: an access that races with another fails the model.
    #[derive(Clone)]
    struct Watched(Arc<(Control, Vec<UnsafeCell<u8>>)>);

    // SAFETY: what the model is to prove; loom checks each access.
    unsafe impl Send for Watched {}

    impl Watched {
        fn new(size: usize) -> Self {
            let bytes = (0..size).map(|_| UnsafeCell::new(0)).collect();
            Self(Arc::new((Control::default(), bytes)))
        }
    }

    impl Bytes for Watched {
        const GRAIN: u32 = 1;

        fn size(&self) -> u32 {
            self.0.1.len() as u32
        }

        fn control(&self) -> &Control {
            &self.0.0
        }

        unsafe fn read(&self, at: u32, into: &mut [u8]) {
            for (cell, byte) in self.0.1[at as usize..].iter().zip(into) {
                // SAFETY: loom checks that nobody writes meanwhile.
                *byte = cell.with(|cell| unsafe { *cell });
            }
        }

        unsafe fn write(&self, at: u32, from: &[u8]) {
            for (cell, byte) in self.0.1[at as usize..].iter().zip(from) {
                // SAFETY: loom checks that nobody else accesses it meanwhile.
                cell.with_mut(|cell| unsafe { *cell = *byte });
            }
        }
    }

    /// Sleeps until the word changes: a lost wake-up is a deadlock, which loom reports.
    #[derive(Clone)]
    struct Patient;

    impl Bell for Patient {
        fn ring(&self, word: &AtomicU32) {
            word.fetch_add(1, Ordering::Release);
        }

        fn wait(&self, word: &AtomicU32, seen: u32) {
            while word.load(Ordering::Acquire) == seen {
                thread::yield_now();
            }
        }
    }

    #[test]
    fn no_wake_up_is_lost_and_no_byte_is_read_while_it_is_written() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let ring = Watched::new(4);
            let mut producer = Producer::new(ring.clone(), Patient);
            let mut consumer = Consumer::new(ring, Patient);
            let writer = thread::spawn(move || {
                for value in 1..=3u8 {
                    // Three times two bytes do not fit in four: the producer has to wait.
                    while !producer.push(&[value], &[value]).unwrap() {
                        producer.wait_for_room(2).unwrap();
                    }
                }
            });
            for value in 1..=3u8 {
                while consumer.held().unwrap() == 0 {
                    consumer.sleep(|| false).unwrap();
                }
                let mut out = [0; 2];
                consumer.take(0, &mut out);
                assert_eq!(out, [value; 2]);
            }
            writer.join().unwrap();
        });
    }

    #[test]
    fn a_reader_that_says_late_how_far_it_is_starves_nobody() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            // A quarter of the ring is four bytes: of frames of three, the reader says every
            // other time how far it is, and when the ring is empty.
            let ring = Watched::new(16);
            let mut producer = Producer::new(ring.clone(), Patient);
            let mut consumer = Consumer::new(ring, Patient);
            let writer = thread::spawn(move || {
                for value in 1..=6u8 {
                    while !producer.keep_back(&[value], &[value; 2]).unwrap() {
                        producer.wait_for_room(3).unwrap();
                    }
                    if value % 2 == 0 {
                        producer.publish();
                    }
                }
            });
            for value in 1..=6u8 {
                while consumer.held().unwrap() == 0 {
                    consumer.sleep(|| false).unwrap();
                }
                let mut out = [0; 3];
                consumer.take(0, &mut out);
                assert_eq!(out, [value; 3]);
            }
            writer.join().unwrap();
        });
    }
}
