//! `cargo xtask cuda-definition`: generates the definition of the CUDA API from the vendor's headers. A program of its
//! own, since nothing else needs bindgen and libclang.
//!
//! - [`wheels`]: the source of the headers; [`header`]: what they declare.
//! - [`kernels`]: compiles the tests' kernels.
//! - [`annotations`]: facts that the headers do not contain.
//! - [`rust`], [`entries`]: the generated output; [`served`]: which entry points are implemented.

mod annotations;
mod entries;
mod header;
mod kernels;
mod rust;
mod served;
mod wheels;

use std::{
    fs,
    path::{Path, PathBuf},
    process,
};

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser};
use gantry_build::root;
use gantry_tests::rig::packages;

use self::{
    annotations::Annotations,
    entries::{Convention, Entry},
    header::Header,
    rust::Types,
};

#[derive(Parser)]
#[command(name = "cargo xtask", disable_help_subcommand = true)]
enum Command {
    /// Write the definition of the CUDA API anew, from the vendor's headers.
    CudaDefinition(Options),
    /// Compile the kernels of the CUDA tests anew, by the vendor's compiler.
    CudaKernels(kernels::Options),
}

fn main() -> Result<()> {
    match Command::parse() {
        Command::CudaDefinition(options) => run(&options),
        Command::CudaKernels(options) => kernels::run(&options),
    }
}

/// Options of `cargo xtask cuda-definition`.
#[derive(Args)]
#[command(after_help = "Examples:\n  \
    cargo xtask cuda-definition           write the definition and docs/cuda-entry-points.md\n  \
    cargo xtask cuda-definition --check   fail if that would change them")]
struct Options {
    /// Change nothing; fail if the committed files differ from what the headers and annotations give.
    #[arg(long)]
    check: bool,
    /// Directories of other headers, with cuda.h and cublas_v2.h.
    #[arg(long, value_name = "FOLDER")]
    headers: Vec<PathBuf>,
}

/// An API: what to preprocess, and where the result goes.
struct Api {
    name: &'static str,
    title: &'static str,
    /// Prefixes of its symbols, which other APIs do not use.
    prefixes: &'static [&'static str],
    /// Prefixes of symbols that belong to another API.
    others: &'static [&'static str],
    /// The conventions of its parameters.
    convention: Convention,
    prologue: &'static str,
}

const APIS: &[Api] = &[
    Api {
        name: "driver",
        title: "The driver API: `libcuda.so.1`.",
        prefixes: &["cu"],
        others: &[],
        convention: Convention::Core,
        prologue: "#define __CUDA_API_VERSION_INTERNAL\n#include <cuda.h>\n#include <cudaProfiler.h>\n",
    },
    Api {
        name: "runtime",
        title: "The runtime API: `libcudart.so.13`.",
        prefixes: &["cu", "__cuda"],
        others: &[],
        convention: Convention::Core,
        prologue: "#include <cuda_runtime_api.h>\n#include <cuda_profiler_api.h>\n",
    },
    // Half-precision numbers are plain bits here, since their own headers require a C++ library.
    Api {
        name: "cublas",
        title: "cuBLAS: `libcublas.so.13`.",
        prefixes: &["cublas"],
        others: &["cublasLt", "cublasXt"],
        convention: Convention::LinearAlgebra,
        prologue: "#define __CUDA_FP16_H__\n#define __CUDA_BF16_H__\n\
            typedef struct { unsigned short bits; } __half;\n#include <cublas_v2.h>\n",
    },
    Api {
        name: "cublaslt",
        title: "cuBLASLt: `libcublasLt.so.13`.",
        prefixes: &["cublasLt"],
        others: &[],
        convention: Convention::LinearAlgebra,
        prologue: "#define __CUDA_FP16_H__\n#define __CUDA_BF16_H__\n\
            typedef struct { unsigned short bits; } __half;\n#include <stdio.h>\n#include <cublasLt.h>\n",
    },
];

