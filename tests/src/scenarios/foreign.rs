//! Third-party programs in a guest on the host's device end and print the same as natively.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};
use serde_json::json;

use super::{
    Context, Entry,
    accelerator::{accel, counter, start_agent},
};
use crate::{
    gantry::Gantry,
    guest::Guest,
    net::sh,
    opencl::{self, DISK, Pool, ROOT, until},
    rig::opencl::{PIGLIT, PIGLIT_BUILDS, PIGLIT_TESTS},
};

pub const SCENARIOS: &[Entry] = &[
    (
        "foreign: programs of piglit end in a guest as natively",
        |context| piglit(context, PIGLIT_TESTS),
    ),
    // Separate, since a scenario has a time limit.
    (
        "foreign: programs of piglit that build others end in a guest as natively",
        |context| piglit(context, PIGLIT_BUILDS),
    ),
    (
        "foreign: clinfo says in a guest what it says natively, but for what is known",
        clinfo,
    ),
];

/// Differences in clinfo's output in a guest, and their reasons. Nothing else may differ, and all
/// of these must.
const APART: &[(&str, &str)] = &[
    (
        "CL_PLATFORM_VERSION",
        "names Gantry behind the host's platform",
    ),
    (
        "CL_PLATFORM_ICD_SUFFIX_KHR",
        "loaders and clinfo tell drivers apart by it: POCL, and GANTRY",
    ),
    ("CL_PLATFORM_EXTENSIONS", UNSERVED),
    ("CL_PLATFORM_EXTENSIONS_WITH_VERSION", UNSERVED),
    ("CL_DEVICE_EXTENSIONS", UNSERVED),
    ("CL_DEVICE_EXTENSIONS_WITH_VERSION", UNSERVED),
    ("CL_DEVICE_COMMAND_BUFFER_CAPABILITIES_KHR", UNASKED),
    (
        "CL_DEVICE_COMMAND_BUFFER_REQUIRED_QUEUE_PROPERTIES_KHR",
        UNASKED,
    ),
    (
        "CL_DEVICE_SVM_CAPABILITIES",
        "application and device have the same addresses and not one memory: no finer grain",
    ),
    (
        "CL_DEVICE_EXECUTION_CAPABILITIES",
        "functions of the application (native kernels) are in the guest, and the device is not",
    ),
];
const UNSERVED: &str =
    "extensions with entry points, or rules for memory, of their own are not served";
const UNASKED: &str = "of an extension that is not served: clinfo does not ask";

/// How a program is run, and which part of its output is shown (a console is slow), natively and in
/// a guest. Both use the same file system, which has PoCL natively, and to which the driver is
/// added in the guest.
fn run_as(vendors: &str, command: &str, filter: &str) -> String {
    format!(
        "HOME=/tmp GANTRY_OPENCL_SPIN=20 OCL_ICD_VENDORS={vendors} chroot {ROOT} {command} 2>&1 | \
         {filter}"
    )
}

/// A guest with the file system, and the driver in it.
fn start(context: &Context, pool: &Pool) -> Result<(Gantry, Guest)> {
    let more = json!({
        "payload": {"initramfs": opencl::guest_files(&context.dir)?},
        "disks": [{"path": DISK, "readonly": true, "image_type": "Raw"}],
        "accels": [accel(pool)],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    start_agent(&mut guest)?;
    // The agent's socket and the driver are where the programs look for them.
    guest.run(&format!(
        "mkdir {ROOT} && mount -t ext4 -o ro /dev/vda {ROOT} && \
         for d in proc sys dev run tmp; do mount -o bind /$d {ROOT}/$d || exit 1; done; \
         mkdir /run/vendors && cp /usr/local/lib/libgantry_opencl.so /run/ && \
         echo /run/libgantry_opencl.so >/run/vendors/gantry.icd"
    ))?;
    Ok((gantry, guest))
}

/// Output of a program natively and in the guest.
fn both(guest: &mut Guest, command: &str, filter: &str) -> Result<[String; 2]> {
    let natively = sh(&run_as("/etc/OpenCL/vendors/", command, filter))?;
    let (_, there) = guest.status_of(&run_as("/run/vendors/", command, filter))?;
    Ok([natively, there])
}

/// Checks that all workers have ended with their applications, and none earlier.
fn no_worker_was_lost(gantry: &Gantry) -> Result<()> {
    until("the applications' slices are free", || {
        Ok(counter(gantry, "slices_in_use")? == 0)
    })?;
    let lost = counter(gantry, "workers_lost")?;
    ensure!(
        lost == 0,
        "workers that died before their applications: {lost}"
    );
    Ok(())
}

fn piglit(context: &Context, tests: &[&str]) -> Result<()> {
    let pool = Pool::start(&context.dir)?;
    let (gantry, mut guest) = start(context, &pool)?;
    for test in tests {
        let command = format!("{PIGLIT}/bin/{test} -auto");
        let [natively, text] = both(&mut guest, &command, "grep PIGLIT")?;
        let natively = results(&natively);
        ensure!(
            natively == results(&text),
            "{test} ended with {natively:?} natively, and in a guest:\n{text}"
        );
        let passes = natively
            .last()
            .is_some_and(|last| last.contains("\"pass\""));
        ensure!(passes, "{test} ended with {natively:?} natively, too");
        no_worker_was_lost(&gantry)?;
    }
    Ok(())
}

/// The results that a piglit program prints, those of its parts first.
fn results(text: &str) -> Vec<&str> {
    let lines = text.lines().filter(|line| line.starts_with("PIGLIT: "));
    lines.map(str::trim_end).collect()
}

fn clinfo(context: &Context) -> Result<()> {
    // More than there is: PoCL reports a worker's limit as the device's memory.
    let pool = Pool::start_with(&context.dir, &["--heap", "1048576"])?;
    let (gantry, mut guest) = start(context, &pool)?;
    let said = both(&mut guest, "clinfo --raw", "tr -s ' '")?;
    let [natively, there] = said.each_ref().map(|text| properties(text));
    ensure!(
        natively.contains_key("CL_DEVICE_NAME") && natively.len() > 100,
        "clinfo says little natively:\n{}",
        said[0]
    );
    let names: BTreeSet<_> = natively.keys().chain(there.keys()).collect();
    for name in names {
        let (here, there) = (natively.get(name), there.get(name));
        let known = APART.iter().find(|(apart, _)| apart == name);
        ensure!(
            (here == there) == known.is_none(),
            "{name} is {here:?} natively and {there:?} in a guest; known to differ: {known:?}"
        );
    }
    no_worker_was_lost(&gantry)
}

/// The values of each property in clinfo's order: first of the platform, then of its device,
/// without their names as prefixes.
fn properties(text: &str) -> BTreeMap<&str, Vec<&str>> {
    let mut all = BTreeMap::<_, Vec<_>>::new();
    for line in text.lines().map(str::trim) {
        let line = line
            .split_once("] ")
            .filter(|_| line.starts_with('['))
            .map_or(line, |(_, rest)| rest.trim());
        if !line.is_empty() {
            let (name, value) = line.split_once(' ').unwrap_or((line, ""));
            all.entry(name).or_default().push(value.trim());
        }
    }
    all
}
