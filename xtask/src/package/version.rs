//! The version of packages: that of the tag, or one between two releases that names the commit.

use std::{path::Path, process::Command};

use anyhow::{Context, Result};
use gantry_tests::rig::packages::output;

/// The versions of one commit, and what its packages say of their origin.
#[derive(Clone, Debug)]
pub struct Version {
    /// For Debian and RPM packages. `~` sorts before the release.
    pub package: String,
    /// For Python packages.
    pub python: String,
    /// When the commit was made, in seconds since 1970: the time of all files.
    pub epoch: u64,
    /// Name and address of its author.
    pub maintainer: String,
}

impl Version {
    /// The version of the commit that is checked out in a folder.
    ///
    /// # Errors
    /// The folder is not a work tree of git.
    pub fn of_commit(folder: &Path) -> Result<Self> {
        let git = |arguments: &[&str]| -> Result<String> {
            let mut git = Command::new("git");
            git.args(arguments).current_dir(folder).env("TZ", "UTC");
            Ok(output(&mut git)?.trim().to_owned())
        };
        let log = |format: &str| {
            git(&[
                "log",
                "-1",
                "--date=format-local:%Y%m%d%H%M%S",
                // By default, the length depends on the number of objects in the clone.
                "--abbrev=12",
                &format!("--format={format}"),
            ])
        };
        let release = env!("CARGO_PKG_VERSION");
        let tag = git(&["tag", "--points-at", "HEAD", &format!("v{release}")])?;
        let is_dirty = !git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
        let epoch = log("%ct")?;
        let (package, python) = versions(
            release,
            !tag.is_empty(),
            &log("%cd")?,
            &log("%h")?,
            is_dirty,
        );
        Ok(Self {
            package,
            python,
            epoch: epoch
                .parse()
                .with_context(|| format!("git prints no time, but {epoch:?}"))?,
            maintainer: log("%an <%ae>")?,
        })
    }
}

/// The version of packages, and that of Python packages.
fn versions(
    release: &str,
    is_tagged: bool,
    date: &str,
    commit: &str,
    is_dirty: bool,
) -> (String, String) {
    match (is_tagged, is_dirty) {
        (true, false) => (release.to_owned(), release.to_owned()),
        (true, true) => (format!("{release}+dirty"), format!("{release}+dirty")),
        (false, _) => {
            let dirty = if is_dirty { ".dirty" } else { "" };
            (
                format!("{release}~{date}.{commit}{dirty}"),
                format!("{release}.dev{date}+g{commit}{dirty}"),
            )
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn versions_sort_by_date_and_before_the_release() {
        let of = |is_tagged, date, is_dirty| versions("0.1.0", is_tagged, date, "abc", is_dirty).0;
        let (older, newer) = (
            of(false, "202601020304", false),
            of(false, "202601020305", true),
        );
        let release = of(true, "202601020306", false);
        for (less, more) in [(&older, &newer), (&newer, &release)] {
            let mut compare = Command::new("dpkg");
            compare.args(["--compare-versions", less, "lt", more]);
            assert!(compare.status().unwrap().success(), "{less} {more}");
        }
        assert_eq!(release, "0.1.0");
        assert_eq!(
            versions("0.1.0", false, "202601020304", "abc", true).1,
            "0.1.0.dev202601020304+gabc.dirty"
        );
    }
}
