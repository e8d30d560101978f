//! How values are encoded as bytes: little-endian, fixed sizes, a count before each list.
//!
//! Decoding is total: any bytes yield a value or [`Malformed`], never a panic, and never an
//! allocation larger than a small multiple of the bytes present.

use alloc::vec::Vec;

/// Bytes that do not encode a value of the expected type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The bytes end before the value does.
    #[error("the message ends {missing} bytes before its value does")]
    Short {
        /// The minimum number of further bytes that were needed.
        missing: usize,
    },
    /// Bytes are left after the value.
    #[error("{0} bytes follow the end of the message")]
    Trailing(usize),
    /// A tag that stands for no variant.
    #[error("{what} has no variant {tag}")]
    Tag {
        /// The type.
        what: &'static str,
        /// The tag.
        tag: u32,
    },
}

/// A cursor over bytes that were copied out of shared memory.
#[derive(Debug)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Reads from the start of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The next `count` bytes.
    #[inline]
    pub fn bytes(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.0.split_at_checked(count).ok_or(Malformed::Short {
            missing: count - self.0.len().min(count),
        })?;
        self.0 = rest;
        Ok(head)
    }

    /// The next `N` bytes.
    #[inline]
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, rest) = self.0.split_first_chunk().ok_or(Malformed::Short {
            missing: N - self.0.len().min(N),
        })?;
        self.0 = rest;
        Ok(*head)
    }

    /// The number of bytes left.
    pub fn left(&self) -> usize {
        self.0.len()
    }

    /// Checks that nothing is left.
    pub fn end(self) -> Result<(), Malformed> {
        match self.0.len() {
            0 => Ok(()),
            left => Err(Malformed::Trailing(left)),
        }
    }
}

/// The FNV-1a hash of a name. [`with`] adds further parts to it.
pub const fn named(name: &str) -> u64 {
    let bytes = name.as_bytes();
    let mut hash = 0xcbf2_9ce4_8422_2325;
    let mut at = 0;
    while at < bytes.len() {
        hash = step(hash, bytes[at]);
        at += 1;
    }
    hash
}

/// Extends a hash by the bytes of another hash or of a number.
pub const fn with(mut hash: u64, part: u64) -> u64 {
    let bytes = part.to_le_bytes();
    let mut at = 0;
    while at < bytes.len() {
        hash = step(hash, bytes[at]);
        at += 1;
    }
    hash
}

const fn step(hash: u64, byte: u8) -> u64 {
    (hash ^ byte as u64).wrapping_mul(0x0000_0100_0000_01b3)
}

/// A value that can be sent over the wire.
pub trait Wire: Sized {
    /// A hash of the encoding, down to the types that the value consists of.
    const SHAPE: u64;

    /// Appends the value's bytes.
    fn put(&self, out: &mut Vec<u8>);
    /// Reads a value.
    fn take(reader: &mut Reader<'_>) -> Result<Self, Malformed>;

    /// Reads a value that takes up all of `bytes`.
    fn from_bytes(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let value = Self::take(&mut reader)?;
        reader.end()?;
        Ok(value)
    }
}

macro_rules! integers {
    ($($int:ty)*) => {$(
        impl Wire for $int {
            const SHAPE: u64 = named(stringify!($int));

            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }

            #[inline]
            fn take(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
                Ok(Self::from_le_bytes(reader.array()?))
            }
        }
    )*};
}

integers!(u8 u16 u32 u64 i32);

impl Wire for () {
    const SHAPE: u64 = named("()");

    fn put(&self, _: &mut Vec<u8>) {}

    fn take(_: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(())
    }
}

impl Wire for bool {
    const SHAPE: u64 = named("bool");

    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(u8::take(reader)? != 0)
    }
}

impl<T: Wire + Copy + Default, const N: usize> Wire for [T; N] {
    const SHAPE: u64 = with(with(named("array"), N as u64), T::SHAPE);

