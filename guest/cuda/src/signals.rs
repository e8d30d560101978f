//! Waits that end when the device has written a word, which this side looks at. What the word does not
//! say, the worker is asked for: where it refuses, and where the work takes long.

use std::{
    cell::RefCell,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use base::Unpoisoned;
use gantry_remoting::{
    apis::cuda::{NEVER, calls::Signal},
    link::endpoint::Spin,
};

use crate::link::Link;

/// Bytes of a thread's words: no other thread looks at the same cache line.
const STRIDE: u64 = 64;
/// As many are reserved at a time: a page.
const SLOTS: u64 = 64;
/// After waits that did not end by a word, so many are not tried at most.
const PAUSE: u32 = 64;

/// The worker has said that there are no words any more.
static OFF: AtomicBool = AtomicBool::new(false);
/// Those of threads that have ended.
static FREE: Mutex<Vec<Slot>> = Mutex::new(Vec::new());

/// A thread's words.
struct Slot {
    /// Where they are, from the window's start.
    offset: u64,
    done: &'static AtomicU32,
    refused: &'static AtomicU32,
    /// The value of the last wait. A value that is late is no other wait's.
    value: u32,
    /// Waits that are not tried, and how many of them there were last.
    pause: u32,
    paused: u32,
}

/// A slot, for as long as its thread.
struct Own(Option<Slot>);

impl Drop for Own {
    fn drop(&mut self) {
        FREE.lock_unpoisoned().extend(self.0.take());
    }
}

thread_local!(static OWN: RefCell<Own> = const { RefCell::new(Own(None)) });

/// A slot that no thread has.
fn slot(link: &Link) -> Option<Slot> {
    let mut free = FREE.lock_unpoisoned();
    if free.is_empty() {
        let start = link.reserve_shared(STRIDE * SLOTS)?;
        for index in 0..SLOTS {
            let offset = start + STRIDE * index;
            let words = link.pointer(offset, 8).ok()?.cast::<AtomicU32>();
            // SAFETY: reserved for this alone, for good, in a window that stays as long as the process;
            // aligned, as reserved space begins at a page.
            let (done, refused) = unsafe { (&*words, &*words.add(1)) };
            done.store(0, Ordering::Relaxed);
            refused.store(0, Ordering::Relaxed);
            free.push(Slot {
                offset,
                done,
                refused,
                value: 0,
                pause: 0,
                paused: 0,
            });
        }
    }
    free.pop()
}

impl Slot {
    /// Whether the work is done; if not, the worker has to be asked.
    fn wait(&mut self, link: &Link, context: u32, stream: Option<u32>) -> bool {
        if self.pause > 0 {
            self.pause -= 1;
            return false;
        }
        self.value = match self.value.wrapping_add(1) {
            0 | NEVER => 1,
            value => value,
        };
        let signal = Signal {
            context,
            stream,
            words: self.offset,
            value: self.value,
        };
        if link.post(&signal).is_ok() {
            let mut spin = Spin::new(link.patience());
            loop {
                if self.done.load(Ordering::Acquire) == self.value {
                    self.paused = 0;
                    return true;
                }
                let refused = self.refused.load(Ordering::Acquire);
                if refused == NEVER {
                    OFF.store(true, Ordering::Relaxed);
                }
                if refused == self.value || refused == NEVER || !spin.again() {
                    break;
                }
            }
        }
        self.paused = (2 * self.paused + 1).min(PAUSE);
        self.pause = self.paused;
        false
    }
}

/// This thread's next wait is not tried: behind a graph a word comes later than the driver's own end.
pub fn skip_next() {
    let _ = OWN.try_with(|own| {
        if let Some(slot) = &mut own.borrow_mut().0 {
            slot.pause = slot.pause.max(1);
        }
    });
}

/// Whether a stream's work, or with none all of a context, is known to be done, without an error; if not,
/// the worker has to be asked.
pub fn wait(link: &Link, context: u32, stream: Option<u32>) -> bool {
    // What lands in the program's memory, and functions of the program's, come with answers.
    if OFF.load(Ordering::Relaxed) || !link.is_shared() || link.expects() {
        return false;
    }
    let waited = OWN.try_with(|own| {
        let own = &mut own.borrow_mut().0;
        if own.is_none() {
            *own = slot(link);
        }
        let own = own.as_mut();
        own.is_some_and(|own| own.wait(link, context, stream))
    });
    // A thread that ends has none any more.
    waited.unwrap_or(false)
}
