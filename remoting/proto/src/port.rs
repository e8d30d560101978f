//! The accelerator port: the interface between the machine's device, the agent in the guest and the workers on the
//! host.
//!
//! ```text
//!   application ─ slice of the window, doorbell ──────────────────> worker
//!       │ hello, descriptors                                          │ descriptors
//!     agent ── registers ──> the machine's device ── attachment ──────┘
//! ```
//!
//! The device is a PCI function with three BARs:
//!
//! | BAR | what |
//! |---|---|
//! | 0 | [registers] and the MSI-X table; only for the agent |
//! | 1 | doorbells: a page for each slice; a write of any kind rings |
//! | 2 | the window, 64 bits wide and prefetchable: one slice after the other |
//!
//! A slice is the [window](remoting_transport::window) of one application. The agent writes the application's hello to
//! [`CLIENT_HELLO`](registers) in the slice, then opens the slice by a command. The device hands the slice's memory,
//! its doorbell and its interrupt to a worker, which answers the hello in the slice. Only workers read what a guest
//! writes to its window.
//!
//! Vector 0 signals that a slice's state has changed. Vector 1 + n is raised for a sleeper of slice n that asks for it.
//! With MSI-X off, all of them use the function's line, if the agent has enabled that; registers then tell which slices
//! they are for.

use alloc::string::String;

use crate::wire::{
    api::{ApiId, Spoken},
    codec::{Reader, Wire},
    hello::{self, Version},
};

/// PCI vendor of the port.
pub const VENDOR: u16 = 0x4741;
/// PCI device of the port.
pub const DEVICE: u16 = 0x4350;
/// PCI class: processing accelerator.
pub const CLASS: u32 = 0x12_0000;
/// Maximum number of slices of a port.
pub const MOST_SLICES: u32 = 64;
/// Distance between doorbells in bytes.
pub const DOORBELL: u64 = 4096;

/// Registers in BAR 0: 32 bits each, little-endian. Others read as zero.
pub mod registers {
    /// Size of BAR 0.
    pub const SIZE: u64 = 0x4000;
    /// Reads [`MAGIC_VALUE`].
    pub const MAGIC: u64 = 0x00;
    /// Reads [`INTERFACE`].
    pub const VERSION: u64 = 0x04;
    /// Reads the number of slices.
    pub const SLICES: u64 = 0x08;
    /// Reads the number of changes of slice states, modulo 2^32.
    pub const CHANGES: u64 = 0x0c;
    /// Reads the size of a slice in bytes, the lower half.
    pub const SLICE_SIZE_LOW: u64 = 0x10;
    /// Reads the size of a slice in bytes, the upper half.
    pub const SLICE_SIZE_HIGH: u64 = 0x14;
    /// A write closes all slices.
    pub const RESET: u64 = 0x18;
    /// Whether interrupts use the function's line (INTx) while MSI-X is off: writing 1 enables that, 0 disables it.
    /// Zero after a reset by [`RESET`].
    pub const LINE: u64 = 0x1c;
    /// Reads a bitmap of the slices 0 to 31 that have had interrupts since the last read. Zero while interrupts are
    /// delivered as messages.
    pub const RUNG_LOW: u64 = 0x20;
    /// The same for slices 32 to 63.
    pub const RUNG_HIGH: u64 = 0x24;
    /// Reads the APIs that the port's applications may call ([`Apis`](super::Apis)).
    pub const API: u64 = 0x28;
    /// Reads where the host wants the guest's applications to be served ([`Wish`](super::Wish)). A new wish counts as a
    /// change of state.
    pub const WISH: u64 = 0x2c;
    /// Takes the outcome of a wish ([`Outcome`](super::Outcome)).
    pub const OUTCOME: u64 = 0x30;
    /// The first slice's register; 4 bytes each. Reads a [`State`](super::State), takes a [`Command`](super::Command).
    pub const SLICE: u64 = 0x1000;
    /// The first slice's owner; 4 bytes each. Takes a user's number plus one before a slice is opened, and applies to
    /// that opening. Zero names no user.
    pub const OWNER: u64 = 0x1800;
    /// The first slice's API; 4 bytes each. Where the port has [`SEVERAL_APIS`], takes the number of the API that the
    /// slice's next application calls, while the slice is free. Zero selects the port's first API.
    pub const SLICE_API: u64 = 0x1900;
    /// Reads the address that belongs to a wish for [`Server::Elsewhere`](super::Server::Elsewhere), or the devices
    /// that a wish for [`Server::Away`](super::Server::Away) or [`Server::Parked`](super::Server::Parked) concerns: its
    /// bytes, padded with zeroes to [`ADDRESS_SIZE`]. A reader reads the wish again afterwards, since another wish has
    /// another address.
    pub const ADDRESS: u64 = 0x1a00;
    /// Size of an address in bytes.
    pub const ADDRESS_SIZE: u64 = 256;
    /// Takes the reason for an [`Outcome`](super::Outcome), before the outcome: a text and a zero, or [`REASON_SIZE`]
    /// bytes of text.
    pub const REASON: u64 = 0x1b00;
    /// Size of a reason in bytes.
    pub const REASON_SIZE: u64 = 256;
    /// The MSI-X table.
    pub const TABLE: u64 = 0x2000;
    /// The MSI-X pending bits.
    pub const PENDING: u64 = 0x3000;

