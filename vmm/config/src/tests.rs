//! Tests of the configuration in the forms that clients and users write.

use std::path::Path;

use serde_json::{Value, json};

use super::*;

fn minimal() -> VmConfig {
    serde_json::from_value(json!({"payload": {"kernel": "/k"}})).unwrap()
}

#[track_caller]
fn assert_invalid(change: impl FnOnce(&mut VmConfig), message: &str) {
    let mut config = minimal();
    change(&mut config);
    let error = config.validate().unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

#[test]
fn a_kernel_is_all_that_a_machine_needs() {
    let config = minimal();
    assert_eq!(config.validate(), Ok(()));
    assert_eq!(config.memory.size, 512 << 20);
    assert_eq!(config.cpus.max_vcpus, 1);
    assert_eq!(config.serial.mode, ConsoleMode::Null);
    assert_eq!(config.console.mode, ConsoleMode::Tty);
    assert_eq!(config.rng.src, Path::new("/dev/urandom"));
}

#[test]
fn the_machine_that_kata_asks_for_is_accepted() {
    let config: VmConfig = serde_json::from_value(json!({
        "payload": {"kernel": "/k", "cmdline": "root=/dev/pmem0p1", "initramfs": "/i"},
        "platform": {"num_pci_segments": 2},
        "memory": {"size": 2_147_483_648_u64, "shared": true, "hugepages": false,
                   "hotplug_size": 4_294_967_296_u64},
        "cpus": {"boot_vcpus": 1, "max_vcpus": 4,
                 "topology": {"threads_per_core": 1, "cores_per_die": 4,
                              "dies_per_package": 1, "packages": 1}},
        "rng": {"src": "/dev/urandom"},
        "disks": [{"path": "/d", "readonly": true, "image_type": "Raw"}],
        "serial": {"mode": "Off"}, "console": {"mode": "Off"},
        "vsock": {"cid": 3, "socket": "/s"},
    }))
    .unwrap();
    assert_eq!(config.validate(), Ok(()));
}

#[test]
fn a_configuration_survives_the_way_to_json_and_back() {
    let mut config = minimal();
    config.cpus = CpusConfig::parse("boot=2,max=4,topology=2:2:1:1,affinity=[0@[1,2]]").unwrap();
    config.memory = MemoryConfig::parse("size=0").unwrap();
    config.memory.zones = Some(vec![MemoryZoneConfig::parse("id=z,size=1G").unwrap()]);
    config.disks = Some(vec![
        DiskConfig::parse("path=/d,ops_size=1,ops_refill_time=2").unwrap(),
    ]);
    config.net = Some(vec![NetConfig::parse("tap=t0,ip=10.0.0.1").unwrap()]);
    config.balloon = Some(BalloonConfig::parse("size=1G").unwrap());
    config.pmem = Some(vec![PmemConfig::parse("file=/p,size=2M").unwrap()]);
    config.numa = Some(vec![
        NumaConfig::parse("guest_numa_id=0,cpus=[0-3],memory_zones=[z],distances=[0@10]").unwrap(),
    ]);
    assert_eq!(config.validate(), Ok(()));
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<VmConfig>(&text).unwrap(), config);
}

#[test]
fn devices_of_other_processes_need_shared_memory() {
    let mut config: VmConfig = serde_json::from_value(json!({
        "payload": {"kernel": "/k"},
        "user_devices": [{"socket": "/s"}],
    }))
    .unwrap();
    let error = config.validate().unwrap_err().to_string();
    assert!(error.contains("user_devices[0].socket"), "{error}");
    assert!(error.contains("--memory shared=on"), "{error}");
    config.memory.shared = true;
    assert_eq!(config.validate(), Ok(()));
    let zone = MemoryZoneConfig::parse("id=z,size=2M,shared=on").unwrap();
    config.memory.size = 0;
    config.memory.zones = Some(vec![zone]);
    assert!(config.memory.is_shared());
    config.memory.zones.as_mut().unwrap()[0].shared = false;
    assert!(!config.memory.is_shared());
}

