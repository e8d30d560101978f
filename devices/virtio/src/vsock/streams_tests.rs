//! Streams under pressure: many of them, slow readers, hosts that close early, and hosts that lack
//! resources.

use std::{
    io::{self, Read, Write},
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use device_model::thread::{ThreadRole, ThreadSpawner, Unconfined};
use tempfile::TempDir;
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use super::{
    Options, Vsock,
    connection::BUFFER,
    muxer::{MAX_ANSWERS, MAX_CONNECTIONS, Muxer, Watch},
    packet::{HEADER, HOST_CID, Header, STREAM, op, shutdown},
};
use crate::{
    VirtioDevice,
    served::COMMON_FEATURES,
    testing::{
        raw::{RawQueue, WRITE},
        simple::Guest,
    },
};

const CID: u64 = 3;

fn packet(ports: (u32, u32), op: u16) -> Header {
    Header {
        src_cid: CID,
        dst_cid: HOST_CID,
        src_port: ports.1,
        dst_port: ports.0,
        kind: STREAM,
        op,
        buf_alloc: 1 << 16,
        ..Default::default()
    }
}

fn muxer(dir: &TempDir) -> Muxer {
    let path = dir.path().join("vsock");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    Muxer::new(CID, path, listener.into())
}

/// Tokens of the descriptors that the muxer has newly asked to watch.
fn new_tokens(muxer: &mut Muxer) -> Vec<u32> {
    std::mem::take(&mut muxer.watches)
        .into_iter()
        .filter_map(|watch| match watch {
            Watch::Add(_, token) => Some(token),
            Watch::Remove(..) => None,
        })
        .collect()
}

/// A client of the host that requests `port`, and its token.
fn client(dir: &TempDir, muxer: &mut Muxer, port: u32) -> (UnixStream, Option<u32>) {
    let mut stream = UnixStream::connect(dir.path().join("vsock")).unwrap();
    writeln!(stream, "CONNECT {port}").unwrap();
    muxer.accept();
    let token = new_tokens(muxer).pop();
    if let Some(token) = token {
        muxer.ready(token, false);
    }
    (stream, token)
}

/// The next packet, if any, and its payload.
fn next(muxer: &mut Muxer) -> Option<(Header, Vec<u8>)> {
    muxer
        .next_packet(4096)
        .map(|(header, payload)| (header, payload.to_vec()))
}

/// An open stream that a client of the host requested: client, token and ports.
fn open(dir: &TempDir, muxer: &mut Muxer, port: u32) -> (UnixStream, u32, (u32, u32)) {
    let (mut stream, token) = client(dir, muxer, port);
    let (request, _) = next(muxer).unwrap();
    assert_eq!((request.op, request.dst_port), (op::REQUEST, port));
    let ports = (request.src_port, port);
    muxer.receive(&packet(ports, op::RESPONSE), &[]);
    let mut line = vec![0; format!("OK {}\n", ports.0).len()];
    stream.read_exact(&mut line).unwrap();
    assert!(line.starts_with(b"OK "));
    assert_eq!(next(muxer), None);
    (stream, token.unwrap(), ports)
}

/// Raises the limit of open files to the maximum that the host permits.
fn raise_open_files() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: both calls get a valid structure.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
        limit.rlim_cur = limit.rlim_max;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
    }
    assert!(
        limit.rlim_cur > 2500,
        "this test opens 2100 files: raise ulimit -Hn"
    );
}

