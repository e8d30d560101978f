//! Contents of accelerators' applications that follow their machine (`accel_postcopy=on`): workers at the destination
//! request them when the machine runs, and the workers at the source stay until everything has been transferred.
//!
//! ```text
//!   worker there        destination             source             worker here
//!   Fetch, a file  ──>  Fetch     ────────────>  Fetch, a file ──>
//!                       Archive, Fetched <─────  Done          <──  writes the file
//!   Done           <──
//!   its end        ──>  Drained   ────────────>  its end       ──>
//! ```
//!
//! The requests are served one after the other on the migration's first connection. If it breaks, or a worker at the
//! source ends, each affected application gets an error when it needs the lost contents. The machine itself has
//! everything that it needs.

use std::{
    fs::File,
    os::fd::BorrowedFd,
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

use base::{Chain, Unpoisoned};
use devices::accel::left::{Application, Asking, Failure, Fetch, serve_fetches};
use serde::{Deserialize, Serialize};
use vmm_machine::applications;

use super::{
    Error, Result, archive,
    connection::{Connection, STALL},
    frame::{Kind, protocol},
    lanes::Body,
};

/// Maximum length of the reason for lost contents, in characters.
const LONGEST: usize = 1000;

/// How long the source may take before the first contents of an object arrive.
const SAVED: Duration = applications::LONG.saturating_add(STALL);

/// A request for contents.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Asked {
    /// The application that requests them.
    #[serde(flatten)]
    pub of: Application,
    /// The object's number.
    pub mem: u32,
    /// Size of the object in bytes.
    pub bytes: u64,
    /// Bytes of all objects that have yet to be transferred, including this one.
    pub left: u64,
}

impl Asked {
    /// The request in the form that a worker gets.
    pub fn fetch(&self) -> Fetch {
        Fetch {
            mem: self.mem,
            bytes: self.bytes,
            left: self.left,
        }
    }
}

/// The reply to a request: how many bytes the preceding archive frames contain, or why the contents are lost.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Came(u64),
    Lost(String),
}

fn parse<'a, T: Deserialize<'a>>(contents: &'a [u8], what: &str) -> Result<T> {
    serde_json::from_slice(contents)
        .map_err(|error| protocol(format!("{what} does not parse: {error}")))
}

fn text(of: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(of).map_err(|error| Error::Machine(error.to_string()))
}

/// A message of the destination after the machine has started to run there.
#[derive(Debug)]
pub enum Said {
    /// A request for contents.
    Asks(Asked),
    /// An application needs no more contents.
    Drained(Application),
}

/// Waits for the destination's next message, as long as the connection lasts.
pub fn hear(connection: &mut Connection, contents: &mut Vec<u8>) -> Result<Said> {
    let header = connection.receive(&[Kind::Fetch, Kind::Drained], contents)?;
    Ok(match header.kind {
        Kind::Fetch => Said::Asks(parse(contents, "a question for contents")?),
        _ => Said::Drained(parse(contents, "an application's name")?),
    })
}

/// Sends what a worker has saved, or the reason why it failed.
pub fn answer(
    connection: &mut Connection,
    asked: &Asked,
    saved: std::result::Result<File, String>,
    progress: &super::progress::Progress,
) -> Result<()> {
    let fits = |file: &File| {
        let size = file.metadata().map_err(|error| error.to_string())?.len();
        match size > archive::of_object(asked.bytes) {
            true => Err("it has more contents than were asked for".to_owned()),
            false => Ok(()),
        }
    };
    let answer = match saved.and_then(|file| fits(&file).map(|()| file)) {
        Ok(file) => Answer::Came(archive::send(&file, connection, progress)?.size),
        Err(why) => Answer::Lost(why.chars().take(LONGEST).collect()),
    };
    connection.send(Kind::Fetched, 0, &text(&answer)?)
}

/// The connection to the source, shared by all workers that request contents.
struct Source {
    connection: Connection,
    contents: Vec<u8>,
    /// Why no more contents can arrive.
    lost: Option<String>,
}

