//! The source: its phases are values that own what each phase needs.

use std::{
    collections::BTreeMap,
    fs::File,
    os::fd::AsFd,
    thread,
    time::{Duration, Instant},
};

use devices::{accel::left::Application, disk::Scope};
use remoting_relocation::rounds as copies;
use vmm_machine::moving::MovingRegion;
use vmm_memory::data::Pagemap;

use super::{
    Error, Result, archive,
    connection::Connection,
    files::GivenFile,
    frame::Kind,
    lanes::{self, Body, Lanes},
    offer::{Copy, Departure, Moment, Offer, Prepared},
    pages::Departing,
    postcopy::{self, Asked, Said},
    progress::{Phase as Shown, Progress},
    tunnel::Tls,
};

/// Estimated downtime apart from the pages and the round trips, for a machine that has not been migrated yet.
pub const FIXED: Duration = Duration::from_millis(20);

/// Minimum interval between the starts of two rounds.
const SHORTEST: Duration = Duration::from_millis(50);

/// Number of round trips during the downtime: the last pages, the state, and GO.
const ROUND_TRIPS: u32 = 3;

/// Maximum number of rounds after accelerator applications have been quiesced.
const AFTER_QUIESCE: u32 = 2;

/// How long the source waits for RUNNING. The destination acquires locks and starts threads meanwhile.
const GO: Duration = Duration::from_secs(30);

/// The owner of the machine. Called on the migration's thread, which waits for the result.
pub trait Owner: Send {
    /// The regions of RAM.
    fn ram(&mut self) -> Vec<MovingRegion>;
    /// Checks whether the applications of accelerators can be moved, as far as that can be told while they run.
    fn check_movable(&mut self) -> std::result::Result<(), String>;
    /// The files to hand over with the machine (`local=on`).
    fn files(&mut self) -> std::result::Result<Vec<GivenFile>, String>;
    /// Starts a thread.
    fn start(&mut self, body: Body) -> std::result::Result<(), String>;
    /// Starts the thread of a connection that sends memory.
    fn start_lane(&mut self, number: u32, body: Body) -> std::result::Result<(), String> {
        let _ = number;
        self.start(body)
    }
    /// Starts tracking writes to RAM.
    fn watch(&mut self, pagemap: Option<Pagemap>) -> Result<Departing> {
        Departing::watch(self.ram(), pagemap)
    }
    /// Drains the guest's outstanding requests while the VM runs. May be called repeatedly. The VM continues normally
    /// after an error, or when the owner is dropped. It also continues if applications of accelerators have allocated
    /// more than `most_made` bytes of memory since they were copied.
    fn quiesce(&mut self, most_made: u64) -> std::result::Result<Quiesced, String>;
    /// Copies what has changed in the applications of accelerators, which keep running; `None` if there are no
    /// applications now.
    fn copy(&mut self) -> std::result::Result<Option<Copy>, String>;
    /// Throttles the vCPUs by this percentage of their time; 0 disables throttling.
    fn throttle(&mut self, percent: u8);
    /// Pauses the machine. After an error it keeps running.
    fn pause(&mut self) -> std::result::Result<Paused, String>;
    /// Resumes the machine as it was before [`Owner::pause`], with its locks.
    fn resume(&mut self);
    /// Releases the disk locks. After an error it holds all of them.
    fn release(&mut self) -> std::result::Result<(), String>;
    /// Re-acquires the disk locks. `among` is the scope in which a lock must be visible so that the destination would
    /// notice it.
    fn retake(&mut self, among: Scope) -> Retaken;
    /// Waits until a client decides which side has the machine; returns true if it runs at the destination.
    fn ask(&mut self) -> bool;
    /// The machine runs at the destination, and contents of its applications may follow: their workers stay until
    /// [`Owner::gone`]. Returns whether there are any.
    fn left(&mut self) -> bool {
        false
    }
    /// Makes an application's worker save contents that follow; returns why they are lost if that fails.
    fn fetch(&mut self, asked: &Asked) -> std::result::Result<File, String> {
        let _ = asked;
        Err("nothing is left here".to_owned())
    }
    /// An application has received everything. Returns false if it was the last one.
    fn drained(&mut self, of: &Application) -> bool {
        let _ = of;
        false
    }
    /// The machine runs at the destination and is no longer needed here.
    fn gone(&mut self);
}

