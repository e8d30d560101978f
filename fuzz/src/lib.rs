//! Shared code of the fuzz targets: reading the input, a hostile driver, and files.

pub mod driver;
pub mod input;
pub mod scratch;
