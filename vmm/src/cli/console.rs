//! `gantry ctl console`: the guest's console in this terminal.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::{fs::OpenOptionsExt, net::UnixStream},
    },
    path::PathBuf,
};

use clap::ValueEnum;
use serde_json::Value;

use super::{Client, ClientError};

/// The key that leaves the console: control and ].
const LEAVE: u8 = 0x1d;

/// Which of the guest's consoles.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, ValueEnum)]
pub enum Which {
    /// The serial port, or else the virtio console.
    #[default]
    Any,
    /// The serial port.
    Serial,
    /// The virtio console.
    Virtio,
}

/// The console cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum ConsoleError {
    /// The VMM could not be reached or refuses the request.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The console has no backend that can be opened.
    #[error(
        "the VM has no console that can be connected to: start it with --serial pty or \
         --serial socket=PATH"
    )]
    Nowhere,
    /// The console cannot be opened.
    #[error("cannot open the console {}", path.display())]
    Open {
        /// Its path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The connection broke.
    #[error("lost the console")]
    Lost(#[from] io::Error),
}

/// Location of a console.
#[derive(Clone, Debug, Eq, PartialEq)]
enum Place {
    Terminal(PathBuf),
    Socket(PathBuf),
}

/// The location of the console, from the VMM's description of the VM.
fn place(info: &Value, which: Which) -> Option<Place> {
    let names: &[&str] = match which {
        Which::Any => &["serial", "console"],
        Which::Serial => &["serial"],
        Which::Virtio => &["console"],
    };
    names.iter().find_map(|name| {
        let console = &info["config"][*name];
        let path = |key: &str| console[key].as_str().map(PathBuf::from);
        match console["mode"].as_str()? {
            "Pty" => path("file").map(Place::Terminal),
            "Socket" => path("socket").map(Place::Socket),
            _ => None,
        }
    })
}

fn open(place: &Place) -> io::Result<File> {
    match place {
        Place::Terminal(path) => OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NOCTTY)
            .open(path),
        Place::Socket(path) => Ok(File::from(OwnedFd::from(UnixStream::connect(path)?))),
    }
}

/// Raw mode of a terminal; dropping this restores the previous settings.
struct Raw {
    fd: RawFd,
    before: libc::termios,
}

impl Raw {
    /// Switches to raw mode, in which each key is passed on immediately; `None` if the descriptor
    /// is not a terminal.
    fn set(fd: RawFd) -> Option<Self> {
        // SAFETY: all-zero is a valid value of this type.
        let mut before: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: the pointer refers to a value of the type that the call fills in.
        if unsafe { libc::tcgetattr(fd, &raw mut before) } != 0 {
            return None;
        }
        let mut raw = before;
        // SAFETY: only modifies the value, which the next call reads.
        unsafe {
            libc::cfmakeraw(&raw mut raw);
            libc::tcsetattr(fd, libc::TCSANOW, &raw const raw);
        }
        Some(Self { fd, before })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: the call reads a value of its type.
        unsafe { libc::tcsetattr(self.fd, libc::TCSANOW, &raw const self.before) };
    }
}

/// Connects a console to standard input and output until one of them ends or the user presses
/// control and ].
pub fn run(client: &Client, which: Which, out: &mut dyn Write) -> Result<(), ConsoleError> {
    let answer = client.request("GET", "vm.info", None, &[])?;
    let info = serde_json::from_slice(&answer).unwrap_or_default();
    let place = place(&info, which).ok_or(ConsoleError::Nowhere)?;
    let console = open(&place).map_err(|source| {
        let (Place::Terminal(path) | Place::Socket(path)) = place.clone();
        ConsoleError::Open { path, source }
    })?;
    let keys = io::stdin();
    let raw = Raw::set(keys.as_raw_fd());
    if raw.is_some() {
        write!(out, "(control and ] leave the console)\r\n")?;
        out.flush()?;
    }
    relay(&console, &mut keys.lock(), keys.as_raw_fd(), out)?;
    Ok(())
}

