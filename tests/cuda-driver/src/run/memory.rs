//! Addresses that a kernel may access, and accesses to them.

use std::{
    cell::Cell,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering},
    },
};

use super::{Fault, FaultKind, program::Atomic};
use crate::{
    ptx::Type,
    run::{
        arith,
        program::{Binary, Mode},
    },
};

/// Start of the generic addresses of a block's shared memory.
pub const SHARED_WINDOW: u64 = 0x1000_0000_0000;
/// Start of the generic addresses of a thread's local memory.
pub const LOCAL_WINDOW: u64 = 0x1100_0000_0000;
/// Generic address of kernel parameters, for kernels that take their address.
pub const PARAM_WINDOW: u64 = 0x1200_0000_0000;
/// Functions have addresses, too: this base plus a number.
pub const CODE_WINDOW: u64 = 0x1300_0000_0000;
/// Size of a window in bytes.
pub const WINDOW: u64 = 1 << 32;

/// Address ranges with start and end, in ascending order.
pub type Ranges = Arc<Vec<(u64, u64)>>;

/// Device memory as a kernel sees it.
pub struct View {
    ranges: Ranges,
    last: Cell<(u64, u64)>,
}

impl View {
    /// Creates a view. Memory in these ranges must stay mapped, readable and writable while the
    /// view is used.
    ///
    /// # Safety
    /// The caller keeps that promise: the driver waits for kernels before it unmaps anything.
    pub unsafe fn new(ranges: Ranges) -> Self {
        Self {
            ranges,
            last: Cell::new((0, 0)),
        }
    }

    /// Checks that all bytes are in one range.
    fn check(&self, at: u64, size: u64) -> Result<(), Fault> {
        let within = |(start, end): (u64, u64)| at >= start && at < end && end - at >= size;
        if within(self.last.get()) {
            return Ok(());
        }
        let after = self.ranges.partition_point(|(start, _)| *start <= at);
        if let Some(range) = after
            .checked_sub(1)
            .and_then(|index| self.ranges.get(index))
            && within(*range)
        {
            self.last.set(*range);
            return Ok(());
        }
        let what = format!("{size} bytes at {at:#x}, which nobody has allocated");
        Err(Fault::new(FaultKind::IllegalAddress, what))
    }

    fn aligned(&self, at: u64, size: u64) -> Result<(), Fault> {
        if !at.is_multiple_of(size) {
            return Err(Fault::new(
                FaultKind::Misaligned,
                format!("{size} bytes at {at:#x}"),
            ));
        }
        self.check(at, size)
    }

    /// Reads 1, 2, 4 or 8 bytes.
    ///
    /// # Errors
    /// The address is not aligned or not allocated.
    pub fn load(&self, at: u64, size: u8) -> Result<u64, Fault> {
        self.aligned(at, u64::from(size))?;
        // SAFETY: the bytes were checked to be mapped (see `new`) and aligned. Others may write
        // them at the same time, hence atomics.
        Ok(unsafe {
            match size {
                1 => u64::from((*(at as *const AtomicU8)).load(Ordering::Relaxed)),
                2 => u64::from((*(at as *const AtomicU16)).load(Ordering::Relaxed)),
                4 => u64::from((*(at as *const AtomicU32)).load(Ordering::Relaxed)),
                _ => (*(at as *const AtomicU64)).load(Ordering::Relaxed),
            }
        })
    }

    /// Writes 1, 2, 4 or 8 bytes.
    ///
    /// # Errors
    /// The address is not aligned or not allocated.
    pub fn store(&self, at: u64, size: u8, value: u64) -> Result<(), Fault> {
        self.aligned(at, u64::from(size))?;
        // SAFETY: as in `load`. The value is truncated to the size.
        unsafe {
            match size {
                1 => (*(at as *const AtomicU8)).store(value as u8, Ordering::Relaxed),
                2 => (*(at as *const AtomicU16)).store(value as u16, Ordering::Relaxed),
                4 => (*(at as *const AtomicU32)).store(value as u32, Ordering::Relaxed),
                _ => (*(at as *const AtomicU64)).store(value, Ordering::Relaxed),
            }
        }
        Ok(())
    }

    /// Replaces a value of 4 or 8 bytes by the result of an operation, and returns the old value.
    ///
    /// # Errors
    /// The address is not aligned or not allocated.
    pub fn atomic(&self, at: u64, of: Type, op: Atomic, b: u64, c: u64) -> Result<u64, Fault> {
        self.aligned(at, u64::from(of.size()))?;
        // The operation always has a result, so both updates succeed.
        let order = Ordering::SeqCst;
        // SAFETY: as in `load`.
        let old = unsafe {
            if of.size() == 4 {
                let update = |old: u32| Some(modify(of, op, u64::from(old), b, c) as u32);
                (*(at as *const AtomicU32))
                    .fetch_update(order, order, update)
                    .map(u64::from)
                    .unwrap_or(0)
            } else {
                let update = |old: u64| Some(modify(of, op, old, b, c));
                (*(at as *const AtomicU64))
                    .fetch_update(order, order, update)
                    .unwrap_or(0)
            }
        };
        Ok(old)
    }
}

