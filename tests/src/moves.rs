//! Measures what a move of an idle guest between two Gantrys on one host takes, compared with a plain copy of the same
//! bytes in the same run; how long the guest is stopped when its memory is handed over; and how much a guest that
//! writes memory is slowed down during a round.

use std::{
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::{
    exits::Exits,
    gantry::{Gantry, merge},
    guest::Guest,
    scenarios::migration::{phase_until, wait_in},
    write_faults,
};

/// Number of measured moves of each kind; the median counts.
const MOVES: usize = 3;
/// Number of connections for memory, alternating.
const CONNECTIONS: [u32; 3] = [1, 8, 128];
/// How long a guest is left alone first.
const STEADY_AFTER: Duration = Duration::from_secs(5);
/// Number of bytes copied at once.
const CHUNK: usize = 1 << 20;
/// Throughput of the link in MiB per second, of which a guest writes a tenth, and MiB of its memory that the first
/// round sends in addition to those of an idle guest.
const LINK: usize = 20;
const FILLED: usize = 96;
/// MiB that its program checks.
const CHECKED: usize = 16;
/// Duration of the rate measurement: less than that of the first round.
const WHILE: Duration = Duration::from_secs(6);

/// Measures moves, and passes on a row for each figure.
pub fn measure(row: &mut dyn FnMut(&str, String)) -> Result<()> {
    let hows = CONNECTIONS.map(|count| json!({"connections": count}));
    let by_connections = moves(Path::new("/tmp/bench-moves"), false, &hows)?;
    let figure = |of: &[Value], name: &str| -> f64 {
        let mut figures: Vec<_> = of.iter().filter_map(|info| info[name].as_f64()).collect();
        figures.sort_by(f64::total_cmp);
        figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
    };
    let copied = &by_connections[0];
    let bytes = figure(copied, "sent_bytes");
    let took = figure(copied, "elapsed_ms");
    let in_use = figure(copied, "in_use");
    let plain = plain_copy(bytes as usize)?.as_secs_f64() * 1e3;
    row(
        &format!("256 MiB, idle, copied over a Unix socket (ms; median of {MOVES})"),
        format!("{took:.0}"),
    );
    row(
        &format!(
            "a plain copy of the same {:.1} MiB (ms)",
            bytes / f64::from(1 << 20)
        ),
        format!("{plain:.0}"),
    );
    row("times a plain copy", format!("{:.2}", took / plain));
    for (count, moved) in CONNECTIONS.iter().zip(&by_connections).skip(1) {
        row(
            &format!("copied over {count} connections, by turns with that (ms; median of {MOVES})"),
            format!("{:.0}", figure(moved, "elapsed_ms")),
        );
    }
    row(
        "bytes of pages sent, times the memory in use",
        format!("{:.3}", bytes / in_use),
    );
    row(
        "downtime as predicted (ms)",
        format!("{:.0}", figure(copied, "predicted_downtime_ms")),
    );
    row(
        "downtime, promised 300 (ms)",
        format!("{:.0}", figure(copied, "downtime_ms")),
    );
    let handed = moves(
        Path::new("/tmp/bench-handed"),
        true,
        &[json!({"local": true})],
    )?;
    let handed = &handed[0];
    row(
        &format!("256 MiB, handed over: the guest stands still (ms; median of {MOVES})"),
        format!("{:.0}", figure(handed, "downtime_ms")),
    );
    row(
        "the same, from the request to the end (ms)",
        format!("{:.0}", figure(handed, "elapsed_ms")),
    );
    slow_down(row)
}

/// What a guest's program has done, and the CPU time of its vCPU for that.
#[derive(Clone, Copy)]
struct Done {
    /// Number of checked pages, and run time in milliseconds by the guest's clock.
    pages: f64,
    at: f64,
    /// CPU time in milliseconds.
    vcpu: f64,
    /// Write protection faults.
    faults: f64,
}

/// Work done during an interval.
#[derive(Clone, Copy)]
struct Rate {
    /// Checked pages per second, and per second of CPU time.
    pages: [f64; 2],
    /// Elapsed time and CPU time in milliseconds.
    time: [f64; 2],
    faults: f64,
}

impl Done {
    fn read(gantry: &Gantry, guest: &mut Guest) -> Result<Self> {
        // The last line of its output: "PAGES pages looked at in MS ms, ...".
        let said = guest.run("tail -n 1 /tmp/checks")?;
        let numbers: Vec<f64> = said
            .split(' ')
            .filter_map(|word| word.parse().ok())
            .collect();
        let [pages, at, _] = numbers[..] else {
            anyhow::bail!("the memory checker says {said:?}");
        };
        Ok(Self {
            pages,
            at,
            vcpu: vcpu_time(gantry.pid())?,
            faults: Exits::of(gantry.pid())?.write_faults,
        })
    }

    fn since(self, before: Self) -> Rate {
        let pages = self.pages - before.pages;
        let time = [self.at - before.at, self.vcpu - before.vcpu];
        Rate {
            pages: time.map(|ms| pages * 1e3 / ms),
            time,
            faults: self.faults - before.faults,
        }
    }
}

/// CPU time in milliseconds of a process's vCPU.
fn vcpu_time(pid: u32) -> Result<f64> {
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?.path();
        if fs::read_to_string(task.join("comm"))?.starts_with("vcpu") {
            let text = fs::read_to_string(task.join("schedstat"))?;
            let time = text.split(' ').next().unwrap_or_default();
            return Ok(time.parse::<f64>()? / 1e6);
        }
    }
    anyhow::bail!("process {pid} has no vCPU")
}

