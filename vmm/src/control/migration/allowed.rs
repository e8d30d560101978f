//! Which of this host's files a VM that arrives may use. Whoever reaches the destination first sends the VM's
//! configuration, and with it the names of files, sockets and taps.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::arrival::NAMES;
use crate::{
    api::ReceiveMigration,
    config::VmConfig,
    landlock::{self, LandlockError},
};

/// What any VM may read: it is the same for all.
const COMMON: [&str; 2] = ["/dev/urandom", "/dev/random"];

/// The files, directories and taps that an arriving VM may use.
pub(super) struct Allowed(Vec<PathBuf>);

impl Allowed {
    /// What a request allows: what it names. `None` if it does not limit the VM: its source is known by a certificate, or
    /// has access to the socket.
    pub(super) fn of(request: &ReceiveMigration) -> Option<Self> {
        if request.paths.is_none() && !request.insecure {
            return None;
        }
        let renamed = request.renames.iter().flatten();
        let renamed = renamed.map(|rename| PathBuf::from(&rename.to));
        let named = request.paths.iter().flatten().cloned();
        let common = COMMON.map(PathBuf::from);
        Some(Self(named.chain(renamed).chain(common).collect()))
    }

    /// Restricts this process to these files, for good.
    pub(super) fn enforce(&self) -> Result<(), LandlockError> {
        landlock::restrict_to(&self.0)
    }

    /// Why a configuration does not comply, by name.
    pub(super) fn reasons(&self, config: &VmConfig) -> Vec<String> {
        let mut reasons = Vec::new();
        // A configuration that is no JSON has no names either.
        self.examine(
            &serde_json::to_value(config).unwrap_or_default(),
            &mut reasons,
        );
        reasons
    }

    fn examine(&self, value: &Value, reasons: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    match value {
                        Value::String(text)
                            if NAMES.contains(&name.as_str()) && !self.is_allowed(text) =>
                        {
                            reasons.push(format!(
                                "the destination does not allow {text:?}: allow it with --paths, or name another one \
                                 with --rename"
                            ));
                        }
                        value => self.examine(value, reasons),
                    }
                }
            }
            Value::Array(values) => values.iter().for_each(|value| self.examine(value, reasons)),
            _ => {}
        }
    }

    fn is_allowed(&self, name: &str) -> bool {
        let path = Path::new(name);
        if self.0.iter().any(|allowed| allowed == path) {
            return true;
        }
        // A tap's name is no path.
        let Some(path) = name.contains('/').then(|| real(path)).flatten() else {
            return false;
        };
        let mut allowed = self.0.iter().filter_map(|allowed| real(allowed));
        allowed.any(|allowed| path.starts_with(allowed))
    }
}

/// A path without links; of a file that is yet to be created, too.
fn real(path: &Path) -> Option<PathBuf> {
    path.canonicalize().ok().or_else(|| {
        let folder = path.parent()?.canonicalize().ok()?;
        Some(folder.join(path.file_name()?))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use serde_json::json;

    use super::*;

    #[test]
    fn a_vm_uses_only_what_receive_migration_names() {
        let dir = tempfile::tempdir().unwrap();
        let [vms, secret] = ["vms", "secret"].map(|name| dir.path().join(name));
        std::fs::create_dir(&vms).unwrap();
        std::fs::write(&secret, "").unwrap();
        symlink(&secret, vms.join("link")).unwrap();
        let request: ReceiveMigration = serde_json::from_value(json!({
            "receiver_url": "tcp:0.0.0.0:1",
            "insecure": true,
            "paths": [vms, "tap7"],
            "renames": [{"from": "/a", "to": dir.path().join("renamed")}],
        }))
        .unwrap();
        let allowed = Allowed::of(&request).unwrap();
        let reasons = |disk: &Path, tap: &str| {
            let config = json!({
                "payload": {"kernel": vms.join("kernel")},
                "disks": [{"path": disk}],
                "net": [{"tap": tap}],
                "serial": {"mode": "File", "file": dir.path().join("renamed")},
            });
            allowed.reasons(&serde_json::from_value(config).unwrap())
        };
        assert_eq!(reasons(&vms.join("disk"), "tap7"), [""; 0]);
        let outside = vms.join("../secret");
        for path in [
            &secret,
            &outside,
            &vms.join("link"),
            Path::new("/etc/shadow"),
        ] {
            let reasons = reasons(path, "tap7");
            assert_eq!(reasons.len(), 1, "{reasons:?}");
            assert!(reasons[0].contains(path.to_str().unwrap()), "{reasons:?}");
        }
        assert_eq!(reasons(&vms.join("disk"), "tap0").len(), 1);
    }

    #[test]
    fn without_paths_an_insecure_source_names_no_file() {
        let request = |insecure: bool| ReceiveMigration {
            insecure,
            ..ReceiveMigration::default()
        };
        assert!(Allowed::of(&request(false)).is_none());
        let config = json!({"payload": {"kernel": "/k"}, "rng": {"src": "/dev/urandom"}});
        let config = serde_json::from_value(config).unwrap();
        let reasons = Allowed::of(&request(true)).unwrap().reasons(&config);
        assert_eq!(reasons.len(), 1, "{reasons:?}");
    }
}
