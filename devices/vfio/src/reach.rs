//! The addresses that an IOMMU translates, and the consequences for a guest.

use std::ops::RangeInclusive;

use vfio_bindings::bindings::vfio::{
    VFIO_IOMMU_INFO_CAPS, VFIO_IOMMU_INFO_PGSIZES, VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE,
};
use virtio::iommu::{INTERRUPTS, Reserved, ReservedKind};

use super::Error;

/// Size of `struct vfio_iommu_type1_info` in bytes.
const INFO: usize = 24;
/// Maximum number of capabilities examined, so that a cyclic chain ends.
const MAX_CAPABILITIES: usize = 16;

/// Assumed minimum page size if the kernel does not report it.
const PAGE: u64 = 4096;

/// The addresses that an IOMMU translates: within its width, except platform-reserved ranges.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Reach {
    ranges: Vec<RangeInclusive<u64>>,
    /// The minimum page size, a power of two.
    page: u64,
}

impl Default for Reach {
    fn default() -> Self {
        Self {
            ranges: Vec::new(),
            page: PAGE,
        }
    }
}

impl Reach {
    /// Parses the result of `VFIO_IOMMU_GET_INFO`. If the kernel reports no ranges, everything
    /// counts as translated: the kernel will refuse by itself.
    pub fn parse(info: &[u8]) -> Self {
        let word = |at: usize| {
            let bytes = info.get(at..at + 4)?;
            Some(u32::from_le_bytes(bytes.try_into().ok()?))
        };
        let double =
            |at: usize| Some(u64::from(word(at)?) | u64::from(word(at.checked_add(4)?)?) << 32);
        // Supported page sizes, one bit each.
        let sizes =
            double(8).filter(|_| word(4).is_some_and(|flags| flags & VFIO_IOMMU_INFO_PGSIZES != 0));
        let page = sizes
            .filter(|sizes| *sizes != 0)
            .map(|sizes| 1 << sizes.trailing_zeros());
        let page = page.unwrap_or(PAGE);
        let has_chain = word(4).is_some_and(|flags| flags & VFIO_IOMMU_INFO_CAPS != 0);
        let mut at = word(16).filter(|_| has_chain).unwrap_or(0) as usize;
        for _ in 0..MAX_CAPABILITIES {
            // ID and version, offset of the next one.
            let (Some(id), Some(next)) = (word(at), word(at.saturating_add(4))) else {
                break;
            };
            if at < INFO {
                break;
            }
            if id & 0xffff == VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE {
                let count = word(at + 8).unwrap_or(0) as usize;
                let range = |n: usize| {
                    let at = at.checked_add(16)?.checked_add(n.checked_mul(16)?)?;
                    Some(double(at)?..=double(at.checked_add(8)?)?)
                };
                let ranges: Self = (0..count).map_while(range).collect();
                return ranges.with_page(page);
            }
            at = next as usize;
        }
        Self::default().with_page(page)
    }

    /// Sets the minimum page size in bytes.
    pub fn with_page(self, page: u64) -> Self {
        Self { page, ..self }
    }

    /// Minimum page size in bytes that can be mapped.
    pub fn page(&self) -> u64 {
        self.page
    }

    /// Whether devices can reach `len` bytes (not 0) at `guest`.
    pub fn covers(&self, guest: u64, len: u64) -> bool {
        let last = guest.saturating_add(len - 1);
        let covers = |range: &RangeInclusive<u64>| range.contains(&guest) && range.contains(&last);
        self.ranges.is_empty() || self.ranges.iter().any(covers)
    }

    /// The addresses that are not translated, with interrupt addresses as a separate range.
    pub fn reserved(&self) -> Vec<Reserved> {
        let mut translated = self.ranges.clone();
        if translated.is_empty() {
            translated.push(0..=u64::MAX);
        }
        // It is reported separately, so it must not be part of a gap.
        translated.push(INTERRUPTS);
        translated.sort_by_key(|range| *range.start());
        let mut reserved = vec![Reserved {
            range: INTERRUPTS,
            kind: ReservedKind::Msi,
        }];
        let gap = |range| Reserved {
            range,
            kind: ReservedKind::Reserved,
        };
        // The first address that is not known to be translated.
        let mut next = Some(0);
        for range in translated {
            let Some(start) = next else { break };
            if start < *range.start() {
                reserved.push(gap(start..=*range.start() - 1));
            }
            next = range.end().checked_add(1).map(|end| end.max(start));
        }
        reserved.extend(next.map(|start| gap(start..=u64::MAX)));
        reserved
    }

    /// Checks that devices can reach `len` bytes (not 0) of RAM at `guest`.
    pub fn check(&self, guest: u64, len: u64) -> Result<(), Error> {
        if self.covers(guest, len) {
            return Ok(());
        }
        let last = guest.saturating_add(len - 1);
        let end = self.ranges.iter().map(RangeInclusive::end).max();
        match end {
            Some(&end) if last > end => Err(Error::BeyondWidth { guest, len, end }),
            _ => Err(Error::Reserved {
                guest,
                len,
                ranges: self.to_string(),
            }),
        }
    }
}

