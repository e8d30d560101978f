//! Disks and persistent memory.

use std::{fs, path::Path};

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::{Context, Entry};
use crate::{
    gantry::Gantry,
    guest::{Guest, md5_in},
};

pub const SCENARIOS: &[Entry] = &[
    ("disk: written in the guest and found on the host", raw),
    ("disk: qcow2 keeps its data over a reboot", qcow2),
    (
        "disk: several queues, direct I/O and a serial number",
        queues,
    ),
    ("disk: read-only is enforced", read_only),
    ("disk: discarded blocks are given back to the host", discard),
    ("disk: a rate limit slows the guest down", rate_limit),
    ("disk: growing reaches the guest", grow),
    (
        "disk: a full file system is an I/O error, not a lost guest",
        full,
    ),
    (
        "disk: storage that does not answer keeps the VM, and nobody waits for ever",
        silent,
    ),
    ("disk: a second VM cannot open the same image", locked),
    ("pmem: written in the guest and found in the file", pmem),
];

const MIB: u64 = 1 << 20;

/// Creates a sparse file.
pub fn image(path: &Path, bytes: u64) -> Result<()> {
    fs::File::create(path)?.set_len(bytes)?;
    Ok(())
}

/// Writes a pattern to `/dev/vda` in the guest and returns its checksum.
pub fn write_pattern(guest: &mut Guest, device: &str, mib: u64) -> Result<String> {
    guest.run(&format!(
        "dd if=/dev/urandom of=/tmp/p bs=1M count={mib} 2>/dev/null"
    ))?;
    guest.run(&format!(
        "dd if=/tmp/p of={device} bs=1M conv=fsync 2>/dev/null"
    ))?;
    let sum = guest.md5_of("cat /tmp/p")?;
    guest.run("rm /tmp/p")?;
    Ok(sum)
}

fn host_sum(path: &Path, mib: u64) -> Result<String> {
    let command = format!(
        "dd if={} bs=1M count={mib} 2>/dev/null | md5sum",
        path.display()
    );
    md5_in(&crate::net::sh(&command)?)
}

fn disk(path: &Path, more: Value) -> Value {
    let mut disk = json!({"path": path, "image_type": "Raw"});
    crate::gantry::merge(&mut disk, more);
    json!({"disks": [disk]})
}

fn raw(context: &Context) -> Result<()> {
    let path = context.dir.join("disk.raw");
    image(&path, 64 * MIB)?;
    let (gantry, mut guest) = Gantry::boot(&context.dir, disk(&path, json!({})))?;
    ensure!(guest.run("cat /sys/block/vda/size")? == "131072");
    let sum = write_pattern(&mut guest, "/dev/vda", 32)?;
    ensure!(host_sum(&path, 32)? == sum);
    guest.run("echo 3 > /proc/sys/vm/drop_caches")?;
    ensure!(guest.md5_of("dd if=/dev/vda bs=1M count=32 2>/dev/null")? == sum);
    let counters = gantry.ok("GET", "vm.counters", None)?;
    let written = counters["_disk0"]["write_bytes"].as_u64().unwrap_or(0);
    ensure!(written >= 32 * MIB, "counters: {counters}");
    Ok(())
}

fn qcow2(context: &Context) -> Result<()> {
    let path = context.dir.join("disk.qcow2");
    fs::copy("/images/empty.qcow2", &path)?;
    let (gantry, mut guest) =
        Gantry::boot(&context.dir, disk(&path, json!({"image_type": "Qcow2"})))?;
    let sum = write_pattern(&mut guest, "/dev/vda", 8)?;
    gantry.act("vm.shutdown")?;
    ensure!(
        fs::read(&path)?.starts_with(b"QFI\xfb"),
        "it is no qcow2 image any more"
    );
    gantry.act("vm.boot")?;
    let mut guest = Guest::connect(&gantry.serial)?;
    guest.wait_ready()?;
    ensure!(guest.md5_of("dd if=/dev/vda bs=1M count=8 2>/dev/null")? == sum);
    Ok(())
}

