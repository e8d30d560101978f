//! Transfers contents of a slice of which another host has an earlier copy: only blocks that have
//! changed.
//!
//! The sender keeps a hash of each block as it was sent. The hashes are keyed, so that no guest can
//! find two contents with the same hash. Blocks that are not sent are listed, because both zeroes
//! and unchanged blocks are holes in an archive.

use std::{
    fs::File,
    hash::{BuildHasher, RandomState},
    io,
    os::unix::fs::FileExt,
};

use base::Patience;

use super::archive::{Archive, Piece, data_after, invalid};

/// Size of a block in bytes.
const BLOCK: usize = 64 << 10;

/// Maximum number of runs of unchanged blocks: the guest determines how many there are, and all of
/// them must fit one frame of a migration.
const MOST_RUNS: usize = 4 << 10;

/// Consecutive blocks: the number of the first, and the count.
pub type Run = (u64, u64);

/// The contents that were sent, as the hash of each block; 0 for a block of zeroes.
#[derive(Debug, Default)]
pub struct Sent {
    key: RandomState,
    hashes: Vec<u64>,
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

impl Sent {
    fn hash(&self, block: &[u8]) -> u64 {
        match is_zero(block) {
            true => 0,
            false => self.key.hash_one(block) | 1,
        }
    }

    /// Adds the blocks of a file that have changed since the last call to an archive; the file's
    /// length must stay the same. The returned runs are the unchanged blocks; initially all blocks
    /// count as zeroes.
    ///
    /// # Errors
    /// One of the two files fails, or the deadline has passed.
    pub fn add_changed(
        &mut self,
        from: &File,
        archive: &mut Archive,
        patience: &Patience,
    ) -> io::Result<(Piece, Vec<Run>)> {
        let length = from.metadata()?.len();
        self.hashes
            .resize(length.div_ceil(BLOCK as u64) as usize, 0);
        let mut kept = Vec::new();
        let piece = archive.piece(length, |to, at| {
            let mut sum = crc32fast::Hasher::new();
            let mut bytes = vec![0; BLOCK];
            let mut data = 0;
            for number in 0..self.hashes.len() {
                let start = number as u64 * BLOCK as u64;
                let end = length.min(start + BLOCK as u64);
                let block = &mut bytes[..(end - start) as usize];
                if data < end {
                    data = data_after(from, start.max(data), length);
                }
                let hash = match data < end {
                    true => {
                        patience.check()?;
                        from.read_exact_at(block, start)?;
                        self.hash(block)
                    }
                    false => 0,
                };
                if self.hashes[number] == hash && keep(&mut kept, number as u64) {
                    continue;
                }
                self.hashes[number] = hash;
                if hash != 0 {
                    sum.update(&start.to_le_bytes());
                    sum.update(block);
                    to.write_all_at(block, at + start)?;
                }
            }
            sum.update(&length.to_le_bytes());
            Ok(sum.finalize())
        })?;
        Ok((piece, kept))
    }
}

/// Records an unchanged block; false if it would begin a run too many.
fn keep(kept: &mut Vec<Run>, number: u64) -> bool {
    let runs = kept.len();
    match kept.last_mut() {
        Some((first, count)) if *first + *count == number => *count += 1,
        _ if runs < MOST_RUNS => kept.push((number, 1)),
        _ => return false,
    }
    true
}

impl Piece {
    /// Updates an earlier copy of the file: all blocks but the unchanged ones (`kept`) are in the
    /// piece.
    ///
    /// # Errors
    /// It is not within the archive, or does not match its checksum.
    pub fn read_changed(&self, archive: &File, to: &File, kept: &[Run]) -> io::Result<()> {
        self.is_in(archive)?;
        let blocks = self.length.div_ceil(BLOCK as u64);
        let mut sum = crc32fast::Hasher::new();
        let mut bytes = [vec![0; BLOCK], vec![0; BLOCK]];
        let mut next = 0;
        for &(first, count) in kept.iter().chain([&(blocks, 0)]) {
            let end = first.checked_add(count).filter(|end| *end <= blocks);
            let Some(end) = end.filter(|_| first >= next) else {
                return Err(invalid(
                    "the blocks that an application keeps are no blocks",
                ));
            };
            self.read_blocks((archive, to), next..first, &mut sum, &mut bytes)?;
            next = end;
        }
        sum.update(&self.length.to_le_bytes());
        match sum.finalize() == self.crc32 {
            true => Ok(()),
            false => Err(invalid(
                "what came of an application is damaged: the checksum does not match",
            )),
        }
    }

