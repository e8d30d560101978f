//! Root file systems: programs, modules and scripts in a folder, which becomes an archive or a disk.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::packages::{Kernel, output, run};
use crate::guest::{READY, STATUS};

/// An empty root with busybox.
pub fn start(root: &Path, busybox: &Path) -> Result<()> {
    if root.exists() {
        fs::remove_dir_all(root)?;
    }
    for dir in ["bin", "dev", "etc", "modules"] {
        fs::create_dir_all(root.join(dir))?;
    }
    fs::copy(busybox, root.join("bin/busybox"))?;
    symlink("busybox", root.join("bin/sh"))?;
    Ok(())
}

/// The beginning of an init of busybox's, for a root that begins as [`start`] makes it.
pub const INIT: &str = "#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /tmp
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs -o size=90% tmp /tmp";

/// Writes a program that an interpreter runs.
pub fn script(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// Copies a program and the shared objects that it needs.
pub fn program(from: &Path, root: &Path, to: &str) -> Result<()> {
    let target = root.join(to);
    fs::copy(from, &target).with_context(|| format!("cannot copy {}", from.display()))?;
    fs::set_permissions(&target, fs::Permissions::from_mode(0o755))?;
    let text = output(Command::new("ldd").arg(from)).unwrap_or_default();
    for word in text.split_whitespace().filter(|word| word.starts_with('/')) {
        let target = root.join(&word[1..]);
        if !target.exists() {
            if let Some(parent) = target.parent() {
                fs::create_dir_all(parent)?;
            }
            fs::copy(word, target)?;
        }
    }
    Ok(())
}

/// Copies modules and returns the names of those that the kernel has as modules.
pub fn modules(kernel: &Kernel, names: &[&str], to: &Path) -> Result<String> {
    let mut files = Vec::new();
    find_modules(&kernel.modules, &mut files)?;
    let mut copied = BTreeSet::new();
    for file in files {
        let Some((name, end)) = file
            .file_name()
            .and_then(|name| name.to_str()?.split_once(".ko"))
        else {
            continue;
        };
        if names.contains(&name) {
            let to = to.join(format!("{name}.ko"));
            if end == ".xz" {
                let unpack = format!("xz -dc '{}' > '{}'", file.display(), to.display());
                run(Command::new("sh").args(["-c", &unpack]))?;
            } else {
                fs::copy(&file, to)?;
            }
            copied.insert(name.to_owned());
        }
    }
    // What is missing is built into the kernel; a scenario would notice otherwise.
    let loaded: Vec<_> = names
        .iter()
        .copied()
        .filter(|name| copied.contains(*name))
        .collect();
    Ok(loaded.join(" "))
}

fn find_modules(dir: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("no modules in {}", dir.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            find_modules(&entry.path(), found)?;
        } else if [".ko", ".ko.xz"]
            .iter()
            .any(|end| entry.file_name().to_string_lossy().ends_with(end))
        {
            found.push(entry.path());
        }
    }
    Ok(())
}

/// A script that takes commands from the console for ever, as [`guest`](crate::guest) gives them.
pub fn commands() -> String {
    format!(
        "echo {READY}
while read -r line; do
  (eval \"$line\")
  echo {STATUS}$?@
done
sleep 1000000
"
    )
}

/// Makes an image of so many bytes with a file system (ext4) that has what is in a folder, which goes.
pub fn file_system(root: &Path, bytes: u64, image: &Path) -> Result<()> {
    let partial = image.with_extension("partial");
    fs::File::create(&partial)?.set_len(bytes)?;
    let mut make = Command::new("/usr/sbin/mke2fs");
    make.args(["-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0"]);
    run(make.arg("-d").arg(root).arg(&partial))?;
    fs::remove_dir_all(root)?;
    fs::rename(&partial, image)?;
    Ok(())
}

/// Packs a folder as an initial file system, uncompressed: unpacking gzip took 6 % of the CPU time of an emulated boot to
/// the shell.
pub fn pack(root: &Path, archive: &Path) -> Result<()> {
    let command = format!(
        "cd '{}' && find . | LC_ALL=C sort | cpio --quiet -o -H newc > '{}'",
        root.display(),
        std::path::absolute(archive)?.display()
    );
    run(Command::new("sh").args(["-c", &command]))
}
