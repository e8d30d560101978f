//! Opens disk images: formats, locks, sizes, and errors that suggest a remedy.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    sync::{Arc, Once},
};

use device_model::thread::ThreadSpawner;

use super::{
    SECTOR,
    claim::Claim,
    error::DiskError,
    geometry::{self, Geometry},
    io::{self as disk_io, AsyncIo, FormatGuard},
    lock::{Lock, Scope},
    options::{DiskOptions, ImageType},
    pool::{Blocking, Pool},
    qcow2::Qcow2Image,
    raw::{BlockingRaw, can_fallocate, discard_mode, zero_mode},
    signature::{CONVERT, Kind, LUKS, VHD, signature},
    uring::Uring,
};

#[derive(Clone)]
enum Backend {
    Raw(Arc<File>),
    Qcow2(Arc<Qcow2Image>),
}

/// An open, locked disk image.
pub struct Disk {
    path: PathBuf,
    backend: Backend,
    memory: disk_io::Path,
    geometry: Geometry,
    size: u64,
    io_uring: bool,
    discard: bool,
    write_zeroes: bool,
    block_device: bool,
    default_serial: String,
    lock: Arc<Lock>,
}

impl Disk {
    /// Opens, locks and checks an image.
    pub fn open(options: &DiskOptions) -> Result<Self, DiskError> {
        Self::open_for(options, &Claim::impatient())
    }

    /// [`Disk::open`] at the speed of the storage, as long as the image is wanted: it is neither locked nor changed later.
    ///
    /// # Errors
    /// As above, and [`DiskError::Unwanted`].
    pub fn open_for(options: &DiskOptions, claim: &Claim) -> Result<Self, DiskError> {
        let opened = Self::open_claimed(options, claim);
        let opened = opened.and_then(|disk| claim.wanted().map(|()| disk));
        opened.inspect_err(|_| claim.release())
    }

    fn open_claimed(options: &DiskOptions, claim: &Claim) -> Result<Self, DiskError> {
        let path = options.path.clone();
        let inspect = |action| {
            let path = path.clone();
            move |source| DiskError::Inspect {
                path,
                action,
                source,
            }
        };
        // The lock has its own descriptor: when an io_uring holds a descriptor, the kernel closes
        // it only some time after the ring, and a lock that lingers would block the next start.
        // O_NONBLOCK: a FIFO must not block the VMM. It is not set for I/O, because io_uring would
        // obey it.
        let mut lock_file = open_file(options, libc::O_NONBLOCK)?;
        let of = lock_file.metadata().map_err(inspect("examine"))?;
        let file_type = of.file_type();
        let block_device = file_type.is_block_device();
        if !block_device && !file_type.is_file() {
            let kind = if file_type.is_dir() {
                "a directory"
            } else {
                "a special file"
            };
            return Err(DiskError::NotAnImage { path, kind });
        }
        let file_size = geometry::size(&mut lock_file).map_err(inspect("measure"))?;
        let lock = Arc::new(Lock {
            scope: Scope::of(&lock_file),
            file: lock_file,
            inode: (of.dev(), of.ino()),
            size: file_size,
            read_only: options.read_only,
            granularity: options.lock_granularity,
        });
        if !options.lock_later {
            claim.lock(&lock, &path)?;
        }
        let mut lock_file = lock.file.try_clone().map_err(inspect("examine"))?;
        let image_type = find_type(options, &mut lock_file)?;
        let direct = if options.direct { libc::O_DIRECT } else { 0 };
        let file = open_file(options, direct)?;
        if !is_same(&file, &lock_file).map_err(inspect("examine"))? {
            return Err(DiskError::Replaced { path });
        }
        let geometry = geometry::probe(&file, options.direct).map_err(inspect("examine"))?;
        let writable = !options.read_only;
        let mut disk = Self {
            backend: Backend::Raw(Arc::new(file)),
            memory: disk_io::Path {
                alignment: geometry.memory_alignment,
                guard: (options.image_type == ImageType::Unknown)
                    .then(|| FormatGuard::new(file_size)),
            },
            geometry,
            size: file_size,
            io_uring: options.io_uring,
            discard: writable && options.sparse,
            write_zeroes: writable,
            block_device,
            default_serial: format!("{}{}{}", of.dev(), of.rdev(), of.ino()),
            path,
            lock,
        };
        match image_type {
            ImageType::Qcow2 => disk.open_qcow2(options, claim)?,
            _ => disk.check_raw(options, claim)?,
        }
        Ok(disk)
    }

