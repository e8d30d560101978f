//! Files for Linux guests with OpenCL: PoCL on a disk, and programs of this repository.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Result;
use gantry_build::target;
use gantry_tests::rig::{self, images, root_fs};

use super::{bochs::CYLINDER, module::Module};

/// Modules that the emulated host loads for the disk. Everything else is built into the kernel.
pub const DISK_MODULES: &[&str] = &["scsi_common", "scsi_mod", "libata", "ata_piix", "sd_mod"];

/// Returns the disk with PoCL, in whole cylinders. Nobody writes to it.
pub fn disk() -> Result<PathBuf> {
    let folder = target().join("rig");
    fs::create_dir_all(&folder)?;
    let disk = rig::opencl::disk(&folder)?;
    let file = fs::File::options().write(true).open(&disk)?;
    let length = file.metadata()?.len();
    file.set_len(length.next_multiple_of(CYLINDER))?;
    Ok(std::path::absolute(disk)?)
}

/// Installs what else a guest with that disk needs, and what mounts it: see
/// `vmfunc-gate/rig/src/opencl.rs`.
pub fn files(module: &Module, release: &Path, guest: &Path) -> Result<()> {
    let loaded = root_fs::modules(&module.kernel, images::VIRTIO_DISK, &guest.join("modules"))?;
    let programs = guest.join("programs");
    fs::create_dir_all(&programs)?;
    for (file, name) in [
        ("gantry-accel", "gantry-accel"),
        ("libgantry_opencl.so", "libgantry_opencl.so"),
        ("examples/opencl_moving", "opencl-moving"),
    ] {
        gantry_build::copy(&release.join(file), &programs.join(name))?;
    }
    let prepare = format!(
        "#!/bin/busybox sh
set -e
/bin/busybox --install -s /bin
mkdir /proc /opencl
mount -t proc proc /proc
for m in {loaded}; do insmod /modules/$m.ko; done
mount -t ext4 -o ro /dev/vda /opencl
for d in proc sys dev tmp; do mount -o bind /$d /opencl/$d; done
cp /programs/* /tmp/
mkdir /tmp/vendors
echo /tmp/libgantry_opencl.so >/tmp/vendors/gantry.icd
"
    );
    root_fs::script(&guest.join("bin/prepare"), &prepare)
}
