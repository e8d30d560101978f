//! The applications of a port in a snapshot: the contents of their slices, and the state that their
//! workers have saved.
//!
//! Everything is in one file, the archive, in pieces; their offsets and checksums are in the port's
//! state. Runs of zeroes are holes in the archive. A reader trusts neither: a piece that is not
//! within the file, or does not match its checksum, is an error.

use std::{
    fs::File,
    io,
    os::{fd::AsRawFd, unix::fs::FileExt},
    time::Duration,
};

use base::{Chain, Patience};
use remoting_proto::port::State;
use remoting_transport::control::{AFTER_DRAIN, Command, SOON};
use serde::{Deserialize, Serialize};

use super::{
    blocks::Run,
    left::{Application, Left},
    lend::Borrowed,
    moving::{Handle, NATIVE, quiesce},
    rounds::Copied,
    slices::Claim,
};

pub use remoting_transport::control::image;

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

/// A slice that is not free.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct SavedSlice {
    /// Its number.
    pub slice: u32,
    /// Number of its state.
    pub state: u32,
    /// What the guest has declared about its application.
    #[serde(flatten)]
    pub claim: Claim,
    /// Its contents; after rounds, what has changed since the last one.
    pub window: Piece,
    /// Blocks of its contents that have not changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<Run>,
    /// The state saved by its worker, if the slice is open; after rounds, what is new since the
    /// last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<Piece>,
    /// Number of rounds, including this one; 0 in a snapshot.
    #[serde(default, skip_serializing_if = "is_none")]
    pub rounds: u32,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "for serde")]
pub(super) fn is_none(count: &u32) -> bool {
    *count == 0
}

/// Why a port's applications cannot be saved.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// One or more applications cannot be saved; the reasons.
    #[error("{}", .0.join("; "))]
    Stays(Vec<String>),
    /// The operation was cancelled.
    #[error("it was cancelled")]
    Cancelled,
    /// The archive cannot be written.
    #[error("cannot write the applications' state")]
    Archive(#[from] io::Error),
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
    pub(super) fn piece(
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
    pub(super) fn is_in(&self, archive: &File) -> io::Result<()> {
        let end = self.at.checked_add(self.length);
        let size = archive.metadata()?.len();
        match self.length > LONGEST || end.is_none_or(|end| end > size) {
            true => Err(invalid("the archive of applications is truncated")),
            false => Ok(()),
        }
    }
}

/// Checks that no two pieces of these slices overlap in the archive: otherwise more memory could be
/// filled than data was received.
///
/// # Errors
/// Two pieces overlap.
pub fn check_pieces<'a>(slices: impl IntoIterator<Item = &'a SavedSlice>) -> io::Result<()> {
    let pieces = slices.into_iter();
    let pieces = pieces.flat_map(|one| [Some(one.window), one.image]);
    let mut pieces: Vec<_> = pieces
        .flatten()
        .map(|piece| (piece.at, piece.length))
        .collect();
    pieces.sort_unstable();
    let mut end = 0;
    for (at, length) in pieces {
        let next = at.checked_add(length).filter(|_| at >= end);
        end = next.ok_or_else(|| invalid("two applications have one part of the archive"))?;
    }
    Ok(())
}

