//! `gantry doctor`: checks whether the host has everything that Gantry needs.
//!
//! Each check reads files under a root directory, so that tests can provide any kind of host.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

use base::{
    limits,
    paths::{ARBITER_SOCKET, CUDA_SOCKET, NVIDIA_VM_SOCKET, OPENCL_SOCKET},
};
use vmfunc_gate::{host::DEVICE, port::Lack};
use vmm_confinement::landlock;

/// Where firmware for this machine may be installed.
const FIRMWARE: [&str; 2] = [
    "/usr/share/cloud-hypervisor/CLOUDHV.fd",
    "/usr/lib/gantry/CLOUDHV.fd",
];

/// Outcome of a check.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// Everything needed is present.
    Ready,
    /// Missing, but only some guests need it.
    Optional,
    /// Missing, and no guest can run without it.
    Missing,
}

/// Result of a check.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Finding {
    /// What was checked.
    pub subject: String,
    /// The outcome.
    pub verdict: Verdict,
    /// What was found.
    pub state: String,
    /// How to fix it; empty if nothing needs fixing.
    pub cure: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = match self.verdict {
            Verdict::Ready => "ok      ",
            Verdict::Optional => "not here",
            Verdict::Missing => "MISSING ",
        };
        write!(f, "{mark}  {}: {}", self.subject, self.state)?;
        if !self.cure.is_empty() {
            write!(f, "\n          -> {}", self.cure)?;
        }
        Ok(())
    }
}

fn finding(subject: &str, verdict: Verdict, state: impl Into<String>, cure: &str) -> Finding {
    Finding {
        subject: subject.to_owned(),
        verdict,
        state: state.into(),
        cure: cure.to_owned(),
    }
}

/// A host, identified by the root of its file system.
pub struct Host {
    root: PathBuf,
    /// Maximum number of bytes that this process may lock in memory; `None` if unlimited.
    memlock: Option<u64>,
    /// The Landlock version of the host's kernel.
    landlock: Option<u32>,
}

