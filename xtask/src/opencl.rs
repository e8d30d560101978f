//! OpenCL through the driver and a worker, as plain processes on this machine: programs that
//! nobody here wrote give the same results as with the host's driver.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use gantry_tests::{bench::cpu_time, report::Outcome, rig::packages};

use crate::{
    opencl_compiled as compiled, opencl_streams as streams, opencl_users as users,
    programs::{cargo, root, target},
    progress::Step,
    selected,
    shared_device::Programs,
};

/// Where piglit is.
pub const PIGLIT: &str = "/usr/lib/x86_64-linux-gnu/piglit";

/// Programs and files that the scenarios need, and the Debian packages that have them.
const PROGRAMS: &[(&str, &str)] = &[
    ("/etc/OpenCL/vendors/pocl.icd", "pocl-opencl-icd"),
    (
        "/usr/lib/x86_64-linux-gnu/libOpenCL.so.1",
        "ocl-icd-libopencl1",
    ),
    ("clinfo", "clinfo"),
    ("clpeak", "clpeak"),
    ("strace", "strace"),
    ("openssl", "openssl"),
    (PIGLIT, "piglit"),
    (
        "/usr/lib/python3/dist-packages/pyopencl",
        "python3-pyopencl",
    ),
    ("/usr/lib/python3/dist-packages/mako", "python3-mako"),
];

type Scenario = fn(&Pool) -> Result<()>;

const SCENARIOS: &[(&str, Scenario)] = &[
    (
        "opencl: clinfo says the same of the device as natively",
        clinfo,
    ),
    ("opencl: vectors are added, by figures' program", figures),
    ("opencl: pyopencl computes the same as natively", pyopencl),
    (
        "opencl: shared virtual memory has the same addresses for application and device",
        shared_addresses,
    ),
    ("opencl: piglit's tests of the API end as natively", piglit),
    (
        "opencl: errors that are found late are told by callback, event and wait",
        late,
    ),
    (
        "opencl: programs compute the same by delegations, on a CPU that they lend",
        delegated,
    ),
    ("opencl: clpeak measures without an error", clpeak),
    (
        "opencl: ten thousand synchronous calls make no system call on either side",
        steady,
    ),
    (
        "opencl: an application that waits with an open context costs under 0.5 % of a processor",
        idle,
    ),
    (
        "opencl: workers are confined before an application comes",
        confined,
    ),
    (
        "opencl: a killed worker costs its application an error code and nobody else anything",
        killed,
    ),
    (
        "opencl: a worker that stands still ends with its application",
        stopped,
    ),
    (
        "opencl: a pool that runs out of descriptors goes on, and so do its workers",
        short,
    ),
    (
        "opencl: a user has so many workers at a time as the pool allows, and others theirs",
        users::limited,
    ),
    (
        "opencl: a kernel that runs longer than it may costs its worker, without an arbiter",
        limited,
    ),
    (
        "opencl: what one application has compiled the next one of its owner finds",
        compiled::kept,
    ),
    (
        "opencl: a driver that starts threads early is opened late, and finds what was compiled",
        compiled::late,
    ),
    (
        "opencl: owners' compiled programs are apart",
        compiled::apart,
    ),
    (
        "opencl: workers and pools that are killed in the middle of a build break no later one",
        compiled::killed,
    ),
    (
        "opencl: who fills the folder of compiled programs loses it and its worker",
        compiled::flooded,
    ),
    (
        "opencl: through a socket without shared memory programs compute the same",
        streams::unix,
    ),
    (
        "opencl: through TLS programs compute the same, and on both sides who is killed is missed",
        streams::tls,
    ),
    (
        "opencl: who shows no certificate of the authority is refused, and a port without TLS",
        streams::refused,
    ),
    (
        "opencl: who is killed at any moment of a stream harms nobody else",
        streams::killed,
    ),
    (
        "opencl: so many applications are served by streams at a time as the pool may have",
        streams::crowd,
    ),
    (
        "opencl: who connects with a stream's port and says nothing keeps nobody else out",
        streams::silent,
    ),
];

