//! Tests what a member sends to an arbiter, and when its job runs.

use std::{io::Write, os::fd::AsRawFd, sync::mpsc};

use remoting_turns::page::{Account, Grant, Page};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::{
    host_kernel::{HostKernel, Memory},
    *,
};

/// An arbiter that a test controls, with the pool that introduces the member to it.
struct Arbiter {
    pool: UnixStream,
    stream: UnixStream,
    grant: Page<Grant>,
    account: Page<Account>,
}

impl Arbiter {
    fn meet(pool: UnixStream) -> Self {
        use std::io::Read;
        (&pool).read_exact(&mut [0]).unwrap();
        let (stream, theirs) = UnixStream::pair().unwrap();
        let send = |to: &UnixStream, file: &dyn AsRawFd| {
            to.send_with_fd([0u8].as_slice(), file.as_raw_fd()).unwrap();
        };
        send(&pool, &theirs);
        let (grant, grant_file) = Page::create().unwrap();
        let (account, account_file) = Page::create().unwrap();
        send(&stream, &grant_file);
        send(&stream, &account_file);
        Self {
            pool,
            stream,
            grant,
            account,
        }
    }

    fn hear(&self) -> Word {
        use std::io::Read;
        let mut byte = [0];
        (&self.stream).read_exact(&mut byte).unwrap();
        Word::from_byte(byte[0]).unwrap()
    }

    fn give(&self, contended: bool) {
        self.grant
            .contended
            .store(contended.into(), Ordering::SeqCst);
        self.account.claim.store(claim::BUSY, Ordering::Relaxed);
        self.grant.turn.fetch_add(1, Ordering::Release);
        (&self.stream).write_all(&[0]).unwrap();
    }

    fn stop(&self) {
        let turn = self.grant.turn.load(Ordering::Relaxed) as u32;
        self.grant.stop.store(turn, Ordering::Release);
        (&self.stream).write_all(&[0]).unwrap();
    }

    fn claim(&self) -> u32 {
        self.account.claim.load(Ordering::Acquire)
    }
}

/// A member that runs this kernel. Receives whether it has succeeded.
fn start(mut kernel: HostKernel) -> (Arbiter, Arc<Memory>, mpsc::Receiver<bool>) {
    let (control, pool) = UnixStream::pair().unwrap();
    let memory = Arc::clone(&kernel.memory);
    let (ended, end) = mpsc::channel();
    thread::spawn(move || {
        let mut member = Member::with(control).unwrap();
        let _ = ended.send(member.run(&mut kernel).is_ok());
    });
    (Arbiter::meet(pool), memory, end)
}

fn steps(memory: &Memory) -> u64 {
    memory.done.load(Ordering::Relaxed)
}

fn wait_for_steps(memory: &Memory, more_than: u64) {
    while steps(memory) <= more_than {
        thread::yield_now();
    }
}

#[test]
fn a_job_runs_in_its_turns_alone_and_goes_on_where_it_was() {
    // The kernel finds the word by itself, or its process tells it.
    for reads in [true, false] {
        let (arbiter, memory, end) = start(HostKernel::new(u64::MAX, u64::MAX, reads));
        assert_eq!(arbiter.hear(), Word::Want);
        assert_eq!(steps(&memory), 0);
        let mut before = 0;
        for _ in 0..5 {
            arbiter.give(true);
            wait_for_steps(&memory, before + 10);
            arbiter.stop();
            assert_eq!(arbiter.hear(), Word::Again);
            assert_eq!(arbiter.claim(), claim::NONE);
            let after = steps(&memory);
            thread::sleep(Duration::from_millis(2));
            assert_eq!(steps(&memory), after, "it ran outside of its turn");
            before = after;
        }
        assert!(end.try_recv().is_err());
        assert!(arbiter.account.busy.load(Ordering::Relaxed) > 0);
        assert_eq!(arbiter.account.calls.load(Ordering::Relaxed), 5);
        assert_eq!(arbiter.account.running_since.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn a_job_that_waits_gives_its_turn_back_and_asks_again_when_something_has_come() {
    for reads in [true, false] {
        let (arbiter, memory, end) = start(HostKernel::new(300, 100, reads));
        assert_eq!(arbiter.hear(), Word::Want);
        arbiter.give(false);
        wait_for_steps(&memory, 99);
        // Alone, it keeps the device while it waits.
        thread::sleep(Duration::from_millis(2));
        assert_eq!(arbiter.claim(), claim::BUSY);
        arbiter.grant.contended.store(1, Ordering::SeqCst);
        assert_eq!(arbiter.hear(), Word::Done);
        memory.given.store(300, Ordering::Release);
        assert_eq!(arbiter.hear(), Word::Want);
        arbiter.give(true);
        assert_eq!(arbiter.hear(), Word::Done);
        assert!(end.recv().unwrap());
        assert_eq!(steps(&memory), 300);
    }
}

#[test]
fn an_arbiter_that_ends_stops_the_job_and_the_next_one_lets_it_go_on() {
    let (arbiter, memory, _end) = start(HostKernel::new(u64::MAX, u64::MAX, true));
    assert_eq!(arbiter.hear(), Word::Want);
    arbiter.give(false);
    wait_for_steps(&memory, 10);
    let Arbiter { pool, stream, .. } = arbiter;
    drop(stream);
    let next = Arbiter::meet(pool);
    assert_eq!(next.hear(), Word::Want);
    let before = steps(&memory);
    thread::sleep(Duration::from_millis(2));
    assert_eq!(steps(&memory), before, "it ran without a turn");
    next.give(false);
    wait_for_steps(&memory, before);
    assert!(
        next.account.calls.load(Ordering::Relaxed) <= 1,
        "it counts anew"
    );
}

#[test]
fn a_stop_that_was_for_an_earlier_turn_stops_nothing() {
    let (arbiter, memory, _end) = start(HostKernel::new(u64::MAX, u64::MAX, true));
    assert_eq!(arbiter.hear(), Word::Want);
    arbiter.give(true);
    wait_for_steps(&memory, 0);
    arbiter.stop();
    assert_eq!(arbiter.hear(), Word::Again);
    arbiter.give(true);
    let before = steps(&memory);
    wait_for_steps(&memory, before + 100);
    assert_eq!(arbiter.claim(), claim::BUSY);
}
