//! Landlock: restricts the process to the files that its configuration names.

use std::{
    cell::RefCell,
    error::Error,
    io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use landlock::{
    ABI, Access, AccessFs, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus,
};

use crate::{
    config::{FileAccess, VmConfig},
    snapshot::lazy::USERFAULTFD,
};

/// Available since Linux 6.2. Older kernels enforce what they support.
const VERSION: ABI = ABI::V3;

/// Whether a thread of this process has been restricted.
static RESTRICTED: AtomicBool = AtomicBool::new(false);

/// The process could not be restricted.
#[derive(Debug, thiserror::Error)]
pub enum LandlockError {
    /// The kernel does not support Landlock.
    #[error(
        "this kernel has no Landlock: go without --landlock and --paths, or boot it with landlock in lsm="
    )]
    Unsupported,
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
    enforce(rules)
}

/// What a restore from a snapshot opens, on demand, too: without a capability, only the device allows it.
fn restored(source: &Path) -> Vec<Rule> {
    let device = Path::new(USERFAULTFD);
    let device = device.exists().then(|| (device.to_owned(), write()));
    let folder = (source.to_owned(), read());
    device.into_iter().chain([folder]).collect()
}

/// Restricts the calling thread, and all threads that it starts from now on, to files that any VM may need, to these
/// files and directories, and to reading the latter ones. Those that do not exist are left out.
pub fn restrict_to(paths: &[PathBuf], read_only: &[PathBuf]) -> Result<(), LandlockError> {
    let mut rules = common();
    let all = AccessFs::from_all(VERSION);
    let whole = paths.iter().map(|path| (path.as_path(), all));
    let tap = (Path::new("/dev/net/tun"), all);
    let read_only = read_only.iter().map(|path| (path.as_path(), read()));
    let rights = whole.chain([tap]).chain(read_only);
    let rights = rights.filter(|(path, _)| path.exists());
    rules.extend(rights.map(|(path, access)| (path.to_owned(), access)));
    enforce(rules)
}

fn enforce(rules: Vec<Rule>) -> Result<(), LandlockError> {
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
    let status = set.restrict_self()?;
    if status.ruleset == RulesetStatus::NotEnforced {
        return Err(LandlockError::Unsupported);
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

/// Every path that the machine will open, with the access that it needs.
pub(crate) fn paths(config: &VmConfig) -> Result<Vec<Rule>, LandlockError> {
    let (read, write) = (read(), write());
    let mut rules = common();
    // To create a file, access to its directory is needed. The file of a memory zone may itself be
    // a directory.
    let created = |path: &Path| {
        let directory = match path.parent() {
            _ if path.is_dir() => path,
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        (directory.to_owned(), AccessFs::from_all(VERSION))
    };
    // A VM that was saved or comes from another host needs these only when it boots again, and may not have them here.
    let payload = &config.payload;
    let payload = payload.kernel.iter().chain(&payload.initramfs);
    let payload = payload.filter(|path| path.exists());
    rules.extend(payload.map(|path| (path.clone(), read)));
    let devices = config.all_devices().into_iter();
    for file in devices.flat_map(|(_, device)| device.files()) {
        let rule = match file.access {
            FileAccess::Read => (file.path, read),
            FileAccess::Write => (file.path, write),
            FileAccess::Create => created(&file.path),
        };
        if !rules.contains(&rule) {
            rules.push(rule);
        }
    }
    for zone in config.memory.zones.iter().flatten() {
        rules.extend(zone.file.iter().map(|path| created(path)));
    }
    let consoles = [
        (&config.serial.file, &config.serial.socket),
        (&config.debug_console.file, &None),
    ];
    for (file, socket) in consoles {
        rules.extend(file.iter().chain(socket).map(|path| created(path)));
    }
    for rule in config.landlock_rules.iter().flatten() {
        let access = match rule.access.as_str() {
            "r" => read,
            "w" | "rw" | "wr" => AccessFs::from_all(VERSION),
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
                restrict_to(&paths, &[]).unwrap();
            }
            // Other rules are enforced, too.
            std::fs::read_dir(&paths[0]).unwrap();
            restrict_to(&[], &[]).unwrap();
            std::fs::read_dir(&paths[0]).unwrap_err();
        });
        restricted.join().unwrap();
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