/// Runs the scenarios that the words select, all if there are none.
pub fn run(words: &[String], report: impl FnMut(&str, &Outcome, f64)) -> Result<()> {
    selected::run(
        SCENARIOS,
        words,
        Pool::start_installed,
        |scenario, pool| scenario(pool),
        report,
    )
}

/// How applications come to a pool's workers.
#[derive(Clone, Copy)]
pub enum Way {
    /// By shared memory.
    Rings,
    /// By shared memory, on the applications' own CPUs.
    Delegated,
    /// By a Unix socket alone.
    Unix,
    /// By TLS.
    Tls,
}

/// A running pool of workers, and the programs that go with it.
pub struct Pool {
    process: Child,
    /// Where its socket, log and keys are.
    pub folder: PathBuf,
    /// Where what was built is.
    pub release: PathBuf,
    /// The folder with the `.icd` file of the host's driver.
    vendors: PathBuf,
    /// What `GANTRY_OPENCL` is for its applications.
    pub address: String,
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

impl Pool {
    /// Installs and builds what is needed, and starts a pool.
    pub fn start_installed() -> Result<Self> {
        packages::install(PROGRAMS)?;
        let step = Step::new("building the OpenCL driver and its worker (release)");
        let mut build = cargo();
        build.args(["build", "--release", "--quiet"]);
        build.args(["-p", "gantry-remoting", "-p", "gantry-opencl"]);
        build.args(["--lib", "--bins", "--examples"]);
        packages::run(&mut build)?;
        step.finish();
        let release = fs::canonicalize(target().join("release"))?;
        Self::serve("usual", release, &[])
    }

    /// A pool of what was built elsewhere, before this machine's driver.
    pub fn start_built(programs: Programs<'_>) -> Result<Self> {
        let release = fs::canonicalize(programs.built)?;
        let vendors = fs::canonicalize(programs.vendors)?;
        Self::launch(Way::Rings, "usual", release, vendors, &[])
    }

    /// A pool of what was built, with options of its own.
    fn serve(name: &str, release: PathBuf, options: &[&str]) -> Result<Self> {
        Self::start(Way::Rings, name, release, options)
    }

    /// Workers that run when an application delegates to them.
    fn passive(name: &str, release: PathBuf, options: &[&str]) -> Result<Self> {
        Self::start(Way::Delegated, name, release, options)
    }

    /// Runs `gantry-accel` for applications that come by this way, with further options.
    pub fn start(way: Way, name: &str, release: PathBuf, options: &[&str]) -> Result<Self> {
        Self::launch(way, name, release, "/etc/OpenCL/vendors".into(), options)
    }

    /// A pool before the drivers that this folder's `.icd` files name.
    pub fn before(
        vendors: PathBuf,
        name: &str,
        release: PathBuf,
        options: &[&str],
    ) -> Result<Self> {
        Self::launch(Way::Rings, name, release, vendors, options)
    }

