//! The serial port: a 16550A (crate vm-superio) whose input never overruns.

use std::{
    io::{self, Write},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use acpi_tables::{Aml, AmlSink, aml};
use base::Unpoisoned;
use console::InputSink;
use device_model::bus::BusDevice;
use serde::{Deserialize, Serialize};
use vm_superio::{
    Trigger,
    serial::{self as uart, SerialEvents},
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Size of the emulated receive FIFO in bytes.
const FIFO_SIZE: usize = 64;
/// Interrupts that a 16550A can enable.
const INTERRUPT_ENABLE_MASK: u8 = 0x0f;
const LINE_STATUS_DATA_READY: u8 = 1;
const MODEM_CONTROL: u8 = 4;

/// A saved serial port: its registers (16550A data sheet names) and unread input.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct SerialState {
    /// Divisor latch, low byte first.
    pub baud_divisor: [u8; 2],
    /// Interrupt enable register.
    pub interrupt_enable: u8,
    /// Interrupt identification register.
    pub interrupt_identification: u8,
    /// Line control register.
    pub line_control: u8,
    /// Line status register.
    pub line_status: u8,
    /// Modem control register.
    pub modem_control: u8,
    /// Modem status register.
    pub modem_status: u8,
    /// Scratch register.
    pub scratch: u8,
    /// Received bytes that the guest has not read, at most 64.
    pub input: Vec<u8>,
}

/// Why a saved state was refused.
#[derive(Debug, thiserror::Error)]
pub enum SerialRestoreError {
    /// The state has more input than the FIFO holds.
    #[error("the saved serial port holds {0} bytes of input, its FIFO has room for {FIFO_SIZE}")]
    TooMuchInput(usize),
    /// The pending interrupt could not be raised.
    #[error("cannot raise the serial port's interrupt")]
    Interrupt(#[source] io::Error),
}

#[derive(Clone)]
struct Irq(Arc<EventFd>);

impl Trigger for Irq {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Callbacks of the emulated UART; called with the port locked.
struct Progress {
    /// Written when the FIFO becomes empty while input waits for it.
    room: EventFd,
    /// Input was rejected since `room` was last written.
    starved: AtomicBool,
}

impl Progress {
    fn signal_room(&self) {
        if self.starved.swap(false, Ordering::Relaxed) {
            // Fails only if the counter is full, in which case it is readable anyway.
            let _ = self.room.write(1);
        }
    }
}

impl SerialEvents for Progress {
    fn buffer_read(&self) {}

    fn out_byte(&self) {}

    fn tx_lost_byte(&self) {}

    fn in_buffer_empty(&self) {
        self.signal_room();
    }
}

type Uart = uart::Serial<Irq, Arc<Progress>, Box<dyn Write + Send>>;

/// A 16550A. Decodes eight ports; input arrives through [`InputSink`].
pub struct Serial {
    uart: Mutex<Uart>,
    irq: Irq,
    progress: Arc<Progress>,
}

impl Serial {
    /// Creates a port that raises `irq` (an edge-triggered irqfd) and writes the guest's output to
    /// `out`. `out` is called on vCPU threads, so it must not block: see [`ConsoleOutput`].
    ///
    /// [`ConsoleOutput`]: console::ConsoleOutput
    pub fn new(irq: EventFd, out: Box<dyn Write + Send>) -> io::Result<Self> {
        let irq = Irq(Arc::new(irq));
        let progress = Arc::new(Progress {
            room: EventFd::new(EFD_NONBLOCK)?,
            starved: AtomicBool::new(false),
        });
        let uart = uart::Serial::with_events(irq.clone(), Arc::clone(&progress), out);
        Ok(Self {
            uart: Mutex::new(uart),
            irq,
            progress,
        })
    }

    /// Saves the state; the vCPUs must be paused.
    pub fn save(&self) -> SerialState {
        let state = self.lock().state();
        SerialState {
            baud_divisor: [state.baud_divisor_low, state.baud_divisor_high],
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            input: state.in_buffer,
        }
    }

    /// Loads a saved state, and raises the interrupt again if one was pending.
    pub fn restore(&self, state: SerialState) -> Result<(), SerialRestoreError> {
        if state.input.len() > FIFO_SIZE {
            return Err(SerialRestoreError::TooMuchInput(state.input.len()));
        }
        let data_ready = if state.input.is_empty() {
            0
        } else {
            LINE_STATUS_DATA_READY
        };
        let [baud_divisor_low, baud_divisor_high] = state.baud_divisor;
        let registers = uart::SerialState {
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable: state.interrupt_enable & INTERRUPT_ENABLE_MASK,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status & !LINE_STATUS_DATA_READY | data_ready,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            in_buffer: state.input,
        };
        let mut uart = self.lock();
        let out = std::mem::replace(uart.writer_mut(), Box::new(io::sink()));
        let progress = Arc::clone(&self.progress);
        *uart =
            uart::Serial::from_state(&registers, self.irq.clone(), progress, out).map_err(|e| {
                match e {
                    uart::Error::Trigger(error) | uart::Error::IOError(error) => {
                        SerialRestoreError::Interrupt(error)
                    }
                    uart::Error::FullFifo => {
                        SerialRestoreError::TooMuchInput(registers.in_buffer.len())
                    }
                }
            })?;
        self.progress.signal_room();
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Uart> {
        self.uart.lock_unpoisoned()
    }
}

/// The register at `offset` plus `index`: wide accesses are split into bytes, as on an ISA bus.
fn register(offset: u64, index: usize) -> Option<u8> {
    let register = offset.checked_add(index as u64)?;
    u8::try_from(register).ok().filter(|&register| register < 8)
}

impl BusDevice for Serial {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let mut uart = self.lock();
        for (index, byte) in data.iter_mut().enumerate() {
            *byte = register(offset, index).map_or(0xff, |register| uart.read(register));
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut uart = self.lock();
        for (index, &byte) in data.iter().enumerate() {
            let Some(register) = register(offset, index) else {
                return;
            };
            if let Err(error) = uart.write(register, byte) {
                // Output that `out` refuses is lost, as on an unconnected line. A lost interrupt
                // means that the irqfd's counter is full: one is pending anyway.
                log::debug!("serial port: {error}");
            }
            if register == MODEM_CONTROL {
                // Input is rejected in loopback mode, which this write may have ended.
                self.progress.signal_room();
            }
        }
    }
}

impl InputSink for Serial {
    fn enqueue(&self, data: &[u8]) -> usize {
        let mut uart = self.lock();
        let before = uart.fifo_capacity();
        // The number of accepted bytes follows from the capacity, because an error may occur after
        // they were accepted.
        if let Err(uart::Error::Trigger(error)) = uart.enqueue_raw_bytes(data) {
            log::debug!("serial port: cannot raise the interrupt: {error}");
        }
        let taken = before.saturating_sub(uart.fifo_capacity());
        if taken < data.len() {
            self.progress.starved.store(true, Ordering::Relaxed);
        }
        taken
    }

    fn room_event(&self) -> &EventFd {
        &self.progress.room
    }
}

/// The port's device in the DSDT: `COM1`, PNP0501.
#[derive(Clone, Copy, Debug)]
pub struct SerialAml {
    /// The first of its eight I/O ports.
    pub port: u16,
    /// GSI of its interrupt.
    pub gsi: u32,
}

impl Aml for SerialAml {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        aml::Device::new(
            "\\_SB_.COM1".into(),
            vec![
                &aml::Name::new("_HID".into(), &aml::EISAName::new("PNP0501")),
                &aml::Name::new("_UID".into(), &aml::ZERO),
                &aml::Name::new("_DDN".into(), &"COM1"),
                &aml::Name::new(
                    "_CRS".into(),
                    &aml::ResourceTemplate::new(vec![
                        &aml::Interrupt::new(true, true, false, false, self.gsi),
                        &aml::IO::new(self.port, self.port, 0, 8),
                    ]),
                ),
            ],
        )
        .to_aml_bytes(sink);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DATA: u64 = 0;
    const INTERRUPT_ENABLE: u64 = 1;
    const LINE_STATUS: u64 = 5;

    fn port() -> (Serial, EventFd) {
        let irq = EventFd::new(EFD_NONBLOCK).unwrap();
        let serial = Serial::new(irq.try_clone().unwrap(), Box::new(io::sink())).unwrap();
        (serial, irq)
    }

    fn read(serial: &Serial, offset: u64) -> u8 {
        let mut data = [0];
        serial.read(offset, &mut data);
        data[0]
    }

    #[test]
    fn input_beyond_the_fifo_is_handed_back_and_room_is_announced_when_it_empties() {
        let (serial, _irq) = port();
        assert_eq!(serial.enqueue(&[7; 100]), FIFO_SIZE);
        assert_eq!(serial.enqueue(&[7; 36]), 0);
        for _ in 1..FIFO_SIZE {
            assert_eq!(read(&serial, DATA), 7);
        }
        assert!(serial.room_event().read().is_err());
        read(&serial, DATA);
        assert_eq!(serial.room_event().read().unwrap(), 1);
        assert_eq!(serial.enqueue(&[7; 36]), 36);
    }

    #[test]
    fn a_reader_that_keeps_up_costs_no_room_events() {
        let (serial, _irq) = port();
        assert_eq!(serial.enqueue(b"a"), 1);
        read(&serial, DATA);
        assert!(serial.room_event().read().is_err());
    }

    #[test]
    fn leaving_loopback_announces_room() {
        let (serial, _irq) = port();
        serial.write(4, &[0x10]);
        assert_eq!(serial.enqueue(b"a"), 0);
        serial.write(4, &[0x08]);
        assert_eq!(serial.room_event().read().unwrap(), 1);
        assert_eq!(serial.enqueue(b"a"), 1);
    }

    #[test]
    fn unread_input_and_a_pending_interrupt_survive_a_snapshot() {
        let (serial, _irq) = port();
        serial.write(INTERRUPT_ENABLE, &[1]);
        serial.enqueue(b"xy");
        let saved = serde_json::to_string(&serial.save()).unwrap();

        let (restored, irq) = port();
        restored
            .restore(serde_json::from_str(&saved).unwrap())
            .unwrap();
        assert_eq!(irq.read().unwrap(), 1);
        assert_eq!(read(&restored, LINE_STATUS) & 1, 1);
        assert_eq!(read(&restored, DATA), b'x');
        assert_eq!(read(&restored, DATA), b'y');
        assert_eq!(read(&restored, LINE_STATUS) & 1, 0);
    }

    #[test]
    fn a_saved_state_with_more_input_than_the_fifo_holds_is_refused() {
        let (serial, _irq) = port();
        let mut state = serial.save();
        state.input = vec![0; FIFO_SIZE + 1];
        assert!(matches!(
            serial.restore(state),
            Err(SerialRestoreError::TooMuchInput(65))
        ));
    }

    #[test]
    fn wide_and_stray_accesses_touch_only_existing_registers() {
        let (serial, _irq) = port();
        serial.write(7, &[0x5a, 1, 2, 3]);
        let mut data = [0; 4];
        serial.read(7, &mut data);
        assert_eq!(data, [0x5a, 0xff, 0xff, 0xff]);
        serial.write(u64::MAX, &[1, 2]);
        serial.read(u64::MAX, &mut data);
        assert_eq!(data, [0xff; 4]);
    }

    proptest! {
        #[test]
        fn input_arrives_complete_and_in_order_however_the_guest_reads(
            steps in prop::collection::vec((0usize..100, 0usize..100), 1..50)
        ) {
            let (serial, _irq) = port();
            let (mut sent, mut seen) = (0u8, Vec::new());
            for (offered, reads) in steps {
                let bytes: Vec<u8> = (0..offered).map(|n| sent.wrapping_add(n as u8)).collect();
                let taken = serial.enqueue(&bytes);
                sent = sent.wrapping_add(taken as u8);
                for _ in 0..reads {
                    if read(&serial, LINE_STATUS) & 1 != 0 {
                        seen.push(read(&serial, DATA));
                    }
                }
                if taken < offered && read(&serial, LINE_STATUS) & 1 == 0 {
                    prop_assert!(serial.room_event().read().is_ok());
                }
            }
            seen.extend(serial.save().input);
            prop_assert!(seen.iter().enumerate().all(|(n, &byte)| byte == n as u8));
            prop_assert_eq!(seen.len() as u8, sent);
        }

        #[test]
        fn hostile_register_accesses_leave_a_state_that_restores(
            accesses in prop::collection::vec(
                (prop_oneof![0u64..10, any::<u64>()], prop::collection::vec(any::<u8>(), 0..9)),
                0..200,
            )
        ) {
            let (serial, _irq) = port();
            for (offset, mut data) in accesses {
                serial.write(offset, &data);
                serial.read(offset, &mut data);
            }
            let state = serial.save();
            prop_assert!(state.input.len() <= FIFO_SIZE);
            let (restored, _irq) = port();
            restored.restore(state.clone()).unwrap();
            prop_assert_eq!(restored.save(), state);
        }
    }
}
