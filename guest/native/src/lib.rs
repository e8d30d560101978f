//! A program's calls on NVIDIA's device files, taken to a worker:
//! `LD_PRELOAD=libgantry_nvidia_preload.so PROGRAM`.
//!
//! The program's CUDA libraries are the vendor's own. They open device files, map them and call `ioctl`; the
//! functions of the C library with which they do it are replaced here. A device file of the program is one end of a
//! socket pair whose other end the worker has ([`files`]), so that closing, duplicating, inheriting and passing it
//! need no care here. Nothing happens before the first use of a device file.
//!
//! | module | what |
//! |---|---|
//! | [`entry`] | the replaced functions |
//! | [`connection`] | requests to the worker |
//! | [`files`] | which descriptor is which file |
//! | [`call`] | an `ioctl`: the walk, files by number, what comes back |
//! | [`pinned`] | memory that the driver pins moves to the slice, at its addresses |
//! | [`managed`] | managed memory: what the worker must know of its mappings; [`managed_ranges`]: where it is |
//! | [`mappings`] | mappings of this process, as the kernel lists them |
//! | [`memory`] | this process's memory, read and written without faults |
//!
//! The worker's socket is `$GANTRY_NVIDIA_SOCKET`, else `/run/gantry/nvidia.sock`.
//!
//! Not carried: files of video and debugging, `epoll` and `select` on device files.

mod call;
mod connection;
mod entry;
mod files;
mod managed;
mod managed_ranges;
mod mappings;
mod memory;
mod pinned;
