//! A Gantry process with a Linux guest, which the checks start, control and kill.

use std::{
    fs,
    io::Write,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

const GANTRY: &str = "/bin/gantry";
const KERNEL: &str = "/linux/vmlinux";
const INITRAMFS: &str = "/linux/initramfs.cpio";
const COMMAND_LINE: &str = "earlyprintk=serial,0x3f8,115200,keep quiet nokaslr mitigations=off \
    noxsave tsc=reliable no_timer_check cryptomgr.notests random.trust_cpu=on \
    initcall_blacklist=load_system_certificate_list,crypto_kdf108_init,trace_eval_init \
    panic=-1 reboot=t";

/// The maximum wait for anything. On an idle machine the emulator boots a guest in a tenth of that.
pub const PATIENCE: Duration = Duration::from_secs(600);
/// The polling interval for files.
pub const SOON: Duration = Duration::from_millis(100);

/// Puts a text on one line.
pub fn compact(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A Gantry process.
pub struct Machine {
    name: &'static str,
    process: Child,
    /// The number of bytes of its guest's output that were printed.
    printed: usize,
    /// The guest's lines that nobody has waited for yet.
    pub lines: Vec<String>,
    /// The number of bytes of events that have been processed.
    pub seen: usize,
}

impl Machine {
    /// Boots a guest, which is told its name, with this much memory.
    pub fn start(name: &'static str, memory: &str, options: &[&str]) -> Result<Self> {
        Self::start_with(name, memory, "", options)
    }

    /// The same, with additional kernel parameters.
    pub fn start_with(
        name: &'static str,
        memory: &str,
        parameters: &str,
        options: &[&str],
    ) -> Result<Self> {
        let file = |what: &str| format!("/tmp/{name}.{what}");
        let process = Command::new(GANTRY)
            .args(["--kernel", KERNEL, "--initramfs", INITRAMFS])
            .args([
                "--cmdline",
                &format!("{COMMAND_LINE} {parameters} -- {name}"),
            ])
            .args(["--cpus", "boot=1", "--memory", &format!("size={memory}")])
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

    /// All events so far.
    pub fn events(&self) -> Result<String> {
        self.read("events")
    }

    /// Prints the guest's output since the last call. The guest's checks become this program's.
    pub fn listen(&mut self) -> Result<()> {
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

    /// Waits until a condition holds.
    fn wait(&mut self, what: &str, mut is: impl FnMut(&mut Self) -> Result<bool>) -> Result<()> {
        let start = Instant::now();
        loop {
            self.listen()?;
            if is(self)? {
                return Ok(());
            }
            let ended = self.process.try_wait()?;
            if ended.is_some() || start.elapsed() > PATIENCE {
                // Its last output may explain why it has ended.
                self.listen()?;
                bail!(
                    "{} has not come to {what} ({ended:?}): {:?} {} {} {}",
                    self.name,
                    self.lines,
                    self.read("log")?,
                    self.read("serial")?,
                    compact(&self.events()?)
                );
            }
            thread::sleep(SOON);
        }
    }

    /// Waits until the guest prints a line.
    pub fn wait_for(&mut self, line: &str) -> Result<()> {
        self.wait(line, |machine| {
            let found = machine.lines.iter().position(|other| other == line);
            if let Some(at) = found {
                machine.lines.drain(..=at);
            }
            Ok(found.is_some())
        })
    }

    /// Waits for an event that nobody has waited for yet.
    pub fn event(&mut self, name: &str) -> Result<()> {
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

    /// Sends the machine an API request. Returns the answer.
    pub fn ctl(&self, arguments: &[&str]) -> Result<String> {
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

    /// The time that the vCPU's thread has consumed, in clock ticks.
    pub fn ticks(&self) -> Result<u64> {
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

    /// Kills the process.
    pub fn kill(&mut self) -> Result<()> {
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
