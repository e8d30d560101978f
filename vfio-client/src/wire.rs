//! The format of vfio-user messages (version 0.1 of the specification, docs/vfio-user.rst in
//! libvfio-user): requests, and what a reply may contain.
//!
//! A server's replies are untrusted input. Each is checked here, once, and from then on consists of
//! plain numbers within known bounds. All integers are in host byte order.

use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FLAGS_PCI, VFIO_DEVICE_FLAGS_RESET, VFIO_IRQ_INFO_NORESIZE,
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_MSIX_IRQ_INDEX, VFIO_REGION_INFO_CAP_SPARSE_MMAP,
    VFIO_REGION_INFO_FLAG_CAPS,
};
use vfio_user::Command;

/// Size of the header of every message in bytes.
pub const HEADER: usize = 16;
/// Size of a region's description in bytes, without capabilities.
const REGION_INFO: usize = 32;
/// Maximum size of a region's description in bytes, including capabilities: room for 200 areas.
pub const MAX_REGION_INFO: u32 = 4096;
/// Maximum size of a server's version and its JSON text in bytes.
pub const MAX_VERSION: usize = 16 << 10;
/// Maximum number of mappable areas of a region; each takes a memory slot of the VM.
const MAX_AREAS: usize = 64;
/// Maximum number of capabilities of a region that are parsed.
const MAX_CAPABILITIES: usize = 16;
/// Maximum size of a region: a BAR of 256 TiB.
const MAX_REGION: u64 = 1 << 48;

/// Header flags: the message is a reply.
const FLAG_REPLY: u32 = 1;
/// Header flags: the bits with the type of the message.
const FLAG_KIND: u32 = 0xf;
/// Header flags: the reply contains an error number.
const FLAG_ERROR: u32 = 1 << 5;

/// An invalid reply.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Lie {
    /// It does not match the request.
    #[error("message {id}, command {command}, flags {flags:#x} is no answer to message {expected}")]
    Unrelated {
        /// Its message ID.
        id: u16,
        /// Its command.
        command: u16,
        /// Its flags.
        flags: u32,
        /// ID of the request.
        expected: u16,
    },
    /// It has the wrong length.
    #[error("{len} bytes are not between {min} and {max}")]
    Length {
        /// Its length without the header.
        len: u64,
        /// Minimum length.
        min: usize,
        /// Maximum length.
        max: usize,
    },
    /// A number has an invalid value.
    #[error("{what} is {value:#x}")]
    Value {
        /// The name of the number.
        what: &'static str,
        /// The number.
        value: u64,
    },
    /// The JSON text is invalid.
    #[error("its capabilities are no JSON object ended by a zero")]
    Json,
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    let mut value = [0; 2];
    if let Some(bytes) = bytes.get(at..at + 2) {
        value.copy_from_slice(bytes);
    }
    u16::from_ne_bytes(value)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut value = [0; 4];
    if let Some(bytes) = bytes.get(at..at + 4) {
        value.copy_from_slice(bytes);
    }
    u32::from_ne_bytes(value)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut value = [0; 8];
    if let Some(bytes) = bytes.get(at..at + 8) {
        value.copy_from_slice(bytes);
    }
    u64::from_ne_bytes(value)
}

fn length(len: usize, min: usize, max: usize) -> Result<(), Lie> {
    if (min..=max).contains(&len) {
        Ok(())
    } else {
        let len = len as u64;
        Err(Lie::Length { len, min, max })
    }
}

/// Builds the header of a message that is followed by `len` bytes.
pub fn header(id: u16, command: Command, len: u32) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..2].copy_from_slice(&id.to_ne_bytes());
    bytes[2..4].copy_from_slice(&(command as u16).to_ne_bytes());
    let size = len.saturating_add(HEADER as u32);
    bytes[4..8].copy_from_slice(&size.to_ne_bytes());
    bytes
}

