//! Landlock: restricts the process to the files that its configuration names.

use std::{
    cell::RefCell,
    error::Error,
    fs, io,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use landlock::{
    ABI, Access, AccessFs, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus,
};
use vmm_config::{FileAccess, VmConfig};
use vmm_snapshot::lazy::USERFAULTFD;

/// Available since Linux 6.2. Older kernels enforce what they support.
const VERSION: ABI = ABI::V3;

/// Whether a thread of this process has been restricted.
static RESTRICTED: AtomicBool = AtomicBool::new(false);

/// The process could not be restricted.
#[derive(Debug, thiserror::Error)]
pub enum LandlockError {
    /// The kernel does not support Landlock.
    #[error("this kernel has no Landlock: {instead}, or boot it with landlock in lsm=")]
    Unsupported {
        /// How to go without it.
        instead: &'static str,
    },
    /// A rule cannot be created.
    #[error("cannot allow access to {}", path.display())]
    Path {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: landlock::PathFdError,
    },
    /// The kernel rejected the ruleset.
    #[error("cannot restrict access to files")]
    Ruleset(#[from] landlock::RulesetError),
    /// A rule of the configuration is invalid.
    #[error("{0:?} is no access of a Landlock rule: use r, w or rw")]
    Access(String),
}

/// The Landlock version that this kernel supports and has enabled.
pub fn version() -> Option<u32> {
    /// `LANDLOCK_CREATE_RULESET_VERSION`
    const ASK: libc::c_uint = 1;
    let nothing = std::ptr::null::<libc::c_void>();
    // SAFETY: when asked for the version, the call reads no attributes.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, nothing, 0usize, ASK) };
    u32::try_from(version).ok().filter(|version| *version > 0)
}

/// Restricts the calling thread, and all threads that it starts from now on, to the files that the
/// configuration names, and to reading what is beneath `source`: the snapshot that the VM comes from, if it does.
pub fn restrict(config: &VmConfig, source: Option<&Path>) -> Result<(), LandlockError> {
    let mut rules = paths(config)?;
    rules.extend(source.map(restored).unwrap_or_default());
    enforce(rules, "use a VM without landlock_enable (--landlock)")
}

/// What a restore from a snapshot opens, on demand, too: without a capability, only the device allows it.
fn restored(source: &Path) -> Vec<Rule> {
    let device = Path::new(USERFAULTFD);
    let device = device.exists().then(|| (device.to_owned(), write()));
    let folder = (source.to_owned(), read());
    device.into_iter().chain([folder]).collect()
}

/// Restricts the calling thread, and all threads that it starts from now on, to files that any VM may need, to these
/// files and directories, and to reading the latter ones. Those that do not exist are left out. The error of a kernel
/// without Landlock says what to do `instead`.
pub fn restrict_to(
    paths: &[PathBuf],
    read_only: &[PathBuf],
    instead: &'static str,
) -> Result<(), LandlockError> {
    let mut rules = common();
    let whole = paths.iter().map(|path| (path.as_path(), change()));
    let tap = (Path::new("/dev/net/tun"), write());
    let read_only = read_only.iter().map(|path| (path.as_path(), read()));
    let rights = whole.chain([tap]).chain(read_only);
    let rights = rights.filter(|(path, _)| path.exists());
    rules.extend(rights.map(|(path, access)| (path.to_owned(), access)));
    enforce(rules, instead)
}

fn enforce(rules: Vec<Rule>, instead: &'static str) -> Result<(), LandlockError> {
    thread_local! {
        /// The rules that this thread enforced last.
        static IN_FORCE: RefCell<Vec<Rule>> = const { RefCell::new(Vec::new()) };
    }
    // Restrictions add up, and the kernel has room for 16 of them. The same rules again would restrict nothing more.
    if IN_FORCE.with_borrow(|in_force| *in_force == rules) {
        return Ok(());
    }
    let all = AccessFs::from_all(VERSION);
    let mut set = Ruleset::default().handle_access(all)?.create()?;
    for (path, access) in &rules {
        let fd = PathFd::new(path).map_err(|source| LandlockError::Path {
            path: path.clone(),
            source,
        })?;
        set = set.add_rule(PathBeneath::new(fd, *access))?;
    }
    devices::disk::lock::open_mounts();
    let status = set.restrict_self()?;
    if status.ruleset == RulesetStatus::NotEnforced {
        return Err(LandlockError::Unsupported { instead });
    }
    RESTRICTED.store(true, Ordering::Relaxed);
    IN_FORCE.set(rules);
    log::info!(
        "Landlock: access to files is restricted ({:?})",
        status.ruleset
    );
    Ok(())
}

/// What to tell a user whose request was denied access to a file, if Landlock may be the reason.
pub fn advice(causes: &[&(dyn Error + 'static)]) -> Option<&'static str> {
    let is_denied = |cause: &&(dyn Error + 'static)| {
        let error = cause.downcast_ref::<io::Error>();
        error.is_some_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
    };
    let is_restricted = RESTRICTED.load(Ordering::Relaxed);
    (is_restricted && causes.iter().any(is_denied)).then_some(
        "Landlock restricts this VMM to the files that its VM names: start it with a rule for any other \
         (--landlock-rules path=FILE,access=r or rw)",
    )
}

/// Access for reading.
fn read() -> landlock::BitFlags<AccessFs> {
    AccessFs::ReadFile | AccessFs::ReadDir
}

pub(crate) type Rule = (PathBuf, landlock::BitFlags<AccessFs>);

/// Access for reading and writing.
fn write() -> landlock::BitFlags<AccessFs> {
    read() | AccessFs::WriteFile | AccessFs::Truncate
}

/// Access for writing to files and sockets, and for creating and removing them, but not for reading other files.
fn create() -> landlock::BitFlags<AccessFs> {
    AccessFs::ReadDir
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::MakeSock
        | AccessFs::RemoveFile
}

/// Access for whatever a VMM does with files of its user: for reading and replacing them, too. It creates no device
/// files, FIFOs or links, and executes nothing.
fn change() -> landlock::BitFlags<AccessFs> {
    read() | create() | AccessFs::MakeDir
}

/// What any machine may open, now or later.
fn common() -> Vec<Rule> {
    let mut rules: Vec<Rule> = vec![
        (PathBuf::from("/dev/kvm"), write()),
        (PathBuf::from("/proc/meminfo"), read()),
    ];
    // For finding out how much of the host's memory the limits of the control groups leave.
    let groups = ["/proc/self/cgroup", "/sys/fs/cgroup"].map(|path| (path, read()));
    // Physical devices can be plugged in later. Without the driver there are none, now or later.
    // Whose the other devices of a group are, if one is refused, is in the groups' folder.
    let physical = [
        ("/dev/vfio", write()),
        ("/sys/devices", read()),
        (devices::vfio::IOMMUFD, write()),
        ("/sys/kernel/iommu_groups", read()),
        ("/dev/kmsg", read()),
    ];
    let physical = physical
        .into_iter()
        .filter(|_| Path::new("/dev/vfio").exists());
    // A gate port can be plugged in later.
    let others = [
        (vmfunc_gate::host::DEVICE, write()),
        ("/dev/ptmx", write()),
        ("/dev/pts", write()),
    ];
    let all = groups.into_iter().chain(physical).chain(others);
    let all = all.map(|(path, access)| (PathBuf::from(path), access));
    rules.extend(all.filter(|(path, _)| path.exists()));
    rules
}

/// Where access is needed to create a file or a socket: its directory. The file of a memory zone may itself be one.
/// A device or a named pipe is there already, and its directory has others. `None` if it is a pipe without a name
/// (`/dev/stdout`), which needs no rule.
fn place(path: &Path) -> Option<PathBuf> {
    let kind = fs::metadata(path).map(|file| file.file_type()).ok();
    let is_special =
        |kind: &fs::FileType| kind.is_char_device() || kind.is_block_device() || kind.is_fifo();
    match path.parent() {
        _ if kind.as_ref().is_some_and(is_special) => path.canonicalize().ok(),
        _ if kind.is_some_and(|kind| kind.is_dir()) => Some(path.to_owned()),
        Some(parent) if parent != Path::new("") => Some(parent.to_owned()),
        _ => Some(PathBuf::from(".")),
    }
}

/// Every path that the machine will open, with the access that it needs.
pub(crate) fn paths(config: &VmConfig) -> Result<Vec<Rule>, LandlockError> {
    let (read, write) = (read(), write());
    let mut rules = common();
    // A VM that was saved or comes from another host needs these only when it boots again, and may not have them here.
    let payload = &config.payload;
    let payload = (payload.firmware.iter())
        .chain(&payload.kernel)
        .chain(&payload.initramfs);
    let payload = payload.filter(|path| path.exists());
    rules.extend(payload.map(|path| (path.clone(), read)));
    let devices = config.all_devices().into_iter();
    for file in devices.flat_map(|(_, device)| device.files()) {
        let rule = match file.access {
            FileAccess::Read => (file.path, read),
            FileAccess::Write => (file.path, write),
            FileAccess::Create => match place(&file.path) {
                Some(place) => (place, create()),
                None => continue,
            },
        };
        if !rules.contains(&rule) {
            rules.push(rule);
        }
    }
    for zone in config.memory.zones.iter().flatten() {
        let place = zone.file.as_deref().and_then(place);
        rules.extend(place.map(|place| (place, read | create())));
    }
    let consoles = [
        (&config.serial.file, &config.serial.socket),
        (&config.debug_console.file, &None),
    ];
    for (file, socket) in consoles {
        let places = file.iter().chain(socket).filter_map(|path| place(path));
        rules.extend(places.map(|place| (place, create())));
    }
    for rule in config.landlock_rules.iter().flatten() {
        let access = match rule.access.as_str() {
            "r" => read,
            "w" | "rw" | "wr" => change(),
            other => return Err(LandlockError::Access(other.to_owned())),
        };
        rules.push((rule.path.clone(), access));
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_devices_file_is_permitted() {
        let disk = serde_json::json!({"payload": {}, "disks": [{"path": "/dev/null"}]});
        let rules = paths(&serde_json::from_value(disk).unwrap()).unwrap();
        let null = |(path, _): &Rule| path.as_os_str() == "/dev/null";
        assert!(rules.iter().any(null));
    }

    #[test]
    fn a_restore_on_demand_may_open_its_device() {
        let rules = restored(Path::new("/snapshot"));
        let allows = |path: &str| rules.iter().any(|(allowed, _)| allowed == Path::new(path));
        assert!(allows("/snapshot"));
        assert_eq!(
            allows("/dev/userfaultfd"),
            Path::new("/dev/userfaultfd").exists()
        );
    }

    #[test]
    fn the_same_restriction_can_be_asked_for_any_number_of_times() {
        if version().is_none() {
            eprintln!("not tested: this kernel has no Landlock");
            return;
        }
        let restricted = std::thread::spawn(|| {
            let paths = [std::env::temp_dir()];
            for _ in 0..20 {
                restrict_to(&paths, &[], "").unwrap();
            }
            // Other rules are enforced, too.
            fs::read_dir(&paths[0]).unwrap();
            restrict_to(&[], &[], "").unwrap();
            fs::read_dir(&paths[0]).unwrap_err();
        });
        restricted.join().unwrap();
    }

    #[test]
    fn a_created_file_opens_no_other_file_of_its_folder() {
        if version().is_none() {
            eprintln!("not tested: this kernel has no Landlock");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("saved")).unwrap();
        fs::write(at("other"), "secret").unwrap();
        let config: VmConfig = serde_json::from_value(serde_json::json!({
            "payload": {"kernel": "/k"},
            "serial": {"mode": "File", "file": at("serial.log")},
            "vsock": {"cid": 3, "socket": at("vsock")},
            "landlock_rules": [{"path": at("saved"), "access": "rw"}],
        }))
        .unwrap();
        let refused = std::thread::scope(|scope| {
            let restricted = scope.spawn(|| {
                restrict(&config, None).unwrap();
                // What the VM's devices do.
                let mut options = fs::OpenOptions::new();
                options.append(true).create(true);
                options.open(at("serial.log")).unwrap();
                fs::File::create(at("serial.log")).unwrap();
                let socket = devices::named_socket::NamedSocket::listen(&at("vsock")).unwrap();
                drop(socket);
                assert!(!at("vsock").exists());
                // What a snapshot does.
                fs::create_dir(at("saved/one")).unwrap();
                fs::write(at("saved/one/state.new"), "state").unwrap();
                fs::rename(at("saved/one/state.new"), at("saved/one/state")).unwrap();
                assert_eq!(fs::read(at("saved/one/state")).unwrap(), b"state");
                fs::remove_file(at("saved/one/state")).unwrap();
                // What says on which file system an image is was opened before.
                fs::read("/proc/self/mountinfo").unwrap_err();
                assert!(devices::disk::lock::knows_mounts());
                // What it has no reason to do.
                let mut refused = vec![fs::read(at("other")).map(drop)];
                for folder in ["", "saved/"] {
                    let path = |name: &str| at(&format!("{folder}{name}"));
                    refused.push(std::os::unix::fs::symlink("/", path("link")));
                    let name = std::ffi::CString::new(path("fifo").to_str().unwrap()).unwrap();
                    // SAFETY: a name that ends with a zero byte.
                    let made = unsafe { libc::mkfifo(name.as_ptr(), 0o600) };
                    refused.push(match made {
                        0 => Ok(()),
                        _ => Err(io::Error::last_os_error()),
                    });
                }
                refused
            });
            restricted.join().unwrap()
        });
        for outcome in refused {
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        }
    }

    #[test]
    fn a_console_on_a_device_opens_no_other_device() {
        let config = |file: &str| {
            let serial = serde_json::json!({"mode": "File", "file": file});
            let config = serde_json::json!({"payload": {"kernel": "/k"}, "serial": serial});
            paths(&serde_json::from_value(config).unwrap()).unwrap()
        };
        let places = |rules: Vec<Rule>| rules.into_iter().map(|(place, _)| place);
        let mut device = places(config("/dev/full"));
        assert!(device.any(|place| place == Path::new("/dev/full")));
        let mut all = places(config("/dev/full"));
        assert!(!all.any(|place| place == Path::new("/dev")));
        let (pipe, _other) = std::io::pipe().unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&pipe);
        assert_eq!(place(Path::new(&format!("/proc/self/fd/{number}"))), None);
    }

    #[test]
    fn memory_may_be_made_in_the_folder_that_it_names() {
        let folder = std::env::temp_dir();
        let config: VmConfig = serde_json::from_value(serde_json::json!({
            "payload": {"kernel": "/k"},
            "memory": {"size": 0, "zones": [
                {"id": "a", "size": 1 << 30, "file": folder},
                {"id": "b", "size": 1 << 30, "file": "/somewhere/file"},
            ]},
        }))
        .unwrap();
        let rules = paths(&config).unwrap();
        let allowed = |path: &Path| rules.iter().any(|(allowed, _)| allowed == path);
        assert!(allowed(&folder) && allowed(Path::new("/somewhere")));
        assert!(!allowed(Path::new("/")));
    }
}
