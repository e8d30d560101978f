//! How a process obtains its connection.

use std::{
    io::{self, Read},
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::Path,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use base::event::Event;
use remoting_proto::{
    port::SliceOffsets,
    wire::{
        api::Api,
        hello::{Form, Hello},
    },
};
use remoting_stream::{
    address::Address,
    bridge::{self, Bridge},
    connect::{self, Connected, Files},
};
use remoting_transport::{
    alarm::Alarm,
    bell::Futex,
    endpoint::STAY,
    gate::{Delegate, Gate},
    order,
    port_bell::{Doorbell, DoorbellPage, Naps},
    socket,
    window::Window,
};

use crate::{
    callbacks::Callback,
    driver::Driver,
    gate, hook,
    link::{LIVENESS_TIMEOUT, Link, call_all},
    listen::listen,
    peer::{Agent, Peer, Seat, Spins},
    thread::spawn,
};

/// How long a waiting call polls before it sleeps, in microseconds, unless the environment says
/// otherwise. Waking up takes 5 µs: negligible after this long, but significant after a kernel or
/// copy of 50 µs. Much shorter where the worker shares few processors with the application.
const SPIN: u64 = 2000;
/// As [`LIVENESS_TIMEOUT`], in a guest whose agent is notified by an interrupt, in case the
/// interrupt does not arrive.
const ALARMED_LIVENESS_TIMEOUT: Duration = Duration::from_secs(1);

/// Returns the connection, connecting on first use. None if there is no worker, or if this process
/// was forked from one that uses the API.
#[inline]
pub fn get<D: Driver>() -> Option<&'static Link<D>> {
    D::connection().get_or_init(open)
}

/// Connects to the worker that the environment names.
fn open<D: Driver>() -> Option<Link<D>> {
    let environment = Environment::of::<D>();
    let named = address::<D>();
    if let Some(way) = gate::way(named.as_deref()) {
        let through = |way| Link::through_as(way, &environment);
        match way.map_err(Into::into).and_then(through) {
            Ok(link) => return Some(link),
            Err(error) => gate::note::<D>(&error),
        }
        // An address that names a socket for messages leaves nothing else to try.
        if named.as_deref().is_some_and(|name| name != gate::NAME) {
            return None;
        }
    }
    let named = named.filter(|name| name != gate::NAME);
    let path = named.as_deref().unwrap_or(D::SOCKET);
    if path == "off" {
        return None;
    }
    let opened = Opened::to::<D>(path, &environment, None);
    match opened.and_then(|opened| Link::over(opened, environment)) {
        Ok(link) => Some(link),
        // Nobody serves here, and no address was configured.
        Err(_) if named.is_none() && !Path::new(path).exists() => None,
        Err(error) => {
            base::note::error(&format!("{}: cannot use {path}", D::NAME), &*error);
            None
        }
    }
}

/// Returns the connection, if this process has established it.
pub fn existing<D: Driver>() -> Option<&'static Link<D>> {
    D::connection().get()
}

/// Returns the connection of an existing object, whose existence implies that of the connection.
pub fn connected<D: Driver>() -> Result<&'static Link<D>, D::Status> {
    get().ok_or_else(|| {
        if D::connection().is_forked() {
            D::FORKED
        } else {
            D::WORKER_LOST
        }
    })
}

/// The worker's address in the environment, if there is one.
fn address<D: Driver>() -> Option<String> {
    let named = std::env::var(D::ADDRESS_VARIABLE).ok();
    named.filter(|address| !address.is_empty())
}

/// The settings in the environment that apply to all connections. Read only once, since a running
/// application may change the environment.
#[derive(Clone, Debug)]
pub struct Environment {
    /// How long a waiting call polls before it sleeps.
    spin: Option<Duration>,
    /// The files that TLS needs.
    files: Files,
    /// The address of the first worker.
    home: String,
}

impl Environment {
    /// Reads the current environment.
    pub(crate) fn of<D: Driver>() -> Self {
        let spin = std::env::var(D::SPIN_VARIABLE);
        let micros = spin.ok().and_then(|text| text.parse().ok());
        Self {
            spin: micros.map(Duration::from_micros),
            files: Files::named(),
            home: address::<D>().unwrap_or_else(|| D::SOCKET.to_owned()),
        }
    }

    /// The address of the first worker.
    pub(crate) fn home(&self) -> &str {
        &self.home
    }
}

/// The retry interval for a socket whose queue is full.
const AGAIN: Duration = Duration::from_millis(50);

/// Connects to a socket. With `until`, reads from it time out at that time.
fn stream_to(path: &Path, until: Option<Instant>) -> io::Result<UnixStream> {
    let Some(until) = until else {
        return UnixStream::connect(path);
    };
    let stream = loop {
        match socket::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                thread::sleep(AGAIN);
            }
            connected => break connected?,
        }
    };
    socket::set_blocking(&stream, true)?;
    let left = until.saturating_duration_since(Instant::now());
    // A timeout of zero would mean forever.
    stream.set_read_timeout(Some(left.max(AGAIN)))?;
    Ok(stream)
}

