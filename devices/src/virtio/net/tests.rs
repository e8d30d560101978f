use std::{io, os::fd::OwnedFd, sync::Arc};

use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use super::{Error, Net, Options};
use crate::{testing::simple::Guest, thread::Unconfined, virtio::VirtioDevice};

fn options(tap: &str) -> Options {
    Options {
        thread_name: "_net0".to_owned(),
        tap: Some(tap.to_owned()),
        fds: Vec::new(),
        address: None,
        mac: Some([2, 0, 0, 0, 0, 1]),
        host_mac: None,
        mtu: None,
        num_queues: 2,
        queue_size: 16,
        offload_tso: true,
        offload_ufo: true,
        offload_csum: true,
        rate_limiter: None,
    }
}

/// A card on a tap of its own, or a reason why there is none here.
fn net(tap: &str) -> Option<Net> {
    match Net::new(options(tap), Arc::new(Unconfined)) {
        Ok(net) => Some(net),
        Err(error) => {
            eprintln!("skipped: {error}: {:?}", std::error::Error::source(&error));
            None
        }
    }
}

/// A packet socket on an interface, to which every frame of the host's side comes.
fn packets(interface: &str) -> OwnedFd {
    let all = (libc::ETH_P_ALL as u16).to_be();
    let name = std::ffi::CString::new(interface).unwrap();
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
        <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd)
    }
}

fn frame(mark: u8) -> Vec<u8> {
    let mut frame = vec![0xff; 12];
    // An experimental protocol.
    frame.extend([0x88, 0xb5]);
    frame.extend([mark; 100]);
    frame
}

#[test]
fn frames_travel_both_ways() {
    let Some(mut net) = net("gtest-a") else {
        return;
    };
    let socket = std::fs::File::from(packets("gtest-a"));
    let guest = Guest::new();
    let (rx, tx) = (guest.queue(0, 16), guest.queue(1, 16));
    net.activate(guest.activation(&[&rx, &tx])).unwrap();
    // Out.
    let mut out = vec![0; 12];
    out.extend(frame(7));
    tx.request(&out, 0);
    let mut seen = vec![0; 2000];
    loop {
        let len = io::Read::read(&mut &socket, &mut seen).unwrap();
        if seen[..len] == frame(7) {
            break;
        }
    }
    // In. The kernel sends frames of its own, too.
    io::Write::write_all(&mut &socket, &frame(9)).unwrap();
    loop {
        rx.submit(&[(rx.buffers(), 10, true), (rx.buffers() + 10, 2000, true)]);
        let len = rx.wait_used() as usize;
        let mut bytes = vec![0; len];
        guest
            .memory
            .memory()
            .read_slice(&mut bytes, GuestAddress(rx.buffers()))
            .unwrap();
        assert_eq!(
            bytes[10..12],
            [1, 0],
            "one buffer, even where the header is split"
        );
        if bytes[12..] == frame(9) {
            break;
        }
    }
    assert!(net.counters().iter().all(|(_, value)| *value > 0));
    assert_eq!(net.deactivate().len(), 2);
}

#[test]
fn hostile_chains_hurt_nobody() {
    let Some(mut net) = net("gtest-b") else {
        return;
    };
    let guest = Guest::new();
    let (rx, tx) = (guest.queue(0, 16), guest.queue(1, 16));
    net.activate(guest.activation(&[&rx, &tx])).unwrap();
    tx.raw(&[(u64::MAX - 8, 64, false)]);
    tx.raw(&[(tx.buffers(), 64, true)]);
    tx.raw(&[(tx.buffers(), 0, false)]);
    tx.raw(&[(tx.buffers(), 3, false)]);
    assert_eq!(rx.raw(&[(rx.buffers(), 64, false)]), 0);
    assert_eq!(rx.raw(&[(u64::MAX - 8, 64, true)]), 0);
    assert_eq!(rx.raw(&[(rx.buffers(), 4, true)]), 0);
    net.deactivate();
}

#[test]
fn the_control_queue_takes_what_makes_sense() {
    let mut options = options("gtest-c");
    options.num_queues = 4;
    let Ok(mut net) = Net::new(options, Arc::new(Unconfined)) else {
        eprintln!("skipped: no tap here");
        return;
    };
    let guest = Guest::new();
    let queues: Vec<_> = (0..5).map(|index| guest.queue(index, 16)).collect();
    let all: Vec<_> = queues.iter().collect();
    net.activate(guest.activation_with(&all, net.features() & !(1 << 29)))
        .unwrap();
    let ask = |bytes: &[u8]| queues[4].request(bytes, 1).1[0];
    assert_eq!(ask(&[4, 0, 2, 0]), 0);
    assert_eq!(ask(&[4, 0, 3, 0]), 1);
    assert_eq!(ask(&[4, 0, 0, 0]), 1);
    assert_eq!(ask(&[4, 0]), 1);
    assert_eq!(ask(&[9, 9, 9]), 1);
    assert_eq!(ask(&[5, 0, 0, 0, 0, 0, 0, 0, 0, 0]), 0);
    assert_eq!(ask(&[5, 0, 255, 255, 255, 255, 255, 255, 255, 255]), 1);
    assert_eq!(net.deactivate().len(), 5);
}

#[test]
fn impossible_cards_are_refused_with_a_reason() {
    let mut odd = options("gtest-d");
    odd.num_queues = 3;
    assert!(matches!(
        Net::new(odd, Arc::new(Unconfined)),
        Err(Error::NumQueues(3))
    ));
    let error = Net::new(options("lo"), Arc::new(Unconfined)).err().unwrap();
    assert!(
        error.to_string().contains("\"lo\"") || error.to_string().contains("tun"),
        "{error}"
    );
    let long = "x".repeat(16);
    let error = Net::new(options(&long), Arc::new(Unconfined))
        .err()
        .unwrap();
    assert!(
        error.to_string().contains("15 bytes") || error.to_string().contains("tun"),
        "{error}"
    );
}