#[test]
fn what_gantry_does_not_do_is_refused_by_name() {
    let cases: &[(Value, &str)] = &[
        (json!({"vdpa": [{"path": "/v"}]}), "vdpa: not supported"),
        (
            json!({"generic_vhost_user": [{"socket": "/s", "queue_sizes": [1], "device_type": 1}]}),
            "generic_vhost_user: not supported",
        ),
        (json!({"tpm": {"socket": "/s"}}), "tpm: not supported"),
        (json!({"rtc": {}}), "rtc: not supported"),
        (json!({"iommu": true}), "iommu: not supported"),
        (
            json!({"payload": {"igvm": "/f"}}),
            "payload.igvm: not supported",
        ),
        (
            json!({"platform": {"tdx": true}}),
            "platform.tdx: not supported",
        ),
        (
            json!({"platform": {"sev_snp": true}}),
            "platform.sev_snp: not supported",
        ),
        (
            json!({"disks": [{"path": "/d", "iommu": true}]}),
            "disks[0].iommu: not supported",
        ),
        (
            json!({"disks": [{"path": "/d", "image_type": "Vhdx"}]}),
            "disks[0].image_type: not",
        ),
        (
            json!({"net": [{"vhost_user": true, "vhost_socket": "/s", "vhost_mode": "Server"}]}),
            "net[0].vhost_mode: not supported",
        ),
        (
            json!({"cpus": {"boot_vcpus": 1, "max_vcpus": 1, "kvm_hyperv": true}}),
            "cpus.kvm_hyperv",
        ),
        (
            json!({"pci_segments": [{"pci_segment": 0, "mmio32_aperture_weight": 2}]}),
            "pci_segments[0].mmio32_aperture_weight: not supported",
        ),
        (
            json!({"pci_segments": [{"pci_segment": 0, "mmio64_aperture_weight": 0}]}),
            "pci_segments[0].mmio64_aperture_weight: not supported",
        ),
    ];
    for (change, message) in cases {
        let mut body = json!({"payload": {"kernel": "/k"}});
        for (field, value) in change.as_object().unwrap() {
            body[field] = value.clone();
        }
        let config: VmConfig = serde_json::from_value(body).unwrap();
        let error = config.validate().unwrap_err().to_string();
        assert!(error.contains(message), "{change}: {error}");
    }
}

#[test]
fn a_segment_behind_the_virtual_iommu_can_be_named_by_its_device_alone() {
    let mut config = minimal();
    let device = |text: &str| DeviceConfig::parse(text).unwrap();
    config.devices = Some(vec![
        device("path=/a,iommu_segment=2"),
        device("path=/b,iommu=on"),
        device("path=/c"),
        device("path=/d,pci_segment=1,iommu=on"),
        device("path=/e,pci_segment=2"),
    ]);
    config.normalize();
    assert_eq!(config.validate(), Ok(()));
    assert_eq!(config.iommu_segments(), [2]);
    assert_eq!(config.platform.as_ref().unwrap().num_pci_segments, 3);
    let places: Vec<_> = config.devices.iter().flatten().collect();
    let places = places
        .iter()
        .map(|device| (device.common.pci_segment, device.iommu));
    // The machine refuses the fourth, because that segment has no virtual IOMMU.
    let expected = [(2, true), (2, true), (0, false), (1, true), (2, false)];
    assert_eq!(places.collect::<Vec<_>>(), expected);
    let normalized = config.clone();
    config.normalize();
    assert_eq!(config, normalized);
    // In a running machine, a segment can be named that is not behind the virtual IOMMU.
    let mut late = device("path=/f,iommu_segment=0");
    late.normalize_segment(&[2]);
    assert_eq!((late.common.pci_segment, late.iommu), (0, true));
    config.devices = Some(vec![device("path=/a,iommu_segment=96")]);
    config.normalize();
    let error = config.validate().unwrap_err().to_string();
    assert!(error.contains("num_pci_segments: 97 is not"), "{error}");
}