/// Explains why nobody could be reached at a socket, and what to do.
fn unreached<D: Driver>(path: &Path, error: io::Error) -> Box<dyn std::error::Error> {
    let text = match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => format!(
            "nobody serves there ({error}): start gantry-accel serve --api {} --socket {}, or gantry-agent in \
             a virtual machine",
            D::Schema::ID,
            path.display()
        ),
        io::ErrorKind::PermissionDenied => {
            format!("this user may not connect ({error}): mode and group of the socket say who may")
        }
        _ => return error.into(),
    };
    text.into()
}

/// Describes a process that another worker serves until it has a new connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FromAnother {
    /// The size of its window in bytes.
    pub window: u64,
    /// The deadline for the new connection.
    pub until: Instant,
}

/// An established connection: a window, and the worker that serves it.
pub(crate) struct Opened {
    pub window: Arc<Window>,
    pub seat: Arc<Seat>,
    /// The window's file, and the window's offset in it. None if the window is not available as a
    /// file.
    pub file: Option<(OwnedFd, u64)>,
    /// The stream for orders, apart from the seat's connection.
    pub orders: Option<UnixStream>,
}

impl Opened {
    /// Connects to an address, in the way that [`get`] does to the address in the environment.
    /// Waits without a deadline if no other worker serves this process.
    pub fn to<D: Driver>(
        address: &str,
        environment: &Environment,
        from: Option<FromAnother>,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        Self::at::<D>(address, environment, from, false)
    }

    /// The same. With `again`, this process has been redirected already and is not redirected
    /// again.
    fn at<D: Driver>(
        address: &str,
        environment: &Environment,
        from: Option<FromAnother>,
        again: bool,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        if let Some(way) = gate::way(Some(address)) {
            Self::through::<D>(way?, environment)
        } else if Address::is_meant(address) {
            Self::stream::<D>(address, environment, from.map(|from| from.until))
        } else {
            Self::socket::<D>(Path::new(address), environment, from, again)
        }
    }

    fn socket<D: Driver>(
        path: &Path,
        environment: &Environment,
        from: Option<FromAnother>,
        again: bool,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let stream = stream_to(path, from.map(|from| from.until))
            .map_err(|error| unreached::<D>(path, error))?;
        let hello = match from {
            Some(from) => Hello::from_another::<D::Schema>(from.window),
            None => Hello::client::<D::Schema>(),
        };
        socket::send_hello(&stream, hello, &[])?;
        let (bytes, files) = socket::receive_hello(&stream).map_err(|error| {
            if error.kind() == std::io::ErrorKind::UnexpectedEof {
                return "there is no worker for one more application: see the log of gantry-agent \
                        (in a virtual machine) or gantry-accel"
                    .into();
            }
            if error.kind() == io::ErrorKind::WouldBlock {
                return "no worker has said hello in time".into();
            }
            Box::<dyn std::error::Error>::from(error)
        })?;
        let hello = Hello::check_for::<D::Schema>(&bytes)?;
        let mut files = files.into_iter();
        match hello.form {
            Form::File => {
                let file = files.next().ok_or("the worker sent no window")?;
                let window = Window::map(&file, hello.window, hello.ring)?;
                let bell = Doorbell::Futex(Futex {
                    patience: LIVENESS_TIMEOUT,
                });
                stream.set_read_timeout(None)?;
                let seat = Seat::new(bell, Peer::Worker, Some(stream), environment);
                Ok(Self::new::<D>(window, seat, Some((file, 0))))
            }
            Form::Stream => Err("it is served by a stream: write unix: before its path".into()),
            Form::Elsewhere => {
                let (to, orders) = order::redirected(&stream, files.collect())?;
                if again {
                    return Err(format!("it is sent on to {to}, from where it was sent to").into());
                }
                let opened = Self::at::<D>(&to, environment, from, true);
                let mut opened = opened.map_err(|error| format!("it is sent to {to}: {error}"))?;
                opened.orders = Some(orders);
                Ok(opened)
            }
            Form::Asks => Err("the worker answers what nobody has asked".into()),
            Form::Full => Err(format!(
                "this user has as many workers as one may have (gantry-accel's --per-user): \
                 end an application that uses {}",
                D::API
            )
            .into()),
            Form::Port => {
                let (Some(window), Some(doorbells)) = (files.next(), files.next()) else {
                    return Err("the agent sent no window and doorbell".into());
                };
                // An agent without the port's interrupts sends no alarm.
                let alarm = files.next().as_ref().map(Alarm::map).transpose()?;
                let patience = alarm
                    .as_ref()
                    .map_or(LIVENESS_TIMEOUT, |_| ALARMED_LIVENESS_TIMEOUT);
                let mut place = [0; SliceOffsets::SIZE];
                (&mut &stream).read_exact(&mut place)?;
                stream.set_read_timeout(None)?;
                let place = SliceOffsets::from_bytes(place);
                let bell = Doorbell::Port {
                    page: Arc::new(DoorbellPage::map(&doorbells, place.doorbell)?),
                    naps: Arc::new(Naps::new(alarm)),
                    patience,
                };
                let file = window;
                let window = Window::map_slice(&file, place.slice, hello.window, hello.ring)?;
                let agent = Agent::new(stream.try_clone()?, patience);
                let peer = Peer::Agent(Event::new()?, agent);
                let seat = Seat::new(bell, peer, Some(stream), environment);
                Ok(Self::new::<D>(window, seat, Some((file, place.slice))))
            }
        }
    }