    /// The same before the driver that this folder's `.icd` file names.
    fn launch(
        way: Way,
        name: &str,
        release: PathBuf,
        vendors: PathBuf,
        options: &[&str],
    ) -> Result<Self> {
        // A socket's path has at most 107 bytes: not below the target folder.
        let folder =
            std::env::temp_dir().join(format!("gantry-opencl-{}-{name}", std::process::id()));
        fs::create_dir_all(folder.join("vendors"))?;
        fs::write(
            folder.join("vendors/gantry.icd"),
            format!("{}\n", release.join("libgantry_opencl.so").display()),
        )?;
        let socket = folder.join("socket").display().to_string();
        // The heap is more than there is: PoCL calls a worker's limit the device's memory.
        let mut serve = ["serve", "--heap", "1048576"].map(str::to_owned).to_vec();
        let (address, mut role) = match way {
            Way::Rings => {
                serve.extend(["--socket".to_owned(), socket.clone()]);
                (socket, serve)
            }
            Way::Delegated => (
                format!("messages:{socket}"),
                vec!["passive".to_owned(), "--messages".to_owned(), socket],
            ),
            Way::Unix => {
                let address = format!("unix:{socket}");
                serve.extend(["--listen".to_owned(), address.clone()]);
                (address, serve)
            }
            Way::Tls => {
                let keys = folder.join("keys");
                certificates(&keys)?;
                let file = |name: &str| keys.join(name).display().to_string();
                let port = free_port()?;
                serve.extend(["--listen".to_owned(), format!("tcp:127.0.0.1:{port}")]);
                serve.extend(["--tls-cert".to_owned(), file("localhost.pem")]);
                serve.extend(["--tls-key".to_owned(), file("localhost.key")]);
                serve.extend(["--tls-client-ca".to_owned(), file("ca.pem")]);
                (format!("tls://localhost:{port}"), serve)
            }
        };
        if !matches!(way, Way::Delegated) && !options.contains(&"--cache") {
            let caches = folder.join("caches");
            fs::create_dir_all(&caches)?;
            role.extend(["--cache".to_owned(), caches.display().to_string()]);
        }
        let process = Command::new(release.join("gantry-accel"))
            .args(role)
            .args(options)
            // Some loaders want the slash.
            .env("OCL_ICD_VENDORS", vendors.join(""))
            .env_remove("OCL_ICD_FILENAMES")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(folder.join("log"))?)
            .spawn()
            .context("cannot start gantry-accel")?;
        let pool = Self {
            process,
            folder,
            release,
            vendors,
            address,
        };
        let until = Instant::now() + Duration::from_secs(20);
        while !pool.listens() {
            ensure!(Instant::now() < until, "gantry-accel does not listen");
            thread::sleep(Duration::from_millis(20));
        }
        Ok(pool)
    }

    fn listens(&self) -> bool {
        match self.address.strip_prefix("tls://localhost:") {
            Some(port) => TcpStream::connect(format!("127.0.0.1:{port}")).is_ok(),
            None => self.folder.join("socket").exists(),
        }
    }

    /// Its process id.
    pub fn id(&self) -> i32 {
        self.process.id().cast_signed()
    }

    /// What the pool and its workers have said.
    pub fn log(&self) -> Result<String> {
        Ok(fs::read_to_string(self.folder.join("log"))?)
    }

    /// The workers' process ids.
    pub fn workers(&self) -> Result<Vec<i32>> {
        let id = self.process.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children"))?;
        children
            .split_whitespace()
            .map(|child| Ok(child.parse()?))
            .collect()
    }

    /// The same, once each is the program that it is to be: the pool waits for that.
    fn started_workers(&self) -> Result<Vec<i32>> {
        let command = |id: i32| fs::read(format!("/proc/{id}/cmdline"));
        let pool = command(self.process.id().cast_signed())?;
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            let workers = self.workers()?;
            let started = |id: &i32| command(*id).is_ok_and(|own| own != pool && !own.is_empty());
            if workers.iter().all(started) {
                return Ok(workers);
            }
            ensure!(Instant::now() < until, "workers do not start");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// An empty folder of this name, which goes with the pool.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.folder.join(name);
        fs::create_dir_all(&folder)?;
        Ok(folder)
    }

    /// Forgets what its workers have compiled.
    pub fn forget_compiled(&self) -> Result<()> {
        // SAFETY: a plain call.
        let user = unsafe { libc::geteuid() };
        let all = self.folder.join(format!("caches/gantry-compiled-{user}"));
        for entry in fs::read_dir(all)? {
            fs::remove_dir_all(entry?.path())?;
        }
        Ok(())
    }

    /// The version of the host's platform, as clinfo says it.
    pub fn device(&self) -> Result<String> {
        let text = packages::output(self.native("clinfo").arg("--raw"))?;
        let version = text
            .lines()
            .find_map(|line| line.split_once("CL_PLATFORM_VERSION"))
            .context("clinfo names no platform natively")?;
        Ok(version.1.trim().to_owned())
    }

    /// A program that uses the host's driver.
    pub fn native(&self, program: impl AsRef<Path>) -> Command {
        self.native_for(120, program)
    }

