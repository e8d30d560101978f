//! Devices of other models: an application moves to one only if it matches what the application was told about its
//! first device.

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

/// Runs a program whose PoCL reports small work-groups.
const SMALL: [&str; 2] = ["env", "POCL_MAX_WORK_GROUP_SIZE=64"];

pub fn run(pool: &Pool) -> Result<()> {
    between_pools(pool)?;
    within_a_pool(pool)
}

/// The other model is a device with lower limits, set by PoCL's environment. An application that has queried these
/// limits stays, and all reasons are listed.
fn between_pools(pool: &Pool) -> Result<()> {
    let (first, control) = moves::movable(pool, "models")?;
    let release = pool.release.clone();
    let small = Pool::under(&SMALL, Way::Rings, "small", release, &[])?;
    let child = start_asking(&first, &["MAX_WORK_GROUP_SIZE", "MAX_WORK_ITEM_SIZES"])?;
    let text = moves::send(&first, &control, "--all", &small.address)?;
    ensure!(names_all(&text), "{text}");
    finishes(child)?;
    // The application has not queried anything that differs, and its device replies as the first one did.
    let child = start_asking(&first, &["MAX_COMPUTE_UNITS"])?;
    let text = moves::send(&first, &control, "--all", &small.address)?;
    ensure!(text.contains(" moved to "), "{text}");
    // The next application is served, although the pool holds back a worker for the one that has moved.
    start_asking(&small, &["MAX_COMPUTE_UNITS"]).and_then(finishes)?;
    finishes(child)?;
    let _ = fs::remove_file(&control);
    Ok(())
}

/// Whether a text lists everything that a device with small work-groups lacks.
fn names_all(text: &str) -> bool {
    let all = [
        "CL_DEVICE_MAX_WORK_GROUP_SIZE is [64] there",
        "CL_DEVICE_MAX_WORK_ITEM_SIZES is [64,",
    ];
    all.iter().all(|name| text.contains(name))
}

/// Starts an application that queries these values, computes once a line of input has arrived, and compares.
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

/// Built programs, in which the pool's program can be exchanged.
struct Changing(PathBuf);

impl Changing {
    fn new(built: &Path) -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("gantry-changing-{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        for file in ["libgantry_opencl.so", "examples"] {
            symlink(built.join(file), folder.join(file))?;
        }
        gantry_build::copy(&built.join("gantry-accel"), &folder.join("own"))?;
        fs::hard_link(folder.join("own"), folder.join("gantry-accel"))?;
        Ok(Self(folder))
    }

    /// From here on, the program reports smaller devices when it is started.
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

/// The workers of one pool have devices of different models if those that are started later find other devices.
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
    // The waiting worker was started before.
    start_asking(&changing, &["MAX_COMPUTE_UNITS"]).and_then(finishes)?;
    let other = start_asking(&changing, &["MAX_COMPUTE_UNITS"])?;
    let text = moved_within(pool, &control)?;
    ensure!(text.contains(" moved from "), "{text}");
    finishes(other)?;
    let _ = fs::remove_file(&control);
    Ok(())
}

/// Returns what a pool prints when it is to move its applications to other workers.
fn moved_within(pool: &Pool, control: &Path) -> Result<String> {
    // An application that stays makes that program fail, but is not an error here.
    let output = moves::moving(pool, control).arg("--all").output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
