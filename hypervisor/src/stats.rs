//! KVM's own counters of a vCPU: `KVM_GET_STATS_FD` (Linux 5.14, Documentation/virt/kvm/api.rst,
//! 4.133). Unlike debugfs, it needs no privileges and also works on a locked-down kernel.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd, FromRawFd},
        unix::fs::FileExt,
    },
};

/// `KVM_GET_STATS_FD`: `_IO(0xae, 0xce)`.
const GET_STATS_FD: libc::c_ulong = 0xaece;

/// The counters that are read, by their KVM names.
const NAMES: [&str; 5] = ["exits", "io_exits", "mmio_exits", "irq_exits", "halt_exits"];

/// Size of `kvm_stats_header` in bytes.
const HEADER: usize = 24;
/// Size of `kvm_stats_desc` in bytes, without the name.
const DESCRIPTOR: usize = 16;
/// Upper bound for the number of descriptors and the length of a name; no KVM reaches it.
const MOST: u32 = 1024;

/// The counters of a vCPU. Reading them does not disturb the vCPU.
#[derive(Debug)]
pub struct VcpuStats {
    file: File,
    /// The counters and the offsets of their values in the file.
    places: Vec<(&'static str, u64)>,
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    // Callers pass a slice that contains the whole word.
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_ne_bytes(word)
}

impl VcpuStats {
    /// Opens a vCPU's counters. This blocks while the vCPU runs, so call it before the first run.
    pub(crate) fn open(vcpu: &impl AsRawFd) -> io::Result<Self> {
        // SAFETY: the ioctl takes no argument and returns a descriptor that nobody else owns.
        let file = unsafe {
            let fd = libc::ioctl(vcpu.as_raw_fd(), GET_STATS_FD);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            File::from_raw_fd(fd)
        };
        let mut header = [0; HEADER];
        file.read_exact_at(&mut header, 0)?;
        let name_size = word(&header, 4).min(MOST) as usize;
        let count = word(&header, 8).min(MOST);
        let descriptors = u64::from(word(&header, 16));
        let data = u64::from(word(&header, 20));
        let size = DESCRIPTOR + name_size;
        // At most 1 MiB.
        let mut all = vec![0; count as usize * size];
        file.read_exact_at(&mut all, descriptors)?;
        let mut places = Vec::new();
        for descriptor in all.chunks_exact(size) {
            let (fixed, name) = descriptor.split_at(DESCRIPTOR);
            let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
            if let Some(known) = NAMES.into_iter().find(|known| known.as_bytes() == name) {
                places.push((known, data + u64::from(word(fixed, 8))));
            }
        }
        Ok(Self { file, places })
    }

    /// Reads the counters, which count from the creation of the vCPU.
    pub fn read(&self) -> Vec<(&'static str, u64)> {
        let value = |&(name, at)| {
            let mut bytes = [0; 8];
            let read = self.file.read_exact_at(&mut bytes, at);
            read.ok().map(|()| (name, u64::from_ne_bytes(bytes)))
        };
        self.places.iter().filter_map(value).collect()
    }
}
