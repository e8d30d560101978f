//! A device behind the virtual IOMMU that records its mappings, and checks that the IOMMU keeps the
//! promises that [`Endpoint`] makes to its implementations.

use std::{
    collections::BTreeMap,
    io,
    ops::RangeInclusive,
    sync::{Mutex, MutexGuard},
    thread::{self, ThreadId},
};

use base::Unpoisoned;

use crate::iommu::{Access, Endpoint, INTERRUPTS, MapError, Reserved, ReservedKind};

const PAGE: u64 = 4096;

/// Mappings by I/O address, as (length, guest-physical address, access).
pub type Mapped = BTreeMap<u64, (u64, u64, Access)>;

/// State of a recorder.
#[derive(Default)]
pub struct Recorded {
    /// The current mappings.
    pub mapped: Mapped,
    /// The device reaches all of RAM at its own addresses.
    pub identity: bool,
    /// After this many further mappings, one is refused; `None`: none is refused.
    pub patience: Option<u32>,
    /// Mappings cannot be removed.
    pub stuck: bool,
    /// A reserved range, in addition to the interrupt addresses.
    pub reserved: Option<RangeInclusive<u64>>,
    /// Number of calls to unmap part of the mappings.
    pub unmappings: usize,
    /// The threads that called for unmapping everything.
    pub cleared_by: Vec<ThreadId>,
}

/// A recording device.
#[derive(Default)]
pub struct Recorder(Mutex<Recorded>);

impl Recorder {
    /// Locks its state.
    pub fn lock(&self) -> MutexGuard<'_, Recorded> {
        self.0.lock_unpoisoned()
    }
}

impl Recorded {
    fn refuses(&mut self) -> bool {
        let refuses = self.patience == Some(0);
        self.patience = match self.patience {
            Some(0) | None => None,
            Some(patience) => Some(patience - 1),
        };
        refuses
    }
}

impl Endpoint for Recorder {
    fn reserved(&self) -> Vec<Reserved> {
        let doorbells = Reserved {
            range: INTERRUPTS,
            kind: ReservedKind::Msi,
        };
        let more = self.lock().reserved.clone().map(|range| Reserved {
            range,
            kind: ReservedKind::Reserved,
        });
        [doorbells].into_iter().chain(more).collect()
    }

    fn page_size(&self) -> u64 {
        PAGE
    }

    fn map(&self, iova: u64, guest: u64, len: u64, access: Access) -> Result<(), MapError> {
        let mut recorded = self.lock();
        assert!(!recorded.identity, "mapped at {iova:#x} beside all of RAM");
        assert!(
            len > 0
                && access
                    != Access {
                        read: false,
                        write: false
                    }
        );
        assert!([iova, guest, len].iter().all(|at| at % PAGE == 0));
        let (Some(last), Some(_)) = (iova.checked_add(len - 1), guest.checked_add(len - 1)) else {
            panic!("{len:#x} bytes at {iova:#x}, mapped to {guest:#x}, go round the end");
        };
        for reserved in [Some(INTERRUPTS), recorded.reserved.clone()]
            .iter()
            .flatten()
        {
            assert!(last < *reserved.start() || iova > *reserved.end());
        }
        let below = recorded.mapped.range(..=last).next_back();
        if let Some((at, (len, ..))) = below {
            assert!(at + (len - 1) < iova, "{iova:#x} is mapped already");
        }
        if recorded.refuses() {
            return Err(MapError::NoMemory("the recorder has had enough".to_owned()));
        }
        recorded.mapped.insert(iova, (len, guest, access));
        Ok(())
    }

    fn unmap(&self, iova: u64, len: u64) -> io::Result<()> {
        let mut recorded = self.lock();
        recorded.unmappings += 1;
        if recorded.stuck {
            return Err(io::Error::other("the recorder is stuck"));
        }
        let (mut at, mut left) = (iova, len);
        while left > 0 {
            let Some((len, ..)) = recorded.mapped.remove(&at) else {
                panic!("no mapping begins at {at:#x}");
            };
            assert!(len <= left, "half of the mapping at {at:#x} is to stay");
            at = at.wrapping_add(len);
            left -= len;
        }
        Ok(())
    }

    fn clear(&self) -> io::Result<()> {
        let mut recorded = self.lock();
        assert!(!recorded.mapped.is_empty(), "nothing is mapped");
        recorded.cleared_by.push(thread::current().id());
        if recorded.stuck {
            return Err(io::Error::other("the recorder is stuck"));
        }
        recorded.mapped.clear();
        Ok(())
    }

    fn identity(&self, on: bool) -> Result<(), MapError> {
        let mut recorded = self.lock();
        assert!(recorded.mapped.is_empty(), "all of RAM beside mappings");
        assert_ne!(recorded.identity, on, "it is so already");
        if !on {
            recorded.cleared_by.push(thread::current().id());
        }
        if !on && recorded.stuck {
            return Err(MapError::Host(io::Error::other("the recorder is stuck")));
        }
        if on && recorded.refuses() {
            return Err(MapError::NoMemory("the recorder has had enough".to_owned()));
        }
        recorded.identity = on;
        Ok(())
    }
}
