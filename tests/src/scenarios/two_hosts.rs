//! VMs that migrate from one host to another and back, over a network that can fail.

use std::{
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    process::{Child, Command},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::{
    Context, Entry,
    disks::write_pattern,
    migration::{Waiting, go, phase_until, receive},
};
use crate::{
    beside::{self, Beside, Number},
    gantry::Gantry,
    guest::Guest,
    net::sh,
    opencl::until,
};

pub const SCENARIOS: &[Entry] = &[
    (
        "migration: between two hosts, over TCP and back, a guest counts on and keeps its memory and a disk that both have",
        over_tcp,
    ),
    (
        "migration: between two hosts, over TLS and 32 connections, a guest survives a link that is cut, and moves",
        over_tls,
    ),
    (
        "migration: between two hosts, a link that is cut at the handover leaves the guest to one of them, on a disk that both have",
        handover,
    ),
];

/// Port on which a host waits for a VM.
const PORT: u16 = 4444;

/// A guest that counts on its console, which is a file on its current host, and checks its memory.
struct Counting {
    gantry: Gantry,
    guest: Guest,
    /// The hosts where it has been, and the console file there.
    consoles: Vec<(Number, PathBuf)>,
}

impl Counting {
    /// Boots it in a directory of the first host, with the disk that both hosts share.
    fn boot(beside: &Beside, dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir)?;
        let console = dir.join("console");
        let more = json!({
            "disks": [{"path": beside.lun()?, "image_type": "Raw"}],
            "console": {"mode": "File", "file": console},
        });
        let (gantry, mut guest) = Gantry::boot(dir, more)?;
        // Its pauses leave the host's only CPU to the migration.
        guest.run("agent check-memory 16 1 20 > /tmp/checks 2>&1 & true")?;
        guest.run(
            "(i=0; while true; do i=$((i+1)); echo $i; sleep 0.1; done) > /dev/hvc0 2>&1 & true",
        )?;
        let counting = Self {
            gantry,
            guest,
            consoles: vec![(Number::First, console)],
        };
        counting.goes_on(beside)?;
        Ok(counting)
    }

    /// Starts a Gantry on a host that waits for this guest as specified by `how`.
    fn awaited(&self, beside: &Beside, to: Number, dir: &Path, how: Value) -> Result<Waiting> {
        let gantry = match to {
            Number::First => {
                std::fs::create_dir_all(dir)?;
                Gantry::start(dir, &[])?
            }
            Number::Second => beside.gantry(dir)?,
        };
        let mut body = json!({"receiver_url": format!("tcp:{}:{PORT}", to.link())});
        if how.get("tls_dir").is_none() {
            crate::gantry::merge(&mut body, json!({"insecure": true, "paths": ["/"]}));
        }
        crate::gantry::merge(&mut body, how);
        let (_, from) = self.console();
        let listens = format!("netstat -ltn | grep -c :{PORT} || true");
        receive(
            gantry,
            body,
            &self.gantry.serial,
            &[(from, &dir.join("console"))],
            || Ok(on(to, beside, &listens)?.trim() != "0"),
        )
    }

    /// Migrates it to where it is awaited.
    fn go(self, waiting: Waiting, to: Number, dir: &Path, how: Value) -> Result<Self> {
        let mut consoles = self.consoles;
        let (gantry, guest) = go(self.gantry, waiting, how)?;
        consoles.push((to, dir.join("console")));
        Ok(Self {
            gantry,
            guest,
            consoles,
        })
    }

    fn console(&self) -> (Number, &Path) {
        let (number, path) = &self.consoles[self.consoles.len() - 1];
        (*number, path)
    }

    /// Waits until it has counted further at its current place.
    fn goes_on(&self, beside: &Beside) -> Result<()> {
        let (number, path) = self.console();
        let count = format!("cat {} 2>/dev/null | wc -l", path.display());
        let lines = || -> Result<usize> { Ok(on(number, beside, &count)?.trim().parse()?) };
        let before = lines()?;
        until("the guest counts on", || Ok(lines()? > before + 5))
    }

    /// Checks that every number was printed once and in order, wherever the guest was, and that its memory is correct.
    fn check(&mut self, beside: &Beside) -> Result<()> {
        let mut text = String::new();
        for (number, path) in &self.consoles {
            text += &on(*number, beside, &format!("cat {}", path.display()))?;
        }
        let mut lines: Vec<_> = text.lines().map(str::trim).collect();
        // The last line may be incomplete.
        lines.pop();
        ensure!(lines.len() > 10, "it has counted to {lines:?}");
        for (line, expected) in lines.iter().zip(1..) {
            ensure!(
                *line == expected.to_string(),
                "{line} where {expected} follows"
            );
        }
        let checks = self.guest.run("tail -n 3 /tmp/checks; pidof agent")?;
        ensure!(!checks.contains("wrong"), "{checks}");
        Ok(())
    }
}

