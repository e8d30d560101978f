//! Requests to a pool to move applications, and their outcome.
//!
//! The pool listens on a second socket for its own user and root, and first sends a line that identifies the socket. A
//! request is a line: `list`, or `move`, an application (`all`, or the process id of it or of its worker), the maximum
//! number of milliseconds until it is stopped, and the address of another pool if it is to be served there. `postcopy`
//! in place of `move` is for an application that resumes before all of its memory has been transferred. The reply is a
//! line for each application, then the end of the stream: by then an application that was to leave has left, and its
//! worker has ended, unless the line says why not. If the requester disconnects earlier, applications that have not
//! moved yet stay.
//!
//! Threads talk to requesters and to the workers. The pool's own thread, which starts and ends workers, hears of both
//! through [`Event`]s.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::{
        Arc, Mutex,
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use base::{Cancel, Patience, Unpoisoned, poll::poll};
use remoting_relocation::{
    destination::Arrival, failure::NotMoved, source::SourcePort, transfer::Plan,
};
use remoting_transport::{
    closer::Closer,
    control::{Command, Failure, LONG, Peer, SOON, Worker},
    order::{Lead, Order},
    socket,
    worker_control::{Destination, Source},
};

use super::place::{self, Place};

/// Maximum size of a request in bytes.
const LONGEST: u64 = 1024;
/// Timeout for a request to arrive.
const PATIENCE: Duration = Duration::from_secs(2);
/// The first line of a reply: sockets for applications send nothing of their own accord.
const BANNER: &str = "gantry-accel control";
/// Timeout for a pool's first line: other requesters may come first.
const BANNER_DUE: Duration = Duration::from_secs(10);

/// Longer than any process lives.
const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);

/// A selection of applications.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// All.
    All,
    /// That of this process, or of this worker's process.
    Process(i32),
}

/// A request to a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// List the applications.
    List,
    /// Move applications; the time is the maximum for outstanding work to finish.
    Move(Which, Duration, To),
}

/// The destination of a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum To {
    /// Other workers of this pool, which have all of the memory before they serve.
    Worker,
    /// The same, but contents of large memory objects follow (postcopy).
    WorkerFirst,
    /// The server at this address.
    Address(String),
}

impl Request {
    /// Parses a request.
    pub fn of(line: &str) -> Option<Self> {
        let words: Vec<_> = line.trim_end().splitn(4, ' ').collect();
        match words[..] {
            ["list"] => Some(Self::List),
            [verb @ ("move" | "postcopy"), which, drain, ref to @ ..] => {
                let which = match which {
                    "all" => Which::All,
                    process => Which::Process(process.parse().ok().filter(|id| *id > 0)?),
                };
                let to = match (verb, to) {
                    ("move", [to]) => To::Address((*to).to_owned()),
                    ("move", _) => To::Worker,
                    (_, []) => To::WorkerFirst,
                    _ => return None,
                };
                let drain = Duration::from_millis(drain.parse().ok()?);
                Some(Self::Move(which, drain, to))
            }
            _ => None,
        }
    }

    /// Formats the request as a line.
    pub fn line(&self) -> String {
        match self {
            Self::List => "list\n".to_owned(),
            Self::Move(which, drain, to) => {
                let which = match which {
                    Which::All => "all".to_owned(),
                    Which::Process(id) => id.to_string(),
                };
                let drain = drain.as_millis();
                match to {
                    To::Worker => format!("move {which} {drain}\n"),
                    To::WorkerFirst => format!("postcopy {which} {drain}\n"),
                    To::Address(to) => format!("move {which} {drain} {to}\n"),
                }
            }
        }
    }
}

/// A requester; gets lines until all clones are dropped.
#[derive(Clone, Debug)]
pub(super) struct Asker(Arc<Mutex<UnixStream>>);

impl Asker {
    /// Sends a line. A requester that does not listen misses it.
    pub fn tell(&self, line: &str) {
        let _ = writeln!(self.0.lock_unpoisoned(), "{line}");
    }