    fn check_raw(&mut self, options: &DiskOptions, claim: &Claim) -> Result<(), DiskError> {
        if let Some(wanted) = options.logical_block {
            if self.block_device && wanted < self.geometry.logical_block {
                // The page cache splits blocks for reads and writes; the kernel frees and zeroes whole ones.
                (self.discard, self.write_zeroes) = (false, false);
            }
            let needed = self.memory.alignment;
            if (wanted as usize) < needed {
                return Err(DiskError::BlockSize {
                    path: self.path.clone(),
                    wanted,
                    needed,
                });
            }
            self.geometry.set_logical_block(wanted);
        }
        // An image that is stated to be raw is not read before its guest reads it: storage may hang.
        if options.image_type == ImageType::Unknown {
            warn_of_other_blocks(&self.path, &self.lock.file, self.geometry.logical_block);
        }
        self.check_size(u64::from(self.geometry.logical_block))?;
        let Backend::Raw(file) = &self.backend else {
            return Ok(());
        };
        let can = |mode| can_fallocate(file, self.size, mode, self.block_device);
        // Others might have something beyond its end by then.
        (self.discard, self.write_zeroes) = claim.change(|| {
            let discard = self.discard && can(discard_mode());
            let zeroes = self.write_zeroes && can(zero_mode(false));
            (discard, zeroes && (!options.sparse || discard))
        })?;
        Ok(())
    }

    fn open_qcow2(&mut self, options: &DiskOptions, claim: &Claim) -> Result<(), DiskError> {
        let Backend::Raw(file) = &self.backend else {
            return Ok(());
        };
        let file = file.try_clone().map_err(|source| DiskError::Open {
            path: self.path.clone(),
            direct: options.direct,
            source,
        })?;
        let image = Qcow2Image::open(file, &self.lock.file, self.size, options, claim)?;
        self.size = image.size();
        self.backend = Backend::Qcow2(Arc::new(image));
        // The library aligns transfers for O_DIRECT itself, and always uses host memory.
        let block = options.logical_block.unwrap_or(SECTOR as u32);
        self.geometry.set_logical_block(block);
        self.check_size(block.into())
    }

    fn check_size(&self, block: u64) -> Result<(), DiskError> {
        let path = self.path.clone();
        match self.size {
            0 => Err(DiskError::Empty { path }),
            size if !size.is_multiple_of(block) => Err(DiskError::Size {
                path,
                size,
                block,
                qcow2: matches!(self.backend, Backend::Qcow2(_)),
            }),
            _ => Ok(()),
        }
    }

    /// Takes the image's lock, if it is not already held; does not block.
    ///
    /// # Errors
    ///
    /// [`DiskError::Locked`] if another process holds it.
    pub fn lock(&self) -> Result<(), DiskError> {
        self.lock.take(&self.path)
    }

    /// Where the lock is visible.
    pub fn lock_scope(&self) -> Scope {
        self.lock.scope
    }

    /// Releases the lock, for the host to which the VM migrates. Nothing may be written from now on
    /// until [`Disk::lock`].
    pub fn unlock(&self) -> Result<(), DiskError> {
        self.lock.release().map_err(|source| DiskError::Lock {
            path: self.path.clone(),
            source,
        })
    }

    /// A serial number that stays the same for the same image: it is made of the numbers of its device and inode.
    pub fn default_serial(&self) -> &str {
        &self.default_serial
    }

    /// What writes tables of the image that are kept in memory; `None` if there are none. It takes as long as the storage
    /// likes. Until then, the file lacks data that was written.
    pub fn unwritten(&self) -> Option<impl FnOnce() -> io::Result<()> + Send + use<>> {
        match &self.backend {
            Backend::Qcow2(image) if image.has_changed() => {
                let image = Arc::clone(image);
                Some(move || image.write_tables())
            }
            _ => None,
        }
    }

