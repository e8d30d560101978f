//! Who is greeted at the moment: how many at once, and who has to go when there are too many.
//!
//! An address has so many places, and all have so many together. Who comes when they are taken
//! displaces the oldest of its own address, or of the address that has most: one address, however
//! many connections it makes, keeps no other out, and who comes to terms sooner than so many others
//! come is not displaced at all.

use std::{
    cmp::Reverse,
    io,
    net::{IpAddr, Ipv4Addr},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use crate::link::socket;

/// How many are greeted at a time.
pub(super) const MOST: usize = 32;
/// How many of one address.
pub(super) const MOST_ALIKE: usize = 8;
/// While there are only so many, the newest is left alone with this worker for [`HEAD_START`].
const FEW: usize = 4;
/// Most come to terms within this time, and are served before anybody else is begun with.
const HEAD_START: Duration = Duration::from_millis(50);

/// Where a peer comes from: what it has one of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// A user of this machine.
    User(libc::uid_t),
    /// A host.
    V4(Ipv4Addr),
    /// A network of 64 bits: the smallest that one is given.
    V6([u16; 4]),
}

impl Origin {
    /// Of a peer that came by TCP.
    pub fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self::V4(address),
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                Self::V6([a, b, c, d])
            }
        }
    }

    /// Of a process of this machine.
    pub fn of_process(stream: &UnixStream) -> io::Result<Self> {
        socket::user(stream).map(Self::User)
    }
}

/// Who is greeted.
#[derive(Debug)]
pub(super) struct Peer {
    number: u64,
    origin: Origin,
    /// For the log.
    pub name: String,
    since: Instant,
    /// Its connection, by which it can be ended.
    socket: OwnedFd,
    /// Whether it is not to be dismissed any more, or has been.
    settled: Arc<AtomicBool>,
    /// Whether its connection has been ended, so that its thread is about to.
    pub dismissed: bool,
}

impl Peer {
    /// Ends its connection, unless it is about to get its hello: who has that is served.
    fn dismiss(&mut self) {
        if self.settled.swap(true, Ordering::Relaxed) {
            return;
        }
        self.dismissed = true;
        // SAFETY: a plain call on an open descriptor.
        unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_RDWR) };
    }
}

/// Somebody who has come.
#[derive(Debug)]
pub(super) struct Admitted {
    /// Under this number it leaves.
    pub number: u64,
    /// To be set before it gets its hello. If it was set, it has been dismissed.
    pub settled: Arc<AtomicBool>,
    /// The name of the one who was dismissed for it.
    pub displaced: Option<String>,
}

/// All who are greeted, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Crowd {
    peers: Vec<Peer>,
    last: u64,
}

impl Crowd {
    /// Who has not been dismissed.
    fn staying(&self) -> impl DoubleEndedIterator<Item = &Peer> {
        self.peers.iter().filter(|peer| !peer.dismissed)
    }

    fn alike(&self, origin: Origin) -> usize {
        let alike = self.staying().filter(|peer| peer.origin == origin);
        alike.count()
    }

    /// How long nobody else may come in, from now on; [`Duration::MAX`]: until somebody has left.
    pub fn closed(&self, now: Instant) -> Duration {
        // The threads of those who have been dismissed take some time to end.
        if self.peers.len() >= 2 * MOST {
            return Duration::MAX;
        }
        match self.staying().next_back() {
            Some(newest) if self.staying().count() < FEW => {
                HEAD_START.saturating_sub(now.saturating_duration_since(newest.since))
            }
            _ => Duration::ZERO,
        }
    }

    /// Lets somebody in; `socket` ends its connection.
    pub fn admit(&mut self, origin: Origin, name: String, socket: OwnedFd) -> Admitted {
        let from = if self.alike(origin) >= MOST_ALIKE {
            Some(origin)
        } else if self.staying().count() >= MOST {
            let origins = self.staying().map(|peer| peer.origin);
            // Of several with as many, that of the oldest.
            origins.min_by_key(|origin| Reverse(self.alike(*origin)))
        } else {
            None
        };
        let mut staying = self.peers.iter_mut().filter(|peer| !peer.dismissed);
        let oldest = staying.find(|peer| Some(peer.origin) == from);
        let displaced = oldest.and_then(|peer| {
            peer.dismiss();
            peer.dismissed.then(|| peer.name.clone())
        });
        self.last += 1;
        let settled = Arc::new(AtomicBool::new(false));
        self.peers.push(Peer {
            number: self.last,
            origin,
            name,
            since: Instant::now(),
            socket,
            settled: Arc::clone(&settled),
            dismissed: false,
        });
        Admitted {
            number: self.last,
            settled,
            displaced,
        }
    }

