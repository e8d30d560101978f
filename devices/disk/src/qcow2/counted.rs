//! The file of a qcow2 image, in which no table refers to a cluster whose reference count is 0.
//!
//! The library keeps reference counts in memory until a flush, but writes some references at once:
//! those to new tables. If the process ended in between, the next user of the image would use such
//! a cluster a second time. So this storage looks at what it writes. Before a reference reaches the
//! file, the cluster's count does. (The order holds for the file, which outlives the process. After a
//! power failure of the host, storage may have the one without the other.)
//!
//! ```text
//!   library ── write ──> is it in a table? ──no──────────────────────────────> file
//!                              └──yes──> counts of what it newly refers to ──> file
//! ```

use std::{
    collections::BTreeSet,
    fmt,
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, RwLock,
        atomic::{AtomicBool, Ordering},
    },
};

use base::{Unpoisoned, lock::UnpoisonedRw};
use imago::{
    Storage,
    io_buffers::{IoBuffer, IoVector, IoVectorMut},
    storage::{PreallocateMode, drivers::CommonStorageHelper},
};

/// Bytes of the header that are read (QEMU's docs/interop/qcow2.rst).
const HEADER: usize = 104;

/// Bits of an entry that are an offset. Entries of the L1 table and of the table of reference
/// counts have no bits above.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// The bit of an entry that its cluster has no other user.
const COPIED: u64 = 1 << 63;

/// The bit of an L2 entry that its cluster is compressed.
const COMPRESSED: u64 = 1 << 62;

/// Size of a table's entry in bytes.
const ENTRY: u64 = 8;

/// Maximum length in bytes of the L1 table, and of the table of reference counts: the library's
/// limit.
const MAX_TABLE: u64 = 32 << 20;

/// An image's file.
pub struct CountedFile {
    file: imago::file::File,
    /// `None` for a file that is only read.
    tables: Option<Arc<TableMap>>,
}

/// What is known of the tables in an image's file.
pub struct TableMap {
    /// The file without `O_DIRECT`. The kernel keeps both views of it consistent.
    file: File,
    cluster_bits: u32,
    /// Width of a reference count: 2 to this power, in bits.
    count_order: u32,
    known: RwLock<Known>,
    /// Writes to tables happen one at a time. Clusters whose counts are raised in the file, and which the library has
    /// not counted there yet.
    writer: Mutex<BTreeSet<u64>>,
    /// The file does not name a table that the library uses. It does not try that again, so what it
    /// writes from now on may be lost.
    has_failed: AtomicBool,
}

/// Places of the tables that the header names.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Places {
    l1: u64,
    /// Length in bytes.
    l1_len: u64,
    /// The table of the blocks with reference counts.
    counts: u64,
    /// Length in bytes.
    counts_len: u64,
}

#[derive(Default)]
struct Known {
    places: Places,
    /// Entries of the L1 table.
    l1: Vec<u64>,
    /// Offsets of the L2 tables.
    l2: BTreeSet<u64>,
    /// Offsets of the blocks with reference counts.
    blocks: BTreeSet<u64>,
}

/// A file as it is after a write.
struct After<'a> {
    file: &'a File,
    /// Offset and bytes of the write.
    at: u64,
    bytes: &'a [u8],
}

/// What a write does to the tables.
#[derive(Default)]
struct Change {
    /// Offsets of the clusters to which it newly refers.
    refers: Vec<u64>,
    /// Offsets of L2 tables that are no longer in use after it.
    unused: Vec<u64>,
}

impl After<'_> {
    /// Reads; what is beyond the end of the file is zero.
    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        read(self.file, at, bytes)?;
        let end = at + bytes.len() as u64;
        let (from, to) = (
            self.at.max(at),
            (self.at + self.bytes.len() as u64).min(end),
        );
        if from < to {
            bytes[(from - at) as usize..(to - at) as usize]
                .copy_from_slice(&self.bytes[(from - self.at) as usize..(to - self.at) as usize]);
        }
        Ok(())
    }

    /// Reads a table's entries.
    fn entries(&self, at: u64, len: u64) -> io::Result<Vec<u64>> {
        if len > MAX_TABLE {
            return Err(invalid("one of its tables is too long"));
        }
        let mut bytes = vec![0; len as usize];
        self.read(at, &mut bytes)?;
        let (entries, _) = bytes.as_chunks::<8>();
        Ok(entries
            .iter()
            .map(|entry| u64::from_be_bytes(*entry))
            .collect())
    }
}

