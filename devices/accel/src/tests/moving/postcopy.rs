//! Applications that continue before their contents have arrived.

use std::sync::atomic::Ordering;

use remoting_transport::control::{Failure, Fetch, Peer, Worker};

use super::{super::super::left::Application, *};

const WHAT: Fetch = Fetch {
    mem: 7,
    bytes: 1 << 20,
    left: 3 << 20,
};

/// Acts as a worker that leaves, and keeps contents.
fn leaves(old: &UnixStream) {
    does_not_precopy(old);
    saves_rest_by(old, 0, true, b"state");
    assert_eq!(next(old).0, Ask::Leave());
    done(old);
}

/// Acts as a worker that continues without contents; returns the socket on which it requests them.
fn goes_on(new: &UnixStream) -> UnixStream {
    done(new);
    assert_eq!(restores(new), b"state");
    done(new);
    let (command, socket) = next(new);
    assert_eq!(command, Ask::Go());
    UnixStream::from(socket.unwrap())
}

/// Requests contents and returns them.
fn fetch(socket: &UnixStream) -> Result<Vec<u8>, Failure> {
    let source = Peer {
        channel: socket,
        who: Worker::Left,
    };
    let file = control::image().unwrap();
    let patience = Patience::within(LONG);
    source.ask(&Ask::Fetch(WHAT), &[file.as_fd()], &patience)?;
    let mut came = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut came, 0).unwrap();
    Ok(came)
}

#[test]
fn an_application_goes_on_while_its_contents_follow_and_its_old_worker_ends_when_all_have() {
    let (rig, other) = (rig(), other());
    let old = rig.open(1);
    let moved = rig.start_move_by(None, &other.path, Cancel::default(), true);
    let old = thread::spawn(move || {
        leaves(&old);
        for part in [&b"first"[..], b"second"] {
            let (command, file) = next(&old);
            assert_eq!(command, Ask::Fetch(WHAT));
            File::from(file.unwrap()).write_all_at(part, 0).unwrap();
            done(&old);
        }
        ends(&old);
    });
    let (new, _) = taken_up(&other.pool);
    let socket = goes_on(&new);
    assert_eq!(fetch(&socket).unwrap(), b"first");
    assert!(moved.try_recv().is_err());
    // It already belongs to the port again.
    rig.eventually(|| rig.lendable() == 1);
    assert_eq!(fetch(&socket).unwrap(), b"second");
    let counters = rig.function.lock().unwrap().counters();
    assert!(counters.contains(&("contents_followed", 2)), "{counters:?}");
    drop(socket);
    let moved = moved.recv().unwrap();
    assert_eq!((moved.slices, moved.reasons), (vec![1], Vec::new()));
    old.join().unwrap();
    assert_eq!(rig.state(1), State::Open);
}

#[test]
fn an_old_worker_that_is_killed_before_costs_contents_which_is_said() {
    let (rig, other) = (rig(), other());
    let old = rig.open(2);
    let moved = rig.start_move_by(Some(2), &other.path, Cancel::default(), true);
    let old = thread::spawn(move || leaves(&old));
    let (new, _) = taken_up(&other.pool);
    let socket = goes_on(&new);
    old.join().unwrap();
    for _ in 0..2 {
        let refused = fetch(&socket).unwrap_err();
        assert!(matches!(refused, Failure::Refused(_)), "{refused:?}");
    }
    drop(socket);
    let moved = moved.recv().unwrap();
    assert_eq!(moved.slices, [2]);
    let [reason] = &moved.reasons[..] else {
        panic!("{moved:?}");
    };
    assert!(
        reason.contains("slice 2 has moved, and has lost"),
        "{reason}"
    );
    assert_eq!(rig.state(2), State::Open);
}