impl Host {
    /// The host that this process runs on.
    pub fn this() -> Self {
        // SAFETY: no preconditions.
        let is_root = unsafe { libc::geteuid() } == 0;
        Self {
            root: PathBuf::from("/"),
            // A limit that cannot be read counts as 0 and is reported.
            memlock: limits::locked_memory()
                .unwrap_or(Some(0))
                .filter(|_| !is_root),
            landlock: landlock::version(),
        }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    fn read(&self, path: &str) -> Option<String> {
        let text = fs::read_to_string(self.path(path)).ok()?;
        Some(text.trim().to_owned())
    }

    fn opens(&self, path: &str) -> bool {
        let mut options = fs::File::options();
        options.read(true).write(true);
        options.open(self.path(path)).is_ok()
    }

    /// Runs all checks.
    pub fn examine(&self) -> Vec<Finding> {
        let mut findings = vec![
            self.kvm(),
            self.firmware(),
            self.tap(),
            self.hugepages(),
            self.iommu(),
            self.vfio(),
            self.iommufd(),
            self.locked_memory(),
            self.userfaultfd(),
            self.landlock(),
            self.gpu_driver(),
            self.opencl(),
            self.cuda(),
            self.native_contexts(),
            self.pool(),
            self.native_worker(),
            self.arbiter(),
            self.control_groups(),
            self.gate(),
        ];
        findings.extend(self.accelerators());
        findings
    }

    fn kvm(&self) -> Finding {
        let subject = "KVM";
        if !self.path("/dev/kvm").exists() {
            let cure = "switch on VT-x or AMD-V in the firmware (in a VM: nested virtualization), \
                        and load kvm_intel or kvm_amd";
            finding(subject, Verdict::Missing, "there is no /dev/kvm", cure)
        } else if !self.opens("/dev/kvm") {
            let cure = "add the user to the group kvm: usermod -aG kvm USER, and log in again";
            finding(subject, Verdict::Missing, "/dev/kvm cannot be opened", cure)
        } else if self.is_virtualized_by_hardware() {
            finding(subject, Verdict::Ready, "/dev/kvm can be used", "")
        } else {
            let state = "/dev/kvm can be used, without hardware virtualization: guests' kernels are emulated";
            let cure = "a stock kernel does not boot: make one as docs/user/emulated-kernels.md says, \
                        or use a host with VT-x or AMD-V";
            finding(subject, Verdict::Ready, state, cure)
        }
    }

    /// Whether the processor can run guests. Where the kernel does not tell, it is assumed.
    fn is_virtualized_by_hardware(&self) -> bool {
        let has_module = |name: &str| self.path(&format!("/sys/module/{name}")).exists();
        let processor = self.read("/proc/cpuinfo").unwrap_or_default();
        let mut flags = processor
            .lines()
            .filter(|line| line.starts_with("flags"))
            .flat_map(str::split_whitespace)
            .peekable();
        has_module("kvm_intel")
            || has_module("kvm_amd")
            || flags.peek().is_none()
            || flags.any(|flag| flag == "vmx" || flag == "svm")
    }

    /// Firmware for images that boot by UEFI.
    fn firmware(&self) -> Finding {
        let subject = "firmware";
        let mut files = FIRMWARE.iter().filter(|file| self.path(file).is_file());
        match files.next() {
            Some(file) => {
                let state = format!("{file} boots UEFI images (--firmware)");
                finding(subject, Verdict::Ready, state, "")
            }
            None => {
                let state = format!("none of {} is there", FIRMWARE.join(" and "));
                let cure = "only for images that boot by UEFI: build edk2's CloudHv target \
                            (docs/user/cloud-images.md), or boot their kernels (--kernel)";
                finding(subject, Verdict::Optional, state, cure)
            }
        }
    }

    fn tap(&self) -> Finding {
        let subject = "network cards";
        if self.path("/dev/net/tun").exists() {
            finding(subject, Verdict::Ready, "/dev/net/tun is there", "")
        } else {
            let state = "there is no /dev/net/tun";
            finding(subject, Verdict::Optional, state, "modprobe tun")
        }
    }

    fn hugepages(&self) -> Finding {
        let subject = "huge pages";
        let pages = self.read("/proc/sys/vm/nr_hugepages").unwrap_or_default();
        match pages.parse::<u64>() {
            Ok(pages) if pages > 0 => {
                finding(subject, Verdict::Ready, format!("{pages} in the pool"), "")
            }
            _ => {
                let cure = "only for --memory hugepages=on: sysctl vm.nr_hugepages=N";
                finding(subject, Verdict::Optional, "the pool is empty", cure)
            }
        }
    }

    fn iommu(&self) -> Finding {
        let subject = "IOMMU";
        let groups = fs::read_dir(self.path("/sys/kernel/iommu_groups"));
        match groups.map_or(0, Iterator::count) {
            0 => {
                let cure = "for physical devices: switch on VT-d or AMD-Vi in the firmware, and \
                            boot with intel_iommu=on (AMD needs no option)";
                finding(subject, Verdict::Optional, "there are no groups", cure)
            }
            count => finding(subject, Verdict::Ready, format!("{count} groups"), ""),
        }
    }

    fn vfio(&self) -> Finding {
        let subject = "VFIO";
        if self.opens("/dev/vfio/vfio") {
            finding(subject, Verdict::Ready, "/dev/vfio/vfio can be used", "")
        } else if self.path("/dev/vfio/vfio").exists() {
            let cure = "give the user the files under /dev/vfio (chown), or become root";
            let state = "/dev/vfio/vfio cannot be opened";
            finding(subject, Verdict::Optional, state, cure)
        } else {
            let state = "there is no /dev/vfio/vfio";
            finding(subject, Verdict::Optional, state, "modprobe vfio-pci")
        }
    }

    /// The alternative way to access physical devices, preferred where it is available.
    fn iommufd(&self) -> Finding {
        const FILE: &str = devices::vfio::IOMMUFD;
        let subject = "iommufd";
        if self.opens(FILE) {
            finding(subject, Verdict::Ready, format!("{FILE} can be used"), "")
        } else if self.path(FILE).exists() {
            let cure = "IOMMU groups are used instead; or give the user this file and those under \
                        /dev/vfio/devices (chown)";
            let state = format!("{FILE} cannot be opened");
            finding(subject, Verdict::Optional, state, cure)
        } else {
            let cure = "not needed: IOMMU groups are used instead; kernels from 6.6 on have it if \
                        they are built with IOMMUFD and VFIO_DEVICE_CDEV (modprobe iommufd)";
            let state = format!("there is no {FILE}");
            finding(subject, Verdict::Optional, state, cure)
        }
    }

    fn locked_memory(&self) -> Finding {
        let subject = "locked memory";
        match self.memlock {
            None => finding(subject, Verdict::Ready, "no limit", ""),
            Some(bytes) => {
                let cure = "a VM with a physical device locks all of its RAM: raise the limit in \
                            /etc/security/limits.conf, or LimitMEMLOCK= of the service";
                let state = format!("at most {} MiB", bytes >> 20);
                finding(subject, Verdict::Optional, state, cure)
            }
        }
    }

    fn gpu_driver(&self) -> Finding {
        let subject = "GPU driver of the host";
        match self.read("/proc/driver/nvidia/version") {
            Some(text) => {
                let first = text.lines().next().unwrap_or_default().to_owned();
                finding(subject, Verdict::Ready, first, "")
            }
            None => {
                let cure = "not needed for passthrough; for anything that the host computes \
                            itself, install the vendor's driver";
                finding(subject, Verdict::Optional, "none of NVIDIA", cure)
            }
        }
    }

    /// For guests whose memory is loaded on first access: lazy restores.
    fn userfaultfd(&self) -> Finding {
        const FILE: &str = "/dev/userfaultfd";
        const SETTING: &str = "/proc/sys/vm/unprivileged_userfaultfd";
        let subject = "userfaultfd";
        if self.memlock.is_none() || self.read(SETTING).as_deref() == Some("1") {
            return finding(subject, Verdict::Ready, "can be used", "");
        }
        if self.opens(FILE) {
            return finding(subject, Verdict::Ready, format!("{FILE} can be used"), "");
        }
        let cure = "only for --restore memory_restore_mode=ondemand: sysctl \
                    vm.unprivileged_userfaultfd=1, or give the user /dev/userfaultfd (chown)";
        finding(subject, Verdict::Optional, "this user may not use it", cure)
    }

    /// Confines a VMM, and the workers of accelerators, to their files.
    fn landlock(&self) -> Finding {
        let subject = "Landlock";
        if let Some(version) = self.landlock {
            let state = format!("the kernel has it (version {version})");
            return finding(subject, Verdict::Ready, state, "");
        }
        let cure = "for --landlock, and for workers that read and write nothing of others: boot a \
                    kernel that has it, with lsm=landlock,...";
        let state = "the kernel has none, or does not use it";
        finding(subject, Verdict::Optional, state, cure)
    }

    /// The first of the dynamic loader's directories that contains a library.
    fn library(&self, name: &str) -> Option<PathBuf> {
        const FOLDERS: [&str; 6] = [
            "/usr/lib/x86_64-linux-gnu",
            "/usr/lib64",
            "/lib/x86_64-linux-gnu",
            "/lib64",
            "/usr/lib",
            "/usr/local/lib",
        ];
        let paths = FOLDERS.map(|folder| self.path(folder).join(name));
        paths.into_iter().find(|path| path.exists())
    }

    fn opencl(&self) -> Finding {
        const VENDORS: &str = "/etc/OpenCL/vendors";
        let subject = "OpenCL";
        let mut drivers: Vec<_> = fs::read_dir(self.path(VENDORS))
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| name.ends_with(".icd"))
            .collect();
        drivers.sort();
        if self.library("libOpenCL.so.1").is_none() {
            let cure =
                "for gantry-accel serve: install the loader (ocl-icd-libopencl1) and a driver";
            let state = "there is no libOpenCL.so.1";
            return finding(subject, Verdict::Optional, state, cure);
        }
        if drivers.is_empty() {
            let cure =
                "for gantry-accel serve: install a driver (pocl-opencl-icd, or the vendor's)";
            let state = format!("the loader is there, but no driver in {VENDORS}");
            return finding(subject, Verdict::Optional, state, cure);
        }
        let state = format!("the loader, and {}", drivers.join(", "));
        finding(subject, Verdict::Ready, state, "")
    }

