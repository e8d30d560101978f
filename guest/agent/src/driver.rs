//! The user-mode driver of NVIDIA's devices, which the host provides as a disk: an ext4 file system with the label
//! `GNV-VERSION` that `gantry-nvidia driver-image` has made.
//!
//! It is mounted read-only, and the loader of this machine finds its libraries from then on, as if they were installed.

use std::{
    ffi::CString,
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, MetadataExt},
    },
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
};

use crate::file_error::{FileError, failed};

/// Where the disk is mounted.
const MOUNT: &str = "/run/gantry/nvidia";
/// What names its libraries to the loader.
const CONFIGURATION: &str = "/etc/ld.so.conf.d/gantry-nvidia.conf";
const LABEL: &[u8] = b"GNV-";
/// The superblock of ext4 (linux/fs/ext4/ext4.h): where it is, its magic number, its label.
const SUPERBLOCK: u64 = 1024;
const MAGIC_AT: usize = 0x38;
const MAGIC: [u8; 2] = 0xef53u16.to_le_bytes();
const LABEL_AT: usize = 0x78;
const LABEL_LENGTH: usize = 16;
/// The longest manifest, in bytes.
const MANIFEST: u64 = 1 << 20;

/// The driver cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file operation failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// There is no such disk.
    #[error(
        "no disk has the label GNV-...: on the host, gantry-nvidia driver-image FILE makes one, and gantry --disk \
         path=FILE,readonly=on gives it to this machine"
    )]
    NoDisk,
    /// There are several, so that it is not known which one is right.
    #[error("several disks have drivers ({0}): name one by --disk")]
    Several(String),
    /// It is another disk.
    #[error("{} has no driver: its label is {label:?}, not GNV-VERSION", .disk.display())]
    Label {
        /// The disk.
        disk: PathBuf,
        /// Its label.
        label: String,
    },
    /// It is not complete.
    #[error("the driver's disk is damaged: {what} {path}; make it anew on the host")]
    Damaged {
        /// What is wrong.
        what: &'static str,
        /// With which file.
        path: String,
    },
    /// The loader does not know of it.
    #[error("ldconfig failed ({0}): programs find the driver by LD_LIBRARY_PATH={MOUNT}/lib only")]
    Loader(ExitStatus),
}

/// Uses the driver of a disk (`None`: the only one that has a driver), and tells `out` of it. Compares each file with its
/// checksum if `verify`, otherwise its size.
pub fn mount(disk: Option<&Path>, verify: bool, out: &mut dyn Write) -> Result<(), Error> {
    let (disk, label) = match disk {
        Some(disk) => match label(disk).map_err(failed("read", disk))? {
            Some(label) if label.starts_with(LABEL) => (disk.to_owned(), label),
            other => {
                return Err(Error::Label {
                    disk: disk.to_owned(),
                    label: String::from_utf8_lossy(&other.unwrap_or_default()).into_owned(),
                });
            }
        },
        None => find()?,
    };
    let target = Path::new(MOUNT);
    let is_mounted = source_of(target)? == Some(fs::metadata(&disk).map_or(0, |disk| disk.rdev()));
    if !is_mounted {
        // Another disk's: it would come up again when this one is unmounted.
        unmount_all_at(target)?;
        fs::create_dir_all(target).map_err(failed("make", target))?;
        mount_at(&disk, target).map_err(failed("mount", &disk))?;
    }
    if let Err(error) = check(target, &label, verify) {
        if !is_mounted {
            unmount(target)?;
        }
        return Err(error);
    }
    let configuration = Path::new(CONFIGURATION);
    let line = format!("{MOUNT}/lib\n");
    fs::write(configuration, line).map_err(failed("write", configuration))?;
    loader()?;
    let version = String::from_utf8_lossy(&label[LABEL.len()..]).into_owned();
    let _ = writeln!(
        out,
        "driver {version} of {} is in use: {MOUNT}/lib",
        disk.display()
    );
    Ok(())
}

/// Does not use a driver any longer.
pub fn unmount_all(out: &mut dyn Write) -> Result<(), Error> {
    let configuration = Path::new(CONFIGURATION);
    match fs::remove_file(configuration) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(failed("remove", configuration)(error).into());
        }
        _ => {}
    }
    loader()?;
    let target = Path::new(MOUNT);
    if unmount_all_at(target)? {
        let _ = writeln!(out, "{MOUNT} is not mounted any longer");
    }
    Ok(())
}

