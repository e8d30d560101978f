//! Metrics of a machine's VMs, arbiters and pools for Prometheus.
//!
//! ```text
//!   gantry --metrics-socket ─────────┐
//!   gantry-arbiter --metrics-socket ─┤  /run/gantry-metrics/NAME.KIND     GET /metrics
//!   gantry-accel --metrics-socket ───┴──< Scraper ────> Series ──────────> text <────── Prometheus
//! ```
//!
//! - [`metrics`]: the one list of metrics; [`series`]: their values, and the text.
//! - [`source`]: sockets; [`kind`]: what is behind them; `vm`, `arbiter` and `pool`: what they answer, as metrics; [`process`]:
//!   what the kernel says about them.
//! - [`scrape`]: asks all sources; [`serve`]: answers Prometheus.
//! - [`panels`]: what dashboards show; [`documents`]: the files that are made from both lists.

#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

mod arbiter;
pub mod documents;
pub mod kind;
pub mod metrics;
pub mod panels;
mod pool;
pub mod process;
pub mod scrape;
pub mod series;
pub mod serve;
pub mod source;
mod vm;
