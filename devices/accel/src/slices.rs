//! The state of each slice.
//!
//! ```text
//!   Free ─open─> Opening ─worker ready─> Open
//!                   └─refused─> Ended <─worker gone─┘
//!   Opening, Open, Ended ─close─> Closing ─memory replaced─> Free
//! ```
//!
//! Commands come from vCPUs, everything else from the service. Each step is one compare-and-swap,
//! so that neither waits for the other, and a guest that repeats commands changes nothing.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
};

use base::Unpoisoned;
use gantry_remoting::port::{Command, State};
use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::saved::is_none;

/// What the guest says of the application that a slice is for, as registers and saved states have it:
/// zero where it says nothing.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct Claim {
    /// Whose it is.
    pub owner: u32,
    /// Which API it calls, where its port has several.
    #[serde(default, skip_serializing_if = "is_none")]
    pub api: u32,
}

/// States, and what wakes the service.
pub struct Slices {
    states: Box<[AtomicU32]>,
    /// Whose the application of each slice is, as the guest says.
    owners: Box<[AtomicU32]>,
    /// Which API the application of each slice calls, as the guest says.
    apis: Box<[AtomicU32]>,
    /// Held by vCPUs while one opens a slice or says which API is called there.
    opening: Mutex<()>,
    changes: AtomicU32,
    /// Wakes the service.
    pub kick: EventFd,
    /// The service is to end.
    stopping: AtomicU32,
    /// Whether the agent is to hear of something else than a change of state.
    news: AtomicBool,
    /// Workers that served, since the port was made.
    pub opened: AtomicU64,
    /// Workers that ended or refused before their application did.
    pub lost: AtomicU64,
    /// Buffers and images whose contents have followed their application.
    pub followed: Followed,
}

/// How many buffers and images have had their contents follow their applications, which had gone on before.
pub type Followed = Arc<AtomicU64>;

impl Slices {
    /// So many slices, all free.
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

    /// How many there are.
    pub fn count(&self) -> u32 {
        // At most MOST_SLICES.
        self.states.len() as u32
    }

    /// The state of a slice as a register's value; zero if there is no such slice.
    pub fn number(&self, slice: usize) -> u32 {
        self.states
            .get(slice)
            .map_or(0, |state| state.load(Ordering::Acquire))
    }

    /// The state of a slice.
    pub fn get(&self, slice: usize) -> State {
        // Nothing else is ever stored.
        State::from_number(self.number(slice)).unwrap_or(State::Free)
    }

    /// What the guest says of a slice's application. It may name another owner at any time: this is read
    /// once for each worker.
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

    /// Notes what is said of a slice's application.
    pub fn set_claim(&self, slice: usize, claim: Claim) {
        self.set_owner(slice, claim.owner);
        if let Some(api) = self.apis.get(slice) {
            api.store(claim.api, Ordering::Release);
        }
    }

    /// Notes what the guest says of which API the next application of a free slice calls. That of one which
    /// has a worker is what workers that take it up are told.
    pub fn set_api(&self, slice: usize, number: u32) {
        let _not_opened_meanwhile = self.opening.lock_unpoisoned();
        if let Some(api) = self.apis.get(slice)
            && self.get(slice) == State::Free
        {
            api.store(number, Ordering::Release);
        }
    }

    /// Notes what the guest says of whose application a slice is for.
    pub fn set_owner(&self, slice: usize, number: u32) {
        if let Some(owner) = self.owners.get(slice) {
            owner.store(number, Ordering::Release);
        }
    }

    /// How often a state has changed.
    pub fn changes(&self) -> u32 {
        self.changes.load(Ordering::Acquire)
    }

    /// Slices that are not free.
    pub fn in_use(&self) -> usize {
        (0..self.states.len())
            .filter(|&slice| self.get(slice) != State::Free)
            .count()
    }

    /// Takes over what was saved, before the guest runs. What is no state is an ended one.
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

    /// A change of state, if the slice is still in the state `from`.
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

    /// A command of the guest. Numbers that are none, and commands that do not fit the state, do
    /// nothing.
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

    /// The worker of an open slice is gone.
    pub fn lose(&self, slice: usize) {
        if self.change(slice, State::Open, State::Ended) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        self.wake();
    }

    /// Closes all slices.
    pub fn close_all(&self) {
        for slice in 0..self.states.len() {
            // Between two looks the service may take a step that the first one missed; there are
            // two such steps.
            let _ = self.close(slice) || self.close(slice) || self.close(slice);
        }
        self.wake();
    }

    /// Has the agent look, as if a state had changed.
    pub fn tell(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.news.store(true, Ordering::Release);
        self.wake();
    }

    /// Whether the agent is to be told to look, once.
    pub fn take_news(&self) -> bool {
        self.news.swap(false, Ordering::AcqRel)
    }

    /// Has the service end.
    pub fn stop(&self) {
        self.stopping.store(1, Ordering::Release);
        self.wake();
    }

    /// Whether the service is to end.
    pub fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire) != 0
    }

    /// Has the service look at what there is to wait for.
    pub fn wake(&self) {
        // Fails only if the counter is full: then the service is awake.
        let _ = self.kick.write(1);
    }
}