/// The only disk with a driver, and its label.
fn find() -> Result<(PathBuf, Vec<u8>), Error> {
    let folder = Path::new("/sys/class/block");
    let entries = fs::read_dir(folder).map_err(failed("read", folder))?;
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            let disk = Path::new("/dev").join(entry.ok()?.file_name());
            // One without a medium cannot be read.
            let label = label(&disk).ok()??;
            label.starts_with(LABEL).then_some((disk, label))
        })
        .collect();
    let first = found.pop().ok_or(Error::NoDisk)?;
    if found.is_empty() {
        return Ok(first);
    }
    found.push(first);
    let names = found.iter().map(|(disk, _)| disk.display().to_string());
    let mut names: Vec<_> = names.collect();
    names.sort();
    Err(Error::Several(names.join(", ")))
}

/// The label of a disk with an ext4 file system. `None`: it has another one, or none.
fn label(disk: &Path) -> io::Result<Option<Vec<u8>>> {
    let mut block = [0; LABEL_AT + LABEL_LENGTH];
    match File::open(disk)?.read_exact_at(&mut block, SUPERBLOCK) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let is_ext4 = block[MAGIC_AT..MAGIC_AT + 2] == MAGIC;
    let label = block[LABEL_AT..]
        .split(|byte| *byte == 0)
        .next()
        .unwrap_or_default();
    Ok(is_ext4.then(|| label.to_vec()))
}

/// The number of the device that is mounted at a folder. `None`: the folder is not there, or nothing is mounted.
fn source_of(folder: &Path) -> Result<Option<u64>, Error> {
    let device = |path: &Path| match fs::metadata(path) {
        Ok(metadata) => Ok(Some(metadata.dev())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("look at", path)(error)),
    };
    let above = folder.parent().unwrap_or(folder);
    let (own, above) = (device(folder)?, device(above)?);
    Ok(own.filter(|own| Some(*own) != above))
}

