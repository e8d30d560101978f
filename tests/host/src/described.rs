//! Tests the REST API against its description. Schemathesis makes thousands of requests that the
//! description allows or forbids, and sends them to a VMM without a VM and to one whose VM runs.
//! The latter needs KVM, of any kind.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use gantry_build::{programs, progress::Step, root, target};
use gantry_tests::{
    bare_kernel, http,
    report::{Outcome, Skipped},
    rig::{Cache, packages, python},
};

use crate::selected;

/// The package that makes the requests.
const SCHEMATHESIS: &str = "schemathesis==4.32.5";

/// Timeout for the VMM to start listening.
const PATIENCE: Duration = Duration::from_secs(30);

/// Number of random requests of each kind and path, in addition to those at every bound.
const EXAMPLES: &str = "20";

/// Excluded paths: those that end the VMM, those that wait, and those that act on a configuration,
/// which here is made up.
const LEFT_OUT: &[&str] = &[
    "/vmm.shutdown",
    "/vm.boot",
    "/vm.reboot",
    "/vm.receive-migration",
    "/vm.restore",
];

/// Further paths excluded while a VM runs: those that end it or change this host.
const LEFT_OUT_RUNNING: &[&str] = &[
    "/vm.delete",
    "/vm.shutdown",
    "/vm.power-button",
    "/vm.add-net",
    "/vm.send-migration",
];

type Scenario = fn() -> Result<()>;

const SCENARIOS: &[(&str, Scenario)] = &[
    (
        "api: answers to requests of all kinds are as the description says",
        answers,
    ),
    (
        "api: answers are as the description says while a VM runs, too",
        answers_running,
    ),
    ("api: what the description allows is understood", understood),
];

/// Runs the scenarios that the words select; without words, all.
pub fn run(words: &[String], report: impl FnMut(&str, &Outcome, f64)) -> Result<()> {
    selected::run(
        SCENARIOS,
        words,
        || packages::install(python::PROGRAMS),
        |scenario, ()| scenario(),
        report,
    )
}

/// The folder with Schemathesis and its dependencies, which are fetched once.
pub fn library() -> Result<PathBuf> {
    let name = SCHEMATHESIS.replace("==", "-");
    Cache::open()?.made(&name, |work| {
        let step = Step::new("fetching Schemathesis (once)");
        python::install(&[SCHEMATHESIS], work).map_err(|error| Skipped(format!("{error:#}")))?;
        step.finish();
        Ok(())
    })
}

/// Whether a VM exists when requests arrive.
#[derive(Clone, Copy, PartialEq)]
enum Guest {
    None,
    Runs,
}

/// A VMM with its own folder for files. It is killed when the value is dropped.
struct Vmm {
    process: Child,
    socket: PathBuf,
}

impl Vmm {
    fn start(folder: &Path, guest: Guest) -> Result<Self> {
        if folder.exists() {
            fs::remove_dir_all(folder)?;
        }
        fs::create_dir_all(folder)?;
        let log = File::create(folder.join("log"))?;
        let mut command = Command::new(programs::gantry()?);
        command.args(["--api-socket", "api"]).current_dir(folder);
        if guest == Guest::Runs {
            fs::write(folder.join("kernel"), bare_kernel::sleeping())?;
            command.args(["--kernel", "kernel", "--memory", "size=64M"]);
            command.args(["--serial", "off", "--console", "off"]);
        }
        let process = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("cannot start gantry")?;
        let vmm = Self {
            process,
            socket: folder.join("api"),
        };
        let start = Instant::now();
        while UnixStream::connect(&vmm.socket).is_err() {
            ensure!(start.elapsed() < PATIENCE, "the VMM does not listen");
            thread::sleep(Duration::from_millis(10));
        }
        Ok(vmm)
    }

