//! Handing a slice to a worker.

use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    sync::{Arc, Mutex},
};

use base::Unpoisoned;
use device_model::shared_event;
use gantry_remoting::{
    account::Account,
    apis::spoken,
    link::socket,
    port::{Apis, Attachment, user_of_number},
};
use pci::MsixTable;
use vmm_sys_util::eventfd::EventFd;

use super::{slices::Slices, window::Window};

/// Where workers come from.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Pool {
    /// Where the pool listens.
    pub socket: PathBuf,
    /// Part of the names of the devices that are offered; all if empty.
    pub device: String,
}

/// What a worker is given, and who gives it.
pub struct Attach {
    /// Whose application a slice is for.
    pub slices: Arc<Slices>,
    /// Memory.
    pub window: Arc<Window>,
    /// What workers have of the device's memory, and the account's file.
    pub account: Arc<(Account, OwnedFd)>,
    /// Doorbells, one for each slice.
    pub doorbells: Arc<[EventFd]>,
    /// Interrupts.
    pub msix: Arc<MsixTable>,
    /// The APIs that applications may call.
    pub apis: Apis,
    /// What every worker is told.
    pub attachment: Attachment,
    /// Where workers of new applications come from.
    pool: Mutex<Pool>,
}

impl Attach {
    /// With workers of this pool.
    pub fn new(
        (slices, window): (Arc<Slices>, Arc<Window>),
        account: Arc<(Account, OwnedFd)>,
        doorbells: Arc<[EventFd]>,
        msix: Arc<MsixTable>,
        (apis, attachment, pool): (Apis, Attachment, Pool),
    ) -> Self {
        Self {
            slices,
            window,
            account,
            doorbells,
            msix,
            apis,
            attachment,
            pool: Mutex::new(pool),
        }
    }

    /// Where workers of new applications come from.
    pub fn pool(&self) -> Pool {
        self.pool.lock_unpoisoned().clone()
    }

    /// Has workers of new applications come from elsewhere.
    pub fn set_pool(&self, pool: Pool) {
        *self.pool.lock_unpoisoned() = pool;
    }

    /// Hands a slice to a worker for a new application. Its API may be none of the port's
    /// ([`Unsupported`](io::ErrorKind::Unsupported)).
    pub fn open(&self, slice: usize) -> io::Result<UnixStream> {
        // What was rung for an application before is not for this one.
        if let Some(doorbell) = self.doorbells.get(slice) {
            let _ = shared_event::take(doorbell);
        }
        self.hand_over(slice, &self.pool(), false)
    }

    /// Hands a slice to another worker, which is to take up the application.
    pub fn take_up(&self, slice: usize, pool: &Pool) -> io::Result<UnixStream> {
        self.hand_over(slice, pool, true)
    }

    fn hand_over(&self, slice: usize, pool: &Pool, takes_up: bool) -> io::Result<UnixStream> {
        let claim = self.slices.claim(slice);
        let api = self.apis.of_application(claim.api);
        let api = api.map(spoken).ok_or_else(|| {
            let why = format!("the port is not for accelerator API number {}", claim.api);
            io::Error::new(io::ErrorKind::Unsupported, why)
        })?;
        // Vector 0 is the port's own.
        let vector = slice as u16 + 1;
        let interrupt = self
            .msix
            .vectors()
            .ok_or_else(|| io::Error::other("there are no interrupt vectors"))?
            .irqfd(vector)?;
        let doorbell = self
            .doorbells
            .get(slice)
            .ok_or_else(|| io::Error::other("there is no doorbell"))?;
        let stream = socket::connect(&pool.socket)?;
        socket::refuse_files(&stream);
        let attachment = Attachment {
            api: api.api,
            version: api.version,
            slice: slice as u32,
            user: user_of_number(claim.owner),
            device: pool.device.clone(),
            takes_up,
            ..self.attachment.clone()
        };
        let bytes = attachment.to_bytes();
        self.window
            .with_file(slice, |memory| {
                let doorbell = borrowed(doorbell);
                let files = [
                    memory,
                    doorbell,
                    borrowed(interrupt),
                    self.account.1.as_fd(),
                ];
                socket::send(&stream, &bytes, &files)
            })
            .ok_or_else(|| io::Error::other("there is no such slice"))??;
        Ok(stream)
    }
}

fn borrowed(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the event is open as long as the result borrows it.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}