#[test]
fn what_makes_no_virtual_iommu_is_named() {
    let platform = |text: &str| Some(PlatformConfig::parse(text).unwrap());
    let device = |text: &str| Some(vec![DeviceConfig::parse(text).unwrap()]);
    assert_invalid(
        |c| c.platform = platform("iommu_segments=[1]"),
        "platform.iommu_segments[0]: 1 is not between 0 and 0",
    );
    assert_invalid(
        |c| c.platform = platform("num_pci_segments=2,iommu_segments=[1,1]"),
        "iommu_segments[1]: segment 1 is already taken",
    );
    assert_invalid(
        |c| c.platform = platform("iommu_address_width=24"),
        "iommu_address_width_bits: 24 is not between 32 and 64",
    );
    assert_invalid(
        |c| c.devices = device("path=/a,pci_segment=2,iommu_segment=1"),
        "devices[0].iommu_segment: cannot go together",
    );
    assert_invalid(
        |c| c.devices = device("path=/a,parent=p,iommu=on"),
        "devices[0].parent: cannot go together",
    );
    assert_invalid(
        |c| {
            c.platform = platform("iommu_segments=[0]");
            c.memory.hotplug_method = HotplugMethod::VirtioMem;
        },
        "platform.iommu_segments: cannot go together with virtio-mem",
    );
}

#[test]
fn numbers_out_of_range_are_named_with_their_range() {
    assert_invalid(
        |c| c.cpus.boot_vcpus = 0,
        "cpus.boot_vcpus: 0 is not between 1 and 255",
    );
    assert_invalid(
        |c| c.cpus.max_vcpus = 256,
        "cpus.max_vcpus: 256 is not between 1 and 255",
    );
    assert_invalid(
        |c| c.cpus.profile = "z80".into(),
        "cpus.profile: 'z80' is not a CPU profile",
    );
    assert_invalid(|c| c.memory.size = 0, "memory.size: 0 is not more than 0");
    assert_invalid(
        |c| c.memory.size = (1 << 30) + 1,
        "memory.size: 1073741825 is not a multiple",
    );
    assert_invalid(|c| c.memory.size = u64::MAX - (2 << 20) + 1, "fits 64 TiB");
    assert_invalid(
        |c| c.memory.hotplugged_size = Some(4),
        "memory.hotplugged_size",
    );
    assert_invalid(
        |c| {
            c.memory.hotplug_size = Some(1 << 30);
            c.memory.hotplugged_size = Some((2 << 20) + 1);
        },
        "memory.hotplugged_size: 2097153 is not a multiple",
    );
    assert_invalid(
        |c| {
            c.memory.size = 512 << 20;
            c.balloon = Some(BalloonConfig::parse("size=513M").unwrap());
        },
        "balloon.size: 537919488 is not between 0 and 536870912",
    );
    assert_invalid(
        |c| c.memory.hugepage_size = Some(2 << 20),
        "switch hugepages on",
    );
    assert_invalid(
        |c| c.disks = Some(vec![DiskConfig::parse("path=/d,queue_size=100").unwrap()]),
        "disks[0].queue_size: 100 is not a power of two",
    );
    assert_invalid(
        |c| c.net = Some(vec![NetConfig::parse("num_queues=1").unwrap()]),
        "net[0].num_queues: 1 is not between 2 and 256",
    );
    assert_invalid(
        |c| c.vsock = Some(VsockConfig::parse("cid=2,socket=/s").unwrap()),
        "vsock.cid: 2 is not between 3 and",
    );
    assert_invalid(|c| c.payload.kernel = None, "payload.kernel: is missing");
    assert_invalid(
        |c| c.payload.firmware = Some("/f".into()),
        "payload.firmware: cannot go together with a kernel",
    );
    let firmware = |c: &mut VmConfig| {
        c.payload.kernel = None;
        c.payload.firmware = Some("/f".into());
    };
    assert_invalid(
        |c| {
            firmware(c);
            c.payload.initramfs = Some("/i".into());
        },
        "payload.firmware: cannot go together with an initramfs",
    );
    assert_invalid(
        |c| {
            firmware(c);
            c.accel_server = serde_json::from_value(json!({"socket": "/s"})).unwrap();
        },
        "payload.firmware: cannot go together with accel_server",
    );
    let mut valid = minimal();
    firmware(&mut valid);
    valid.payload.cmdline = Some("quiet".to_owned());
    valid.validate().unwrap();
    assert_invalid(
        |c| c.console.mode = ConsoleMode::File,
        "console.file: is missing",
    );
}

