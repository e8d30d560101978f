//! A stand-in for the CUDA driver that executes PTX on the CPU.
//!
//! It allows testing Gantry's CUDA remoting with real compiled kernels where there is no GPU.
//! Device memory is bounds-checked and each stream is a thread. Speed is not a goal.
//! `GANTRY_CUDA_MEMORY` sets a device's memory in MiB, `GANTRY_CUDA_DEVICES` the number of devices.
//!
//! - `ptx`: parsing PTX; `run`: executing it.
//! - `driver`: memory, contexts, streams and modules; `api`: the C entry points.

mod api;
mod driver;
mod ptx;
mod run;

/// Symbols that the library exports.
pub fn exported() -> impl Iterator<Item = &'static str> {
    api::exports().map(|export| export.symbol)
}

/// Parses a module and compiles each kernel to a program, as loading does, without executing
/// anything. Returns the number of kernels.
///
/// # Errors
/// What is wrong or not supported, and in which line.
pub fn check(ptx: &str) -> Result<usize, String> {
    let module = ptx::parse(ptx).map_err(|error| error.to_string())?;
    let globals = module
        .variables
        .iter()
        .map(|variable| (variable.name.clone(), 0))
        .collect();
    let kernels = module
        .functions
        .iter()
        .filter(|function| function.entry && function.body.is_some());
    let mut count = 0;
    for kernel in kernels {
        run::lower::lower(&module, kernel, &globals).map_err(|error| error.to_string())?;
        count += 1;
    }
    Ok(count)
}
