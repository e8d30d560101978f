//! The conversation with the mediator.

use std::{
    collections::VecDeque,
    io,
    os::fd::BorrowedFd,
    path::Path,
    sync::{Arc, Condvar, Mutex},
    time::{Duration, Instant},
};

use base::Unpoisoned;
use gpu_mediator::gpu::{
    link::Packets,
    wire::{Event, Request, VERSION},
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Error, memory::Vram};

/// How long the mediator may take. A vCPU waits: less than the 20 s after which a Linux guest takes
/// it for dead.
const PATIENCE: Duration = Duration::from_secs(10);

/// What has come from the mediator, for whoever waits.
pub struct Inbox {
    events: Mutex<VecDeque<Event>>,
    synced: Mutex<Synced>,
    changed: Condvar,
    /// Readable when there is something to look at.
    pub wake: EventFd,
}

#[derive(Default)]
struct Synced {
    number: u32,
    lost: bool,
}

impl Inbox {
    /// The next event.
    pub fn next(&self) -> Option<Event> {
        self.events.lock_unpoisoned().pop_front()
    }

    /// Whether the mediator is lost.
    pub fn is_lost(&self) -> bool {
        self.synced.lock_unpoisoned().lost
    }

    /// Has the worker look.
    pub fn look(&self) {
        // It fails if the counter is full: then it looks.
        let _ = self.wake.write(1);
    }

    fn lose(&self) {
        self.synced.lock_unpoisoned().lost = true;
        self.changed.notify_all();
        self.look();
    }
}

/// The front's end.
pub struct Link {
    packets: Packets,
    /// What has come.
    pub inbox: Arc<Inbox>,
    number: u32,
    /// Messages sent.
    pub sent: u64,
}

impl Link {
    /// Connects, and gets a partition of so many bytes.
    pub fn connect(
        path: &Path,
        vram: u64,
        channels: u8,
        weight: u32,
    ) -> Result<(Self, Vram), Error> {
        let socket = |source| Error::Socket {
            path: path.to_owned(),
            source,
        };
        let packets = Packets::connect(path).map_err(socket)?;
        let hello = Request::Hello {
            version: VERSION,
            vram,
            channels,
            weight,
        };
        packets.send(&hello.encode(), &[]).map_err(socket)?;
        let packet = packets.receive().map_err(socket)?.ok_or(Error::Refused)?;
        match Event::parse(&packet.bytes)? {
            Event::Welcome {
                version: VERSION,
                vram: given,
            } if given == vram => {}
            other => return Err(Error::Welcome(other)),
        }
        let file = packet.files.into_iter().next().ok_or(Error::Refused)?;
        let memory = Vram::new(file.into(), vram).map_err(Error::Memory)?;
        let inbox = Inbox {
            events: Mutex::default(),
            synced: Mutex::default(),
            changed: Condvar::new(),
            wake: EventFd::new(EFD_NONBLOCK).map_err(Error::Memory)?,
        };
        let link = Self {
            packets,
            inbox: Arc::new(inbox),
            number: 0,
            sent: 0,
        };
        Ok((link, memory))
    }

    /// The body of the thread that receives.
    pub fn receiver(&self) -> io::Result<impl FnOnce() + Send + use<>> {
        let packets = self.packets.try_clone()?;
        let inbox = Arc::clone(&self.inbox);
        Ok(move || {
            while let Ok(Some(packet)) = packets.receive() {
                match Event::parse(&packet.bytes) {
                    Ok(Event::Synced { number }) => {
                        inbox.synced.lock_unpoisoned().number = number;
                        inbox.changed.notify_all();
                    }
                    Ok(event) => {
                        inbox.events.lock_unpoisoned().push_back(event);
                        inbox.look();
                    }
                    Err(_) => break,
                }
            }
            inbox.lose();
        })
    }

    /// Says something. If the mediator is lost, the worker hears of it.
    pub fn send(&mut self, request: &Request) {
        self.send_with(request, &[]);
    }

    /// Says something, with descriptors.
    pub fn send_with(&mut self, request: &Request, files: &[BorrowedFd<'_>]) {
        self.sent += 1;
        if self.packets.send(&request.encode(), files).is_err() {
            self.inbox.lose();
        }
    }

    /// Waits until the mediator has carried out all that was said; whether it has.
    pub fn sync(&mut self) -> bool {
        self.number = self.number.wrapping_add(1);
        let number = self.number;
        self.send(&Request::Sync { number });
        let end = Instant::now() + PATIENCE;
        let mut synced = self.inbox.synced.lock_unpoisoned();
        while synced.number != number && !synced.lost {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(synced);
                self.end();
                return false;
            }
            let waited = self.inbox.changed.wait_timeout(synced, left);
            synced = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        !synced.lost
    }

    /// Ends the conversation; the receiving thread ends too.
    pub fn end(&self) {
        self.packets.shut_down();
        self.inbox.lose();
    }
}
