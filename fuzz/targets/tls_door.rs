//! Clients of a port that is served by TLS: anything at all, or a client with a certificate whose
//! handshake was modified in transit, up to its hello.

#![no_main]

use std::{
    fs,
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{Arc, LazyLock},
    thread,
    time::{Duration, Instant},
};

use gantry_fuzz::{input::Input, scratch};
use libfuzzer_sys::fuzz_target;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use remoting_proto::{
    apis::{self, opencl::OpenCl},
    wire::hello::Hello,
};
use remoting_stream::{
    address::Host,
    channel::{Channel, Socket},
    tls::{Client, Keeper, Server},
};

const NAME: &str = "host";

/// The files of both sides.
struct Sides {
    server: Server,
    client: Client,
}

static SIDES: LazyLock<Sides> = LazyLock::new(|| {
    let write = |name: &str, text: String| -> PathBuf {
        let path = scratch::path(name);
        fs::write(&path, text).expect("there is room");
        path
    };
    let mut params = CertificateParams::new(Vec::<String>::new()).expect("no names");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().expect("there is randomness");
    let authority = CertifiedIssuer::self_signed(params, key).expect("it is sound");
    let certificate = |name: &str| {
        let params = CertificateParams::new(vec![name.to_owned()]).expect("it is a name");
        let key = KeyPair::generate().expect("there is randomness");
        let signed = params.signed_by(&key, &authority).expect("it is sound");
        let certificate = write(&format!("{name}.crt"), signed.pem());
        (
            certificate,
            write(&format!("{name}.key"), key.serialize_pem()),
        )
    };
    let ca = write("ca.crt", authority.pem());
    let (host, host_key) = certificate(NAME);
    let (guest, guest_key) = certificate("guest");
    let keeper = Keeper::open(&host_key, &host).expect("they are a pair");
    let schemes = keeper.schemes();
    // As in the pool: what a worker sends is checked before it is signed.
    let sign = move |scheme: u16, message: &[u8]| {
        let signature = keeper.sign(scheme, message);
        signature.ok_or_else(|| std::io::ErrorKind::PermissionDenied.into())
    };
    Sides {
        server: Server::open(&host, &ca, &schemes, Arc::new(sign)).expect("the files are sound"),
        client: Client {
            authority: ca,
            certificate: guest,
            key: guest_key,
        },
    }
});

/// Modifies what is sent.
fn change(flight: &mut Vec<u8>, input: &mut Input) {
    for _ in 0..input.u8() % 4 {
        let at = usize::from(input.u16()) % (flight.len() + 1);
        let len = usize::from(input.u8() % 17);
        let bytes = input.bytes(len);
        let end = flight.len().min(at + bytes.len());
        match input.u8() % 3 {
            0 => drop(flight.splice(at..end, bytes.iter().copied())),
            1 => drop(flight.splice(at..at, bytes.iter().copied())),
            _ => flight.truncate(at),
        }
    }
}

/// A client that is honest, except that its messages are modified in transit.
fn knock(mut stream: &UnixStream, input: &mut Input) -> std::io::Result<()> {
    if input.u8().is_multiple_of(4) {
        return stream.write_all(input.bytes(usize::MAX));
    }
    let host = Host {
        name: NAME.to_owned(),
        port: 1,
    };
    let mut tls = SIDES.client.connect(&host).expect("the files are sound");
    let hello = Hello::client::<OpenCl>().to_bytes();
    let mut said = false;
    loop {
        let mut flight = Vec::new();
        while tls.wants_write() {
            tls.write_tls(&mut flight)?;
        }
        change(&mut flight, input);
        stream.write_all(&flight)?;
        if said {
            return Ok(());
        }
        if !tls.is_handshaking() {
            let mut hello = hello.to_vec();
            change(&mut hello, input);
            tls.writer().write_all(&hello)?;
            said = true;
            continue;
        }
        if tls.read_tls(&mut stream)? == 0 || tls.process_new_packets().is_err() {
            return Ok(());
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let (here, there) = UnixStream::pair().expect("there are sockets");
    let until = Instant::now() + Duration::from_secs(10);
    thread::scope(|scope| {
        let door = scope.spawn(|| {
            let server = SIDES.server.accept().expect("it is configured");
            let Ok(channel) = Channel::secure(Socket::new(there.into()), server, until) else {
                return;
            };
            // Nobody gets this far without a certificate of the authority.
            assert!(channel.subject(&SIDES.server).is_some());
            let Ok(hello) = channel.receive_hello(until) else {
                return;
            };
            if Hello::check(&hello, &apis::ALL).is_err() {
                channel.refuse();
            }
        });
        let mut input = Input::new(bytes);
        // The connection is usually closed.
        let _ = knock(&here, &mut input);
        let _ = here.shutdown(Shutdown::Write);
        let mut rest = Vec::new();
        let _ = (&here).read_to_end(&mut rest);
        door.join().expect("it does not panic");
        assert!(Instant::now() < until, "the door waits for who has gone");
    });
});
