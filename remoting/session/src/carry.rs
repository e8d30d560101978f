//! A client that transfers its own state from one worker to another. It does so by calls, so it does not matter where
//! either worker is, nor which link reaches it.
//!
//! ```text
//!   client to the worker that it leaves       client to the one that it comes to
//!     PrecopyState    a round, while it serves
//!     ReadState ...   parts of the image        WriteState ...   into an empty image
//!                                               PrepareState     makes what the round has
//!     ... further rounds                        ...
//!     SaveState       waits, saves the rest; or a further round, if much was made since
//!     ReadState ...   parts of the image        WriteState ...   into an empty image
//!                                               RestoreState     makes the rest
//! ```
//!
//! Each answer is the reason why something was not done, and empty if it was. The first worker still serves: if the
//! second one fails to start serving, the client continues with the first. A client can write any image. The image is
//! trusted no more than the client's calls, and must not be longer than [`Session::most_carried`]. A worker that has
//! created a round's objects takes no other calls before it has restored everything.

use std::{
    fs::File,
    os::unix::fs::FileExt,
    ptr,
    sync::Arc,
    time::{Duration, Instant},
};

use base::memory::Steps;
use remoting_proto::wire::{Blob, Header, messages::WindowRange};
use remoting_transport::{endpoint::Receiver, port_bell::Waker, window::Slice};

use super::{
    backend::Backend,
    checkpoint::{Phase, Whose},
    image::{self, Immovable, Room, Writer},
    notice::Notice,
    precopy::Asker,
    server::{Error, Session},
    work::Making,
};

/// Maximum wait for outstanding work, in milliseconds.
const LONGEST: u64 = 600_000;
/// Maximum part of an image in bytes: it is copied through this process's own memory.
const PART: u64 = 4 << 20;

/// A state that the client transfers to another worker, or brings from one.
#[derive(Debug, Default)]
pub enum Carried {
    /// Nothing is carried.
    #[default]
    Nothing,
    /// A round is being copied.
    Due,
    /// A round is being copied, and nobody wants it any more.
    Unwanted,
    /// An image, and the amount that the client has written to it.
    Image(File, Steps),
}

impl Carried {
    /// Whether a round is being copied.
    pub fn is_due(&self) -> bool {
        matches!(self, Self::Due | Self::Unwanted)
    }

    /// Discards the state: an image at once, one that is being written when it is complete.
    fn give_up(&mut self) {
        *self = match self.is_due() {
            true => Self::Unwanted,
            false => Self::Nothing,
        };
    }

    /// Takes the image, if there is one.
    fn take(&mut self) -> Option<(File, Steps)> {
        match std::mem::take(self) {
            Self::Image(file, steps) => Some((file, steps)),
            other => {
                *self = other;
                None
            }
        }
    }
}

/// Why an image is not read or written.
fn wrong(what: &'static str) -> Immovable {
    Immovable::Wrong(what)
}

impl<B: Backend> Session<B> {
    /// Begins to copy the changes since the last round. The call is answered when they are in an image.
    pub fn precopy_state(&mut self, header: Header, round: u32) -> Result<(), Error> {
        match self.begin_carried_round(header, round) {
            Ok(()) => Ok(()),
            Err(error) => self.not_saved(header, base::Chain(&error).to_string()),
        }
    }

    fn begin_carried_round(&mut self, header: Header, round: u32) -> Result<(), Immovable> {
        if self.carried.is_due() {
            return Err(Immovable::Has("its state is being copied".to_owned()));
        }
        self.carried = Carried::Nothing;
        if !self.has_threads() {
            return Err(Immovable::Has(
                "behind a gate nothing is copied while it is served".to_owned(),
            ));
        }
        let file = image::create()?;
        let image = Writer::within(file.try_clone()?, Room::of_worker(self.most_carried));
        let board = Arc::clone(&self.board);
        let tell = move |copied: Result<(), Immovable>| {
            board.leave(Notice::Copied(header, copied.map(|()| file)));
        };
        self.begin_round(Asker::Client, round, image, tell)?;
        self.carried = Carried::Due;
        Ok(())
    }