    /// Waits until the requester is gone, the other descriptor is readable, or its peer has ended; at most until
    /// `until`. Returns whether the requester is gone.
    fn is_gone_before(&self, other: BorrowedFd<'_>, until: Option<Instant>) -> io::Result<bool> {
        let stream = self.0.lock_unpoisoned().try_clone()?;
        // A requester that has only shut down its writing side is still there.
        let entry = |fd: RawFd, events| libc::pollfd {
            fd,
            events,
            revents: 0,
        };
        let mut entries = [
            entry(stream.as_raw_fd(), 0),
            entry(other.as_raw_fd(), libc::POLLIN),
        ];
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if poll(&mut entries, left)? > 0 || left == Some(Duration::ZERO) {
                return Ok(entries[0].revents != 0 && entries[1].revents == 0);
            }
        }
    }

    /// Cancels `cancel` if the requester is gone before the other end of `over`.
    fn cancels(&self, cancel: Cancel, over: UnixStream) -> io::Result<()> {
        let asker = self.clone();
        let work = move || {
            if let Ok(true) = asker.is_gone_before(over.as_fd(), None) {
                cancel.cancel();
            }
        };
        thread::Builder::new()
            .name("asker".to_owned())
            .spawn(work)
            .map(drop)
    }
}

/// What the pool's thread hears of.
#[derive(Debug)]
pub(super) enum Event {
    /// A request has come.
    Asked(Request, Asker),
    /// The worker with this number, which was busy when its application was to move, has answered.
    Answered(u64),
    /// The application of the worker with this number has left it, or not; with postcopy, the worker still has
    /// contents.
    Over(u64, Result<Arrival<Destination>, NotMoved>, Plan, Asker),
    /// Nobody asks the worker with this number for contents of memory any more; with the reason why some were lost.
    Fetched(u64, Result<(), Failure>, Asker),
    /// An application is served elsewhere, or stays.
    Left(Departure),
}

/// An application that was to be served elsewhere.
#[derive(Debug)]
pub(super) struct Departure {
    /// The number of its worker.
    pub number: u64,
    /// Its process id, as far as that is known.
    pub process: Option<i32>,
    /// How many other connections of that process are served here.
    pub others: usize,
    /// Where it is to be served.
    pub order: Order,
    /// Why it stays, if it does.
    pub outcome: Result<(), String>,
    /// What leads to it, if anything does.
    pub lead: Option<Lead>,
    /// Where it was before, if that was not here.
    pub before: Option<String>,
    /// Who wants to know.
    pub asker: Asker,
}

impl Departure {
    /// Tells what has come of it; if it has left, when its worker has ended.
    pub fn tell(&self) {
        let process = self.process.map_or("-".to_owned(), |id| id.to_string());
        self.asker.tell(&match &self.outcome {
            Ok(()) => format!("process {process} moved to {}", self.order.to),
            Err(why) => format!("error: process {process} stays: {why}"),
        });
    }
}

/// The pool's end of it all.
#[derive(Debug)]
pub(super) struct Moves {
    events: Receiver<Event>,
    /// For other threads.
    post: Post,
    /// Readable when there is an event.
    woken: UnixStream,
    /// Closes connections to applications, and what they have sent.
    pub closer: Closer,
}

/// Leaves events for the pool's thread.
#[derive(Clone, Debug)]
struct Post {
    events: Sender<Event>,
    wake: Arc<UnixStream>,
}

impl Post {
    fn leave(&self, event: Event) {
        // The pool's thread ends with the process.
        let _ = self.events.send(event);
        let _ = (&*self.wake).write_all(&[0]);
    }
}

impl Moves {
    /// Listens at this path, if there is one.
    pub fn listen(path: Option<&Path>) -> io::Result<Self> {
        let (events, queue) = mpsc::channel();
        let (wake, woken) = UnixStream::pair()?;
        woken.set_nonblocking(true)?;
        let post = Post {
            events,
            wake: Arc::new(wake),
        };
        if let Some(path) = path {
            let listener = socket::listen_privately(path)?;
            socket::refuse_files(&listener);
            let post = post.clone();
            thread::Builder::new()
                .name("moves".to_owned())
                .spawn(move || serve(&listener, &post))?;
        }
        Ok(Self {
            events: queue,
            post,
            woken,
            closer: Closer::default(),
        })
    }

    /// Readable when there is an event.
    pub fn fd(&self) -> RawFd {
        self.woken.as_raw_fd()
    }

    /// All events.
    pub fn events(&self) -> Vec<Event> {
        while matches!((&self.woken).read(&mut [0; 64]), Ok(count) if count > 0) {}
        self.events.try_iter().collect()
    }

