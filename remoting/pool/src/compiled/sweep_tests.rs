use std::{
    fs::{create_dir_all, read_dir, write},
    os::unix::{fs::symlink, net::UnixStream},
};

use proptest::prelude::*;
use rustix::fs::{AtFlags, FileType, Timespec, Timestamps, mknodat, utimensat};

use super::{
    super::{make, owner::Owner},
    *,
};

const LIMIT: u64 = 1 << 20;

fn entry(used: i64, charge: u64) -> Entry {
    Entry {
        path: Vec::new(),
        used,
        charge,
    }
}

proptest! {
    #[test]
    fn what_stays_is_within_the_limit_or_fresh_and_was_used_later_than_what_goes(
        entries in prop::collection::vec((0..2000i64, 0..LIMIT / 8), 0..40),
    ) {
        let entries: Vec<_> = entries.into_iter().map(|(used, charge)| entry(used, charge)).collect();
        let now = 1500;
        let total: u64 = entries.iter().map(|entry| entry.charge).sum();
        let Some(going) = to_go(&entries, LIMIT, now) else {
            prop_assert!(total > 2 * LIMIT);
            return Ok(());
        };
        prop_assert!(total <= 2 * LIMIT);
        prop_assert!(total > LIMIT || going.is_empty());
        let fresh = |entry: &Entry| (now - FRESH..=now + FRESH).contains(&entry.used);
        let stays = |index: &usize| !going.contains(index);
        let left: Vec<_> = (0..entries.len()).filter(stays).map(|index| &entries[index]).collect();
        prop_assert!(going.iter().all(|&index| !fresh(&entries[index])));
        let sum: u64 = left.iter().map(|entry| entry.charge).sum();
        let old = left.iter().filter(|entry| !fresh(entry));
        let first = old.clone().map(|entry| entry.used).min();
        prop_assert!(sum <= LIMIT || first.is_none());
        let last = going.iter().map(|&index| entries[index].used).max();
        prop_assert!(first.is_none() || last.is_none() || last <= first);
    }
}

#[test]
fn units_go_that_nobody_uses_and_of_a_payer_with_too_much_the_oldest() {
    let now = 100 * 24 * 3600;
    let unit = |name: &str, age: i64, part: u64| Unit {
        name: name.to_owned(),
        used: now - age,
        charge: LIMIT / part,
    };
    let mut units = vec![
        unit("user-1", 31 * 24 * 3600, 1),
        unit("user-2", 31 * 24 * 3600, 1),
        unit("user-3", 29 * 24 * 3600, 1),
    ];
    for number in 0..UNITS + 2 {
        units.push(unit(&format!("vm-4-{number}"), 1000 + number as i64, 1));
    }
    let served = HashSet::from(["user-2".to_owned(), format!("vm-4-{}", UNITS + 1)]);
    let going = units_to_go(units, &served, LIMIT, now);
    // The two oldest of user 4, of which one is served.
    let next = [format!("vm-4-{UNITS}"), format!("vm-4-{}", UNITS - 1)];
    assert_eq!(
        going,
        ["user-1".to_owned(), next[0].clone(), next[1].clone()]
    );
}

/// A pool's folder, and all units', below a folder that goes at the end.
struct Scratch {
    path: PathBuf,
    sweep: Sweep,
    sweeper: Sweeper,
}

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("gantry-sweep-{name}-{}", std::process::id()));
        let _ = tree::remove(&path);
        let (pool, all) = (path.join("pool"), path.join("all"));
        create_dir_all(&pool).unwrap();
        create_dir_all(&all).unwrap();
        let sweep = Sweep {
            all: Some((all, LIMIT)),
            trash: Trash::create(&pool.join("trash")).unwrap(),
            pool,
            before: None,
        };
        Self {
            path,
            sweep,
            sweeper: Sweeper::default(),
        }
    }

    fn unit(&self, name: &str) -> PathBuf {
        let unit = self.path.join("all").join(name);
        create_dir_all(unit.join("own/pocl")).unwrap();
        unit
    }

    /// A program of a driver's, last used so many seconds ago.
    fn program(&self, unit: &Path, name: &str, bytes: usize, age: i64) -> PathBuf {
        let folder = unit.join("own/pocl").join(&name[..2]).join(&name[2..]);
        create_dir_all(folder.join("kernel")).unwrap();
        let file = folder.join("kernel/kernel.so");
        write(&file, vec![1; bytes]).unwrap();
        self.age(&file, age);
        self.age(&folder.join("kernel"), age);
        self.age(&folder, age);
        folder
    }

    fn age(&self, path: &Path, age: i64) {
        let time = Timespec {
            tv_sec: now() - age,
            tv_nsec: 0,
        };
        let times = Timestamps {
            last_access: time,
            last_modification: time,
        };
        utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
    }

    /// A worker of a unit; the application's end of its connection.
    fn worker(&self, number: u64, unit: &str) -> UnixStream {
        let (here, there) = UnixStream::pair().unwrap();
        let folder = self.path.join(format!("pool/{number}"));
        create_dir_all(&folder).unwrap();
        self.sweeper
            .serves(number, &folder, &Arc::new(there.into()));
        self.sweeper.uses(number, unit.to_owned());
        here.set_nonblocking(true).unwrap();
        here
    }

    fn sweep(&mut self) {
        self.sweep.sweep(&self.sweeper);
        assert_eq!(read_dir(self.path.join("pool/trash")).unwrap().count(), 0);
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = tree::remove(&self.path);
    }
}