    /// Who had this number has left.
    pub fn leave(&mut self, number: u64) -> Option<Peer> {
        let place = self.peers.iter().position(|peer| peer.number == number)?;
        Some(self.peers.remove(place))
    }

    /// Ends the connections of all who are left.
    pub fn dismiss(&mut self) {
        self.peers.iter_mut().for_each(Peer::dismiss);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn origin(last: u8) -> Origin {
        Origin::of(IpAddr::from([192, 0, 2, last]))
    }

    /// Lets so many of an address in; their ends, and who was displaced for the last.
    fn come(crowd: &mut Crowd, last: u8, count: usize) -> (Vec<UnixStream>, Option<String>) {
        let mut displaced = None;
        let ends = (0..count).map(|index| {
            let (here, there) = UnixStream::pair().unwrap();
            let name = format!("{last}: {index}");
            displaced = crowd.admit(origin(last), name, there.into()).displaced;
            here
        });
        (ends.collect(), displaced)
    }

    #[test]
    fn who_comes_too_often_displaces_its_own_and_nobody_else() {
        let mut crowd = Crowd::default();
        let (mut other, _) = come(&mut crowd, 1, 1);
        let (mut ends, displaced) = come(&mut crowd, 2, MOST_ALIKE + 1);
        assert_eq!(displaced.as_deref(), Some("2: 0"));
        assert_eq!(ends[0].read(&mut [0]).unwrap(), 0, "it has been shut down");
        for end in other.iter_mut().chain(&mut ends[1..]) {
            end.set_nonblocking(true).unwrap();
            let open = end.read(&mut [0]).unwrap_err();
            assert_eq!(open.kind(), io::ErrorKind::WouldBlock);
        }
    }

    #[test]
    fn where_all_places_are_taken_the_most_frequent_address_gives_one_up() {
        let mut crowd = Crowd::default();
        let mut ends = come(&mut crowd, 0, 2).0;
        let most = come(&mut crowd, 1, 3).0;
        for last in 2..MOST as u8 {
            if ends.len() + most.len() < MOST {
                ends.extend(come(&mut crowd, last, 1).0);
            }
        }
        assert_eq!(come(&mut crowd, 200, 1).1.as_deref(), Some("1: 0"));
    }

    #[test]
    fn who_has_been_dismissed_counts_until_its_thread_has_ended() {
        let mut crowd = Crowd::default();
        let _ends: Vec<_> = (0..2 * MOST as u8)
            .map(|last| come(&mut crowd, last, 1))
            .collect();
        assert_eq!(crowd.closed(Instant::now()), Duration::MAX);
        assert!(crowd.leave(1).is_some_and(|peer| peer.dismissed));
        assert_eq!(crowd.closed(Instant::now()), Duration::ZERO);
    }

    #[test]
    fn who_is_about_to_be_served_is_not_dismissed() {
        let mut crowd = Crowd::default();
        let (mut here, there) = UnixStream::pair().unwrap();
        let first = crowd.admit(origin(1), "first".to_owned(), there.into());
        assert!(!first.settled.swap(true, Ordering::Relaxed));
        assert_eq!(come(&mut crowd, 1, MOST_ALIKE).1, None);
        crowd.dismiss();
        here.set_nonblocking(true).unwrap();
        let open = here.read(&mut [0]).unwrap_err();
        assert_eq!(open.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn the_newest_of_few_has_a_head_start() {
        let mut crowd = Crowd::default();
        assert_eq!(crowd.closed(Instant::now()), Duration::ZERO);
        let _first = come(&mut crowd, 1, 1);
        let now = crowd.peers[0].since;
        assert_eq!(crowd.closed(now), HEAD_START);
        assert_eq!(crowd.closed(now + HEAD_START), Duration::ZERO);
        let _more = come(&mut crowd, 1, FEW - 1);
        assert_eq!(crowd.closed(now), Duration::ZERO);
    }

    #[test]
    fn addresses_of_one_network_or_in_another_form_are_one_origin() {
        let of = |text: &str| Origin::of(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), origin(1));
    }

    #[test]
    fn a_process_of_this_machine_is_known_by_its_user() {
        let (here, _there) = UnixStream::pair().unwrap();
        // SAFETY: a plain call.
        let user = unsafe { libc::getuid() };
        assert_eq!(Origin::of_process(&here).unwrap(), Origin::User(user));
    }
}
