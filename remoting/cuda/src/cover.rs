//! The cover: the parts of the window that are registered with the driver as host memory.
//!
//! Registration takes time for every page and pins it in RAM. The region for copies therefore grows ahead of its use by
//! as much as is already registered; pinned memory, which lies elsewhere, is registered exactly. Copies are split where
//! two parts meet; a graph node cannot be split.

use std::{collections::BTreeMap, ffi::c_void};

use remoting_proto::apis::cuda::codes;
use remoting_transport::window::Window;

use super::driver::{Api, cu};

/// Parts begin and end at multiples of this, in bytes, unless they meet another part. This keeps their number small.
const GRAIN: u64 = 2 << 20;
/// Minimum size that is registered for copies, in bytes.
const LEAST: u64 = 8 << 20;
/// Maximum growth ahead of use, in bytes.
const AHEAD: u64 = 256 << 20;
/// `CU_MEMHOSTREGISTER_PORTABLE` and `CU_MEMHOSTREGISTER_DEVICEMAP`.
const FLAGS: u32 = 1 | 2;

/// How much to register where something is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    /// Just the requested range.
    Exact,
    /// As much again as is already registered.
    Ahead,
}

/// A registered part.
#[derive(Clone, Copy, Debug)]
struct Part {
    end: u64,
    /// The context in which it was registered, and with which its registration ends.
    context: u32,
}

/// The registered parts.
#[derive(Debug, Default)]
pub(super) struct Cover {
    /// Parts, keyed by their starts, relative to the start of the window's data.
    parts: BTreeMap<u64, Part>,
    /// Total size of the parts, in bytes.
    size: u64,
    refused: bool,
}

impl Cover {
    /// The part that contains an offset.
    fn part(&self, at: u64) -> Option<(u64, u64)> {
        let (start, part) = self.parts.range(..=at).next_back()?;
        (at < part.end).then_some((*start, part.end))
    }

    /// The next range to register on the way to a fully registered range; `None` if it already is.
    fn missing(&self, (start, end): (u64, u64), extent: Extent, all: u64) -> Option<(u64, u64)> {
        let mut at = start;
        while let Some((_, until)) = self.part(at) {
            at = until;
        }
        if at >= end {
            return None;
        }
        let before = self
            .parts
            .range(..=at)
            .next_back()
            .map_or(0, |(_, part)| part.end);
        let behind = self
            .parts
            .range(at..)
            .next()
            .map_or(all, |(start, _)| *start);
        let from = (at / GRAIN * GRAIN).max(before);
        let ahead = match extent {
            Extent::Exact => 0,
            Extent::Ahead => self.size.clamp(LEAST, AHEAD),
        };
        let to = end.max(from + ahead).next_multiple_of(GRAIN);
        Some((from, to.min(behind)))
    }

    /// Registers all of a range of the window's data with the driver. Takes a single lookup if it is registered
    /// already.
    ///
    /// # Errors
    /// The driver's error: a part of the range is not registered. Copies through it go on, in another way.
    pub(super) fn reach(
        &mut self,
        api: &Api,
        window: &Window,
        context: u32,
        (offset, length): (u64, u64),
        extent: Extent,
    ) -> Result<(), i32> {
        let all = window.size() - window.data();
        let start = offset.saturating_sub(window.data());
        let end = (offset + length).saturating_sub(window.data());
        while let Some((from, to)) = self.missing((start, end), extent, all) {
            let pointer = window.at(window.data() + from, to - from);
            let Some(pointer) = pointer.filter(|_| !self.refused) else {
                return Err(codes::OUT_OF_MEMORY);
            };
            let (pointer, size) = (pointer.cast::<c_void>(), (to - from) as usize);
            match cu!(api, cuMemHostRegister_v2(pointer, size, FLAGS)) {
                0 | codes::HOST_MEMORY_ALREADY_REGISTERED => self.add(from, to, context),
                code @ (codes::OUT_OF_MEMORY | codes::NOT_PERMITTED | codes::NOT_SUPPORTED) => {
                    // Copies are slower from now on, and kernels cannot access it.
                    self.refused = true;
                    base::note!(
                        "gantry-accel: the driver does not register more than {} MiB of the window \
                         (code {code}): copies beyond are slower",
                        self.size >> 20
                    );
                }
                // Another error is not about this memory: the call that needs it reports it.
                code => return Err(code),
            }
        }
        Ok(())
    }

    fn add(&mut self, from: u64, to: u64, context: u32) {
        self.parts.insert(from, Part { end: to, context });
        self.size += to - from;
    }

    /// Whether all of a range of the window's data is registered.
    pub(super) fn holds(&self, window: &Window, offset: u64, length: u64) -> bool {
        let (mut at, end) = (
            offset.saturating_sub(window.data()),
            (offset + length).saturating_sub(window.data()),
        );
        while let Some((_, until)) = self.part(at).filter(|_| at < end) {
            at = until;
        }
        at >= end
    }

