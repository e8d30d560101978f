//! The socket and its clients, in one thread. It polls the ports often while something is expected of them. Otherwise
//! it looks at them only when an application asks that waits for its worker, or when a device is removed. While
//! applications ask for nothing, it sleeps.

use std::{
    collections::HashMap,
    fs, io,
    os::{
        fd::{AsFd, AsRawFd},
        unix::{fs::PermissionsExt, net::UnixListener},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use base::Chain;
use remoting_proto::{
    port::{LOOK, Outcome, OutcomeKind, Server as By, State, Wish},
    wire::hello::{self, Hello},
};
use remoting_transport::{
    alarm::Alarm,
    closer::{Closer, Connection},
    socket,
};

use crate::{
    file_error::{FileError, failed},
    native::Served,
    port::{self, Port},
    removals::{News, Removals},
    seats::{self, Seats},
};

/// The polling interval of the registers while a worker is expected.
const SOON: Duration = Duration::from_millis(2);
/// How long a worker may take to answer, since it opens the host's driver, and how long a worker may take to end when
/// somebody waits for its slice.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a client may take to say hello.
const HELLO: Duration = Duration::from_secs(5);
/// The interval at which ports without interrupts are polled for a wish of the host, and at which a missing port is
/// looked for.
const SELDOM: Duration = Duration::from_secs(1);
/// The window size in bytes if no port gives one.
const WINDOW: u64 = 256 << 20;
/// The maximum number of clients that have no slice yet.
const WAITING: usize = 64;
/// The maximum for one user: a user that keeps connecting does not keep others out.
const OF_ONE_USER: usize = 16;

/// Why the agent does not serve.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket cannot be used.
    #[error(transparent)]
    Socket(#[from] FileError),
    /// There is no such group.
    #[error("there is no group {0:?}: create it, or start without --group")]
    Group(String),
    /// Device events cannot be received.
    #[error("cannot hear from the kernel which devices are removed")]
    Removals(#[source] io::Error),
    /// Waiting failed.
    #[error("cannot wait for applications")]
    Wait(#[source] io::Error),
}

/// The state of a client.
enum Step {
    /// It has not said hello yet.
    Hello,
    /// It has said hello and waits for a free slice.
    Queued([u8; hello::SIZE]),
    /// Its slice waits for a worker.
    Opening { port: String, slice: u32 },
    /// It has its slice, and an alarm for its sleepers if there are interrupts.
    Served {
        port: String,
        slice: u32,
        alarm: Option<Alarm>,
    },
}

struct Client {
    stream: Connection,
    /// The user that it belongs to, if the system knows.
    user: Option<u32>,
    step: Step,
    /// Whether it calls the API whose applications move between this guest's own pool and a port.
    may_go: bool,
    since: Instant,
}

impl Client {
    fn slice(&self) -> Option<(&str, u32)> {
        match &self.step {
            Step::Opening { port, slice } | Step::Served { port, slice, .. } => {
                Some((port, *slice))
            }
            Step::Hello | Step::Queued(_) => None,
        }
    }

    /// Wakes its sleepers if it has a slice of this port that an interrupt was raised for.
    fn wake(&self, address: &str, rung: u64) {
        if let Step::Served {
            port,
            slice,
            alarm: Some(alarm),
        } = &self.step
            && port == address
            && rung >> slice & 1 != 0
        {
            alarm.wake();
        }
    }
}

/// The name by which the CUDA driver looks for the agent's socket.
pub fn name_of_cuda(path: &Path) -> PathBuf {
    path.with_file_name("cuda.sock")
}

/// The socket that programs with native contexts connect to.
pub fn name_of_native(path: &Path) -> PathBuf {
    path.with_file_name("nvidia.sock")
}

/// Creates the link by which the CUDA driver finds the agent, in the same folder, in place of an earlier link. If that
/// fails, programs have to name the socket with GANTRY_CUDA.
fn link_for_cuda(path: &Path) {
    if path.file_name().is_none_or(|name| name != "opencl.sock") {
        return;
    }
    let link = name_of_cuda(path);
    if link.is_symlink() {
        let _ = fs::remove_file(&link);
    }
    let _ = std::os::unix::fs::symlink("opencl.sock", &link);
}

/// The agent.
pub struct Server {
    listener: UnixListener,
    removals: Removals,
    path: PathBuf,
    group: Option<String>,
    device: Option<String>,
    ports: Vec<Port>,
    /// The port for native contexts.
    native: Option<Served>,
    clients: Vec<Client>,
    /// Who serves applications, and this guest's own pool, if it has one.
    seats: Seats,
    /// The last wish of each port that was carried out.
    wishes: HashMap<String, Wish>,
    /// Ports that could not be used and for which that was reported.
    bad: Vec<String>,
    /// Closes files that clients have sent, and their connections.
    closer: Closer,
}

impl Server {
    /// Listens at a path. Ports are looked for when applications connect.
    pub fn new(
        path: &Path,
        device: Option<String>,
        group: Option<&str>,
        seats: Seats,
    ) -> Result<Self, Error> {
        let listener = socket::listen_privately(path).map_err(failed("listen on", path))?;
        socket::refuse_files(&listener);
        listener
            .set_nonblocking(true)
            .map_err(failed("listen on", path))?;
        permit(path, group)?;
        link_for_cuda(path);
        let mut server = Self {
            listener,
            removals: Removals::listen().map_err(Error::Removals)?,
            path: path.to_owned(),
            group: group.map(str::to_owned),
            device,
            ports: Vec::new(),
            native: None,
            clients: Vec::new(),
            seats,
            wishes: HashMap::new(),
            bad: Vec::new(),
            closer: Closer::default(),
        };
        server.look_for_ports();
        let window = server.window();
        server.seats.start(window);
        let path = path.display();
        match server.ports.is_empty() && server.native.is_none() {
            true => base::note!(
                "gantry-agent: serving at {path}; there is no accelerator port yet: it comes with \
                 --accel, or gantry ctl add-accel, on the host"
            ),
            false => base::note!("gantry-agent: serving at {path}"),
        }
        Ok(server)
    }

    /// Opens new ports and forgets those that have been removed.
    fn look_for_ports(&mut self) {
        self.ports.retain(Port::is_there);
        self.native.take_if(|native| native.has_ended());
        let found = match &self.device {
            Some(address) => vec![address.clone()],
            None => port::find(),
        };
        self.bad.retain(|address| found.contains(address));
        for address in found {
            let native = self.native.as_ref().map(|native| &native.address);
            let mut known = self.ports.iter().map(|port| &port.address).chain(native);
            if known.any(|known| *known == address) {
                continue;
            }
            match Port::open(&address) {
                Ok(port) if port.is_native() => self.serve_natively(port),
                Ok(port) => {
                    base::note!("gantry-agent: accelerator port at {address}");
                    self.bad.retain(|bad| *bad != address);
                    self.ports.push(port);
                }
                Err(error) if !self.bad.contains(&address) => {
                    base::note!("gantry-agent: {}", Chain(&error));
                    self.bad.push(address);
                }
                Err(_) => {}
            }
        }
    }

    /// Serves programs with native contexts through a port.
    fn serve_natively(&mut self, port: Port) {
        let address = port.address.clone();
        let path = name_of_native(&self.path);
        let why = match &self.native {
            Some(native) => format!("{} is served: name one port by --device", native.address),
            None => match Served::start(&path, port, |path| permit(path, self.group.as_deref())) {
                Ok(served) => {
                    self.bad.retain(|bad| *bad != address);
                    self.native = Some(served);
                    return;
                }
                Err(error) => Chain(&error).to_string(),
            },
        };
        if !self.bad.contains(&address) {
            base::note!(
                "gantry-agent: the port for native contexts at {address} is not served: {why}"
            );
            self.bad.push(address);
        }
    }

    /// Serves until an error occurs. Returns the error.
    pub fn run(mut self) -> Error {
        let mut looked = Instant::now();
        loop {
            let ready = match self.wait(looked) {
                Ok(ready) => ready,
                Err(error) => return Error::Wait(error),
            };
            let changed = self.pass_on();
            let asked = self.hear(&ready);
            let news = self.removals.heard();
            self.accept();
            // Not after each interrupt: a look costs some exits.
            let due = self.next_look();
            let due = due.is_some_and(|due| looked.elapsed() >= due);
            if changed || asked || due || news != News::default() {
                looked = Instant::now();
                // A new port may have a wish before there are applications.
                if news.added || self.seats.has_pool() && self.lacks_port() {
                    self.look_for_ports();
                }
                if self.look(changed) {
                    self.hear_wishes();
                }
            }
            // The agent itself binds a port to its driver, which changes nothing for the pool.
            let is_other = |address: &String| self.port(address).is_none();
            self.change_seats(news.bound.iter().any(is_other));
            self.hand_out();
        }
    }

    /// Wakes sleepers for which there were interrupts. Returns whether the state of a slice has changed.
    fn pass_on(&mut self) -> bool {
        let clients = &self.clients;
        let mut changed = false;
        for port in &mut self.ports {
            let address = port.address.clone();
            changed |= port.interrupted(|rung| {
                clients
                    .iter()
                    .for_each(|client| client.wake(&address, rung));
            });
        }
        changed
    }

    /// Whether there is no port yet, or a port that could not be used.
    fn lacks_port(&self) -> bool {
        self.ports.is_empty() || !self.bad.is_empty()
    }

    /// The size of the ports' slices in bytes, as far as it is known: the minimum, so that applications of the pool can
    /// move to any of them.
    fn window(&self) -> u64 {
        let sizes = self.ports.iter().map(Port::slice_size);
        sizes.min().unwrap_or(WINDOW)
    }

    /// Reads the host's wishes, which count as changes.
    fn hear_wishes(&mut self) {
        for port in &self.ports {
            let Some((wish, to)) = port.wish() else {
                self.wishes.remove(&port.address);
                continue;
            };
            if self.wishes.insert(port.address.clone(), wish) == Some(wish) {
                continue;
            }
            let kind = match wish.by {
                By::Examined => OutcomeKind::Cannot,
                _ => OutcomeKind::Begun,
            };
            self.seats.wish(wish, &to, &port.address);
            let begun = Outcome {
                number: wish.number,
                kind,
                applications: 0,
            };
            port.tell(begun, "");
        }
    }

    /// Continues with changes of who serves applications. `bound`: a device was bound to its driver.
    fn change_seats(&mut self, bound: bool) {
        let window = self.window();
        let seats = &mut self.seats;
        seats.heard();
        let mut served = Vec::new();
        let mut coming = false;
        // Applications of other APIs cannot be moved.
        for client in self.clients.iter().filter(|client| client.may_go) {
            match &client.step {
                Step::Served { .. } => served.push(&*client.stream),
                Step::Opening { .. } => coming = true,
                Step::Hello | Step::Queued(_) => {}
            }
        }
        if bound {
            seats.again(!served.is_empty());
        }
        if let Some(told) = seats.step(&served, window, coming)
            && let Some(port) = self.ports.iter().find(|port| port.address == told.port)
        {
            port.tell(told.outcome, &told.reason);
        }
    }

    fn port(&self, address: &str) -> Option<&Port> {
        self.ports.iter().find(|port| port.address == address)
    }

    /// The interval between the last look at the registers and the next one, if nobody asks for one.
    fn next_look(&self) -> Option<Duration> {
        let next = |client: &Client| match client.step {
            Step::Opening { .. } | Step::Queued(_) => Some(SOON),
            Step::Hello => Some(HELLO),
            Step::Served { .. } => None,
        };
        let seats = self.seats.next_look();
        // Without interrupts, nothing announces a wish. An agent without a pool does not poll for one, since each poll
        // costs an exit.
        let silent = self.lacks_port() || self.ports.iter().any(|port| port.interrupts.is_none());
        let silent = silent && self.seats.has_pool();
        let seats = seats.or(silent.then_some(SELDOM));
        self.clients.iter().filter_map(next).chain(seats).min()
    }

    /// Waits for clients, interrupts and removed devices, or until the next look at the registers is due. Returns which
    /// clients are readable.
    fn wait(&self, looked: Instant) -> io::Result<Vec<bool>> {
        let limit = self.next_look().map_or(-1, |limit| {
            limit.saturating_sub(looked.elapsed()).as_millis() as libc::c_int + 1
        });
        let poll = |fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        let mut polled: Vec<_> = self
            .clients
            .iter()
            .map(|client| poll(client.stream.as_raw_fd()))
            .collect();
        polled.push(poll(self.listener.as_raw_fd()));
        polled.push(poll(self.removals.fd()));
        let interrupts = self
            .ports
            .iter()
            .filter_map(|port| port.interrupts.as_ref());
        polled.extend(interrupts.map(|interrupts| poll(interrupts.fd())));
        polled.extend(self.seats.fds().map(poll));
        // SAFETY: the array has the length that is passed.
        let ready = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, limit) };
        if ready < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        Ok(polled.iter().map(|entry| entry.revents != 0).collect())
    }

    /// Handles hellos of new clients and the ends of old ones. Returns whether a client asks about its worker.
    fn hear(&mut self, ready: &[bool]) -> bool {
        let mut asked = false;
        let mut kept = Vec::new();
        for (mut client, &ready) in std::mem::take(&mut self.clients).into_iter().zip(ready) {
            if !ready || said(&mut client) {
                asked |= ready && matches!(client.step, Step::Served { .. });
                kept.push(client);
            } else if let Some((address, slice)) = client.slice()
                && let Some(port) = self.port(address)
            {
                port.close_slice(slice);
            }
        }
        self.clients = kept;
        asked
    }

    fn accept(&mut self) {
        // A bounded number, so that others are served while a client keeps connecting.
        for _ in 0..WAITING {
            let Ok((stream, _)) = self.listener.accept() else {
                break;
            };
            let user = socket::user(&stream).ok();
            let stream = Connection::new(stream, &self.closer);
            // An excess client is closed at once: its driver reports that there is no device.
            if self.has_room(user) {
                self.clients.push(Client {
                    stream,
                    user,
                    step: Step::Hello,
                    may_go: false,
                    since: Instant::now(),
                });
            }
        }
    }

    /// Whether another client of this user may wait.
    fn has_room(&self, user: Option<u32>) -> bool {
        let waiting = self.clients.iter();
        let waiting: Vec<_> = waiting.filter(|client| client.slice().is_none()).collect();
        let alike = waiting.iter().filter(|client| client.user == user);
        waiting.len() < WAITING && alike.count() < OF_ONE_USER
    }

    /// Gives free slices to the clients that wait.
    fn hand_out(&mut self) {
        if !self
            .clients
            .iter()
            .any(|client| matches!(client.step, Step::Queued(_)))
        {
            return;
        }
        self.look_for_ports();
        let ports = &self.ports;
        let mut seats = self.seats.serves().then_some(&mut self.seats);
        self.clients.retain_mut(|client| {
            let Step::Queued(hello) = &client.step else {
                return true;
            };
            if let Some(seats) = &mut seats
                && seats.seat(&client.stream, hello)
            {
                return false;
            }
            let serving = || ports.iter().filter(|port| port.serves(hello));
            if let (Some(other), None) = (ports.first(), serving().next()) {
                base::note!(
                    "gantry-agent: an application is turned away: no accelerator port is for the \
                     API that it calls"
                );
                if let Some(hello) = other.refusal() {
                    // Nothing else was sent to it, so there is room in its socket buffer.
                    let _ = socket::send(&client.stream, &hello.to_bytes(), &[]);
                }
                return false;
            }
            let found = serving().find_map(|port| port.free().map(|slice| (port, slice)));
            let Some((port, slice)) = found else {
                // A slice that is being closed becomes free when its worker has ended. When another one will become
                // free is unknown.
                let patience = match serving().any(Port::is_closing) {
                    true => PATIENCE,
                    false => HELLO,
                };
                let waits = !ports.is_empty() && client.since.elapsed() < patience;
                if !waits {
                    let why = if ports.is_empty() {
                        "this guest has no accelerator port"
                    } else {
                        "all slices are taken"
                    };
                    base::note!("gantry-agent: an application is turned away: {why}");
                }
                return waits;
            };
            if let Err(error) = port.open_slice(slice, hello, client.user) {
                base::note!(
                    "gantry-agent: cannot use slice {slice} of {}: {error}",
                    port.address
                );
                return false;
            }
            client.since = Instant::now();
            client.step = Step::Opening {
                port: port.address.clone(),
                slice,
            };
            true
        });
    }

    /// Looks at the states of slices. `changed`: some are known to have changed. Returns whether any have.
    fn look(&mut self, mut changed: bool) -> bool {
        for port in &mut self.ports {
            changed |= port.changed() || !port.is_there();
        }
        let impatient = |client: &Client| match client.step {
            Step::Hello => client.since.elapsed() >= HELLO,
            Step::Opening { .. } => client.since.elapsed() >= PATIENCE,
            Step::Queued(_) | Step::Served { .. } => false,
        };
        if !changed && !self.clients.iter().any(impatient) {
            return false;
        }
        self.ports.retain(Port::is_there);
        let ports = &self.ports;
        self.clients.retain_mut(|client| {
            let late = impatient(client);
            let Some((address, slice)) = client.slice() else {
                return !late;
            };
            let Some(port) = ports.iter().find(|port| port.address == address) else {
                return false;
            };
            match (&client.step, port.state(slice)) {
                (Step::Opening { .. }, State::Open) => match answer(client, port, slice) {
                    Ok(alarm) => {
                        client.step = Step::Served {
                            port: port.address.clone(),
                            slice,
                            alarm,
                        };
                        true
                    }
                    Err(error) => {
                        base::note!("gantry-agent: cannot answer an application: {error}");
                        port.close_slice(slice);
                        false
                    }
                },
                (Step::Opening { .. }, State::Opening) if !late => true,
                (Step::Served { .. }, State::Open) => true,
                (Step::Opening { .. }, State::Ended) => {
                    base::note!(
                        "gantry-agent: no worker took slice {slice} of {}: see the host's log",
                        port.address
                    );
                    // The answer of a worker of another build lets the application report why.
                    let _ = refuse(client, port, slice);
                    port.close_slice(slice);
                    false
                }
                (_, state) => {
                    base::note!(
                        "gantry-agent: slice {slice} of {} is lost ({state:?})",
                        port.address
                    );
                    port.close_slice(slice);
                    false
                }
            }
        });
        changed
    }
}

/// Handles data that a client has sent. Returns false if the client is to be dropped.
fn said(client: &mut Client) -> bool {
    match client.step {
        Step::Hello => {}
        Step::Served { .. } => return asks(&client.stream),
        // There is nothing to send in these states: the client has ended, or is not a driver of Gantry.
        Step::Queued(_) | Step::Opening { .. } => return false,
    }
    let mut bytes = [0; hello::SIZE];
    // A hello is far smaller than any socket buffer, and arrives in one piece.
    match client.stream.receive(&mut bytes) {
        Ok(got) if got == bytes.len() && bytes.starts_with(&hello::MAGIC) => {
            client.may_go = Hello::api(&bytes) == Some(seats::API);
            client.step = Step::Queued(bytes);
            client.since = Instant::now();
            true
        }
        _ => false,
    }
}

/// Whether a served client asks about its worker. Otherwise it has ended, or is not a driver of Gantry.
fn asks(stream: &Connection) -> bool {
    let mut words = [0; 64];
    match stream.receive(&mut words) {
        Ok(0) => false,
        Ok(got) => words[..got].iter().all(|word| *word == LOOK),
        Err(error) => matches!(
            error.kind(),
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
        ),
    }
}

/// Hands a client its slice. Returns the alarm for its sleepers, if there are interrupts.
fn answer(client: &Client, port: &Port, slice: u32) -> io::Result<Option<Alarm>> {
    let mut bytes = port.reply(slice)?.to_vec();
    bytes.extend(port.place(slice).to_bytes());
    client.stream.set_nonblocking(true)?;
    let alarm = port.interrupts.as_ref().map(|_| Alarm::create());
    let alarm = alarm.transpose().map_err(io::Error::other)?;
    let mut files = vec![port.window.as_fd(), port.doorbells.as_fd()];
    files.extend(alarm.as_ref().map(|(_, file)| file.as_fd()));
    socket::send(&client.stream, &bytes, &files)?;
    Ok(alarm.map(|(alarm, _)| alarm))
}

/// Forwards the hello of a worker that does not serve this client, if the worker left one.
fn refuse(client: &Client, port: &Port, slice: u32) -> io::Result<()> {
    let reply = port.reply(slice)?;
    if reply.starts_with(&hello::MAGIC) {
        socket::send(&client.stream, &reply, &[])?;
    }
    Ok(())
}

/// Sets who may connect to a socket: the members of a group, or everybody.
fn permit(path: &Path, group: Option<&str>) -> Result<(), Error> {
    let mode = match group {
        Some(name) => {
            give_to(path, name)?;
            0o660
        }
        None => 0o666,
    };
    let set = fs::set_permissions(path, fs::Permissions::from_mode(mode));
    Ok(set.map_err(failed("set the permissions of", path))?)
}

/// Changes the group of a file.
fn give_to(path: &Path, group: &str) -> Result<(), Error> {
    // Does not use the system's libraries for the look-up: the agent is statically linked.
    let groups = base::proc::read("/etc/group").unwrap_or_default();
    let id = groups
        .lines()
        .find_map(|line| {
            let mut fields = line.split(':');
            (fields.next() == Some(group)).then(|| fields.nth(1)?.parse().ok())?
        })
        .ok_or_else(|| Error::Group(group.to_owned()))?;
    let given = std::os::unix::fs::chown(path, None, Some(id));
    Ok(given.map_err(failed("give a group the socket", path))?)
}

#[cfg(test)]
mod tests;