/// The header of a reply.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Reply {
    /// Number of bytes that follow.
    pub len: usize,
    /// The error number, if the reply is an error.
    pub errno: Option<i32>,
}

impl Reply {
    /// Parses the header of the reply to message `id`; the reply may have at most `max` bytes.
    pub fn parse(bytes: &[u8; HEADER], id: u16, command: Command, max: usize) -> Result<Self, Lie> {
        let flags = u32_at(bytes, 8);
        let (its, kind) = (u16_at(bytes, 0), u16_at(bytes, 2));
        if its != id || kind != command as u16 || flags & FLAG_KIND != FLAG_REPLY {
            return Err(Lie::Unrelated {
                id: its,
                command: kind,
                flags,
                expected: id,
            });
        }
        let size = u64::from(u32_at(bytes, 4));
        let len = size
            .checked_sub(HEADER as u64)
            .and_then(|len| usize::try_from(len).ok())
            .filter(|len| *len <= max)
            .ok_or(Lie::Length {
                len: size.saturating_sub(HEADER as u64),
                min: 0,
                max,
            })?;
        let errno = (flags & FLAG_ERROR != 0).then(|| {
            // Some servers report an error without its number.
            i32::try_from(u32_at(bytes, 12))
                .ok()
                .filter(|errno| *errno > 0)
                .unwrap_or(libc::EIO)
        });
        Ok(Self { len, errno })
    }
}

/// A server's limits for one message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Limits {
    /// Number of descriptors, at least 1.
    pub descriptors: usize,
}

/// The client's version, 0.1, which requests only the defaults.
pub fn version() -> Vec<u8> {
    let mut body = vec![0, 0];
    body.extend_from_slice(&1_u16.to_ne_bytes());
    body.extend_from_slice(b"{\"capabilities\":{\"max_msg_fds\":8}}\0");
    body
}

/// Parses the server's version.
pub fn parse_version(body: &[u8]) -> Result<Limits, Lie> {
    length(body.len(), 4, MAX_VERSION)?;
    let major = u16_at(body, 0);
    if major != 0 {
        return Err(Lie::Value {
            what: "the protocol's major version, which has to be 0,",
            value: u64::from(major),
        });
    }
    let mut limits = Limits { descriptors: 1 };
    let Some(text) = body.get(4..).filter(|text| !text.is_empty()) else {
        return Ok(limits);
    };
    let text = text.strip_suffix(&[0]).ok_or(Lie::Json)?;
    let json: serde_json::Value = serde_json::from_slice(text).map_err(|_| Lie::Json)?;
    let most = &json["capabilities"]["max_msg_fds"];
    if let Some(most) = most.as_u64() {
        // Linux passes at most 253 descriptors in one message (SCM_MAX_FD).
        limits.descriptors = most.clamp(1, 253) as usize;
    }
    Ok(limits)
}

/// Requests the device's description.
pub fn device_info() -> [u8; 16] {
    let mut body = [0; 16];
    body[..4].copy_from_slice(&16_u32.to_ne_bytes());
    body
}

/// A device's description.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DeviceInfo {
    /// Whether it can be reset.
    pub resettable: bool,
    /// Number of interrupt types.
    pub irqs: u32,
}

impl DeviceInfo {
    /// Parses the server's reply.
    pub fn parse(body: &[u8]) -> Result<Self, Lie> {
        length(body.len(), 16, 64)?;
        let (flags, regions) = (u32_at(body, 4), u32_at(body, 8));
        if flags & VFIO_DEVICE_FLAGS_PCI == 0 {
            return Err(Lie::Value {
                what: "the device's type, which has to be PCI,",
                value: u64::from(flags),
            });
        }
        if regions <= VFIO_PCI_CONFIG_REGION_INDEX {
            return Err(Lie::Value {
                what: "the number of regions, of which configuration space is the eighth,",
                value: u64::from(regions),
            });
        }
        Ok(Self {
            resettable: flags & VFIO_DEVICE_FLAGS_RESET != 0,
            irqs: u32_at(body, 12).min(VFIO_PCI_MSIX_IRQ_INDEX + 1),
        })
    }
}