    /// What brings everything that is in the image's file to stable storage, where another host finds it. It blocks, for as
    /// long as the storage likes, and has nothing but the file: whoever it is left to changes nothing in an image that
    /// others may use by then. So it is an error if tables that an image format keeps in memory are [not
    /// written](Self::unwritten).
    pub fn flush(&self) -> impl FnOnce() -> io::Result<()> + Send + use<> {
        let file = match &self.backend {
            Backend::Raw(_) if self.lock.read_only => Ok(None),
            Backend::Raw(file) => Ok(Some(Arc::clone(file))),
            Backend::Qcow2(image) if image.has_changed() => Err(io::Error::other(
                "tables of the image are not in its file: pause the VM first",
            )),
            Backend::Qcow2(image) => image.file().map(|file| Some(Arc::new(file))),
        };
        move || file?.map_or(Ok(()), |file| file.sync_data())
    }

    /// Path of the image.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size in bytes: a multiple of the logical block, not 0.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Block sizes that the guest should respect.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Whether [`Operation::Discard`](super::Operation::Discard) is supported.
    pub fn can_discard(&self) -> bool {
        self.discard
    }

    /// Whether [`Operation::WriteZeroes`](super::Operation::WriteZeroes) is supported.
    pub fn can_write_zeroes(&self) -> bool {
        self.write_zeroes
    }

    /// Creates an engine for one queue with up to `depth` requests in flight. Its threads, if any,
    /// are named `{name}_wN`.
    pub fn async_io(
        &self,
        depth: u16,
        spawner: &dyn ThreadSpawner,
        name: &str,
    ) -> io::Result<Box<dyn AsyncIo>> {
        let image: Arc<dyn Blocking> = match &self.backend {
            Backend::Qcow2(image) => Arc::clone(image) as _,
            Backend::Raw(file) => {
                if self.io_uring {
                    match Uring::new(Arc::clone(file), self.memory.clone(), depth) {
                        Ok(ring) => return Ok(Box::new(ring)),
                        Err(error) => say_once_why_not_io_uring(&error),
                    }
                }
                Arc::new(BlockingRaw {
                    file: Arc::clone(file),
                    path: self.memory.clone(),
                })
            }
        };
        Ok(Box::new(Pool::new(image, spawner, name)?))
    }

    /// What resizes the disk, in bytes, and takes as long as the storage likes; [`Disk::set_size`] follows, whatever
    /// comes of it. The disk can only grow: shrinking a disk that a guest uses loses data. A block device must already
    /// have grown.
    pub fn growth(
        &self,
        size: u64,
    ) -> Result<impl FnOnce() -> Result<(), DiskError> + Send + use<>, DiskError> {
        let path = self.path.clone();
        let refuse = |reason| DiskError::Resize {
            path: self.path.clone(),
            from: self.size,
            to: size,
            reason,
        };
        let inspect = |path| {
            move |source| DiskError::Inspect {
                path,
                action: "resize",
                source,
            }
        };
        let block = u64::from(self.geometry.logical_block);
        if !size.is_multiple_of(block) {
            return Err(refuse("the new size is not a multiple of its block size"));
        }
        if size < self.size {
            return Err(refuse("shrinking would cut off data"));
        }
        let work: Box<dyn FnOnce() -> io::Result<()> + Send> = match &self.backend {
            Backend::Qcow2(image) => {
                if size > self.size
                    && let Some(reason) = image.fixed()
                {
                    return Err(refuse(reason));
                }
                let image = Arc::clone(image);
                Box::new(move || image.grow(size))
            }
            Backend::Raw(file) if !self.block_device => {
                let file = Arc::clone(file);
                Box::new(move || file.set_len(size))
            }
            Backend::Raw(file) => {
                let grown = file
                    .try_clone()
                    .and_then(|mut file| geometry::size(&mut file));
                if grown.map_err(inspect(path.clone()))? < size {
                    return Err(refuse("the block device is smaller; grow it first"));
                }
                Box::new(|| Ok(()))
            }
        };
        Ok(move || work().map_err(inspect(path)))
    }

    /// Sets the size of a disk that has grown to `size` bytes, or has failed to (`None`): the size of an image that
    /// describes its disk may have changed all the same.
    pub fn set_size(&mut self, size: Option<u64>) {
        self.size = match &self.backend {
            Backend::Qcow2(image) => image.size(),
            Backend::Raw(_) => size.unwrap_or(self.size),
        };
        if let Some(guard) = &self.memory.guard {
            guard.set_size(self.size);
        }
    }
}

