//! The source: phases as values, each with what it owns.

use std::{
    collections::BTreeMap,
    fs::File,
    os::fd::AsFd,
    thread,
    time::{Duration, Instant},
};

use devices::{accel::left::Application, disk::Scope};

use super::{
    Error, Result, archive,
    connection::Connection,
    copies::{Copies, Copy},
    files::GivenFile,
    frame::Kind,
    lanes::{self, Body, Lanes},
    offer::{Departure, Moment, Offer, Prepared},
    pages::Departing,
    postcopy::{self, Asked, Said},
    progress::{Phase as Shown, Progress},
    tunnel::Tls,
};
use crate::machine::moving::MovingRegion;

/// What a stop costs beside the pages and the round trips, of a machine that has not moved yet.
pub const FIXED: Duration = Duration::from_millis(20);

/// How often rounds begin at most.
const SHORTEST: Duration = Duration::from_millis(50);

/// Round trips while the machine stands still: the last pages, the state, and GO.
const ROUND_TRIPS: u32 = 3;

/// Rounds at most, once applications of accelerators stand still.
const AFTER_QUIESCE: u32 = 2;

/// How long the source waits for RUNNING. The destination takes locks and starts threads.
const GO: Duration = Duration::from_secs(30);

/// Who owns the machine. Called on the thread of the migration, which waits.
pub trait Owner: Send {
    /// RAM.
    fn ram(&mut self) -> Vec<MovingRegion>;
    /// Checks whether its accelerators' applications can go elsewhere, as far as that is known while they go on.
    fn check_movable(&mut self) -> std::result::Result<(), String>;
    /// The files that go with the machine (`local=on`).
    fn files(&mut self) -> std::result::Result<Vec<GivenFile>, String>;
    /// Starts a thread.
    fn start(&mut self, body: Body) -> std::result::Result<(), String>;
    /// Starts the thread of a connection that sends memory.
    fn start_lane(&mut self, number: u32, body: Body) -> std::result::Result<(), String> {
        let _ = number;
        self.start(body)
    }
    /// Watches RAM.
    fn watch(&mut self, pagemap: Option<File>) -> Result<Departing> {
        Departing::watch(self.ram(), pagemap)
    }
    /// Has what the guest waits for come to its end, while the machine runs; once or again. After an
    /// error, or when the owner goes, it goes on. It does not stop, either, where applications of accelerators have made
    /// more bytes of memory than these since they were copied.
    fn quiesce(&mut self, most_made: u64) -> std::result::Result<Quiesced, String>;
    /// Copies what is new of its accelerators' applications, which go on; None if there are none now.
    fn copy(&mut self) -> std::result::Result<Option<Copy>, String>;
    /// Takes so many percent of their time away from the vCPUs; 0: none.
    fn throttle(&mut self, percent: u8);
    /// Stops the machine. After an error it runs.
    fn pause(&mut self) -> std::result::Result<Paused, String>;
    /// The machine goes on as before [`Owner::pause`], with its locks.
    fn resume(&mut self);
    /// Gives the disk locks up. After an error it has them all.
    fn release(&mut self) -> std::result::Result<(), String>;
    /// Takes them back from a destination that is `among` those that hear of them, or not.
    fn retake(&mut self, among: Scope) -> Retaken;
    /// Waits until a client says who has the machine: true if it runs at the destination.
    fn ask(&mut self) -> bool;
    /// The machine runs elsewhere, and contents of its applications follow: their workers stay until it is gone. True
    /// if there are some.
    fn left(&mut self) -> bool {
        false
    }
    /// Has an application's worker save contents that follow, or says why they are lost.
    fn fetch(&mut self, asked: &Asked) -> std::result::Result<File, String> {
        let _ = asked;
        Err("nothing is left here".to_owned())
    }
    /// An application has all. False if that was the last one.
    fn drained(&mut self, of: &Application) -> bool {
        let _ = of;
        false
    }
    /// The machine runs elsewhere.
    fn gone(&mut self);
}

/// A machine that stands still.
pub struct Paused {
    /// Its state.
    pub state: Vec<u8>,
    /// When its clocks were read.
    pub saved_at: Moment,
    /// What applications of its accelerators have saved, if some go along.
    pub archive: Option<File>,
}

/// What came of having applications of accelerators stand still.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Quiesced {
    /// They do, or there are none.
    Still,
    /// They go on: they have made so many bytes of memory since they were copied.
    Made(u64),
}

/// What came of taking disk locks back.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Retaken {
    /// All are held, and one of them is exclusive wherever the destination is: nobody else runs the machine.
    Held,
    /// Somebody else has such a one.
    Denied,
    /// There is none, as with block devices that two hosts share: they say nothing.
    Silent,
}

