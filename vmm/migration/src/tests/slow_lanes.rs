//! Memory transfer on lanes whose speed is decided by a wire between both sides.

use std::{
    io,
    os::{fd::AsRawFd, unix::net::UnixListener},
    path::Path,
    sync::{Condvar, Mutex},
    time::Instant,
};

use base::Unpoisoned;

use super::{
    super::{connection::UNANSWERED, listener::Awaited},
    *,
};

/// Number of lanes.
const LANES: usize = 2;

/// Long enough for any machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Frames that have passed a wire.
#[derive(Default)]
struct Passed {
    /// Page frames on each lane.
    frames: [u32; LANES],
    /// Empty page frames on the first connection.
    alive: u32,
    /// Page frames with pages on the first connection.
    by_first: u32,
}

/// All connections of a source, and the frames that have passed.
#[derive(Default)]
struct Wire {
    passed: Mutex<Passed>,
    changed: Condvar,
    /// Cancelled at the first page frame on a lane; none of those passes.
    cancels: Option<Progress>,
}

impl Wire {
    /// Forwards frames of a source. A page frame on a lane passes when the first connection has sent another keepalive.
    fn pass(&self, connection: usize, mut from: UnixStream, mut to: UnixStream) -> io::Result<()> {
        loop {
            let mut head = [0; HEADER];
            from.read_exact(&mut head)?;
            let header = Header::decode(&head).unwrap();
            let mut contents = vec![0; header.length];
            from.read_exact(&mut contents)?;
            if header.kind == Kind::Pages && !self.count(connection, &contents)? {
                return io::copy(&mut from, &mut io::sink()).map(drop);
            }
            to.write_all(&head)?;
            to.write_all(&contents)?;
        }
    }