    /// Carries an application over from one worker to another, by its control channel.
    pub fn start(
        &self,
        number: u64,
        (mut source, destination): (Source, UnixStream),
        (connection, place): (Arc<OwnedFd>, Option<Arc<Place>>),
        plan: Plan,
        asker: Asker,
    ) -> io::Result<()> {
        let fetches = plan.postcopy.then(UnixStream::pair).transpose()?;
        let (asked, asks) = fetches.unzip();
        let (post, closer) = (self.post.clone(), self.closer.clone());
        let cancel = Cancel::default();
        let (moving, over) = UnixStream::pair()?;
        asker.cancels(cancel.clone(), over)?;
        let work = move || {
            let application = (connection.as_fd(), place.as_deref());
            let destination = (destination, asks);
            let outcome = place::carry_over(&mut source, destination, application, &plan, &cancel);
            closer.close((connection, place));
            drop(moving);
            let asked = asked.filter(|_| outcome.is_ok());
            let is_busy = matches!(outcome, Err(NotMoved::Stays(Failure::Busy(_))));
            post.leave(Event::Over(number, outcome, plan, asker.clone()));
            if let Some(asked) = asked {
                let fetched = source.peer().bring(&asked, |_| {});
                post.leave(Event::Fetched(number, fetched, asker));
            }
            if is_busy {
                // However long its driver takes, or until it has ended.
                let settled = source.settle(&Patience::within(FOREVER));
                if settled.is_err_and(|why| !why.is_end_of(Worker::Serving)) {
                    // It may stand still, and nobody can tell it to go on.
                    let _ = source.end();
                }
                post.leave(Event::Answered(number));
            }
        };
        thread::Builder::new()
            .name("move".to_owned())
            .spawn(work)
            .map(drop)
    }
}

/// What leads to an application.
pub(super) enum Way {
    /// The control channel of its worker, its connection, and what the worker serves.
    Here(UnixStream, Arc<OwnedFd>, Option<Arc<Place>>),
    /// What has led it elsewhere, and where it is.
    There(Lead, String),
}

impl Moves {
    /// Has an application be served elsewhere.
    pub fn send_away(
        &self,
        way: Way,
        number: u64,
        (process, others): (Option<i32>, usize),
        order: Order,
        asker: Asker,
    ) -> io::Result<()> {
        let (post, closer) = (self.post.clone(), self.closer.clone());
        let work = move || {
            let (given, before) = match way {
                Way::Here(source, connection, place) => {
                    let application = (connection.as_fd(), place.as_deref());
                    let given = send_away(&source, application, &order);
                    closer.close((source, connection, place));
                    (given, None)
                }
                Way::There(lead, before) => {
                    let given = lead.give(&order).map(|()| lead);
                    (given.map_err(|error| lost(&error)), Some(before))
                }
            };
            let (outcome, lead) = match given {
                Ok(lead) => match answered(&lead, &order, &asker) {
                    Ok(outcome) => (outcome, Some(lead)),
                    Err(error) => (Err(lost(&error)), None),
                },
                Err(why) => (Err(why), None),
            };
            post.leave(Event::Left(Departure {
                number,
                process,
                others,
                order,
                outcome,
                lead,
                before,
                asker,
            }));
        };
        thread::Builder::new()
            .name("move".to_owned())
            .spawn(work)
            .map(drop)
    }
}

/// What an application answers to an order, which is taken back if whoever has asked for it is gone.
fn answered(lead: &Lead, order: &Order, asker: &Asker) -> io::Result<Result<(), String>> {
    let patience = order.opening + order.patience + LONG;
    let until = Instant::now() + patience;
    if asker.is_gone_before(lead.as_fd(), Some(until))? {
        lead.take_back()?;
    }
    lead.answer(until.saturating_duration_since(Instant::now()))
}

fn lost(error: &io::Error) -> String {
    format!("the application has ended, or does not answer: {error}")
}

