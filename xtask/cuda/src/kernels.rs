//! `cargo xtask cuda-kernels`: compiles the tests' kernels with the vendor's NVRTC.

use std::fs;

use anyhow::{Context, Result};
use clap::Args;
use gantry_build::root;
use gantry_tests::rig::{Cache, nvrtc};
use gloop::nvrtc::{Compiler, Source};

/// Options of `cargo xtask cuda-kernels`.
#[derive(Args)]
#[command(after_help = "Examples:\n  \
    cargo xtask cuda-kernels           compile tests/cuda-driver/tests/kernels/*.cu to PTX beside them\n  \
    cargo xtask cuda-kernels --check   fail if that would change them")]
pub struct Options {
    /// Change nothing; fail if the committed PTX differs from the compiler's output.
    #[arg(long)]
    check: bool,
}

/// Target architectures of the kernels: the oldest one of CUDA 13, and that of the stand-in.
const ARCHITECTURES: [&str; 2] = ["compute_75", "compute_80"];

/// Compiles all kernels.
///
/// # Errors
/// The compiler cannot be fetched, or rejects a kernel; or, with `--check`, the PTX is out of date.
pub fn run(options: &Options) -> Result<()> {
    let compiler = nvrtc::folder(&Cache::open()?)?.join(nvrtc::LIBRARY);
    let compiler = Compiler::open(&compiler)?;
    let folder = root().join("tests/cuda-driver/tests/kernels");
    for entry in fs::read_dir(&folder)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "cu") {
            continue;
        }
        let source = fs::read_to_string(&path)?;
        let source = Source {
            name: "kernel.cu",
            text: &source,
            includes: &[],
        };
        for architecture in ARCHITECTURES {
            let ptx = compiler
                .ptx(source, architecture)
                .with_context(|| path.display().to_string())?;
            let name = path.with_extension(format!("{architecture}.ptx"));
            super::place(&name, &ptx, options.check)
                .context("compiled kernels change with `cargo xtask cuda-kernels`")?;
        }
    }
    Ok(())
}
