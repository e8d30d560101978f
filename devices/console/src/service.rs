//! The console thread: passes input to the guest and waiting output to the host.

use std::{
    fs::File,
    io::{self, ErrorKind, Read},
    mem,
    os::fd::{OwnedFd, RawFd},
    os::unix::net::UnixStream,
    sync::Arc,
    time::{Duration, Instant},
};

use device_model::{
    named_socket::NamedSocket,
    thread::{ThreadRole, ThreadSpawner},
    worker::{DeviceWorker, NotStarted, Worker},
};
use event_manager::{EventOps, Events, MutEventSubscriber};
use vmm_sys_util::epoll::EventSet;

use super::{
    InputSink,
    backend::{ConsoleBackend, Input},
    output::{ConsoleOutput, Flushed, Target, writable},
};

/// Maximum size of one read from the host, and of the input that is held back per console.
const INPUT_CHUNK: usize = 4096;

/// Maximum time that a stop waits for slow readers, for all consoles together.
const DRAIN_TIME: Duration = Duration::from_millis(100);

/// Tokens in the event loop: `line * TOKENS + kind`.
const TOKENS: u32 = 8;
const ROOM: u32 = 0;
const PENDING: u32 = 1;
const INPUT: u32 = 2;
const OUTPUT: u32 = 3;
const LISTENER: u32 = 4;

/// What the console thread watches an input for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Watch {
    Nothing,
    /// Only the peer's hang-up: input is held back, or has ended while output continues.
    HangUp,
    Input,
}

struct Stream {
    file: File,
    watch: Watch,
    /// The file cannot be polled (a regular file, `/dev/zero`): reads never block.
    always_ready: bool,
    /// The peer has closed; some of its input may still be unread.
    hung_up: bool,
}

impl Stream {
    fn new(file: File) -> Self {
        Self {
            file,
            watch: Watch::Nothing,
            always_ready: false,
            hung_up: false,
        }
    }

    fn watch(&mut self, line: u32, wanted: Watch, ops: &mut EventOps) {
        if self.watch == wanted || self.always_ready {
            return;
        }
        let set = match wanted {
            Watch::Input => EventSet::IN,
            Watch::HangUp | Watch::Nothing => EventSet::empty(),
        };
        let events = Events::with_data(&self.file, line * TOKENS + INPUT, set);
        let result = match (self.watch, wanted) {
            (_, Watch::Nothing) => ops.remove(events),
            (Watch::Nothing, _) => ops.add(events),
            _ => ops.modify(events),
        };
        match result {
            Ok(()) => self.watch = wanted,
            Err(event_manager::Error::Epoll(error)) if error.errno() == libc::EPERM => {
                self.always_ready = true;
            }
            Err(error) => log::error!("cannot watch a console's input: {error}"),
        }
    }
}

enum Source {
    None,
    Stream(Stream),
    Socket {
        socket: NamedSocket,
        client: Option<Stream>,
        listening: bool,
    },
}

impl Source {
    fn stream(&mut self) -> Option<&mut Stream> {
        match self {
            Self::None => None,
            Self::Stream(stream) => Some(stream),
            Self::Socket { client, .. } => client.as_mut(),
        }
    }
}

/// A console, and the device that receives its input.
pub struct ConsoleLine {
    output: ConsoleOutput,
    source: Source,
    sink: Option<Arc<dyn InputSink>>,
    /// Input for which the device has no room yet.
    held: Vec<u8>,
    /// The output's descriptor, while it is watched.
    blocked_on: Option<RawFd>,
    _guards: Vec<Box<dyn Send>>,
}

impl ConsoleLine {
    /// Connects `backend` with the device `sink`. Without a device, input is not read (a socket's
    /// is read and discarded).
    pub fn new(backend: ConsoleBackend, sink: Option<Arc<dyn InputSink>>) -> Self {
        let source = match backend.input {
            Input::Stream(file) if sink.is_some() => Source::Stream(Stream::new(file)),
            Input::Stream(_) | Input::None => Source::None,
            Input::Socket(socket) => Source::Socket {
                socket,
                client: None,
                listening: false,
            },
        };
        Self {
            output: backend.output,
            source,
            sink,
            held: Vec::new(),
            blocked_on: None,
            _guards: backend.guards,
        }
    }

    /// Whether the console thread has any work for this console.
    fn needs_thread(&self) -> bool {
        !matches!(self.source, Source::None) || self.output.may_wait()
    }

    fn init(&mut self, line: u32, ops: &mut EventOps) {
        // A new event loop does not watch anything yet.
        self.blocked_on = None;
        if let Some(stream) = self.source.stream() {
            stream.watch = Watch::Nothing;
        }
        let base = line * TOKENS;
        let pending = Events::with_data(self.output.pending(), base + PENDING, EventSet::IN);
        add(pending, ops);
        if let Some(sink) = &self.sink {
            add(
                Events::with_data(sink.room_event(), base + ROOM, EventSet::IN),
                ops,
            );
        }
        if let Source::Socket { listening, .. } = &mut self.source {
            *listening = false;
        }
        self.listen(line, ops);
        self.flush(line, ops);
        self.pump(line, ops);
    }

