//! End-to-end tests of consoles, with a device whose room the test controls.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{Condvar, Mutex},
};

use device_model::thread::Unconfined;
use tempfile::TempDir;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::*;
use crate::ConsoleMode;

struct Device {
    room: EventFd,
    state: Mutex<(Vec<u8>, usize)>,
    changed: Condvar,
}

impl Device {
    fn with_room(room: usize) -> Arc<Self> {
        Arc::new(Self {
            room: EventFd::new(EFD_NONBLOCK).unwrap(),
            state: Mutex::new((Vec::new(), room)),
            changed: Condvar::new(),
        })
    }

    fn wait_for(&self, count: usize) -> Vec<u8> {
        let guard = self.state.lock().unwrap();
        let guard = self.changed.wait_while(guard, |s| s.0.len() < count);
        guard.unwrap().0.clone()
    }

    fn make_room(&self, room: usize) {
        self.state.lock().unwrap().1 = room;
        self.room.write(1).unwrap();
    }
}

impl InputSink for Device {
    fn enqueue(&self, data: &[u8]) -> usize {
        let mut state = self.state.lock().unwrap();
        let count = data.len().min(state.1);
        state.1 -= count;
        state.0.extend_from_slice(&data[..count]);
        self.changed.notify_all();
        count
    }

    fn room_event(&self) -> &EventFd {
        &self.room
    }
}

fn serve(backend: ConsoleBackend, device: &Arc<Device>) -> ConsoleService {
    let device: Arc<dyn InputSink> = Arc::clone(device) as _;
    let mut service = ConsoleService::new(vec![ConsoleLine::new(backend, Some(device))]);
    service.start(&Unconfined).unwrap();
    service
}

fn socket() -> (TempDir, PathBuf, ConsoleBackend) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("console");
    let backend = ConsoleBackend::open(&ConsoleMode::Socket(path.clone())).unwrap();
    (dir, path, backend)
}

fn read_exact(stream: &mut impl Read, count: usize) -> Vec<u8> {
    let mut data = vec![0; count];
    stream.read_exact(&mut data).unwrap();
    data
}

#[test]
fn input_that_the_device_has_no_room_for_is_held_back_and_not_lost() {
    let (_dir, path, backend) = socket();
    let device = Device::with_room(3);
    let _service = serve(backend, &device);
    let mut client = UnixStream::connect(path).unwrap();
    let bytes: Vec<u8> = (0..20_000u32).map(|n| (n % 251) as u8).collect();
    client.write_all(&bytes).unwrap();
    // The client disconnects before its input is accepted.
    drop(client);
    assert_eq!(device.wait_for(3), bytes[..3]);
    device.make_room(10);
    assert_eq!(device.wait_for(13), bytes[..13]);
    device.make_room(usize::MAX);
    assert_eq!(device.wait_for(bytes.len()), bytes);
}

#[test]
fn who_connects_gets_earlier_output_and_a_second_client_is_turned_away() {
    let (_dir, path, backend) = socket();
    let mut output = backend.output();
    let device = Device::with_room(usize::MAX);
    let _service = serve(backend, &device);
    output.write_all(b"early ").unwrap();
    let mut client = UnixStream::connect(&path).unwrap();
    assert_eq!(read_exact(&mut client, 6), b"early ");
    output.write_all(b"late").unwrap();
    assert_eq!(read_exact(&mut client, 4), b"late");

    let mut second = UnixStream::connect(&path).unwrap();
    assert_eq!(second.read(&mut [0]).unwrap(), 0);
    client.write_all(b"x").unwrap();
    assert_eq!(device.wait_for(1), b"x");
}

#[test]
fn after_a_client_left_the_next_one_is_served() {
    let (_dir, path, backend) = socket();
    let mut output = backend.output();
    let device = Device::with_room(usize::MAX);
    let _service = serve(backend, &device);
    for round in 1..=3 {
        // Until the previous client's disconnection is noticed, a new one is rejected.
        let mut client = loop {
            let mut client = UnixStream::connect(&path).unwrap();
            output.write_all(b"?").unwrap();
            if matches!(client.read(&mut [0]), Ok(1)) {
                break client;
            }
        };
        client.write_all(b"y").unwrap();
        assert_eq!(device.wait_for(round).len(), round);
    }
}

