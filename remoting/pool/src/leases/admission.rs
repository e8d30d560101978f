//! Whether a device has what a lease is to give.

use super::request::{Grant, Lease, Name};

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    #[error("there is no device {asked:?} here: use one of {all}")]
    Device { asked: String, all: String },
    #[error("invalid weight {0}: use 1 to 10000")]
    Weight(u32),
    #[error("invalid memory 0: use at least 1 (MiB)")]
    Memory,
    #[error(
        "device {device} has {memory} MiB, of which {granted} are granted to {count} leases: {asked} are asked for, \
         {reserve} of them as reserve"
    )]
    Full {
        device: String,
        memory: u64,
        granted: u64,
        count: usize,
        asked: u64,
        reserve: u64,
    },
    #[error("there are {0} leases, as many as there may be: revoke some first")]
    Many(usize),
    #[error("only root has leases that last until they are revoked: use \"until\": \"closed\"")]
    Root,
    #[error("lease {0} exists already: revoke it first, or use another name")]
    Exists(Name),
    #[error("lease {0} is another user's: only that user and root revoke it")]
    Others(Name),
    #[error("lease {0} has not ended or started yet: its processes may hang in a driver")]
    Late(Name),
    #[error("cannot start the pool of the lease: {0}")]
    Start(String),
}

/// MiB that a lease takes of its device.
fn taken(grant: &Grant) -> u64 {
    grant.memory.saturating_add(grant.reserve.unwrap_or(0))
}

/// MiB of a device with so much memory that none of these leases has.
pub(super) fn free<'a>(
    memory: u64,
    device: &str,
    leases: impl IntoIterator<Item = &'a Lease>,
) -> u64 {
    memory.saturating_sub(granted(device, leases).0)
}

fn granted<'a>(device: &str, leases: impl IntoIterator<Item = &'a Lease>) -> (u64, usize) {
    let of = leases.into_iter().map(|lease| &lease.grant);
    let of = of.filter(|grant| grant.device == device);
    of.fold((0, 0), |(sum, count): (u64, usize), grant| {
        (sum.saturating_add(taken(grant)), count + 1)
    })
}

/// Checks that the device has what is asked for beside these leases.
pub(super) fn admit<'a>(
    grant: &Grant,
    devices: &[(String, u64)],
    leases: impl IntoIterator<Item = &'a Lease>,
) -> Result<(), Refusal> {
    if !(1..=10_000).contains(&grant.weight) {
        return Err(Refusal::Weight(grant.weight));
    }
    if grant.memory == 0 {
        return Err(Refusal::Memory);
    }
    let found = devices.iter().find(|(name, _)| *name == grant.device);
    let Some((device, memory)) = found else {
        let names: Vec<_> = devices.iter().map(|(name, _)| name.as_str()).collect();
        return Err(Refusal::Device {
            asked: grant.device.clone(),
            all: names.join(", "),
        });
    };
    let (granted, count) = granted(device, leases);
    let asked = taken(grant);
    if granted.checked_add(asked).is_none_or(|sum| sum > *memory) {
        return Err(Refusal::Full {
            device: device.clone(),
            memory: *memory,
            granted,
            count,
            asked,
            reserve: grant.reserve.unwrap_or(0),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(device: &str, memory: u64, reserve: u64) -> Lease {
        let text = format!(
            r#"{{"name":"a","device":"{device}","memory":{memory},"reserve":{reserve},"user":0,"socket":"/s"}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn a_device_is_granted_as_far_as_it_goes_with_what_is_set_aside() {
        let devices = [("0".to_owned(), 100), ("1".to_owned(), 100)];
        let held = [lease("0", 60, 10), lease("1", 100, 0)];
        let ask = |device, memory, reserve| {
            let grant = lease(device, memory, reserve).grant;
            admit(&grant, &devices, &held)
        };
        assert_eq!(ask("0", 20, 10), Ok(()));
        let refused = ask("0", 21, 10).unwrap_err();
        let said = "device 0 has 100 MiB, of which 70 are granted to 1 leases: 31 are asked for, 10 of them as reserve";
        assert_eq!(refused.to_string(), said);
        assert!(ask("1", 1, 0).is_err() && ask("2", 1, 0).is_err());
        assert!(ask("0", u64::MAX, 10).is_err());
        assert_eq!(ask("0", 0, 0), Err(Refusal::Memory));
        assert_eq!((free(100, "0", &held), free(90, "1", &held)), (30, 0));
        let weightless = Grant {
            weight: 0,
            ..lease("0", 1, 0).grant
        };
        assert_eq!(admit(&weightless, &devices, []), Err(Refusal::Weight(0)));
    }
}
