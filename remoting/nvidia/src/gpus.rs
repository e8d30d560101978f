//! The GPUs of a host, as NVIDIA's kernel module lists them in `/proc/driver/nvidia/gpus`: a folder for each PCI address,
//! with a file of names and values.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use base::gpus::{Address, Gpu, Selection, Unmatched};

use crate::device::Shown;

/// Where the kernel module lists them.
pub const LISTED: &str = "/proc/driver/nvidia/gpus";

/// Why a selection cannot be resolved.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The list cannot be read.
    #[error("cannot read {}: is the driver's kernel module loaded?", .0.display())]
    List(PathBuf, #[source] io::Error),
    /// The kernel module does not say which device file is a GPU's.
    #[error("{} names no device file: select all GPUs", .0.display())]
    NoFile(PathBuf),
    /// The selection does not fit.
    #[error(transparent)]
    Unmatched(#[from] Unmatched),
}

/// A GPU and how programs see it, from the kernel module's text; nothing for one that is excluded from use. `None`: the text
/// does not say.
fn parse(address: &str, text: &str) -> Option<Option<(Gpu, Shown)>> {
    let value = |name: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once(':'));
        let found = lines.find(|(key, _)| *key == name);
        found.map(|(_, value)| value.trim())
    };
    if value("GPU Excluded") == Some("Yes") {
        return Some(None);
    }
    let number = value("Device Minor")?.parse().ok()?;
    let address: Address = address.parse().ok()?;
    let place = u32::from(address.bus) << 8 | u32::from(address.device);
    let shown = Shown {
        number,
        id: address.domain << 16 | place,
    };
    // Question marks, as long as no program has used the GPU.
    let is_known = |uuid: &&str| uuid.starts_with("GPU-") && !uuid.contains('?');
    let gpu = Gpu {
        name: value("Model").unwrap_or_default().to_owned(),
        uuid: value("GPU UUID").filter(is_known).map(str::to_owned),
        address: Some(address),
    };
    Some(Some((gpu, shown)))
}

/// The selected GPUs, of those that are listed in a folder and not excluded from use.
///
/// # Errors
/// The list cannot be read, or the selection does not fit.
pub fn files(selection: &Selection, listed: &Path) -> Result<Vec<Shown>, Error> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        |error| Error::List(path, error)
    };
    let (mut gpus, mut all) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(listed).map_err(failed(listed))? {
        let entry = entry.map_err(failed(listed))?;
        let path = entry.path().join("information");
        let text = fs::read_to_string(&path).map_err(failed(&path))?;
        let address = entry.file_name();
        let parsed = parse(&address.to_string_lossy(), &text);
        let Some((gpu, shown)) = parsed.ok_or(Error::NoFile(path))? else {
            continue;
        };
        gpus.push(gpu);
        all.push(shown);
    }
    let selected = selection.of(&gpus)?;
    Ok(selected.into_iter().map(|at| all[at]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder as the kernel module has it.
    fn listed(gpus: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("there is room for files");
        for (address, text) in gpus {
            let own = folder.path().join(address);
            fs::create_dir(&own).expect("it is new");
            fs::write(own.join("information"), text).expect("there is room for files");
        }
        folder
    }

    const H200: &str = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 40\nGPU UUID: \t GPU-0123abcd-1111-2222-3333-444455556666\n\
        Bus Location: \t 0000:65:00.0\nDevice Minor: \t 3\nGPU Excluded:\t No\n";
    const L4: &str = "Model: \t\t NVIDIA L4\nGPU UUID: \t GPU-????????\nDevice Minor: \t 0\n";

    #[test]
    fn a_gpu_is_found_by_each_of_its_names() {
        let folder = listed(&[("0000:65:00.0", H200), ("0000:17:00.0", L4)]);
        let of = |text: &str| {
            let selection = text.parse().expect("a selection");
            let found = files(&selection, folder.path()).map_err(|error| error.to_string())?;
            Ok::<_, String>(found.into_iter().map(|gpu| gpu.number).collect::<Vec<_>>())
        };
        for (text, numbers) in [
            ("0", vec![0]),
            ("1", vec![3]),
            ("gpu-0123ABCD", vec![3]),
            ("17:00.0", vec![0]),
            ("H200+L4", vec![3, 0]),
        ] {
            assert_eq!(of(text), Ok(numbers), "{text}");
        }
        let found = files(&"1".parse().expect("a selection"), folder.path()).expect("it is there");
        assert_eq!(
            found,
            [Shown {
                number: 3,
                id: 0x6500
            }]
        );
        let excluded = H200.replace("Excluded:\t No", "Excluded:\t Yes");
        let without = listed(&[("0000:05:00.0", &excluded), ("0000:17:00.0", L4)]);
        let found = files(&"0".parse().expect("a selection"), without.path()).expect("it is there");
        assert_eq!(
            found,
            [Shown {
                number: 0,
                id: 0x1700
            }]
        );
        let error = of("A100").expect_err("there is none");
        assert!(error.contains("no GPU matches 'A100'") && error.contains("NVIDIA L4"));
    }

    #[test]
    fn a_list_that_says_too_little_is_an_error() {
        let folder = listed(&[("0000:65:00.0", "Model: NVIDIA H200\n")]);
        let zero = "0".parse().expect("a selection");
        assert!(matches!(files(&zero, folder.path()), Err(Error::NoFile(_))));
        let none = folder.path().join("none");
        assert!(matches!(files(&zero, &none), Err(Error::List(..))));
    }
}
