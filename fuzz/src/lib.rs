//! What the fuzz targets share: reading their input, a driver without scruples, and files.

pub mod driver;
pub mod input;
pub mod scratch;
