//! Entropy source (virtio 1.2, 5.4).

mod device;

pub use device::{Error, Options, Rng};

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod tests;
