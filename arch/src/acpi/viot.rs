//! Which devices are behind a virtual IOMMU (VIOT; virtio 1.2, 5.13, and the table's own
//! specification, of which Linux reads revision 0).
//!
//! Guests read this table before they bind drivers, so that devices behind the IOMMU wait for its
//! driver. Endpoints have the IDs by which the IOMMU knows them: the segment in the upper half, the
//! requester ID in the lower half. (`acpi_tables` supports the table, but not its segment field.)

use super::{TABLE_HEADER_SIZE, table};

const PCI_RANGE: u8 = 1;
const PCI_RANGE_SIZE: u16 = 24;
const VIRTIO_PCI: u8 = 3;
const VIRTIO_PCI_SIZE: u16 = 16;
/// Offset of the first node: after the number of nodes, this offset and 8 reserved bytes.
const FIRST_NODE: u16 = TABLE_HEADER_SIZE as u16 + 12;
/// Functions per slot.
const FUNCTIONS: u16 = 8;

/// A virtual IOMMU and the segments behind it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct VirtualIommu {
    /// The device number of the IOMMU, 1 to 31. It is function 0 of that slot on bus 0 of segment
    /// 0.
    pub device: u8,
    /// The PCI segments behind it, without their host bridges and the IOMMU's own slot.
    pub segments: Vec<u16>,
}

pub(super) fn viot(iommu: &VirtualIommu) -> Vec<u8> {
    // At most 31.
    let own = u16::from(iommu.device & 0x1f) * FUNCTIONS;
    let mut ranges = Vec::new();
    for &segment in &iommu.segments {
        if segment == 0 {
            ranges.push((segment, FUNCTIONS, own.saturating_sub(1)));
            ranges.push((segment, own + FUNCTIONS, u16::MAX));
        } else {
            ranges.push((segment, FUNCTIONS, u16::MAX));
        }
    }
    ranges.retain(|(_, first, last)| first < last);
    let mut body = Vec::new();
    // At most two for each of about a hundred segments.
    body.extend_from_slice(&(ranges.len() as u16 + 1).to_le_bytes());
    body.extend_from_slice(&FIRST_NODE.to_le_bytes());
    body.extend_from_slice(&[0; 8]);
    body.extend_from_slice(&[VIRTIO_PCI, 0]);
    let (segment, reserved) = (0_u16, 0_u64);
    for field in [VIRTIO_PCI_SIZE, segment, own] {
        body.extend_from_slice(&field.to_le_bytes());
    }
    body.extend_from_slice(&reserved.to_le_bytes());
    for (segment, first, last) in ranges {
        let endpoint = u32::from(segment) << 16 | u32::from(first);
        body.extend_from_slice(&[PCI_RANGE, 0]);
        body.extend_from_slice(&PCI_RANGE_SIZE.to_le_bytes());
        body.extend_from_slice(&endpoint.to_le_bytes());
        for field in [segment, segment, first, last, FIRST_NODE] {
            body.extend_from_slice(&field.to_le_bytes());
        }
        body.extend_from_slice(&[0; 6]);
    }
    let mut viot = table(*b"VIOT", 0);
    viot.append_slice(&body);
    viot.as_slice().to_vec()
}
