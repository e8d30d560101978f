//! Handles: an object's number and kind in a word that looks like a pointer but is never
//! dereferenced.

use std::sync::atomic::{AtomicU64, Ordering};

use remoting_proto::apis::cuda::{FIRST, Kind, LEGACY, NO_HANDLE};

use crate::{context, launch};

/// The upper 32 bits of a handle, to which the kind is added.
const BASE: u64 = 0x4700;
/// `CU_STREAM_PER_THREAD`
pub const PER_THREAD: u64 = 2;

/// The numbers of objects that have not been destroyed, one bit each.
static LIVE: [AtomicU64; 1 << 14] = [const { AtomicU64::new(0) }; 1 << 14];

/// The handle of an object's number. Numbers below [`FIRST`] denote no objects and stand for
/// themselves.
pub fn handle(kind: Kind, number: u32) -> u64 {
    if number < FIRST {
        return number.into();
    }
    if matches!(kind, Kind::Function | Kind::Kernel) {
        // The number may have belonged to another function before.
        launch::forget(number);
    }
    if let Some(word) = LIVE.get(number as usize / 64) {
        word.fetch_or(1 << (number % 64), Ordering::Relaxed);
    }
    (BASE + kind as u64) << 32 | u64::from(number)
}

/// Marks an object as valid again, since it was not destroyed after all.
pub fn revive(handle: u64) {
    let number = handle as u32;
    if let Some(word) = LIVE.get(number as usize / 64).filter(|_| handle != 0) {
        word.fetch_or(1 << (number % 64), Ordering::Relaxed);
    }
}

/// Marks an object as invalid, since it is about to be destroyed.
pub fn forget(handle: u64) {
    let number = handle as u32;
    if let Some(word) = LIVE.get(number as usize / 64) {
        word.fetch_and(!(1 << (number % 64)), Ordering::Relaxed);
    }
}

/// The number of a handle, or [`NO_HANDLE`] if it is not a valid handle of this kind. For a stream,
/// the one that the handle denotes in this thread.
pub fn number(kind: Kind, handle: u64) -> u32 {
    if kind == Kind::Stream {
        match handle {
            0 if !context::is_per_thread() => return 0,
            0 | PER_THREAD => return context::own_stream().unwrap_or(NO_HANDLE),
            1 => return LEGACY,
            _ => {}
        }
    }
    if handle == 0 {
        return 0;
    }
    let of = |kind: Kind| handle >> 32 == BASE + kind as u64;
    let number = handle as u32;
    let live = LIVE
        .get(number as usize / 64)
        .is_some_and(|word| word.load(Ordering::Relaxed) >> (number % 64) & 1 == 1);
    let other = match kind {
        Kind::Function => Kind::Kernel,
        Kind::BlasLt => Kind::Blas,
        kind => kind,
    };
    if live && (of(kind) || of(other)) {
        number
    } else {
        NO_HANDLE
    }
}

/// The number of a handle. Fails if it is not a valid handle of this kind.
pub fn valid(kind: Kind, handle: u64) -> Result<u32, i32> {
    match number(kind, handle) {
        NO_HANDLE => Err(kind.invalid()),
        number => Ok(number),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_given_and_not_destroyed_is_a_handle_of_its_kind() {
        let event = handle(Kind::Event, 999_999);
        assert_eq!(number(Kind::Event, event), 999_999);
        assert_eq!(number(Kind::Stream, event), NO_HANDLE);
        assert_eq!(number(Kind::Event, event + 1), NO_HANDLE);
        assert_eq!(number(Kind::Event, event & 0xffff_ffff), NO_HANDLE);
        let kernel = handle(Kind::Kernel, 999_998);
        assert_eq!(number(Kind::Function, kernel), 999_998);
        forget(event);
        assert_eq!(valid(Kind::Event, event), Err(Kind::Event.invalid()));
        revive(event);
        assert_eq!(valid(Kind::Event, event), Ok(999_999));
    }

    #[test]
    fn streams_that_are_no_objects_have_their_numbers() {
        assert_eq!(number(Kind::Stream, 0), 0);
        assert_eq!(number(Kind::Stream, 1), LEGACY);
        assert_eq!(number(Kind::Event, 1), NO_HANDLE);
        // Without a context, a thread has no stream of its own.
        assert_eq!(number(Kind::Stream, PER_THREAD), NO_HANDLE);
    }
}
