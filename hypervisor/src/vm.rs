//! One VM: its memory slots, interrupt controllers and doorbells.

use std::sync::{Arc, Mutex, PoisonError};

use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_CLOCK_TSC_STABLE, KVM_DIRTY_LOG_INITIALLY_SET,
    KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KVM_MEM_LOG_DIRTY_PAGES, KVM_MEM_READONLY, KVM_PIT_SPEAKER_DUMMY,
    kvm_clock_data, kvm_enable_cap, kvm_irqchip, kvm_msi, kvm_pit_config,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, IoEventAddress, NoDatamatch, VmFd};
use vmm_sys_util::eventfd::EventFd;

use crate::{Error, Gsis, MsiRoute, Result, Vcpu, VmState};

/// Identifies a memory slot of a [`Vm`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SlotId {
    /// KVM's slot number, which may be reused.
    pub(crate) index: u32,
    /// Unique over the lifetime of the VM.
    serial: u64,
}

/// A range of guest-physical addresses that is backed by host memory.
#[derive(Clone, Copy, Debug)]
pub struct MemorySlot {
    /// Guest-physical address, page aligned.
    pub guest: u64,
    /// Length in bytes, a multiple of the page size.
    pub len: u64,
    /// Host virtual address, page aligned.
    pub host: *mut u8,
    /// Whether guest writes exit instead of reaching the memory.
    pub read_only: bool,
}

/// A slot in use.
#[derive(Debug)]
pub(crate) struct UsedSlot {
    serial: u64,
    slot: MemorySlot,
    /// Whether writes are logged.
    logged: bool,
}

#[derive(Debug)]
pub(crate) struct Slots {
    used: Vec<Option<UsedSlot>>,
    limit: usize,
    next_serial: u64,
}

impl Slots {
    /// Finds a slot that has not been unmapped.
    pub(crate) fn find(&self, id: SlotId) -> Result<&UsedSlot> {
        let used = self.used.get(id.index as usize).and_then(Option::as_ref);
        used.filter(|used| used.serial == id.serial)
            .ok_or(Error::NoSlot)
    }
}

// SAFETY: the host address in a slot is only passed back to KVM. Nothing here reads or writes it.
unsafe impl Send for Slots {}

/// A virtual machine in KVM.
#[derive(Debug)]
pub struct Vm {
    pub(crate) fd: Arc<VmFd>,
    pub(crate) slots: Mutex<Slots>,
    /// Whether KVM supports the dirty log that [`crate::DirtyLog`] needs.
    has_dirty_log: bool,
    gsis: Arc<Gsis>,
}

impl Vm {
    pub(crate) fn new(fd: VmFd, tss: u64, identity_map: u64) -> Result<Self> {
        let tss = usize::try_from(tss).unwrap_or(usize::MAX);
        fd.set_identity_map_address(identity_map)
            .map_err(Error::ioctl("place the identity map"))?;
        fd.set_tss_address(tss)
            .map_err(Error::ioctl("place the TSS"))?;
        fd.create_irq_chip()
            .map_err(Error::ioctl("create interrupt controllers"))?;
        let pit = kvm_pit_config {
            flags: KVM_PIT_SPEAKER_DUMMY,
            ..Default::default()
        };
        fd.create_pit2(pit)
            .map_err(Error::ioctl("create a timer (PIT)"))?;
        let limit = usize::try_from(fd.check_extension_int(Cap::NrMemslots))
            .unwrap_or(0)
            .max(32);
        let has_dirty_log = enable_dirty_log(&fd);
        let fd = Arc::new(fd);
        Ok(Self {
            has_dirty_log,
            gsis: Arc::new(Gsis::new(Arc::clone(&fd))),
            slots: Mutex::new(Slots {
                used: Vec::new(),
                limit,
                next_serial: 0,
            }),
            fd,
        })
    }

    /// Creates vCPU number `id` with local APIC ID `apic_id`.
    pub fn create_vcpu(&self, id: u8, apic_id: u32) -> Result<Vcpu> {
        let fd = self
            .fd
            .create_vcpu(u64::from(apic_id))
            .map_err(Error::ioctl("create a vCPU"))?;
        // At least the size of `kvm_xsave` where it is known; 0 before Linux 5.17.
        let vector_state = self.fd.check_extension_int(Cap::Xsave2);
        let vector_state = usize::try_from(vector_state).unwrap_or(0);
        Ok(Vcpu::new(fd, id, vector_state))
    }

