//! All API requests as one type.

use std::os::fd::OwnedFd;

use vmm_config::{Device, VmConfig};
use vmm_migration::progress::MigrationInfo;

use super::{
    ApiError, MovedAccel, PciDeviceInfo, ReceiveMigration, Reply, ResolveMigration, RestoreConfig,
    SendMigration, VmCoredumpData, VmCounters, VmInfo, VmMoveAccel, VmRemoveDevice, VmResize,
    VmResizeDisk, VmResizeZone, VmSnapshotConfig, VmSwapDevice, VmmPingResponse,
};
use crate::metrics::Metrics;

/// A client's request. Contained configurations have passed their `validate`.
///
/// Requests about the VM fail with 404 if there is none, and with 405 if its state does not permit them.
#[derive(Debug)]
pub enum Request {
    /// Identify the VMM. Always answered with [`Response::Ping`].
    VmmPing,
    /// Stop the VM and exit the process.
    VmmShutdown,
    /// Report metrics; always answered with [`Response::Metrics`].
    VmmMetrics,
    /// Create a VM without booting it; 500 if there is one already.
    VmCreate(Box<VmConfig>),
    /// Delete the VM, after shutting it down.
    VmDelete,
    /// Boot a created or shut down VM.
    VmBoot,
    /// Pause its vCPUs.
    VmPause,
    /// Resume its vCPUs.
    VmResume,
    /// Power it off; it can be booted again.
    VmShutdown,
    /// Power it off and boot it.
    VmReboot,
    /// Press the power button.
    VmPowerButton,
    /// Send every vCPU a non-maskable interrupt.
    VmNmi,
    /// Configuration and state, answered with [`Response::Info`].
    VmInfo,
    /// Counters of its devices, answered with [`Response::Counters`].
    VmCounters,
    /// Change the number of vCPUs, the size of memory or the size of the balloon; 429 while vCPUs are still being
    /// removed.
    VmResize(VmResize),
    /// Change the size of a disk.
    VmResizeDisk(VmResizeDisk),
    /// Change the size of a memory zone.
    VmResizeZone(VmResizeZone),
    /// Plug in a device of any kind, which already contains its descriptors. Answered with [`Response::Device`] if the
    /// VM runs and with [`Response::Empty`] if it has not booted; 409 if its name is in use.
    VmAdd(Box<dyn Device>),
    /// Unplug a device; 404 if there is none with this name.
    VmRemoveDevice(VmRemoveDevice),
    /// Replace a physical device with another one.
    VmSwapDevice(VmSwapDevice),
    /// Move an accelerator's applications to other workers. Answered with [`Response::MovedAccel`] when all have moved,
    /// or with an error that tells why some have not.
    VmMoveAccel(VmMoveAccel),
    /// Save a paused VM to a directory.
    VmSnapshot(VmSnapshotConfig),
    /// Restore a VM from such a directory. The descriptors are those for `net_fds`, in order.
    VmRestore(RestoreConfig, Vec<OwnedFd>),
    /// Migrate the VM to another host; answered when the migration has started.
    VmSendMigration(SendMigration),
    /// Receive a VM from another host; answered when it runs here or has failed.
    VmReceiveMigration(ReceiveMigration),
    /// Report the progress of a migration, answered with [`Response::Migration`]; 404 if there was none.
    VmMigration,
    /// Cancel a migration; the VM stays where it is.
    VmCancelMigration,
    /// Decide which side runs the VM, after the connection broke at the critical moment.
    VmResolveMigration(ResolveMigration),
    /// Write the memory of a paused VM to an ELF core file.
    VmCoredump(VmCoredumpData),
}

/// Result of a successful request.
#[derive(Clone, Debug)]
pub enum Response {
    /// No data.
    Empty,
    /// Identification of the VMM.
    Ping(VmmPingResponse),
    /// Configuration and state.
    Info(Box<VmInfo>),
    /// Counters of devices.
    Counters(VmCounters),
    /// The device that was plugged in.
    Device(PciDeviceInfo),
    /// Metrics.
    Metrics(Metrics),
    /// The applications that have been moved.
    MovedAccel(MovedAccel),
    /// Progress of a migration.
    Migration(Box<MigrationInfo>),
}

/// Carries out requests, on the thread that owns the machine.
pub trait Handler {
    /// Carries out a request.
    fn handle(&mut self, request: Request) -> Result<Response, ApiError>;

    /// Carries out a request and sends its reply, now or later.
    fn take(&mut self, request: Request, reply: Reply) {
        reply.send(self.handle(request));
    }
}
