//! Requests of a VMM: a line of JSON, answered by a line of JSON. After that, the connection is
//! this end of the tunnel.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    time::Duration,
};

use serde::{Deserialize, Serialize};

/// Maximum length of a line in bytes.
const MAX_LINE: usize = 8 << 10;

/// Timeout for reading a line.
const PATIENCE: Duration = Duration::from_secs(10);

/// Selects an end of a tunnel.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    /// The source: connects. Answered once both sides have authenticated each other.
    Connect {
        /// `HOST:PORT`. The other side's certificate must name the host.
        to: String,
        /// Directory with `ca-cert.pem`, `client-cert.pem` and `client-key.pem`.
        tls_dir: PathBuf,
    },
    /// The destination: waits for the other side. Answered once the address is bound.
    Listen {
        /// `ADDRESS:PORT`.
        at: String,
        /// Directory with `ca-cert.pem`, `server-cert.pem` and `server-key.pem`.
        tls_dir: PathBuf,
    },
}

/// The outcome of a request.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// All further bytes pass through the tunnel.
    Ready,
    /// Why there is no tunnel.
    Failed(String),
}

/// Reads a line, and not a byte more.
pub fn read_line(stream: &mut UnixStream) -> io::Result<Vec<u8>> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut line = Vec::new();
    let mut byte = [0];
    while line.len() < MAX_LINE {
        stream.read_exact(&mut byte)?;
        if byte == *b"\n" {
            return Ok(line);
        }
        line.extend(byte);
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidData,
        "a request is one line of at most 8 KiB",
    ))
}

/// Writes an answer.
pub fn answer(stream: &mut UnixStream, answer: &Answer) -> io::Result<()> {
    let mut line = serde_json::to_vec(answer)?;
    line.push(b'\n');
    stream.write_all(&line)
}
