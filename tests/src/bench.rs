//! Measurements of whole runs in L1, printed as rows of a table. They are figures, not tests.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result};
use serde_json::json;

use crate::{
    gantry::{BZIMAGE, CMDLINE, GANTRY, Gantry, INITRAMFS, VMLINUX},
    guest::Guest,
};

/// Boots that are measured; the median counts.
const BOOTS: usize = 5;

/// Runs all measurements and hands on each row: what was measured, and the figure.
pub fn run(mut row: impl FnMut(&str, String)) -> Result<()> {
    boots(&mut row)?;
    process(&mut row)?;
    snapshots(&mut row)
}

/// Median of some figures.
fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Start to power-off with a second of sleep in the guest, and the guest's uptime at its init.
fn boots(row: &mut impl FnMut(&str, String)) -> Result<()> {
    for (name, kernel) in [("bzImage", BZIMAGE), ("ELF (PVH)", VMLINUX)] {
        let (mut runs, mut inits) = (Vec::new(), Vec::new());
        for _ in 0..BOOTS {
            let start = Instant::now();
            let output = Command::new(GANTRY)
                .args(["--kernel", kernel, "--initramfs", INITRAMFS, "--cmdline"])
                .arg(format!("{CMDLINE} then=sleep+1;poweroff+-f"))
                .args(["--cpus", "boot=1", "--memory", "size=256M"])
                .args(["--console", "off", "--serial", "tty"])
                .stdin(Stdio::null())
                .stderr(Stdio::null())
                .output()?;
            runs.push(start.elapsed().as_secs_f64());
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let init = text
                .lines()
                .find_map(|line| line.trim().strip_prefix("init at "));
            inits.push(
                init.context("the guest did not get to its init")?
                    .trim()
                    .parse()?,
            );
        }
        row(
            &format!("{name}, 1 vCPU, 256 MiB: guest uptime at /init (s)"),
            format!("{:.2}", median(inits)),
        );
        row(
            &format!("{name}: start to power-off, with 1 s of sleep (s)"),
            format!("{:.2}", median(runs)),
        );
    }
    Ok(())
}

/// Nanoseconds that all threads of a process have run.
fn cpu_time(pid: u32) -> Result<u64> {
    let mut total = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = fs::read_to_string(task?.path().join("schedstat"))?;
        total += text
            .split_whitespace()
            .next()
            .unwrap_or("0")
            .parse::<u64>()?;
    }
    Ok(total)
}

/// Private dirty memory of a process in KiB, without mappings as large as guest RAM.
fn private_dirty(pid: u32, ram: u64) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let (mut total, mut size) = (0, 0);
    for line in text.lines() {
        let number = |rest: &str| {
            rest.trim()
                .trim_end_matches(" kB")
                .parse::<u64>()
                .unwrap_or(0)
        };
        if let Some(rest) = line.strip_prefix("Size:") {
            size = number(rest);
        } else if let Some(rest) = line.strip_prefix("Private_Dirty:")
            && size < ram >> 10
        {
            total += number(rest);
        }
    }
    Ok(total)
}

fn process(row: &mut impl FnMut(&str, String)) -> Result<()> {
    let dir = Path::new("/tmp/bench");
    fs::create_dir_all(dir)?;
    let mut times = Vec::new();
    for _ in 0..BOOTS {
        let mut gantry = Gantry::start(dir, &[])?;
        times.push(cpu_time(gantry.pid())? as f64 / 1e6);
        gantry.kill()?;
    }
    row(
        "API answers: CPU time so far (ms)",
        format!("{:.1}", median(times)),
    );
    let disk = dir.join("disk.raw");
    fs::File::create(&disk)?.set_len(16 << 20)?;
    let more =
        json!({"disks": [{"path": disk, "image_type": "Raw"}], "memory": {"size": 256 << 20}});
    let (gantry, mut guest) = Gantry::boot(dir, more)?;
    guest.run("dd if=/dev/vda of=/dev/null bs=1M 2>/dev/null")?;
    let dirty = private_dirty(gantry.pid(), 256 << 20)?;
    row(
        "private dirty memory without RAM, 1 vCPU, 1 disk (KiB)",
        dirty.to_string(),
    );
    Ok(())
}

fn snapshots(row: &mut impl FnMut(&str, String)) -> Result<()> {
    let dir = Path::new("/tmp/bench-snapshot");
    fs::create_dir_all(dir)?;
    let (mut gantry, mut guest) = Gantry::boot(dir, json!({"memory": {"size": 1 << 30}}))?;
    guest.run("dd if=/dev/urandom of=/tmp/fill bs=1M count=256 2>/dev/null")?;
    guest.run("(while true; do echo tick; sleep 0.01; done) & true")?;
    gantry.act("vm.pause")?;
    let url = format!("file://{}", dir.join("s").display());
    let start = Instant::now();
    gantry.put("vm.snapshot", json!({"destination_url": url}))?;
    row(
        "snapshot of 1 GiB, about 300 MiB in use, to memory (s)",
        format!("{:.2}", start.elapsed().as_secs_f64()),
    );
    gantry.kill()?;
    for mode in ["Copy", "OnDemand"] {
        let new = dir.join(mode);
        fs::create_dir_all(&new)?;
        let gantry = Gantry::start(&new, &[])?;
        let start = Instant::now();
        let body = json!({"source_url": url, "memory_restore_mode": mode, "resume": true});
        gantry.put("vm.restore", body)?;
        let restored = start.elapsed().as_secs_f64() * 1e3;
        Guest::connect(&dir.join("serial.sock"))?.wait_for("tick", crate::guest::BOOT)?;
        row(
            &format!("restore, {mode}: request answered (ms)"),
            format!("{restored:.0}"),
        );
        let first = start.elapsed().as_secs_f64() * 1e3;
        row(
            &format!("restore, {mode}: first output of the guest (ms)"),
            format!("{first:.0}"),
        );
    }
    Ok(())
}
