//! The status of a request.

use super::endpoint::MapError;

/// Status of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub enum Status {
    /// Success.
    Ok = 0,
    /// The operation is not supported.
    Unsupported = 2,
    /// The host has failed.
    Device = 3,
    /// The request is invalid.
    Invalid = 4,
    /// A value is out of range.
    Range = 5,
    /// There is no such endpoint or domain.
    NoEntry = 6,
    /// There is no memory at a guest-physical address.
    Fault = 7,
    /// A limit has been reached.
    NoMemory = 8,
}

impl From<MapError> for Status {
    fn from(error: MapError) -> Self {
        match error {
            MapError::NotMemory { .. } => Self::Fault,
            MapError::OutOfRange { .. } => Self::Range,
            MapError::NoMemory(_) => Self::NoMemory,
            MapError::Host(_) | MapError::Stuck(_) => Self::Device,
        }
    }
}
