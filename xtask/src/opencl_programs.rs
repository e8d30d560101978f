//! Programs that nobody here wrote, natively and through the OpenCL driver: which of their tests
//! pass, and every difference, as a table in the documentation.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context, Result};
use gantry_tests::rig::{Cache, packages};

use crate::{
    opencl::{PIGLIT, Pool},
    programs::root,
    progress::Step,
};

/// What is run, beside what the OpenCL scenarios need, and the Debian packages that have it.
const PROGRAMS: &[(&str, &str)] = &[
    ("clblast_test_xaxpy", "clblast-tests"),
    ("clFFT-client", "clfft-client"),
    ("x264", "x264"),
];

/// The version of pyopencl whose tests are run: what its archive of sources and its wheel have in
/// common.
const PYOPENCL: &str = "2024.3";

/// Why results differ, by a part of the tests' names.
const WHY: &[(&str, &str)] = &[
    (
        "cl-api-create-command-queue",
        "PoCL 3.1 ends the process when a queue on the device is asked for; the driver refuses it",
    ),
    (
        "svm",
        "shared virtual memory is not offered: application and device have different memories",
    ),
];

/// Options of `cargo xtask bench programs`.
#[derive(clap::Args)]
#[group(skip)]
pub struct Options {
    /// programs: of suites with hundreds of tests only each so many is run; 1 takes hours.
    #[arg(long, default_value_t = 8, value_name = "COUNT")]
    every: usize,
}

/// Results of tests by name.
type Results = BTreeMap<String, String>;

/// A program, and how its output becomes results.
struct Case {
    program: OsString,
    arguments: Vec<OsString>,
    results: fn(&Case, &str, bool) -> Results,
    /// How long it may take.
    seconds: u32,
    /// Where it is run, if that matters.
    folder: Option<PathBuf>,
}

impl Case {
    fn new<const N: usize>(
        program: impl Into<OsString>,
        arguments: [&str; N],
        results: fn(&Self, &str, bool) -> Results,
    ) -> Self {
        Self {
            program: program.into(),
            arguments: arguments.iter().map(OsString::from).collect(),
            results,
            seconds: 120,
            folder: None,
        }
    }

    /// The program and its arguments without folders.
    fn name(&self) -> String {
        let words = std::iter::once(&self.program).chain(&self.arguments);
        let words = words.map(|word| {
            let name = Path::new(word).file_name().unwrap_or(word);
            name.to_string_lossy().into_owned()
        });
        words.collect::<Vec<_>>().join(" ")
    }

    fn run(&self, mut command: Command) -> Result<Results> {
        if let Some(folder) = &self.folder {
            command.current_dir(folder);
        }
        let output = command
            .args(&self.arguments)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot run {}", self.name()))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        if output.status.code() == Some(TIMED_OUT) {
            return Ok(Results::from([(self.name(), "no end".to_owned())]));
        }
        Ok((self.results)(self, &text, output.status.success()))
    }
}

/// What `timeout` returns.
const TIMED_OUT: i32 = 124;

/// A test that says by its end whether it passes.
fn by_end(case: &Case, _: &str, good: bool) -> Results {
    let result = if good { "pass" } else { "fail" };
    Results::from([(case.name(), result.to_owned())])
}

/// Piglit's tests say it in a line of JSON, the last of which counts.
fn by_piglit(case: &Case, text: &str, _: bool) -> Results {
    let result = text
        .rsplit_once("\"result\": \"")
        .and_then(|(_, rest)| rest.split('"').next())
        .unwrap_or("no result");
    Results::from([(case.name(), result.to_owned())])
}

/// CLBlast's tests count for each precision: `* Completed all test-cases for this routine.
/// Results:` and lines with `test(s) passed`, `skipped` and `failed`.
fn by_clblast(case: &Case, text: &str, good: bool) -> Results {
    let mut counts: [u64; 3] = [0; 3];
    for line in text.lines() {
        let plain: String =
            line.split("\u{1b}[")
                .enumerate()
                .fold(String::new(), |text, (index, part)| {
                    let part = match index {
                        0 => part,
                        _ => part.split_once('m').map_or(part, |(_, rest)| rest),
                    };
                    text + part
                });
        let number = plain
            .split_whitespace()
            .find_map(|word| word.parse::<u64>().ok());
        let kinds = ["test(s) passed", "test(s) skipped", "test(s) failed"];
        for (count, kind) in counts.iter_mut().zip(kinds) {
            if plain.contains(kind) {
                *count += number.unwrap_or(0);
            }
        }
    }
    let [passed, skipped, failed] = counts;
    let result = match (good, failed) {
        (true, 0) if passed > 0 => format!("pass ({passed} passed, {skipped} skipped)"),
        (true, 0) => "skip".to_owned(),
        _ => format!("fail ({passed} passed, {skipped} skipped, {failed} failed)"),
    };
    Results::from([(case.name(), result)])
}

