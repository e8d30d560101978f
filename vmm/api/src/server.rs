//! The thread that serves the API's socket.
//!
//! It uses one epoll instance and non-blocking sockets. A client that sends nothing or only half a
//! request, or does not read its response, occupies a connection. There are [`MAX_CONNECTIONS`];
//! when all are in use, the one that has been idle longest is closed.
//!
//! Clients of a metrics socket are strangers. Each user has few connections; they are answered from one answer of the
//! machine for a while; and the process does not wait for the thread that serves them when it ends: on kernels before
//! 6.16 they can send it descriptors whose close hangs.

use std::{
    collections::HashMap,
    io, mem,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use devices::thread::{ThreadRole, ThreadSpawner};
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd},
};

use super::{
    Access, ApiError, ApiSender, Reply, Request, Response,
    connection::{Connection, Progress},
    listener::Listener,
};

/// Maximum number of concurrent connections.
pub const MAX_CONNECTIONS: usize = 64;

/// The same for clients that may only read metrics, of all users and of each.
const MAX_METRICS_CONNECTIONS: usize = 32;
const MAX_METRICS_CONNECTIONS_OF_USER: usize = 4;

/// For how long metrics are told again: the machine's thread, and the vCPUs, must not wait for those who read them.
const FRESH: Duration = Duration::from_millis(200);

/// Maximum number of connections accepted in a row before the others get their turn.
const ACCEPTS: usize = 64;

/// Time limit for sending responses when the server stops.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Pause before accepting again when the process has run out of descriptors.
const NO_DESCRIPTOR: Duration = Duration::from_millis(50);

const LISTENER: u64 = 0;
const ANSWERS: u64 = 1;
const STOP: u64 = 2;
const FIRST_CONNECTION: u64 = 3;

type Answer = Result<Response, ApiError>;

/// A running server.
pub struct Server {
    stop: EventFd,
    thread: thread::JoinHandle<()>,
    access: Access,
}

impl Server {
    /// Starts serving, on a thread called `http-server`, or `metrics-server`.
    pub fn start(
        listener: Listener,
        sender: ApiSender,
        spawner: &dyn ThreadSpawner,
    ) -> io::Result<Self> {
        let access = listener.access();
        let name = match access {
            Access::Full => "http-server",
            Access::Metrics => "metrics-server",
        };
        let stop = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let mut server = Loop::new(listener, sender, stop.try_clone()?)?;
        let body = Box::new(move || server.run());
        let thread = spawner.spawn(ThreadRole::Api, name, body);
        let thread = thread.map_err(|error| {
            io::Error::new(error.kind(), format!("cannot start a thread: {error}"))
        })?;
        Ok(Self {
            stop,
            thread,
            access,
        })
    }

    /// Stops the server: no new requests are accepted, pending responses are sent, and the socket's
    /// file is removed: by its thread, which Landlock does not restrict as it restricts those of a VM. That of a metrics
    /// socket, whose clients are strangers, is waited for no longer than it takes without them.
    pub fn stop(self) {
        /// Time limit for the thread of a metrics socket.
        const PATIENCE: Duration = Duration::from_secs(1);
        /// Interval for looking at whether it has ended.
        const LOOK: Duration = Duration::from_millis(2);
        if let Err(error) = self.stop.write(1) {
            return log::error!("cannot stop the API server: {error}");
        }
        if self.access == Access::Metrics {
            let start = Instant::now();
            while !self.thread.is_finished() && start.elapsed() < PATIENCE {
                thread::sleep(LOOK);
            }
            return;
        }
        if self.thread.join().is_err() {
            log::error!("the API server panicked");
        }
    }
}

struct Loop {
    epoll: Epoll,
    listener: Option<Listener>,
    access: Access,
    /// Maximum number of connections.
    most: usize,
    sender: ApiSender,
    stop: EventFd,
    answers: mpsc::Receiver<(u64, Answer)>,
    answer_sender: mpsc::Sender<(u64, Answer)>,
    answered: Arc<EventFd>,
    connections: HashMap<u64, Connection>,
    next: u64,
    /// The last answer to clients of a metrics socket, with its time.
    metrics: Option<(Instant, Arc<Answer>)>,
    /// The machine has been asked for the next one.
    asked: bool,
}

