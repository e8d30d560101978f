//! How much device memory an application may have.
//!
//! A charge is made before the driver sees an allocation, and given back when the driver says that
//! the memory object is really gone: kernels, sub-buffers and commands keep one that its
//! application has released.

use std::{
    ffi::c_void,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::opencl::{api::Handle, codes};

/// Bytes that may be had, and that are.
#[derive(Debug)]
pub struct Quota {
    limit: u64,
    used: AtomicU64,
}

/// Part of a quota; given back when it is dropped.
#[derive(Debug)]
pub struct Charge {
    quota: Arc<Quota>,
    bytes: u64,
}

impl Quota {
    /// A quota of so many bytes; without a limit if that is zero.
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self {
            limit: if limit == 0 { u64::MAX } else { limit },
            used: AtomicU64::new(0),
        })
    }

    /// How many bytes are had now.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Charges an allocation, or says by which code it is refused.
    pub fn charge(self: &Arc<Self>, bytes: u64) -> Result<Charge, i32> {
        let fits = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.limit);
        match self
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
        {
            Ok(_) => Ok(Charge {
                quota: Arc::clone(self),
                bytes,
            }),
            Err(_) => Err(codes::MEM_OBJECT_ALLOCATION_FAILURE),
        }
    }
}

impl Charge {
    /// As the driver's `user_data`, for [`gone`].
    pub fn into_raw(self) -> *mut c_void {
        Box::into_raw(Box::new(self)).cast()
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.quota.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// `clSetMemObjectDestructorCallback`'s callback: the memory is free again.
///
/// # Safety
/// `data` comes from [`Charge::into_raw`] and is passed once.
pub unsafe extern "C" fn gone(_: Handle, data: *mut c_void) {
    // SAFETY: the driver calls each registered callback once.
    drop(unsafe { Box::from_raw(data.cast::<Charge>()) });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_until_something_is_given_back() {
        let quota = Quota::new(100);
        let first = quota.charge(60).unwrap();
        assert_eq!(
            quota.charge(41).unwrap_err(),
            codes::MEM_OBJECT_ALLOCATION_FAILURE
        );
        let second = quota.charge(40).unwrap();
        // SAFETY: the charge was just made.
        unsafe { gone(0, first.into_raw()) };
        quota.charge(60).unwrap();
        drop(second);
        assert!(quota.charge(u64::MAX).is_err());
    }

    #[test]
    fn without_a_limit_everything_fits_that_is_a_number() {
        let quota = Quota::new(0);
        let _most = quota.charge(u64::MAX).unwrap();
        assert!(quota.charge(1).is_err());
    }
}
