//! What a pool asks of its workers to move an application from one to another, and how.
//!
//! The worker that serves the application is the source; a worker that was started for it, and takes
//! no applications by itself, the destination:
//!
//! | pool to | command | with | answer |
//! |---|---|---|---|
//! | source | `Describe` | | what it serves, and its files |
//! | destination | `Adopt` | the connection | at once |
//! | destination | `Files` | the files | once its driver is open |
//! | source | `Quiesce` | | once nothing is under way |
//! | source | `Save` | an empty file | once the state is in it |
//! | destination | `Restore` | the file | once all is made again |
//! | source | (it is killed) | | |
//! | destination | `Go` | | once it serves |
//!
//! If anything fails before the source is killed, it is told to `Resume`, and the destination is
//! killed. The application sees nothing but a pause: its window is the same file, and the pool keeps
//! its connection open.

use std::{
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use crate::link::control::{self, AFTER_DRAIN, LONG, SOON};
pub use crate::link::control::{Command, NotMoved, Peer, Reply, Served, receive, refused, send};

/// Moves the application of one worker to another, up to the point where the source is to be killed.
/// `connection` is the application's.
///
/// # Errors
/// The application stays where it is, if its worker lives.
pub fn carry_over(
    source: &Peer<'_>,
    destination: &Peer<'_>,
    connection: BorrowedFd<'_>,
    drain: Duration,
) -> Result<(), NotMoved> {
    let (described, files) = source.ask(&Command::Describe(), &[], SOON)?;
    let Reply::Serves(served) = described else {
        return Err(NotMoved::Refused("the worker serves nobody".to_owned()));
    };
    if files.len() != served.files as usize {
        return Err(NotMoved::Refused(
            "a worker has sent too few files".to_owned(),
        ));
    }
    destination.ask(&Command::Adopt(served), &[connection], SOON)?;
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    destination.ask(&Command::Files(), &files, SOON)?;
    let drained = drain + AFTER_DRAIN;
    let patience = drain.as_millis() as u64;
    source.ask(&Command::Quiesce(patience), &[], drained)?;
    let outcome = (|| {
        let image = control::image().map_err(NotMoved::File)?;
        source.ask(&Command::Save(), &[image.as_fd()], LONG)?;
        destination.ask(&Command::Restore(true), &[image.as_fd()], LONG)?;
        Ok(())
    })();
    if outcome.is_err() {
        let _ = source.ask(&Command::Resume(), &[], SOON);
    }
    outcome
}
