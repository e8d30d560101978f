//! Postcopy: contents of memory that follow once the application goes on elsewhere.
//!
//! ```text
//!   source            to                 destination
//!   SaveRest(n, true) a file             Restore    all but the contents of large objects
//!   Leave                                Go         it serves
//!   Fetch             a file, for each   writes them
//! ```
//!
//! What is asked for first is what a call of the application needs, which waits for it, and all calls behind it.
//! The source's process stays until all has come. If it ends before, the application ends where it needs what is
//! lost.

use std::{fs::File, sync::mpsc};

use super::{
    image::{Immovable, Writer},
    precopy::said,
};

/// Saves the contents of an object by its number in the state.
type Save = dyn FnMut(u32, Writer) -> Result<(), Immovable> + Send;

/// Contents of memory that a state was saved without.
pub struct Remaining(pub Box<Save>);

impl std::fmt::Debug for Remaining {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Remaining")
    }
}

impl Remaining {
    /// Saves contents as they are asked for, until nobody can any more.
    pub(crate) fn serve(remaining: Option<Self>, fetches: mpsc::Receiver<Fetch>) {
        let mut save = remaining.map(|Self(save)| save);
        for Fetch { mem, file, done } in fetches {
            let saved = match &mut save {
                Some(save) => save(mem, Writer::new(file)),
                None => Err(Immovable::Wrong("contents that were saved")),
            };
            // Who has asked for it may have gone.
            let _ = done.send(said(saved));
        }
    }
}

/// Contents of memory that are asked for.
#[derive(Debug)]
pub struct Fetch {
    mem: u32,
    file: File,
    done: mpsc::Sender<Result<(), String>>,
}

impl Fetch {
    /// Asks a session that has left, and waits.
    ///
    /// # Errors
    /// Why they are not in the file.
    pub fn ask(to: &mpsc::Sender<Self>, mem: u32, file: File) -> Result<(), String> {
        let (done, outcome) = mpsc::channel();
        let over = || "it serves nobody any more".to_owned();
        to.send(Self { mem, file, done }).map_err(|_| over())?;
        outcome.recv().map_err(|_| over())?
    }
}