/// Warns if a partition table was written for blocks of another size: the guest does not find it.
fn warn_of_other_blocks(path: &Path, file: &File, block: u32) {
    /// What a GUID partition table starts with, in block 1.
    const TABLE: &[u8] = b"EFI PART";
    let has_table = |block: u32| {
        let mut start = [0; TABLE.len()];
        let read = file.read_exact_at(&mut start, block.into());
        read.is_ok() && start == TABLE
    };
    let other = match block {
        512 => 4096,
        _ => 512,
    };
    if has_table(other) && !has_table(block) {
        log::warn!(
            "disk {}: its partition table is for blocks of {other} bytes, but the guest sees blocks of {block}: if it \
             finds no partitions, use logical_block_size={other}",
            path.display()
        );
    }
}

fn say_once_why_not_io_uring(error: &io::Error) {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        log::warn!("io_uring is not available ({error}): disks use threads, which is slower");
    });
}

fn open_file(options: &DiskOptions, flags: i32) -> Result<File, DiskError> {
    let opened = OpenOptions::new()
        .read(true)
        .write(!options.read_only)
        .custom_flags(flags)
        .open(&options.path);
    opened.map_err(|source| match source.raw_os_error() {
        Some(libc::ENOENT) if options.path.as_os_str().as_bytes().starts_with(b"json:") => {
            DiskError::Description {
                path: options.path.clone(),
            }
        }
        Some(libc::EISDIR) => DiskError::NotAnImage {
            path: options.path.clone(),
            kind: "a directory",
        },
        _ => DiskError::Open {
            path: options.path.clone(),
            direct: flags & libc::O_DIRECT != 0,
            source,
        },
    })
}

fn is_same(one: &File, other: &File) -> io::Result<bool> {
    let (one, other) = (one.metadata()?, other.metadata()?);
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

/// The configured type or, if unknown, the detected one. Refuses unsupported types.
fn find_type(options: &DiskOptions, file: &mut File) -> Result<ImageType, DiskError> {
    let path = || options.path.clone();
    let stated = |format| DiskError::Unsupported {
        path: path(),
        format,
        remedy: CONVERT,
        detected: false,
    };
    match options.image_type {
        ImageType::FixedVhd => return Err(stated(VHD)),
        ImageType::Vhdx => return Err(stated("VHDX")),
        ImageType::Raw => return Ok(ImageType::Raw),
        ImageType::Qcow2 | ImageType::Unknown => {}
    }
    let (head, tail, size) = read_ends(file).map_err(|source| DiskError::Inspect {
        path: path(),
        action: "read",
        source,
    })?;
    let at_start = signature(&head);
    let at_end = || signature(&tail).filter(|found| found.name == VHD);
    let image = at_start.filter(|found| found.is_image()).or_else(at_end);
    match image.or(at_start) {
        Some(found) if found.kind == Kind::Qcow2 => Ok(ImageType::Qcow2),
        Some(found)
            if options.image_type == ImageType::Unknown
                && !found.is_image()
                && size.is_multiple_of(SECTOR) =>
        {
            log::warn!(
                "disk {} begins like a file that is {}: the guest sees it as it is; if it is a disk image that has \
                 yet to be decompressed, `{}` does that",
                options.path.display(),
                found.name,
                found.remedy()
            );
            Ok(ImageType::Raw)
        }
        Some(found) if options.image_type == ImageType::Unknown => Err(DiskError::Unsupported {
            path: path(),
            format: found.name,
            remedy: found.remedy(),
            detected: true,
        }),
        _ if options.image_type == ImageType::Qcow2 => Err(DiskError::NotQcow2 { path: path() }),
        _ => {
            if head.starts_with(LUKS) {
                let path = path();
                log::info!(
                    "disk {} is encrypted with LUKS: the guest sees it as it is",
                    path.display()
                );
            }
            Ok(ImageType::Raw)
        }
    }
}

/// The first and the last sector (a VHD has its signature at the end), and the size in bytes.
fn read_ends(file: &mut File) -> io::Result<([u8; 512], [u8; 512], u64)> {
    let (mut head, mut tail) = ([0; 512], [0; 512]);
    let size = file.seek(SeekFrom::End(0))?;
    file.rewind()?;
    let count = size.min(SECTOR) as usize;
    file.read_exact(&mut head[..count])?;
    file.seek(SeekFrom::Start(size.saturating_sub(SECTOR)))?;
    file.read_exact(&mut tail[..count])?;
    Ok((head, tail, size))
}
