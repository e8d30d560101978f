//! Whose compiled programs are whose.

use std::fmt::Write as _;

/// Who an application belongs to, as far as somebody says it who is to be trusted about it: the
/// kernel about its own processes, a machine's process about the machine, the machine's agent about
/// its own guest, the authority about who has a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A user of this machine.
    User(u32),
    /// A virtual machine of a user of this machine.
    Machine {
        /// The user.
        user: u32,
        /// What the machine's caches are called.
        name: String,
        /// The user in the guest, if its agent has said that.
        guest: Option<u32>,
    },
    /// Who a certificate was signed for: a hash of its subject.
    Subject([u8; 32]),
}

impl Owner {
    /// A user of this machine, if that is one: in a container all users of the host whom it does not
    /// know have one number.
    pub fn of_user(user: u32) -> Option<Self> {
        is_one(user).then_some(Self::User(user))
    }

    /// A virtual machine of a user of this machine, if that is one.
    pub fn of_machine(user: u32, name: String, guest: Option<u32>) -> Option<Self> {
        is_one(user).then_some(Self::Machine { user, name, guest })
    }
}

/// Whether a number stands for one user alone.
fn is_one(user: u32) -> bool {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let unknown = read("/proc/sys/kernel/overflowuid");
    if unknown.trim().parse() != Ok(user) {
        return true;
    }
    maps_all(&read("/proc/self/uid_map"))
}

/// Whether a process with this table knows all users.
fn maps_all(table: &str) -> bool {
    table.split_whitespace().eq(["0", "0", "4294967295"])
}

/// Where an owner's compiled programs are, below the folder of all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheDirectory {
    /// A folder that has a limit of its own, and is one name.
    pub unit: String,
    /// The owner's folder in it.
    pub part: String,
}

impl Owner {
    /// Where its programs are. No two owners are at one directory.
    pub fn directory(&self) -> CacheDirectory {
        let (unit, part) = match self {
            Self::User(user) => (format!("user-{user}"), "own".to_owned()),
            Self::Machine { user, name, guest } => {
                let part = guest.map_or_else(|| "guest".to_owned(), |user| format!("user-{user}"));
                (format!("vm-{user}-{}", plain(name)), part)
            }
            Self::Subject(hash) => {
                let mut unit = "subject-".to_owned();
                for byte in hash {
                    // Writing to a string does not fail.
                    let _ = write!(unit, "{byte:02x}");
                }
                (unit, "own".to_owned())
            }
        };
        CacheDirectory { unit, part }
    }
}

/// A name as a part of a file's name: letters, digits, and all else by its number.
fn plain(name: &str) -> String {
    let mut plain = String::new();
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || byte == b'-' {
            plain.push(byte.into());
        } else {
            let _ = write!(plain, "_{byte:02x}");
        }
    }
    plain
}

/// Who answers for a unit: units of one user of this machine, or of one authority, have a limit
/// together.
pub fn payer(unit: &str) -> &str {
    let mut parts = unit.splitn(3, '-');
    match (parts.next(), parts.next()) {
        (Some("user" | "vm"), Some(user)) => user,
        _ => "subject",
    }
}

/// Whether a worker's word may be a unit's name. It says it before it has an application; the
/// name becomes a path.
pub fn is_unit(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    let known = ["user-", "vm-", "subject-"];
    known.iter().any(|start| name.starts_with(start))
        && name.len() <= 255
        && name.bytes().all(plain)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn owner() -> impl Strategy<Value = Owner> {
        prop_oneof![
            any::<u32>().prop_map(Owner::User),
            (any::<u32>(), ".{0,16}", any::<Option<u32>>())
                .prop_map(|(user, name, guest)| Owner::Machine { user, name, guest }),
            any::<[u8; 32]>().prop_map(Owner::Subject),
        ]
    }

    proptest! {
        #[test]
        fn two_owners_never_share_a_place(one in owner(), other in owner()) {
            prop_assert_eq!(one == other, one.directory() == other.directory());
        }

        #[test]
        fn a_place_is_two_plain_names(owner in owner()) {
            let CacheDirectory { unit, part } = owner.directory();
            prop_assert!(is_unit(&unit), "{unit}");
            prop_assert!(is_unit(&part) || matches!(&*part, "own" | "guest"));
        }
    }

    #[test]
    fn users_whom_a_container_does_not_know_are_no_owner_together() {
        assert!(maps_all("         0          0 4294967295\n"));
        assert!(!maps_all("         0     100000      65536\n"));
        assert!(!maps_all(""));
        assert_eq!(Owner::of_user(1), Some(Owner::User(1)));
    }

    #[test]
    fn machines_with_confusing_names_are_kept_apart() {
        let unit = |user, name: &str| {
            let name = name.to_owned();
            let guest = None;
            Owner::Machine { user, name, guest }.directory().unit
        };
        assert_ne!(unit(1, "1-a"), unit(11, "a"));
        assert_ne!(unit(1, "_2f"), unit(1, "/"));
        assert_eq!(unit(0, "../x"), "vm-0-_2e_2e_2fx");
        // As long as a name can be in an attachment.
        assert!(is_unit(&unit(u32::MAX, &"é".repeat(32))));
    }

    #[test]
    fn a_users_machines_count_as_the_users() {
        assert_eq!(payer("user-7"), payer("vm-7-a-b"));
        assert_ne!(payer("user-7"), payer("vm-70-a"));
        assert_eq!(payer("subject-00"), payer("subject-01"));
    }

    #[test]
    fn words_that_lead_elsewhere_are_no_units() {
        for word in [
            "user-/",
            "../user-1",
            "",
            "trash",
            "user-1/../x",
            "vm-1-.\0",
        ] {
            assert!(!is_unit(word), "{word:?}");
        }
    }
}
