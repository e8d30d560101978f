//! Finds the running VMMs, and the one that a command refers to.

use std::{
    collections::BTreeMap,
    env,
    ffi::{OsStr, OsString},
    fmt, fs, io,
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

/// No VMM is found, or it is unclear which one is meant.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// There is none.
    #[error(
        "no VMM with an API socket is running that this user can see: start one (gantry --api-socket \
         PATH), or name its socket by --socket or {VARIABLE}"
    )]
    None,
    /// There are several, some of which may not answer.
    #[error(
        "{} VMMs are running: say by --socket or {VARIABLE} which one is meant: {}",
        .0.len(),
        names(.0)
    )]
    Several(Vec<Found>),
}

fn names(found: &[Found]) -> String {
    let names = found.iter().map(|one| match one.answer {
        Some(_) => one.socket.display().to_string(),
        None => format!("{} (does not answer)", one.socket.display()),
    });
    names.collect::<Vec<_>>().join(", ")
}

/// A process that serves an API socket.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Found {
    /// Its API socket.
    pub socket: PathBuf,
    /// Its process ID: as it says itself, otherwise as this host sees it.
    pub pid: i64,
    /// What it has answered; `None` if it does not answer in time.
    pub answer: Option<Running>,
}

/// What a VMM says about its VM.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Running {
    /// State of its VM, or that it has none.
    pub state: String,
    /// Number of vCPUs.
    pub cpus: u64,
    /// Size of memory in bytes.
    pub memory: u64,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            socket,
            pid,
            answer,
        } = self;
        write!(f, "{}\t{pid}\t", socket.display())?;
        let Some(Running {
            state,
            cpus,
            memory,
        }) = answer
        else {
            return f.write_str("does not answer");
        };
        f.write_str(state)?;
        match cpus {
            0 => Ok(()),
            1 => write!(f, "\t1 vCPU\t{} MiB", memory >> 20),
            cpus => write!(f, "\t{cpus} vCPUs\t{} MiB", memory >> 20),
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
    only(found(Path::new("/proc")))
}

fn only(mut found: Vec<Found>) -> Result<PathBuf, FindError> {
    match found.len() {
        0 => Err(FindError::None),
        1 => Ok(found.remove(0).socket),
        _ => Err(FindError::Several(found)),
    }
}

/// All VMMs that this user may use, by socket. One that does not answer is among them: it may be the one that is meant.
pub fn found(proc: &Path) -> Vec<Found> {
    sockets(proc)
        .into_iter()
        .filter_map(|(socket, pid)| ask(socket, pid))
        .collect()
}

/// The API sockets that processes have on their command lines, with the processes' IDs.
fn sockets(proc: &Path) -> BTreeMap<PathBuf, i64> {
    let processes = fs::read_dir(proc).into_iter().flatten().take(MOST);
    let processes = processes.filter_map(|entry| Some(entry.ok()?.path()));
    processes
        .filter_map(|process| {
            let pid = process.file_name()?.to_str()?.parse().ok()?;
            Some((socket_of(&process)?, pid))
        })
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

/// Asks a VMM for its identity and the state of its VM. Returns `None` if this user may not use it.
fn ask(socket: PathBuf, pid: i64) -> Option<Found> {
    let client = Client::new(socket.clone()).within(PATIENCE);
    let get = |path: &str| -> Result<Value, ClientError> {
        let answer = client.request("GET", path, None, &[])?;
        Ok(serde_json::from_slice(&answer).unwrap_or_default())
    };
    let silent = Found {
        socket,
        pid,
        answer: None,
    };
    let ping = match get("vmm.ping") {
        Ok(ping) => ping,
        Err(ClientError::Connect { source, .. })
            if source.kind() == io::ErrorKind::PermissionDenied =>
        {
            return None;
        }
        Err(_) => return Some(silent),
    };
    let running = match get("vm.info") {
        Ok(info) => Running {
            state: info["state"].as_str().unwrap_or("?").to_owned(),
            cpus: info["config"]["cpus"]["boot_vcpus"].as_u64().unwrap_or(0),
            memory: info["memory_actual_size"].as_u64().unwrap_or(0),
        },
        Err(ClientError::Refused { .. }) => Running {
            state: "no VM".to_owned(),
            cpus: 0,
            memory: 0,
        },
        Err(_) => return Some(silent),
    };
    Some(Found {
        pid: ping["pid"].as_i64().unwrap_or(pid),
        answer: Some(running),
        ..silent
    })
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
        let sockets: Vec<_> = sockets(proc.path()).into_iter().collect();
        let expected = [("/run/one", 1), ("/run/two", 2), ("/work/three", 3)];
        assert_eq!(
            sockets,
            expected.map(|(path, pid)| (PathBuf::from(path), pid))
        );
        let found = found(proc.path());
        assert!(found.iter().all(|one| one.answer.is_none()), "{found:?}");
        assert_eq!(found.len(), 3, "one that does not answer may be meant");
    }

    #[test]
    fn a_vmm_whose_queue_of_connections_is_full_is_found_silent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let mut queued = Vec::new();
        while let Ok(stream) = base::socket::connect(&path) {
            queued.push(stream);
        }
        let found = ask(path, 7).unwrap();
        assert_eq!((found.pid, found.answer), (7, None));
    }

    #[test]
    fn one_that_runs_is_meant_and_of_several_none() {
        let running = Running {
            state: "Running".to_owned(),
            cpus: 2,
            memory: 1 << 30,
        };
        let one = |socket: &str, answer: Option<&Running>| Found {
            socket: socket.into(),
            pid: 7,
            answer: answer.cloned(),
        };
        assert!(matches!(only(Vec::new()), Err(FindError::None)));
        let a = || one("/a", Some(&running));
        assert_eq!(only(vec![a()]).unwrap(), Path::new("/a"));
        assert_eq!(only(vec![one("/b", None)]).unwrap(), Path::new("/b"));
        let error = only(vec![a(), one("/b", None)]).unwrap_err().to_string();
        assert!(error.starts_with("2 VMMs are running"), "{error}");
        assert!(error.ends_with(": /a, /b (does not answer)"), "{error}");
        assert_eq!(a().to_string(), "/a\t7\tRunning\t2 vCPUs\t1024 MiB");
        assert_eq!(one("/b", None).to_string(), "/b\t7\tdoes not answer");
        assert_eq!(
            socket(Some(Path::new("/named"))).unwrap(),
            Path::new("/named")
        );
    }
}
