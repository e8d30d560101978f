//! Fuzzes what guests, clients and files may do.

use std::{path::PathBuf, process::Command};

use anyhow::{Context, Result, bail};
use gantry_build::{cargo, progress::Step, root};
use gantry_tests::rig::{Cache, packages};

/// Programs that are needed to build the targets, and their Debian packages: libFuzzer is written
/// in C++.
const PROGRAMS: &[(&str, &str)] = &[("c++", "g++")];

/// Maximum input size in bytes: a few dozen steps of a driver, or a configuration.
const MAX_LEN: u32 = 4096;
/// Time in seconds after which an input counts as a hang.
const HANG: u32 = 20;

/// Options of `cargo xtask fuzz`.
#[derive(clap::Args)]
pub struct Options {
    /// Seconds per target.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// The targets to run; all by default.
    targets: Vec<String>,
}

/// Runs the targets one after another. Findings are kept in `fuzz/artifacts`, inputs with new
/// coverage in `fuzz/corpus`.
pub fn run(options: &Options) -> Result<()> {
    let known = targets()?;
    if let Some(unknown) = options.targets.iter().find(|name| !known.contains(name)) {
        bail!(
            "there is no fuzz target {unknown:?}; there are: {}",
            known.join(", ")
        );
    }
    let chosen = if options.targets.is_empty() {
        &known
    } else {
        &options.targets
    };
    packages::install(PROGRAMS)?;
    let fuzz = fuzzer()?;
    let step = Step::new("building the fuzz targets, with sanitizers");
    // Linking a target with the sanitizers takes a while, so only those that will run are built.
    let builds = match &options.targets[..] {
        [] => vec![command(&fuzz, "build")],
        some => some.iter().map(|name| build_of(&fuzz, name)).collect(),
    };
    for mut build in builds {
        let built = build.output()?;
        if !built.status.success() {
            eprint!("{}", String::from_utf8_lossy(&built.stderr));
            bail!("the fuzz targets do not build: see the errors above");
        }
    }
    drop(step);
    let mut failed = Vec::new();
    for target in chosen {
        let step = Step::new(format!("fuzz {target} for {} s", options.seconds));
        let output = command(&fuzz, "run")
            .arg(target)
            .arg("--")
            .arg(format!("-max_total_time={}", options.seconds))
            .arg(format!("-max_len={MAX_LEN}"))
            .arg(format!("-timeout={HANG}"))
            .arg("-print_final_stats=1")
            .output()?;
        drop(step);
        let log = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            let tried = log
                .lines()
                .find_map(|line| line.strip_prefix("stat::number_of_executed_units:"))
                .map_or("?", str::trim);
            println!("fuzz {target} ... ok ({tried} inputs)");
        } else {
            println!("fuzz {target} ... FAILED");
            let lines: Vec<_> = log.lines().collect();
            for line in &lines[lines.len().saturating_sub(40)..] {
                println!("    {line}");
            }
            failed.push(target.as_str());
        }
    }
    println!(
        "{} of {} fuzz targets without a finding",
        chosen.len() - failed.len(),
        chosen.len()
    );
    if failed.is_empty() {
        return Ok(());
    }
    bail!(
        "findings in {}: their inputs are in fuzz/artifacts; to see one again, give it to \
         `RUSTC_BOOTSTRAP=1 {} fuzz run TARGET INPUT`",
        failed.join(", "),
        fuzz.display()
    )
}

/// Names of the targets, which are the files in `fuzz/targets`.
fn targets() -> Result<Vec<String>> {
    let dir = root().join("fuzz/targets");
    let entries =
        std::fs::read_dir(&dir).with_context(|| format!("cannot list {}", dir.display()))?;
    let mut names: Vec<_> = entries
        .filter_map(Result::ok)
        .filter_map(|entry| Some(entry.path().file_stem()?.to_str()?.to_owned()))
        .collect();
    names.sort();
    Ok(names)
}

fn build_of(fuzz: &PathBuf, target: &str) -> Command {
    let mut build = command(fuzz, "build");
    build.arg(target);
    build
}

fn command(fuzz: &PathBuf, action: &str) -> Command {
    let mut command = Command::new(fuzz);
    command
        .args(["fuzz", action, "--fuzz-dir", "fuzz"])
        .current_dir(root())
        // Sanitizers are unstable; this enables them in the compiler that builds everything else.
        .env("RUSTC_BOOTSTRAP", "1")
        // This check takes a third of the time of a target with threads, and the compiler rules
        // these bugs out anyway.
        .env("ASAN_OPTIONS", "detect_stack_use_after_return=0");
    command
}

/// Path of `cargo-fuzz`, built once and kept in the cache.
fn fuzzer() -> Result<PathBuf> {
    let tools = Cache::open()?.dir.join("tools");
    let fuzz = tools.join("bin/cargo-fuzz");
    if !fuzz.exists() {
        let step = Step::new("building cargo-fuzz (once)");
        std::fs::create_dir_all(&tools)?;
        let mut install = cargo();
        install
            .args([
                "install",
                "--quiet",
                "--locked",
                "--debug",
                "cargo-fuzz",
                "--root",
            ])
            .arg(&tools)
            // It is not part of this workspace, and this workspace's profile is tuned for build
            // time.
            .current_dir(tools.parent().unwrap_or(&tools))
            .env("CARGO_PROFILE_DEV_DEBUG", "false")
            .env("CARGO_TARGET_DIR", tools.join("fuzz-target"));
        packages::run(&mut install).context("cannot build cargo-fuzz: check the network")?;
        // Only the installed program is needed.
        let _ = std::fs::remove_dir_all(tools.join("fuzz-target"));
        step.finish();
    }
    Ok(fuzz)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn each_target_is_a_program_and_compiled_by_the_tests() {
        for (manifest, folder) in [("fuzz", "targets"), ("tests/fuzz", "../../fuzz/targets")] {
            let manifest = fs::read_to_string(root().join(manifest).join("Cargo.toml")).unwrap();
            for name in targets().unwrap() {
                let line = format!("path = \"{folder}/{name}.rs\"");
                assert!(manifest.lines().any(|one| one == line), "no {line}");
            }
        }
    }
}
