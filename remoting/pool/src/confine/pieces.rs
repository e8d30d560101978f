//! The parts of which a worker's confinement consists: which of them a driver does not get along with
//! is found by leaving one out at a time (`gantry-accel probe`).

use std::{fmt, str::FromStr};

/// A part.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Piece {
    /// The limit of the memory that it has of its own.
    Memory,
    /// Which files it may have.
    Landlock,
    /// What root may do.
    Capabilities,
    /// Which system calls it may make.
    Seccomp,
    /// Where its driver puts memory.
    Arena,
    /// Which names of sockets it sees.
    Network,
}

impl Piece {
    /// All, in the order in which they are tried.
    pub const ALL: [Self; 6] = [
        Self::Seccomp,
        Self::Landlock,
        Self::Arena,
        Self::Network,
        Self::Memory,
        Self::Capabilities,
    ];

    /// What it is called on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Landlock => "landlock",
            Self::Capabilities => "capabilities",
            Self::Seccomp => "seccomp",
            Self::Arena => "arena",
            Self::Network => "network",
        }
    }
}

/// Some of them.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Pieces(Vec<Piece>);

impl Pieces {
    /// All of them.
    pub fn all() -> Self {
        Self(Piece::ALL.to_vec())
    }

    /// One.
    pub fn one(piece: Piece) -> Self {
        Self(vec![piece])
    }

    /// Whether this is one of them.
    pub fn has(&self, piece: Piece) -> bool {
        self.0.contains(&piece)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Pieces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.0.iter().map(|piece| piece.name()).collect();
        f.write_str(&names.join(","))
    }
}

impl FromStr for Pieces {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let piece = |name| {
            let found = Piece::ALL.into_iter().find(|piece| piece.name() == name);
            found.ok_or_else(|| {
                let all = Piece::ALL.map(Piece::name).join(", ");
                format!("name some of {all}, with commas between them")
            })
        };
        text.split(',')
            .map(piece)
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_named_as_they_are_printed() {
        let all = Pieces::all();
        assert_eq!(all.to_string().parse(), Ok(all));
        let one: Pieces = "arena".parse().unwrap();
        assert!(one.has(Piece::Arena) && !one.has(Piece::Seccomp));
        assert!("".parse::<Pieces>().is_err() && "arena,none".parse::<Pieces>().is_err());
    }
}
