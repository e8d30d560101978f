//! Peers that connect to a destination but are not a source.

use super::*;

#[test]
fn strangers_neither_end_the_wait_nor_make_the_source_wait() {
    let mut listener = Listener::bind("tcp:127.0.0.1:0", None).unwrap();
    // Whoever waited for a stranger would wait until the test ends.
    listener.silence = Duration::MAX;
    let port = listener.port().unwrap();
    let connect = || TcpStream::connect(("127.0.0.1", port)).unwrap();
    // Peers that send nothing, half of an offer's header, HTTP, another frame, close the
    // connection, or send an invalid offer.
    let silent = connect();
    let mut slow = connect();
    slow.write_all(&Header::of(Kind::Offer, 0, b"", true).encode()[..9])
        .unwrap();
    connect().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    connect()
        .write_all(&Header::of(Kind::Go, 0, b"", true).encode())
        .unwrap();
    drop(connect());
    let mut wrong = connect();
    wrong
        .write_all(&Header::of(Kind::Offer, 0, b"{}", true).encode())
        .unwrap();
    wrong.write_all(b"{}").unwrap();
    let received = thread::spawn(move || {
        let mut there = there();
        let progress = Progress::new(Direction::Incoming, "test");
        receive(&mut listener, &mut there, &progress).map(|()| there.state)
    });
    // The peer that was mistaken for a source is told why it is refused.
    let mut answer = Vec::new();
    wrong.read_to_end(&mut answer).unwrap_or_default();
    assert!(String::from_utf8_lossy(&answer).contains("does not parse"));
    let mut here = Here {
        memory: Some(Departing::unwatched(vec![region(0), region(1 << 32)])),
        ..here()
    };
    let progress = Progress::new(Direction::Outgoing, "test");
    let url = format!("tcp:127.0.0.1:{port}");
    let connection = Connection::connect(&url, None, &progress).unwrap();
    let outcome = Source::new(connection, &mut here, offer(), wishes(), progress, None).run();
    assert!(matches!(outcome, Outcome::Moved), "{outcome:?}");
    assert_eq!(received.join().unwrap().unwrap(), b"state");
    drop((silent, slow));
}

#[test]
fn too_many_strangers_end_the_wait() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let mut listener = Listener::bind(&format!("unix:{}", path.display()), None).unwrap();
    let strangers = thread::spawn(move || {
        for _ in 0..listener::MOST_STRANGERS {
            let mut stranger = UnixStream::connect(&path).unwrap();
            stranger.write_all(b"?").unwrap_or_default();
        }
    });
    let progress = Progress::new(Direction::Incoming, "test");
    let error = listener.accept(&progress).err().unwrap();
    strangers.join().unwrap();
    assert!(matches!(error, Error::Strangers { .. }), "{error}");
}