/// Pytest's summary has a line for each test: `PASSED file::test`; but for those that are skipped,
/// since a device lacks what they try.
fn by_pytest(case: &Case, text: &str, _: bool) -> Results {
    let kinds = [("PASSED", "pass"), ("FAILED", "fail"), ("ERROR", "error")];
    let mut results = Results::new();
    for line in text.lines() {
        for (kind, result) in kinds {
            if let Some(rest) = line.strip_prefix(kind)
                && let Some(test) = rest.trim_start().split(" - ").next()
                && test.contains("::")
            {
                // Names have the device's in them, which the two drivers' platforms share.
                let test = test.split_once('[').map_or(test, |(name, _)| name);
                let known = results
                    .entry(test.to_owned())
                    .or_insert_with(|| result.to_owned());
                if result != "pass" {
                    *known = result.to_owned();
                }
            }
        }
    }
    if results.is_empty() {
        results.insert(case.name(), "no result".to_owned());
    }
    results
}

/// Programs of one kind.
struct Suite {
    name: String,
    cases: Vec<Case>,
}

/// Files below a folder with this ending, in order.
fn files(folder: &Path, ending: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("no {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path, ending)?);
        } else if path.to_string_lossy().ends_with(ending) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn suites(pool: &Pool, every: usize) -> Result<Vec<Suite>> {
    let every = every.max(1);
    let piglit = Path::new(PIGLIT);
    let own = |name: &str| name.starts_with("cl-") && name != "cl-program-tester";
    let mut single: Vec<_> = fs::read_dir(piglit.join("bin"))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            path.file_name()
                .and_then(|name| name.to_str())
                .is_some_and(own)
        })
        .collect();
    single.sort();
    let mut programs = files(&piglit.join("tests/cl"), ".cl")?;
    programs.extend(files(&piglit.join("generated_tests/cl"), ".cl")?);
    let all = programs.len();
    let tester = piglit.join("bin/cl-program-tester");
    let mut blas: Vec<_> = fs::read_dir("/usr/bin")?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.to_string_lossy().contains("/clblast_test_"))
        .collect();
    blas.sort();
    let blas_all = blas.len();
    let transforms: [[&str; 6]; 6] = [
        ["-x", "1024", "-y", "32", "-z", "1"],
        ["-x", "4096", "-y", "1", "-z", "1"],
        ["-x", "243", "-y", "27", "-z", "3"],
        ["-x", "125", "-y", "25", "-z", "5"],
        ["-x", "343", "-y", "7", "-z", "1"],
        ["-x", "16", "-y", "16", "-z", "16"],
    ];
    let mut suites = vec![
        Suite {
            name: "piglit: API and further programs".to_owned(),
            cases: (single.iter())
                .map(|path| Case::new(path, ["-auto"], by_piglit))
                .collect(),
        },
        Suite {
            name: format!(
                "piglit: programs for devices, {} of {all}",
                all.div_ceil(every)
            ),
            cases: (programs.iter().step_by(every))
                .map(|path| Case::new(&tester, [&path.to_string_lossy(), "-auto"], by_piglit))
                .collect(),
        },
        Suite {
            name: format!("CLBlast: tests, {} of {blas_all}", blas_all.div_ceil(every)),
            cases: (blas.iter().step_by(every))
                .map(|path| Case::new(path, [], by_clblast))
                .collect(),
        },
        Suite {
            name: "clFFT: transforms of its client".to_owned(),
            cases: (transforms.into_iter())
                .map(|sizes| Case::new("clFFT-client", sizes, by_end))
                .collect(),
        },
        Suite {
            name: "clinfo, clpeak".to_owned(),
            cases: vec![
                Case::new("clinfo", [], by_end),
                Case::new("clpeak", ["--global-bandwidth", "--compute-sp"], by_end),
                Case::new(
                    "clpeak",
                    ["--kernel-latency", "--transfer-bandwidth"],
                    by_end,
                ),
            ],
        },
        Suite {
            name: "x264 --opencl".to_owned(),
            cases: vec![Case::new(
                "x264",
                [
                    "--opencl",
                    "--input-res",
                    "64x64",
                    "-o",
                    "/dev/null",
                    "/dev/zero",
                    "--frames=9",
                ],
                by_x264,
            )],
        },
    ];
    match pyopencl() {
        Ok((python, tests)) => {
            let mut collect = pool.native(&python);
            collect.current_dir(&tests);
            collect.args([
                "-m",
                "pytest",
                "--collect-only",
                "-q",
                "-p",
                "no:cacheprovider",
            ]);
            let text = packages::output(&mut collect)?;
            // Names have the device's in them.
            let names = text.lines().filter(|line| line.contains("::"));
            let names = names.map(|line| line.split_once('[').map_or(line, |(name, _)| name));
            let names: BTreeSet<_> = names.collect();
            let options = [
                "-m",
                "pytest",
                "-q",
                "-rA",
                "--tb=no",
                "-p",
                "no:cacheprovider",
            ];
            let mut case = Case::new(&python, options, by_pytest);
            let chosen = names.iter().step_by(every);
            case.arguments.extend(chosen.map(OsString::from));
            case.seconds = 3600;
            case.folder = Some(tests);
            suites.push(Suite {
                name: format!(
                    "pyopencl {PYOPENCL}: its own tests, {} of {}",
                    names.len().div_ceil(every),
                    names.len()
                ),
                cases: vec![case],
            });
        }
        Err(error) => eprintln!("without pyopencl's tests: {error:#}"),
    }
    Ok(suites)
}