/// A paused machine.
pub struct Paused {
    /// Its state.
    pub state: Vec<u8>,
    /// When the guest's clocks were read.
    pub saved_at: Moment,
    /// The archive of its accelerators' applications, if any are migrated.
    pub archive: Option<File>,
}

/// Result of quiescing the applications of accelerators.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Quiesced {
    /// They are quiesced, or there are none.
    Still,
    /// They keep running: they have allocated this many bytes of memory since they were copied.
    Made(u64),
}

/// Result of re-acquiring disk locks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Retaken {
    /// All locks are held, and at least one of them is exclusive as seen by the destination: no other process runs the
    /// machine.
    Held,
    /// Another process holds such a lock.
    Denied,
    /// There is no such lock, as with block devices that two hosts share, so the locks prove nothing.
    Silent,
}

/// A client's parameters for a migration.
#[derive(Clone, Debug)]
pub struct Wishes {
    /// Maximum downtime.
    pub downtime: Duration,
    /// Maximum duration of the whole migration.
    pub timeout: Duration,
    /// After the timeout the VM is migrated anyway, whatever the downtime.
    pub ignore_timeout: bool,
    /// How long the peer may keep silent.
    pub stall: Duration,
    /// How long the peer may keep silent while its workers restore applications.
    pub take_up: Duration,
    /// Maximum bandwidth for memory while the VM runs, in bytes per second.
    pub bandwidth: Option<u64>,
    /// Maximum percentage of their time by which vCPUs may be throttled so that little memory remains to be sent.
    pub max_throttle: u8,
    /// Estimated downtime apart from the pages and the round trips.
    pub fixed: Duration,
    /// Address of the destination, for further connections.
    pub to: (String, Option<Tls>),
}

/// How a migration ended.
#[derive(Debug)]
pub enum Outcome {
    /// The VM runs at the destination.
    Moved,
    /// The destination would accept the VM; nothing was migrated.
    Acceptable,
    /// The VM stayed here, and runs if it ran before.
    Stayed(Error),
}

/// The phase of the source, with what it owns. When a phase is dropped on the way to [`Outcome::Stayed`], the caller
/// resumes what was paused.
enum Phase {
    Offer,
    Prepare,
    Rounds(Rounds),
    /// From here on there are no rounds if memory was handed over.
    Quiesce(Option<Rounds>),
    Final(Option<Rounds>),
    Go {
        paused: Instant,
    },
    Done {
        paused: Instant,
    },
}

struct Rounds {
    memory: Departing,
    round: u32,
    brake: Brake,
    /// Throughput of the previous round in bytes per second.
    rate: u64,
    /// Number of bytes to send in the next round.
    outstanding: u64,
    /// Estimated downtime apart from those bytes and applications, in milliseconds.
    fixed: u64,
}

/// Throttles the guest if it writes its memory as fast as it is sent. The steps are those of QEMU.
struct Brake {
    /// Minimum number of bytes left after a round since the throttling last changed.
    least: Option<u64>,
    /// Number of consecutive rounds without much progress.
    stalled_rounds: u32,
    percent: u8,
    most: u8,
    /// Since when rounds do not shorten the downtime although the throttling is at its maximum.
    held: Option<Instant>,
}

/// What to do after a round.
#[derive(Debug, Eq, PartialEq)]
enum Round {
    /// Another round may help.
    Useful,
    /// Throttle the guest by this percentage.
    Slow(u8),
    /// No further round will help.
    Useless,
}

impl Brake {
    /// Number of consecutive rounds without progress that are tolerated.
    const PATIENCE: u32 = 3;
    const FIRST: u8 = 20;
    const STEP: u8 = 10;
    /// How long rounds without progress are tolerated at maximum throttling: the guest may soon do something else.
    const HELD: Duration = Duration::from_secs(30);

    fn new(most: u8) -> Self {
        Self {
            least: None,
            stalled_rounds: 0,
            percent: 0,
            most,
            held: None,
        }
    }

