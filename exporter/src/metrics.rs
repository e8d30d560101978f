//! The one list of metrics: names, types, labels and help texts.
//!
//! The exposition, the [reference page](../../docs/reference/metrics.md), alert rules and panels are made from this list or
//! checked against it. Units are base units: seconds, bytes, ratios from 0 to 1.

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only rises, and starts from zero with its process.
    Counter,
    /// Rises and falls.
    Gauge,
    /// Counts of observations by upper limit.
    Histogram,
    /// Either a counter or a gauge.
    Untyped,
}

impl Kind {
    /// Its name in the text format.
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
            Self::Untyped => "untyped",
        }
    }
}

/// A metric.
#[derive(Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// Its labels.
    pub labels: &'static [&'static str],
    /// What it means.
    pub help: &'static str,
}

macro_rules! metrics {
    ($($id:ident: $kind:ident $name:literal [$($label:literal),*] $help:literal;)*) => {
        $(
            #[doc = $help]
            pub const $id: &Metric = &Metric {
                name: $name,
                kind: Kind::$kind,
                labels: &[$($label),*],
                help: $help,
            };
        )*

        /// All metrics, in the order of the exposition.
        pub const ALL: &[&Metric] = &[$($id),*];
    };
}

metrics! {
    EXPORTER_INFO: Gauge "gantry_exporter_info" ["version"]
        "1, with the version of the exporter.";
    SOURCES_LEFT_OUT: Gauge "gantry_exporter_sources_left_out" []
        "Sockets whose figures are left out, because there are too many, or their answers are too long.";
    FOLDER_UP: Gauge "gantry_exporter_folder_up" ["folder"]
        "Whether the exporter can list this folder of sockets.";
    SOURCE_UP: Gauge "gantry_source_up" ["kind", "source"]
        "Whether the VM, arbiter or pool behind a socket has answered in time and in its form.";
    SOURCE_ANSWER: Gauge "gantry_source_answer_seconds" ["kind", "source"]
        "How long the answer took.";
    PROCESS_CPU: Counter "gantry_process_cpu_seconds_total" ["kind", "source"]
        "CPU time of the process behind the socket.";
    PROCESS_RESIDENT: Gauge "gantry_process_resident_bytes" ["kind", "source"]
        "Resident memory of that process; for a VM, memory that the guest has touched is part of it.";
    PROCESS_START: Gauge "gantry_process_start_time_seconds" ["kind", "source"]
        "Start of that process, as Unix time.";

    VM_INFO: Gauge "gantry_vm_info" ["vm", "version", "pid"]
        "1, with the version of the VMM and its process ID. Names of clients that are VMs begin with this ID.";
    VM_STATE: Gauge "gantry_vm_state" ["vm", "state"]
        "1 for the state that the VM is in: none, created, running, paused, frozen or shutdown.";
    VM_VCPUS: Gauge "gantry_vm_vcpus" ["vm"]
        "vCPUs that are plugged in.";
    VM_MEMORY: Gauge "gantry_vm_memory_bytes" ["vm"]
        "Memory that the guest has.";
    VM_VCPU_SECONDS: Counter "gantry_vm_vcpu_seconds_total" ["vm", "vcpu"]
        "CPU time of the vCPU's thread.";
    VM_EXITS: Counter "gantry_vm_exits_total" ["vm", "vcpu"]
        "Exits of the vCPU.";
    VM_EXITS_BY_REASON: Counter "gantry_vm_exits_by_reason_total" ["vm", "vcpu", "reason"]
        "Exits of the vCPU whose reason KVM counts: io, mmio, irq or halt.";
    DISK_BYTES: Counter "gantry_vm_disk_bytes_total" ["vm", "device", "direction"]
        "Bytes that the guest has read or written.";
    DISK_DURATION: Histogram "gantry_vm_disk_request_duration_seconds" ["vm", "device", "direction"]
        "Time from a request of the guest to its completion; _count is the number of completed requests.";
    NET_BYTES: Counter "gantry_vm_net_bytes_total" ["vm", "device", "direction"]
        "Bytes that the guest has received or transmitted.";
    NET_FRAMES: Counter "gantry_vm_net_frames_total" ["vm", "device", "direction"]
        "Frames that the guest has received or transmitted.";
    VSOCK_BYTES: Counter "gantry_vm_vsock_bytes_total" ["vm", "device", "direction"]
        "Data that the guest has received or transmitted by vsock.";
    VSOCK_CONNECTIONS: Gauge "gantry_vm_vsock_connections" ["vm", "device"]
        "Vsock connections at present.";
    CONSOLE_BYTES: Counter "gantry_vm_console_output_bytes_total" ["vm", "device"]
        "Output of the guest on its virtio console.";
    RNG_BYTES: Counter "gantry_vm_rng_bytes_total" ["vm", "device"]
        "Random bytes that the guest has received.";
    BALLOON_DISCARDED: Counter "gantry_vm_balloon_discarded_bytes_total" ["vm", "device"]
        "Memory that the balloon has returned to the host.";
    MEM_PLUGGED: Gauge "gantry_vm_virtio_mem_plugged_bytes" ["vm", "device"]
        "Size of a virtio-mem device.";
    MEM_REQUESTED: Gauge "gantry_vm_virtio_mem_requested_bytes" ["vm", "device"]
        "Size that was asked for.";
    IOMMU_REQUESTS: Counter "gantry_vm_iommu_requests_total" ["vm", "device"]
        "Requests of the guest to its virtual IOMMU.";
    IOMMU_REFUSED: Counter "gantry_vm_iommu_refused_requests_total" ["vm", "device"]
        "Those that were refused.";
    IOMMU_MAPPINGS: Gauge "gantry_vm_iommu_mappings" ["vm", "device"]
        "Mappings at present.";
    BUS_RESETS: Counter "gantry_vm_bus_resets_total" ["vm", "device"]
        "Resets of a physical device's bus.";
    ACCEL_SLICES: Gauge "gantry_vm_accel_slices_in_use" ["vm", "device"]
        "Slices of an accelerator port that are not free: one for each application.";
    ACCEL_MEMORY: Gauge "gantry_vm_accel_device_memory_bytes" ["vm", "device"]
        "Device memory that applications of the guest have allocated.";
    ACCEL_STARTED: Counter "gantry_vm_accel_workers_started_total" ["vm", "device"]
        "Workers that have served applications of the guest.";
    ACCEL_LOST: Counter "gantry_vm_accel_workers_lost_total" ["vm", "device"]
        "Workers that ended, or refused, before their application ended.";
    ACCEL_FOLLOWED: Counter "gantry_vm_accel_contents_followed_total" ["vm", "device"]
        "Buffers and images whose contents followed after a move by postcopy.";
    ACCEL_INTERRUPTS: Counter "gantry_vm_accel_interrupts_total" ["vm", "device"]
        "Interrupts that the port has raised.";
    ACCEL_WOKEN: Counter "gantry_vm_accel_sleepers_woken_total" ["vm", "device"]
        "Requests of workers to wake an application.";
    DEVICE_COUNTER: Untyped "gantry_vm_device_value" ["vm", "device", "counter"]
        "What devices count otherwise, as in vm.counters.";

    ARBITER_INFO: Gauge "gantry_arbiter_info" ["arbiter", "policy"]
        "1, with the policy of the arbiter, or of gantry-gpu.";
    ARBITER_UPTIME: Gauge "gantry_arbiter_uptime_seconds" ["arbiter"]
        "Time since its start.";
    ARBITER_LEFT_OUT: Gauge "gantry_arbiter_clients_left_out" ["arbiter"]
        "Clients that have no series, because there are too many.";
    CLIENT_DEVICE_SECONDS: Counter "gantry_client_device_seconds_total" ["arbiter", "client"]
        "Time for which the client has had the device.";
    CLIENT_QUEUEING_SECONDS: Counter "gantry_client_queueing_seconds_total" ["arbiter", "client"]
        "Time for which the client has waited for the device.";
    CLIENT_TURNS: Counter "gantry_client_turns_total" ["arbiter", "client"]
        "How often the client was given the device.";
    CLIENT_CALLS: Counter "gantry_client_calls_total" ["arbiter", "client"]
        "Requests that the client has submitted.";
    CLIENT_SYNCHRONOUS: Counter "gantry_client_synchronous_calls_total" ["arbiter", "client"]
        "Calls whose answers the client has waited for.";
    CLIENT_KILLED: Counter "gantry_client_killed_workers_total" ["arbiter", "client"]
        "Workers that were ended because a request took too long.";
    CLIENT_MEMORY: Gauge "gantry_client_memory_bytes" ["arbiter", "client"]
        "Device memory that the client has.";
    CLIENT_WEIGHT: Gauge "gantry_client_weight" ["arbiter", "client"]
        "The client's weight; 0: it gets the device only while nobody else has work.";
    CLIENT_DUE: Gauge "gantry_client_due_ratio" ["arbiter", "client"]
        "The part of the device that the weight stands for, among clients that have workers.";
    CLIENT_WORKERS: Gauge "gantry_client_workers" ["arbiter", "client"]
        "The client's workers, one for each application.";
    CLIENT_WAIT: Gauge "gantry_client_wait_seconds" ["arbiter", "client", "quantile"]
        "Quantile of the times for which the client, while it has work, waited until some was done, in the last 10 to 20 seconds.";
    CLIENT_DELAY: Gauge "gantry_client_delay_seconds" ["arbiter", "client", "by"]
        "Longest time for which the client had work and got nothing of the device, in the last 10 to 20 seconds, and who had the most of it meanwhile; with time slices, from 20 ms on.";
    CLIENT_HOLDS: Gauge "gantry_client_holds" ["arbiter", "client"]
        "Whether the client has the device now.";

    POOL_UPTIME: Gauge "gantry_pool_uptime_seconds" ["pool"]
        "Time since the start of the pool.";
    POOL_WORKERS: Gauge "gantry_pool_workers" ["pool", "state"]
        "Workers that wait for applications, or serve one.";
    POOL_MACHINES: Gauge "gantry_pool_machine_workers" ["pool"]
        "Workers that serve applications of VMs.";
    POOL_MOST: Gauge "gantry_pool_applications_limit" ["pool"]
        "Maximum number of applications that are served at a time.";
    POOL_WINDOWS: Gauge "gantry_pool_window_bytes" ["pool"]
        "Size of the windows that workers share with their applications.";
    POOL_STARTED: Counter "gantry_pool_workers_started_total" ["pool"]
        "Workers that have been started.";
    POOL_SERVED: Counter "gantry_pool_applications_total" ["pool"]
        "Applications that were given a worker.";
    POOL_FAILED: Counter "gantry_pool_workers_failed_total" ["pool"]
        "Workers that ended before they served anybody.";
    POOL_LOST: Counter "gantry_pool_workers_lost_total" ["pool"]
        "Workers that ended before the application that they served.";
    POOL_REFUSED: Counter "gantry_pool_refusals_total" ["pool"]
        "Applications that were refused because their user had too many workers.";
}

/// The metric of this name; that of a histogram also by the names of its series.
pub fn named(name: &str) -> Option<&'static Metric> {
    let of = |metric: &&&Metric| {
        metric.name == name
            || metric.kind == Kind::Histogram
                && name
                    .strip_prefix(metric.name)
                    .is_some_and(|end| ["_bucket", "_sum", "_count"].contains(&end))
    };
    ALL.iter().find(of).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_say_their_type_and_unit() {
        for (at, metric) in ALL.iter().enumerate() {
            let name = metric.name;
            assert!(name.starts_with("gantry_"), "{name}");
            assert_eq!(named(name), Some(*metric));
            assert_eq!(
                name.ends_with("_total"),
                metric.kind == Kind::Counter,
                "{name}"
            );
            assert!(metric.help.ends_with('.'), "{name}");
            assert!(ALL[..at].iter().all(|other| other.name != name), "{name}");
        }
        assert_eq!(
            named("gantry_vm_disk_request_duration_seconds_bucket"),
            Some(DISK_DURATION)
        );
        assert_eq!(named("gantry_vm_vcpus_bucket"), None);
    }
}
