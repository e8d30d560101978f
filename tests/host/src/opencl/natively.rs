//! Third-party programs give the same results as with the host's driver.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use gantry_tests::rig::packages;

use super::{
    applications::program,
    pool::{PIGLIT, Pool, Way},
};

pub fn clinfo(pool: &Pool) -> Result<()> {
    /// Features that are not offered, and names of the driver.
    const APART: &[&str] = &[
        "_EXTENSIONS",
        "_VERSION",
        "_SVM_CAPABILITIES",
        "_EXECUTION_CAPABILITIES",
        "_COMMAND_BUFFER_",
        "SUFFIX",
    ];
    let lines = |mut command: Command| -> Result<Vec<String>> {
        let text = packages::output(command.arg("--raw"))?;
        Ok(text
            .lines()
            .filter(|line| line.contains("CL_DEVICE_"))
            .filter(|line| !APART.iter().any(|part| line.contains(part)))
            // The prefix contains the driver's suffix for the platform.
            .map(|line| line[line.find("CL_DEVICE_").unwrap_or(0)..].to_owned())
            .collect())
    };
    let (native, remoted) = (
        lines(pool.native("clinfo"))?,
        lines(pool.remoted("clinfo"))?,
    );
    ensure!(native.len() > 50, "clinfo says little natively: {native:?}");
    for (native, remoted) in native.iter().zip(&remoted) {
        ensure!(native == remoted, "natively: {native}\nremoted: {remoted}");
    }
    ensure!(
        native.len() == remoted.len(),
        "{} lines natively and {} remoted",
        native.len(),
        remoted.len()
    );
    Ok(())
}

pub fn figures(pool: &Pool) -> Result<()> {
    let text = packages::output(&mut pool.remoted(pool.release.join("examples/opencl_figures")))?;
    ensure!(text.contains("is right"), "{text}");
    ensure!(text.contains("Gantry"), "another driver was used: {text}");
    Ok(())
}

/// Compares the entry points for shared virtual memory natively and remoted.
pub fn svm(pool: &Pool) -> Result<()> {
    let run = |mut python: Command| packages::output(python.arg(program("svm.py")));
    let native = run(pool.native("/usr/bin/python3"))?;
    ensure!(native.ends_with("freed: all\n"), "natively: {native}");
    let remoted = run(pool.remoted("/usr/bin/python3"))?;
    ensure!(
        native == remoted,
        "natively:\n{native}\nremoted:\n{remoted}"
    );
    Ok(())
}

/// Through rings, by delegation, and without shared memory between application and worker.
pub fn shared_addresses(pool: &Pool) -> Result<()> {
    let release = || pool.release.clone();
    let delegated = Pool::start(Way::Delegated, "delegated-svm", release(), &["--own-cpu"])?;
    let stream = Pool::start(Way::Unix, "stream-svm", release(), &[])?;
    [pool, &delegated, &stream].into_iter().try_for_each(svm)?;
    let mut wrong = pool.remoted("/usr/bin/python3");
    let wrong = packages::output(wrong.arg(program("svm.py")).arg("refused"))?;
    let expected = "strangers: [-50, -50, -50] True\nrefused: [None, None, None, None, -30, -30, \
                    -30, -8, -30, -30, -49]\n";
    ensure!(wrong == expected, "wrong calls gave:\n{wrong}");
    Ok(())
}

/// Checks where large allocations of a program are placed with the preloaded library, and its
/// copies.
pub fn placed(pool: &Pool) -> Result<()> {
    let large = |pool: &Pool, library: Option<&Path>| -> Result<u32> {
        let mut program = pool.remoted(pool.release.join("examples/opencl_placed"));
        if let Some(library) = library {
            program.env("LD_PRELOAD", library);
        }
        let text = packages::output(&mut program)?;
        let count = text
            .strip_suffix(" of 16 large allocations are in the window, and the data is right\n");
        count
            .and_then(|count| count.parse().ok())
            .with_context(|| format!("the program said {text:?}"))
    };
    let library = pool.release.join("libgantry_malloc.so");
    ensure!(library.exists(), "there is no {}", library.display());
    let with = large(pool, Some(&library))?;
    // Nobody waits for the window's lock: while another thread holds it, memory is allocated
    // elsewhere.
    ensure!(with >= 8, "only {with} of 16 are in the window");
    let without = large(pool, None)?;
    ensure!(
        without == 0,
        "{without} of 16 are in it without the library"
    );
    let stream = Pool::start(Way::Unix, "stream-placed", pool.release.clone(), &[])?;
    let apart = large(&stream, Some(&library))?;
    ensure!(
        apart == 0,
        "{apart} of 16 are in a window that is not shared"
    );
    Ok(())
}

