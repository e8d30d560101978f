//! The applications of a machine in a file: the archive, in pieces, whose offsets and checksums are elsewhere.
//!
//! Runs of zeroes are holes in the archive. A reader trusts neither: a piece that is not within the file, or does not
//! match its checksum, is an error.

use std::{
    fs::File,
    io,
    os::{fd::AsRawFd, unix::fs::FileExt},
};

use base::Patience;
use serde::{Deserialize, Serialize};

/// Alignment of pieces in the archive.
const ALIGNMENT: u64 = 4096;
/// Number of bytes examined at a time, including holes.
const CHUNK: usize = 64 << 10;
/// Maximum size of the state of one application: more than the memory of any host.
const LONGEST: u64 = 1 << 46;

/// A part of the archive.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Piece {
    /// Offset of the first byte.
    pub at: u64,
    /// Length in bytes.
    pub length: u64,
    /// Checksum of the data that is not zero, and its offsets.
    pub crc32: u32,
}

/// Writes an archive.
#[derive(Debug)]
pub struct Archive {
    file: File,
    end: u64,
}

impl Archive {
    /// Writes to an empty file.
    pub fn new(file: File) -> Self {
        Self { file, end: 0 }
    }

    /// The file that it is written to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Adds all of a file, until the deadline of `patience`.
    ///
    /// # Errors
    /// One of the two files fails, or the deadline has passed.
    pub fn add(&mut self, from: &File, patience: &Patience) -> io::Result<Piece> {
        let length = from.metadata()?.len();
        self.piece(length, |to, at| {
            copy((from, 0), (to, at), length, || patience.check())
        })
    }

    /// Adds a piece of `length` bytes. `write` writes it to the file at an offset, and returns its
    /// checksum.
    pub(crate) fn piece(
        &mut self,
        length: u64,
        write: impl FnOnce(&File, u64) -> io::Result<u32>,
    ) -> io::Result<Piece> {
        // The worker determines the length of its image.
        if length > LONGEST {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let at = self.end;
        let written = write(&self.file, at);
        if written.is_err() {
            // The next piece needs holes there.
            self.file.set_len(at)?;
        }
        let crc32 = written?;
        self.end = at
            .checked_add(length)
            .and_then(|end| end.checked_next_multiple_of(ALIGNMENT))
            .ok_or(io::ErrorKind::FileTooLarge)?;
        self.file.set_len(self.end)?;
        Ok(Piece { at, length, crc32 })
    }
}

impl Piece {
    /// Copies the piece to the beginning of a file, which must contain zeroes.
    ///
    /// # Errors
    /// It is not within the archive, or does not match its checksum.
    pub fn read(&self, archive: &File, to: &File) -> io::Result<()> {
        self.is_in(archive)?;
        if copy((archive, self.at), (to, 0), self.length, || Ok(()))? != self.crc32 {
            return Err(invalid(
                "the archive of applications is damaged: the checksum does not match",
            ));
        }
        Ok(())
    }

