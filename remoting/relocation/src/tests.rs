//! All that can come between the steps of a move, at each step and at each two, with ports whose workers are values.

use std::{cell::RefCell, io, panic, time::Duration};

use base::{Cancel, Patience};

use super::{
    destination::DestinationPort,
    failure::{Failure, NotMoved, Worker},
    rounds::{APPLICATION, MUCH},
    source::{Contents, Departed, Leave, Quiescence, SourcePort},
    transfer::{Plan, relocate},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Open,
    Precopy(u32),
    Prepare,
    Quiesce,
    Save(u32),
    Restore,
    Leave,
    End,
    Go,
    Resume,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The worker refuses.
    Refuses,
    /// The worker has ended.
    Ends,
    /// The worker does it, and its answer does not come in time.
    Late,
    /// Whoever has asked for the move goes.
    Cancelled,
    /// The application has created this much memory.
    Grows(u64),
    /// The code that reaches the worker panics.
    Panics,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Life {
    #[default]
    Serves,
    Stopped,
    Left,
    Ended,
}

/// Both workers, and what comes between.
#[derive(Debug, Default)]
struct World {
    source: Life,
    /// Rounds that the source has saved and the destination has.
    rounds: (u32, u32),
    /// Bytes of memory created since the last round.
    new: u64,
    is_restored: bool,
    /// Whether the source leaves large contents out of the state.
    keeps: bool,
    destination_serves: bool,
    /// An answer of the source is due.
    is_late: bool,
    steps: Vec<Step>,
    faults: Vec<(usize, Fault)>,
    cancel: Cancel,
}

impl World {
    /// Takes a step, unless something comes between.
    fn step(&mut self, step: Step, who: Worker) -> Result<(), Failure> {
        let at = self.steps.len();
        self.steps.push(step);
        let of_source = who == Worker::Serving;
        if of_source && self.is_late {
            assert!(matches!(step, Step::End | Step::Resume), "{self:?}");
        }
        let fault = self.faults.iter().find(|(index, _)| *index == at);
        let gone = |kind: io::ErrorKind| Failure::Gone {
            who,
            source: kind.into(),
        };
        if of_source && self.source == Life::Ended && step != Step::End {
            return Err(gone(io::ErrorKind::BrokenPipe));
        }
        match fault {
            Some((_, Fault::Refuses)) if step != Step::Resume => {
                return Err(Failure::Refused("no".to_owned()));
            }
            Some((_, Fault::Ends)) => {
                if of_source {
                    self.source = Life::Ended;
                }
                return Err(gone(io::ErrorKind::BrokenPipe));
            }
            Some((_, Fault::Cancelled)) => self.cancel.cancel(),
            Some((_, Fault::Grows(bytes))) => self.new += bytes,
            Some((_, Fault::Panics)) => panic!("at {step:?}"),
            Some((_, Fault::Refuses | Fault::Late)) | None => {}
        }
        let is_late = matches!(fault, Some((_, Fault::Late)));
        match step {
            Step::Precopy(round) => {
                assert_eq!((self.source, round), (Life::Serves, self.rounds.0));
                self.rounds.0 += 1;
            }
            Step::Prepare => self.rounds.1 += 1,
            Step::Quiesce => assert_eq!(self.source, Life::Serves),
            Step::Save(rounds) => {
                assert_eq!(self.source, Life::Stopped);
                assert_eq!((rounds, rounds), self.rounds, "both have the same");
            }
            Step::Restore => self.is_restored = true,
            Step::Leave => {
                assert!(self.source == Life::Stopped && self.is_restored);
                self.source = Life::Left;
            }
            Step::End => self.source = Life::Ended,
            Step::Go => {
                assert!(matches!(self.source, Life::Left | Life::Ended), "{self:?}");
                self.destination_serves = true;
            }
            Step::Resume => {
                if self.source == Life::Stopped {
                    self.source = Life::Serves;
                }
            }
            Step::Open => {}
        }
        if !is_late {
            return Ok(());
        }
        if of_source {
            self.is_late = true;
            if step == Step::Quiesce {
                self.source = Life::Stopped;
            }
        }
        Err(gone(io::ErrorKind::TimedOut))
    }
}

struct Source<'a>(&'a RefCell<World>);
struct Destination<'a>(&'a RefCell<World>);

