//! A command that ends in any way leaves no process.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use gantry_tests::processes;

/// In place of cargo-fuzz: starts a process that leaves its session and its parent, and never ends.
const PROGRAM: &str = "#!/bin/sh
setsid sleep 600 >/dev/null 2>&1 &
echo $! >\"$GANTRY_CACHE/number\"
mv \"$GANTRY_CACHE/number\" \"$GANTRY_CACHE/left\"
exec sleep 600
";

/// Waits for something that only a hang prevents.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process has not ended: one that nobody has waited for yet has.
fn runs(process: u32) -> bool {
    let Ok(text) = fs::read_to_string(format!("/proc/{process}/stat")) else {
        return false;
    };
    // The state follows the name, which is in parentheses.
    let state = text.rsplit_once(") ").unwrap().1;
    !state.starts_with(['Z', 'X'])
}

/// A command with both its guards.
struct Guarded {
    outer: Child,
    /// Numbers of both guards, of the process that does the work, and of the one that left its parent.
    all: [u32; 4],
}

impl Guarded {
    fn start(cache: &Path) -> Self {
        let folder = cache.join("tools/bin");
        fs::create_dir_all(&folder).unwrap();
        let program = folder.join("cargo-fuzz");
        fs::write(&program, PROGRAM).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        // What building targets needs is not installed for this.
        fs::write(folder.join("c++"), "").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        command
            .arg("fuzz")
            .env(
                "PATH",
                format!("{}:{}", folder.display(), std::env::var("PATH").unwrap()),
            )
            .env("GANTRY_CACHE", cache)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // The guards do not wait for signals that whoever runs this test ignores.
        let heed = || {
            for signal in [libc::SIGHUP, libc::SIGINT] {
                // SAFETY: plain call.
                unsafe { libc::signal(signal, libc::SIG_DFL) };
            }
            Ok(())
        };
        // SAFETY: async-signal-safe calls between fork and exec.
        unsafe { command.pre_exec(heed) };
        let outer = command.spawn().unwrap();
        until("the command has started a process", || {
            cache.join("left").exists()
        });
        let left = fs::read_to_string(cache.join("left")).unwrap();
        let only = |parent: u32| match processes::children(parent).unwrap()[..] {
            [child] => child,
            ref children => panic!("{parent} has the children {children:?}"),
        };
        let inner = only(outer.id());
        let all = [outer.id(), inner, only(inner), left.trim().parse().unwrap()];
        assert!(all.into_iter().all(runs), "{all:?}");
        Self { outer, all }
    }

    /// Sends a signal to one of them, after which all of them end.
    fn end(mut self, which: usize, signal: i32) {
        // SAFETY: plain call.
        unsafe { libc::kill(self.all[which].cast_signed(), signal) };
        let all = self.all;
        until(
            &format!("{all:?} end after signal {signal} to {which}"),
            || !all.into_iter().any(runs),
        );
        self.outer.wait().unwrap();
    }
}

#[test]
fn a_command_leaves_no_process_whichever_of_its_processes_is_ended() {
    let ends = [
        (0, libc::SIGKILL),
        (1, libc::SIGKILL),
        (2, libc::SIGKILL),
        (0, libc::SIGHUP),
        (0, libc::SIGTERM),
        (1, libc::SIGINT),
    ];
    for (which, signal) in ends {
        let cache = tempfile::tempdir().unwrap();
        Guarded::start(cache.path()).end(which, signal);
    }
}
