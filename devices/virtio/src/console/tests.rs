use std::{
    io::{self, Write},
    sync::{
        Arc, Mutex,
        atomic::Ordering,
        mpsc::{self, Receiver, Sender},
    },
    time::Duration,
};

use device_model::thread::Unconfined;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use super::{Console, Options, input::CAPACITY};
use crate::{
    VirtioDevice,
    testing::simple::{Guest, GuestQueue},
};

#[derive(Clone, Default)]
struct Screen(Arc<Mutex<Vec<u8>>>);

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn console() -> (Console, Screen) {
    let screen = Screen::default();
    let options = Options {
        thread_name: "_console0".to_owned(),
        size: Some((80, 25)),
    };
    let output = Box::new(screen.clone());
    (
        Console::new(options, output, Arc::new(Unconfined)).unwrap(),
        screen,
    )
}

fn received(guest: &Guest, queue: &GuestQueue, len: u32) -> Vec<u8> {
    let mut bytes = vec![0; queue.wait_used() as usize];
    assert!(bytes.len() <= len as usize);
    guest
        .memory
        .memory()
        .read_slice(&mut bytes, GuestAddress(queue.buffers()))
        .unwrap();
    bytes
}

#[test]
fn what_the_guest_sends_is_printed() {
    let (mut console, screen) = console();
    let guest = Guest::new();
    let (rx, tx) = (guest.queue(0, 16), guest.queue(1, 16));
    console.activate(guest.activation(&[&rx, &tx])).unwrap();
    tx.request(b"hello ", 0);
    tx.request(b"world", 0);
    assert_eq!(*screen.0.lock().unwrap(), b"hello world");
    assert_eq!(console.deactivate().len(), 2);
}

/// A file on slow storage: it signals that a write has begun, and completes it when told to.
struct Slow(Sender<()>, Receiver<()>);

