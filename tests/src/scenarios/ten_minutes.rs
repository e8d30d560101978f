//! The page "From zero to a shared GPU in ten minutes", by running the commands that it shows.

use std::{
    fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};

use super::{Context, Entry};
use crate::{
    gantry::{BZIMAGE, GANTRY},
    guest::Guest,
    opencl::{self, AGENT, ROOT, until},
};

pub const SCENARIOS: &[Entry] = &[(
    "accelerator: from zero to a shared GPU by the commands of the guide",
    guide,
)];

const PAGE: &str = include_str!("../../../docs/user/ten-minutes.md");

/// Directory in which the reader has started a shell, as seen by a program in [`ROOT`].
const FOLDER: &str = "/run/reader";

/// Where a command is entered.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Place {
    Host,
    Guest,
}

/// The commands of a page in order: the blocks that begin with "```sh host" or "```sh guest".
fn blocks(page: &str) -> Vec<(Place, &str)> {
    let fenced = page.split("```").skip(1).step_by(2);
    fenced
        .filter_map(|block| {
            let (kind, commands) = block.split_once('\n')?;
            let place = match kind {
                "sh host" => Place::Host,
                "sh guest" => Place::Guest,
                _ => return None,
            };
            Some((place, commands))
        })
        .collect()
}

/// A host with PoCL and Gantry's programs, on which nothing of Gantry runs.
struct Host {
    /// [`FOLDER`] as seen by L1.
    folder: PathBuf,
    /// Process groups of the entered commands, with everything that was started.
    groups: Vec<u32>,
}

impl Host {
    fn new(dir: &Path) -> Result<Self> {
        opencl::mount()?;
        let inside = |path: &str| Path::new(ROOT).join(&path[1..]);
        let folder = inside(FOLDER);
        let programs = folder.join("bin");
        fs::create_dir_all(&programs)?;
        for program in [GANTRY, "/bin/gantry-accel", "/bin/busybox"] {
            let name = Path::new(program).file_name().context("no file")?;
            fs::copy(program, programs.join(name))?;
        }
        fs::copy(BZIMAGE, folder.join("vmlinuz"))?;
        let guest = opencl::guest_files(dir)?;
        fs::copy(&guest, folder.join("initrd.img"))?;
        fs::remove_file(guest)?;
        Ok(Self {
            folder,
            groups: Vec::new(),
        })
    }

    /// Enters commands, and returns their output until the shell has the terminal again.
    fn types(&mut self, commands: &str) -> Result<String> {
        let printed = self.folder.join("printed");
        let file = fs::File::create(&printed)?;
        let script = format!("cd {FOLDER} && set -e\n{commands}");
        let mut child = Command::new("/bin/chroot")
            .args([ROOT, &format!("{FOLDER}/bin/busybox"), "sh", "-c", &script])
            .env("PATH", format!("{FOLDER}/bin"))
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .context("cannot start a shell")?;
        self.groups.push(child.id());
        let status = child.wait()?;
        let text = fs::read_to_string(&printed)?;
        ensure!(
            status.success(),
            "{commands:?} ended with {status}:\n{text}"
        );
        Ok(text)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for group in &self.groups {
            // SAFETY: a system call without pointers. A group is gone when all of its processes
            // have ended; its ID is not reused while the scenario runs.
            unsafe { libc::kill(-group.cast_signed(), libc::SIGKILL) };
        }
        let _ = fs::remove_dir_all(&self.folder);
        let _ = fs::remove_dir_all(Path::new(ROOT).join("run/gantry"));
    }
}

fn guide(context: &Context) -> Result<()> {
    let mut host = Host::new(&context.dir)?;
    let mut guest = None;
    let pool = Path::new(ROOT).join("run/gantry/opencl.sock");
    let mut said = String::new();
    for (place, commands) in blocks(PAGE) {
        if place == Place::Guest {
            let mut connected = Guest::connect(&host.folder.join("serial.sock"))?;
            connected.wait_ready()?;
            for line in commands.lines() {
                said += &connected.run(line)?;
                if line.ends_with('&') {
                    // A person takes longer to type than the agent needs to listen.
                    connected.eventually(&format!("ls {AGENT}"), |text| text.contains(AGENT))?;
                }
            }
            guest = Some(connected);
            continue;
        }
        said += &host.types(commands)?;
        if commands.contains("gantry-accel serve") {
            until("the pool listens", || Ok(pool.exists()))?;
        }
        if commands.contains("--api-socket api.sock") {
            let api = host.folder.join("api.sock");
            until("the VM runs", || {
                let info = crate::http::request(&api, "GET", "vm.info", None);
                Ok(info.is_ok_and(|info| info.body["state"] == "Running"))
            })?;
        }
    }
    for words in [
        // Output of `gantry doctor`, `ctl list`, `ctl info` and clinfo.
        "OpenCL",
        "api.sock",
        "\"Running\"",
        "Device #0",
    ] {
        ensure!(said.contains(words), "nothing says {words:?}:\n{said}");
    }
    ensure!(guest.is_some(), "the page has no command for the guest");
    let api = host.folder.join("api.sock");
    until("the VMM has ended", || Ok(!api.exists()))
}
