//! Physical devices that VFIO gets from drivers other than vfio-pci: a vendor's own, virtual
//! functions, and mediated devices.

use std::{
    fs,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{Context, Entry, hotplug::gone, passthrough::edu_works, passthrough_state::disk_works};
use crate::{
    gantry::{Gantry, PATIENCE},
    guest::Guest,
    host_device::{EDU, HostDevice, NVME, VARIANT, load},
};

pub const SCENARIOS: &[Entry] = &[
    (
        "passthrough: a device of a vendor's own VFIO driver, and one that it withholds",
        variant,
    ),
    (
        "passthrough: a virtual function, of a vendor's driver, while the host has the physical one",
        virtual_function,
    ),
    (
        "passthrough: a mediated device's ports and interrupts, unplugged and plugged again",
        mediated,
    ),
];

/// Whether the variant withholds all devices.
const WITHHOLD: &str = "/sys/module/vendors_vfio/parameters/withhold";

fn variant(context: &Context) -> Result<()> {
    let (edu, other) = (HostDevice::find(EDU, 0)?, HostDevice::find(EDU, 1)?);
    for device in [&edu, &other] {
        device.bind_to(VARIANT)?;
    }
    let more = json!({"devices": [{"path": edu.path, "id": "edu"}]});
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    edu_works(&mut guest)?;
    let add = json!({"path": other.path, "id": "other"});
    fs::write(WITHHOLD, "Y")?;
    let words = "vendors-vfio, the driver of";
    let refused = gantry.refused("vm.add-device", Some(add.clone()), 500, words);
    fs::write(WITHHOLD, "N")?;
    refused?;
    gantry.put("vm.add-device", add)?;
    guest.eventually("ls /sys/bus/pci/devices | wc -l", |count| count == "4")?;
    for id in ["other", "edu"] {
        gantry.put("vm.remove-device", json!({"id": id}))?;
        gone(&gantry, id)?;
    }
    Ok(())
}

/// Sends an admin command of the virtualization management (NVMe 1.4, 5.22) to the controller with
/// this sysfs directory.
fn manage(physical: &Path, action: u32, controller: u32, kind: u32, count: u32) -> Result<()> {
    const VIRTUALIZATION_MANAGEMENT: u8 = 0x1c;
    /// `struct nvme_admin_cmd` (linux/nvme_ioctl.h).
    #[repr(C)]
    #[derive(Default)]
    struct Command {
        opcode: u8,
        flags: u8,
        reserved: u16,
        words: [u32; 3],
        addresses: [u64; 2],
        lengths: [u32; 2],
        parameters: [u32; 6],
        timeout_ms: u32,
        result: u32,
    }
    const ADMIN: libc::c_ulong = 0xc048_4e41;
    const _: () = assert!(size_of::<Command>() == 0x48);
    let mut command = Command {
        opcode: VIRTUALIZATION_MANAGEMENT,
        ..Command::default()
    };
    command.parameters[0] = action | kind << 8 | controller << 16;
    command.parameters[1] = count;
    let file = fs::File::open(Path::new("/dev").join(controller_of(physical)?))?;
    // SAFETY: the kernel reads and writes a structure of this layout and size.
    let status = unsafe { libc::ioctl(file.as_raw_fd(), ADMIN, &raw mut command) };
    ensure!(
        status == 0,
        "action {action} on {count} of kind {kind} ends with {status:#x}: {}",
        std::io::Error::last_os_error()
    );
    Ok(())
}

/// The name of the NVMe controller with this sysfs directory, once it works.
fn controller_of(physical: &Path) -> Result<String> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let names = fs::read_dir(physical.join("nvme")).into_iter().flatten();
        let name = names
            .filter_map(|name| name.ok()?.file_name().into_string().ok())
            .next();
        if let Some(name) = name {
            let state = fs::read_to_string(physical.join("nvme").join(&name).join("state"))?;
            if state.trim() == "live" {
                return Ok(name);
            }
        }
        ensure!(Instant::now() < deadline, "the NVMe controller is not live");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Makes a controller create its virtual function, as described in QEMU's documentation (SR-IOV and
/// Virtualization Enhancements).
fn make_function(physical: &Path) -> Result<HostDevice> {
    const RELEASE: u32 = 1;
    const ASSIGN: u32 = 8;
    const ONLINE: u32 = 9;
    const QUEUES: u32 = 0;
    const INTERRUPTS: u32 = 1;
    for kind in [INTERRUPTS, QUEUES] {
        manage(physical, RELEASE, 0, kind, 0)?;
    }
    fs::write(physical.join("reset"), "1")?;
    controller_of(physical)?;
    fs::write(physical.join("sriov_drivers_autoprobe"), "0")?;
    fs::write(physical.join("sriov_numvfs"), "1")?;
    manage(physical, ASSIGN, 1, INTERRUPTS, 1)?;
    manage(physical, ASSIGN, 1, QUEUES, 2)?;
    manage(physical, ONLINE, 1, QUEUES, 0)?;
    HostDevice::at(&physical.join("virtfn0"))
}

fn virtual_function(context: &Context) -> Result<()> {
    let physical = HostDevice::find(NVME, 1)?;
    let function = make_function(&physical.path)?;
    let boot = || -> Result<()> {
        function.bind_to(VARIANT)?;
        let more = json!({"memory": {"size": 512 << 20}});
        let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
        let add = |device: &HostDevice| json!({"path": device.path, "id": "function"});
        // The physical function stays with the host, and the error names what can be given.
        let words = "sriov_numvfs makes them";
        gantry.refused("vm.add-device", Some(add(&physical)), 500, words)?;
        for pattern in ["one", "two"] {
            gantry.put("vm.add-device", add(&function))?;
            disk_works(&mut guest, pattern)?;
            gantry.put("vm.remove-device", json!({"id": "function"}))?;
            gone(&gantry, "function")?;
        }
        Ok(())
    };
    let outcome = boot();
    // For scenarios that search for controllers.
    fs::write(physical.path.join("sriov_numvfs"), "0")?;
    outcome
}

/// Characters that a loopback port returns: fewer than its FIFO holds, since the sample takes a
/// full FIFO for an empty one.
const LOOP: &str = "0123456789ab";

/// Checks that what is written to the guest's second serial port is returned, and not without
/// interrupts.
fn port_works(guest: &mut Guest) -> Result<()> {
    const TTY: &str = "ls /sys/bus/pci/devices/*/tty 2>/dev/null | grep -o 'ttyS.*' | head -n 1";
    let tty = guest.eventually(TTY, |name| name.starts_with("ttyS"))?;
    guest.run(&format!("stty -F /dev/{tty} raw -echo"))?;
    let interrupts = format!("grep -c '{tty}$' /proc/interrupts");
    guest.run(&format!(
        "(dd if=/dev/{tty} of=/tmp/came bs=1 count={} 2>/dev/null) & true",
        LOOP.len()
    ))?;
    // The driver owns the interrupt line while the port is open.
    guest.eventually(&interrupts, |count| count == "1")?;
    guest.run(&format!("printf {LOOP} > /dev/{tty}"))?;
    guest.eventually("cat /tmp/came; echo", |came| came == LOOP)?;
    guest.run("rm /tmp/came").map(drop)
}

fn mediated(context: &Context) -> Result<()> {
    const PARENT: &str = "/sys/devices/virtual/mtty/mtty";
    const UUID: &str = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001";
    load(&["mdev", "mtty"])?;
    let kinds = PathBuf::from(PARENT).join("mdev_supported_types");
    fs::write(kinds.join("mtty-2/create"), UUID).context("no mediated device can be made")?;
    let path = format!("/sys/bus/mdev/devices/{UUID}");
    let give = || -> Result<()> {
        let more = json!({"devices": [{"path": path, "id": "port", "pci_device_id": 9}]});
        let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
        let bdf = &gantry.info()?["device_tree"]["port"]["pci_bdf"];
        ensure!(bdf == "0000:00:09.0", "the device is at {bdf}");
        let id = guest.run("cat /sys/bus/pci/devices/0000:00:09.0/vendor")?;
        ensure!(id == "0x4348", "the guest sees a device of {id}");
        port_works(&mut guest)?;
        gantry.put("vm.remove-device", json!({"id": "port"}))?;
        gone(&gantry, "port")?;
        gantry.put("vm.add-device", json!({"path": path, "id": "port"}))?;
        port_works(&mut guest)?;
        gantry.put("vm.remove-device", json!({"id": "port"}))?;
        gone(&gantry, "port")
    };
    let outcome = give();
    fs::write(format!("{path}/remove"), "1")?;
    outcome
}
