//! The cover: which part of the window the driver knows as host memory.
//!
//! Registering takes time for every page and holds it in RAM: the cover grows with what is used, by
//! as much as there was before. Copies are cut where two registrations meet.

use std::ffi::c_void;

use super::driver::{Api, cu};
use crate::{apis::cuda::codes, link::window::Window};

/// Size of the first registration in bytes; all are multiples of it.
const GRAIN: u64 = 8 << 20;
/// It does not grow ahead of its use by more than this, in bytes.
const AHEAD: u64 = 256 << 20;
/// `CU_MEMHOSTREGISTER_PORTABLE` and `CU_MEMHOSTREGISTER_DEVICEMAP`.
const FLAGS: u32 = 1 | 2;

/// What is registered.
#[derive(Debug, Default)]
pub(super) struct Cover {
    /// Where registrations end, counted from the start of the data.
    ends: Vec<u64>,
    /// The context that they were made in.
    context: u32,
    refused: bool,
}

impl Cover {
    /// Has the driver know the window up to the end of a stretch of its data. One comparison if it
    /// does. Whether it knows it.
    pub(super) fn reach(
        &mut self,
        api: &Api,
        window: &Window,
        context: u32,
        offset: u64,
        length: u64,
    ) -> bool {
        let end = (offset + length).saturating_sub(window.data());
        let until = self.ends.last().copied().unwrap_or(0);
        if end <= until || self.refused {
            return end <= until;
        }
        let next = (until + until.clamp(GRAIN, AHEAD))
            .max(end.next_multiple_of(GRAIN))
            .min(window.size() - window.data());
        let size = next - until;
        let Some(pointer) = window.at(window.data() + until, size) else {
            return false;
        };
        let pointer = pointer.cast::<c_void>();
        match cu!(api, cuMemHostRegister_v2(pointer, size as usize, FLAGS)) {
            0 | codes::HOST_MEMORY_ALREADY_REGISTERED => {
                self.ends.push(next);
                self.context = context;
                true
            }
            code => {
                // Copies are slower then, and kernels cannot use it.
                self.refused = true;
                crate::note!(
                    "gantry-accel: the driver does not register more than {} MiB of the window \
                     (code {code}): copies beyond are slower",
                    until >> 20
                );
                false
            }
        }
    }

    /// A context has gone, and what was registered in it.
    pub(super) fn forget(&mut self, context: u32) {
        if self.context == context {
            self.ends.clear();
        }
    }

    /// A stretch of the window's data, cut where two registrations meet.
    pub(super) fn parts(
        &self,
        window: &Window,
        offset: u64,
        length: u64,
    ) -> impl Iterator<Item = (u64, u64)> {
        let (start, end) = (window.data(), offset + length);
        let cuts = self.ends.iter().map(move |cut| start + cut);
        let mut cuts = cuts
            .filter(move |cut| (offset + 1..end).contains(cut))
            .chain([end]);
        let mut at = offset;
        std::iter::from_fn(move || {
            let next = cuts.next()?;
            let part = (at, next - at);
            at = next;
            Some(part)
        })
    }
}