    fn cuda(&self) -> Finding {
        let subject = "CUDA";
        match self.library("libcuda.so.1") {
            Some(_) => finding(subject, Verdict::Ready, "libcuda.so.1 is there", ""),
            None => {
                let cure = "only for gantry-accel serve --api cuda: install NVIDIA's driver";
                finding(subject, Verdict::Optional, "there is no libcuda.so.1", cure)
            }
        }
    }

    /// Whether a process listens on the socket of one of this package's units.
    /// What gantry-nvidia needs, which makes programs' calls on NVIDIA's device files.
    fn native_contexts(&self) -> Finding {
        const BRANCH: &str = "580.";
        let subject = "native contexts";
        let text = self.read("/proc/driver/nvidia/version").unwrap_or_default();
        let version = text.split_whitespace().find(|word| {
            word.contains('.') && word.starts_with(|first: char| first.is_ascii_digit())
        });
        let Some(version) = version else {
            let cure = "only for gantry-nvidia: install NVIDIA's driver, branch 580";
            return finding(
                subject,
                Verdict::Optional,
                "NVIDIA's kernel driver is not loaded",
                cure,
            );
        };
        let files = ["/dev/nvidiactl", "/dev/nvidia-uvm"];
        if let Some(file) = files.into_iter().find(|file| !self.opens(file)) {
            let cure = "only for gantry-nvidia: give its user this file (nvidia-modprobe -u -c 0 makes them)";
            return finding(
                subject,
                Verdict::Optional,
                format!("{file} cannot be opened"),
                cure,
            );
        }
        let state = format!("driver {version}");
        if version.starts_with(BRANCH) {
            return finding(subject, Verdict::Ready, state, "");
        }
        let cure = "only for gantry-nvidia: it knows branch 580 of the driver";
        finding(subject, Verdict::Optional, state, cure)
    }

