//! A block of a hostile GPU kernel: what it may write into its ring, and what the host would do
//! with it.

#![no_main]

use std::sync::atomic::{AtomicU32, Ordering};

use gantry_fuzz::input::Input;
use gloop::{
    layout::{ENTRIES, SLOTS},
    ring::{Consumer, Entry},
    slots::{Call, Limits, parse},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    let limits = Limits {
        page_bytes: u32::from(input.u16()) << 4,
        page_count: u32::from(input.u8() % 33),
    };
    let ring: Vec<Entry<16>> = (0..ENTRIES)
        .map(|_| std::array::from_fn(|_| AtomicU32::new(0)))
        .collect();
    let mut consumer = Consumer::default();
    let mut taken = 0;
    while !input.is_empty() {
        let entry = &ring[usize::from(input.u8()) % ENTRIES];
        for (number, word) in entry.iter().enumerate() {
            // Small numbers and any numbers; a sequence number near the expected one.
            let value = match (input.u8(), number) {
                (0..200, 15) => taken + u32::from(input.u8() % 3),
                (0..200, _) => u32::from(input.u8() % 40),
                _ => input.u32(),
            };
            word.store(value, Ordering::Relaxed);
        }
        // An entry's sequence number occurs once per lap, so one round takes at most all entries.
        let mut round = 0;
        while let Some(words) = consumer.take(&ring) {
            taken += 1;
            round += 1;
            assert!(round <= ENTRIES);
            let Some(asked) = parse(&words, limits) else {
                assert!(words[1] >= SLOTS);
                continue;
            };
            assert!(asked.tag < SLOTS);
            if let Ok(
                Call::Open(data, _)
                | Call::Read(_, _, data)
                | Call::Write(_, _, data)
                | Call::Receive(_, data)
                | Call::Send(_, data),
            ) = asked.call
            {
                assert!(data.page < limits.page_count && data.length <= limits.page_bytes);
            }
        }
    }
});
