//! Lines on standard error for processes that serve others.

use std::{
    fmt,
    io::{self, Write},
    process::ExitCode,
    time::{Duration, Instant},
};

/// After a message, further messages of its kind are suppressed for this time.
const QUIET: Duration = Duration::from_secs(1);

/// Writes a line to standard error. If that fails, the line is lost.
///
/// `eprintln!` panics if it cannot write, which ends the process. Whoever reads a pipe or a socket may
/// be gone, a disk may be full, and others who have the open file may have made it non-blocking.
#[macro_export]
macro_rules! note {
    ($($part:tt)*) => {
        $crate::note::line(format_args!($($part)*))
    };
}

/// See [`note!`](crate::note!).
pub fn line(text: fmt::Arguments<'_>) {
    let text = printable(text.to_string());
    let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// Escapes control characters as in Rust source. Messages contain text from untrusted peers, which
/// must not control a terminal or forge a line of the log.
pub fn printable(text: String) -> String {
    if !text.chars().any(char::is_control) {
        return text;
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        if character.is_control() {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    shown
}

/// Writes an error, prefixed by the name of the program that it ends, and a line for each cause
/// that adds something to the line above it.
pub fn error(program: &str, error: &dyn std::error::Error) {
    let mut texts = crate::Chain(error).texts().into_iter();
    let error = texts.next().unwrap_or_default();
    note!("{program}: {error}");
    for cause in texts {
        note!("  because: {cause}");
    }
}

/// How a program ends that did this, after it has written the error if it failed.
pub fn end(program: &str, outcome: Result<(), impl Into<Box<dyn std::error::Error>>>) -> ExitCode {
    let Err(failed) = outcome else {
        return ExitCode::SUCCESS;
    };
    error(program, &*failed.into());
    ExitCode::FAILURE
}

/// Writes each record up to this level, prefixed by the program's name.
#[cfg(feature = "log")]
pub fn log_records(program: &'static str, level: log::LevelFilter) {
    struct Lines(&'static str);

    impl log::Log for Lines {
        fn enabled(&self, _: &log::Metadata<'_>) -> bool {
            true
        }

        fn log(&self, record: &log::Record<'_>) {
            note!("{}: {}", self.0, record.args());
        }

        fn flush(&self) {}
    }

    if log::set_boxed_logger(Box::new(Lines(program))).is_ok() {
        log::set_max_level(level);
    }
}

/// Rate limit for messages that untrusted peers can trigger at will, so that they do not fill a
/// log.
#[derive(Debug, Default)]
pub struct Seldom {
    last: Option<Instant>,
    unsaid: u64,
}

/// Number of messages that were suppressed before this one. Displays as nothing if it is zero.
#[derive(Clone, Copy, Debug)]
pub struct Unsaid(u64);

impl fmt::Display for Unsaid {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            count => write!(to, " (and {count} others before)"),
        }
    }
}

impl Seldom {
    /// No message so far.
    pub const fn new() -> Self {
        Self {
            last: None,
            unsaid: 0,
        }
    }

    /// Returns `Some` if a message is due now.
    pub fn due(&mut self) -> Option<Unsaid> {
        if self.last.is_some_and(|last| last.elapsed() < QUIET) {
            self.unsaid += 1;
            return None;
        }
        self.last = Some(Instant::now());
        Some(Unsaid(std::mem::take(&mut self.unsaid)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_strangers_gives_a_terminal_no_orders() {
        let said = printable("pool \u{1b}[2Jgone\ngantry: all is well\t\u{9b}31m é".to_owned());
        assert_eq!(
            said,
            "pool \\u{1b}[2Jgone\\ngantry: all is well\\t\\u{9b}31m é"
        );
        assert_eq!(printable("plain".to_owned()), "plain");
    }

    #[test]
    fn what_was_not_said_is_counted() {
        let mut seldom = Seldom::default();
        assert_eq!(seldom.due().unwrap().to_string(), "");
        assert!(seldom.due().is_none() && seldom.due().is_none());
        seldom.last = None;
        assert_eq!(seldom.due().unwrap().to_string(), " (and 2 others before)");
    }
}
