//! The programs that test the stand-in for the CUDA driver, through `libcuda.so.1` of a guest and a
//! worker before the stand-in: they have to see what they see of the stand-in itself.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]

#[path = "../../../../tests/cuda-driver/tests/cuda/arrays.rs"]
mod arrays;
mod batches;
mod both;
#[path = "../../../../tests/cuda-driver/tests/cuda/device.rs"]
mod device;
mod devices;
#[path = "../../../../tests/cuda-driver/tests/cuda/driver.rs"]
mod driver;
#[path = "../../../../tests/cuda-driver/tests/cuda/errors.rs"]
mod errors;
mod exits;
mod fork;
#[path = "../../../../tests/cuda-driver/tests/cuda/graphs.rs"]
mod graphs;
mod heap;
mod hostile;
mod landing;
mod library;
mod linear;
mod linear_hostile;
mod lost;
mod nodes;
mod nvml;
#[path = "../../../../tests/cuda-driver/tests/cuda/order.rs"]
mod order;
#[path = "../../../../tests/cuda-driver/tests/cuda/print.rs"]
mod print;
mod probe;
#[path = "../../../../tests/cuda-driver/tests/cuda/programs.rs"]
mod programs;
mod raw;
mod refusals;
#[path = "../../../../tests/cuda-driver/tests/cuda/registered.rs"]
mod registered;
mod smi;
mod stream;
mod threads;
mod user_objects;
