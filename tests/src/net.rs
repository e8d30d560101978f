//! The host's end of a guest's network, in L1.

use std::process::Command;

use anyhow::{Context, Result, ensure};

/// L1's address on a tap.
pub const HOST: &str = "192.168.77.1";
/// The guest's address.
pub const GUEST: &str = "192.168.77.2";

/// Runs a command in L1 that must succeed.
pub fn sh(command: &str) -> Result<String> {
    let output = Command::new("/bin/sh")
        .args(["-c", command])
        .output()
        .with_context(|| format!("cannot run {command:?}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} failed: {text}");
    Ok(text)
}

/// Whether a network interface of that name exists.
pub fn exists(interface: &str) -> bool {
    std::path::Path::new("/sys/class/net")
        .join(interface)
        .exists()
}
