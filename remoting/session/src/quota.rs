//! Limits on the device memory of an application, alone or together with others of its machine.
//!
//! A charge is made before the driver sees an allocation, and returned when the driver reports that the memory object
//! is really gone: kernels, sub-buffers and commands keep an object that its application has released.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use remoting_transport::account::Account;

/// The application's remaining device memory is too small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the application has as much device memory as it may have")]
pub struct Exceeded;

/// The limit, and the bytes in use.
#[derive(Debug)]
pub struct Quota {
    limit: u64,
    used: AtomicU64,
    /// Bytes of machine code that are not charged.
    uncharged: AtomicU64,
    /// The account for all applications of a machine, and this one's slice in it.
    shared: Option<(Account, u32)>,
    /// Whether the previous process has already charged what is charged now to the account.
    inherits: AtomicBool,
}

/// A part of a quota; returned on drop.
#[derive(Debug)]
pub struct Charge {
    quota: Arc<Quota>,
    bytes: u64,
}

impl Quota {
    /// A quota of `limit` bytes; unlimited if that is zero.
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self {
            limit: if limit == 0 { u64::MAX } else { limit },
            used: AtomicU64::new(0),
            uncharged: AtomicU64::new(0),
            shared: None,
            inherits: AtomicBool::new(false),
        })
    }

    /// A quota shared by all users of the account; unlimited if `limit` is zero.
    pub fn shared(limit: u64, account: Account, slice: u32) -> Arc<Self> {
        Arc::new(Self {
            limit: if limit == 0 { u64::MAX } else { limit },
            used: AtomicU64::new(0),
            uncharged: AtomicU64::new(0),
            shared: Some((account, slice)),
            inherits: AtomicBool::new(false),
        })
    }

    /// The number of bytes in use.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// The limit in bytes; `u64::MAX` if there is none.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// The number of bytes left, as far as this process can see.
    pub fn left(&self) -> u64 {
        let all = self
            .shared
            .as_ref()
            .map_or(0, |(account, _)| account.total());
        self.limit.saturating_sub(self.used().max(all))
    }

    /// Whether the account of a machine has what is charged from now on already: another process had
    /// it, and ends without giving it back.
    pub fn inherit(&self, inherits: bool) {
        self.inherits.store(inherits, Ordering::Relaxed);
    }

    /// The account of a machine has what is charged here, whatever somebody else has left there: for
    /// who goes on with an application whose allocations two processes have had for a while.
    pub fn level(&self) {
        if let Some((account, slice)) = &self.shared {
            account.set(*slice, self.used());
        }
    }

    /// Charges an allocation of so many bytes.
    pub fn charge(self: &Arc<Self>, bytes: u64) -> Result<Charge, Exceeded> {
        let fits = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.limit);
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .map_err(|_| Exceeded)?;
        if let Some((account, slice)) = &self.shared
            && !self.inherits.load(Ordering::Relaxed)
            && !account.add(*slice, bytes, self.limit)
        {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
            return Err(Exceeded);
        }
        Ok(Charge {
            quota: Arc::clone(self),
            bytes,
        })
    }

    /// Counts machine code that is not charged, as long as all who share the quota have no more than `most` bytes of it
    /// together.
    pub fn uncharge(self: &Arc<Self>, bytes: u64, most: u64) -> Option<Uncharged> {
        let fits = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= most);
        self.uncharged
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .ok()?;
        if let Some((account, slice)) = &self.shared
            && !account.code().add(*slice, bytes, most)
        {
            self.uncharged.fetch_sub(bytes, Ordering::Relaxed);
            return None;
        }
        Some(Uncharged {
            quota: Arc::clone(self),
            bytes,
        })
    }
}

/// Machine code that is not charged; given back on drop.
#[derive(Debug)]
pub struct Uncharged {
    quota: Arc<Quota>,
    bytes: u64,
}

impl Uncharged {
    /// Takes so many bytes, or all if there are fewer, as a value of their own.
    pub fn split(&mut self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Self {
            quota: Arc::clone(&self.quota),
            bytes,
        }
    }
}

impl Drop for Uncharged {
    fn drop(&mut self) {
        self.quota
            .uncharged
            .fetch_sub(self.bytes, Ordering::Relaxed);
        if let Some((account, slice)) = &self.quota.shared {
            account.code().remove(*slice, self.bytes);
        }
    }
}

