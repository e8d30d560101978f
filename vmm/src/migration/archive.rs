//! What accelerators' applications have saved, on its way: a file, of which what is not zero is sent in
//! frames of their own, before the state that says how long it is.
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

/// Bytes that are looked at at a time: the most that a frame has.
pub const CHUNK: usize = 64 << 10;
/// Bytes before them in a frame.
const HEAD: usize = 8;
/// Most bytes of a frame.
pub const FRAME: usize = HEAD + CHUNK;
/// The longest archive.
const LONGEST: u64 = 1 << 46;
/// The most bytes that are taken from a source, which may be anybody's: of the host's memory.
const MOST: u64 = 64 << 30;

/// The most bytes that an image of an object's contents takes: parts of it are at multiples of pages, and are listed.
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
    /// How long it is.
    pub size: u64,
    /// Bytes of it that are not zero, and were sent.
    pub bytes: u64,
}

/// Sends what is in an archive.
pub fn send(archive: &File, connection: &mut Connection, progress: &Progress) -> Result<Sent> {
    let mut bytes = 0;
    let size = archive.metadata().map_err(host)?.len();
    let mut frame = vec![0; FRAME];
    let mut at = 0;
    while at < size {
        // Holes are not read: they can be as long as workers say.
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

/// An archive that arrives.
#[derive(Debug)]
pub struct Incoming {
    file: Option<File>,
    /// The most bytes that it may take.
    most: u64,
    /// Bytes that what has come takes at most.
    taken: u64,
    /// Where the next frame begins at the earliest.
    next: u64,
    /// The host's memory, as it is taken.
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
    /// One that goes to this file, and takes so many bytes at most.
    pub fn to(file: File, most: u64) -> Self {
        Self {
            file: Some(file),
            most,
            ..Self::default()
        }
    }

    /// Takes the contents of a frame, which may be anything.
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
        // However little has come: a byte takes a page, or more.
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

    /// All of it, as long as the source says that it is. None if there is none.
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
