//! Tests of the command line as users write it.

use std::{collections::BTreeSet, path::Path};

use vmm_config::{
    ConsoleMode, CpusConfig, DebugConsoleConfig, LandlockConfig, MemoryConfig, MemoryZoneConfig,
    NumaConfig, PciSegmentConfig, PlatformConfig, RateLimitGroupConfig, SerialConfig, VmConfig,
    syntax::{Key, PLACE, ValueType},
};

use super::*;

fn parse(line: &str) -> Cli {
    let arguments: Vec<&str> = line.split_whitespace().collect();
    Cli::from_arguments(&arguments).unwrap()
}

fn refused(line: &str) -> String {
    let arguments: Vec<&str> = line.split_whitespace().collect();
    Cli::from_arguments(&arguments).unwrap_err().to_string()
}

#[test]
fn the_description_of_the_command_line_is_consistent() {
    command("gantry".as_ref()).debug_assert();
}

#[test]
fn options_of_the_watching_program_are_passed_on() {
    let cli = parse("gantry top --socket /run/a --help");
    let Some(Command::Top(Deferred(top))) = cli.command else {
        panic!("{cli:?}");
    };
    assert_eq!(top.options, ["--socket", "/run/a", "--help"]);
}

#[test]
fn a_vm_is_described_as_for_cloud_hypervisor() {
    let cli = parse(
        "gantry --kernel /k --cmdline console=hvc0 --initramfs /i --cpus boot=2,max=4 \
         --memory size=0,shared=on --memory-zone id=a,size=1G id=b,size=1G \
         --disk path=/a,readonly=on path=/b --disk path=/c --net tap=t0,mac=52:54:00:12:34:56 \
         --rng src=/dev/random --balloon size=0 --pmem file=/p --vsock cid=3,socket=/v \
         --serial tty --console off --platform num_pci_segments=2 --watchdog \
         --pci-root-port id=one id=two --device path=/d,parent=two,pci_function=3 \
         --api-socket path=/s --no-shutdown --event-monitor path=/e --log-file /l --log-format json --metrics-socket /m.vm -vv --seccomp log --landlock \
         --landlock-rules path=/x,access=rw",
    );
    assert_eq!(cli.verbosity, 2);
    assert!(cli.no_shutdown);
    assert_eq!(cli.seccomp, Enforcement::Log);
    assert_eq!(cli.api_socket, Some(ApiSocket::Path("/s".into())));
    assert_eq!(cli.event_monitor, Some(EventTarget::Path("/e".into())));
    let config = cli.vm.into_config(None).unwrap().unwrap();
    assert_eq!(config.disks.as_ref().unwrap().len(), 3);
    assert_eq!(config.memory.zones.as_ref().unwrap().len(), 2);
    assert_eq!(config.pci_root_ports.as_ref().unwrap().len(), 2);
    let device = &config.devices.as_ref().unwrap()[0];
    assert_eq!(device.parent.as_deref(), Some("two"));
    assert_eq!(device.pci_function, 3);
    assert_eq!(config.cpus.max_vcpus, 4);
    assert!(config.watchdog && !config.pvpanic);
    assert_eq!(config.serial.mode, ConsoleMode::Tty);
    assert_eq!(config.payload.initramfs.as_deref(), Some(Path::new("/i")));
    assert!(config.landlock_enable);
}

#[test]
fn without_a_vm_there_is_a_socket_to_wait_on() {
    let cli = parse("gantry --api-socket fd=5 --event-monitor fd=6");
    assert_eq!(cli.api_socket, Some(ApiSocket::Fd(5)));
    assert!(!cli.is_idle());
    assert!(cli.vm.into_config(None).unwrap().is_none());
    assert!(parse("gantry -v").is_idle());
}

#[test]
fn a_vm_without_a_kernel_is_refused() {
    let error = parse("gantry --disk path=/d")
        .vm
        .into_config(None)
        .unwrap_err();
    assert!(error.to_string().contains("add --kernel or --firmware"));
    let firmware = parse("gantry --firmware /f").vm.into_config(None);
    let payload = firmware.unwrap().unwrap().payload;
    assert_eq!(payload.firmware.as_deref(), Some(Path::new("/f")));
    assert!(refused("gantry --firmware /f --kernel /k").contains("cannot be used with"));
    let error = parse("gantry --firmware /f --initramfs /i");
    assert!(matches!(
        error.vm.into_config(None),
        Err(VmArgsError::Invalid(_))
    ));
    let error = parse("gantry --kernel /k --vdpa path=/v");
    assert!(error.vm.into_config(None).is_err());
}

