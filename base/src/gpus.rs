//! Selecting GPUs of a host: the one grammar of all programs and options that name devices.
//!
//! A selection is one name, or several that `+` joins. A name is
//!
//! - an index, in the order of PCI addresses: `0`;
//! - a UUID, or its beginning with at least eight digits: `GPU-1a2b3c4d`, `MIG-1a2b3c4d`;
//! - a PCI address: `0000:65:00.0`, or `65:00.0` of domain 0;
//! - a part of a model's name: `H200`.
//!
//! The first two name one GPU, the third one all parts of a GPU, and the last one every GPU of such a name. An empty
//! selection is all GPUs.

use std::{
    fmt::{self, Write as _},
    str::FromStr,
};

/// Maximum length of a selection in bytes.
pub const LONGEST: usize = 1024;

/// Minimum number of hexadecimal digits of a UUID's beginning. Fewer would hardly distinguish GPUs.
const LEAST_DIGITS: usize = 8;

/// Kinds of UUIDs, by their prefixes: of a GPU, and of a part of one.
const KINDS: [&str; 2] = ["GPU-", "MIG-"];

/// A PCI address without a function: a GPU's functions belong together.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Address {
    /// The domain (segment).
    pub domain: u32,
    /// The bus.
    pub bus: u8,
    /// The device, at most 31.
    pub device: u8,
}

impl FromStr for Address {
    type Err = NotAnAddress;

    /// Parses `domain:bus:device.function` or `bus:device.function`, in hexadecimal digits.
    fn from_str(text: &str) -> Result<Self, NotAnAddress> {
        let parse = || {
            let (rest, function) = text.rsplit_once('.')?;
            let (rest, device) = rest.rsplit_once(':')?;
            let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
            // `from_str_radix` takes a sign.
            let number = |text: &str, most: u32| {
                let digits = text.bytes().all(|byte| byte.is_ascii_hexdigit());
                let number = u32::from_str_radix(text, 16).ok().filter(|_| digits)?;
                (number <= most).then_some(number)
            };
            number(function, 7)?;
            Some(Self {
                domain: number(domain, u32::MAX)?,
                bus: number(bus, 0xff)?.try_into().ok()?,
                device: number(device, 31)?.try_into().ok()?,
            })
        };
        parse().ok_or(NotAnAddress)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:04x}:{:02x}:{:02x}.0",
            self.domain, self.bus, self.device
        )
    }
}

/// A text is not a PCI address.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("not a PCI address such as 0000:65:00.0")]
pub struct NotAnAddress;

/// What a GPU is selected by.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Gpu {
    /// The model's name.
    pub name: String,
    /// The UUID with its prefix, `GPU-` or `MIG-`. None if the driver reports none.
    pub uuid: Option<String>,
    /// The PCI address. None for a device that is not on PCI.
    pub address: Option<Address>,
}

/// The text of a GPU's UUID, as the driver's tools print it.
pub fn uuid(bytes: [u8; 16]) -> String {
    let mut text = KINDS[0].to_owned();
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::note::printable(self.name.clone()))?;
        match (&self.uuid, self.address) {
            (Some(uuid), Some(address)) => write!(f, " ({uuid}, {address})"),
            (Some(one), None) => write!(f, " ({one})"),
            (None, Some(one)) => write!(f, " ({one})"),
            (None, None) => Ok(()),
        }
    }
}

/// One name of a selection.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Name {
    /// The position in the order of PCI addresses, from 0.
    Index(usize),
    /// A UUID's beginning: an upper-case prefix, then lower-case digits.
    Uuid(String),
    /// A PCI address.
    Address(Address),
    /// A part of a model's name.
    Model(String),
}

