//! Lines for the error output of processes that serve others.

use std::{
    fmt,
    io::{self, Write},
};

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
    let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
}
