//! A minimal virtio driver, as the transport sees it.

use std::sync::Arc;

use ::pci::{BarIndex, Bdf, TABLE_ENTRY_SIZE, testing::Rig};
use device_model::{doorbell::Doorbells, msi::MsiController};

use crate::pci::{
    COMMON_OFFSET, DEVICE_OFFSET, ISR_OFFSET, NOTIFY_MULTIPLIER, NOTIFY_OFFSET, TABLE_OFFSET,
    VirtioPciResources, common, status,
};

/// The resources of a virtio function, taken from a rig.
pub fn resources(rig: &Rig) -> VirtioPciResources {
    VirtioPciResources {
        memory: rig.memory.clone(),
        msi: Arc::new(rig.msi.clone()) as Arc<dyn MsiController>,
        doorbells: Arc::new(rig.doorbells.clone()) as Arc<dyn Doorbells>,
    }
}

/// Drives the virtio function at `bdf` of a rig.
pub struct VirtioDriver<'a> {
    rig: &'a Rig,
    bdf: Bdf,
}

impl<'a> VirtioDriver<'a> {
    /// Enables the function and its BAR.
    pub fn new(rig: &'a Rig, bdf: Bdf) -> Self {
        rig.enable(bdf, true);
        Self { rig, bdf }
    }

    /// Address of the function on the PCI bus.
    pub fn bdf(&self) -> Bdf {
        self.bdf
    }

    /// Guest address of an offset in the BAR.
    pub fn address(&self, offset: u64) -> u64 {
        self.rig
            .bar64(self.bdf, BarIndex::ZERO)
            .wrapping_add(offset)
    }

    /// Writes to the BAR.
    pub fn write(&self, offset: u64, data: &[u8]) {
        self.rig.write(self.address(offset), data);
    }

    /// Reads from the BAR.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        self.rig.mmio.read(self.address(offset), data);
    }

    /// Writes a field of the common configuration.
    pub fn set(&self, field: usize, data: &[u8]) {
        self.write(COMMON_OFFSET + field as u64, data);
    }

    /// Reads up to 8 bytes of the common configuration.
    pub fn get<const N: usize>(&self, field: usize) -> [u8; N] {
        let mut data = [0; N];
        self.read(COMMON_OFFSET + field as u64, &mut data);
        data
    }

    /// The device status.
    pub fn status(&self) -> u8 {
        let [status] = self.get(common::STATUS);
        status
    }

    /// Writes the device status.
    pub fn set_status(&self, status: u8) {
        self.set(common::STATUS, &[status]);
    }

    /// All 64 features that the device offers.
    pub fn features(&self) -> u64 {
        (0..2u32).fold(0, |features, half| {
            self.set(common::DEVICE_FEATURE_SELECT, &half.to_le_bytes());
            let bits = u32::from_le_bytes(self.get(common::DEVICE_FEATURE));
            features | u64::from(bits) << (32 * half)
        })
    }

    /// Accepts `features`.
    pub fn set_features(&self, features: u64) {
        for half in 0..2u32 {
            self.set(common::DRIVER_FEATURE_SELECT, &half.to_le_bytes());
            let bits = (features >> (32 * half)) as u32;
            self.set(common::DRIVER_FEATURE, &bits.to_le_bytes());
        }
    }

    /// Resets the device and negotiates `features`; true if the device agrees.
    pub fn negotiate(&self, features: u64) -> bool {
        self.set_status(0);
        self.set_status(status::ACKNOWLEDGE);
        self.set_status(status::ACKNOWLEDGE | status::DRIVER);
        self.set_features(features);
        let wanted = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK;
        self.set_status(wanted);
        self.status() == wanted
    }

    /// Selects a queue.
    pub fn select(&self, queue: u16) {
        self.set(common::QUEUE_SELECT, &queue.to_le_bytes());
    }

    /// Sets up and enables a queue, with MSI-X vector `queue + 1`.
    pub fn enable_queue(&self, queue: u16, size: u16, addresses: [u64; 3]) {
        self.select(queue);
        self.set(common::QUEUE_SIZE, &size.to_le_bytes());
        let vector = queue.wrapping_add(1);
        self.set(common::QUEUE_VECTOR, &vector.to_le_bytes());
        let fields = [
            common::QUEUE_DESC,
            common::QUEUE_DRIVER,
            common::QUEUE_DEVICE,
        ];
        for (field, address) in fields.into_iter().zip(addresses) {
            let bytes = address.to_le_bytes();
            self.set(field, &bytes[..4]);
            self.set(field + 4, &bytes[4..]);
        }
        self.set(common::QUEUE_ENABLE, &1u16.to_le_bytes());
    }

    /// Sets DRIVER_OK.
    pub fn start(&self) {
        self.set_status(self.status() | status::DRIVER_OK);
    }

    /// Enables MSI-X and unmasks the first `vectors` vectors; vector n has message data n.
    pub fn enable_msix(&self, vectors: u16) {
        for vector in 0..vectors {
            let entry = TABLE_OFFSET + u64::from(vector) * TABLE_ENTRY_SIZE;
            self.write(entry, &0xfee0_0000u64.to_le_bytes());
            self.write(entry + 8, &u32::from(vector).to_le_bytes());
            self.write(entry + 12, &0u32.to_le_bytes());
        }
        self.set_msix_control(1 << 15);
    }

    /// Writes the MSI-X message control register.
    pub fn set_msix_control(&self, control: u16) {
        if let Some(at) = self.rig.capability(self.bdf, 0x11, 0) {
            self.rig
                .config_write(self.bdf, at + 2, &control.to_le_bytes());
        }
    }

    /// Masks or unmasks a vector.
    pub fn mask(&self, vector: u16, masked: bool) {
        let entry = TABLE_OFFSET + u64::from(vector) * TABLE_ENTRY_SIZE;
        self.write(entry + 12, &u32::from(masked).to_le_bytes());
    }

    /// Notifies a queue.
    pub fn notify(&self, queue: u16) {
        let offset = u64::from(queue) * u64::from(NOTIFY_MULTIPLIER);
        self.write(NOTIFY_OFFSET + offset, &queue.to_le_bytes());
    }

    /// Reads, and so clears, the ISR status.
    pub fn isr(&self) -> u8 {
        let mut isr = [0];
        self.read(ISR_OFFSET, &mut isr);
        isr[0]
    }

    /// Reads the device configuration.
    pub fn device_config<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut data = [0; N];
        self.read(DEVICE_OFFSET + offset, &mut data);
        data
    }
}
