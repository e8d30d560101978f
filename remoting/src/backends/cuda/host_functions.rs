//! Functions of the client in the order of a stream.
//!
//! The driver's thread tells the serving thread that one is due, which tells the client, and goes on
//! when the client has set a word of the window: whatever the serving thread does meanwhile.

use std::{
    ffi::c_void,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use cuda_definition::driver::types::CUstream;

use super::{
    Server,
    driver::{cu, outcome},
};
use crate::{
    apis::cuda::{calls::HostFunction, codes},
    link::window::Window,
    session::notice::{Board, Notice},
};

/// A function of the client has returned.
#[derive(Clone, Copy, Debug)]
pub struct Returned;

/// The word while the function has not returned.
const DUE: u32 = 0;
/// The word when this side has seen that it has.
const SEEN: u32 = 2;
/// How long the word is polled before the driver's thread sleeps in between.
const EAGER: Duration = Duration::from_micros(100);
/// How long it sleeps then.
const NAP: Duration = Duration::from_micros(50);
/// The most functions that the driver has at a time.
const MOST: usize = 64 << 10;

/// What the driver keeps for a function.
struct Leaf {
    board: Arc<Board<Returned>>,
    pending: Arc<AtomicUsize>,
    number: u64,
    done: *const AtomicU32,
    /// Which holds the word.
    _window: Arc<Window>,
}

/// What the driver calls.
unsafe extern "C" fn due(data: *mut c_void) {
    // SAFETY: made by `host_function` for this very call.
    let leaf = unsafe { Box::from_raw(data.cast::<Leaf>()) };
    leaf.board.leave(Notice::Callback(leaf.number, 0));
    // SAFETY: a word of the window, which the leaf keeps.
    let done = unsafe { &*leaf.done };
    let start = Instant::now();
    while done.load(Ordering::Acquire) == DUE {
        if start.elapsed() < EAGER {
            std::hint::spin_loop();
        } else {
            thread::sleep(NAP);
        }
    }
    // The client may use the word again.
    done.store(SEEN, Ordering::Release);
    leaf.pending.fetch_sub(1, Ordering::AcqRel);
    leaf.board.leave(Notice::Backend(Returned));
}

impl Server {
    pub(super) fn host_function(&mut self, call: &HostFunction) -> Result<(), i32> {
        let submitted = self.submit_to(call.context, call.stream)?;
        let word = self
            .window
            .at(call.done, 4)
            .filter(|_| call.done.is_multiple_of(4));
        let done = word.ok_or(codes::INVALID_VALUE)?.cast::<AtomicU32>();
        // A graph would call it again and again.
        if self.is_captured(submitted.raw) {
            return Err(codes::NOT_SUPPORTED);
        }
        let pending = Arc::clone(&self.backend.pending);
        if pending.load(Ordering::Acquire) >= MOST {
            return Err(codes::OUT_OF_MEMORY);
        }
        pending.fetch_add(1, Ordering::AcqRel);
        let leaf = Box::into_raw(Box::new(Leaf {
            board: Arc::clone(&self.board),
            pending,
            number: call.number,
            done,
            _window: Arc::clone(&self.window),
        }));
        let stream = submitted.raw as CUstream;
        let code = cu!(
            self.backend.api,
            cuLaunchHostFunc(stream, Some(due), leaf.cast())
        );
        if code == 0 {
            self.expected += 1;
        } else {
            // SAFETY: the driver has refused it.
            let leaf = unsafe { Box::from_raw(leaf) };
            leaf.pending.fetch_sub(1, Ordering::AcqRel);
        }
        outcome(code)
    }
}
