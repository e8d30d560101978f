//! Tests how the arbiter handles what workers report, with times that nobody waits for. The workers
//! are connections of this process, each with a process that does nothing.

use std::{
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    process::{Child, Command},
};

use remoting_turns::{
    message::{self, First, Join},
    page::{Grant, Page, claim, sight},
};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::{slicing::SETTLED, *};
use crate::policy::ledger::FIRST_SLICE;

const SECOND: Duration = Duration::from_secs(1);

struct Arranged {
    arbiter: Arbiter,
    /// Kept open, together with the processes, which are killed.
    workers: Vec<(UnixStream, Child)>,
    folder: PathBuf,
}

impl Drop for Arranged {
    fn drop(&mut self) {
        for (_, process) in &mut self.workers {
            process.kill().unwrap();
            process.wait().unwrap();
        }
        fs::remove_dir_all(&self.folder).unwrap();
    }
}

/// A connection that a pool has introduced for this process.
fn introduced(path: &Path, process: &Child) -> UnixStream {
    // SAFETY: no pointers; the child has not been reaped.
    let handle = unsafe { libc::syscall(libc::SYS_pidfd_open, process.id(), 0) };
    let stream = UnixStream::connect(path).unwrap();
    stream
        .send_with_fd([0u8].as_slice(), handle as i32)
        .unwrap();
    // SAFETY: opened above; a copy is on its way to the arbiter.
    unsafe { libc::close(handle as i32) };
    stream
}

