//! A fake VM for tests and fuzz targets: [`FakeMsi`], [`FakeDoorbells`] and [`FakeSpace`] record
//! calls for inspection.

mod platform;

pub use platform::{FakeDoorbells, FakeMsi, FakeSpace, guest_memory};
