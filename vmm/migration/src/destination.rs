//! The destination: its phases are values that own what each phase needs.

use std::{
    fs::File,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use base::{Cancel, Unpoisoned};
use devices::accel::{left::Asking, rounds::CopiedPort};
use remoting_relocation::rounds::MACHINE;
use vmm_machine::applications;

use super::{
    Error, Result, archive,
    connection::{Connection, OtherSide, STALL, TICK},
    files::{GivenFile, MAX_FILES},
    frame::{Kind, protocol},
    lanes::{self, Body, Memory, Token},
    listener::{Awaited, Listener},
    offer::{CopyOf, Departure, HostId, Moment, Offer, Prepared},
    pages::{Arriving, Region},
    postcopy,
    progress::{Direction, Phase as Shown, Progress},
};

/// How long a machine that is ready to run waits for GO.
pub const WAIT_FOR_GO: Duration = Duration::from_secs(30);

/// How long a source may keep silent while its workers stop and then save.
const WORKERS: Duration = applications::LONG.saturating_mul(2).saturating_add(STALL);

/// Time limit for a source to send its complete offer.
const OFFER: Duration = Duration::from_secs(10);

/// Upper limit, in milliseconds, of what the source claims to need for stopping its machine.
const MOST_MS: u64 = 10_000;

/// Maximum number of copies that are accepted, also from a Gantry version that makes more.
pub(crate) const MOST_COPIES: u32 = 4 * MACHINE.most;

/// The activity while waiting for workers.
const COPYING: &str = "having workers make a copy of applications";

/// Builds the machine. Called on the migration's thread, which waits for the result.
pub trait Host: Send {
    /// Returns every reason why the offer cannot be accepted; empty if it can. When that is cancelled, it does not wait for
    /// storage any more, and says so.
    fn examine(&mut self, offer: &Offer, cancel: &Cancel) -> Vec<String>;
    /// Whether `host` is the host that this process runs on.
    fn is_here(&self, host: &HostId) -> bool;
    /// Creates a machine with memory, backed by the given files if there are any, unless that is cancelled.
    fn prepare(
        &mut self,
        offer: Offer,
        files: Vec<GivenFile>,
        cancel: Cancel,
    ) -> std::result::Result<Vec<Region>, String>;
    /// Makes workers create copies of applications that still run at the source, and waits for them unless that is
    /// cancelled. If the migration fails, these workers end together with the machine.
    fn copy(
        &mut self,
        ports: Vec<CopiedPort>,
        archive: File,
        cancel: Cancel,
    ) -> std::result::Result<(), String> {
        let _ = (ports, archive, cancel);
        Err("there are no accelerators".to_owned())
    }
    /// Restores devices and vCPUs to the state at that moment, if it is known, and the applications of accelerators if
    /// any have arrived, as for [`Host::copy`]. The machine is paused, without disk locks.
    fn restore(
        &mut self,
        state: Vec<u8>,
        saved_at: Option<Moment>,
        archive: Option<File>,
        cancel: Cancel,
    ) -> std::result::Result<(), String>;
    /// Starts a thread.
    fn start(&mut self, body: Body) -> std::result::Result<(), String>;
    /// Starts the thread of a connection that receives memory.
    fn start_lane(&mut self, number: u32, body: Body) -> std::result::Result<(), String> {
        let _ = number;
        self.start(body)
    }
    /// Acquires the disk locks.
    fn take_locks(&mut self) -> std::result::Result<(), String>;
    /// Where the machine's applications will request contents that follow after it has started to run.
    fn asking(&mut self) -> std::result::Result<Vec<Asking>, String> {
        Ok(Vec::new())
    }
    /// Lets the machine run. It must hold its locks; after an error the machine is gone, and the locks with it.
    fn run(&mut self) -> std::result::Result<(), String>;
    /// The machine runs. `fixed` is the downtime of the migration apart from memory.
    fn has_moved(&mut self, fixed: Duration);
}

/// The phase of the destination, with what it owns.
enum Phase {
    Offer,
    Rounds(Memory),
    Final(Arriving),
    /// The downtime so far, apart from memory.
    Ready(Duration),
    Running,
}

/// Why a migration ended without a machine.
#[derive(Debug)]
pub enum Ended {
    /// The source only asked whether the machine would be accepted.
    Asked,
    /// The peer was not a source: no migration has begun.
    Stranger(Error),
    /// The migration failed; nothing is left of it.
    Failed(Error),
}

/// Waits for a source, whatever else connects, and receives a machine, which runs when this returns `Ok`. A dry run is
/// answered and does not end the wait.
pub fn receive(
    listener: &mut Listener,
    host: &mut dyn Host,
    progress: &Progress,
) -> std::result::Result<(), Ended> {
    loop {
        let connection = listener.accept(progress).map_err(Ended::Failed)?;
        match Destination::new(connection, host, progress.clone()).run_at(Some(listener)) {
            Err(Ended::Asked) => {}
            Err(Ended::Stranger(error)) => listener
                .turned_away(&error.to_string())
                .map_err(Ended::Failed)?,
            ended => return ended,
        }
    }
}

/// One migration.
pub struct Destination<'a> {
    connection: Connection,
    host: &'a mut dyn Host,
    progress: Progress,
    contents: Vec<u8>,
    /// The received part of the applications' archive, if the machine may have one.
    archive: Option<archive::Incoming>,
    /// Bytes of it.
    archived: u64,
    /// How many more copies of applications are accepted.
    copies: u32,
    dry_run: bool,
    /// Contents of applications may follow after the machine has started to run.
    postcopy: bool,
    /// An offer has arrived.
    is_source: bool,
    /// Ends the memory connections, whatever the outcome of the migration.
    of_lanes: Progress,
    /// Why one of them has failed.
    lane_failed: lanes::Failed,
}

