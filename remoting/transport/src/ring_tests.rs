//! The ring under a hostile peer, under random use, and under every interleaving (loom).

#[cfg(not(loom))]
use std::{cell::RefCell, rc::Rc, time::Duration};

use super::*;

/// A ring in private memory.
#[cfg(not(loom))]
#[derive(Clone)]
struct Private(Rc<Shared>);

#[cfg(not(loom))]
struct Shared {
    control: Control,
    marks: Vec<AtomicU64>,
    payloads: RefCell<Vec<[u8; PAYLOAD]>>,
}

#[cfg(not(loom))]
impl Private {
    fn new(lines: usize) -> Self {
        Self(Rc::new(Shared {
            control: Control::default(),
            marks: (0..lines).map(|_| AtomicU64::new(0)).collect(),
            payloads: RefCell::new(vec![[0; PAYLOAD]; lines]),
        }))
    }
}

#[cfg(not(loom))]
impl Lines for Private {
    fn count(&self) -> u32 {
        self.0.marks.len() as u32
    }

    fn control(&self) -> &Control {
        &self.0.control
    }

    fn mark(&self, line: u32) -> &AtomicU64 {
        &self.0.marks[line as usize]
    }

    unsafe fn read(&self, line: u32, at: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.0.payloads.borrow()[line as usize][at..][..into.len()]);
    }

    unsafe fn write(&self, line: u32, from: &[u8]) {
        self.0.payloads.borrow_mut()[line as usize][..from.len()].copy_from_slice(from);
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

    fn wait(&self, _: &AtomicU32, _: u32, _: Duration) {}
}

#[cfg(not(loom))]
mod plain {
    use proptest::prelude::*;

    use super::*;
    use crate::endpoint::{Gone, Receiver, Sender, Spin};
    use remoting_proto::wire::frame::{Flags, Header};

    fn pair(
        lines: usize,
    ) -> (
        Private,
        Producer<Private, Counter>,
        Consumer<Private, Counter>,
    ) {
        let ring = Private::new(lines);
        let producer = Producer::new(ring.clone(), Counter::default());
        let consumer = Consumer::new(ring.clone(), Counter::default());
        (ring, producer, consumer)
    }

    /// Both, the consumer having gone until the bell rings.
    fn asleep(
        lines: usize,
    ) -> (
        Counter,
        Producer<Private, Counter>,
        Consumer<Private, Counter>,
    ) {
        let (ring, bell) = (Private::new(lines), Counter::default());
        let producer = Producer::new(ring.clone(), bell.clone());
        let consumer = Consumer::new(ring, bell.clone());
        assert!(consumer.leave());
        (bell, producer, consumer)
    }

    fn header(length: usize) -> Header {
        Header {
            length: length as u32,
            opcode: 1,
            flags: Flags(0),
            sequence: 0,
        }
    }

    #[test]
    fn a_busy_pair_rings_no_bell() {
        let (ring, bell) = (Private::new(8), Counter::default());
        let mut producer = Producer::new(ring.clone(), bell.clone());
        let mut consumer = Consumer::new(ring, bell.clone());
        for _ in 0..100 {
            assert!(producer.push(&[1; 16], &[2; 20]).unwrap());
            assert!(consumer.is_ready());
            let mut out = [0; 36];
            consumer.take(0, &mut out);
            assert_eq!((out[15], out[16]), (1, 2));
        }
        assert!(!consumer.is_ready());
        assert_eq!(*bell.0.borrow(), 0);
    }

    /// A bell on which nobody sleeps for long: after which waits somebody lay down, and whether it
    /// rings.
    #[derive(Clone)]
    struct Restless {
        slept: Rc<RefCell<Vec<Duration>>>,
        rings: bool,
    }

    impl Bell for Restless {
        fn ring(&self, word: &AtomicU32) {
            word.fetch_add(1, Ordering::Release);
        }

        fn wait(&self, word: &AtomicU32, _: u32, waited: Duration) {
            self.slept.borrow_mut().push(waited);
            if self.rings {
                self.ring(word);
            }
        }
    }

