//! Which image to open, and how.

use std::{fmt, path::PathBuf};

use serde::{Deserialize, Serialize};

use super::lock::LockGranularity;

/// The format of an image.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum ImageType {
    /// A fixed-size VHD.
    FixedVhd,
    /// QEMU's copy-on-write format, version 2 or 3.
    Qcow2,
    /// The plain content of the disk.
    Raw,
    /// VHDX.
    Vhdx,
    /// Detected from the content. A raw image opened like this refuses writes that would make it
    /// look like another format at the next start: otherwise a guest could write a qcow2 header
    /// that names any file of the host as its backing file. Specify the type to lift this.
    #[default]
    Unknown,
}

impl fmt::Display for ImageType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::FixedVhd => "VHD",
            Self::Qcow2 => "qcow2",
            Self::Raw => "raw",
            Self::Vhdx => "VHDX",
            Self::Unknown => "an unknown format",
        })
    }
}

/// Which image to open, and how.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct DiskOptions {
    /// A file or block device.
    pub path: PathBuf,
    /// The guest must not write.
    pub read_only: bool,
    /// Bypass the host's page cache (`O_DIRECT`).
    pub direct: bool,
    /// The image's format.
    pub image_type: ImageType,
    /// Block size in bytes that the guest sees, a power of two, at least 512; that of the storage if
    /// `None`.
    pub logical_block: Option<u32>,
    /// Permits a qcow2 image to name a backing file. Off by default, because it lets the image's
    /// author choose which file of the host is opened.
    pub backing_files: bool,
    /// Discarding and zeroing may free storage.
    pub sparse: bool,
    /// The range that the lock covers.
    pub lock_granularity: LockGranularity,
    /// Another process still holds the lock, and releases it before [`Disk::lock`] takes it: the VM
    /// is being migrated to this host.
    pub lock_later: bool,
    /// Use io_uring if the host supports it.
    pub io_uring: bool,
}
