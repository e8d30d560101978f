//! The guest of a virtual machine, whose programs are served through the machine's accelerator port.
//!
//! The machine hands over the port's window and its two eventfds. The guest's agent carries what its programs ask for
//! over rings in the window, as [`remoting_proto::apis::nvidia`] says. Each program has a session, with a thread of its
//! own. The worker serves this guest alone, and its process ends with the machine's connection: nothing outlives that.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::{fs::FileExt, net::UnixStream},
    },
    process,
    sync::{
        Arc, Mutex,
        mpsc::{SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::Duration,
};

use base::{Unpoisoned, note, socket};
use nvidia_abi::wire::{HEADER, MOST};
use remoting_proto::{
    apis::nvidia::{SPOKEN, to_agent, to_worker},
    port::{ATTACHMENT, Attachment, NoAttachment, READY, REFUSED},
    wire::{
        frame::{Flags, Header},
        hello::{self, Form, Hello, Refused},
    },
};
use remoting_transport::{
    account::Account,
    bell::Bell,
    endpoint::{Gone, Receiver, Sender, Spin},
    mapping,
    peer_files::{self, WrongFile},
    port_bell::{Events as Bells, Waker},
    ring::{Consumer, Producer},
    sync::AtomicU32,
    window::{self, CLIENT_HELLO, REPLY, RING, Window},
};

use crate::{
    bar::{Bar, Place},
    closing::Closing,
    confine::{self, Serving},
    server::{self, MOST_PROGRAMS, Worker},
    session::Session,
    slice::Slice,
};

/// How long a machine may take to hand its port over.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long to poll for a message before sleeping, and how long a sleep may last.
const SPIN: Duration = Duration::from_micros(50);
const MOST_SLEEP: Duration = Duration::from_secs(1);

/// Why a machine is not served any longer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its connection.
    #[error("the connection to the virtual machine failed")]
    Connection(#[source] io::Error),
    /// It sent something else.
    #[error("a virtual machine was refused")]
    Attachment(#[from] NoAttachment),
    /// The agent in its guest, or the machine, is of another build.
    #[error("a virtual machine was refused")]
    Refused(#[from] Refused),
    /// The port is for some of the devices.
    #[error("the port names a device ({0:?}): native contexts have all devices; leave device= out")]
    Device(String),
    /// Its files.
    #[error("a virtual machine sent {0} files with its attachment, and not 4")]
    Files(usize),
    /// One of its files.
    #[error("a virtual machine was refused")]
    File(#[from] WrongFile),
    /// Its window.
    #[error(transparent)]
    Window(#[from] mapping::Error),
    /// The account of video memory.
    #[error("cannot use the account of device memory that a virtual machine sent")]
    Account(#[source] io::Error),
    /// The worker.
    #[error(transparent)]
    Worker(#[from] server::Error),
    /// Confinement.
    #[error("cannot confine the worker")]
    Confine(#[from] base::confine::Error),
    /// A thread or a mapping.
    #[error("cannot serve the virtual machine")]
    System(#[source] io::Error),
    /// The rings.
    #[error("the agent in the guest has broken the connection")]
    Rings(#[from] Gone),
    /// What the agent said.
    #[error("the agent in the guest has sent a message that makes no sense")]
    Message,
}

/// What a worker needs of the machine that it serves.
pub struct Machine {
    /// The window: what programs share with their devices, all together.
    pub slice: Arc<Slice>,
    /// The client of an arbiter that the machine is, its weight and latency.
    pub(crate) name: String,
    pub(crate) weight: u32,
    pub(crate) latency: u32,
    bar: Arc<Bar>,
    answers: Mutex<Sender<window::Slice, Ringing>>,
}

impl Machine {
    /// Shows pages of a device file to the guest.
    ///
    /// # Errors
    /// As of [`Bar::place`].
    pub fn place(
        &self,
        file: BorrowedFd<'_>,
        control: BorrowedFd<'_>,
        length: u64,
        writable: bool,
    ) -> io::Result<Place> {
        self.bar.place(file, control, length, writable)
    }

    /// Tells the agent that a file has an event.
    pub fn tell_event(&self, file: u32) {
        self.send(to_agent::EVENT, file, &[]);
    }

    /// Sends the agent a message. One that cannot be sent is not missed: nobody reads the rings any longer.
    fn send(&self, opcode: u16, number: u32, body: &[u8]) {
        let header = Header {
            // A message of this worker's is short.
            length: body.len() as u32,
            opcode,
            flags: Flags::default(),
            sequence: number.into(),
        };
        let _ = self.answers.lock_unpoisoned().send(header, body, || true);
    }
}

/// Serves the machine at the other end of a connection with a worker that `make` makes of the machine, the bytes of video
/// memory that its programs may have, and the port's account, until the machine ends the connection, which ends this
/// process.
///
/// # Errors
/// The machine is refused, the system refuses, or the agent in the guest breaks the rules.
pub fn serve(
    connection: &UnixStream,
    make: impl FnOnce(Machine, Option<u64>, Account) -> Result<Arc<Worker>, server::Error>,
) -> Result<(), Error> {
    let (machine, calls, worker) = match attach(connection, make) {
        Ok(attached) => attached,
        Err(error) => {
            if !matches!(error, Error::File(_)) {
                // The machine has ended, if it does not take this.
                let _ = (&mut &*connection).write_all(&[REFUSED]);
            }
            return Err(error);
        }
    };
    confine::confine(worker.branch(), Serving::Machine, |node| worker.shows(node))?;
    worker.begin_sharing().map_err(Error::System)?;
    let watched = connection.try_clone().map_err(Error::System)?;
    start("machine", move || end_with(&watched))?;
    let closing = Closing::start(&worker).map_err(Error::System)?;
    let (events, closes) = (worker.clone(), closing.clone());
    start("events", move || crate::events::run(&events, &closes))?;
    (&mut &*connection)
        .write_all(&[READY])
        .map_err(Error::Connection)?;
    Guest {
        machine,
        worker,
        closing,
        sessions: HashMap::new(),
        live: Arc::default(),
    }
    .serve(calls)
}

/// Rings, and sleeps for a moment only: the doorbell wakes the thread that receives.
#[derive(Debug)]
struct Ringing(Waker);

impl Bell for Ringing {
    fn ring(&self, word: &AtomicU32) {
        self.0.ring(word);
    }

    fn wait(&self, _: &AtomicU32, _: u32, _: Duration) {
        thread::sleep(Duration::from_millis(1));
    }
}

type Calls = Receiver<window::Slice, Waker>;

/// Takes the port over, and has the worker made.
fn attach(
    connection: &UnixStream,
    make: impl FnOnce(Machine, Option<u64>, Account) -> Result<Arc<Worker>, server::Error>,
) -> Result<(Arc<Machine>, Calls, Arc<Worker>), Error> {
    let failed = Error::Connection;
    connection
        .set_read_timeout(Some(PATIENCE))
        .map_err(failed)?;
    let mut bytes = [0; ATTACHMENT];
    let files = socket::receive_exact(connection, &mut bytes).map_err(failed)?;
    connection.set_read_timeout(None).map_err(failed)?;
    if let Err(wrong) = peer_files::check(&files) {
        // Before the files are closed, which may take for ever.
        let _ = (&mut &*connection).write_all(&[REFUSED]);
        return Err(wrong.into());
    }
    let count = files.len();
    let Ok([memory, doorbell, interrupt, account]) = <[OwnedFd; 4]>::try_from(files) else {
        return Err(Error::Files(count));
    };
    let memory = File::from(memory);
    check_version(connection, &bytes, &memory)?;
    let attachment = Attachment::from_bytes(&bytes)?;
    if !attachment.device.is_empty() {
        return Err(Error::Device(attachment.device));
    }
    let memory = OwnedFd::from(memory);
    let window = Window::map(&memory, attachment.window, RING)?;
    let hello = window.client_hello();
    let ours = Hello::answer(SPOKEN, Form::Port, (attachment.window, RING));
    // Also for an agent of another build, so that it can name both versions.
    window.reply(&ours.to_bytes());
    Hello::check(&hello, &[SPOKEN])?;
    let bells = Waker::Guest(Arc::new(Bells {
        doorbell,
        interrupt,
        patience: MOST_SLEEP,
    }));
    let answers = Producer::new(window.answers(), Ringing(bells.clone()));
    let calls = Receiver::new(Consumer::new(window.calls(), bells));
    let slice = Slice::over(memory.into(), window.data(), attachment.window);
    let machine = Machine {
        slice: Arc::new(slice.map_err(Error::System)?),
        name: attachment.client,
        weight: attachment.weight,
        latency: attachment.latency,
        bar: Bar::new(connection.try_clone().map_err(Error::System)?),
        answers: Mutex::new(Sender::new(answers, SPIN)),
    };
    let account = Account::map(&account).map_err(Error::Account)?;
    let limit = Some(attachment.memory).filter(|limit| *limit > 0);
    let worker = make(machine, limit, account)?;
    let machine = worker.machine.clone().ok_or(Error::Message)?;
    Ok((machine, calls, worker))
}

/// Compares versions. A machine of another build, and the agent in its guest, are told of which one this worker is.
fn check_version(
    connection: &UnixStream,
    bytes: &[u8; ATTACHMENT],
    memory: &File,
) -> Result<(), Error> {
    let start = bytes.first_chunk().ok_or(NoAttachment::Malformed)?;
    let theirs = Attachment::version(start)?;
    let api = Attachment::from_bytes(bytes)?.api;
    if (api, theirs) == (SPOKEN.api, SPOKEN.version) {
        return Ok(());
    }
    let mut answer = Hello::answer(SPOKEN, Form::Port, (0, 0));
    let mut sent = [0; hello::SIZE];
    // An agent of this build would find nothing wrong with that: it is told the machine's.
    if memory.read_exact_at(&mut sent, CLIENT_HELLO).is_ok()
        && Hello::check(&sent, &[SPOKEN]).is_ok()
    {
        answer.version = theirs;
    }
    // Both may have ended.
    let _ = memory.write_all_at(&answer.to_bytes(), REPLY);
    let _ = socket::send(
        connection,
        &Hello::answer(SPOKEN, Form::Port, (0, 0)).to_bytes(),
        &[],
    );
    Err(Refused::Version {
        api,
        ours: SPOKEN.version,
        theirs,
    }
    .into())
}

fn start(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let started = thread::Builder::new().name(name.into()).spawn(run);
    started.map(|_| ()).map_err(Error::System)
}

/// Ends this process when the machine ends the connection: the kernel then closes all device files, and the driver
/// frees what lives on them.
fn end_with(connection: &UnixStream) {
    loop {
        let mut polled = libc::pollfd {
            fd: connection.as_fd().as_raw_fd(),
            events: libc::POLLRDHUP,
            revents: 0,
        };
        // SAFETY: one pollfd.
        let ready = unsafe { libc::poll(&raw mut polled, 1, -1) };
        if ready > 0 {
            process::exit(0);
        }
    }
}

/// Tells the agent that a session has ended, however its thread ends.
struct Ending {
    machine: Arc<Machine>,
    number: u32,
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.machine.send(to_agent::ENDED, self.number, &[]);
    }
}

/// The programs of the guest.
struct Guest {
    machine: Arc<Machine>,
    worker: Arc<Worker>,
    closing: Closing,
    /// Where each session's requests go.
    sessions: HashMap<u32, SyncSender<Vec<u8>>>,
    /// A copy for each session's thread.
    live: Arc<()>,
}

impl Guest {
    fn serve(mut self, mut calls: Calls) -> Result<(), Error> {
        let mut body = Vec::with_capacity(HEADER + MOST);
        let mut spin = Spin::new(SPIN);
        loop {
            match calls.poll(&mut body)? {
                Some(header) => {
                    self.take(header, &body)?;
                    spin.reset();
                }
                None => calls.wait(&mut spin, || false),
            }
        }
    }

    fn take(&mut self, header: Header, body: &[u8]) -> Result<(), Error> {
        let number = u32::try_from(header.sequence).map_err(|_| Error::Message)?;
        match header.opcode {
            to_worker::BEGIN => {
                let user = body.try_into().map_err(|_| Error::Message)?;
                self.begin(number, u32::from_le_bytes(user));
            }
            to_worker::REQUEST if body.len() <= HEADER + MOST => {
                let session = self.sessions.get(&number);
                match session.map(|session| session.try_send(body.to_vec())) {
                    // It has ended by itself, and the agent does not know yet.
                    Some(Ok(()) | Err(TrySendError::Disconnected(_))) | None => {}
                    Some(Err(TrySendError::Full(_))) => return Err(Error::Message),
                }
            }
            to_worker::END => {
                if self.sessions.remove(&number).is_none() {
                    self.machine.send(to_agent::ENDED, number, &[]);
                }
            }
            to_worker::CLOSE => self.closing.close(number),
            _ => return Err(Error::Message),
        }
        Ok(())
    }

    /// Begins a session, or answers that it has ended.
    fn begin(&mut self, number: u32, user: u32) {
        let has_room = Arc::strong_count(&self.live) <= MOST_PROGRAMS;
        // One request is answered before the next.
        let (requests, taken) = sync_channel::<Vec<u8>>(1);
        let ending = Ending {
            machine: self.machine.clone(),
            number,
        };
        if !has_room {
            note!(
                "gantry-nvidia: {MOST_PROGRAMS} programs of the guest run: another one is refused"
            );
            return;
        }
        let (worker, live) = (self.worker.clone(), self.live.clone());
        let run = move || {
            let machine = &ending.machine;
            let mut session = Session::new(&worker, machine.slice.clone(), user);
            let mut packet = Vec::with_capacity(HEADER + MOST);
            while let Ok(request) = taken.recv() {
                // An invalid packet ends the program's connection. The program may still have its memory mapped,
                // which stays reserved until the agent ends the session.
                if session.respond(&request, &[], &mut packet).is_err() {
                    machine.send(to_agent::ENDED, number, &[]);
                    taken.iter().for_each(drop);
                    break;
                }
                machine.send(to_agent::ANSWER, number, &packet);
            }
            // Before the agent is told.
            drop((session, live));
        };
        match start("program", run) {
            Ok(()) => drop(self.sessions.insert(number, requests)),
            Err(error) => note!("gantry-nvidia: another program of the guest is refused: {error}"),
        }
    }
}