#[test]
fn a_slice_that_is_closed_while_contents_follow_is_free_at_once_and_both_workers_end() {
    let (rig, other) = (rig(), other());
    let old = rig.open(0);
    let moved = rig.start_move_by(None, &other.path, Cancel::default(), true);
    let old = thread::spawn(move || {
        leaves(&old);
        ends(&old);
    });
    let (new, _) = taken_up(&other.pool);
    let socket = goes_on(&new);
    rig.eventually(|| rig.lendable() == 1);
    rig.command(0, Command::Close);
    ends(&new);
    drop((new, socket));
    old.join().unwrap();
    assert!(moved.recv().unwrap().reasons.is_empty());
    rig.becomes(0, State::Free);
}

#[test]
fn an_application_whose_worker_ends_before_it_has_left_is_lost_if_that_kept_contents() {
    for keeps in [true, false] {
        let (rig, other) = (rig(), other());
        let old = rig.open(1);
        let moved = rig.start_move_by(Some(1), &other.path, Cancel::default(), true);
        let old = thread::spawn(move || {
            does_not_precopy(&old);
            assert!(matches!(next(&old).0, Ask::Quiesce(250, _)));
            done(&old);
            assert_eq!(next(&old).0, Ask::SaveRest(0, true));
            let saved = if keeps { Reply::Keeps() } else { Reply::Done() };
            control::send(&old, &saved, &[]).unwrap();
            assert_eq!(next(&old).0, Ask::Leave());
        });
        let (new, _) = taken_up(&other.pool);
        done(&new);
        restores(&new);
        done(&new);
        old.join().unwrap();
        if keeps {
            ends(&new);
        } else {
            assert_eq!(next(&new).0, Ask::Go());
        }
        let moved = moved.recv().unwrap();
        let slices: &[u32] = if keeps { &[] } else { &[1] };
        assert_eq!(moved.slices, slices);
        let is_lost = moved
            .reasons
            .iter()
            .any(|why| why.contains("slice 1 is lost: "));
        assert_eq!(is_lost, keeps, "{moved:?}");
    }
}

#[test]
fn an_application_whose_worker_does_not_leave_stays_with_its_contents() {
    let (rig, other) = (rig(), other());
    let old = rig.open(0);
    let moved = rig.start_move_by(None, &other.path, Cancel::default(), true);
    let old = thread::spawn(move || {
        does_not_precopy(&old);
        saves_rest_by(&old, 0, true, b"state");
        assert_eq!(next(&old).0, Ask::Leave());
        refuse(&old, "it is in another state");
        assert_eq!(next(&old).0, Ask::Resume());
        done(&old);
        old
    });
    let (new, _) = taken_up(&other.pool);
    done(&new);
    restores(&new);
    done(&new);
    ends(&new);
    let _old = old.join().unwrap();
    let moved = moved.recv().unwrap();
    assert!(moved.slices.is_empty());
    let reason = &moved.reasons[0];
    assert!(reason.contains("stays: it is in another state"), "{reason}");
    rig.eventually(|| rig.lendable() == 1);
    assert_eq!(rig.state(0), State::Open);
}

#[test]
fn while_contents_of_one_follow_the_others_are_the_ports_and_a_move_ends_with_the_last() {
    let (rig, other) = (rig(), other());
    let workers = [0, 1, 2].map(|slice| rig.open(slice));
    let all_gone = Arc::default();
    let moved = rig.start_asked(Move {
        slice: None,
        to: Pool {
            socket: other.path.clone(),
            device: "other".to_owned(),
        },
        drain: Duration::from_millis(250),
        postcopy: true,
        cancel: Cancel::default(),
        all_gone: Arc::clone(&all_gone),
    });
    let [first, killed, last] = workers;
    let leaving = |old: UnixStream| {
        thread::spawn(move || {
            leaves(&old);
            ends(&old);
        })
    };
    let first = leaving(first);
    let (new, _) = taken_up(&other.pool);
    let socket = goes_on(&new);
    // Its end is noticed immediately, not only when the first one has received everything.
    drop(killed);
    rig.becomes(1, State::Ended);
    assert!(!all_gone.load(Ordering::SeqCst));
    drop(socket);
    let last = leaving(last);
    let (newest, _) = taken_up(&other.pool);
    let socket = goes_on(&newest);
    // It is too late to cancel.
    rig.eventually(|| all_gone.load(Ordering::SeqCst));
    drop(socket);
    let moved = moved.recv().unwrap();
    assert_eq!((moved.slices, moved.reasons), (vec![0, 2], Vec::new()));
    first.join().unwrap();
    last.join().unwrap();
}

