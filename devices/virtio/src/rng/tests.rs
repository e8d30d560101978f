use std::{io::Write, os::unix::net::UnixListener, sync::Arc, time::Duration};

use device_model::thread::Unconfined;

use super::{Error, Options, Rng};
use crate::{VirtioDevice, testing::simple::Guest};

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
    // No writable buffer, a buffer that is not in RAM, and one longer than the maximum.
    assert_eq!(queue.request(&[1, 2, 3], 0).0, 0);
    assert_eq!(queue.raw(&[(u64::MAX - 8, 64, true)]), 0);
    assert_eq!(queue.raw(&[(0x80_0000, 0x8_0000, true)]), 64 << 10);
    assert_eq!(queue.request(&[], 8).1, [7; 8]);
    rng.deactivate();
}

#[test]
fn a_source_that_has_ended_leaves_requests_waiting_and_goes_on_when_it_can() {
    let (mut file, mut rng) = rng(&[7; 10]);
    let guest = Guest::new();
    let queue = guest.queue(0, 16);
    rng.activate(guest.activation(&[&queue])).unwrap();
    assert_eq!(queue.request(&[], 64).0, 10);
    queue.submit(&[(queue.buffers(), 64, true)]);
    // Deactivated after it has seen the kick: no reply without at least one byte.
    let queues = rng.deactivate();
    assert_eq!(queue.poll_used(), None);
    // The first ten bytes have been read already.
    file.as_file_mut().write_all(&[8; 15]).unwrap();
    let mut again = guest.activation(&[]);
    again.queues = queues;
    again.queues[0].kick.write(1).unwrap();
    rng.activate(again).unwrap();
    assert_eq!(queue.wait_used(), 5);
    rng.deactivate();
}

#[test]
fn a_terminal_without_input_does_not_hold_up_its_worker() {
    // SAFETY: no memory is passed; the result is checked.
    let main = unsafe { libc::posix_openpt(libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC) };
    assert!(main >= 0);
    let source = format!("/proc/self/fd/{main}");
    let options = Options {
        thread_name: "_rng0".to_owned(),
        source: source.into(),
    };
    // Another pty main end, on which nothing arrives: a character device whose reads would block.
    let mut rng = Rng::new(options, Arc::new(Unconfined)).unwrap();
    let guest = Guest::new();
    let queue = guest.queue(0, 16);
    rng.activate(guest.activation(&[&queue])).unwrap();
    queue.submit(&[(queue.buffers(), 64, true)]);
    assert_eq!(rng.deactivate().len(), 1);
    assert_eq!(queue.poll_used(), None);
    // SAFETY: opened above, closed once.
    unsafe { libc::close(main) };
}

#[test]
fn pipes_sockets_and_folders_are_refused_without_waiting_for_them() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    let name = std::ffi::CString::new(fifo.to_str().unwrap()).unwrap();
    // SAFETY: the path is terminated.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    let socket = dir.path().join("socket");
    let _listener = UnixListener::bind(&socket).unwrap();
    for source in [fifo, socket, dir.path().to_owned()] {
        let options = Options {
            thread_name: String::new(),
            source: source.clone(),
        };
        let error = Rng::new(options, Arc::new(Unconfined)).err().unwrap();
        let text = error.to_string();
        assert!(text.contains(source.to_str().unwrap()), "{text}");
        let refused = matches!(error, Error::Kind(_));
        assert_eq!(refused, !source.ends_with("socket"), "{text}");
    }
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

#[test]
fn a_source_that_does_not_answer_is_waited_for_in_bounded_time() {
    let (file, mut rng) = rng(&[7; 100]);
    let guest = Guest::new();
    let queue = guest.queue(0, 16);
    rng.activate(guest.activation(&[&queue])).unwrap();
    // As the worker does before it reads the source.
    assert!(rng.reads.begin());
    let patience = Duration::from_millis(5);
    let error = rng.quiesce(patience).unwrap_err().to_string();
    assert!(
        error.contains(&file.path().display().to_string()),
        "{error}"
    );
    // Held back until the device may continue.
    queue.submit(&[(queue.buffers(), 8, true)]);
    rng.quiesce(patience).unwrap_err();
    assert_eq!(queue.poll_used(), None);
    rng.reads.end();
    rng.quiesce(patience).unwrap();
    rng.carry_on();
    queue.submit(&[(queue.buffers(), 8, true)]);
    assert_eq!([queue.wait_used(), queue.wait_used()], [8, 8]);
    rng.deactivate();
}
