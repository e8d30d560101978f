//! Passes a slice to a worker.

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
use pci::MsixTable;
use remoting_proto::{
    apis::spoken,
    port::{Apis, Attachment, user_of_number},
    wire::api::ApiId,
};
use remoting_transport::{account::Account, socket};
use vmm_sys_util::eventfd::EventFd;

use super::{slices::Slices, window::Window};

/// A source of workers.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Pool {
    /// Socket of the pool.
    pub socket: PathBuf,
    /// The devices offered, as `base::gpus` names them; empty: all devices.
    pub device: String,
}

/// What a worker receives, and the pool that provides workers.
pub struct Attach {
    /// The owner and API of each slice's application.
    pub slices: Arc<Slices>,
    /// Memory.
    pub window: Arc<Window>,
    /// The device memory that workers use, and the account's file.
    pub account: Arc<(Account, OwnedFd)>,
    /// Doorbells, one per slice.
    pub doorbells: Arc<[EventFd]>,
    /// Interrupts.
    pub msix: Arc<MsixTable>,
    /// The APIs that applications may use.
    pub apis: Apis,
    /// The part of the attachment that is equal for every worker.
    pub attachment: Attachment,
    /// The pool that provides the workers of new applications.
    pool: Mutex<Pool>,
}

impl Attach {
    /// Creates an instance that uses workers of this pool.
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

    /// Whether the port is for native contexts.
    pub fn is_native(&self) -> bool {
        self.apis.first() == Some(ApiId::Nvidia)
    }

    /// The pool that provides the workers of new applications.
    pub fn pool(&self) -> Pool {
        self.pool.lock_unpoisoned().clone()
    }

    /// Sets the pool that provides the workers of new applications.
    pub fn set_pool(&self, pool: Pool) {
        *self.pool.lock_unpoisoned() = pool;
    }

    /// Passes a slice to a worker for a new application. Fails with
    /// [`Unsupported`](io::ErrorKind::Unsupported) if the port does not offer its API.
    pub fn open(&self, slice: usize) -> io::Result<UnixStream> {
        // Discards doorbells of an earlier application.
        if let Some(doorbell) = self.doorbells.get(slice) {
            let _ = shared_event::take(doorbell);
        }
        self.hand_over(slice, &self.pool(), false)
    }

    /// Passes a slice to another worker, which will take over the application.
    pub fn take_up(&self, slice: usize, pool: &Pool) -> io::Result<UnixStream> {
        if self.is_native() {
            let why = "native contexts are not taken over";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
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
        if !self.is_native() {
            socket::refuse_files(&stream);
        }
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
