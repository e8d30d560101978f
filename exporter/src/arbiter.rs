//! The status of an arbiter or of gantry-gpu, as typed metrics.

use gpu_mediator::status::{Client, Status};

use crate::{
    metrics::{self, Metric},
    series::Series,
};

/// Maximum number of clients of an arbiter that have series: as many as an arbiter remembers, and some more. A sum of the
/// others would fall whenever one of them is forgotten.
const MOST: usize = 1100;

fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

/// The figures of a client, by metric.
fn figures(client: &Client) -> [(&'static Metric, f64); 10] {
    [
        (metrics::CLIENT_DEVICE_SECONDS, seconds(client.device_time)),
        (
            metrics::CLIENT_QUEUEING_SECONDS,
            seconds(client.queueing_time),
        ),
        (metrics::CLIENT_TURNS, client.turns as f64),
        (metrics::CLIENT_CALLS, client.calls as f64),
        (metrics::CLIENT_SYNCHRONOUS, client.synchronous_calls as f64),
        (metrics::CLIENT_KILLED, client.killed as f64),
        (metrics::CLIENT_MEMORY, client.memory as f64),
        (metrics::CLIENT_WEIGHT, f64::from(client.weight)),
        (metrics::CLIENT_WORKERS, client.workers as f64),
        (metrics::CLIENT_HOLDS, f64::from(u8::from(client.holds))),
    ]
}

/// Converts the status of an arbiter.
pub fn series(arbiter: &str, status: &Status) -> Series {
    let mut series = Series::default();
    series.set(metrics::ARBITER_INFO, [arbiter, &status.policy], 1.0);
    let uptime = seconds(status.uptime);
    series.set(metrics::ARBITER_UPTIME, [arbiter], uptime);
    let present = status.clients.iter().filter(|client| client.workers > 0);
    let weights: f64 = present.map(|client| f64::from(client.weight)).sum();
    for client in status.clients.iter().take(MOST) {
        let due = match client.workers {
            0 => 0.0,
            // All are idle ones.
            _ if weights == 0.0 => 0.0,
            _ => f64::from(client.weight) / weights,
        };
        let due = (metrics::CLIENT_DUE, due);
        let waits = &client.waits;
        for (quantile, wait) in [
            ("0.5", waits.p50),
            ("0.95", waits.p95),
            ("0.99", waits.p99),
            ("1", waits.longest),
        ] {
            let labels = [arbiter, &client.name, quantile];
            series.set(metrics::CLIENT_WAIT, labels, seconds(wait));
        }
        if let Some(delay) = &client.delay {
            let labels = [arbiter, &client.name, &delay.by];
            series.set(metrics::CLIENT_DELAY, labels, seconds(delay.nanos));
        }
        for (metric, value) in figures(client).into_iter().chain([due]) {
            series.set(metric, [arbiter, &client.name], value);
        }
    }
    let left_out = status.clients.len().saturating_sub(MOST);
    series.set(metrics::ARBITER_LEFT_OUT, [arbiter], left_out as f64);
    series
}

#[cfg(test)]
mod tests {
    use gpu_mediator::status::{Delay, Waits};

    use super::*;

    fn client(name: &str, weight: u32, workers: usize) -> Client {
        Client {
            name: name.to_owned(),
            weight,
            latency: 0,
            workers,
            device_time: 1_500_000_000,
            queueing_time: 250_000_000,
            turns: 7,
            calls: 8,
            synchronous_calls: 3,
            memory: 1 << 33,
            killed: 1,
            holds: workers > 0,
            beside: false,
            waits: Waits {
                p99: 12_000_000,
                ..Waits::default()
            },
            delay: (name == "b").then(|| Delay {
                by: "123/a".to_owned(),
                nanos: 60_000_000,
            }),
        }
    }

    #[test]
    fn each_client_has_a_line_of_each_figure() {
        let status = Status {
            policy: "fair".to_owned(),
            uptime: 2_000_000_000,
            clients: vec![
                client("123/a", 1, 1),
                client("b", 3, 2),
                client("gone", 4, 0),
            ],
        };
        let text = series("r", &status).text();
        let of = |metric: &Metric, client: &str, value: &str| {
            let name = metric.name;
            format!("{name}{{arbiter=\"r\",client=\"{client}\"}} {value}\n")
        };
        for expected in [
            "gantry_arbiter_info{arbiter=\"r\",policy=\"fair\"} 1\n".to_owned(),
            "gantry_arbiter_uptime_seconds{arbiter=\"r\"} 2\n".to_owned(),
            of(metrics::CLIENT_DEVICE_SECONDS, "123/a", "1.5"),
            of(metrics::CLIENT_QUEUEING_SECONDS, "gone", "0.25"),
            of(metrics::CLIENT_TURNS, "123/a", "7"),
            of(metrics::CLIENT_CALLS, "123/a", "8"),
            of(metrics::CLIENT_SYNCHRONOUS, "123/a", "3"),
            of(metrics::CLIENT_KILLED, "123/a", "1"),
            of(metrics::CLIENT_MEMORY, "123/a", "8589934592"),
            of(metrics::CLIENT_WEIGHT, "gone", "4"),
            of(metrics::CLIENT_DUE, "123/a", "0.25"),
            of(metrics::CLIENT_DUE, "b", "0.75"),
            of(metrics::CLIENT_DUE, "gone", "0"),
            of(metrics::CLIENT_WORKERS, "gone", "0"),
            of(metrics::CLIENT_HOLDS, "123/a", "1"),
            "gantry_client_wait_seconds{arbiter=\"r\",client=\"b\",quantile=\"0.99\"} 0.012\n"
                .to_owned(),
            "gantry_client_delay_seconds{arbiter=\"r\",client=\"b\",by=\"123/a\"} 0.06\n"
                .to_owned(),
        ] {
            assert!(text.contains(&expected), "{expected} is missing in {text}");
        }
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        assert_eq!(lines.count(), 3 + 15 * 3 + 1);
    }

    #[test]
    fn there_are_no_series_of_more_clients_than_an_arbiter_remembers() {
        let clients = (0..MOST + 24).map(|number| client(&number.to_string(), 1, 1));
        let status = Status {
            clients: clients.collect(),
            ..Status::default()
        };
        let text = series("r", &status).text();
        let lines = text.lines();
        let lines = lines.filter(|line| line.starts_with(metrics::CLIENT_CALLS.name));
        assert_eq!(lines.count(), MOST);
        assert!(text.contains("gantry_arbiter_clients_left_out{arbiter=\"r\"} 24\n"));
    }
}