impl Name {
    /// The positions of the GPUs of this name.
    fn of(&self, gpus: &[Gpu]) -> Vec<usize> {
        // CUDA reports digits alone, also of a part of a GPU.
        let digits = |text: &str| text.get(KINDS[0].len()..).map(str::to_owned);
        let is = |gpu: &Gpu| match self {
            Self::Index(_) => false,
            Self::Uuid(start) => {
                let start = digits(start).unwrap_or_default();
                let uuid = gpu.uuid.as_deref().and_then(digits);
                uuid.is_some_and(|uuid| uuid.starts_with(&start))
            }
            Self::Address(address) => gpu.address == Some(*address),
            Self::Model(part) => gpu.name.contains(part.as_str()),
        };
        if let Self::Index(index) = self {
            return by_address(gpus).get(*index).copied().into_iter().collect();
        }
        let all = gpus.iter().enumerate();
        all.filter(|(_, gpu)| is(gpu)).map(|(at, _)| at).collect()
    }
}

impl FromStr for Name {
    type Err = WrongName;

    fn from_str(text: &str) -> Result<Self, WrongName> {
        if text.is_empty() {
            return Err(WrongName::Empty);
        }
        if text.contains(',') {
            return Err(WrongName::Comma);
        }
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            return text.parse().map(Self::Index).map_err(|_| WrongName::Index);
        }
        let upper = text.to_ascii_uppercase();
        if let Some(kind) = KINDS.into_iter().find(|kind| upper.starts_with(kind)) {
            let digits = text[kind.len()..].to_ascii_lowercase();
            let is_digit = |byte: u8| byte.is_ascii_hexdigit() || byte == b'-';
            let count = digits.bytes().filter(u8::is_ascii_hexdigit).count();
            if !digits.bytes().all(is_digit) || count < LEAST_DIGITS {
                return Err(WrongName::Uuid);
            }
            return Ok(Self::Uuid(format!("{kind}{digits}")));
        }
        Ok(match text.parse() {
            Ok(address) => Self::Address(address),
            Err(NotAnAddress) => Self::Model(text.to_owned()),
        })
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => write!(f, "{index}"),
            Self::Uuid(text) | Self::Model(text) => f.write_str(text),
            Self::Address(address) => write!(f, "{address}"),
        }
    }
}

/// Why a text is not a selection.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum WrongName {
    /// A name is missing.
    #[error(
        "a name is missing: use an index, a UUID, a PCI address or a part of a model's name, joined by +"
    )]
    Empty,
    /// Names are joined otherwise.
    #[error("a name has no comma: join names by +")]
    Comma,
    /// The index is larger than any.
    #[error("the index is too large")]
    Index,
    /// A UUID with too few digits, or with other characters.
    #[error("invalid UUID: use GPU- or MIG- and at least {LEAST_DIGITS} hexadecimal digits")]
    Uuid,
    /// The text is too long.
    #[error("the selection is too long: use at most {LONGEST} bytes")]
    Long,
}

/// A selection of GPUs.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Selection {
    /// Empty: all GPUs.
    names: Vec<Name>,
}

impl FromIterator<Name> for Selection {
    fn from_iter<I: IntoIterator<Item = Name>>(names: I) -> Self {
        Self {
            names: names.into_iter().collect(),
        }
    }
}

impl Selection {
    /// Whether all GPUs are selected.
    pub fn is_all(&self) -> bool {
        self.names.is_empty()
    }

    /// The names, none for all GPUs.
    pub fn names(&self) -> &[Name] {
        &self.names
    }

    /// The positions in `gpus` of the selected ones, each once, in the order of the names. All of them, and those of one
    /// model, are in the order of `gpus`.
    ///
    /// # Errors
    /// A name denotes no GPU, or the beginning of a UUID several.
    pub fn of(&self, gpus: &[Gpu]) -> Result<Vec<usize>, Unmatched> {
        if self.is_all() {
            return Ok((0..gpus.len()).collect());
        }
        let listed = |of: &[usize]| List(of.iter().map(|at| gpus[*at].clone()).collect());
        let mut selected = Vec::new();
        for name in &self.names {
            let found = name.of(gpus);
            if found.is_empty() {
                return Err(Unmatched::None {
                    name: name.clone(),
                    all: listed(&by_address(gpus)),
                });
            }
            let is_one = || found.iter().all(|at| gpus[*at].uuid == gpus[found[0]].uuid);
            if matches!(name, Name::Uuid(_)) && !is_one() {
                return Err(Unmatched::Several {
                    name: name.clone(),
                    those: listed(&found),
                });
            }
            for at in found {
                if !selected.contains(&at) {
                    selected.push(at);
                }
            }
        }
        Ok(selected)
    }
}

