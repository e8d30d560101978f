//! Values of metrics, and their text (Prometheus' exposition format, version 0.0.4).

use std::{
    collections::BTreeMap,
    fmt::Write,
    hash::{DefaultHasher, Hash, Hasher},
};

use crate::metrics::{self, Kind, Metric};

/// Content type of [`Series::text`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Maximum length of a label's value in characters. Sources are not trusted to have short names.
const LONGEST_LABEL: usize = 128;
/// Maximum length of a number in bytes.
const LONGEST_NUMBER: usize = 24;

/// A distribution of observations.
#[derive(Clone, Debug, PartialEq)]
pub struct Distribution {
    /// Upper limits in base units, rising, and the number of observations within each.
    pub within: Vec<(f64, u64)>,
    /// The sum of all observations.
    pub sum: f64,
    /// The number of all observations.
    pub count: u64,
}

#[derive(Clone, Debug, PartialEq)]
enum Value {
    Number(f64),
    Distribution(Distribution),
}

/// Values by metric and labels. There is one for each combination of labels: Prometheus would refuse everything otherwise.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series(BTreeMap<(&'static str, Vec<String>), Value>);

impl Series {
    /// Sets the value of a metric that is a number. There is a label's value for each label.
    pub fn set<const N: usize>(&mut self, metric: &Metric, labels: [&str; N], value: f64) {
        debug_assert_ne!(metric.kind, Kind::Histogram, "{}", metric.name);
        self.put(metric, &labels, Value::Number(value));
    }

    /// Sets the value of a histogram.
    pub fn set_distribution<const N: usize>(
        &mut self,
        metric: &Metric,
        labels: [&str; N],
        value: Distribution,
    ) {
        debug_assert_eq!(metric.kind, Kind::Histogram, "{}", metric.name);
        self.put(metric, &labels, Value::Distribution(value));
    }

    fn put(&mut self, metric: &Metric, labels: &[&str], value: Value) {
        debug_assert_eq!(labels.len(), metric.labels.len(), "{}", metric.name);
        let labels = labels.iter().map(|label| shortened(label)).collect();
        self.0.insert((metric.name, labels), value);
    }

    /// Maximum size of the text in bytes, without the help texts.
    pub fn bytes(&self) -> usize {
        let sizes = self.0.iter().map(|((name, labels), value)| {
            let lines = match value {
                Value::Number(_) => 1,
                Value::Distribution(values) => values.within.len() + 3,
            };
            let is_escaped = |letter: &char| ['\\', '"', '\n'].contains(letter);
            let escapes = |label: &str| label.chars().filter(is_escaped).count();
            // With the names of labels, punctuation, and the end and the limit of a histogram's lines.
            let labels = { labels.iter() }.map(|label| label.len() + escapes(label) + 16);
            lines * (name.len() + labels.sum::<usize>() + 16 + 2 * LONGEST_NUMBER)
        });
        sizes.sum()
    }

    /// Adds the values of another source.
    pub fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// The text. Metrics without values are left out.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for metric in metrics::ALL {
            let from = (metric.name, Vec::new());
            let values = self.0.range(from..);
            let values = values.take_while(|((name, _), _)| *name == metric.name);
            for (at, ((name, labels), value)) in values.enumerate() {
                if at == 0 {
                    let (help, kind) = (metric.help, metric.kind.name());
                    // Writing to a string cannot fail.
                    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
                }
                let names = metric.labels.iter().copied();
                let labels: Vec<_> = names.zip(labels.iter().map(String::as_str)).collect();
                match value {
                    Value::Number(number) => line(&mut text, name, "", &labels, *number),
                    Value::Distribution(values) => distribution(&mut text, name, &labels, values),
                }
            }
        }
        text
    }
}

/// A label's value that is not too long. What is cut off is told apart by its hash.
fn shortened(label: &str) -> String {
    /// Length of a mark and of a hash.
    const HASH: usize = 1 + 16;
    if label.chars().nth(LONGEST_LABEL).is_none() {
        return label.to_owned();
    }
    let mut hash = DefaultHasher::new();
    label.hash(&mut hash);
    let start = label.chars().take(LONGEST_LABEL - HASH);
    format!("{}~{:016x}", start.collect::<String>(), hash.finish())
}

