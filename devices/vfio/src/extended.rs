//! Selects the extended capabilities (PCI Express 5.0, 7.6.3) of a device that the guest sees.
//!
//! As for other capabilities, each keeps its offset. The guest sees those that describe the device,
//! but none through which it could change the host's configuration: virtual functions, addresses
//! that the device translates itself, BAR sizes, links, errors that ports contain.
//! the device translates by itself, sizes of BARs, links, errors that ports contain.

use std::{collections::BTreeSet, ops::Range};

use pci::{ConfigError, ConfigSpace};

/// Advanced error reporting (7.8.4).
const ERRORS: u16 = 0x0001;
/// Device serial number (7.9.3).
const SERIAL_NUMBER: u16 = 0x0003;
/// Vendor specific (7.9.5).
const VENDOR: u16 = 0x000b;
/// Latency tolerance reporting (7.8.2).
const LATENCY: u16 = 0x0018;
/// Vendor specific, of another vendor (7.9.6).
const DESIGNATED_VENDOR: u16 = 0x0023;

const FIRST: usize = 0x100;
const END: usize = 0x1000;
const HEADER: usize = 4;
/// Maximum length of the chain that is followed. Devices have fewer, and a malicious one must not
/// cause long loops.
const MOST: usize = 64;

/// An extended capability that the guest sees.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Extended {
    id: u16,
    version: u8,
    /// The whole range, including the header.
    place: Range<usize>,
    /// Guest writes reach the device's registers, as far as vfio-pci permits.
    pub writable: bool,
}

impl Extended {
    /// The device's registers after the header.
    pub fn registers(&self) -> Range<usize> {
        self.place.start + HEADER..self.place.end
    }
}

/// The extended capabilities that the guest sees. `read` reads a register of the device's
/// configuration space.
pub fn visible(mut read: impl FnMut(usize) -> u32) -> Vec<Extended> {
    let mut starts = BTreeSet::new();
    let mut found = Vec::new();
    let mut at = FIRST;
    // A cyclic chain ends where the cycle closes.
    while (FIRST..END).contains(&at) && starts.len() < MOST && starts.insert(at) {
        let header = read(at);
        // Nothing there, or the device is gone.
        if header == 0 || header == u32::MAX {
            break;
        }
        // 16 and 4 bits.
        let (id, version) = (header as u16, (header >> 16 & 0xf) as u8);
        let (len, writable) = match id {
            ERRORS => (0x2c, false),
            SERIAL_NUMBER => (12, false),
            LATENCY => (8, false),
            // Both have their length in the register after the header.
            VENDOR | DESIGNATED_VENDOR if at + HEADER < END => {
                ((read(at + HEADER) >> 20) as usize, true)
            }
            _ => (0, false),
        };
        // A header and at least one byte after it.
        if len > HEADER {
            found.push((id, version, at, len, writable));
        }
        at = (header >> 20) as usize & !3;
    }
    let cut = |(id, version, at, len, writable): (_, _, usize, usize, _)| {
        let next = starts.range(at + 1..).next().copied().unwrap_or(END);
        let place = at..(at + len).min(next);
        let extended = Extended {
            id,
            version,
            place,
            writable,
        };
        (!extended.registers().is_empty()).then_some(extended)
    };
    found.into_iter().filter_map(cut).collect()
}

