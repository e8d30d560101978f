//! A worker's side of [moving](remoting_transport::worker_control) an application: what it serves can be described, and a
//! worker that waits for another one's application takes it up.
//!
//! A worker of a machine's slice is asked by two: by its pool, and by the machine over the connection
//! that it has attached the slice by. What one of them has stopped, only that one saves or has go on.

use std::{
    io,
    os::{
        fd::{FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use base::memfd;
use remoting_opencl::{Server, told::Told};
use remoting_proto::{
    port::{ATTACHMENT, Attachment},
    wire::Blob,
};
use remoting_session::{
    checkpoint::{Order, Ordered, Outcome},
    notice::{Board, Notice},
    postcopy::Fetch,
    precopy::Asker,
    quota::Quota,
    server::{Nudge, Tuning},
    work::{BUSY, TOLD, processor_time},
};
use remoting_transport::{
    account::Account,
    control::{self, Command, Reply},
    endpoint::Receiver,
    port_bell::{Events, Waker},
    socket,
    window::{RING, Slice, Window},
};

use super::{
    compiled::owner::Owner,
    process::{self, Error, PATIENCE, Worker},
};

/// The descriptor on which a worker finds its end of the control channel.
pub(super) const MOVES: i32 = 5;

/// How long a worker may be in the middle of something before it says whether it can be moved.
const LOOK: Duration = Duration::from_secs(2);

/// This worker's end of the control channel; to be taken once.
fn channel() -> io::Result<UnixStream> {
    // SAFETY: a plain call on a number; what is started from here on does not inherit it.
    if unsafe { libc::fcntl(MOVES, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the pool has put it there, and nothing else in this process uses it.
    Ok(unsafe { UnixStream::from_raw_fd(MOVES) })
}

/// Whether an application can be moved.
#[derive(Debug)]
pub(super) enum Movable {
    /// It can, and this is what it has been told of its devices.
    From(Told),
    /// It cannot.
    Not(&'static str),
}

/// Why applications that come by a stream stay.
pub(super) const STREAMS: &str = "applications that come by a stream cannot be moved yet";
/// Why applications that call CUDA stay.
pub(super) const CUDA: &str = "applications that call CUDA cannot be moved yet";

/// Starts the thread that does what the pool asks for while the worker serves, and one for the machine
/// at the other end of a connection, if there is one.
pub(super) fn attend<N: Send + std::fmt::Debug + 'static>(
    board: Arc<Board<N>>,
    movable: Movable,
    machine: Option<&UnixStream>,
) -> io::Result<()> {
    attend_both(channel()?, board, movable, machine)
}

fn attend_both<N: Send + std::fmt::Debug + 'static>(
    pool: UnixStream,
    board: Arc<Board<N>>,
    movable: Movable,
    machine: Option<&UnixStream>,
) -> io::Result<()> {
    let movable = Arc::new(movable);
    if let Some(machine) = machine {
        attend_on(
            machine.try_clone()?,
            Asker::Machine,
            Arc::clone(&board),
            Arc::clone(&movable),
        )?;
    }
    attend_on(pool, Asker::Pool, board, movable)
}

fn attend_on<N: Send + std::fmt::Debug + 'static>(
    channel: UnixStream,
    asker: Asker,
    board: Arc<Board<N>>,
    movable: Arc<Movable>,
) -> io::Result<()> {
    let thread = thread::Builder::new().name("control".to_owned());
    let work = move || {
        // Whether it stands still because of this one.
        let mut stopped = false;
        // Once it has left.
        let mut fetches = None;
        // Its end is that of the other side, with which this process ends.
        while let Ok(Some((command, files))) = control::receive::<Command>(&channel) {
            let refuse = |why: &str| drop(control::send(&channel, &refusal(why), &[]));
            let told = match &*movable {
                Movable::From(told) => told,
                Movable::Not(why) => {
                    refuse(why);
                    continue;
                }
            };
            let mut patience = None;
            let mut when_busy =
                refusal("its device is busy: what it has there is not copied in time");
            // The others are closed after the reply.
            let mut files = files.into_iter();
            let file = files.next();
            let is_image = file.as_ref().is_some_and(memfd::is_shared_memory);
            let order = match (command, file) {
                // Who writes to a file of a file system may wait for ever.
                (
                    Command::Save()
                    | Command::SaveRest(..)
                    | Command::Precopy(..)
                    | Command::Fetch(_),
                    Some(_),
                ) if !is_image => {
                    refuse("its state goes to shared memory alone");
                    continue;
                }
                (Command::Describe(), None) => {
                    let _ = control::send(&channel, &Reply::Serves(told.described()), &[]);
                    continue;
                }
                (Command::Quiesce(patience, most), None) => {
                    Order::Quiesce(Duration::from_millis(patience), most)
                }
                (Command::Resume(), None) if !stopped => {
                    let (done, _) = mpsc::channel();
                    let order = Order::Forget(asker);
                    board.leave(Notice::Control(Ordered { order, done }));
                    refuse("somebody else moves it, or nobody");
                    continue;
                }
                (Command::Examine(), None) => {
                    // Who cannot look at once may well be movable.
                    (patience, when_busy) = (Some(LOOK), Reply::Done());
                    Order::Examine
                }
                (Command::Save() | Command::SaveRest(..) | Command::Leave(), _) if !stopped => {
                    refuse("somebody else moves it");
                    continue;
                }
                (Command::Save(), Some(file)) => Order::Save(file.into()),
                (Command::SaveRest(rounds, postcopy), Some(file)) => {
                    Order::SaveRest(file.into(), asker, rounds, postcopy)
                }
                (Command::Leave(), None) => {
                    let (to, fetched) = mpsc::channel();
                    fetches = Some(to);
                    Order::Leave(fetched)
                }
                (Command::Fetch(what), Some(file)) => {
                    let ask = |to| Fetch::ask(to, what.mem, file.into());
                    let saved = fetches.as_ref().map(ask);
                    let saved = saved.unwrap_or_else(|| Err("it has not left".to_owned()));
                    let reply = saved.map_or_else(|why| refusal(&why), |()| Reply::Done());
                    let _ = control::send(&channel, &reply, &[]);
                    continue;
                }
                (Command::Precopy(round, time), Some(file)) => {
                    patience = Some(Duration::from_millis(time));
                    Order::Precopy(file.into(), asker, round)
                }
                (Command::Resume(), None) => Order::Resume,
                _ => {
                    refuse("it serves already");
                    continue;
                }
            };
            let after = match &order {
                Order::Quiesce(..) => true,
                Order::Resume => false,
                Order::Save(_)
                | Order::SaveRest(..)
                | Order::Precopy(..)
                | Order::Leave(_)
                | Order::Forget(_)
                | Order::Examine => stopped,
            };
            let (done, outcome) = mpsc::channel();
            board.leave(Notice::Control(Ordered { order, done }));
            let outcome = match patience {
                // What comes of it later nobody hears, nor takes it for something else.
                Some(time) => outcome.recv_timeout(time),
                None => outcome.recv().map_err(RecvTimeoutError::from),
            };
            let reply = match outcome {
                Ok(Ok(Outcome::Done)) => {
                    stopped = after;
                    Reply::Done()
                }
                Ok(Ok(Outcome::Keeps)) => Reply::Keeps(),
                Ok(Ok(Outcome::Made(made))) => Reply::Made(made),
                Ok(Err(why)) => refusal(&why),
                Err(RecvTimeoutError::Timeout) => when_busy,
                // The session has ended, and the process is about to.
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let _ = control::send(&channel, &reply, &[]);
        }
    };
    thread.spawn(work).map(drop)
}

fn refusal(why: &str) -> Reply {
    Reply::Refused(Blob(why.as_bytes().to_vec()))
}

/// The next command, which has to be this one.
fn next<T>(
    channel: &UnixStream,
    wanted: impl FnOnce(Command, Vec<OwnedFd>) -> Option<T>,
) -> Result<T, Error> {
    let command = control::receive(channel).map_err(Error::Connection)?;
    let found = command.and_then(|(command, files)| wanted(command, files));
    found.ok_or_else(|| Error::Connection(io::ErrorKind::InvalidData.into()))
}

fn done(channel: &UnixStream) -> Result<(), Error> {
    control::send(channel, &Reply::Done(), &[]).map_err(Error::Connection)
}

/// Takes up an application that another worker serves: waits until the pool says which. Ends with an
/// error if the application does not come in the end; it stays where it is then.
pub(super) fn take_up(mut worker: Worker<'_>) -> Result<(), Error> {
    let channel = channel().map_err(Error::Connection)?;
    let (served, connection) = next(&channel, |command, files| {
        match (command, files.into_iter().next()) {
            (Command::Adopt(served), Some(connection)) => Some((served, connection)),
            _ => None,
        }
    })?;
    done(&channel)?;
    let connection = UnixStream::from(connection);
    let files = next(&channel, |command, files| {
        (command == Command::Files()).then_some(files)
    })?;
    let user = socket::user(&connection).map_err(Error::Connection)?;
    let attachment = &served.attachment.0;
    let prepared = match <[u8; ATTACHMENT]>::try_from(&attachment[..]) {
        Ok(bytes) => {
            let attachment = Attachment::from_bytes(&bytes)?;
            worker.belong(process::machine(&attachment, user).as_ref())?;
            slice(&mut worker, &attachment, &files)
        }
        Err(_) => {
            worker.belong(Owner::of_user(user).as_ref())?;
            local(&mut worker, &connection, (&files, served.window))
        }
    };
    // Before anything is copied.
    let prepared = prepared.and_then(|all| {
        let compared = all.0.compare_described(&served.told);
        compared.map(|()| all).map_err(Error::Restore)
    });
    drop(files);
    let (server, calls, spin) = restored(&worker, &channel, prepared)?;
    let movable = Movable::From(server.told());
    let board = Arc::clone(&server.board);
    // A machine goes on to ask by the connection that was handed over.
    let machine = (!attachment.is_empty()).then_some(&connection);
    attend_both(channel, board, movable, machine).map_err(Error::Start)?;
    let outcome = server.run(calls, spin);
    drop(connection);
    Ok(outcome?)
}

/// Does what may take long. Who has asked for it by this channel is told as often that it goes on, if this process
/// has had processor time since: one whose driver hangs has none.
fn telling<T>(
    channel: &UnixStream,
    often: Duration,
    had: impl Fn() -> Duration + Send,
    work: impl FnOnce() -> T,
) -> io::Result<T> {
    let (over, is_over) = mpsc::channel::<()>();
    let tell = move || {
        let mut before = had();
        while is_over.recv_timeout(often) == Err(RecvTimeoutError::Timeout) {
            let now = had();
            if now.saturating_sub(before) >= often / BUSY {
                // Who has asked may have ended, as this process is about to, then.
                let _ = control::send(channel, &Reply::Works(), &[]);
            }
            before = now;
        }
    };
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("tells".to_owned());
        thread.spawn_scoped(scope, tell)?;
        let done = work();
        drop(over);
        Ok(done)
    })
}

/// Waits for the state on this channel, makes it again, and waits until nobody else serves the window.
fn restored(
    worker: &Worker<'_>,
    channel: &UnixStream,
    prepared: Result<Prepared, Error>,
) -> Result<Prepared, Error> {
    let (mut server, mut calls, spin) = prepared.inspect_err(|error| {
        let _ = control::send(channel, &control::refused(error), &[]);
    })?;
    done(channel)?;
    let mut is_whole = false;
    while !is_whole {
        let (image, charged) = next(channel, |command, files| {
            let file = files
                .into_iter()
                .next()
                .filter(|file| memfd::is_shared_memory(file))?;
            let charged = match command {
                Command::Prepare(charged) => charged,
                Command::Restore(charged) => {
                    is_whole = true;
                    charged
                }
                _ => return None,
            };
            Some((file, charged))
        })?;
        let make = || match is_whole {
            true => server.restore(image.into(), charged),
            false => server.prepare(image.into(), charged),
        };
        let made = telling(channel, TOLD, processor_time, make).map_err(Error::Start)?;
        made.map_err(|error| {
            let _ = control::send(channel, &control::refused(&error), &[]);
            Error::Restore(error)
        })?;
        done(channel)?;
    }
    let source = next(channel, |command, files| {
        (command == Command::Go()).then(|| files.into_iter().next())
    })?;
    let fetching = server.fetch_contents(source.map(UnixStream::from));
    fetching.map_err(Error::Restore)?;
    worker.send_no_files()?;
    server.take_up(&mut calls)?;
    Ok((server, calls, spin))
}

/// Takes up a slice that another worker has served, perhaps another pool's or in another life of the
/// machine, which sends the state by its connection.
pub(super) fn take_up_slice(
    mut worker: Worker<'_>,
    machine: &UnixStream,
    user: u32,
    attachment: &Attachment,
    files: Vec<OwnedFd>,
) -> Result<(), Error> {
    process::tell_slice(attachment, &files)?;
    worker.belong(process::machine(attachment, user).as_ref())?;
    let prepared = slice(&mut worker, attachment, &files);
    drop(files);
    let (server, calls, spin) = restored(&worker, machine, prepared)?;
    let board = Arc::clone(&server.board);
    let movable = Movable::From(server.told());
    attend(board, movable, Some(machine)).map_err(Error::Start)?;
    Ok(server.run(calls, spin)?)
}

type Prepared = (Server, Receiver<Slice, Waker>, Duration);

/// A session for an application of this machine.
fn local(
    worker: &mut Worker<'_>,
    connection: &UnixStream,
    (files, size): (&[OwnedFd], u64),
) -> Result<Prepared, Error> {
    let options = worker.options;
    let file = files.first().ok_or(Error::Files(0))?;
    let window = Window::map(file, size, RING)?;
    let listener = connection.try_clone().map_err(Error::Connection)?;
    let nudge = Nudge(Box::new(move || socket::nudge(&listener)));
    let tuning = worker.tuning();
    process::session(worker.api()?, window, (tuning, nudge), None, options)
}

/// A session for a slice of a machine's port.
fn slice(
    worker: &mut Worker<'_>,
    attachment: &Attachment,
    files: &[OwnedFd],
) -> Result<Prepared, Error> {
    let options = worker.options;
    let [memory, doorbell, interrupt, account] = files else {
        return Err(Error::Files(files.len()));
    };
    let copy = |file: &OwnedFd| file.try_clone().map_err(Error::Connection);
    let window = Window::map(memory, attachment.window, RING)?;
    let events = Events {
        doorbell: copy(doorbell)?,
        interrupt: copy(interrupt)?,
        patience: PATIENCE,
    };
    let account = Account::map(account).map_err(Error::Account)?;
    let tuning = Tuning {
        spin: Duration::from_micros(options.spin),
        waker: Waker::Guest(Arc::new(events)),
        quota: Quota::shared(attachment.memory, account, attachment.slice),
    };
    let nudge = Nudge(Box::new(|| {}));
    process::session(
        worker.api()?,
        window,
        (tuning, nudge),
        Some(attachment),
        options,
    )
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use base::Patience;
    use remoting_opencl::testing;
    use remoting_transport::control::{Peer, Worker as Part};

    use super::*;

    /// A serving session, and the channels of two who may ask.
    fn asked_by_two(movable: Movable) -> (UnixStream, UnixStream) {
        let (server, calls, _) = testing::server();
        let board = Arc::clone(&server.board);
        thread::spawn(move || server.run(calls, Duration::ZERO));
        let ((pool, theirs), (machine, other)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        attend_both(theirs, board, movable, Some(&other)).unwrap();
        (pool, machine)
    }

    fn ask(channel: &UnixStream, command: &Command) -> Result<(), String> {
        let peer = Peer {
            channel,
            who: Part::Serving,
        };
        let answer = peer.ask(command, &[], &Patience::within(Duration::from_secs(30)));
        answer.map(drop).map_err(|error| error.to_string())
    }

    #[test]
    fn what_one_has_stopped_the_other_does_not_have_go_on() {
        let (pool, machine) = asked_by_two(Movable::From(Told::default()));
        assert!(ask(&pool, &Command::Resume()).is_err(), "it serves");
        ask(&pool, &Command::Quiesce(1000, u64::MAX)).unwrap();
        let refused = ask(&machine, &Command::Resume()).unwrap_err();
        assert!(refused.contains("somebody else"), "{refused}");
        assert!(ask(&machine, &Command::Quiesce(1000, u64::MAX)).is_err());
        ask(&pool, &Command::Resume()).unwrap();
        ask(&machine, &Command::Quiesce(1000, u64::MAX)).unwrap();
        assert!(ask(&pool, &Command::Resume()).is_err());
        ask(&machine, &Command::Resume()).unwrap();
    }

    #[test]
    fn a_worker_that_keeps_contents_says_so_and_then_leaves() {
        let (server, _calls, _) = testing::server();
        let board = Arc::clone(&server.board);
        let (pool, theirs) = UnixStream::pair().unwrap();
        attend_both(
            theirs,
            Arc::clone(&board),
            Movable::From(Told::default()),
            None,
        )
        .unwrap();
        // In place of a session, of which some contents are kept.
        thread::spawn(move || {
            loop {
                for notice in board.take() {
                    let Notice::Control(Ordered { order, done }) = notice else {
                        continue;
                    };
                    let outcome = match order {
                        Order::SaveRest(..) => Outcome::Keeps,
                        _ => Outcome::Done,
                    };
                    // Nobody waits at the end of the test.
                    let _ = done.send(Ok(outcome));
                }
                thread::sleep(Duration::from_millis(1));
            }
        });
        let worker = Peer {
            channel: &pool,
            who: Part::Serving,
        };
        let patience = Patience::within(Duration::from_secs(30));
        let image = remoting_session::image::create().unwrap();
        let ask = |command, files: &[_]| worker.ask(&command, files, &patience).unwrap().0;
        let quiesce = Command::Quiesce(1000, u64::MAX);
        assert_eq!(ask(quiesce, &[]), Reply::Done());
        let saved = ask(Command::SaveRest(0, true), &[image.as_fd()]);
        assert_eq!(saved, Reply::Keeps());
        assert_eq!(ask(Command::Leave(), &[]), Reply::Done());
    }

    #[test]
    fn what_cannot_be_made_again_is_named_before_and_when_it_is_to_stop() {
        use remoting_opencl::testing::carry_out;
        use remoting_proto::apis::opencl::calls::*;
        let (mut server, calls, _) = testing::server();
        let create = CreateContext {
            id: ContextId(0),
            devices: vec![DeviceId(0)],
            platform: None,
        };
        carry_out(&mut server, Request::CreateContext(create));
        let allocate = SvmAlloc {
            context: ContextId(0),
            flags: 0,
            size: 4096,
            retries: 0,
        };
        server.svm_alloc(&allocate).unwrap();
        let board = Arc::clone(&server.board);
        let (pool, theirs) = UnixStream::pair().unwrap();
        attend_both(theirs, board, Movable::From(Told::default()), None).unwrap();
        // Nobody knows before it serves.
        ask(&pool, &Command::Examine()).unwrap();
        thread::spawn(move || server.run(calls, Duration::ZERO));
        for command in [Command::Examine(), Command::Quiesce(1000, u64::MAX)] {
            let refused = ask(&pool, &command).unwrap_err();
            assert_eq!(refused, "it has shared virtual memory");
        }
    }

    #[test]
    fn a_round_that_takes_too_long_is_refused_and_its_late_end_is_no_answer() {
        let (server, calls, _) = testing::server();
        let (pool, theirs) = UnixStream::pair().unwrap();
        let board = Arc::clone(&server.board);
        attend_both(theirs, board, Movable::From(Told::default()), None).unwrap();
        let round = |time| {
            let image = remoting_session::image::create().unwrap();
            let worker = Peer {
                channel: &pool,
                who: Part::Serving,
            };
            let command = Command::Precopy(0, time);
            let patience = Patience::within(Duration::from_secs(30));
            let answer = worker.ask(&command, &[image.as_fd()], &patience);
            answer.map(drop).map_err(|error| error.to_string())
        };
        // Nobody serves.
        let refused = round(10).unwrap_err();
        assert!(refused.contains("busy"), "{refused}");
        thread::spawn(move || server.run(calls, Duration::ZERO));
        let refused = ask(&pool, &Command::Resume()).unwrap_err();
        assert!(refused.contains("nobody"), "{refused}");
        while let Err(refused) = round(30_000) {
            assert!(refused.contains("is being copied"), "{refused}");
        }
    }

    #[test]
    fn a_state_is_written_to_shared_memory_alone() {
        let (pool, _machine) = asked_by_two(Movable::From(Told::default()));
        let worker = Peer {
            channel: &pool,
            who: Part::Serving,
        };
        let patience = Patience::within(Duration::from_secs(30));
        let image = std::fs::File::open("/dev/null").unwrap();
        let what = remoting_transport::control::Fetch {
            mem: 0,
            bytes: 1,
            left: 1,
        };
        for command in [
            Command::Precopy(0, 30_000),
            Command::Save(),
            Command::SaveRest(0, false),
            Command::Fetch(what),
        ] {
            let refused = worker.ask(&command, &[image.as_fd()], &patience);
            let refused = refused.unwrap_err().to_string();
            assert_eq!(
                refused, "its state goes to shared memory alone",
                "{command:?}"
            );
        }
    }

    #[test]
    fn who_works_says_so_and_who_hangs_does_not() {
        let often = Duration::from_millis(20);
        let (here, there) = UnixStream::pair().unwrap();
        let next = || control::receive::<Reply>(&here).unwrap().unwrap().0;
        let begun = std::time::Instant::now();
        // The work ends when that has been heard a few times.
        let busy = || begun.elapsed();
        telling(&there, often, busy, || {
            (0..3).for_each(|_| assert_eq!(next(), Reply::Works()));
        })
        .unwrap();
        while here.set_nonblocking(true).is_ok() && control::receive::<Reply>(&here).is_ok() {}
        telling(&there, often, || often, || thread::sleep(10 * often)).unwrap();
        assert!(control::receive::<Reply>(&here).is_err());
        let before = processor_time();
        while processor_time() == before {}
    }

    #[test]
    fn both_are_told_why_an_application_cannot_be_moved() {
        let (pool, machine) = asked_by_two(Movable::Not(CUDA));
        for channel in [pool, machine] {
            let refused = ask(&channel, &Command::Quiesce(1000, u64::MAX)).unwrap_err();
            assert_eq!(refused, CUDA);
        }
    }
}
