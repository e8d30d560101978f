//! The cover: the parts of the window that are registered with the driver as host memory.
//!
//! Registration takes time for every page and pins it in RAM. The region for copies therefore grows ahead of its use by
//! as much as is already registered; pinned memory, which lies elsewhere, is registered exactly. Copies are split where
//! two parts meet; a graph node cannot be split.
//!
//! A registration ends with the context in which it was made. Pinned memory of one context may lie in a part of another: it
//! is borrowed from there, and handed over to its own context when the other one ends. So are parts with places of graphs'
//! nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::c_void,
};

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
/// Maximum number of borrowed pins: a client that asks for more has them in tiny pieces.
const MOST_BORROWED: usize = 1 << 16;

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

/// Pinned memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pinned {
    /// Where it is in the window, in bytes.
    pub(super) range: (u64, u64),
    /// The context whose kernels use it.
    pub(super) context: u32,
    /// Its address on the device.
    pub(super) device: u64,
}

/// The registered parts.
#[derive(Debug, Default)]
pub(super) struct Cover {
    /// Parts, keyed by their starts, relative to the start of the window's data.
    parts: BTreeMap<u64, Part>,
    /// Total size of the parts, in bytes.
    size: u64,
    refused: bool,
    /// Pins that lie in parts of other contexts, keyed by their offsets. Those that the client has freed are among them until
    /// their place is used for others.
    borrowed: BTreeMap<u64, Pinned>,
    /// The contexts in whose parts there are any.
    lenders: Vec<u32>,
    /// Contexts that have graphs with places in a part of another, with the part's start. A graph uses them whenever it is
    /// launched, so they are known as long as the part and both contexts are there.
    places: BTreeSet<(u32, u64)>,
}

