//! Accelerators' applications that leave with their machine: what a snapshot has in a file of its own
//! stands behind the state here, without its holes.
//!
//! ```text
//!   state | size of the archive, stretches (place, length, bytes) ... | their length (8 bytes) | mark
//! ```
//!
//! The other host's pool takes them up before the machine runs there. Until it does, the workers here stand
//! still and can go on.

use std::{fs::File, io, os::unix::fs::FileExt};

use ::devices::accel::saved::{Archive, Stopped, data_after, image};

use super::{Machine, error::MachineError};

/// The last bytes of a state that applications stand behind. Others end with a new line.
const MARK: &[u8; 8] = b"GANTRYAP";
/// The most bytes of applications: they are sent with the state, in one piece.
const MOST: usize = 192 << 20;
/// Bytes that are looked at at a time.
const CHUNK: usize = 64 << 10;
/// Bytes before each stretch: where it is, and how long.
const HEAD: usize = 12;
/// The longest archive: no host has so much memory.
const LONGEST: u64 = 1 << 46;

/// What of an archive is not zero, up to so many bytes.
fn pack(archive: &File, most: usize) -> io::Result<Vec<u8>> {
    let size = archive.metadata()?.len();
    let mut packed = size.to_le_bytes().to_vec();
    let mut chunk = vec![0; CHUNK];
    let mut at = 0;
    while at < size {
        // Holes are not read: they can be as long as workers say.
        let next = data_after(archive, at, size);
        at = next - next % CHUNK as u64;
        if next >= size {
            break;
        }
        let part = &mut chunk[..CHUNK.min(usize::try_from(size - at).unwrap_or(CHUNK))];
        archive.read_exact_at(part, at)?;
        if part.iter().any(|byte| *byte != 0) {
            if packed.len() + HEAD + part.len() > most {
                return Err(io::Error::other(format!(
                    "accelerators' applications have more than {} MiB, and do not move yet: take a \
                     snapshot, or move the VM without them (accel=Detach)",
                    most >> 20
                )));
            }
            packed.extend(at.to_le_bytes());
            packed.extend((part.len() as u32).to_le_bytes());
            packed.extend_from_slice(part);
        }
        at += part.len() as u64;
    }
    Ok(packed)
}

fn damaged() -> io::Error {
    let text = "the applications that came with the machine are damaged";
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn take<'a>(from: &mut &'a [u8], count: usize) -> io::Result<&'a [u8]> {
    let (first, rest) = from.split_at_checked(count).ok_or_else(damaged)?;
    *from = rest;
    Ok(first)
}

/// The archive that was packed so, by whomever.
fn unpack(mut packed: &[u8]) -> io::Result<File> {
    let number = |bytes: &[u8]| {
        let mut number = [0; 8];
        number[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(number)
    };
    let size = number(take(&mut packed, 8)?);
    if size > LONGEST {
        return Err(damaged());
    }
    let archive = image()?;
    archive.set_len(size)?;
    while !packed.is_empty() {
        let at = number(take(&mut packed, 8)?);
        let length = number(take(&mut packed, 4)?);
        if at.checked_add(length).is_none_or(|end| end > size) {
            return Err(damaged());
        }
        archive.write_all_at(take(&mut packed, length as usize)?, at)?;
    }
    Ok(archive)
}

impl Machine {
    /// Stops and saves the applications of all accelerators: what stands behind the state.
    pub(super) fn pack_applications(&mut self) -> Result<Vec<u8>, MachineError> {
        let host = |source| MachineError::Host {
            action: "save accelerators' applications",
            source,
        };
        let archive = image().map_err(host)?;
        let mut writer = Archive::new(archive.try_clone().map_err(host)?);
        let stopped = self.devices.save_applications(&mut writer)?;
        let mut packed = pack(&archive, MOST).map_err(host)?;
        packed.extend((packed.len() as u64).to_le_bytes());
        packed.extend(MARK);
        self.departing = stopped;
        Ok(packed)
    }

    /// The machine does not leave: its applications go on.
    pub fn applications_stay(&mut self) {
        self.departing.clear();
    }

    /// The machine runs elsewhere, and so do its applications.
    pub fn applications_have_left(&mut self) {
        self.departing.drain(..).for_each(Stopped::end);
    }

    /// Takes the applications that stand behind a state, which comes back.
    pub(super) fn unpack_applications<'a>(
        &mut self,
        state: &'a [u8],
    ) -> Result<&'a [u8], MachineError> {
        let Some((state, packed)) = split(state) else {
            return Ok(state);
        };
        let archive = unpack(packed).map_err(|source| MachineError::Host {
            action: "take accelerators' applications over",
            source,
        })?;
        self.devices.set_archive(archive);
        Ok(state)
    }
}

/// The state, and the applications that stand behind it, if there are any.
fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let rest = bytes.strip_suffix(MARK)?;
    let (rest, length) = rest.split_last_chunk()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    rest.split_at_checked(rest.len().checked_sub(length)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed() -> Vec<u8> {
        let archive = image().unwrap();
        archive.set_len(1 << 30).unwrap();
        archive.write_all_at(b"one", 5 << 20).unwrap();
        archive.write_all_at(b"end", (1 << 30) - 3).unwrap();
        pack(&archive, MOST).unwrap()
    }

    #[test]
    fn applications_stand_behind_a_state_without_their_holes() {
        let packed = packed();
        assert!(packed.len() < 3 * (CHUNK + HEAD), "{}", packed.len());
        let length = (packed.len() as u64).to_le_bytes();
        let bytes = [b"state\n", &packed[..], &length, MARK].concat();
        let (state, found) = split(&bytes).unwrap();
        assert_eq!(state, b"state\n");
        let archive = unpack(found).unwrap();
        assert_eq!(archive.metadata().unwrap().len(), 1 << 30);
        for (at, text) in [(5 << 20, b"one"), ((1 << 30) - 3, b"end")] {
            let mut read = [0; 3];
            archive.read_exact_at(&mut read, at).unwrap();
            assert_eq!(&read, text);
        }
        assert!(split(b"state\n").is_none());
    }

    #[test]
    fn what_is_damaged_is_refused() {
        assert!(split(&[&u64::MAX.to_le_bytes()[..], MARK].concat()).is_none());
        assert!(split(MARK).is_none());
        let packed = packed();
        assert!(unpack(&packed[..4]).is_err());
        assert!(unpack(&packed[..packed.len() - 1]).is_err());
        assert!(unpack(&[&packed[..], b"more"].concat()).is_err());
        let mut wrong = packed.clone();
        wrong[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(unpack(&wrong).is_err());
        let mut wrong = packed;
        wrong[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(unpack(&wrong).is_err());
    }

    #[test]
    fn more_than_there_is_room_for_does_not_leave() {
        let archive = image().unwrap();
        archive.write_all_at(&[1; 4 * CHUNK], 0).unwrap();
        assert!(pack(&archive, 3 * CHUNK).is_err());
    }
}
