//! A host in QEMU with an emulated processor that has AMD-V, and gantry in it: a shell to give it orders, and the
//! terminal of its guest.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use gantry_tests::{
    guest::Guest,
    rig::{Cache, images::VIRTIO_DISK, root_fs},
};

/// Modules that the host loads, in order.
const MODULES: &[&str] = &["irqbypass", "kvm", "ccp", "kvm-amd"];

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

/// What a host has, beside busybox.
pub struct Contents<'a> {
    /// Programs, and their names.
    pub programs: &'a [(&'a Path, &'a str)],
    /// Files, and their names in its root.
    pub files: &'a [(&'a Path, &'a str)],
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
    /// Boots a host that has this, and disks, which are `/dev/vda` and so on in their order. What is written to the disks
    /// is lost at its end. Its files are in `work`.
    pub fn boot(
        cache: &Cache,
        contents: &Contents<'_>,
        disks: &[&Path],
        work: &Path,
    ) -> Result<Self> {
        let (kernel, initramfs) = file_system(cache, contents, work)?;
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

    /// Starts gantry with its guest's terminal on the second port, and waits until it answers.
    pub fn start(&mut self, arguments: &str) -> Result<()> {
        self.shell.run(&format!(
            "rm -f /tmp/status /tmp/api; (gantry -v --api-socket /tmp/api {arguments} < /dev/ttyS2 > /dev/ttyS2 \
             2>> /tmp/gantry.log; echo $? > /tmp/status) & true"
        ))?;
        self.shell.eventually(
            "gantry ctl --socket /tmp/api ping > /dev/null && echo up",
            |said| said == "up",
        )?;
        Ok(())
    }

    /// Carries out a command of `gantry ctl`.
    pub fn ctl(&mut self, what: &str) -> Result<String> {
        self.shell
            .run(&format!("gantry ctl --socket /tmp/api {what}"))
    }
}

/// Checks what a command says.
pub fn said(guest: &mut Guest, command: &str, expected: &str) -> Result<()> {
    let said = guest.run(command)?;
    ensure!(
        said == expected,
        "{command:?} says {said:?}, not {expected:?}"
    );
    Ok(())
}

/// The host's kernel and initial file system.
fn file_system(cache: &Cache, contents: &Contents<'_>, work: &Path) -> Result<(PathBuf, PathBuf)> {
    let kernel = cache.kernel()?;
    let busybox = cache.unpacked("busybox-static")?.join("bin/busybox");
    let root = work.join("host");
    root_fs::start(&root, &busybox)?;
    let names = [VIRTIO_DISK, MODULES].concat();
    let loaded = root_fs::modules(&kernel, &names, &root.join("modules"))?;
    for (program, name) in contents.programs {
        root_fs::program(program, &root, &format!("bin/{name}"))?;
    }
    for (file, name) in contents.files {
        fs::copy(file, root.join(name))?;
    }
    let init = format!(
        "#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /tmp /run /var
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs -o size=90% tmp /tmp
ln -s /run /var/run
for m in {loaded}; do insmod /modules/$m.ko; done
for port in /dev/ttyS1 /dev/ttyS2; do stty -F $port raw -echo; done
exec 0</dev/ttyS1 1>/dev/ttyS1 2>&1
{}",
        root_fs::commands()
    );
    root_fs::script(&root.join("init"), &init)?;
    let archive = work.join("host.cpio");
    root_fs::pack(&root, &archive)?;
    Ok((kernel.image, archive))
}
