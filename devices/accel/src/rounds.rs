//! Copies the applications of a migrating VM in rounds while they run, so that little is left to
//! save when they are stopped.
//!
//! ```text
//!   worker here           archive                         worker there
//!   Precopy(0)     ──>    image, contents of the slice    attachment, Prepare    it still serves here
//!   Precopy(1)     ──>    what is new of both             Prepare
//!   Examine               how much was created since: another round, if it is much
//!   Quiesce
//!   SaveRest(2)    ──>    what is new of both             Restore                it is stopped
//! ```
//!
//! A worker is borrowed only for a round, so that its end, and that of its application, is noticed
//! as usual. A worker that does not know the earlier rounds has replaced another one: its copy
//! starts again, and so does the worker at the destination.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io, mem,
    os::fd::AsFd,
    thread,
    time::{Duration, Instant},
};

use base::{Chain, Patience};
use remoting_proto::port::State;
use remoting_relocation::{archive::Archive, blocks::Sent};
use remoting_transport::control::{self, AFTER_DRAIN, Command, Failure, Reply, SOON};
use serde::{Deserialize, Serialize};

use super::{
    handle::{AGAIN, Error, Handle, named},
    lend::Borrowed,
    saved_slice::SavedSlice,
    suspended,
};

/// Timeout for one round of an application. Work that the device is executing delays the copy, too,
/// and the VM waits for it.
const ROUND: Duration = Duration::from_secs(30);

/// The part of a round for one port.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct CopiedPort {
    /// ID of the port.
    pub id: String,
    /// Its applications.
    pub slices: Vec<SavedSlice>,
}

/// What another host has received of the applications of these ports. The workers discard their
/// state of the rounds when this is dropped.
pub struct Copied {
    ports: Vec<(String, Handle)>,
    /// Keyed by port and slice.
    slices: BTreeMap<(String, usize), Known>,
    /// Applications that a round has skipped: their workers may still have to reply.
    left_out: BTreeSet<(String, usize)>,
    /// Timeout for one round of an application.
    pub(super) limit: Duration,
    /// Whether the final save omits large contents, which follow later (postcopy).
    postcopy: bool,
}

/// A worker that was asked for a round, what has been copied of its application, and the image that
/// it has written.
type Answered = (Borrowed, Known, Result<File, Failure>);

/// What another host has received of an application.
#[derive(Debug, Default)]
pub(super) struct Known {
    rounds: u32,
    window: Sent,
}

impl Known {
    /// Adds a slice to an archive: the worker's image of what is new of its application, and what
    /// is new of the slice's contents.
    pub(super) fn add(
        mut self,
        (port, slice): (&Handle, usize),
        image: &File,
        archive: &mut Archive,
        patience: &Patience,
    ) -> io::Result<(SavedSlice, Self)> {
        let image = archive.add(image, patience)?;
        let window = port.window(slice)?;
        let (window, kept) = match self.rounds {
            0 => (archive.add(&window, patience)?, Vec::new()),
            _ => self.window.add_changed(&window, archive, patience)?,
        };
        let saved = SavedSlice {
            kept,
            image: Some(image),
            rounds: self.rounds,
            ..port.described(slice, State::Open, window)
        };
        Ok((saved, self))
    }
}

impl Copied {
    /// Creates an instance for ports of which nothing has been copied.
    pub fn new(ports: Vec<(String, Handle)>) -> Self {
        Self {
            ports,
            slices: BTreeMap::new(),
            left_out: BTreeSet::new(),
            limit: ROUND,
            postcopy: false,
        }
    }

    /// Sets whether the final save omits large contents, which then follow later.
    #[must_use]
    pub fn with_postcopy(mut self, postcopy: bool) -> Self {
        self.postcopy = postcopy;
        self
    }

