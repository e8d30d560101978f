//! Stands in for the crate `libfuzzer-sys` where fuzz targets are compiled and linted, but not run.

/// Declares a fuzz target as a function, as the macro of that crate does.
#[macro_export]
macro_rules! fuzz_target {
    (|$bytes:ident: $type:ty| $body:block) => {
        const _: fn($type) = |$bytes| $body;
    };
}
