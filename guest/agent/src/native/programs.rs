//! Programs' connections, their device files, and what the worker answers.
//!
//! A program's device file is one end of a socket pair. The agent has the other end, which hangs up when nobody has a
//! copy of the program's any longer. The kernel's number of the program's end (its cookie) tells the file.

use std::{
    collections::HashMap,
    io,
    net::Shutdown,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

use base::{
    Unpoisoned,
    event::Event,
    socket::{self, cookie, has_unread},
};
use nvidia_abi::wire::{Answer, DEVICE, HEADER, MOST, Operation, Request, TOKEN};
use remoting_proto::{
    apis::nvidia::{to_agent, to_worker},
    wire::Header,
};
use remoting_transport::closer::Closer;

use super::{
    process::Process,
    readiness::{Interest, READ, Readiness, Source},
};
use crate::holders::Files;

/// The most programs at a time, those that the worker still ends among them.
pub const MOST_PROGRAMS: usize = 256;
/// The most device files of all programs.
pub const MOST_FILES: usize = 8192;

/// A file that comes along with an answer.
enum Along {
    /// The program's end of a device file.
    Own(OwnedFd),
    /// The window's.
    Window,
    /// That of the device pages.
    Pages,
}

/// An answer on its way to a program.
struct Packet {
    bytes: Vec<u8>,
    along: Option<Along>,
    /// Too many files are on their way to programs: it is to be sent again after a while.
    is_delayed: bool,
}

/// What the worker is told of a program's end after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    /// The end of its process.
    UntilItEnds,
    /// That its process has nothing of the window mapped, which is looked at again and again.
    UntilItUnmaps,
}

/// A program.
struct Program {
    /// `None`: it has disconnected, and the worker still ends its session.
    connection: Option<UnixStream>,
    process: Process,
    /// It has disconnected, but its process may still use its memory. The worker is not told yet.
    held: Option<Held>,
    /// Whether it is told that there is no device.
    is_refused: bool,
    /// The user whose program it is.
    user: u32,
    /// Whether the worker knows of it.
    is_begun: bool,
    /// Whether the worker has answered its hello.
    is_greeted: bool,
    /// The request that the worker has not answered yet.
    asked: Option<Operation>,
    /// The answer that the program's socket has no room for.
    unsent: Option<Packet>,
}

/// A device file.
struct DeviceFile {
    end: OwnedFd,
    /// The kernel's number of the program's end.
    cookie: u64,
    token: [u8; TOKEN],
}

#[derive(Default)]
struct State {
    programs: HashMap<u32, Program>,
    files: HashMap<u32, DeviceFile>,
    /// Messages for the worker: kind and number.
    due: Vec<(u16, u32)>,
    /// Why no more messages can come from the worker.
    lost: Option<String>,
    /// The number of the last program.
    last: u32,
}

impl State {
    /// Whether the worker may have something to say.
    fn expects(&self) -> bool {
        let expects = |program: &Program| {
            let is_ended = program.connection.is_none() && program.held.is_none();
            program.is_begun && (program.asked.is_some() || is_ended)
        };
        !self.files.is_empty() || self.programs.values().any(expects)
    }
}

/// Programs and files. The thread that waits for them and the one that receives from the worker share them.
pub struct Programs {
    state: Mutex<State>,
    /// Something is expected of the worker from now on.
    expecting: Condvar,
    /// What the first of these threads waits for.
    pub readiness: Readiness,
    /// Wakes that thread.
    pub wake: Event,
    closer: Closer,
    window: OwnedFd,
    pages: Option<OwnedFd>,
    /// These two, as processes have them mapped.
    pub memory: Files,
    most_files: usize,
}

/// What may be done with programs now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Activity {
    /// No program and no file is left, but such as find no device.
    pub is_empty: bool,
    /// A program's process is to be looked at after a while.
    pub is_watched: bool,
    /// An answer is awaited.
    pub is_asked: bool,
    /// An answer is to be sent again after a while.
    pub is_delayed: bool,
}

fn packet(answer: Answer, bytes: &[u8], along: Option<Along>) -> Packet {
    let answer = Answer {
        // At most MOST.
        length: bytes.len() as u32,
        ..answer
    };
    Packet {
        bytes: [&answer.to_bytes()[..], bytes].concat(),
        along,
        is_delayed: false,
    }
}

/// The answer that a request failed.
fn refusal(error: libc::c_int) -> Packet {
    let answer = Answer {
        result: -error,
        ..Answer::default()
    };
    packet(answer, &[], None)
}