/// The positions of these GPUs in the order of PCI addresses. Those that are not on PCI come last, as they are.
fn by_address(gpus: &[Gpu]) -> Vec<usize> {
    let mut ordered: Vec<usize> = (0..gpus.len()).collect();
    ordered.sort_by_key(|&at| (gpus[at].address.is_none(), gpus[at].address));
    ordered
}

impl FromStr for Selection {
    type Err = WrongName;

    fn from_str(text: &str) -> Result<Self, WrongName> {
        if text.len() > LONGEST {
            return Err(WrongName::Long);
        }
        if text.is_empty() {
            return Ok(Self::default());
        }
        let names = text.split('+').map(str::parse).collect::<Result<_, _>>()?;
        Ok(Self { names })
    }
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, name) in self.names.iter().enumerate() {
            let joint = if at == 0 { "" } else { "+" };
            write!(f, "{joint}{name}")?;
        }
        Ok(())
    }
}

/// What is offered to an application: of the GPUs that are lent, those that it wants.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Choice {
    /// What the host lends.
    pub lent: Selection,
    /// What is wanted of it.
    pub wanted: Selection,
}

impl Choice {
    /// Whether all GPUs are offered.
    pub fn is_all(&self) -> bool {
        self.lent.is_all() && self.wanted.is_all()
    }

    /// The positions in `gpus` of what is offered: in the order in which they are wanted, or lent if all are wanted. Both
    /// selections name the GPUs of the host.
    ///
    /// # Errors
    /// A selection does not fit, or nothing that is wanted is lent.
    pub fn of(&self, gpus: &[Gpu]) -> Result<Vec<usize>, Unmatched> {
        let lent = self.lent.of(gpus)?;
        if self.wanted.is_all() {
            return Ok(lent);
        }
        let mut offered = self.wanted.of(gpus)?;
        offered.retain(|at| lent.contains(at));
        if offered.is_empty() {
            let (wanted, lent) = (self.wanted.clone(), self.lent.clone());
            return Err(Unmatched::NotLent { wanted, lent });
        }
        Ok(offered)
    }
}

/// A selection does not fit the GPUs that there are.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Unmatched {
    /// A name denotes none.
    #[error("no GPU matches '{name}': this host has {all}")]
    None {
        /// The name.
        name: Name,
        /// All GPUs.
        all: List,
    },
    /// The beginning of a UUID denotes several.
    #[error("several UUIDs begin with '{name}': those of {those}")]
    Several {
        /// The beginning.
        name: Name,
        /// The GPUs whose UUIDs begin with it.
        those: List,
    },
    /// None of those that are wanted are lent.
    #[error("'{wanted}' is not lent: '{lent}' is")]
    NotLent {
        /// What is wanted.
        wanted: Selection,
        /// What the host lends.
        lent: Selection,
    },
}

/// A list of GPUs, as errors print it.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct List(pub Vec<Gpu>);

