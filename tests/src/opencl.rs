//! A host with OpenCL: PoCL from its disk, in a root of its own, and a worker pool in there.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use crate::net::sh;

/// Where the disk with PoCL is mounted.
const ROOT: &str = "/opencl";
/// That disk.
pub const DISK: &str = "/dev/vda";
/// What a guest needs beside L2's other files.
const GUEST: &str = "/images/l2-opencl.cpio.gz";
/// What one with systemd needs besides.
const SYSTEMD: &str = "/images/l2-systemd.cpio.gz";

/// A worker pool. It is killed when dropped, and its workers with it.
pub struct Pool {
    child: Child,
    /// Where it listens.
    pub socket: PathBuf,
}

impl Pool {
    /// Mounts the disk with PoCL, if that is not done yet, and starts a pool. Its messages go to
    /// `gantry.log` in `dir`.
    pub fn start(dir: &Path) -> Result<Self> {
        if !Path::new(ROOT).join("dev/null").exists() {
            mount()?;
        }
        fs::copy(
            "/bin/gantry-accel",
            Path::new(ROOT).join("run/gantry-accel"),
        )?;
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(dir.join("gantry.log"))?;
        let socket = Path::new(ROOT).join("run/pool.sock");
        let child = Command::new("chroot")
            .args([
                ROOT,
                "/run/gantry-accel",
                "serve",
                "--socket",
                "/run/pool.sock",
            ])
            .args(["--spare", "1"])
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot start the worker pool")?;
        let pool = Self { child, socket };
        let start = Instant::now();
        while !pool.socket.exists() {
            ensure!(
                start.elapsed() < Duration::from_secs(20),
                "the pool does not listen"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(pool)
    }

    /// What PoCL has compiled for an owner, and when.
    pub fn compiled(&self, owner: &str) -> Result<Vec<String>> {
        let folder = format!("{ROOT}/tmp/gantry-compiled-0/{owner}");
        let found = crate::net::sh(&format!(
            "find {folder} -name program.bc -o -name '*.so' | xargs -r stat -c '%n %i %Y' | sort"
        ))?;
        Ok(found.lines().map(str::to_owned).collect())
    }

    /// Processes of workers, ascending.
    pub fn workers(&self) -> Result<Vec<u32>> {
        let of = format!("/proc/{0}/task/{0}/children", self.child.id());
        let text = fs::read_to_string(of)?;
        Ok(text
            .split_whitespace()
            .filter_map(|pid| pid.parse().ok())
            .collect())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.socket);
    }
}

fn mount() -> Result<()> {
    let modules =
        "virtio_ring virtio virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci virtio_blk";
    sh(&format!(
        "for m in {modules}; do [ -e /modules/$m.ko ] && insmod /modules/$m.ko 2>/dev/null; done; \
         mkdir -p {ROOT} && mount -t ext4 -o ro {DISK} {ROOT} && \
         mount -t proc proc {ROOT}/proc && mount -t sysfs sys {ROOT}/sys && \
         mount -o bind /dev {ROOT}/dev && mount -t tmpfs run {ROOT}/run && \
         mount -t tmpfs tmp {ROOT}/tmp"
    ))
    .context("cannot mount the disk with PoCL")?;
    Ok(())
}

/// L2's initial file system with driver, agent and programs, in `dir`.
pub fn guest_files(dir: &Path) -> Result<PathBuf> {
    guest_with(dir, &[GUEST])
}

/// The same with systemd and this repository's units.
pub fn guest_files_with_systemd(dir: &Path) -> Result<PathBuf> {
    guest_with(dir, &[GUEST, SYSTEMD])
}

fn guest_with(dir: &Path, more: &[&str]) -> Result<PathBuf> {
    let path = dir.join("l2.cpio.gz");
    // The kernel unpacks one archive after the other.
    let mut bytes = fs::read(crate::gantry::INITRAMFS)?;
    for archive in more {
        bytes.extend(fs::read(archive)?);
    }
    fs::write(&path, bytes)?;
    Ok(path)
}
