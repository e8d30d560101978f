//! What is known of an entry point.

/// A public entry point of an API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryPoint {
    /// The name in source text, which `cuGetProcAddress` is asked for: `cuMemAlloc`.
    pub name: &'static str,
    /// The symbol that a library exports: `cuMemAlloc_v2`.
    pub symbol: &'static str,
    /// The first version with this signature, thousands for the major number: 12040 is 12.4. 0 where
    /// the headers do not say.
    pub since: u32,
    /// Whether programs compiled today get this symbol by the name.
    pub current: bool,
    /// Which default stream it means.
    pub streams: Streams,
    /// Who waits.
    pub class: Class,
    /// Whether it is to be served.
    pub state: State,
    /// What it takes, in order.
    pub parameters: &'static [Parameter],
}

/// Which stream an entry point means where it is given none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Streams {
    /// The one that all threads of a context share, which waits for blocking streams.
    Legacy,
    /// One per thread: symbols that end in `_ptds` or `_ptsz`.
    PerThread,
}

/// Who waits for an entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The guest goes on; an error is told later.
    Posted,
    /// The guest waits for the worker's answer.
    Answered,
    /// The guest knows the answer itself.
    Guest,
}

/// Whether an entry point is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Programs that were examined use it.
    Wanted,
    /// It reports that it is not supported.
    Stub,
}

/// A parameter of an entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its name in the header.
    pub name: &'static str,
    /// Its type in Rust.
    pub of: &'static str,
    /// What it means.
    pub rule: Rule,
}

/// What a parameter means, and how many bytes travel for it. Lengths are in elements of the type it
/// points to, bytes where that is `void`: a parameter's name, a product of names and numbers, or words
/// in brackets for what only code can compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// A number, an enumeration or a small structure by value.
    Value,
    /// An object of the API.
    Handle,
    /// An address in device memory: the same on both sides, never followed by either.
    Device,
    /// An address that may be a device's or the host's.
    Unified,
    /// A string that ends in a zero byte.
    Text,
    /// A function of the caller's, or data that only such a function reads.
    Callback,
    /// The caller's memory is read.
    In(&'static str),
    /// The caller's memory is written.
    Out(&'static str),
    /// Both.
    InOut(&'static str),
    /// Nobody has said yet: no side can be made for this entry point.
    Unwritten,
}
