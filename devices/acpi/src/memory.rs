//! Memory hot-plug: adds RAM as ACPI memory devices (`hotplug_method=Acpi`).
//!
//! Registers (little endian, the rest reads 0):
//!
//! | offset | width | access | meaning, of the selected slot |
//! |---|---|---|---|
//! | 0 | 8 | read | address in bytes |
//! | 8 | 8 | read | length in bytes, 0 if the slot is empty |
//! | 16 | 4 | read | NUMA node (proximity domain) |
//! | 20 | 1 | read | bit 0: present; bit 1: insertion pending |
//! | 20 | 1 | write | bit 1: acknowledge |
//! | 24 | 4 | read, write | number of the selected slot |
//! | 28 | 4 | read | lowest slot with anything pending, or all ones |
//!
//! Memory that was added this way cannot be removed: guests can seldom free a whole device, and
//! virtio-mem removes memory in smaller blocks.

use std::sync::{Mutex, MutexGuard};

use acpi_tables::{Aml, AmlSink, aml};
use base::Unpoisoned;
use device_model::bus::BusDevice;
use serde::{Deserialize, Serialize};

use super::registers::{self, DEVICE_CHECK, FOREVER, NO_EVENT, Raw, STATUS_PRESENT, controller};

/// Size of the registers in bytes.
pub const MEMORY_HOTPLUG_SIZE: u64 = 32;

/// Maximum number of memory devices that can be added.
pub const MEMORY_SLOTS: u32 = 8;

const FLAGS: u64 = 20;
const SELECT: u64 = 24;

const FLAG_PRESENT: u8 = 1 << 0;
const FLAG_INSERTED: u8 = 1 << 1;

/// Offsets in a 64-bit address space descriptor (ACPI 6.5, 6.4.3.5.1).
const DESCRIPTOR_MIN: u8 = 14;
const DESCRIPTOR_MAX: u8 = 22;
const DESCRIPTOR_LENGTH: u8 = 38;

/// A memory device.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct MemorySlot {
    /// Guest physical address in bytes.
    pub base: u64,
    /// Length in bytes, not 0; the end is below 2^64.
    pub length: u64,
    /// NUMA node (proximity domain).
    pub node: u32,
    /// The guest has not looked since the device was inserted.
    pub inserted: bool,
}

/// Saved state of the controller.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct MemoryHotplugState {
    /// Number of the selected slot. May be any number.
    pub selected: u32,
    /// The occupied slots, in order; at most [`MEMORY_SLOTS`].
    pub slots: Vec<MemorySlot>,
}

/// Why a memory device cannot be added.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
pub enum MemoryHotplugError {
    /// All slots are occupied.
    #[error(
        "all {MEMORY_SLOTS} memory slots are taken; add more memory at once, or use virtio-mem"
    )]
    NoSlot,
    /// The range is empty or reaches beyond the address space.
    #[error("{length:#x} bytes at {base:#x} are no memory range")]
    Range {
        /// First address.
        base: u64,
        /// Length in bytes.
        length: u64,
    },
    /// The saved state has more slots than the controller.
    #[error("the saved state has {0} memory slots, there are {MEMORY_SLOTS}")]
    State(usize),
}

/// The memory hot-plug controller. Decodes [`MEMORY_HOTPLUG_SIZE`] bytes of memory space.
#[derive(Debug)]
pub struct MemoryHotplug {
    state: Mutex<MemoryHotplugState>,
    address: u64,
}

impl MemoryHotplug {
    /// Creates a controller with registers at `address` and empty slots.
    pub fn new(address: u64) -> Self {
        Self {
            state: Mutex::default(),
            address,
        }
    }

    /// Announces `length` bytes of RAM at `base`, which must already be mapped, and returns their
    /// slot.
    ///
    /// Call [`GenericEventDevice::notify`](super::GenericEventDevice::notify) afterwards.
    pub fn insert(&self, base: u64, length: u64, node: u32) -> Result<u32, MemoryHotplugError> {
        let slot = MemorySlot {
            base,
            length,
            node,
            inserted: true,
        };
        slot.check()?;
        let mut state = self.lock();
        // At most MEMORY_SLOTS.
        let number = state.slots.len() as u32;
        if number >= MEMORY_SLOTS {
            return Err(MemoryHotplugError::NoSlot);
        }
        state.slots.push(slot);
        Ok(number)
    }

    /// The added memory devices, by slot.
    pub fn slots(&self) -> Vec<MemorySlot> {
        self.lock().slots.clone()
    }

    /// Saves the state.
    pub fn save(&self) -> MemoryHotplugState {
        self.lock().clone()
    }

