//! Tests of objects that are made after a round, when the application is to stop.

use std::{sync::mpsc, time::Duration};

use remoting_session::checkpoint::{Order, Ordered, Phase};

use super::*;

/// Makes a round with all of a server's objects, and afterwards a buffer of 64 KiB and another
/// buffer that nobody writes.
fn made_after_a_round(left: &mut Served, new: &mut Served) {
    let (length, why) = left.precopy(0);
    assert_eq!(why, DONE);
    left.carry(new, length);
    assert_eq!(new.prepare(), (DONE, true));
    for request in [call(2, 3, 0, 16), fill(3, 1 << 16), call(2, 4, 0, 20)] {
        carry_out(&mut left.server, request);
    }
}

#[test]
fn much_that_is_made_after_a_round_comes_by_another_one_and_not_while_its_client_stands_still() {
    const MADE: u64 = 1 << 16;
    let (mut left, mut new) = (with_objects(), Served::new());
    made_after_a_round(&mut left, &mut new);
    let (made, why) = left.save_with(1, MADE - 1);
    assert!(made == MADE && why != DONE);
    // It continues, and the next round knows what the one before has copied.
    assert!(left.server.phase.serves());
    carry_out(&mut left.server, call(5, 1, 0, 0));
    let (length, why) = left.precopy(1);
    assert!(length >= MADE && why == DONE);
    left.carry(&mut new, length);
    assert_eq!(new.prepare(), (DONE, true));
    let (length, why) = left.save_with(2, MADE - 1);
    assert!(length < MADE && why == DONE, "{length} bytes");
    left.carry(&mut new, length);
    assert_eq!(new.restore(), (DONE, true));
    assert_eq!(state(&mut left.server), state(&mut new.server));
    // If as much may remain, it is saved.
    let (mut left, mut new) = (with_objects(), Served::new());
    made_after_a_round(&mut left, &mut new);
    let (length, why) = left.save_with(1, MADE);
    assert!(length >= MADE && why == DONE);
}

#[test]
fn who_is_to_stop_goes_on_where_much_was_made_after_a_round() {
    let mut served = with_objects();
    for request in [call(2, 4, 0, 16), fill(4, 1)] {
        carry_out(&mut served.server, request);
    }
    let (done, outcome) = mpsc::channel();
    served.server.precopy(file(), Asker::Pool, 0, &done);
    assert_eq!(outcome.recv().unwrap(), Ok(Outcome::Done));
    for request in [call(2, 3, 0, 16), fill(3, 1)] {
        carry_out(&mut served.server, request);
    }
    // A session that is stopping is in the middle of something.
    served.server.carried = Carried::Due;
    let asked = |served: &mut Served, order| {
        let done = done.clone();
        served.server.notices().unwrap();
        served.server.orders.push_back(Ordered { order, done });
        served.server.obey(&mut served.calls).unwrap();
        assert!(served.server.phase.serves());
        outcome.recv().unwrap()
    };
    let stop = |served: &mut Served, most| asked(served, Order::Quiesce(Duration::ZERO, most));
    assert_eq!(stop(&mut served, 65535), Ok(Outcome::Made(65536)));
    let busy = stop(&mut served, 65536).unwrap_err();
    assert!(busy.contains("copies its state"), "{busy}");
    // A mere query reports it, too; without a round, it reports everything that was ever written.
    assert_eq!(asked(&mut served, Order::Examine), Ok(Outcome::Made(65536)));
    served.server.forget_rounds(Asker::Pool);
    let all = asked(&mut served, Order::Examine);
    assert_eq!(all, Ok(Outcome::Made(2 * 65536)));
}

#[test]
fn who_saves_by_postcopy_says_whether_contents_are_kept() {
    let mut served = with_objects();
    for request in [call(2, 3, 0, 16), fill(3, 1 << 16)] {
        carry_out(&mut served.server, request);
    }
    let saved = |served: &mut Served, postcopy| {
        served.server.phase = Phase::Quiesced;
        let (done, outcome) = mpsc::channel();
        let save = Order::SaveRest(file(), Asker::Pool, 0, postcopy);
        // Otherwise it would wait for more.
        for order in [save, Order::Resume] {
            let done = done.clone();
            served.server.orders.push_back(Ordered { order, done });
        }
        served.server.obey(&mut served.calls).unwrap();
        outcome.recv().unwrap()
    };
    assert_eq!(saved(&mut served, true), Ok(Outcome::Done), "it is small");
    for request in [call(2, 4, 0, 18), fill(4, 1 << 18)] {
        carry_out(&mut served.server, request);
    }
    assert_eq!(saved(&mut served, true), Ok(Outcome::Keeps));
    assert_eq!(saved(&mut served, false), Ok(Outcome::Done));
}