    /// After which waits a reader without messages sleeps in 3,200 moments after its first sleep.
    fn sleeps_after_the_first(rings: bool) -> Vec<Duration> {
        let slept = Rc::new(RefCell::new(Vec::new()));
        let bell = Restless {
            slept: Rc::clone(&slept),
            rings,
        };
        let receiver = Receiver::new(Consumer::new(Private::new(8), bell));
        // Far longer than the moments take, so that in them no time is over that began anew.
        let mut spin = Spin::new(Duration::from_millis(300));
        while slept.borrow().is_empty() {
            receiver.wait(&mut spin, || false);
        }
        for _ in 0..3200 {
            receiver.wait(&mut spin, || false);
        }
        slept.borrow()[1..].to_vec()
    }

    #[test]
    fn who_is_rung_for_before_there_is_a_message_stays_awake_for_it() {
        // Some more at most, on a processor that others keep that long.
        assert!(sleeps_after_the_first(true).len() < 10);
        // The clock is read every 32 moments, and the time is over.
        let sleeps = sleeps_after_the_first(false);
        assert_eq!(sleeps.len(), 100);
        // Each is of the wait that began before the first.
        assert!(sleeps[0] > Duration::from_millis(300) && sleeps.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn who_is_attended_stays_awake_for_longer() {
        let ring = Private::new(8);
        let slept = Rc::new(RefCell::new(Vec::new()));
        let bell = || Restless {
            slept: Rc::clone(&slept),
            rings: false,
        };
        let producer = Producer::new(ring.clone(), bell());
        let receiver = Receiver::new(Consumer::new(ring, bell()));
        let mut spin = Spin::new(Duration::ZERO).or_attended(Duration::from_secs(3600));
        let mut sleeps = || {
            slept.borrow_mut().clear();
            for _ in 0..3200 {
                receiver.wait(&mut spin, || false);
            }
            slept.borrow().len()
        };
        producer.attend(true);
        assert_eq!(sleeps(), 0);
        producer.attend(false);
        assert_eq!(sleeps(), 100);
    }

    #[test]
    fn a_short_frame_is_one_line_and_a_longer_one_as_many_as_it_needs() {
        let (_, mut producer, mut consumer) = pair(16);
        for (length, lines) in [(0, 1), (PAYLOAD, 1), (PAYLOAD + 1, 2), (3 * PAYLOAD, 3)] {
            let before = producer.room().unwrap();
            let body: Vec<u8> = (0..=u8::MAX).cycle().take(length).collect();
            assert!(producer.push(&[], &body).unwrap());
            assert_eq!(before - producer.room().unwrap(), lines, "{length}");
            let mut out = vec![0; length];
            assert!(consumer.is_ready());
            consumer.take(0, &mut out);
            assert_eq!(out, body);
        }
    }

    #[test]
    fn no_mark_is_taken_for_a_frame_of_another_lap() {
        let (ring, mut producer, mut consumer) = pair(4);
        for lap in 0..3 {
            for line in 0..4 {
                assert!(!consumer.is_ready(), "{lap} {line}");
                assert!(producer.push(&[lap, line], &[]).unwrap());
                let mut out = [0; 2];
                assert!(consumer.is_ready());
                consumer.take(0, &mut out);
                assert_eq!(out, [lap, line]);
            }
        }
        let marks = ring.0.marks.iter().map(|mark| mark.load(Ordering::Relaxed));
        assert_eq!(marks.collect::<Vec<_>>(), [9, 10, 11, 12]);
    }

    #[test]
    fn whatever_a_frame_carries_is_no_mark() {
        let (_, mut producer, mut consumer) = pair(8);
        // What would be the mark of each line in the next lap.
        let words: Vec<u8> = (9..=30u64).flat_map(u64::to_le_bytes).collect();
        assert!(producer.push(&[], &words).unwrap());
        let mut out = vec![0; words.len()];
        consumer.take(0, &mut out);
        assert_eq!(out, words);
        for _ in 0..8 {
            assert!(!consumer.is_ready());
            assert!(producer.push(&[7], &[]).unwrap());
            consumer.take(0, &mut [0]);
        }
    }

    #[test]
    fn a_consumer_that_claims_to_have_read_the_future_is_noticed() {
        let (ring, mut producer, _) = pair(4);
        ring.control().head.0.store(1, Ordering::Relaxed);
        // When it is asked, and when the room that is known of is used up.
        assert!(producer.room().is_err());
        assert_eq!(producer.push(&[0; 16], &[0; PAYLOAD]), Ok(true));
        assert_eq!(producer.push(&[0; 16], &[0; PAYLOAD]), Ok(true));
        ring.control().head.0.store(5, Ordering::Relaxed);
        let broken = Broken {
            claimed: u32::MAX,
            count: 4,
        };
        assert_eq!(producer.push(&[0; 16], &[]), Err(broken));
    }

    #[test]
    fn a_frame_that_is_longer_than_any_may_be_is_refused() {
        let longest = 4 * PAYLOAD - 16;
        for (length, refused) in [
            (longest, false),
            (longest + 1, true),
            (u32::MAX as usize, true),
        ] {
            let (_, mut producer, consumer) = pair(8);
            producer.push(&header(length).to_bytes(), &[1]).unwrap();
            let mut receiver = Receiver::new(consumer);
            let got = receiver.poll(&mut Vec::new());
            assert_eq!(got == Err(Gone::Length(length)), refused, "{got:?}");
        }
    }

    #[test]
    fn a_sleeper_is_not_woken_for_what_nobody_waits_for() {
        let (bell, mut producer, consumer) = asleep(8);
        assert!(producer.write(&[1; 16], &[2; 4]).unwrap());
        assert_eq!(*bell.0.borrow(), 0);
        assert!(producer.push(&[3; 16], &[]).unwrap());
        assert_eq!(*bell.0.borrow(), 1);
        // Both are there, and nothing new is announced.
        assert!(consumer.is_ready());
        producer.announce();
        assert_eq!(*bell.0.borrow(), 1);
    }

    #[test]
    fn a_producer_that_is_out_of_room_wakes_the_consumer() {
        let (bell, mut producer, _consumer) = asleep(2);
        assert!(producer.write(&[1; 16], &[2; 40]).unwrap());
        assert!(producer.write(&[1; 16], &[2; 40]).unwrap());
        assert!(!producer.write(&[1; 16], &[2; 40]).unwrap());
        producer.wait_for_room(56).unwrap();
        assert_eq!(*bell.0.borrow(), 1);
    }

    #[test]
    fn when_all_is_read_there_is_room_for_the_longest_frame() {
        for short in 0..40 {
            let (_, mut producer, mut consumer) = pair(16);
            for _ in 0..short {
                assert!(producer.push(&[], &[1]).unwrap());
                consumer.take(0, &mut [0]);
            }
            let longest = vec![2; producer.longest()];
            assert!(producer.push(&[], &longest).unwrap(), "{short}");
        }
    }

    proptest! {
        #[test]
        fn messages_arrive_whole_and_in_order(
            bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..90), 1..60),
        ) {
            let (_, producer, consumer) = pair(8);
            let mut sender = Sender::new(producer, std::time::Duration::ZERO);
            let mut receiver = Receiver::new(consumer);
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
        fn any_bytes_and_marks_end_in_messages_or_an_error(
            bytes in prop::collection::vec(any::<[u8; PAYLOAD]>(), 8),
            marks in prop::collection::vec(0..12u64, 8),
        ) {
            let (ring, _, consumer) = pair(8);
            ring.0.payloads.borrow_mut().copy_from_slice(&bytes);
            for (mark, claimed) in ring.0.marks.iter().zip(marks) {
                mark.store(claimed, Ordering::Relaxed);
            }
            let mut receiver = Receiver::new(consumer);
            let mut out = Vec::new();
            // A mark stands for one frame: the loop ends.
            let mut frames = 0;
            while let Ok(Some(_)) = receiver.poll(&mut out) {
                frames += 1;
                prop_assert!(frames <= 8 && out.len() <= 8 * PAYLOAD);
            }
        }
    }
}

/// `RUSTFLAGS="--cfg loom" cargo test -p remoting-transport --lib --release ring`
#[cfg(loom)]
mod model {
    use loom::{cell::UnsafeCell, sync::Arc, thread};