    fn process(&mut self, line: u32, events: Events, ops: &mut EventOps) {
        match events.data() % TOKENS {
            ROOM => {
                if let Some(sink) = &self.sink {
                    // Empty if the event was spurious; then the attempt below does no harm.
                    let _ = sink.room_event().read();
                }
                self.pump(line, ops);
            }
            PENDING => {
                let _ = self.output.pending().read();
                self.flush(line, ops);
            }
            INPUT => {
                let set = events.event_set();
                if set.intersects(EventSet::HANG_UP | EventSet::ERROR)
                    && let Some(stream) = self.source.stream()
                {
                    stream.hung_up = true;
                }
                self.pump(line, ops);
            }
            OUTPUT => self.flush(line, ops),
            LISTENER => self.accept(line, ops),
            _ => {}
        }
    }

    /// Moves input from the host to the device: first what is held back, then one read.
    fn pump(&mut self, line: u32, ops: &mut EventOps) {
        self.offer();
        let held = !self.held.is_empty();
        let Some(stream) = self.source.stream() else {
            return;
        };
        if held {
            // A hang-up would be reported as long as it is watched: once is enough.
            let wanted = if stream.hung_up || !is_socket(&self.source) {
                Watch::Nothing
            } else {
                Watch::HangUp
            };
            if let Some(stream) = self.source.stream() {
                stream.watch(line, wanted, ops);
            }
            return;
        }
        let mut chunk = [0; INPUT_CHUNK];
        match stream.file.read(&mut chunk) {
            Ok(0) => return self.end_of_input(line, ops),
            Ok(count) => self.held.extend(chunk.get(..count).unwrap_or_default()),
            Err(error) => match error.kind() {
                ErrorKind::Interrupted => {}
                ErrorKind::WouldBlock if !stream.always_ready && !stream.hung_up => {}
                _ => return self.hang_up(line, ops),
            },
        }
        self.offer();
        self.wait_for_more(line, ops);
    }

    fn wait_for_more(&mut self, line: u32, ops: &mut EventOps) {
        let held = !self.held.is_empty();
        let socket = is_socket(&self.source);
        let Some(stream) = self.source.stream() else {
            return;
        };
        let wanted = match (held, stream.hung_up) {
            (false, false) => Watch::Input,
            (true, false) if socket => Watch::HangUp,
            _ => Watch::Nothing,
        };
        stream.watch(line, wanted, ops);
        if !held && (stream.always_ready || stream.hung_up) {
            // Nothing else will wake the thread for the rest: continue after other events had a
            // turn.
            let sink = self.sink.as_ref();
            let again = sink.map_or(self.output.pending(), |sink| sink.room_event());
            let _ = again.write(1);
        }
    }

    /// Passes as much input as the device accepts.
    fn offer(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let taken = match &self.sink {
            Some(sink) => sink.enqueue(&self.held).min(self.held.len()),
            None => self.held.len(),
        };
        self.held.drain(..taken);
    }

    /// Handles the end of the host's input.
    fn end_of_input(&mut self, line: u32, ops: &mut EventOps) {
        let socket = is_socket(&self.source);
        match self.source.stream() {
            // A client that closed only its sending side may still read.
            Some(stream) if socket && !stream.hung_up => stream.watch(line, Watch::HangUp, ops),
            _ => self.hang_up(line, ops),
        }
    }

    /// Drops the input. A socket's client is disconnected, and the next one may connect.
    fn hang_up(&mut self, line: u32, ops: &mut EventOps) {
        if let Some(stream) = self.source.stream() {
            stream.watch(line, Watch::Nothing, ops);
        }
        if is_socket(&self.source) {
            self.unwatch_output(line, ops);
            self.output.set_target(Target::Absent);
            if let Source::Socket { client, .. } = &mut self.source {
                *client = None;
            }
            self.listen(line, ops);
        } else {
            self.source = Source::None;
        }
    }

    fn listen(&mut self, line: u32, ops: &mut EventOps) {
        if let Source::Socket {
            socket, listening, ..
        } = &mut self.source
            && !mem::replace(listening, true)
        {
            let token = line * TOKENS + LISTENER;
            add(
                Events::with_data(&socket.listener, token, EventSet::IN),
                ops,
            );
        }
    }

