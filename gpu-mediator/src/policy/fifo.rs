//! Serves requests in the order of their arrival, as a device does by itself.

use std::{collections::VecDeque, time::Duration};

use super::{ClientId, Comes, Next, Policy, Rank, Weight};
use crate::{Moment, Slice};

/// First come, first served. Weights are ignored.
#[derive(Debug, Default)]
pub struct Fifo {
    waiting: VecDeque<ClientId>,
}

impl Policy for Fifo {
    fn join(&mut self, _: ClientId, _: Weight, _: Moment) {}

    fn set_weight(&mut self, _: ClientId, _: Weight, _: Moment) {}

    fn leave(&mut self, client: ClientId, _: Moment) {
        self.unwant(client);
    }

    fn want(&mut self, client: ClientId, _: Comes, _: Moment) {
        self.waiting.push_back(client);
    }

    /// A client that is not waiting has not arrived.
    fn rank(&self, _: ClientId) -> Rank {
        Rank::Behind
    }

    fn unwant(&mut self, client: ClientId) {
        self.waiting.retain(|waiting| *waiting != client);
    }

    fn charge(&mut self, _: ClientId, _: Duration, _: Moment) {}

    fn next(&mut self, _: Moment) -> Next {
        self.waiting
            .pop_front()
            .map_or(Next::Nobody, |client| Next::Turn(client, Slice::Request))
    }
}
