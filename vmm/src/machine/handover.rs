//! Descriptors that go with a machine to another process of the same host: the sockets that clients
//! find by a file, and the queues of taps, which no second process could open.
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

/// What a machine has beside its memory.
#[derive(Debug, Default)]
pub struct Belongings {
    /// Sockets that it listens on.
    pub sockets: Vec<SharedSocket>,
    /// Queues of taps, by the name of the card, in their order.
    pub taps: BTreeMap<String, Vec<Weak<File>>>,
}

/// What a machine that arrives is made of.
#[derive(Debug, Default)]
pub struct Given(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    sockets: BTreeMap<PathBuf, OwnedFd>,
    taps: BTreeMap<String, BTreeMap<usize, OwnedFd>>,
}

impl Given {
    /// A socket that listens at a path.
    pub fn add_socket(&self, path: PathBuf, socket: OwnedFd) {
        self.0.lock_unpoisoned().sockets.insert(path, socket);
    }

    /// A queue of the tap of a card.
    pub fn add_tap(&self, id: String, queue: usize, tap: OwnedFd) {
        let mut inner = self.0.lock_unpoisoned();
        inner.taps.entry(id).or_default().insert(queue, tap);
    }

    /// The socket of a path, if one came: it was made by another process, and may be anything.
    pub fn socket(&self, path: &Path) -> Result<Option<NamedSocket>, NameError> {
        let descriptor = self.0.lock_unpoisoned().sockets.remove(path);
        let adopt = |descriptor| NamedSocket::adopt(path, descriptor);
        descriptor.map(adopt).transpose()
    }

    /// Closes what nobody has taken.
    pub fn close(&self) {
        *self.0.lock_unpoisoned() = Inner::default();
    }

    /// The queues of a card's tap, in their order; empty if none came.
    pub fn taps(&self, id: &str) -> Vec<OwnedFd> {
        let taps = self.0.lock_unpoisoned().taps.remove(id);
        taps.unwrap_or_default().into_values().collect()
    }
}

impl Belongings {
    /// Descriptors of the queues of a card's tap that are still in use.
    pub fn queues(taps: &[Weak<File>]) -> io::Result<Vec<OwnedFd>> {
        let files = taps.iter().filter_map(Weak::upgrade);
        files.map(|file| Ok(file.try_clone()?.into())).collect()
    }
}

impl Machine {
    /// What another process needs to go on with it.
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

    /// Whether the files of its sockets go with the machine: not when another process has it.
    pub fn set_owns_sockets(&self, own: bool) {
        for socket in self.belongings().sockets {
            socket.set_own(own);
        }
    }
}
