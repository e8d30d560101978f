//! What comes from Debian: packages that are installed, and packages that are only unpacked.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Mutex,
};

use anyhow::{Context, Result, bail, ensure};
use base::Unpoisoned;

/// Everything downloaded and built that is kept between runs: `$GANTRY_CACHE` or `~/.cache/gantry`.
#[derive(Clone, Debug)]
pub struct Cache {
    /// The folder.
    pub dir: PathBuf,
}

impl Cache {
    /// Opens the cache, creating it if needed.
    pub fn open() -> Result<Self> {
        let dir = match (std::env::var_os("GANTRY_CACHE"), std::env::var_os("HOME")) {
            (Some(dir), _) => PathBuf::from(dir),
            (None, Some(home)) => PathBuf::from(home).join(".cache/gantry"),
            (None, None) => bail!("neither GANTRY_CACHE nor HOME is set: set one"),
        };
        fs::create_dir_all(&dir)
            .with_context(|| format!("cannot create the cache folder {}", dir.display()))?;
        Ok(Self { dir })
    }

    /// The contents of a Debian package, unpacked into a folder of the cache without being
    /// installed. The newest version known to the package manager is fetched once.
    pub fn unpacked(&self, package: &str) -> Result<PathBuf> {
        self.made(package, |work| self.unpack(package, work))
    }

    /// A folder of the cache, which `make` fills once.
    pub fn made(&self, name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let kept = self.dir.join("packages").join(name);
        if kept.join(".complete").exists() {
            return Ok(kept);
        }
        let work = self.dir.join("packages").join(format!("{name}.partial"));
        for old in [&work, &kept] {
            if old.exists() {
                fs::remove_dir_all(old)?;
            }
        }
        fs::create_dir_all(&work)?;
        make(&work)?;
        fs::write(work.join(".complete"), "")?;
        fs::rename(&work, &kept)?;
        Ok(kept)
    }

    /// Fetches a package (`name` or `name=version`), and unpacks it into a folder.
    pub fn unpack(&self, package: &str, work: &Path) -> Result<()> {
        update_lists(&self.dir)?;
        run(Command::new("apt-get").args(["download", package]).current_dir(work)).with_context(
            || format!("cannot download the Debian package {package}: check the network and /etc/apt/sources.list"),
        )?;
        let deb = fs::read_dir(work)?
            .filter_map(Result::ok)
            .map(|entry| entry.path())
            .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
            .with_context(|| format!("apt-get downloaded nothing for {package}"))?;
        run(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(work))?;
        fs::remove_file(deb)?;
        Ok(())
    }

    /// Fetches a file of Debian's archive: its path there, and its SHA-256.
    pub fn fetch(&self, (path, hash): (&str, &str), to: &Path) -> Result<()> {
        update_lists(&self.dir)?;
        let mut sites = Command::new("apt-get");
        sites.args(["indextargets", "--format", "$(REPO_URI)"]);
        sites.args(["Label: Debian", "Component: main", "ShortDesc: Packages"]);
        let sites = output(&mut sites)?;
        let site = sites
            .lines()
            .next()
            .context("apt knows no site of Debian")?;
        let mut fetch = Command::new("/usr/lib/apt/apt-helper");
        fetch
            .args(["download-file", &format!("{site}{path}")])
            .arg(to);
        run(fetch.arg(format!("SHA256:{hash}")))
            .with_context(|| format!("cannot download {path}: check the network"))
    }

    /// What building modules for a kernel needs: its headers, and those that it shares with other
    /// kernels. Returns the folder to pass to `make -C`.
    pub fn headers(&self, release: &str) -> Result<PathBuf> {
        let name = format!("linux-headers-{release}");
        let kept = self.dir.join("packages").join(&name);
        let folder = |root: &Path| root.join("usr/src").join(&name);
        self.made(&name, |work| {
            self.unpack(&name, work)?;
            // One line: the path of the common headers' Makefile.
            let makefile = fs::read_to_string(folder(work).join("Makefile"))?;
            let common = makefile
                .trim()
                .strip_prefix("include /usr/src/")
                .and_then(|rest| rest.strip_suffix("/Makefile"))
                .with_context(|| format!("{name} is not made as expected: {makefile}"))?;
            self.unpack(common, work)?;
            // The link points into the package with the build's programs.
            let scripts = fs::read_link(folder(work).join("scripts"))?;
            let programs = scripts
                .iter()
                .find_map(|part| {
                    part.to_str()
                        .filter(|part| part.starts_with("linux-kbuild-"))
                })
                .with_context(|| format!("{name} names no programs: {}", scripts.display()))?;
            self.unpack(programs, work)?;
            let moved = format!("include {}/usr/src/{common}/Makefile\n", kept.display());
            Ok(fs::write(folder(work).join("Makefile"), moved)?)
        })?;
        Ok(folder(&kept))
    }

