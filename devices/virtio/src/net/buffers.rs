//! Guest buffers as arguments for `readv` and `writev`.

use std::io;

use device_model::memory::GuestRam;
use virtio_queue::DescriptorChain;
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryRegion, VolatileSlice, bitmap::Bitmap,
};

/// Maximum number of vectors in one system call (`UIO_MAXIOV`, less one for data that exceeds the
/// guest's buffers). Also the maximum number of descriptors in one chain, because empty descriptors
/// cost time, too.
const MAX_BUFFERS: usize = 1023;

/// Memory of one or more chains, in order.
#[derive(Default)]
pub struct Buffers {
    vectors: Vec<libc::iovec>,
    /// Guest address of each vector.
    places: Vec<GuestAddress>,
    len: usize,
}

// SAFETY: the vectors are scratch space: filled, used and cleared while the memory that they
// point to is held (see `Buffers::add`).
unsafe impl Send for Buffers {}

impl Buffers {
    /// Total length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Number of vectors.
    pub fn count(&self) -> usize {
        self.vectors.len()
    }

    /// Removes all vectors.
    pub fn clear(&mut self) {
        self.vectors.clear();
        self.places.clear();
        self.len = 0;
    }

    /// Removes all but the first `vectors` vectors.
    pub fn keep(&mut self, vectors: usize) {
        self.places.truncate(vectors);
        let gone = self.vectors.drain(vectors..);
        self.len -= gone.map(|vector| vector.iov_len).sum::<usize>();
    }

    /// Removes the first `vectors` vectors.
    pub fn forget(&mut self, vectors: usize) {
        self.places.drain(..vectors);
        let gone = self.vectors.drain(..vectors);
        self.len -= gone.map(|vector| vector.iov_len).sum::<usize>();
    }

    /// Adds the memory of a chain that the device may write (`writable`) or read, and returns its
    /// length in bytes. Returns `None`, and adds nothing, if a part of the chain is not RAM or has
    /// the other direction, or if the chain is too long.
    ///
    /// The caller must clear the buffers before it releases `ram`.
    pub fn add(
        &mut self,
        chain: DescriptorChain<&GuestRam>,
        ram: &GuestRam,
        writable: bool,
    ) -> Option<usize> {
        let count = self.vectors.len();
        let added = self.try_add(chain, ram, writable);
        if added.is_none() {
            self.keep(count);
        }
        added
    }

    fn try_add(
        &mut self,
        chain: DescriptorChain<&GuestRam>,
        ram: &GuestRam,
        writable: bool,
    ) -> Option<usize> {
        let before = self.len;
        for (number, descriptor) in chain.enumerate() {
            if descriptor.is_write_only() != writable || number == MAX_BUFFERS {
                return None;
            }
            let mut address = descriptor.addr();
            let mut rest = descriptor.len() as usize;
            while rest > 0 {
                // A buffer may span regions of RAM.
                let (region, offset) = ram.to_region_addr(address)?;
                let available = vm_memory::GuestMemoryRegion::len(region).checked_sub(offset.0)?;
                let len = rest.min(usize::try_from(available).unwrap_or(usize::MAX));
                let slice = vm_memory::GuestMemoryRegion::get_slice(region, offset, len).ok()?;
                if self.vectors.len() == MAX_BUFFERS {
                    return None;
                }
                self.vectors.push(libc::iovec {
                    iov_base: slice.ptr_guard_mut().as_ptr().cast(),
                    iov_len: len,
                });
                self.places.push(address);
                // Cannot overflow: at most 1023 vectors of at most 4 GiB each.
                self.len += len;
                address.0 = address.0.checked_add(len as u64)?;
                rest -= len;
            }
        }
        Some(self.len - before)
    }

    /// The vectors, for a system call.
    pub fn vectors(&self) -> &[libc::iovec] {
        &self.vectors
    }

    /// Lets `call` fill the buffers, and then `more` with the excess.
    pub fn with_more(
        &mut self,
        more: &mut [u8],
        call: impl FnOnce(&[libc::iovec]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        if more.is_empty() {
            return call(&self.vectors);
        }
        self.vectors.push(libc::iovec {
            iov_base: more.as_mut_ptr().cast(),
            iov_len: more.len(),
        });
        let result = call(&self.vectors);
        self.vectors.pop();
        result
    }

    /// Marks the first `len` bytes as dirty after a system call has written them.
    pub fn mark_written(&self, ram: &GuestRam, len: usize) {
        let mut rest = len;
        for (vector, place) in self.vectors.iter().zip(&self.places) {
            if rest == 0 {
                break;
            }
            let now = rest.min(vector.iov_len);
            mark(ram, *place, now);
            rest -= now;
        }
    }

    /// Writes `bytes` at `offset`; bytes beyond the buffers are dropped.
    pub fn write(&self, ram: &GuestRam, offset: usize, bytes: &[u8]) {
        let (mut skip, mut bytes) = (offset, bytes);
        for (vector, place) in self.vectors.iter().zip(&self.places) {
            if bytes.is_empty() {
                break;
            }
            if skip >= vector.iov_len {
                skip -= vector.iov_len;
                continue;
            }
            let (now, later) = bytes.split_at(bytes.len().min(vector.iov_len - skip));
            // SAFETY: `add` made the vector from a slice of guest RAM of that length, which is
            // mapped while the caller holds the memory, and `skip + now.len()` is within it. The
            // guest may write there, too, which affects only what the guest reads.
            unsafe {
                let to = vector.iov_base.cast::<u8>().add(skip);
                VolatileSlice::<()>::new(to, now.len()).copy_from(now);
            }
            mark(
                ram,
                GuestAddress(place.0.saturating_add(skip as u64)),
                now.len(),
            );
            bytes = later;
            skip = 0;
        }
    }
}

/// Marks a write within one region of RAM as dirty.
fn mark(ram: &GuestRam, place: GuestAddress, len: usize) {
    if let Some((region, offset)) = ram.to_region_addr(place) {
        // An offset in a mapping fits a usize.
        region.bitmap().mark_dirty(offset.0 as usize, len);
    }
}