    /// Decides what to do when `left` bytes remain after a round.
    fn after_round(&mut self, left: u64, now: Instant) -> Round {
        let Some(least) = self.least else {
            self.least = Some(left);
            return Round::Useful;
        };
        // Progress means that at least a tenth less remains.
        if left < least - least / 10 {
            self.least = Some(left);
            self.stalled_rounds = 0;
            self.held = None;
            return Round::Useful;
        }
        self.stalled_rounds += 1;
        if self.stalled_rounds < Self::PATIENCE {
            return Round::Useful;
        }
        if self.percent >= self.most {
            let held = now.saturating_duration_since(*self.held.get_or_insert(now));
            return match held >= Self::HELD {
                true => Round::Useless,
                false => Round::Useful,
            };
        }
        self.percent = match self.percent {
            0 => Self::FIRST,
            percent => percent.saturating_add(Self::STEP),
        };
        self.percent = self.percent.min(self.most);
        Round::Slow(self.percent)
    }
}

/// One migration.
pub struct Source<'a> {
    connection: Connection,
    owner: &'a mut dyn Owner,
    offer: Offer,
    wishes: Wishes,
    progress: Progress,
    began: Instant,
    pagemap: Option<Pagemap>,
    contents: Vec<u8>,
    copies: copies::Rounds,
    /// The first round after outstanding requests were drained, if the guest has written memory during that.
    quiesced: Option<u32>,
    /// When the machine was paused; it still holds its locks.
    paused: Option<Instant>,
    /// The scope in which a lock must be visible to show who runs the machine.
    among: Scope,
    /// GO may have been sent.
    went: bool,
}

impl<'a> Source<'a> {
    /// Creates a source on a connection. `pagemap` is `/proc/self/pagemap`, if it is readable.
    pub fn new(
        mut connection: Connection,
        owner: &'a mut dyn Owner,
        offer: Offer,
        wishes: Wishes,
        progress: Progress,
        pagemap: Option<Pagemap>,
    ) -> Self {
        connection.stall = wishes.stall;
        Self {
            connection,
            owner,
            offer,
            wishes,
            progress,
            began: Instant::now(),
            pagemap,
            contents: Vec::new(),
            copies: copies::Rounds::new(copies::NONE),
            quiesced: None,
            paused: None,
            among: Scope::Hosts,
            went: false,
        }
    }

    /// Migrates the machine, or leaves it as it was.
    pub fn run(mut self) -> Outcome {
        let mut phase = Phase::Offer;
        loop {
            phase = match self.step(phase) {
                Ok(Phase::Done { paused }) => {
                    let stood = paused.elapsed();
                    self.progress.update(|info| {
                        info.downtime_ms = Some(milliseconds(stood));
                    });
                    if self.offer.postcopy {
                        self.follow();
                    }
                    self.owner.gone();
                    return Outcome::Moved;
                }
                Ok(Phase::Prepare) if self.offer.dry_run => return Outcome::Acceptable,
                Ok(next) => next,
                Err(error) => return self.failed(error),
            };
        }
    }

    fn step(&mut self, phase: Phase) -> Result<Phase> {
        match phase {
            Phase::Offer => self.offer(),
            Phase::Prepare => self.prepare(),
            Phase::Rounds(rounds) => self.round(rounds),
            Phase::Quiesce(rounds) => self.quiesce(rounds),
            Phase::Final(rounds) => self.finish(rounds),
            Phase::Go { paused } => self.go(paused),
            Phase::Done { .. } => Ok(phase),
        }
    }

    fn show(&mut self, phase: Shown, doing: &'static str) {
        self.connection.doing = doing;
        self.progress.update(|info| info.phase = phase);
    }

    fn offer(&mut self) -> Result<Phase> {
        self.show(Shown::Offer, "offering the VM");
        self.owner.check_movable().map_err(|why| self.stays(why))?;
        let files = match self.offer.local && !self.offer.dry_run {
            true => self.owner.files().map_err(Error::Machine)?,
            false => Vec::new(),
        };
        self.offer.files = files.len();
        let text =
            serde_json::to_vec(&self.offer).map_err(|error| Error::Machine(error.to_string()))?;
        self.connection.send(Kind::Offer, 0, &text)?;
        for GivenFile { what, file } in &files {
            let text =
                serde_json::to_vec(what).map_err(|error| Error::Machine(error.to_string()))?;
            self.connection.send_file(&text, file.as_fd())?;
        }
        self.connection
            .receive(&[Kind::Prepared], &mut self.contents)?;
        Ok(Phase::Prepare)
    }

