//! Firmware: an ELF file with a PVH entry that finds the operating system on a disk by itself.
//!
//! There are two for this kind of machine: edk2's CloudHv target (`CLOUDHV.fd`), which UEFI images
//! boot with, and rust-hypervisor-firmware. Neither reads a command line or an initramfs. They have
//! no variables that last: an image boots by `/EFI/BOOT/BOOTX64.EFI`.

use vm_memory::GuestMemoryBackend;

use super::{BootError, BootProtocol, Image, LoadedGuest, kernel, write_cmdline};
use crate::layout::{AddressMap, MIB};

/// Minimum guest RAM of firmware, in bytes: edk2 hangs with less, without a message.
const MIN_RAM: u64 = 64 * MIB;

/// Loads firmware into `memory`, which contains the RAM of `map`.
///
/// # Errors
///
/// [`BootError`] says why the file cannot boot this machine, and what to do. Part of the memory may
/// have been written by then, so the guest must not be run.
pub fn load_firmware<K: Image>(
    memory: &impl GuestMemoryBackend,
    map: &AddressMap,
    image: &mut K,
) -> Result<LoadedGuest, BootError> {
    if map.low_ram().size < MIN_RAM {
        return Err(BootError::FirmwareNeedsRam {
            ram: map.low_ram().size / MIB,
            min: MIN_RAM / MIB,
        });
    }
    if !map.hole().is_empty() {
        return Err(BootError::FirmwareWithHole);
    }
    let kernel = kernel::load_kernel(memory, map, image)?;
    if kernel.protocol != BootProtocol::Pvh {
        return Err(BootError::NotFirmware);
    }
    write_cmdline(memory, "", kernel.cmdline_max)?;
    Ok(LoadedGuest {
        kernel,
        initramfs: None,
    })
}
