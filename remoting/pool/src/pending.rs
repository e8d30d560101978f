//! Connections whose handshake is not complete: how many there may be, and which one is closed for a
//! new one.
//!
//! There is a limit for each address and one for all together. A connection over a limit closes the
//! oldest one of its own address, or of the address with the most: one address, however many
//! connections it makes, keeps no other out. A client that completes its handshake before the limit
//! is reached is not affected.

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

use remoting_transport::socket;

/// Maximum number of pending connections.
pub(super) const MOST: usize = 32;
/// Maximum number of pending connections of one address.
pub(super) const MOST_ALIKE: usize = 8;
/// With fewer pending connections than this, no other is accepted for [`HEAD_START`] after the newest.
const FEW: usize = 4;
/// Most handshakes take less than this; the client is then served before another is accepted.
const HEAD_START: Duration = Duration::from_millis(50);

/// The origin of a connection, to which the limit for one address applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Origin {
    /// A user of this machine.
    User(libc::uid_t),
    /// A host.
    V4(Ipv4Addr),
    /// A /64 network: the smallest that is assigned to one site.
    V6([u16; 4]),
}

impl Origin {
    /// The origin of a TCP connection.
    pub fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self::V4(address),
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                Self::V6([a, b, c, d])
            }
        }
    }

    /// The origin of a process of this machine.
    pub fn of_process(stream: &UnixStream) -> io::Result<Self> {
        socket::user(stream).map(Self::User)
    }
}

/// A peer whose handshake is not complete.
#[derive(Debug)]
pub(super) struct Peer {
    number: u64,
    origin: Origin,
    /// For the log.
    pub name: String,
    since: Instant,
    /// Its connection, to shut it down.
    socket: OwnedFd,
    /// Set once, either by the handshake (the peer is about to be served) or by its dismissal.
    committed: Arc<AtomicBool>,
    /// Whether its connection has been shut down, so that its thread is about to end.
    pub dismissed: bool,
}

impl Peer {
    /// Shuts its connection down, unless it is about to receive its hello: such a peer is served.
    fn dismiss(&mut self) {
        if self.committed.swap(true, Ordering::Relaxed) {
            return;
        }
        self.dismissed = true;
        // SAFETY: a plain call on an open descriptor.
        unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_RDWR) };
    }
}

/// A connection that has been accepted.
#[derive(Debug)]
pub(super) struct Admitted {
    /// Its number, for [`Pending::leave`].
    pub number: u64,
    /// To be set before it is sent its hello. If it was set already, it has been dismissed.
    pub committed: Arc<AtomicBool>,
    /// The name of the peer that was dismissed for it.
    pub displaced: Option<String>,
}

/// All pending connections, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Pending {
    peers: Vec<Peer>,
    last: u64,
}

impl Pending {
    /// Those that have not been dismissed.
    fn staying(&self) -> impl DoubleEndedIterator<Item = &Peer> {
        self.peers.iter().filter(|peer| !peer.dismissed)
    }

    fn alike(&self, origin: Origin) -> usize {
        let alike = self.staying().filter(|peer| peer.origin == origin);
        alike.count()
    }

    /// How long no other connection may be accepted; [`Duration::MAX`]: until one has left.
    pub fn closed(&self, now: Instant) -> Duration {
        // The threads of dismissed peers take some time to end.
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

    /// Adds a connection; `socket` is used to shut it down.
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
        let committed = Arc::new(AtomicBool::new(false));
        self.peers.push(Peer {
            number: self.last,
            origin,
            name,
            since: Instant::now(),
            socket,
            committed: Arc::clone(&committed),
            dismissed: false,
        });
        Admitted {
            number: self.last,
            committed,
            displaced,
        }
    }

    /// Removes the connection with this number.
    pub fn leave(&mut self, number: u64) -> Option<Peer> {
        let place = self.peers.iter().position(|peer| peer.number == number)?;
        Some(self.peers.remove(place))
    }