    fn read_blocks(
        &self,
        (archive, to): (&File, &File),
        numbers: std::ops::Range<u64>,
        sum: &mut crc32fast::Hasher,
        [new, old]: &mut [Vec<u8>; 2],
    ) -> io::Result<()> {
        // Offsets of the next data that is not in a hole.
        let (mut data, mut there) = (0, 0);
        for number in numbers {
            let start = number * BLOCK as u64;
            let end = self.length.min(start + BLOCK as u64);
            let count = (end - start) as usize;
            let (new, old) = (&mut new[..count], &mut old[..count]);
            if data < end {
                let from = self.at + start.max(data);
                data = data_after(archive, from, self.at + self.length) - self.at;
            }
            if data < end {
                archive.read_exact_at(new, self.at + start)?;
                if !is_zero(new) {
                    sum.update(&start.to_le_bytes());
                    sum.update(new);
                    to.write_all_at(new, start)?;
                    continue;
                }
            }
            // Does not punch holes: a driver may have the existing pages pinned.
            if there < end {
                there = data_after(to, start.max(there), self.length);
            }
            if there < end {
                to.read_exact_at(old, start)?;
                if !is_zero(old) {
                    old.fill(0);
                    to.write_all_at(old, start)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn file(length: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(length).unwrap();
        file
    }

    fn bytes(file: &File) -> Vec<u8> {
        let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    fn added(sent: &mut Sent, from: &File) -> (Piece, Vec<Run>, File) {
        let mut archive = Archive::new(file(0));
        let patience = Patience::within(Duration::from_secs(3600));
        let (piece, kept) = sent.add_changed(from, &mut archive, &patience).unwrap();
        (piece, kept, archive.file().try_clone().unwrap())
    }

    #[test]
    fn what_has_changed_is_added_and_what_has_become_zero_is_zero_there() {
        let length = 20 * BLOCK as u64 + 5;
        let (here, there) = (file(length), file(length));
        let mut sent = Sent::default();
        let write = |text: &[u8], block: u64| {
            here.write_all_at(text, block * BLOCK as u64 + 7).unwrap();
        };
        write(b"one", 3);
        write(b"two", 4);
        here.write_all_at(b"end", length - 3).unwrap();
        let (piece, kept, archive) = added(&mut sent, &here);
        assert_eq!(kept, [(0, 3), (5, 15)]);
        piece.read_changed(&archive, &there, &kept).unwrap();
        assert_eq!(bytes(&here), bytes(&there));
        write(&[0; 3], 3);
        write(b"new", 9);
        let (piece, kept, archive) = added(&mut sent, &here);
        assert_eq!(kept, [(0, 3), (4, 5), (10, 11)]);
        piece.read_changed(&archive, &there, &kept).unwrap();
        assert_eq!(bytes(&here), bytes(&there));
        let (piece, kept, archive) = added(&mut sent, &here);
        assert_eq!(kept, [(0, 21)]);
        piece.read_changed(&archive, &there, &kept).unwrap();
        assert_eq!(bytes(&here), bytes(&there));
    }

    #[test]
    fn so_many_runs_are_kept_and_what_would_be_more_is_sent() {
        let mut kept = Vec::new();
        for number in 0..MOST_RUNS as u64 {
            assert!(keep(&mut kept, 2 * number));
        }
        assert!(!keep(&mut kept, 2 * MOST_RUNS as u64));
        let last = 2 * (MOST_RUNS as u64 - 1);
        assert!(keep(&mut kept, last + 1), "it follows the last one");
        assert_eq!((kept.len(), kept.last()), (MOST_RUNS, Some(&(last, 2))));
    }

    #[test]
    fn blocks_that_are_none_and_damaged_pieces_are_refused() {
        let length = 4 * BLOCK as u64;
        let here = file(length);
        here.write_all_at(b"one", 5).unwrap();
        let (piece, kept, archive) = added(&mut Sent::default(), &here);
        assert_eq!(kept, [(1, 3)]);
        for wrong in [
            vec![(1, 4)],
            vec![(5, 0)],
            vec![(u64::MAX, 2)],
            vec![(2, 1), (1, 1)],
            // Blocks that are not kept must be in the piece.
            vec![(0, 4)],
        ] {
            let read = piece.read_changed(&archive, &file(length), &wrong);
            assert!(read.is_err(), "{wrong:?}");
        }
        let short = Piece {
            length: u64::MAX,
            ..piece
        };
        assert!(short.read_changed(&archive, &file(length), &kept).is_err());
        archive.write_all_at(b"x", 3).unwrap();
        assert!(piece.read_changed(&archive, &file(length), &kept).is_err());
    }
}