#[test]
fn a_serial_port_alone_has_the_terminal() {
    use ConsoleMode::{Null, Off, Tty};
    let modes = |line: &str| {
        let config = parse(line).vm.into_config(None).unwrap().unwrap();
        (config.serial.mode, config.console.mode)
    };
    assert_eq!(modes("gantry --kernel /k --serial tty"), (Tty, Off));
    let both = "gantry --kernel /k --serial tty --console null";
    assert_eq!(modes(both), (Tty, Null));
    assert_eq!(modes("gantry --kernel /k --serial null"), (Null, Tty));
}

#[test]
fn a_restored_vm_is_not_described_again() {
    for line in ["--cpus boot=2", "--landlock --disk path=/d"] {
        let mut cli = parse(&format!("gantry --restore /s {line}"));
        let error = cli.vm.into_config(cli.restore.as_mut()).unwrap_err();
        assert!(matches!(error, VmArgsError::Restored), "{error}");
    }
    let mut cli = parse("gantry --restore /s --api-socket /a");
    let restore = cli.restore.as_mut().unwrap();
    assert!(cli.vm.into_config(Some(restore)).unwrap().is_none());
    assert!(!restore.landlock_enable);
}

#[test]
fn a_restored_vm_is_restricted_as_the_command_line_says() {
    let mut cli =
        parse("gantry --restore /s --landlock --landlock-rules path=/a,access=r path=/b,access=rw");
    let restore = cli.restore.as_mut().unwrap();
    assert!(cli.vm.into_config(Some(restore)).unwrap().is_none());
    assert!(restore.landlock_enable);
    assert_eq!(restore.landlock_rules.as_ref().unwrap().len(), 2);
}

/// The keys that a help text mentions.
fn named(help: &str) -> BTreeSet<&str> {
    let words = help.split([',', ' ', ';', '|', '(', ')']);
    let keys = words.filter_map(|word| Some(word.split_once('=')?.0));
    keys.filter(|key| !is_place(key)).collect()
}

/// Keys that the help mentions once for all devices.
fn is_place(key: &str) -> bool {
    PLACE.iter().any(|place| place.name == key)
}

#[test]
fn help_names_the_keys_that_are_taken_and_no_others() {
    // Keys that are parsed but refused later.
    let refused_of = |option: &str| -> &[&str] {
        match option {
            "accel" => &["backend"],
            _ => &[],
        }
    };
    let devices = VmConfig::KINDS.iter();
    let devices = devices.map(|kind| (kind.option, kind.syntax, refused_of(kind.option)));
    let others: [(&str, &[&[Key]], &[&str]); 10] = [
        ("cpus", CpusConfig::SYNTAX, &["kvm_hyperv"]),
        ("memory", MemoryConfig::SYNTAX, &[]),
        ("memory-zone", MemoryZoneConfig::SYNTAX, &[]),
        ("serial", SerialConfig::SYNTAX, &[]),
        ("debug-console", DebugConsoleConfig::SYNTAX, &["null"]),
        ("numa", NumaConfig::SYNTAX, &[]),
        (
            "platform",
            PlatformConfig::SYNTAX,
            // The first two have the aliases serial_number and uuid.
            &["system_serial_number", "system_uuid", "tdx", "sev_snp"],
        ),
        (
            "pci-segment",
            PciSegmentConfig::SYNTAX,
            &["mmio32_aperture_weight", "mmio64_aperture_weight"],
        ),
        ("rate-limit-group", RateLimitGroupConfig::SYNTAX, &[]),
        ("landlock-rules", LandlockConfig::SYNTAX, &[]),
    ];
    let command = command("gantry".as_ref());
    for (option, syntax, refused) in devices.chain(others) {
        let completed = values::keys_of(option).unwrap_or_default();
        let names =
            |keys: &[&[Key]]| -> Vec<_> { keys.concat().iter().map(|key| key.name).collect() };
        assert_eq!(names(completed), names(syntax), "{option}");
        let mut options = command.get_arguments();
        let found = options
            .find(|found| found.get_long() == Some(option))
            .unwrap();
        let help = found.get_help().unwrap().to_string();
        // Only physical devices support an IOMMU.
        let refused = |key: &str| refused.contains(&key) || key == "iommu" && option != "device";
        let keys = || syntax.iter().copied().flatten();
        let taken = keys().filter(|key| !is_place(key.name) && !refused(key.name));
        let (words, keys): (Vec<&Key>, Vec<&Key>) =
            taken.partition(|key| matches!(key.kind, ValueType::Word(_)));
        let keys: BTreeSet<&str> = keys.iter().map(|key| key.name).collect();
        assert_eq!(named(&help), keys, "--{option}: {help}");
        for word in words {
            let mut parts = help.split([' ', '|', ',']);
            assert!(parts.any(|part| part == word.name), "--{option}: {help}");
        }
    }
}

