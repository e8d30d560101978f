//! Counters in Prometheus' text exposition format, version 0.0.4.

use std::fmt::Write;

use crate::{VmCounters, VmState};

/// Content type of [`Metrics::render`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The values to export.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics {
    /// The VM, if there is one.
    pub vm: Option<VmMetrics>,
}

/// The values to export for a VM.
#[derive(Clone, Debug, PartialEq)]
pub struct VmMetrics {
    /// Its state.
    pub state: VmState,
    /// Number of vCPUs that are plugged in.
    pub vcpus: u32,
    /// Bytes of memory that the guest has.
    pub memory_bytes: u64,
    /// Counters of its devices and vCPUs.
    pub counters: VmCounters,
}

impl Metrics {
    /// Renders the text: `gantry_up`, then the values of the VM if there is one.
    pub fn render(&self) -> String {
        let mut text = String::new();
        header(&mut text, "gantry_info", "gauge", "Version of the VMM.");
        line(
            &mut text,
            "gantry_info",
            &[("version", env!("CARGO_PKG_VERSION"))],
            1,
        );
        header(
            &mut text,
            "gantry_vm_state",
            "gauge",
            "1 for the state that the VM is in.",
        );
        let state = self.vm.as_ref().map(|vm| vm.state);
        for (candidate, name) in [
            (None, "none"),
            (Some(VmState::Created), "created"),
            (Some(VmState::Running), "running"),
            (Some(VmState::Paused), "paused"),
            (Some(VmState::Frozen), "frozen"),
            (Some(VmState::Shutdown), "shutdown"),
        ] {
            let value = u64::from(candidate == state);
            line(&mut text, "gantry_vm_state", &[("state", name)], value);
        }
        if let Some(vm) = &self.vm {
            vm.render(&mut text);
        }
        text
    }
}

impl VmMetrics {
    fn render(&self, text: &mut String) {
        header(
            text,
            "gantry_vm_vcpus",
            "gauge",
            "vCPUs that are plugged in.",
        );
        line(text, "gantry_vm_vcpus", &[], u64::from(self.vcpus));
        header(
            text,
            "gantry_vm_memory_bytes",
            "gauge",
            "Memory that the guest has.",
        );
        line(text, "gantry_vm_memory_bytes", &[], self.memory_bytes);
        if self
            .counters
            .values()
            .all(std::collections::BTreeMap::is_empty)
        {
            return;
        }
        // Some of the devices' values are gauges (such as an average latency), so no type is
        // declared.
        let help = "What devices and vCPUs count, as in vm.counters.";
        header(text, "gantry_device_counter", "untyped", help);
        for (device, counters) in &self.counters {
            for (counter, value) in counters {
                let labels = [("device", device.as_str()), ("counter", counter.as_str())];
                line(text, "gantry_device_counter", &labels, *value);
            }
        }
    }
}

fn header(text: &mut String, name: &str, kind: &str, help: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn line(text: &mut String, name: &str, labels: &[(&str, &str)], value: u64) {
    text.push_str(name);
    base::exposition::labels(text, labels);
    let _ = writeln!(text, " {value}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_cannot_break_out_of_their_label() {
        let counters = VmCounters::from([(
            "a\"b\\c\nd".to_owned(),
            [("read_bytes".to_owned(), 7)].into(),
        )]);
        let vm = Some(VmMetrics {
            state: VmState::Running,
            vcpus: 2,
            memory_bytes: 1 << 30,
            counters,
        });
        let text = Metrics { vm }.render();
        let expected =
            "gantry_device_counter{device=\"a\\\"b\\\\c\\nd\",counter=\"read_bytes\"} 7\n";
        assert!(text.ends_with(expected), "{text}");
        assert!(text.contains("gantry_vm_state{state=\"running\"} 1\n"));
        assert!(text.contains("gantry_vm_vcpus 2\n"));
    }

    #[test]
    fn without_a_vm_there_is_still_something_to_scrape() {
        let text = Metrics::default().render();
        assert!(text.contains("gantry_vm_state{state=\"none\"} 1\n"));
        assert!(!text.contains("gantry_vm_vcpus"));
    }
}
