//! The vCPU of the calling thread, while one of its accesses is being handled.
//!
//! A device that handles an access ([`Exits`](crate::Exits)) is not told which vCPU made it. Most
//! devices need not know. A device that acts on behalf of the process running on the vCPU does.

use std::{
    cell::Cell,
    marker::PhantomData,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
};

use kvm_bindings::{KVMIO, Msrs, kvm_msr_entry, kvm_msrs, kvm_sregs};
use vmm_sys_util::{
    ioctl::{ioctl_with_mut_ptr, ioctl_with_mut_ref},
    ioctl_ior_nr, ioctl_iowr_nr,
};

use crate::{Error, Result};

ioctl_ior_nr!(KVM_GET_SREGS, KVMIO, 0x83, kvm_sregs);
ioctl_iowr_nr!(KVM_GET_MSRS, KVMIO, 0x88, kvm_msrs);

thread_local! {
    static CURRENT: Cell<Option<RawFd>> = const { Cell::new(None) };
}

/// Records which vCPU the calling thread runs. The thread owns that vCPU until the thread ends.
pub fn set(fd: &impl AsRawFd) {
    CURRENT.set(Some(fd.as_raw_fd()));
}

/// The vCPU that the calling thread runs. This handle cannot leave the thread.
pub struct CurrentVcpu(RawFd, PhantomData<*const ()>);

/// Returns the vCPU that the calling thread runs, or `None` if this is not a vCPU thread.
pub fn current_vcpu() -> Option<CurrentVcpu> {
    CURRENT.get().map(|fd| CurrentVcpu(fd, PhantomData))
}

impl CurrentVcpu {
    /// File descriptor of the vCPU.
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the thread owns the vCPU while it runs, and this value cannot leave the thread.
        unsafe { BorrowedFd::borrow_raw(self.0) }
    }

    /// Reads the segment and control registers.
    pub fn sregs(&self) -> Result<kvm_sregs> {
        let mut sregs = kvm_sregs::default();
        // SAFETY: KVM fills in the structure, which is the one that the request names.
        match unsafe { ioctl_with_mut_ref(self, KVM_GET_SREGS(), &mut sregs) } {
            0 => Ok(sregs),
            _ => Err(Error::Ioctl {
                action: "read a vCPU's control registers",
                source: std::io::Error::last_os_error(),
            }),
        }
    }

    /// Reads these model-specific registers. Fails unless KVM returns all of them.
    pub fn msrs<const N: usize>(&self, indices: [u32; N]) -> Result<[u64; N]> {
        let failed = |source| Error::Ioctl {
            action: "read a vCPU's MSRs",
            source,
        };
        let entries = indices.map(|index| kvm_msr_entry {
            index,
            ..Default::default()
        });
        let mut msrs = Msrs::from_entries(&entries)
            .map_err(|_| failed(std::io::Error::from_raw_os_error(libc::E2BIG)))?;
        // SAFETY: KVM fills in as many entries as the structure says that it has.
        let done =
            unsafe { ioctl_with_mut_ptr(self, KVM_GET_MSRS(), msrs.as_mut_fam_struct_ptr()) };
        if usize::try_from(done) != Ok(N) {
            return Err(failed(std::io::Error::last_os_error()));
        }
        let mut values = [0; N];
        for (value, entry) in values.iter_mut().zip(msrs.as_slice()) {
            *value = entry.data;
        }
        Ok(values)
    }
}

impl AsRawFd for CurrentVcpu {
    fn as_raw_fd(&self) -> RawFd {
        self.0
    }
}
