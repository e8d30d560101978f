//! How a pool moves an application from one of its workers to another by commands.
//!
//! The worker that serves the application is the source. The destination is a worker that was started for the move and
//! accepts no applications itself:
//!
//! | pool to | command | with | answer |
//! |---|---|---|---|
//! | source | `Describe` | | what its application has been told of its devices |
//! | destination | `Adopt` | the connection | at once |
//! | destination | `Files` | the files | once its driver is open |
//! | source | `Precopy` | an empty file | once what is new is in it; it serves meanwhile |
//! | destination | `Prepare` | the file | once that is made |
//! | source | `Quiesce` | | once nothing is under way; or that much was made since the last round |
//! | source | `SaveRest` | an empty file | once the rest of the state is in it |
//! | destination | `Restore` | the file | once all is made again |
//! | source | `Leave` | | at once; it is killed then |
//! | destination | `Go` | | once it serves |
//!
//! `Precopy` and `Prepare` come in [rounds](remoting_transport::rounds), also after a `Quiesce` that finds much new memory:
//! the application is stopped only from the last `Quiesce` to `Go`.
//!
//! With postcopy, `SaveRest` leaves out large contents, and the source is not killed before these have been
//! transferred. A socket comes with `Go`, on which the destination asks for one after the other, and the pool has the
//! source `Fetch` each.
//!
//! If anything fails before the source is killed, the source is told to `Resume` and the destination is killed. The
//! application only sees a pause: its window is the same file, and the pool keeps its connection open.

use std::{
    io::ErrorKind,
    mem,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use base::{Cancel, Patience};
use remoting_proto::wire::Blob;
use remoting_transport::{
    closer::Closer,
    control::{self, LONG, SOON},
    rounds,
};

pub use remoting_transport::control::{
    Command, NotMoved, Peer, Reply, Served, receive, refused, send,
};

/// What a worker serves, as it has told its pool before anything of its application's ran. A worker that serves is not
/// asked for it: native code may run in it, and whoever names the attachment names the owner of the compiled programs,
/// the client of the arbiter, its weight and its quota.
#[derive(Debug)]
pub(super) struct Place {
    /// A virtual machine's attachment, as bytes; empty for an application of this machine.
    pub attachment: Vec<u8>,
    /// Size of the window in bytes.
    pub window: u64,
    /// The window, and what a machine sends with it: shared memory and event counters.
    pub files: Vec<OwnedFd>,
    /// Closes the files.
    pub closer: Closer,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.closer.close(mem::take(&mut self.files));
    }
}

impl Place {
    /// Whether the application is in a virtual machine.
    pub fn is_machines(&self) -> bool {
        !self.attachment.is_empty()
    }

    fn served(&self, told: Blob) -> Served {
        Served {
            attachment: Blob(self.attachment.clone()),
            window: self.window,
            files: self.files.len() as u32,
            told,
        }
    }
}

