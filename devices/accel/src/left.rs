//! The workers of applications that have left for another host, where contents of their memory
//! follow.

use std::{
    collections::BTreeMap,
    fmt,
    fs::File,
    io,
    os::{fd::AsFd, unix::net::UnixStream},
};

use base::{Chain, Patience};
use remoting_transport::control::{SOON, image};
use serde::{Deserialize, Serialize};

use super::{handle::named, lend::Replaced};

pub use super::slices::Followed;
pub use remoting_transport::control::{Failure, Fetch, serve_fetches};

/// An application of a VM.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
pub struct Application {
    /// ID of its port.
    pub port: String,
    /// Its slice.
    pub slice: u32,
}

impl fmt::Display for Application {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&named(&self.port, self.slice))
    }
}

/// An application that runs here before its contents have arrived.
#[derive(Debug)]
pub struct Asking {
    /// The application.
    pub of: Application,
    /// Socket on which its worker requests them.
    pub socket: UnixStream,
    /// Counts the contents that have arrived.
    pub followed: Followed,
}

/// The workers that the applications have left. Each ends when this is dropped.
#[derive(Debug, Default)]
pub struct Left(BTreeMap<Application, Result<Replaced, String>>);

impl Left {
    pub(super) fn add(&mut self, of: Application, worker: Result<Replaced, Failure>) {
        let worker = worker.map_err(|why| {
            let why = Chain(&why).to_string();
            log::warn!("{of}: contents of its memory that were to follow it are lost: {why}");
            why
        });
        self.0.insert(of, worker);
    }

    /// Whether no application needs these workers any more.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Lets an application's worker save contents to a file.
    ///
    /// # Errors
    /// The contents are lost.
    pub fn fetch(&mut self, of: &Application, what: &Fetch) -> Result<File, String> {
        let file = image().map_err(|error: io::Error| error.to_string())?;
        let Some(worker) = self.0.get_mut(of) else {
            return Err("nothing of that application is left here".to_owned());
        };
        let old = worker.as_ref().map_err(String::clone)?;
        let Err(error) = old.fetch(what, file.as_fd()) else {
            return Ok(file);
        };
        let why = Chain(&error).to_string();
        if !error.is_refusal() {
            // A late reply would be taken for the reply to another command, so the worker ends.
            log::warn!("{of}: contents of its memory that have not come are lost: {why}");
            *worker = Err(why.clone());
        }
        Err(why)
    }

    /// Ends the worker of an application that has received everything it needs.
    pub fn drained(&mut self, of: &Application) {
        if let Some(Ok(worker)) = self.0.remove(of)
            && let Err(why) = worker.end(&Patience::within(SOON))
        {
            log::warn!("{of}: the worker that it had here does not end: {why}");
        }
    }
}
