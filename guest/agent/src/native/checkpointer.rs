//! `gantry-checkpoint`, which suspends and resumes programs: a process of its own for each time, as it uses the driver's
//! library, and so the port, like any program.

use std::{
    env,
    ffi::OsString,
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::FileExt,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use base::paths::cuda_libraries;

use crate::children::Kept;

const NAME: &str = "gantry-checkpoint";
/// The library that has a program's device files served.
const PRELOADED: &str = "libgantry_nvidia_preload.so";
/// What a service starts other programs by, which its confinement does not fit.
const SYSTEMD_RUN: &str = "/usr/bin/systemd-run";
/// The most bytes of what it writes that are looked at: the last ones.
const MOST: u64 = 4096;

/// What it is to do.
#[derive(Clone, Copy, Debug)]
pub enum Task<'a> {
    /// Say whether these processes could be suspended.
    Check(&'a [u32]),
    /// Suspend these processes: all, or none.
    Suspend(&'a [u32]),
    /// Resume those that it has suspended before.
    Resume,
}

/// How it is started.
pub struct Checkpointer {
    program: PathBuf,
    socket: PathBuf,
    /// The folder in which it keeps what it has suspended. It is not that of a user who suspends programs.
    journal: PathBuf,
}

/// Why it has failed.
#[derive(Debug)]
pub struct Failure {
    /// The reason, in one line.
    pub reason: String,
    /// Whether programs are lost, so that there is nothing to try again.
    pub is_final: bool,
}

impl Checkpointer {
    /// For the programs that connect to this socket.
    pub fn new(socket: &Path) -> Self {
        Self {
            program: NAME.into(),
            socket: socket.to_owned(),
            journal: socket.with_file_name("suspended"),
        }
    }

    /// With this program in its place.
    #[cfg(test)]
    pub fn with_program(socket: &Path, program: PathBuf) -> Self {
        Self {
            program,
            ..Self::new(socket)
        }
    }

    /// How many programs it may have suspended that were not resumed.
    pub fn suspended(&self) -> u16 {
        let entries = fs::read_dir(&self.journal).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let count = names.filter(|name| name.parse::<u32>().is_ok()).count();
        u16::try_from(count).unwrap_or(u16::MAX)
    }

    /// Whether there are such programs.
    pub fn has_suspended(&self) -> bool {
        self.suspended() > 0
    }

    /// Whether this process is gantry-checkpoint and runs as the agent's user.
    pub fn is(process: u32, user: u32) -> bool {
        // SAFETY: a call without arguments.
        let own = unsafe { libc::geteuid() };
        let name = base::proc::read(format!("/proc/{process}/comm")).unwrap_or_default();
        // The kernel keeps 15 bytes.
        user == own && NAME.get(..15) == Some(name.trim_end())
    }

    /// Starts it.
    ///
    /// # Errors
    /// The reason, in one line.
    pub fn start(&self, task: Task<'_>) -> Result<Working, String> {
        let (word, processes): (&[&str], &[u32]) = match task {
            Task::Check(processes) => (&["suspend", "--released", "--check"], processes),
            Task::Suspend(processes) => (&["suspend", "--released"], processes),
            Task::Resume => (&["resume", "--all"], &[]),
        };
        let mut words: Vec<OsString> = word.iter().map(Into::into).collect();
        words.extend(["--journal".into(), self.journal.clone().into()]);
        words.extend(processes.iter().map(|process| process.to_string().into()));
        let variables = [
            ("LD_PRELOAD", cuda_libraries().join(PRELOADED)),
            ("GANTRY_NVIDIA_SOCKET", self.socket.clone()),
        ];
        let said = base::memfd::create(c"said")
            .map_err(|error| format!("cannot start {NAME}: {error}"))?;
        let copy = || said.try_clone().map(Stdio::from);
        let started = copy()
            .and_then(|out| Ok((out, copy()?)))
            .and_then(|(out, errors)| {
                let mut command = self.command(&variables);
                command
                    .args(words)
                    .stdin(Stdio::null())
                    .stdout(out)
                    .stderr(errors);
                Kept::start(&mut command)
            });
        match started {
            Ok(child) => Ok(Working { child, said }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(format!(
                "there is no {NAME} in this guest: install it where the agent's PATH finds it"
            )),
            Err(error) => Err(format!("cannot start {NAME}: {error}")),
        }
    }

    fn command(&self, variables: &[(&str, PathBuf)]) -> Command {
        // A service's confinement is for one that opens no driver. systemd starts it without that.
        let is_confined = env::var_os("INVOCATION_ID").is_some() && Path::new(SYSTEMD_RUN).exists();
        if !is_confined {
            let mut command = Command::new(&self.program);
            command.envs(variables.iter().map(|(name, value)| (name, value)));
            return command;
        }
        let mut command = Command::new(SYSTEMD_RUN);
        command.args(["--wait", "--pipe", "--collect", "--quiet"]);
        for (name, value) in variables {
            let mut variable = OsString::from(format!("--setenv={name}="));
            variable.push(value);
            command.arg(variable);
        }
        command.arg("--").arg(&self.program);
        command
    }
}

/// A gantry-checkpoint that runs.
pub struct Working {
    child: Kept,
    said: File,
}

impl Working {
    /// Readable when it has ended.
    pub fn end(&self) -> BorrowedFd<'_> {
        self.child.end.as_fd()
    }

    /// That it has not ended, in one line.
    pub fn hanging(&self, since: Instant) -> String {
        let said = last(&self.said).unwrap_or_default();
        let seconds = since.elapsed().as_secs();
        let said = reason(&said).unwrap_or_else(|| "it has said nothing".to_owned());
        format!("{NAME} has worked for {seconds} s: {said}")
    }

    /// How it has ended, and what it has done, a line for each program. `None`: it still works.
    pub fn ended(&mut self) -> Option<Result<Vec<String>, Failure>> {
        let status = self.child.status()?;
        let said = last(&self.said).unwrap_or_default();
        if status.success() {
            let done = said.lines().filter(|line| line.starts_with("PID "));
            return Some(Ok(done.map(str::to_owned).collect()));
        }
        let reason = reason(&said).unwrap_or_else(|| format!("{NAME} has failed: {status}"));
        Some(Err(Failure {
            reason,
            is_final: status.code() == Some(3),
        }))
    }
}

/// The last bytes of a file, whose position is also that of whoever writes.
fn last(file: &File) -> io::Result<String> {
    let length = file.metadata()?.len();
    let from = length.saturating_sub(MOST);
    let mut bytes = vec![0; (length - from) as usize];
    file.read_exact_at(&mut bytes, from)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The last error in its output, with its causes; or the last line, if it could not be started.
fn reason(said: &str) -> Option<String> {
    let own = said.rfind(&format!("{NAME}: "));
    let last = match own {
        Some(at) => &said[at + NAME.len() + 2..],
        None => said.lines().rfind(|line| !line.trim().is_empty())?,
    };
    let lines = last.lines();
    let parts = lines.map(|line| line.trim().trim_start_matches("because: "));
    Some(parts.collect::<Vec<_>>().join(": "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_the_last_error_with_its_causes() {
        let said = "gantry-checkpoint: PID 7 (x) is being locked, 2 s so far\n\
                    gantry-checkpoint: nothing was changed\n  because: cannot load libcuda.so.1\n  because: no file\n";
        let expected = "nothing was changed: cannot load libcuda.so.1: no file";
        assert_eq!(reason(said).as_deref(), Some(expected));
        assert_eq!(reason("x\nno program\n\n").as_deref(), Some("no program"));
        assert_eq!(reason(""), None);
    }

    #[test]
    fn only_a_process_of_this_name_and_user_is_it() {
        // SAFETY: a call without arguments.
        let user = unsafe { libc::geteuid() };
        assert!(!Checkpointer::is(std::process::id(), user));
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join(NAME);
        fs::copy("/bin/sleep", &program).unwrap();
        // Another test's child may still have the copy open for writing.
        let mut child = loop {
            match Command::new(&program).arg("1000").spawn() {
                Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => {}
                child => break child.unwrap(),
            }
        };
        // The kernel names it a moment after it has begun to run the program.
        let since = std::time::Instant::now();
        while !Checkpointer::is(child.id(), user) && since.elapsed().as_secs() < 20 {
            std::thread::yield_now();
        }
        let is = [user, user + 1].map(|user| Checkpointer::is(child.id(), user));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(is, [true, false]);
    }
}
