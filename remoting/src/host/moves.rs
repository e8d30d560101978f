//! Who asks a pool to move applications, and what becomes of that.
//!
//! The pool listens on a second socket for its own user and root. A request is a line: `list`, or
//! `move`, an application (`all`, or the process id of it or of its worker) and how many milliseconds
//! may pass until it stands still. The answer is a line for each application, and the end.
//!
//! Threads talk to those who ask and to the workers; the pool's own thread, which starts and ends
//! workers, hears of both by [`Event`]s.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd, RawFd},
        unix::{
            fs::PermissionsExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::Path,
    sync::{
        Arc, Mutex,
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::Duration,
};

use base::Unpoisoned;

use super::control::{self, NotMoved, Peer};
use crate::link::socket;

/// The longest request, in bytes.
const LONGEST: u64 = 128;
/// How long who asks may take to say what.
const PATIENCE: Duration = Duration::from_secs(2);

/// Which applications.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// All.
    All,
    /// That of this process, or of this worker.
    Process(i32),
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Which applications there are.
    List,
    /// To move applications, each of which may go on with what is under way for so long.
    Move(Which, Duration),
}

impl Request {
    /// Reads a request.
    pub fn of(line: &str) -> Option<Self> {
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        match words[..] {
            ["list"] => Some(Self::List),
            ["move", which, drain] => {
                let which = match which {
                    "all" => Which::All,
                    process => Which::Process(process.parse().ok().filter(|id| *id > 0)?),
                };
                Some(Self::Move(
                    which,
                    Duration::from_millis(drain.parse().ok()?),
                ))
            }
            _ => None,
        }
    }

    /// The request as a line.
    pub fn line(self) -> String {
        match self {
            Self::List => "list\n".to_owned(),
            Self::Move(which, drain) => {
                let which = match which {
                    Which::All => "all".to_owned(),
                    Which::Process(id) => id.to_string(),
                };
                format!("move {which} {}\n", drain.as_millis())
            }
        }
    }
}

/// Who has asked: hears lines until all clones are gone.
#[derive(Clone, Debug)]
pub(super) struct Asker(Arc<Mutex<UnixStream>>);

impl Asker {
    /// Tells a line. Who does not listen misses it.
    pub fn tell(&self, line: &str) {
        let _ = writeln!(self.0.lock_unpoisoned(), "{line}");
    }
}

/// What the pool's thread hears of.
#[derive(Debug)]
pub(super) enum Event {
    /// Somebody has asked for something.
    Asked(Request, Asker),
    /// The application of the worker of this number has been carried over, or not.
    Over(u64, Result<(), NotMoved>, Asker),
}

/// The pool's end of it all.
#[derive(Debug)]
pub(super) struct Moves {
    events: Receiver<Event>,
    /// For other threads.
    post: Post,
    /// Readable when there is an event.
    woken: UnixStream,
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
            let listener = socket::listen(path)?;
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
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

    /// Carries an application over from one worker to another, by their control channels.
    pub fn start(
        &self,
        number: u64,
        (source, destination): (&UnixStream, &UnixStream),
        connection: Arc<OwnedFd>,
        drain: Duration,
        asker: Asker,
    ) -> io::Result<()> {
        let (source, destination) = (source.try_clone()?, destination.try_clone()?);
        let post = self.post.clone();
        let work = move || {
            let source = Peer {
                channel: &source,
                who: "the worker that serves it",
            };
            let destination = Peer {
                channel: &destination,
                who: "the worker that was to serve it",
            };
            let outcome = control::carry_over(&source, &destination, connection.as_fd(), drain);
            drop(connection);
            post.leave(Event::Over(number, outcome, asker));
        };
        thread::Builder::new()
            .name("move".to_owned())
            .spawn(work)
            .map(drop)
    }
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
        if BufReader::new((&stream).take(LONGEST))
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
pub fn ask(path: &Path, request: Request, out: &mut impl Write) -> io::Result<bool> {
    let stream = UnixStream::connect(path).map_err(|error| {
        let text = format!(
            "cannot reach {}: {error}; start the pool with --control",
            path.display()
        );
        io::Error::new(error.kind(), text)
    })?;
    (&stream).write_all(request.line().as_bytes())?;
    let mut good = true;
    for line in BufReader::new(&stream).lines() {
        let line = line?;
        good &= !line.starts_with("error");
        writeln!(out, "{line}")?;
    }
    Ok(good)
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn a_request_survives_the_way_through_a_line() {
        let drain = Duration::from_millis(250);
        for request in [
            Request::List,
            Request::Move(Which::All, drain),
            Request::Move(Which::Process(7), drain),
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
            "move 1 -1",
        ] {
            assert_eq!(Request::of(wrong), None, "{wrong}");
        }
    }
}
