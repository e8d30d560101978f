//! Serial port, virtio console and debug console.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Where a console goes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub enum ConsoleMode {
    /// There is no such device.
    #[default]
    Off,
    /// A pseudo-terminal that Gantry opens; `vm.info` says which.
    Pty,
    /// The terminal that Gantry was started in.
    Tty,
    /// Output to a file.
    File,
    /// A Unix socket that Gantry listens on.
    Socket,
    /// The device is there, its output goes nowhere.
    Null,
}

/// The virtio console.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct ConsoleConfig {
    /// Where it goes.
    pub mode: ConsoleMode,
    /// The file for mode `File`; the path of the terminal in mode `Pty`, as an answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// The socket for mode `Socket`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// Behind a virtual IOMMU.
    #[serde(default)]
    pub iommu: bool,
    /// Name of the device in the API; made up if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// PCI segment to plug it into.
    #[serde(default)]
    pub pci_segment: u16,
    /// Device number on the segment's bus, 1 to 31; the first free one if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_device_id: Option<u8>,
}

impl Default for ConsoleConfig {
    fn default() -> Self {
        Self {
            mode: ConsoleMode::Tty,
            file: None,
            socket: None,
            iommu: false,
            id: None,
            pci_segment: 0,
            pci_device_id: None,
        }
    }
}

/// The serial port.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct SerialConfig {
    /// Where it goes.
    pub mode: ConsoleMode,
    /// The file for mode `File`; the path of the terminal in mode `Pty`, as an answer.
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
    /// Where it goes; `Socket` is not possible.
    pub mode: ConsoleMode,
    /// The file for mode `File`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// Its port, 0xe9 if absent.
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
