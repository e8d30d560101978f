//! The socket and its clients: one thread, which looks at the ports often while something is expected of
//! them, and otherwise when an application asks that waits for its worker, or a device is removed.
//! While applications ask for nothing, it sleeps.

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
use gantry_remoting::{
    link::{
        alarm::Alarm,
        closer::{Closer, Connection},
        socket,
    },
    port::{LOOK, Outcome, OutcomeKind, State, Wish},
    wire::hello::{self, Hello},
};

use crate::{
    file_error::{FileError, failed},
    port::{self, Port},
    removals::{News, Removals},
    seats::{self, Seats},
};

/// How often the registers are looked at while a worker is waited for.
const SOON: Duration = Duration::from_millis(2);
/// How long a worker may take to answer, as it opens the host's driver, and one to end for whose slice
/// somebody waits.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a client may take to say hello.
const HELLO: Duration = Duration::from_secs(5);
/// How often a port without interrupts is asked for a wish of the host's, and one is looked for where
/// there is none.
const SELDOM: Duration = Duration::from_secs(1);
/// Bytes of a window where no port says how many there are.
const WINDOW: u64 = 256 << 20;
/// Most clients that have not got a slice yet.
const WAITING: usize = 64;
/// Most of them of one user: who connects without an end keeps no other user out.
const OF_ONE_USER: usize = 16;