impl Source<'_> {
    fn step(&self, step: Step) -> Result<(), Failure> {
        self.0.borrow_mut().step(step, Worker::Serving)
    }
}

impl Destination<'_> {
    fn step(&self, step: Step) -> Result<(), Failure> {
        self.0.borrow_mut().step(step, Worker::Destination)
    }
}

impl SourcePort for Source<'_> {
    type State = ();

    fn precopy(
        &mut self,
        round: u32,
        _limit: Duration,
        _patience: &Patience,
    ) -> Result<((), u64), Failure> {
        self.step(Step::Precopy(round))?;
        self.0.borrow_mut().new = 0;
        // The second one has little, and ends the rounds.
        Ok(((), (4 << 20) >> (20 * (round % 2))))
    }

    fn quiesce(
        &mut self,
        _plan: &Plan,
        (rounds, most_new): (u32, u64),
        _patience: &Patience,
    ) -> Result<Quiescence, Failure> {
        self.step(Step::Quiesce)?;
        let mut world = self.0.borrow_mut();
        assert_eq!(rounds, world.rounds.0);
        if world.new > most_new {
            return Ok(Quiescence::Grew);
        }
        world.source = Life::Stopped;
        Ok(Quiescence::Still)
    }

    fn save(
        &mut self,
        plan: &Plan,
        rounds: u32,
        _patience: &Patience,
    ) -> Result<((), Contents), Failure> {
        self.step(Step::Save(rounds))?;
        let contents = match plan.postcopy && self.0.borrow().keeps {
            true => Contents::Kept,
            false => Contents::Saved,
        };
        Ok(((), contents))
    }

    fn leave(&mut self) -> Leave {
        match self.step(Step::Leave) {
            Ok(()) => Leave::Confirmed,
            Err(why) if why.is_refusal() => Leave::Refused(why),
            Err(why) => Leave::Unknown(why),
        }
    }

    fn end(&mut self) -> Result<(), Failure> {
        self.step(Step::End)
    }

    fn resume(&mut self) {
        let _ = self.step(Step::Resume);
    }
}

impl DestinationPort for Destination<'_> {
    type State = ();

    fn open(&mut self, _patience: &Patience) -> Result<(), Failure> {
        self.step(Step::Open)
    }

    fn prepare(&mut self, (): (), _patience: &Patience) -> Result<(), Failure> {
        self.step(Step::Prepare)
    }

    fn restore(&mut self, (): (), _patience: &Patience) -> Result<(), Failure> {
        self.step(Step::Restore)
    }

    fn go(&mut self, _proof: Departed) -> Result<(), Failure> {
        self.step(Step::Go)
    }
}

/// How an application's contents come to the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Precopy,
    /// By postcopy, if there are contents that are worth it.
    Postcopy {
        keeps: bool,
    },
}

const HOW: [How; 3] = [
    How::Precopy,
    How::Postcopy { keeps: false },
    How::Postcopy { keeps: true },
];

/// Moves an application while this happens at these steps. Returns whether it has moved, and all that has come.
fn moved(faults: Vec<(usize, Fault)>, how: How) -> (Result<(), NotMoved>, World) {
    let world = RefCell::new(World {
        faults,
        keeps: how == How::Postcopy { keeps: true },
        ..World::default()
    });
    let plan = Plan {
        drain: Duration::ZERO,
        postcopy: how != How::Precopy,
    };
    let patience = Patience::new(Duration::from_secs(600), world.borrow().cancel.clone());
    let outcome = relocate(&mut Source(&world), Destination(&world), &plan, &patience);
    let outcome = outcome.and_then(|arrival| {
        let life = world.borrow().source;
        assert!(matches!(life, Life::Left | Life::Ended), "{life:?}");
        arrival.go().map(drop).map_err(NotMoved::Lost)
    });
    (outcome, world.into_inner())
}

