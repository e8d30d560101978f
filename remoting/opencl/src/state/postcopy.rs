//! Contents that are not in the state: saved where the application was, and written where it is, one object after the
//! other.

use std::{
    collections::HashMap,
    fs::File,
    io::Seek,
    os::{fd::AsFd, unix::net::UnixStream},
    sync::Arc,
    thread,
    time::Duration,
};

use base::{Chain, Patience};
use remoting_proto::apis::opencl::OpenCl;
use remoting_session::{
    image::{self, Contents, Immovable},
    notice::Notice,
    postcopy::Remaining,
};
use remoting_transport::control::{self, Command, Fetch, Peer, Worker};

use super::{
    Bytes,
    contents::Root,
    copies::{Copier, Copies},
    precopy::Kept,
};
use crate::{
    Server,
    driver::api::Api,
    missing::{Missing, Next, Numbers},
};

/// Objects smaller than this, in bytes, are in the state: requesting them takes as long as copying them.
pub(super) const LARGE: u64 = 256 << 10;
/// Maximum time for contents to arrive. Whoever passes them on reports by itself if nothing will come any more.
const PASSED_ON: Duration = Duration::from_secs(24 * 3600);

/// The contents of these objects, which the driver keeps until they are requested. Of each object this covers what has
/// changed since it was copied.
pub(super) fn remaining(api: &Arc<Api>, mut copies: Copies, left: Vec<Root>) -> Option<Remaining> {
    if left.is_empty() {
        return None;
    }
    let kept = Kept::new(api, left);
    let numbers = kept.roots.iter().map(|root| root.number);
    let places: HashMap<_, _> = numbers
        .enumerate()
        .map(|(at, number)| (number, at))
        .collect();
    let api = Arc::clone(api);
    Some(Remaining(Box::new(move |number, mut image| {
        let root = places.get(&number).map(|at| &kept.roots[*at]);
        let root = root.ok_or(Immovable::Wrong("contents that were not left out"))?;
        let saved = copies.save(&api, std::slice::from_ref(root), &mut image)?;
        image.finish::<OpenCl, _>(super::SHAPE, &saved)
    })))
}

/// Fetches missing contents until all have been requested.
fn fetch_all(
    api: &Arc<Api>,
    (source, image): (&UnixStream, &File),
    numbers: &Numbers,
    wake: impl Fn(),
) {
    while let Some(next) = numbers.next() {
        let fetched = fetch(api, (source, image), &next);
        let number = next.number;
        drop(next);
        numbers.came(number, fetched);
        wake();
    }
    // Released objects are not awaited any more, either.
    wake();
}

/// Fetches an object's contents, by this file. Fails with the reason.
fn fetch(
    api: &Arc<Api>,
    (source, mut image): (&UnixStream, &File),
    next: &Next,
) -> Result<(), String> {
    let words = |error: &dyn std::error::Error| Chain(error).to_string();
    // Whoever writes to it does so where it ends for this process, too.
    let emptied = image.set_len(0).and_then(|()| image.rewind());
    let copy = emptied.and_then(|()| image.try_clone());
    let copy = copy.map_err(|error| words(&error))?;
    let source = Peer {
        channel: source,
        who: Worker::Left,
    };
    let what = Fetch {
        mem: next.number,
        bytes: next.object.bytes(),
        left: next.left,
    };
    source
        .ask(&Command::Fetch(what), &[], &Patience::within(PASSED_ON))
        .map_err(|error| words(&error))?;
    let written = (|| {
        let (parts, contents) = Contents::open::<OpenCl, Vec<Bytes>>(copy, super::SHAPE)?;
        for part in parts.iter().filter(|part| part.mem == next.number) {
            // Here, too, it has contents, which must be taken along in the next move.
            next.touch(part.from, part.length);
        }
        for root in &next.object.roots {
            let copier = Copier::new(api, root, None)?;
            root.write(api, copier.queue, &parts, &contents)?;
        }
        Ok::<_, Immovable>(())
    })();
    written.map_err(|error| words(&error))
}

impl Server {
    /// Registers the contents of these objects, by their numbers in the log, to be fetched.
    pub(in super::super) fn await_contents(&mut self, numbers: &[u32]) -> Result<(), Immovable> {
        if numbers.is_empty() {
            return Ok(());
        }
        let mut objects = Vec::new();
        for number in numbers {
            let mem = self.backend.mems.get(*number);
            let mem = mem.map_err(|_| Immovable::Wrong("contents of no buffer"))?;
            // All of it may arrive: the source knows how much of it was ever written.
            let root = Root::of(self, *number, mem, true)?.whole();
            let kept = Kept::new(&self.backend.api, vec![root]);
            objects.push((*number, Arc::clone(&mem.record), kept));
        }
        self.backend.missing = Some(Missing::new(objects));
        Ok(())
    }

    /// Begins to fetch through this socket what the state was saved without.
    ///
    /// # Errors
    /// There is no socket, or no file.
    pub fn fetch_contents(&mut self, source: Option<UnixStream>) -> Result<(), Immovable> {
        let Some(missing) = &mut self.backend.missing else {
            return Ok(());
        };
        let source = source.ok_or(Immovable::Wrong("contents that nobody brings"))?;
        let Some(numbers) = missing.begin() else {
            return Ok(());
        };
        // Once for all: a worker that serves sends no files.
        let image = image::create()?;
        control::send(&source, &Command::Files(), &[image.as_fd()])?;
        let (api, board) = (Arc::clone(&self.backend.api), Arc::clone(&self.board));
        let work = Arc::new(move || {
            let by = (&source, &image);
            fetch_all(&api, by, &numbers, || board.leave(Notice::Wake));
        });
        let aside = Arc::clone(&work);
        let thread = thread::Builder::new().name("postcopy".to_owned());
        if thread.spawn(move || aside()).is_err() {
            // The source has left: everything arrives before the application is served, then.
            work();
        }
        Ok(())
    }
}
