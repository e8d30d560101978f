//! Workers that somebody else than the port's thread speaks to for a while: to save their application's
//! state, or to replace them.
//!
//! Whoever has one gives it back, or another one in its place, whatever happens; the slice stays open
//! meanwhile, and the guest notices nothing but calls that take longer.

use std::{
    collections::VecDeque,
    mem,
    os::unix::net::UnixStream,
    sync::{
        Arc, Mutex,
        mpsc::{self, SyncSender},
    },
    time::Duration,
};

use base::Unpoisoned;

use super::slices::Slices;

/// How long the port's thread may take to answer.
const SOON: Duration = Duration::from_secs(5);

/// What the port's thread is asked for.
pub enum Order {
    /// The workers of all open slices, or of one, that nobody has been lent.
    Lend(Option<u32>, SyncSender<Vec<Lent>>),
    /// A slice's worker comes back, or another one comes in its place.
    Back(usize, UnixStream),
}

/// Where orders are left.
pub struct Desk {
    /// None once nobody carries them out.
    orders: Mutex<Option<VecDeque<Order>>>,
    slices: Arc<Slices>,
}

/// The connection to a slice's worker.
pub struct Lent {
    /// Which slice.
    pub slice: usize,
    stream: Option<UnixStream>,
    desk: Arc<Desk>,
}

impl Desk {
    /// Nobody carries out orders yet; they wait.
    pub fn new(slices: Arc<Slices>) -> Self {
        Self {
            orders: Mutex::new(Some(VecDeque::new())),
            slices,
        }
    }

    fn leave(&self, order: Order) {
        // The connections in an order that nobody takes close, and with that the workers end.
        if let Some(orders) = &mut *self.orders.lock_unpoisoned() {
            orders.push_back(order);
        }
        self.slices.wake();
    }

    /// All orders.
    pub fn orders(&self) -> VecDeque<Order> {
        let mut orders = self.orders.lock_unpoisoned();
        orders.as_mut().map(mem::take).unwrap_or_default()
    }

    /// Somebody carries out orders from now on.
    pub fn open(&self) {
        self.orders.lock_unpoisoned().get_or_insert_default();
    }

    /// Nobody carries out orders any more.
    pub fn close(&self) {
        *self.orders.lock_unpoisoned() = None;
    }

    /// A slice is served by this worker from now on.
    pub fn serve(&self, slice: usize, stream: UnixStream) {
        self.leave(Order::Back(slice, stream));
    }

    /// The workers of all open slices, or of one. None if the port is not plugged in, or has no time.
    pub fn lend(&self, of: Option<u32>) -> Option<Vec<Lent>> {
        let (to, lent) = mpsc::sync_channel(1);
        self.leave(Order::Lend(of, to));
        lent.recv_timeout(SOON).ok()
    }
}

impl Lent {
    /// A slice's worker, which is given back to this desk.
    pub fn new(slice: usize, stream: UnixStream, desk: Arc<Desk>) -> Self {
        Self {
            slice,
            stream: Some(stream),
            desk,
        }
    }

    /// The connection.
    pub fn stream(&self) -> Option<&UnixStream> {
        self.stream.as_ref()
    }

    /// Gives back another worker's connection in place of this one, whose worker has ended.
    pub fn replace(mut self, stream: UnixStream) {
        self.stream = None;
        self.desk.serve(self.slice, stream);
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            self.desk.serve(self.slice, stream);
        }
    }
}