/// Reads from a file; what is beyond its end is zero.
fn read(file: &File, at: u64, bytes: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], at + done as u64) {
            Ok(0) => {
                bytes[done..].fill(0);
                break;
            }
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn number(header: &[u8], at: usize, len: usize) -> u64 {
    header[at..at + len]
        .iter()
        .fold(0, |value, byte| value << 8 | u64::from(*byte))
}

impl Places {
    fn of(header: &[u8; HEADER], cluster_bits: u32) -> Self {
        Self {
            l1: number(header, 40, 8),
            l1_len: number(header, 36, 4) * ENTRY,
            counts: number(header, 48, 8),
            counts_len: number(header, 56, 4) << cluster_bits,
        }
    }
}

/// Whether `len` bytes at `at` are partly in a table.
fn overlaps(write: &Range<u64>, at: u64, len: u64) -> bool {
    write.start < at.saturating_add(len) && at < write.end
}

impl Known {
    /// The tables' offsets in `of` that `write` is partly in.
    fn within<'a>(
        of: &'a BTreeSet<u64>,
        write: &Range<u64>,
        cluster: u64,
    ) -> impl Iterator<Item = u64> + use<'a> {
        of.range((write.start + 1).saturating_sub(cluster)..write.end)
            .copied()
    }

    /// Whether `write` is partly in what names tables.
    fn names_tables(&self, write: &Range<u64>) -> bool {
        let places = self.places;
        write.start < HEADER as u64
            || overlaps(write, places.l1, places.l1_len)
            || overlaps(write, places.counts, places.counts_len)
    }

    fn has(&self, write: &Range<u64>, cluster: u64) -> bool {
        self.names_tables(write)
            || [&self.l2, &self.blocks]
                .into_iter()
                .any(|of| Self::within(of, write, cluster).next().is_some())
    }
}

impl TableMap {
    /// Reads the tables of the image in `file`, whose header is known to be sound.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::InvalidData`] if they are damaged.
    pub fn read(file: File) -> io::Result<Self> {
        let mut header = [0; HEADER];
        read(&file, 0, &mut header)?;
        let cluster_bits = number(&header, 20, 4) as u32;
        let count_order = match number(&header, 4, 4) {
            0..3 => 4,
            _ => number(&header, 96, 4) as u32,
        };
        if !(9..=21).contains(&cluster_bits) || count_order > 6 {
            return Err(invalid(
                "its clusters or reference counts have no valid size",
            ));
        }
        let tables = Self {
            file,
            cluster_bits,
            count_order,
            known: RwLock::default(),
            writer: Mutex::default(),
            has_failed: AtomicBool::new(false),
        };
        let after = After {
            file: &tables.file,
            at: 0,
            bytes: &header,
        };
        let mut change = Change::default();
        let mut known = Known::default();
        tables.see_header(&mut known, &after, &mut change)?;
        let entries = known.l1.iter().filter(|entry| *entry & OFFSET != 0).count();
        if entries != known.l2.len() {
            return Err(invalid(
                "two entries of its L1 table name the same L2 table",
            ));
        }
        *tables.known.write_unpoisoned() = known;
        Ok(tables)
    }

    /// Sets the counts of tables that have none in the file, as versions of this program left them
    /// that did not use this storage. Returns the number of clusters.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::InvalidData`] if there is no place for such a count.
    pub fn mend(&self) -> io::Result<usize> {
        let _alone = self.writer.lock_unpoisoned();
        let known = self.known.read_unpoisoned();
        let places = known.places;
        let tables = [
            (places.l1, places.l1_len),
            (places.counts, places.counts_len),
        ];
        let clusters = tables.into_iter().flat_map(|it| self.clusters(it));
        let all = clusters.chain(known.l2.iter().chain(&known.blocks).copied());
        let now = After {
            file: &self.file,
            at: 0,
            bytes: &[],
        };
        // The library has read no counts yet.
        self.count(&places, &now, all.collect(), &mut BTreeSet::new())
    }

    /// Offsets of the clusters of a table with this offset and length.
    fn clusters(&self, (at, len): (u64, u64)) -> impl Iterator<Item = u64> + use<> {
        (at..at.saturating_add(len)).step_by(1 << self.cluster_bits)
    }

    /// Size of a cluster in bytes.
    pub fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Number of bytes of the disk that one L2 table describes.
    pub fn described(&self) -> u64 {
        self.cluster() << (self.cluster_bits - 3)
    }