#[test]
fn a_move_that_is_cancelled_while_contents_of_one_follow_ends_and_these_come_all_the_same() {
    let (rig, other) = (rig(), other());
    let [first, _stays] = [0, 1].map(|slice| rig.open(slice));
    let cancel = Cancel::default();
    let moved = rig.start_move_by(None, &other.path, cancel.clone(), true);
    let first = thread::spawn(move || {
        leaves(&first);
        let (command, file) = next(&first);
        assert_eq!(command, Ask::Fetch(WHAT));
        File::from(file.unwrap()).write_all_at(b"all", 0).unwrap();
        done(&first);
        ends(&first);
    });
    let (new, _) = taken_up(&other.pool);
    let socket = goes_on(&new);
    cancel.cancel();
    let moved = moved.recv().unwrap();
    assert_eq!(moved.slices, [0]);
    let [follows, stays] = &moved.reasons[..] else {
        panic!("{moved:?}");
    };
    let said = "slice 0 has moved, and contents of its memory still follow";
    assert!(follows.contains(said), "{follows}");
    assert!(stays.contains("slice 1 stays: it was cancelled"), "{stays}");
    assert_eq!(fetch(&socket).unwrap(), b"all");
    drop(socket);
    first.join().unwrap();
    rig.eventually(|| rig.lendable() == 2);
}

fn application(slice: u32) -> Application {
    Application {
        port: "gpu".to_owned(),
        slice,
    }
}

/// Acts as a worker whose VM continues elsewhere.
fn leaves_with_its_machine(old: &UnixStream) {
    saves(old, b"state");
    assert_eq!(next(old).0, Ask::Leave());
}

#[test]
fn all_workers_of_a_machine_that_has_left_are_asked_to_leave_before_one_has() {
    let rig = rig();
    let [waits, answers] = [0, 1].map(|slice| rig.open(slice));
    let (tells, told) = mpsc::channel();
    let fetched = |old: &UnixStream| {
        done(old);
        assert_eq!(next(old).0, Ask::Fetch(WHAT));
        done(old);
    };
    let workers = [
        thread::spawn(move || {
            leaves_with_its_machine(&waits);
            told.recv().unwrap();
            fetched(&waits);
        }),
        thread::spawn(move || {
            leaves_with_its_machine(&answers);
            tells.send(()).unwrap();
            fetched(&answers);
        }),
    ];
    let mut archive = Archive::new(control::image().unwrap());
    let mut left = rig.save(&mut archive).ok().unwrap().leave();
    for slice in [0, 1] {
        left.fetch(&application(slice), &WHAT).unwrap();
    }
    for worker in workers {
        worker.join().unwrap();
    }
}

#[test]
fn a_worker_of_a_machine_that_has_left_ends_when_it_answers_what_it_should_not() {
    let rig = rig();
    let old = rig.open(1);
    let worker = thread::spawn(move || {
        leaves_with_its_machine(&old);
        done(&old);
        assert_eq!(next(&old).0, Ask::Fetch(WHAT));
        (&old).write_all(&[0xff; 12]).unwrap();
        // This would be taken for the reply to another command, if it were read at all.
        let _ = control::send(&old, &Reply::Done(), &[]);
        let end = (&old).read(&mut [0]);
        assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
    });
    let mut archive = Archive::new(control::image().unwrap());
    let mut left = rig.save(&mut archive).ok().unwrap().leave();
    let lost = left.fetch(&application(1), &WHAT).unwrap_err();
    assert_eq!(left.fetch(&application(1), &WHAT).unwrap_err(), lost);
    assert!(!left.is_empty());
    worker.join().unwrap();
}
