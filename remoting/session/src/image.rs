//! An image: the file that holds an application's saved state.
//!
//! | from | what |
//! |---|---|
//! | 0 | the header: what wrote it, where the state is |
//! | 4 KiB | contents of memory objects, each from a multiple of 4 KiB on |
//! | behind the last of them | the state, as the wire codec writes it |
//!
//! The reader trusts nothing in it: it comes from another process, and may come from another host. It is read with
//! `pread`, so that a file that shrinks meanwhile causes an error and not a signal.

use std::{fs::File, io, os::unix::fs::FileExt};

use base::memory::{self, Spare, Steps};
use remoting_proto::wire::{
    Api, Malformed, Wire,
    codec::{Reader, named, with},
};
use remoting_transport::endpoint::Gone;

pub use remoting_transport::control::image as create;

/// The first bytes of an image.
const MAGIC: [u8; 8] = *b"GANTRYWS";
/// Size of the header in bytes.
const HEADER: usize = 40;
/// Alignment of contents.
const ALIGNMENT: u64 = 4096;
/// Maximum size of the state in bytes: mainly sources and binaries of all programs.
const LONGEST: u64 = 1 << 30;

/// Why an application's state cannot be saved or restored. Each variant names the obstacle.
#[derive(Debug, thiserror::Error)]
pub enum Immovable {
    /// The backend of this API does not support it.
    #[error("the state of applications that use {0} cannot be moved yet")]
    Api(&'static str),
    /// The application has something that cannot be restored.
    #[error("{0}")]
    Has(String),
    /// The image was not written by this build.
    #[error("the state was saved by another build: move applications between equal versions")]
    Version,
    /// The image's bytes cannot be decoded.
    #[error("the saved state is damaged: {0}")]
    Damaged(#[from] Malformed),
    /// The image contains an impossible value.
    #[error("the saved state is damaged: {0}")]
    Wrong(&'static str),
    /// The driver refuses to recreate something.
    #[error("the driver refuses {what} (code {code})")]
    Refused {
        /// What it refuses.
        what: String,
        /// The API's code.
        code: i32,
    },
    /// The file cannot be read or written.
    #[error("cannot read or write the saved state")]
    File(#[from] io::Error),
    /// The client that has brought the state can no longer be told that it is being restored.
    #[error("its application's rings are unusable")]
    Gone(#[from] Gone),
}

/// The state is not written further: others have taken the available memory.
pub(super) fn too_little(spare: &Spare) -> Immovable {
    Immovable::Has(format!(
        "its worker has too little memory for its state: {spare}"
    ))
}

/// The maximum size of an image in bytes, and its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Room {
    /// As many as the file can hold.
    Any,
    /// This many: the limit of a worker's own memory.
    Own(u64),
    /// As much memory as is available.
    Spare(Spare),
}

impl Room {
    /// For an image in memory, written by a worker that may have this many bytes of its own.
    pub fn of_worker(own: u64) -> Self {
        match memory::spare() {
            Some(spare) if spare.bytes < own => Self::Spare(spare),
            _ => Self::Own(own),
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Any => 1 << 62,
            Self::Own(bytes) | Self::Spare(Spare { bytes, .. }) => (*bytes).min(1 << 62),
        }
    }
}

/// Writes an image.
#[derive(Debug)]
pub struct Writer {
    file: File,
    end: u64,
    room: Room,
    steps: Steps,
}

impl Writer {
    /// Writes to an empty file.
    pub fn new(file: File) -> Self {
        Self {
            file,
            end: ALIGNMENT,
            room: Room::Any,
            steps: Steps::default(),
        }
    }

    /// Writes to an empty file, with a maximum size.
    pub fn within(file: File, room: Room) -> Self {
        Self {
            room,
            ..Self::new(file)
        }
    }

    fn too_long(&self) -> Immovable {
        let what = match &self.room {
            Room::Any => "a file may have",
            Room::Own(_) => "a worker may have of its own here (gantry-accel --heap)",
            Room::Spare(spare) => return too_little(spare),
        };
        let most = self.room.bytes() >> 20;
        Immovable::Has(format!(
            "its state has more than the {most} MiB that {what}"
        ))
    }

    /// Reserves space for contents of this many bytes, and returns its offset.
    ///
    /// # Errors
    /// The file would exceed its maximum size.
    pub fn reserve(&mut self, length: u64) -> Result<u64, Immovable> {
        let start = self.end;
        let end = start
            .checked_add(length)
            .and_then(|end| end.checked_next_multiple_of(ALIGNMENT));
        self.end = end
            .filter(|end| *end <= self.room.bytes())
            .ok_or_else(|| self.too_long())?;
        Ok(start)
    }

    /// Writes a part of the contents.
    ///
    /// # Errors
    /// The file cannot be written, or others have taken the available memory.
    pub fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Immovable> {
        if self.room != Room::Any {
            let taken = self.steps.take(bytes.len() as u64, self.room.bytes());
            taken.map_err(|spare| too_little(&spare))?;
        }
        Ok(self.file.write_all_at(bytes, at)?)
    }

    /// Writes the state, then the header. `shape` is a hash of the encoding of the part of the state that is opaque to
    /// the codec.
    ///
    /// # Errors
    /// The file cannot be written, or the state is too long.
    pub fn finish<A: Api, S: Wire>(self, shape: u64, state: &S) -> Result<(), Immovable> {
        let mut bytes = Vec::new();
        state.put(&mut bytes);
        if bytes.len() as u64 > LONGEST {
            return Err(Immovable::Has(format!(
                "its objects take {} MiB to describe, of {} that there may be",
                bytes.len() >> 20,
                LONGEST >> 20
            )));
        }
        if bytes.len() as u64 > self.room.bytes().saturating_sub(self.end) {
            return Err(self.too_long());
        }
        self.file.write_all_at(&bytes, self.end)?;
        let mut header = MAGIC.to_vec();
        fingerprint::<A, S>(shape).put(&mut header);
        self.end.put(&mut header);
        (bytes.len() as u64).put(&mut header);
        header.resize(HEADER, 0);
        Ok(self.file.write_all_at(&header, 0)?)
    }
}

/// A hash of the encoding of images: of the state, of the backend's part of it, and of the API whose calls that part
/// consists of.
const fn fingerprint<A: Api, S: Wire>(shape: u64) -> u64 {
    with(with(with(named("image"), A::FINGERPRINT), S::SHAPE), shape)
}

/// The contents of memory in an image.
#[derive(Debug)]
pub struct Contents {
    file: File,
    /// Offset of their end.
    end: u64,
}

impl Contents {
    /// Reads an image's header and state.
    ///
    /// # Errors
    /// The file is not an image of this build.
    pub fn open<A: Api, S: Wire>(file: File, shape: u64) -> Result<(S, Self), Immovable> {
        let mut header = [0; HEADER];
        file.read_exact_at(&mut header, 0)?;
        let rest = header.strip_prefix(&MAGIC).ok_or(Immovable::Version)?;
        let mut reader = Reader::new(rest);
        if u64::take(&mut reader)? != fingerprint::<A, S>(shape) {
            return Err(Immovable::Version);
        }
        let (end, length) = (u64::take(&mut reader)?, u64::take(&mut reader)?);
        let size = file.metadata()?.len();
        let fits = end.checked_add(length).is_some_and(|all| all <= size);
        if !fits || length > LONGEST {
            return Err(Immovable::Wrong("it ends before its state does"));
        }
        let mut bytes = vec![0; length as usize];
        file.read_exact_at(&mut bytes, end)?;
        let state = S::from_bytes(&bytes)?;
        Ok((state, Self { file, end }))
    }

    /// Reads a part of the contents.
    ///
    /// # Errors
    /// The part is outside the contents.
    pub fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), Immovable> {
        let end = at.checked_add(bytes.len() as u64);
        if at < ALIGNMENT || end.is_none_or(|end| end > self.end) {
            return Err(Immovable::Wrong("contents that are not in it"));
        }
        Ok(self.file.read_exact_at(bytes, at)?)
    }
}

#[cfg(test)]
mod tests {
    use remoting_proto::{apis::opencl::OpenCl, wire::Blob};

    use super::*;

    fn image() -> File {
        let file = create().unwrap();
        let mut writer = Writer::new(file.try_clone().unwrap());
        let at = writer.reserve(5).unwrap();
        writer.write(at, b"bytes").unwrap();
        writer
            .finish::<OpenCl, _>(7, &Blob(b"state".to_vec()))
            .unwrap();
        file
    }

    #[test]
    fn what_was_written_is_read() {
        let (state, image) = Contents::open::<OpenCl, Blob>(image(), 7).unwrap();
        assert_eq!(state.0, b"state");
        let mut bytes = [0; 5];
        image.read(ALIGNMENT, &mut bytes).unwrap();
        assert_eq!(&bytes, b"bytes");
        assert!(image.read(0, &mut bytes).is_err());
        assert!(image.read(u64::MAX, &mut bytes).is_err());
        assert!(image.read(2 * ALIGNMENT, &mut bytes).is_err());
    }

    #[test]
    fn the_image_of_another_build_is_refused() {
        let other = Contents::open::<OpenCl, Vec<u8>>(image(), 7);
        assert!(matches!(other, Err(Immovable::Version)));
        let other = Contents::open::<OpenCl, Blob>(image(), 8);
        assert!(matches!(other, Err(Immovable::Version)));
    }

    #[test]
    fn no_more_is_written_than_may_be() {
        let file = create().unwrap();
        let room = Room::Own(3 * ALIGNMENT);
        let mut writer = Writer::within(file.try_clone().unwrap(), room);
        let start = writer.reserve(2 * ALIGNMENT).unwrap();
        assert!(writer.reserve(1).is_err());
        assert_eq!(start, ALIGNMENT);
        let room = Room::Spare(Spare {
            bytes: 3 * ALIGNMENT,
            limit: Some("/group/memory.max".into()),
        });
        let mut writer = Writer::within(file.try_clone().unwrap(), room);
        writer.reserve(ALIGNMENT).unwrap();
        let state = Blob(vec![0; ALIGNMENT as usize]);
        let refused = writer.finish::<OpenCl, _>(7, &state);
        let why = refused.unwrap_err().to_string();
        assert!(
            why.contains("0 MiB of memory are left of /group/memory.max"),
            "{why}"
        );
        assert_eq!(file.metadata().unwrap().len(), 0);
    }

    #[test]
    fn an_image_that_claims_more_than_it_has_is_refused() {
        let file = image();
        file.write_all_at(&u64::MAX.to_le_bytes(), 16).unwrap();
        let wrong = Contents::open::<OpenCl, Blob>(file, 7);
        assert!(matches!(wrong, Err(Immovable::Wrong(_))), "{wrong:?}");
    }
}
