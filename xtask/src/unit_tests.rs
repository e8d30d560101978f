//! Unit tests and lints: one build for all crates, whose test programs are run as Cargo runs them. Running
//! `cargo test` crate by crate would compile most crates again, with fewer features.
//!
//! The compiler of this build is clippy's driver, which is rustc with more lints. `cargo clippy` would read all crates
//! and their dependencies a second time.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use anyhow::{Context, Result};
use gantry_build::{cargo, progress::Step};
use gantry_tests::{report::Outcome, rig::packages};
use serde_json::Value;

use crate::workspace;

/// Shells that complete command lines of `gantry`, and their Debian packages.
const SHELLS: &[(&str, &str)] = &[("fish", "fish"), ("zsh", "zsh")];

/// Seconds after which a program counts as hanging.
const LIMIT: &str = "600";

/// Runs the tests of the wanted crates.
///
/// # Errors
/// Cargo or a program cannot be started.
pub fn run(wanted: impl Fn(&str) -> bool, mut report: impl FnMut(&str, &Outcome)) -> Result<()> {
    packages::install(SHELLS)?;
    let step = Step::new("building unit tests, and linting");
    let crates = workspace::tested()?;
    let built = build()?;
    step.finish();
    let lints = match &built.said[..] {
        [] => Outcome::Passed,
        said => Outcome::Failed(said.to_vec()),
    };
    report("check: clippy has nothing to say", &lints);
    let Some(programs) = built.programs else {
        let why = vec!["there are errors in the code".to_owned()];
        report("unit tests build", &Outcome::Failed(why));
        return Ok(());
    };
    // The same build compiles them (`tests/fuzz`).
    report("check: the fuzz targets compile", &Outcome::Passed);
    for name in crates.iter().filter(|name| wanted(name)) {
        let mut seen = 0;
        for program in programs.iter().filter(|program| program.package == *name) {
            seen += tell(name, &program.run(&[])?, &mut report);
        }
        if seen == 0 {
            let none = Outcome::Failed(vec!["it has none".to_owned()]);
            report(&format!("{name}: tests are run"), &none);
        }
    }
    let step = Step::new("building and running the documentation's examples");
    let mut examples = Command::new("timeout");
    examples.arg(LIMIT).arg(cargo().get_program());
    let output = linting(examples.args(["test", "--no-fail-fast", "--doc", "--workspace"]))
        .current_dir(gantry_build::root())
        .stdin(Stdio::null())
        .output()?;
    step.finish();
    tell("documentation", &output, &mut report);
    Ok(())
}

/// Reruns those of these tests that are unit tests, one by one.
///
/// # Errors
/// Cargo or a program cannot be started.
pub fn again(names: &[String], mut report: impl FnMut(&str, &Outcome)) -> Result<()> {
    let crates = workspace::tested()?;
    let tests: Vec<_> = names
        .iter()
        .filter_map(|name| unit_test(&crates, name))
        .collect();
    if tests.is_empty() {
        return Ok(());
    }
    let programs = build()?.programs.unwrap_or_default();
    for (package, test) in tests {
        let of_package = programs.iter().filter(|one| one.package == package);
        let outputs = of_package.map(|program| program.run(&["--exact", test]));
        if let Some(outcome) = together(test, outputs)? {
            report(&format!("{package}: {test}"), &outcome);
        }
    }
    Ok(())
}

/// Returns the outcome of a test that several programs of a crate may contain under this name: all
/// of them must pass. `None` if no program contains it.
fn together(test: &str, outputs: impl Iterator<Item = Result<Output>>) -> Result<Option<Outcome>> {
    let passes = format!("test {test} ... ok");
    let mut is_there = false;
    for output in outputs {
        let output = output?;
        let text = String::from_utf8_lossy(&output.stdout);
        // This also counts if the test has passed, since its program may crash after it.
        if !output.status.success() {
            let why = vec![output.status.to_string(), failure(&text, test)];
            return Ok(Some(Outcome::Failed(why)));
        }
        is_there |= text.lines().any(|line| line == passes);
    }
    Ok(is_there.then_some(Outcome::Passed))
}

/// Splits a name into crate and test, if it is a unit test.
fn unit_test<'n>(crates: &[String], name: &'n str) -> Option<(&'n str, &'n str)> {
    let (package, test) = name.split_once(": ")?;
    let is_crate = crates.iter().any(|one| one == package);
    is_crate.then_some((package, test))
}