/// Copies in both directions until the console ends or the user leaves. The end of the input does
/// not end it, because a script may still wait for the guest's output.
fn relay(
    mut console: &File,
    keys: &mut dyn Read,
    keys_fd: RawFd,
    out: &mut dyn Write,
) -> io::Result<()> {
    let entry = |fd| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let mut polled = [entry(console.as_raw_fd()), entry(keys_fd)];
    let mut bytes = [0; 4096];
    loop {
        // SAFETY: the pointer refers to as many entries as the call is given.
        let ready = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, -1) };
        if ready < 0 {
            match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => continue,
                error => return Err(error),
            }
        }
        if polled[0].revents != 0 {
            match console.read(&mut bytes) {
                // A terminal whose other end is closed.
                Err(error) if error.raw_os_error() == Some(libc::EIO) => return Ok(()),
                Ok(0) => return Ok(()),
                read => match out.write_all(&bytes[..read?]).and_then(|()| out.flush()) {
                    // Nobody reads the output any more.
                    Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
                    shown => shown?,
                },
            }
        }
        if polled[1].revents != 0 {
            let read = keys.read(&mut bytes)?;
            let pressed = &bytes[..read];
            let left = pressed.iter().position(|key| *key == LEAVE);
            console.write_all(&pressed[..left.unwrap_or(read)])?;
            if left.is_some() {
                return Ok(());
            }
            if read == 0 {
                // The input has ended.
                polled[1].fd = -1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, thread};

    use serde_json::json;

    use super::*;

    #[test]
    fn the_console_is_where_the_vmm_says() {
        let info = json!({"config": {
            "serial": {"mode": "Pty", "file": "/dev/pts/7"},
            "console": {"mode": "Socket", "socket": "/run/console"},
        }});
        let terminal = Some(Place::Terminal("/dev/pts/7".into()));
        let socket = Some(Place::Socket("/run/console".into()));
        assert_eq!(place(&info, Which::Any), terminal);
        assert_eq!(place(&info, Which::Serial), terminal);
        assert_eq!(place(&info, Which::Virtio), socket);
        let off = json!({"config": {"serial": {"mode": "Tty"}, "console": {"mode": "Off"}}});
        assert_eq!(place(&off, Which::Any), None);
        assert_eq!(place(&json!({}), Which::Any), None);
    }

    #[test]
    fn what_the_guest_says_comes_out_and_what_is_typed_goes_in() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console");
        let listener = UnixListener::bind(&path).unwrap();
        let guest = thread::spawn(move || {
            let (mut guest, _) = listener.accept().unwrap();
            let mut typed = [0; 3];
            guest.read_exact(&mut typed).unwrap();
            guest.write_all(b"it said ").unwrap();
            guest.write_all(&typed).unwrap();
            let mut more = Vec::new();
            guest.read_to_end(&mut more).unwrap();
            more
        });
        let console = open(&Place::Socket(path)).unwrap();
        let (ours, mut user) = UnixStream::pair().unwrap();
        let mut screen = Vec::new();
        user.write_all(b"ls\n").unwrap();
        let typing = thread::spawn(move || {
            thread::sleep(std::time::Duration::from_millis(200));
            user.write_all(b"x\x1dnot this").unwrap();
            user
        });
        let fd = ours.as_raw_fd();
        relay(&console, &mut &ours, fd, &mut screen).unwrap();
        drop(console);
        assert_eq!(screen, b"it said ls\n");
        assert_eq!(guest.join().unwrap(), b"x");
        drop(typing.join().unwrap());
    }

    #[test]
    fn the_end_of_the_console_is_the_end() {
        let (console, guest) = UnixStream::pair().unwrap();
        drop(guest);
        let console = File::from(OwnedFd::from(console));
        let (ours, _user) = UnixStream::pair().unwrap();
        let fd = ours.as_raw_fd();
        relay(&console, &mut &ours, fd, &mut Vec::new()).unwrap();
    }
}
