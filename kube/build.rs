//! Generates messages and services from the files in `proto`.

use std::io;

/// Kubelet's interfaces that are used here.
const FILES: [&str; 2] = ["proto/deviceplugin.proto", "proto/podresources.proto"];

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(FILES, ["proto"]).map_err(io::Error::other)?;
    tonic_prost_build::compile_fds(files)
}
