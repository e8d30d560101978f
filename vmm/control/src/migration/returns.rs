//! Applications that go back to the devices of a guest that stays where it is.
//!
//! A guest that has heard that a device is to go may give it up after the migration has failed. So nobody
//! goes back before it has answered:
//!
//! ```text
//!   it refuses, or has not heard           the device stays          they are told to go back
//!   it gives the device up                 the device comes anew     its agent has them go back, when all
//!                                                                    have drivers
//!   both, each for one of several devices                            they are told, and wait for drivers
//! ```

use std::collections::BTreeSet;

use base::Cancel;
use devices::accel::moving::{self, Seat};

use super::{
    super::{accel, removals::Fate},
    Migrations,
};

/// Applications on devices that an accelerator tracks, which leave these devices.
#[derive(Clone)]
pub(super) struct Seats {
    /// The accelerator.
    pub(super) id: String,
    pub(super) port: moving::Handle,
    /// The names of the devices.
    pub(super) devices: Vec<String>,
    /// Where applications are served meanwhile.
    pub(super) away: Seat,
}

/// Devices that the guest may still give up.
#[derive(Debug, Default)]
struct Open {
    devices: BTreeSet<String>,
    /// Whether at least one of all devices has never left.
    some_stay: bool,
}

impl Open {
    fn new<'a>(fates: impl Iterator<Item = (&'a str, Fate)>) -> Self {
        let mut open = Self::default();
        for (id, fate) in fates {
            match fate {
                Fate::Left => {}
                Fate::Stays => open.some_stay = true,
                Fate::Open => {
                    open.devices.insert(id.to_owned());
                }
            }
        }
        open
    }

    fn decide(&mut self, id: &str, fate: Fate) {
        if fate != Fate::Open && self.devices.remove(id) {
            self.some_stay |= fate == Fate::Stays;
        }
    }

    /// Whether to tell applications to return; `None` as long as that is undecided.
    fn is_to_tell(&self) -> Option<bool> {
        self.devices.is_empty().then_some(self.some_stay)
    }
}

/// Applications that return when the fate of their devices is known.
pub(in super::super) struct Return {
    seats: Seats,
    open: Open,
}

impl Return {
    pub(super) fn new(seats: Seats, fate: impl Fn(&str) -> Fate) -> Self {
        let names = seats.devices.iter().map(String::as_str);
        let open = Open::new(names.map(|id| (id, fate(id))));
        if !open.devices.is_empty() {
            log::info!(
                "applications go on by {:?} until the guest has answered whether it gives {:?} up",
                seats.id,
                open.devices
            );
        }
        Self { seats, open }
    }

    /// Whether they use this accelerator meanwhile.
    pub(in super::super) fn is_by(&self, accel: &str) -> bool {
        self.seats.id == accel
    }

    /// Returns itself, or `None` if everything is known: then applications have been told to return if necessary.
    pub(super) fn unless_due(self) -> Option<Self> {
        match self.open.is_to_tell() {
            None => Some(self),
            Some(is_to_tell) => {
                if is_to_tell {
                    self.seats.come_back();
                }
                None
            }
        }
    }
}

impl Seats {
    /// Makes applications return to the devices, of which some are still present.
    fn come_back(self) {
        let id = self.id;
        let done = move |seated: moving::Seated| {
            if let Err(why) = accel::applications_served(&seated.by, seated.outcome) {
                log::warn!("{id:?}: after a migration that failed: {why}");
            }
        };
        let started = self
            .port
            .start_seats(Seat::Local, accel::SEATED, Cancel::default(), done);
        if let Err(error) = started {
            log::error!("no thread has applications go back to their device: {error}");
        }
    }
}

impl Migrations {
    /// Records the fate of a device that a guest was asked for.
    pub(in super::super) fn decide(&mut self, id: &str, fate: Fate) {
        let returns = std::mem::take(&mut self.returns).into_iter();
        let returns = returns.filter_map(|mut it| {
            it.open.decide(id, fate);
            it.unless_due()
        });
        self.returns = returns.collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_goes_back_to_a_device_that_its_guest_may_give_up_yet() {
        let open = |fates: &[(&'static str, Fate)]| Open::new(fates.iter().copied());
        assert_eq!(open(&[("a", Fate::Stays)]).is_to_tell(), Some(true));
        // The guest's agent notices when the device is back.
        assert_eq!(open(&[("a", Fate::Left)]).is_to_tell(), Some(false));
        for (becomes, is_to_tell) in [(Fate::Stays, true), (Fate::Left, false)] {
            let mut one = open(&[("a", Fate::Open)]);
            assert_eq!(one.is_to_tell(), None);
            one.decide("b", Fate::Stays);
            one.decide("a", Fate::Open);
            assert_eq!(one.is_to_tell(), None);
            one.decide("a", becomes);
            assert_eq!(one.is_to_tell(), Some(is_to_tell));
            let mut two = open(&[("a", Fate::Open), ("b", Fate::Stays)]);
            assert_eq!(two.is_to_tell(), None);
            two.decide("a", becomes);
            assert_eq!(two.is_to_tell(), Some(true));
        }
    }
}
