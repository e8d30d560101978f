//! Errors are reported clearly, and nothing is lost.

use std::{fs, os::unix::net::UnixStream};

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::{Context, Entry};
use crate::gantry::{BZIMAGE, Gantry, INITRAMFS, merge, vm};

pub const SCENARIOS: &[Entry] = &[
    ("errors: every call without a VM", without_vm),
    ("errors: calls in the wrong state", wrong_state),
    ("errors: kernels and initramfs that are none", payloads),
    ("errors: devices that cannot be made", devices),
    (
        "errors: JSON that is unknown, ill-typed or none",
        json_errors,
    ),
    (
        "errors: what Gantry does not do is refused, not ignored",
        unsupported,
    ),
    ("errors: a body of 100 MiB", large_body),
    ("errors: 1,000 idle connections", idle_connections),
];

fn without_vm(context: &Context) -> Result<()> {
    let gantry = Gantry::start(&context.dir, &[])?;
    let ping = gantry.ok("GET", "vmm.ping", None)?;
    ensure!(
        ping["version"].is_string() && ping["pid"] == gantry.pid(),
        "{ping}"
    );
    for call in [
        "boot",
        "pause",
        "resume",
        "shutdown",
        "reboot",
        "power-button",
        "delete",
    ] {
        gantry.refused(&format!("vm.{call}"), None, 404, "vm.create")?;
    }
    for call in ["vm.info", "vm.counters"] {
        ensure!(gantry.request("GET", call, None)?.status == 404, "{call}");
    }
    for (call, body) in [
        ("vm.resize", json!({"desired_vcpus": 2})),
        ("vm.add-disk", json!({"path": "/x"})),
        ("vm.add-net", json!({})),
        ("vm.remove-device", json!({"id": "x"})),
        ("vm.snapshot", json!({"destination_url": "file:///tmp/s"})),
        ("vm.coredump", json!({"destination_url": "file:///tmp/c"})),
    ] {
        gantry.refused(call, Some(body), 404, "vm.create")?;
    }
    ensure!(gantry.request("GET", "vm.nothing", None)?.status == 404);
    ensure!(gantry.request("GET", "vm.boot", None)?.status >= 400);
    Ok(())
}

fn wrong_state(context: &Context) -> Result<()> {
    let gantry = Gantry::start(&context.dir, &[])?;
    gantry.put("vm.create", vm(&gantry.serial))?;
    gantry.refused("vm.create", Some(vm(&gantry.serial)), 500, "already")?;
    for call in [
        "vm.pause",
        "vm.resume",
        "vm.shutdown",
        "vm.reboot",
        "vm.power-button",
    ] {
        gantry.refused(call, None, 405, "vm.boot")?;
    }
    gantry.act("vm.boot")?;
    gantry.refused("vm.boot", None, 405, "already")
}

fn boot_fails(gantry: &Gantry, more: Value, words: &str) -> Result<()> {
    let mut config = vm(&gantry.serial);
    merge(&mut config, more);
    gantry.put("vm.create", config)?;
    gantry.refused("vm.boot", None, 500, words)?;
    gantry.act("vm.delete")
}

fn payloads(context: &Context) -> Result<()> {
    let gantry = Gantry::start(&context.dir, &[])?;
    let file = |name: &str, bytes: &[u8]| -> Result<String> {
        let path = context.dir.join(name);
        fs::write(&path, bytes)?;
        Ok(path.display().to_string())
    };
    let kernel = fs::read(BZIMAGE)?;
    let text = file("text", b"this is no kernel, however long one looks at it\n")?;
    let empty = file("empty", b"")?;
    let cut = file("cut", &kernel[..kernel.len() / 2])?;
    let header = file("header", &kernel[..700])?;
    for path in ["/no/such/kernel", &text, &empty, &cut, &header] {
        boot_fails(&gantry, json!({"payload": {"kernel": path}}), path)?;
    }
    boot_fails(
        &gantry,
        json!({"payload": {"initramfs": "/no/such/fs"}}),
        "/no/such/fs",
    )?;
    boot_fails(
        &gantry,
        json!({"payload": {"initramfs": empty}}),
        "initramfs",
    )?;
    let long = "x".repeat(70_000);
    boot_fails(
        &gantry,
        json!({"payload": {"cmdline": long}}),
        "command line",
    )?;
    // After all these errors, a correct configuration boots.
    gantry.create_and_boot(json!({"payload": {"initramfs": INITRAMFS}}))?;
    Ok(())
}