    /// Creates KVM's VFIO device, through which KVM learns which physical devices the VM has.
    pub fn create_vfio_device(&self) -> Result<kvm_ioctls::DeviceFd> {
        let mut device = kvm_bindings::kvm_create_device {
            type_: kvm_bindings::kvm_device_type_KVM_DEV_TYPE_VFIO,
            ..Default::default()
        };
        self.fd
            .create_device(&mut device)
            .map_err(Error::ioctl("create KVM's VFIO device"))
    }

    /// The interrupt routing table.
    pub fn gsis(&self) -> &Arc<Gsis> {
        &self.gsis
    }

    /// Maps host memory into the guest.
    ///
    /// # Safety
    ///
    /// `slot.host` must be a mapping of at least `slot.len` bytes that stays in place until
    /// [`Vm::unmap`] for the returned slot or the end of the VM. Nothing in this process may use it
    /// as Rust memory, since the guest changes it at any time.
    pub unsafe fn map(&self, slot: MemorySlot) -> Result<SlotId> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let free = slots
            .used
            .iter()
            .position(Option::is_none)
            .unwrap_or(slots.used.len());
        if free >= slots.limit {
            return Err(Error::Ioctl {
                action: "map more memory: all its memory slots are taken",
                source: std::io::Error::from_raw_os_error(libc::ENOSPC),
            });
        }
        let id = SlotId {
            // Below the limit, which came from an i32.
            index: free as u32,
            serial: slots.next_serial,
        };
        // SAFETY: the caller vouches for the memory.
        unsafe { self.set_region(id, &slot, slot.len, false) }
            .map_err(Error::ioctl("map memory"))?;
        slots.next_serial += 1;
        if free == slots.used.len() {
            slots.used.push(None);
        }
        slots.used[free] = Some(UsedSlot {
            serial: id.serial,
            slot,
            logged: false,
        });
        Ok(id)
    }

    /// Removes a slot from the guest's address space. On success, the host memory may be unmapped.
    /// KVM refuses only for lack of kernel memory; the slot then remains mapped, and the call can
    /// be repeated.
    pub fn unmap(&self, id: SlotId) -> Result<()> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(entry) = slots.used.get_mut(id.index as usize) else {
            return Ok(());
        };
        let Some(used) = entry.as_ref().filter(|used| used.serial == id.serial) else {
            return Ok(());
        };
        // SAFETY: length 0 removes the slot; no memory is involved.
        unsafe { self.set_region(id, &used.slot, 0, false) }
            .map_err(Error::ioctl("unmap memory"))?;
        *entry = None;
        Ok(())
    }

    /// Starts or ends logging of a slot. Returns the slot's length in bytes.
    pub(crate) fn set_logged(&self, id: SlotId, logged: bool) -> Result<u64> {
        if !self.has_dirty_log {
            return Err(Error::NoDirtyLog);
        }
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let used = slots.find(id)?;
        if used.logged == logged {
            return if logged {
                Err(Error::Watched)
            } else {
                Ok(used.slot.len)
            };
        }
        let slot = used.slot;
        // SAFETY: whoever mapped the slot keeps its memory in place until `unmap`, which removes
        // the entry under the lock that is held here.
        unsafe { self.set_region(id, &slot, slot.len, logged) }
            .map_err(Error::ioctl("log writes to memory"))?;
        if let Some(used) = slots
            .used
            .get_mut(id.index as usize)
            .and_then(Option::as_mut)
        {
            used.logged = logged;
        }
        Ok(slot.len)
    }

    /// # Safety
    ///
    /// As for [`Vm::map`].
    unsafe fn set_region(
        &self,
        id: SlotId,
        slot: &MemorySlot,
        len: u64,
        logged: bool,
    ) -> std::result::Result<(), kvm_ioctls::Error> {
        let mut flags = 0;
        if slot.read_only {
            flags |= KVM_MEM_READONLY;
        }
        if logged {
            flags |= KVM_MEM_LOG_DIRTY_PAGES;
        }
        let region = kvm_userspace_memory_region {
            slot: id.index,
            flags,
            guest_phys_addr: slot.guest,
            memory_size: len,
            userspace_addr: slot.host as u64,
        };
        // SAFETY: the caller vouches for the memory.
        unsafe { self.fd.set_user_memory_region(region) }
    }

    /// Makes writes to `fd` raise the interrupt line `gsi`.
    pub fn register_irqfd(&self, fd: &EventFd, gsi: u32) -> Result<()> {
        self.fd
            .register_irqfd(fd, gsi)
            .map_err(Error::ioctl("attach an eventfd to an interrupt"))
    }

    /// Undoes [`Vm::register_irqfd`] and [`Vm::register_level_irqfd`].
    pub fn unregister_irqfd(&self, fd: &EventFd, gsi: u32) -> Result<()> {
        self.fd
            .unregister_irqfd(fd, gsi)
            .map_err(Error::ioctl("detach an eventfd from an interrupt"))
    }

    /// Sends a message-signalled interrupt at once, without a route or an eventfd.
    pub fn signal_msi(&self, message: MsiRoute) -> Result<()> {
        let message = kvm_msi {
            // The halves of the address.
            address_lo: message.address as u32,
            address_hi: (message.address >> 32) as u32,
            data: message.data,
            ..Default::default()
        };
        self.fd
            .signal_msi(message)
            .map(drop)
            .map_err(Error::ioctl("send a message-signalled interrupt"))
    }

    /// Makes writes to `fd` assert the level-triggered interrupt line `gsi`. When the guest has
    /// serviced the interrupt, KVM deasserts the line and signals `served`.
    pub fn register_level_irqfd(&self, fd: &EventFd, served: &EventFd, gsi: u32) -> Result<()> {
        self.fd
            .register_irqfd_with_resample(fd, served, gsi)
            .map_err(Error::ioctl("attach an eventfd to an interrupt line"))
    }

    /// Makes guest writes of any width to the MMIO address `address` signal `fd`, without an exit
    /// to user space.
    pub fn register_doorbell(&self, fd: &EventFd, address: u64) -> Result<()> {
        self.fd
            .register_ioevent(fd, &IoEventAddress::Mmio(address), NoDatamatch)
            .map_err(Error::ioctl("attach an eventfd to an address"))
    }

    /// Undoes [`Vm::register_doorbell`].
    pub fn unregister_doorbell(&self, fd: &EventFd, address: u64) -> Result<()> {
        self.fd
            .unregister_ioevent(fd, &IoEventAddress::Mmio(address), NoDatamatch)
            .map_err(Error::ioctl("detach an eventfd from an address"))
    }

    /// Saves the state of the clock, timer and interrupt controllers. All vCPUs must be stopped.
    pub fn save(&self) -> Result<VmState> {
        let chip = |chip_id| {
            let mut chip = kvm_irqchip {
                chip_id,
                ..Default::default()
            };
            self.fd
                .get_irqchip(&mut chip)
                .map_err(Error::ioctl("read an interrupt controller"))?;
            Ok(chip)
        };
        let mut clock = self
            .fd
            .get_clock()
            .map_err(Error::ioctl("read the clock"))?;
        // KVM reports this flag but does not accept it.
        clock.flags &= !KVM_CLOCK_TSC_STABLE;
        Ok(VmState {
            clock,
            pit: self
                .fd
                .get_pit2()
                .map_err(Error::ioctl("read the timer (PIT)"))?,
            pic_master: chip(KVM_IRQCHIP_PIC_MASTER)?,
            pic_slave: chip(KVM_IRQCHIP_PIC_SLAVE)?,
            ioapic: chip(KVM_IRQCHIP_IOAPIC)?,
        })
    }

    /// Restores a saved state, before any vCPU runs. The guest's clock continues from the saved
    /// value.
    pub fn restore(&self, state: &VmState) -> Result<()> {
        for chip in [&state.pic_master, &state.pic_slave, &state.ioapic] {
            self.fd
                .set_irqchip(chip)
                .map_err(Error::ioctl("set an interrupt controller"))?;
        }
        self.fd
            .set_pit2(&state.pit)
            .map_err(Error::ioctl("set the timer (PIT)"))?;
        let clock = kvm_clock_data {
            clock: state.clock.clock,
            ..Default::default()
        };
        self.fd
            .set_clock(&clock)
            .map_err(Error::ioctl("set the clock"))
    }
}

/// Enables dirty logs that are cleared manually and start with all pages set. Returns false if KVM
/// does not support them. This costs nothing while no slot is logged.
fn enable_dirty_log(fd: &VmFd) -> bool {
    let wanted = KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET;
    let known = fd.check_extension_raw(u64::from(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2));
    if u32::try_from(known).unwrap_or(0) & wanted != wanted {
        return false;
    }
    let mut cap = kvm_enable_cap {
        cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
        ..Default::default()
    };
    cap.args[0] = u64::from(wanted);
    fd.enable_cap(&cap).is_ok()
}
