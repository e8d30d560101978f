//! The worker: what all programs share, and their connections.

use std::{
    io,
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::Path,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use base::{
    Unpoisoned,
    limits::Limit,
    note,
    socket::{self, has_unread},
};
use nvidia_abi::Branch;
use remoting_transport::account as port;
use remoting_turns::message::IDLE;
use rustix::{
    io::Errno,
    net::{Shutdown, SocketFlags, accept_with, shutdown},
};

use crate::{
    closing::Closing,
    device::{Device, Node},
    events::{self, Events},
    files::{DESCRIPTORS, Files},
    machine::Machine,
    objects::{Objects, Pages},
    quota::Account,
    record::Record,
    session::Session,
    sharing::{Gated, Share},
    slice::Slice,
};

/// The most programs at a time.
pub const MOST_PROGRAMS: usize = 256;
/// Descriptors of the worker itself, and of each program: its connection, its slice, and one on its way to it.
const OWN_DESCRIPTORS: u64 = 64;
const PROGRAM_DESCRIPTORS: u64 = 3;
/// How long to wait for what programs use up: descriptors, memory, an answer that is not read.
const PAUSE: Duration = Duration::from_millis(100);

/// The worker could not be started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The driver's version cannot be read.
    #[error("cannot read the driver's version")]
    Version(#[source] io::Error),
    /// A weight, and no arbiter.
    #[error(
        "the port has weight={0}, and no arbiter divides GPUs among native contexts: start gantry-nvidia with --arbiter \
         SOCKET, or leave weight out"
    )]
    Weight(u32),
    /// Programs that are to be idle.
    #[error(
        "the port has weight=idle, which native contexts do not have, as their calls wait for the end of a stop: use a weight \
         from 1 to 10000"
    )]
    Idle,
    /// A latency, and no arbiter.
    #[error(
        "the port has latency={0}, and no arbiter divides GPUs among native contexts: start gantry-nvidia with --arbiter \
         SOCKET, or leave latency out"
    )]
    Latency(u32),
    /// The driver's branch is not known.
    #[error("the driver is {0}, and this build knows branch 580")]
    Branch(String),
    /// The system refuses a file, a socket or a thread.
    #[error("cannot start")]
    System(#[from] io::Error),
}

/// What all programs share.
pub struct Worker {
    pub(crate) device: Box<dyn Device>,
    /// The gate before the device files, if an arbiter divides the GPU, and how to take part in that, until it is done.
    pub(crate) gated: Option<Gated>,
    share: Mutex<Option<Share>>,
    pub(crate) version: String,
    pub(crate) branch: Branch,
    slice_length: u64,
    /// The machine whose guest's programs are served. `None`: programs of this machine.
    pub(crate) machine: Option<Arc<Machine>>,
    pub(crate) files: Mutex<Files>,
    pub(crate) objects: Mutex<Objects>,
    pub(crate) events: Events,
    pub(crate) record: Option<Record>,
    pub(crate) account: Arc<Account>,
    /// Held while a call changes what has video memory.
    pub(crate) order: Arc<Mutex<()>>,
    /// Slices that somebody has: programs, and objects with pages of a program that has ended.
    slices: Mutex<Vec<Weak<Slice>>>,
    next_mapping: AtomicU64,
    programs: AtomicUsize,
}

impl Worker {
    /// A worker for these device files. Each program gets a slice of `slice_length` bytes. All programs together may
    /// have `memory` bytes of video memory (`None`: what the devices have), and open as many device files as fit under
    /// the process's soft limit of descriptors.
    ///
    /// # Errors
    /// The driver is of no known branch, or the system refuses.
    pub fn new(
        device: Box<dyn Device>,
        slice_length: u64,
        memory: Option<u64>,
        record: Option<Record>,
    ) -> Result<Arc<Self>, Error> {
        let account = Account::new(memory);
        Self::make(device, slice_length, None, account, record, None)
    }

    /// The same, with GPUs divided by an arbiter.
    ///
    /// # Errors
    /// As of [`Self::new`].
    pub fn shared(
        device: Box<dyn Device>,
        slice_length: u64,
        memory: Option<u64>,
        record: Option<Record>,
        share: Share,
    ) -> Result<Arc<Self>, Error> {
        let account = Account::new(memory);
        Self::make(device, slice_length, None, account, record, Some(share))
    }

