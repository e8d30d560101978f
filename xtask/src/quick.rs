//! The scenarios of `cargo xtask test` without options: short ones, of every topic, all on one board. Every promise of
//! `SPECIFICATION.md` has one of them or a unit test, where it can (`tests/specification.rs`).

/// Names of scenarios, nested and not.
pub const SCENARIOS: &[&str] = &[
    "boot: bzImage with 2 vCPUs",
    "lifecycle: options of the command line boot a guest",
    "clients: a client that others made for Cloud Hypervisor drives a guest",
    "errors: every call without a VM",
    "errors: what Gantry does not do is refused, not ignored",
    "disk: written in the guest and found on the host",
    "net: several queues",
    "rng: the guest gets entropy",
    "console: virtio console both ways",
    "vsock: echo from host to guest, 1 MiB",
    "memory: balloon inflates and deflates",
    "hot-plug: a disk comes, works and goes, five times",
    "hot-plug: vCPUs up and down",
    "snapshot: kill -9, restore, and the guest goes on counting",
    "snapshot: a damaged or foreign snapshot is refused",
    "process: kill -9 leaves nothing that stops the next start",
    "process: every thread is confined by seccomp",
    "process: a forbidden system call on any of its threads ends it",
    "process: Landlock keeps it from other files",
    "process: an idle guest costs next to nothing",
    "passthrough: registers, DMA and interrupts of a device at start",
    "passthrough: a device cannot reach beyond the guest's memory",
    "passthrough: plugged and unplugged again and again leaves nothing behind",
    "vfio-user: registers, memory, DMA and interrupts of another process's device",
    "vfio-user: a server that hangs or lies costs its device, and nothing else",
    "accelerator: it comes and goes, and a killed worker fails its application only",
    "accelerator: a worker has so much memory, and so many processes, with all that it starts",
    "accelerator: from zero to a shared GPU by the commands of the guide",
    "opencl: vectors are added, by figures' program",
    "sharing: a killed worker costs its application an error, and others go on",
];

/// The words that select them.
pub fn words() -> Vec<String> {
    SCENARIOS.iter().map(ToString::to_string).collect()
}

#[cfg(test)]
mod tests {
    use gantry_host_tests::{opencl, sharing};
    use gantry_tests::rig::{self, Board};

    use super::*;

    #[test]
    fn each_quick_scenario_is_there_and_none_needs_another_board() {
        let nested = rig::chosen(&words());
        assert!(nested.iter().all(|one| one.board == Board::Intel));
        let names: Vec<_> = nested
            .iter()
            .map(|one| one.name)
            .chain(opencl::names())
            .chain(sharing::names())
            .collect();
        for name in SCENARIOS {
            assert!(names.contains(name), "there is no scenario {name:?}");
        }
        // A name selects every scenario whose name contains it.
        for one in nested {
            assert!(SCENARIOS.contains(&one.name), "{} is selected", one.name);
        }
    }
}