fn mount_at(disk: &Path, target: &Path) -> io::Result<()> {
    let text = |path: &Path| CString::new(path.as_os_str().as_bytes());
    let (disk, target) = (text(disk)?, text(target)?);
    let flags = libc::MS_RDONLY | libc::MS_NODEV | libc::MS_NOSUID;
    // SAFETY: valid strings, and no data.
    let result = unsafe {
        let none = std::ptr::null();
        libc::mount(
            disk.as_ptr(),
            target.as_ptr(),
            c"ext4".as_ptr(),
            flags,
            none,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn unmount(target: &Path) -> Result<(), Error> {
    let path = CString::new(target.as_os_str().as_bytes()).map_err(io::Error::from);
    let unmounted = path.and_then(|path| {
        // SAFETY: a valid string.
        if unsafe { libc::umount2(path.as_ptr(), 0) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    });
    Ok(unmounted.map_err(failed("unmount (programs may still use)", target))?)
}

/// Unmounts until nothing is mounted at a folder. Returns whether anything was.
fn unmount_all_at(target: &Path) -> Result<bool, Error> {
    let mut was_mounted = false;
    while source_of(target)?.is_some() {
        unmount(target)?;
        was_mounted = true;
    }
    Ok(was_mounted)
}

/// Compares a mounted driver with its manifest: the version, and each file's size; its checksum if `verify`.
fn check(folder: &Path, label: &[u8], verify: bool) -> Result<(), Error> {
    let path = folder.join("manifest");
    let mut manifest = String::new();
    let file = File::open(&path).map_err(failed("open", &path))?;
    let read = file.take(MANIFEST).read_to_string(&mut manifest);
    read.map_err(failed("read", &path))?;
    let damaged = |what, path: &str| Error::Damaged {
        what,
        path: path.to_owned(),
    };
    let mut lines = manifest.lines();
    let version = lines.next().and_then(|line| line.strip_prefix("version "));
    let version = version.ok_or_else(|| damaged("no version in", "manifest"))?;
    // A label may be too short for all of it.
    let labelled = &label[LABEL.len().min(label.len())..];
    if !version.as_bytes().starts_with(labelled) {
        return Err(damaged("another version in", "manifest"));
    }
    for line in lines {
        let mut words = line.splitn(3, ' ');
        let length = words.next().and_then(|word| word.parse::<u64>().ok());
        let sum = words
            .next()
            .and_then(|word| u32::from_str_radix(word, 16).ok());
        let (Some(length), Some(sum), Some(name)) = (length, sum, words.next()) else {
            return Err(damaged("a line without meaning in", "manifest"));
        };
        let path = folder.join(name);
        let read = |_| damaged("cannot read", name);
        if fs::metadata(&path).map_err(read)?.len() != length {
            return Err(damaged("another size of", name));
        }
        if verify && sum_of(&path).map_err(read)? != sum {
            return Err(damaged("other contents in", name));
        }
    }
    Ok(())
}

/// A file's CRC-32.
fn sum_of(path: &Path) -> io::Result<u32> {
    let mut file = File::open(path)?;
    let mut sum = crc32fast::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(sum.finalize()),
            read => sum.update(&buffer[..read]),
        }
    }
}

fn loader() -> Result<(), Error> {
    let program = Path::new("/sbin/ldconfig");
    let status = Command::new(program)
        .status()
        .map_err(failed("run", program))?;
    match status.success() {
        true => Ok(()),
        false => Err(Error::Loader(status)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_label_of_an_ext4_file_system_is_read() {
        let folder = tempfile::tempdir().expect("there is room");
        let path = folder.path().join("disk");
        let read = || label(&path).expect("it is there");
        fs::write(&path, [0; 100]).expect("there is room");
        assert_eq!(read(), None, "too short");
        fs::write(&path, vec![0; 1 << 20]).expect("there is room");
        assert_eq!(read(), None, "no file system");
        let made = Command::new("/usr/sbin/mke2fs")
            .args(["-q", "-F", "-t", "ext4", "-L", "GNV-580.159.04"])
            .arg(&path)
            .arg("4M")
            .status()
            .expect("it is installed");
        assert!(made.success());
        assert_eq!(read().as_deref(), Some(&b"GNV-580.159.04"[..]));
    }

    #[test]
    fn a_driver_that_differs_from_its_manifest_is_damaged() {
        let folder = tempfile::tempdir().expect("there is room");
        let write = |name: &str, text: &str| {
            fs::write(folder.path().join(name), text).expect("there is room");
        };
        let check = |label: &str| {
            check(folder.path(), label.as_bytes(), true)
                .err()
                .map(|error| error.to_string())
        };
        write("libcuda.so", "library");
        let sum = crc32fast::hash(b"library");
        let manifest = format!("version 580.159.04\n7 {sum:08x} libcuda.so\n");
        write("manifest", &manifest);
        assert_eq!(check("GNV-580.159.04"), None);
        for (label, manifest, part) in [
            ("GNV-580.159.05", manifest.as_str(), "another version"),
            ("GNV-580.159.04", "", "no version"),
            ("GNV-580.159.04", "version 580.159.04\n7 zz a\n", "a line"),
            ("GNV-580.159.04", "version 580.159.04\n7 0 a\n", "read a"),
            (
                "GNV-580.159.04",
                "version 580.159.04\n8 0 libcuda.so\n",
                "another size of libcuda.so",
            ),
            (
                "GNV-580.159.04",
                "version 580.159.04\n7 0 libcuda.so\n",
                "other contents in libcuda.so",
            ),
        ] {
            write("manifest", manifest);
            let error = check(label).expect("it is refused");
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_folder_on_which_nothing_is_mounted_has_no_source() {
        let folder = tempfile::tempdir().expect("there is room");
        let part = folder.path().join("part");
        assert_eq!(source_of(&part).expect("it may be missing"), None);
        fs::create_dir(&part).expect("there is room");
        assert_eq!(source_of(&part).expect("it is there"), None);
        let proc = source_of(Path::new("/proc")).expect("it is there");
        assert!(proc.is_some());
    }

    #[test]
    fn what_is_mounted_over_another_is_unmounted_with_it() {
        const FOLDER: &str = "GANTRY_TEST_MOUNT";
        if let Some(folder) = std::env::var_os(FOLDER) {
            let folder = Path::new(&folder);
            assert!(unmount_all_at(folder).expect("it is mounted"));
            assert_eq!(source_of(folder).expect("it is there"), None);
            assert!(!unmount_all_at(folder).expect("it is there"));
            return;
        }
        let folder = tempfile::tempdir().expect("there is room");
        let own = std::env::current_exe().expect("it is a file");
        // With mounts of its own.
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--mount", "sh", "-c"]);
        let can_mount = Command::new("unshare")
            .args(["--map-root-user", "--mount", "mount", "-t", "tmpfs", "a"])
            .arg(folder.path())
            .status();
        if !can_mount.is_ok_and(|status| status.success()) {
            eprintln!("not tested: nothing can be mounted here");
            return;
        }
        let script = "mount -t tmpfs a \"$1\" && mount -t tmpfs b \"$1\" && exec \"$0\" --exact \
                      driver::tests::what_is_mounted_over_another_is_unmounted_with_it";
        let status = command
            .arg(script)
            .arg(own)
            .arg(folder.path())
            .env(FOLDER, folder.path())
            .status();
        assert!(status.expect("it is there").success());
    }
}
