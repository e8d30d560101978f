//! Finds the processes that have a device's files open: the driver does not release the device as long as any process
//! does. And those that have a port's memory mapped, which must not become other programs' as long as any process has.

use std::{
    collections::BTreeSet,
    fmt, fs,
    io::{self, BufRead, BufReader},
    os::{
        fd::OwnedFd,
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
    process,
    sync::Once,
};

use crate::tracked::Tracked;

const PROC: &str = "/proc";
/// The maximum number of generations of parent processes to follow.
const GENERATIONS: usize = 64;
/// The maximum number of descriptors and mappings to look at, for all processes together: the agent serves nobody
/// meanwhile.
const MOST: usize = 1 << 18;
/// The same for mappings of a port's memory, which become another program's if one is not found.
const MOST_MAPPINGS: usize = 1 << 22;

/// A process that has a file of a device open or mapped.
#[derive(Debug, PartialEq, Eq)]
pub struct Holder {
    process: u32,
    name: String,
    file: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (process, name, file) = (self.process, &self.name, &self.file);
        write!(f, "PID {process} ({name}) has {file} open")
    }
}

impl Holder {
    /// The process's ID.
    pub fn process(&self) -> u32 {
        self.process
    }
}

/// The files of devices.
#[derive(Debug, Default)]
pub struct Files {
    /// The files in the devices' sysfs folders, by file system and inode number.
    inodes: BTreeSet<(u64, u64)>,
    /// The paths of these folders.
    folders: Vec<PathBuf>,
    /// The drivers' major numbers: the kernel does not show their nodes in a device's folder.
    majors: BTreeSet<u32>,
}

/// Finds the processes that have files of these devices open, or have mapped those in sysfs. Reports one file per
/// process, and ignores `own` and its descendants.
pub fn of(devices: &Tracked, own: u32) -> Vec<Holder> {
    let files = Files::of(devices.folders());
    find(Path::new(PROC), &files, own, MOST)
}

/// Finds a process that has one of these files mapped, other than this one and its descendants. Looks first at the one
/// that had it before.
pub fn mapping(files: &Files, before: Option<&Holder>) -> Option<Holder> {
    static TOLD: Once = Once::new();
    let mut left = MOST_MAPPINGS;
    let mut look = |folder: &Path| files.mapped_in(folder, &mut left);
    let (proc, own) = (Path::new(PROC), process::id());
    let again = before.and_then(|before| holder(proc, before.process, own, &mut look).ok()?);
    if again.is_some() {
        return again;
    }
    let (holders, hidden) = search(proc, own, look);
    if hidden > 0 || left == 0 {
        TOLD.call_once(|| tell(hidden, left));
    }
    holders.into_iter().next()
}

fn find(proc: &Path, files: &Files, own: u32, mut left: usize) -> Vec<Holder> {
    let look = |folder: &Path| match files.open_in(folder, &mut left)? {
        Some(file) => Ok(Some(file)),
        None => files.mapped_in(folder, &mut left),
    };
    let (holders, hidden) = search(proc, own, look);
    tell(hidden, left);
    holders
}

/// A process, if it has a file as `look` says, and is neither `own` nor a descendant.
fn holder(
    proc: &Path,
    process: u32,
    own: u32,
    look: impl FnOnce(&Path) -> io::Result<Option<String>>,
) -> io::Result<Option<Holder>> {
    let folder = proc.join(process.to_string());
    let Some(file) = look(&folder)?.filter(|_| !descends(proc, process, own)) else {
        return Ok(None);
    };
    let name = base::proc::read(folder.join("comm")).unwrap_or_default();
    Ok(Some(Holder {
        process,
        name: name.trim().to_owned(),
        file,
    }))
}

/// All such processes, and the number of those that may not be looked at.
fn search(
    proc: &Path,
    own: u32,
    mut look: impl FnMut(&Path) -> io::Result<Option<String>>,
) -> (Vec<Holder>, u32) {
    let entries = fs::read_dir(proc).into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let mut hidden = 0;
    let mut holders = Vec::new();
    for process in processes {
        match holder(proc, process, own, &mut look) {
            Ok(found) => holders.extend(found),
            // The process may have ended.
            Err(error) => hidden += u32::from(error.kind() == io::ErrorKind::PermissionDenied),
        }
    }
    holders.sort_by_key(|holder| holder.process);
    (holders, hidden)
}

