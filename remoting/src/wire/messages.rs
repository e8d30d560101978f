//! Messages of a worker that no request has asked for in these words, and what they name: the same
//! for every API.

use super::codec::{Wire, wire};

/// A request: what a driver in a guest asks of a worker.
pub trait Call: Wire {
    /// Its number.
    const OPCODE: u16;
    /// Its name.
    const NAME: &'static str;
    /// What the answer carries if the call succeeds.
    type Answer: Wire;
}

/// Defines numbers by which a client names objects, a type for each kind.
macro_rules! ids {
    ($($(#[$meta:meta])* $name:ident)*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u32);

        impl $crate::wire::codec::Wire for $name {
            const SHAPE: u64 = $crate::wire::codec::named(stringify!($name));

            fn put(&self, out: &mut alloc::vec::Vec<u8>) {
                $crate::wire::codec::Wire::put(&self.0, out);
            }

            fn take(
                reader: &mut $crate::wire::codec::Reader<'_>,
            ) -> Result<Self, $crate::wire::codec::Malformed> {
                <u32 as $crate::wire::codec::Wire>::take(reader).map(Self)
            }
        }
    )*};
}
pub(crate) use ids;

ids! {
    /// What a command's completion is known by.
    EventId
    /// A stretch of the window that a command uses; it is the client's again once the worker
    /// has said so ([`RELEASED`]).
    StageId
}

wire! {
    /// A stretch of the window, and the stage whose release the client waits for.
    struct WindowRange {
        /// Bytes from the start of the window.
        offset: u64,
        /// Length in bytes.
        length: u64,
        /// Whom to tell the client of when the command has completed.
        stage: Option<StageId>,
    }
}

/// Number of an answer.
pub const ANSWER: u16 = 1;
/// Number of the message that says that the command using a stage has completed.
pub const RELEASED: u16 = 2;
/// Number of the message that asks the client to run a callback.
pub const CALLBACK: u16 = 3;
/// Number of the message that tells of an error that no answer tells of: the number of the object
/// that it is about, and a text.
pub const REPORT: u16 = 4;

/// Number of a frame with a part of the window, through a stream: its sequence says where that begins.
pub const DATA: u16 = 5;
/// Number of the message that carries what kernels have printed, before the answer to what waited for
/// them.
pub const PRINTED: u16 = 6;
/// Number of the message that says that the worker has had processor time for the state that its client has brought,
/// and is not done with it.
pub const WORKS: u16 = 7;

/// All messages that are no calls.
pub const MESSAGES: [u16; 7] = [ANSWER, RELEASED, CALLBACK, REPORT, DATA, PRINTED, WORKS];

// Each has a number of its own.
const _: () = {
    let mut at = 1;
    while at < MESSAGES.len() {
        assert!(MESSAGES[at - 1] < MESSAGES[at]);
        at += 1;
    }
};
