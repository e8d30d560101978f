//! Numbers for objects, chosen here so that creating one needs no answer.

use std::sync::Mutex;

use base::Unpoisoned;

/// Numbers of one kind, dense: the smallest that were given back first.
#[derive(Debug, Default)]
pub struct Numbers(Mutex<(u32, Vec<u32>)>);

impl Numbers {
    /// A number that nobody has.
    pub fn take(&self) -> u32 {
        let mut numbers = self.0.lock_unpoisoned();
        numbers.1.pop().unwrap_or_else(|| {
            numbers.0 += 1;
            numbers.0 - 1
        })
    }

    /// Gives a number back.
    pub fn give(&self, number: u32) {
        let mut numbers = self.0.lock_unpoisoned();
        numbers.1.push(number);
    }
}