    /// Answers when a round has been copied, or has failed.
    pub(crate) fn copied(
        &mut self,
        header: Header,
        copied: Result<File, Immovable>,
    ) -> Result<(), Error> {
        match std::mem::take(&mut self.carried) {
            Carried::Unwanted => self.not_saved(header, "it was given up".to_owned()),
            _ => self.answer_saved(header, copied),
        }
    }

    /// Saves the state, except what is in `rounds` rounds, once no work is outstanding. If more than `most` bytes of
    /// memory objects were created since, it does not save, and answers with that number.
    pub fn save_state(
        &mut self,
        header: Header,
        (patience, rounds, most): (u64, u32, u64),
    ) -> Result<(), Error> {
        // Whoever has asked before waits for the answer.
        if !self.phase.serves() {
            return self.not_saved(header, "the worker is being stopped already".to_owned());
        }
        // While it waits, nobody else would be heard.
        if let Err(error) = self.may_have_rounds(Asker::Client) {
            return self.not_saved(header, base::Chain(&error).to_string());
        }
        self.carried.take();
        let made = self.made_since_rounds();
        if made > most {
            let why = Blob(b"more was made since the last round than is to be left".to_vec());
            return Ok(self.answer(header, &Ok((made, why)))?);
        }
        let until = Instant::now() + Duration::from_millis(patience.min(LONGEST));
        let whose = Whose::Client(header, rounds);
        self.phase = Phase::Draining { until, whose };
        self.backend.flush_all();
        Ok(())
    }

    /// Answers that the state cannot be saved.
    pub(crate) fn not_saved(&mut self, header: Header, why: String) -> Result<(), Error> {
        Ok(self.answer(header, &Ok((0u64, Blob(why.into_bytes()))))?)
    }

    /// Saves the state of a session without outstanding work. The session resumes.
    pub(crate) fn save_for_client(
        &mut self,
        calls: &Receiver<Slice, Waker>,
        header: Header,
        rounds: u32,
    ) -> Result<(), Error> {
        // The client hears of these releases now, so the other worker must not repeat them.
        self.tell_released()?;
        let saved = (|| {
            let known = self.rounds_of(Asker::Client, rounds)?;
            let file = image::create()?;
            let writer = Writer::within(file.try_clone()?, Room::of_worker(self.most_carried));
            self.save(calls, known, writer, false)?;
            Ok(file)
        })();
        self.answer_saved(header, saved)
    }

    /// Answers with the outcome of saving the state, or a part of it.
    fn answer_saved(
        &mut self,
        header: Header,
        saved: Result<File, Immovable>,
    ) -> Result<(), Error> {
        let saved = saved.and_then(|file| Ok((file.metadata()?.len(), file)));
        match saved {
            Ok((length, file)) => {
                self.carried = Carried::Image(file, Steps::default());
                Ok(self.answer(header, &Ok((length, Blob::default())))?)
            }
            Err(error) => self.not_saved(header, base::Chain(&error).to_string()),
        }
    }

    /// Answers a call that uses a stage, which belongs to the client again.
    fn answer_carried(
        &mut self,
        header: Header,
        place: Option<&WindowRange>,
        outcome: Result<(), Immovable>,
    ) -> Result<(), Error> {
        if let Some(stage) = place.and_then(|place| place.stage) {
            self.stage_free(stage, outcome.is_ok());
        }
        let why = outcome.map_or_else(|error| base::Chain(&error).to_string(), |()| String::new());
        Ok(self.answer(header, &Ok(Blob(why.into_bytes())))?)
    }

    /// Reads a part of the saved image into the window. Reading the last part discards the image; reading no bytes
    /// discards everything that is kept for the client.
    pub fn read_state(&mut self, header: Header, at: u64, to: &WindowRange) -> Result<(), Error> {
        if to.length == 0 {
            self.carried.give_up();
            self.forget_rounds(Asker::Client);
        }
        let outcome = self.read_part(at, to);
        self.answer_carried(header, Some(to), outcome)
    }

