//! Boots a stock Debian guest and shows its console: on the host's KVM if that runs stock kernels,
//! otherwise in the nested rig.

use std::{
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::Result;
use gantry_build::{
    programs::{self, Build},
    progress::Step,
    target,
};
use gantry_tests::{
    demo::{self, Parts},
    report::DEMO,
    rig::{Binaries, Cache, Images, NEEDED, Rig, packages},
};

/// Timeout for a stock kernel's boot on the host's KVM, after which it counts as not running there.
const PROBE: Duration = Duration::from_secs(20);

/// Options of `cargo xtask demo`.
#[derive(clap::Args)]
pub struct Options {
    /// Use the nested rig even if the host's KVM runs stock kernels.
    #[arg(long)]
    nested: bool,
}

/// Boots the guest.
pub fn run(options: &Options) -> Result<()> {
    packages::install(NEEDED)?;
    programs::choose(Build::Scenario);
    let binaries = programs::build()?;
    let step = Step::new("fetching Debian's kernel and building images");
    let work = target().join("rig");
    let images = Images::build(&Cache::open()?, &binaries, &work)?;
    step.finish();
    let disk = work.join("demo.raw");
    std::fs::File::create(&disk)?.set_len(64 << 20)?;
    match host_kvm(&binaries, &images) {
        Ok(()) if !options.nested => {
            eprintln!("this host's KVM runs stock kernels: the guest runs on it directly");
            return on_this_host(&binaries, &images, &disk);
        }
        Ok(()) => {}
        Err(why) => eprintln!("this host's KVM does not run stock kernels: {why}"),
    }
    eprintln!("the guest runs in the nested rig: QEMU emulates a processor with AMD-V, on which");
    eprintln!("Debian's kernel (L1) runs Gantry under real KVM, and Gantry runs the guest (L2)");
    let rig = Rig {
        images,
        logs: target().join("rig-logs"),
    };
    rig.show(DEMO, |line| println!("{line}"))
}

/// Runs the guest on this host's KVM, with OpenCL on this host's devices.
fn on_this_host(binaries: &Binaries, images: &Images, disk: &Path) -> Result<()> {
    // The kernel unpacks several concatenated archives.
    let mut files = std::fs::read(&images.l2)?;
    files.extend(std::fs::read(&images.l2_opencl)?);
    let initramfs = disk.with_file_name("demo.cpio");
    std::fs::write(&initramfs, files)?;
    // A socket's path has at most 107 bytes, so it is not placed below the target folder.
    let socket = std::env::temp_dir().join(format!("gantry-demo-{}.sock", std::process::id()));
    let mut pool = Command::new(&binaries.opencl.pool)
        .args(["serve", "--socket"])
        .arg(&socket)
        .stdin(Stdio::null())
        .spawn()?;
    let parts = Parts {
        gantry: &binaries.gantry,
        kernel: &images.kernel.image,
        initramfs: &initramfs,
        disk,
        pool: Some(&socket),
    };
    let proven = demo::run(&parts, |line| println!("{line}"));
    let _ = pool.kill();
    let _ = pool.wait();
    let _ = std::fs::remove_file(&socket);
    println!("{}", proven?);
    Ok(())
}

/// Checks that a stock kernel reaches its init on this host's KVM; the error says why it does not.
fn host_kvm(binaries: &Binaries, images: &Images) -> Result<(), String> {
    if !Path::new("/dev/kvm").exists() {
        return Err("there is no /dev/kvm".to_owned());
    }
    let _step = Step::new("trying this host's KVM");
    let log = std::env::temp_dir().join(format!("gantry-probe-{}", std::process::id()));
    let mut gantry = Command::new(&binaries.gantry)
        .arg("--kernel")
        .arg(&images.kernel.image)
        .arg("--initramfs")
        .arg(&images.l2)
        .args(["--cmdline", "console=ttyS0 panic=-1 quiet then=poweroff+-f"])
        .args(["--memory", "size=256M", "--console", "off", "--serial"])
        .arg(format!("file={}", log.display()))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| error.to_string())?;
    let start = Instant::now();
    let ended = loop {
        match gantry.try_wait() {
            Ok(None) if start.elapsed() < PROBE => std::thread::sleep(Duration::from_millis(50)),
            Ok(None) => {
                let _ = gantry.kill();
                break false;
            }
            Ok(Some(_)) => break true,
            Err(error) => return Err(error.to_string()),
        }
    };
    let said = gantry
        .wait_with_output()
        .map_err(|error| error.to_string())?;
    let console = std::fs::read_to_string(&log).unwrap_or_default();
    let _ = std::fs::remove_file(&log);
    if console.contains("init at ") {
        return Ok(());
    }
    if !ended {
        return Err(format!(
            "a guest did not get to its init within {} s",
            PROBE.as_secs()
        ));
    }
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    Err(said
        .lines()
        .last()
        .unwrap_or("the guest ended at once")
        .to_owned())
}