/// The result of an atomic operation.
pub fn modify(of: Type, op: Atomic, old: u64, b: u64, c: u64) -> u64 {
    let mode = Mode::default();
    let (own, b) = (arith::masked(of, old), arith::masked(of, b));
    match op {
        Atomic::Add => arith::binary(Binary::Add, of, mode, own, b),
        Atomic::And => own & b,
        Atomic::Or => own | b,
        Atomic::Xor => own ^ b,
        Atomic::Min => arith::binary(Binary::Min, of, mode, own, b),
        Atomic::Max => arith::binary(Binary::Max, of, mode, own, b),
        Atomic::Inc if own >= b => 0,
        Atomic::Inc => own + 1,
        Atomic::Dec if own == 0 || own > b => b,
        Atomic::Dec => own - 1,
        Atomic::Exchange => b,
        Atomic::CompareAndSwap if own == b => arith::masked(of, c),
        Atomic::CompareAndSwap => own,
    }
}

/// Memory of a block or a thread.
#[derive(Debug, Default)]
pub struct Bytes(pub Vec<u8>);

impl Bytes {
    fn place(&self, at: u64, size: u8, whose: &str) -> Result<std::ops::Range<usize>, Fault> {
        if !at.is_multiple_of(u64::from(size)) {
            let what = format!("{size} bytes at {at:#x} of {whose} memory");
            return Err(Fault::new(FaultKind::Misaligned, what));
        }
        let start = usize::try_from(at).unwrap_or(usize::MAX);
        match start.checked_add(usize::from(size)) {
            Some(end) if end <= self.0.len() => Ok(start..end),
            _ => {
                let what = format!(
                    "{size} bytes at {at:#x} of {} bytes of {whose} memory",
                    self.0.len()
                );
                Err(Fault::new(FaultKind::IllegalAddress, what))
            }
        }
    }

    /// Reads 1, 2, 4 or 8 bytes.
    ///
    /// # Errors
    /// They are not aligned, or do not exist.
    pub fn load(&self, at: u64, size: u8, whose: &str) -> Result<u64, Fault> {
        let place = self.place(at, size, whose)?;
        let mut bytes = [0; 8];
        bytes[..usize::from(size)].copy_from_slice(&self.0[place]);
        Ok(u64::from_le_bytes(bytes))
    }

    /// Writes 1, 2, 4 or 8 bytes.
    ///
    /// # Errors
    /// They are not aligned, or do not exist.
    pub fn store(&mut self, at: u64, size: u8, value: u64, whose: &str) -> Result<(), Fault> {
        let place = self.place(at, size, whose)?;
        self.0[place].copy_from_slice(&value.to_le_bytes()[..usize::from(size)]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_ends_where_allocations_end() {
        let memory = [7u64; 4];
        let start = memory.as_ptr() as u64;
        // SAFETY: the array lives until the test ends.
        let view = unsafe { View::new(Arc::new(vec![(start, start + 24)])) };
        assert_eq!(view.load(start, 8), Ok(7));
        assert_eq!(view.load(start + 16, 4), Ok(7));
        let kind = |at, size| view.load(at, size).map_err(|fault| fault.kind);
        assert_eq!(kind(start + 24, 1), Err(FaultKind::IllegalAddress));
        assert_eq!(kind(start - 8, 8), Err(FaultKind::IllegalAddress));
        assert_eq!(kind(start + 2, 4), Err(FaultKind::Misaligned));
        assert_eq!(kind(0, 8), Err(FaultKind::IllegalAddress));
    }

    #[test]
    fn counters_wrap_as_the_device_has_it() {
        let of = Type::U(4);
        assert_eq!(modify(of, Atomic::Inc, 3, 3, 0), 0);
        assert_eq!(modify(of, Atomic::Inc, 2, 3, 0), 3);
        assert_eq!(modify(of, Atomic::Dec, 0, 3, 0), 3);
        assert_eq!(modify(of, Atomic::Dec, 9, 3, 0), 3);
        assert_eq!(modify(of, Atomic::CompareAndSwap, 5, 5, 8), 8);
        assert_eq!(
            modify(Type::S(4), Atomic::Min, 0xffff_ffff, 1, 0),
            0xffff_ffff
        );
    }
}