impl Programs {
    /// No programs, for a window and device pages.
    pub fn new(window: OwnedFd, pages: Option<OwnedFd>, most_files: usize) -> io::Result<Self> {
        Ok(Self {
            memory: Files::of_open([&window].into_iter().chain(&pages))?,
            state: Mutex::default(),
            expecting: Condvar::new(),
            readiness: Readiness::new()?,
            wake: Event::new()?,
            closer: Closer::default(),
            window,
            pages,
            most_files: most_files.min(MOST_FILES),
        })
    }

    /// A program connects. It is heard from [`begin`](Self::begin) on. An excess program is disconnected at once.
    pub fn connect(&self, connection: UnixStream) {
        let mut state = self.state.lock_unpoisoned();
        if state.programs.len() >= MOST_PROGRAMS {
            drop(state);
            base::note!(
                "gantry-agent: {MOST_PROGRAMS} programs have native contexts: another one is refused"
            );
            return self.closer.close(connection);
        }
        let mut number = state.last.wrapping_add(1);
        while state.programs.contains_key(&number) {
            number = number.wrapping_add(1);
        }
        state.last = number;
        let user = socket::user(&connection);
        let added = connection.set_nonblocking(true).and(user).and_then(|user| {
            let source = Source::Program(number);
            self.readiness
                .add(&connection, Interest::default(), source)?;
            Ok(user)
        });
        match added {
            Ok(user) => {
                let program = Program {
                    process: Process::of(&connection),
                    held: None,
                    is_refused: false,
                    connection: Some(connection),
                    user,
                    is_begun: false,
                    is_greeted: false,
                    asked: None,
                    unsent: None,
                };
                state.programs.insert(number, program);
            }
            Err(error) => {
                base::note!("gantry-agent: cannot serve a program: {error}");
                self.closer.close(connection);
            }
        }
    }

    /// The programs that the worker does not know of, of those that are admitted by process and user, with their users.
    /// They are heard from now on.
    pub fn begin(&self, admits: impl Fn(u32, u32) -> bool) -> Vec<(u32, u32)> {
        let mut begun = Vec::new();
        for (number, program) in &mut self.state.lock_unpoisoned().programs {
            if let Some(connection) = &program.connection
                && !program.is_begun
                && admits(program.process.number, program.user)
            {
                program.is_begun = true;
                let source = Source::Program(*number);
                self.readiness.change(connection, READ, source);
                begun.push((*number, program.user));
            }
        }
        begun
    }

    /// Programs that the worker does not know of find no device from now on. Returns whether there were any.
    pub fn refuse(&self) -> bool {
        let mut are_any = false;
        for (number, program) in &mut self.state.lock_unpoisoned().programs {
            if let Some(connection) = &program.connection
                && !program.is_begun
            {
                (program.is_begun, program.is_refused) = (true, true);
                let source = Source::Program(*number);
                self.readiness.change(connection, READ, source);
                are_any = true;
            }
        }
        are_any
    }

    /// What may be done now.
    pub fn activity(&self) -> Activity {
        let state = self.state.lock_unpoisoned();
        let mut unsent = state
            .programs
            .values()
            .filter_map(|program| program.unsent.as_ref());
        Activity {
            is_empty: state.programs.values().all(|program| program.is_refused)
                && state.files.is_empty(),
            is_watched: {
                let mut programs = state.programs.values();
                programs.any(|program| program.held == Some(Held::UntilItUnmaps))
            },
            is_delayed: unsent.any(|packet| packet.is_delayed),
            is_asked: state.expects(),
        }
    }

    /// Whether a program waits for a worker.
    pub fn are_waiting(&self) -> bool {
        let state = self.state.lock_unpoisoned();
        state.programs.values().any(|program| !program.is_begun)
    }

    /// Why no more messages can come from the worker.
    pub fn lost(&self) -> Option<String> {
        self.state.lock_unpoisoned().lost.clone()
    }

    /// No more messages can come from the worker.
    pub fn lose(&self, why: &str) {
        self.state.lock_unpoisoned().lost = Some(why.to_owned());
        self.wake.signal();
    }

    /// Messages that the worker is to get, without contents: kind and number.
    pub fn take_due(&self) -> Vec<(u16, u32)> {
        std::mem::take(&mut self.state.lock_unpoisoned().due)
    }

