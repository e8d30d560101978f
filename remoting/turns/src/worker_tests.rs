//! What a worker tells the arbiter, and when.

use std::sync::{atomic::AtomicU64, mpsc};

use super::{
    super::{
        fake::{self, Fake},
        page::sight,
        slices::{Use, Worked},
        waits::{CLASSES, bound},
    },
    *,
};

const CLASS: RequestClass = RequestClass(1);
const SLICE: u64 = 6_000_000;

fn start() -> (Turns, Fake) {
    let (control, pool) = UnixStream::pair().unwrap();
    let turns = Turns::start(control, &fake::join(), None, |_| {}).unwrap();
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
fn waits_for_a_turn_and_between_completions_are_counted() {
    let (mut turns, fake) = start();
    let mut counted = [0; CLASSES];
    let mut waited = |expected: &[u64]| {
        let now = fake.account.waits.read();
        let before = std::mem::replace(&mut counted, now);
        let new = now.iter().zip(before).enumerate();
        let new = new.flat_map(|(class, (now, before))| vec![class; (now - before) as usize]);
        let within = |(class, expected): (usize, &u64)| {
            let least = class.checked_sub(1).map_or(Duration::ZERO, bound);
            let expected = Duration::from_millis(*expected);
            least <= expected && expected < bound(class)
        };
        let new: Vec<usize> = new.collect();
        assert_eq!(new.len(), expected.len());
        assert!(new.into_iter().zip(expected).all(within), "{expected:?}");
    };
    // Asked for the first time at 10 ms.
    turn(&mut turns, &fake, millis(10), false);
    assert!(turns.may_submit(CLASS, false, millis(30)));
    turns.submitted(CLASS, millis(30));
    turns.submitted(CLASS, millis(31));
    turns.completed(1, millis(50));
    waited(&[40]);
    turns.completed(1, millis(51));
    waited(&[1]);
    // A call that submits nothing does not count.
    assert!(turns.may_submit(CLASS, false, millis(100)));
    turns.carried_out(millis(100));
    assert!(turns.may_submit(CLASS, false, millis(200)));
    turns.submitted(CLASS, millis(200));
    turns.completed(1, millis(203));
    waited(&[3]);
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
    let _turns = Turns::start(control, &fake::join(), None, tell).unwrap();
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

/// Time slices of a worker that only notes what it was told.
#[derive(Clone, Default)]
struct Noted(Arc<Mutex<Vec<String>>>);

impl Noted {
    fn note(&self, what: &str) {
        self.0.lock().unwrap().push(what.to_owned());
    }

    /// Waits until the last thing that it was told is this one.
    fn wait_for(&self, what: &str) {
        while self.0.lock().unwrap().last().map(String::as_str) != Some(what) {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Slices for Noted {
    fn set(&mut self, slice: Duration) {
        self.note(&format!("{slice:?}"));
    }

    fn stop(&mut self) -> bool {
        self.note("stop");
        true
    }

    fn keep(&mut self) -> bool {
        true
    }

    fn start(&mut self) {
        self.note("start");
    }

    fn used(&mut self, _: Duration) -> Option<Use> {
        None
    }

    fn end_use(&mut self) {}

    fn gpus(&self) -> u64 {
        4
    }
}

/// Contexts that are seen by a record alone: so many times 100 s of work at each look; `None`: they take no part.
#[derive(Clone)]
struct Recording(Noted, Arc<Mutex<Option<u32>>>);

impl Slices for Recording {
    fn works(&mut self) -> bool {
        self.1.lock().unwrap().is_some()
    }

    fn set(&mut self, slice: Duration) {
        self.0.set(slice);
    }

    fn stop(&mut self) -> bool {
        self.0.stop()
    }

    fn keep(&mut self) -> bool {
        true
    }

    fn start(&mut self) {
        self.0.start();
    }

    fn used(&mut self, _: Duration) -> Option<Use> {
        let (total, alone) = (Duration::from_secs(7), false);
        Some(Use { total, alone })
    }

    fn worked(&mut self, _: bool, _: Duration) -> Worked {
        let mut looks = self.1.lock().unwrap();
        *looks = looks.map(|looks| looks + 1);
        Worked::Recorded(Duration::from_secs(100) * looks.unwrap_or_default())
    }

    fn end_use(&mut self) {}

    fn gpus(&self) -> u64 {
        4
    }
}

#[test]
fn who_does_not_see_its_clients_work_reports_what_is_recorded() {
    let (control, pool) = UnixStream::pair().unwrap();
    let (said, heard) = std::sync::mpsc::channel();
    let recording = Recording(Noted::default(), Arc::new(Mutex::new(Some(0))));
    let slices = Box::new(recording.clone());
    let tell = move |sharing| said.send(sharing).unwrap();
    share_slices(control, &fake::join(), slices, tell).unwrap();
    let fake = Fake::meet_sliced(pool);
    let value = |place: &AtomicU64| place.load(Ordering::Relaxed);
    let sight = || fake.account.sight.load(Ordering::Relaxed);
    let wait = |until: &dyn Fn() -> bool| {
        while !until() {
            thread::sleep(Duration::from_millis(1));
        }
    };
    // Turns are nothing for it, and the arbiter knows.
    wait(&|| sight() == sight::RECORD);
    assert_eq!(fake.heard(), None);
    fake.share_by_slices(true);
    wait(&|| value(&fake.account.present_until) > value(&fake.account.present_since));
    assert_eq!(value(&fake.account.metered), 7_000_000_000);
    assert_eq!(value(&fake.account.gpus), 4);
    fake.stop_until(Moment::now() + Duration::from_secs(10_000));
    recording.0.wait_for("stop");
    // What does not work any more is not done.
    *recording.1.lock().unwrap() = None;
    recording.0.wait_for("start");
    wait(&|| sight() == sight::NOTHING && value(&fake.account.gpus) == 0);
    drop(fake);
    // The pool has ended, too: it says so, and asks nobody any more.
    let said: Vec<Sharing> = heard.iter().collect();
    assert_eq!(said.first(), Some(&Sharing::By(Mode(0))));
    assert!(said.contains(&Sharing::By(Mode(1))));
    let end = [Sharing::Ended, Sharing::Abandoned];
    assert!(said.ends_with(&end), "{said:?}");
}

fn sliced() -> (Turns, Fake, Noted) {
    let (control, pool) = UnixStream::pair().unwrap();
    let noted = Noted::default();
    let slices = Box::new(noted.clone());
    let turns = Turns::start(control, &fake::join(), Some(slices), |_| {}).unwrap();
    (turns, Fake::meet_sliced(pool), noted)
}

#[test]
fn in_time_slices_everybody_submits_and_reports_its_use() {
    let (mut turns, fake, _) = sliced();
    fake.share_by_slices(true);
    while !turns.may_submit(CLASS, false, millis(1)) {
        thread::sleep(Duration::from_millis(1));
    }
    let value = |place: &AtomicU64| place.load(Ordering::Relaxed);
    for _ in 0..3 {
        assert!(turns.may_submit(CLASS, false, millis(1)));
        turns.submitted(CLASS, millis(1));
    }
    assert_eq!(value(&fake.account.present_until), u64::MAX);
    // The device had somebody else's slice before the last one.
    for (span, now) in [(None, 2), (Some(1), 3), (Some(7), 10)] {
        turns.took(span.map(Duration::from_millis), millis(now));
        turns.completed(1, millis(now));
    }
    let measured = value(&fake.account.measured);
    assert!((2_900_000..3_100_000).contains(&measured), "{measured}");
    assert!(value(&fake.account.present_until) < millis(11).nanos());
    assert_eq!(value(&fake.account.running_since), 0);
    while fake.heard() == Some(Word::Want) {}
    assert_eq!(fake.heard(), None);
    // Back to turns, which it has to ask for.
    fake.share_by_slices(false);
    while fake.heard() != Some(Word::Want) {
        assert!(!turns.may_submit(CLASS, false, millis(20)));
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_the_driver_has_when_turns_begin_is_told_and_owed() {
    let (mut turns, fake, _) = sliced();
    fake.share_by_slices(true);
    while !turns.may_submit(CLASS, false, Moment::now()) {
        thread::sleep(Duration::from_millis(1));
    }
    turns.submitted(CLASS, Moment::now());
    let value = |place: &AtomicU64| place.load(Ordering::Relaxed);
    assert_eq!(value(&fake.account.running_since), 0);
    fake.share_by_slices(false);
    while value(&fake.account.running_since) == 0 {
        turns.look();
        thread::sleep(Duration::from_millis(1));
    }
    turns.completed(1, Moment::now() + Duration::from_secs(1));
    assert!(value(&fake.account.overrun) > 900_000_000);
    assert_eq!(value(&fake.account.running_since), 0);
}

#[test]
fn who_is_stopped_goes_on_when_the_time_is_over_or_the_arbiter_ends() {
    let (_turns, fake, noted) = sliced();
    fake.share_by_slices(true);
    let soon = Moment::now() + Duration::from_millis(50);
    fake.stop_until(soon);
    noted.wait_for("stop");
    // Nobody says more.
    noted.wait_for("start");
    assert!(Moment::now() >= soon);
    fake.stop_until(Moment::now() + Duration::from_secs(10_000));
    noted.wait_for("stop");
    drop(fake);
    noted.wait_for("start");
}

#[test]
fn who_waits_for_a_turn_asks_again_after_the_way_of_sharing_has_changed_twice() {
    let (mut turns, fake, _) = sliced();
    while fake.heard() != Some(Word::Want) {
        assert!(!turns.may_submit(CLASS, false, millis(1)));
        thread::sleep(Duration::from_millis(1));
    }
    fake.share_by_slices(true);
    fake.share_by_slices(false);
    assert!(!turns.may_submit(CLASS, false, millis(2)));
    assert_eq!(fake.heard(), Some(Word::Want));
}

#[test]
fn a_call_that_submits_nothing_is_no_work() {
    let (mut turns, fake, _) = sliced();
    fake.share_by_slices(true);
    while !turns.may_submit(CLASS, false, millis(1)) {
        thread::sleep(Duration::from_millis(1));
    }
    turns.carried_out(millis(1));
    let until = fake.account.present_until.load(Ordering::Relaxed);
    assert!(until < millis(2).nanos(), "{until}");
}
