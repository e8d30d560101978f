//! Where this guest's applications are served: by the guest's own pool, on a device that was passed through to it; by
//! the host's pool, through the port; or at an address that the host names: another host's pool, or the server behind a
//! gate.
//!
//! ```text
//!   host ── wish ──> registers ──> agent ── orders ──> applications (which move by themselves)
//!        <─ outcome ───────────────      ── starts, ends ──> gantry-accel on the device
//! ```
//!
//! The agent keeps a connection to each application that it has sent elsewhere; applications that the port serves have
//! one anyway. Orders are sent over these connections. The agent tells the host that all applications have left the
//! pool only after the pool and all processes that it started have ended, so that nobody has the device's files open.
//! An application that connects while others are served elsewhere is served by the port.
//!
//! The host may be about to remove devices. Its wish is then [`Server::Away`], or [`Server::Parked`] if nobody else can
//! serve: the pool's applications then keep their state in their own memory, and wait. The agent reports other
//! processes that use the devices, and moves no application if there are any. When all devices have come back and have
//! drivers, the agent moves the applications back to the pool by itself, whichever host the guest is on by then.

use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd, RawFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    time::{Duration, Instant},
};

use remoting_proto::{
    apis,
    port::{Outcome, OutcomeKind, Server, Wish},
    wire::{
        api::ApiId,
        hello::{self, Form, Hello},
    },
};
use remoting_transport::{
    order::{self, Lead, Order, PARKED},
    socket,
};

use crate::{
    holders::{self, Holder},
    local_pool::LocalPool,
    tracked::Tracked,
};

/// How long an application may take until it has no outstanding operations and has unmapped everything.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a worker may take to answer: a pool that was just started opens the device's driver first.
const OPENING: Duration = Duration::from_secs(60);
/// The polling interval while the pool is about to listen or to end.
pub const SOON: Duration = Duration::from_millis(20);
/// The maximum number of applications that are served elsewhere than by the port; others stay at the port. Each costs a
/// descriptor, of which a process has 1024.
const LED: usize = 512;
/// The maximum for one user.
const LED_OF_ONE_USER: usize = 128;
/// The maximum number of answers to read from an application at a time: only one is due.
const ANSWERS: usize = 16;
/// The folder in which the kernel shows PCI functions.
const PCI: &str = "/sys/bus/pci/devices";
/// The maximum number of processes to name that use a device.
const NAMED: usize = 3;
/// The API of the applications that the pool serves: those that can be moved.
pub const API: ApiId = ApiId::OpenCl;

/// Timeouts.
struct Limits {
    /// For an application's answer: its state is copied and created again.
    answer: Duration,
    /// Until the pool listens.
    start: Duration,
    /// For drivers of devices that applications return to. If one is bound later, the pool looks again.
    drivers: Duration,
    /// Until no application that has left is still connected to the pool, and until the pool has ended.
    end: Duration,
}

const LIMITS: Limits = Limits {
    answer: Duration::from_secs(600),
    start: Duration::from_secs(60),
    drivers: Duration::from_secs(10),
    end: Duration::from_secs(30),
};

/// Where an application is served.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// By this guest's own pool.
    Local,
    /// By the port.
    Port,
    /// At an address that the host has named.
    At(String),
    /// By nobody: it waits for another order.
    Parked,
}

/// An order that has not been answered yet.
struct Ordered {
    to: Place,
    since: Instant,
    /// Whether the agent has stopped waiting for the answer, which may still come.
    late: bool,
}

/// An application that is served elsewhere than by the port, or is on its way.
struct Led {
    lead: Lead,
    user: Option<u32>,
    /// Where it was last known to be served.
    at: Place,
    ordered: Option<Ordered>,
}

impl Led {
    /// Whether the agent waits for its answer.
    fn is_awaited(&self) -> bool {
        self.ordered.as_ref().is_some_and(|ordered| !ordered.late)
    }
}

/// Who serves new applications.
enum Serves {
    /// The pool, if it listens.
    Pool,
    /// The port.
    Port,
    /// The port, until these devices are back.
    PortUntilBack(Tracked),
}

/// The result of a wish, to be reported to the host.
#[derive(Debug)]
pub struct Told {
    /// The outcome.
    pub outcome: Outcome,
    /// The reason, or an empty string.
    pub reason: String,
    /// The port through which the wish came.
    pub port: String,
}

