//! Measures how far apart processors are, to place virtual machines and their workers.
//!
//! A call and its answer cross from one processor to another and back. The time depends on the caches and sockets
//! between the two, which a virtual machine's topology often does not tell, so it is measured.

use std::{
    io,
    mem::{size_of, zeroed},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

/// Round trips per measurement, and measurements per pair, of which the shortest counts.
const ROUNDS: u32 = 500;
const TRIES: u32 = 5;
/// Number of passes over all pairs, of which the longest time counts. A host that migrates vCPUs places two of them on
/// one core for a moment, in changing pairs; only the lasting distance matters.
const PASSES: u32 = 2;

/// The processors that this thread may run on.
pub fn processors() -> io::Result<Vec<usize>> {
    // SAFETY: every bit pattern is a set of processors, and the kernel fills in at most its size.
    let set = unsafe {
        let mut set: libc::cpu_set_t = zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) != 0 {
            return Err(io::Error::last_os_error());
        }
        set
    };
    let count = libc::CPU_SETSIZE as usize;
    // SAFETY: below the set's size.
    Ok((0..count)
        .filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) })
        .collect())
}

/// Pins this thread to a processor.
fn pin(cpu: usize) -> io::Result<()> {
    // SAFETY: as above; `cpu` is one of those that `processors` found.
    unsafe {
        let mut set: libc::cpu_set_t = zeroed();
        libc::CPU_SET(cpu, &mut set);
        if libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// A word with cache lines of its own.
#[repr(align(128))]
#[derive(Default)]
struct Word(AtomicU32);

impl Word {
    fn wait_for(&self, value: u32) {
        while self.0.load(Ordering::Acquire) != value {
            std::hint::spin_loop();
        }
    }

    fn set(&self, value: u32) {
        self.0.store(value, Ordering::Release);
    }
}

/// The time of a word's round trip between two processors.
pub fn round_trip(one: usize, other: usize) -> io::Result<Duration> {
    let (there, back) = (Word::default(), Word::default());
    let total = ROUNDS * TRIES;
    thread::scope(|scope| {
        let echo = thread::Builder::new().spawn_scoped(scope, || {
            let pinned = pin(other);
            // A thread that could not be pinned answers too: the other one waits.
            for round in 1..=total {
                there.wait_for(round);
                back.set(round);
            }
            pinned
        })?;
        let pinned = pin(one);
        let mut shortest = Duration::MAX;
        for attempt in 0..TRIES {
            let start = Instant::now();
            for round in 1..=ROUNDS {
                there.set(attempt * ROUNDS + round);
                back.wait_for(attempt * ROUNDS + round);
            }
            shortest = shortest.min(start.elapsed() / ROUNDS);
        }
        match echo.join() {
            Ok(echoed) => pinned.and(echoed).map(|()| shortest),
            Err(_) => Err(io::ErrorKind::Other.into()),
        }
    })
}

/// The lasting round-trip times between each two of these processors: a symmetric table with zeros on its diagonal.
/// Takes some milliseconds per pair. `progress` gets the number of completed measurements and their total.
pub fn distances(
    cpus: &[usize],
    mut progress: impl FnMut(usize, usize) + Send,
) -> io::Result<Vec<Vec<Duration>>> {
    let mut table = vec![vec![Duration::ZERO; cpus.len()]; cpus.len()];
    let all = cpus.len() * cpus.len().saturating_sub(1) / 2 * PASSES as usize;
    let mut done = 0;
    thread::scope(|scope| {
        // In a thread of its own: the caller's thread is not moved.
        let measured = thread::Builder::new().spawn_scoped(scope, || {
            for _ in 0..PASSES {
                for one in 0..cpus.len() {
                    for other in one + 1..cpus.len() {
                        let time = round_trip(cpus[one], cpus[other])?.max(table[one][other]);
                        table[one][other] = time;
                        table[other][one] = time;
                        done += 1;
                        progress(done, all);
                    }
                }
            }
            Ok(table)
        })?;
        measured
            .join()
            .unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    })
}

/// Indices of `size` processors that are near each other. For each processor, considers the group of its nearest ones;
/// returns the group whose maximum distance is smallest.
pub fn nearest(table: &[Vec<Duration>], size: usize) -> Vec<usize> {
    let group = |one: usize| {
        let mut others: Vec<usize> = (0..table.len()).collect();
        others.sort_by_key(|&other| table[one][other]);
        others.truncate(size);
        others.sort_unstable();
        others
    };
    let widest = |group: &Vec<usize>| {
        let pairs = group
            .iter()
            .flat_map(|&one| group.iter().map(move |&other| (one, other)));
        pairs.map(|(one, other)| table[one][other]).max()
    };
    (0..table.len())
        .map(group)
        .min_by_key(widest)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_are_of_one_cluster() {
        // Two clusters: even and odd processors.
        let time = |one: usize, other: usize| match (one == other, one % 2 == other % 2) {
            (true, _) => Duration::ZERO,
            (false, true) => Duration::from_nanos(100 + (one + other) as u64),
            (false, false) => Duration::from_nanos(500),
        };
        let table: Vec<Vec<_>> = (0..8)
            .map(|one| (0..8).map(|other| time(one, other)).collect())
            .collect();
        assert_eq!(nearest(&table, 4), [0, 2, 4, 6]);
        assert_eq!(nearest(&table, 2), [0, 2]);
        assert_eq!(nearest(&table, 99).len(), 8);
        assert!(nearest(&[], 4).is_empty());
    }

    #[test]
    fn a_round_trip_takes_time_on_each_machine() {
        let cpus = processors().unwrap();
        assert!(!cpus.is_empty());
        let mut seen = Vec::new();
        let table = distances(&cpus[..cpus.len().min(2)], |done, all| {
            seen.push((done, all))
        });
        let table = table.unwrap();
        assert!(table.len() < 2 || table[0][1] > Duration::ZERO);
        assert!(table.len() < 2 || seen == [(1, 2), (2, 2)]);
    }
}
