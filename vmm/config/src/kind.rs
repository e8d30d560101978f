//! Kinds of devices: each describes itself, and everything else is derived from the description.
//!
//! The list of kinds is in [`super`], one line for each. [`VmConfig`] has a field for each of them. The command line,
//! the API, Landlock, removal and the order in which a machine plugs its devices in follow from the list. A kind
//! implements [`Configured`] and [`Device`] for its configuration, next to it, and the machine's `DeviceKind`, which
//! creates the device.

use std::{
    any::Any,
    fmt::Debug,
    os::fd::{OwnedFd, RawFd},
    path::PathBuf,
};

use serde::{Serialize, de::DeserializeOwned};

use super::{
    VmConfig,
    check::{Invalid, Placement, Problem},
    common::HasCommonConfig,
    syntax::{Key, SyntaxError},
};

/// A host file that a device uses.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct FileUse {
    /// The file.
    pub path: PathBuf,
    /// How it is used.
    pub access: FileAccess,
}

/// How a device uses a file.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum FileAccess {
    /// The device reads it.
    Read,
    /// The device reads and writes it.
    Write,
    /// The device creates and removes it.
    Create,
}

impl FileUse {
    /// A file that is read.
    pub fn read(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            access: FileAccess::Read,
        }
    }

    /// A file that is read, and written unless `read_only`.
    pub fn open(path: impl Into<PathBuf>, read_only: bool) -> Self {
        let access = match read_only {
            true => FileAccess::Read,
            false => FileAccess::Write,
        };
        let path = path.into();
        Self { path, access }
    }

    /// A file or socket that the device creates.
    pub fn create(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            access: FileAccess::Create,
        }
    }
}

/// Why a VM cannot have a device, as a message for users.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// A configured device of any kind.
pub trait Device: HasCommonConfig + Erased + Send + Sync {
    /// Checks whether the configuration is valid.
    fn validate(&self) -> Result<(), Invalid>;

    /// Checks whether it fits the rest of the machine. A problem of the device as a whole has the location `""`.
    fn validate_in(&self, vm: &VmConfig) -> Result<(), Invalid> {
        let _ = vm;
        Ok(())
    }

    /// Where it is to be placed.
    fn placement(&self) -> Placement<'_> {
        self.common().placement()
    }

    /// Whether the device exists: consoles can be switched off.
    fn is_present(&self) -> bool {
        true
    }

    /// The files that it opens; Landlock must permit them.
    fn files(&self) -> Vec<FileUse> {
        Vec::new()
    }

    /// The name of this kind of device in messages, if it prevents its VM from being migrated.
    fn cannot_move(&self) -> Option<&'static str> {
        None
    }

    /// Whether its state is in another process, which does not save it: its VM cannot be saved.
    fn cannot_be_saved(&self) -> bool {
        false
    }

    /// Reduces the location to `pci_segment` and `iommu`, in a machine in which the segments `behind` are behind the
    /// virtual IOMMU.
    fn normalize_segment(&mut self, behind: &[u16]) {
        let _ = behind;
    }

    /// Checks whether the device can be added to an existing VM, `running` or not. Called before anything is opened.
    fn check_joins(&self, vm: &VmConfig, running: bool) -> Result<(), Refused> {
        let _ = (vm, running);
        Ok(())
    }

    /// The name of another device that must exist as long as this one does.
    fn needs(&self) -> Option<&str> {
        None
    }

    /// The descriptors that it is given on the command line of `gantry ctl`.
    fn descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }

    /// Takes the descriptors that came with the request to add it; only called if there are any.
    fn take_descriptors(&mut self, descriptors: Vec<OwnedFd>) -> Result<(), Refused> {
        drop(descriptors);
        Err(Refused(
            "this kind of device takes no descriptors; vm.add-net and vm.add-device do".to_owned(),
        ))
    }
}

