//! The oldest GNU C library that programs and libraries work with.

use std::{path::Path, process::Command};

use anyhow::{Context, Result};
use gantry_tests::rig::packages::output;

/// The newest version of the C library of which a file uses a symbol, as `2.17` = (2, 17).
///
/// # Errors
/// The file is not a program or library.
pub fn needed(file: &Path) -> Result<(u32, u32)> {
    let symbols = output(Command::new("objdump").arg("-T").arg(file))?;
    symbols
        .lines()
        .filter(|line| line.contains("*UND*"))
        .filter_map(version)
        .max()
        .with_context(|| format!("{} uses no symbol of the C library", file.display()))
}

/// The version of the C library in a line of a symbol table.
fn version(line: &str) -> Option<(u32, u32)> {
    let (_, rest) = line.split_once("GLIBC_")?;
    let text = rest.split([')', ' ']).next()?;
    let mut numbers = text.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_is_that_of_the_symbols_that_a_file_uses() {
        let line = "0000000000000000      DF *UND*  0000000000000000 (GLIBC_2.2.5) memcpy";
        assert_eq!(version(line), Some((2, 2)));
        assert_eq!(version("0 DF *UND*  0  GLIBC_2.34  main"), Some((2, 34)));
        assert_eq!(version("0 DF *UND*  0 (GCC_3.0) _Unwind_Resume"), None);
        // The oldest one for which Rust builds.
        let own = std::env::current_exe().unwrap();
        assert!(needed(&own).unwrap() >= (2, 17));
    }
}