/// A wish of the host that is being carried out.
struct Round {
    wish: Wish,
    /// Where applications are to be served.
    to: Place,
    /// The port through which it came. Empty if the agent acts by itself.
    port: String,
    since: Instant,
    /// Devices that must have drivers before the pool starts.
    devices: Option<Tracked>,
    /// Whether the pool has to end before it is started again.
    renew: bool,
    /// When the pool was started.
    started: Option<Instant>,
    /// When orders were first given.
    given: Option<Instant>,
    /// When the first application has moved.
    first: Option<Instant>,
    /// When all applications had left the pool.
    left: Option<Instant>,
    /// When the pool was first told to end.
    ending: Option<Instant>,
    moved: u16,
    stay: u16,
    /// Why the first one stays.
    reason: String,
    /// Processes that use devices which are to leave. If there are any, no application is moved.
    holders: Vec<Holder>,
}

/// This guest's own pool, and the applications that are served elsewhere than by the port.
pub struct Seats {
    pool: LocalPool,
    /// The path on which the agent listens.
    own: PathBuf,
    serves: Serves,
    led: Vec<Led>,
    round: Option<Round>,
    /// A device was bound to its driver, and has not been looked at yet.
    bound: bool,
    limits: Limits,
    /// The folder in which the kernel shows PCI functions.
    pci: PathBuf,
    /// The process that owns the pool. Its descendants are not reported as holders.
    owner: u32,
}

impl Seats {
    /// Creates the seats of an agent that listens at `own`, with a pool that is started by this command. There is no
    /// pool if the command is empty.
    pub fn new(command: &str, own: PathBuf) -> Self {
        Self {
            pool: LocalPool::new(command, &own),
            own,
            serves: Serves::Pool,
            led: Vec::new(),
            round: None,
            bound: false,
            limits: LIMITS,
            pci: PCI.into(),
            owner: std::process::id(),
        }
    }

    /// Starts the pool if it is to serve and does not run. Its windows have the same size as the host's (`window`, in
    /// bytes), so that applications can move in both directions.
    pub fn start(&mut self, window: u64) {
        if self.wants_pool() {
            self.pool.start(window);
        }
    }

    /// Whether the pool is to serve new applications.
    fn wants_pool(&self) -> bool {
        let round = self.round.as_ref();
        matches!(self.serves, Serves::Pool) && round.is_none_or(|round| round.devices.is_none())
    }

    /// Whether this guest may have its own pool.
    pub fn has_pool(&self) -> bool {
        self.pool.is_configured()
    }

    /// Whether the pool serves new applications now.
    pub fn serves(&mut self) -> bool {
        self.wants_pool() && self.pool.listens()
    }

    /// Redirects an application that has said hello to the pool, and keeps the connection to it. Returns whether the
    /// application was told.
    pub fn seat(&mut self, stream: &UnixStream, hello: &[u8; hello::SIZE]) -> bool {
        let Some(to) = self.pool.socket().to_str() else {
            return false;
        };
        let user = socket::user(stream).ok();
        let alike = self.led.iter().filter(|led| led.user == user);
        if Hello::api(hello) != Some(API)
            || self.led.len() >= LED
            || alike.count() >= LED_OF_ONE_USER
        {
            return false;
        }
        let answer = Hello::answer(apis::answering(hello), Form::Elsewhere, (0, 0));
        let told = order::redirect(stream, answer, to);
        let told = told.and_then(|lead| lead.be_nonblocking().map(|()| lead));
        let Ok(lead) = told else {
            return false;
        };
        self.led.push(Led {
            lead,
            user,
            at: Place::Local,
            ordered: None,
        });
        true
    }