impl Write for Slow {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send(()).map_err(io::Error::other)?;
        self.1.recv().map_err(io::Error::other)?;
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_console_stops_between_two_writes_of_its_output() {
    let ((begun, has_begun), (go_on, goes_on)) = (mpsc::channel(), mpsc::channel());
    let options = Options {
        thread_name: "_console0".to_owned(),
        size: None,
    };
    let output = Box::new(Slow(begun, goes_on));
    let mut console = Console::new(options, output, Arc::new(Unconfined)).unwrap();
    let guest = Guest::new();
    let (rx, tx) = (guest.queue(0, 16), guest.queue(1, 16));
    console.activate(guest.activation(&[&rx, &tx])).unwrap();
    for _ in 0..2 {
        tx.submit(&[(tx.buffers(), 8, false)]);
    }
    has_begun.recv().unwrap();
    assert!(console.quiesce(Duration::ZERO).is_err());
    go_on.send(()).unwrap();
    console.quiesce(Duration::from_secs(20)).unwrap();
    assert!(
        has_begun.try_recv().is_err(),
        "it writes although it is held"
    );
    console.carry_on();
    tx.submit(&[(tx.buffers(), 8, false)]);
    for _ in 0..2 {
        has_begun.recv_timeout(Duration::from_secs(20)).unwrap();
        go_on.send(()).unwrap();
    }
    for _ in 0..3 {
        tx.wait_used();
    }
    assert_eq!(console.deactivate().len(), 2);
}

#[test]
fn input_waits_for_buffers_and_is_never_lost() {
    let (mut console, _screen) = console();
    let sink = console.input();
    assert_eq!(sink.enqueue(b"early"), 5);
    let guest = Guest::new();
    let (rx, tx) = (guest.queue(0, 16), guest.queue(1, 16));
    console.activate(guest.activation(&[&rx, &tx])).unwrap();
    rx.submit(&[(rx.buffers(), 3, true)]);
    assert_eq!(received(&guest, &rx, 3), b"ear");
    rx.submit(&[(rx.buffers(), 64, true)]);
    assert_eq!(received(&guest, &rx, 64), b"ly");
    rx.submit(&[(rx.buffers(), 64, true)]);
    assert_eq!(sink.enqueue(b"late"), 4);
    assert_eq!(received(&guest, &rx, 64), b"late");
    console.deactivate();
}

#[test]
fn a_full_buffer_turns_input_away_and_says_when_there_is_room() {
    let (mut console, _screen) = console();
    let sink = console.input();
    assert_eq!(sink.enqueue(&[b'x'; CAPACITY + 10]), CAPACITY);
    assert!(sink.room_event().read().is_err());
    let guest = Guest::new();
    let (rx, tx) = (guest.queue(0, 16), guest.queue(1, 16));
    console.activate(guest.activation(&[&rx, &tx])).unwrap();
    rx.submit(&[(rx.buffers(), 100, true)]);
    assert_eq!(rx.wait_used(), 100);
    guest.wait_until("there is room", || sink.room_event().read().is_ok());
    console.deactivate();
}

#[test]
fn waiting_input_survives_a_snapshot() {
    let (before, _screen) = console();
    before.input().enqueue(b"typed");
    let state = before.save().unwrap();
    let (mut after, _screen) = console();
    after.restore(state).unwrap();
    assert_eq!(after.save().unwrap(), before.save().unwrap());
    let too_much = serde_json::json!({"input": vec![0; CAPACITY + 1]});
    assert!(after.restore(too_much).is_err());
}

#[test]
fn hostile_chains_hurt_nobody() {
    let (mut console, screen) = console();
    let guest = Guest::new();
    let (rx, tx) = (guest.queue(0, 16), guest.queue(1, 16));
    console.activate(guest.activation(&[&rx, &tx])).unwrap();
    tx.raw(&[(u64::MAX - 4, 100, false)]);
    tx.raw(&[(tx.buffers(), 100, true)]);
    tx.raw(&[(0x10_0000, 0x100_0000, false)]);
    assert!(screen.0.lock().unwrap().len() <= 256 << 10);
    console.input().enqueue(b"x");
    assert_eq!(rx.raw(&[(rx.buffers(), 100, false)]), 0);
    console.deactivate();
}

/// Columns and rows in the configuration.
fn size(console: &Console) -> [u8; 4] {
    let mut size = [0; 4];
    console.read_config(0, &mut size);
    size
}

#[test]
fn a_guest_hears_of_a_new_size_once() {
    let (mut console, _) = console();
    let guest = Guest::new();
    let (rx, tx) = (guest.queue(0, 16), guest.queue(1, 16));
    console.activate(guest.activation(&[&rx, &tx])).unwrap();
    let told = || guest.interrupts.config.load(Ordering::SeqCst);
    let handle = console.handle();
    handle.resize((80, 25));
    assert_eq!(told(), 0, "no news");
    handle.resize((0x1234, 50));
    handle.resize((0x1234, 50));
    assert_eq!(told(), 1);
    assert_eq!(size(&console), [0x34, 0x12, 50, 0]);
    console.deactivate();
    handle.resize((132, 43));
    assert_eq!(told(), 1, "later");
    console.activate(guest.activation(&[&rx, &tx])).unwrap();
    assert_eq!(told(), 2);
    console.deactivate();
    handle.resize((80, 25));
    console.reset();
    console.activate(guest.activation(&[&rx, &tx])).unwrap();
    assert_eq!(told(), 2, "the next driver reads the size anyway");
    console.deactivate();
}

#[test]
fn a_guest_that_comes_back_to_another_terminal_hears_of_its_size() {
    let (saved, _) = console();
    saved.handle().resize((132, 43));
    let state = saved.save().unwrap();
    let guest = Guest::new();
    let (rx, tx) = (guest.queue(0, 16), guest.queue(1, 16));
    for (columns, expected) in [(132, 0), (80, 1)] {
        let (mut console, _) = console();
        console.handle().resize((columns, 43));
        assert_eq!(console.features(), saved.features());
        console.restore(state.clone()).unwrap();
        console.activate(guest.activation(&[&rx, &tx])).unwrap();
        assert_eq!(guest.interrupts.config.load(Ordering::SeqCst), expected);
        console.deactivate();
    }
    let (mut old, _) = console();
    old.restore(serde_json::json!({"input": [97]})).unwrap();
}