fn invalid(text: &'static str) -> io::Error {
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

/// A port whose applications are being stopped and saved.
struct Port {
    /// ID of the port.
    id: String,
    handle: Handle,
    /// Its workers that have stopped.
    stopped: Vec<Borrowed>,
    /// Its workers that have not, kept so that they are not borrowed again.
    failed: Vec<Borrowed>,
}

/// Stopped applications of several ports, whose guest may run. They continue when this is dropped,
/// which does not block.
pub struct Standing {
    ports: Vec<Port>,
    /// What another host has already received.
    copied: Copied,
    drain: Duration,
    patience: Patience,
}

/// Stopped and saved applications. They continue when this is dropped.
pub struct Stopped(Standing);

impl Standing {
    /// Asks the workers of all applications of these ports to stop, and waits until all have. Each
    /// may first complete what its device is executing, for up to `drain`.
    ///
    /// # Errors
    /// All reasons why some do not stop. All continue.
    pub fn new(
        ports: Vec<(String, Handle)>,
        drain: Duration,
        patience: Patience,
    ) -> Result<Self, Error> {
        let port = |(id, handle)| Port {
            id,
            handle,
            stopped: Vec::new(),
            failed: Vec::new(),
        };
        let mut standing = Self {
            ports: ports.into_iter().map(port).collect(),
            copied: Copied::new(Vec::new()),
            drain,
            patience,
        };
        match standing.stop() {
            (_, reasons) if reasons.is_empty() => Ok(standing),
            (_, reasons) => Err(Error::Stays(reasons)),
        }
    }

    /// Sets the deadline for the following steps.
    #[must_use]
    pub fn wait(self, patience: Patience) -> Self {
        Self { patience, ..self }
    }

    /// Saves only what is new since these rounds.
    #[must_use]
    pub fn after(self, copied: Copied) -> Self {
        Self { copied, ..self }
    }

    /// Stops all that serve. Returns how many there were, and why some do not stop.
    fn stop(&mut self) -> (usize, Vec<String>) {
        let mut reasons = Vec::new();
        let mut asked = Vec::new();
        for (at, port) in self.ports.iter_mut().enumerate() {
            for mut borrowed in port.handle.desk.lend(None).unwrap_or_default() {
                let sent = quiesce(&mut borrowed, self.drain);
                asked.push((at, borrowed, sent));
            }
        }
        let count = asked.len();
        let patience = self.drain.saturating_add(AFTER_DRAIN);
        let patience = self.patience.at_most(patience);
        for (at, mut borrowed, sent) in asked {
            let port = &mut self.ports[at];
            match sent.and_then(|()| borrowed.answer(&patience)) {
                Ok(_) => port.stopped.push(borrowed),
                Err(why) => {
                    let named = named(&port.id, borrowed.slice as u32);
                    reasons.push(format!("{named}: {}", Chain(&why)));
                    port.failed.push(borrowed);
                }
            }
        }
        (count, reasons)
    }

    /// Saves all applications one by one while their guest is stopped, including those that started
    /// meanwhile. The ports' own states contain them until the result is dropped.
    ///
    /// # Errors
    /// Some cannot be saved. All continue.
    pub fn save(mut self, archive: &mut Archive) -> Result<Stopped, Error> {
        match self.save_all(archive) {
            Ok(()) => Ok(Stopped(self)),
            Err(Error::Archive(_)) if self.patience.is_cancelled() => Err(Error::Cancelled),
            Err(why) => Err(why),
        }
    }

    fn save_all(&mut self, archive: &mut Archive) -> Result<(), Error> {
        let mut reasons = Vec::new();
        // An application that is being opened may be open at the next look.
        loop {
            let (count, more) = self.stop();
            reasons.extend(more);
            if count == 0 {
                break;
            }
        }
        let mut all = Vec::new();
        for port in &mut self.ports {
            let mut saved = Vec::new();
            for borrowed in &mut port.stopped {
                if !reasons.is_empty() {
                    // Saving takes long, and the result would not be used.
                    return Err(Error::Stays(reasons));
                }
                let one = self.copied.rest(&port.id, borrowed, &self.patience);
                let (image, known) = match one {
                    Ok(one) => one,
                    Err(why) => {
                        let named = named(&port.id, borrowed.slice as u32);
                        reasons.push(format!("{named}: {}", Chain(&why)));
                        continue;
                    }
                };
                let slice = (&port.handle, borrowed.slice);
                saved.push(known.add(slice, &image, archive, &self.patience)?.0);
            }
            port.rest(&mut saved, (archive, &self.patience), &mut reasons)?;
            all.push(saved);
        }
        if !reasons.is_empty() {
            return Err(Error::Stays(reasons));
        }
        archive.file().sync_all()?;
        if self.patience.is_cancelled() {
            return Err(Error::Cancelled);
        }
        for (port, saved) in self.ports.iter().zip(all) {
            *port.handle.saved() = Some(saved);
        }
        Ok(())
    }
}

impl Port {
    /// Adds the slices that are in use without a worker that was stopped.
    fn rest(
        &self,
        saved: &mut Vec<SavedSlice>,
        (archive, patience): (&mut Archive, &Patience),
        reasons: &mut Vec<String>,
    ) -> Result<(), Error> {
        let slices = &self.handle.attach.slices;
        let mine = self.stopped.iter().chain(&self.failed);
        let mine: Vec<_> = mine.map(|borrowed| borrowed.slice).collect();
        for slice in 0..slices.count() as usize {
            let state = slices.get(slice);
            if state == State::Free || mine.contains(&slice) {
                continue;
            }
            if self.handle.is_native() {
                reasons.push(format!("{}: {NATIVE}", self.id));
                continue;
            }
            if state == State::Open {
                reasons.push(format!(
                    "{} is being moved or saved",
                    named(&self.id, slice as u32)
                ));
                continue;
            }
            let window = archive.add(&self.handle.window(slice)?, patience)?;
            saved.push(self.handle.described(slice, state, window));
        }
        Ok(())
    }
}

impl Stopped {
    /// The applications continue elsewhere, and some of their contents follow: the workers stay,
    /// and belong to the result alone.
    pub fn leave(mut self) -> Left {
        let mut asked = Vec::new();
        for port in &mut self.0.ports {
            for mut borrowed in port.stopped.drain(..) {
                let of = Application {
                    port: port.id.clone(),
                    slice: borrowed.slice as u32,
                };
                let sent = borrowed.send(&Command::Leave(), &[]);
                asked.push((of, borrowed, sent));
            }
        }
        // One that hangs costs the others nothing: replies that arrived meanwhile are read.
        let patience = Patience::within(SOON);
        let mut left = Left::default();
        for (of, borrowed, sent) in asked {
            left.add(of, borrowed.left_for_good(sent, &patience));
        }
        left
    }

    /// The applications continue elsewhere: their workers end.
    pub fn end(mut self) {
        for port in &mut self.0.ports {
            port.stopped.drain(..).for_each(Borrowed::leave);
        }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        for port in &self.0.ports {
            *port.handle.saved() = None;
        }
    }
}

impl Handle {
    /// Describes a slice in a state, with its contents.
    pub(super) fn described(&self, slice: usize, state: State, window: Piece) -> SavedSlice {
        SavedSlice {
            slice: slice as u32,
            state: state as u32,
            claim: self.attach.slices.claim(slice),
            window,
            kept: Vec::new(),
            image: None,
            rounds: 0,
        }
    }

    /// The file with a slice's contents.
    pub(super) fn window(&self, slice: usize) -> io::Result<File> {
        let file = self
            .attach
            .window
            .with_file(slice, |file| file.try_clone_to_owned());
        Ok(File::from(file.ok_or(io::ErrorKind::NotFound)??))
    }
}

pub(super) fn named(port: &str, slice: u32) -> String {
    format!("{port}: the application of slice {slice}")
}

#[cfg(test)]
mod tests {
    use base::Cancel;

    use super::*;

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
        let slice = |window, image| SavedSlice {
            slice: 0,
            state: 0,
            claim: Claim::default(),
            window,
            kept: Vec::new(),
            image,
            rounds: 0,
        };
        let first = slice(piece(4096, 5), Some(piece(8192, 4096)));
        // An empty piece overlaps with nothing.
        let empty = slice(piece(12288, 0), Some(piece(12288, 1)));
        check_pieces([&empty, &slice(piece(0, 4096), None), &first]).unwrap();
        for wrong in [
            first.clone(),
            slice(piece(0, 4097), None),
            slice(piece(12287, 1), None),
            slice(piece(0, u64::MAX), None),
            slice(piece(u64::MAX, 1), None),
        ] {
            assert!(check_pieces([&first, &wrong]).is_err(), "{wrong:?}");
        }
        let within = slice(piece(0, 8192), Some(piece(4096, 1)));
        assert!(check_pieces([&within]).is_err());
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