    fn prepare(&mut self) -> Result<Phase> {
        self.show(Shown::Prepare, "preparing the memory");
        let prepared = Prepared::decode(&self.contents, self.offer.lanes)?;
        if prepared.same_host {
            self.among = Scope::Host;
        }
        self.copies = copies::Rounds::new(match prepared.copies && self.offer.copies {
            true => copies::MACHINE,
            false => copies::NONE,
        });
        if self.offer.local {
            let sizes = self.offer.regions.iter().map(|region| region.len);
            let total = sizes.fold(0, u64::saturating_add);
            self.progress.update(|info| info.total_bytes = total);
            while self.are_copies_due() {
                self.copy(0)?;
            }
            return Ok(Phase::Quiesce(None));
        }
        let mut memory = self.owner.watch(self.pagemap.take())?;
        if let Some(token) = prepared.token {
            let (url, tls) = &self.wishes.to;
            let to = lanes::To {
                url,
                tls: tls.as_ref(),
                token: &token,
                stall: self.wishes.stall,
                destination: &self.connection.other_side()?,
                progress: &self.progress,
            };
            let owner = &mut *self.owner;
            let start = &mut |number, body| owner.start_lane(number, body);
            memory.set_lanes(Lanes::open(self.offer.lanes, &to, start)?);
        }
        let asked = Instant::now();
        self.connection.send(Kind::Barrier, 0, &[])?;
        self.connection
            .receive(&[Kind::Barrier], &mut self.contents)?;
        let fixed = self.wishes.fixed + asked.elapsed() * ROUND_TRIPS;
        let total = memory.total();
        self.progress.update(|info| {
            info.total_bytes = total;
            info.remaining_bytes = total;
        });
        Ok(Phase::Rounds(Rounds {
            memory,
            round: 0,
            brake: Brake::new(self.wishes.max_throttle),
            rate: 0,
            outstanding: total,
            fixed: milliseconds(fixed),
        }))
    }

    fn round(&mut self, mut rounds: Rounds) -> Result<Phase> {
        self.show(Shown::Rounds, "sending memory");
        self.progress.update(|info| {
            info.rounds = rounds.round + 1;
            info.remaining_bytes = rounds.outstanding;
        });
        if rounds.round == 0 && self.are_copies_due() {
            // Before anything else, because the destination takes time to restore them and to build programs.
            self.copy(rounds.brake.percent)?;
        }
        let began = Instant::now();
        self.connection.set_rate(self.wishes.bandwidth);
        let sent = rounds
            .memory
            .send_round(rounds.round, &mut self.connection, &self.progress)?;
        rounds.round += 1;
        let micros = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        let rate = sent.saturating_mul(1_000_000) / micros.max(1);
        // A short round says little about the throughput.
        if sent >= 1 << 20 || rounds.rate == 0 {
            rounds.rate = rate.max(1);
        }
        rounds.outstanding = rounds.memory.outstanding()?;
        let memory = rounds.outstanding.saturating_mul(1000) / rounds.rate;
        let applications = self.copies.outstanding().saturating_mul(1000) / rounds.rate;
        // This part of the downtime does not depend on further rounds.
        let fixed = rounds.fixed.saturating_add(applications);
        let predicted = fixed.saturating_add(memory);
        self.progress.update(|info| {
            info.remaining_bytes = rounds.outstanding;
            info.bytes_per_second = rounds.rate;
            info.predicted_downtime_ms = Some(predicted);
        });
        // Further rounds can only reduce the memory part. So that part gets at least half of the permitted downtime.
        let promised = milliseconds(self.wishes.downtime);
        let counted = memory.saturating_add(fixed.min(promised / 2));
        // Applications stay quiesced until the machine is paused, so rounds are limited, whatever the guest writes.
        let waited = self
            .quiesced
            .is_some_and(|at| rounds.round >= at + AFTER_QUIESCE);
        if counted <= promised || self.offer.paused || waited {
            if self.quiesced.is_some() || !self.are_copies_due() {
                return Ok(Phase::Quiesce(Some(rounds)));
            }
            self.copy(rounds.brake.percent)?;
            return Ok(Phase::Rounds(rounds));
        }
        if self.began.elapsed() >= self.wishes.timeout {
            if self.wishes.ignore_timeout {
                return Ok(Phase::Quiesce(Some(rounds)));
            }
            return Err(Error::Timeout {
                seconds: self.wishes.timeout.as_secs(),
                predicted_ms: predicted,
            });
        }
        match rounds.brake.after_round(rounds.outstanding, Instant::now()) {
            Round::Useful => {}
            Round::Slow(percent) => {
                log::info!(
                    "the guest writes as fast as its memory is sent: it is slowed by {percent} %"
                );
                self.throttle(percent);
            }
            Round::Useless if self.wishes.ignore_timeout => {
                log::warn!(
                    "further rounds would not shorten the stop: the VM stands still for {predicted} ms"
                );
                return Ok(Phase::Quiesce(Some(rounds)));
            }
            Round::Useless => {
                return Err(Error::Useless {
                    predicted_ms: predicted,
                    memory_ms: memory,
                });
            }
        }
        // There was so little that it was sent at once. Let the guest write, because otherwise rounds would only spin.
        if let Some(rest) = SHORTEST.checked_sub(began.elapsed()) {
            thread::sleep(rest);
        }
        Ok(Phase::Rounds(rounds))
    }