/// The steps of a move in which nothing comes between.
const ALL: [Step; 10] = [
    Step::Open,
    Step::Precopy(0),
    Step::Prepare,
    Step::Precopy(1),
    Step::Prepare,
    Step::Quiesce,
    Step::Save(2),
    Step::Restore,
    Step::Leave,
    Step::Go,
];

/// When this step comes if nothing comes between.
fn at(step: Step) -> usize {
    ALL.iter().position(|taken| *taken == step).unwrap()
}

const FAULTS: [Fault; 6] = [
    Fault::Refuses,
    Fault::Ends,
    Fault::Late,
    Fault::Cancelled,
    Fault::Grows(MUCH),
    Fault::Grows(MUCH + 1),
];

/// What holds, whatever has come between.
fn check(outcome: &Result<(), NotMoved>, world: &World) {
    let at = |step: Step| world.steps.iter().position(|taken| *taken == step);
    let (leave, go) = (at(Step::Leave), at(Step::Go));
    let is_served_twice = world.destination_serves && world.source == Life::Serves;
    assert!(!is_served_twice, "{world:?}");
    let rounds = world
        .steps
        .iter()
        .filter(|step| matches!(step, Step::Precopy(_)));
    assert!(rounds.count() <= APPLICATION.most as usize, "{world:?}");
    match outcome {
        Ok(()) => {
            assert!(world.destination_serves && world.is_restored, "{world:?}");
            let has_contents = !world.keeps || world.source == Life::Left;
            assert!(has_contents, "it lacks memory: {world:?}");
        }
        // Its worker serves on, if it lives.
        Err(NotMoved::Stays(_)) => {
            let stays = matches!(world.source, Life::Serves | Life::Ended);
            assert!(stays && go.is_none(), "{world:?}");
        }
        // Its worker was to leave, and never serves again.
        Err(NotMoved::Lost(_)) => {
            let left = matches!(world.source, Life::Left | Life::Ended);
            assert!(left && leave.is_some(), "{world:?}");
        }
    }
    if go.is_none() {
        let was_asked = world.steps.iter().any(|step| *step != Step::Open);
        let resumed = world.steps.last() == Some(&Step::Resume);
        assert_eq!(resumed, was_asked, "{world:?}");
    }
    let cancelled = world
        .faults
        .iter()
        .filter(|(_, fault)| *fault == Fault::Cancelled);
    let first = cancelled.map(|(at, _)| *at).min();
    if let (Some(cancelled), Some(leave)) = (first, leave) {
        assert!(cancelled >= leave, "whoever has asked was gone: {world:?}");
    }
}

#[test]
fn an_application_moves_by_these_steps() {
    for how in HOW {
        let (outcome, world) = moved(Vec::new(), how);
        assert!(outcome.is_ok() && world.steps == ALL, "{world:?}");
    }
}

#[test]
fn whatever_comes_between_at_two_steps_one_worker_serves_and_never_both() {
    // Further steps follow where one is taken again.
    let places = || (0..ALL.len() + 6).flat_map(|at| FAULTS.map(|fault| (at, fault)));
    for first in places() {
        for how in HOW {
            let (outcome, world) = moved(vec![first], how);
            check(&outcome, &world);
        }
        for second in places().filter(|(at, _)| *at > first.0) {
            for how in HOW {
                let (outcome, world) = moved(vec![first, second], how);
                check(&outcome, &world);
            }
        }
    }
}