    /// "GACP".
    pub const MAGIC_VALUE: u32 = u32::from_le_bytes(*b"GACP");
    /// Version of the registers' meaning.
    pub const INTERFACE: u32 = 2;
    /// Version for a port whose applications may call one of several APIs. An agent that does not know [`SLICE_API`]
    /// does not use such a port.
    pub const SEVERAL_APIS: u32 = 3;
}

/// The APIs that a port's applications may call. Encoded as a number with one API's number in each byte, the first API
/// in the lowest byte; zero from a machine that does not tell.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Apis(u32);

impl Apis {
    /// All APIs that one port may have at once: native contexts have ports of their own.
    pub const ALL: Self = Self(ApiId::OpenCl.number() | ApiId::Cuda.number() << 8);

    /// A single API.
    pub const fn one(api: ApiId) -> Self {
        Self(api.number())
    }

    /// Decodes the value of a register.
    pub const fn from_number(number: u32) -> Self {
        Self(number)
    }

    /// The value for a register.
    pub const fn number(self) -> u32 {
        self.0
    }

    /// The version of the registers' meaning for a port with these APIs.
    pub const fn interface(self) -> u32 {
        match self.has_several() {
            true => registers::SEVERAL_APIS,
            false => registers::INTERFACE,
        }
    }

    /// Whether there is more than one.
    pub const fn has_several(self) -> bool {
        self.0 >> 8 != 0
    }

    /// Whether this API may be among them; true if the APIs are not known.
    pub fn may_have(self, number: u32) -> bool {
        self.0 == 0 || self.numbers().any(|one| one == number)
    }

    /// The first API, if this build knows it.
    pub fn first(self) -> Option<ApiId> {
        ApiId::from_number(self.0 & 0xff)
    }

    /// The API of an application that calls the API with this number; zero means the first API.
    pub fn of_application(self, number: u32) -> Option<ApiId> {
        match number {
            0 => self.first(),
            _ => ApiId::from_number(number).filter(|_| self.may_have(number)),
        }
    }

    /// The APIs that this build knows.
    pub fn known(self) -> impl Iterator<Item = ApiId> {
        self.numbers().filter_map(ApiId::from_number)
    }

    fn numbers(self) -> impl Iterator<Item = u32> {
        let bytes = self.0.to_le_bytes();
        bytes.into_iter().map(u32::from).filter(|one| *one != 0)
    }
}

/// The state of a slice.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum State {
    /// The slice belongs to nobody.
    Free = 0,
    /// Waiting for a worker.
    Opening = 1,
    /// A worker serves it, and has answered the hello.
    Open = 2,
    /// Its worker has ended or has refused it; the slice must be closed.
    Ended = 3,
    /// Its memory is being replaced.
    Closing = 4,
}

impl State {
    /// The state with this number.
    pub fn from_number(number: u32) -> Option<Self> {
        [
            Self::Free,
            Self::Opening,
            Self::Open,
            Self::Ended,
            Self::Closing,
        ]
        .into_iter()
        .find(|state| *state as u32 == number)
    }
}

