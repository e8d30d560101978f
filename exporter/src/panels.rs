//! What dashboards show: the one list of panels for Grafana and for Prometheus' console templates.

/// The unit of a panel's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A plain number.
    Number,
    /// A number per second.
    PerSecond,
    /// Bytes.
    Bytes,
    /// Bytes per second.
    BytesPerSecond,
    /// Seconds.
    Seconds,
    /// A part, 1 for the whole.
    Ratio,
}

impl Unit {
    /// Its name in a Grafana dashboard.
    pub fn grafana(self) -> &'static str {
        match self {
            Self::Number => "short",
            Self::PerSecond => "ops",
            Self::Bytes => "bytes",
            Self::BytesPerSecond => "Bps",
            Self::Seconds => "s",
            Self::Ratio => "percentunit",
        }
    }

    /// What a console template writes at the axis.
    pub fn axis(self) -> &'static str {
        match self {
            Self::Number => "",
            Self::PerSecond => "per second",
            Self::Bytes => "bytes",
            Self::BytesPerSecond => "bytes per second",
            Self::Seconds => "seconds",
            Self::Ratio => "part",
        }
    }
}

/// A panel: one query, each of whose series is a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Panel {
    /// Its title.
    pub title: &'static str,
    /// The unit of its values.
    pub unit: Unit,
    /// The query (PromQL).
    pub query: &'static str,
    /// The labels that tell its lines apart.
    pub labels: &'static [&'static str],
}

const fn panel(
    title: &'static str,
    unit: Unit,
    query: &'static str,
    labels: &'static [&'static str],
) -> Panel {
    Panel {
        title,
        unit,
        query,
        labels,
    }
}

/// All panels, in the order of the dashboard.
pub const ALL: &[Panel] = &[
    panel(
        "Device time by client",
        Unit::Ratio,
        "rate(gantry_client_device_seconds_total[1m])",
        &["arbiter", "client"],
    ),
    panel(
        "Share of used device time, relative to the share that is due by weight",
        Unit::Ratio,
        "rate(gantry_client_device_seconds_total[1m]) / on (instance, arbiter) group_left sum by \
         (instance, arbiter) (rate(gantry_client_device_seconds_total[1m])) / (gantry_client_due_ratio > 0)",
        &["arbiter", "client"],
    ),
    panel(
        "Clients waiting for the device",
        Unit::Number,
        "rate(gantry_client_queueing_seconds_total[1m])",
        &["arbiter", "client"],
    ),
    panel(
        "Requests to the device",
        Unit::PerSecond,
        "rate(gantry_client_calls_total[1m])",
        &["arbiter", "client"],
    ),
    panel(
        "Device memory by client",
        Unit::Bytes,
        "gantry_client_memory_bytes",
        &["arbiter", "client"],
    ),
    panel(
        "Mean length of a turn",
        Unit::Seconds,
        "rate(gantry_client_device_seconds_total[1m]) / rate(gantry_client_turns_total[1m])",
        &["arbiter", "client"],
    ),
    panel(
        "Workers of pools",
        Unit::Number,
        "gantry_pool_workers",
        &["pool", "state"],
    ),
    panel(
        "Applications that pools have taken",
        Unit::PerSecond,
        "rate(gantry_pool_applications_total[5m])",
        &["pool"],
    ),
    panel(
        "vCPU time by VM",
        Unit::Ratio,
        "sum by (instance, vm) (rate(gantry_vm_vcpu_seconds_total[1m]))",
        &["vm"],
    ),
    panel(
        "Exits by VM",
        Unit::PerSecond,
        "sum by (instance, vm) (rate(gantry_vm_exits_total[1m]))",
        &["vm"],
    ),
    panel(
        "Resident memory by process",
        Unit::Bytes,
        "gantry_process_resident_bytes",
        &["kind", "source"],
    ),
    panel(
        "CPU time by process",
        Unit::Ratio,
        "rate(gantry_process_cpu_seconds_total[1m])",
        &["kind", "source"],
    ),
    panel(
        "Disk throughput",
        Unit::BytesPerSecond,
        "rate(gantry_vm_disk_bytes_total[1m])",
        &["vm", "device", "direction"],
    ),
    panel(
        "Disk requests: 99th percentile of latency",
        Unit::Seconds,
        "histogram_quantile(0.99, sum by (instance, vm, device, direction, le) \
         (rate(gantry_vm_disk_request_duration_seconds_bucket[5m])))",
        &["vm", "device", "direction"],
    ),
    panel(
        "Network throughput",
        Unit::BytesPerSecond,
        "rate(gantry_vm_net_bytes_total[1m])",
        &["vm", "device", "direction"],
    ),
    panel(
        "Time until sources answer",
        Unit::Seconds,
        "gantry_source_answer_seconds",
        &["kind", "source"],
    ),
];
