//! USERD, the page through which the CPU submits to a channel. It is in VRAM and visible through
//! BAR 1. These are the offsets of its fields.

/// Distance in bytes between the pages of two channels.
pub const STRIDE: u64 = 0x1000;
/// Low half of the address after the last fetched command; written by the GPU.
pub const GET: u64 = 0x44;
/// The last reference count that the channel set; written by the GPU.
pub const REFERENCE: u64 = 0x48;
/// High half of [`GET`]; written by the GPU.
pub const GET_HIGH: u64 = 0x60;
/// Index of the next ring entry to fetch; written by the GPU.
pub const GP_GET: u64 = 0x88;
/// Index after the last submitted ring entry. Writing it makes the channel look at its ring.
pub const GP_PUT: u64 = 0x8c;

/// The window in BAR 1 with the pages of all channels, as placed by register 0x002254.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Window {
    /// Offset in BAR 1, a multiple of 4 KiB.
    pub start: u64,
}

impl Window {
    /// Parses the register; `None` if the window is closed.
    pub fn parse(register: u32) -> Option<Self> {
        (register & 1 << 28 != 0).then(|| Self {
            start: u64::from(register & 0xfff_ffff) << 12,
        })
    }

    /// The register's value.
    pub fn encode(self) -> u32 {
        1 << 28 | (self.start >> 12) as u32 & 0xfff_ffff
    }

    /// Returns the channel (of `count`) and the offset in its page for an offset in BAR 1.
    pub fn channel(self, at: u64, count: u8) -> Option<(u8, u64)> {
        let inside = at.checked_sub(self.start)?;
        let channel = u8::try_from(inside / STRIDE).ok()?;
        (channel < count).then_some((channel, inside % STRIDE))
    }

    /// Returns the channel (of `count`) whose whole [`GP_PUT`] is covered by a write at an offset
    /// in BAR 1, and its new value.
    pub fn doorbell(self, at: u64, data: &[u8], count: u8) -> Option<(u8, u32)> {
        let (channel, offset) = self.channel(at, count)?;
        let first = usize::try_from(GP_PUT.checked_sub(offset)?).ok()?;
        let put = data.get(first..)?.first_chunk()?;
        Some((channel, u32::from_le_bytes(*put)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_register_keeps_its_meaning(register: u32) {
            if let Some(window) = Window::parse(register) {
                prop_assert_eq!(Window::parse(window.encode()), Some(window));
            }
        }

        #[test]
        fn a_channel_is_one_of_those_that_exist(register: u32, at: u64) {
            let window = Window::parse(register | 1 << 28).expect("it is open");
            if let Some((channel, offset)) = window.channel(at, 128) {
                prop_assert_eq!(window.start + u64::from(channel) * STRIDE + offset, at);
                prop_assert!(channel < 128);
            }
        }
    }

    #[test]
    fn a_doorbell_is_a_write_of_a_whole_put_pointer() {
        let window = Window { start: 0x10_0000 };
        let at = window.start + 5 * STRIDE;
        let bytes = 0x0102_0304_0506_0708_u64.to_le_bytes();
        let doorbell = |offset, len: usize| window.doorbell(at + offset, &bytes[..len], 128);
        assert_eq!(doorbell(GP_PUT, 4), Some((5, 0x0506_0708)));
        assert_eq!(doorbell(GP_PUT, 8), Some((5, 0x0506_0708)));
        assert_eq!(doorbell(GP_PUT - 4, 8), Some((5, 0x0102_0304)));
        for (offset, len) in [
            (GP_PUT, 2),
            (GP_PUT - 4, 4),
            (GP_PUT - 4, 7),
            (GP_PUT + 4, 4),
        ] {
            assert_eq!(doorbell(offset, len), None);
        }
        assert_eq!(window.doorbell(window.start - 4, &bytes, 128), None);
    }
}
