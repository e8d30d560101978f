//! The structure of calls, for tests without a GPU: lines of text without any contents of memory.
//!
//! `open FILE PATH`, `close FILE`, and `call FILE NUMBER INNER LENGTHS RESULT STATUS`: the file by its number, the
//! escape or command on unified memory, the control or class or `-`, the lengths of the segments, what the call
//! returned, and the status or `-`. Numbers of commands and statuses are hexadecimal.

use std::{
    fs::File,
    io::{self, Write},
    path::Path,
    sync::Mutex,
};

use base::Unpoisoned;
use nvidia_abi::Call;

use crate::files::OpenFile;

/// A file that calls are recorded in.
pub struct Record(Mutex<File>);

impl Record {
    /// Creates the file.
    ///
    /// # Errors
    /// It cannot be created.
    pub fn create(path: &Path) -> io::Result<Self> {
        let mut file = File::create(path)?;
        file.write_all(b"nvtrace 1\n")?;
        Ok(Self(Mutex::new(file)))
    }

    pub(crate) fn open(&self, file: &OpenFile) {
        self.line(&format!("open {} {}\n", file.number, file.node.path()));
    }

    pub(crate) fn close(&self, file: u32) {
        self.line(&format!("close {file}\n"));
    }

    pub(crate) fn call(
        &self,
        file: u32,
        call: &Call,
        result: Result<i32, i32>,
        status: Option<u32>,
    ) {
        let hexadecimal =
            |number: Option<u32>| number.map_or("-".to_owned(), |number| format!("{number:x}"));
        let lengths: Vec<_> = call
            .segments()
            .map(|(_, length)| length.to_string())
            .collect();
        let result = result.unwrap_or_else(|error| -error);
        let (inner, status) = (hexadecimal(call.inner), hexadecimal(status));
        let lengths = if lengths.is_empty() {
            "-".to_owned()
        } else {
            lengths.join(",")
        };
        self.line(&format!(
            "call {file} {:x} {inner} {lengths} {result} {status}\n",
            call.number
        ));
    }

    fn line(&self, line: &str) {
        // A full disk does not stop a program.
        let _ = self.0.lock_unpoisoned().write_all(line.as_bytes());
    }
}