    /// The same, for at most so many seconds.
    pub fn native_for(&self, seconds: u32, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new("timeout");
        command
            .arg(seconds.to_string())
            .arg(program.as_ref())
            .env("OCL_ICD_VENDORS", self.vendors.join(""))
            .env_remove("OCL_ICD_FILENAMES")
            .env("GANTRY_OPENCL", "off");
        command
    }

    /// A program that uses Gantry's driver and no other.
    pub fn remoted(&self, program: impl AsRef<Path>) -> Command {
        self.remoted_for(120, program)
    }

    /// The same, for at most so many seconds.
    pub fn remoted_for(&self, seconds: u32, program: impl AsRef<Path>) -> Command {
        let mut command = self.native_for(seconds, program);
        command
            .env("OCL_ICD_VENDORS", self.folder.join("vendors/"))
            .env("GANTRY_OPENCL", &self.address);
        let keys = self.folder.join("keys");
        command
            .env("GANTRY_TLS_CA", keys.join("ca.pem"))
            .env("GANTRY_TLS_CERT", keys.join("guest.pem"))
            .env("GANTRY_TLS_KEY", keys.join("guest.key"));
        command
    }
}

/// A port of this machine that nobody listens on.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// An authority, and what it has signed for this machine and for a guest.
pub fn certificates(folder: &Path) -> Result<()> {
    let mut make = Command::new("sh");
    make.arg(root().join("remoting/certificates.sh"))
        .arg(folder)
        .args(["localhost", "guest"]);
    packages::run(&mut make)
}

/// A program of the tests.
pub fn program(name: &str) -> PathBuf {
    root().join("guest/opencl/tests/programs").join(name)
}

pub fn clinfo(pool: &Pool) -> Result<()> {
    /// Features that are not offered, and names of the driver.
    const APART: &[&str] = &[
        "_EXTENSIONS",
        "_VERSION",
        "_SVM_CAPABILITIES",
        "_EXECUTION_CAPABILITIES",
        "_COMMAND_BUFFER_",
        "SUFFIX",
    ];
    let lines = |mut command: Command| -> Result<Vec<String>> {
        let text = packages::output(command.arg("--raw"))?;
        Ok(text
            .lines()
            .filter(|line| line.contains("CL_DEVICE_"))
            .filter(|line| !APART.iter().any(|part| line.contains(part)))
            // The prefix names the platform by the driver's suffix.
            .map(|line| line[line.find("CL_DEVICE_").unwrap_or(0)..].to_owned())
            .collect())
    };
    let (native, remoted) = (
        lines(pool.native("clinfo"))?,
        lines(pool.remoted("clinfo"))?,
    );
    ensure!(native.len() > 50, "clinfo says little natively: {native:?}");
    for (native, remoted) in native.iter().zip(&remoted) {
        ensure!(native == remoted, "natively: {native}\nremoted: {remoted}");
    }
    ensure!(
        native.len() == remoted.len(),
        "{} lines natively and {} remoted",
        native.len(),
        remoted.len()
    );
    Ok(())
}

pub fn figures(pool: &Pool) -> Result<()> {
    let text = packages::output(&mut pool.remoted(pool.release.join("examples/opencl_figures")))?;
    ensure!(text.contains("is right"), "{text}");
    ensure!(text.contains("Gantry"), "another driver was used: {text}");
    Ok(())
}

/// Through rings, by delegations, and where application and worker share no memory.
fn shared_addresses(pool: &Pool) -> Result<()> {
    let run = |mut python: Command| packages::output(python.arg(program("svm.py")));
    let native = run(pool.native("/usr/bin/python3"))?;
    ensure!(native.ends_with("freed: all\n"), "natively: {native}");
    let release = || pool.release.clone();
    let delegated = Pool::passive("delegated-svm", release(), &["--own-cpu"])?;
    let stream = Pool::start(Way::Unix, "stream-svm", release(), &[])?;
    for pool in [pool, &delegated, &stream] {
        let remoted = run(pool.remoted("/usr/bin/python3"))?;
        ensure!(
            native == remoted,
            "natively:\n{native}\nremoted:\n{remoted}"
        );
    }
    let mut wrong = pool.remoted("/usr/bin/python3");
    let wrong = packages::output(wrong.arg(program("svm.py")).arg("refused"))?;
    let expected = "strangers: [-50, -50, -50] True\nrefused: [None, None, None, None, -30, -30, \
                    -30, -8, -30, -30, -49]\n";
    ensure!(wrong == expected, "wrong calls gave:\n{wrong}");
    Ok(())
}

