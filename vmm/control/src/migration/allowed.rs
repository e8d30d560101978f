//! Which of this host's files a VM that arrives may use. Whoever reaches the destination first sends the VM's
//! configuration, and with it the names of files, sockets and taps.

use std::path::{Path, PathBuf};

use devices::virtio::net::Interface;
use serde_json::Value;
use vmm_api::ReceiveMigration;
use vmm_config::VmConfig;
use vmm_confinement::landlock::{self, LandlockError};

use super::super::host_names::NAMES;

/// What any VM may read: it is the same for all.
const COMMON: [&str; 2] = ["/dev/urandom", "/dev/random"];

/// The files, directories and taps that an arriving VM may use.
#[derive(Default)]
pub(super) struct Allowed {
    names: Vec<PathBuf>,
    /// What it may only read.
    read_only: Vec<PathBuf>,
    /// What to do on a kernel without Landlock.
    instead: &'static str,
}

impl Allowed {
    /// What a request allows: what it names. `None` if it does not limit the VM: its source is known by a certificate, or
    /// has access to the socket. Any process of this host reaches a TCP port.
    pub(super) fn of(request: &ReceiveMigration) -> Option<Self> {
        let is_open = request.receiver_url.starts_with("tcp:") && request.tls_dir.is_none();
        if request.paths.is_none() && !is_open {
            return None;
        }
        let renamed = request.renames.iter().flatten();
        let renamed = renamed.map(|rename| PathBuf::from(&rename.to));
        let rules = request.landlock_rules.iter().flatten();
        let (readable, writable): (Vec<_>, Vec<_>) = rules.partition(|rule| rule.access == "r");
        let [readable, writable] =
            [readable, writable].map(|rules| rules.into_iter().map(|rule| rule.path.clone()));
        let named = request.paths.iter().flatten().cloned();
        let common = COMMON.map(PathBuf::from);
        let instead = match (is_open, request.paths.is_some()) {
            (false, _) => "go without --paths",
            (true, false) => "listen at a unix: socket, or with --tls-dir",
            (true, true) => "listen at a unix: socket, or with --tls-dir, and go without --paths",
        };
        Some(Self {
            instead,
            names: named.chain(renamed).chain(writable).collect(),
            read_only: readable.chain(common).collect(),
        })
    }

    /// A path that is to be allowed, and is not there.
    pub(super) fn missing(request: &ReceiveMigration) -> Option<&Path> {
        let paths = request.paths.iter().flatten().map(PathBuf::as_path);
        let mut paths = paths.filter(|path| is_path(path));
        paths.find(|path| !path.exists())
    }

    /// Restricts this process to these files, for good.
    pub(super) fn enforce(&self) -> Result<(), LandlockError> {
        // What is yet to be created is created in its folder, which is not that of everything.
        let existing = |path: &PathBuf| match path.parent() {
            Some(folder) if is_path(path) && !path.exists() && folder != Path::new("/") => {
                folder.to_owned()
            }
            _ => path.clone(),
        };
        let paths: Vec<_> = self.names.iter().map(existing).collect();
        landlock::restrict_to(&paths, &self.read_only, self.instead)
    }

    fn all(&self) -> impl Iterator<Item = &PathBuf> {
        self.names.iter().chain(&self.read_only)
    }

    /// Why a configuration does not comply, by name.
    pub(super) fn reasons(&self, config: &VmConfig) -> Vec<String> {
        let mut reasons = Vec::new();
        // A configuration that is no JSON has no names either.
        self.examine(
            &serde_json::to_value(config).unwrap_or_default(),
            &mut reasons,
        );
        for (index, net) in config.net.iter().flatten().enumerate() {
            // It would get a new tap, with the addresses that the configuration has for it.
            if net.tap.is_none() && net.fds.is_empty() {
                reasons.push(format!(
                    "the destination does not make a tap: net[{index}] has to name one, which --paths allows"
                ));
            }
        }
        reasons
    }

