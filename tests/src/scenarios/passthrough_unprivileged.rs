//! Gantry as a user other than root: it reports what is missing, and how to get it.

use std::{
    fs,
    io::{self, Read as _},
    os::{
        fd::AsRawFd,
        unix::{
            fs::{PermissionsExt as _, chown},
            net::UnixStream,
        },
    },
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::{
    Context, Entry,
    clients::send_with_fds,
    lifecycle::reconnect,
    passthrough::{edu_works, node},
    passthrough_state::{MIB, locked},
};
use crate::{
    gantry::{Gantry, User, merge, vm},
    host_device::{EDU, EDU_OF_TWO, HostDevice},
};

pub const SCENARIOS: &[Entry] = &[(
    "passthrough: a user who is not root is told what is missing",
    with_groups,
)];

const ID: u32 = 1234;
/// Less than the VM's memory.
const TOO_LITTLE: u64 = 128 * MIB;
/// The value in the documentation: somewhat more than the VM's memory.
const ENOUGH: u64 = 320 * MIB;

/// A user who may lock this many bytes.
fn user(memlock: u64) -> User {
    User { id: ID, memlock }
}

/// A file that belongs to the user until this is dropped.
struct Given(PathBuf);

impl Given {
    fn new(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        chown(&path, Some(ID), None).with_context(|| format!("cannot give {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Given {
    fn drop(&mut self) {
        // It may have disappeared with its device.
        let _ = chown(&self.0, Some(0), None);
    }
}

/// The file of a device's IOMMU group.
fn group(device: &HostDevice) -> Result<PathBuf> {
    let link = fs::read_link(device.path.join("iommu_group"))?;
    Ok(Path::new("/dev/vfio").join(link.file_name().context("no group")?))
}

/// Gantry of the user, with a VM that is to have a device and has not been booted.
fn start(context: &Context, name: &str, memlock: u64, more: Value) -> Result<Gantry> {
    let dir = context.dir.join(name);
    fs::create_dir(&dir)?;
    let gantry = Gantry::start_as(&dir, user(memlock))?;
    let mut config = vm(&gantry.serial);
    merge(&mut config, more);
    gantry.put("vm.create", config)?;
    Ok(gantry)
}

fn refused(gantry: &Gantry, words: &[&str]) -> Result<()> {
    words
        .iter()
        .try_for_each(|words| gantry.refused("vm.boot", None, 500, words))
}

/// With the file and the limit, it works.
fn works(context: &Context, more: Value) -> Result<()> {
    let gantry = Gantry::start_as(&context.dir, user(ENOUGH))?;
    let mut guest = gantry.create_and_boot(more)?;
    edu_works(&mut guest)?;
    ensure!(
        locked(&gantry)? == 256,
        "{} MiB are locked",
        locked(&gantry)?
    );
    let status = fs::read_to_string(format!("/proc/{}/status", gantry.pid()))?;
    ensure!(status.contains("CapEff:\t0000000000000000"), "{status}");
    Ok(())
}

fn with_groups(context: &Context) -> Result<()> {
    let edu = HostDevice::take(EDU, 0)?;
    let file = group(&edu)?;
    let more = json!({"devices": [{"path": edu.path, "id": "edu"}]});
    let gantry = start(context, "access", TOO_LITTLE, more.clone())?;
    let cure = format!("chown {ID} {}", file.display());
    refused(&gantry, &["as user 1234", &cure])?;
    let _given = Given::new(&file)?;
    let limit = format!("the limit of this process (in bytes) is {TOO_LITTLE}");
    refused(&gantry, &[&limit, "LimitMEMLOCK="])?;
    drop(gantry);
    works(context, more)
}

/// The same with iommufd, which requires more.
pub fn with_iommufd(context: &Context) -> Result<()> {
    const IOMMUFD: &str = "/dev/iommu";
    let edu = HostDevice::take(EDU, 0)?;
    let file = node(&edu)?;
    let more = json!({
        "platform": {"iommufd": true},
        "devices": [{"path": edu.path, "id": "edu"}],
    });
    fs::set_permissions(IOMMUFD, fs::Permissions::from_mode(0o600))?;
    let gantry = start(context, "access", TOO_LITTLE, more.clone())?;
    refused(&gantry, &["as user 1234", &format!("chown {ID} {IOMMUFD}")])?;
    by_descriptors(context, &edu, Path::new(IOMMUFD))?;
    let _iommufd = Given::new(IOMMUFD)?;
    refused(&gantry, &["as user 1234", &format!("chown {ID} {file}")])?;
    let _given = Given::new(&file)?;
    let of = "the limit of all processes of this user together (in bytes)";
    let limit = format!("{of} is {TOO_LITTLE}");
    refused(&gantry, &[&limit, "LimitMEMLOCK="])?;
    drop(gantry);
    works(context, more)?;
    taken(context)
}

/// Another process opens the files for the user, who has no access to them. The device stays when the guest is booted
/// again.
fn by_descriptors(context: &Context, edu: &HostDevice, iommufd: &Path) -> Result<()> {
    let dir = context.dir.join("descriptors");
    fs::create_dir(&dir)?;
    let gantry = Gantry::start_as(&dir, user(ENOUGH))?;
    let guest = gantry.create_and_boot(json!({}))?;
    {
        let open = |path: &Path| fs::File::options().read(true).write(true).open(path);
        let file = node(edu)?;
        let add = |device: &fs::File, iommufd: &fs::File| {
            let body = json!({"path": edu.path, "id": "edu"}).to_string();
            let request = format!(
                "PUT /api/v1/vm.add-device HTTP/1.1\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            );
            let stream = UnixStream::connect(&gantry.socket)?;
            let both = [device.as_raw_fd(), iommufd.as_raw_fd()];
            send_with_fds(&stream, request.as_bytes(), &both)?;
            let mut answer = [0; 4096];
            let length = (&stream).read(&mut answer)?;
            anyhow::Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
        };
        {
            // The address spaces of both VMs have the same number.
            let (device, others) = (open(Path::new(&file))?, open(iommufd)?);
            belong_to_another_vm(&device, &others)?;
            let refused = add(&device, &open(iommufd)?)?;
            ensure!(refused.contains("belongs to another iommufd"), "{refused}");
        }
        let added = add(&open(Path::new(&file))?, &open(iommufd)?)?;
        ensure!(added.contains("\"edu\""), "{added}");
        gantry.info_until("the device", |info| info["device_tree"]["edu"].is_object())?;
    }
    gantry.act("vm.reboot")?;
    let mut guest = reconnect(&gantry, guest)?;
    edu_works(&mut guest)
}

/// Ties a device's file to an iommufd with an address space.
fn belong_to_another_vm(device: &fs::File, iommufd: &fs::File) -> Result<()> {
    /// `IOMMU_IOAS_ALLOC`, with `struct iommu_ioas_alloc`.
    const ALLOC: libc::Ioctl = (b';' as libc::Ioctl) << 8 | 0x81;
    /// `VFIO_DEVICE_BIND_IOMMUFD`, with `struct vfio_device_bind_iommufd`.
    const BIND: libc::Ioctl = (b';' as libc::Ioctl) << 8 | 118;
    let mut space = [12u32, 0, 0];
    // SAFETY: the structure has the size that it says, and outlives the call.
    let made = unsafe { libc::ioctl(iommufd.as_raw_fd(), ALLOC, &raw mut space) };
    ensure!(
        made == 0,
        "no address space: {}",
        io::Error::last_os_error()
    );
    let mut binding = [16u32, 0, iommufd.as_raw_fd().cast_unsigned(), 0];
    // SAFETY: as above.
    let bound = unsafe { libc::ioctl(device.as_raw_fd(), BIND, &raw mut binding) };
    ensure!(bound == 0, "not bound: {}", io::Error::last_os_error());
    Ok(())
}

/// One device of a group belongs to somebody else, which the user cannot find out.
fn taken(context: &Context) -> Result<()> {
    let [one, other] = [EDU_OF_TWO, EDU_OF_TWO + 1].map(|index| HostDevice::take(EDU, index));
    let (one, other) = (one?, other?);
    let dir = context.dir.join("owner");
    fs::create_dir(&dir)?;
    let more = |device: &HostDevice| json!({"devices": [{"path": device.path}]});
    let (_owner, _guest) = Gantry::boot(&dir, more(&one))?;
    let _given = Given::new(node(&other)?)?;
    let gantry = start(context, "taken", ENOUGH, more(&other))?;
    let number = group(&other)?;
    let number = number.file_name().unwrap_or_default().display();
    refused(
        &gantry,
        &[
            &format!("another process has a device of IOMMU group {number}"),
            "allow_unsafe_interrupts=1",
        ],
    )
}