    /// Loads a saved state. The caller must map its memory.
    pub fn restore(&self, state: MemoryHotplugState) -> Result<(), MemoryHotplugError> {
        if state.slots.len() > MEMORY_SLOTS as usize {
            return Err(MemoryHotplugError::State(state.slots.len()));
        }
        for slot in &state.slots {
            slot.check()?;
        }
        *self.lock() = state;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, MemoryHotplugState> {
        self.state.lock_unpoisoned()
    }
}

impl MemorySlot {
    fn check(&self) -> Result<(), MemoryHotplugError> {
        let last = self.length.checked_sub(1);
        match last.and_then(|last| self.base.checked_add(last)) {
            Some(_) => Ok(()),
            None => Err(MemoryHotplugError::Range {
                base: self.base,
                length: self.length,
            }),
        }
    }
}

impl MemoryHotplugState {
    fn registers(&self) -> [u8; MEMORY_HOTPLUG_SIZE as usize] {
        let mut image = [0; MEMORY_HOTPLUG_SIZE as usize];
        if let Some(slot) = self.slots.get(self.selected as usize) {
            image[..8].copy_from_slice(&slot.base.to_le_bytes());
            image[8..16].copy_from_slice(&slot.length.to_le_bytes());
            image[16..20].copy_from_slice(&slot.node.to_le_bytes());
            image[20] = FLAG_PRESENT | if slot.inserted { FLAG_INSERTED } else { 0 };
        }
        let next = self.slots.iter().position(|slot| slot.inserted);
        // At most MEMORY_SLOTS.
        let next = next.map_or(NO_EVENT, |slot| slot as u32);
        image[24..28].copy_from_slice(&self.selected.to_le_bytes());
        image[28..].copy_from_slice(&next.to_le_bytes());
        image
    }
}

impl BusDevice for MemoryHotplug {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let image = self.lock().registers();
        registers::read(&image, offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut state = self.lock();
        match (offset, data) {
            (SELECT, &[a, b, c, d]) => state.selected = u32::from_le_bytes([a, b, c, d]),
            (FLAGS, &[flags]) if flags & FLAG_INSERTED != 0 => {
                let selected = state.selected as usize;
                if let Some(slot) = state.slots.get_mut(selected) {
                    slot.inserted = false;
                }
            }
            _ => {}
        }
    }
}

fn name(slot: u32) -> String {
    format!("M{slot:03X}")
}

impl Aml for MemoryHotplug {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let mut devices = Vec::new();
        let mut notify = Vec::new();
        for slot in 0..MEMORY_SLOTS {
            let device = aml::Path::new(&name(slot));
            let is_this = aml::Equal::new(&aml::Arg(0), &slot);
            aml::If::new(&is_this, vec![&aml::Notify::new(&device, &aml::Arg(1))])
                .to_aml_bytes(&mut notify);
            device_aml(slot, &mut devices);
        }

        let mut registers = Vec::new();
        registers_aml(&mut registers);
        let mut questions = Vec::new();
        questions_aml(&mut questions);
        let mut scan = Vec::new();
        scan_aml(&mut scan);
        let mut resources = Vec::new();
        resources_aml(&mut resources);

        controller(
            "\\_SB_.MHPC",
            "Memory Hotplug Controller",
            (self.address, MEMORY_HOTPLUG_SIZE),
            &[
                &aml::Mutex::new("MLCK".into(), 0),
                &aml::OpRegion::new(
                    "MHPR".into(),
                    aml::OpRegionSpace::SystemMemory,
                    &self.address,
                    &MEMORY_HOTPLUG_SIZE,
                ),
                &Raw(&registers),
                &Raw(&questions),
                // Resources of slot Arg0.
                &aml::Method::new("MCRS".into(), 1, true, vec![&Raw(&resources)]),
                // Notifies the operating system of event Arg1 of slot Arg0.
                &aml::Method::new("MTFY".into(), 2, true, vec![&Raw(&notify)]),
                &Raw(&scan),
                &Raw(&devices),
            ],
            sink,
        );
    }
}

