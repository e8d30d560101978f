//! `gantry top`: watches the usage of a shared accelerator, by running `gantry-top`.

use std::{
    env,
    ffi::OsString,
    io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use clap::Args;

/// The program is separate from this one, because a VMM process does not need terminal code.
const PROGRAM: &str = "gantry-top";

/// Watch the usage of a shared accelerator (gantry-top, with all of its options).
#[derive(Args, Clone, Debug)]
#[command(disable_help_flag = true)]
pub struct Top {
    /// Options of gantry-top, such as --socket /run/gantry-arbiter/socket; --help shows all of
    /// them.
    #[arg(
        value_name = "OPTION",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub options: Vec<OsString>,
}

/// The program could not be started.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot start {PROGRAM}: install it beside gantry or in a folder of PATH (Cargo builds it beside \
     gantry: cargo build --release)"
)]
pub struct TopError(#[source] io::Error);

impl Top {
    /// Replaces this process with the program. Returns only on failure.
    pub fn exec(&self) -> TopError {
        let own = env::current_exe().ok();
        TopError(
            Command::new(program(own.as_deref()))
                .args(&self.options)
                .exec(),
        )
    }
}

/// The program in this one's directory, if it exists; otherwise the first one in PATH.
fn program(own: Option<&Path>) -> PathBuf {
    own.and_then(Path::parent)
        .map(|folder| folder.join(PROGRAM))
        .filter(|path| path.is_file())
        .unwrap_or_else(|| PROGRAM.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_beside_this_one_is_preferred_to_others() {
        let folder = env::temp_dir().join(format!("gantry-top-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let own = folder.join("gantry");
        assert_eq!(program(Some(&own)), Path::new(PROGRAM));
        assert_eq!(program(None), Path::new(PROGRAM));
        std::fs::write(folder.join(PROGRAM), "").unwrap();
        assert_eq!(program(Some(&own)), folder.join(PROGRAM));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
