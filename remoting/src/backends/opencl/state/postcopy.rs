//! Contents that are not in the state: saved where the application was, and written where it is, one object
//! after the other.

use std::{
    os::{fd::AsFd, unix::net::UnixStream},
    sync::Arc,
    thread,
};

use base::{Chain, Patience};

use super::{
    Bytes,
    contents::Root,
    copies::{Copier, Copies},
    precopy::Kept,
};
use crate::{
    apis::opencl::OpenCl,
    backends::opencl::{
        Server,
        driver::api::Api,
        missing::{Missing, Numbers},
    },
    link::control::{AFTER_DRAIN, Command, LONG, Peer},
    session::{
        image::{self, Contents, Immovable},
        notice::Notice,
        postcopy::Remaining,
    },
};

/// Objects of fewer bytes are in the state: to ask for them takes as long as to copy them.
pub(super) const LARGE: u64 = 256 << 10;

/// Contents of these objects, which stay with the driver, for who asks for them later: of each what has changed
/// since it was copied.
pub(super) fn remaining(api: &Arc<Api>, mut copies: Copies, left: Vec<Root>) -> Option<Remaining> {
    if left.is_empty() {
        return None;
    }
    let kept = Kept::new(api, left);
    let api = Arc::clone(api);
    Some(Remaining(Box::new(move |number, mut image| {
        let root = kept.roots.iter().find(|root| root.number == number);
        let root = root.ok_or(Immovable::Wrong("contents that were not left out"))?;
        let saved = copies.save(&api, std::slice::from_ref(root), &mut image)?;
        image.finish::<OpenCl, _>(super::SHAPE, &saved)
    })))
}

/// Objects whose contents are to be fetched.
#[derive(Debug)]
pub struct Fetching(Kept);

impl Fetching {
    /// Fetches those that are still missing, until all have come or one does not.
    fn run(&self, api: &Arc<Api>, source: &UnixStream, numbers: &Numbers, wake: impl Fn()) {
        while let Some(number) = numbers.next() {
            let mut roots = self.0.roots.iter();
            let root = roots.find(|root| root.number == number);
            let fetched = root.map_or(Ok(()), |root| fetch(api, source, root));
            let is_lost = fetched.is_err();
            numbers.came(number, fetched);
            wake();
            if is_lost {
                break;
            }
        }
    }
}

/// Fetches what an object has. Why it has not come.
fn fetch(api: &Arc<Api>, source: &UnixStream, root: &Root) -> Result<(), String> {
    let words = |error: &dyn std::error::Error| Chain(error).to_string();
    let image = image::create().map_err(|error| words(&error))?;
    let source = Peer {
        channel: source,
        who: "the worker that it has left",
    };
    // Who passes it on says itself that it takes too long.
    let patience = Patience::within(LONG + AFTER_DRAIN);
    source
        .ask(&Command::Fetch(root.number), &[image.as_fd()], &patience)
        .map_err(|error| words(&error))?;
    let written = (|| {
        let (parts, contents) = Contents::open::<OpenCl, Vec<Bytes>>(image, super::SHAPE)?;
        let copier = Copier::new(api, root, None)?;
        root.write(api, copier.queue, &parts, &contents)
    })();
    written.map_err(|error| words(&error))
}

impl Server {
    /// Contents of these objects, by their numbers in the log, are to be fetched.
    pub(in super::super) fn await_contents(&mut self, numbers: &[u32]) -> Result<(), Immovable> {
        if numbers.is_empty() {
            return Ok(());
        }
        let mut roots = Vec::new();
        let mut records = Vec::new();
        for number in numbers {
            let mem = self.backend.mems.get(*number);
            let mem = mem.map_err(|_| Immovable::Wrong("contents of no buffer"))?;
            roots.push(Root::of(self, *number, mem, true)?);
            records.push((*number, Arc::clone(&mem.record)));
        }
        let fetching = Fetching(Kept::new(&self.backend.api, roots));
        self.backend.missing = Some(Missing::new(&records, fetching));
        Ok(())
    }

    /// Begins to fetch what the state was saved without, by this socket.
    ///
    /// # Errors
    /// There is no socket.
    pub fn fetch_contents(&mut self, source: Option<UnixStream>) -> Result<(), Immovable> {
        let Some(missing) = &mut self.backend.missing else {
            return Ok(());
        };
        let source = source.ok_or(Immovable::Wrong("contents that nobody brings"))?;
        let Some((fetching, numbers)) = missing.begin() else {
            return Ok(());
        };
        let (api, board) = (Arc::clone(&self.backend.api), Arc::clone(&self.board));
        let work = Arc::new(move || {
            fetching.run(&api, &source, &numbers, || board.leave(Notice::Wake));
        });
        let aside = Arc::clone(&work);
        let thread = thread::Builder::new().name("postcopy".to_owned());
        if thread.spawn(move || aside()).is_err() {
            // The source has left: all comes before it is served, then.
            work();
        }
        Ok(())
    }
}
