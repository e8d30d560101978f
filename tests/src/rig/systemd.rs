//! L2 with systemd: Debian's init, and the host's units where an administrator would put them. The
//! guest's unit is installed by its agent.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::beside;

use super::{
    opencl::Programs,
    packages,
    root_fs::{commands, pack, program, script},
};

/// Debian's programs and units.
const NEEDED: &[(&str, &str)] = &[("/lib/systemd/systemd", "systemd")];
const PROGRAMS: [&str; 3] = [
    "/lib/systemd/systemd",
    "/bin/systemctl",
    "/usr/bin/systemd-analyze",
];
const UNITS: &str = "/lib/systemd/system";
/// Suffixes of Debian's units that start nothing, and the unit that loads modules for others.
const KINDS: [&str; 3] = [".target", ".slice", "modprobe@.service"];

/// The program that L2's init becomes instead of taking commands.
const BECOME: &str = "#!/bin/sh
# Services have a view of the file system of their own, which that of the kernel does not allow.
mkdir /new
mount -t tmpfs -o mode=755,size=90% new /new
cp -a /bin /etc /lib /lib64 /usr /new/
for d in proc sys dev; do mkdir /new/$d; mount -o move /$d /new/$d; done
# For the unit that loads modules.
mkdir -p /new/sbin /new/lib/modules
ln -s /bin/busybox /new/sbin/modprobe
cp -a /modules /new/lib/modules/$(uname -r)
depmod -b /new
mkdir /new/run /new/tmp /new/root /new/home /new/var
ln -s /run /new/var/run
exec switch_root /new /lib/systemd/systemd
";

/// Takes commands.
const CONSOLE: &str = "[Unit]
DefaultDependencies=no
[Service]
ExecStart=/bin/commands
";

const TERMINAL: &str = "#!/bin/sh
export PATH=/bin:/usr/bin
stty -F /dev/ttyS0 -echo -onlcr
exec 0</dev/ttyS0 1>/dev/ttyS0 2>&1
";

/// What a guest with systemd has in addition to L2's other files and to
/// [`opencl::guest`](super::opencl::guest): init, units, and the programs that they run.
pub fn guest(programs: &Programs, tunnel: &Path, work: &Path) -> Result<PathBuf> {
    packages::install(NEEDED)?;
    let root = work.join("l2-systemd");
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    let units = root.join(&UNITS[1..]);
    let wanted = root.join("etc/systemd/system/multi-user.target.wants");
    for folder in [&units, &wanted, &root.join("bin"), &root.join("usr/sbin")] {
        fs::create_dir_all(folder)?;
    }
    fs::create_dir_all(root.join("usr/bin"))?;
    for path in PROGRAMS {
        program(Path::new(path), &root, &path[1..])?;
    }
    for entry in fs::read_dir(UNITS)?.filter_map(Result::ok) {
        let name = entry.file_name();
        let of_kind = |name: &str| KINDS.iter().any(|kind| name.ends_with(kind));
        // Links may be dangling.
        if name.to_str().is_some_and(of_kind) && entry.path().is_file() {
            fs::copy(entry.path(), units.join(&name))?;
        }
    }
    for unit in [
        "remoting/gantry-accel.service",
        "gpu-mediator/gantry-arbiter.service",
        "tunnel/gantry-tunnel.service",
        // Not in a place that systemd searches: the pool first runs without it.
        "remoting/gantry-accel.service.d/arbiter.conf",
    ] {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(unit);
        let name = from.file_name().context("a unit has no name")?;
        fs::copy(&from, units.join(name)).with_context(|| format!("cannot copy {unit}"))?;
    }
    program(&programs.pool, &root, "usr/sbin/gantry-accel")?;
    program(&programs.arbiter, &root, "usr/sbin/gantry-arbiter")?;
    program(tunnel, &root, "usr/sbin/gantry-tunnel")?;
    beside::keys(&root.join("etc/gantry/tls"))?;
    fs::write(root.join("etc/systemd/system/console.service"), CONSOLE)?;
    symlink("../console.service", wanted.join("console.service"))?;
    script(
        &root.join("bin/commands"),
        &format!("{TERMINAL}{}", commands()),
    )?;
    script(&root.join("bin/become"), BECOME)?;
    let etc = root.join("etc");
    // With an ID, this is not the first boot, on which systemd would enable all units.
    fs::write(etc.join("machine-id"), "b08dfa6083e7567a1921a715000001fb\n")?;
    fs::write(
        etc.join("passwd"),
        "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
    )?;
    // As Debian's packages create them.
    fs::write(
        etc.join("group"),
        "root:x:0:\nvideo:x:44:\nkvm:x:105:\nrender:x:106:\nnogroup:x:65534:\n",
    )?;
    let archive = work.join("l2-systemd.cpio");
    pack(&root, &archive)?;
    Ok(archive)
}