/// Tells of what could not be looked at.
fn tell(hidden: u32, left: usize) {
    if hidden > 0 {
        base::note!(
            "gantry-agent: what {hidden} processes have open is hidden from the agent, which lacks \
             CAP_SYS_PTRACE: one that has the device open is not told of"
        );
    }
    if left == 0 {
        base::note!(
            "gantry-agent: processes have more files open than the agent looks at: one that has the \
             device open may not be told of"
        );
    }
}

/// Whether a process is `from` or one of its descendants.
fn descends(proc: &Path, process: u32, from: u32) -> bool {
    let mut at = process;
    for _ in 0..GENERATIONS {
        match at {
            _ if at == from => return true,
            0 | 1 => return false,
            _ => {}
        }
        // The name is in parentheses, and may contain parentheses and spaces itself.
        let stat = base::proc::read(proc.join(at.to_string()).join("stat")).unwrap_or_default();
        let rest = stat.rsplit(") ").next().unwrap_or_default();
        let parent = rest.split(' ').nth(1).and_then(|text| text.parse().ok());
        let Some(parent) = parent else { return false };
        at = parent;
    }
    false
}

impl Files {
    /// These files, which are open here.
    pub fn of_open<'a>(files: impl Iterator<Item = &'a OwnedFd>) -> io::Result<Self> {
        let number = |file: &OwnedFd| {
            let found = fs::File::from(file.try_clone()?).metadata()?;
            Ok((found.dev(), found.ino()))
        };
        Ok(Self {
            inodes: files.map(number).collect::<io::Result<_>>()?,
            ..Self::default()
        })
    }

    /// Whether a process has one of the files mapped. One that has ended has not.
    pub fn are_mapped_by(&self, process: u32) -> io::Result<bool> {
        let folder = Path::new(PROC).join(process.to_string());
        let mapped = self.mapped_in(&folder, &mut MOST_MAPPINGS.clone())?;
        Ok(mapped.is_some())
    }

    fn of(folders: impl Iterator<Item = PathBuf>) -> Self {
        let mut files = Self::default();
        let numbers = fs::read_to_string(Path::new(PROC).join("devices")).unwrap_or_default();
        // A device that is gone has no files.
        for folder in folders.filter_map(|folder| fs::canonicalize(folder).ok()) {
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                if let Ok(found) = entry.metadata()
                    && found.is_file()
                {
                    files.inodes.insert((found.dev(), found.ino()));
                }
            }
            if let Ok(driver) = fs::read_link(folder.join("driver"))
                && let Some(name) = driver.file_name().and_then(|name| name.to_str())
            {
                files.majors.extend(majors(&numbers, name));
            }
            files.folders.push(folder);
        }
        files
    }

    /// Whether a file of this name may be one of the devices' files. Asking for more may block on other file systems.
    fn may_contain(&self, name: &Path) -> bool {
        let mut places = self.folders.iter().map(PathBuf::as_path);
        name.starts_with("/dev") || places.any(|place| name.starts_with(place))
    }

    /// Finds one of the devices' files that a process has open, looking at no more than `left` descriptors.
    fn open_in(&self, process: &Path, left: &mut usize) -> std::io::Result<Option<String>> {
        for entry in fs::read_dir(process.join("fd"))?.flatten() {
            let Some(fewer) = left.checked_sub(1) else {
                break;
            };
            *left = fewer;
            let Ok(target) = fs::read_link(entry.path()) else {
                continue;
            };
            if self.may_contain(&target)
                && let Ok(found) = fs::metadata(entry.path())
                && self.contains(&found)
            {
                return Ok(Some(target.to_string_lossy().into_owned()));
            }
        }
        Ok(None)
    }

    fn contains(&self, found: &fs::Metadata) -> bool {
        let kind = found.file_type();
        let class = match (kind.is_char_device(), kind.is_block_device()) {
            (true, _) => "char",
            (_, true) => "block",
            _ => return self.inodes.contains(&(found.dev(), found.ino())),
        };
        let (major, minor) = (libc::major(found.rdev()), libc::minor(found.rdev()));
        match fs::canonicalize(format!("/sys/dev/{class}/{major}:{minor}")) {
            Ok(at) => self.folders.iter().any(|folder| at.starts_with(folder)),
            Err(_) => class == "char" && self.majors.contains(&major),
        }
    }

    /// Finds a sysfs file of the devices that a process has mapped, even if it has closed the file.
    fn mapped_in(&self, process: &Path, left: &mut usize) -> io::Result<Option<String>> {
        let (found, are_any) = self.among_mappings(process, left)?;
        if are_any {
            return Ok(found);
        }
        // The first thread may have ended before others, which have the mappings still.
        let threads = fs::read_dir(process.join("task"));
        for thread in threads.into_iter().flatten().flatten() {
            let (found, _) = self.among_mappings(&thread.path(), left)?;
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// The same for a thread, and whether it has any mappings. The format of a line is `range access offset device inode
    /// path`.
    fn among_mappings(
        &self,
        thread: &Path,
        left: &mut usize,
    ) -> io::Result<(Option<String>, bool)> {
        let maps = match fs::File::open(thread.join("maps")) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => {
                return Ok((None, false));
            }
            maps => BufReader::new(maps?),
        };
        let before = *left;
        let lines = maps.split(b'\n').map_while(Result::ok).take(*left);
        let mut lines = lines.inspect(|_| *left -= 1);
        let found = lines.find_map(|line| {
            let line = String::from_utf8_lossy(&line);
            let mut fields = line.split_whitespace();
            let (device, inode) = (fields.nth(3)?, fields.next()?);
            let (major, minor) = device.split_once(':')?;
            let number = |text| u32::from_str_radix(text, 16).ok();
            let device = libc::makedev(number(major)?, number(minor)?);
            let file = (device, inode.parse().ok()?);
            self.inodes.contains(&file).then(|| {
                let path: Vec<_> = fields.collect();
                path.join(" ")
            })
        });
        drop(lines);
        Ok((found, *left < before))
    }
}

