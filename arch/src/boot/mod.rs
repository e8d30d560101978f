//! Loads a kernel or firmware and describes the machine to it.
//!
//! There are two ways to enter them:
//! - an uncompressed ELF kernel, and firmware, through PVH (Xen's x86/HVM direct boot ABI): 32-bit
//!   protected mode, `hvm_start_info` in EBX;
//! - a bzImage through the 64-bit boot protocol (Documentation/arch/x86/boot.rst): long mode with
//!   identity-mapped low 4 GiB, `boot_params` in RSI. The kernel unpacks itself, which takes much
//!   of the boot time.

mod bzimage;
mod error;
mod firmware;
mod kernel;
mod paging;
mod pvh;
mod segment;
mod zero_page;

use std::io::{Read, Seek};

use linux_loader::loader::bootparam::setup_header;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, ReadVolatile};

pub use error::BootError;
pub use firmware::load_firmware;
pub use kernel::{PayloadKind, load_kernel};

use crate::layout::{self, AddressMap, AddressRange};

/// A file to load, or its contents in memory.
pub trait Image: Read + ReadVolatile + Seek {}

impl<T: Read + ReadVolatile + Seek> Image for T {}

/// How the kernel is entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BootProtocol {
    /// 32-bit protected mode without paging.
    Pvh,
    /// Long mode, Linux boot protocol 2.12 or newer.
    Linux64,
}

/// A kernel in guest memory.
#[derive(Clone, Debug)]
pub struct LoadedKernel {
    /// The protocol by which it is entered.
    pub protocol: BootProtocol,
    /// Its entry point.
    pub entry: GuestAddress,
    /// Memory that it uses before it reads the memory map.
    pub footprint: AddressRange,
    /// Maximum length of the command line in bytes, without the terminating zero.
    pub cmdline_max: usize,
    /// Last address that an initramfs may occupy.
    initramfs_last: u64,
    /// Setup header of a bzImage.
    header: Option<setup_header>,
}

/// What [`load`] placed in guest memory.
#[derive(Clone, Debug)]
pub struct LoadedGuest {
    /// The kernel.
    pub kernel: LoadedKernel,
    /// The initramfs; its size is not rounded up.
    pub initramfs: Option<AddressRange>,
}

/// Where and how the first vCPU starts; see [`crate::registers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryPoint {
    /// Determines the initial state of the processor.
    pub protocol: BootProtocol,
    /// First instruction.
    pub rip: GuestAddress,
    /// The structure that describes the machine: `hvm_start_info` or `boot_params`.
    pub info: GuestAddress,
}

/// Loads a kernel, an initramfs and a command line into `memory`, which contains the RAM of `map`.
///
/// # Errors
///
/// [`BootError`] says which of them is wrong, why, and what to do. Part of the memory may have been
/// written by then, so the guest must not be run.
pub fn load<K: Image, I: Image>(
    memory: &impl GuestMemoryBackend,
    map: &AddressMap,
    kernel: &mut K,
    initramfs: Option<&mut I>,
    cmdline: &str,
) -> Result<LoadedGuest, BootError> {
    let kernel = load_kernel(memory, map, kernel)?;
    write_cmdline(memory, cmdline, kernel.cmdline_max)?;
    let initramfs = initramfs
        .map(|file| load_initramfs(memory, map, &kernel, file))
        .transpose()?;
    Ok(LoadedGuest { kernel, initramfs })
}

/// Writes the data that the kernel is entered with: the memory map, the addresses of the command
/// line, the initramfs and the ACPI tables (`rsdp`), the descriptor tables and the page tables.
///
/// # Errors
///
/// [`BootError::Write`] if `memory` lacks the low RAM of `map`.
pub fn write_boot_data(
    memory: &impl GuestMemoryBackend,
    map: &AddressMap,
    guest: &LoadedGuest,
    rsdp: GuestAddress,
) -> Result<EntryPoint, BootError> {
    paging::write_gdt(memory, guest.kernel.protocol)?;
    write_reset_code(memory)?;
    let info = match guest.kernel.protocol {
        BootProtocol::Pvh => pvh::write_start_info(memory, map, guest, rsdp)?,
        BootProtocol::Linux64 => {
            paging::write_identity_map(memory)?;
            zero_page::write(memory, map, guest, rsdp)?
        }
    };
    Ok(EntryPoint {
        protocol: guest.kernel.protocol,
        rip: guest.kernel.entry,
        info,
    })
}

pub(crate) use paging::{GDT_LIMIT, code_segment, data_segment, task_segment};

/// Writes code that resets the machine at the BIOS entry point.
///
/// Linux assumes that a hardware-reduced platform has EFI and tries to restart through it. Without
/// EFI, it jumps to the BIOS, which does not exist here.
fn write_reset_code(memory: &impl GuestMemoryBackend) -> Result<(), BootError> {
    let [low, high] = layout::ACPI_RESET_PORT.to_le_bytes();
    // mov dx, port; mov al, value; out dx, al; cli; hlt; jmp to the hlt
    let code = [
        0xba,
        low,
        high,
        0xb0,
        layout::ACPI_RESET_VALUE,
        0xee,
        0xfa,
        0xf4,
        0xeb,
        0xfd,
    ];
    memory
        .write_slice(&code, GuestAddress(layout::RESET_VECTOR))
        .map_err(|source| BootError::Write {
            what: "the reset code",
            source,
        })
}

fn write_cmdline(
    memory: &impl GuestMemoryBackend,
    cmdline: &str,
    max: usize,
) -> Result<(), BootError> {
    if cmdline.len() > max {
        return Err(BootError::CmdlineTooLong {
            len: cmdline.len(),
            max,
        });
    }
    if let Some(at) = cmdline.bytes().position(|byte| byte == 0) {
        return Err(BootError::CmdlineZeroByte { at });
    }
    let start = GuestAddress(layout::CMDLINE_START);
    let write = |bytes: &[u8], at: GuestAddress| {
        memory
            .write_slice(bytes, at)
            .map_err(|source| BootError::Write {
                what: "the command line",
                source,
            })
    };
    write(cmdline.as_bytes(), start)?;
    // Cannot overflow: the length is at most 64 KiB.
    write(&[0], start.unchecked_add(cmdline.len() as u64))
}

/// Places the initramfs as high in low RAM as the kernel allows, and above the memory that the
/// kernel overwrites while it starts.
fn load_initramfs<I: Image>(
    memory: &impl GuestMemoryBackend,
    map: &AddressMap,
    kernel: &LoadedKernel,
    file: &mut I,
) -> Result<AddressRange, BootError> {
    let size = kernel::size_of(file).map_err(BootError::ReadInitramfs)?;
    if size == 0 {
        return Err(BootError::EmptyInitramfs);
    }
    let to = map
        .low_ram()
        .end()
        .min(kernel.initramfs_last.saturating_add(1));
    // Above the hole, if there is one.
    let from = kernel.footprint.end().max(map.hole().end());
    let start = to
        .checked_sub(size)
        .map(|start| layout::align_down(start, layout::PAGE_SIZE))
        .filter(|start| *start >= from)
        .ok_or(BootError::InitramfsDoesNotFit { size, from, to })?;
    memory
        // `size` fits: it is below the 3 GiB of low RAM.
        .read_exact_volatile_from(GuestAddress(start), file, size as usize)
        .map_err(|source| BootError::CopyInitramfs { size, source })?;
    Ok(AddressRange { start, size })
}

#[cfg(test)]
mod tests;