    /// Accepts a new wish of the host, which came through a port, and discards an earlier one. Its orders are still
    /// waited for before anything else happens. `address` is that of the place to be served at, or of devices that are
    /// about to leave.
    pub fn wish(&mut self, wish: Wish, address: &str, port: &str) {
        let mut holders = Vec::new();
        let mut devices = None;
        let (to, serves) = match wish.by {
            Server::Local => (Place::Local, Serves::Pool),
            Server::Host => (Place::Port, Serves::Port),
            // For ports that are served otherwise.
            Server::Examined => return,
            Server::Elsewhere => (Place::At(address.to_owned()), Serves::Port),
            Server::Parked if address.is_empty() => (Place::Parked, Serves::Port),
            Server::Away | Server::Parked => {
                let devices = Tracked::of(self.pci.clone(), address);
                holders = holders::of(&devices, self.owner);
                let to = match wish.by {
                    Server::Parked => Place::Parked,
                    _ => Place::Port,
                };
                (to, Serves::PortUntilBack(devices))
            }
        };
        if holders.is_empty() {
            let before = std::mem::replace(&mut self.serves, serves);
            // Some devices may have left, and be on their way back.
            if let (Serves::PortUntilBack(left), Place::Local) = (before, &to) {
                devices = Some(left);
            }
        }
        self.bound = false;
        self.round = Some(Round {
            wish,
            to,
            port: port.to_owned(),
            since: Instant::now(),
            devices,
            renew: false,
            started: None,
            given: None,
            first: None,
            left: None,
            ending: None,
            moved: 0,
            stay: 0,
            reason: String::new(),
            holders,
        });
    }

    /// Handles a device that was bound to its driver. If the pool is to serve and does not run, or if the host serves
    /// applications (`served`), the pool is started again to look for devices, and the applications that the host
    /// serves move to it. The same happens once all devices that had left are back. Nobody waits for the outcome.
    pub fn again(&mut self, served: bool) {
        if self.round.is_some() {
            self.bound = true;
            return;
        }
        self.bound = false;
        let parked = self.led.iter().any(|led| led.at == Place::Parked);
        let due = match &mut self.serves {
            Serves::Pool => !self.pool.is_running() || served || parked,
            Serves::Port => false,
            Serves::PortUntilBack(devices) => devices.are_back(),
        };
        if !due || !self.has_pool() {
            // The device may be another model, or one of several.
            self.note_parked();
            return;
        }
        let wish = Wish {
            number: 0,
            by: Server::Local,
        };
        self.wish(wish, "", "");
        let mut led = self.led.iter();
        let empty = led.all(|led| led.at == Place::Parked && led.ordered.is_none())
            && self.pool.connections() == 0;
        if let Some(round) = &mut self.round {
            round.renew = empty;
        }
    }

    /// Gives the orders that are due. Returns how many applications stay because they could not be given one.
    fn give(&mut self, place: &Place, served: &[&UnixStream]) -> u16 {
        let to = match place {
            Place::Local => self.pool.socket().display().to_string(),
            Place::Port => self.own.display().to_string(),
            Place::At(address) => address.clone(),
            Place::Parked => PARKED.to_owned(),
        };
        let order = Order {
            to,
            patience: PATIENCE,
            opening: OPENING,
        };
        let mut stay: u16 = 0;
        let ordered = || {
            Some(Ordered {
                to: place.clone(),
                since: Instant::now(),
                late: false,
            })
        };
        self.led.retain_mut(|led| {
            // Only applications of the pool are parked.
            let leaves = *place != Place::Parked || led.at == Place::Local;
            if led.at == *place || !(leaves || led.ordered.is_some()) {
                return true;
            }
            // An application that has not answered the last order is not given another one.
            let given = match led.ordered {
                None => led.lead.give(&order),
                Some(_) => Err(io::ErrorKind::WouldBlock.into()),
            };
            match given {
                Ok(()) => led.ordered = ordered(),
                // It has ended, or takes orders from somebody else.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return false,
                Err(_) => stay = stay.saturating_add(1),
            }
            true
        });
        if matches!(place, Place::Port | Place::Parked) {
            return stay;
        }
        for stream in served {
            let given = match self.led.len() < LED {
                true => order.give(stream),
                false => Err(io::ErrorKind::QuotaExceeded.into()),
            };
            let given = given.and_then(|lead| lead.be_nonblocking().map(|()| lead));
            match given {
                Ok(lead) => self.led.push(Led {
                    lead,
                    user: socket::user(stream).ok(),
                    at: Place::Port,
                    ordered: ordered(),
                }),
                Err(_) => stay = stay.saturating_add(1),
            }
        }
        stay
    }

    /// The descriptors to poll, for [`heard`](Self::heard).
    pub fn fds(&self) -> impl Iterator<Item = RawFd> {
        self.led.iter().map(|led| led.lead.as_fd().as_raw_fd())
    }

    /// The interval until the next look, if anything is expected.
    pub fn next_look(&self) -> Option<Duration> {
        (self.round.is_some() || self.bound).then_some(SOON)
    }

