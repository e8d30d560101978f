//! Doors that were open a moment ago.
//!
//! A VM that comes by many connections comes by one after the other, and its VMM asks for each of them anew. Meanwhile
//! the address stays bound: whoever connects in between waits for a moment instead of being refused, and who has not
//! shown a certificate yet counts for the next connection, too.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use base::Unpoisoned;

use crate::door::{Door, Error};

/// How long a door stays open for who asks next.
pub const OPEN: Duration = Duration::from_secs(2);

/// Doors at which nobody waits.
#[derive(Clone, Default)]
pub struct Doors(Arc<Mutex<Left>>);

#[derive(Default)]
struct Left {
    doors: Vec<(PathBuf, Door, Instant)>,
    /// A thread closes them.
    is_seen_to: bool,
}

impl Doors {
    /// One at an address, for those whom a directory's certificates trust.
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
            // It is closed, and its address is free.
        }
        drop(left);
        Door::open(at, tls_dir)
    }

    /// Nobody waits at a door, which stays open for a moment.
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

    /// Closes each when its time has come, until there are none.
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
