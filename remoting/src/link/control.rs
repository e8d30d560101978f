//! The messages by which a worker is asked to stop, save, restore and go on: by its pool, and by the
//! machine whose slice it serves.
//!
//! A message is its length in four bytes, the form's fingerprint in eight, and the message as the wire
//! codec writes it. Both sides check all of it: native code may run in a worker, and a worker does
//! not take a pool of another build for its own. Who asks for what in which order is up to who asks.

use std::{
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::Duration,
};

use base::{Patience, memfd, patience::Patient};

use super::socket;
use crate::wire::{
    Blob, Wire,
    codec::{named, wire, with},
};

/// The longest message, in bytes.
const LONGEST: usize = 64 << 10;
/// Bytes before a message.
const HEAD: usize = 12;

wire! {
    /// What a worker serves.
    struct Served {
        /// A virtual machine's attachment; empty for an application of this machine.
        attachment: Blob,
        /// Bytes of the window.
        window: u64,
        /// How many files there are.
        files: u32,
        /// What the application has been told of its devices, as its backend writes it; empty if that is nothing, or
        /// too much for a message: the state has it, too.
        told: Blob,
    }
}

wire! {
    /// Contents of memory that a worker asks for which goes on without them.
    struct Fetch {
        /// The object's number in the state.
        mem: u32,
        /// Bytes that it has.
        bytes: u64,
        /// Bytes of all that have yet to come, these included.
        left: u64,
    }
}

wire! { enum
    /// What a pool asks for.
    Command {
        /// What it serves.
        1 Describe(),
        /// Serve this, later.
        2 Adopt(served: Served),
        /// Stop; wait for what is under way, for so many milliseconds at most. One that has made more than `most`
        /// bytes of memory objects since its last round goes on instead, and says so.
        3 Quiesce(patience: u64, most: u64),
        /// Save the state to the file that comes along.
        4 Save(),
        /// Make the state again that is in the file that comes along. Whether the device memory that
        /// it has is in the machine's account already, by who has had it.
        5 Restore(charged: bool),
        /// Go on, or give up what rounds have left.
        6 Resume(),
        /// Serve what was restored. If contents of memory are still where it was, a socket comes along, on which
        /// [`Fetch`](Self::Fetch) is asked for until all have come.
        7 Go(),
        /// The files of what is to be served come along.
        8 Files(),
        /// Write what is new since the last round to the file that comes along, and serve meanwhile. The
        /// round's number, from 0; the first one begins anew. It is refused if that takes more than so
        /// many milliseconds.
        9 Precopy(round: u32, patience: u64),
        /// Make what is in the file that comes along: more is to come. Whether its device memory is
        /// charged already, as for the whole.
        10 Prepare(charged: bool),
        /// Save what is new since so many rounds, to the file that comes along. With `postcopy` contents of large
        /// memory objects may be left out: they are to be fetched after [`Leave`](Self::Leave).
        11 SaveRest(rounds: u32, postcopy: bool),
        /// Leave the window alone for good: another worker serves it from now on.
        12 Leave(),
        /// Say whether the state can be saved, as far as that is known while it is served, and how many bytes of memory
        /// objects were made since the last round, or ever if there was none.
        13 Examine(),
        /// Save the contents of a memory object that were left out, to the file that comes along.
        14 Fetch(what: Fetch),
    }
}

wire! { enum
    /// What a worker answers.
    Reply {
        /// It is done.
        1 Done(),
        /// It cannot be done; why.
        2 Refused(why: Blob),
        /// What it serves; files come along.
        3 Serves(served: Served),
        /// It has yet to be done, and has had processor time in the last second.
        4 Works(),
        /// It goes on: so many bytes of memory objects were made since the last round.
        5 Made(bytes: u64),
    }
}

/// Hash of the form of commands and replies.
const FINGERPRINT: u64 = with(with(named("worker control"), Command::SHAPE), Reply::SHAPE);

fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// Sends a message, with files.
///
/// # Errors
/// The other side is gone.
pub fn send<M: Wire>(
    channel: &UnixStream,
    message: &M,
    files: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut body = Vec::new();
    message.put(&mut body);
    if body.len() > LONGEST {
        return Err(invalid("a message is too long for the control channel"));
    }
    let mut bytes = Vec::with_capacity(HEAD + body.len());
    (body.len() as u32).put(&mut bytes);
    FINGERPRINT.put(&mut bytes);
    bytes.extend(body);
    socket::send(channel, &bytes, files)
}

