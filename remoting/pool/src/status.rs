//! The status of a pool: one JSON document for each client that connects to its metrics socket.
//!
//! The pool's own thread keeps the figures; another one answers readers, so that no reader delays the pool.

use std::{
    io,
    path::Path,
    sync::{Arc, Mutex},
    time::Instant,
};

use base::{Unpoisoned, metrics_socket};
use serde::{Deserialize, Serialize};

/// The state of a pool at one point in time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Nanoseconds since the start of the pool.
    pub uptime: u64,
    /// Workers that wait for applications.
    pub waiting: u64,
    /// Workers that serve applications; those of virtual machines included.
    pub serving: u64,
    /// Workers that serve applications of virtual machines.
    pub machines: u64,
    /// Maximum number of applications served at a time.
    pub most: u64,
    /// Bytes of the windows that workers share with the applications they serve.
    pub windows: u64,
    /// Workers that have been started.
    pub started: u64,
    /// Applications that have been given a worker.
    pub served: u64,
    /// Workers that ended before they served anybody.
    pub failed: u64,
    /// Workers that ended before the application that they served.
    pub lost: u64,
    /// Applications that were refused because their user had too many workers.
    pub refused: u64,
}

/// The figures of a pool, for its own thread and the one that tells readers.
#[derive(Clone, Debug)]
pub(super) struct Figures {
    started: Instant,
    status: Arc<Mutex<Status>>,
}

impl Default for Figures {
    fn default() -> Self {
        Self {
            started: Instant::now(),
            status: Arc::default(),
        }
    }
}

impl Figures {
    /// Changes figures.
    pub fn update(&self, change: impl FnOnce(&mut Status)) {
        change(&mut self.status.lock_unpoisoned());
    }

    /// The figures as of now.
    fn now(&self) -> Status {
        let uptime = u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let status = self.status.lock_unpoisoned().clone();
        Status { uptime, ..status }
    }

    /// Tells clients of a socket at this path, to which the group of its file may connect, too.
    ///
    /// # Errors
    /// It cannot listen there, or cannot start a thread.
    pub fn serve_at(&self, path: &Path) -> io::Result<()> {
        let figures = self.clone();
        metrics_socket::serve(path, move || Ok(serde_json::to_vec(&figures.now())?))
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Read, os::unix::net::UnixStream};

    use super::*;

    #[test]
    fn a_reader_gets_the_figures_as_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.pool");
        let figures = Figures::default();
        figures.update(|status| status.started = 3);
        figures.serve_at(&path).unwrap();
        let mut text = Vec::new();
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.read_to_end(&mut text).unwrap();
        let status: Status = serde_json::from_slice(&text).unwrap();
        assert!(status.started == 3 && status.uptime > 0, "{status:?}");
    }
}