/// For devices of other processes, which are configured by the field `place`: they need memory that is shared.
pub(super) fn needs_shared_memory(vm: &VmConfig, place: &'static str) -> Result<(), Invalid> {
    if vm.memory.is_shared() {
        return Ok(());
    }
    let with = "memory that its server cannot map";
    let advice = "start the VM with --memory shared=on";
    Err(Problem::Conflict { with, advice }.at(place))
}

/// For devices of other processes, to be called before their server is contacted.
pub(super) fn check_shared_memory(vm: &VmConfig) -> Result<(), Refused> {
    if vm.memory.is_shared() {
        return Ok(());
    }
    Err(Refused(
        "a device of another process needs memory that this process can map: start the VM with \
         --memory shared=on"
            .to_owned(),
    ))
}

/// What every configuration can do, for those whose type is not known.
pub trait Erased: Any + Debug {
    /// Clones the configuration.
    fn boxed(&self) -> Box<dyn Device>;

    /// Whether another device is of the same kind and has an equal configuration.
    fn equals(&self, other: &dyn Device) -> bool;

    /// The JSON form that the API uses.
    fn to_json(&self) -> serde_json::Result<serde_json::Value>;
}

impl<C: Configured + PartialEq + Serialize> Erased for C {
    fn boxed(&self) -> Box<dyn Device> {
        Box::new(self.clone())
    }

    fn equals(&self, other: &dyn Device) -> bool {
        (other as &dyn Any).downcast_ref::<C>() == Some(self)
    }

    fn to_json(&self) -> serde_json::Result<serde_json::Value> {
        serde_json::to_value(self)
    }
}

impl Clone for Box<dyn Device> {
    fn clone(&self) -> Self {
        (**self).boxed()
    }
}

impl PartialEq for dyn Device {
    fn eq(&self, other: &Self) -> bool {
        self.equals(other)
    }
}

/// How a device is added to an existing VM: `vm.add-...` of the API and of `gantry ctl`.
#[derive(Clone, Copy, Debug)]
pub struct HotPlug {
    /// What the command does.
    pub about: &'static str,
    /// Help for its argument.
    pub help: &'static str,
}

/// A kind of device, identified by the type of its configuration.
pub trait Configured: Device + Clone + Debug + DeserializeOwned + 'static {
    /// Help for the command-line option and its keys.
    const HELP: &'static str;

    /// How it is added to an existing VM; `None` if it cannot be hot-plugged.
    const HOT_PLUG: Option<HotPlug> = None;

    /// Its syntax on the command line.
    const SYNTAX: &'static [&'static [Key]];

    /// Parses the value of the command-line option.
    fn parse(input: &str) -> Result<Self, SyntaxError>;
}

/// The devices of one kind in a [`VmConfig`]: exactly one, at most one, or many.
pub trait Field {
    /// The kind.
    type Config: Configured;

    /// Whether there can be several.
    const MANY: bool;

    /// Whether the configuration contains none of them.
    fn is_absent(&self) -> bool;

    /// Collects the devices, with their locations in the configuration.
    fn collect<'a>(&'a self, key: &str, devices: &mut Vec<(String, &'a dyn Device)>);

    /// Collects the devices for changes.
    fn collect_mut<'a>(&'a mut self, devices: &mut Vec<&'a mut dyn Device>);

    /// Removes the device with this name; false if there is none or it is not removable.
    fn take(&mut self, id: &str) -> bool;

    /// Adds a device. It replaces the existing one if there can be only one.
    fn put(&mut self, device: Self::Config);
}

fn named(device: &impl HasCommonConfig, id: &str) -> bool {
    device.common().id.as_deref() == Some(id)
}

impl<C: Configured> Field for C {
    type Config = C;

    const MANY: bool = false;

    fn is_absent(&self) -> bool {
        false
    }

    fn collect<'a>(&'a self, key: &str, devices: &mut Vec<(String, &'a dyn Device)>) {
        devices.push((key.to_owned(), self));
    }

