//! Requests about VMs that have not booted: none of this needs KVM.

use std::{
    fs::File,
    io::Read,
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
    thread,
};

use base::Cancel;
use devices::accel::{
    Pool,
    moving::{Move, Moved},
};
use serde_json::json;
use vmm_api::{Response, Status, VmRemoveDevice};
use vmm_confinement::{landlock, seccomp::Enforcement};

use super::{accel::Moving, *};

pub(super) fn control() -> Control {
    let started = Instant::now();
    let filters = Filters::new(Enforcement::Off);
    Control::new(filters, started, EventMonitor::disabled(started)).unwrap()
}

/// A control loop with a VM that has not booted, with the given configuration.
fn created(config: serde_json::Value) -> Control {
    let mut control = control();
    let mut config = config;
    config["payload"] = json!({"kernel": "/k"});
    ask(&mut control, "vm.create", &config, Vec::new()).unwrap();
    control
}

fn ask(
    control: &mut Control,
    path: &str,
    body: &serde_json::Value,
    fds: Vec<OwnedFd>,
) -> Result<Response, ApiError> {
    let path = format!("{}{path}", vmm_api::PREFIX);
    let request = vmm_api::route("PUT", &path, body.to_string().as_bytes(), fds);
    let request = request.map_err(|refusal| refusal.error)?;
    let (sender, answer) = mpsc::channel();
    control.take(
        request,
        Reply::new(move |answer| sender.send(answer).unwrap()),
    );
    // Some answers come when a thread has done what may take a while.
    loop {
        match answer.recv_timeout(Duration::from_millis(1)) {
            Ok(answer) => return answer,
            Err(_) => control.migration_work(),
        }
    }
}

#[test]
fn a_vm_is_not_told_of_a_watchdogs_reset_of_another_one() {
    use devices::{acpi::Watchdog, bus::BusDevice};
    /// Offset of the register of which bit 0 says that the watchdog has reset the machine.
    const STATUS: u64 = arch::acpi::wdat::registers::STATUS as u64;
    let has_reset = |control: &Control| {
        let watchdog = Watchdog::new(Arc::clone(control.sender.watchdog()));
        let mut status = [0; 1];
        watchdog.read(STATUS, &mut status);
        status == [1]
    };
    for is_another in [false, true] {
        let mut control = created(json!({}));
        let watchdog = Watchdog::new(Arc::clone(control.sender.watchdog()));
        let saved = json!({"countdown": 2, "left_ms": 0, "has_reset": false});
        watchdog.restore(serde_json::from_value(saved).unwrap());
        watchdog.resume();
        assert!(watchdog.take_expiry());
        drop(watchdog);
        if is_another {
            control.handle(Request::VmDelete).unwrap();
        }
        assert_eq!(has_reset(&control), !is_another);
    }
}

fn refused(control: &mut Control, path: &str, body: &serde_json::Value) -> String {
    let error = ask(control, path, body, Vec::new()).unwrap_err();
    assert_eq!(error.status(), Status::BadRequest, "{error}");
    error.to_string()
}

#[test]
fn an_accelerator_does_not_go_before_the_devices_that_it_tracks() {
    let mut control = created(json!({"accels": [{"id": "a"}]}));
    let add = |tracked| json!({"path": "/nowhere", "id": "gpu", "tracked": tracked});
    let said = refused(&mut control, "vm.add-device", &add("b"));
    assert!(said.contains("there is no accelerator"), "{said}");
    ask(&mut control, "vm.add-device", &add("a"), Vec::new()).unwrap();
    let remove = |id| json!({"id": id});
    let said = refused(&mut control, "vm.remove-device", &remove("a"));
    assert!(
        said.contains("tracks physical device \"gpu\": remove that first"),
        "{said}"
    );
    let cancel = json!({"id": "a", "cancel": true});
    let said = refused(&mut control, "vm.remove-device", &cancel);
    assert!(said.contains("there is nothing to cancel"), "{said}");
    for id in ["gpu", "a"] {
        ask(&mut control, "vm.remove-device", &remove(id), Vec::new()).unwrap();
    }
}

