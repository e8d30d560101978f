//! What the two sides of a worker's control channel may say: whatever it is, it is a message, the end, or an
//! error, and a message that is sent again is the same. Behind the fingerprint, which no fuzzer guesses,
//! too.

#![no_main]

use std::{io::Write, net::Shutdown, os::unix::net::UnixStream, time::Duration};

use base::Patience;
use gantry_remoting::{
    link::control::{self, Command, Peer, Reply},
    wire::Wire,
};
use libfuzzer_sys::fuzz_target;

/// Whether bytes that are a message mean the same on the other side.
fn survives<M: Wire + PartialEq>(bytes: &[u8]) {
    let Ok(message) = M::from_bytes(bytes) else {
        return;
    };
    let (here, there) = UnixStream::pair().expect("there are sockets");
    // What is too long is not sent.
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
        who: "a worker",
    };
    let patience = Patience::within(Duration::from_secs(1));
    while worker.answer(&patience).is_ok() {}
});
