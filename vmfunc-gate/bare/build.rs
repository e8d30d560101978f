//! Links the program as a disk image that a BIOS boots.

fn main() {
    // Read when this runs: the folder known at compile time may have been moved since.
    let folder = std::env::var("CARGO_MANIFEST_DIR").expect("Cargo sets it");
    let script = &format!("{folder}/image.ld");
    for argument in [
        "-nostartfiles",
        "-nodefaultlibs",
        "-static",
        "-no-pie",
        "-Wl,--oformat=binary",
        "-Wl,--build-id=none",
        "-Wl,-T",
        script,
    ] {
        println!("cargo:rustc-link-arg-bins={argument}");
    }
    println!("cargo:rerun-if-changed={script}");
    println!("cargo:rerun-if-changed=src/boot.s");
    println!("cargo:rerun-if-changed=src/guest.s");
}
