//! I/O addresses that cannot be mapped for any device of this host.

use std::{fs, ops::RangeInclusive, path::Path};

/// Contains a folder for each IOMMU group.
const GROUPS: &str = "/sys/kernel/iommu_groups";

/// The ranges that all IOMMU groups reserve. Empty if the host has no IOMMU, or provides no
/// information.
pub fn reserved_by_all() -> Vec<RangeInclusive<u64>> {
    of_groups(Path::new(GROUPS))
}

fn of_groups(folder: &Path) -> Vec<RangeInclusive<u64>> {
    let groups = fs::read_dir(folder).into_iter().flatten();
    let reserved = groups.filter_map(|group| {
        let file = group.ok()?.path().join("reserved_regions");
        Some(parse(&fs::read_to_string(file).ok()?))
    });
    reserved
        .reduce(|all, more| common(&all, &more))
        .unwrap_or_default()
}

/// Parses the ranges of a group: one per line, with first address, last address and type.
fn parse(text: &str) -> Vec<RangeInclusive<u64>> {
    let range = |line: &str| {
        let mut words = line.split_whitespace();
        let mut address = || {
            let digits = words.next()?.strip_prefix("0x")?;
            u64::from_str_radix(digits, 16).ok()
        };
        let (first, last) = (address()?, address()?);
        // The firmware uses these only before a driver takes over, and VFIO allows mapping them.
        (words.next() != Some("direct-relaxable")).then_some(first..=last)
    };
    text.lines().filter_map(range).collect()
}

/// The intersection.
fn common(all: &[RangeInclusive<u64>], more: &[RangeInclusive<u64>]) -> Vec<RangeInclusive<u64>> {
    let pairs = all
        .iter()
        .flat_map(|one| more.iter().map(move |other| (one, other)));
    let common =
        pairs.map(|(one, other)| *one.start().max(other.start())..=*one.end().min(other.end()));
    common.filter(|range| !range.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_all_groups_reserve_is_reserved_whichever_device_comes() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(of_groups(&folder.path().join("none")), []);
        assert_eq!(of_groups(folder.path()), []);
        // As Linux reports them on an AMD and on an Intel machine.
        let groups = [
            "0x00000000fee00000 0x00000000feefffff msi\n\
             0x000000fd00000000 0x000000ffffffffff reserved\n",
            "0x00000000bdf6f000 0x00000000bdf7efff direct-relaxable\n\
             0x00000000fee00000 0x00000000feefffff msi\n\
             0x000000fe00000000 0x0000010000000fff reserved\n",
            "0x00000000bdf6f000 0x00000000bdf7efff direct-relaxable\n\
             0x0000000000001000 0x0000000000001fff direct\n\
             0x0000000000000000 0xffffffffffffffff reserved\n\
             nonsense\n",
        ];
        for (number, text) in groups.iter().enumerate() {
            let group = folder.path().join(number.to_string());
            fs::create_dir(&group).unwrap();
            fs::write(group.join("reserved_regions"), text).unwrap();
        }
        // A group that has disappeared.
        fs::create_dir(folder.path().join("4")).unwrap();
        let mut found = of_groups(folder.path());
        found.sort_by_key(|range| *range.start());
        assert_eq!(
            found,
            [0xfee0_0000..=0xfeef_ffff, 0xfe_0000_0000..=0xff_ffff_ffff]
        );
        assert_eq!(parse(groups[1]).len(), 2);
    }
}
