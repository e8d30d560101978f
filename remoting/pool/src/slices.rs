//! Whether time slices and stops of the GPU's driver do what they say: tried by two processes, confined as workers are.

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io::{self, BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command as Program, Stdio},
    thread,
    time::{Duration, Instant},
};

use base::gpus::{Choice, Selection};
use remoting_cuda::trial::{self, Command, Grid};
use remoting_proto::wire::api::ApiId;
use remoting_timeslice::{self as timeslice, UNRENEWED};
use remoting_turns::trial::{self as pools, Answer};

use super::{
    compiled, drivers,
    folders::Folder,
    options::Options,
    process::{self, Worker},
};

/// How long all may take; a trial for an arbiter no longer than others wait for it.
const PATIENCE: Duration = Duration::from_secs(180);
const TRIAL: Duration = Duration::from_secs(25);
const _: () = assert!(TRIAL.as_secs() < pools::LONGEST.as_secs());
/// How long a kernel runs for what is counted.
const RUN: Duration = Duration::from_millis(400);
/// Time in which a kernel's writes have arrived.
const SETTLES: Duration = Duration::from_millis(5);
/// Slices of two processes in microseconds, and how much work one may do by the other's: the ratio of slices is 3, and an
/// H200 gave 2.55 to 3.16. It would be 1 if slices had no effect.
const SLICES: [u32; 2] = [2000, 6000];
const RATIO: std::ops::RangeInclusive<f64> = 2.3..=3.9;
const SHARED: Duration = Duration::from_secs(1);
/// The same in a shorter trial, of which each part lasts so long.
const NEAR_RATIO: std::ops::RangeInclusive<f64> = 2.0..=4.5;
const PART: Duration = Duration::from_millis(250);
/// What the record of context switches may have for a round of one process's kernel by what it has for the other's: 1.11 and
/// 1.15 on an H200, as beginning a slice takes time of it.
const PER_ROUND: std::ops::RangeInclusive<f64> = 0.75..=1.33;
/// And at most for both together, of the time.
const MOST_RECORDED: f64 = 1.1;
/// What a process beside a stopped one does at least of what it does alone.
const BESIDE: f64 = 0.9;
/// The driver's own slice.
const DEFAULT_SLICE: Duration = Duration::from_micros(2048);
/// How often a context is stopped and started for each figure, and amid copies.
const STOPS: u32 = 200;
const SOAK: u32 = 1000;

