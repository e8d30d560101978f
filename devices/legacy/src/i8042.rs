//! The keyboard controller (8042), of which a VM needs only the line to the CPU's reset pin.
//!
//! Linux pulses that line when other ways to reboot fail; with `acpi=off` it also probes for a
//! keyboard. The commands for which the probe waits (up to half a second each) are completed
//! immediately, and report that nothing is connected to the auxiliary port. Bytes for the keyboard
//! itself are acknowledged and ignored.

use std::sync::Mutex;

use base::Unpoisoned;
use device_model::{
    bus::BusDevice,
    guest_event::{GuestEvent, GuestEventHandler},
};
use serde::{Deserialize, Serialize};

/// Offsets from port 0x60.
const DATA: u64 = 0;
/// Port 0x61: the timer's gate and output. KVM's timer handles it, unless that is disabled.
const SYSTEM_CONTROL: u64 = 1;
const COMMAND_STATUS: u64 = 4;

const STATUS_OUTPUT_FULL: u8 = 1 << 0;
const STATUS_SELF_TESTED: u8 = 1 << 2;
/// The keyboard is not locked; otherwise Linux logs a complaint.
const STATUS_UNLOCKED: u8 = 1 << 4;

const TIMER_2_OUTPUT: u8 = 1 << 5;

const READ_CONFIG: u8 = 0x20;
const WRITE_CONFIG: u8 = 0x60;
const TEST_AUX: u8 = 0xa9;
const SELF_TEST: u8 = 0xaa;
const TEST_KEYBOARD: u8 = 0xab;
const READ_OUTPUT_PORT: u8 = 0xd0;
const WRITE_OUTPUT_PORT: u8 = 0xd1;
const WRITE_KEYBOARD_BUFFER: u8 = 0xd2;
const WRITE_AUX_BUFFER: u8 = 0xd3;
const WRITE_AUX: u8 = 0xd4;
const PULSE_RESET: u8 = 0xfe;

const SELF_TEST_PASSED: u8 = 0x55;
/// "Clock line stuck low": nothing usable is connected.
const TEST_FAILED: u8 = 0x01;
const ACKNOWLEDGE: u8 = 0xfa;
/// A20 is enabled, and reset is not asserted (the line is active-low).
const OUTPUT_PORT: u8 = 0b11;

/// Saved state of the controller.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct I8042State {
    /// The configuration byte.
    pub config: u8,
    /// The byte that the next read of the data port returns, if the output buffer is full.
    pub output: Option<u8>,
    /// A command that waits for its byte on the data port.
    pub command: Option<u8>,
}

/// The controller. Decodes ports 0x60 to 0x64 (5 bytes).
pub struct I8042 {
    state: Mutex<I8042State>,
    events: GuestEventHandler,
}

impl I8042 {
    /// Creates a controller that reports [`GuestEvent::Reset`] to `events`.
    pub fn new(events: GuestEventHandler) -> Self {
        Self {
            state: Mutex::default(),
            events,
        }
    }

    /// Saves the state.
    pub fn save(&self) -> I8042State {
        *self.lock()
    }

    /// Loads a saved state. Any value is acceptable.
    pub fn restore(&self, state: I8042State) {
        *self.lock() = state;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, I8042State> {
        self.state.lock_unpoisoned()
    }
}

impl I8042State {
    fn status(&self) -> u8 {
        let full = if self.output.is_some() {
            STATUS_OUTPUT_FULL
        } else {
            0
        };
        STATUS_UNLOCKED | STATUS_SELF_TESTED | full
    }

    /// Handles a command; true if it requests a reset.
    fn command(&mut self, command: u8) -> bool {
        self.command = None;
        match command {
            READ_CONFIG => self.output = Some(self.config),
            TEST_AUX => self.output = Some(TEST_FAILED),
            SELF_TEST => self.output = Some(SELF_TEST_PASSED),
            TEST_KEYBOARD => self.output = Some(0),
            READ_OUTPUT_PORT => self.output = Some(OUTPUT_PORT),
            WRITE_CONFIG
            | WRITE_OUTPUT_PORT
            | WRITE_KEYBOARD_BUFFER
            | WRITE_AUX_BUFFER
            | WRITE_AUX => self.command = Some(command),
            // Commands 0xf0 to 0xff pulse the output lines whose bit is 0; line 0 is reset.
            PULSE_RESET => return true,
            _ => {}
        }
        false
    }