pub fn late(pool: &Pool) -> Result<()> {
    let text = packages::output(&mut pool.remoted(pool.release.join("examples/opencl_late")))?;
    ensure!(text.starts_with("told late"), "{text}");
    Ok(())
}

/// What the driver does better than PoCL 3.1 does not count.
pub fn piglit(pool: &Pool) -> Result<()> {
    let result = |mut command: Command| -> Result<String> {
        let output = command.arg("-auto").stdin(Stdio::null()).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let result = text.rsplit("\"result\": \"").next().unwrap_or_default();
        Ok(result.split('"').next().unwrap_or_default().to_owned())
    };
    let mut different = Vec::new();
    let mut passed = 0;
    for entry in fs::read_dir(Path::new(PIGLIT).join("bin"))? {
        let test = entry?.path();
        let name = test.file_name().unwrap_or_default().to_string_lossy();
        if !name.starts_with("cl-api-") {
            continue;
        }
        let (native, remoted) = (result(pool.native(&test))?, result(pool.remoted(&test))?);
        passed += usize::from(remoted == "pass");
        if remoted != "pass" && native != remoted {
            different.push(format!("{name}: {native} natively and {remoted} remoted"));
        }
    }
    ensure!(passed > 30, "only {passed} tests pass");
    ensure!(different.is_empty(), "{}", different.join("\n"));
    Ok(())
}

pub fn pyopencl(pool: &Pool) -> Result<()> {
    let run = |mut command: Command| packages::output(command.arg(program("parts.py")));
    let native = run(pool.native("/usr/bin/python3"))?;
    let remoted = run(pool.remoted("/usr/bin/python3"))?;
    ensure!(
        native.ends_with("all\n") && native == remoted,
        "natively:\n{native}\nremoted:\n{remoted}"
    );
    Ok(())
}

/// By messages, as this machine has no exitless gate; whatever the driver's threads need, they have.
fn delegated(pool: &Pool) -> Result<()> {
    let lent = Pool::passive("lent", pool.release.clone(), &[])?;
    clinfo(&lent)?;
    late(&lent)?;
    pyopencl(&lent)?;
    piglit(&lent)?;
    crowded(&lent)?;
    let own = Pool::passive("own", pool.release.clone(), &["--own-cpu"])?;
    clinfo(&own)?;
    pyopencl(&own)?;
    // Who asks for a real gate hears why there is none.
    let asked = pool
        .remoted("clinfo")
        .arg("-l")
        .env("GANTRY_OPENCL", "gate")
        .output()?;
    let said = String::from_utf8_lossy(&asked.stderr);
    ensure!(
        said.contains("not through the gate: ") && said.contains("--accel transport=gate"),
        "{said}"
    );
    Ok(())
}

/// So many applications get a confined process each, one more gets none, and neither ends the
/// server; nor does a process that cannot be started.
fn crowded(lent: &Pool) -> Result<()> {
    const MOST: usize = 16;
    let connect = || UnixStream::connect(lent.folder.join("socket"));
    // The first byte comes with the memory that is shared.
    let served = |mut stream: &UnixStream| stream.read(&mut [0]).is_ok_and(|read| read == 1);
    let until = Instant::now() + Duration::from_secs(20);
    let mut crowd = Vec::new();
    while crowd.len() < MOST {
        let stream = connect()?;
        if served(&stream) {
            crowd.push(stream);
        }
        // Who was there before takes a moment to end.
        ensure!(Instant::now() < until, "{} are served only", crowd.len());
    }
    ensure!(!served(&connect()?), "one more than {MOST} is served");
    crowd.truncate(1);
    while lent.workers()?.len() > 1 {
        ensure!(Instant::now() < until, "who serves nobody has not ended");
        thread::sleep(Duration::from_millis(20));
    }
    confined(lent)?;
    let cache = PathBuf::from(format!("/tmp/gantry-accel-{}", lent.process.id()));
    let away = cache.with_extension("away");
    fs::rename(&cache, &away)?;
    ensure!(!served(&connect()?), "one is served without a folder");
    fs::rename(&away, &cache)?;
    packages::run(lent.remoted("clinfo").arg("-l"))
}