    /// Something may be readable on a program's connection, or there is room to write. A request replaces
    /// `bytes`; returns whether it is the worker's. A refused program is told that there is no device. An error: the
    /// program is to be disconnected.
    pub fn hear(&self, number: u32, bytes: &mut Vec<u8>) -> io::Result<bool> {
        let mut state = self.state.lock_unpoisoned();
        let Some(program) = state.programs.get_mut(&number) else {
            return Ok(false);
        };
        if program.unsent.is_some() {
            self.flush(number, program)?;
        }
        let Some(connection) = &program.connection else {
            return Ok(false);
        };
        if !program.is_begun {
            // Nothing but its end is waited for.
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // One more byte than a packet may have: a longer one is seen to be none.
        bytes.resize(HEADER + MOST + 1, 0);
        let received = socket::receive(connection, bytes);
        let (length, files) = match received.or_else(socket::FilesLost::arrived) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(false),
            received => received?,
        };
        let cookies: Vec<_> = files.iter().map(cookie).collect();
        for file in files {
            self.closer.close(file);
        }
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        bytes.truncate(length);
        let malformed = || io::Error::from(io::ErrorKind::InvalidData);
        let (request, _) = Request::from_packet(bytes).ok_or_else(malformed)?;
        if program.asked.is_some() || program.unsent.is_some() || has_unread(connection) {
            return Err(io::Error::other(
                "a request before the last answer was read",
            ));
        }
        if program.is_refused {
            self.send(number, program, refusal(libc::ENODEV))?;
            return Ok(false);
        }
        match (request.operation, &cookies[..]) {
            (Operation::Identify, _) => {
                let answer = match (program.is_greeted, &cookies[..]) {
                    (false, _) => Err(libc::EPROTO),
                    (true, [cookie]) => Ok(cookie.as_ref().ok().copied()),
                    (true, _) => Err(libc::EINVAL),
                };
                let found = answer.and_then(|cookie| {
                    let mut files = state.files.values();
                    let file = files.find(|file| Some(file.cookie) == cookie);
                    file.map(|file| file.token).ok_or(libc::ENOTTY)
                });
                let answer = match found {
                    Ok(token) => packet(Answer::default(), &token, None),
                    Err(error) => refusal(error),
                };
                if let Some(program) = state.programs.get_mut(&number) {
                    self.send(number, program, answer)?;
                }
                Ok(false)
            }
            // A file cannot leave this guest.
            (Operation::Call, [_, ..]) => {
                self.send(number, program, refusal(libc::EOPNOTSUPP))?;
                Ok(false)
            }
            (operation, _) => {
                program.asked = Some(operation);
                self.expecting.notify_all();
                Ok(true)
            }
        }
    }

    /// Disconnects a program. Returns whether the worker is to end its session: not as long as its process may use the
    /// memory, see [`release`](Self::release).
    pub fn disconnect(&self, number: u32) -> bool {
        let mut state = self.state.lock_unpoisoned();
        let Some(program) = state.programs.get_mut(&number) else {
            return false;
        };
        let Some(connection) = program.connection.take() else {
            return false;
        };
        program.unsent = None;
        self.close(connection);
        if !program.is_begun || program.is_refused {
            state.programs.remove(&number);
            return false;
        }
        program.held = Some(Held::UntilItUnmaps);
        let process = program.process.number;
        // The process may keep whoever looks at it.
        drop(state);
        let maps = Process::maps(process, &self.memory);
        let mut state = self.state.lock_unpoisoned();
        let Some(program) = state.programs.get_mut(&number) else {
            return false;
        };
        let source = Source::Process(number);
        let end = program.process.end.as_ref();
        let held = match maps {
            Ok(false) => None,
            _ if end.is_some_and(|end| self.readiness.add(end, READ, source).is_ok()) => {
                Some(Held::UntilItEnds)
            }
            Ok(true) => Some(Held::UntilItUnmaps),
            // Nobody can tell.
            Err(_) => None,
        };
        program.held = held;
        self.expecting.notify_all();
        held.is_none()
    }

    /// The process of a program that has disconnected does not use the memory any longer. Returns whether the worker is
    /// to end its session.
    pub fn release(&self, number: u32) -> bool {
        let mut state = self.state.lock_unpoisoned();
        let program = state.programs.get_mut(&number);
        let Some(program) = program.filter(|program| program.held.is_some()) else {
            return false;
        };
        program.held = None;
        // It is not waited for any longer.
        program.process.end = None;
        self.expecting.notify_all();
        true
    }

