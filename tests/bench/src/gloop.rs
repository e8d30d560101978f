//! The cost for kernels of giving back an NVIDIA GPU by themselves.

use std::{fs, path::PathBuf, process::Command};

use anyhow::Result;
use gantry_build::{copy, programs, progress::Step, root, target};
use gantry_host_tests::gloop::{ARCHITECTURES, PROGRAMS, compiler, turns};
use gantry_tests::rig::packages;

/// Measures on this machine's GPU, or only builds, for another machine.
pub fn bench(pack: bool) -> Result<()> {
    packages::install(PROGRAMS)?;
    let folder = build()?;
    if pack {
        println!(
            "everything is in {0}: bring it there, and run `{0}/measure.py`",
            folder.display()
        );
        return Ok(());
    }
    packages::run(&mut Command::new(folder.join("measure.py")))
}

/// Builds the programs and the measuring program into a folder.
fn build() -> Result<PathBuf> {
    let folder = target().join("gloop");
    fs::create_dir_all(&folder)?;
    let built = programs::folder()?;
    let step = Step::new("compiling the kernels");
    for name in ["gloop-eaters", "gantry-arbiter", "libgloop.so"] {
        copy(&built.join(name), &folder.join(name))?;
    }
    packages::run(&mut turns::in_c(&built, &folder.join("turns")))?;
    copy(&root().join("gloop/measure.py"), &folder.join("measure.py"))?;
    let mut compile = Command::new(folder.join("gloop-eaters"));
    compile.args(["compile", "--arch", ARCHITECTURES, "--nvrtc"]);
    packages::output(compile.arg(compiler()?).arg("--into").arg(&folder))?;
    step.finish();
    Ok(folder)
}
