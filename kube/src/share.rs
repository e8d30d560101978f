//! Shares: the devices that kubelet counts. A device of the host is so many of them.

use std::{collections::BTreeMap, fmt, str::FromStr};

/// A share of a device. Its ID is `DEVICE-NUMBER`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share {
    /// The device's name.
    pub device: String,
    /// The share's number among those of the device.
    pub number: u32,
}

/// What is no ID of a share.
#[derive(Debug, thiserror::Error)]
#[error("unknown ID {0:?}: IDs of shares are DEVICE-NUMBER")]
pub struct UnknownId(String);

impl FromStr for Share {
    type Err = UnknownId;

    fn from_str(text: &str) -> Result<Self, UnknownId> {
        let parts = text.rsplit_once('-');
        let share = parts.and_then(|(device, number)| {
            // Written in one way only.
            let share = Self {
                device: device.to_owned(),
                number: number.parse().ok()?,
            };
            (share.to_string() == text).then_some(share)
        });
        share.ok_or_else(|| UnknownId(text.to_owned()))
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.device, self.number)
    }
}

/// Shares of one device, of which there is at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    device: String,
    /// In ascending order.
    numbers: Vec<u32>,
}

/// Why shares cannot be given as a part of one device.
#[derive(Debug, thiserror::Error)]
pub enum NoPart {
    /// One is none.
    #[error(transparent)]
    Unknown(#[from] UnknownId),
    /// There is none.
    #[error("no shares were chosen: ask for at least 1")]
    None,
    /// They are of more than one.
    #[error(
        "the shares that are free are of {0} and {1}, and a container uses one device: ask for fewer, or by two containers"
    )]
    Two(String, String),
}

impl Part {
    /// The part that these IDs are.
    ///
    /// # Errors
    /// They are not of one device.
    pub fn of(ids: &[String]) -> Result<Self, NoPart> {
        let shares = ids.iter().map(|id| id.parse::<Share>());
        let mut shares = shares.collect::<Result<Vec<_>, _>>()?;
        shares.sort_unstable();
        shares.dedup();
        let device = shares.first().ok_or(NoPart::None)?.device.clone();
        if let Some(other) = shares.iter().find(|share| share.device != device) {
            return Err(NoPart::Two(device, other.device.clone()));
        }
        Ok(Self {
            device,
            numbers: shares.iter().map(|share| share.number).collect(),
        })
    }

    /// The device.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// How many shares it is.
    pub fn shares(&self) -> u32 {
        u32::try_from(self.numbers.len()).unwrap_or(u32::MAX)
    }

    /// The name of its lease. No two parts that are in use at a time have the same.
    pub fn name(&self) -> String {
        /// Characters of the device's name that are kept: a lease's name has an end.
        const KEPT: usize = 32;
        let kept = self.device.chars().take(KEPT);
        let kept: String = kept
            .map(|one| {
                if one.is_ascii_alphanumeric() {
                    one
                } else {
                    '_'
                }
            })
            .collect();
        let first = self.numbers.first().unwrap_or(&0);
        format!("{PREFIX}{kept}-{first}")
    }
}

/// How names of leases begin that are for containers of Kubernetes.
pub const PREFIX: &str = "kube-";

/// The IDs of all shares of a device.
pub fn all(device: &str, shares: u32) -> impl Iterator<Item = String> {
    (0..shares).map(move |number| {
        Share {
            device: device.to_owned(),
            number,
        }
        .to_string()
    })
}

/// So many of these IDs, among them those that must be: of one device if possible, and of that with the fewest others, so
/// that larger parts stay free.
pub fn preferred(available: &[String], must: &[String], count: usize) -> Vec<String> {
    let known = |id: &String| Some((id.parse::<Share>().ok()?.device, id.clone()));
    let mut devices: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (device, id) in available.iter().filter_map(known) {
        if !must.contains(&id) {
            devices.entry(device).or_default().push(id);
        }
    }
    let needed = count.saturating_sub(must.len());
    let of_must = must.first().and_then(known).map(|(device, _)| device);
    let mut order: Vec<_> = devices.into_iter().collect();
    order.sort_by_key(|(device, ids)| {
        let is_other = of_must.as_ref().is_some_and(|must| must != device);
        (is_other, ids.len() < needed, ids.len())
    });
    let others = order.into_iter().flat_map(|(_, ids)| ids);
    must.iter()
        .cloned()
        .chain(others)
        .take(count.max(must.len()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(of: &[&str]) -> Vec<String> {
        of.iter().map(|&id| id.to_owned()).collect()
    }

    #[test]
    fn a_part_is_of_one_device() {
        let part = Part::of(&ids(&[
            "GPU-1a2b3c4d-7",
            "GPU-1a2b3c4d-3",
            "GPU-1a2b3c4d-3",
        ]))
        .unwrap();
        assert_eq!((part.device(), part.shares()), ("GPU-1a2b3c4d", 2));
        assert_eq!(part.name(), "kube-GPU_1a2b3c4d-3");
        for wrong in [&["0-1", "1-1"][..], &[], &["x"], &["0-01"], &["0-+1"]] {
            assert!(Part::of(&ids(wrong)).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn shares_are_taken_where_they_fit_and_leave_the_largest_rest() {
        let free = ids(&["0-0", "0-1", "0-2", "1-0", "1-1", "2-0"]);
        assert_eq!(preferred(&free, &[], 2), ids(&["1-0", "1-1"]));
        assert_eq!(preferred(&free, &[], 1), ids(&["2-0"]));
        assert_eq!(preferred(&free, &[], 3), ids(&["0-0", "0-1", "0-2"]));
        assert_eq!(preferred(&free, &ids(&["0-2"]), 2), ids(&["0-2", "0-0"]));
        assert_eq!(preferred(&free, &[], 4).len(), 4);
        assert_eq!(preferred(&free, &[], 9).len(), 6);
    }
}