/// Runs a command on a host.
fn on(host: Number, beside: &Beside, command: &str) -> Result<String> {
    match host {
        Number::First => sh(command),
        Number::Second => beside.sh(command),
    }
}

fn over_tcp(context: &Context) -> Result<()> {
    const DISK: &str =
        "echo 3 > /proc/sys/vm/drop_caches; dd if=/dev/vda bs=1M count=8 2>/dev/null";
    let beside = Beside::reach(&context.dir)?;
    let mut vm = Counting::boot(&beside, &context.dir.join("0"))?;
    let mut sum = write_pattern(&mut vm.guest, "/dev/vda", 8)?;
    for (to, name) in [(Number::Second, "1"), (Number::First, "2")] {
        let dir = context.dir.join(name);
        let waiting = vm.awaited(&beside, to, &dir, json!({}))?;
        vm = vm.go(waiting, to, &dir, json!({"verify": true}))?;
        vm.goes_on(&beside)?;
        let now = vm.guest.md5_of(DISK)?;
        ensure!(now == sum, "the disk differs: {now}, not {sum}");
        sum = write_pattern(&mut vm.guest, "/dev/vda", 8)?;
    }
    vm.check(&beside)
}

/// A process that is killed when it is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It may already have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn over_tls(context: &Context) -> Result<()> {
    let beside = Beside::reach(&context.dir)?;
    let tunnel = context.dir.join("tunnel.sock");
    let serve = |command: &mut Command| -> Result<Process> {
        Ok(Process(command.arg("--socket").arg(&tunnel).spawn()?))
    };
    let _tunnels = [
        serve(&mut Command::new("/bin/gantry-tunnel"))?,
        serve(&mut beside::command("/bin/gantry-tunnel"))?,
    ];
    let tls = |host: Number| json!({"tls_dir": host.tls_dir(), "tunnel": tunnel});
    for host in [Number::First, Number::Second] {
        let there = format!("[ -S {} ] && echo there || true", tunnel.display());
        until("a tunnel serves", || {
            Ok(on(host, &beside, &there)?.contains("there"))
        })?;
    }
    let vm = Counting::boot(&beside, &context.dir.join("0"))?;
    let dir = context.dir.join("1");
    let mut waiting = vm.awaited(&beside, Number::Second, &dir, tls(Number::Second))?;
    let mut body = json!({
        "destination_url": waiting.url, "bandwidth": 2 << 20, "stall_s": 5, "connections": 4,
    });
    crate::gantry::merge(&mut body, tls(Number::First));
    vm.gantry.put("vm.send-migration", body)?;
    let sending = |info: &Value| info["sent_bytes"].as_u64() > Some(1 << 20);
    until("memory moves", || {
        Ok(sending(&phase_until(&vm.gantry, &["Rounds", "Failed"])?))
    })?;
    beside::cut()?;
    let info = phase_until(&vm.gantry, &["Completed", "Failed"])?;
    ensure!(info["phase"] == "Failed", "{info}");
    vm.goes_on(&beside)?;
    beside::mend()?;
    waiting.gantry.kill()?;
    let dir = context.dir.join("2");
    let waiting = vm.awaited(&beside, Number::Second, &dir, tls(Number::Second))?;
    let mut how = json!({"connections": 32, "verify": true});
    crate::gantry::merge(&mut how, tls(Number::First));
    let mut vm = vm.go(waiting, Number::Second, &dir, how)?;
    vm.goes_on(&beside)?;
    vm.check(&beside)
}

/// The message that is lost when the link is cut at the handover.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Lost {
    /// The destination is never told that it may run the VM.
    Go,
    /// The source is never told that the VM runs there.
    Running,
}

/// A relay between the source and the link: at GO it cuts the link, before or after GO has arrived. Returns its port.
fn cut_at_handover(to: String, lost: Lost) -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    thread::spawn(move || {
        let pass = || -> Result<()> {
            let (source, _) = listener.accept()?;
            let destination = TcpStream::connect(&*to)?;
            let silent = Arc::new(AtomicBool::new(false));
            let (from, into) = (destination.try_clone()?, source.try_clone()?);
            let quiet = Arc::clone(&silent);
            // Ends with the connection.
            thread::spawn(move || answers(from, into, &quiet));
            orders(source, destination, lost, &silent)
        };
        if let Err(error) = pass() {
            eprintln!("between both hosts: {error:#}");
        }
    });
    Ok(port)
}

