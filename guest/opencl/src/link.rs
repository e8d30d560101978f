//! The connection to the worker: calls out, answers in, and callbacks.

use std::{
    collections::HashMap,
    ffi::{c_char, c_void},
    io::Read,
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::Path,
    ptr::null,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

use gantry_remoting::{
    opencl::codes,
    port::{self, Place},
    protocol::{
        Blob, Call, Flags, Header, Wire,
        calls::{self, ContextId},
        hello::{Form, Hello},
    },
    transport::{
        alarm::Alarm,
        bell::Futex,
        gate::Gate,
        link::{Receiver, STAY, Sender, Spin},
        port_bell::{Doorbell, DoorbellPage, Naps},
        ring::{Consumer, Lines, Producer},
        socket,
        stream::{
            address::Address,
            bridge::{self, Bridge},
            connect::{self, Connected},
        },
        window::{Slice, Window},
    },
};

use crate::{
    callbacks::{Callback, Callbacks, Look},
    event_fd::EventFd,
    gate, hook,
    ids::Ids,
    stage::Stages,
};

/// Where the worker pool of this machine, or the agent of this guest, listens unless
/// `GANTRY_OPENCL` says otherwise.
const SOCKET: &str = "/run/gantry/opencl.sock";
/// How many microseconds a waiting call polls before it sleeps, unless `GANTRY_OPENCL_SPIN` says
/// otherwise. Waking up takes 5: nothing after so long, but much after a kernel or copy of 50. Beside
/// a worker that has few processors to share with the application it is far less.
const SPIN: u64 = 2000;
/// How late the worker's death is noticed by who sleeps in a call.
pub const PATIENCE: Duration = Duration::from_millis(100);
/// The same in a guest whose agent hears of it by an interrupt, if that does not come.
const ALARMED: Duration = Duration::from_secs(1);

/// No thread has made a call yet.
const NOBODY: usize = 0;
/// Several threads have made calls: no address.
const SEVERAL: usize = 1;

#[derive(Debug)]
struct Outgoing {
    sender: Sender<Slice, Doorbell>,
    sequence: u64,
    scratch: Vec<u8>,
}

#[derive(Debug)]
struct Incoming {
    /// With whichever thread reads at the moment.
    receiver: Option<Box<Reader>>,
    answers: HashMap<u64, Vec<u8>>,
    /// Threads that wait until it comes back: who brings it back wakes them, and makes no system
    /// call if there are none.
    waiting: usize,
}

#[derive(Debug)]
struct Reader {
    ring: Receiver<Slice, Doorbell>,
    /// The message that was read last.
    body: Vec<u8>,
}

/// `clCreateContext`'s callback: text, data of the driver, its size, data of the application.
pub type Notify = extern "C" fn(*const c_char, *const c_void, usize, *mut c_void);
/// What the socket's other end is.
enum Peer {
    /// A worker of this machine, which nudges when there is something to listen to.
    Worker,
    /// The agent of this guest. The worker is outside and cannot nudge; callbacks are looked for
    /// while there are any, and the event is signalled when there is a first one.
    Agent(EventFd, Agent),
    /// A worker behind a gate, which runs when this process goes there. Callbacks as above.
    Gate(EventFd),
    /// A worker with a window of its own, which a bridge carries this one's contents to. Nudges are
    /// the bridge's.
    Stream,
}

impl Peer {
    /// What wakes the thread that looks for callbacks, if one does.
    fn wanted(&self) -> Option<&EventFd> {
        match self {
            Self::Worker | Self::Stream => None,
            Self::Agent(wanted, _) | Self::Gate(wanted) => Some(wanted),
        }
    }
}

/// Who can tell whether a worker outside of this guest is still there, if asked.
struct Agent {
    stream: UnixStream,
    asked: Mutex<Instant>,
    /// How long to wait before asking again.
    patience: Duration,
}

impl Agent {
    /// Has it look, if it has not been asked for a while: it closes the connection of who has no worker.
    fn look(&self) {
        let mut asked = lock(&self.asked);
        if asked.elapsed() < self.patience {
            return;
        }
        *asked = Instant::now();
        drop(asked);
        let (word, flags) = ([port::LOOK], libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        // SAFETY: a byte of a local. Fails if it has been asked often, or is gone.
        unsafe { libc::send(self.stream.as_raw_fd(), word.as_ptr().cast(), 1, flags) };
    }
}

/// The connection.
pub struct Link {
    pub window: Arc<Window>,
    /// Whether the worker sees this window, and not one of its own.
    pub shared: bool,
    outgoing: Mutex<Outgoing>,
    incoming: Mutex<Incoming>,
    arrived: Condvar,
    bell: Doorbell,
    peer: Peer,
    dead: AtomicBool,
    /// The thread that makes all calls, [`NOBODY`] or [`SEVERAL`].
    only: AtomicUsize,
    pub stages: Mutex<Stages>,
    callbacks: Mutex<Callbacks>,
    due: Mutex<mpsc::Sender<(Callback, i32)>>,
    /// Callbacks of contexts, with the application's data.
    notifies: Mutex<HashMap<ContextId, (Notify, usize)>>,
    spin: Duration,
    /// The same while the worker stays awake for the answer.
    attended: Duration,
    pub ids: Ids,
}

/// A lock, held by whoever panicked or not.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

static LINK: OnceLock<Option<Link>> = OnceLock::new();

/// The connection, made when it is first needed; none if there is no worker.
pub fn get() -> Option<&'static Link> {
    LINK.get_or_init(|| {
        let named = std::env::var("GANTRY_OPENCL").ok();
        if let Some(link) = gate::open(named.as_deref()) {
            return Some(link);
        }
        let named = named.filter(|name| name != gate::NAME);
        let path = named.as_deref().unwrap_or(SOCKET);
        if path == "off" {
            return None;
        }
        let opened = if Address::is_meant(path) {
            Link::open_stream(path)
        } else {
            Link::open(Path::new(path))
        };
        match opened {
            Ok(link) => Some(link),
            // Nobody serves here, and nobody said that there should be one.
            Err(_) if named.is_none() && !Path::new(path).exists() => None,
            Err(error) => {
                gantry_remoting::note!("gantry-opencl: cannot use {path}: {error}");
                let mut source = error.source();
                while let Some(cause) = source {
                    gantry_remoting::note!("  because {cause}");
                    source = cause.source();
                }
                None
            }
        }
    })
    .as_ref()
}

/// The connection, if it has been made.
pub fn made() -> Option<&'static Link> {
    LINK.get().and_then(Option::as_ref)
}