/// Adds the capabilities to the guest's configuration space. The registers after their headers are
/// the device's.
pub fn place(config: &mut ConfigSpace, visible: &[Extended]) -> Result<(), ConfigError> {
    // The list must begin at a fixed offset, even if nothing is visible there.
    let starts_late = visible
        .first()
        .is_some_and(|first| first.place.start != FIRST);
    if starts_late && visible.iter().all(|other| other.place.start != FIRST) {
        config.place_extended_capability(FIRST, 0, 0, &[])?;
    }
    for extended in visible {
        let body = vec![0; extended.registers().len()];
        let at = extended.place.start;
        config.place_extended_capability(at, extended.id, extended.version, &body)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use pci::Identity;
    use proptest::prelude::*;

    use super::*;

    fn header(id: u16, next: u32) -> u32 {
        u32::from(id) | 1 << 16 | next << 20
    }

    /// Registers by offset; all others are zero.
    fn space(registers: &[(usize, u32)]) -> Vec<Extended> {
        visible(|at| {
            let register = registers.iter().find(|(offset, _)| *offset == at);
            register.map_or(0, |(_, value)| *value)
        })
    }

    fn ids(visible: &[Extended]) -> Vec<(u16, Range<usize>)> {
        let pairs = visible.iter().map(|one| (one.id, one.place.clone()));
        pairs.collect()
    }

    #[test]
    fn what_is_the_hosts_to_decide_is_left_out() {
        // Errors, access control, ATS, SR-IOV, resizable BARs, PASID, DPC, and a serial number.
        let hidden = [0xd, 0xf, 0x10, 0x15, 0x1b, 0x1d];
        let mut registers = vec![(0x100, header(ERRORS, 0x200))];
        for (index, id) in (0_u32..).zip(hidden) {
            let at = 0x200 + index * 0x40;
            registers.push((at as usize, header(id, at + 0x40)));
        }
        registers.push((0x380, header(SERIAL_NUMBER, 0)));
        let found = space(&registers);
        assert_eq!(
            ids(&found),
            [(ERRORS, 0x100..0x12c), (SERIAL_NUMBER, 0x380..0x38c)]
        );
        assert!(found.iter().all(|one| !one.writable));
    }

    #[test]
    fn a_vendors_own_are_as_long_as_they_say_and_as_there_is_room() {
        let vendor = |len: u32| len << 20 | 0x1_0001;
        let found = space(&[
            (0x100, header(VENDOR, 0x120)),
            (0x104, vendor(0x20)),
            (0x120, header(DESIGNATED_VENDOR, 0x140)),
            (0x124, vendor(0xfff)),
            (0x140, header(VENDOR, 0xff8)),
            (0x144, vendor(3)),
            (0xff8, header(VENDOR, 0xffc)),
            (0xffc, vendor(0x40)),
        ]);
        let places = [(VENDOR, 0x100..0x120), (DESIGNATED_VENDOR, 0x120..0x140)];
        assert_eq!(ids(&found)[..2], places);
        assert_eq!(found.len(), 2, "the others have no registers: {found:?}");
        assert!(found.iter().all(|one| one.writable));
    }

    #[test]
    fn chains_that_do_not_end_end() {
        assert_eq!(space(&[(0x100, header(SERIAL_NUMBER, 0x100))]).len(), 1);
        let two = [
            (0x100, header(SERIAL_NUMBER, 0x200)),
            (0x200, header(LATENCY, 0x100)),
        ];
        assert_eq!(space(&two).len(), 2);
        let many: Vec<_> = (0..200)
            .map(|index| (0x100 + 4 * index, header(0x10, 0x104 + 4 * index as u32)))
            .collect();
        assert_eq!(space(&many), []);
        let mut reads = 0;
        visible(|at| {
            reads += 1;
            header(SERIAL_NUMBER, at as u32 + 0x10)
        });
        assert_eq!(reads, MOST);
    }

    #[test]
    fn pointers_to_nowhere_end_a_chain() {
        for next in [0, 4, 0xfc] {
            assert_eq!(space(&[(0x100, header(LATENCY, next))]).len(), 1);
        }
        // The low bits are reserved.
        let odd = [(0x100, header(LATENCY, 0x203)), (0x200, header(LATENCY, 0))];
        assert_eq!(space(&odd).len(), 2);
        assert_eq!(visible(|_| u32::MAX), []);
        assert_eq!(visible(|_| 0), []);
    }

    #[test]
    fn the_list_begins_where_a_guest_looks() {
        let mut config = ConfigSpace::new(Identity::default());
        let found = space(&[
            (0x100, header(0x10, 0x200)),
            (0x200, header(LATENCY, 0x180)),
            (0x180, header(SERIAL_NUMBER, 0)),
        ]);
        place(&mut config, &found).unwrap();
        assert_eq!(config.read_u32(0x100), 0x200 << 20);
        assert_eq!(config.read_u32(0x200), header(LATENCY, 0x180));
        assert_eq!(config.read_u32(0x180), header(SERIAL_NUMBER, 0));
        let mut config = ConfigSpace::new(Identity::default());
        place(&mut config, &[]).unwrap();
        assert_eq!(config.read_u32(0x100), 0);
    }

    proptest! {
        #[test]
        fn whatever_a_device_says_capabilities_lie_apart(
            registers in proptest::collection::vec(
                (0..960_usize, prop_oneof![Just(1_u16), Just(3), Just(0xb), Just(0x23), any::<u16>()],
                 any::<u16>()),
                0..80,
            ),
            lengths in any::<u32>(),
        ) {
            let mut words = vec![lengths; 1024];
            for (at, id, next) in registers {
                words[64 + at] = header(id, u32::from(next) & 0xfff);
            }
            let found = visible(|at| words[at / 4]);
            let mut bytes = BTreeSet::new();
            for one in &found {
                prop_assert!(one.place.start >= FIRST && one.place.end <= END);
                for at in one.place.clone() {
                    prop_assert!(bytes.insert(at), "{at:#x} belongs to two");
                }
            }
            let mut config = ConfigSpace::new(Identity::default());
            place(&mut config, &found).unwrap();
        }
    }
}