    /// The programs that are to be released, of those whose processes have to be looked at.
    pub fn unmapped(&self) -> Vec<u32> {
        let state = self.state.lock_unpoisoned();
        let programs = state.programs.iter();
        let held = programs.filter(|(_, program)| program.held == Some(Held::UntilItUnmaps));
        let held: Vec<_> = held
            .map(|(number, program)| (*number, program.process.number))
            .collect();
        drop(state);
        let held = held.into_iter();
        let unmapped =
            held.filter(|(_, process)| !Process::maps(*process, &self.memory).unwrap_or(false));
        unmapped.map(|(number, _)| number).collect()
    }

    fn close(&self, connection: UnixStream) {
        self.readiness.remove(&connection);
        let _ = connection.shutdown(Shutdown::Both);
        // The program may have sent files whose close hangs.
        self.closer.close(connection);
    }

    /// The last copy of a program's device file is closed. Returns whether the worker is to close it.
    pub fn close_file(&self, number: u32) -> bool {
        let file = self.state.lock_unpoisoned().files.remove(&number);
        let is_known = file.is_some();
        if let Some(file) = file {
            self.readiness.remove(&file.end);
            self.closer.close(file.end);
        }
        is_known
    }

    /// The processes of programs that are served, each once. Those that have ended do not count.
    pub fn processes(&self) -> Vec<u32> {
        let state = self.state.lock_unpoisoned();
        let programs = state.programs.values();
        let served = programs
            .filter(|program| program.connection.is_some() && program.is_begun)
            .filter(|program| !program.is_refused);
        let mut processes: Vec<_> = served.map(|program| program.process.number).collect();
        processes.sort_unstable();
        processes.dedup();
        processes.retain(|process| Path::new("/proc").join(process.to_string()).exists());
        processes
    }

    /// How many device files are open.
    pub fn files(&self) -> usize {
        self.state.lock_unpoisoned().files.len()
    }

    /// Ends the connections of the programs that are served, which have no device files. Others wait on.
    pub fn leave(&self) {
        let mut state = self.state.lock_unpoisoned();
        let served = state.programs.extract_if(|_, program| program.is_begun);
        for (_, mut program) in served {
            if let Some(connection) = program.connection.take() {
                self.close(connection);
            }
        }
        state.due.clear();
        state.lost = None;
    }

    /// Ends all connections and files.
    pub fn clear(&self) {
        let mut state = self.state.lock_unpoisoned();
        for (_, mut program) in state.programs.drain() {
            if let Some(connection) = program.connection.take() {
                self.close(connection);
            }
        }
        for (_, file) in state.files.drain() {
            self.readiness.remove(&file.end);
            self.closer.close(file.end);
        }
        state.due.clear();
        state.lost = None;
    }

