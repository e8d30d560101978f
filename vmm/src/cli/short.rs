//! `gantry --help`: explains what a first VM needs. `--help-all`, the manual page and shell completions explain all
//! options.

use clap::Command;

/// The options that are explained, with short texts.
const SHOWN: &[(&str, &str)] = &[
    ("kernel", "Linux kernel to boot"),
    ("firmware", "Firmware that boots the system on a disk"),
    ("initramfs", "Initial file system"),
    ("cmdline", "Kernel command line"),
    ("cpus", "Virtual processors: boot=N"),
    ("memory", "Memory: size=SIZE, such as size=2G"),
    ("disk", "Disks: path=FILE,readonly=on|off"),
    ("net", "Network cards: tap=NAME,mac=MAC"),
    ("serial", "Serial port: off|pty|tty|file=PATH|socket=PATH"),
    (
        "console",
        "Virtio console: off|pty|tty|file=PATH|socket=PATH",
    ),
    ("device", "Physical devices, such as 0000:01:00.0"),
    (
        "accel",
        "Accelerators that gantry-accel serves: socket=PATH,weight=N|idle",
    ),
    (
        "gpu",
        "Virtual GPUs that gantry-gpu serves: socket=PATH,vram=SIZE",
    ),
    ("vsock", "Sockets between guest and host: cid=N,socket=PATH"),
    ("api_socket", "Unix socket to serve the REST API on"),
    ("restore", "Bring back a saved VM: source_url=URL,resume=on"),
    ("verbosity", "Log more; can be repeated"),
    ("help_all", "Explain all options, and all keys of these"),
];

/// The command line with most options hidden from its help.
pub fn of(command: Command) -> Command {
    command.mut_args(|argument| {
        let shown = SHOWN.iter().find(|(name, _)| argument.get_id() == *name);
        match shown {
            Some((_, help)) => argument.help(*help).long_help(*help),
            None => argument.hide(true),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::{super::command, *};

    #[test]
    fn help_is_short_and_names_options_that_there_are() {
        let whole = command("gantry".as_ref());
        for (name, _) in SHOWN {
            let mut arguments = whole.get_arguments();
            assert!(
                arguments.any(|argument| argument.get_id() == *name),
                "{name}"
            );
        }
        let text = of(whole).render_long_help().to_string();
        assert!(text.lines().count() < 110, "{}", text.lines().count());
        assert!(text.contains("--help-all"));
        for hidden in ["--watchdog", "--pvpanic", "--numa"] {
            assert!(!text.contains(hidden), "{hidden}");
        }
    }

    #[test]
    fn all_options_are_explained_where_all_are_asked_for() {
        let text = super::super::help_all();
        let (living, refused) = text.split_once(super::super::vm::UNSUPPORTED).unwrap();
        for name in ["--generic-vhost-user", "--vdpa", "--tpm", "--rtc"] {
            assert!(
                refused.contains(name) && !living.contains(&format!("{name} ")),
                "{name}"
            );
        }
        for name in ["--firmware", "--fs", "--numa", "--pvpanic", "--watchdog"] {
            assert!(living.contains(name), "{name}");
        }
    }
}
