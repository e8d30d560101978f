//! Rings of a few words per entry between one block of a GPU kernel and the host: one producer, one
//! consumer, plain loads and stores (an atomic read-modify-write over PCIe need not exist).
//!
//! An entry is published by its last word, which is written after the others: the entry's number,
//! counted across all laps, plus one. Both sides keep their counts in private memory. Neither side
//! publishes how far it has read: a block has at most as many requests outstanding as a ring has
//! entries, and each is answered once, so an entry that is overwritten has been read. This is
//! model-checked by `loom` below, including the host's limit for a device that does not follow the
//! rules.

#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering};

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering};

/// An entry. Its last word publishes the others.
pub type Entry<const WORDS: usize> = [AtomicU32; WORDS];

/// The writing end of a ring whose number of entries is a power of two.
#[derive(Debug, Default)]
pub struct Producer<const WORDS: usize> {
    /// The number of entries ever written, modulo 2^32.
    tail: u32,
}

/// The reading end.
#[derive(Debug, Default)]
pub struct Consumer<const WORDS: usize> {
    /// The number of entries ever read, modulo 2^32.
    head: u32,
}

fn place<const WORDS: usize>(ring: &[Entry<WORDS>], number: u32) -> &Entry<WORDS> {
    &ring[number as usize & (ring.len() - 1)]
}

impl<const WORDS: usize> Producer<WORDS> {
    /// Publishes an entry. The last word of `words` is ignored.
    ///
    /// The caller must know that the previous entry in this place, one lap before, has been read.
    pub fn push(&mut self, ring: &[Entry<WORDS>], words: [u32; WORDS]) {
        let entry = place(ring, self.tail);
        self.tail = self.tail.wrapping_add(1);
        for (to, word) in entry.iter().zip(&words[..WORDS - 1]) {
            to.store(*word, Ordering::Relaxed);
        }
        entry[WORDS - 1].store(self.tail, Ordering::Release);
    }
}

impl<const WORDS: usize> Consumer<WORDS> {
    /// Takes the next entry, if there is one. Each word is read once.
    pub fn take(&mut self, ring: &[Entry<WORDS>]) -> Option<[u32; WORDS]> {
        let entry = place(ring, self.head);
        let next = self.head.wrapping_add(1);
        if entry[WORDS - 1].load(Ordering::Acquire) != next {
            return None;
        }
        self.head = next;
        let mut words = [next; WORDS];
        for (word, from) in words.iter_mut().zip(&entry[..WORDS - 1]) {
            *word = from.load(Ordering::Relaxed);
        }
        Some(words)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn ring<const WORDS: usize>(entries: usize) -> Vec<Entry<WORDS>> {
        let entry = |_| std::array::from_fn(|_| AtomicU32::new(0));
        (0..entries).map(entry).collect()
    }

    #[test]
    fn entries_arrive_in_order_through_laps() {
        let ring = ring::<4>(4);
        let (mut producer, mut consumer) = (Producer::default(), Consumer::default());
        for number in 0..100 {
            assert_eq!(consumer.take(&ring), None);
            producer.push(&ring, [number, 2, 3, 99]);
            assert_eq!(consumer.take(&ring), Some([number, 2, 3, number + 1]));
        }
    }

    #[test]
    fn numbers_wrap_around() {
        let ring = ring::<4>(4);
        // Not the first lap: an entry that has never been written contains the number zero.
        let mut producer = Producer { tail: u32::MAX - 9 };
        let mut consumer = Consumer { head: u32::MAX - 9 };
        for number in 0..20 {
            producer.push(&ring, [number; 4]);
            let [got, ..] = consumer.take(&ring).unwrap();
            assert_eq!(got, number);
            assert_eq!(consumer.take(&ring), None);
        }
    }
}

/// `RUSTFLAGS="--cfg loom" cargo test -p gantry-gloop --lib --release model::`
#[cfg(all(test, loom))]
mod model {
    use loom::{sync::Arc, thread};

    use super::*;

    const WORDS: usize = 3;

    struct Rings {
        requests: [Entry<WORDS>; 2],
        completions: [Entry<WORDS>; 2],
    }

    fn entries() -> [Entry<WORDS>; 2] {
        std::array::from_fn(|_| std::array::from_fn(|_| AtomicU32::new(0)))
    }

    /// A device with at most `limit` requests outstanding, as a block's free slots ensure, and a
    /// host that answers each with its number, in pairs in reverse order.
    fn check(requests: u32, limit: u32) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let rings = Arc::new(Rings {
                requests: entries(),
                completions: entries(),
            });
            let device = {
                let rings = Arc::clone(&rings);
                thread::spawn(move || {
                    let (mut out, mut back) = (Producer::default(), Consumer::default());
                    let (mut sent, mut got) = (0, 0);
                    let mut seen = 0;
                    while got < requests {
                        if sent < requests && sent - got < limit {
                            out.push(&rings.requests, [sent, sent + 10, 0]);
                            sent += 1;
                        } else if let Some([number, twice, _]) = back.take(&rings.completions) {
                            assert_eq!(twice, number + 10);
                            assert_eq!(seen & 1 << number, 0, "answered twice");
                            seen |= 1 << number;
                            got += 1;
                        } else {
                            thread::yield_now();
                        }
                    }
                })
            };
            let (mut inward, mut outward) = (Consumer::default(), Producer::default());
            let mut answered = 0;
            while answered < requests {
                let mut batch = Vec::new();
                while let Some([number, more, _]) = inward.take(&rings.requests) {
                    assert_eq!(more, number + 10, "seen before it was whole");
                    batch.push(number);
                }
                if batch.is_empty() {
                    thread::yield_now();
                }
                for number in batch.into_iter().rev() {
                    outward.push(&rings.completions, [number, number + 10, 0]);
                    answered += 1;
                }
            }
            device.join().unwrap();
        });
    }

    #[test]
    fn requests_are_whole_and_each_is_answered_once() {
        check(3, 2);
    }

    #[test]
    fn one_request_after_the_other_goes_through_laps() {
        check(5, 1);
    }
}
