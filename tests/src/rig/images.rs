//! Initial file systems of L1 and L2.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use super::{
    iommufd, native, nvrtc, opencl,
    packages::{Cache, Kernel, run},
    root_fs::{INIT, commands, modules, pack, program, script, start},
    systemd, vendors,
};
use crate::beside;

/// Modules that L1 loads, in order.
const L1_MODULES: &[&str] = &["irqbypass", "kvm", "ccp", "kvm-amd", "tun"];

/// Modules that an L1 with another kernel loads before, in order.
const OTHER_L1_MODULES: &[&str] = &["virtio-iommu"];

/// Modules that a virtio disk needs, in order.
pub const VIRTIO_DISK: &[&str] = &[
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
];

/// Modules that are there for scenarios to load in L1, beside those of the disk with PoCL.
const L1_EXTRA: &[&str] = &[
    "vfio",
    "vfio_virqfd",
    "vfio_iommu_type1",
    "vfio-pci-core",
    "vfio-pci",
    // For a file system that can be made to wait.
    "loop",
    // Makes errors of devices up.
    "aer_inject",
    // For networks between two L1s.
    "failover",
    "net_failover",
    "virtio_net",
];

/// Modules that L2 loads at start, in order, after those of its disk.
const L2_MODULES: &[&str] = &[
    "failover",
    "net_failover",
    "virtio_net",
    "virtio-rng",
    "virtio_console",
    "virtio_balloon",
    "virtio_mem",
    "vsock",
    "vmw_vsock_virtio_transport_common",
    "vmw_vsock_virtio_transport",
    "evdev",
    "button",
];

/// Modules that an L2 with a virtual IOMMU loads before them, and after: it gives devices away itself.
const L2_IOMMU: &[&str] = &["irqbypass", "virtio-iommu"];
const L2_VFIO: &[&str] = &["vfio", "vfio_iommu_type1", "vfio-pci-core", "vfio-pci"];

/// Modules that are there for scenarios to load.
const L2_EXTRA: &[&str] = &[
    "libnvdimm",
    "nd_virtio",
    "virtio_pmem",
    "nd_btt",
    "nd_pmem",
    // For the interrupts of an accelerator port.
    "uio",
    "uio_pci_generic",
    // By which a guest says that it has failed.
    "pvpanic",
    "pvpanic-pci",
    "watchdog",
    "wdat_wdt",
];

/// Modules that are there for a guest with a GPU to load, in order: its balloon's.
pub const L2_BALLOON: &[&str] = &[
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_balloon",
];

/// Modules with which a guest drives a GPU, in the order of their needs.
pub const L2_GPU: &[&str] = &[
    "button",
    "wmi",
    "video",
    "mxm-wmi",
    "i2c-algo-bit",
    "rc-core",
    "cec",
    "drm",
    "drm_kms_helper",
    "drm_display_helper",
    "ttm",
    "drm_ttm_helper",
    "nouveau",
];

/// Shows what libdrm knows of GPUs; of Debian's package `libdrm-tests`.
pub const DRM_DEVICE: &str = "/usr/bin/drmdevice";

/// The programs under test.
pub struct Binaries {
    /// `gantry`.
    pub gantry: PathBuf,
    /// `gantry-gf100`.
    pub gf100: PathBuf,
    /// `gantry-gpu`.
    pub gpu: PathBuf,
    /// `runner`.
    pub runner: PathBuf,
    /// `ch-client`.
    pub client: PathBuf,
    /// `gantry-tunnel`.
    pub tunnel: PathBuf,
    /// For guests and hosts with accelerators.
    pub opencl: opencl::Programs,
    /// For guests and hosts with native contexts.
    pub native: native::Programs,
}

/// What QEMU boots.
pub struct Images {
    /// The kernel.
    pub kernel: Kernel,
    /// L1's initial file system.
    pub l1: PathBuf,
    /// L2's initial file system, which is also in L1's.
    pub l2: PathBuf,
    /// What a guest with an accelerator has beside it, also in L1's.
    pub l2_opencl: PathBuf,
    /// L1's disk with PoCL.
    pub pocl: PathBuf,
    /// A disk with NVIDIA's compiler, if that can be had.
    pub nvrtc: Option<PathBuf>,
    /// For the boards that need them.
    pub others: BTreeMap<OtherKernel, OtherL1>,
}

