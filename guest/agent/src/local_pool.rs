//! This guest's own pool, which serves applications on a device that was passed through: a process that
//! the agent starts, and ends with all that it has started.

use std::{
    fs, io,
    os::unix::{
        fs::{MetadataExt, PermissionsExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// The pool, whether it runs or not.
pub struct LocalPool {
    /// What starts it, without `--socket` and `--window`.
    command: Vec<String>,
    /// Where it listens.
    socket: PathBuf,
    /// Where the agent does.
    agent: PathBuf,
    child: Option<Child>,
    /// Its process group, until no child of this process is in it.
    group: Option<libc::pid_t>,
    /// Whether those may connect with it that may connect with the agent.
    open: bool,
}

impl LocalPool {
    /// One that is started so, beside an agent that listens there. All children of this process are taken
    /// for the pool's.
    pub fn new(command: &str, agent: &Path) -> Self {
        // What its workers leave behind is this process's to wait for.
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

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Whether its process has not ended.
    pub fn is_running(&mut self) -> bool {
        self.reap();
        self.child.is_some()
    }

    /// How many are connected with it, those that are waiting included, as far as the system says: it
    /// says nothing of those in other network namespaces.
    pub fn connections(&self) -> usize {
        in_table(&self.socket, is_connection)
    }

    /// Its process, if one was started and is not known to have ended.
    #[cfg(test)]
    pub fn id(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Starts it if it does not run. If it cannot be started, that is noted. Its windows are as large as the host's
    /// (`window`, in bytes), so that applications can go there and back.
    pub fn start(&mut self, window: u64) {
        self.reap();
        if self.child.is_some() || self.command.is_empty() {
            return;
        }
        let _ = fs::remove_file(&self.socket);
        self.open = false;
        let mut command = Command::new(&self.command[0]);
        command
            .args(&self.command[1..])
            .arg("--socket")
            .arg(&self.socket)
            .args(["--window", &(window >> 20).to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .process_group(0);
        // SAFETY: an async-signal-safe call between fork and exec.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        match command.spawn() {
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

    /// Takes note of processes that have ended.
    fn reap(&mut self) {
        if let Some(child) = &mut self.child
            && !matches!(child.try_wait(), Ok(None))
        {
            base::note!("gantry-agent: this guest's own pool has ended");
            self.child = None;
            self.open = false;
            // Nobody is sent there any more.
            let _ = fs::remove_file(&self.socket);
        }
        if self.child.is_none() {
            while ended_child(-1) > 0 {}
        }
    }

    /// Ends it, at first and whenever this is asked again. Whether all that it has started has
    /// ended, too.
    pub fn end(&mut self) -> bool {
        // It is the first of its group.
        self.child = None;
        self.open = false;
        let _ = fs::remove_file(&self.socket);
        if let Some(group) = self.group {
            let mut state = ended_child(-group);
            while state > 0 {
                state = ended_child(-group);
            }
            if state == 0 {
                // SAFETY: a plain call. A child of this process is in the group, which is no other
                // one's therefore.
                unsafe { libc::killpg(group, libc::SIGKILL) };
            } else {
                self.group = None;
            }
        }
        loop {
            match ended_child(-1) {
                0 => return false,
                ended if ended < 0 => return true,
                _ => {}
            }
        }
    }

    /// Whether it listens, and for whom the agent does.
    pub fn listens(&mut self) -> bool {
        self.reap();
        if self.child.is_none() || !self.socket.exists() {
            return false;
        }
        if !self.open {
            // Whoever connects in between is refused.
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

    /// Has those connect with it who may connect with the agent.
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

/// Waits for no child, but takes note of one that has ended, of those that are meant as waitpid(2) says;
/// zero if none has, and less if there are none. Nobody else waits for children here.
fn ended_child(which: libc::pid_t) -> libc::pid_t {
    // SAFETY: a plain call. No status is asked for.
    unsafe { libc::waitpid(which, std::ptr::null_mut(), libc::WNOHANG) }
}

/// The state of a socket that is connected with nobody (SS_UNCONNECTED), in the system's table.
const UNCONNECTED: &str = "01";

/// How many sockets of a path the system's table has that are such.
fn in_table(path: &Path, is_such: fn(&str, &str) -> bool) -> usize {
    let Some(path) = path.to_str() else { return 0 };
    let table = fs::read("/proc/self/net/unix").unwrap_or_default();
    let table = String::from_utf8_lossy(&table);
    table.lines().filter(|line| is_such(line, path)).count()
}

/// Flags and state of a line of the system's table, if it is of this path: `address: count protocol flags
/// type state inode path`.
fn of_path<'a>(line: &'a str, path: &str) -> Option<(&'a str, &'a str)> {
    let mut rest = line;
    let mut fields = [""; 7];
    for field in &mut fields {
        (*field, rest) = rest.trim_start().split_once(' ')?;
    }
    (rest == path).then_some((fields[3], fields[5]))
}

/// Whether a line is about one that is connected. Of those that listen the flags say so.
fn is_connection(line: &str, path: &str) -> bool {
    matches!(of_path(line, path), Some(("00000000", state)) if state != UNCONNECTED)
}

/// Whether a line is about one that has its path, and does not listen yet.
fn is_about_to_listen(line: &str, path: &str) -> bool {
    of_path(line, path) == Some(("00000000", UNCONNECTED))
}

#[cfg(test)]
mod tests {
    use super::*;

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
