//! A guest that moves the BARs of its devices.

use std::{
    fs, io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{Context, Entry, passthrough_state::disk_works, passthrough_topology::SYSFS};
use crate::{
    gantry::{Gantry, PATIENCE},
    guest::Guest,
    host_device::{EDU, HostDevice, NVME},
};

pub const SCENARIOS: &[Entry] = &[("passthrough: the guest moves a BAR", moves)];

/// Number of further ranges that the kernel can map for a VM's devices, by `VFIO_IOMMU_GET_INFO` of
/// its container (linux/vfio.h), which counts them.
fn mappings_left(gantry: &Gantry) -> Result<u32> {
    const GET_INFO: libc::Ioctl = 0x3b70;
    const AVAILABLE: u16 = 3;
    let container = container(gantry)?;
    // struct vfio_iommu_type1_info: argsz, flags, page sizes, offset of capabilities; and room for
    // the capabilities: ID and version, offset of the next one, contents.
    let mut words = [0_u32; 256];
    words[0] = size_of_val(&words) as u32;
    // SAFETY: the kernel writes at most `argsz` bytes, which is the size of `words`.
    let done = unsafe { libc::ioctl(container.as_raw_fd(), GET_INFO, words.as_mut_ptr()) };
    ensure!(done == 0, "{}", io::Error::last_os_error());
    let mut at = words[4] as usize / 4;
    while at != 0 && words[at] as u16 != AVAILABLE {
        at = words[at + 1] as usize / 4;
    }
    ensure!(at != 0, "the kernel does not count mappings");
    Ok(words[at + 2])
}

/// The container of a VM's groups, which another process has open.
fn container(gantry: &Gantry) -> Result<OwnedFd> {
    let checked = |fd: libc::c_long| {
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just created it for this process.
        Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
    };
    for entry in fs::read_dir(format!("/proc/{}/fd", gantry.pid()))? {
        let entry = entry?;
        let target = fs::read_link(entry.path()).unwrap_or_default();
        if target.as_os_str() != "/dev/vfio/vfio" {
            continue;
        }
        let number: i32 = entry.file_name().to_string_lossy().parse()?;
        // SAFETY: no memory is involved.
        let process = checked(unsafe { libc::syscall(libc::SYS_pidfd_open, gantry.pid(), 0) })?;
        let process = process.as_raw_fd();
        // SAFETY: as above.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_getfd, process, number, 0) };
        return Ok(checked(fd)?);
    }
    anyhow::bail!("it has no container open")
}

/// The last address of the bridge's window below 4 GiB, where the kernel has not placed anything.
fn window_end(guest: &mut Guest) -> Result<u64> {
    let text = guest.run("grep 'PCI Bus 0000:00' /proc/iomem")?;
    let ends = text.lines().filter_map(|line| {
        let (_, rest) = line.trim().split_once('-')?;
        u64::from_str_radix(rest.split_whitespace().next()?, 16).ok()
    });
    let end = ends.filter(|end| *end < 1 << 32).max();
    end.with_context(|| format!("no window: {text}"))
}

/// Address of a device's first BAR when the guest's kernel last read it.
fn first_bar(guest: &mut Guest, folder: &str) -> Result<u64> {
    let resource = guest.run(&format!("head -n 1 {folder}/resource"))?;
    let address = resource.split_whitespace().next().unwrap_or("");
    Ok(u64::from_str_radix(address.trim_start_matches("0x"), 16)?)
}

fn moves(context: &Context) -> Result<()> {
    const ROUNDS: u64 = 20;
    const SIZE: u64 = 1 << 20;
    let (moved, other) = (HostDevice::take(EDU, 0)?, HostDevice::take(EDU, 1)?);
    let nvme = HostDevice::take(NVME, 0)?;
    let more = json!({
        "memory": {"size": 512 << 20},
        "devices": [
            {"path": moved.path, "id": "moved", "pci_device_id": 9},
            {"path": other.path, "id": "other", "pci_device_id": 10},
            {"path": nvme.path, "id": "nvme", "pci_device_id": 12},
        ],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    let [moved, other, disk] = ["09", "0a", "0c"].map(|slot| format!("{SYSFS}/0000:00:{slot}.0"));
    for device in [&moved, &other] {
        guest.run(&format!("agent edu-check {device}"))?;
    }
    let until_left = |expected: u32| -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        // The control thread maps what the vCPU has moved.
        loop {
            let left = mappings_left(&gantry)?;
            if left == expected {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "{left} mappings are left, not {expected}"
            );
            thread::sleep(Duration::from_millis(50));
        }
    };
    let left = mappings_left(&gantry)?;
    let home = first_bar(&mut guest, &moved)?;
    let end = window_end(&mut guest)? + 1;
    // Each time, the device replies and copies at the new address, and nothing does at the old one.
    for round in 0..ROUNDS {
        for place in [end - (round % 4 + 1) * SIZE, home] {
            let said = guest.run(&format!("agent edu-move {moved} {place:#x}"))?;
            ensure!(said.contains("moved from"), "{said}");
        }
    }
    until_left(left)?;
    // What other devices can reach of it has moved with it.
    let away = end - SIZE;
    guest.run(&format!("agent edu-move {moved} {away:#x}"))?;
    until_left(left)?;
    guest.run(&format!(
        "agent edu-poke {other} {:#x} 0x12345678",
        away + 4
    ))?;
    let alive = word(&mut guest, away + 4)?;
    ensure!(alive == "0xEDCBA987", "{alive}");
    guest.run(&format!("agent edu-poke {other} {:#x} 0", home + 4))?;
    let alive = word(&mut guest, away + 4)?;
    ensure!(alive == "0xEDCBA987", "{alive} by its old address");
    let log = gantry.log_until("was kept from memory")?;
    ensure!(log.contains(&format!("fault addr {home:#x}")), "{log}");
    // With memory decoding disabled it is not accessible; when enabled again, it is at its previous
    // address.
    guest.run(&format!(
        "printf '\\000' | dd of={moved}/config bs=1 seek=4 conv=notrunc 2>/dev/null"
    ))?;
    until_left(left + 1)?;
    guest.run(&format!(
        "printf '\\006' | dd of={moved}/config bs=1 seek=4 conv=notrunc 2>/dev/null"
    ))?;
    until_left(left)?;
    guest.run(&format!("agent edu-move {moved} {home:#x}"))?;
    guest.run(&format!("agent edu-check {moved}"))?;
    vectors_too(&mut guest, &disk)?;
    until_left(left)?;
    let log = gantry.log();
    ensure!(!log.contains("is not decoded"), "{log}");
    Ok(())
}

/// Reads 32 bits at an address.
fn word(guest: &mut Guest, address: u64) -> Result<String> {
    guest.run(&format!("devmem {address:#x} 32"))
}

fn set_bar64(guest: &mut Guest, device: &str, address: u64) -> Result<()> {
    let octal = address.to_le_bytes().map(|byte| format!("\\{byte:03o}"));
    guest.run(&format!(
        "printf '{}' | dd of={device}/config bs=8 seek=2 conv=notrunc 2>/dev/null",
        octal.concat()
    ))?;
    Ok(())
}

/// Moves NVMe's memory through a 64-bit BAR with a trapped page that contains interrupt vectors.
fn vectors_too(guest: &mut Guest, disk: &str) -> Result<()> {
    const NOTHING: &str = "0xFFFFFFFF";
    const VERSION: u64 = 8;
    /// In QEMU's model: the data of the first vector's message.
    const VECTOR: u64 = 0x2008;
    disk_works(guest, "before")?;
    let bdf = disk.rsplit('/').next().unwrap_or("");
    guest.run(&format!("echo {bdf} > {disk}/driver/unbind"))?;
    guest.run(&format!("echo 1 > {disk}/enable"))?;
    let home = first_bar(guest, disk)?;
    let away = home + (1 << 32);
    let version = word(guest, home + VERSION)?;
    ensure!(version != NOTHING, "there is no device at {home:#x}");
    set_bar64(guest, disk, away)?;
    guest.run(&format!("devmem {:#x} 32 0x4321", away + VECTOR))?;
    for (place, expected) in [
        (away + VERSION, &*version),
        (away + VECTOR, "0x00004321"),
        (home + VERSION, NOTHING),
        (home + VECTOR, NOTHING),
    ] {
        let there = word(guest, place)?;
        ensure!(there == expected, "{there} at {place:#x}");
    }
    set_bar64(guest, disk, home)?;
    guest.run(&format!("echo {bdf} > /sys/bus/pci/drivers/nvme/bind"))?;
    disk_works(guest, "after")
}
