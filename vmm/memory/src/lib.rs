//! Guest memory: how it is allocated, and where the guest sees it.
//!
//! - [`data`]: which parts of it may not be zero.
//! - [`mapping`]: host memory, with the options of `--memory`.
//! - [`ram`]: the guest's RAM, a set of mappings in KVM's memory slots.
//! - [`extra`]: other memory at guest-physical addresses (persistent memory, BARs).

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

pub mod data;
pub mod extra;
pub mod mapping;
pub mod ram;

pub use extra::{ExactMemory, ExtraMemory};
pub use mapping::{Backing, Mapping, MappingError, is_on_hugetlbfs};
pub use ram::{GivenMemory, Ram, RamError, Region, RegionKind};
