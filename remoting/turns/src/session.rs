//! A connection with an arbiter, and the two pages that belong to it.

use std::{
    fs::File,
    io::{self, ErrorKind, Read},
    os::unix::net::UnixStream,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::{
    introduce,
    message::{HELLO, HangsUp, OtherArbiter},
    page::{Account, Grant, Page},
};

/// Pause after an arbiter has hung up, before another one is asked for. One that is just ending hangs up once.
const AGAIN: Duration = Duration::from_millis(100);
/// Pause if arbiters keep hanging up.
const MUCH_LATER: Duration = Duration::from_secs(1);

/// A connection with an arbiter.
#[derive(Debug)]
pub struct Session {
    stream: UnixStream,
    grant: Page<Grant>,
    account: Page<Account>,
    gone: AtomicBool,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum NoSession {
    /// The arbiter is of another build.
    #[error(transparent)]
    Other(#[from] OtherArbiter),
    /// The arbiter keeps hanging up without a message.
    #[error(transparent)]
    HungUp(#[from] HangsUp),
    /// The system refuses something.
    #[error("the connection failed")]
    System(#[from] io::Error),
}

impl Session {
    /// Asks for a connection over `control`, and waits for it and its pages.
    ///
    /// # Errors
    /// The arbiter is of another version or has hung up, or who introduces this process has.
    pub fn open(control: &UnixStream) -> Result<Self, NoSession> {
        let stream = introduce::ask(control)?;
        let (grant, account) = Self::begin(&stream).map_err(|error| match error {
            // Who has not read everything that was said hangs up like this.
            NoSession::System(error)
                if matches!(
                    error.kind(),
                    ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
                ) =>
            {
                HangsUp.into()
            }
            error => error,
        })?;
        Ok(Self {
            grant: Page::map(&grant, false)?,
            account: Page::map(&account, true)?,
            gone: AtomicBool::new(false),
            stream,
        })
    }

    /// The pages that the arbiter has made for this worker.
    fn begin(mut stream: &UnixStream) -> Result<(File, File), NoSession> {
        let mut page = || -> Result<File, NoSession> {
            let mut hello = [0; HELLO];
            let (got, file) = stream
                .recv_with_fd(&mut hello[..1])
                .map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
            if let Some(file) = file {
                return Ok(file);
            }
            if got == 0 {
                return Err(HangsUp.into());
            }
            stream.read_exact(&mut hello[got..])?;
            Err(match OtherArbiter::of(&hello) {
                Some(other) => other.into(),
                None => io::Error::from(ErrorKind::InvalidData).into(),
            })
        };
        Ok((page()?, page()?))
    }

    /// The socket: words to the arbiter, and a byte from it whenever it has changed something.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// What the arbiter tells, which is only read.
    pub fn grant(&self) -> &Page<Grant> {
        &self.grant
    }

    /// What is told to the arbiter.
    pub fn account(&self) -> &Page<Account> {
        &self.account
    }

    /// Whether the arbiter has ended.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// The arbiter has ended.
    pub fn end(&self) {
        self.gone.store(true, Ordering::Release);
    }
}

/// Waits before another arbiter is asked for, after so many that have hung up.
pub fn pause(hung_up: u32) {
    thread::sleep(if hung_up < 2 { AGAIN } else { MUCH_LATER });
}
