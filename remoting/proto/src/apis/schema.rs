//! How an API's requests are declared.

/// Defines all requests of an API: for each a struct, a number, the type of its answer and a
/// decoder; an enum of all of them; and the hash of the whole definition.
macro_rules! calls {
    ($($(#[$meta:meta])* $opcode:literal $name:ident {
        $($(#[$fmeta:meta])* $field:ident: $type:ty,)*
    } -> $answer:ty;)*) => {
        $crate::wire::codec::wire! { $($(#[$meta])* struct $name { $($(#[$fmeta])* $field: $type,)* })* }

        $(impl $crate::wire::messages::Call for $name {
            const OPCODE: u16 = $opcode;
            const NAME: &'static str = stringify!($name);
            type Answer = $answer;
        })*

        /// Any call.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Request {
            $(
                #[doc = concat!("See [`", stringify!($name), "`].")]
                $name($name),
            )*
        }

        impl Request {
            /// The name of the call of number `opcode`.
            pub fn name(opcode: u16) -> &'static str {
                match opcode {
                    $($opcode => stringify!($name),)*
                    _ => "no call",
                }
            }

            /// Reads the call of number `opcode` from all of `bytes`.
            pub fn decode(opcode: u16, bytes: &[u8]) -> Result<Self, $crate::wire::Malformed> {
                match opcode {
                    $($opcode => Ok(Self::$name(<$name as $crate::wire::Wire>::from_bytes(bytes)?)),)*
                    other => Err($crate::wire::Malformed::Tag {
                        what: "Request",
                        tag: u32::from(other),
                    }),
                }
            }
        }

        /// Hash of the definition: of all calls, their answers, and the types that these consist of.
        pub const FINGERPRINT: u64 = {
            use $crate::wire::{Wire, codec::{named, with}, messages::MESSAGES};
            let hash = named("calls");
            $(let hash = with(with(with(hash, $opcode), $name::SHAPE), <$answer as Wire>::SHAPE);)*
            let mut hash = hash;
            let mut at = 0;
            while at < MESSAGES.len() {
                hash = with(hash, MESSAGES[at] as u64);
                at += 1;
            }
            hash
        };
    };
}
pub(crate) use calls;
