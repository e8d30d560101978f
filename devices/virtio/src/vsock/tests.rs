use std::{
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use device_model::thread::Unconfined;
use proptest::prelude::*;
use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use super::{
    Options, Vsock,
    muxer::{MAX_ANSWERS, Muxer},
    packet::{HEADER, HOST_CID, Header, STREAM, op, shutdown},
};
use crate::{
    VirtioDevice,
    testing::simple::{Guest, GuestQueue},
};

const CID: u64 = 3;

fn options(dir: &TempDir) -> Options {
    Options {
        thread_name: "_vsock0".to_owned(),
        cid: CID,
        socket: dir.path().join("vsock"),
    }
}

/// A guest's driver with one packet in flight in each direction.
struct Driver {
    guest: Guest,
    queues: [GuestQueue; 3],
}

impl Driver {
    fn start(vsock: &mut Vsock) -> Self {
        let guest = Guest::new();
        let queues = [guest.queue(0, 16), guest.queue(1, 16), guest.queue(2, 16)];
        vsock
            .activate(guest.activation(&[&queues[0], &queues[1], &queues[2]]))
            .unwrap();
        Self { guest, queues }
    }

    fn send(&self, header: Header, payload: &[u8]) {
        let header = Header {
            len: payload.len() as u32,
            ..header
        };
        let mut bytes = header.bytes().to_vec();
        bytes.extend(payload);
        self.queues[1].request(&bytes, 0);
    }

    fn receive(&self) -> (Header, Vec<u8>) {
        let rx = &self.queues[0];
        rx.submit(&[(rx.buffers(), 4096, true)]);
        let mut bytes = vec![0; rx.wait_used() as usize];
        self.guest
            .memory
            .memory()
            .read_slice(&mut bytes, GuestAddress(rx.buffers()))
            .unwrap();
        let header = Header::parse(bytes[..HEADER].try_into().unwrap());
        (header, bytes[HEADER..].to_vec())
    }
}

fn packet(host_port: u32, guest_port: u32, op: u16) -> Header {
    Header {
        src_cid: CID,
        dst_cid: HOST_CID,
        src_port: guest_port,
        dst_port: host_port,
        kind: STREAM,
        op,
        buf_alloc: 1 << 16,
        ..Default::default()
    }
}

fn client(dir: &TempDir, port: u32) -> UnixStream {
    let mut stream = UnixStream::connect(dir.path().join("vsock")).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    stream
        .write_all(format!("CONNECT {port}\n").as_bytes())
        .unwrap();
    stream
}

#[test]
fn the_host_reaches_a_port_of_the_guest() {
    let dir = TempDir::new().unwrap();
    let mut vsock = Vsock::new(options(&dir), Arc::new(Unconfined)).unwrap();
    let driver = Driver::start(&mut vsock);
    let mut stream = client(&dir, 1234);
    stream.write_all(b"hello").unwrap();
    let (request, _) = driver.receive();
    assert_eq!((request.op, request.dst_port), (op::REQUEST, 1234));
    driver.send(packet(request.src_port, 1234, op::RESPONSE), &[]);
    let mut line = [0; 14];
    stream.read_exact(&mut line).unwrap();
    assert_eq!(line, *format!("OK {}\n", request.src_port).as_bytes());
    let (data, bytes) = driver.receive();
    assert_eq!((data.op, bytes.as_slice()), (op::RW, &b"hello"[..]));
    driver.send(packet(request.src_port, 1234, op::RW), b"world");
    let mut back = [0; 5];
    stream.read_exact(&mut back).unwrap();
    assert_eq!(&back, b"world");
    drop(stream);
    let (end, _) = driver.receive();
    assert_eq!(end.op, op::SHUTDOWN);
    let end = Header {
        flags: shutdown::BOTH,
        ..packet(request.src_port, 1234, op::SHUTDOWN)
    };
    driver.send(end, &[]);
    assert_eq!(driver.receive().0.op, op::RST);
    assert_eq!(vsock.deactivate().len(), 3);
}

#[test]
fn the_guest_reaches_a_socket_of_the_host_and_nothing_else() {
    let dir = TempDir::new().unwrap();
    let mut vsock = Vsock::new(options(&dir), Arc::new(Unconfined)).unwrap();
    let listener = UnixListener::bind(dir.path().join("vsock_80")).unwrap();
    let driver = Driver::start(&mut vsock);
    driver.send(packet(81, 5, op::REQUEST), &[]);
    assert_eq!(driver.receive().0.op, op::RST);
    driver.send(packet(80, 5, op::REQUEST), &[]);
    let (mut stream, _) = listener.accept().unwrap();
    assert_eq!(driver.receive().0.op, op::RESPONSE);
    driver.send(packet(80, 5, op::RW), b"ping");
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"ping");
    stream.write_all(b"pong").unwrap();
    assert_eq!(driver.receive().1, b"pong");
    vsock.deactivate();
}

