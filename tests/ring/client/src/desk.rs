//! A part of a guest's memory that its host reads and writes without exits, interrupts or devices.

use core::{
    fmt,
    ops::Range,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use remoting_proto::wire::api::ApiId;

/// Guest-physical address of the desk.
pub const ADDRESS: u64 = 0x10_0000;
/// Size of the text in bytes.
pub const TEXT: usize = 32 << 10;
/// The memory, of `size` MiB, that a migrated guest fills before it computes.
pub const fn filled(size: u32) -> Range<u64> {
    const START: u64 = 256 << 20;
    START..START + ((size as u64) << 20)
}

/// What the guest is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// It has not begun.
    Start = 0,
    /// It waits for [`Orders`].
    Waiting = 1,
    /// The next series of calls is counted; it waits for another order.
    Ready = 2,
    /// The counted series of calls is over; it waits for another order.
    Counted = 3,
    /// It has ended successfully.
    Done = 4,
    /// It has failed; the last line of the text says why.
    Failed = 5,
}

/// What the guest is ordered to do; the first orders say how it maps the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Orders {
    /// No order yet.
    None = 0,
    /// Write-combining, as a stock Linux maps it for its programs.
    Combining = 1,
    /// Cached, like RAM.
    Cached = 2,
    /// Cached, and then computes round after round on as much of the device's memory as the desk
    /// says.
    Rounds = 3,
    /// Ends the rounds, and checks the results.
    Check = 4,
}

/// Rounds that the guest has computed since it was last told to continue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rounds {
    /// Number of the order to continue that the rounds follow.
    pub since: u32,
    /// Number of rounds.
    pub count: u64,
    /// Their duration in counts of the time-stamp counter.
    pub counts: u64,
    /// Duration of the longest round in the same counts.
    pub longest: u64,
}

/// The desk. The host writes `orders`, `go`, `size`, `filled` and `api`, the guest everything else.
#[repr(C)]
#[derive(Debug)]
pub struct Desk {
    state: AtomicU32,
    orders: AtomicU32,
    /// How often the guest was told to continue.
    go: AtomicU32,
    /// Size in MiB of the device memory on which it computes rounds.
    size: AtomicU32,
    /// Size in MiB of its own memory that it fills first.
    filled: AtomicU32,
    /// The number of the API that it calls.
    api: AtomicU32,
    /// [`Rounds`], stored one number at a time.
    since: AtomicU32,
    count: AtomicU64,
    counts: AtomicU64,
    longest: AtomicU64,
    /// Valid length of the text in bytes.
    length: AtomicU32,
    text: [AtomicU64; TEXT / 8],
}

impl Desk {
    /// A desk of a guest that has not begun.
    #[allow(clippy::new_without_default)] // Must be one for a static.
    pub const fn new() -> Self {
        Self {
            state: AtomicU32::new(0),
            orders: AtomicU32::new(0),
            go: AtomicU32::new(0),
            size: AtomicU32::new(0),
            filled: AtomicU32::new(0),
            api: AtomicU32::new(0),
            since: AtomicU32::new(0),
            count: AtomicU64::new(0),
            counts: AtomicU64::new(0),
            longest: AtomicU64::new(0),
            length: AtomicU32::new(0),
            text: [const { AtomicU64::new(0) }; TEXT / 8],
        }
    }

    /// The guest's state, or [`State::Failed`] if the value is invalid.
    pub fn state(&self) -> State {
        let states = [
            State::Start,
            State::Waiting,
            State::Ready,
            State::Counted,
            State::Done,
        ];
        let number = self.state.load(Ordering::Acquire);
        let known = states.into_iter().find(|state| *state as u32 == number);
        known.unwrap_or(State::Failed)
    }

    /// Says what the guest is doing.
    pub fn enter(&self, state: State) {
        self.state.store(state as u32, Ordering::Release);
    }

    /// Orders the guest to begin.
    pub fn order(&self, orders: Orders) {
        self.orders.store(orders as u32, Ordering::Release);
    }

    /// The current order.
    pub fn orders(&self) -> Orders {
        match self.orders.load(Ordering::Acquire) {
            0 => Orders::None,
            1 => Orders::Combining,
            3 => Orders::Rounds,
            4 => Orders::Check,
            _ => Orders::Cached,
        }
    }

    /// Orders the guest to begin with the calls of an API.
    pub fn order_calls(&self, api: ApiId, orders: Orders) {
        self.api.store(api.number(), Ordering::Relaxed);
        self.order(orders);
    }

    /// The API that the guest was told to call.
    pub fn api(&self) -> ApiId {
        ApiId::from_number(self.api.load(Ordering::Relaxed)).unwrap_or_default()
    }

    /// Orders the guest to fill `filled` MiB of its memory and to begin computing rounds on `size`
    /// MiB.
    pub fn order_rounds(&self, size: u32, filled: u32) {
        self.size.store(size, Ordering::Relaxed);
        self.filled.store(filled, Ordering::Relaxed);
        self.order(Orders::Rounds);
    }

    /// Size in MiB on which the guest was told to compute rounds.
    pub fn size(&self) -> u32 {
        self.size.load(Ordering::Relaxed)
    }

    /// The part of its memory that it was told to fill first.
    pub fn filled(&self) -> Range<u64> {
        filled(self.filled.load(Ordering::Relaxed))
    }

    /// What the guest last published about its rounds.
    pub fn rounds(&self) -> Rounds {
        Rounds {
            since: self.since.load(Ordering::Acquire),
            count: self.count.load(Ordering::Relaxed),
            counts: self.counts.load(Ordering::Relaxed),
            longest: self.longest.load(Ordering::Relaxed),
        }
    }

    /// Publishes the rounds.
    pub fn say(&self, rounds: Rounds) {
        self.count.store(rounds.count, Ordering::Relaxed);
        self.counts.store(rounds.counts, Ordering::Relaxed);
        self.longest.store(rounds.longest, Ordering::Relaxed);
        self.since.store(rounds.since, Ordering::Release);
    }

    /// Tells the guest to continue.
    pub fn go(&self) {
        self.go.fetch_add(1, Ordering::Release);
    }

    /// How often the guest was told to continue.
    pub fn gone(&self) -> u32 {
        self.go.load(Ordering::Acquire)
    }

    /// The text so far, byte by byte.
    pub fn text(&self) -> impl Iterator<Item = u8> {
        let length = self.length.load(Ordering::Acquire) as usize;
        let words = self.text.iter();
        let bytes = words.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes());
        bytes.take(length)
    }
}

/// Appends to the text. What does not fit is dropped.
pub struct Pen<'a>(pub &'a Desk);

impl fmt::Write for Pen<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut at = self.0.length.load(Ordering::Relaxed) as usize;
        for byte in text.bytes() {
            let Some(word) = self.0.text.get(at / 8) else {
                break;
            };
            let old = word.load(Ordering::Relaxed);
            word.store(old | u64::from(byte) << (at % 8 * 8), Ordering::Relaxed);
            at += 1;
        }
        self.0.length.store(at as u32, Ordering::Release);
        Ok(())
    }
}