    use super::*;

    /// A ring whose bytes loom watches: an access that races with another fails the model.
    #[derive(Clone)]
    struct Watched(Arc<(Control, Vec<(AtomicU64, UnsafeCell<[u8; 2]>)>)>);

    // SAFETY: what the model is to prove; loom checks each access.
    unsafe impl Send for Watched {}

    impl Watched {
        fn new(lines: usize) -> Self {
            let line = |_| (AtomicU64::new(0), UnsafeCell::new([0; 2]));
            Self(Arc::new((
                Control::default(),
                (0..lines).map(line).collect(),
            )))
        }
    }

    impl Lines for Watched {
        const PAYLOAD: usize = 2;

        fn count(&self) -> u32 {
            self.0.1.len() as u32
        }

        fn control(&self) -> &Control {
            &self.0.0
        }

        fn mark(&self, line: u32) -> &AtomicU64 {
            &self.0.1[line as usize].0
        }

        unsafe fn read(&self, line: u32, at: usize, into: &mut [u8]) {
            // SAFETY: loom checks that nobody writes meanwhile.
            let bytes = self.0.1[line as usize].1.with(|cell| unsafe { *cell });
            into.copy_from_slice(&bytes[at..][..into.len()]);
        }

        unsafe fn write(&self, line: u32, from: &[u8]) {
            self.0.1[line as usize].1.with_mut(|cell| {
                // SAFETY: loom checks that nobody else accesses it meanwhile.
                unsafe { (&mut *cell)[..from.len()].copy_from_slice(from) };
            });
        }
    }