    /// Reads the applications' answers, and forgets those that have ended or that the port serves: those are clients of
    /// the port. An application has left the pool only if it reports that it has moved as ordered, or has ended.
    pub fn heard(&mut self) {
        let (round, limit) = (&mut self.round, self.limits.answer);
        let mut count = |to: &Place, stays: Option<&str>| {
            // Answers to the orders of an earlier wish do not count for this one.
            let counts = |round: &&mut Round| round.given.is_some() && round.to == *to;
            if let Some(round) = round.as_mut().filter(counts) {
                let counted = match stays {
                    None => {
                        round.first.get_or_insert_with(Instant::now);
                        &mut round.moved
                    }
                    Some(why) => {
                        if round.reason.is_empty() {
                            why.clone_into(&mut round.reason);
                        }
                        &mut round.stay
                    }
                };
                *counted = counted.saturating_add(1);
            }
        };
        self.led.retain_mut(|led| {
            for _ in 0..ANSWERS {
                let outcome = match led.lead.heard() {
                    Ok(None) => break,
                    Ok(Some(outcome)) => outcome,
                    // It has ended, or takes orders from somebody else.
                    Err(_) => return false,
                };
                // It may send answers that were not asked for.
                let Some(ordered) = led.ordered.take() else {
                    continue;
                };
                if let Err(why) = &outcome {
                    base::note!("gantry-agent: an application stays where it is: {why}");
                }
                if !ordered.late {
                    count(&ordered.to, outcome.as_ref().err().map(String::as_str));
                }
                if outcome.is_ok() {
                    led.at = ordered.to;
                }
                if led.at == Place::Port {
                    return false;
                }
            }
            if let Some(ordered) = &mut led.ordered
                && !ordered.late
                && ordered.since.elapsed() > limit
            {
                base::note!("gantry-agent: an application does not answer");
                ordered.late = true;
                count(&ordered.to, Some("an application does not answer"));
            }
            true
        });
    }

    /// Continues with a wish. Returns the result if everything is done or nothing more can be done. `served` are the
    /// connections that orders may be given over, `window` is the pool's window size, and `coming` whether the port is
    /// about to serve another application.
    pub fn step(&mut self, served: &[&UnixStream], window: u64, coming: bool) -> Option<Told> {
        if self.bound {
            self.again(!served.is_empty());
        }
        let round = self.round.as_mut()?;
        if !round.holders.is_empty() {
            let holders = std::mem::take(&mut round.holders);
            return self.in_use(&holders);
        }
        let given = round.given.is_some();
        // An application on its way is not told to go elsewhere.
        if self.led.iter().any(Led::is_awaited) {
            return None;
        }
        let to = self.round.as_ref()?.to.clone();
        if !given {
            if to == Place::Local {
                match self.ready(window) {
                    Ok(true) => {}
                    Ok(false) => return None,
                    Err(kind) => return self.over(kind, 0),
                }
            }
            // An application that the port is about to serve is told once it is served.
            if matches!(to, Place::Local | Place::At(_)) && coming {
                return None;
            }
            let given = Instant::now();
            let stay = self.give(&to, served);
            let round = self.round.as_mut()?;
            (round.given, round.stay) = (Some(given), stay);
            if self.led.iter().any(Led::is_awaited) {
                return None;
            }
        }
        let stay = self.round.as_ref()?.stay;
        if stay > 0 {
            return self.stay(stay);
        }
        match to {
            Place::Local => self.done(),
            Place::Port | Place::At(_) | Place::Parked => self.end(),
        }
    }

    /// Whether the pool listens. Returns the outcome to report if it never will.
    fn ready(&mut self, window: u64) -> Result<bool, OutcomeKind> {
        if let Some(round) = &mut self.round
            && let Some(devices) = &round.devices
        {
            if !devices.have_drivers() && round.since.elapsed() <= self.limits.drivers {
                return Ok(false);
            }
            round.devices = None;
        }
        let renew = self.round.as_ref().map(|round| (round.renew, round.since));
        if let Some((true, since)) = renew {
            match self.pool.end() {
                false if since.elapsed() > self.limits.end => return Err(OutcomeKind::Cannot),
                false => return Ok(false),
                true => {}
            }
        }
        let started = match &mut self.round {
            Some(round) => {
                round.renew = false;
                round.started
            }
            None => None,
        };
        if started.is_none() {
            self.start(window);
        }
        let started = started.unwrap_or_else(Instant::now);
        if let Some(round) = &mut self.round {
            round.started = Some(started);
        }
        if self.pool.listens() {
            return Ok(true);
        }
        match !self.pool.is_running() || started.elapsed() > self.limits.start {
            true => Err(OutcomeKind::Cannot),
            false => Ok(false),
        }
    }

