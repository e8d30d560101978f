//! The image of a disk with this host's user-mode driver, for guests.
//!
//! A guest's programs need the driver's libraries of exactly the version of the host's kernel module. The image is an
//! ext4 file system, which every guest's kernel knows, labelled with the version:
//!
//! | path | what |
//! |---|---|
//! | `lib/` | the libraries, and the links by which programs find them |
//! | `bin/` | `nvidia-smi` |
//! | `manifest` | the version, then a line for each file: its size in bytes, its CRC-32, its path |

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
};

/// Where drivers are installed, beside the folders that a user names.
const FOLDERS: [&str; 7] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/lib/nvidia",
    "/opt/nvidia/lib64",
];
const PROGRAM_FOLDERS: [&str; 3] = ["/usr/bin", "/usr/local/nvidia/bin", "/opt/nvidia/bin"];
const PROGRAMS: [&str; 1] = ["nvidia-smi"];

/// Libraries for computing and for looking at devices, without the end of their names. The first two have to be there.
const LIBRARIES: [&str; 11] = [
    "libcuda",
    "libnvidia-ml",
    "libnvidia-ptxjitcompiler",
    "libnvidia-nvvm",
    "libnvidia-nvvm70",
    "libnvidia-gpucomp",
    "libnvidia-cfg",
    "libnvidia-opencl",
    "libnvidia-tileiras",
    "libnvidia-pkcs11",
    "libnvidia-pkcs11-openssl3",
];
const REQUIRED: usize = 2;
const VIDEO: [&str; 3] = ["libnvcuvid", "libnvidia-encode", "libnvidia-opticalflow"];
const DEBUGGER: [&str; 1] = ["libcudadebugger"];

/// Bytes for the file system itself, and for each byte of files one more in so many.
const OWN_BYTES: u64 = 16 << 20;
const OWN_SHARE: u64 = 32;
/// The longest label of an ext4 file system.
const LABEL: usize = 16;

/// The image cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The driver's version cannot be read.
    #[error("cannot read the driver's version: is NVIDIA's kernel module loaded?")]
    Version(#[source] io::Error),
    /// A library was not found.
    #[error(
        "there is no {name}.so.{version} in {folders}: name the folder of the driver's libraries by --libraries"
    )]
    Missing {
        /// Its name.
        name: &'static str,
        /// The version of the kernel module.
        version: String,
        /// Where it was looked for.
        folders: String,
    },
    /// A file.
    #[error("cannot {action} {}", .path.display())]
    File {
        /// What failed.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The program that makes file systems is not there.
    #[error("cannot run mke2fs: install e2fsprogs")]
    NoTool(#[source] io::Error),
    /// It failed.
    #[error("mke2fs failed ({0}); it needs version 1.43 or newer")]
    Tool(ExitStatus),
}

/// What to put into an image.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Options {
    /// The image. One that is there is replaced when the new one is complete.
    #[arg(required_unless_present = "list")]
    pub image: Option<PathBuf>,
    /// Another folder to look for libraries in, before the usual ones.
    #[arg(long, value_name = "DIR")]
    pub libraries: Vec<PathBuf>,
    /// With the libraries that encode and decode video.
    #[arg(long)]
    pub video: bool,
    /// With the library that debuggers need.
    #[arg(long)]
    pub debugger: bool,
    /// Only print what would be in the image.
    #[arg(long)]
    pub list: bool,
}

/// The files of an image.
struct Contents {
    version: String,
    /// Where each file comes from, by its path in the image.
    files: BTreeMap<String, PathBuf>,
    /// The file that each link leads to, by its path in the image.
    links: BTreeMap<String, String>,
}

/// Makes an image of the driver of this version, and tells `out` of it.
///
/// # Errors
/// A library is missing, a file cannot be read or written, or there is no `mke2fs`.
pub fn make(options: &Options, version: &str, out: &mut impl Write) -> Result<(), Error> {
    let contents = find(options, version)?;
    let mut bytes = 0;
    for (path, source) in &contents.files {
        let length = fs::metadata(source)
            .map_err(failed("look at", source))?
            .len();
        bytes += length;
        let _ = writeln!(out, "{length:>12} {path}");
    }
    for (path, to) in &contents.links {
        let _ = writeln!(out, "{:>12} {path} -> {to}", "link");
    }
    let Some(image) = options.image.as_ref().filter(|_| !options.list) else {
        return Ok(());
    };
    let _ = writeln!(
        out,
        "copying {} files, {} MiB",
        contents.files.len(),
        bytes >> 20
    );
    write(&contents, bytes, image)?;
    let _ = writeln!(
        out,
        "{}: driver {version}; give it to VMs: gantry --disk path={},readonly=on",
        image.display(),
        image.display()
    );
    Ok(())
}

/// The label of an image with this version: `GNV-580.159.04`.
#[must_use]
pub fn label(version: &str) -> String {
    format!("GNV-{version}").chars().take(LABEL).collect()
}

