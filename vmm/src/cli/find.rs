//! Finds the running VMMs, and the one that a command refers to.

use std::{
    collections::BTreeSet,
    env,
    ffi::{OsStr, OsString},
    fmt, fs,
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        fs::MetadataExt,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::Value;

use super::{Client, ClientError};

/// Environment variable with the API socket for all commands of a shell.
pub const VARIABLE: &str = "GANTRY_SOCKET";
/// Time limit for a VMM to identify itself.
pub const PATIENCE: Duration = Duration::from_secs(1);
/// Maximum number of processes to examine.
const MOST: usize = 100_000;

/// There is no VMM, or more than one.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// No VMM responds.
    #[error(
        "no VMM with an API socket is running that this user can see: start one (gantry --api-socket \
         PATH), or name its socket by --socket or {VARIABLE}"
    )]
    None,
    /// Several VMMs respond.
    #[error(
        "{} VMMs are running: say by --socket or {VARIABLE} which one is meant: {}",
        .0.len(),
        paths(.0)
    )]
    Several(Vec<Running>),
}

fn paths(running: &[Running]) -> String {
    let paths = running.iter().map(|one| one.socket.display().to_string());
    paths.collect::<Vec<_>>().join(", ")
}

/// A VMM that has responded.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Running {
    /// Its API socket.
    pub socket: PathBuf,
    /// Its process ID.
    pub pid: i64,
    /// State of its VM, or that it has none.
    pub state: String,
    /// Number of vCPUs.
    pub cpus: u64,
    /// Size of memory in bytes.
    pub memory: u64,
}

impl fmt::Display for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            socket, pid, state, ..
        } = self;
        write!(f, "{}\t{pid}\t{state}", socket.display())?;
        match self.cpus {
            0 => Ok(()),
            1 => write!(f, "\t1 vCPU\t{} MiB", self.memory >> 20),
            cpus => write!(f, "\t{cpus} vCPUs\t{} MiB", self.memory >> 20),
        }
    }
}

/// The socket to use: the one that is named, the one in the environment, or the only one.
pub fn socket(named: Option<&Path>) -> Result<PathBuf, FindError> {
    if let Some(path) = named {
        return Ok(path.to_owned());
    }
    if let Some(path) = env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
        return Ok(path.into());
    }
    only(running(Path::new("/proc")))
}

fn only(mut running: Vec<Running>) -> Result<PathBuf, FindError> {
    match running.len() {
        0 => Err(FindError::None),
        1 => Ok(running.remove(0).socket),
        _ => Err(FindError::Several(running)),
    }
}

/// All VMMs that this user can see and that respond, by socket.
pub fn running(proc: &Path) -> Vec<Running> {
    sockets(proc).into_iter().filter_map(ask).collect()
}

/// The API sockets that processes have on their command lines.
fn sockets(proc: &Path) -> BTreeSet<PathBuf> {
    let processes = fs::read_dir(proc).into_iter().flatten().take(MOST);
    let processes = processes.filter_map(|entry| Some(entry.ok()?.path()));
    processes
        .filter_map(|process| socket_of(&process))
        .collect()
}

/// The API socket of a process, given its directory in /proc.
fn socket_of(process: &Path) -> Option<PathBuf> {
    // Another user's process may use any name and send any response.
    let owner = fs::metadata(process).ok()?.uid();
    if owner != 0 && owner != fs::metadata("/proc/self").ok()?.uid() {
        return None;
    }
    let line = fs::read(process.join("cmdline")).ok()?;
    let words: Vec<_> = line
        .split(|byte| *byte == 0)
        .map(OsStr::from_bytes)
        .collect();
    let (program, arguments) = words.split_first()?;
    let name = Path::new(program).file_name()?;
    // Clients have the socket on their command line, too.
    let is_client = arguments.first().is_some_and(|first| *first == "ctl");
    if is_client || (name != "gantry" && name != "cloud-hypervisor") {
        return None;
    }
    let named = arguments.iter().enumerate().find_map(|(at, argument)| {
        match argument.as_bytes().strip_prefix(b"--api-socket") {
            Some([]) => arguments.get(at + 1).map(|next| next.as_bytes()),
            Some([b'=', value @ ..]) => Some(value),
            _ => None,
        }
    })?;
    if named.is_empty() || named.starts_with(b"fd=") {
        return None;
    }
    let path = named.strip_prefix(b"path=").unwrap_or(named);
    let path = PathBuf::from(OsString::from_vec(path.to_vec()));
    if path.is_absolute() {
        return Some(path);
    }
    // Relative to the working directory of the process.
    Some(fs::read_link(process.join("cwd")).ok()?.join(path))
}