/// A number of at most [`LONGEST_NUMBER`] bytes.
fn number(value: f64) -> String {
    match value.abs() {
        0.0 | 1e-4..1e20 => value.to_string(),
        _ => format!("{value:e}"),
    }
}

fn distribution(text: &mut String, name: &str, labels: &[(&str, &str)], values: &Distribution) {
    let limited = |limit: &str, count: u64, text: &mut String| {
        let labels = [labels, &[("le", limit)]].concat();
        line(text, name, "_bucket", &labels, count as f64);
    };
    for (limit, count) in &values.within {
        limited(&number(*limit), *count, text);
    }
    limited("+Inf", values.count, text);
    line(text, name, "_sum", labels, values.sum);
    line(text, name, "_count", labels, values.count as f64);
}

fn line(text: &mut String, name: &str, end: &str, labels: &[(&str, &str)], value: f64) {
    text.push_str(name);
    text.push_str(end);
    base::exposition::labels(text, labels);
    let _ = writeln!(text, " {}", number(value));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_break_out_of_their_label_and_are_short() {
        let mut series = Series::default();
        series.set(metrics::VM_VCPUS, ["a\"b\\c\nd"], 2.0);
        series.set(metrics::VM_MEMORY, [&"x".repeat(1000)], 1.5);
        let text = series.text();
        let line = "gantry_vm_vcpus{vm=\"a\\\"b\\\\c\\nd\"} 2\n";
        assert!(text.contains(line), "{text}");
        let short = shortened(&"x".repeat(1000));
        assert_eq!(short.len(), LONGEST_LABEL);
        assert_ne!(short, shortened(&"x".repeat(1001)));
        let line = format!("{{vm=\"{short}\"}} 1.5\n");
        assert!(text.contains(&line), "{text}");
        assert_eq!(text.lines().count(), 6);
    }

    #[test]
    fn the_text_is_no_longer_than_was_said_whatever_the_values_are() {
        for value in [
            0.0,
            5e-324,
            -1.0 / 3.0,
            u64::MAX as f64,
            1.234_567_890_123_456_7e-4,
            123_456_789.123_456_78,
            f64::MAX,
        ] {
            let shown = number(value);
            assert!(shown.len() <= LONGEST_NUMBER, "{shown}");
            assert_eq!(shown.parse::<f64>().unwrap(), value);
            let mut series = Series::default();
            series.set(metrics::VM_MEMORY, [&"\"".repeat(LONGEST_LABEL)], value);
            let values = Distribution {
                within: vec![(value, u64::MAX); 12],
                sum: value,
                count: u64::MAX,
            };
            series.set_distribution(metrics::DISK_DURATION, ["\n\\", "d", "read"], values);
            let text = series.text();
            let lines = text.split_inclusive('\n');
            let lines = lines.filter(|line| !line.starts_with('#'));
            let length: usize = lines.map(str::len).sum();
            assert!(length <= series.bytes(), "{length} {}", series.bytes());
        }
    }

    #[test]
    fn a_distribution_has_its_limits_sum_and_count_and_each_series_is_there_once() {
        let mut series = Series::default();
        let labels = ["v", "d", "read"];
        for count in [7, 3] {
            let values = Distribution {
                within: vec![(0.00005, 1), (1.0, 2)],
                sum: 0.25,
                count,
            };
            series.set_distribution(metrics::DISK_DURATION, labels, values);
        }
        let text = series.text();
        let name = metrics::DISK_DURATION.name;
        let labels = "vm=\"v\",device=\"d\",direction=\"read\"";
        let lines: Vec<_> = text.lines().skip(2).collect();
        assert_eq!(
            lines,
            [
                format!("{name}_bucket{{{labels},le=\"5e-5\"}} 1"),
                format!("{name}_bucket{{{labels},le=\"1\"}} 2"),
                format!("{name}_bucket{{{labels},le=\"+Inf\"}} 3"),
                format!("{name}_sum{{{labels}}} 0.25"),
                format!("{name}_count{{{labels}}} 3"),
            ]
        );
    }
}
