//! What works without a package manager of the system: a Python package for virtual environments, and an archive.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use gantry_build::progress::Step;
use gantry_tests::rig::{packages, python::PYTHON};

use super::{
    floor,
    stage::{Trees, write},
    version::Version,
};

/// Programs that this needs, and their Debian packages.
const PROGRAMS: &[(&str, &str)] = &[
    (PYTHON, "python3"),
    ("/usr/lib/python3/dist-packages/wheel", "python3-wheel"),
    ("zstd", "zstd"),
];

/// Programs that the wheel puts beside Python.
const WHEEL_PROGRAMS: [&str; 3] = ["gantry-checkpoint", "gantry-cuda", "gantry-smi"];

/// Makes the Python package. It contains no Python: an environment gets the programs in `bin`, and the libraries in
/// `lib/gantry-cuda`, where they look for them.
///
/// # Errors
/// A file is missing.
pub fn make(
    sources: &Path,
    trees: &Trees,
    version: &Version,
    work: &Path,
    out: &Path,
) -> Result<PathBuf> {
    packages::install(PROGRAMS)?;
    let step = Step::new("making the Python package");
    let tree = trees.of("gantry-guest");
    let (name, tag) = ("gantry_cuda", platform(&tree)?);
    let named = format!("{name}-{}", version.python);
    let folder = work.join("wheel").join(&named);
    let data = folder.join(format!("{named}.data"));
    for program in WHEEL_PROGRAMS {
        let to = data.join("scripts").join(program);
        add(&tree.join("usr/bin").join(program), &to, 0o755)?;
    }
    add(&trees.agent, &data.join("scripts/gantry-agent"), 0o755)?;
    for entry in fs::read_dir(tree.join("usr/lib/gantry-cuda"))? {
        let file = entry?.path();
        let name = file.file_name().context("a library has a name")?;
        add(&file, &data.join("data/lib/gantry-cuda").join(name), 0o644)?;
    }
    let about = folder.join(format!("{named}.dist-info"));
    let text = format!(
        "Wheel-Version: 1.0\nGenerator: cargo xtask package\nRoot-Is-Purelib: false\nTag: {tag}\n"
    );
    write(&about.join("WHEEL"), text.as_bytes(), 0o644)?;
    let read_me = fs::read_to_string(sources.join("packaging/wheel.md"))?;
    let text = format!(
        "Metadata-Version: 2.1\nName: gantry-cuda\nVersion: {}\nSummary: CUDA for programs of a Gantry guest, in a \
         virtual environment\nLicense: Apache-2.0\nRequires-Python: >=3.7\nDescription-Content-Type: \
         text/markdown\n\n{read_me}",
        version.python
    );
    write(&about.join("METADATA"), text.as_bytes(), 0o644)?;
    add(&sources.join("LICENSE"), &about.join("LICENSE"), 0o644)?;
    let bom = tree.join("usr/share/doc/gantry-guest/sbom.cdx.json");
    add(&bom, &about.join("sboms/sbom.cdx.json"), 0o644)?;
    packages::run(
        Command::new(PYTHON)
            .args(["-m", "wheel", "pack", "--dest-dir"])
            .arg(out)
            .arg(&folder)
            .env("SOURCE_DATE_EPOCH", version.epoch.to_string()),
    )?;
    let made = out.join(format!("{named}-{tag}.whl"));
    fs::metadata(&made).with_context(|| format!("{} was not made", made.display()))?;
    step.finish();
    Ok(made)
}

/// Which Python and which C library it works with.
fn platform(tree: &Path) -> Result<String> {
    let mut newest = (2, 17);
    for folder in ["usr/bin", "usr/lib/gantry-cuda"] {
        for entry in fs::read_dir(tree.join(folder))? {
            newest = newest.max(floor::needed(&entry?.path())?);
        }
    }
    let (major, minor) = newest;
    Ok(format!("py3-none-manylinux_{major}_{minor}_x86_64"))
}

/// Makes the archive, which has the same files for any place, with the agent that installs itself.
///
/// # Errors
/// A file is missing.
pub fn tarball(
    sources: &Path,
    trees: &Trees,
    version: &Version,
    work: &Path,
    out: &Path,
) -> Result<PathBuf> {
    packages::install(PROGRAMS)?;
    let step = Step::new("making the archive for guests");
    let tree = trees.of("gantry-guest");
    let named = format!("gantry-guest-{}", version.package);
    let folder = work.join("tar").join(&named);
    for part in ["bin", "lib/gantry-cuda", "share/man", "share/doc"] {
        let to = folder.join(part);
        fs::create_dir_all(to.parent().context("it has a folder")?)?;
        packages::run(
            Command::new("cp")
                .arg("-a")
                .args([&tree.join("usr").join(part), &to]),
        )?;
    }
    add(&trees.agent, &folder.join("sbin/gantry-agent"), 0o755)?;
    let licence = folder.join("share/doc/gantry-guest/LICENSE");
    add(&sources.join("LICENSE"), &licence, 0o644)?;
    let made = out.join(format!("{named}.tar.zst"));
    packages::run(
        Command::new("tar")
            .args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner"])
            .args(["--format=gnu", "--mode=u+rw,go+r,go-w,a+X"])
            .arg(format!("--mtime=@{}", version.epoch))
            .args(["--use-compress-program", "zstd -19 --threads=1", "-cf"])
            .arg(&made)
            .arg("-C")
            .arg(work.join("tar"))
            .arg(&named),
    )?;
    step.finish();
    Ok(made)
}

fn add(from: &Path, to: &Path, mode: u32) -> Result<()> {
    let bytes = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    write(to, &bytes, mode)
}
