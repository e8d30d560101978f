//! The control messages that ask a worker to stop, save, restore and resume. Its pool sends them, or the machine whose
//! slice it serves.
//!
//! A message is its length in four bytes, the format's fingerprint in eight, and the message in the wire codec's
//! encoding. Both sides check all of it: native code may run in a worker, and a worker does not accept a pool of
//! another build. The order of requests is up to the requester.

use std::{
    fs::File,
    io::{self, Read, Write},
    net::Shutdown,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::Duration,
};

use base::{Patience, memfd, patience::Patient};
use remoting_proto::wire::{
    Blob, Wire,
    codec::{named, wire, with},
};

use super::socket;

pub use remoting_relocation::failure::{Failure, Worker};

/// Maximum size of a message in bytes.
const LONGEST: usize = 64 << 10;
/// Size of the header of a message in bytes.
const HEAD: usize = 12;

wire! {
    /// What a worker serves.
    struct Served {
        /// A virtual machine's attachment; empty for an application of this machine.
        attachment: Blob,
        /// Size of the window in bytes.
        window: u64,
        /// Number of files.
        files: u32,
        /// What the application has been told about its devices, as encoded by its backend. Empty if there is nothing,
        /// or too much for a message: the state holds it too.
        told: Blob,
    }
}

wire! {
    /// Asks for the contents of a memory object, without which the worker has already resumed.
    struct Fetch {
        /// The object's number in the state.
        mem: u32,
        /// Size of the object in bytes.
        bytes: u64,
        /// Bytes of all contents that have yet to come, including these.
        left: u64,
    }
}

wire! { enum
    /// A request to a worker.
    Command {
        /// Describe what you serve.
        1 Describe(),
        /// Prepare to serve this later.
        2 Adopt(served: Served),
        /// Stop: wait for outstanding work, for at most `patience` milliseconds. A worker with more than `most` bytes
        /// of memory objects created since the last round continues instead, and replies so.
        3 Quiesce(patience: u64, most: u64),
        /// Save the state to the attached file.
        4 Save(),
        /// Restore the state from the attached file. `charged` tells whether the source has already charged the state's
        /// device memory to the machine's account.
        5 Restore(charged: bool),
        /// Resume, or discard what rounds have left.
        6 Resume(),
        /// Serve what was restored. If contents of memory are still at the source, a socket is attached, on which the
        /// worker sends [`Fetch`](Self::Fetch) until it has all of them.
        7 Go(),
        /// The files of what is to be served are attached.
        8 Files(),
        /// Write the changes since the last round to the attached file, and continue serving. `round` counts from 0,
        /// and round 0 starts anew. The request is refused if it takes more than `patience` milliseconds.
        9 Precopy(round: u32, patience: u64),
        /// Restore what is in the attached file; more will follow. `charged` as for [`Restore`](Self::Restore).
        10 Prepare(charged: bool),
        /// Save the changes since the last of `rounds` rounds to the attached file. With `postcopy`, contents of large
        /// memory objects may be left out; they are then fetched after [`Leave`](Self::Leave).
        11 SaveRest(rounds: u32, postcopy: bool),
        /// Never touch the window again: another worker serves it from now on.
        12 Leave(),
        /// Report whether the state can be saved, as far as that is known while serving, and how many bytes of memory
        /// objects were created since the last round, or in total if there was none.
        13 Examine(),
        /// Save the omitted contents of a memory object to the attached file, or to that of the last
        /// [`Files`](Self::Files).
        14 Fetch(what: Fetch),
    }
}

wire! { enum
    /// A worker's reply.
    Reply {
        /// Done.
        1 Done(),
        /// It cannot be done, and why.
        2 Refused(why: Blob),
        /// The worker serves an application that has been told this of its devices, as in [`Served`].
        3 Serves(told: Blob),
        /// Not done yet, but the worker has had processor time in the last second.
        4 Works(),
        /// The worker continues: this many bytes of memory objects were created since the last round.
        5 Made(bytes: u64),
        /// Done, and the contents of some memory objects are still here, to be fetched.
        6 Keeps(),
    }
}

/// Hash of the encoding of commands and replies.
const FINGERPRINT: u64 = with(with(named("worker control"), Command::SHAPE), Reply::SHAPE);

fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// Sends a message with files.
///
/// # Errors
/// The other side is gone, or the message is too long.
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
    match files {
        // A worker that serves may make no call that could send files.
        [] => (&mut &*channel).write_all(&bytes),
        files => socket::send(channel, &bytes, files),
    }
}

/// Receives a message with its files. Returns None if the other side has ended.
///
/// # Errors
/// The bytes are not a message of this build, or the channel fails.
pub fn receive<M: Wire>(channel: &UnixStream) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
    receive_by(channel, channel, || Ok(()))
}

/// Same as [`receive`], while the patience lasts.
fn receive_within<M: Wire>(
    channel: &UnixStream,
    patience: &Patience,
) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
    let rest = Patient(channel, patience);
    receive_by(channel, rest, || patience.readable(channel.as_fd()))
}

