//! The host's KVM: `/dev/kvm`.

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::Cap;

use crate::{Error, Result, Vm};

/// Version of the KVM API, unchanged since Linux 2.6.22.
const API_VERSION: i32 = 12;

/// Capabilities that Gantry relies on without a fallback.
const REQUIRED: [(Cap, &str); 9] = [
    (Cap::Irqchip, "an in-kernel interrupt controller"),
    (Cap::UserMemory, "user memory slots"),
    (Cap::SetTssAddr, "a TSS address"),
    (Cap::ExtCpuid, "CPUID setup"),
    (Cap::MpState, "processor run states"),
    (Cap::Irqfd, "irqfd"),
    (Cap::Ioeventfd, "ioeventfd"),
    (Cap::IoeventfdNoLength, "ioeventfd for any access width"),
    (Cap::ImmediateExit, "immediate exit"),
];

/// Lets this process's vCPUs have Intel AMX. KVM lists it in [`Kvm::supported_cpuid`] from then on.
/// To be called before the process creates its first vCPU; it cannot be undone.
///
/// # Errors
///
/// [`Error::Amx`] if the processor or the kernel lacks it, or the process has created a vCPU.
pub fn permit_amx() -> Result<()> {
    /// `ARCH_REQ_XCOMP_GUEST_PERM` of the kernel's asm/prctl.h.
    const REQUEST_FOR_GUESTS: libc::c_long = 0x1025;
    /// Number of the state component of tile data.
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and accesses no memory of this process.
    let result = unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_FOR_GUESTS, TILE_DATA) };
    match result {
        0 => Ok(()),
        _ => Err(Error::Amx(std::io::Error::last_os_error())),
    }
}

/// An open `/dev/kvm` that has all capabilities that Gantry needs.
#[derive(Debug)]
pub struct Kvm {
    fd: kvm_ioctls::Kvm,
}

impl Kvm {
    /// Opens `/dev/kvm` and checks its capabilities.
    pub fn open() -> Result<Self> {
        let fd = kvm_ioctls::Kvm::new().map_err(|error| Error::Open {
            path: "/dev/kvm".into(),
            source: error.into(),
        })?;
        let version = fd.get_api_version();
        if version != API_VERSION {
            return Err(Error::ApiVersion(version));
        }
        let missing: Vec<_> = REQUIRED
            .iter()
            .filter(|(cap, _)| !fd.check_extension(*cap))
            .map(|(_, name)| *name)
            .collect();
        if !missing.is_empty() {
            return Err(Error::Missing {
                missing: missing.join(", "),
            });
        }
        Ok(Self { fd })
    }

    /// The CPUID leaves that this host's KVM can expose to a guest.
    pub fn supported_cpuid(&self) -> Result<CpuId> {
        self.fd
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(Error::ioctl("list the CPUID leaves that it supports"))
    }

    /// Indices of the model-specific registers that make up a vCPU's state.
    pub fn msr_indices(&self) -> Result<Vec<u32>> {
        let list = self
            .fd
            .get_msr_index_list()
            .map_err(Error::ioctl("list its MSRs"))?;
        Ok(list.as_slice().to_vec())
    }

    /// Whether a vCPU's time-stamp counter can run at a frequency other than the host's.
    pub fn scales_tsc(&self) -> bool {
        self.fd.check_extension(kvm_ioctls::Cap::TscControl)
    }

    /// Maximum number of vCPUs per VM.
    pub fn max_vcpus(&self) -> usize {
        self.fd.get_max_vcpus()
    }

    /// Creates a VM with its in-kernel interrupt controllers and timer.
    ///
    /// KVM on Intel processors reserves three pages at `tss` and one at `identity_map`. These are
    /// guest-physical addresses below 4 GiB that nothing else may use.
    pub fn create_vm(&self, tss: u64, identity_map: u64) -> Result<Vm> {
        let fd = loop {
            match self.fd.create_vm() {
                Ok(fd) => break fd,
                // Creating a VM takes kernel locks, and any signal interrupts it.
                Err(error) if error.errno() == libc::EINTR => {}
                Err(error) => return Err(Error::ioctl("create a VM")(error)),
            }
        };
        Vm::new(fd, tss, identity_map)
    }
}
