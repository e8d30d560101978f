//! What drivers compile is kept for the next application of the same owner, and for nobody else.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader},
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use gantry_tests::rig::packages;

use super::{
    applications::{endless, program, signal},
    pool::{Pool, Way},
};
use crate::shared_device::wait_for;

/// The program of [`builds`].
const BUILDS: &str = "builds.py";

/// Files that a driver has compiled, with values that change when a file is rewritten.
type Compiled = BTreeMap<PathBuf, (u64, i64, i64)>;

/// What PoCL has compiled in a directory and below: programs, and kernels that it has linked. It
/// reuses them instead of compiling again.
fn compiled(folder: &Path) -> Result<Compiled> {
    let mut found = Compiled::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let data = path.symlink_metadata()?;
            let name = path.file_name().unwrap_or_default();
            if data.is_dir() {
                folders.push(path);
            } else if name == "program.bc" || path.extension().is_some_and(|end| end == "so") {
                found.insert(path, (data.ino(), data.mtime(), data.mtime_nsec()));
            }
        }
    }
    Ok(found)
}

/// An application that builds `count` programs starting with a number, and computes with them.
fn builds(pool: &Pool, first: u32, count: u32) -> Command {
    builds_of(pool, &program(BUILDS), first, count)
}

/// The same for a program at another path.
fn builds_of(pool: &Pool, program: &Path, first: u32, count: u32) -> Command {
    let mut command = pool.remoted("/usr/bin/python3");
    command
        .arg(program)
        .args([first.to_string(), count.to_string()]);
    command
}

fn right(mut command: Command) -> Result<()> {
    let text = packages::output(&mut command)?;
    ensure!(text.ends_with("right\n"), "{text}");
    Ok(())
}

/// The directories of all owners below a pool's cache directory, by name.
fn owners(caches: &Path) -> Result<BTreeMap<String, PathBuf>> {
    // SAFETY: a plain call.
    let user = unsafe { libc::geteuid() };
    let all = caches.join(format!("gantry-compiled-{user}"));
    let mut owners = BTreeMap::new();
    for entry in fs::read_dir(&all).with_context(|| format!("nothing in {}", all.display()))? {
        let entry = entry?;
        owners.insert(
            entry.file_name().to_string_lossy().into_owned(),
            entry.path(),
        );
    }
    Ok(owners)
}

/// The directory of the only owner.
fn owner(caches: &Path, start: &str) -> Result<PathBuf> {
    let owners = owners(caches)?;
    let mut names = owners.iter().filter(|(name, _)| name.starts_with(start));
    let (_, path) = names.next().with_context(|| format!("{owners:?}"))?;
    ensure!(names.next().is_none(), "{owners:?}");
    Ok(path.clone())
}

/// Starts a pool whose caches are in this directory.
fn pool_at(way: Way, name: &str, release: &Path, caches: &Path) -> Result<Pool> {
    let caches = caches.display().to_string();
    Pool::start(way, name, release.to_owned(), &["--cache", &caches])
}