    /// Waits until the worker may have something to say. Returns whether this took any time.
    pub fn wait_until_expecting(&self, is_stopped: impl Fn() -> bool) -> bool {
        let mut state: MutexGuard<'_, State> = self.state.lock_unpoisoned();
        let mut has_waited = false;
        while !state.expects() && !is_stopped() {
            has_waited = true;
            let woken = self.expecting.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
        has_waited
    }

    /// Wakes the thread that waits until something is expected.
    pub fn rouse(&self) {
        // It either sees what has changed, or waits already.
        drop(self.state.lock_unpoisoned());
        self.expecting.notify_all();
    }

    /// Handles a message of the worker. The error says what is wrong with it.
    pub fn handle(&self, header: Header, body: &[u8]) -> Result<(), String> {
        let number = u32::try_from(header.sequence)
            .map_err(|_| format!("the worker names number {}", header.sequence))?;
        let mut state = self.state.lock_unpoisoned();
        match header.opcode {
            to_agent::ANSWER => {
                let answer = Answer::from_packet(body);
                let (answer, bytes) = answer.ok_or("the worker's answer is none")?;
                self.answer(&mut state, number, answer, bytes)?;
            }
            to_agent::EVENT => {
                if let Some(file) = state.files.get(&number)
                    && !has_unread(&file.end)
                {
                    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
                    // SAFETY: one byte of a constant. A program's end that is full or gone needs none.
                    unsafe {
                        libc::send(file.end.as_raw_fd(), [1u8].as_ptr().cast(), 1, flags);
                    }
                }
            }
            to_agent::ENDED => {
                let program = state.programs.get(&number);
                match program.map(|program| (&program.connection, program.held)) {
                    // The worker has ended it by itself. It is disconnected where programs are waited for, and its
                    // memory is its own until its process has ended.
                    Some((Some(connection), _)) => {
                        let _ = connection.shutdown(Shutdown::Both);
                    }
                    Some((None, None)) => {
                        state.programs.remove(&number);
                        self.wake.signal();
                    }
                    Some((None, Some(_))) | None => {}
                }
            }
            other => return Err(format!("the worker sends a message of kind {other}")),
        }
        Ok(())
    }

    /// Passes the worker's answer on to a program.
    fn answer(
        &self,
        state: &mut State,
        number: u32,
        answer: Answer,
        bytes: &[u8],
    ) -> Result<(), String> {
        let Some(program) = state.programs.get_mut(&number) else {
            return Ok(());
        };
        let Some(operation) = program.asked.take() else {
            return Ok(());
        };
        let is_gone = program.connection.is_none();
        let passed = match operation {
            _ if answer.result < 0 => packet(answer, bytes, None),
            Operation::Hello => {
                program.is_greeted = true;
                packet(answer, bytes, Some(Along::Window))
            }
            Operation::Open => {
                let file = u32::try_from(answer.a).ok().zip(bytes.try_into().ok());
                let (file, token) = file.ok_or("the worker's answer names no file")?;
                if state.files.contains_key(&file) {
                    return Err(format!("the worker opens file {file} twice"));
                }
                let opened = match is_gone {
                    // Nobody will ever have it.
                    true => Err(io::ErrorKind::BrokenPipe.into()),
                    false => self.open(state, file, token),
                };
                match opened {
                    Ok(end) => packet(answer, bytes, Some(Along::Own(end))),
                    Err(error) => {
                        state.due.push((to_worker::CLOSE, file));
                        self.wake.signal();
                        refusal(error.raw_os_error().unwrap_or(libc::EIO))
                    }
                }
            }
            Operation::Map if answer.a == DEVICE => match self.pages {
                Some(_) => packet(answer, bytes, Some(Along::Pages)),
                None => refusal(libc::ENODEV),
            },
            _ => packet(answer, bytes, None),
        };
        if let Some(program) = state.programs.get_mut(&number)
            && !is_gone
            && self.send(number, program, passed).is_err()
            && let Some(connection) = &program.connection
        {
            // Its end is seen where programs are waited for.
            let _ = connection.shutdown(Shutdown::Both);
        }
        let unsent = state.programs.get(&number).map(|program| &program.unsent);
        if matches!(
            unsent,
            Some(Some(Packet {
                is_delayed: true,
                ..
            }))
        ) {
            self.wake.signal();
        }
        Ok(())
    }

    /// Makes a device file. Returns the program's end.
    fn open(&self, state: &mut State, number: u32, token: [u8; TOKEN]) -> io::Result<OwnedFd> {
        if state.files.len() >= self.most_files {
            return Err(io::Error::from_raw_os_error(libc::ENFILE));
        }
        let [end, program] = socket::pair_for_packets()?;
        let cookie = cookie(&program)?;
        socket::refuse_files(&end);
        let source = Source::File(number);
        self.readiness.add(&end, Interest::default(), source)?;
        let file = DeviceFile { end, cookie, token };
        state.files.insert(number, file);
        Ok(program)
    }

    /// Sends an answer, or keeps it until there is room for it.
    fn send(&self, number: u32, program: &mut Program, packet: Packet) -> io::Result<()> {
        program.unsent = Some(packet);
        self.flush(number, program)
    }

    fn flush(&self, number: u32, program: &mut Program) -> io::Result<()> {
        let (Some(connection), Some(packet)) = (&program.connection, &mut program.unsent) else {
            return Ok(());
        };
        let file: Option<BorrowedFd<'_>> = match &packet.along {
            None => None,
            Some(Along::Own(file)) => Some(file.as_fd()),
            Some(Along::Window) => Some(self.window.as_fd()),
            Some(Along::Pages) => self.pages.as_ref().map(AsFd::as_fd),
        };
        let sent = socket::send(connection, &packet.bytes, file.as_slice());
        let write = match sent {
            Ok(()) => {
                program.unsent = None;
                false
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => true,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => true,
            Err(error) if error.raw_os_error() == Some(libc::ETOOMANYREFS) => {
                packet.is_delayed = true;
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let interest = Interest { write, ..READ };
        let source = Source::Program(number);
        self.readiness.change(connection, interest, source);
        Ok(())
    }

    /// Tries again to send answers that could not be sent.
    pub fn retry(&self) {
        for (number, program) in &mut self.state.lock_unpoisoned().programs {
            if self.flush(*number, program).is_err()
                && let Some(connection) = &program.connection
            {
                let _ = connection.shutdown(Shutdown::Both);
            }
        }
    }
}