impl Drop for Destination<'_> {
    fn drop(&mut self) {
        self.of_lanes.cancel();
    }
}

impl<'a> Destination<'a> {
    /// Creates a destination on a connection.
    pub fn new(connection: Connection, host: &'a mut dyn Host, progress: Progress) -> Self {
        Self {
            connection,
            host,
            progress,
            contents: Vec::new(),
            archive: None,
            archived: 0,
            copies: 0,
            dry_run: false,
            postcopy: false,
            is_source: false,
            of_lanes: Progress::new(Direction::Incoming, ""),
            lane_failed: lanes::Failed::default(),
        }
    }

    /// Receives a machine, which runs when this returns `Ok`.
    pub fn run(self) -> std::result::Result<(), Ended> {
        self.run_at(None)
    }

    /// As [`Destination::run`]; the source may open further connections to the listener.
    fn run_at(mut self, mut listener: Option<&mut Listener>) -> std::result::Result<(), Ended> {
        let mut phase = Phase::Offer;
        loop {
            phase = match self.step(phase, listener.as_deref_mut()) {
                Ok(Phase::Running) => return Ok(()),
                Ok(_) if self.dry_run => return Err(Ended::Asked),
                Ok(next) => next,
                Err(error) => {
                    let error = self.why(error);
                    if !matches!(
                        error,
                        Error::Refused(_) | Error::Broken { .. } | Error::HostGone { .. }
                    ) {
                        self.connection.send_failure(&[error.to_string()]);
                    }
                    return Err(match self.is_source || self.progress.is_cancelled() {
                        true => Ended::Failed(error),
                        false => Ended::Stranger(error),
                    });
                }
            };
        }
    }

    fn step(&mut self, phase: Phase, listener: Option<&mut Listener>) -> Result<Phase> {
        match phase {
            Phase::Offer => self.offer(listener),
            Phase::Rounds(memory) => self.rounds(&memory),
            Phase::Final(memory) => self.state(&memory),
            Phase::Ready(so_far) => self.ready(so_far),
            Phase::Running => Ok(phase),
        }
    }

    /// The actual cause: an error on this side, or what the source reported.
    fn why(&mut self, error: Error) -> Error {
        let is_told = matches!(
            error,
            Error::Refused(_) | Error::Broken { .. } | Error::HostGone { .. }
        );
        match self.lane_failed.lock_unpoisoned().take() {
            Some(of_lane) if is_told => of_lane,
            _ if self.is_source && !self.progress.is_cancelled() => self.connection.why(error),
            _ => error,
        }
    }

    fn show(&mut self, phase: Shown, doing: &'static str) {
        self.connection.doing = doing;
        self.progress.update(|info| info.phase = phase);
    }

    fn offer(&mut self, listener: Option<&mut Listener>) -> Result<Phase> {
        self.show(Shown::Offer, "waiting for the offer");
        self.connection.deadline = Some(Instant::now() + OFFER);
        self.connection
            .receive(&[Kind::Offer], &mut self.contents)?;
        let offer: Offer = serde_json::from_slice(&self.contents)
            .map_err(|error| protocol(format!("the offer does not parse: {error}")))?;
        let files = self.files(&offer)?;
        self.connection.deadline = None;
        self.is_source = true;
        let mut reasons = offer.version_reasons();
        reasons.extend(self.for_source(|host, cancel| Ok(host.examine(&offer, &cancel)))?);
        if !reasons.is_empty() {
            self.connection.send_failure(&reasons);
            return Err(Error::Refused(reasons));
        }
        self.dry_run = offer.dry_run;
        if offer.has_applications() {
            self.archive = Some(archive::Incoming::default());
            self.connection.stall = WORKERS;
        }
        self.postcopy = offer.postcopy && self.archive.is_some();
        let count = offer.lanes;
        let copies = offer.copies && self.archive.is_some();
        if copies {
            self.copies = MOST_COPIES;
        }
        let same_host = offer
            .host
            .as_ref()
            .is_some_and(|host| self.host.is_here(host));
        self.show(Shown::Prepare, "preparing the memory");
        let memory = if self.dry_run {
            Vec::new()
        } else {
            let total = offer
                .regions
                .iter()
                .fold(0_u64, |sum, r| sum.saturating_add(r.len));
            self.progress.update(|info| info.total_bytes = total);
            self.for_source(|host, cancel| host.prepare(offer, files, cancel))?
        };
        let memory = Memory::new(Arriving::new(memory));
        let token = match count {
            _ if self.dry_run => None,
            0 => None,
            _ => Some(lanes::token()?),
        };
        let prepared = Prepared {
            token,
            same_host,
            copies,
        };
        self.connection
            .send(Kind::Prepared, 0, &prepared.encode())?;
        if let Some(token) = token {
            self.lanes(count, token, &memory, listener)?;
        }
        Ok(Phase::Rounds(memory))
    }

