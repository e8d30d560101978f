//! The listener: the thread that notices callbacks and the worker's end, and receives orders to
//! move this process to another worker.

use std::{io, os::unix::net::UnixStream};

use base::{Unpoisoned, event::Event};
use remoting_transport::{
    order::{self, ORDER, Order},
    port_bell::Doorbell,
    socket,
};

use crate::{
    callbacks::PollInterval,
    driver::Driver,
    event_fd,
    link::{LIVENESS_TIMEOUT, Link},
};

/// What the listener waits for besides messages.
enum Heard {
    /// The connection has ended.
    End,
    /// An order, and the stream it arrived on.
    Order(Order, UnixStream),
}

/// The listener's main function. Runs until the worker ends.
pub(crate) fn listen<D: Driver>(mut orders: Option<UnixStream>) {
    // The connection is available as soon as its creator has returned.
    let Some(link) = D::connection().wait() else {
        return;
    };
    loop {
        let seat = link.seat();
        let heard = match (seat.peer.poll_event(), &seat.stream) {
            (Some(event), stream) => poll_for_callbacks(link, stream.as_ref(), &mut orders, event),
            (None, Some(stream)) => wait_for_wakeups(link, stream, &mut orders),
            (None, None) => Heard::End,
        };
        drop(seat);
        let Heard::Order(order, stream) = heard else {
            break;
        };
        // The previous issuer of orders has no authority any more, and must not wait for an answer
        // while this one is carried out.
        drop(orders.take());
        let changed = D::change_seat(link, &order, &stream);
        let (outcome, new) = match changed {
            Ok(new) => (Ok(()), new),
            Err(why) => {
                base::note!("{}: stays where it is: {why}", D::NAME);
                (Err(why), None)
            }
        };
        // The notification of a message may have arrived together with the order, or during the
        // move.
        link.read_pending();
        order::answer(&stream, &outcome);
        if !link.still_alive() {
            break;
        }
        // Further orders come from the new worker, or else from the issuer of this order.
        orders = new.or(Some(stream));
    }
    link.worker_lost();
}

/// Receives from the connection beside the rings. Returns None if nothing came, or only a
/// notification that there is a message to read.
fn hear(connection: &UnixStream) -> Option<Heard> {
    let mut bytes = [0; 64];
    match socket::receive(connection, &mut bytes).or_else(socket::FilesLost::arrived) {
        Ok((0, _)) => Some(Heard::End),
        Ok((count, mut files)) => {
            let file = files.pop()?;
            let stream = UnixStream::from(file);
            // Anything that is not a valid order is ignored.
            let ordered = bytes[..count].contains(&ORDER) && order::may_come(&stream, connection);
            let order = ordered.then(|| Order::take(&stream));
            order?.ok().map(|order| Heard::Order(order, stream))
        }
        Err(error) if error.kind() == io::ErrorKind::Interrupted => None,
        Err(_) => Some(Heard::End),
    }
}

/// Receives a further order from the issuer of a previous one. Sets `orders` to None if there will
/// be none. An order that has been carried out cannot be withdrawn.
fn hear_order(orders: &mut Option<UnixStream>) -> Option<Heard> {
    if order::is_taken_back(orders.as_ref()?) {
        return None;
    }
    let stream = orders.take()?;
    let order = Order::take(&stream).ok()?;
    Some(Heard::Order(order, stream))
}

/// Reads messages whenever the worker sends a byte, until the worker ends or an order arrives.
fn wait_for_wakeups<D: Driver>(
    link: &Link<D>,
    stream: &UnixStream,
    orders: &mut Option<UnixStream>,
) -> Heard {
    loop {
        // With only one connection, receiving from it is the wait.
        if orders.is_some() {
            match event_fd::wait(None, [Some(stream), orders.as_ref()], None) {
                Ok([_, true]) => {
                    if let Some(heard) = hear_order(orders) {
                        return heard;
                    }
                    continue;
                }
                Ok([true, _]) => {}
                Ok(_) => continue,
                Err(_) => return Heard::End,
            }
        }
        match hear(stream) {
            Some(heard) => return heard,
            None => link.read_pending(),
        }
    }
}

/// Polls while callbacks are pending and sleeps otherwise, until the agent closes the connection
/// (the worker has ended, or the port is gone) or an order arrives. A worker behind a gate sends no
/// notifications.
fn poll_for_callbacks<D: Driver>(
    link: &Link<D>,
    stream: Option<&UnixStream>,
    orders: &mut Option<UnixStream>,
    event: &Event,
) -> Heard {
    let mut interval = PollInterval::default();
    loop {
        let next = interval.next(&mut link.callbacks.lock_unpoisoned());
        // Messages may arrive that no callback waits for.
        let timeout = next.or_else(|| D::expects_messages(&link.state).then_some(LIVENESS_TIMEOUT));
        let Ok([said, ordered]) = event_fd::wait(Some(event), [stream, orders.as_ref()], timeout)
        else {
            return Heard::End;
        };
        let heard = match stream {
            Some(stream) if said => hear(stream),
            _ if ordered => hear_order(orders),
            _ => None,
        };
        if let Some(heard) = heard {
            return heard;
        }
        if let Doorbell::Gate(gate) = &link.seat().bell {
            gate.drain();
        }
        link.read_pending();
        if !link.still_alive() {
            return Heard::End;
        }
    }
}