#[test]
fn devices_do_not_share_a_name_or_a_slot() {
    assert_invalid(
        |c| {
            c.disks = Some(vec![DiskConfig::parse("path=/d,id=x").unwrap()]);
            c.net = Some(vec![NetConfig::parse("id=x").unwrap()]);
        },
        "net[0].id: 'x' is already taken by disks[0]",
    );
    assert_invalid(
        |c| {
            c.rng.common.pci_device_id = Some(4);
            c.pmem = Some(vec![PmemConfig::parse("file=/p,pci_device_id=4").unwrap()]);
        },
        "pmem[0].pci_device_id: slot 4 of segment 0 is already taken by rng",
    );
    assert_invalid(
        |c| c.rng.common.pci_segment = 1,
        "rng.pci_segment: 1 is not between 0 and 0",
    );
    assert_invalid(
        |c| c.rng.common.pci_device_id = Some(32),
        "rng.pci_device_id",
    );
    assert_invalid(
        |c| c.rng.common.id = Some("__x".into()),
        "rng.id: '__x' is not a device name",
    );
}

#[test]
fn functions_and_root_ports_have_their_places() {
    fn with(ports: &[&str], devices: &[&str]) -> impl Fn(&mut VmConfig) {
        let ports = ports.iter().map(|text| PciRootPortConfig::parse(text));
        let ports: Vec<_> = ports.collect::<Result<_, _>>().unwrap();
        let devices = devices
            .iter()
            .map(|text| DeviceConfig::parse(&format!("path=/d,{text}")));
        let devices: Vec<_> = devices.collect::<Result<_, _>>().unwrap();
        move |config| {
            config.pci_root_ports = Some(ports.clone());
            config.devices = Some(devices.clone());
        }
    }
    let mut config = minimal();
    let devices = ["parent=a", "parent=a,pci_function=1", "pci_device_id=4"];
    with(&["id=a", "id=b,pci_device_id=9"], &devices)(&mut config);
    assert_eq!(config.validate(), Ok(()));
    assert_eq!(config.root_ports(), [2]);
    for (ports, devices, message) in [
        (
            &[][..],
            &["parent=a"][..],
            "devices[0].parent: there is no PCI root port 'a'",
        ),
        (
            &["id=a"],
            &["parent=a", "parent=a"],
            "function 0 behind 'a' is already taken",
        ),
        (
            &["id=a"],
            &["parent=a,pci_device_id=1"],
            "pci_device_id: 1 is not between 0 and 0",
        ),
        (
            &["id=a"],
            &["pci_function=1"],
            "pci_device_id: is missing; say which slot",
        ),
        (
            &["id=a"],
            &["pci_device_id=4,pci_function=8"],
            "8 is not between 0 and 7",
        ),
        (
            &["id=a,pci_device_id=4"],
            &["pci_device_id=4"],
            "devices[0].pci_device_id: slot 4 of segment 0 is already taken by pci_root_ports[0]",
        ),
        (
            &[],
            &[
                "pci_device_id=4,pci_function=2",
                "pci_device_id=4,pci_function=2",
            ],
            "devices[1].pci_function: function 2 of slot 4",
        ),
        (
            &["id=a,pci_segment=1"],
            &[],
            "pci_root_ports[0].pci_segment: 1 is not between 0 and 0",
        ),
    ] {
        assert_invalid(with(ports, devices), message);
    }
    let many: Vec<_> = (0..32).map(|number| format!("id=port{number}")).collect();
    let many: Vec<_> = many.iter().map(String::as_str).collect();
    assert_invalid(
        with(&many, &[]),
        "pci_root_ports: 32 is not between 0 and 31",
    );
    assert!(
        PciRootPortConfig::parse("pci_device_id=3").is_err(),
        "it has no name"
    );
}

