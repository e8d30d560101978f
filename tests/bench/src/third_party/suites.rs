//! The programs to run: those of one kind form a suite.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use gantry_build::progress::Step;
use gantry_host_tests::opencl::{
    pool::{PIGLIT, Pool},
    programs::{
        case::Case,
        results::{by_clblast, by_end, by_hashcat, by_piglit, by_pytest, by_x264},
    },
};
use gantry_tests::rig::{Cache, packages};

/// What is needed in addition to the OpenCL scenarios' packages, and the Debian packages of it.
pub const PROGRAMS: &[(&str, &str)] = &[
    ("clblast_test_xaxpy", "clblast-tests"),
    ("clFFT-client", "clfft-client"),
    ("x264", "x264"),
    // The name by which x264 opens the loader.
    (
        "/usr/lib/x86_64-linux-gnu/libOpenCL.so",
        "ocl-icd-opencl-dev",
    ),
    ("hashcat", "hashcat"),
];

/// The version of pyopencl whose tests are run; its source archive and its wheel have the same
/// version.
const PYOPENCL: &str = "2024.3";

/// The hash types whose kernels hashcat tests: fast and slow ones, salted or not, with and without
/// high memory use.
const HASHES: &[&str] = &[
    "0", "100", "500", "900", "1000", "1400", "1700", "1800", "3200", "5600", "6000", "6100",
    "8900", "10900", "11500", "17300", "22000",
];

/// Width, height and number of the pictures that x264 encodes.
const VIDEO: (usize, usize, usize) = (352, 288, 96);

/// Programs of one kind.
pub struct Suite {
    pub name: String,
    pub cases: Vec<Case>,
}

/// Files below a directory with this suffix, in order.
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

/// All suites. Of suites with hundreds of tests, only every n-th test runs. `folder` is for files
/// that programs read.
pub fn suites(pool: &Pool, every: usize, folder: &Path) -> Result<Vec<Suite>> {
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
            cases: vec![x264(folder)?],
        },
    ];
    let (hashes, hashes_all) = (HASHES.iter().step_by(every), HASHES.len());
    suites.push(Suite {
        name: format!(
            "hashcat: its test of itself, and a password found, {} of {hashes_all}",
            hashes.len()
        ),
        cases: hashes.map(|mode| hashcat(mode)).collect::<Result<_>>()?,
    });
    match pyopencl() {
        Ok((python, tests)) => suites.push(pyopencl_tests(pool, &python, &tests, every)?),
        Err(error) => eprintln!("without pyopencl's tests: {error:#}"),
    }
    Ok(suites)
}

/// pyopencl's tests, one process each, so that a crash does not affect the others.
fn pyopencl_tests(pool: &Pool, python: &Path, tests: &Path, every: usize) -> Result<Suite> {
    // Names are relative to this directory, whatever is above it.
    const PYTEST: [&str; 6] = [
        "-m",
        "pytest",
        "-q",
        "--rootdir=.",
        "-p",
        "no:cacheprovider",
    ];
    let mut collect = pool.native(python);
    collect.current_dir(tests);
    collect.args(PYTEST).arg("--collect-only");
    let text = packages::output(&mut collect)?;
    // A test has variants, whose names contain the device's.
    let names = text.lines().filter(|line| line.contains("::"));
    let names: BTreeSet<_> = names
        .map(|line| line.split_once('[').map_or(line, |(name, _)| name))
        .collect();
    let case = |name: &&str| {
        let mut case = Case::new(python, PYTEST, by_pytest);
        case.arguments
            .extend(["-rA", "--tb=no", name].map(OsString::from));
        case.title = Some((*name).to_owned());
        case.seconds = 600;
        case.folder = Some(tests.to_owned());
        case
    };
    let chosen = names.iter().step_by(every);
    Ok(Suite {
        name: format!(
            "pyopencl {PYOPENCL}: its own tests, {} of {}",
            chosen.len(),
            names.len()
        ),
        cases: chosen.map(case).collect(),
    })
}

/// x264 uses the device for its lookahead, and the checksum of its encoded video is the output. The
/// output depends on timing if there is more than one thread, and while the driver compiles unknown
/// kernels. Therefore it is run once in advance.
fn x264(folder: &Path) -> Result<Case> {
    let (width, height, count) = VIDEO;
    let mut video = Vec::with_capacity(width * height * 3 / 2 * count);
    for picture in 0..count {
        for y in 0..height {
            video.extend((0..width).map(|x| ((x + 3 * picture) ^ (y + 2 * picture)) as u8));
        }
        // Slowly changing colours.
        video.extend((0..width * height / 2).map(|at| (at / width + picture) as u8));
    }
    let path = folder.join("video.yuv");
    fs::write(&path, video).with_context(|| format!("cannot write {}", path.display()))?;
    let script = format!(
        "set -e; for _ in first counted; do x264 --opencl --threads 1 --no-progress --demuxer raw \
         --input-res {width}x{height} --fps 25 --muxer raw -o encoded '{}'; done; \
         sha256sum < encoded",
        path.display()
    );
    let mut case = Case::new("sh", ["-c", &script], by_x264);
    case.title = Some(format!("x264 --opencl, {count} pictures"));
    Ok(case)
}

/// hashcat tests its kernels for one type of hash, and finds the password of its own example.
fn hashcat(mode: &str) -> Result<Case> {
    let mut ask = Command::new("hashcat");
    ask.args(["-m", mode, "--example-hashes", "--machine-readable"]);
    let text = packages::output(&mut ask)?;
    let field = |name: &str| {
        let (_, rest) = text.split_once(&format!("\"{name}\": \""))?;
        Some(rest.split_once('"')?.0.to_owned())
    };
    let (hash, password) = field("example_hash")
        .zip(field("example_pass"))
        .with_context(|| format!("hashcat has no example for hashes of kind {mode}: {text}"))?;
    // Several run at a time, which requires sessions with separate names.
    let script = format!(
        "exec hashcat --session gantry-$$ -m {mode} -a 3 --backend-ignore-cuda --potfile-disable \
         --restore-disable --logfile-disable --force '{hash}' '{password}'"
    );
    let mut case = Case::new("sh", ["-c", &script], by_hashcat);
    case.title = Some(format!("hashcat -m {mode}"));
    // PoCL takes minutes for some of its kernels.
    case.seconds = 600;
    Ok(case)
}

/// Returns a Python with pyopencl, and the directory of its tests, which only the sources contain;
/// both are kept in the cache.
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
