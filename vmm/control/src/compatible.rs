//! Checks whether this host supports what a guest of another host has seen.

use arch::cpuid;
use hypervisor::{CpuNeeds, Kvm};
use vmm_machine::host::Shell;

/// The capabilities of this host's KVM.
pub struct HostCpu {
    /// CPUID leaves that it supports.
    supported: Vec<kvm_bindings::kvm_cpuid_entry2>,
    /// CPUID leaves that every vCPU has, whether requested or not.
    given: Vec<kvm_bindings::kvm_cpuid_entry2>,
    /// Indices of model-specific registers.
    msrs: Vec<u32>,
    /// Frequency of the time-stamp counter in kHz, if KVM reports it.
    tsc_khz: Option<u32>,
    /// vCPUs may have another frequency.
    scales_tsc: bool,
    /// Why vCPUs cannot have AMX, if that is known.
    no_amx: Option<String>,
}

/// Queries KVM, using a temporary vCPU, on behalf of a guest that may have AMX (`amx`).
pub fn host(amx: bool) -> hypervisor::Result<HostCpu> {
    let kvm = Kvm::open()?;
    // It is among what this host lacks, then.
    let no_amx = amx.then(hypervisor::permit_amx).and_then(Result::err);
    let supported = kvm.supported_cpuid()?.as_slice().to_vec();
    let shell = Shell::new()?;
    let vcpu = shell.vm.create_vcpu(0, 0)?;
    vcpu.set_cpuid(&supported)?;
    Ok(HostCpu {
        given: vcpu.cpuid()?,
        msrs: arch::msrs::to_save(&kvm.msr_indices()?),
        tsc_khz: vcpu.tsc_khz().ok(),
        scales_tsc: kvm.scales_tsc(),
        supported,
        no_amx: no_amx.map(|error| base::Chain(&error).to_string()),
    })
}

/// Every reason why a guest with such vCPUs cannot run here. `needs` is untrusted.
pub fn reasons(needs: &CpuNeeds, host: &HostCpu) -> Vec<String> {
    let mut reasons = Vec::new();
    let missing = cpuid::missing(&needs.cpuid, &host.supported, &host.given);
    let has_amx = cpuid::has_amx(&needs.cpuid);
    let (amx, features): (Vec<_>, Vec<_>) = missing
        .into_iter()
        .partition(|it| has_amx && it.is_of_amx());
    if !amx.is_empty() {
        let why = host.no_amx.as_ref().map(|why| format!(" ({why})"));
        reasons.push(format!(
            "the guest has AMX, which this host's processor or KVM does not provide{}: boot it without \
             features=[amx]",
            why.unwrap_or_default()
        ));
    }
    if !features.is_empty() {
        let names: Vec<_> = features.iter().map(ToString::to_string).collect();
        reasons.push(format!(
            "the guest has seen features of the processor that this host lacks: {}; boot it with a \
             profile that both have (--cpus profile=x86-64-v3)",
            names.join(", ")
        ));
    }
    let is_missing = |index: &&u32| !host.msrs.contains(index);
    let msrs: Vec<_> = needs.msrs.iter().filter(is_missing).collect();
    if !msrs.is_empty() {
        /// Maximum number of registers that are named.
        const NAMED: usize = 16;
        let names: Vec<_> = msrs
            .iter()
            .take(NAMED)
            .map(|index| format!("{index:#x}"))
            .collect();
        let more = match msrs.len().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        reasons.push(format!(
            "the guest has model-specific registers that this host's KVM does not know: {}{more}; \
             use a kernel here that is as new as the source's",
            names.join(", ")
        ));
    }
    if let (Some(there), Some(here)) = (needs.tsc_khz, host.tsc_khz)
        && !host.scales_tsc
        && !is_near(there, here)
    {
        reasons.push(format!(
            "the guest's time-stamp counter runs at {there} kHz, this host's at {here} kHz, and its \
             processor cannot scale it"
        ));
    }
    reasons
}

/// Whether KVM itself considers the frequencies equal: a difference of up to 250 parts per million.
fn is_near(there: u32, here: u32) -> bool {
    u64::from(there.abs_diff(here)) * 1_000_000 <= u64::from(here) * 250
}

#[cfg(test)]
mod tests {
    use kvm_bindings::kvm_cpuid_entry2;

    use super::*;

    /// The CPUID of a processor with these features in leaf 1, ECX.
    fn leaf_1(ecx: u32) -> Vec<kvm_cpuid_entry2> {
        vec![kvm_cpuid_entry2 {
            function: 1,
            ecx,
            ..Default::default()
        }]
    }

    fn host_with(ecx: u32, scales_tsc: bool) -> HostCpu {
        HostCpu {
            supported: leaf_1(ecx),
            given: Vec::new(),
            msrs: vec![0x10, 0x277],
            tsc_khz: Some(2_000_000),
            scales_tsc,
            no_amx: None,
        }
    }

    #[test]
    fn a_host_without_amx_is_told_from_one_of_another_profile() {
        let needs = CpuNeeds {
            cpuid: vec![
                kvm_cpuid_entry2 {
                    function: 7,
                    // AMX-BF16, AMX-TILE and AMX-INT8.
                    edx: 0b1101 << 22,
                    ..Default::default()
                },
                kvm_cpuid_entry2 {
                    function: 0xd,
                    // Their state.
                    eax: 0b11 << 17,
                    ..Default::default()
                },
            ],
            msrs: Vec::new(),
            tsc_khz: None,
        };
        let host = HostCpu {
            no_amx: Some("Invalid argument".to_owned()),
            ..host_with(0, true)
        };
        let all = reasons(&needs, &host);
        assert_eq!(all.len(), 1, "{all:?}");
        assert!(all[0].contains("without features=[amx]"), "{all:?}");
        assert!(all[0].contains("Invalid argument"), "{all:?}");
        assert!(!all[0].contains("profile"), "{all:?}");
        // One without AMX may have what AMX needs.
        let mut without = needs;
        without.cpuid.remove(0);
        let all = reasons(&without, &host);
        assert_eq!(all.len(), 1, "{all:?}");
        assert!(all[0].contains("profile"), "{all:?}");
    }

    #[test]
    fn all_that_a_host_lacks_is_said_at_once() {
        let needs = CpuNeeds {
            // SSE 4.2.
            cpuid: leaf_1(1 << 20),
            msrs: vec![0x10, 0xd90],
            tsc_khz: Some(3_000_000),
        };
        let all = reasons(&needs, &host_with(0, false));
        assert_eq!(all.len(), 3, "{all:?}");
        assert!(all[0].to_lowercase().contains("sse4"), "{all:?}");
        assert!(
            all[1].contains("0xd90") && !all[1].contains("0x10,"),
            "{all:?}"
        );
        assert!(all[2].contains("3000000"), "{all:?}");
        let enough = CpuNeeds {
            msrs: vec![0x10],
            ..needs
        };
        assert!(reasons(&enough, &host_with(1 << 20, true)).is_empty());
    }

    #[test]
    fn a_frequency_that_was_measured_twice_is_the_same() {
        assert!(is_near(2_000_000, 2_000_400));
        assert!(!is_near(2_000_000, 2_001_000));
    }

    #[test]
    fn this_host_has_what_it_has() {
        let Ok(host) = host(false) else {
            eprintln!("not tested: there is no /dev/kvm here");
            return;
        };
        let needs = CpuNeeds {
            cpuid: host.given.clone(),
            msrs: host.msrs.clone(),
            tsc_khz: host.tsc_khz,
        };
        assert_eq!(reasons(&needs, &host), Vec::<String>::new());
    }
}
