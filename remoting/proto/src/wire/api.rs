//! What code that carries an accelerator API's requests must know of the API, without knowing the requests.

use core::fmt;

use super::{
    codec::Malformed,
    messages::{EventId, StageId},
    version::{NUMBER, Version},
};

/// An accelerator API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ApiId {
    /// OpenCL.
    #[default]
    OpenCl,
    /// CUDA's driver API.
    Cuda,
    /// NVIDIA's kernel interface, for native contexts.
    Nvidia,
}

impl ApiId {
    /// All APIs.
    pub const ALL: [Self; 3] = [Self::OpenCl, Self::Cuda, Self::Nvidia];
    /// The APIs whose calls are carried out by the workers of a pool (`gantry-accel`).
    pub const REMOTED: [Self; 2] = [Self::OpenCl, Self::Cuda];

    /// The API's number in hellos, attachments and registers; never zero.
    pub const fn number(self) -> u32 {
        match self {
            Self::OpenCl => 1,
            Self::Cuda => 2,
            Self::Nvidia => 3,
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
            Self::Nvidia => "nvidia",
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

/// Requests of one class are expected to take equally long on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestClass(pub u64);

/// What a request gives the device to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cost {
    /// Work: the request waits for its turn where the device is shared, and its time is measured.
    Work(RequestClass),
    /// Nothing worth a turn, for this reason.
    Nothing(&'static str),
}

impl Cost {
    /// Work whose time depends on the request's number and these words. Two classes with the same hash (FNV-1a) are
    /// measured as one, no more.
    pub(crate) fn work(opcode: u16, words: &[u64]) -> Self {
        let start = 0xcbf2_9ce4_8422_2325 ^ u64::from(opcode);
        let step = |hash: u64, word: &u64| (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        Self::Work(RequestClass(words.iter().fold(start, step)))
    }

    /// Work on so many bytes. Sizes within a factor of two are one class.
    pub(crate) fn bytes(opcode: u16, bytes: u64) -> Self {
        Self::work(opcode, &[u64::from(bytes.checked_ilog2().unwrap_or(0))])
    }
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

    /// What a request gives the device to do. Implementations name every request, so that none is free by omission.
    fn cost(opcode: u16, request: &Self::Request) -> Cost;

    /// The events of a request that only waits for events or queries them. Such a request may overtake others that wait
    /// for the device.
    fn awaited(request: &Self::Request) -> Option<&[EventId]>;

    /// The event whose number a request frees.
    fn released(request: &Self::Request) -> Option<EventId>;

    /// Whether a request makes the driver compile, or makes the session save, transfer or restore its
    /// state. Such a request may take long and may need the kernel.
    fn needs_kernel(request: &Self::Request) -> bool;
}
