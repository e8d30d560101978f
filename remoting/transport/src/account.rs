//! Accounting of the device memory that the applications of one machine use together.
//!
//! The machine and the workers of one accelerator port share a page with counters for each
//! slice. Only the slice's worker changes its counter while it lives. The machine resets the
//! counter to zero when the worker has ended, for whatever reason. A worker that is killed in the
//! middle of an allocation therefore leaves nothing behind.

use std::{
    fs::File,
    io,
    os::fd::OwnedFd,
    sync::atomic::{AtomicU64, Ordering},
};

use base::{Access, Mapping};
use remoting_proto::port::MOST_SLICES;

use crate::mapping::{self, create};

/// One counter for each slice.
#[derive(Debug)]
#[repr(transparent)]
pub struct Counters([AtomicU64; MOST_SLICES as usize]);

/// The contents of the page.
#[repr(C)]
struct Page {
    /// Bytes of device memory that the limit counts.
    memory: Counters,
    /// Bytes of machine code that it does not count.
    code: Counters,
}

/// Size of the file in bytes.
const SIZE: usize = 4096;

/// The page, mapped.
#[derive(Debug)]
pub struct Account(Mapping);

impl Account {
    /// Creates a page of zeroes, and the file behind it.
    pub fn create() -> Result<(Self, OwnedFd), mapping::Error> {
        let file = create(SIZE as u64)?;
        match Self::map(&file) {
            Ok(account) => Ok((account, file)),
            Err(source) => Err(mapping::Error::System {
                what: "map",
                size: SIZE as u64,
                source,
            }),
        }
    }

    /// Maps the page of a file that another process created.
    pub fn map(file: &OwnedFd) -> io::Result<Self> {
        let size = File::from(file.try_clone()?).metadata()?.len();
        if size < SIZE as u64 {
            let text = format!("an account of {size} bytes has no room for all slices");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        Mapping::shared(file, 0, SIZE, Access::ReadWrite).map(Self)
    }

    fn page(&self) -> &Page {
        // SAFETY: the mapping is larger than the page's type, aligned, and lives as long as the
        // value; any bytes are valid numbers, and they are only changed atomically.
        unsafe { &*self.0.start().cast() }
    }

    /// The counters of machine code that is not charged.
    pub fn code(&self) -> &Counters {
        &self.page().code
    }

    /// Total bytes of all slices.
    pub fn total(&self) -> u64 {
        self.page().memory.total()
    }

    /// Adds bytes to a slice's counter as [`Counters::add`] does.
    pub fn add(&self, slice: u32, bytes: u64, limit: u64) -> bool {
        self.page().memory.add(slice, bytes, limit)
    }

    /// Subtracts bytes from a slice's counter.
    pub fn remove(&self, slice: u32, bytes: u64) {
        self.page().memory.remove(slice, bytes);
    }

    /// Sets a slice's counter to its worker's own count of bytes.
    pub fn set(&self, slice: u32, bytes: u64) {
        self.page().memory.set(slice, bytes);
    }

    /// Resets a slice's counters: its worker has ended.
    pub fn clear(&self, slice: u32) {
        self.page().memory.set(slice, 0);
        self.page().code.set(slice, 0);
    }
}

impl Counters {
    /// Total bytes of all slices.
    pub fn total(&self) -> u64 {
        let numbers = self.0.iter();
        numbers.fold(0, |sum, number| {
            sum.saturating_add(number.load(Ordering::SeqCst))
        })
    }

    /// Adds bytes to a slice's counter if the total of all slices then stays within `limit`.
    /// Returns whether it did.
    ///
    /// Two slices that ask at the same time for the last bytes may both be refused. A slice that
    /// asks for more than is left does not cause the refusal of any other.
    pub fn add(&self, slice: u32, bytes: u64, limit: u64) -> bool {
        let Some(number) = self.0.get(slice as usize) else {
            return false;
        };
        let after = self.total().checked_add(bytes);
        if after.is_none_or(|after| after > limit) {
            return false;
        }
        // Wraps only if someone other than the slice's worker has written there.
        number.fetch_add(bytes, Ordering::SeqCst);
        let fits = self.total() <= limit;
        if !fits {
            number.fetch_sub(bytes, Ordering::SeqCst);
        }
        fits
    }

    /// Subtracts bytes from a slice's counter.
    pub fn remove(&self, slice: u32, bytes: u64) {
        if let Some(number) = self.0.get(slice as usize) {
            number.fetch_sub(bytes, Ordering::SeqCst);
        }
    }

    fn set(&self, slice: u32, bytes: u64) {
        if let Some(number) = self.0.get(slice as usize) {
            number.store(bytes, Ordering::SeqCst);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_slices_have_together_is_limited_and_ends_with_their_workers() {
        let (machine, file) = Account::create().unwrap();
        let [first, second] = [(); 2].map(|()| Account::map(&file).unwrap());
        assert!(first.add(0, 60, 100));
        assert!(!second.add(1, 41, 100));
        assert!(second.add(1, 40, 100));
        assert_eq!(machine.total(), 100);
        first.remove(0, 10);
        assert!(second.add(1, 10, 100));
        assert!(second.code().add(1, 7, 7) && !first.code().add(0, 1, 7));
        machine.clear(1);
        assert_eq!((first.total(), first.code().total()), (50, 0));
        assert!(!first.add(MOST_SLICES, 1, 100));
    }

    #[test]
    fn who_asks_for_too_much_has_nobody_else_refused() {
        let (account, file) = Account::create().unwrap();
        let greedy = Account::map(&file).unwrap();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    assert!(!greedy.add(0, 101, 100));
                }
            });
            let granted = (0..100_000).all(|_| {
                let granted = account.add(1, 1, 100);
                account.remove(1, u64::from(granted));
                granted
            });
            done.store(true, Ordering::Relaxed);
            assert!(granted);
        });
    }

    #[test]
    fn numbers_that_make_no_sense_refuse_and_do_no_harm() {
        let (account, _file) = Account::create().unwrap();
        account.remove(3, 1);
        assert_eq!(account.total(), u64::MAX);
        assert!(!account.add(0, 1, u64::MAX - 1));
        account.clear(3);
        assert!(account.add(0, 1, 1));
    }

    #[test]
    fn a_file_that_is_too_short_is_refused() {
        let file = create(SIZE as u64 / 2).unwrap();
        assert!(Account::map(&file).is_err());
    }
}