/// Declares the registers by name.
fn registers_aml(sink: &mut dyn AmlSink) {
    let field = |access, entries| {
        aml::Field::new(
            "MHPR".into(),
            access,
            aml::FieldLockRule::NoLock,
            aml::FieldUpdateRule::WriteAsZeroes,
            entries,
        )
    };
    field(
        aml::FieldAccessType::DWord,
        vec![
            aml::FieldEntry::Named(*b"MBAL", 32),
            aml::FieldEntry::Named(*b"MBAH", 32),
            aml::FieldEntry::Named(*b"MLNL", 32),
            aml::FieldEntry::Named(*b"MLNH", 32),
            aml::FieldEntry::Named(*b"MPXM", 32),
            aml::FieldEntry::Reserved(32),
            aml::FieldEntry::Named(*b"MSEL", 32),
            aml::FieldEntry::Named(*b"MNXT", 32),
        ],
    )
    .to_aml_bytes(sink);
    field(
        aml::FieldAccessType::Byte,
        vec![
            aml::FieldEntry::Reserved(8 * FLAGS as usize),
            aml::FieldEntry::Named(*b"MEN_", 1),
            aml::FieldEntry::Named(*b"MINS", 1),
        ],
    )
    .to_aml_bytes(sink);
}

/// The methods that query the registers of one slot.
fn questions_aml(sink: &mut dyn AmlSink) {
    let acquire = aml::Acquire::new("MLCK".into(), FOREVER);
    let release = aml::Release::new("MLCK".into());
    let select = aml::Path::new("MSEL");
    let present = aml::Path::new("MEN_");
    let node = aml::Path::new("MPXM");
    let result = aml::Local(0);
    let choose = aml::Store::new(&select, &aml::Arg(0));
    // Status of slot Arg0.
    aml::Method::new(
        "MSTA".into(),
        1,
        true,
        vec![
            &acquire,
            &choose,
            &aml::Store::new(&result, &aml::ZERO),
            &aml::If::new(
                &aml::Equal::new(&present, &aml::ONE),
                vec![&aml::Store::new(&result, &STATUS_PRESENT)],
            ),
            &release,
            &aml::Return::new(&result),
        ],
    )
    .to_aml_bytes(sink);
    // NUMA node of slot Arg0.
    aml::Method::new(
        "MPRX".into(),
        1,
        true,
        vec![
            &acquire,
            &choose,
            &aml::Store::new(&result, &node),
            &release,
            &aml::Return::new(&result),
        ],
    )
    .to_aml_bytes(sink);
}

/// The method that scans for changes, like that of the CPUs.
fn scan_aml(sink: &mut dyn AmlSink) {
    let acquire = aml::Acquire::new("MLCK".into(), FOREVER);
    let release = aml::Release::new("MLCK".into());
    let select = aml::Path::new("MSEL");
    let inserted = aml::Path::new("MINS");
    let result = aml::Local(0);
    let next = aml::Path::new("MNXT");
    let find = aml::Store::new(&result, &next);
    aml::Method::new(
        "MSCN".into(),
        0,
        true,
        vec![
            &acquire,
            &find,
            &aml::While::new(
                &aml::LessThan::new(&result, &MEMORY_SLOTS),
                vec![
                    &aml::Store::new(&select, &result),
                    &aml::Store::new(&inserted, &aml::ONE),
                    &aml::MethodCall::new("MTFY".into(), vec![&result, &DEVICE_CHECK]),
                    &find,
                ],
            ),
            &release,
        ],
    )
    .to_aml_bytes(sink);
}

/// The body of the method that builds a slot's resources from the registers.
fn resources_aml(sink: &mut dyn AmlSink) {
    let buffer = aml::Path::new("MR64");
    let (base, length, high) = (aml::Local(0), aml::Local(1), aml::Local(2));
    let template = aml::AddressSpace::<u64>::new_memory(
        aml::AddressSpaceCacheable::Cacheable,
        true,
        0,
        0xfff,
        None,
    );
    let template = aml::ResourceTemplate::new(vec![&template]);
    let min = aml::Path::new("MMIN");
    let max = aml::Path::new("MMAX");
    let len = aml::Path::new("MLEN");
    let mut put = |step: &dyn Aml| step.to_aml_bytes(sink);
    put(&aml::Acquire::new("MLCK".into(), FOREVER));
    put(&aml::Store::new(&aml::Path::new("MSEL"), &aml::Arg(0)));
    for (value, low, upper) in [(&base, "MBAL", "MBAH"), (&length, "MLNL", "MLNH")] {
        put(&aml::Store::new(value, &aml::Path::new(low)));
        put(&aml::Store::new(&high, &aml::Path::new(upper)));
        put(&aml::ShiftLeft::new(&high, &high, &32u8));
        put(&aml::Or::new(value, value, &high));
    }
    put(&aml::Release::new("MLCK".into()));
    put(&aml::Name::new("MR64".into(), &template));
    put(&aml::CreateQWordField::new(&min, &buffer, &DESCRIPTOR_MIN));
    put(&aml::CreateQWordField::new(&max, &buffer, &DESCRIPTOR_MAX));
    put(&aml::CreateQWordField::new(
        &len,
        &buffer,
        &DESCRIPTOR_LENGTH,
    ));
    put(&aml::Store::new(&min, &base));
    put(&aml::Store::new(&len, &length));
    put(&aml::Add::new(&max, &base, &length));
    put(&aml::Subtract::new(&max, &max, &aml::ONE));
    put(&aml::Return::new(&buffer));
}