fn devices(context: &Context) -> Result<()> {
    let gantry = Gantry::start(&context.dir, &[])?;
    let cut = context.dir.join("cut.qcow2");
    fs::write(&cut, &fs::read("/images/empty.qcow2")?[..100])?;
    for (more, words) in [
        (
            json!({"disks": [{"path": "/no/such/disk"}]}),
            "/no/such/disk",
        ),
        (
            json!({"disks": [{"path": cut, "image_type": "Qcow2"}]}),
            "cut.qcow2",
        ),
        (json!({"net": [{"tap": "lo"}]}), "lo"),
        (
            json!({"pmem": [{"file": "/no/such/pmem"}]}),
            "/no/such/pmem",
        ),
        (json!({"rng": {"src": "/no/such/rng"}}), "/no/such/rng"),
        (
            json!({"vsock": {"cid": 3, "socket": "/no/such/dir/sock"}}),
            "/no/such/dir/sock",
        ),
    ] {
        boot_fails(&gantry, more, words)?;
    }
    Ok(())
}

fn json_errors(context: &Context) -> Result<()> {
    let gantry = Gantry::start(&context.dir, &[])?;
    for body in [
        "",
        "{",
        "[]",
        "null",
        "{\"payload\": 7}",
        "\u{0}",
        "{\"cpus\": {}}",
    ] {
        let answer = crate::http::request(&gantry.socket, "PUT", "vm.create", Some(body))?;
        ensure!(
            answer.status == 400,
            "{body:?} was answered with {}",
            answer.status
        );
    }
    let none = json!({"cpus": {"boot_vcpus": 0, "max_vcpus": 0}, "payload": {"kernel": BZIMAGE}});
    ensure!(gantry.request("PUT", "vm.create", Some(&none))?.status >= 400);
    gantry.ok("GET", "vmm.ping", None)?;
    Ok(())
}

fn unsupported(context: &Context) -> Result<()> {
    let gantry = Gantry::start(&context.dir, &[])?;
    for more in [
        json!({"tpm": {"socket": "/tmp/s"}}),
        json!({"vdpa": [{"path": "/dev/v", "num_queues": 1}]}),
        json!({"platform": {"tdx": true}}),
        json!({"payload": {"igvm": "/fw"}}),
        json!({"cpus": {"boot_vcpus": 1, "max_vcpus": 1, "kvm_hyperv": true}}),
    ] {
        let mut config = vm(&gantry.serial);
        merge(&mut config, more.clone());
        let answer = gantry.request("PUT", "vm.create", Some(&config))?;
        ensure!(
            answer.status >= 400 && answer.text.contains("not supported"),
            "{more} was answered with {}: {}",
            answer.status,
            answer.text
        );
    }
    Ok(())
}

fn large_body(context: &Context) -> Result<()> {
    let gantry = Gantry::start(&context.dir, &[])?;
    let body = " ".repeat(100 << 20);
    let answer = crate::http::request(&gantry.socket, "PUT", "vm.create", Some(&body))?;
    ensure!(answer.status == 413, "answered with {}", answer.status);
    drop(body);
    gantry.ok("GET", "vmm.ping", None)?;
    let status = fs::read_to_string(format!("/proc/{}/status", gantry.pid()))?;
    let peak = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .unwrap_or_default();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse()?;
    ensure!(peak < 32 << 10, "it took {peak} KiB");
    Ok(())
}

fn idle_connections(context: &Context) -> Result<()> {
    let gantry = Gantry::start(&context.dir, &[])?;
    crate::net::sh("true")?;
    let idle: Vec<_> = (0..1000)
        .filter_map(|_| UnixStream::connect(&gantry.socket).ok())
        .collect();
    ensure!(idle.len() > 100, "only {} connections", idle.len());
    gantry.ok("GET", "vmm.ping", None)?;
    let _guest = gantry.create_and_boot(json!({}))?;
    Ok(())
}