impl FromIterator<RangeInclusive<u64>> for Reach {
    fn from_iter<I: IntoIterator<Item = RangeInclusive<u64>>>(ranges: I) -> Self {
        Self {
            ranges: ranges.into_iter().collect(),
            ..Self::default()
        }
    }
}

impl std::fmt::Display for Reach {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (at, range) in self.ranges.iter().enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            write!(f, "{comma}{:#x}-{:#x}", range.start(), range.end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel's data, with the ranges after another capability.
    fn info(ranges: &[(u64, u64)]) -> Vec<u8> {
        let mut words = vec![0, VFIO_IOMMU_INFO_CAPS, 0x1000, 0, 24, 0];
        words.extend([2 | 1 << 16, 36, 7]);
        words.extend([1 | 1 << 16, 0, ranges.len() as u32, 0]);
        for (start, end) in ranges {
            words.extend([*start as u32, (start >> 32) as u32]);
            words.extend([*end as u32, (end >> 32) as u32]);
        }
        words.into_iter().flat_map(u32::to_le_bytes).collect()
    }

    const INTEL_39: [(u64, u64); 2] = [(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)];

    #[test]
    fn ram_beyond_the_address_width_and_in_reserved_ranges_is_told_apart() {
        let reach = Reach::parse(&info(&INTEL_39));
        assert_eq!(reach.to_string(), "0x0-0xfedfffff, 0xfef00000-0x7fffffffff");
        reach.check(0, 3 << 30).unwrap();
        reach.check(4 << 30, (1 << 39) - (4 << 30)).unwrap();
        let error = reach.check(4 << 30, 1 << 39).unwrap_err();
        assert!(matches!(error, Error::BeyondWidth { end, .. } if end == (1 << 39) - 1));
        let error = reach.check(0xfe00_0000, 0x100_0000).unwrap_err();
        assert!(matches!(error, Error::Reserved { .. }), "{error}");
    }

    #[test]
    fn a_kernel_that_says_nothing_is_believed() {
        for info in [vec![], vec![0; 24], info(&[])] {
            Reach::parse(&info).check(u64::MAX - 1, 1).unwrap();
        }
    }

    #[test]
    fn interrupts_and_whatever_is_not_translated_is_reserved() {
        let ranges = |reach: &Reach| -> Vec<_> {
            let reserved = reach.reserved().into_iter();
            reserved
                .map(|reserved| (reserved.range, reserved.kind == ReservedKind::Msi))
                .collect()
        };
        let msi = (INTERRUPTS, true);
        assert_eq!(
            ranges(&Reach::parse(&info(&INTEL_39))),
            [msi.clone(), (1 << 39..=u64::MAX, false)]
        );
        let amd = [
            (0, 0xfedf_ffff),
            (0xfef0_0000, 0xfc_ffff_ffff),
            (1 << 40, u64::MAX),
        ];
        assert_eq!(
            ranges(&Reach::parse(&info(&amd))),
            [msi.clone(), (0xfd_0000_0000..=0xff_ffff_ffff, false)]
        );
        let some = [(0x1000, 0x1fff), (0xfe00_0000, 0xfeff_ffff)];
        assert_eq!(
            ranges(&Reach::parse(&info(&some))),
            [
                msi.clone(),
                (0..=0xfff, false),
                (0x2000..=0xfdff_ffff, false),
                (0xff00_0000..=u64::MAX, false)
            ]
        );
        assert_eq!(
            ranges(&Reach::default()),
            [msi],
            "a kernel that says nothing"
        );
    }

    #[test]
    fn the_smallest_page_is_what_the_kernel_says() {
        let mut with_sizes = info(&INTEL_39);
        with_sizes[8..16].copy_from_slice(&0x4021_0000_u64.to_le_bytes());
        assert_eq!(Reach::parse(&with_sizes).page(), 0x1000, "it does not say");
        with_sizes[4] |= VFIO_IOMMU_INFO_PGSIZES as u8;
        assert_eq!(Reach::parse(&with_sizes).page(), 0x1_0000);
        assert_eq!(Reach::parse(&with_sizes[..24]).page(), 0x1_0000);
        with_sizes[8..16].fill(0);
        assert_eq!(Reach::parse(&with_sizes).page(), 0x1000);
    }

    #[test]
    fn a_broken_chain_ends() {
        let mut circle = info(&INTEL_39);
        circle[28] = 24;
        assert_eq!(Reach::parse(&circle), Reach::default());
        let mut short = info(&INTEL_39);
        short.truncate(60);
        assert_eq!(Reach::parse(&short).ranges.len(), 0);
    }
}