/// What is no longer registered, as the context has ended that had registered it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Orphans {
    /// Pinned memory of other contexts.
    pub(super) pins: Vec<Pinned>,
    /// Ranges of the window in which graphs of another context have places.
    pub(super) places: Vec<(u32, (u64, u64))>,
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

    /// Records pinned memory that is registered now. It takes the place of any that was there before.
    ///
    /// # Errors
    /// There is too much that is borrowed.
    pub(super) fn pin(&mut self, window: &Window, pinned: Pinned) -> Result<(), i32> {
        let (offset, length) = pinned.range;
        let end = offset + length;
        let is_there = |one: &Pinned| one.range.0 + one.range.1 > offset;
        // They do not overlap each other: those that overlap this are the last ones before its end.
        let gone: Vec<u64> = (self.borrowed.range(..end).rev())
            .map_while(|(at, one)| is_there(one).then_some(*at))
            .collect();
        for at in &gone {
            self.borrowed.remove(at);
        }
        let is_foreign = |registrar: u32| registrar != pinned.context;
        let is_borrowed = self.registrars(window, offset, length).any(is_foreign);
        if is_borrowed && self.borrowed.len() >= MOST_BORROWED {
            return Err(codes::OUT_OF_MEMORY);
        }
        if is_borrowed {
            self.borrowed.insert(offset, pinned);
        }
        match gone.is_empty() {
            true if is_borrowed => self.borrow(window, pinned),
            true => {}
            false => self.borrow_all(window),
        }
        Ok(())
    }

    /// Records that a graph of a context has a place in this range of the window's data.
    pub(super) fn place(&mut self, window: &Window, context: u32, (offset, length): (u64, u64)) {
        let start = offset.saturating_sub(window.data());
        let parts = self.parts.range(..start + length).rev();
        let parts = parts.take_while(|(_, part)| part.end > start);
        let foreign = parts.filter(|(_, part)| part.context != context);
        self.places
            .extend(foreign.map(|(start, _)| (context, *start)));
    }

    fn borrow(&mut self, window: &Window, pinned: Pinned) {
        let (offset, length) = pinned.range;
        let registrars: Vec<u32> = self.registrars(window, offset, length).collect();
        for registrar in registrars {
            if registrar != pinned.context && !self.lenders.contains(&registrar) {
                self.lenders.push(registrar);
            }
        }
    }

    fn borrow_all(&mut self, window: &Window) {
        self.lenders.clear();
        let all: Vec<Pinned> = self.borrowed.values().copied().collect();
        for pinned in all {
            self.borrow(window, pinned);
        }
    }

    /// The contexts, other than this one, in whose parts there is pinned memory of others. Kernels of all contexts may use
    /// it.
    pub(super) fn lenders(&self, context: u32) -> impl Iterator<Item = u32> {
        let lenders = self.lenders.iter().copied();
        lenders.filter(move |lender| *lender != context)
    }

    /// Forgets the parts that were registered in a context that has been destroyed, and its own pinned memory. Returns what
    /// others have there, which is no longer registered.
    pub(super) fn forget(&mut self, window: &Window, context: u32) -> Orphans {
        self.places.retain(|(of, _)| *of != context);
        let is_gone = |start: &u64| self.parts.get(start).filter(|part| part.context == context);
        let gone = |(of, start): &(u32, u64)| {
            let length = is_gone(start)?.end - start;
            Some((*of, (window.data() + start, length)))
        };
        let places: Vec<_> = self.places.iter().filter_map(gone).collect();
        let of_parts = |cover: &Self, one: &Pinned| {
            let mut registrars = cover.registrars(window, one.range.0, one.range.1);
            one.context != context && registrars.any(|registrar| registrar == context)
        };
        let all: Vec<Pinned> = self.borrowed.values().copied().collect();
        let pins: Vec<_> = all.into_iter().filter(|one| of_parts(self, one)).collect();
        let before = self.parts.len();
        self.parts.retain(|_, part| part.context != context);
        let sizes = self.parts.iter().map(|(start, part)| part.end - start);
        self.size = sizes.sum();
        // The driver may register more now.
        self.refused &= self.parts.len() == before;
        for pin in &pins {
            self.borrowed.remove(&pin.range.0);
        }
        self.borrowed.retain(|_, one| one.context != context);
        self.borrow_all(window);
        let parts = &self.parts;
        self.places.retain(|(_, start)| parts.contains_key(start));
        Orphans { pins, places }
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
        let window = window();
        let own = (window.data() + MIB, 4096);
        let others = (window.data() + 9 * MIB, 2 * MIB);
        for context in [1, 2] {
            cover.place(&window, context, own);
            cover.place(&window, context, others);
        }
        let orphans = cover.forget(&window, 1);
        assert_eq!(orphans.pins, []);
        let parts = [(0, 8), (10, 4)].map(|(at, size)| (2, (window.data() + at * MIB, size * MIB)));
        assert_eq!(orphans.places, parts);
        assert_eq!(cover.places, BTreeSet::new());
        assert_eq!((cover.all(), cover.size), (vec![(8, 10)], 2 * MIB));
    }

    fn window() -> std::sync::Arc<Window> {
        let size = remoting_transport::window::SMALLEST;
        let file = remoting_transport::mapping::create(size).unwrap();
        Window::map(&file, size, 1 << 16).unwrap()
    }

    #[test]
    fn pinned_memory_in_anothers_part_is_known_until_that_ends_or_its_place_is_anothers() {
        let window = window();
        let mut cover = Cover::default();
        cover.add(0, 2 * MIB, 1);
        cover.add(2 * MIB, 4 * MIB, 2);
        let pinned = |start, length, context| Pinned {
            range: (window.data() + start, length),
            context,
            device: 0,
        };
        let (of_both, own, small) = (
            pinned(MIB, 2 * MIB, 3),
            pinned(3 * MIB, MIB, 2),
            pinned(0, 4096, 2),
        );
        for one in [of_both, own, small] {
            cover.pin(&window, one).unwrap();
        }
        let lenders = |cover: &Cover, context| cover.lenders(context).collect::<Vec<_>>();
        // Kernels of any context may use them.
        for context in [3, 4] {
            assert_eq!(lenders(&cover, context), [1, 2]);
        }
        assert_eq!((lenders(&cover, 2), lenders(&cover, 1)), (vec![1], vec![2]));
        // The client has freed it, and uses a part of its place.
        cover.pin(&window, pinned(2 * MIB, 4096, 3)).unwrap();
        assert_eq!(lenders(&cover, 3), [1, 2]);
        assert_eq!(cover.forget(&window, 1).pins, [small]);
        assert_eq!(lenders(&cover, 3), [2]);
        assert_eq!(cover.forget(&window, 3), Orphans::default());
        assert_eq!(cover.borrowed, BTreeMap::new());
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