fn ended(application: &UnixStream) -> bool {
    use std::io::Read;
    matches!((&mut &*application).read(&mut [0]), Ok(0))
}

#[test]
fn programs_used_least_recently_go_whole_and_others_stay() {
    let mut scratch = Scratch::new("least");
    let unit = scratch.unit("user-1");
    let old = scratch.program(&unit, "AAold", 400 << 10, 5000);
    let older = scratch.program(&unit, "AAolder", 300 << 10, 9000);
    let used = scratch.program(&unit, "BBused", 400 << 10, 4000);
    let other = scratch.program(&scratch.unit("user-2"), "AAold", 400 << 10, 8000);
    scratch.sweep();
    assert!(!older.exists() && old.exists() && used.exists() && other.exists());
    // What is in use stays even if it is too much.
    scratch.age(&used.join("kernel/kernel.so"), 0);
    let new = scratch.program(&unit, "CCnew", 700 << 10, 0);
    scratch.sweep();
    assert!(!old.exists() && used.exists() && new.exists());
}

#[test]
fn who_writes_far_too_much_loses_it_and_its_workers_and_nobody_else_does() {
    let mut scratch = Scratch::new("much");
    let good = scratch.unit("user-1");
    let kept = scratch.program(&good, "AAkept", 100, 5000);
    let neighbour = scratch.worker(1, "user-1");
    for (number, name) in ["user-2", "user-3", "user-4"].into_iter().enumerate() {
        let application = scratch.worker(2 + number as u64, name);
        let unit = scratch.unit(name);
        let own = unit.join("own");
        match name {
            // One file, and nobody but its writer knows of the limit.
            "user-2" => write(own.join("huge"), vec![1; 2 * LIMIT as usize + 1]).unwrap(),
            // Empty files.
            "user-3" => {
                for number in 0..2 * LIMIT / LEAST {
                    write(own.join(number.to_string()), "").unwrap();
                }
            }
            // Folders in each other.
            _ => create_dir_all(own.join("d/".repeat(100))).unwrap(),
        }
        scratch.sweep();
        assert!(ended(&application), "{name}");
        assert!(!unit.exists(), "{name}");
    }
    assert!(!ended(&neighbour) && kept.exists());
}

#[test]
fn links_and_pipes_in_a_unit_lead_nowhere_and_go_with_it() {
    let mut scratch = Scratch::new("odd");
    let outside = scratch.path.join("outside");
    create_dir_all(&outside).unwrap();
    write(outside.join("precious"), vec![1; 4 * LIMIT as usize]).unwrap();
    let unit = scratch.unit("user-1");
    symlink(&outside, unit.join("own/nv")).unwrap();
    symlink("/", unit.join("root")).unwrap();
    symlink(&outside, scratch.path.join("all/user-5")).unwrap();
    let pipe = unit.join("own/pocl/AA");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR, 0).unwrap();
    for name in ["own/nv", "root", "own/pocl/AA"] {
        scratch.age(&unit.join(name), 7000);
    }
    scratch.sweep();
    assert!(pipe.exists());
    // Over the limit they go first.
    scratch.program(&unit, "BBsome", LIMIT as usize, 100);
    scratch.sweep();
    assert!(!pipe.exists() && unit.join("root").symlink_metadata().is_err());
    assert!(outside.join("precious").exists());
}

#[test]
fn a_workers_own_folder_is_no_way_around_the_limit() {
    let mut scratch = Scratch::new("own");
    let application = scratch.worker(1, "user-1");
    let folder = scratch.path.join("pool/1");
    create_dir_all(folder.join("d/".repeat(100))).unwrap();
    scratch.sweep();
    assert!(ended(&application));
    let application = scratch.worker(2, "user-1");
    scratch.sweep();
    assert!(!ended(&application));
}

#[test]
fn folders_are_looked_through_when_the_file_system_has_got_fuller() {
    let mut scratch = Scratch::new("fuller");
    assert!(scratch.sweep.fuller(), "nobody knows what is there");
    scratch.sweep.before = Some((u64::MAX, u64::MAX));
    assert!(scratch.sweep.fuller());
    scratch.sweep.before = Some((0, 0));
    assert!(!scratch.sweep.fuller());
}

#[test]
fn what_another_pools_worker_uses_is_left_to_that_pool() {
    const OLD: i64 = 2 * STALE;
    let mut scratch = Scratch::new("others");
    let all = scratch.path.join("all");
    let used = [1, 2].map(|user| make(&all, &Owner::User(user).directory()).unwrap());
    let units = ["user-1", "user-2"].map(|name| scratch.unit(name));
    scratch.program(&units[0], "AAold", 100, OLD);
    // Of this one there is far too much.
    scratch.program(&units[1], "AAhuge", 3 * LIMIT as usize, OLD);
    for unit in &units {
        for part in ["own/pocl/AA", "own/pocl", "own/nv", "own", ""] {
            scratch.age(&unit.join(part), OLD);
        }
    }
    scratch.sweep();
    assert!(units.iter().all(|unit| unit.exists()));
    drop(used);
    scratch.sweep();
    assert!(!units.iter().any(|unit| unit.exists()));
}
