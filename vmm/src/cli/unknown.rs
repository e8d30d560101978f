//! Unknown options: suggests Gantry's equivalents of QEMU's options.

use clap::{
    Command, Error,
    builder::StyledStr,
    error::{ContextKind, ContextValue, ErrorKind},
};

use super::vm::UNSUPPORTED;

/// QEMU's options, without dashes, and Gantry's equivalents.
const OF_QEMU: &[(&[&str], &str)] = &[
    (&["m"], "--memory size=1G"),
    (&["smp"], "--cpus boot=2"),
    (&["hda", "hdb", "drive", "blockdev"], "--disk path=FILE"),
    (&["append"], "--cmdline 'console=ttyS0'"),
    (&["initrd"], "--initramfs FILE"),
    (&["netdev", "nic"], "--net tap=NAME"),
    (&["nographic"], "--serial tty --console off"),
    (&["qmp", "monitor"], "--api-socket PATH"),
    (
        &["incoming"],
        "--api-socket PATH, then gantry ctl receive-migration",
    ),
    (
        &["cpu", "machine", "enable-kvm"],
        "leave it out: there is one machine, with KVM and the host's CPU",
    ),
];

/// Makes an error about an unknown option suggest Gantry's equivalent, and never an option that is refused. `words` are
/// those of the command line, because clap reports only `-n` for QEMU's `-nographic`.
pub fn explain<'a>(
    mut error: Error,
    command: &mut Command,
    words: impl IntoIterator<Item = &'a str>,
) -> Error {
    if error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    let of_qemu = words.into_iter().find_map(|word| {
        let name = word.strip_prefix("--").or(word.strip_prefix('-'))?;
        let (_, here) = OF_QEMU.iter().find(|(names, _)| names.contains(&name))?;
        Some((name, here))
    });
    if let Some((name, here)) = of_qemu {
        let tip = StyledStr::from(format!("instead of QEMU's -{name}: {here}"));
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    } else if !suggests_refused(&error, command) {
        return error;
    }
    // The usage shows the option that clap considers similar.
    error.remove(ContextKind::SuggestedArg);
    let usage = ContextValue::StyledStr(command.render_usage());
    error.insert(ContextKind::Usage, usage);
    error
}

/// Whether the option that clap considers similar is always refused.
fn suggests_refused(error: &Error, command: &Command) -> bool {
    let Some(ContextValue::String(similar)) = error.get(ContextKind::SuggestedArg) else {
        return false;
    };
    let name = similar.trim_start_matches('-');
    command
        .get_arguments()
        .any(|one| one.get_help_heading() == Some(UNSUPPORTED) && one.get_long() == Some(name))
}

#[cfg(test)]
mod tests {
    use super::super::{Cli, command};

    fn said(argument: &str) -> String {
        Cli::from_arguments(&["gantry", argument])
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn what_qemu_calls_otherwise_is_said() {
        for (argument, here) in [
            ("--hda", "--disk path=FILE"),
            ("-m", "--memory size=1G"),
            ("-nographic", "--serial tty"),
        ] {
            let said = said(argument);
            assert!(said.contains(here), "{argument}: {said}");
            assert!(!said.contains("vdpa"), "{said}");
        }
    }

    #[test]
    fn no_option_is_suggested_that_is_refused() {
        assert!(!said("--vdp").contains("--vdpa"), "{}", said("--vdp"));
        assert!(said("--disks").contains("'--disk'"), "{}", said("--disks"));
    }

    #[test]
    fn what_there_is_is_no_qemu_name() {
        let command = command("gantry".as_ref());
        for (names, _) in super::OF_QEMU {
            for name in *names {
                assert!(
                    command
                        .get_arguments()
                        .all(|one| one.get_long() != Some(name))
                );
            }
        }
    }
}