/// What a build has given.
struct Built {
    /// The programs with unit tests, unless the code has errors.
    programs: Option<Vec<Program>>,
    /// Warnings and errors of the compiler and of clippy.
    said: Vec<String>,
}

/// Builds everything in the workspace, and the programs with unit tests. (`cargo test` would make tests of examples,
/// too.)
fn build() -> Result<Built> {
    let output = linting(cargo().args(["build", "--quiet", "--workspace", "--all-targets"]))
        .arg("--message-format=json")
        .stdin(Stdio::null())
        .output()?;
    let messages = messages(&String::from_utf8_lossy(&output.stdout))?;
    let mut said: Vec<_> = messages.iter().filter_map(diagnostic).collect();
    if !output.status.success() && said.is_empty() {
        said.push(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    Ok(Built {
        programs: output.status.success().then(|| programs(&messages)),
        said,
    })
}

/// Has the workspace's crates compiled by clippy's driver. Crates that another compiler has built are not used.
fn linting(command: &mut Command) -> &mut Command {
    command.env("RUSTC_WORKSPACE_WRAPPER", "clippy-driver")
}

/// Cargo's messages, one line of JSON each.
fn messages(said: &str) -> Result<Vec<Value>> {
    let parsed = said
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>();
    parsed.with_context(|| format!("cargo said {said}"))
}

/// The text of a warning or an error, if a message is one.
fn diagnostic(message: &Value) -> Option<String> {
    let message = &message["message"];
    let level = message["level"].as_str()?;
    let text = message["rendered"].as_str().unwrap_or_default();
    // How many there were. (What a linker says has no place in the code, either.)
    let has_place = !message["spans"].as_array()?.is_empty() || !message["code"].is_null();
    let is_one = match level {
        "error" => has_place || !text.starts_with("error: aborting due to"),
        "warning" => has_place,
        _ => false,
    };
    is_one.then(|| text.to_owned())
}

/// A program that Cargo has built.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    package: String,
    /// Directory of the package.
    folder: PathBuf,
    file: PathBuf,
}

impl Program {
    /// Runs its tests; with arguments, some of them.
    fn run(&self, arguments: &[&str]) -> Result<Output> {
        Command::new("timeout")
            .arg(LIMIT)
            .arg(&self.file)
            .args(arguments)
            .current_dir(&self.folder)
            .env("CARGO_MANIFEST_DIR", &self.folder)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot run {}", self.file.display()))
    }
}

/// Extracts the test programs from Cargo's messages, by name.
fn programs(messages: &[Value]) -> Vec<Program> {
    let mut programs = Vec::new();
    for artifact in messages {
        let text = |name: &str| artifact[name].as_str();
        // Programs without tests are built for tests that run them.
        // Benchmarks are only linted.
        if artifact["profile"]["test"] != true || artifact["target"]["kind"][0] == "bench" {
            continue;
        }
        let (Some(id), Some(manifest), Some(file)) = (
            text("package_id"),
            text("manifest_path"),
            text("executable"),
        ) else {
            continue;
        };
        programs.push(Program {
            package: package(id).to_owned(),
            folder: Path::new(manifest)
                .parent()
                .unwrap_or(Path::new("/"))
                .to_owned(),
            file: file.into(),
        });
    }
    programs.sort_by(|a, b| a.file.cmp(&b.file));
    programs
}

/// The name in a package ID. The ID is `path+file:///FOLDER#VERSION` if the directory has the
/// package's name, otherwise `path+file:///FOLDER#NAME@VERSION`.
fn package(id: &str) -> &str {
    let (folder, version) = id.rsplit_once('#').unwrap_or((id, ""));
    match version.split_once('@') {
        Some((name, _)) => name,
        None => folder.rsplit('/').next().unwrap_or(folder),
    }
}

/// Reports each test in a program's output. Returns the number of tests.
fn tell(of: &str, output: &Output, report: &mut impl FnMut(&str, &Outcome)) -> usize {
    let text = String::from_utf8_lossy(&output.stdout);
    let mut seen = 0;
    for line in text.lines() {
        let Some((test, result)) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.rsplit_once(" ... "))
        else {
            continue;
        };
        let result = match result {
            "ok" => Outcome::Passed,
            ignored if ignored.starts_with("ignored") => Outcome::Skipped(ignored.to_owned()),
            _ => Outcome::Failed(vec![failure(&text, test)]),
        };
        seen += 1;
        report(&format!("{of}: {test}"), &result);
    }
    if !output.status.success() && !text.contains("test result: FAILED") {
        let text = text.into_owned() + &String::from_utf8_lossy(&output.stderr);
        let cut = Outcome::Failed(vec![text]);
        report(&format!("{of}: tests run to their end"), &cut);
        seen += 1;
    }
    seen
}

