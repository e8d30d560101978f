//! qcow2 images, through the crate `imago`.
//!
//! The library uses host memory: guest memory may change during an access, which Rust references do
//! not permit. Requests use the bounce buffer in bounded steps.
//!
//! The process may end at any time, so the image's file must be consistent at any time. Its storage
//! ([`CountedFile`]) sees to reference counts. The other danger is a cluster that a table in memory
//! no longer refers to, but its copy in the file still does: the library does not use it for data
//! before it has written that table, but it may use it for a new table. So all tables are written
//! before one is made.

mod counted;
#[cfg(test)]
mod tests;

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::Path,
    sync::{
        Arc, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use base::{
    lock::UnpoisonedRw,
    regular_file::{self, Links},
};
use imago::{
    DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder, Mapping, Storage, StorageOpenOptions,
    format::{PreallocateMode, gate::ImplicitOpenGate},
    qcow2::Qcow2,
};

use self::counted::{CountedFile, TableMap};
use super::{
    claim::Claim,
    error::DiskError,
    io::{Io, Operation},
    lock::{self, LockGranularity},
    options::DiskOptions,
    pool::Blocking,
    raw::{discard_mode, fallocate},
};

/// Offset of the number of internal snapshots in the header (QEMU's docs/interop/qcow2.rst).
const SNAPSHOTS: u64 = 60;

/// Maximum length of a chain of backing files, which might be a loop.
const MAX_BACKING_DEPTH: u32 = 32;

/// Maximum length of an L1 table that the truncation check reads: QEMU's limit (32 MiB).
const MAX_L1_ENTRIES: u64 = (32 << 20) / 8;

/// An open qcow2 image.
pub struct Qcow2Image {
    /// Size of the disk in bytes. Whoever asks for it waits for no request.
    size: AtomicU64,
    /// The image was in use elsewhere when it was opened, and has not been mended yet.
    is_unmended: AtomicBool,
    /// Shared by reads and writes; discarding needs exclusive access.
    access: RwLock<FormatAccess<CountedFile>>,
    /// The image's file.
    file: File,
    /// Its tables, unless it is read-only.
    tables: Option<Arc<TableMap>>,
    /// Why the disk cannot grow while it is in use, if it cannot.
    fixed: Option<&'static str>,
    /// Tables may have changed in memory alone since they were last written.
    has_changed: AtomicBool,
}

impl Qcow2Image {
    /// Opens the image in `file`, which is locked and `file_size` bytes long. `buffered` is the
    /// same file without `O_DIRECT`.
    pub fn open(
        file: File,
        buffered: &File,
        file_size: u64,
        options: &DiskOptions,
        claim: &Claim,
    ) -> Result<Self, DiskError> {
        let path = &options.path;
        let inspect = |action| {
            move |source| DiskError::Inspect {
                path: path.clone(),
                action,
                source,
            }
        };
        check_complete(path, buffered, file_size)?;
        let kept = file.try_clone().map_err(inspect("examine"))?;
        let storage_options = StorageOpenOptions::new()
            .filename(path)
            .write(!options.read_only)
            .direct(options.direct);
        let storage =
            imago::file::File::from_open_file(file, storage_options).map_err(inspect("examine"))?;
        let tables = match options.read_only {
            true => None,
            false => Some(read_tables(buffered, options)?),
        };
        let storage = CountedFile::new(storage, tables.clone());
        // Writes to a table would include parts of others.
        if tables
            .as_ref()
            .is_some_and(|its| its.cluster() < storage.req_align() as u64)
        {
            return Err(DiskError::Feature {
                path: path.clone(),
                what: "clusters that are too small for its storage with direct=on",
            });
        }
        // The library may write the header.
        let image = claim.change(|| Qcow2::open_image(storage, !options.read_only))?;
        let mut image: Qcow2<CountedFile> =
            image.map_err(inspect("interpret the qcow2 header of"))?;
        if image.requires_external_data_file() {
            return Err(DiskError::ExternalData { path: path.clone() });
        }
        let opened = match image.implicit_backing_file() {
            None => image.open_implicit_dependencies_gated(DenyImplicitOpenGate::default()),
            Some(backing) if !options.backing_files => {
                return Err(DiskError::BackingFile {
                    path: path.clone(),
                    backing: backing.clone(),
                });
            }
            Some(backing) if backing.starts_with("json:") => {
                return Err(DiskError::BackingDescription {
                    path: path.clone(),
                    backing: backing.clone(),
                });
            }
            Some(backing) if image.implicit_backing_format().is_none() => {
                return Err(DiskError::BackingFormat {
                    path: path.clone(),
                    backing: backing.clone(),
                });
            }
            Some(_) => image.open_implicit_dependencies_gated(BackingGate {
                remaining: MAX_BACKING_DEPTH,
                granularity: options.lock_granularity,
            }),
        };
        opened.map_err(inspect("open the backing file of"))?;
        // While another process has the lock, nothing is written.
        if let Some(tables) = tables.as_ref().filter(|_| !options.lock_later) {
            claim.change(|| mend(tables, path))??;
        }
        let mut snapshots = [0; 4];
        buffered
            .read_exact_at(&mut snapshots, SNAPSHOTS)
            .map_err(inspect("read the header of"))?;
        let fixed = if image.implicit_backing_file().is_some() {
            // What that has beyond the disk's old end would appear.
            Some("it has a backing file; `qemu-img resize` does it while the VM is switched off")
        } else if snapshots != [0; 4] {
            // What they have left beyond the disk's old end would appear.
            Some("it has internal snapshots; `qemu-img snapshot -d` deletes them")
        } else {
            None
        };
        let access = FormatAccess::new(image);
        Ok(Self {
            size: AtomicU64::new(access.size()),
            is_unmended: AtomicBool::new(options.lock_later),
            access: RwLock::new(access),
            file: kept,
            tables,
            fixed,
            has_changed: AtomicBool::new(false),
        })
    }

    /// Size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Why the disk cannot grow while it is in use, if it cannot.
    pub fn fixed(&self) -> Option<&'static str> {
        self.fixed
    }

    /// Grows the disk to `size` bytes while it is in use, unless it is [fixed](Self::fixed). Only the
    /// first table of the image is written, whatever the size. The guest's next flush makes the new
    /// size stable.
    pub fn grow(&self, size: u64) -> io::Result<()> {
        self.mend_late()?;
        let access = self.access.write_unpoisoned();
        access.flush()?;
        let grown = access.resize_grow(size, PreallocateMode::None);
        self.size.store(access.size(), Ordering::Release);
        self.has_changed.store(true, Ordering::Release);
        grown?;
        drop(access);
        self.write_tables()
    }

    /// Whether tables may have changed in memory alone since the last call of
    /// [`write_tables`](Self::write_tables) that succeeded.
    pub fn has_changed(&self) -> bool {
        self.has_changed.load(Ordering::Acquire)
    }

    /// The image's file.
    pub fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Writes tables that are kept in memory. Until this has been done, the file lacks data that was written.
    pub fn write_tables(&self) -> io::Result<()> {
        self.has_changed.store(false, Ordering::Release);
        let written = self.access.read_unpoisoned().flush();
        written.inspect_err(|_| self.has_changed.store(true, Ordering::Release))
    }

    /// Changes `len` bytes at `offset`. If that makes a table, all others are in the file before.
    fn change(
        &self,
        offset: u64,
        len: u64,
        change: impl FnOnce(&FormatAccess<CountedFile>) -> io::Result<()>,
    ) -> io::Result<()> {
        self.mend_late()?;
        if self.has_l2(offset, len) {
            return change(&self.access.read_unpoisoned());
        }
        let access = self.access.write_unpoisoned();
        access.flush()?;
        change(&access)
    }

    /// Mends an image that was in use elsewhere when it was opened, before its first change.
    fn mend_late(&self) -> io::Result<()> {
        if self.is_unmended.load(Ordering::Acquire) {
            let _alone = self.access.write_unpoisoned();
            if let Some(tables) = &self.tables
                && self.is_unmended.load(Ordering::Acquire)
                && tables.mend()? > 0
            {
                log::warn!("tables of a qcow2 image that were counted as free are mended");
            }
            self.is_unmended.store(false, Ordering::Release);
        }
        Ok(())
    }

    /// Whether a change of this range makes no L2 table.
    fn has_l2(&self, offset: u64, len: u64) -> bool {
        let tables = self.tables.as_ref();
        tables.is_none_or(|tables| tables.has_l2(offset, len))
    }

    /// How many of `len` bytes at `offset` one L2 table describes.
    fn within_l2(&self, offset: u64, len: u64) -> u64 {
        match &self.tables {
            Some(tables) => len.min(tables.described() - offset % tables.described()),
            None => len,
        }
    }

    fn read(&self, io: &mut Io) -> io::Result<()> {
        let result = self.read_parts(io);
        io.mark_written();
        result
    }

    fn read_parts(&self, io: &mut Io) -> io::Result<()> {
        let access = self.access.read_unpoisoned();
        while !io.buffers.is_empty() {
            let offset = io.offset;
            let bytes = io.bounce()?;
            let count = bytes.len();
            access.read(bytes, offset)?;
            io.advance(count);
        }
        Ok(())
    }

    fn write(&self, io: &mut Io) -> io::Result<()> {
        while !io.buffers.is_empty() {
            let offset = io.offset;
            let bytes = &*io.bounce()?;
            let count = self.within_l2(offset, bytes.len() as u64) as usize;
            self.change(offset, count as u64, |access| {
                access.write(&bytes[..count], offset)
            })?;
            io.advance(count);
        }
        Ok(())
    }

    fn discard(&self, io: &Io) -> io::Result<()> {
        self.mend_late()?;
        let mut access = self.access.write_unpoisoned();
        let (mut offset, end) = (io.offset, io.offset.saturating_add(io.len));
        while offset < end {
            let len = self.within_l2(offset, end - offset);
            if !self.has_l2(offset, len) {
                access.flush()?;
            }
            self.free(&access, offset, len)?;
            access.discard_to_zero(offset, len)?;
            offset += len;
        }
        Ok(())
    }

    fn zero(&self, io: &Io) -> io::Result<()> {
        let (mut offset, end) = (io.offset, io.offset.saturating_add(io.len));
        while offset < end {
            let len = self.within_l2(offset, end - offset);
            self.change(offset, len, |access| access.write_zeroes(offset, len))?;
            offset += len;
        }
        Ok(())
    }

    /// Frees the host's storage of a range that is about to be discarded. The library would only
    /// mark its clusters as free. They are still the range's here, so nothing else can be in them;
    /// those of snapshots and backing files are not writable.
    fn free(
        &self,
        access: &FormatAccess<CountedFile>,
        mut offset: u64,
        mut len: u64,
    ) -> io::Result<()> {
        while len > 0 {
            let (mapping, count) = access.get_mapping(offset, len)?;
            if count == 0 {
                break;
            }
            if let Mapping::Raw {
                offset: at,
                writable: true,
                ..
            } = mapping
                && !punch(&self.file, at, count)
            {
                // The file system cannot, for this range and all others.
                break;
            }
            offset += count;
            len -= count;
        }
        Ok(())
    }

    /// Writes out cached metadata, and flushes everything to stable storage.
    pub fn flush(&self) -> io::Result<()> {
        self.write_tables()?;
        self.access.read_unpoisoned().sync()
    }
}

