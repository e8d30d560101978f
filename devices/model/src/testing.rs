//! A machine that does not exist, for tests and fuzz targets: [`FakeMsi`], [`FakeDoorbells`] and
//! [`FakeSpace`] keep what happened for inspection.

mod platform;

pub use platform::{FakeDoorbells, FakeMsi, FakeSpace, guest_memory};