    fn collect_mut<'a>(&'a mut self, devices: &mut Vec<&'a mut dyn Device>) {
        devices.push(self);
    }

    fn take(&mut self, _id: &str) -> bool {
        false
    }

    fn put(&mut self, device: C) {
        *self = device;
    }
}

impl<C: Configured> Field for Option<C> {
    type Config = C;

    const MANY: bool = false;

    fn is_absent(&self) -> bool {
        self.is_none()
    }

    fn collect<'a>(&'a self, key: &str, devices: &mut Vec<(String, &'a dyn Device)>) {
        devices.extend(self.iter().map(|device| (key.to_owned(), device as _)));
    }

    fn collect_mut<'a>(&'a mut self, devices: &mut Vec<&'a mut dyn Device>) {
        devices.extend(self.iter_mut().map(|device| device as _));
    }

    fn take(&mut self, id: &str) -> bool {
        self.take_if(|device| device.is_removable() && named(device, id))
            .is_some()
    }

    fn put(&mut self, device: C) {
        *self = Some(device);
    }
}

impl<C: Configured> Field for Option<Vec<C>> {
    type Config = C;

    const MANY: bool = true;

    fn is_absent(&self) -> bool {
        self.is_none()
    }

    fn collect<'a>(&'a self, key: &str, devices: &mut Vec<(String, &'a dyn Device)>) {
        let all = self.iter().flatten().enumerate();
        devices.extend(all.map(|(index, device)| (format!("{key}[{index}]"), device as _)));
    }

    fn collect_mut<'a>(&'a mut self, devices: &mut Vec<&'a mut dyn Device>) {
        devices.extend(self.iter_mut().flatten().map(|device| device as _));
    }

    fn take(&mut self, id: &str) -> bool {
        let Some(devices) = self.as_mut() else {
            return false;
        };
        let before = devices.len();
        devices.retain(|device| !(device.is_removable() && named(device, id)));
        let found = devices.len() < before;
        if devices.is_empty() {
            *self = None;
        }
        found
    }

    fn put(&mut self, device: C) {
        self.get_or_insert_default().push(device);
    }
}

/// The static description of a kind of device.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// Its key in the configuration.
    pub key: &'static str,
    /// Its command-line option, without dashes.
    pub option: &'static str,
    /// The `gantry ctl` command that adds one.
    pub command: &'static str,
    /// The API path that adds one.
    pub path: &'static str,
    /// Whether a machine can have several.
    pub many: bool,
    /// Help for the option.
    pub help: &'static str,
    /// How it is added to an existing VM.
    pub hot_plug: Option<HotPlug>,
    /// Its syntax on the command line.
    pub syntax: &'static [&'static [Key]],
    /// Whether a device is of this kind.
    pub is_of: fn(&dyn Device) -> bool,
    /// Parses the value of the command-line option.
    pub parse: fn(&str) -> Result<Box<dyn Device>, SyntaxError>,
    /// Parses the API's JSON form.
    pub from_json: fn(&[u8]) -> serde_json::Result<Box<dyn Device>>,
}

impl Kind {
    /// The kind of a field, with its names: see the fields of [`Kind`].
    pub(super) const fn of<F: Field>(
        key: &'static str,
        option: &'static str,
        command: &'static str,
        path: &'static str,
    ) -> Self {
        fn boxed<C: Configured>(config: C) -> Box<dyn Device> {
            Box::new(config)
        }
        Self {
            key,
            option,
            command,
            path,
            many: F::MANY,
            help: F::Config::HELP,
            hot_plug: F::Config::HOT_PLUG,
            syntax: F::Config::SYNTAX,
            is_of: |device| (device as &dyn Any).is::<F::Config>(),
            parse: |text| F::Config::parse(text).map(boxed),
            from_json: |body| serde_json::from_slice::<F::Config>(body).map(boxed),
        }
    }
}