/// What a client wishes.
#[derive(Clone, Debug)]
pub struct Wishes {
    /// How long the VM may stand still.
    pub downtime: Duration,
    /// How long all of it may take.
    pub timeout: Duration,
    /// After that the VM moves, whatever the downtime.
    pub ignore_timeout: bool,
    /// How long the other side may keep silent.
    pub stall: Duration,
    /// The same while workers take applications up there.
    pub take_up: Duration,
    /// Bytes of memory per second at most, while the VM runs.
    pub bandwidth: Option<u64>,
    /// How much of their time vCPUs may lose so that the rest becomes small, in percent.
    pub max_throttle: u8,
    /// What the stop costs beside the pages and the round trips, as far as is known.
    pub fixed: Duration,
    /// Where the destination is, for further connections.
    pub to: (String, Option<Tls>),
}

/// How it ended.
#[derive(Debug)]
pub enum Outcome {
    /// The VM runs at the destination.
    Moved,
    /// The destination would take it; nothing has moved.
    Acceptable,
    /// The VM is here, and runs if it ran.
    Stayed(Error),
}

/// Where the source is, with what it owns there. What was paused is resumed by whoever drops a
/// phase on its way to [`Outcome::Stayed`].
enum Phase {
    Offer,
    Prepare,
    Rounds(Rounds),
    /// From here on without rounds if memory was handed over.
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
    /// Bytes per second, of the round before.
    rate: u64,
    /// Bytes that the next round has.
    outstanding: u64,
    /// What the stop costs beside them and applications, in milliseconds.
    fixed: u64,
}

/// Slows the guest down if it writes as fast as its memory is sent. The steps are QEMU's.
struct Brake {
    /// The least that was left after a round, in bytes, since the brake is as it is.
    least: Option<u64>,
    /// Rounds in a row after which hardly less was left.
    stalled_rounds: u32,
    percent: u8,
    most: u8,
    /// Since when rounds do not shorten the stop although it is slowed down as far as is allowed.
    held: Option<Instant>,
}

/// What a round was good for.
#[derive(Debug, Eq, PartialEq)]
enum Round {
    /// Another one may help.
    Useful,
    /// The guest is to be slowed down by so many percent.
    Slow(u8),
    /// No round will help.
    Useless,
}

impl Brake {
    /// Rounds that may pass without progress.
    const PATIENCE: u32 = 3;
    const FIRST: u8 = 20;
    const STEP: u8 = 10;
    /// How long rounds may not shorten the stop when the guest cannot be slowed down further: it may do something
    /// else soon.
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

    /// So many bytes are left after a round.
    fn after_round(&mut self, left: u64, now: Instant) -> Round {
        let Some(least) = self.least else {
            self.least = Some(left);
            return Round::Useful;
        };
        // A tenth was gained at least.
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
    pagemap: Option<File>,
    contents: Vec<u8>,
    copies: Copies,
    /// What is outstanding was waited for, and the guest has written memory meanwhile: the round after
    /// that.
    quiesced: Option<u32>,
    /// The machine stands still since then, with its locks.
    paused: Option<Instant>,
    /// Who has to hear of a lock that tells who runs the machine.
    among: Scope,
    /// GO may have left.
    went: bool,
}

impl<'a> Source<'a> {
    /// Over a connection. `pagemap` is `/proc/self/pagemap`, if it may be read.
    pub fn new(
        mut connection: Connection,
        owner: &'a mut dyn Owner,
        offer: Offer,
        wishes: Wishes,
        progress: Progress,
        pagemap: Option<File>,
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
            copies: Copies::default(),
            quiesced: None,
            paused: None,
            among: Scope::Hosts,
            went: false,
        }
    }

