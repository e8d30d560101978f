//! Legacy PC devices that kernels and firmware still expect at fixed ports.
//!
//! | ports | device |
//! |---|---|
//! | 0x3f8-0x3ff | [`Serial`], a 16550A |
//! | 0x60-0x64 | [`I8042`]: the reset line, and a keyboard controller without a keyboard |
//! | 0x70-0x71 | [`Cmos`]: the clock, and the size of RAM |
//! | 0x80 | [`DebugPort`]: boot progress codes, logged with their time |
//! | 0xe9 | [`DebugConsole`]: a console that works before any driver does |
//!
//! A Linux kernel that is booted directly gets the wall clock from kvm-clock. The FADT's "CMOS RTC not
//! present" flag prevents it from probing ports 0x70 and 0x71, which would cost several hundred
//! exits at boot (the kernel reads the clock until the seconds change). Firmware needs the clock.

mod cmos;
mod debug;
mod i8042;
mod serial;

pub use cmos::{Cmos, CmosState};
pub use debug::{DebugConsole, DebugPort};
pub use i8042::{I8042, I8042State};
pub use serial::{Serial, SerialAml, SerialRestoreError, SerialState};
