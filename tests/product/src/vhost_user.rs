//! Devices that stock back ends serve: `qemu-storage-daemon`, `virtiofsd` and DPDK.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Result, ensure};
use gantry_build::{
    programs::{self, Build},
    target,
};
use gantry_tests::{
    guest::md5_in,
    rig::{
        Cache,
        images::VIRTIO_DISK,
        packages::{self, Kernel, output, run},
        root_fs,
    },
};

use crate::{
    host::{Contents, Host, said},
    record::Record,
};

const DAEMON: &str = "/usr/bin/qemu-storage-daemon";
const VIRTIOFSD: &str = "/usr/lib/qemu/virtiofsd";
const TESTPMD: &str = "/usr/bin/dpdk-testpmd";

/// Drivers that DPDK loads, and their packages.
const DRIVERS: &str = "/usr/lib/x86_64-linux-gnu/dpdk/pmds-23.0";
const NET_VHOST: &str = "librte_net_vhost.so";
const MEMPOOL: &str = "librte_mempool_ring.so";

/// Programs that the scenario needs.
const PROGRAMS: &[(&str, &str)] = &[
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("/usr/share/seabios/bios-256k.bin", "seabios"),
    ("cpio", "cpio"),
    (DAEMON, "qemu-system-common"),
    (VIRTIOFSD, "qemu-system-common"),
    (TESTPMD, "dpdk-dev"),
    (
        "/usr/lib/x86_64-linux-gnu/dpdk/pmds-23.0/librte_net_vhost.so",
        "librte-net-vhost23",
    ),
    (
        "/usr/lib/x86_64-linux-gnu/dpdk/pmds-23.0/librte_mempool_ring.so",
        "librte-mempool-ring23",
    ),
    ("qemu-img", "qemu-utils"),
];

/// Modules that the guest loads.
const MODULES: &[&str] = &["fuse", "virtiofs", "failover", "net_failover", "virtio_net"];

/// Size of the disk in MiB.
const DISK_MIB: usize = 48;

/// Stock back ends serve a stock guest, are killed, and come back.
///
/// # Errors
/// They do not.
pub fn stock_back_ends(record: &mut Record) -> Result<()> {
    packages::install(PROGRAMS)?;
    programs::choose(Build::Scenario);
    let cache = Cache::open()?;
    let gantry = programs::only(&["vmm"])?.join("gantry");
    let work = target().join("vhost-user");
    fs::create_dir_all(&work)?;
    let kernel = cache.kernel()?;
    let guest = guest(&cache, &kernel, &work)?;
    let image = image(&work)?;
    let contents = Contents {
        programs: &[
            (&gantry, "gantry"),
            (Path::new(DAEMON), "qemu-storage-daemon"),
            (Path::new(VIRTIOFSD), "virtiofsd"),
            (Path::new(TESTPMD), "dpdk-testpmd"),
            (&Path::new(DRIVERS).join(NET_VHOST), NET_VHOST),
            (&Path::new(DRIVERS).join(MEMPOOL), MEMPOOL),
        ],
        files: &[
            (&kernel.image, "vmlinuz"),
            (&guest, "guest.cpio"),
            (&image.qcow2, "disk.qcow2"),
        ],
    };
    let mut host = Host::boot(&cache, &contents, &[], &work)?;
    let done = use_disks(&mut host, &image, record)
        .and_then(|()| use_cards(&mut host, record))
        .and_then(|()| use_folders(&mut host, record));
    fs::write(work.join("guest.log"), host.guest.transcript())?;
    fs::write(work.join("host.log"), host.shell.transcript())?;
    let vmm = host.shell.run("cat /tmp/gantry.log; cat /tmp/*.out");
    fs::write(work.join("gantry.log"), vmm.unwrap_or_default())?;
    done.map_err(|error| error.context(format!("see {}", work.display())))
}

/// The guest's initial file system.
fn guest(cache: &Cache, kernel: &Kernel, work: &Path) -> Result<PathBuf> {
    let busybox = cache.unpacked("busybox-static")?.join("bin/busybox");
    let root = work.join("guest");
    root_fs::start(&root, &busybox)?;
    let names = [VIRTIO_DISK, MODULES].concat();
    let loaded = root_fs::modules(kernel, &names, &root.join("modules"))?;
    let init = format!(
        "#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /tmp
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
for m in {loaded}; do insmod /modules/$m.ko; done
stty -F /dev/ttyS0 raw -echo
exec 0</dev/ttyS0 1>/dev/ttyS0 2>&1
{}",
        root_fs::commands()
    );
    root_fs::script(&root.join("init"), &init)?;
    let archive = work.join("guest.cpio");
    root_fs::pack(&root, &archive)?;
    Ok(archive)
}

