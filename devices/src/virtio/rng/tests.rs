use std::sync::Arc;

use super::{Options, Rng};
use crate::{testing::simple::Guest, thread::Unconfined, virtio::VirtioDevice};

fn rng(contents: &[u8]) -> (tempfile::NamedTempFile, Rng) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), contents).unwrap();
    let options = Options {
        thread_name: "_rng0".to_owned(),
        source: file.path().to_owned(),
    };
    let rng = Rng::new(options, Arc::new(Unconfined)).unwrap();
    (file, rng)
}

#[test]
fn requests_are_filled_from_the_source() {
    let (_file, mut rng) = rng(&[7; 100]);
    let guest = Guest::new();
    let queue = guest.queue(0, 16);
    rng.activate(guest.activation(&[&queue])).unwrap();
    assert_eq!(queue.request(&[], 64).1, [7; 64]);
    // The rest of the source, which is shorter than the request.
    assert_eq!(queue.request(&[], 64).0, 36);
    assert_eq!(rng.counters(), [("served_bytes", 100)]);
    assert_eq!(rng.deactivate().len(), 1);
}

#[test]
fn hostile_chains_get_nothing_and_hurt_nobody() {
    let (_file, mut rng) = rng(&[7; 1 << 20]);
    let guest = Guest::new();
    let queue = guest.queue(0, 16);
    rng.activate(guest.activation(&[&queue])).unwrap();
    // Nothing to write to; memory that is not there; more than a request may have.
    assert_eq!(queue.request(&[1, 2, 3], 0).0, 0);
    assert_eq!(queue.raw(&[(u64::MAX - 8, 64, true)]), 0);
    assert_eq!(queue.raw(&[(0x80_0000, 0x8_0000, true)]), 64 << 10);
    assert_eq!(queue.request(&[], 8).1, [7; 8]);
    rng.deactivate();
}

#[test]
fn a_missing_source_is_named() {
    let options = Options {
        thread_name: String::new(),
        source: "/nowhere/entropy".into(),
    };
    let error = Rng::new(options, Arc::new(Unconfined)).err().unwrap();
    assert!(error.to_string().contains("/nowhere/entropy"), "{error}");
}
