//! Completion of partial command lines: keys of options, running VMMs, and devices. Shells request it with `gantry
//! values`, which their completion scripts run.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::Args;
use manual::Shell;
use serde_json::Value;
use vmm_config::{
    CpusConfig, DebugConsoleConfig, LandlockConfig, MemoryConfig, MemoryZoneConfig, NumaConfig,
    PciSegmentConfig, PlatformConfig, RateLimitGroupConfig, SerialConfig, VmConfig,
    syntax::{Key, ValueType},
};

use super::{Client, find};

/// The keys of each option that does not describe a device.
const OPTIONS: &[(&str, &[&[Key]])] = &[
    ("cpus", CpusConfig::SYNTAX),
    ("memory", MemoryConfig::SYNTAX),
    ("memory-zone", MemoryZoneConfig::SYNTAX),
    ("serial", SerialConfig::SYNTAX),
    ("debug-console", DebugConsoleConfig::SYNTAX),
    ("numa", NumaConfig::SYNTAX),
    ("platform", PlatformConfig::SYNTAX),
    ("pci-segment", PciSegmentConfig::SYNTAX),
    ("rate-limit-group", RateLimitGroupConfig::SYNTAX),
    ("landlock-rules", LandlockConfig::SYNTAX),
];

/// The keys of an option.
pub fn keys_of(option: &str) -> Option<&'static [&'static [Key]]> {
    let device = VmConfig::KINDS.iter().find(|kind| kind.option == option);
    let other = || OPTIONS.iter().find(|(name, _)| *name == option);
    device.map(|kind| kind.syntax).or_else(|| Some(other()?.1))
}

/// Combines the script that clap writes for a shell, which knows neither keys nor devices, with code that asks `gantry
/// values` for them.
pub fn script(shell: Shell, options: &str) -> String {
    match shell {
        Shell::Bash => options.to_owned() + include_str!("values.bash"),
        Shell::Fish => {
            let names = VmConfig::KINDS.iter().map(|kind| kind.option);
            let names: Vec<_> = names.chain(OPTIONS.iter().map(|one| one.0)).collect();
            let more = include_str!("values.fish").replace("@OPTIONS@", &names.join(" "));
            options.to_owned() + &more
        }
        Shell::Zsh => {
            // The end of the script calls the function, so the function must be complete before that.
            let end = options.rfind("\nif [").unwrap_or(options.len());
            let (before, end) = options.split_at(end);
            [before, include_str!("values.zsh"), end].concat()
        }
        _ => options.to_owned(),
    }
}

/// Print possible completions of a command line.
#[derive(Args, Clone, Debug)]
pub struct Values {
    /// The line up to the cursor.
    #[arg(allow_hyphen_values = true)]
    pub line: String,
}

/// Where to look for values.
pub struct Places {
    /// /sys/bus.
    pub buses: PathBuf,
    /// /proc.
    pub processes: PathBuf,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            buses: "/sys/bus".into(),
            processes: "/proc".into(),
        }
    }
}

/// What a word stands for.
enum Meaning {
    Keys(&'static [&'static [Key]]),
    Socket,
    Device,
    Id,
}

impl Values {
    /// The possible completions of the line's last word; empty if only files or options fit.
    pub fn list(&self, places: &Places) -> Vec<String> {
        let words: Vec<_> = self
            .line
            .split(' ')
            .filter(|word| !word.is_empty())
            .collect();
        let (before, word) = match words.split_last() {
            Some((last, before)) if !self.line.ends_with(' ') => (before, *last),
            _ => (&words[..], ""),
        };
        let mut fitting = match meaning(before, word) {
            None => Vec::new(),
            Some(Meaning::Keys(keys)) => self.keys(before, word, keys, places),
            Some(Meaning::Socket) => sockets(places),
            Some(Meaning::Device) => devices(places),
            Some(Meaning::Id) => ids(before, places),
        };
        fitting.retain(|candidate| candidate.starts_with(word));
        fitting.sort();
        fitting
    }

    /// The keys of an option that are not used yet, or the values of the last key.
    #[expect(clippy::unused_self, reason = "one of several ways to list")]
    fn keys(
        &self,
        before: &[&str],
        word: &str,
        tables: &'static [&'static [Key]],
        places: &Places,
    ) -> Vec<String> {
        let (done, last) = word
            .rsplit_once(',')
            .map_or(("", word), |(done, last)| (done, last));
        let prefix = &word[..word.len() - last.len()];
        let keys = || tables.iter().copied().flatten();
        if let Some((name, _)) = last.split_once('=') {
            let key = keys().find(|key| key.name == name);
            let values: Vec<&str> = match key.map(|key| key.kind) {
                Some(ValueType::Switch) => vec!["on", "off"],
                Some(ValueType::Choice(choices)) => choices.iter().map(|choice| choice.0).collect(),
                _ => Vec::new(),
            };
            return values
                .iter()
                .map(|value| format!("{prefix}{name}={value}"))
                .collect();
        }
        let is_there = |name: &str| {
            done.split(',')
                .any(|part| part.split('=').next() == Some(name))
        };
        let mut fitting: Vec<_> = keys()
            .filter(|key| !is_there(key.name))
            .map(|key| match key.kind {
                ValueType::Word(_) => format!("{prefix}{}", key.name),
                _ => format!("{prefix}{}=", key.name),
            })
            .collect();
        let is_device = before
            .iter()
            .rev()
            .any(|word| matches!(*word, "--device" | "add-device"));
        if is_device && prefix.is_empty() {
            fitting.extend(devices(places));
        }
        fitting
    }
}

