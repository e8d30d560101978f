//! What a configuration that parses can still have wrong.

/// A value of the configuration that the machine cannot be built with.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{place}: {problem}")]
pub struct Invalid {
    place: String,
    problem: Problem,
}

/// What is wrong with a value, and what would be right.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Problem {
    /// Gantry does not have it.
    #[error("not supported by Gantry: {what}; {advice}")]
    Unsupported {
        /// The feature.
        what: &'static str,
        /// What to do instead.
        advice: &'static str,
    },
    /// It has to be there.
    #[error("is missing; {0}")]
    Missing(&'static str),
    /// A number is too small or too large.
    #[error("{value} is not between {min} and {max}")]
    Range {
        /// The number.
        value: u64,
        /// Smallest allowed.
        min: u64,
        /// Largest allowed.
        max: u64,
    },
    /// A number is not of the form that it has to be.
    #[error("{value} is not {expected}")]
    Number {
        /// The number.
        value: u64,
        /// What would be right.
        expected: &'static str,
    },
    /// A text is not of the form that it has to be.
    #[error("'{value}' is not {expected}")]
    Text {
        /// The text.
        value: String,
        /// What would be right.
        expected: &'static str,
    },
    /// Another device or zone has the same name or place.
    #[error("{what} is already taken by {other}")]
    Taken {
        /// The name or place.
        what: String,
        /// Who has it.
        other: String,
    },
    /// A name that nothing has.
    #[error("there is no {what} '{name}'")]
    Unknown {
        /// Kind of thing.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// Two settings exclude each other.
    #[error("cannot go together with {with}; {advice}")]
    Conflict {
        /// The other setting.
        with: &'static str,
        /// What to do.
        advice: &'static str,
    },
}

impl Problem {
    /// With the place where it is: a path in the JSON form.
    pub(super) fn at(self, place: impl Into<String>) -> Invalid {
        Invalid {
            place: place.into(),
            problem: self,
        }
    }
}

impl Invalid {
    /// Where: a path in the JSON form, `disks[0].num_queues`.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// What.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The same, seen from further out.
    #[must_use]
    pub(super) fn within(mut self, place: &str) -> Self {
        self.place = match self.place.as_str() {
            "" => place.to_owned(),
            inner => format!("{place}.{inner}"),
        };
        self
    }
}

/// Fails with "not supported" if `wanted`.
pub(super) fn unsupported(
    wanted: bool,
    place: &str,
    what: &'static str,
    advice: &'static str,
) -> Result<(), Invalid> {
    if wanted {
        Err(Problem::Unsupported { what, advice }.at(place))
    } else {
        Ok(())
    }
}

/// Fails unless `min <= value <= max`.
pub(super) fn range(place: &str, value: impl Into<u64>, min: u64, max: u64) -> Result<(), Invalid> {
    let value = value.into();
    if (min..=max).contains(&value) {
        Ok(())
    } else {
        Err(Problem::Range { value, min, max }.at(place))
    }
}

/// Fails unless `valid`.
pub(super) fn number(
    place: &str,
    value: impl Into<u64>,
    valid: bool,
    expected: &'static str,
) -> Result<(), Invalid> {
    if valid {
        Ok(())
    } else {
        let value = value.into();
        Err(Problem::Number { value, expected }.at(place))
    }
}

/// Fails unless `valid`.
pub(super) fn text(
    place: &str,
    value: &str,
    valid: bool,
    expected: &'static str,
) -> Result<(), Invalid> {
    if valid {
        Ok(())
    } else {
        let value = value.to_owned();
        Err(Problem::Text { value, expected }.at(place))
    }
}

/// A queue's length: a power of two up to the 32768 of virtio 1.2, 2.7.
pub(super) fn queue_size(value: u16) -> Result<(), Invalid> {
    let valid = value.is_power_of_two() && value >= 2;
    number(
        "queue_size",
        value,
        valid,
        "a power of two between 2 and 32768",
    )
}

/// Whether a number is left out when it is written.
#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde hands the field over like this"
)]
pub(super) fn is_zero(number: &u8) -> bool {
    *number == 0
}

/// Name and place of a PCI device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Placement<'a> {
    /// Its name, if it has one already.
    pub id: Option<&'a str>,
    /// PCI segment.
    pub segment: u16,
    /// The root port behind which it is.
    pub parent: Option<&'a str>,
    /// Slot, if it is not the machine's to choose.
    pub device: Option<u8>,
    /// Function of the slot.
    pub function: u8,
    /// It is to be behind a virtual IOMMU, where it cannot be.
    pub iommu: bool,
}

impl Placement<'_> {
    /// There can be such a place.
    pub fn validate(&self) -> Result<(), Invalid> {
        unsupported(
            self.iommu,
            "iommu",
            "a virtual IOMMU for what is no physical device: it would keep the VMM, which serves it, \
             from nothing",
            "leave iommu out or off",
        )?;
        if let Some(id) = self.id {
            let valid = !id.is_empty() && !id.starts_with("__") && !id.contains('/');
            text(
                "id",
                id,
                valid,
                "a device name: not empty, without '/', not starting with '__'",
            )?;
        }
        range("pci_function", self.function, 0, 7)?;
        match (self.parent, self.device) {
            // There is one slot.
            (Some(_), device) => range("pci_device_id", device.unwrap_or(0), 0, 0),
            (None, Some(device)) => range("pci_device_id", device, 1, 31),
            (None, None) if self.function > 0 => {
                let advice = "say which slot the function is in, or its root port with parent";
                Err(Problem::Missing(advice).at("pci_device_id"))
            }
            (None, None) => Ok(()),
        }
    }

    /// Segment, root port, slot and function, if they are not the machine's to choose.
    pub fn seat(&self) -> Option<(u16, Option<&str>, u8, u8)> {
        match self.parent {
            // The port has a segment; this one need not be given.
            Some(parent) => Some((0, Some(parent), 0, self.function)),
            None => Some((self.segment, None, self.device?, self.function)),
        }
    }
}
