//! The order of launches that have an executable graph or a function of the program in common: each
//! comes after the end of the previous one, in whatever streams they are. A copy of an executable
//! graph has one place in the window, and a due function is identified by its number, whichever of
//! its launches calls it. The driver guarantees this order for launches of one executable graph,
//! but not for what this process does before and after them.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    mem,
    sync::{Arc, Mutex},
};

use base::Unpoisoned;
use cuda_definition::driver::types::CUstream;
use remoting_proto::apis::cuda::codes;

use crate::{context, entry::Outcome, forward::forward, handles::PER_THREAD};

/// What launches can have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Common {
    /// An executable graph, by its number.
    Executable(u32),
    /// A function that graphs call, by its number.
    Function(u64),
}

/// `CU_EVENT_DISABLE_TIMING`
const NO_TIMES: u64 = 2;

/// The end of a launch.
#[derive(Debug)]
struct Turn {
    event: u64,
    /// The handle of the event's context, which is the stream's.
    context: u64,
    /// The stream, and the context that was current.
    place: (u64, u64),
}

impl Turn {
    fn new(context: u64, place: (u64, u64)) -> Outcome<Self> {
        let mut event = 0u64;
        // SAFETY: the pointer is to a local.
        let made = context::within(context, || unsafe {
            forward("cuEventCreate", &[&raw mut event as u64, NO_TIMES])
        });
        made.map(|()| Self {
            event,
            context,
            place,
        })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // Streams that wait for the event continue to do so.
        // SAFETY: no pointers.
        let _ = unsafe { forward("cuEventDestroy_v2", &[self.event]) };
    }
}

/// The last launch of each. Locked while a launch is put into its stream, so that another one comes
/// either before or after it.
static LAST: Mutex<Option<HashMap<Common, Arc<Turn>>>> = Mutex::new(None);
/// What is in [`LAST`], and what of it will not be launched again. Recorded separately, where blocking is not allowed.
static ENDS: Mutex<Ends> = Mutex::new(Ends {
    known: BTreeSet::new(),
    gone: BTreeSet::new(),
});

#[derive(Debug)]
struct Ends {
    known: BTreeSet<Common>,
    gone: BTreeSet<Common>,
}

/// The context of a stream.
///
/// # Errors
/// The driver's.
pub fn context_of(stream: u64, current: u64) -> Outcome<u64> {
    if stream <= PER_THREAD {
        return Ok(current);
    }
    let mut context = 0u64;
    // SAFETY: the pointer is to a local.
    unsafe { forward("cuStreamGetCtx", &[stream, &raw mut context as u64])? };
    Ok(context)
}

/// Launches after the last launches that have something in common with this one.
///
/// # Errors
/// The error of `launch`.
pub fn in_turn(
    common: &HashSet<Common>,
    stream: CUstream,
    launch: impl FnOnce() -> Outcome,
) -> Outcome {
    let stream = stream as u64;
    let current = context::top().ok_or(codes::INVALID_CONTEXT)?;
    let mut last = LAST.lock_unpoisoned();
    let last = last.get_or_insert_default();
    let mut ends = ENDS.lock_unpoisoned();
    let gone = mem::take(&mut ends.gone);
    ends.known.extend(common);
    drop(ends);
    last.retain(|one, _| !gone.contains(one));
    let mut before: Vec<Arc<Turn>> = Vec::new();
    for turn in common.iter().filter_map(|one| last.get(one)) {
        if !before.iter().any(|known| Arc::ptr_eq(known, turn)) {
            before.push(Arc::clone(turn));
        }
    }
    for turn in &before {
        // SAFETY: no pointers.
        unsafe { forward("cuStreamWaitEvent", &[stream, turn.event, 0])? };
    }
    let place = (stream, current);
    // An event that stands for nothing else can be reused for this launch.
    let usable = before.into_iter().find(|turn| {
        let same = common.iter().filter_map(|one| last.get(one));
        let same = same.filter(|other| Arc::ptr_eq(turn, other)).count();
        turn.place == place && Arc::strong_count(turn) == same + 1
    });
    let turn = match usable {
        Some(turn) => turn,
        None => Arc::new(Turn::new(context_of(stream, current)?, place)?),
    };
    launch()?;
    // SAFETY: no pointers.
    unsafe { forward("cuEventRecord", &[turn.event, stream])? };
    last.extend(common.iter().map(|one| (*one, Arc::clone(&turn))));
    Ok(())
}

/// Records that there will be no more launches that have this in common.
pub fn gone(one: Common) {
    let mut ends = ENDS.lock_unpoisoned();
    if ends.known.remove(&one) {
        ends.gone.insert(one);
    }
}

/// Called when a context is about to be destroyed, with its events.
pub fn forget_context(context: u64) {
    if let Some(last) = LAST.lock_unpoisoned().as_mut() {
        last.retain(|_, turn| turn.context != context);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_launched_in_no_turn_leaves_nothing_when_it_ends() {
        let launched = Common::Function(u64::MAX);
        ENDS.lock_unpoisoned().known.insert(launched);
        for number in 1_000..1_100 {
            gone(Common::Executable(number));
        }
        gone(launched);
        gone(launched);
        let ends = ENDS.lock_unpoisoned();
        assert!(ends.gone.contains(&launched) && !ends.known.contains(&launched));
        assert!(
            !ends
                .gone
                .iter()
                .any(|one| matches!(one, Common::Executable(_)))
        );
    }
}