/// Reads the tables of an image that is written to. `file` does not bypass the page cache.
fn read_tables(file: &File, options: &DiskOptions) -> Result<Arc<TableMap>, DiskError> {
    let tables = file.try_clone().and_then(TableMap::read);
    let tables = tables.map_err(of_tables(&options.path, "read the tables of"))?;
    Ok(Arc::new(tables))
}

/// The error of doing something with the tables of an image.
fn of_tables(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> DiskError {
    move |source| match source.kind() {
        io::ErrorKind::InvalidData => DiskError::Damaged {
            path: path.to_owned(),
            what: source.to_string(),
        },
        _ => DiskError::Inspect {
            path: path.to_owned(),
            action,
            source,
        },
    }
}

/// Mends what an earlier version left in an image, if it ended without notice.
fn mend(tables: &TableMap, path: &Path) -> Result<(), DiskError> {
    let mended = tables
        .mend()
        .map_err(of_tables(path, "mend the tables of"))?;
    if mended > 0 {
        log::warn!(
            "disk {}: {mended} clusters with tables were counted as free, as an earlier version left them when it was \
             killed; they are mended, and `qemu-img check {0}` shows whether anything else is wrong",
            path.display()
        );
    }
    Ok(())
}

/// Frees a range of a file, which then reads as zeroes. Returns whether the host did so.
fn punch(file: &File, offset: u64, len: u64) -> bool {
    fallocate(file, discard_mode(), offset, len).is_ok()
}

impl Drop for Qcow2Image {
    fn drop(&mut self) {
        // The library would not say that it fails.
        if self.has_changed()
            && let Err(error) = self.write_tables()
        {
            log::error!("tables of a qcow2 image cannot be written: {error}");
        }
    }
}

impl Blocking for Qcow2Image {
    fn perform(&self, io: &mut Io) -> io::Result<()> {
        let (changed, durable) = match io.operation {
            Operation::Read => return self.read(io),
            Operation::Flush => return self.flush(),
            Operation::Write { durable } => (self.write(io), durable),
            Operation::WriteZeroes { may_unmap, durable } => {
                let zeroed = match may_unmap {
                    true => self.discard(io),
                    false => self.zero(io),
                };
                (zeroed, durable)
            }
            Operation::Discard => (self.discard(io), false),
        };
        // Afterwards: tables may be written while this goes on.
        self.has_changed.store(true, Ordering::Release);
        changed?;
        if durable { self.flush() } else { Ok(()) }
    }
}

/// Permits backing files, up to a depth: opened read-only through the page cache, with a shared
/// lock. Permits nothing else.
struct BackingGate {
    remaining: u32,
    granularity: LockGranularity,
}

impl ImplicitOpenGate<CountedFile> for BackingGate {
    fn open_format<F: FormatDriverBuilder<CountedFile>>(
        &mut self,
        builder: F,
    ) -> io::Result<FormatAccess<CountedFile>> {
        let remaining = self
            .remaining
            .checked_sub(1)
            .ok_or_else(|| io::Error::other("the chain of backing files is too long"))?;
        let gate = Self { remaining, ..*self };
        Ok(FormatAccess::new(builder.open(gate)?))
    }

    fn open_storage(&mut self, builder: StorageOpenOptions) -> io::Result<CountedFile> {
        // Only the data file of an image is requested as writable.
        if builder.get_writable() {
            return Err(io::Error::other("it keeps its data in another file"));
        }
        let path = builder
            .get_filename()
            .ok_or_else(|| io::Error::other("a backing file without a name"))?
            .to_owned();
        let mut file = regular_file::open(&path, Links::Follow)?;
        let size = super::geometry::size(&mut file)?;
        lock::lock(&file, size, true, self.granularity)
            .map_err(|error| io::Error::other(format!("it is in use elsewhere ({error})")))?;
        let options = StorageOpenOptions::new().filename(path);
        let file = imago::file::File::from_open_file(file, options)?;
        Ok(CountedFile::new(file, None))
    }
}

/// Checks that the tables that the header names are within the file. (The library reads zeroes
/// beyond the end, which would turn an incompletely copied image into silent data loss, and it
/// relies on some of these checks.)
fn check_complete(path: &Path, file: &File, file_size: u64) -> Result<(), DiskError> {
    let tables = Tables::read(file).map_err(|source| DiskError::Inspect {
        path: path.to_owned(),
        action: "read the tables of",
        source,
    })?;
    if tables.end > file_size {
        return Err(DiskError::Truncated {
            path: path.to_owned(),
            needed: tables.end,
            size: file_size,
        });
    }
    let path = path.to_owned();
    match tables.fault {
        Some(Fault::Damage(what)) => Err(DiskError::Damaged {
            path,
            what: what.to_owned(),
        }),
        Some(Fault::Mark(what)) => Err(DiskError::Unclean { path, what }),
        Some(Fault::Feature(what)) => Err(DiskError::Feature { path, what }),
        None => Ok(()),
    }
}

/// Why a first look at an image is enough to refuse it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Fault {
    /// An invalid value.
    Damage(&'static str),
    /// What QEMU has marked it as.
    Mark(&'static str),
    /// A feature that the library does not support.
    Feature(&'static str),
}

/// Incompatible features (QEMU's docs/interop/qcow2.rst) because of which an image is refused. The
/// names of files with its data are handled later.
const REFUSED_FEATURES: [(u32, Fault); 4] = [
    (1, Fault::Mark("corrupt")),
    (0, Fault::Mark("in use or not closed (dirty)")),
    (3, Fault::Feature("clusters compressed with zstd")),
    (4, Fault::Feature("extended L2 entries")),
];

/// Result of a first look at the tables.
struct Tables {
    /// Offset of the end of the last table in bytes, as far as the tables are readable.
    end: u64,
    /// A reason to refuse the image.
    fault: Option<Fault>,
}

impl Tables {
    fn read(file: &File) -> io::Result<Self> {
        // The features of version 3 follow the fields of version 2.
        const VERSION_2: usize = 72;
        let mut header = [0; 80];
        if file.read_at(&mut header, 0)? < VERSION_2 {
            return Ok(Self {
                end: VERSION_2 as u64,
                fault: None,
            });
        }
        let number = |at: usize, len: usize| {
            header[at..at + len]
                .iter()
                .fold(0_u64, |value, byte| value << 8 | u64::from(*byte))
        };
        let refused = |fault| {
            Ok(Self {
                end: 0,
                fault: Some(fault),
            })
        };
        let damaged = |what| refused(Fault::Damage(what));
        let version = number(4, 4);
        if version > 2 {
            let features = number(72, 8);
            let is_set = |(bit, _): &&(u32, Fault)| features & 1 << bit != 0;
            if let Some((_, fault)) = REFUSED_FEATURES.iter().find(is_set) {
                return refused(*fault);
            }
        }
        if number(32, 4) != 0 {
            return refused(Fault::Feature("encryption"));
        }
        let cluster_bits = number(20, 4);
        // QEMU's limits.
        if !(9..=21).contains(&cluster_bits) {
            return damaged("its cluster size is not one");
        }
        let cluster = 1_u64 << cluster_bits;
        let (l1_entries, l1_offset) = (number(36, 4), number(40, 8));
        let (refcounts, refcount_clusters) = (number(48, 8), number(56, 4));
        if l1_entries > MAX_L1_ENTRIES {
            return damaged("its L1 table is too long");
        }
        if refcount_clusters == 0 || refcounts == 0 {
            return damaged("it has no reference counts");
        }
        if !l1_offset.is_multiple_of(cluster) || !refcounts.is_multiple_of(cluster) {
            return damaged("its tables are not aligned");
        }
        if version > 2 && !has_sound_extensions(file, cluster)? {
            return damaged("its header extensions are cut short");
        }
        let refcount_end = refcounts.saturating_add(refcount_clusters.saturating_mul(cluster));
        let l1_end = l1_offset.saturating_add(l1_entries * 8);
        let mut end = l1_end.max(refcount_end);
        // Bounded by MAX_L1_ENTRIES above.
        let mut l1 = vec![0; (l1_entries * 8) as usize];
        if file.read_exact_at(&mut l1, l1_offset).is_ok() {
            let (entries, _) = l1.as_chunks::<8>();
            for entry in entries {
                // Bits 9 to 55: offset of the L2 table, 0 if there is none.
                let table = u64::from_be_bytes(*entry) & 0x00ff_ffff_ffff_fe00;
                if table != 0 {
                    end = end.max(table + cluster);
                }
            }
        }
        Ok(Self { end, fault: None })
    }
}

/// Whether the table of feature names, if present, has only whole entries: the library takes that
/// for granted. For version 3 headers only.
fn has_sound_extensions(file: &File, cluster: u64) -> io::Result<bool> {
    /// Type of the extension, and size of an entry (QEMU's docs/interop/qcow2.rst).
    const FEATURE_NAMES: u32 = 0x6803_f857;
    const FEATURE_NAME: u32 = 48;
    /// Size of type and length in bytes.
    const HEAD: u64 = 8;
    let word = |at: u64| -> io::Result<u32> {
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, at)?;
        Ok(u32::from_be_bytes(bytes))
    };
    // The end of the header, where the extensions begin, in the first cluster.
    let mut at = u64::from(word(100)?);
    while at + HEAD <= cluster {
        let (kind, len) = (word(at)?, word(at + 4)?);
        if kind == 0 {
            return Ok(true);
        }
        if kind == FEATURE_NAMES && !len.is_multiple_of(FEATURE_NAME) {
            return Ok(false);
        }
        at += HEAD + u64::from(len).next_multiple_of(8);
    }
    Ok(at <= cluster)
}
