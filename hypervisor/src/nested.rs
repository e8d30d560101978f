//! Nested virtualization: the state that KVM keeps for a guest that runs VMs of its own.

use kvm_bindings::{kvm_nested_state, kvm_sregs, nested::KvmNestedStateBuffer};
use kvm_ioctls::VcpuFd;
use zerocopy::FromBytes;

use crate::{Error, Result};

/// CR4.VMXE: VMX is enabled.
const CR4_VMXE: u64 = 1 << 13;

/// EFER.SVME: SVM is enabled.
const EFER_SVME: u64 = 1 << 12;

/// Whether the guest has enabled VMX or SVM.
pub(crate) fn is_on(sregs: &kvm_sregs) -> bool {
    sregs.cr4 & CR4_VMXE != 0 || sregs.efer & EFER_SVME != 0
}

/// Returns the nested state of a vCPU that is not running. It is empty if the guest does not use
/// VMX or SVM.
///
/// # Errors
///
/// [`Error::Nested`] if the guest uses them and this host's KVM cannot save their state.
pub(crate) fn save(fd: &VcpuFd, vcpu: u8, sregs: &kvm_sregs) -> Result<Vec<u8>> {
    if !is_on(sregs) {
        return Ok(Vec::new());
    }
    let mut buffer = KvmNestedStateBuffer::empty();
    fd.nested_state(&mut buffer)
        .map_err(|error| match error.errno() {
            libc::ENOTTY | libc::EINVAL => Error::Nested { vcpu },
            _ => Error::ioctl("read the state of a guest's own VMs")(error),
        })?;
    let len = (buffer.size as usize).min(size_of_val(&buffer));
    // SAFETY: the buffer was zeroed before KVM filled it in, so all its bytes, padding of unions
    // included, are initialized; `len` is within it, and it outlives the slice.
    let bytes = unsafe { std::slice::from_raw_parts((&raw const buffer).cast::<u8>(), len) };
    Ok(bytes.to_vec())
}

/// Restores a saved state, which is untrusted.
pub(crate) fn restore(fd: &VcpuFd, vcpu: u8, state: &[u8]) -> Result<()> {
    let refused = || Error::Ioctl {
        action: "take over the state of a guest's own VMs: it is damaged",
        source: std::io::Error::from_raw_os_error(libc::EINVAL),
    };
    let room = size_of::<KvmNestedStateBuffer>();
    if !(size_of::<kvm_nested_state>()..=room).contains(&state.len()) {
        return Err(refused());
    }
    let mut bytes = state.to_vec();
    bytes.resize(room, 0);
    let buffer = KvmNestedStateBuffer::read_from_bytes(&bytes).map_err(|_| refused())?;
    // KVM reads as many bytes as the state claims to have.
    if buffer.size as usize != state.len() {
        return Err(refused());
    }
    fd.set_nested_state(&buffer)
        .map_err(|error| match error.errno() {
            libc::ENOTTY => Error::Nested { vcpu },
            _ => Error::ioctl("take over the state of a guest's own VMs")(error),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtualization_is_in_use_from_the_moment_when_it_is_switched_on() {
        let mut sregs = kvm_sregs::default();
        assert!(!is_on(&sregs));
        sregs.efer = 0xd00 | EFER_SVME;
        assert!(is_on(&sregs));
        sregs.efer = 0xd00;
        sregs.cr4 = 0x20 | CR4_VMXE;
        assert!(is_on(&sregs));
    }
}
