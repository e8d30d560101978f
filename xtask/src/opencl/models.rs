//! Devices of other models, which an application goes to only if they have what it was told of the first one.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Child, Stdio},
};

use anyhow::{Result, ensure};

use super::{
    applications::program,
    moves,
    pool::{Pool, Way},
};
use crate::programs;

/// Runs a program whose PoCL says that work-groups are small.
const SMALL: [&str; 2] = ["env", "POCL_MAX_WORK_GROUP_SIZE=64"];

pub fn run(pool: &Pool) -> Result<()> {
    between_pools(pool)?;
    within_a_pool(pool)
}

/// A device of another model is one with less, as PoCL's environment says: an application that has asked for it
/// stays, with all reasons.
fn between_pools(pool: &Pool) -> Result<()> {
    let (first, control) = moves::movable(pool, "models")?;
    let release = pool.release.clone();
    let small = Pool::under(&SMALL, Way::Rings, "small", release, &[])?;
    let child = start_asking(&first, &["MAX_WORK_GROUP_SIZE", "MAX_WORK_ITEM_SIZES"])?;
    let text = moves::send(&first, &control, "--all", &small.address)?;
    ensure!(names_all(&text), "{text}");
    finishes(child)?;
    // It has asked for nothing that this one lacks, and its device answers as the first one did.
    let child = start_asking(&first, &["MAX_COMPUTE_UNITS"])?;
    let text = moves::send(&first, &control, "--all", &small.address)?;
    ensure!(text.contains(" moved to "), "{text}");
    // Who comes next is served, though the pool holds a worker back for the one that has moved.
    start_asking(&small, &["MAX_COMPUTE_UNITS"]).and_then(finishes)?;
    finishes(child)?;
    let _ = fs::remove_file(&control);
    Ok(())
}

/// Whether a text names all that a device with small work-groups lacks.
fn names_all(text: &str) -> bool {
    let all = [
        "CL_DEVICE_MAX_WORK_GROUP_SIZE is [64] there",
        "CL_DEVICE_MAX_WORK_ITEM_SIZES is [64,",
    ];
    all.iter().all(|name| text.contains(name))
}

/// An application that asks its device for these, computes once a line of its input has come, and compares.
fn start_asking(pool: &Pool, asked: &[&str]) -> Result<Child> {
    let mut child = pool
        .remoted("/usr/bin/python3")
        .arg(program("asking.py"))
        .args(asked)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    moves::await_running(&mut child)?;
    Ok(child)
}

fn finishes(mut child: Child) -> Result<()> {
    drop(child.stdin.take());
    let output = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(said == "ok\n", "{said}");
    Ok(())
}

/// What was built, with a pool's program that can become another one.
struct Changing(PathBuf);

impl Changing {
    fn new(built: &Path) -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("gantry-changing-{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        for file in ["libgantry_opencl.so", "examples"] {
            symlink(built.join(file), folder.join(file))?;
        }
        programs::copy(&built.join("gantry-accel"), &folder.join("own"))?;
        fs::hard_link(folder.join("own"), folder.join("gantry-accel"))?;
        Ok(Self(folder))
    }

    /// Whoever starts the program from here on gets smaller devices.
    fn change(&self) -> Result<()> {
        let (new, own) = (self.0.join("new"), self.0.join("own"));
        let script = format!(
            "#!/bin/sh\nexec {} {} \"$@\"\n",
            SMALL.join(" "),
            own.display()
        );
        fs::write(&new, script)?;
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755))?;
        Ok(fs::rename(new, self.0.join("gantry-accel"))?)
    }
}

impl Drop for Changing {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The workers of one pool have devices of different models if those that are started later find others.
fn within_a_pool(pool: &Pool) -> Result<()> {
    let built = Changing::new(&pool.release)?;
    let control = std::env::temp_dir().join(format!("gantry-within-{}", std::process::id()));
    let path = control.display().to_string();
    let options = ["--control", &path];
    let changing = Pool::start(Way::Rings, "within", built.0.clone(), &options)?;
    let relies = start_asking(&changing, &["MAX_WORK_GROUP_SIZE", "MAX_WORK_ITEM_SIZES"])?;
    built.change()?;
    let text = moved_within(pool, &control)?;
    ensure!(names_all(&text) && !text.contains(" moved "), "{text}");
    finishes(relies)?;
    // The worker that waited was started before.
    start_asking(&changing, &["MAX_COMPUTE_UNITS"]).and_then(finishes)?;
    let other = start_asking(&changing, &["MAX_COMPUTE_UNITS"])?;
    let text = moved_within(pool, &control)?;
    ensure!(text.contains(" moved from "), "{text}");
    finishes(other)?;
    let _ = fs::remove_file(&control);
    Ok(())
}

/// What a pool says that is to move its applications to other workers.
fn moved_within(pool: &Pool, control: &Path) -> Result<String> {
    // One that stays is an error of this program, and none here.
    let output = moves::moving(pool, control).arg("--all").output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