/// x264 goes on without OpenCL if it finds no device that it wants, and says so.
fn by_x264(case: &Case, text: &str, good: bool) -> Results {
    let complaint = text.lines().find(|line| line.contains("OpenCL"));
    let result = match (good, complaint) {
        (true, None) => "pass".to_owned(),
        (_, Some(line)) => line.trim_start_matches("x264 ").to_owned(),
        (false, None) => "fail".to_owned(),
    };
    Results::from([(case.name(), result)])
}

/// A Python with pyopencl, and the folder of its tests, which only its sources have; both kept in
/// the cache.
fn pyopencl() -> Result<(PathBuf, PathBuf)> {
    let folder = Cache::open()?.dir.join(format!("pyopencl-{PYOPENCL}"));
    let (python, tests) = (
        folder.join("environment/bin/python"),
        folder.join(format!("pyopencl-{PYOPENCL}/test")),
    );
    if !tests.exists() {
        let step = Step::new("fetching pyopencl and its tests (once)");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder)?;
        let version = format!("pyopencl=={PYOPENCL}");
        let mut environment = Command::new("python3");
        environment
            .args(["-m", "venv"])
            .arg(folder.join("environment"));
        packages::run(&mut environment)?;
        let mut install = Command::new(&python);
        install.args([
            "-m", "pip", "install", "--quiet", &version, "pytest", "mako",
        ]);
        packages::run(&mut install)?;
        let mut sources = Command::new(&python);
        sources.args(["-m", "pip", "download", "--quiet", "--no-deps"]);
        sources.args(["--no-binary", "pyopencl", &version]);
        packages::run(sources.current_dir(&folder))?;
        let mut unpack = Command::new("tar");
        unpack.arg("-xf").arg(format!("pyopencl-{PYOPENCL}.tar.gz"));
        packages::run(unpack.current_dir(&folder))?;
        step.finish();
    }
    Ok((python, tests))
}

