//! The files that are made from the lists of [metrics](crate::metrics) and [panels](crate::panels).
//!
//! `cargo run -p gantry-exporter --example documents` writes them. A test compares them with the lists.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::{
    metrics,
    panels::{self, Panel},
};

/// A file, with its path in the repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// Path relative to the repository's root.
    pub path: &'static str,
    /// Its contents.
    pub text: String,
}

/// All files.
pub fn all() -> [Document; 3] {
    let of = |path, text| Document { path, text };
    [
        of("docs/reference/metrics.md", reference()),
        of("resources/monitoring/grafana.json", grafana()),
        of("resources/monitoring/consoles/gantry.html", console()),
    ]
}

/// The reference page.
fn reference() -> String {
    let mut page = "# Metrics

`gantry-exporter` serves these metrics at `/metrics`; see [Watch VMs and shared devices](../user/monitoring.md). Units are seconds,
bytes, and ratios from 0 to 1. Metrics without a value are absent: those of devices that a VM does not have, for
example. This page is made from the exporter's list (`cargo run -p gantry-exporter --example documents`).

| metric | type | labels | meaning |
|---|---|---|---|
"
    .to_owned();
    for metric in metrics::ALL {
        let labels = metric.labels.iter().map(|label| format!("`{label}`"));
        let labels = labels.collect::<Vec<_>>().join(", ");
        let (name, kind, help) = (metric.name, metric.kind.name(), metric.help);
        // Writing to a string cannot fail.
        let _ = writeln!(page, "| `{name}` | {kind} | {labels} | {help} |");
    }
    page
}

/// The dashboard for Grafana.
fn grafana() -> String {
    /// Size of a panel in the units of Grafana's grid, which is 24 wide.
    const SIZE: (usize, usize) = (12, 8);
    let source = json!({"type": "prometheus", "uid": "${datasource}"});
    let panel = |(at, panel): (usize, &Panel)| -> Value {
        let legend = panel.labels.iter().map(|label| format!("{{{{{label}}}}}"));
        let legend = legend.collect::<Vec<_>>().join(" ");
        json!({
            "id": at + 1,
            "type": "timeseries",
            "title": panel.title,
            "datasource": source,
            "gridPos": {"x": at % 2 * SIZE.0, "y": at / 2 * SIZE.1, "w": SIZE.0, "h": SIZE.1},
            "fieldConfig": {"defaults": {"unit": panel.unit.grafana(), "min": 0}, "overrides": []},
            "targets": [{
                "refId": "A", "datasource": source, "expr": panel.query, "legendFormat": legend,
            }],
        })
    };
    let panels: Vec<_> = panels::ALL.iter().enumerate().map(panel).collect();
    let dashboard = json!({
        "title": "Gantry",
        "uid": "gantry",
        "tags": ["gantry"],
        "schemaVersion": 38,
        "editable": true,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{
            "name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus",
        }]},
        "panels": panels,
    });
    format!("{dashboard:#}\n")
}

/// The console template for Prometheus.
fn console() -> String {
    let mut page = r#"{{ template "head" . }}
{{ template "prom_content_head" . }}
<h1>Gantry</h1>
"#
    .to_owned();
    for (at, panel) in panels::ALL.iter().enumerate() {
        let names = panel.labels.iter().map(|label| format!("[[ {label} ]]"));
        let names = names.collect::<Vec<_>>().join(" ");
        let [query, names, axis] = [panel.query, &names, panel.unit.axis()].map(|text| json!(text));
        let title = panel.title;
        let _ = write!(
            page,
            r##"
<h3>{title}</h3>
<div id="graph{at}"></div>
<script>
new PromConsole.Graph({{
  node: document.querySelector("#graph{at}"),
  expr: {query},
  name: {names},
  yTitle: {axis},
  min: 0,
  yAxisFormatter: PromConsole.NumberFormatter.humanizeNoSmallPrefix,
  yHoverFormatter: PromConsole.NumberFormatter.humanizeNoSmallPrefix
}})
</script>
"##
        );
    }
    page.push_str("{{ template \"prom_content_tail\" . }}\n{{ template \"tail\" }}\n");
    page
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    use super::*;

    fn root() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
    }

    /// The words in a text that begin like a metric of Gantry.
    fn metrics_in(text: &str) -> BTreeSet<&str> {
        text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_')
            .filter(|word| word.starts_with("gantry_"))
            .collect()
    }

    #[test]
    fn files_are_as_the_lists_say() {
        for Document { path, text } in all() {
            let there = fs::read_to_string(root().join(path)).unwrap_or_default();
            assert!(
                there == text,
                "{path} differs from the exporter's lists: cargo run -p gantry-exporter --example documents"
            );
        }
    }

    #[test]
    fn panels_name_metrics_and_labels_that_exist() {
        for panel in panels::ALL {
            let names = metrics_in(panel.query);
            assert!(!names.is_empty(), "{}", panel.title);
            for name in names {
                let metric = metrics::named(name);
                let metric = metric.unwrap_or_else(|| panic!("{}: no metric {name}", panel.title));
                for label in panel.labels {
                    assert!(metric.labels.contains(label), "{}: {label}", panel.title);
                }
            }
        }
        let titles: BTreeSet<_> = panels::ALL.iter().map(|panel| panel.title).collect();
        assert_eq!(titles.len(), panels::ALL.len());
    }

    #[test]
    fn rules_their_tests_and_the_guide_name_metrics_that_exist() {
        for path in [
            "resources/monitoring/gantry.rules.yml",
            "resources/monitoring/gantry.test.yml",
            "docs/user/monitoring.md",
            "docs/user/sharing.md",
        ] {
            let text = fs::read_to_string(root().join(path)).unwrap();
            let names = metrics_in(&text);
            assert!(!names.is_empty(), "{path}");
            for name in names {
                assert!(metrics::named(name).is_some(), "{path}: no metric {name}");
            }
        }
    }
}