/// A kernel of L1 for what the usual one lacks.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum OtherKernel {
    /// Has drivers for AMD's IOMMU and for virtio's.
    AnyIommu,
    /// Has iommufd. Its guests may have the same kernel: the usual one knows no virtual IOMMU.
    Iommufd,
    /// Has drivers for GPUs, for guests: the usual one has none.
    Gpu,
}

impl OtherKernel {
    /// The package that stands for the newest one of Debian's.
    fn package(self) -> &'static str {
        match self {
            Self::AnyIommu => "linux-image-6.12-amd64",
            Self::Iommufd => "linux-image-6.12-cloud-amd64",
            Self::Gpu => "linux-image-amd64",
        }
    }
}

/// An L1 with another kernel, and nothing but what passthrough needs.
#[derive(Clone)]
pub struct OtherL1 {
    /// The kernel.
    pub kernel: Kernel,
    /// L1's initial file system.
    pub l1: PathBuf,
}

impl Images {
    /// Builds both file systems under `work`.
    pub fn build(cache: &Cache, binaries: &Binaries, work: &Path) -> Result<Self> {
        let kernel = cache.kernel()?;
        let busybox = cache.unpacked("busybox-static")?.join("bin/busybox");
        fs::create_dir_all(work)?;
        let l2 = work.join("l2.cpio");
        build_l2(
            &kernel,
            [[VIRTIO_DISK, L2_MODULES].concat(), L2_EXTRA.to_vec()],
            &busybox,
            &binaries.runner,
            &l2,
        )?;
        let l2_opencl = opencl::guest(&binaries.opencl, work)?;
        native::guest(&binaries.native, work)?;
        systemd::guest(&binaries.opencl, &binaries.tunnel, work)?;
        build_lean(&busybox, &work.join("lean"), &work.join("lean.cpio"))?;
        let root = work.join("l1");
        start(&root, &busybox)?;
        let loaded = modules(&kernel, L1_MODULES, &root.join("modules"))?;
        let extra = [VIRTIO_DISK, L1_EXTRA].concat();
        modules(&kernel, &extra, &root.join("modules"))?;
        vendors::copy(&vendors::modules(cache, &kernel)?, &root.join("modules"))?;
        native::host(&binaries.native, cache, &kernel, &root)?;
        let images = programs_and_guest(&root, &kernel, binaries, &l2)?;
        program(&binaries.opencl.pool, &root, "bin/gantry-accel")?;
        program(&binaries.opencl.arbiter, &root, "bin/gantry-arbiter")?;
        program(&binaries.opencl.turns, &root, "bin/opencl-turns")?;
        program(&binaries.opencl.moving, &root, "bin/opencl-moving")?;
        program(&binaries.opencl.hostile, &root, "bin/opencl-hostile")?;
        let stand_in = &binaries.opencl.cuda.stand_in;
        program(stand_in, &root, &crate::opencl::STAND_IN[1..])?;
        fs::copy(unpacked_kernel(cache, &kernel)?, images.join("vmlinux"))?;
        for guest in [
            "l2-native.cpio",
            "l2-opencl.cpio",
            "l2-systemd.cpio",
            "lean.cpio",
        ] {
            fs::copy(work.join(guest), images.join(guest))?;
        }
        opencl::host_keys(work, &images.join("keys"))?;
        program(&binaries.tunnel, &root, "bin/gantry-tunnel")?;
        beside::keys(&images.join("tls"))?;
        run(Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2"])
            .arg(images.join("empty.qcow2"))
            .arg("16M"))?;
        let nvrtc = match nvrtc::folder(cache).and_then(|folder| nvrtc::disk(&folder, work)) {
            Ok(disk) => Some(disk),
            Err(error) => {
                let why = format!("{error:#}");
                eprintln!("what needs NVRTC is left out: {why}");
                // The scenario tells: without this file, it has to find the disk.
                fs::write(root.join(&nvrtc::MISSING[1..]), why)?;
                None
            }
        };
        let l1 = work.join("l1.cpio");
        finish_l1(&root, &loaded, &l1)?;
        let pocl = opencl::disk(work)?;
        Ok(Self {
            kernel,
            l1,
            l2,
            l2_opencl,
            pocl,
            nvrtc,
            others: BTreeMap::new(),
        })
    }

