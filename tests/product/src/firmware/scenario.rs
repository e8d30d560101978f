//! A stock image boots by stock firmware.

use std::{fs, time::Duration};

use anyhow::Result;
use gantry_tests::{
    guest::Guest,
    rig::{Cache, packages},
};

use gantry_build::{
    programs::{self, Build},
    target,
};

use super::{edk2, image};
use crate::{
    host::{Contents, Host, said},
    record::Record,
};

/// The firmware in the host.
const FIRMWARE: &str = "CLOUDHV.fd";

/// Programs that the scenario needs, beside those of the firmware and the disk.
const PROGRAMS: &[(&str, &str)] = &[
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("/usr/share/seabios/bios-256k.bin", "seabios"),
    ("cpio", "cpio"),
];

/// Timeout of what an emulated guest of an emulated host does: only a hang reaches it.
const PATIENCE: Duration = Duration::from_mins(15);

/// What cloud-init is told.
const USER_DATA: &str = "#cloud-config
hostname: from-the-seed
write_files:
  - path: /root/from-the-seed
    content: a file of the seed
";
const META_DATA: &str = "instance-id: first\n";

/// Debian boots by edk2 and GRUB, and is used.
///
/// # Errors
/// It does not.
pub fn stock_image(record: &mut Record) -> Result<()> {
    packages::install(PROGRAMS)?;
    programs::choose(Build::Scenario);
    let cache = Cache::open()?;
    let (firmware, disk) = (edk2::firmware(&cache)?, image::disk(&cache)?);
    let gantry = programs::only(&["vmm"])?.join("gantry");
    let work = target().join("firmware");
    fs::create_dir_all(&work)?;
    let seed = work.join("seed.img");
    image::seed(&[("user-data", USER_DATA), ("meta-data", META_DATA)], &seed)?;
    let contents = Contents {
        programs: &[(&gantry, "gantry")],
        files: &[(&firmware, FIRMWARE)],
    };
    let mut host = Host::boot(&cache, &contents, &[&disk, &seed], &work)?;
    let done = boot_and_use(&mut host, record);
    fs::write(work.join("guest.log"), host.guest.transcript())?;
    fs::write(work.join("host.log"), host.shell.transcript())?;
    let log = work.join("guest.log");
    done.map_err(|error| error.context(format!("see {}", log.display())))
}

fn boot_and_use(host: &mut Host, record: &mut Record) -> Result<()> {
    host.start(&format!(
        "--firmware /{FIRMWARE} --disk path=/dev/vda,image_type=raw path=/dev/vdb,image_type=raw,readonly=on \
         --cpus boot=1 --memory size=768M --serial tty --console off"
    ))?;
    let guest = &mut host.guest;
    guest.wait_for("GNU GRUB", PATIENCE)?;
    record.saw("edk2 has started GRUB from the disk: its menu is on the serial port");
    log_in(guest)?;
    record.saw("Debian lets root log in, and cloud-init has ended");
    said(guest, "hostname", "from-the-seed")?;
    said(guest, "cat /root/from-the-seed", "a file of the seed")?;
    record.saw("the name and a file are those of cloud-init's seed");
    guest.run("test -d /sys/firmware/efi")?;
    record.saw("the kernel was started by UEFI");
    // The disk with the system is below 4 GiB, and one that comes later need not be.
    said(guest, "ls /sys/class/block | grep -c '^vd[a-z]$'", "2")?;
    host.shell
        .run("dd if=/dev/zero of=/tmp/more bs=1M count=8 2>/dev/null")?;
    host.ctl("add-disk path=/tmp/more,image_type=raw,id=more")?;
    let guest = &mut host.guest;
    guest.eventually("cat /sys/class/block/vdc/size", |size| size == "16384")?;
    record.saw("a disk is added while it runs");
    guest.run("touch /dev/shm/before && sync")?;
    guest.send("reboot")?;
    log_in(guest)?;
    guest.run("test ! -e /dev/shm/before")?;
    said(guest, "cat /root/from-the-seed", "a file of the seed")?;
    record.saw("rebooted by firmware and GRUB, with what it wrote to its disk");
    // Saved and restored by another process.
    guest.run("echo here > /dev/shm/mark")?;
    for what in ["pause", "snapshot file:///tmp/saved", "shutdown-vmm"] {
        host.ctl(what)?;
    }
    host.shell
        .eventually("pidof gantry || echo none", |said| said == "none")?;
    host.start("--restore source_url=file:///tmp/saved,resume=on")?;
    let guest = &mut host.guest;
    said(guest, "cat /dev/shm/mark", "here")?;
    record.saw("saved, and restored by another process");
    guest.send("poweroff")?;
    host.shell
        .eventually("cat /tmp/status", |status| status == "0")?;
    record.saw("powered off");
    Ok(())
}

/// Waits for the shell of root, and makes it take commands as [`Guest`] gives them.
fn log_in(guest: &mut Guest) -> Result<()> {
    guest.wait_for("login: root (automatic login)", PATIENCE)?;
    guest.wait_for("# ", PATIENCE)?;
    // cloud-init may still be at work. The quotes keep the echo of this line from looking like its answer.
    guest.send(
        "dmesg -n 1; stty -echo; PS1=; cloud-init status --wait >/dev/null 2>&1; echo @rea''dy@; \
         while read -r line; do (eval \"$line\"); echo @sta''tus=$?@; done",
    )?;
    guest.wait_for(gantry_tests::guest::READY, PATIENCE)?;
    Ok(())
}