/// The connection of an object: it exists, since the object does.
pub fn the() -> Result<&'static Link, i32> {
    get().ok_or(codes::OUT_OF_RESOURCES)
}

/// Starts a thread that takes none of the application's signals.
pub fn quiet(name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<Thread> {
    // SAFETY: plain calls on local signal sets.
    let old = unsafe {
        let (mut all, mut old) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut old);
        old
    };
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(work);
    // SAFETY: restores what was there.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut()) };
    spawned.map(|handle| handle.thread().clone())
}

impl Link {
    fn open(path: &Path) -> Result<Self, Box<dyn std::error::Error>> {
        let stream = UnixStream::connect(path)?;
        socket::send_hello(&stream, Hello::client(), &[])?;
        let (bytes, files) = socket::receive_hello(&stream).map_err(|error| {
            if error.kind() == std::io::ErrorKind::UnexpectedEof {
                return "there is no worker for one more application: see the log of gantry-agent \
                        (in a virtual machine) or gantry-accel"
                    .into();
            }
            Box::<dyn std::error::Error>::from(error)
        })?;
        let hello = Hello::check(&bytes)?;
        let (window, bell, peer) = match hello.form {
            Form::File => {
                let file = files.first().ok_or("the worker sent no window")?;
                let window = Window::map(file, hello.window, hello.ring)?;
                let bell = Doorbell::Futex(Futex { patience: PATIENCE });
                (window, bell, Peer::Worker)
            }
            Form::Stream => {
                return Err("it is served by a stream: write unix: before its path".into());
            }
            Form::Full => {
                return Err(
                    "this user has as many workers as one may have (gantry-accel's \
                            --per-user): end an application that uses OpenCL"
                        .into(),
                );
            }
            Form::Port => {
                let [window, doorbells, alarm @ ..] = &files[..] else {
                    return Err("the agent sent no window and doorbell".into());
                };
                // An agent without the port's interrupts sends none.
                let alarm = alarm.first().map(Alarm::map).transpose()?;
                let patience = alarm.as_ref().map_or(PATIENCE, |_| ALARMED);
                let mut place = [0; Place::SIZE];
                (&mut &stream).read_exact(&mut place)?;
                let place = Place::from_bytes(place);
                let bell = Doorbell::Port {
                    page: Arc::new(DoorbellPage::map(doorbells, place.doorbell)?),
                    naps: Arc::new(Naps::new(alarm)),
                    patience,
                };
                let window = Window::map_slice(window, place.slice, hello.window, hello.ring)?;
                let agent = Agent {
                    stream: stream.try_clone()?,
                    asked: Mutex::new(Instant::now()),
                    patience,
                };
                (window, bell, Peer::Agent(EventFd::new()?, agent))
            }
        };
        Self::over(window, bell, peer, Some(stream))
    }

