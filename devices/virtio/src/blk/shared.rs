//! State shared by the queues of a disk, its device and the VM.

use std::{
    io,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use base::Unpoisoned;
use disk::{Disk, DiskError, Operation, SECTOR};
use virtio_bindings::bindings::virtio_blk::{VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_UNSUPP};

use super::{config::MAX_RANGE, counters::Counters, request::Range};
use crate::{config_change::ConfigChange, in_flight::InFlight};

/// Bytes of the serial number that `GET_ID` returns (virtio 1.2, 5.2.6).
pub const ID_LEN: usize = 20;

/// Minimum time between two log messages about failed requests of one disk.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// The state of one disk that several threads use.
pub struct Shared {
    /// Path of the image, for messages.
    pub path: PathBuf,
    /// The reply to `GET_ID`, padded with zeroes.
    pub id: [u8; ID_LEN],
    /// The guest may not write.
    pub read_only: bool,
    /// Discard is offered.
    pub can_discard: bool,
    /// Write-zeroes is offered.
    pub can_write_zeroes: bool,
    /// Counters for `vm.counters`.
    pub counters: Counters,
    /// Size of the disk as the guest knows it, in bytes.
    capacity: AtomicU64,
    writeback: AtomicBool,
    /// Requests in flight on all queues.
    pub requests: InFlight,
    /// How many threads grow the image, or write its tables. Outlives this, as the image does while it is open.
    pub working: Arc<AtomicUsize>,
    reported: Mutex<Option<Instant>>,
    disk: Mutex<Disk>,
    /// Announces a change of the size.
    pub change: ConfigChange,
}

impl Shared {
    /// Creates the state of a new device on `disk`, with write-back caching.
    pub fn new(disk: Disk, read_only: bool, id: [u8; ID_LEN]) -> Self {
        Self {
            path: disk.path().to_owned(),
            id,
            read_only,
            can_discard: disk.can_discard(),
            can_write_zeroes: disk.can_write_zeroes(),
            counters: Counters::default(),
            capacity: AtomicU64::new(disk.size()),
            writeback: AtomicBool::new(true),
            requests: InFlight::default(),
            working: Arc::default(),
            reported: Mutex::new(None),
            disk: Mutex::new(disk),
            change: ConfigChange::default(),
        }
    }

    /// Size in bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Relaxed)
    }

    /// Sets the size that the guest sees, on restore.
    pub fn set_capacity(&self, bytes: u64) {
        self.capacity.store(bytes, Ordering::Relaxed);
    }

    /// Whether completed writes may stay in volatile memory until a flush.
    pub fn is_writeback(&self) -> bool {
        self.writeback.load(Ordering::Relaxed)
    }

    /// Sets the driver's choice of cache mode.
    pub fn set_writeback(&self, on: bool) {
        self.writeback.store(on, Ordering::Relaxed);
    }

    /// Runs `f` on the image.
    pub fn with_disk<T>(&self, f: impl FnOnce(&mut Disk) -> T) -> T {
        f(&mut self.disk.lock_unpoisoned())
    }

    /// What grows the image to `bytes`, and then notifies the driver. It takes as long as the storage likes.
    pub fn growth(
        &self,
        bytes: u64,
    ) -> Result<impl FnOnce(&Self) -> Result<(), DiskError> + Send + use<>, DiskError> {
        if self.read_only {
            return Err(DiskError::Resize {
                path: self.path.clone(),
                from: self.capacity(),
                to: bytes,
                reason: "the disk is read-only (readonly=on)",
            });
        }
        let grow = self.with_disk(|disk| disk.growth(bytes))?;
        Ok(move |shared: &Self| {
            // Without the lock: other threads need it meanwhile.
            let grown = grow();
            shared.with_disk(|disk| disk.set_size(grown.is_ok().then_some(bytes)));
            grown?;
            shared.set_capacity(bytes);
            shared.change.announce();
            Ok(())
        })
    }

    /// Byte offset of `sector`, if the `len` bytes from there are whole sectors within the disk.
    pub fn check_extent(&self, sector: u64, len: u64) -> Result<u64, u32> {
        sector
            .checked_mul(SECTOR)
            .filter(|offset| {
                len.is_multiple_of(SECTOR)
                    && offset
                        .checked_add(len)
                        .is_some_and(|end| end <= self.capacity())
            })
            .ok_or(VIRTIO_BLK_S_IOERR)
    }

    /// First sector and length in bytes of a range. Refuses flags other than `flags`, and ranges
    /// that are too long.
    pub fn check_range(&self, range: Range, flags: u32) -> Result<(u64, u64), u32> {
        if range.flags & !flags != 0 {
            // Required by virtio 1.2, 5.2.6.2.
            return Err(VIRTIO_BLK_S_UNSUPP);
        }
        if range.count > MAX_RANGE {
            return Err(VIRTIO_BLK_S_IOERR);
        }
        Ok((range.sector, u64::from(range.count) * SECTOR))
    }

    /// Logs a failed request, unless one was logged within the last `REPORT_INTERVAL`.
    pub fn report(&self, operation: Operation, offset: u64, error: &io::Error) {
        let mut reported = self.reported.lock_unpoisoned();
        if reported.is_some_and(|at| at.elapsed() < REPORT_INTERVAL) {
            return;
        }
        *reported = Some(Instant::now());
        let path = self.path.display();
        log::warn!("disk {path}: {operation:?} at byte {offset} failed: {error}");
    }
}