    /// A worker for these device files, and for the programs of a machine's guest. All programs together may have
    /// `memory` bytes of video memory (`None`: what the devices have), which the port's account shows. An arbiter divides
    /// GPUs if `control` is the socket to the process that [introduces](crate::sharing::introducer) this one.
    ///
    /// # Errors
    /// As of [`Self::new`]; or the machine has a weight, and there is no arbiter.
    pub fn of_machine(
        device: Box<dyn Device>,
        machine: Machine,
        memory: Option<u64>,
        port: port::Account,
        control: Option<UnixStream>,
    ) -> Result<Arc<Self>, Error> {
        let account = Account::of_port(memory, port);
        let (name, weight, latency) = (machine.name.clone(), machine.weight, machine.latency);
        let share = control.map(|control| Share {
            control,
            name,
            weight,
            latency,
        });
        if weight == IDLE {
            return Err(Error::Idle);
        }
        if share.is_none() && weight != 1 {
            return Err(Error::Weight(weight));
        }
        if share.is_none() && latency != 0 {
            return Err(Error::Latency(latency));
        }
        Self::make(device, 0, Some(Arc::new(machine)), account, None, share)
    }

    fn make(
        device: Box<dyn Device>,
        slice_length: u64,
        machine: Option<Arc<Machine>>,
        account: Arc<Account>,
        record: Option<Record>,
        share: Option<Share>,
    ) -> Result<Arc<Self>, Error> {
        let gated = share.is_some();
        let (device, gated): (Box<dyn Device>, _) = match gated {
            true => {
                let gated = Gated::new(device);
                (Box::new(gated), Some(gated))
            }
            false => (device, None),
        };
        let version = device.version().map_err(Error::Version)?;
        let branch = Branch::of_version(&version).ok_or_else(|| Error::Branch(version.clone()))?;
        let soft = Limit::now()?.soft;
        let others = OWN_DESCRIPTORS + PROGRAM_DESCRIPTORS * MOST_PROGRAMS as u64;
        let room = Limit { soft, hard: soft }.room(others, DESCRIPTORS);
        Ok(Arc::new(Self {
            device,
            gated,
            share: Mutex::new(share),
            version,
            branch,
            slice_length,
            machine,
            files: Mutex::new(Files::new(room, gated)?),
            objects: Mutex::default(),
            events: Events::new()?,
            record,
            account,
            order: Arc::default(),
            slices: Mutex::default(),
            next_mapping: AtomicU64::new(1),
            programs: AtomicUsize::new(0),
        }))
    }

    /// The branch of its driver.
    #[must_use]
    pub fn branch(&self) -> Branch {
        self.branch
    }

    /// Whether its programs see a node.
    #[must_use]
    pub fn shows(&self, node: Node) -> bool {
        self.device.shows(node)
    }

    /// Takes part in sharing GPUs, if an arbiter divides them. Called once this thread is confined, and before programs are
    /// served.
    ///
    /// # Errors
    /// The system refuses a thread, or the process that introduces this one has ended.
    pub(crate) fn begin_sharing(&self) -> io::Result<()> {
        let share = self.share.lock_unpoisoned().take();
        match (share, self.gated) {
            (Some(share), Some(gated)) => share.begin(gated),
            _ => Ok(()),
        }
    }

