//! A stand-in for the CUDA driver that executes PTX on the CPU.
//!
//! It exists so that Gantry's CUDA remoting is tested with real compiled kernels where there is no GPU.
//! Device memory is bounds-checked, each stream is a thread, and no attempt is made to be fast.
//! `GANTRY_CUDA_MEMORY` sets the device's memory in MiB.
//!
//! - `ptx`: reading PTX; `run`: executing it.
//! - `driver`: memory, contexts, streams and modules; `api`: what C calls.

mod api;
mod driver;
mod ptx;
mod run;

/// Symbols that the library exports.
pub fn exported() -> impl Iterator<Item = &'static str> {
    api::exports().map(|export| export.symbol)
}

/// Reads a module and makes a program of each kernel, as loading it does, without executing anything.
///
/// # Errors
/// What is wrong, or not supported, and in which line.
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
