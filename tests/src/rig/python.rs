//! Debian's Python, and packages for it, which pip puts into folders of the cache.

use std::{path::Path, process::Command};

use anyhow::{Context, Result};

use super::packages;

/// Debian's Python, whatever else is in PATH.
pub const PYTHON: &str = "/usr/bin/python3";

/// What [`install`] needs, and the Debian packages that contain it.
pub const PROGRAMS: &[(&str, &str)] = &[
    (PYTHON, "python3"),
    ("/usr/lib/python3/dist-packages/pip", "python3-pip"),
];

/// Installs packages into a folder. The arguments are pip's: `name==version`, for example.
///
/// # Errors
/// pip cannot be installed, or cannot fetch a package.
pub fn install(arguments: &[&str], folder: &Path) -> Result<()> {
    packages::install(PROGRAMS)?;
    let mut pip = Command::new(PYTHON);
    pip.args(["-m", "pip", "install", "--quiet", "--target"])
        .arg(folder)
        .args(["--disable-pip-version-check", "--root-user-action=ignore"])
        .args(arguments);
    packages::run(&mut pip).with_context(|| {
        let what = arguments.join(" ");
        format!("cannot install {what} with pip: check the network")
    })
}
