//! Waits that end when the device has written a word, which this process polls. The worker is asked
//! only if the word does not tell: if the worker refuses, or if the work takes long.

use std::{
    cell::RefCell,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use base::Unpoisoned;
use remoting_proto::apis::cuda::{NEVER, calls::Signal};
use remoting_transport::endpoint::Spin;

use crate::{entry, link::Link};

/// The distance of the words of two threads, in bytes: no other thread looks at the same cache
/// line.
const STRIDE: u64 = 64;
/// The number of slots to reserve at a time, which is a page.
const SLOTS: u64 = 64;
/// The maximum number of waits for which the words are not tried, after waits that did not end by a
/// word.
const PAUSE: u32 = 64;

/// The worker has reported that no more words are available.
static OFF: AtomicBool = AtomicBool::new(false);
/// The slots of threads that have ended.
static FREE: Mutex<Vec<Slot>> = Mutex::new(Vec::new());

/// A thread's words.
struct Slot {
    /// The offset of the words in the window.
    offset: u64,
    done: &'static AtomicU32,
    refused: &'static AtomicU32,
    /// The value of the last wait. A late value does not match any other wait.
    value: u32,
    /// The number of waits that remain to be skipped, and the length of the last pause.
    pause: u32,
    paused: u32,
}

/// A slot that is held as long as its thread exists.
struct Own(Option<Slot>);

impl Drop for Own {
    fn drop(&mut self) {
        // In a child, another thread of its parent may have held the lock.
        if entry::is_forked() {
            return;
        }
        FREE.lock_unpoisoned().extend(self.0.take());
    }
}

thread_local!(static OWN: RefCell<Own> = const { RefCell::new(Own(None)) });

/// Takes a slot that no thread uses.
fn slot(link: &Link) -> Option<Slot> {
    let mut free = FREE.lock_unpoisoned();
    if free.is_empty() {
        let start = link.reserve_shared(STRIDE * SLOTS)?;
        for index in 0..SLOTS {
            let offset = start + STRIDE * index;
            let words = link.pointer(offset, 8).ok()?.cast::<AtomicU32>();
            // SAFETY: reserved permanently for this purpose alone, in a window that exists as long
            // as the process. Aligned, since reserved space begins at a page boundary.
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
    /// Whether the work is done. Otherwise the worker has to be asked.
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

/// Skips this thread's next wait: after a graph, a word arrives later than the driver reports the
/// end.
pub fn skip_next() {
    let _ = OWN.try_with(|own| {
        if let Some(slot) = &mut own.borrow_mut().0 {
            slot.pause = slot.pause.max(1);
        }
    });
}

/// Whether a stream's work, or without a stream all work of a context, is known to be done without
/// an error. Otherwise the worker has to be asked.
pub fn wait(link: &Link, context: u32, stream: Option<u32>) -> bool {
    // Data that lands in the program's memory, and calls of the program's functions, arrive with
    // answers.
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
    // A thread that is ending has no slot any more.
    waited.unwrap_or(false)
}