    fn accept(&mut self, line: u32, ops: &mut EventOps) {
        let Source::Socket {
            socket,
            client,
            listening,
        } = &mut self.source
        else {
            return;
        };
        let accepted = socket
            .accept()
            .and_then(|stream| Ok((stream.try_clone()?, stream)));
        let (reader, writer): (UnixStream, UnixStream) = match accepted {
            Ok(pair) => pair,
            Err(error) => {
                if !matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted
                ) {
                    // Out of descriptors or memory: to keep watching would spin.
                    log::error!("console socket: cannot accept a client: {error}");
                    let events = Events::new(&socket.listener, EventSet::IN);
                    *listening = ops.remove(events).is_err();
                }
                return;
            }
        };
        match client {
            Some(current) if !current.hung_up => {
                log::warn!("console socket: a second client was turned away");
                return;
            }
            // It has left with input that the guest has not read; that input stays held back.
            Some(_) => self.hang_up(line, ops),
            None => {}
        }
        if let Source::Socket { client, .. } = &mut self.source {
            *client = Some(Stream::new(File::from(OwnedFd::from(reader))));
        }
        let target = Target::Direct(File::from(OwnedFd::from(writer)));
        self.output.set_target(target);
        self.flush(line, ops);
        self.pump(line, ops);
    }

    fn flush(&mut self, line: u32, ops: &mut EventOps) {
        match self.output.flush_backlog() {
            Flushed::All | Flushed::Absent => self.unwatch_output(line, ops),
            Flushed::Blocked(fd) if self.blocked_on.is_none() => {
                let token = line * TOKENS + OUTPUT;
                add(Events::with_data_raw(fd, token, EventSet::OUT), ops);
                self.blocked_on = Some(fd);
            }
            Flushed::Blocked(_) => {}
        }
    }

    fn unwatch_output(&mut self, line: u32, ops: &mut EventOps) {
        if let Some(fd) = self.blocked_on.take() {
            let token = line * TOKENS + OUTPUT;
            if let Err(error) = ops.remove(Events::with_data_raw(fd, token, EventSet::OUT)) {
                log::error!("cannot stop watching a console's output: {error}");
            }
        }
    }

    /// Gives slow readers until `deadline` to accept the rest.
    fn drain(&mut self, deadline: Instant) {
        while let Flushed::Blocked(fd) = self.output.flush_backlog() {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = i32::try_from(left.as_millis()).unwrap_or(0);
            if timeout == 0 || !writable(fd, timeout) {
                return;
            }
        }
    }
}

/// Whether it is a socket, whose two directions end separately.
fn is_socket(source: &Source) -> bool {
    matches!(source, Source::Socket { .. })
}

fn add(events: Events, ops: &mut EventOps) {
    if let Err(error) = ops.add(events) {
        log::error!("cannot watch a console: {error}");
    }
}

/// All consoles, as the worker of the console thread.
struct Lines(Vec<ConsoleLine>);

impl MutEventSubscriber for Lines {
    fn init(&mut self, ops: &mut EventOps) {
        for (index, line) in (0..).zip(&mut self.0) {
            line.init(index, ops);
        }
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        let index = events.data() / TOKENS;
        if let Some(line) = self.0.get_mut(index as usize) {
            line.process(index, events, ops);
        }
    }
}

impl DeviceWorker for Lines {
    fn drain(&mut self) {
        let deadline = Instant::now() + DRAIN_TIME;
        for line in &mut self.0 {
            line.drain(deadline);
        }
    }
}

enum State {
    Stopped(Lines),
    Running(Worker<Lines>),
    /// The thread has died.
    Failed,
}

/// Serves the consoles of a VM with one thread, `_console`.
///
/// Stop it while devices are saved or restored, because it passes input to them. Dropping it stops
/// it and restores the terminal.
pub struct ConsoleService {
    state: State,
}

impl ConsoleService {
    /// Creates a stopped service for `lines`.
    pub fn new(lines: Vec<ConsoleLine>) -> Self {
        Self {
            state: State::Stopped(Lines(lines)),
        }
    }

    /// Starts the thread, unless it is already running or no console needs one.
    pub fn start(&mut self, spawner: &dyn ThreadSpawner) -> io::Result<()> {
        let lines = match mem::replace(&mut self.state, State::Failed) {
            State::Stopped(lines) if lines.0.iter().any(ConsoleLine::needs_thread) => lines,
            State::Failed => return Err(io::Error::other("the console thread has failed before")),
            other => {
                self.state = other;
                return Ok(());
            }
        };
        match Worker::start(spawner, ThreadRole::Console, "_console", lines) {
            Ok(worker) => {
                self.state = State::Running(worker);
                Ok(())
            }
            Err(NotStarted { source, inner }) => {
                self.state = State::Stopped(inner);
                Err(source)
            }
        }
    }

    /// Stops the thread. Waits at most 100 ms for slow readers to accept waiting output, and keeps
    /// the rest. The consoles stay open.
    pub fn stop(&mut self) {
        self.state = match mem::replace(&mut self.state, State::Failed) {
            State::Running(worker) => worker.stop().map_or(State::Failed, State::Stopped),
            other => other,
        };
    }
}

impl Drop for ConsoleService {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
#[path = "service_tests.rs"]
mod tests;
