//! Responses of a VMM whose VM has left, until it exits: none of this needs KVM.

use serde_json::json;
use vmm_config::VmConfig;
use vmm_migration::{gpu_driver::GpuDriver, offer::Offer};

use super::*;
use crate::tests::control;

#[test]
fn an_offer_has_no_more_devices_than_a_machine() {
    use vmm_config::{Configured, DiskConfig};

    let mut config = VmConfig::default();
    assert_eq!(arrival::too_many(&config), None);
    config.disks = Some(vec![DiskConfig::parse("path=/d").unwrap(); 5000]);
    let why = arrival::too_many(&config).unwrap();
    assert!(why.contains("no machine has more than 4096"), "{why}");
    let zones = vec![json!({"id": "z", "size": 2_097_152}); 10_000];
    let rules = vec![json!({"path": "/p", "access": "r"}); 10_000];
    for many in [
        json!({"payload": {}, "memory": {"size": 0, "zones": zones}}),
        json!({"payload": {}, "landlock_rules": rules}),
    ] {
        let config = serde_json::from_value(many).unwrap();
        let why = arrival::too_many(&config).unwrap();
        assert!(why.contains("a list of 10000 entries"), "{why}");
    }
}

#[test]
fn a_tap_without_a_name_stays_and_is_kept_where_it_is_handed_over() {
    use vmm_config::{Configured, NetConfig};
    use vmm_machine::handover::Given;

    let end = || std::os::fd::OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let mut config = VmConfig::default();
    let mut card = NetConfig::parse("id=lan").unwrap();
    config.net = Some(vec![card.clone()]);
    assert_eq!(config.unnamed_taps(), [""; 0]);
    card.fds = vec![end().into()];
    config.net = Some(vec![card.clone()]);
    assert_eq!(config.unnamed_taps(), ["lan"]);
    // A configuration that is sent has no descriptors.
    card.fds.clear();
    let named = NetConfig::parse("id=wan,tap=t").unwrap();
    config.net = Some(vec![card, named]);
    let given = Given::default();
    given.add_tap("lan".to_owned(), 0, end());
    given.add_tap("wan".to_owned(), 0, end());
    arrival::keep_taps(&mut config, &[], &given).unwrap();
    let kept = config.unnamed_taps();
    assert_eq!(kept, [""; 0], "the source has made it");
    let both = ["lan", "wan"].map(str::to_owned);
    arrival::keep_taps(&mut config, &both, &given).unwrap();
    assert_eq!(config.unnamed_taps(), ["lan"]);
    assert_eq!(given.taps("lan").len(), 1, "the machine gets it, too");
}

#[test]
fn files_that_come_with_a_vm_are_what_they_are_said_to_be() {
    use std::os::{fd::OwnedFd, unix::net::UnixListener};

    use vmm_migration::files::{FileUse, GivenFile};

    let offer: Offer = serde_json::from_value(json!({
        "protocol": 0, "state_version": 0, "gantry": "", "config": VmConfig::default(), "regions": [],
        "verify": false, "dry_run": false, "paused": false, "local": true,
    }))
    .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let memory: fn() -> FileUse = || FileUse::Memory {
        region: 0,
        offset: 0,
    };
    let socket: fn() -> FileUse = || FileUse::Socket { path: "/s".into() };
    let tap: fn() -> FileUse = || FileUse::Tap {
        id: "lan".to_owned(),
        queue: 0,
    };
    let open = |path: &str| OwnedFd::from(File::open(path).unwrap());
    let listener = UnixListener::bind(folder.path().join("s")).unwrap();
    // What a file system in user space serves looks like this one.
    for (what, file, refused) in [
        (memory, open("/proc/version"), true),
        (memory, open("/dev/null"), true),
        (socket, open("/proc/version"), true),
        (tap, open("/proc/version"), true),
        (socket, listener.into(), false),
        (tap, open("/dev/null"), false),
    ] {
        let file = GivenFile { what: what(), file };
        let answer = arrival::given_files(&offer, vec![file]).map(drop);
        let why = answer.err().unwrap_or_default();
        assert_eq!(why.contains("said to be"), refused, "{why}");
    }
    let memfd = base::memfd::create(c"memory").unwrap();
    let file = GivenFile {
        what: memory(),
        file: memfd.into(),
    };
    let why = arrival::given_files(&offer, vec![file]).unwrap_err();
    assert!(why.contains("order"), "it is of a region: {why}");
}

#[test]
fn all_who_watch_a_vm_leave_hear_how_it_has_ended() {
    let mut control = control();
    let latest = Instant::now() + WATCHED;
    control.migrations.leave_at = Some(latest);
    control.migrations.last = Some(MigrationInfo {
        phase: Phase::Completed,
        ..MigrationInfo::default()
    });
    let mut hears = || {
        let Ok(Response::Migration(info)) = control.migration_info() else {
            panic!("nothing is said");
        };
        assert_eq!(info.phase, Phase::Completed);
        assert_eq!(control.exit, None);
        control.migrations.leave_at
    };
    let shortened = hears();
    assert!(shortened < Some(latest));
    // Polling cannot keep it alive.
    assert_eq!(hears(), shortened);
}

#[test]
fn nothing_begins_in_a_vmm_that_ends_because_its_vm_has_left() {
    let mut control = control();
    control.migrations.leave_at = Some(Instant::now() + WATCHED);
    let refused = control.refuse_if_migrating(&Request::VmBoot);
    let said = refused.unwrap_err().to_string();
    assert!(said.contains("the VM has left"), "{said}");
    control.refuse_if_migrating(&Request::VmMigration).unwrap();
}

#[test]
fn a_driver_that_this_host_does_not_have_is_a_reason_to_refuse_a_vm() {
    let mut control = control();
    let mut offer: Offer = serde_json::from_value(json!({
        "protocol": 0, "state_version": 0, "gantry": "", "config": VmConfig::default(), "regions": [],
        "verify": false, "dry_run": true, "paused": false,
    }))
    .unwrap();
    let mut reasons = |gpu_driver| {
        offer.gpu_driver = gpu_driver;
        let said = control.reasons_to_refuse(&offer).0.join("; ");
        said.contains("CUDA programs")
    };
    assert!(!reasons(None));
    assert!(reasons(Some(GpuDriver {
        version: "0.0".to_owned(),
        models: Vec::new(),
        is_used: true,
    })));
}