    fn service(&self, subject: &str, sockets: &[&str], cure: &str) -> Finding {
        let path = |socket: &str| self.path(socket);
        let served = sockets
            .iter()
            .filter(|socket| base::socket::is_served(&path(socket)).is_ok());
        let served: Vec<_> = served.copied().collect();
        if !served.is_empty() {
            let state = format!("listens on {}", served.join(", "));
            return finding(subject, Verdict::Ready, state, "");
        }
        let left = sockets.iter().find(|socket| path(socket).exists());
        let state = match left {
            Some(socket) => format!("nobody listens on {socket}, although it is there"),
            None => format!("there is no {}", sockets.join(", no ")),
        };
        finding(subject, Verdict::Optional, state, cure)
    }

    fn pool(&self) -> Finding {
        let sockets = [OPENCL_SOCKET, CUDA_SOCKET];
        let cure = "for --accel: systemctl start gantry-accel, or gantry-accel serve --socket \
                    /run/gantry/opencl.sock";
        self.service("accelerator pool", &sockets, cure)
    }

    fn native_worker(&self) -> Finding {
        let cure = "for --accel api=nvidia: gantry-nvidia --vm /run/gantry/nvidia-vm.sock";
        self.service("native contexts of VMs", &[NVIDIA_VM_SOCKET], cure)
    }

    fn arbiter(&self) -> Finding {
        let cure = "for weights between VMs: systemctl start gantry-arbiter";
        self.service("arbiter", &[ARBITER_SOCKET], cure)
    }

