//! Workers that take over applications before their VM has arrived: each receives the rounds of an
//! application that still runs elsewhere, and the rest when the VM has arrived.
//!
//! Everything from the other host is untrusted: there are at most as many workers as slices, and
//! workers treat what they receive like input from any application.

use std::{collections::BTreeSet, fs::File, io, os::fd::AsFd};

use base::{Chain, Patience};
use remoting_transport::control::{self, Command, Failure, Peer, SOON, Worker};

use super::{
    attach::Pool,
    handle::{Handle, Standby},
    saved_slice::SavedSlice,
};

/// Why a worker could not receive a round.
#[derive(Debug, thiserror::Error)]
enum Unprepared {
    #[error(transparent)]
    Worker(#[from] Failure),
    #[error("cannot take over what came of it")]
    Came(#[from] io::Error),
    #[error("its slice cannot be made anew")]
    Slice(#[from] super::Error),
    #[error("a round of it came that does not follow the one before")]
    Order,
}

impl Handle {
    /// Lets workers of the port's pool receive a round of applications, concurrently.
    ///
    /// # Errors
    /// All reasons why some cannot. Their workers end.
    pub fn prepare(
        &self,
        copied: &[SavedSlice],
        archive: &File,
        patience: &Patience,
    ) -> Result<(), String> {
        if copied.len() > self.slices.count() as usize {
            return Err("a round has more applications than the accelerator has slices".to_owned());
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = copied.iter().find(|one| !seen.insert(one.slice)) {
            return Err(format!("a round has slice {} twice", twice.slice));
        }
        let pool = self.attach.pool();
        let mut reasons = Vec::new();
        let mut keep = |slice: u32, step: Result<Standby, Unprepared>| match step {
            Ok(standby) => Some((slice, standby)),
            Err(why) => {
                reasons.push(format!("slice {slice}: {}", Chain(&why)));
                None
            }
        };
        let mut found = Vec::new();
        for one in copied {
            let standby = keep(one.slice, self.standby(one, &pool, patience));
            found.extend(standby.map(|(_, standby)| (one, standby)));
        }
        let mut asked = Vec::new();
        for (one, standby) in found {
            let step = self.give(one, standby, archive, patience);
            asked.extend(keep(one.slice, step));
        }
        for (slice, standby) in asked {
            let new = Peer {
                channel: &standby.stream,
                who: Worker::Destination,
            };
            let made = new.made(patience).map_err(Unprepared::from);
            if let Some((slice, standby)) = keep(slice, made.map(|()| standby)) {
                self.coming().standby.insert(slice as usize, standby);
            }
        }
        match reasons.is_empty() {
            true => Ok(()),
            false => {
                let (reasons, pool) = (reasons.join("; "), pool.socket.display());
                Err(format!("{reasons} (the pool is at {pool})"))
            }
        }
    }

    /// The worker of a slice; for a first round, a new one that is not ready yet.
    fn standby(
        &self,
        one: &SavedSlice,
        pool: &Pool,
        patience: &Patience,
    ) -> Result<Standby, Unprepared> {
        let slice = one.slice as usize;
        let known = self.coming().standby.remove(&slice);
        if one.rounds > 1 {
            return known.ok_or(Unprepared::Order);
        }
        if let Some(before) = known {
            self.end(slice, &before.stream, patience)?;
        }
        // Memory that an earlier worker has received must not be used for anything else.
        self.attach.window.renew(slice)?;
        self.slices.set_claim(slice, one.claim);
        let stream = self.connect(slice, pool, patience)?;
        Ok(Standby { stream, rounds: 0 })
    }

    /// Passes a round to a worker; does not wait for the reply.
    fn give(
        &self,
        one: &SavedSlice,
        mut standby: Standby,
        archive: &File,
        patience: &Patience,
    ) -> Result<Standby, Unprepared> {
        let new = Peer {
            channel: &standby.stream,
            who: Worker::Destination,
        };
        if standby.rounds == 0 {
            new.answer(&patience.at_most(SOON))?;
        }
        standby.rounds += 1;
        if standby.rounds != one.rounds {
            return Err(Unprepared::Order);
        }
        let window = self.window(one.slice as usize)?;
        if one.window.length != window.metadata()?.len() {
            let other = "it is of an accelerator with other slices";
            return Err(io::Error::new(io::ErrorKind::InvalidData, other).into());
        }
        one.window.read_changed(archive, &window, &one.kept)?;
        let image = control::image().map_err(Failure::File)?;
        let piece = one.image.ok_or(Unprepared::Order)?;
        piece.read(archive, &image)?;
        new.send(&Command::Prepare(false), &[image.as_fd()])?;
        Ok(standby)
    }
}
