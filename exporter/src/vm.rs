//! What a VMM answers on its metrics socket, as typed metrics.

use std::collections::BTreeMap;

use crate::{
    metrics::{self, Metric},
    series::{Distribution, Series},
};

/// Maximum number of values that are taken from an answer: those of a VM with hundreds of devices and vCPUs.
const MOST: usize = 20_000;
/// Maximum length of a counter's name.
const LONGEST_NAME: usize = 64;
/// The states of a VM.
const STATES: [&str; 6] = ["none", "created", "running", "paused", "frozen", "shutdown"];
/// Prefix of the names of vCPUs among devices.
const VCPU: &str = "_cpu";
/// What the names of counters of a disk's requests by latency consist of: a direction, this, a limit in microseconds, and
/// [`LIMIT_END`].
const LIMIT: &str = "_within_";
const LIMIT_END: &str = "us";

/// An answer that is not a VMM's.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Wrong {
    /// It is not in Prometheus' text format.
    #[error("line {0} is not in Prometheus' text format")]
    Line(usize),
    /// There are too many values.
    #[error("there are more than {MOST} values")]
    Many,
    /// What every VMM says is not there.
    #[error("gantry_info and gantry_vm_state are missing: is this gantry's metrics socket?")]
    NotGantry,
}

/// How a device's counter becomes a metric.
enum Counter {
    /// With the labels `vm` and `device`.
    Plain(&'static Metric),
    /// With the further label `direction`.
    Directed(&'static Metric, &'static str),
}

/// The metric for a counter of a device, unless it is one of a disk's latencies or has none of its own.
fn counter(name: &str) -> Option<Counter> {
    use Counter::{Directed, Plain};
    Some(match name {
        "read_bytes" => Directed(metrics::DISK_BYTES, "read"),
        "write_bytes" => Directed(metrics::DISK_BYTES, "write"),
        "rx_bytes" => Directed(metrics::NET_BYTES, "receive"),
        "tx_bytes" => Directed(metrics::NET_BYTES, "transmit"),
        "rx_frames" => Directed(metrics::NET_FRAMES, "receive"),
        "tx_frames" => Directed(metrics::NET_FRAMES, "transmit"),
        "to_guest_bytes" => Directed(metrics::VSOCK_BYTES, "receive"),
        "from_guest_bytes" => Directed(metrics::VSOCK_BYTES, "transmit"),
        "connections" => Plain(metrics::VSOCK_CONNECTIONS),
        "output_bytes" => Plain(metrics::CONSOLE_BYTES),
        "served_bytes" => Plain(metrics::RNG_BYTES),
        "discarded_bytes" => Plain(metrics::BALLOON_DISCARDED),
        "plugged_bytes" => Plain(metrics::MEM_PLUGGED),
        "requested_bytes" => Plain(metrics::MEM_REQUESTED),
        "requests" => Plain(metrics::IOMMU_REQUESTS),
        "refused_requests" => Plain(metrics::IOMMU_REFUSED),
        "mappings" => Plain(metrics::IOMMU_MAPPINGS),
        "bus_resets" => Plain(metrics::BUS_RESETS),
        "slices_in_use" => Plain(metrics::ACCEL_SLICES),
        "device_memory_bytes" => Plain(metrics::ACCEL_MEMORY),
        "workers_started" => Plain(metrics::ACCEL_STARTED),
        "workers_lost" => Plain(metrics::ACCEL_LOST),
        "contents_followed" => Plain(metrics::ACCEL_FOLLOWED),
        "line_interrupts" => Plain(metrics::ACCEL_INTERRUPTS),
        "sleepers_woken" => Plain(metrics::ACCEL_WOKEN),
        _ => return None,
    })
}

/// A line of the answer.
#[derive(Debug, PartialEq)]
struct Line<'a> {
    name: &'a str,
    labels: BTreeMap<&'a str, String>,
    value: f64,
}

impl<'a> Line<'a> {
    /// Parses a line; `None` if it is not in the text format.
    fn of(line: &'a str) -> Option<Self> {
        let end = line.find(['{', ' '])?;
        let (name, mut rest) = line.split_at(end);
        let mut labels = BTreeMap::new();
        if let Some(inner) = rest.strip_prefix('{') {
            rest = inner;
            loop {
                let (label, quoted) = rest.split_once("=\"")?;
                let (value, after) = unquoted(quoted)?;
                labels.insert(label, value);
                match after.strip_prefix(',') {
                    Some(more) => rest = more,
                    None => {
                        rest = after.strip_prefix('}')?;
                        break;
                    }
                }
            }
        }
        let value: f64 = rest.strip_prefix(' ')?.parse().ok()?;
        value.is_finite().then_some(Self {
            name,
            labels,
            value,
        })
    }

    fn label(&self, name: &str) -> &str {
        self.labels.get(name).map_or("", String::as_str)
    }
}

