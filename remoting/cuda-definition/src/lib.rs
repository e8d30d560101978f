//! The CUDA driver API, runtime API and cuBLAS as data: what a guest's libraries, the worker that serves them
//! and the stand-in driver of the tests are built from, so that they cannot disagree.
//!
//! `cargo xtask cuda-definition` writes [`driver`], [`runtime`], [`cublas`] and [`cublaslt`] from the vendor's public headers and
//! from `annotations.txt`, which says what headers cannot: how large memory behind a pointer is, and who
//! waits for whom. Only signatures, layouts and values are kept, and each layout is asserted when this
//! crate is compiled.
//!
//! - `driver::types`, `runtime::types`: C's types, enumerations as numbers (a caller may pass any).
//! - `driver::signatures`, `runtime::signatures`: a function pointer's type per symbol.
//! - [`driver::ENTRY_POINTS`], [`runtime::ENTRY_POINTS`]: every public entry point.

#![no_std]

pub mod cublas;
pub mod cublaslt;
pub mod driver;
mod entry_point;
pub mod runtime;

pub use entry_point::{Class, EntryPoint, Parameter, Rule, State, Streams};

/// The entry point of a symbol.
pub fn by_symbol(all: &'static [EntryPoint], symbol: &str) -> Option<&'static EntryPoint> {
    all.iter().find(|entry| entry.symbol == symbol)
}

/// What `cuGetProcAddress` finds: the newest signature of a name that a program made for `version`
/// (12040 for 12.4) knows, for one kind of default stream. Names that know no stream are the same for
/// both kinds.
pub fn by_name(
    all: &'static [EntryPoint],
    name: &str,
    version: u32,
    streams: Streams,
) -> Option<&'static EntryPoint> {
    let newest = |streams| {
        all.iter()
            .filter(|entry| {
                entry.name == name && entry.streams == streams && entry.since <= version
            })
            .max_by_key(|entry| entry.since)
    };
    match streams {
        Streams::PerThread => newest(Streams::PerThread).or_else(|| newest(Streams::Legacy)),
        Streams::Legacy => newest(Streams::Legacy),
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::collections::HashSet;

    use super::*;

    const ALL: [&[EntryPoint]; 4] = [
        driver::ENTRY_POINTS,
        runtime::ENTRY_POINTS,
        cublas::ENTRY_POINTS,
        cublaslt::ENTRY_POINTS,
    ];

    #[test]
    fn every_symbol_is_there_once_and_every_name_means_one_of_them() {
        for all in ALL {
            let symbols: HashSet<_> = all.iter().map(|entry| entry.symbol).collect();
            assert_eq!(symbols.len(), all.len());
            for entry in all {
                let current = all.iter().filter(|other| {
                    other.name == entry.name && other.current && other.streams == Streams::Legacy
                });
                assert!(current.count() <= 1, "{} means several symbols", entry.name);
            }
        }
    }

    #[test]
    fn what_is_wanted_has_a_rule_for_each_parameter() {
        for all in ALL {
            let wanted = |entry: &&EntryPoint| entry.state == State::Wanted && entry.current;
            for entry in all.iter().filter(wanted) {
                for parameter in entry.parameters {
                    assert_ne!(
                        parameter.rule,
                        Rule::Unwritten,
                        "{}, {}",
                        entry.name,
                        parameter.name
                    );
                }
            }
        }
    }

    #[test]
    fn scalars_of_linear_algebra_are_told_from_vectors() {
        let rules = |symbol| {
            let entry = by_symbol(cublas::ENTRY_POINTS, symbol).expect("it is declared");
            let pointers = entry
                .parameters
                .iter()
                .filter(|one| one.of.starts_with('*'));
            let rules: std::vec::Vec<_> = pointers.map(|one| (one.name, one.rule)).collect();
            rules
        };
        assert_eq!(
            rules("cublasSaxpy_v2"),
            [
                ("alpha", Rule::Unified),
                ("x", Rule::Device),
                ("y", Rule::Device)
            ]
        );
        assert_eq!(
            rules("cublasSdot_v2"),
            [
                ("x", Rule::Device),
                ("y", Rule::Device),
                ("result", Rule::Unified)
            ]
        );
        assert_eq!(rules("cublasGetVersion_v2"), [("version", Rule::Out("1"))]);
        let sgemm = by_symbol(cublas::ENTRY_POINTS, "cublasSgemm_v2");
        assert!(sgemm.is_some_and(|entry| entry.current && entry.name == "cublasSgemm"));
    }

    #[test]
    fn a_name_is_found_in_the_version_that_a_program_was_made_for() {
        let find = |name, version, streams| {
            by_name(driver::ENTRY_POINTS, name, version, streams).map(|entry| entry.symbol)
        };
        assert_eq!(
            find("cuMemAlloc", 13000, Streams::Legacy),
            Some("cuMemAlloc_v2")
        );
        assert_eq!(
            find("cuMemAlloc", 2000, Streams::Legacy),
            Some("cuMemAlloc")
        );
        assert_eq!(
            find("cuCtxCreate", 12000, Streams::Legacy),
            Some("cuCtxCreate_v3")
        );
        assert_eq!(
            find("cuCtxCreate", 13000, Streams::Legacy),
            Some("cuCtxCreate_v4")
        );
        let per_thread = find("cuLaunchKernel", 13000, Streams::PerThread);
        assert_eq!(per_thread, Some("cuLaunchKernel_ptsz"));
        assert_eq!(find("cuInit", 13000, Streams::PerThread), Some("cuInit"));
        assert_eq!(
            find("cuMemcpyHtoD", 7000, Streams::PerThread),
            Some("cuMemcpyHtoD_v2_ptds")
        );
        assert_eq!(find("cuLibraryLoadData", 11000, Streams::Legacy), None);
        assert_eq!(find("cuNothing", 13000, Streams::Legacy), None);
    }
}