    fn put(&self, out: &mut Vec<u8>) {
        self.iter().for_each(|item| item.put(out));
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let mut array = [T::default(); N];
        for item in &mut array {
            *item = T::take(reader)?;
        }
        Ok(array)
    }
}

impl<T: Wire> Wire for Option<T> {
    const SHAPE: u64 = with(named("Option"), T::SHAPE);

    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(if bool::take(reader)? {
            Some(T::take(reader)?)
        } else {
            None
        })
    }
}

impl<T: Wire> Wire for Vec<T> {
    const SHAPE: u64 = with(named("Vec"), T::SHAPE);

    fn put(&self, out: &mut Vec<u8>) {
        // A list is bounded by the largest message, far below 2^32 items.
        (self.len() as u32).put(out);
        self.iter().for_each(|item| item.put(out));
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let count = u32::take(reader)? as usize;
        // Each item takes at least one byte, so the count cannot ask for more items (and more memory)
        // than the message has bytes.
        if count > reader.left() {
            return Err(Malformed::Short {
                missing: count - reader.left(),
            });
        }
        let mut list = Self::with_capacity(count);
        for _ in 0..count {
            list.push(T::take(reader)?);
        }
        Ok(list)
    }
}

/// Bytes that are sent as one block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Blob(pub Vec<u8>);

impl Wire for Blob {
    const SHAPE: u64 = named("Blob");

    fn put(&self, out: &mut Vec<u8>) {
        (self.0.len() as u32).put(out);
        out.extend_from_slice(&self.0);
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let count = u32::take(reader)? as usize;
        Ok(Self(reader.bytes(count)?.to_vec()))
    }
}

impl<A: Wire, B: Wire> Wire for (A, B) {
    const SHAPE: u64 = with(with(named("pair"), A::SHAPE), B::SHAPE);

    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok((A::take(reader)?, B::take(reader)?))
    }
}

impl<T: Wire> Wire for Result<T, i32> {
    const SHAPE: u64 = with(named("Result"), T::SHAPE);

    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Ok(value) => {
                0i32.put(out);
                value.put(out);
            }
            Err(code) => code.put(out),
        }
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        match i32::take(reader)? {
            0 => Ok(Ok(T::take(reader)?)),
            code => Ok(Err(code)),
        }
    }
}

/// Extends a hash by a field's name and shape.
#[doc(hidden)]
#[macro_export]
macro_rules! __field {
    ($hash:expr, $name:ident, $type:ty) => {{
        use $crate::wire::codec::{Wire, named, with};
        with(
            with($hash, named(stringify!($name))),
            <$type as Wire>::SHAPE,
        )
    }};
}
#[doc(hidden)]
pub use __field as field;

