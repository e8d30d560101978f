//! The guest's memory, as a back end maps it.

use std::{fs::File, os::fd::AsFd, sync::Arc};

use device_model::memory::{GuestRam, GuestRegion};
use vhost::vhost_user::message::{
    FrontendReq, VhostUserMemory, VhostUserMemoryRegion, VhostUserSingleMemoryRegion,
};
use vm_memory::{Address, ByteValued, GuestMemoryBackend, GuestMemoryRegion};

use crate::{
    connection::{Connection, Deadline, Failure},
    error::Error,
};

/// Maximum number of regions in a table, which is one message.
pub(crate) const TABLE: usize = 8;

/// Messages address memory by the address that it has in the front end. They are no real ones, which are nobody else's
/// business: these are the guest's, moved so that none is zero.
const BASE: u64 = 1 << 52;

/// The address of guest memory in messages. Guest-physical addresses have at most 52 bits.
pub(crate) fn address(guest: u64) -> u64 {
    BASE + guest
}

/// How a back end maps memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Slots {
    /// All regions at once, by a table of at most [`TABLE`] regions.
    Table,
    /// Each region by itself, at most so many.
    Each(usize),
}

/// A region of the guest's memory.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    guest: u64,
    len: u64,
    offset: u64,
    file: Arc<File>,
}

impl PartialEq for Region {
    fn eq(&self, other: &Self) -> bool {
        (self.guest, self.len, self.offset) == (other.guest, other.len, other.offset)
            && Arc::ptr_eq(&self.file, &other.file)
    }
}

/// The regions of the guest's memory, all of which other processes can map.
pub(crate) fn regions(ram: &GuestRam) -> Result<Vec<Region>, Error> {
    let region = |region: &GuestRegion| {
        let guest = region.start_addr().raw_value();
        let is_shared = region.get_mmap().flags() & libc::MAP_SHARED != 0;
        let file = region.file_offset().filter(|_| is_shared);
        let file = file.ok_or(Error::Private { guest })?;
        Ok(Region {
            guest,
            len: region.len(),
            offset: file.start(),
            file: Arc::clone(file.arc()),
        })
    };
    ram.iter().map(region).collect()
}

/// What a back end has mapped.
#[derive(Debug, Default)]
pub(crate) struct Mapped(Vec<Region>);

impl Mapped {
    /// Whether it has to be told about changes while its queues are stopped: it maps all regions anew.
    pub(crate) fn is_replaced(&self, slots: Slots, wanted: &[Region]) -> bool {
        slots == Slots::Table && !self.0.is_empty() && self.0 != wanted
    }

    /// Makes a back end map `wanted`, and nothing else.
    pub(crate) fn become_equal(
        &mut self,
        wanted: Vec<Region>,
        slots: Slots,
        connection: &mut Connection,
        deadline: Deadline,
    ) -> Result<(), Failure> {
        if self.0 == wanted {
            return Ok(());
        }
        match slots {
            Slots::Table => {
                // At most TABLE, which is checked before.
                let head = VhostUserMemory::new(wanted.len() as u32);
                let mut body = head.as_slice().to_vec();
                for region in &wanted {
                    let Region {
                        guest, len, offset, ..
                    } = *region;
                    let region = VhostUserMemoryRegion::new(guest, len, address(guest), offset);
                    body.extend_from_slice(region.as_slice());
                }
                let files: Vec<_> = wanted.iter().map(|region| region.file.as_fd()).collect();
                connection.tell(FrontendReq::SET_MEM_TABLE, &body, &files, deadline)?;
            }
            Slots::Each(_) => {
                for gone in self.0.iter().filter(|region| !wanted.contains(region)) {
                    let body = gone.single();
                    connection.tell(FrontendReq::REM_MEM_REG, body.as_slice(), &[], deadline)?;
                }
                for new in wanted.iter().filter(|region| !self.0.contains(region)) {
                    let (body, file) = (new.single(), [new.file.as_fd()]);
                    connection.tell(FrontendReq::ADD_MEM_REG, body.as_slice(), &file, deadline)?;
                }
            }
        }
        // One that acknowledges nothing has done all that was asked before when it answers the next question.
        if !connection.is_acknowledging() {
            connection.ask_u64(FrontendReq::GET_FEATURES, deadline)?;
        }
        self.0 = wanted;
        Ok(())
    }
}

impl Region {
    fn single(&self) -> VhostUserSingleMemoryRegion {
        VhostUserSingleMemoryRegion::new(self.guest, self.len, address(self.guest), self.offset)
    }
}