impl Loop {
    fn new(listener: Listener, sender: ApiSender, stop: EventFd) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        let answered = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
        for (fd, token) in [
            (listener.socket().as_raw_fd(), LISTENER),
            (answered.as_raw_fd(), ANSWERS),
            (stop.as_raw_fd(), STOP),
        ] {
            let event = EpollEvent::new(EventSet::IN, token);
            epoll.ctl(ControlOperation::Add, fd, event)?;
        }
        let (answer_sender, answers) = mpsc::channel();
        let access = listener.access();
        let most = match access {
            Access::Full => MAX_CONNECTIONS,
            Access::Metrics => MAX_METRICS_CONNECTIONS,
        };
        Ok(Self {
            epoll,
            access,
            most,
            listener: Some(listener),
            sender,
            stop,
            answers,
            answer_sender,
            answered,
            connections: HashMap::new(),
            next: FIRST_CONNECTION,
            metrics: None,
            asked: false,
        })
    }

    fn run(&mut self) {
        let mut events = [EpollEvent::default(); 64];
        let mut end: Option<Instant> = None;
        loop {
            let wait = self.timeout(end, Instant::now());
            let ready = match self.epoll.wait(wait, &mut events) {
                Ok(ready) => ready,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
                Err(error) => {
                    log::error!("the API server cannot wait for events: {error}");
                    break;
                }
            };
            let now = Instant::now();
            for event in &events[..ready] {
                match event.data() {
                    LISTENER => self.accept(now),
                    ANSWERS => drop(self.answered.read()),
                    STOP => {
                        drop(self.stop.read());
                        end = Some(now + LAST_WORDS);
                        self.stop_accepting();
                    }
                    id => self.serve(id, event.event_set(), now),
                }
            }
            while let Ok((id, answer)) = self.answers.try_recv() {
                self.deliver(id, answer, now);
            }
            self.expire(now);
            if let Some(end) = end
                && (now >= end || !self.connections.values().any(Connection::is_busy))
            {
                break;
            }
        }
        self.stop_accepting();
        self.connections.clear();
    }

    /// Milliseconds until the next deadline; -1 if there is none.
    fn timeout(&self, end: Option<Instant>, now: Instant) -> i32 {
        let deadlines = self.connections.values().filter_map(Connection::deadline);
        match deadlines.chain(end).min() {
            Some(first) => {
                let wait = first.saturating_duration_since(now).as_millis() + 1;
                i32::try_from(wait).unwrap_or(i32::MAX)
            }
            None => -1,
        }
    }

    /// Closes the socket, which removes its file.
    fn stop_accepting(&mut self) {
        if let Some(listener) = self.listener.take() {
            let fd = listener.socket().as_raw_fd();
            // Closing the socket would remove it from the epoll instance, too.
            let _ = self
                .epoll
                .ctl(ControlOperation::Delete, fd, EpollEvent::default());
        }
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPTS {
            let Some(listener) = &self.listener else {
                return;
            };
            // SAFETY: no address is requested.
            let fd = unsafe {
                libc::accept4(
                    listener.socket().as_raw_fd(),
                    std::ptr::null_mut(),
                    std::ptr::null_mut(),
                    libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC,
                )
            };
            if fd < 0 {
                let error = io::Error::last_os_error();
                match error.raw_os_error() {
                    Some(libc::EINTR | libc::ECONNABORTED) => continue,
                    Some(libc::EAGAIN) => {}
                    Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS)
                        if self.evict(|_| true) => {}
                    _ => {
                        log::warn!("cannot accept a connection to the API: {error}");
                        // The listener stays readable, so without a pause this would be a busy
                        // loop.
                        thread::sleep(NO_DESCRIPTOR);
                    }
                }
                return;
            }
            // SAFETY: accepted just now, so it has no other owner.
            let socket = unsafe { OwnedFd::from_raw_fd(fd) };
            let connection = Connection::new(socket, self.access, now);
            if !self.has_room(connection.user()) {
                // All connections are carrying out requests, which are served one at a time. The
                // client sees its connection closed.
                log::warn!(
                    "the API has {} requests in progress and takes no more",
                    self.most
                );
                continue;
            }
            let id = self.next;
            self.next += 1;
            let event = EpollEvent::new(EventSet::IN, id);
            match self.epoll.ctl(ControlOperation::Add, fd, event) {
                Ok(()) => {
                    self.connections.insert(id, connection);
                }
                Err(error) => log::warn!("cannot serve a connection to the API: {error}"),
            }
        }
    }

    /// Whether there is room for a connection of this user, for which an idle one may be closed.
    fn has_room(&mut self, user: Option<u32>) -> bool {
        let is_same = |connection: &Connection| connection.user() == user;
        let same = self.connections.values();
        let same = same.filter(|connection| is_same(connection)).count();
        if self.access == Access::Metrics && same >= MAX_METRICS_CONNECTIONS_OF_USER {
            return self.evict(is_same);
        }
        self.connections.len() < self.most || self.evict(|_| true)
    }

    /// Closes the best candidate for eviction among these; false if all of them are in use.
    fn evict(&mut self, among: impl Fn(&Connection) -> bool) -> bool {
        let candidates = self
            .connections
            .iter()
            .filter(|(_, connection)| among(connection))
            .filter_map(|(id, connection)| Some((connection.evictable()?, *id)));
        match candidates.min() {
            Some((_, id)) => self.connections.remove(&id).is_some(),
            None => false,
        }
    }

    fn serve(&mut self, id: u64, events: EventSet, now: Instant) {
        let gone = events.intersects(EventSet::HANG_UP | EventSet::ERROR);
        self.on(id, now, |connection| {
            if connection.wants_input() && events.intersects(EventSet::IN | EventSet::HANG_UP) {
                connection.readable(now)
            } else if gone {
                // There is no peer to read a response.
                Progress::Closed
            } else {
                connection.writable(now)
            }
        });
    }

    fn expire(&mut self, now: Instant) {
        let due = |(id, connection): (&u64, &Connection)| {
            connection
                .deadline()
                .is_some_and(|deadline| deadline <= now)
                .then_some(*id)
        };
        let ids: Vec<u64> = self.connections.iter().filter_map(due).collect();
        for id in ids {
            self.on(id, now, |connection| connection.expire(now));
        }
    }

    /// Runs `work` on a connection and acts on the result.
    fn on(&mut self, id: u64, now: Instant, work: impl FnOnce(&mut Connection) -> Progress) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let mut progress = work(connection);
        loop {
            match progress {
                Progress::Open => break,
                Progress::Request(request) => {
                    let Some(answer) = self.ask(id, request, now) else {
                        break;
                    };
                    // The next request may have arrived already.
                    let Some(connection) = self.connections.get_mut(&id) else {
                        return;
                    };
                    progress = connection.answer(&answer, now);
                }
                Progress::Closed => {
                    self.connections.remove(&id);
                    return;
                }
            }
        }
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        let mut interest = EventSet::empty();
        interest.set(EventSet::IN, connection.wants_input());
        interest.set(EventSet::OUT, connection.wants_output());
        let event = EpollEvent::new(interest, id);
        let fd = connection.as_raw_fd();
        if let Err(error) = self.epoll.ctl(ControlOperation::Modify, fd, event) {
            log::warn!("cannot serve a connection to the API: {error}");
            self.connections.remove(&id);
        }
    }

    /// Asks the machine; or returns its last answer, if that will do.
    fn ask(&mut self, id: u64, request: Request, now: Instant) -> Option<Arc<Answer>> {
        if self.access == Access::Metrics {
            let fresh = |(time, _): &&(Instant, _)| now.saturating_duration_since(*time) < FRESH;
            if let Some((_, answer)) = self.metrics.as_ref().filter(fresh) {
                return Some(Arc::clone(answer));
            }
            if mem::replace(&mut self.asked, true) {
                return None;
            }
        }
        let reply = self.reply(id);
        self.sender.send(request, reply);
        None
    }

    /// Sends an answer of the machine to the client; metrics to all that wait for them.
    fn deliver(&mut self, id: u64, answer: Answer, now: Instant) {
        if self.access == Access::Full {
            return self.on(id, now, |connection| connection.answer(&answer, now));
        }
        let answer = Arc::new(answer);
        self.metrics = Some((now, Arc::clone(&answer)));
        self.asked = false;
        let ids: Vec<u64> = self.connections.keys().copied().collect();
        for id in ids {
            self.on(id, now, |connection| connection.answer(&answer, now));
        }
    }

    fn reply(&self, id: u64) -> Reply {
        let sender = self.answer_sender.clone();
        let answered = Arc::clone(&self.answered);
        Reply::new(move |answer| {
            // A server that has stopped no longer receives replies.
            if sender.send((id, answer)).is_ok()
                && let Err(error) = answered.write(1)
            {
                log::error!("cannot wake the API server: {error}");
            }
        })
    }
}