impl Api {
    fn owns(&self, symbol: &str) -> bool {
        let begins = |with: &[&str]| with.iter().any(|prefix| symbol.starts_with(prefix));
        begins(self.prefixes) && !begins(self.others)
    }
}

/// Generates the definition.
///
/// # Errors
/// The headers cannot be fetched or parsed; or, with `--check`, the committed files are out of date.
fn run(options: &Options) -> Result<()> {
    let headers = match options.headers.as_slice() {
        [] => vec![wheels::headers()?, wheels::cublas()?],
        folders => folders.to_vec(),
    };
    let home = root().join("remoting/cuda-definition");
    let text = fs::read_to_string(home.join("annotations.txt"))?;
    let mut files = Vec::new();
    let mut documentation = entries::DOCUMENTATION.to_owned();
    for api in APIS {
        let annotations = Annotations::read(&text, api.name)?;
        let header = read(api, &headers)?;
        let mut types = Types::new(&header);
        let all = entries::all(
            api,
            &header,
            &mut types,
            &annotations,
            &names(api, &headers)?,
        )?;
        let folder = home.join("src").join(api.name);
        let note =
            "// Written by `cargo xtask cuda-definition`: change annotations.txt, not this.\n\n";
        files.push((folder.join("mod.rs"), format!("{note}{}", module(api))));
        files.push((
            folder.join("signatures.rs"),
            format!("{note}{}", signatures(&all)),
        ));
        files.push((
            folder.join("entry_points.rs"),
            format!("{note}{}", table(&all)),
        ));
        let served = served::of(api.name)?;
        documentation += &entries::documentation(api.title, &all, served.as_deref());
        files.push((
            folder.join("types.rs"),
            format!("{note}{TYPES}{}", types.write()),
        ));
        let (wanted, unwritten) = entries::counts(&all);
        println!(
            "{}: {} symbols, {wanted} wanted, {unwritten} of these with a parameter that lacks a rule",
            api.name,
            all.len()
        );
    }
    for (path, text) in &files {
        place(path, text, options.check)?;
    }
    place(
        &root().join("docs/cuda-entry-points.md"),
        &documentation,
        options.check,
    )
}

const TYPES: &str = "//! C's types, each with the layout that the C compiler gives it.\n\n\
    use core::{ffi::*, mem::offset_of};\n\n";

fn module(api: &Api) -> String {
    format!(
        "//! {}\n\n\
        #[rustfmt::skip]\n\
        mod entry_points;\n\
        // The vendor documents them; names are as in its headers.\n\
        #[rustfmt::skip]\n\
        #[allow(missing_docs, non_camel_case_types, non_snake_case)]\n\
        pub mod signatures;\n\
        #[rustfmt::skip]\n\
        #[allow(missing_docs, non_camel_case_types, non_snake_case, non_upper_case_globals)]\n\
        pub mod types;\n\n\
        pub use entry_points::ENTRY_POINTS;\n",
        api.title
    )
}

fn signatures(all: &[Entry]) -> String {
    let mut text = "//! The type of a pointer to each symbol.\n\nuse core::ffi::*;\n\nuse super::types::*;\n\n".to_owned();
    for entry in all {
        text += &format!("pub type {} = {};\n", entry.symbol, entry.signature);
    }
    text
}

fn table(all: &[Entry]) -> String {
    let mut text = "//! Every public entry point.\n\n\
        use crate::{Class, EntryPoint, Parameter, Rule, State, Streams};\n\n\
        /// Every public symbol, in the header's order.\n\
        pub static ENTRY_POINTS: &[EntryPoint] = &[\n"
        .to_owned();
    for entry in all {
        text += &entry.in_rust();
    }
    text + "];\n"
}

