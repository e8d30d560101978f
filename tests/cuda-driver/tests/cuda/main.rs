//! Tests the stand-in driver as programs use it: as a library opened at run time, with compiled
//! kernels.

mod arrays;
mod device;
mod driver;
mod errors;
mod exports;
mod graphs;
mod here;
mod library;
mod order;
mod print;
mod programs;
mod registered;
