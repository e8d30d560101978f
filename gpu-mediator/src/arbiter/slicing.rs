//! Sharing by time slices: a ledger for each GPU, fed with what workers report, and what it says told to them.
//!
//! Nothing is sent for a client that is alone. Reports and what workers are told are in the shared pages; a byte wakes a
//! worker only when its slice changes, or it is to stop or to go on.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::Ordering,
    time::Duration,
};

use base::note::Seldom;
use remoting_turns::page::Mode;

use super::{Arbiter, Member, Over, Terms};
use crate::{
    Moment,
    policy::{
        Class, ClientId, Name,
        ledger::{LEAST_SLICE, Ledger, PERIOD, Report},
    },
};

/// The device's record has for a client what passes until another one begins, whether it has work or not: no more of it
/// counts than the time for which it had some, now and so long before.
const SPARE: Duration = Duration::from_millis(60);
/// Of a worker that sees nothing but the record, what exceeds that is charged later, up to so much: it may have read the
/// record late.
const LATE: Duration = Duration::from_secs(1);
/// For how long reports are read as often after several clients have had work: most are back soon.
const GAP: Duration = Duration::from_millis(40);
/// Reading them takes at most one in this many parts of the time.
const READING: u32 = 10;
/// How often reports are read while no two clients have work at the same time.
const IDLE_PERIOD: Duration = Duration::from_millis(20);
/// How often if nobody has had work for [`QUIET_AFTER`] reviews.
const QUIET_PERIOD: Duration = Duration::from_millis(100);
const QUIET_AFTER: u32 = 50;
/// For how long a worker stays stopped if the arbiter says nothing any more.
const HOLD: Duration = Duration::from_millis(120);
/// A request that has been a worker's oldest for so long is longer than a slice, whatever its worker expects.
const LONG: Duration = Duration::from_millis(50);
/// A smaller relative difference from the slice that a worker was told is not worth a call.
const WORTH: f64 = 0.04;
/// After turns, slices are used again when all workers could for so long.
pub(super) const SETTLED: Duration = Duration::from_secs(2);
/// A worker that had work before for so long is stopped with others of its client.
const RECENT: Duration = Duration::from_secs(1);
/// For how long a worker may go on although it was told to stop, if there is no limit for requests.
const DISOBEDIENCE: Duration = Duration::from_secs(10);

/// What was read of a worker's reports.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reported {
    /// When.
    at: Moment,
    present: Duration,
    measured: Duration,
    metered: Duration,
    is_metered: bool,
    /// For how long it has had work without using the device.
    spare: Duration,
    /// What it has used and was not charged for yet.
    late: Duration,
    /// When it last had work.
    worked: Moment,
    switching: Duration,
    completions: u64,
}

/// The state of sharing by time slices.
#[derive(Debug, Default)]
pub(super) struct Slicing {
    mode: Mode,
    /// By number of the GPU.
    pub(super) ledgers: BTreeMap<u32, Ledger>,
    next: Option<Moment>,
    /// When reports were last read.
    reviewed: Moment,
    /// Number of reviews since somebody had work.
    quiet: u32,
    /// When several clients had work last.
    several: Option<Moment>,
    /// Since when all workers could set their slices, while turns are taken.
    could: Option<Moment>,
    /// When the log last said how the device is shared.
    said: Seldom,
}

impl Slicing {
    /// Whether the device is shared by slices.
    pub(super) fn is_on(&self) -> bool {
        self.mode.is_slices()
    }

    /// A client's terms change.
    pub(super) fn set_terms(&mut self, client: ClientId, terms: Terms) {
        for ledger in self.ledgers.values_mut() {
            ledger.set_weight(client, terms.weight);
            ledger.set_class(client, terms.class);
        }
    }

    /// How the device is shared.
    pub(super) fn mode(&self) -> Mode {
        self.mode
    }

    /// When to read reports again, or to use slices again.
    pub(super) fn next(&self) -> Option<Moment> {
        match self.is_on() {
            true => self.next,
            false => self.could.map(|since| since + SETTLED),
        }
    }
}

/// What a worker has reported since the last review.
pub(super) struct News {
    vm: ClientId,
    gpus: u64,
    told_to_stop: bool,
    /// Whether it had work lately.
    is_recent: bool,
    pub(super) report: Report,
}