    /// Whether the library writes to this range of the disk without making an L2 table.
    pub fn has_l2(&self, offset: u64, len: u64) -> bool {
        let Some(last) = len.checked_sub(1) else {
            return true;
        };
        let known = self.known.read_unpoisoned();
        let (first, last) = (
            offset / self.described(),
            offset.saturating_add(last) / self.described(),
        );
        usize::try_from(first)
            .ok()
            .zip(usize::try_from(last).ok())
            .and_then(|(first, last)| known.l1.get(first..=last))
            .is_some_and(|entries| entries.iter().all(|entry| entry & COPIED != 0))
    }

    /// Prepares a write to tables: counts what it refers to.
    fn prepare(&self, known: &mut Known, after: &After) -> io::Result<Change> {
        let mut change = Change::default();
        let write = after.at..after.at + after.bytes.len() as u64;
        if write.start < HEADER as u64 {
            self.see_header(known, after, &mut change)?;
        }
        let places = known.places;
        let before = After {
            bytes: &[],
            ..*after
        };
        let inside = |at: u64, len: u64| {
            let from = write.start.max(at).next_multiple_of(ENTRY);
            let to = write.end.min(at.saturating_add(len)) & !(ENTRY - 1);
            (from < to).then(|| (from, to - from))
        };
        if let Some((at, len)) = inside(places.l1, places.l1_len) {
            let first = ((at - places.l1) / ENTRY) as usize;
            for (nth, new) in after.entries(at, len)?.into_iter().enumerate() {
                let Some(slot) = known.l1.get_mut(first + nth) else {
                    break;
                };
                let old = std::mem::replace(slot, new);
                if old & OFFSET != new & OFFSET {
                    if old & OFFSET != 0 {
                        change.unused.push(old & OFFSET);
                    }
                    self.see_l2(known, after, new & OFFSET, &mut change)?;
                }
            }
        }
        if let Some((at, len)) = inside(places.counts, places.counts_len) {
            let old = before.entries(at, len)?;
            for (old, new) in old.into_iter().zip(after.entries(at, len)?) {
                if new & OFFSET != 0 && old & OFFSET != new & OFFSET {
                    known.blocks.insert(new & OFFSET);
                    change.refers.push(new & OFFSET);
                }
            }
        }
        let tables: Vec<_> = Known::within(&known.l2, &write, self.cluster()).collect();
        for table in tables {
            if let Some((at, len)) = inside(table, self.cluster()) {
                let old = before.entries(at, len)?;
                for (old, new) in old.into_iter().zip(after.entries(at, len)?) {
                    if old != new {
                        change.refers.extend(cluster_of(new));
                    }
                }
            }
        }
        Ok(change)
    }

    /// Notes the tables that a header names.
    fn see_header(&self, known: &mut Known, after: &After, change: &mut Change) -> io::Result<()> {
        let mut header = [0; HEADER];
        after.read(0, &mut header)?;
        let (places, old) = (Places::of(&header, self.cluster_bits), known.places);
        if places == old {
            return Ok(());
        }
        known.places = places;
        if (places.counts, places.counts_len) != (old.counts, old.counts_len) {
            let entries = after.entries(places.counts, places.counts_len)?;
            change
                .refers
                .extend(self.clusters((places.counts, places.counts_len)));
            for entry in entries.into_iter().filter(|entry| entry & OFFSET != 0) {
                known.blocks.insert(entry & OFFSET);
                change.refers.push(entry & OFFSET);
            }
        }
        if (places.l1, places.l1_len) != (old.l1, old.l1_len) {
            known.l1 = after.entries(places.l1, places.l1_len)?;
            change
                .refers
                .extend(self.clusters((places.l1, places.l1_len)));
            for entry in known.l1.iter().filter(|entry| *entry & OFFSET != 0) {
                known.l2.insert(entry & OFFSET);
                change.refers.push(entry & OFFSET);
            }
        }
        Ok(())
    }

    /// Notes a new L2 table, which is in the file already.
    fn see_l2(
        &self,
        known: &mut Known,
        after: &After,
        table: u64,
        change: &mut Change,
    ) -> io::Result<()> {
        if table == 0 {
            return Ok(());
        }
        known.l2.insert(table);
        change.refers.push(table);
        let entries = after.entries(table, self.cluster())?;
        change
            .refers
            .extend(entries.into_iter().filter_map(cluster_of));
        Ok(())
    }

