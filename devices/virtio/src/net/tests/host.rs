//! Cards on real taps with unique names. Tests print a message if this user may not create taps.

use std::{
    fs::File,
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr},
    os::fd::{AsFd, FromRawFd},
    sync::atomic::{AtomicU32, Ordering},
};

use super::*;
use crate::net::{State, interface::Interface, tap::TapError};

/// A name that no other test uses, in this or another process.
fn unique() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::SeqCst);
    format!("gt{}-{number}", std::process::id())
}

/// A card on a tap; prints the reason if none can be created here.
fn net(change: impl FnOnce(&mut Options)) -> Option<Net> {
    let mut options = options();
    change(&mut options);
    match Net::new(options, Arc::new(Unconfined)) {
        Ok(net) => Some(net),
        Err(Error::Tap(error @ (TapError::Open(_) | TapError::Attach { .. }))) => {
            eprintln!("skipped: {error}: {:?}", std::error::Error::source(&error));
            None
        }
        Err(error) => panic!("{error}: {:?}", std::error::Error::source(&error)),
    }
}

/// A packet socket that receives all frames of the host side of an interface.
fn packets(interface: &str) -> File {
    let all = (libc::ETH_P_ALL as u16).to_be();
    let name = std::ffi::CString::new(interface).unwrap();
    let patience = libc::timeval {
        tv_sec: PATIENCE.as_secs() as i64,
        tv_usec: 0,
    };
    // SAFETY: plain system calls with structs that outlive them.
    unsafe {
        let fd = libc::socket(libc::AF_PACKET, libc::SOCK_RAW, i32::from(all));
        assert!(fd >= 0, "{}", io::Error::last_os_error());
        let mut address: libc::sockaddr_ll = std::mem::zeroed();
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = all;
        address.sll_ifindex = libc::if_nametoindex(name.as_ptr()) as i32;
        let len = size_of_val(&address) as u32;
        assert_eq!(libc::bind(fd, (&raw const address).cast(), len), 0);
        let option = (&raw const patience).cast();
        let len = size_of_val(&patience) as u32;
        let set = libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, option, len);
        assert_eq!(set, 0);
        File::from_raw_fd(fd)
    }
}

/// A broadcast frame of an experimental protocol.
fn broadcast(mark: u8) -> Vec<u8> {
    let mut frame = vec![0xff; 12];
    frame.extend([0x88, 0xb5]);
    frame.extend([mark; 100]);
    frame
}

#[test]
fn frames_travel_both_ways_over_a_tap() {
    for features in [0, 1 << 15] {
        let Some(mut net) = net(|_| {}) else { return };
        let mut socket = packets(net.tap_name());
        let guest = Guest::new();
        let (rx, tx) = (guest.queue(0, 16), guest.queue(1, 16));
        net.activate(guest.activation_with(&[&rx, &tx], features))
            .unwrap();
        // Transmit.
        let mut out = vec![0; HEADER];
        out.extend(broadcast(7));
        tx.request(&out, 0);
        let mut seen = vec![0; 2000];
        loop {
            let len = socket.read(&mut seen).unwrap();
            if seen[..len] == broadcast(7) {
                break;
            }
        }
        // Receive. The kernel sends frames of its own as well.
        socket.write_all(&broadcast(9)).unwrap();
        loop {
            rx.submit(&[(rx.buffers(), 10, true), (rx.buffers() + 10, 2000, true)]);
            let len = rx.wait_used() as usize;
            if len == 0 {
                // With mergeable buffers each chain must hold a header; this one does.
                panic!("the chain was refused");
            }
            let bytes = bytes(&guest, rx.buffers(), len);
            assert_eq!(bytes[10..12], [1, 0]);
            if bytes[12..] == broadcast(9) {
                break;
            }
        }
        assert_eq!(net.deactivate().len(), 2);
    }
}

const ASKED: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
const DEFAULT: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 129);
const MASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 128);

fn pair(ip: Ipv4Addr) -> Option<(IpAddr, IpAddr)> {
    Some((ip.into(), MASK.into()))
}

/// The host's IPv4 address on an interface.
fn address(name: &str) -> Option<Ipv4Addr> {
    Interface::new(name).unwrap().v4(libc::SIOCGIFADDR)
}

#[test]
fn an_interface_that_is_made_gets_the_default_address_unless_another_was_asked_for() {
    for named in [false, true] {
        let name = named.then(unique);
        let set = |options: &mut Options| {
            options.tap = name.clone();
            options.made_address = pair(DEFAULT);
        };
        let Some(made) = net(set) else { return };
        assert_eq!(address(made.tap_name()), Some(DEFAULT));
        drop(made);
        let asked = net(|options| {
            set(options);
            options.address = pair(ASKED);
        });
        assert_eq!(address(asked.unwrap().tap_name()), Some(ASKED));
    }
}