/// Creates an arbiter with a limit of one second, and a worker for each name; their numbers are 1,
/// 2 ...
fn arrange(test: &str, names: &[&str]) -> Arranged {
    let folder = std::env::temp_dir().join(format!("gantry-{test}-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join("socket");
    let mut arranged = Arranged {
        arbiter: Arbiter::new(&path, Name::Fair, Some(SECOND)).unwrap(),
        workers: Vec::new(),
        folder,
    };
    for name in names {
        arranged.join(&path, name);
    }
    assert_eq!(arranged.arbiter.members.len(), names.len());
    arranged
}

impl Arranged {
    fn join(&mut self, path: &Path, name: &str) {
        let join = Join {
            name: name.to_owned(),
            weight: 1,
            latency: 0,
            sliced: false,
        };
        self.connect(path, &join.to_bytes());
    }

    /// Connects a worker that sends this first message.
    fn connect(&mut self, path: &Path, message: &[u8]) {
        let process = Command::new("sleep").arg("1000").spawn().unwrap();
        let mut stream = introduced(path, &process);
        stream.write_all(message).unwrap();
        self.workers.push((stream, process));
        self.take();
    }

    /// Accepts one connection, and reads what has arrived on all of them.
    fn take(&mut self) {
        self.arbiter.accept(true);
        // First the process handle, then the message.
        for _ in 0..2 {
            let mut polled: Vec<_> = self.arbiter.newcomers.iter().map(Newcomer::fd).collect();
            polled.retain(|fd| {
                let mut entry = [libc::pollfd {
                    fd: *fd,
                    events: libc::POLLIN,
                    revents: 0,
                }];
                poll::poll(&mut entry, Some(Duration::ZERO)).unwrap() > 0
            });
            self.arbiter.handshake(&polled);
        }
    }

    /// Makes a worker report since when its oldest request has been with the driver.
    fn runs_since(&self, worker: u64, since: Option<Moment>) {
        let account = self.arbiter.members[&worker].worker.account();
        let nanos = since.map_or(0, Moment::nanos);
        account.running_since.store(nanos, Ordering::Relaxed);
    }

    /// Makes a worker report for how long its requests have used the device after its turns.
    fn overruns(&self, worker: u64, time: Duration) {
        let account = self.arbiter.members[&worker].worker.account();
        let nanos = time.as_nanos() as u64;
        account.overrun.store(nanos, Ordering::Relaxed);
    }

    /// The page of grants that a worker received.
    fn pages(&mut self, worker: usize) -> fs::File {
        let stream = &self.workers[worker - 1].0;
        let (_, file) = stream.recv_with_fd(&mut [0]).unwrap();
        file.unwrap()
    }

    fn turn(&mut self, worker: u64) {
        self.arbiter.want(worker);
        self.arbiter.dispatch();
        assert_eq!(self.arbiter.turn.map(|turn| turn.member), Some(worker));
    }

    /// The workers that have been killed.
    fn killed(&self) -> Vec<u64> {
        let members = self.arbiter.members.iter();
        members
            .filter_map(|(id, member)| member.dying.then_some(*id))
            .collect()
    }
}

#[test]
fn who_waits_for_a_request_without_end_of_another_client_is_not_killed_for_it() {
    let mut arranged = arrange("behind", &["offender", "victim"]);
    let start = Moment::now();
    arranged.turn(1);
    arranged.runs_since(1, Some(start));
    arranged.arbiter.want(2);
    // It gives its turn back early, as if the request would end in a moment.
    arranged.arbiter.obey(1, Word::Again);
    arranged.arbiter.dispatch();
    assert_eq!(arranged.arbiter.turn.map(|turn| turn.member), Some(2));
    arranged.runs_since(2, Some(start + SECOND / 1000));
    for tick in 1..=150 {
        arranged.arbiter.enforce(start + TICK * tick);
    }
    assert_eq!(arranged.killed(), [1]);
    // A process may take its time to end. After that, the victim has its own second, and no more.
    let free = start + TICK * 150;
    arranged.arbiter.leave(1);
    arranged.arbiter.enforce(free + SECOND * 9 / 10);
    assert!(arranged.killed().is_empty());
    arranged.arbiter.enforce(free + SECOND * 11 / 10);
    assert_eq!(arranged.killed(), [2]);
}

#[test]
fn what_one_client_has_taken_of_anothers_turn_is_charged_to_one_of_them() {
    let mut arranged = arrange("late", &["late", "other"]);
    arranged.turn(1);
    arranged.arbiter.end_turn(false);
    arranged.turn(2);
    let now = Moment::now() + SECOND * 100;
    arranged.overruns(1, SECOND * 75);
    arranged.arbiter.charge(2, true, now);
    let time = |client| {
        let figures = arranged.arbiter.scheduler.figures(ClientId(client), now);
        figures.unwrap().device_time
    };
    assert_eq!(time(0), SECOND * 75);
    // Including the time that this test itself has taken since the turn began.
    assert!(
        (SECOND * 25..SECOND * 50).contains(&time(1)),
        "{:?}",
        time(1)
    );
}

#[test]
fn who_has_had_no_turn_takes_nothing_of_anothers() {
    let mut arranged = arrange("accomplice", &["idle", "holder"]);
    arranged.turn(2);
    let now = Moment::now() + SECOND * 100;
    arranged.overruns(1, SECOND * 75);
    arranged.arbiter.charge(2, true, now);
    let figures = arranged.arbiter.scheduler.figures(ClientId(1), now);
    assert!(figures.unwrap().device_time >= SECOND * 100);
}

#[test]
fn workers_that_blame_each_other_by_turns_do_not_keep_the_device() {
    let mut arranged = arrange("blame", &["one", "two", "waits"]);
    arranged.turn(2);
    arranged.arbiter.want(3);
    let start = Moment::now();
    let longest = 2 + arranged.workers.len() as u32;
    for tick in 0..longest * 100 {
        let now = start + SECOND / 100 * tick;
        // Before its own second is over, each reports that the other's request is older.
        let (older, younger) = if tick / 50 % 2 == 0 { (1, 2) } else { (2, 1) };
        arranged.runs_since(older, Some(now));
        arranged.runs_since(younger, Some(now + SECOND / 1000));
        arranged.arbiter.enforce(now);
    }
    assert!(arranged.killed().is_empty());
    arranged
        .arbiter
        .enforce(start + SECOND * longest + SECOND / 10);
    assert_eq!(arranged.killed(), [2]);
}

#[test]
fn who_cannot_be_accepted_does_not_keep_the_arbiter_busy() {
    let mut arranged = arrange("deaf", &[]);
    let _waits = UnixStream::connect(arranged.folder.join("socket")).unwrap();
    let arbiter = &mut arranged.arbiter;
    assert_eq!(arbiter.wait(None).unwrap(), [arbiter.listener.as_raw_fd()]);
    // A descriptor that cannot be accepted from, for whatever reason.
    let file = fs::File::open("/dev/null").unwrap();
    arbiter.readers = std::os::fd::OwnedFd::from(file).into();
    arbiter.show();
    assert!(arbiter.deaf.is_some());
    assert!(arbiter.wait(None).unwrap().is_empty());
}

#[test]
fn a_worker_of_another_build_is_told_of_which_one_the_arbiter_is() {
    // Its first message may be shorter than that of this build.
    for length in [16, 88, 200] {
        let mut arranged = arrange(&format!("version{length}"), &[]);
        let mut message = vec![1; length];
        message[..message::HELLO].copy_from_slice(&message::hello());
        message[8] += 1;
        let path = arranged.folder.join("socket");
        arranged.connect(&path, &message);
        assert!(arranged.arbiter.newcomers.is_empty());
        assert!(arranged.arbiter.members.is_empty());
        let mut said = [0; message::HELLO];
        arranged.workers[0].0.read_exact(&mut said).unwrap();
        assert_eq!(said, message::hello());
    }
}

#[test]
fn what_a_client_has_done_stays_when_one_of_its_workers_ends_and_its_memory_does_not() {
    let mut arranged = arrange("counts", &["client", "client"]);
    for worker in [1, 2] {
        let account = arranged.arbiter.members[&worker].worker.account();
        account.calls.store(10 * worker, Ordering::Relaxed);
        account.synchronous.store(worker, Ordering::Relaxed);
        account.memory.store(100 * worker, Ordering::Relaxed);
        for _ in 0..worker {
            account.waits.count(Duration::from_millis(worker));
        }
    }
    arranged.arbiter.leave(1);
    let status = arranged.arbiter.status(Moment::now());
    let client = &status.clients[0];
    let figures = (client.calls, client.synchronous_calls, client.memory);
    assert_eq!(figures, (30, 3, 200));
    assert_eq!(client.waits.count, 3);
    let longest = Duration::from_nanos(client.waits.longest);
    assert!(longest > Duration::from_millis(2) && longest < Duration::from_micros(2500));
}

#[test]
fn what_readers_have_seen_of_a_client_does_not_fall_and_is_no_more_than_it_can_have_had() {
    let mut arranged = arrange("falls", &["client"]);
    let start = Moment::now();
    arranged.turn(1);
    let now = Moment::now() + SECOND;
    let mut seen = |busy: Duration, calls| {
        let account = arranged.arbiter.members[&1].worker.account();
        let busy = busy.as_nanos() as u64;
        account.busy.store(busy, Ordering::Relaxed);
        account.calls.store(calls, Ordering::Relaxed);
        let status = arranged.arbiter.status(now);
        (status.clients[0].device_time, status.clients[0].calls)
    };
    let most = now.since(start).as_nanos() as u64;
    let (time, calls) = seen(SECOND * 3600, 9);
    assert!((SECOND.as_nanos() as u64..=most).contains(&time), "{time}");
    assert_eq!(calls, 9);
    assert_eq!(seen(Duration::ZERO, 2), (time, 9));
}

#[test]
fn nothing_is_looked_after_once_the_device_was_not_used_for_a_second() {
    let mut arranged = arrange("unused", &["client"]);
    let start = Moment::now();
    arranged.turn(1);
    let claims = |arranged: &Arranged, word| {
        let account = arranged.arbiter.members[&1].worker.account();
        account.claim.store(word, Ordering::SeqCst);
    };
    // In use, unused for a while, and in use again: it is still being checked.
    for (word, from) in [
        (claim::BUSY, 0),
        (claim::IDLE, 100),
        (claim::BUSY, 140),
        (claim::IDLE, 150),
    ] {
        claims(&arranged, word);
        for tick in from..from + 40 {
            arranged.arbiter.let_go(start + TICK * tick);
        }
        assert!(arranged.arbiter.is_used(), "the device was taken away");
    }
    arranged.arbiter.let_go(start + TICK * 150 + UNUSED);
    assert!(!arranged.arbiter.is_used());
    // The worker asks again.
    arranged.arbiter.obey(1, Word::Want);
    arranged.arbiter.dispatch();
    assert_eq!(arranged.arbiter.turn.map(|turn| turn.member), Some(1));
}

/// Makes a worker report that its client is between two batches of a millisecond each since
/// `since`, and is expected back.
fn pauses(arranged: &mut Arranged, worker: u64, since: Moment, expected: Duration) {
    let account = arranged.arbiter.members[&worker].worker.account();
    let nanos = expected.as_nanos() as u64;
    for (place, value) in [
        (&account.away_since, since.nanos()),
        (&account.away_within, nanos),
        (&account.away_usual, nanos / 2),
        (&account.batch, 1_000_000_000),
    ] {
        place.store(value, Ordering::Relaxed);
    }
    account.claim.store(claim::IDLE, Ordering::SeqCst);
    arranged.arbiter.obey(worker, Word::Pause);
}

#[test]
fn who_is_expected_back_keeps_its_turn_until_then_and_no_longer() {
    let mut arranged = arrange("pause", &["thinks", "waits"]);
    let has = |arranged: &Arranged| arranged.arbiter.turn.map(|turn| turn.member);
    arranged.turn(1);
    arranged.arbiter.want(2);
    arranged.arbiter.turn.as_mut().unwrap().due = Moment::now() + SECOND;
    pauses(&mut arranged, 1, Moment::now(), SECOND / 2000);
    assert_eq!(has(&arranged), Some(1));
    let until = arranged.arbiter.turn.unwrap().paused.unwrap();
    arranged.arbiter.end_pause(until);
    assert_eq!(has(&arranged), None);
    arranged.arbiter.dispatch();
    assert_eq!(has(&arranged), Some(2));
}

#[test]
fn a_pause_that_is_to_begin_in_the_future_is_not_waited_for() {
    let mut arranged = arrange("future", &["lies", "waits"]);
    arranged.turn(1);
    arranged.arbiter.want(2);
    arranged.arbiter.turn.as_mut().unwrap().due = Moment::now() + SECOND;
    pauses(&mut arranged, 1, Moment::now() + SECOND, SECOND / 2000);
    assert!(arranged.arbiter.turn.is_none());
}

#[test]
fn who_has_gone_on_keeps_its_turn_when_its_pause_is_over() {
    let mut arranged = arrange("on", &["thinks", "waits"]);
    arranged.turn(1);
    arranged.arbiter.want(2);
    arranged.arbiter.turn.as_mut().unwrap().due = Moment::now() + SECOND;
    pauses(&mut arranged, 1, Moment::now(), SECOND / 2000);
    let until = arranged.arbiter.turn.unwrap().paused.unwrap();
    let account = arranged.arbiter.members[&1].worker.account();
    account.claim.store(claim::BUSY, Ordering::SeqCst);
    arranged.arbiter.end_pause(until);
    let turn = arranged.arbiter.turn.unwrap();
    assert_eq!((turn.member, turn.paused.is_some()), (1, false));
}

#[test]
fn an_application_does_not_wait_for_another_ones_pause_of_the_same_client() {
    let mut arranged = arrange("siblings", &["client", "client"]);
    arranged.turn(1);
    arranged.arbiter.turn.as_mut().unwrap().due = Moment::now() + SECOND;
    arranged.arbiter.want(2);
    pauses(&mut arranged, 1, Moment::now(), SECOND / 200);
    arranged.arbiter.dispatch();
    assert_eq!(arranged.arbiter.turn.map(|turn| turn.member), Some(2));
}

#[test]
fn silent_newcomers_keep_others_out_for_no_longer_than_a_second() {
    let mut arranged = arrange("silent", &[]);
    let path = arranged.folder.join("socket");
    let silent: Vec<_> = (0..NEWCOMERS)
        .map(|_| {
            let stream = UnixStream::connect(&path).unwrap();
            arranged.take();
            stream
        })
        .collect();
    assert_eq!(arranged.arbiter.newcomers.len(), silent.len());
    // It is neither accepted nor dropped, and the arbiter sleeps until there is room.
    arranged.join(&path, "waits");
    assert!(arranged.arbiter.members.is_empty());
    assert!(arranged.arbiter.wait(None).unwrap().is_empty());
    arranged.arbiter.give_up(Moment::now());
    assert!(arranged.arbiter.newcomers.len() < NEWCOMERS);
    arranged.take();
    assert_eq!(arranged.arbiter.members.len(), 1);
}

#[test]
fn who_has_had_the_device_alone_for_long_has_a_moment_to_give_it_back() {
    let mut arranged = arrange("alone", &["long", "new"]);
    arranged.turn(1);
    let started = Moment::now();
    let due = Moment::from_nanos(started.nanos() - (SECOND * 5).as_nanos() as u64);
    arranged.arbiter.turn.as_mut().unwrap().due = due;
    arranged.runs_since(1, Some(started));
    arranged.arbiter.enforce(started);
    arranged.arbiter.want(2);
    arranged.arbiter.enforce(Moment::now());
    assert!(arranged.killed().is_empty());
    // It reports that its requests end, but does not give the device back.
    let late = Moment::now() + SECOND * 3;
    arranged.runs_since(1, Some(late));
    arranged.arbiter.enforce(late);
    assert_eq!(arranged.killed(), [1]);
}

#[test]
fn a_process_that_comes_twice_is_refused_and_goes_on_with_what_it_had() {
    let mut arranged = arrange("twice", &["client", "other"]);
    let path = arranged.folder.join("socket");
    let mut second = introduced(&path, &arranged.workers[0].1);
    second.set_read_timeout(Some(SECOND)).unwrap();
    arranged.take();
    assert_eq!(second.read(&mut [0]).unwrap(), 0);
    assert!(arranged.arbiter.newcomers.is_empty());
    assert_eq!(arranged.arbiter.members.len(), 2);
    assert!(arranged.killed().is_empty());
    arranged.turn(1);
}

#[test]
fn a_flood_of_connections_of_one_process_is_one_newcomer() {
    let mut arranged = arrange("flood", &[]);
    let path = arranged.folder.join("socket");
    let process = Command::new("sleep").arg("1000").spawn().unwrap();
    let mut streams = Vec::new();
    for _ in 0..NEWCOMERS * 2 {
        streams.push(introduced(&path, &process));
        arranged.take();
        assert_eq!(arranged.arbiter.newcomers.len(), 1);
    }
    // The last one counts.
    let mut last = streams.pop().unwrap();
    let join = Join {
        name: "client".to_owned(),
        weight: 1,
        latency: 0,
        sliced: false,
    };
    last.write_all(&join.to_bytes()).unwrap();
    arranged.workers.push((last, process));
    arranged.take();
    assert_eq!(arranged.arbiter.members.len(), 1);
    arranged.join(&path, "other");
    assert_eq!(arranged.arbiter.members.len(), 2);
}

#[test]
fn a_turn_that_is_over_while_others_wait_is_ended_by_one_word() {
    let mut arranged = arrange("stop", &["eater", "waits"]);
    let grant = Page::<Grant>::map(&arranged.pages(1), false).unwrap();
    let stop = || grant.stop.load(Ordering::Acquire);
    arranged.turn(1);
    let due = arranged.arbiter.turn.unwrap().due;
    // Alone, it continues for as long as it likes.
    arranged.arbiter.stop_overdue(due + SECOND);
    assert_eq!(stop(), 0);
    arranged.arbiter.want(2);
    let due = arranged.arbiter.turn.unwrap().due;
    arranged.arbiter.stop_overdue(due);
    assert_eq!(stop(), 1, "the turn has the number 1");
    assert!(!arranged.arbiter.is_to_stop(&arranged.arbiter.turn.unwrap()));
    // Its next turn has a different number.
    arranged.arbiter.obey(1, Word::Again);
    arranged.arbiter.dispatch();
    arranged.arbiter.obey(2, Word::Done);
    arranged.arbiter.dispatch();
    assert_eq!(grant.turn.load(Ordering::Relaxed), 2);
    assert_eq!(stop(), 1);
}

/// The second client has used so much that the first one is next for a while.
fn first_is_owed(arranged: &mut Arranged) {
    arranged.turn(1);
    arranged.arbiter.want(2);
    let other = arranged.arbiter.members[&2].vm;
    let scheduler = &mut arranged.arbiter.scheduler;
    scheduler.charge_late(other, SECOND, Moment::now() + SECOND);
}

#[test]
fn who_would_be_next_again_goes_on_without_a_stop_but_not_for_ever() {
    let mut arranged = arrange("prolonged", &["eater", "waits"]);
    let grant = Page::<Grant>::map(&arranged.pages(1), false).unwrap();
    let stop = || grant.stop.load(Ordering::Acquire);
    first_is_owed(&mut arranged);
    let length = arranged.arbiter.turn.unwrap().length;
    for prolonged in 1..=PROLONGED {
        let due = arranged.arbiter.turn.unwrap().due;
        arranged.arbiter.stop_overdue(due);
        assert_eq!(stop(), 0);
        assert_eq!(arranged.arbiter.turn.unwrap().due, due + length);
        let slice = Duration::from_nanos(grant.slice.load(Ordering::Relaxed));
        assert_eq!(slice, length * (prolonged + 1));
    }
    // Its client has paid for all of it.
    let vm = arranged.arbiter.members[&1].vm;
    let now = arranged.arbiter.turn.unwrap().due;
    let figures = arranged.arbiter.scheduler.figures(vm, now).unwrap();
    assert!(
        figures.device_time >= length * (PROLONGED - 1),
        "{figures:?}"
    );
    arranged.arbiter.stop_overdue(now);
    assert_eq!(stop(), 1);
}

#[test]
fn a_turn_is_not_prolonged_while_another_application_of_the_same_client_waits() {
    let mut arranged = arrange("prolonged-siblings", &["eater", "waits", "eater"]);
    let grant = Page::<Grant>::map(&arranged.pages(1), false).unwrap();
    first_is_owed(&mut arranged);
    arranged.arbiter.want(3);
    let due = arranged.arbiter.turn.unwrap().due;
    arranged.arbiter.stop_overdue(due);
    assert_eq!(grant.stop.load(Ordering::Acquire), 1);
}

#[test]
fn a_turn_for_one_request_is_not_stopped() {
    let mut arranged = arrange("whole", &["eater", "waits"]);
    arranged.arbiter.scheduler = Scheduler::new(Name::Fifo.make());
    for (id, vm) in &arranged.arbiter.vms {
        arranged
            .arbiter
            .scheduler
            .join(*id, vm.terms.weight, Moment::now());
    }
    arranged.turn(1);
    arranged.arbiter.want(2);
    let turn = arranged.arbiter.turn.unwrap();
    assert_eq!(turn.stop, Stop::Never);
    arranged.arbiter.stop_overdue(turn.due + SECOND);
    assert_eq!(arranged.arbiter.turn.unwrap().stop, Stop::Never);
}

/// An arbiter with the policy `ledger`, and workers of these weights, each of which has a context on one GPU.
fn arrange_slices(test: &str, weights: &[u32]) -> Arranged {
    let mut arranged = arrange(test, &[]);
    arranged.arbiter.policy = Name::Ledger;
    let path = arranged.folder.join("socket");
    for (index, weight) in weights.iter().enumerate() {
        let join = Join {
            name: index.to_string(),
            weight: *weight,
            latency: 0,
            sliced: true,
        };
        arranged.connect(&path, &join.to_bytes());
    }
    arranged.arbiter.share_by_slices(Moment::now());
    for member in arranged.arbiter.members.values() {
        member.worker.account().gpus.store(1, Ordering::Relaxed);
    }
    arranged
}

/// Has each worker report that it has had work all the time, and used the device for this part of 4 ms; those that are told
/// to stop do so.
fn report(arranged: &Arranged, uses: &[f64], now: Moment) {
    for (member, part) in arranged.arbiter.members.values().zip(uses) {
        let account = member.worker.account();
        let stopped = member.worker.is_told_to_stop();
        account.stopped.store(stopped.into(), Ordering::Relaxed);
        account.present_until.store(u64::MAX, Ordering::Relaxed);
        let since = &account.present_since;
        if since.load(Ordering::Relaxed) == 0 {
            since.store(now.nanos(), Ordering::Relaxed);
        }
        if !stopped {
            let used = (part * 4e6) as u64;
            account.measured.fetch_add(used, Ordering::Relaxed);
            account.completions.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[test]
fn all_share_by_slices_as_long_as_all_can() {
    let mut arranged = arrange_slices("sliced", &[1, 1]);
    assert!(arranged.arbiter.slicing.is_on());
    // Words from before the worker knew mean nothing.
    arranged.arbiter.obey(1, Word::Want);
    arranged.arbiter.dispatch();
    assert!(arranged.arbiter.turn.is_none());
    let path = arranged.folder.join("socket");
    arranged.join(&path, "cannot");
    arranged.arbiter.share_by_slices(Moment::now());
    assert!(!arranged.arbiter.slicing.is_on());
    let modes = |arranged: &Arranged| -> Vec<_> {
        let members = arranged.arbiter.members.values();
        members
            .map(|member| member.worker.mode().is_slices())
            .collect()
    };
    assert_eq!(modes(&arranged), [false; 3]);
    arranged.turn(1);
    arranged.arbiter.leave(3);
    // Not at once: another one may come.
    let now = Moment::now();
    arranged.arbiter.share_by_slices(now);
    assert!(!arranged.arbiter.slicing.is_on());
    let settled = arranged.arbiter.slicing.next().unwrap();
    assert_eq!(settled.since(now), SETTLED);
    arranged.arbiter.share_by_slices(settled);
    assert!(arranged.arbiter.slicing.is_on() && arranged.arbiter.turn.is_none());
}

#[test]
fn reports_are_read_as_often_while_one_of_two_is_away_for_a_moment() {
    let mut arranged = arrange_slices("gap", &[1, 1]);
    let begin = Moment::now() + SECOND;
    report(&arranged, &[0.5, 0.5], begin);
    let mut pause = |millis| {
        let now = begin + Duration::from_millis(millis);
        arranged.arbiter.share_by_slices(now);
        let pause = arranged.arbiter.slicing.next().unwrap().since(now);
        // The second one has no work from then on.
        let account = arranged.arbiter.members[&2].worker.account();
        let until = begin + Duration::from_millis(4);
        account
            .present_until
            .store(until.nanos(), Ordering::Relaxed);
        pause.as_millis()
    };
    assert_eq!([4, 6, 40, 80].map(&mut pause), [1, 1, 1, 20]);
}

#[test]
fn who_comes_and_goes_without_slices_makes_nobody_forget_debts() {
    let mut arranged = arrange_slices("toggles", &[1, 3]);
    let mut now = Moment::now();
    let mut share = |arranged: &mut Arranged, uses: &[f64], count| {
        for _ in 0..count {
            report(arranged, uses, now);
            now += Duration::from_millis(4);
            arranged.arbiter.share_by_slices(now);
        }
    };
    share(&mut arranged, &[0.5, 0.3], 50);
    let slices = |arranged: &Arranged| {
        [1, 2].map(|id| arranged.arbiter.members[&id].worker.time_slice().unwrap())
    };
    let before = slices(&arranged);
    assert!(before[0] < before[1] / 2, "{before:?}");
    let path = arranged.folder.join("socket");
    arranged.join(&path, "cannot");
    share(&mut arranged, &[0.0, 0.0], 1);
    assert!(!arranged.arbiter.slicing.is_on());
    arranged.arbiter.leave(3);
    share(&mut arranged, &[0.0, 0.0], 502);
    assert!(arranged.arbiter.slicing.is_on());
    let ledger = &arranged.arbiter.slicing.ledgers[&0];
    let vms = [1, 2].map(|id| arranged.arbiter.members[&id].vm);
    let after = vms.map(|vm| ledger.slice(vm).unwrap());
    assert!(after[0] < after[1] / 2, "{after:?}");
}

#[test]
fn who_overdraws_is_stopped_and_goes_on_when_the_owed_leaves() {
    let mut arranged = arrange_slices("overdrawn", &[1, 3]);
    let mut now = Moment::now();
    let told = |arranged: &Arranged| arranged.arbiter.members[&1].worker.is_told_to_stop();
    for _ in 0..200 {
        report(&arranged, &[0.5, 0.3], now);
        now += Duration::from_millis(4);
        arranged.arbiter.share_by_slices(now);
        if told(&arranged) {
            break;
        }
    }
    assert!(told(&arranged));
    let slices = [1, 2].map(|id| arranged.arbiter.members[&id].worker.time_slice());
    assert!(slices[0] < slices[1], "{slices:?}");
    arranged.arbiter.leave(2);
    arranged
        .arbiter
        .share_by_slices(now + Duration::from_millis(4));
    assert!(!told(&arranged));
}

#[test]
fn of_a_stopped_client_those_with_work_are_stopped() {
    let mut arranged = arrange_slices("many", &[1, 3]);
    let path = arranged.folder.join("socket");
    let join = Join {
        name: "0".to_owned(),
        weight: 1,
        latency: 0,
        sliced: true,
    };
    arranged.connect(&path, &join.to_bytes());
    arranged.connect(&path, &join.to_bytes());
    arranged.connect(&path, &join.to_bytes());
    // The last one is on another GPU.
    for (id, gpus) in [(3, 1), (4, 1), (5, 2)] {
        let account = arranged.arbiter.members[&id].worker.account();
        account.gpus.store(gpus, Ordering::Relaxed);
    }
    let mut now = Moment::now();
    let told = |arranged: &Arranged| {
        [1, 3, 4].map(|id| arranged.arbiter.members[&id].worker.is_told_to_stop())
    };
    let review = |arranged: &mut Arranged, uses: &[f64], now: &mut Moment| {
        report(arranged, uses, *now);
        let elsewhere = arranged.arbiter.members[&5].worker.account();
        elsewhere.present_since.store(1, Ordering::Relaxed);
        elsewhere.present_until.store(u64::MAX, Ordering::Relaxed);
        *now += Duration::from_millis(4);
        arranged.arbiter.share_by_slices(*now);
    };
    while told(&arranged) == [false; 3] {
        review(&mut arranged, &[0.5, 0.3], &mut now);
    }
    assert_eq!(told(&arranged), [true, false, false]);
    review(&mut arranged, &[0.5, 0.3], &mut now);
    assert_eq!(told(&arranged), [true, false, false]);
    // Work in turn by several workers is stopped, too.
    let ledger = &arranged.arbiter.slicing.ledgers[&0];
    assert!(ledger.is_stopped(arranged.arbiter.members[&1].vm));
    review(&mut arranged, &[0.5, 0.3, 0.5], &mut now);
    assert_eq!(told(&arranged), [true; 3]);
    // The next stop is one of those that had work lately.
    while told(&arranged) != [false; 3] {
        review(&mut arranged, &[0.0, 0.9], &mut now);
    }
    let account = arranged.arbiter.members[&3].worker.account();
    account.present_since.store(0, Ordering::Relaxed);
    account.present_until.store(0, Ordering::Relaxed);
    while told(&arranged) == [false; 3] {
        review(&mut arranged, &[0.9, 0.3], &mut now);
    }
    assert_eq!(told(&arranged), [true, true, false]);
}

#[test]
fn who_is_seen_by_the_record_alone_is_owed_for_as_long_as_it_has_work() {
    let mut arranged = arrange_slices("unseen", &[1, 3]);
    let account = arranged.arbiter.members[&2].worker.account();
    account.sight.store(sight::RECORD, Ordering::Relaxed);
    let mut now = Moment::now();
    let (mut stops, mut before) = (0, false);
    for _ in 0..2000 {
        report(&arranged, &[0.5, 0.3], now);
        // It says nothing about requests.
        let account = arranged.arbiter.members[&2].worker.account();
        account.completions.store(0, Ordering::Relaxed);
        now += Duration::from_millis(4);
        arranged.arbiter.share_by_slices(now);
        let told = arranged.arbiter.members[&1].worker.is_told_to_stop();
        stops += u32::from(told && !before);
        before = told;
    }
    assert!(stops > 3, "{stops} stops for it in 8 s");
    // How long a round of the others is tells it what its waits are.
    let round = |arranged: &mut Arranged| {
        // Before that come the bytes and pages of the introduction.
        let grant = arranged.pages(2);
        let grant: Page<Grant> = Page::map(&grant, false).unwrap();
        grant.round.load(Ordering::Relaxed)
    };
    let slice = arranged.arbiter.members[&1].worker.time_slice().unwrap();
    let round = round(&mut arranged);
    let round = Duration::from_micros(round.into());
    assert!(round.abs_diff(slice) < slice / 10, "{round:?} {slice:?}");
}

#[test]
fn what_native_contexts_use_is_charged_from_the_first_record_on() {
    let mut arranged = arrange_slices("first", &[1, 1]);
    let start = Moment::now();
    let at = |millis: u64| start + Duration::from_millis(millis);
    let account = arranged.arbiter.members[&1].worker.account();
    account.sight.store(sight::RECORD, Ordering::Relaxed);
    account
        .present_since
        .store(start.nanos(), Ordering::Relaxed);
    account.present_until.store(u64::MAX, Ordering::Relaxed);
    arranged.arbiter.read_reports(at(1));
    let account = arranged.arbiter.members[&1].worker.account();
    account.metered.store(20_000_000, Ordering::Relaxed);
    account.is_metered.store(1, Ordering::Relaxed);
    let news = arranged.arbiter.read_reports(at(41));
    assert_eq!(news[0].report.used, Duration::from_millis(20));
}

#[test]
fn what_native_contexts_report_late_is_charged_whether_they_still_have_work_or_not() {
    let mut arranged = arrange_slices("late-record", &[1, 1]);
    let start = Moment::now();
    let at = |millis: u64| start + Duration::from_millis(millis);
    let account = arranged.arbiter.members[&1].worker.account();
    account.sight.store(sight::RECORD, Ordering::Relaxed);
    arranged.arbiter.read_reports(at(0));
    // A tenth of what it has used is known as time with work.
    let account = arranged.arbiter.members[&1].worker.account();
    account.present.store(100_000_000, Ordering::Relaxed);
    account.metered.store(1_000_000_000, Ordering::Relaxed);
    account.is_metered.store(1, Ordering::Relaxed);
    let used = |time: u64, arranged: &mut Arranged| {
        let used = arranged.arbiter.read_reports(at(time))[0].report.used;
        // No more than others could have been kept from the device.
        assert!(used <= Duration::from_millis(100), "{used:?}");
        used
    };
    let charged = (1..=200).map(|review| used(4 * review, &mut arranged));
    let charged = charged.sum::<Duration>();
    assert!(charged >= Duration::from_millis(890), "{charged:?}");
    let charged = charged
        + (201..=400)
            .map(|review| used(4 * review, &mut arranged))
            .sum::<Duration>();
    assert_eq!(charged, Duration::from_millis(1000));
}

#[test]
fn native_contexts_beside_turns_are_shown_as_such_and_hold_up_nobody() {
    let mut arranged = arrange_slices("beside", &[1, 1]);
    let account = arranged.arbiter.members[&2].worker.account();
    account.sight.store(sight::RECORD, Ordering::Relaxed);
    let beside = |arranged: &mut Arranged| {
        let clients = arranged.arbiter.status(Moment::now()).clients;
        clients
            .iter()
            .map(|client| client.beside)
            .collect::<Vec<_>>()
    };
    assert_eq!(beside(&mut arranged), [false, false]);
    let path = arranged.folder.join("socket");
    arranged.join(&path, "opencl");
    arranged.arbiter.share_by_slices(Moment::now());
    assert!(!arranged.arbiter.slicing.is_on());
    assert_eq!(beside(&mut arranged), [false, true, false]);
    for worker in [1, 3] {
        arranged.turn(worker);
        arranged.arbiter.end_turn(false);
    }
    // It takes no part where all else do, either, if its use cannot be read.
    arranged.arbiter.leave(3);
    let now = Moment::now();
    arranged.arbiter.share_by_slices(now);
    arranged.arbiter.share_by_slices(now + SETTLED);
    assert_eq!(beside(&mut arranged), [false, false, false]);
    let account = arranged.arbiter.members[&2].worker.account();
    account.sight.store(sight::NOTHING, Ordering::Relaxed);
    assert_eq!(beside(&mut arranged), [false, true, false]);
}

#[test]
fn clients_on_different_gpus_do_not_disturb_each_other() {
    let mut arranged = arrange_slices("gpus", &[1, 3]);
    let account = arranged.arbiter.members[&2].worker.account();
    account.gpus.store(2, Ordering::Relaxed);
    let mut now = Moment::now();
    for _ in 0..200 {
        report(&arranged, &[1.0, 1.0], now);
        now += Duration::from_millis(20);
        arranged.arbiter.share_by_slices(now);
    }
    for member in arranged.arbiter.members.values() {
        let slice = member.worker.time_slice().unwrap();
        assert!(slice.abs_diff(FIRST_SLICE) < FIRST_SLICE / 10, "{slice:?}");
        assert!(!member.worker.is_told_to_stop());
    }
}

#[test]
fn who_does_not_stop_is_ended() {
    let mut arranged = arrange_slices("disobeys", &[1, 3]);
    let mut now = Moment::now();
    for _ in 0..2000 {
        report(&arranged, &[0.5, 0.3], now);
        let account = arranged.arbiter.members[&1].worker.account();
        account.stopped.store(0, Ordering::Relaxed);
        account.measured.fetch_add(2_000_000, Ordering::Relaxed);
        now += Duration::from_millis(4);
        arranged.arbiter.share_by_slices(now);
    }
    assert_eq!(arranged.killed(), [1]);
}

#[test]
fn a_first_worker_that_cannot_set_its_slices_takes_turns() {
    let mut arranged = arrange("first", &[]);
    arranged.arbiter.policy = Name::Ledger;
    arranged.arbiter.share_by_slices(Moment::now());
    let path = arranged.folder.join("socket");
    arranged.join(&path, "cannot");
    arranged.arbiter.share_by_slices(Moment::now());
    assert!(!arranged.arbiter.members[&1].worker.mode().is_slices());
}

#[test]
fn a_turn_that_nobody_uses_ends_when_slices_begin() {
    let mut arranged = arrange_slices("parked", &[1]);
    let path = arranged.folder.join("socket");
    arranged.join(&path, "cannot");
    arranged.arbiter.share_by_slices(Moment::now());
    arranged.turn(1);
    let claim = |arranged: &Arranged| {
        let account = arranged.arbiter.members[&1].worker.account();
        account.claim.load(Ordering::Relaxed)
    };
    let account = arranged.arbiter.members[&1].worker.account();
    account.claim.store(claim::IDLE, Ordering::Relaxed);
    let before = arranged.arbiter.members[&1].worker.mode();
    arranged.arbiter.leave(2);
    let now = Moment::now();
    arranged.arbiter.share_by_slices(now);
    arranged.arbiter.share_by_slices(now + SETTLED);
    assert_eq!(claim(&arranged), claim::NONE);
    // Back to turns at once: the worker sees that there was a change.
    arranged.join(&path, "cannot either");
    arranged.arbiter.share_by_slices(Moment::now());
    let after = arranged.arbiter.members[&1].worker.mode();
    assert!(!after.is_slices() && after != before);
    assert!(arranged.arbiter.turn.is_none());
}

#[test]
fn a_worker_on_several_gpus_has_all_take_turns() {
    let mut arranged = arrange_slices("both", &[1, 3]);
    let account = arranged.arbiter.members[&2].worker.account();
    account.gpus.store(3, Ordering::Relaxed);
    arranged.arbiter.share_by_slices(Moment::now());
    assert!(!arranged.arbiter.slicing.is_on());
}

#[test]
fn a_newcomer_that_takes_turns_and_asks_at_once_gets_one() {
    let mut arranged = arrange_slices("asks", &[1]);
    let process = Command::new("sleep").arg("1000").spawn().unwrap();
    let mut stream = introduced(&arranged.folder.join("socket"), &process);
    let join = Join {
        name: "cannot".to_owned(),
        weight: 1,
        latency: 0,
        sliced: false,
    };
    let mut said = join.to_bytes().to_vec();
    said.push(Word::Want as u8);
    stream.write_all(&said).unwrap();
    arranged.workers.push((stream, process));
    for _ in 0..20 {
        arranged
            .arbiter
            .step(Some(Duration::from_millis(1)))
            .unwrap();
    }
    assert!(arranged.arbiter.turn.is_some_and(|turn| turn.member == 2));
}

#[test]
fn what_was_used_before_slices_is_not_of_their_time() {
    let mut arranged = arrange_slices("before", &[1, 1]);
    for member in arranged.arbiter.members.values() {
        let account = member.worker.account();
        account.present.store(3_600_000_000_000, Ordering::Relaxed);
    }
    let mut now = Moment::now();
    for _ in 0..3 {
        now += Duration::from_millis(4);
        arranged.arbiter.share_by_slices(now);
    }
    for vm in arranged.arbiter.vms.values() {
        assert!(vm.delayed < Duration::from_secs(1), "{:?}", vm.delayed);
    }
}

#[test]
fn what_runs_when_turns_begin_is_limited_as_what_is_left_of_a_turn() {
    let mut arranged = arrange_slices("left", &[1, 1]);
    let path = arranged.folder.join("socket");
    arranged.join(&path, "cannot");
    let before = Moment::now();
    arranged.arbiter.share_by_slices(before);
    let member = &arranged.arbiter.members[&1];
    assert!(member.over.is_some() && member.behind >= before);
}

/// What a pool has been answered; `None` if nothing yet.
fn answered(mut stream: &UnixStream) -> Option<u8> {
    stream.set_nonblocking(true).unwrap();
    let mut byte = [0];
    stream.read_exact(&mut byte).ok().map(|()| byte[0])
}

#[test]
fn one_pool_at_a_time_tries_and_what_works_is_known_to_the_others() {
    let mut arranged = arrange("trials", &[]);
    let path = arranged.folder.join("socket");
    let trial = |device: &str| First::Trial(device.to_owned()).to_bytes();
    // Turns need no trial.
    arranged.connect(&path, &trial("one"));
    assert_eq!(answered(&arranged.workers[0].0), Some(b'n'));
    arranged.arbiter.policy = Name::Ledger;
    for device in ["one", "one", "one", "one", "two"] {
        arranged.connect(&path, &trial(device));
    }
    assert!(arranged.arbiter.members.is_empty());
    let step = |arranged: &mut Arranged, now| {
        let fds = arranged.arbiter.trials.fds();
        let mut polled: Vec<_> = fds
            .map(|fd| libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            })
            .collect();
        poll::poll(&mut polled, Some(Duration::ZERO)).unwrap();
        polled.retain(|entry| entry.revents != 0);
        let ready: Vec<i32> = polled.into_iter().map(|entry| entry.fd).collect();
        arranged.arbiter.trials.step(&ready, now);
    };
    let answers = |arranged: &Arranged| -> Vec<Option<u8>> {
        let pools = arranged.workers[1..].iter();
        pools.map(|(stream, _)| answered(stream)).collect()
    };
    let now = Moment::now();
    step(&mut arranged, now);
    assert_eq!(answers(&arranged), [Some(b't'), None, None, None, None]);
    step(&mut arranged, now + remoting_turns::trial::LONGEST / 2);
    assert_eq!(answers(&arranged), [None; 5]);
    // What does not work is tried by the next one.
    (&arranged.workers[1].0).write_all(b"f").unwrap();
    step(&mut arranged, now);
    assert_eq!(answers(&arranged), [None, Some(b't'), None, None, None]);
    // One that lasts too long is not waited for, and what it says then counts no more.
    let now = now + remoting_turns::trial::LONGEST;
    step(&mut arranged, now);
    assert_eq!(answers(&arranged), [None, None, Some(b't'), None, None]);
    let _ = (&arranged.workers[2].0).write_all(b"w");
    step(&mut arranged, now);
    assert_eq!(answers(&arranged), [None; 5]);
    // One that ends leaves the trial to the next.
    let (pool, _) = &arranged.workers[3];
    pool.shutdown(std::net::Shutdown::Both).unwrap();
    step(&mut arranged, now);
    assert_eq!(answers(&arranged)[3..], [Some(b't'), None]);
    (&arranged.workers[4].0).write_all(b"w").unwrap();
    arranged.connect(&path, &trial("one"));
    step(&mut arranged, now);
    // Another device is tried, too.
    assert_eq!(answers(&arranged)[4..], [Some(b't'), None]);
    (&arranged.workers[5].0).write_all(b"f").unwrap();
    step(&mut arranged, now);
    assert_eq!(answers(&arranged)[5..], [Some(b'k')]);
    assert_eq!(arranged.arbiter.trials.fds().count(), 0);
}

#[test]
fn a_pool_is_answered_by_the_step_that_reads_what_it_asks() {
    use remoting_turns::trial::{Answer, ask};

    let mut arranged = arrange("trial-step", &[]);
    arranged.arbiter.policy = Name::Ledger;
    let path = arranged.folder.join("socket");
    let pool = std::thread::spawn(move || {
        let (answer, turn) = ask(&path, "one").unwrap();
        assert_eq!(answer, Answer::Try);
        turn.end(true).unwrap();
        ask(&path, "one").unwrap().0
    });
    while !pool.is_finished() {
        let patience = Some(Duration::from_millis(10));
        arranged.arbiter.step(patience).unwrap();
    }
    assert_eq!(pool.join().unwrap(), Answer::Known);
}

#[test]
fn a_weight_changes_while_its_client_runs_and_stays_whatever_pools_say() {
    let mut arranged = arrange_slices("weight", &[1, 1]);
    let path = arranged.folder.join("socket");
    let ask = |arranged: &mut Arranged, name: &str, weight| {
        let client = Join {
            name: name.to_owned(),
            weight,
            latency: 0,
            sliced: false,
        };
        arranged.connect(&path, &First::Weight(client).to_bytes());
        answered(&arranged.workers.last().unwrap().0)
    };
    assert_eq!(ask(&mut arranged, "nobody", 3), Some(weight::UNKNOWN));
    assert_eq!(ask(&mut arranged, "0", 10_001), None);
    assert_eq!(ask(&mut arranged, "0", 3), Some(weight::CHANGED));
    let mut now = Moment::now();
    for _ in 0..200 {
        report(&arranged, &[0.5, 0.5], now);
        now += Duration::from_millis(4);
        arranged.arbiter.share_by_slices(now);
    }
    let slices = [1, 2].map(|id| arranged.arbiter.members[&id].worker.time_slice().unwrap());
    assert!(slices[0] > slices[1], "{slices:?}");
    // The next worker's pool still says 1.
    arranged.arbiter.leave(1);
    let path = arranged.folder.join("socket");
    arranged.join(&path, "0");
    let clients = arranged.arbiter.status(Moment::now()).clients;
    let of = |name: &str| {
        clients
            .iter()
            .find(|client| client.name == name)
            .unwrap()
            .weight
    };
    assert_eq!((of("0"), of("1")), (3, 1));
}

#[test]
fn who_becomes_idle_is_stopped_for_as_long_as_others_have_work() {
    let mut arranged = arrange_slices("idle", &[1, 1]);
    let path = arranged.folder.join("socket");
    let ask = |arranged: &mut Arranged, first: First| {
        arranged.connect(&path, &first.to_bytes());
        answered(&arranged.workers.last().unwrap().0)
    };
    let client = |weight, latency| Join {
        name: "0".to_owned(),
        weight,
        latency,
        sliced: false,
    };
    let idle = First::Weight(client(message::IDLE, 0));
    assert_eq!(ask(&mut arranged, idle.clone()), Some(weight::CHANGED));
    // It cannot have both.
    let latency = |millis| First::Latency(client(1, millis));
    assert_eq!(ask(&mut arranged, latency(2)), None);
    assert_eq!(arranged.arbiter.status(Moment::now()).clients[0].weight, 0);
    let mut now = Moment::now();
    let share = |arranged: &mut Arranged, now: &mut Moment, count| {
        for _ in 0..count {
            report(arranged, &[1.0, 0.3], *now);
            *now += Duration::from_millis(4);
            arranged.arbiter.share_by_slices(*now);
        }
    };
    let told = |arranged: &Arranged| arranged.arbiter.members[&1].worker.is_told_to_stop();
    // Reviews are seldom until two have work.
    share(&mut arranged, &mut now, 30);
    assert!(told(&arranged));
    for _ in 0..100 {
        share(&mut arranged, &mut now, 5);
        assert!(told(&arranged), "it runs although another one has work");
    }
    arranged.arbiter.leave(2);
    now += Duration::from_secs(1);
    arranged.arbiter.share_by_slices(now);
    assert!(!told(&arranged));
    let weight = First::Weight(client(3, 0));
    assert_eq!(ask(&mut arranged, weight), Some(weight::CHANGED));
    assert_eq!(ask(&mut arranged, latency(2)), Some(weight::CHANGED));
    let status = arranged.arbiter.status(Moment::now());
    assert_eq!(
        (status.clients[0].weight, status.clients[0].latency),
        (3, 2)
    );
    assert_eq!(ask(&mut arranged, latency(1001)), None);
    // Calls of native contexts wait for the end of stops.
    let account = arranged.arbiter.members[&1].worker.account();
    account.sight.store(sight::RECORD, Ordering::Relaxed);
    assert_eq!(ask(&mut arranged, idle), None);
}
