//! Where this guest's applications are served: by a pool of this guest's own, on a device that was
//! passed through to it, by the host's, through the port, or by whoever is at an address that the host
//! names: another host's pool, or the server behind a gate.
//!
//! ```text
//!   host ── wish ──> registers ──> agent ── orders ──> applications (which go by themselves)
//!        <─ outcome ───────────────      ── starts, ends ──> gantry-accel on the device
//! ```
//!
//! The agent keeps a connection to each application that it has sent somewhere, and those that the port
//! serves have one anyway: orders go over these. Before the host is told that all have left the pool, that
//! has ended with all that it has started, so that nobody has the device's files open. An application
//! that comes while others are served elsewhere is served by the port.
//!
//! Where the host is about to take devices away (a wish for [`Server::Away`], or [`Server::Parked`] where
//! nobody else can serve: applications of the pool keep their state in their own memory then, and wait), the
//! agent says who else uses them, and moves nobody if somebody does. When all have come back, and have their drivers, it brings
//! applications back to the pool by itself, whatever host the guest is on by then.

use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd, RawFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    time::{Duration, Instant},
};

use gantry_remoting::{
    apis,
    link::{
        order::{self, Lead, Order, PARKED},
        socket,
    },
    port::{Outcome, OutcomeKind, Server, Wish},
    wire::{
        api::ApiId,
        hello::{self, Form, Hello},
    },
};

use crate::{
    holders::{self, Holder},
    local_pool::LocalPool,
    tracked::Tracked,
};

/// How long an application may take until nothing is under way, and all is unmapped.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a worker may take to answer: a pool that has just been started opens the device's driver first.
const OPENING: Duration = Duration::from_secs(60);
/// How often the agent looks while the pool is about to listen, or to end.
pub const SOON: Duration = Duration::from_millis(20);
/// Most applications that are served elsewhere than by the port; further ones stay there. Each costs
/// a descriptor, of which a process has 1024.
const LED: usize = 512;
/// Most of them of one user.
const LED_OF_ONE_USER: usize = 128;
/// Most answers of an application that are heard at a time: one is due.
const ANSWERS: usize = 16;
/// Where the kernel shows PCI functions.
const PCI: &str = "/sys/bus/pci/devices";
/// Most processes that use a device and are named.
const NAMED: usize = 3;
/// Which API's applications the pool serves: those that can change.
pub const API: ApiId = ApiId::OpenCl;

/// How long is waited, at most.
struct Limits {
    /// For an application's answer: its state is copied, and made again.
    answer: Duration,
    /// Until the pool listens.
    start: Duration,
    /// For drivers of devices that applications go back to: if one comes later, the pool looks once more.
    drivers: Duration,
    /// Until those that have left are not connected with it any more, and until it has ended.
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

/// An order that was not answered yet.
struct Ordered {
    to: Place,
    since: Instant,
    /// Whether it is not waited for any more. The answer may come still.
    late: bool,
}

/// An application that is served elsewhere than by the port, or that is on its way.
struct Led {
    lead: Lead,
    user: Option<u32>,
    /// Where it was last known to be served.
    at: Place,
    ordered: Option<Ordered>,
}

impl Led {
    /// Whether its answer is waited for.
    fn is_awaited(&self) -> bool {
        self.ordered.as_ref().is_some_and(|ordered| !ordered.late)
    }
}

/// Who serves applications that come.
enum Serves {
    /// The pool, if it listens.
    Pool,
    /// The port.
    Port,
    /// The port, until these devices are back.
    PortUntilBack(Tracked),
}

/// What has come of a wish.
#[derive(Debug)]
pub struct Told {
    /// What.
    pub outcome: Outcome,
    /// Why, if there is something to say.
    pub reason: String,
    /// The port that the wish came by.
    pub port: String,
}

/// A wish of the host that is being carried out.
struct Round {
    wish: Wish,
    /// Where applications are to be served.
    to: Place,
    /// The port that it came by.
    port: String,
    since: Instant,
    /// Devices that are to have drivers before the pool starts.
    devices: Option<Tracked>,
    /// Whether the pool is to end before it starts.
    renew: bool,
    /// Since when the pool is to listen.
    started: Option<Instant>,
    /// Since when orders are given.
    given: Option<Instant>,
    /// When the first application has moved.
    first: Option<Instant>,
    /// Since when all have left the pool.
    left: Option<Instant>,
    /// Since when the pool is to end.
    ending: Option<Instant>,
    moved: u16,
    stay: u16,
    /// Why the first one stays.
    reason: String,
    /// Who uses devices that are to leave: nobody is moved.
    holders: Vec<Holder>,
}

/// This guest's own pool, and the applications that are served elsewhere than by the port.
pub struct Seats {
    pool: LocalPool,
    /// Where the agent listens.
    own: PathBuf,
    serves: Serves,
    led: Vec<Led>,
    round: Option<Round>,
    /// A device has got its driver, which is yet to be looked at.
    bound: bool,
    limits: Limits,
    /// Where the kernel shows PCI functions.
    pci: PathBuf,
    /// The process whose pool it is: what that has started is not told of.
    owner: u32,
}

impl Seats {
    /// With a pool that is started so, beside an agent that listens there. There is none if the
    /// command is empty.
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

