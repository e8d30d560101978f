//! Core scheduling: which threads may use the other hardware threads of a core while a vCPU runs on
//! one of them.
//!
//! Linux lets threads share a core only if they have the same *cookie*
//! (Documentation/admin-guide/hw-vuln/core-scheduling.rst). A thread inherits its creator's cookie.
//! So the thread that creates the others takes a new one before it starts those that are to share cores only with
//! each other.

use std::{io, sync::Once};

use devices::thread::ThreadSpawner;
use vmm_config::CoreScheduling;

/// Of linux/prctl.h.
const PR_SCHED_CORE: libc::c_int = 62;
const PR_SCHED_CORE_CREATE: libc::c_ulong = 1;
const PR_SCHED_CORE_SCOPE_THREAD: libc::c_ulong = 0;

static SAID: Once = Once::new();

/// To be called before all vCPUs of a machine are started.
pub fn before_machine(mode: CoreScheduling, spawner: &dyn ThreadSpawner) -> io::Result<()> {
    match mode {
        CoreScheduling::Vm => spawner.prepare(Box::new(take_cookie)),
        CoreScheduling::Vcpu | CoreScheduling::Off => Ok(()),
    }
}

/// To be called before a vCPU is started.
pub fn before_vcpu(mode: CoreScheduling, spawner: &dyn ThreadSpawner) -> io::Result<()> {
    match mode {
        CoreScheduling::Vcpu => spawner.prepare(Box::new(take_cookie)),
        CoreScheduling::Vm | CoreScheduling::Off => Ok(()),
    }
}

/// Gives the calling thread a unique cookie. On a host without core scheduling this has no effect:
/// its administrator then controls who shares cores (by turning SMT off or dedicating CPUs).
fn take_cookie() {
    // SAFETY: a call without pointers; process 0 is the calling thread.
    let result = unsafe {
        libc::prctl(
            PR_SCHED_CORE,
            PR_SCHED_CORE_CREATE,
            0,
            PR_SCHED_CORE_SCOPE_THREAD,
            0,
        )
    };
    if result == 0 {
        return;
    }
    let error = io::Error::last_os_error();
    // The result is the same for all vCPUs and after a reboot.
    SAID.call_once(|| match error.raw_os_error() {
        Some(libc::ENODEV) => log::debug!("cores have one thread: nobody shares them"),
        Some(libc::EINVAL) => {
            log::info!("the kernel has no core scheduling: vCPUs can share cores with others");
        }
        _ => log::warn!("vCPUs can share cores with others: {error}"),
    });
}
