//! Libraries above the driver whose calls the worker carries out with the vendor's: cuBLAS and cuBLASLt.
//!
//! Their functions are named by their place among those that are served, which both sides take from the
//! API's definition. Parameters travel as `plan` says, but for the two that take descriptors:
//! [`Matmul`] and [`Heuristic`], whose descriptors are those of [`attributes`](super::attributes).

use cuda_definition::{EntryPoint, State, cublas, cublaslt};

use crate::wire::codec::{Blob, named, wire, with};

/// A library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Library {
    /// `libcublas.so.13`
    Blas,
    /// `libcublasLt.so.13`
    BlasLt,
}

/// What a library's own status becomes in a result, where a `CUresult` may be as well: so much is added.
pub const STATUS: i32 = 100_000;

/// `CUBLAS_STATUS_INVALID_VALUE`, as a result.
pub const INVALID_VALUE: i32 = STATUS + 7;

impl Library {
    /// All, by number.
    pub const ALL: [Self; 2] = [Self::Blas, Self::BlasLt];

    /// The library of a number.
    pub fn numbered(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// Its entry points.
    pub fn entry_points(self) -> &'static [EntryPoint] {
        match self {
            Self::Blas => cublas::ENTRY_POINTS,
            Self::BlasLt => cublaslt::ENTRY_POINTS,
        }
    }

    /// What the loader knows it by.
    pub fn file(self) -> &'static str {
        match self {
            Self::Blas => "libcublas.so.13",
            Self::BlasLt => "libcublasLt.so.13",
        }
    }

    /// Those of its functions that are served, by number.
    pub fn functions(self) -> impl Iterator<Item = &'static EntryPoint> {
        self.entry_points().iter().filter(|entry| is_served(entry))
    }

    /// The number of a function that is served.
    pub fn number(self, symbol: &str) -> Option<u16> {
        let place = self.functions().position(|entry| entry.symbol == symbol)?;
        u16::try_from(place).ok()
    }

    /// The parameters of one of its functions for which another rule holds than the definition has.
    pub fn rules(self, symbol: &str) -> &'static [(&'static str, &'static str)] {
        // Arrays on the device, which the header tells of in a comment.
        let factors = ["getrfBatched", "getriBatched"];
        if self == Self::Blas && factors.iter().any(|name| symbol.ends_with(name)) {
            return &[("info", "Device")];
        }
        &[]
    }
}

/// Whether the worker serves a function.
const fn is_served(entry: &EntryPoint) -> bool {
    matches!(entry.state, State::Wanted)
}

const fn list(mut hash: u64, entries: &[EntryPoint]) -> u64 {
    let mut at = 0;
    while at < entries.len() {
        if is_served(&entries[at]) {
            hash = with(hash, named(entries[at].symbol));
            hash = with(hash, entries[at].parameters.len() as u64);
        }
        at += 1;
    }
    hash
}

wire! {
    /// A number that is read when work begins, or when it is asked for.
    struct Scalar {
        /// The number itself is here, in its first bytes; otherwise its address on the device.
        here: bool,
        /// So many bytes of it as it has, then zeros.
        bytes: [u64; 2],
    }

    /// `cublasLtMatmul`
    struct Matmul {
        /// Handle of cuBLASLt or cuBLAS.
        handle: u32,
        /// Stream.
        stream: u32,
        /// What is computed: attributes.
        operation: Blob,
        /// A's layout: attributes.
        a: Blob,
        /// B's.
        b: Blob,
        /// C's.
        c: Blob,
        /// D's.
        d: Blob,
        /// Factor of the product.
        alpha: Scalar,
        /// Factor of C.
        beta: Scalar,
        /// Where A, B, C and D are.
        matrices: [u64; 4],
        /// The algorithm, as a heuristic has given it; none if it is empty.
        algorithm: Blob,
        /// Where the workspace is, and its size.
        workspace: (u64, u64),
    }

    /// `cublasLtMatmulAlgoGetHeuristic`: results, 96 bytes each.
    struct Heuristic {
        /// Handle of cuBLASLt or cuBLAS.
        handle: u32,
        /// What is computed: attributes.
        operation: Blob,
        /// A's layout: attributes.
        a: Blob,
        /// B's.
        b: Blob,
        /// C's.
        c: Blob,
        /// D's.
        d: Blob,
        /// Which are preferred: attributes.
        preference: Blob,
        /// How many are wanted.
        count: u32,
    }
}

/// Hash of what is said to libraries.
pub const FINGERPRINT: u64 = {
    use crate::wire::codec::Wire;
    let hash = list(named("libraries"), cublas::ENTRY_POINTS);
    let hash = list(hash, cublaslt::ENTRY_POINTS);
    let hash = with(with(hash, Matmul::SHAPE), Heuristic::SHAPE);
    with(hash, super::attributes::FINGERPRINT)
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_have_the_numbers_of_their_places() {
        for library in Library::ALL {
            for (place, entry) in library.functions().enumerate() {
                assert_eq!(library.number(entry.symbol), Some(place as u16));
            }
        }
        assert_eq!(Library::Blas.number("cublasXtCreate"), None);
        assert_eq!(Library::numbered(2), None);
    }
}
