//! What is saved of an application while it runs, and made before it arrives.

use std::{
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use base::Unpoisoned;
use remoting_proto::{
    apis::opencl::OpenCl,
    wire::{Blob, Wire},
};
use remoting_session::{
    image::{Contents, Immovable, Writer},
    precopy::Copying,
};

use super::{
    Early,
    contents::{self, Root},
    copies::Copies,
    log::Log,
};
use crate::{
    Server,
    driver::{
        api::{Api, Handle},
        cl, status,
    },
    freed,
    missing::{self, Missing},
    written::{Noted, Written},
};

/// How long a round waits for outstanding commands before it copies what they may write.
const DRAIN: Duration = Duration::from_secs(1);
/// Interval between its checks.
const LOOK: Duration = Duration::from_micros(100);

/// What has been copied.
#[derive(Debug)]
pub struct Precopied {
    log: Log,
    /// `None` while a round copies, and after a failed one.
    copies: Arc<Mutex<Option<Copies>>>,
    /// What commands may have written since the last round began.
    noted: Noted,
}

impl Precopied {
    /// The log, the copies, and what may differ from the copies.
    pub(super) fn into_parts(self) -> Result<(Log, Copies, Written), Immovable> {
        let copies = self.copies.lock_unpoisoned().take();
        let copies = copies.ok_or_else(|| Immovable::Has("its contents are not copied".to_owned()));
        let mut copies = copies?;
        let mut written = std::mem::take(&mut *self.noted.lock_unpoisoned());
        written.join(std::mem::take(&mut copies.late));
        Ok((self.log, copies, written))
    }
}

/// Events behind all commands that were outstanding when a round began.
struct Behind {
    api: Arc<Api>,
    events: Vec<Handle>,
    /// Whether there are commands for which the driver created no event.
    has_more: bool,
}

impl Behind {
    /// Waits for the commands, but only briefly: some may depend on the application. Returns
    /// whether all have ended.
    fn have_ended(&self) -> bool {
        let until = Instant::now() + DRAIN;
        let has_ended = |event: &Handle| loop {
            if status(&self.api, *event) <= 0 {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
            thread::sleep(LOOK);
        };
        self.events.iter().all(has_ended) && !self.has_more
    }
}

impl Drop for Behind {
    fn drop(&mut self) {
        for event in &self.events {
            cl!(self.api, clReleaseEvent(*event));
        }
    }
}

/// Buffers and images that the driver keeps until they have been copied.
#[derive(Debug)]
pub struct Kept {
    api: Arc<Api>,
    pub(super) roots: Vec<Root>,
}

impl Kept {
    pub(super) fn new(api: &Arc<Api>, roots: Vec<Root>) -> Self {
        for mem in Self::handles(&roots) {
            cl!(api, clRetainMemObject(mem));
        }
        Self {
            api: Arc::clone(api),
            roots,
        }
    }

    /// Total bytes of all of them.
    pub fn bytes(&self) -> u64 {
        let lengths = self.roots.iter().map(Root::bytes);
        lengths.fold(0, u64::saturating_add)
    }

    fn handles(roots: &[Root]) -> impl Iterator<Item = Handle> {
        roots.iter().map(|root| root.mem)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        for mem in Self::handles(&self.roots) {
            cl!(self.api, clReleaseMemObject(mem));
        }
    }
}

impl Server {
    /// The outstanding commands.
    fn under_way(&mut self) -> Behind {
        let api = Arc::clone(&self.backend.api);
        let mut events = self.backend.svm.freed.behind_parted(&api);
        let mut has_more = false;
        for queue in self.backend.queues.iter_mut() {
            match freed::end(&api, queue) {
                Ok(event) => {
                    if event.is_some() {
                        cl!(api, clFlush(queue.raw));
                    }
                    events.extend(event);
                }
                Err(_) => has_more = true,
            }
        }
        Behind {
            api,
            events,
            has_more,
        }
    }

    pub(in super::super) fn precopy_objects(
        &mut self,
        known: Option<Precopied>,
        mut image: Writer,
    ) -> Result<(Precopied, Copying), Immovable> {
        self.all_can_be_saved()?;
        // A later round would miss what these commands write.
        self.backend.svm.freed.all_marked()?;
        if self
            .backend
            .missing
            .as_ref()
            .is_some_and(Missing::is_awaited)
        {
            return Err(Immovable::Has(missing::ON_THEIR_WAY.to_owned()));
        }
        let (mut log, mut copies, written) = match known {
            Some(known) => known.into_parts()?,
            None => (self.empty_log(), Copies::repeated(), Written::all()),
        };
        let names = self.log_objects(&mut log)?;
        copies.forget(&log.dropped());
        let kept = Kept::new(&self.backend.api, contents::roots(self, &log, &written)?);
        let behind = self.under_way();
        let mut early = Early {
            offered: self.offered_kinds(),
            told: self.backend.told.all(),
            log: std::mem::take(&mut log.entries),
            contexts: names.contexts.made,
            contents: Vec::new(),
        };
        let shared = Arc::new(Mutex::new(None));
        let precopied = Precopied {
            log,
            copies: Arc::clone(&shared),
            noted: self.note_written(),
        };
        let copying = move || {
            // Later writes are recorded anew.
            if !behind.have_ended() {
                copies.late = written;
            }
            drop(behind);
            early.contents = copies.save(&kept.api, &kept.roots, &mut image)?;
            drop(kept);
            let mut bytes = Vec::new();
            early.put(&mut bytes);
            image.finish::<OpenCl, _>(super::SHAPE, &Blob(bytes))?;
            *shared.lock_unpoisoned() = Some(copies);
            Ok(())
        };
        Ok((precopied, Box::new(copying)))
    }

    /// Total bytes of buffers and images made since a round began; of all of them without a round.
    pub(in super::super) fn made_since(&self, known: Option<&Precopied>) -> u64 {
        match known {
            Some(known) => contents::made_since(self, &known.log),
            None => contents::made_since(self, &self.empty_log()),
        }
    }

    pub(in super::super) fn prepare_objects(
        &mut self,
        state: &[u8],
        contents: &Contents,
    ) -> Result<(), Immovable> {
        let early = Early::from_bytes(state)?;
        self.make_objects((&early.offered, &early.told), &early.log, &early.contexts)?;
        contents::restore(self, &early.contents, contents)
    }
}