impl Source {
    /// Requests contents and writes them to a file; the received data is untrusted.
    fn fetch(&mut self, asked: &Asked, file: BorrowedFd<'_>) -> std::result::Result<(), String> {
        if let Some(why) = &self.lost {
            return Err(why.clone());
        }
        let came = self.ask(asked, file);
        came.unwrap_or_else(|error| {
            let why = Chain(&error).to_string();
            log::warn!("contents of applications' memory that have not come are lost: {why}");
            self.lost = Some(why.clone());
            Err(why)
        })
    }

    fn ask(
        &mut self,
        asked: &Asked,
        file: BorrowedFd<'_>,
    ) -> Result<std::result::Result<(), String>> {
        // Data that cannot be written is received all the same, because other replies follow it.
        let file = file.try_clone_to_owned();
        let mut incoming = match file {
            Ok(file) => Ok(archive::Incoming::to(
                file.into(),
                archive::of_object(asked.bytes),
            )),
            Err(error) => Err(error.to_string()),
        };
        self.connection.send(Kind::Fetch, 0, &text(asked)?)?;
        let mut came = 0;
        loop {
            let expected = [Kind::Archive, Kind::Fetched];
            let header = self.connection.receive(&expected, &mut self.contents)?;
            if header.kind == Kind::Archive {
                // Counts whole chunks, however little they contain, so that the number of frames is bounded.
                came += archive::CHUNK as u64;
                if came > archive::of_object(asked.bytes) {
                    return Err(protocol("it sends more contents than were asked for"));
                }
                let taken = incoming.as_mut().map(|file| file.take(&self.contents));
                match taken {
                    // A problem of the worker's file only.
                    Ok(Err(error @ Error::Machine(_))) => {
                        incoming = Err(Chain(&error).to_string());
                    }
                    Ok(Err(error)) => return Err(error),
                    Ok(Ok(())) | Err(_) => {}
                }
                continue;
            }
            return Ok(match parse(&self.contents, "an answer about contents")? {
                Answer::Came(size) => incoming.and_then(|file| {
                    let file = file.finish(Some(size));
                    file.map(drop).map_err(|error| Chain(&error).to_string())
                }),
                Answer::Lost(why) => Err(clean(&why)),
            });
        }
    }
}

/// Sanitizes text for logs and for users of programs.
fn clean(text: &str) -> String {
    let shown = text.chars().filter(|c| !c.is_control());
    shown.take(LONGEST).collect()
}

/// Serves the requests that workers make on these sockets, with one thread for each, until all have ended.
pub fn relay(
    mut connection: Connection,
    asking: Vec<Asking>,
    start: &mut dyn FnMut(Body) -> std::result::Result<(), String>,
) {
    connection.doing = "waiting for contents of applications' memory";
    connection.stall = SAVED;
    connection.uninterrupted = true;
    let source = Arc::new(Mutex::new(Source {
        connection,
        contents: Vec::new(),
        lost: None,
    }));
    for one in asking {
        let source = Arc::clone(&source);
        let name = one.of.to_string();
        let body = move || serve(&source, &one);
        if let Err(why) = start(Box::new(body)) {
            log::warn!("{name}: contents of its memory that follow are lost: {why}");
        }
    }
}

/// Serves one worker.
fn serve(source: &Mutex<Source>, asking: &Asking) {
    let Asking {
        of,
        socket,
        followed,
    } = asking;
    let served = serve_fetches(socket, |what, file| {
        let asked = Asked {
            of: of.clone(),
            mem: what.mem,
            bytes: what.bytes,
            left: what.left,
        };
        let came = source.lock_unpoisoned().fetch(&asked, file);
        came.map_err(Failure::Refused)?;
        followed.fetch_add(1, Ordering::Relaxed);
        Ok(())
    });
    if let Err(error) = served {
        log::warn!("{of} has lost contents of its memory: {}", Chain(&error));
    }
    let mut source = source.lock_unpoisoned();
    if source.lost.is_none()
        && let Err(error) = text(of).and_then(|of| source.connection.send(Kind::Drained, 0, &of))
    {
        log::debug!(
            "the source does not hear that {of} has all: {}",
            Chain(&error)
        );
    }
}