    fn throttle(&mut self, percent: u8) {
        self.owner.throttle(percent);
        self.progress.update(|info| info.throttle_percent = percent);
    }

    fn are_copies_due(&self) -> bool {
        let left = self.wishes.timeout.saturating_sub(self.began.elapsed());
        self.copies.is_due(left)
    }

    /// How many bytes of memory applications may have allocated since they were copied when they are to stop. Unlimited
    /// if contents follow the machine, or if they are not copied again.
    fn most_made(&self, rounds: Option<&Rounds>) -> u64 {
        if self.offer.postcopy {
            return u64::MAX;
        }
        let stop = milliseconds(self.wishes.downtime);
        let in_stop = rounds.map_or(u64::MAX, |rounds| rounds.rate.saturating_mul(stop) / 1000);
        let left = self.wishes.timeout.saturating_sub(self.began.elapsed());
        self.copies.most_new(left, in_stop)
    }

    /// Sends a copy of applications and waits until workers at the destination have restored it. Throttling of the
    /// guest by `slowed` percent is suspended meanwhile, because no memory is sent.
    pub(super) fn copy(&mut self, slowed: u8) -> Result<()> {
        let doing = std::mem::replace(&mut self.connection.doing, "copying applications");
        self.at_full_speed(slowed, Self::copy_now)?;
        self.connection.doing = doing;
        Ok(())
    }

    /// Does something while the guest, which is slowed by this percentage, runs at full speed.
    fn at_full_speed<R>(
        &mut self,
        slowed: u8,
        work: impl FnOnce(&mut Self) -> Result<R>,
    ) -> Result<R> {
        if slowed > 0 {
            self.throttle(0);
        }
        let done = work(self)?;
        if slowed > 0 {
            self.throttle(slowed);
        }
        Ok(done)
    }

    fn copy_now(&mut self) -> Result<()> {
        let began = Instant::now();
        let Some(copy) = self.owner.copy().map_err(|why| self.stays(why))? else {
            self.copies.add(0, began);
            return Ok(());
        };
        self.connection.set_rate(self.wishes.bandwidth);
        let sent = archive::send(&copy.archive, &mut self.connection, &self.progress)?;
        let text = copy.describe(sent.size)?;
        self.connection
            .send(Kind::Copy, self.copies.count(), &text)?;
        let stall = self.wishes.stall.max(self.wishes.take_up);
        let stall = std::mem::replace(&mut self.connection.stall, stall);
        self.connection.receive(&[Kind::Copy], &mut self.contents)?;
        self.connection.stall = stall;
        self.copies.add(sent.bytes, began);
        self.progress.update(|info| info.accel_bytes += sent.bytes);
        Ok(())
    }

