//! Validation of configurations that parse but may still be invalid.

/// An invalid value in a configuration.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{place}: {problem}")]
pub struct Invalid {
    place: String,
    problem: Problem,
}

/// What is wrong with a value, and what would be valid.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Problem {
    /// Gantry does not support it.
    #[error("not supported by Gantry: {what}; {advice}")]
    Unsupported {
        /// The feature.
        what: &'static str,
        /// What to do instead.
        advice: &'static str,
    },
    /// A required value is missing.
    #[error("is missing; {0}")]
    Missing(&'static str),
    /// A number is out of range.
    #[error("{value} is not between {min} and {max}")]
    Range {
        /// The number.
        value: u64,
        /// Minimum.
        min: u64,
        /// Maximum.
        max: u64,
    },
    /// A number does not have the required form.
    #[error("{value} is not {expected}")]
    Number {
        /// The number.
        value: u64,
        /// The required form.
        expected: &'static str,
    },
    /// A text does not have the required form.
    #[error("'{value}' is not {expected}")]
    Text {
        /// The text.
        value: String,
        /// The required form.
        expected: &'static str,
    },
    /// Another device or zone has the same name or location.
    #[error("{what} is already taken by {other}")]
    Taken {
        /// The name or location.
        what: String,
        /// The one that has it.
        other: String,
    },
    /// A reference to a name that does not exist.
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
    /// Adds the location: a path in the JSON form.
    pub(super) fn at(self, place: impl Into<String>) -> Invalid {
        Invalid {
            place: place.into(),
            problem: self,
        }
    }
}

impl Invalid {
    /// The location: a path in the JSON form, such as `disks[0].num_queues`.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// The problem.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Prefixes the location with the enclosing `place`.
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

/// Checks a queue's length: a power of two up to 32768 (virtio 1.2, 2.7).
pub(super) fn queue_size(value: u16) -> Result<(), Invalid> {
    let valid = value.is_power_of_two() && value >= 2;
    number(
        "queue_size",
        value,
        valid,
        "a power of two between 2 and 32768",
    )
}

/// Whether a number is omitted when it is serialized.
#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde hands the field over like this"
)]
pub(super) fn is_zero(number: &u8) -> bool {
    *number == 0
}

/// Name and location of a PCI device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Placement<'a> {
    /// Its name, if it has one already.
    pub id: Option<&'a str>,
    /// PCI segment.
    pub segment: u16,
    /// The root port behind which it is located.
    pub parent: Option<&'a str>,
    /// Slot; if absent, the machine chooses one.
    pub device: Option<u8>,
    /// Function number within the slot.
    pub function: u8,
    /// It is configured to be behind a virtual IOMMU, which this kind of device does not support.
    pub iommu: bool,
}

impl Placement<'_> {
    /// Checks that such a location can exist.
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
            // There is only one slot behind a root port.
            (Some(_), device) => range("pci_device_id", device.unwrap_or(0), 0, 0),
            (None, Some(device)) => range("pci_device_id", device, 1, 31),
            (None, None) if self.function > 0 => {
                let advice = "say which slot the function is in, or its root port with parent";
                Err(Problem::Missing(advice).at("pci_device_id"))
            }
            (None, None) => Ok(()),
        }
    }

    /// Segment, root port, slot and function, unless the machine chooses them.
    pub fn seat(&self) -> Option<(u16, Option<&str>, u8, u8)> {
        match self.parent {
            // The port's segment applies, so the device's own need not be given.
            Some(parent) => Some((0, Some(parent), 0, self.function)),
            None => Some((self.segment, None, self.device?, self.function)),
        }
    }
}
