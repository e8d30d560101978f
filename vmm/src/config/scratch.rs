//! A kind of device for tests only: its line in [`super`] is all that the program knows about it.

use std::{path::PathBuf, sync::Arc};

use devices::virtio::rng;
use serde::{Deserialize, Serialize};

use super::{
    check::{Invalid, Problem},
    common::{CommonConfig, has_common_config},
    kind::{Configured, Device, FileUse, HotPlug},
    syntax::{Key, PLACE, SyntaxError, ValueType, parse},
};
use crate::machine::{
    devices::{DeviceKind, Made, MadeFunction, Surroundings},
    error::DeviceError,
    kinds::Handle,
};

/// Another entropy source.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct ScratchConfig {
    /// The file from which entropy is read.
    pub src: PathBuf,
    /// Its name and location.
    #[serde(flatten)]
    pub common: CommonConfig,
}

const KEYS: &[Key] = &[Key::new("src", ValueType::Text)];

has_common_config!(ScratchConfig);

impl Configured for ScratchConfig {
    const HELP: &'static str = "Devices of a test: src=FILE";

    const HOT_PLUG: Option<HotPlug> = Some(HotPlug {
        about: "Plug in a device of a test",
        help: "As for --scratch: src=FILE",
    });

    const SYNTAX: &'static [&'static [Key]] = &[KEYS, PLACE];

    fn parse(input: &str) -> Result<Self, SyntaxError> {
        parse("--scratch", input, Self::SYNTAX)?.build()
    }
}

impl Device for ScratchConfig {
    fn validate(&self) -> Result<(), Invalid> {
        if self.src.as_os_str().is_empty() {
            return Err(Problem::Missing("name a file").at("src"));
        }
        self.placement().validate()
    }

    fn files(&self) -> Vec<FileUse> {
        vec![FileUse::read(&self.src)]
    }

    fn cannot_move(&self) -> Option<&'static str> {
        Some("device of a test")
    }
}

impl DeviceKind for ScratchConfig {
    const NAME: &'static str = "scratch";

    fn make(&self, id: &str, surroundings: &Surroundings) -> Result<Made, DeviceError> {
        let options = rng::Options {
            thread_name: format!("_{id}"),
            source: self.src.clone(),
        };
        let rng = rng::Rng::new(options, Arc::clone(&surroundings.spawner));
        Ok(Made {
            function: MadeFunction::Virtio(Box::new(rng.map_err(DeviceError::of)?)),
            handle: Handle::None,
        })
    }
}

mod tests {
    use super::*;
    use crate::{
        api::{self, Request},
        cli::{self, Cli, Command},
        config::VmConfig,
        landlock,
    };

    fn vm(options: &str) -> VmConfig {
        let line = format!("gantry --kernel /k {options}");
        let words: Vec<_> = line.split_whitespace().collect();
        let vm = Cli::from_arguments(&words).unwrap().vm;
        *vm.into_config(None).unwrap().unwrap()
    }

    #[test]
    fn the_command_line_has_the_option_and_the_command_of_a_new_kind() {
        let config = vm("--scratch src=/a src=/b,id=b --scratch src=/c");
        assert_eq!(config.scratches.as_ref().unwrap().len(), 3);
        assert!(vm("").scratches.is_none());
        let words = ["gantry", "ctl", "--socket", "/s", "add-scratch", "src=/a"];
        let command = Cli::from_arguments(&words).unwrap().command;
        assert!(matches!(command, Some(Command::Ctl(_))));
        let mut command = cli::command("gantry".as_ref());
        let help = command.render_long_help().to_string();
        assert!(help.contains("--scratch"), "{help}");
    }

    #[test]
    fn the_api_adds_a_new_kind_and_says_where_it_is_wrong() {
        let path = format!("{}vm.add-scratch", api::PREFIX);
        let body = br#"{"src":"/a","id":"x"}"#;
        let Ok(Request::VmAdd(device)) = api::route("PUT", &path, body, Vec::new()) else {
            panic!("no device");
        };
        let mut config = vm("");
        config.put_device(device);
        assert!(config.has_device("x"));
        let refusal = api::route("PUT", &path, br#"{"src":""}"#, Vec::new()).unwrap_err();
        assert!(refusal.error.to_string().contains("src: is missing"));
        config.put_device(Box::new(ScratchConfig::default()));
        let invalid = config.validate().unwrap_err();
        assert_eq!(invalid.place(), "scratches[1].src");
    }

    #[test]
    fn a_new_kind_has_its_file_its_place_and_its_end() {
        let mut config = vm("--scratch src=/dev/null,id=x,pci_device_id=7");
        let rules = landlock::paths(&config).unwrap();
        assert!(
            rules
                .iter()
                .any(|(path, _)| path.as_os_str() == "/dev/null")
        );
        let taken = ScratchConfig::parse("src=/b,pci_device_id=7").unwrap();
        config.put_device(Box::new(taken));
        let invalid = config.validate().unwrap_err().to_string();
        assert!(invalid.contains("slot 7"), "{invalid}");
        assert!(config.take_device("x"));
        assert_eq!(config.validate(), Ok(()));
        let json = serde_json::to_value(&config).unwrap();
        assert_eq!(json["scratches"][0]["src"], "/b");
        assert_eq!(serde_json::from_value::<VmConfig>(json).unwrap(), config);
    }
}