fn gpus(bits: u64) -> impl Iterator<Item = u32> {
    (0..u64::BITS).filter(move |gpu| bits >> gpu & 1 != 0)
}

/// Whether a worker can be told about its slices: what it reports is not divided among GPUs.
fn can_slice(member: &Member) -> bool {
    let gpus = member.worker.account().gpus.load(Ordering::Relaxed);
    member.sliced && gpus.count_ones() <= 1
}

impl Arbiter {
    /// Shares by slices if all workers can, otherwise by turns; and does what is due.
    pub(super) fn share_by_slices(&mut self, now: Moment) {
        let can = self.policy == Name::Ledger && self.members.values().all(can_slice);
        // One that comes and goes does not have all change each time.
        let since = *self.slicing.could.get_or_insert(now);
        let settled = now.since(since) >= SETTLED || self.slicing.mode == Mode::default();
        if !can {
            self.slicing.could = None;
        }
        let slices = can && (settled || self.slicing.is_on());
        if slices != self.slicing.is_on() {
            self.change_sharing(slices, now);
        }
        if self.slicing.is_on() && self.slicing.next.is_none_or(|next| next <= now) {
            self.review_slices(now);
        }
    }

    fn change_sharing(&mut self, slices: bool, now: Moment) {
        self.end_turn(false);
        for (id, vm) in &mut self.vms {
            vm.waiting.clear();
            self.scheduler.give_up(*id, now);
        }
        let mode = self.slicing.mode.next();
        // Accounts are kept: what was owed still is.
        (self.slicing.mode, self.slicing.next) = (mode, None);
        for ledger in self.slicing.ledgers.values_mut() {
            ledger.interrupt(now);
        }
        for member in self.members.values_mut() {
            member.disobeyed = Duration::ZERO;
            member.reported = None;
            // What the driver has runs on beside the turns, and is limited and charged from now on.
            member.behind = now;
            member.over = Some(Over {
                ended: now,
                counted: now,
            });
            // Others do not look.
            if member.sliced {
                member.worker.share(mode);
            }
        }
        if !self.members.values().any(|member| member.sliced) {
            return;
        }
        let Some(unsaid) = self.slicing.said.due() else {
            return;
        };
        if !slices {
            for name in self.beside_turns() {
                log::warn!(
                    "{name}: native contexts take no turns: they use the device beside the turns of others, and no weight holds \
                     until all workers can set their time slices"
                );
            }
        }
        let first = self.members.values().find(|member| !can_slice(member));
        match first.and_then(|member| self.vms.get(&member.vm)) {
            Some(vm) if !slices => log::info!(
                "a worker of {} cannot set its time slices, or has contexts on several GPUs: all take turns{unsaid}",
                vm.name
            ),
            _ => log::info!(
                "all workers can set their time slices: the device serves them at once{unsaid}"
            ),
        }
    }

    /// The clients with workers that are not shared by weight now: those that could take part in sharing by slices, while
    /// turns are taken.
    fn beside_turns(&self) -> BTreeSet<&str> {
        let members = self.members.values();
        let beside = members.filter(|member| !member.worker.sees_requests());
        let clients = beside.filter_map(|member| self.vms.get(&member.vm));
        clients.map(|vm| &vm.name[..]).collect()
    }

    /// Whether a client has workers that are not shared by weight now.
    pub(super) fn is_beside(&self, client: ClientId) -> bool {
        let own = |member: &&Member| member.vm == client;
        let beside = |member: &Member| {
            let worker = &member.worker;
            let has_contexts = worker.account().gpus.load(Ordering::Relaxed) != 0;
            let is_beside = !worker.sees_requests() && !self.slicing.is_on() && has_contexts;
            !worker.takes_part() || is_beside
        };
        self.members.values().filter(own).any(beside)
    }

    /// Reads reports, so that figures are those of now.
    pub(super) fn review_now(&mut self) {
        // Readers cause no additional reviews: slices are corrected once in a fixed number of reviews.
        let now = Moment::now();
        if self.slicing.is_on() && now.since(self.slicing.reviewed) >= PERIOD {
            self.review_slices(now);
        }
    }