/// Why nothing was tried.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder.
    #[error("cannot make a folder for what a driver writes: name another by --cache")]
    Folder(#[source] io::Error),
    /// A process.
    #[error("cannot start a process that tries time slices")]
    Start(#[source] io::Error),
    /// The conversation with a process.
    #[error("a process that tries time slices has ended")]
    Ended(#[source] io::Error),
    /// What a process cannot do.
    #[error("a process that tries time slices cannot {0}: {1}")]
    Failed(String, String),
    /// The output.
    #[error("cannot write to the standard output")]
    Output(#[source] io::Error),
}

/// A process with a context. It is killed when this is dropped.
struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// Number of GPUs that it can try.
    gpus: u32,
    _folder: Folder,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    /// Starts one, with a folder of its own below `place`. It ends after `limit`.
    fn start(
        program: &Path,
        options: &Options,
        place: &Path,
        number: u32,
        limit: Duration,
    ) -> Result<Self, Error> {
        let name = format!("gantry-slices-{}-{number}", std::process::id());
        let folder = Folder::create(place.join(name)).map_err(Error::Folder)?;
        let mut command = Program::new(program);
        command
            .arg("sliced")
            .args(["--seconds", &limit.as_secs().to_string()])
            .args(["--api", ApiId::Cuda.name()])
            .args(["--library", options.library(ApiId::Cuda)])
            .args(["--heap", &(options.heap() >> 20).to_string()])
            .args(["--devices", &options.devices.to_string()])
            .arg("--cache")
            .arg(&folder.0)
            .envs(compiled::variables(&folder.0))
            .env("TMPDIR", &folder.0)
            .envs(drivers::environment())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        for path in &options.readable {
            command.arg("--readable").arg(path);
        }
        if let Some(without) = &options.without {
            command.arg("--without").arg(without.to_string());
        }
        let this = std::process::id();
        // SAFETY: the new process makes system calls that may be made between fork and exec.
        unsafe {
            command.pre_exec(move || base::child::end_with(this));
        }
        let mut child = command.spawn().map_err(Error::Start)?;
        let missing = || Error::Start(io::ErrorKind::BrokenPipe.into());
        let input = child.stdin.take().ok_or_else(missing)?;
        let output = child.stdout.take().ok_or_else(missing)?;
        let mut process = Self {
            child,
            input,
            output: BufReader::new(output),
            gpus: 0,
            _folder: folder,
        };
        process.gpus = u32::try_from(process.answer("start")?).unwrap_or(u32::MAX);
        Ok(process)
    }

    fn answer(&mut self, what: &str) -> Result<u64, Error> {
        let mut line = String::new();
        let length = self.output.read_line(&mut line).map_err(Error::Ended)?;
        let ended = || Error::Ended(io::ErrorKind::UnexpectedEof.into());
        if length == 0 {
            return Err(ended());
        }
        match line.trim_end().split_once(' ') {
            Some(("ok", number)) => number.parse().map_err(|_| ended()),
            Some(("failed", why)) => Err(Error::Failed(what.to_owned(), why.to_owned())),
            _ => Err(ended()),
        }
    }

    fn tell(&mut self, command: Command) -> Result<u64, Error> {
        writeln!(self.input, "{command}").map_err(Error::Ended)?;
        self.answer(&command.to_string())
    }

    /// Keeps a stopped process stopped for this time. Returns whether it was.
    fn keep_stopped(&mut self, time: Duration) -> Result<bool, Error> {
        let part = UNRENEWED / 4;
        for _ in 0..time.as_nanos().div_ceil(part.as_nanos()) {
            if self.tell(Command::Renew)? == 0 {
                return Ok(false);
            }
            thread::sleep(part);
        }
        Ok(self.tell(Command::Renew)? == 1)
    }

    /// Rounds of its kernel in this time, while `during` is done.
    fn rounds(
        &mut self,
        during: impl FnOnce(&mut Self) -> Result<bool, Error>,
    ) -> Result<Option<u64>, Error> {
        thread::sleep(SETTLES);
        let before = self.tell(Command::Count)?;
        if !during(self)? {
            return Ok(None);
        }
        Ok(Some(self.tell(Command::Count)?.saturating_sub(before)))
    }
}

/// Whether slices and stops of the GPU's driver, and its record of context switches, do what they say: as the arbiter knows from
/// another pool, or tried, as far as a second of it shows. `folder` is the pool's own.
pub(super) fn work(program: &Path, options: &Options, folder: &Path, arbiter: &Path) -> bool {
    if timeslice::of_this_process().is_err() {
        return false;
    }
    if timeslice::has_instances() {
        base::note!("gantry-accel: workers take turns, as a GPU is divided into instances (MIG)");
        return false;
    }
    let turn = match pools::ask(arbiter, &device(options)) {
        Ok((Answer::Unneeded, _)) => return false,
        Ok((Answer::Known, _)) => return true,
        Ok((Answer::Try, turn)) => Some(turn),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            base::note!(
                "gantry-accel: workers take turns, as trials of time slices by other pools have not ended; start this pool again"
            );
            return false;
        }
        // There is no arbiter. Other pools may try meanwhile, and then none may find that it works.
        Err(_) => None,
    };
    let works = tried(program, options, folder);
    if let Some(turn) = turn {
        // If the arbiter has ended, the next one asks the next pool.
        let _ = turn.end(works);
    }
    works
}

/// What a trial is of: the driver, and the GPUs that are lent.
fn device(options: &Options) -> String {
    let mut hasher = DefaultHasher::new();
    fs::read("/proc/driver/nvidia/version")
        .unwrap_or_default()
        .hash(&mut hasher);
    options.library(ApiId::Cuda).hash(&mut hasher);
    options.devices.to_string().hash(&mut hasher);
    env!("CARGO_PKG_VERSION").hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

fn tried(program: &Path, options: &Options, folder: &Path) -> bool {
    let why = match work_now(program, options, folder) {
        Ok(Ok(())) => return true,
        Ok(Err(why)) => why,
        Err(error) => base::Chain(&error).to_string(),
    };
    base::note!("gantry-accel: workers take turns, as time slices of the GPU do not work: {why}");
    false
}

/// Returns what does not work.
fn work_now(program: &Path, options: &Options, folder: &Path) -> Result<Result<(), String>, Error> {
    let begun = Instant::now();
    let mut one = Process::start(program, options, folder, 1, TRIAL)?;
    // Both end by then. Zero would be no limit.
    let left = TRIAL.saturating_sub(begun.elapsed());
    let left = left.max(Duration::from_secs(1));
    let mut other = Process::start(program, options, folder, 2, left)?;
    for gpu in 0..one.gpus {
        if gpu > 0 {
            for process in [&mut one, &mut other] {
                process.tell(Command::Gpu(gpu))?;
            }
        }
        if let Err(why) = gpu_works(&mut one, &mut other)? {
            return Ok(Err(match gpu {
                0 => why,
                _ => format!("{why} (GPU {gpu} of those that are lent)"),
            }));
        }
    }
    Ok(Ok(()))
}

/// Returns what does not work on the GPU on which both have their contexts.
fn gpu_works(one: &mut Process, other: &mut Process) -> Result<Result<(), String>, Error> {
    for slices in [SLICES, [SLICES[1], SLICES[0]]] {
        let shared = share(one, other, slices, PART)?;
        let did = shared.did;
        if !NEAR_RATIO.contains(&shared.ratio(did)) {
            let [first, second] = slices;
            return Ok(Err(format!(
                "slices of {first} and {second} us give {} and {} rounds of a kernel",
                did[0], did[1]
            )));
        }
        if !shared.is_recorded() {
            return Ok(Err(format!(
                "the record of context switches has {} rounds of a kernel in {}, {} in {}",
                did[0],
                shared.recorded(0),
                did[1],
                shared.recorded(1)
            )));
        }
    }
    one.tell(Command::Spin(Grid::Full))?;
    one.tell(Command::Stop)?;
    let stood = one.rounds(|one| one.keep_stopped(PART / 4))?;
    one.tell(Command::Start)?;
    let went_on = one.rounds(|_| pause(PART / 4))?;
    one.tell(Command::End)?;
    Ok(match stood == Some(0) && went_on > Some(0) {
        true => Ok(()),
        false => Err("a stopped kernel does not stand still, or does not go on".to_owned()),
    })
}

/// Two processes' endless kernels side by side.
struct Shared {
    /// Their slices in microseconds.
    slices: [u32; 2],
    /// Their rounds.
    did: [u64; 2],
    /// What the record of context switches has for them, in microseconds; `None` if there is none.
    used: Option<[u64; 2]>,
    /// For how long they ran.
    time: Duration,
}

impl Shared {
    /// What the record has for one.
    fn recorded(&self, index: usize) -> String {
        match self.used {
            Some(used) => {
                let used = Duration::from_micros(used[index]);
                format!("{:.3} of the time", used.div_duration_f64(self.time))
            }
            None => "no record".to_owned(),
        }
    }

    /// How much more the one with the longer slice has.
    fn ratio(&self, [first, second]: [u64; 2]) -> f64 {
        match self.slices[0] < self.slices[1] {
            true => second as f64 / first as f64,
            false => first as f64 / second as f64,
        }
    }

    /// Whether the record has for them what they have done. Others, such as another pool's trial, may use the GPU, too.
    fn is_recorded(&self) -> bool {
        self.used.is_some_and(|used| {
            let all = Duration::from_micros(used[0].saturating_add(used[1]));
            let per_round = [0, 1].map(|index| used[index] as f64 / self.did[index] as f64);
            NEAR_RATIO.contains(&self.ratio(used))
                && PER_ROUND.contains(&(per_round[0] / per_round[1]))
                && all.div_duration_f64(self.time) <= MOST_RECORDED
        })
    }
}

/// Runs two processes' endless kernels with these slices.
fn share(
    one: &mut Process,
    other: &mut Process,
    [first, second]: [u32; 2],
    time: Duration,
) -> Result<Shared, Error> {
    one.tell(Command::Slice(first))?;
    other.tell(Command::Slice(second))?;
    let mut all =
        |command| -> Result<[u64; 2], Error> { Ok([one.tell(command)?, other.tell(command)?]) };
    // The first time, the record begins.
    let _ = recorded(all(Command::Used))?;
    all(Command::Spin(Grid::Full))?;
    thread::sleep(SETTLES);
    let used_before = recorded(all(Command::Used))?;
    let begin = Instant::now();
    let before = all(Command::Count)?;
    thread::sleep(time);
    let after = all(Command::Count)?;
    let used_after = recorded(all(Command::Used))?;
    let time = begin.elapsed();
    all(Command::End)?;
    let more = |after: [u64; 2], before: [u64; 2]| {
        [0, 1].map(|index| after[index].saturating_sub(before[index]))
    };
    Ok(Shared {
        slices: [first, second],
        did: more(after, before),
        used: used_after
            .zip(used_before)
            .map(|(after, before)| more(after, before)),
        time,
    })
}

/// What the record has, if there is one.
fn recorded(asked: Result<[u64; 2], Error>) -> Result<Option<[u64; 2]>, Error> {
    match asked {
        Ok(used) => Ok(Some(used)),
        Err(Error::Failed(..)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Tries slices and stops, and prints a line for each step. Returns whether all worked.
///
/// # Errors
/// Nothing was tried, or a process failed.
pub fn run(program: &Path, options: &Options, out: &mut impl Write) -> Result<bool, Error> {
    let mut all = true;
    let mut tell = |step: &str, works: bool, found: String| {
        all &= works;
        let mark = if works { "" } else { "FAILED: " };
        writeln!(out, "{step}: {mark}{found}").map_err(Error::Output)
    };
    let mut one = Process::start(program, options, &options.cache, 1, PATIENCE)?;
    let mut other = Process::start(program, options, &options.cache, 2, PATIENCE)?;

    one.tell(Command::Spin(Grid::Full))?;
    let ran = one.rounds(|_| pause(RUN))?.unwrap_or(0);
    let stop = one.tell(Command::Stop)?;
    let stood = one.rounds(|one| one.keep_stopped(RUN))?;
    let start = one.tell(Command::Start)?;
    let went_on = one.rounds(|_| pause(RUN))?.unwrap_or(0);
    tell(
        "a stopped kernel stands still",
        ran > 0 && stood == Some(0) && went_on > 0,
        format!(
            "{ran} rounds before, {} while stopped, {went_on} after; stop {stop} us, start {start} us",
            stood.map_or("unknown".to_owned(), |rounds| rounds.to_string())
        ),
    )?;

    let rounds = one.tell(Command::End)?;
    tell(
        "its results are right",
        true,
        format!("all threads' numbers, the first after {rounds} rounds"),
    )?;

    for (what, grid) in [
        ("without work", None),
        ("with a kernel on one multiprocessor", Some(Grid::One)),
        ("with a kernel on all", Some(Grid::Full)),
    ] {
        if let Some(grid) = grid {
            one.tell(Command::Spin(grid))?;
        }
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..STOPS {
            times[0].push(one.tell(Command::Stop)?);
            times[1].push(one.tell(Command::Start)?);
        }
        if grid.is_some() {
            one.tell(Command::End)?;
        }
        let [stop, start] = times.map(|mut times| {
            times.sort_unstable();
            let (median, late) = (times[times.len() / 2], times[times.len() * 99 / 100]);
            format!("median {median} us, P99 {late} us")
        });
        tell(
            "a context is stopped and started",
            true,
            format!("{what}, {STOPS} times: stop {stop}; start {start}"),
        )?;
    }

    let rounds = one.tell(Command::Soak(SOAK))?;
    tell(
        "stops harm no copies",
        rounds > 0,
        format!(
            "{SOAK} stops amid {rounds} rounds of allocations, copies of up to 4 MiB and kernels, all right"
        ),
    )?;

    one.tell(Command::Spin(Grid::Full))?;
    one.tell(Command::Stop)?;
    let destroyed = one.tell(Command::Remake)?;
    let renewed = one.tell(Command::Renew)?;
    one.tell(Command::Start)?;
    let again = one.tell(Command::Short(RUN.as_millis() as u32))?;
    tell(
        "a context may be destroyed while stopped",
        renewed == 0 && again > 0,
        format!("in {destroyed} us; {again} short kernels in another one"),
    )?;

    one.tell(Command::Spin(Grid::Full))?;
    one.tell(Command::Stop)?;
    thread::sleep(UNRENEWED * 2);
    let again = one.rounds(|_| pause(RUN))?.unwrap_or(0);
    let renewed = one.tell(Command::Renew)?;
    one.tell(Command::Start)?;
    one.tell(Command::End)?;
    tell(
        "a stop that nobody renews ends",
        again > 0 && renewed == 0,
        format!("{again} rounds after {} ms", (UNRENEWED * 2).as_millis()),
    )?;

    for slices in [SLICES, [SLICES[1], SLICES[0]]] {
        let [first, second] = slices;
        let set = one.tell(Command::Slice(first))?;
        let shared = share(&mut one, &mut other, slices, SHARED)?;
        let did = shared.did;
        let ratio = shared.ratio(did);
        tell(
            "slices decide about shares",
            RATIO.contains(&ratio),
            format!(
                "{} and {} rounds with {first} and {second} us: a ratio of {ratio:.2}; set in {set} us",
                did[0], did[1]
            ),
        )?;
        tell(
            "context switches tell who used the GPU",
            shared.is_recorded(),
            format!(
                "with {first} and {second} us, {} and {}",
                shared.recorded(0),
                shared.recorded(1)
            ),
        )?;
    }

    for process in [&mut one, &mut other] {
        process.tell(Command::Slice(DEFAULT_SLICE.as_micros() as u32))?;
    }
    let time = Command::Short(RUN.as_millis() as u32);
    let alone = other.tell(time)?;
    one.tell(Command::Spin(Grid::Full))?;
    let beside = other.tell(time)?;
    one.tell(Command::Stop)?;
    // Renewed meanwhile, as this takes longer.
    let short = Command::Short(UNRENEWED.as_millis() as u32 / 4);
    let (mut free, mut parts, mut kept) = (0, 0, true);
    while parts * u128::from(UNRENEWED.as_millis() as u64 / 4) < RUN.as_millis() {
        kept &= one.tell(Command::Renew)? == 1;
        free += other.tell(short)?;
        parts += 1;
    }
    one.tell(Command::Start)?;
    one.tell(Command::End)?;
    tell(
        "an endless kernel leaves the GPU while stopped",
        kept && free as f64 >= BESIDE * alone as f64,
        format!("{alone} short kernels alone, {beside} beside it, {free} while it is stopped"),
    )?;

    one.tell(Command::Spin(Grid::Full))?;
    one.tell(Command::Stop)?;
    drop(one);
    let after = other.tell(time)?;
    tell(
        "a process may be killed while stopped",
        after as f64 >= BESIDE * alone as f64,
        format!("{after} short kernels of another one afterwards"),
    )?;
    Ok(all)
}

fn pause(time: Duration) -> Result<bool, Error> {
    thread::sleep(time);
    Ok(true)
}

/// Is one of the two processes, which is confined first as a worker is. It ends after so many seconds if it hangs.
///
/// # Errors
/// It cannot be confined, or the other side has gone.
pub fn sliced(options: &Options, seconds: u32, out: &mut impl Write) -> Result<(), process::Error> {
    // SAFETY: a plain call. Nobody handles the signal, which ends the process.
    unsafe { libc::alarm(seconds) };
    let worker = Worker::confined(options)?;
    worker.send_no_files()?;
    let gpus = Choice {
        lent: options.devices.clone(),
        wanted: Selection::default(),
    };
    trial::serve(options.library(ApiId::Cuda), &gpus, io::stdin().lock(), out)
        .map_err(process::Error::Connection)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_tells_use_if_it_has_what_was_done_whoever_else_uses_the_gpu() {
        let shared = |did, used| Shared {
            slices: [2000, 6000],
            did,
            used,
            time: Duration::from_secs(1),
        };
        for (did, used, tells) in [
            // As measured on an H200.
            ([2319, 5920], Some([256_000, 726_000]), true),
            // Beside six pools' trials.
            ([330, 850], Some([36_000, 104_000]), true),
            ([2319, 5920], None, false),
            ([2319, 5920], Some([0, 0]), false),
            ([2319, 5920], Some([0, 982_000]), false),
            ([2319, 5920], Some([491_000, 491_000]), false),
            ([2319, 5920], Some([512_000, 1_452_000]), false),
            ([2900, 5920], Some([150_000, 670_000]), false),
        ] {
            let shared = shared(did, used);
            assert_eq!(shared.is_recorded(), tells, "{did:?} {used:?}");
        }
    }
}