/// Asks a VMM for its identity and the state of its VM.
fn ask(socket: PathBuf) -> Option<Running> {
    let client = Client::new(socket.clone()).within(PATIENCE);
    let get = |path: &str| -> Result<Value, ClientError> {
        let answer = client.request("GET", path, None, &[])?;
        Ok(serde_json::from_slice(&answer).unwrap_or_default())
    };
    let pid = get("vmm.ping").ok()?["pid"].as_i64().unwrap_or_default();
    let mut running = Running {
        socket,
        pid,
        state: "no VM".to_owned(),
        cpus: 0,
        memory: 0,
    };
    if let Ok(info) = get("vm.info") {
        info["state"]
            .as_str()
            .unwrap_or("?")
            .clone_into(&mut running.state);
        running.cpus = info["config"]["cpus"]["boot_vcpus"].as_u64().unwrap_or(0);
        running.memory = info["memory_actual_size"].as_u64().unwrap_or(0);
    }
    Some(running)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Creates a process in a directory like /proc, with the working directory /work.
    fn process(proc: &Path, pid: u32, line: &str) {
        let process = proc.join(pid.to_string());
        fs::create_dir(&process).unwrap();
        fs::write(process.join("cmdline"), line.replace(' ', "\0") + "\0").unwrap();
        symlink("/work", process.join("cwd")).unwrap();
    }

    #[test]
    fn sockets_are_found_by_the_command_lines_of_vmms() {
        let proc = tempfile::tempdir().unwrap();
        for (pid, line) in (1..).zip([
            "/usr/bin/gantry --kernel /k --api-socket /run/one",
            "gantry --api-socket=path=/run/two -v",
            "/x/cloud-hypervisor --api-socket three",
            "gantry ctl --api-socket /run/client ping",
            "gantry --api-socket fd=3",
            "gantry --api-socket",
            "gantry --kernel /k",
            "grep --api-socket /run/none",
            "",
        ]) {
            process(proc.path(), pid, line);
        }
        fs::create_dir(proc.path().join("sys")).unwrap();
        let found: Vec<_> = sockets(proc.path()).into_iter().collect();
        assert_eq!(
            found,
            ["/run/one", "/run/two", "/work/three"].map(PathBuf::from)
        );
        assert_eq!(running(proc.path()), [], "none of them answers");
    }

    #[test]
    fn one_that_runs_is_meant_and_of_several_none() {
        let one = |socket: &str| Running {
            socket: socket.into(),
            pid: 7,
            state: "Running".to_owned(),
            cpus: 2,
            memory: 1 << 30,
        };
        assert!(matches!(only(Vec::new()), Err(FindError::None)));
        assert_eq!(only(vec![one("/a")]).unwrap(), Path::new("/a"));
        let error = only(vec![one("/a"), one("/b")]).unwrap_err().to_string();
        assert!(error.starts_with("2 VMMs are running"), "{error}");
        assert!(error.ends_with(": /a, /b"), "{error}");
        assert_eq!(one("/a").to_string(), "/a\t7\tRunning\t2 vCPUs\t1024 MiB");
        assert_eq!(
            socket(Some(Path::new("/named"))).unwrap(),
            Path::new("/named")
        );
    }
}