    /// Connects to a worker behind a gate, which runs on this process's own CPU.
    fn through<D: Driver>(
        way: Box<dyn Delegate>,
        environment: &Environment,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let (gate, window) = Gate::open::<D::Schema>(way, LIVENESS_TIMEOUT)?;
        window.keep_from_children();
        let file = gate.memory();
        let peer = Peer::Gate(Event::new()?);
        let seat = Seat::new(Doorbell::Gate(gate), peer, None, environment);
        Ok(Self {
            window,
            seat,
            file,
            orders: None,
        })
    }

    /// Connects to a worker that is reached through a stream.
    fn stream<D: Driver>(
        address: &str,
        environment: &Environment,
        until: Option<Instant>,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let Connected {
            window,
            file,
            nudges,
            bridge: Bridge { outward, inward },
            closer,
        } = connect::connect::<D::Schema>(&address.parse()?, &environment.files, until)?;
        window.keep_from_children();
        spawn("gantry-outward", move || drop(outward.run()))?;
        // When it ends, it closes the other end of `nudges`, which is how the worker's end is
        // noticed.
        spawn("gantry-inward", move || drop(inward.run()))?;
        let bell = Doorbell::Futex(Futex {
            patience: LIVENESS_TIMEOUT,
        });
        let seat = Seat::new(bell, Peer::Stream(closer), Some(nudges), environment);
        let file = Some((file, 0));
        Ok(Self {
            window,
            seat,
            file,
            orders: None,
        })
    }

    fn new<D: Driver>(window: Arc<Window>, seat: Arc<Seat>, file: Option<(OwnedFd, u64)>) -> Self {
        // Moves the window to the address that the API wants, if that is free. The window is not in
        // use yet.
        let window = match D::WINDOW_AT {
            Some(at) => Window::moved(window, at),
            None => window,
        };
        window.keep_from_children();
        Self {
            window,
            seat,
            file,
            orders: None,
        }
    }
}

impl Seat {
    /// Creates a seat, with the polling times that suit it.
    fn new(
        bell: Doorbell,
        peer: Peer,
        stream: Option<UnixStream>,
        environment: &Environment,
    ) -> Arc<Self> {
        let spin = match environment.spin {
            Some(spin) => spin,
            // Other processes of this machine, or threads of this process, have to run before the
            // answer can arrive.
            None if peer.is_file() => bridge::spin_for(Duration::from_micros(SPIN)),
            None if peer.is_shared() => Duration::from_micros(SPIN),
            None => bridge::spin(),
        };
        let spin = match bell {
            // Nothing changes until this process enters the gate.
            Doorbell::Gate(_) => Duration::ZERO,
            Doorbell::Futex(_) | Doorbell::Port { .. } => spin,
        };
        // Where a waiting call must not poll for long, it does not poll for long while the worker
        // stays awake either.
        let attended = if spin < Duration::from_micros(SPIN) {
            spin
        } else {
            STAY
        };
        Arc::new(Self {
            bell,
            peer,
            spins: Spins { spin, attended },
            stream,
        })
    }
}

impl<D: Driver> Link<D> {
    /// Connects through a gate, to a worker that runs on this process's own CPU.
    pub fn through(way: Box<dyn Delegate>) -> Result<Self, Box<dyn std::error::Error>> {
        Self::through_as(way, &Environment::of::<D>())
    }

    /// The same with this environment.
    pub(crate) fn through_as(
        way: Box<dyn Delegate>,
        environment: &Environment,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        Self::over(Opened::through::<D>(way, environment)?, environment.clone())
    }

    fn over(opened: Opened, environment: Environment) -> Result<Self, Box<dyn std::error::Error>> {
        let (due, queue) = mpsc::channel::<(Callback<D::Status>, D::Status)>();
        let link = Self::new(opened.window, opened.seat, due, environment);
        spawn("gantry-callback", move || call_all(&queue))?;
        let orders = opened.orders;
        spawn("gantry-listen", move || listen::<D>(orders))?;
        // Unsuitable for a heap: a port's window, which may be mapped uncached and may be removed,
        // and a gate's window, which is small. A heap in a window that is not shared saves no copy.
        if D::HEAP && link.is_file() {
            hook::offer::<D>(&link.window);
        }
        Ok(link)
    }
}
