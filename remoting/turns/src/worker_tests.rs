//! What a worker tells the arbiter, and when.

use std::sync::mpsc;

use super::{
    super::fake::{self, Fake},
    *,
};

const CLASS: RequestClass = RequestClass(1);
const SLICE: u64 = 6_000_000;

fn start() -> (Turns, Fake) {
    let (control, pool) = UnixStream::pair().unwrap();
    let turns = Turns::start(control, &fake::join(), |_| {}).unwrap();
    fake::belongs(&pool);
    (turns, Fake::meet(pool))
}

/// Lets the worker have a turn that begins at `now`.
fn turn(turns: &mut Turns, fake: &Fake, now: Moment, contended: bool) {
    while fake.heard() != Some(Word::Want) {
        assert!(!turns.may_submit(CLASS, false, now));
        thread::sleep(Duration::from_millis(1));
    }
    fake.give(SLICE, contended);
    assert!(turns.may_submit(CLASS, false, now));
}

fn millis(count: u64) -> Moment {
    Moment::from_nanos(count * 1_000_000)
}

#[test]
fn what_only_the_client_can_bring_to_an_end_runs_in_nobodys_time() {
    for contended in [false, true] {
        let (mut turns, fake) = start();
        let since = || fake.account.running_since.load(Ordering::Relaxed);
        turn(&mut turns, &fake, millis(1), contended);
        turns.submitted(CLASS, millis(1));
        assert_eq!(since(), millis(1).nanos());
        turns.idle(true);
        assert_eq!(since(), 0, "somebody waits: {contended}");
    }
}

#[test]
fn a_turn_that_is_given_back_too_early_is_owned_up_to_once() {
    let (mut turns, fake) = start();
    let overrun = |fake: &Fake| fake.account.overrun.load(Ordering::Relaxed);
    turn(&mut turns, &fake, millis(0), true);
    for at in 0..5 {
        assert!(turns.may_submit(CLASS, false, millis(at)));
        turns.submitted(CLASS, millis(at));
        turns.completed(1, millis(at + 1));
    }
    // The sixth of a millisecond each is to end the turn.
    assert!(turns.may_submit(CLASS, false, millis(5)));
    turns.submitted(CLASS, millis(5));
    assert!(!turns.may_submit(CLASS, false, millis(5)));
    assert_eq!(fake.heard(), None);
    assert!(!turns.may_submit(CLASS, false, Moment::from_nanos(5_800_000)));
    assert_eq!(fake.heard(), Some(Word::Again));
    let since = fake.account.running_since.load(Ordering::Relaxed);
    assert_eq!(since, millis(5).nanos(), "it still uses the device");
    turns.completed(1, millis(1_006));
    let late = Duration::from_secs(1) - LEAD * 2;
    assert_eq!(overrun(&fake), late.as_nanos() as u64);
    assert_eq!(fake.account.running_since.load(Ordering::Relaxed), 0);
    // Another arbiter has not given that turn.
    let fake = fake.replace();
    turn(&mut turns, &fake, millis(2_000), true);
    turns.submitted(CLASS, millis(2_000));
    turns.completed(1, millis(2_001));
    assert_eq!(overrun(&fake), 0);
    assert_eq!(fake.account.busy.load(Ordering::Relaxed), 1_000_000);
}

#[test]
fn who_is_between_two_batches_keeps_its_turn_until_that_is_taken_and_then_asks_for_another() {
    let (mut turns, fake) = start();
    let claim = || fake.account.claim.load(Ordering::Relaxed);
    turn(&mut turns, &fake, millis(0), true);
    let mut now = 0;
    let mut batch = |turns: &mut Turns| {
        turns.submitted(CLASS, millis(now));
        turns.completed(1, millis(now + 1));
        turns.idle(false);
        now += 2;
        millis(now)
    };
    for _ in 0..2 {
        let back = batch(&mut turns);
        assert_eq!(claim(), claim::IDLE);
        assert_eq!(fake.heard(), Some(Word::Pause));
        // A millisecond later, in what is left of the turn of 6 ms.
        assert!(turns.may_submit(CLASS, false, back));
        assert_eq!(claim(), claim::BUSY);
    }
    let within = fake.account.away_within.load(Ordering::Relaxed);
    assert_eq!(
        within, 1_350_000,
        "a quarter more than a millisecond, and 100 us"
    );
    let back = batch(&mut turns);
    assert_eq!(fake.heard(), Some(Word::Pause));
    fake.account.claim.store(claim::NONE, Ordering::Relaxed);
    assert!(!turns.may_submit(CLASS, false, back));
    assert_eq!(fake.heard(), Some(Word::Want));
}

#[test]
fn who_has_stayed_away_gives_its_turn_back_at_once() {
    let (mut turns, fake) = start();
    turn(&mut turns, &fake, millis(0), true);
    turns.submitted(CLASS, millis(0));
    turns.completed(1, millis(1));
    turns.idle(false);
    assert_eq!(fake.heard(), Some(Word::Pause));
    fake.account.claim.store(claim::NONE, Ordering::Relaxed);
    turn(&mut turns, &fake, millis(500), true);
    turns.submitted(CLASS, millis(500));
    turns.completed(1, millis(501));
    turns.idle(false);
    assert_eq!(fake.heard(), Some(Word::Done));
}

#[test]
fn an_arbiter_that_hangs_up_again_and_again_is_reported_once_with_both_versions() {
    let (control, pool) = UnixStream::pair().unwrap();
    let (sender, told) = mpsc::channel();
    let tell = move |news| sender.send(news).unwrap();
    let _turns = Turns::start(control, &fake::join(), tell).unwrap();
    fake::belongs(&pool);
    let hangs_up = |times: u32| (0..times).for_each(|time| Fake::that_hangs_up(&pool, time == 0));
    // One that is just ending is nothing to report, nor is one more after another arbiter.
    hangs_up(1);
    let fake = Fake::meet(pool.try_clone().unwrap());
    assert_eq!(told.recv(), Ok(News::Look));
    drop(fake);
    assert_eq!(told.recv(), Ok(News::Look));
    hangs_up(1);
    assert_eq!(told.try_recv(), Err(mpsc::TryRecvError::Empty));
    hangs_up(2);
    assert_eq!(told.recv(), Ok(News::HangsUp(HangsUp)));
    let text = HangsUp.to_string();
    assert!(
        text.contains("version 1 ") && text.contains(&format!("speaks {}", message::VERSION)),
        "{text}"
    );
    let _fake = Fake::meet(pool);
    assert_eq!(told.recv(), Ok(News::Look), "it was reported again");
}
