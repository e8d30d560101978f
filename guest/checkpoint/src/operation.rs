//! Suspending and resuming programs: the order of the steps, and what is undone when one fails.

use std::{
    io::{self, Write},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use base::{note, proc::has_ended};

use crate::{
    driver::{Code, Driver, DriverError, State, Uuid, uuid},
    inventory::{Gpu, Inventory, Nvml, NvmlError, UNKNOWN},
    journal::{Entry, Had, Journal, JournalError},
    memory::{self, Need, Size},
    process::{self, Process},
};

/// How often a step that takes long says so.
const PROGRESS: Duration = Duration::from_secs(2);

/// The most that a program has on a device beside its contents: local memory of 64 KiB for each thread that 132
/// multiprocessors can have, and the driver's own (541 MiB were seen).
const BESIDE: u64 = 18 << 30;

/// Something was not done.
#[derive(Debug, thiserror::Error)]
pub enum OperationError {
    /// Nothing was begun.
    #[error("nothing was changed: {}", .0.join("; "))]
    Refused(Vec<String>),
    /// A step failed; what had been done was undone.
    #[error("{0}; all programs go on")]
    Undone(String),
    /// Programs stay as they are; others were resumed.
    #[error("not resumed: {}", .0.join("; "))]
    Staying(Vec<String>),
    /// Programs are lost.
    #[error("lost: {}", .0.join("; "))]
    Lost(Vec<String>),
    /// The driver cannot be used.
    #[error("nothing was changed")]
    Driver(#[from] DriverError),
    /// NVML cannot be used.
    #[error("nothing was changed: it is not known how much memory is needed (--force goes on)")]
    Nvml(#[from] NvmlError),
    /// It is not known which programs there are.
    #[error("nothing was changed: cannot look at the processes")]
    Processes(#[source] io::Error),
    /// The journal cannot be used.
    #[error("the journal fails")]
    Journal(#[from] JournalError),
    /// The output cannot be written.
    #[error("cannot write the output")]
    Output(#[from] io::Error),
}

impl OperationError {
    /// Programs stay, and perhaps others are lost. Those that stay can be resumed later, so that this is not the end.
    fn staying(mut reasons: Vec<String>, staying: Vec<String>, lost: &[String]) -> Self {
        reasons.extend(staying);
        reasons.extend(lost.iter().map(|lost| format!("{lost} (lost)")));
        Self::Staying(reasons)
    }

    /// The exit status of the program.
    pub fn status(&self) -> u8 {
        match self {
            Self::Lost(_) => 3,
            _ => 1,
        }
    }
}

/// Which programs.
#[derive(Clone, Debug, Default)]
pub enum Chosen {
    /// These processes.
    Processes(Vec<u32>),
    /// All that have the driver loaded, or, to resume, all that were suspended.
    #[default]
    All,
}

/// How to suspend.
#[derive(Clone, Debug)]
pub struct Suspension {
    /// Which programs.
    pub chosen: Chosen,
    /// The most time in which a program's calls have to end.
    pub limit: Duration,
    /// Whether drivers that are known to fail, and unknown needs for memory, are accepted.
    pub force: bool,
    /// Whether a program that still has a device file open counts as not suspended.
    pub released: bool,
    /// Whether nothing is done but to look for obstacles.
    pub is_trial: bool,
}

/// How to resume.
#[derive(Clone, Debug, Default)]
pub struct Resumption {
    /// Which programs.
    pub chosen: Chosen,
    /// Devices that take others' places: UUIDs then and now.
    pub gpus: Vec<(String, String)>,
    /// Whether unknown needs for memory are accepted.
    pub force: bool,
}

/// A program that is suspended, step by step.
struct Item {
    process: Process,
    entry: Entry,
}

/// A program has not been resumed.
enum Unresumed {
    /// It stays as it is.
    Stays(String),
    /// It is lost.
    Lost(String),
}

/// Suspends programs: all of them, or none.
///
/// # Errors
/// Nothing was changed, what was done was undone, or a program is lost.
pub fn suspend(
    options: &Suspension,
    journal: &Journal,
    out: &mut dyn Write,
) -> Result<(), OperationError> {
    let is_all = matches!(options.chosen, Chosen::All);
    let processes = match &options.chosen {
        Chosen::All => process::with_driver().map_err(OperationError::Processes)?,
        // Those that have ended keep no device from anybody.
        Chosen::Processes(numbers) if options.released => {
            let (found, missing) = look_up(numbers);
            let (ended, unknown): (Vec<_>, Vec<_>) = missing
                .into_iter()
                .partition(|missing| has_ended(&missing.1));
            for missing in ended {
                note!("gantry-checkpoint: {}: it is left out", text(&missing));
            }
            if !unknown.is_empty() {
                return Err(OperationError::Refused(unknown.iter().map(text).collect()));
            }
            found
        }
        Chosen::Processes(numbers) => find(numbers)?,
    };
    let has_gone = |process: &Process| {
        let has_gone = options.released && !process.is_alive();
        if has_gone {
            note!("gantry-checkpoint: {process} has ended meanwhile: it is left out");
        }
        has_gone
    };
    let obstacles = processes.iter().filter_map(|process| {
        let obstacle = obstacle(process)?;
        (!has_gone(process)).then_some(obstacle)
    });
    let mut obstacles: Vec<_> = obstacles.collect();
    if !obstacles.is_empty() {
        return Err(OperationError::Refused(obstacles));
    }
    if processes.is_empty() {
        writeln!(out, "no program uses the driver")?;
        return Ok(());
    }
    let driver = Driver::open()?;
    let nvml = Nvml::default();
    let before = inventory(&nvml, options.force)?;
    obstacles.extend(known_to_fail(&before.version).filter(|_| !options.force));
    let mut items = Vec::new();
    for process in processes {
        let entry = journal.entry(&process)?;
        let state = driver.state(process.number);
        let is_lost = entry.is_some_and(|entry| {
            entry.is_lost || (entry.is_resuming && state == Ok(State::Checkpointed))
        });
        match state {
            _ if is_lost => obstacles.push(format!("{process} is lost already: end it")),
            Ok(State::Checkpointed) => writeln!(out, "{process} is suspended already")?,
            Ok(State::Failed) => obstacles.push(format!("{process} is lost already: end it")),
            // An earlier call has been killed between two steps.
            Ok(State::Locked) if options.is_trial => items.push(process),
            Ok(State::Locked) => {
                let unlocked = driver.unlock(process.number);
                obstacles.extend(
                    unlocked
                        .err()
                        .map(|code| format!("{process} is locked and cannot be unlocked: {code}")),
                );
                items.push(process);
            }
            Ok(_) => items.push(process),
            Err(_) if has_gone(&process) => {}
            Err(code) if is_all && is_bystander(&process) => {
                note!("gantry-checkpoint: {process} is left out: its state is not known: {code}");
            }
            Err(code) => obstacles.push(format!("{process}: its state is not known: {code}")),
        }
    }
    if items.is_empty() && obstacles.is_empty() {
        return Ok(());
    }
    let needs: Vec<_> = items.iter().map(|process| need(process, &before)).collect();
    if !options.force {
        let listed = items.iter().map(|process| before.bytes_of(process.number));
        let total = listed
            .sum::<Option<u64>>()
            // Those that no list names have together at most what is in use.
            .unwrap_or_else(|| before.used());
        obstacles.extend(memory::shortages(&needs, total));
    }
    if !obstacles.is_empty() {
        return Err(OperationError::Refused(obstacles));
    }
    if options.is_trial {
        for Need { process, bytes } in &needs {
            if let Err(error) = memory::can_raise_limit(process, *bytes)
                && !has_gone(process)
            {
                obstacles.push(in_the_way(process, &error));
            }
        }
        if !obstacles.is_empty() {
            return Err(OperationError::Refused(obstacles));
        }
        for Need { process, bytes } in needs {
            writeln!(out, "{process} can be suspended, at most {}", Size(bytes))?;
        }
        return Ok(());
    }
    let mut work = Work {
        driver: &driver,
        nvml: &nvml,
        journal,
        force: options.force,
        items: Vec::new(),
    };
    for need in needs {
        if let Err(reason) = work.prepare(&need, &before)
            && !has_gone(&need.process)
        {
            return Err(work.undo(reason));
        }
    }
    for index in 0..work.items.len() {
        if let Err(reason) = work.lock(index, options.limit)
            && !has_gone(&work.items[index].process)
        {
            return Err(work.undo(reason));
        }
    }
    for index in 0..work.items.len() {
        // One that ends in this step may have been ended by it.
        if has_gone(&work.items[index].process) {
            continue;
        }
        if let Err(reason) = work.checkpoint(index, options.released, out) {
            return Err(work.undo(reason));
        }
    }
    Ok(())
}

/// Resumes programs, each for itself.
///
/// # Errors
/// Nothing was changed, or a program stays suspended or is lost.
pub fn resume(
    options: &Resumption,
    journal: &Journal,
    out: &mut dyn Write,
) -> Result<(), OperationError> {
    let processes = match &options.chosen {
        Chosen::All => journal.programs()?,
        Chosen::Processes(numbers) => find(numbers)?,
    };
    if processes.is_empty() {
        writeln!(out, "no program is suspended")?;
        return Ok(());
    }
    let driver = Driver::open()?;
    let nvml = Nvml::default();
    let (mut staying, mut lost) = (Vec::new(), Vec::new());
    for process in processes {
        let begin = Instant::now();
        match resume_one(options, &driver, &nvml, journal, &process) {
            Ok(()) => {
                let seconds = begin.elapsed().as_secs_f64();
                let written = writeln!(out, "{process} resumed in {seconds:.1} s");
                // The others have to go on, too.
                if let Err(error) = written.and_then(|()| out.flush()) {
                    note!("gantry-checkpoint: {process} is resumed; cannot write that: {error}");
                }
            }
            Err(Unresumed::Stays(reason)) => staying.push(format!("{process} {reason}")),
            Err(Unresumed::Lost(reason)) => lost.push(format!("{process}: {reason}")),
        }
    }
    match (lost.is_empty(), staying.is_empty()) {
        (true, true) => Ok(()),
        (false, true) => Err(OperationError::Lost(lost)),
        (_, false) => Err(OperationError::staying(Vec::new(), staying, &lost)),
    }
}

/// Resumes a program.
fn resume_one(
    options: &Resumption,
    driver: &Driver,
    nvml: &Nvml,
    journal: &Journal,
    process: &Process,
) -> Result<(), Unresumed> {
    let failed = |error: JournalError| Unresumed::Stays(base::Chain(&error).to_string());
    let entry = journal.entry(process).map_err(failed)?;
    if entry.as_ref().is_some_and(|entry| entry.is_lost) {
        let reason = "it failed to resume before: end it";
        return Err(Unresumed::Lost(reason.to_owned()));
    }
    match driver.state(process.number) {
        Ok(State::Running) => {}
        Ok(State::Locked) => driver.unlock(process.number).map_err(not_unlocked)?,
        Ok(State::Checkpointed) => {
            let mut noted = entry.clone().unwrap_or_else(|| Entry::of(process));
            if noted.is_resuming && !options.force {
                let reason = "a resumption was interrupted: end it (--force tries again)";
                return Err(Unresumed::Lost(reason.to_owned()));
            }
            let stays = |reason| Unresumed::Stays(format!("stays suspended: {reason}"));
            let now = inventory(nvml, options.force).map_err(|error| stays(error.to_string()))?;
            let places = places(&noted.gpus, options, &now).map_err(stays)?;
            driver.start().map_err(not_started)?;
            // A second attempt cannot succeed, and must not look as if it had: that this one began has to be known, even
            // if this program is killed.
            noted.is_resuming = true;
            journal.write(process, &noted).map_err(failed)?;
            if let Err(code) = restore(driver, process, &places) {
                noted.is_lost = true;
                if let Err(error) = journal.write(process, &noted) {
                    note!("gantry-checkpoint: {process}: {}", base::Chain(&error));
                }
                return Err(Unresumed::Lost(code.to_string()));
            }
            driver.unlock(process.number).map_err(not_unlocked)?;
        }
        Ok(State::Failed) => {
            let reason = "the driver has given it up: end it";
            return Err(Unresumed::Lost(reason.to_owned()));
        }
        Ok(State::Other(state)) => {
            return Err(Unresumed::Stays(format!("is in the unknown state {state}")));
        }
        Err(code) => {
            let reason = format!("stays: its state is not known: {code}");
            return Err(Unresumed::Stays(reason));
        }
    }
    if let Some(limit) = entry.and_then(|entry| entry.limit)
        && let Err(error) = memory::set_limit(process, limit)
    {
        note!("gantry-checkpoint: {process} keeps its higher limit of data memory: {error}");
    }
    if let Err(error) = journal.remove(process) {
        note!("gantry-checkpoint: {process}: {}", base::Chain(&error));
    }
    Ok(())
}

/// Lists programs that have the driver loaded, or were suspended.
///
/// # Errors
/// The driver or the journal cannot be used.
pub fn list(journal: &Journal, out: &mut dyn Write) -> Result<(), OperationError> {
    let mut processes = process::with_driver().map_err(OperationError::Processes)?;
    for process in journal.programs()? {
        if !processes.contains(&process) {
            processes.push(process);
        }
    }
    if processes.is_empty() {
        writeln!(out, "no program uses the driver")?;
        return Ok(());
    }
    let driver = Driver::open()?;
    let now = Nvml::default().inventory().unwrap_or_default();
    for process in processes {
        let entry = journal.entry(&process).unwrap_or_else(|error| {
            note!("gantry-checkpoint: {process}: {}", base::Chain(&error));
            None
        });
        let state = match driver.state(process.number) {
            _ if entry.as_ref().is_some_and(|entry| entry.is_lost) => "lost".to_owned(),
            Ok(State::Running) => "running".to_owned(),
            Ok(State::Locked) => "locked".to_owned(),
            Ok(State::Checkpointed) => "suspended".to_owned(),
            Ok(State::Failed) => "lost".to_owned(),
            Ok(State::Other(state)) => format!("state {state}"),
            Err(code) => code.to_string(),
        };
        let suspended = entry.map(|entry| entry.gpus.iter().map(|gpu| gpu.bytes).sum());
        let bytes = now.bytes_of(process.number).or(suspended);
        let bytes = bytes.map_or("-".to_owned(), |bytes| Size(bytes).to_string());
        writeln!(
            out,
            "{:>8}  {state:<10} {bytes:>10}  {}",
            process.number, process.name
        )?;
    }
    Ok(())
}

/// A process that was not found, and why.
type Missing = (u32, io::Error);

fn text((number, error): &Missing) -> String {
    format!("PID {number}: {error}")
}

/// The processes with these numbers, and which of them there are not.
fn look_up(numbers: &[u32]) -> (Vec<Process>, Vec<Missing>) {
    let (mut found, mut missing) = (Vec::<Process>::new(), Vec::new());
    for number in numbers {
        match Process::find(*number) {
            Ok(process) if found.contains(&process) => {}
            Ok(process) => found.push(process),
            Err(error) => missing.push((*number, error)),
        }
    }
    (found, missing)
}

fn find(numbers: &[u32]) -> Result<Vec<Process>, OperationError> {
    let (found, missing) = look_up(numbers);
    if missing.is_empty() {
        Ok(found)
    } else {
        Err(OperationError::Refused(missing.iter().map(text).collect()))
    }
}

/// What is in the way of a program's suspension, whatever the driver says.
fn obstacle(process: &Process) -> Option<String> {
    let text = "does not use the driver (no libcuda.so is loaded), or is another user's";
    process
        .driver()
        .is_none()
        .then(|| format!("{process} {text}"))
}

/// Whether a process that the driver does not know has ended, or only has its library loaded.
fn is_bystander(process: &Process) -> bool {
    !process.is_alive() || process.device_files().is_ok_and(|files| files.is_empty())
}

/// Why a driver's suspension is not used without being forced.
fn known_to_fail(version: &str) -> Option<String> {
    let why = if version.starts_with("570.") {
        "it answers \"not supported\" for many programs"
    } else if version == "610.57.04" {
        "it can crash programs that have many threads"
    } else {
        return None;
    };
    Some(format!(
        "driver {version}: {why}; --force tries nevertheless"
    ))
}

fn inventory(nvml: &Nvml, force: bool) -> Result<Inventory, NvmlError> {
    match nvml.inventory() {
        Err(error) if force => {
            note!("gantry-checkpoint: NVML is not used: {error}");
            Ok(Inventory::default())
        }
        taken => taken,
    }
}

fn need(process: &Process, before: &Inventory) -> Need {
    Need {
        process: process.clone(),
        bytes: before
            .bytes_of(process.number)
            .unwrap_or_else(|| before.used()),
    }
}

/// The devices to resume on: a pair of UUIDs for each device that there was.
fn places(saved: &[Had], options: &Resumption, now: &Inventory) -> Result<Vec<[Uuid; 2]>, String> {
    let wished = &options.gpus;
    if let Some((old, _)) = wished
        .iter()
        .find(|wish| saved.iter().all(|gpu| gpu.uuid != wish.0))
    {
        return Err(format!("there was no {old} when it was suspended"));
    }
    if options.force && now.gpus.is_empty() && wished.is_empty() {
        return Ok(Vec::new());
    }
    // The driver wants a place for each that there was, also for those that the program did not use.
    if saved.len() > now.gpus.len() && wished.is_empty() {
        let (had, has) = (saved.len(), now.gpus.len());
        return Err(format!(
            "there were {had} GPUs, and there are {has} now: it needs as many; nothing was tried"
        ));
    }
    let mut pairs = Vec::new();
    let mut is_elsewhere = false;
    for (position, had) in saved.iter().enumerate() {
        let Had {
            uuid: old,
            model,
            bytes,
        } = had;
        let same = now.gpus.iter().find(|gpu| gpu.uuid == *old);
        let wish = wished.iter().find(|wish| wish.0 == *old);
        let gpu = match wish {
            Some((_, new)) => now.gpus.iter().find(|gpu| gpu.uuid == *new),
            None => same.or(now.gpus.get(position)),
        };
        let Some(gpu) = gpu else {
            let name = wish.map_or(old, |wish| &wish.1);
            return Err(format!(
                "there is no {name}: name a device by --gpu {old}=UUID"
            ));
        };
        // The driver would refuse another type, and the program would be lost.
        if gpu.model != *model && !options.force {
            let (is, name) = (&gpu.model, &gpu.uuid);
            return Err(format!(
                "{name} is of type {is}, {old} was of type {model}; nothing was tried"
            ));
        }
        if gpu.free < *bytes && !options.force {
            let (free, bytes, name) = (Size(gpu.free), Size(*bytes), &gpu.uuid);
            return Err(format!(
                "{name} has {free} free, {bytes} are needed; nothing was tried"
            ));
        }
        is_elsewhere |= gpu.uuid != *old;
        match (uuid(old), uuid(&gpu.uuid)) {
            (Some(old), Some(new)) if pairs.iter().all(|pair: &[Uuid; 2]| pair[1] != new) => {
                pairs.push([old, new]);
            }
            (Some(_), Some(_)) => {
                return Err(format!(
                    "{} would stand for two devices: name them all by --gpu",
                    gpu.uuid
                ));
            }
            _ => return Err(format!("{old} or {} is not the UUID of a GPU", gpu.uuid)),
        }
    }
    Ok(if is_elsewhere { pairs } else { Vec::new() })
}

fn restore(driver: &Driver, process: &Process, places: &[[Uuid; 2]]) -> Result<(), Code> {
    let step = || driver.restore(process.number, places);
    shown(process, "being restored", step)
}

/// Does a step, and says every two seconds that it takes long.
fn shown<T: Send>(process: &Process, what: &str, step: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let (done, waits) = mpsc::channel::<()>();
        let begin = Instant::now();
        let tell = move || {
            while waits.recv_timeout(PROGRESS) == Err(RecvTimeoutError::Timeout) {
                let seconds = begin.elapsed().as_secs();
                note!("gantry-checkpoint: {process} is {what}, {seconds} s so far");
            }
        };
        // Without a thread, only the result is known.
        let _ = thread::Builder::new().spawn_scoped(scope, tell);
        let result = step();
        drop(done);
        result
    })
}

/// Programs whose suspension has begun.
struct Work<'a> {
    driver: &'a Driver,
    nvml: &'a Nvml,
    /// Whether unknown needs for memory are accepted.
    force: bool,
    journal: &'a Journal,
    items: Vec<Item>,
}

impl Work<'_> {
    /// Raises a program's limit and writes its entry.
    fn prepare(&mut self, need: &Need, before: &Inventory) -> Result<(), String> {
        let process = &need.process;
        let failed = |error: JournalError| format!("{process}: {}", base::Chain(&error));
        let in_the_way = |error| in_the_way(process, &error);
        // A call that was killed may have raised it.
        let known = self.journal.entry(process).map_err(failed)?;
        let known = known.and_then(|entry| entry.limit);
        let now = memory::limit_of(process).map_err(in_the_way)?;
        let bytes = |gpu: &Gpu| {
            let entries = gpu
                .processes
                .iter()
                .filter(|entry| entry.0 == process.number);
            entries
                .map(|entry| entry.1)
                .filter(|bytes| *bytes != UNKNOWN)
                .sum()
        };
        let gpus = before.gpus.iter().map(|gpu| Had {
            uuid: gpu.uuid.clone(),
            model: gpu.model.clone(),
            bytes: bytes(gpu),
        });
        let mut entry = Entry {
            gpus: gpus.collect(),
            limit: known.or(Some(now)),
            ..Entry::of(process)
        };
        let raised = self
            .journal
            .write(process, &entry)
            .map_err(failed)
            .and_then(|()| memory::raise_limit(process, need.bytes).map_err(in_the_way));
        let outcome = raised.and_then(|is_raised| {
            if is_raised || known.is_some() {
                return Ok(());
            }
            entry.limit = None;
            self.journal.write(process, &entry).map_err(failed)
        });
        self.items.push(Item {
            process: process.clone(),
            entry,
        });
        outcome
    }

    fn lock(&mut self, index: usize, limit: Duration) -> Result<(), String> {
        let (driver, process) = (self.driver, &self.items[index].process);
        if !process.is_alive() {
            return Err(format!("{process} has ended"));
        }
        let step = || driver.lock(process.number, limit);
        shown(process, "being locked", step).map_err(|code| {
            format!(
                "{process} stays: its calls did not end within {} s: {code}",
                limit.as_secs()
            )
        })
    }

    fn checkpoint(
        &mut self,
        index: usize,
        released: bool,
        out: &mut dyn Write,
    ) -> Result<(), String> {
        let begin = Instant::now();
        let nvml = self.nvml;
        let used = || -> Vec<u64> {
            let now = nvml.inventory().unwrap_or_default();
            now.gpus.iter().map(|gpu| gpu.used).collect()
        };
        let before = used();
        let item = &mut self.items[index];
        let (driver, process) = (self.driver, item.process.clone());
        let memory = memory::of(&process);
        let step = || driver.checkpoint(process.number);
        let outcome = shown(&process, "being suspended", step);
        // The function also succeeds for programs that it has done nothing with.
        match (outcome, driver.state(process.number)) {
            (_, Ok(State::Checkpointed)) => {}
            (Ok(()), _) => return Err(format!("{process} stays: the driver did not suspend it")),
            (Err(code), _) => return Err(format!("{process} stays: {code}")),
        }
        let seconds = begin.elapsed().as_secs_f64();
        // What it had on devices that list no processes is what they have more now. Others may have given memory back, too:
        // contents of this program have become its own memory.
        let moved = memory.zip(memory::of(&process)).map(|(before, after)| {
            let grown = before
                .into_iter()
                .zip(after)
                .map(|(before, after)| after.saturating_sub(before));
            grown.max().unwrap_or(0).saturating_add(BESIDE)
        });
        let after = used();
        let freed = before.iter().zip(&after).map(|(before, after)| {
            let freed = before.saturating_sub(*after);
            moved.map_or(freed, |moved| freed.min(moved))
        });
        for (gpu, freed) in item.entry.gpus.iter_mut().zip(freed) {
            gpu.bytes = gpu.bytes.max(freed);
        }
        let bytes = Size(item.entry.gpus.iter().map(|gpu| gpu.bytes).sum());
        self.journal
            .write(&process, &item.entry)
            .map_err(|error| base::Chain(&error).to_string())?;
        let files = match process.device_files() {
            Err(error) if released => {
                return Err(format!(
                    "{process} stays: it is not known which device files it has open: {error}"
                ));
            }
            files => files.unwrap_or_default(),
        };
        if let (Some(file), true) = (files.first(), released) {
            return Err(format!(
                "{process} stays: it still has {file} open, for example for NVML"
            ));
        }
        writeln!(out, "{process} suspended in {seconds:.1} s, {bytes}")
            .and_then(|()| out.flush())
            .map_err(|error| format!("cannot write the output: {error}"))?;
        if let Some(file) = files.first() {
            note!("gantry-checkpoint: {process} still has {file} open, for example for NVML");
        }
        Ok(())
    }

    /// Lets all programs go on, the last first.
    fn undo(mut self, reason: String) -> OperationError {
        let (mut staying, mut lost) = (Vec::new(), Vec::new());
        while let Some(mut item) = self.items.pop() {
            let undone = self.let_go_on(&mut item);
            let process = &item.process;
            let is_alive = process.is_alive();
            // Memory that takes the place of the device's stays as long as it is suspended.
            if let Some(limit) = item.entry.limit
                && !matches!(undone, Err(Unresumed::Stays(_)))
            {
                // It may have ended.
                let _ = memory::set_limit(process, limit);
            }
            let noted = match undone {
                Err(Unresumed::Stays(reason)) if is_alive => {
                    staying.push(format!("{process} {reason}"));
                    Ok(())
                }
                Err(Unresumed::Lost(reason)) if is_alive => {
                    lost.push(format!("{process}: {reason}"));
                    item.entry.is_lost = true;
                    self.journal.write(process, &item.entry)
                }
                // There is nothing to undo for one that has ended.
                _ => self.journal.remove(process),
            };
            if let Err(error) = noted {
                note!("gantry-checkpoint: {}", base::Chain(&error));
            }
        }
        match (lost.is_empty(), staying.is_empty()) {
            (true, true) => OperationError::Undone(reason),
            (false, true) => {
                lost.insert(0, reason);
                OperationError::Lost(lost)
            }
            (_, false) => OperationError::staying(vec![reason], staying, &lost),
        }
    }

    /// Lets a program go on. What a step that failed has done, only the driver knows.
    fn let_go_on(&self, item: &mut Item) -> Result<(), Unresumed> {
        let (process, driver) = (&item.process, self.driver);
        match driver.state(process.number) {
            Ok(State::Running) => return Ok(()),
            Ok(State::Locked) => {}
            Ok(State::Checkpointed) => {
                let options = Resumption {
                    force: self.force,
                    ..Resumption::default()
                };
                let places = match self.nvml.inventory() {
                    Ok(now) => places(&item.entry.gpus, &options, &now)
                        .map_err(|reason| Unresumed::Stays(format!("stays suspended: {reason}")))?,
                    Err(_) if self.force => Vec::new(),
                    Err(error) => {
                        return Err(Unresumed::Stays(format!("stays suspended: {error}")));
                    }
                };
                driver.start().map_err(not_started)?;
                item.entry.is_resuming = true;
                if let Err(error) = self.journal.write(process, &item.entry) {
                    note!("gantry-checkpoint: {process}: {}", base::Chain(&error));
                }
                restore(driver, process, &places)
                    .map_err(|code| Unresumed::Lost(code.to_string()))?;
            }
            Ok(State::Failed | State::Other(_)) => {
                let reason = "the driver has given it up: end it";
                return Err(Unresumed::Lost(reason.to_owned()));
            }
            Err(code) => {
                let reason = format!("stays: its state is not known: {code}");
                return Err(Unresumed::Stays(reason));
            }
        }
        driver.unlock(process.number).map_err(not_unlocked)
    }
}

fn in_the_way(process: &Process, error: &io::Error) -> String {
    format!(
        "{process}: its limit of data memory (ulimit -d) is in the way, and cannot be raised: {error}"
    )
}

fn not_started(code: Code) -> Unresumed {
    Unresumed::Stays(format!(
        "stays suspended: the driver does not start: cuInit answers {code}; nothing was tried"
    ))
}

fn not_unlocked(code: Code) -> Unresumed {
    Unresumed::Stays(format!("cannot be unlocked: {code}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "GPU-00000000-0000-0000-0000-00000000000a";
    const B: &str = "GPU-00000000-0000-0000-0000-00000000000b";
    const C: &str = "GPU-00000000-0000-0000-0000-00000000000c";

    fn now(gpus: &[(&str, u64)]) -> Inventory {
        let gpu = |(uuid, free): &(&str, u64)| Gpu {
            uuid: (*uuid).to_owned(),
            model: String::new(),
            free: *free,
            used: 0,
            processes: Vec::new(),
        };
        Inventory {
            version: String::new(),
            gpus: gpus.iter().map(gpu).collect(),
        }
    }

    fn wish(gpus: &[(&str, &str)], force: bool) -> Resumption {
        let gpus = gpus
            .iter()
            .map(|(old, new)| ((*old).to_owned(), (*new).to_owned()));
        Resumption {
            chosen: Chosen::All,
            gpus: gpus.collect(),
            force,
        }
    }

    fn saved(gpus: &[(&str, u64)]) -> Vec<Had> {
        let had = |(uuid, bytes): &(&str, u64)| Had {
            uuid: (*uuid).to_owned(),
            model: String::new(),
            bytes: *bytes,
        };
        gpus.iter().map(had).collect()
    }

    fn last(pairs: &[[Uuid; 2]]) -> Vec<[u8; 2]> {
        pairs.iter().map(|pair| pair.map(|uuid| uuid[15])).collect()
    }

    #[test]
    fn a_program_resumes_on_its_own_devices_in_any_order() {
        let found = places(
            &saved(&[(A, 5), (B, 0)]),
            &wish(&[], false),
            &now(&[(B, 0), (A, 5)]),
        );
        assert_eq!(found, Ok(vec![]));
    }

    #[test]
    fn devices_that_are_missing_are_replaced_by_position() {
        let found = places(
            &saved(&[(A, 5), (B, 0)]),
            &wish(&[], false),
            &now(&[(C, 5), (B, 0)]),
        );
        assert_eq!(last(&found.expect("there is room")), [[10, 12], [11, 11]]);
        let had = saved(&[(A, 5), (B, 0)]);
        let found = places(&had, &wish(&[], false), &now(&[(B, 9)]));
        let reason = found.expect_err("one is missing");
        assert!(
            reason.contains("there were 2 GPUs, and there are 1"),
            "{reason}"
        );
        let found = places(&had, &wish(&[(A, B)], false), &now(&[(B, 9)]));
        assert!(found.expect_err("two of one").contains("two devices"));
    }

    #[test]
    fn wished_devices_have_to_exist_and_to_have_room() {
        let gpus = now(&[(A, 0), (B, 4)]);
        let found = places(&saved(&[(A, 4)]), &wish(&[(A, B)], false), &gpus);
        assert_eq!(last(&found.expect("there is room")), [[10, 11]]);
        for (wish, text) in [
            (wish(&[(A, A)], false), "has 0 MiB free"),
            (wish(&[(A, C)], false), "there is no"),
            (wish(&[(C, A)], false), "there was no"),
        ] {
            let reason = places(&saved(&[(A, 4)]), &wish, &gpus).expect_err("it is refused");
            assert!(reason.contains(text), "{reason}");
        }
    }

    #[test]
    fn a_process_without_device_files_is_a_bystander() {
        let own = Process::find(std::process::id()).expect("it runs");
        assert!(is_bystander(&own));
        let start = own.start + 1;
        assert!(is_bystander(&Process { start, ..own }));
    }

    #[test]
    fn force_looks_for_no_device_memory_and_needs_no_nvml() {
        let (saved, gpus) = (saved(&[(A, 5)]), now(&[(A, 4)]));
        assert!(places(&saved, &wish(&[], false), &gpus).is_err());
        assert_eq!(places(&saved, &wish(&[], true), &gpus), Ok(vec![]));
        assert_eq!(places(&saved, &wish(&[], true), &now(&[])), Ok(vec![]));
        assert!(places(&saved, &wish(&[], false), &now(&[])).is_err());
    }

    #[test]
    fn drivers_that_are_known_to_fail_are_named() {
        assert!(known_to_fail("570.133.07").is_some());
        assert!(known_to_fail("610.57.04").is_some());
        assert!(known_to_fail("580.159.04").is_none());
    }
}