    /// Serves programs that connect, until accepting fails for another reason than a lack of descriptors or memory,
    /// which is waited for.
    ///
    /// # Errors
    /// The system refuses a thread or a connection.
    pub fn serve(self: &Arc<Self>, listener: &Listener) -> io::Result<()> {
        self.begin_sharing()?;
        let (worker, closing) = (self.clone(), Closing::start(self)?);
        thread::Builder::new()
            .name("events".into())
            .spawn(move || events::run(&worker, &closing))?;
        let mut is_short = false;
        loop {
            let connection = match accept_with(&listener.0, SocketFlags::CLOEXEC) {
                Ok(connection) => connection,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                    if !std::mem::replace(&mut is_short, true) {
                        note!("gantry-nvidia: programs wait to be connected: {error}");
                    }
                    thread::sleep(PAUSE);
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            is_short = false;
            if self.programs.fetch_add(1, Ordering::Relaxed) >= MOST_PROGRAMS {
                self.programs.fetch_sub(1, Ordering::Relaxed);
                note!(
                    "gantry-nvidia: {MOST_PROGRAMS} programs are connected: another one is refused"
                );
                continue;
            }
            let worker = self.clone();
            let run = move || {
                if let Err(error) = Session::serve(&worker, &connection) {
                    note!("gantry-nvidia: a program's connection ends: {error}");
                }
                let _ = shutdown(&connection, Shutdown::Both);
                // A file in an answer that nobody reads counts for all programs until the program closes its end.
                while has_unread(&connection) {
                    thread::sleep(PAUSE);
                }
                worker.programs.fetch_sub(1, Ordering::Relaxed);
            };
            if let Err(error) = thread::Builder::new().name("program".into()).spawn(run) {
                self.programs.fetch_sub(1, Ordering::Relaxed);
                note!("gantry-nvidia: no thread for another program: {error}");
            }
        }
    }

    /// A program's slice. A client that several programs use keeps the slices of those that have ended: there are no more
    /// of them than programs at a time.
    pub(crate) fn make_slice(&self) -> io::Result<Arc<Slice>> {
        let mut slices = self.slices.lock_unpoisoned();
        slices.retain(|slice| slice.strong_count() > 0);
        if slices.len() >= MOST_PROGRAMS {
            return Err(io::Error::other(
                "memory of too many programs that have ended is in use",
            ));
        }
        let slice = Arc::new(Slice::new(self.slice_length)?);
        slices.push(Arc::downgrade(&slice));
        Ok(slice)
    }

    /// A number for a mapping that programs take for an address: a multiple of the page size, never 0.
    pub(crate) fn mapping_number(&self) -> u64 {
        self.next_mapping.fetch_add(1, Ordering::Relaxed) << 12
    }

    /// A file's last copy is closed: the driver frees what lives on it, then its pages are free.
    pub(crate) fn close(&self, number: u32) {
        // Nothing else is noted of it, or shown to a guest, until the clients are gone.
        let _ordered = self.order.lock_unpoisoned();
        let places = self.objects.lock_unpoisoned().take_places_of_file(number);
        drop(places);
        let Some(file) = self.files.lock_unpoisoned().remove(number) else {
            return;
        };
        let mut pages = self.objects.lock_unpoisoned().remove_file(number);
        let mut left = file.left();
        left.is_closed = true;
        pages.extend(left.ranges.drain(..).map(|range| range.pages));
        drop(left);
        if let Some(record) = &self.record {
            record.close(number);
        }
        // A call may have the file for a while, which must not be reported again and again.
        self.events.forget(&file);
        // Closes the device file, unless a call is under way on it.
        drop(file);
        pages.into_iter().for_each(Pages::release);
    }
}

/// The socket that programs connect to.
pub struct Listener(OwnedFd);

impl Listener {
    /// Listens at a path for programs of this user; makes its folder if there is none. A socket that nobody listens on any
    /// longer is replaced.
    ///
    /// # Errors
    /// Another one listens there, or the path cannot be used.
    pub fn bind(path: &Path) -> io::Result<Self> {
        Ok(Self(socket::listen_for_packets(path)?.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stand_in::StandIn;

    #[test]
    fn a_closed_file_that_a_call_still_has_is_not_waited_for() {
        let worker =
            Worker::new(Box::new(StandIn::default()), 1 << 20, None, None).expect("it is known");
        let device = worker.device.open(Node::Control).expect("it opens");
        let added = worker.files.lock_unpoisoned().add(Node::Control, device);
        let (file, program) = added.expect("there are descriptors");
        worker.events.watch_end(&file).expect("it is watched");
        worker.events.watch_device(&file).expect("it is watched");
        drop(program);
        assert_eq!(worker.events.ready().expect("it waits"), 1);
        worker.close(file.number);
        assert_eq!(worker.events.ready().expect("it waits"), 0);
    }

    #[test]
    fn a_file_that_is_no_socket_is_not_removed() {
        let folder = tempfile::tempdir().expect("there is room");
        let path = folder.path().join("nvidia.sock");
        std::fs::write(&path, "text").expect("there is room");
        let below = folder.path().join("run/nvidia.sock");
        Listener::bind(&below).expect("its folder is made");
        assert!(Listener::bind(&path).is_err());
        assert_eq!(std::fs::read(&path).expect("it is there"), b"text");
        std::fs::remove_file(&path).expect("it is there");
        drop(Listener::bind(&path).expect("nothing is there"));
        Listener::bind(&path).expect("nobody listens any longer");
    }
}
