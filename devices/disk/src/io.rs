//! A transfer between guest memory and a disk image, and the interface of the I/O engines.

use std::{
    alloc::{self, Layout},
    collections::VecDeque,
    io,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use device_model::memory::GuestRam;
use vm_memory::{GuestAddress, GuestMemoryBackend, bitmap::Bitmap};
use vmm_sys_util::eventfd::EventFd;

use super::{
    SECTOR,
    signature::{ends_like_foreign, foreign_format},
};

/// Maximum number of vectors that the kernel accepts in one call (`UIO_MAXIOV`).
pub const MAX_VECTORS: usize = 1024;

/// Maximum size of a bounce buffer; longer transfers use it in several steps, so that a guest
/// cannot make the VMM allocate memory in proportion to its requests.
const MAX_BOUNCE: u64 = 256 << 10;

/// Maximum number of consecutive retries of an interrupted step: a worker must not spin forever.
const MAX_RETRIES: u8 = 100;

/// An operation on a range of the disk.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Operation {
    /// Reads from disk to guest memory.
    Read,
    /// Writes from guest memory to disk.
    Write {
        /// Completes only when the data is on stable storage.
        durable: bool,
    },
    /// Flushes all completed writes to stable storage.
    Flush,
    /// Frees the range's storage; its content is undefined afterwards.
    Discard,
    /// Makes the range read as zeroes.
    WriteZeroes {
        /// The range's storage may be freed.
        may_unmap: bool,
        /// Completes only when the zeroes are on stable storage.
        durable: bool,
    },
}

