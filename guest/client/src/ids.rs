//! Object numbers, chosen in this process so that creating an object needs no answer.

use std::sync::Mutex;

use base::Unpoisoned;

/// The numbers of one kind of object. They are dense: a number that was returned is reused first,
/// the most recently returned one before all others.
#[derive(Debug, Default)]
pub struct Numbers(Mutex<(u32, Vec<u32>)>);

impl Numbers {
    /// Allocates an unused number.
    pub fn take(&self) -> u32 {
        let mut numbers = self.0.lock_unpoisoned();
        numbers.1.pop().unwrap_or_else(|| {
            numbers.0 += 1;
            numbers.0 - 1
        })
    }

    /// Returns a number.
    pub fn give(&self, number: u32) {
        let mut numbers = self.0.lock_unpoisoned();
        numbers.1.push(number);
    }
}
