// Written by `cargo xtask cuda-definition`: change annotations.txt, not this.

//! cuBLAS: `libcublas.so.13`.

#[rustfmt::skip]
mod entry_points;
// The vendor documents them; names are as in its headers.
#[rustfmt::skip]
#[allow(missing_docs, non_camel_case_types, non_snake_case)]
pub mod signatures;
#[rustfmt::skip]
#[allow(missing_docs, non_camel_case_types, non_snake_case, non_upper_case_globals)]
pub mod types;

pub use entry_points::ENTRY_POINTS;
