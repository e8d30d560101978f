use std::{
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::Arc,
};

use device_model::thread::Unconfined;
use tempfile::TempDir;

use super::{
    Options, Vsock,
    muxer::Muxer,
    packet::{HEADER, HOST_CID, Header, STREAM, op, shutdown},
};

const CID: u64 = 3;

fn options(socket: &Path) -> Options {
    Options {
        thread_name: "_vsock0".to_owned(),
        cid: CID,
        socket: socket.to_owned(),
    }
}

fn packet(op: u16) -> Header {
    Header {
        src_cid: CID,
        dst_cid: HOST_CID,
        src_port: 5,
        dst_port: 80,
        kind: STREAM,
        op,
        buf_alloc: 10,
        ..Default::default()
    }
}

/// A muxer with one connection to a guest that has room for ten bytes, and the host's end of it.
fn connected(dir: &TempDir) -> (Muxer, UnixStream) {
    let path = dir.path().join("vsock");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let server = UnixListener::bind(dir.path().join("vsock_80")).unwrap();
    let mut muxer = Muxer::new(CID, path, listener.into());
    muxer.receive(&packet(op::REQUEST), &[]);
    let (stream, _) = server.accept().unwrap();
    assert_eq!(next(&mut muxer), Some((op::RESPONSE, 0)));
    (muxer, stream)
}

fn next(muxer: &mut Muxer) -> Option<(u16, usize)> {
    muxer
        .next_packet(4096)
        .map(|(h, payload)| (h.op, payload.len()))
}

/// Sends `header` from a guest whose buffer is full while 25 bytes wait, and returns the replies.
fn after_filling_the_guest(header: Header) -> Vec<(u16, usize)> {
    let dir = TempDir::new().unwrap();
    let (mut muxer, mut stream) = connected(&dir);
    stream.write_all(&[1; 25]).unwrap();
    muxer.ready(1, false);
    assert_eq!(next(&mut muxer), Some((op::RW, 10)));
    assert_eq!(next(&mut muxer), None);
    muxer.receive(&header, &[]);
    std::iter::from_fn(|| next(&mut muxer)).collect()
}

#[test]
fn a_credit_request_that_brings_credit_wakes_the_stream() {
    let sent = after_filling_the_guest(Header {
        fwd_cnt: 10,
        ..packet(op::CREDIT_REQUEST)
    });
    assert!(sent.contains(&(op::RW, 10)), "{sent:?}");
}

#[test]
fn a_half_close_that_brings_credit_wakes_the_stream() {
    let sent = after_filling_the_guest(Header {
        fwd_cnt: 10,
        flags: shutdown::SEND,
        ..packet(op::SHUTDOWN)
    });
    assert!(sent.contains(&(op::RW, 10)), "{sent:?}");
}

#[test]
fn a_guest_that_receives_no_more_is_sent_no_more() {
    let dir = TempDir::new().unwrap();
    let (mut muxer, mut stream) = connected(&dir);
    let flags = shutdown::RECEIVE;
    muxer.receive(
        &Header {
            flags,
            ..packet(op::SHUTDOWN)
        },
        &[],
    );
    stream.write_all(b"late").unwrap();
    muxer.ready(1, false);
    let sent: Vec<_> = std::iter::from_fn(|| next(&mut muxer)).collect();
    assert!(!sent.iter().any(|(op, _)| *op == op::RW), "{sent:?}");
}

#[test]
fn the_end_of_the_hosts_stream_is_said_once() {
    let dir = TempDir::new().unwrap();
    let (mut muxer, stream) = connected(&dir);
    stream.shutdown(Shutdown::Write).unwrap();
    muxer.ready(1, false);
    assert_eq!(next(&mut muxer), Some((op::SHUTDOWN, 0)));
    muxer.receive(&packet(op::CREDIT_UPDATE), &[]);
    assert_eq!(next(&mut muxer), None);
}

#[test]
fn a_buffer_with_room_for_a_header_only_loses_nothing() {
    let dir = TempDir::new().unwrap();
    let (mut muxer, mut stream) = connected(&dir);
    stream.write_all(b"data").unwrap();
    muxer.ready(1, false);
    assert!(muxer.next_packet(HEADER).is_none());
    assert_eq!(next(&mut muxer), Some((op::RW, 4)));
}

#[test]
fn a_file_that_is_no_socket_is_left_alone() {
    let dir = TempDir::new().unwrap();
    let socket = dir.path().join("precious");
    std::fs::write(&socket, "data").unwrap();
    let made = Vsock::new(options(&socket), Arc::new(Unconfined));
    assert!(made.is_err());
    assert_eq!(std::fs::read(&socket).unwrap(), b"data");
}

#[test]
fn dropping_a_device_leaves_a_socket_of_somebody_else_alone() {
    let dir = TempDir::new().unwrap();
    let socket = dir.path().join("vsock");
    let vsock = Vsock::new(options(&socket), Arc::new(Unconfined)).unwrap();
    std::fs::remove_file(&socket).unwrap();
    let _other = UnixListener::bind(&socket).unwrap();
    drop(vsock);
    UnixStream::connect(&socket).unwrap();
}

#[test]
fn a_packet_that_cannot_be_taken_whole_ends_its_stream() {
    let dir = TempDir::new().unwrap();
    let (mut muxer, mut stream) = connected(&dir);
    muxer.refuse(&packet(op::RW));
    assert_eq!(next(&mut muxer), Some((op::RST, 0)));
    muxer.watches.clear();
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
}
