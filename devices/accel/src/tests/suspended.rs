//! Programs with native contexts whose VM is saved or moved: the guest's agent suspends them.

use std::thread;

use base::{Cancel, Patience};
use remoting_proto::port::{Outcome, OutcomeKind, Server, Wish};

use super::{pages::rig_of_native, *};
use crate::{
    rounds::immovable,
    saved::{Archive, Standing},
    wish,
};

fn long() -> Patience {
    Patience::within(Duration::from_secs(60))
}

impl Rig {
    /// What the agent does with the next wish: it tells the outcome, having closed the slice of this worker, or gives a
    /// reason.
    fn agent_answers(&self, by: Server, kind: OutcomeKind, worker: Option<UnixStream>) {
        let start = Instant::now();
        let wish = loop {
            if let Some(wish) = Wish::from_number(self.read(registers::WISH)) {
                break wish;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "no wish");
            thread::yield_now();
        };
        assert_eq!(wish.by, by);
        if let Some(mut worker) = worker {
            self.command(0, Command::Close);
            assert_eq!(worker.read(&mut [0]).unwrap(), 0);
            drop(worker);
            self.becomes(0, State::Free);
        } else {
            self.write(registers::REASON, u32::from_le_bytes(*b"why\0"));
        }
        let outcome = Outcome {
            number: wish.number,
            kind,
            applications: 1,
        };
        self.write(registers::OUTCOME, outcome.to_number());
    }

    fn stopped(&self) -> Result<Standing, crate::saved::Error> {
        Standing::new(self.ports(), Duration::ZERO, long())
    }
}

#[test]
fn suspended_programs_are_saved_with_the_guests_memory_and_resumed_afterwards() {
    let rig = rig_of_native();
    let worker = rig.open(0);
    let stopped = thread::scope(|scope| {
        let stopped = scope.spawn(|| rig.stopped());
        rig.agent_answers(Server::Parked, OutcomeKind::Done, Some(worker));
        stopped.join().unwrap().unwrap()
    });
    let mut archive = Archive::new(tempfile::tempfile().unwrap());
    let saved = stopped.save(&mut archive).unwrap();
    let state = rig.function.lock().unwrap().save().unwrap();
    assert!(state.get("slices").is_none(), "{state}");
    assert_ne!(rig.read(registers::WISH), 0, "they stay suspended");
    drop(saved);
    assert_eq!(rig.read(registers::WISH), 0, "the agent resumes them");
    // What is not in use needs no agent.
    drop(rig.stopped().unwrap());
    assert_eq!(immovable(&rig.ports(), &long()), [""; 0]);
}

#[test]
fn what_keeps_programs_is_told_by_the_guest() {
    let rig = rig_of_native();
    let _worker = rig.open(0);
    let reasons = thread::scope(|scope| {
        let reasons = scope.spawn(|| immovable(&rig.ports(), &long()));
        rig.agent_answers(Server::Examined, OutcomeKind::Stay, None);
        reasons.join().unwrap()
    });
    assert_eq!(
        reasons,
        ["gpu: the guest's CUDA programs cannot be suspended: why"]
    );
    let error = thread::scope(|scope| {
        let stopped = scope.spawn(|| rig.stopped());
        rig.agent_answers(Server::Parked, OutcomeKind::Stay, None);
        stopped.join().unwrap().err().unwrap()
    });
    assert_eq!(error.to_string(), reasons[0]);
    assert_eq!(rig.read(registers::WISH), 0, "no later agent suspends them");
    // Nor is one waited for that does not answer.
    let soon = Patience::within(Duration::from_millis(20));
    let reasons = immovable(&rig.ports(), &soon);
    assert!(
        reasons[0].contains("is its gantry-agent running"),
        "{reasons:?}"
    );
}

#[test]
fn a_question_that_is_answered_is_no_wish_any_longer() {
    let rig = rig_of_native();
    let worker = rig.open(0);
    thread::scope(|scope| {
        let reasons = scope.spawn(|| immovable(&rig.ports(), &long()));
        rig.agent_answers(Server::Examined, OutcomeKind::Done, Some(worker));
        assert_eq!(reasons.join().unwrap(), [""; 0]);
    });
    assert_eq!(rig.read(registers::WISH), 0);
}

#[test]
fn a_later_request_outlives_a_suspension() {
    let rig = rig_of_native();
    let worker = rig.open(0);
    let stopped = thread::scope(|scope| {
        let stopped = scope.spawn(|| rig.stopped());
        rig.agent_answers(Server::Parked, OutcomeKind::Done, Some(worker));
        stopped.join().unwrap().unwrap()
    });
    let (_, port) = rig.ports().remove(0);
    thread::scope(|scope| {
        let parked = scope.spawn(|| {
            let patience = Duration::from_secs(60);
            port.ask_seats(&wish::Seat::Parked(None), patience, &Cancel::default())
        });
        let first = rig.read(registers::WISH);
        let start = Instant::now();
        while rig.read(registers::WISH) == first {
            assert!(start.elapsed() < Duration::from_secs(20), "no wish");
            thread::yield_now();
        }
        rig.agent_answers(Server::Parked, OutcomeKind::Done, None);
        parked.join().unwrap().unwrap();
    });
    drop(stopped);
    assert_ne!(rig.read(registers::WISH), 0, "a client wants them parked");
}

#[test]
fn programs_that_run_are_not_saved() {
    let rig = rig_of_native();
    let stopped = rig.stopped().unwrap();
    // It starts while the guest is being paused.
    let _worker = rig.open(0);
    let mut archive = Archive::new(tempfile::tempfile().unwrap());
    let why = stopped.save(&mut archive).err().unwrap();
    assert!(
        why.to_string().contains("have to be suspended first"),
        "{why}"
    );
    let busy = rig.function.lock().unwrap().save().unwrap_err();
    assert!(
        busy.to_string().contains("have to be suspended first"),
        "{busy}"
    );
}