    /// Serves the API on a TCP port of this machine, as Schemathesis needs, for the life of this
    /// process.
    fn port(&self) -> Result<u16> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let port = listener.local_addr()?.port();
        let socket = self.socket.clone();
        thread::spawn(move || {
            for client in listener.incoming().filter_map(io::Result::ok) {
                if let Ok(server) = UnixStream::connect(&socket) {
                    join(client, server);
                }
            }
        });
        Ok(port)
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Relays bytes in both directions until both ends have closed.
fn join(client: TcpStream, server: UnixStream) {
    let Ok((mut from_client, mut from_server)) = client
        .try_clone()
        .and_then(|client| Ok((client, server.try_clone()?)))
    else {
        return;
    };
    let (mut client, mut server) = (client, server);
    thread::spawn(move || {
        pass(&mut from_client, &mut server);
        let _ = server.shutdown(Shutdown::Write);
    });
    thread::spawn(move || {
        pass(&mut from_server, &mut client);
        let _ = client.shutdown(Shutdown::Write);
    });
}

fn pass(from: &mut impl Read, to: &mut impl Write) {
    // An error means that one end has closed.
    let _ = io::copy(from, to);
}

/// Makes requests to a fresh VMM, with further arguments. Fails if any response fails a check.
fn request(name: &str, guest: Guest, arguments: &[&str]) -> Result<()> {
    let library = library()?;
    let mut vmm = Vmm::start(&target().join("api").join(name), guest)?;
    let url = format!("http://127.0.0.1:{}/api/v1", vmm.port()?);
    let output = Command::new(python::PYTHON)
        .args(["-m", "schemathesis.cli", "run"])
        .arg(root().join("resources/openapi/gantry.yaml"))
        .args(["--url", &url, "--max-examples", EXAMPLES, "--seed", "1"])
        .args(["--phases", "coverage,fuzzing", "--no-shrink", "--no-color"])
        .args(["--continue-on-failure", "--suppress-health-check", "all"])
        .args(["--warnings", "off"])
        .args(arguments)
        .env("PYTHONPATH", library)
        .env(
            "SCHEMATHESIS_HOOKS",
            root().join("tests/host/src/described/hooks.py"),
        )
        .current_dir(target().join("api"))
        .stdin(Stdio::null())
        .output()
        .context("cannot run Schemathesis")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        vmm.process.try_wait()?.is_none(),
        "the VMM has ended: {}\n{said}",
        fs::read_to_string(vmm.socket.with_file_name("log"))?
    );
    ensure!(
        output.status.success(),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    if guest == Guest::Runs {
        let info = http::request(&vmm.socket, "GET", "vm.info", None)?;
        let state = &info.body["state"];
        let is_there = ["Running", "Paused"].iter().any(|one| state == one);
        ensure!(is_there, "the VM was to run all the time, and is {state}");
    }
    // Without requests, no check could fail.
    ensure!(said.contains(" generated"), "no requests were made: {said}");
    Ok(())
}

/// Checks the status, type and contents of responses, and that nothing forbidden is accepted.
fn answers() -> Result<()> {
    check_answers("answers", Guest::None, LEFT_OUT)
}

fn answers_running() -> Result<()> {
    if File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_err()
    {
        bail!(Skipped("/dev/kvm cannot be opened".to_owned()));
    }
    let left_out = [LEFT_OUT, LEFT_OUT_RUNNING].concat();
    check_answers("answers-running", Guest::Runs, &left_out)
}

fn check_answers(name: &str, guest: Guest, left_out: &[&str]) -> Result<()> {
    let mut arguments = vec![
        "--checks",
        "status_code_conformance,content_type_conformance,response_schema_conformance,\
         negative_data_rejection",
    ];
    for path in left_out {
        arguments.extend(["--exclude-path", path]);
    }
    request(name, guest, &arguments)
}

/// Checks that everything the description allows is understood, or refused with a reason that the
/// description names.
fn understood() -> Result<()> {
    let create = "/vm.create";
    let arguments = ["--mode", "positive", "--checks", "refusals_are_stated"];
    // Once a VM has been created, other refusals are possible: those of requests that do not fit
    // the VM.
    let others = [
        &arguments[..],
        &["--exclude-path", create, "--exclude-path", "/vmm.shutdown"],
    ]
    .concat();
    request("understood", Guest::None, &others)?;
    let alone = [&arguments[..], &["--include-path", create]].concat();
    request("understood-create", Guest::None, &alone)
}
