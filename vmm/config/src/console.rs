//! Serial port, virtio console and debug console.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{
    check::{self, Invalid, Placement, Problem},
    common::{CommonConfig, has_common_config},
    kind::{Configured, Device, FileUse},
    syntax::{IOMMU, Key, PLACE, Parsed, SyntaxError, SyntaxProblem, ValueType, parse},
};

/// What a console is connected to.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum ConsoleMode {
    /// There is no such device.
    #[default]
    Off,
    /// A pseudo-terminal that Gantry opens; `vm.info` reports its path.
    Pty,
    /// The terminal that Gantry was started in.
    Tty,
    /// Output to a file.
    File,
    /// A Unix socket that Gantry listens on.
    Socket,
    /// The device exists, but its output is discarded.
    Null,
}

/// The virtio console.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct ConsoleConfig {
    /// What it is connected to.
    pub mode: ConsoleMode,
    /// The file for mode `File`; in responses, the path of the terminal in mode `Pty`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// The socket for mode `Socket`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// Behind a virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
    /// Its name and location.
    #[serde(flatten)]
    pub common: CommonConfig,
}

impl Default for ConsoleConfig {
    fn default() -> Self {
        Self {
            mode: ConsoleMode::Tty,
            file: None,
            socket: None,
            iommu: false,
            common: CommonConfig::default(),
        }
    }
}

/// The serial port.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct SerialConfig {
    /// What it is connected to.
    pub mode: ConsoleMode,
    /// The file for mode `File`; in responses, the path of the terminal in mode `Pty`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// The socket for mode `Socket`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
}

impl Default for SerialConfig {
    fn default() -> Self {
        Self {
            mode: ConsoleMode::Null,
            file: None,
            socket: None,
        }
    }
}

/// The debug console, an I/O port.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct DebugConsoleConfig {
    /// What it is connected to; `Socket` is not possible.
    pub mode: ConsoleMode,
    /// The file for mode `File`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// Its I/O port; 0xe9 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iobase: Option<u16>,
}

impl Default for DebugConsoleConfig {
    fn default() -> Self {
        Self {
            mode: ConsoleMode::Off,
            file: None,
            iobase: None,
        }
    }
}

const MODES: &[Key] = &[
    Key::named("off", "mode.off", ValueType::Word("Off")),
    Key::named("null", "mode.null", ValueType::Word("Null")),
    Key::named("tty", "mode.tty", ValueType::Word("Tty")),
    Key::named("pty", "mode.pty", ValueType::Word("Pty")),
    Key::new("file", ValueType::Text),
];

const SOCKET: &[Key] = &[Key::new("socket", ValueType::Text)];

const IOBASE: &[Key] = &[Key::new("iobase", ValueType::Number)];

/// Converts the mode that was given into the field `mode`.
fn parse_mode(parsed: &mut Parsed) -> Result<(), SyntaxError> {
    let one = "write one of off, null, tty, pty, file=PATH, socket=PATH";
    let mut modes = Vec::new();
    if let Some(serde_json::Value::Object(words)) = parsed.object.remove("mode") {
        modes.extend(words.into_iter().map(|(_, mode)| mode));
    }
    for (field, mode) in [("file", "File"), ("socket", "Socket")] {
        if parsed.object.contains_key(field) {
            modes.push(mode.into());
        }
    }
    match (modes.pop(), modes.is_empty()) {
        (Some(mode), true) => parsed.default("mode", mode),
        _ => return Err(parsed.error(SyntaxProblem::Other(one.to_owned()))),
    }
    Ok(())
}

/// Fails if the mode needs a path that is missing.
fn validate_mode(
    mode: ConsoleMode,
    file: Option<&PathBuf>,
    socket: Option<&PathBuf>,
) -> Result<(), Invalid> {
    match mode {
        ConsoleMode::File if file.is_none() => {
            Err(Problem::Missing("mode File needs a path").at("file"))
        }
        ConsoleMode::Socket if socket.is_none() => {
            Err(Problem::Missing("mode Socket needs a path").at("socket"))
        }
        _ => Ok(()),
    }
}

has_common_config!(ConsoleConfig, removable: false);

impl Configured for ConsoleConfig {
    const HELP: &'static str = "Virtio console: off|null|pty|tty|file=PATH|socket=PATH";

    const SYNTAX: &'static [&'static [Key]] = &[MODES, SOCKET, IOMMU, PLACE];

    fn parse(input: &str) -> Result<Self, SyntaxError> {
        let mut parsed = parse("--console", input, Self::SYNTAX)?;
        parse_mode(&mut parsed)?;
        parsed.build()
    }
}

impl Device for ConsoleConfig {
    fn validate(&self) -> Result<(), Invalid> {
        validate_mode(self.mode, self.file.as_ref(), self.socket.as_ref())?;
        self.placement().validate()
    }

    fn placement(&self) -> Placement<'_> {
        Placement {
            iommu: self.iommu,
            ..self.common.placement()
        }
    }

    fn is_present(&self) -> bool {
        self.mode != ConsoleMode::Off
    }

    fn files(&self) -> Vec<FileUse> {
        let files = self.file.iter().chain(&self.socket);
        files.map(FileUse::create).collect()
    }
}

impl SerialConfig {
    /// Its syntax on the command line.
    pub const SYNTAX: &[&[Key]] = &[MODES, SOCKET];

    /// Parses the value of `--serial`.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        let mut parsed = parse("--serial", input, Self::SYNTAX)?;
        parse_mode(&mut parsed)?;
        parsed.build()
    }

    /// Checks whether the configuration is valid.
    pub fn validate(&self) -> Result<(), Invalid> {
        validate_mode(self.mode, self.file.as_ref(), self.socket.as_ref())
    }
}

impl DebugConsoleConfig {
    /// Its syntax on the command line.
    pub const SYNTAX: &[&[Key]] = &[MODES, IOBASE];

    /// Parses the value of `--debug-console`.
    pub fn parse(input: &str) -> Result<Self, SyntaxError> {
        let mut parsed = parse("--debug-console", input, Self::SYNTAX)?;
        parse_mode(&mut parsed)?;
        parsed.build()
    }

    /// Checks whether the configuration is valid.
    pub fn validate(&self) -> Result<(), Invalid> {
        check::unsupported(
            self.mode == ConsoleMode::Socket,
            "mode",
            "a debug console on a socket",
            "send it to a file, a pty or the terminal",
        )?;
        validate_mode(self.mode, self.file.as_ref(), None)
    }
}
