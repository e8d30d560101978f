//! Announces to the network that a guest has moved.
//!
//! A switch sends frames to the port where it last saw their receiver. A broadcast reverse ARP
//! request (RFC 903) is therefore sent on behalf of the guest, as other hypervisors do: it carries
//! the guest's MAC address, and nobody replies to it.

use std::io;

use super::tap::{HEADER, Tap};

/// Minimum length of an Ethernet frame, without its checksum.
const SHORTEST: usize = 60;

/// Sends the announcement.
pub fn send(tap: &Tap, mac: [u8; 6]) -> io::Result<()> {
    let mut frame = vec![0; HEADER];
    frame.extend(request(mac));
    let buffer = libc::iovec {
        iov_base: frame.as_mut_ptr().cast(),
        iov_len: frame.len(),
    };
    tap.write(&[buffer]).map(drop)
}

/// A reverse ARP request for the sender's own address.
fn request(mac: [u8; 6]) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(mac);
    // Ethertype, Ethernet, IPv4, lengths of their addresses, reverse request.
    frame.extend([0x80, 0x35, 0, 1, 0x08, 0, 6, 4, 0, 3]);
    for _ in 0..2 {
        frame.extend(mac);
        frame.extend([0; 4]);
    }
    frame.resize(SHORTEST, 0);
    frame
}
