//! Buffers of the guest, as `readv` and `writev` take them.

use std::io;

use device_model::memory::GuestRam;
use virtio_queue::DescriptorChain;
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryRegion, VolatileSlice, bitmap::Bitmap,
};

/// Vectors of one system call at most (`UIO_MAXIOV`, less one for what the guest has no room
/// for), and descriptors of one chain: those without bytes cost time, too.
const MAX_BUFFERS: usize = 1023;

/// Memory of one or several chains, in their order.
#[derive(Default)]
pub struct Buffers {
    vectors: Vec<libc::iovec>,
    /// Where the guest sees each vector.
    places: Vec<GuestAddress>,
    len: usize,
}

// SAFETY: the vectors are scratch space: filled, used and cleared while the memory that they
// point to is held (see `Buffers::add`).
unsafe impl Send for Buffers {}

impl Buffers {
    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Vectors.
    pub fn count(&self) -> usize {
        self.vectors.len()
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.vectors.clear();
        self.places.clear();
        self.len = 0;
    }

    /// Forgets all but the first `vectors`.
    pub fn keep(&mut self, vectors: usize) {
        self.places.truncate(vectors);
        let gone = self.vectors.drain(vectors..);
        self.len -= gone.map(|vector| vector.iov_len).sum::<usize>();
    }

    /// Forgets the first `vectors`.
    pub fn forget(&mut self, vectors: usize) {
        self.places.drain(..vectors);
        let gone = self.vectors.drain(..vectors);
        self.len -= gone.map(|vector| vector.iov_len).sum::<usize>();
    }

    /// Adds the memory of a chain that the device may write (or read), and returns how many bytes
    /// that is. `None`, and nothing is added, if some of it is not RAM or for the other direction,
    /// or if there is too much of it.
    ///
    /// The caller clears the buffers before it lets go of `ram`.
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
                // Cannot overflow: at most 1023 vectors of at most 4 GiB.
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

    /// Has `call` fill the buffers, and `more` with what goes beyond them.
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

    /// Notes that the first `len` bytes have been written, by a system call.
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

    /// Writes `bytes` at `offset`; what goes beyond the buffers is left out.
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
            // mapped while the caller holds the memory, and `skip + now.len()` is inside. The
            // guest may write there, too, which harms only what the guest reads.
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

/// Notes a write within one region of RAM.
fn mark(ram: &GuestRam, place: GuestAddress, len: usize) {
    if let Some((region, offset)) = ram.to_region_addr(place) {
        // An offset in a mapping is a usize.
        region.bitmap().mark_dirty(offset.0 as usize, len);
    }
}
