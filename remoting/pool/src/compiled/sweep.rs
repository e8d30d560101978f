//! Keeps what drivers have compiled within limits, and workers' own folders as well.
//!
//! Nobody is asked before something is written: drivers write files. So the pool looks once a
//! second, while somebody is served, whether the file system has got fuller (one system call), and
//! only then through the folders. A unit with more than its limit loses the entries that were used
//! least recently; those of the last minute stay, as somebody may be building them. A unit with
//! more than twice its limit has something hostile in it: its workers end, and nothing stays.
//!
//! Other pools of the same user may sweep the same units. What another pool's worker uses is left
//! to that one.

use std::{
    cmp::Reverse,
    collections::{HashMap, HashSet},
    ffi::CString,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant, SystemTime},
};

use base::Unpoisoned;
use rustix::{
    fs::{CWD, Dir, FlockOperation, Mode, OFlags, flock, fstat, openat, statvfs},
    net::{Shutdown, shutdown},
};

use super::{
    owner,
    tree::{self, Entry, LEAST, Search, TooMuch, Trash},
};

/// How many folders an entry lies in below its unit: the owner's, the driver's, and the one by
/// which drivers keep folders small.
const LEVELS: usize = 3;
/// How many times a unit's limit all units of one payer may have together.
pub const UNITS: u64 = 8;
/// What was used within so many seconds may be in use.
const FRESH: i64 = 60;
/// What nobody has used for so many seconds goes: a month.
const STALE: i64 = 30 * 24 * 3600;
/// How often it is seen whether there is more than before.
const PERIOD: Duration = Duration::from_secs(1);
/// How long folders are not looked through at most while somebody is served.
const LONGEST: Duration = Duration::from_secs(60);
/// The folder in that of the pool where what is removed is on its way.
const TRASH: &str = "trash";
/// Looking through folders takes this part of a processor's time at most.
const PART: u32 = 16;
/// Bytes that a worker's own folder may have: for linkers, headers, and drivers' caches if nothing
/// is kept.
pub const OWN: u64 = 1 << 30;

/// Which of a unit's entries go, if any; `None`: all, and at once.
fn to_go(entries: &[Entry], limit: u64, now: i64) -> Option<Vec<usize>> {
    let total = |entries: &[Entry]| {
        let sum = |sum: u64, entry: &Entry| sum.saturating_add(entry.charge);
        entries.iter().fold(0, sum)
    };
    let mut total = total(entries);
    if total > limit.saturating_mul(2) {
        return None;
    }
    let mut going = Vec::new();
    if total <= limit {
        return Some(going);
    }
    let mut order: Vec<_> = (0..entries.len()).collect();
    order.sort_by_key(|&index| (entries[index].used, Reverse(entries[index].charge)));
    // Somewhat more than necessary, so that it is not necessary again at once.
    let wanted = limit / 8 * 7;
    for index in order {
        let entry = &entries[index];
        // What says that it is used in the future is not believed for long.
        if total <= wanted || (now - FRESH..=now + FRESH).contains(&entry.used) {
            continue;
        }
        total = total.saturating_sub(entry.charge);
        going.push(index);
    }
    Some(going)
}

/// A unit as far as all units together are concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Unit {
    name: String,
    used: i64,
    charge: u64,
}

/// Which units go, so that each payer's are within its limit and none is left that nobody uses any
/// more. Those that are served stay.
fn units_to_go(
    mut units: Vec<Unit>,
    served: &HashSet<String>,
    limit: u64,
    now: i64,
) -> Vec<String> {
    let mut totals: HashMap<String, u64> = HashMap::new();
    for unit in &units {
        let total = totals
            .entry(owner::payer(&unit.name).to_owned())
            .or_default();
        *total = total.saturating_add(unit.charge);
    }
    units.sort_by_key(|unit| unit.used);
    let mut going = Vec::new();
    for unit in units {
        let Some(total) = totals.get_mut(owner::payer(&unit.name)) else {
            continue;
        };
        let in_use = served.contains(&unit.name) || (now - FRESH..=now).contains(&unit.used);
        let too_much = *total > limit.saturating_mul(UNITS) || unit.used < now - STALE;
        if too_much && !in_use {
            *total = total.saturating_sub(unit.charge);
            going.push(unit.name);
        }
    }
    going
}

/// A worker that serves.
#[derive(Debug)]
struct Served {
    number: u64,
    /// Its own folder.
    folder: PathBuf,
    /// Its owner's unit, if it uses one.
    unit: Option<String>,
    /// The connection to its application. Who shuts it down ends the worker.
    connection: Arc<OwnedFd>,
}

#[derive(Debug, Default)]
struct State {
    served: Vec<Served>,
    /// Whether one has come or gone since this was last looked at.
    changed: bool,
}

