//! Two machines of Gantry with Linux guests of one stock kernel: a process of the server's guest
//! registers handlers that make system calls, and a process of the client's delegates to them.
//! [`guest`] is what runs in both; this program starts, asks and kills the machines.
//!
//! The server's kernel works on the client's vCPU, and finds its own data there if both kernels
//! have the same virtual addresses for what the CPU leads them to: system calls, exceptions,
//! per-CPU data. Guests of one kernel, one size and without address randomization do. The page
//! table of the client's process must not hide memory of the server, which its kernel might need:
//! the server's RAM has a hole where much of the client's free memory is, and the client forks
//! until the page table of a child is there.

use std::{
    fs,
    io::Write,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{Check, checks, guest};

const GANTRY: &str = "/bin/gantry";
const KERNEL: &str = "/linux/vmlinux";
const INITRAMFS: &str = "/linux/initramfs.cpio";
const COMMAND_LINE: &str = "earlyprintk=serial,0x3f8,115200,keep quiet nokaslr mitigations=off \
    noxsave tsc=reliable no_timer_check cryptomgr.notests random.trust_cpu=on \
    initcall_blacklist=load_system_certificate_list,crypto_kdf108_init,trace_eval_init \
    panic=-1 reboot=t --";

/// Longest wait for anything: the emulator boots a guest in a tenth of that on an idle machine.
const PATIENCE: Duration = Duration::from_secs(600);
/// How often files are looked at.
const SOON: Duration = Duration::from_millis(100);

/// All checks.
pub fn all(check: Check<'_>) {
    if !check("the module loads", &mut checks::load) {
        return;
    }
    let mut machines = Vec::new();
    let frozen = check(
        "a VM stands still when a process of it has registered handlers",
        &mut || {
            let options = "socket=/tmp/gate,hole_start=64M,hole_end=192M,id=gate";
            let mut server = Machine::start("server", &["--accel-server", options])?;
            let found = server.event("frozen");
            machines.push(server);
            found
        },
    );
    let Some(server) = machines.first_mut().filter(|_| frozen) else {
        return;
    };
    check(
        "its vCPU gives up the CPU, and its state says so",
        &mut || stands_still(server),
    );
    check("what a frozen VM cannot do is refused", &mut || {
        refusals(server)
    });
    check(
        "a frozen VM goes on when it is resumed, and serves again",
        &mut || {
            server.ctl(&["resume"])?;
            server.wait_for("a client has ended: Resumed")?;
            server.event("frozen")
        },
    );
    check("a frozen VM is booted again, and serves again", &mut || {
        server.ctl(&["reboot"])?;
        server.event("rebooted")?;
        server.event("frozen")
    });
    let options = "transport=gate,server=/tmp/gate,shared=1M,id=gate";
    let mut client = match Machine::start("client", &["--accel", options]) {
        Ok(client) => client,
        Err(error) => {
            check("a client's VM starts", &mut || bail!("{error:#}"));
            return;
        }
    };
    with_client(check, server, &mut client, options);
}

/// What a client's VM and its server do together, and how that ends.
fn with_client(check: Check<'_>, server: &mut Machine, client: &mut Machine, options: &str) {
    check(
        "the server of a process that was killed is free before anybody asks",
        &mut || {
            client.wait_for(guest::KILLED)?;
            server.event("thawed")?;
            client.listen()?;
            let asked = client.lines.iter().any(|line| line == guest::ASKING);
            ensure!(!asked, "another process has asked");
            server.wait_for("a client has ended: ClientGone")?;
            server.event("frozen")
        },
    );
    // The guests' own checks are printed while they run.
    if !check("a process of another VM delegates to it", &mut || {
        client.wait_for(guest::DONE)
    }) {
        return;
    }
    check(
        "the server's VM goes on when its client has left",
        &mut || {
            server.wait_for(guest::DONE)?;
            server.event("frozen")?;
            let counters = server.ctl(&["counters"])?;
            println!("figure counters of the server: {}", compact(&counters));
            Ok(())
        },
    );
    check(
        "a VM whose process is in another VM is not saved",
        &mut || {
            client.wait_for(guest::LONG)?;
            thread::sleep(Duration::from_secs(2));
            client.ctl(&["pause"])?;
            let saved = client.ctl(&["snapshot", "/tmp/snapshot"]);
            client.ctl(&["resume"])?;
            let refused = format!("{:#}", saved.err().context("it was saved")?);
            ensure!(refused.contains("uses the gate"), "{refused}");
            Ok(())
        },
    );
    check(
        "a server is given up whose client is killed in a system call",
        &mut || {
            let counters = client.ctl(&["counters"])?;
            println!("figure counters of the client: {}", compact(&counters));
            server.seen = server.events()?.len();
            client.kill()?;
            lost(server)
        },
    );
    check("a server is given up whose handler waits", &mut || {
        server.ctl(&["reboot"])?;
        server.event("rebooted")?;
        server.event("frozen")?;
        let mut waiter = Machine::start("waiter", &["--accel", options])?;
        waiter.wait_for(guest::DONE)?;
        lost(server)
    });
}

/// The server's machine says that it is.
fn lost(server: &mut Machine) -> Result<()> {
    server.event("thawed")?;
    // The rest of the event.
    thread::sleep(SOON);
    let events = server.events()?;
    let last = events.get(server.seen..).map(compact).unwrap_or_default();
    let reason = last.split('}').next().unwrap_or_default();
    ensure!(reason.contains("lost"), "{last}");
    Ok(())
}

fn compact(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The vCPU's thread takes no time, and the API says why.
fn stands_still(server: &Machine) -> Result<()> {
    let info = server.ctl(&["info"])?;
    ensure!(info.contains("\"Frozen\""), "{info}");
    let before = server.ticks()?;
    thread::sleep(Duration::from_secs(1));
    let after = server.ticks()?;
    ensure!(before == after, "{} ticks", after - before);
    Ok(())
}

fn refusals(server: &Machine) -> Result<()> {
    for request in [
        &["pause"][..],
        &["snapshot", "/tmp/snapshot"],
        &["resize", "--memory", "512M"],
        &["power-button"],
    ] {
        match server.ctl(request) {
            Ok(answer) => bail!("{request:?}: {answer}"),
            Err(error) if format!("{error:#}").contains("frozen") => {}
            Err(error) => return Err(error.context(format!("{request:?}"))),
        }
    }
    Ok(())
}

/// A process of Gantry.
struct Machine {
    name: &'static str,
    process: Child,
    /// Bytes of its guest's text that were printed.
    printed: usize,
    /// The guest's lines that nobody waited for yet.
    lines: Vec<String>,
    /// Bytes of events that nobody waits for any more.
    seen: usize,
}

impl Machine {
    fn start(name: &'static str, options: &[&str]) -> Result<Self> {
        let file = |what: &str| format!("/tmp/{name}.{what}");
        let process = Command::new(GANTRY)
            .args(["--kernel", KERNEL, "--initramfs", INITRAMFS])
            .args(["--cmdline", &format!("{COMMAND_LINE} {name}")])
            .args(["--cpus", "boot=1", "--memory", "size=256M"])
            .args(["--serial", &format!("file={}", file("serial"))])
            .args(["--console", "off"])
            .args(["--debug-console", &format!("file={}", file("text"))])
            .args(["--api-socket", &file("api")])
            .args(["--event-monitor", &format!("path={}", file("events"))])
            .args(["--log-file", &file("log"), "-v"])
            .args(options)
            .stdin(Stdio::null())
            .spawn()
            .context(GANTRY)?;
        Ok(Self {
            name,
            process,
            printed: 0,
            lines: Vec::new(),
            seen: 0,
        })
    }

    fn read(&self, what: &str) -> Result<String> {
        let path = format!("/tmp/{}.{what}", self.name);
        let bytes = fs::read(&path).or_else(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Ok(Vec::new()),
            _ => Err(error),
        })?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn events(&self) -> Result<String> {
        self.read("events")
    }

    /// Prints what the guest has said since the last time; its checks are this program's.
    fn listen(&mut self) -> Result<()> {
        let text = self.read("text")?;
        let Some(end) = text.rfind('\n') else {
            return Ok(());
        };
        for line in text.get(self.printed..end).unwrap_or_default().lines() {
            if line.starts_with("check ") || line.starts_with("figure ") {
                println!("{line}");
            } else if !line.is_empty() {
                println!("{}: {line}", self.name);
                self.lines.push(line.to_owned());
            }
            let _ = std::io::stdout().flush();
        }
        self.printed = end;
        Ok(())
    }

    /// Waits until something is so.
    fn wait(&mut self, what: &str, mut is: impl FnMut(&mut Self) -> Result<bool>) -> Result<()> {
        let start = Instant::now();
        loop {
            self.listen()?;
            if is(self)? {
                return Ok(());
            }
            let ended = self.process.try_wait()?;
            if ended.is_some() || start.elapsed() > PATIENCE {
                bail!(
                    "{} has not come to {what} ({ended:?}): {} {} {}",
                    self.name,
                    self.read("log")?,
                    self.read("serial")?,
                    compact(&self.events()?)
                );
            }
            thread::sleep(SOON);
        }
    }

    /// Waits until the guest says a line.
    fn wait_for(&mut self, line: &str) -> Result<()> {
        self.wait(line, |machine| {
            let found = machine.lines.iter().position(|other| other == line);
            if let Some(at) = found {
                machine.lines.drain(..=at);
            }
            Ok(found.is_some())
        })
    }

    /// Waits for an event that nobody waited for yet.
    fn event(&mut self, name: &str) -> Result<()> {
        let name = format!("\"{name}\"");
        self.wait(&name, |machine| {
            let events = machine.events()?;
            let found = events
                .get(machine.seen..)
                .and_then(|events| events.find(&name));
            if let Some(at) = found {
                machine.seen += at + name.len();
            }
            Ok(found.is_some())
        })
    }

    /// Asks the machine for something; the answer.
    fn ctl(&self, arguments: &[&str]) -> Result<String> {
        let socket = format!("/tmp/{}.api", self.name);
        let output = Command::new(GANTRY)
            .args(["ctl", "--socket", &socket])
            .args(arguments)
            .output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            bail!("{}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(text)
    }

    /// Time that the vCPU's thread has taken, in clock ticks.
    fn ticks(&self) -> Result<u64> {
        let tasks = format!("/proc/{}/task", self.process.id());
        for task in fs::read_dir(&tasks)? {
            let path = task?.path();
            if fs::read_to_string(path.join("comm"))?.trim() != "vcpu0" {
                continue;
            }
            let stat = fs::read_to_string(path.join("stat"))?;
            // After the name: the state, and ten numbers.
            let rest = stat.rsplit(')').next().unwrap_or_default();
            let times = rest.split_whitespace().skip(11).take(2);
            return Ok(times.filter_map(|time| time.parse::<u64>().ok()).sum());
        }
        bail!("no thread of a vCPU in {tasks}")
    }

    fn kill(&mut self) -> Result<()> {
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}
