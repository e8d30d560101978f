//! The CMOS clock (MC146818): the date for firmware and for systems that know no better clock, and
//! the size of RAM.
//!
//! It shows the host's time in UTC, whatever the guest sets. There are no alarms and no interrupts.
//! Its memory holds what the guest writes, as long as the machine exists.

use std::{
    sync::{Mutex, MutexGuard},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use base::Unpoisoned;
use device_model::{
    bus::BusDevice,
    guest_event::{GuestEvent, GuestEventHandler},
};
use serde::{Deserialize, Serialize};

/// Offsets from port 0x70.
const INDEX: u64 = 0;
const DATA: u64 = 1;

/// Number of registers. Bit 7 of the index masks non-maskable interrupts.
const REGISTERS: usize = 128;
const REGISTER_MASK: u8 = 0x7f;

const SECONDS: u8 = 0x00;
const MINUTES: u8 = 0x02;
const HOURS: u8 = 0x04;
const DAY_OF_WEEK: u8 = 0x06;
const DAY: u8 = 0x07;
const MONTH: u8 = 0x08;
const YEAR: u8 = 0x09;
const STATUS_A: u8 = 0x0a;
const STATUS_B: u8 = 0x0b;
const STATUS_C: u8 = 0x0c;
const STATUS_D: u8 = 0x0d;
/// RAM between 16 MiB and 4 GiB in units of 64 KiB, two registers.
const RAM_BELOW_4G: usize = 0x34;
const CENTURY: u8 = 0x32;
/// RAM above 4 GiB in units of 64 KiB, three registers.
const RAM_ABOVE_4G: usize = 0x5b;

/// Writing 0 at this index, which is that of the shutdown status with interrupts masked, resets the
/// machine.
const RESET_INDEX: u8 = 0x8f;

/// Status A: the date is about to change.
const UPDATE_IN_PROGRESS: u8 = 1 << 7;
/// Status A: the clock runs at 32,768 Hz.
const RATE: u8 = 0b010 << 4;
/// Status B: the date is in binary and not in BCD; hours are 0 to 23 and not 1 to 12.
const BINARY: u8 = 1 << 2;
const HOURS_24: u8 = 1 << 1;
/// Status D: the date is valid.
const VALID: u8 = 1 << 7;
/// In hours from 1 to 12: after noon.
const AFTER_NOON: u8 = 1 << 7;

/// The clock announces an update this long before.
const NOTICE: Duration = Duration::from_micros(244);

/// Saved state of the clock.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct CmosState {
    index: u8,
    /// The registers that the guest has written, in pairs of index and value.
    written: Vec<(u8, u8)>,
}

struct State {
    index: u8,
    registers: [u8; REGISTERS],
    written: [bool; REGISTERS],
}

/// The clock. Decodes ports 0x70 and 0x71 (2 bytes).
pub struct Cmos {
    state: Mutex<State>,
    now: fn() -> SystemTime,
    events: GuestEventHandler,
}

impl Cmos {
    /// Creates a clock of a machine with this much RAM in bytes below and above 4 GiB. It reports
    /// [`GuestEvent::Reset`] to `events`.
    pub fn new(below_4g: u64, above_4g: u64, events: GuestEventHandler) -> Self {
        let mut registers = [0; REGISTERS];
        registers[usize::from(STATUS_B)] = HOURS_24;
        let units = |bytes: u64, largest: u64| (bytes >> 16).min(largest).to_le_bytes();
        let low = units(below_4g.saturating_sub(16 << 20), 0xffff);
        registers[RAM_BELOW_4G..][..2].copy_from_slice(&low[..2]);
        let high = units(above_4g, 0xff_ffff);
        registers[RAM_ABOVE_4G..][..3].copy_from_slice(&high[..3]);
        Self {
            state: Mutex::new(State {
                index: 0,
                registers,
                written: [false; REGISTERS],
            }),
            now: SystemTime::now,
            events,
        }
    }

    /// Saves the state.
    pub fn save(&self) -> CmosState {
        let state = self.lock();
        let all = (0..).zip(state.registers.iter().zip(&state.written));
        CmosState {
            index: state.index,
            written: all
                .filter(|(_, (_, written))| **written)
                .map(|(index, (value, _))| (index, *value))
                .collect(),
        }
    }

    /// Loads a saved state. Any value is acceptable.
    pub fn restore(&self, saved: &CmosState) {
        let mut state = self.lock();
        state.index = saved.index;
        for (index, value) in &saved.written {
            state.set(*index, *value);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock_unpoisoned()
    }
}

impl State {
    fn set(&mut self, index: u8, value: u8) {
        let at = usize::from(index & REGISTER_MASK);
        self.registers[at] = value;
        self.written[at] = true;
    }