/// Runs everything, and writes the table.
pub fn run(options: &Options) -> Result<()> {
    packages::install(PROGRAMS)?;
    let pool = Pool::start_installed()?;
    let mut table = String::new();
    let mut differences = String::new();
    for suite in suites(&pool, options.every)? {
        let step = Step::new(format!("{}: {} programs", suite.name, suite.cases.len()));
        let (mut native, mut remoted) = (Results::new(), Results::new());
        for case in &suite.cases {
            let (one, other) = thread::scope(|scope| {
                let one = scope.spawn(|| case.run(pool.native_for(case.seconds, &case.program)));
                let other = case.run(pool.remoted_for(case.seconds, &case.program));
                (one.join(), other)
            });
            let one = one.map_err(|_| anyhow::anyhow!("{} was not run", case.name()))?;
            native.extend(one?);
            remoted.extend(other?);
        }
        step.finish();
        summarize(&suite.name, &native, &remoted, &mut table, &mut differences);
    }
    let text = format!(
        "# Programs that nobody here wrote, natively and through the OpenCL driver\n\n\
         Command: `cargo xtask bench programs --every {}`. The driver of both is the same: {}.\n\n\
         | programs | tests | pass natively | pass through Gantry | same result |\n\
         |---|---|---|---|---|\n{table}\n{}",
        options.every,
        device(&pool)?,
        if differences.is_empty() {
            "There is no difference.\n".to_owned()
        } else {
            format!(
                "| what differs | natively | through Gantry | why |\n|---|---|---|---|\n{differences}"
            )
        }
    );
    print!("{text}");
    let path = root().join("docs/opencl-programs.md");
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// The platform's version, as clinfo says it.
fn device(pool: &Pool) -> Result<String> {
    let text = packages::output(pool.native("clinfo").arg("--raw"))?;
    let line = text
        .lines()
        .find(|line| line.contains("CL_PLATFORM_VERSION"));
    let version = line.and_then(|line| line.split_once("CL_PLATFORM_VERSION"));
    Ok(version
        .map_or("unknown", |(_, version)| version.trim())
        .to_owned())
}

fn summarize(
    name: &str,
    native: &Results,
    remoted: &Results,
    table: &mut String,
    differences: &mut String,
) {
    let none = "skipped".to_owned();
    let tests: BTreeSet<_> = native.keys().chain(remoted.keys()).collect();
    let passed = |results: &Results| {
        let good = results.values().filter(|result| result.starts_with("pass"));
        good.count()
    };
    let mut same = 0;
    for test in &tests {
        let (one, other) = (
            native.get(*test).unwrap_or(&none),
            remoted.get(*test).unwrap_or(&none),
        );
        if one == other {
            same += 1;
        } else {
            // Writing to a string does not fail.
            let why = WHY.iter().find(|(part, _)| test.contains(part));
            let why = why.map_or("not explained", |(_, why)| why);
            let _ = writeln!(differences, "| {test} | {one} | {other} | {why} |");
        }
    }
    let _ = writeln!(
        table,
        "| {name} | {} | {} | {} | {same} |",
        tests.len(),
        passed(native),
        passed(remoted)
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(of: fn(&Case, &str, bool) -> Results, text: &str) -> Vec<(String, String)> {
        let case = Case::new("/usr/bin/program", ["/tests/a.cl"], of);
        of(&case, text, true).into_iter().collect()
    }

    #[test]
    fn the_output_of_each_kind_of_program_becomes_results() {
        let named = |result: &str| vec![("program a.cl".to_owned(), result.to_owned())];
        let piglit = "PIGLIT: {\"subtest\": {\"x\" : \"fail\"}}\nPIGLIT: {\"result\": \"pass\" }";
        assert_eq!(results(by_piglit, piglit), named("pass"));
        assert_eq!(results(by_piglit, "Killed"), named("no result"));
        let blas =
            "   \u{1b}[32m12\u{1b}[0m test(s) passed\n   3 test(s) skipped\n   0 test(s) failed";
        assert_eq!(
            results(by_clblast, blas),
            named("pass (12 passed, 3 skipped)")
        );
        let python =
            "PASSED test_a.py::one[0]\nFAILED test_a.py::one[1] - no\nPASSED test_a.py::two";
        let expected = [("test_a.py::one", "fail"), ("test_a.py::two", "pass")];
        let expected: Vec<_> = expected.map(|(a, b)| (a.to_owned(), b.to_owned())).into();
        assert_eq!(results(by_pytest, python), expected);
    }

    #[test]
    fn what_differs_is_named() {
        let of = |result: &str| Results::from([("a".to_owned(), result.to_owned())]);
        let (mut table, mut differences) = (String::new(), String::new());
        summarize("x", &of("pass"), &of("fail"), &mut table, &mut differences);
        assert_eq!(table, "| x | 1 | 1 | 0 | 0 |\n");
        assert_eq!(differences, "| a | pass | fail | not explained |\n");
    }
}