/// Moves the application of one worker to another, up to the point where the source is to be killed. `connection` is
/// the application's, and `place` what the pool knows of it. With `postcopy`, the source must first be asked for the remaining contents. Cancelling makes the
/// application stay, as long as the source has not been told to leave.
///
/// # Errors
/// The application stays where it is, if its worker lives. A worker that is busy must be asked for nothing more until
/// [`answers_of`] has returned.
pub(super) fn carry_over(
    source: &Peer<'_>,
    destination: &Peer<'_>,
    (connection, place): (BorrowedFd<'_>, Option<&Place>),
    (drain, postcopy): (Duration, bool),
    cancel: &Cancel,
) -> Result<(), NotMoved> {
    // A limit for the whole move, whichever side is slow.
    let patience = Patience::new(drain.saturating_add(LONG), cancel.clone());
    // Not cancellable: a late answer would be taken for that to another command.
    let described = source.ask(&Command::Describe(), &[], &Patience::within(SOON));
    let ((Reply::Serves(told), _), Some(place)) = (described?, place) else {
        return Err(NotMoved::Refused("the worker serves nobody".to_owned()));
    };
    if postcopy && place.is_machines() {
        // The VMM talks to one worker at a time.
        return Err(NotMoved::Refused(
            "it is a virtual machine's: its gantry moves it so (gantry ctl move-accel ID --postcopy), or move it \
             without --postcopy"
                .to_owned(),
        ));
    }
    let soon = patience.at_most(SOON);
    let served = place.served(told);
    destination.ask(&Command::Adopt(served), &[connection], &soon)?;
    let files: Vec<_> = place.files.iter().map(AsFd::as_fd).collect();
    destination.ask(&Command::Files(), &files, &soon)?;
    // Number of the source's answers that have not come.
    let mut due = 0;
    let mut ask = |command: &Command, files: &[BorrowedFd<'_>], patience: &Patience| {
        due = 1;
        let answer = source.ask(command, files, patience);
        if matches!(answer, Ok(_) | Err(NotMoved::Refused(_))) {
            due = 0;
        }
        answer
    };
    let outcome = (|| {
        let rounds = rounds::stop(&mut ask, destination, (drain, postcopy), &patience)?;
        let image = control::image().map_err(NotMoved::File)?;
        ask(
            &Command::SaveRest(rounds, postcopy),
            &[image.as_fd()],
            &patience,
        )?;
        destination.make(&Command::Restore(true), image.as_fd(), &patience)?;
        if patience.is_cancelled() {
            return Err(NotMoved::Cancelled);
        }
        // From here on, cancelling no longer stops the move half-way.
        match ask(&Command::Leave(), &[], &Patience::within(SOON)) {
            // A worker that has ended has left.
            Err(NotMoved::Gone { source, .. }) if source.kind() != ErrorKind::TimedOut => Ok(()),
            answer => answer.map(drop),
        }
    })();
    outcome.map_err(|why| stays(source, due, why, &Patience::within(SOON)))
}

/// Makes a worker resume that was asked to stop, and waits until it has confirmed, but not for ever.
fn stays(source: &Peer<'_>, due: u32, why: NotMoved, patience: &Patience) -> NotMoved {
    if source.send(&Command::Resume(), &[]).is_err() {
        return why;
    }
    let mut due = due + 1;
    match source.drain(&mut due, patience) {
        Ok(()) => why,
        Err(_) => NotMoved::Busy {
            due,
            why: Box::new(why),
        },
    }
}

/// Waits until this many answers have come, however long a driver takes: they would be taken for answers to later
/// commands. Also returns when the worker has ended.
pub fn answers_of(source: &Peer<'_>, due: u32) {
    for _ in 0..due {
        if !matches!(receive::<Reply>(source.channel), Ok(Some(_))) {
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io, mem::discriminant, os::unix::net::UnixStream, thread};

    use super::*;

    /// What a worker does at a command.
    #[derive(Clone)]
    enum Then {
        Refuses,
        Ends,
        /// What it is asked for, when whoever has asked for the move has gone.
        Goes(Cancel),
    }

    /// A worker that does what it is asked for, but for one command.
    fn worker(
        channel: UnixStream,
        at: Option<Command>,
        then: Then,
    ) -> thread::JoinHandle<Vec<Command>> {
        thread::spawn(move || {
            let mut asked = Vec::new();
            while let Ok(Some((command, files))) = receive::<Command>(&channel) {
                let same = |other: &Command| discriminant(other) == discriminant(&command);
                let then = at.as_ref().is_some_and(same).then_some(&then);
                let is_description = command == Command::Describe();
                asked.push(command);
                drop(files);
                if let Some(Then::Goes(cancel)) = then {
                    cancel.cancel();
                }
                let _ = match (then, is_description) {
                    (Some(Then::Ends), _) => break,
                    (Some(Then::Refuses), _) => {
                        send(&channel, &refused(&io::Error::other("no")), &[])
                    }
                    (_, true) => send(&channel, &Reply::Serves(Blob(b"told".to_vec())), &[]),
                    _ => send(&channel, &Reply::Done(), &[]),
                };
            }
            asked
        })
    }

    /// Whether it moves from the one to the other, and what both were asked for.
    fn moved(
        at_source: Option<Command>,
        at_destination: Option<Command>,
        then: &Then,
    ) -> (bool, Vec<Command>, Vec<Command>) {
        let cancel = match then {
            Then::Goes(cancel) => cancel.clone(),
            _ => Cancel::default(),
        };
        let ((to_source, source), (to_destination, destination)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let workers = [
            worker(source, at_source, then.clone()),
            worker(destination, at_destination, then.clone()),
        ];
        let peer = |channel| Peer {
            channel,
            who: "the worker",
        };
        let (connection, _client) = UnixStream::pair().unwrap();
        let place = Place {
            attachment: b"whose it is".to_vec(),
            window: 7,
            files: Vec::new(),
            closer: Closer::default(),
        };
        let moves = carry_over(
            &peer(&to_source),
            &peer(&to_destination),
            (connection.as_fd(), Some(&place)),
            (Duration::from_millis(10), false),
            &cancel,
        );
        drop((to_source, to_destination));
        let [source, destination] = workers.map(|worker| worker.join().unwrap());
        (moves.is_ok(), source, destination)
    }

    #[test]
    fn an_application_stays_if_either_worker_refuses_or_ends_at_any_step() {
        let (moves, source, _) = moved(None, None, &Then::Ends);
        assert!(moves && source.last() == Some(&Command::Leave()));
        for (then, name) in [(Then::Refuses, "refuses"), (Then::Ends, "ends")] {
            for step in [
                Command::Files(),
                Command::Prepare(true),
                Command::Restore(true),
            ] {
                let name = format!("{step:?} {name}");
                let is_files = step == Command::Files();
                let (moves, source, _) = moved(None, Some(step), &then);
                assert!(!moves, "{name}");
                // One that was asked to stop, or to keep what it has copied, is to go on.
                assert!(
                    is_files || source.last() == Some(&Command::Resume()),
                    "{name}"
                );
            }
            for step in [Command::Quiesce(0, 0), Command::SaveRest(0, false)] {
                let name = format!("{step:?} {name}");
                let (moves, _, destination) = moved(Some(step), None, &then);
                assert!(
                    !moves && !destination.contains(&Command::Restore(true)),
                    "{name}"
                );
            }
        }
    }

    #[test]
    fn whose_an_application_is_the_pool_says_and_not_the_worker_that_serves_it() {
        let (moves, _, destination) = moved(None, None, &Then::Ends);
        let served = Served {
            attachment: Blob(b"whose it is".to_vec()),
            window: 7,
            files: 0,
            told: Blob(b"told".to_vec()),
        };
        assert!(moves && destination.first() == Some(&Command::Adopt(served)));
    }

    #[test]
    fn what_cannot_be_copied_while_it_serves_is_saved_while_it_stands_still() {
        let (moves, source, destination) =
            moved(Some(Command::Precopy(0, 0)), None, &Then::Refuses);
        assert!(
            moves && source.contains(&Command::SaveRest(0, false)),
            "{source:?}"
        );
        assert!(!destination.contains(&Command::Prepare(true)));
    }

    #[test]
    fn an_application_stays_if_who_has_asked_goes_before_its_worker_is_to_leave_and_not_after() {
        let goes = || Then::Goes(Cancel::default());
        for step in [
            Command::Precopy(0, 0),
            Command::Quiesce(0, 0),
            Command::SaveRest(0, false),
        ] {
            let name = format!("{step:?}");
            let (moves, source, _) = moved(Some(step), None, &goes());
            assert!(
                !moves && source.last() == Some(&Command::Resume()),
                "{name}"
            );
        }
        for step in [Command::Prepare(true), Command::Restore(true)] {
            let name = format!("{step:?}");
            let (moves, source, _) = moved(None, Some(step), &goes());
            assert!(
                !moves && source.last() == Some(&Command::Resume()),
                "{name}"
            );
            assert!(!source.contains(&Command::Leave()), "{name}");
        }
        let (moves, source, _) = moved(Some(Command::Leave()), None, &goes());
        assert!(moves && source.last() == Some(&Command::Leave()));
    }

    #[test]
    fn a_source_that_ends_once_its_state_is_made_again_is_not_missed() {
        let (moves, ..) = moved(Some(Command::Leave()), None, &Then::Ends);
        assert!(moves);
    }

    #[test]
    fn a_worker_in_a_long_call_goes_on_after_it_and_is_asked_again_when_it_has_answered() {
        let (pool, worker) = UnixStream::pair().unwrap();
        let source = Peer {
            channel: &pool,
            who: "the worker",
        };
        source.send(&Command::Quiesce(0, 0), &[]).unwrap();
        let late = NotMoved::Gone {
            who: "the worker",
            source: io::ErrorKind::TimedOut.into(),
        };
        let NotMoved::Busy { due, .. } = stays(&source, 1, late, &Patience::within(Duration::ZERO))
        else {
            panic!("it has not answered");
        };
        assert_eq!(due, 2);
        for asked in [Command::Quiesce(0, 0), Command::Resume()] {
            assert_eq!(receive::<Command>(&worker).unwrap().unwrap().0, asked);
            send(&worker, &Reply::Done(), &[]).unwrap();
        }
        answers_of(&source, due);
        send(&worker, &refused(&io::Error::other("mine")), &[]).unwrap();
        let next = source.ask(&Command::Save(), &[], &Patience::within(SOON));
        assert_eq!(next.unwrap_err().to_string(), "mine");
        // One that has ended keeps nobody waiting.
        drop(worker);
        answers_of(&source, 1);
    }
}
