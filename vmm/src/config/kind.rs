//! Kinds of devices: what each says of itself, from which everything else is derived.
//!
//! The list of kinds is in [`super`], a line each. [`VmConfig`] has a field for each of them, and the
//! command line, the API, Landlock, removal and the order in which a machine plugs its devices
//! follow from the list. A kind implements [`Configured`] and [`Device`] for its configuration, next
//! to it, and [`DeviceKind`], which makes the device.

use std::{
    any::Any,
    fmt::Debug,
    os::fd::{OwnedFd, RawFd},
    path::PathBuf,
};

use serde::{Serialize, de::DeserializeOwned};

use super::{
    VmConfig,
    check::{Invalid, Placement},
    common::HasCommonConfig,
    syntax::{Key, SyntaxError},
};
use crate::machine::devices::{DeviceKind, Pluggable};

/// A file of the host that a device uses.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct FileUse {
    /// The file.
    pub path: PathBuf,
    /// How.
    pub access: FileAccess,
}

/// How a device uses a file.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum FileAccess {
    /// It reads it.
    Read,
    /// It reads and writes it.
    Write,
    /// It makes it, and takes it away.
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

    /// A file or socket that is made.
    pub fn create(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            access: FileAccess::Create,
        }
    }
}

/// A VM cannot have a device, in words for users.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// A configured device of any kind.
pub trait Device: HasCommonConfig + Pluggable + Erased + Send + Sync {
    /// What it says can be done.
    fn validate(&self) -> Result<(), Invalid>;

    /// It fits the rest of the machine. A problem of the device as a whole is at `""`.
    fn validate_in(&self, vm: &VmConfig) -> Result<(), Invalid> {
        let _ = vm;
        Ok(())
    }

    /// Where it is to be.
    fn placement(&self) -> Placement<'_> {
        self.common().placement()
    }

    /// Whether the machine has it: consoles can be configured away.
    fn is_present(&self) -> bool {
        true
    }

    /// The files that it opens, for Landlock.
    fn files(&self) -> Vec<FileUse> {
        Vec::new()
    }

    /// What it is called if it keeps its VM from moving to another host.
    fn cannot_move(&self) -> Option<&'static str> {
        None
    }

    /// Says by `pci_segment` and `iommu` alone where it is to be, in a machine in which these
    /// segments are behind the virtual IOMMU.
    fn normalize_segment(&mut self, behind: &[u16]) {
        let _ = behind;
    }

    /// A VM that exists, `running` or not, can be given it. Comes before anything is opened.
    fn check_joins(&self, vm: &VmConfig, running: bool) -> Result<(), Refused> {
        let _ = (vm, running);
        Ok(())
    }

    /// The name of the device that has to be there as long as it is.
    fn needs(&self) -> Option<&str> {
        None
    }

    /// The descriptors that it is given on the command line of `gantry ctl`.
    fn descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }

    /// Takes the descriptors that came with the request to add it; there are some.
    fn take_descriptors(&mut self, descriptors: Vec<OwnedFd>) -> Result<(), Refused> {
        drop(descriptors);
        Err(Refused(
            "this kind of device takes no descriptors; vm.add-net does".to_owned(),
        ))
    }
}

/// For devices of other processes, before their server is asked.
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
    /// A copy.
    fn boxed(&self) -> Box<dyn Device>;

    /// Whether another device is of the same kind and configured alike.
    fn equals(&self, other: &dyn Device) -> bool;

    /// As the API carries it.
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

/// How a device is added to a VM that exists: `vm.add-...` of the API and of `gantry ctl`.
#[derive(Clone, Copy, Debug)]
pub struct HotPlug {
    /// What the command does.
    pub about: &'static str,
    /// What its argument is.
    pub help: &'static str,
}

/// A kind of device, by the type of its configuration.
pub trait Configured: Device + DeviceKind + Clone + Debug + DeserializeOwned + 'static {
    /// What the option of the command line is for, and its keys.
    const HELP: &'static str;

    /// How it is added to a VM that exists; `None` if it is only there from the start.
    const HOT_PLUG: Option<HotPlug> = None;

    /// How it is written on the command line.
    const SYNTAX: &'static [&'static [Key]];

    /// Parses the value of the option.
    fn parse(input: &str) -> Result<Self, SyntaxError>;
}

/// The devices of one kind in a [`VmConfig`]: one that is always there, one at most, or many.
pub trait Field {
    /// The kind.
    type Config: Configured;

    /// Whether there can be several.
    const MANY: bool;

    /// Whether the configuration says nothing about them.
    fn is_absent(&self) -> bool;

    /// The devices, by their places in the configuration.
    fn collect<'a>(&'a self, key: &str, devices: &mut Vec<(String, &'a dyn Device)>);

    /// The devices.
    fn collect_mut<'a>(&'a mut self, devices: &mut Vec<&'a mut dyn Device>);

    /// Takes the device of that name away; false if it is not there or has to stay.
    fn take(&mut self, id: &str) -> bool;

    /// Adds a device, in the place of the one that there is if there cannot be several.
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
        C::REMOVABLE && self.take_if(|device| named(device, id)).is_some()
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
        let Some(devices) = self.as_mut().filter(|_| C::REMOVABLE) else {
            return false;
        };
        let before = devices.len();
        devices.retain(|device| !named(device, id));
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

/// What there is to know about a kind of device without one.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// Its key in the configuration.
    pub key: &'static str,
    /// Its option of the command line, without dashes.
    pub option: &'static str,
    /// The command of `gantry ctl` that adds one.
    pub command: &'static str,
    /// The API's path that adds one.
    pub path: &'static str,
    /// Whether a machine can have several.
    pub many: bool,
    /// What the option is for.
    pub help: &'static str,
    /// How it is added to a VM that exists.
    pub hot_plug: Option<HotPlug>,
    /// How it is written on the command line.
    pub syntax: &'static [&'static [Key]],
    /// Whether a device is of this kind.
    pub is_of: fn(&dyn Device) -> bool,
    /// Parses the value of the option.
    pub parse: fn(&str) -> Result<Box<dyn Device>, SyntaxError>,
    /// Parses what the API carries.
    pub from_json: fn(&[u8]) -> serde_json::Result<Box<dyn Device>>,
}

impl Kind {
    /// The kind of a field, with its names: see the fields of the result.
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
