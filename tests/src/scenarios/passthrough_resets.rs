//! Resets by the guest, which take time on the host: only the guest waits for them.

use std::time::Instant;

use anyhow::{Result, ensure};
use serde_json::json;

use super::{
    Context, Entry,
    passthrough_state::disk_works,
    passthrough_topology::{SYSFS, set_config, works, write_of},
};
use crate::{
    gantry::{Gantry, PATIENCE},
    guest::{COMMAND, STATUS},
    host_device::{EDU, EDU_BEHIND_PORT, EDU_OF_PORT, HostDevice, NVME},
};

pub const SCENARIOS: &[Entry] = &[
    (
        "passthrough: a guest that resets its device does not wait for the host",
        function,
    ),
    (
        "passthrough: the API answers while a guest resets two buses",
        buses,
    ),
];

fn function(context: &Context) -> Result<()> {
    const DISK: &str = "0000:00:0c.0";
    let nvme = HostDevice::take(NVME, 0)?;
    let more = json!({
        "memory": {"size": 512 << 20},
        "devices": [{"path": nvme.path, "id": "nvme", "pci_device_id": 12}],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    for pattern in ["one", "two"] {
        disk_works(&mut guest, pattern)?;
        guest.run(&format!("echo {DISK} > {SYSFS}/{DISK}/driver/unbind"))?;
        let said = guest.run(&format!("agent pci-reset {SYSFS}/{DISK}"))?;
        ensure!(said.contains("reset in"), "{said}");
        // Nobody has saved its registers.
        guest.run(&format!(
            "echo 1 > {SYSFS}/{DISK}/remove; echo 1 > /sys/bus/pci/rescan"
        ))?;
    }
    disk_works(&mut guest, "three")?;
    // A device that is being reset can be removed.
    guest.run(&format!("echo {DISK} > {SYSFS}/{DISK}/driver/unbind"))?;
    guest.send(&format!("agent pci-reset {SYSFS}/{DISK}"))?;
    let force = json!({"id": "nvme", "force": true});
    gantry.put("vm.remove-device", force)?;
    let log = gantry.log();
    ensure!(!log.contains("WARN"), "{log}");
    Ok(())
}

fn buses(context: &Context) -> Result<()> {
    const PORTS: [&str; 2] = ["0000:00:14.0", "0000:00:15.0"];
    const DEVICES: [&str; 3] = ["0000:01:00.0", "0000:01:00.1", "0000:02:00.0"];
    const BRIDGE_CONTROL: usize = 0x3e;
    const RESET: u8 = 0x40;
    let indices = [EDU_OF_PORT, EDU_OF_PORT + 1, EDU_BEHIND_PORT];
    let [one, other, single] = indices.map(|index| HostDevice::take(EDU, index));
    let (one, other, single) = (one?, other?, single?);
    let more = json!({
        "pci_root_ports": [
            {"id": "first", "pci_device_id": 20},
            {"id": "second", "pci_device_id": 21},
        ],
        "devices": [
            {"path": one.path, "id": "one", "parent": "first"},
            {"path": other.path, "id": "other", "parent": "first", "pci_function": 1},
            {"path": single.path, "id": "single", "parent": "second"},
        ],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    for bdf in DEVICES {
        works(&mut guest, bdf)?;
        guest.run(&format!("echo 1 > {SYSFS}/{bdf}/remove"))?;
    }
    // All at once: the second reset is requested before the first one is over.
    let both: Vec<_> = PORTS
        .iter()
        .flat_map(|port| [(port, RESET), (port, 0)])
        .map(|(port, control)| write_of(port, BRIDGE_CONTROL, control))
        .collect();
    // The thread is created for the first reset, and waits for the host.
    let has_begun = || Ok::<_, anyhow::Error>(gantry.thread_names()?.contains(&"_resets".into()));
    ensure!(!has_begun()?, "there has been a reset already");
    let deadline = Instant::now() + PATIENCE;
    guest.send(&both.join("; "))?;
    // While the host resets either bus, which takes a second.
    let mut answers = [0; 2];
    loop {
        let has_begun = has_begun()?;
        gantry.info()?;
        let counters = gantry.ok("GET", "vm.counters", None)?;
        let resets = ["one", "other", "single"].map(|id| counters[id]["bus_resets"].as_u64());
        match resets {
            [Some(1), Some(1), Some(1)] => break,
            [Some(0), Some(0), Some(0)] => answers[0] += u32::from(has_begun),
            [Some(1), Some(1), Some(0)] => answers[1] += 1,
            _ => {}
        }
        ensure!(Instant::now() < deadline, "{resets:?} resets");
    }
    ensure!(
        answers.iter().all(|count| *count > 0),
        "{answers:?} answers during the resets"
    );
    guest.wait_for(STATUS, COMMAND)?;
    for bdf in DEVICES {
        let rescan = format!("echo 1 > /sys/bus/pci/rescan; ls -d {SYSFS}/{bdf}");
        guest.eventually(&format!("{rescan} 2>/dev/null || true"), |found| {
            !found.is_empty()
        })?;
        works(&mut guest, bdf)?;
    }
    // Plugging and unplugging waits for the reset of a bus, and then finds it finished.
    set_config(&mut guest, PORTS[0], BRIDGE_CONTROL, RESET)?;
    gantry.put("vm.remove-device", json!({"id": "single", "force": true}))?;
    let again = json!({"path": single.path, "id": "single", "parent": "second"});
    set_config(&mut guest, PORTS[0], BRIDGE_CONTROL, 0)?;
    gantry.put("vm.add-device", again)?;
    works(&mut guest, DEVICES[2])?;
    // So does a pause.
    for control in [RESET, 0] {
        set_config(&mut guest, PORTS[0], BRIDGE_CONTROL, control)?;
    }
    gantry.act("vm.pause")?;
    let counters = gantry.ok("GET", "vm.counters", None)?;
    ensure!(counters["one"]["bus_resets"] == 3, "{counters}");
    gantry.act("vm.resume")?;
    let log = gantry.log();
    ensure!(!log.contains("WARN"), "{log}");
    Ok(())
}
