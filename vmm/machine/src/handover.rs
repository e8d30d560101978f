//! Descriptors that are handed over with a machine to another process of the same host: the
//! listening sockets that clients find by a file, and the queues of taps. A second process could
//! open neither.
//!
//! ```text
//!   source                                      destination
//!   Belongings::of(machine) ──descriptors──────> Given, from which devices are made
//!   has left: files of sockets stay              runs: files of sockets are its own
//! ```

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Mutex, Weak},
};

use base::Unpoisoned;
use devices::named_socket::{NameError, NamedSocket, SharedSocket};

use super::{Machine, kinds::Handle};

/// The descriptors of a machine that are handed over beside its memory.
#[derive(Debug, Default)]
pub struct Belongings {
    /// Listening sockets.
    pub sockets: Vec<SharedSocket>,
    /// Queues of taps by the name of the network card, in queue order.
    pub taps: BTreeMap<String, Vec<Weak<File>>>,
}

/// The descriptors from which an arriving machine is built.
#[derive(Debug, Default)]
pub struct Given(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    sockets: BTreeMap<PathBuf, OwnedFd>,
    taps: BTreeMap<String, BTreeMap<usize, OwnedFd>>,
}

impl Given {
    /// Adds a socket that listens at a path.
    pub fn add_socket(&self, path: PathBuf, socket: OwnedFd) {
        self.0.lock_unpoisoned().sockets.insert(path, socket);
    }

    /// Adds a queue of a network card's tap.
    pub fn add_tap(&self, id: String, queue: usize, tap: OwnedFd) {
        let mut inner = self.0.lock_unpoisoned();
        inner.taps.entry(id).or_default().insert(queue, tap);
    }

    /// Takes the socket for a path, if one came. Another process made it, so it may be anything and
    /// is checked.
    pub fn socket(&self, path: &Path) -> Result<Option<NamedSocket>, NameError> {
        let descriptor = self.0.lock_unpoisoned().sockets.remove(path);
        let adopt = |descriptor| NamedSocket::adopt(path, descriptor);
        descriptor.map(adopt).transpose()
    }

    /// Closes the descriptors that nobody has taken.
    pub fn close(&self) {
        *self.0.lock_unpoisoned() = Inner::default();
    }

    /// Takes the queues of a network card's tap, in order; empty if none came.
    pub fn taps(&self, id: &str) -> Vec<OwnedFd> {
        let taps = self.0.lock_unpoisoned().taps.remove(id);
        taps.unwrap_or_default().into_values().collect()
    }
}

impl Given {
    /// Duplicates the queues of a network card's tap, which stay.
    ///
    /// # Errors
    /// There are too many descriptors.
    pub fn tap_duplicates(&self, id: &str) -> io::Result<Vec<OwnedFd>> {
        let inner = self.0.lock_unpoisoned();
        let queues = inner.taps.get(id).into_iter().flat_map(BTreeMap::values);
        queues.map(OwnedFd::try_clone).collect()
    }
}

impl Belongings {
    /// Duplicates the descriptors of those queues of a tap that are still in use.
    pub fn queues(taps: &[Weak<File>]) -> io::Result<Vec<OwnedFd>> {
        let files = taps.iter().filter_map(Weak::upgrade);
        files.map(|file| Ok(file.try_clone()?.into())).collect()
    }
}

impl Machine {
    /// The descriptors that another process needs to continue the machine.
    pub fn belongings(&self) -> Belongings {
        let mut belongings = Belongings {
            sockets: self.consoles.shared_sockets().to_vec(),
            ..Belongings::default()
        };
        for (id, plugged) in self.devices.iter() {
            match &plugged.handle {
                Handle::Vsock(socket) => belongings.sockets.push(socket.clone()),
                Handle::Net(taps) => {
                    belongings.taps.insert(id.clone(), taps.clone());
                }
                _ => {}
            }
        }
        belongings
    }

    /// Sets whether the sockets' files are deleted together with the machine; they must not be when
    /// another process has taken it over.
    pub fn set_owns_sockets(&self, own: bool) {
        for socket in self.belongings().sockets {
            socket.set_own(own);
        }
    }
}
