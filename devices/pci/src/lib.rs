//! PCI: segments, functions, configuration space, MSI-X and hot-plug.
//!
//! A VM creates a [`PciSegment`] with address windows, puts [`Ecam`] (and, for segment 0,
//! [`ConfigPorts`]) on its buses, and plugs in functions. The segment follows the guest's writes to
//! BARs and command registers:
//!
//! ```text
//!  vCPU: config access                          vCPU: BAR access
//!    │ Ecam / ConfigPorts                         │ Bus (no lock)
//!    v                                            v
//!  PciSegment ──lock──> PciFunction ─bar_device─> BusDevice of the BAR
//!    │                    │  ^                    │
//!    │ BAR moved?         │  └── bar_mapped(addr) │ (virtio: Transport, which has its own lock)
//!    └─> Bus::insert /    │      ioeventfds and   v
//!        Bus::remove      │      memory slots    MsixTable <── trigger() from workers:
//!                         └─> MSI-X control ──────^            one load, one eventfd write
//!
//!  control thread:  plug, plug_saved, unplug, reset   on the segment
//!                   pause, resume, save, counters     on the function, under its lock
//! ```
//!
//! A BAR is decoded only inside the segment's windows, and only where no other BAR is. If a guest
//! programs it elsewhere, the BAR does not respond, and the log gets one message.
//!
//! Hot-plug: call `plug`, then [`HotplugController::announce`], then raise the ACPI event. Removal:
//! call [`HotplugController::request_eject`], raise the event, and call `unplug` when the guest's
//! eject arrives at the handler. [`PciAml`] describes all of this to the guest.
//!
//! A segment has bus 0, and one bus per [`RootPort`] with one slot of up to eight functions. A slot
//! is removed as a whole, because that is how guests unplug. Interrupt lines (INTx) exist for
//! passthrough devices and guest drivers that support nothing better; the bridge's `_PRT` assigns
//! four of them to all slots.
//!
//! A guest can reset a function, and the bus behind a port. The functions do not respond until the
//! VM, notified through [`PciSegment::on_reset`], has called [`PciSegment::begin_reset`], run what
//! that returns, and called [`PciSegment::end_reset`].

mod access;
mod aml;
mod bar;
mod bdf;
pub mod config;
mod function;
mod host_bridge;
mod hotplug;
mod line;
mod msi;
mod msix;
pub mod offsets;
mod port_function;
mod pvpanic;
mod root_port;
mod segment;
#[cfg(any(test, feature = "test-support"))]
pub mod testing;
mod windows;

pub use access::{CONFIG_PORTS_BASE, CONFIG_PORTS_LEN, ConfigPorts, ECAM_SIZE, Ecam};
pub use aml::PciAml;
pub use bar::{BarAddress, BarIndex, BarKind, BarRequest, DecodedBar};
pub use bdf::{Bdf, ParseBdfError, SLOTS};
pub use config::{ConfigError, ConfigSpace, ConfigSpaceState, Identity};
pub use function::{LifecycleError, PciFunction, SlowReset};
pub use host_bridge::HostBridge;
pub use hotplug::{
    HOTPLUG_SIZE, HotplugController, HotplugState, PciBuses, SlotEvent, SlotHandler,
};
pub use line::{LINES, Line, Lines, line_of};
pub use msi::MsiCapability;
pub use msix::{
    Delivery, MAX_VECTORS, MsixCapability, MsixEntryState, MsixState, MsixTable, TABLE_ENTRY_SIZE,
};
pub use pvpanic::PvPanic;
pub use root_port::RootPort;
pub use segment::{PciError, PciSegment, ResetHandler, Seat, SharedFunction};
pub use windows::{PortWindows, SegmentConfig, Window};

#[cfg(test)]
mod port_tests;
#[cfg(test)]
mod tests;