#[test]
fn mistakes_are_explained() {
    let text = refused("gantry --kernel /k --disk pth=/d");
    assert!(
        text.contains("--disk") && text.contains("unknown key 'pth'"),
        "{text}"
    );
    assert!(refused("gantry --seccomp perhaps").contains("true, false, log"));
    assert!(refused("gantry --event-monitor /e").contains("path=FILE or fd=N"));
    assert!(refused("gantry --frobnicate").contains("--frobnicate"));
    assert!(refused("gantry --kernel /k --restore /s").contains("cannot be used with"));
}

#[test]
fn the_version_fits_the_name_that_the_program_is_called_by() {
    let own = format!("gantry v{}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(refused("gantry --version"), own);
    assert_eq!(refused("/usr/bin/gantry -V"), own);
    assert_eq!(
        refused("/usr/bin/cloud-hypervisor --version"),
        "cloud-hypervisor v54.0.0\n"
    );
}

#[test]
fn every_command_of_ctl_parses() {
    for line in [
        "list",
        "console",
        "console serial",
        "help",
        "help add-disk",
        "ping",
        "info",
        "counters",
        "metrics",
        "create",
        "create vm.json",
        "boot",
        "pause",
        "resume",
        "shutdown",
        "reboot",
        "power-button",
        "nmi",
        "delete",
        "shutdown-vmm",
        "resize --cpus 4 --memory 2G --balloon 0",
        "resize-disk --disk d --size 10G",
        "resize-zone --id z --size 1G",
        "add-disk path=/d,id=d",
        "add-net tap=t0",
        "add-device 0000:01:00.0,id=g",
        "swap-device g 01:00.1",
        "add-pmem file=/p",
        "add-accel socket=/a,window=64M,id=a",
        "add-gpu socket=/g,vram=64M,id=g",
        "add-vsock cid=3,socket=/v",
        "remove-device d",
        "snapshot /s",
        "restore source_url=file:///s,resume=on",
        "restore /s",
        "coredump file:///c",
    ] {
        let cli = parse(&format!("gantry ctl --socket /s {line}"));
        assert!(matches!(cli.command, Some(Command::Ctl(_))), "{line}");
        // Also when the socket is to be found automatically.
        parse(&format!("gantry ctl {line}"));
    }
    assert!(refused("gantry ctl --socket /s resize --memory many").contains("invalid size"));
}

#[test]
fn help_is_had_by_a_word_too() {
    assert!(help_of(["ctl"]).unwrap().contains("add-disk"));
    assert!(help_of(["ctl", "add-disk"]).unwrap().contains("readonly"));
    assert!(help_of([]).unwrap().contains("--help-all"));
    assert_eq!(help_of(["ctl", "dance"]).unwrap_err(), "dance");
    assert!(matches!(
        parse("gantry version").command,
        Some(Command::Version)
    ));
    assert!(matches!(
        parse("gantry help ctl info").command,
        Some(Command::Help { .. })
    ));
    assert!(parse("gantry --help-all").asks_for_all_help());
    assert!(refused("gantry --help-all --kernel /k").contains("cannot be used with"));
}

/// The output of a command about the program itself.
fn printed(line: &str) -> std::io::Result<String> {
    let Some(Command::Manual(wanted)) = parse(line).command else {
        panic!("{line} is another command");
    };
    let mut text = Vec::new();
    write_manual(&wanted, &mut text)?;
    Ok(String::from_utf8(text).unwrap())
}

#[test]
fn completions_and_the_manual_page_are_printed() {
    for shell in ["bash", "zsh", "fish"] {
        let script = printed(&format!("gantry completions {shell}")).unwrap();
        assert!(
            script.contains("api-socket") && script.contains("gantry values"),
            "{shell}"
        );
    }
    assert!(printed("gantry man").unwrap().contains("memory"));
}

#[test]
fn every_command_has_a_manual_page_in_a_folder() {
    let above = tempfile::tempdir().unwrap();
    let folder = above.path().join("man1");
    printed(&format!("gantry man {}", folder.display())).unwrap();
    for (page, part) in [
        ("gantry.1", "gantry\\-ctl"),
        ("gantry-doctor.1", "fix problems"),
        ("gantry-ctl.1", "API socket"),
        ("gantry-ctl-swap-device.1", "timeout"),
    ] {
        let text = std::fs::read_to_string(folder.join(page)).unwrap();
        assert!(text.contains(part), "{page}");
    }
    assert!(!folder.join("gantry-top.1").exists());
    let error = printed("gantry man /dev/null/man1").unwrap_err();
    assert!(error.to_string().contains("/dev/null/man1"), "{error}");
}

/// The arguments that microvm.nix passes, with its attributes in alphabetical order.
const MICROVM_NIX: &[&str] = &[
    "cloud-hypervisor",
    "--cpus",
    "boot=2",
    "--watchdog",
    "--kernel",
    "/nix/store/k-linux-dev/vmlinux",
    "--initramfs",
    "/nix/store/i-initrd/initrd",
    "--cmdline",
    "earlyprintk=ttyS0 console=ttyS0 reboot=t panic=-1 root=fstab loglevel=4",
    "--seccomp",
    "true",
    "--memory",
    "hotplug_method=virtio-mem,hotplug_size=512M,hotplugged_size=0M,mergeable=on,shared=off,size=512M",
    "--platform",
    "oem_strings=[io.systemd.credential:vmm.notify_socket=vsock-stream:2:8888]",
    "--console",
    "null",
    "--serial",
    "tty",
    "--vsock",
    "cid=3,socket=notify.vsock",
    "--balloon",
    "deflate_on_oom=on,free_page_reporting=on,size=0M",
    "--disk",
    "num_queues=2,path=/nix/store/s-store-disk.erofs,readonly=on",
    "direct=off,image_type=raw,num_queues=2,path=var.img,readonly=off,serial=var",
    "--api-socket",
    "vm.sock",
    "--net",
    "mac=02:00:00:00:00:01,num_queues=4,tap=vm-a",
    "fd=[5,6],mac=02:00:00:00:00:02,num_queues=4",
    "--device",
    "path=/sys/bus/pci/devices/0000:01:00.0",
];

#[test]
fn a_guest_of_microvm_nix_is_described_as_it_describes_it() {
    let cli = Cli::from_arguments(MICROVM_NIX).unwrap();
    assert_eq!(cli.api_socket, Some(ApiSocket::Path("vm.sock".into())));
    assert_eq!(cli.seccomp, Enforcement::Kill);
    let config = cli.vm.into_config(None).unwrap().unwrap();
    assert!(config.watchdog);
    let platform = config.platform.unwrap();
    assert_eq!(
        platform.oem_strings.unwrap(),
        ["io.systemd.credential:vmm.notify_socket=vsock-stream:2:8888"]
    );
    assert_eq!(config.disks.unwrap().len(), 2);
    assert_eq!(config.net.unwrap()[1].fds.len(), 2);
    assert_eq!(config.console.mode, ConsoleMode::Null);
    // Without anything to say, its value is empty.
    let mut arguments = MICROVM_NIX.to_vec();
    let at = arguments.iter().position(|word| *word == "--platform");
    arguments[at.unwrap() + 1] = "";
    let cli = Cli::from_arguments(&arguments).unwrap();
    cli.vm.into_config(None).unwrap().unwrap();
}

#[test]
fn a_vm_of_ubicloud_is_described_as_its_unit_describes_it() {
    let cli = parse(
        "cloud-hypervisor -v --api-socket path=/var/storage/vm1/ch-api.sock \
         --kernel /opt/fw/hypervisor-fw \
         --disk path=/var/storage/images/ubuntu.raw,readonly=on path=/vm/vm1/cloudinit.img \
         --console off --serial file=/vm/vm1/serial.log --cpus boot=4,topology=2:2:1:1 \
         --memory size=16G,hugepages=on,hugepage_size=1G \
         --device path=/sys/bus/pci/devices/0000:01:00.0/ \
         --net mac=02:00:00:00:00:01,tap=ncabc,ip=,mask=,num_queues=9",
    );
    let config = cli.vm.into_config(None).unwrap().unwrap();
    let net = &config.net.unwrap()[0];
    assert_eq!((net.num_queues, net.tap.as_deref()), (9, Some("ncabc")));
    assert_eq!(config.disks.unwrap().len(), 2);
    // Its other disks are served by another process.
    let cli = parse(
        "cloud-hypervisor --kernel /k --memory size=1G,shared=on \
         --disk vhost_user=true,socket=/var/storage/vm1/0/vhost.sock,num_queues=2,queue_size=64",
    );
    let config = cli.vm.into_config(None).unwrap().unwrap();
    let disk = &config.disks.unwrap()[0];
    assert_eq!((disk.vhost_user, disk.num_queues), (true, 2));
}