/// Who serves a guest's applications.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Server {
    /// The guest's own pool, on a device of the guest.
    Local,
    /// The host's pool, through the port.
    Host,
    /// The server at the address in the [registers](registers::ADDRESS).
    Elsewhere,
    /// The host's pool, through the port, while devices of the guest are away, and the guest's own pool again once
    /// their drivers are bound again. The devices' PCI addresses are in the [registers](registers::ADDRESS), separated
    /// by commas.
    Away,
    /// Nobody: applications of the guest's own pool wait, with their state in the guest's memory, until the drivers of
    /// the devices named as above, if any, are bound again. The port serves new applications. On a port for native
    /// contexts: all of its programs are suspended in the guest's memory, and new ones wait, as long as this wish is
    /// there.
    Parked,
    /// No change: the agent only says whether a wish for [`Parked`](Self::Parked) could be carried out. Only a port for
    /// native contexts has such a wish.
    Examined,
}

impl Server {
    /// Whether a wish for this server comes with an address or devices.
    pub fn is_at_address(self) -> bool {
        matches!(self, Self::Elsewhere | Self::Away | Self::Parked)
    }
}

/// Where the host wants the guest's applications to be served. Encoded as a number: the server in the lowest byte, the
/// wish's own number in the next; zero is no wish.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Wish {
    /// Distinguishes this wish from others.
    pub number: u8,
    /// The server.
    pub by: Server,
}

impl Wish {
    /// The value for a register.
    pub fn to_number(self) -> u32 {
        let by = match self.by {
            Server::Local => 1,
            Server::Host => 2,
            Server::Elsewhere => 3,
            Server::Away => 4,
            Server::Parked => 5,
            Server::Examined => 6,
        };
        u32::from(self.number) << 8 | by
    }

    /// Decodes the value of a register.
    pub fn from_number(number: u32) -> Option<Self> {
        let [by, own, ..] = number.to_le_bytes();
        let by = match by {
            1 => Server::Local,
            2 => Server::Host,
            3 => Server::Elsewhere,
            4 => Server::Away,
            5 => Server::Parked,
            6 => Server::Examined,
            _ => return None,
        };
        Some(Self { number: own, by })
    }
}

/// The outcome of a wish. Encoded as a number: the kind in the lowest byte, the wish's number in the next, and a number
/// of applications in the upper half.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Outcome {
    /// The number of the wish.
    pub number: u8,
    /// The kind.
    pub kind: OutcomeKind,
    /// How many applications have moved or have stayed; or how many processes use a device.
    pub applications: u16,
}

/// A kind of outcome.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum OutcomeKind {
    /// All applications are served as wished, and nobody in the guest uses the device that was left.
    Done,
    /// Some applications stay where they are.
    Stay,
    /// The guest's agent cannot do this: it has no pool of its own.
    Cannot,
    /// The move has begun; another outcome follows.
    Begun,
    /// This many processes besides the guest's own pool have a device open that is to leave. The reason names some of
    /// them.
    InUse,
}

impl Outcome {
    /// The value for a register.
    pub fn to_number(self) -> u32 {
        let kind = match self.kind {
            OutcomeKind::Done => 1,
            OutcomeKind::Stay => 2,
            OutcomeKind::Cannot => 3,
            OutcomeKind::Begun => 4,
            OutcomeKind::InUse => 5,
        };
        u32::from(self.applications) << 16 | u32::from(self.number) << 8 | kind
    }

    /// Decodes the value that was written to a register.
    pub fn from_number(number: u32) -> Option<Self> {
        let [kind, own, ..] = number.to_le_bytes();
        let kind = match kind {
            1 => OutcomeKind::Done,
            2 => OutcomeKind::Stay,
            3 => OutcomeKind::Cannot,
            4 => OutcomeKind::Begun,
            5 => OutcomeKind::InUse,
            _ => return None,
        };
        Some(Self {
            number: own,
            kind,
            applications: (number >> 16) as u16,
        })
    }
}