/// Receives a message, and the files that came with it. None if the other side has ended.
///
/// # Errors
/// It is no message of this build.
pub fn receive<M: Wire>(channel: &UnixStream) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
    receive_by(channel, channel, || Ok(()))
}

/// The same, for as long as there is patience.
fn receive_within<M: Wire>(
    channel: &UnixStream,
    patience: &Patience,
) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
    let rest = Patient(channel, patience);
    receive_by(channel, rest, || patience.readable(channel.as_fd()))
}

/// Receives the first bytes from a channel once it is ready, and the rest from a reader of the same.
fn receive_by<M: Wire>(
    channel: &UnixStream,
    mut rest: impl Read,
    ready: impl Fn() -> io::Result<()>,
) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
    let mut head = [0; HEAD];
    let (got, files) = loop {
        ready()?;
        match socket::receive(channel, &mut head) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            received => break received?,
        }
    };
    if got == 0 {
        return Ok(None);
    }
    rest.read_exact(&mut head[got..])?;
    let (length, fingerprint) = head.split_at(4);
    let read = |bytes| invalid_if(u64::from_bytes(bytes));
    if read(fingerprint)? != FINGERPRINT {
        return Err(invalid(
            "the control channel's other side is of another build",
        ));
    }
    let length = invalid_if(u32::from_bytes(length))? as usize;
    if length > LONGEST {
        return Err(invalid("a message of the control channel is too long"));
    }
    let mut body = vec![0; length];
    rest.read_exact(&mut body)?;
    let message = invalid_if(M::from_bytes(&body))?;
    Ok(Some((message, files)))
}

fn invalid_if<T>(read: Result<T, crate::wire::Malformed>) -> io::Result<T> {
    read.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// A refusal.
pub fn refused(why: &dyn std::error::Error) -> Reply {
    Reply::Refused(Blob(base::Chain(why).to_string().into_bytes()))
}

/// Why an application has not moved.
#[derive(Debug, thiserror::Error)]
pub enum NotMoved {
    /// A worker says so.
    #[error("{0}")]
    Refused(String),
    /// A worker has ended, or says what it should not.
    #[error("{who} {}", if is_end(.source) { "has ended" } else { "does not answer" })]
    Gone {
        /// Which of the two.
        who: &'static str,
        /// How it was noticed.
        source: io::Error,
    },
    /// A worker that saves an application's state does not get on.
    #[error(
        "{who} has written nothing of its state for {seconds} s: it hangs, or its device does; end the application, \
         then try again"
    )]
    Silent {
        /// Which of the two.
        who: &'static str,
        /// For how long.
        seconds: u64,
    },
    /// A worker that makes an application's state does not get on.
    #[error(
        "{who} has not used a processor for {seconds} s while it makes the application's state: its driver \
         hangs, or its device does; see the log of its pool, start that anew, then try again"
    )]
    Hangs {
        /// Which of the two.
        who: &'static str,
        /// For how long.
        seconds: u64,
    },
    /// The worker that was to stop is in the middle of something long, and goes on after it.
    #[error("its worker is busy, and goes on by itself")]
    Busy {
        /// How many of its answers have not come.
        due: u32,
        /// Why it goes on.
        #[source]
        why: Box<NotMoved>,
    },
    /// Somebody has asked for the end.
    #[error("it was cancelled")]
    Cancelled,
    /// The system.
    #[error("cannot make a file for the application's state")]
    File(#[source] io::Error),
    /// The system.
    #[error("cannot make a socket for contents of its memory that follow")]
    Socket(#[source] io::Error),
}

impl NotMoved {
    /// Whether it is an answer, after which the worker can be asked for something else.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused(_))
    }

    /// Whether the worker that is called so has ended.
    pub fn is_end_of(&self, worker: &str) -> bool {
        matches!(self, Self::Gone { who, source } if *who == worker && is_end(source))
    }
}

/// Whether a channel fails so whose other end is closed.
fn is_end(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof
    )
}