/// What a word after others stands for.
fn meaning(before: &[&str], word: &str) -> Option<Meaning> {
    if word.starts_with('-') {
        return None;
    }
    let keys = |name: &str| keys_of(name).map(Meaning::Keys);
    let (last, above) = before.split_last()?;
    if *last == "--socket" || *last == "--api-socket" && above.contains(&"ctl") {
        return Some(Meaning::Socket);
    }
    if above.contains(&"ctl") {
        return match *last {
            "remove-device" | "swap-device" => Some(Meaning::Id),
            add if add.starts_with("add-") => keys(&add["add-".len()..]),
            _ if above.last() == Some(&"swap-device") => Some(Meaning::Device),
            _ => None,
        };
    }
    // Some options take several values.
    let option = before.iter().rev().find(|word| word.starts_with("--"))?;
    keys(&option[2..])
}

fn sockets(places: &Places) -> Vec<String> {
    let found = find::found(&places.processes);
    found
        .iter()
        .map(|one| one.socket.display().to_string())
        .collect()
}

/// The host's devices: PCI endpoints except bridges, and mediated devices.
fn devices(places: &Places) -> Vec<String> {
    let names = |folder: &str| {
        let entries = fs::read_dir(places.buses.join(folder))
            .into_iter()
            .flatten();
        entries.filter_map(|entry| Some((entry.as_ref().ok()?.path(), entry.ok()?.file_name())))
    };
    let is_bridge = |path: &Path| {
        let class = fs::read_to_string(path.join("class")).unwrap_or_default();
        class.starts_with("0x06")
    };
    names("pci/devices")
        .filter(|(path, _)| !is_bridge(path))
        .chain(names("mdev/devices"))
        .filter_map(|(_, name)| name.into_string().ok())
        .collect()
}

/// The names of the VM's devices.
fn ids(before: &[&str], places: &Places) -> Vec<String> {
    let named = before
        .windows(2)
        .find(|pair| matches!(pair[0], "--socket" | "--api-socket"));
    let socket = match named {
        Some(pair) => PathBuf::from(pair[1]),
        None => match &find::found(&places.processes)[..] {
            [one] => one.socket.clone(),
            _ => return Vec::new(),
        },
    };
    let client = Client::new(socket).within(find::PATIENCE);
    let answer = client
        .request("GET", "vm.info", None, &[])
        .unwrap_or_default();
    let info: Value = serde_json::from_slice(&answer).unwrap_or_default();
    let devices = info["device_tree"].as_object();
    devices
        .into_iter()
        .flat_map(|devices| devices.keys().cloned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(line: &str, places: &Places) -> Vec<String> {
        let line = line.to_owned();
        Values { line }.list(places)
    }

    fn nowhere() -> Places {
        Places {
            buses: "/nonexistent".into(),
            processes: "/nonexistent".into(),
        }
    }

    #[test]
    fn keys_and_their_values_are_known() {
        let places = nowhere();
        assert!(list("gantry --disk ", &places).contains(&"path=".to_owned()));
        assert_eq!(
            list("gantry --disk path=/x,reado", &places),
            ["path=/x,readonly="]
        );
        assert_eq!(
            list("gantry --disk path=/x,readonly=o", &places),
            ["path=/x,readonly=off", "path=/x,readonly=on"]
        );
        assert_eq!(
            list("gantry --disk path=/x,pat", &places),
            [""; 0],
            "it is there"
        );
        assert_eq!(list("gantry ctl add-net ta", &places), ["tap="]);
        assert_eq!(list("gantry ctl --socket /s add-net ta", &places), ["tap="]);
        assert!(list("gantry --net tap=a ma", &places).contains(&"mac=".to_owned()));
        assert!(list("gantry --serial ", &places).contains(&"tty".to_owned()));
        for line in [
            "",
            "gantry",
            "gantry ",
            "gantry --ker",
            "gantry --kernel ",
            "gantry --disk -",
        ] {
            assert_eq!(list(line, &places), [""; 0], "{line}");
        }
    }

    #[test]
    fn devices_are_known_and_bridges_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let pci = dir.path().join("pci/devices");
        for (address, class) in [("0000:00:00.0", "0x060000"), ("0000:01:00.0", "0x030200")] {
            fs::create_dir_all(pci.join(address)).unwrap();
            fs::write(pci.join(address).join("class"), class).unwrap();
        }
        let uuid = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001";
        fs::create_dir_all(dir.path().join("mdev/devices").join(uuid)).unwrap();
        let places = Places {
            buses: dir.path().into(),
            ..nowhere()
        };
        assert_eq!(list("gantry --device 0", &places), ["0000:01:00.0"]);
        assert_eq!(list("gantry ctl add-device 8", &places), [uuid]);
        assert_eq!(
            list("gantry ctl swap-device gpu0 0", &places),
            ["0000:01:00.0"]
        );
        assert!(
            list("gantry --device 0000:01:00.0,", &places)
                .iter()
                .any(|key| key.ends_with(",id="))
        );
    }
}
