//! The binary as a user or a management tool runs it. None of this needs KVM.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs,
    io::{Read, Write},
    os::unix::{
        fs::{PermissionsExt, symlink},
        net::UnixListener,
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use manual::{check_alone, check_scarce, check_unread};

const GANTRY: &str = env!("CARGO_BIN_EXE_gantry");

/// Longer than any machine needs to start a process.
const PATIENCE: Duration = Duration::from_secs(30);

fn gantry(arguments: &[&str]) -> Output {
    Command::new(GANTRY).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A VMM that waits for requests; killed with the test.
struct Waiting {
    process: Child,
    socket: PathBuf,
}

impl Waiting {
    fn start(dir: &Path, more: &[&str]) -> Self {
        let socket = dir.join("api");
        let process = Command::new(GANTRY)
            .arg("--api-socket")
            .arg(&socket)
            .args(more)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let waiting = Self { process, socket };
        waiting.until_it_answers();
        waiting
    }

    fn until_it_answers(&self) {
        let start = Instant::now();
        while !self.ctl(&["ping"]).status.success() {
            assert!(start.elapsed() < PATIENCE, "the VMM does not answer");
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn ctl(&self, arguments: &[&str]) -> Output {
        let socket = self.socket.to_str().unwrap();
        gantry(&[&["ctl", "--socket", socket], arguments].concat())
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn the_version_is_that_of_the_name_that_was_called() {
    let output = gantry(&["--version"]);
    let expected = format!("gantry v{}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(text(&output.stdout), expected);
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("cloud-hypervisor");
    symlink(GANTRY, &link).unwrap();
    let output = Command::new(link).arg("--version").output().unwrap();
    assert_eq!(text(&output.stdout), "cloud-hypervisor v54.0.0\n");
}

#[test]
fn a_wrong_command_line_has_exit_status_2_and_a_failure_1() {
    assert_eq!(gantry(&[]).status.code(), Some(2));
    assert_eq!(gantry(&["--disk", "nonsense=1"]).status.code(), Some(2));
    let no_vcpu = gantry(&["--kernel", "/nonexistent", "--cpus", "boot=0"]);
    assert_eq!(no_vcpu.status.code(), Some(2));
    let output = gantry(&["ctl", "--socket", "/nonexistent/api", "ping"]);
    assert_eq!(output.status.code(), Some(1));
    let message = text(&output.stderr);
    assert!(
        message.starts_with("gantry: cannot connect to /nonexistent/api"),
        "{message}"
    );
    assert!(message.contains("\n  because: "), "{message}");
}

#[test]
fn a_vmm_that_is_silent_may_be_the_one_that_is_meant() {
    let [one, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let mut running = Waiting::start(one.path(), &[]);
    let stopped = Waiting::start(other.path(), &[]);
    let ctl = |command| {
        let mut ctl = Command::new(GANTRY);
        ctl.args(["ctl", command]).env_remove("GANTRY_SOCKET");
        ctl.output().unwrap()
    };
    // SAFETY: the process is this test's child, which has not been waited for.
    unsafe { libc::kill(stopped.process.id() as i32, libc::SIGSTOP) };
    let output = ctl("shutdown-vmm");
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{said}");
    let silent = format!("{} (does not answer)", stopped.socket.display());
    assert!(said.contains(running.socket.to_str().unwrap()), "{said}");
    assert!(said.contains(&silent), "{said}");
    assert!(running.ctl(&["ping"]).status.success(), "it has ended");
    let line = format!(
        "{}\t{}\tdoes not answer\n",
        stopped.socket.display(),
        stopped.process.id()
    );
    let listed = text(&ctl("list").stdout);
    assert!(listed.contains(&line), "{listed}");
    let said = text(&stopped.ctl(&["ping"]).stderr);
    assert!(said.contains("does not answer within 5s"), "{said}");
    assert!(running.ctl(&["shutdown-vmm"]).status.success());
    assert!(running.process.wait().unwrap().success());
}

#[test]
fn requests_of_the_client_are_carried_out_under_the_seccomp_filter() {
    let dir = tempfile::tempdir().unwrap();
    let events = dir.path().join("events");
    let mut vmm = Waiting::start(
        dir.path(),
        &["--event-monitor", &format!("path={}", events.display())],
    );
    let output = vmm.ctl(&["info"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("404"));
    let config = dir.path().join("vm.json");
    fs::write(&config, r#"{"payload":{"kernel":"/nonexistent"}}"#).unwrap();
    let create = ["create", config.to_str().unwrap()];
    assert!(vmm.ctl(&create).status.success());
    assert!(text(&vmm.ctl(&create).stderr).contains("500"));
    assert!(text(&vmm.ctl(&["info"]).stdout).contains(r#""state": "Created""#));
    assert!(text(&vmm.ctl(&["metrics"]).stdout).contains(r#"{state="created"} 1"#));
    assert!(text(&vmm.ctl(&["pause"]).stderr).contains("405"));
    assert!(vmm.ctl(&["delete"]).status.success());
    assert!(vmm.ctl(&["shutdown-vmm"]).status.success());
    assert!(vmm.process.wait().unwrap().success());
    assert!(!vmm.socket.exists());
    let events = fs::read_to_string(events).unwrap();
    assert!(events.contains(r#""source": "vmm""#), "{events}");
}

#[test]
fn after_sigkill_the_next_start_succeeds_and_while_one_runs_it_fails() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = Waiting::start(dir.path(), &[]);
    let socket = first.socket.to_str().unwrap().to_owned();
    let output = gantry(&["--api-socket", &socket]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("another process listens on"));
    first.process.kill().unwrap();
    first.process.wait().unwrap();
    assert!(first.socket.exists());
    let second = Waiting::start(dir.path(), &[]);
    assert!(second.ctl(&["ping"]).status.success());
}

#[test]
fn a_socket_can_be_inherited() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("api");
    let listener = UnixListener::bind(&socket).unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&listener);
    let mut command = Command::new(GANTRY);
    command.args(["--api-socket", "fd=100"]);
    // SAFETY: dup2 is async-signal-safe, and the descriptor is open in the child.
    unsafe {
        command.pre_exec(move || match libc::dup2(fd, 100) {
            100 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    let process = command.spawn().unwrap();
    let vmm = Waiting { process, socket };
    vmm.until_it_answers();
}

#[test]
fn a_configuration_can_come_from_standard_input() {
    let dir = tempfile::tempdir().unwrap();
    let vmm = Waiting::start(dir.path(), &[]);
    let mut client = Command::new(GANTRY)
        .args(["ctl", "--socket", vmm.socket.to_str().unwrap(), "create"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = client.stdin.take().unwrap();
    stdin.write_all(br#"{"payload":{"kernel":1}}"#).unwrap();
    drop(stdin);
    let output = client.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("at payload.kernel"));
}

/// A command of `gantry ctl` that is not told which VMM is meant.
fn ctl_of(variable: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(GANTRY);
    command
        .arg("ctl")
        .args(arguments)
        .env("GANTRY_SOCKET", variable);
    command.output().unwrap()
}

#[test]
fn the_vmm_that_is_meant_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let vmm = Waiting::start(dir.path(), &[]);
    let socket = vmm.socket.to_str().unwrap();
    assert!(ctl_of(socket, &["ping"]).status.success());
    let list = text(&ctl_of("", &["list"]).stdout);
    let line = list.lines().find(|line| line.starts_with(socket)).unwrap();
    assert_eq!(
        line.split('\t').nth(1),
        Some(&*vmm.process.id().to_string())
    );
    assert!(line.ends_with("no VM"), "{line}");
    // Others may run beside this test; with them, one has to be named.
    let other = tempfile::tempdir().unwrap();
    let _other = Waiting::start(other.path(), &[]);
    let output = ctl_of("", &["ping"]);
    assert_eq!(output.status.code(), Some(4));
    let message = text(&output.stderr);
    assert!(
        message.contains("VMMs are running") && message.contains(socket),
        "{message}"
    );
    let completed = gantry(&["values", "--", &format!("gantry ctl --socket {socket}")]);
    assert_eq!(text(&completed.stdout), format!("{socket}\n"));
}

#[test]
fn help_and_version_are_words_too() {
    assert_eq!(gantry(&["version"]).stdout, gantry(&["--version"]).stdout);
    let help = text(&gantry(&["help"]).stdout);
    assert!(
        help.contains("--help-all") && !help.contains("--numa"),
        "{help}"
    );
    assert!(text(&gantry(&["--help-all"]).stdout).contains("--numa"));
    assert!(text(&gantry(&["help", "ctl", "add-disk"]).stdout).contains("readonly"));
    let output = gantry(&["ctl", "help", "dance"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("no command 'dance'"));
}

#[test]
fn what_is_printed_need_not_be_read() {
    let lines = [
        "--help",
        "--help-all",
        "--version",
        "version",
        "help",
        "help ctl add-disk",
        "ctl help",
        "completions bash",
        "man",
        "values -- gantry",
    ];
    check_unread(GANTRY, &lines);
    let dir = tempfile::tempdir().unwrap();
    let waiting = Waiting::start(dir.path(), &[]);
    let socket = waiting.socket.to_str().unwrap();
    check_unread(GANTRY, &[&format!("ctl --socket {socket} metrics")]);
}

#[test]
fn a_file_too_few_or_too_large_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let line = format!("--api-socket {}", dir.path().join("api").display());
    check_scarce(GANTRY, "--api-socket /proc/none/api", Some(&line));
}

#[test]
fn a_thread_that_cannot_be_started_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let all = fs::Permissions::from_mode(0o777);
    fs::set_permissions(dir.path(), all).unwrap();
    let line = format!("--api-socket {}", dir.path().join("api").display());
    check_alone(GANTRY, &line);
}

#[test]
fn a_disk_that_is_full_of_logs_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("api");
    // The log says that events are lost, and standard error that the log is.
    for (option, value, lost) in [
        ("--event-monitor", "path=/dev/full", "an event is lost"),
        ("--log-file", "/dev/full", "lines of the log are lost"),
    ] {
        let process = Command::new(GANTRY)
            .arg("--api-socket")
            .arg(&socket)
            .args([option, value, "-vv"])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let socket = socket.clone();
        let mut waiting = Waiting { process, socket };
        waiting.until_it_answers();
        let process = waiting.process.id().cast_signed();
        // SAFETY: the process is this test's child, which has not been waited for.
        unsafe { libc::kill(process, libc::SIGTERM) };
        let mut said = String::new();
        let mut pipe = waiting.process.stderr.take().unwrap();
        pipe.read_to_string(&mut said).unwrap();
        let full = format!("{lost}: No space left on device");
        assert!(said.contains(&full), "{said}");
    }
}

/// Runs a shell that finds the program under its name, and returns what it prints.
fn in_shell(shell: &str, arguments: &[&str], script: &str) -> String {
    let folder = Path::new(GANTRY).parent().unwrap().display().to_string();
    let path = folder + ":" + &std::env::var("PATH").unwrap();
    let output = Command::new(shell)
        .args(arguments)
        .args(["-c", script])
        .env("PATH", path)
        .output();
    let output = output.unwrap_or_else(|error| panic!("{shell} (apt install {shell}): {error}"));
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn bash_completes_keys() {
    let script = "source <(gantry completions bash); \
         COMP_LINE='gantry --disk path=/x,reado'; COMP_POINT=${#COMP_LINE}; \
         COMP_WORDS=(gantry --disk path = /x,reado); COMP_CWORD=4; \
         _gantry_values gantry /x,reado = 2>/dev/null; echo \"${COMPREPLY[@]}\"";
    assert_eq!(in_shell("bash", &[], script), "/x,readonly=\n");
}

#[test]
fn fish_completes_keys_devices_and_virtual_machines() {
    let dir = tempfile::tempdir().unwrap();
    let vmm = Waiting::start(dir.path(), &[]);
    let script = format!(
        "gantry completions fish | source; \
         for line in '--disk path=/x,reado' '--disk path=/x pa' 'ctl add-net ta' '--kern' \
             'ctl --socket {0}'; complete --do-complete \"gantry $line\"; end",
        vmm.socket.display()
    );
    let printed = in_shell("fish", &["--no-config"], &script);
    let words: Vec<_> = printed
        .lines()
        .filter_map(|line| line.split('\t').next())
        .collect();
    assert_eq!(
        words,
        [
            "path=/x,readonly=",
            "path=",
            "tap=",
            "--kernel",
            vmm.socket.to_str().unwrap()
        ]
    );
}

/// An interactive zsh on a terminal of its own, where tab is pressed at the end of each line.
#[test]
fn zsh_completes_keys_devices_and_virtual_machines() {
    const SCRIPT: &str = r#"
        zmodload zsh/zpty
        mkdir $DIR/functions && gantry completions zsh >$DIR/functions/_gantry
        zpty z zsh -f -i
        zpty -w z "fpath=($DIR/functions \$fpath); autoload -U compinit; compinit -u -D; stty -echo"
        zpty -w z 'show() { print -r -- "<$BUFFER>"; BUFFER=; }; zle -N show; bindkey "^X" show
            bindkey "^I" complete-word; print all-is-"ready"'
        zpty -r z seen '*all-is-ready*'
        for line in '--disk path=/x,reado' '--disk path=/x pa' 'ctl add-net ta' '--kern' \
            "ctl --socket ${SOCKET%?}"; do
            zpty -w -n z "gantry $line"$'\t\x18'
            zpty -r -m z seen '*<*>*'
            print -r -- "<${seen##*<}"
        done"#;
    let dir = tempfile::tempdir().unwrap();
    let vmm = Waiting::start(dir.path(), &[]);
    let script = format!(
        "DIR={} SOCKET={}\n{SCRIPT}",
        dir.path().display(),
        vmm.socket.display()
    );
    let printed = in_shell("zsh", &["-f"], &script);
    let words: Vec<_> = printed
        .lines()
        .filter_map(|line| line.trim().strip_prefix('<')?.strip_suffix('>'))
        .collect();
    let socket = format!("gantry ctl --socket {} ", vmm.socket.display());
    assert_eq!(
        words,
        [
            "gantry --disk path=/x,readonly=",
            "gantry --disk path=/x path=",
            "gantry ctl add-net tap=",
            "gantry --kernel=",
            &*socket
        ]
    );
}

#[test]
fn a_slip_in_a_configuration_is_refused_with_what_was_meant() {
    let dir = tempfile::tempdir().unwrap();
    let vmm = Waiting::start(dir.path(), &[]);
    let config = dir.path().join("vm.json");
    fs::write(&config, r#"{"payload":{"kernel":"/k"},"memry":{"size":1}}"#).unwrap();
    let output = vmm.ctl(&["create", config.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("memry (memory?)"));
}