/// Gives an application an order.
fn send_away(
    source: &UnixStream,
    (connection, place): (BorrowedFd<'_>, Option<&Place>),
    order: &Order,
) -> Result<Lead, String> {
    let source = Peer {
        channel: source,
        who: Worker::Serving,
    };
    let described = source.ask(&Command::Describe(), &[], &Patience::within(SOON));
    // One that cannot be moved says why.
    described.map_err(|error| base::Chain(&error).to_string())?;
    if place.is_some_and(Place::is_machines) {
        let why = "it is a virtual machine: its gantry moves its applications (vm.move-accel)";
        return Err(why.to_owned());
    }
    let connection = connection.try_clone_to_owned().map(UnixStream::from);
    let given = connection.and_then(|connection| order.give(&connection));
    given.map_err(|error| lost(&error))
}

/// Hears who asks for something, one after the other.
fn serve(listener: &UnixListener, post: &Post) {
    // SAFETY: a plain call.
    let own = unsafe { libc::getuid() };
    for stream in listener.incoming().filter_map(Result::ok) {
        let allowed = socket::user(&stream).is_ok_and(|user| user == own || user == 0);
        if !allowed || stream.set_read_timeout(Some(PATIENCE)).is_err() {
            continue;
        }
        // Who does not read its answer holds nobody up.
        let _ = stream.set_write_timeout(Some(PATIENCE));
        let mut line = String::new();
        if writeln!(&stream, "{BANNER}").is_err()
            || BufReader::new((&stream).take(LONGEST))
                .read_line(&mut line)
                .is_err()
        {
            continue;
        }
        let asker = Asker(Arc::new(Mutex::new(stream)));
        match Request::of(&line) {
            Some(request) => post.leave(Event::Asked(request, asker)),
            None => asker.tell("error: this pool does not know the request"),
        }
    }
}

/// Asks the pool that listens at this path, and prints what it answers. Whether no line tells of an
/// error.
///
/// # Errors
/// There is no such pool.
pub fn ask(path: &Path, request: &Request, out: &mut impl Write) -> io::Result<bool> {
    let stream = UnixStream::connect(path).map_err(|error| {
        let text = format!(
            "cannot reach {}: {error}; start the pool with --control",
            path.display()
        );
        io::Error::new(error.kind(), text)
    })?;
    let refused = |error: io::Error| {
        let text = format!(
            "{} does not answer as a control socket of a pool of this user: name that of --control, not that of \
             --socket",
            path.display()
        );
        io::Error::new(error.kind(), text)
    };
    stream.set_read_timeout(Some(BANNER_DUE))?;
    let mut lines = BufReader::new(&stream).lines();
    let banner = lines.next().unwrap_or(Ok(String::new())).map_err(refused)?;
    if banner != BANNER {
        return Err(refused(io::ErrorKind::InvalidData.into()));
    }
    stream.set_read_timeout(None)?;
    (&stream).write_all(request.line().as_bytes())?;
    let mut good = true;
    for line in lines {
        let line = line?;
        good &= !line.starts_with("error");
        writeln!(out, "{line}")?;
    }
    Ok(good)
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoting_transport::{control, order};

    #[test]
    fn a_socket_that_is_no_control_socket_is_told_from_one() {
        let name = format!("gantry-no-control-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let answers = |said: &'static str| {
            let listener = listener.try_clone().unwrap();
            let serving = thread::spawn(move || {
                let (stream, _) = listener.accept().unwrap();
                (&stream).write_all(said.as_bytes()).unwrap();
                let mut line = String::new();
                BufReader::new((&stream).take(LONGEST))
                    .read_line(&mut line)
                    .unwrap();
                line
            });
            let mut out = Vec::new();
            let outcome = ask(&path, &Request::List, &mut out);
            (outcome, String::from_utf8(out).unwrap(), serving.join())
        };
        for said in ["hello\n", "\n"] {
            let (outcome, out, _) = answers(said);
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("--control"), "{error}");
            assert_eq!(out, "");
        }
        let (outcome, _, line) = answers("gantry-accel control\n");
        assert!(outcome.unwrap());
        assert_eq!(line.unwrap(), "list\n");
        std::fs::remove_file(&path).unwrap();
    }

    /// A process that has asked for something, and waits for the answer until it is killed.
    fn asker() -> (std::process::Child, Asker) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut waits = std::process::Command::new("sleep");
        let waits = waits.arg("600").stdin(OwnedFd::from(theirs)).spawn();
        (waits.unwrap(), Asker(Arc::new(Mutex::new(ours))))
    }

    fn kill(mut process: std::process::Child) {
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// An application that is told to go somewhere, for who has asked, and where its orders come from.
    fn ordered(moves: &Moves, asker: &Asker) -> (UnixStream, Order) {
        let order = Order {
            to: "/run/other".to_owned(),
            patience: Duration::from_secs(600),
            opening: Duration::from_secs(600),
        };
        let (source, worker) = UnixStream::pair().unwrap();
        let (connection, application) = UnixStream::pair().unwrap();
        let way = Way::Here(source, Arc::new(connection.into()), None);
        moves
            .send_away(way, 1, (None, 0), order.clone(), asker.clone())
            .unwrap();
        let asked = control::receive::<Command>(&worker).unwrap().unwrap().0;
        assert_eq!(asked, Command::Describe());
        let described = control::Reply::Serves(remoting_proto::wire::Blob::default());
        control::send(&worker, &described, &[]).unwrap();
        let (_, mut files) = socket::receive(&application, &mut [0]).unwrap();
        let orders = UnixStream::from(files.remove(0));
        assert_eq!(Order::take(&orders).unwrap(), order);
        (orders, order)
    }

    fn await_readable(stream: &impl AsFd) {
        let patience = Patience::within(Duration::from_secs(600));
        patience.readable(stream.as_fd()).unwrap();
    }

    /// What has become of it.
    fn departure(moves: &Moves) -> Departure {
        await_readable(&moves.woken);
        match moves.events().pop() {
            Some(Event::Left(departure)) => departure,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_application_stays_where_who_has_asked_for_its_move_is_killed_and_can_be_moved_again() {
        let moves = Moves::listen(None).unwrap();
        let (process, asker) = asker();
        let (orders, order) = ordered(&moves, &asker);
        assert!(!order::is_taken_back(&orders), "somebody waits for it");
        kill(process);
        await_readable(&orders);
        assert!(order::is_taken_back(&orders));
        order::answer(&orders, &Err("nobody waits".to_owned()));
        let departure = departure(&moves);
        assert_eq!(departure.outcome, Err("nobody waits".to_owned()));
        departure.lead.unwrap().give(&order).unwrap();
        assert_eq!(Order::take(&orders).unwrap(), order);
    }

    #[test]
    fn an_application_that_is_about_to_go_on_elsewhere_goes_and_is_led_on_though_the_asker_is_killed()
     {
        let moves = Moves::listen(None).unwrap();
        let (process, asker) = asker();
        let (orders, order) = ordered(&moves, &asker);
        kill(process);
        await_readable(&orders);
        // It does not listen any more.
        order::answer(&orders, &Ok(()));
        let departure = departure(&moves);
        assert_eq!(departure.outcome, Ok(()));
        // Its listener passes over what has come too late.
        departure.lead.unwrap().give(&order).unwrap();
        assert!(order::is_taken_back(&orders));
        assert_eq!(Order::take(&orders).unwrap(), order);
    }

    #[test]
    fn who_only_says_no_more_still_waits_for_the_answer() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let asker = Asker(Arc::new(Mutex::new(ours)));
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        let (over, end) = UnixStream::pair().unwrap();
        let soon = Some(Instant::now());
        assert!(!asker.is_gone_before(over.as_fd(), soon).unwrap());
        drop(theirs);
        assert!(asker.is_gone_before(over.as_fd(), None).unwrap());
        drop(end);
        assert!(!asker.is_gone_before(over.as_fd(), None).unwrap());
    }

    #[test]
    fn a_request_survives_the_way_through_a_line() {
        let drain = Duration::from_millis(250);
        for request in [
            Request::List,
            Request::Move(Which::All, drain, To::Worker),
            Request::Move(Which::All, drain, To::WorkerFirst),
            Request::Move(Which::Process(7), drain, To::Worker),
            Request::Move(Which::All, drain, To::Address("/run/a b".to_owned())),
        ] {
            assert_eq!(Request::of(&request.line()), Some(request));
        }
        for wrong in [
            "",
            "move",
            "move 0 1",
            "move -1 1",
            "move all",
            "list 1",
            "move  1 1",
            "move 1 -1",
            "postcopy all 1 /run/a",
        ] {
            assert_eq!(Request::of(wrong), None, "{wrong}");
        }
    }
}
