//! Contents of applications that follow their machine.

use std::{
    io::Read,
    os::fd::{AsFd, BorrowedFd},
};

use base::Patience;
use devices::accel::left::{Application, Asking, Failure, Fetch, Followed};
use remoting_transport::control::{Command, LONG, Peer, Worker};

use super::{
    super::postcopy::{self, Said},
    applications::pair,
    *,
};

/// Size of an object in bytes.
const BYTES: u64 = 1 << 20;

fn application(slice: u32) -> Application {
    Application {
        port: "a".to_owned(),
        slice,
    }
}

/// The requesting workers of `count` applications, and the source's end of the connection.
fn asking(count: u32) -> (Vec<UnixStream>, Connection) {
    asking_counted(count, &Followed::default())
}

/// The same, with a counter of received contents.
fn asking_counted(count: u32, followed: &Followed) -> (Vec<UnixStream>, Connection) {
    let (here, there) = pair();
    let mut workers = Vec::new();
    let mut all = Vec::new();
    for slice in 0..count {
        let (asked, asks) = UnixStream::pair().unwrap();
        workers.push(asks);
        all.push(Asking {
            of: application(slice),
            socket: asked,
            followed: Followed::clone(followed),
        });
    }
    postcopy::relay(there, all, &mut |body| {
        thread::spawn(body);
        Ok(())
    });
    (workers, here)
}

/// A worker's request for contents, to be written to this file.
fn ask(worker: &UnixStream, mem: u32, to: BorrowedFd<'_>) -> std::result::Result<(), Failure> {
    let source = Peer {
        channel: worker,
        who: Worker::Left,
    };
    let what = Fetch {
        mem,
        bytes: BYTES,
        left: 2 * BYTES,
    };
    source.ask(&Command::Fetch(what), &[to], &Patience::within(LONG))?;
    Ok(())
}

/// Replies to the next request.
fn answer(source: &mut Connection, saved: std::result::Result<File, String>) -> Said {
    let said = postcopy::hear(source, &mut Vec::new()).unwrap();
    if let Said::Asks(asked) = &said {
        let progress = Progress::new(Direction::Outgoing, "test");
        postcopy::answer(source, asked, saved, &progress).unwrap();
    }
    said
}

fn contents(text: &[u8], length: u64) -> File {
    let file = image().unwrap();
    file.write_all_at(text, 70 << 10).unwrap();
    file.set_len(length).unwrap();
    file
}

/// More than an object's contents can be.
fn long() -> File {
    let long = contents(b"more", 1 << 30);
    for at in 0..64 {
        long.write_all_at(b"more", at << 20).unwrap();
    }
    long
}

#[test]
fn workers_get_what_they_ask_for_and_the_source_hears_who_has_all() {
    let followed = Followed::default();
    let (workers, mut source) = asking_counted(2, &followed);
    for (slice, worker) in (0..).zip(&workers) {
        let file = image().unwrap();
        let said = thread::scope(|scope| {
            let asked = scope.spawn(|| ask(worker, 7, file.as_fd()));
            let said = answer(&mut source, Ok(contents(b"what was there", BYTES)));
            asked.join().unwrap().unwrap();
            said
        });
        let Said::Asks(asked) = said else {
            panic!("{said:?}");
        };
        assert_eq!((asked.of, asked.mem), (application(slice), 7));
        assert_eq!((asked.bytes, asked.left), (BYTES, 2 * BYTES));
        let mut came = [0; 14];
        file.read_exact_at(&mut came, 70 << 10).unwrap();
        assert_eq!(&came, b"what was there");
        assert_eq!(file.metadata().unwrap().len(), BYTES);
        assert_eq!(followed.load(Ordering::Relaxed), u64::from(slice) + 1);
    }
    drop(workers);
    let mut drained = [0, 1].map(|_| match answer(&mut source, Err(String::new())) {
        Said::Drained(of) => of.slice,
        Said::Asks(asked) => panic!("{asked:?}"),
    });
    drained.sort_unstable();
    assert_eq!(drained, [0, 1]);
    let ended = postcopy::hear(&mut source, &mut Vec::new());
    assert!(matches!(ended, Err(Error::Broken { .. })), "{ended:?}");
}

