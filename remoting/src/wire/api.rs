//! What an accelerator API is to those that carry its requests without knowing them.

use core::fmt;

use super::{
    codec::Malformed,
    hello::{NUMBER, Version},
    messages::{EventId, StageId},
};

/// An accelerator API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ApiId {
    /// OpenCL.
    #[default]
    OpenCl,
    /// CUDA's driver API.
    Cuda,
}

impl ApiId {
    /// All that there are.
    pub const ALL: [Self; 2] = [Self::OpenCl, Self::Cuda];

    /// Its number in hellos, attachments and registers; never zero.
    pub const fn number(self) -> u32 {
        match self {
            Self::OpenCl => 1,
            Self::Cuda => 2,
        }
    }

    /// The API of this number, if this build knows it.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|api| api.number() == number)
    }

    /// Its name, as it is written in options: lower-case letters.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OpenCl => "opencl",
            Self::Cuda => "cuda",
        }
    }
}

impl fmt::Display for ApiId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An API in the version in which a build speaks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spoken {
    /// The API.
    pub api: ApiId,
    /// Of the protocol, and of this API's schema.
    pub version: Version,
}

impl Spoken {
    /// An API as this build speaks it.
    pub const fn of<A: Api>() -> Self {
        Self {
            api: A::ID,
            version: A::VERSION,
        }
    }
}

/// Bytes of the window: where they begin and how many.
pub type Part = (u64, u64);

/// What a request does with the contents of the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowUse {
    /// The worker reads this part when it has the request.
    Read(Part),
    /// The worker has written this part when it releases the stage.
    Write(StageId, Part),
}

/// An accelerator API, as it is spoken between a driver in a guest and a worker: its schema, and
/// what links and sessions have to know about its requests.
///
/// Each function is pure and looks at nothing but the request, which comes from a client and is
/// not trusted.
pub trait Api: fmt::Debug + Send + Sync + 'static {
    /// Any request.
    type Request: fmt::Debug + Send;

    /// Which one it is.
    const ID: ApiId;
    /// Hash of the schema: of all requests, their answers, and the types that these consist of.
    const FINGERPRINT: u64;
    /// The version in which this build speaks it.
    const VERSION: Version = Version {
        number: NUMBER,
        fingerprint: Self::FINGERPRINT,
    };

    /// Reads the request of number `opcode` from all of `bytes`.
    ///
    /// # Errors
    /// There is no such request, or the bytes are none.
    fn decode(opcode: u16, bytes: &[u8]) -> Result<Self::Request, Malformed>;

    /// Whether requests of this number may use contents of the window: others are carried
    /// without being decoded.
    fn may_use_window(opcode: u16) -> bool;

    /// What a request does with the contents of the window, if anything.
    fn window_use(request: &Self::Request) -> Option<WindowUse>;

    /// What a request's use of the device depends on, as a hash: requests with the same number take
    /// about the same time. None if it does not use the device.
    fn cost(opcode: u16, request: &Self::Request) -> Option<u64>;

    /// The events of a request that does nothing but wait for them or ask about them: such a
    /// request may overtake others that wait for the device.
    fn awaited(request: &Self::Request) -> Option<&[EventId]>;

    /// The event whose number a request gives up.
    fn released(request: &Self::Request) -> Option<EventId>;

    /// Whether a request has the driver compile, or the session carry its state: it may take long and
    /// use the kernel.
    fn needs_kernel(request: &Self::Request) -> bool;
}
