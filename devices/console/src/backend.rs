//! Opens the host end of a console.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{
        fd::{AsRawFd, FromRawFd, RawFd},
        unix::fs::{FileTypeExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use device_model::named_socket::{NameError, NamedSocket, SharedSocket};

use super::{
    output::{ConsoleOutput, Target},
    terminal::{Pty, RawTerminal, window_size},
};

/// The host end of a console.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum ConsoleMode {
    /// The guest has no such device. If opened, it behaves like [`ConsoleMode::Null`].
    Off,
    /// Output is discarded, and there is no input.
    Null,
    /// Standard output and standard input; a terminal on standard input is set to raw mode.
    Tty,
    /// A new pseudo terminal; see [`ConsoleBackend::pty_path`].
    Pty,
    /// A file, created or appended to; there is no input.
    File(PathBuf),
    /// A Unix socket on which Gantry listens. One client at a time is served, others are rejected;
    /// the first client sees up to [`OUTPUT_BACKLOG`](super::OUTPUT_BACKLOG) bytes of earlier
    /// output.
    Socket(PathBuf),
}

/// Why a console could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum ConsoleError {
    /// The output file could not be opened.
    #[error("cannot create the console's output file {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The socket could not be created.
    #[error(transparent)]
    Socket(#[from] NameError),
    /// A pseudo terminal could not be created.
    #[error("cannot open a pseudo terminal for the console")]
    Pty(#[source] io::Error),
    /// Standard input or output could not be prepared.
    #[error("cannot use the terminal as console")]
    Tty(#[source] io::Error),
    /// An eventfd could not be created.
    #[error("cannot create the console's event")]
    Event(#[source] io::Error),
}

/// Source of input.
#[derive(Debug)]
pub(super) enum Input {
    None,
    Stream(File),
    Socket(NamedSocket),
}

/// An open console: its output is passed to a device, the rest to a
/// [`ConsoleLine`](super::ConsoleLine).
pub struct ConsoleBackend {
    pub(super) output: ConsoleOutput,
    pub(super) input: Input,
    /// Resources that must stay open, or whose drop undoes a change.
    pub(super) guards: Vec<Box<dyn Send>>,
    pty: Option<PathBuf>,
    terminal: Option<RawFd>,
}

impl ConsoleBackend {
    /// Opens the host end of a console. Call it before the process is confined, because it opens
    /// files, including `/dev/ptmx` and `/proc/self/fd`.
    pub fn open(mode: &ConsoleMode) -> Result<Self, ConsoleError> {
        match mode {
            ConsoleMode::Off | ConsoleMode::Null => Self::new(Target::Discard, Input::None),
            ConsoleMode::Tty => {
                let mut backend = stdio(libc::STDIN_FILENO, libc::STDOUT_FILENO)?;
                if let Some(raw) = RawTerminal::enter().map_err(ConsoleError::Tty)? {
                    backend.guards.push(Box::new(raw));
                }
                backend.terminal = Some(libc::STDOUT_FILENO);
                Ok(backend)
            }
            ConsoleMode::Pty => {
                let Pty { main, sub, path } = Pty::open().map_err(ConsoleError::Pty)?;
                let input = main.try_clone().map_err(ConsoleError::Pty)?;
                let mut backend = Self::new(Target::Direct(main), Input::Stream(input))?;
                backend.terminal = Some(sub.as_raw_fd());
                backend.guards.push(Box::new(sub));
                backend.pty = Some(path);
                Ok(backend)
            }
            ConsoleMode::File(path) => {
                // Non-blocking for FIFOs and devices; regular files ignore it.
                let file = OpenOptions::new()
                    .append(true)
                    .create(true)
                    .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
                    .open(path)
                    .map_err(|source| ConsoleError::File {
                        path: path.clone(),
                        source,
                    })?;
                Self::new(target(file), Input::None)
            }
            ConsoleMode::Socket(path) => Self::on_socket(NamedSocket::listen(path)?),
        }
    }

    /// Creates a console on a socket that is already listening.
    pub fn on_socket(socket: NamedSocket) -> Result<Self, ConsoleError> {
        Self::new(Target::Absent, Input::Socket(socket))
    }

    /// The socket on which it listens, for another process.
    pub fn shared_socket(&self) -> Option<SharedSocket> {
        match &self.input {
            Input::Socket(socket) => Some(socket.share()),
            Input::None | Input::Stream(_) => None,
        }
    }

    /// Like [`ConsoleBackend::open`], for a device without input (the debug console): does not
    /// touch standard input and its terminal.
    pub fn open_output(mode: &ConsoleMode) -> Result<Self, ConsoleError> {
        if *mode == ConsoleMode::Tty {
            let output = output_of(libc::STDOUT_FILENO).map_err(ConsoleError::Tty)?;
            return Self::new(output, Input::None);
        }
        Self::open(mode)
    }

    fn new(target: Target, input: Input) -> Result<Self, ConsoleError> {
        Ok(Self {
            output: ConsoleOutput::new(target).map_err(ConsoleError::Event)?,
            input,
            guards: Vec::new(),
            pty: None,
            terminal: None,
        })
    }

    /// The output that the device writes to.
    pub fn output(&self) -> ConsoleOutput {
        self.output.clone()
    }

    /// Path of the pseudo terminal that was opened, for `vm.info` (`/dev/pts/N`).
    pub fn pty_path(&self) -> Option<&Path> {
        self.pty.as_deref()
    }

    /// The terminal behind the console, if any.
    pub fn terminal(&self) -> Option<Terminal> {
        self.terminal.map(Terminal)
    }
}

/// The terminal behind a console. It is open as long as the console's backend, or the console line
/// created from it.
#[derive(Clone, Copy, Debug)]
pub struct Terminal(RawFd);

impl Terminal {
    /// Columns and rows, if the terminal knows them.
    pub fn size(&self) -> Option<(u16, u16)> {
        window_size(self.0)
    }
}

/// Creates a console on two descriptors of this process, which are not changed.
fn stdio(input: RawFd, output: RawFd) -> Result<ConsoleBackend, ConsoleError> {
    let output = output_of(output).map_err(ConsoleError::Tty)?;
    let input = match reopen(input, OpenOptions::new().read(true)) {
        Ok((file, _)) => Input::Stream(file),
        // Closed, so there is no input.
        Err(error) if error.raw_os_error() == Some(libc::EBADF) => Input::None,
        Err(error) => return Err(ConsoleError::Tty(error)),
    };
    ConsoleBackend::new(output, input)
}

fn output_of(fd: RawFd) -> io::Result<Target> {
    match reopen(fd, OpenOptions::new().write(true)) {
        Ok((file, true)) => Ok(target(file)),
        Ok((file, false)) => Ok(Target::Cautious(file)),
        Err(error) if error.raw_os_error() == Some(libc::EBADF) => Ok(Target::Discard),
        Err(error) => Err(error),
    }
}

/// A target that need not be polled.
fn target(file: File) -> Target {
    match file.metadata() {
        Ok(metadata) if metadata.is_file() => Target::Regular(file),
        _ => Target::Direct(file),
    }
}

/// Another descriptor for the file of `fd`, and whether it certainly does not block.
///
/// `O_NONBLOCK` belongs to the open file description, which the parent shell and other processes
/// may share, so terminals and pipes are reopened. A regular file does not block, and its position
/// must stay shared.
fn reopen(fd: RawFd, how: &mut OpenOptions) -> io::Result<(File, bool)> {
    // SAFETY: no memory is passed; a descriptor that is not open causes an ordinary error.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just created and has no other owner.
    let file = unsafe { File::from_raw_fd(copy) };
    let kind = file.metadata()?.file_type();
    if kind.is_char_device() || kind.is_fifo() {
        let path = format!("/proc/self/fd/{fd}");
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        if let Ok(file) = how.custom_flags(flags).open(path) {
            return Ok((file, true));
        }
        // For example after a change of user: use the descriptor as it is, cautiously.
    }
    Ok((file, kind.is_file()))
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::{Read, Write},
    };

    use super::*;

    #[test]
    fn a_file_console_is_appended_to() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        fs::write(&path, "old").unwrap();
        let backend = ConsoleBackend::open(&ConsoleMode::File(path.clone())).unwrap();
        backend.output().write_all(b"new\n").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"oldnew\n");
    }

    #[test]
    fn errors_name_the_file_that_is_the_matter() {
        let path = PathBuf::from("/nonexistent/console");
        for mode in [ConsoleMode::File(path.clone()), ConsoleMode::Socket(path)] {
            let error = ConsoleBackend::open(&mode).err().unwrap();
            assert!(error.to_string().contains("/nonexistent/console"));
        }
    }

    #[test]
    fn a_pty_console_reports_its_path_and_is_readable_there() {
        let backend = ConsoleBackend::open(&ConsoleMode::Pty).unwrap();
        backend.output().write_all(b"hello").unwrap();
        let mut seen = [0; 5];
        File::open(backend.pty_path().unwrap())
            .unwrap()
            .read_exact(&mut seen)
            .unwrap();
        assert_eq!(&seen, b"hello");
    }

    #[test]
    fn opening_pipes_leaves_the_blocking_mode_of_shared_descriptors_alone() {
        let (reader, writer) = io::pipe().unwrap();
        let backend = stdio(reader.as_raw_fd(), writer.as_raw_fd()).unwrap();
        for fd in [reader.as_raw_fd(), writer.as_raw_fd()] {
            // SAFETY: F_GETFL only reads the flags of an open descriptor.
            let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
            assert_eq!(flags & libc::O_NONBLOCK, 0);
        }
        let Input::Stream(mut input) = backend.input else {
            panic!("a pipe is an input");
        };
        let error = input.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn output_to_a_shared_regular_file_keeps_its_position() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"before ").unwrap();
        let null = File::open("/dev/null").unwrap();
        let backend = stdio(null.as_raw_fd(), file.as_raw_fd()).unwrap();
        backend.output().write_all(b"guest ").unwrap();
        file.write_all(b"after").unwrap();
        let mut text = String::new();
        io::Seek::rewind(&mut file).unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "before guest after");
    }

    #[test]
    fn closed_standard_streams_make_a_silent_console() {
        let backend = stdio(-1, -1);
        assert!(backend.is_ok_and(|backend| matches!(backend.input, Input::None)));
    }
}