#[test]
fn an_application_stays_if_one_step_fails_but_for_a_round_and_for_a_source_that_leaves() {
    for (at, step) in ALL.iter().enumerate().take(ALL.len() - 1) {
        for fault in [Fault::Refuses, Fault::Ends, Fault::Late] {
            let (outcome, world) = moved(vec![(at, fault)], How::Precopy);
            let moves = match (step, fault) {
                // It is saved while it stands still.
                (Step::Precopy(0), Fault::Refuses) => true,
                // Its end serves as well.
                (Step::Leave, Fault::Ends | Fault::Late) => true,
                _ => false,
            };
            assert_eq!(outcome.is_ok(), moves, "{fault:?}: {world:?}");
            if *step == Step::Leave && fault == Fault::Late {
                assert_eq!(world.source, Life::Ended);
            }
        }
    }
    let (_, world) = moved(vec![(1, Fault::Refuses)], How::Precopy);
    assert!(world.steps.contains(&Step::Save(0)) && !world.steps.contains(&Step::Prepare));
}

#[test]
fn who_has_asked_may_go_before_the_source_is_to_leave_and_not_after() {
    for at in 0..ALL.len() {
        let (outcome, world) = moved(vec![(at, Fault::Cancelled)], How::Precopy);
        let is_before = ALL[..at + 1].iter().all(|step| *step != Step::Leave);
        let cancelled = matches!(outcome, Err(NotMoved::Stays(Failure::Cancelled)));
        assert_eq!(
            (cancelled, outcome.is_ok()),
            (is_before, !is_before),
            "{world:?}"
        );
    }
}

#[test]
fn what_is_created_after_a_round_comes_by_another_one_if_it_is_much_and_none_is_to_follow() {
    let rounds = |bytes, how| {
        moved(vec![(at(Step::Quiesce), Fault::Grows(bytes))], how)
            .1
            .rounds
    };
    assert_eq!(rounds(MUCH, How::Precopy), (2, 2));
    assert_eq!(rounds(MUCH + 1, How::Precopy), (3, 3));
    assert_eq!(rounds(MUCH + 1, How::Postcopy { keeps: true }), (2, 2));
    // One that never ends to create memory moves after some rounds.
    let faults = (0..40).map(|at| (at, Fault::Grows(2 * MUCH))).collect();
    let (outcome, world) = moved(faults, How::Precopy);
    check(&outcome, &world);
    assert!(
        outcome.is_ok() && world.rounds == (APPLICATION.most, APPLICATION.most),
        "{world:?}"
    );
}

#[test]
fn an_application_whose_source_ends_as_it_leaves_is_lost_if_that_kept_contents() {
    for fault in [Fault::Ends, Fault::Late] {
        for how in HOW {
            let (outcome, world) = moved(vec![(at(Step::Leave), fault)], how);
            assert_eq!(world.source, Life::Ended);
            let is_lost = matches!(outcome, Err(NotMoved::Lost(_)));
            assert_eq!(is_lost, world.keeps, "{outcome:?}");
            assert_eq!(world.destination_serves, !is_lost, "{world:?}");
        }
    }
}

#[test]
fn an_application_is_lost_if_nobody_knows_whether_its_source_has_left_and_that_does_not_end() {
    let leave = at(Step::Leave);
    for how in HOW {
        let (outcome, world) = moved(vec![(leave, Fault::Late), (leave + 1, Fault::Late)], how);
        assert_eq!(world.steps[leave + 1], Step::End);
        assert!(matches!(outcome, Err(NotMoved::Lost(_))), "{outcome:?}");
        assert!(!world.destination_serves, "{world:?}");
    }
}

#[test]
fn a_source_resumes_when_the_thread_that_moves_its_application_panics() {
    for at in 1..ALL.len() - 1 {
        let world = RefCell::new(World {
            faults: vec![(at, Fault::Panics)],
            ..World::default()
        });
        let plan = Plan {
            drain: Duration::ZERO,
            postcopy: false,
        };
        let patience = Patience::within(Duration::from_secs(600));
        let panicked = panic::catch_unwind(panic::AssertUnwindSafe(|| {
            relocate(&mut Source(&world), Destination(&world), &plan, &patience).map(drop)
        }));
        let world = world.into_inner();
        assert!(
            panicked.is_err() && world.steps.last() == Some(&Step::Resume),
            "{world:?}"
        );
        assert_eq!(world.source, Life::Serves, "{world:?}");
    }
}
