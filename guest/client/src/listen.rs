//! The listener: the thread that notices callbacks and the worker's end.

use std::{io::Read, os::unix::net::UnixStream};

use base::Unpoisoned;
use gantry_remoting::link::port_bell::Doorbell;

use crate::{
    callbacks::PollInterval,
    driver::Driver,
    event_fd::EventFd,
    link::{LIVENESS_TIMEOUT, Link},
};

/// What the listener runs: until the worker ends.
pub(crate) fn listen<D: Driver>(stream: Option<&UnixStream>) {
    // The link is there as soon as its maker has returned.
    let Some(link) = D::connection().wait() else {
        return;
    };
    match (link.peer.poll_event(), stream) {
        (Some(event), stream) => poll_for_callbacks(link, stream, event),
        (None, Some(stream)) => wait_for_wakeups(link, stream),
        (None, None) => {}
    }
    link.worker_lost();
}

/// Reads messages whenever the worker has sent a byte to say so, until it ends.
fn wait_for_wakeups<D: Driver>(link: &Link<D>, stream: &UnixStream) {
    let mut bytes = [0; 64];
    loop {
        match (&mut &*stream).read(&mut bytes) {
            Ok(0) => return,
            Ok(_) => link.read_pending(),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// Polls while callbacks are pending, and sleeps while none are, until the agent closes the
/// connection: the worker has ended, or the port is gone. A worker behind a gate notices nothing by
/// itself.
fn poll_for_callbacks<D: Driver>(link: &Link<D>, stream: Option<&UnixStream>, event: &EventFd) {
    let mut interval = PollInterval::default();
    loop {
        let next = interval.next(&mut link.callbacks.lock_unpoisoned());
        // Messages may come that no callback waits for.
        let timeout = next.or_else(|| D::expects_messages(&link.state).then_some(LIVENESS_TIMEOUT));
        match event.wait_beside(stream, timeout) {
            Ok(true) | Err(_) => return,
            Ok(false) => {
                if let Doorbell::Gate(gate) = &link.bell {
                    gate.drain();
                }
                link.read_pending();
            }
        }
        if !link.still_alive() {
            return;
        }
    }
}
