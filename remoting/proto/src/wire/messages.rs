//! Messages that a worker sends without a request of exactly this kind, and the names that they use. They are the same
//! for every API.

use super::codec::{Wire, wire};

/// A request from a driver in a guest to a worker.
pub trait Call: Wire {
    /// Its number.
    const OPCODE: u16;
    /// Its name.
    const NAME: &'static str;
    /// What the answer carries if the call succeeds.
    type Answer: Wire;
}

/// Defines the numbers by which a client names objects, a type for each kind.
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
    /// Identifies a command, so that its completion can be told.
    EventId
    /// Identifies a range of the window that a command uses. The range belongs to the client again once the worker has
    /// sent [`RELEASED`].
    StageId
}

wire! {
    /// A range of the window, and the stage whose release the client waits for.
    struct WindowRange {
        /// Bytes from the start of the window.
        offset: u64,
        /// Length in bytes.
        length: u64,
        /// The stage that the worker releases when the command has completed.
        stage: Option<StageId>,
    }
}

/// Number of an answer.
pub const ANSWER: u16 = 1;
/// Number of the message that says that the command that uses a stage has completed.
pub const RELEASED: u16 = 2;
/// Number of the message that asks the client to run a callback.
pub const CALLBACK: u16 = 3;
/// Number of the message that reports an error that no answer reports: the number of the object that it concerns, and a
/// text.
pub const REPORT: u16 = 4;

/// Number of a frame that carries a part of the window over a stream. Its sequence number is the part's offset.
pub const DATA: u16 = 5;
/// Number of the message that carries the output that kernels have printed. It is sent before the answer to the request
/// that waited for the kernels.
pub const PRINTED: u16 = 6;
/// Number of the message that says that the worker is still processing the state that its client has brought, and has
/// had processor time for it.
pub const WORKS: u16 = 7;

/// All messages that are not calls.
pub const MESSAGES: [u16; 7] = [ANSWER, RELEASED, CALLBACK, REPORT, DATA, PRINTED, WORKS];

// The numbers are distinct.
const _: () = {
    let mut at = 1;
    while at < MESSAGES.len() {
        assert!(MESSAGES[at - 1] < MESSAGES[at]);
        at += 1;
    }
};