    /// Waits for the further connections of the source.
    fn lanes(
        &mut self,
        count: u32,
        token: Token,
        memory: &Memory,
        listener: Option<&mut Listener>,
    ) -> Result<()> {
        let listener = listener.ok_or_else(|| protocol("there is nothing to connect to"))?;
        let patience = lanes::patience(count);
        let awaited = Awaited {
            token,
            end: Instant::now() + patience,
            patience,
            source: self.connection.other_side()?,
        };
        for number in 0..count {
            let mut connection = match listener.accept_lane(&awaited, &self.progress) {
                // It may have sent the reason.
                Err(_) if awaited.source.has_ended(Duration::ZERO) => {
                    let said = self.connection.receive(&[], &mut self.contents);
                    return said.map(drop);
                }
                connection => connection?,
            };
            connection.watch(self.of_lanes.clone());
            // With many connections or a low bandwidth, one may carry nothing for long. The first connection shows
            // whether the source is alive.
            connection.stall = Duration::MAX;
            let (memory, progress) = (memory.clone(), self.progress.clone());
            let failed = Arc::clone(&self.lane_failed);
            let body = move || lanes::take(connection, &memory, &progress, &failed);
            let started = self.host.start_lane(number, Box::new(body));
            started.map_err(Error::Machine)?;
        }
        Ok(())
    }

    /// Receives the files that follow an offer.
    fn files(&mut self, offer: &Offer) -> Result<Vec<GivenFile>> {
        if offer.files > MAX_FILES {
            return Err(protocol(format!("{} files with a machine", offer.files)));
        }
        let mut files = Vec::new();
        for _ in 0..offer.files {
            let file = self.connection.receive_file(&mut self.contents)?;
            let what = serde_json::from_slice(&self.contents)
                .map_err(|error| protocol(format!("a file that is nothing known: {error}")))?;
            files.push(GivenFile { what, file });
        }
        Ok(files)
    }

    fn rounds(&mut self, memory: &Memory) -> Result<Phase> {
        self.show(Shown::Rounds, "receiving memory");
        loop {
            let expected = [
                Kind::Pages,
                Kind::Barrier,
                Kind::State,
                Kind::Archive,
                Kind::Copy,
            ];
            let expected = match (&self.archive, self.copies) {
                (None, _) => &expected[..3],
                (Some(_), 0) => &expected[..4],
                (Some(_), _) => &expected[..],
            };
            let header = self.connection.receive_header(expected)?;
            if header.kind != Kind::Pages {
                self.connection
                    .receive_contents(header, &mut self.contents)?;
            }
            match header.kind {
                Kind::Pages => {
                    let bytes = memory.receive(header, &mut self.connection)?;
                    self.progress.update(|info| {
                        info.sent_bytes += bytes;
                        info.rounds = header.round.saturating_add(1);
                    });
                }
                Kind::Barrier => self.connection.send(Kind::Barrier, header.round, &[])?,
                Kind::Archive => {
                    if let Some(archive) = &mut self.archive {
                        archive.take(&self.contents)?;
                    }
                    let bytes = self.contents.len() as u64;
                    self.archived += bytes;
                    self.progress.update(|info| info.sent_bytes += bytes);
                }
                Kind::Copy => {
                    let doing = std::mem::replace(&mut self.connection.doing, COPYING);
                    self.copy()?;
                    self.connection.doing = doing;
                    self.connection.send(Kind::Copy, header.round, &[])?;
                }
                // From here on the source cannot change the memory any more: a frame that is still arriving on another
                // connection is dropped.
                _ => {
                    self.of_lanes.cancel();
                    return Ok(Phase::Final(memory.close()?));
                }
            }
        }
    }