    /// Adds an L1 with another kernel.
    pub fn add(&mut self, other: OtherKernel, cache: &Cache, binaries: &Binaries) -> Result<()> {
        let work = self.l1.parent().context("images are in no folder")?;
        let kernel = cache.kernel_of(&cache.release_of(other.package())?)?;
        let busybox = cache.unpacked("busybox-static")?.join("bin/busybox");
        let root = work.join(format!("l1-{other:?}"));
        start(&root, &busybox)?;
        let folder = root.join("modules");
        let names = [OTHER_L1_MODULES, L1_MODULES].concat();
        let loaded = modules(&kernel, &names, &folder)?;
        modules(&kernel, &[VIRTIO_DISK, L1_EXTRA].concat(), &folder)?;
        if other == OtherKernel::Iommufd {
            iommufd::copy(&iommufd::modules(cache, &kernel)?, &folder)?;
        }
        let images = programs_and_guest(&root, &self.kernel, binaries, &self.l2)?;
        if other == OtherKernel::Iommufd {
            let l2 = work.join("l2-iommu.cpio");
            fs::copy(
                unpacked_kernel(cache, &kernel)?,
                images.join("vmlinux-iommu"),
            )?;
            build_l2(
                &kernel,
                [
                    [L2_IOMMU, VIRTIO_DISK, L2_MODULES, L2_VFIO].concat(),
                    Vec::new(),
                ],
                &busybox,
                &binaries.runner,
                &l2,
            )?;
            fs::copy(&l2, images.join("l2-iommu.cpio"))?;
        }
        if other == OtherKernel::Gpu {
            let l2 = work.join("l2-gpu.cpio");
            fs::copy(unpacked_kernel(cache, &kernel)?, images.join("vmlinux-gpu"))?;
            build_l2(
                &kernel,
                [Vec::new(), [L2_BALLOON, L2_GPU].concat()],
                &busybox,
                &binaries.runner,
                &l2,
            )?;
            let guest = l2.with_extension("");
            program(Path::new(DRM_DEVICE), &guest, "bin/drmdevice")?;
            pack(&guest, &l2)?;
            fs::copy(&l2, images.join("l2-gpu.cpio"))?;
            program(&binaries.gf100, &root, "bin/gantry-gf100")?;
            program(&binaries.gpu, &root, "bin/gantry-gpu")?;
        }
        let l1 = work.join(format!("l1-{other:?}.cpio"));
        finish_l1(&root, &loaded, &l1)?;
        self.others.insert(other, OtherL1 { kernel, l1 });
        Ok(())
    }
}

/// Builds L2's initial file system with modules that are loaded at start, and others.
fn build_l2(
    kernel: &Kernel,
    [loaded, extra]: [Vec<&str>; 2],
    busybox: &Path,
    runner: &Path,
    archive: &Path,
) -> Result<()> {
    let root = &archive.with_extension("");
    start(root, busybox)?;
    let loaded = modules(kernel, &loaded, &root.join("modules"))?;
    modules(kernel, &extra, &root.join("modules"))?;
    program(runner, root, "bin/agent")?;
    script(&root.join("bin/agent-power-button"), POWER_BUTTON)?;
    script(&root.join("bin/demo"), DEMO)?;
    let init = format!(
        "{INIT}
{TERMINALS}
cut -d' ' -f1 /proc/uptime > /tmp/init-at
for m in {loaded}; do insmod /modules/$m.ko; done
stty -F /dev/ttyS0 -echo -onlcr 2>/dev/null
# What the kernel says goes between the words of what is printed here, but for its last words.
dmesg -n 1
exec 0</dev/ttyS0 1>/dev/ttyS0 2>&1
echo init at $(cat /tmp/init-at)
for a in $(cat /proc/cmdline); do case $a in then=*) sh -c \"$(echo ${{a#then=}} | tr + ' ')\";; esac; done
[ -x /bin/become ] && exec /bin/become
{}",
        commands()
    );
    script(&root.join("init"), &init)?;
    pack(root, archive)
}

/// The smallest guest whose boot can be measured: says when its init ran, sleeps for a second and
/// powers off.
fn build_lean(busybox: &Path, root: &Path, archive: &Path) -> Result<()> {
    start(root, busybox)?;
    fs::create_dir_all(root.join("proc"))?;
    script(&root.join("init"), LEAN)?;
    pack(root, archive)
}