fn failed<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> Error + 'a {
    move |source| Error::File {
        action,
        path: path.to_owned(),
        source,
    }
}

/// Looks for the files of an image.
fn find(options: &Options, version: &str) -> Result<Contents, Error> {
    let usual = FOLDERS.iter().map(PathBuf::from);
    let folders: Vec<PathBuf> = options.libraries.iter().cloned().chain(usual).collect();
    let mut contents = Contents {
        version: version.to_owned(),
        files: BTreeMap::new(),
        links: BTreeMap::new(),
    };
    let more = [
        (options.video, &VIDEO[..]),
        (options.debugger, &DEBUGGER[..]),
    ];
    let more = more.iter().filter(|(wanted, _)| *wanted);
    let more = more.flat_map(|(_, names)| *names);
    for (at, name) in LIBRARIES.iter().chain(more).enumerate() {
        let file = format!("{name}.so.{version}");
        let is_required = at < REQUIRED || at >= LIBRARIES.len();
        match folders.iter().find(|folder| folder.join(&file).is_file()) {
            Some(folder) => contents.add_library(folder, name, &file),
            None if is_required => {
                let folders = folders.iter().map(|folder| folder.display().to_string());
                return Err(Error::Missing {
                    name,
                    version: version.to_owned(),
                    folders: folders.collect::<Vec<_>>().join(", "),
                });
            }
            None => {}
        }
    }
    for name in PROGRAMS {
        let mut paths = PROGRAM_FOLDERS
            .iter()
            .map(|folder| Path::new(folder).join(name));
        // In containers a script of this name may stand before the program.
        if let Some(path) = paths.find(|path| is_program(path)) {
            contents.files.insert(format!("bin/{name}"), path);
        }
    }
    Ok(contents)
}

/// Whether a file is an ELF program.
fn is_program(path: &Path) -> bool {
    let mut start = [0; 4];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut start));
    read.is_ok() && start == *b"\x7fELF"
}

impl Contents {
    /// Adds a library, and the links beside it: `libcuda.so`, `libcuda.so.1`.
    fn add_library(&mut self, folder: &Path, name: &str, file: &str) {
        let entries = fs::read_dir(folder).into_iter().flatten();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let path = folder.join(file);
        let target = path.canonicalize().ok();
        let is_link = |other: &String| {
            let rest = other
                .strip_prefix(name)
                .and_then(|rest| rest.strip_prefix(".so"));
            let is_its = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
            is_its && other != file && folder.join(other).canonicalize().ok() == target
        };
        for link in names.filter(is_link) {
            self.links.insert(format!("lib/{link}"), file.to_owned());
        }
        self.files.insert(format!("lib/{file}"), path);
    }
}

/// Copies the files into a folder beside the image, and makes the image of it.
fn write(contents: &Contents, bytes: u64, image: &Path) -> Result<(), Error> {
    let folder = match image.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    fs::create_dir_all(folder).map_err(failed("make", folder))?;
    let staging = tempfile::Builder::new()
        .prefix(".gantry-driver-")
        .tempdir_in(folder)
        .map_err(failed("make a folder in", folder))?;
    let root = staging.path().join("root");
    for part in ["lib", "bin"] {
        let path = root.join(part);
        fs::create_dir_all(&path).map_err(failed("make", &path))?;
    }
    let mut manifest = format!("version {}\n", contents.version);
    for (path, source) in &contents.files {
        let target = root.join(path);
        let (length, sum) = copy(source, &target)?;
        manifest += &format!("{length} {sum:08x} {path}\n");
    }
    for (path, to) in &contents.links {
        let link = root.join(path);
        std::os::unix::fs::symlink(to, &link).map_err(failed("make the link", &link))?;
    }
    let path = root.join("manifest");
    fs::write(&path, manifest).map_err(failed("write", &path))?;
    let made = staging.path().join("image");
    make_file_system(&root, &contents.version, bytes, &made)?;
    fs::rename(&made, image).map_err(failed("replace", image))
}

/// Copies a file. Answers its length and its CRC-32.
fn copy(from: &Path, to: &Path) -> Result<(u64, u32), Error> {
    let mut source = File::open(from).map_err(failed("open", from))?;
    let mut target = File::create(to).map_err(failed("create", to))?;
    let mode = source
        .metadata()
        .map_err(failed("look at", from))?
        .permissions();
    target
        .set_permissions(mode)
        .map_err(failed("set the permissions of", to))?;
    let mut sum = crc32fast::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut length = 0;
    loop {
        let read = source.read(&mut buffer).map_err(failed("read", from))?;
        if read == 0 {
            return Ok((length, sum.finalize()));
        }
        let bytes = &buffer[..read];
        sum.update(bytes);
        target.write_all(bytes).map_err(failed("write", to))?;
        length += read as u64;
    }
}