/// What the pool tells the thread that sweeps.
#[derive(Clone, Debug, Default)]
pub struct Sweeper(Arc<(Mutex<State>, Condvar)>);

impl Sweeper {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.0.lock_unpoisoned()
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Served>)) {
        let mut state = self.lock();
        change(&mut state.served);
        state.changed = true;
        drop(state);
        self.0.1.notify_one();
    }

    /// A worker serves somebody.
    pub fn serves(&self, number: u64, folder: &Path, connection: &Arc<OwnedFd>) {
        let connection = Arc::clone(connection);
        let folder = folder.to_owned();
        self.change(|served| {
            served.push(Served {
                number,
                folder,
                unit: None,
                connection,
            });
        });
    }

    /// A worker uses a unit.
    pub fn uses(&self, number: u64, unit: String) {
        self.change(|served| {
            if let Some(served) = served.iter_mut().find(|served| served.number == number) {
                served.unit = Some(unit);
            }
        });
    }

    /// A worker has ended.
    pub fn ended(&self, number: u64) {
        self.change(|served| served.retain(|served| served.number != number));
    }

    /// Starts the thread. `all` has a folder for each unit, whose limit it is, if anything is kept;
    /// `pool` is the folder of the pool, on the same file system.
    pub fn start(&self, all: Option<(PathBuf, u64)>, pool: &Path) -> io::Result<()> {
        let mut sweep = Sweep {
            all,
            trash: Trash::create(&pool.join(TRASH))?,
            pool: pool.to_owned(),
            before: None,
        };
        let sweeper = self.clone();
        let thread = thread::Builder::new().name("sweep".to_owned());
        thread.spawn(move || sweeper.run(&mut sweep)).map(drop)
    }

    fn run(&self, sweep: &mut Sweep) {
        sweep.sweep(self);
        let mut last = Instant::now();
        let mut pause = PERIOD;
        loop {
            let mut state = self.lock();
            while state.served.is_empty() && !state.changed {
                let waited = self.0.1.wait(state);
                state = waited.unwrap_or_else(PoisonError::into_inner);
            }
            state.changed = false;
            drop(state);
            // Also after one that has ended: there may be others before it is looked again.
            thread::sleep(pause);
            if sweep.fuller() || last.elapsed() >= LONGEST {
                let start = Instant::now();
                sweep.sweep(self);
                last = Instant::now();
                pause = PERIOD.max((last - start) * PART);
            }
        }
    }

    fn served_units(&self) -> HashSet<String> {
        let state = self.lock();
        let units = state.served.iter().filter_map(|served| served.unit.clone());
        units.collect()
    }

    /// Ends the workers that this is true of, by ending their applications' connections.
    fn end(&self, which: impl Fn(&Served) -> bool) {
        for served in self.lock().served.iter().filter(|served| which(served)) {
            // One that has ended meanwhile is as well.
            let _ = shutdown(&served.connection, Shutdown::Both);
        }
    }
}

/// The thread's own.
struct Sweep {
    all: Option<(PathBuf, u64)>,
    pool: PathBuf,
    trash: Trash,
    /// How full the file system was: free blocks, and free files.
    before: Option<(u64, u64)>,
}

impl Sweep {
    /// Whether the file system has got fuller by something that counts. One system call.
    fn fuller(&mut self) -> bool {
        let limit = self.all.as_ref().map_or(OWN, |(_, limit)| *limit);
        let Ok(now) = statvfs(&self.pool) else {
            return true;
        };
        let now = (now.f_bfree.saturating_mul(now.f_frsize), now.f_ffree);
        let Some(before) = self.before else {
            return true;
        };
        if now.0 + limit / 32 < before.0 || now.1 + limit / 32 / LEAST < before.1 {
            return true;
        }
        // What has become free is not there to be taken unseen.
        self.before = Some((before.0.max(now.0), before.1.max(now.1)));
        false
    }

    fn sweep(&mut self, sweeper: &Sweeper) {
        self.own_folders(sweeper);
        if let Some((all, limit)) = self.all.clone() {
            let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let swept = openat(CWD, &all, flags, Mode::empty())
                .map_err(io::Error::from)
                .and_then(|opened| self.units(&opened, limit, sweeper));
            if let Err(error) = swept {
                base::note!(
                    "gantry-accel: cannot look through {}, which may grow: {error}",
                    all.display()
                );
            }
        }
        if let Err(error) = self.trash.empty() {
            base::note!(
                "gantry-accel: cannot remove what was thrown away from {}: {error}",
                self.pool.join(TRASH).display()
            );
        }
        self.before = statvfs(&self.pool)
            .ok()
            .map(|now| (now.f_bfree.saturating_mul(now.f_frsize), now.f_ffree));
    }