const LEAN: &str = "#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
echo init at $(/bin/busybox cut -d' ' -f1 /proc/uptime)
/bin/busybox sleep 1
/bin/busybox poweroff -f
";

/// Shows what the guest has, and powers off.
const DEMO: &str = "#!/bin/sh
uname -a
echo 'a disk that is written and read back:'
dd if=/dev/urandom of=/tmp/p bs=1M count=8 2>/dev/null
dd if=/tmp/p of=/dev/vda bs=1M conv=fsync
echo 3 > /proc/sys/vm/drop_caches
a=$(md5sum < /tmp/p); b=$(dd if=/dev/vda bs=1M count=8 2>/dev/null | md5sum)
[ \"$a\" = \"$b\" ] && disk='8 MiB written to a disk and read back'
echo fact kernel $(uname -r) booted
echo fact $(nproc) vCPUs
echo fact virtio devices: $(for d in /sys/bus/virtio/devices/*; do basename $(readlink $d/driver); done)
[ -n \"$disk\" ] && echo fact $disk
if [ -x /bin/gantry-agent ]; then
  echo \"OpenCL on the host's device:\"
  gantry-agent install
  gantry-agent 2>&1 &
  while [ ! -e /run/gantry/opencl.sock ]; do sleep 0.1; done
  clinfo -l | tee /tmp/devices
  GANTRY_OPENCL_SPIN=20 opencl-figures --brief | tee /tmp/figures
  device=$(sed -n 's/.*Device #0: //p' /tmp/devices | head -n 1)
  sum=$(sed -n 's/^# the sum of/the sum of/p' /tmp/figures)
  [ -n \"$sum\" ] && echo fact OpenCL on $device: $sum
  for figure in 'synchronous call' 'enqueue with 2 arguments + finish'; do
    sed -n \"s/^\\($figure[^\t]*\\)\t\\([^\t]*\\)\tus/fact \\1 in \\2 us/p\" /tmp/figures
  done
fi
echo fact init after $(cat /tmp/init-at) s of guest uptime
poweroff -f
";

/// Waits for the power button as a session manager would, and shuts down.
const POWER_BUTTON: &str = "#!/bin/sh
for e in /dev/input/event*; do
  (dd if=$e of=/dev/null bs=24 count=1 2>/dev/null && poweroff -f) &
done
all=$(ls /dev/input/event* | wc -l)
until [ $(ls -l /proc/[0-9]*/fd 2>/dev/null | grep -c /dev/input/event) -ge $all ]; do sleep 0.1; done
echo waiting for the button
wait
";

/// What an init of L1's or a guest's does after [`INIT`].
const TERMINALS: &str = "mkdir -p /dev/pts && mount -t devpts pts /dev/pts
ifconfig lo 127.0.0.1 up 2>/dev/null";

/// What every L1 has: the programs under test, and a guest. Returns the folder with the guest.
fn programs_and_guest(
    root: &Path,
    kernel: &Kernel,
    binaries: &Binaries,
    l2: &Path,
) -> Result<PathBuf> {
    program(&binaries.gantry, root, "bin/gantry")?;
    program(&binaries.runner, root, "bin/runner")?;
    program(&binaries.client, root, "bin/ch-client")?;
    let images = root.join("images");
    fs::create_dir_all(&images)?;
    fs::copy(&kernel.image, images.join("vmlinuz"))?;
    fs::copy(l2, images.join("l2.cpio"))?;
    Ok(images)
}

/// Adds the init that loads modules and serves, and packs an L1.
fn finish_l1(root: &Path, loaded: &str, archive: &Path) -> Result<()> {
    let init = format!(
        "{INIT}
{TERMINALS}
mount -t securityfs sec /sys/kernel/security 2>/dev/null
for m in {loaded}; do insmod /modules/$m.ko; done
mkdir -p /dev/net; [ -e /dev/net/tun ] || mknod /dev/net/tun c 10 200
ulimit -n 4096
stty -F /dev/ttyS1 raw -echo
/bin/runner serve /dev/ttyS1
poweroff -f
"
    );
    script(&root.join("init"), &init)?;
    pack(root, archive)
}

/// Where L1 has the VMMs that are compared with this Gantry, in the root file system.
pub const BESIDE: &str = "/bin/beside";

