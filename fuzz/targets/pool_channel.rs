//! What a worker may send to its pool: a message of any type, with files or without. The pool signs
//! what a server signs in a TLS handshake, and nothing else.

#![no_main]

use std::{
    fs,
    os::{fd::AsFd, unix::net::UnixStream},
    sync::LazyLock,
};

use gantry_fuzz::{input::Input, scratch};
use libfuzzer_sys::fuzz_target;
use rcgen::{CertificateParams, KeyPair};
use remoting_pool::stream::{LONGEST, Said};
use remoting_stream::tls::Keeper;
use remoting_transport::socket;

static KEEPER: LazyLock<Keeper> = LazyLock::new(|| {
    let params = CertificateParams::new(vec!["host".to_owned()]).expect("it is a name");
    let key = KeyPair::generate().expect("there is randomness");
    let certificate = params.self_signed(&key).expect("it is sound");
    let (crt, pem) = (scratch::path("crt"), scratch::path("key"));
    fs::write(&crt, certificate.pem()).expect("there is room");
    fs::write(&pem, key.serialize_pem()).expect("there is room");
    Keeper::open(&pem, &crt).expect("they are a pair")
});

/// What precedes the transcript hash that a server signs (RFC 8446, 4.4.3).
fn context() -> Vec<u8> {
    let mut context = vec![b' '; 64];
    context.extend(b"TLS 1.3, server CertificateVerify\0");
    context
}

fuzz_target!(|bytes: &[u8]| {
    let (here, there) = UnixStream::pair().expect("there are sockets");
    let mut input = Input::new(bytes);
    while !input.is_empty() {
        let (kind, scheme) = (input.u8(), input.u16());
        let mut said = vec![kind % 8];
        if kind & 0x80 != 0 {
            said.extend(scheme.to_le_bytes());
            said.extend(context());
        }
        let length = usize::from(input.u8());
        said.extend_from_slice(input.bytes(length));
        let files = vec![here.as_fd(); usize::from(kind >> 3 & 3)];
        socket::send(&here, &said, &files).expect("there is room");
        let mut message = [0; LONGEST];
        let (count, files) = socket::receive(&there, &mut message).expect("it was sent");
        match Said::of(&message[..count], files.len()) {
            Some(Said::Sign(request)) => {
                let answer = Said::answer(Some(&KEEPER), request);
                assert!(answer.len() <= 2 * LONGEST);
                let signed = answer.first() == Some(&1);
                let rest = request.get(2..).unwrap_or_default();
                assert!(!signed || rest.starts_with(&context()), "{request:?}");
            }
            // It becomes part of a file name.
            Some(Said::Owned(unit)) => {
                assert!(!unit.contains(['/', '\0']) && !unit.starts_with('.') && !unit.is_empty());
            }
            Some(Said::Taken) => assert_eq!(files.len(), 1),
            Some(Said::Serves(_, attachment)) => assert!(attachment.len() < count),
            Some(Said::Threads | Said::Failed(_)) | None => {}
        }
    }
});
