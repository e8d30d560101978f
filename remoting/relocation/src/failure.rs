//! Why an application was not moved.

use std::{fmt, io};

/// A worker's part in a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worker {
    /// It serves the application.
    Serving,
    /// It is to serve the application.
    Destination,
    /// It has served the application, and may still have contents of its memory.
    Left,
}

impl fmt::Display for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Serving => "the worker that serves it",
            Self::Destination => "the worker that was to serve it",
            Self::Left => "the worker that it has left",
        })
    }
}

/// What becomes of an application that was not moved.
#[derive(Debug, thiserror::Error)]
pub enum NotMoved {
    /// Its worker serves it, if that lives.
    #[error("stays")]
    Stays(#[from] Failure),
    /// Nobody can serve it any more.
    #[error("is lost")]
    Lost(#[source] Failure),
}

/// Why an application was not moved.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A worker refuses, with this reason.
    #[error("{0}")]
    Refused(String),
    /// A worker has ended, or sends something invalid, or does not answer.
    #[error("{who} {}", if is_end(.source) { "has ended" } else { "does not answer" })]
    Gone {
        /// Which worker.
        who: Worker,
        /// How it was noticed.
        source: io::Error,
    },
    /// A worker that saves an application's state makes no progress.
    #[error(
        "{who} has written nothing of its state for {seconds} s: it hangs, or its device does; end the application, \
         then try again"
    )]
    Silent {
        /// Which worker.
        who: Worker,
        /// How long it has made no progress, in seconds.
        seconds: u64,
    },
    /// A worker that restores an application's state makes no progress.
    #[error(
        "{who} has not used a processor for {seconds} s while it makes the application's state: its driver \
         hangs, or its device does; see the log of its pool, start that anew, then try again"
    )]
    Hangs {
        /// Which worker.
        who: Worker,
        /// How long it has made no progress, in seconds.
        seconds: u64,
    },
    /// A worker that was ended has not ended.
    #[error(
        "{who} was ended, and its process has not ended for {seconds} s: its driver hangs, or its device does"
    )]
    Lingers {
        /// Which worker.
        who: Worker,
        /// How long it was waited for, in seconds.
        seconds: u64,
    },
    /// The worker that was to stop is in a long operation, and continues after it.
    #[error("its worker is busy, and goes on by itself")]
    Busy(#[source] Box<Failure>),
    /// The move was cancelled.
    #[error("it was cancelled")]
    Cancelled,
    /// The system cannot create a file.
    #[error("cannot make a file for the application's state")]
    File(#[source] io::Error),
    /// The system cannot create a socket.
    #[error("cannot make a socket for contents of its memory that follow")]
    Socket(#[source] io::Error),
}

impl Failure {
    /// Whether it is a reply, after which the worker can be sent another command.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused(_))
    }

    /// Whether this worker has ended.
    pub fn is_end_of(&self, worker: Worker) -> bool {
        matches!(self, Self::Gone { who, source } if *who == worker && is_end(source))
    }

    /// Whether a worker has not answered in time.
    pub fn is_late(&self) -> bool {
        matches!(self, Self::Gone { source, .. } if source.kind() == io::ErrorKind::TimedOut)
    }
}

/// Whether a channel whose other end is closed fails with this error.
fn is_end(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof
    )
}
