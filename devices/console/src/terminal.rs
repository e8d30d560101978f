//! The terminal that Gantry was started from, and pseudo terminals.

use std::{
    ffi::CStr,
    fs::File,
    io, mem,
    os::fd::{AsRawFd, FromRawFd, RawFd},
    path::PathBuf,
    sync::{
        Once, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

/// Settings of the terminal on standard input before it was set to raw mode.
static ORIGINAL: OnceLock<libc::termios> = OnceLock::new();
/// Standard input is in raw mode and must be restored.
static RAW: AtomicBool = AtomicBool::new(false);
static ON_EXIT: Once = Once::new();

/// Restores the settings of the terminal on standard input, if a console had set it to raw mode.
///
/// This happens automatically when the console's backend is dropped, at process exit and on a
/// panic. A handler for fatal signals should call it too: it is async-signal-safe (one atomic swap
/// and `tcsetattr`). After `SIGKILL` only `reset` in the shell helps.
pub fn restore_terminal() {
    if RAW.swap(false, Ordering::SeqCst)
        && let Some(original) = ORIGINAL.get()
    {
        // SAFETY: `original` was filled by tcgetattr. There is nobody to report a failure to.
        unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, original) };
    }
}

extern "C" fn restore_at_exit() {
    restore_terminal();
}

/// Standard input in raw mode: every key is passed to the guest, and none generates a signal.
#[derive(Debug)]
pub(super) struct RawTerminal(());

impl RawTerminal {
    /// Sets the terminal on standard input to raw mode; `None` if there is no terminal.
    pub(super) fn enter() -> io::Result<Option<Self>> {
        let Some(original) = settings(libc::STDIN_FILENO) else {
            return Ok(None);
        };
        let original = ORIGINAL.get_or_init(|| original);
        ON_EXIT.call_once(|| {
            let previous = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                restore_terminal();
                previous(info);
            }));
            // SAFETY: the function may be called at any time, because it accesses only two statics.
            unsafe { libc::atexit(restore_at_exit) };
        });
        RAW.store(true, Ordering::SeqCst);
        make_raw(libc::STDIN_FILENO, *original).inspect_err(|_| restore_terminal())?;
        Ok(Some(Self(())))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        restore_terminal();
    }
}

/// The settings of a terminal; `None` if `fd` is not a terminal.
fn settings(fd: RawFd) -> Option<libc::termios> {
    let mut termios = mem::MaybeUninit::uninit();
    // SAFETY: tcgetattr fills the structure when it returns 0.
    unsafe { (libc::tcgetattr(fd, termios.as_mut_ptr()) == 0).then(|| termios.assume_init()) }
}

fn make_raw(fd: RawFd, mut termios: libc::termios) -> io::Result<()> {
    // SAFETY: `termios` is a valid structure; both calls only read or write it.
    let result = unsafe {
        libc::cfmakeraw(&mut termios);
        libc::tcsetattr(fd, libc::TCSANOW, &termios)
    };
    check(result).map(drop)
}

