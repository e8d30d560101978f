//! Where this guest's applications are served: by a pool of this guest's own, on a device that was
//! passed through to it, or by the host's, through the port.
//!
//! ```text
//!   host ── wish ──> registers ──> agent ── orders ──> applications (which go by themselves)
//!        <─ outcome ───────────────      ── starts, ends ──> gantry-accel on the device
//! ```
//!
//! The agent keeps a connection to each application that its own pool serves, and those that the port
//! serves have one anyway: orders go over these. Before the host is told that all are its own again,
//! the pool has ended with all that it has started, so that nobody has the device's files open.

use std::{
    os::{
        fd::{AsFd, AsRawFd, RawFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use gantry_remoting::{
    apis,
    link::order::{self, Lead, Order},
    port::{Outcome, OutcomeKind, Server, Wish},
    wire::hello::{self, Form, Hello},
};

/// How long an application may take until nothing is under way, and all is unmapped.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long it may take to answer: its state is copied, and made again.
const ANSWER: Duration = Duration::from_secs(600);
/// How long the pool may take to listen.
const START: Duration = Duration::from_secs(60);
/// How often the agent looks while the pool is about to listen, or to end.
pub const SOON: Duration = Duration::from_millis(20);

/// An application that this guest's pool serves, or that is on its way.
struct Led {
    lead: Lead,
    /// Where it was told to go, and since when it has not answered.
    ordered: Option<(Server, Instant)>,
}

/// A wish of the host that is being carried out.
struct Round {
    wish: Wish,
    /// The port that it came by.
    port: String,
    since: Instant,
    /// Whether orders were given.
    given: bool,
    moved: u16,
    stay: u16,
}

/// This guest's pool, and who is where.
pub struct Seats {
    /// What starts the pool, without `--socket` and `--window`.
    command: Vec<String>,
    /// Where it listens.
    socket: PathBuf,
    /// Where the agent does.
    own: PathBuf,
    /// Whether the pool is to serve.
    wanted: Server,
    pool: Option<Child>,
    led: Vec<Led>,
    round: Option<Round>,
}

impl Seats {
    /// With a pool that is started so, beside an agent that listens there.
    pub fn new(command: &str, own: PathBuf) -> Self {
        // What the pool's workers leave behind is this process's to wait for.
        // SAFETY: a plain call.
        unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
        Self {
            command: command.split_whitespace().map(str::to_owned).collect(),
            socket: own.with_file_name("local.sock"),
            own,
            wanted: Server::Local,
            pool: None,
            led: Vec::new(),
            round: None,
        }
    }

    /// Starts the pool if it is to serve and does not run; its windows are as large as the host's
    /// (`window`, in bytes), so that applications can go there and back.
    pub fn start(&mut self, window: u64) {
        self.reap();
        if self.wanted == Server::Host || self.pool.is_some() || self.command.is_empty() {
            return;
        }
        let _ = std::fs::remove_file(&self.socket);
        let mut command = Command::new(&self.command[0]);
        command
            .args(&self.command[1..])
            .arg("--socket")
            .arg(&self.socket)
            .args(["--window", &(window >> 20).to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        // SAFETY: an async-signal-safe call between fork and exec.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        match command.spawn() {
            Ok(child) => self.pool = Some(child),
            Err(error) => base::note!(
                "gantry-agent: cannot start {}: {error}; applications are served by the host",
                self.command[0]
            ),
        }
    }

    /// Takes note of processes that have ended.
    fn reap(&mut self) {
        if let Some(pool) = &mut self.pool
            && matches!(pool.try_wait(), Ok(Some(_)))
        {
            base::note!("gantry-agent: this guest's own pool has ended");
            self.pool = None;
        }
        if self.pool.is_none() {
            // SAFETY: a plain call; nobody else waits for children here. No status is asked for.
            while unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) } > 0 {}
        }
    }

    /// Ends the pool. Whether all that it has started has ended, too.
    fn ended(&mut self) -> bool {
        if let Some(mut pool) = self.pool.take() {
            let _ = pool.kill();
            let _ = pool.wait();
        }
        let _ = std::fs::remove_file(&self.socket);
        loop {
            // SAFETY: as above.
            match unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) } {
                0 => return false,
                ended if ended < 0 => return true,
                _ => {}
            }
        }
    }

    /// Whether the pool serves applications that come.
    pub fn serves(&self) -> bool {
        self.wanted == Server::Local && self.pool.is_some() && self.socket.exists()
    }

    /// Sends an application that has said hello to the pool, and keeps its connection. Whether it was
    /// told.
    pub fn seat(&mut self, stream: &UnixStream, hello: &[u8; hello::SIZE]) -> bool {
        let Some(to) = self.socket.to_str() else {
            return false;
        };
        let answer = Hello::answer(apis::answering(hello), Form::Elsewhere, (0, 0));
        let copy = stream.try_clone();
        let told = copy.and_then(|copy| order::redirect(stream, answer, to).map(|()| copy));
        let Ok(copy) = told else {
            return false;
        };
        self.led.push(Led {
            lead: Lead::new(copy),
            ordered: None,
        });
        true
    }

    /// A new wish of the host, that came by a port; an earlier one is forgotten.
    pub fn wish(&mut self, wish: Wish, port: &str) {
        self.wanted = wish.by;
        self.round = Some(Round {
            wish,
            port: port.to_owned(),
            since: Instant::now(),
            given: false,
            moved: 0,
            stay: 0,
        });
    }

    /// A device has got its driver: if the pool is to serve, it looks for devices once more, and who
    /// is served by the host comes to it. Nobody waits for what comes of that.
    pub fn again(&mut self) {
        if self.wanted == Server::Host || self.round.is_some() {
            return;
        }
        if self.led.is_empty() {
            self.ended();
        }
        let wish = Wish {
            number: 0,
            by: Server::Local,
        };
        self.wish(wish, "");
    }

    /// Gives what orders are due. `served` are connections of those that the port serves.
    fn give(&mut self, by: Server, served: &[&UnixStream]) -> u16 {
        let to = match by {
            Server::Local => &self.socket,
            Server::Host => &self.own,
        };
        let order = Order {
            to: to.display().to_string(),
            patience: PATIENCE,
        };
        let mut stay: u16 = 0;
        let since = Instant::now();
        match by {
            Server::Local => {
                for stream in served {
                    match order.give(stream) {
                        Ok(lead) => self.led.push(Led {
                            lead,
                            ordered: Some((by, since)),
                        }),
                        Err(_) => stay = stay.saturating_add(1),
                    }
                }
            }
            // One that is not to be told has ended.
            Server::Host => self.led.retain_mut(|led| {
                led.ordered = Some((by, since));
                led.lead.give(&order).is_ok()
            }),
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

    /// Hears what applications answer, and forgets those that have ended.
    pub fn heard(&mut self) {
        let round = &mut self.round;
        let mut count = |to, good: bool| {
            if let Some(round) = round.as_mut().filter(|round| round.wish.by == to) {
                let counted = if good {
                    &mut round.moved
                } else {
                    &mut round.stay
                };
                *counted = counted.saturating_add(1);
            }
        };
        self.led.retain_mut(|led| match led.lead.heard() {
            Ok(None) => {
                let late = |(_, since): &(Server, Instant)| since.elapsed() > ANSWER;
                if let Some((to, _)) = led.ordered.take_if(|ordered| late(ordered)) {
                    count(to, false);
                }
                true
            }
            Ok(Some(outcome)) => {
                let Some((to, _)) = led.ordered.take() else {
                    // It says what it was not asked.
                    return false;
                };
                if let Err(why) = &outcome {
                    base::note!("gantry-agent: an application stays where it is: {why}");
                }
                count(to, outcome.is_ok());
                // By the port it is a client as any other.
                outcome.is_ok() == (to == Server::Local)
            }
            // It has ended, or follows somebody else.
            Err(_) => false,
        });
    }

    /// Goes on with a wish: what is to be told of it, if all is done or can go no further, and by
    /// which port. `served` as for orders, `window` as for the pool.
    pub fn step(&mut self, served: &[&UnixStream], window: u64) -> Option<(Outcome, String)> {
        let by = self.round.as_ref()?.wish.by;
        let (since, given) = self
            .round
            .as_ref()
            .map(|round| (round.since, round.given))?;
        if !given {
            if by == Server::Local {
                self.start(window);
                if self.pool.is_none() {
                    return self.over(OutcomeKind::Cannot);
                }
                if !self.socket.exists() {
                    return match since.elapsed() > START {
                        true => self.over(OutcomeKind::Cannot),
                        false => None,
                    };
                }
            }
            let stay = self.give(by, served);
            if let Some(round) = &mut self.round {
                (round.given, round.stay) = (true, stay);
            }
        }
        if self.led.iter().any(|led| led.ordered.is_some()) {
            return None;
        }
        if self.round.as_ref()?.stay > 0 || by == Server::Host && !self.led.is_empty() {
            // Those that stay at the pool need it.
            self.wanted = Server::Local;
            return self.over(OutcomeKind::Stay);
        }
        if by == Server::Host && !self.ended() {
            return None;
        }
        self.over(OutcomeKind::Done)
    }

    fn over(&mut self, kind: OutcomeKind) -> Option<(Outcome, String)> {
        let round = self.round.take()?;
        let applications = match kind {
            OutcomeKind::Stay => round.stay,
            _ => round.moved,
        };
        let outcome = Outcome {
            number: round.wish.number,
            kind,
            applications,
        };
        Some((outcome, round.port))
    }
}

impl Drop for Seats {
    fn drop(&mut self) {
        self.ended();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::{fs, thread};

    use gantry_remoting::link::{order::ORDER, socket};

    use super::*;

    const WINDOW: u64 = 64 << 20;

    /// A pool that listens and serves nobody, and leaves a process behind.
    fn seats(name: &str) -> (Seats, PathBuf) {
        let folder = std::env::temp_dir().join(format!("gantry-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let script = folder.join("pool.sh");
        let text = "[ \"$1 $3 $4\" = '--socket --window 64' ] || exit 1\n\
                    sleep 1 & : >\"$2\"; exec sleep 1000\n";
        fs::write(&script, text).unwrap();
        let command = format!("sh {}", script.display());
        (Seats::new(&command, folder.join("agent.sock")), folder)
    }

    fn over(seats: &mut Seats, served: &[&UnixStream]) -> (Outcome, String) {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            seats.heard();
            if let Some(over) = seats.step(served, WINDOW) {
                return over;
            }
            assert!(Instant::now() < until);
            thread::sleep(SOON);
        }
    }

    fn wish(number: u8, by: Server) -> Wish {
        Wish { number, by }
    }

    #[test]
    fn applications_go_to_the_host_and_back_and_the_pool_ends_between() {
        let (mut seats, folder) = seats("seats");
        seats.start(WINDOW);
        while !seats.serves() {
            thread::sleep(SOON);
        }
        let pool = seats.pool.as_ref().unwrap().id();
        let (agent, application) = UnixStream::pair().unwrap();
        assert!(seats.seat(&agent, &[0; hello::SIZE]));
        let (bytes, _) = socket::receive_hello(&application).unwrap();
        let hello = Hello::check(&bytes, &apis::ALL).unwrap();
        assert_eq!(hello.form, Form::Elsewhere);
        let local = folder.join("local.sock").display().to_string();
        assert_eq!(order::redirected(&application).unwrap(), local);
        // To the host: as it says that it has moved, the pool ends, and all that it has started.
        seats.wish(wish(1, Server::Host), "port");
        assert!(seats.step(&[], WINDOW).is_none() && !seats.serves());
        let order = Order::take(&application).unwrap();
        assert_eq!(order.to, folder.join("agent.sock").display().to_string());
        order::answer(&application, &Ok(()));
        let (outcome, port) = over(&mut seats, &[]);
        assert_eq!((outcome.number, outcome.kind), (1, OutcomeKind::Done));
        assert_eq!((outcome.applications, port.as_str()), (1, "port"));
        assert!(!PathBuf::from(format!("/proc/{pool}")).exists());
        // Back, by the connection that the port's clients have. One stays, and is told of.
        let (agent, application) = UnixStream::pair().unwrap();
        seats.wish(wish(2, Server::Local), "port");
        let answering = thread::spawn(move || {
            let mut byte = [0];
            let (_, mut files) = socket::receive(&application, &mut byte).unwrap();
            assert_eq!(byte, [ORDER]);
            let lead = UnixStream::from(files.remove(0));
            let order = Order::take(&lead).unwrap();
            order::answer(&lead, &Err("it is busy".to_owned()));
            order.to
        });
        let (outcome, _) = over(&mut seats, &[&agent]);
        assert_eq!(answering.join().unwrap(), local);
        assert_eq!((outcome.kind, outcome.applications), (OutcomeKind::Stay, 1));
        drop(seats);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn without_a_pool_the_host_is_told_that_it_cannot_be() {
        let own = std::env::temp_dir().join("gantry-nobody.sock");
        let mut seats = Seats::new("/nonexistent/gantry-accel serve", own);
        seats.wish(wish(3, Server::Local), "port");
        let (outcome, _) = over(&mut seats, &[]);
        assert_eq!((outcome.number, outcome.kind), (3, OutcomeKind::Cannot));
    }
}
