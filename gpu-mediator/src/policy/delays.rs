//! Who delays whom on a device that serves several clients.

use std::time::Duration;

use super::ClientId;

/// Shorter delays are not told: use is reported as late.
const LEAST: Duration = Duration::from_millis(20);

/// A time for which a client had work and got nothing of the device, and who used it the most meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delay {
    /// Who.
    pub by: ClientId,
    /// For how long, 20 ms at least.
    pub time: Duration,
}

/// The delays of a client.
#[derive(Debug, Default)]
pub(super) struct Delays {
    /// The one that goes on.
    lasts: Duration,
    /// Who is ahead in it, and by how much: each had the most of the device for a part of the time, and takes as much from the one
    /// before.
    by: Option<(ClientId, Duration)>,
    /// The longest one that has ended since it was asked for.
    longest: Option<Delay>,
}

impl Delays {
    /// For this time, the client has waited, and this one had the most of the device.
    pub fn wait(&mut self, time: Duration, most: Option<ClientId>) {
        self.lasts += time;
        let Some(most) = most else {
            return;
        };
        self.by = Some(match self.by {
            Some((by, ahead)) if by == most => (by, ahead + time),
            Some((by, ahead)) if ahead >= time => (by, ahead - time),
            Some((_, ahead)) => (most, time - ahead),
            None => (most, time),
        });
    }

    /// It has got something, or has no work.
    pub fn end(&mut self) {
        self.longest = self.take();
        (self.lasts, self.by) = (Duration::ZERO, None);
    }

    /// The longest one since this was asked last, or the one that goes on.
    pub fn take(&mut self) -> Option<Delay> {
        let (by, _) = self.by.unzip();
        let lasts = by.map(|by| Delay {
            by,
            time: self.lasts,
        });
        let lasts = lasts.filter(|delay| delay.time >= LEAST);
        let all = self.longest.take().into_iter().chain(lasts);
        all.max_by_key(|delay| delay.time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_millis(4);

    #[test]
    fn the_longest_delay_is_told_with_who_had_the_device_for_most_of_it() {
        let mut delays = Delays::default();
        let [one, other] = [ClientId(1), ClientId(2)];
        let mut wait = |most: &[Option<ClientId>]| {
            most.iter().for_each(|most| delays.wait(TIME, *most));
            delays.end();
        };
        wait(&[Some(one); 4]);
        wait(&[
            Some(one),
            Some(other),
            None,
            Some(other),
            Some(one),
            Some(other),
        ]);
        wait(&[Some(one); 5]);
        let time = TIME * 6;
        assert_eq!(delays.take(), Some(Delay { by: other, time }));
        assert_eq!(delays.take(), None);
    }
}