/// Encodes a user for a register: the user's number plus one, and zero for none. The highest number is therefore never
/// a user's.
pub fn user_to_number(user: Option<u32>) -> u32 {
    user.map_or(0, |user| user.wrapping_add(1))
}

/// The user that a register names.
pub fn user_of_number(number: u32) -> Option<u32> {
    number.checked_sub(1)
}

/// A command for a slice.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum Command {
    /// Assigns a worker to the slice, if it is free.
    Open = 1,
    /// Removes the slice's worker and its contents.
    Close = 2,
}

/// What an application that has waited long sends to the agent, at most ten times a second, to have it check whether
/// its worker is still there. If it is not, the agent closes the connection; otherwise it does not answer. The agent
/// does not check by itself, since each check costs an exit.
pub const LOOK: u8 = b'?';

/// Where an application finds its slice. Sent after the worker's hello: two offsets, then the files of the window and
/// of the doorbells, and of an alarm if the agent has the port's interrupts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SliceOffsets {
    /// Offset of the slice in the window's file.
    pub slice: u64,
    /// Offset of the doorbell in the doorbells' file.
    pub doorbell: u64,
}

impl SliceOffsets {
    /// Encoded size in bytes.
    pub const SIZE: usize = 16;

    /// The offsets as bytes.
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        bytes[..8].copy_from_slice(&self.slice.to_le_bytes());
        bytes[8..].copy_from_slice(&self.doorbell.to_le_bytes());
        bytes
    }

    /// Decodes the offsets.
    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> Self {
        let number = u128::from_le_bytes(bytes);
        Self {
            slice: number as u64,
            doorbell: (number >> 64) as u64,
        }
    }
}

/// The first bytes of an attachment.
pub const MAGIC: [u8; 8] = *b"GANTRYPT";
/// The first bytes of an attachment of a slice that another worker has served before.
pub const MAGIC_TAKEN_UP: [u8; 8] = *b"GANTRYPU";
/// Size of an attachment in bytes.
pub const ATTACHMENT: usize = 256;
/// Maximum size of a name in an attachment, in bytes.
pub const NAME: usize = 64;
/// A worker's answer to an attachment: it serves the slice.
pub const READY: u8 = 1;
/// A worker's answer to an attachment: it refuses, and has logged why. A worker of another build answers with its
/// [hello](crate::wire::hello) instead.
pub const REFUSED: u8 = 2;

/// What a machine sends to a worker that is to serve a slice. Four files come with it: the slice's memory, the doorbell
/// (an eventfd), the interrupt (an eventfd) and the port's account of device memory.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Attachment {
    /// The API that the application calls.
    pub api: ApiId,
    /// The version of that API that the machine was built with.
    pub version: Version,
    /// Size of the slice in bytes.
    pub window: u64,
    /// The number of the slice, below [`MOST_SLICES`].
    pub slice: u32,
    /// Maximum bytes of device memory for all applications of the port together; zero means no limit but the device's.
    pub memory: u64,
    /// Share of the device relative to others; zero: only while nobody else has work.
    pub weight: u32,
    /// For how many milliseconds the client waits at most for time slices of others; zero: it does not matter.
    pub latency: u32,
    /// The client that owns the application: shares with the same name belong to one client.
    pub client: String,
    /// The devices to offer, as `base::gpus` names them; empty offers all of them.
    pub device: String,
    /// Name under which the machine's compiled programs are kept, so that its later applications find them; empty keeps
    /// nothing.
    pub compiled: String,
    /// The user in the guest who owns the application, if the guest's agent has told.
    pub user: Option<u32>,
    /// Another worker has served the application before: its saved state follows, by the messages of `remoting_transport::control`,
    /// and nothing in the slice is touched before that.
    pub takes_up: bool,
}

/// The peer sent something other than an attachment that can be served.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum NoAttachment {
    /// It is not an attachment.
    #[error("the peer sent no attachment")]
    Malformed,
    /// The attachment is for an API that this build does not know.
    #[error(
        "the machine's port is for accelerator API number {0}, which this worker does not know: \
         install gantry-accel of the machine's release"
    )]
    Api(u32),
}