    /// The contexts in which the parts of a range of the window's data were registered.
    pub(super) fn registrars(
        &self,
        window: &Window,
        offset: u64,
        length: u64,
    ) -> impl Iterator<Item = u32> {
        let parts = self.parts(window, offset, length);
        let first = window.data();
        parts.filter_map(move |(at, _)| {
            let (_, part) = self.parts.range(..=at.saturating_sub(first)).next_back()?;
            (at.saturating_sub(first) < part.end).then_some(part.context)
        })
    }

    /// Whether a range of the window's data spans two parts, or would if all of it were registered.
    pub(super) fn splits(&self, window: &Window, offset: u64, length: u64) -> bool {
        let start = offset.saturating_sub(window.data());
        self.split(start, start + length)
    }

    fn split(&self, start: u64, end: u64) -> bool {
        match self.part(start) {
            Some((_, until)) => until < end,
            None => self.parts.range(start..end).next().is_some(),
        }
    }

    /// Forgets the parts that were registered in a context that has been destroyed.
    pub(super) fn forget(&mut self, context: u32) {
        self.parts.retain(|_, part| part.context != context);
        let sizes = self.parts.iter().map(|(start, part)| part.end - start);
        self.size = sizes.sum();
    }

    /// A range of the window's data, split where two parts meet.
    pub(super) fn parts(
        &self,
        window: &Window,
        offset: u64,
        length: u64,
    ) -> impl Iterator<Item = (u64, u64)> {
        let (first, end) = (window.data(), offset + length);
        let mut at = offset;
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let place = at.saturating_sub(first);
            let until = match self.part(place) {
                Some((_, until)) => first + until,
                // An unregistered piece, up to the next part.
                None => self
                    .parts
                    .range(place..)
                    .next()
                    .map_or(end, |(next, _)| first + next),
            };
            let part = (at, until.min(end) - at);
            at += part.1;
            Some(part)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const ALL: u64 = 2048 * MIB;

    impl Cover {
        /// Registers as `reach` does, with a driver that accepts everything.
        fn grow(&mut self, start: u64, end: u64, extent: Extent) {
            while let Some((from, to)) = self.missing((start, end), extent, ALL) {
                self.add(from, to, 1);
            }
        }

        fn all(&self) -> Vec<(u64, u64)> {
            let parts = self.parts.iter();
            parts
                .map(|(start, part)| (start / MIB, part.end / MIB))
                .collect()
        }
    }

    #[test]
    fn what_copies_go_through_grows_ahead_and_pinned_memory_is_registered_as_it_is() {
        let mut cover = Cover::default();
        cover.grow(0, 1, Extent::Ahead);
        assert_eq!(cover.all(), [(0, 8)]);
        // Pinned memory at the other end, with a size that is no multiple of the grain.
        cover.grow(ALL - 65 * MIB - 4096, ALL, Extent::Exact);
        assert_eq!(cover.all(), [(0, 8), (1982, 2048)]);
        assert_eq!(cover.part(ALL - 1), Some((1982 * MIB, ALL)));
        cover.grow(7 * MIB, 9 * MIB, Extent::Ahead);
        assert_eq!(cover.all(), [(0, 8), (8, 82), (1982, 2048)]);
        // Nothing is registered twice.
        cover.grow(80 * MIB, ALL, Extent::Ahead);
        assert_eq!(cover.all(), [(0, 8), (8, 82), (82, 1982), (1982, 2048)]);
        cover.grow(0, ALL, Extent::Exact);
        assert_eq!(cover.parts.len(), 4);
        assert_eq!(cover.size, ALL);
    }

    #[test]
    fn parts_end_with_the_context_that_registered_them() {
        let mut cover = Cover::default();
        cover.add(0, 8 * MIB, 1);
        cover.add(8 * MIB, 10 * MIB, 2);
        cover.add(10 * MIB, 14 * MIB, 1);
        cover.forget(1);
        assert_eq!((cover.all(), cover.size), (vec![(8, 10)], 2 * MIB));
    }

    #[test]
    fn a_stretch_is_split_where_parts_meet_and_where_one_would_begin() {
        let mut cover = Cover::default();
        cover.grow(0, 1, Extent::Ahead);
        assert!(!cover.split(0, 8 * MIB) && !cover.split(8 * MIB, 90 * MIB));
        assert!(cover.split(4096, 64 * MIB));
        cover.grow(16 * MIB, 32 * MIB, Extent::Exact);
        assert!(cover.split(9 * MIB, 17 * MIB) && !cover.split(9 * MIB, 16 * MIB));
        assert!(!cover.split(17 * MIB, 32 * MIB) && cover.split(17 * MIB, 33 * MIB));
    }
}
