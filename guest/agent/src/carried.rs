//! The files that the agent carries for the machine it serves, and where they are installed: all in
//! the places for local software that no package of the distribution owns.

use std::{fs, io};

use crate::place::{Piece, What};

/// The agent.
pub const PROGRAM: &str = "/usr/local/sbin/gantry-agent";
/// The agent's systemd unit.
pub const UNIT: &str = "gantry-agent.service";

const DRIVER: &str = "/usr/local/lib/libgantry_opencl.so";
/// Names the driver to OpenCL loaders (cl_khr_icd) by its path, so that they need not search for
/// it.
const ICD: &str = "/etc/OpenCL/vendors/gantry.icd";
/// The folder in which systemd looks for units of local software. A unit in /etc takes precedence.
const UNIT_FILE: &str = "/usr/local/lib/systemd/system/gantry-agent.service";
/// The link that `systemctl enable` creates.
const WANTED: &str = "/etc/systemd/system/multi-user.target.wants/gantry-agent.service";

/// The OpenCL driver, if this agent was built with it.
#[cfg(feature = "carry-driver")]
const LIBRARY: Option<&[u8]> = Some(include_bytes!(env!(
    "GANTRY_DRIVER",
    "GANTRY_DRIVER has to be the absolute path of the libgantry_opencl.so that the agent is to carry"
)));
#[cfg(not(feature = "carry-driver"))]
const LIBRARY: Option<&[u8]> = None;

/// Whether the agent carries the driver.
pub const CARRIES_DRIVER: bool = LIBRARY.is_some();

/// The driver, and the file that names it to loaders. None if the agent carries no driver.
pub fn driver() -> Option<Vec<Piece>> {
    let library = Piece {
        path: DRIVER.into(),
        what: What::File {
            bytes: LIBRARY?.into(),
            mode: 0o644,
        },
    };
    let icd = Piece {
        path: ICD.into(),
        what: What::File {
            bytes: format!("{DRIVER}\n").into_bytes().into(),
            mode: 0o644,
        },
    };
    // The library first, so that its name never exists without it.
    Some(vec![library, icd])
}

/// This program, and the unit that makes systemd start it at boot.
pub fn service() -> io::Result<Vec<Piece>> {
    let program = fs::read("/proc/self/exe")?;
    Ok(vec![
        Piece {
            path: PROGRAM.into(),
            what: What::File {
                bytes: program.into(),
                mode: 0o755,
            },
        },
        Piece {
            path: UNIT_FILE.into(),
            what: What::File {
                bytes: include_bytes!("../gantry-agent.service").into(),
                mode: 0o644,
            },
        },
        Piece {
            path: WANTED.into(),
            what: What::Link(UNIT_FILE.into()),
        },
    ])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_runs_the_program_where_it_is_placed() {
        let unit = include_str!("../gantry-agent.service");
        for line in ["ExecStart=", "ExecStartPre=-+"] {
            let command = format!("\n{line}{PROGRAM} ");
            assert!(unit.contains(&command), "{command}");
        }
        assert!(UNIT_FILE.ends_with(UNIT) && WANTED.ends_with(UNIT));
        // The reason for the link.
        assert!(unit.contains("WantedBy=multi-user.target"));
        let pieces = service().unwrap();
        let What::File { bytes, mode: 0o755 } = &pieces[0].what else {
            panic!("the program is none: {pieces:?}");
        };
        assert!(bytes.starts_with(b"\x7fELF"));
    }
}
