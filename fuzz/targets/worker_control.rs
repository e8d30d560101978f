//! What both sides of a worker's control channel may send. It is always a message, the end of the
//! channel, or an error, and a message that is sent again stays the same. This also covers what
//! follows the fingerprint, which no fuzzer guesses.

#![no_main]

use std::{io::Write, net::Shutdown, os::unix::net::UnixStream, time::Duration};

use base::Patience;
use libfuzzer_sys::fuzz_target;
use remoting_proto::wire::Wire;
use remoting_transport::control::{self, Command, Peer, Reply, Worker};

/// Checks that bytes that form a message mean the same on the other side.
fn survives<M: Wire + PartialEq>(bytes: &[u8]) {
    let Ok(message) = M::from_bytes(bytes) else {
        return;
    };
    let (here, there) = UnixStream::pair().expect("there are sockets");
    // Messages that are too long are not sent.
    if control::send(&here, &message, &[]).is_ok() {
        let received = control::receive::<M>(&there).expect("it was sent whole");
        assert!(received.is_some_and(|(received, files)| received == message && files.is_empty()));
    }
}

fuzz_target!(|bytes: &[u8]| {
    survives::<Command>(bytes);
    survives::<Reply>(bytes);
    let (mut here, there) = UnixStream::pair().expect("there are sockets");
    here.write_all(bytes.get(..4096).unwrap_or(bytes))
        .and_then(|()| here.shutdown(Shutdown::Write))
        .expect("there is room");
    let worker = Peer {
        channel: &there,
        who: Worker::Serving,
    };
    let patience = Patience::within(Duration::from_secs(1));
    while worker.answer(&patience).is_ok() {}
});
