//! Doors that were recently in use.
//!
//! A VM that moves over many connections establishes them one after the other, and its VMM requests
//! each of them separately. In between the address stays bound: a peer that connects then waits for
//! a moment instead of being refused, and peers that have not shown a certificate yet count for the
//! next connection, too.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use base::Unpoisoned;

use crate::door::{Door, Error};

/// How long a door stays open for the next request.
pub const OPEN: Duration = Duration::from_secs(2);

/// Open doors at which nobody waits.
#[derive(Clone, Default)]
pub struct Doors(Arc<Mutex<Left>>);

#[derive(Default)]
struct Left {
    doors: Vec<(PathBuf, Door, Instant)>,
    /// Whether a thread is running that closes them.
    is_seen_to: bool,
}

impl Doors {
    /// Returns a door at an address, for peers that the directory's certificates trust. Reuses an
    /// open one if possible.
    pub fn open(&self, at: &str, tls_dir: &Path) -> Result<Door, Error> {
        let mut left = self.0.lock_unpoisoned();
        let found = left
            .doors
            .iter()
            .position(|(_, door, _)| door.address() == at);
        if let Some(found) = found {
            let (directory, door, _) = left.doors.swap_remove(found);
            if directory == tls_dir {
                return Ok(door);
            }
            // Dropping it closes it, and frees its address.
        }
        drop(left);
        Door::open(at, tls_dir)
    }

    /// Gives back a door at which nobody waits any more. It stays open for [`OPEN`].
    pub fn leave(&self, door: Door, tls_dir: &Path) -> io::Result<()> {
        let mut left = self.0.lock_unpoisoned();
        if !left.is_seen_to {
            let doors = self.clone();
            let closing = thread::Builder::new().name("doors".into());
            closing.spawn(move || doors.close())?;
            left.is_seen_to = true;
        }
        let until = Instant::now() + OPEN;
        left.doors.push((tls_dir.to_owned(), door, until));
        Ok(())
    }

    /// Closes each door when its time is up, until there are none.
    fn close(&self) {
        loop {
            let now = Instant::now();
            let mut left = self.0.lock_unpoisoned();
            left.doors.retain(|(_, _, until)| *until > now);
            let Some(next) = left.doors.iter().map(|(_, _, until)| *until).min() else {
                left.is_seen_to = false;
                return;
            };
            drop(left);
            thread::sleep(next.saturating_duration_since(now));
        }
    }
}