impl Charge {
    /// How much it is.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes one of this and of another one of the same quota.
    pub fn join(&mut self, mut other: Self) {
        debug_assert!(Arc::ptr_eq(&self.quota, &other.quota));
        self.bytes += std::mem::take(&mut other.bytes);
    }

    /// Takes so many bytes, or all if there are fewer, as a charge of their own.
    pub fn split(&mut self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Self {
            quota: Arc::clone(&self.quota),
            bytes,
        }
    }

    /// Gives back what is more than so many bytes.
    pub fn shrink(&mut self, bytes: u64) {
        let rest = self.bytes.saturating_sub(bytes);
        self.bytes -= rest;
        drop(Self {
            quota: Arc::clone(&self.quota),
            bytes: rest,
        });
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.quota.used.fetch_sub(self.bytes, Ordering::Relaxed);
        if let Some((account, slice)) = &self.quota.shared {
            account.remove(*slice, self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_until_something_is_given_back() {
        let quota = Quota::new(100);
        let first = quota.charge(60).unwrap();
        assert_eq!(quota.charge(41).unwrap_err(), Exceeded);
        let second = quota.charge(40).unwrap();
        drop(first);
        quota.charge(60).unwrap();
        drop(second);
        assert!(quota.charge(u64::MAX).is_err());
    }

    #[test]
    fn charges_are_joined_and_given_back_in_parts() {
        let (_, file) = Account::create().unwrap();
        let account = Account::map(&file).unwrap();
        let quota = Quota::shared(100, Account::map(&file).unwrap(), 0);
        let mut all = quota.charge(30).unwrap();
        all.join(quota.charge(40).unwrap());
        assert_eq!((all.bytes(), quota.used(), account.total()), (70, 70, 70));
        all.shrink(80);
        assert_eq!(all.bytes(), 70);
        all.shrink(10);
        assert_eq!((all.bytes(), quota.used(), account.total()), (10, 10, 10));
        drop(all);
        assert_eq!((quota.used(), account.total()), (0, 0));
    }

    #[test]
    fn two_of_one_machine_share_their_quota() {
        let (machine, file) = Account::create().unwrap();
        let of = |slice| Quota::shared(100, Account::map(&file).unwrap(), slice);
        let (one, other) = (of(0), of(1));
        let first = one.charge(60).unwrap();
        assert!(other.charge(41).is_err());
        assert_eq!((other.used(), machine.total()), (0, 60));
        let _second = other.charge(40).unwrap();
        drop(first);
        assert_eq!(machine.total(), 40);
        one.charge(60).unwrap();
    }

    #[test]
    fn what_is_not_charged_is_limited_for_all_of_one_machine_together() {
        let (machine, file) = Account::create().unwrap();
        let of = |slice| Quota::shared(100, Account::map(&file).unwrap(), slice);
        let (one, other) = (of(0), of(1));
        let mut first = one.uncharge(6, 10).unwrap();
        let part = first.split(2);
        assert!(one.uncharge(5, 10).is_none() && other.uncharge(5, 10).is_none());
        let second = other.uncharge(4, 10).unwrap();
        drop(first);
        assert_eq!((machine.code().total(), machine.total()), (6, 0));
        assert!(one.uncharge(5, 10).is_none());
        drop((part, second));
        one.uncharge(10, 10).unwrap();
        assert_eq!(machine.code().total(), 0);
    }

    #[test]
    fn what_an_application_has_given_back_while_another_process_made_it_again_is_not_missing_twice()
    {
        let (machine, file) = Account::create().unwrap();
        let of = || Quota::shared(100, Account::map(&file).unwrap(), 0);
        let (source, destination) = (of(), of());
        let first = source.charge(60).unwrap();
        let _second = source.charge(20).unwrap();
        destination.inherit(true);
        let (again, _rest) = (
            destination.charge(60).unwrap(),
            destination.charge(20).unwrap(),
        );
        destination.inherit(false);
        drop(first);
        assert_eq!(machine.total(), 20);
        destination.level();
        drop(again);
        assert_eq!(machine.total(), 20);
    }

    #[test]
    fn without_a_limit_everything_fits_that_is_a_number() {
        let quota = Quota::new(0);
        let _most = quota.charge(u64::MAX).unwrap();
        assert!(quota.charge(1).is_err());
    }
}