    /// The selected register at a time since 1970.
    fn get(&self, now: Duration) -> u8 {
        let index = self.index & REGISTER_MASK;
        let mode = self.registers[usize::from(STATUS_B)];
        let date = Date::of(now.as_secs());
        let number = |value: u8| match mode & BINARY {
            0 => bcd(value),
            _ => value,
        };
        match index {
            SECONDS => number(date.second),
            MINUTES => number(date.minute),
            HOURS if mode & HOURS_24 != 0 => number(date.hour),
            HOURS => {
                let after_noon = if date.hour >= 12 { AFTER_NOON } else { 0 };
                number((date.hour + 11) % 12 + 1) | after_noon
            }
            DAY_OF_WEEK => number(date.day_of_week),
            DAY => number(date.day),
            MONTH => number(date.month),
            YEAR => number((date.year % 100) as u8),
            CENTURY => number((date.year / 100 % 100) as u8),
            STATUS_A => {
                let left = Duration::from_secs(1) - Duration::from_nanos(now.subsec_nanos().into());
                let update = if left <= NOTICE {
                    UPDATE_IN_PROGRESS
                } else {
                    0
                };
                RATE | update
            }
            // There are no interrupts.
            STATUS_C => 0,
            STATUS_D => VALID,
            _ => self.registers[usize::from(index)],
        }
    }
}

impl BusDevice for Cmos {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        let Some(first) = data.first_mut() else {
            return;
        };
        let state = self.lock();
        match offset {
            INDEX => *first = state.index,
            DATA => {
                let now = (self.now)().duration_since(UNIX_EPOCH);
                *first = state.get(now.unwrap_or_default());
            }
            _ => {}
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        // The registers are bytes.
        let &[value] = data else {
            return;
        };
        let mut state = self.lock();
        match offset {
            INDEX => state.index = value,
            DATA if state.index == RESET_INDEX && value == 0 => {
                drop(state);
                (self.events)(GuestEvent::Reset);
            }
            DATA => {
                let index = state.index;
                state.set(index, value);
            }
            _ => {}
        }
    }
}

/// Two decimal digits, in four bits each.
fn bcd(value: u8) -> u8 {
    ((value / 10) << 4) | (value % 10)
}

/// A time in UTC.
struct Date {
    year: u64,
    /// 1 to 12.
    month: u8,
    /// 1 to 31.
    day: u8,
    /// 1 to 7, from Sunday on.
    day_of_week: u8,
    hour: u8,
    minute: u8,
    second: u8,
}

impl Date {
    /// The date at a number of seconds since 1970, in the Gregorian calendar.
    fn of(seconds: u64) -> Self {
        /// Days of 400 years, of a century without its leap day at the end, and of four years.
        const ERA: u64 = 146_097;
        const CENTURY: u64 = 36_524;
        const FOUR_YEARS: u64 = 1_461;
        let (days, of_day) = (seconds / 86_400, seconds % 86_400);
        // Years that begin on 1 March have their leap day at the end. 719,468 days lie between
        // 1 March of the year 0 and 1970.
        let since = days + 719_468;
        let (era, day) = (since / ERA, since % ERA);
        let year = (day - day / (FOUR_YEARS - 1) + day / CENTURY - day / (ERA - 1)) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        // From March on, five months have 153 days.
        let month = (5 * day + 2) / 153;
        let of_month = day - (153 * month + 2) / 5 + 1;
        let in_new_year = month >= 10;
        let byte = |value: u64| u8::try_from(value).unwrap_or(u8::MAX);
        Self {
            year: era * 400 + year + u64::from(in_new_year),
            month: byte(if in_new_year { month - 9 } else { month + 3 }),
            day: byte(of_month),
            // 1970 began on a Thursday.
            day_of_week: byte((days + 4) % 7 + 1),
            hour: byte(of_day / 3600),
            minute: byte(of_day / 60 % 60),
            second: byte(of_day % 60),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use super::*;

    /// 2024-02-29, a Thursday, 23:59:58 and 0.9998 seconds.
    fn leap_day() -> SystemTime {
        UNIX_EPOCH + Duration::new(1_709_251_198, 999_800_000)
    }

    fn clock(now: fn() -> SystemTime) -> (Cmos, mpsc::Receiver<GuestEvent>) {
        let (sender, events) = mpsc::channel();
        let sender = Mutex::new(sender);
        let handler = move |event| sender.lock().unwrap().send(event).unwrap();
        let clock = Cmos::new(3 << 30, 5 << 30, Box::new(handler));
        (Cmos { now, ..clock }, events)
    }

    fn read(clock: &Cmos, index: u8) -> u8 {
        clock.write(INDEX, &[index]);
        let mut data = [0xaa];
        clock.read(DATA, &mut data);
        data[0]
    }

    fn write(clock: &Cmos, index: u8, value: u8) {
        clock.write(INDEX, &[index]);
        clock.write(DATA, &[value]);
    }

    /// Seconds, minutes, hours, weekday, day, month, year, century.
    fn shown(clock: &Cmos) -> [u8; 8] {
        [0, 2, 4, 6, 7, 8, 9, 0x32].map(|index| read(clock, index))
    }

    #[test]
    fn the_date_is_the_hosts_in_each_form() {
        let (clock, _events) = clock(leap_day);
        let bcd = [0x58, 0x59, 0x23, 5, 0x29, 2, 0x24, 0x20];
        assert_eq!(shown(&clock), bcd);
        assert_eq!(read(&clock, 0x0b), HOURS_24);
        write(&clock, 0x0b, BINARY | HOURS_24);
        assert_eq!(shown(&clock), [58, 59, 23, 5, 29, 2, 24, 20]);
        write(&clock, 0x0b, 0);
        assert_eq!(read(&clock, 4), 0x11 | AFTER_NOON);
        // The host's time is not for the guest to set.
        write(&clock, 0x0b, HOURS_24);
        for index in [0, 2, 4, 6, 7, 8, 9, 0x32] {
            write(&clock, index, 1);
        }
        assert_eq!(shown(&clock), bcd);
        // Valid, without interrupts, and about to be updated.
        assert_eq!(
            [0x0a, 0x0c, 0x0d].map(|at| read(&clock, at)),
            [0xa0, 0, 0x80]
        );
    }

    #[test]
    fn hours_before_and_after_noon_count_from_one() {
        for (seconds, hour) in [
            (0, 0x12),
            (3600, 0x01),
            (11 * 3600, 0x11),
            (12 * 3600, 0x92),
            (13 * 3600, 0x81),
        ] {
            let mut state = clock(leap_day).0.state.into_inner().unwrap();
            state.set(STATUS_B, 0);
            state.index = HOURS;
            assert_eq!(state.get(Duration::from_secs(seconds)), hour, "{seconds}");
            state.index = STATUS_A;
            assert_eq!(state.get(Duration::from_secs(seconds)), RATE);
        }
    }

    #[test]
    fn every_day_of_five_centuries_follows_the_one_before() {
        let (mut year, mut month, mut day) = (1970, 1, 1);
        for days in 0..500 * 365 {
            let date = Date::of(days * 86_400);
            assert_eq!((date.year, date.month, date.day), (year, month, day));
            let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let last = match month {
                2 => 28 + u8::from(leap),
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            (month, day) = if day == last {
                (month + 1, 1)
            } else {
                (month, day + 1)
            };
            if month == 13 {
                (year, month) = (year + 1, 1);
            }
        }
        // The end of time is a date, too.
        Date::of(u64::MAX);
    }

    #[test]
    fn the_size_of_ram_is_in_units_of_64_kib() {
        let (clock, _events) = clock(leap_day);
        let number = |registers: &[u8]| {
            let bytes = registers
                .iter()
                .rev()
                .map(|at| u64::from(read(&clock, *at)));
            bytes.fold(0, |number, byte| number << 8 | byte)
        };
        assert_eq!(number(&[0x34, 0x35]) << 16, (3 << 30) - (16 << 20));
        assert_eq!(number(&[0x5b, 0x5c, 0x5d]) << 16, 5 << 30);
        let small = Cmos::new(8 << 20, 0, Box::new(|_| {}));
        assert_eq!([0x34, 0x35, 0x5b].map(|at| read(&small, at)), [0; 3]);
    }

    #[test]
    fn only_a_zero_for_the_shutdown_status_with_interrupts_masked_resets() {
        let (clock, events) = clock(leap_day);
        write(&clock, 0x8f, 0);
        assert_eq!(events.try_recv(), Ok(GuestEvent::Reset));
        write(&clock, 0x0f, 0);
        write(&clock, 0x8f, 0x0a);
        clock.write(DATA, &[0, 0]);
        clock.write(2, &[0]);
        assert!(events.try_recv().is_err());
        assert_eq!(read(&clock, 0x0f), 0x0a);
    }

    #[test]
    fn what_the_guest_has_written_survives_a_snapshot() {
        let (clock, _events) = clock(leap_day);
        write(&clock, 0x0f, 5);
        write(&clock, 0xff, 7);
        let saved = serde_json::to_value(clock.save()).unwrap();
        let restored = Arc::new(Cmos::new(1 << 30, 0, Box::new(|_| {})));
        restored.restore(&serde_json::from_value(saved).unwrap());
        let mut data = [0, 0];
        restored.read(INDEX, &mut data);
        assert_eq!(data, [0xff, 0xff]);
        assert_eq!([0x0f, 0x7f].map(|at| read(&restored, at)), [5, 7]);
        // Its own RAM, and not that of the machine that was saved.
        assert_eq!(read(&restored, 0x35), 0x3f);
        restored.restore(&CmosState {
            index: 255,
            written: vec![(255, 255); 300],
        });
        restored.read(DATA, &mut []);
    }
}
