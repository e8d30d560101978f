//! What is saved of an application while it goes on, and made before it comes.

use std::sync::{Arc, Mutex};

use base::Unpoisoned;

use super::{
    Early,
    contents::{self, Root},
    copies::Copies,
    save::Log,
};
use crate::{
    apis::opencl::OpenCl,
    backends::opencl::{
        Server,
        driver::{
            api::{Api, Handle},
            cl,
        },
    },
    session::{
        image::{Contents, Immovable, Writer},
        precopy::Copying,
    },
    wire::{Blob, Wire},
};

/// What has been copied.
#[derive(Debug)]
pub struct Precopied {
    log: Log,
    /// None while a round copies, and after one that has failed.
    copies: Arc<Mutex<Option<Copies>>>,
}

impl Precopied {
    pub(super) fn into_parts(self) -> Result<(Log, Copies), Immovable> {
        let copies = self.copies.lock_unpoisoned().take();
        let copies = copies.ok_or_else(|| Immovable::Has("its contents are not copied".to_owned()));
        Ok((self.log, copies?))
    }
}

/// Buffers and images that stay with the driver until they have been copied.
struct Kept {
    api: Arc<Api>,
    roots: Vec<Root>,
}

impl Kept {
    fn new(api: &Arc<Api>, roots: Vec<Root>) -> Self {
        for mem in Self::handles(&roots) {
            cl!(api, clRetainMemObject(mem));
        }
        Self {
            api: Arc::clone(api),
            roots,
        }
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
    pub(in super::super) fn precopy_objects(
        &mut self,
        known: Option<Precopied>,
        mut image: Writer,
    ) -> Result<(Precopied, Copying), Immovable> {
        let (mut log, mut copies) = match known {
            Some(known) => known.into_parts()?,
            None => (self.empty_log(), Copies::repeated()),
        };
        let names = self.log_objects(&mut log)?;
        copies.forget(&log.dropped());
        let kept = Kept::new(&self.backend.api, contents::roots(self, &log)?);
        let mut early = Early {
            offered: self.offered_kinds(),
            log: std::mem::take(&mut log.entries),
            contexts: names.contexts.made,
            contents: Vec::new(),
        };
        let shared = Arc::new(Mutex::new(None));
        let precopied = Precopied {
            log,
            copies: Arc::clone(&shared),
        };
        let copying = move || {
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

    pub(in super::super) fn prepare_objects(
        &mut self,
        state: &[u8],
        contents: &Contents,
    ) -> Result<(), Immovable> {
        let early = Early::from_bytes(state)?;
        self.make_objects(&early.offered, &early.log, &early.contexts)?;
        contents::restore(self, &early.contents, contents)
    }
}
