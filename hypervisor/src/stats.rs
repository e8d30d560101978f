//! What KVM itself counts of a vCPU: `KVM_GET_STATS_FD` (Linux 5.14, Documentation/virt/kvm/api.rst,
//! 4.133). Unlike debugfs it needs no privileges, and no kernel that is not locked down.

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

/// What is read, by the names of KVM.
const NAMES: [&str; 5] = ["exits", "io_exits", "mmio_exits", "irq_exits", "halt_exits"];

/// Bytes of `kvm_stats_header`.
const HEADER: usize = 24;
/// Bytes of `kvm_stats_desc` before the name.
const DESCRIPTOR: usize = 16;
/// More descriptors than any KVM has, and longer names.
const MOST: u32 = 1024;

/// Counters of a vCPU. Reading them does not disturb it.
#[derive(Debug)]
pub struct VcpuStats {
    file: File,
    /// Counters, and where their values are in the file.
    places: Vec<(&'static str, u64)>,
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    // Callers pass bytes of a length that has the word.
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_ne_bytes(word)
}

impl VcpuStats {
    /// Asks KVM for a vCPU's counters. Waits while it runs: to be called before.
    pub(crate) fn open(vcpu: &impl AsRawFd) -> io::Result<Self> {
        // SAFETY: takes no argument; returns a descriptor that nobody else owns.
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

    /// What has been counted since the vCPU was made.
    pub fn read(&self) -> Vec<(&'static str, u64)> {
        let value = |&(name, at)| {
            let mut bytes = [0; 8];
            let read = self.file.read_exact_at(&mut bytes, at);
            read.ok().map(|()| (name, u64::from_ne_bytes(bytes)))
        };
        self.places.iter().filter_map(value).collect()
    }
}
