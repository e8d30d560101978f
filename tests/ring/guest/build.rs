//! Links the program as a kernel with a PVH entry.

fn main() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/image.ld");
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
    println!("cargo:rerun-if-changed={script}");
    println!("cargo:rerun-if-changed=src/boot.s");
}
