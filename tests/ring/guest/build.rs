//! Links the programs as kernels with a PVH entry.

fn main() {
    // Read at run time: the folder may have been moved since this script was compiled.
    let folder = std::env::var("CARGO_MANIFEST_DIR").expect("Cargo sets it");
    let script = &format!("{folder}/image.ld");
    for argument in [
        "-nostartfiles",
        "-nodefaultlibs",
        "-static",
        "-no-pie",
        "-Wl,--build-id=none",
        "-Wl,-T",
        script,
    ] {
        println!("cargo:rustc-link-arg-bins={argument}");
    }
    // Behind the RAM of a recording's guest.
    let base = "-Wl,--defsym=base=0x20000000";
    println!("cargo:rustc-link-arg-bin=gantry-gpu-guest={base}");
    println!("cargo:rerun-if-changed={script}");
    println!("cargo:rerun-if-changed=src/boot.s");
}
