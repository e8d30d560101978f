//! The worker: what all programs share, and their connections.

use std::{
    io,
    os::fd::OwnedFd,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};

use base::{Unpoisoned, note};
use nvidia_abi::Branch;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};

use crate::{
    device::Device,
    events::{self, Events},
    files::Files,
    objects::{Objects, Pages},
    record::Record,
    session::Session,
};

/// The most programs at a time.
const MOST_PROGRAMS: usize = 256;

/// The worker could not be started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The driver's version cannot be read.
    #[error("cannot read the driver's version")]
    Version(#[source] io::Error),
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
    pub(crate) version: String,
    pub(crate) branch: Branch,
    pub(crate) slice_length: u64,
    pub(crate) files: Mutex<Files>,
    pub(crate) objects: Mutex<Objects>,
    pub(crate) events: Events,
    pub(crate) record: Option<Record>,
    next_mapping: AtomicU64,
    programs: AtomicUsize,
}

impl Worker {
    /// A worker for these device files. Each program gets a slice of `slice_length` bytes.
    ///
    /// # Errors
    /// The driver is of no known branch, or the system refuses.
    pub fn new(
        device: Box<dyn Device>,
        slice_length: u64,
        record: Option<Record>,
    ) -> Result<Arc<Self>, Error> {
        let version = device.version().map_err(Error::Version)?;
        let branch = Branch::of_version(&version).ok_or_else(|| Error::Branch(version.clone()))?;
        Ok(Arc::new(Self {
            device,
            version,
            branch,
            slice_length,
            files: Mutex::new(Files::new()?),
            objects: Mutex::default(),
            events: Events::new()?,
            record,
            next_mapping: AtomicU64::new(1),
            programs: AtomicUsize::new(0),
        }))
    }

    /// The branch of its driver.
    #[must_use]
    pub fn branch(&self) -> Branch {
        self.branch
    }

    /// Serves programs that connect, until accepting fails.
    ///
    /// # Errors
    /// The system refuses a thread or a connection.
    pub fn serve(self: &Arc<Self>, listener: &Listener) -> io::Result<()> {
        let worker = self.clone();
        thread::Builder::new()
            .name("events".into())
            .spawn(move || events::run(&worker))?;
        loop {
            let connection = match accept_with(&listener.0, SocketFlags::CLOEXEC) {
                Ok(connection) => connection,
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => continue,
                Err(error) => return Err(error.into()),
            };
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
                worker.programs.fetch_sub(1, Ordering::Relaxed);
            };
            if let Err(error) = thread::Builder::new().name("program".into()).spawn(run) {
                self.programs.fetch_sub(1, Ordering::Relaxed);
                note!("gantry-nvidia: no thread for another program: {error}");
            }
        }
    }

    /// A number for a mapping that programs take for an address: a multiple of the page size, never 0.
    pub(crate) fn mapping_number(&self) -> u64 {
        self.next_mapping.fetch_add(1, Ordering::Relaxed) << 12
    }

    /// A file's last copy is closed: the driver frees what lives on it, then its pages are free.
    pub(crate) fn close(&self, number: u32) {
        let Some(file) = self.files.lock_unpoisoned().remove(number) else {
            return;
        };
        let mut pages = self.objects.lock_unpoisoned().remove_file(number);
        pages.extend(file.left().pools.drain(..).map(|pool| pool.pages));
        if let Some(record) = &self.record {
            record.close(number);
        }
        // Closes the device file, unless a call is under way on it.
        drop(file);
        pages.into_iter().for_each(Pages::release);
    }
}

/// The socket that programs connect to.
pub struct Listener(OwnedFd);

impl Listener {
    /// Listens at a path. A socket that nobody listens on any longer is replaced.
    ///
    /// # Errors
    /// Another one listens there, or the path cannot be used.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        let socket = || {
            socket_with(
                AddressFamily::UNIX,
                SocketType::SEQPACKET,
                SocketFlags::CLOEXEC,
                None,
            )
        };
        if rustix::net::connect(socket()?, &address) == Err(rustix::io::Errno::CONNREFUSED) {
            std::fs::remove_file(path)?;
        }
        let listener = socket()?;
        bind(&listener, &address)?;
        listen(&listener, 64)?;
        Ok(Self(listener))
    }
}
