//! The bytes by which formats of images are recognized.

/// What a signature says about an image.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    Qcow2,
    /// Another format of disk images.
    Foreign,
    /// A compressed file; the command decompresses it. Guests may write such files to raw disks, which stay raw then:
    /// otherwise the VM could neither boot again nor be restored.
    Compressed(&'static str),
}

/// The bytes by which a format is recognized.
pub(super) struct Signature {
    /// Offset of the bytes from the start of the image.
    offset: usize,
    magic: &'static [u8],
    /// The format's name.
    pub name: &'static str,
    /// What it says about an image.
    pub kind: Kind,
}

impl Signature {
    const fn new(offset: usize, magic: &'static [u8], name: &'static str, kind: Kind) -> Self {
        Self {
            offset,
            magic,
            name,
            kind,
        }
    }

    /// Whether it is the signature of a disk image.
    pub fn is_image(&self) -> bool {
        !matches!(self.kind, Kind::Compressed(_))
    }

    /// The command that makes a raw image of it.
    pub fn remedy(&self) -> &'static str {
        match self.kind {
            Kind::Compressed(command) => command,
            Kind::Qcow2 | Kind::Foreign => CONVERT,
        }
    }
}

pub(super) const CONVERT: &str = "qemu-img convert -O raw";

/// Signatures of formats that raw images are not taken for.
const SIGNATURES: [Signature; 15] = [
    // Version 1, and then versions 2 and 3, of QEMU's format.
    Signature::new(0, b"QFI\xfb\0\0\0\x01", "qcow", Kind::Foreign),
    Signature::new(0, b"QFI\xfb", "qcow2", Kind::Qcow2),
    Signature::new(0, b"QED\0", "QED", Kind::Foreign),
    Signature::new(0, b"vhdxfile", "VHDX", Kind::Foreign),
    Signature::new(0, b"conectix", VHD, Kind::Foreign),
    // Sparse, of an ESX host, and a text that names other files.
    Signature::new(0, b"KDMV", "VMDK", Kind::Foreign),
    Signature::new(0, b"COWD", "VMDK", Kind::Foreign),
    Signature::new(0, b"# Disk DescriptorFile", "VMDK", Kind::Foreign),
    Signature::new(0x40, b"\x7f\x10\xda\xbe", "VDI", Kind::Foreign),
    Signature::new(0, b"WithoutFreeSpace", "Parallels", Kind::Foreign),
    Signature::new(0, b"WithouFreSpacExt", "Parallels", Kind::Foreign),
    Signature::new(
        0,
        b"\x1f\x8b\x08",
        "compressed (gzip)",
        Kind::Compressed("gunzip"),
    ),
    Signature::new(
        4,
        b"1AY&SY",
        "compressed (bzip2)",
        Kind::Compressed("bunzip2"),
    ),
    Signature::new(
        0,
        b"\xfd7zXZ\0",
        "compressed (xz)",
        Kind::Compressed("unxz"),
    ),
    Signature::new(
        0,
        b"\x28\xb5\x2f\xfd",
        "compressed (zstd)",
        Kind::Compressed("unzstd"),
    ),
];

/// The format whose signature may also be at the end.
pub(super) const VHD: &str = "VHD";

/// Signature of encrypted disks: the guest decrypts them, so they are raw images for the VMM.
pub(super) const LUKS: &[u8] = b"LUKS\xba\xbe";

/// The format other than raw that an image starting with `head` would be opened as, or would be
/// refused as. Not compressed files: writing one to a disk is no attempt to disguise the disk.
pub(super) fn foreign_format(head: &[u8]) -> Option<&'static str> {
    let found = signature(head).filter(|found| found.is_image());
    found.map(|found| found.name)
}

/// The format that an image whose last sector is `tail` would be refused as.
pub(super) fn ends_like_foreign(tail: &[u8]) -> Option<&'static str> {
    let found = signature(tail).filter(|found| found.name == VHD);
    found.map(|found| found.name)
}

/// The signature that an image has at its start, or at its end.
pub(super) fn signature(head: &[u8]) -> Option<&'static Signature> {
    SIGNATURES.iter().find(|its| {
        let there = head.get(its.offset..);
        there.is_some_and(|there| there.starts_with(its.magic))
    })
}