#[test]
fn references_lead_somewhere() {
    assert_invalid(
        |c| {
            c.disks = Some(vec![
                DiskConfig::parse("path=/d,rate_limit_group=g").unwrap(),
            ]);
        },
        "disks[0].rate_limit_group: there is no rate limit group 'g'",
    );
    assert_invalid(
        |c| {
            c.numa = Some(vec![
                NumaConfig::parse("guest_numa_id=0,memory_zones=[z]").unwrap(),
            ]);
        },
        "numa[0].memory_zones[0]: there is no memory zone 'z'",
    );
    assert_invalid(
        |c| {
            c.numa = Some(vec![
                NumaConfig::parse("guest_numa_id=0,distances=[7@20]").unwrap(),
            ]);
        },
        "numa[0].distances[0].destination: there is no NUMA node '7'",
    );
    for (numbers, message) in [
        ([0, 2], "numa[1].guest_numa_id: 2 is not between 0 and 1"),
        (
            [1, 1],
            "numa[0].guest_numa_id: number 1 is already taken by another node",
        ),
    ] {
        let node = |number| NumaConfig::parse(&format!("guest_numa_id={number}")).unwrap();
        assert_invalid(|c| c.numa = Some(numbers.map(node).into()), message);
    }
    assert_invalid(
        |c| c.numa = Some(vec![NumaConfig::parse("guest_numa_id=0,cpus=[1]").unwrap()]),
        "numa[0].cpus[0]: 1 is not between 0 and 0",
    );
}

#[test]
fn a_vcpu_or_a_memory_zone_is_in_one_numa_node() {
    let two = |part: &str| {
        let node = |id| NumaConfig::parse(&format!("guest_numa_id={id},{part}")).unwrap();
        Some(vec![node(0), node(1)])
    };
    assert_invalid(
        |c| c.numa = two("cpus=[0]"),
        "numa[0].cpus[0]: vCPU 0 is already taken by NUMA node 1",
    );
    assert_invalid(
        |c| {
            c.memory.size = 0;
            c.memory.zones = Some(vec![MemoryZoneConfig::parse("id=z,size=1G").unwrap()]);
            c.numa = two("memory_zones=[z]");
        },
        "numa[0].memory_zones[0]: memory zone 'z' is already taken by NUMA node 1",
    );
    assert_invalid(
        |c| c.numa = two("pci_segments=[0]"),
        "numa[0].pci_segments[0]: PCI segment 0 is already taken by NUMA node 1",
    );
    assert_invalid(
        |c| c.numa = two("pci_segments=[1]"),
        "numa[0].pci_segments[0]: 1 is not between 0 and 0",
    );
}

#[test]
fn a_numa_node_may_name_a_device_until_that_is_removed() {
    let node = "guest_numa_id=0,device_id=d";
    let numa = || Some(vec![NumaConfig::parse(node).unwrap()]);
    assert_invalid(
        |c| c.numa = numa(),
        "numa[0].device_id: there is no device 'd'",
    );
    let mut config: VmConfig = serde_json::from_value(json!({
        "payload": {"kernel": "/k"},
        "disks": [{"path": "/d", "id": "d"}],
    }))
    .unwrap();
    config.numa = numa();
    assert_eq!(config.validate(), Ok(()));
    // A swap brings another one of this name.
    assert!(config.take_device("d"));
    assert_eq!(config.numa, numa());
    config.forget("d");
    assert_eq!(config.validate(), Ok(()));
}

#[test]
fn addresses_are_checked() {
    let net = |text: &str| NetConfig::parse(text).unwrap().validate();
    assert_eq!(
        net("mac=52:54:00:12:34:56,ip=10.0.0.1,mask=255.0.0.0"),
        Ok(())
    );
    assert_eq!(net("ip=fd00::1,mask=ffff::"), Ok(()));
    for bad in [
        "mac=01:00:5e:00:00:01",
        "mac=52:54:00:12:34",
        "mac=0:0:0:0:0:0",
        "mac=+1:2:3:4:5:6",
    ] {
        assert!(net(bad).unwrap_err().to_string().contains("MAC"), "{bad}");
    }
    assert!(net("ip=fd00::1,mask=255.0.0.0").is_err());
    assert!(net("tap=a-name-that-is-too-long").is_err());
    assert!(NetConfig::parse("ip=10.0.0").is_err());
}