    /// Ends workers whose own folders have got too large.
    fn own_folders(&self, sweeper: &Sweeper) {
        let folders: Vec<_> = {
            let state = sweeper.lock();
            let each = state.served.iter();
            each.map(|served| (served.number, served.folder.clone()))
                .collect()
        };
        for (number, folder) in folders {
            let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let Ok(opened) = openat(CWD, &folder, flags, Mode::empty()) else {
                continue;
            };
            let total = Search::total(opened, OWN / LEAST);
            if total.is_ok_and(|(bytes, _)| bytes <= OWN) {
                continue;
            }
            base::note!(
                "gantry-accel: a worker has written more than {} MiB to its own folder, and ends",
                OWN >> 20
            );
            sweeper.end(|served| served.number == number);
        }
    }

    /// Brings all units within their limits.
    fn units(&mut self, all: &OwnedFd, limit: u64, sweeper: &Sweeper) -> io::Result<()> {
        let now = now();
        let mut units = Vec::new();
        for entry in Dir::read_from(all)?.filter_map(Result::ok) {
            let name = entry.file_name().to_owned();
            let Some(text) = name.to_str().ok().filter(|name| owner::is_unit(name)) else {
                continue;
            };
            match self.unit(all, &name, text, limit, now, sweeper) {
                Ok(unit) => units.extend(unit),
                Err(error) => {
                    base::note!(
                        "gantry-accel: cannot look through the programs of {text}: {error}"
                    );
                }
            }
        }
        for text in units_to_go(units, &sweeper.served_units(), limit, now) {
            // It is plain, and has no zero in it.
            let name = CString::new(text.as_str()).unwrap_or_default();
            // One that is not there any more needs no removing.
            let Ok(opened) = tree::open(all, &name) else {
                continue;
            };
            // Held until the unit has no name any more, by which a worker would find it.
            if !free(&opened) {
                continue;
            }
            match self.trash.take(all, &[name]) {
                Ok(()) => base::note!(
                    "gantry-accel: the compiled programs of {text}, used least recently, are gone"
                ),
                // The others go nevertheless.
                Err(error) => base::note!(
                    "gantry-accel: cannot remove the compiled programs of {text}: {error}"
                ),
            }
        }
        Ok(())
    }

    /// Brings a unit within its limit. What is left of it.
    fn unit(
        &mut self,
        all: &OwnedFd,
        name: &CString,
        text: &str,
        limit: u64,
        now: i64,
        sweeper: &Sweeper,
    ) -> io::Result<Option<Unit>> {
        let opened = tree::open(all, name)?;
        let touched = fstat(&opened)?.st_mtime;
        // Twice as much as may be there, in pieces as small as they are charged for.
        let most = limit.saturating_mul(2) / LEAST;
        let entries = Search::entries(&opened, LEVELS, most);
        let going = match &entries {
            Ok(entries) => to_go(entries, limit, now),
            Err(TooMuch) => None,
        };
        let (Some(going), Ok(entries)) = (going, entries) else {
            let ours = sweeper.served_units().contains(text);
            if !ours && !free(&opened) {
                return Ok(None);
            }
            base::note!(
                "gantry-accel: the compiled programs of {text} have more than twice the {} MiB that \
                 they may: they are gone, and the workers that use them end",
                limit >> 20
            );
            sweeper.end(|served| served.unit.as_deref() == Some(text));
            self.trash.take(all, std::slice::from_ref(name))?;
            return Ok(None);
        };
        let total = |entries: &[Entry]| entries.iter().map(|entry| entry.charge).sum::<u64>();
        let used = entries.iter().map(|entry| entry.used.min(now)).max();
        let mut unit = Unit {
            name: text.to_owned(),
            used: used.unwrap_or(0).max(touched),
            charge: total(&entries),
        };
        if !going.is_empty() {
            base::note!(
                "gantry-accel: the compiled programs of {text} have {} MiB: {} of {} that were used \
                 least recently are gone",
                unit.charge >> 20,
                going.len(),
                entries.len()
            );
        }
        for index in going {
            let entry = &entries[index];
            // What is not there any more needs no removing.
            if self.trash.take(&opened, &entry.path).is_ok() {
                unit.charge = unit.charge.saturating_sub(entry.charge);
            }
        }
        Ok(Some(unit))
    }
}

/// Whether no worker of any pool uses a unit, and none begins to as long as the unit is open.
fn free(unit: &OwnedFd) -> bool {
    let locked = flock(unit, FlockOperation::NonBlockingLockExclusive);
    // Where there are no locks, nobody has one.
    locked != Err(rustix::io::Errno::WOULDBLOCK)
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs() as i64)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
#[path = "sweep_tests.rs"]
mod tests;