#[test]
fn as_many_streams_as_promised_work_side_by_side_and_no_more() {
    raise_open_files();
    let dir = TempDir::new().unwrap();
    let mut muxer = muxer(&dir);
    let mut streams: Vec<_> = (0..MAX_CONNECTIONS as u32)
        .map(|port| open(&dir, &mut muxer, port))
        .collect();
    assert_eq!(muxer.connections(), MAX_CONNECTIONS);
    let (mut refused, token) = client(&dir, &mut muxer, 1);
    assert_eq!(token, None);
    // End of stream, or a reset because of the line that nobody has read.
    assert!(!matches!(refused.read(&mut [0]), Ok(1..)));
    muxer.receive(&packet((80, 5), op::REQUEST), &[]);
    assert_eq!(next(&mut muxer).unwrap().0.op, op::RST);
    // All of them send at the same time; each is delivered on its own port.
    for (stream, token, (_, port)) in &mut streams {
        stream.write_all(&port.to_le_bytes()).unwrap();
        muxer.ready(*token, false);
    }
    let mut heard = 0;
    while let Some((header, payload)) = next(&mut muxer) {
        assert_eq!(payload, header.dst_port.to_le_bytes());
        let ports = (header.src_port, header.dst_port);
        muxer.receive(&packet(ports, op::RW), &payload);
        heard += 1;
    }
    assert_eq!(heard, MAX_CONNECTIONS);
    for (stream, _, (_, port)) in &mut streams {
        let mut back = [0; 4];
        stream.read_exact(&mut back).unwrap();
        assert_eq!(back, port.to_le_bytes());
    }
    // One ends, which makes room for another.
    muxer.receive(&packet(streams[7].2, op::RST), &[]);
    new_tokens(&mut muxer);
    open(&dir, &mut muxer, 5000);
}

#[test]
fn a_host_that_reads_slowly_holds_the_guest_back_and_gets_every_byte() {
    let dir = TempDir::new().unwrap();
    let mut muxer = muxer(&dir);
    let (mut stream, token, ports) = open(&dir, &mut muxer, 1);
    let chunk: Vec<u8> = (0..16_384).map(|at| at as u8).collect();
    // As a guest does: it sends as much as it has credit for.
    let (mut sent, mut forwarded) = (0_u32, 0_u32);
    let mut send = |muxer: &mut Muxer, forwarded: u32| {
        let mut chunks = 0;
        while sent + 16_384 - forwarded <= BUFFER {
            muxer.receive(&packet(ports, op::RW), &chunk);
            sent += 16_384;
            chunks += 1;
        }
        chunks
    };
    // Until both the host's socket and the buffer are full.
    loop {
        send(&mut muxer, forwarded);
        let Some((update, _)) = next(&mut muxer) else {
            break;
        };
        assert_eq!((update.op, update.buf_alloc), (op::CREDIT_UPDATE, BUFFER));
        forwarded = update.fwd_cnt;
    }
    assert_eq!(send(&mut muxer, forwarded), 0, "no credit is left");
    // The reader starts to read.
    stream.set_nonblocking(true).unwrap();
    let mut received = Vec::new();
    let mut buffer = [0; 50_000];
    let mut credit = 0;
    while let Ok(read) = stream.read(&mut buffer) {
        received.extend_from_slice(&buffer[..read]);
        muxer.ready(token, false);
        while let Some((update, _)) = next(&mut muxer) {
            assert_eq!(update.op, op::CREDIT_UPDATE);
            credit += 1;
        }
    }
    assert!(credit > 0, "the guest hears that there is room again");
    assert!(received.len() > BUFFER as usize);
    assert!(received.chunks(chunk.len()).all(|part| part == chunk));
    assert_eq!(muxer.connections(), 1);
}

#[test]
fn a_guest_that_sends_more_than_it_has_credit_for_loses_its_stream() {
    let dir = TempDir::new().unwrap();
    let mut muxer = muxer(&dir);
    let (_stream, _, ports) = open(&dir, &mut muxer, 1);
    let mut packets = 0;
    let answer = loop {
        muxer.receive(&packet(ports, op::RW), &[1; 16_384]);
        packets += 1;
        assert!(packets < 1000, "whatever the host's socket takes");
        let answers: Vec<_> = std::iter::from_fn(|| next(&mut muxer)).collect();
        if let Some((answer, _)) = answers.last()
            && answer.op != op::CREDIT_UPDATE
        {
            break *answer;
        }
    };
    assert_eq!(answer.op, op::RST);
    assert_eq!(muxer.connections(), 0);
}

