//! Pools that try the device's time slices, one after the other: two would measure each other.

use std::{
    collections::{BTreeSet, VecDeque},
    io::{ErrorKind, Write},
    os::fd::{AsRawFd, RawFd},
};

use remoting_transport::closer::Connection;
use remoting_turns::trial::{Answer, LONGEST, WORK};

use crate::Moment;

/// Maximum number of pools that wait, and of devices of which something is known.
const MOST: usize = 256;

/// A pool that has asked whether to try.
#[derive(Debug)]
struct Pool {
    stream: Connection,
    device: String,
}

impl Pool {
    /// Answers. There is room for the byte, as nothing was written before.
    fn answer(&self, answer: Answer) {
        let _ = (&*self.stream).write_all(&[answer as u8]);
    }
}

/// Who tries, who waits to try, and what is known to work.
#[derive(Debug, Default)]
pub(super) struct Trials {
    /// The first one tries if there is a time since when.
    pools: VecDeque<Pool>,
    since: Option<Moment>,
    works: BTreeSet<String>,
}

impl Trials {
    /// A pool asks whether to try this device. `slices`: whether the policy uses time slices at all.
    pub(super) fn ask(&mut self, stream: Connection, device: String, slices: bool) {
        let pool = Pool { stream, device };
        if slices && self.pools.len() < MOST {
            self.pools.push_back(pool);
        } else {
            pool.answer(Answer::Unneeded);
        }
    }

    /// The descriptors to poll for input.
    pub(super) fn fds(&self) -> impl Iterator<Item = RawFd> {
        self.pools.iter().map(|pool| pool.stream.as_raw_fd())
    }

    /// When a trial has lasted too long.
    pub(super) fn due(&self) -> Option<Moment> {
        self.since.map(|since| since + LONGEST)
    }

    /// Hears what has been found, and answers those whose turn it is.
    pub(super) fn step(&mut self, ready: &[RawFd], now: Moment) {
        let mut heard = None;
        let (mut first, tries) = (true, self.since.is_some());
        self.pools.retain(|pool| {
            let is_trying = std::mem::take(&mut first) && tries;
            if !ready.contains(&pool.stream.as_raw_fd()) {
                return true;
            }
            let mut byte = [0];
            let got = pool.stream.receive(&mut byte);
            // What was there has been read as its first message.
            if matches!(&got, Err(error) if error.kind() == ErrorKind::WouldBlock) {
                return true;
            }
            if is_trying {
                let works = matches!(got, Ok(1)) && byte == [WORK];
                heard = Some((pool.device.clone(), works));
            }
            // Those that wait say nothing: they have ended.
            false
        });
        if let Some((device, works)) = heard {
            self.since = None;
            if works && self.works.len() < MOST {
                self.works.insert(device);
            }
        }
        if self.due().is_some_and(|due| due <= now) {
            self.since = None;
            self.pools.pop_front();
            log::warn!(
                "a trial of time slices does not end in {} s: it is not waited for",
                LONGEST.as_secs()
            );
        }
        while self.since.is_none()
            && let Some(pool) = self.pools.front()
        {
            if self.works.contains(&pool.device) {
                pool.answer(Answer::Known);
                self.pools.pop_front();
            } else {
                pool.answer(Answer::Try);
                self.since = Some(now);
            }
        }
    }
}