    /// Quiesces accelerators: calls of their applications wait from here on, while vCPUs run.
    fn quiesce(&mut self, rounds: Option<Rounds>) -> Result<Phase> {
        self.show(Shown::Quiesce, "waiting for what is outstanding");
        let began = Instant::now();
        let most_made = self.most_made(rounds.as_ref());
        // The guest may have to suspend programs itself.
        let slowed = rounds.as_ref().map_or(0, |rounds| rounds.brake.percent);
        let quiesced = self.at_full_speed(slowed, |source| {
            let quiesced = source.owner.quiesce(most_made);
            quiesced.map_err(|why| source.stays(why))
        })?;
        if let Quiesced::Made(bytes) = quiesced {
            let mib = bytes >> 20;
            log::info!(
                "applications have made {mib} MiB of memory since they were copied, which is copied while they go on"
            );
            self.copy(slowed)?;
            return Ok(match rounds {
                // Memory that the guest has written meanwhile is sent while it runs.
                Some(rounds) => Phase::Rounds(rounds),
                None => Phase::Quiesce(None),
            });
        }
        match rounds {
            // Memory that the guest has written meanwhile is sent while it runs.
            Some(rounds)
                if self.quiesced.is_none() && began.elapsed() > self.wishes.downtime / 2 =>
            {
                self.quiesced = Some(rounds.round);
                Ok(Phase::Rounds(rounds))
            }
            rounds => Ok(Phase::Final(rounds)),
        }
    }

    /// The error for a machine that cannot leave.
    fn stays(&self, why: String) -> Error {
        match self.progress.is_cancelled() {
            true => Error::Cancelled,
            false => Error::Machine(why),
        }
    }

    fn finish(&mut self, mut rounds: Option<Rounds>) -> Result<Phase> {
        self.show(Shown::Final, "sending the state");
        let paused = Instant::now();
        let Paused {
            state,
            saved_at,
            archive,
        } = self.owner.pause().map_err(|why| self.stays(why))?;
        self.paused = Some(paused);
        let stopping_ms = milliseconds(paused.elapsed());
        // After the state, because saving it may have written memory.
        if let Some(Rounds { memory, round, .. }) = &mut rounds {
            // The VM is stopped, so the transfer disturbs nothing.
            self.connection.set_rate(None);
            memory.send_rest(*round, &mut self.connection, &self.progress)?;
        }
        let stall = match archive {
            Some(_) => self.wishes.stall.max(self.wishes.take_up),
            None => self.wishes.stall,
        };
        let archive = archive.map(|file| {
            self.connection.set_rate(None);
            archive::send(&file, &mut self.connection, &self.progress)
        });
        let archive = archive.transpose()?;
        let saved = archive.map_or(0, |archive| archive.bytes);
        self.progress.update(|info| info.accel_stop_bytes = saved);
        let hash = rounds.filter(|_| self.offer.verify);
        let hash = hash.map(|rounds| rounds.memory.hash());
        let departure = serde_json::to_vec(&Departure {
            state,
            hash,
            archive: archive.map(|archive| archive.size),
            saved_at: Some(saved_at),
            stopping_ms,
        })
        .map_err(|error| Error::Machine(error.to_string()))?;
        self.connection.send(Kind::State, 0, &departure)?;
        self.connection.stall = stall;
        self.connection
            .receive(&[Kind::Ready], &mut self.contents)?;
        Ok(Phase::Go { paused })
    }

    fn go(&mut self, paused: Instant) -> Result<Phase> {
        self.show(Shown::Go, "handing the VM over");
        // From now on it cannot be cancelled; before, it could.
        if self.progress.is_cancelled() {
            return Err(Error::Cancelled);
        }
        self.owner.release().map_err(Error::Machine)?;
        self.went = true;
        self.connection.uninterrupted = true;
        self.connection.stall = self.wishes.stall.min(GO);
        // However slowly an answer comes.
        self.connection.deadline = Some(Instant::now() + self.connection.stall);
        self.connection.send(Kind::Go, 0, &[])?;
        let answer = self
            .connection
            .receive(&[Kind::Running, Kind::Denied], &mut self.contents)?;
        self.connection.deadline = None;
        match answer.kind {
            Kind::Running => Ok(Phase::Done { paused }),
            _ => Err(Error::Refused(vec![
                "it could not take the locks of the disks, or not start the VM".to_owned(),
            ])),
        }
    }

    /// Sends what the destination's workers request, until they have everything.
    fn follow(&mut self) {
        if !self.owner.left() {
            return;
        }
        self.show(Shown::Postcopy, "bringing contents of applications' memory");
        self.progress.update(|info| info.remaining_bytes = 0);
        if let Err(error) = self.bring() {
            log::warn!(
                "contents of applications' memory that have not followed the VM are lost: {}",
                base::Chain(&error)
            );
        }
    }

