//! Tests the guarantees of each policy against clients that come, use the device and leave at
//! random.

use std::{collections::BTreeMap, time::Duration};

use proptest::{collection::vec, prelude::*};

use super::{ClientId, Name, NoWeight, Weight};
use crate::{
    Expected, Moment,
    scheduler::{Dispatch, LONGEST_PAUSE, Scheduler},
};

fn weight(number: u32) -> Weight {
    Weight::try_from(number).unwrap()
}

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

/// A scheduler with clients that all want the device, and the current time.
struct Play {
    scheduler: Scheduler,
    weights: Vec<u32>,
    now: Moment,
    used: Vec<Duration>,
}

impl Play {
    fn new(policy: Name, weights: &[u32]) -> Self {
        let mut scheduler = Scheduler::new(policy.make());
        for (index, &number) in weights.iter().enumerate() {
            let id = ClientId(index as u32);
            scheduler.join(id, weight(number), Moment::START);
            scheduler.want(id, Moment::START);
        }
        Self {
            scheduler,
            weights: weights.to_vec(),
            now: Moment::START,
            used: vec![Duration::ZERO; weights.len()],
        }
    }

    /// Gives one turn, in which the client uses what `lengths` says for it. Returns the client's
    /// index.
    fn turn(&mut self, lengths: &[Duration]) -> usize {
        let grant = loop {
            match self.scheduler.dispatch(self.now) {
                Dispatch::Grant(grant) => break grant,
                Dispatch::At(moment) => {
                    assert!(moment > self.now, "the time does not go on");
                    self.now = moment;
                }
                Dispatch::Nothing => panic!("nobody got a device that all want"),
            }
        };
        let index = grant.client.0 as usize;
        self.now += lengths[index];
        self.used[index] += lengths[index];
        self.scheduler.charge(lengths[index], 0, self.now);
        self.scheduler.done(self.now);
        self.scheduler.want(grant.client, self.now);
        index
    }

    /// What each client used per unit of its weight.
    fn normal(&self) -> Vec<Duration> {
        let both = self.used.iter().zip(&self.weights);
        both.map(|(&used, &weight)| used / weight).collect()
    }
}

