//! A CUDA driver whose devices are those of the host: `libcuda.so.1` in a guest.
//!
//! Each call becomes a message to a worker process ([`gantry_remoting`]). Launches, copies of memory
//! that `cuMemHostAlloc` gave, fills, and records of events are not waited for; an error of theirs that
//! could not be seen here is told by the next call that waits for the context's work.
//!
//! `GANTRY_CUDA` names the socket of the workers, or an address where they are reached by a stream, or is
//! `off`. `GANTRY_CUDA_SPIN` is the time in microseconds that a waiting call polls before it sleeps.
//!
//! - `generated`: an entry point for each public symbol; what is not served says so, once by name
//! - `forward`: those whose parameters travel by the API's definition
//! - `capture`: captures of streams; `nodes`: graphs' nodes that call, allocate, or decide
//! - `dot`: graphs as text; `user_objects`: what graphs keep for the program
//! - `arrays`: arrays, textures, and copies of rows and planes; `paged`: graphs that copy memory which is not pinned
//! - `landing`: what functions of such graphs look at; `turns`: which launches come behind each other
//! - `link`: CUDA's own part of the connection; `handles`: what programs hold for objects
//! - `context`: what is current in a thread; `memory`: which addresses are what
//! - `libraries`: what cuBLAS in a guest uses of the connection
//! - `signals`: waits that end without an answer; `idle`: those for streams that have nothing to do
//! - `answers`: attributes of kernels and the like, which are asked for once
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
mod signals;
mod streams;
mod turns;
mod user_objects;
