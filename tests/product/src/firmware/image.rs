//! A disk with Debian that boots by UEFI, made without loop devices: a GPT with an EFI system partition, on which is
//! Debian's signed GRUB, and a root file system with cloud-init.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use gantry_tests::rig::{Cache, packages};

use gantry_build::progress::Step;

/// Programs that making it needs, and their Debian packages.
const PROGRAMS: &[(&str, &str)] = &[
    ("mmdebstrap", "mmdebstrap"),
    ("eatmydata", "eatmydata"),
    ("/usr/sbin/sfdisk", "fdisk"),
    ("/usr/sbin/mke2fs", "e2fsprogs"),
    ("mformat", "mtools"),
];

/// Debian's packages on the disk, beside those that every Debian has.
const PACKAGES: &str = "systemd-sysv,udev,dbus,linux-image-cloud-amd64,grub-efi-amd64-bin,grub-efi-amd64-signed,\
                        cloud-init,iproute2,initramfs-tools";

/// Its name in the cache, which differs for each way to make it.
const KEPT_AS: &str = "debian-uefi-12-b";

/// Gives the initial file system only the modules of this machine: with all, making it takes minutes where everything is
/// emulated.
const FEW_MODULES: &str = r#"cd "$1/etc" && mkdir -p initramfs-tools/conf.d && echo MODULES=list > initramfs-tools/conf.d/modules && printf 'virtio_pci\nvirtio_blk\next4\n' > initramfs-tools/modules"#;

const DISK: &str = "debian.raw";

/// Sizes in MiB: what precedes the first partition, the EFI system partition, and the root file system.
const START: u64 = 1;
const ESP: u64 = 32;
const ROOT: u64 = 1900;

/// What GRUB on the EFI system partition does: what Debian's installer writes there, for a label.
const GRUB_ON_ESP: &str = "search.fs_label root root
set prefix=($root)/boot/grub
configfile $prefix/grub.cfg
";

/// GRUB's menu until the guest has written one.
const FIRST_MENU: &str = "set timeout=1
menuentry Debian {
  linux /vmlinuz root=LABEL=root ro console=ttyS0
  initrd /initrd.img
}
";

/// Files in the root file system.
const FILES: &[(&str, &str)] = &[
    ("boot/grub/grub.cfg", FIRST_MENU),
    (
        "etc/default/grub",
        "GRUB_DEFAULT=0\nGRUB_TIMEOUT=1\nGRUB_DISTRIBUTOR=Debian\nGRUB_CMDLINE_LINUX_DEFAULT=\n\
         GRUB_CMDLINE_LINUX=console=ttyS0\nGRUB_TERMINAL=console\n",
    ),
    (
        "etc/fstab",
        "LABEL=root / ext4 defaults 0 1\nLABEL=ESP /boot/efi vfat umask=0077 0 2\n",
    ),
    ("etc/hostname", "before-the-seed\n"),
    (
        "etc/cloud/cloud.cfg.d/90_source.cfg",
        "datasource_list: [NoCloud, None]\n",
    ),
    (
        "etc/systemd/system/serial-getty@ttyS0.service.d/root.conf",
        "[Service]\nExecStart=\nExecStart=-/sbin/agetty --autologin root --keep-baud 115200 %I vt220\n",
    ),
];

/// The disk, which is made once.
///
/// # Errors
/// Debian's packages cannot be fetched, or the disk cannot be made.
pub fn disk(cache: &Cache) -> Result<PathBuf> {
    let kept = cache.made(KEPT_AS, |work| {
        packages::install(PROGRAMS)?;
        let step = Step::new("making a disk with Debian that boots by UEFI (once)");
        let root = work.join("root");
        debootstrap(&root)?;
        for (path, text) in FILES {
            let path = root.join(path);
            let folder = path.parent().context("a file is in a folder")?;
            fs::create_dir_all(folder)?;
            fs::write(path, text)?;
        }
        fs::create_dir_all(root.join("boot/efi"))?;
        let disk = work.join(DISK);
        partition(&disk)?;
        write_esp(&root, &disk, work)?;
        write_root(&root, &disk, work)?;
        fs::remove_dir_all(root)?;
        step.finish();
        Ok(())
    })?;
    Ok(kept.join(DISK))
}