/// An image.
struct Image {
    qcow2: PathBuf,
    md5: String,
}

/// Makes an image of a format that Gantry does not read itself: compressed by zstd, with extended L2 tables.
fn image(work: &Path) -> Result<Image> {
    let (raw, qcow2) = (work.join("disk.raw"), work.join("disk.qcow2"));
    // Lines that differ, which can be compressed.
    let lines =
        (0_u64..).map(|number| format!("{:060}\n", number.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    let mut bytes = String::with_capacity(DISK_MIB << 20);
    for line in lines {
        if bytes.len() + line.len() > DISK_MIB << 20 {
            break;
        }
        bytes.push_str(&line);
    }
    let mut bytes = bytes.into_bytes();
    bytes.resize(DISK_MIB << 20, 0);
    fs::write(&raw, bytes)?;
    run(Command::new("qemu-img")
        .args(["convert", "-c", "-f", "raw", "-O", "qcow2"])
        .args(["-o", "compression_type=zstd,extended_l2=on"])
        .args([&raw, &qcow2]))?;
    let md5 = md5_in(&output(Command::new("md5sum").arg(&raw))?)?;
    Ok(Image { qcow2, md5 })
}

/// Starts the daemon, which serves the image at `/tmp/NAME.sock`.
fn serve(host: &mut Host, name: &str, image: &str) -> Result<()> {
    host.shell.run(&format!(
        "rm -f /tmp/{name}.sock; qemu-storage-daemon --blockdev driver=file,node-name=file,filename={image} \
         --blockdev driver=qcow2,node-name=image,file=file \
         --export type=vhost-user-blk,id=x,node-name=image,addr.type=unix,addr.path=/tmp/{name}.sock,writable=on,num-queues=2 \
         > /tmp/{name}.out 2>&1 & echo $! > /tmp/{name}.pid"
    ))?;
    host.shell
        .eventually(&format!("test -S /tmp/{name}.sock && echo yes"), |said| {
            said == "yes"
        })?;
    Ok(())
}

const SUM: &str = "dd if=/dev/vda bs=1M iflag=direct 2>/dev/null | md5sum";

fn use_disks(host: &mut Host, image: &Image, record: &mut Record) -> Result<()> {
    host.shell
        .run("cp /disk.qcow2 /tmp/one.qcow2; cp /disk.qcow2 /tmp/two.qcow2")?;
    serve(host, "one", "/tmp/one.qcow2")?;
    host.start(
        "--kernel /vmlinuz --initramfs /guest.cpio --cmdline 'console=ttyS0 panic=-1 quiet' --cpus boot=1 \
         --memory size=192M,shared=on,hotplug_size=512M --serial tty --console off \
         --disk vhost_user=on,socket=/tmp/one.sock,id=one,num_queues=2",
    )?;
    host.guest.wait_ready()?;
    let sum = md5_in(&host.guest.run(SUM)?)?;
    ensure!(sum == image.md5, "{sum} instead of {}", image.md5);
    record.saw(
        "a guest reads a qcow2 image with zstd and extended L2 tables through qemu-storage-daemon",
    );

    // Killed amid reads.
    host.guest
        .run(&format!("({SUM} > /tmp/sum; echo done > /tmp/done) & true"))?;
    host.shell.run("kill -9 $(cat /tmp/one.pid)")?;
    host.shell
        .eventually("grep -c 'is lost' /tmp/gantry.log", |count| count == "1")?;
    said(
        &mut host.guest,
        "test -e /tmp/done || echo reading",
        "reading",
    )?;
    let lost = host.ctl("info")?;
    ensure!(lost.contains("\"lost\""), "{lost}");
    serve(host, "one", "/tmp/one.qcow2")?;
    host.guest
        .eventually("cat /tmp/done 2>/dev/null || true", |said| said == "done")?;
    let sum = md5_in(&host.guest.run("cat /tmp/sum")?)?;
    ensure!(
        sum == image.md5,
        "after a kill, {sum} instead of {}",
        image.md5
    );
    record.saw("qemu-storage-daemon is killed amid reads and started again: the guest goes on, and reads what is there");

    // Stopped and continued.
    host.ctl("pause")?;
    host.ctl("resume")?;
    let sum = md5_in(&host.guest.run(SUM)?)?;
    ensure!(sum == image.md5, "after a pause, {sum}");
    record.saw("paused and resumed");

    // Plugged in, used beyond memory that is plugged in, too, and removed.
    serve(host, "two", "/tmp/two.qcow2")?;
    host.ctl("add-disk vhost_user=on,socket=/tmp/two.sock,id=two")?;
    host.guest
        .eventually("ls /sys/class/block | grep -c '^vd[a-z]$'", |count| {
            count == "2"
        })?;
    host.ctl("resize --memory 448M")?;
    host.guest.eventually(
        "for m in /sys/devices/system/memory/memory*; do echo online > $m/state 2>/dev/null; done; \
         grep MemTotal /proc/meminfo | tr -dc 0-9",
        |total| total.parse().is_ok_and(|total: u64| total > 300 << 10),
    )?;
    // More than the memory that there was.
    host.guest.run(
        "mount -o remount,size=350M /tmp; dd if=/dev/zero of=/tmp/fill bs=1M count=180 2>/dev/null",
    )?;
    let sum = md5_in(
        &host
            .guest
            .run("cat /dev/vdb > /tmp/copy && md5sum /tmp/copy")?,
    )?;
    ensure!(sum == image.md5, "from the second disk, {sum}");
    host.guest.run("rm /tmp/copy /tmp/fill; echo written | dd of=/dev/vdb conv=sync,fsync bs=512 count=1 2>/dev/null")?;
    host.ctl("remove-device two")?;
    host.guest
        .eventually("ls /sys/class/block | grep -c '^vd[a-z]$'", |count| {
            count == "1"
        })?;
    record.saw("a second disk and memory are plugged in and used, and the disk is removed");

    // The driver starts anew.
    host.guest.run(
        "cd /sys/bus/virtio/drivers/virtio_blk && d=$(ls | grep virtio) && echo $d > unbind && echo $d > bind",
    )?;
    let sum = md5_in(&host.guest.run(SUM)?)?;
    ensure!(sum == image.md5, "after a reset, {sum}");
    record.saw("the guest's driver lets the device go, and starts it again");

    host.ctl("pause")?;
    let (status, refusal) = host
        .shell
        .status_of("gantry ctl --socket /tmp/api snapshot file:///tmp/saved 2>&1")?;
    ensure!(
        status != 0 && refusal.contains("in another process"),
        "{refusal}"
    );
    host.ctl("resume")?;
    record.saw("a snapshot is refused");
    Ok(())
}

/// Starts a program that answers pings of whoever is at the other end of its card.
fn answer_pings(host: &mut Host) -> Result<()> {
    host.shell.run(&format!(
        "rm -f /tmp/net.sock; dpdk-testpmd --no-huge -m 128 --no-pci --no-telemetry --lcores 0@0,1@0 -d /bin/{NET_VHOST} \
         -d /bin/{MEMPOOL} --vdev net_vhost0,iface=/tmp/net.sock,queues=1 -- --forward-mode=icmpecho \
         --total-num-mbufs=2048 --auto-start --no-mlockall --stats-period 3600 < /dev/null > /tmp/net.out 2>&1 &"
    ))?;
    host.shell
        .eventually("test -S /tmp/net.sock && echo yes", |said| said == "yes")?;
    Ok(())
}

fn use_cards(host: &mut Host, record: &mut Record) -> Result<()> {
    const PING: &str = "ping -c 3 10.9.8.1 > /dev/null && echo answered";
    answer_pings(host)?;
    host.ctl("add-net vhost_user=on,socket=/tmp/net.sock,mac=52:54:00:12:34:56,id=card")?;
    host.guest
        .eventually("cat /sys/class/net/eth0/address || true", |said| {
            said == "52:54:00:12:34:56"
        })?;
    host.guest
        .run("ip link set eth0 up && ip addr add 10.9.8.2/24 dev eth0")?;
    host.guest.eventually(PING, |said| said == "answered")?;
    record.saw("DPDK answers pings of a guest");
    host.shell.run("kill -9 $(pidof dpdk-testpmd)")?;
    host.shell
        .eventually("grep -c '\"card\" is lost' /tmp/gantry.log", |count| {
            count == "1"
        })?;
    answer_pings(host)?;
    host.guest.eventually(PING, |said| said == "answered")?;
    record.saw("DPDK is killed and started again: it answers pings of the guest again");
    host.ctl("remove-device card")?;
    host.guest
        .eventually("test -e /sys/class/net/eth0 || echo gone", |said| {
            said == "gone"
        })?;
    host.shell.run("kill -9 $(pidof dpdk-testpmd)")?;
    Ok(())
}

/// Starts the server of `/tmp/shared`, again whenever it ends.
fn share(host: &mut Host) -> Result<()> {
    host.shell.run(
        "mkdir -p /tmp/shared /run/virtiofsd; (while true; do rm -f /tmp/fs.sock; \
         virtiofsd -f --socket-path=/tmp/fs.sock -o source=/tmp/shared -o sandbox=chroot -o cache=none; done) \
         > /tmp/fs.out 2>&1 & true",
    )?;
    host.shell
        .eventually("test -S /tmp/fs.sock && echo yes", |said| said == "yes")?;
    Ok(())
}

fn use_folders(host: &mut Host, record: &mut Record) -> Result<()> {
    share(host)?;
    host.shell.run("echo of the host > /tmp/shared/host")?;
    host.ctl("add-fs tag=shared,socket=/tmp/fs.sock,id=folder")?;
    host.guest.eventually(
        "mkdir -p /mnt; mount -t virtiofs shared /mnt && echo there",
        |said| said == "there",
    )?;
    said(&mut host.guest, "cat /mnt/host", "of the host")?;
    host.guest
        .run("echo of the guest > /mnt/guest; dd if=/dev/urandom of=/mnt/large bs=1M count=8 2>/dev/null; sync")?;
    said(&mut host.shell, "cat /tmp/shared/guest", "of the guest")?;
    let theirs = md5_in(&host.guest.run("md5sum /mnt/large")?)?;
    let ours = md5_in(&host.shell.run("md5sum /tmp/shared/large")?)?;
    ensure!(theirs == ours, "{theirs} is not {ours}");
    record
        .saw("a guest reads a file of the host through virtiofsd, and the host two of the guest's");
    host.ctl("pause")?;
    host.ctl("resume")?;
    said(&mut host.guest, "cat /mnt/host", "of the host")?;
    record.saw("paused and resumed");

    // Killed while it is mounted.
    host.shell.run("kill -9 $(pidof virtiofsd)")?;
    host.shell
        .eventually("grep -c '\"folder\" is lost' /tmp/gantry.log", |count| {
            count == "1"
        })?;
    said(&mut host.guest, "echo alive", "alive")?;
    host.ctl("remove-device folder")?;
    host.guest.eventually(
        "grep -l 0x001a /sys/bus/virtio/devices/*/device || echo none",
        |said| said == "none",
    )?;
    host.guest.run("umount /mnt")?;
    host.ctl("add-fs tag=shared,socket=/tmp/fs.sock,id=folder")?;
    host.guest
        .eventually("mount -t virtiofs shared /mnt && echo there", |said| {
            said == "there"
        })?;
    said(&mut host.guest, "cat /mnt/guest", "of the guest")?;
    record.saw("virtiofsd is killed: the guest lives, and has the folder again when the device was added anew");
    host.guest.send("reboot -f")?;
    host.guest.wait_ready()?;
    host.guest.eventually(
        "mkdir -p /mnt; mount -t virtiofs shared /mnt && echo there",
        |said| said == "there",
    )?;
    said(&mut host.guest, "cat /mnt/guest", "of the guest")?;
    host.guest
        .run("dd if=/dev/vda of=/dev/null bs=1M count=4 2>/dev/null")?;
    record.saw(
        "the guest is reset: both back ends serve it again, of which virtiofsd was started again",
    );

    host.guest.send("poweroff -f")?;
    host.shell
        .eventually("cat /tmp/status", |status| status == "0")?;
    record.saw("powered off");
    Ok(())
}