    /// Control groups divide memory and processes among a pool's workers.
    fn control_groups(&self) -> Finding {
        const ROOT: &str = "/sys/fs/cgroup";
        const UNIT: &str = "/sys/fs/cgroup/system.slice/gantry-accel.service";
        let subject = "control groups";
        let Some(there) = self.read(&format!("{ROOT}/cgroup.controllers")) else {
            let cure = "only for limits of an accelerator's workers: boot with \
                        systemd.unified_cgroup_hierarchy=1";
            let state = "there is no unified hierarchy (version 2)";
            return finding(subject, Verdict::Optional, state, cure);
        };
        let lacks = |there: &str| {
            let names: Vec<_> = there.split_whitespace().collect();
            let lacking = ["memory", "pids"].into_iter();
            lacking
                .filter(|name| !names.contains(name))
                .collect::<Vec<_>>()
        };
        let missing = lacks(&there);
        if !missing.is_empty() {
            let cure = "only for limits of an accelerator's workers: boot without cgroup_disable=";
            let state = format!("version 2, without {}", missing.join(", "));
            return finding(subject, Verdict::Optional, state, cure);
        }
        // A pool that was given its own group divides it before it accepts any client.
        match self.read(&format!("{UNIT}/cgroup.subtree_control")) {
            None => {
                let state = "version 2, with memory and pids; gantry-accel.service has them \
                             delegated when it runs";
                finding(subject, Verdict::Ready, state, "")
            }
            Some(divided) if lacks(&divided).is_empty() => {
                let state = "version 2; gantry-accel.service limits its workers' memory and \
                             processes";
                finding(subject, Verdict::Ready, state, "")
            }
            Some(_) => {
                let state = "version 2; nothing is delegated to gantry-accel.service, whose \
                             workers have no limits";
                let cure = "only for limits of an accelerator's workers: give its unit \
                            Delegate=memory pids";
                finding(subject, Verdict::Optional, state, cure)
            }
        }
    }

    /// The accelerator transport that needs a kernel module and an Intel CPU.
    fn gate(&self) -> Finding {
        let subject = "exitless calls between VMs";
        let missing = vmfunc_gate::host::missing(&self.root);
        if missing.is_empty() && !self.opens(DEVICE) {
            let cure = "not needed: the ring transport works without it; or give the user this \
                        file (a udev rule is in docs/user/gate.md), or become root";
            let state = format!("{DEVICE} cannot be opened");
            finding(subject, Verdict::Optional, state, cure)
        } else if missing.is_empty() {
            finding(
                subject,
                Verdict::Ready,
                "VT-x, VMFUNC and the module are there",
                "",
            )
        } else {
            let cure = "not needed: the ring transport works without it";
            let missing: Vec<_> = missing.into_iter().map(Lack::text).collect();
            finding(subject, Verdict::Optional, missing.join("; "), cure)
        }
    }

    /// Display controllers and accelerators (PCI classes 03 and 12), and whether each can be
    /// assigned to a VM.
    fn accelerators(&self) -> Vec<Finding> {
        let devices = self.path("/sys/bus/pci/devices");
        let mut paths: Vec<_> = fs::read_dir(devices)
            .into_iter()
            .flatten()
            .filter_map(Result::ok)
            .map(|entry| entry.path())
            .filter(|path| {
                let class = fs::read_to_string(path.join("class")).unwrap_or_default();
                class.starts_with("0x03") || class.starts_with("0x12")
            })
            .collect();
        paths.sort();
        let mediated = fs::read_dir(self.path("/sys/bus/mdev/devices"));
        let mut mediated: Vec<_> = mediated
            .into_iter()
            .flatten()
            .filter_map(|entry| Some(entry.ok()?.path()))
            .collect();
        mediated.sort();
        let found = paths.iter().map(|path| accelerator(path));
        found
            .chain(mediated.iter().map(|path| mediated_device(path)))
            .collect()
    }
}

/// A mediated device: a part of a device that the host's driver shares out.
fn mediated_device(path: &Path) -> Finding {
    let uuid = path.file_name().unwrap_or_default().to_string_lossy();
    let kind = link(&path.join("mdev_type")).unwrap_or_else(|| "unknown".to_owned());
    let subject = format!("mediated device {uuid} (type {kind})");
    let cure = format!("gantry ... --device path=/sys/bus/mdev/devices/{uuid}");
    match link(&path.join("iommu_group")) {
        Some(group) => {
            let state = format!("VFIO has it, IOMMU group {group}");
            finding(&subject, Verdict::Ready, state, &cure)
        }
        None => {
            let cure =
                "modprobe vfio_mdev, if the kernel has it, or load the vendor's driver again";
            finding(&subject, Verdict::Optional, "VFIO does not have it", cure)
        }
    }
}

