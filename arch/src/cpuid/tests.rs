use super::*;

fn leaf(function: u32, index: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 {
        function,
        index,
        eax,
        ebx,
        ecx,
        edx,
        ..Default::default()
    }
}

/// CPUID of a KVM host with every feature. Caches: L1 data, L2, L3.
fn host(vendor: &[u8; 12]) -> Vec<kvm_cpuid_entry2> {
    let part = |n: usize| u32::from_le_bytes(vendor[n..n + 4].try_into().unwrap());
    let all = u32::MAX;
    let cache = |kind: u32, level: u32| [level << 5 | kind, 0x3f, 0x3f, 0];
    let cache_leaf = if vendor == b"AuthenticAMD" {
        LEAF_AMD_CACHE
    } else {
        4
    };
    vec![
        leaf(0, 0, [0x20, part(0), part(8), part(4)]),
        leaf(1, 0, [0x0005_0654, 0x1234_0800, all, all]),
        leaf(cache_leaf, 0, cache(1, 1)),
        leaf(cache_leaf, 1, cache(3, 2)),
        leaf(cache_leaf, 2, cache(3, 3)),
        leaf(cache_leaf, 3, [0; 4]),
        leaf(6, 0, [all, 2, 1, 0]),
        leaf(7, 0, [1, all, all, all]),
        leaf(7, 1, [all, 0, 0, all]),
        leaf(0xa, 0, [5; 4]),
        leaf(0xb, 0, [9; 4]),
        leaf(0xd, 0, [0xff, 2696, 2696, 0]),
        leaf(0xd, 1, [0xf, 2696, 0, 0]),
        leaf(0xd, 2, [256, 576, 0, 0]),
        leaf(0xd, 5, [64, 1088, 0, 0]),
        leaf(0x15, 0, [9; 4]),
        leaf(0x1f, 0, [9; 4]),
        leaf(0x4000_0000, 0, [0x4000_0001, 0, 0, 0]),
        leaf(0x4000_0001, 0, [0xff, 0, 0, 0]),
        leaf(0x8000_0000, 0, [0x8000_0021, 0, 0, 0]),
        leaf(0x8000_0001, 0, [0, 0, all, all]),
        leaf(0x8000_0008, 0, [0x0030_392e, all, 0x70ff, 0]),
        leaf(0x8000_000a, 0, [1, 8, 0, all]),
        leaf(0x8000_001e, 0, [9; 4]),
        leaf(0x8000_0021, 0, [all, 0, 0, 0]),
    ]
}

fn intel() -> Vec<kvm_cpuid_entry2> {
    host(b"GenuineIntel")
}

fn amd() -> Vec<kvm_cpuid_entry2> {
    host(b"AuthenticAMD")
}

fn config(topology: Topology) -> Config {
    Config {
        topology,
        profile: Profile::Host,
        phys_bits: 40,
        nested: false,
        gate: false,
        amx: false,
        tsc_khz: Some(2_500_000),
    }
}

/// With AMX, as KVM lists it to a process that has the permission.
fn with_amx() -> Vec<kvm_cpuid_entry2> {
    let mut host = intel();
    let state = find_mut(&mut host, 0xd, 0).unwrap();
    (state.eax, state.ecx) = (0x6_00e7, 11_008);
    host.push(leaf(0xd, 17, [64, 2752, 0, 0]));
    host.push(leaf(0xd, 18, [8192, 2816, 6, 0]));
    host.push(leaf(0x1d, 0, [1, 0, 0, 0]));
    host.push(leaf(0x1d, 1, [0x0400_2000, 0x0008_0040, 16, 0]));
    host.push(leaf(0x1e, 0, [0, 0x4010, 0, 0]));
    host
}

#[test]
fn a_guest_has_amx_if_it_was_asked_for_and_the_host_has_it() {
    let topology = Topology::flat(1).unwrap();
    let wanted = Config {
        amx: true,
        ..config(topology)
    };
    let cpuid = for_vcpu(&with_amx(), &wanted, 0).unwrap();
    assert_eq!(values(&cpuid, 7, 0)[3] & 0x0340_0000, 0x0340_0000);
    assert_eq!(values(&cpuid, 0xd, 0)[0], 0x6_00e7);
    assert_eq!(values(&cpuid, 0x1e, 0)[1], 0x4010);
    let missing = for_vcpu(&intel(), &wanted, 0);
    assert_eq!(missing.unwrap_err(), CpuidError::Amx);
    let named = Config {
        profile: Profile::V3,
        ..wanted
    };
    for_vcpu(&with_amx(), &named, 0).unwrap_err();
}