/// Returns what a failed test printed.
fn failure(text: &str, test: &str) -> String {
    let head = format!("---- {test} stdout ----");
    let start = text.find(&head).map_or(0, |at| at + head.len());
    let rest = &text[start..];
    rest[..rest.find("\n---- ").unwrap_or(rest.len().min(3000))]
        .trim()
        .to_owned()
}

#[cfg(test)]
mod tests {
    use std::{os::unix::process::ExitStatusExt, process::ExitStatus};

    use super::*;

    #[test]
    fn a_second_attempt_passes_if_it_does_in_all_programs_with_the_test_and_they_end_well() {
        let ended = |status: i32, stdout: &str| {
            Ok(Output {
                status: ExitStatus::from_raw(status),
                stdout: stdout.into(),
                stderr: Vec::new(),
            })
        };
        let passed = "running 1 test\ntest a::b ... ok\n";
        let failed = "running 1 test\ntest a::b ... FAILED\n";
        let has_passed = || ended(0, passed);
        let has_none = || ended(0, "running 0 tests\n");
        let outcome = |outputs: Vec<Result<Output>>| together("a::b", outputs.into_iter()).unwrap();
        assert!(matches!(
            outcome(vec![has_none(), has_passed(), has_passed()]),
            Some(Outcome::Passed)
        ));
        for (status, stdout) in [(101 << 8, failed), (libc::SIGABRT, passed)] {
            let other = || ended(status, stdout);
            for outputs in [vec![has_passed(), other()], vec![other(), has_passed()]] {
                assert!(matches!(outcome(outputs), Some(Outcome::Failed(_))));
            }
        }
        assert!(outcome(vec![has_none()]).is_none());
    }

    #[test]
    fn warnings_and_errors_are_told_from_counts_of_them() {
        let diagnostic = |level: &str, code: Value, spans: Value, text: &str| {
            let rendered = format!("{level}: {text}");
            let message = serde_json::json!({
                "level": level, "code": code, "spans": spans, "rendered": rendered,
            });
            diagnostic(&serde_json::json!({"reason": "compiler-message", "message": message}))
        };
        let code = || serde_json::json!({"code": "unused_variables"});
        let spans = || serde_json::json!([{"line_start": 1}]);
        let none = || serde_json::json!([]);
        for level in ["warning", "error"] {
            let said = diagnostic(level, code(), spans(), "unused variable");
            assert_eq!(said.unwrap(), format!("{level}: unused variable"));
        }
        let linker = diagnostic("error", Value::Null, none(), "linking with `cc` failed");
        assert!(linker.unwrap().contains("linking"));
        let count = diagnostic(
            "error",
            Value::Null,
            none(),
            "aborting due to 2 previous errors",
        );
        assert!(count.is_none());
        assert!(diagnostic("warning", Value::Null, none(), "2 warnings emitted").is_none());
        assert!(diagnostic("note", code(), spans(), "unused variable").is_none());
        let built = serde_json::json!({"reason": "build-finished", "success": true});
        assert!(super::diagnostic(&built).is_none());
    }

    #[test]
    fn programs_with_tests_are_told_from_what_they_run() {
        let line = |id: &str, folder: &str, test: bool, file: &str| {
            let manifest = format!("{folder}/Cargo.toml");
            serde_json::json!({
                "reason": "compiler-artifact",
                "package_id": id,
                "manifest_path": manifest,
                "profile": { "test": test },
                "executable": file,
            })
        };
        let said = [
            line("path+file:///g/vmm#0.1.0", "/g/vmm", true, "/t/vmm-1"),
            line("path+file:///g/vmm#0.1.0", "/g/vmm", false, "/t/gantry"),
            line(
                "path+file:///g/guest/opencl#gantry-opencl@0.1.0",
                "/g/guest/opencl",
                true,
                "/t/opencl-2",
            ),
            serde_json::json!({ "reason": "build-finished", "success": true }),
        ];
        let said: Vec<_> = said.iter().map(Value::to_string).collect();
        let program = |package: &str, folder: &str, file: &str| Program {
            package: package.to_owned(),
            folder: folder.into(),
            file: file.into(),
        };
        assert_eq!(
            programs(&messages(&said.join("\n")).unwrap()),
            [
                program("gantry-opencl", "/g/guest/opencl", "/t/opencl-2"),
                program("vmm", "/g/vmm", "/t/vmm-1"),
            ]
        );
    }
}
