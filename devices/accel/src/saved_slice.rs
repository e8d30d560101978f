//! A slice in the saved state of its port.

use std::io;

use remoting_relocation::{
    archive::{self, Piece},
    blocks::Run,
};
use serde::{Deserialize, Serialize};

use super::slices::{Claim, is_none};

/// A slice that is not free.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct SavedSlice {
    /// Its number.
    pub slice: u32,
    /// Number of its state.
    pub state: u32,
    /// What the guest has declared about its application.
    #[serde(flatten)]
    pub claim: Claim,
    /// Its contents; after rounds, what has changed since the last one.
    pub window: Piece,
    /// Blocks of its contents that have not changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<Run>,
    /// The state saved by its worker, if the slice is open; after rounds, what is new since the
    /// last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<Piece>,
    /// Number of rounds, including this one; 0 in a snapshot.
    #[serde(default, skip_serializing_if = "is_none")]
    pub rounds: u32,
}

/// Checks that no two pieces of these slices overlap in the archive.
///
/// # Errors
/// Two pieces overlap.
pub fn check_pieces<'a>(slices: impl IntoIterator<Item = &'a SavedSlice>) -> io::Result<()> {
    let pieces = slices.into_iter();
    let pieces = pieces.flat_map(|one| [Some(one.window), one.image]);
    archive::check_pieces(pieces.flatten())
}

#[cfg(test)]
mod tests {
    use super::{super::rounds::CopiedPort, *};

    /// Slices of a snapshot, and a round of a migration.
    const SLICES: &str = r#"[{"slice":0,"state":1,"owner":0,"window":{"at":0,"length":65536,"crc32":7}},{"slice":1,"state":3,"owner":1001,"api":1,"window":{"at":65536,"length":65536,"crc32":8},"image":{"at":131072,"length":5,"crc32":9}}]"#;
    const ROUND: &str = r#"{"id":"gpu","slices":[{"slice":1,"state":3,"owner":1001,"window":{"at":0,"length":65536,"crc32":7},"kept":[[0,3],[5,2]],"image":{"at":65536,"length":5,"crc32":9},"rounds":2}]}"#;

    #[test]
    fn what_earlier_versions_have_saved_is_read_and_written_as_it_was() {
        let slices: Vec<SavedSlice> = serde_json::from_str(SLICES).unwrap();
        assert_eq!(serde_json::to_string(&slices).unwrap(), SLICES);
        assert_eq!((slices[1].claim.api, slices[1].rounds), (1, 0));
        let round: CopiedPort = serde_json::from_str(ROUND).unwrap();
        assert_eq!(serde_json::to_string(&round).unwrap(), ROUND);
        assert_eq!(round.slices[0].kept, [(0, 3), (5, 2)]);
    }
}