#[test]
fn a_guest_that_has_not_asked_for_amx_sees_nothing_of_it() {
    let topology = Topology::flat(1).unwrap();
    let cpuid = for_vcpu(&with_amx(), &config(topology), 0).unwrap();
    assert_eq!(values(&cpuid, 7, 0)[3] & 0x0340_0000, 0);
    assert_eq!(values(&cpuid, 7, 1)[0] & 1 << 21, 0);
    // The last component that is left is 64 bytes at 1088.
    assert_eq!(values(&cpuid, 0xd, 0), [0xe7, 2696, 1152, 0]);
    for (function, index) in [(0xd, 17), (0xd, 18), (0x1d, 0), (0x1d, 1), (0x1e, 0)] {
        assert!(find(&cpuid, function, index).is_none(), "{function:#x}");
    }
    // A guest without it may move to a host where the process has no permission.
    assert!(missing(&cpuid, &intel(), &[]).is_empty());
}

fn values(cpuid: &[kvm_cpuid_entry2], function: u32, index: u32) -> [u32; 4] {
    let entry = find(cpuid, function, index).unwrap();
    [entry.eax, entry.ebx, entry.ecx, entry.edx]
}

#[test]
fn topology_leaves_tell_threads_cores_and_packages() {
    // Three cores take two bits of the ID: package 1, core 1, thread 1.
    let config = config(Topology::new(2, 3, 1, 2).unwrap());
    let cpuid = for_vcpu(&intel(), &config, 9).unwrap();
    let id = 0b1011;
    assert_eq!(values(&cpuid, 0xb, 0), [1, 2, 0x100, id]);
    assert_eq!(values(&cpuid, 0xb, 1), [3, 6, 0x201, id]);
    assert_eq!(values(&cpuid, 0xb, 2), [0, 0, 2, id]);
    let [_, ebx, _, edx] = values(&cpuid, 1, 0);
    assert_eq!(ebx, id << 24 | 8 << 16 | 0x800);
    assert_ne!(edx & HTT, 0);
    assert!(find(&cpuid, 0x1f, 0).is_none());
    assert_eq!(values(&cpuid, 0, 0)[0], 0x16);
}

#[test]
fn dies_appear_in_their_own_leaf() {
    let config = config(Topology::new(1, 2, 2, 1).unwrap());
    let cpuid = for_vcpu(&intel(), &config, 3).unwrap();
    assert_eq!(values(&cpuid, 0x1f, 0), [0, 1, 0x100, 3]);
    assert_eq!(values(&cpuid, 0x1f, 1), [1, 2, 0x201, 3]);
    assert_eq!(values(&cpuid, 0x1f, 2), [2, 4, 0x502, 3]);
    assert_eq!(values(&cpuid, 0x1f, 3), [0, 0, 3, 3]);
    assert_eq!(values(&cpuid, 0xb, 1), [2, 4, 0x201, 3]);
    assert_eq!(values(&cpuid, 0, 0)[0], 0x1f);
}

#[test]
fn caches_belong_to_cores_and_dies() {
    let config = config(Topology::new(2, 4, 2, 1).unwrap());
    let sharing = |cpuid: &[kvm_cpuid_entry2], function, index| {
        (values(cpuid, function, index)[0] >> 14 & 0xfff) + 1
    };
    let cpuid = for_vcpu(&intel(), &config, 0).unwrap();
    assert_eq!([0, 1, 2].map(|n| sharing(&cpuid, 4, n)), [2, 2, 8]);
    assert_eq!(values(&cpuid, 4, 0)[0] >> 26, 7);
    assert_eq!(values(&cpuid, 4, 3)[0], 0);
    let cpuid = for_vcpu(&amd(), &config, 0).unwrap();
    assert_eq!(
        [0, 1, 2].map(|n| sharing(&cpuid, LEAF_AMD_CACHE, n)),
        [2, 2, 8]
    );
    assert_eq!(values(&cpuid, LEAF_AMD_CACHE, 0)[0] >> 26, 0);
}

