//! Branches of the driver, each with its tables.

use crate::{
    field::Block,
    tables::{self, Uvm, r580},
};

/// A branch of the driver that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Branch {
    /// 580.
    R580,
}

impl Branch {
    /// The branch of a version such as `580.159.04`, if it is known.
    #[must_use]
    pub fn of_version(version: &str) -> Option<Self> {
        let mut parts = version.split('.');
        let major = parts.next()?;
        let digits =
            |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        if parts.clone().count() == 0 || !parts.all(digits) {
            return None;
        }
        match major {
            "580" => Some(Self::R580),
            _ => None,
        }
    }

    /// Its number.
    #[must_use]
    pub fn number(self) -> u16 {
        match self {
            Self::R580 => 580,
        }
    }

    pub(crate) fn controls(self) -> &'static [Block] {
        match self {
            Self::R580 => r580::CONTROLS,
        }
    }

    pub(crate) fn classes(self) -> &'static [Block] {
        match self {
            Self::R580 => r580::CLASSES,
        }
    }

    pub(crate) fn uvm(self) -> &'static [Uvm] {
        match self {
            Self::R580 => r580::UVM,
        }
    }

    /// The command words that are allowed on files of either kind, in no order: for a filter of system calls.
    pub fn commands(self) -> impl Iterator<Item = u32> {
        let escapes = tables::ESCAPES.iter().map(tables::Escape::command);
        escapes.chain(self.uvm().iter().map(|command| command.block.number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_version_of_a_known_branch_counts() {
        assert_eq!(Branch::of_version("580.159.04"), Some(Branch::R580));
        for other in [
            "",
            "580",
            "580.",
            "580.x",
            "580.159.",
            "5800.1",
            "581.1",
            "595.45.04",
        ] {
            assert_eq!(Branch::of_version(other), None, "{other}");
        }
    }
}
