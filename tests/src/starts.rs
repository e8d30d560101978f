//! Resources that a VMM process has used when its API answers for the first time.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use crate::{bench::cpu_time, http};

/// Timeout of a start.
const PATIENCE: Duration = Duration::from_secs(10);

/// Resources that a process has used.
#[derive(Clone, Copy)]
struct Used {
    /// CPU time of all its threads in milliseconds.
    cpu: f64,
    /// Page faults without I/O: pages touched for the first time. Unlike time, their number does
    /// not vary.
    faults: f64,
}

/// A process that is killed when the value is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Used {
    fn of(pid: u32) -> Result<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // The program's name in parentheses may contain any character (proc(5)).
        let faults = stat
            .rsplit_once(')')
            .and_then(|(_, rest)| rest.split_whitespace().nth(7))
            .context("/proc/PID/stat makes no sense")?;
        Ok(Self {
            cpu: cpu_time(pid)? as f64 / 1e6,
            faults: faults.parse()?,
        })
    }

    /// Starts a program and waits until its API answers.
    fn by(program: &Path, socket: &Path) -> Result<Self> {
        if socket.exists() {
            fs::remove_file(socket)?;
        }
        let child = Command::new(program)
            .arg("--api-socket")
            .arg(socket)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let mut process = Process(child);
        let start = Instant::now();
        while http::request(socket, "GET", "vmm.ping", None).is_err() {
            let ended = process.0.try_wait()?;
            ensure!(
                ended.is_none(),
                "{} has ended: {ended:?}",
                program.display()
            );
            ensure!(
                start.elapsed() < PATIENCE,
                "the API of {} does not answer",
                program.display()
            );
            thread::sleep(Duration::from_millis(1));
        }
        Self::of(process.0.id())
    }
}

/// Minimum and median of some figures.
fn least_and_median(mut figures: Vec<f64>) -> (f64, f64) {
    figures.sort_by(f64::total_cmp);
    let at = |nth: usize| figures.get(nth).copied().unwrap_or(f64::NAN);
    (at(0), at(figures.len() / 2))
}

/// Starts each program `times` times, taking turns so that other load on the machine affects all
/// programs alike, and passes on a row for each. It starts copies of the programs: how a file was
/// written determines how large the pieces are in which the page cache holds it, and thus the
/// number of page faults.
///
/// # Errors
/// A program cannot be started, or its API does not answer.
pub fn measure(
    programs: &[(String, PathBuf)],
    dir: &Path,
    times: usize,
    row: &mut dyn FnMut(&str, String),
) -> Result<()> {
    let socket = dir.join("bench-api.sock");
    let copies = tempfile::tempdir_in(dir)?;
    let copy = |(nth, (_, program)): (usize, &(String, PathBuf))| -> Result<PathBuf> {
        let to = copies.path().join(nth.to_string());
        fs::copy(program, &to).with_context(|| format!("cannot copy {}", program.display()))?;
        Ok(to)
    };
    let started: Vec<_> = programs
        .iter()
        .enumerate()
        .map(copy)
        .collect::<Result<_>>()?;
    let mut all = vec![Vec::new(); programs.len()];
    for _ in 0..times {
        for (program, used) in started.iter().zip(&mut all) {
            used.push(Used::by(program, &socket)?);
        }
    }
    for ((name, _), used) in programs.iter().zip(all) {
        let (least, median) = least_and_median(used.iter().map(|used| used.cpu).collect());
        let (_, faults) = least_and_median(used.iter().map(|used| used.faults).collect());
        row(
            &format!(
                "{name}: API answers, CPU time so far (ms; least; page faults; medians of {times})"
            ),
            format!("{median:.2}; {least:.2}; {faults:.0}"),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_runs_has_used_something_up() {
        let used = Used::of(std::process::id()).unwrap();
        assert!(used.cpu > 0.0 && used.faults > 0.0);
        assert_eq!(least_and_median(vec![3.0, 1.0, 2.0]), (1.0, 2.0));
    }

    #[test]
    fn a_program_without_an_api_is_said_to_have_ended() {
        let dir = tempfile::tempdir().unwrap();
        let program = [("true".to_owned(), "/bin/true".into())];
        let error = measure(&program, dir.path(), 1, &mut |_, _| {}).unwrap_err();
        assert!(error.to_string().contains("has ended"), "{error}");
    }
}