#[test]
fn what_a_host_wrote_before_it_closed_reaches_the_guest() {
    let dir = TempDir::new().unwrap();
    let mut muxer = muxer(&dir);
    let (mut stream, token, ports) = open(&dir, &mut muxer, 1);
    let with_room = |fwd_cnt, op| Header {
        buf_alloc: 10,
        fwd_cnt,
        ..packet(ports, op)
    };
    muxer.receive(&with_room(0, op::CREDIT_UPDATE), &[]);
    // The host closes with unread data, while the guest sends more and has no buffer space.
    stream.write_all(&[9; 25]).unwrap();
    muxer.receive(&with_room(0, op::RW), b"unread");
    drop(stream);
    muxer.ready(token, true);
    muxer.receive(&with_room(0, op::RW), b"for nobody");
    let mut got = 0;
    let mut ends = Vec::new();
    for _ in 0..10 {
        while let Some((header, payload)) = next(&mut muxer) {
            match header.op {
                op::RW => got += payload.len() as u32,
                op::SHUTDOWN => ends.push((header.flags, got)),
                other => panic!("operation {other} after {got} bytes"),
            }
        }
        muxer.receive(&with_room(got, op::CREDIT_UPDATE), &[]);
    }
    assert_eq!(got, 25);
    // First that nobody reads any more; after all data was delivered, that nobody writes either.
    assert_eq!(ends.first().unwrap().0, shutdown::RECEIVE);
    assert_eq!(ends.last(), Some(&(shutdown::BOTH, 25)));
    let end = Header {
        flags: shutdown::BOTH,
        ..with_room(got, op::SHUTDOWN)
    };
    muxer.receive(&end, &[]);
    assert_eq!(next(&mut muxer).unwrap().0.op, op::RST);
    assert_eq!(muxer.connections(), 0);
}

#[test]
fn a_client_that_asks_writes_and_leaves_at_once_is_heard() {
    let dir = TempDir::new().unwrap();
    let mut muxer = muxer(&dir);
    let (mut stream, token) = client(&dir, &mut muxer, 9);
    stream.write_all(b"message").unwrap();
    drop(stream);
    muxer.ready(token.unwrap(), true);
    let (request, _) = next(&mut muxer).unwrap();
    muxer.receive(&packet((request.src_port, 9), op::RESPONSE), &[]);
    let (data, payload) = next(&mut muxer).unwrap();
    assert_eq!((data.op, payload.as_slice()), (op::RW, &b"message"[..]));
    assert_eq!(next(&mut muxer).unwrap().0.flags, shutdown::BOTH);
}

#[test]
fn a_host_that_only_reads_no_more_goes_on_writing() {
    let dir = TempDir::new().unwrap();
    let mut muxer = muxer(&dir);
    let (mut stream, token, ports) = open(&dir, &mut muxer, 1);
    stream.shutdown(Shutdown::Read).unwrap();
    muxer.receive(&packet(ports, op::RW), b"unwanted");
    let (end, _) = next(&mut muxer).unwrap();
    assert_eq!((end.op, end.flags), (op::SHUTDOWN, shutdown::RECEIVE));
    stream.write_all(b"news").unwrap();
    muxer.ready(token, false);
    assert_eq!(next(&mut muxer).unwrap().1, b"news");
}

#[test]
fn only_what_may_take_too_long_needs_a_clock() {
    let dir = TempDir::new().unwrap();
    let mut muxer = muxer(&dir);
    assert!(!muxer.needs_clock());
    let silent = UnixStream::connect(dir.path().join("vsock")).unwrap();
    muxer.accept();
    assert!(muxer.needs_clock(), "a client that says nothing");
    muxer.expire(Instant::now() + Duration::from_secs(11));
    assert!(!muxer.needs_clock());
    drop(silent);
    new_tokens(&mut muxer);
    let (stream, token, _) = open(&dir, &mut muxer, 1);
    muxer.expire(Instant::now());
    assert!(!muxer.needs_clock(), "an open stream");
    drop(stream);
    muxer.ready(token, true);
    assert_eq!(next(&mut muxer).unwrap().0.op, op::SHUTDOWN);
    muxer.expire(Instant::now());
    assert!(
        muxer.needs_clock(),
        "an end that the guest has not agreed to"
    );
    muxer.expire(Instant::now() + Duration::from_secs(3));
    assert!(!muxer.needs_clock());
    assert_eq!(muxer.connections(), 0);
}

