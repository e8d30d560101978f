//! What code that carries an accelerator API's requests must know of the API, without knowing the requests.

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
    /// All APIs.
    pub const ALL: [Self; 2] = [Self::OpenCl, Self::Cuda];

    /// The API's number in hellos, attachments and registers; never zero.
    pub const fn number(self) -> u32 {
        match self {
            Self::OpenCl => 1,
            Self::Cuda => 2,
        }
    }

    /// The API with this number, if this build knows it.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|api| api.number() == number)
    }

    /// The API's name as used in options: lower-case letters.
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

/// An API, and the version of it that a build speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spoken {
    /// The API.
    pub api: ApiId,
    /// The version of the protocol and of this API's schema.
    pub version: Version,
}

impl Spoken {
    /// An API in the version of this build.
    pub const fn of<A: Api>() -> Self {
        Self {
            api: A::ID,
            version: A::VERSION,
        }
    }
}

/// A range of the window in bytes: offset and length.
pub type Part = (u64, u64);

/// What a request does with the contents of the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowUse {
    /// The worker reads this range when it has received the request.
    Read(Part),
    /// The worker has written this range by the time it releases the stage.
    Write(StageId, Part),
}

/// An accelerator API, as spoken between a driver in a guest and a worker: its schema, and what links and sessions need
/// to know about its requests.
///
/// Each function is pure and looks only at the request, which comes from a client and is not trusted.
pub trait Api: fmt::Debug + Send + Sync + 'static {
    /// Any request.
    type Request: fmt::Debug + Send;

    /// The API's identifier.
    const ID: ApiId;
    /// Hash of the schema: of all requests, their answers, and the types that they consist of.
    const FINGERPRINT: u64;
    /// The version that this build speaks.
    const VERSION: Version = Version {
        number: NUMBER,
        fingerprint: Self::FINGERPRINT,
    };

    /// Decodes the request with number `opcode` from all of `bytes`.
    ///
    /// # Errors
    /// There is no such request, or the bytes do not encode it.
    fn decode(opcode: u16, bytes: &[u8]) -> Result<Self::Request, Malformed>;

    /// Whether requests with this number may use contents of the window. All others are carried without being decoded.
    fn may_use_window(opcode: u16) -> bool;

    /// How a request uses the contents of the window, if it does.
    fn window_use(request: &Self::Request) -> Option<WindowUse>;

    /// A hash of everything that determines a request's time on the device: requests with the same hash take about the
    /// same time. None if the request does not use the device.
    fn cost(opcode: u16, request: &Self::Request) -> Option<u64>;

    /// The events of a request that only waits for events or queries them. Such a request may overtake others that wait
    /// for the device.
    fn awaited(request: &Self::Request) -> Option<&[EventId]>;

    /// The event whose number a request frees.
    fn released(request: &Self::Request) -> Option<EventId>;

    /// Whether a request makes the driver compile, or makes the session save, transfer or restore its
    /// state. Such a request may take long and may need the kernel.
    fn needs_kernel(request: &Self::Request) -> bool;
}
