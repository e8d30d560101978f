//! The ports of a move by [control messages](super::control): to a worker from its pool, or from the machine whose slice
//! it serves.
//!
//! | port | command | with | answer |
//! |---|---|---|---|
//! | source | `Precopy` | an empty file | once what is new is in it; it serves meanwhile |
//! | destination | `Prepare` | the file | once that is made |
//! | source | `Quiesce` | | once nothing is under way; or that much was made since the last round |
//! | source | `SaveRest` | an empty file | once the rest of the state is in it; and whether contents are kept, with postcopy |
//! | destination | `Restore` | the file | once all is made again |
//! | source | `Leave` | | at once |
//! | destination | `Go` | a socket to fetch contents by, with postcopy | none |
//! | source | `Resume`, if a step fails | | once it serves again |

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::{fs::MetadataExt, net::UnixStream},
    },
    ptr,
    time::Duration,
};

use base::Patience;
use remoting_relocation::{
    destination::DestinationPort,
    source::{Contents, Departed, Leave, Quiescence, SourcePort},
    transfer::Plan,
};

use super::control::{
    self, AFTER_DRAIN, Command, Failure, LONG, Peer, Reply, SILENT, SOON, Worker,
};

/// A worker that serves an application.
#[derive(Debug)]
pub struct Source {
    channel: UnixStream,
    /// By which it is ended; if there is none, by its connection.
    process: Option<OwnedFd>,
    /// Number of its answers that have not come.
    due: u32,
    /// Whether it may have stopped or saved rounds, and was not told to resume since.
    asked: bool,
    /// How long it may write nothing while it saves.
    silent: Duration,
    /// How long its end may take. What is lost if it takes longer is an application.
    ends: Duration,
}

impl Source {
    /// A worker that ends with this connection.
    pub fn new(channel: UnixStream) -> Self {
        Self {
            channel,
            process: None,
            due: 0,
            asked: false,
            silent: SILENT,
            ends: LONG,
        }
    }

    /// A child process, by its pidfd.
    pub fn child(channel: UnixStream, process: OwnedFd) -> Self {
        Self {
            process: Some(process),
            ..Self::new(channel)
        }
    }

    /// Its connection.
    pub fn into_channel(self) -> UnixStream {
        self.channel
    }

    /// Whether it serves, and has given all answers.
    pub fn is_settled(&self) -> bool {
        !self.asked && self.due == 0
    }

