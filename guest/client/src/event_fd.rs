//! Waiting for connections and for an event.

use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd},
        unix::net::UnixStream,
    },
    time::Duration,
};

use base::event::Event;

/// Waits for the event, if there is one, or until one of the connections is readable or has ended,
/// for at most `patience` or without limit. Returns which of the connections are ready.
pub fn wait(
    event: Option<&Event>,
    streams: [Option<&UnixStream>; 2],
    patience: Option<Duration>,
) -> io::Result<[bool; 2]> {
    // `ppoll` ignores negative descriptors.
    let poll = |fd: Option<libc::c_int>| libc::pollfd {
        fd: fd.unwrap_or(-1),
        events: libc::POLLIN,
        revents: 0,
    };
    let [first, second] = streams.map(|stream| poll(stream.map(AsRawFd::as_raw_fd)));
    let number = event.map(|event| event.as_fd().as_raw_fd());
    let mut polled = [first, second, poll(number)];
    let patience = patience.map(|patience| libc::timespec {
        tv_sec: patience.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(patience.subsec_nanos()),
    });
    let timeout = patience
        .as_ref()
        .map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the array has three entries, and the time outlives the call.
    let ready = unsafe { libc::ppoll(polled.as_mut_ptr(), 3, timeout, std::ptr::null()) };
    if ready < 0 {
        let error = io::Error::last_os_error();
        return match error.kind() {
            io::ErrorKind::Interrupted => Ok([false; 2]),
            _ => Err(error),
        };
    }
    if let (true, Some(event)) = (polled[2].revents != 0, event) {
        event.take();
    }
    Ok([polled[0].revents != 0, polled[1].revents != 0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_and_the_end_of_the_connection_are_told_apart() {
        let (here, there) = UnixStream::pair().unwrap();
        let event = Event::new().unwrap();
        let heard = |patience| wait(Some(&event), [Some(&here), None], patience).unwrap();
        event.signal();
        assert_eq!(heard(None), [false, false]);
        assert_eq!(heard(Some(Duration::ZERO)), [false, false]);
        event.signal();
        assert_eq!(wait(Some(&event), [None; 2], None).unwrap(), [false, false]);
        drop(there);
        assert_eq!(heard(None), [true, false]);
        let other = wait(None, [None, Some(&here)], None).unwrap();
        assert_eq!(other, [false, true]);
    }
}
