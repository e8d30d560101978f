//! Release programs with readable backtraces: the line tables of a program are in a separate file next to it, which
//! nobody needs to install.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use gantry_tests::{report::Outcome, rig::packages};

use crate::{cargo, progress::Step, target};

/// Programs that this needs, and their Debian packages.
pub const PROGRAMS: &[(&str, &str)] = &[
    ("objcopy", "binutils"),
    ("nm", "binutils"),
    ("addr2line", "binutils"),
];

/// Number of functions of a program that are looked up.
const SAMPLE: usize = 20;

/// Functions of the same instructions become one: they were 90 kB of gantry. The linker is the one that comes with Rust for
/// this target. (In a backtrace, such a function may have another one's name.)
const FOLD: &str = "target.x86_64-unknown-linux-gnu.rustflags = ['-Clink-arg=-Wl,--icf=all']";

/// Builds programs of packages, and splits each one into a directory.
pub fn build(wanted: &[(&str, &[&str])], folder: &Path) -> Result<Vec<PathBuf>> {
    packages::install(PROGRAMS)?;
    // Line tables change the fingerprints, so a separate directory keeps both builds.
    let target = target().join("with-lines");
    let step = Step::new("building programs as they are shipped, with their lines");
    let mut build = cargo();
    build
        .args(["build", "--release", "--quiet", "--bins"])
        .args(wanted.iter().flat_map(|(name, _)| ["--package", name]))
        .env("CARGO_TARGET_DIR", &target)
        .args(["--config", "profile.release.package.vmm.strip = 'none'"])
        .args(["--config", FOLD])
        .env("CARGO_PROFILE_RELEASE_DEBUG", "line-tables-only")
        .env("CARGO_PROFILE_RELEASE_STRIP", "none");
    packages::run(&mut build)?;
    step.finish();
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let programs = wanted.iter().flat_map(|(_, programs)| *programs);
    programs
        .map(|program| split(&target.join("release").join(program), folder))
        .collect()
}

/// Checks that functions of a split program have names and lines if the debug file is next to it, and not elsewhere.
pub fn names_lines(program: &Path) -> Result<Outcome> {
    let mut debug = program.as_os_str().to_owned();
    debug.push(".debug");
    let symbols = packages::output(Command::new("nm").arg(&debug))?;
    let symbols: Vec<(&str, &str)> = symbols
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let (address, kind, name) = (words.next()?, words.next()?, words.next()?);
            matches!(kind, "t" | "T").then_some((address, name))
        })
        .collect();
    // One that was folded with others has a name of theirs.
    let mut named_at = HashMap::new();
    for (address, _) in &symbols {
        *named_at.entry(*address).or_insert(0) += 1;
    }
    // Mangled names contain the names of their crates; this one is only in gantry.
    let functions = symbols
        .iter()
        .filter(|(address, name)| named_at[address] == 1 && name.contains("11vmm_machine"));
    let functions: Vec<_> = functions
        .map(|(address, _)| *address)
        .take(SAMPLE)
        .collect();
    // The program's link to the debug file works for debuggers and for Rust's runtime.
    let told = |program: &Path| {
        let mut tell = Command::new("addr2line");
        tell.args(["--functions", "--demangle", "--exe"]);
        packages::output(tell.arg(program).args(&functions))
    };
    let named = |told: &str| {
        let lines: Vec<_> = told.lines().collect();
        let is_named =
            |pair: &&[&str]| pair[0].contains("vmm_machine::") && pair[1].contains(".rs:");
        lines.chunks_exact(2).filter(is_named).count()
    };
    let elsewhere = program.with_extension("alone");
    fs::create_dir_all(&elsewhere)?;
    let alone = elsewhere.join(
        program
            .file_name()
            .context("invalid program: its path has no file name")?,
    );
    fs::copy(program, &alone)?;
    let beside = told(program)?;
    let counts = (functions.len(), named(&beside), named(&told(&alone)?));
    fs::remove_dir_all(&elsewhere)?;
    Ok(match counts {
        (SAMPLE, SAMPLE, 0) => Outcome::Passed,
        (of, with, without) => Outcome::Failed(vec![format!(
            "of {of} functions {with} have a name and a line where the file is beside the program, and {without} \
             elsewhere:\n{beside}"
        )]),
    })
}

/// Copies a program without its debug information, and the latter as `NAME.debug`. The program links to that file, so
/// Rust's runtime and debuggers find it.
pub fn split(program: &Path, folder: &Path) -> Result<PathBuf> {
    let name = program
        .file_name()
        .context("invalid program: its path has no file name")?;
    let stripped = folder.join(name);
    let mut debug = stripped.clone().into_os_string();
    debug.push(".debug");
    let mut keep = Command::new("objcopy");
    keep.args(["--only-keep-debug", "--compress-debug-sections=zlib"])
        .args([program.as_os_str(), &debug]);
    packages::run(&mut keep)?;
    let mut link = std::ffi::OsString::from("--add-gnu-debuglink=");
    link.push(&debug);
    let mut strip = Command::new("objcopy");
    strip
        .arg("--strip-all")
        .arg(link)
        .args([program, &*stripped]);
    packages::run(&mut strip)?;
    Ok(stripped)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the output of a program that panics.
    fn backtrace(program: &Path) -> String {
        let output = Command::new(program)
            .env("RUST_BACKTRACE", "1")
            .output()
            .unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    #[test]
    fn a_backtrace_names_functions_and_lines_where_the_file_beside_the_program_is() {
        packages::install(PROGRAMS).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("unlucky.rs");
        fs::write(
            &source,
            "#[inline(never)]\nfn far_below() {\n    panic!();\n}\nfn main() {\n    far_below();\n}\n",
        )
        .unwrap();
        let program = dir.path().join("unlucky");
        let mut compile = Command::new("rustc");
        compile
            .args(["-C", "opt-level=2", "-C", "panic=abort"])
            .args(["-C", "debuginfo=line-tables-only", "-o"])
            .args([&program, &source]);
        packages::run(&mut compile).unwrap();
        let split_off = dir.path().join("installed");
        fs::create_dir(&split_off).unwrap();
        let stripped = split(&program, &split_off).unwrap();
        let sizes = [&program, &stripped].map(|path| fs::metadata(path).unwrap().len());
        assert!(sizes[1] * 2 < sizes[0], "{sizes:?}");
        let said = backtrace(&stripped);
        assert!(
            said.contains("far_below") && said.contains("unlucky.rs:3:"),
            "{said}"
        );
        fs::remove_file(split_off.join("unlucky.debug")).unwrap();
        let said = backtrace(&stripped);
        assert!(!said.contains("far_below"), "{said}");
    }
}
