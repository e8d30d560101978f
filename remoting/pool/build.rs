//! Exports `ioctl` from the workers' program, so that the CUDA driver's library calls it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-link-arg-bin=gantry-accel=-Wl,--export-dynamic-symbol=ioctl");
}
