//! The measured programs, which may have been built on another machine.

use std::path::PathBuf;

use anyhow::{Result, ensure};

/// The programs, all in one directory.
#[derive(Clone, Debug)]
pub struct Programs {
    folder: PathBuf,
}

impl Programs {
    /// Finds the programs with these names, which `command` builds.
    ///
    /// # Errors
    /// One is missing.
    pub fn find(folder: PathBuf, names: &[&str], command: &str) -> Result<Self> {
        let programs = Self { folder };
        for name in names {
            let path = programs.path(name);
            ensure!(
                path.is_file(),
                "{} is missing: `{command}` builds it",
                path.display()
            );
        }
        Ok(programs)
    }

    /// Path of a program.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}
