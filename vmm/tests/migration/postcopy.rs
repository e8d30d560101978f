//! Applications whose contents follow the machine.

use std::{io::Read as _, os::fd::AsFd};

use base::Patience;
use remoting_transport::control::{Failure, Fetch, LONG, Peer};

use super::*;

const WHAT: Fetch = Fetch {
    mem: 3,
    bytes: 1 << 20,
    left: 5 << 20,
};

impl Worker {
    fn saves_by_postcopy(&self) {
        self.saves_after(0, "the state");
    }

    fn saves_after(&self, rounds: u32, what: &str) {
        let (command, file) = self.asked();
        assert_eq!(command, Ask::SaveRest(rounds, true));
        self.writes(what, file);
    }

    fn leaves(&self) {
        assert_eq!(self.asked().0, Ask::Leave());
        self.answers(&Reply::Done());
    }

    /// It serves, and asks here for contents.
    fn serves_first(&self) -> UnixStream {
        let (command, socket) = self.asked();
        assert_eq!(command, Ask::Go());
        UnixStream::from(std::os::fd::OwnedFd::from(socket.unwrap()))
    }
}

/// Asks for contents.
fn fetch(socket: &UnixStream) -> Result<String, Failure> {
    let source = Peer {
        channel: socket,
        who: control::Worker::Left,
    };
    let file = control::image().unwrap();
    let patience = Patience::within(LONG);
    source.ask(&Ask::Fetch(WHAT), &[file.as_fd()], &patience)?;
    let mut came = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut came, 0).unwrap();
    Ok(String::from_utf8(came).unwrap())
}

/// A machine that runs at its destination, and whose applications ask for contents.
fn followed() -> (Going, [Worker; SLICES], Vec<UnixStream>) {
    let mut going = setting_off(&["--accel-postcopy"], &Reply::Done());
    going.workers.iter().for_each(Worker::stops);
    going.workers.iter().for_each(Worker::saves_by_postcopy);
    let new = going.there.both();
    new.iter().for_each(Worker::is_ready);
    for worker in &new {
        worker.restores();
        worker.answers(&Reply::Done());
    }
    let sockets = new.iter().map(Worker::serves_first).collect();
    going.workers.iter().for_each(Worker::leaves);
    let received = going.receiving.wait().unwrap();
    assert!(received.success(), "{}", going.second.said());
    going.second.counts_on();
    going.first.until("contents follow", |vmm| {
        vmm.migration()["phase"] == "Postcopy"
    });
    (going, new, sockets)
}

#[test]
fn contents_follow_a_machine_whose_source_stays_until_all_have_come() {
    if !has_kvm() {
        return;
    }
    let (mut going, new, sockets) = followed();
    going
        .first
        .refuses(&["cancel-migration"], "the VM runs at the destination");
    let worker = &going.workers[1];
    let asked = thread::scope(|scope| {
        let came = scope.spawn(|| fetch(&sockets[1]));
        let (command, file) = worker.asked();
        assert_eq!(command, Ask::Fetch(WHAT));
        assert_eq!(going.first.migration()["accel_remaining_bytes"], WHAT.left);
        worker.writes("contents", file);
        came.join().unwrap()
    });
    assert_eq!(asked.unwrap(), "contents of slice 1");
    // One that is killed costs its own application what it had.
    drop(going.workers.remove(0));
    let lost = fetch(&sockets[0]).unwrap_err();
    assert!(matches!(lost, Failure::Refused(_)), "{lost:?}");
    going.first.until("it knows what is left", |vmm| {
        vmm.migration()["accel_remaining_bytes"] == WHAT.left - WHAT.bytes
    });
    assert!(going.sending.try_wait().unwrap().is_none());
    let (mut stdout, mut shown) = shown(&mut going.sending, "Postcopy");
    drop(sockets);
    going.workers.into_iter().for_each(Worker::ends);
    let sent = going.sending.wait_with_output().unwrap();
    assert!(sent.status.success(), "{}", error(&sent));
    stdout.read_to_end(&mut shown).unwrap();
    let shown = String::from_utf8_lossy(&shown);
    assert!(shown.contains("Completed"), "{shown}");
    assert_eq!(going.first.migration()["accel_remaining_bytes"], 0);
    going.second.counts_on();
    check_counting(&[&going.first, &going.second]);
    assert_eq!(going.second.counter("workers_lost"), 0);
    // Nothing of the first machine is left that could end them.
    going.first.kill();
    going.second.counts_on();
    going.second.kill();
    new.into_iter().for_each(Worker::ends);
}