/// Why the agent does not serve.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket.
    #[error(transparent)]
    Socket(#[from] FileError),
    /// The group.
    #[error("there is no group {0:?}: create it, or start without --group")]
    Group(String),
    /// News of devices.
    #[error("cannot hear from the kernel which devices are removed")]
    Removals(#[source] io::Error),
    /// Waiting.
    #[error("cannot wait for applications")]
    Wait(#[source] io::Error),
}

/// How far a client is.
enum Step {
    /// It has yet to say hello.
    Hello,
    /// It has said hello and waits for a free slice.
    Queued([u8; hello::SIZE]),
    /// Its slice waits for a worker.
    Opening { port: String, slice: u32 },
    /// It has its slice, and what wakes its sleepers, if there are interrupts.
    Served {
        port: String,
        slice: u32,
        alarm: Option<Alarm>,
    },
}

struct Client {
    stream: Connection,
    /// Whose it is, if the system says.
    user: Option<u32>,
    step: Step,
    /// Whether it calls the API whose applications change between this guest's own pool and a port.
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

    /// Wakes its sleepers if it has a slice of this port for which there has been an interrupt.
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

/// By which name CUDA's driver looks for a socket of the agent.
pub fn name_of_cuda(path: &Path) -> PathBuf {
    path.with_file_name("cuda.sock")
}

/// CUDA's driver looks for the agent by another name, in the same folder: a link, in the place of an
/// earlier one. Where it cannot be made, programs name the socket by GANTRY_CUDA.
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
    device: Option<String>,
    ports: Vec<Port>,
    clients: Vec<Client>,
    /// Who serves applications, and this guest's own pool, if it has one.
    seats: Seats,
    /// The last wish of each port that was carried out.
    wishes: HashMap<String, Wish>,
    /// Ports that could not be used and were complained about.
    bad: Vec<String>,
    /// For what clients have sent, and their connections.
    closer: Closer,
}

impl Server {
    /// Listens at a path. Ports are looked for when applications come.
    pub fn new(
        path: &Path,
        device: Option<String>,
        group: Option<&str>,
        seats: Seats,
    ) -> Result<Self, Error> {
        let listener = socket::listen(path).map_err(failed("listen on", path))?;
        socket::refuse_files(&listener);
        listener
            .set_nonblocking(true)
            .map_err(failed("listen on", path))?;
        let mode = match group {
            Some(name) => {
                give_to(path, name)?;
                0o660
            }
            None => 0o666,
        };
        fs::set_permissions(path, fs::Permissions::from_mode(mode))
            .map_err(failed("set the permissions of", path))?;
        link_for_cuda(path);
        let mut server = Self {
            listener,
            removals: Removals::listen().map_err(Error::Removals)?,
            device,
            ports: Vec::new(),
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
        match server.ports.is_empty() {
            true => base::note!(
                "gantry-agent: serving at {path}; there is no accelerator port yet: it comes with \
                 --accel, or gantry ctl add-accel, on the host"
            ),
            false => base::note!("gantry-agent: serving at {path}"),
        }
        Ok(server)
    }

    /// Opens ports that are new and forgets those that are gone.
    fn look_for_ports(&mut self) {
        self.ports.retain(Port::is_there);
        let found = match &self.device {
            Some(address) => vec![address.clone()],
            None => port::find(),
        };
        self.bad.retain(|address| found.contains(address));
        for address in found {
            if self.ports.iter().any(|port| port.address == address) {
                continue;
            }
            match Port::open(&address) {
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

    /// Serves until something breaks.
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
            // Not at each interrupt: a look is some exits.
            let due = self.next_look();
            let due = due.is_some_and(|due| looked.elapsed() >= due);
            if changed || asked || due || news != News::default() {
                looked = Instant::now();
                // By a new port there may be a wish, before there are applications.
                if self.seats.has_pool() && (news.added || self.lacks_port()) {
                    self.look_for_ports();
                }
                if self.look(changed) {
                    self.hear_wishes();
                }
            }
            // A port gets its driver by the agent, which changes nothing for the pool.
            let is_other = |address: &String| self.port(address).is_none();
            self.change_seats(news.bound.iter().any(is_other));
            self.hand_out();
        }
    }

    /// Wakes those for whom there have been interrupts. Whether the state of a slice has changed.
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

    /// Whether there is no port yet, or one that could not be used.
    fn lacks_port(&self) -> bool {
        self.ports.is_empty() || !self.bad.is_empty()
    }

    /// Bytes of the ports' slices, as far as they are known: of the smallest, so that applications of
    /// the pool can go to each.
    fn window(&self) -> u64 {
        let sizes = self.ports.iter().map(Port::slice_size);
        sizes.min().unwrap_or(WINDOW)
    }

    /// Hears of the host's wishes, which count as changes.
    fn hear_wishes(&mut self) {
        for port in &self.ports {
            let Some((wish, to)) = port.wish() else {
                self.wishes.remove(&port.address);
                continue;
            };
            if self.wishes.insert(port.address.clone(), wish) == Some(wish) {
                continue;
            }
            self.seats.wish(wish, &to, &port.address);
            let begun = Outcome {
                number: wish.number,
                kind: OutcomeKind::Begun,
                applications: 0,
            };
            port.tell(begun, "");
        }
    }

    /// Goes on with who serves applications; `bound`: a device has got its driver.
    fn change_seats(&mut self, bound: bool) {
        let window = self.window();
        let seats = &mut self.seats;
        seats.heard();
        let mut served = Vec::new();
        let mut coming = false;
        // Those of other APIs have nowhere to go.
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

    /// How long after a look at the registers the next one is due, if nobody asks for one.
    fn next_look(&self) -> Option<Duration> {
        let next = |client: &Client| match client.step {
            Step::Opening { .. } | Step::Queued(_) => Some(SOON),
            Step::Hello => Some(HELLO),
            Step::Served { .. } => None,
        };
        let seats = self.seats.next_look();
        // Without interrupts nobody tells of a wish. An agent without a pool does not look for one, as
        // each look is an exit.
        let silent = self.lacks_port() || self.ports.iter().any(|port| port.interrupts.is_none());
        let silent = silent && self.seats.has_pool();
        let seats = seats.or(silent.then_some(SELDOM));
        self.clients.iter().filter_map(next).chain(seats).min()
    }

    /// Waits for clients, interrupts and removed devices, or until the registers are to be looked at.
    /// Which clients have something.
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
        // SAFETY: the array is as long as is said.
        let ready = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, limit) };
        if ready < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        Ok(polled.iter().map(|entry| entry.revents != 0).collect())
    }

    /// Hellos of new clients and ends of old ones. Whether one asks how its worker is.
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
        // A bounded number, so that others are served while somebody connects without an end.
        for _ in 0..WAITING {
            let Ok((stream, _)) = self.listener.accept() else {
                break;
            };
            let user = socket::user(&stream).ok();
            let stream = Connection::new(stream, &self.closer);
            // One more is closed at once: its driver says that there is no device.
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

    /// Whether one more client of a user may wait.
    fn has_room(&self, user: Option<u32>) -> bool {
        let waiting = self.clients.iter();
        let waiting: Vec<_> = waiting.filter(|client| client.slice().is_none()).collect();
        let alike = waiting.iter().filter(|client| client.user == user);
        waiting.len() < WAITING && alike.count() < OF_ONE_USER
    }

    /// Gives free slices to those that wait.
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
                gantry_remoting::note!(
                    "gantry-agent: an application is turned away: no accelerator port is for the \
                     API that it calls"
                );
                if let Some(hello) = other.refusal() {
                    // It has nothing else to read, so that there is room.
                    let _ = socket::send(&client.stream, &hello.to_bytes(), &[]);
                }
                return false;
            }
            let found = serving().find_map(|port| port.free().map(|slice| (port, slice)));
            let Some((port, slice)) = found else {
                // One that is being closed is free when its worker has ended; of others that is not known.
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

    /// Looks at what has become of slices, of which some are known to have `changed`, or not. Whether
    /// something has.
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
                    // The answer of a worker of another build lets the application say why.
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

/// Takes what a client has sent; false if it is to go.
fn said(client: &mut Client) -> bool {
    match client.step {
        Step::Hello => {}
        Step::Served { .. } => return asks(&client.stream),
        // Nothing is to be said: it has ended, or is no driver of ours.
        Step::Queued(_) | Step::Opening { .. } => return false,
    }
    let mut bytes = [0; hello::SIZE];
    // A hello is far smaller than any socket's buffer, and comes in one piece.
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

/// Whether a client that is served asks how its worker is. If not, it has ended, or is no driver of ours.
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

/// Hands a client its slice. What wakes its sleepers, if there are interrupts.
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

/// Passes on the hello of a worker that does not serve this client, if it left one.
fn refuse(client: &Client, port: &Port, slice: u32) -> io::Result<()> {
    let reply = port.reply(slice)?;
    if reply.starts_with(&hello::MAGIC) {
        socket::send(&client.stream, &reply, &[])?;
    }
    Ok(())
}

/// Gives a file to a group.
fn give_to(path: &Path, group: &str) -> Result<(), Error> {
    // No look-up by way of the system's libraries: the agent is linked statically.
    let groups = fs::read_to_string("/etc/group").unwrap_or_default();
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