fn link(path: &Path) -> Option<String> {
    let target = fs::read_link(path).ok()?;
    Some(target.file_name()?.to_str()?.to_owned())
}

fn accelerator(path: &Path) -> Finding {
    let address = path.file_name().unwrap_or_default().to_string_lossy();
    let id = |name| fs::read_to_string(path.join(name)).unwrap_or_default();
    let subject = format!(
        "device {address} ({}:{})",
        id("vendor").trim().trim_start_matches("0x"),
        id("device").trim().trim_start_matches("0x")
    );
    let Some(group) = link(&path.join("iommu_group")) else {
        let cure = "it can be given to a VM once the IOMMU is on";
        return finding(&subject, Verdict::Optional, "in no IOMMU group", cure);
    };
    let driver = link(&path.join("driver")).unwrap_or_else(|| "no driver".to_owned());
    if devices::vfio::is_of_vfio(path) {
        let own = fs::read_dir(path.join("vfio-dev")).ok();
        let own = own.and_then(|mut names| names.next()?.ok());
        let own = own.map(|name| format!(", /dev/vfio/devices/{}", name.file_name().display()));
        let own = own.unwrap_or_default();
        let state = format!("bound to {driver}, IOMMU group {group}{own}");
        let cure = format!("gantry ... --device path=/sys/bus/pci/devices/{address}");
        return finding(&subject, Verdict::Ready, state, &cure);
    }
    let state = format!("bound to {driver}, IOMMU group {group}");
    let cure = format!(
        "to give it to a VM: driverctl set-override {address} vfio-pci (or as in docs/user/gpu.md)"
    );
    finding(&subject, Verdict::Optional, state, &cure)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn host(files: &[(&str, &str)]) -> (tempfile::TempDir, Host) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let root = dir.path().to_owned();
        let memlock = Some(64 << 20);
        let landlock = None;
        let host = Host {
            root,
            memlock,
            landlock,
        };
        (dir, host)
    }

    #[test]
    fn a_bare_host_lacks_kvm_and_hears_how_to_mend_it() {
        let (_dir, host) = host(&[]);
        let findings = host.examine();
        assert_eq!(findings[0].verdict, Verdict::Missing);
        assert!(findings[0].to_string().contains("-> switch on VT-x"));
        let others = &findings[1..];
        assert!(others.iter().all(|f| f.verdict == Verdict::Optional));
        assert!(others.iter().all(|f| !f.cure.is_empty()));
    }

    #[test]
    fn a_kvm_without_hardware_virtualization_is_told_from_others() {
        let emulated =
            "/dev/kvm can be used, without hardware virtualization: guests' kernels are emulated";
        let usual = "/dev/kvm can be used";
        let (none, vmx) = ("flags\t\t: fpu sse\nbugs\t: vmx\n", "flags\t\t: fpu vmx\n");
        let module = "sys/module/kvm_amd/parameters/npt";
        for (files, state) in [
            (&[("proc/cpuinfo", none)][..], emulated),
            (&[("proc/cpuinfo", none), (module, "Y")], usual),
            (&[("proc/cpuinfo", vmx)], usual),
            (&[], usual),
        ] {
            let (_dir, host) = host(&[files, &[("dev/kvm", "")]].concat());
            let kvm = &host.examine()[0];
            assert_eq!((kvm.verdict, kvm.state.as_str()), (Verdict::Ready, state));
            assert_eq!(kvm.cure.is_empty(), state == usual);
        }
    }

    #[test]
    fn firmware_is_named_where_it_is() {
        let (_dir, bare) = host(&[]);
        assert_eq!(bare.firmware().verdict, Verdict::Optional);
        let (_dir, able) = host(&[("usr/lib/gantry/CLOUDHV.fd", "")]);
        let finding = able.firmware();
        assert_eq!(finding.verdict, Verdict::Ready);
        assert!(finding.state.contains(FIRMWARE[1]), "{}", finding.state);
    }

    #[test]
    fn what_the_gate_lacks_is_named() {
        let (_dir, bare) = host(&[("proc/cpuinfo", "flags : svm fsgsbase\n")]);
        let finding = bare.gate();
        assert_eq!(finding.verdict, Verdict::Optional);
        for what in ["no VT-x", "another kernel than", "no module"] {
            assert!(finding.state.contains(what), "{}", finding.state);
        }
        let (_dir, able) = host(&[
            (
                "proc/cpuinfo",
                "flags : vmx fsgsbase\nvmx flags : ept eptp_switching\n",
            ),
            ("proc/sys/kernel/osrelease", "6.1.0-56-cloud-amd64\n"),
            ("dev/gantry-gate", ""),
        ]);
        assert_eq!(able.gate().verdict, Verdict::Ready);
        // Even root cannot open a directory for writing.
        fs::remove_file(able.path(DEVICE)).unwrap();
        fs::create_dir(able.path(DEVICE)).unwrap();
        let finding = able.gate();
        assert_eq!(finding.verdict, Verdict::Optional);
        assert!(finding.state.contains("/dev/gantry-gate cannot be opened"));
        assert!(finding.cure.contains("udev"), "{}", finding.cure);
    }

    #[test]
    fn iommufd_is_named_where_it_is_there_and_can_be_done_without() {
        let (_dir, bare) = host(&[]);
        let finding = bare.iommufd();
        assert_eq!(finding.verdict, Verdict::Optional);
        assert!(finding.cure.starts_with("not needed"), "{}", finding.cure);
        let (dir, host) = host(&[("dev/iommu", "")]);
        assert_eq!(host.iommufd().verdict, Verdict::Ready);
        fs::remove_file(dir.path().join("dev/iommu")).unwrap();
        fs::create_dir(dir.path().join("dev/iommu")).unwrap();
        let finding = host.iommufd();
        assert_eq!(finding.verdict, Verdict::Optional);
        assert!(finding.state.contains("cannot be opened"));
    }

    #[test]
    fn what_accelerators_need_is_looked_for() {
        let (dir, host) = host(&[
            ("etc/OpenCL/vendors/pocl.icd", "libpocl.so.2\n"),
            ("etc/OpenCL/vendors/README", ""),
        ]);
        assert!(host.opencl().state.contains("no libOpenCL.so.1"));
        for name in ["libOpenCL.so.1", "libcuda.so.1"] {
            let path = dir.path().join("usr/lib/x86_64-linux-gnu").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        assert_eq!(host.opencl().state, "the loader, and pocl.icd");
        assert_eq!(host.cuda().verdict, Verdict::Ready);
        fs::remove_file(dir.path().join("etc/OpenCL/vendors/pocl.icd")).unwrap();
        assert!(host.opencl().state.contains("no driver in"));
    }

    #[test]
    fn native_contexts_need_a_driver_of_a_known_branch() {
        let found = |version: &str, files: &[&str]| {
            let line = format!(
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\n"
            );
            let mut all = vec![("proc/driver/nvidia/version", line.as_str())];
            all.extend(files.iter().map(|file| (*file, "")));
            let (_folder, host) = host(&all);
            host.native_contexts()
        };
        let files = ["dev/nvidiactl", "dev/nvidia-uvm"];
        let ready = found("580.159.04", &files);
        assert_eq!(
            (ready.verdict, ready.state.as_str()),
            (Verdict::Ready, "driver 580.159.04")
        );
        assert_eq!(found("590.48.01", &files).verdict, Verdict::Optional);
        assert!(
            found("580.159.04", &files[..1])
                .state
                .contains("/dev/nvidia-uvm")
        );
        let (_folder, bare) = host(&[]);
        assert!(bare.native_contexts().state.contains("not loaded"));
    }

    #[test]
    fn a_pool_is_there_as_long_as_it_listens() {
        let (dir, host) = host(&[("run/gantry/other", "")]);
        assert!(host.pool().state.starts_with("there is no /run/gantry"));
        let path = dir.path().join("run/gantry/opencl.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(host.pool().state, "listens on /run/gantry/opencl.sock");
        drop(listener);
        let native = host.native_worker().state;
        assert_eq!(native, "there is no /run/gantry/nvidia-vm.sock");
        let left = host.pool();
        assert_eq!(left.verdict, Verdict::Optional);
        assert!(
            left.state.starts_with("nobody listens on"),
            "{}",
            left.state
        );
    }

    #[test]
    fn what_confines_and_divides_is_looked_for() {
        let (_dir, bare) = host(&[]);
        for found in [bare.userfaultfd(), bare.landlock(), bare.control_groups()] {
            assert_eq!(found.verdict, Verdict::Optional, "{found}");
        }
        let (_dir, mut able) = host(&[
            ("proc/sys/vm/unprivileged_userfaultfd", "1\n"),
            (
                "sys/fs/cgroup/cgroup.controllers",
                "cpuset cpu io memory pids\n",
            ),
        ]);
        able.landlock = Some(1);
        for found in [able.userfaultfd(), able.landlock(), able.control_groups()] {
            assert_eq!(found.verdict, Verdict::Ready, "{found}");
        }
        let (_dir, half) = host(&[("sys/fs/cgroup/cgroup.controllers", "cpu\n")]);
        assert_eq!(
            half.control_groups().state,
            "version 2, without memory, pids"
        );
        for (divided, verdict) in [("memory pids\n", Verdict::Ready), ("\n", Verdict::Optional)] {
            let (_dir, running) = host(&[
                ("sys/fs/cgroup/cgroup.controllers", "memory pids\n"),
                (
                    "sys/fs/cgroup/system.slice/gantry-accel.service/cgroup.subtree_control",
                    divided,
                ),
            ]);
            assert_eq!(running.control_groups().verdict, verdict);
        }
    }

    #[test]
    fn a_device_is_ready_once_vfio_has_it() {
        let (dir, host) = host(&[
            ("dev/kvm", ""),
            ("sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n"),
            ("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n"),
            ("sys/bus/pci/devices/0000:01:00.0/device", "0x2335\n"),
            ("sys/bus/pci/devices/0000:02:00.0/class", "0x020000\n"),
        ]);
        let device = dir.path().join("sys/bus/pci/devices/0000:01:00.0");
        let found = || {
            let mut found = host.accelerators();
            assert_eq!(found.len(), 1, "a network card is no accelerator");
            found.remove(0)
        };
        assert_eq!(host.kvm().verdict, Verdict::Ready);
        assert_eq!(found().state, "in no IOMMU group");
        symlink("../../../kernel/iommu_groups/7", device.join("iommu_group")).unwrap();
        assert_eq!(found().state, "bound to no driver, IOMMU group 7");
        symlink("../../drivers/vfio-pci", device.join("driver")).unwrap();
        let ready = found();
        assert_eq!(ready.verdict, Verdict::Ready);
        assert_eq!(ready.subject, "device 0000:01:00.0 (10de:2335)");
        fs::create_dir_all(device.join("vfio-dev/vfio0")).unwrap();
        let expected = "bound to vfio-pci, IOMMU group 7, /dev/vfio/devices/vfio0";
        assert_eq!(found().state, expected);
        // A vendor-specific driver.
        fs::remove_file(device.join("driver")).unwrap();
        symlink("../../drivers/nvgrace-gpu-vfio-pci", device.join("driver")).unwrap();
        let vendors = found();
        assert_eq!(vendors.verdict, Verdict::Ready);
        assert!(vendors.state.starts_with("bound to nvgrace-gpu-vfio-pci"));
    }

    #[test]
    fn mediated_devices_are_listed() {
        let (dir, host) = host(&[("sys/bus/mdev/devices/83b8f4f2/uevent", "")]);
        let device = dir.path().join("sys/bus/mdev/devices/83b8f4f2");
        symlink(
            "../mdev_supported_types/nvidia-63",
            device.join("mdev_type"),
        )
        .unwrap();
        let found = || host.accelerators().remove(0);
        assert_eq!(found().verdict, Verdict::Optional);
        symlink("../../../kernel/iommu_groups/9", device.join("iommu_group")).unwrap();
        let ready = found();
        assert_eq!(ready.subject, "mediated device 83b8f4f2 (type nvidia-63)");
        assert_eq!(ready.verdict, Verdict::Ready);
        assert!(ready.cure.ends_with("path=/sys/bus/mdev/devices/83b8f4f2"));
    }
}