/// Receives a message's first bytes from a channel once it is ready, and the remainder from a reader of the same
/// channel.
fn receive_by<M: Wire>(
    channel: &UnixStream,
    mut rest: impl Read,
    ready: impl Fn() -> io::Result<()>,
) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
    let mut head = [0; HEAD];
    let (got, files) = loop {
        ready()?;
        // Without its files the message is refused, once it is complete.
        match socket::receive(channel, &mut head).or_else(socket::FilesLost::arrived) {
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

fn invalid_if<T>(read: Result<T, remoting_proto::wire::Malformed>) -> io::Result<T> {
    read.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// The reply that refuses a command.
pub fn refused(why: &dyn std::error::Error) -> Reply {
    Reply::Refused(Blob(base::Chain(why).to_string().into_bytes()))
}

/// Serves the requests that a worker sends on the socket that it got with [`Command::Go`], until it has all contents or
/// has ended. `fetch` makes the source save the contents of a memory object to a file: that which came last, with
/// [`Command::Files`] or with the request.
///
/// # Errors
/// The first reason why contents are missing, or the worker asks for something else.
pub fn serve_fetches(
    destination: &UnixStream,
    mut fetch: impl FnMut(&Fetch, BorrowedFd<'_>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut lost = Ok(());
    let mut last = None;
    let served = (|| {
        while let Some((command, files)) = receive::<Command>(destination)? {
            last = files.into_iter().next().or(last.take());
            let (what, file) = match (command, &last) {
                (Command::Files(), Some(_)) => continue,
                (Command::Fetch(what), Some(file)) => (what, file),
                _ => return Err(invalid("a worker asks for more than contents of memory")),
            };
            let fetched = fetch(&what, file.as_fd());
            let reply = fetched.as_ref().err().map(|why| refused(why));
            send(destination, &reply.unwrap_or(Reply::Done()), &[])?;
            // A worker that ended before it heard of the loss needs nothing.
            if lost.is_ok() {
                lost = fetched;
            }
        }
        Ok(())
    })();
    match served {
        Ok(()) => lost,
        // The worker ended in the middle of a request.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
            ) =>
        {
            lost
        }
        Err(source) => Err(Failure::Gone {
            who: Worker::Serving,
            source,
        }),
    }
}

/// The pool's end of a worker's channel.
#[derive(Debug)]
pub struct Peer<'a> {
    /// Its channel.
    pub channel: &'a UnixStream,
    /// Its part in a move.
    pub who: Worker,
}

impl Peer<'_> {
    fn gone(&self, source: io::Error) -> Failure {
        Failure::Gone {
            who: self.who,
            source,
        }
    }

    /// Sends a command.
    ///
    /// # Errors
    /// The worker is gone.
    pub fn send(&self, command: &Command, files: &[BorrowedFd<'_>]) -> Result<(), Failure> {
        send(self.channel, command, files).map_err(|source| self.gone(source))
    }

    /// Sends a command and waits for the answer.
    ///
    /// # Errors
    /// The command is refused, the worker is gone, or the patience is over.
    pub fn ask(
        &self,
        command: &Command,
        files: &[BorrowedFd<'_>],
        patience: &Patience,
    ) -> Result<(Reply, Vec<OwnedFd>), Failure> {
        self.send(command, files)?;
        self.answer(patience)
    }

    /// Waits for an answer.
    ///
    /// # Errors
    /// The answer is a refusal, the worker is gone, or the patience is over.
    pub fn answer(&self, patience: &Patience) -> Result<(Reply, Vec<OwnedFd>), Failure> {
        loop {
            match self.reply(patience)? {
                (Reply::Works(), _) => {}
                answer => return Ok(answer),
            }
        }
    }

    /// Makes a worker that has left save the contents that its successor asks for on this socket, as long as the
    /// successor asks. `came` is called for contents that have come.
    ///
    /// # Errors
    /// The first reason why some contents are lost.
    pub fn bring(&self, destination: &UnixStream, came: impl FnMut(&Fetch)) -> Result<(), Failure> {
        self.bring_within(destination, LONG, came)
    }

    fn bring_within(
        &self,
        destination: &UnixStream,
        each: Duration,
        mut came: impl FnMut(&Fetch),
    ) -> Result<(), Failure> {
        // A late reply would be taken for the reply to the next request.
        let mut gone: Option<String> = None;
        serve_fetches(destination, |what, file| {
            if let Some(why) = &gone {
                return Err(Failure::Refused(why.clone()));
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

    /// Asks the worker to restore an application's state, and waits for the answer as [`made`](Self::made) does.
    ///
    /// # Errors
    /// As [`made`](Self::made).
    pub fn make(
        &self,
        command: &Command,
        image: BorrowedFd<'_>,
        patience: &Patience,
    ) -> Result<(), Failure> {
        self.send(command, &[image])?;
        self.made(patience)
    }

    /// Waits until an application's state has been restored, as long as the worker makes progress.
    ///
    /// # Errors
    /// The restore is refused, the worker is gone or hangs, or the patience is over.
    pub fn made(&self, patience: &Patience) -> Result<(), Failure> {
        self.made_within(patience, SILENT)
    }

    fn made_within(&self, patience: &Patience, silent: Duration) -> Result<(), Failure> {
        loop {
            match self.reply(&patience.at_most(silent)) {
                Ok((Reply::Works(), _)) => {}
                Err(late) if late.is_late() && patience.check().is_ok() => {
                    return Err(Failure::Hangs {
                        who: self.who,
                        seconds: silent.as_secs(),
                    });
                }
                other => return other.map(drop),
            }
        }
    }

    /// Waits for a reply, which may be [`Reply::Works`].
    fn reply(&self, patience: &Patience) -> Result<(Reply, Vec<OwnedFd>), Failure> {
        let answer = receive_within(self.channel, patience).map_err(|source| {
            match patience.is_cancelled() {
                true => Failure::Cancelled,
                false => self.gone(source),
            }
        })?;
        match answer.ok_or_else(|| self.gone(io::ErrorKind::UnexpectedEof.into()))? {
            (Reply::Refused(Blob(why)), _) => {
                Err(Failure::Refused(String::from_utf8_lossy(&why).into_owned()))
            }
            other => Ok(other),
        }
    }
}

/// Ends a worker by its connection, and waits until its pool has seen the process end: from then on nobody has what it
/// was given.
///
/// # Errors
/// It has not ended in time, or the wait was cancelled.
pub fn end(channel: &UnixStream, who: Worker, patience: &Patience) -> Result<(), Failure> {
    // Fails if it has already ended.
    let _ = channel.shutdown(Shutdown::Write);
    loop {
        let read = patience
            .check()
            .and_then(|()| Patient(channel, patience).read(&mut [0; 64]));
        match read {
            Ok(0) => return Ok(()),
            // A reply that nobody waits for any more.
            Ok(_) => {}
            // Killed while it had unread messages.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
            Err(_) if patience.is_cancelled() => return Err(Failure::Cancelled),
            Err(source) => return Err(Failure::Gone { who, source }),
        }
    }
}

/// Creates an empty file in memory for an application's state.
///
/// # Errors
/// The system has no more descriptors or memory.
pub fn image() -> io::Result<File> {
    memfd::create(c"gantry-image")
}

/// Timeout for work that does not depend on the application.
pub const SOON: Duration = Duration::from_secs(30);
/// Timeout for saving and restoring all applications together: contents of memory are copied, and programs built.
pub const LONG: Duration = Duration::from_secs(600);
/// Maximum time without a sign of progress meanwhile: the device may have to copy or to hash first.
pub const SILENT: Duration = Duration::from_secs(120);
/// Added to the device's drain time.
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
            who: Worker::Serving,
        };
        let silent = worker
            .answer(&Patience::within(Duration::ZERO))
            .unwrap_err();
        assert_eq!(
            silent.to_string(),
            "the worker that serves it does not answer"
        );
        assert!(silent.is_late() && !silent.is_end_of(Worker::Serving));
        drop(there);
        let heard = worker.answer(&Patience::within(LONG)).unwrap_err();
        let sent = worker.send(&Command::Save(), &[]).unwrap_err();
        for error in [heard, sent] {
            assert_eq!(error.to_string(), "the worker that serves it has ended");
            assert!(error.is_end_of(Worker::Serving) && !error.is_end_of(Worker::Left));
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
            who: Worker::Destination,
        };
        let patience = Patience::within(LONG);
        new.made_within(&patience, silent).unwrap();
        let there = worker.join().unwrap();
        let hangs = new.made_within(&patience, silent).unwrap_err();
        assert!(
            matches!(hangs, Failure::Hangs { .. })
                && hangs.to_string().contains("that was to serve it"),
            "{hangs}"
        );
        // The time for all of it is over, or somebody gives it up: that is said.
        let over = new.made_within(&Patience::within(Duration::ZERO), silent);
        assert!(matches!(over, Err(Failure::Gone { .. })), "{over:?}");
        let cancel = base::Cancel::default();
        cancel.cancel();
        let over = new.made_within(&Patience::new(LONG, cancel), silent);
        assert!(matches!(over, Err(Failure::Cancelled)), "{over:?}");
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
                        who: Worker::Serving,
                    };
                    if hears {
                        let refused = source.ask(&ask, &[there.as_fd()], &patience);
                        assert!(matches!(refused, Err(Failure::Refused(_))));
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
                    Err(Failure::Refused("killed".to_owned()))
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
                who: Worker::Left,
            };
            old.bring_within(&asked, Duration::ZERO, |_| panic!("nothing has come"))
        });
        let source = Peer {
            channel: &asks,
            who: Worker::Left,
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
        assert!(matches!(lost, Err(Failure::Gone { .. })), "{lost:?}");
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
