//! What the fuzz targets share: reading their input, and a driver without scruples.

pub mod driver;
pub mod input;