    /// A connection through a gate, which has been opened.
    pub fn through(
        gate: Arc<Gate>,
        window: Arc<Window>,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let peer = Peer::Gate(EventFd::new()?);
        Self::over(window, Doorbell::Gate(gate), peer, None)
    }

    /// Connects with a worker that is reached by a stream.
    fn open_stream(address: &str) -> Result<Self, Box<dyn std::error::Error>> {
        let Connected {
            window,
            nudges,
            bridge: Bridge { outward, inward },
        } = connect::connect(&address.parse()?)?;
        quiet("gantry-outward", move || drop(outward.run()))?;
        // Its end closes the other end of `nudges`, which is how the worker's end is noticed.
        quiet("gantry-inward", move || drop(inward.run()))?;
        let bell = Doorbell::Futex(Futex { patience: PATIENCE });
        Self::over(window, bell, Peer::Stream, Some(nudges))
    }

    fn over(
        window: Arc<Window>,
        bell: Doorbell,
        peer: Peer,
        stream: Option<UnixStream>,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let shared = !matches!(peer, Peer::Stream);
        let named = std::env::var("GANTRY_OPENCL_SPIN");
        let named = named.ok().and_then(|text| text.parse().ok());
        let spin = match named {
            Some(micros) => Duration::from_micros(micros),
            // Others of this machine have to run before the answer comes, or of this process.
            None if matches!(peer, Peer::Worker) => bridge::spin_for(Duration::from_micros(SPIN)),
            None if shared => Duration::from_micros(SPIN),
            None => bridge::spin(),
        };
        let spin = match bell {
            // Nothing changes before this process goes and sees.
            Doorbell::Gate(_) => Duration::ZERO,
            Doorbell::Futex(_) | Doorbell::Port { .. } => spin,
        };
        let (due, queue) = mpsc::channel::<(Callback, i32)>();
        let link = Self {
            outgoing: Mutex::new(Outgoing {
                sender: Sender::new(Producer::new(window.calls(), bell.clone()), spin),
                sequence: 0,
                scratch: Vec::new(),
            }),
            incoming: Mutex::new(Incoming {
                receiver: Some(Box::new(Reader {
                    ring: Receiver::new(Consumer::new(window.answers(), bell.clone())),
                    body: Vec::new(),
                })),
                answers: HashMap::new(),
                waiting: 0,
            }),
            arrived: Condvar::new(),
            bell,
            peer,
            dead: AtomicBool::new(false),
            only: AtomicUsize::new(NOBODY),
            stages: Mutex::new(Stages::of(&window)),
            callbacks: Mutex::default(),
            due: Mutex::new(due),
            notifies: Mutex::default(),
            spin,
            // Where a waiting call is not to poll for long, it does not do so beside the worker.
            attended: if spin < Duration::from_micros(SPIN) {
                spin
            } else {
                STAY
            },
            ids: Ids::default(),
            window,
            shared,
        };
        quiet("gantry-callback", move || {
            for (callback, status) in queue {
                callback(status);
            }
        })?;
        quiet("gantry-listen", move || listen(stream.as_ref()))?;
        // A port's window may be mapped without caches, and may go, and a gate's is small: no place
        // for a heap. One that is not shared saves no copy.
        if link.is_file() {
            hook::offer(&link.window);
        }
        Ok(link)
    }

