//! The fixed hardware of a hardware-reduced ACPI platform: reset, sleep and timer registers.

use std::{
    sync::{Mutex, MutexGuard},
    time::{Duration, Instant},
};

use arch::layout::{ACPI_RESET_VALUE, ACPI_SLEEP_TYPE_S5};
use base::Unpoisoned;
use device_model::{
    bus::BusDevice,
    guest_event::{GuestEvent, GuestEventHandler},
};
use serde::{Deserialize, Serialize};

use super::registers;

const RESET: u64 = 0;
const SLEEP_CONTROL: u64 = 1;

/// Sleep control register (ACPI 6.5, 4.8.3.7): enter the state given by the type field.
const SLEEP_ENABLE: u8 = 1 << 5;
const SLEEP_TYPE_SHIFT: u8 = 2;
const SLEEP_TYPE_MASK: u8 = 0b111;

/// Rate of the power management timer in Hz (ACPI 6.5, 4.8.2.1).
pub const PM_TIMER_HZ: u32 = 3_579_545;

/// Reset register, sleep control and sleep status, one byte each in this order (3 bytes).
///
/// The value that enters S5 does so in the reset register, too: edk2 writes it there (CloudHv.h,
/// `CLOUDHV_ACPI_SHUTDOWN_IO_ADDRESS`).
///
/// They have no state: the status register always reads 0, because no sleep state is ever left.
pub struct PowerRegisters {
    events: GuestEventHandler,
}

impl PowerRegisters {
    /// Creates registers that report [`GuestEvent::Reset`] and [`GuestEvent::Shutdown`] to
    /// `events`.
    pub fn new(events: GuestEventHandler) -> Self {
        Self { events }
    }
}

impl BusDevice for PowerRegisters {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let &[value] = data else {
            return;
        };
        let sleep_type = (value >> SLEEP_TYPE_SHIFT) & SLEEP_TYPE_MASK;
        match offset {
            RESET if value == ACPI_RESET_VALUE => (self.events)(GuestEvent::Reset),
            RESET | SLEEP_CONTROL
                if value & SLEEP_ENABLE != 0 && sleep_type == ACPI_SLEEP_TYPE_S5 =>
            {
                (self.events)(GuestEvent::Shutdown);
            }
            _ => {}
        }
    }
}

/// Saved state of the timer.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct PmTimerState {
    /// The counter's value.
    pub ticks: u32,
}

impl PmTimerState {
    /// Advances the counter as if it had run for this time since it was saved.
    pub fn advance(&mut self, by: Duration) {
        self.ticks = self.ticks.wrapping_add(ticks_of(by.as_nanos()));
    }
}

/// The power management timer: a 32-bit counter that runs at [`PM_TIMER_HZ`] (4 bytes).
#[derive(Debug)]
pub struct PmTimer {
    /// A point in time, and the counter's value then.
    base: Mutex<(Instant, u32)>,
}

impl Default for PmTimer {
    fn default() -> Self {
        Self::new()
    }
}

impl PmTimer {
    /// Creates a timer that starts at 0 now.
    pub fn new() -> Self {
        Self {
            base: Mutex::new((Instant::now(), 0)),
        }
    }

    /// Saves the state.
    pub fn save(&self) -> PmTimerState {
        PmTimerState {
            ticks: self.ticks(),
        }
    }

    /// Continues to count from a saved state.
    pub fn restore(&self, state: PmTimerState) {
        *self.lock() = (Instant::now(), state.ticks);
    }

    fn ticks(&self) -> u32 {
        let (moment, ticks) = *self.lock();
        ticks.wrapping_add(ticks_of(moment.elapsed().as_nanos()))
    }

    fn lock(&self) -> MutexGuard<'_, (Instant, u32)> {
        self.base.lock_unpoisoned()
    }
}

/// Number of ticks in `nanoseconds`; it wraps every 20 minutes.
fn ticks_of(nanoseconds: u128) -> u32 {
    // Cannot overflow: `Duration` holds less than 2^94 nanoseconds. The truncation implements the
    // wrap.
    (nanoseconds * u128::from(PM_TIMER_HZ) / 1_000_000_000) as u32
}

impl BusDevice for PmTimer {
    fn read(&self, offset: u64, data: &mut [u8]) {
        registers::read(&self.ticks().to_le_bytes(), offset, data);
    }

    fn write(&self, _offset: u64, _data: &[u8]) {}
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn registers() -> (PowerRegisters, Arc<Mutex<Vec<GuestEvent>>>) {
        let events = Arc::<Mutex<Vec<GuestEvent>>>::default();
        let seen = Arc::clone(&events);
        let handler = move |event| seen.lock().unwrap().push(event);
        (PowerRegisters::new(Box::new(handler)), events)
    }

    #[test]
    fn only_s5_powers_off_and_only_the_reset_value_resets() {
        let (device, events) = registers();
        device.write(1, &[5 << 2 | 1 << 5]);
        device.write(0, &[1]);
        device.write(0, &[0x34]);
        assert_eq!(
            *events.lock().unwrap(),
            [
                GuestEvent::Shutdown,
                GuestEvent::Reset,
                GuestEvent::Shutdown
            ]
        );
        for (offset, value) in [
            (1, 5 << 2),
            (1, 3 << 2 | 1 << 5),
            (0, 0),
            (2, 0x34),
            (0, 5 << 2),
        ] {
            device.write(offset, &[value]);
        }
        device.write(0, &[1, 0]);
        device.write(u64::MAX, &[1]);
        device.write(0, &[]);
        assert_eq!(events.lock().unwrap().len(), 3);
    }

    #[test]
    fn the_timer_counts_at_its_rate_and_wraps() {
        assert_eq!(ticks_of(1_000_000_000), PM_TIMER_HZ);
        assert_eq!(ticks_of(0), 0);
        let twenty_minutes = 1200 * 1_000_000_000;
        assert_eq!(ticks_of(twenty_minutes), PM_TIMER_HZ.wrapping_mul(1200));
    }

    #[test]
    fn a_restored_timer_goes_on_from_where_it_was() {
        let timer = PmTimer::new();
        timer.restore(PmTimerState { ticks: 0x4000_0000 });
        let mut data = [0; 4];
        timer.read(0, &mut data);
        assert!((0x4000_0000..0x6000_0000).contains(&u32::from_le_bytes(data)));
        timer.read(4, &mut data);
        assert_eq!(data, [0; 4]);
        let mut state = PmTimerState { ticks: 7 };
        state.advance(Duration::from_secs(2));
        assert_eq!(state.ticks, 7 + 2 * PM_TIMER_HZ);
        state.advance(Duration::MAX);
    }
}