#[test]
fn a_guest_without_room_gets_no_more_than_it_has() {
    let dir = TempDir::new().unwrap();
    let mut vsock = Vsock::new(options(&dir), Arc::new(Unconfined)).unwrap();
    let listener = UnixListener::bind(dir.path().join("vsock_80")).unwrap();
    let driver = Driver::start(&mut vsock);
    let small = |op| Header {
        buf_alloc: 10,
        ..packet(80, 5, op)
    };
    driver.send(small(op::REQUEST), &[]);
    let (mut stream, _) = listener.accept().unwrap();
    assert_eq!(driver.receive().0.op, op::RESPONSE);
    stream.write_all(&[1; 25]).unwrap();
    assert_eq!(driver.receive().1.len(), 10);
    driver.send(
        Header {
            fwd_cnt: 10,
            ..small(op::CREDIT_UPDATE)
        },
        &[],
    );
    assert_eq!(driver.receive().1.len(), 10);
    driver.send(
        Header {
            fwd_cnt: 20,
            ..small(op::CREDIT_UPDATE)
        },
        &[],
    );
    assert_eq!(driver.receive().1.len(), 5);
    vsock.deactivate();
}

#[test]
fn connections_survive_a_pause_and_end_with_a_restore() {
    let dir = TempDir::new().unwrap();
    let mut vsock = Vsock::new(options(&dir), Arc::new(Unconfined)).unwrap();
    let listener = UnixListener::bind(dir.path().join("vsock_80")).unwrap();
    let driver = Driver::start(&mut vsock);
    driver.send(packet(80, 5, op::REQUEST), &[]);
    let (mut stream, _) = listener.accept().unwrap();
    assert_eq!(driver.receive().0.op, op::RESPONSE);
    vsock.deactivate();
    let state = vsock.save().unwrap();
    stream.write_all(b"meanwhile").unwrap();
    let driver = Driver::start(&mut vsock);
    assert_eq!(driver.receive().1, b"meanwhile");
    drop(vsock);
    let mut vsock = Vsock::new(options(&dir), Arc::new(Unconfined)).unwrap();
    vsock.restore(state).unwrap();
    let driver = Driver::start(&mut vsock);
    let events = &driver.queues[2];
    assert_eq!(events.request(&[], 4), (4, vec![0; 4]));
    vsock.deactivate();
}

#[test]
fn a_reset_ends_all_streams_and_leaves_waiting_clients() {
    let dir = TempDir::new().unwrap();
    let mut vsock = Vsock::new(options(&dir), Arc::new(Unconfined)).unwrap();
    let listener = UnixListener::bind(dir.path().join("vsock_80")).unwrap();
    let driver = Driver::start(&mut vsock);
    driver.send(packet(80, 5, op::REQUEST), &[]);
    let (mut stream, _) = listener.accept().unwrap();
    let mut asking = client(&dir, 1234);
    // The reply to the guest's request, and the host's request.
    for _ in 0..2 {
        driver.receive();
    }
    vsock.deactivate();
    let mut waiting = client(&dir, 1235);
    vsock.reset();
    assert_eq!(vsock.counters().last(), Some(&("connections", 0)));
    for ended in [&mut stream, &mut asking] {
        assert_eq!(ended.read(&mut [0]).unwrap(), 0);
    }
    let driver = Driver::start(&mut vsock);
    let (request, _) = driver.receive();
    assert_eq!((request.op, request.dst_port), (op::REQUEST, 1235));
    driver.send(packet(request.src_port, 1235, op::RESPONSE), &[]);
    assert_eq!(waiting.read(&mut [0; 2]).unwrap(), 2);
    assert!(driver.queues[2].poll_used().is_none(), "no event");
    vsock.deactivate();
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let dir = TempDir::new().unwrap();
    drop(UnixListener::bind(dir.path().join("vsock")).unwrap());
    let vsock = Vsock::new(options(&dir), Arc::new(Unconfined)).unwrap();
    let error = Vsock::new(options(&dir), Arc::new(Unconfined))
        .err()
        .unwrap();
    assert!(
        error.to_string().contains("another process listens"),
        "{error}"
    );
    drop(vsock);
    assert!(!dir.path().join("vsock").exists());
}

fn muxer(dir: &TempDir) -> Muxer {
    let path: PathBuf = dir.path().join("vsock");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    Muxer::new(CID, path, listener.into())
}

proptest! {
    #[test]
    fn whatever_a_guest_sends_answers_stay_bounded(
        packets in prop::collection::vec((0..3_u32, 0..3_u32, 0..9_u16, any::<u32>(), any::<u32>(), 0..3_usize), 0..200),
    ) {
        let dir = TempDir::new().unwrap();
        let _listener = UnixListener::bind(dir.path().join("vsock_1")).unwrap();
        let mut muxer = muxer(&dir);
        for (host, guest, op, credit, flags, len) in packets {
            let header = Header {
                buf_alloc: credit,
                fwd_cnt: flags.rotate_left(7),
                flags,
                ..packet(host, guest, op)
            };
            muxer.receive(&header, &vec![7; len * 30_000]);
            muxer.accept();
            prop_assert!(muxer.connections() <= 9);
            muxer.watches.clear();
        }
        let mut packets = 0;
        while muxer.next_packet(4096).is_some() {
            packets += 1;
            prop_assert!(packets <= MAX_ANSWERS);
        }
    }
}