    fn read_part(&mut self, at: u64, to: &WindowRange) -> Result<(), Immovable> {
        if to.length == 0 {
            return Ok(());
        }
        let (place, length) = self.stretch(to)?;
        let Carried::Image(file, _) = &self.carried else {
            return Err(wrong("nothing was saved"));
        };
        let mut bytes = vec![0; length];
        file.read_exact_at(&mut bytes, at)?;
        // SAFETY: as many bytes of the window as were read; a concurrent reader sees arbitrary bytes.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), place, length) };
        // It takes as much memory as the application has.
        if at.saturating_add(to.length) == file.metadata()?.len() {
            self.carried.take();
        }
        Ok(())
    }

    /// Writes a part of the image that is to be restored, from the window.
    pub fn write_state(
        &mut self,
        header: Header,
        at: u64,
        from: &WindowRange,
    ) -> Result<(), Error> {
        let outcome = self.write_part(at, from);
        self.answer_carried(header, Some(from), outcome)
    }

    fn write_part(&mut self, at: u64, from: &WindowRange) -> Result<(), Immovable> {
        let (place, length) = self.stretch(from)?;
        if self.carried.is_due() {
            return Err(wrong("its own state is being copied"));
        }
        let end = at.checked_add(from.length);
        if end.is_none_or(|end| end > self.most_carried) {
            return Err(Immovable::Has(format!(
                "its state has more than the {} MiB that a worker may have of its own here \
                 (gantry-accel --heap)",
                self.most_carried >> 20
            )));
        }
        let mut bytes = vec![0; length];
        // SAFETY: as many bytes of the window as the copy has room for; the client may change them meanwhile, and the
        // copy then has arbitrary bytes.
        unsafe { ptr::copy_nonoverlapping(place, bytes.as_mut_ptr(), length) };
        let (file, steps) = match self.carried.take() {
            Some(image) => image,
            None => (image::create()?, Steps::default()),
        };
        // The image is memory of this process, and is charged to its control groups.
        let written = steps
            .take(from.length, self.most_carried)
            .map_err(|spare| image::too_little(&spare))
            .and_then(|()| Ok(file.write_all_at(&bytes, at)?));
        self.carried = Carried::Image(file, steps);
        written
    }

    /// The address and length of a part of the window.
    fn stretch(&self, range: &WindowRange) -> Result<(*mut u8, usize), Immovable> {
        if range.length > PART {
            return Err(wrong("a part is too long"));
        }
        let place = self.window.at(range.offset, range.length);
        // Fits, since it is bounded.
        Ok((
            place.ok_or(wrong("a part is outside of the window"))?,
            range.length as usize,
        ))
    }

    /// Restores what the client has written. The client is told that this makes progress.
    fn make(
        &mut self,
        make: impl FnOnce(&mut Self, File) -> Result<(), Immovable>,
    ) -> Result<(), Immovable> {
        let image = self.carried.take();
        let (file, _) = image.ok_or(wrong("nothing was written"))?;
        // A client that lends its CPU hears nothing before the call has returned.
        self.making = self.has_threads().then(Making::begin);
        let made = make(self, file);
        self.making = None;
        made
    }

    /// Restores a round that the client has written. The session ends if that fails.
    pub fn prepare_state(&mut self, header: Header) -> Result<(), Error> {
        let prepared = self.make(|session, file| session.prepare(file, false));
        self.answer_brought(header, prepared)
    }

    /// Restores the state that the client has written. The session ends if that fails.
    pub fn restore_state(&mut self, header: Header) -> Result<(), Error> {
        let restored = self.make(|session, file| session.restore(file, false));
        // The rings of this session continue as they are.
        self.start_at = None;
        self.answer_brought(header, restored)
    }

    /// Answers with the outcome of a state that the client has brought. Without the state there is nothing to serve.
    fn answer_brought(&mut self, header: Header, made: Result<(), Immovable>) -> Result<(), Error> {
        let failed = made.is_err();
        self.answer_carried(header, None, made)?;
        match failed {
            true => Err(Error::Elsewhere),
            false => Ok(()),
        }
    }
}
