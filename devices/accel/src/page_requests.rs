//! What a worker asks of BAR 4 on its connection, one request at a time.

use std::{
    io,
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::Arc,
};

use remoting_proto::apis::nvidia::{PageAnswer, PageRequest};
use remoting_transport::socket;

use super::pages::{Pages, Refused};

/// What a worker's request may come with: the file, and one that is kept open beside it.
const MOST_FILES: usize = 2;

/// The requests of the worker that serves.
pub struct Requests {
    pages: Arc<Pages>,
    /// The beginning of a request of which the rest has not arrived.
    bytes: [u8; PageRequest::SIZE],
    filled: usize,
    /// Files that have come with it.
    files: Vec<OwnedFd>,
}

/// Why a worker must end.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// It has ended.
    #[error("has ended")]
    Gone,
    /// Its connection fails.
    #[error("cannot be heard: {0}")]
    Connection(io::Error),
    /// A file of its request was lost.
    #[error("has sent files, and this process has as many open as it may (raise its hard limit)")]
    FilesLost,
    /// It has sent something else than a request.
    #[error("has sent an invalid page request")]
    NoRequest,
    /// It has sent another file.
    #[error(transparent)]
    File(Refused),
    /// It does not read answers.
    #[error("does not take the answer to its request for pages: {0}")]
    Answer(io::Error),
}

impl Requests {
    /// No request has arrived.
    pub fn new(pages: Arc<Pages>) -> Self {
        Self {
            pages,
            bytes: [0; PageRequest::SIZE],
            filled: 0,
            files: Vec::new(),
        }
    }

    /// The pages that they are for.
    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Receives what has arrived, of one request at most, and answers it once it is complete. Does not
    /// wait. Files that are no longer needed are added to `done`: closing a file may take long.
    ///
    /// # Errors
    /// The worker must end.
    pub fn serve(&mut self, stream: &UnixStream, done: &mut Vec<OwnedFd>) -> Result<(), Fault> {
        let served = self.receive(stream).and_then(|complete| match complete {
            true => self.answer(stream, done),
            false => Ok(()),
        });
        if served.is_err() {
            done.append(&mut self.files);
        }
        done.append(&mut self.pages.take_done());
        served
    }

    /// Forgets a request that did not arrive completely.
    pub fn forget(&mut self, done: &mut Vec<OwnedFd>) {
        self.filled = 0;
        done.append(&mut self.files);
        done.append(&mut self.pages.take_done());
    }

    /// Whether a request is complete.
    fn receive(&mut self, stream: &UnixStream) -> Result<bool, Fault> {
        match socket::receive(stream, &mut self.bytes[self.filled..]) {
            Ok((0, _)) => Err(Fault::Gone),
            Ok((count, mut files)) => {
                self.filled += count;
                self.files.append(&mut files);
                match self.files.len() > MOST_FILES {
                    true => Err(Fault::NoRequest),
                    false => Ok(self.filled == self.bytes.len()),
                }
            }
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(false),
                _ => Err(match socket::FilesLost::arrived(error) {
                    Ok((_, mut files)) => {
                        self.files.append(&mut files);
                        Fault::FilesLost
                    }
                    Err(error) => Fault::Connection(error),
                }),
            },
        }
    }

    fn answer(&mut self, stream: &UnixStream, done: &mut Vec<OwnedFd>) -> Result<(), Fault> {
        self.filled = 0;
        let request = PageRequest::from_bytes(&self.bytes).ok_or(Fault::NoRequest)?;
        if matches!(request, PageRequest::Place { .. }) == self.files.is_empty() {
            return Err(Fault::NoRequest);
        }
        let outcome = self.pages.carry_out(request, &mut self.files);
        done.append(&mut self.files);
        let number = match outcome {
            Ok(()) => 0,
            Err(Refused::Answer(error)) => error.raw_os_error().unwrap_or(libc::EIO),
            Err(refused) => return Err(Fault::File(refused)),
        };
        let answer = PageAnswer(number.unsigned_abs());
        socket::send(stream, &answer.to_bytes(), &[]).map_err(Fault::Answer)
    }
}
