//! The stand-in driver as programs use it: a library that is opened, and compiled kernels.

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
