//! The results (`CUresult`) that Gantry itself gives.

/// A parameter is not acceptable.
pub const INVALID_VALUE: i32 = 1;
/// No memory of the device, of the window, or of this application's quota is left.
pub const OUT_OF_MEMORY: i32 = 2;
/// `cuInit` has not been called.
pub const NOT_INITIALIZED: i32 = 3;
/// The worker has ended.
pub const DEVICE_UNAVAILABLE: i32 = 46;
/// There is no device, as there is no worker.
pub const NO_DEVICE: i32 = 100;
/// No device of this number.
pub const INVALID_DEVICE: i32 = 101;
/// An image is none.
pub const INVALID_IMAGE: i32 = 200;
/// No part of an image is for this device.
pub const NO_BINARY_FOR_GPU: i32 = 209;
/// The image is text, but not valid PTX.
pub const INVALID_PTX: i32 = 218;
/// No context is current, or a handle is no context's.
pub const INVALID_CONTEXT: i32 = 201;
/// A file is not there.
pub const FILE_NOT_FOUND: i32 = 301;
/// A handle is none.
pub const INVALID_HANDLE: i32 = 400;
/// What was asked for does not hold all that there is to tell.
pub const LOSSY_QUERY: i32 = 402;
/// A call of the operating system has failed.
pub const OPERATING_SYSTEM: i32 = 304;
/// Something was not found.
pub const NOT_FOUND: i32 = 500;
/// Work has not completed.
pub const NOT_READY: i32 = 600;
/// `CUDA_ERROR_NOT_PERMITTED`.
pub const NOT_PERMITTED: i32 = 800;
/// The host's driver does not have that.
pub const NOT_SUPPORTED: i32 = 801;
/// Memory is registered already.
pub const HOST_MEMORY_ALREADY_REGISTERED: i32 = 712;
/// Memory is not registered.
pub const HOST_MEMORY_NOT_REGISTERED: i32 = 713;
/// Not while a stream is being captured.
pub const STREAM_CAPTURE_UNSUPPORTED: i32 = 900;
/// A capture ends in the stream in which it has begun.
pub const STREAM_CAPTURE_UNMATCHED: i32 = 903;
/// An executable graph cannot become what another graph is.
pub const GRAPH_EXEC_UPDATE_FAILURE: i32 = 910;
/// Nobody knows.
pub const UNKNOWN: i32 = 999;
/// What a function of the client is called with when no graph has it any more. No `CUresult`.
pub const FUNCTION_GONE: i32 = -2;
/// Work that was waited for has failed: the client asks the driver with which result. No `CUresult`.
pub const ASK_AGAIN: i32 = -1;
