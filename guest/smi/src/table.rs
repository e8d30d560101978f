//! A table of the devices for a terminal of 80 columns.

use std::fmt::Write as _;

use crate::facts::Facts;

/// The maximum width, as far as it can be reached by shortening names.
const WIDTH: usize = 80;
/// The minimum width of a shortened name.
const NAME: usize = 8;
/// As much of a UUID as `-i` and `CUDA_VISIBLE_DEVICES` need.
const UUID: usize = "GPU-01234567".len();
/// What is printed for an unknown value.
const UNKNOWN: &str = "-";
const HEADINGS: [&str; COLUMNS] = ["GPU", "NAME", "USED/MiB", "OF", "CC", "PCI", "UUID"];
const COLUMNS: usize = 7;
/// The columns of numbers, which are right-aligned.
const NUMBERS: [usize; 4] = [0, 2, 3, 4];

fn row(facts: &Facts) -> [String; COLUMNS] {
    let memory = |bytes: u64| (bytes >> 20).to_string();
    let unknown = || UNKNOWN.to_owned();
    let address = facts
        .address
        .map(|(domain, bus, slot)| format!("{domain:04x}:{bus:02x}:{slot:02x}.0"));
    [
        facts.index.to_string(),
        facts.name.clone(),
        facts.used().map_or_else(unknown, memory),
        memory(facts.total),
        format!("{}.{}", facts.capability.0, facts.capability.1),
        address.unwrap_or_else(unknown),
        facts.uuid.chars().take(UUID).collect(),
    ]
}

/// One line for each device, below the driver's version and the headings.
pub fn table(version: i32, devices: &[Facts]) -> String {
    let mut rows = vec![HEADINGS.map(str::to_owned)];
    rows.extend(devices.iter().map(row));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let mut widths: [usize; COLUMNS] = std::array::from_fn(|column| width(column).unwrap_or(0));
    let others = widths.iter().sum::<usize>() - widths[1] + 2 * (COLUMNS - 1);
    widths[1] = widths[1].min(WIDTH.saturating_sub(others).max(NAME));
    let mut text = format!("CUDA {}.{}\n", version / 1000, version % 1000 / 10);
    for row in rows {
        let mut line = String::new();
        for (column, (value, width)) in row.iter().zip(widths).enumerate() {
            let value: String = value.chars().take(width).collect();
            // Writing to a string cannot fail.
            let _ = if NUMBERS.contains(&column) {
                write!(line, "{value:>width$}  ")
            } else {
                write!(line, "{value:width$}  ")
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_one_below_the_other() {
        assert_eq!(
            table(13_000, &[Facts::example(0), Facts::example(1)]),
            "CUDA 13.0\n\
             GPU  NAME                   USED/MiB     OF   CC  PCI           UUID\n\
             \u{20} 0  NVIDIA H100 80GB HBM3       559  81559  9.0  0000:0b:00.0  GPU-01020304\n\
             \u{20} 1  NVIDIA H100 80GB HBM3         -  81559  9.0  0000:0c:00.0  GPU-01020304\n"
        );
    }

    #[test]
    fn a_long_name_is_shortened_to_the_width_of_a_terminal() {
        let mut long = Facts::example(0);
        long.name = "é".repeat(300);
        let text = table(12_080, &[long]);
        assert!(text.starts_with("CUDA 12.8\n"), "{text}");
        assert!(
            text.lines().all(|line| line.chars().count() <= WIDTH),
            "{text}"
        );
        assert!(text.contains("  0000:0b:00.0  GPU-01020304\n"), "{text}");
    }
}