    /// Ends the pool, which all known applications have left, if nobody else is connected to it.
    fn end(&mut self) -> Option<Told> {
        let round = self.round.as_mut()?;
        let ending = match round.ending {
            Some(ending) => ending,
            None => {
                // The workers of applications that have left may not have ended yet.
                let left = *round.left.get_or_insert_with(Instant::now);
                let there = self.pool.connections();
                if there > 0 && left.elapsed() <= self.limits.end {
                    return None;
                }
                if there > 0 {
                    base::note!(
                        "gantry-agent: this guest's own pool goes on, as it serves {there} \
                         applications that this agent has not sent there"
                    );
                    return self.stay(there.try_into().unwrap_or(u16::MAX));
                }
                *round.ending.get_or_insert_with(Instant::now)
            }
        };
        if self.pool.end() {
            // Processes that have opened a device meanwhile.
            let holders = match &self.serves {
                Serves::PortUntilBack(devices) => holders::of(devices, self.owner),
                Serves::Pool | Serves::Port => Vec::new(),
            };
            return match holders.is_empty() {
                true => self.done(),
                false => self.in_use(&holders),
            };
        }
        if ending.elapsed() <= self.limits.end {
            return None;
        }
        base::note!(
            "gantry-agent: processes that this guest's own pool has started do not end: they may use \
             its device"
        );
        self.over(OutcomeKind::Cannot, 0)
    }

    /// Some applications stay. If the pool runs, they need it, so it serves new ones again, too.
    fn stay(&mut self, stay: u16) -> Option<Told> {
        if self.pool.is_running() {
            self.serves = Serves::Pool;
        }
        self.note_parked();
        self.over(OutcomeKind::Stay, stay)
    }

    /// Other processes use a device that is about to leave.
    fn in_use(&mut self, holders: &[Holder]) -> Option<Told> {
        let named = holders.iter().take(NAMED).map(ToString::to_string);
        let named: Vec<_> = named.collect();
        self.round.as_mut()?.reason = named.join(", ");
        let count = holders.len().try_into().unwrap_or(u16::MAX);
        self.over(OutcomeKind::InUse, count)
    }

    fn done(&mut self) -> Option<Told> {
        let round = self.round.as_ref()?;
        if round.to == Place::Parked {
            self.note_parked();
        }
        let moved = round.moved;
        // Nobody has asked for it.
        if round.port.is_empty() && moved > 0 {
            let took = round.since.elapsed().as_millis();
            let after = |when: Option<Instant>| {
                let passed = when.unwrap_or(round.since) - round.since;
                passed.as_millis()
            };
            let (started, given) = (after(round.started), after(round.given));
            let first = after(round.first);
            base::note!(
                "gantry-agent: {moved} applications have come back to this guest's own pool, {took} ms \
                 after its device had its driver: the pool was asked to start at {started} ms and \
                 listened at {given} ms, and the first one had moved at {first} ms"
            );
        }
        self.over(OutcomeKind::Done, moved)
    }

    /// Reports what parked applications wait for.
    fn note_parked(&self) {
        let parked = self.led.iter().filter(|led| led.at == Place::Parked);
        let count = parked.count();
        let until = match &self.serves {
            Serves::PortUntilBack(devices) => format!("{devices} is back with its driver, or "),
            Serves::Pool | Serves::Port => String::new(),
        };
        if count > 0 {
            base::note!(
                "gantry-agent: {count} applications are parked, their state in this guest's memory: they \
                 wait until {until}the host has them go on (gantry ctl move-accel ID --to host or local)"
            );
        }
    }

    fn over(&mut self, kind: OutcomeKind, applications: u16) -> Option<Told> {
        let round = self.round.take()?;
        let outcome = Outcome {
            number: round.wish.number,
            kind,
            applications,
        };
        Some(Told {
            outcome,
            reason: round.reason,
            port: round.port,
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