fn queues(context: &Context) -> Result<()> {
    let path = context.dir.join("disk.raw");
    image(&path, 64 * MIB)?;
    let more = json!({"num_queues": 2, "queue_size": 256, "serial": "GANTRY-1"});
    let mut config = disk(&path, more);
    crate::gantry::merge(
        &mut config,
        json!({"cpus": {"boot_vcpus": 2, "max_vcpus": 2}}),
    );
    let (_gantry, mut guest) = Gantry::boot(&context.dir, config)?;
    ensure!(guest.run("ls /sys/block/vda/mq | wc -l")? == "2");
    ensure!(guest.run("cat /sys/block/vda/serial")? == "GANTRY-1");
    guest.run("for c in 0 1; do taskset $((1<<c)) dd if=/dev/vda of=/dev/null bs=1M 2>/dev/null & done; wait")?;
    Ok(())
}

fn read_only(context: &Context) -> Result<()> {
    let path = context.dir.join("disk.raw");
    image(&path, 4 * MIB)?;
    let (_gantry, mut guest) = Gantry::boot(&context.dir, disk(&path, json!({"readonly": true})))?;
    ensure!(guest.run("cat /sys/block/vda/ro")? == "1");
    let (status, _) = guest.status_of("dd if=/dev/zero of=/dev/vda count=1 2>&1")?;
    ensure!(status != 0, "a read-only disk was written");
    Ok(())
}

fn discard(context: &Context) -> Result<()> {
    let path = context.dir.join("disk.raw");
    image(&path, 64 * MIB)?;
    let (_gantry, mut guest) = Gantry::boot(&context.dir, disk(&path, json!({})))?;
    write_pattern(&mut guest, "/dev/vda", 16)?;
    let before = blocks(&path)?;
    guest.run("blkdiscard /dev/vda")?;
    let after = blocks(&path)?;
    ensure!(
        after + 16 * MIB / 512 <= before + 64,
        "{before} blocks before, {after} after"
    );
    Ok(())
}

/// Number of 512-byte blocks that a file occupies.
fn blocks(path: &Path) -> Result<u64> {
    Ok(std::os::unix::fs::MetadataExt::blocks(&fs::metadata(path)?))
}

fn rate_limit(context: &Context) -> Result<()> {
    let path = context.dir.join("disk.raw");
    image(&path, 64 * MIB)?;
    // 1 MiB immediately, then 1 MiB per second.
    let limit = json!({"rate_limiter_config": {"bandwidth": {"size": MIB, "refill_time": 1000}}});
    let (_gantry, mut guest) = Gantry::boot(&context.dir, disk(&path, limit))?;
    let read = "dd if=/dev/vda of=/dev/null bs=256k count=16 iflag=direct 2>/dev/null";
    let took = guest.run(&format!(
        "a=$(cut -d. -f1 /proc/uptime); {read}; b=$(cut -d. -f1 /proc/uptime); echo $((b-a))"
    ))?;
    let took: u64 = took.parse()?;
    // 4 MiB: at least two seconds, however the clock's seconds are aligned.
    ensure!(took >= 2, "4 MiB took {took} s");
    Ok(())
}

fn grow(context: &Context) -> Result<()> {
    let path = context.dir.join("disk.raw");
    image(&path, 4 * MIB)?;
    let (gantry, mut guest) = Gantry::boot(&context.dir, disk(&path, json!({"id": "d"})))?;
    gantry.put(
        "vm.resize-disk",
        json!({"id": "d", "desired_size": 8 * MIB}),
    )?;
    guest.eventually("cat /sys/block/vda/size", |size| size == "16384")?;
    let unknown = json!({"id": "nothing", "desired_size": 8 * MIB});
    gantry.refused("vm.resize-disk", Some(unknown), 404, "nothing")
}

fn full(context: &Context) -> Result<()> {
    let mount = context.dir.join("small");
    fs::create_dir(&mount)?;
    crate::net::sh(&format!(
        "mount -t tmpfs -o size=4m small {}",
        mount.display()
    ))?;
    let path = mount.join("disk.raw");
    image(&path, 64 * MIB)?;
    let (_gantry, mut guest) = Gantry::boot(&context.dir, disk(&path, json!({})))?;
    let (status, _) =
        guest.status_of("dd if=/dev/zero of=/dev/vda bs=1M count=16 oflag=direct 2>&1")?;
    ensure!(status != 0, "16 MiB fitted into 4");
    guest.run("dd if=/dev/vda of=/dev/null bs=4k count=1 iflag=direct 2>/dev/null")?;
    Ok(())
}