    /// Shuts all connections down.
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

    /// Adds connections of one address; returns their ends and who was displaced for the last one.
    fn come(pending: &mut Pending, last: u8, count: usize) -> (Vec<UnixStream>, Option<String>) {
        let mut displaced = None;
        let ends = (0..count).map(|index| {
            let (here, there) = UnixStream::pair().unwrap();
            let name = format!("{last}: {index}");
            displaced = pending.admit(origin(last), name, there.into()).displaced;
            here
        });
        (ends.collect(), displaced)
    }

    #[test]
    fn an_address_over_its_limit_displaces_its_own_connections_only() {
        let mut pending = Pending::default();
        let (mut other, _) = come(&mut pending, 1, 1);
        let (mut ends, displaced) = come(&mut pending, 2, MOST_ALIKE + 1);
        assert_eq!(displaced.as_deref(), Some("2: 0"));
        assert_eq!(ends[0].read(&mut [0]).unwrap(), 0, "it has been shut down");
        for end in other.iter_mut().chain(&mut ends[1..]) {
            end.set_nonblocking(true).unwrap();
            let open = end.read(&mut [0]).unwrap_err();
            assert_eq!(open.kind(), io::ErrorKind::WouldBlock);
        }
    }

    #[test]
    fn at_the_common_limit_the_most_frequent_address_loses_a_connection() {
        let mut pending = Pending::default();
        let mut ends = come(&mut pending, 0, 2).0;
        let most = come(&mut pending, 1, 3).0;
        for last in 2..MOST as u8 {
            if ends.len() + most.len() < MOST {
                ends.extend(come(&mut pending, last, 1).0);
            }
        }
        assert_eq!(come(&mut pending, 200, 1).1.as_deref(), Some("1: 0"));
    }

    #[test]
    fn a_dismissed_peer_counts_until_its_thread_has_ended() {
        let mut pending = Pending::default();
        let _ends: Vec<_> = (0..2 * MOST as u8)
            .map(|last| come(&mut pending, last, 1))
            .collect();
        assert_eq!(pending.closed(Instant::now()), Duration::MAX);
        assert!(pending.leave(1).is_some_and(|peer| peer.dismissed));
        assert_eq!(pending.closed(Instant::now()), Duration::ZERO);
    }

    #[test]
    fn a_peer_about_to_be_served_is_not_dismissed() {
        let mut pending = Pending::default();
        let (mut here, there) = UnixStream::pair().unwrap();
        let first = pending.admit(origin(1), "first".to_owned(), there.into());
        assert!(!first.committed.swap(true, Ordering::Relaxed));
        assert_eq!(come(&mut pending, 1, MOST_ALIKE).1, None);
        pending.dismiss();
        here.set_nonblocking(true).unwrap();
        let open = here.read(&mut [0]).unwrap_err();
        assert_eq!(open.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn the_newest_of_few_connections_has_a_head_start() {
        let mut pending = Pending::default();
        assert_eq!(pending.closed(Instant::now()), Duration::ZERO);
        let _first = come(&mut pending, 1, 1);
        let now = pending.peers[0].since;
        assert_eq!(pending.closed(now), HEAD_START);
        assert_eq!(pending.closed(now + HEAD_START), Duration::ZERO);
        let _more = come(&mut pending, 1, FEW - 1);
        assert_eq!(pending.closed(now), Duration::ZERO);
    }

    #[test]
    fn addresses_of_one_network_or_in_another_form_are_one_origin() {
        let of = |text: &str| Origin::of(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), origin(1));
    }

    #[test]
    fn the_origin_of_a_local_process_is_its_user() {
        let (here, _there) = UnixStream::pair().unwrap();
        // SAFETY: a plain call.
        let user = unsafe { libc::getuid() };
        assert_eq!(Origin::of_process(&here).unwrap(), Origin::User(user));
    }
}
