//! What kinds of sources there are.

/// What is behind a socket. It is the extension of the socket's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// `gantry`.
    Vm,
    /// `gantry-arbiter` or `gantry-gpu`.
    Arbiter,
    /// `gantry-accel serve`.
    Pool,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Vm, Self::Arbiter, Self::Pool];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vm => "vm",
            Self::Arbiter => "arbiter",
            Self::Pool => "pool",
        }
    }

    /// The kind of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}