fn answers(mut from: TcpStream, mut to: TcpStream, silent: &AtomicBool) -> io::Result<()> {
    let mut bytes = [0; 4096];
    loop {
        let read = from.read(&mut bytes)?;
        if read == 0 || silent.load(Ordering::SeqCst) {
            return Ok(());
        }
        to.write_all(&bytes[..read])?;
    }
}

fn orders(mut from: TcpStream, mut to: TcpStream, lost: Lost, silent: &AtomicBool) -> Result<()> {
    // A migration frame: see vmm/migration/src/frame.rs.
    const HEADER: usize = 24;
    const GO: u8 = 7;
    loop {
        let mut frame = vec![0; HEADER];
        from.read_exact(&mut frame)?;
        let length = u32::from_le_bytes([frame[12], frame[13], frame[14], frame[15]]);
        let is_go = frame[4] == GO;
        frame.resize(HEADER + length as usize, 0);
        from.read_exact(&mut frame[HEADER..])?;
        silent.store(is_go, Ordering::SeqCst);
        if !is_go || lost == Lost::Running {
            to.write_all(&frame)?;
        }
        if is_go {
            while unsent(&to)? > 0 {
                thread::sleep(Duration::from_millis(1));
            }
            beside::cut()?;
            // The source receives nothing, as from a network that drops packets.
            from.read_to_end(&mut Vec::new())?;
            return Ok(());
        }
    }
}

/// Number of bytes that the peer has not acknowledged.
fn unsent(stream: &TcpStream) -> Result<i32> {
    let mut count = 0;
    // SAFETY: the kernel writes an int there.
    let done = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut count) };
    ensure!(done == 0, "{}", io::Error::last_os_error());
    Ok(count)
}

fn handover(context: &Context) -> Result<()> {
    let beside = Beside::reach(&context.dir)?;
    let mut vm = Counting::boot(&beside, &context.dir.join("0"))?;
    let undecided = |vm: &Counting, waiting: &Waiting, lost| -> Result<()> {
        let to = waiting.url.trim_start_matches("tcp:").to_owned();
        let url = format!("tcp:127.0.0.1:{}", cut_at_handover(to, lost)?);
        vm.gantry.put(
            "vm.send-migration",
            json!({"destination_url": url, "preserve_source": true, "downtime_ms": 2000, "stall_s": 5}),
        )?;
        let info = phase_until(&vm.gantry, &["Undecided", "Completed", "Failed"])?;
        ensure!(
            info["phase"] == "Undecided",
            "the source has not waited for a decision: {info}\n{}",
            vm.gantry.log()
        );
        beside::mend()
    };
    // The VM does not run there, and the destination is told so.
    let dir = context.dir.join("1");
    let mut waiting = vm.awaited(&beside, Number::Second, &dir, json!({}))?;
    undecided(&vm, &waiting, Lost::Go)?;
    let there = waiting.gantry.request("GET", "vm.info", None)?;
    ensure!(there.status == 404, "it runs: {}", there.text);
    vm.gantry
        .put("vm.resolve-migration", json!({"runs_at": "Source"}))?;
    phase_until(&vm.gantry, &["Failed"])?;
    ensure!(
        vm.gantry.state()? == "Running",
        "it is {}",
        vm.gantry.state()?
    );
    vm.goes_on(&beside)?;
    waiting.gantry.kill()?;
    // The VM runs there.
    let dir = context.dir.join("2");
    let waiting = vm.awaited(&beside, Number::Second, &dir, json!({}))?;
    undecided(&vm, &waiting, Lost::Running)?;
    let there = waiting.arrived()?;
    ensure!(there.state()? == "Running", "it is {}", there.state()?);
    vm.gantry
        .put("vm.resolve-migration", json!({"runs_at": "Destination"}))?;
    phase_until(&vm.gantry, &["Completed"])?;
    ensure!(vm.gantry.state()? == "Shutdown");
    vm.consoles.push((Number::Second, dir.join("console")));
    vm.guest = Guest::connect(&there.serial)?;
    vm.gantry = there;
    vm.goes_on(&beside)?;
    write_pattern(&mut vm.guest, "/dev/vda", 2)?;
    vm.check(&beside)
}