#[test]
fn nothing_is_tracked_by_an_accelerator_that_is_on_its_way_out() {
    let mut control = created(json!({"accels": [{"id": "a"}]}));
    control.removals.ask_for("a");
    let add = json!({"path": "/nowhere", "id": "gpu", "tracked": "a"});
    let said = refused(&mut control, "vm.add-device", &add);
    assert!(said.contains("\"a\" is on its way out"), "{said}");
}

#[test]
fn the_name_of_a_device_that_is_being_removed_is_said_to_be_taken_by_it() {
    let mut control = created(json!({"net": [{"id": "n"}]}));
    control.removals.ask_for("n");
    let added = ask(&mut control, "vm.add-net", &json!({"id": "n"}), Vec::new());
    let error = added.unwrap_err();
    assert_eq!(error.status(), Status::Conflict);
    assert!(
        error.to_string().contains("remove it with force"),
        "{error}"
    );
}

/// A descriptor, and a function that tells whether all copies of it have been closed.
fn descriptor() -> (OwnedFd, impl FnMut() -> bool) {
    let (reader, writer) = std::io::pipe().unwrap();
    let mut reader = File::from(OwnedFd::from(reader));
    // SAFETY: sets a flag of an open descriptor.
    unsafe { libc::fcntl(reader.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
    (writer.into(), move || {
        matches!(reader.read(&mut [0]), Ok(0))
    })
}

#[test]
fn descriptors_of_a_card_that_is_refused_are_closed() {
    let (fd, mut is_closed) = descriptor();
    ask(&mut control(), "vm.add-net", &json!({}), vec![fd]).unwrap_err();
    assert!(is_closed(), "there is no VM that could use it");
    let mut control = created(json!({"net": [{"id": "n"}]}));
    let (fd, mut is_closed) = descriptor();
    ask(&mut control, "vm.add-net", &json!({"id": "n"}), vec![fd]).unwrap_err();
    assert!(is_closed(), "the name is taken");
}

#[test]
fn descriptors_of_a_card_live_as_long_as_it_does() {
    let mut control = created(json!({}));
    let [(first, mut is_first_closed), (second, mut is_second_closed)] =
        [descriptor(), descriptor()];
    for (id, fd) in [("a", first), ("b", second)] {
        ask(&mut control, "vm.add-net", &json!({"id": id}), vec![fd]).unwrap();
    }
    assert!(!is_first_closed());
    control
        .handle(Request::VmRemoveDevice(VmRemoveDevice {
            id: "a".to_owned(),
            ..Default::default()
        }))
        .unwrap();
    assert!(is_first_closed());
    assert!(!is_second_closed());
    control.handle(Request::VmDelete).unwrap();
    assert!(is_second_closed());
}

#[test]
fn a_vm_that_is_switched_off_cannot_become_one_that_could_not_be_built() {
    let mut control = created(json!({"cpus": {"boot_vcpus": 1, "max_vcpus": 2}}));
    let before = control.life.config().cloned();
    let error = refused(&mut control, "vm.resize", &json!({"desired_ram": 1000}));
    assert!(error.contains("memory.size"), "{error}");
    let both = json!({"desired_vcpus": 3, "desired_ram": 2_u64 << 30});
    let error = refused(&mut control, "vm.resize", &both);
    assert!(error.contains("cpus.max_vcpus"), "{error}");
    let error = refused(&mut control, "vm.resize", &json!({"desired_balloon": 4096}));
    assert!(error.contains("balloon"), "{error}");
    let elsewhere = json!({"path": "/dev/null", "pci_segment": 5});
    let error = refused(&mut control, "vm.add-disk", &elsewhere);
    assert!(error.contains("disks[0].pci_segment"), "{error}");
    let limited = json!({"path": "/dev/null", "rate_limit_group": "none"});
    let error = refused(&mut control, "vm.add-disk", &limited);
    assert!(error.contains("rate limit group"), "{error}");
    let nowhere = json!({"path": "/nowhere/disk.raw"});
    let error = refused(&mut control, "vm.add-disk", &nowhere);
    assert!(error.contains("cannot use /nowhere/disk.raw"), "{error}");
    assert_eq!(control.life.config().cloned(), before);
    let more = json!({"desired_vcpus": 2, "desired_ram": 2_u64 << 30});
    ask(&mut control, "vm.resize", &more, Vec::new()).unwrap();
    let config = control.life.config().unwrap();
    assert_eq!((config.cpus.boot_vcpus, config.memory.size), (2, 2 << 30));
}

#[test]
fn a_snapshot_whose_configuration_cannot_be_built_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({"payload": {"kernel": "/k"}, "memory": {"size": 4097}});
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let url = format!("file://{}", dir.path().display());
    let error = refused(&mut control(), "vm.restore", &json!({"source_url": url}));
    assert!(error.contains("memory.size"), "{error}");
}

#[test]
fn a_restored_machine_uses_files_by_other_names() {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({
        "payload": {"kernel": "/k"},
        "serial": {"mode": "Socket", "socket": "/serial"},
        // Refused where it is looked at.
        "memory": {"size": 4097},
    });
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let url = format!("file://{}", dir.path().display());
    let error = |renames| {
        let body = json!({"source_url": url, "renames": renames});
        refused(&mut control(), "vm.restore", &body)
    };
    let renames = json!([{"from": "/serial", "to": "/other"}]);
    assert!(error(renames).contains("memory.size"));
    let renames = json!([{"from": "/serial", "to": "/other"}, {"from": "/disk", "to": "/x"}]);
    let why = error(renames);
    assert!(why.contains("has no /disk"), "{why}");
}

#[test]
fn descriptors_for_a_restore_that_fails_are_closed() {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({"payload": {"kernel": "/k"}, "net": [{"id": "n"}]});
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let (fd, mut is_closed) = descriptor();
    let url = format!("file://{}", dir.path().display());
    let body = json!({"source_url": url, "net_fds": [{"id": "other", "num_fds": 1}]});
    ask(&mut control(), "vm.restore", &body, vec![fd]).unwrap_err();
    assert!(is_closed());
}

#[test]
fn the_end_of_a_move_of_a_machine_that_is_gone_is_none_of_the_next_move() {
    let mut control = control();
    let begin = |control: &mut Control, number| {
        let (sender, answer) = mpsc::channel();
        let moving = Moving {
            number,
            reply: Reply::new(move |answer| sender.send(answer).unwrap()),
            cancel: Cancel::default(),
            all_gone: Default::default(),
        };
        let cancel = moving.cancel.clone();
        control.moves.insert("gpu".to_owned(), moving);
        (answer, cancel)
    };
    let moved = |cancel: &Cancel| Moved {
        asked: Move {
            slice: Some(0),
            to: Pool {
                socket: "/pool".into(),
                device: String::new(),
            },
            drain: std::time::Duration::ZERO,
            postcopy: false,
            cancel: cancel.clone(),
            all_gone: Default::default(),
        },
        slices: vec![0],
        reasons: Vec::new(),
    };
    let (first, gone) = begin(&mut control, 1);
    control.abandon_moves();
    assert!(gone.is_cancelled());
    first.try_recv().unwrap().unwrap_err();
    let (second, cancel) = begin(&mut control, 2);
    control.accel_moved("gpu", 1, moved(&gone));
    second.try_recv().unwrap_err();
    control.accel_moved("gpu", 2, moved(&cancel));
    second.try_recv().unwrap().unwrap();
    assert!(!cancel.is_cancelled());
}

#[test]
fn a_vm_that_is_restored_is_restricted_by_landlock() {
    if landlock::version().is_none() {
        return println!("skipped: this kernel has no Landlock");
    }
    let dir = tempfile::tempdir().unwrap();
    let [snapshot, secret, rule] = ["snapshot", "secret", "rule"].map(|name| dir.path().join(name));
    std::fs::create_dir(&snapshot).unwrap();
    std::fs::write(&secret, "").unwrap();
    std::fs::write(&rule, "").unwrap();
    let url = format!("file://{}", snapshot.display());
    // Saved with Landlock, and restored with it.
    for saved in [true, false] {
        let config = json!({"payload": {"kernel": "/gone"}, "landlock_enable": saved});
        std::fs::write(snapshot.join("config.json"), config.to_string()).unwrap();
        let body = json!({
            "source_url": url,
            "landlock_enable": !saved,
            "landlock_rules": [{"path": rule, "access": "r"}],
        });
        let (secret, rule) = (secret.clone(), rule.clone());
        // Landlock restricts this thread, for good.
        let restored = thread::spawn(move || {
            let error = ask(&mut control(), "vm.restore", &body, Vec::new()).unwrap_err();
            assert!(error.to_string().contains("state.json"), "{error}");
            let denied = File::open(&secret).unwrap_err();
            assert_eq!(denied.kind(), std::io::ErrorKind::PermissionDenied);
            File::open(&rule).unwrap();
            let error = vmm_machine::error::MachineError::Host {
                action: "open it",
                source: denied,
            };
            let error = ApiError::internal(&error).to_string();
            assert!(error.contains("--landlock-rules"), "{error}");
        });
        restored.join().unwrap();
    }
}

#[test]
fn a_kernel_without_landlock_refuses_what_only_it_limits() {
    use seccompiler::{SeccompAction, SeccompFilter, TargetArch};

    let folder = tempfile::tempdir().unwrap();
    let said = |body: serde_json::Value| {
        let asked = move || {
            // As a kernel answers that was built or booted without it.
            let rules = [(libc::SYS_landlock_create_ruleset, Vec::new())].into();
            let missing = SeccompAction::Errno(libc::EOPNOTSUPP as u32);
            let filter =
                SeccompFilter::new(rules, SeccompAction::Allow, missing, TargetArch::x86_64);
            let program: seccompiler::BpfProgram = filter.unwrap().try_into().unwrap();
            seccompiler::apply_filter(&program).unwrap();
            ask(&mut control(), "vm.receive-migration", &body, Vec::new())
                .unwrap_err()
                .to_string()
        };
        thread::spawn(asked).join().unwrap()
    };
    let socket = format!("unix:{}", folder.path().join("m").display());
    let paths = [folder.path()];
    for (body, advice) in [
        (
            json!({"receiver_url": "tcp:127.0.0.1:0"}),
            ["unix:", "--tls-dir"],
        ),
        (
            json!({"receiver_url": socket, "paths": paths}),
            ["without --paths", "lsm="],
        ),
    ] {
        let is_limited = body.get("paths").is_some();
        let said = said(body);
        assert!(advice.iter().all(|part| said.contains(part)), "{said}");
        assert!(!said.contains("--landlock"), "{said}");
        assert_eq!(said.contains("--paths"), is_limited, "{said}");
    }
}

#[test]
fn a_port_that_other_hosts_reach_needs_certificates() {
    let body = json!({"receiver_url": "tcp:0.0.0.0:0"});
    let said = refused(&mut control(), "vm.receive-migration", &body);
    assert!(said.contains("--insecure"), "{said}");
    let body = json!({"receiver_url": "tcp:0.0.0.0:0", "tls_dir": "/t", "insecure": true});
    let said = refused(&mut control(), "vm.receive-migration", &body);
    assert!(said.contains("without tls_dir"), "{said}");
}
