//! The versioned and checksummed state file.
//!
//! The file consists of two lines of JSON: a header and the state. Damaged, truncated, foreign and
//! too new files are told apart before any part of the state is interpreted.

use std::{io, path::Path};

use base::regular_file::{self, Links};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Identifies the format.
const FORMAT: &str = "gantry-state";

/// Version of everything that a state contains. It is incremented with each incompatible change.
/// Version 4 contains the state of a guest's own VMs; a version 3 state has none. Version 5 contains
/// the time at which it was saved, and the place of the guest's generation ID. Version 6 contains
/// what firmware has found: a host bridge, devices below 4 GiB, a clock.
pub const VERSION: u32 = 6;

/// The version of states without that, so that older programs read them.
pub const WITHOUT_FIRMWARE: u32 = 5;

/// The oldest version that can be read.
pub const OLDEST: u32 = 3;

/// Maximum size in bytes. Larger states are rejected: 255 vCPUs and 32 devices in each of 16
/// segments need far less.
const MAX_BYTES: u64 = 256 << 20;

#[derive(Serialize, Deserialize)]
struct Header {
    format: String,
    version: u32,
    gantry: String,
    bytes: usize,
    crc32: u32,
}

/// A state could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum StateFileError {
    /// An I/O error of the file.
    #[error("cannot access the file")]
    Io(#[from] io::Error),
    /// Not a state file of Gantry.
    #[error("it is no state of Gantry: its first line is not the header that it should be")]
    Foreign,
    /// A state of an unsupported version.
    #[error(
        "it has format version {found} (Gantry {gantry}), this Gantry reads {OLDEST} to {VERSION}: \
         restore it with the Gantry that wrote it, or boot the VM anew"
    )]
    Version {
        /// The version in the file.
        found: u32,
        /// The Gantry version that wrote it.
        gantry: String,
    },
    /// The contents differ from what was written.
    #[error("it is damaged or truncated: the checksum does not match")]
    Damaged,
    /// The state does not have the expected form.
    #[error("its contents do not parse")]
    Contents(#[from] serde_json::Error),
}

/// Writes `state`, which needs a reader of this version, to a new file; the file is durable when
/// this returns.
pub fn write(path: &Path, state: &impl Serialize, version: u32) -> Result<(), StateFileError> {
    // Registers are as secret as memory.
    let file = super::memory_file::create_private(path)?;
    io::Write::write_all(&mut &file, &encode(state, version)?)?;
    file.sync_all()?;
    Ok(())
}

/// Reads a state from a file.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<T, StateFileError> {
    decode(&regular_file::read(path, Links::Refuse, MAX_BYTES)?)
}

/// Encodes the contents of a state file that needs a reader of this version.
pub fn encode(state: &impl Serialize, version: u32) -> Result<Vec<u8>, StateFileError> {
    let body = serde_json::to_vec(state)?;
    let header = Header {
        format: FORMAT.to_owned(),
        version,
        gantry: env!("CARGO_PKG_VERSION").to_owned(),
        bytes: body.len(),
        crc32: crc32fast::hash(&body),
    };
    let mut bytes = serde_json::to_vec(&header)?;
    bytes.push(b'\n');
    bytes.extend_from_slice(&body);
    bytes.push(b'\n');
    Ok(bytes)
}

/// Decodes the state from the untrusted contents of a state file.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, StateFileError> {
    let end = bytes
        .iter()
        .position(|&byte| byte == b'\n')
        .ok_or(StateFileError::Foreign)?;
    let (first, rest) = bytes.split_at(end);
    let header: Header = serde_json::from_slice(first).map_err(|_| StateFileError::Foreign)?;
    if header.format != FORMAT {
        return Err(StateFileError::Foreign);
    }
    if !(OLDEST..=VERSION).contains(&header.version) {
        return Err(StateFileError::Version {
            found: header.version,
            gantry: header.gantry,
        });
    }
    let body = rest.get(1..).and_then(|rest| rest.get(..header.bytes));
    let body = body.ok_or(StateFileError::Damaged)?;
    if crc32fast::hash(body) != header.crc32 {
        return Err(StateFileError::Damaged);
    }
    Ok(serde_json::from_slice(body)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_comes_back_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        write(&path, &vec![1_u64, 2, 3], VERSION).unwrap();
        assert_eq!(read::<Vec<u64>>(&path).unwrap(), [1, 2, 3]);
    }

    #[test]
    fn what_is_no_file_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a terminated string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        let error = read::<serde_json::Value>(&path).unwrap_err();
        assert!(matches!(error, StateFileError::Io(_)), "{error}");
    }

    #[test]
    fn any_flipped_bit_or_cut_is_noticed() {
        let bytes = encode(&vec![1_u64, 2, 3], VERSION).unwrap();
        for at in 0..bytes.len() - 1 {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            if let Ok(state) = decode::<Vec<u64>>(&damaged) {
                // The header names the program that wrote it, for humans only.
                assert_eq!(state, [1, 2, 3], "byte {at}");
            }
            assert!(decode::<Vec<u64>>(&bytes[..at]).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn another_version_is_named() {
        let text = String::from_utf8(encode(&0, VERSION).unwrap()).unwrap();
        let own = format!("\"version\":{VERSION}");
        assert!(text.contains(&own), "{text}");
        for other in [OLDEST - 1, VERSION + 1] {
            let other_text = text.replace(&own, &format!("\"version\":{other}"));
            let error = decode::<u64>(other_text.as_bytes()).unwrap_err();
            let version = format!("version {other} ");
            assert!(error.to_string().contains(&version), "{error}");
        }
        let older = text.replace(&own, &format!("\"version\":{OLDEST}"));
        assert_eq!(decode::<u64>(older.as_bytes()).unwrap(), 0);
    }
}
