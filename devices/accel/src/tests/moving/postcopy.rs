//! Applications that go on before their contents have come.

use gantry_remoting::link::control::{Fetch, NotMoved, Peer};

use super::*;

const WHAT: Fetch = Fetch {
    mem: 7,
    bytes: 1 << 20,
    left: 3 << 20,
};

/// What a worker does that leaves, and keeps contents.
fn leaves(old: &UnixStream) {
    does_not_precopy(old);
    saves_rest_by(old, 0, true, b"state");
    assert_eq!(next(old).0, Ask::Leave());
    done(old);
}

/// What a worker does that goes on without contents: where it asks for them.
fn goes_on(new: &UnixStream) -> UnixStream {
    done(new);
    assert_eq!(restores(new), b"state");
    done(new);
    let (command, socket) = next(new);
    assert_eq!(command, Ask::Go());
    UnixStream::from(socket.unwrap())
}

/// Asks for contents, and what has come.
fn fetch(socket: &UnixStream) -> Result<Vec<u8>, NotMoved> {
    let source = Peer {
        channel: socket,
        who: "the worker that it has left",
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
    // It is the port's own already.
    rig.eventually(|| rig.lendable() == 1);
    assert_eq!(fetch(&socket).unwrap(), b"second");
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
        assert!(matches!(refused, NotMoved::Refused(_)), "{refused:?}");
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