/// Measures the rate of a guest's memory checker, which writes a tenth of the link's throughput, alone and while the
/// first round of memory is sent.
fn slow_down(row: &mut dyn FnMut(&str, String)) -> Result<()> {
    let dir = Path::new("/tmp/bench-slow-down");
    let first = dir.join("0");
    fs::create_dir_all(&first)?;
    let (gantry, mut guest) = Gantry::boot(&first, json!({}))?;
    guest.run(&format!(
        "dd if=/dev/urandom of=/fill bs=1M count={FILLED} 2>/dev/null; \
         agent check-memory {CHECKED} {} > /tmp/checks 2>&1 & true",
        LINK / 10
    ))?;
    guest.eventually("tail -n 1 /tmp/checks", |said| said.contains(" pages "))?;
    thread::sleep(STEADY_AFTER);
    let mut during = || -> Result<Rate> {
        let before = Done::read(&gantry, &mut guest)?;
        thread::sleep(WHILE);
        Ok(Done::read(&gantry, &mut guest)?.since(before))
    };
    let alone = during()?;
    let waiting = wait_in(&dir.join("1"), &gantry.serial)?;
    gantry.put(
        "vm.send-migration",
        json!({
            "destination_url": waiting.url, "bandwidth": LINK << 20, "downtime_ms": 1,
            "max_throttle": 0, "preserve_source": true,
        }),
    )?;
    phase_until(&gantry, &["Rounds", "Failed"])?;
    let moving = during()?;
    let info = gantry.ok("GET", "vm.migration", None)?;
    ensure!(
        info["phase"] == "Rounds" && info["rounds"] == 1,
        "the round ended too soon: {info}"
    );
    gantry.act("vm.cancel-migration")?;
    phase_until(&gantry, &["Failed"])?;
    let after = during()?;
    let shown = |rate: Rate| format!("{:.0}; {:.0}", rate.pages[0], rate.pages[1]);
    row(
        &format!(
            "memory checker that writes {} MiB a second: pages a second; and a second of its vCPU",
            LINK / 10
        ),
        shown(alone),
    );
    row(
        &format!("the same, while a round goes over a link of {LINK} MiB a second"),
        shown(moving),
    );
    row("the same, after it was cancelled", shown(after));
    let lost = |at: usize| 100.0 - moving.pages[at] * 200.0 / (alone.pages[at] + after.pages[at]);
    row(
        "slower while a round runs (%); for each second of its vCPU (%)",
        format!("{:.1}; {:.1}", lost(0), lost(1)),
    );
    drop((gantry, guest));
    projected(alone, moving, row)?;
    fs::remove_dir_all(dir)?;
    Ok(())
}