    /// Whether the window is a file that a worker of this machine has mapped: memory as any other.
    /// That of ports and gates has one address.
    pub fn is_file(&self) -> bool {
        matches!(self.peer, Peer::Worker)
    }

    fn alive(&self) -> bool {
        !self.dead.load(Ordering::Relaxed)
    }

    /// As `alive`, but also notices the end of a gate's server, which nobody tells of, and has a
    /// guest's agent look, which does so for who waits.
    fn still_alive(&self) -> bool {
        if let Doorbell::Gate(gate) = &self.bell
            && let Some(why) = gate.ended()
            && !self.dead.swap(true, Ordering::Relaxed)
        {
            gantry_remoting::note!("gantry-opencl: {why}");
        }
        if let Peer::Agent(_, agent) = &self.peer {
            agent.look();
        }
        self.alive()
    }

    /// Whether this is the only thread of the application that has ever been here.
    fn alone(&self) -> bool {
        thread_local!(static HERE: u8 = const { 0 });
        // An address that no other thread has while this one lives.
        let me = HERE.with(|here| std::ptr::from_ref(here) as usize);
        let only = self.only.load(Ordering::Relaxed);
        if only == me {
            return true;
        }
        if only == NOBODY
            && self
                .only
                .compare_exchange(NOBODY, me, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
        {
            return true;
        }
        self.only.store(SEVERAL, Ordering::Relaxed);
        false
    }

    fn send<C: Call>(&self, call: &C, flags: Flags, later: bool) -> Result<u64, i32> {
        let flags = if self.alone() {
            flags.with(Flags::ALONE)
        } else {
            flags
        };
        let mut outgoing = lock(&self.outgoing);
        let outgoing = &mut *outgoing;
        outgoing.sequence += 1;
        outgoing.scratch.clear();
        call.put(&mut outgoing.scratch);
        let header = Header {
            length: 0,
            opcode: C::OPCODE,
            flags,
            sequence: outgoing.sequence,
        };
        if !self.alive() {
            return Err(codes::OUT_OF_RESOURCES);
        }
        let (sender, body) = (&mut outgoing.sender, &outgoing.scratch);
        let sent = if later {
            sender.write(header, body, || self.still_alive())
        } else {
            sender.send(header, body, || self.still_alive())
        };
        sent.map_err(|_| codes::OUT_OF_RESOURCES)?;
        Ok(outgoing.sequence)
    }

    /// Sends a call and does not wait: some copies and stores, no system call unless the worker
    /// sleeps or the ring is full.
    pub fn post<C: Call<Answer = ()>>(&self, call: &C) -> Result<(), i32> {
        self.send(call, Flags::default(), false).map(drop)
    }

    /// Sends a call for which a sleeping worker is woken only with the next one: one that has no
    /// effect before that.
    pub fn post_with_next<C: Call<Answer = ()>>(&self, call: &C) -> Result<(), i32> {
        self.send(call, Flags::default(), true).map(drop)
    }

    /// Sends a call and waits for its answer.
    pub fn ask<C: Call>(&self, call: &C) -> Result<C::Answer, i32> {
        let sequence = self.send(call, Flags::ANSWER, false)?;
        self.wait(sequence, |body| {
            Result::<C::Answer, i32>::from_bytes(body).unwrap_or(Err(codes::OUT_OF_RESOURCES))
        })
    }

    /// Waits for an answer. One of the waiting threads reads for all of them.
    fn wait<T>(
        &self,
        sequence: u64,
        decode: impl FnOnce(&[u8]) -> Result<T, i32>,
    ) -> Result<T, i32> {
        let mut incoming = lock(&self.incoming);
        loop {
            if let Some(body) = incoming.answers.remove(&sequence) {
                return decode(&body);
            }
            if let Some(mut reader) = incoming.receiver.take() {
                drop(incoming);
                let got = if self.read(&mut reader, Some(sequence)) {
                    decode(&reader.body)
                } else {
                    Err(codes::OUT_OF_RESOURCES)
                };
                self.bring_back(reader);
                return got;
            }
            if !self.alive() {
                return Err(codes::OUT_OF_RESOURCES);
            }
            // It may have waited for long already.
            self.bell.hurry(&self.window.answers().control().items.0);
            incoming = self.wait_for_reader(incoming);
        }
    }

    fn bring_back(&self, reader: Box<Reader>) {
        let mut incoming = lock(&self.incoming);
        incoming.receiver = Some(reader);
        let waiting = incoming.waiting;
        drop(incoming);
        if waiting > 0 {
            self.arrived.notify_all();
        }
    }

    fn wait_for_reader<'a>(
        &'a self,
        mut incoming: MutexGuard<'a, Incoming>,
    ) -> MutexGuard<'a, Incoming> {
        incoming.waiting += 1;
        let (mut incoming, _) = self
            .arrived
            .wait_timeout(incoming, PATIENCE)
            .unwrap_or_else(PoisonError::into_inner);
        incoming.waiting -= 1;
        incoming
    }

    /// Reads answers until the wanted one is there, or, if none is wanted, while there are some.
    /// Whether the wanted one is in the reader's body.
    fn read(&self, reader: &mut Reader, wanted: Option<u64>) -> bool {
        let mut spin = Spin::new(self.spin).or_attended(self.attended);
        loop {
            match reader.ring.poll(&mut reader.body) {
                Ok(Some(header)) => {
                    spin.reset();
                    match header.opcode {
                        calls::ANSWER if Some(header.sequence) == wanted => return true,
                        calls::ANSWER => {
                            let body = std::mem::take(&mut reader.body);
                            let mut incoming = lock(&self.incoming);
                            incoming.answers.insert(header.sequence, body);
                            let waiting = incoming.waiting;
                            drop(incoming);
                            if waiting > 0 {
                                self.arrived.notify_all();
                            }
                        }
                        calls::RELEASED => {
                            if let Ok((stage, good)) = Wire::from_bytes(&reader.body) {
                                self.released(stage, good);
                            }
                        }
                        calls::CALLBACK => {
                            if let Ok((number, status)) = Wire::from_bytes(&reader.body) {
                                self.due(number, status);
                            }
                        }
                        calls::REPORT => {
                            if let Ok((context, text)) = Wire::from_bytes(&reader.body) {
                                self.report(context, text);
                            }
                        }
                        _ => {}
                    }
                }
                Ok(None) if wanted.is_none() || !self.alive() => return false,
                Ok(None) => reader.ring.wait(&mut spin, || !self.still_alive()),
                Err(_) => {
                    self.dead.store(true, Ordering::Relaxed);
                    return false;
                }
            }
        }
    }

    /// Reads what is there, unless another thread will.
    fn pump(&self) {
        let mut incoming = lock(&self.incoming);
        loop {
            if let Some(mut reader) = incoming.receiver.take() {
                drop(incoming);
                self.read(&mut reader, None);
                return self.bring_back(reader);
            }
            // The reader may leave before it sees what this thread was woken for.
            incoming = self.wait_for_reader(incoming);
        }
    }

    fn died(&self) {
        self.dead.store(true, Ordering::Relaxed);
        if let Doorbell::Port { page, .. } = &self.bell {
            // The port may be about to go.
            page.retire();
            self.window.retire();
        }
        self.bell.rouse(&self.window.answers().control().items.0);
        self.bell.rouse(&self.window.calls().control().room.0);
        self.arrived.notify_all();
        let callbacks = lock(&self.callbacks).take_all();
        for callback in callbacks {
            let _ = lock(&self.due).send((callback, codes::OUT_OF_RESOURCES));
        }
    }

    /// Keeps a callback and gives it a number.
    pub fn callback(&self, callback: Callback) -> u64 {
        let (number, wakes) = lock(&self.callbacks).keep(callback);
        if let (Some(wanted), true) = (self.peer.wanted(), wakes) {
            wanted.signal();
        }
        number
    }

    /// Forgets a callback.
    pub fn forget(&self, number: u64) {
        lock(&self.callbacks).take(number);
    }

    pub fn due(&self, number: u64, status: i32) {
        if let Some(callback) = lock(&self.callbacks).take(number) {
            let _ = lock(&self.due).send((callback, status));
        }
    }

    /// Has a context's callback called with what the worker reports, until it is told `None`.
    pub fn notify(&self, context: ContextId, callback: Option<(Notify, usize)>) {
        let mut notifies = lock(&self.notifies);
        match callback {
            Some(callback) => {
                if let Some(wanted) = self.peer.wanted() {
                    wanted.signal();
                }
                notifies.insert(context, callback)
            }
            None => notifies.remove(&context),
        };
    }

    fn report(&self, context: ContextId, Blob(mut text): Blob) {
        let Some((notify, data)) = lock(&self.notifies).get(&context).copied() else {
            return;
        };
        // The worker's texts have no zero inside.
        text.push(0);
        let call = Box::new(move |_| {
            notify(text.as_ptr().cast(), null(), 0, data as *mut c_void);
        });
        let _ = lock(&self.due).send((call, 0));
    }
}

