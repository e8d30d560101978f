use std::{
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::PathBuf,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use remoting_proto::{
    apis::opencl::{
        OpenCl,
        calls::{self, Call, MemId, Order, QueueId, ReadBuffer, StageId, WindowRange, WriteBuffer},
    },
    wire::{
        Flags, Header, Wire,
        hello::{self, Hello},
    },
};
use remoting_transport::{
    bell::Futex,
    endpoint::{Receiver, Sender},
    mapping,
    ring::{Consumer, Producer},
    window::{self, Slice, Window},
};

use super::{
    address::Host,
    bridge::{Bridge, Ended},
    channel::{Channel, Socket},
    frame::{CHUNK, DATA},
    tls::{Client, Keeper, Server},
};

const BELL: Futex = Futex {
    patience: Duration::from_millis(20),
};
const RING: u64 = 1 << 16;
const LONG: Duration = Duration::from_secs(20);

fn soon() -> Instant {
    Instant::now() + LONG
}

fn sockets() -> (Socket, Socket) {
    let (here, there) = UnixStream::pair().unwrap();
    (
        Socket::new(OwnedFd::from(here)),
        Socket::new(OwnedFd::from(there)),
    )
}

/// An authority, and what it has signed, as files.
struct Keys {
    folder: PathBuf,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Drop for Keys {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Keys {
    fn new(name: &str) -> Self {
        let name = format!("gantry-tls-{}-{name}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let keys = Self { folder, issuer };
        keys.write("ca.pem", &keys.issuer.pem());
        for name in ["localhost", "guest"] {
            let key = KeyPair::generate().unwrap();
            let params = CertificateParams::new([name.to_owned()]).unwrap();
            let certificate = params.signed_by(&key, &keys.issuer).unwrap();
            keys.write(&format!("{name}.pem"), &certificate.pem());
            keys.write(&format!("{name}.key"), &key.serialize_pem());
        }
        keys
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.file(name), text).unwrap();
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn keeper(&self) -> Keeper {
        Keeper::open(&self.file("localhost.key"), &self.file("localhost.pem")).unwrap()
    }

    fn server(&self) -> Server {
        let keeper = self.keeper();
        let schemes = keeper.schemes();
        let ask = move |scheme, message: &[u8]| {
            let refused = || std::io::ErrorKind::PermissionDenied.into();
            keeper.sign(scheme, message).ok_or_else(refused)
        };
        let (certificate, authority) = (self.file("localhost.pem"), self.file("ca.pem"));
        Server::open(&certificate, &authority, &schemes, Arc::new(ask)).unwrap()
    }

    fn client(&self) -> Client {
        Client {
            authority: self.file("ca.pem"),
            certificate: self.file("guest.pem"),
            key: self.file("guest.key"),
        }
    }
}

fn localhost() -> Host {
    Host {
        name: "localhost".to_owned(),
        port: 1,
    }
}

type Hellos = [std::io::Result<[u8; hello::SIZE]>; 2];

/// Has two sides say hello by TLS: what the client and the server get.
fn hellos(server: Server, client: &Client) -> Hellos {
    let (here, there) = sockets();
    let session = client.connect(&localhost()).unwrap();
    let bytes = Hello::client::<OpenCl>().to_bytes();
    let exchange = move |socket, session, until| {
        let channel = Channel::secure(socket, session, until)?;
        channel.send_hello(&bytes, until)?;
        channel.receive_hello(until)
    };
    let serving = thread::spawn(move || exchange(there, server.accept().unwrap(), soon()));
    let theirs = exchange(here, session, soon());
    [theirs, serving.join().unwrap()]
}

fn text(outcome: &std::io::Result<[u8; hello::SIZE]>) -> String {
    outcome.as_ref().unwrap_err().to_string()
}

#[test]
fn two_sides_with_certificates_of_one_authority_come_to_terms() {
    let keys = Keys::new("terms");
    let both = hellos(keys.server(), &keys.client());
    for hello in both {
        assert!(Hello::check_for::<OpenCl>(&hello.unwrap()).is_ok());
    }
}

#[test]
fn a_certificate_of_another_authority_is_refused_on_either_side() {
    let (keys, others) = (Keys::new("one"), Keys::new("other"));
    let stranger = Client {
        authority: keys.file("ca.pem"),
        ..others.client()
    };
    let [told, refused] = hellos(keys.server(), &stranger);
    // Authorities of one name are told apart by their keys.
    let why = "invalid peer certificate";
    assert!(text(&refused).contains(why), "{refused:?}");
    assert!(text(&told).contains("alert"), "{told:?}");
    let [refused, told] = hellos(others.server(), &keys.client());
    assert!(text(&refused).contains(why), "{refused:?}");
    assert!(told.is_err());
}

#[test]
fn a_host_of_another_name_is_refused() {
    let keys = Keys::new("name");
    let (here, there) = sockets();
    let server = keys.server();
    let serving = thread::spawn(move || Channel::secure(there, server.accept().unwrap(), soon()));
    let host = Host {
        name: "elsewhere".to_owned(),
        port: 1,
    };
    let session = keys.client().connect(&host).unwrap();
    let refused = Channel::secure(here, session, soon()).unwrap_err();
    assert!(
        refused.to_string().contains("not valid for name"),
        "{refused}"
    );
    assert!(serving.join().unwrap().is_err());
}

#[test]
fn who_says_nothing_or_little_is_not_waited_for() {
    let keys = Keys::new("silent");
    for bytes in [&b""[..], b"\x16\x03\x01\x02\x00\x01"] {
        let (here, there) = UnixStream::pair().unwrap();
        std::io::Write::write_all(&mut &here, bytes).unwrap();
        let until = Instant::now() + Duration::from_millis(50);
        let socket = Socket::new(there.into());
        let outcome = Channel::secure(socket, keys.server().accept().unwrap(), until);
        assert_eq!(outcome.unwrap_err().kind(), std::io::ErrorKind::TimedOut);
    }
    let (_here, there) = sockets();
    let until = Instant::now() + Duration::from_millis(50);
    let outcome = Channel::plain(there).receive_hello(until);
    assert_eq!(outcome.unwrap_err().kind(), std::io::ErrorKind::TimedOut);
}

#[test]
fn the_keeper_signs_handshakes_and_nothing_else() {
    let keys = Keys::new("keeper");
    let keeper = keys.keeper();
    let scheme = keeper.schemes()[0];
    let message = |context: &[u8]| [&[b' '; 64], context, b"\0", &[7; 32]].concat();
    let sign = |message: &[u8]| keeper.sign(scheme, message);
    assert!(sign(&message(b"TLS 1.3, server CertificateVerify")).is_some());
    assert!(sign(&message(b"TLS 1.3, client CertificateVerify")).is_none());
    assert!(sign(b"a letter").is_none());
    assert!(sign(&[b' '; 500]).is_none());
    assert!(Keeper::open(&keys.file("guest.key"), &keys.file("localhost.pem")).is_err());
}

/// One side of a bridge, and the threads that make it.
struct Side {
    window: Arc<Window>,
    sender: Sender<Slice, Futex>,
    receiver: Receiver<Slice, Futex>,
    threads: Vec<JoinHandle<Ended>>,
}

impl Side {
    fn new(channel: Channel, client: bool) -> Self {
        let size = window::SMALLEST;
        let window = Window::map(&mapping::create(size).unwrap(), size, RING).unwrap();
        let (bridge, out, back) = if client {
            let (nudge, _) = UnixStream::pair().unwrap();
            let bridge = Bridge::<OpenCl>::client(&window, channel.split(), nudge);
            (bridge, window.calls(), window.answers())
        } else {
            let bridge = Bridge::<OpenCl>::worker(&window, channel.split());
            (bridge, window.answers(), window.calls())
        };
        let Bridge { outward, inward } = bridge;
        Self {
            window,
            sender: Sender::new(Producer::new(out, BELL), Duration::ZERO),
            receiver: Receiver::new(Consumer::new(back, BELL)),
            threads: vec![
                thread::spawn(move || outward.run()),
                thread::spawn(move || inward.run()),
            ],
        }
    }

    fn send(&mut self, opcode: u16, body: &[u8]) {
        let header = Header {
            length: 0,
            opcode,
            flags: Flags::default(),
            sequence: 0,
        };
        self.sender.send(header, body, || true).unwrap();
    }

    fn call<C: Call>(&mut self, call: &C) {
        let mut body = Vec::new();
        call.put(&mut body);
        self.send(C::OPCODE, &body);
    }

    fn receive(&mut self) -> (u16, Vec<u8>) {
        let mut body = Vec::new();
        let until = soon();
        loop {
            if let Some(header) = self.receiver.poll(&mut body).unwrap() {
                return (header.opcode, body);
            }
            assert!(Instant::now() < until, "nothing came");
            self.receiver.sleep(|| false);
        }
    }

    fn bytes(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let from = self.window.at(offset, length as u64).unwrap();
        // SAFETY: the window has these bytes.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), length) };
        bytes
    }

    fn fill(&self, offset: u64, bytes: &[u8]) {
        let to = self.window.at(offset, bytes.len() as u64).unwrap();
        // SAFETY: the window has room for these bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    fn end(self) -> Vec<Ended> {
        let ends = self
            .threads
            .into_iter()
            .map(|thread| thread.join().unwrap());
        ends.collect()
    }
}

fn bytes(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|index| (index / 7) as u8 ^ seed).collect()
}

fn order() -> Order {
    Order {
        queue: QueueId(0),
        wait: Vec::new(),
        event: None,
    }
}

/// Calls go there with what they write, and what is read comes back with the stage's release.
fn exchange(client: Channel, worker: Channel) {
    let (mut client, mut worker) = (Side::new(client, true), Side::new(worker, false));
    let at = client.window.data();
    // More than a chunk, and than a batch, and not a multiple of either.
    let length = 5 * CHUNK + 77;
    let place = |offset, stage| WindowRange {
        offset,
        length: length as u64,
        stage: Some(StageId(stage)),
    };
    let written = bytes(length, 3);
    client.fill(at, &written);
    let from = place(at, 1);
    let (order, mem, offset) = (order(), MemId(0), 0);
    let write = WriteBuffer {
        order: order.clone(),
        mem,
        offset,
        from,
    };
    client.call(&write);
    assert_eq!(worker.receive().0, WriteBuffer::OPCODE);
    assert!(worker.bytes(at, length) == written);

    let at = at + (1 << 20);
    let to = place(at, 2);
    client.call(&ReadBuffer {
        order,
        mem,
        offset,
        to,
    });
    assert_eq!(worker.receive().0, ReadBuffer::OPCODE);
    let read = bytes(length, 9);
    worker.fill(at, &read);
    let mut released = Vec::new();
    (StageId(2), 1u8).put(&mut released);
    worker.send(calls::RELEASED, &released);
    assert_eq!(client.receive(), (calls::RELEASED, released));
    assert!(client.bytes(at, length) == read);
    // What has no stage by this name brings nothing.
    worker.send(calls::ANSWER, &bytes(3 * RING as usize, 1));
    assert!(client.receive().1 == bytes(3 * RING as usize, 1));
}

#[test]
fn data_goes_with_calls_and_comes_with_releases() {
    let (here, there) = sockets();
    exchange(Channel::plain(here), Channel::plain(there));
}

#[test]
fn by_tls_as_well() {
    let keys = Keys::new("data");
    let (here, there) = sockets();
    let server = keys.server();
    let serving = thread::spawn(move || Channel::secure(there, server.accept().unwrap(), soon()));
    let session = keys.client().connect(&localhost()).unwrap();
    let client = Channel::secure(here, session, soon()).unwrap();
    exchange(client, serving.join().unwrap().unwrap());
}

#[test]
fn when_the_connection_ends_both_directions_do() {
    let (here, there) = sockets();
    let side = Side::new(Channel::plain(here), true);
    drop(there);
    side.end();
}

/// What a worker makes of these bytes of a client.
fn hostile(bytes: &[u8]) -> Ended {
    let (here, there) = UnixStream::pair().unwrap();
    std::io::Write::write_all(&mut &here, bytes).unwrap();
    let worker = Side::new(Channel::plain(Socket::new(there.into())), false);
    let ends = worker.end();
    ends.into_iter().next_back().unwrap()
}

#[test]
fn data_for_places_outside_of_the_windows_data_ends_the_connection() {
    // The rings, the end of the window, and nowhere.
    for offset in [0, window::SMALLEST - 4, u64::MAX - 4] {
        let header = Header {
            length: 8,
            opcode: DATA,
            flags: Flags::default(),
            sequence: offset,
        };
        let ended = hostile(&[&header.to_bytes()[..], &[1; 8]].concat());
        assert!(matches!(ended, Ended::Outside { .. }), "{ended}");
    }
}

#[test]
fn a_frame_that_no_ring_has_room_for_ends_the_connection() {
    let header = Header {
        length: RING as u32,
        opcode: calls::Flush::OPCODE,
        flags: Flags::default(),
        sequence: 1,
    };
    let ended = hostile(&[&header.to_bytes()[..], &[0; RING as usize]].concat());
    assert!(matches!(ended, Ended::Gone(_)), "{ended}");
}
