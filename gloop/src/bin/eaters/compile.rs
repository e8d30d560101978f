//! Compiles the programs.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use gloop::nvrtc::{Compiler, Source};

/// The programs, by name and source.
const SOURCES: &[(&str, &str)] = &[
    ("throttle", include_str!("../../../programs/throttle.cu")),
    ("lavamd", include_str!("../../../programs/lavamd.cu")),
    ("tpacf", include_str!("../../../programs/tpacf.cu")),
    (
        "hybridsort",
        include_str!("../../../programs/hybridsort.cu"),
    ),
    ("grep", include_str!("../../../programs/grep.cu")),
    ("img", include_str!("../../../programs/img.cu")),
    ("echo", include_str!("../../../programs/echo.cu")),
    ("matmul", include_str!("../../../programs/matmul.cu")),
    ("kv", include_str!("../../../programs/kv.cu")),
    ("hostile", include_str!("../../../programs/hostile.cu")),
];

const INCLUDES: &[(&str, &str)] = &[("server.cuh", include_str!("../../../programs/server.cuh"))];

/// Compiles all of them for all architectures.
pub fn run(nvrtc: &Path, architectures: &[String], into: Option<&Path>) -> Result<()> {
    let compiler = Compiler::open(nvrtc)?;
    if let Some(folder) = into {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    for architecture in architectures {
        for (name, text) in SOURCES {
            let file = format!("{name}.cu");
            let source = Source {
                name: &file,
                text,
                includes: INCLUDES,
            };
            let cubin = compiler.cubin(source, architecture)?;
            println!("{name} for {architecture}: {} bytes", cubin.len());
            if let Some(folder) = into {
                let path = folder.join(format!("{name}.{architecture}.cubin"));
                fs::write(&path, cubin)
                    .with_context(|| format!("cannot write {}", path.display()))?;
            }
        }
    }
    Ok(())
}
