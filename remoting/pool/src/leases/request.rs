//! What the lease service is asked, and what it answers: one JSON document a line.

use std::{fmt, path::PathBuf, str::FromStr};

use serde::{Deserialize, Serialize};

/// The longest line in bytes.
pub const LONGEST: u64 = 64 << 10;

/// The most characters of a name: it is a part of the path of a socket, which has at most 107.
const LONGEST_NAME: usize = 48;

/// The name of a lease, and of its client at the arbiter: letters, digits, `-`, `_` and `.`, of which the first is a letter
/// or a digit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

/// An invalid name of a lease.
#[derive(Debug, thiserror::Error)]
#[error(
    "invalid name {0:?}: use 1 to {LONGEST_NAME} letters, digits, '-', '_' and '.', and begin with a letter or a digit"
)]
pub struct InvalidName(String);

impl TryFrom<String> for Name {
    type Error = InvalidName;

    fn try_from(text: String) -> Result<Self, InvalidName> {
        let others = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let begins = text
            .bytes()
            .next()
            .is_some_and(|byte| byte.is_ascii_alphanumeric());
        match begins && text.len() <= LONGEST_NAME && text.bytes().all(others) {
            true => Ok(Self(text)),
            false => Err(InvalidName(text)),
        }
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An API that a lease is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Api {
    /// OpenCL.
    OpenCl,
    /// CUDA.
    Cuda,
}

impl Api {
    /// Its name in options.
    pub fn name(self) -> &'static str {
        match self {
            Self::OpenCl => "opencl",
            Self::Cuda => "cuda",
        }
    }
}

/// What is no API of leases.
#[derive(Debug, thiserror::Error)]
#[error("unknown API {0:?}: use opencl, cuda, or opencl,cuda")]
pub struct UnknownApi(String);

impl FromStr for Api {
    type Err = UnknownApi;

    fn from_str(text: &str) -> Result<Self, UnknownApi> {
        let found = [Self::OpenCl, Self::Cuda]
            .into_iter()
            .find(|api| api.name() == text);
        found.ok_or_else(|| UnknownApi(text.to_owned()))
    }
}

/// How long a lease lasts, unless it is revoked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Until {
    /// As long as the connection by which it was granted.
    #[default]
    Closed,
    /// For ever; also where the service ends meanwhile. For root alone.
    Revoked,
}

/// What a lease gives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Grant {
    /// Its name.
    pub name: Name,
    /// The device, by a name that the service was given.
    pub device: String,
    /// The part of the device's time that all programs of the lease have together, in proportion to other leases' and
    /// clients': 1 to 10,000.
    #[serde(default = "one")]
    pub weight: u32,
    /// MiB of device memory that all programs of the lease may have together.
    pub memory: u64,
    /// MiB of the device's memory that are set aside for what is not counted, such as contexts of CUDA; the service's
    /// default otherwise.
    #[serde(default)]
    pub reserve: Option<u64>,
    /// The APIs; none: the service's.
    #[serde(default)]
    pub api: Vec<Api>,
    /// How long it lasts.
    #[serde(default)]
    pub until: Until,
    /// What whoever asks notes down about it, which [`Request::List`] tells again.
    #[serde(default)]
    pub holds: Vec<String>,
}

fn one() -> u32 {
    1
}

/// What the service is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    /// A lease. Who has it already, with the same terms and until it is revoked, is told its socket again.
    Grant(Grant),
    /// The end of a lease, and of all programs' use of it.
    Revoke {
        /// Its name.
        name: Name,
    },
    /// All leases and devices.
    List {},
}

/// A device, as leases share it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// MiB of memory that leases may have together.
    pub memory: u64,
    /// MiB of it that no lease has.
    pub free: u64,
    /// Why nobody can use it now; nothing if it can be used.
    pub problem: Option<String>,
}

/// A lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// What it gives; `reserve` and `api` are set.
    #[serde(flatten)]
    pub grant: Grant,
    /// The user who has asked for it.
    pub user: u32,
    /// The socket for programs, which alone is in its folder.
    pub socket: PathBuf,
}

/// What there is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listing {
    /// The devices.
    pub devices: Vec<Device>,
    /// The leases, by name.
    pub leases: Vec<Lease>,
}

/// What the service answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// The lease is granted: its socket, for `GANTRY_OPENCL` and `GANTRY_CUDA`.
    Socket(PathBuf),
    /// The lease of this name has ended, or there was none.
    Revoked(Name),
    /// All leases.
    Leases(Listing),
    /// Why not.
    Refused(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_as_they_are_written_down() {
        let text = r#"{"grant":{"name":"job-7","device":"0","memory":64,"api":["opencl","cuda"],"until":"revoked"}}"#;
        let Request::Grant(grant) = serde_json::from_str(text).unwrap() else {
            panic!("not a grant");
        };
        assert_eq!(
            (grant.weight, grant.until, grant.reserve),
            (1, Until::Revoked, None)
        );
        assert_eq!(grant.api, [Api::OpenCl, Api::Cuda]);
        assert_eq!(
            serde_json::from_str::<Request>(r#"{"list":{}}"#).unwrap(),
            Request::List {}
        );
        for wrong in [
            r#"{"grant":{"name":"../x","device":"0","memory":1}}"#,
            r#"{"grant":{"name":".x","device":"0","memory":1}}"#,
            r#"{"grant":{"name":"","device":"0","memory":1}}"#,
            r#"{"grant":{"name":"a","device":"0","memory":-1}}"#,
            r#"{"grant":{"name":"a","device":"0","memory":1,"wieght":2}}"#,
            r#"{"revoke":{}}"#,
        ] {
            assert!(serde_json::from_str::<Request>(wrong).is_err(), "{wrong}");
        }
        let long = format!(
            r#"{{"revoke":{{"name":"{}"}}}}"#,
            "a".repeat(LONGEST_NAME + 1)
        );
        assert!(serde_json::from_str::<Request>(&long).is_err());
    }

    #[test]
    fn a_lease_is_read_again_from_its_record() {
        let text = r#"{"name":"a","device":"0","memory":1,"reserve":2,"user":7,"socket":"/s"}"#;
        let lease: Lease = serde_json::from_str(text).unwrap();
        let again = serde_json::from_str(&serde_json::to_string(&lease).unwrap()).unwrap();
        assert_eq!(lease, again);
        assert_eq!((lease.user, lease.grant.reserve), (7, Some(2)));
    }
}