    /// Makes the counts of clusters in the file at least 1; returns how many were 0. The library has counted them in
    /// memory, so it writes no less, but for copies that it made before: [`TableMap::keep`].
    fn count(
        &self,
        places: &Places,
        after: &After,
        mut clusters: Vec<u64>,
        raised: &mut BTreeSet<u64>,
    ) -> io::Result<usize> {
        for cluster in &mut clusters {
            *cluster >>= self.cluster_bits;
        }
        clusters.sort_unstable();
        clusters.dedup();
        let mut mended = 0;
        for group in clusters.chunk_by(|one, other| self.place(*one).0 == self.place(*other).0) {
            let (entry, first) = self.place(group[0]);
            let (_, last) = self.place(group[group.len() - 1]);
            let block = match entry < places.counts_len {
                true => after.entries(places.counts + entry, ENTRY)?[0] & OFFSET,
                false => 0,
            };
            if block == 0 {
                return Err(invalid(
                    "it refers to clusters that have no reference count",
                ));
            }
            let width = (1_u64 << self.count_order).div_ceil(8) as usize;
            let start = first / 8;
            let mut counts = vec![0; (last / 8 - start) as usize + width];
            read(&self.file, block + start, &mut counts)?;
            for cluster in group {
                let (_, bit) = self.place(*cluster);
                let from = (bit / 8 - start) as usize;
                if raise(&mut counts[from..from + width], bit % 8, self.count_order) {
                    let last = from + width - 1;
                    self.file
                        .write_all_at(&counts[last..=last], block + start + last as u64)?;
                    raised.insert(*cluster);
                    mended += 1;
                }
            }
        }
        Ok(mended)
    }

    /// Writes bytes that are partly in tables, by `write`.
    fn write(
        &self,
        at: u64,
        mut buffer: IoBuffer,
        write: impl FnOnce(&IoBuffer) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut raised = self.writer.lock_unpoisoned();
        let range = at..at + buffer.len() as u64;
        let mut known = self.known.write_unpoisoned();
        let old = known.places;
        // The library has changed its memory, and does not write these again.
        let names_tables = known.names_tables(&range);
        if Known::within(&known.blocks, &range, self.cluster())
            .next()
            .is_some()
        {
            self.keep(&old, &mut raised, at, buffer.as_mut().into_slice())?;
        }
        let after = After {
            file: &self.file,
            at,
            bytes: buffer.as_ref().into_slice(),
        };
        let prepared = self.prepare(&mut known, &after);
        let places = known.places;
        // Guests' data is written meanwhile.
        drop(known);
        let written = prepared.and_then(|change| {
            self.count(&places, &after, change.refers, &mut raised)?;
            write(&buffer)?;
            Ok(change.unused)
        });
        let mut known = self.known.write_unpoisoned();
        match written {
            Ok(unused) => {
                unused.iter().for_each(|table| {
                    known.l2.remove(table);
                });
                Ok(())
            }
            Err(error) => {
                if names_tables {
                    self.has_failed.store(true, Ordering::Relaxed);
                }
                if known.places != old {
                    // The library goes on with the tables at their old places.
                    known.places = old;
                    let now = After {
                        file: &self.file,
                        at: 0,
                        bytes: &[],
                    };
                    if let Ok(l1) = now.entries(old.l1, old.l1_len) {
                        known.l1 = l1;
                    }
                }
                Err(error)
            }
        }
    }

    /// Keeps the counts that were raised in blocks that the library copied before it counted. Forgets those that it
    /// has counted.
    fn keep(
        &self,
        places: &Places,
        raised: &mut BTreeSet<u64>,
        at: u64,
        bytes: &mut [u8],
    ) -> io::Result<()> {
        let now = After {
            file: &self.file,
            at: 0,
            bytes: &[],
        };
        let mut counted = Vec::new();
        for cluster in raised.iter() {
            let (entry, bit) = self.place(*cluster);
            if entry >= places.counts_len {
                continue;
            }
            let block = now.entries(places.counts + entry, ENTRY)?[0] & OFFSET;
            let start = block + bit / 8;
            let len = (1_u64 << self.count_order).div_ceil(8);
            if start < at || start + len > at + bytes.len() as u64 {
                continue;
            }
            let from = (start - at) as usize;
            if !raise(
                &mut bytes[from..from + len as usize],
                bit % 8,
                self.count_order,
            ) {
                counted.push(*cluster);
            }
        }
        counted.iter().for_each(|cluster| {
            raised.remove(cluster);
        });
        Ok(())
    }