    /// The worker, to be asked for what does not stop it.
    pub fn peer(&self) -> Peer<'_> {
        Peer {
            channel: &self.channel,
            who: Worker::Serving,
        }
    }

    /// Sends a command.
    ///
    /// # Errors
    /// It is gone.
    pub fn send(&mut self, command: &Command, files: &[BorrowedFd<'_>]) -> Result<(), Failure> {
        self.asked |= !matches!(command, Command::Describe() | Command::Examine());
        self.peer().send(command, files)?;
        self.due += 1;
        Ok(())
    }

    /// Waits for an answer.
    ///
    /// # Errors
    /// As for [`Peer::answer`].
    pub fn answer(&mut self, patience: &Patience) -> Result<(Reply, Vec<OwnedFd>), Failure> {
        let answer = self.peer().answer(patience);
        if matches!(answer, Ok(_) | Err(Failure::Refused(_))) {
            self.due = self.due.saturating_sub(1);
        }
        answer
    }

    /// Sends a command and waits for the answer.
    ///
    /// # Errors
    /// As for [`Peer::ask`].
    pub fn ask(
        &mut self,
        command: &Command,
        files: &[BorrowedFd<'_>],
        patience: &Patience,
    ) -> Result<(Reply, Vec<OwnedFd>), Failure> {
        self.send(command, files)?;
        self.answer(patience)
    }

    /// Has it save its application's state, or a part of it, with this command, and waits as long as it keeps writing:
    /// the application, and perhaps its machine, is stopped meanwhile.
    ///
    /// # Errors
    /// It refuses, is gone, or has written nothing for long, or the patience is over.
    pub fn save_by(
        &mut self,
        command: &Command,
        patience: &Patience,
    ) -> Result<(File, Contents), Failure> {
        let silent = self.silent;
        let image = control::image().map_err(Failure::File)?;
        self.send(command, &[image.as_fd()])?;
        let mut written = 0;
        loop {
            match self.answer(&patience.at_most(silent)) {
                Err(late) if late.is_late() && patience.check().is_ok() => {
                    let before = written;
                    written = image.metadata().map_err(Failure::File)?.blocks();
                    if written <= before {
                        return Err(Failure::Silent {
                            who: Worker::Serving,
                            seconds: silent.as_secs(),
                        });
                    }
                }
                answer => {
                    let contents = match answer?.0 {
                        Reply::Keeps() => Contents::Kept,
                        _ => Contents::Saved,
                    };
                    return Ok((image, contents));
                }
            }
        }
    }

    /// Has it resume, if need be, and waits for all answers, whatever they are: they would be taken for answers to later
    /// commands.
    ///
    /// # Errors
    /// It is gone, or the patience is over.
    pub fn settle(&mut self, patience: &Patience) -> Result<(), Failure> {
        if self.asked {
            self.resume();
        }
        if self.asked {
            return Err(Failure::Gone {
                who: Worker::Serving,
                source: io::ErrorKind::WouldBlock.into(),
            });
        }
        while self.due > 0 {
            match self.answer(patience) {
                // A worker that has not stopped, or has said why not, continues anyway.
                Ok(_) | Err(Failure::Refused(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl SourcePort for Source {
    type State = File;

    fn precopy(
        &mut self,
        round: u32,
        limit: Duration,
        patience: &Patience,
    ) -> Result<(File, u64), Failure> {
        let image = control::image().map_err(Failure::File)?;
        let command = Command::Precopy(round, limit.as_millis() as u64);
        // The worker itself reports that it takes too long.
        let answered = patience.at_most(limit.saturating_add(AFTER_DRAIN));
        self.ask(&command, &[image.as_fd()], &answered)?;
        let bytes = image.metadata().map_err(Failure::File)?.len();
        Ok((image, bytes))
    }

    fn quiesce(
        &mut self,
        plan: &Plan,
        (_, most_new): (u32, u64),
        patience: &Patience,
    ) -> Result<Quiescence, Failure> {
        let drained = plan.drain.saturating_add(AFTER_DRAIN);
        let drain = u64::try_from(plan.drain.as_millis()).unwrap_or(u64::MAX);
        let command = Command::Quiesce(drain, most_new);
        Ok(
            match self.ask(&command, &[], &patience.at_most(drained))?.0 {
                Reply::Made(_) => Quiescence::Grew,
                _ => Quiescence::Still,
            },
        )
    }

    fn save(
        &mut self,
        plan: &Plan,
        rounds: u32,
        patience: &Patience,
    ) -> Result<(File, Contents), Failure> {
        self.save_by(&Command::SaveRest(rounds, plan.postcopy), patience)
    }

    fn leave(&mut self) -> Leave {
        match self.ask(&Command::Leave(), &[], &Patience::within(SOON)) {
            Ok(_) => Leave::Confirmed,
            Err(why) if why.is_refusal() => Leave::Refused(why),
            Err(why) => Leave::Unknown(why),
        }
    }

    fn end(&mut self) -> Result<(), Failure> {
        let who = Worker::Serving;
        let patience = Patience::within(self.ends);
        let ended = match &self.process {
            None => control::end(&self.channel, who, &patience),
            Some(process) => {
                kill(process.as_fd(), &patience).map_err(|source| Failure::Gone { who, source })
            }
        };
        ended.map_err(|why| match why.is_late() {
            true => Failure::Lingers {
                who,
                seconds: self.ends.as_secs(),
            },
            false => why,
        })
    }

    fn resume(&mut self) {
        match self.peer().send(&Command::Resume(), &[]) {
            Ok(()) => (self.asked, self.due) = (false, self.due + 1),
            // It answers nothing any more.
            Err(why) if why.is_end_of(Worker::Serving) => (self.asked, self.due) = (false, 0),
            // It was not told, and may stand still.
            Err(_) => self.asked = true,
        }
    }
}

/// Kills a process, and waits until it has ended.
fn kill(process: BorrowedFd<'_>, patience: &Patience) -> io::Result<()> {
    // SAFETY: a plain call; no information is attached.
    let killed = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            process.as_raw_fd(),
            libc::SIGKILL,
            ptr::null::<libc::siginfo_t>(),
            0,
        )
    };
    let error = io::Error::last_os_error();
    match killed < 0 && error.raw_os_error() != Some(libc::ESRCH) {
        true => Err(error),
        false => patience.readable(process),
    }
}

/// A worker that is to serve an application.
#[derive(Debug)]
pub struct Destination {
    channel: UnixStream,
    /// Number of answers until it is ready.
    due: u32,
    /// By which it asks for contents that follow.
    asks: Option<UnixStream>,
}

impl Destination {
    /// A worker that has been told what it is to serve, and is ready once it has answered this often. With postcopy, it
    /// `asks` for contents by a socket.
    pub fn new(channel: UnixStream, due: u32, asks: Option<UnixStream>) -> Self {
        Self { channel, due, asks }
    }

    /// Its connection.
    pub fn into_channel(self) -> UnixStream {
        self.channel
    }

    /// The worker.
    pub fn peer(&self) -> Peer<'_> {
        Peer {
            channel: &self.channel,
            who: Worker::Destination,
        }
    }
}

impl DestinationPort for Destination {
    type State = File;

    fn open(&mut self, patience: &Patience) -> Result<(), Failure> {
        for _ in 0..self.due {
            self.peer().answer(&patience.at_most(SOON))?;
        }
        Ok(())
    }

    fn prepare(&mut self, state: File, patience: &Patience) -> Result<(), Failure> {
        let command = Command::Prepare(true);
        self.peer().make(&command, state.as_fd(), patience)
    }

    fn restore(&mut self, state: File, patience: &Patience) -> Result<(), Failure> {
        let command = Command::Restore(true);
        self.peer().make(&command, state.as_fd(), patience)
    }

    fn go(&mut self, _proof: Departed) -> Result<(), Failure> {
        // Its end is the end of its requests.
        let asks = self.asks.take();
        let files: Vec<_> = asks.iter().map(AsFd::as_fd).collect();
        self.peer().send(&Command::Go(), &files)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::{
        os::unix::fs::FileExt,
        process::{Child, Command as Program},
        thread,
    };

    use base::Cancel;
    use remoting_proto::wire::Blob;
    use remoting_relocation::{failure::NotMoved, transfer::relocate};

    use super::{
        super::control::{receive, refused, send},
        *,
    };

    fn plan() -> Plan {
        Plan {
            drain: Duration::from_millis(250),
            postcopy: false,
        }
    }

    fn next(channel: &UnixStream) -> (Command, Option<OwnedFd>) {
        let (command, files) = receive::<Command>(channel).unwrap().unwrap();
        (command, files.into_iter().next())
    }

    fn done(channel: &UnixStream) {
        send(channel, &Reply::Done(), &[]).unwrap();
    }

    #[test]
    fn a_state_goes_from_one_worker_to_the_other_by_the_commands_of_a_move() {
        let ((to_source, source), (to_destination, destination)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let written = |(command, file): (Command, Option<OwnedFd>), state: &[u8]| {
            File::from(file.unwrap()).write_all_at(state, 0).unwrap();
            command
        };
        let source = thread::spawn(move || {
            let round = written(next(&source), b"round");
            assert!(matches!(round, Command::Precopy(0, 1..=120_000)));
            done(&source);
            assert!(matches!(next(&source).0, Command::Quiesce(250, _)));
            done(&source);
            let rest = written(next(&source), b"rest");
            assert_eq!(rest, Command::SaveRest(1, false));
            done(&source);
            assert_eq!(next(&source).0, Command::Leave());
            done(&source);
            receive::<Command>(&source).unwrap().is_none()
        });
        let destination = thread::spawn(move || {
            send(&destination, &Reply::Serves(Blob::default()), &[]).unwrap();
            done(&destination);
            let mut has = Vec::new();
            for expected in [Command::Prepare(true), Command::Restore(true)] {
                let (command, file) = next(&destination);
                assert_eq!(command, expected);
                let file = File::from(file.unwrap());
                let mut state = vec![0; file.metadata().unwrap().len() as usize];
                file.read_exact_at(&mut state, 0).unwrap();
                has.push(state);
                done(&destination);
            }
            assert_eq!(next(&destination).0, Command::Go());
            has
        });
        let mut from = Source::new(to_source);
        let to = Destination::new(to_destination, 2, None);
        let arrival = relocate(&mut from, to, &plan(), &Patience::within(LONG)).unwrap();
        arrival.go().unwrap();
        assert!(from.due == 0);
        drop(from);
        assert!(source.join().unwrap(), "it is asked for nothing more");
        assert_eq!(destination.join().unwrap(), [&b"round"[..], b"rest"]);
    }

    #[test]
    fn a_worker_in_a_long_call_goes_on_after_it_and_is_asked_again_when_it_has_answered() {
        let (pool, worker) = UnixStream::pair().unwrap();
        let mut source = Source::new(pool);
        let over = Patience::within(Duration::ZERO);
        let late = source.quiesce(&plan(), (0, 0), &over).unwrap_err();
        assert!(late.is_late() && source.settle(&over).unwrap_err().is_late());
        assert_eq!(source.due, 2);
        assert!(source.settle(&over).is_err(), "it is told once to resume");
        assert_eq!(source.due, 2);
        for asked in [Command::Quiesce(250, 0), Command::Resume()] {
            assert_eq!(next(&worker).0, asked);
            done(&worker);
        }
        source.settle(&Patience::within(LONG)).unwrap();
        assert!(source.is_settled());
        send(&worker, &refused(&io::Error::other("mine")), &[]).unwrap();
        let next = source.ask(&Command::Save(), &[], &Patience::within(SOON));
        assert_eq!(next.unwrap_err().to_string(), "mine");
        // One that has ended keeps nobody waiting.
        drop(worker);
        source.settle(&Patience::within(LONG)).unwrap();
    }

    #[test]
    fn a_worker_that_hangs_while_it_saves_is_waited_for_as_long_as_it_writes() {
        let (pool, worker) = UnixStream::pair().unwrap();
        let mut source = Source::new(pool);
        source.silent = Duration::from_millis(300);
        let hangs = thread::scope(|scope| {
            // It writes at first, and then nothing more.
            scope.spawn(|| {
                let (command, file) = next(&worker);
                assert_eq!(command, Command::Save());
                let file = File::from(file.unwrap());
                file.write_all_at(&[1; 8192], 0).unwrap();
            });
            source
                .save_by(&Command::Save(), &Patience::within(LONG))
                .unwrap_err()
        });
        assert!(hangs.to_string().contains("written nothing"), "{hangs}");
        // Its driver responds again.
        done(&worker);
        done(&worker);
        source.settle(&Patience::within(LONG)).unwrap();
        assert_eq!(next(&worker).0, Command::Resume());
    }

    #[test]
    fn a_worker_that_cannot_be_told_to_resume_is_not_taken_for_one_that_serves() {
        let (pool, _worker) = UnixStream::pair().unwrap();
        pool.set_nonblocking(true).unwrap();
        let mut source = Source::new(pool);
        // Until there is no room.
        while source.send(&Command::Save(), &[]).is_ok() {}
        source.resume();
        assert!(!source.is_settled());
        source.settle(&Patience::within(LONG)).unwrap_err();
    }

    /// A process that would never end, and its pidfd.
    fn process() -> (Child, OwnedFd) {
        use std::os::fd::FromRawFd;
        let child = Program::new("sleep").arg("600").spawn().unwrap();
        // SAFETY: a plain call; the child has not been waited for.
        let process = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) };
        assert!(process >= 0);
        // SAFETY: the descriptor was just made.
        (child, unsafe { OwnedFd::from_raw_fd(process as i32) })
    }

    #[test]
    fn a_worker_that_only_closes_its_channel_as_it_is_to_leave_ends() {
        for kept in [true, false] {
            let (mut child, process) = process();
            let (to_source, worker) = UnixStream::pair().unwrap();
            let serves = thread::spawn(move || {
                assert!(matches!(next(&worker).0, Command::Precopy(..)));
                send(&worker, &refused(&io::Error::other("not now")), &[]).unwrap();
                assert!(matches!(next(&worker).0, Command::Quiesce(..)));
                done(&worker);
                assert_eq!(next(&worker).0, Command::SaveRest(0, true));
                let saved = if kept { Reply::Keeps() } else { Reply::Done() };
                send(&worker, &saved, &[]).unwrap();
                assert_eq!(next(&worker).0, Command::Leave());
            });
            let (to_destination, destination) = UnixStream::pair().unwrap();
            done(&destination);
            done(&destination);
            let plan = Plan {
                postcopy: true,
                ..plan()
            };
            let mut from = Source::child(to_source, process);
            let to = Destination::new(to_destination, 1, None);
            let moved = relocate(&mut from, to, &plan, &Patience::within(LONG));
            assert_eq!(matches!(moved, Err(NotMoved::Lost(_))), kept, "{moved:?}");
            assert_eq!(moved.is_ok(), !kept);
            assert!(!child.wait().unwrap().success());
            serves.join().unwrap();
        }
    }

    #[test]
    fn a_worker_of_which_nobody_knows_whether_it_has_left_ends() {
        let (mut child, process) = process();
        let (pool, _worker) = UnixStream::pair().unwrap();
        let mut source = Source::child(pool, process);
        source.end().unwrap();
        assert!(!child.wait().unwrap().success());
        source.end().unwrap();
        // One of another pool ends with its connection.
        let (machine, worker) = UnixStream::pair().unwrap();
        let mut source = Source::new(machine);
        let ends = thread::spawn(move || {
            assert!(receive::<Command>(&worker).unwrap().is_none());
            // It has answered late.
            done(&worker);
        });
        source.end().unwrap();
        ends.join().unwrap();
        let (machine, _hangs) = UnixStream::pair().unwrap();
        let mut source = Source::new(machine);
        source.ends = Duration::from_millis(20);
        let lingers = source.end().unwrap_err();
        assert!(matches!(lingers, Failure::Lingers { .. }), "{lingers:?}");
        let cancel = Cancel::default();
        cancel.cancel();
        let (machine, _worker) = UnixStream::pair().unwrap();
        let given_up = control::end(&machine, Worker::Left, &Patience::new(LONG, cancel));
        assert!(matches!(given_up, Err(Failure::Cancelled)), "{given_up:?}");
    }
}