/// Does what a worker asks for on the socket that it got with [`Command::Go`], until it has all contents, or
/// has ended: `fetch` has the worker that has left save those of a memory object to a file.
///
/// # Errors
/// The first reason why some have not come, or it asks for something else.
pub fn serve_fetches(
    destination: &UnixStream,
    mut fetch: impl FnMut(&Fetch, BorrowedFd<'_>) -> Result<(), NotMoved>,
) -> Result<(), NotMoved> {
    let mut lost = Ok(());
    let served = (|| {
        while let Some((command, files)) = receive::<Command>(destination)? {
            let (Command::Fetch(what), [file]) = (command, &files[..]) else {
                return Err(invalid("a worker asks for more than contents of memory"));
            };
            let fetched = fetch(&what, file.as_fd());
            let reply = fetched.as_ref().err().map(|why| refused(why));
            send(destination, &reply.unwrap_or(Reply::Done()), &[])?;
            // One that has ended before it has heard that needs nothing.
            if lost.is_ok() {
                lost = fetched;
            }
        }
        Ok(())
    })();
    match served {
        Ok(()) => lost,
        // It has ended in the middle of a question.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
            ) =>
        {
            lost
        }
        Err(source) => Err(NotMoved::Gone {
            who: "the worker that serves it",
            source,
        }),
    }
}

/// A pool's end of a worker's channel.
#[derive(Debug)]
pub struct Peer<'a> {
    /// Its channel.
    pub channel: &'a UnixStream,
    /// What it is called in messages.
    pub who: &'static str,
}