pub fn kept(pool: &Pool) -> Result<()> {
    let caches = pool.folder("kept")?;
    for way in [Way::Rings, Way::Unix, Way::Tls] {
        let start = if matches!(way, Way::Tls) {
            "subject-"
        } else {
            "user-"
        };
        let first = pool_at(way, "kept-1", &pool.release, &caches)?;
        right(builds(&first, 1, 3))?;
        let folder = owner(&caches, start)?.join("own/pocl");
        let once = compiled(&folder)?;
        ensure!(once.len() >= 9, "PoCL has compiled no more than {once:?}");
        right(builds(&first, 1, 3))?;
        ensure!(
            compiled(&folder)? == once,
            "the second one has compiled again"
        );
        // This also holds for two at a time and for workers of another pool, but not across
        // authorities.
        signal(&[first.id()], libc::SIGKILL);
        drop(first);
        let second = pool_at(way, "kept-2", &pool.release, &caches)?;
        let run = || right(builds(&second, 1, 3));
        thread::scope(|scope| {
            let other = scope.spawn(run);
            run().and(other.join().unwrap_or_else(|_| Ok(())))
        })?;
        ensure!(compiled(&folder)? == once, "others have compiled again");
        // Here, each pool has its own authority, which gives its guest the same name.
        let known = owners(&caches)?;
        let expected = if matches!(way, Way::Tls) { 2 } else { 1 };
        ensure!(known.len() == expected, "{known:?}");
        for folder in known.into_values() {
            fs::remove_dir_all(folder)?;
        }
    }
    let path = caches.display().to_string();
    let options = ["--compiler-cache", "off", "--cache", &path];
    let off = Pool::start(Way::Rings, "kept-off", pool.release.clone(), &options)?;
    right(builds(&off, 1, 1))?;
    ensure!(owners(&caches)?.is_empty(), "{:?}", owners(&caches)?);
    Ok(())
}

pub fn apart(pool: &Pool) -> Result<()> {
    const OTHER: u32 = 65534;
    let caches = pool.folder("apart")?;
    let pool = pool_at(Way::Rings, "apart", &pool.release, &caches)?;
    let everybody = fs::Permissions::from_mode(0o777);
    fs::set_permissions(pool.folder.join("socket"), everybody)?;
    right(builds(&pool, 1, 1))?;
    let home = pool.public_driver("home")?;
    fs::copy(program(BUILDS), home.join(BUILDS))?;
    std::os::unix::fs::chown(&home, Some(OTHER), None)?;
    let mut other = builds_of(&pool, &home.join(BUILDS), 1, 1);
    other
        .uid(OTHER)
        .current_dir(&home)
        .env("OCL_ICD_VENDORS", home.join(""))
        .env("HOME", &home)
        .env_remove("XDG_CACHE_HOME");
    right(other)?;
    let owners = owners(&caches)?;
    ensure!(owners.len() == 2, "{owners:?}");
    let mine = compiled(&owner(&caches, "user-0")?)?;
    let theirs = compiled(&owner(&caches, "user-65534")?)?;
    ensure!(
        mine.len() >= 3 && mine.len() == theirs.len(),
        "{mine:?}\n{theirs:?}"
    );
    let shared = |file: &(u64, i64, i64)| mine.values().any(|own| own.0 == file.0);
    ensure!(!theirs.values().any(shared), "both have one file");
    // Only the pool's user can access either of them.
    let all = caches.join("gantry-compiled-0");
    let mode = fs::metadata(&all)?.mode() & 0o777;
    ensure!(mode == 0o700, "{} has mode {mode:o}", all.display());
    Ok(())
}

/// If the directory of all caches is removed, as by cleaning /tmp, applications compile for
/// themselves.
pub fn homeless(pool: &Pool) -> Result<()> {
    let caches = pool.folder("homeless")?;
    let pool = pool_at(Way::Rings, "homeless", &pool.release, &caches)?;
    // SAFETY: a plain call.
    let user = unsafe { libc::geteuid() };
    let all = caches.join(format!("gantry-compiled-{user}"));
    // The pool listens before it creates the directory.
    wait_for("the folder of all", || Ok(all.exists()))?;
    fs::remove_dir(all)?;
    right(builds(&pool, 1, 2))?;
    let log = pool.log()?;
    ensure!(log.contains("for compiled programs (No such file"), "{log}");
    Ok(())
}

