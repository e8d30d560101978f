//! The state of each slice.
//!
//! ```text
//!   Free ─open─> Opening ─worker ready─> Open
//!                   └─refused─> Ended <─worker gone─┘
//!   Opening, Open, Ended ─close─> Closing ─memory replaced─> Free
//! ```
//!
//! Commands come from vCPUs, everything else from the service. Each step is one compare-and-swap,
//! so that neither waits for the other, and repeated commands of a guest have no effect.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
};

use base::Unpoisoned;
use remoting_proto::port::{Command, State};
use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// What the guest declares about the application of a slice, as in registers and saved states; 0
/// where it declares nothing.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct Claim {
    /// The owner of the application.
    pub owner: u32,
    /// The API that it uses, if the port has several.
    #[serde(default, skip_serializing_if = "is_none")]
    pub api: u32,
}

/// The states of all slices, and the event that wakes the service.
pub struct Slices {
    states: Box<[AtomicU32]>,
    /// The guest's declared owner of each slice's application.
    owners: Box<[AtomicU32]>,
    /// The guest's declared API of each slice's application.
    apis: Box<[AtomicU32]>,
    /// Held by vCPUs while they open a slice or declare its API.
    opening: Mutex<()>,
    changes: AtomicU32,
    /// Wakes the service.
    pub kick: EventFd,
    /// The service must end.
    stopping: AtomicU32,
    /// Whether the agent must be notified of something other than a change of state.
    news: AtomicBool,
    /// Number of workers that have served since the port was created.
    pub opened: AtomicU64,
    /// Number of workers that ended or refused before their application ended.
    pub lost: AtomicU64,
    /// Number of buffers and images whose contents have followed their application.
    pub followed: Followed,
}

/// Counts buffers and images whose contents have followed their application after it had continued.
pub type Followed = Arc<AtomicU64>;

impl Slices {
    /// Creates this number of slices, all free.
    pub fn new(count: u32) -> std::io::Result<Self> {
        Ok(Self {
            states: (0..count).map(|_| AtomicU32::default()).collect(),
            owners: (0..count).map(|_| AtomicU32::default()).collect(),
            apis: (0..count).map(|_| AtomicU32::default()).collect(),
            opening: Mutex::default(),
            changes: AtomicU32::new(0),
            kick: EventFd::new(EFD_NONBLOCK)?,
            stopping: AtomicU32::new(0),
            news: AtomicBool::new(false),
            opened: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            followed: Followed::default(),
        })
    }

    /// Number of slices.
    pub fn count(&self) -> u32 {
        // At most MOST_SLICES.
        self.states.len() as u32
    }

    /// The state of a slice as a register value; 0 if there is no such slice.
    pub fn number(&self, slice: usize) -> u32 {
        self.states
            .get(slice)
            .map_or(0, |state| state.load(Ordering::Acquire))
    }

    /// The state of a slice.
    pub fn get(&self, slice: usize) -> State {
        // No other value is ever stored.
        State::from_number(self.number(slice)).unwrap_or(State::Free)
    }

    /// What the guest declares about a slice's application. It may change the owner at any time, so
    /// this is read once per worker.
    pub fn claim(&self, slice: usize) -> Claim {
        let of = |all: &[AtomicU32]| {
            let said = all.get(slice);
            said.map_or(0, |said| said.load(Ordering::Acquire))
        };
        Claim {
            owner: of(&self.owners),
            api: of(&self.apis),
        }
    }

    /// Sets what is declared about a slice's application.
    pub fn set_claim(&self, slice: usize, claim: Claim) {
        self.set_owner(slice, claim.owner);
        if let Some(api) = self.apis.get(slice) {
            api.store(claim.api, Ordering::Release);
        }
    }

    /// Sets the guest's declared API for the next application of a free slice. The API of a slice
    /// in use does not change: workers that take over the application are told that one.
    pub fn set_api(&self, slice: usize, number: u32) {
        let _not_opened_meanwhile = self.opening.lock_unpoisoned();
        if let Some(api) = self.apis.get(slice)
            && self.get(slice) == State::Free
        {
            api.store(number, Ordering::Release);
        }
    }

    /// Sets the guest's declared owner of a slice's application.
    pub fn set_owner(&self, slice: usize, number: u32) {
        if let Some(owner) = self.owners.get(slice) {
            owner.store(number, Ordering::Release);
        }
    }

    /// Number of state changes.
    pub fn changes(&self) -> u32 {
        self.changes.load(Ordering::Acquire)
    }

    /// Number of slices that are not free.
    pub fn in_use(&self) -> usize {
        (0..self.states.len())
            .filter(|&slice| self.get(slice) != State::Free)
            .count()
    }

    /// Loads saved states, before the guest runs. An invalid state is loaded as `Ended`.
    pub fn restore(&self, saved: impl IntoIterator<Item = (usize, u32, Claim)>, changes: u32) {
        for (slice, state, claim) in saved {
            let state = State::from_number(state).unwrap_or(State::Ended);
            if let Some(to) = self.states.get(slice) {
                self.set_claim(slice, claim);
                to.store(state as u32, Ordering::Release);
            }
        }
        self.changes.store(changes, Ordering::Release);
        self.wake();
    }

    /// Changes the state, if the slice is still in the state `from`.
    pub fn change(&self, slice: usize, from: State, to: State) -> bool {
        let Some(state) = self.states.get(slice) else {
            return false;
        };
        let changed = state
            .compare_exchange(from as u32, to as u32, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok();
        if changed {
            self.changes.fetch_add(1, Ordering::AcqRel);
        }
        changed
    }

    /// Executes a command of the guest. Unknown commands, and commands that are invalid in the
    /// slice's state, have no effect.
    pub fn command(&self, slice: usize, command: u32) {
        let changed = if command == Command::Open as u32 {
            let _said = self.opening.lock_unpoisoned();
            self.change(slice, State::Free, State::Opening)
        } else if command == Command::Close as u32 {
            self.close(slice)
        } else {
            false
        };
        if changed {
            self.wake();
        }
    }

    fn close(&self, slice: usize) -> bool {
        [State::Opening, State::Open, State::Ended]
            .into_iter()
            .any(|from| self.change(slice, from, State::Closing))
    }

    /// Records that the worker of an open slice is gone.
    pub fn lose(&self, slice: usize) {
        if self.change(slice, State::Open, State::Ended) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        self.wake();
    }

    /// Closes all slices.
    pub fn close_all(&self) {
        for slice in 0..self.states.len() {
            // Between two attempts the service may take a step that the first attempt missed; there
            // are at most two such steps.
            let _ = self.close(slice) || self.close(slice) || self.close(slice);
        }
        self.wake();
    }

    /// Notifies the agent, as if a state had changed.
    pub fn tell(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.news.store(true, Ordering::Release);
        self.wake();
    }

    /// Whether the agent must be notified; resets this.
    pub fn take_news(&self) -> bool {
        self.news.swap(false, Ordering::AcqRel)
    }

    /// Asks the service to end.
    pub fn stop(&self) {
        self.stopping.store(1, Ordering::Release);
        self.wake();
    }

    /// Whether the service must end.
    pub fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire) != 0
    }

    /// Wakes the service to check its work.
    pub fn wake(&self) {
        // Fails only if the counter is full, in which case the service is awake.
        let _ = self.kick.write(1);
    }
}

/// Whether a count need not be saved.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "for serde")]
pub(super) fn is_none(count: &u32) -> bool {
    *count == 0
}