    fn review_slices(&mut self, now: Moment) {
        self.slicing.reviewed = now;
        let news = self.read_reports(now);
        let numbers: BTreeSet<u32> = news.iter().flat_map(|news| gpus(news.gpus)).collect();
        self.slicing.ledgers.retain(|gpu, _| numbers.contains(gpu));
        let (mut most, mut any) = (0, false);
        for gpu in numbers {
            let ledger = self
                .slicing
                .ledgers
                .entry(gpu)
                .or_insert_with(|| Ledger::new(now));
            let here = || news.iter().filter(|news| news.gpus >> gpu & 1 != 0);
            let clients: BTreeSet<ClientId> = here().map(|news| news.vm).collect();
            // One without workers for now still owes what it has overdrawn.
            ledger.retain(|client| self.vms.contains_key(&client));
            for client in clients {
                let Some(vm) = self.vms.get_mut(&client) else {
                    continue;
                };
                if !ledger.has(client) {
                    ledger.join(client, vm.terms.weight);
                    ledger.set_class(client, vm.terms.class);
                }
                let own = || here().filter(|news| news.vm == client);
                // One that cannot stop, or got work just now, does not end the stop of others.
                let stopped = own().any(|news| news.told_to_stop && news.report.stopped);
                let mut present = Duration::ZERO;
                let mut measured = Duration::ZERO;
                for news in own() {
                    ledger.report(
                        client,
                        Report {
                            stopped,
                            ..news.report
                        },
                    );
                    present = present.max(news.report.present);
                    measured += news.report.used;
                }
                vm.delayed += present.saturating_sub(measured);
            }
            ledger.review(now);
            for (id, vm) in &mut self.vms {
                vm.sliced += ledger.take_charged(*id);
                let delays = vm.delays[1].into_iter().chain(ledger.take_delay(*id));
                vm.delays[1] = delays.max_by_key(|delay| delay.time);
            }
            let present = here().filter(|news| !news.report.present.is_zero());
            let present: BTreeSet<ClientId> = present.map(|news| news.vm).collect();
            most = most.max(present.len());
            any |= !present.is_empty();
        }
        self.tell_workers(&news, now);
        self.slicing.quiet = match any {
            true => 0,
            false => self.slicing.quiet.saturating_add(1),
        };
        // An idle client is to be stopped as soon as others have work.
        let mut idle = self.vms.values().filter(|vm| vm.workers > 0);
        let idle = idle.any(|vm| vm.terms.class == Class::Idle);
        if most > 1 {
            self.slicing.several = Some(now);
        }
        let several = self.slicing.several;
        let several = several.is_some_and(|last| now.since(last) < GAP);
        let pause = match most {
            _ if several => PERIOD,
            1 if idle => PERIOD,
            _ if self.slicing.quiet < QUIET_AFTER => IDLE_PERIOD,
            _ => QUIET_PERIOD,
        };
        let others = self.members.len() > 1;
        // With very many workers, a review takes its time.
        let pause = pause.max(Moment::now().since(now) * READING);
        self.slicing.next = others.then(|| now + pause);
    }

