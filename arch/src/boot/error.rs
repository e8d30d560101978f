//! Errors in the files that a machine boots from.

use std::io;

use vm_memory::GuestMemoryError;

use crate::layout::{CMDLINE_MAX_SIZE, MIB};

/// Why a guest cannot be booted.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The kernel file cannot be read.
    #[error("cannot read {what} of the kernel; it must be a readable regular file")]
    ReadKernel {
        /// The part that was being read.
        what: &'static str,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// The kernel file ends early.
    #[error(
        "the kernel is truncated: {what} ends at byte {needed}, the file has {size}; fetch or \
         build it again"
    )]
    Truncated {
        /// The part that is cut off.
        what: &'static str,
        /// Minimum size of the whole file in bytes.
        needed: u64,
        /// Actual size in bytes.
        size: u64,
    },
    /// The file is in another format.
    #[error(
        "the file is {found}, not a kernel or firmware; give a bzImage, or an ELF file with a PVH \
         entry"
    )]
    NotAKernel {
        /// What it appears to be.
        found: &'static str,
    },
    /// A UEFI firmware volume, whose entry point is the reset vector.
    #[error(
        "the file is UEFI firmware that is built for QEMU (OVMF), which this machine cannot start; \
         use edk2's CloudHv target (CLOUDHV.fd)"
    )]
    FirmwareForQemu,
    /// The file is a bzImage.
    #[error("the file is a Linux kernel, not firmware; boot it as a kernel (--kernel)")]
    NotFirmware,
    /// Firmware needs more RAM.
    #[error("the guest has {ram} MiB of memory; give it at least {min} MiB to boot firmware")]
    FirmwareNeedsRam {
        /// RAM below 3 GiB, in MiB.
        ram: u64,
        /// Minimum, in MiB.
        min: u64,
    },
    /// Firmware takes no initramfs.
    #[error(
        "firmware takes no initramfs: the boot loader of the disk has its own; leave it out, or boot \
         a kernel (--kernel)"
    )]
    FirmwareWithInitramfs,
    /// Firmware would use the hole.
    #[error(
        "firmware does not boot in a machine whose memory has a hole (--accel-server); boot a \
         kernel (--kernel)"
    )]
    FirmwareWithHole,
    /// The ELF file is for 32-bit processors.
    #[error("the kernel is a 32-bit ELF file; give one that is built for x86-64")]
    Elf32,
    /// The ELF file is for another processor or byte order.
    #[error(
        "the ELF file is built for machine type {machine}; give one that is built for x86-64 (62), \
         or edk2's CLOUDHV.fd, which has type 3 and a PVH entry"
    )]
    ElfMachine {
        /// The `e_machine` field.
        machine: u16,
    },
    /// The ELF file has no PVH entry point.
    #[error(
        "the ELF kernel has no PVH entry point (note XEN_ELFNOTE_PHYS32_ENTRY); build it with \
         CONFIG_PVH=y or give its bzImage"
    )]
    NoPvhNote,
    /// A header field has an impossible value.
    #[error("the kernel is damaged: {what} is {value:#x}; fetch or build it again")]
    BadHeader {
        /// The field.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// The bzImage has no 64-bit entry point.
    #[error(
        "the bzImage (boot protocol {version:#x}) has no 64-bit entry point; give a 64-bit kernel \
         of version 3.8 or newer"
    )]
    No64BitEntry {
        /// Version of the boot protocol; the major version is in the high byte.
        version: u16,
    },
    /// The kernel needs memory where the guest has no RAM.
    #[error(
        "the kernel needs memory at {start:#x} to {end:#x}, the guest has {ram} MiB below 3 GiB; \
         give it at least {} MiB of memory", end.div_ceil(MIB)
    )]
    KernelDoesNotFit {
        /// First address that the kernel needs.
        start: u64,
        /// End (exclusive) of the addresses that it needs.
        end: u64,
        /// RAM below the hole, in MiB.
        ram: u64,
    },
    /// The loader library refused the image.
    #[error("cannot load the kernel")]
    Load(#[from] linux_loader::loader::Error),
    /// The initramfs file cannot be read.
    #[error("cannot read the initramfs; it must be a readable regular file")]
    ReadInitramfs(#[source] io::Error),
    /// The initramfs cannot be copied to guest memory.
    #[error("cannot copy the initramfs of {size} bytes to guest memory")]
    CopyInitramfs {
        /// Its size in bytes.
        size: u64,
        /// The reason.
        #[source]
        source: GuestMemoryError,
    },
    /// The initramfs file is empty.
    #[error("the initramfs is empty; give a cpio archive or leave the option out")]
    EmptyInitramfs,
    /// There is no room for the initramfs.
    #[error(
        "the initramfs of {size} bytes does not fit between the kernel's end at {from:#x} and \
         {to:#x}; give the guest more memory or shrink the initramfs"
    )]
    InitramfsDoesNotFit {
        /// Its size in bytes.
        size: u64,
        /// End of the memory that the kernel uses while it starts.
        from: u64,
        /// End of the memory in which the kernel accepts an initramfs.
        to: u64,
    },
    /// The command line is longer than the kernel accepts.
    #[error("the command line has {len} bytes, this kernel takes at most {max}; shorten it")]
    CmdlineTooLong {
        /// Its length in bytes.
        len: usize,
        /// Maximum number of bytes, without the terminating zero.
        max: usize,
    },
    /// The command line contains a zero byte.
    #[error("the command line has a zero byte at position {at}; remove it")]
    CmdlineZeroByte {
        /// Its position.
        at: usize,
    },
    /// Boot data could not be written.
    #[error("cannot write {what} to guest memory")]
    Write {
        /// What was being written.
        what: &'static str,
        /// The reason.
        #[source]
        source: GuestMemoryError,
    },
}

/// Maximum length in bytes of a command line for any kernel, without the terminating zero.
pub(super) const CMDLINE_LIMIT: usize = CMDLINE_MAX_SIZE as usize - 1;