#[test]
fn amd_leaves_tell_nodes_and_cores() {
    let config = config(Topology::new(2, 2, 2, 2).unwrap());
    let cpuid = for_vcpu(&amd(), &config, 15).unwrap();
    // Second package, second die, second core, second thread.
    assert_eq!(
        values(&cpuid, 0x8000_001e, 0),
        [15, 1 << 8 | 3, 1 << 8 | 3, 0]
    );
    assert_eq!(values(&cpuid, 0x8000_0008, 0)[2], 3 << 12 | 7);
    assert_eq!(values(&cpuid, 0x8000_0001, 0)[2] & CMP_LEGACY, CMP_LEGACY);
    assert!(find(&cpuid, 0x15, 0).is_none());
}

#[test]
fn a_single_vcpu_has_no_siblings() {
    let config = config(Topology::flat(1).unwrap());
    let cpuid = for_vcpu(&amd(), &config, 0).unwrap();
    assert_eq!(values(&cpuid, 1, 0)[3] & HTT, 0);
    assert_eq!(values(&cpuid, 0x8000_0001, 0)[2] & CMP_LEGACY, 0);
}

#[test]
fn features_of_the_hypervisor_are_shown_and_those_of_the_running_system_are_not() {
    let config = config(Topology::flat(2).unwrap());
    let mut bare = intel();
    find_mut(&mut bare, 1, 0).unwrap().ecx = OSXSAVE;
    let cpuid = for_vcpu(&bare, &config, 0).unwrap();
    assert_eq!(values(&cpuid, 1, 0)[2], HYPERVISOR | X2APIC | TSC_DEADLINE);
    assert_eq!(values(&cpuid, 7, 0)[2] & OSPKE, 0);
    assert_eq!(values(&cpuid, 0x8000_0008, 0)[0], 0x3928);
}

#[test]
fn nested_virtualization_is_hidden_unless_asked_for() {
    for (nested, vmx, svm) in [(false, 0, 0), (true, VMX, SVM)] {
        let config = Config {
            nested,
            ..config(Topology::flat(1).unwrap())
        };
        let cpuid = for_vcpu(&amd(), &config, 0).unwrap();
        assert_eq!(values(&cpuid, 1, 0)[2] & VMX, vmx);
        assert_eq!(values(&cpuid, 0x8000_0001, 0)[2] & SVM, svm);
        assert_eq!(find(&cpuid, 0x8000_000a, 0).is_some(), nested);
    }
}

#[test]
fn page_tables_that_a_gate_cannot_follow_are_hidden() {
    let shown = |gate| {
        let config = Config {
            gate,
            ..config(Topology::flat(1).unwrap())
        };
        let cpuid = for_vcpu(&intel(), &config, 0).unwrap();
        let (one, seven) = (values(&cpuid, 1, 0), values(&cpuid, 7, 0));
        [one[2] & PCID, seven[1] & INVPCID, seven[2] & LA57]
    };
    assert_eq!(shown(false), [PCID, INVPCID, LA57]);
    assert_eq!(shown(true), [0; 3]);
}

#[test]
fn clocks_are_named_where_linux_computes_with_them_exactly() {
    let timing = |khz: Option<u32>| {
        let config = Config {
            tsc_khz: khz,
            ..config(Topology::flat(1).unwrap())
        };
        for_vcpu(&intel(), &config, 0).unwrap()
    };
    let cpuid = timing(Some(2_500_000));
    assert_eq!(values(&cpuid, 0x4000_0000, 0)[0], 0x4000_0010);
    assert_eq!(values(&cpuid, 0x4000_0010, 0)[..2], [2_500_000, 1_000_000]);
    assert_eq!(values(&cpuid, 0x15, 0)[..3], [2, 5, 1_000_000_000]);
    assert_eq!(values(&cpuid, 0x16, 0)[0], 2500);
    // 1,249,999 times 1,000,000 needs more than 32 bits.
    let cpuid = timing(Some(2_499_998));
    assert!(find(&cpuid, 0x15, 0).is_none());
    assert_eq!(values(&cpuid, 0x4000_0010, 0)[0], 2_499_998);
    let cpuid = timing(None);
    assert_eq!(
        values(&cpuid, 0x4000_0000, 0),
        [0x4000_0001, 0x4b4d_564b, 0x564b_4d56, 0x4d]
    );
}