/// The text up to the quotation mark, without its escapes, and what follows.
fn unquoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => value.push(match characters.next()?.1 {
                'n' => '\n',
                other => other,
            }),
            other => value.push(other),
        }
    }
    None
}

/// Whether a counter may have this name.
fn is_name(name: &str) -> bool {
    let is_usual = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    (1..=LONGEST_NAME).contains(&name.len()) && name.bytes().all(is_usual)
}

/// Converts the answer of the VMM of `vm`, whose process is `pid`.
pub fn series(vm: &str, pid: i32, answer: &str) -> Result<Series, Wrong> {
    let mut series = Series::default();
    let mut devices: BTreeMap<String, BTreeMap<String, f64>> = BTreeMap::new();
    let (mut has_info, mut has_state) = (false, false);
    let lines = answer.lines().enumerate();
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    for (count, (at, line)) in lines.enumerate() {
        if count >= MOST {
            return Err(Wrong::Many);
        }
        let line = Line::of(line).ok_or(Wrong::Line(at + 1))?;
        match line.name {
            "gantry_info" => {
                has_info = true;
                // 0 stands for a process in another PID namespace.
                let pid = if pid > 0 {
                    pid.to_string()
                } else {
                    String::new()
                };
                let labels = [vm, line.label("version"), &pid];
                series.set(metrics::VM_INFO, labels, 1.0);
            }
            "gantry_vm_state" => {
                if let Some(state) = STATES.iter().find(|state| **state == line.label("state")) {
                    has_state = true;
                    series.set(metrics::VM_STATE, [vm, state], line.value);
                }
            }
            "gantry_vm_vcpus" => series.set(metrics::VM_VCPUS, [vm], line.value),
            "gantry_vm_memory_bytes" => series.set(metrics::VM_MEMORY, [vm], line.value),
            "gantry_device_counter" if is_name(line.label("counter")) => {
                let device = devices.entry(line.label("device").to_owned()).or_default();
                device.insert(line.label("counter").to_owned(), line.value);
            }
            _ => {}
        }
    }
    if !has_info || !has_state {
        return Err(Wrong::NotGantry);
    }
    for (device, counters) in devices {
        match device.strip_prefix(VCPU) {
            Some(vcpu) if vcpu.parse::<u32>().is_ok() => exits(&mut series, vm, vcpu, &counters),
            _ => count(&mut series, vm, &device, counters),
        }
    }
    Ok(series)
}

/// The exits of a vCPU.
fn exits(series: &mut Series, vm: &str, vcpu: &str, counters: &BTreeMap<String, f64>) {
    for (name, value) in counters {
        match name.strip_suffix("_exits") {
            Some(reason) => {
                series.set(metrics::VM_EXITS_BY_REASON, [vm, vcpu, reason], *value);
            }
            None if name == "exits" => series.set(metrics::VM_EXITS, [vm, vcpu], *value),
            None => series.set(metrics::DEVICE_COUNTER, [vm, vcpu, name], *value),
        }
    }
}

/// The counters of a device.
fn count(series: &mut Series, vm: &str, device: &str, mut counters: BTreeMap<String, f64>) {
    for direction in ["read", "write"] {
        if let Some(values) = latencies(direction, &mut counters) {
            let labels = [vm, device, direction];
            series.set_distribution(metrics::DISK_DURATION, labels, values);
        }
    }
    for (name, value) in counters {
        match counter(&name) {
            Some(Counter::Plain(metric)) => series.set(metric, [vm, device], value),
            Some(Counter::Directed(metric, direction)) => {
                series.set(metric, [vm, device, direction], value);
            }
            None => series.set(metrics::DEVICE_COUNTER, [vm, device, &name], value),
        }
    }
}

