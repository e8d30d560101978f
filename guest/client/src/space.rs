//! The free parts of the window.

use std::collections::BTreeMap;

/// The allocation granularity: a page, the alignment that devices want for buffers in host memory.
const GRAIN: u64 = 4096;

/// Free stretches by offset. Adjacent ones are merged.
#[derive(Debug, Default)]
pub struct Space(BTreeMap<u64, u64>);

fn rounded(length: u64) -> Option<u64> {
    length.max(1).checked_next_multiple_of(GRAIN)
}

impl Space {
    /// All space from `start` to `end` is free.
    pub fn new(start: u64, end: u64) -> Self {
        Self(BTreeMap::from([(start, end - start)]))
    }

    /// Allocates a stretch of at least this length, first fit.
    pub fn take(&mut self, length: u64) -> Option<u64> {
        let length = rounded(length)?;
        let (&offset, &free) = self.0.iter().find(|(_, free)| **free >= length)?;
        self.0.remove(&offset);
        if free > length {
            self.0.insert(offset + length, free - length);
        }
        Some(offset)
    }

    /// Allocates a stretch as close to the end as possible, and never below `floor`. Its start is a multiple of `align` beyond
    /// `base`.
    pub fn take_last(&mut self, length: u64, floor: u64, (base, align): (u64, u64)) -> Option<u64> {
        let length = rounded(length)?;
        let (offset, free, place) = self.0.iter().rev().find_map(|(&offset, &free)| {
            let last = offset + free.checked_sub(length)?;
            let place = last - last.checked_sub(base)? % align;
            (place >= offset).then_some((offset, free, place))
        })?;
        if place < floor {
            return None;
        }
        self.0.remove(&offset);
        let end = place + length;
        for (start, until) in [(offset, place), (end, offset + free)] {
            if until > start {
                self.0.insert(start, until - start);
            }
        }
        Some(place)
    }

    /// The stretches from `start` to `end` that are not free, as their start and end.
    pub fn taken(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let mut taken = Vec::new();
        let mut at = start;
        for (&offset, &free) in &self.0 {
            if offset > at {
                taken.push((at, offset));
            }
            at = offset + free;
        }
        if at < end {
            taken.push((at, end));
        }
        taken
    }

    /// Frees a stretch that `take` returned for this length.
    pub fn give(&mut self, offset: u64, length: u64) {
        let Some(mut length) = rounded(length) else {
            return;
        };
        let mut offset = offset;
        if let Some(next) = self.0.remove(&(offset + length)) {
            length += next;
        }
        if let Some((&before, &free)) = self.0.range(..offset).next_back()
            && before + free == offset
        {
            self.0.remove(&before);
            offset = before;
            length += free;
        }
        self.0.insert(offset, length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_in_any_order_is_one_stretch_again() {
        let mut space = Space::new(0, 16 * GRAIN);
        let parts: Vec<_> = (1..4)
            .map(|n| (space.take(n * GRAIN).unwrap(), n))
            .collect();
        let taken = |space: &Space| space.taken(0, 16 * GRAIN);
        assert_eq!(taken(&space), [(0, 6 * GRAIN)]);
        for index in [1, 0, 2] {
            let (offset, n) = parts[index];
            space.give(offset, n * GRAIN);
        }
        assert_eq!(taken(&space), []);
        let end = space.take(15 * GRAIN).unwrap() + 15 * GRAIN;
        space.give(GRAIN, GRAIN);
        assert_eq!(taken(&space), [(0, GRAIN), (2 * GRAIN, end)]);
        space.give(0, GRAIN);
        space.give(2 * GRAIN, 13 * GRAIN);
        assert_eq!(space.take(16 * GRAIN), Some(0));
        assert_eq!(space.take(1), None);
    }

    #[test]
    fn space_is_taken_from_both_ends_and_meets() {
        let mut space = Space::new(0, 8 * GRAIN);
        assert_eq!(space.take_last(3 * GRAIN, 0, (0, 1)), Some(5 * GRAIN));
        assert_eq!(space.take(2 * GRAIN), Some(0));
        assert_eq!(space.take_last(1, 0, (0, 1)), Some(4 * GRAIN));
        assert_eq!(space.take_last(3 * GRAIN, 0, (0, 1)), None);
        assert_eq!(space.take_last(2 * GRAIN, 0, (0, 1)), Some(2 * GRAIN));
        space.give(4 * GRAIN, 1);
        space.give(5 * GRAIN, 3 * GRAIN);
        assert_eq!(space.take_last(4 * GRAIN, 0, (0, 1)), Some(4 * GRAIN));
        assert_eq!(space.take_last(u64::MAX, 0, (0, 1)), None);
    }

    #[test]
    fn what_is_taken_from_the_end_leaves_the_beginning_to_others() {
        let mut space = Space::new(0, 8 * GRAIN);
        assert_eq!(
            space.take_last(5 * GRAIN, 2 * GRAIN, (0, 1)),
            Some(3 * GRAIN)
        );
        assert_eq!(space.take_last(2 * GRAIN, 2 * GRAIN, (0, 1)), None);
        assert_eq!(space.take_last(GRAIN, 2 * GRAIN, (0, 1)), Some(2 * GRAIN));
        assert_eq!(space.take_last(1, 2 * GRAIN, (0, 1)), None);
        assert_eq!(space.take(2 * GRAIN), Some(0));
    }

    #[test]
    fn an_aligned_stretch_leaves_what_is_behind_it_to_others() {
        let mut space = Space::new(GRAIN, 17 * GRAIN);
        assert_eq!(space.take_last(1, 0, (0, 1)), Some(16 * GRAIN));
        let aligned = (GRAIN, 4 * GRAIN);
        assert_eq!(space.take_last(4 * GRAIN, 0, aligned), Some(9 * GRAIN));
        assert_eq!(
            space.taken(GRAIN, 17 * GRAIN),
            [(9 * GRAIN, 13 * GRAIN), (16 * GRAIN, 17 * GRAIN)]
        );
        assert_eq!(space.take_last(3 * GRAIN, 0, (0, 1)), Some(13 * GRAIN));
        assert_eq!(space.take_last(5 * GRAIN, 0, aligned), Some(GRAIN));
        assert_eq!(space.take_last(5 * GRAIN, 0, aligned), None);
        assert_eq!(space.take_last(3 * GRAIN, 0, (0, 1)), Some(6 * GRAIN));
    }

    #[test]
    fn a_length_that_cannot_be_rounded_finds_no_space() {
        assert_eq!(Space::new(0, 1 << 30).take(u64::MAX), None);
    }
}