#[test]
fn a_source_or_a_destination_that_is_killed_while_contents_follow_leaves_nobody_waiting() {
    if !has_kvm() {
        return;
    }
    for kills_source in [true, false] {
        let (mut going, new, sockets) = followed();
        // Who has not seen it cannot know that the VM has left.
        let _stdout = shown(&mut going.sending, "Postcopy");
        match kills_source {
            true => {
                going.first.kill();
                for socket in &sockets {
                    let lost = fetch(socket).unwrap_err();
                    assert!(matches!(lost, Failure::Refused(_)), "{lost:?}");
                }
                going.second.counts_on();
                // It is up to the workers what becomes of their applications.
                assert_eq!(going.second.counter("workers_lost"), 0);
                going.second.kill();
            }
            false => going.second.kill(),
        }
        going.workers.into_iter().for_each(Worker::ends);
        new.into_iter().for_each(Worker::ends);
        let sent = going.sending.wait_with_output().unwrap();
        // Who watches has seen that the VM has left, and that contents have followed only if the source says so.
        assert_eq!(sent.status.success(), !kills_source, "{}", error(&sent));
        if kills_source {
            let said = error(&sent);
            assert!(
                said.contains("the VM runs at the destination") && said.contains("followed"),
                "{said}"
            );
        }
    }
}

#[test]
fn a_destination_that_ends_its_applications_lets_the_source_go() {
    if !has_kvm() {
        return;
    }
    let (mut going, new, sockets) = followed();
    // Both workers die, as with their pool.
    drop((new, sockets));
    going.workers.drain(..).for_each(Worker::ends);
    let sent = going.sending.wait_with_output().unwrap();
    assert!(sent.status.success(), "{}", error(&sent));
    going.second.counts_on();
    going.second.until("they have ended", |vmm| {
        vmm.counter("workers_lost") == SLICES as u64
    });
}

#[test]
fn an_application_that_was_copied_leaves_with_the_rest_and_what_follows_that() {
    if !has_kvm() {
        return;
    }
    let mut going = setting_off(&["--accel-copies", "--accel-postcopy"], &Reply::Done());
    going.workers.iter().for_each(Worker::is_copied);
    let new = going.there.both();
    new.iter().for_each(Worker::prepares);
    going.workers.iter().for_each(Worker::stops);
    for worker in &going.workers {
        worker.saves_after(1, "the rest");
    }
    for worker in &new {
        worker.is_given(&Ask::Restore(false), "the rest");
        worker.answers(&Reply::Done());
    }
    let sockets: Vec<_> = new.iter().map(Worker::serves_first).collect();
    going.workers.iter().for_each(Worker::leaves);
    assert!(going.receiving.wait().unwrap().success());
    let asked = thread::scope(|scope| {
        let came = scope.spawn(|| fetch(&sockets[0]));
        let (command, file) = going.workers[0].asked();
        assert_eq!(command, Ask::Fetch(WHAT));
        going.workers[0].writes("contents", file);
        came.join().unwrap()
    });
    assert_eq!(asked.unwrap(), "contents of slice 0");
    drop(sockets);
    going.workers.into_iter().for_each(Worker::ends);
    let sent = going.sending.wait_with_output().unwrap();
    assert!(sent.status.success(), "{}", error(&sent));
    going.second.counts_on();
}

#[test]
fn a_move_between_pools_cannot_be_ended_when_all_have_moved_and_contents_follow() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let pools = ["pool", "other"].map(|name| Pool::new(dir.path(), name));
    let (mut first, workers) = opened(dir.path(), &pools[0]);
    let to = pools[1].path.to_str().unwrap();
    let moving = first.ask(&[
        "move-accel",
        "gpu",
        "--to",
        to,
        "--slice",
        "0",
        "--postcopy",
    ]);
    let (old, new) = (&workers[0], pools[1].next());
    new.is_ready();
    old.is_not_copied();
    old.stops();
    old.saves_by_postcopy();
    new.is_given(&Ask::Restore(true), "the state");
    new.answers(&Reply::Done());
    old.leaves();
    let socket = new.serves_first();
    thread::scope(|scope| {
        let came = scope.spawn(|| fetch(&socket));
        let (_, file) = old.asked();
        first.refuses(&["cancel-migration"], "the applications have moved");
        old.writes("contents", file);
        came.join().unwrap().unwrap();
    });
    drop(socket);
    let [old, _serves] = workers;
    old.ends();
    let moved = moving.wait_with_output().unwrap();
    assert!(moved.status.success(), "{}", error(&moved));
    first.refuses(&["cancel-migration"], "no migration is going on");
    first.counts_on();
}