    /// Copies what is new of all applications to an archive. An application that cannot be copied
    /// now is skipped.
    ///
    /// # Errors
    /// The migration was cancelled.
    pub fn round(
        &mut self,
        archive: &mut Archive,
        patience: &Patience,
    ) -> Result<Vec<CopiedPort>, Error> {
        let mut all = Vec::new();
        for (id, port) in &self.ports {
            let mut slices = Vec::new();
            // All applications are copied concurrently.
            let borrowed = port.lend_all().into_iter();
            let borrowed = borrowed.map(|borrowed| {
                let known = self.slices.remove(&(id.clone(), borrowed.slice));
                (borrowed, known.unwrap_or_default())
            });
            for (borrowed, known, image) in ask(borrowed.collect(), self.limit, patience) {
                let slice = borrowed.slice;
                let added = image
                    .map_err(|why| Chain(&why).to_string())
                    .and_then(|image| {
                        let added = known.add((port, slice), &image, archive, patience);
                        added.map_err(|why| format!("its copy cannot be written: {}", Chain(&why)))
                    });
                match added {
                    Ok((saved, known)) => {
                        slices.push(saved);
                        self.slices.insert((id.clone(), slice), known);
                        borrowed.keep();
                    }
                    Err(_) if patience.is_cancelled() => return Err(Error::Cancelled),
                    Err(why) => {
                        log::warn!(
                            "{id}: the application of slice {slice} is not copied while it goes on, so that \
                             the VM may stand still for longer: {why}"
                        );
                        self.left_out.insert((id.clone(), slice));
                        // A worker that was too slow still executes the command.
                        borrowed.forget();
                    }
                }
            }
            if !slices.is_empty() {
                let id = id.clone();
                all.push(CopiedPort { id, slices });
            }
        }
        Ok(all)
    }

    /// Waits until the workers that rounds have skipped have returned to their ports, so that they
    /// can be stopped.
    ///
    /// # Errors
    /// One has not replied in time, or the migration was cancelled.
    pub fn wait_for_workers(&self, patience: &Patience) -> Result<(), Error> {
        let patience = patience.at_most(self.limit.saturating_add(AFTER_DRAIN));
        for (id, port) in &self.ports {
            let of_port = self.left_out.iter().filter(|(of, _)| of == id);
            for (_, slice) in of_port {
                while !port.has_worker(*slice) {
                    if let Err(why) = patience.check() {
                        return Err(match patience.is_cancelled() {
                            true => Error::Cancelled,
                            false => Error::Stays(vec![format!(
                                "{}: its worker still has to answer for a copy: {why}",
                                named(id, *slice as u32)
                            )]),
                        });
                    }
                    thread::sleep(AGAIN);
                }
            }
        }
        Ok(())
    }

    /// Total size in bytes of the memory objects that applications have created since the last
    /// round, or since their start if they are newer: all of it would be copied while they are
    /// stopped. Applications that rounds have skipped do not count, because another round would
    /// skip them again; nor do those that do not reply in time.
    pub fn made(&self, patience: &Patience) -> u64 {
        let is_asked = |id: &str, slice| !self.left_out.contains(&(id.to_owned(), slice));
        let answers = examine(&self.ports, is_asked, patience);
        let made = answers.iter().map(|(_, answer)| match answer {
            Ok(Reply::Made(bytes)) => *bytes,
            _ => 0,
        });
        made.fold(0, u64::saturating_add)
    }

    /// Lets a stopped worker save what is new since the rounds, or everything if it does not know
    /// them.
    pub(super) fn rest(
        &mut self,
        id: &str,
        borrowed: &mut Borrowed,
        patience: &Patience,
    ) -> Result<(File, Known), Failure> {
        if let Some(known) = self.slices.remove(&(id.to_owned(), borrowed.slice)) {
            let command = Command::SaveRest(known.rounds, self.postcopy);
            match borrowed.source()?.save_by(&command, patience) {
                Err(Failure::Refused(why)) => {
                    log::info!("{id}: slice {} is saved as a whole: {why}", borrowed.slice);
                }
                saved => return Ok((saved?.0, known)),
            }
        }
        let whole = match self.postcopy {
            true => Command::SaveRest(0, true),
            false => Command::Save(),
        };
        let (image, _) = borrowed.source()?.save_by(&whole, patience)?;
        Ok((image, Known::default()))
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        let slices = mem::take(&mut self.slices);
        for (id, port) in &self.ports {
            let of_port = slices.keys().filter(|(of, _)| of == id);
            for (_, slice) in of_port {
                let borrowed = port.desk.lend(Some(*slice as u32)).unwrap_or_default();
                borrowed.into_iter().for_each(Borrowed::forget);
            }
        }
    }
}