    /// Unpacks parts of the kernel's sources, in the version of the headers, into a folder.
    pub fn unpack_sources(
        &self,
        package: &str,
        parts: &[&str],
        headers: &Path,
        work: &Path,
    ) -> Result<()> {
        self.unpack(&format!("{package}={}", version(headers)?), work)?;
        let archive = work.join(format!("usr/src/{package}.tar.xz"));
        run(Command::new("tar")
            .args(["--strip-components=1", "-xJf"])
            .arg(archive)
            .args(parts.iter().map(|part| format!("{package}/{part}")))
            .current_dir(work))?;
        Ok(fs::remove_dir_all(work.join("usr"))?)
    }

    /// The release of the kernel that a meta package such as `linux-image-6.12-cloud-amd64` stands
    /// for.
    pub fn release_of(&self, meta: &str) -> Result<String> {
        update_lists(&self.dir)?;
        let text = output(Command::new("apt-cache").args(["depends", "--important", meta]))?;
        text.lines()
            .find_map(|line| line.trim().strip_prefix("Depends: linux-image-"))
            .map(str::to_owned)
            .with_context(|| format!("Debian's {meta} is not to be found: run apt-get update"))
    }

    /// Unpacks the kernel image that the meta package `linux-image-cloud-amd64` stands for.
    pub fn kernel(&self) -> Result<Kernel> {
        let root = match fs::read_to_string(self.dir.join("kernel-package")) {
            Ok(package) => self.unpacked(package.trim())?,
            Err(_) => {
                let release = self.release_of("linux-image-cloud-amd64")?;
                let package = format!("linux-image-{release}");
                let root = self.unpacked(&package)?;
                fs::write(self.dir.join("kernel-package"), &package)?;
                root
            }
        };
        kernel_in(&root)
    }

    /// Unpacks the kernel image of a release.
    pub fn kernel_of(&self, release: &str) -> Result<Kernel> {
        kernel_in(&self.unpacked(&format!("linux-image-{release}"))?)
    }
}

/// Programs needed to build modules, and the Debian packages that contain them.
pub const FOR_MODULES: &[(&str, &str)] =
    &[("xz", "xz-utils"), ("make", "make"), ("gcc-12", "gcc-12")];

/// Builds modules from sources in a folder, to which `files` are added. Unchanged sources are not
/// built again.
pub fn build_modules(sources: &Path, files: &[(&str, &str)], headers: &Path) -> Result<()> {
    for (name, text) in files {
        let file = sources.join(name);
        if fs::read_to_string(&file).ok().as_deref() != Some(text) {
            fs::write(file, text)?;
        }
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    run(Command::new("make")
        .args(["-s", "modules", &format!("-j{cores}")])
        // This needs the kernel's debug information, which is in none of the packages fetched here.
        .arg("CONFIG_DEBUG_INFO_BTF_MODULES=")
        .arg("-C")
        .arg(headers)
        .arg(format!("M={}", sources.display())))
}

/// Copies modules without their debug information.
pub fn copy_modules(sources: &Path, names: &[&str], to: &Path) -> Result<()> {
    for name in names {
        let file = format!("{name}.ko");
        run(Command::new("strip")
            .args(["--strip-debug", "-o"])
            .arg(to.join(&file))
            .arg(sources.join(&file)))?;
    }
    Ok(())
}

/// Debian's version of the headers in a folder, such as `6.12.117-1~deb12u1`. The sources have the
/// same version.
fn version(headers: &Path) -> Result<String> {
    let name = headers.file_name().context("the headers have no name")?;
    let changes = headers.join("../../share/doc").join(name);
    let text = output(Command::new("zcat").arg(changes.join("changelog.Debian.gz")))?;
    let version = text
        .split_once('(')
        .and_then(|(_, rest)| Some(rest.split_once(')')?.0));
    version
        .map(str::to_owned)
        .with_context(|| format!("{} names no version", changes.display()))
}

fn kernel_in(root: &Path) -> Result<Kernel> {
    let boot = root.join("boot");
    let release = fs::read_dir(&boot)?
        .filter_map(Result::ok)
        .find_map(|entry| {
            entry
                .file_name()
                .to_str()?
                .strip_prefix("vmlinuz-")
                .map(str::to_owned)
        })
        .with_context(|| format!("no kernel in {}", boot.display()))?;
    Ok(Kernel {
        image: boot.join(format!("vmlinuz-{release}")),
        modules: root.join("lib/modules").join(&release),
        release,
    })
}

/// An unpacked kernel package.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Its release, as printed by `uname -r`.
    pub release: String,
    /// The bzImage.
    pub image: PathBuf,
    /// Its modules.
    pub modules: PathBuf,
}