/// Requests the description of a region.
pub fn region_info(index: u32) -> [u8; REGION_INFO] {
    let mut body = [0; REGION_INFO];
    body[..4].copy_from_slice(&MAX_REGION_INFO.to_ne_bytes());
    body[8..12].copy_from_slice(&index.to_ne_bytes());
    body
}

/// A region's description.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct RegionInfo {
    /// Permitted operations (`VFIO_REGION_INFO_FLAG_*`).
    pub flags: u32,
    /// Size in bytes.
    pub size: u64,
    /// Offset of the region in the file that came with the reply.
    pub offset: u64,
    /// Start and end of each mappable area within the region. If the server does not list any, this
    /// is the whole region.
    pub areas: Vec<(u64, u64)>,
}

impl RegionInfo {
    /// Parses the server's reply to a request about region `index`.
    pub fn parse(body: &[u8], index: u32) -> Result<Self, Lie> {
        length(body.len(), REGION_INFO, MAX_REGION_INFO as usize)?;
        let its = u32_at(body, 8);
        if its != index {
            return Err(Lie::Value {
                what: "the region's number",
                value: u64::from(its),
            });
        }
        let mut info = Self {
            flags: u32_at(body, 4),
            size: u64_at(body, 16),
            offset: u64_at(body, 24),
            areas: Vec::new(),
        };
        if info.size > MAX_REGION {
            return Err(Lie::Value {
                what: "the region's size",
                value: info.size,
            });
        }
        let first = u32_at(body, 12);
        info.areas = if info.flags & VFIO_REGION_INFO_FLAG_CAPS == 0 {
            vec![(0, info.size)]
        } else if body.len() == REGION_INFO {
            // The capabilities do not fit, so it is unknown what must not be mapped.
            Vec::new()
        } else {
            sparse_areas(body, first, info.size)?.unwrap_or_else(|| vec![(0, info.size)])
        };
        Ok(info)
    }
}

/// Returns the areas that the sparse mmap capability lists, if there is one. Capabilities form a
/// list whose links are offsets from the start of the description.
fn sparse_areas(body: &[u8], first: u32, size: u64) -> Result<Option<Vec<(u64, u64)>>, Lie> {
    let mut at = first as usize;
    for _ in 0..MAX_CAPABILITIES {
        if at == 0 {
            return Ok(None);
        }
        let capability = (at >= REGION_INFO).then(|| body.get(at..)).flatten();
        let capability = capability
            .filter(|bytes| bytes.len() >= 8)
            .ok_or(Lie::Value {
                what: "the place of a capability",
                value: at as u64,
            })?;
        if u32::from(u16_at(capability, 0)) == VFIO_REGION_INFO_CAP_SPARSE_MMAP {
            return areas(capability, size).map(Some);
        }
        at = u32_at(capability, 4) as usize;
    }
    Err(Lie::Value {
        what: "the place of one capability too many",
        value: at as u64,
    })
}

fn areas(capability: &[u8], size: u64) -> Result<Vec<(u64, u64)>, Lie> {
    let count = u32_at(capability, 8);
    let list = capability.get(16..).unwrap_or_default();
    let known = usize::try_from(count)
        .ok()
        .filter(|count| *count <= MAX_AREAS && *count <= list.len() / 16)
        .ok_or(Lie::Value {
            what: "the number of areas that can be mapped",
            value: u64::from(count),
        })?;
    let mut areas = Vec::with_capacity(known);
    for area in list.chunks_exact(16).take(known) {
        let (start, len) = (u64_at(area, 0), u64_at(area, 8));
        let end = start.checked_add(len).filter(|end| *end <= size);
        let end = end.ok_or(Lie::Value {
            what: "the start of an area, which reaches beyond its region,",
            value: start,
        })?;
        if areas.iter().any(|(from, to)| start < *to && *from < end) {
            return Err(Lie::Value {
                what: "the start of an area, which overlaps another,",
                value: start,
            });
        }
        areas.push((start, end));
    }
    Ok(areas)
}

