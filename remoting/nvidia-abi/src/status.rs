//! Statuses that a call returns in its block. 0 is success.

/// Success.
pub const OK: u32 = 0;
/// Another resource is exhausted.
pub const INSUFFICIENT_RESOURCES: u32 = 0x1a;
/// The caller may not do this.
pub const INSUFFICIENT_PERMISSIONS: u32 = 0x1b;
/// The address is invalid.
pub const INVALID_ADDRESS: u32 = 0x1e;
/// An argument is invalid.
pub const INVALID_ARGUMENT: u32 = 0x1f;
/// The class does not exist.
pub const INVALID_CLASS: u32 = 0x22;
/// The client does not exist, or belongs to others.
pub const INVALID_CLIENT: u32 = 0x23;
/// The object does not exist.
pub const INVALID_OBJECT: u32 = 0x31;
/// Memory is exhausted.
pub const NO_MEMORY: u32 = 0x51;
/// The call is not supported.
pub const NOT_SUPPORTED: u32 = 0x56;