    /// What workers have reported since the last time, in the order of [`Arbiter::members`].
    pub(super) fn read_reports(&mut self, now: Moment) -> Vec<News> {
        let read = self.members.values_mut().map(|member| {
            let account = member.worker.account();
            let time = |nanos: u64| Duration::from_nanos(nanos);
            let oldest = Moment::from_nanos(account.oldest_since.load(Ordering::Relaxed));
            let lasts = oldest != Moment::START && now.since(oldest) >= LONG;
            // The device's record has kernels of any length.
            let is_metered = account.is_metered.load(Ordering::Acquire) != 0;
            let read = Reported {
                at: now,
                present: member.worker.presence().total(now),
                measured: time(account.measured.load(Ordering::Relaxed)),
                metered: time(account.metered.load(Ordering::Relaxed)),
                is_metered,
                spare: Duration::ZERO,
                late: Duration::ZERO,
                worked: Moment::START,
                switching: time(account.switching.load(Ordering::Relaxed)),
                completions: account.completions.load(Ordering::Relaxed),
            };
            // What was before the first look is not of this time.
            let before = member.reported.unwrap_or(read);
            let present = read.present.saturating_sub(before.present);
            // Who does not see requests measures nothing.
            let unmeasured = !member.worker.sees_requests();
            let metered = match before.is_metered || unmeasured {
                true => read.metered.saturating_sub(before.metered),
                // What it has of the time before was measured.
                false => Duration::ZERO,
            };
            let most = present.saturating_add(before.spare);
            let (metered, late) = match unmeasured {
                // That it has had work is read from the record, too, and may be known later or not at all.
                true => {
                    let all = metered.saturating_add(before.late);
                    let metered = all.min(most.max(now.since(before.at)));
                    (metered, (all - metered).min(LATE))
                }
                false => (metered.min(most), Duration::ZERO),
            };
            let worked = match present.is_zero() {
                true => before.worked,
                false => now,
            };
            member.reported = Some(Reported {
                worked,
                spare: most.saturating_sub(metered).min(SPARE),
                late,
                ..read
            });
            News {
                vm: member.vm,
                gpus: account.gpus.load(Ordering::Relaxed),
                told_to_stop: member.worker.is_told_to_stop(),
                is_recent: now.since(worked) < RECENT,
                report: Report {
                    present,
                    used: match is_metered || unmeasured {
                        true => metered,
                        false => read.measured.saturating_sub(before.measured),
                    },
                    long: !is_metered && (lasts || account.long.load(Ordering::Relaxed) != 0),
                    stopped: account.stopped.load(Ordering::Relaxed) != 0,
                    // Who is seen by the device's record alone has used the device, or waited for others, if it had work.
                    completed: read.completions != before.completions
                        || (unmeasured && !present.is_zero()),
                    switching: read.switching.saturating_sub(before.switching),
                    recorded: unmeasured,
                },
            }
        });
        read.collect()
    }

    /// Tells workers what the ledgers say. Of a stopped client's workers, only those that had work [lately](RECENT) are told to
    /// stop, as each stop takes the driver's time; but all as soon as another one has work meanwhile, so that work in turn by many
    /// escapes once.
    fn tell_workers(&mut self, news: &[News], now: Moment) {
        let limit = self.limit.unwrap_or(DISOBEDIENCE);
        let works = |news: &&News| !news.report.present.is_zero();
        let place = |news: &News| (news.vm, news.gpus);
        let told = news.iter().filter(|news| news.told_to_stop);
        let told: BTreeSet<_> = told.map(place).collect();
        let late = news.iter().filter(works).filter(|news| !news.told_to_stop);
        let late: BTreeSet<_> = late.map(place).collect();
        for (member, own) in self.members.values_mut().zip(news) {
            let ledgers = || gpus(own.gpus).filter_map(|gpu| self.slicing.ledgers.get(&gpu));
            let here = |one: &&News| one.gpus & own.gpus != 0;
            let others = news.iter().filter(works).filter(here).map(|one| one.vm);
            let others: BTreeSet<ClientId> = others.filter(|vm| *vm != own.vm).collect();
            let round = |ledger: &Ledger| others.iter().filter_map(|vm| ledger.slice(*vm)).sum();
            let round: Option<Duration> = ledgers().map(round).max();
            member.worker.set_round(round.unwrap_or_default());
            let stop = ledgers().any(|ledger| ledger.is_stopped(own.vm))
                && (own.told_to_stop
                    || own.is_recent
                    || [&told, &late].iter().all(|set| set.contains(&place(own))));
            member.worker.stop_until(stop.then(|| now + HOLD));
            // Those of one client share its slices.
            let sharers = news
                .iter()
                .filter(|news| place(news) == place(own))
                .filter(works);
            let sharers = sharers.count().max(1) as u32;
            if let Some(slice) = ledgers().filter_map(|ledger| ledger.slice(own.vm)).min() {
                let slice = (slice / sharers).max(LEAST_SLICE);
                let told = member.worker.time_slice().unwrap_or_default();
                if slice.abs_diff(told).as_secs_f64() > WORTH * told.as_secs_f64() {
                    member.worker.set_time_slice(slice);
                }
            }
            match own.report.stopped {
                true => member.disobeyed = Duration::ZERO,
                false if stop => member.disobeyed += own.report.present,
                false => {}
            }
            if member.disobeyed > limit && !member.dying {
                member.dying = true;
                member.worker.kill();
                if let Some(vm) = self.vms.get_mut(&member.vm) {
                    vm.killed += 1;
                    log::warn!(
                        "{}: a worker does not stop for {:.1} s: it is ended",
                        vm.name,
                        limit.as_secs_f64()
                    );
                }
            }
        }
    }
}