/// Page-aligned host memory, initially zero.
struct AlignedBuffer {
    memory: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its memory, like a `Box<[u8]>`.
unsafe impl Send for AlignedBuffer {}

impl AlignedBuffer {
    fn new(len: usize) -> io::Result<Self> {
        let layout = Layout::from_size_align(len.max(1), 4096).map_err(io::Error::other)?;
        // SAFETY: the layout is not empty.
        let memory = unsafe { alloc::alloc_zeroed(layout) };
        let memory = NonNull::new(memory).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { memory, layout })
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: `memory` is an initialised allocation of this size, owned by `self`.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.layout.size()) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), self.layout.size()) }
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`.
        unsafe { alloc::dealloc(self.memory.as_ptr(), self.layout) }
    }
}

/// The guest memory that a transfer reads or fills.
///
/// It holds the memory regions that its vectors point to, so they stay mapped even if the guest's
/// RAM is replaced meanwhile.
#[derive(Default)]
pub struct Buffers {
    memory: Option<Arc<GuestRam>>,
    vectors: Vec<libc::iovec>,
    /// Guest addresses and lengths of the whole transfer.
    places: Vec<(GuestAddress, usize)>,
    /// Index of the first vector that is not completely transferred.
    first: usize,
}

// SAFETY: the pointers refer to guest RAM that `memory` keeps mapped; any thread may use them.
unsafe impl Send for Buffers {}

impl Buffers {
    /// Empties the buffers for another transfer in `memory`. Keeps the allocations.
    pub fn reset(&mut self, memory: Arc<GuestRam>) {
        self.clear();
        self.memory = Some(memory);
    }

    /// Empties the buffers and releases the memory. Keeps the allocations.
    pub fn clear(&mut self) {
        self.vectors.clear();
        self.places.clear();
        self.first = 0;
        self.memory = None;
    }

    /// Appends `len` bytes at `address`; false if they are not all RAM.
    pub fn push(&mut self, address: GuestAddress, len: usize) -> bool {
        let Some(memory) = &self.memory else {
            return false;
        };
        if len == 0 {
            return true;
        }
        for slice in GuestMemoryBackend::get_slices(memory.as_ref(), address, len) {
            let Ok(slice) = slice else { return false };
            self.vectors.push(libc::iovec {
                iov_base: slice.ptr_guard_mut().as_ptr().cast(),
                iov_len: slice.len(),
            });
        }
        self.places.push((address, len));
        true
    }

    /// Marks everything as dirty, because the kernel or `copy_from` may have written it.
    fn mark_written(&self) {
        let Some(memory) = &self.memory else {
            return;
        };
        for (address, len) in &self.places {
            let slices = GuestMemoryBackend::get_slices(memory.as_ref(), *address, *len);
            for slice in slices.flatten() {
                slice.bitmap().mark_dirty(0, slice.len());
            }
        }
    }

    /// Number of bytes left to transfer.
    pub fn len(&self) -> u64 {
        // Cannot overflow: a descriptor chain holds less than 2^32 bytes.
        self.remaining().iter().map(|v| v.iov_len as u64).sum()
    }

    /// Whether nothing is left to transfer.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn remaining(&self) -> &[libc::iovec] {
        self.vectors.get(self.first..).unwrap_or_default()
    }

    /// Removes `count` bytes from the front.
    fn advance(&mut self, mut count: usize) {
        while let Some(vector) = self.vectors.get_mut(self.first) {
            if count < vector.iov_len {
                vector.iov_base = vector.iov_base.cast::<u8>().wrapping_add(count).cast();
                vector.iov_len -= count;
                return;
            }
            count -= vector.iov_len;
            self.first += 1;
        }
    }

    fn is_aligned(&self, to: usize) -> bool {
        self.remaining()
            .iter()
            .all(|vector| (vector.iov_base as usize | vector.iov_len).is_multiple_of(to))
    }

    /// Copies from the front of guest memory.
    fn copy_to(&self, mut host: &mut [u8]) {
        for vector in self.remaining() {
            let count = vector.iov_len.min(host.len());
            let (head, tail) = host.split_at_mut(count);
            // SAFETY: the vector is in RAM that `memory` keeps mapped, and `head` is `count` bytes
            // of another allocation. The guest may write at the same time: then the copy is a mix
            // of old and new bytes, any of which is valid, and only the copy is used from here on.
            unsafe {
                std::ptr::copy_nonoverlapping(vector.iov_base.cast(), head.as_mut_ptr(), count);
            }
            host = tail;
        }
    }

    /// Copies to the front of guest memory.
    fn copy_from(&self, mut host: &[u8]) {
        for vector in self.remaining() {
            let count = vector.iov_len.min(host.len());
            let (head, tail) = host.split_at(count);
            // SAFETY: as in `copy_to`.
            unsafe { std::ptr::copy_nonoverlapping(head.as_ptr(), vector.iov_base.cast(), count) };
            host = tail;
        }
    }
}

/// Constraints on transfers between memory and the image.
#[derive(Clone, Debug)]
pub(super) struct Path {
    /// Required alignment of memory addresses and lengths (`O_DIRECT`); 1: none.
    pub alignment: usize,
    /// Present if writes must not turn the image into another format.
    pub guard: Option<FormatGuard>,
}

/// Refuses writes to the first and the last sector of a raw image that would make it look like another format.
#[derive(Clone, Debug)]
pub(super) struct FormatGuard {
    /// Offset of the last sector, which the disk and all its engines share.
    tail: Arc<AtomicU64>,
}

impl FormatGuard {
    /// Guards an image of `size` bytes.
    pub fn new(size: u64) -> Self {
        let guard = Self {
            tail: Arc::default(),
        };
        guard.set_size(size);
        guard
    }

    /// Sets the image's size in bytes.
    pub fn set_size(&self, size: u64) {
        let tail = size.saturating_sub(SECTOR);
        self.tail.store(tail, Ordering::Relaxed);
    }

    /// The offset of the last sector within `len` bytes at `offset`.
    fn tail_in(&self, offset: u64, len: u64) -> Option<u64> {
        let tail = self.tail.load(Ordering::Relaxed).checked_sub(offset)?;
        (tail < len).then_some(tail)
    }

    /// Whether a write of `len` bytes to `offset` has to be examined.
    fn covers(&self, offset: u64, len: u64) -> bool {
        offset == 0 || self.tail_in(offset, len).is_some()
    }

    /// The format that the image would look like with these bytes at `offset`.
    fn foreign_format(&self, offset: u64, bytes: &[u8]) -> Option<&'static str> {
        let head = (offset == 0).then(|| foreign_format(bytes)).flatten();
        let tail = || {
            // Fits, because it is less than the length.
            let tail = self.tail_in(offset, bytes.len() as u64)? as usize;
            ends_like_foreign(&bytes[tail..])
        };
        head.or_else(tail)
    }
}

/// A request to the image, with everything that the kernel needs until it completes.
pub struct Io {
    /// The operation.
    pub operation: Operation,
    /// Offset on the disk in bytes.
    pub offset: u64,
    /// Length in bytes; for transfers, the length of `buffers`.
    pub len: u64,
    /// Guest memory, for transfers.
    pub buffers: Buffers,
    /// The caller's tag, to identify the request when it completes.
    pub tag: usize,
    /// Number of consecutive interrupted steps.
    retries: u8,
    bounce: Option<AlignedBuffer>,
    /// The vector for `bounce`, while it is in use.
    bounce_vector: libc::iovec,
}

// SAFETY: `bounce_vector` points into `bounce`, which moves together with the `Io`.
unsafe impl Send for Io {}

impl Io {
    /// Creates a transfer from or to `buffers`.
    pub fn transfer(operation: Operation, offset: u64, buffers: Buffers, tag: usize) -> Self {
        let len = buffers.len();
        Self::new(operation, offset, len, buffers, tag)
    }

    /// Creates an operation without data, on `len` bytes at `offset`.
    pub fn range(operation: Operation, offset: u64, len: u64, tag: usize) -> Self {
        Self::new(operation, offset, len, Buffers::default(), tag)
    }

    fn new(operation: Operation, offset: u64, len: u64, buffers: Buffers, tag: usize) -> Self {
        Self {
            operation,
            offset,
            len,
            buffers,
            tag,
            retries: 0,
            bounce: None,
            bounce_vector: libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: 0,
            },
        }
    }

    /// The next vectors to pass to the kernel, at `self.offset`. They and the memory that they
    /// describe stay valid until `advance` is called, or the `Io` is moved or dropped.
    pub(super) fn vectors(&mut self, path: &Path) -> io::Result<&[libc::iovec]> {
        let is_write = matches!(self.operation, Operation::Write { .. });
        let guard = path.guard.as_ref().filter(|_| is_write);
        let guard = guard.filter(|guard| guard.covers(self.offset, self.buffers.len()));
        if guard.is_none() && self.buffers.is_aligned(path.alignment) {
            self.bounce_vector.iov_len = 0;
            let vectors = self.buffers.remaining();
            return Ok(&vectors[..vectors.len().min(MAX_VECTORS)]);
        }
        self.fill_bounce(MAX_BOUNCE)?;
        if let Some(guard) = guard
            && let Some(format) = guard.foreign_format(self.offset, self.bounced())
        {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!("the write would make the raw image look like {format}"),
            ));
        }
        Ok(std::slice::from_ref(&self.bounce_vector))
    }

    /// Prepares a step of at most `limit` bytes through host memory. A write's data is copied
    /// there, exactly once.
    fn fill_bounce(&mut self, limit: u64) -> io::Result<()> {
        // The limit keeps the result within usize.
        let len = self.buffers.len().min(limit) as usize;
        if self.bounce.as_ref().is_none_or(|b| b.bytes().len() < len) {
            self.bounce = Some(AlignedBuffer::new(len)?);
        }
        let Some(bounce) = &mut self.bounce else {
            return Err(io::ErrorKind::OutOfMemory.into());
        };
        let bytes = &mut bounce.bytes_mut()[..len];
        if matches!(self.operation, Operation::Write { .. }) {
            self.buffers.copy_to(bytes);
        }
        self.bounce_vector = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: len,
        };
        Ok(())
    }

    /// The next step through host memory, for image formats that cannot use guest memory.
    pub(super) fn bounce(&mut self) -> io::Result<&mut [u8]> {
        self.fill_bounce(MAX_BOUNCE)?;
        let len = self.bounce_vector.iov_len;
        match &mut self.bounce {
            Some(bounce) => Ok(&mut bounce.bytes_mut()[..len]),
            None => Err(io::ErrorKind::OutOfMemory.into()),
        }
    }

    /// Marks all of the request's memory as dirty.
    pub(super) fn mark_written(&self) {
        self.buffers.mark_written();
    }

    fn bounced(&self) -> &[u8] {
        match &self.bounce {
            Some(bounce) => &bounce.bytes()[..self.bounce_vector.iov_len],
            None => &[],
        }
    }

    /// Records that `count` bytes were transferred; true if that was all.
    pub(super) fn advance(&mut self, count: usize) -> bool {
        if self.bounce_vector.iov_len > 0 && self.operation == Operation::Read {
            let bytes = self.bounced();
            self.buffers.copy_from(&bytes[..count.min(bytes.len())]);
        }
        self.retries = 0;
        self.buffers.advance(count);
        self.offset = self.offset.saturating_add(count as u64);
        self.buffers.is_empty()
    }
}

/// A completed request.
pub struct Finished {
    /// The request; its buffers may be reused.
    pub io: Io,
    /// Success, or why it failed.
    pub result: io::Result<()>,
}

/// Performs requests on one image, in any order. Owned by one queue's worker.
pub trait AsyncIo: Send {
    /// Becomes readable when requests have completed.
    fn completion(&self) -> &EventFd;

    /// Takes over a request; at most `depth` at a time, as given when the engine was created. A
    /// request that cannot be started is returned as completed.
    fn start(&mut self, io: Io);

    /// Passes all started requests to the kernel, with at most one system call.
    fn submit(&mut self);

    /// The next completed request, without blocking.
    fn take_finished(&mut self) -> Option<Finished>;

    /// Waits until a request completes; returns immediately if none is in flight.
    fn wait(&mut self);
}

/// What follows a step of a transfer.
pub(super) enum Step {
    /// The request is complete.
    Done(io::Result<()>),
    /// Continue with the rest of it.
    Again,
}

/// Evaluates one step of `io`, in which the kernel transferred `count` bytes (or, for requests
/// without data, did everything).
pub(super) fn step(io: &mut Io, outcome: io::Result<usize>) -> Step {
    let step = judge(io, outcome);
    // In any case: even a failed read may have written a part.
    if matches!(step, Step::Done(_)) && io.operation == Operation::Read {
        io.mark_written();
    }
    step
}

fn judge(io: &mut Io, outcome: io::Result<usize>) -> Step {
    let transfer = matches!(io.operation, Operation::Read | Operation::Write { .. });
    match outcome {
        // The kernel zeroes a range without a flush to stable storage, which is requested next.
        Ok(_) if matches!(io.operation, Operation::WriteZeroes { durable: true, .. }) => {
            io.operation = Operation::Flush;
            io.retries = 0;
            Step::Again
        }
        Ok(_) if !transfer => Step::Done(Ok(())),
        Ok(0) if io.buffers.is_empty() => Step::Done(Ok(())),
        Ok(0) => Step::Done(Err(io::ErrorKind::UnexpectedEof.into())),
        Ok(count) if io.advance(count) => Step::Done(Ok(())),
        Ok(_) => Step::Again,
        Err(error) if error.kind() == io::ErrorKind::Interrupted && io.retries < MAX_RETRIES => {
            io.retries += 1;
            Step::Again
        }
        Err(error) => Step::Done(Err(error)),
    }
}

/// Completed requests that wait to be collected.
pub(super) type FinishedQueue = VecDeque<Finished>;

#[cfg(test)]
mod tests {
    use vm_memory::Bytes;

    use super::*;

    fn ram() -> Arc<GuestRam> {
        let ranges = [
            (GuestAddress(0), 0x4000),
            (GuestAddress(0x4000), 0x4000),
            (GuestAddress(0x10000), 0x1000),
        ];
        Arc::new(GuestRam::from_ranges(&ranges).unwrap())
    }

    const UNALIGNED: Path = Path {
        alignment: 512,
        guard: None,
    };

    #[test]
    fn buffers_follow_guest_memory_across_regions_but_not_outside_of_ram() {
        let mut buffers = Buffers::default();
        assert!(!buffers.push(GuestAddress(0), 512), "no memory yet");
        buffers.reset(ram());
        assert!(buffers.push(GuestAddress(0x3f00), 0x200));
        assert_eq!(buffers.vectors.len(), 2);
        assert_eq!(buffers.len(), 0x200);
        assert!(!buffers.push(GuestAddress(0x7f00), 0x200));
        assert!(!buffers.push(GuestAddress(u64::MAX - 8), 0x200));
    }

    #[test]
    fn a_misaligned_read_reaches_the_guest_through_the_bounce_buffer_step_by_step() {
        let ram = ram();
        let mut buffers = Buffers::default();
        buffers.reset(ram.clone());
        assert!(buffers.push(GuestAddress(3), 0x300) && buffers.push(GuestAddress(0x1000), 0x100));
        let mut io = Io::transfer(Operation::Read, 512, buffers, 0);
        let vector = io.vectors(&UNALIGNED).unwrap()[0];
        assert_eq!(vector.iov_len, 0x400);
        io.bounce.as_mut().unwrap().bytes_mut().fill(7);
        assert!(!io.advance(0x200));
        assert_eq!(io.offset, 0x400);
        io.vectors(&UNALIGNED).unwrap();
        io.bounce.as_mut().unwrap().bytes_mut().fill(8);
        assert!(io.advance(0x200));
        let mut seen = [0; 0x300];
        ram.read_slice(&mut seen, GuestAddress(3)).unwrap();
        assert!(seen[..0x200].iter().all(|b| *b == 7) && seen[0x200..].iter().all(|b| *b == 8));
    }

    #[test]
    fn bounce_buffers_are_bounded_whatever_the_guest_asks_for() {
        let ram = Arc::new(GuestRam::from_ranges(&[(GuestAddress(0), 1 << 21)]).unwrap());
        let mut buffers = Buffers::default();
        buffers.reset(ram);
        for _ in 0..100 {
            assert!(buffers.push(GuestAddress(1), (1 << 21) - 1));
        }
        let mut io = Io::transfer(Operation::Write { durable: false }, 0, buffers, 0);
        let vectors = io.vectors(&UNALIGNED).unwrap();
        assert_eq!(vectors.iter().map(|v| v.iov_len).sum::<usize>(), 256 << 10);
    }

    #[test]
    fn zeroes_that_are_to_be_durable_are_flushed_before_they_are_done() {
        let zeroes = |durable| Operation::WriteZeroes {
            may_unmap: true,
            durable,
        };
        let mut io = Io::range(zeroes(false), 0, 512, 0);
        assert!(matches!(step(&mut io, Ok(0)), Step::Done(Ok(()))));
        let mut io = Io::range(zeroes(true), 0, 512, 0);
        let failed = Err(io::ErrorKind::StorageFull.into());
        assert!(matches!(step(&mut io, failed), Step::Done(Err(_))));
        assert!(matches!(step(&mut io, Ok(0)), Step::Again));
        assert_eq!(io.operation, Operation::Flush);
        assert!(matches!(step(&mut io, Ok(0)), Step::Done(Ok(()))));
    }

    #[test]
    fn what_a_read_filled_is_marked_for_a_migration_and_what_a_write_took_is_not() {
        let ram = ram();
        let region = ram.find_region(GuestAddress(0x4000)).unwrap();
        let log = region.get_mmap();
        log.bitmap().start();
        let marked = |operation| {
            let mut buffers = Buffers::default();
            buffers.reset(ram.clone());
            assert!(buffers.push(GuestAddress(0x4e00), 0x400));
            let mut io = Io::transfer(operation, 0, buffers, 0);
            // In two steps; the second one fails.
            assert!(matches!(step(&mut io, Ok(0x200)), Step::Again));
            let failed = Err(io::ErrorKind::StorageFull.into());
            assert!(matches!(step(&mut io, failed), Step::Done(Err(_))));
            let mut bitmap = [0];
            log.bitmap().take_into(&mut bitmap);
            bitmap[0]
        };
        assert_eq!(marked(Operation::Read), 0b11);
        assert_eq!(marked(Operation::Write { durable: false }), 0);
    }

    #[test]
    fn a_transfer_that_makes_no_progress_ends_in_an_error() {
        let mut buffers = Buffers::default();
        buffers.reset(ram());
        assert!(buffers.push(GuestAddress(0), 512));
        let mut io = Io::transfer(Operation::Read, 0, buffers, 0);
        assert!(matches!(step(&mut io, Ok(0)), Step::Done(Err(_))));
        assert!(matches!(step(&mut io, Ok(100)), Step::Again));
        assert!(matches!(step(&mut io, Ok(412)), Step::Done(Ok(()))));
        let mut io = Io::range(Operation::Flush, 0, 0, 0);
        let interrupted = || Err(io::ErrorKind::Interrupted.into());
        let again = (0..1000).take_while(|_| matches!(step(&mut io, interrupted()), Step::Again));
        assert_eq!(again.count(), usize::from(MAX_RETRIES));
    }
}
