//! The command line as users write it.

use std::path::Path;

use super::*;
use crate::config::ConsoleMode;

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
fn a_vm_is_described_as_for_cloud_hypervisor() {
    let cli = parse(
        "gantry --kernel /k --cmdline console=hvc0 --initramfs /i --cpus boot=2,max=4 \
         --memory size=0,shared=on --memory-zone id=a,size=1G id=b,size=1G \
         --disk path=/a,readonly=on path=/b --disk path=/c --net tap=t0,mac=52:54:00:12:34:56 \
         --rng src=/dev/random --balloon size=0 --pmem file=/p --vsock cid=3,socket=/v \
         --serial tty --console off --platform num_pci_segments=2 --watchdog \
         --pci-root-port id=one id=two --device path=/d,parent=two,pci_function=3 \
         --api-socket path=/s --event-monitor path=/e --log-file /l -vv --seccomp log --landlock \
         --landlock-rules path=/x,access=rw",
    );
    assert_eq!(cli.verbosity, 2);
    assert_eq!(cli.seccomp, Enforcement::Log);
    assert_eq!(cli.api_socket, Some(ApiSocket::Path("/s".into())));
    assert_eq!(cli.event_monitor, Some(EventTarget::Path("/e".into())));
    let mut vm = cli.vm;
    assert!(vm.watchdog);
    vm.watchdog = false;
    let config = vm.into_config().unwrap().unwrap();
    assert_eq!(config.disks.as_ref().unwrap().len(), 3);
    assert_eq!(config.memory.zones.as_ref().unwrap().len(), 2);
    assert_eq!(config.pci_root_ports.as_ref().unwrap().len(), 2);
    let device = &config.devices.as_ref().unwrap()[0];
    assert_eq!(device.parent.as_deref(), Some("two"));
    assert_eq!(device.pci_function, 3);
    assert_eq!(config.cpus.max_vcpus, 4);
    assert_eq!(config.serial.mode, ConsoleMode::Tty);
    assert_eq!(config.payload.initramfs.as_deref(), Some(Path::new("/i")));
    assert!(config.landlock_enable);
}

#[test]
fn without_a_vm_there_is_a_socket_to_wait_on() {
    let cli = parse("gantry --api-socket fd=5 --event-monitor fd=6");
    assert_eq!(cli.api_socket, Some(ApiSocket::Fd(5)));
    assert!(!cli.is_idle());
    assert!(cli.vm.into_config().unwrap().is_none());
    assert!(parse("gantry -v").is_idle());
}

#[test]
fn a_vm_without_a_kernel_is_refused() {
    let error = parse("gantry --disk path=/d").vm.into_config().unwrap_err();
    assert!(error.to_string().contains("add --kernel"));
    let error = parse("gantry --firmware /f").vm.into_config().unwrap_err();
    assert!(matches!(error, VmArgsError::Invalid(_)));
    let error = parse("gantry --kernel /k --fs tag=t,socket=/s");
    assert!(error.vm.into_config().is_err());
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
    assert!(refused("gantry ctl ping").contains("--socket"));
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
        "add-pmem file=/p",
        "add-accel socket=/a,window=64M,id=a",
        "add-vsock cid=3,socket=/v",
        "remove-device d",
        "snapshot /s",
        "restore source_url=file:///s,resume=on",
        "restore /s",
        "coredump file:///c",
    ] {
        let cli = parse(&format!("gantry ctl --socket /s {line}"));
        assert!(matches!(cli.command, Some(Command::Ctl(_))), "{line}");
    }
    assert!(refused("gantry ctl --socket /s resize --memory many").contains("no size"));
}

#[test]
fn completions_and_manual_page_can_be_generated() {
    for shell in [
        clap_complete::Shell::Bash,
        clap_complete::Shell::Zsh,
        clap_complete::Shell::Fish,
    ] {
        let mut text = Vec::new();
        let mut command = command("gantry".as_ref());
        clap_complete::generate(shell, &mut command, "gantry", &mut text);
        assert!(String::from_utf8(text).unwrap().contains("api-socket"));
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command("gantry".as_ref()))
        .render(&mut page)
        .unwrap();
    assert!(String::from_utf8(page).unwrap().contains("memory"));
}
