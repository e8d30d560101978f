//! GLoop: GPU kernels made of callbacks, and the host services that they need.
//!
//! A kernel that is written for the device library (`include/gloop/`, CUDA C++17 for nvcc and
//! NVRTC) can be stopped between two of its callbacks within microseconds, leaves the GPU, and
//! later continues where it was. It opens files and sockets by itself. This crate is the host side:
//!
//! ```text
//!   kernel                        host
//!   blocks ── requests ────────► serve ── io_uring ── files, sockets
//!      ▲ ◄── completions ───────┘   │
//!      │       pages ◄──────────────┘
//!      └─ orders: stop ◄── job: launch, suspend, resume
//! ```
//!
//! - [`layout`]: the structures that both sides share, and the header that is generated from them.
//! - [`ring`], [`slots`]: requests and answers. What comes from the device is not trusted.
//! - [`serve`]: the service thread. [`job`]: launches. [`cuda`], [`nvrtc`]: NVIDIA's driver and
//!   compiler, through their public APIs, looked up at run time.
//! - [`turns`]: sharing a GPU with other processes, in turns that an arbiter grants.
//! - [`ffi`]: the same for C, as `libgloop.so`.
//!
//! ```no_run
//! use gloop::{cuda::Args, job::{Grid, Options, Runtime}};
//!
//! let runtime = Runtime::new(Options::default())?;
//! let module = runtime.load(&std::fs::read("kernels.cubin")?)?;
//! let kernel = module.kernel("serve")?;
//! let mut job = runtime.launch(&kernel, Grid::logical(1000).threads(256), Args::new().with(7u32))?;
//! job.suspend()?;
//! // The GPU is free here.
//! job.resume()?;
//! job.finish()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(not(loom))]
pub mod cuda;
#[cfg(not(loom))]
pub mod ffi;
#[cfg(not(loom))]
pub mod job;
pub mod layout;
#[cfg(not(loom))]
pub mod memory;
pub mod nvrtc;
pub mod ring;
#[cfg(not(loom))]
pub mod serve;
pub mod slots;
#[cfg(not(loom))]
pub mod state;
#[cfg(not(loom))]
pub mod turns;

#[cfg(not(loom))]
#[cfg(test)]
mod tests;