impl fmt::Display for List {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (at, gpu) in self.0.iter().enumerate() {
            let joint = if at == 0 { "" } else { ", " };
            write!(f, "{joint}{gpu}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two of one model on PCI, the second one first; and one elsewhere.
    fn gpus() -> Vec<Gpu> {
        let one = |name: &str, uuid: Option<&str>, address: Option<&str>| Gpu {
            name: name.to_owned(),
            uuid: uuid.map(str::to_owned),
            address: address.map(|text| text.parse().unwrap()),
        };
        vec![
            one(
                "NVIDIA H200",
                Some("GPU-0a0b0c0d-1111-2222-3333-444444444444"),
                Some("0000:c1:00.0"),
            ),
            one("pthread-AMD", None, None),
            one(
                "NVIDIA H200",
                Some("GPU-0a0b0c0d-1111-2222-3333-555555555555"),
                Some("0000:65:00.0"),
            ),
        ]
    }

    fn selected(text: &str) -> Result<Vec<usize>, Unmatched> {
        text.parse::<Selection>().unwrap().of(&gpus())
    }

    #[test]
    fn gpus_are_named_by_index_uuid_address_and_model() {
        for (text, those) in [
            ("", vec![0, 1, 2]),
            ("0", vec![2]),
            ("1+0", vec![0, 2]),
            ("2", vec![1]),
            ("GPU-0A0B0C0D-1111-2222-3333-5", vec![2]),
            ("gpu-0a0b0c0d-1111-2222-3333-444444444444", vec![0]),
            ("0000:C1:00.0", vec![0]),
            ("65:00.1", vec![2]),
            ("H200", vec![0, 2]),
            ("c1:00.0+H200", vec![0, 2]),
            ("pthread+0+0", vec![1, 2]),
        ] {
            assert_eq!(selected(text), Ok(those), "{text}");
        }
    }

    #[test]
    fn what_names_no_gpu_or_several_is_refused_with_a_list() {
        let said = |text: &str| selected(text).unwrap_err().to_string();
        assert_eq!(
            said("0+A100"),
            "no GPU matches 'A100': this host has NVIDIA H200 (GPU-0a0b0c0d-1111-2222-3333-555555555555, \
             0000:65:00.0), NVIDIA H200 (GPU-0a0b0c0d-1111-2222-3333-444444444444, 0000:c1:00.0), \
             pthread-AMD"
        );
        assert!(said("3").starts_with("no GPU matches '3'"));
        assert!(said("GPU-0a0b0c0d").starts_with("several UUIDs begin with 'GPU-0a0b0c0d'"));
        let none = "0".parse::<Selection>().unwrap().of(&[]).unwrap_err();
        assert_eq!(none.to_string(), "no GPU matches '0': this host has none");
    }

    #[test]
    fn what_is_wanted_is_offered_if_it_is_lent() {
        let offered = |lent: &str, wanted: &str| {
            let (lent, wanted) = (lent.parse().unwrap(), wanted.parse().unwrap());
            Choice { lent, wanted }.of(&gpus())
        };
        assert_eq!(offered("", ""), Ok(vec![0, 1, 2]));
        assert_eq!(offered("0+2", ""), Ok(vec![2, 1]));
        assert_eq!(offered("0", "H200"), Ok(vec![2]));
        assert_eq!(offered("H200", "0+1"), Ok(vec![2, 0]));
        let refused = offered("0", "1").unwrap_err();
        assert_eq!(refused.to_string(), "'1' is not lent: '0' is");
    }

    #[test]
    fn a_selection_that_cannot_be_is_refused() {
        for (text, wrong) in [
            ("0+", WrongName::Empty),
            ("+", WrongName::Empty),
            ("0,1", WrongName::Comma),
            ("99999999999999999999999", WrongName::Index),
            ("GPU-0a0b0c0", WrongName::Uuid),
            ("MIG-0a0b0c0x", WrongName::Uuid),
        ] {
            assert_eq!(text.parse::<Selection>(), Err(wrong), "{text}");
        }
        let long = "0+".repeat(LONGEST / 2) + "0";
        assert_eq!(long.parse::<Selection>(), Err(WrongName::Long));
    }

    #[test]
    fn uuids_are_as_the_drivers_tools_print_them() {
        let bytes = std::array::from_fn(|at| at as u8 * 0x11);
        assert_eq!(uuid(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    fn a_selection_prints_as_it_is_parsed() {
        for text in ["", "0", "GPU-0a0b0c0d+1", "0000:65:00.0+H200"] {
            assert_eq!(text.parse::<Selection>().unwrap().to_string(), text);
        }
        for wrong in ["+1:00:00.0", "0:100:00.0", "00:20.0", "00:1f.8", "00:00"] {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
    }
}
