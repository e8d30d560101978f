//! A launched kernel, and what it prints.

use std::{sync::Mutex, time::Instant};

use super::{
    memory::{Bytes, View},
    program::Program,
};

/// Text printed by kernels, kept until the host waits for them.
#[derive(Debug, Default)]
pub struct Output(Mutex<Vec<u8>>);

impl Output {
    /// Adds text. What exceeds a megabyte is lost, as on the device.
    pub fn say(&self, text: &[u8]) {
        if let Ok(mut all) = self.0.lock()
            && all.len() + text.len() <= 1 << 20
        {
            all.extend(text);
        }
    }

    /// Takes all text.
    pub fn take(&self) -> Vec<u8> {
        self.0
            .lock()
            .map(|mut all| std::mem::take(&mut *all))
            .unwrap_or_default()
    }
}

/// A launched kernel.
pub struct Launch<'a> {
    /// The program to execute.
    pub program: &'a Program,
    /// Number of blocks in each dimension.
    pub grid: [u32; 3],
    /// Threads per block in each dimension.
    pub block: [u32; 3],
    /// Size of dynamic shared memory in bytes.
    pub dynamic: u64,
    /// The parameters in the kernel's layout.
    pub parameters: Bytes,
    /// Device memory.
    pub memory: View,
    /// Output of the kernel.
    pub output: &'a Output,
    /// Sequence number of the launch.
    pub id: u64,
    /// Time of its start.
    pub started: Instant,
    /// Whether all blocks run concurrently, so that they may wait for each other.
    pub cooperative: bool,
}

impl Launch<'_> {
    /// Number of threads per block.
    pub fn threads(&self) -> u32 {
        self.block.iter().product()
    }
}