    /// Starts the pool if it is to serve and does not run; its windows are as large as the host's
    /// (`window`, in bytes), so that applications can go there and back.
    pub fn start(&mut self, window: u64) {
        if self.wants_pool() {
            self.pool.start(window);
        }
    }

    /// Whether the pool is to serve applications that come.
    fn wants_pool(&self) -> bool {
        let round = self.round.as_ref();
        matches!(self.serves, Serves::Pool) && round.is_none_or(|round| round.devices.is_none())
    }

    /// Whether this guest may have a pool of its own.
    pub fn has_pool(&self) -> bool {
        self.pool.is_configured()
    }

    /// Whether the pool serves applications that come.
    pub fn serves(&mut self) -> bool {
        self.wants_pool() && self.pool.listens()
    }

    /// Sends an application that has said hello to the pool, and keeps what leads to it. Whether it was
    /// told.
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

    /// A new wish of the host, that came by a port; an earlier one is forgotten. What was ordered by it
    /// is waited for before anything else is. `address`: of whoever is to serve elsewhere, or of devices
    /// that are to leave.
    pub fn wish(&mut self, wish: Wish, address: &str, port: &str) {
        let mut holders = Vec::new();
        let mut devices = None;
        let (to, serves) = match wish.by {
            Server::Local => (Place::Local, Serves::Pool),
            Server::Host => (Place::Port, Serves::Port),
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
            // Some may have left, and be on their way back.
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

    /// A device has got its driver: if the pool is to serve and does not, or somebody is `served` by the
    /// host, the pool looks for devices once more, and who is served by the host comes to it. So they do
    /// if all devices are back that have left. Nobody waits for what comes of that.
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
            // It may be of another model, or one of several.
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

    /// Gives what orders are due: how many stay where they are as they could not be given one.
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
            // Only the pool is left by who is parked.
            let leaves = *place != Place::Parked || led.at == Place::Local;
            if led.at == *place || !(leaves || led.ordered.is_some()) {
                return true;
            }
            // Who has not answered the last one gets no further one.
            let given = match led.ordered {
                None => led.lead.give(&order),
                Some(_) => Err(io::ErrorKind::WouldBlock.into()),
            };
            match given {
                Ok(()) => led.ordered = ordered(),
                // It has ended, or follows somebody else.
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

    /// What to poll, beside [`heard`](Self::heard).
    pub fn fds(&self) -> impl Iterator<Item = RawFd> {
        self.led.iter().map(|led| led.lead.as_fd().as_raw_fd())
    }

    /// How soon to look again, if anything is expected.
    pub fn next_look(&self) -> Option<Duration> {
        (self.round.is_some() || self.bound).then_some(SOON)
    }

    /// Hears what applications answer, and forgets those that have ended, or that the port serves: it
    /// has them as clients. Only who says that it has left as it was told, or ends, has left the pool.
    pub fn heard(&mut self) {
        let (round, limit) = (&mut self.round, self.limits.answer);
        let mut count = |to: &Place, stays: Option<&str>| {
            // Answers to an earlier wish's orders are no outcome of this one.
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
                    // It has ended, or follows somebody else.
                    Err(_) => return false,
                };
                // It may say what it was not asked.
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

    /// Goes on with a wish: what is to be told of it, if all is done or can go no further, and by
    /// which port. `served` as for orders; `window` as for the pool; `coming`: whether the port is
    /// about to serve somebody.
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
        // Nobody is told to go elsewhere while it is on its way.
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
            // Who is about to be served by the port is told when it is.
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

    /// Whether the pool listens; what there is to tell if it will not.
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

    /// Ends the pool, which all have left that are known of, if nobody else is connected with it.
    fn end(&mut self) -> Option<Told> {
        let round = self.round.as_mut()?;
        let ending = match round.ending {
            Some(ending) => ending,
            None => {
                // Workers of those that have left may not have ended yet.
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
            // Who has opened a device meanwhile.
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

    /// Some stay: at the pool if it runs, they need it.
    fn stay(&mut self, stay: u16) -> Option<Told> {
        if self.pool.is_running() {
            self.serves = Serves::Pool;
        }
        self.note_parked();
        self.over(OutcomeKind::Stay, stay)
    }

    /// Others use a device that is to leave.
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

    /// Says for what those that are parked wait.
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
