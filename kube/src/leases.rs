//! The service that grants leases, as a client of it.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    time::Duration,
};

use remoting_pool::leases::request::{Answer, Grant, LONGEST, Listing, Name, Request};

/// How long an answer is waited for. A pool that starts takes some time, and one that ends.
const PATIENCE: Duration = Duration::from_mins(1);
/// The longest answer in bytes: all leases.
const LONGEST_ANSWER: u64 = 256 * LONGEST;

/// The service.
#[derive(Clone, Debug)]
pub struct Service {
    /// Its socket.
    pub socket: PathBuf,
}

/// Why there is no answer, or not the one that was asked for.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody answers.
    #[error("the service for leases does not answer at {}: start gantry-leases.service", .0.display())]
    Silent(PathBuf, #[source] io::Error),
    /// It refuses.
    #[error("{0}")]
    Refused(String),
    /// It answers something else.
    #[error(
        "the service for leases is of another version: install gantry-accel and gantry-kube of one version"
    )]
    Other,
}

impl Service {
    /// Grants a lease: its socket.
    ///
    /// # Errors
    /// It is refused, or nobody answers.
    pub fn grant(&self, grant: Grant) -> Result<PathBuf, Error> {
        match self.ask(&Request::Grant(grant))? {
            Answer::Socket(socket) => Ok(socket),
            _ => Err(Error::Other),
        }
    }

    /// Ends a lease.
    ///
    /// # Errors
    /// As for [`grant`](Self::grant).
    pub fn revoke(&self, name: Name) -> Result<(), Error> {
        self.ask(&Request::Revoke { name }).map(drop)
    }

    /// All devices and leases.
    ///
    /// # Errors
    /// As for [`grant`](Self::grant).
    pub fn list(&self) -> Result<Listing, Error> {
        match self.ask(&Request::List {})? {
            Answer::Leases(listing) => Ok(listing),
            _ => Err(Error::Other),
        }
    }

    fn ask(&self, request: &Request) -> Result<Answer, Error> {
        let line = self.exchange(request);
        let line = line.map_err(|error| Error::Silent(self.socket.clone(), error))?;
        match serde_json::from_slice(&line) {
            Ok(Answer::Refused(why)) => Err(Error::Refused(why)),
            Ok(answer) => Ok(answer),
            Err(_) => Err(Error::Other),
        }
    }

    fn exchange(&self, request: &Request) -> io::Result<Vec<u8>> {
        let stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut text = serde_json::to_vec(request)?;
        text.push(b'\n');
        (&stream).write_all(&text)?;
        let mut line = Vec::new();
        BufReader::new(stream.take(LONGEST_ANSWER)).read_until(b'\n', &mut line)?;
        match line.last() {
            Some(b'\n') => Ok(line),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}
