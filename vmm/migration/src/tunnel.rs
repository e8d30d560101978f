//! TLS for migrations: a separate process, `gantry-tunnel`, owns the sockets and the keys, and passes the decrypted
//! data through a Unix socket.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{Error, Result, connection::TICK, dial, progress::Progress};

/// Time limit for the tunnel to connect, with both sides presenting their certificates.
const PATIENCE: Duration = Duration::from_secs(30);

/// Maximum length of a reply.
const MAX_LINE: usize = 64 << 10;

/// TLS settings of a migration.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Tls {
    /// Directory with certificates and keys, which the tunnel reads.
    pub dir: PathBuf,
    /// Unix socket of the tunnel process.
    pub tunnel: PathBuf,
}

impl Tls {
    /// Connects to `HOST:PORT` through the tunnel.
    pub fn connect(&self, to: &str, progress: &Progress) -> Result<UnixStream> {
        self.ask(
            &json!({"connect": {"to": to, "tls_dir": self.dir}}),
            progress,
        )
    }

    /// Listens at `ADDRESS:PORT`. The returned stream delivers data when a peer has connected.
    pub fn listen(&self, at: &str, progress: &Progress) -> Result<UnixStream> {
        self.ask(
            &json!({"listen": {"at": at, "tls_dir": self.dir}}),
            progress,
        )
    }

    fn ask(&self, request: &Value, progress: &Progress) -> Result<UnixStream> {
        let url = format!("the tunnel at {}", self.tunnel.display());
        let failed = |source| Error::Connect {
            action: "connect to",
            url: url.clone(),
            source,
        };
        let stream = dial::unix(&self.tunnel, progress).map_err(|source| {
            let cure = "start it as this user: gantry-tunnel --socket PATH, or systemctl start gantry-tunnel";
            failed(io::Error::new(source.kind(), format!("{source}; {cure}")))
        })?;
        let mut stream = stream.ok_or(Error::Cancelled)?;
        stream.set_nonblocking(false).map_err(failed)?;
        stream.set_read_timeout(Some(TICK)).map_err(failed)?;
        stream
            .write_all(format!("{request}\n").as_bytes())
            .map_err(failed)?;
        let deadline = Instant::now() + PATIENCE;
        let mut line = Vec::new();
        let mut byte = [0];
        // Byte by byte: whatever follows the line comes from the peer.
        while byte != *b"\n" && line.len() < MAX_LINE {
            if progress.is_cancelled() {
                return Err(Error::Cancelled);
            }
            match stream.read(&mut byte) {
                Ok(0) => return Err(failed(io::ErrorKind::UnexpectedEof.into())),
                Ok(_) => line.extend(byte),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if Instant::now() >= deadline {
                        return Err(failed(io::ErrorKind::TimedOut.into()));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(error)),
            }
        }
        match serde_json::from_slice(&line).unwrap_or(Value::Null) {
            Value::String(answer) if answer == "ready" => Ok(stream),
            answer => {
                let reason = answer["failed"].as_str().unwrap_or("it says nothing known");
                Err(failed(io::Error::other(reason.to_owned())))
            }
        }
    }
}