    /// Why a configuration names interfaces that would be made here, with addresses that the source has for them.
    pub(super) fn absent_taps(config: &VmConfig) -> Vec<String> {
        let taps = config
            .net
            .iter()
            .flatten()
            .filter_map(|net| net.tap.as_deref());
        let is_there = |tap: &&str| Interface::new(tap).and_then(|tap| tap.exists());
        let absent = taps.filter(|tap| !is_there(tap).unwrap_or_default());
        absent
            .map(|tap| {
                format!(
                    "the destination does not make a tap, and there is no {tap:?}: make it first (ip tuntap add)"
                )
            })
            .collect()
    }

    /// Leaves the host's side of network cards as it is here: its addresses and MTU are this host's, not for a source to
    /// choose. The guest's side is part of the VM's state.
    pub(super) fn keep_interfaces(config: &mut VmConfig) {
        for net in config.net.iter_mut().flatten() {
            let address = (net.ip.take(), net.mask.take(), net.host_mac.take());
            if address != (None, None, None) || net.mtu.is_some() {
                log::info!(
                    "the tap {} keeps this host's addresses and MTU, not those that the source has for it",
                    net.tap.as_deref().unwrap_or_default()
                );
            }
            net.mtu = None;
        }
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
        if self.all().any(|allowed| allowed == path) {
            return true;
        }
        let Some(path) = is_path(path).then(|| real(path)).flatten() else {
            return false;
        };
        let mut allowed = self.all().filter_map(|allowed| real(allowed));
        allowed.any(|allowed| path.starts_with(allowed))
    }
}