/// Declares structs and enums that can be sent: fields are encoded in the order of their
/// declaration, and a variant's number before its fields.
#[doc(hidden)]
#[macro_export]
macro_rules! __wire {
    ($($(#[$meta:meta])* struct $name:ident { $($(#[$fmeta:meta])* $field:ident: $type:ty,)* })*) => {$(
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name { $($(#[$fmeta])* pub $field: $type,)* }

        impl $crate::wire::codec::Wire for $name {
            const SHAPE: u64 = {
                let shape = $crate::wire::codec::named(stringify!($name));
                $(let shape = $crate::wire::codec::field!(shape, $field, $type);)*
                shape
            };

            #[allow(unused_variables)]
            fn put(&self, out: &mut $crate::alloc::vec::Vec<u8>) {
                $($crate::wire::codec::Wire::put(&self.$field, out);)*
            }

            #[allow(unused_variables)]
            fn take(
                reader: &mut $crate::wire::codec::Reader<'_>,
            ) -> Result<Self, $crate::wire::codec::Malformed> {
                Ok(Self { $($field: $crate::wire::codec::Wire::take(reader)?,)* })
            }
        }
    )*};
    (enum $(#[$meta:meta])* $name:ident {
        $($(#[$vmeta:meta])* $tag:literal $variant:ident($($(#[$fmeta:meta])* $field:ident: $type:ty),*),)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq)]
        pub enum $name { $($(#[$vmeta])* $variant($($type),*),)* }

        impl $crate::wire::codec::Wire for $name {
            const SHAPE: u64 = {
                let shape = $crate::wire::codec::named(stringify!($name));
                $(
                    let shape = $crate::wire::codec::with(shape, $tag);
                    $(let shape = $crate::wire::codec::field!(shape, $field, $type);)*
                )*
                shape
            };

            fn put(&self, out: &mut $crate::alloc::vec::Vec<u8>) {
                match self {
                    $(Self::$variant($($field),*) => {
                        out.push($tag);
                        $($crate::wire::codec::Wire::put($field, out);)*
                    })*
                }
            }

            fn take(
                reader: &mut $crate::wire::codec::Reader<'_>,
            ) -> Result<Self, $crate::wire::codec::Malformed> {
                match u8::take(reader)? {
                    $($tag => Ok(Self::$variant($(<$type as $crate::wire::codec::Wire>::take(reader)?),*)),)*
                    tag => Err($crate::wire::codec::Malformed::Tag {
                        what: stringify!($name),
                        tag: u32::from(tag),
                    }),
                }
            }
        }
    };
}
pub use __wire as wire;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_count_larger_than_the_message_is_refused_before_memory_is_taken() {
        let bytes = u32::MAX.to_le_bytes();
        assert!(matches!(
            Vec::<u64>::from_bytes(&bytes),
            Err(Malformed::Short { .. })
        ));
        assert!(matches!(
            Blob::from_bytes(&bytes),
            Err(Malformed::Short { .. })
        ));
    }

    #[test]
    fn another_form_is_another_shape_however_deep_it_is() {
        mod one {
            crate::wire::codec::wire! { struct Inner { a: u32, b: u32, } struct Outer { list: Vec<Inner>, } }
            crate::wire::codec::wire! { enum Choice { 1 First(a: u32), 2 Second(b: u32), } }
        }
        mod other {
            crate::wire::codec::wire! { struct Inner { b: u32, a: u32, } struct Outer { list: Vec<Inner>, } }
            crate::wire::codec::wire! { enum Choice { 2 First(a: u32), 1 Second(b: u32), } }
        }
        mod same {
            crate::wire::codec::wire! { struct Inner { a: u32, b: u32, } struct Outer { list: Vec<Inner>, } }
        }
        assert_ne!(one::Outer::SHAPE, other::Outer::SHAPE);
        assert_eq!(one::Outer::SHAPE, same::Outer::SHAPE);
        assert_ne!(one::Choice::SHAPE, other::Choice::SHAPE);
        let shapes = [
            <[u64; 3]>::SHAPE,
            <[u64; 2]>::SHAPE,
            <(u32, u64)>::SHAPE,
            <(u64, u32)>::SHAPE,
            Vec::<u8>::SHAPE,
            Option::<u8>::SHAPE,
            Blob::SHAPE,
        ];
        for (index, shape) in shapes.iter().enumerate() {
            assert!(!shapes[..index].contains(shape), "{index}");
        }
    }

    #[test]
    fn bytes_after_the_value_are_refused() {
        assert_eq!(u16::from_bytes(&[1, 0, 9]), Err(Malformed::Trailing(1)));
    }

    proptest! {
        #[test]
        fn what_was_put_is_taken(
            list in prop::collection::vec(any::<u64>(), 0..40),
            number: Option<i32>,
            bytes in prop::collection::vec(any::<u8>(), 0..100),
        ) {
            let value = ((list, number), Blob(bytes));
            let mut out = Vec::new();
            value.put(&mut out);
            prop_assert_eq!(Wire::from_bytes(&out), Ok(value));
        }
    }
}
