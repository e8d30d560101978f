//! Determines which entry points a guest's libraries implement, from their source.

use std::{collections::HashSet, fs, path::Path};

use anyhow::{Context, Result};
use gantry_build::root;

/// Returns the quoted strings in a file that start with this prefix.
fn quoted(path: &Path, prefix: &str) -> Result<Vec<String>> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let texts = text.split('"').skip(1).step_by(2);
    let texts = texts.filter(|text| text.starts_with(prefix));
    Ok(texts.map(str::to_owned).collect())
}

/// Returns the entry point that `entry_points!` defines in a line of source.
fn defined(line: &str) -> Option<&str> {
    let (name, _) = line.strip_prefix("    fn cu")?.split_once('(')?;
    name.starts_with(char::is_uppercase).then_some(name)
}

/// The driver's symbols that are implemented by hand or forwarded, as guest/cuda/build.rs finds
/// them.
fn driver() -> Result<HashSet<String>> {
    let mut all: HashSet<_> = quoted(
        &root().join("remoting/proto/src/apis/cuda/forwarded.rs"),
        "cu",
    )?
    .into_iter()
    .collect();
    for entry in fs::read_dir(root().join("guest/cuda/src"))? {
        let text = fs::read_to_string(entry?.path())?;
        let names = text.lines().filter_map(defined);
        all.extend(names.map(|name| format!("cu{name}")));
    }
    Ok(all)
}

/// The runtime's symbols that report that they are not supported.
fn refused_by_runtime() -> Result<HashSet<String>> {
    let path = root().join("guest/cudart/src/refused.rs");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let list = text.rsplit_once("refused! {").map_or("", |(_, list)| list);
    let names = list.split(|one: char| !one.is_ascii_alphanumeric() && one != '_');
    let names = names.filter(|name| name.starts_with("cuda") || name.starts_with("__cuda"));
    Ok(names.map(str::to_owned).collect())
}

/// Returns which of an API's symbols are served, if that differs from what the annotations require
/// of a library.
///
/// # Errors
/// The sources cannot be read.
pub fn of(api: &str) -> Result<Option<Box<dyn Fn(&str) -> bool>>> {
    Ok(match api {
        "driver" => {
            let all = driver()?;
            Some(Box::new(move |symbol| all.contains(symbol)))
        }
        "runtime" => {
            let refused = refused_by_runtime()?;
            Some(Box::new(move |symbol| !refused.contains(symbol)))
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_sources_name_what_they_define() {
        assert_eq!(defined("    fn cuInit(Flags: c_uint) {"), Some("Init"));
        assert_eq!(defined("    fn cuGraphLaunch("), Some("GraphLaunch"));
        assert_eq!(defined("    fn cursor(at: u32) {"), None);
        assert_eq!(defined("fn cuInit(Flags: c_uint) {"), None);
    }

    #[test]
    fn what_is_known_to_be_served_or_refused_is_found() {
        let driver = of("driver").unwrap().unwrap();
        assert!(driver("cuGraphLaunch") && driver("cuGraphUpload"));
        assert!(!driver("cuIpcGetMemHandle"));
        let runtime = of("runtime").unwrap().unwrap();
        assert!(runtime("cudaGraphUpload") && !runtime("cudaIpcGetMemHandle"));
        assert!(of("cublas").unwrap().is_none());
    }
}
