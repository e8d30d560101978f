//! Real workers' processes before the arbiter's program, on a device that they only pretend to have: who is stopped goes on
//! when the arbiter, or whoever it was stopped for, is killed.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    env,
    io::{self, BufRead, BufReader, Lines, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use remoting_proto::wire::api::RequestClass;
use remoting_turns::{
    Moment, introduce,
    message::Join,
    slices::{Slices, Use},
    worker::Turns,
};

/// Makes this program a worker of that name.
const WORKER: &str = "GANTRY_TEST_WORKER";
/// The one that always uses the device, however short its slices are, and the one that is owed all of its time.
const HOG: &str = "hog";
const OWED: &str = "owed";
/// As the first, but its requests seem to be short; the device's record knows better.
const HIDDEN: &str = "hidden";
const REQUEST: Duration = Duration::from_millis(1);

/// Says what it is told.
struct Said {
    stopped: Arc<AtomicBool>,
    /// What the device's record has for it, and until when, if there is a record.
    record: Option<(Duration, Moment)>,
}

impl Slices for Said {
    fn set(&mut self, _: Duration) {}

    fn stop(&mut self) -> bool {
        self.stopped.store(true, Ordering::SeqCst);
        say("stopped");
        true
    }

    fn keep(&mut self) -> bool {
        true
    }

    fn start(&mut self) {
        self.stopped.store(false, Ordering::SeqCst);
        say("started");
    }

    fn used(&mut self, _: Duration) -> Option<Use> {
        let (total, until) = self.record.as_mut()?;
        let now = Moment::now();
        if !self.stopped.load(Ordering::SeqCst) {
            *total += now.since(*until);
        }
        *until = now;
        Some(Use {
            total: *total,
            alone: false,
        })
    }

    fn end_use(&mut self) {}

    fn gpus(&self) -> u64 {
        1
    }
}

/// Not as a test's output, which is captured.
fn say(what: &str) {
    let _ = writeln!(io::stderr(), "{what}");
}

/// Is a worker, until it is killed, if this process was started as one.
#[test]
fn worker() {
    let Ok(name) = env::var(WORKER) else {
        return;
    };
    let control = io::stdin().as_fd().try_clone_to_owned().unwrap();
    let stopped = Arc::new(AtomicBool::new(false));
    let (hog, hidden) = (name == HOG, name == HIDDEN);
    let join = Join {
        name,
        weight: if hog || hidden { 1 } else { 3 },
        latency: 0,
        sliced: true,
    };
    let slices = Box::new(Said {
        stopped: Arc::clone(&stopped),
        record: hidden.then(|| (Duration::ZERO, Moment::now())),
    });
    let mut turns = Turns::start(UnixStream::from(control), &join, Some(slices), |_| {}).unwrap();
    let class = RequestClass(1);
    loop {
        // Always two, so that one follows the other.
        while turns.reports_after() != Some(1) && turns.may_submit(class, false, Moment::now()) {
            turns.submitted(class, Moment::now());
        }
        thread::sleep(REQUEST);
        if stopped.load(Ordering::SeqCst) || turns.reports_after().is_none() {
            continue;
        }
        let span = if hog {
            REQUEST
        } else {
            Duration::from_nanos(1)
        };
        let now = Moment::now();
        turns.took(Some(span), now);
        turns.completed(1, now);
    }
}

/// A worker's process, and what it says.
struct Worker {
    process: Child,
    lines: Lines<BufReader<Box<dyn io::Read>>>,
}

impl Worker {
    fn start(name: &str, arbiter: &Path) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut process = Command::new(env::current_exe().unwrap())
            .args(["worker", "--exact", "--nocapture"])
            .env(WORKER, name)
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        introduce::attend(&process, ours, arbiter.to_owned()).unwrap();
        let said: Box<dyn io::Read> = Box::new(process.stderr.take().unwrap());
        let lines = BufReader::new(said).lines();
        Self { process, lines }
    }

    /// Waits until it says this.
    fn wait_for(&mut self, what: &str) {
        let said = self.lines.by_ref().map_while(Result::ok);
        assert!(said.into_iter().any(|line| line == what), "it has ended");
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The arbiter's process, killed when this is dropped.
struct Arbiter(Child);

impl Arbiter {
    fn start(socket: &Path) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_gantry-arbiter"))
            .args(["--policy", "ledger", "--socket"])
            .arg(socket)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(process.stderr.take().unwrap());
        // It is read to its end, so that it can write.
        let mut lines = said.lines();
        lines.next().unwrap().unwrap();
        thread::spawn(move || lines.for_each(drop));
        Self(process)
    }
}

impl Drop for Arbiter {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn who_is_stopped_goes_on_when_the_arbiter_or_the_owed_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let arbiter = Arbiter::start(&socket);
    let mut hog = Worker::start(HOG, &socket);
    let mut owed = Worker::start(OWED, &socket);
    hog.wait_for("stopped");
    drop(arbiter);
    hog.wait_for("started");
    let _arbiter = Arbiter::start(&socket);
    hog.wait_for("stopped");
    owed.kill();
    hog.wait_for("started");
}

#[test]
fn whose_requests_seem_short_is_stopped_by_what_the_devices_record_has() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let _arbiter = Arbiter::start(&socket);
    let mut hidden = Worker::start(HIDDEN, &socket);
    let _owed = Worker::start(OWED, &socket);
    hidden.wait_for("stopped");
}