#[test]
fn what_is_lost_or_too_long_or_has_no_place_costs_nothing_of_what_comes_next() {
    let (workers, mut source) = asking(1);
    let worker = &workers[0];
    let (mut pipe, no_place) = std::io::pipe().unwrap();
    let file = image().unwrap();
    let cases = [
        (file.as_fd(), Err("\u{7}killed".to_owned()), "killed"),
        (file.as_fd(), Ok(long()), "more contents than"),
        (no_place.as_fd(), Ok(contents(b"x", BYTES)), "cannot keep"),
    ];
    for (to, saved, why) in cases {
        let refused = thread::scope(|scope| {
            let asked = scope.spawn(|| ask(worker, 1, to));
            answer(&mut source, saved);
            asked.join().unwrap().unwrap_err().to_string()
        });
        assert!(refused.contains(why), "{refused}");
        assert!(!refused.contains('\u{7}'), "{refused}");
    }
    drop(no_place);
    let file = image().unwrap();
    thread::scope(|scope| {
        let asked = scope.spawn(|| ask(worker, 2, file.as_fd()));
        answer(&mut source, Ok(contents(b"came", BYTES)));
        asked.join().unwrap().unwrap();
    });
    // A file is kept until the next one comes.
    assert_eq!(pipe.read(&mut [0]).unwrap(), 0);
}

#[test]
fn a_source_that_ends_or_talks_nonsense_costs_all_that_has_not_come() {
    for nonsense in ["", "words", "bytes"] {
        let (workers, mut source) = asking(2);
        let file = image().unwrap();
        let mut source = thread::scope(|scope| {
            let asked = scope.spawn(|| ask(&workers[0], 1, file.as_fd()));
            postcopy::hear(&mut source, &mut Vec::new()).unwrap();
            let source = match nonsense {
                "words" => {
                    source.send(Kind::Fetched, 0, b"nonsense").unwrap();
                    Some(source)
                }
                "bytes" => {
                    // Nothing receives them in the end, so sending fails.
                    let progress = Progress::new(Direction::Outgoing, "test");
                    let _ = archive::send(&long(), &mut source, &progress);
                    Some(source)
                }
                _ => {
                    drop(source);
                    None
                }
            };
            asked.join().unwrap().unwrap_err();
            source
        });
        // Later requests get the same error, even if the connection still exists.
        for worker in &workers {
            let refused = ask(worker, 2, file.as_fd()).unwrap_err();
            assert!(matches!(refused, Failure::Refused(_)), "{refused:?}");
        }
        drop(workers);
        if let Some(source) = &mut source {
            assert!(postcopy::hear(source, &mut Vec::new()).is_err());
        }
    }
}

#[test]
fn empty_frames_of_contents_that_have_no_place_have_an_end() {
    let (workers, mut source) = asking(1);
    let (_pipe, no_place) = std::io::pipe().unwrap();
    let refused = thread::scope(|scope| {
        let asked = scope.spawn(|| ask(&workers[0], 1, no_place.as_fd()));
        postcopy::hear(&mut source, &mut Vec::new()).unwrap();
        let mut first = 0_u64.to_le_bytes().to_vec();
        first.push(1);
        source.send(Kind::Archive, 0, &first).unwrap();
        for _ in 0..100 {
            source.send(Kind::Archive, 0, &[]).unwrap();
        }
        source.send(Kind::Fetched, 0, br#"{"Came":9}"#).unwrap();
        asked.join().unwrap().unwrap_err().to_string()
    });
    assert!(refused.contains("more contents than"), "{refused}");
}
