//! The fields that scripts query, and the format of their values: nvidia-smi's.

use std::str::FromStr;

use clap::ValueEnum;

use crate::facts::Facts;

/// What is printed for an unknown value.
const UNKNOWN: &str = "[N/A]";

/// A property of a device that can be queried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Field {
    #[value(alias = "gpu_name")]
    Name,
    #[value(alias = "gpu_uuid")]
    Uuid,
    /// According to the quota.
    #[value(name = "memory.total")]
    MemoryTotal,
    #[value(name = "memory.used")]
    MemoryUsed,
    #[value(name = "memory.free")]
    MemoryFree,
    Index,
    /// The number of devices.
    Count,
    /// The version of the host's driver, which is unknown here.
    #[value(name = "driver_version")]
    DriverVersion,
    #[value(name = "compute_cap")]
    ComputeCap,
    #[value(name = "pci.bus_id", alias = "gpu_bus_id")]
    PciBusId,
    // What only the host sees, and scripts query together with the rest.
    #[value(name = "utilization.gpu")]
    UtilizationGpu,
    #[value(name = "utilization.memory")]
    UtilizationMemory,
    #[value(name = "temperature.gpu")]
    TemperatureGpu,
    #[value(name = "fan.speed")]
    FanSpeed,
    #[value(name = "power.draw")]
    PowerDraw,
    #[value(name = "power.limit")]
    PowerLimit,
    #[value(name = "pstate")]
    PerformanceState,
    #[value(name = "clocks.current.sm", alias = "clocks.sm")]
    ClocksSm,
    #[value(name = "clocks.current.memory", alias = "clocks.mem")]
    ClocksMemory,
}

impl Field {
    /// Whether only a context can tell.
    pub fn needs_context(self) -> bool {
        matches!(self, Self::MemoryUsed | Self::MemoryFree)
    }

    fn header(self) -> String {
        let value = self.to_possible_value();
        let name = value.as_ref().map_or("", |value| value.get_name());
        let unit = match self {
            Self::MemoryTotal | Self::MemoryUsed | Self::MemoryFree => " [MiB]",
            Self::UtilizationGpu | Self::UtilizationMemory | Self::FanSpeed => " [%]",
            Self::PowerDraw | Self::PowerLimit => " [W]",
            Self::ClocksSm | Self::ClocksMemory => " [MHz]",
            _ => "",
        };
        format!("{name}{unit}")
    }

    fn value(self, facts: &Facts, units: bool) -> Option<String> {
        let unit = if units { " MiB" } else { "" };
        let memory = |bytes: u64| format!("{}{unit}", bytes >> 20);
        Some(match self {
            Self::Name => facts.name.clone(),
            Self::Uuid => facts.uuid.clone(),
            Self::MemoryTotal => memory(facts.total),
            Self::MemoryUsed => memory(facts.used()?),
            Self::MemoryFree => memory(facts.free?),
            Self::Index => facts.index.to_string(),
            Self::Count => facts.count.to_string(),
            Self::ComputeCap => format!("{}.{}", facts.capability.0, facts.capability.1),
            Self::PciBusId => {
                let (domain, bus, slot) = facts.address?;
                format!("{domain:08X}:{bus:02X}:{slot:02X}.0")
            }
            Self::DriverVersion
            | Self::UtilizationGpu
            | Self::UtilizationMemory
            | Self::TemperatureGpu
            | Self::FanSpeed
            | Self::PowerDraw
            | Self::PowerLimit
            | Self::PerformanceState
            | Self::ClocksSm
            | Self::ClocksMemory => return None,
        })
    }
}

/// How fields are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    header: bool,
    units: bool,
}

impl FromStr for Format {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut words: Vec<_> = text.split(',').map(str::trim).collect();
        let mut has = |word| {
            let before = words.len();
            words.retain(|one| *one != word);
            words.len() < before
        };
        let (is_csv, header, units) = (has("csv"), !has("noheader"), !has("nounits"));
        if is_csv && words.is_empty() {
            return Ok(Self { header, units });
        }
        Err("it is csv, csv,noheader, csv,nounits or csv,noheader,nounits")
    }
}

/// One line for each device, preceded by a line with the names of the fields.
pub fn csv(fields: &[Field], format: Format, devices: &[Facts]) -> String {
    let line = |one: &dyn Fn(Field) -> String| {
        let values: Vec<_> = fields.iter().map(|field| one(*field)).collect();
        values.join(", ") + "\n"
    };
    let header = format.header.then(|| line(&Field::header));
    let value = |facts: &Facts, field: Field| {
        let value = field.value(facts, format.units);
        value.unwrap_or_else(|| UNKNOWN.to_owned())
    };
    let lines = devices
        .iter()
        .map(|facts| line(&|field| value(facts, field)));
    header.into_iter().chain(lines).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(fields: &str, format: &str) -> String {
        let fields = fields.split(',').map(|name| Field::from_str(name, false));
        let fields: Vec<_> = fields.map(Result::unwrap).collect();
        let devices = [Facts::example(0), Facts::example(1)];
        csv(&fields, format.parse().unwrap(), &devices)
    }

    #[test]
    fn values_have_the_form_that_scripts_expect() {
        assert_eq!(
            asked("index,count,memory.total,memory.used,memory.free", "csv"),
            "index, count, memory.total [MiB], memory.used [MiB], memory.free [MiB]\n\
             0, 2, 81559 MiB, 559 MiB, 81000 MiB\n\
             1, 2, 81559 MiB, [N/A], [N/A]\n"
        );
        assert_eq!(
            asked(
                "gpu_name,driver_version,compute_cap,gpu_bus_id",
                "csv, noheader"
            ),
            "NVIDIA H100 80GB HBM3, [N/A], 9.0, 00000000:0B:00.0\n\
             NVIDIA H100 80GB HBM3, [N/A], 9.0, 00000000:0C:00.0\n"
        );
        assert_eq!(
            asked("memory.total", "csv,nounits"),
            "memory.total [MiB]\n81559\n81559\n"
        );
        assert_eq!(
            asked("memory.total", "nounits,csv,noheader"),
            "81559\n81559\n"
        );
    }

    #[test]
    fn what_only_the_host_sees_is_asked_for_in_vain() {
        assert_eq!(
            asked(
                "index,utilization.gpu,temperature.gpu,power.draw,clocks.sm,pstate",
                "csv"
            ),
            "index, utilization.gpu [%], temperature.gpu, power.draw [W], clocks.current.sm [MHz], pstate\n\
             0, [N/A], [N/A], [N/A], [N/A], [N/A]\n\
             1, [N/A], [N/A], [N/A], [N/A], [N/A]\n"
        );
    }

    #[test]
    fn other_formats_are_refused() {
        for wrong in ["", "csv,", "xml", "noheader", "csv,noheaders"] {
            assert!(wrong.parse::<Format>().is_err(), "{wrong}");
        }
    }
}
