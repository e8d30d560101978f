//! A program of a guest changes between the guest's own pool, on a device that is passed through, and the
//! host's, while it runs: the device leaves and comes back meanwhile.
//!
//! What stands in for the device's driver is PoCL in the guest, in a pool that holds `edu`'s file.

use std::fs;

use anyhow::{Result, ensure};
use serde_json::json;

use super::{
    Context, Entry,
    accelerator::{accel, counter},
    hotplug::gone,
};
use crate::{
    gantry::Gantry,
    guest::Guest,
    host_device::{EDU, HostDevice},
    opencl::{self, DISK, Pool, ROOT, load_uio},
};

pub const SCENARIOS: &[Entry] = &[(
    "passthrough: a program goes to the host's device while its own one leaves, and comes back",
    seats,
)];

/// Times that the device leaves and comes back.
const ROUNDS: usize = 2;

/// Has the guest's agent run PoCL as the driver of its device: the pool, and whatever it starts, has the
/// device's file.
fn start_agent(guest: &mut Guest, size: u64) -> Result<()> {
    guest.run("gantry-agent install")?;
    guest.run(&format!(
        "mkdir -p {ROOT} && mount -t ext4 -o ro /dev/vda {ROOT} && \
         for d in proc sys dev run tmp; do mount -o bind /$d {ROOT}/$d || exit 1; done; \
         head -c {size} /dev/vdb >/tmp/gantry-accel && chmod +x /tmp/gantry-accel"
    ))?;
    guest.run(&format!(
        "echo 'for d in /sys/bus/pci/devices/*; do \
         [ $(cat $d/vendor) = 0x1234 ] && [ $(cat $d/device) = 0x11e8 ] && \
         exec 9<$d/resource0; done; \
         exec chroot {ROOT} /tmp/gantry-accel serve --spare 1 \"$@\"' >/tmp/local"
    ))?;
    let agent = "/usr/local/sbin/gantry-agent --local 'sh /tmp/local'";
    opencl::start_agent(guest, agent)?;
    let local = "/run/gantry/opencl.local.sock";
    guest.eventually(&format!("ls {local}"), |text| text == local)?;
    Ok(())
}

/// How many have the device's file.
const HOLDERS: &str = "ls -l /proc/[0-9]*/fd 2>/dev/null | grep -c resource0; true";

fn seats(context: &Context) -> Result<()> {
    let pool = Pool::start(&context.dir)?;
    let edu = HostDevice::take(EDU, 0)?;
    // For the guest, as a disk.
    let program = fs::read("/bin/gantry-accel")?;
    let path = context.dir.join("gantry-accel.raw");
    let mut padded = program.clone();
    padded.resize(program.len().next_multiple_of(512), 0);
    fs::write(&path, padded)?;
    let plugged = json!({"path": edu.path, "id": "edu"});
    let more = json!({
        "memory": {"size": 640 << 20},
        "payload": {"initramfs": opencl::guest_files(&context.dir)?},
        "disks": [
            {"path": DISK, "readonly": true, "image_type": "Raw"},
            {"path": path, "readonly": true, "image_type": "Raw"},
        ],
        "accels": [accel(&pool)],
        "devices": [plugged],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    load_uio(&mut guest)?;
    start_agent(&mut guest, program.len() as u64)?;
    guest.run("(opencl-moving /tmp/stop >/tmp/moving 2>&1; echo ended $? >>/tmp/moving) & true")?;
    let goes_on = |guest: &mut Guest| -> Result<()> {
        let before = guest.run("grep -c round /tmp/moving; true")?;
        let said = guest.eventually("grep -c round /tmp/moving; tail -n 1 /tmp/moving", |now| {
            now.lines().next() != Some(before.trim()) || now.contains("ended")
        })?;
        ensure!(!said.contains("ended"), "{said}");
        Ok(())
    };
    goes_on(&mut guest)?;
    ensure!(
        counter(&gantry, "workers_started")? == 0,
        "the host serves it"
    );
    for round in 0..ROUNDS {
        ensure!(guest.run(HOLDERS)?.trim() != "0", "nobody has the device");
        let moved = gantry.put("vm.move-accel", json!({"id": "a", "seat": "Host"}));
        let moved = moved.or_else(|error| {
            let log = guest.run("cat /tmp/agent.log; cat /tmp/moving; ps; true")?;
            Err(error.context(log))
        })?;
        ensure!(moved["applications"] == 1, "round {round}: {moved}");
        ensure!(counter(&gantry, "slices_in_use")? == 1);
        let holders = guest.run(HOLDERS)?;
        ensure!(holders.trim() == "0", "{holders} still have the device");
        gantry.put("vm.remove-device", json!({"id": "edu"}))?;
        gone(&gantry, "edu")?;
        goes_on(&mut guest)?;
        gantry.put("vm.add-device", json!({"path": edu.path, "id": "edu"}))?;
        guest.eventually(
            "cat /sys/bus/pci/devices/*/device | grep -c 0x11e8",
            |count| count.trim() == "1",
        )?;
        let moved = gantry.put("vm.move-accel", json!({"id": "a", "seat": "Local"}))?;
        ensure!(moved["applications"] == 1, "round {round}: {moved}");
        goes_on(&mut guest)?;
    }
    opencl::until("the host's slices are free", || {
        Ok(counter(&gantry, "slices_in_use")? == 0)
    })?;
    guest.run("touch /tmp/stop")?;
    let end = guest.eventually("cat /tmp/moving", |text| text.contains("ended"))?;
    ensure!(
        end.contains("rounds were right") && end.contains("ended 0"),
        "{end}"
    );
    Ok(())
}