/// Held while installing: only one thread may use the package manager, and it may install what
/// others want.
static INSTALLING: Mutex<()> = Mutex::new(());

/// Installs the Debian packages of missing programs.
pub fn install(programs: &[(&str, &str)]) -> Result<()> {
    let _alone = INSTALLING.lock_unpoisoned();
    let missing = || -> Vec<_> {
        programs
            .iter()
            .filter(|(program, _)| !is_there(program))
            .map(|(_, package)| *package)
            .collect()
    };
    // An installation may replace other packages, for instance by another version. Missing programs
    // are then installed in the matching version.
    for _ in 0..2 {
        let missing = missing();
        if missing.is_empty() {
            return Ok(());
        }
        install_packages(&missing)?;
    }
    let missing = missing();
    ensure!(
        missing.is_empty(),
        "{0} cannot be installed beside the others: install {0} by hand and try again",
        missing.join(" ")
    );
    Ok(())
}

fn install_packages(packages: &[&str]) -> Result<()> {
    eprintln!("installing {} ...", packages.join(" "));
    let cache = Cache::open()?;
    update_lists(&cache.dir)?;
    let mut command = as_root("apt-get")?;
    command
        .env("DEBIAN_FRONTEND", "noninteractive")
        // The package manager may be busy with automatic upgrades.
        .args(["-o", "DPkg::Lock::Timeout=600"])
        .args(["install", "-y", "--no-install-recommends"])
        .args(packages);
    run(&mut command).with_context(|| {
        format!(
            "cannot install {}: install it by hand and try again",
            packages.join(" ")
        )
    })
}

/// Whether a program (by name) or a file (by path) exists.
pub fn is_there(program: &str) -> bool {
    if program.contains('/') {
        return Path::new(program).exists();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")])
        .any(|dir| dir.join(program).is_file())
}

/// Fetches the package manager's lists, once a day.
fn update_lists(cache: &Path) -> Result<()> {
    let stamp = cache.join("lists-updated");
    let age = fs::metadata(&stamp)
        .and_then(|meta| meta.modified())
        .ok()
        .and_then(|at| at.elapsed().ok());
    // The stamp may come from a machine with other lists.
    let lists = fs::read_dir("/var/lib/apt/lists").is_ok_and(|entries| {
        entries
            .filter_map(Result::ok)
            .any(|entry| entry.file_name().to_string_lossy().ends_with("_Packages"))
    });
    if lists && age.is_some_and(|age| age.as_secs() < 24 * 3600) {
        return Ok(());
    }
    run(as_root("apt-get")?.args(["update", "-q"]))
        .context("cannot fetch the package lists: check the network and /etc/apt/sources.list")?;
    fs::write(stamp, "")?;
    Ok(())
}

/// A command that runs as root, through sudo if needed.
fn as_root(program: &str) -> Result<Command> {
    // SAFETY: no preconditions.
    if unsafe { libc::geteuid() } == 0 {
        return Ok(Command::new(program));
    }
    ensure!(
        is_there("sudo"),
        "{program} has to be run by root: become root, or install sudo"
    );
    let mut command = Command::new("sudo");
    command.arg(program);
    Ok(command)
}

/// Runs a command; its output is shown if it fails.
pub fn run(command: &mut Command) -> Result<()> {
    output(command).map(|_| ())
}

/// Runs a command and returns its output.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", command.get_program().display()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success(),
        "{:?} failed ({}):\n{text}{}",
        command,
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(text)
}