impl Attachment {
    /// An attachment for an API in this build's version.
    pub fn new(spoken: Spoken, window: u64) -> Self {
        Self {
            api: spoken.api,
            version: spoken.version,
            window,
            slice: 0,
            memory: 0,
            weight: 1,
            latency: 0,
            client: String::new(),
            device: String::new(),
            compiled: String::new(),
            user: None,
            takes_up: false,
        }
    }

    /// Whether a connection with these first bytes is a machine's.
    pub fn begins(start: &[u8]) -> bool {
        start.starts_with(&MAGIC) || start.starts_with(&MAGIC_TAKEN_UP)
    }

    /// The attachment as bytes; names are truncated to [`NAME`] bytes.
    pub fn to_bytes(&self) -> [u8; ATTACHMENT] {
        let magic = if self.takes_up { MAGIC_TAKEN_UP } else { MAGIC };
        let mut out = magic.to_vec();
        self.version.number.put(&mut out);
        self.weight.put(&mut out);
        self.version.fingerprint.put(&mut out);
        self.window.put(&mut out);
        self.memory.put(&mut out);
        for name in [&self.client, &self.device, &self.compiled] {
            let end = out.len() + NAME;
            out.extend(name.bytes().take(NAME));
            out.resize(end, 0);
        }
        self.slice.put(&mut out);
        user_to_number(self.user).put(&mut out);
        self.api.number().put(&mut out);
        self.latency.put(&mut out);
        let mut bytes = [0; ATTACHMENT];
        bytes[..out.len()].copy_from_slice(&out);
        bytes
    }

    /// The version in the first bytes of an attachment.
    pub fn version(start: &[u8; hello::SIZE]) -> Result<Version, NoAttachment> {
        let rest = after_magic(start)?;
        let mut reader = Reader::new(rest);
        let mut read = || {
            let number = u32::take(&mut reader)?;
            u32::take(&mut reader)?;
            let fingerprint = u64::take(&mut reader)?;
            Ok::<_, crate::wire::Malformed>(Version {
                number,
                fingerprint,
            })
        };
        read().map_err(|_| NoAttachment::Malformed)
    }

    /// Decodes an attachment. The caller compares the version.
    pub fn from_bytes(bytes: &[u8; ATTACHMENT]) -> Result<Self, NoAttachment> {
        let rest = after_magic(bytes)?;
        let mut reader = Reader::new(rest);
        let mut read = || {
            let number = u32::take(&mut reader)?;
            let weight = u32::take(&mut reader)?;
            let fingerprint = u64::take(&mut reader)?;
            Ok::<_, crate::wire::Malformed>(Self {
                api: ApiId::default(),
                version: Version {
                    number,
                    fingerprint,
                },
                weight,
                latency: 0,
                window: u64::take(&mut reader)?,
                memory: u64::take(&mut reader)?,
                slice: 0,
                client: String::new(),
                device: String::new(),
                compiled: String::new(),
                user: None,
                takes_up: bytes.starts_with(&MAGIC_TAKEN_UP),
            })
        };
        let mut attachment = read().map_err(|_| NoAttachment::Malformed)?;
        // Magic, two words and three double words precede the names.
        let name = |at: usize| {
            let bytes = &bytes[40 + at * NAME..40 + (at + 1) * NAME];
            let text = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
            String::from_utf8_lossy(text).into_owned()
        };
        attachment.client = name(0);
        attachment.device = name(1);
        attachment.compiled = name(2);
        let mut rest = Reader::new(&bytes[40 + 3 * NAME..]);
        attachment.slice = u32::take(&mut rest).map_err(|_| NoAttachment::Malformed)?;
        attachment.user =
            user_of_number(u32::take(&mut rest).map_err(|_| NoAttachment::Malformed)?);
        let api = u32::take(&mut rest).map_err(|_| NoAttachment::Malformed)?;
        attachment.api = ApiId::from_number(api).ok_or(NoAttachment::Api(api))?;
        attachment.latency = u32::take(&mut rest).map_err(|_| NoAttachment::Malformed)?;
        Ok(attachment)
    }
}