/// Whether it is a path, not the name of a tap.
fn is_path(name: &Path) -> bool {
    name.as_os_str().as_encoded_bytes().contains(&b'/')
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
    fn every_path_of_a_configuration_is_a_name_that_has_to_be_allowed() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/src");
        let mut fields = Vec::new();
        for file in std::fs::read_dir(folder).unwrap() {
            let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
            let types = [": PathBuf,", ": Option<PathBuf>,"];
            let of_line = |line: &str| {
                let field = types.iter().find_map(|of| line.strip_suffix(of))?;
                Some(field.trim().trim_start_matches("pub ").to_owned())
            };
            fields.extend(text.lines().filter_map(of_line));
        }
        assert!(fields.len() > 25, "{fields:?}");
        for field in fields {
            assert!(NAMES.contains(&field.as_str()), "{field}");
        }
    }

    #[test]
    fn what_any_device_names_has_to_be_allowed() {
        let config: VmConfig = serde_json::from_value(json!({
            "payload": {"kernel": "/k", "initramfs": "/i", "firmware": "/f", "igvm": "/g"},
            "memory": {"size": 0, "zones": [{"id": "z", "size": 1 << 30, "file": "/m"}]},
            "disks": [{"path": "/d", "vhost_socket": "/dv"}],
            "net": [{"tap": "t", "vhost_socket": "/nv"}],
            "accels": [{"transport": "Gate", "server": "/s"}, {"socket": "/a"}],
            "accel_server": {"socket": "/as"},
            "gpus": [{"socket": "/gs", "record": "/gr"}],
            "devices": [{"path": "/v"}],
            "user_devices": [{"socket": "/u"}],
            "vsock": {"cid": 3, "socket": "/vs"},
            "serial": {"mode": "Socket", "socket": "/ss"},
            "console": {"mode": "File", "file": "/c"},
            "debug_console": {"mode": "File", "file": "/dc"},
            "landlock_rules": [{"path": "/l", "access": "r"}],
        }))
        .unwrap();
        let reasons = Allowed::default().reasons(&config);
        let names = [
            "/k", "/i", "/f", "/g", "/m", "/d", "/dv", "t", "/nv", "/s", "/a", "/as", "/gs", "/gr",
            "/v", "/u", "/vs", "/ss", "/c", "/dc", "/l",
        ];
        for name in names {
            let quoted = format!("allow {name:?}");
            assert!(
                reasons.iter().any(|reason| reason.contains(&quoted)),
                "{name}: {reasons:?}"
            );
        }
        let all = names.map(PathBuf::from).into_iter();
        let allowed = Allowed {
            names: all.chain(COMMON.map(PathBuf::from)).collect(),
            ..Allowed::default()
        };
        assert_eq!(allowed.reasons(&config), [""; 0]);
    }

    #[test]
    fn a_network_card_without_a_tap_is_not_allowed() {
        let config = json!({
            "payload": {"kernel": "/k"},
            "net": [{"tap": "t"}, {"ip": "192.168.0.1", "host_mac": "52:54:00:00:00:01"}],
        });
        let config = serde_json::from_value(config).unwrap();
        let names = ["/k", "/dev/urandom", "t"].map(PathBuf::from);
        let allowed = Allowed {
            names: names.to_vec(),
            ..Allowed::default()
        };
        let reasons = allowed.reasons(&config);
        assert_eq!(reasons.len(), 1, "{reasons:?}");
        assert!(reasons[0].contains("net[1]"), "{reasons:?}");
    }

    #[test]
    fn a_tap_that_is_not_there_is_not_made() {
        let config =
            json!({"payload": {"kernel": "/k"}, "net": [{"tap": "lo"}, {"tap": "gantry-none"}]});
        let absent = Allowed::absent_taps(&serde_json::from_value(config).unwrap());
        assert_eq!(absent.len(), 1, "{absent:?}");
        assert!(absent[0].contains("gantry-none"), "{absent:?}");
    }

    #[test]
    fn a_source_has_no_say_in_the_addresses_of_a_tap() {
        let config = json!({
            "payload": {"kernel": "/k"},
            "net": [{
                "tap": "t", "ip": "10.0.0.1", "mask": "255.0.0.0", "host_mac": "52:54:00:00:00:01", "mtu": 9000,
                "mac": "52:54:00:00:00:02", "num_queues": 4,
            }],
        });
        let mut config: VmConfig = serde_json::from_value(config).unwrap();
        Allowed::keep_interfaces(&mut config);
        let its_own = json!([{"tap": "t", "mac": "52:54:00:00:00:02", "num_queues": 4}]);
        assert_eq!(config.net, serde_json::from_value(its_own).unwrap());
    }

    fn request(url: &str) -> ReceiveMigration {
        ReceiveMigration {
            receiver_url: url.to_owned(),
            ..ReceiveMigration::default()
        }
    }

    #[test]
    fn without_paths_a_source_that_anybody_may_be_names_no_file() {
        let certified = ReceiveMigration {
            tls_dir: Some(PathBuf::from("/tls")),
            ..request("tcp:0.0.0.0:1")
        };
        for known in [certified, request("unix:/s")] {
            assert!(Allowed::of(&known).is_none());
        }
        let config = json!({"payload": {"kernel": "/k"}, "rng": {"src": "/dev/urandom"}});
        let config = serde_json::from_value(config).unwrap();
        for open in ["tcp:127.0.0.1:1", "tcp:0.0.0.0:1"] {
            let allowed = Allowed::of(&request(open)).unwrap();
            let reasons = allowed.reasons(&config);
            assert_eq!(reasons.len(), 1, "{reasons:?}");
        }
    }

    #[test]
    fn rules_of_the_request_are_allowed_with_its_paths() {
        let rules = json!([{"path": "/backing", "access": "r"}]);
        let request = ReceiveMigration {
            paths: Some(Vec::new()),
            landlock_rules: serde_json::from_value(rules.clone()).unwrap(),
            ..request("unix:/s")
        };
        let config = json!({"payload": {}, "landlock_rules": rules});
        let config = serde_json::from_value(config).unwrap();
        let allowed = Allowed::of(&request).unwrap();
        assert_eq!(allowed.reasons(&config), [""; 0]);
        // And not more than they say.
        assert!(allowed.read_only.contains(&PathBuf::from("/backing")));
        assert!(!allowed.names.contains(&PathBuf::from("/backing")));
    }

    #[test]
    fn paths_that_do_not_exist_are_found() {
        let of = |paths: &[&str]| {
            let request = ReceiveMigration {
                paths: Some(paths.iter().map(PathBuf::from).collect()),
                ..request("unix:/s")
            };
            Allowed::missing(&request).map(Path::to_owned)
        };
        assert_eq!(of(&["/dev", "tap7"]), None);
        assert_eq!(of(&["/dev", "/not/there"]), Some("/not/there".into()));
    }
}
