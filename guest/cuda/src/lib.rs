//! A CUDA driver for the host's devices: `libcuda.so.1` in a guest.
//!
//! Each call becomes a message to a worker process ([`remoting_proto::apis`]). Launches, fills, event records, and copies of
//! memory from `cuMemHostAlloc` are not waited for. If one of them fails and this could not be detected here, the next
//! call that waits for the context's work reports the error.
//!
//! `GANTRY_CUDA` is the path of the workers' socket, or an address where they are reached by a stream, or `off`.
//! `GANTRY_CUDA_SPIN` is how long a waiting call polls before it sleeps, in microseconds.
//!
//! - `generated`: an entry point for each public symbol; an unsupported one reports its name once
//! - `forward`: entry points whose parameters are encoded according to the API's definition
//! - `capture`: stream capture; `nodes`: graph nodes that call functions, allocate, or decide
//! - `dot`: graphs as text; `user_objects`: objects that graphs keep for the program
//! - `arrays`: arrays, textures, and copies of rows and planes; `paged`: graphs that copy memory which is not pinned
//! - `registered`: copies of registered memory, in stream order
//! - `landing`: what host functions of such graphs look at; `turns`: the order of launches
//! - `link`: CUDA's own part of the connection; `handles`: what programs hold for objects
//! - `visible`: which devices the program sees
//! - `context`: a thread's current context; `memory`: the kinds of addresses
//! - `libraries`: what cuBLAS in a guest uses of the connection
//! - `signals`: waits that end without an answer; `idle`: waits for streams that have nothing to do
//! - `answers`: attributes of kernels and the like, which are asked for only once
//! - the others: entry points by subject

#![allow(missing_docs, non_snake_case, clippy::too_many_arguments)]

mod answers;
mod arrays;
mod capture;
mod context;
mod copies;
mod device;
mod dot;
mod entry;
mod fills;
mod forward;
mod generated;
mod graphs;
mod handles;
mod host_memory;
mod idle;
mod landing;
mod launch;
mod libraries;
mod link;
mod memory;
mod modules;
mod names;
mod nodes;
mod paged;
mod pointers;
mod registered;
mod signals;
mod streams;
mod turns;
mod user_objects;
mod visible;