/// Kills workers, and a pool with them, at many points of a build. What they leave behind does no
/// harm: the next application of the same owner builds and computes the same program.
pub fn killed(pool: &Pool) -> Result<()> {
    const MOMENTS: u32 = 24;
    let caches = pool.folder("broken")?;
    let mut serving = pool_at(Way::Rings, "broken-0", &pool.release, &caches)?;
    for moment in 0..MOMENTS {
        // A number that nobody has built with.
        let number = 1000 + moment;
        let mut application = builds(&serving, number, 1)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut line = String::new();
        let mut output = BufReader::new(application.stdout.take().context("no output")?);
        output.read_line(&mut line)?;
        ensure!(line == "building\n", "the application said {line:?}");
        thread::sleep(Duration::from_millis(8) * moment);
        if moment % 8 == 7 {
            signal(&[serving.id()], libc::SIGKILL);
            let name = format!("broken-{moment}");
            serving = pool_at(Way::Rings, &name, &pool.release, &caches)?;
        } else {
            signal(&serving.workers()?, libc::SIGKILL);
        }
        application.wait()?;
        right(builds(&serving, number, 1)).with_context(|| format!("after kill {moment}"))?;
    }
    let left = compiled(&owner(&caches, "user-")?)?;
    ensure!(left.len() >= 3 * MOMENTS as usize, "{} files", left.len());
    Ok(())
}

/// An application that fills its owner's directory loses its worker and the directory, and others
/// continue.
pub fn flooded(pool: &Pool) -> Result<()> {
    let caches = pool.folder("flooded")?;
    let path = caches.display().to_string();
    let options = ["--cache", &path, "--compiler-cache", "16M"];
    let pool = Pool::start(Way::Rings, "flooded", pool.release.clone(), &options)?;
    right(builds(&pool, 1, 1))?;
    let folder = owner(&caches, "user-")?;
    let (mut application, mut output) = endless(&pool)?;
    // As one of its kernels could: the driver runs it in a worker that may write there.
    fs::write(folder.join("own/flood"), vec![1; 40 << 20])?;
    let mut line = String::new();
    output.read_line(&mut line)?;
    application.wait()?;
    ensure!(line.starts_with("error -"), "the application said {line:?}");
    // The worker ends first.
    let flood = folder.join("own/flood");
    wait_for("what it wrote to go", || Ok(!flood.exists()))?;
    let log = pool.log()?;
    ensure!(log.contains("more than twice the 16 MiB"), "{log}");
    right(builds(&pool, 1, 1))
}

/// A library that a loader opens like a driver's, and that starts a thread when it is loaded.
const EARLY: &str = "#include <pthread.h>
#include <unistd.h>
static void *sleeper(void *nothing) { for (;;) pause(); return nothing; }
__attribute__((constructor)) static void start(void)
{ pthread_t thread; pthread_create(&thread, 0, sleeper, 0); }
";

/// Landlock does not restrict existing threads. Therefore workers have no threads before they know
/// their owner, whatever the driver does, and then find what was compiled.
pub fn late(pool: &Pool) -> Result<()> {
    let vendors = pool.folder("early")?;
    let (source, library) = (vendors.join("early.c"), vendors.join("early.so"));
    fs::write(&source, EARLY)?;
    let mut compile = Command::new("cc");
    compile
        .args(["-shared", "-fPIC", "-pthread", "-o"])
        .args([&library, &source]);
    packages::run(&mut compile)?;
    fs::write(
        vendors.join("early.icd"),
        format!("{}\n", library.display()),
    )?;
    fs::copy("/etc/OpenCL/vendors/pocl.icd", vendors.join("pocl.icd"))?;
    let caches = pool.folder("late")?;
    let path = caches.display().to_string();
    let pool = Pool::before(
        vendors,
        Way::Rings,
        "late",
        pool.release.clone(),
        &["--cache", &path],
    )?;
    right(builds(&pool, 1, 1))?;
    let once = compiled(&owner(&caches, "user-")?)?;
    ensure!(once.len() >= 3, "{once:?}");
    right(builds(&pool, 1, 1))?;
    ensure!(
        compiled(&owner(&caches, "user-")?)? == once,
        "it was compiled again"
    );
    let log = pool.log()?;
    let said = log.matches("the driver starts threads before").count();
    ensure!(said == 1, "{log}");
    Ok(())
}