    /// Sleeps until the word changes: a lost wake-up is a deadlock, which loom reports.
    #[derive(Clone)]
    struct Patient;

    impl Bell for Patient {
        fn ring(&self, word: &AtomicU32) {
            word.fetch_add(1, Ordering::Release);
        }

        fn wait(&self, word: &AtomicU32, seen: u32, _: Duration) {
            while word.load(Ordering::Acquire) == seen {
                thread::yield_now();
            }
        }
    }

    /// Sends frames of so many bytes, each of the value of its number, through a ring of `lines`; a
    /// sleeper is told of every `told`th.
    fn check(lines: usize, frames: &'static [usize], told: usize) {
        let mut model = loom::model::Builder::new();
        // LOOM_MAX_PREEMPTIONS asks for more. With three, all models took 48 minutes beside other tests.
        model.preemption_bound.get_or_insert(2);
        model.check(move || {
            let ring = Watched::new(lines);
            let mut producer = Producer::new(ring.clone(), Patient);
            let mut consumer = Consumer::new(ring, Patient);
            let writer = thread::spawn(move || {
                for (number, &length) in (1..).zip(frames) {
                    let body = vec![number as u8; length - 1];
                    while !producer.write(&[number as u8], &body).unwrap() {
                        producer.wait_for_room(length).unwrap();
                    }
                    if number % told == 0 {
                        producer.announce();
                    }
                }
            });
            for (number, &length) in (1..).zip(frames) {
                while !consumer.is_ready() {
                    consumer.sleep(Duration::ZERO, || false);
                }
                let mut out = vec![0; length];
                consumer.take(0, &mut out);
                assert_eq!(out, vec![number as u8; length]);
            }
            writer.join().unwrap();
        });
    }

    #[test]
    fn no_wake_up_is_lost_and_no_byte_is_read_while_it_is_written() {
        // Three laps: the producer has to wait.
        check(2, &[2; 5], 1);
    }

    #[test]
    fn long_frames_are_whole_when_they_are_seen() {
        check(4, &[3, 4, 3], 1);
    }

    #[test]
    fn a_reader_that_says_late_how_far_it_is_starves_nobody() {
        // A quarter of the ring are two lines: the reader says every other time how far it is.
        check(8, &[1, 2, 7, 2, 8, 1], 2);
    }
}