/// The major numbers of character devices in the kernel's list that belong to a driver, or to a part of it (nvidia,
/// nvidia-uvm).
fn majors(list: &str, driver: &str) -> impl Iterator<Item = u32> {
    let lines = list.lines().take_while(|line| !line.starts_with("Block"));
    let named = lines.filter_map(|line| line.trim().split_once(' '));
    let own = named.filter(move |(_, name)| name.trim().starts_with(driver));
    own.filter_map(|(number, _)| number.parse().ok())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::process::{self, Child, Command, Stdio};

    use super::*;

    /// A process that has a file open and reports so.
    struct Open(Child);

    impl Open {
        fn file(path: &Path) -> Self {
            let mut child = Command::new("sh")
                .args(["-c", "exec 9<\"$0\" && echo open && exec sleep 1000"])
                .arg(path)
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut line = String::new();
            let stdout = child.stdout.take().unwrap();
            BufReader::new(stdout).read_line(&mut line).unwrap();
            assert_eq!(line, "open\n");
            Self(child)
        }
    }

    impl Drop for Open {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn whoever_has_a_file_of_the_device_open_is_named_but_what_the_agent_has_started_is_not() {
        let root = tempfile::tempdir().unwrap();
        let device = root.path().join("devices/pci0000:00/0000:00:09.0");
        fs::create_dir_all(&device).unwrap();
        let file = device.join("resource0");
        for path in [&file, &device.with_extension("other")] {
            fs::write(path, "").unwrap();
        }
        let files = Files::of([device.clone(), root.path().join("gone")].into_iter());
        let nobody = u32::MAX;
        assert_eq!(find(Path::new(PROC), &files, nobody, MOST), []);
        let _other = Open::file(&device.with_extension("other"));
        let open = Open::file(&file);
        let holders = find(Path::new(PROC), &files, nobody, MOST);
        let expected = format!("PID {} (sleep) has {} open", open.0.id(), file.display());
        let said: Vec<_> = holders.iter().map(ToString::to_string).collect();
        assert_eq!(said, [expected]);
        assert_eq!(find(Path::new(PROC), &files, process::id(), MOST), []);
        assert!(descends(Path::new(PROC), open.0.id(), process::id()));
        assert!(!descends(Path::new(PROC), process::id(), open.0.id()));
        drop(open);
        assert_eq!(find(Path::new(PROC), &files, nobody, MOST), []);
    }

    #[test]
    fn no_file_system_is_asked_that_has_no_files_of_devices() {
        let folder = PathBuf::from("/sys/devices/pci0000:00/0000:00:09.0");
        let files = Files {
            folders: vec![folder.clone()],
            ..Files::default()
        };
        for name in ["/dev/nvidia0", "/dev/dri/card0"] {
            assert!(files.may_contain(Path::new(name)), "{name}");
        }
        assert!(files.may_contain(&folder.join("resource0")));
        for name in [
            "/home/u/dev/x",
            "/mnt/devices/pci/x",
            "/device",
            "socket:[1]",
        ] {
            assert!(!files.may_contain(Path::new(name)), "{name}");
        }
    }

    #[test]
    fn as_many_descriptors_and_mappings_are_looked_at_as_are_left() {
        let files = Files::default();
        let own = Path::new(PROC).join("self");
        let mut left = 2;
        assert_eq!(files.open_in(&own, &mut left).unwrap(), None);
        assert_eq!(left, 0);
        let mut left = 2;
        assert_eq!(files.mapped_in(&own, &mut left).unwrap(), None);
        assert_eq!(left, 0);
    }

    #[test]
    fn a_file_that_is_mapped_and_closed_counts() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("resource0");
        fs::write(&file, [0; 4096]).unwrap();
        let files = Files::of([root.path().to_owned()].into_iter());
        let own = Path::new(PROC).join("self");
        assert_eq!(files.mapped_in(&own, &mut MOST.clone()).unwrap(), None);
        let opened = fs::OpenOptions::new().read(true).write(true).open(&file);
        let mapping =
            base::Mapping::shared(opened.unwrap(), 0, 4096, base::Access::ReadWrite).unwrap();
        assert_eq!(
            files.mapped_in(&own, &mut MOST.clone()).unwrap(),
            Some(file.display().to_string())
        );
        drop(mapping);
        assert_eq!(files.mapped_in(&own, &mut MOST.clone()).unwrap(), None);
    }

    #[test]
    fn what_is_mapped_counts_until_the_last_thread_has_ended() {
        extern "C" fn stay(_: *mut libc::c_void) -> *mut libc::c_void {
            loop {
                // SAFETY: a call without pointers.
                unsafe { libc::pause() };
            }
        }
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let mapping = base::Mapping::shared(&file, 0, 4096, base::Access::ReadWrite).unwrap();
        let file = OwnedFd::from(file);
        let files = Files::of_open([&file].into_iter()).unwrap();
        // SAFETY: the child starts a thread, and ends its first one.
        let child = unsafe {
            let child = libc::fork();
            if child == 0 {
                let mut thread = 0;
                let none = std::ptr::null_mut();
                libc::pthread_create(&raw mut thread, none, stay, none.cast());
                libc::syscall(libc::SYS_exit, 0);
            }
            child
        };
        let maps = format!("/proc/{child}/maps");
        while !fs::read(&maps).unwrap_or_default().is_empty() {
            std::thread::yield_now();
        }
        assert!(files.are_mapped_by(child.cast_unsigned()).unwrap());
        // SAFETY: calls without pointers but to a local value.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        }
        assert!(!files.are_mapped_by(child.cast_unsigned()).unwrap());
        drop(mapping);
    }

    #[test]
    fn a_drivers_numbers_are_those_of_all_its_parts() {
        let list = "Character devices:\n  1 mem\n195 nvidia\n508 nvidia-uvm\n226 drm\n\n\
                    Block devices:\n259 nvidia-block\n";
        assert_eq!(majors(list, "nvidia").collect::<Vec<_>>(), [195, 508]);
    }
}