    fn copy(&mut self) -> Result<()> {
        self.copies = self.copies.saturating_sub(1);
        let copy: CopyOf = serde_json::from_slice(&self.contents)
            .map_err(|error| protocol(format!("a copy does not parse: {error}")))?;
        let archive = self.archive.replace(archive::Incoming::default());
        let archive = archive.unwrap_or_default().finish(Some(copy.archive))?;
        let archive = archive.ok_or_else(|| protocol("a copy without an archive"))?;
        let bytes = std::mem::take(&mut self.archived);
        self.progress.update(|info| info.accel_bytes += bytes);
        self.for_source(|host, cancel| host.copy(copy.ports, archive, cancel))
    }

    /// Runs work that becomes pointless when the migration is cancelled or the source ends: another thread watches for
    /// that meanwhile.
    fn for_source<R>(
        &mut self,
        work: impl FnOnce(&mut dyn Host, Cancel) -> std::result::Result<R, String>,
    ) -> Result<R> {
        let source = self.connection.other_side()?;
        let cancel = Cancel::default();
        let goes_on = Arc::new(());
        let (of_thread, ends) = (cancel.clone(), Arc::downgrade(&goes_on));
        let (progress, looks) = (self.progress.clone(), source.try_clone()?);
        let body = move || look(&looks, &progress, &of_thread, &ends);
        self.host.start(Box::new(body)).map_err(Error::Machine)?;
        let done = work(self.host, cancel);
        drop(goes_on);
        done.map_err(|why| match source.has_ended(Duration::ZERO) {
            true if !self.progress.is_cancelled() => source.broken(),
            _ => Error::Machine(why),
        })
    }

    fn state(&mut self, memory: &Arriving) -> Result<Phase> {
        self.show(Shown::Final, "taking the state over");
        let departure: Departure = serde_json::from_slice(&self.contents)
            .map_err(|error| protocol(format!("the state does not parse: {error}")))?;
        if departure.hash.is_some_and(|hash| hash != memory.hash()) {
            return Err(Error::Differs);
        }
        let archive = self.archive.take().unwrap_or_default();
        let archive = archive.finish(departure.archive)?;
        let bytes = self.archived;
        self.progress.update(|info| info.accel_stop_bytes = bytes);
        let came = Instant::now();
        self.for_source(|host, cancel| {
            host.restore(departure.state, departure.saved_at, archive, cancel)
        })?;
        self.connection.send(Kind::Ready, 0, &[])?;
        // The value comes from the peer. For a machine that is migrated again it serves as an estimate.
        let stopping = Duration::from_millis(departure.stopping_ms.min(MOST_MS));
        Ok(Phase::Ready(stopping + came.elapsed()))
    }

    fn ready(&mut self, so_far: Duration) -> Result<Phase> {
        self.show(Shown::Go, "waiting for the VM to be handed over");
        self.connection.stall = WAIT_FOR_GO;
        self.connection.deadline = Some(Instant::now() + WAIT_FOR_GO);
        self.connection.receive(&[Kind::Go], &mut self.contents)?;
        self.connection.deadline = None;
        self.connection.uninterrupted = true;
        let came = Instant::now();
        // The destination holds the locks until the machine runs, so a source that gets no reply cannot mistake it for
        // dead.
        let asking = match self.postcopy {
            true => self.host.asking(),
            false => Ok(Vec::new()),
        };
        let runs = asking.and_then(|asking| {
            self.host.take_locks()?;
            self.host.run()?;
            Ok(asking)
        });
        let asking = runs.map_err(|reason| {
            if let Err(error) = self.connection.send(Kind::Denied, 0, &[]) {
                log::warn!("the source does not hear that its VM does not run here: {error}");
            }
            Error::Machine(reason)
        })?;
        if let Err(error) = self.connection.send(Kind::Running, 0, &[]) {
            log::warn!("the source does not hear that its VM runs here: {error}");
        }
        if !asking.is_empty() {
            self.follow(asking);
        }
        self.host.has_moved(so_far + came.elapsed());
        Ok(Phase::Running)
    }
}

impl Destination<'_> {
    /// Receives the contents of applications that follow on this connection. Without it they are lost.
    fn follow(&mut self, asking: Vec<Asking>) {
        let host = &mut *self.host;
        match self.connection.try_clone() {
            Ok(connection) => postcopy::relay(connection, asking, &mut |body| host.start(body)),
            Err(error) => log::warn!(
                "contents of applications' memory that were to follow are lost: {}",
                base::Chain(&error)
            ),
        }
    }
}

/// Cancels `cancel` when the migration is cancelled or its source has ended, as long as `goes_on` is alive.
fn look(source: &OtherSide, progress: &Progress, cancel: &Cancel, goes_on: &Weak<()>) {
    while goes_on.strong_count() > 0 {
        if source.has_ended(TICK) || progress.is_cancelled() {
            cancel.cancel();
            break;
        }
    }
}
