//! A page of a guest's memory that its host looks at: no exit, no interrupt, no device.

use core::{
    fmt,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

/// Guest-physical address of the desk.
pub const ADDRESS: u64 = 0x10_0000;
/// Bytes of the text.
pub const TEXT: usize = 32 << 10;

/// What the guest is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// It has not begun.
    Start = 0,
    /// It waits for [`Orders`].
    Waiting = 1,
    /// The stretch that is counted comes next; it waits for another order.
    Ready = 2,
    /// The stretch that was counted is over; it waits for another order.
    Counted = 3,
    /// It has ended well.
    Done = 4,
    /// It has failed; the last line of the text says why.
    Failed = 5,
}

/// How the guest maps the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Orders {
    /// Nothing was ordered yet.
    None = 0,
    /// Write-combining, as a stock Linux maps it for its programs.
    Combining = 1,
    /// With caches, as RAM.
    Cached = 2,
}

/// The page. The host writes `orders` and `go`, the guest everything else.
#[repr(C)]
#[derive(Debug)]
pub struct Desk {
    state: AtomicU32,
    orders: AtomicU32,
    /// How often the guest was told to go on.
    go: AtomicU32,
    /// Bytes of the text that are valid.
    length: AtomicU32,
    text: [AtomicU64; TEXT / 8],
}

impl Desk {
    /// One of a guest that has not begun.
    #[allow(clippy::new_without_default)] // Must be one for a static.
    pub const fn new() -> Self {
        Self {
            state: AtomicU32::new(0),
            orders: AtomicU32::new(0),
            go: AtomicU32::new(0),
            length: AtomicU32::new(0),
            text: [const { AtomicU64::new(0) }; TEXT / 8],
        }
    }

    /// The guest's state; [`State::Failed`] if it is none.
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

    /// Has the guest begin.
    pub fn order(&self, orders: Orders) {
        self.orders.store(orders as u32, Ordering::Release);
    }

    /// What was ordered.
    pub fn orders(&self) -> Orders {
        match self.orders.load(Ordering::Acquire) {
            0 => Orders::None,
            1 => Orders::Combining,
            _ => Orders::Cached,
        }
    }

    /// Has the guest go on.
    pub fn go(&self) {
        self.go.fetch_add(1, Ordering::Release);
    }

    /// How often it was told to.
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

/// Appends to the text; what does not fit is left out.
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