#[test]
fn named_profiles_look_the_same_on_every_host() {
    for profile in [Profile::V2, Profile::V3] {
        let config = Config {
            profile,
            ..config(Topology::flat(2).unwrap())
        };
        let rich = for_vcpu(&intel(), &config, 1).unwrap();
        // The guest's own CPUID as the host's: the minimum that the profile needs.
        let poor = for_vcpu(&rich, &config, 1).unwrap();
        for function in [1, 6, 7, 0xa, 0xd, 0x8000_0001, 0x8000_0021] {
            let of = |cpuid: &[kvm_cpuid_entry2]| {
                cpuid
                    .iter()
                    .filter(|entry| entry.function == function)
                    .copied()
                    .collect::<Vec<_>>()
            };
            assert_eq!(of(&rich), of(&poor), "{profile} {function:#x}");
        }
        assert_eq!(missing(&rich, &intel(), &[]), []);
    }
}

#[test]
fn a_profile_that_the_host_cannot_give_is_refused_by_feature() {
    let mut supported = intel();
    find_mut(&mut supported, 7, 0).unwrap().ebx &= !(1 << 5);
    let config = |profile| Config {
        profile,
        ..config(Topology::flat(1).unwrap())
    };
    for_vcpu(&supported, &config(Profile::V2), 0).unwrap();
    let error = for_vcpu(&supported, &config(Profile::V3), 0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "this host lacks features of CPU profile x86-64-v3: AVX2 (CPUID 0x7.0x0:EBX[5]); choose \
         a lower profile or another host"
    );
}

#[test]
fn a_restore_lists_what_the_host_lacks() {
    let saved = for_vcpu(&intel(), &config(Topology::flat(2).unwrap()), 0).unwrap();
    assert_eq!(missing(&saved, &intel(), &[]), []);
    let mut other = intel();
    find_mut(&mut other, 7, 0).unwrap().ebx &= !(1 << 16);
    find_mut(&mut other, 0x8000_0008, 0).unwrap().eax = 0x3027;
    let names: Vec<String> = missing(&saved, &other, &[])
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        names,
        [
            "AVX512F (CPUID 0x7.0x0:EBX[16])",
            "40 physical address bits (the host has 39)"
        ]
    );
}

#[test]
fn a_host_that_gives_features_which_it_does_not_list_does_not_lack_them() {
    let saved = for_vcpu(&intel(), &config(Topology::flat(1).unwrap()), 0).unwrap();
    let mut listed = intel();
    find_mut(&mut listed, 7, 0).unwrap().ebx = 0;
    assert_ne!(missing(&saved, &listed, &listed), []);
    assert_eq!(missing(&saved, &listed, &saved), []);
}

#[test]
fn arguments_that_the_host_or_the_topology_lack_are_refused() {
    let two = config(Topology::flat(2).unwrap());
    assert_eq!(
        for_vcpu(&intel(), &two, 2).unwrap_err(),
        CpuidError::Vcpu { vcpu: 2, vcpus: 2 }
    );
    for bits in [35, 47] {
        let config = Config {
            phys_bits: bits,
            ..two.clone()
        };
        assert_eq!(
            for_vcpu(&intel(), &config, 0).unwrap_err(),
            CpuidError::PhysBits { bits, host: 46 }
        );
    }
    assert!(
        for_vcpu(
            &[],
            &Config {
                phys_bits: 36,
                ..two
            },
            0
        )
        .is_ok()
    );
}

#[test]
fn profile_names_parse_back() {
    for profile in Profile::ALL {
        assert_eq!(profile.name().parse(), Ok(profile));
    }
    assert!("x86-64-v9".parse::<Profile>().is_err());
}
