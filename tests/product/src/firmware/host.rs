//! A host in QEMU with an emulated processor that has AMD-V, and gantry in it: a shell to give it orders, and the
//! terminal of its guest.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result};
use gantry_tests::{
    guest::Guest,
    rig::{Cache, images::VIRTIO_DISK, root_fs},
};

/// Modules that the host loads, in order.
const MODULES: &[&str] = &["irqbypass", "kvm", "ccp", "kvm-amd"];

/// The firmware in the host.
pub const FIRMWARE: &str = "/CLOUDHV.fd";

/// Files of the host, by their names in QEMU's folder.
const SHELL: &str = "shell.sock";
const TERMINAL: &str = "terminal.sock";
const CONSOLE: &str = "console.log";

/// A QEMU, which is killed when dropped.
struct Qemu(Child);

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The host.
pub struct Host {
    _qemu: Qemu,
    /// Its shell.
    pub shell: Guest,
    /// The second serial port, on which a guest may have its terminal: `/dev/ttyS2`.
    pub guest: Guest,
}

impl Host {
    /// Boots a host with this gantry, firmware and disks, which are `/dev/vda` and so on in their order. What is written
    /// to the disks is lost at its end. Its files are in `work`.
    pub fn boot(
        cache: &Cache,
        gantry: &Path,
        firmware: &Path,
        disks: &[&Path],
        work: &Path,
    ) -> Result<Self> {
        let (kernel, initramfs) = file_system(cache, gantry, firmware, work)?;
        for socket in [SHELL, TERMINAL] {
            let _ = fs::remove_file(work.join(socket));
        }
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(["-machine", "q35,kernel-irqchip=off", "-smp", "1"])
            .args(["-accel", "tcg,thread=multi", "-cpu", "max", "-m", "3072"])
            .args(["-nodefaults", "-no-user-config", "-display", "none"])
            .arg("-no-reboot")
            .arg("-serial")
            .arg(format!("file:{}", work.join(CONSOLE).display()));
        for socket in [SHELL, TERMINAL] {
            let path = work.join(socket);
            command
                .arg("-serial")
                .arg(format!("unix:{},server=on,wait=off", path.display()));
        }
        for (number, disk) in disks.iter().enumerate() {
            let file = disk.display();
            command
                .arg("-drive")
                .arg(format!(
                    "file={file},if=none,id=d{number},format=raw,snapshot=on"
                ))
                .arg("-device")
                .arg(format!("virtio-blk-pci,drive=d{number}"));
        }
        let qemu = command
            .arg("-kernel")
            .arg(kernel)
            .arg("-initrd")
            .arg(initramfs)
            .args([
                "-append",
                "console=ttyS0 panic=-1 mitigations=off quiet no_timer_check norandmaps",
            ])
            .stdin(Stdio::null())
            .spawn()
            .context("cannot start qemu-system-x86_64")?;
        let mut host = Self {
            _qemu: Qemu(qemu),
            shell: Guest::connect(&work.join(SHELL))?,
            guest: Guest::connect(&work.join(TERMINAL))?,
        };
        host.shell
            .wait_ready()
            .with_context(|| format!("see {}", work.join(CONSOLE).display()))?;
        Ok(host)
    }
}

/// The host's kernel and initial file system.
fn file_system(
    cache: &Cache,
    gantry: &Path,
    firmware: &Path,
    work: &Path,
) -> Result<(PathBuf, PathBuf)> {
    let kernel = cache.kernel()?;
    let busybox = cache.unpacked("busybox-static")?.join("bin/busybox");
    let root = work.join("host");
    root_fs::start(&root, &busybox)?;
    let names = [VIRTIO_DISK, MODULES].concat();
    let loaded = root_fs::modules(&kernel, &names, &root.join("modules"))?;
    root_fs::program(gantry, &root, "bin/gantry")?;
    fs::copy(firmware, root.join(&FIRMWARE[1..]))?;
    let init = format!(
        "{}
for m in {loaded}; do insmod /modules/$m.ko; done
for port in /dev/ttyS1 /dev/ttyS2; do stty -F $port raw -echo; done
exec 0</dev/ttyS1 1>/dev/ttyS1 2>&1
{}",
        root_fs::INIT,
        root_fs::commands()
    );
    root_fs::script(&root.join("init"), &init)?;
    let archive = work.join("host.cpio");
    root_fs::pack(&root, &archive)?;
    Ok((kernel.image, archive))
}
