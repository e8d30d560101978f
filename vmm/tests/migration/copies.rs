//! Applications that are copied while they go on.

use super::*;

#[test]
fn an_application_that_is_busy_is_saved_as_a_whole_beside_one_that_was_copied() {
    if !has_kvm() {
        return;
    }
    let going = going_by_copies();
    going.workers[0].is_not_copied();
    going.workers[1].is_copied();
    going.workers[0].goes_on();
    let copied = going.there.next();
    copied.prepares();
    // What cannot be copied is not asked what it has made.
    going.workers[1].has_made(0);
    going.workers.iter().for_each(Worker::stops);
    going.workers[0].saves();
    going.workers[1].saves_rest();
    let busy = going.there.next();
    assert_eq!((busy.slice, copied.slice), (0, 1));
    busy.is_ready();
    busy.restores();
    copied.is_given(&Ask::Restore(false), "the rest");
    for worker in [&busy, &copied] {
        worker.answers(&Reply::Done());
    }
    for worker in [&busy, &copied] {
        worker.serves();
    }
    let (second, _dir) = going.arrives();
    assert_eq!(second.counter("slices_in_use"), SLICES as u64);
    assert_eq!(second.counter("workers_lost"), 0);
}

#[test]
fn a_machine_that_moves_has_its_applications_copied_while_they_go_on() {
    if !has_kvm() {
        return;
    }
    let going = going_by_copies();
    going.workers.iter().for_each(Worker::is_copied);
    let new = going.there.both();
    new.iter().for_each(Worker::prepares);
    going.workers.iter().for_each(|worker| worker.has_made(0));
    going.workers.iter().for_each(Worker::stops);
    going.workers.iter().for_each(Worker::saves_rest);
    for worker in &new {
        worker.is_given(&Ask::Restore(false), "the rest");
        worker.answers(&Reply::Done());
    }
    new.iter().for_each(Worker::serves);
    let (second, _dir) = going.arrives();
    let info = second.migration();
    assert!(info["accel_bytes"].as_u64() > Some(0), "{info}");
    assert!(info["accel_stop_bytes"].as_u64() > Some(0), "{info}");
    assert_eq!(second.counter("slices_in_use"), SLICES as u64);
    assert_eq!(second.counter("workers_lost"), 0);
}

#[test]
fn a_machine_stays_if_something_dies_amid_copies_of_its_applications() {
    if !has_kvm() {
        return;
    }
    for step in ["ready", "refused", "machine", "later", "stopped", "rest"] {
        let mut going = going_by_copies();
        going.workers.iter().for_each(Worker::is_copied);
        let mut new = Vec::from(going.there.both());
        let mut why = "has ended";
        if step == "ready" {
            drop(new.remove(0));
            new[0].prepares();
        } else {
            new[0].prepares();
            new[1].is_ready();
            new[1].is_given(&Ask::Prepare(false), "a copy");
            if step == "refused" {
                why = "no such device";
                let refused = Blob(b"it has no such device".to_vec());
                new[1].answers(&Reply::Refused(refused));
            } else if step == "machine" {
                why = "the connection broke";
                going.second.kill();
            } else {
                new[1].answers(&Reply::Done());
            }
        }
        if ["later", "stopped", "rest"].contains(&step) {
            if step == "later" {
                drop(new.remove(0));
            }
            going.workers.iter().for_each(|worker| worker.has_made(0));
            going.workers.iter().for_each(Worker::stops);
            if step == "stopped" {
                drop(new.remove(0));
            }
            going.workers.iter().for_each(Worker::saves_rest);
            if step == "rest" {
                new[0].is_given(&Ask::Restore(false), "the rest");
                drop(new.remove(0));
            }
            new[0].is_given(&Ask::Restore(false), "the rest");
            new[0].answers(&Reply::Done());
        }
        // They are the first machine's alone, and give up what they keep of copies.
        going.workers.iter().for_each(Worker::goes_on);
        new.into_iter().for_each(Worker::ends);
        going.stays(why, 0);
    }
}

#[test]
fn what_an_application_makes_after_its_copy_is_copied_before_the_machine_stops() {
    if !has_kvm() {
        return;
    }
    let going = going_by_copies();
    going.workers.iter().for_each(Worker::is_copied);
    let new = going.there.both();
    new.iter().for_each(Worker::prepares);
    // More than any connection sends in a stop: neither is asked for that.
    going.workers[0].has_made(0);
    going.workers[1].has_made(1 << 40);
    for worker in &going.workers {
        worker.is_copied_after(1, "more");
    }
    for worker in &new {
        worker.is_given(&Ask::Prepare(false), "more");
        worker.answers(&Reply::Done());
    }
    going.workers.iter().for_each(|worker| worker.has_made(0));
    going.workers.iter().for_each(Worker::stops);
    for worker in &going.workers {
        worker.saves_rest_of(2);
    }
    for worker in &new {
        worker.is_given(&Ask::Restore(false), "the rest");
        worker.answers(&Reply::Done());
    }
    new.iter().for_each(Worker::serves);
    let (second, _dir) = going.arrives();
    assert_eq!(second.counter("slices_in_use"), SLICES as u64);
    assert_eq!(second.counter("workers_lost"), 0);
}
