//! Dirty page logging: which pages of a memory slot the guest has written.
//!
//! KVM keeps a bitmap per slot. A page is *armed* when its bit is clear: KVM then write-protects
//! it, and the first write sets the bit in the kernel, without an exit to user space. While the bit
//! is set, writes to the page cost nothing.
//!
//! A new log has all bits set and nothing armed (`KVM_DIRTY_LOG_INITIALLY_SET`), and reading it
//! arms nothing (`KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`). Both users of the log benefit:
//!
//! - A migration arms 64 pages immediately before it sends them. A guest write between reading the
//!   bitmap and copying the page is then sent once, not again in the next round.
//! - A virtual GPU arms only the pages that hold page tables: data pages in the same slot never
//!   fault.
//!
//! The log does not contain writes by user space.

use std::sync::{Arc, PoisonError};

use crate::{Error, Result, SlotId, Vm};

/// Minimum number of 4 KiB pages that one call arms: KVM takes whole words of the bitmap.
pub const BLOCK_PAGES: u64 = 64;

/// Page size of the log in bytes.
pub const PAGE: u64 = 4096;

/// The dirty log of one slot. A slot has at most one log at a time. Dropping the log ends logging
/// and removes the write protection.
#[derive(Debug)]
pub struct DirtyLog {
    vm: Arc<Vm>,
    slot: SlotId,
    /// Number of pages in the slot.
    pages: u64,
}

impl Vm {
    /// Starts logging writes to a slot. Initially all pages count as written and none is armed.
    ///
    /// # Errors
    ///
    /// [`Error::NoDirtyLog`] if this host's KVM is too old, [`Error::Watched`] if the slot already
    /// has a log.
    pub fn watch(self: &Arc<Self>, slot: SlotId) -> Result<DirtyLog> {
        let len = self.set_logged(slot, true)?;
        Ok(DirtyLog {
            vm: Arc::clone(self),
            slot,
            pages: len / PAGE,
        })
    }
}

impl DirtyLog {
    /// Number of 4 KiB pages in the slot.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Reads the bitmap without arming any page. Bit `n % 64` of word `n / 64` is page `n` of the
    /// slot.
    pub fn read(&self) -> Result<Vec<u64>> {
        let slots = self.vm.slots.lock().unwrap_or_else(PoisonError::into_inner);
        slots.find(self.slot)?;
        let len = usize::try_from(self.pages * PAGE).unwrap_or(usize::MAX);
        self.vm
            .fd
            .get_dirty_log(self.slot.index, len)
            .map_err(Error::ioctl("read a log of written pages"))
    }

    /// Clears the bits that are set in `words` and arms their pages. The first word starts at page
    /// `block * 64`. Bits beyond the slot are ignored.
    ///
    /// Any write after this call either is included in a later copy of the page or sets its bit
    /// again.
    pub fn arm(&self, block: u64, words: &mut [u64]) -> Result<()> {
        let first_page = block.saturating_mul(BLOCK_PAGES);
        if words.is_empty() || first_page >= self.pages {
            return Ok(());
        }
        // KVM requires a multiple of 64 pages, or a range up to the end of the slot.
        let asked = words.len() as u64 * BLOCK_PAGES;
        let pages = asked.min(self.pages - first_page);
        if let Ok(pages) = usize::try_from(pages)
            && let Some(last) = words.get_mut(pages / 64)
            && pages % 64 != 0
        {
            *last &= (1 << (pages % 64)) - 1;
        }
        let slots = self.vm.slots.lock().unwrap_or_else(PoisonError::into_inner);
        slots.find(self.slot)?;
        let mut request = kvm_bindings::kvm_clear_dirty_log {
            slot: self.slot.index,
            // A slot has fewer than 2^31 pages.
            num_pages: pages as u32,
            first_page,
            ..Default::default()
        };
        request.__bindgen_anon_1.dirty_bitmap = words.as_mut_ptr().cast();
        // SAFETY: the descriptor belongs to a VM, and `words` has at least one bit for each of
        // `pages` pages. KVM only reads it.
        let result = unsafe {
            vmm_sys_util::ioctl::ioctl_with_ref(&*self.vm.fd, KVM_CLEAR_DIRTY_LOG, &request)
        };
        if result == 0 {
            Ok(())
        } else {
            Err(Error::Ioctl {
                action: "arm pages whose writes it logs",
                source: std::io::Error::last_os_error(),
            })
        }
    }
}

/// `_IOWR(KVMIO, 0xc0, struct kvm_clear_dirty_log)`.
const KVM_CLEAR_DIRTY_LOG: libc::c_ulong = 0xc018_aec0;

impl Drop for DirtyLog {
    fn drop(&mut self) {
        match self.vm.set_logged(self.slot, false) {
            // A slot that has been removed has no log.
            Ok(_) | Err(Error::NoSlot) => {}
            Err(error) => log::warn!("writes to memory stay logged: {error}"),
        }
    }
}
