//! The demonstration: one guest with a disk, whose output is shown line by line.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, ensure};

use crate::gantry::CMDLINE;

/// Prefix of the guest's facts.
const FACT: &str = "fact ";

/// Paths of the parts of the demonstration.
pub struct Parts<'a> {
    /// Gantry's binary.
    pub gantry: &'a Path,
    /// The kernel.
    pub kernel: &'a Path,
    /// The guest's initramfs.
    pub initramfs: &'a Path,
    /// An image for its disk.
    pub disk: &'a Path,
    /// Socket of a worker pool for the guest's accelerator, if there is one.
    pub pool: Option<&'a Path>,
}

/// Boots the guest, passes on each line that it prints, and returns what was proven.
pub fn run(parts: &Parts<'_>, mut show: impl FnMut(&str)) -> Result<String> {
    let start = Instant::now();
    let mut gantry = Command::new(parts.gantry);
    if let Some(pool) = parts.pool {
        let options = format!("socket={},window=256M,slices=4", pool.display());
        gantry.args(["--accel", &options]);
    }
    let mut gantry = gantry
        .arg("--kernel")
        .arg(parts.kernel)
        .arg("--initramfs")
        .arg(parts.initramfs)
        .args([
            "--cmdline",
            &format!("{} then=demo", CMDLINE.replace(" quiet", "")),
        ])
        .args([
            "--cpus",
            "boot=2",
            "--memory",
            "size=512M",
            "--serial",
            "tty",
        ])
        .args(["--console", "off", "--balloon", "size=0", "--disk"])
        .arg(format!("path={},image_type=raw", parts.disk.display()))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start gantry")?;
    let output = gantry.stdout.take().context("gantry has no output")?;
    let mut facts = Vec::new();
    for line in BufReader::new(output).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).trim_end().to_owned();
        match line.split_once(FACT) {
            Some((_, fact)) => facts.push(fact.to_owned()),
            None => show(&line),
        }
    }
    let status = gantry.wait()?;
    ensure!(status.success(), "gantry ended with {status}");
    ensure!(!facts.is_empty(), "the guest did not get to its shell");
    ensure!(
        parts.pool.is_none() || facts.iter().any(|fact| fact.starts_with("OpenCL")),
        "OpenCL computed nothing in the guest: see its output above"
    );
    Ok(format!(
        "proven: {}; {:.1} s from start to power-off",
        facts.join(", "),
        start.elapsed().as_secs_f64()
    ))
}