/// A disk from which cloud-init takes its orders: labelled `cidata`, with files.
pub fn seed(files: &[(&str, &str)], disk: &Path) -> Result<()> {
    packages::install(PROGRAMS)?;
    fs::File::create(disk)?.set_len(2 << 20)?;
    mtools("mformat", disk, 0, &["-v", "cidata", "::"])?;
    for (name, text) in files {
        let file = disk.with_file_name(name);
        fs::write(&file, text)?;
        let from = file.to_str().context("a path is not UTF-8")?;
        mtools("mcopy", disk, 0, &[from, &format!("::{name}")])?;
    }
    Ok(())
}

/// Unpacks Debian into a folder.
fn debootstrap(root: &Path) -> Result<()> {
    let mut make = Command::new("eatmydata");
    make.args(["mmdebstrap", "--mode=root", "--variant=minbase", "--quiet"])
        .arg(format!("--include={PACKAGES}"))
        .arg("--aptopt=Apt::Install-Recommends \"false\"");
    for left_out in ["man", "doc", "locale", "i18n"] {
        make.arg(format!("--dpkgopt=path-exclude=/usr/share/{left_out}/*"));
    }
    make.arg(format!("--essential-hook={FEW_MODULES}"));
    // Nobody can log in from outside: the machine has no network card.
    make.arg("--customize-hook=chroot \"$1\" passwd -d root");
    packages::run(make.arg("bookworm").arg(root))
        .context("Debian cannot be unpacked: are you root?")
}

/// Writes the partition table of a new disk.
fn partition(disk: &Path) -> Result<()> {
    let end = START + ESP + ROOT + 1;
    fs::File::create(disk)?.set_len(end << 20)?;
    let table =
        format!("label: gpt\nstart={START}MiB,size={ESP}MiB,type=U\nsize={ROOT}MiB,type=L\n");
    let script = disk.with_extension("sfdisk");
    fs::write(&script, table)?;
    let mut sfdisk = Command::new("sh");
    sfdisk
        .args(["-c", "/usr/sbin/sfdisk -q \"$1\" < \"$2\"", "sh"])
        .args([disk, &script]);
    packages::run(&mut sfdisk)?;
    Ok(fs::remove_file(script)?)
}

/// The EFI system partition: Debian's GRUB where firmware without variables looks for a boot loader.
fn write_esp(root: &Path, disk: &Path, work: &Path) -> Result<()> {
    let esp = work.join("esp");
    fs::File::create(&esp)?.set_len(ESP << 20)?;
    mtools("mformat", &esp, 0, &["-v", "ESP", "::"])?;
    for folder in ["EFI", "EFI/BOOT", "EFI/debian"] {
        mtools("mmd", &esp, 0, &[&format!("::{folder}")])?;
    }
    let grub = root.join("usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed");
    let grub = grub.to_str().context("a path is not UTF-8")?;
    mtools("mcopy", &esp, 0, &[grub, "::EFI/BOOT/BOOTX64.EFI"])?;
    let menu = work.join("grub.cfg");
    fs::write(&menu, GRUB_ON_ESP)?;
    let from = menu.to_str().context("a path is not UTF-8")?;
    mtools("mcopy", &esp, 0, &[from, "::EFI/debian/grub.cfg"])?;
    fs::remove_file(menu)?;
    put(&esp, disk, START)
}

fn write_root(root: &Path, disk: &Path, work: &Path) -> Result<()> {
    let image = work.join("root.ext4");
    fs::File::create(&image)?.set_len(ROOT << 20)?;
    let mut make = Command::new("/usr/sbin/mke2fs");
    make.args(["-q", "-F", "-t", "ext4", "-L", "root", "-d"]);
    packages::run(make.arg(root).arg(&image))?;
    put(&image, disk, START + ESP)
}

/// Copies an image of a partition to its place on the disk, in MiB, and removes it.
fn put(image: &Path, disk: &Path, at: u64) -> Result<()> {
    let mut copy = Command::new("dd");
    copy.arg(format!("if={}", image.display()))
        .arg(format!("of={}", disk.display()))
        .args(["bs=1M", "conv=notrunc,sparse", "status=none"])
        .arg(format!("seek={at}"));
    packages::run(&mut copy)?;
    Ok(fs::remove_file(image)?)
}

/// Runs one of mtools on an image, from an offset in bytes.
fn mtools(program: &str, image: &Path, offset: u64, arguments: &[&str]) -> Result<()> {
    let mut command = Command::new(program);
    command
        .arg("-i")
        .arg(format!("{}@@{offset}", image.display()))
        .args(arguments)
        .env("MTOOLS_SKIP_CHECK", "1");
    packages::run(&mut command)
}
