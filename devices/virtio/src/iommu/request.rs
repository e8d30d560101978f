//! The driver's requests (5.13.6) and their replies.

use std::io::Read;

use device_model::memory::GuestRam;
use virtio_queue::{DescriptorChain, Reader};
use vm_memory::bitmap::BitmapSlice;

use super::{
    add_error::MAX_RESERVED,
    domains::{Domains, Mapping},
    endpoint::{Access, Reserved, ReservedKind},
    status::Status,
};

/// Size in bytes of the properties in the reply to a PROBE.
pub const PROBE_SIZE: usize = 512;

/// Size in bytes of one reserved range in the properties.
const RESERVED_SIZE: usize = 24;

const _: () = assert!(MAX_RESERVED * RESERVED_SIZE <= PROBE_SIZE);

/// Size in bytes of the tail of a reply, which contains the status.
pub const TAIL_SIZE: usize = 4;

const ATTACH: u8 = 1;
const DETACH: u8 = 2;
const MAP: u8 = 3;
const UNMAP: u8 = 4;
const PROBE: u8 = 5;

/// Flag of ATTACH.
const ATTACH_BYPASS: u32 = 1 << 0;

/// Flags of MAP.
const MAP_READ: u32 = 1 << 0;
const MAP_WRITE: u32 = 1 << 1;

/// Property type: reserved memory.
const PROPERTY_RESERVED: u16 = 1;

/// A request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Request {
    /// Attaches an endpoint to a domain.
    Attach {
        /// The domain.
        domain: u32,
        /// The endpoint.
        endpoint: u32,
        /// Flags, including unknown ones.
        flags: u32,
        /// All reserved fields are zero.
        clean: bool,
    },
    /// Detaches an endpoint from a domain.
    Detach {
        /// The domain.
        domain: u32,
        /// The endpoint.
        endpoint: u32,
    },
    /// Maps a range in a domain.
    Map {
        /// The domain.
        domain: u32,
        /// First and last I/O address.
        range: (u64, u64),
        /// First guest-physical address.
        guest: u64,
        /// Flags, including unknown ones.
        flags: u32,
    },
    /// Removes the mappings in a range.
    Unmap {
        /// The domain.
        domain: u32,
        /// First and last I/O address.
        range: (u64, u64),
    },
    /// Queries the properties of an endpoint.
    Probe {
        /// The endpoint.
        endpoint: u32,
    },
}

impl Request {
    /// Reads a request; `None` if its type is unknown or it is too short for its type.
    pub fn read(chain: DescriptorChain<&GuestRam>, ram: &GuestRam) -> Option<Self> {
        let mut reader = chain.reader(ram).ok()?;
        let [kind, ..] = take::<4>(&mut reader)?;
        let reader = &mut reader;
        let request = match kind {
            ATTACH => Self::Attach {
                domain: le32(reader)?,
                endpoint: le32(reader)?,
                flags: le32(reader)?,
                clean: le32(reader)? == 0,
            },
            DETACH => {
                let (domain, endpoint) = (le32(reader)?, le32(reader)?);
                take::<8>(reader)?;
                Self::Detach { domain, endpoint }
            }
            MAP => Self::Map {
                domain: le32(reader)?,
                range: (le64(reader)?, le64(reader)?),
                guest: le64(reader)?,
                flags: le32(reader)?,
            },
            UNMAP => {
                let (domain, range) = (le32(reader)?, (le64(reader)?, le64(reader)?));
                take::<4>(reader)?;
                Self::Unmap { domain, range }
            }
            PROBE => {
                let endpoint = le32(reader)?;
                take::<64>(reader)?;
                Self::Probe { endpoint }
            }
            _ => return None,
        };
        Some(request)
    }

    /// Number of bytes before the tail in the reply.
    pub fn answer_size(&self) -> usize {
        match self {
            Self::Probe { .. } => PROBE_SIZE,
            _ => 0,
        }
    }

    /// Executes the request. `bypass`: the driver supports bypass domains. Fills `properties`,
    /// which has [`Request::answer_size`] bytes, all zero.
    pub fn carry_out(
        &self,
        domains: &mut Domains,
        bypass: bool,
        properties: &mut [u8],
    ) -> Result<(), Status> {
        match *self {
            Self::Attach {
                domain,
                endpoint,
                flags,
                clean,
            } => {
                let known = if bypass { ATTACH_BYPASS } else { 0 };
                if !clean || flags & !known != 0 {
                    return Err(Status::Invalid);
                }
                domains.attach(endpoint, domain, flags & ATTACH_BYPASS != 0)
            }
            Self::Detach { domain, endpoint } => domains.detach(endpoint, domain),
            Self::Map {
                domain,
                range: (first, last),
                guest,
                flags,
            } => {
                if flags & !(MAP_READ | MAP_WRITE) != 0 {
                    return Err(Status::Invalid);
                }
                let access = Access {
                    read: flags & MAP_READ != 0,
                    write: flags & MAP_WRITE != 0,
                };
                let mapping = Mapping {
                    last,
                    guest,
                    access,
                };
                domains.map(domain, first, mapping)
            }
            Self::Unmap {
                domain,
                range: (first, last),
            } => domains.unmap(domain, first, last),
            Self::Probe { endpoint } => {
                let reserved = domains.reserved(endpoint)?;
                let places = properties.chunks_exact_mut(RESERVED_SIZE);
                for (place, range) in places.zip(reserved) {
                    place.copy_from_slice(&property(range));
                }
                Ok(())
            }
        }
    }
}

/// A reserved range as a property: its type, the length of the rest, and the rest.
fn property(reserved: &Reserved) -> [u8; RESERVED_SIZE] {
    let mut bytes = [0; RESERVED_SIZE];
    bytes[..2].copy_from_slice(&PROPERTY_RESERVED.to_le_bytes());
    bytes[2..4].copy_from_slice(&(RESERVED_SIZE as u16 - 4).to_le_bytes());
    bytes[4] = match reserved.kind {
        ReservedKind::Reserved => 0,
        ReservedKind::Msi => 1,
    };
    bytes[8..16].copy_from_slice(&reserved.range.start().to_le_bytes());
    bytes[16..].copy_from_slice(&reserved.range.end().to_le_bytes());
    bytes
}

fn take<const N: usize>(reader: &mut Reader<'_, impl BitmapSlice>) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    reader.read_exact(&mut bytes).ok()?;
    Some(bytes)
}

fn le32(reader: &mut Reader<'_, impl BitmapSlice>) -> Option<u32> {
    take(reader).map(u32::from_le_bytes)
}

fn le64(reader: &mut Reader<'_, impl BitmapSlice>) -> Option<u64> {
    take(reader).map(u64::from_le_bytes)
}
