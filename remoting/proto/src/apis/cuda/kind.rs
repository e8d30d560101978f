//! What objects there are, and how their numbers look.

/// The number of the legacy default stream.
pub const LEGACY: u32 = 1;
/// Numbers of objects begin here: below are none (0) and the streams that a program names by number.
pub const FIRST: u32 = 16;
/// What stands for a value that is no handle: no object has this number.
pub const NO_HANDLE: u32 = u32::MAX;

/// What kinds of handles a client has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
#[repr(u8)]
pub enum Kind {
    Context = 1,
    Stream,
    Event,
    Module,
    Function,
    Library,
    Kernel,
    Pool,
    Graph,
    Executable,
    Node,
    /// Physical memory (`cuMemCreate`).
    Physical,
    Array,
    Mipmap,
    Link,
    /// `cublasHandle_t`
    Blas,
    /// `cublasLtHandle_t`
    BlasLt,
}

impl Kind {
    /// What handles of this type in C stand for.
    pub fn of_type(name: &str) -> Option<Self> {
        Some(match name {
            "CUcontext" => Self::Context,
            "CUstream" => Self::Stream,
            "CUevent" => Self::Event,
            "CUmodule" => Self::Module,
            "CUfunction" => Self::Function,
            "CUlibrary" => Self::Library,
            "CUkernel" => Self::Kernel,
            "CUmemoryPool" => Self::Pool,
            "CUgraph" => Self::Graph,
            "CUgraphExec" => Self::Executable,
            "CUgraphNode" => Self::Node,
            "CUmemGenericAllocationHandle" => Self::Physical,
            "CUarray" => Self::Array,
            "CUmipmappedArray" => Self::Mipmap,
            "CUlinkState" => Self::Link,
            // The runtime's name of the driver's.
            "cudaStream_t" => Self::Stream,
            "cublasHandle_t" => Self::Blas,
            "cublasLtHandle_t" => Self::BlasLt,
            _ => return None,
        })
    }

    /// Whether an object of this kind may stand where one of the other is wanted: APIs take kernels
    /// for functions, and handles of cuBLAS for those of cuBLASLt.
    pub fn serves_as(self, wanted: Self) -> bool {
        let others = matches!(
            (self, wanted),
            (Self::Kernel, Self::Function) | (Self::Blas, Self::BlasLt)
        );
        self == wanted || others
    }

    /// What something that is none of this kind is answered with.
    pub const fn invalid(self) -> i32 {
        match self {
            Self::Context => super::codes::INVALID_CONTEXT,
            Self::Pool | Self::Physical => super::codes::INVALID_VALUE,
            _ => super::codes::INVALID_HANDLE,
        }
    }
}