fn policies() -> impl Strategy<Value = Name> {
    proptest::sample::select(Name::ALL.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_device_that_somebody_wants_is_never_kept_free_for_longer_than_half_a_millisecond(
        policy in policies(),
        steps in vec((0u32..6, 0u8..3, 1u64..50_000), 1..200),
    ) {
        let mut scheduler = Scheduler::new(policy.make());
        for id in 0..6 {
            scheduler.join(ClientId(id), weight(id + 1), Moment::START);
        }
        let mut now = Moment::START;
        let mut waiting = std::collections::BTreeSet::new();
        for (id, what, micros) in steps {
            now += Duration::from_micros(micros);
            let id = ClientId(id);
            if let Some(holder) = scheduler.holder() {
                scheduler.charge(Duration::from_micros(micros), 0, now);
                scheduler.done(now);
                if what == 0 {
                    scheduler.want(holder, now);
                    waiting.insert(holder);
                }
            }
            if what == 1 {
                scheduler.give_up(id, now);
                waiting.remove(&id);
            } else {
                scheduler.want(id, now);
                waiting.insert(id);
            }
            prop_assert_eq!(scheduler.contended(), !waiting.is_empty());
            let mut dispatch = scheduler.dispatch(now);
            if let Dispatch::At(moment) = dispatch {
                prop_assert!(moment.since(now) <= Duration::from_micros(500));
                dispatch = scheduler.dispatch(moment);
            }
            match dispatch {
                Dispatch::Grant(grant) => prop_assert!(waiting.remove(&grant.client)),
                Dispatch::Nothing => prop_assert!(waiting.is_empty()),
                Dispatch::At(_) => prop_assert!(false, "kept free for longer"),
            }
        }
    }

    #[test]
    fn everybody_who_wants_the_device_gets_it_again_and_again(
        policy in policies(),
        clients in vec((1u32..5, 1_000u64..20_000), 2..6),
    ) {
        let weights: Vec<u32> = clients.iter().map(|client| client.0).collect();
        let lengths: Vec<_> =
            clients.iter().map(|client| Duration::from_micros(client.1)).collect();
        let mut play = Play::new(policy, &weights);
        let mut last = vec![Moment::START; weights.len()];
        let end = Moment::START + Duration::from_secs(3);
        while play.now < end {
            let index = play.turn(&lengths);
            // The lightest client has a twentieth. Nobody waits longer than for the maximum debt of
            // itself and the others: twenty times 30 ms of credit, or twenty turns of 20 ms.
            prop_assert!(play.now.since(last[index]) < Duration::from_secs(1));
            last[index] = play.now;
        }
        prop_assert!(last.iter().all(|last| end.since(*last) < Duration::from_secs(1)));
    }

    #[test]
    fn fair_queueing_keeps_two_clients_within_a_turn_of_each(
        clients in vec((1u32..10, vec(1u64..100_000, 1..8)), 2..6),
    ) {
        let weights: Vec<u32> = clients.iter().map(|client| client.0).collect();
        let mut play = Play::new(Name::Fair, &weights);
        let mut turns = vec![0; weights.len()];
        // The maximum by which one turn advances each client.
        let steps: Vec<Duration> = clients
            .iter()
            .map(|(weight, lengths)| {
                Duration::from_micros(*lengths.iter().max().unwrap()) / *weight
            })
            .collect();
        for _ in 0..300 {
            let lengths: Vec<_> = clients
                .iter()
                .zip(&turns)
                .map(|((_, lengths), turn)| Duration::from_micros(lengths[turn % lengths.len()]))
                .collect();
            turns[play.turn(&lengths)] += 1;
            let normal = play.normal();
            for (i, one) in normal.iter().enumerate() {
                for (j, other) in normal.iter().enumerate() {
                    // The theorem of start-time fair queueing; division rounds by less than 1 us.
                    let bound = steps[i] + steps[j] + Duration::from_micros(1);
                    prop_assert!(one.saturating_sub(*other) <= bound);
                }
            }
        }
    }

    #[test]
    fn credit_and_band_give_parts_by_weight_if_kernels_are_short(
        policy in proptest::sample::select(vec![Name::Credit, Name::Band]),
        weights in vec(1u32..5, 2..6),
        micros in 500u64..2_000,
    ) {
        let lengths = vec![Duration::from_micros(micros); weights.len()];
        let mut play = Play::new(policy, &weights);
        while play.now < Moment::START + Duration::from_secs(5) {
            play.turn(&lengths);
        }
        let normal = play.normal();
        let (least, most) = (normal.iter().min().unwrap(), normal.iter().max().unwrap());
        prop_assert!(least.as_secs_f64() > 0.9 * most.as_secs_f64(), "{normal:?}");
    }

    #[test]
    fn a_client_that_leaves_at_any_moment_leaves_nothing_behind(
        policy in policies(),
        leaves in 0u32..3,
        waits in any::<bool>(),
        holds in any::<bool>(),
    ) {
        let mut play = Play::new(policy, &[1, 1, 1]);
        let id = ClientId(leaves);
        if holds {
            loop {
                if let Dispatch::Grant(grant) = play.scheduler.dispatch(play.now) {
                    if grant.client == id {
                        break;
                    }
                    play.scheduler.done(play.now);
                    play.scheduler.want(grant.client, play.now);
                }
                play.now += millis(1);
            }
        }
        if !waits {
            play.scheduler.give_up(id, play.now);
        }
        play.scheduler.leave(id, play.now);
        prop_assert_eq!(play.scheduler.figures(id, play.now), None);
        play.scheduler.want(id, play.now);
        for _ in 0..10 {
            prop_assert_ne!(play.turn(&[millis(1); 3]), leaves as usize);
        }
    }
}

#[test]
fn the_published_example_of_tags_is_played_turn_by_turn() {
    // FairGV, figure 4: weights 1 and 2, turns of 10 ms; the first is blocked from 70 to 105 ms.
    let mut scheduler = Scheduler::new(Name::Fair.make());
    let (one, two) = (ClientId(0), ClientId(1));
    scheduler.join(one, weight(1), Moment::START);
    scheduler.join(two, weight(2), Moment::START);
    scheduler.want(one, Moment::START);
    scheduler.want(two, Moment::START);
    let mut now = Moment::START;
    let mut order = Vec::new();
    for _ in 0..11 {
        let Dispatch::Grant(grant) = scheduler.dispatch(now) else {
            panic!("nobody has the device at {now:?}");
        };
        order.push(grant.client.0 + 1);
        let begin = now;
        now += millis(10);
        if begin.since(Moment::START) < millis(105) && now.since(Moment::START) > millis(105) {
            scheduler.want(one, Moment::START + millis(105));
        }
        scheduler.charge(millis(10), 0, now);
        scheduler.done(now);
        if grant.client == two || now.since(Moment::START) < millis(70) {
            scheduler.want(grant.client, now);
        }
    }
    assert_eq!(order, [1, 2, 2, 1, 2, 2, 1, 2, 2, 2, 2]);
    let Dispatch::Grant(grant) = scheduler.dispatch(now) else {
        panic!("nobody has the device");
    };
    assert_eq!(grant.client, one, "who woke up is next");
}

#[test]
fn what_a_worker_says_of_its_lateness_is_bounded_by_the_clock() {
    for policy in Name::ALL {
        let mut scheduler = Scheduler::new(policy.make());
        let (client, mut now) = (ClientId(0), Moment::START);
        scheduler.join(client, weight(1), now);
        for _ in 0..3 {
            now += millis(10);
            scheduler.charge_late(client, Duration::MAX, now);
            scheduler.charge_late(client, Duration::MAX, now);
        }
        let figures = scheduler.figures(client, now).unwrap();
        assert_eq!(figures.device_time, millis(30), "{policy:?}");
    }
}

#[test]
fn sleeping_for_a_moment_does_not_wipe_out_the_debt_of_a_long_kernel() {
    let mut play = Play::new(Name::Fair, &[1, 1]);
    let lengths = [millis(100), millis(1)];
    assert_eq!(play.turn(&lengths), 0);
    play.scheduler.give_up(ClientId(0), play.now);
    assert_eq!(play.turn(&lengths), 1);
    play.scheduler.want(ClientId(0), play.now);
    for _ in 0..98 {
        assert_eq!(play.turn(&lengths), 1);
    }
}

#[test]
fn who_was_alone_for_long_owes_nothing_to_who_comes() {
    let mut scheduler = Scheduler::new(Name::Fair.make());
    let (old, new) = (ClientId(0), ClientId(1));
    scheduler.join(old, weight(1), Moment::START);
    scheduler.want(old, Moment::START);
    let mut now = Moment::START;
    assert!(matches!(scheduler.dispatch(now), Dispatch::Grant(_)));
    now += Duration::from_secs(10);
    scheduler.join(new, weight(1), now);
    scheduler.charge(Duration::from_secs(10), 0, now);
    scheduler.want(new, now);
    let mut turns = BTreeMap::new();
    for _ in 0..10 {
        now += millis(6);
        scheduler.charge(millis(6), 0, now);
        let holder = scheduler.holder().unwrap();
        scheduler.done(now);
        scheduler.want(holder, now);
        *turns.entry(holder).or_insert(0) += 1;
        assert!(matches!(scheduler.dispatch(now), Dispatch::Grant(_)));
    }
    assert_eq!(turns[&old], 5);
}

#[test]
fn who_has_used_little_for_long_does_not_keep_others_from_the_device_for_long() {
    let mut scheduler = Scheduler::new(Name::Fair.make());
    let (little, much) = (ClientId(0), ClientId(1));
    let mut now = Moment::START;
    for id in [little, much] {
        scheduler.join(id, weight(1), now);
    }
    let mut turn = |scheduler: &mut Scheduler, used: Duration| {
        assert!(matches!(scheduler.dispatch(now), Dispatch::Grant(_)));
        let holder = scheduler.holder().unwrap();
        now += used;
        scheduler.charge(used, 0, now);
        scheduler.done(now);
        (holder, now)
    };
    // One millisecond out of eight, for eight seconds: the client is always back in a moment.
    scheduler.want(much, Moment::START);
    for _ in 0..1000 {
        let (mut holder, mut at) = turn(&mut scheduler, millis(6));
        if holder == little {
            scheduler.away(little, Expected::default(), at, at);
            (holder, at) = turn(&mut scheduler, millis(6));
        }
        assert_eq!(holder, much);
        scheduler.want(much, at);
        scheduler.want(little, at);
        let (holder, at) = turn(&mut scheduler, millis(1));
        match holder == little {
            true => scheduler.away(little, Expected::default(), at, at),
            false => scheduler.want(much, at),
        }
    }
    // From now on, it wants all that it can get.
    let mut in_a_row = 0;
    loop {
        let (holder, at) = turn(&mut scheduler, millis(6));
        scheduler.want(holder, at);
        scheduler.want(little, at);
        match holder == much {
            true if in_a_row > 0 => break,
            true => {}
            false => in_a_row += 1,
        }
        assert!(in_a_row < 40, "the other one waits for {in_a_row} turns");
    }
}

#[test]
fn nobody_is_waited_for_who_may_stay_away_for_longer_than_the_longest_pause() {
    let kept_after = |within, longest| {
        let mut scheduler = Scheduler::new(Name::Fair.make());
        scheduler.set_longest_pause(longest);
        let (away, waits) = (ClientId(0), ClientId(1));
        let mut now = Moment::START;
        for id in [away, waits] {
            scheduler.join(id, weight(1), now);
            scheduler.want(id, now);
        }
        // The client that leaves has had less by then, so it is owed the device.
        for used in [millis(1), millis(30)] {
            assert!(matches!(scheduler.dispatch(now), Dispatch::Grant(_)));
            let holder = scheduler.holder().unwrap();
            now += used;
            scheduler.charge(used, 0, now);
            scheduler.done(now);
            if holder == waits {
                scheduler.want(waits, now);
            }
        }
        let expected = Expected {
            within,
            usual: within,
            batch: Duration::MAX,
        };
        scheduler.away(away, expected, now, now);
        match scheduler.dispatch(now) {
            Dispatch::At(until) => until.since(now),
            _ => Duration::ZERO,
        }
    };
    assert_eq!(kept_after(millis(10), LONGEST_PAUSE), millis(10));
    assert_eq!(kept_after(millis(11), LONGEST_PAUSE), Duration::ZERO);
    assert_eq!(kept_after(Duration::MAX, LONGEST_PAUSE), Duration::ZERO);
    assert_eq!(kept_after(millis(40), millis(50)), millis(40));
    assert_eq!(kept_after(millis(1), Duration::ZERO), Duration::ZERO);
}

#[test]
fn many_synchronous_calls_make_a_client_interactive_and_few_do_not() {
    for (calls, interactive) in [(20, true), (2, false)] {
        let mut scheduler = Scheduler::new(Name::Fair.make());
        let id = ClientId(0);
        scheduler.join(id, weight(1), Moment::START);
        scheduler.want(id, Moment::START);
        assert!(matches!(
            scheduler.dispatch(Moment::START),
            Dispatch::Grant(grant) if !grant.coschedule
        ));
        let now = Moment::START + millis(6);
        scheduler.charge(millis(6), calls, now);
        scheduler.done(now);
        scheduler.want(id, now);
        assert!(matches!(
            scheduler.dispatch(now),
            Dispatch::Grant(grant) if grant.coschedule == interactive
        ));
    }
}

#[test]
fn weights_and_names_that_make_no_sense_are_refused_with_what_does() {
    assert_eq!("7".parse(), Ok(weight(7)));
    for text in ["0", "10001", "-1", "x"] {
        assert_eq!(text.parse::<Weight>(), Err(NoWeight(text.to_owned())));
    }
    assert!(
        "fari"
            .parse::<Name>()
            .unwrap_err()
            .to_string()
            .contains("fair")
    );
    for name in Name::ALL {
        assert_eq!(name.to_string().parse(), Ok(name));
    }
}
