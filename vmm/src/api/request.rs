//! The API as one type.

use std::os::fd::OwnedFd;

use super::{
    ApiError, MovedAccel, PciDeviceInfo, ReceiveMigration, Reply, ResolveMigration, RestoreConfig,
    SendMigration, VmCoredumpData, VmCounters, VmInfo, VmMoveAccel, VmRemoveDevice, VmResize,
    VmResizeDisk, VmResizeZone, VmSnapshotConfig, VmSwapDevice, VmmPingResponse,
};
use crate::{
    config::{Device, VmConfig},
    metrics::Metrics,
    migration::progress::MigrationInfo,
};

/// What a client can ask for. Configurations in it have passed their `validate`.
///
/// Requests about the VM fail with 404 when there is none, and with 405 in a state in which they
/// make no sense.
#[derive(Debug)]
pub enum Request {
    /// Who are you? Always answered with [`Response::Ping`].
    VmmPing,
    /// End the VM and the process.
    VmmShutdown,
    /// What there is to measure; always answered with [`Response::Metrics`].
    VmmMetrics,
    /// Make a VM, without booting it; 500 if there is one.
    VmCreate(Box<VmConfig>),
    /// Forget the VM, shutting it down first.
    VmDelete,
    /// Start a created or shut down VM.
    VmBoot,
    /// Stop its vCPUs.
    VmPause,
    /// Let its vCPUs run on.
    VmResume,
    /// Switch it off; it can be booted again.
    VmShutdown,
    /// Switch it off and boot it.
    VmReboot,
    /// Press the power button.
    VmPowerButton,
    /// Send every vCPU a non-maskable interrupt.
    VmNmi,
    /// Configuration and state, answered with [`Response::Info`].
    VmInfo,
    /// Counters of its devices, answered with [`Response::Counters`].
    VmCounters,
    /// More or fewer vCPUs, bytes of memory, bytes in the balloon; 429 while vCPUs are still
    /// being removed.
    VmResize(VmResize),
    /// Change the size of a disk.
    VmResizeDisk(VmResizeDisk),
    /// Change the size of a memory zone.
    VmResizeZone(VmResizeZone),
    /// Plug in a device of any kind, which has its descriptors. Answered with [`Response::Device`] if
    /// the VM runs and with [`Response::Empty`] if it has not booted; 409 if its name is taken.
    VmAdd(Box<dyn Device>),
    /// Unplug a device; 404 if there is none of this name.
    VmRemoveDevice(VmRemoveDevice),
    /// Replaces a physical device by another one.
    VmSwapDevice(VmSwapDevice),
    /// Has an accelerator's applications go on with other workers, answered with
    /// [`Response::MovedAccel`] when all have moved; with an error that says why others stay.
    VmMoveAccel(VmMoveAccel),
    /// Save a paused VM in a directory.
    VmSnapshot(VmSnapshotConfig),
    /// Make a VM from such a directory. The descriptors are those that `net_fds` names, in order.
    VmRestore(RestoreConfig, Vec<OwnedFd>),
    /// Move the VM to another host; answered when that has begun.
    VmSendMigration(SendMigration),
    /// Take a VM from another host; answered when it runs here, or not.
    VmReceiveMigration(ReceiveMigration),
    /// What a migration does, answered with [`Response::Migration`]; 404 if there was none.
    VmMigration,
    /// End a migration; the VM stays where it is.
    VmCancelMigration,
    /// Say who has the VM, after a connection broke at the wrong moment.
    VmResolveMigration(ResolveMigration),
    /// Write the memory of a paused VM to an ELF core file.
    VmCoredump(VmCoredumpData),
}

/// A request was carried out.
#[derive(Clone, Debug)]
pub enum Response {
    /// There is nothing to say.
    Empty,
    /// Who answers.
    Ping(VmmPingResponse),
    /// Configuration and state.
    Info(Box<VmInfo>),
    /// Counters of devices.
    Counters(VmCounters),
    /// A device was plugged in.
    Device(PciDeviceInfo),
    /// What there is to measure.
    Metrics(Metrics),
    /// Applications have moved.
    MovedAccel(MovedAccel),
    /// What a migration does.
    Migration(Box<MigrationInfo>),
}

/// Carries out requests, on the thread that owns the machine.
pub trait Handler {
    /// Carries out one request.
    fn handle(&mut self, request: Request) -> Result<Response, ApiError>;

    /// Carries out one request and answers it, now or later.
    fn take(&mut self, request: Request, reply: Reply) {
        reply.send(self.handle(request));
    }
}