/// Through rings, by delegation, and without shared memory between application and worker.
pub fn forked(pool: &Pool) -> Result<()> {
    const EXPECTED: &str = "one child: 3, which has written 8\n\
        30 of 30 children of a program with 3 busy threads are refused\n\
        the parent computes on\n";
    let release = || pool.release.clone();
    let delegated = Pool::start(Way::Delegated, "delegated-fork", release(), &[])?;
    for (way, pool) in [("rings", pool), ("delegations", &delegated)] {
        let text = packages::output(&mut pool.remoted(pool.release.join("examples/opencl_fork")))?;
        ensure!(text == EXPECTED, "by {way}:\n{text}");
    }
    Ok(())
}

pub fn late(pool: &Pool) -> Result<()> {
    let text = packages::output(&mut pool.remoted(pool.release.join("examples/opencl_late")))?;
    ensure!(text.starts_with("told late"), "{text}");
    Ok(())
}

/// Through rings, by delegation, and without shared memory between application and worker.
pub fn entries(pool: &Pool) -> Result<()> {
    let run = |mut command: Command| packages::output(&mut command);
    let native = run(pool.native(pool.release.join("examples/opencl_entries")))?;
    ensure!(native.ends_with("all\n"), "natively:\n{native}");
    let release = || pool.release.clone();
    let delegated = Pool::start(Way::Delegated, "delegated-entries", release(), &[])?;
    let stream = Pool::start(Way::Unix, "stream-entries", release(), &[])?;
    for (way, pool) in [
        ("rings", pool),
        ("delegations", &delegated),
        ("a stream", &stream),
    ] {
        let remoted = run(pool.remoted(pool.release.join("examples/opencl_entries")))?;
        ensure!(
            native == remoted,
            "natively:\n{native}\nthrough {way}:\n{remoted}"
        );
    }
    Ok(())
}

/// What the driver does better than PoCL 3.1 does not count.
pub fn piglit(pool: &Pool) -> Result<()> {
    let result = |mut command: Command| -> Result<String> {
        let output = command.arg("-auto").stdin(Stdio::null()).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let result = text.rsplit("\"result\": \"").next().unwrap_or_default();
        Ok(result.split('"').next().unwrap_or_default().to_owned())
    };
    let mut different = Vec::new();
    let mut passed = 0;
    for entry in fs::read_dir(Path::new(PIGLIT).join("bin"))? {
        let test = entry?.path();
        let name = test.file_name().unwrap_or_default().to_string_lossy();
        if !name.starts_with("cl-api-") {
            continue;
        }
        let (native, remoted) = (result(pool.native(&test))?, result(pool.remoted(&test))?);
        passed += usize::from(remoted == "pass");
        if remoted != "pass" && native != remoted {
            different.push(format!("{name}: {native} natively and {remoted} remoted"));
        }
    }
    ensure!(passed > 30, "only {passed} tests pass");
    ensure!(different.is_empty(), "{}", different.join("\n"));
    Ok(())
}

pub fn pyopencl(pool: &Pool) -> Result<()> {
    let run = |mut command: Command| packages::output(command.arg(program("parts.py")));
    let native = run(pool.native("/usr/bin/python3"))?;
    let remoted = run(pool.remoted("/usr/bin/python3"))?;
    ensure!(
        native.ends_with("all\n") && native == remoted,
        "natively:\n{native}\nremoted:\n{remoted}"
    );
    Ok(())
}

pub fn clpeak(pool: &Pool) -> Result<()> {
    let text = packages::output(
        pool.remoted("clpeak")
            .args(["--kernel-latency", "--transfer-bandwidth"]),
    )?;
    ensure!(
        text.contains("Kernel launch latency") && !text.contains("(-"),
        "{text}"
    );
    Ok(())
}
