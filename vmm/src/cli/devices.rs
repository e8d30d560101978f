//! The options and commands that describe devices, one for each kind.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, Subcommand};
use vmm_config::{Device, HotPlug, Kind, VmConfig};

use super::option;

/// The devices of a virtual machine, as described by options.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceArgs(Vec<Box<dyn Device>>);

impl DeviceArgs {
    /// Adds the devices to a configuration.
    pub fn put_into(self, config: &mut VmConfig) {
        for device in self.0 {
            config.put_device(device);
        }
    }
}

impl FromArgMatches for DeviceArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let kinds = VmConfig::KINDS.iter();
        let given = kinds.flat_map(|kind| matches.get_many(kind.option).into_iter().flatten());
        Ok(Self(given.cloned().collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for DeviceArgs {
    fn augment_args(command: Command) -> Command {
        VmConfig::KINDS.iter().fold(command, |command, kind| {
            let arg = Arg::new(kind.option)
                .long(kind.option)
                .value_name("KEYS")
                .help(kind.help)
                .value_parser(option(kind.parse));
            command.arg(match kind.many {
                true => arg.action(ArgAction::Append).num_args(1..),
                false => arg.action(ArgAction::Set),
            })
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// Adds a device to an existing VM.
#[derive(Clone, Debug)]
pub struct Add {
    /// The API path for its kind.
    pub path: &'static str,
    /// The device.
    pub device: Box<dyn Device>,
}

/// The kinds of which devices can be added to an existing VM.
fn hot_pluggable() -> impl Iterator<Item = (&'static Kind, HotPlug)> {
    let kinds = VmConfig::KINDS.iter();
    kinds.filter_map(|kind| Some((kind, kind.hot_plug?)))
}

/// The argument of each command.
const CONFIG: &str = "config";

impl FromArgMatches for Add {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let missing = || clap::Error::new(clap::error::ErrorKind::MissingSubcommand);
        let (name, matches) = matches.subcommand().ok_or_else(missing)?;
        let kind = hot_pluggable().find(|(kind, _)| kind.command == name);
        let device = matches.get_one::<Box<dyn Device>>(CONFIG);
        let ((kind, _), device) = kind.zip(device).ok_or_else(missing)?;
        Ok(Self {
            path: kind.path,
            device: device.clone(),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Subcommand for Add {
    fn augment_subcommands(command: Command) -> Command {
        hot_pluggable().fold(command, |command, (kind, hot_plug)| {
            let config = Arg::new(CONFIG)
                .value_name("KEYS")
                .help(hot_plug.help)
                .required(true)
                .value_parser(option(kind.parse));
            let add = Command::new(kind.command).about(hot_plug.about);
            command.subcommand(add.arg(config))
        })
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        hot_pluggable().any(|(kind, _)| kind.command == name)
    }
}