#[test]
fn an_odd_queue_of_a_network_card_is_its_control_queue() {
    for (text, queues) in [
        ("num_queues=2", 2),
        ("num_queues=3", 2),
        ("num_queues=17", 16),
    ] {
        let config = NetConfig::parse(text).unwrap();
        assert_eq!(config.validate(), Ok(()));
        assert_eq!(config.queues_in_pairs(), queues);
        // `vm.info` returns what was given.
        let written = serde_json::to_value(&config).unwrap();
        assert_eq!(
            serde_json::from_value::<NetConfig>(written).unwrap(),
            config
        );
    }
    assert!(
        NetConfig::parse("fd=3,num_queues=3")
            .unwrap()
            .validate()
            .is_err()
    );
}

#[test]
fn taps_can_be_inherited() {
    let config = NetConfig::parse("fd=[3,4],mac=52:54:00:12:34:56").unwrap();
    assert_eq!(config.fds, [3, 4].map(Descriptor::Inherited));
    assert_eq!(config.num_queues, 4);
    assert_eq!(config.validate(), Ok(()));
    assert!(
        NetConfig::parse("fd=3,num_queues=4")
            .unwrap()
            .validate()
            .is_err()
    );
    assert!(NetConfig::parse("fd=3,tap=t").unwrap().validate().is_err());
}

#[test]
fn consoles_go_where_they_are_told() {
    let console = ConsoleConfig::parse("file=/tmp/c,id=con").unwrap();
    assert_eq!(console.mode, ConsoleMode::File);
    assert_eq!(console.file.as_deref(), Some(Path::new("/tmp/c")));
    assert_eq!(console.common.id.as_deref(), Some("con"));
    for (text, mode) in [
        ("off", ConsoleMode::Off),
        ("null", ConsoleMode::Null),
        ("tty", ConsoleMode::Tty),
        ("pty", ConsoleMode::Pty),
        ("socket=/s", ConsoleMode::Socket),
    ] {
        assert_eq!(SerialConfig::parse(text).unwrap().mode, mode);
    }
    for bad in ["", "tty,pty", "off,file=/f", "file=", "loud"] {
        assert!(SerialConfig::parse(bad).is_err(), "{bad:?}");
    }
    let debug = DebugConsoleConfig::parse("tty,iobase=0x402").unwrap();
    assert_eq!(debug.iobase, Some(0x402));
}

#[test]
fn short_forms_name_what_matters_most() {
    assert_eq!(CpusConfig::parse("4").unwrap().max_vcpus, 4);
    assert_eq!(CpusConfig::parse("boot=2").unwrap().max_vcpus, 2);
    assert_eq!(MemoryConfig::parse("1G").unwrap().size, 1 << 30);
    assert_eq!(
        DiskConfig::parse("/d").unwrap().path.as_deref(),
        Some(Path::new("/d"))
    );
    assert_eq!(RngConfig::parse("").unwrap(), RngConfig::default());
}