    fn bring(&mut self) -> Result<()> {
        self.connection.set_rate(self.wishes.bandwidth);
        let mut left = BTreeMap::new();
        loop {
            // A worker there may have to wait for its device. A lost network is detected by other means.
            self.connection.stall = Duration::MAX;
            let said = postcopy::hear(&mut self.connection, &mut self.contents)?;
            self.connection.stall = self.wishes.stall;
            let goes_on = match said {
                Said::Asks(asked) => {
                    let is_known = left.insert(asked.of.clone(), asked.left).is_some();
                    self.show_left(&left);
                    let saved = self.owner.fetch(&asked);
                    // The peer may name any number of applications that do not exist.
                    match saved.is_ok() || is_known {
                        true => {
                            left.insert(asked.of.clone(), asked.left.saturating_sub(asked.bytes))
                        }
                        false => left.remove(&asked.of),
                    };
                    postcopy::answer(&mut self.connection, &asked, saved, &self.progress)?;
                    true
                }
                Said::Drained(of) => {
                    left.remove(&of);
                    self.owner.drained(&of)
                }
            };
            self.show_left(&left);
            if !goes_on {
                return Ok(());
            }
        }
    }

    fn show_left(&self, left: &BTreeMap<Application, u64>) {
        let bytes = left.values().copied().fold(0, u64::saturating_add);
        self.progress
            .update(|info| info.accel_remaining_bytes = bytes);
    }

    fn failed(mut self, mut error: Error) -> Outcome {
        // After GO, errors are handled by the code that follows.
        if !self.went && !self.progress.is_cancelled() {
            error = self.connection.why(error);
        }
        if self.went && !matches!(error, Error::Refused(_)) {
            log::warn!(
                "the connection broke between GO and RUNNING: {}",
                base::Chain(&error)
            );
            let moved = match self.owner.retake(self.among) {
                Retaken::Held => false,
                Retaken::Denied => true,
                Retaken::Silent => {
                    self.show(Shown::Undecided, "waiting for a decision");
                    self.owner.ask()
                }
            };
            if moved {
                self.owner.gone();
                return Outcome::Moved;
            }
        } else if self.went && self.owner.retake(self.among) == Retaken::Denied {
            // The destination does not run it, and another process holds a disk.
            log::error!("a disk of the VM is in use elsewhere: it stays paused");
            self.owner.throttle(0);
            return Outcome::Stayed(error);
        }
        self.owner.throttle(0);
        self.progress.update(|info| info.throttle_percent = 0);
        if !self.went {
            self.connection.send_failure(&[error.to_string()]);
        }
        if self.paused.is_some() {
            self.owner.resume();
        }
        Outcome::Stayed(error)
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_slowed_by_steps_when_three_rounds_were_stalled_rounds() {
        let mut brake = Brake::new(45);
        let now = Instant::now();
        let mut after = |left| match brake.after_round(left, now) {
            Round::Slow(percent) => percent,
            Round::Useful => 0,
            Round::Useless => 100,
        };
        let steps = [1000, 500, 490, 480, 479, 478, 100, 99, 99, 99, 99, 99].map(&mut after);
        assert_eq!(steps, [0, 0, 0, 0, 20, 30, 0, 0, 0, 40, 45, 0]);
    }

    #[test]
    fn rounds_end_when_a_guest_that_cannot_be_slowed_further_leaves_as_much_for_long() {
        for most in [0, 20] {
            let mut brake = Brake::new(most);
            let start = Instant::now();
            let mut seconds = 0;
            let mut after = |left| {
                seconds += 1;
                brake.after_round(left, start + Duration::from_secs(seconds))
            };
            let rounds = (0..29).map(|_| after(1000));
            assert!(rounds.into_iter().all(|round| round != Round::Useless));
            // Fluctuation is not progress; real progress resets the counters.
            assert_eq!(after(2000), Round::Useful);
            assert_eq!(after(500), Round::Useful);
            let count = (0..1000)
                .take_while(|_| after(495) != Round::Useless)
                .count();
            assert!((30..40).contains(&count), "{count}");
        }
    }
}