impl Peer<'_> {
    fn gone(&self, source: io::Error) -> NotMoved {
        NotMoved::Gone {
            who: self.who,
            source,
        }
    }

    /// Asks for something.
    ///
    /// # Errors
    /// The worker is gone.
    pub fn send(&self, command: &Command, files: &[BorrowedFd<'_>]) -> Result<(), NotMoved> {
        send(self.channel, command, files).map_err(|source| self.gone(source))
    }

    /// Asks for something and waits for the answer.
    ///
    /// # Errors
    /// It is refused, the worker is gone, or there is no more patience.
    pub fn ask(
        &self,
        command: &Command,
        files: &[BorrowedFd<'_>],
        patience: &Patience,
    ) -> Result<(Reply, Vec<OwnedFd>), NotMoved> {
        self.send(command, files)?;
        self.answer(patience)
    }

    /// Waits for an answer.
    ///
    /// # Errors
    /// It is a refusal, the worker is gone, or there is no more patience.
    pub fn answer(&self, patience: &Patience) -> Result<(Reply, Vec<OwnedFd>), NotMoved> {
        loop {
            match self.reply(patience)? {
                (Reply::Works(), _) => {}
                answer => return Ok(answer),
            }
        }
    }

    /// Has a worker that has left save what the one in its place asks for by this socket, as long as that asks. `came`
    /// hears of what has come.
    ///
    /// # Errors
    /// The first reason why some contents are lost.
    pub fn bring(
        &self,
        destination: &UnixStream,
        came: impl FnMut(&Fetch),
    ) -> Result<(), NotMoved> {
        self.bring_within(destination, LONG, came)
    }

    fn bring_within(
        &self,
        destination: &UnixStream,
        each: Duration,
        mut came: impl FnMut(&Fetch),
    ) -> Result<(), NotMoved> {
        // A reply that comes too late would be taken for that to the next question.
        let mut gone: Option<String> = None;
        serve_fetches(destination, |what, file| {
            if let Some(why) = &gone {
                return Err(NotMoved::Refused(why.clone()));
            }
            let command = Command::Fetch(what.clone());
            let saved = self.ask(&command, &[file], &Patience::within(each));
            if let Err(why) = &saved
                && !why.is_refusal()
            {
                gone = Some(base::Chain(why).to_string());
            }
            saved.map(|_| came(what))
        })
    }

    /// Asks for the state of an application to be made, and waits for the answer, as
    /// [`made`](Self::made) does.
    ///
    /// # Errors
    /// As [`made`](Self::made).
    pub fn make(
        &self,
        command: &Command,
        image: BorrowedFd<'_>,
        patience: &Patience,
    ) -> Result<(), NotMoved> {
        self.send(command, &[image])?;
        self.made(patience)
    }

    /// Waits until the state of an application has been made, as long as the worker is at it.
    ///
    /// # Errors
    /// It is refused, the worker is gone or hangs, or there is no more patience.
    pub fn made(&self, patience: &Patience) -> Result<(), NotMoved> {
        self.made_within(patience, SILENT)
    }

    fn made_within(&self, patience: &Patience, silent: Duration) -> Result<(), NotMoved> {
        loop {
            match self.reply(&patience.at_most(silent)) {
                Ok((Reply::Works(), _)) => {}
                Err(NotMoved::Gone { source, .. })
                    if source.kind() == io::ErrorKind::TimedOut && patience.check().is_ok() =>
                {
                    return Err(NotMoved::Hangs {
                        who: self.who,
                        seconds: silent.as_secs(),
                    });
                }
                other => return other.map(drop),
            }
        }
    }

    /// Waits for a reply, which need not be an answer.
    fn reply(&self, patience: &Patience) -> Result<(Reply, Vec<OwnedFd>), NotMoved> {
        let answer = receive_within(self.channel, patience).map_err(|source| {
            match patience.is_cancelled() {
                true => NotMoved::Cancelled,
                false => self.gone(source),
            }
        })?;
        match answer.ok_or_else(|| self.gone(io::ErrorKind::UnexpectedEof.into()))? {
            (Reply::Refused(Blob(why)), _) => Err(NotMoved::Refused(
                String::from_utf8_lossy(&why).into_owned(),
            )),
            other => Ok(other),
        }
    }

    /// Has a worker go on that was asked to stop, and perhaps to save, whatever has become of that:
    /// so many of its answers have not come yet. They are waited for, so that nobody takes them for
    /// those to later commands.
    ///
    /// # Errors
    /// It is gone, or does not answer: it would stand still for ever.
    pub fn go_on(&self, due: u32, patience: &Patience) -> Result<(), NotMoved> {
        self.send(&Command::Resume(), &[])?;
        self.drain(&mut due.saturating_add(1), patience)
    }

    /// Waits for answers, whatever they are, and counts those that have not come.
    ///
    /// # Errors
    /// The worker is gone, or there is no more patience.
    pub fn drain(&self, due: &mut u32, patience: &Patience) -> Result<(), NotMoved> {
        while *due > 0 {
            match self.answer(patience) {
                // One that has not stopped, or has said why it does not, goes on anyway.
                Ok(_) | Err(NotMoved::Refused(_)) => *due -= 1,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// An empty file in memory, for an application's state.
///
/// # Errors
/// The system has no more descriptors or memory.
pub fn image() -> io::Result<File> {
    memfd::create(c"gantry-image")
}

/// How long a worker may take for what does not depend on the application.
pub const SOON: Duration = Duration::from_secs(30);
/// How long for saving and restoring, all applications together: contents of memory are copied, and
/// programs built.
pub const LONG: Duration = Duration::from_secs(600);
/// For how long a worker may show nothing of its work meanwhile: its device may have to copy or to hash first.
pub const SILENT: Duration = Duration::from_secs(120);
/// What is added to the time that the device has to come to an end.
pub const AFTER_DRAIN: Duration = Duration::from_secs(5);

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::{io::Write, os::fd::AsFd};

    use super::*;

    #[test]
    fn a_command_arrives_with_its_files() {
        let (here, there) = UnixStream::pair().unwrap();
        send(&here, &Command::Save(), &[here.as_fd()]).unwrap();
        let (command, files) = receive::<Command>(&there).unwrap().unwrap();
        assert_eq!(command, Command::Save());
        assert_eq!(files.len(), 1);
        drop((here, files));
        assert!(receive::<Command>(&there).unwrap().is_none());
    }

    #[test]
    fn a_worker_that_has_ended_is_not_said_to_be_silent() {
        let (here, there) = UnixStream::pair().unwrap();
        let worker = Peer {
            channel: &here,
            who: "the worker",
        };
        let silent = worker
            .answer(&Patience::within(Duration::ZERO))
            .unwrap_err();
        assert_eq!(silent.to_string(), "the worker does not answer");
        assert!(!silent.is_end_of("the worker"));
        drop(there);
        let heard = worker.answer(&Patience::within(LONG)).unwrap_err();
        let sent = worker.send(&Command::Save(), &[]).unwrap_err();
        for error in [heard, sent] {
            assert_eq!(error.to_string(), "the worker has ended");
            assert!(error.is_end_of("the worker") && !error.is_end_of("another"));
        }
    }

    #[test]
    fn who_makes_a_state_is_waited_for_as_long_as_it_is_at_work() {
        let (here, there) = UnixStream::pair().unwrap();
        let silent = Duration::from_millis(300);
        let worker = std::thread::spawn(move || {
            for _ in 0..6 {
                std::thread::sleep(silent / 3);
                send(&there, &Reply::Works(), &[]).unwrap();
            }
            send(&there, &Reply::Done(), &[]).unwrap();
            // It hangs with the next one.
            send(&there, &Reply::Works(), &[]).unwrap();
            there
        });
        let new = Peer {
            channel: &here,
            who: "the new worker",
        };
        let patience = Patience::within(LONG);
        new.made_within(&patience, silent).unwrap();
        let there = worker.join().unwrap();
        let hangs = new.made_within(&patience, silent).unwrap_err();
        assert!(
            matches!(hangs, NotMoved::Hangs { .. }) && hangs.to_string().contains("new worker"),
            "{hangs}"
        );
        // The time for all of it is over, or somebody gives it up: that is said.
        let over = new.made_within(&Patience::within(Duration::ZERO), silent);
        assert!(matches!(over, Err(NotMoved::Gone { .. })), "{over:?}");
        let cancel = base::Cancel::default();
        cancel.cancel();
        let over = new.made_within(&Patience::new(LONG, cancel), silent);
        assert!(matches!(over, Err(NotMoved::Cancelled)), "{over:?}");
        // What is said late is no answer to what is asked next.
        send(&there, &Reply::Works(), &[]).unwrap();
        send(&there, &Reply::Done(), &[]).unwrap();
        let (answer, _) = new.answer(&patience).unwrap();
        assert_eq!(answer, Reply::Done());
    }

    #[test]
    fn what_a_worker_was_told_that_is_lost_is_known_however_it_ends_and_no_more() {
        let what = Fetch {
            mem: 0,
            bytes: 1,
            left: 1,
        };
        let patience = Patience::within(SOON);
        for hears in [true, false] {
            let (here, there) = UnixStream::pair().unwrap();
            let ask = Command::Fetch(what.clone());
            let (ends, has_ended) = std::sync::mpsc::channel();
            let mut asked = 0;
            let served = std::thread::scope(|scope| {
                let worker = scope.spawn(|| {
                    let source = Peer {
                        channel: &there,
                        who: "the worker",
                    };
                    if hears {
                        let refused = source.ask(&ask, &[there.as_fd()], &patience);
                        assert!(matches!(refused, Err(NotMoved::Refused(_))));
                    }
                    // It ends before the answer to this one.
                    source.send(&ask, &[there.as_fd()]).unwrap();
                    there.shutdown(std::net::Shutdown::Both).unwrap();
                    ends.send(()).unwrap();
                });
                let served = serve_fetches(&here, |_, _| {
                    asked += 1;
                    if asked > usize::from(hears) {
                        has_ended.recv().unwrap();
                    }
                    Err(NotMoved::Refused("killed".to_owned()))
                });
                worker.join().unwrap();
                served
            });
            assert_eq!(served.is_err(), hears, "{served:?}");
        }
    }

    #[test]
    fn a_worker_that_answers_too_late_is_not_asked_again_and_its_answer_is_nobodys() {
        let (here, there) = UnixStream::pair().unwrap();
        let (asks, asked) = UnixStream::pair().unwrap();
        let serving = std::thread::spawn(move || {
            let old = Peer {
                channel: &here,
                who: "the old worker",
            };
            old.bring_within(&asked, Duration::ZERO, |_| panic!("nothing has come"))
        });
        let source = Peer {
            channel: &asks,
            who: "the old worker",
        };
        let fetch = |mem| {
            let what = Fetch {
                mem,
                bytes: 1,
                left: 1,
            };
            let command = Command::Fetch(what);
            let file = image().unwrap();
            source.ask(&command, &[file.as_fd()], &Patience::within(LONG))
        };
        let late = fetch(1).unwrap_err();
        assert!(late.is_refusal(), "{late:?}");
        send(&there, &Reply::Done(), &[]).unwrap();
        let next = fetch(2).unwrap_err();
        assert!(next.is_refusal(), "{next:?}");
        drop(asks);
        let lost = serving.join().unwrap();
        assert!(matches!(lost, Err(NotMoved::Gone { .. })), "{lost:?}");
        assert!(receive::<Command>(&there).unwrap().is_some());
        // Its own answer has not been read.
        assert!(!matches!(receive::<Command>(&there), Ok(Some(_))));
    }

    #[test]
    fn a_message_of_another_build_or_without_end_is_refused() {
        for (length, fingerprint) in [(1, FINGERPRINT ^ 1), (u32::MAX, FINGERPRINT)] {
            let (mut here, there) = UnixStream::pair().unwrap();
            here.write_all(&length.to_le_bytes()).unwrap();
            here.write_all(&fingerprint.to_le_bytes()).unwrap();
            let refused = receive::<Command>(&there).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
        }
    }
}
