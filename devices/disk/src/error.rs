//! Why an image cannot be used, and what helps.

use std::{io, path::PathBuf};

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// Nobody wants the disk any more.
    #[error("the disk image is not wanted any more")]
    Unwanted,
    /// The image cannot be opened: not found, no permission and the like.
    #[error("cannot open the disk image {path}{}", hint(source, *direct))]
    Open {
        /// The image.
        path: PathBuf,
        /// It was opened with `O_DIRECT`.
        direct: bool,
        /// The cause.
        source: io::Error,
    },
    /// The path is a directory, a socket ...
    #[error("{path} is {kind}, not a disk image; give a file or a block device")]
    NotAnImage {
        /// The path.
        path: PathBuf,
        /// Kind of file.
        kind: &'static str,
    },
    /// Another process (or another disk) uses it.
    #[error(
        "the disk image {path} is in use elsewhere: its {} lock is taken; stop the other user, \
         or open it read-only in both", if *.read_only { "shared" } else { "exclusive" }
    )]
    Locked {
        /// The image.
        path: PathBuf,
        /// A shared lock was requested.
        read_only: bool,
    },
    /// Another file replaced it while it was being opened.
    #[error("the disk image {path} was replaced while it was opened; try again")]
    Replaced {
        /// The image.
        path: PathBuf,
    },
    /// Locking failed, for example because the file system does not support it.
    #[error("cannot lock the disk image {path}")]
    Lock {
        /// The image.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A read or query failed.
    #[error("cannot {action} the disk image {path}")]
    Inspect {
        /// The image.
        path: PathBuf,
        /// The action that failed.
        action: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The size is invalid for a disk.
    #[error(
        "the disk image {path} is {size} bytes long, which is not a multiple of {block}; \
         `{} {path}{}` rounds it up",
        if *.qcow2 { "qemu-img resize".into() } else { format!("truncate --size=%{block}") },
        if *.qcow2 { format!(" {}", size.next_multiple_of(*.block)) } else { String::new() }
    )]
    Size {
        /// The image.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
        /// The required multiple.
        block: u64,
        /// It is a qcow2 image; `size` is that of its disk then.
        qcow2: bool,
    },
    /// Blocks that are smaller than what transfers past the page cache require.
    #[error(
        "the disk image {path} cannot have blocks of {wanted} bytes with direct=on, because its \
         storage has blocks of {needed}; leave direct out{}",
        if *.needed > 4096 { "" } else { ", or use logical_block_size=4096" }
    )]
    BlockSize {
        /// The image.
        path: PathBuf,
        /// The requested block size in bytes.
        wanted: u32,
        /// The block size of the storage in bytes.
        needed: usize,
    },
    /// The image is empty.
    #[error("the disk image {path} is empty; give it a size with `truncate` or `qemu-img resize`")]
    Empty {
        /// The image.
        path: PathBuf,
    },
    /// An unsupported format, such as VHD or VDI, or a compressed file of a size that no disk has.
    #[error(
        "the disk image {path} is {format}, which is not supported; `{remedy}` makes a raw image \
         of it{}", if *.detected { ", or state image_type=raw if it is one" } else { "" }
    )]
    Unsupported {
        /// The image.
        path: PathBuf,
        /// Its format.
        format: &'static str,
        /// The command that converts it.
        remedy: &'static str,
        /// The format was detected, not configured.
        detected: bool,
    },
    /// A description of an image in QEMU's syntax, where the path of a file is expected.
    #[error("{path} is a description of an image for QEMU; give the path of the image itself")]
    Description {
        /// The description.
        path: PathBuf,
    },
    /// A qcow2 image that was not closed, or that is marked as corrupt.
    #[error(
        "the qcow2 image {path} is marked as {what}; `qemu-img check -r all {path}` repairs it, \
         then try again"
    )]
    Unclean {
        /// The image.
        path: PathBuf,
        /// The mark.
        what: &'static str,
    },
    /// A qcow2 image with a feature that is not supported.
    #[error(
        "the qcow2 image {path} has {what}, which is not supported; \
         `qemu-img convert -O qcow2 {path} NEW` makes an image without it"
    )]
    Feature {
        /// The image.
        path: PathBuf,
        /// The feature.
        what: &'static str,
    },
    /// It was configured as qcow2, but is not.
    #[error("the disk image {path} was stated to be qcow2, but has no qcow2 header")]
    NotQcow2 {
        /// The image.
        path: PathBuf,
    },
    /// A qcow2 image is cut off at the end.
    #[error(
        "the qcow2 image {path} is truncated: it needs at least {needed} bytes and has {size}; \
         copy it again"
    )]
    Truncated {
        /// The image.
        path: PathBuf,
        /// Minimum length in bytes that its tables imply.
        needed: u64,
        /// Its length in bytes.
        size: u64,
    },
    /// A qcow2 image with invalid tables.
    #[error(
        "the qcow2 image {path} is damaged: {what}; `qemu-img check -r all {path}` may mend it"
    )]
    Damaged {
        /// The image.
        path: PathBuf,
        /// The problem.
        what: String,
    },
    /// A backing file, which is not permitted.
    #[error(
        "the qcow2 image {path} has the backing file {backing:?}; allow it with backing_files=on \
         if the image comes from a trusted source"
    )]
    BackingFile {
        /// The image.
        path: PathBuf,
        /// The name of the backing file.
        backing: String,
    },
    /// A backing file that is described in QEMU's syntax.
    #[error(
        "the qcow2 image {path} describes its backing file as {backing:?}, which is not supported; \
         `qemu-img rebase -u -b FILE -F FORMAT {path}` gives the file itself"
    )]
    BackingDescription {
        /// The image.
        path: PathBuf,
        /// The description.
        backing: String,
    },
    /// A backing file of unspecified format, which would have to be guessed.
    #[error(
        "the qcow2 image {path} does not state the format of its backing file {backing:?}; \
         `qemu-img rebase -u -b {backing} -F FORMAT {path}` does"
    )]
    BackingFormat {
        /// The image.
        path: PathBuf,
        /// The name of the backing file.
        backing: String,
    },
    /// The data is in another file.
    #[error("the qcow2 image {path} keeps its data in another file, which is not supported")]
    ExternalData {
        /// The image.
        path: PathBuf,
    },
    /// The image cannot be resized to this size.
    #[error("the disk {path} cannot be resized from {from} to {to} bytes: {reason}")]
    Resize {
        /// The image.
        path: PathBuf,
        /// Its size in bytes.
        from: u64,
        /// The requested size in bytes.
        to: u64,
        /// The reason.
        reason: &'static str,
    },
}

fn hint(source: &io::Error, direct: bool) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => "; check the path",
        io::ErrorKind::PermissionDenied => {
            "; give this user access to it, or use readonly=on if reading is enough"
        }
        io::ErrorKind::ReadOnlyFilesystem => "; use readonly=on",
        io::ErrorKind::InvalidInput if direct => {
            " past the page cache; its file system may not support direct=on"
        }
        _ => "",
    }
}
