//! This guest's own pool, which serves applications on a device that was passed through: a process that the agent
//! starts, and ends together with everything that it has started.

use std::{
    fs, io,
    os::unix::{
        fs::{MetadataExt, PermissionsExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use crate::children;

/// The pool, whether or not it is running.
pub struct LocalPool {
    /// The command that starts it, without `--socket` and `--window`.
    command: Vec<String>,
    /// The path on which the pool listens.
    socket: PathBuf,
    /// The path on which the agent listens.
    agent: PathBuf,
    child: Option<Child>,
    /// Its process group, until no child of this process is in it.
    group: Option<libc::pid_t>,
    /// Whether the pool's socket admits everyone who may connect to the agent.
    open: bool,
}

impl LocalPool {
    /// A pool that is started by this command, beside an agent that listens at this path. All children of this process
    /// are considered the pool's.
    pub fn new(command: &str, agent: &Path) -> Self {
        // Processes that its workers leave behind become children of this process, which waits for them.
        // SAFETY: a plain call.
        unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
        Self {
            command: command.split_whitespace().map(str::to_owned).collect(),
            socket: agent.with_extension("local.sock"),
            agent: agent.to_owned(),
            child: None,
            group: None,
            open: false,
        }
    }

    /// Whether there is a command that starts it.
    pub fn is_configured(&self) -> bool {
        !self.command.is_empty()
    }

    /// The path on which the pool listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Whether its process is still running.
    pub fn is_running(&mut self) -> bool {
        self.reap();
        self.child.is_some()
    }

    /// The number of connections to it, including those that wait to be accepted, as far as the system reports them.
    /// Connections in other network namespaces are not reported.
    pub fn connections(&self) -> usize {
        in_table(&self.socket, is_connection)
    }

    /// The ID of its process, if one was started and is not known to have ended.
    #[cfg(test)]
    pub fn id(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Starts the pool unless it is running, and reports a failure. Its windows have the same size as the
    /// host's (`window`, in bytes), so that applications can move in both directions.
    pub fn start(&mut self, window: u64) {
        self.reap();
        if self.child.is_some() || self.command.is_empty() {
            return;
        }
        let _ = fs::remove_file(&self.socket);
        self.open = false;
        match self.process(window, std::process::id()).spawn() {
            Ok(child) => {
                self.group = Some(child.id() as libc::pid_t);
                self.child = Some(child);
            }
            Err(error) => base::note!(
                "gantry-agent: cannot start {}: {error}; applications are served by the host",
                self.command[0]
            ),
        }
    }

    /// What starts it, to end with the process that has this number: this one.
    fn process(&self, window: u64, this: u32) -> Command {
        let mut command = Command::new(&self.command[0]);
        command
            .args(&self.command[1..])
            .arg("--socket")
            .arg(&self.socket)
            .args(["--window", &(window >> 20).to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .process_group(0);
        // SAFETY: async-signal-safe calls between fork and exec.
        unsafe { command.pre_exec(move || base::child::end_with(this)) };
        command
    }

    /// Takes note of processes that have ended.
    fn reap(&mut self) {
        if let Some(child) = &mut self.child
            && !matches!(child.try_wait(), Ok(None))
        {
            base::note!("gantry-agent: this guest's own pool has ended");
            self.child = None;
            self.open = false;
            // Nobody is redirected there any more.
            let _ = fs::remove_file(&self.socket);
        }
        if self.child.is_none() {
            while children::ended(-1) > 0 {}
        }
    }

    /// Ends the pool. May be called repeatedly. Returns whether everything that it has started has ended, too.
    pub fn end(&mut self) -> bool {
        // It is the leader of its group.
        self.child = None;
        self.open = false;
        let _ = fs::remove_file(&self.socket);
        if let Some(group) = self.group {
            let mut state = children::ended(-group);
            while state > 0 {
                state = children::ended(-group);
            }
            if state == 0 {
                // SAFETY: a plain call. A child of this process is in the group, so the number does not belong to
                // another group.
                unsafe { libc::killpg(group, libc::SIGKILL) };
            } else {
                self.group = None;
            }
        }
        loop {
            match children::ended(-1) {
                0 => return false,
                ended if ended < 0 => return true,
                _ => {}
            }
        }
    }

    /// Whether the pool listens, for everyone whom the agent listens for.
    pub fn listens(&mut self) -> bool {
        self.reap();
        if self.child.is_none() || !self.socket.exists() {
            return false;
        }
        if !self.open {
            // Anyone who connects in between is refused.
            if in_table(&self.socket, is_about_to_listen) > 0 {
                return false;
            }
            if let Err(error) = self.admit() {
                base::note!("gantry-agent: nobody can connect with this guest's own pool: {error}");
                self.end();
                return false;
            }
            self.open = true;
        }
        true
    }

    /// Admits everyone to the pool who may connect to the agent.
    fn admit(&self) -> io::Result<()> {
        let (own, its) = (
            fs::metadata(&self.agent)?,
            fs::symlink_metadata(&self.socket)?,
        );
        if own.gid() != its.gid() {
            chown(&self.socket, None, Some(own.gid()))?;
        }
        let mode = fs::Permissions::from_mode(own.mode() & 0o777);
        fs::set_permissions(&self.socket, mode)
    }
}

impl Drop for LocalPool {
    fn drop(&mut self) {
        self.end();
    }
}

/// The state of a socket that is not connected (SS_UNCONNECTED), in the system's table.
const UNCONNECTED: &str = "01";

/// The number of sockets with this path in the system's table that satisfy a condition.
fn in_table(path: &Path, is_such: fn(&str, &str) -> bool) -> usize {
    let Some(path) = path.to_str() else { return 0 };
    let table = fs::read("/proc/self/net/unix").unwrap_or_default();
    let table = String::from_utf8_lossy(&table);
    table.lines().filter(|line| is_such(line, path)).count()
}

/// The flags and the state in a line of the system's table, if it is for this path: `address: count protocol flags type
/// state inode path`.
fn of_path<'a>(line: &'a str, path: &str) -> Option<(&'a str, &'a str)> {
    let mut rest = line;
    let mut fields = [""; 7];
    for field in &mut fields {
        (*field, rest) = rest.trim_start().split_once(' ')?;
    }
    (rest == path).then_some((fields[3], fields[5]))
}

/// Whether a line is for a connected socket. The flags identify listening sockets.
fn is_connection(line: &str, path: &str) -> bool {
    matches!(of_path(line, path), Some(("00000000", state)) if state != UNCONNECTED)
}

/// Whether a line is for a socket that is bound to its path, but does not listen yet.
fn is_about_to_listen(line: &str, path: &str) -> bool {
    of_path(line, path) == Some(("00000000", UNCONNECTED))
}

#[cfg(test)]
mod tests {
    use std::mem::ManuallyDrop;

    use super::*;

    #[test]
    fn a_pool_whose_agent_is_killed_while_it_starts_does_not_outlive_it() {
        // It takes no other test's processes for its own when it goes.
        let pool = ManuallyDrop::new(LocalPool {
            command: vec!["true".to_owned()],
            socket: PathBuf::new(),
            agent: PathBuf::new(),
            child: None,
            group: None,
            open: false,
        });
        let this = std::process::id();
        let started = |agent| pool.process(16 << 20, agent).status();
        assert!(started(this).unwrap().success());
        // Another process has taken it over by then.
        let refused = started(this + 1).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ESRCH));
    }

    #[test]
    fn connections_are_told_from_listeners_and_other_paths() {
        let connection = "0000000000000000: 00000003 00000000 00000000 0001 03   123 /run/a b";
        assert!(is_connection(connection, "/run/a b"));
        assert!(!is_connection(connection, "b"));
        assert!(!is_connection(connection, "/run/a"));
        let listener = "0000000000000000: 00000002 00000000 00010000 0001 01 12345 /run/a b";
        assert!(!is_connection(listener, "/run/a b"));
        let bound = listener.replace("00010000", "00000000");
        assert!(is_about_to_listen(&bound, "/run/a b") && !is_connection(&bound, "/run/a b"));
        assert!(!is_about_to_listen(listener, "/run/a b"));
        for other in ["", "Num RefCount", "0: 1 2 00000000 4 5 6"] {
            assert!(!is_connection(other, ""), "{other}");
        }
    }
}
