//! What both sides compare before they say anything else.

/// Protocol number, incremented when the meaning of messages, or how rings hold them, changes.
pub const NUMBER: u32 = 11;

/// The version of a build: that of the protocol, and that of one API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// The protocol's number: [`NUMBER`].
    pub number: u32,
    /// Hash of the API's schema.
    pub fingerprint: u64,
}
