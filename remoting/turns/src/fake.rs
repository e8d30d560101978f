//! An arbiter, and the pool that introduces a worker to it, which do what a test says.

use std::{
    io::{ErrorKind, Read, Write},
    os::{fd::AsRawFd, unix::net::UnixStream},
    sync::atomic::Ordering,
};

use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::{
    Moment,
    message::{self, JOIN, Join, Word},
    page::{Account, Grant, Page, claim},
};

/// Whom the worker says that it works for.
pub fn join() -> Join {
    Join {
        name: "test".to_owned(),
        weight: 1,
        latency: 0,
        sliced: false,
    }
}

/// Hears for whom a worker works, which it says to its pool before all else.
pub fn belongs(mut pool: &UnixStream) {
    let mut bytes = [0; JOIN];
    pool.read_exact(&mut bytes).unwrap();
    assert_eq!(Join::from_bytes(&bytes), Ok(join()));
}

/// Gets a worker a connection.
fn connect(mut pool: &UnixStream) -> UnixStream {
    pool.read_exact(&mut [0]).unwrap();
    let (arbiter, theirs) = UnixStream::pair().unwrap();
    (&theirs).write_all(&join().to_bytes()).unwrap();
    pool.send_with_fd([0u8].as_slice(), theirs.as_raw_fd())
        .unwrap();
    arbiter
}

/// Gets a worker a connection, and reads whose it is.
fn introduce(pool: &UnixStream) -> UnixStream {
    let arbiter = connect(pool);
    let mut bytes = [0; JOIN];
    (&arbiter).read_exact(&mut bytes).unwrap();
    assert_eq!(Join::from_bytes(&bytes), Ok(join()));
    arbiter
}

/// Both, connected with one worker.
pub struct Fake {
    pool: UnixStream,
    arbiter: UnixStream,
    grant: Page<Grant>,
    /// What the worker says of itself.
    pub account: Page<Account>,
}

impl Fake {
    /// A pool's socket to a worker that has begun to take part by the other end of it.
    pub fn meet(pool: UnixStream) -> Self {
        let arbiter = introduce(&pool);
        let (grant, grant_file) = Page::create().unwrap();
        let (account, account_file) = Page::create().unwrap();
        for file in [&grant_file, &account_file] {
            arbiter
                .send_with_fd([0u8].as_slice(), file.as_raw_fd())
                .unwrap();
        }
        arbiter.set_nonblocking(true).unwrap();
        Self {
            pool,
            arbiter,
            grant,
            account,
        }
    }

    /// The same with a worker that can set its time slices, which it says to its pool before all else.
    pub fn meet_sliced(mut pool: UnixStream) -> Self {
        let mut bytes = [0; JOIN];
        pool.read_exact(&mut bytes).unwrap();
        let sliced = Join {
            sliced: true,
            ..join()
        };
        assert_eq!(Join::from_bytes(&bytes), Ok(sliced));
        Self::meet(pool)
    }

    /// An arbiter of this version, which is not the worker's, to a worker that has begun to take part
    /// by the other end of the pool's socket.
    pub fn of_another_build(pool: &UnixStream, version: u32) {
        let arbiter = introduce(pool);
        let mut hello = message::hello();
        hello[8..].copy_from_slice(&version.to_le_bytes());
        (&arbiter).write_all(&hello).unwrap();
    }

    /// An arbiter that ends, or hangs up on a worker that has begun to take part by the other end of the
    /// pool's socket, whose first message it has read or has not.
    pub fn that_hangs_up(pool: &UnixStream, reads: bool) {
        drop(match reads {
            true => introduce(pool),
            false => connect(pool),
        });
    }

    /// Another arbiter in the place of this one, which ends.
    pub fn replace(self) -> Self {
        let Self { pool, arbiter, .. } = self;
        drop(arbiter);
        Self::meet(pool)
    }

    /// What the worker says next, if it has said it.
    pub fn heard(&self) -> Option<Word> {
        let mut byte = [0];
        match (&self.arbiter).read_exact(&mut byte) {
            Ok(()) => Word::from_byte(byte[0]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            Err(error) => panic!("the worker is gone: {error}"),
        }
    }

    /// Has the device serve workers in time slices, or by turns.
    pub fn share_by_slices(&self, slices: bool) {
        let mode = self.grant.mode();
        if mode.is_slices() != slices {
            self.grant.mode.store(mode.next().0, Ordering::Release);
        }
        Word::Want.say(&self.arbiter).unwrap();
    }

    /// Has the worker stopped until then.
    pub fn stop_until(&self, until: Moment) {
        self.grant
            .stopped_until
            .store(until.nanos(), Ordering::Release);
        Word::Want.say(&self.arbiter).unwrap();
    }

    /// Has the next turns begin with waking the client, or not.
    pub fn coschedule(&self, wakes: bool) {
        self.grant.coschedule.store(wakes.into(), Ordering::Relaxed);
    }

    /// Gives the worker a turn of so many nanoseconds, for one request if there are none;
    /// `contended` says whether somebody else waits.
    pub fn give(&self, slice: u64, contended: bool) {
        self.grant.slice.store(slice, Ordering::Relaxed);
        self.grant
            .contended
            .store(contended.into(), Ordering::Relaxed);
        self.account.claim.store(claim::BUSY, Ordering::Relaxed);
        self.grant.turn.fetch_add(1, Ordering::Release);
        Word::Want.say(&self.arbiter).unwrap();
    }
}
