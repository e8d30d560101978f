//! PTIMER: nanoseconds since a time that the driver sets, and an alarm.

const INTERRUPT: u32 = 0x00_9100;
const ENABLE: u32 = 0x00_9140;
const TIME_LOW: u32 = 0x00_9400;
const TIME_HIGH: u32 = 0x00_9410;
const ALARM: u32 = 0x00_9420;

/// The timer.
pub struct Timer {
    /// Added to the caller's time.
    offset: u64,
    /// High half that takes effect with the next write of the low half.
    high: u32,
    enabled: bool,
    alarm: u32,
    state: Alarm,
}

#[derive(Clone, Copy, Eq, PartialEq)]
enum Alarm {
    Off,
    /// Goes off at this time, on the caller's clock.
    At(u64),
    Pending,
}

impl Timer {
    /// Creates a timer that starts at 0.
    pub fn new(now: u64) -> Self {
        Self {
            offset: now.wrapping_neg(),
            high: 0,
            enabled: false,
            alarm: 0,
            state: Alarm::Off,
        }
    }

    fn time(&self, now: u64) -> u64 {
        now.wrapping_add(self.offset)
    }

    /// Reads a register, if it belongs to the timer.
    pub fn read(&mut self, at: u32, now: u64) -> Option<u32> {
        Some(match at {
            INTERRUPT => u32::from(self.alarm_rang(now)),
            ENABLE => u32::from(self.enabled),
            TIME_LOW => self.time(now) as u32 & !0x1f,
            TIME_HIGH => (self.time(now) >> 32) as u32,
            ALARM => self.alarm,
            _ => return None,
        })
    }

    /// Writes a register, if it belongs to the timer.
    pub fn write(&mut self, at: u32, value: u32, now: u64) -> bool {
        match at {
            INTERRUPT => {
                if value & 1 != 0 && self.alarm_rang(now) {
                    self.state = Alarm::Off;
                }
            }
            ENABLE => {
                self.enabled = value & 1 != 0;
                self.set_alarm(now);
            }
            TIME_HIGH => self.high = value,
            TIME_LOW => {
                let time = u64::from(self.high) << 32 | u64::from(value);
                self.offset = time.wrapping_sub(now);
                self.set_alarm(now);
            }
            ALARM => {
                self.alarm = value;
                self.set_alarm(now);
            }
            _ => return false,
        }
        true
    }

    /// Sets the alarm, which goes off when the low half of the time next equals the register.
    fn set_alarm(&mut self, now: u64) {
        if self.state == Alarm::Pending {
            return;
        }
        let left = self.alarm.wrapping_sub(self.time(now) as u32);
        self.state = match self.enabled {
            true => Alarm::At(now.saturating_add(u64::from(left))),
            false => Alarm::Off,
        };
    }

    fn alarm_rang(&mut self, now: u64) -> bool {
        if let Alarm::At(at) = self.state
            && at <= now
        {
            self.state = Alarm::Pending;
        }
        self.state == Alarm::Pending
    }

    /// Whether the timer requests an interrupt.
    pub fn alarm_pending(&mut self, now: u64) -> bool {
        self.alarm_rang(now) && self.enabled
    }

    /// When the alarm goes off, on the caller's clock.
    pub fn next_alarm(&self) -> Option<u64> {
        match self.state {
            Alarm::At(at) => Some(at),
            Alarm::Off | Alarm::Pending => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_sets_the_time() {
        let mut timer = Timer::new(1000);
        timer.write(TIME_HIGH, 7, 5000);
        timer.write(TIME_LOW, 64, 5000);
        assert_eq!(timer.read(TIME_HIGH, 5032), Some(7));
        assert_eq!(timer.read(TIME_LOW, 5032), Some(96));
    }

    #[test]
    fn an_alarm_rings_once_and_only_when_enabled() {
        let mut timer = Timer::new(0);
        timer.write(ALARM, 100, 0);
        assert_eq!(timer.next_alarm(), None);
        timer.write(ENABLE, 1, 0);
        assert_eq!(timer.next_alarm(), Some(100));
        assert!(!timer.alarm_pending(99));
        assert!(timer.alarm_pending(100));
        timer.write(INTERRUPT, 1, 100);
        assert!(!timer.alarm_pending(200));
    }
}