/// Projects the cost of the round for the guest from what it causes: write protection faults, each of which takes as
/// long as a loop in the same run measures. Rates vary with other activity of the machine, and these numbers do not.
fn projected(alone: Rate, moving: Rate, row: &mut dyn FnMut(&str, String)) -> Result<()> {
    let a_second = |rate: Rate| rate.faults * 1e3 / rate.time[0];
    row(
        "faults of write protection a second, alone; while a round runs",
        format!("{:.0}; {:.0}", a_second(alone), a_second(moving)),
    );
    let cost = write_faults::cost()?;
    row("one of them, by a loop (us; median)", format!("{cost:.1}"));
    let [wall, own] = moving
        .time
        .map(|ms| 100.0 * moving.faults * cost / 1e3 / ms);
    let Rate { faults, time, .. } = moving;
    row(
        "slower by faults while a round runs (%): faults x cost / time; / time of its vCPU",
        format!(
            "{faults:.0} x {cost:.1} us / {:.0} ms = {wall:.1}; / {:.0} ms = {own:.1}",
            time[0], time[1]
        ),
    );
    Ok(())
}

/// Returns `vm.migration` for several moves of one guest in each of these ways, alternating.
fn moves(dir: &Path, shared: bool, hows: &[Value]) -> Result<Vec<Vec<Value>>> {
    let first = dir.join("0");
    fs::create_dir_all(&first)?;
    let (mut gantry, guest) = Gantry::boot(&first, json!({"memory": {"shared": shared}}))?;
    drop(guest);
    let mut all = vec![Vec::new(); hows.len()];
    for turn in 0..MOVES * hows.len() {
        thread::sleep(STEADY_AFTER);
        let in_use = resident(gantry.pid(), 256 << 20)?;
        let waiting = wait_in(&dir.join((turn + 1).to_string()), &gantry.serial)?;
        let way = turn % hows.len();
        let mut body = json!({"destination_url": waiting.url, "preserve_source": true});
        merge(&mut body, hows[way].clone());
        gantry.put("vm.send-migration", body)?;
        let mut info = phase_until(&gantry, &["Completed", "Failed"])?;
        info["in_use"] = in_use.into();
        ensure!(info["phase"] == "Completed", "{info}");
        gantry = waiting.arrived()?;
        all[way].push(info);
    }
    fs::remove_dir_all(dir)?;
    Ok(all)
}

/// Resident bytes of a process's mappings of this size, which are a guest's RAM.
fn resident(pid: u32, size: u64) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let (mut total, mut is_ram) = (0, false);
    for line in text.lines() {
        let number = |rest: &str| rest.trim().trim_end_matches(" kB").parse::<u64>();
        match line.split_once(':') {
            Some(("Size", rest)) => is_ram = number(rest)? << 10 == size,
            Some(("Rss", rest)) if is_ram => total += number(rest)? << 10,
            _ => {}
        }
    }
    ensure!(total > 0, "no mapping of {size} bytes");
    Ok(total)
}

/// Copies this many bytes through a socket into new memory.
fn plain_copy(bytes: usize) -> Result<Duration> {
    let (mut from, mut to) = UnixStream::pair()?;
    let source = vec![0x5a; CHUNK];
    let start = Instant::now();
    let sending = thread::spawn(move || {
        let mut left = bytes;
        while left > 0 {
            let now = left.min(CHUNK);
            from.write_all(&source[..now])?;
            left -= now;
        }
        std::io::Result::Ok(())
    });
    let mut memory = vec![0; bytes];
    to.read_exact(&mut memory)?;
    sending.join().ok().context("the sender panicked")??;
    ensure!(memory.iter().all(|byte| *byte == 0x5a), "it was no copy");
    Ok(start.elapsed())
}