fn clpeak(pool: &Pool) -> Result<()> {
    let text = packages::output(
        pool.remoted("clpeak")
            .args(["--kernel-latency", "--transfer-bandwidth"]),
    )?;
    ensure!(
        text.contains("Kernel launch latency") && !text.contains("(-"),
        "{text}"
    );
    Ok(())
}

/// Counts the time for which application, workers and pool have a processor while nobody asks for
/// anything.
fn idle(pool: &Pool) -> Result<()> {
    const WHILE: Duration = Duration::from_secs(4);
    let mut application = pool
        .remoted(pool.release.join("examples/opencl_steady"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut ready = String::new();
    let mut output = BufReader::new(application.stdout.take().context("no output")?);
    output.read_line(&mut ready)?;
    let id = ready
        .strip_prefix("ready ")
        .with_context(|| format!("the application said {ready:?}"))?
        .trim()
        .parse()?;
    let mut all = pool.workers()?;
    all.extend([id, pool.process.id().cast_signed()]);
    let spent = || -> Result<u64> { all.iter().map(|id| cpu_time(id.cast_unsigned())).sum() };
    // Both sides look for work for a moment before they sleep.
    thread::sleep(Duration::from_secs(1));
    let before = spent()?;
    thread::sleep(WHILE);
    let nanos = spent()? - before;
    drop(application.stdin.take());
    std::io::copy(&mut output, &mut std::io::sink())?;
    application.wait()?;
    ensure!(
        u128::from(nanos) * 200 < WHILE.as_nanos(),
        "{nanos} ns of a processor in {WHILE:?}"
    );
    Ok(())
}

/// Counts the system calls of application and worker while they do nothing but ask and answer.
/// Both poll for longer than the calls take: that nobody falls asleep meanwhile does not depend on
/// how busy this machine is.
fn steady(pool: &Pool) -> Result<()> {
    const LONG: &str = "60000000";
    let pool = Pool::serve("steady", pool.release.clone(), &["--spin", LONG])?;
    let mut application = pool
        .remoted(pool.release.join("examples/opencl_steady"))
        .env("GANTRY_OPENCL_SPIN", LONG)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut output = BufReader::new(application.stdout.take().context("no output")?);
    let mut next = || -> Result<String> {
        let mut line = String::new();
        output.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    };
    let ready = next()?;
    let id: i32 = ready
        .strip_prefix("ready ")
        .with_context(|| format!("the application said {ready:?}"))?
        .parse()?;
    let mut traced = pool.workers()?;
    traced.push(id);
    let log = pool.folder.join("calls");
    let mut strace = Command::new("strace");
    strace.args(["-f", "-o"]).arg(&log);
    for id in &traced {
        strace.args(["-p", &id.to_string()]);
    }
    let mut strace = strace
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot run strace")?;
    let mut attached = BufReader::new(strace.stderr.take().context("no messages")?).lines();
    for _ in &traced {
        let line = attached.next().context("strace attaches to nothing")??;
        ensure!(line.contains("attached"), "strace says: {line}");
    }
    // Threads that slept in a system call begin it anew when they are attached to, and strace
    // writes that down in its own time.
    let until = Instant::now() + Duration::from_secs(20);
    let mut written = None;
    loop {
        thread::sleep(Duration::from_millis(200));
        let length = fs::metadata(&log)?.len();
        if written.replace(length) == Some(length) {
            break;
        }
        ensure!(Instant::now() < until, "what is to stand still makes calls");
    }
    application
        .stdin
        .take()
        .context("no input")?
        .write_all(b"go\n")?;
    ensure!(next()? == "begin" && next()? == "end", "no marks");
    // SAFETY: a plain call; strace leaves its processes alone then.
    unsafe { libc::kill(strace.id().cast_signed(), libc::SIGINT) };
    strace.wait()?;
    application.wait()?;
    let log = fs::read_to_string(log)?;
    let between = log
        .lines()
        .skip_while(|line| !line.contains("\"begin"))
        .skip(1)
        .take_while(|line| !line.contains("\"end"));
    let calls: Vec<_> = between.filter(|line| !line.contains("resumed>")).collect();
    ensure!(
        log.contains("\"begin") && log.contains("\"end") && calls.is_empty(),
        "{} system calls: {:#?}",
        calls.len(),
        &calls[..calls.len().min(10)]
    );
    Ok(())
}

pub fn confined(pool: &Pool) -> Result<()> {
    // Whoever is served has passed through the confinement.
    packages::run(pool.remoted("clinfo").arg("-l"))?;
    let workers = pool.workers()?;
    ensure!(!workers.is_empty(), "the pool has no workers");
    let until = Instant::now() + Duration::from_secs(10);
    let mut seen = 0;
    for worker in workers {
        while let Ok(status) = fs::read_to_string(format!("/proc/{worker}/status")) {
            let is = |line: &str| status.lines().any(|known| known == line);
            if is("Seccomp:\t2") && is("NoNewPrivs:\t1") {
                seen += 1;
                break;
            }
            // One that has just been started may not be there yet.
            ensure!(
                Instant::now() < until,
                "worker {worker} is not confined:\n{status}"
            );
            thread::sleep(Duration::from_millis(50));
        }
    }
    ensure!(seen > 0, "all workers have ended");
    Ok(())
}

/// An application that computes without an end, and what it prints.
pub fn endless(pool: &Pool) -> Result<(Child, BufReader<ChildStdout>)> {
    running(pool, "endless.py")
}

/// An application that says when it computes, and what it prints.
fn running(pool: &Pool, name: &str) -> Result<(Child, BufReader<ChildStdout>)> {
    let mut application = pool
        .remoted("/usr/bin/python3")
        .arg(program(name))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut output = BufReader::new(application.stdout.take().context("no output")?);
    let mut line = String::new();
    output.read_line(&mut line)?;
    ensure!(line == "running\n", "the application said {line:?}");
    Ok((application, output))
}

pub fn signal(processes: &[i32], signal: i32) {
    for process in processes {
        // SAFETY: a plain call.
        unsafe { libc::kill(*process, signal) };
    }
}

pub fn killed(pool: &Pool) -> Result<()> {
    let (mut application, mut output) = endless(pool)?;
    signal(&pool.workers()?, libc::SIGKILL);
    let start = Instant::now();
    let mut line = String::new();
    output.read_line(&mut line)?;
    let waited = start.elapsed();
    application.wait()?;
    if !line.starts_with("error -") {
        bail!("the application said {line:?} when its worker was killed");
    }
    ensure!(
        waited < Duration::from_secs(10),
        "the application noticed after {waited:?}"
    );
    // The pool goes on.
    packages::run(pool.remoted("clinfo").arg("-l"))
}

pub fn stopped(pool: &Pool) -> Result<()> {
    let (mut application, _output) = endless(pool)?;
    let before = pool.started_workers()?;
    // None of its threads sees the application end.
    signal(&before, libc::SIGSTOP);
    // `timeout`, which runs it, passes the signal on.
    signal(&[application.id() as i32], libc::SIGTERM);
    application.wait()?;
    let until = Instant::now() + Duration::from_secs(10);
    let left = loop {
        let now = pool.workers()?;
        let left = before.iter().filter(|id| now.contains(id)).count();
        if left + 1 == before.len() || Instant::now() > until {
            break left;
        }
        thread::sleep(Duration::from_millis(20));
    };
    signal(&before, libc::SIGCONT);
    ensure!(
        left + 1 == before.len(),
        "{left} of {} workers are left",
        before.len()
    );
    packages::run(pool.remoted("clinfo").arg("-l"))
}

fn short(pool: &Pool) -> Result<()> {
    let mut pool = Pool::serve("short", pool.release.clone(), &["--spare", "1"])?;
    let (mut first, output) = endless(&pool)?;
    let until = Instant::now() + Duration::from_secs(20);
    let soon = |what: &str| {
        thread::sleep(Duration::from_millis(20));
        ensure!(Instant::now() < until, "{what}");
        Ok(())
    };
    while pool.workers()?.len() < 2 {
        soon("the pool has no worker for another application")?;
    }
    let id = pool.process.id();
    let descriptors = fs::read_dir(format!("/proc/{id}/fd"))?;
    let used: Vec<u64> = descriptors
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    // One for the connection that a worker hands over, and none for what a new one needs.
    let free = (0..).filter(|number| !used.contains(number)).nth(1);
    let before = limit_descriptors(id, free.context("all are used")?)?;
    let (mut second, _output) = endless(&pool)?;
    while !pool.log()?.contains("cannot start a worker process") {
        soon("the pool starts workers without descriptors")?;
    }
    ensure!(first.try_wait()?.is_none(), "the first one has ended");
    // Also when nobody is left: it tries every second. It has these open for good, and polls no more.
    limit_descriptors(id, 5)?;
    signal(&pool.workers()?, libc::SIGKILL);
    for application in [&mut first, &mut second] {
        application.wait()?;
    }
    drop(output);
    thread::sleep(Duration::from_millis(1500));
    ensure!(
        pool.workers()?.is_empty(),
        "a worker was started without descriptors"
    );
    ensure!(
        pool.process.try_wait()?.is_none(),
        "the pool has ended: {}",
        pool.log()?
    );
    limit_descriptors(id, before)?;
    packages::run(pool.remoted("clinfo").arg("-l"))?;
    Ok(())
}

/// Sets how many descriptors a process may have; how many it might before.
fn limit_descriptors(process: u32, count: u64) -> Result<u64> {
    // SAFETY: all zeroes are valid limits.
    let mut limit: libc::rlimit = unsafe { std::mem::zeroed() };
    let (id, which) = (process.cast_signed(), libc::RLIMIT_NOFILE);
    // SAFETY: nothing is set; `limit` outlives the call.
    let mut done = unsafe { libc::prlimit(id, which, std::ptr::null(), &raw mut limit) };
    let before = std::mem::replace(&mut limit.rlim_cur, count);
    if done == 0 {
        // SAFETY: the old limits are not wanted; `limit` outlives the call.
        done = unsafe { libc::prlimit(id, which, &raw const limit, std::ptr::null_mut()) };
    }
    ensure!(
        done == 0,
        "cannot limit its descriptors: {}",
        std::io::Error::last_os_error()
    );
    Ok(before)
}

fn limited(pool: &Pool) -> Result<()> {
    let options = ["--kernel-limit", "1000"];
    let pool = Pool::start(Way::Rings, "limited", pool.release.clone(), &options)?;
    let (mut application, mut output) = running(&pool, "stuck.py")?;
    let start = Instant::now();
    let mut line = String::new();
    output.read_line(&mut line)?;
    let waited = start.elapsed();
    application.wait()?;
    ensure!(
        line.starts_with("error -"),
        "the application said {line:?} when its kernel had run for too long"
    );
    ensure!(
        waited > Duration::from_millis(900) && waited < Duration::from_secs(10),
        "the kernel was ended after {waited:?}"
    );
    let log = pool.log()?;
    ensure!(log.contains("more than --kernel-limit allows"), "{log}");
    // Others, whose kernels end, are none the wiser: also with more of them than are looked after.
    let many = packages::output(pool.remoted("/usr/bin/python3").arg(program("many.py")))?;
    ensure!(many == "40000 have run\n", "{many}");
    figures(&pool)
}
