//! What a worker serves, and how another worker of its pool takes it over: `Adopt` brings the connection, and `Files`
//! the files. All further steps are those of [every move](remoting_transport::worker_control).
//!
//! The application only sees a pause: its window is the same file, and the pool keeps its connection open.

use std::{
    mem,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use base::{Cancel, Patience};
use remoting_proto::wire::Blob;
use remoting_relocation::{
    destination::Arrival,
    failure::{NotMoved, Worker},
    source::SourcePort,
    transfer::{self, Plan},
};
use remoting_transport::{
    closer::Closer,
    control::{Command, Failure, LONG, Reply, SOON, Served},
    worker_control::{Destination, Source},
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

/// A worker to be moved to, by its channel; with postcopy, it asks for contents by a socket.
pub(super) type Successor = (UnixStream, Option<UnixStream>);

/// Moves the application of one worker to another, up to the point where the source is to be killed. `connection` is
/// the application's, and `place` what the pool knows of it. With postcopy, the source must first be asked for the
/// remaining contents.
///
/// # Errors
/// The application stays where it is, if its worker lives, or is lost. A worker that is busy must be asked for nothing
/// more until it has given all answers.
pub(super) fn carry_over(
    source: &mut Source,
    destination: Successor,
    application: (BorrowedFd<'_>, Option<&Place>),
    plan: &Plan,
    cancel: &Cancel,
) -> Result<Arrival<Destination>, NotMoved> {
    // A limit for the whole move, whichever side is slow.
    let patience = Patience::new(plan.drain.saturating_add(LONG), cancel.clone());
    let moved = adopted(source, destination, application, plan)
        .map_err(NotMoved::from)
        .and_then(|destination| transfer::relocate(source, destination, plan, &patience));
    moved.map_err(|why| match why {
        NotMoved::Stays(why) => settled(source, why),
        NotMoved::Lost(_) => why,
    })
}

/// Has the worker serve to which an application has moved.
///
/// # Errors
/// The application is lost. `end` is called to end the worker: it would wait for ever, if it lives.
pub(super) fn go(arrival: Arrival<Destination>, end: impl FnOnce()) -> Result<(), NotMoved> {
    arrival.go().map(drop).map_err(|error| {
        end();
        NotMoved::Lost(error)
    })
}

/// Waits until a worker whose application stays serves it, if that does not take long.
fn settled(source: &mut Source, why: Failure) -> NotMoved {
    match source.settle(&Patience::within(SOON)) {
        Err(late) if late.is_late() => Failure::Busy(Box::new(why)).into(),
        Err(unheard) if !unheard.is_end_of(Worker::Serving) => {
            // It may stand still, and nobody can tell it to go on.
            let _ = source.end();
            NotMoved::Lost(unheard)
        }
        _ => why.into(),
    }
}

/// Tells a worker what it is to serve.
fn adopted(
    source: &mut Source,
    (channel, asks): Successor,
    (connection, place): (BorrowedFd<'_>, Option<&Place>),
    plan: &Plan,
) -> Result<Destination, Failure> {
    let described = source.ask(&Command::Describe(), &[], &Patience::within(SOON));
    let ((Reply::Serves(told), _), Some(place)) = (described?, place) else {
        return Err(Failure::Refused("the worker serves nobody".to_owned()));
    };
    if plan.postcopy && place.is_machines() {
        // The VMM talks to one worker at a time.
        return Err(Failure::Refused(
            "it is a virtual machine's: its gantry moves it so (gantry ctl move-accel ID --postcopy), or move it \
             without --postcopy"
                .to_owned(),
        ));
    }
    let destination = Destination::new(channel, 2, asks);
    let worker = destination.peer();
    worker.send(&Command::Adopt(place.served(told)), &[connection])?;
    let files: Vec<_> = place.files.iter().map(AsFd::as_fd).collect();
    worker.send(&Command::Files(), &files)?;
    Ok(destination)
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixStream, thread};

    use remoting_transport::control::{receive, send};

    use super::*;

    const PLAN: Plan = Plan {
        drain: std::time::Duration::ZERO,
        postcopy: false,
    };

    fn place(attachment: &[u8]) -> Place {
        Place {
            attachment: attachment.to_vec(),
            window: 7,
            files: Vec::new(),
            closer: Closer::default(),
        }
    }

    /// Answers all commands, until `last` was answered.
    fn answers(channel: &UnixStream, last: fn(&Command) -> bool) {
        while let Ok(Some((command, _))) = receive::<Command>(channel) {
            let reply = match command {
                Command::Describe() => Reply::Serves(Blob(Vec::new())),
                _ => Reply::Done(),
            };
            if send(channel, &reply, &[]).is_err() || last(&command) {
                return;
            }
        }
    }

    #[test]
    fn a_worker_that_cannot_be_told_to_serve_is_ended() {
        let [(to_source, source), (to_destination, destination)] =
            [(), ()].map(|()| UnixStream::pair().unwrap());
        thread::spawn(move || answers(&source, |command| *command == Command::Leave()));
        let restores = thread::spawn(move || {
            answers(&destination, |command| {
                matches!(command, Command::Restore(..))
            });
        });
        let place = place(b"");
        let (connection, _client) = UnixStream::pair().unwrap();
        let application = (connection.as_fd(), Some(&place));
        let mut source = Source::new(to_source);
        let successor = (to_destination, None);
        let cancel = Cancel::default();
        let arrival = carry_over(&mut source, successor, application, &PLAN, &cancel).unwrap();
        // Its other end is gone before it hears that it serves.
        restores.join().unwrap();
        let mut is_ended = false;
        let gone = go(arrival, || is_ended = true);
        assert!(matches!(gone, Err(NotMoved::Lost(_))), "{gone:?}");
        assert!(is_ended);
    }

    #[test]
    fn whose_an_application_is_the_pool_says_and_not_the_worker_that_serves_it() {
        let [(to_source, source), (to_destination, destination)] =
            [(), ()].map(|()| UnixStream::pair().unwrap());
        let serves = thread::spawn(move || {
            receive::<Command>(&source).unwrap();
            let described = Reply::Serves(Blob(b"told".to_vec()));
            send(&source, &described, &[]).unwrap();
        });
        let place = place(b"whose it is");
        let (connection, _client) = UnixStream::pair().unwrap();
        let application = (connection.as_fd(), Some(&place));
        let mut source = Source::new(to_source);
        let adopted = adopted(&mut source, (to_destination, None), application, &PLAN);
        serves.join().unwrap();
        let _adopted = adopted.unwrap();
        let served = Served {
            attachment: Blob(b"whose it is".to_vec()),
            window: 7,
            files: 0,
            told: Blob(b"told".to_vec()),
        };
        for command in [Command::Adopt(served), Command::Files()] {
            let (heard, _) = receive::<Command>(&destination).unwrap().unwrap();
            assert_eq!(heard, command);
        }
    }
}
