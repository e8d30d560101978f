//! Controllers through which an ACPI guest powers off, and is notified of hot-plug events.
//!
//! ```text
//!  machine ── CpuHotplug::insert ──> slot "inserted"
//!          └─ GenericEventDevice::notify(CPU) ──> interrupt
//!                 guest: _EVT ──> \_SB.CPUS.CSCN ──> Notify(C00n, device check)
//! ```
//!
//! Each device handles its registers ([`BusDevice`](device_model::bus::BusDevice)) and describes
//! them to the guest ([`acpi_tables::Aml`], top-level terms for the DSDT). Names in the namespace:
//!
//! | object | what | type |
//! |---|---|---|
//! | `\_SB.GED`, `\_SB.GEC` | events and their register | [`GenericEventDevice`] |
//! | `\_SB.PWRB` | power button | [`GenericEventDevice`] |
//! | `\_SB.CPUS`, `\_SB.PRES` | processors `C000`, `C001` ... (hexadecimal), hot-plug registers | [`CpuHotplug`] |
//! | `\_SB.VGEN` | VM generation ID | [`GenerationId`] |
//! | `\_SB.MHPC` | memory slots `M000` to `M007` and their registers | [`MemoryHotplug`] |
//! | `\_SB.COM1` | serial port | `SerialAml` of crate `legacy` |
//!
//! The DSDT's revision must be 2 or greater, because its methods compute with 64 bits. The crate
//! `arch` describes the fixed parts (`\_S5`, the FADT's registers, the WDAT); [`PowerRegisters`],
//! [`PmTimer`] and [`Watchdog`] implement them.

mod cpu;
mod ged;
mod generation;
mod memory;
mod power;
pub mod registers;
mod watchdog;

pub use cpu::{CpuHotplug, CpuHotplugError, CpuHotplugState, CpuSlot};
pub use ged::{GED_SIZE, GedState, GenericEventDevice, Notification};
pub use generation::{GENERATION_ID_SIZE, GenerationId};
pub use memory::{MEMORY_SLOTS, MemoryHotplug, MemoryHotplugError, MemoryHotplugState, MemorySlot};
pub use power::{PM_TIMER_HZ, PmTimer, PmTimerState, PowerRegisters};
pub use watchdog::{Watchdog, WatchdogState, WatchdogTimer};

pub use cpu::CPU_HOTPLUG_SIZE;
pub use memory::MEMORY_HOTPLUG_SIZE;
