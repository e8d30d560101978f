//! Programs of piglit, which nobody here wrote, in a guest on the host's device: they end as they do natively.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{
    Context, Entry,
    accelerator::{accel, counter, start_agent},
};
use crate::{
    gantry::Gantry,
    net::sh,
    opencl::{self, DISK, Pool, ROOT},
    rig::opencl::{PIGLIT, PIGLIT_TESTS},
};

pub const SCENARIOS: &[Entry] = &[(
    "foreign: programs of piglit end in a guest as natively",
    programs,
)];

/// How a program is run, and its results shown (a console is slow), natively and in a guest: in the
/// same file system, which has PoCL for the one, and to which the driver is added for the other.
fn run_as(vendors: &str, command: &str) -> String {
    format!(
        "HOME=/tmp GANTRY_OPENCL_SPIN=20 OCL_ICD_VENDORS={vendors} chroot {ROOT} {command} 2>&1 | \
         grep PIGLIT"
    )
}

fn programs(context: &Context) -> Result<()> {
    let pool = Pool::start(&context.dir)?;
    let more = json!({
        "payload": {"initramfs": opencl::guest_files(&context.dir)?},
        "disks": [{"path": DISK, "readonly": true, "image_type": "Raw"}],
        "accels": [accel(&pool)],
    });
    let (gantry, mut guest) = Gantry::boot(&context.dir, more)?;
    start_agent(&mut guest)?;
    // The agent's socket and the driver are where the programs look for them.
    guest.run(&format!(
        "mkdir {ROOT} && mount -t ext4 -o ro /dev/vda {ROOT} && \
         for d in proc sys dev run tmp; do mount -o bind /$d {ROOT}/$d || exit 1; done; \
         mkdir /run/vendors && cp /lib/x86_64-linux-gnu/libgantry_opencl.so /run/ && \
         echo /run/libgantry_opencl.so >/run/vendors/gantry.icd"
    ))?;
    for test in PIGLIT_TESTS {
        let command = format!("{PIGLIT}/bin/{test} -auto");
        let natively = sh(&run_as("/etc/OpenCL/vendors/", &command))?;
        let natively = results(&natively);
        let text = guest.run(&run_as("/run/vendors/", &command))?;
        ensure!(
            natively == results(&text),
            "{test} ended with {natively:?} natively, and in a guest:\n{text}"
        );
        let passes = natively
            .last()
            .is_some_and(|last| last.contains("\"pass\""));
        ensure!(passes, "{test} ended with {natively:?} natively, too");
    }
    let lost = counter(&gantry, "workers_lost")?;
    ensure!(lost == 0, "{lost} workers have died");
    Ok(())
}

/// The results that a program of piglit says, its parts' first.
fn results(text: &str) -> Vec<&str> {
    let lines = text.lines().filter(|line| line.starts_with("PIGLIT: "));
    lines.map(str::trim_end).collect()
}