/// The bytes after an attachment's magic.
fn after_magic(bytes: &[u8]) -> Result<&[u8], NoAttachment> {
    let rest = bytes.strip_prefix(&MAGIC);
    rest.or_else(|| bytes.strip_prefix(&MAGIC_TAKEN_UP))
        .ok_or(NoAttachment::Malformed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apis::opencl::OpenCl;

    const SPOKEN: Spoken = Spoken::of::<OpenCl>();

    #[test]
    fn an_attachment_survives_the_way_through_bytes() {
        let attachment = Attachment {
            memory: 1 << 33,
            slice: 5,
            weight: 7,
            latency: 2,
            client: "vm-1".to_owned(),
            device: "x".repeat(NAME),
            compiled: "web".to_owned(),
            user: Some(0),
            takes_up: true,
            ..Attachment::new(SPOKEN, 1 << 28)
        };
        let bytes = attachment.to_bytes();
        assert!(Attachment::begins(&bytes));
        assert_eq!(Attachment::from_bytes(&bytes), Ok(attachment));
        let start = bytes[..hello::SIZE].try_into().unwrap();
        assert_eq!(Attachment::version(start), Ok(SPOKEN.version));
        let mut unknown = bytes;
        unknown[240] = 99;
        assert_eq!(Attachment::from_bytes(&unknown), Err(NoAttachment::Api(99)));
        assert_eq!(
            Attachment::from_bytes(&[1; ATTACHMENT]),
            Err(NoAttachment::Malformed)
        );
    }

    #[test]
    fn a_port_for_one_api_reads_as_its_number_and_one_for_several_has_a_byte_for_each() {
        for api in ApiId::ALL {
            let one = Apis::one(api);
            assert_eq!(one.number(), api.number());
            assert_eq!(one.interface(), registers::INTERFACE);
            assert_eq!(one.first(), Some(api));
        }
        assert_eq!(Apis::ALL.known().count(), 2);
        for api in Apis::ALL.known() {
            assert!(Apis::ALL.may_have(api.number()));
            assert_eq!(Apis::ALL.of_application(api.number()), Some(api));
        }
        assert_eq!(Apis::ALL.number(), 0x0201);
        assert_eq!(Apis::ALL.interface(), registers::SEVERAL_APIS);
    }

    #[test]
    fn an_application_calls_no_api_that_its_port_does_not_have() {
        let one = Apis::one(ApiId::OpenCl);
        assert_eq!(one.of_application(0), Some(ApiId::OpenCl));
        assert_eq!(one.of_application(ApiId::Cuda.number()), None);
        for unknown in [3, 0x0201, u32::MAX] {
            assert_eq!(Apis::ALL.of_application(unknown), None, "{unknown}");
            assert!(!Apis::ALL.may_have(unknown), "{unknown}");
        }
        assert!(Apis::from_number(0).may_have(77), "nothing is known");
    }

    #[test]
    fn a_place_survives_the_way_through_bytes() {
        let place = SliceOffsets {
            slice: 1 << 40,
            doorbell: 3 << 12,
        };
        assert_eq!(SliceOffsets::from_bytes(place.to_bytes()), place);
    }

    #[test]
    fn wishes_and_outcomes_survive_the_way_through_a_register() {
        for by in [
            Server::Local,
            Server::Host,
            Server::Elsewhere,
            Server::Away,
            Server::Parked,
            Server::Examined,
        ] {
            let wish = Wish { number: 255, by };
            assert_eq!(Wish::from_number(wish.to_number()), Some(wish));
        }
        let ends = [OutcomeKind::Done, OutcomeKind::Stay, OutcomeKind::Cannot];
        for kind in ends.into_iter().chain([OutcomeKind::Begun]) {
            let outcome = Outcome {
                number: 7,
                kind,
                applications: u16::MAX,
            };
            assert_eq!(Outcome::from_number(outcome.to_number()), Some(outcome));
        }
        assert_eq!(Wish::from_number(0), None);
        assert_eq!(Outcome::from_number(0xffff_ff00), None);
    }

    #[test]
    fn states_have_the_numbers_that_they_are_read_as() {
        for number in 0..5 {
            assert_eq!(State::from_number(number).unwrap() as u32, number);
        }
        assert_eq!(State::from_number(5), None);
    }
}