    /// Checks that the piece is within the archive.
    pub(crate) fn is_in(&self, archive: &File) -> io::Result<()> {
        let end = self.at.checked_add(self.length);
        let size = archive.metadata()?.len();
        match self.length > LONGEST || end.is_none_or(|end| end > size) {
            true => Err(invalid("the archive of applications is truncated")),
            false => Ok(()),
        }
    }
}

/// Checks that no two pieces have a part of the archive in common: otherwise more memory could be filled than data was
/// received.
///
/// # Errors
/// Two pieces overlap.
pub fn check_pieces(pieces: impl IntoIterator<Item = Piece>) -> io::Result<()> {
    let pieces = pieces.into_iter().map(|piece| (piece.at, piece.length));
    let mut pieces: Vec<_> = pieces.collect();
    pieces.sort_unstable();
    let mut end = 0;
    for (at, length) in pieces {
        let next = at.checked_add(length).filter(|_| at >= end);
        end = next.ok_or_else(|| invalid("two applications have one part of the archive"))?;
    }
    Ok(())
}

pub(crate) fn invalid(text: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// Offset of the next byte that is not in a hole; `end` if there is none before it.
pub fn data_after(file: &File, offset: u64, end: u64) -> u64 {
    let Ok(from) = libc::off_t::try_from(offset) else {
        return offset;
    };
    // SAFETY: a plain call; the file position that it sets is not used.
    let found = unsafe { libc::lseek(file.as_raw_fd(), from, libc::SEEK_DATA) };
    match u64::try_from(found) {
        Ok(found) => found.min(end),
        // Nothing follows.
        Err(_) if io::Error::last_os_error().raw_os_error() == Some(libc::ENXIO) => end,
        // This file does not support holes.
        Err(_) => offset,
    }
}

/// Copies the data that is not zero, calling `look` before each part to check whether to continue.
/// Returns the checksum.
fn copy(
    from: (&File, u64),
    to: (&File, u64),
    length: u64,
    look: impl Fn() -> io::Result<()>,
) -> io::Result<u32> {
    let mut hash = crc32fast::Hasher::new();
    let mut chunk = vec![0; CHUNK];
    let mut done = 0;
    while done < length {
        // Whole chunks, so that the checksum does not depend on where the holes are.
        let next = data_after(from.0, from.1 + done, from.1 + length) - from.1;
        done = next - next % CHUNK as u64;
        if done >= length || next >= length {
            break;
        }
        look()?;
        let part = &mut chunk[..CHUNK.min(usize::try_from(length - done).unwrap_or(CHUNK))];
        from.0.read_exact_at(part, from.1 + done)?;
        if part.iter().any(|byte| *byte != 0) {
            hash.update(&done.to_le_bytes());
            hash.update(part);
            to.0.write_all_at(part, to.1 + done)?;
        }
        done += part.len() as u64;
    }
    hash.update(&length.to_le_bytes());
    Ok(hash.finalize())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use base::Cancel;

    use super::{super::blocks::Sent, *};

    /// Two pieces, and one of the blocks that have changed with the runs of those that have not.
    const WRITTEN: &str = r#"[{"at":0,"length":5000,"crc32":3016410965},{"at":8192,"length":200000,"crc32":1061838821}]"#;
    const CHANGED: &str = r#"[{"at":208896,"length":200000,"crc32":1061838821},[[0,1],[2,2]]]"#;

    fn file(length: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(length).unwrap();
        file
    }

    fn ever() -> Patience {
        Patience::within(Duration::from_secs(3600))
    }

    #[test]
    fn a_file_is_not_copied_on_when_somebody_gives_it_up_or_the_time_is_over() {
        let one = file(1 << 20);
        one.write_all_at(b"one", 1 << 19).unwrap();
        let cancel = Cancel::default();
        cancel.cancel();
        let cancelled = Patience::new(Duration::from_secs(3600), cancel);
        let over = Patience::within(Duration::ZERO);
        for (patience, kind) in [
            (cancelled, io::ErrorKind::ConnectionAborted),
            (over, io::ErrorKind::TimedOut),
        ] {
            let mut archive = Archive::new(file(0));
            let stopped = archive.add(&one, &patience).unwrap_err();
            assert_eq!(stopped.kind(), kind);
        }
    }

    #[test]
    fn what_is_in_an_archive_is_read_again_and_holes_stay_holes() {
        let mut archive = Archive::new(file(0));
        let one = file(1 << 30);
        one.write_all_at(b"one", (1 << 29) + 5).unwrap();
        one.write_all_at(b"end", (1 << 30) - 3).unwrap();
        let other = file(0);
        other.write_all_at(b"other", 0).unwrap();
        let pieces = [&one, &other].map(|file| archive.add(file, &ever()).unwrap());
        let read = file(1 << 30);
        pieces[0].read(archive.file(), &read).unwrap();
        let mut bytes = [0; 3];
        read.read_exact_at(&mut bytes, (1 << 29) + 5).unwrap();
        assert_eq!(&bytes, b"one");
        read.read_exact_at(&mut bytes, (1 << 30) - 3).unwrap();
        assert_eq!(&bytes, b"end");
        let read = file(5);
        pieces[1].read(archive.file(), &read).unwrap();
        let mut bytes = [0; 5];
        read.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"other");
        let blocks = std::os::unix::fs::MetadataExt::blocks(&archive.file().metadata().unwrap());
        assert!(blocks < 1 << 12, "{blocks}");
    }

    #[test]
    fn pieces_that_have_bytes_in_common_are_refused() {
        let piece = |at, length| Piece {
            at,
            length,
            crc32: 0,
        };
        let first = [piece(4096, 5), piece(8192, 4096)];
        // An empty piece overlaps with nothing.
        let good = [piece(12288, 0), piece(12288, 1), piece(0, 4096)];
        check_pieces(good.into_iter().chain(first)).unwrap();
        for wrong in [
            piece(4096, 5),
            piece(0, 4097),
            piece(12287, 1),
            piece(0, u64::MAX),
            piece(u64::MAX, 1),
        ] {
            assert!(
                check_pieces(first.into_iter().chain([wrong])).is_err(),
                "{wrong:?}"
            );
        }
    }

    #[test]
    fn an_archive_is_what_earlier_versions_have_written() {
        let one = file(200_000);
        one.write_all_at(b"one", 70_000).unwrap();
        let mut archive = Archive::new(file(0));
        let empty = archive.add(&file(5000), &ever()).unwrap();
        let piece = archive.add(&one, &ever()).unwrap();
        let written = serde_json::to_string(&[empty, piece]).unwrap();
        assert_eq!(written, WRITTEN);
        let mut sent = Sent::default();
        let (piece, kept) = sent.add_changed(&one, &mut archive, &ever()).unwrap();
        let changed = serde_json::to_string(&(piece, kept)).unwrap();
        assert_eq!(changed, CHANGED);
    }

    #[test]
    fn a_file_that_ends_too_early_leaves_nothing_in_the_way_of_the_next_one() {
        let mut archive = Archive::new(file(0));
        let cut = archive.piece(1 << 20, |to, at| {
            to.write_all_at(b"its beginning", at)?;
            Err(io::ErrorKind::UnexpectedEof.into())
        });
        cut.unwrap_err();
        let next = file(1 << 20);
        next.write_all_at(b"end", (1 << 20) - 3).unwrap();
        let piece = archive.add(&next, &ever()).unwrap();
        piece.read(archive.file(), &file(1 << 20)).unwrap();
    }

    #[test]
    fn a_damaged_archive_and_pieces_that_are_not_in_it_are_refused() {
        let mut archive = Archive::new(file(0));
        let one = file(200 << 10);
        one.write_all_at(b"one", 100 << 10).unwrap();
        let piece = archive.add(&one, &ever()).unwrap();
        for wrong in [
            Piece { at: 4096, ..piece },
            Piece {
                at: u64::MAX,
                ..piece
            },
            Piece {
                length: u64::MAX,
                ..piece
            },
            Piece {
                length: piece.length - 1,
                ..piece
            },
            Piece {
                crc32: !piece.crc32,
                ..piece
            },
        ] {
            assert!(
                wrong.read(archive.file(), &file(200 << 10)).is_err(),
                "{wrong:?}"
            );
        }
        archive.file().write_all_at(b"x", 3).unwrap();
        assert!(piece.read(archive.file(), &file(200 << 10)).is_err());
    }
}
