//! One tree of files for each package, with the paths that they have when installed.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use gantry_tests::rig::packages;

use super::{
    build::{self, Built},
    sbom,
    version::Version,
};

/// Where the guest's programs are installed.
const GUEST: &[(&str, &[&str])] = &[
    (
        "usr/bin",
        &["gantry-checkpoint", "gantry-cuda", "gantry-smi"],
    ),
    ("usr/sbin", &["gantry-agent"]),
];

/// The OpenCL driver, which loaders open by the path in its ICD file.
const DRIVER: &str = "libgantry_opencl.so";

/// Units, and the packages that they are in.
const UNITS: &[(&str, &str)] = &[
    ("gantry", "tunnel/gantry-tunnel.service"),
    ("gantry-accel", "remoting/gantry-accel.service"),
    ("gantry-accel", "gpu-mediator/gantry-arbiter.service"),
];

/// The shells, and where each looks for completions of packages.
const SHELLS: [(&str, &str, &str, &str); 3] = [
    ("bash", "usr/share/bash-completion/completions", "", ""),
    ("zsh", "usr/share/zsh/vendor-completions", "_", ""),
    ("fish", "usr/share/fish/vendor_completions.d", "", ".fish"),
];

/// The packages.
pub const NAMES: [&str; 5] = [
    "gantry",
    "gantry-accel",
    "gantry-guest",
    "gantry-gate-dkms",
    "gantry-dbg",
];

/// The trees of all packages.
#[derive(Debug)]
pub struct Trees {
    /// The folder with one folder for each package.
    pub folder: PathBuf,
    /// The version of the kernel module.
    pub module: String,
    /// The agent as one file that contains the OpenCL driver: not in the packages, which have both.
    pub agent: PathBuf,
}

impl Trees {
    /// The tree of a package.
    pub fn of(&self, package: &str) -> PathBuf {
        self.folder.join(package)
    }
}

/// Makes the trees of what has been built.
///
/// # Errors
/// A file is missing, or a program does not describe itself.
pub fn stage(sources: &Path, built: &Built, version: &Version, folder: &Path) -> Result<Trees> {
    let dkms = fs::read_to_string(sources.join("vmfunc-gate/module/dkms.conf"))?;
    let module = dkms
        .lines()
        .find_map(|line| line.strip_prefix("PACKAGE_VERSION="))
        .context("dkms.conf names no version")?;
    let trees = Trees {
        folder: folder.to_owned(),
        module: module.trim_matches('"').to_owned(),
        agent: built.agent.clone(),
    };
    let packaging = sources.join("packaging");
    for (package, _, place, programs) in build::HOST {
        for program in *programs {
            add_program(&built.host.join(program), &trees.of(package), place)?;
            let debug = format!("{program}.debug");
            let place = trees.of("gantry-dbg").join("usr/lib/debug").join(place);
            copy(&built.host.join(&debug), &place.join(&debug), 0o644)?;
        }
    }
    for (package, unit) in UNITS {
        let place = trees.of(package).join("usr/lib/systemd/system");
        copy_into(&sources.join(unit), &place, 0o644)?;
    }
    let examples = trees
        .of("gantry-accel")
        .join("usr/share/doc/gantry-accel/examples");
    let drop_in = sources.join("remoting/gantry-accel.service.d/arbiter.conf");
    copy(
        &drop_in,
        &examples.join("gantry-accel.service.d/arbiter.conf"),
        0o644,
    )?;
    for package in ["gantry", "gantry-accel", "gantry-guest"] {
        let file = format!("{package}.conf");
        let place = trees.of(package).join("usr/lib/sysusers.d");
        copy_into(&packaging.join("sysusers").join(file), &place, 0o644)?;
    }
    let place = trees.of("gantry").join("usr/lib/tmpfiles.d");
    copy_into(&packaging.join("tmpfiles/gantry.conf"), &place, 0o644)?;
    guest(sources, built, &trees.of("gantry-guest"))?;
    gate(sources, &trees)?;
    for (package, crates) in [
        ("gantry", build::host_crates("gantry").collect::<Vec<_>>()),
        ("gantry-accel", build::host_crates("gantry-accel").collect()),
        ("gantry-guest", build::guest_crates().collect()),
    ] {
        let text = sbom::of(sources, package, &crates, version)?;
        let place = trees.of(package).join("usr/share/doc").join(package);
        write(&place.join("sbom.cdx.json"), text.as_bytes(), 0o644)?;
    }
    Ok(trees)
}