/// Requests the description of an interrupt type.
pub fn irq_info(index: u32) -> [u8; 16] {
    let mut body = [0; 16];
    body[..4].copy_from_slice(&16_u32.to_ne_bytes());
    body[8..12].copy_from_slice(&index.to_ne_bytes());
    body
}

/// Description of an interrupt type.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct IrqInfo {
    /// Number of interrupts.
    pub count: u32,
    /// Whether further ones can be connected later.
    pub grows: bool,
}

impl IrqInfo {
    /// Parses the server's reply to a request about interrupt type `index`.
    pub fn parse(body: &[u8], index: u32) -> Result<Self, Lie> {
        length(body.len(), 16, 64)?;
        let its = u32_at(body, 8);
        if its != index {
            return Err(Lie::Value {
                what: "the interrupts' kind",
                value: u64::from(its),
            });
        }
        Ok(Self {
            count: u32_at(body, 12),
            grows: u32_at(body, 4) & VFIO_IRQ_INFO_NORESIZE == 0,
        })
    }
}

/// Sets interrupts of a type; the message carries the descriptors.
pub fn set_irqs(index: u32, flags: u32, start: u32, count: u32) -> [u8; 20] {
    let mut body = [0; 20];
    let fields = [20, flags, index, start, count];
    for (to, from) in body.chunks_exact_mut(4).zip(fields) {
        to.copy_from_slice(&from.to_ne_bytes());
    }
    body
}

/// Gives the device access to a range of guest memory, in the file that the message carries.
pub fn dma_map(flags: u32, offset: u64, address: u64, size: u64) -> [u8; 32] {
    let mut body = [0; 32];
    body[..4].copy_from_slice(&32_u32.to_ne_bytes());
    body[4..8].copy_from_slice(&flags.to_ne_bytes());
    body[8..16].copy_from_slice(&offset.to_ne_bytes());
    body[16..24].copy_from_slice(&address.to_ne_bytes());
    body[24..].copy_from_slice(&size.to_ne_bytes());
    body
}

/// Revokes access to a range of guest memory.
pub fn dma_unmap(address: u64, size: u64) -> [u8; 24] {
    let mut body = [0; 24];
    body[..4].copy_from_slice(&24_u32.to_ne_bytes());
    body[8..16].copy_from_slice(&address.to_ne_bytes());
    body[16..].copy_from_slice(&size.to_ne_bytes());
    body
}

/// Size in bytes of an access to a region, without data.
pub const ACCESS: usize = 16;

/// An access to a region.
pub fn access(region: u32, offset: u64, count: u32) -> [u8; ACCESS] {
    let mut body = [0; ACCESS];
    body[..8].copy_from_slice(&offset.to_ne_bytes());
    body[8..12].copy_from_slice(&region.to_ne_bytes());
    body[12..].copy_from_slice(&count.to_ne_bytes());
    body
}

/// Returns the data of the reply to a read.
pub fn parse_read(body: &[u8], region: u32, offset: u64, count: u32) -> Result<&[u8], Lie> {
    let len = ACCESS + count as usize;
    length(body.len(), len, len)?;
    parse_write(body, region, offset, count)?;
    Ok(&body[ACCESS..])
}

