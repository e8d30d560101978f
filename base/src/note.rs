//! Lines for the error output of processes that serve others.

use std::{
    fmt,
    io::{self, Write},
    time::{Duration, Instant},
};

/// How long nothing of a kind is said after something was.
const QUIET: Duration = Duration::from_secs(1);

/// Writes a line to the error output, or loses it.
///
/// `eprintln!` panics if it cannot write, which ends a process. What a worker inherits as its error
/// output is the very file of its pool and of other workers: one that was taken over can shut a socket
/// down, fill a pipe that does not block then, or a disk.
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

/// Text without characters that a terminal obeys, or that would begin a line that nobody wrote:
/// what strangers have sent is in messages. They are shown as in a program's source.
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

/// Writes an error, after the name of the program that it ends, and a line for each of its causes that says more
/// than what stands above it.
pub fn error(program: &str, error: &dyn std::error::Error) {
    let mut texts = crate::Chain(error).texts().into_iter();
    let error = texts.next().unwrap_or_default();
    note!("{program}: {error}");
    for cause in texts {
        note!("  because: {cause}");
    }
}

/// Keeps what strangers can cause at will from filling a log.
#[derive(Debug, Default)]
pub struct Seldom {
    last: Option<Instant>,
    unsaid: u64,
}

/// How many were not said before this one; nothing to read if there are none.
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
    /// Whether something is to be said now.
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