#[test]
fn every_option_of_the_command_line_parses() {
    let memory = MemoryConfig::parse(
        "size=1G,hotplug_size=2G,hotplugged_size=1G,mergeable=on,hotplug_method=virtio-mem,\
         shared=on,hugepages=on,hugepage_size=2M,prefault=on,reserve=on,thp=off",
    )
    .unwrap();
    assert_eq!(memory.hotplug_method, HotplugMethod::VirtioMem);
    assert!(!memory.thp && memory.shared && memory.hugepages && memory.prefault);
    assert_eq!(memory.validate(), Ok(()));
    let cpus = CpusConfig::parse(
        "boot=1,max=2,max_phys_bits=46,nested=off,features=[amx],core_scheduling=off,\
         profile=x86-64-v3",
    )
    .unwrap();
    assert!(cpus.features.amx && !cpus.nested);
    assert_eq!(cpus.core_scheduling, CoreScheduling::Off);
    let disk = DiskConfig::parse(
        "path=/d,readonly=on,direct=on,num_queues=4,queue_size=256,serial=s,backing_files=on,\
         sparse=off,image_type=qcow2,lock_granularity=full,queue_affinity=[0@[1,2]],\
         bw_size=1M,bw_one_time_burst=2M,bw_refill_time=100,id=d,pci_segment=0,pci_device_id=5",
    )
    .unwrap();
    assert_eq!(disk.validate(), Ok(()));
    assert_eq!(disk.image_type, ImageType::Qcow2);
    let limits = disk.rate_limiter_config.unwrap().bandwidth.unwrap();
    assert_eq!(
        (limits.size, limits.one_time_burst),
        (1 << 20, Some(2 << 20))
    );
    let platform = PlatformConfig::parse(
        "num_pci_segments=2,serial_number=s,uuid=123e4567-e89b-12d3-a456-426614174000,\
         oem_strings=[a,b],system_manufacturer=m,vfio_p2p_dma=off",
    )
    .unwrap();
    assert_eq!(platform.validate(), Ok(()));
    assert_eq!(platform.system_serial_number.as_deref(), Some("s"));
    assert_eq!(platform.oem_strings.unwrap(), ["a", "b"]);
    let balloon = BalloonConfig::parse("size=1G,deflate_on_oom=on,free_page_reporting=on");
    assert!(balloon.unwrap().free_page_reporting);
    let group = RateLimitGroupConfig::parse("id=g,ops_size=1,ops_refill_time=1").unwrap();
    assert!(group.rate_limiter_config.ops.is_some());
    assert!(PciSegmentConfig::parse("pci_segment=1,mmio32_aperture_weight=2").is_ok());
    assert!(
        LandlockConfig::parse("path=/p,access=rw")
            .unwrap()
            .validate()
            .is_ok()
    );
    assert!(
        LandlockConfig::parse("path=/p,access=x")
            .unwrap()
            .validate()
            .is_err()
    );
    assert!(DeviceConfig::parse("path=/sys/d,iommu=on,x_exclude_mmap_bars=[0,1]").is_ok());
    assert_eq!(
        UserDeviceConfig::parse("socket=/s,id=a,pci_segment=1").unwrap(),
        UserDeviceConfig {
            socket: "/s".into(),
            common: CommonConfig {
                pci_segment: 1,
                ..CommonConfig::named("a")
            },
            ..Default::default()
        }
    );
    assert!(UserDeviceConfig::parse("id=a").is_err());
    assert_eq!(FsConfig::parse("tag=t,socket=/s").unwrap().queue_size, 1024);
    assert!(GenericVhostUserConfig::parse("socket=/s,virtio_id=26,queue_sizes=[64]").is_ok());
    assert_eq!(VdpaConfig::parse("path=/v").unwrap().num_queues, 1);
    assert!(TpmConfig::parse("socket=/s").is_ok());
    assert!(RtcConfig::parse("").is_ok());
    assert!(DiskConfig::parse("path=/d,num_queues=70000").is_err());
    assert!(
        PmemConfig::parse("size=2M")
            .unwrap_err()
            .to_string()
            .contains("file= is missing")
    );
}

#[test]
fn a_removed_device_leaves_the_configuration() {
    let mut config = minimal();
    for id in ["a", "b"] {
        config.put_device(Box::new(DiskConfig {
            common: CommonConfig::named(id),
            ..Default::default()
        }));
    }
    config.put_device(Box::new(BalloonConfig {
        common: CommonConfig::named("c"),
        ..Default::default()
    }));
    assert!(config.has_device("a") && config.has_device("c") && !config.has_device("d"));
    assert!(config.take_device("a"));
    assert!(!config.take_device("a"));
    assert!(config.take_device("b"));
    assert_eq!(config.disks, None);
    // A running guest cannot lose its balloon.
    assert!(!config.take_device("c"));
    assert!(config.has_device("c"));
}

#[test]
fn persistent_memory_does_not_move() {
    for text in ["file=/p", "file=/p,discard_writes=on"] {
        let pmem = PmemConfig::parse(text).unwrap();
        assert_eq!(pmem.cannot_move(), Some("persistent memory"), "{text}");
    }
}
