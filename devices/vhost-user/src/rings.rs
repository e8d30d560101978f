//! The queues that a driver has set up, and the messages that start and stop them.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex},
};

use base::Unpoisoned;
use device_model::{memory::GuestMemory, shared_event};
use vhost::vhost_user::message::{
    FrontendReq, VhostUserInflight, VhostUserProtocolFeatures as Protocol, VhostUserVringAddr,
    VhostUserVringAddrFlags, VhostUserVringState,
};
use virtio::{ActiveQueue, VirtioInterrupt};
use virtio_queue::QueueT;
use vm_memory::{ByteValued, GuestAddressSpace};
use vmm_sys_util::eventfd::EventFd;

use crate::{
    backend::{Backend, PROTOCOL_FEATURES, check_regions},
    connection::{Connection, Deadline, Failure},
    error::Error,
    layout::Layout,
    memory::{Mapped, address, regions},
    outstanding::Outstanding,
};

/// The guest's memory, until the device is stopped: it may be gone afterwards.
#[derive(Clone)]
pub(crate) struct Memory(Arc<Mutex<Option<GuestMemory>>>);

impl Memory {
    pub(crate) fn new(memory: GuestMemory) -> Self {
        Self(Arc::new(Mutex::new(Some(memory))))
    }

    /// From now on, nobody accesses the memory by this.
    pub(crate) fn close(&self) {
        *self.0.lock_unpoisoned() = None;
    }

    fn with<T>(&self, work: impl FnOnce(&GuestMemory) -> T) -> Option<T> {
        self.0.lock_unpoisoned().as_ref().map(work)
    }
}

/// A queue.
pub(crate) struct Ring {
    pub(crate) index: u16,
    layout: Layout,
    /// The next entry of the available ring that the back end is to look at, unless the driver has to start anew.
    base: u16,
    /// What the back end has not returned, while it serves the queue.
    outstanding: Option<Outstanding>,
    /// Rung where the kernel does not ring the back end's.
    pub(crate) kick: EventFd,
}

/// All queues.
pub(crate) struct Rings {
    pub(crate) memory: Memory,
    pub(crate) interrupt: Arc<dyn VirtioInterrupt>,
    pub(crate) rings: Vec<Ring>,
    /// The features that the driver has accepted.
    features: u64,
    /// No other back end can go on with them.
    are_void: bool,
    in_flight: Option<InFlight>,
}

/// The memory in which a back end notes which requests it has begun. Only back ends read and write it.
struct InFlight {
    /// Its place and size, in the form of the messages.
    place: Vec<u8>,
    file: OwnedFd,
}

