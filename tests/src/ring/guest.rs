//! The client in ring 3 of a guest without an operating system.

use std::{
    collections::BTreeMap,
    fs::File,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use gantry_ring_client::desk::{Desk, Orders, State};

use super::{Counts, Figure, Pool, Programs, Report, View, count::Tracer, kinds};

/// Size of the guest's RAM in bytes.
const RAM: u64 = 256 << 20;
/// Maximum duration of a step: in one step, a driver compiles the program.
const PATIENCE: Duration = Duration::from_secs(120);
/// Settling time before and after counting, in which interrupted calls complete.
const WARM_UP: Duration = Duration::from_millis(50);

/// A running guest with its desk mapped.
struct Guest {
    process: Child,
    view: View,
    api: PathBuf,
}

impl Guest {
    fn start(programs: &Programs, pool: &Pool, work: &Path) -> Result<Self> {
        let path = work.join("ram");
        let api = work.join("api");
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .with_context(|| format!("cannot create {}", path.display()))?;
        file.set_len(RAM)?;
        let view = View::of(&file)?;
        let process = Command::new(programs.path("gantry"))
            .arg("--kernel")
            .arg(programs.path("gantry-ring-guest"))
            .args(["--cpus", "boot=1", "--memory", "size=0", "--memory-zone"])
            .arg(format!(
                "id=ram,size={RAM},shared=on,file={}",
                path.display()
            ))
            .arg("--accel")
            .arg(format!(
                "api={},window=64M,slices=1,socket={}",
                pool.api,
                pool.socket.display()
            ))
            .args(["--serial", "off", "--console", "off", "--api-socket"])
            .arg(&api)
            .stdin(Stdio::null())
            .spawn()
            .context("cannot start gantry")?;
        Ok(Self { process, view, api })
    }

    fn desk(&self) -> &Desk {
        self.view.desk()
    }

    /// Waits until the guest is in one of these states.
    fn becomes(&mut self, wanted: &[State], mut idle: impl FnMut() -> Result<()>) -> Result<State> {
        let start = Instant::now();
        loop {
            let state = self.desk().state();
            if wanted.contains(&state) {
                return Ok(state);
            }
            self.view.check()?;
            if let Some(status) = self.process.try_wait()? {
                bail!("gantry has ended ({status}): see its message above");
            }
            ensure!(
                start.elapsed() < PATIENCE,
                "the guest is still in the state {state:?}, not in {wanted:?}"
            );
            idle()?;
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Parses the guest's output as figures.
fn read(text: &str) -> Result<Report> {
    let mut report = Report::default();
    for line in text.lines() {
        let words: Vec<_> = line.split('\t').collect();
        let owned = str::to_owned;
        match *words {
            ["note", what, is] => report.notes.push((owned(what), owned(is))),
            ["time", what, median, most] => report.figures.push(Figure::Time {
                what: owned(what),
                median: median.parse()?,
                most: most.parse()?,
            }),
            ["copy", what, bytes, median] => report.figures.push(Figure::Copy {
                what: owned(what),
                bytes: bytes.parse()?,
                median: median.parse()?,
            }),
            _ => bail!("the guest wrote {line:?}"),
        }
    }
    Ok(report)
}

/// Boots the guest and starts it. Also returns the workers that were waiting: one of them serves
/// it.
fn begun(
    programs: &Programs,
    pool: &Pool,
    work: &Path,
    orders: Orders,
) -> Result<(Guest, Vec<i32>)> {
    let mut guest = Guest::start(programs, pool, work)?;
    guest.becomes(&[State::Waiting], || Ok(()))?;
    let idle = pool.workers()?;
    guest.desk().order_calls(pool.api, orders);
    Ok((guest, idle))
}

/// Boots the guest and makes it measure.
pub fn run(programs: &Programs, pool: &Pool, work: &Path, orders: Orders) -> Result<Report> {
    let (mut guest, idle) = begun(programs, pool, work, orders)?;
    let counts = kinds(pool.api).iter();
    let counts = counts.map(|of| count(&mut guest, programs, &idle, of));
    let counts = counts.collect::<Result<_>>()?;
    guest.becomes(&[State::Done], || Ok(()))?;
    let text: Vec<u8> = guest.desk().text().collect();
    let mut report = read(&String::from_utf8_lossy(&text))?;
    report.counts = counts;
    Ok(report)
}

/// Boots the guest, makes it compute, and counts what its synchronous calls cause.
pub fn synchronous(
    programs: &Programs,
    pool: &Pool,
    work: &Path,
    orders: Orders,
) -> Result<Counts> {
    let (mut guest, idle) = begun(programs, pool, work, orders)?;
    let first = kinds(pool.api).first().context("nothing is counted")?;
    count(&mut guest, programs, &idle, first)
}

/// KVM's counters of the vCPU so far.
fn exits(programs: &Programs, api: &Path) -> Result<BTreeMap<String, u64>> {
    let answer = Command::new(programs.path("gantry"))
        .args(["ctl", "--socket"])
        .arg(api)
        .arg("counters")
        .output()?;
    let counters: BTreeMap<String, BTreeMap<String, u64>> = serde_json::from_slice(&answer.stdout)
        .with_context(|| String::from_utf8_lossy(&answer.stderr).into_owned())?;
    Ok(counters.get("_cpu0").cloned().unwrap_or_default())
}

/// Lets the guest make its calls, and counts what happens meanwhile, starting with the exits.
fn count(
    guest: &mut Guest,
    programs: &Programs,
    workers: &[i32],
    of: &'static str,
) -> Result<Counts> {
    let api = guest.api.clone();
    guest.becomes(&[State::Ready], || Ok(()))?;
    let before = exits(programs, &api)?;
    guest.desk().go();
    guest.becomes(&[State::Counted], || Ok(()))?;
    let mut exits = exits(programs, &api)?;
    for (name, count) in &mut exits {
        *count -= before.get(name).copied().unwrap_or(0);
    }
    guest.desk().go();
    guest.becomes(&[State::Ready], || Ok(()))?;
    let mut processes = vec![("gantry", guest.process.id() as i32)];
    processes.extend(workers.iter().map(|worker| ("worker", *worker)));
    let mut tracer = Tracer::attach(&processes)?;
    tracer.pass(WARM_UP)?;
    tracer.forget();
    guest.desk().go();
    guest.becomes(&[State::Counted], || tracer.step())?;
    let calls = tracer.calls();
    drop(tracer);
    guest.desk().go();
    Ok(Counts { of, calls, exits })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_writes_becomes_figures() {
        let report = read("note\tdevice\tX\ntime\tcall\t10\t20\ncopy\tread\t4096\t30\n").unwrap();
        assert_eq!(report.notes, [("device".to_owned(), "X".to_owned())]);
        assert_eq!(report.figures[0].value(1.0), "10.000 (20.000)");
        assert_eq!(report.figures[1].value(1.0), "0.14");
        assert!(read("time\tcall\tfast\t20").is_err());
        assert!(read("anything").is_err());
    }
}
