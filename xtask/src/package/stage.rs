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
    ("gantry-accel", "remoting/gantry-leases.service"),
    ("gantry-accel", "gpu-mediator/gantry-arbiter.service"),
    ("gantry-exporter", "exporter/gantry-exporter.service"),
];

/// Users and groups that packages create. The file is named after the package when it is installed, like those of
/// [`TMPFILES`].
const SYSUSERS: &[(&str, &str)] = &[
    ("gantry", "packaging/sysusers/gantry.conf"),
    ("gantry-accel", "packaging/sysusers/gantry-accel.conf"),
    ("gantry-exporter", "exporter/sysusers.conf"),
    ("gantry-guest", "packaging/sysusers/gantry-guest.conf"),
];

/// Folders that packages create, at boot or once.
const TMPFILES: &[(&str, &str)] = &[
    ("gantry", "packaging/tmpfiles/gantry.conf"),
    ("gantry-exporter", "exporter/tmpfiles.conf"),
];

/// Files that users copy from the documentation of a package, and their paths in its examples.
const EXAMPLES: &[(&str, &str, &str)] = &[
    (
        "gantry-accel",
        "remoting/gantry-accel.service.d/arbiter.conf",
        "gantry-accel.service.d/arbiter.conf",
    ),
    (
        "gantry-exporter",
        "resources/monitoring/consoles/gantry.html",
        "consoles/gantry.html",
    ),
    (
        "gantry-exporter",
        "resources/monitoring/gantry.rules.yml",
        "gantry.rules.yml",
    ),
    (
        "gantry-exporter",
        "resources/monitoring/gantry.test.yml",
        "gantry.test.yml",
    ),
    (
        "gantry-exporter",
        "resources/monitoring/grafana.json",
        "grafana.json",
    ),
];

/// The shells, and where each looks for completions of packages.
const SHELLS: [(&str, &str, &str, &str); 3] = [
    ("bash", "usr/share/bash-completion/completions", "", ""),
    ("zsh", "usr/share/zsh/vendor-completions", "_", ""),
    ("fish", "usr/share/fish/vendor_completions.d", "", ".fish"),
];

/// The packages.
pub const NAMES: [&str; 6] = [
    "gantry",
    "gantry-accel",
    "gantry-exporter",
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
    for (files, place) in [
        (SYSUSERS, "usr/lib/sysusers.d"),
        (TMPFILES, "usr/lib/tmpfiles.d"),
    ] {
        for (package, file) in files {
            let to = trees.of(package).join(place);
            copy(
                &sources.join(file),
                &to.join(format!("{package}.conf")),
                0o644,
            )?;
        }
    }
    for (package, file, example) in EXAMPLES {
        let place = documentation(&trees, package).join("examples");
        copy(&sources.join(file), &place.join(example), 0o644)?;
    }
    guest(sources, built, &trees.of("gantry-guest"))?;
    gate(sources, &trees)?;
    for (package, crates) in [
        ("gantry", build::host_crates("gantry").collect::<Vec<_>>()),
        ("gantry-accel", build::host_crates("gantry-accel").collect()),
        (
            "gantry-exporter",
            build::host_crates("gantry-exporter").collect(),
        ),
        ("gantry-guest", build::guest_crates().collect()),
    ] {
        let text = sbom::of(sources, package, &crates, version)?;
        let file = documentation(&trees, package).join("sbom.cdx.json");
        write(&file, text.as_bytes(), 0o644)?;
    }
    // Programs have written pages, and folders were made, as the umask wants it.
    packages::run(
        Command::new("chmod")
            .args(["-R", "u=rwX,go=rX"])
            .arg(folder),
    )?;
    Ok(trees)
}

/// The folder of a package's documentation.
fn documentation(trees: &Trees, package: &str) -> PathBuf {
    trees.of(package).join("usr/share/doc").join(package)
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
        let file = entry?.path();
        if file
            .file_name()
            .is_some_and(|name| is_module_source(&name.to_string_lossy()))
        {
            copy_into(&file, &place, 0o644)?;
        }
    }
    let rule = sources.join("packaging/udev/70-gantry-gate.rules");
    copy_into(&rule, &tree.join("usr/lib/udev/rules.d"), 0o644)
}

/// Whether a file is one of the kernel module's sources. Others are left by a build in their folder.
fn is_module_source(name: &str) -> bool {
    let is_source = ["Kbuild", "Makefile", "dkms.conf"].contains(&name)
        || [".c", ".h", ".S", ".inc"]
            .iter()
            .any(|end| name.ends_with(end));
    is_source && !name.ends_with(".mod.c")
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

/// Writes a file with these permissions, whatever the umask, and makes its folders.
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
    use gantry_build::root;

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
    fn sources_of_the_module_are_packaged_and_what_a_build_leaves_is_not() {
        for name in ["Kbuild", "code.S", "dkms.conf", "gate.h", "trampoline.inc"] {
            assert!(is_module_source(name), "{name}");
        }
        for name in [
            "gantry_gate.mod.c",
            "main.o",
            ".main.o.cmd",
            "modules.order",
        ] {
            assert!(!is_module_source(name), "{name}");
        }
    }

    /// The names in a file of users and groups, or of folders, that a package installs; none if it installs none.
    fn words(files: &[(&str, &str)], package: &str) -> Vec<String> {
        let of = files.iter().filter(|(of, _)| *of == package);
        let texts = of.map(|(_, file)| fs::read_to_string(root().join(file)).unwrap());
        texts
            .flat_map(|text| {
                let lines = text.lines().filter(|line| !line.starts_with('#'));
                let words = lines.flat_map(str::split_whitespace);
                words.map(str::to_owned).collect::<Vec<_>>()
            })
            .collect()
    }

    #[test]
    fn groups_of_units_are_created_by_the_package() {
        for (package, unit) in UNITS {
            let unit = fs::read_to_string(root().join(unit)).unwrap();
            let users = words(SYSUSERS, package);
            for key in ["User=", "Group=", "SupplementaryGroups="] {
                let lines = unit.lines().filter_map(|line| line.strip_prefix(key));
                for name in lines.flat_map(str::split_whitespace) {
                    assert!(
                        users.iter().any(|word| word == name) || name == "root",
                        "{package} does not create {name}"
                    );
                }
            }
        }
    }

    #[test]
    fn units_run_the_programs_of_their_packages() {
        for (package, unit) in UNITS {
            let unit = fs::read_to_string(root().join(unit)).unwrap();
            let programs = build::HOST.iter().filter(|(of, ..)| of == package);
            let mut programs = programs.flat_map(|(_, _, place, names)| {
                names.iter().map(move |name| format!("/{place}/{name}"))
            });
            let command = unit
                .lines()
                .find_map(|line| line.strip_prefix("ExecStart="));
            let command = command.unwrap().split_whitespace().next().unwrap();
            assert!(programs.any(|program| program == command), "{command}");
        }
    }

    #[test]
    fn the_folder_for_metrics_belongs_to_the_group_that_the_exporter_creates() {
        let folders = words(TMPFILES, "gantry-exporter");
        let expected = ["d", base::paths::METRICS, "3770", "root", "gantry-metrics"];
        assert_eq!(folders, expected);
        assert!(words(SYSUSERS, "gantry-exporter").contains(&"gantry-metrics".to_owned()));
    }
}