    /// Moves the machine, or leaves it as it was.
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
        self.copies = Copies::new(prepared.copies && self.offer.copies);
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
            // First of all: what is made there takes its time, and programs are built.
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
        // A short round says little about the connection.
        if sent >= 1 << 20 || rounds.rate == 0 {
            rounds.rate = rate.max(1);
        }
        rounds.outstanding = rounds.memory.outstanding()?;
        let memory = rounds.outstanding.saturating_mul(1000) / rounds.rate;
        let applications = self.copies.outstanding().saturating_mul(1000) / rounds.rate;
        // So long it stands still whatever the rounds of memory do.
        let fixed = rounds.fixed.saturating_add(applications);
        let predicted = fixed.saturating_add(memory);
        self.progress.update(|info| {
            info.remaining_bytes = rounds.outstanding;
            info.bytes_per_second = rounds.rate;
            info.predicted_downtime_ms = Some(predicted);
        });
        // Further rounds make the memory less, and nothing else: that has half of the time at least.
        let promised = milliseconds(self.wishes.downtime);
        let counted = memory.saturating_add(fixed.min(promised / 2));
        // Applications stand still until then, whatever the guest writes.
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
        // So little that it was sent at once: the guest is let write, or rounds would do nothing but spin.
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
        self.copies.are_due(left)
    }

    /// How many bytes of memory applications may have made since they were copied when they are to stop: any number if
    /// contents follow the machine, or if they are not copied again.
    fn most_made(&self, rounds: Option<&Rounds>) -> u64 {
        if self.offer.postcopy {
            return u64::MAX;
        }
        let stop = milliseconds(self.wishes.downtime);
        let in_stop = rounds.map_or(u64::MAX, |rounds| rounds.rate.saturating_mul(stop) / 1000);
        let left = self.wishes.timeout.saturating_sub(self.began.elapsed());
        self.copies.most_made(left, in_stop)
    }

    /// A copy of applications; waits until workers at the destination have made it. A guest that is slowed
    /// down by so many percent is not meanwhile: no memory is sent.
    pub(super) fn copy(&mut self, slowed: u8) -> Result<()> {
        if slowed > 0 {
            self.throttle(0);
        }
        let doing = std::mem::replace(&mut self.connection.doing, "copying applications");
        self.copy_now()?;
        self.connection.doing = doing;
        if slowed > 0 {
            self.throttle(slowed);
        }
        Ok(())
    }

    fn copy_now(&mut self) -> Result<()> {
        let began = Instant::now();
        let Some(copy) = self.owner.copy().map_err(|why| self.stays(why))? else {
            self.copies.add(0, began);
            return Ok(());
        };
        self.connection.set_rate(self.wishes.bandwidth);
        let sent = archive::send(&copy.archive, &mut self.connection, &self.progress)?;
        let text = copy.describe(sent.size).map_err(Error::Machine)?;
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

    /// Calls of accelerators' applications wait from here on, while vCPUs run.
    fn quiesce(&mut self, rounds: Option<Rounds>) -> Result<Phase> {
        self.show(Shown::Quiesce, "waiting for what is outstanding");
        let began = Instant::now();
        let most_made = self.most_made(rounds.as_ref());
        let quiesced = self
            .owner
            .quiesce(most_made)
            .map_err(|why| self.stays(why))?;
        if let Quiesced::Made(bytes) = quiesced {
            let mib = bytes >> 20;
            log::info!(
                "applications have made {mib} MiB of memory since they were copied, which is copied while they go on"
            );
            self.copy(rounds.as_ref().map_or(0, |rounds| rounds.brake.percent))?;
            return Ok(match rounds {
                // What the guest has written meanwhile is sent while it runs.
                Some(rounds) => Phase::Rounds(rounds),
                None => Phase::Quiesce(None),
            });
        }
        match rounds {
            // What the guest has written meanwhile is sent while it runs.
            Some(rounds)
                if self.quiesced.is_none() && began.elapsed() > self.wishes.downtime / 2 =>
            {
                self.quiesced = Some(rounds.round);
                Ok(Phase::Rounds(rounds))
            }
            rounds => Ok(Phase::Final(rounds)),
        }
    }

    /// Why the machine does not leave.
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
        // After the state: to save it may have written memory.
        if let Some(Rounds { memory, round, .. }) = &mut rounds {
            // Nobody runs meanwhile who could be disturbed.
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
        self.owner.release().map_err(Error::Machine)?;
        self.went = true;
        self.connection.uninterrupted = true;
        self.connection.stall = self.wishes.stall.min(GO);
        self.connection.send(Kind::Go, 0, &[])?;
        let answer = self
            .connection
            .receive(&[Kind::Running, Kind::Denied], &mut self.contents)?;
        match answer.kind {
            Kind::Running => Ok(Phase::Done { paused }),
            _ => Err(Error::Refused(vec![
                "it could not take the locks of the disks, or not start the VM".to_owned(),
            ])),
        }
    }

    /// Sends what the destination's workers ask for, until they have all.
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
            // A worker there may have to wait for its device; who has lost the network is noticed.
            self.connection.stall = Duration::MAX;
            let said = postcopy::hear(&mut self.connection, &mut self.contents)?;
            self.connection.stall = self.wishes.stall;
            let goes_on = match said {
                Said::Asks(asked) => {
                    let is_known = left.insert(asked.of.clone(), asked.left).is_some();
                    self.show_left(&left);
                    let saved = self.owner.fetch(&asked);
                    // The other side may name as many as it likes that are not there.
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
        // From GO on what follows is judged by itself.
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
            // The destination does not run it, and somebody else has a disk.
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
            // What goes up and down is no progress, and what is, begins anew.
            assert_eq!(after(2000), Round::Useful);
            assert_eq!(after(500), Round::Useful);
            let count = (0..1000)
                .take_while(|_| after(495) != Round::Useless)
                .count();
            assert!((30..40).contains(&count), "{count}");
        }
    }
}
