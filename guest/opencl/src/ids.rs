//! Numbers for objects, chosen here so that creating one needs no answer.

use std::sync::{Mutex, PoisonError};

/// Numbers of one kind, dense: the smallest that were given back first.
#[derive(Debug, Default)]
pub struct Numbers(Mutex<(u32, Vec<u32>)>);

impl Numbers {
    /// A number that nobody has.
    pub fn take(&self) -> u32 {
        let mut numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        numbers.1.pop().unwrap_or_else(|| {
            numbers.0 += 1;
            numbers.0 - 1
        })
    }

    /// Gives a number back.
    pub fn give(&self, number: u32) {
        let mut numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        numbers.1.push(number);
    }
}

/// Numbers of all kinds.
#[derive(Debug, Default)]
pub struct Ids {
    pub sub_devices: Numbers,
    pub contexts: Numbers,
    pub queues: Numbers,
    pub mems: Numbers,
    pub samplers: Numbers,
    pub programs: Numbers,
    pub kernels: Numbers,
    pub events: Numbers,
}