#[test]
fn an_interface_that_was_there_is_left_alone_but_for_what_was_asked() {
    let name = unique();
    let Ok(_there) = Tap::open(Some(&name), 2) else {
        eprintln!("skipped: no taps here");
        return;
    };
    let interface = Interface::new(&name).unwrap();
    interface.set_mtu(1400).unwrap();
    let mac = interface.mac().unwrap();
    let set = |options: &mut Options| {
        options.tap = Some(name.clone());
        options.num_queues = 4;
        options.made_address = pair(DEFAULT);
    };
    let mut card = net(set).unwrap();
    // A restore does not change it either.
    let mut saved: State = serde_json::from_value(card.save().unwrap()).unwrap();
    saved.host_mac = Some([2, 9, 9, 9, 9, 9]);
    card.restore(serde_json::to_value(saved).unwrap()).unwrap();
    drop(card);
    assert_eq!(address(&name), None);
    assert_eq!(interface.mac().unwrap(), mac);
    assert_eq!(interface.mtu().unwrap(), 1400);
    let asked = net(|options| {
        set(options);
        options.address = pair(ASKED);
        options.mtu = Some(1300);
        options.host_mac = Some([2, 1, 1, 1, 1, 1]);
    });
    assert_eq!(address(&name), Some(ASKED));
    assert_eq!(interface.v4(libc::SIOCGIFNETMASK), Some(MASK));
    assert_eq!(interface.mac().unwrap(), [2, 1, 1, 1, 1, 1]);
    assert_eq!(interface.mtu().unwrap(), 1300);
    drop(asked);
}

#[test]
fn a_restored_interface_has_the_address_that_the_guest_knows() {
    let Some(before) = net(|_| {}) else { return };
    let mac = |net: &Net| Interface::new(net.tap_name()).unwrap().mac().unwrap();
    let known = mac(&before);
    let state = before.save().unwrap();
    drop(before);
    let mut after = net(|_| {}).unwrap();
    assert_ne!(mac(&after), known, "the kernel makes one up");
    after.restore(state.clone()).unwrap();
    assert_eq!(mac(&after), known);
    // The configured address takes precedence.
    let mut configured = net(|options| options.host_mac = Some([2, 3, 3, 3, 3, 3])).unwrap();
    configured.restore(state).unwrap();
    assert_eq!(mac(&configured), [2, 3, 3, 3, 3, 3]);
}

#[test]
fn a_queue_that_came_detached_is_attached_when_the_driver_wants_it() {
    let Ok(taps) = Tap::open(None, 2) else {
        eprintln!("skipped: no taps here");
        return;
    };
    taps[1].attach(false).unwrap();
    let duplicate = |tap: &Tap| {
        // SAFETY: the descriptor stays open as long as the tap lives.
        let fd =
            unsafe { std::os::fd::BorrowedFd::borrow_raw(std::os::fd::AsRawFd::as_raw_fd(tap)) };
        fd.as_fd().try_clone_to_owned().unwrap()
    };
    let states: Vec<_> = taps
        .iter()
        .map(|tap| Tap::from_fd(duplicate(tap)).unwrap().is_attached())
        .collect();
    assert_eq!(states, [true, false]);
    let mut card = net(|options| {
        options.num_queues = 4;
        options.fds = taps.iter().map(duplicate).collect();
    })
    .unwrap();
    let guest = Guest::new();
    let queues: Vec<_> = (0..5).map(|index| guest.queue(index, 16)).collect();
    let all: Vec<_> = queues.iter().collect();
    let features = card.features() & !(1 << 29);
    card.activate(guest.activation_with(&all, features))
        .unwrap();
    assert_eq!(queues[4].request(&[4, 0, 2, 0], 1).1, [0]);
    assert!(Tap::from_fd(duplicate(&taps[1])).unwrap().is_attached());
    assert_eq!(queues[4].request(&[4, 0, 1, 0], 1).1, [0]);
    assert!(!Tap::from_fd(duplicate(&taps[1])).unwrap().is_attached());
    card.deactivate();
}

#[test]
fn descriptors_that_do_not_belong_together_are_refused() {
    let (Ok(one), Ok(other)) = (Tap::open(None, 2), Tap::open(None, 2)) else {
        eprintln!("skipped: no taps here");
        return;
    };
    let fds = |taps: [&Tap; 2]| {
        taps.map(|tap| {
            // SAFETY: the descriptor stays open as long as the tap lives.
            let fd = unsafe {
                std::os::fd::BorrowedFd::borrow_raw(std::os::fd::AsRawFd::as_raw_fd(tap))
            };
            fd.try_clone_to_owned().unwrap()
        })
    };
    let refusal = |fds: Vec<OwnedFd>, num_queues| {
        let mut options = options();
        options.num_queues = num_queues;
        options.fds = fds;
        Net::new(options, Arc::new(Unconfined)).err()
    };
    let mixed = refusal(fds([&one[0], &other[0]]).into(), 4);
    assert!(matches!(mixed, Some(Error::Interfaces { .. })), "{mixed:?}");
    let many = refusal(fds([&one[0], &one[1]]).into(), 2);
    let Some(Error::Descriptors { fds: 2, pairs: 1 }) = many else {
        panic!("{many:?}");
    };
    let file = OwnedFd::from(File::open("/dev/null").unwrap());
    let error = refusal(vec![file], 2).unwrap().to_string();
    assert!(error.contains("descriptor"), "{error}");
}

#[test]
fn impossible_interfaces_are_refused_with_a_reason() {
    for (name, reason) in [("lo", "\"lo\""), ("xxxxxxxxxxxxxxxx", "15 bytes")] {
        let mut options = options();
        options.tap = Some(name.to_owned());
        let error = Net::new(options, Arc::new(Unconfined)).err().unwrap();
        let text = error.to_string();
        assert!(text.contains(reason) || text.contains("tun"), "{text}");
    }
}
