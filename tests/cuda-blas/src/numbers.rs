//! Types of numbers in memory, and their addresses.

use crate::{EXECUTION_FAILED, INVALID_VALUE, NOT_SUPPORTED, Outcome, stream};

/// A type of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    Half,
    Brain,
    Single,
    Double,
}

impl Type {
    /// The type of a `cudaDataType`.
    pub fn of(number: u32) -> Outcome<Self> {
        match number {
            0 => Ok(Self::Single),
            1 => Ok(Self::Double),
            2 => Ok(Self::Half),
            14 => Ok(Self::Brain),
            _ => Err(NOT_SUPPORTED),
        }
    }

    /// The type of alpha and beta for a `cublasComputeType_t`.
    pub fn of_compute(number: u32) -> Outcome<Self> {
        match number {
            64 | 65 => Ok(Self::Half),
            68 | 69 | 74 | 75 | 77 => Ok(Self::Single),
            70 | 71 => Ok(Self::Double),
            _ => Err(NOT_SUPPORTED),
        }
    }

    /// Size in bytes.
    pub fn size(self) -> u64 {
        match self {
            Self::Half | Self::Brain => 2,
            Self::Single => 4,
            Self::Double => 8,
        }
    }

    /// Reads the number at an address.
    ///
    /// # Safety
    /// There is a number of this type.
    pub unsafe fn load(self, at: u64) -> f64 {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::Half => f64::from(from_half((at as *const u16).read_unaligned())),
                Self::Brain => {
                    let bits = u32::from((at as *const u16).read_unaligned()) << 16;
                    f64::from(f32::from_bits(bits))
                }
                Self::Single => f64::from((at as *const f32).read_unaligned()),
                Self::Double => (at as *const f64).read_unaligned(),
            }
        }
    }

    /// Writes a number to an address.
    ///
    /// # Safety
    /// There is room for a number of this type.
    pub unsafe fn store(self, at: u64, value: f64) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::Half => (at as *mut u16).write_unaligned(to_half(value as f32)),
                Self::Brain => {
                    // Rounds to nearest, ties to even.
                    let bits = (value as f32).to_bits();
                    let bits = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
                    (at as *mut u16).write_unaligned((bits >> 16) as u16);
                }
                Self::Single => (at as *mut f32).write_unaligned(value as f32),
                Self::Double => (at as *mut f64).write_unaligned(value),
            }
        }
    }
}

fn from_half(bits: u16) -> f32 {
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    sign * match exponent {
        0 => fraction * 2f32.powi(-24),
        31 if fraction == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        _ => (1.0 + fraction / 1024.0) * 2f32.powi(exponent - 15),
    }
}

fn to_half(value: f32) -> u16 {
    let sign = ((value.to_bits() >> 31) as u16) << 15;
    let size = value.abs();
    if size.is_nan() {
        return sign | 0x7e00;
    }
    if size >= 65520.0 {
        return sign | 0x7c00;
    }
    // The distance between neighboring values, at least that of the smallest ones. An integral
    // multiple of it is exact.
    let exponent = ((size.to_bits() >> 23) as i32 - 127).max(-14);
    let steps = (size * 2f32.powi(10 - exponent)).round_ties_even() as u16;
    // A carry goes into the exponent.
    sign | (((exponent + 14) as u16) << 10).wrapping_add(steps)
}

/// Numbers in the device's memory: a column-major matrix, or a vector.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    pub of: Type,
    pub at: u64,
    /// Distance from one column to the next, in numbers.
    pub leading: i64,
    /// Distance from one matrix of a batch to the next, in numbers.
    pub stride: i64,
}

impl Matrix {
    /// The address of an element.
    pub fn place(&self, row: i64, column: i64, batch: i64) -> u64 {
        let index = row + column * self.leading + batch * self.stride;
        self.at.wrapping_add_signed(index * self.of.size() as i64)
    }

    /// Checks that all of these rows and columns lie in the device's memory.
    pub fn check(&self, rows: i64, columns: i64, batch: i64) -> Outcome {
        if rows < 0 || columns < 0 || batch < 0 || self.leading < rows.max(1) || self.stride < 0 {
            return Err(INVALID_VALUE);
        }
        if rows == 0 || columns == 0 || batch == 0 {
            return Ok(());
        }
        let last = (columns - 1)
            .checked_mul(self.leading)
            .and_then(|at| at.checked_add((batch - 1).checked_mul(self.stride)?))
            .and_then(|at| at.checked_add(rows))
            .and_then(|count| count.checked_mul(self.of.size() as i64));
        check(self.at, last.ok_or(INVALID_VALUE)?.unsigned_abs())
    }
}

/// Checks that a range lies in the device's memory, or in host memory known to the driver.
pub fn check(at: u64, size: u64) -> Outcome {
    let (start, length) = stream::allocation(at).ok_or(EXECUTION_FAILED)?;
    let end = at.checked_add(size).ok_or(EXECUTION_FAILED)?;
    if end > start.saturating_add(length) {
        return Err(EXECUTION_FAILED);
    }
    Ok(())
}

/// A number of the host's, read when the call is made, or one of the device's.
#[derive(Clone, Copy, Debug)]
pub enum Scalar {
    Here(f64),
    There(Type, u64),
}

impl Scalar {
    /// The number at an address of the device or of the host.
    ///
    /// # Safety
    /// A host address has a number of this type.
    pub unsafe fn at(of: Type, at: *const std::ffi::c_void, on_device: bool) -> Outcome<Self> {
        if on_device {
            check(at as u64, of.size())?;
            return Ok(Self::There(of, at as u64));
        }
        if at.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise.
        Ok(Self::Here(unsafe { of.load(at as u64) }))
    }

    /// Its value at the time when the work is done.
    ///
    /// # Safety
    /// The device's memory still exists.
    pub unsafe fn value(self) -> f64 {
        match self {
            Self::Here(value) => value,
            // SAFETY: the caller's promise.
            Self::There(of, at) => unsafe { of.load(at) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_numbers_are_rounded_to_the_nearest() {
        for bits in (0..0x7c00u16).chain(0x8000..0xfc00) {
            assert_eq!(to_half(from_half(bits)), bits, "{bits:#x}");
        }
        assert_eq!(to_half(1.0 + 1.0 / 2048.0), 0x3c00);
        assert_eq!(to_half(1.0 + 3.0 / 2048.0), 0x3c02);
        assert_eq!(to_half(1e6), 0x7c00);
        let mut place = 0u16;
        let at = (&raw mut place) as u64;
        // SAFETY: a place for a number.
        unsafe {
            Type::Brain.store(at, 1.0 / 3.0);
            assert_eq!(place, 0x3eab);
            assert_eq!(Type::Brain.load(at), f64::from(f32::from_bits(0x3eab_0000)));
        }
    }
}
