//! Postcopy: contents of memory that are transferred after the application has resumed elsewhere.
//!
//! ```text
//!   source            to                 destination
//!   SaveRest(n, true) a file             Restore    all but the contents of large objects
//!   Leave                                Go         it serves
//!   Fetch             a file, for each   writes them
//! ```
//!
//! Contents that a call of the application needs are fetched first; that call, and all calls behind it, wait for them.
//! The source's process stays until everything has been transferred. If it ends before that, the application ends when
//! it needs contents that are lost.

use std::{fs::File, sync::mpsc};

use super::{
    image::{Immovable, Writer},
    precopy::said,
};

/// Saves the contents of the object with this number in the state.
type Save = dyn FnMut(u32, Writer) -> Result<(), Immovable> + Send;

/// Contents of memory that were left out of a saved state.
pub struct Remaining(pub Box<Save>);

impl std::fmt::Debug for Remaining {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Remaining")
    }
}

impl Remaining {
    /// Saves contents as they are asked for, until nobody can ask any more.
    pub fn serve(remaining: Option<Self>, fetches: mpsc::Receiver<Fetch>) {
        let mut save = remaining.map(|Self(save)| save);
        for Fetch { mem, file, done } in fetches {
            let saved = match &mut save {
                Some(save) => save(mem, Writer::new(file)),
                None => Err(Immovable::Wrong("contents that were saved")),
            };
            // The requester may have gone.
            let _ = done.send(said(saved));
        }
    }
}

/// A request for the contents of a memory object.
#[derive(Debug)]
pub struct Fetch {
    mem: u32,
    file: File,
    done: mpsc::Sender<Result<(), String>>,
}

impl Fetch {
    /// Sends the request to a session that has left, and waits.
    ///
    /// # Errors
    /// Why the contents are not in the file.
    pub fn ask(to: &mpsc::Sender<Self>, mem: u32, file: File) -> Result<(), String> {
        let (done, outcome) = mpsc::channel();
        let over = || "it serves nobody any more".to_owned();
        to.send(Self { mem, file, done }).map_err(|_| over())?;
        outcome.recv().map_err(|_| over())?
    }
}
