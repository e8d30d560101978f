//! Names of the host's files, sockets and taps in a VM's configuration.

use serde_json::Value;
use vmm_api::Rename;
use vmm_config::VmConfig;

/// Fields of a configuration that name a host resource, in whatever device or part they are.
pub(super) const NAMES: [&str; 12] = [
    "path",
    "socket",
    "vhost_socket",
    "server",
    "file",
    "record",
    "tap",
    "kernel",
    "initramfs",
    "firmware",
    "igvm",
    "src",
];

/// The configuration with the names that the host's resources have here; and the renames that it had no use for.
pub(super) fn renamed<'a>(
    config: &VmConfig,
    renames: &'a [Rename],
) -> serde_json::Result<(Box<VmConfig>, Vec<&'a Rename>)> {
    fn walk(value: &mut Value, renames: &mut [(&Rename, bool)]) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    match value {
                        Value::String(text) if NAMES.contains(&name.as_str()) => {
                            if let Some((rename, is_used)) =
                                renames.iter_mut().find(|(rename, _)| rename.from == *text)
                            {
                                text.clone_from(&rename.to);
                                *is_used = true;
                            }
                        }
                        value => walk(value, renames),
                    }
                }
            }
            Value::Array(values) => values.iter_mut().for_each(|value| walk(value, renames)),
            _ => {}
        }
    }
    let mut used: Vec<_> = renames.iter().map(|rename| (rename, false)).collect();
    let mut value = serde_json::to_value(config)?;
    walk(&mut value, &mut used);
    let unused = used.into_iter().filter(|(_, is_used)| !is_used);
    let unused = unused.map(|(rename, _)| rename).collect();
    Ok((serde_json::from_value(value)?, unused))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;

    #[test]
    fn names_of_the_host_are_replaced_and_others_are_not() {
        let config = json!({
            "payload": {"kernel": "/a", "cmdline": "/a"},
            "disks": [{"path": "/a"}, {"path": "/b"}],
        });
        let config: VmConfig = serde_json::from_value(config).unwrap();
        let rename = |from: &str, to: &str| Rename {
            from: from.to_owned(),
            to: to.to_owned(),
        };
        let renames = [rename("/a", "/x"), rename("/c", "/y")];
        let (here, unused) = renamed(&config, &renames).unwrap();
        let payload = &here.payload;
        assert_eq!(payload.kernel.as_deref(), Some(Path::new("/x")));
        assert_eq!(payload.cmdline.as_deref(), Some("/a"));
        let disks = here.disks.as_ref().unwrap();
        assert_eq!(disks[0].path.as_deref(), Some(Path::new("/x")));
        assert_eq!(disks[1].path.as_deref(), Some(Path::new("/b")));
        assert_eq!(unused, [&renames[1]]);
    }
}