/// The guest's package: its agent runs from `/usr`, and installs nothing itself.
fn guest(sources: &Path, built: &Built, tree: &Path) -> Result<()> {
    for (place, programs) in GUEST {
        for program in *programs {
            add_program(&built.guest.join(program), tree, place)?;
        }
    }
    for entry in fs::read_dir(&built.libraries)? {
        let file = entry?.path();
        let place = match file.ends_with(DRIVER) {
            true => tree.join("usr/lib/gantry"),
            false => tree.join("usr/lib/gantry-cuda"),
        };
        copy_into(&file, &place, 0o644)?;
    }
    let icd = format!("/usr/lib/gantry/{DRIVER}\n");
    write(
        &tree.join("etc/OpenCL/vendors/gantry.icd"),
        icd.as_bytes(),
        0o644,
    )?;
    let mark = base::paths::PACKAGED.trim_start_matches('/');
    write(
        &tree.join(mark),
        b"The package manager installs gantry-agent.\n",
        0o644,
    )?;
    let unit = fs::read_to_string(sources.join("guest/agent/gantry-agent.service"))?;
    let unit = packaged_unit(&unit)?;
    let place = tree.join("usr/lib/systemd/system/gantry-agent.service");
    write(&place, unit.as_bytes(), 0o644)
}

/// The agent's unit for `/usr`, without the lines by which the agent installs the driver that it contains.
fn packaged_unit(unit: &str) -> Result<String> {
    let (before, rest) = unit
        .split_once("# Makes the versions of driver and agent match.")
        .context("the agent's unit installs no driver")?;
    let (_, after) = rest
        .split_once("install --driver-only\n")
        .context("the agent's unit installs no driver")?;
    Ok(format!("{before}{after}").replace("/usr/local/sbin/", "/usr/sbin/"))
}

/// The kernel module's sources, and who may use its device.
fn gate(sources: &Path, trees: &Trees) -> Result<()> {
    let tree = trees.of("gantry-gate-dkms");
    let place = tree.join(format!("usr/src/gantry-gate-{}", trees.module));
    for entry in fs::read_dir(sources.join("vmfunc-gate/module"))? {
        copy_into(&entry?.path(), &place, 0o644)?;
    }
    let rule = sources.join("packaging/udev/70-gantry-gate.rules");
    copy_into(&rule, &tree.join("usr/lib/udev/rules.d"), 0o644)
}

/// Adds a program with its manual pages and completions.
fn add_program(program: &Path, tree: &Path, place: &str) -> Result<()> {
    copy_into(program, &tree.join(place), 0o755)?;
    let name = program
        .file_name()
        .context("invalid program: its path has no file name")?;
    let name = name.to_string_lossy();
    let pages = tree.join("usr/share/man/man1");
    packages::run(Command::new(program).arg("man").arg(&pages))?;
    for (shell, folder, before, after) in SHELLS {
        let script = packages::output(Command::new(program).args(["completions", shell]))?;
        let file = tree.join(folder).join(format!("{before}{name}{after}"));
        write(&file, script.as_bytes(), 0o644)?;
    }
    Ok(())
}

fn copy_into(from: &Path, folder: &Path, mode: u32) -> Result<()> {
    let name = from.file_name().context("a folder cannot be copied")?;
    copy(from, &folder.join(name), mode)
}

fn copy(from: &Path, to: &Path, mode: u32) -> Result<()> {
    let bytes = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    write(to, &bytes, mode)
}

/// Writes a file with these permissions, and folders with the usual ones, whatever the umask.
pub fn write(file: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    let folder = file.parent().context("a file is in a folder")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    fs::write(file, bytes).with_context(|| format!("cannot write {}", file.display()))?;
    fs::set_permissions(file, fs::Permissions::from_mode(mode))?;
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::programs::root;

    #[test]
    fn the_packaged_unit_runs_the_packaged_agent_and_installs_nothing() {
        let unit = fs::read_to_string(root().join("guest/agent/gantry-agent.service")).unwrap();
        let packaged = packaged_unit(&unit).unwrap();
        assert!(packaged.contains("\nExecStart=/usr/sbin/gantry-agent --group render\n"));
        assert!(!packaged.contains("/usr/local") && !packaged.contains("ExecStartPre"));
        // Nothing else differs.
        assert!(packaged.lines().count() + 3 == unit.lines().count());
        assert!(packaged_unit(&packaged).is_err());
    }

    #[test]
    fn groups_of_units_are_created_by_the_package() {
        for (package, unit) in UNITS {
            let read = |file: String| fs::read_to_string(root().join(file)).unwrap();
            let unit = read((*unit).to_owned());
            let users = read(format!("packaging/sysusers/{package}.conf"));
            for key in ["User=", "Group=", "SupplementaryGroups="] {
                let lines = unit.lines().filter_map(|line| line.strip_prefix(key));
                for name in lines.flat_map(str::split_whitespace) {
                    let is_made = users.lines().any(|line| {
                        !line.starts_with('#') && line.split_whitespace().any(|word| word == name)
                    });
                    assert!(
                        is_made || name == "root",
                        "{package} does not create {name}"
                    );
                }
            }
        }
    }
}