/// The macros that headers define, as `cc` prints them.
fn macros(prologue: &str, headers: &[PathBuf]) -> Result<String> {
    let folder = tempfile::tempdir()?;
    let source = folder.path().join("all.c");
    fs::write(&source, prologue)?;
    let mut cc = process::Command::new("cc");
    let out = folder.path().join("all.i");
    cc.args(["-E", "-w", "-dM"])
        .args(headers.iter().flat_map(|folder| [Path::new("-I"), folder]))
        .arg(&source)
        .arg("-o")
        .arg(&out);
    packages::run(&mut cc).context("cannot preprocess the headers: is a C compiler installed?")?;
    Ok(fs::read_to_string(out)?)
}

fn read(api: &Api, headers: &[PathBuf]) -> Result<Header> {
    let mut text = api.prologue.to_owned();
    if api.name == "runtime" {
        for header in ["crt/host_runtime.h", "crt/device_functions.h"] {
            let found = headers.iter().map(|folder| folder.join(header));
            let path = found.into_iter().find(|path| path.exists());
            let path = path.with_context(|| format!("no folder has {header}"))?;
            text += &registration(header, &fs::read_to_string(path)?)?;
        }
    }
    header::read(&text, headers).with_context(|| format!("the {} API", api.name))
}

/// The functions that compiled programs call to register images and to launch are declared for C++ only.
fn registration(file: &str, header: &str) -> Result<String> {
    let mut text = "struct textureReference;\nstruct surfaceReference;\n".to_owned();
    for (at, _) in header.match_indices("CUDARTAPI __cuda") {
        let (before, after) = header.split_at(at);
        let start = before
            .rfind("extern")
            .with_context(|| format!("{file}: no extern"))?;
        let end = at
            + after
                .find(';')
                .with_context(|| format!("{file}: no semicolon"))?;
        let mut one = header[start..=end].to_owned();
        for word in ["\"C\"", "CUDARTAPI", "__host__", "__device__"] {
            one = one.replace(word, "");
        }
        if !one.contains('#') {
            // Without what C++ has by default.
            let mut parts = one.split('=');
            text += parts.next().unwrap_or_default();
            for part in parts {
                text += part.trim_start_matches(|c| c != ',' && c != ')');
            }
            text.push('\n');
        }
    }
    ensure!(
        text.contains("__cuda"),
        "{file} declares nothing that starts with __cuda"
    );
    Ok(text)
}

/// The symbol that a name refers to, and the version that introduced a signature.
#[derive(Default)]
struct Names {
    macros: Vec<(String, String)>,
    versions: Vec<String>,
}

fn names(api: &Api, headers: &[PathBuf]) -> Result<Names> {
    if api.name == "runtime" {
        return Ok(Names::default());
    }
    let mut names = Names::default();
    // The driver's prologue hides which symbol a name currently refers to.
    let prologue = match api.name {
        "driver" => "#include <cuda.h>\n",
        _ => api.prologue,
    };
    for line in macros(prologue, headers)?.lines() {
        let mut words = line.split_whitespace().skip(1);
        if let (Some(name), Some(symbol)) = (words.next(), words.next())
            && api.owns(name)
            && name != symbol
        {
            let inner = symbol
                .rsplit('(')
                .next()
                .unwrap_or(symbol)
                .trim_end_matches(')');
            names.macros.push((name.to_owned(), inner.to_owned()));
        }
    }
    if api.name != "driver" {
        return Ok(names);
    }
    let typedefs = "#define __CUDA_API_VERSION_INTERNAL\n#include <cudaTypedefs.h>\n#include <cudaProfilerTypedefs.h>\n";
    let header = header::read(typedefs, headers)?;
    let versions = header
        .typedefs
        .keys()
        .filter_map(|name| name.strip_prefix("PFN_"));
    names.versions = versions.map(str::to_owned).collect();
    Ok(names)
}

fn place(path: &Path, text: &str, check: bool) -> Result<()> {
    if check {
        let same = fs::read_to_string(path).is_ok_and(|old| old == text);
        ensure!(
            same,
            "{} is out of date: run `cargo xtask cuda-definition`",
            path.display()
        );
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
