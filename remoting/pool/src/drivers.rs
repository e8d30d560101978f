//! Which OpenCL drivers the serving processes find.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use remoting_proto::wire::api::ApiId;

use super::options::Options;

/// The variable that names the folder or file of the drivers' list.
const NAMED_BY: &str = "OCL_ICD_VENDORS";
/// The folder if the variable is not set.
const VENDORS: &str = "/etc/OpenCL/vendors";

/// Appends a slash to a folder: some loaders find nothing without it.
fn folder(named: OsString) -> PathBuf {
    let path = PathBuf::from(named);
    match path.is_dir() {
        true => path.join(""),
        false => path,
    }
}

/// The environment of a serving process.
pub(super) fn environment() -> Vec<(&'static str, OsString)> {
    let vendors = env::var_os(NAMED_BY).map(|named| (NAMED_BY, folder(named).into()));
    // The host's loader must not find this machine's own remoting driver.
    let off = ("GANTRY_OPENCL", OsString::from("off"));
    vendors.into_iter().chain([off]).collect()
}

/// The drivers that a pool's workers will find, as far as can be seen without opening one: some
/// drivers start threads, or take memory of a device.
pub(super) fn found(options: &Options) -> String {
    if !options.apis.contains(&ApiId::OpenCl) || options.named_library(ApiId::OpenCl).is_some() {
        return String::new();
    }
    let named = env::var_os(NAMED_BY).unwrap_or_else(|| VENDORS.into());
    let alone = env::var_os("OCL_ICD_FILENAMES").is_none();
    found_at(&folder(named), alone)
}

/// The drivers at one place, which is the only one if it is `alone`.
fn found_at(place: &Path, alone: bool) -> String {
    if !place.is_dir() && place.exists() {
        // One driver by its file.
        return format!(", by the driver of {}", place.display());
    }
    let mut names: Vec<_> = fs::read_dir(place)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter_map(|name| Some(name.strip_suffix(".icd")?.to_owned()))
        .collect();
    names.sort();
    match names.is_empty() && alone {
        true => format!(
            ", but {} names no OpenCL driver: applications find no device; install one (PoCL, or the \
             vendor's) and start the pool again",
            place.display()
        ),
        false => format!(
            ", by the drivers of {} ({})",
            place.display(),
            names.join(", ")
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_drivers_is_named_to_workers_with_a_slash_and_a_file_as_it_is() {
        let all = env::temp_dir().join(format!("gantry-drivers-{}", std::process::id()));
        fs::create_dir(&all).unwrap();
        let file = all.join("b.icd");
        fs::write(&file, "libb.so\n").unwrap();
        let text = |path: &Path| folder(path.into()).into_os_string().into_string().unwrap();
        let with = format!("{}/", all.display());
        assert_eq!(text(&all), with);
        assert_eq!(text(with.as_ref()), with);
        assert_eq!(text(&file), file.display().to_string());
        assert_eq!(text("".as_ref()), "");
        assert_eq!(
            found_at(with.as_ref(), true),
            format!(", by the drivers of {with} (b)")
        );
        assert_eq!(
            found_at(&file, true),
            format!(", by the driver of {}", file.display())
        );
        fs::remove_file(&file).unwrap();
        let none = found_at(with.as_ref(), true);
        assert!(none.contains("names no OpenCL driver"), "{none}");
        fs::remove_dir(&all).unwrap();
    }
}