fn make_file_system(root: &Path, version: &str, bytes: u64, image: &Path) -> Result<(), Error> {
    let kib = (bytes + bytes / OWN_SHARE + OWN_BYTES) >> 10;
    let made = Command::new("mke2fs")
        // Where root's PATH has no folder of administration.
        .env(
            "PATH",
            format!(
                "{}:/usr/sbin:/sbin",
                std::env::var("PATH").unwrap_or_default()
            ),
        )
        .args(["-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0"])
        .args(["-E", "root_owner=0:0", "-L", &label(version), "-d"])
        .args([root, image])
        .arg(format!("{kib}k"))
        .status()
        .map_err(Error::NoTool)?;
    if made.success() {
        Ok(())
    } else {
        Err(Error::Tool(made))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION: &str = "580.1.2";

    /// A folder with libraries of this and of another version.
    fn driver() -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("there is room");
        for (name, version) in [
            ("libcuda", VERSION),
            ("libnvidia-ml", VERSION),
            ("libnvidia-ptxjitcompiler", VERSION),
            ("libcuda", "570.1"),
        ] {
            let path = folder.path().join(format!("{name}.so.{version}"));
            fs::write(path, [name, version].concat().repeat(1000)).expect("there is room");
        }
        for (link, to) in [
            ("libcuda.so.1", "libcuda.so.580.1.2"),
            ("libcuda.so", "libcuda.so.1"),
            ("libcuda.so.0", "libcuda.so.570.1"),
            ("libcudart.so.1", "libcuda.so.580.1.2"),
        ] {
            std::os::unix::fs::symlink(to, folder.path().join(link)).expect("it is new");
        }
        folder
    }

    fn options(folder: &Path) -> Options {
        Options {
            libraries: vec![folder.to_owned()],
            ..Options::default()
        }
    }

    fn debugfs(image: &Path, command: &str) -> String {
        let output = Command::new("/usr/sbin/debugfs")
            .args(["-R", command])
            .arg(image)
            .output()
            .expect("it comes with mke2fs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    #[test]
    fn an_image_has_the_libraries_of_one_version_their_links_and_a_manifest() {
        let folder = driver();
        let target = tempfile::tempdir().expect("there is room");
        let image = target.path().join("nvidia.img");
        let options = Options {
            image: Some(image.clone()),
            ..options(folder.path())
        };
        make(&options, VERSION, &mut io::sink()).expect("all is there");
        let left = fs::read_dir(target.path()).expect("it is there").count();
        assert_eq!(left, 1, "nothing but the image");
        assert_eq!(
            debugfs(&image, "stats -h").lines().next(),
            Some("Filesystem volume name:   GNV-580.1.2")
        );
        let listed = debugfs(&image, "ls -p lib");
        let names: Vec<_> = listed
            .lines()
            .filter_map(|line| line.split('/').nth(5))
            .filter(|name| name.starts_with("lib"))
            .collect();
        assert_eq!(
            names,
            [
                "libcuda.so",
                "libcuda.so.1",
                "libcuda.so.580.1.2",
                "libnvidia-ml.so.580.1.2",
                "libnvidia-ptxjitcompiler.so.580.1.2"
            ]
        );
        let library = "libcuda580.1.2".repeat(1000);
        assert_eq!(debugfs(&image, "cat lib/libcuda.so.580.1.2"), library);
        let manifest = debugfs(&image, "cat manifest");
        let sum = crc32fast::hash(library.as_bytes());
        let line = format!("{} {sum:08x} lib/libcuda.so.580.1.2", library.len());
        assert!(manifest.starts_with("version 580.1.2\n"), "{manifest}");
        assert!(manifest.lines().any(|other| other == line), "{manifest}");
    }

    #[test]
    fn a_driver_of_another_version_is_missing_and_named() {
        let folder = driver();
        let error = make(&options(folder.path()), "590.1", &mut io::sink());
        let text = error.expect_err("it is not there").to_string();
        assert!(text.contains("libcuda.so.590.1"), "{text}");
        assert!(text.contains("--libraries"), "{text}");
        let asked = Options {
            video: true,
            ..options(folder.path())
        };
        let error = make(&asked, VERSION, &mut io::sink()).expect_err("there is none");
        assert!(error.to_string().contains("libnvcuvid"), "{error}");
    }

    #[test]
    fn a_script_is_no_program() {
        let folder = tempfile::tempdir().expect("there is room");
        let path = folder.path().join("nvidia-smi");
        assert!(!is_program(&path), "there is none");
        fs::write(&path, "#!/bin/sh\nexec /opt/nvidia-smi").expect("there is room");
        assert!(!is_program(&path));
        assert!(is_program(&std::env::current_exe().expect("it is known")));
    }

    #[test]
    fn a_label_is_the_version() {
        assert_eq!(label("580.159.04"), "GNV-580.159.04");
        assert_eq!(label("1580.1159.004"), "GNV-1580.1159.00");
    }
}