#[test]
fn clients_that_come_and_go_do_not_fill_the_memory_while_the_guest_takes_nothing() {
    let dir = TempDir::new().unwrap();
    let mut muxer = muxer(&dir);
    let later = Instant::now() + Duration::from_secs(3);
    for _ in 0..2 * MAX_ANSWERS {
        let (stream, _) = client(&dir, &mut muxer, 1);
        drop(stream);
        muxer.expire(later);
        muxer.watches.clear();
    }
    let answers = std::iter::from_fn(|| next(&mut muxer)).count();
    assert!(answers <= MAX_ANSWERS + MAX_CONNECTIONS, "{answers}");
}

fn options(dir: &TempDir) -> Options {
    Options {
        thread_name: "_vsock0".to_owned(),
        cid: CID,
        socket: dir.path().join("vsock"),
    }
}

#[test]
fn a_driver_with_event_indices_is_interrupted_for_the_packet_that_it_named() {
    let dir = TempDir::new().unwrap();
    let guest = Guest::new();
    let mut vsock = Vsock::new(options(&dir), Arc::new(Unconfined)).unwrap();
    let queues = [0, 1, 2].map(|index| RawQueue::new(&guest, index, 8));
    let receive = &queues[0];
    for slot in 0..8 {
        let at = receive.free() + u64::from(slot) * 64;
        receive.describe(receive.table(), slot, (at, 64), WRITE, 0);
        receive.offer(slot);
    }
    receive.set_used_event(2);
    let mut activation = guest.activation_with(&[], 1 << VIRTIO_RING_F_EVENT_IDX);
    assert_eq!(activation.features, COMMON_FEATURES);
    activation.queues = queues.iter().map(RawQueue::active).collect();
    vsock.activate(activation).unwrap();
    let interrupts = || guest.interrupts.queue.load(Ordering::SeqCst);
    let mut clients = Vec::new();
    for (number, expected) in [(1, 0), (2, 0), (3, 1)] {
        let mut stream = UnixStream::connect(dir.path().join("vsock")).unwrap();
        writeln!(stream, "CONNECT {number}").unwrap();
        clients.push(stream);
        guest.wait_until("a request arrives", || receive.used() == number);
        let mut bytes = [0; HEADER];
        let at = receive.free() + (u64::from(number) - 1) * 64;
        let memory = guest.memory.memory();
        memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        assert_eq!(Header::parse(&bytes).dst_port, u32::from(number));
        if expected > 0 {
            guest.wait_until("the driver is interrupted", || interrupts() > 0);
        }
        assert_eq!(interrupts(), expected);
    }
    vsock.deactivate();
    assert_eq!(interrupts(), 1);
}

/// Starts all threads but the first.
struct Reluctant(AtomicBool);

impl ThreadSpawner for Reluctant {
    fn spawn(
        &self,
        role: ThreadRole,
        name: &str,
        body: Box<dyn FnOnce() + Send>,
    ) -> io::Result<thread::JoinHandle<()>> {
        if self.0.swap(true, Ordering::SeqCst) {
            Unconfined.spawn(role, name, body)
        } else {
            Err(io::ErrorKind::WouldBlock.into())
        }
    }
}

#[test]
fn a_device_whose_thread_did_not_start_works_at_the_next_attempt() {
    let dir = TempDir::new().unwrap();
    let guest = Guest::new();
    let spawner = Arc::new(Reluctant(AtomicBool::new(false)));
    let mut vsock = Vsock::new(options(&dir), spawner).unwrap();
    let queues = [guest.queue(0, 16), guest.queue(1, 16), guest.queue(2, 16)];
    let all = [&queues[0], &queues[1], &queues[2]];
    assert!(vsock.activate(guest.activation(&all)).is_err());
    assert!(vsock.deactivate().is_empty());
    vsock.reset();
    vsock.activate(guest.activation(&all)).unwrap();
    let mut stream = UnixStream::connect(dir.path().join("vsock")).unwrap();
    stream.write_all(b"CONNECT 5\n").unwrap();
    assert_eq!(queues[0].raw(&[(queues[0].buffers(), 64, true)]), 44);
    vsock.deactivate();
}