/// Columns and rows of the terminal `fd`; `None` if it is not a terminal or does not know its size.
pub(super) fn window_size(fd: RawFd) -> Option<(u16, u16)> {
    let mut size = libc::winsize {
        ws_row: 0,
        ws_col: 0,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: TIOCGWINSZ fills a winsize.
    let result = unsafe { libc::ioctl(fd, libc::TIOCGWINSZ, &mut size) };
    (result == 0 && size.ws_col != 0).then_some((size.ws_col, size.ws_row))
}

/// A pseudo terminal pair in raw mode.
#[derive(Debug)]
pub(super) struct Pty {
    /// The VMM's end (the main end); non-blocking.
    pub(super) main: File,
    /// The other end, held open so that readers may come and go: otherwise the main end would
    /// report a hang-up continuously while no other process has it open.
    pub(super) sub: File,
    /// Path of the other end.
    pub(super) path: PathBuf,
}

impl Pty {
    pub(super) fn open() -> io::Result<Self> {
        let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: no memory is passed; the result is checked, and has no other owner.
        let main = unsafe { File::from_raw_fd(check(libc::posix_openpt(flags))?) };
        let fd = main.as_raw_fd();
        // SAFETY: `fd` is open; no memory is passed.
        check(unsafe { libc::grantpt(fd) })?;
        // SAFETY: as above.
        check(unsafe { libc::unlockpt(fd) })?;
        let mut name = [0; 64];
        // SAFETY: the buffer's actual length is passed; the name is terminated on success.
        let error = unsafe { libc::ptsname_r(fd, name.as_mut_ptr(), name.len()) };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        // SAFETY: ptsname_r left a terminated string in the buffer.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) };
        let path = PathBuf::from(name.to_string_lossy().into_owned());
        let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
        // SAFETY: the argument is an integer; the result is checked, and has no other owner.
        let sub = unsafe { File::from_raw_fd(check(libc::ioctl(fd, libc::TIOCGPTPEER, flags))?) };
        let termios = settings(sub.as_raw_fd()).ok_or_else(io::Error::last_os_error)?;
        make_raw(sub.as_raw_fd(), termios)?;
        Ok(Self { main, sub, path })
    }
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn a_pty_echoes_nothing_and_changes_no_byte() {
        let Pty {
            mut main, mut sub, ..
        } = Pty::open().unwrap();
        main.write_all(b"a\r\n\x03").unwrap();
        let mut seen = [0; 4];
        sub.read_exact(&mut seen).unwrap();
        assert_eq!(&seen, b"a\r\n\x03");
        sub.write_all(b"\n").unwrap();
        let mut seen = [0; 4];
        assert_eq!(main.read(&mut seen).unwrap(), 1);
        assert_eq!(seen[0], b'\n');
        let error = main.read(&mut seen).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn readers_of_a_pty_may_come_and_go() {
        let mut pty = Pty::open().unwrap();
        for _ in 0..2 {
            let mut reader = File::open(&pty.path).unwrap();
            pty.main.write_all(b"x").unwrap();
            let mut seen = [0; 1];
            reader.read_exact(&mut seen).unwrap();
        }
        let error = pty.main.read(&mut [0; 1]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }

    const CHILD: &str = "GANTRY_TEST_TERMINAL";

    /// Runs in a separate process, with a terminal on standard input.
    #[test]
    fn child_with_a_raw_terminal() {
        let Ok(end) = std::env::var(CHILD) else {
            return;
        };
        let raw = RawTerminal::enter().unwrap().unwrap();
        let flags = settings(libc::STDIN_FILENO).unwrap().c_lflag;
        assert_eq!(flags & (libc::ICANON | libc::ECHO | libc::ISIG), 0);
        mem::forget(raw);
        match end.as_str() {
            "exit" => std::process::exit(7),
            _ => panic!("expected by the test"),
        }
    }

    #[test]
    fn a_raw_terminal_is_restored_at_exit_and_after_a_panic() {
        for end in ["exit", "panic"] {
            let pty = Pty::open().unwrap();
            // The opposite of raw.
            let mut cooked = settings(pty.sub.as_raw_fd()).unwrap();
            cooked.c_lflag |= libc::ICANON | libc::ECHO | libc::ISIG;
            cooked.c_oflag |= libc::OPOST;
            // SAFETY: the settings are valid.
            let set = unsafe { libc::tcsetattr(pty.sub.as_raw_fd(), libc::TCSANOW, &cooked) };
            assert_eq!(set, 0);
            let status = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "terminal::tests::child_with_a_raw_terminal"])
                .env(CHILD, end)
                .stdin(pty.sub.try_clone().unwrap())
                .output()
                .unwrap()
                .status;
            assert_eq!(status.code() == Some(7), end == "exit", "{status}");
            assert!(!status.success());
            let after = settings(pty.sub.as_raw_fd()).unwrap();
            assert_eq!(after.c_lflag, cooked.c_lflag, "{end}");
            assert_eq!(after.c_oflag, cooked.c_oflag, "{end}");
        }
    }

    #[test]
    fn what_is_no_terminal_has_no_settings_and_no_size() {
        let file = File::open("/dev/null").unwrap();
        assert!(settings(file.as_raw_fd()).is_none());
        assert!(window_size(file.as_raw_fd()).is_none());
    }
}
