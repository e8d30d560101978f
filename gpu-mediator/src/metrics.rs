//! The arbiter's figures in Prometheus' text exposition format, version 0.0.4.
//!
//! `gantry-top --metrics` prints them; nothing serves them. The arbiter has one socket for one
//! document, and a machine's metrics collector (node_exporter) reads such text from a file.

use std::fmt::{Display, Write};

use crate::status::{Client, Status};

/// A metric's name and help text, and a function of its value for a client.
type Metric<'a> = (&'a str, &'a str, &'a dyn Fn(&Client) -> f64);

fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

/// Renders the text.
pub fn render(status: &Status) -> String {
    let mut text = String::new();
    let weights: u64 = present(status).map(|client| u64::from(client.weight)).sum();
    let due = |client: &Client| match client.workers {
        0 => 0.0,
        _ => f64::from(client.weight) / weights as f64,
    };
    let counters: [Metric<'_>; 6] = [
        (
            "device_seconds_total",
            "Time for which the client has had the device.",
            &|client| seconds(client.device_time),
        ),
        (
            "queueing_seconds_total",
            "Time for which the client has waited for the device.",
            &|client| seconds(client.queueing_time),
        ),
        (
            "turns_total",
            "How often the client was given the device.",
            &|client| client.turns as f64,
        ),
        (
            "calls_total",
            "Requests that the client has submitted.",
            &|client| client.calls as f64,
        ),
        (
            "synchronous_calls_total",
            "Calls whose answers the client has waited for.",
            &|client| client.synchronous_calls as f64,
        ),
        (
            "killed_workers_total",
            "Workers that were ended because a request took too long.",
            &|client| client.killed as f64,
        ),
    ];
    let gauges: [Metric<'_>; 5] = [
        (
            "memory_bytes",
            "Device memory that the client has.",
            &|client| client.memory as f64,
        ),
        ("weight", "The client's weight.", &|client| {
            f64::from(client.weight)
        }),
        (
            "due_ratio",
            "The part of the device that the weight stands for, among clients that have workers.",
            &due,
        ),
        (
            "workers",
            "The client's workers, one for each application.",
            &|client| client.workers as f64,
        ),
        (
            "holds",
            "Whether the client has the device now.",
            &|client| f64::from(u8::from(client.holds)),
        ),
    ];
    let policy = [("policy", status.policy.as_str())];
    header(&mut text, "gantry_arbiter_info", "gauge", "The policy.");
    line(&mut text, "gantry_arbiter_info", &policy, 1);
    let uptime = "gantry_arbiter_uptime_seconds";
    header(
        &mut text,
        uptime,
        "gauge",
        "Time since the arbiter's start.",
    );
    line(&mut text, uptime, &[], seconds(status.uptime));
    let counters = counters.map(|metric| ("counter", metric));
    let gauges = gauges.map(|metric| ("gauge", metric));
    for (kind, (name, help, value)) in counters.into_iter().chain(gauges) {
        let name = format!("gantry_client_{name}");
        header(&mut text, &name, kind, help);
        for client in &status.clients {
            let label = [("client", client.name.as_str())];
            line(&mut text, &name, &label, value(client));
        }
    }
    text
}

fn present(status: &Status) -> impl Iterator<Item = &Client> {
    status.clients.iter().filter(|client| client.workers > 0)
}

fn header(text: &mut String, name: &str, kind: &str, help: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn line(text: &mut String, name: &str, labels: &[(&str, &str)], value: impl Display) {
    text.push_str(name);
    for (label, value) in labels {
        // Names contain no control characters: see `Join::from_bytes`.
        let value = value.replace('\\', "\\\\").replace('"', "\\\"");
        let _ = write!(text, "{{{label}=\"{value}\"}}");
    }
    let _ = writeln!(text, " {value}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_client_has_a_line_of_each_figure() {
        let client = |name: &str, weight, workers| Client {
            name: name.to_owned(),
            weight,
            workers,
            device_time: 1_500_000_000,
            queueing_time: 250_000_000,
            turns: 7,
            calls: 8,
            synchronous_calls: 3,
            memory: 1 << 33,
            killed: 1,
            holds: workers > 0,
        };
        let text = render(&Status {
            policy: "fair".to_owned(),
            uptime: 2_000_000_000,
            clients: vec![
                client("123/a", 1, 1),
                client("a \"b\\", 3, 2),
                client("gone", 4, 0),
            ],
        });
        for expected in [
            "# TYPE gantry_client_device_seconds_total counter\n",
            "gantry_arbiter_info{policy=\"fair\"} 1\n",
            "gantry_arbiter_uptime_seconds 2\n",
            "gantry_client_device_seconds_total{client=\"123/a\"} 1.5\n",
            "gantry_client_queueing_seconds_total{client=\"gone\"} 0.25\n",
            "gantry_client_turns_total{client=\"123/a\"} 7\n",
            "gantry_client_calls_total{client=\"123/a\"} 8\n",
            "gantry_client_synchronous_calls_total{client=\"123/a\"} 3\n",
            "gantry_client_killed_workers_total{client=\"123/a\"} 1\n",
            "gantry_client_memory_bytes{client=\"123/a\"} 8589934592\n",
            "gantry_client_weight{client=\"gone\"} 4\n",
            "gantry_client_due_ratio{client=\"123/a\"} 0.25\n",
            "gantry_client_due_ratio{client=\"a \\\"b\\\\\"} 0.75\n",
            "gantry_client_due_ratio{client=\"gone\"} 0\n",
            "gantry_client_workers{client=\"gone\"} 0\n",
            "gantry_client_holds{client=\"123/a\"} 1\n",
        ] {
            assert!(text.contains(expected), "{expected} is missing in {text}");
        }
        let series = text.lines().filter(|line| !line.starts_with('#'));
        assert_eq!(series.count(), 2 + 11 * 3);
    }
}
