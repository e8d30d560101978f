//! Streams and events: waits, and calls of the program's functions.

use std::{
    collections::VecDeque,
    ffi::{c_uint, c_void},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use base::Unpoisoned;
use cuda_definition::driver::types::*;
use remoting_proto::apis::cuda::{
    Kind,
    calls::{EventSynchronize, FunctionTurn, HostFunction, StreamSynchronize},
    codes,
};

use crate::{
    capture::{captures, capturing},
    context,
    entry::{Outcome, connected, entry_points},
    forward::forward,
    handles,
    idle::Sent,
    landing,
    link::Link,
    paged, signals,
    turns::{self, Common},
};

/// Refines the result of a wait: if work has failed, the driver knows how.
pub fn exact(link: &Link, context: u32, stream: u32, waited: Outcome) -> Outcome {
    let _ = (link, context);
    match waited {
        Err(codes::ASK_AGAIN) => {
            let stream = handles::handle(Kind::Stream, stream);
            // SAFETY: no pointers.
            match unsafe { forward("cuStreamQuery", &[stream]) } {
                Ok(()) | Err(codes::NOT_READY) => Err(codes::UNKNOWN),
                failed => failed,
            }
        }
        waited => waited,
    }
}

/// The values of a word in the window: its function is due to return, has returned, and the worker
/// has seen that.
const DUE: u32 = 0;
const RETURNED: u32 = 1;
const SEEN: u32 = 2;
/// The worker has nothing that a copy would have to wait for.
const IDLE: u32 = 3;
/// The maximum number of words to look at before more are reserved: some may be in use for long.
const LOOKS: usize = 64;
/// The number of words to reserve at a time.
const WORDS: u64 = 1024;

/// Moves the first element that is free to the front, if it is among the first [`LOOKS`].
fn brings_forward<T>(all: &mut VecDeque<T>, is_free: impl Fn(&T) -> bool) -> bool {
    let free = all.iter().take(LOOKS).position(is_free);
    all.rotate_left(free.unwrap_or_default());
    free.is_some()
}

/// Reserves words of the window for good. Returns the offset of the first one.
fn reserve_words(link: &Link) -> Outcome<u64> {
    link.reserve_shared(4 * WORDS)
        .ok_or(match link.is_shared() {
            true => codes::OUT_OF_MEMORY,
            false => codes::NOT_SUPPORTED,
        })
}

/// A word of the window that no function uses, and its offset in the window.
fn word(link: &Link) -> Outcome<(u64, &'static AtomicU32)> {
    static ALL: Mutex<VecDeque<(u64, &'static AtomicU32)>> = Mutex::new(VecDeque::new());
    let mut all = ALL.lock_unpoisoned();
    if !brings_forward(&mut all, |(_, word)| word.load(Ordering::Acquire) == SEEN) {
        let start = reserve_words(link)?;
        for index in (0..WORDS).rev() {
            let offset = start + 4 * index;
            let pointer = link.pointer(offset, 4)?.cast::<AtomicU32>();
            // SAFETY: reserved permanently for this purpose alone, in a window that exists as long
            // as the process. Aligned, since reserved space begins at a page boundary.
            let word = unsafe { &*pointer };
            word.store(SEEN, Ordering::Release);
            all.push_front((offset, word));
        }
    }
    let (offset, word) = all.pop_front().ok_or(codes::OUT_OF_MEMORY)?;
    word.store(DUE, Ordering::Release);
    all.push_back((offset, word));
    Ok((offset, word))
}

/// Free words for functions of graphs. A word is returned when no graph has its function any more.
static LASTING: Mutex<Vec<(u64, &'static AtomicU32)>> = Mutex::new(Vec::new());

/// Registers a function of the program for a graph. Returns its number, and the offset of its word.
///
/// # Errors
/// There is no shared window, or no room in it.
pub fn lasting_function(
    link: &Link,
    call: impl Fn() + Send + Sync + 'static,
) -> Outcome<(u64, u64)> {
    let mut free = LASTING.lock_unpoisoned();
    if free.is_empty() {
        let start = reserve_words(link)?;
        for index in 0..WORDS {
            let offset = start + 4 * index;
            let pointer = link.pointer(offset, 4)?.cast::<AtomicU32>();
            // SAFETY: as in `word`.
            free.push((offset, unsafe { &*pointer }));
        }
    }
    let (done, word) = free.pop().ok_or(codes::OUT_OF_MEMORY)?;
    drop(free);
    let own = Arc::new(OnceLock::new());
    let known = Arc::clone(&own);
    let number = link.register_lasting_callback(Arc::new(move |status| {
        // The worker learns the number only after this process.
        let number = known.get().copied();
        if status == codes::FUNCTION_GONE {
            LASTING.lock_unpoisoned().push((done, word));
            number
                .into_iter()
                .map(Common::Function)
                .for_each(turns::gone);
            return false;
        }
        number.into_iter().for_each(landing::before_call);
        call();
        number.into_iter().for_each(landing::after_call);
        word.store(RETURNED, Ordering::Release);
        true
    }));
    let _ = own.set(number);
    Ok((number, done))
}

/// The same in the order of a stream that is being captured.
fn captured_function(
    link: &Link,
    (context, stream): (u32, u32),
    call: impl Fn() + Send + Sync + 'static,
) -> Outcome {
    let (number, done) = lasting_function(link, call)?;
    let ask = || {
        link.ask(&HostFunction {
            context,
            stream,
            number,
            done,
            lasting: true,
            turn: FunctionTurn::Intact(),
        })
    };
    let captured = paged::captured_call(stream, number, ask);
    captured.inspect_err(|_| link.cancel_callback(number))
}

/// What a function is told when it is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// Nothing. It is not called if work has failed.
    OfEnd,
    /// The result of the preceding work.
    OfResult,
}

impl Told {
    fn turn(self) -> FunctionTurn {
        match self {
            Self::OfEnd => FunctionTurn::Intact(),
            Self::OfResult => FunctionTurn::Always(),
        }
    }
}

/// Has the worker enqueue a registered callback and the word that tells it of the return.
fn enqueue(
    link: &Link,
    (context, stream): (u32, u32),
    (number, done): (u64, u64),
    turn: FunctionTurn,
) -> Outcome {
    link.ask(&HostFunction {
        context,
        stream,
        number,
        done,
        lasting: false,
        turn,
    })
}

/// Calls a function with the status of the work before it, in stream order: also if the worker ends, with
/// `DEVICE_UNAVAILABLE`.
///
/// # Errors
/// The driver's.
pub fn host_function_in(
    link: &Link,
    place: (u32, u32),
    told: Told,
    call: impl FnOnce(i32) + Send + 'static,
) -> Outcome {
    let (done, word) = word(link)?;
    let number = link.register_callback(Box::new(move |status| {
        call(status);
        word.store(RETURNED, Ordering::Release);
    }));
    let asked = enqueue(link, place, (number, done), told.turn());
    if asked.is_err() {
        link.cancel_callback(number);
        word.store(SEEN, Ordering::Release);
    }
    asked
}

/// Waits until everything in a stream is done, and its data has landed.
///
/// # Errors
/// The driver's.
pub fn wait(link: &Link, (context, stream): (u32, u32)) -> Outcome {
    let waited = link.ask(&StreamSynchronize { context, stream });
    exact(link, context, stream, waited)
}

/// Copies memory of the program in stream order, with the status of the work before it: also if the worker ends, with
/// `DEVICE_UNAVAILABLE`. The copy does not wait for the program's functions that precede it in other streams only, and
/// must not wait for anything itself. It is done at once if the stream has no work. If more copies are outstanding than
/// the worker keeps, or the window is full, this waits for the stream.
///
/// # Errors
/// The driver's. Nothing is copied then.
pub fn copy_in(link: &Link, place: (u32, u32), copy: impl FnOnce(i32) + Send + 'static) -> Outcome {
    let Ok((done, word)) = word(link) else {
        wait(link, place)?;
        copy(0);
        return Ok(());
    };
    let number = link.register_copy(Box::new(move |status| {
        copy(status);
        word.store(RETURNED, Ordering::Release);
    }));
    let asked = enqueue(link, place, (number, done), FunctionTurn::Copy());
    let at_once = match asked {
        Ok(()) if word.load(Ordering::Acquire) != IDLE => return Ok(()),
        Err(codes::OUT_OF_MEMORY) => wait(link, place),
        asked => asked,
    };
    // If the copy has been done meanwhile, the word may be another copy's already.
    let Some(copy) = link.take_copy(number) else {
        return at_once;
    };
    if at_once.is_ok() {
        copy(0);
    }
    word.store(SEEN, Ordering::Release);
    at_once
}

entry_points! {
    fn cuStreamSynchronize(hStream: CUstream) {
        let link = connected()?;
        let context = context::need()?;
        let stream = handles::valid(Kind::Stream, hStream as u64)?;
        let sent = Sent::now(context, stream);
        let may_be_told = !captures();
        if may_be_told && sent.is_done() && link.alive() {
            return Ok(());
        }
        if !may_be_told || !signals::wait(link, context, Some(stream)) {
            wait(link, (context, stream))?;
        }
        sent.was_waited_for();
        Ok(())
    }

    fn cuEventSynchronize(hEvent: CUevent) {
        let link = connected()?;
        let context = context::need()?;
        let event = handles::valid(Kind::Event, hEvent as u64)?;
        if event == 0 {
            return Err(codes::INVALID_HANDLE);
        }
        match link.ask(&EventSynchronize { context, event }) {
            Err(codes::ASK_AGAIN) => match forward("cuEventQuery", &[hEvent as u64]) {
                Ok(()) | Err(codes::NOT_READY) => Err(codes::UNKNOWN),
                failed => failed,
            },
            waited => waited,
        }
    }

    fn cuStreamGetCtx(hStream: CUstream, pctx: *mut CUcontext) {
        connected()?;
        context::need()?;
        forward("cuStreamGetCtx", &[hStream as u64, pctx as u64])
    }

    fn cuLaunchHostFunc(hStream: CUstream, r#fn: CUhostFn, userData: *mut c_void) {
        let function = r#fn.ok_or(codes::INVALID_VALUE)?;
        let data = userData as u64;
        let link = connected()?;
        let place = (context::need()?, handles::valid(Kind::Stream, hStream as u64)?);
        let call = move || {
            // SAFETY: the program's function is called with the argument that it expects.
            unsafe { function(data as *mut c_void) };
        };
        if capturing(link, place.0, place.1) {
            return captured_function(link, place, call);
        }
        host_function_in(link, place, Told::OfEnd, move |status| {
            // The worker tells of work that has been done only; this process, that the worker has ended.
            if status == 0 {
                call();
            }
        })
    }

    fn cuStreamAddCallback(
        hStream: CUstream,
        callback: CUstreamCallback,
        userData: *mut c_void,
        flags: c_uint,
    ) {
        let callback = callback.filter(|_| flags == 0).ok_or(codes::INVALID_VALUE)?;
        let link = connected()?;
        let place = (context::need()?, handles::valid(Kind::Stream, hStream as u64)?);
        let (stream, data) = (hStream as u64, userData as u64);
        host_function_in(link, place, Told::OfResult, move |status| {
            let result = cudaError_enum(status.cast_unsigned());
            // SAFETY: the program's function is called with the arguments that it expects.
            unsafe { callback(stream as CUstream, result, data as *mut c_void) };
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_reused_although_an_older_function_has_not_returned() {
        let mut all: VecDeque<u32> = (0..10).collect();
        let is_free = |word: &u32| ![0, 1].contains(word);
        for _ in 0..100 {
            assert!(brings_forward(&mut all, is_free));
            let word = all.pop_front().unwrap();
            all.push_back(word);
        }
        assert!(!brings_forward(&mut all, |_| false));
        assert_eq!(all.len(), 10);
        assert!(!brings_forward(&mut VecDeque::new(), is_free));
    }
}