/// Checks the reply to a write, which repeats the request without data.
pub fn parse_write(body: &[u8], region: u32, offset: u64, count: u32) -> Result<(), Lie> {
    length(body.len(), ACCESS, ACCESS + count as usize)?;
    let fields = [
        ("the offset", u64_at(body, 0), offset),
        ("the region", u64::from(u32_at(body, 8)), u64::from(region)),
        ("the count", u64::from(u32_at(body, 12)), u64::from(count)),
    ];
    match fields.iter().find(|(_, its, asked)| its != asked) {
        Some(&(what, value, _)) => Err(Lie::Value { what, value }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn region(flags: u32, index: u32, first: u32, size: u64) -> Vec<u8> {
        let mut body = vec![0; REGION_INFO];
        body[4..8].copy_from_slice(&flags.to_ne_bytes());
        body[8..12].copy_from_slice(&index.to_ne_bytes());
        body[12..16].copy_from_slice(&first.to_ne_bytes());
        body[16..24].copy_from_slice(&size.to_ne_bytes());
        body
    }

    fn with_areas(next: u32, areas: &[(u64, u64)]) -> Vec<u8> {
        let mut body = region(VFIO_REGION_INFO_FLAG_CAPS, 2, 32, 0x10000);
        body.extend_from_slice(&(VFIO_REGION_INFO_CAP_SPARSE_MMAP as u16).to_ne_bytes());
        body.extend_from_slice(&1_u16.to_ne_bytes());
        body.extend_from_slice(&next.to_ne_bytes());
        body.extend_from_slice(&(areas.len() as u32).to_ne_bytes());
        body.extend_from_slice(&[0; 4]);
        for (start, len) in areas {
            body.extend_from_slice(&start.to_ne_bytes());
            body.extend_from_slice(&len.to_ne_bytes());
        }
        body
    }

    #[test]
    fn an_answer_to_another_message_is_a_lie() {
        let mut bytes = header(7, Command::RegionRead, 24);
        bytes[8] = 1;
        let reply = Reply::parse(&bytes, 7, Command::RegionRead, 24).unwrap();
        assert_eq!((reply.len, reply.errno), (24, None));
        assert!(Reply::parse(&bytes, 8, Command::RegionRead, 24).is_err());
        assert!(Reply::parse(&bytes, 7, Command::RegionWrite, 24).is_err());
        assert!(Reply::parse(&bytes, 7, Command::RegionRead, 23).is_err());
        bytes[8] = 0;
        assert!(Reply::parse(&bytes, 7, Command::RegionRead, 24).is_err());
    }

    #[test]
    fn a_message_shorter_than_its_header_is_a_lie() {
        let mut bytes = header(0, Command::Version, 0);
        bytes[8] = 1;
        bytes[4] = 15;
        assert!(Reply::parse(&bytes, 0, Command::Version, 100).is_err());
    }

    #[test]
    fn an_error_without_a_number_is_still_an_error() {
        let mut bytes = header(0, Command::DeviceReset, 0);
        bytes[8] = 0x21;
        let parse = |bytes: &[u8; 16]| Reply::parse(bytes, 0, Command::DeviceReset, 0).unwrap();
        assert_eq!(parse(&bytes).errno, Some(libc::EIO));
        bytes[12] = 22;
        assert_eq!(parse(&bytes).errno, Some(libc::EINVAL));
    }

    #[test]
    fn versions_say_how_many_descriptors_fit() {
        let text = |json: &str| {
            let mut body = vec![0, 0, 1, 0];
            body.extend_from_slice(json.as_bytes());
            body.push(0);
            parse_version(&body).map(|limits| limits.descriptors)
        };
        assert_eq!(text("{}"), Ok(1));
        assert_eq!(text("{\"capabilities\":{\"max_msg_fds\":16}}"), Ok(16));
        assert_eq!(text("{\"capabilities\":{\"max_msg_fds\":0}}"), Ok(1));
        assert_eq!(text("{\"capabilities\":3}"), Ok(1));
        assert_eq!(text("{"), Err(Lie::Json));
        assert_eq!(parse_version(&[0, 0, 1, 0]).unwrap().descriptors, 1);
        assert_eq!(parse_version(&[0, 0, 1, 0, b'{', b'}']), Err(Lie::Json));
        assert!(parse_version(&[1, 0, 0, 0]).is_err());
        assert!(parse_version(&version()).is_ok());
    }

    #[test]
    fn areas_lie_within_their_region_and_apart() {
        let parse = |next, areas| RegionInfo::parse(&with_areas(next, areas), 2);
        let info = parse(0, &[(0, 0x1000), (0x4000, 0xc000)]).unwrap();
        assert_eq!(info.areas, [(0, 0x1000), (0x4000, 0x10000)]);
        assert_eq!(parse(0, &[]).unwrap().areas, []);
        assert!(parse(0, &[(0x1000, 0x10000)]).is_err());
        assert!(parse(0, &[(u64::MAX, 2)]).is_err());
        assert!(parse(0, &[(0, 0x2000), (0x1000, 0x1000)]).is_err());
    }

    #[test]
    fn capabilities_that_go_in_circles_or_nowhere_are_lies() {
        let mut body = with_areas(32, &[]);
        // A different capability, which links to itself.
        body[32] = 9;
        assert!(RegionInfo::parse(&body, 2).is_err());
        for first in [1, 31, 49, 4096, u32::MAX] {
            body[12..16].copy_from_slice(&first.to_ne_bytes());
            assert!(RegionInfo::parse(&body, 2).is_err(), "{first}");
        }
        let mut body = with_areas(0, &[(0, 0x1000)]);
        body[40] = 2;
        assert!(
            RegionInfo::parse(&body, 2).is_err(),
            "areas that are not there"
        );
    }

    #[test]
    fn a_region_without_capabilities_can_be_mapped_whole() {
        let info = RegionInfo::parse(&region(7, 0, 0, 0x2000), 0).unwrap();
        assert_eq!(info.areas, [(0, 0x2000)]);
        let flags = 7 | VFIO_REGION_INFO_FLAG_CAPS;
        let info = RegionInfo::parse(&region(flags, 0, 32, 0x2000), 0).unwrap();
        assert_eq!(info.areas, [], "capabilities that did not fit");
        assert!(RegionInfo::parse(&region(7, 1, 0, 0x2000), 0).is_err());
        assert!(RegionInfo::parse(&region(7, 0, 0, 1 << 60), 0).is_err());
        assert!(RegionInfo::parse(&region(7, 0, 0, 1)[..31], 0).is_err());
    }

    #[test]
    fn a_read_answers_what_was_asked() {
        let mut body = access(1, 8, 4).to_vec();
        assert!(parse_write(&body, 1, 8, 4).is_ok());
        assert!(parse_read(&body, 1, 8, 4).is_err(), "no data");
        body.extend_from_slice(&[1, 2, 3, 4]);
        assert_eq!(parse_read(&body, 1, 8, 4), Ok(&[1, 2, 3, 4][..]));
        for (region, offset, count) in [(2, 8, 4), (1, 9, 4), (1, 8, 3), (1, 8, 5)] {
            assert!(parse_read(&body, region, offset, count).is_err());
        }
    }

    proptest! {
        #[test]
        fn whatever_a_server_answers_is_taken_or_refused(
            mut body in prop::collection::vec(any::<u8>(), 0..200),
            index in 0_u32..3,
            first in 0_u32..80,
            count in 0_u32..9,
        ) {
            let _ = parse_version(&body);
            let _ = DeviceInfo::parse(&body);
            let _ = IrqInfo::parse(&body, index);
            let _ = parse_read(&body, index, 0, count);
            let _ = RegionInfo::parse(&body, index);
            if body.len() >= 48 {
                // Makes the body valid up to the areas.
                body[8..12].copy_from_slice(&index.to_ne_bytes());
                body[12..16].copy_from_slice(&first.to_ne_bytes());
                body[22..24].fill(0);
                if let Ok(info) = RegionInfo::parse(&body, index) {
                    for (start, end) in info.areas {
                        prop_assert!(start <= end && end <= info.size);
                    }
                }
            }
        }
    }
}
