//! The machine's generation ID: random bytes in guest memory that are new in each machine that is booted or restored
//! from a snapshot. A machine that is migrated stays what it was.

use std::io;

use devices::acpi::{GENERATION_ID_SIZE, Notification};
use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use super::{Machine, error::MachineError};

/// Where the guest expects its generation ID.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Generation {
    /// Guest-physical address.
    address: u64,
}

impl Generation {
    /// At an address that the guest's ACPI tables contain.
    pub fn at(address: u64) -> Self {
        Self { address }
    }
}

impl Machine {
    /// Gives a machine another ID if its guest knows of such IDs.
    pub(super) fn renew_generation(&self) -> Result<(), MachineError> {
        let Some(Generation { address }) = self.generation else {
            return Ok(());
        };
        let failed = |source| MachineError::Host {
            action: "give the VM a generation ID",
            source,
        };
        let id = random().map_err(failed)?;
        let memory = self.ram.memory().memory();
        // The address is untrusted, but only guest memory can be written.
        memory
            .write_slice(&id, GuestAddress(address))
            .map_err(|error| failed(io::Error::other(error)))
    }

    /// Tells the guest of a restored machine that it is a copy. It hears of it when it runs.
    pub(super) fn announce_generation(&self) -> Result<(), MachineError> {
        match self.generation {
            Some(_) => self.notify(Notification::GENERATION),
            None => {
                log::warn!(
                    "this snapshot was made before VMs had a generation ID: VMs that are restored from it may draw \
                     the same random numbers"
                );
                Ok(())
            }
        }
    }
}

fn random() -> io::Result<[u8; GENERATION_ID_SIZE]> {
    let mut id = [0; GENERATION_ID_SIZE];
    // SAFETY: writes no more bytes than there are.
    let got = unsafe { libc::getrandom(id.as_mut_ptr().cast(), id.len(), 0) };
    // The kernel returns small requests whole.
    match usize::try_from(got) {
        Ok(GENERATION_ID_SIZE) => Ok(id),
        _ => Err(io::Error::last_os_error()),
    }
}