    /// Counts a frame; returns whether it passes.
    fn count(&self, connection: usize, contents: &[u8]) -> io::Result<bool> {
        let mut passed = self.passed.lock_unpoisoned();
        match connection.checked_sub(1) {
            None if contents == [0; 4] => passed.alive += 1,
            None => passed.by_first += 1,
            Some(_) if let Some(destination) = &self.cancels => {
                destination.cancel();
                return Ok(false);
            }
            Some(lane) => {
                let before = passed.alive;
                let waits = |passed: &mut Passed| passed.alive == before;
                let waited = self.changed.wait_timeout_while(passed, PATIENCE, waits);
                let (now, late) = waited.unwrap();
                if late.timed_out() {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                passed = now;
                passed.frames[lane] += 1;
            }
        }
        self.changed.notify_all();
        Ok(true)
    }

    /// Serves at a path until all expected connections have been made.
    fn serve(self: &Arc<Self>, at: &Path, to: &Path) {
        let (listener, to) = (UnixListener::bind(at).unwrap(), to.to_owned());
        let wire = Arc::clone(self);
        thread::spawn(move || {
            for number in 0..=LANES {
                let (source, _) = listener.accept().unwrap();
                let destination = UnixStream::connect(&to).unwrap();
                let clone = |stream: &UnixStream| stream.try_clone().unwrap();
                let (mut from, mut back) = (clone(&destination), clone(&source));
                thread::spawn(move || {
                    let _ = io::copy(&mut from, &mut back);
                    let _ = back.shutdown(Shutdown::Both);
                });
                let wire = Arc::clone(&wire);
                thread::spawn(move || {
                    let (from, to) = (clone(&source), clone(&destination));
                    let _ = wire.pass(number, source, destination);
                    // What the destination has said is still on its way back.
                    let _ = from.shutdown(Shutdown::Read);
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        });
    }
}

/// A migration whose source reaches the destination through a wire.
struct Moved {
    outcome: Outcome,
    received: std::result::Result<Vec<Arc<Mapping>>, Ended>,
    originals: Vec<Arc<Mapping>>,
}

/// Transfers memory without zero pages: more frames than the source queues, so the source waits for room, and then for
/// the end of the round.
fn by(wire: &Arc<Wire>, incoming: Progress) -> Moved {
    let dir = tempfile::tempdir().unwrap();
    let [path, wire_path] = ["socket", "wire"].map(|name| dir.path().join(name));
    let mut listener = Listener::bind(&format!("unix:{}", path.display()), None).unwrap();
    wire.serve(&wire_path, &path);
    let received = thread::spawn(move || {
        let mut there = there();
        receive(&mut listener, &mut there, &incoming).map(|()| there.regions)
    });
    let regions = [region(0), region(1 << 32)];
    for region in &regions {
        bytes(region).fill(7);
    }
    let originals: Vec<_> = regions.iter().map(|r| Arc::clone(&r.mapping)).collect();
    let mut here = Here {
        memory: Some(Departing::unwatched(regions.into())),
        ..here()
    };
    let progress = Progress::new(Direction::Outgoing, "test");
    let url = format!("unix:{}", wire_path.display());
    let mut connection = Connection::connect(&url, None, &progress).unwrap();
    connection.quiet = Duration::from_millis(20);
    let offer = Offer {
        lanes: LANES as u32,
        ..offer()
    };
    let wishes = Wishes {
        to: (url, None),
        ..wishes()
    };
    let outcome = Source::new(connection, &mut here, offer, wishes, progress, None).run();
    let received = received.join().unwrap();
    Moved {
        outcome,
        received,
        originals,
    }
}

#[test]
fn a_source_says_that_it_is_there_however_slow_its_further_connections_are() {
    let wire = Arc::new(Wire::default());
    let moved = by(&wire, Progress::new(Direction::Incoming, "test"));
    assert!(
        matches!(moved.outcome, Outcome::Moved),
        "{:?}",
        moved.outcome
    );
    assert!(are_equal(&moved.originals, &moved.received.unwrap()));
    let passed = wire.passed.lock_unpoisoned();
    assert!(
        passed.frames.iter().all(|frames| *frames > 0) && passed.by_first == 0,
        "{:?}, and {} by the first one",
        passed.frames,
        passed.by_first
    );
}

#[test]
fn a_source_is_answered_while_a_round_goes_on_by_one_connection_too() {
    const FRAMES: usize = 2 * SIZE / frame::MAX_PAGES;
    let (here, there) = UnixStream::pair().unwrap();
    let arrives = there.try_clone().unwrap();
    let progress = Progress::new(Direction::Outgoing, "test");
    let [mut here, mut other] =
        [here, there].map(|end| Connection::of_unix(end, progress.clone()).unwrap());
    let regions = [region(0), region(1 << 32)];
    for region in &regions {
        bytes(region).fill(7);
    }
    let mut memory = Departing::unwatched(regions.into());
    let sending = thread::spawn(move || memory.send_round(0, &mut here, &progress));
    let comes = |patience| {
        let mut entry = [libc::pollfd {
            fd: arrives.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }];
        base::poll::poll(&mut entry, Some(patience)).unwrap() > 0
    };
    let (mut frames, mut barriers, mut answered) = (0, 0, 0);
    // One per frame, and one at the end.
    while answered < FRAMES + 1 {
        // Nothing is acknowledged as long as data arrives.
        while comes(Duration::from_millis(200)) {
            let came = other.receive(&[Kind::Pages, Kind::Barrier], &mut Vec::new());
            match came.unwrap().kind {
                Kind::Pages => frames += 1,
                _ => barriers += 1,
            }
            assert!(frames <= answered + UNANSWERED, "{frames} after {answered}");
        }
        while answered < barriers {
            other.send(Kind::Barrier, 0, &[]).unwrap();
            answered += 1;
        }
    }
    assert_eq!(sending.join().unwrap().unwrap(), 2 * SIZE as u64);
}

#[test]
fn a_destination_that_gives_up_while_memory_comes_tells_the_source_why() {
    let incoming = Progress::new(Direction::Incoming, "test");
    let wire = Arc::new(Wire {
        cancels: Some(incoming.clone()),
        ..Wire::default()
    });
    let moved = by(&wire, incoming);
    let Outcome::Stayed(error) = moved.outcome else {
        panic!("it has moved");
    };
    assert!(matches!(error, Error::Refused(_)), "{error:?}");
    assert!(error.to_string().contains("was cancelled"), "{error}");
    assert!(moved.received.is_err());
}

#[test]
fn who_sends_no_token_does_not_keep_a_further_connection_waiting() {
    /// As many as are examined at once, besides the awaited one.
    const HALF: usize = 15;
    let mut listener = Listener::bind("tcp:127.0.0.1:0", None).unwrap();
    let port = listener.port().unwrap();
    let progress = Progress::new(Direction::Incoming, "test");
    let (first, source) = applications::pair();
    let token = [7; lanes::TOKEN];
    let head = Header::of(Kind::Join, 0, &token, true).encode();
    let connect = |contents: &[u8]| {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.write_all(&head).unwrap();
        stream.write_all(contents).unwrap();
        stream
    };
    let half: Vec<_> = (0..HALF).map(|at| connect(&token[..at])).collect();
    let mut whole = connect(&token);
    let patience = lanes::patience(0);
    let awaited = Awaited {
        token,
        patience,
        end: Instant::now() + patience,
        source: first.other_side().unwrap(),
    };
    listener.accept_lane(&awaited, &progress).unwrap();
    let mut answer = [0; HEADER];
    whole.read_exact(&mut answer).unwrap();
    assert_eq!(Header::decode(&answer).unwrap().kind, Kind::Join);
    drop((half, source));
}
