//! A worker's side of [moving](super::control) an application: what it serves can be described, and a
//! worker that waits for another one's application takes it up.

use std::{
    io,
    os::{
        fd::{AsFd, FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use super::{
    compiled::owner::Owner,
    control::{self, Command, Reply, Served},
    process::{self, Error, PATIENCE, RING, Worker},
};
use crate::{
    account::Account,
    backends::opencl::Server,
    link::{
        bell::Futex,
        endpoint::Receiver,
        port_bell::{Events, Waker},
        socket,
        window::{Slice, Window},
    },
    port::{ATTACHMENT, Attachment},
    session::{
        checkpoint::{Order, Ordered},
        notice::{Board, Notice},
        quota::Quota,
        server::{Nudge, Tuning},
    },
    wire::Blob,
};

/// The descriptor on which a worker finds its end of the control channel.
pub(super) const MOVES: i32 = 5;

/// What a worker serves: what another one needs to go on.
#[derive(Debug)]
pub(super) struct Seat {
    /// A machine's attachment, as bytes; none of an application of this machine.
    attachment: Vec<u8>,
    /// Bytes of the window.
    window: u64,
    /// The window, and what a machine sends with it.
    files: Vec<OwnedFd>,
}

impl Seat {
    /// An application of this machine, with its window.
    pub fn local(file: OwnedFd, window: u64) -> Self {
        Self {
            attachment: Vec::new(),
            window,
            files: vec![file],
        }
    }

    /// A slice of a machine's accelerator port, with copies of its files.
    pub fn slice(attachment: &Attachment, files: &[OwnedFd]) -> io::Result<Self> {
        let files: io::Result<_> = files.iter().map(OwnedFd::try_clone).collect();
        Ok(Self {
            attachment: attachment.to_bytes().to_vec(),
            window: attachment.window,
            files: files?,
        })
    }

    fn served(&self) -> Served {
        Served {
            attachment: Blob(self.attachment.clone()),
            window: self.window,
            files: self.files.len() as u32,
        }
    }
}

/// This worker's end of the control channel; to be taken once.
fn channel() -> io::Result<UnixStream> {
    // SAFETY: a plain call on a number; what is started from here on does not inherit it.
    if unsafe { libc::fcntl(MOVES, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the pool has put it there, and nothing else in this process uses it.
    Ok(unsafe { UnixStream::from_raw_fd(MOVES) })
}

/// Starts the thread that does what the pool asks for while the worker serves. Without a seat the
/// application cannot be moved, and the pool is told so.
pub(super) fn attend<N: Send + std::fmt::Debug + 'static>(
    board: Arc<Board<N>>,
    seat: Option<Seat>,
) -> io::Result<()> {
    let channel = channel()?;
    attend_on(channel, board, seat)
}

fn attend_on<N: Send + std::fmt::Debug + 'static>(
    channel: UnixStream,
    board: Arc<Board<N>>,
    seat: Option<Seat>,
) -> io::Result<()> {
    let thread = thread::Builder::new().name("control".to_owned());
    let work = move || {
        // Its end is the pool's, with which this process ends.
        while let Ok(Some((command, files))) = control::receive::<Command>(&channel) {
            let Some(seat) = &seat else {
                let why = "applications that come by a stream cannot be moved yet";
                let _ = control::send(&channel, &refusal(why), &[]);
                continue;
            };
            let order = match (command, files.into_iter().next()) {
                (Command::Describe(), None) => {
                    let files: Vec<_> = seat.files.iter().map(AsFd::as_fd).collect();
                    let _ = control::send(&channel, &Reply::Serves(seat.served()), &files);
                    continue;
                }
                (Command::Quiesce(patience), None) => {
                    Order::Quiesce(Duration::from_millis(patience))
                }
                (Command::Save(), Some(file)) => Order::Save(file.into()),
                (Command::Resume(), None) => Order::Resume,
                _ => {
                    let _ = control::send(&channel, &refusal("it serves already"), &[]);
                    continue;
                }
            };
            let (done, outcome) = mpsc::channel();
            board.leave(Notice::Control(Ordered { order, done }));
            let reply = match outcome.recv() {
                Ok(Ok(())) => Reply::Done(),
                Ok(Err(why)) => refusal(&why),
                // The session has ended, and the process is about to.
                Err(_) => return,
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
    let seat = Seat {
        attachment: served.attachment.0,
        window: served.window,
        files,
    };
    let prepared = match <[u8; ATTACHMENT]>::try_from(&seat.attachment[..]) {
        Ok(bytes) => {
            let attachment = Attachment::from_bytes(&bytes)?;
            worker.belong(process::machine(&attachment, user).as_ref())?;
            slice(&mut worker, &attachment, &seat)
        }
        Err(_) => {
            worker.belong(Owner::of_user(user).as_ref())?;
            local(&mut worker, &connection, &seat)
        }
    };
    let (mut server, mut calls, spin) = prepared.inspect_err(|error| {
        let _ = control::send(&channel, &control::refused(error), &[]);
    })?;
    done(&channel)?;
    let image = next(&channel, |command, files| {
        let file = files.into_iter().next();
        file.filter(|_| command == Command::Restore())
    })?;
    server.restore(image.into()).map_err(|error| {
        let _ = control::send(&channel, &control::refused(&error), &[]);
        Error::Restore(error)
    })?;
    done(&channel)?;
    next(&channel, |command, _| {
        (command == Command::Go()).then_some(())
    })?;
    server.take_up(&mut calls)?;
    attend_on(channel, Arc::clone(&server.board), Some(seat)).map_err(Error::Start)?;
    let outcome = server.run(calls, spin);
    drop(connection);
    Ok(outcome?)
}

type Prepared = (Server, Receiver<Slice, Waker>, Duration);

/// A session for an application of this machine.
fn local(worker: &mut Worker<'_>, connection: &UnixStream, seat: &Seat) -> Result<Prepared, Error> {
    let options = worker.options;
    let file = seat.files.first().ok_or(Error::Files(0))?;
    let window = Window::map(file, seat.window, RING)?;
    let listener = connection.try_clone().map_err(Error::Connection)?;
    let nudge = Nudge(Box::new(move || socket::nudge(&listener)));
    let tuning = Tuning {
        spin: Duration::from_micros(options.spin),
        waker: Waker::Futex(Futex { patience: PATIENCE }),
        quota: Quota::new(options.memory.saturating_mul(1 << 20)),
    };
    process::session(worker.api()?, window, (tuning, nudge), None, options)
}

/// A session for a slice of a machine's port.
fn slice(worker: &mut Worker<'_>, attachment: &Attachment, seat: &Seat) -> Result<Prepared, Error> {
    let options = worker.options;
    let [memory, doorbell, interrupt, account] = &seat.files[..] else {
        return Err(Error::Files(seat.files.len()));
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