#[test]
fn a_client_that_sends_no_more_still_gets_output() {
    let (_dir, path, backend) = socket();
    let mut output = backend.output();
    let device = Device::with_room(usize::MAX);
    let _service = serve(backend, &device);
    let mut client = UnixStream::connect(path).unwrap();
    client.write_all(b"in").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(device.wait_for(2), b"in");
    output.write_all(b"out").unwrap();
    assert_eq!(read_exact(&mut client, 3), b"out");
}

#[test]
fn a_slow_client_gets_everything_within_the_backlog() {
    let (_dir, path, backend) = socket();
    let mut output = backend.output();
    let device = Device::with_room(0);
    let _service = serve(backend, &device);
    let mut client = UnixStream::connect(path).unwrap();
    let bytes: Vec<u8> = (0..crate::OUTPUT_BACKLOG)
        .map(|n| (n % 251) as u8)
        .collect();
    output.write_all(&bytes).unwrap();
    assert_eq!(read_exact(&mut client, bytes.len()), bytes);
    assert_eq!(output.dropped(), 0);
}

#[test]
fn a_pty_works_in_both_directions_across_a_stop() {
    let backend = ConsoleBackend::open(&ConsoleMode::Pty).unwrap();
    let path = backend.pty_path().unwrap().to_owned();
    let mut output = backend.output();
    let device = Device::with_room(usize::MAX);
    let mut service = serve(backend, &device);
    let mut terminal = File::options().read(true).write(true).open(path).unwrap();
    terminal.write_all(b"a\r").unwrap();
    assert_eq!(device.wait_for(2), b"a\r");
    service.stop();
    terminal.write_all(b"b").unwrap();
    service.start(&Unconfined).unwrap();
    assert_eq!(device.wait_for(3), b"a\rb");
    output.write_all(b"c\n").unwrap();
    assert_eq!(read_exact(&mut terminal, 2), b"c\n");
}

fn line(input: File, device: &Arc<Device>) -> ConsoleService {
    let mut backend = ConsoleBackend::open(&ConsoleMode::Null).unwrap();
    backend.input = Input::Stream(input);
    serve(backend, device)
}

fn source_is_gone(service: &mut ConsoleService) -> bool {
    service.stop();
    let State::Stopped(lines) = &service.state else {
        panic!("the thread died");
    };
    matches!(lines.0[0].source, Source::None)
}

#[test]
fn the_end_of_a_pipe_ends_the_watch() {
    let (reader, mut writer) = io::pipe().unwrap();
    let device = Device::with_room(usize::MAX);
    let mut service = line(File::from(OwnedFd::from(reader)), &device);
    writer.write_all(b"last").unwrap();
    drop(writer);
    assert_eq!(device.wait_for(4), b"last");
    while !source_is_gone(&mut service) {
        service.start(&Unconfined).unwrap();
    }
}

#[test]
fn dev_null_is_no_input_and_a_regular_file_is_read_to_its_end() {
    let device = Device::with_room(usize::MAX);
    let mut service = line(File::open("/dev/null").unwrap(), &device);
    while !source_is_gone(&mut service) {
        service.start(&Unconfined).unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("script");
    std::fs::write(&path, vec![b'z'; 3 * INPUT_CHUNK + 1]).unwrap();
    let device = Device::with_room(100);
    let _service = line(File::open(path).unwrap(), &device);
    device.wait_for(100);
    device.make_room(usize::MAX);
    assert_eq!(
        device.wait_for(3 * INPUT_CHUNK + 1).len(),
        3 * INPUT_CHUNK + 1
    );
}

#[test]
fn consoles_with_nothing_to_watch_start_no_thread() {
    let null = ConsoleBackend::open(&ConsoleMode::Null).unwrap();
    let device = Device::with_room(0);
    let mut service = serve(null, &device);
    assert!(matches!(service.state, State::Stopped(_)));
    service.start(&Unconfined).unwrap();
    service.stop();
}