/// Takes what a disk counts of the latencies of its requests in one direction; nothing if a part of it is missing, as from
/// an older VMM.
fn latencies(direction: &str, counters: &mut BTreeMap<String, f64>) -> Option<Distribution> {
    let name = |name: &str| format!("{direction}_{name}");
    let count = *counters.get(&name("ops"))? as u64;
    let sum = *counters.get(&name("latency_total"))? / 1e6;
    let limit_of = |name: &str| -> Option<u64> {
        let limit = name.strip_prefix(direction)?.strip_prefix(LIMIT)?;
        limit.strip_suffix(LIMIT_END)?.parse().ok()
    };
    let counts = counters.iter();
    let counts = counts.filter_map(|(name, count)| Some((limit_of(name)?, *count as u64)));
    let counts: BTreeMap<u64, u64> = counts.collect();
    if counts.is_empty() {
        return None;
    }
    // The counters are read one after the other while the disk goes on: a distribution must not fall.
    let mut least = 0;
    let within = { counts.into_iter() }.map(|(limit, count)| {
        least = least.max(count);
        (limit as f64 / 1e6, least)
    });
    let within = within.collect();
    let taken = [
        "ops",
        "latency_total",
        "latency_min",
        "latency_max",
        "latency_avg",
    ]
    .map(name);
    counters.retain(|name, _| !taken.contains(name) && limit_of(name).is_none());
    Some(Distribution {
        within,
        sum,
        count: count.max(least),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LEAST: &str = "gantry_info{version=\"1\"} 1\ngantry_vm_state{state=\"running\"} 1\n";

    fn text(more: &str) -> String {
        series("v", 7, &format!("{LEAST}{more}")).unwrap().text()
    }

    #[test]
    fn counters_become_typed_metrics_and_unknown_ones_keep_their_name() {
        let of = |device: &str, counter: &str, value: u64| {
            format!("gantry_device_counter{{device=\"{device}\",counter=\"{counter}\"}} {value}\n")
        };
        let text = text(
            &[
                "gantry_vm_vcpus 2\ngantry_vm_memory_bytes 1073741824\n",
                &of("_cpu0", "exits", 9),
                &of("_cpu0", "io_exits", 4),
                &of("d\\\"0", "read_bytes", 512),
                &of("n", "tx_frames", 3),
                &of("a", "workers_lost", 1),
                &of("g", "doorbells", 5),
                &of("g", "Bad name", 5),
                "gantry_unknown 7\n",
            ]
            .concat(),
        );
        for expected in [
            "gantry_vm_info{vm=\"v\",version=\"1\",pid=\"7\"} 1\n",
            "gantry_vm_state{vm=\"v\",state=\"running\"} 1\n",
            "gantry_vm_memory_bytes{vm=\"v\"} 1073741824\n",
            "gantry_vm_exits_total{vm=\"v\",vcpu=\"0\"} 9\n",
            "gantry_vm_exits_by_reason_total{vm=\"v\",vcpu=\"0\",reason=\"io\"} 4\n",
            "gantry_vm_disk_bytes_total{vm=\"v\",device=\"d\\\"0\",direction=\"read\"} 512\n",
            "gantry_vm_net_frames_total{vm=\"v\",device=\"n\",direction=\"transmit\"} 3\n",
            "gantry_vm_accel_workers_lost_total{vm=\"v\",device=\"a\"} 1\n",
            "gantry_vm_device_value{vm=\"v\",device=\"g\",counter=\"doorbells\"} 5\n",
        ] {
            assert!(text.contains(expected), "{expected} is missing in {text}");
        }
        assert!(!text.contains("Bad") && !text.contains("unknown"), "{text}");
    }

    #[test]
    fn the_latencies_of_a_disk_are_a_histogram_that_does_not_fall() {
        let limits = [50, 100, 1_000_000];
        let mut counters: BTreeMap<String, f64> = limits
            .map(|limit| (format!("read_within_{limit}us"), 3.0))
            .into();
        let others = [
            ("ops", 2.0),
            ("latency_total", 1500.0),
            ("latency_avg", 1.0),
        ];
        counters.extend(others.map(|(name, value)| (format!("read_{name}"), value)));
        counters.insert("read_within_100us".to_owned(), 1.0);
        let values = latencies("read", &mut counters).unwrap();
        assert_eq!((values.count, values.sum), (3, 0.0015));
        assert!(values.within.iter().all(|(_, count)| *count == 3));
        assert!(values.within.is_sorted_by(|one, other| one.0 < other.0));
        assert_eq!(values.within[0].0, 0.00005);
        assert!(counters.is_empty(), "{counters:?}");
    }

    #[test]
    fn what_an_older_vmm_counts_of_a_disk_is_kept() {
        let names = ["read_ops", "read_latency_avg", "read_within_50us"];
        let mut counters: BTreeMap<String, f64> = names.map(|name| (name.to_owned(), 1.0)).into();
        assert_eq!(latencies("read", &mut counters), None);
        assert_eq!(counters.len(), 3);
    }

    #[test]
    fn what_no_vmm_answers_is_refused() {
        let refused = |answer: &str| series("v", 7, answer).unwrap_err();
        assert_eq!(refused(""), Wrong::NotGantry);
        assert_eq!(refused("gantry_info 1\n"), Wrong::NotGantry);
        for line in [
            "x",
            "x{",
            "x{a=\"b} 1",
            "x{a=\"b\"",
            "x 1 2",
            "x NaN",
            "x inf",
            "x{a=\"b\"}1",
        ] {
            assert_eq!(refused(line), Wrong::Line(1), "{line}");
        }
        let many = "x 1\n".repeat(MOST + 1);
        assert_eq!(refused(&many), Wrong::Many);
    }

    proptest! {
        #[test]
        fn any_answer_is_taken_or_refused(answer in ".{0,200}", device in "\\PC{0,40}") {
            let _ = series("v", 7, &answer);
            let quoted = device.replace('\\', "\\\\").replace('"', "\\\"");
            let line = format!("x{{device=\"{quoted}\"}} 1");
            let line = Line::of(&line).unwrap();
            prop_assert_eq!(line.label("device"), device);
        }
    }
}
