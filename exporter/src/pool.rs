//! The status of a pool, as typed metrics.

use remoting_pool::status::Status;

use crate::{metrics, series::Series};

/// Converts the status of a pool.
pub fn series(pool: &str, status: &Status) -> Series {
    let mut series = Series::default();
    let uptime = status.uptime as f64 / 1e9;
    series.set(metrics::POOL_UPTIME, [pool], uptime);
    for (state, count) in [("waiting", status.waiting), ("serving", status.serving)] {
        series.set(metrics::POOL_WORKERS, [pool, state], count as f64);
    }
    for (metric, value) in [
        (metrics::POOL_MACHINES, status.machines),
        (metrics::POOL_MOST, status.most),
        (metrics::POOL_WINDOWS, status.windows),
        (metrics::POOL_STARTED, status.started),
        (metrics::POOL_SERVED, status.served),
        (metrics::POOL_FAILED, status.failed),
        (metrics::POOL_LOST, status.lost),
        (metrics::POOL_REFUSED, status.refused),
    ] {
        series.set(metric, [pool], value as f64);
    }
    series
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_figure_has_its_metric() {
        let status = Status {
            uptime: 1_500_000_000,
            waiting: 2,
            serving: 3,
            machines: 4,
            most: 5,
            windows: 6,
            started: 7,
            served: 8,
            failed: 9,
            lost: 10,
            refused: 11,
        };
        let text = series("p", &status).text();
        let values: Vec<f64> = text
            .lines()
            .filter(|line| !line.starts_with('#'))
            .map(|line| line.rsplit(' ').next().unwrap().parse().unwrap())
            .collect();
        assert_eq!(
            values,
            [1.5, 3.0, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
        );
        assert!(text.contains("gantry_pool_workers{pool=\"p\",state=\"waiting\"} 2\n"));
    }
}
