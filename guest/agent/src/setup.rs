//! `install` and `uninstall`: set up and remove a machine's OpenCL platform, which this one file
//! contains.

use std::{
    fs,
    io::{self, ErrorKind, Write},
    os::unix::{fs::FileTypeExt, net::UnixStream},
    path::{Path, PathBuf},
    process::Command,
};

use base::paths::{OPENCL_SOCKET, PACKAGED};

use crate::{
    carried,
    place::{self, Done, Tree},
};

/// Why the driver and the agent are not installed, or not removed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no driver.
    #[error(
        "this agent carries no driver: it was built without the feature carry-driver \
         (docs/user/opencl.md says how to build it with)"
    )]
    NoDriver,
    /// The package manager installs the driver and the agent.
    #[error(
        "{} has the package gantry-guest, which contains driver and agent: install a newer version of the package, \
         or remove it first",
        .0.display()
    )]
    Packaged(PathBuf),
    /// The agent's own file cannot be read.
    #[error("cannot read this program's own file")]
    Program(#[source] io::Error),
    /// A file cannot be placed or removed.
    #[error(transparent)]
    Place(#[from] place::Error),
    /// systemctl failed, and has told the user why.
    #[error("`systemctl {0}` failed: the files are as said above")]
    Systemd(String),
    /// systemctl cannot be run.
    #[error("cannot run systemctl")]
    Systemctl(#[source] io::Error),
    /// The report cannot be written.
    #[error("cannot write to the standard output")]
    Say(#[source] io::Error),
}

fn say(out: &mut dyn Write, line: &dyn std::fmt::Display) -> Result<(), Error> {
    writeln!(out, "{line}").map_err(Error::Say)
}

/// Whether systemd runs this machine, as described in sd_booted(3).
fn has_systemd() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

fn systemctl(words: &[&str]) -> Result<(), Error> {
    let status = Command::new("systemctl")
        .arg("--no-ask-password")
        .args(words)
        .status();
    match status.map_err(Error::Systemctl)?.success() {
        true => Ok(()),
        false => Err(Error::Systemd(words.join(" "))),
    }
}

/// Whether the unit is active.
fn is_running() -> Result<bool, Error> {
    let status = Command::new("systemctl")
        .args(["--quiet", "is-active", carried::UNIT])
        .status();
    Ok(status.map_err(Error::Systemctl)?.success())
}

/// Installs the driver and, unless `driver_only`, the agent, which is started if this machine runs
/// systemd. Reports what it does.
pub fn install(root: &Path, driver_only: bool, out: &mut dyn Write) -> Result<(), Error> {
    if root.join(PACKAGED.trim_start_matches('/')).exists() {
        return Err(Error::Packaged(root.to_owned()));
    }
    let mut pieces = carried::driver().ok_or(Error::NoDriver)?;
    if !driver_only {
        pieces.extend(carried::service().map_err(Error::Program)?);
    }
    let tree = Tree::new(root)?;
    let done = tree.place(&pieces)?;
    for done in &done {
        say(out, done)?;
    }
    if driver_only || !tree.is_own() {
        return Ok(());
    }
    if !has_systemd() {
        let start = format!(
            "systemd does not run here: have {} started at boot, as root",
            carried::PROGRAM
        );
        return say(out, &start);
    }
    systemctl(&["daemon-reload"])?;
    if !is_running()? {
        systemctl(&["start", carried::UNIT])?;
        return say(out, &format!("started {}", carried::UNIT));
    }
    if done.iter().all(|done| matches!(done, Done::Unchanged(_))) {
        return say(out, &format!("{} is running", carried::UNIT));
    }
    let restart = format!(
        "{0} is still running as it was started: `systemctl restart {0}` has it run what is \
         installed now, and takes the accelerators from programs that use them",
        carried::UNIT
    );
    say(out, &restart)
}

/// Removes what was installed. If it is this machine's agent, stops it first. Reports what it does.
pub fn uninstall(root: &Path, out: &mut dyn Write) -> Result<(), Error> {
    let tree = Tree::new(root)?;
    let is_served = tree.is_own() && tree.has(Path::new(carried::PROGRAM))? && has_systemd();
    if is_served && is_running()? {
        systemctl(&["stop", carried::UNIT])?;
        say(out, &format!("stopped {}", carried::UNIT))?;
    }
    let done = tree.take_away()?;
    if done.is_empty() {
        say(out, &"nothing is installed")?;
    }
    for done in done {
        say(out, &done)?;
    }
    if is_served {
        systemctl(&["daemon-reload"])?;
    }
    if tree.is_own() {
        remove_socket(Path::new(OPENCL_SOCKET));
    }
    Ok(())
}

/// Removes a socket on which nobody listens any more, the link to it, and its folder if that is
/// empty then. A reboot would remove them in any case.
fn remove_socket(path: &Path) {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    let is_left = |error: io::Error| error.kind() == ErrorKind::ConnectionRefused;
    if is_socket && UnixStream::connect(path).is_err_and(is_left) && fs::remove_file(path).is_ok() {
        let link = crate::server::name_of_cuda(path);
        if link.is_symlink() {
            let _ = fs::remove_file(link);
        }
        let _ = fs::remove_file(crate::server::name_of_native(path));
        let folder = path.parent().unwrap_or(path);
        let _ = fs::remove_dir(folder);
    }
}

#[cfg(test)]
#[cfg(not(feature = "carry-driver"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_without_a_driver_says_so_and_places_nothing() {
        let root = tempfile::TempDir::new().unwrap();
        for driver_only in [true, false] {
            let mut said = Vec::new();
            let error = install(root.path(), driver_only, &mut said).unwrap_err();
            assert!(error.to_string().contains("carries no driver"), "{error}");
            assert!(said.is_empty());
        }
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
        uninstall(root.path(), &mut Vec::new()).unwrap();
    }

    #[test]
    fn nothing_is_installed_beside_the_package() {
        let root = tempfile::TempDir::new().unwrap();
        let mark = root.path().join(PACKAGED.trim_start_matches('/'));
        fs::create_dir_all(mark.parent().unwrap()).unwrap();
        fs::write(mark, "").unwrap();
        let error = install(root.path(), false, &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("gantry-guest"), "{error}");
    }
}
