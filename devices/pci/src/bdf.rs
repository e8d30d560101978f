//! The address of a PCI function.

use std::{fmt, num::ParseIntError, str::FromStr};

use serde::{Deserialize, Serialize};

/// Number of device slots per bus.
pub const SLOTS: u8 = 32;

/// Location of a function: segment, bus, device (0 to 31) and function (0 to 7).
///
/// Written as `0000:00:03.0`; a missing segment means 0.
#[derive(
    Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, Deserialize,
)]
#[serde(try_from = "String", into = "String")]
pub struct Bdf {
    /// Segment group: the configuration window to which the bus belongs.
    pub segment: u16,
    /// Bus number in the segment.
    pub bus: u8,
    /// Device slot on the bus, 0 to 31.
    pub device: u8,
    /// Function of the device, 0 to 7.
    pub function: u8,
}

/// Why a string is not a PCI address.
#[derive(Debug, thiserror::Error)]
pub enum ParseBdfError {
    /// The separators are missing or misplaced.
    #[error("'{0}' is not a PCI address such as 0000:00:03.0")]
    Shape(String),
    /// A part is not hexadecimal, or too large.
    #[error("'{text}' is not a PCI address such as 0000:00:03.0")]
    Number {
        /// The whole string.
        text: String,
        /// Why the part is invalid.
        source: ParseIntError,
    },
    /// Device above 31 or function above 7.
    #[error("'{0}' names a device above 0x1f or a function above 7")]
    Range(String),
}

impl Bdf {
    /// The function's requester ID: bus, device and function in 16 bits. It does not include the
    /// segment.
    pub fn requester_id(&self) -> u16 {
        u16::from(self.bus) << 8 | u16::from(self.device & 0x1f) << 3 | u16::from(self.function & 7)
    }

    /// The slot of the function, as the address of its function 0.
    pub fn slot(self) -> Self {
        Self {
            function: 0,
            ..self
        }
    }
}

impl fmt::Display for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            segment,
            bus,
            device,
            function,
        } = self;
        write!(f, "{segment:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

impl FromStr for Bdf {
    type Err = ParseBdfError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let shape = || ParseBdfError::Shape(text.to_owned());
        let number = |source| ParseBdfError::Number {
            text: text.to_owned(),
            source,
        };
        let (rest, function) = text.rsplit_once('.').ok_or_else(shape)?;
        let (rest, device) = rest.rsplit_once(':').ok_or_else(shape)?;
        let (segment, bus) = rest.split_once(':').unwrap_or(("0", rest));
        let bdf = Self {
            segment: u16::from_str_radix(segment, 16).map_err(number)?,
            bus: u8::from_str_radix(bus, 16).map_err(number)?,
            device: u8::from_str_radix(device, 16).map_err(number)?,
            function: u8::from_str_radix(function, 16).map_err(number)?,
        };
        if bdf.device >= SLOTS || bdf.function > 7 {
            return Err(ParseBdfError::Range(text.to_owned()));
        }
        Ok(bdf)
    }
}

impl From<Bdf> for String {
    fn from(bdf: Bdf) -> Self {
        bdf.to_string()
    }
}

impl TryFrom<String> for Bdf {
    type Error = ParseBdfError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_survives_being_written_and_read() {
        let bdf: Bdf = "0001:02:1f.7".parse().unwrap();
        assert_eq!(bdf.to_string(), "0001:02:1f.7");
        assert_eq!(bdf.requester_id(), 0x2ff);
        assert_eq!(
            "00:03.0".parse::<Bdf>().unwrap().to_string(),
            "0000:00:03.0"
        );
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for text in [
            "",
            "3",
            "00:20.0",
            "00:1.8",
            "0:0:0:1.0",
            "zz:01.0",
            "00:01",
        ] {
            assert!(text.parse::<Bdf>().is_err(), "{text}");
        }
    }
}
