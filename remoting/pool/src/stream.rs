//! Applications that connect by a stream: the messages about them between a worker and its pool, and
//! the bridge between the stream and the window of an application that has completed its
//! [handshake](super::handshake).

use std::{
    io,
    mem::ManuallyDrop,
    os::{
        fd::{BorrowedFd, FromRawFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    process::Command,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use base::{Chain, Unpoisoned};
use clap::ValueEnum;
use remoting_proto::{port::ATTACHMENT, wire::Api};
use remoting_stream::{
    bridge::{Bridge, Ended},
    channel::Channel,
    tls::Keeper,
};
use remoting_transport::{socket, window::Window};

use super::compiled::owner::is_unit;

/// The first byte of a message to the pool: the worker is taken, and hands over its connection. The
/// answer is a byte.
pub(super) const TAKEN: u8 = 1;
/// The pool's answer to that: the worker serves.
pub(super) const SERVE: u8 = 1;
/// The pool's answer to that: whoever has connected has workers enough.
pub(super) const ENOUGH: u8 = 0;
/// The first byte of a message to the pool: a signature is wanted. A scheme and a message follow.
pub(super) const SIGN: u8 = 2;
/// A message to the pool: the driver has started threads, before it is known whose application the
/// worker serves.
pub(super) const THREADS: u8 = 3;
/// The first byte of a message to the pool: whose compiled programs the worker uses. The name of a
/// unit follows.
pub(super) const OWNED: u8 = 4;
/// The first byte of a message to the pool: the worker cannot serve anybody. Why follows, as text.
pub(super) const FAILED: u8 = 5;
/// The first byte of a message to the pool, before anything of the application's runs: what the worker serves. The size
/// of the window in eight bytes, and a machine's attachment follow; the window's file comes along, with a machine's.
pub(super) const SERVES: u8 = 6;
/// The longest message to the pool, in bytes; its answer may be twice as long.
pub const LONGEST: usize = 512;

/// Longest wait while too many descriptors of this user are in flight.
const CROWDED: Duration = Duration::from_secs(10);
/// How often to try again meanwhile.
const CROWDED_RETRY: Duration = Duration::from_millis(10);

/// What a worker says to its pool, which takes nobody's word for it: native code may run in a worker
/// that serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said<'a> {
    /// It is taken; the connection comes along.
    Taken,
    /// A signature is wanted: a scheme and a message.
    Sign(&'a [u8]),
    /// Its driver has started threads.
    Threads,
    /// Whose compiled programs it uses: the name of a unit, which can be that of a file.
    Owned(&'a str),
    /// It cannot serve anybody: why.
    Failed(&'a str),
    /// What it serves: the size of the window, and a machine's attachment, if it is a machine's.
    Serves(u64, &'a [u8]),
}

impl<'a> Said<'a> {
    /// A message that came with so many files; none if it means nothing.
    pub fn of(message: &'a [u8], files: usize) -> Option<Self> {
        match message {
            [TAKEN] if files == 1 => Some(Self::Taken),
            [THREADS] => Some(Self::Threads),
            [SIGN, request @ ..] => Some(Self::Sign(request)),
            [OWNED, unit @ ..] => {
                let unit = str::from_utf8(unit).ok();
                unit.filter(|unit| is_unit(unit)).map(Self::Owned)
            }
            [SERVES, place @ ..] => {
                let (window, attachment) = place.split_first_chunk()?;
                let fits = match attachment.len() {
                    0 => files == 1,
                    ATTACHMENT => files == 4,
                    _ => false,
                };
                fits.then_some(Self::Serves(u64::from_le_bytes(*window), attachment))
            }
            [FAILED, why @ ..] => str::from_utf8(why).ok().map(Self::Failed),
            _ => None,
        }
    }

    /// The pool's answer to a request for a signature.
    pub fn answer(keeper: Option<&Keeper>, request: &[u8]) -> Vec<u8> {
        let signed = keeper.and_then(|keeper| {
            let (scheme, message) = request.split_first_chunk()?;
            keeper.sign(u16::from_le_bytes(*scheme), message)
        });
        match signed {
            Some(signature) => [&[1], &signature[..]].concat(),
            None => vec![0],
        }
    }
}

/// What kind of streams a worker takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum StreamProtocol {
    /// Those of a Unix socket.
    Unix,
    /// Those of a port, without TLS.
    Tcp,
    /// Those of a port, by TLS.
    Tls,
}

/// How a worker takes streams; made by the pool from what it was told itself.
#[derive(Clone, Debug, Default, clap::Args)]
// Those of workers, of which these are a part, are the group of this name.
#[group(skip)]
pub struct Options {
    /// The kind of streams.
    #[arg(long, hide = true)]
    pub stream: Option<StreamProtocol>,
    /// For a port: this machine's certificate, and those between it and its authority's, in PEM.
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// For a port: the certificates of the authority whose applications are served, in PEM.
    #[arg(long, value_name = "FILE")]
    pub tls_client_ca: Option<PathBuf>,
    /// Numbers of the schemes that the pool signs by.
    #[arg(long, hide = true, value_delimiter = ',')]
    pub tls_schemes: Vec<u16>,
}

/// Tells a worker how it is to take streams.
pub(super) fn pass_on(
    command: &mut Command,
    kind: StreamProtocol,
    keeper: Option<&Keeper>,
    options: &Options,
) {
    if let Some(kind) = kind.to_possible_value() {
        command.args(["--stream", kind.get_name()]);
    }
    let files = [
        ("--tls-cert", &options.tls_cert),
        ("--tls-client-ca", &options.tls_client_ca),
    ];
    for (name, path) in files {
        if let Some(path) = path {
            command.arg(name).arg(path);
        }
    }
    if let Some(keeper) = keeper {
        let schemes: Vec<_> = keeper.schemes().iter().map(u16::to_string).collect();
        command.args(["--tls-schemes", &schemes.join(",")]);
    }
}

/// Tells the pool what this worker serves. To be called before anything of the application's runs.
///
/// # Errors
/// The pool has ended, or as many descriptors are in flight as may be.
pub(super) fn tell_place(
    attachment: &[u8],
    window: u64,
    files: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let message = [&[SERVES], &window.to_le_bytes()[..], attachment].concat();
    hand_over(|| socket::send(&channel(), &message, files))
}

/// Sends files; retries while too many descriptors of this user are in flight, until the longest wait is over.
pub(super) fn hand_over(mut send: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    let until = Instant::now() + CROWDED;
    loop {
        match send() {
            Err(error) if is_crowded(&error) && Instant::now() < until => {
                thread::sleep(CROWDED_RETRY);
            }
            sent => return sent,
        }
    }
}

/// Whether files could not be sent because too many of this user's are in flight.
pub(super) fn is_crowded(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ETOOMANYREFS)
}

/// Tells the pool why this worker cannot serve anybody, which says it once for all of them. False if it is too long
/// for that. A pool that has ended has said it before.
pub(super) fn tell_failure(error: &dyn std::error::Error) -> bool {
    let message = [&[FAILED], Chain(error).to_string().as_bytes()].concat();
    if message.len() > LONGEST {
        return false;
    }
    let _ = socket::send(&channel(), &message, &[]);
    true
}

/// What a message has that is none: a driver has printed it, as the channel is its standard output, and may have said so
/// why it fails. What its worker says of that comes with it or later.
pub(super) fn printed(message: &[u8]) -> Option<String> {
    let text = message.split(|byte| *byte == FAILED).next()?;
    let text = String::from_utf8_lossy(text).replace(char::is_control, " ");
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// The pool's channel: this process's standard output, until it is known whose application it
/// serves.
pub(super) fn channel() -> ManuallyDrop<UnixStream> {
    // SAFETY: the standard output is the pool's channel, and stays open.
    ManuallyDrop::new(unsafe { UnixStream::from_raw_fd(libc::STDOUT_FILENO) })
}

/// Has the pool sign. It always answers: while it does not, it is stopped, and ends with it.
pub(super) fn ask(scheme: u16, message: &[u8]) -> io::Result<Vec<u8>> {
    // One question at a time: answers have no numbers.
    static ASKING: Mutex<()> = Mutex::new(());
    let _asking = ASKING.lock_unpoisoned();
    let channel = channel();
    let mut request = vec![SIGN];
    request.extend(scheme.to_le_bytes());
    request.extend_from_slice(message);
    socket::send(&channel, &request, &[])?;
    let mut answer = [0; LONGEST * 2];
    let (count, _) = socket::receive(&channel, &mut answer)?;
    match answer[..count] {
        [1, ref signature @ ..] => Ok(signature.to_vec()),
        _ => Err(io::ErrorKind::PermissionDenied.into()),
    }
}

/// Starts the threads that carry over what an application and this worker say to each other. When
/// the connection ends, this process does.
pub(super) fn start<A: Api>(window: &Arc<Window>, channel: Channel) -> io::Result<()> {
    let Bridge { outward, inward } = Bridge::<A>::worker(window, channel.split());
    let leave = |ended: Ended| {
        if !matches!(ended, Ended::Closed) {
            base::note!("gantry-accel: an application's connection has ended: {ended}");
        }
        // SAFETY: ends the process at once: the driver's own clean-up could wait for kernels.
        unsafe { libc::_exit(0) }
    };
    thread::Builder::new()
        .name("outward".to_owned())
        .spawn(move || leave(outward.run()))?;
    thread::Builder::new()
        .name("inward".to_owned())
        .spawn(move || leave(inward.run()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use remoting_opencl::{Server, testing};
    use remoting_proto::{
        apis::opencl::{
            OpenCl,
            calls::{Call, MemId, Order, QueueId, ReadBuffer, StageId, Unstage, WindowRange},
        },
        wire::{Flags, Header, frame::HEADER},
    };
    use remoting_session::server::Error;
    use remoting_stream::channel::Socket;
    use remoting_transport::{endpoint::Receiver, port_bell::Waker, window::Slice};

    use super::*;

    /// A worker that is reached by a stream, before an OpenCL that does nothing.
    struct Worker {
        server: Server,
        calls: Receiver<Slice, Waker>,
        bridge: Bridge<OpenCl>,
        /// The application's end.
        here: UnixStream,
        /// How many pages its window has: as many reads may be owed.
        pages: u32,
    }

    impl Worker {
        fn new() -> Self {
            let (server, calls, window) = testing::server();
            let (here, there) = UnixStream::pair().unwrap();
            let halves = Channel::plain(Socket::new(there.into())).split();
            Self {
                server,
                calls,
                bridge: Bridge::worker(&window, halves),
                here,
                pages: window.size() as u32 / 4096,
            }
        }

        /// Carries a call over and serves it.
        fn serve<C: Call>(&mut self, call: &C, flags: Flags) -> Result<bool, Error> {
            let mut body = Vec::new();
            call.put(&mut body);
            let header = Header {
                length: body.len() as u32,
                opcode: C::OPCODE,
                flags,
                sequence: 1,
            };
            let frame = [&header.to_bytes(), &body[..]].concat();
            self.here.write_all(&frame).unwrap();
            self.bridge.inward.step().unwrap();
            self.server.turn(&mut self.calls, &mut body)
        }
    }

    /// For a queue that is not there.
    fn order() -> Order {
        Order {
            queue: QueueId(7),
            wait: Vec::new(),
            event: None,
        }
    }

    fn place(stage: u32) -> WindowRange {
        WindowRange {
            offset: 2 << 20,
            length: 4096,
            stage: Some(StageId(stage)),
        }
    }

    #[test]
    fn what_a_driver_prints_is_told_from_what_its_worker_says() {
        for message in [&b"no\nlicence\n"[..], b"no\nlicence\n\x05cannot open it"] {
            assert_eq!(printed(message).as_deref(), Some("no licence"));
        }
        for message in [&b""[..], b" \n", b"\x05cannot open it"] {
            assert_eq!(printed(message), None);
        }
    }

    #[test]
    fn files_are_sent_again_while_too_many_are_in_flight_and_only_then() {
        let mut sent = 0;
        let crowded = |error| io::Error::from_raw_os_error(error);
        let outcome = hand_over(|| {
            sent += 1;
            match sent {
                9 => Ok(()),
                _ => Err(crowded(libc::ETOOMANYREFS)),
            }
        });
        assert!(outcome.is_ok() && sent == 9);
        let gone = hand_over(|| Err(crowded(libc::EPIPE))).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn what_a_worker_serves_comes_with_the_files_that_belong_to_it() {
        let message = |attachment: usize| [&[SERVES][..], &[7; 8], &vec![1; attachment]].concat();
        let is_said = |attachment, files| {
            let message = message(attachment);
            matches!(Said::of(&message, files), Some(Said::Serves(..)))
        };
        assert!(is_said(0, 1) && is_said(ATTACHMENT, 4));
        for wrong in [(0, 0), (0, 4), (ATTACHMENT, 1), (ATTACHMENT - 1, 4), (1, 1)] {
            assert!(!is_said(wrong.0, wrong.1), "{wrong:?}");
        }
        assert_eq!(Said::of(&[SERVES, 1, 2], 1), None);
    }

    #[test]
    fn reads_that_are_refused_are_owed_no_longer() {
        let mut worker = Worker::new();
        for stage in 0..2 * worker.pages {
            let read = ReadBuffer {
                order: order(),
                mem: MemId(0),
                offset: 0,
                to: place(stage),
            };
            assert!(worker.serve(&read, Flags::ANSWER).unwrap());
            assert!(worker.bridge.outward.step().unwrap());
            // The release, and the answer.
            let got = worker.here.read(&mut [0; 4096]).unwrap();
            assert!(got > 2 * HEADER && got < 4 * HEADER, "{got} bytes");
        }
    }

    #[test]
    fn who_names_more_stages_than_there_can_be_is_not_served_any_more() {
        let mut worker = Worker::new();
        let most = 2 * worker.pages;
        for stage in 0..=most {
            let unstage = Unstage {
                order: order(),
                place: place(stage),
            };
            let served = worker.serve(&unstage, Flags::default());
            assert_eq!(served.is_ok(), stage < most, "{stage}: {served:?}");
        }
    }
}