/// Another VMM that is compared with this Gantry.
#[derive(Clone, Debug)]
pub struct Beside {
    /// How the table calls it.
    pub name: String,
    /// Its program, which takes Gantry's options.
    pub program: PathBuf,
}

/// L1's initial file system with QEMU and its firmware added, and other VMMs, for comparisons.
pub fn with_others(images: &Images, beside: &[Beside]) -> Result<Images> {
    let work = images.l1.parent().context("images are in no folder")?;
    let root = work.join("others");
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    fs::create_dir_all(root.join("bin"))?;
    let qemu = Path::new("/usr/bin/qemu-system-x86_64");
    program(qemu, &root, "bin/qemu-system-x86_64")?;
    let firmware = root.join("firmware");
    fs::create_dir_all(&firmware)?;
    for file in QEMU_FIRMWARE.map(Path::new) {
        let name = file.file_name().context("a folder is no firmware")?;
        fs::copy(file, firmware.join(name))
            .with_context(|| format!("QEMU's {} is missing", file.display()))?;
    }
    fs::create_dir_all(root.join(&BESIDE[1..]))?;
    for vmm in beside {
        program(
            &vmm.program,
            &root,
            &format!("{}/{}", &BESIDE[1..], vmm.name),
        )?;
    }
    let added = work.join("others.cpio");
    pack(&root, &added)?;
    // The kernel unpacks one archive after the other.
    let mut bytes = fs::read(&images.l1)?;
    bytes.extend(fs::read(added)?);
    let l1 = work.join("l1-others.cpio");
    fs::write(&l1, bytes)?;
    Ok(Images {
        kernel: images.kernel.clone(),
        l1,
        l2: images.l2.clone(),
        l2_opencl: images.l2_opencl.clone(),
        pocl: images.pocl.clone(),
        nvrtc: images.nvrtc.clone(),
        others: images.others.clone(),
    })
}

/// What QEMU loads for a guest without disks, cards and screen.
const QEMU_FIRMWARE: [&str; 5] = [
    "/usr/share/seabios/bios-256k.bin",
    "/usr/share/qemu/bios-microvm.bin",
    "/usr/share/qemu/linuxboot_dma.bin",
    "/usr/share/qemu/pvh.bin",
    "/usr/share/qemu/kvmvapic.bin",
];

/// Debian's kernel without its compression, as an ELF file with a PVH entry.
pub fn unpacked_kernel(cache: &Cache, kernel: &Kernel) -> Result<PathBuf> {
    let path = cache.dir.join(format!("vmlinux-{}", kernel.release));
    if path.exists() {
        return Ok(path);
    }
    let image = fs::read(&kernel.image)?;
    // The payload's place is in the setup header (Documentation/arch/x86/boot.rst).
    let word = |at: usize| -> Result<usize> {
        let bytes = image
            .get(at..at + 4)
            .context("the kernel image is truncated")?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize)
    };
    let setup = (usize::from(image.get(0x1f1).copied().unwrap_or(0)) + 1) * 512;
    let start = setup + word(0x248)?;
    let payload = image
        .get(start..start + word(0x24c)?)
        .context("the kernel image is truncated")?;
    let compressed = cache.dir.join("vmlinux.compressed");
    // The last four bytes are the unpacked size.
    fs::write(&compressed, &payload[..payload.len() - 4])?;
    let partial = cache.dir.join("vmlinux.partial");
    let tool = match payload {
        [0x02, 0x21, 0x4c, 0x18, ..] => "lz4",
        [0xfd, b'7', b'z', ..] => "xz",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "zstd",
        [0x1f, 0x8b, ..] => "gzip",
        _ => bail!(
            "the kernel {} is compressed in an unknown way",
            kernel.release
        ),
    };
    super::packages::install(&[(tool, if tool == "xz" { "xz-utils" } else { tool })])?;
    let out = fs::File::create(&partial)?;
    let status = Command::new(tool)
        .arg("-dc")
        .arg(&compressed)
        .stdout(out)
        .status()?;
    // lz4 warns about the end of the stream; what counts is that an ELF file came out.
    if !fs::read(&partial)?.starts_with(b"\x7fELF") {
        bail!("{tool} did not unpack the kernel ({status})");
    }
    fs::remove_file(compressed)?;
    fs::rename(&partial, &path)?;
    Ok(path)
}