/// Why applications of these ports cannot be moved, as far as their workers know while they serve.
/// Workers that are missing or do not reply are found out later. Of native contexts, the guest's agent knows.
pub fn immovable(ports: &[(String, Handle)], patience: &Patience) -> Vec<String> {
    let native = suspended::obstacles(ports, patience).into_iter();
    let answers = examine(ports, |_, _| true, patience);
    let refused = answers.into_iter().filter_map(|(of, answer)| match answer {
        Err(Failure::Refused(why)) => Some(format!("{of}: {why}")),
        _ => None,
    });
    native.chain(refused).collect()
}

/// Asks the workers of applications concurrently what they know about a move while they serve.
/// Returns the application and the reply of each.
fn examine(
    ports: &[(String, Handle)],
    is_asked: impl Fn(&str, usize) -> bool,
    patience: &Patience,
) -> Vec<(String, Result<Reply, Failure>)> {
    let mut asked = Vec::new();
    for (id, port) in ports {
        for mut borrowed in port.lend_all() {
            if !is_asked(id, borrowed.slice) {
                borrowed.keep();
                continue;
            }
            let sent = borrowed.send(&Command::Examine(), &[]);
            asked.push((id, borrowed, sent));
        }
    }
    let patience = patience.at_most(SOON);
    let mut answers = Vec::new();
    for (id, mut borrowed, sent) in asked {
        let answer = sent.and_then(|()| borrowed.answer(&patience));
        let of = named(id, borrowed.slice as u32);
        if matches!(answer, Ok(_) | Err(Failure::Refused(_))) {
            borrowed.keep();
        }
        answers.push((of, answer.map(|(reply, _)| reply)));
    }
    answers
}

impl Handle {
    /// Whether a slice has no running application, or its worker has returned to the port.
    fn has_worker(&self, slice: usize) -> bool {
        if self.slices.get(slice) != State::Open {
            return true;
        }
        let Some(borrowed) = self.desk.lend(Some(slice as u32)) else {
            return false;
        };
        let is_there = !borrowed.is_empty();
        borrowed.into_iter().for_each(Borrowed::keep);
        is_there
    }
}

/// Asks a worker for a round; does not wait for the reply.
fn send(borrowed: &mut Borrowed, round: u32, limit: Duration) -> Result<File, Failure> {
    let image = control::image().map_err(Failure::File)?;
    let command = Command::Precopy(round, limit.as_millis() as u64);
    borrowed.send(&command, &[image.as_fd()])?;
    Ok(image)
}

/// Asks workers for a round concurrently, and waits for the images. Applications whose worker does
/// not know the earlier rounds start again, once.
fn ask(
    mut borrowed: Vec<(Borrowed, Known)>,
    limit: Duration,
    patience: &Patience,
) -> Vec<Answered> {
    let mut answered = Vec::new();
    while !borrowed.is_empty() {
        let began = Instant::now();
        let asked = borrowed.into_iter().map(|(mut borrowed, known)| {
            let image = send(&mut borrowed, known.rounds, limit);
            (borrowed, known, image)
        });
        let asked: Vec<Answered> = asked.collect();
        // The worker itself reports that it takes too long.
        let patience = patience.at_most(limit.saturating_add(AFTER_DRAIN));
        borrowed = Vec::new();
        for (mut one, mut known, image) in asked {
            match image.and_then(|image| one.answer(&patience).map(|_| image)) {
                // A worker that has taken too long is too busy for a second request.
                Err(Failure::Refused(_)) if known.rounds > 0 && began.elapsed() < limit => {
                    borrowed.push((one, Known::default()));
                }
                image => {
                    known.rounds += u32::from(image.is_ok());
                    answered.push((one, known, image));
                }
            }
        }
    }
    answered
}