    /// Where the count of a cluster is: the offset of its block's entry in the table, and the bit in the block.
    fn place(&self, cluster: u64) -> (u64, u64) {
        let per_block = (self.cluster() * 8) >> self.count_order;
        (
            cluster / per_block * ENTRY,
            (cluster % per_block) << self.count_order,
        )
    }
}

/// Makes a count 1 if it is 0; returns whether it was. `bit` is its place in the first byte.
fn raise(count: &mut [u8], bit: u64, order: u32) -> bool {
    let (is_zero, one) = match order {
        0..3 => {
            let mask = (1_u16 << (1 << order)) - 1;
            (u16::from(count[0]) & mask << bit == 0, 1 << bit)
        }
        _ => (count.iter().all(|byte| *byte == 0), 1),
    };
    if is_zero && let Some(last) = count.last_mut() {
        *last |= one;
    }
    is_zero
}

/// The cluster that an L2 entry refers to, if the library may have made it do so.
fn cluster_of(entry: u64) -> Option<u64> {
    let offset = entry & OFFSET;
    (entry & COMPRESSED == 0 && offset != 0).then_some(offset)
}

impl CountedFile {
    /// Storage on `file`, with these tables unless it is only read.
    pub fn new(file: imago::file::File, tables: Option<Arc<TableMap>>) -> Self {
        Self { file, tables }
    }
}

impl fmt::Debug for CountedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.file.fmt(f)
    }
}

impl fmt::Display for CountedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.file.fmt(f)
    }
}

impl Storage for CountedFile {
    fn mem_align(&self) -> usize {
        self.file.mem_align()
    }

    fn req_align(&self) -> usize {
        self.file.req_align()
    }

    fn zero_align(&self) -> usize {
        self.file.zero_align()
    }

    fn discard_align(&self) -> usize {
        self.file.discard_align()
    }

    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    fn resolve_relative_path<P: AsRef<Path>>(&self, relative: P) -> io::Result<PathBuf> {
        self.file.resolve_relative_path(relative)
    }

    fn get_filename(&self) -> Option<PathBuf> {
        self.file.get_filename()
    }

    unsafe fn pure_readv(&self, bufv: IoVectorMut<'_>, offset: u64) -> io::Result<()> {
        // SAFETY: the caller's promises are the same.
        unsafe { self.file.pure_readv(bufv, offset) }
    }

    unsafe fn pure_writev(&self, bufv: IoVector<'_>, offset: u64) -> io::Result<()> {
        let len = bufv.len();
        let tables = self.tables.as_ref().filter(|tables| {
            let write = offset..offset.saturating_add(len);
            tables.known.read_unpoisoned().has(&write, tables.cluster())
        });
        let Some(tables) = tables else {
            // SAFETY: the caller's promises are the same.
            return unsafe { self.file.pure_writev(bufv, offset) };
        };
        let mut buffer = IoBuffer::new(len as usize, self.file.mem_align())?;
        bufv.copy_into_slice(buffer.as_mut().into_slice());
        tables.write(offset, buffer, |buffer| {
            // SAFETY: the caller's promises are the same, and the buffer is aligned.
            unsafe { self.file.pure_writev(buffer.into(), offset) }
        })
    }

    unsafe fn pure_write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        // SAFETY: the caller's promises are the same. The library zeroes no tables.
        unsafe { self.file.pure_write_zeroes(offset, length) }
    }

    unsafe fn pure_write_allocated_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        // SAFETY: as above.
        unsafe { self.file.pure_write_allocated_zeroes(offset, length) }
    }

    unsafe fn pure_discard(&self, offset: u64, length: u64) -> io::Result<()> {
        // SAFETY: as above.
        unsafe { self.file.pure_discard(offset, length) }
    }

    fn flush(&self) -> io::Result<()> {
        let tables = self.tables.as_ref();
        if tables.is_some_and(|tables| tables.has_failed.load(Ordering::Relaxed)) {
            return Err(io::Error::other(
                "a table of the qcow2 image could not be written: the VM must be started again",
            ));
        }
        self.file.flush()
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }

    fn settle_writes(&self) -> io::Result<()> {
        self.file.settle_writes()
    }

    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        // SAFETY: the caller's promises are the same.
        unsafe { self.file.invalidate_cache() }
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        self.file.get_storage_helper()
    }

    fn resize(&self, new_size: u64, prealloc_mode: PreallocateMode) -> io::Result<()> {
        self.file.resize(new_size, prealloc_mode)
    }
}