fn device_aml(slot: u32, sink: &mut dyn AmlSink) {
    let call = |method: &str| aml::MethodCall::new(method.into(), vec![&slot]);
    let (status, resources, node) = (call("MSTA"), call("MCRS"), call("MPRX"));
    aml::Device::new(
        aml::Path::new(&name(slot)),
        vec![
            &aml::Name::new("_HID".into(), &aml::EISAName::new("PNP0C80")),
            &aml::Name::new("_UID".into(), &slot),
            &aml::Method::new("_STA".into(), 0, false, vec![&aml::Return::new(&status)]),
            &aml::Method::new("_CRS".into(), 0, false, vec![&aml::Return::new(&resources)]),
            &aml::Method::new("_PXM".into(), 0, false, vec![&aml::Return::new(&node)]),
        ],
    )
    .to_aml_bytes(sink);
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn read<const N: usize>(device: &MemoryHotplug, offset: u64) -> [u8; N] {
        let mut data = [0xff; N];
        device.read(offset, &mut data);
        data
    }

    #[test]
    fn added_memory_is_found_by_a_scan_described_and_acknowledged() {
        let device = MemoryHotplug::new(0);
        assert_eq!(read(&device, 28), NO_EVENT.to_le_bytes());
        assert_eq!(device.insert(4 * GIB, GIB, 0), Ok(0));
        assert_eq!(device.insert(5 * GIB, 2 * GIB, 1), Ok(1));
        assert_eq!(read(&device, 28), [0; 4]);
        device.write(24, &1u32.to_le_bytes());
        assert_eq!(read(&device, 0), (5 * GIB).to_le_bytes());
        assert_eq!(read(&device, 8), (2 * GIB).to_le_bytes());
        assert_eq!(read(&device, 16), [1, 0, 0, 0]);
        assert_eq!(read(&device, 20), [0b11]);
        device.write(20, &[0b10]);
        assert_eq!(read(&device, 20), [0b01]);
        device.write(24, &[0; 4]);
        device.write(20, &[0b10]);
        assert_eq!(read(&device, 28), NO_EVENT.to_le_bytes());
    }

    #[test]
    fn slots_run_out_and_bad_ranges_take_none() {
        let device = MemoryHotplug::new(0);
        for (base, length) in [(0, 0), (u64::MAX, 2), (2, u64::MAX)] {
            let range = MemoryHotplugError::Range { base, length };
            assert_eq!(device.insert(base, length, 0), Err(range));
        }
        for slot in 0..MEMORY_SLOTS {
            assert_eq!(device.insert(u64::from(slot) * GIB, GIB, 0), Ok(slot));
        }
        assert_eq!(
            device.insert(9 * GIB, GIB, 0),
            Err(MemoryHotplugError::NoSlot)
        );
    }

    #[test]
    fn the_state_survives_a_snapshot_and_an_impossible_one_is_refused() {
        let device = MemoryHotplug::new(0);
        device.insert(4 * GIB, GIB, 3).unwrap();
        let saved = serde_json::to_string(&device.save()).unwrap();
        let restored = MemoryHotplug::new(0);
        restored
            .restore(serde_json::from_str(&saved).unwrap())
            .unwrap();
        assert_eq!(restored.slots(), device.slots());
        let mut state = device.save();
        state.slots = vec![state.slots[0]; 9];
        assert_eq!(device.restore(state), Err(MemoryHotplugError::State(9)));
        let mut state = device.save();
        state.slots[0].length = u64::MAX;
        assert!(device.restore(state).is_err());
    }

    #[test]
    fn stray_accesses_change_nothing() {
        let device = MemoryHotplug::new(0);
        device.insert(4 * GIB, GIB, 0).unwrap();
        let before = device.save();
        device.write(24, &[1]);
        device.write(20, &[0b01]);
        device.write(20, &[0xff; 4]);
        device.write(u64::MAX, &[0xff; 8]);
        device.write(0, &[0xff; 8]);
        device.write(20, &[]);
        assert_eq!(device.save(), before);
        device.write(24, &u32::MAX.to_le_bytes());
        assert_eq!(read::<8>(&device, 0), [0; 8]);
        device.write(20, &[0xff]);
        assert_eq!(device.slots(), before.slots);
    }
}
