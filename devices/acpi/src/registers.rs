//! Common parts of the controllers' registers.

use acpi_tables::{Aml, AmlSink, aml};

/// Timeout that waits for a mutex forever (ACPI 6.5, 19.6.2).
pub const FOREVER: u16 = 0xffff;

/// Device check notification (ACPI 6.5, 5.6.6).
pub const DEVICE_CHECK: u8 = 1;
/// Eject request notification (ACPI 6.5, 5.6.6).
pub const EJECT_REQUEST: u8 = 3;

/// `_STA`: present, enabled, shown, functioning (ACPI 6.5, 6.3.7).
pub const STATUS_PRESENT: u8 = 0xf;

/// Value of a scan register when nothing has changed.
pub const NO_EVENT: u32 = u32::MAX;

/// Handles a read of any width at any offset of the registers' `image`; bytes beyond it read as
/// zero.
pub fn read(image: &[u8], offset: u64, data: &mut [u8]) {
    data.fill(0);
    let from = usize::try_from(offset).unwrap_or(usize::MAX);
    let bytes = image.get(from..).unwrap_or_default();
    for (to, from) in data.iter_mut().zip(bytes) {
        *to = *from;
    }
}

/// AML that is already encoded.
pub struct Raw<'a>(pub &'a [u8]);

impl Aml for Raw<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.vec(self.0);
    }
}

/// Writes a device for a controller's registers, with `children` beside its resources.
pub fn controller(
    path: &str,
    uid: &'static str,
    (base, size): (u64, u64),
    children: &[&dyn Aml],
    sink: &mut dyn AmlSink,
) {
    let hid = aml::Name::new("_HID".into(), &aml::EISAName::new("PNP0A06"));
    let uid = aml::Name::new("_UID".into(), &uid);
    // A controller's size is at least one, and its address is below the last page.
    let range = aml::AddressSpace::<u64>::new_memory(
        aml::AddressSpaceCacheable::NotCacheable,
        true,
        base,
        base + (size - 1),
        None,
    );
    let resources = aml::Name::new("_CRS".into(), &aml::ResourceTemplate::new(vec![&range]));
    let mut all: Vec<&dyn Aml> = vec![&hid, &uid, &resources];
    all.extend_from_slice(children);
    aml::Device::new(path.into(), all).to_aml_bytes(sink);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_of_any_width_and_offset_stay_inside_the_registers() {
        let image = [1, 2, 3, 4];
        for (offset, expected) in [
            (0, [1, 2, 3, 4, 0, 0, 0, 0]),
            (3, [4, 0, 0, 0, 0, 0, 0, 0]),
            (4, [0; 8]),
            (u64::MAX, [0; 8]),
        ] {
            let mut data = [0xff; 8];
            read(&image, offset, &mut data);
            assert_eq!(data, expected, "{offset}");
        }
    }
}