/// Why queues could not be started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error(transparent)]
    Failure(#[from] Failure),
    #[error(transparent)]
    Unfit(#[from] Error),
    #[error("the device has been stopped meanwhile")]
    Closed,
}

impl InFlight {
    /// Gets such memory for these queues.
    fn of(
        connection: &mut Connection,
        rings: &[Ring],
        deadline: Deadline,
    ) -> Result<Self, Failure> {
        let request = FrontendReq::GET_INFLIGHT_FD;
        let last = rings.iter().map(|ring| ring.index).max().unwrap_or(0);
        let size = rings
            .iter()
            .map(|ring| ring.layout.size())
            .max()
            .unwrap_or(0);
        // Fewer than the 65,536 queues that the field has room for.
        let wanted = VhostUserInflight::new(0, 0, last + 1, size);
        let len = size_of::<VhostUserInflight>();
        let (place, files) = connection.ask_for_files(request, wanted.as_slice(), len, deadline)?;
        let value = files.len() as u64;
        match <[OwnedFd; 1]>::try_from(files) {
            Ok([file]) => Ok(Self { place, file }),
            Err(_) => Err(Failure::Lie {
                request,
                what: "the number of descriptors",
                value,
            }),
        }
    }
}

impl Rings {
    pub(crate) fn new(
        memory: Memory,
        interrupt: Arc<dyn VirtioInterrupt>,
        queues: &[ActiveQueue],
        features: u64,
    ) -> io::Result<Self> {
        let ring = |active: &ActiveQueue| {
            Ok(Ring {
                index: active.index,
                base: active.queue.next_avail(),
                outstanding: None,
                layout: Layout::of(&active.queue),
                kick: active.kick.try_clone()?,
            })
        };
        Ok(Self {
            memory,
            interrupt,
            rings: queues.iter().map(ring).collect::<io::Result<_>>()?,
            features,
            are_void: false,
            in_flight: None,
        })
    }

    /// Goes on as these queues, which were stopped, are the same ones.
    pub(crate) fn follow(&mut self, stopped: Self) {
        self.are_void = stopped.are_void;
        self.in_flight = stopped.in_flight;
    }

    /// Whether another back end can go on with the queues.
    pub(crate) fn can_resume(&self) -> bool {
        !self.are_void
    }

    /// Makes a back end serve the queues.
    pub(crate) fn start(
        &mut self,
        backend: &mut Backend,
        mapped: &mut Mapped,
        kicks: &[EventFd],
        calls: &[EventFd],
        deadline: Deadline,
    ) -> Result<(), StartError> {
        self.map(backend, mapped, deadline)?;
        let connection = &mut backend.connection;
        let features = self.features & backend.features | PROTOCOL_FEATURES;
        connection.tell(
            FrontendReq::SET_FEATURES,
            &features.to_ne_bytes(),
            &[],
            deadline,
        )?;
        if backend.protocol.contains(Protocol::INFLIGHT_SHMFD) {
            let place = match &mut self.in_flight {
                Some(place) => place,
                none => none.insert(InFlight::of(connection, &self.rings, deadline)?),
            };
            let request = FrontendReq::SET_INFLIGHT_FD;
            connection.tell(request, &place.place, &[place.file.as_fd()], deadline)?;
        }
        for ring in &mut self.rings {
            let outstanding = self
                .memory
                .with(|memory| Outstanding::new(ring.base, &ring.layout, memory));
            ring.outstanding = outstanding;
            let (index, layout) = (u32::from(ring.index), ring.layout);
            let mut set = |request, value: u32| {
                let state = VhostUserVringState::new(index, value);
                connection.tell(request, state.as_slice(), &[], deadline)
            };
            set(FrontendReq::SET_VRING_NUM, layout.size().into())?;
            set(FrontendReq::SET_VRING_BASE, ring.base.into())?;
            let addresses = VhostUserVringAddr::new(
                index,
                VhostUserVringAddrFlags::empty(),
                address(layout.descriptors),
                address(layout.used),
                address(layout.available),
                0,
            );
            let addresses = addresses.as_slice();
            connection.tell(FrontendReq::SET_VRING_ADDR, addresses, &[], deadline)?;
            // The queue starts with its kick.
            for (request, events) in [
                (FrontendReq::SET_VRING_CALL, calls),
                (FrontendReq::SET_VRING_KICK, kicks),
            ] {
                let Some(event) = events.get(usize::from(ring.index)) else {
                    continue;
                };
                let body = u64::from(ring.index).to_ne_bytes();
                // SAFETY: the descriptor is open as long as `event` is borrowed.
                let event = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
                connection.tell(request, &body, &[event], deadline)?;
            }
        }
        for ring in &self.rings {
            let state = VhostUserVringState::new(ring.index.into(), 1);
            let request = FrontendReq::SET_VRING_ENABLE;
            connection.tell(request, state.as_slice(), &[], deadline)?;
        }
        // Whatever was signalled to or by an earlier one.
        for ring in &self.rings {
            if let Some(kick) = kicks.get(usize::from(ring.index)) {
                shared_event::ring(kick);
            }
            self.interrupt(ring.index);
        }
        Ok(())
    }

    /// Makes a back end map the guest's memory as it is now.
    fn map(
        &self,
        backend: &mut Backend,
        mapped: &mut Mapped,
        deadline: Deadline,
    ) -> Result<(), StartError> {
        let wanted = self.memory.with(|memory| regions(&memory.memory()));
        let wanted = wanted.ok_or(StartError::Closed)??;
        check_regions(backend.slots, wanted.len())?;
        mapped.become_equal(wanted, backend.slots, &mut backend.connection, deadline)?;
        Ok(())
    }

    /// Makes a back end that serves the queues map the guest's memory as it is now.
    pub(crate) fn remap(
        &mut self,
        backend: &mut Backend,
        mapped: &mut Mapped,
        kicks: &[EventFd],
        calls: &[EventFd],
        deadline: Deadline,
    ) -> Result<(), StartError> {
        let wanted = self.memory.with(|memory| regions(&memory.memory()));
        let wanted = wanted.ok_or(StartError::Closed)??;
        if mapped.is_replaced(backend.slots, &wanted) {
            self.stop(backend, deadline)?;
            return self.start(backend, mapped, kicks, calls, deadline);
        }
        self.map(backend, mapped, deadline)
    }

    /// Stops the queues, and notes how far the back end has come.
    pub(crate) fn stop(
        &mut self,
        backend: &mut Backend,
        deadline: Deadline,
    ) -> Result<(), Failure> {
        let request = FrontendReq::GET_VRING_BASE;
        for ring in &mut self.rings {
            let index = u32::from(ring.index);
            let state = VhostUserVringState::new(index, 0);
            let len = size_of::<VhostUserVringState>();
            let answer = backend
                .connection
                .ask(request, state.as_slice(), len, deadline)?;
            let word = |at: usize| {
                u32::from_ne_bytes([answer[at], answer[at + 1], answer[at + 2], answer[at + 3]])
            };
            let lie = |what, value: u32| Failure::Lie {
                request,
                what,
                value: value.into(),
            };
            if word(0) != index {
                return Err(lie("the queue's index", word(0)));
            }
            ring.base = u16::try_from(word(4)).map_err(|_| lie("the ring's index", word(4)))?;
            ring.outstanding = None;
        }
        Ok(())
    }

    /// Prepares the queues for another back end: it goes on with what the lost one has not returned. That is possible only
    /// if the lost one `is_gone`, or never had the queues, and if it is known what was outstanding.
    pub(crate) fn prepare_for_another(&mut self, is_gone: bool) {
        let has_notes = self.in_flight.is_some();
        for ring in &mut self.rings {
            let Some(mut outstanding) = ring.outstanding.take() else {
                continue;
            };
            let Ring { layout, .. } = ring;
            let base = self.memory.with(|memory| match has_notes {
                true => layout.used_index(memory),
                false => outstanding.offer_again(layout, memory),
            });
            match base.flatten() {
                Some(base) if is_gone => ring.base = base,
                _ => self.are_void = true,
            }
        }
    }

    /// Whether another back end could go on with these queues only by the notes of the one before.
    pub(crate) fn has_notes(&self) -> bool {
        self.in_flight.is_some() && self.can_resume()
    }

    /// How far the back end has come in each queue.
    pub(crate) fn bases(&self) -> Vec<u16> {
        self.rings.iter().map(|ring| ring.base).collect()
    }

    /// Forwards the interrupt of a queue that a back end has raised.
    pub(crate) fn called(&mut self, at: usize) {
        let Some(ring) = self.rings.get_mut(at) else {
            return;
        };
        let Ring {
            index,
            layout,
            outstanding,
            ..
        } = ring;
        if let Some(outstanding) = outstanding {
            self.memory
                .with(|memory| outstanding.called(layout, memory));
        }
        let index = *index;
        self.interrupt(index);
    }

    /// Interrupts the driver for a queue.
    fn interrupt(&self, index: u16) {
        if let Err(error) = self.interrupt.queue(index) {
            log::error!("cannot interrupt the guest for a vhost-user device: {error}");
        }
    }
}
