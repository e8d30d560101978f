//! PCI: segments, functions, configuration space, MSI-X and hot-plug.
//!
//! A machine makes a [`PciSegment`] with address windows, puts [`Ecam`] (and, for segment 0,
//! [`ConfigPorts`]) on its buses, and plugs functions in. The segment follows what the guest
//! writes to BARs and command registers:
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
//! A BAR is decoded only inside the segment's windows and where no other BAR is: a guest that
//! programs it elsewhere gets a BAR that does not answer, and one line in the log.
//!
//! Hot-plug: `plug`, then [`HotplugController::announce`], then the ACPI event; removal:
//! [`HotplugController::request_eject`], the event, and when the guest's eject arrives at the
//! handler, `unplug`. [`PciAml`] describes all of it to the guest.
//!
//! A segment has bus 0 and a bus for each [`RootPort`], with one slot of up to eight functions. A
//! slot leaves as a whole: that is how guests unplug. Interrupt lines (INTx) are there for physical
//! devices and guests' drivers that have nothing better; the bridge's `_PRT` gives all slots four of them.
//!
//! A guest can reset a function, and the bus behind a port. It finds nothing there until the machine,
//! told by [`PciSegment::on_reset`], has called [`PciSegment::begin_reset`], run what that returns,
//! and called [`PciSegment::end_reset`].

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
pub use root_port::RootPort;
pub use segment::{PciError, PciSegment, ResetHandler, Seat, SharedFunction};
pub use windows::{PortWindows, SegmentConfig, Window};

#[cfg(test)]
mod port_tests;
#[cfg(test)]
mod tests;
