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
        order::{self, Lead, Order},
        socket,
    },
    port::{Outcome, OutcomeKind, Server, Wish},
    wire::{
        api::ApiId,
        hello::{self, Form, Hello},
    },
};

use crate::local_pool::LocalPool;

/// How long an application may take until nothing is under way, and all is unmapped.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often the agent looks while the pool is about to listen, or to end.
pub const SOON: Duration = Duration::from_millis(20);
/// Most applications that are served elsewhere than by the port; further ones stay there. Each costs
/// a descriptor, of which a process has 1024.
const LED: usize = 512;
/// Most of them of one user.
const LED_OF_ONE_USER: usize = 128;
/// Most answers of an application that are heard at a time: one is due.
const ANSWERS: usize = 16;
/// Which API's applications the pool serves: those that can change.
pub const API: ApiId = ApiId::OpenCl;

/// How long is waited, at most.
struct Limits {
    /// For an application's answer: its state is copied, and made again.
    answer: Duration,
    /// Until the pool listens.
    start: Duration,
    /// Until those that have left are not connected with it any more, and until it has ended.
    end: Duration,
}

const LIMITS: Limits = Limits {
    answer: Duration::from_secs(600),
    start: Duration::from_secs(60),
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

/// A wish of the host that is being carried out.
struct Round {
    wish: Wish,
    /// Where applications are to be served.
    to: Place,
    /// The port that it came by.
    port: String,
    since: Instant,
    /// Whether the pool is to end before it starts.
    renew: bool,
    /// Since when the pool is to listen.
    started: Option<Instant>,
    /// Whether orders were given.
    given: bool,
    /// Since when all have left the pool.
    left: Option<Instant>,
    /// Since when the pool is to end.
    ending: Option<Instant>,
    moved: u16,
    stay: u16,
}

/// This guest's own pool, and the applications that are served elsewhere than by the port.
pub struct Seats {
    pool: LocalPool,
    /// Where the agent listens.
    own: PathBuf,
    /// Whether the pool is to serve those that come.
    wanted: bool,
    led: Vec<Led>,
    round: Option<Round>,
    limits: Limits,
}

impl Seats {
    /// With a pool that is started so, beside an agent that listens there. There is none if the
    /// command is empty.
    pub fn new(command: &str, own: PathBuf) -> Self {
        Self {
            pool: LocalPool::new(command, &own),
            own,
            wanted: true,
            led: Vec::new(),
            round: None,
            limits: LIMITS,
        }
    }

    /// Starts the pool if it is to serve and does not run; its windows are as large as the host's
    /// (`window`, in bytes), so that applications can go there and back.
    pub fn start(&mut self, window: u64) {
        if self.wanted {
            self.pool.start(window);
        }
    }

    /// Whether this guest may have a pool of its own.
    pub fn has_pool(&self) -> bool {
        self.pool.is_configured()
    }

    /// Whether the pool serves applications that come.
    pub fn serves(&mut self) -> bool {
        self.wanted && self.pool.listens()
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
    /// is waited for before anything else is. `address`: of whoever is to serve elsewhere.
    pub fn wish(&mut self, wish: Wish, address: &str, port: &str) {
        let to = match wish.by {
            Server::Local => Place::Local,
            Server::Host => Place::Port,
            Server::Elsewhere => Place::At(address.to_owned()),
        };
        self.wanted = to == Place::Local;
        self.round = Some(Round {
            wish,
            to,
            port: port.to_owned(),
            since: Instant::now(),
            renew: false,
            started: None,
            given: false,
            left: None,
            ending: None,
            moved: 0,
            stay: 0,
        });
    }

    /// A device has got its driver: if the pool is to serve and does not, or somebody is `served` by the
    /// host, the pool looks for devices once more, and who is served by the host comes to it. Nobody
    /// waits for what comes of that.
    pub fn again(&mut self, served: bool) {
        let useless = self.pool.is_running() && !served;
        if !self.wanted || !self.has_pool() || self.round.is_some() || useless {
            return;
        }
        let wish = Wish {
            number: 0,
            by: Server::Local,
        };
        self.wish(wish, "", "");
        let empty = self.led.is_empty() && self.pool.connections() == 0;
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
        };
        let order = Order {
            to,
            patience: PATIENCE,
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
            if led.at == *place {
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
        if *place == Place::Port {
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
        self.round.as_ref().map(|_| SOON)
    }

    /// Hears what applications answer, and forgets those that have ended, or that the port serves: it
    /// has them as clients. Only who says that it has left as it was told, or ends, has left the pool.
    pub fn heard(&mut self) {
        let (round, limit) = (&mut self.round, self.limits.answer);
        let mut count = |to: &Place, good: bool| {
            // Answers to an earlier wish's orders are no outcome of this one.
            let counts = |round: &&mut Round| round.given && round.to == *to;
            if let Some(round) = round.as_mut().filter(counts) {
                let counted = if good {
                    &mut round.moved
                } else {
                    &mut round.stay
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
                    count(&ordered.to, outcome.is_ok());
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
                count(&ordered.to, false);
            }
            true
        });
    }

    /// Goes on with a wish: what is to be told of it, if all is done or can go no further, and by
    /// which port. `served` as for orders; `window` as for the pool; `coming`: whether the port is
    /// about to serve somebody.
    pub fn step(
        &mut self,
        served: &[&UnixStream],
        window: u64,
        coming: bool,
    ) -> Option<(Outcome, String)> {
        let given = self.round.as_ref()?.given;
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
            if to != Place::Port && coming {
                return None;
            }
            let stay = self.give(&to, served);
            let round = self.round.as_mut()?;
            (round.given, round.stay) = (true, stay);
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
            Place::Port | Place::At(_) => self.end(),
        }
    }

    /// Whether the pool listens; what there is to tell if it will not.
    fn ready(&mut self, window: u64) -> Result<bool, OutcomeKind> {
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
    fn end(&mut self) -> Option<(Outcome, String)> {
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
            return self.done();
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
    fn stay(&mut self, stay: u16) -> Option<(Outcome, String)> {
        self.wanted = self.wanted || self.pool.is_running();
        self.over(OutcomeKind::Stay, stay)
    }

    fn done(&mut self) -> Option<(Outcome, String)> {
        let moved = self.round.as_ref()?.moved;
        self.over(OutcomeKind::Done, moved)
    }

    fn over(&mut self, kind: OutcomeKind, applications: u16) -> Option<(Outcome, String)> {
        let round = self.round.take()?;
        let outcome = Outcome {
            number: round.wish.number,
            kind,
            applications,
        };
        Some((outcome, round.port))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{
        fs,
        os::unix::{
            fs::{MetadataExt, PermissionsExt},
            net::UnixListener,
        },
        path::Path,
        sync::{Mutex, MutexGuard, PoisonError},
        thread,
    };

    use gantry_remoting::{
        apis::{cuda::Cuda, opencl::OpenCl},
        link::order::ORDER,
    };

    use super::*;

    const WINDOW: u64 = 64 << 20;
    /// A pool that listens and serves nobody, and leaves a process behind.
    const POOL: &str = "[ \"$1 $3 $4\" = '--socket --window 64' ] || exit 1\n\
                        sleep 1000 & : >\"$2\"; exec sleep 1000\n";
    /// One that somebody else listens for.
    const SILENT: &str = "exec sleep 1000\n";

    /// Where applications go that are to be served elsewhere.
    const ELSEWHERE: &str = "tls://gpu2.example:7070";

    struct Rig {
        seats: Seats,
        folder: tempfile::TempDir,
        /// All children of the process are waited for.
        _alone: MutexGuard<'static, ()>,
    }

    impl Rig {
        fn new(pool: &str) -> Self {
            static ALONE: Mutex<()> = Mutex::new(());
            let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
            let folder = tempfile::tempdir().unwrap();
            let script = folder.path().join("pool.sh");
            fs::write(&script, pool).unwrap();
            let own = folder.path().join("agent.sock");
            fs::write(&own, "").unwrap();
            fs::set_permissions(&own, fs::Permissions::from_mode(0o660)).unwrap();
            let command = format!("sh {}", script.display());
            Self {
                seats: Seats::new(&command, own),
                folder,
                _alone: alone,
            }
        }

        /// With a pool that serves.
        fn serving() -> Self {
            let mut rig = Self::new(POOL);
            rig.seats.start(WINDOW);
            until(|| rig.seats.serves());
            rig
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        /// An application that the pool serves: where its orders come from.
        fn seat(&mut self) -> UnixStream {
            let (agent, application) = UnixStream::pair().unwrap();
            assert!(
                self.seats
                    .seat(&agent, &Hello::client::<OpenCl>().to_bytes())
            );
            drop(agent);
            let (bytes, files) = socket::receive_hello(&application).unwrap();
            let hello = Hello::check(&bytes, &apis::ALL).unwrap();
            assert_eq!(hello.form, Form::Elsewhere);
            let (to, orders) = order::redirected(&application, files).unwrap();
            assert_eq!(to, self.path("agent.local.sock").display().to_string());
            orders
        }

        fn wish(&mut self, number: u8, by: Server) {
            self.seats.wish(Wish { number, by }, ELSEWHERE, "port");
        }

        /// One look at it all.
        fn look(&mut self, served: &[&UnixStream]) -> Option<(Outcome, String)> {
            self.seats.heard();
            self.seats.step(served, WINDOW, false)
        }

        fn over(&mut self, served: &[&UnixStream]) -> (OutcomeKind, u16) {
            let mut over = None;
            until(|| {
                over = self.look(served);
                over.is_some()
            });
            let (outcome, port) = over.unwrap();
            assert_eq!(port, "port");
            (outcome.kind, outcome.applications)
        }

        fn pool(&self) -> u32 {
            self.seats.pool.id().unwrap()
        }
    }

    fn until(mut done: impl FnMut() -> bool) {
        let limit = Instant::now() + Duration::from_secs(60);
        while !done() {
            assert!(Instant::now() < limit);
            thread::sleep(SOON);
        }
    }

    fn is_there(process: u32) -> bool {
        Path::new(&format!("/proc/{process}")).exists()
    }

    /// The order that has come over the connection of a client of the port.
    fn ordered(connection: &UnixStream) -> (Order, UnixStream) {
        let mut byte = [0];
        let (_, mut files) = socket::receive(connection, &mut byte).unwrap();
        assert_eq!(byte, [ORDER]);
        let orders = UnixStream::from(files.remove(0));
        (Order::take(&orders).unwrap(), orders)
    }

    #[test]
    fn applications_go_to_the_host_and_back_and_the_pool_ends_between() {
        let mut rig = Rig::serving();
        let pool = rig.pool();
        let local = rig.path("agent.local.sock");
        // Who may connect with the agent may connect with it.
        let mode = fs::metadata(&local).unwrap().mode();
        assert_eq!(mode & 0o777, 0o660);
        let application = rig.seat();
        // To the host: as it says that it has moved, the pool ends, and all that it has started.
        rig.wish(1, Server::Host);
        assert!(rig.look(&[]).is_none() && !rig.seats.serves());
        let order = Order::take(&application).unwrap();
        assert_eq!(order.to, rig.path("agent.sock").display().to_string());
        assert!(rig.look(&[]).is_none() && is_there(pool));
        order::answer(&application, &Ok(()));
        assert_eq!(rig.over(&[]), (OutcomeKind::Done, 1));
        assert!(!is_there(pool));
        // Back, by the connection that the port's clients have. One stays, and is told of.
        let (agent, application) = UnixStream::pair().unwrap();
        rig.wish(2, Server::Local);
        // Who is on its way to the port is waited for.
        until(|| {
            assert!(rig.seats.step(&[], WINDOW, true).is_none());
            rig.seats.serves()
        });
        assert!(rig.look(&[&agent]).is_none());
        let (order, orders) = ordered(&application);
        assert_eq!(order.to, local.display().to_string());
        order::answer(&orders, &Err("it is busy".to_owned()));
        assert_eq!(rig.over(&[&agent]), (OutcomeKind::Stay, 1));
    }

    #[test]
    fn applications_of_pool_and_port_go_elsewhere_and_from_there_to_either() {
        let mut rig = Rig::serving();
        let pool = rig.pool();
        let seated = rig.seat();
        let (agent, application) = UnixStream::pair().unwrap();
        rig.wish(1, Server::Elsewhere);
        assert!(rig.look(&[&agent]).is_none() && !rig.seats.serves());
        let (order, from_port) = ordered(&application);
        assert_eq!(order.to, ELSEWHERE);
        assert_eq!(Order::take(&seated).unwrap().to, ELSEWHERE);
        order::answer(&seated, &Ok(()));
        order::answer(&from_port, &Ok(()));
        assert_eq!(rig.over(&[]), (OutcomeKind::Done, 2));
        assert!(!is_there(pool));
        // Asked once more, all are there.
        rig.wish(2, Server::Elsewhere);
        assert_eq!(rig.over(&[]), (OutcomeKind::Done, 0));
        // One comes home to the port, the other stays where it is, and can be sent on.
        rig.wish(3, Server::Host);
        assert!(rig.look(&[]).is_none());
        let own = rig.path("agent.sock").display().to_string();
        assert_eq!(Order::take(&seated).unwrap().to, own);
        assert_eq!(Order::take(&from_port).unwrap().to, own);
        order::answer(&seated, &Ok(()));
        order::answer(&from_port, &Err("it is busy".to_owned()));
        assert_eq!(rig.over(&[]), (OutcomeKind::Stay, 1));
        assert!(!rig.seats.serves());
        rig.wish(4, Server::Local);
        until(|| {
            assert!(rig.look(&[]).is_none());
            rig.seats.serves()
        });
        assert!(rig.look(&[]).is_none());
        let local = rig.path("agent.local.sock").display().to_string();
        assert_eq!(Order::take(&from_port).unwrap().to, local);
        order::answer(&from_port, &Ok(()));
        assert_eq!(rig.over(&[]), (OutcomeKind::Done, 1));
        assert_eq!(rig.seats.led.len(), 1);
    }

    #[test]
    fn an_agent_without_a_pool_sends_applications_elsewhere_and_nowhere_else() {
        let mut rig = Rig::new(POOL);
        rig.seats = Seats::new("", rig.path("agent.sock"));
        let (agent, application) = UnixStream::pair().unwrap();
        rig.wish(1, Server::Local);
        assert_eq!(rig.over(&[&agent]), (OutcomeKind::Cannot, 0));
        rig.seats.again(true);
        assert!(rig.seats.round.is_none());
        rig.wish(2, Server::Elsewhere);
        assert!(rig.look(&[&agent]).is_none());
        let (_, orders) = ordered(&application);
        order::answer(&orders, &Ok(()));
        assert_eq!(rig.over(&[]), (OutcomeKind::Done, 1));
    }

    #[test]
    fn an_application_whose_way_back_is_not_over_is_not_taken_for_one_that_has_left() {
        let mut rig = Rig::serving();
        let pool = rig.pool();
        let (agent, application) = UnixStream::pair().unwrap();
        rig.wish(1, Server::Local);
        assert!(rig.look(&[&agent]).is_none());
        let (_, orders) = ordered(&application);
        // It has no further order until it has answered, by which it is in the pool.
        rig.wish(2, Server::Host);
        assert!(rig.look(&[]).is_none());
        order::answer(&orders, &Ok(()));
        assert!(rig.look(&[]).is_none() && is_there(pool));
        let order = Order::take(&orders).unwrap();
        assert_eq!(order.to, rig.path("agent.sock").display().to_string());
        // The other way round: it is at the host, and comes back as a client of the port.
        rig.wish(3, Server::Local);
        assert!(rig.look(&[&agent]).is_none());
        order::answer(&orders, &Ok(()));
        assert!(rig.look(&[&agent]).is_none());
        let (_, orders) = ordered(&application);
        order::answer(&orders, &Ok(()));
        assert_eq!(rig.over(&[&agent]), (OutcomeKind::Done, 1));
        assert!(is_there(pool));
    }

    #[test]
    fn who_answers_late_or_unasked_is_still_known_to_be_in_the_pool() {
        let mut rig = Rig::serving();
        let pool = rig.pool();
        let application = rig.seat();
        order::answer(&application, &Ok(()));
        rig.seats.heard();
        assert_eq!(rig.seats.led.len(), 1);
        rig.seats.limits.answer = Duration::ZERO;
        for number in 1..3 {
            rig.wish(number, Server::Host);
            assert_eq!(rig.over(&[]), (OutcomeKind::Stay, 1));
            assert!(is_there(pool));
        }
        // It was told once. What follows the answer is none.
        Order::take(&application).unwrap();
        order::answer(&application, &Ok(()));
        order::answer(&application, &Ok(()));
        rig.seats.heard();
        assert!(rig.seats.led.is_empty());
        application.set_nonblocking(true).unwrap();
        assert!(Order::take(&application).is_err());
        rig.wish(3, Server::Host);
        assert_eq!(rig.over(&[]), (OutcomeKind::Done, 0));
        assert!(!is_there(pool));
    }

    #[test]
    fn a_pool_that_serves_somebody_unknown_goes_on() {
        let mut rig = Rig::new(SILENT);
        let path = rig.path("agent.local.sock");
        rig.seats.limits.end = Duration::from_millis(100);
        rig.seats.start(WINDOW);
        let listener = UnixListener::bind(&path).unwrap();
        let pool = rig.pool();
        assert_eq!(rig.seats.pool.connections(), 0);
        let waiting = UnixStream::connect(&path).unwrap();
        let (served, _) = listener.accept().unwrap();
        let other = UnixStream::connect(&path).unwrap();
        rig.wish(1, Server::Host);
        assert_eq!(rig.over(&[]), (OutcomeKind::Stay, 2));
        assert!(is_there(pool) && rig.seats.serves());
        drop((served, waiting, listener, other));
        rig.wish(2, Server::Host);
        assert_eq!(rig.over(&[]), (OutcomeKind::Done, 0));
        assert!(!is_there(pool));
    }

    #[test]
    fn who_connects_without_an_end_and_who_has_another_api_is_not_seated() {
        let mut rig = Rig::serving();
        let (agent, _application) = UnixStream::pair().unwrap();
        let hello = Hello::client::<Cuda>().to_bytes();
        assert!(!rig.seats.seat(&agent, &hello) && !rig.seats.seat(&agent, &[0; hello::SIZE]));
        let seated: Vec<_> = (0..LED_OF_ONE_USER).map(|_| rig.seat()).collect();
        let hello = Hello::client::<OpenCl>().to_bytes();
        assert!(!rig.seats.seat(&agent, &hello));
        for led in &mut rig.seats.led {
            led.user = None;
        }
        assert!(rig.seats.seat(&agent, &hello));
        drop(seated);
        rig.seats.heard();
        assert_eq!(rig.seats.led.len(), 1);
    }

    #[test]
    fn a_pool_that_has_ended_serves_nobody_until_a_device_comes() {
        let mut rig = Rig::serving();
        let pool = rig.pool();
        // Nobody would come to it.
        rig.seats.again(false);
        assert!(rig.seats.round.is_none());
        // SAFETY: a plain call on a child that was not waited for.
        unsafe { libc::kill(pool as libc::pid_t, libc::SIGKILL) };
        until(|| !rig.seats.serves());
        assert!(!rig.path("agent.local.sock").exists());
        rig.seats.again(false);
        let mut over = None;
        until(|| {
            over = rig.look(&[]);
            over.is_some()
        });
        let (outcome, port) = over.unwrap();
        assert_eq!((outcome.kind, port.as_str()), (OutcomeKind::Done, ""));
        assert!(rig.seats.serves() && rig.pool() != pool);
    }

    #[test]
    fn a_pool_that_does_not_start_is_tried_once() {
        let mut rig = Rig::new("echo >>\"${0%/*}/starts\"\n");
        rig.wish(1, Server::Local);
        assert_eq!(rig.over(&[]), (OutcomeKind::Cannot, 0));
        let starts = fs::read_to_string(rig.path("starts")).unwrap();
        assert_eq!(starts.lines().count(), 1);
        rig.seats.pool = LocalPool::new("/nonexistent/gantry-accel", &rig.path("agent.sock"));
        rig.wish(2, Server::Local);
        assert_eq!(rig.over(&[]), (OutcomeKind::Cannot, 0));
    }

    #[test]
    fn what_does_not_end_with_the_pool_is_waited_for_and_told_of() {
        // Of another process group.
        let mut rig =
            Rig::new("setsid sleep 1000 & echo $! >\"$2.left\"; : >\"$2\"; exec sleep 1000\n");
        rig.seats.limits.end = Duration::from_millis(100);
        rig.wish(1, Server::Local);
        assert_eq!(rig.over(&[]), (OutcomeKind::Done, 0));
        let left = fs::read_to_string(rig.path("agent.local.sock.left")).unwrap();
        let left: libc::pid_t = left.trim().parse().unwrap();
        let group = || {
            // SAFETY: a plain call.
            unsafe { libc::getpgid(left) }
        };
        until(|| group() == left);
        rig.wish(2, Server::Host);
        assert_eq!(rig.over(&[]), (OutcomeKind::Cannot, 0));
        // SAFETY: a plain call on what this test has started, and was not waited for.
        unsafe { libc::kill(left, libc::SIGKILL) };
        rig.seats.limits.end = Duration::from_secs(60);
        rig.wish(3, Server::Host);
        assert_eq!(rig.over(&[]), (OutcomeKind::Done, 0));
    }
}
