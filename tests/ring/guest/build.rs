//! Links the programs as kernels with a PVH entry.

fn main() {
    // Asked when this runs: what it was compiled with may be a folder that has been moved since.
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
    // Behind what the guest of a recording had.
    let base = "-Wl,--defsym=base=0x20000000";
    println!("cargo:rustc-link-arg-bin=gantry-gpu-guest={base}");
    println!("cargo:rerun-if-changed={script}");
    println!("cargo:rerun-if-changed=src/boot.s");
}
