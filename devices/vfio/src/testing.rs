//! A fake device in VFIO's terms, made of memory.

use std::{
    collections::BTreeMap,
    io,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use base::Unpoisoned;
use vfio_bindings::bindings::vfio::VFIO_PCI_CONFIG_REGION_INDEX;
use vmm_sys_util::eventfd::EventFd;

use crate::{Device, Irqs, Mappable, ResetError};

/// Size of each region in bytes, including configuration space.
const REGION: usize = 4096;
const BAR0: u32 = 0;
const ROM: u32 = 6;
const COMMAND: u64 = 4;
/// Upper byte of the device control register, and its function-level reset bit.
const CONTROL: u64 = 0x59;
const CONTROL_RESET: u8 = 0x80;

/// A device with a ROM full of 0x5a and a 64-bit BAR 0, which contains the MSI-X table at 0 and the
/// pending bits at 2048. It has a power management capability at 0x40, PCI Express with FLR at
/// 0x50, MSI at 0xa0 and MSI-X at 0xc0.
pub struct FakeDevice {
    config: Mutex<[u8; REGION]>,
    bar: Mutex<[u8; REGION]>,
    rom: Mutex<[u8; REGION]>,
    vectors: u16,
    /// Size of configuration space in bytes.
    pub config_len: u64,
    /// Vectors can be added while others are connected.
    pub grows: bool,
    /// Number of vectors that the host has.
    pub host_vectors: AtomicU32,
    /// Resets fail.
    pub stubborn: AtomicBool,
    /// Number of resets so far.
    pub resets: AtomicU32,
    /// While this is locked, a reset does not complete.
    pub busy: Mutex<()>,
    /// A reset is in progress: writes to the command register wait for its end.
    pub resetting: AtomicBool,
    connected: Mutex<BTreeMap<(u32, u16), Option<EventFd>>>,
}

impl FakeDevice {
    /// Creates a device with `vectors` MSI-X table entries, 1 to 128.
    pub fn new(vectors: u16) -> Self {
        let vectors = vectors.clamp(1, 128);
        let mut config = [0; REGION];
        let mut set = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        set(0, &[0x34, 0x12, 0xe8, 0x11, 0, 0, 0x10, 0]);
        set(0x10, &[4]);
        set(0x34, &[0x40]);
        set(0x3d, &[1]);
        set(0x40, &[0x01, 0x50, 0xff, 0xff, 0, 0]);
        set(0x50, &[0x10, 0xa0, 2, 0, 0, 0, 0, 0x10]);
        set(0xa0, &[0x05, 0xc0, 0x84, 0]);
        let last = (vectors - 1).to_le_bytes();
        set(0xc0, &[0x11, 0, last[0], last[1], 0, 0, 0, 0, 0, 8, 0, 0]);
        Self {
            config: Mutex::new(config),
            bar: Mutex::new([0; REGION]),
            rom: Mutex::new([0x5a; REGION]),
            vectors,
            config_len: REGION as u64,
            grows: false,
            host_vectors: AtomicU32::new(u32::MAX),
            stubborn: AtomicBool::new(false),
            resets: AtomicU32::new(0),
            busy: Mutex::default(),
            resetting: AtomicBool::new(false),
            connected: Mutex::default(),
        }
    }

    /// Changes registers in configuration space; bytes beyond its end are dropped.
    pub fn set_config(&self, offset: usize, bytes: &[u8]) {
        self.write(VFIO_PCI_CONFIG_REGION_INDEX, offset as u64, bytes);
    }

    /// Number of interrupts of a kind that are enabled, and those of them that are connected to an
    /// eventfd.
    pub fn connected(&self, irqs: Irqs) -> (usize, Vec<u16>) {
        let connected = self.connected.lock_unpoisoned();
        let kind = || {
            connected
                .iter()
                .filter(|((kind, _), _)| *kind == irqs as u32)
        };
        let raised = kind().filter(|(_, eventfd)| eventfd.is_some());
        (
            kind().count(),
            raised.map(|((_, vector), _)| *vector).collect(),
        )
    }

    /// The eventfd of an MSI-X vector.
    pub fn eventfd(&self, vector: u16) -> Option<EventFd> {
        let connected = self.connected.lock_unpoisoned();
        let eventfd = connected.get(&(Irqs::Msix as u32, vector))?.as_ref()?;
        eventfd.try_clone().ok()
    }

    /// The command register.
    pub fn command(&self) -> u16 {
        let config = self.config.lock_unpoisoned();
        u16::from_le_bytes([config[4], config[5]])
    }

    fn wait_for_reset(&self) {
        self.resetting.store(true, Ordering::Relaxed);
        drop(self.busy.lock_unpoisoned());
        self.resetting.store(false, Ordering::Relaxed);
        self.resets.fetch_add(1, Ordering::Relaxed);
    }

    fn region(&self, region: u32) -> Option<&Mutex<[u8; REGION]>> {
        match region {
            BAR0 => Some(&self.bar),
            ROM => Some(&self.rom),
            VFIO_PCI_CONFIG_REGION_INDEX => Some(&self.config),
            _ => None,
        }
    }
}

impl Device for FakeDevice {
    fn name(&self) -> &str {
        "fake"
    }

    fn region_size(&self, region: u32) -> u64 {
        match region {
            VFIO_PCI_CONFIG_REGION_INDEX => self.config_len,
            _ => self.region(region).map_or(0, |_| REGION as u64),
        }
    }

    fn mappable(&self, _region: u32) -> Option<Mappable<'_>> {
        None
    }

    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        let bytes = self.region(region).map(Unpoisoned::lock_unpoisoned);
        let from = bytes
            .as_ref()
            .and_then(|bytes| bytes.get(offset as usize..));
        for (to, from) in data.iter_mut().zip(from.unwrap_or_default()) {
            *to = *from;
        }
    }

    /// Blocks in the same cases as vfio-pci.
    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        if region == VFIO_PCI_CONFIG_REGION_INDEX {
            let control = CONTROL.checked_sub(offset);
            let control = control.and_then(|at| data.get(at as usize));
            if control.is_some_and(|control| control & CONTROL_RESET != 0) {
                self.wait_for_reset();
            }
            if offset == COMMAND && self.resetting.load(Ordering::Relaxed) {
                drop(self.busy.lock_unpoisoned());
            }
        }
        let mut bytes = self.region(region).map(Unpoisoned::lock_unpoisoned);
        let to = bytes
            .as_mut()
            .and_then(|bytes| bytes.get_mut(offset as usize..));
        for (to, from) in to.unwrap_or_default().iter_mut().zip(data) {
            *to = *from;
        }
    }

    fn irq_count(&self, irqs: Irqs) -> u32 {
        match irqs {
            Irqs::Line => 1,
            Irqs::Msi => 4,
            Irqs::Msix => self.vectors.into(),
        }
    }

    fn irqs_grow(&self, _irqs: Irqs) -> bool {
        self.grows
    }

    /// As strict as vfio-pci: one kind at a time, and no more than the device has.
    fn connect(&self, irqs: Irqs, first: u16, eventfds: &[Option<&EventFd>]) -> io::Result<()> {
        let mut connected = self.connected.lock_unpoisoned();
        let others = connected.keys().any(|(kind, _)| *kind != irqs as u32);
        let is_on = !connected.is_empty();
        let end = u32::from(first) + eventfds.len() as u32;
        let beyond = is_on && !self.grows && end as usize > connected.len();
        if others || beyond || end > self.irq_count(irqs) || eventfds.is_empty() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if end > self.host_vectors.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        for (vector, eventfd) in (first..).zip(eventfds) {
            let eventfd = eventfd.map(EventFd::try_clone).transpose()?;
            connected.insert((irqs as u32, vector), eventfd);
        }
        Ok(())
    }

    fn connect_line(&self, assert: &EventFd, _served: &EventFd) -> io::Result<()> {
        self.connect(Irqs::Line, 0, &[Some(assert)])
    }

    fn disconnect(&self, irqs: Irqs) -> io::Result<()> {
        let mut connected = self.connected.lock_unpoisoned();
        connected.retain(|(kind, _), _| *kind != irqs as u32);
        Ok(())
    }

    fn reset(&self) -> Result<(), ResetError> {
        if self.stubborn.load(Ordering::Relaxed) {
            return Err(ResetError::None);
        }
        self.wait_for_reset();
        Ok(())
    }
}
