//! Transfer of the archive with the saved state of accelerators' applications. It is a file; its non-zero parts are
//! sent in frames of their own, before the state, which contains the file's length.
//!
//! | bytes of a frame | what |
//! |---|---|
//! | 0-7 | where in the file |
//! | from 8 | what is there |

use std::{fs::File, io, os::unix::fs::FileExt};

use base::memory::Steps;
use devices::accel::saved::{data_after, image};

use super::{
    Error, Result,
    connection::Connection,
    frame::{Kind, protocol},
    progress::Progress,
};

/// Bytes examined at a time: the maximum contents of a frame.
pub const CHUNK: usize = 64 << 10;
/// Bytes of the offset that precedes them in a frame.
const HEAD: usize = 8;
/// Maximum size of a frame in bytes.
pub const FRAME: usize = HEAD + CHUNK;
/// Maximum length of an archive.
const LONGEST: u64 = 1 << 46;
/// Maximum number of bytes of host memory that an archive may take; the source is untrusted.
const MOST: u64 = 64 << 30;

/// Maximum size of an image of an object's contents: its parts are aligned to pages, and it has a list of them.
pub fn of_object(bytes: u64) -> u64 {
    bytes.saturating_add(bytes / 16).saturating_add(1 << 20)
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn host(error: io::Error) -> Error {
    Error::Machine(format!(
        "cannot keep what accelerators' applications have saved: {error}"
    ))
}

/// An archive that was sent.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    /// Its length in bytes.
    pub size: u64,
    /// Number of non-zero bytes that were sent.
    pub bytes: u64,
}

/// Sends the contents of an archive.
pub fn send(archive: &File, connection: &mut Connection, progress: &Progress) -> Result<Sent> {
    let mut bytes = 0;
    let size = archive.metadata().map_err(host)?.len();
    let mut frame = vec![0; FRAME];
    let mut at = 0;
    while at < size {
        // Holes are skipped without reading: they can be as long as the workers say.
        let next = data_after(archive, at, size);
        at = next - next % CHUNK as u64;
        if next >= size {
            break;
        }
        let count = CHUNK.min(usize::try_from(size - at).unwrap_or(CHUNK));
        let (head, part) = frame.split_at_mut(HEAD);
        let part = &mut part[..count];
        archive.read_exact_at(part, at).map_err(host)?;
        if part.iter().any(|byte| *byte != 0) {
            head.copy_from_slice(&at.to_le_bytes());
            connection.send(Kind::Archive, 0, &frame[..HEAD + count])?;
            bytes += count as u64;
            progress.update(|info| info.sent_bytes += count as u64);
        }
        at += count as u64;
    }
    Ok(Sent { size, bytes })
}

/// An archive that is being received.
#[derive(Debug)]
pub struct Incoming {
    file: Option<File>,
    /// Maximum number of bytes that it may take.
    most: u64,
    /// Upper bound of the bytes that the received part takes.
    taken: u64,
    /// Lowest offset at which the next frame may begin.
    next: u64,
    /// Accounts for the host memory that is taken.
    steps: Steps,
}

impl Default for Incoming {
    fn default() -> Self {
        Self {
            file: None,
            most: MOST,
            taken: 0,
            next: 0,
            steps: Steps::default(),
        }
    }
}

impl Incoming {
    /// Writes to this file, up to `most` bytes.
    pub fn to(file: File, most: u64) -> Self {
        Self {
            file: Some(file),
            most,
            ..Self::default()
        }
    }

    /// Writes the contents of a frame, which are untrusted.
    pub fn take(&mut self, contents: &[u8]) -> Result<()> {
        let short = || protocol("a frame of an archive ends too soon");
        let (at, bytes) = contents.split_first_chunk().ok_or_else(short)?;
        let at = u64::from_le_bytes(*at);
        let count = bytes.len() as u64;
        if at.checked_add(count).is_none_or(|end| end > LONGEST) {
            return Err(protocol("an archive is longer than there is memory"));
        }
        if at < self.next || !at.is_multiple_of(CHUNK as u64) {
            return Err(protocol("the frames of an archive are out of order"));
        }
        // However few bytes have come: even one byte takes a page or more.
        self.taken += CHUNK as u64;
        self.next = at + CHUNK as u64;
        if self.taken > self.most {
            return Err(protocol(format!(
                "an archive has more than the {} MiB that are taken",
                self.most >> 20
            )));
        }
        self.steps.take(CHUNK as u64, self.most).map_err(|spare| {
            host(io::Error::new(
                io::ErrorKind::OutOfMemory,
                spare.to_string(),
            ))
        })?;
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(image().map_err(host)?),
        };
        file.write_all_at(bytes, at).map_err(host)
    }

    /// Returns the complete file, with the length that the source states; `None` if there is no archive.
    pub fn finish(self, size: Option<u64>) -> Result<Option<File>> {
        let (file, size) = match (self.file, size) {
            (None, None) => return Ok(None),
            (Some(_), None) => return Err(protocol("an archive came that nothing is in")),
            (file, Some(size)) => (file.map_or_else(image, Ok).map_err(host)?, size),
        };
        let came = file.metadata().map_err(host)?.len();
        if size > LONGEST || came > size {
            return Err(protocol("an archive is longer than it is said to be"));
        }
        file.set_len(size).map_err(host)?;
        Ok(Some(file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(at: u64, bytes: &[u8]) -> Vec<u8> {
        [&at.to_le_bytes()[..], bytes].concat()
    }

    #[test]
    fn an_archive_that_is_not_one_is_refused() {
        let mut incoming = Incoming::default();
        assert!(incoming.take(&[0; 7]).is_err());
        assert!(incoming.take(&frame(u64::MAX, b"x")).is_err());
        assert!(incoming.take(&frame(LONGEST, b"x")).is_err());
        assert!(Incoming::default().finish(None).unwrap().is_none());
        assert!(Incoming::default().finish(Some(LONGEST + 1)).is_err());
        for size in [None, Some(3)] {
            let mut incoming = Incoming::default();
            incoming.take(&frame(0, b"four")).unwrap();
            assert!(incoming.finish(size).is_err(), "{size:?}");
        }
        let chunk = CHUNK as u64;
        let mut incoming = Incoming::default();
        assert!(incoming.take(&frame(4096, b"x")).is_err());
        incoming.take(&frame(chunk, b"x")).unwrap();
        for again in [0, chunk] {
            assert!(incoming.take(&frame(again, b"x")).is_err(), "{again}");
        }
    }

    #[test]
    fn a_byte_counts_as_much_as_it_may_take_of_the_hosts_memory() {
        let chunk = CHUNK as u64;
        let mut incoming = Incoming {
            taken: MOST - 2 * chunk,
            ..Incoming::default()
        };
        for at in [0, chunk] {
            incoming.take(&frame(at, b"x")).unwrap();
        }
        assert!(incoming.take(&frame(2 * chunk, b"x")).is_err());
    }

    #[test]
    fn contents_that_were_asked_for_may_be_as_many_as_that_and_no_more() {
        let chunk = CHUNK as u64;
        let mut incoming = Incoming {
            taken: MOST,
            ..Incoming::to(image().unwrap(), MOST + chunk)
        };
        incoming.take(&frame(0, b"x")).unwrap();
        assert!(incoming.take(&frame(chunk, b"x")).is_err());
    }
}
