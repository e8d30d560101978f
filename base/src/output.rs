//! Standard output of programs.

use std::io::{self, ErrorKind, Stdout, Write};

/// The output of a program whose reader may stop reading at any time (`program | head -1`).
///
/// From then on, output is discarded without an error: a program that only prints ends as if
/// everything had been read, and a program that does work continues. `println!` would panic
/// instead.
#[derive(Debug)]
pub struct Output<W>(W);

impl Output<Stdout> {
    /// The standard output of this process.
    pub fn standard() -> Self {
        Self(io::stdout())
    }
}

impl<W: Write> Output<W> {
    /// An output that writes to `writer`.
    pub fn to(writer: W) -> Self {
        Self(writer)
    }
}

impl<W: Write> Write for Output<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.write(bytes) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(bytes.len()),
            written => written,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.0.flush() {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
            flushed => flushed,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::OpenOptions,
        io::{BufRead, BufReader, pipe},
    };

    use super::*;

    #[test]
    fn whoever_has_read_enough_ends_no_program() {
        let (reader, writer) = pipe().unwrap();
        let mut out = Output::to(writer);
        writeln!(out, "first").unwrap();
        let mut line = String::new();
        BufReader::new(reader).read_line(&mut line).unwrap();
        assert_eq!(line, "first\n");
        // More than a pipe holds.
        out.write_all(&vec![b'x'; 1 << 20]).unwrap();
        out.flush().unwrap();
    }

    #[test]
    fn an_output_that_takes_nothing_is_an_error() {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let error = Output::to(full).write_all(b"x").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StorageFull);
    }
}
