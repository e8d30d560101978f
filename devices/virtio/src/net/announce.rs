//! Telling the network that a guest has moved.
//!
//! A switch sends frames to where it has last seen their receiver. So a reverse ARP request goes out
//! in the guest's name (RFC 903), to everybody, as other hypervisors send it: it has the guest's MAC
//! address, and nobody answers it.

use std::io;

use super::tap::{HEADER, Tap};

/// Shortest frame of Ethernet, without its checksum.
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

/// A reverse ARP request about the sender's own address.
fn request(mac: [u8; 6]) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(mac);
    // Ethertype, Ethernet, IPv4, lengths of their addresses, request (reverse).
    frame.extend([0x80, 0x35, 0, 1, 0x08, 0, 6, 4, 0, 3]);
    for _ in 0..2 {
        frame.extend(mac);
        frame.extend([0; 4]);
    }
    frame.resize(SHORTEST, 0);
    frame
}