    /// Handles a data byte; true if it requests a reset.
    fn data(&mut self, value: u8) -> bool {
        match self.command.take() {
            Some(WRITE_CONFIG) => self.config = value,
            // The reset line is active-low.
            Some(WRITE_OUTPUT_PORT) => return value & 1 == 0,
            Some(WRITE_KEYBOARD_BUFFER | WRITE_AUX_BUFFER) => self.output = Some(value),
            Some(_) => {}
            None => self.output = Some(ACKNOWLEDGE),
        }
        false
    }
}

impl BusDevice for I8042 {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let Some(first) = data.first_mut() else {
            return;
        };
        let mut state = self.lock();
        match offset {
            DATA => *first = state.output.take().unwrap_or(0),
            SYSTEM_CONTROL => *first = TIMER_2_OUTPUT,
            COMMAND_STATUS => *first = state.status(),
            _ => {}
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        // The registers are bytes: a wider access is not a command.
        let &[value] = data else {
            return;
        };
        let reset = match offset {
            DATA => self.lock().data(value),
            COMMAND_STATUS => self.lock().command(value),
            _ => false,
        };
        if reset {
            (self.events)(GuestEvent::Reset);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use super::*;

    fn controller() -> (I8042, mpsc::Receiver<GuestEvent>) {
        let (sender, events) = mpsc::channel();
        let sender = Mutex::new(sender);
        let handler = move |event| sender.lock().unwrap().send(event).unwrap();
        (I8042::new(Box::new(handler)), events)
    }

    fn read(device: &I8042, offset: u64) -> u8 {
        let mut data = [0xaa];
        device.read(offset, &mut data);
        data[0]
    }

    #[test]
    fn pulsing_the_reset_line_reports_a_reset() {
        let (device, events) = controller();
        device.write(4, &[0xfe]);
        assert_eq!(events.try_recv(), Ok(GuestEvent::Reset));
        device.write(4, &[0xd1]);
        device.write(0, &[0b10]);
        assert_eq!(events.try_recv(), Ok(GuestEvent::Reset));
        device.write(4, &[0xd1]);
        device.write(0, &[0b11]);
        device.write(0, &[0xfe]);
        device.write(4, &[0xff]);
        assert!(events.try_recv().is_err());
    }

    #[test]
    fn a_probing_driver_gets_every_answer_without_waiting() {
        let (device, _events) = controller();
        for (command, answer) in [(0xaa, 0x55), (0xab, 0), (0x20, 0), (0xa9, 1), (0xd0, 3)] {
            assert_eq!(read(&device, 4) & 1, 0, "{command:#x}");
            device.write(4, &[command]);
            assert_eq!(read(&device, 4) & 1, 1, "{command:#x}");
            assert_eq!(read(&device, 0), answer, "{command:#x}");
        }
        device.write(4, &[0x60]);
        device.write(0, &[0x45]);
        device.write(4, &[0x20]);
        assert_eq!(read(&device, 0), 0x45);
        assert_eq!(read(&device, 4) & 0x10, 0x10);
    }

    #[test]
    fn odd_offsets_and_widths_change_nothing() {
        let (device, events) = controller();
        let before = device.save();
        for offset in [1, 2, 3, 5, u64::MAX] {
            device.write(offset, &[0xfe]);
        }
        device.write(4, &[0xfe; 4]);
        device.write(4, &[]);
        let mut data = [0xff; 8];
        device.read(4, &mut data);
        assert_eq!(data[1..], [0; 7]);
        device.read(0, &mut []);
        assert_eq!(device.save(), before);
        assert!(events.try_recv().is_err());
    }

    #[test]
    fn a_pending_answer_survives_a_snapshot() {
        let (device, _events) = controller();
        device.write(4, &[0xaa]);
        let (restored, _events) = controller();
        let restored = Arc::new(restored);
        restored.restore(device.save());
        assert_eq!(read(&restored, 0), 0x55);
    }
}