/// Storage that does not respond: a file system that is frozen until this is dropped.
struct Frozen<'a>(&'a Path);

impl<'a> Frozen<'a> {
    fn new(mount: &'a Path) -> Result<Self> {
        crate::net::sh(&format!("fsfreeze --freeze {}", mount.display()))?;
        Ok(Self(mount))
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        let _ = crate::net::sh(&format!("fsfreeze --unfreeze {}", self.0.display()));
    }
}

fn silent(context: &Context) -> Result<()> {
    let mount = context.dir.join("loop");
    fs::create_dir(&mount)?;
    let image_path = context.dir.join("loop.img");
    image(&image_path, 32 * MIB)?;
    crate::net::sh(&format!(
        "lsmod | grep -q ^loop || insmod /modules/loop.ko; mke2fs -F {image} >/dev/null && mount -o \
         loop -t ext4 {image} {mount}",
        image = image_path.display(),
        mount = mount.display()
    ))?;
    let path = mount.join("disk.raw");
    image(&path, 8 * MIB)?;
    let (gantry, mut guest) = Gantry::boot(&context.dir, disk(&path, json!({"id": "d"})))?;
    let write = "dd if=/dev/zero of=/dev/vda bs=4k count=1 oflag=direct 2>/dev/null";
    guest.run(write)?;
    let frozen = Frozen::new(&mount)?;
    guest.run(&format!(
        "({write}; echo $? > /tmp/written) >/dev/null 2>&1 &"
    ))?;
    // Reads in flight, and writes.
    guest.eventually("echo $(cat /sys/block/vda/inflight)", |count| {
        count == "0 1"
    })?;
    gantry.refused("vm.shutdown", None, 500, "has not answered 1 requests")?;
    // The guest continues, and so does its request when the storage responds.
    ensure!(gantry.ok("GET", "vm.info", None)?["state"] == "Running");
    guest.run("! [ -e /tmp/written ]")?;
    drop(frozen);
    guest.eventually("cat /tmp/written", |status| status == "0")?;
    guest.run(write)?;
    gantry.act("vm.shutdown")?;
    drop(gantry);
    // The kernel closes what an io_uring had open somewhat later than the process ends.
    crate::net::sh(&format!(
        "for _ in $(seq 600); do umount -d {mount} && exit; sleep 0.1; done; exit 1",
        mount = mount.display()
    ))?;
    Ok(())
}

fn locked(context: &Context) -> Result<()> {
    let path = context.dir.join("disk.raw");
    image(&path, 4 * MIB)?;
    let (gantry, _guest) = Gantry::boot(&context.dir, disk(&path, json!({})))?;
    let dir = context.dir.join("second");
    fs::create_dir(&dir)?;
    let second = Gantry::start(&dir, &[])?;
    let mut config = crate::gantry::vm(&second.serial);
    crate::gantry::merge(&mut config, disk(&path, json!({})));
    second.put("vm.create", config)?;
    second.refused("vm.boot", None, 500, "in use")?;
    drop(gantry);
    second.act("vm.boot")
}

fn pmem(context: &Context) -> Result<()> {
    let path = context.dir.join("pmem");
    image(&path, 16 * MIB)?;
    let (_gantry, mut guest) = Gantry::boot(&context.dir, json!({"pmem": [{"file": path}]}))?;
    guest.run(
        "for m in libnvdimm nd_virtio virtio_pmem nd_btt nd_pmem; do insmod /modules/$m.ko; done",
    )?;
    guest.eventually("ls /dev/pmem0", |text| text == "/dev/pmem0")?;
    let sum = write_pattern(&mut guest, "/dev/pmem0", 8)?;
    ensure!(host_sum(&path, 8)? == sum);
    Ok(())
}