/// Listens until the worker ends.
fn listen(stream: Option<&UnixStream>) {
    // The link is there as soon as its maker has returned.
    let Some(link) = LINK.wait() else {
        return;
    };
    match (link.peer.wanted(), stream) {
        (Some(wanted), stream) => look_for_callbacks(link, stream, wanted),
        (None, Some(stream)) => listen_to_nudges(link, stream),
        (None, None) => {}
    }
    link.died();
}

/// Reads nudges until the worker ends.
fn listen_to_nudges(link: &Link, stream: &UnixStream) {
    let mut nudges = [0; 64];
    loop {
        match (&mut &*stream).read(&mut nudges) {
            Ok(0) => return,
            Ok(_) => link.pump(),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// Looks for callbacks while some are due, and sleeps while none are, until the agent closes the
/// connection: the worker has ended, or the port is gone. Behind a gate, the worker does not notice
/// anything by itself.
fn look_for_callbacks(link: &Link, stream: Option<&UnixStream>, wanted: &EventFd) {
    let mut look = Look::new();
    loop {
        let naps = look.patience(&mut lock(&link.callbacks));
        let patience = naps.or_else(|| {
            // What a context has to report is not waited for by anybody.
            let reports = !lock(&link.notifies).is_empty();
            reports.then_some(PATIENCE)
        });
        match wanted.wait_beside(stream, patience) {
            Ok(true) | Err(_) => return,
            Ok(false) => {
                if let Doorbell::Gate(gate) = &link.bell {
                    gate.drain();
                }
                link.pump();
            }
        }
        if !link.still_alive() {
            return;
        }
    }
}
