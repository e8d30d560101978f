//! How much of the program has to know a kind of device.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs,
    path::{Path, PathBuf},
};

use vmm::cli;
use vmm_api::{PREFIX, Request, route};
use vmm_config::{Configured, Device, DiskConfig, FileUse, VmConfig};

/// The files outside a device's own that name it: where its modules are declared (`virtio/src/lib.rs`,
/// `kinds/mod.rs`, `config/src/lib.rs`, with the list of kinds), the role of its threads and what that
/// role may do, one table for all of them, and the description of the API.
const SHARED: &[&str] = &[
    "devices/model/src/thread.rs",
    "devices/virtio/src/lib.rs",
    "resources/openapi/gantry.yaml",
    "vmm/config/src/lib.rs",
    "vmm/confinement/src/seccomp/table.rs",
    "vmm/machine/src/kinds/mod.rs",
];

/// Folders with what the program is made of; `tests` and `fuzz` are not among them.
const SOURCES: &[&str] = &[
    "arch",
    "base",
    "devices",
    "hypervisor",
    "remoting",
    "resources",
    "vmm",
];

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() {
            if !["tests", "target"].contains(&name) {
                files(&path, found);
            }
        } else if name != "tests.rs" && (name.ends_with(".rs") || name.ends_with(".yaml")) {
            found.push(path);
        }
    }
}

/// Whether a text has a word, or a name with that part: `pmem`, `virtio-pmem`, `PmemConfig`.
fn names(text: &str, kind: &str) -> bool {
    let capital = format!("{}{}", kind[..1].to_uppercase(), &kind[1..]);
    let part = |word: &str| {
        let parts = word.split('_');
        parts.into_iter().any(|part| part == kind) || word.contains(&capital)
    };
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .any(|word| part(word) || word == kind.to_uppercase())
}

#[test]
fn a_kind_of_device_is_named_in_six_files_besides_its_own() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut all = Vec::new();
    for folder in SOURCES {
        files(&root.join(folder), &mut all);
    }
    assert!(all.len() > 300, "{}", all.len());
    let own = |path: &Path| path.iter().any(|part| part == "pmem" || part == "pmem.rs");
    let mut naming: Vec<&Path> = all
        .iter()
        .filter(|path| !own(path) && names(&fs::read_to_string(path).unwrap(), "pmem"))
        .map(|path| path.strip_prefix(root).unwrap())
        .collect();
    naming.sort_unstable();
    assert_eq!(naming, SHARED.iter().map(Path::new).collect::<Vec<_>>());
}

#[test]
fn words_are_told_from_parts_of_others() {
    for text in [
        "virtio-pmem",
        "\"pmem\"",
        "PmemConfig",
        "VmAddPmem",
        "const PMEM:",
    ] {
        assert!(names(text, "pmem"), "{text}");
    }
    for text in ["clEnqueueUnmapMemObject", "svmmem", "unmapmem"] {
        assert!(!names(text, "pmem"), "{text}");
    }
}

#[test]
fn each_kind_has_its_option_its_command_and_its_path() {
    let mut command = cli::command("gantry".as_ref());
    let help = command.render_long_help().to_string();
    let ctl = cli::help_of(["ctl"]).unwrap();
    for kind in VmConfig::KINDS {
        assert!(help.contains(&format!("--{} ", kind.option)), "{kind:?}");
        let added = kind.hot_plug.is_some();
        let listed = ctl.split_whitespace().any(|word| word == kind.command);
        assert_eq!(listed, added, "{kind:?}");
        let answer = route("PUT", &format!("{PREFIX}{}", kind.path), b"[", Vec::new());
        let refusal = answer.unwrap_err().error.to_string();
        assert_eq!(
            refusal.contains("the body of"),
            added,
            "{kind:?}: {refusal}"
        );
    }
}

#[test]
fn a_device_has_its_file_its_slot_and_its_end() {
    let path = format!("{PREFIX}vm.add-disk");
    let add = |body: &str| match route("PUT", &path, body.as_bytes(), Vec::new()) {
        Ok(Request::VmAdd(device)) => device,
        other => panic!("{other:?}"),
    };
    let mut config = VmConfig::default();
    config.payload.kernel = Some("/k".into());
    config.put_device(add(r#"{"path":"/dev/null","id":"x","pci_device_id":7}"#));
    assert!(config.has_device("x"));
    let opened =
        |(_, device): &(_, &dyn Device)| device.files() == [FileUse::open("/dev/null", false)];
    assert!(config.all_devices().iter().any(opened));
    let taken = DiskConfig::parse("path=/b,pci_device_id=7").unwrap();
    config.put_device(Box::new(taken));
    let invalid = config.validate().unwrap_err().to_string();
    assert!(invalid.contains("slot 7"), "{invalid}");
    assert!(config.take_device("x") && !config.take_device("x"));
    let json = serde_json::to_value(&config).unwrap();
    assert_eq!(json["disks"][0]["path"], "/b");
    assert_eq!(serde_json::from_value::<VmConfig>(json).unwrap(), config);
}
