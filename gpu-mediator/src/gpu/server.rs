//! The process: serves the fronts' connections, the GPU's interrupt and the clock in one thread.

use std::{
    collections::{BTreeMap, VecDeque},
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::net::UnixListener,
    },
    path::Path,
    time::Duration,
};

use base::Chain;
use log::{info, warn};

use super::{
    link::{Listener, Packet, Packets},
    mediator::{self, Mediator},
    physical::{self, Failure},
    wire::{Event, Nonsense, Request, VERSION},
};
use crate::{
    Moment,
    policy::Name,
    status::{self, Status},
};

/// Maximum number of fronts.
pub const MOST_FRONTS: usize = 256;
/// Maximum number of messages that a front has not received; beyond that, it is disconnected.
const MOST_UNTAKEN: usize = 4096;
/// Maximum time for a front to send Hello; until then, it occupies a place for nothing.
const HELLO: Duration = Duration::from_secs(5);
/// Number of messages of one front that are handled before those of another.
const BURST: usize = 32;
/// Number of page table entries after which no further message of the front is handled before those of another. The
/// message in which it is reached is handled; it has at most about as many itself.
const BURST_ENTRIES: u64 = 1 << 15;

/// Why the mediator cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The GPU cannot be used.
    #[error("cannot use the GPU at {0}")]
    Gpu(String, #[source] physical::Error),
    /// The GPU cannot be shared.
    #[error("cannot share the GPU")]
    Start(#[source] mediator::Error),
    /// The socket cannot be created.
    #[error("cannot listen at {0}: does its folder exist, and is nobody else there?")]
    Listen(String, #[source] io::Error),
    /// The GPU's server is lost, or the GPU hangs.
    #[error("the GPU is lost")]
    Lost(#[source] Failure),
    /// Waiting fails.
    #[error("cannot wait for anything")]
    Wait(#[source] io::Error),
}

/// Why a front is disconnected.
#[derive(Debug, thiserror::Error)]
enum Ending {
    #[error("it has gone")]
    Gone,
    #[error("its connection failed")]
    Socket(#[source] io::Error),
    #[error("it has sent an invalid message")]
    Nonsense(#[from] Nonsense),
    #[error("its first message is no Hello")]
    Silent,
    #[error("it does not take its messages")]
    Deaf,
    #[error(transparent)]
    Request(mediator::Error),
}

struct Front {
    packets: Packets,
    since: Moment,
    vm: Option<u32>,
    outbox: VecDeque<Vec<u8>>,
}

/// Settings of the server.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The policy by which VMs get the GPU.
    pub policy: Name,
    /// Maximum time for which a channel may have the GPU without completing anything.
    pub limit: Duration,
}

/// The process.
pub struct Server {
    mediator: Mediator,
    listener: Listener,
    readers: UnixListener,
    policy: Name,
    started: Moment,
    fronts: BTreeMap<RawFd, Front>,
}

impl Server {
    /// Connects to the GPU's server, and listens for fronts.
    pub fn new(model: &Path, socket: &Path, settings: Settings) -> Result<Self, Error> {
        let gpu = physical::Physical::connect(model)
            .map_err(|source| Error::Gpu(model.display().to_string(), source))?;
        let mediator = Mediator::new(gpu, settings.policy, settings.limit).map_err(Error::Start)?;
        let listener = Listener::bind(socket)
            .map_err(|source| Error::Listen(socket.display().to_string(), source))?;
        let path = status::path(socket);
        let readers = status::listen(&path)
            .map_err(|source| Error::Listen(path.display().to_string(), source))?;
        Ok(Self {
            mediator,
            listener,
            readers,
            policy: settings.policy,
            started: Moment::now(),
            fronts: BTreeMap::new(),
        })
    }

    /// Serves until the connection to the GPU is lost.
    pub fn run(&mut self) -> Result<(), Error> {
        loop {
            self.step(None)?;
        }
    }

    /// Gives turns, sends pending messages, and handles what arrives within `patience`, or without
    /// a time limit.
    pub fn step(&mut self, patience: Option<Duration>) -> Result<(), Error> {
        let again = self.mediator.tick(Moment::now()).map_err(Error::Lost)?;
        self.send_events();
        let now = Moment::now();
        let silent = self.fronts.values().filter(|front| front.vm.is_none());
        let hello = silent.map(|front| HELLO.saturating_sub(now.since(front.since)));
        let waits = patience.into_iter().chain(again).chain(hello);
        self.wait(waits.min())
    }

    fn wait(&mut self, again: Option<Duration>) -> Result<(), Error> {
        let entry = |fd: BorrowedFd<'_>, out: bool| libc::pollfd {
            fd: fd.as_raw_fd(),
            events: libc::POLLIN | if out { libc::POLLOUT } else { 0 },
            revents: 0,
        };
        let gpu = self.mediator.gpu();
        let mut entries = vec![
            entry(self.listener.as_fd(), false),
            libc::pollfd {
                fd: gpu.interrupt().as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            },
            libc::pollfd {
                fd: gpu.stream().as_raw_fd(),
                events: libc::POLLRDHUP,
                revents: 0,
            },
        ];
        entries.push(entry(self.readers.as_fd(), false));
        let fronts = self.fronts.values();
        entries.extend(fronts.map(|front| entry(front.packets.as_fd(), !front.outbox.is_empty())));
        base::poll::poll(&mut entries, again).map_err(Error::Wait)?;
        if entries[2].revents != 0 {
            return Err(Error::Lost(vfio_client::Failure::Closed.into()));
        }
        if entries[1].revents != 0 {
            self.mediator.interrupt().map_err(Error::Lost)?;
        }
        for entry in &entries[4..] {
            if entry.revents != 0 {
                self.serve(entry.fd)?;
            }
        }
        self.leave_silent(Moment::now());
        if entries[0].revents != 0 {
            self.accept();
        }
        if entries[3].revents != 0 {
            self.show();
        }
        Ok(())
    }

    /// Sends the status to one reader.
    fn show(&self) {
        match self.readers.accept() {
            // A reader that has disconnected does not need it.
            Ok((stream, _)) => drop(self.status(Moment::now()).send(&stream)),
            Err(error) => self.could_not_accept("a reader", &error),
        }
    }

    fn status(&self, now: Moment) -> Status {
        Status {
            policy: self.policy.to_string(),
            uptime: now.since(self.started).as_nanos() as u64,
            clients: self.mediator.clients(now),
        }
    }

    fn could_not_accept(&self, whom: &str, error: &io::Error) {
        if error.kind() != io::ErrorKind::WouldBlock {
            warn!("cannot accept {whom}: {error}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn accept(&mut self) {
        match self.listener.accept() {
            Ok(packets) if self.fronts.len() < MOST_FRONTS => {
                let front = Front {
                    vm: None,
                    since: Moment::now(),
                    outbox: VecDeque::new(),
                    packets,
                };
                self.fronts.insert(front.packets.as_fd().as_raw_fd(), front);
            }
            Ok(_) => warn!("a front too many is turned away"),
            Err(error) => self.could_not_accept("a front", &error),
        }
    }

    /// Disconnects fronts that have not sent Hello in time, to free their places.
    fn leave_silent(&mut self, now: Moment) {
        self.fronts.retain(|_, front| {
            let stays = front.vm.is_some() || now.since(front.since) < HELLO;
            if !stays {
                warn!("a front is left: it has not said Hello in {HELLO:?}");
            }
            stays
        });
    }

    fn serve(&mut self, fd: RawFd) -> Result<(), Error> {
        let Some(mut front) = self.fronts.remove(&fd) else {
            return Ok(());
        };
        match self.take(&mut front) {
            Ok(()) => {
                self.fronts.insert(fd, front);
            }
            Err(Ending::Request(mediator::Error::Gpu(failure))) => {
                return Err(Error::Lost(failure));
            }
            Err(ending) => {
                let name = front
                    .vm
                    .map_or("a front".to_owned(), |vm| format!("front {vm}"));
                match ending {
                    Ending::Gone => info!("{name} has gone"),
                    other => warn!("{name} is left: {}", Chain(&other)),
                }
                if let Some(vm) = front.vm {
                    let left = self.mediator.leave(vm, Moment::now());
                    left.map_err(Error::Lost)?;
                }
            }
        }
        Ok(())
    }

    fn take(&mut self, front: &mut Front) -> Result<(), Ending> {
        front.flush()?;
        let mut entries = 0;
        for _ in 0..BURST {
            if entries >= BURST_ENTRIES {
                break;
            }
            let packet = match front.packets.receive() {
                Ok(Some(packet)) => packet,
                Ok(None) => return Err(Ending::Gone),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(Ending::Gone);
                }
                Err(error) => return Err(Ending::Socket(error)),
            };
            entries += self.message(front, packet)?;
        }
        Ok(())
    }

    /// Handles a message. Returns the number of page table entries that it sets.
    fn message(&mut self, front: &mut Front, packet: Packet) -> Result<u64, Ending> {
        let request = Request::parse(&packet.bytes)?;
        let now = Moment::now();
        let Some(vm) = front.vm else {
            return self
                .handshake(front, &request, packet.files, now)
                .map(|()| 0);
        };
        let entries = request.entries();
        self.mediator
            .request(vm, request, packet.files, now)
            .map(|()| entries)
            .map_err(Ending::Request)
    }

    fn handshake(
        &mut self,
        front: &mut Front,
        request: &Request,
        files: Vec<OwnedFd>,
        now: Moment,
    ) -> Result<(), Ending> {
        let Request::Hello {
            version,
            vram,
            channels,
            weight,
        } = *request
        else {
            return Err(Ending::Silent);
        };
        if version != VERSION {
            return Err(Ending::Request(mediator::Error::Version(version)));
        }
        let kept = files.into_iter().next().map(File::from);
        let vm = self
            .mediator
            .join(vram, channels, weight, kept, now)
            .map_err(Ending::Request)?;
        front.vm = Some(vm);
        let welcome = Event::Welcome {
            version: VERSION,
            vram,
        };
        let file = self.mediator.partition(vm).map(AsFd::as_fd);
        let files: Vec<_> = file.into_iter().collect();
        front
            .packets
            .send(&welcome.encode(), &files)
            .map_err(Ending::Socket)
    }

    fn send_events(&mut self) {
        let mut deaf = Vec::new();
        for (fd, front) in &mut self.fronts {
            let Some(vm) = front.vm else { continue };
            while let Some(event) = self.mediator.event(vm) {
                front.outbox.push_back(event.encode());
            }
            if front.flush().is_err() {
                deaf.push(*fd);
            }
        }
        for fd in deaf {
            if let Some(front) = self.fronts.get(&fd) {
                // Its disconnect is noticed when it is served.
                front.packets.shut_down();
            }
        }
    }
}

impl Front {
    /// Sends pending messages as far as there is room.
    fn flush(&mut self) -> Result<(), Ending> {
        while let Some(message) = self.outbox.front() {
            match self.packets.send(message, &[]) {
                Ok(()) => {
                    self.outbox.pop_front();
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                    return Err(Ending::Gone);
                }
                Err(error) => return Err(Ending::Socket(error)),
            }
        }
        match self.outbox.len() > MOST_UNTAKEN {
            true => Err(Ending::Deaf),
            false => Ok(()),
        }
    }
}
