//! What the fields of a block mean.

/// What a field means, beyond plain data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// A pointer to a list: its number of elements is a `u32` at `count_at` of the same block.
    List {
        /// Where the number of elements is.
        count_at: u16,
        /// Bytes of an element.
        element: u16,
        /// The most elements.
        most: u16,
        /// Whether the elements are handles of the call's client.
        handles: bool,
    },
    /// The number of an open device file, 32 bits. Negative: none.
    File32,
    /// The number of an open device file, 64 bits. Negative: none.
    File64,
    /// The handle of a root client, or 0.
    Client,
    /// The handle of an object, or 0.
    Object {
        /// Where the block names the client of the object. `None`: it belongs to the call's client.
        client_at: Option<u16>,
    },
    /// Handles of objects of the call's client, or 0 each.
    Objects {
        /// How many.
        count: u16,
        /// Where the block says how many of them count (`u16`). `None`: all.
        used_at: Option<u16>,
    },
    /// The handle that a new object gets, or 0 for one that the driver chooses.
    NewObject,
    /// Handles that the call gives to new objects.
    NewObjects {
        /// How many at most.
        count: u16,
        /// Where the block says how many there are (`u16`).
        used_at: u16,
    },
    /// Bytes that the driver reads or writes for itself only, such as addresses of the kernel: it sees zeroes, and
    /// the program sees what it wrote.
    Masked {
        /// How many bytes.
        length: u16,
    },
}

/// A field of a block with a meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its offset in the block.
    pub at: u16,
    /// What it means.
    pub meaning: Meaning,
}

/// A block of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The command, control or class that it belongs to.
    pub number: u32,
    /// Its size in bytes.
    pub size: u32,
    /// Its fields that are not plain data.
    pub fields: &'static [Field],
}

impl Meaning {
    /// How many bytes of the block the field takes.
    #[must_use]
    pub fn width(self) -> usize {
        match self {
            Self::List { .. } | Self::File64 => 8,
            Self::File32 | Self::Client | Self::Object { .. } | Self::NewObject => 4,
            Self::Objects { count, .. } | Self::NewObjects { count, .. } => usize::from(count) * 4,
            Self::Masked { length } => usize::from(length),
        }
    }
}
